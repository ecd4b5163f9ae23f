"""Which precision a run takes where a CPU has both."""

import json
import random
from dataclasses import replace

import pytest
import torch
from processes import launch
from runs import lines, same, weights

import train
from model import GPTConfig
from plaingpt.system.distributed import launched_world
from plaingpt.training import dtype_choice
from plaingpt.training.dtype_choice import block_seconds, choose_training_dtype, is_clear
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=100, dropout=0.1)


@pytest.fixture
def has_bfloat16(monkeypatch):
    """has_bfloat16(float32=seconds): this CPU has it, and takes so long, beside a second."""
    def has(float32=1.0):
        monkeypatch.setattr(dtype_choice, 'cpu_has_bfloat16', lambda: True)
        monkeypatch.setattr(dtype_choice, 'block_seconds',
                            lambda *_, **__: {'float32': float32, 'bfloat16': 1.0})
    return has


def test_the_faster_dtype_is_taken_and_float32_where_bfloat16_gains_little(has_bfloat16):
    for float32, expected in ((0.5, 'float32'), (1.04, 'float32'), (1.06, 'bfloat16')):
        has_bfloat16(float32)
        dtype, why = choose_training_dtype(TrainConfig(), SHAPE, CPU)
        assert dtype == expected and '1000.0 ms' in why and f'{1000 * float32:.1f} ms' in why


def test_a_measurement_stops_early_only_if_no_pass_contradicts_the_others():
    assert is_clear([4.0, 9.0], [2.0, 3.0]) and is_clear([1.0, 1.1], [1.5, 1.2])
    assert not is_clear([4.0, 9.0], [2.0, 4.1]) and not is_clear([1.0, 1.0], [1.04, 1.04])


@pytest.mark.parametrize(('shape', 'batch_size'), [
    (replace(SHAPE, document_attention=True, document_start=99, rotary=True), 3),
    (replace(SHAPE, value_embeddings=True, conv=4, mlp='relu2', block_size=10**9), 'auto')])
def test_measuring_takes_any_shape_and_leaves_no_trace_in_the_run(shape, batch_size, monkeypatch):
    monkeypatch.setattr(dtype_choice, 'MEASURED_S', 0)
    monkeypatch.setattr(dtype_choice, 'PASS_FLOPS', 1e8)
    torch.set_num_threads(2)
    before = torch.get_rng_state(), random.getstate()
    made, gpt = [], dtype_choice.GPT
    monkeypatch.setattr(dtype_choice, 'GPT', lambda shape: made.append(shape) or gpt(shape))
    assert set(block_seconds(shape, batch_size, ('float32', 'bfloat16'))) == {'float32', 'bfloat16'}
    assert made[0].block_size <= 1024  # attention to more takes long, however narrow the model is
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_a_resumed_run_keeps_the_dtype_that_it_began_with(tiny, has_bfloat16, tmp_path, capsys):
    tiny = [*tiny, '--dtype=auto']
    has_bfloat16(float32=2.0)
    train.main([*tiny, f'--out_dir={tmp_path}/whole'])
    train.main([*tiny, '--max_iters=3'])
    has_bfloat16(float32=0.5)  # now float32 is faster
    train.main([*tiny, '--init_from=resume'])
    assert 'dtype bfloat16 (as before)' in capsys.readouterr().out
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'whole'))
    assert json.loads((tmp_path / 'out/run.json').read_text())['dtype'] == 'bfloat16'
    train.main([*tiny, f'--out_dir={tmp_path}/new'])
    assert not same(weights(tmp_path / 'new'), weights(tmp_path / 'whole'))


@pytest.mark.slow
def test_all_processes_take_what_rank_0_measured(tiny, has_bfloat16, tmp_path, monkeypatch):
    has_bfloat16()
    monkeypatch.setattr(dtype_choice, 'faster_dtype', lambda *_: (
        'bfloat16' if launched_world().rank == 0 else 'float32', ''))
    launch(train.main, 2, tmp_path, *tiny, '--dtype=auto', f'--out_dir={tmp_path}/two')
    launch(train.main, 2, tmp_path, *tiny, '--dtype=bfloat16', f'--out_dir={tmp_path}/asked')
    assert [line['loss'] for line in lines(tmp_path / 'two', 'loss')] \
        == [line['loss'] for line in lines(tmp_path / 'asked', 'loss')]
