"""Checkpoints of nanoGPT."""

import json
import subprocess
import sys

import pytest
import torch
from foreign_models import nanogpt_checkpoint, opened, tokens
from processes import fails
from test_families import refused

import sample
import train
from model import GPT, GPTConfig

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


@pytest.mark.parametrize(('prefix', 'bias'), [
    ('', True), ('_orig_mod.', False), ('module._orig_mod.', True)])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, prefix, bias):
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 65, 2, 4, 32, bias=bias, mlp='gelu_erf')).eval()
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, prefix)
    again = opened(str(tmp_path / 'ckpt.pt')).eval()
    assert torch.equal(again(tokens(65, 2, 16))[0], model(tokens(65, 2, 16))[0])


def test_a_run_starts_from_the_folder_of_a_nanogpt_run(
        tiny, char_data, tmp_path, capsys, monkeypatch):
    vocab_size = json.loads((char_data / 'meta.json').read_text())['vocab_size']
    (run := tmp_path / 'nano').mkdir()
    nanogpt_checkpoint(run / 'ckpt.pt', GPT(GPTConfig(16, vocab_size, 1, 1, 16, mlp='gelu_erf')))
    assert '--tokenizer=data/NAME' in fails(capsys, monkeypatch, sample.main, '--device=cpu',
                                            f'--init_from={run}/ckpt.pt')
    train.main([*tiny, f'--init_from={run}', '--max_iters=1'])
    assert f'{run}: the run starts from its weights' in capsys.readouterr().out
    state = json.loads(next((tmp_path / 'out').rglob('state.json')).read_text())
    assert state['model']['n_layer'] == 1 and state['model']['mlp'] == 'gelu_erf'


def test_nanogpts_padding_of_gpt2s_vocabulary_is_cut_off(tmp_path):
    model = GPT(GPTConfig(8, 50304, 1, 1, 8, mlp='gelu_erf'))
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, vocab_size=50304)
    again = opened(tmp_path / 'ckpt.pt')
    assert again.config.vocab_size == 50257
    assert torch.equal(again(tokens(65, 1, 8))[0], model(tokens(65, 1, 8))[0][..., :50257])


class Harmful:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return subprocess.call, ([sys.executable, '-c', f"open('{self.folder}/hacked', 'w')"],)


def test_a_pickle_that_holds_code_is_refused_and_nothing_run(tmp_path, model, capsys, monkeypatch):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, more=Harmful(tmp_path))
    line = fails(capsys, monkeypatch, sample.main, f'--init_from={tmp_path}/ckpt.pt')
    assert 'it holds commands.call' in line and 'nothing in it was run' in line
    assert not (tmp_path / 'hacked').exists()


# -----------------------------------------------------------------------------
# what is not a model


def test_a_corrupt_or_foreign_ckpt_is_one_line(tmp_path, model):
    path = tmp_path / 'ckpt.pt'
    nanogpt_checkpoint(path, model)
    whole = path.read_bytes()
    for data in (b'', b'garbage', whole[:len(whole) // 2], b"cposix\nsystem\n(S'exit'\ntR."):
        path.write_bytes(data)
        line = refused(path)
        assert 'ckpt.pt: damaged' in line or 'ckpt.pt: refused' in line
    torch.save({'model': {}}, path)
    assert "KeyError: 'model_args'" in refused(path)
    path.unlink()
    assert 'No such file' in refused(path)
