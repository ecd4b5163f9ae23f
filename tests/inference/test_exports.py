"""Every model goes out: what export.py writes computes the same in transformers, and comes back."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from foreign_models import STRANGE, in_transformers, opened, shaken, tokens
from processes import ROOT, fails
from runs import same_logits
from safetensors.torch import load_file, save_file
from sample_data import CHAT, make_tokenizer

import export
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.core.settings import TrainConfig
from plaingpt.data import tokenizers
from plaingpt.inference import open_weights
from plaingpt.inference.generation import check_cache, generate
from plaingpt.inference.gguf_export import write_gguf
from plaingpt.inference.hf_export import check_export, hf_tokenizer, write_hf
from plaingpt.inference.pretrained import open_pretrained
from plaingpt.system.errors import UserError

BYTES = tokenizers.ByteTokenizer()
LLAMA = dict(rotary=True, rmsnorm=True, mlp='swiglu')
RECIPES = {'quickstart': 'plaingpt', 'quickstart qwen3_shape': 'qwen3', 'own_text': 'qwen3',
           'shakespeare_char_cpu': 'gpt2',
           'shakespeare_char_cpu_fast': 'plaingpt', 'shakespeare_char_cpu_best': 'plaingpt',
           'tiny': 'gpt2', 'finetune_chat': 'gpt2'}
SHAPES = {
    'gpt2': dict(mlp='relu2', tied_head=False, bias=False), 'llama': LLAMA,
    'llama 9 heads 3 keys': dict(LLAMA, n_head=9, n_embd=72, n_kv_head=3, bias=False),
    'qwen2': dict(LLAMA, qkv_bias=True, bias=False, n_kv_head=2),
    'qwen3 2 keys of 16': dict(LLAMA, qk_norm=True, bias=False, n_kv_head=2, head_dim=16),
    'plaingpt documents': dict(rotary=True, n_kv_head=1, conv=2, document_attention=True,
                               document_start=256)}


def exported(folder, model, tokenizer=BYTES):
    folder.mkdir(exist_ok=True)
    write_hf(folder, model, tokenizer)
    return folder


def shape_of(recipe):
    configs = [str(ROOT / f'config/{name}.py') for name in recipe.split()]
    config = load_config(TrainConfig, [*configs, '--n_layer=2', '--n_head=4', '--n_embd=48',
                                       '--block_size=64', '--device=cpu', '--dropout=0'])
    return vars(config.gpt_config(257, 256))


@pytest.mark.parametrize('name', [*SHAPES, *(
    pytest.param(name, marks=pytest.mark.slow) for name in RECIPES)])
def test_an_export_computes_the_same_in_transformers(name, tmp_path):
    kind = RECIPES.get(name, name.split()[0])
    ours = shaken(**(shape_of(name) if name in RECIPES else {'block_size': 64, **SHAPES[name]}))
    theirs = in_transformers(exported(tmp_path / 'a', ours))
    assert theirs.config.model_type == kind
    idx = tokens(256, 2, 64)
    plain = GPT(GPTConfig(**{**vars(ours.config), 'document_attention': False}))
    plain.load_state_dict(ours.state_dict())
    assert (plain.eval()(idx)[0] - theirs(idx).logits).abs().max() < 1e-4
    prompts = [idx[0, :10].tolist(), idx[1, :6].tolist()]
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    for use_cache in True, False:
        texts = theirs.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=40,
                                eos_token_id=None, pad_token_id=0, use_cache=use_cache)[:, 10:]
        assert texts.tolist() == generate(plain, prompts, 40, temperature=0)
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


ATTENTION = 'y = self.sdpa('
EMBEDDING = 'x = self.transformer.wte(idx)'
CHANGED = {  # a line of model.py, what it becomes, flags
    'the branch counts twice': ('x + self.mlp(', 'x + 2 * self.mlp(', {}),
    'a window': (ATTENTION, 'queries = torch.arange(T) if cache is None else cache.columns\n'
                            '        distance = queries[:, None] - torch.arange(k.size(2))\n'
                            '        near = (distance >= 0) & (distance < 40)\n'
                            '        mask = near if mask is None else near & mask\n'
                            f'        {ATTENTION}', {}),
    'one token': (EMBEDDING, f'{EMBEDDING} * (1 + (idx == 250))[..., None]', {}),
    'repeated tokens': (EMBEDDING, 'earlier = F.pad(idx, (1, 0))[:, :-1] if cache is None else '
                                   'cache.tokens.prepend_earlier(idx[..., None], 1)[:, :-1, 0]\n'
                                   f'        {EMBEDDING} * (1 + (idx == earlier))[..., None]', {}),
    'activation': ("'gelu': partial(F.gelu, approximate='tanh')", "'gelu': F.gelu", {}),
    'queries are not normalized': ('self.q_norm(q.view(B, T, -1, D))', 'q.view(B, T, -1, D)',
                                   dict(LLAMA, qk_norm=True, bias=False))}
INCONSISTENT = {  # with a cache the model computes something else than without
    'forward scales the logits': ('return self.logits(x), None',
                                  'return self.logits(x) / 2, None', {}),
    'values with a cache': ('cache.extend(k, v)', 'cache.extend(k, 1.1 * v)', {}),
    'repeated tokens without a cache': (
        EMBEDDING, 'earlier = F.pad(idx, (1, 0), value=-1)[:, :-1]\n'
                   f'        {EMBEDDING} * (1 + (idx == earlier))[..., None]', {}),
    'a window without a cache': ('else documents.mask\n', 'else documents.mask\n        mask = '
                                 'torch.ones(T, T).tril().triu(-40).bool()\n', {})}


@pytest.mark.parametrize('name', CHANGED)
def test_a_network_that_its_user_changed_is_exported_with_its_code(name, tmp_path, monkeypatch):
    line, change, flags = CHANGED[name]
    ours = changed_model(tmp_path, monkeypatch, line, change, block_size=64, **flags)
    folder = exported(tmp_path / 'a', ours)
    assert change in (folder / 'model.py').read_text()
    assert same_logits(ours, in_transformers(folder), tokens(256, 2, 64))
    with pytest.raises(UserError, match=r'model\.py'):  # llama.cpp runs no code of ours
        write_gguf(tmp_path / 'a.gguf', ours, BYTES, 'float32')


@pytest.mark.parametrize('name', INCONSISTENT)
def test_a_network_that_computes_something_else_with_a_cache_is_not_exported(
        name, tmp_path, monkeypatch):
    ours = changed_model(tmp_path, monkeypatch, *INCONSISTENT[name][:2], block_size=64)
    with pytest.raises(UserError, match=r'model\.py'):
        exported(tmp_path / 'a', ours)


def test_a_network_that_ignores_the_cache_writes_no_text(tmp_path, monkeypatch):
    line, change, _ = INCONSISTENT['a window without a cache']  # of 40 tokens
    with pytest.raises(UserError, match='KV cache'):
        check_cache(changed_model(tmp_path, monkeypatch, line, change, block_size=64))


@pytest.fixture(scope='module')
def own_code(tmp_path_factory):
    """A model that is exported with its code, as transformers opens it."""
    return in_transformers(exported(tmp_path_factory.mktemp('own'), shaken(block_size=64, conv=3)))


@pytest.mark.parametrize('name', ['cache', 'past_key_values'])
def test_own_code_takes_a_cache_by_either_name(name, own_code):
    from transformers import DynamicCache
    idx = tokens(256, 2, 20)
    cache = DynamicCache()
    parts = [own_code(part, **{name: cache}) for part in idx.split([8, 1, 11], dim=1)]
    logits = torch.cat([part.logits for part in parts], dim=1)
    assert (logits - own_code(idx).logits).abs().max() < 1e-4
    assert parts[0].past_key_values is cache  # in 5.24 another name of its output's cache


def test_own_code_refuses_a_cache_that_it_does_not_know(own_code):
    from transformers import DynamicCache, StaticCache
    idx = tokens(256, 1, 8)
    static = StaticCache(config=own_code.config, max_cache_len=64)
    for cache in static, ((idx, idx),), [DynamicCache()], {}, idx:
        for name in 'cache', 'past_key_values':
            with pytest.raises(TypeError, match='Cache'):
                own_code(idx, **{name: cache})
    for name in 'kv_cache', 'cache_params', 'state':
        for cache in DynamicCache(), static, ((idx, idx),):
            with pytest.raises(TypeError, match=name):
                own_code(idx, **{name: cache})
    with pytest.raises(TypeError, match='past_key_values'):
        own_code(idx, cache=DynamicCache(), past_key_values=DynamicCache())


def test_own_code_refuses_a_token_whose_cache_is_missing(own_code):
    with pytest.raises(ValueError, match='attention_mask'):
        own_code(tokens(256, 2, 1), attention_mask=torch.ones(2, 9))


def test_a_model_of_someones_own_ids_is_exported_without_a_tokenizer(tmp_path):
    ours, ids = shaken(block_size=64), tokenizers.IdsTokenizer(257)
    folder = exported(tmp_path / 'a', ours, ids)
    assert not (folder / 'tokenizer.json').exists()
    assert same_logits(ours, in_transformers(folder), tokens(256, 2, 64))
    export.main([f'--init_from={folder}', f'--dest={tmp_path}/b'])
    assert open_pretrained(tmp_path / 'b').tokenizer_json() == ids.to_json()


# -----------------------------------------------------------------------------
# the command


CHECKED = {'gpt2': {}, 'llama': LLAMA, 'own code': dict(conv=3),
           'chat': dict(vocab_size=CHAT.vocab_size),
           'documents': dict(document_attention=True, document_start=256)}


@pytest.fixture
def pretrained(request):
    """A folder to export."""
    model = shaken(**{'block_size': 64, **CHECKED[request.param]})
    return exported(Path('in'), model, CHAT if request.param == 'chat' else BYTES)


def change_exports(monkeypatch, change):
    """change(folder) happens to each folder that export.py has just written."""
    def write_and_change(folder, *rest):
        architecture = write_hf(folder, *rest)
        change(folder)
        return architecture
    monkeypatch.setattr(export, 'write_hf', write_and_change)


def negate_layer(folder):
    path = folder / 'model.safetensors'
    weights = {name: -w if '.1.' in name else w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={'format': 'pt'})


@pytest.mark.parametrize('name', [*CHANGED, *INCONSISTENT])
def test_an_architecture_that_an_edited_network_does_not_compute_is_refused(
        name, tmp_path, capsys, monkeypatch):
    line, change, flags = {**CHANGED, **INCONSISTENT}[name]
    folder = exported(Path('in'), shaken(block_size=64, **flags))
    ours = changed_model(tmp_path, monkeypatch, line, change, block_size=64)
    monkeypatch.setattr(open_weights, 'GPT', type(ours))
    kind = json.loads((folder / 'config.json').read_text())['model_type']
    before = {*Path().iterdir()}
    assert '--format=transformers' in fails(
        capsys, monkeypatch, export.main, f'--init_from={folder}', f'--format={kind}', '--dest=out')
    assert {*Path().iterdir()} == before


def test_an_edited_network_is_exported_as_an_architecture_that_it_still_computes(
        tmp_path, capsys, monkeypatch):
    folder = exported(Path('in'), shaken(block_size=64))
    ours = changed_model(tmp_path, monkeypatch, EMBEDDING, f'{EMBEDDING} * 1.0', block_size=64)
    monkeypatch.setattr(open_weights, 'GPT', type(ours))
    export.main([f'--init_from={folder}', '--dest=code'])
    assert '--format=gpt2' in capsys.readouterr().out
    assert Path('code/model.py').exists()
    export.main([f'--init_from={folder}', '--dest=gpt2', '--format=gpt2'])
    assert not Path('gpt2/model.py').exists()


@pytest.mark.parametrize('pretrained', ['gpt2', 'own code'], indirect=True)
def test_a_model_that_transformers_computes_differently_is_refused(pretrained, capsys, monkeypatch):
    change_exports(monkeypatch, negate_layer)
    assert 'transformers' in fails(capsys, monkeypatch, export.main, f'--init_from={pretrained}',
                                   '--dest=out')
    assert [*Path().iterdir()] == [pretrained]


@pytest.mark.parametrize(('pretrained', 'dtype'), [
    ('llama', 'float32'), ('chat', 'float32'), ('documents', 'float32'), ('gpt2', 'bfloat16'),
    ('own code', 'bfloat16')], indirect=['pretrained'])
def test_a_model_that_transformers_computes_equally_is_exported(dtype, pretrained, hub, capsys):
    export.main([f'--init_from={pretrained}', '--dest=out', f'--dtype={dtype}'])
    assert not hub.requests  # it was opened without the network
    assert not capsys.readouterr().err
    assert Path('out/README.md').exists()


def test_an_export_is_compared_on_the_text_that_is_given(tmp_path):
    ours = shaken(block_size=64, tied_head=False)
    folder = exported(tmp_path / 'a', ours)
    weights = load_file(folder / 'model.safetensors')
    weights['transformer.wte.weight'][200] *= 2
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    assert check_export(folder, ours, text=[1, 2, 3]) < 1e-5
    assert check_export(folder, ours, text=[1, 200, 3]) > 0.01


def test_the_text_is_the_validation_split_of_the_run(trained, char_data, tmp_path):
    ids = export.validation_tokens(open_weights.open_weights(trained))
    assert ids.tolist() == np.fromfile(char_data / 'val.bin', '<u2')[:len(ids)].tolist() != []
    assert not export.validation_tokens(open_pretrained(exported(tmp_path / 'a', shaken())))


def test_an_export_whose_cache_transformers_does_not_use_is_refused(capsys, monkeypatch):
    def ignore_cache(folder):
        code = (folder / 'remote_code.py').read_text()
        assert 'if cache is None' in code
        (folder / 'remote_code.py').write_text(code.replace('if cache is None', 'if True'))

    folder = exported(Path('in'), shaken(block_size=64, conv=3))
    change_exports(monkeypatch, ignore_cache)
    fails(capsys, monkeypatch, export.main, f'--init_from={folder}', '--dest=out')
    assert [*Path().iterdir()] == [folder]


def test_an_export_says_if_it_was_not_compared(capsys, monkeypatch):
    folder = exported(Path('in'), shaken(block_size=64))
    monkeypatch.setitem(sys.modules, 'transformers', None)  # as if it were not installed
    export.main([f'--init_from={folder}', '--dest=out'])
    assert 'transformers 5' in capsys.readouterr().out
    assert Path('out/model.safetensors').exists()
    assert 'pip install transformers' in fails(
        capsys, monkeypatch, export.main, f'--init_from={folder}', '--dest=gpt2', '--format=gpt2')
    assert not Path('gpt2').exists()


def test_an_architecture_that_cannot_express_a_model_is_refused(capsys, monkeypatch):
    folder = exported(Path('in'), shaken(block_size=64))
    line = fails(capsys, monkeypatch, export.main, f'--init_from={folder}', '--dest=out',
                 '--format=llama')
    for flag in ('--rotary=True', '--rmsnorm=True', '--mlp=swiglu', '--format=transformers'):
        assert flag in line
    assert [*Path().iterdir()] == [folder]


def test_an_export_of_an_export_is_the_same(trained):
    export.main([f'--out_dir={trained}', '--dest=a'])
    export.main(['--init_from=a', '--dest=b'])
    for path in Path('a').iterdir():
        if path.name != 'README.md':
            assert path.read_bytes() == (Path('b') / path.name).read_bytes()


def test_the_card_of_an_export_has_the_facts_of_the_run(trained, char_data):
    export.main([f'--out_dir={trained}', '--checkpoint=6', '--dest=a'])
    card = Path('a/README.md').read_text()
    [checkpoint] = trained.rglob('iter-00000006/state.json')
    state = json.loads(checkpoint.read_text())
    assert f'{state["val_loss"]:.4f} ± {state["val_loss_stderr"]:.4f}' in card
    assert 'code_char' in card
    assert str(char_data.parent) not in card
    assert str(trained.parent) not in card
    assert yaml.safe_load(card.split('---')[1])['library_name'] == 'transformers'


# -----------------------------------------------------------------------------
# tokenizers


@pytest.mark.parametrize('kind', [
    'char', 'byte', 'bpe:700', pytest.param('gpt2', marks=pytest.mark.slow)])
def test_an_exported_tokenizer_agrees_in_transformers(kind, text_file, tmp_path):
    from transformers import AutoTokenizer
    text = text_file.read_text(encoding='utf-8')
    ours = make_tokenizer(kind, [text, *STRANGE])
    theirs = AutoTokenizer.from_pretrained(
        exported(tmp_path / 'a', shaken(vocab_size=ours.vocab_size), ours))
    assert theirs.eos_token_id == ours.end_of_text
    for piece in [text[:20_000], *STRANGE]:
        ids = ours.encode(piece).tolist()
        assert theirs.encode(piece) == ids
        assert theirs.decode(ids) == piece
    if ours.end_of_text is not None:
        assert theirs.encode('a<|endoftext|>')[-1] == ours.end_of_text


@pytest.mark.slow
def test_the_merges_of_gpt2_are_as_published(real_gpt2):
    assert hf_tokenizer(tokenizers.GPT2Tokenizer())['model']['merges'][-1] == 'Ġg azed'
