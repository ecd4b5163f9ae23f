"""Files of torch.save: weights of Hugging Face, and what programs like nanoGPT write. What is not
known for certain is refused in a line that names it."""

import json
from dataclasses import dataclass

import pytest
import torch
from foreign_models import nanogpt_checkpoint, opened, shaken, tokens
from safetensors.torch import load_file
from test_families import refused, saved

import __main__
from model import GPT
from plaingpt.inference.pretrained import open_pretrained

SMALL = dict(vocab_size=65, n_layer=2, n_head=4, n_embd=32, block_size=16)
IDX = tokens(65, 2, 16)


def same(model, other):
    return torch.equal(model(IDX)[0], other(IDX)[0])


# -----------------------------------------------------------------------------
# Hugging Face's pytorch_model.bin


def replace_by_bin(folder, wrap=dict, **how):
    """Each file of safetensors becomes one of torch.save, and the index names those."""
    for path in folder.glob('*.safetensors'):
        name = path.name.replace('model', 'pytorch_model', 1)
        torch.save(wrap(load_file(path)), folder / name.replace('.safetensors', '.bin'), **how)
        path.unlink()
    for index in folder.glob('*.index.json'):
        text = index.read_text().replace('"model-', '"pytorch_model-')
        (folder / 'pytorch_model.bin.index.json').write_text(text.replace('.safetensors', '.bin'))
        index.unlink()


@pytest.mark.parametrize('shape', ['gpt2', 'llama tied'])
@pytest.mark.parametrize('size', ['5GB', '40KB'])  # of a shard
def test_weights_in_files_of_torch_are_those_of_safetensors(shape, size, tmp_path):
    saved(tmp_path, shape, max_shard_size=size)
    expected = opened(tmp_path)
    replace_by_bin(tmp_path)
    assert len([*tmp_path.glob('pytorch_model*.bin')]) == 1 or size == '40KB'
    assert same(opened(tmp_path), expected)


@pytest.mark.parametrize('wrap', [
    lambda weights: {'model': weights, 'step': 3}, lambda weights: {'state_dict': weights},
    lambda weights: {f'_orig_mod.{name}': w for name, w in weights.items()}])
def test_wrapped_weights_are_found(wrap, tmp_path):
    saved(tmp_path, 'gpt2')
    expected = opened(tmp_path)
    replace_by_bin(tmp_path, wrap, _use_new_zipfile_serialization=False)  # as torch 1.5 did
    assert same(opened(tmp_path), expected)


def test_shards_that_the_index_does_not_name_are_not_read(tmp_path):
    saved(tmp_path, 'gpt2', max_shard_size='40KB')
    expected = opened(tmp_path)
    (tmp_path / 'model-of-an-earlier-save.safetensors').write_bytes(b'')
    assert same(opened(tmp_path), expected)


@pytest.mark.parametrize('content', [b'', b'version https://git-lfs.github.com', b'PK\3\4' * 99])
def test_weights_that_are_not_of_torch_are_refused(content, tmp_path):
    saved(tmp_path, 'gpt2')
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'pytorch_model.bin').write_bytes(content)
    assert 'pytorch_model.bin' in refused(tmp_path)


@pytest.mark.parametrize('content', [[1], {'epoch': 3}, {'model': [torch.ones(2)]}])
def test_a_file_without_weights_is_refused(content, tmp_path):
    saved(tmp_path, 'gpt2')
    (tmp_path / 'model.safetensors').unlink()
    torch.save(content, tmp_path / 'pytorch_model.bin')
    assert 'pytorch_model.bin' in refused(tmp_path)


def test_a_folder_without_weights_names_both_files(tmp_path):
    saved(tmp_path, 'gpt2')
    (tmp_path / 'model.safetensors').unlink()
    line = refused(tmp_path)
    assert 'model.safetensors' in line and 'pytorch_model.bin' in line


@pytest.mark.parametrize('index', [{}, [], {'weight_map': {'a': 'gone.bin'}}])
def test_a_broken_index_is_refused(index, tmp_path):
    saved(tmp_path, 'gpt2')
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps(index))
    refused(tmp_path)


def test_the_hub_gives_weights_in_either_format(hub):
    for name in ('old/model', 'both/model'):
        saved(hub.model(name), 'gpt2')
    expected = opened(hub.model('old/model'))
    replace_by_bin(hub.model('old/model'))
    (hub.model('both/model') / 'pytorch_model.bin').write_bytes(b'a large file')
    for name in ('old/model', 'both/model'):
        assert same(opened(name), expected)
    assert not [path for path in hub.requests if 'both/model' in path and '.bin' in path]


# -----------------------------------------------------------------------------
# checkpoints of nanoGPT and of its relatives


def changed(path, model=None, args=(), **more):
    """A checkpoint of nanoGPT with other model_args → its path."""
    nanogpt_checkpoint(path / 'ckpt.pt', model or shaken(**SMALL), **more)
    checkpoint = torch.load(path / 'ckpt.pt')
    checkpoint['model_args'].update(args)
    torch.save(checkpoint, path / 'ckpt.pt')
    return path / 'ckpt.pt'


def test_a_missing_setting_is_refused_by_name(tmp_path):
    path = changed(tmp_path)
    checkpoint = torch.load(path)
    del checkpoint['model_args']['n_head']
    torch.save(checkpoint, path)
    assert 'n_head' in refused(path)


def test_the_first_nanogpt_had_no_setting_for_biases(tmp_path):
    model = shaken(**SMALL, mlp='gelu_erf')
    path = changed(tmp_path, model)
    checkpoint = torch.load(path)
    del checkpoint['model_args']['bias']
    torch.save(checkpoint, path)
    assert same(opened(path), model)


@pytest.mark.parametrize(('args', 'name'), [
    ({'use_rope': True}, 'use_rope'), ({'rotary': None}, 'rotary'),  # of forks
    ({'n_head': None}, 'n_head'), ({'n_head': 5}, 'n_head'),
    ({'vocab_size': 60}, 'wte'), ({'block_size': 8}, 'wpe'), ({'n_layer': 1}, 'h.1.'),
    ({'n_layer': 3}, 'h.2.'), ({'n_embd': 64}, ''), ({'bias': False}, 'bias')])
def test_settings_that_are_not_those_of_the_weights_are_refused_by_name(args, name, tmp_path):
    assert name in refused(changed(tmp_path, args=args))


@pytest.mark.parametrize('name', ['transformer.h.0.attn.rotary', 'value_head.weight'])
def test_weights_that_nanogpt_does_not_have_are_refused_by_name(name, tmp_path):
    path = changed(tmp_path)
    checkpoint = torch.load(path)
    checkpoint['model'][name] = torch.ones(3)
    torch.save(checkpoint, path)
    assert name in refused(path)


def test_a_fork_with_an_untied_head_keeps_its_head(tmp_path):
    model = shaken(**SMALL, mlp='gelu_erf', tied_head=False)
    assert same(opened(changed(tmp_path, model)), model)


@dataclass
class GPTConfig:
    """As build-nanogpt's; its checkpoints name __main__.GPTConfig."""
    block_size: int = 16
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


@pytest.fixture
def pickled_config(monkeypatch):
    monkeypatch.setattr(GPTConfig, '__module__', '__main__')
    monkeypatch.setattr(__main__, 'GPTConfig', GPTConfig, raising=False)
    return GPTConfig()


def test_a_checkpoint_of_build_nanogpt_is_read(tmp_path, pickled_config):
    model = shaken(**SMALL)
    weights = {name: w[:65] if 'wte' in name or 'lm_head' in name else w
               for name, w in model.state_dict().items()}
    torch.save({'model': weights, 'config': pickled_config, 'step': 5, 'val_loss': 3.2},
               tmp_path / 'model_00005.pt')
    assert same(opened(tmp_path / 'model_00005.pt'), model)
    pickled_config.n_kv_head = 2
    torch.save({'model': weights, 'config': pickled_config}, tmp_path / 'model_00005.pt')
    assert 'n_kv_head' in refused(tmp_path / 'model_00005.pt')


def torchscript(path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)


def of(**content):
    return lambda path: torch.save(content, path)


W = torch.ones(2, 2)
LLAMA2C = dict(dim=288, n_layers=6, n_heads=6, n_kv_heads=6, vocab_size=32000, multiple_of=32,
               max_seq_len=256, dropout=0.0)
OTHERS = {  # how the file is written → what the error names
    'llama2.c': (of(model={'tok_embeddings.weight': W}, model_args=LLAMA2C, optimizer={},
                    iter_num=5, best_val_loss=1.0, config={}), 'llama2.c'),
    'litgpt': (of(model={'transformer.h.0.norm_1.weight': W}), 'litgpt'),
    'litgpt, bare': (of(**{'transformer.h.0.norm_1.weight': W, 'lm_head.weight': W}), 'litgpt'),
    'modded-nanogpt': (of(step=3, code='import os', model={'embed.weight': W}, optimizers=[]),
                       'modded-nanogpt'),
    'a state dict': (lambda path: torch.save(shaken(**SMALL).state_dict(), path), 'model_args'),
    'a model without settings': (of(model={'wte.weight': W}, epoch=3), 'model_args'),
    'settings that are not a dict': (of(model={'wte.weight': W}, model_args=[1]), 'model_args'),
    'another tutorial': (of(epoch=3, model_state_dict={'a': W}), 'model_state_dict'),
    'TorchScript': (torchscript, 'TorchScript'),
    'a whole module': (lambda path: torch.save(GPT(open_pretrained('gpt2').config.__class__(
        16, 65, 1, 1, 4)), path), 'model.GPT'),
    'a tensor': (lambda path: torch.save(W, path), 'Tensor'),
    'no weights': (of(model={}, model_args={}), 'vocab_size')}


@pytest.mark.parametrize('name', OTHERS)
def test_a_file_of_another_program_is_refused_by_name(name, tmp_path):
    write, named = OTHERS[name]
    write(tmp_path / 'lit_model.pth')
    assert named.lower() in refused(tmp_path / 'lit_model.pth').lower()


def test_a_missing_file_is_refused_by_name(tmp_path):
    assert 'No such file' in refused(tmp_path / 'ckpt.pt')
