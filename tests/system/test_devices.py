import platform
import re
import sys

import pytest
import torch
from processes import fails

import sample
import train
from plaingpt.system import devices
from plaingpt.system.devices import (
    choose_compile,
    choose_device,
    choose_dtype,
    prepare_device,
)
from plaingpt.system.errors import UserError
from plaingpt.system.gpus import PEAKS, peak_flops

CPU = torch.device('cpu')


def test_without_a_gpu_the_device_is_the_cpu_and_any_other_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    assert choose_device('auto') == (CPU, 'no GPU found')
    for device in ('tpu', 'meta', 'mps', 'cuda', 'cuda:7'):
        with pytest.raises(UserError, match='cpu'):
            choose_device(device)


def test_a_cpu_computes_in_bfloat16_where_that_gains(monkeypatch):
    for has_bfloat16, n_embd, expected in (
            (True, 384, 'bfloat16'), (True, 128, 'float32'), (False, 384, 'float32')):
        monkeypatch.setattr(devices, 'cpu_has_bfloat16', lambda has=has_bfloat16: has)
        assert choose_dtype('auto', CPU, n_embd)[0] == expected, (has_bfloat16, n_embd)
        dtype, why = choose_dtype('bfloat16', CPU, n_embd)
        assert dtype == 'bfloat16' and ('many times as fast' in why) == (not has_bfloat16)


def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch):
    for in_hardware, expected in ((True, 'bfloat16'), (False, 'float16')):
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported',
                            lambda including_emulation, found=in_hardware: found)
        assert choose_dtype('auto', torch.device('cuda'), 128)[0] == expected


def test_a_gpu_compiles_where_triton_can_and_says_why_not(monkeypatch):
    monkeypatch.setattr(devices, 'build_problem', lambda device: None)
    for capability, triton, expected, why in (
            ((9, 0), True, True, 'CUDA'), ((7, 5), True, False, '8.0 and newer.* 7.5'),
            ((8, 9), False, False, 'Triton.* is not installed')):  # as on Windows
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda _, found=capability: found)
        monkeypatch.setattr('torch.utils._triton.has_triton', lambda found=triton: found)
        found, reason = choose_compile('auto', torch.device('cuda'))
        assert found is expected and re.search(why, reason), reason
        assert choose_compile(True, torch.device('cuda'))[0] is True
    assert choose_compile(True, CPU)[0] is True and choose_compile('auto', CPU)[0] is False


@pytest.fixture
def gpu_with_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda _: (9, 0))
    monkeypatch.setattr('torch.utils._triton.has_triton', lambda: True)
    return torch.device('cuda')


@pytest.mark.parametrize('lacks', ['compilers', 'its compiler', 'headers', 'a cache'])
def test_what_cannot_compile_here_runs_eagerly_or_is_refused_with_the_fix(
        lacks, gpu_with_triton, tmp_path, monkeypatch):
    import torch._inductor  # noqa: F401, which needs a cache folder when it is imported
    for variable in ('CC', 'CXX'):
        monkeypatch.delenv(variable, raising=False)
    if lacks == 'compilers':
        monkeypatch.setenv('PATH', str(tmp_path))
    elif lacks == 'its compiler':
        monkeypatch.setenv('CC', str(tmp_path / 'gcc'))
        monkeypatch.setenv('CXX', str(tmp_path / 'g++'))
    elif lacks == 'headers':
        monkeypatch.setattr(devices.sysconfig, 'get_path', lambda *_: str(tmp_path))
    else:
        (tmp_path / 'file').touch()
        monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'file'))
    for device, variable in (CPU, 'CXX'), (gpu_with_triton, 'CC'):
        fix = 'TORCHINDUCTOR_CACHE_DIR' if lacks == 'a cache' else variable
        with pytest.raises(UserError, match=fix) as refusal:
            choose_compile(True, device)
        assert '--compile=False' in str(refusal.value) and '\n' not in str(refusal.value)
        assert choose_compile(False, device)[0] is False
    found, reason = choose_compile('auto', gpu_with_triton)
    assert found is False and fix in reason


def test_code_that_builds_but_may_not_run_is_not_compiled(monkeypatch):
    def refuse(path):
        raise OSError(f'{path}: failed to map segment from shared object')  # /tmp is noexec
    monkeypatch.setattr(devices.ctypes, 'CDLL', refuse)
    with pytest.raises(UserError, match='compile=True'):
        choose_compile(True, CPU)


def test_what_fails_to_compile_later_is_one_error_with_the_way_out(capsys, monkeypatch):
    from torch._inductor.exc import InductorError

    def main(argv):
        raise InductorError(RuntimeError('Compiler: cl is not found.'), None)
    line = fails(capsys, monkeypatch, main)
    assert 'cl is not found' in line and '--compile=False' in line


def test_without_a_compiler_nothing_is_loaded_or_written(
        tiny, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    for main, *argv in (train.main, *tiny), (sample.main, trained, '--device=cpu'):
        assert 'compile' in fails(capsys, monkeypatch, main, *argv, '--compile=True')
        assert capsys.readouterr().out == '' and not (tmp_path / 'out').exists()


def test_memory_grows_in_place_where_it_can_unless_the_environment_says_otherwise(monkeypatch):
    asked = []
    monkeypatch.setattr(sys, 'platform', 'linux')
    monkeypatch.setattr(platform, 'release', lambda: '6.8.0-45-generic')
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda _: None)
    monkeypatch.setattr(torch._C, '_accelerator_setAllocatorSettings', asked.append)
    for name in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'):
        monkeypatch.delenv(name, raising=False)
    prepare_device(torch.device('cpu'))
    assert asked == []
    prepare_device(torch.device('cuda'))
    assert asked == ['expandable_segments:True']
    monkeypatch.setenv('PYTORCH_CUDA_ALLOC_CONF', 'max_split_size_mb:64')
    prepare_device(torch.device('cuda'))
    monkeypatch.delenv('PYTORCH_CUDA_ALLOC_CONF')
    for release in ('5.15.90.1-microsoft-standard-WSL2', '4.4.0-19041-Microsoft'):
        monkeypatch.setattr(platform, 'release', lambda found=release: found)
        prepare_device(torch.device('cuda'))
    monkeypatch.setattr(platform, 'release', lambda: '11')
    monkeypatch.setattr(sys, 'platform', 'win32')
    prepare_device(torch.device('cuda'))
    assert len(asked) == 1


def test_a_peak_is_that_of_the_gpu_that_cuda_names_and_never_a_guess():
    for name, gpu in {
            'NVIDIA H200 NVL': 'H200 NVL', 'NVIDIA H100 80GB HBM3': 'H100',
            'NVIDIA H100 PCIe': 'H100 PCIE', 'NVIDIA A100-SXM4-40GB': 'A100',
            'NVIDIA A100 80GB PCIe': 'A100 PCIE', 'NVIDIA B300 SXM6 AC': 'B300',
            'NVIDIA RTX 6000 Ada Generation': '6000 ADA', 'NVIDIA RTX A6000': 'A6000',
            'NVIDIA A10': 'A10', 'NVIDIA A10G': 'A10G', 'NVIDIA GeForce RTX 4090': '4090',
            'NVIDIA GeForce RTX 5070 Ti': '5070 TI', 'NVIDIA GeForce RTX 5070': '5070',
            'Tesla T4': 'T4', 'Tesla V100-SXM2-16GB': 'V100'}.items():
        assert peak_flops(name, 'bfloat16') == PEAKS[gpu], name
    for name in ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'NVIDIA H800', 'NVIDIA A100X', 'NVIDIA A40',
                 'NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA GeForce RTX 5090 D', 'cpu'):
        assert peak_flops(name, 'bfloat16') is None, name
