import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from processes import fails

import sample
import train
from plaingpt.system import devices
from plaingpt.system.devices import (
    PEAKS,
    choose_compile,
    choose_device,
    choose_dtype,
    cpu_has_bfloat16,
    peak_flops,
)
from plaingpt.system.errors import UserError

CPU, GPU = torch.device('cpu'), torch.device('cuda')


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability, …): torch sees a GPU of this kind."""
    def gpu(capability=(9, 0), has_triton=True):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda _: capability)
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported',
                            lambda including_emulation: capability >= (8, 0))
        monkeypatch.setattr('torch.utils._triton.has_triton', lambda: has_triton)
    return gpu


@pytest.mark.skipif(torch.backends.mps.is_available(), reason='there is a GPU')
def test_without_a_gpu_only_the_cpu_can_be_chosen():
    assert choose_device('auto')[0] == CPU
    for device in ('tpu', 'meta', 'mps', 'cuda', 'cuda:7'):
        with pytest.raises(UserError, match='cpu'):
            choose_device(device)


def test_a_cpu_uses_bfloat16_for_wide_models_if_it_has_it_in_hardware():
    wide = 'bfloat16' if cpu_has_bfloat16() else 'float32'
    assert choose_dtype('auto', CPU, n_embd=384)[0] == wide
    assert choose_dtype('auto', CPU, n_embd=128)[0] == 'float32'
    assert choose_dtype('auto', CPU, n_embd=128, training=True)[0] == wide
    assert choose_dtype('auto', CPU, n_embd=32, training=True)[0] == 'float32'


def test_a_gpu_without_bfloat16_uses_float16(gpu):
    for capability, expected in (((8, 0), 'bfloat16'), ((7, 5), 'float16')):
        gpu(capability)
        assert choose_dtype('auto', GPU, n_embd=128)[0] == expected


@pytest.mark.parametrize('capability, has_triton, reason', [
    ((7, 5), True, '7.5'), ((8, 9), False, 'Triton')])  # as on Windows
def test_a_gpu_that_triton_cannot_compile_for_runs_eagerly(capability, has_triton, reason, gpu):
    gpu(capability, has_triton)
    is_compiled, why = choose_compile('auto', GPU)
    assert is_compiled is False
    assert reason in why


def test_compile_is_the_default_on_a_gpu_only(gpu, monkeypatch):
    monkeypatch.setattr(devices, 'build_problem', lambda device: None)
    gpu()
    assert choose_compile('auto', GPU)[0] is True
    assert choose_compile('auto', CPU)[0] is False
    assert choose_compile(True, CPU)[0] is True


@pytest.mark.skipif(not shutil.which('g++') or not Path(
    sysconfig.get_path('include'), 'Python.h').exists(), reason='needs g++ and the Python headers')
def test_a_compiler_is_found(monkeypatch):
    monkeypatch.delenv('CXX', raising=False)
    assert devices.build_problem(CPU) is None


@pytest.mark.parametrize('problem', ['no compiler', 'a compiler that fails', 'no cache'])
def test_a_machine_that_cannot_compile_runs_eagerly_or_names_the_fix(
        problem, gpu, tmp_path, monkeypatch):
    import torch._inductor  # noqa: F401, which needs a cache folder when it is imported
    fixes = {CPU: 'CXX', GPU: 'CC'}
    for variable in fixes.values():
        monkeypatch.delenv(variable, raising=False)
    if problem == 'no compiler':
        monkeypatch.setenv('PATH', str(tmp_path))
    elif problem == 'a compiler that fails':
        monkeypatch.setenv('CXX', 'false')
        monkeypatch.setenv('CC', 'false')
    else:
        (tmp_path / 'file').touch()
        for variable in fixes.values():
            monkeypatch.setenv(variable, 'true')  # which is found
        monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'file'))
        fixes = dict.fromkeys(fixes, 'TORCHINDUCTOR_CACHE_DIR')
    gpu()
    for device, fix in fixes.items():
        with pytest.raises(UserError, match=f'(?s){fix}.*--compile=False'):
            choose_compile(True, device)
        assert choose_compile(False, device)[0] is False
    is_compiled, why = choose_compile('auto', GPU)
    assert is_compiled is False
    assert fixes[GPU] in why


def test_an_error_of_the_compiler_names_the_option_that_avoids_it(capsys, monkeypatch):
    from torch._inductor.exc import InductorError

    def main(argv):
        raise InductorError(RuntimeError('Compiler: cl is not found.'), None)
    line = fails(capsys, monkeypatch, main)
    assert 'cl is not found' in line
    assert '--compile=False' in line


def test_a_missing_compiler_is_told_before_anything_is_written(
        tiny, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    for main, *argv in (train.main, *tiny), (sample.main, trained, '--device=cpu'):
        assert '--compile' in fails(capsys, monkeypatch, main, *argv, '--compile=True')
        assert not (tmp_path / 'out').exists()


def test_the_peak_of_a_gpu_is_looked_up_by_its_name():
    for name, gpu in {
            'NVIDIA H200 NVL': 'H200 NVL', 'NVIDIA H100 80GB HBM3': 'H100',
            'NVIDIA H100 PCIe': 'H100 PCIE', 'NVIDIA A100-SXM4-40GB': 'A100',
            'NVIDIA RTX 6000 Ada Generation': '6000 ADA', 'NVIDIA A10G': 'A10G',
            'NVIDIA GeForce RTX 5070 Ti': '5070 TI', 'Tesla T4': 'T4'}.items():
        assert peak_flops(name, 'bfloat16') == PEAKS[gpu], name


def test_the_peak_of_an_unknown_gpu_is_not_guessed():
    for name in ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'NVIDIA H800', 'NVIDIA A100X',
                 'NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA GeForce RTX 5090 D', 'cpu'):
        assert peak_flops(name, 'bfloat16') is None, name
