"""Every model goes out: what export.py writes computes the same in transformers, and comes back."""

import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
import yaml
from foreign_models import STRANGE, in_transformers, opened, shaken, tokens
from processes import ROOT
from runs import TINY, same_logits
from test_gguf import tokenizer_of

import export
import train
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.data import tokenizers
from plaingpt.inference.generation import check_cache, generate
from plaingpt.inference.gguf_export import write_gguf
from plaingpt.inference.hf_architectures import OWN_CODE, choose_architecture
from plaingpt.inference.hf_export import hf_tokenizer, write_hf
from plaingpt.inference.pretrained import open_pretrained
from plaingpt.system.errors import UserError
from plaingpt.training.settings import TrainConfig

BYTES = tokenizers.ByteTokenizer()
LLAMA = dict(rotary=True, rmsnorm=True, mlp='swiglu')
RECIPES = {'quickstart': 'plaingpt', 'quickstart qwen3_shape': 'qwen3', 'own_text': 'qwen3',
           'shakespeare_char_cpu': 'gpt2',
           'shakespeare_char_cpu_fast': 'plaingpt', 'shakespeare_char_cpu_best': 'plaingpt',
           'tiny': 'gpt2', 'finetune_chat': 'gpt2'}
SHAPES = {
    'gpt2': {}, 'gpt2 plain': dict(mlp='relu2', tied_head=False, bias=False),
    'llama': LLAMA, 'llama plain': dict(LLAMA, tied_head=False, bias=False),
    'llama 9 heads 3 keys': dict(LLAMA, n_head=9, n_embd=72, n_kv_head=3, bias=False),
    'qwen2': dict(LLAMA, qkv_bias=True, bias=False, n_kv_head=2),
    'qwen3': dict(LLAMA, qk_norm=True, tied_head=False, bias=False),
    'qwen3 2 keys of 16': dict(LLAMA, qk_norm=True, bias=False, n_kv_head=2, head_dim=16),
    'plaingpt conv': dict(conv=3), 'plaingpt grouped': dict(rotary=True, n_kv_head=1, conv=2),
    'plaingpt documents': dict(conv=2, document_attention=True, document_start=256)}


def exported(folder, model, tokenizer=BYTES):
    folder.mkdir(exist_ok=True)
    write_hf(folder, model, tokenizer)
    return folder


def shape_of(recipe):
    configs = [str(ROOT / f'config/{name}.py') for name in recipe.split()]
    config = load_config(TrainConfig, [*configs, '--n_layer=2', '--n_head=4', '--n_embd=48',
                                       '--block_size=64', '--device=cpu', '--dropout=0'])
    return vars(config.gpt_config(257, 256))


@pytest.mark.parametrize('name', [*RECIPES, *SHAPES])
def test_an_export_has_the_logits_and_the_text_in_transformers_and_comes_back(name, tmp_path):
    kind = RECIPES.get(name, name.split()[0])
    ours = shaken(**(shape_of(name) if name in RECIPES else {'block_size': 64, **SHAPES[name]}))
    theirs = in_transformers(exported(tmp_path / 'a', ours))
    assert theirs.config.model_type == kind and theirs.generation_config.eos_token_id == [256]
    idx = tokens(256, 2, 64)
    plain = GPT(GPTConfig(**{**vars(ours.config), 'document_attention': False}))
    plain.load_state_dict(ours.state_dict())
    assert (plain.eval()(idx)[0] - theirs(idx).logits).abs().max() < 1e-4
    prompts = [idx[0, :10].tolist(), idx[1, :6].tolist()]
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    for more in {}, {'use_cache': False}:
        written = theirs.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=40,
                                  eos_token_id=None, pad_token_id=0, **more)[:, 10:]
        assert written.tolist() == generate(plain, prompts, 40, temperature=0)
    theirs.save_pretrained(tmp_path / 'theirs')
    for folder in tmp_path / 'a', tmp_path / 'theirs':
        assert torch.equal(opened(folder)(idx)[0], plain(idx)[0])


def changed_model(folder, monkeypatch, line, change, **flags):
    """A model of a model.py in which `line` was changed, with what that file holds."""
    text = (ROOT / 'model.py').read_text()
    assert line in text
    (folder / 'model.py').write_text(text.replace(line, change))
    spec = importlib.util.spec_from_file_location('changed', folder / 'model.py')
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'changed', module)
    spec.loader.exec_module(module)
    return shaken(GPT=module.GPT, GPTConfig=module.GPTConfig, **flags)


ATTENTION, DROP = 'y = attention(', 'x = self.transformer.drop(x)'
CHANGED = {  # a line of model.py, what it becomes, flags
    'the branch counts twice': ('x + self.mlp(', 'x + 2 * self.mlp(', {}),
    'an activation': ("partial(F.gelu, approximate='tanh')", 'F.silu', {}),
    'embeddings are scaled': (DROP, 'x = 1.01 * x', {}),
    'another norm': (DROP, 'x = F.rms_norm(x, x.shape[-1:])', {}),
    'late positions differ': (DROP, 'x = torch.cat((x[:, :60], 1.1 * x[:, 60:]), dim=1) '
                                    'if cache is None else x', {}),
    'logits are capped': ('return self.lm_head(x)[..., :self.config.vocab_size]',
                          'return 30 * torch.tanh(self.lm_head(x) / 30)[..., :self.config.'
                          'vocab_size]', {}),
    'forward scales the logits': ('logits = self.logits(x)  # (B, T, V)',
                                  'logits = self.logits(x) / 2', {}),
    'attention is scaled': (ATTENTION, f'q = 0.8 * q\n        {ATTENTION}', {}),
    'a window': (ATTENTION, 'queries = torch.arange(T) if cache is None else cache.columns\n'
                            '        distance = queries[:, None] - torch.arange(k.size(2))\n'
                            '        near = (distance >= 0) & (distance < 40)\n'
                            '        mask = near if mask is None else near & mask\n'
                            f'        {ATTENTION}', {}),
    'a window without a cache': ('else documents.mask\n', 'else documents.mask\n        mask = '
                                 'torch.ones(T, T).tril().triu(-40).bool()\n', {}),
    'angles of positions': ('(2 * math.pi)  # within', '(3 * math.pi)  # within',
                            dict(LLAMA, rotary_factor=4.0, rotary_length=16)),
    'queries are not normalized': ('self.q_norm(q.view(B, T, -1, D))', 'q.view(B, T, -1, D)',
                                   dict(LLAMA, qk_norm=True, bias=False))}


@pytest.mark.parametrize('name', CHANGED)
def test_a_network_that_its_user_changed_goes_out_as_it_is_or_not_at_all(
        name, tmp_path, monkeypatch):
    line, change, flags = CHANGED[name]
    ours = changed_model(tmp_path, monkeypatch, line, change, block_size=64, **flags)
    with pytest.raises(UserError, match=r'model\.py'):
        write_gguf(tmp_path / 'a.gguf', ours, BYTES, 'float32')
    if name in ('late positions differ', 'forward scales the logits',
                'a window without a cache'):  # but not with a cache
        with pytest.raises(UserError, match=r'model\.py: '):
            exported(tmp_path / 'a', ours)
        return
    folder = exported(tmp_path / 'a', ours)
    assert change in (folder / 'model.py').read_text()
    assert same_logits(ours, in_transformers(folder), tokens(256, 2, 64))


def test_a_long_window_that_ignores_the_cache_is_told_before_a_text_is_written(
        tmp_path, monkeypatch):
    line, change, flags = CHANGED['a window without a cache']  # of 40 tokens
    ours = changed_model(tmp_path, monkeypatch, line, change, block_size=64, **flags)
    with pytest.raises(UserError, match='KV cache'):
        check_cache(ours)


def test_a_weight_that_an_architecture_has_not_takes_the_own_code(tmp_path):
    for model in shaken(), shaken(**LLAMA):
        model.gate = torch.nn.Parameter(torch.zeros(1))
        assert choose_architecture(model) == OWN_CODE


def test_a_flag_that_no_architecture_lists_takes_the_own_code_unless_it_has_its_default(tmp_path):
    @dataclass
    class FutureConfig(GPTConfig):
        alibi: bool = False

    for flags in {}, LLAMA:
        model = GPT(FutureConfig(32, 257, 2, 4, 48, **flags))
        assert not (exported(tmp_path / 'a', model) / 'model.py').exists()
        model.config.alibi = True
        assert (exported(tmp_path / 'b', model) / 'model.py').exists()
        shutil.rmtree(tmp_path / 'b')


def test_a_model_of_someones_own_ids_goes_out_without_a_tokenizer(tmp_path):
    ours, ids = shaken(block_size=64), tokenizers.IdsTokenizer(257)
    folder = exported(tmp_path / 'a', ours, ids)
    assert not (folder / 'tokenizer.json').exists()
    assert same_logits(ours, in_transformers(folder), tokens(256, 2, 64))
    export.main([f'--init_from={folder}', f'--dest={tmp_path}/b'])
    assert open_pretrained(tmp_path / 'b').tokenizer_json() == ids.to_json()


def test_weights_of_half_the_bytes_are_computed_with_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM
    ours = shaken(rotary=True, conv=3)
    write_hf(tmp_path, ours, BYTES, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    expected, found = ours(tokens(256, 2, 64))[0], theirs(tokens(256, 2, 64)).logits
    assert found.dtype == torch.bfloat16
    assert 0 < (found.float() - expected).norm() / expected.norm() < 0.03


def test_a_run_goes_out_with_the_facts_of_it_and_another_starts_from_the_folder(
        tmp_path, char_data, capsys):
    tiny = [*TINY, f'--dataset={char_data}', '--conv=4', '--rotary']
    train.main([*tiny, '--out_dir=out'])
    for name, source in (('a', '--out_dir=out'), ('b', '--init_from=a')):
        capsys.readouterr()
        export.main([source, f'--dest={name}'])
        assert capsys.readouterr().out.splitlines()[-1].endswith('trust_remote_code=True)')
    for path in (tmp_path / 'a').iterdir():
        if path.name != 'README.md':
            assert path.read_bytes() == (tmp_path / 'b' / path.name).read_bytes()
    train.main([*TINY, f'--dataset={char_data}', '--init_from=a', '--out_dir=again',
                '--max_iters=1'])
    state = json.loads(next((tmp_path / 'again').rglob('state.json')).read_text())
    assert state['model']['conv'] == 4
    card = (tmp_path / 'a/README.md').read_text()
    state = json.loads((tmp_path / 'out/checkpoints/iter-00000006/state.json').read_text())
    loss = f'{state["val_loss"]:.4f} ± {state["val_loss_stderr"]:.4f}'
    assert f'| {loss} nats a token |' in card and '| code_char |' in card
    assert str(tmp_path) not in card and str(char_data.parent) not in card
    assert yaml.safe_load(card.split('---')[1])['library_name'] == 'transformers'


# -----------------------------------------------------------------------------
# tokenizers


@pytest.mark.parametrize('kind', [
    'char', 'byte', 'bpe:700', pytest.param('gpt2', marks=pytest.mark.slow)])
def test_tokenizers_open_in_transformers_and_agree(kind, text_file, tmp_path, monkeypatch):
    from transformers import AutoTokenizer
    text = text_file.read_text(encoding='utf-8')
    ours = tokenizer_of(kind, monkeypatch, [text, *STRANGE])
    theirs = AutoTokenizer.from_pretrained(
        exported(tmp_path / 'a', shaken(vocab_size=ours.vocab_size), ours))
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == ours.end_of_text
    for piece in [text[:20_000], *STRANGE]:
        ids = ours.encode(piece).tolist()
        assert theirs.encode(piece) == ids
        assert theirs.decode(ids) == piece
    if ours.end_of_text is not None:
        assert theirs.encode('a<|endoftext|>')[-1] == ours.end_of_text
    if kind == 'gpt2':
        made = hf_tokenizer(ours)['model']  # the published merges
        assert made['merges'][:3] == ['Ġ t', 'Ġ a', 'h e'] and len(made['merges']) == 50_000
        assert made['merges'][-1] == 'Ġg azed' and made['vocab']['ĠGitHub'] == 21722
