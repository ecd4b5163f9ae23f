"""An average of the weights, which is evaluated and saved in their place."""

import pytest
import torch
from helpers import lines, same, weights

import train
from plaingpt.training.averaging import averaged, keep_average


@pytest.mark.parametrize('optimizer', [torch.optim.AdamW, torch.optim.SGD])
def test_the_average_is_an_exponential_one_that_soon_forgets_the_first_weights(optimizer):
    p = torch.nn.Parameter(torch.tensor([8.0]))
    unused = torch.nn.Parameter(torch.ones(1))
    optimizer = optimizer([p, unused], lr=1.0)
    keep_average(optimizer, 0.75)
    seen, expected = [], None
    for n in range(1, 41):
        p.grad = torch.ones(1)
        optimizer.step()
        seen.append(p.item())
        decay = min(0.75, n / (9 + n))
        expected = seen[0] if n == 1 else decay * expected + (1 - decay) * seen[-1]
    with averaged(optimizer):
        assert p.item() == pytest.approx(expected) and unused.item() == 1
    assert p.item() == seen[-1]


def test_a_run_can_end_its_average_and_goes_on_from_the_weights(tiny, tmp_path):
    out, plain = tmp_path / 'out', tmp_path / 'plain'
    train.main([*tiny, f'--out_dir={plain}'])
    train.main([*tiny, '--average_decay=0.5', '--max_iters=3'])
    assert not same(weights(out), weights(plain, 3))
    assert lines(out, 'val_loss')[1]['val_loss'] != lines(plain, 'val_loss')[1]['val_loss']
    train.main([*tiny, '--average_decay=0', '--init_from=resume'])
    assert same(weights(out), weights(plain))
    assert [line['loss'] for line in lines(out, 'loss')] \
        == [line['loss'] for line in lines(plain, 'loss')]
