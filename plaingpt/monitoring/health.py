"""A look inside the model while it trains: are all layers learning, at a sane pace?

Every `health_interval` steps, and at no cost on the others: norms of gradients and weights and the
size of an update around the optimizer's step, and one pass without gradients over a few validation
sequences with the eager model, so that the compiled one is left alone. Rank 0 looks for all.

    health/grad_norm/h.3       of the gradient of block 3, before clipping; wte, wpe, … likewise
    health/weight_norm/h.3     of its matrices
    health/update_ratio/h.3    norm of the update of its matrices / norm of the matrices
    health/activation_rms/h.3  of the residual stream that leaves the block
    health/attention_logit/h.3 the largest that a softmax of attention sees
    health/dead_units/h.3      share of the MLP's units that are silent on all those tokens
    health/loss_at/4-15        mean loss at positions 4 to 15 of the sequence
"""

import math
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LOOK_TOKENS = 4096  # of the pass without gradients, at most
SAMPLE = 2**16  # elements of a matrix that stand for all when an update is measured
SILENT = 0.01  # a unit is dead when it stays under this share of its layer's RMS
CHUNK = 2**24  # attention logits that exist at once


class Health:
    """Measures `model` (neither compiled nor wrapped) at iteration 1 and every `interval`.

    loader: of validation sequences, the first of which are looked at; interval=0: never
    """

    def __init__(self, model, interval, loader, context):
        self.model = model
        self.interval = interval
        self.loader = loader
        self.context = context
        self.found = {}

    def due(self, iter_num):
        return self.interval > 0 and (iter_num == 1 or iter_num % self.interval == 0)

    @contextmanager
    def around_update(self, iter_num, scaler):
        """Clip the gradient and move the weights in here, where update number `iter_num` is due."""
        if not self.due(iter_num):
            yield
            return
        with torch.no_grad():
            self.found = self._norms(1 / scaler.get_scale())
            before = {name: sample_of(p).clone() for name, p in self._matrices()}
            yield
            self.found.update(self._update_ratios(before))

    @torch.no_grad()
    def look(self):
        """→ {'health/…': number} of this iteration. Waits for the device, once."""
        idx, targets = (t[:max(1, LOOK_TOKENS // t.size(1))] for t in
                        self.loader.eval_batch(self.loader.eval_batches(1)[0]))
        was_training = self.model.training
        self.model.eval()
        inside = ActivationRecorder(self.model)
        with inside, self.context:
            x = self.model.hidden(idx)  # (B, T, C)
            found = {**self.found, **inside.found, **self._loss_at(x, targets)}
        self.model.train(was_training)
        values = torch.stack([value.float() for value in found.values()]).tolist()
        return {f'health/{name}': float(f'{value:.5g}')
                for name, value in zip(found, values, strict=True)}

    def _matrices(self):
        return [(name, p) for name, p in self.model.named_parameters() if p.dim() >= 2]

    def _norms(self, scale):
        weights, grads = {}, {}
        for name, p in self.model.named_parameters():
            if p.dim() >= 2:  # beside the ones of a norm's gain nobody would see them change
                weights.setdefault(part_of(name), []).append(p)
            grads.setdefault(part_of(name), []).append(
                p.new_zeros(()) if p.grad is None else p.grad)
        return {**{f'grad_norm/{part}': norm(ts) * scale for part, ts in grads.items()},
                **{f'weight_norm/{part}': norm(ts) for part, ts in weights.items()}}

    def _update_ratios(self, before):
        moved, stood = {}, {}
        for name, p in self._matrices():
            moved.setdefault(part_of(name), []).append(sample_of(p) - before[name])
            stood.setdefault(part_of(name), []).append(before[name])
        return {f'update_ratio/{part}': norm(moved[part]) / (norm(stood[part]) + 1e-12)
                for part in moved}

    def _loss_at(self, x, targets):
        """x (B, T, C), targets (B, T) → {'loss_at/0': …, 'loss_at/1-3': …, …}."""
        B, T, _ = x.shape
        rows = zip(x.flatten(0, 1).split(1024), targets.flatten().split(1024), strict=True)
        loss = torch.cat([F.cross_entropy(self.model.logits(x_i).float(), targets_i,
                                          ignore_index=-1, reduction='none')
                          for x_i, targets_i in rows]).view(B, T)
        known = (targets != -1).float()
        edges = [0, *(4**i for i in range(math.ceil(math.log(T, 4)))), T] if T > 1 else [0, 1]
        return {f'loss_at/{a}' + (f'-{b - 1}' if b - 1 > a else ''):
                loss[:, a:b].sum() / known[:, a:b].sum()
                for a, b in pairwise(edges) if b > a}


class ActivationRecorder(TorchFunctionMode):
    """Sees what flows through a GPT's blocks while it is open, and takes notes in `found`."""

    def __init__(self, model):
        super().__init__()
        self.found = {}
        self.layer = 0
        self.blocks = model.transformer.h

    def __enter__(self):
        self.hooks = []
        for i, block in enumerate(self.blocks):
            self.hooks += [
                block.register_forward_pre_hook(lambda *_, i=i: self.enters(i)),
                block.register_forward_hook(lambda _, inputs, x, i=i: self.leaves(i, x)),
                block.mlp.c_proj.register_forward_pre_hook(
                    lambda _, inputs, i=i: self.units(i, inputs[0]))]
        return super().__enter__()

    def __exit__(self, *problem):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*problem)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            # Whatever a model does to its queries and keys has been done by here.
            self.found[f'attention_logit/h.{self.layer}'] = largest_logit(*args, **kwargs)
        return function(*args, **kwargs)

    def enters(self, i):
        self.layer = i

    def leaves(self, i, x):
        """x (B, T, C)"""
        self.found[f'activation_rms/h.{i}'] = x.float().square().mean().sqrt()

    def units(self, i, h):
        """h (B, T, units), after the nonlinearity."""
        h = h.float()
        loudest, rms = h.abs().amax(dim=(0, 1)), h.square().mean().sqrt()
        self.found[f'dead_units/h.{i}'] = (loudest <= SILENT * rms).float().mean()


def largest_logit(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                  enable_gqa=False):
    """q, k (B, H, T, D), as F.scaled_dot_product_attention takes them → the largest |q·k|·scale
    among those that are not masked."""
    scale = q.size(-1)**-0.5 if scale is None else scale
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    rows = max(1, CHUNK // (q.size(0) * q.size(1) * k.size(2)))
    largest = []
    for first in range(0, q.size(2), rows):
        logits = q[:, :, first:first + rows] @ k.transpose(-2, -1) * scale  # (B, H, rows, T)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask[..., first:first + rows, :], 0)
        largest.append((logits.tril(first) if is_causal else logits).abs().amax())
    return torch.stack(largest).amax()


def part_of(name):
    """'transformer.h.3.mlp.c_fc.weight' → 'h.3', 'transformer.wte.weight' → 'wte'."""
    parts = name.removeprefix('transformer.').split('.')
    return '.'.join(parts[:2]) if parts[0] == 'h' else parts[0]


def norm(tensors):
    """Of all of them as one vector."""
    return torch.stack(torch._foreach_norm(tensors)).float().norm()


def sample_of(p):
    """Rows of a matrix, evenly spread, with about SAMPLE elements."""
    return p.detach()[::max(1, p.numel() // SAMPLE)]
