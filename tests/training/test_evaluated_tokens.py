"""The losses of one run compare: each evaluation reads the same tokens, whatever the batch size."""

import math
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import lines

import prepare
import train
from plaingpt.data.dataset import open_dataset


def bytes_a_token(folder, n):
    """UTF-8 bytes a token of the targets of n sequences that are spread over a validation split."""
    stream, tokenizer = open_dataset(folder).split('val'), open_dataset(folder).tokenizer()
    sequences = (len(stream) - 1) // 16
    n = min(n, sequences)
    targets = np.concatenate([stream.read(i * sequences // n * 16 + 1, 16) for i in range(n)])
    return len(tokenizer.decode_bytes(targets[targets != tokenizer.end_of_text])) / len(targets)


def test_bits_per_byte_are_of_the_text_that_was_evaluated(tiny, text_file, tmp_path):
    numbers, prose = (''.join(f'{n * 7919} é\n' for n in range(3000)), text_file.read_text()[:9000])
    for name, text, tokenizer in (('a', numbers + prose, 'bpe:300'), ('b', prose, tmp_path / 'a')):
        (tmp_path / f'{name}.txt').write_text(text)
        prepare.main(['text', f'--input={tmp_path}/{name}.txt', f'--tokenizer={tokenizer}',
                      f'--data_dir={tmp_path}/{name}', '--val_fraction=0.5'])
    a, b = tmp_path / 'a', tmp_path / 'b'
    for dataset, shares, n in ((a, {a: 1.0}, 10), (f'{a}:0.3,{b}:0.7', {a: 0.3, b: 0.7}, 9999)):
        train.main([*tiny, f'--dataset={dataset}', '--max_iters=0', '--check=False',
                    f'--eval_iters={n}'])
        [row] = lines(tmp_path / 'out', 'val_loss')
        size = sum(share * bytes_a_token(folder, 4 * n) for folder, share in shares.items())
        assert row['val_bpb'] == pytest.approx(row['val_loss'] / size / math.log(2))


@pytest.mark.parametrize('losses', [[2.0, 3.0, 2.5, 4.5], [11.0, 11.005, 11.01, 11.005]])
def test_the_standard_error_of_a_loss_is_that_of_the_batches(losses):

    class Loader:
        device, world_size = torch.device('cpu'), 1

        def eval_batches(self, n):
            return [np.array([i]) for i in range(n)]

        def eval_batch(self, starts):
            return starts, torch.zeros(1, 8)  # a sequence of eight targets

    def error_of(n):
        stop = SimpleNamespace(raise_if_stopped=lambda: None)

        class Model:
            eval = train = staticmethod(lambda: None)

            def __call__(self, idx, targets):
                return None, torch.tensor(losses[int(idx[0])])
        return train.mean_loss(Model(), Loader(), n, nullcontext(), stop)
    loss, error = error_of(4)
    assert loss == pytest.approx(statistics.mean(losses))
    assert error == pytest.approx(statistics.stdev(losses) / 2, rel=0.01)  # they are float32
    assert error_of(1) == (losses[0], None)  # one batch has no spread
