"""Health metrics of the model during training: does every block learn, and at a healthy rate?

Rank 0 measures gradients before the optimizer's step and how far it moves the weights. Then it runs
the eager model on a few validation sequences without gradients; the compiled model is not used.

    health/grad_norm/h.3        norm of the gradient of block 3, before clipping; also of wte, …
    health/update_ratio/h.3     norm of the update of its matrices / norm of the matrices
    health/attention_logit/h.3  largest absolute attention logit, before the softmax
    health/activation_rms/h.3   RMS of the residual stream after the block
"""

import math
from contextlib import contextmanager
from itertools import product

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plaingpt.system.distributed import all_reduce_norms, is_sharded, local_rows

TOKENS = 4096  # of the forward pass, at most
SAMPLE = 2**16  # elements of each matrix whose update is measured
SDPA_ARGUMENTS = 'query', 'key', 'value', 'attn_mask', 'dropout_p'  # in torch's order


def rms(x):
    return x.float().square().mean().sqrt()


# Metrics of a block: name → function of its output x (B, T, C); logged as health/NAME/h.3
MEASURES = {'activation_rms': rms}


class ActivationRecorder(TorchFunctionMode):
    """A context that records the activations of a GPT's blocks.

    streams: the residual stream before the first block and after each block, (B, T, C)
    attention: (block, arguments by name) of each call of F.scaled_dot_product_attention on queries
    (B, H, T, D); queries and keys are already rotated and normalized
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
            call = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
            if call['query'].dim() == 4:
                self.attention.append((len(self.streams) - 1, call))
        return function(*args, **kwargs)


def attention_logits(b, h, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                     scale=None, enable_gqa=False):
    """Arguments of F.scaled_dot_product_attention → the logits (T, S) of head h in sequence b, with
    -inf where masked. All heads at once would take too much memory."""
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
    """The largest absolute attention logit that is not masked."""
    B, H = query.shape[:2]
    maxima = []
    for b, h in product(range(B), range(H)):
        logits = attention_logits(b, h, query, *args, **kwargs)
        maxima.append(logits.masked_fill(logits == -math.inf, 0).abs().amax())
    return torch.stack(maxima).amax()


class Health:
    """Measures `model` (neither compiled nor wrapped) at iteration 1 and at multiples of `interval`
    (0: never). If the model is sharded, all processes measure.

    loader: of the validation split, whose first sequences are used
    """

    def __init__(self, model, interval, loader, context):
        self.model = model
        self.interval = interval
        self.loader = loader
        self.context = context
        self.mesh = next((p.device_mesh for p in model.parameters() if is_sharded(p)), None)

    def due(self, iter_num):
        return self.interval > 0 and (iter_num == 1 or iter_num % self.interval == 0)

    @contextmanager
    def around_update(self, iter_num, scaler):
        """A context in which update `iter_num` clips the gradient and changes the weights."""
        if not self.due(iter_num):
            yield
            return
        named = list(self.model.named_parameters())
        grads = block_norms([(name, p.new_zeros(1) if p.grad is None else p.grad)
                             for name, p in named], self.mesh)
        # The weights of norms, near 1, would hide the changes of the matrices.
        matrices = [(name, p) for name, p in named if p.dim() >= 2]
        before = [(name, sample_rows(p).clone()) for name, p in matrices]
        scale = scaler.get_scale()  # the gradients are not unscaled yet
        yield
        updates = block_norms([(name, sample_rows(p) - old) for (name, p), (_, old)
                               in zip(matrices, before, strict=True)], self.mesh)
        weights = block_norms(before, self.mesh)
        self.update_metrics = {f'grad_norm/{name}': norm / scale for name, norm in grads.items()}
        for name, norm in updates.items():  # of weights that are 0, the ratio is logged as null
            self.update_metrics[f'update_ratio/{name}'] = norm / weights[name]

    @torch.no_grad()
    def measure(self, model):
        """→ {'health/…': number} after an update that was due. Synchronizes once with the device.
        model: with all the weights; `self.model` unless that is sharded"""
        starts = self.loader.eval_batches(self.loader.batch_size)[0]
        idx = self.loader.eval_batch(starts)[0][:max(1, TOKENS // self.loader.block_size)]  # (B, T)
        model.eval()
        with ActivationRecorder(model) as recorder, self.context:
            model.hidden(idx)
        model.train()
        metrics = dict(self.update_metrics)
        for i, call in recorder.attention:
            metrics[f'attention_logit/h.{i}'] = largest_logit(**call)
        for i, x in enumerate(recorder.streams[1:]):
            if isinstance(x, torch.Tensor):  # a modified block may return a tuple
                for name, measure in MEASURES.items():
                    metrics[f'{name}/h.{i}'] = measure(x)
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        return {f'health/{name}': float(f'{value:.5g}')
                for name, value in zip(metrics, values, strict=True)}


def block_name(name):
    """'transformer.h.3.mlp.c_fc.weight' → 'h.3', 'transformer.wte.weight' → 'wte'. The value
    embedding of a block, 'value_embedding.3', is separate: like wte it has its own update rate."""
    path = name.removeprefix('transformer.').split('.')
    if 'value_embedding' in path:
        return f'value_embedding.{path[1]}'
    return '.'.join(path[:2]) if path[0] == 'h' else path[0]


@torch.no_grad()
def block_norms(tensors, mesh=None):
    """[(parameter name, tensor)] → {block: norm over all its tensors}. mesh: the device mesh of
    sharded tensors"""
    blocks = {}
    for name, tensor in tensors:
        blocks.setdefault(block_name(name), []).append(local_rows(tensor)[0].float().norm())
    norms = torch.stack([torch.stack(tensor_norms).norm() for tensor_norms in blocks.values()])
    return dict(zip(blocks, all_reduce_norms(norms, mesh) if mesh else norms, strict=True))


def sample_rows(p):
    """About SAMPLE elements of a matrix: evenly spaced rows of this process's shard."""
    rows, _ = local_rows(p.detach())
    return rows[::max(1, rows.numel() // SAMPLE)]
