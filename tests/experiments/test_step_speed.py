import pytest
import torch

from plaingpt.experiments import step_speed
from plaingpt.experiments.step_speed import matmul_flops, step_seconds

CPU = torch.device('cpu')


def test_warm_up_steps_do_not_count(monkeypatch):
    durations = iter([100.0, 50.0, 1.0, 2.0, 9.0])
    now = [0.0]
    monkeypatch.setattr(step_speed.time, 'perf_counter', lambda: now[0])

    def step():
        now[0] += next(durations)

    assert step_seconds(step, steps=3, warmup=2, device=CPU) == [1.0, 2.0, 9.0]


def test_a_matmul_of_n_is_two_n_cubed_operations(monkeypatch):
    monkeypatch.setattr(step_speed, 'step_seconds', lambda *_: [0.5, 2.0, 3.0])
    assert matmul_flops(torch.float32, CPU, size=64) == 2 * 64**3 / 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu_a_step_takes_as_long_as_its_kernels():
    times = step_seconds(lambda: torch.cuda._sleep(10**8), 1, 1, torch.device('cuda', 0))
    assert times[0] > 0.02  # cycles; the launch takes microseconds
