"""From text to a model that transformers opens, by the commands that a person types first: in this
process, and slowly in processes of their own, with nothing patched."""

import csv
import importlib
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_models import in_transformers, save_gpt2
from processes import ROOT, options, run
from runs import lines
from sample_data import conversations

MODEL = options(n_layer=1, n_head=2, n_embd=32)
TRAIN = options(dataset='mine', block_size=64, batch_size=4, gradient_accumulation_steps=2,
                eval_interval=10, eval_iters=4, learning_rate=1e-2, warmup_iters=1,
                lr_decay_iters=20, device='cpu', dtype='float32', report=False)
NEW_TOKENS = 12
SAMPLE = options(num_samples=1, max_new_tokens=NEW_TOKENS, temperature=0, device='cpu')


def typed_command(name, *argv, typed=''):
    """Type `python NAME.py …` → what it prints."""
    return run(sys.executable, ROOT / f'{name}.py', *argv, typed=typed)


@pytest.fixture
def call(capsys, monkeypatch):
    """call(name, *argv, typed='') does what typed_command() does, in this process."""
    def call(name, *argv, typed=''):
        monkeypatch.setattr('sys.stdin', io.StringIO(typed))
        capsys.readouterr()
        importlib.import_module(name).main([*map(str, argv)])
        return capsys.readouterr().out
    return call


def train_resume_evaluate_export(command, *start):
    """Train on data/mine for 10 iterations, then for 10 more → the run in transformers."""
    command('train', *TRAIN, *start, '--max_iters=10')
    command('train', *TRAIN, '--init_from=resume', '--max_iters=20')
    assert [line['iter'] for line in lines(Path('out'), 'loss')] == [*range(1, 21)]
    command('evaluate', 'out', '--output=scores.json', '--device=cpu')
    command('export', 'out', '--dest=exported')
    return in_transformers('exported')


def continuation(theirs, ids):
    """The ids that transformers writes after a list of them."""
    idx = torch.tensor([ids])
    written = theirs.generate(idx, attention_mask=torch.ones_like(idx), do_sample=False,
                              max_new_tokens=NEW_TOKENS)
    return written[0, len(ids):].tolist()


def val_loss(theirs):
    """The mean loss of transformers over the validation split, in nats per token."""
    ids = torch.from_numpy(np.fromfile('data/mine/val.bin', '<u2').astype(np.int64))
    rows = ids[:len(ids) // 64 * 64].view(-1, 64)
    return theirs(rows, labels=rows).loss.item()


@pytest.mark.parametrize('kind', ['char', *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in ('bpe:300', 'gpt2'))])
def test_a_model_of_text_writes_the_same_in_transformers(kind, call, text_file):
    command = call if kind == 'char' else typed_command
    command('prepare', 'text', text_file, f'--tokenizer={kind}', '--data_dir=data/mine')
    theirs = train_resume_evaluate_export(command, *MODEL)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained('exported')
    text = tokenizer.decode(continuation(theirs, tokenizer.encode('def ')))
    assert command('sample', 'out', '--start=def ', *SAMPLE).endswith(f'\ndef {text}\n')
    loss = json.loads(Path('scores.json').read_text())['results']['val']['loss']
    assert loss == pytest.approx(val_loss(theirs), rel=0.02)  # which cuts the text elsewhere
    assert loss < math.log(theirs.config.vocab_size)


@pytest.mark.slow
def test_a_model_of_own_ids_writes_the_same_in_transformers(call):
    folder = Path('data/mine')
    folder.mkdir(parents=True)
    ids = np.resize(np.arange(40).repeat(2), 20_000)
    for split, part in (('train', ids[:18_000]), ('val', ids[18_000:])):
        part.astype('<u2').tofile(folder / f'{split}.bin')
    call('prepare', 'ids', folder, '--vocab_size=50')
    theirs = train_resume_evaluate_export(call, *MODEL)
    sampled = call('sample', 'out', '--start=IDS:3,3,4', *SAMPLE)
    written = [int(number) for number in sampled.rpartition('IDS:')[2].split(',')]
    assert written == [3, 3, 4, *continuation(theirs, [3, 3, 4])]


def test_a_chat_model_answers_the_same_in_transformers(call):
    with open('questions.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('prompt', 'completion'), *(
            [message['content'] for message in messages] for messages in conversations(200))])
    call('prepare', 'chat', 'questions.csv', '--tokenizer=byte', '--val_fraction=0.2',
            '--data_dir=data/mine')
    theirs = train_resume_evaluate_export(call, *MODEL)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained('exported')
    ids = tokenizer.apply_chat_template([{'role': 'user', 'content': '7?'}],
                                        add_generation_prompt=True)['input_ids']
    answer = tokenizer.decode(continuation(theirs, ids), skip_special_tokens=True)
    said = call('sample', 'out', '--chat', *SAMPLE, typed='7?\n/quit\n')
    assert f'> {answer}\n> ' in said


@pytest.mark.slow
def test_gpt2_by_its_name_writes_the_same_in_transformers(hub):
    theirs = save_gpt2(hub.model('openai-community/gpt2'))
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(hub.model('openai-community/gpt2'))
    text = tokenizer.decode(continuation(theirs, tokenizer.encode('def ')))
    assert typed_command('sample', '--init_from=gpt2', '--start=def ', *SAMPLE).endswith(
        f'\ndef {text}\n')


@pytest.mark.slow
def test_gpt2_by_its_name_is_trained(hub, text_file):
    save_gpt2(hub.model('openai-community/gpt2'))
    typed_command('prepare', 'text', text_file, '--tokenizer=gpt2', '--data_dir=data/mine')
    typed_command('train', *TRAIN, '--init_from=gpt2', '--max_iters=1', '--eval_iters=1',
            '--batch_size=1', '--block_size=16')
    assert 8 < lines(Path('out'), 'loss')[0]['loss'] < 14
