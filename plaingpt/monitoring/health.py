"""Figures from inside the model while it trains: does every layer learn, and at a sane rate?

Every 100 steps rank 0 measures gradients, weights and the update around the
optimizer's step. Then it runs the eager model on a few validation sequences, without gradients; the
compiled model is left alone. The other steps cost nothing.

    health/grad_norm/h.3       norm of the gradient of block 3, before clipping; also of wte, wpe, …
    health/weight_norm/h.3     norm of its matrices
    health/update_ratio/h.3    norm of the update of its matrices / norm of the matrices
    health/activation_rms/h.3  RMS of the residual stream after the block
    health/attention_logit/h.3 largest absolute logit that a softmax of attention sees
    health/dead_units/h.3      share of the MLP's units that are silent on all those tokens
    health/loss_at/4-15        mean loss at positions 4 to 15 of the sequence

What a changed model does not show, such as the logits of an attention that does not call
F.scaled_dot_product_attention, is left out.
"""

import math
from contextlib import contextmanager
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plaingpt.system.distributed import all_reduce_norms, is_sharded, local_rows

FORWARD_TOKENS = 4096  # at most, in the pass without gradients
LOGITS_CHUNK = 1024  # tokens whose logits over the vocabulary exist at once
SAMPLE = 2**16  # elements of a matrix that stand for all when an update is measured
SILENT = 0.01  # a unit is dead when it stays under this share of its layer's RMS


def token_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction='none')


# Measures of the predictions: name → function(logits (N, V), targets (N)) → a value per token (N).
# health/NAME/4-15 is its mean over positions 4 to 15; tokens with target -1 do not count.
MEASURES = {'loss_at': token_loss}


class Health:
    """Measures `model` (neither compiled nor wrapped) at iteration 1 and every `interval`. Where it
    is sharded all processes measure, each its share.

    loader: of validation sequences, the first of which are used; interval=0: never
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
        self.before_update(scaler.get_scale())
        yield
        self.after_update()

    @torch.no_grad()
    def before_update(self, scale):
        """Measure gradients, which are multiplied by `scale` still, and weights."""
        grads = self._norms([(name, p.detach().new_zeros(()) if p.grad is None else p.grad)
                             for name, p in self.model.named_parameters()])
        # The gains of norms, near 1, would hide every change of the matrices.
        self.matrices = [(name, p) for name, p in self.model.named_parameters() if p.dim() >= 2]
        self.before = [(name, sample_rows(p).clone()) for name, p in self.matrices]
        self.norms = {
            **{f'grad_norm/{name}': norm / scale for name, norm in grads.items()},
            **{f'weight_norm/{name}': norm for name, norm in self._norms(self.matrices).items()}}

    @torch.no_grad()
    def after_update(self):
        """Measure how far the weights moved."""
        moved = self._norms([(name, sample_rows(p) - old) for (name, p), (_, old)
                             in zip(self.matrices, self.before, strict=True)])
        sizes = self._norms(self.before)
        self.norms |= {f'update_ratio/{name}': moved[name] / (sizes[name] + 1e-12)
                       for name in moved}

    @torch.no_grad()
    def measure(self, model):
        """→ {'health/…': number} after an update that was due. Waits for the device, once.
        model: with all of the weights; this one is where it is not sharded"""
        sequences = max(1, FORWARD_TOKENS // self.loader.block_size)
        batch = self.loader.eval_batch(self.loader.eval_batches(self.loader.batch_size)[0])
        idx, targets = (t[:sequences] for t in batch)  # (B, T)
        was_training = model.training
        model.eval()
        recorder = ActivationRecorder(model)
        with recorder, self.context:
            x = model.hidden(idx)  # (B, T, C)
            found = {**self.norms, **recorder.found, **by_position(model, x, targets)}
        model.train(was_training)
        values = torch.stack([value.float() for value in found.values()]).tolist()
        return {f'health/{name}': float(f'{value:.5g}')
                for name, value in zip(found, values, strict=True)}

    def _norms(self, tensors):
        """[(name of a parameter, tensor or rows of it)] → {block: norm of all as one vector}."""
        norms = block_norms([(name, local_rows(tensor)[0]) for name, tensor in tensors])
        if self.mesh:
            mine = torch.stack(list(norms.values()))
            norms = dict(zip(norms, all_reduce_norms(mine, self.mesh), strict=True))
        return norms


def by_position(model, x, targets):
    """x (B, T, C), targets (B, T) → {'loss_at/0': …, 'loss_at/1-3': …, …}."""
    B, T = targets.shape
    chunks = {name: [] for name in MEASURES}
    for x_chunk, targets_chunk in zip(x.flatten(0, 1).split(LOGITS_CHUNK),  # (N, C)
                                      targets.flatten().split(LOGITS_CHUNK),  # (N)
                                      strict=True):
        logits = model.logits(x_chunk)  # (N, V)
        for name, measure in MEASURES.items():
            chunks[name].append(measure(logits, targets_chunk))
    known = targets != -1
    edges = [0, *(4**i for i in range(16) if 4**i < T), T]
    found = {}
    for name in MEASURES:
        values = torch.cat(chunks[name]).view(B, T).float().masked_fill(~known, 0)
        for a, b in pairwise(edges):
            positions = f'{a}-{b - 1}' if b - 1 > a else f'{a}'
            found[f'{name}/{positions}'] = values[:, a:b].sum() / known[:, a:b].sum()
    return found


class ActivationRecorder(TorchFunctionMode):
    """Records in `found` what flows through a GPT's blocks while it is open."""

    def __init__(self, model):
        super().__init__()
        self.found = {}
        self.layer = 0
        self.blocks = model.transformer.h

    def __enter__(self):
        self.hooks = []
        for i, block in enumerate(self.blocks):
            self.hooks += [
                block.register_forward_pre_hook(
                    lambda _, inputs, i=i: self.enter_block(i, inputs[0])),
                block.register_forward_hook(lambda _, inputs, x, i=i: self.leave_block(i, x))]
            c_proj = getattr(getattr(block, 'mlp', None), 'c_proj', None)
            if isinstance(c_proj, torch.nn.Module):
                self.hooks.append(c_proj.register_forward_pre_hook(
                    lambda _, inputs, i=i: self.enter_c_proj(i, inputs[0])))
        return super().__enter__()

    def __exit__(self, *problem):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*problem)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            # q and k arrive here with all that the model does to them (rotation, norms).
            self.see_attention(*args, **kwargs)
        return function(*args, **kwargs)

    def see_attention(self, *args, **kwargs):
        """Arguments of F.scaled_dot_product_attention"""
        self.found[f'attention_logit/h.{self.layer}'] = largest_logit(*args, **kwargs)

    def enter_block(self, i, x):
        self.layer = i

    def leave_block(self, i, x):
        """x (B, T, C)"""
        if isinstance(x, torch.Tensor):
            self.found[f'activation_rms/h.{i}'] = x.float().square().mean().sqrt()

    def enter_c_proj(self, i, h):
        """h (…, units), after the nonlinearity."""
        h = h.float().flatten(0, -2)  # (N, units)
        loudest, rms = h.abs().amax(dim=0), h.square().mean().sqrt()
        self.found[f'dead_units/h.{i}'] = (loudest <= SILENT * rms).float().mean()


def largest_logit(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                  enable_gqa=False):
    """The largest absolute logit that is not masked, from the arguments of
    F.scaled_dot_product_attention: query, key (B, H, T, D). A head at a time holds few logits."""
    (B, H, T, D), S = query.shape, key.size(2)
    key = key.repeat_interleave(H // key.size(1), dim=1)
    if attn_mask is None:
        attn_mask = torch.ones(T, S, dtype=torch.bool, device=query.device)
        attn_mask = attn_mask.tril() if is_causal else attn_mask
    attn_mask = attn_mask.expand(B, H, T, S)
    largest = []
    for b, h in product(range(B), range(H)):
        logits = query[b, h] @ key[b, h].T * (D**-0.5 if scale is None else scale)  # (T, S)
        mask = attn_mask[b, h]
        if mask.dtype != torch.bool:  # a bias, -inf where masked
            logits, mask = logits + mask, mask != -math.inf
        largest.append(logits.masked_fill(~mask, 0).abs().amax())
    return torch.stack(largest).amax()


def block_name(name):
    """'transformer.h.3.mlp.c_fc.weight' → 'h.3', 'transformer.wte.weight' → 'wte'. A block's value
    embedding, 'value_embedding.3', is not among its matrices: as wte it grows at a rate of its
    own."""
    parts = name.removeprefix('transformer.').split('.')
    if 'value_embedding' in parts:
        return f'value_embedding.{parts[1]}'
    return '.'.join(parts[:2]) if parts[0] == 'h' else parts[0]


def block_norms(tensors):
    """[(name of a parameter, tensor)] → {block: norm of its tensors as one vector}."""
    blocks = {}
    for name, tensor in tensors:
        blocks.setdefault(block_name(name), []).append(tensor)
    return {block: torch.stack(torch._foreach_norm(tensors)).float().norm()
            for block, tensors in blocks.items()}


def sample_rows(p):
    """Rows of a matrix that this process has, evenly spread, with about SAMPLE elements."""
    mine, _ = local_rows(p.detach())
    return mine[::max(1, mine.numel() // SAMPLE)]
