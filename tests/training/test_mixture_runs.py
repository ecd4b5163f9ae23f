"""Runs on a mixture of corpora, with the commands that a user gives."""

import pytest
from runs import TINY, lines

import train


@pytest.fixture
def two(data):
    """The options of a short run on two corpora."""
    return [*TINY, '--max_iters=6', '--n_layer=1', '--gradient_accumulation_steps=6',
            '--check=False', '--dataset=code:0.3,prose:0.7']


def test_a_mixture_can_be_overfitted(two, tmp_path):
    train.main([*two, '--check=overfit', '--learning_rate=2e-2',
                '--max_iters=15', '--lr_decay_iters=15', '--eval_interval=15', '--out_dir=out'])
    rows = lines(tmp_path / 'out', 'val_loss')
    assert rows[-1]['train_loss'] < rows[0]['train_loss'] - 1
