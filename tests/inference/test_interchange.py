"""Checkpoints of nanoGPT."""

import subprocess
import sys

import pytest
import torch
from foreign_models import nanogpt_checkpoint, opened, shaken, tokens
from processes import fails

import sample
from model import GPT, GPTConfig

SMALL = dict(vocab_size=65, n_layer=2, n_head=4, n_embd=32, block_size=16)


@pytest.mark.parametrize(('prefix', 'bias'), [
    ('', True), ('_orig_mod.', False), ('module._orig_mod.', True)])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, prefix, bias):
    model = shaken(**SMALL, bias=bias, mlp='gelu_erf')
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, prefix)
    again = opened(str(tmp_path / 'ckpt.pt')).eval()
    assert torch.equal(again(tokens(65, 2, 16))[0], model(tokens(65, 2, 16))[0])


def test_text_from_a_checkpoint_of_nanogpt_needs_a_tokenizer(tmp_path, capsys, monkeypatch):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', shaken(**SMALL))
    assert '--tokenizer' in fails(capsys, monkeypatch, sample.main, '--device=cpu',
                                  f'--init_from={tmp_path}/ckpt.pt')


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


def test_a_checkpoint_with_code_is_refused_before_any_of_it_runs(tmp_path, capsys, monkeypatch):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', shaken(**SMALL), more=Harmful(tmp_path))
    line = fails(capsys, monkeypatch, sample.main, f'--init_from={tmp_path}/ckpt.pt')
    assert 'ckpt.pt' in line
    assert not (tmp_path / 'hacked').exists()
