"""Models of others, with random weights that transformers makes: read, written, and refused."""

import json
import math

import pytest
import torch
from foreign_models import in_transformers, opened
from helpers import same_logits
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
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
    'llama grouped': ('Llama', dict(num_key_value_heads=2)),
    'llama tied': ('Llama', dict(num_key_value_heads=3, tie_word_embeddings=True,
                                 rms_norm_eps=1e-5)),
    'llama scaled': ('Llama', dict(num_key_value_heads=2, rope_parameters=SCALED, head_dim=16)),
    'llama of one key': ('Llama', dict(num_key_value_heads=1, rope_parameters=FAST)),
    'qwen2 tied': ('Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True,
                                 rope_parameters=FAST)),
    'qwen2': ('Qwen2', dict(num_key_value_heads=6)),
    'qwen3 tied': ('Qwen3', dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)),
    'qwen3': ('Qwen3', dict(num_key_value_heads=3, head_dim=12, rope_parameters=FAST))}


def saved(folder, shape, dtype=torch.float32, **how):
    """A model of transformers in which every weight matters, saved → as transformers opens it."""
    import transformers
    family, more = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**SIZES, **more)
    model = getattr(transformers, f'{family}ForCausalLM')(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    model.to(dtype).save_pretrained(folder, **how)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stored(folder):
    return {name: w for path in sorted(folder.glob('*.safetensors'))
            for name, w in load_file(path).items()}


def tokens(*shape):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', SHAPES)
def test_logits_text_and_tensors_are_those_of_transformers_in_and_out(shape, dtype, tmp_path):
    several = {'max_shard_size': '40KB'} if dtype == torch.bfloat16 else {}
    theirs = saved(tmp_path / 'a', shape, dtype, **several)
    ours = opened(tmp_path / 'a')
    assert same_logits(ours, theirs, tokens(2, 64))
    prompt = tokens(1, 10)
    text, = generate(ours, prompt.tolist(), 40, temperature=0)
    written = theirs.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None,
                              pad_token_id=0)[0, 10:].tolist()
    assert text == written
    (tmp_path / 'b').mkdir()
    write_hf(tmp_path / 'b', ours, ByteTokenizer(), dtype)
    before, after = stored(tmp_path / 'a'), stored(tmp_path / 'b')
    assert before.keys() == after.keys() and all(
        after[name].dtype == dtype and torch.equal(w, after[name]) for name, w in before.items())
    config = json.loads((tmp_path / 'b/config.json').read_text())
    assert config['architectures'] == [f'{SHAPES[shape][0]}ForCausalLM']
    assert dtype != torch.float32 or same_logits(ours, in_transformers(tmp_path / 'b'),
                                                 tokens(2, 64))


def test_the_published_sizes_are_told_from_their_configurations():
    with torch.device('meta'):
        for name, hf, parameters in (
                ('llama', dict(  # Llama-3.2-1B
                    vocab_size=128256, hidden_size=2048, intermediate_size=8192, head_dim=64,
                    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
                    rope_scaling={'factor': 32.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0,
                                  'original_max_position_embeddings': 8192, 'rope_type': 'llama3'},
                    tie_word_embeddings=True, hidden_act='silu'), 1_235_814_400),
                ('qwen2', dict(  # Qwen2.5-0.5B
                    vocab_size=151936, hidden_size=896, intermediate_size=4864,
                    num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                    max_position_embeddings=32768, max_window_layers=24, sliding_window=32768,
                    use_sliding_window=False, rms_norm_eps=1e-6, rope_theta=1000000.0,
                    tie_word_embeddings=True, hidden_act='silu'), 494_032_768),
                ('qwen3', dict(  # Qwen3-0.6B
                    vocab_size=151936, hidden_size=1024, intermediate_size=3072, head_dim=128,
                    num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                    max_position_embeddings=40960, max_window_layers=28, sliding_window=None,
                    use_sliding_window=False, rms_norm_eps=1e-6, rope_theta=1000000,
                    attention_bias=False, tie_word_embeddings=True, hidden_act='silu'),
                 596_049_920)):
            model = GPT(GPTConfig(**ARCHITECTURES[name].read_config(hf)))
            assert model.num_parameters() == parameters


CHANGES = [  # of config.json, and what the line says
    ('model_type', 'mistral', "model_type='mistral'"), ('hidden_act', 'gelu', "hidden_act='gelu'"),
    ('mlp_bias', True, 'mlp_bias=True'), ('attention_bias', True, 'mlp_bias'),
    ('vocab_size', 101, 'lm_head'),
    ('num_hidden_layers', 3, 'is none, expected'), ('num_hidden_layers', 1, 'layers.1.'),
    ('hidden_size', None, 'hidden_size'),
    ('use_sliding_window', True, 'use_sliding_window'), ('num_attention_heads', 5, 'n_head=5'),
    ('num_key_value_heads', 1, 'k_proj'), ('intermediate_size', 100, 'down_proj'),
    ('layer_types', ['sliding_attention'], 'sliding_attention'),
    ('partial_rotary_factor', 0.5, 'partial_rotary_factor=0.5'),
    ('rope_parameters', {'rope_type': 'yarn', 'factor': 4.0}, 'yarn'),
    ('rope_parameters', {**SCALED, 'low_freq_factor': 2.0}, 'low_freq_factor=2.0')]


def refused(folder):
    with pytest.raises(UserError) as e:
        opened(folder)
    assert len(str(e.value).splitlines()) == 1 and str(folder) in str(e.value)
    return str(e.value)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('llama')
    saved(folder, 'llama grouped')
    return folder


@pytest.mark.parametrize(('key', 'value', 'words'), CHANGES, ids=lambda value: str(value)[:40])
def test_a_configuration_that_we_do_not_compute_is_refused_in_a_line(
        folder, tmp_path, key, value, words):
    whole = json.loads((folder / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({**whole, key: value}))
    (tmp_path / 'model.safetensors').symlink_to(folder / 'model.safetensors')
    assert words in refused(tmp_path)


def test_weights_that_are_not_finite_are_named_in_a_line(folder, tmp_path):
    key = 'model.layers.1.self_attn.k_proj.weight'
    weights = load_file(folder / 'model.safetensors')
    save_file({**weights, key: weights[key] * math.inf}, tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text((folder / 'config.json').read_text())
    assert 'not finite' in refused(tmp_path)
