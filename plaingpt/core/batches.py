"""Tokens → batches, as a pure function of (seed, step): the data order is computed, not stored.

Sequences of `block_size + 1` tokens tile a split and overlap by one token, so that each token is
predicted once. Each epoch visits every sequence once, in a new permutation and with a new offset of
the tiling; six consecutive epochs together cover every token. Sequences are numbered across epochs
and each step takes the next ones, so a resumed run, on any number of processes, sees the same data
as an uninterrupted one.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

CPU = torch.device('cpu')


def mix(x):
    """Bijective hash of uint64s in which each output bit depends on each input bit: SplitMix64's
    finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*integers):
    """Hash a few non-negative integers, such as (seed, epoch), into one uint64 of shape (1,)."""
    k = np.zeros(1, dtype=np.uint64)
    for integer in integers:
        k = mix(k + np.uint64(0x9E3779B97F4A7C15) + np.array([integer], dtype=np.uint64))
    return k


def permute(indices, n, k):
    """Shuffle range(n) without storing the order: return the images of `indices` under the
    permutation that the key `k` selects. torch.randperm would need memory for all n.

    A 6-round Feistel network permutes the smallest range(2^(2b)) that contains range(n). Images
    outside range(n) are permuted again until they fall inside ("cycle walking": Black and Rogaway
    2002, "Ciphers with arbitrary finite domains"). Memory use does not depend on n.
    """
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # b
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    images = np.array(indices, dtype=np.uint64)
    outside = np.arange(len(images))
    while len(outside):
        left, right = images[outside] >> half_bits, images[outside] & mask
        for r in range(6):
            left, right = right, left ^ (mix(right + k + key(r)) & mask)
        images[outside] = (left << half_bits) | right
        outside = outside[images[outside] >= n]
    return images.astype(np.int64)


class BatchLoader:
    """Batches of a split for this process, as a function of the step.

    stream: the tokens of the split (token_files.TokenStream)
    micro_steps: micro-batches of batch_size sequences per step on this process
    rank, world_size: select this process's share of the sequences of a step
    overfit_steps: train only on the sequences of the first overfit_steps steps; 0: on all
    Raises UserError if the split is shorter than a sequence.
    """

    def __init__(self, stream, block_size, batch_size, *, micro_steps=1, rank=0, world_size=1,
                 seed=0, device=CPU, overfit_steps=0):
        self.stream, self.block_size, self.batch_size = stream, block_size, batch_size
        self.micro_steps, self.rank, self.world_size = micro_steps, rank, world_size
        self.seed, self.device, self.overfit_steps = seed, device, overfit_steps
        self.step_size = batch_size * micro_steps * world_size  # sequences
        # sequences read beyond step × step_size, because steps before a resume had another size
        self.resume_offset = 0
        self.dropped_tokens = 0  # tokens that no epoch reads; PackedLoader drops some
        self.tile()

    def tile(self):
        """Count the sequences of the split and the spare tokens by which they can be shifted."""
        tokens, T = len(self.stream), self.block_size
        if tokens < T + 1:
            raise UserError(f'{self.stream.files[0].path}: {count_of(tokens, "token")}, fewer than '
                            f'one sequence (block_size + 1 = {T + 1}); use more text or a smaller '
                            '--block_size')
        # One sequence fewer than fits leaves room to shift the tiling by up to block_size - 1.
        self.sequences_per_epoch = max(1, (tokens - T) // T)
        self.spare_tokens = tokens - 1 - self.sequences_per_epoch * T
        self.num_eval_sequences = (tokens - 1) // T

    @property
    def components(self):
        """One loader per corpus."""
        return [self]

    def epoch_tokens(self):
        """How many tokens the model reads per epoch."""
        return len(self.stream)

    def sequences_before(self, step):
        """How many sequences all processes together have read before `step`."""
        return self.resume_offset + step * self.step_size

    def tokens_before(self, step):
        """How many tokens all processes together have trained on before `step`."""
        return self.sequences_before(step) * self.block_size

    def resume_at(self, step, sequences):
        """Start `step` after `sequences`, even if earlier steps had another size."""
        self.resume_offset += sequences - self.sequences_before(step)

    def sequence_ids(self, step, micro):
        """The numbers of this process's sequences in a micro-step, counted across epochs."""
        # sequences of the step that earlier micro-steps and lower ranks read
        before = (micro * self.world_size + self.rank) * self.batch_size
        first = self.first_sequence(step) + before
        return np.arange(first, first + self.batch_size)

    def first_sequence(self, step):
        """The number of the first sequence of `step`."""
        if self.overfit_steps:
            return step % self.overfit_steps * self.step_size
        return self.sequences_before(step)

    def sequences_of_step(self, step):
        """(first number, last number, [start token of each]) of all processes' sequences."""
        first = self.first_sequence(step)
        ids = np.arange(first, first + self.step_size)
        return int(ids[0]), int(ids[-1]), self.sequence_starts(ids).tolist()

    def sequence_starts(self, ids):
        """Sequence numbers → the start token of each."""
        epochs, indices = np.divmod(ids, self.sequences_per_epoch)
        starts = np.empty_like(ids)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            permuted = permute(indices[in_epoch], self.sequences_per_epoch,
                               key(self.seed, int(epoch)))
            starts[in_epoch] = self.epoch_starts(int(epoch), permuted)
        return starts

    def epoch_starts(self, epoch, sequences):
        """Positions of sequences in the tiling → the start token of each in an epoch."""
        return self.epoch_offset(epoch) + sequences * self.block_size

    def layout(self, start):
        """The start token of a sequence → [(column in the batch, first token in the split, number
        of tokens)] for each contiguous piece."""
        return [(0, start, self.block_size + 1)]

    def epoch_offset(self, epoch):
        """The token where the tiling of an epoch starts: random in even epochs. Odd epochs cycle
        through the last, the first and the middle offset, and so reach every token, even if the
        split is shorter than three sequences."""
        if epoch % 2:
            return (self.spare_tokens, 0, self.spare_tokens // 2)[epoch // 2 % 3]
        offsets = np.uint64(min(self.block_size, self.spare_tokens + 1))
        return int(key(self.seed, epoch, 1)[0] % offsets)

    def train_batch(self, step, micro):
        """(idx, targets), each (batch_size, block_size) int64 in host memory."""
        return self._on_host(self.sequence_starts(self.sequence_ids(step, micro)))

    def train_batches(self, step):
        """Yield the micro-batches of `step`, `step + 1`, … on the device, endlessly.

        A thread prefetches the next batch while the device computes on the current one.
        """
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix='batches') as reader:
            micro = 0
            pending = reader.submit(self.train_batch, step, micro)
            while True:
                micro += 1
                if micro == self.micro_steps:
                    step, micro = step + 1, 0
                batch = pending.result()
                pending = reader.submit(self.train_batch, step, micro)
                yield self._on_device(batch)

    def eval_batches(self, n):
        """This process's share of n evaluation sequences (or of all, if fewer) → one array per
        batch with the start token of each sequence.

        The sequences are spread evenly over the split, whatever the batch size; with overfit_steps
        they are the training sequences. All processes have the same number of batches; the last
        may be empty."""
        if self.overfit_steps:
            n = self.overfit_steps * self.step_size
            starts = self.sequence_starts(np.arange(self.rank, n, self.world_size))
        else:
            n = min(n, self.num_eval_sequences)
            starts = self.eval_starts(np.arange(self.rank, n, self.world_size), n)
        return [starts[i:i + self.batch_size]
                for i in range(0, math.ceil(n / self.world_size), self.batch_size)]

    def eval_starts(self, indices, n):
        """The start tokens of the sequences `indices` out of n that are spread over the split.
        Sequences repeat if the split has fewer than n."""
        return indices * self.num_eval_sequences // n * self.block_size

    def mean_target(self, values, n):
        """The mean of values (vocab_size,) over the targets of eval_batches on all processes."""
        n = min(n, self.num_eval_sequences)
        starts = self.eval_starts(np.arange(n), n)
        total = count = 0
        for i in range(0, n, self.batch_size):
            _, targets = self._on_host(starts[i:i + self.batch_size])
            targets = targets[targets != -1].numpy()
            total += values[targets].sum()
            count += len(targets)
        return float(total / count)

    def eval_batch(self, starts):
        """(idx, targets), each (batch_size, block_size) int64 on the device.

        A short batch is padded with targets of -1, which the loss ignores: all batches have one
        shape, so the model is compiled once."""
        idx, targets = self._on_host(np.resize(starts, self.batch_size))
        if len(starts) < self.batch_size:
            targets = targets.clone()  # idx and targets of a single sequence share memory
            targets[len(starts):] = -1
        return self._on_device((idx, targets))

    def _on_host(self, starts):
        sequences = torch.from_numpy(self.stream.sequences(starts, self.block_size + 1))  # (B, T+1)
        # targets[t] is the token after idx[t]
        return self._pinned(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())

    def _pinned(self, *tensors):
        if self.device.type != 'cuda':
            return tensors
        return [tensor.pin_memory() for tensor in tensors]

    def _on_device(self, batch):
        idx, targets, *weight = batch  # a PackedLoader's batch also has a weight, a number
        # From pinned memory the copy is asynchronous; otherwise it blocks.
        return [idx.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True),
                *weight]
