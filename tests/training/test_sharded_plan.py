"""What a process takes of a step that several share, as FSDP2 and DDP do."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracked_memory import tracked_step

import train
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB, gib
from plaingpt.training import memory_fit, memory_planner
from plaingpt.training.memory_planner import (
    StepSettings,
    choose_parallel,
    largest_batch,
    predict,
    rough_bytes,
    savings,
    step_settings,
)
from plaingpt.training.settings import TrainConfig
from plan import PlanConfig

SMALL = GPTConfig(block_size=256, vocab_size=5000, n_layer=4, n_head=6, n_embd=384, bias=False)
UNTIED = replace(SMALL, tied_head=False, rotary=True, rmsnorm=True, mlp='swiglu')


def settings(processes, micro_steps=1, dtype='bfloat16', parallel='fsdp', device='cuda', **config):
    # What is looked at between steps comes at another time.
    plain = TrainConfig(**{'report': False, **config})
    return StepSettings(8, micro_steps, dtype, device, processes, parallel, plain)


@pytest.fixture
def shard(monkeypatch):
    """shard(step): from now on memory_planner's GPT is sharded among processes that only one of is
    there: torch's fake ones, to whom nothing travels."""
    def shard(step):
        dist.init_process_group('fake', rank=0, world_size=step.processes, store=FakeStore())
        mesh = init_device_mesh('cpu', (step.processes,))
        dtype = None if step.dtype == 'float32' else getattr(torch, step.dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32,
                                      cast_forward_inputs=False)

        def sharded_gpt(shape):
            gpt = GPT(shape)
            for block in gpt.transformer.h:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            return fully_shard(gpt, mesh=mesh, reshard_after_forward=False)

        monkeypatch.setattr(memory_planner, 'GPT', sharded_gpt)

    yield shard
    dist.destroy_process_group()


CASES = [(3, 2, 'bfloat16', 'selective'), (8, 1, 'float32', 'none'), (2, 1, 'bfloat16', 'full')]
SLOW = [pytest.param(shape, *case, marks=pytest.mark.slow)
        for shape in (SMALL, UNTIED) for case in CASES]


@pytest.mark.parametrize(
    ('shape', 'processes', 'micro_steps', 'dtype', 'checkpointing'),
    [(SMALL, 8, 1, 'bfloat16', 'none'), (UNTIED, 2, 2, 'float32', 'full'), *SLOW])
def test_a_sharded_step_is_planned_close_to_what_fsdp2_takes(
        shape, processes, micro_steps, dtype, checkpointing, shard):
    step = settings(processes, micro_steps, dtype, activation_checkpointing=checkpointing)
    plan = predict(shape, step)
    shard(step)
    held = tracked_step(shape, step)
    # On a GPU collectives overlap with the work, so a block more is there; a CPU waits for them.
    assert held['peak'] <= plan.peak < 1.12 * held['peak']
    for part in ('backward', 'optimizer'):
        assert plan.totals[f'after {part}'] == pytest.approx(held[part], rel=0.03), part


def test_what_is_kept_divides_by_the_processes():
    for micro_steps in (1, 4):
        alone = predict(SMALL, settings(1, micro_steps, parallel='ddp')).stages['after optimizer']
        for n in (1, 2, 8):
            mine = predict(SMALL, settings(n, micro_steps)).stages['after optimizer']
            for owner in ('parameters', 'gradients', 'optimizer states'):
                assert mine[owner] == alone[owner] // n, (micro_steps, n)


def test_more_processes_never_take_more():
    for micro_steps in (1, 4):
        before = predict(SMALL, settings(1, micro_steps, report=True))
        for n in range(2, 20):
            plan = predict(SMALL, settings(n, micro_steps, report=True))
            assert plan.totals.keys() == before.totals.keys()
            assert all(plan.totals[stage] <= before.totals[stage] for stage in plan.totals)
            assert plan.total < before.total, (micro_steps, n)
            before = plan


def test_sharding_among_one_process_takes_little_more_than_none():
    alone = predict(SMALL, settings(1, dtype='float32', parallel='ddp')).total
    assert alone < predict(SMALL, settings(1, dtype='float32')).total < 1.12 * alone


def test_what_is_looked_at_between_steps_needs_all_blocks_at_once():
    quiet, loud = (predict(SMALL, settings(8, report=n)).stages for n in (False, True))
    [stage] = loud.keys() - quiet.keys()
    with torch.device('meta'):
        gpt = GPT(SMALL)
    blocks = sum(p.numel() for p in gpt.transformer.h.parameters())
    rest = sum(p.numel() for p in gpt.parameters()) - blocks
    assert loud[stage]['gathered parameters'] == 2 * blocks + 4 * rest
    assert not any(owner.startswith('activations') for owner in loud[stage])


# -----------------------------------------------------------------------------
# the choice


def choice(available, **config):
    config = PlanConfig(**{'processes': 8, 'gradient_accumulation_steps': 16, 'batch_size': 8,
                           **config})
    return choose_parallel(config, SMALL, 'bfloat16', 'cuda', available)[0]


def test_the_model_is_sharded_only_where_copies_of_it_do_not_fit():
    copies = predict(SMALL, settings(8, 2, parallel='ddp', report=True)).total
    assert choice(copies) == 'ddp' and choice(copies - 1) == 'fsdp'
    assert choice(1, processes=1) == 'ddp' and choice(1, parallel='ddp') == 'ddp'
    assert choice(copies, parallel='fsdp') == 'fsdp'
    # the smallest micro-batch decides where the batch follows
    auto = {'batch_size': 'auto', 'total_batch_size': 16 * 8 * 1024}
    smallest = predict(SMALL, replace(settings(8, 16, parallel='ddp', report=True),
                                batch_size=1)).total
    assert choice(smallest, **auto) == 'ddp' and choice(smallest - 1, **auto) == 'fsdp'


def test_where_no_plan_is_made_it_would_have_said_that_it_fits():
    plain = settings(8, 2, 'float32', parallel='ddp')
    mostly_logits = replace(SMALL, n_layer=1, n_embd=96, vocab_size=50257)
    for shape, step in ((SMALL, plain), (replace(UNTIED, value_embeddings=True), plain),
                        (mostly_logits, replace(plain, loss_chunk_tokens=0))):
        assert predict(shape, step).peak < 4 * rough_bytes(shape, step), shape


def test_a_small_model_is_not_planned_to_be_copied():
    memory_planner.TRACES.clear()
    assert choice(100 * GIB) == 'ddp' and not memory_planner.TRACES


def test_sharding_is_among_what_saves_memory():
    shape = GPTConfig(block_size=16, vocab_size=99, n_layer=1, n_head=2, n_embd=256)
    copied, shared = settings(8, parallel='ddp'), settings(8)
    saved = predict(shape, copied).peak - predict(shape, shared).peak
    assert dict(savings(shape, copied))['--parallel=fsdp'] == saved > 0
    assert '--parallel=fsdp' not in dict(savings(shape, shared))


# -----------------------------------------------------------------------------
# before a sharded run


def test_a_sharded_run_may_be_larger_than_the_memory_of_one_process(monkeypatch):
    parameters, states = memory_fit.kept_bytes(SMALL, settings(8, dtype='float32'))
    monkeypatch.setattr(memory_fit, 'available_memory',
                        lambda device: (2 * parameters + states) / 8)
    cpu = torch.device('cpu')
    memory_fit.check_size(SMALL, PlanConfig(processes=8, parallel='fsdp'), cpu)
    for config in (PlanConfig(processes=8, parallel='ddp'), PlanConfig(processes=7),
                   PlanConfig(parallel='fsdp')):
        with pytest.raises(UserError, match='of memory are free'):
            memory_fit.check_size(SMALL, config, cpu)


def test_an_automatic_batch_of_a_sharded_run_is_the_largest_that_fits(monkeypatch):
    config = PlanConfig(processes=8, parallel='fsdp', batch_size='auto',
                        total_batch_size=8 * 64 * SMALL.block_size, block_size=SMALL.block_size)
    step = memory_planner.step_settings(replace(config, batch_size=16), 'bfloat16')
    monkeypatch.setattr(memory_fit, 'available_memory', lambda _: predict(SMALL, step).total)
    batch_size, why = memory_fit.choose_batch_size(SMALL, config, 'bfloat16',
                                                       torch.device('cuda'), compile=False)
    assert batch_size == 16 and 'tried' not in why  # a trial would hold the whole model


# -----------------------------------------------------------------------------
# what the docs say


def rows_of_the_docs():
    table = (ROOT / 'docs/memory.md').read_text(encoding='utf-8').partition('| 80 GB |')[2]
    rows = re.findall(r'^\| (GPT-2 1558M|7B) \| `(\w+)` \| (.*) \|$', table, re.M)
    assert len(rows) == 6
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(('model', 'checkpointing', 'cells'), rows_of_the_docs())
def test_the_table_of_the_docs_is_what_is_planned(model, checkpointing, cells):
    recipe = {'GPT-2 1558M': 'gpt2_1558m', '7B': 'gpt_7b'}[model]
    config = load_config(PlanConfig, [
        str(ROOT / f'config/{recipe}.py'), '--processes=8', '--batch_size=1',
        f'--activation_checkpointing={checkpointing}'])
    shape = config.gpt_config(50257)
    ddp, fsdp = (replace(step_settings(config, 'bfloat16'), parallel=kind)
                 for kind in ('ddp', 'fsdp'))
    fitting = [' / '.join(str(largest_batch(shape, step, size * GIB) or '–')
                          for step in (ddp, fsdp)) for size in (24, 40, 80)]
    assert cells.split(' | ') == [*(gib(predict(shape, step).total) for step in (ddp, fsdp)),
                                  *fitting]
    if cells.endswith('/ 41'):  # below the table's command: without looks at the model
        quiet = fsdp.change(report=False)
        assert gib(predict(shape, quiet).total) == '19.74 GiB'
        assert largest_batch(shape, quiet, 24 * GIB) == 3


def test_the_recipe_of_7b_trains_a_small_model(tiny, capsys):
    train.main([str(ROOT / 'config/gpt_7b.py'), *tiny, '--n_layer=1', '--n_embd=64',
                '--total_batch_size=0', '--log_interval=1'])
    losses = [float(loss) for loss in re.findall(r'\| loss ([\d.]+)', capsys.readouterr().out)]
    assert len(losses) == 6 and losses[-1] < losses[0]
