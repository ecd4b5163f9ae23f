"""Weights and shapes that were read, before they are believed: do they make a model, does it fit in
what the files account for, is each number finite?"""

from dataclasses import fields, replace
from math import isqrt
from typing import get_args, get_type_hints

import torch

from model import GPT, GPTConfig
from plaingpt.system.devices import WithoutData
from plaingpt.system.distributed import local_rows
from plaingpt.system.errors import UserError

SIZES = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd')


def check_fields(shape):
    """Raise ValueError, or KeyError, where fields of GPTConfig that were read make no model."""
    kinds = get_type_hints(GPTConfig)
    for field in fields(GPTConfig):
        value = shape[field.name] if field.name in SIZES else shape.get(field.name, field.default)
        kind = kinds[field.name]
        choices = get_args(kind)
        if field.name in SIZES:
            fits, what = type(value) is int and 0 < value < 2**31, 'a positive integer'
        elif choices:
            fits, what = value in choices, f'one of {", ".join(choices)}'
        elif kind is float:
            fits = type(value) in (int, float) and 0 <= value < 1e30 \
                and (value > 0 or field.name == 'dropout')
            what = 'a number above 0' if field.name != 'dropout' else 'a number from 0 on'
        elif kind is int:
            least = -1 if field.name == 'document_start' else 0
            fits, what = type(value) is int and least <= value < 2**31, f'an integer from {least}'
        else:
            fits, what = type(value) is kind, f'of type {kind.__name__}'
        if not fits:
            raise ValueError(f'{field.name}={repr(value)[:40]} is not {what}')
    for problem in GPTConfig(**shape).problems():
        raise ValueError(problem)


def check_held(config, shapes, source):
    """Raise UserError where a GPTConfig describes a much larger model than the tensors that were
    found, {our name: shape}. What is built then takes no more memory than the files account for."""
    blocks = {name.split('.')[2] for name in shapes if name.startswith('transformer.h.')}
    # A misfit of less than this is named in detail, by who copies the weights.
    found = sum(shape.numel() for shape in shapes.values())
    most = 2 * found + 10**6
    fits = config.n_layer <= len(blocks) and config.n_embd <= isqrt(most) \
        and max(*config.qkv_sizes, config.mlp_width) <= most
    if fits:  # so far that torch can count; a tensor on 'meta' has a shape and no memory
        with WithoutData():
            gpt = GPT(replace(config, n_layer=1))
        one_block = sum(p.numel() for p in gpt.transformer.h.parameters())
        rest = sum(p.numel() for p in gpt.parameters()) - one_block
        fits = rest + config.n_layer * one_block <= most
    if not fits:
        sizes = ', '.join(f'{key}={getattr(config, key)}' for key in SIZES)
        raise UserError(f'{source}: its weights do not fit its configuration: there are '
                        f'{len(blocks)} blocks and {found:,} numbers, which is no '
                        f'model of {sizes}')


def copy_rows(tensor, start, source, rows):
    """Copy `rows` rows of `source`, of which source[a:b] reads some, to those of a tensor from
    `start` on. Of a sharded tensor only what this process has is read."""
    mine, first = local_rows(tensor)
    a, b = max(first, start), min(first + len(mine), start + rows)
    if a < b:
        mine[a - first:b - first].copy_(source[a - start:b - start])


def check_finite(model, source, advice='take it from where it came again'):
    """Raise UserError that names a weight which is NaN or infinite."""
    if broken := not_finite(model):
        raise UserError(f'{source}: {broken[0]} is not finite, so it cannot write; {advice}')


def not_finite(model):
    """Names of the weights of this process that are NaN or infinite. Waits for the device, once."""
    weights = dict(model.named_parameters())
    finite = torch.stack([local_rows(p)[0].isfinite().all() for p in weights.values()]).tolist()
    return [name for name, fine in zip(weights, finite, strict=True) if not fine]
