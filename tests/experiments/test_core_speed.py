import random

import pytest
import torch

from plaingpt.experiments.core_speed import block_seconds


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_measuring_leaves_no_trace_in_the_run(dtype):
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert block_seconds(dtype) > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]
