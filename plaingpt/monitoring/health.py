"""Look inside the model while it trains: does every block learn, and at a healthy rate?

Rank 0 measures gradients before the optimizer's step and how far it moves the weights. Then it runs
the eager model on a few validation sequences, without gradients; the compiled one is left alone.

    health/grad_norm/h.3        norm of the gradient of block 3, before clipping; also of wte, …
    health/update_ratio/h.3     norm of the update of its matrices / norm of the matrices
    health/attention_logit/h.3  largest absolute logit that a softmax of attention sees
    health/activation_rms/h.3   RMS of the residual stream after the block
"""

import math
from contextlib import contextmanager
from itertools import product

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plaingpt.system.distributed import all_reduce_norms, is_sharded, local_rows

TOKENS = 4096  # at most, in the pass without gradients
SAMPLE = 2**16  # elements of a matrix that stand for all when an update is measured


def rms(x):
    return x.float().square().mean().sqrt()


# Measures of blocks: name → function(x (B, T, C), which leaves the block) → health/NAME/h.3
MEASURES = {'activation_rms': rms}


class ActivationRecorder(TorchFunctionMode):
    """Keeps what flows through a GPT's blocks while it is open.

    streams: the residual stream before the first block and after each, (B, T, C)
    attention: (block, arguments of F.scaled_dot_product_attention) of each call, whose query and
    key have been rotated and normalized already
    """

    def __init__(self, model):
        super().__init__()
        self.blocks = model.transformer.h
        self.streams, self.attention = [], []

    def __enter__(self):
        self.hooks = [self.blocks[0].register_forward_pre_hook(
            lambda block, inputs: self.streams.append(inputs[0]))]
        self.hooks += [block.register_forward_hook(lambda block, inputs, x: self.streams.append(x))
                       for block in self.blocks]
        return super().__enter__()

    def __exit__(self, *problem):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*problem)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.attention.append((len(self.streams) - 1, args, kwargs))
        return function(*args, **kwargs)


def attention_logits(b, h, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                     scale=None, enable_gqa=False):
    """Arguments of F.scaled_dot_product_attention → the logits of a head in a sequence, (T, S),
    -inf where masked. A head at a time, for they take much memory."""
    (B, H, T, D), S = query.shape, key.size(2)
    k = key[b, h * key.size(1) // H]  # (S, D)
    logits = (query[b, h] @ k.T).float() * (D**-0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return logits
    mask = attn_mask.expand(B, H, T, S)[b, h]
    return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask


def largest_logit(query, *args, **kwargs):
    """The largest absolute logit that is not masked."""
    return torch.stack([
        logits.masked_fill(logits == -math.inf, 0).abs().amax() for logits in (
            attention_logits(b, h, query, *args, **kwargs)
            for b, h in product(range(query.size(0)), range(query.size(1))))]).amax()


class Health:
    """Measures `model` (neither compiled nor wrapped) at iteration 1 and every `interval`. If it is
    sharded, all processes measure.

    loader: of the validation split, whose first sequences are read; interval=0: never
    """

    def __init__(self, model, interval, loader, context):
        self.model, self.interval, self.loader, self.context = model, interval, loader, context
        self.mesh = next((p.device_mesh for p in model.parameters() if is_sharded(p)), None)

    def due(self, iter_num):
        return self.interval > 0 and (iter_num == 1 or iter_num % self.interval == 0)

    @contextmanager
    def around_update(self, iter_num, scaler):
        """The gradient is clipped and the weights updated inside, for update `iter_num`."""
        if not self.due(iter_num):
            yield
            return
        named = list(self.model.named_parameters())
        grads = block_norms([(name, p.new_zeros(1) if p.grad is None else p.grad)
                             for name, p in named], self.mesh)
        # The gains of norms, near 1, would hide every change of the matrices.
        matrices = [(name, p) for name, p in named if p.dim() >= 2]
        before = [(name, sample_rows(p).clone()) for name, p in matrices]
        scale = scaler.get_scale()  # the gradients are multiplied by it still
        yield
        moved = block_norms([(name, sample_rows(p) - old) for (name, p), (_, old)
                             in zip(matrices, before, strict=True)], self.mesh)
        sizes = block_norms(before, self.mesh)
        self.found = {**{f'grad_norm/{name}': norm / scale for name, norm in grads.items()},
                      **{f'update_ratio/{name}': moved[name] / (sizes[name] + 1e-12)
                         for name in moved}}

    @torch.no_grad()
    def measure(self, model):
        """→ {'health/…': number} after an update that was due. Waits for the device, once.
        model: with all of the weights; this one is where it is not sharded"""
        starts = self.loader.eval_batches(self.loader.batch_size)[0]
        idx = self.loader.eval_batch(starts)[0][:max(1, TOKENS // self.loader.block_size)]  # (B, T)
        model.eval()
        with ActivationRecorder(model) as seen, self.context:
            model.hidden(idx)
        model.train()
        found = {**self.found, **{f'attention_logit/h.{i}': largest_logit(*args, **kwargs)
                                  for i, args, kwargs in seen.attention}}
        for i, x in enumerate(seen.streams[1:]):
            if isinstance(x, torch.Tensor):  # a changed block may return more
                found |= {f'{name}/h.{i}': measure(x) for name, measure in MEASURES.items()}
        values = torch.stack([value.float() for value in found.values()]).tolist()
        return {f'health/{name}': float(f'{value:.5g}')
                for name, value in zip(found, values, strict=True)}


def block_name(name):
    """'transformer.h.3.mlp.c_fc.weight' → 'h.3', 'transformer.wte.weight' → 'wte'. A block's value
    embedding, 'value_embedding.3', is not among its matrices: as wte it grows at a rate of its
    own."""
    parts = name.removeprefix('transformer.').split('.')
    if 'value_embedding' in parts:
        return f'value_embedding.{parts[1]}'
    return '.'.join(parts[:2]) if parts[0] == 'h' else parts[0]


@torch.no_grad()
def block_norms(tensors, mesh=None):
    """[(name of a parameter, tensor)] → {block: norm of its tensors as one vector}. mesh: of the
    processes, where each has some rows of the tensors"""
    blocks = {}
    for name, tensor in tensors:
        blocks.setdefault(block_name(name), []).append(local_rows(tensor)[0].float().norm())
    norms = torch.stack([torch.stack(of_block).norm() for of_block in blocks.values()])
    return dict(zip(blocks, all_reduce_norms(norms, mesh) if mesh else norms, strict=True))


def sample_rows(p):
    """Rows of a matrix that this process has, evenly spread, with about SAMPLE elements."""
    mine, _ = local_rows(p.detach())
    return mine[::max(1, mine.numel() // SAMPLE)]
