"""Runs on a mixture of corpora, with the commands that a user gives."""

import json

import pytest
from helpers import TINY, lines

import evaluate
import train
from plaingpt.data.dataset import open_dataset
from plaingpt.system.errors import UserError


@pytest.fixture
def two(data):
    """The options of a short run on two corpora."""
    return [*TINY, '--max_iters=6', '--n_layer=1', '--gradient_accumulation_steps=6',
            '--check=False', '--dataset=code:0.3,prose:0.7']


def test_the_loss_is_the_weighted_mean_of_the_corpora(two, tmp_path, capsys):
    train.main([*two, '--out_dir=out', '--eval_iters=100'])  # all of both
    out, rows = capsys.readouterr().out, lines(tmp_path / 'out', 'val_loss')
    tokens = 6 * 6 * 4 * 16
    sizes = [len(open_dataset(f'data/{name}').split('train')) for name in ('code', 'prose')]
    epochs = [share * tokens / size for share, size in zip((0.3, 0.7), sizes, strict=True)]
    assert f'{epochs[0]:.3g} epochs of code (30.0%), {epochs[1]:.3g} epochs of prose (70.0%)' in out
    evaluate.main(['--out_dir=out', '--checkpoint=latest', '--device=cpu', '--output=scores.json'])
    scores = json.loads((tmp_path / 'scores.json').read_text())['results']['val']
    losses = [scores[name]['loss'] for name in ('code', 'prose')]
    assert 0.3 * losses[0] + 0.7 * losses[1] == pytest.approx(rows[-1]['val_loss'], abs=0.002)


def test_a_mixture_resumes_only_as_it_was(two):
    train.main([*two, '--out_dir=out', '--max_iters=3'])
    for other in ('code:0.4,prose:0.6', 'prose:0.7,code:0.3', 'code'):
        with pytest.raises(UserError, match=r'it has dataset=code:0\.3,prose:0\.7'):
            train.main([*two, f'--dataset={other}', '--out_dir=out', '--init_from=resume'])
    train.main([*two, '--dataset=data/code:0.3,data/prose:0.7', '--out_dir=out',
                '--init_from=resume'])


def test_a_mixture_can_be_overfitted(two, tmp_path):
    train.main([*two, '--check=overfit', '--learning_rate=2e-2',
                '--max_iters=15', '--lr_decay_iters=15', '--eval_interval=15', '--out_dir=out'])
    rows = lines(tmp_path / 'out', 'val_loss')
    assert rows[-1]['train_loss'] < rows[0]['train_loss'] - 1
