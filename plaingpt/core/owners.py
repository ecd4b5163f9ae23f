"""Full matrices of sharded weights (FSDP2), for Muon, which cannot update rows independently.

Each process owns some of the weights: the others send it their rows, and receive their rows of the
result. If the weights are not sharded, both functions return their input.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from plaingpt.system.distributed import is_sharded, local_rows


def to_owners(rows, p):
    """Turn this process's rows of n tensors (n, r, C) into the full tensors that it owns (k, R, C).
    p (R, …): a weight sharded in the same way. If n is not k × world_size, the last ones are zeros.
    """
    if not is_sharded(p):
        return rows
    n, r, C = rows.shape
    world_size = p.device_mesh.size()
    k = -(-n // world_size)  # rounded up
    rows_per_rank = -(-len(p) // world_size)
    padded = F.pad(rows, (0, 0, 0, rows_per_rank - r, 0, world_size * k - n))
    received = all_to_all(padded, p).view(world_size, k, rows_per_rank, C).transpose(0, 1)
    return received.reshape(k, world_size * rows_per_rank, C)[:, :len(p)]


def from_owners(owned, weights):
    """Turn the full tensors that this process owns (k, R, C) into its rows of all n tensors
    (n, r, C). weights: the n weights that they belong to"""
    p = weights[0]
    if not is_sharded(p):
        return owned
    k, R, C = owned.shape
    world_size = p.device_mesh.size()
    rows_per_rank = -(-R // world_size)  # rounded up
    owned = F.pad(owned, (0, 0, 0, world_size * rows_per_rank - R))
    rows = owned.view(k, world_size, rows_per_rank, C).transpose(0, 1)
    rows = rows.reshape(world_size * k, rows_per_rank, C)
    return all_to_all(rows, p)[:len(weights), :len(local_rows(p)[0])]


def all_to_all(rows, p):
    """Send the i-th of world_size equal parts to rank i. Return the received parts, by rank."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=p.device_mesh.get_group())
    return received
