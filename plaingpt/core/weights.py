"""Loading weights: copying rows, initializing new tokens, finding NaN and infinity, and whether
model.py is the code that they were trained with."""

import ast
import hashlib
import inspect
from functools import cache
from pathlib import Path

import torch

from model import GPTConfig
from plaingpt.system.distributed import is_sharded, launched_world, local_rows
from plaingpt.system.errors import UserError, warn

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


def empty_state(p, shape, rows):
    """An empty tensor for an optimizer state of the parameter p. It is sharded like p if both have
    the same number of rows."""
    dtype = (rows[0:0] if shape else rows[...]).dtype
    if not (is_sharded(p) and shape and shape[0] == len(p)):
        return torch.empty(shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import empty
    return empty(shape, dtype=dtype, device_mesh=p.device_mesh, placements=p.placements)


def init_new_tokens(p, mean, old_vocab_size, vocab_size):
    """Set the rows of new tokens, from old_vocab_size to vocab_size, to `mean` (C,), and the
    padding behind them to 0. p: an embedding or head"""
    local, first = local_rows(p)
    begin, end = max(old_vocab_size - first, 0), max(vocab_size - first, 0)
    local[begin:] = 0.0
    local[begin:end] = mean.to(local)


def check_finite(model, source, advice='download or copy it again'):
    """Raise UserError that names a weight with NaN or infinity."""
    weights = dict(model.named_parameters())
    finite = torch.stack([local_rows(p)[0].isfinite().all() for p in weights.values()])
    for name, is_finite in zip(weights, finite.tolist(), strict=True):  # waits for the device once
        if not is_finite:
            raise UserError(f'{source}: {name} is not finite; {advice}')


# -----------------------------------------------------------------------------
# model.py

# model_code() of the model.py of this release; after an edit of it, tests/test_weights.py fails
RELEASED_MODEL_CODE = '6e2d9c36a240746c5fb06c33b419fe60541e029824a1096e5e4b5dc5f5333b2e'


@cache
def model_code(cls=GPTConfig):
    """The fingerprint of the model.py that this process has imported, where `cls` is defined: a
    SHA-256 that comments, docstrings and formatting do not change. None if it cannot be read."""
    try:
        tree = ast.parse(Path(inspect.getfile(cls)).read_bytes())
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    return hashlib.sha256(repr(syntax_of(tree)).encode()).hexdigest()


def is_edited(model):
    """Whether the code of a GPT is not known to be the model.py of this release."""
    return model_code(type(model)) != RELEASED_MODEL_CODE


def syntax_of(node):
    """A node of a syntax tree as nested tuples, the same in all versions of Python: without empty
    fields, which newer versions add, and without what does not change what the code does."""
    if isinstance(node, list):
        return tuple(syntax_of(item) for item in node if not is_docstring(item))
    if not isinstance(node, ast.AST):
        return ascii(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds an empty string to some format specs
        node.values = [part for part in node.values if getattr(part, 'value', None) != '']
    fields = [(name, syntax_of(value)) for name, value in ast.iter_fields(node)
              if name != 'kind' and value not in (None, [])]  # kind: a string has the prefix u
    return type(node).__name__, *fields


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, 'value', None), str)


def warn_if_edited(checkpoint, code):
    """Warn if model.py has changed since a checkpoint was written. code: its model_code(), or None
    if it has none"""
    if code and model_code() not in (code, None) and launched_world().is_main:
        warn(f'{checkpoint}: model.py has changed since this checkpoint was written; unless the '
             'change suits its weights, restore the earlier model.py')
