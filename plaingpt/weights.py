"""Loading weights: copying rows, initializing new tokens, finding NaN and infinity."""

import torch

from model import GPTConfig
from plaingpt.system.distributed import local_rows
from plaingpt.system.errors import UserError

# OpenAI's GPT-2 (Radford et al. 2019, table 2); GPTConfig's defaults are the smallest
PRETRAINED = {'gpt2': GPTConfig(),
              'gpt2-medium': GPTConfig(n_layer=24, n_head=16, n_embd=1024),
              'gpt2-large': GPTConfig(n_layer=36, n_head=20, n_embd=1280),
              'gpt2-xl': GPTConfig(n_layer=48, n_head=25, n_embd=1600)}


def copy_rows(tensor, start, source):
    """Copy `source` to the rows of a tensor from `start` on. For a sharded tensor, only the rows of
    this process are read. source: a tensor, or a slice of a safetensors file"""
    shape = source.get_shape() if hasattr(source, 'get_shape') else source.shape
    if not shape:
        tensor.copy_(source[...])
        return
    local, first = local_rows(tensor)
    begin, end = max(first, start), min(first + len(local), start + shape[0])
    if begin < end:
        local[begin - first:end - first].copy_(source[begin - start:end - start])


def init_new_tokens(p, mean, old_vocab_size, vocab_size):
    """Set the rows of new tokens, from old_vocab_size to vocab_size, to `mean` (C,), and the
    padding behind them to 0. p: an embedding or head"""
    local, first = local_rows(p)
    begin, end = max(old_vocab_size - first, 0), max(vocab_size - first, 0)
    local[begin:] = 0.0
    local[begin:end] = mean.to(local)


def check_finite(model, source, advice='download or copy it again'):
    """Raise UserError that names a weight with NaN or infinity."""
    names = nonfinite_weights(model)
    if names:
        raise UserError(f'{source}: {names[0]} is not finite; {advice}')


def nonfinite_weights(model):
    """Names of the weights with NaN or infinity in this process. Waits for the device once."""
    weights = dict(model.named_parameters())
    finite = torch.stack([local_rows(p)[0].isfinite().all() for p in weights.values()]).tolist()
    return [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]
