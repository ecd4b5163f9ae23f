import random

import pytest
import torch

from plaingpt.experiments import core_speed
from plaingpt.experiments.core_speed import MATMUL_SIZE, block_seconds, fastest, matmul_speed


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_measuring_leaves_no_trace_in_the_run(dtype):
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert block_seconds(dtype) > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]


def test_the_speed_of_a_matmul_is_its_flops_by_the_fewest_seconds(monkeypatch):
    monkeypatch.setattr(core_speed, 'fastest', lambda call, clock: 0.01)
    assert matmul_speed('float32') == 2 * MATMUL_SIZE**3 / 0.01


def test_the_fewest_seconds_leave_out_the_first_call(monkeypatch):
    monkeypatch.setattr(core_speed, 'MEASURE_S', 0)
    readings = iter([0, 1, 10, 14, 20, 23])  # calls of 1 (the warmup), 4 and 3 seconds
    assert fastest(lambda: None, lambda: next(readings)) == 3
