"""Models of others, with random weights that transformers makes: read, written, and refused."""

import json
import math

import pytest
import torch
from foreign_models import opened, tokens
from runs import same_logits
from safetensors.torch import load_file, save_file

from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference.generation import generate
from plaingpt.inference.hf_architectures import ARCHITECTURES
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.errors import UserError

SIZES = dict(vocab_size=100, hidden_size=48, intermediate_size=112, num_hidden_layers=2,
             num_attention_heads=6, max_position_embeddings=64, initializer_range=0.2)
SCALED = {'rope_type': 'llama3', 'rope_theta': 500000.0, 'factor': 8.0, 'low_freq_factor': 1.0,
          'high_freq_factor': 4.0, 'original_max_position_embeddings': 64}
FAST = {'rope_type': 'default', 'rope_theta': 1e6}
SHAPES = {
    'gpt2': ('GPT2', {}),
    'llama grouped': ('Llama', dict(num_key_value_heads=2)),
    'llama tied': ('Llama', dict(num_key_value_heads=3, tie_word_embeddings=True,
                                 rms_norm_eps=1e-5)),
    'llama scaled': ('Llama', dict(num_key_value_heads=2, rope_parameters=SCALED, head_dim=16)),
    'qwen2 tied': ('Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True,
                                 rope_parameters=FAST)),
    'qwen3 tied': ('Qwen3', dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True))}


def saved(folder, shape, dtype=torch.float32, **how):
    """A model of transformers in which every weight matters, saved → as transformers opens it."""
    import transformers
    family, more = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    model.to(dtype).save_pretrained(folder, **how)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stored(folder):
    return {name: w for path in sorted(folder.glob('*.safetensors'))
            for name, w in load_file(path).items()}


@pytest.mark.parametrize('shape', SHAPES)
def test_a_pretrained_model_computes_the_same_as_in_transformers(shape, tmp_path):
    theirs = saved(tmp_path, shape)
    ours = opened(tmp_path)
    assert same_logits(ours, theirs, tokens(100, 2, 64))
    prompt = tokens(100, 1, 10)
    expected = theirs.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None,
                               pad_token_id=0)[0, 10:].tolist()
    assert generate(ours, prompt.tolist(), 40, temperature=0) == [expected]


@pytest.mark.parametrize('shape', SHAPES)
def test_a_pretrained_model_is_exported_with_the_same_tensors(shape, tmp_path):
    theirs = saved(tmp_path / 'a', shape, torch.bfloat16, max_shard_size='40KB')
    (tmp_path / 'b').mkdir()
    write_hf(tmp_path / 'b', opened(tmp_path / 'a'), ByteTokenizer(), torch.bfloat16)
    before, after = stored(tmp_path / 'a'), stored(tmp_path / 'b')
    assert before.keys() == after.keys()
    for name, w in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(w, after[name]), name
    config = json.loads((tmp_path / 'b/config.json').read_text())
    assert config['architectures'] == [type(theirs).__name__]


def test_configurations_of_transformers_4_are_read_as_those_of_5(tmp_path):
    architecture, scaled = ARCHITECTURES['llama'], dict(SCALED)
    saved(tmp_path, 'llama scaled')
    new = json.loads((tmp_path / 'config.json').read_text())
    rope = {'rope_theta': scaled.pop('rope_theta'), 'rope_scaling': scaled}
    old = {key: value for key, value in new.items() if key != 'rope_parameters'}
    config = architecture.read_config({**old, **rope})
    assert config == architecture.read_config(new)
    assert config.rotary_factor == 8


CHANGES = [  # of config.json, and what the error names
    ('model_type', 'mistral', 'mistral'), ('hidden_act', 'gelu', 'hidden_act'),
    ('mlp_bias', True, 'mlp_bias'), ('vocab_size', 101, 'lm_head'),
    ('num_hidden_layers', 3, 'layers.2.'), ('num_hidden_layers', 1, 'layers.1.'),
    ('hidden_size', None, 'hidden_size'), ('use_sliding_window', True, 'use_sliding_window'),
    ('num_key_value_heads', 1, 'k_proj'), ('layer_types', ['sliding_attention'], 'layer_types'),
    ('partial_rotary_factor', 0.5, 'partial_rotary_factor'),
    ('rope_parameters', {'rope_type': 'yarn', 'factor': 4.0}, 'yarn'),
    ('rope_parameters', {**SCALED, 'low_freq_factor': 2.0}, 'low_freq_factor')]
GPT2_CHANGES = [
    ('activation_function', 'silu', 'activation_function'),
    ('scale_attn_by_inverse_layer_idx', True, 'scale_attn_by_inverse_layer_idx'),
    ('n_inner', 7, 'mlp'), ('n_head', 5, 'n_embd')]


def refused(source):
    """The one line that says why a model is refused."""
    with pytest.raises(UserError) as e:
        opened(source)
    assert str(source) in str(e.value)
    [line] = str(e.value).splitlines()
    return line


@pytest.mark.parametrize(('shape', 'changes'), [('llama grouped', CHANGES), ('gpt2', GPT2_CHANGES)])
def test_a_configuration_that_we_do_not_compute_is_refused_in_a_line(shape, changes, tmp_path):
    saved(tmp_path, shape)
    whole = json.loads((tmp_path / 'config.json').read_text())
    for key, value, words in changes:
        (tmp_path / 'config.json').write_text(json.dumps({**whole, key: value}))
        assert words in refused(tmp_path), (key, value)


def test_weights_that_are_not_finite_are_named_in_a_line(tmp_path):
    saved(tmp_path, 'llama grouped')
    key, path = 'model.layers.1.self_attn.k_proj.weight', tmp_path / 'model.safetensors'
    weights = load_file(path)
    save_file({**weights, key: weights[key] * math.inf}, path)
    assert 'transformer.h.1.attn.c_attn.weight' in refused(tmp_path)
