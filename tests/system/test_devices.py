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
    def gpu(capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda _: capability)
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported',
                            lambda including_emulation: capability >= (8, 0))
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


def test_compile_is_the_default_on_a_gpu_only(gpu, monkeypatch):
    monkeypatch.setattr(devices, 'compile_problem', lambda device: None)
    gpu()
    assert choose_compile('auto', GPU)[0] is True
    assert choose_compile('auto', CPU)[0] is False
    assert choose_compile(True, CPU)[0] is True


def test_a_gpu_that_cannot_compile_runs_eagerly(gpu):
    for capability, reason in (((7, 5), '7.5'), ((9, 0), 'CC')):  # torch finds no GPU here
        gpu(capability)
        is_compiled, why = choose_compile('auto', GPU)
        assert is_compiled is False
        assert reason in why


def test_a_compilation_that_fails_is_refused_before_anything_is_written(
        tiny, trained, tmp_path, capsys, monkeypatch):
    from torch._inductor import config
    with config.patch({'cpp.cxx': (None, 'false'), 'force_disable_caches': True}):
        for main, *argv in (train.main, *tiny), (sample.main, trained, '--device=cpu'):
            torch._dynamo.reset()  # it remembers the functions that other tests have compiled
            line = fails(capsys, monkeypatch, main, *argv, '--compile=True')
            assert 'CXX' in line
            assert '--compile=False' in line
    assert not (tmp_path / 'out').exists()


def test_an_error_of_the_compiler_names_the_option_that_avoids_it(capsys, monkeypatch):
    from torch._inductor.exc import InductorError

    def main(argv):
        raise InductorError(RuntimeError('Compiler: cl is not found.'), None)
    line = fails(capsys, monkeypatch, main)
    assert 'cl is not found' in line
    assert '--compile=False' in line


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
