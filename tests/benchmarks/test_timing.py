import torch

from plaingpt.benchmarks import timing
from plaingpt.benchmarks.timing import matmul_flops, step_seconds, step_times

CPU = torch.device('cpu')


def test_warm_up_steps_do_not_count(monkeypatch):
    durations = iter([100.0, 50.0, 1.0, 2.0, 9.0])
    now = [0.0]
    monkeypatch.setattr(timing.time, 'perf_counter', lambda: now[0])

    def step():
        now[0] += next(durations)

    times = step_seconds(step, steps=3, warmup=2, device=CPU)
    assert times == [1.0, 2.0, 9.0]
    assert step_times(times) == {'step_ms': 2000, 'min_ms': 1000, 'max_ms': 9000}


def test_a_matmul_of_n_is_two_n_cubed_operations(monkeypatch):
    monkeypatch.setattr(timing, 'step_seconds', lambda *_: [0.5, 2.0, 3.0])
    assert matmul_flops(torch.float32, CPU, size=64) == 2 * 64**3 / 2.0
