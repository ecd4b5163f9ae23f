"""The losses that a run is given: of which text, how sure they are, and of a mixture."""

import json
import math
import statistics
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from foreign_models import shaken, tokens
from runs import lines

import evaluate
import prepare
import train
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import open_dataset


def bytes_a_token(folder, n):
    """UTF-8 bytes a token of the targets of n sequences that are spread over a validation split."""
    stream, tokenizer = open_dataset(folder).split('val'), open_dataset(folder).tokenizer()
    sequences = (len(stream) - 1) // 16
    targets = np.concatenate([stream.read(i * sequences // n * 16 + 1, 16) for i in range(n)])
    return len(tokenizer.decode_bytes(targets[targets != tokenizer.end_of_text])) / len(targets)


def test_bits_per_byte_are_of_the_text_that_was_evaluated(tiny, text_file, tmp_path):
    numbers, prose = (''.join(f'{n * 7919} é\n' for n in range(3000)), text_file.read_text()[:9000])
    for name, text, tokenizer in (('a', numbers + prose, 'bpe:300'), ('b', prose, tmp_path / 'a')):
        (tmp_path / f'{name}.txt').write_text(text)
        prepare.main(['text', f'--input={tmp_path}/{name}.txt', f'--tokenizer={tokenizer}',
                      f'--data_dir={tmp_path}/{name}', '--val_fraction=0.5'])
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*tiny, f'--dataset={a}:0.3,{b}:0.7', '--max_iters=0', '--eval_iters=10'])
    [row] = lines(tmp_path / 'out', 'val_loss')
    size = 0.3 * bytes_a_token(a, 4 * 10) + 0.7 * bytes_a_token(b, 4 * 10)
    assert row['val_bpb'] == pytest.approx(row['val_loss'] / size / math.log(2))


@pytest.mark.parametrize('losses', [[2.0, 3.0, 2.5, 4.5], [11.0, 11.005, 11.01, 11.005]])
def test_the_standard_error_of_a_loss_is_that_of_a_mean(losses):
    sequence = torch.zeros(1, 8)  # of eight targets
    loader = Mock(eval_batches=range, eval_batch=lambda i: (i, sequence))
    model = Mock(side_effect=lambda i, targets: (None, torch.tensor(losses[i])))
    loss, error = train.mean_loss(model, loader, 4, nullcontext())
    assert loss == pytest.approx(statistics.mean(losses))
    assert error == pytest.approx(statistics.stdev(losses) / 2, rel=0.01)  # they are float32
    _, error = train.mean_loss(model, loader, 1, nullcontext())
    assert error is None  # one has no spread


def test_the_standard_error_is_that_of_the_sequences_in_batches_of_any_size():
    model, text = shaken(block_size=16), tokens(257, 30 * 16 + 1)
    stream = evaluate.TextStream.__new__(evaluate.TextStream)
    stream.ids = text.numpy()
    with torch.no_grad():
        losses = [model(idx[None], targets[None])[1].item() for idx, targets in zip(
            text[:-1].view(30, 16), text[1:].view(30, 16), strict=True)]
    for batch_size in (1, 4, 64):
        loader = BatchLoader(stream, 16, batch_size)
        loss, error = train.mean_loss(evaluate.SequenceLosses(model), loader, 30, nullcontext())
        assert loss == pytest.approx(statistics.mean(losses))
        assert error == pytest.approx(statistics.stdev(losses) / 30**0.5, rel=1e-4)


def test_the_loss_of_a_mixture_is_the_weighted_mean_of_the_corpora(tiny, data, tmp_path, capsys):
    train.main([*tiny, '--dataset=code:0.3,prose:0.7', '--eval_iters=100'])  # all of both
    sizes = [len(open_dataset(f'data/{name}').split('train')) for name in ('code', 'prose')]
    epochs = [share * 6 * 2 * 4 * 16 / n for share, n in zip((0.3, 0.7), sizes, strict=True)]
    assert f'{epochs[0]:.3g} epochs of code (30.0%), {epochs[1]:.3g} epochs of prose (70.0%)' \
        in capsys.readouterr().out
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json'])
    scores = json.loads((tmp_path / 'scores.json').read_text())['results']['val']
    assert 0.3 * scores['code']['loss'] + 0.7 * scores['prose']['loss'] == pytest.approx(
        lines(tmp_path / 'out', 'val_loss')[-1]['val_loss'], abs=0.002)
