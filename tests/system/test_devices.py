import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, fails

from plaingpt.system.devices import (
    GPUS,
    choose_compile,
    choose_device,
    choose_dtype,
    compile_watch,
    describe_load,
    find_gpu,
    mfu,
    peak_flops,
    seed_everything,
    use_expandable_segments,
)
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.streams import status

CPU = torch.device('cpu')


def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch):
    def main(_):
        raise UserError('what, where, fix')
    assert fails(capsys, monkeypatch, main) == 'error: what, where, fix'


def test_several_mistakes_are_a_line_each(capsys):
    def main(_):
        raise UserError('one\ntwo')
    with pytest.raises(SystemExit):
        run_script(main)
    assert capsys.readouterr().err == 'error: one\nerror: two\n'


def test_our_own_bugs_keep_their_traceback():
    def main(_):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        run_script(main)


@pytest.mark.parametrize('device', ['tpu', 'meta', 'mps', 'cuda', 'cuda:7'])
def test_a_device_that_is_not_here_is_an_error_with_a_way_out(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    with pytest.raises(UserError, match='cpu'):
        choose_device(device)


def test_without_a_gpu_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    assert choose_device('auto') == (CPU, 'no GPU found')


@pytest.mark.parametrize(('has_bfloat16', 'n_embd', 'expected'), [
    (True, 384, 'bfloat16'), (True, 128, 'float32'), (False, 384, 'float32')])
def test_a_cpu_computes_in_bfloat16_where_that_gains(monkeypatch, has_bfloat16, n_embd, expected):
    monkeypatch.setattr('plaingpt.system.devices.cpu_has_bfloat16', lambda: has_bfloat16)
    assert choose_dtype('auto', CPU, n_embd)[0] == expected


@pytest.mark.parametrize('path', [*sorted(ROOT.glob('config/*_cpu*.py')), ROOT / 'config/tiny.py'])
def test_a_recipe_for_cpus_asks_for_no_dtype_that_many_cpus_lack(path):
    assert 'dtype' not in path.read_text(encoding='utf-8')


@pytest.mark.parametrize('has_bfloat16', [True, False])
def test_bfloat16_without_hardware_for_it_is_said_to_be_slow(monkeypatch, has_bfloat16):
    monkeypatch.setattr('plaingpt.system.devices.cpu_has_bfloat16', lambda: has_bfloat16)
    dtype, why = choose_dtype('bfloat16', CPU, 384)
    assert dtype == 'bfloat16' and ('many times as fast' in why) == (not has_bfloat16)


@pytest.mark.parametrize(('in_hardware', 'expected'), [(True, 'bfloat16'), (False, 'float16')])
def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch, in_hardware, expected):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: in_hardware)
    assert choose_dtype('auto', torch.device('cuda'), 128)[0] == expected


def test_what_is_asked_for_is_what_happens():
    assert choose_dtype('float16', CPU, 8)[0] == 'float16'
    assert choose_compile(True, CPU)[0] is True
    assert choose_compile('auto', CPU)[0] is False
    assert choose_compile('auto', torch.device('cuda'))[0] is True


def test_ranks_draw_different_random_numbers_and_a_seed_repeats_them():
    draws = []
    for seed, rank in ((1, 0), (1, 1), (1, 0)):
        seed_everything(seed, rank)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])


def test_importing_the_rooms_needs_only_the_core_packages():
    code = ('import sys, configurator, model, plaingpt.tokens.batches;'
            'import plaingpt.training.checkpoint, plaingpt.monitoring.metrics;'
            'import plaingpt.tokens.tokenizers;'
            'print([m for m in ("tiktoken", "datasets", "wandb", "transformers", "matplotlib",'
            ' "tokenizers", "huggingface_hub") if m in sys.modules])')
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == '[]', out.stderr


def test_memory_grows_in_place_unless_the_environment_says_otherwise(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._C, '_accelerator_setAllocatorSettings', asked.append)
    for name in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'):
        monkeypatch.delenv(name, raising=False)
    use_expandable_segments(torch.device('cpu'))
    assert asked == []
    use_expandable_segments(torch.device('cuda'))
    assert asked == ['expandable_segments:True']
    monkeypatch.setenv('PYTORCH_CUDA_ALLOC_CONF', 'max_split_size_mb:64')
    use_expandable_segments(torch.device('cuda'))
    assert len(asked) == 1


def test_preparing_text_starts_without_torch():
    code = 'import sys, prepare; print("torch" in sys.modules)'
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == 'False', out.stderr


def test_utilisation_is_known_only_where_the_peak_is():
    assert mfu(1e12, 'cpu', 'bfloat16') is None
    assert mfu(1e12, 'NVIDIA A100-SXM4-80GB', 'float32') is None
    assert mfu(156e12, 'NVIDIA A100-SXM4-80GB', 'bfloat16') == 0.5


@pytest.mark.parametrize(('name', 'gpu'), [
    ('NVIDIA B200', 'B200'), ('NVIDIA GB200', None), ('NVIDIA GH200 480GB', 'GH200'),
    ('NVIDIA H200', 'H200'), ('NVIDIA H200 NVL', 'H200 NVL'),
    ('NVIDIA H100 80GB HBM3', 'H100'), ('NVIDIA H100 PCIe', 'H100 PCIe'),
    ('NVIDIA H100 NVL', 'H100 NVL'), ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None),
    ('NVIDIA H800', None), ('NVIDIA H20', None),
    ('NVIDIA A100-SXM4-40GB', 'A100'), ('NVIDIA A100-SXM4-80GB', 'A100'),
    ('NVIDIA A100 80GB PCIe', 'A100'), ('NVIDIA A100-PCIE-40GB', 'A100'),
    ('NVIDIA A100X', None), ('NVIDIA A40', None), ('NVIDIA A10', 'A10'), ('NVIDIA A10G', 'A10G'),
    ('NVIDIA L4', 'L4'), ('NVIDIA L40', 'L40'), ('NVIDIA L40S', 'L40S'),
    ('NVIDIA RTX A6000', 'A6000'), ('NVIDIA RTX 6000 Ada Generation', None),
    ('NVIDIA GeForce RTX 4090', 'RTX 4090'), ('NVIDIA GeForce RTX 4090 Laptop GPU', None),
    ('NVIDIA GeForce RTX 4090 D', None), ('NVIDIA GeForce RTX 3090', 'RTX 3090'),
    ('NVIDIA GeForce RTX 3090 Ti', None), ('Tesla T4', 'T4'), ('Tesla V100-SXM2-16GB', 'V100'),
    ('Tesla V100-PCIE-16GB', 'V100 PCIe'), ('Tesla V100S-PCIE-32GB', None), ('cpu', None)])
def test_a_peak_is_that_of_the_gpu_that_cuda_names_and_never_a_guess(name, gpu):
    assert peak_flops(name, 'bfloat16') == (GPUS[gpu].peak_flops if gpu else None)
    if gpu:
        assert peak_flops(gpu, 'bfloat16') == GPUS[gpu].peak_flops  # plan.py names them so


def test_a_busy_machine_is_told_where_torch_gets_fewer_cores_than_it_takes(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, 'get_num_threads', lambda: cores)
    for load, said in ((0.2, ''), (cores + 3.0, f'load {cores + 3:.1f} on {cores} cores')):
        monkeypatch.setattr(os, 'getloadavg', lambda load=load: (load, 0.0, 0.0))
        assert said in describe_load() and bool(describe_load()) == bool(said)


def test_a_gpu_is_named_by_any_part_that_no_other_has():
    assert all(find_gpu(name) == name for name in GPUS)
    for part, gpu in {'4090': 'RTX 4090', 'rtx-3090': 'RTX 3090', 'a100': 'A100', 'h100': 'H100',
                      'H100pcie': 'H100 PCIe', 'a10': 'A10', 't4': 'T4'}.items():
        assert find_gpu(part) == gpu
    with pytest.raises(UserError, match=r'several: use one of RTX 4090, RTX 3090$'):
        find_gpu('rtx')
    for unknown in ('A1000', ' '):
        with pytest.raises(UserError, match=r'unknown: use one of B200, .*T4, or --gpu_memory_gb'):
            find_gpu(unknown)


def test_what_is_compiled_is_shown_meanwhile_and_told_once_it_is_done():
    said, shown = [], []

    def backend(graph, _):
        while not status.parts:  # another thread shows the seconds
            pass
        shown.extend(status.parts.values())
        return graph

    torch.compiler.reset()
    for _ in range(2):  # as two runs in a notebook
        compile_watch.start(said.append)
    compiled = torch.compile(torch.sin, backend=backend)
    compiled(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        compiled(torch.ones(3))
    assert [line.partition(' in 0.')[0] for line in said] == \
        ['compiled the training step', 'compiled the evaluation']
    assert shown == ['compiling the training step, 0 s', 'compiling the evaluation, 0 s']
    assert not status.parts
    torch.compiler.reset()


@pytest.mark.parametrize(('environment', 'kept_in'), [
    ({'XDG_CACHE_HOME': '{tmp}/caches'}, '{tmp}/caches/plaingpt/inductor'),
    ({'XDG_CACHE_HOME': '', 'HOME': '{tmp}'}, '{tmp}/.cache/plaingpt/inductor'),
    ({'XDG_CACHE_HOME': '{tmp}/caches', 'TORCHINDUCTOR_CACHE_DIR': '/mine'}, '/mine'),
    ({'XDG_CACHE_HOME': '{tmp}/file/caches'}, None), ({'XDG_CACHE_HOME': 'caches'}, None)])
def test_compiled_code_is_kept_beside_other_caches_unless_told_otherwise(
        tmp_path, monkeypatch, environment, kept_in):
    (tmp_path / 'file').touch()
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '')
    monkeypatch.delenv('TORCHINDUCTOR_CACHE_DIR')
    for key, value in environment.items():
        monkeypatch.setenv(key, value.format(tmp=tmp_path))
    choose_compile(True, CPU)
    assert os.environ.get('TORCHINDUCTOR_CACHE_DIR') == (kept_in and kept_in.format(tmp=tmp_path))
    assert not (tmp_path / 'caches').exists()  # torch makes it when it compiles
