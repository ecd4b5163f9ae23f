"""Which precision a run takes where a CPU has both."""

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
from plaingpt.training.dtype_choice import block_seconds, choose_training_dtype
from plaingpt.training.settings import TrainConfig

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=100, dropout=0.1)


@pytest.fixture
def has_bfloat16(monkeypatch):
    """has_bfloat16(float32=seconds): this CPU has it, and a block takes so long, or in bfloat16 a
    second. Ranks other than 0 measure the opposite."""
    def has(float32):
        def seconds(*_, **__):
            fast, slow = ('float32', 'bfloat16')[::1 if launched_world().is_main else -1]
            return {fast: float32, slow: 1.0}
        monkeypatch.setattr(dtype_choice, 'cpu_has_bfloat16', lambda: True)
        monkeypatch.setattr(dtype_choice, 'block_seconds', seconds)
    return has


@pytest.mark.parametrize(('float32', 'expected'), [
    (0.5, 'float32'), (1.04, 'float32'), (1.06, 'bfloat16')])
def test_bfloat16_is_taken_where_it_is_clearly_faster(float32, expected, has_bfloat16):
    has_bfloat16(float32)
    dtype, why = choose_training_dtype(TrainConfig(), SHAPE, torch.device('cpu'))
    assert dtype == expected
    for ms in (1000.0, 1000 * float32):
        assert f'{ms:.1f} ms' in why


@pytest.mark.parametrize(('shape', 'batch_size'), [
    (replace(SHAPE, document_attention=True, document_start=99, rotary=True), 3),
    (replace(SHAPE, value_embeddings=True, conv=4, mlp='relu2', block_size=10**9), 'auto')])
def test_measuring_leaves_no_trace_in_the_run(shape, batch_size):
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert set(block_seconds(shape, batch_size, ('float32', 'bfloat16'))) == {'float32', 'bfloat16'}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]


def test_a_resumed_run_keeps_its_dtype(tiny, has_bfloat16, tmp_path):
    tiny = [*tiny, '--dtype=auto']
    has_bfloat16(float32=2.0)
    train.main([*tiny, f'--out_dir={tmp_path}/whole'])
    train.main([*tiny, '--max_iters=3'])
    has_bfloat16(float32=0.5)  # now float32 is faster
    train.main([*tiny, '--init_from=resume'])
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'whole'))
    train.main([*tiny, f'--out_dir={tmp_path}/new'])
    assert not same(weights(tmp_path / 'new'), weights(tmp_path / 'whole'))


@pytest.mark.slow
def test_all_processes_take_what_rank_0_measured(tiny, has_bfloat16, tmp_path):
    has_bfloat16(float32=2.0)
    for dtype in ('auto', 'bfloat16'):
        launch(train.main, 2, tmp_path, *tiny, f'--dtype={dtype}', f'--out_dir={tmp_path}/{dtype}')
    assert [line['loss'] for line in lines(tmp_path / 'auto', 'loss')] \
        == [line['loss'] for line in lines(tmp_path / 'bfloat16', 'loss')]
