"""Whole matrices of sharded weights (FSDP2), for Muon: of each weight every process has some rows.

Each process owns some of the weights: the others send it their rows, and get their rows of the
result. Both functions return what they are given if the weights are not sharded.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from plaingpt.system.distributed import is_sharded, local_rows


def to_owners(rows, p):
    """This process's rows of n tensors (n, r, C) → the tensors that it owns, whole (k, R, C).
    p (R, …): a weight that is sharded as they are. Where n is not k times the number of processes,
    some are zeros."""
    if not is_sharded(p):
        return rows
    (n, r, C), size = rows.shape, p.device_mesh.size()
    k, most_rows = -(-n // size), -(-len(p) // size)
    rows = exchange(F.pad(rows, (0, 0, 0, most_rows - r, 0, size * k - n)), p)
    rows = rows.view(size, k, most_rows, C).transpose(0, 1)
    return rows.reshape(k, size * most_rows, C)[:, :len(p)]


def from_owners(owned, weights):
    """The tensors that this process owns (k, R, C), one for each of the weights → its rows of all
    of them (n, r, C)."""
    p, n = weights[0], len(weights)
    if not is_sharded(p):
        return owned
    (k, R, C), size = owned.shape, p.device_mesh.size()
    most_rows = -(-R // size)
    owned = F.pad(owned, (0, 0, 0, size * most_rows - R))
    rows = owned.view(k, size, most_rows, C).transpose(0, 1).reshape(size * k, most_rows, C)
    return exchange(rows, p)[:n, :len(local_rows(p)[0])]


def exchange(pieces, p):
    """Send the i-th of equal pieces to process i → a piece from each process, in order"""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=p.device_mesh.get_group())
    return received
