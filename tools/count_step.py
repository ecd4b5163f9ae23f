"""Count what a compiled micro-step of training does on an NVIDIA GPU, without one.

    python tools/count_step.py [config/gpt2_124m.py] [--gpu=H100] [--batch_size=32 …]

Without a config: gpt2_124m, gpt2_124m_fast and gpt_7b. The model is traced on tensors without data,
under the rules of CUDA's autocast, and torch's own compiler fuses the graphs into kernels as it
does for that GPU; nothing is run. Two small depths give the figures of any other. Not counted: the
optimizer, what processes send each other, and what a kernel reads again from the GPU's caches.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import load_config
from model import GPT
from plaingpt.experiments.tables import markdown
from plaingpt.monitoring.memory_recorder import cpu_kernels, cuda_autocast_rules
from plaingpt.system.devices import GPUS, find_gpu
from plaingpt.system.errors import run_script
from plaingpt.system.files import ROOT
from plaingpt.training.memory_planner import DEPTHS, interpolation_weights
from plaingpt.training.settings import TrainConfig

CONFIGS = 'gpt2_124m', 'gpt2_124m_fast', 'gpt_7b'
BANDWIDTH = {'H100': 3.35e12, 'H200': 4.8e12, 'A100': 1.555e12}  # bytes/s, NVIDIA's data sheets


@dataclass
class CountConfig(TrainConfig):
    vocab_size: int = 50257
    gpu: str = 'H100'  # whose peak speed and bandwidth the estimate takes

    def problems(self):
        found = super().problems()
        if self.gpu.upper() not in BANDWIDTH:
            found.append(f'gpu={self.gpu}: use one of {", ".join(BANDWIDTH)}')
        if self.batch_size == 'auto':
            found.append('batch_size=auto: say a number, as --batch_size=8')
        return found


class Kernel(NamedTuple):
    """What the GPU runs at once."""

    name: str
    bytes: float  # read and written
    flops: float  # of matmuls and attention


# -----------------------------------------------------------------------------
# graphs


def step_graphs(shape, config):
    """GPTConfig, TrainConfig → {'forward': (graph, inputs), 'backward': …} of a micro-step, as
    torch.compile gives them to its code generator."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx
    graphs = {}

    def record(graph, inputs, is_backward=False, **_):
        graphs['backward' if is_backward else 'forward'] = graph, inputs
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with mock.patch.object(cpu_kernels, 'enabled', False), FakeTensorMode():
        gpt = GPT(shape)
        gpt.loss_chunk_tokens = config.loss_chunk_tokens
        gpt.activation_checkpointing = config.activation_checkpointing
        idx = torch.zeros(config.batch_size, shape.block_size, dtype=torch.int64)
        model = torch.compile(gpt, fullgraph=True,
                              backend=partial(compile_fx, inner_compile=record))
        with cuda_autocast_rules(), torch.autocast('cpu', dtype=torch.bfloat16):
            _, loss = model(idx, idx)
        loss.backward()
    return graphs


def saved(graph):
    """Bytes by dtype that the graph of a forward pass keeps for the backward pass, parameters and
    tokens aside."""
    [output] = graph.graph.find_nodes(op='output')
    kept = {node for node in tree_leaves(output.args)[1:]
            if isinstance(node, torch.fx.Node) and node.op != 'placeholder'}
    sizes = Counter()
    for node in kept:
        sizes[str(node.meta['val'].dtype).removeprefix('torch.')] += node.meta['val'].nbytes
    return sizes


# -----------------------------------------------------------------------------
# kernels


def kernels_of(graph, inputs, is_backward):
    """The kernels into which torch's compiler fuses a graph for an H100 → [Kernel]."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V
    h100 = DeviceProperties('cuda', 0, 132, cc=90, major=9, regs_per_multiprocessor=65536,
                            max_threads_per_multi_processor=2048, warp_size=32)
    values = [node.meta.get('val') for node in graph.graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with V.set_fake_mode(mode):
        post_grad_passes(graph, False)
    flops = {node.name: flops_of(node) for node in graph.graph.nodes}
    inputs = to_cuda(graph, inputs, mode)
    with torch.no_grad(), V.set_fake_mode(mode), \
            mock.patch('torch._inductor.scheduler.has_triton', return_value=True), \
            mock.patch.object(DeviceProperties, 'create', lambda device: h100):
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), \
                V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            found = []
            for node in Scheduler(lowering.operations).nodes:
                names = dict.fromkeys(origin.name for each in node.get_nodes() if each.node
                                      for origin in each.node.get_origins())
                if moved := bytes_moved(node):
                    found.append(Kernel(' '.join(names), moved, sum(map(flops.get, names))))
    return found


def bytes_moved(node):
    """By a node of torch's scheduler. Of a tensor that it looks up rows in, only so many as it
    takes; of the operator `after` what it copies."""
    if 'plaingpt.after' in str(getattr(node.node, 'op_overload', '')):
        return 2 * node.node.get_origin_node().meta['val'].nbytes
    parts = Counter()
    for part in node.get_nodes():
        parts.update(part.get_read_write_buffer_accesses(True, True))
    whole = node.get_read_write_buffer_accesses(True, True)
    return sum(min(size, parts[name]) for name, size in whole.items())


def flops_of(node):
    """Of a matmul or an attention, else 0. Of attention only what is not masked."""
    count = flop_registry.get(getattr(node.target, 'overloadpacket', None))
    if 'scaled_dot_product' in str(node.target):
        backward = 'backward' in str(node.target)
        query = node.args[1 if backward else 0].meta['val']  # (B, H, T, D)
        return (10 if backward else 4) * query.numel() * query.size(-2) / 2
    if not count:
        return 0
    args = tree_map(lambda x: x.meta['val'] if isinstance(x, torch.fx.Node) else x, node.args)
    return count(*args, out_val=node.meta['val'])


def to_cuda(graph, inputs, mode):
    """Let all in a graph be on a GPU → the inputs there."""
    cuda = torch.device('cuda:0')

    def moved(x):
        if isinstance(x, torch.Tensor):
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device='meta')
            return FakeTensor(mode, x, cuda)
        return cuda if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
        if 'val' in node.meta:
            node.meta['val'] = tree_map(moved, node.meta['val'])
        node.meta.pop('user_visible_output_idxs', None)
    return tree_map(moved, inputs)


# -----------------------------------------------------------------------------
# figures


def count(config):
    """CountConfig → {figure: number} of a micro-step."""
    shape, total = config.gpt_config(config.vocab_size), Counter()
    for n_layer, share in interpolation_weights(shape.n_layer, *DEPTHS).items():
        graphs = step_graphs(replace(shape, n_layer=n_layer), config)
        found = {f'saved {dtype}': size for dtype, size in saved(graphs['forward'][0]).items()}
        for part, (graph, inputs) in graphs.items():
            found.update(figures(part, kernels_of(graph, inputs, part == 'backward'), config.gpu))
        for name, value in found.items():
            total[name] += share * value
    return total


def figures(part, kernels, gpu):
    peak, bandwidth = GPUS[find_gpu(gpu)].peak_flops, BANDWIDTH[gpu.upper()]
    return {f'matmuls {part}': sum(1 for k in kernels if k.flops and 'attention' not in k.name),
            f'kernels {part}': len(kernels),
            f'bytes {part}': sum(k.bytes for k in kernels),
            f'flops {part}': sum(k.flops for k in kernels),
            f's {part}': sum(max(k.flops / peak, k.bytes / bandwidth) for k in kernels)}


def main(argv):
    configs = [arg for arg in argv if not arg.startswith('-')]
    options = [arg for arg in argv if arg.startswith('-')]
    rows = []
    for path in configs or [str(ROOT / 'config' / f'{name}.py') for name in CONFIGS]:
        config = load_config(CountConfig, [path, *options], __doc__)
        found = count(config)
        tokens = config.batch_size * config.block_size
        rows += [[Path(path).stem, part, f'{found[f"matmuls {part}"]:.0f}',
                  f'{found[f"kernels {part}"]:.0f}', f'{found[f"bytes {part}"] / 1e9:.1f}',
                  f'{found[f"flops {part}"] / 1e12:.1f}', f'{1e3 * found[f"s {part}"]:.1f}']
                 for part in ('forward', 'backward')]
        kept = ', '.join(f'{name.removeprefix("saved ")} {size / 1e9:.2f} GB'
                         for name, size in sorted(found.items()) if name.startswith('saved'))
        seconds = found['s forward'] + found['s backward']
        print(f'{Path(path).stem}: {config.batch_size} × {config.block_size} tokens; kept for the '
              f'backward pass: {kept}; at most {tokens / seconds:,.0f} tokens/s')
    print('\n' + markdown(['micro-step', 'pass', 'matmuls', 'kernels', 'GB moved', 'TFLOP',
                           f'ms on an {config.gpu} at least'], rows))


if __name__ == '__main__':
    run_script(main)
