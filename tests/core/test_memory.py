"""A plan predicts what torch's memory tracker counts of the whole step."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import fails
from runs import change_steps, same, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from model import GPT, GPTConfig
from plaingpt.checks import preflight
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import evaluation
from plaingpt.monitoring.health import Health
from plaingpt.system.formatting import GIB
from plaingpt.training import memory
from plaingpt.training.memory import predict
from plan import PlanConfig

# nanoGPT's character model with five layers, which a plan reckons from two and four
CHARACTERS = GPTConfig(block_size=256, vocab_size=65, n_layer=5, n_head=6, n_embd=384, bias=False)
SHALLOW = GPTConfig(bias=False, n_layer=2)  # planned by fewer traces
SMALL = replace(CHARACTERS, n_layer=4, vocab_size=5000)
NEWER = {'rotary': True, 'qk_norm': True, 'rmsnorm': True, 'mlp': 'swiglu'}
UNTIED = replace(SMALL, tied_head=False, rotary=True, rmsnorm=True, mlp='swiglu')
CUDA = torch.device('cuda')


def settings(shape, batch_size=8, micro_steps=1, processes=1, **config):
    # What is looked at between steps comes at another time.
    return PlanConfig(**{'batch_size': batch_size, 'block_size': shape.block_size, 'report': False,
                         'gradient_accumulation_steps': micro_steps * processes,
                         'processes': processes, **config})


def traced(shape, config, dtype='bfloat16', device='cpu'):
    """{phase: {owner: bytes}} of the step at its full size."""
    chunk = memory.chunk_size(config.batch_size * shape.block_size, shape.vocab_size,
                              device)  # as on that device, whatever is here
    alike = replace(config, parallel='auto', processes=1)
    return memory.trace(shape, alike, dtype, device, chunk=chunk,
                        accumulating=config.accumulation() > config.processes)


@pytest.mark.parametrize(('shape', 'device', 'dtype', 'step'), [
    ({'dropout': 0.2}, 'cuda', 'float32', {'micro_steps': 4}),
    ({'vocab_size': 5000, 'tied_head': False, **NEWER}, 'cpu', 'bfloat16',
     {'optimizer': 'muon', 'activation_checkpointing': 'selective', 'batch_size': 8}), *(
        pytest.param({'n_layer': 6, **shape}, *where, marks=pytest.mark.slow)
        for shape in [
            {'dropout': 0.2}, {'value_embeddings': True, 'ngram_rows': 2048, 'tied_head': False},
            {'n_layer': 12, 'n_embd': 768, 'n_head': 12, 'block_size': 1024, 'vocab_size': 50257}]
        for where in [
            ('cpu', 'float32', {'batch_size': 64}), ('cpu', 'bfloat16', {'batch_size': 1}),
            ('cpu', 'float16', {'optimizer': 'sgd'}), ('cuda', 'bfloat16', {'micro_steps': 4}),
            ('cuda', 'bfloat16', {'activation_checkpointing': 'full'})])])
def test_a_step_is_predicted(shape, device, dtype, step):
    shape = replace(CHARACTERS, **shape)
    where = shape, settings(shape, **{'batch_size': 16, **step}), dtype, device
    plan, counted = predict(*where), traced(*where)
    totals = {phase: sum(counted[phase].values()) for phase in plan.phases}
    assert max(plan.totals.values()) == pytest.approx(max(totals.values()), rel=0.03)
    assert plan.totals == pytest.approx(totals, rel=0.1)


def test_a_long_sequence_is_predicted_from_shorter_ones():
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=8000, vocab_size=5000,
                      document_attention=True, document_start=0)
    where = shape, settings(shape, 1), 'float32', 'cpu'
    plan, counted = predict(*where), traced(*where)
    totals = {phase: sum(counted[phase].values()) for phase in plan.totals}
    assert plan.totals == pytest.approx(totals, rel=0.1)
    assert plan.totals != totals  # else it was not planned from shorter ones


def test_the_largest_batch_that_divides_the_step_is_taken():
    config = settings(SHALLOW, 'auto', total_batch_size=480 * SHALLOW.block_size)
    where = SHALLOW, config, 'bfloat16', 'cuda'
    largest = memory.largest_batch(*where, 24 * GIB)
    total, more = (predict(SHALLOW, replace(config, batch_size=n), *where[2:]).total
                   for n in (largest, min(n for n in range(largest + 1, 481) if 480 % n == 0)))
    assert 480 % largest == 0
    assert total <= 24 * GIB < more
    assert memory.largest_batch(*where, GIB) == 0


# -----------------------------------------------------------------------------
# several processes


@pytest.mark.parametrize(
    ('shape', 'processes', 'micro_steps', 'dtype', 'checkpointing'),
    [(UNTIED, 2, 2, 'float32', 'full'), *(
        pytest.param(shape, *case, marks=pytest.mark.slow) for shape in (SMALL, UNTIED)
        for case in [(3, 2, 'bfloat16', 'selective'), (8, 1, 'bfloat16', 'none'),
                     (8, 1, 'float32', 'none'), (2, 1, 'bfloat16', 'full')])])
def test_a_sharded_step_is_planned_close_to_what_fsdp2_takes(
        shape, processes, micro_steps, dtype, checkpointing, monkeypatch):
    config = settings(shape, 8, micro_steps, processes, parallel='fsdp',
                      activation_checkpointing=checkpointing)
    plan = predict(shape, config, dtype, 'cuda')
    # From now on GPTs are sharded among processes to whom nothing travels: torch's fake ones.
    dist.init_process_group('fake', rank=0, world_size=processes, store=FakeStore())
    mesh = init_device_mesh('cpu', (processes,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == 'float32' else getattr(torch, dtype),
        reduce_dtype=torch.float32, cast_forward_inputs=False)

    def sharded_gpt(shape):
        gpt = GPT(shape)
        for block in gpt.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(gpt, mesh=mesh, reshard_after_forward=False)

    monkeypatch.setattr(memory, 'GPT', sharded_gpt)
    try:
        counted = traced(shape, config, dtype, 'cuda')
    finally:
        dist.destroy_process_group()
    peak = max(sum(held.values()) for held in counted.values())
    # On a GPU collectives overlap with the work, so a block more is there; a CPU waits for them.
    assert 0.98 * peak <= plan.peak < 1.12 * peak


@pytest.mark.parametrize(('batch', 'smallest'), [
    ({}, {}), ({'batch_size': 'auto', 'total_batch_size': 16 * 8 * SMALL.block_size},
               {'batch_size': 1, 'micro_steps': 2})])  # the batch follows
def test_the_model_is_sharded_where_copies_of_it_do_not_fit(batch, smallest):
    def choice(available, **config):
        config = settings(SMALL, **{'processes': 8, **batch, **config})
        return memory.choose_parallel(config, SMALL, 'bfloat16', 'cuda', available)

    copies = predict(SMALL, settings(SMALL, processes=8, **smallest), 'bfloat16', 'cuda').total
    assert choice(copies) == 'ddp'
    assert choice(copies - 1) == 'fsdp'
    assert choice(copies, parallel='fsdp') == 'fsdp'
    assert choice(1, parallel='ddp') == 'ddp'


# -----------------------------------------------------------------------------
# before and in training


def test_no_plan_is_made_only_where_a_step_certainly_fits():
    logits = replace(SMALL, n_layer=1, n_embd=96, vocab_size=50257)
    for shape in (SMALL, replace(UNTIED, value_embeddings=True), logits):
        config = settings(shape, 8, 2, 8)
        assert predict(shape, config, 'float32', 'cuda').peak \
            < 4 * memory.rough_bytes(shape, 8), shape


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so many are free from now on."""
    return lambda size: monkeypatch.setattr(memory, 'device_memory', lambda *_: size)


TINY = GPTConfig(16, 93, 2, 2, 32, bias=False)


def of_tiny(batch_size):
    return predict(TINY, settings(TINY, batch_size, 2), 'float32', 'cpu').total


def test_an_automatic_batch_trains_as_one_that_was_asked_for(tiny, tmp_path, free):
    free((of_tiny(8) + of_tiny(16)) // 2)
    for batch_size in ('auto', 8):
        train.main([*tiny, f'--batch_size={batch_size}', '--total_batch_size=512',
                    '--dropout=0.1', f'--out_dir={batch_size}'])
    assert checkpoints.find('auto').settings()['batch_size'] == 8
    assert same(weights('auto'), weights('8'))


@pytest.mark.parametrize(('changes', 'names'), [
    (['--n_layer=1000', '--n_embd=20000'], 'n_layer=1000'),
    (['--batch_size=100000000'], 'batch_size=100000000'),
    (['--n_embd=10000000000'], 'out of memory')])
def test_a_run_far_too_large_is_one_line_before_it_is_made(
        changes, names, tiny, capsys, monkeypatch):
    assert names in fails(capsys, monkeypatch, train.main, *tiny, '--check=False', *changes)


def test_a_step_a_byte_too_large_is_refused(tiny, capsys, monkeypatch, free):
    free(of_tiny(4) - 1)
    assert 'batch_size=4' in fails(capsys, monkeypatch, train.main, *tiny)
    train.main([*tiny, '--eval_only'])  # which makes no step


def test_out_of_memory_saves_the_steps_before_it(tiny, tmp_path, capsys, monkeypatch):
    def step(n, model, loss):
        if n == 5:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')
        return loss

    change_steps(monkeypatch, step)
    said = fails(capsys, monkeypatch, train.main, *tiny)
    for words in ('20.00 GiB', '--batch_size', '--activation_checkpointing', '--init_from=resume'):
        assert words in said
    assert checkpoints.find(tmp_path / 'out').iter_num == 4


@pytest.mark.parametrize(('phase', 'module', 'function'), [
    ('setup', train, 'build_optimizer'), ('preflight', preflight, 'run_checks'),
    ('evaluation', evaluation, 'mean_loss'), ('save', checkpoints.Saver, 'save'),
    ('health check', Health, 'measure')])
def test_out_of_memory_says_where_it_was(tiny, capsys, monkeypatch, phase, module, function):
    monkeypatch.setattr(module, function, lambda *_, **__: torch.empty(2**60, dtype=torch.int8))
    said = fails(capsys, monkeypatch, train.main, *tiny,
                 f'--check={phase == "preflight"}')
    assert phase in said
    assert '--batch_size' in said
