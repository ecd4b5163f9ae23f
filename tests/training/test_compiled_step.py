from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest
import torch
import torch.distributed as dist
from cuda_autocast import IN_FLOAT32, cuda_autocast_rules, operator_of
from helpers import HostReads
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import model
import train
from model import GPT, GPTConfig
from plaingpt.experiments.speed import new_step
from plaingpt.inference.generation import KVCache
from plaingpt.parallel import sharding
from plaingpt.system.devices import keep_compiled_graphs
from plaingpt.training.memory import predict
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.settings import TrainConfig

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32,
                  document_attention=True, document_start=0)
CPU = torch.device('cpu')
NEWER = dict(rotary=True, qk_norm=True, mlp='relu2', conv=3, tied_head=False, bias=False)


def test_a_run_compiles_two_graphs_one_to_train_and_one_to_evaluate(tiny, monkeypatch):
    # Evaluates, trains, looks at health, saves and evaluates again; 5 sequences end in a batch of 1
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    monkeypatch.setattr(model, 'chunk_size', lambda *_: 24)
    train.main([*tiny, '--compile=True', '--batch_size=5', '--eval_iters=1', '--dropout=0.1'])
    assert counter.frame_count == 2


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('optimizer', sorted(OPTIMIZERS.keys() - {'sgd'}))
def test_a_step_never_waits_for_the_device(optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, batch_size=2, gradient_accumulation_steps=2)
    batch = torch.randint(65, (2, 2, 16))
    step, _ = new_step(SMALL, config, CPU, dtype)
    with HostReads() as reads:
        for _ in range(2):
            step(repeat(batch), 2)
    assert not reads.found
    with reads:
        assert batch.sum() > 0
    assert reads.found  # else this test would see nothing


# -----------------------------------------------------------------------------
# what is computed again


@pytest.fixture
def one_process():
    """A job of one, which shares a model with nobody."""
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize('kind, n', [('none', 8), ('selective', 8), ('full', 11)])
def test_a_compiled_block_of_a_sharded_model_computes_again_what_its_kind_says(
        kind, n, one_process, monkeypatch):
    # Each of 4 matmuls has 2 in the backward pass; 'full' needs the outputs of 3 again.
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph),
                           partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    gpt = GPT(replace(SMALL, mlp='swiglu', rotary=True, bias=False, document_attention=False))
    gpt.activation_checkpointing = kind
    with sharding.parameters_on_meta():
        model = GPT(gpt.config)
    model.activation_checkpointing = kind
    train.shard(model, CPU, 'float32', True)
    sharding.scatter(gpt.state_dict(), model)
    for _ in range(2):  # the first compiles the backward pass
        x = model(torch.randint(65, (2, 16)))[0]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            x.sum().backward()
    [found] = [event.count for event in prof.key_averages() if event.key == 'aten::mm']
    assert found == 2 * n + 2  # in two layers and the head


@pytest.mark.parametrize('kind', ['none', 'selective'])
def test_a_step_that_was_compiled_before_is_found_on_disk(kind, monkeypatch):
    checked = []

    def backend(graph, _):
        checked.append(check_cacheable(graph))  # raises what keeps torch from it
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend, fullgraph=True))
    gpt = GPT(replace(SMALL, **NEWER))
    gpt.activation_checkpointing, gpt.loss_chunk_tokens = kind, 24
    idx = torch.randint(65, (2, 16))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        keep_compiled_graphs()
        torch.compile(gpt)(idx, idx)
    assert checked


# -----------------------------------------------------------------------------
# autocast on CUDA


def test_the_rules_of_cudas_autocast_are_those_of_torch():
    """Fake CUDA tensors have autocast's casts everywhere; gradients they have with CUDA only."""
    meta = torch.ones(2, 8, dtype=torch.bfloat16, device='meta')
    x = FakeTensor(FakeTensorMode(), meta, torch.device('cuda:0'))
    torch.set_autocast_enabled('cuda', True)
    try:
        for name in IN_FLOAT32:
            packet, _, overload = name.partition('.')
            arguments = {'layer_norm': [[8]], 'rms_norm': [[8]], 'pow': [2], 'softmax': [-1],
                         'log_softmax': [-1], 'logsumexp': [-1]}.get(packet, [])
            arguments += [[0]] if overload == 'dim_IntList' else []
            assert operator_of(name)(x, *arguments).dtype == torch.float32, name
    finally:
        torch.set_autocast_enabled('cuda', False)


def kept_by_a_compiled_step(shape, batch_size):
    """{dtype: bytes} that the forward pass keeps for the backward pass on a GPU, parameters and
    tokens aside."""
    graphs = []

    def record(graph, inputs, **_):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with FakeTensorMode():
        gpt = GPT(shape)
        gpt.loss_chunk_tokens = 2048
        idx = torch.zeros(batch_size, shape.block_size, dtype=torch.int64)
        model = torch.compile(gpt, fullgraph=True, backend=partial(compile_fx,
                                                                   inner_compile=record))
        with cuda_autocast_rules(), torch.autocast('cpu', dtype=torch.bfloat16):
            model(idx, idx)
    [output], sizes = graphs[0].graph.find_nodes(op='output'), Counter()
    for node in {node for node in tree_leaves(output.args)[1:]
                 if isinstance(node, torch.fx.Node) and node.op != 'placeholder'}:
        sizes[node.meta['val'].dtype] += node.meta['val'].nbytes
    return sizes


@pytest.mark.parametrize('newer', [{}, {**NEWER, 'conv': 4}])
def test_a_compiled_step_keeps_no_float32_activation_and_what_its_plan_counts(newer):
    shape = GPTConfig(**{**dict(block_size=64, vocab_size=1000, n_layer=2, n_head=1, n_embd=64,
                                bias=False), **newer})
    kept, tokens = kept_by_a_compiled_step(shape, 64), 64 * 64
    # What is in float32 is one or two numbers a token, and the gradient of the head.
    numbers = 4 * tokens * (2 * 5 * 2 + 2) + 4 * shape.padded_vocab_size * 64
    assert kept[torch.float32] <= numbers < 4 * tokens * 64 * 2
    config = TrainConfig(batch_size=64, block_size=64, gradient_accumulation_steps=1)
    planned = predict(shape, config, 'bfloat16', 'cuda').phases['backward of the loss']
    assert 0.97 * kept.total() <= planned['activations'] <= 1.2 * kept.total()


def test_attention_takes_keeps_and_caches_bfloat16_where_norms_give_float32(monkeypatch):
    gpt, seen = GPT(replace(SMALL, **NEWER)), []
    monkeypatch.setattr('model.attention', lambda q, k, v, *rest: seen.append((q, k, v)) or q)
    with cuda_autocast_rules(), torch.autocast('cpu', dtype=torch.bfloat16):
        normed = gpt.transformer.ln_f(torch.ones(2, 32, dtype=torch.bfloat16))
        gpt(torch.randint(65, (2, 16)))
        gpt.eval()
        cache = KVCache(gpt.config, 16, CPU)
        cache.begin([0])
        cache.advance(9)
        gpt.hidden(torch.randint(65, (1, 9)), cache)
    assert normed.dtype == torch.float32 and len(seen) == 4
    assert {t.dtype for tensors in seen for t in tensors} == {torch.bfloat16}
