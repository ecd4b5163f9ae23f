"""The learning rate of each iteration."""

import pytest

from plaingpt.core.schedules import get_lr
from plaingpt.core.settings import TrainConfig


def test_the_learning_rate_falls_on_a_cosine_after_a_warmup():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=109)
    for it, expected in {0: 0.1, 4: 0.5, 9: 1.0, 59: 0.55, 109: 0.1, 10**6: 0.1}.items():
        assert get_lr(it, config) == pytest.approx(expected), it
    assert all(get_lr(i, config) > get_lr(i + 1, config) for i in range(9, 108))


@pytest.mark.parametrize(('name', 'expected'), [
    ('linear', (0.595, 0.325, 0.1)), ('constant', (1.0, 1.0, 1.0)),
    ('wsd:0.5', (1.0, 0.1 + 0.9 * 25 / 55, 0.1))])
def test_a_schedule_ends_low_unless_it_is_constant(name, expected):
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110,
                         lr_schedule=name)
    assert get_lr(0, config) == pytest.approx(1 / 11)
    assert get_lr(10, config) == 1.0
    assert [get_lr(it, config) for it in (55, 85, 110)] == pytest.approx(expected)


def test_decay_lr_false_keeps_the_learning_rate():
    assert get_lr(0, TrainConfig(decay_lr=False, learning_rate=0.003)) == 0.003
