import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from plaingpt.benchmarks import timing
from plaingpt.benchmarks.step_speed import own_times
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu_a_step_takes_as_long_as_its_kernels():
    times = step_seconds(lambda: torch.cuda._sleep(10**8), 1, 1, torch.device('cuda', 0))
    assert times[0] > 0.02  # cycles; the launch takes microseconds


def profiled(*events):
    """key_averages() of (name, on the device, μs, its kernels' μs)."""
    made = EventList(use_device='cuda')
    for i, (name, on_device, us, kernels_us) in enumerate(events):
        event = FunctionEvent(
            i, name, 0, 1000 * i, 1000 * i + us, use_device='cuda', stack=[],
            is_user_annotation=name.startswith('Optimizer'),
            device_type=DeviceType.CUDA if on_device else DeviceType.CPU)
        if kernels_us:
            event.append_kernel('gemm', 0, kernels_us)
        made.append(event)
    made._build_tree()
    return made.key_averages()


def test_a_profile_counts_each_kernel_once_and_each_operator_where_there_are_none():
    averages = profiled(('aten::mm', False, 20, 300), ('aten::mm', False, 20, 300),
                        ('Optimizer.step', True, 700, 0), ('aten::add', False, 5, 200),
                        ('gemm', True, 600, 0), ('add_kernel', True, 200, 0))
    assert own_times(averages, on_device=True) == [
        ('gemm', 1, 600, 0.75), ('add_kernel', 1, 200, 0.25)]
    assert own_times(averages, on_device=False) == [
        ('aten::mm', 2, 40, 40 / 45), ('aten::add', 1, 5, 5 / 45)]
