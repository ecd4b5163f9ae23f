"""Work on whole matrices that the processes share: each matrix has one owner, which does all of it.

Under DDP every process has all rows, so only the owners' results are sent. Under FSDP2 each has
some rows of every matrix: the rows are sent to the owners, and the results back.
"""

from functools import cached_property, lru_cache

import torch
import torch.distributed as dist

from plaingpt.system.distributed import held_rows, is_sharded

# torch 2.13 renamed it
all_gather_single = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor


def shared_by_shape(stacks, processes):
    """The Stacks of optimizers.py → CopiedMatrices, or ShardedMatrices, for each shape."""
    group, size, kind = None, processes, CopiedMatrices
    if is_sharded(stacks[0].parameter):
        mesh = stacks[0].parameter.device_mesh
        group, size, kind = mesh.get_group(), mesh.size(), ShardedMatrices
    alike = {}
    owners = owners_of(tuple((stack.shape, stack.n) for stack in stacks), size)
    for stack, owner in zip(stacks, owners, strict=True):
        alike.setdefault(stack.shape, []).append((owner, stack))
    return [kind(shape, owned, size, group) for shape, owned in alike.items()]


def held(stack, rank, size):
    """→ (first, count): which rows of a stack a process of `size` holds, if these share rows"""
    first, count = held_rows(len(stack.parameter), rank, size)
    a, b = max(first, stack.start), min(first + count, stack.start + stack.rows)
    return max(a - stack.start, 0), max(b - a, 0)


@lru_cache
def owners_of(stacks, size):
    """((shape, how many matrices of it), …) → the process of `size` that owns each.

    The stack with the most work is given away first, to the process with the least to do."""
    owners, todo = [0] * len(stacks), [0] * size
    amounts = [n * work(shape) for shape, n in stacks]
    for i in sorted(range(len(stacks)), key=lambda i: (amounts[i], stacks[i]), reverse=True):
        owners[i] = todo.index(min(todo))
        todo[owners[i]] += amounts[i]
    return tuple(owners)


def work(shape):
    """Multiplications in a Newton-Schulz iteration: for xxᵀ, for its square, and for x times it."""
    small, large = sorted(shape)
    return 2 * small**2 * large + small**3


class CopiedMatrices:
    """Stacks of matrices of one shape (R, C), where each process has all rows.

    stacks: sorted by their owner
    """

    def __init__(self, shape, owned, size, group):
        owned = sorted(owned, key=lambda pair: pair[0])
        self.shape, self.size, self.group = shape, size, group
        self.rank = dist.get_rank(group)
        self.owners, self.stacks = zip(*owned, strict=True)
        self.mine = [stack for owner, stack in owned if owner == self.rank]

    def to_owners(self, tensors, dtype):
        """A tensor for each stack → those of the matrices owned here, (k, R, C)."""
        mine = [t for t, owner in zip(tensors, self.owners, strict=True) if owner == self.rank]
        rows = torch.cat(mine) if mine else tensors[0][:0]
        return rows.to(dtype).view(-1, *self.shape)

    def from_owners(self, results):
        """Each process's results for its matrices, (k, R, C) → those for all, (n, R, C)."""
        turned = self.shape[0] > self.shape[1]  # in memory they are (k, C, R)
        mine = (results.mT if turned else results).contiguous()
        counts = [sum(stack.n for stack, owner in zip(self.stacks, self.owners, strict=True)
                      if owner == rank) for rank in range(self.size)]
        most = max(counts)  # an all-gather takes the same size from each
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[:len(mine)] = mine
        found = mine.new_empty(self.size * most, *mine.shape[1:])
        all_gather_single(found, padded, group=self.group)
        found = torch.cat([part[:count] for part, count in
                           zip(found.split(most), counts, strict=True)])
        return found.mT if turned else found

    def lengths(self, updates):
        """What from_owners returned → the Frobenius norm of each matrix, shaped to divide by."""
        return updates.norm(dim=(-2, -1), keepdim=True)


class ShardedMatrices(CopiedMatrices):
    """The same, where each process has some rows of each parameter, as FSDP2 gives them out."""

    def to_owners(self, tensors, dtype):
        """The local rows of each stack → the matrices owned here, (k, R, C)."""
        rows = self.exchange(torch.cat(tensors).to(dtype), self.sent, self.received)
        return transposed(rows, self.blocks).view(-1, *self.shape)

    def from_owners(self, results):
        """Each process's results for its matrices, (k, R, C) → the local rows of all, (rows, C)."""
        rows = results.contiguous().view(-1, self.shape[1])
        rows = transposed(rows, zip(*self.blocks, strict=True))
        return self.exchange(rows, self.received, self.sent)

    def lengths(self, rows):
        """The same, (rows, 1). The processes add up the squares of their rows of each matrix."""
        places, first = [], 0  # of the local rows among those of all stacks
        for stack in self.stacks:
            start, count = held(stack, self.rank, self.size)
            places.append(torch.arange(first + start, first + start + count, device=rows.device))
            first += stack.rows
        places = torch.cat(places)
        squares = rows.new_zeros(first)
        squares[places] = rows.square().sum(1)
        squares = squares.view(-1, self.shape[0]).sum(1)  # of each matrix
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()[places // self.shape[0]].unsqueeze(1)

    @cached_property
    def blocks(self):
        """For each process, how many rows it holds of each stack that is owned here."""
        return [[held(stack, rank, self.size)[1] for stack in self.mine]
                for rank in range(self.size)]

    @cached_property
    def received(self):
        """How many rows each process holds of the matrices that are owned here."""
        return [sum(counts) for counts in self.blocks]

    @cached_property
    def sent(self):
        """How many rows are held here of the matrices that each process owns."""
        counts = [0] * self.size
        for stack, owner in zip(self.stacks, self.owners, strict=True):
            counts[owner] += held(stack, self.rank, self.size)[1]
        return counts

    def exchange(self, rows, sent, received):
        """Rows for each process, one after another → those from each process."""
        found = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(found, rows, received, sent, group=self.group)
        return found


def transposed(rows, counts):
    """Rows in blocks of counts[i][j] rows → the blocks in the order of j, then of i."""
    counts = [list(line) for line in counts]
    pieces = iter(rows.split([count for line in counts for count in line]))
    blocks = [[next(pieces) for _ in line] for line in counts]
    return torch.cat([rows[:0], *(block for column in zip(*blocks, strict=True)
                                  for block in column)])
