"""`plaingpt.load`, the way in for Python."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from foreign_models import nanogpt_checkpoint
from processes import ROOT
from runs import model_of

import export
import plaingpt
import sample
import train
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.open_weights import ModelChoice, load, open_weights
from plaingpt.weights import PRETRAINED


@pytest.fixture(scope='module')
def sources(trained, char_data, tmp_path_factory):
    """{what it is: (the name that opens it, options)}, all of the model of `trained`, except that
    nanoGPT's has another GELU."""
    folder = tmp_path_factory.mktemp('sources')
    found = checkpoints.find(trained, 'best')
    export.main([f'--out_dir={trained}', f'--dest={folder}/hf'])
    (nano := folder / 'nano').mkdir()
    nanogpt_checkpoint(nano / 'ckpt.pt', model_of(found))
    return {'run': (trained, {}), 'checkpoint': (found.path, {}), 'folder': (f'{folder}/hf', {}),
            'nanogpt': (nano / 'ckpt.pt', {'tokenizer': char_data}),
            'nanogpt_run': (str(nano), {'tokenizer': char_data})}


@pytest.mark.parametrize('kind', ['run', 'checkpoint', 'folder', 'nanogpt', 'nanogpt_run'])
def test_every_kind_of_model_opens_in_python_and_writes(kind, sources):
    source, more = sources[kind]
    gpt = plaingpt.load(source, device='cpu', **more)
    text = gpt.generate('def main', max_new_tokens=12, seed=3)
    assert len(text) == 12 and gpt.generate('def main', max_new_tokens=12, seed=3) == text
    assert gpt.generate(['def main', 'x'], max_new_tokens=12, seed=3)[0] == text
    idx = torch.tensor(gpt.tokenizer.encode('def main'), dtype=torch.long)[None]
    gpt.model(idx, idx)[1].backward()  # a GPT like any other: gradients reach its weights
    assert gpt.model.transformer.wte.weight.grad.abs().sum() > 0
    run = plaingpt.load(sources['run'][0], device='cpu')
    difference = (run.model(idx)[0] - gpt.model(idx)[0]).abs().max()
    assert difference < (1e-2 if 'nano' in kind else 1e-6)


@pytest.mark.parametrize('name', PRETRAINED)
def test_a_name_of_openai_stands_for_the_whole_architecture(name):
    with torch.device('meta'):
        model = GPT(open_weights(name).config)
    assert model.config.vocab_size == 50257 and model.config.block_size == 1024
    assert model.num_parameters() == {'gpt2': 124_439_808, 'gpt2-medium': 354_823_168,
                                      'gpt2-large': 774_030_080, 'gpt2-xl': 1_557_611_200}[name]


def test_a_model_without_a_tokenizer_is_a_gpt_of_ids(trained, tmp_path):
    expected = model_of(checkpoints.find(trained, 'best')).eval()
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', expected)
    model = GPT.from_pretrained(tmp_path / 'ckpt.pt')
    idx = torch.arange(8)[None]
    assert not model.training and (model(idx)[0] - expected(idx)[0]).abs().max() < 1e-2


def test_weights_take_the_tokenizer_of_a_dataset_a_run_or_a_folder(sources, char_data):
    for named in (char_data, sources['run'][0], sources['checkpoint'][0], sources['folder'][0]):
        _, tokenizer, _ = load(ModelChoice(sources['nanogpt'][0], tokenizer=str(named)))
        assert tokenizer.decode(tokenizer.encode('def main')) == 'def main'


def test_weights_take_a_tokenizer_by_its_name(tmp_path):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', GPT(GPTConfig(16, 257, 1, 1, 8)))
    _, tokenizer, _ = load(ModelChoice(str(tmp_path / 'ckpt.pt'), tokenizer='byte'))
    assert list(tokenizer.encode('def')) == list(b'def')


def test_a_text_by_python_is_the_one_that_sample_writes(trained, capsys):
    sample.main([f'--out_dir={trained}', '--start=def', '--num_samples=1', '--device=cpu',
                 '--max_new_tokens=20', '--dtype=float32'])
    gpt = plaingpt.load(trained, device='cpu')
    text = gpt.generate('def', max_new_tokens=20)
    assert capsys.readouterr().out.endswith(f'\ndef{text}\n')
    for stop in (text[5], ['unheard of', text[5]]):
        assert gpt.generate('def', stop=stop) == text[:text.index(text[5])]


@pytest.mark.parametrize(('name', 'value'), [
    ('temperature', float('inf')), ('temperature', float('nan')), ('temperature', 'hot'),
    ('temperature', 1), ('temperature', np.float64(0.5)), ('top_k', 2.5), ('top_k', True),
    ('top_k', np.int64(3)), ('seed', 10**30), ('temprature', 1.0),
    ('stop', ''), ('stop', ['']), ('stop', ['a', '']), ('stop', [1])])
def test_what_the_command_line_refuses_python_refuses_too(name, value, trained):
    gpt = plaingpt.load(trained, device='cpu')
    typed = json.dumps(value) if isinstance(value, list) else value
    try:
        load_config(sample.SampleConfig, [f'--{name}={typed}'])
    except UserError:
        with pytest.raises(UserError, match=name):
            gpt.generate('def', **{name: value})
    else:
        assert len(gpt.generate('def', max_new_tokens=9, **{name: value})) == 9


def test_a_run_starts_from_one_checkpoint_of_another_whatever_its_folder(
        trained, tiny, tmp_path, capsys):
    path = trained / 'checkpoints/iter-00000003'
    train.main([*tiny, f'--init_from={path}', '--max_iters=1'])
    assert f'{path}: the run starts from its weights' in capsys.readouterr().out
    shutil.copytree(path, tmp_path / 'mine')
    sample.main([f'--init_from={tmp_path}/mine', '--num_samples=1', '--device=cpu'])
    assert f'{tmp_path}/mine | ' in capsys.readouterr().out


def test_importing_plaingpt_waits_for_nothing():
    subprocess.run([sys.executable, '-c', 'import sys, plaingpt; plaingpt.load\n'
                    'assert not {"torch", "numpy"} & sys.modules.keys()'], cwd=ROOT, check=True)
