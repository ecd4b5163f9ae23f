from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest
import torch
from runs import HostReads, lines
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.profiler import ProfilerActivity, profile

import train
from model import GPT, GPTConfig
from plaingpt.experiments.speed import new_step, time_step
from plaingpt.inference.generation import KVCache
from plaingpt.parallel.blocks import apply_activation_checkpointing, compile_blocks
from plaingpt.system.devices import keep_compiled_graphs
from plaingpt.training import loss
from plaingpt.training.loss import chunked_cross_entropy
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.settings import TrainConfig

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32,
                  document_attention=True, document_start=0)
CPU = torch.device('cpu')
NEWER = dict(rotary=True, qk_norm=True, mlp='relu2', conv=3, tied_head=False, bias=False)


@pytest.mark.parametrize('dropout, graphs', [(0.0, 1), (0.1, 2)])
def test_a_run_compiles_one_graph_and_with_dropout_another_to_evaluate(
        dropout, graphs, tiny, monkeypatch):
    # Evaluates, trains, looks at health, saves and evaluates again; 5 sequences end in a batch of 1
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    monkeypatch.setattr(loss, 'chunk_size', lambda *_: 24)
    train.main([*tiny, '--compile=True', '--batch_size=5', '--eval_iters=1',
                f'--dropout={dropout}'])
    assert counter.frame_count == graphs


@pytest.mark.parametrize('how', ['True', 'blocks'])
def test_a_run_that_compiles_keeps_its_graphs_for_the_next_start(how, tiny, monkeypatch):
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=False):
        train.main([*tiny, f'--compile={how}', '--max_iters=1', '--check=False'])
        assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions


def test_blocks_that_are_compiled_share_one_graph_and_train_the_same(tiny, tmp_path, monkeypatch):
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    for depth, folder in ((2, 'two'), (5, 'five')):
        counter.frame_count = 0
        torch._dynamo.reset()
        train.main([*tiny, '--compile=blocks', f'--n_layer={depth}', f'--out_dir={folder}'])
        assert counter.frame_count == 2  # a block and the loss
    train.main([*tiny, '--n_layer=5', '--out_dir=eager'])
    losses = [[line['loss'] for line in lines(tmp_path / folder, 'loss')]
              for folder in ('five', 'eager')]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('optimizer', sorted(OPTIMIZERS.keys() - {'sgd'}))
def test_a_step_never_waits_for_the_device(optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, batch_size=2, gradient_accumulation_steps=2)
    batch = torch.randint(65, (2, 2, 16))
    step, _ = new_step(SMALL, config, CPU, dtype)
    step.micro_steps = 2
    with HostReads() as reads:
        for _ in range(2):
            time_step(step, repeat(batch), 1e-3)
    assert not reads.found
    with reads:
        assert batch.sum() > 0
    assert reads.found  # else this test would see nothing


# -----------------------------------------------------------------------------
# what is computed again


@pytest.mark.parametrize('kind, n', [('selective', 8), ('full', 11)])
def test_a_compiled_block_of_a_sharded_model_computes_again_what_its_kind_says(
        kind, n, monkeypatch):
    # Each of 4 matmuls has 2 in the backward pass; 'full' needs the outputs of 3 again.
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph),
                           partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    gpt = GPT(replace(SMALL, mlp='swiglu', rotary=True, bias=False, document_attention=False))
    apply_activation_checkpointing(gpt, kind)
    compile_blocks(gpt)
    for _ in range(2):  # the first compiles the backward pass
        x = gpt(torch.randint(65, (2, 16)))[0]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            x.sum().backward()
    [found] = [event.count for event in prof.key_averages() if event.key == 'aten::mm']
    assert found == 2 * n + 2  # in two layers and the head


def test_a_step_that_was_compiled_before_is_found_on_disk(monkeypatch):
    checked = []

    def backend(graph, _):
        checked.append(check_cacheable(graph))  # raises what keeps torch from it
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend, fullgraph=True))
    gpt = GPT(replace(SMALL, **NEWER))
    gpt.loss_function = partial(chunked_cross_entropy, chunk=24)
    apply_activation_checkpointing(gpt, 'selective')
    idx = torch.randint(65, (2, 16))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        keep_compiled_graphs()
        torch.compile(gpt)(idx, idx)
    assert checked


@pytest.fixture
def norms_in_float32():
    """As under CUDA's autocast: a CPU's leaves them in bfloat16."""
    def in_float32(operator, *args):
        with torch.autocast('cpu', enabled=False):
            return operator(*[x.float() if isinstance(x, torch.Tensor) else x for x in args])

    library = torch.library.Library('aten', 'IMPL')
    for name in ('layer_norm', 'rms_norm'):
        operator = getattr(torch.ops.aten, name).default
        library.impl(name, partial(in_float32, operator), 'AutocastCPU')
    yield
    library._destroy()


def test_blocks_compute_and_cache_bfloat16_where_norms_give_float32(
        norms_in_float32, monkeypatch):
    gpt, seen = GPT(replace(SMALL, **NEWER)), []
    monkeypatch.setattr('torch.nn.functional.scaled_dot_product_attention',
                        lambda q, k, v, **_: seen.append((q, k, v)) or q)
    gpt.transformer.h[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        normed = gpt.transformer.ln_f(torch.ones(2, 32, dtype=torch.bfloat16))
        gpt(torch.randint(65, (2, 16)))
        gpt.eval()
        cache = KVCache(gpt.config, 16, CPU)
        cache.begin([0])
        cache.advance(9)
        gpt.hidden(torch.randint(65, (1, 9)), cache)
    assert normed.dtype == torch.float32 and len(seen) == 6
    assert {t.dtype for tensors in seen for t in tensors} == {torch.bfloat16}
