"""The losses that a run reports: of which text, with which standard error, and of a mixture."""

import json
import math
import shutil
import statistics
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from foreign_models import shaken, tokens
from runs import lines

import evaluate
import plan
import prepare
import train
from plaingpt.core.batches import BatchLoader
from plaingpt.core.dataset import open_dataset
from plaingpt.core.evaluation import mean_loss


def bytes_per_token(folder, n):
    """Bytes of UTF-8 per target, of n sequences that are spread over a validation split."""
    stream, tokenizer = open_dataset(folder).split('val'), open_dataset(folder).tokenizer()
    sequences = (len(stream) - 1) // 16
    targets = np.concatenate([stream.read(i * sequences // n * 16 + 1, 16) for i in range(n)])
    return len(tokenizer.decode_bytes(targets[targets != tokenizer.end_of_text])) / len(targets)


def test_bits_per_byte_are_those_of_the_text_that_was_evaluated(tiny, text_file, tmp_path):
    numbers, prose = (''.join(f'{n * 7919} é\n' for n in range(3000)), text_file.read_text()[:9000])
    for name, text, tokenizer in (('a', numbers + prose, 'bpe:300'), ('b', prose, tmp_path / 'a')):
        (tmp_path / f'{name}.txt').write_text(text)
        prepare.main(['text', f'--input={tmp_path}/{name}.txt', f'--tokenizer={tokenizer}',
                      f'--data_dir={tmp_path}/{name}', '--val_fraction=0.5'])
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*tiny, f'--dataset={a}:0.3,{b}:0.7', '--max_iters=0', '--eval_iters=10'])
    [row] = lines(tmp_path / 'out', 'val_loss')
    size = 0.3 * bytes_per_token(a, 4 * 10) + 0.7 * bytes_per_token(b, 4 * 10)
    assert row['val_bpb'] == pytest.approx(row['val_loss'] / size / math.log(2))


@pytest.mark.parametrize('batch_size', [1, 4, 64])
def test_the_standard_error_is_that_of_the_mean_of_the_sequences(batch_size):
    model, text = shaken(block_size=16), tokens(257, 30 * 16 + 1)
    stream = evaluate.TextStream.__new__(evaluate.TextStream)
    stream.ids = text.numpy()
    with torch.no_grad():
        losses = [model(idx[None], targets[None])[1].item() for idx, targets in zip(
            text[:-1].view(30, 16), text[1:].view(30, 16), strict=True)]
    loader = BatchLoader(stream, 16, batch_size)
    loss, error = mean_loss(evaluate.SequenceLosses(model), loader, 30, nullcontext())
    assert loss == pytest.approx(statistics.mean(losses))
    assert error == pytest.approx(statistics.stdev(losses) / 30**0.5, rel=1e-4)


def test_the_loss_of_a_mixture_is_the_weighted_mean_of_the_corpora(tiny, data, tmp_path):
    train.main([*tiny, '--dataset=code:0.3,prose:0.7', '--eval_iters=100'])  # all of both
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json'])
    scores = json.loads((tmp_path / 'scores.json').read_text())['results']['val']
    assert 0.3 * scores['code']['loss'] + 0.7 * scores['prose']['loss'] == pytest.approx(
        lines(tmp_path / 'out', 'val_loss')[-1]['val_loss'], abs=0.002)


def about_the_data(out):
    """The lines that describe the data of a run."""
    return [line.strip() for line in out.splitlines()
            if 'tokens per step' in line or ' in the loss' in line]


@pytest.mark.parametrize('settings', [
    ['--dataset=code:0.3,prose:0.7', '--gradient_accumulation_steps=6'],
    ['--minutes=2'], ['--init_from=resume', '--batch_size=2'],
    *(pytest.param(settings, marks=pytest.mark.slow) for settings in (
        ['--dataset=chat', '--block_size=48', '--document_attention=True'],
        ['--dataset=documents', '--pack=documents'],
        ['--batch_size=auto', '--total_batch_size=192'], ['--check=overfit']))], ids=str)
def test_a_plan_says_of_the_data_what_the_run_says(settings, tiny, data, trained, capsys,
                                                   monkeypatch):
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', [])  # fewer traces
    if '--init_from=resume' in settings:
        shutil.copytree(trained, 'out')
    words = [word for word in [*tiny, *settings] if '--minutes=2' not in settings
             or not word.startswith(('--max_iters', '--lr_decay_iters'))]
    train.main([*words, '--eval_only'])
    run = about_the_data(capsys.readouterr().out)
    plan.main(words)
    planned = capsys.readouterr().out
    assert run == about_the_data(planned)
    assert ('time: 2m00s, about' in planned) == ('--minutes=2' in settings)


def test_a_plan_of_a_resumed_run_is_of_what_is_left(tiny, trained, capsys, monkeypatch):
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', [])
    shutil.copytree(trained, 'out')
    plan.main([*tiny, '--init_from=resume', '--max_iters=10'])
    out = capsys.readouterr().out
    assert '4 iterations' in out
    assert f'{10 * 128 / 1000:.2f}k in total' in out


def test_a_run_on_a_mixture_tells_its_epochs_of_each_corpus(tiny, data, capsys):
    train.main([*tiny, '--dataset=code:0.3,prose:0.7', '--eval_iters=1'])
    out = capsys.readouterr().out
    for name, weight in (('code', 0.3), ('prose', 0.7)):
        epochs = weight * 6 * 2 * 4 * 16 / len(open_dataset(f'data/{name}').split('train'))
        assert f'{epochs:.3g} epochs of {name}' in out


def test_a_mixture_can_be_overfitted(tiny, data, tmp_path):
    train.main([*tiny, '--dataset=code:0.3,prose:0.7', '--check=overfit', '--learning_rate=2e-2',
                '--max_iters=15', '--lr_decay_iters=15', '--eval_interval=15'])
    first, last = (row['train_loss'] for row in lines(tmp_path / 'out', 'val_loss'))
    assert last < first - 1
