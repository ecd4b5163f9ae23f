"""Weights that were read: their rows, tokens that are new, numbers that are not finite."""

import torch

from model import GPTConfig
from plaingpt.system.distributed import local_rows
from plaingpt.system.errors import UserError

# OpenAI's models (Radford et al. 2019, table 2). GPTConfig's defaults are the smallest one.
PRETRAINED = {'gpt2': GPTConfig(),
              'gpt2-medium': GPTConfig(n_layer=24, n_head=16, n_embd=1024),
              'gpt2-large': GPTConfig(n_layer=36, n_head=20, n_embd=1280),
              'gpt2-xl': GPTConfig(n_layer=48, n_head=25, n_embd=1600)}


def copy_rows(tensor, start, source):
    """Copy the rows of `source` to those of a tensor from `start` on. source[a:b] reads only some
    rows: for a sharded tensor only those that this process has."""
    shape = source.get_shape() if hasattr(source, 'get_shape') else source.shape
    if not shape:
        tensor.copy_(source[...])
        return
    mine, first = local_rows(tensor)
    a, b = max(first, start), min(first + len(mine), start + shape[0])
    if a < b:
        mine[a - first:b - first].copy_(source[a - start:b - start])


def begin_new_tokens(p, mean, known, vocab_size):
    """Let the rows of an embedding or a head from `known` on be those of new tokens, which begin as
    the mean, (C,), of the others; those behind vocab_size pad it."""
    mine, first = local_rows(p)
    mine[max(known - first, 0):] = 0.0
    mine[max(known - first, 0):max(vocab_size - first, 0)] = mean.to(mine)


def check_finite(model, source, advice='take it from where it came again'):
    """Raise UserError that names a weight which is NaN or infinite."""
    if broken := not_finite(model):
        raise UserError(f'{source}: {broken[0]} is not finite: {advice}')


def not_finite(model):
    """Names of the weights of this process that are NaN or infinite. Waits for the device, once."""
    weights = dict(model.named_parameters())
    finite = torch.stack([local_rows(p)[0].isfinite().all() for p in weights.values()]).tolist()
    return [name for name, fine in zip(weights, finite, strict=True) if not fine]
