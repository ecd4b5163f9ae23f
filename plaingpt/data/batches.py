"""Tokens → batches, as a pure function of (seed, step): the data order is computed, not stored.

Sequences of `block_size + 1` tokens tile a split and overlap by one token, so that each token is
predicted once. Each epoch visits every sequence once, in the order of its own permutation, of a
tiling that starts at its own token; the tilings of six epochs together reach every token. Sequences
are numbered over all epochs and each step takes the next ones: a run that resumes, on any number of
processes, sees the data it would have seen.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from plaingpt.system.errors import UserError

CPU = torch.device('cpu')


def mix(x):
    """Hash uint64s one to one, so that each output bit depends on each input bit: the finalizer of
    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts):
    """Hash a few non-negative integers, such as (seed, epoch), into one uint64: shape (1,)."""
    k = np.zeros(1, dtype=np.uint64)
    for part in parts:
        k = mix(k + np.uint64(0x9E3779B97F4A7C15) + np.array([part], dtype=np.uint64))
    return k


def permute(indices, n, k):
    """The images of `indices` under a permutation of range(n); each key `k` gives another one.

    A Feistel network of 6 rounds permutes the smallest range(2^(2b)) that holds range(n). An image
    outside range(n) is permuted again until it lies inside ("cycle walking": Black and Rogaway
    2002, "Ciphers with arbitrary finite domains"). The memory does not depend on n.
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
    micro_steps: micro-batches that this process takes per step (each of batch_size sequences)
    rank, world_size: which share of a step's sequences is this process's own
    only_first: train only on the sequences of this many first steps, again and again; 0: on all
    Raises UserError where the split is shorter than a sequence.
    """

    def __init__(self, stream, block_size, batch_size, *, micro_steps=1, rank=0, world_size=1,
                 seed=0, device=CPU, only_first=0):
        self.stream, self.block_size, self.batch_size = stream, block_size, batch_size
        self.micro_steps, self.rank, self.world_size = micro_steps, rank, world_size
        self.seed, self.device, self.only_first = seed, device, only_first
        self.step_size = batch_size * micro_steps * world_size  # sequences
        self.shift = 0  # sequences taken beyond step × step_size, by steps of another size
        self.tile()

    def tile(self):
        """Cut the split into sequences: how many there are, and how far they can be shifted."""
        tokens, T = len(self.stream), self.block_size
        if tokens < T + 1:
            raise UserError(f'{self.stream.files[0].path}: {tokens} tokens are fewer than one '
                            f'sequence of block_size + 1 = {T + 1}: use more text or a '
                            'smaller --block_size')
        # One sequence fewer than would fit leaves room to shift the tiling by up to block_size - 1.
        self.sequences_per_epoch = max(1, (tokens - T) // T)
        self.spare = tokens - 1 - self.sequences_per_epoch * T
        self.num_eval_sequences = (tokens - 1) // T

    tokens_left_out = 0  # those that no epoch reads

    @property
    def parts(self):
        """A loader for each corpus."""
        return [self]

    def epoch_tokens(self):
        """How many tokens the model reads in an epoch."""
        return len(self.stream)

    def sequences_before(self, step):
        """How many sequences all processes together have taken when `step` begins."""
        return self.shift + step * self.step_size

    def tokens_before(self, step):
        """How many tokens all processes together have trained on when `step` begins."""
        return self.sequences_before(step) * self.block_size

    def resume_at(self, step, sequences):
        """Let `step` begin after `sequences`, also where earlier steps had another size."""
        self.shift += sequences - self.sequences_before(step)

    def sequence_ids(self, step, micro):
        """The numbers of this process's sequences in a micro-step, counted over all epochs."""
        share = (micro * self.world_size + self.rank) * self.batch_size
        first = self.first_sequence(step) + share
        return np.arange(first, first + self.batch_size)

    def first_sequence(self, step):
        """The number of the first sequence that `step` takes."""
        if self.only_first:
            return step % self.only_first * self.step_size
        return self.sequences_before(step)

    def step_sequences(self, step):
        """(first number, last number, [token where each begins]) of all processes' sequences."""
        first = self.first_sequence(step)
        ids = np.arange(first, first + self.step_size)
        return int(ids[0]), int(ids[-1]), self.sequence_starts(ids).tolist()

    def sequence_starts(self, ids):
        """Numbers of sequences → the token where each begins."""
        epochs, places = np.divmod(ids, self.sequences_per_epoch)
        starts = np.empty_like(ids)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            sequences = permute(places[here], self.sequences_per_epoch, key(self.seed, int(epoch)))
            starts[here] = self.epoch_starts(int(epoch), sequences)
        return starts

    def epoch_starts(self, epoch, sequences):
        """Indices of sequences in the split → the token where each begins in an epoch."""
        return self.phase(epoch) + sequences * self.block_size

    def layout(self, start):
        """The token where a sequence begins → [(column in the batch, first token in the split,
        number of tokens)] of its pieces."""
        return [(0, start, self.block_size + 1)]

    def phase(self, epoch):
        """The token where the tiling of an epoch starts: a random one in even epochs. Odd epochs
        start where the tiling ends with the last token, at the first token, and halfway between:
        together they reach every token, also of a split shorter than three sequences."""
        if epoch % 2:
            return (self.spare, 0, self.spare // 2)[epoch // 2 % 3]
        return int(key(self.seed, epoch, 1)[0] % np.uint64(min(self.block_size, self.spare + 1)))

    def train_batch(self, step, micro):
        """(idx, targets), each (batch_size, block_size) int64 in host memory."""
        return self._on_host(self.sequence_starts(self.sequence_ids(step, micro)))

    def train_batches(self, step):
        """Yield the micro-batches of `step`, `step + 1`, … on the device, without end.

        The next batch is read by a thread while the device computes on this one.
        """
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix='batches') as reader:
            micro = 0
            pending = reader.submit(self.train_batch, step, micro)
            while True:
                step, micro = (step, micro + 1) if micro + 1 < self.micro_steps else (step + 1, 0)
                batch, pending = pending.result(), reader.submit(self.train_batch, step, micro)
                yield self._on_device(batch)

    def eval_batches(self, n):
        """This process's share of n evaluated sequences, or of all where there are fewer → one
        array per batch: the token where each sequence begins.

        The sequences are the same for any batch size, spread evenly over the split; with
        only_first, those that are trained on. All processes have the same number of batches;
        the last of some may be empty."""
        if self.only_first:
            n = self.only_first * self.step_size
            mine = self.sequence_starts(np.arange(self.rank, n, self.world_size))
        else:
            n = min(n, self.num_eval_sequences)
            mine = self.eval_starts(np.arange(self.rank, n, self.world_size), n)
        return [mine[i:i + self.batch_size]
                for i in range(0, math.ceil(n / self.world_size), self.batch_size)]

    def eval_starts(self, places, n):
        """n sequences are spread over the split → the token where each of `places` in range(n) is.
        They repeat if there are fewer than n."""
        return places * self.num_eval_sequences // n * self.block_size

    def mean_target(self, values, n):
        """The mean of values (vocab_size,) over the targets of eval_batches, of all processes."""
        n = min(n, self.num_eval_sequences)
        starts = 1 + self.eval_starts(np.arange(n), n)
        total = sum(values[self.stream.sequences(starts[i:i + self.batch_size], self.block_size)]
                    .sum() for i in range(0, n, self.batch_size))
        return float(total / (n * self.block_size))

    def eval_batch(self, starts):
        """(idx, targets), each (batch_size, block_size) int64 on the device.

        A short batch is padded with targets of -1, which the loss ignores: one shape for all, so
        that a compiled model is compiled once."""
        idx, targets = self._on_host(np.resize(starts, self.batch_size))
        if len(starts) < self.batch_size:
            targets = targets.clone()  # with one sequence they share memory with idx
            targets[len(starts):] = -1
        return self._on_device((idx, targets))

    def _on_host(self, starts):
        sequences = torch.from_numpy(self.stream.sequences(starts, self.block_size + 1))  # (B, T+1)
        return self._pinned(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())

    def _pinned(self, *tensors):
        return [x.pin_memory() for x in tensors] if self.device.type == 'cuda' else tensors

    def _on_device(self, batch):
        # From pinned memory the copy runs while the host continues; elsewhere it blocks.
        return [tensor.to(self.device, non_blocking=True) for tensor in batch]
