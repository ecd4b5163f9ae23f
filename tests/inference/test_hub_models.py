"""Models of the hub by their names, through each command that takes them; tests/hub.py serves them,
and the real client fetches them."""

import time
from pathlib import Path

import pytest
from foreign_models import opened, save_gpt2, save_model, save_tokenizer, tokens
from processes import ROOT, fails, options
from runs import model_of, same, same_logits

import evaluate
import export
import plaingpt
import prepare
import sample
import train
from model import GPT, GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.dataset import open_dataset
from plaingpt.core.weights import PRETRAINED
from plaingpt.data.tokenizers import vocabulary_of
from plaingpt.inference.pretrained import open_pretrained

SHORT = options(max_iters=1, batch_size=2, gradient_accumulation_steps=1, block_size=32,
                eval_iters=1, eval_interval=1, device='cpu', dtype='float32', report=False)
WRITE = options(num_samples=1, max_new_tokens=5, device='cpu')


@pytest.fixture
def small(hub, monkeypatch):
    """small(name, **sizes): a small model takes the place of one of OpenAI's → the transformers
    model."""
    def put(name, vocab_size=400, **sizes):
        sizes = {'n_layer': 2, 'n_head': 2, 'n_embd': 16, **sizes}
        monkeypatch.setitem(PRETRAINED, name, GPTConfig(64, vocab_size, **sizes))
        return save_gpt2(hub.model(f'openai-community/{name}'), vocab_size=vocab_size,
                         n_positions=64, **sizes)
    return put


def test_each_name_of_openai_opens_as_in_transformers(small):
    for n_layer, name in enumerate(PRETRAINED, 1):
        theirs = small(name, n_layer=n_layer)
        ours = GPT.from_pretrained(name)
        assert ours.config == PRETRAINED[name]
        assert same_logits(ours, theirs, tokens(400, 2, 64))


@pytest.mark.parametrize('name', ['openai-community/gpt2', pytest.param(
    'a/qwen', marks=pytest.mark.slow)])
def test_every_command_takes_a_model_by_its_name(name, hub, small, text_file, capsys):
    theirs = save_model(hub.model(name), 'qwen', vocab_size=400) if name == 'a/qwen' \
        else small('gpt2')
    save_tokenizer(hub.model(name), 'qwen', [text_file.read_text()])
    prepare.main(['text', str(text_file), f'--tokenizer={name}', '--data_dir=d'])
    start = f'--init_from={name.removeprefix("openai-community/")}'
    sample.main([start, '--start=def', '--temperature=0', *WRITE])
    gpt = plaingpt.load(name, device='cpu')
    text = gpt.generate('def', max_new_tokens=5, temperature=0)
    assert f'def{text}' in capsys.readouterr().out
    export.main([start, '--dest=exported'])
    evaluate.main([start, '--dataset=./d', '--device=cpu'])
    train.main([start, '--dataset=./d', *SHORT, '--learning_rate=0', '--min_lr=0',
                '--block_size=64'])
    for model in (gpt.model, GPT.from_pretrained(name), GPT.from_pretrained('exported'),
                  model_of(checkpoints.find('out'))):
        assert same_logits(model, theirs, tokens(400, 2, 64))


def test_tokens_of_the_gpt2_tokenizer_are_those_of_gpt2_on_the_hub(real_gpt2, small):
    small('gpt2', vocab_size=50257)
    assert open_pretrained('gpt2').tokenizer_json() == {'kind': 'gpt2'}
    description = open_pretrained('openai-community/gpt2').tokenizer_json()
    assert vocabulary_of(description) == {'kind': 'gpt2'}
    changed = description['files']['tokenizer.json'].replace('"Ġthe"', '"Ġteh"')
    assert vocabulary_of({**description, 'files': {'tokenizer.json': changed}}) == changed


# -----------------------------------------------------------------------------
# what the hub refuses


COMMANDS = {'sample': (sample.main, []), 'export': (export.main, ['--dest=d']),
            'evaluate': (evaluate.main, ['--tasks=text', f'--data={ROOT}/README.md']),
            'train': (train.main, [])}


@pytest.fixture
def refused(small, char_data, capsys, monkeypatch):
    """refused(command, name) has to end in one line and to write nothing → that line. A small gpt2
    is on the hub."""
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)  # between attempts
    small('gpt2', vocab_size=open_dataset(char_data).vocab_size)

    def run(command, name):
        main, argv = COMMANDS[command]
        more = [f'--dataset={char_data}', *SHORT] if command == 'train' else []
        line = fails(capsys, monkeypatch, main, f'--init_from={name}', *argv, *more)
        assert name in line
        assert not [path for path in Path().rglob('*') if path.is_file()]
        return line
    return run


@pytest.mark.parametrize('command', COMMANDS)
def test_a_model_that_the_hub_does_not_give_is_one_line(command, hub, refused):
    refused(command, 'a/b')
    hub.gate('openai-community/gpt2', 'of a member')
    assert 'hf auth login' in refused(command, 'gpt2')
    hub.fail_after(0)
    refused(command, 'gpt2')


def test_a_download_that_was_interrupted_is_repeated(hub, refused):
    hub.fail_after(1_000, within='model.safetensors')
    refused('sample', 'gpt2')
    hub.recover()
    expected = opened(hub.model('openai-community/gpt2'))
    assert same(GPT.from_pretrained('gpt2').parameters(), expected.parameters())
