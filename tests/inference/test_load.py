"""`plaingpt.load`, the way in for Python."""

import shutil
import subprocess
import sys

import pytest
import torch
from foreign_models import nanogpt_checkpoint
from processes import ROOT
from runs import model_of, same, weights

import export
import plaingpt
import sample
import train
from model import GPT
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.weights import PRETRAINED
from plaingpt.inference.open_weights import ModelChoice, load, open_weights
from plaingpt.system.errors import UserError


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
def test_every_kind_of_model_can_be_loaded(kind, sources):
    source, more = sources[kind]
    gpt = plaingpt.load(source, device='cpu', **more)
    assert len(gpt.generate('def main', max_new_tokens=12)) == 12
    idx = torch.tensor(gpt.tokenizer.encode('def main'), dtype=torch.long)[None]
    run = plaingpt.load(sources['run'][0], device='cpu')
    difference = (run.model(idx)[0] - gpt.model(idx)[0]).abs().max()
    assert difference < (1e-2 if 'nano' in kind else 1e-6)


def test_a_text_depends_only_on_its_seed(trained):
    gpt = plaingpt.load(trained, device='cpu')
    text = gpt.generate('def main', max_new_tokens=12, seed=3)
    assert gpt.generate(['def main', 'x'], max_new_tokens=12, seed=3)[0] == text
    assert gpt.generate('def main', max_new_tokens=12, seed=4) != text


@pytest.mark.parametrize('name', PRETRAINED)
def test_the_models_of_openai_have_their_published_sizes(name):
    with torch.device('meta'):
        model = GPT(open_weights(name).config)
    assert model.num_parameters() == {'gpt2': 124_439_808, 'gpt2-medium': 354_823_168,
                                      'gpt2-large': 774_030_080, 'gpt2-xl': 1_557_611_200}[name]


def test_a_model_without_a_tokenizer_is_loaded_as_a_gpt(trained, tmp_path):
    expected = model_of(checkpoints.find(trained, 'best')).eval()
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', expected)
    model = GPT.from_pretrained(tmp_path / 'ckpt.pt')
    idx = torch.arange(8)[None]
    assert not model.training
    assert (model(idx)[0] - expected(idx)[0]).abs().max() < 1e-2


def test_weights_take_the_tokenizer_of_another_source(sources, char_data):
    for source in (char_data, sources['run'][0], sources['checkpoint'][0], sources['folder'][0]):
        _, tokenizer, _ = load(ModelChoice(sources['nanogpt'][0], tokenizer=str(source)))
        assert tokenizer.decode(tokenizer.encode('def main')) == 'def main'


def test_python_writes_the_text_that_sample_py_writes(trained, capsys):
    sample.main([f'--out_dir={trained}', '--start=def', '--num_samples=1', '--device=cpu',
                 '--max_new_tokens=20', '--dtype=float32'])
    gpt = plaingpt.load(trained, device='cpu')
    text = gpt.generate('def', max_new_tokens=20)
    assert capsys.readouterr().out.endswith(f'\ndef{text}\n')
    assert gpt.generate('def', stop=['unheard of', text[5]]) == text[:text.index(text[5])]


@pytest.mark.parametrize(('name', 'value'), [
    ('temperature', float('nan')), ('temperature', 'hot'), ('top_k', 2.5), ('top_k', True),
    ('seed', 10**30), ('temprature', 1.0), ('stop', ['a', '']), ('stop', [1])])
def test_a_wrong_option_is_refused_by_its_name(name, value, trained):
    with pytest.raises(UserError, match=name):
        plaingpt.load(trained, device='cpu').generate('def', **{name: value})


def test_a_run_starts_from_a_checkpoint_of_another(trained, tiny, tmp_path):
    shutil.copytree(trained / 'checkpoints/iter-00000003', tmp_path / 'mine')
    train.main([*tiny, f'--init_from={tmp_path}/mine', '--max_iters=1', '--learning_rate=0',
                '--min_lr=0'])
    assert same(weights(tmp_path / 'out'), weights(trained, '3'))


def test_importing_plaingpt_imports_neither_torch_nor_numpy():
    subprocess.run([sys.executable, '-c', 'import sys, plaingpt; plaingpt.load\n'
                    'assert not {"torch", "numpy"} & sys.modules.keys()'], cwd=ROOT, check=True)
