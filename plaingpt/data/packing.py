"""Conversations → batches: packed into sequences, and only what the assistant writes is learned.

Each conversation goes into the sequence that it fills best, the longest first ("best fit
decreasing": Johnson 1973, "Near-optimal bin packing algorithms"). One that is longer than a
sequence is cut where a user speaks; the next piece is opened as a conversation. A turn that is too
long is cut where the sequence ends. What is left of a sequence is padding, which counts nowhere.
"""

import numpy as np
import torch

from plaingpt.data.batches import BatchLoader, key, permute
from plaingpt.data.chat_tokenizer import NAMES
from plaingpt.data.token_files import READ_TOKENS, TokenStream
from plaingpt.system.errors import UserError


class Conversations(TokenStream):
    """The tokens of conversations, and in `learned`, a stream of as many, 1 for those to learn."""

    def __init__(self, files, masks, vocab_size, in_ram=False):
        super().__init__(files, vocab_size, in_ram)
        self.learned = TokenStream(masks, 2, in_ram)
        ids = range(vocab_size - len(NAMES), vocab_size)
        self.conversation, _, self.user, self.assistant, self.end = ids

    def chunks(self):
        """Yield (the number of the first, tokens, which of them are learned), all in order."""
        for first in range(0, len(self), READ_TOKENS):
            place, n = np.array([first]), min(READ_TOKENS, len(self) - first)
            yield first, self.sequences(place, n)[0], self.learned.sequences(place, n)[0]


class PackedLoader(BatchLoader):
    """A BatchLoader of Conversations. The number of a sequence's first token names it, as in a
    BatchLoader. A training batch has a third part, its weight in the loss of the step:
    training_step.forward_backward.
    """

    def tile(self):
        stream, room = self.stream, self.block_size + 1
        begins = conversation_begins(stream)
        self.conversations = len(begins)
        *pieces, self.cut_at_turns, self.cut_hard = cut(stream, begins, room)
        begins, sizes, _ = pieces
        # A piece's first token is no target: nothing before it tells of it.
        counted = learned_before(stream, begins + sizes) - learned_before(stream, begins + 1)
        taught = counted > 0  # the others are parts of long questions
        self.untaught, self.left_out = len(taught) - int(taught.sum()), int(sizes[~taught].sum())
        self.begins, self.sizes, self.continued, counted = (
            column[taught] for column in (*pieces, counted))
        if not len(counted):
            raise UserError(f'{stream.files[0].path}: with block_size={self.block_size} no '
                            'sequence has anything that the assistant says: raise it')
        # More documents than these in a batch would end a run with document_attention on a GPU:
        # kernels/documents.py. The padding is one of them.
        most = max(32, self.block_size // 16) - 1
        rows = best_fit(self.sizes + self.continued, room, most)
        # Rows one after another, by the place in the text of the first piece of each.
        placed = np.argsort(-(self.sizes + self.continued), kind='stable')
        placed = placed[np.argsort(rows[placed], kind='stable')]
        firsts = np.flatnonzero(np.diff(rows[placed], prepend=-1))
        self.pieces = np.split(placed, firsts[1:])
        self.pieces.sort(key=lambda row: row[0])
        self.firsts = np.array([self.begins[row[0]] for row in self.pieces])
        self.counted = np.array([counted[row].sum() for row in self.pieces])
        self.sequences_per_epoch = self.eval_sequences = len(self.pieces)

    def epoch_tokens(self):
        """With the padding."""
        return self.sequences_per_epoch * self.block_size

    def sequence_starts(self, ids):
        epochs, places = np.divmod(ids, self.sequences_per_epoch)
        rows = np.empty_like(ids)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(places[here], self.sequences_per_epoch,
                                 key(self.seed, int(epoch)))
        return self.firsts[rows]

    def eval_starts(self, places, n, first):
        return self.firsts[places if first else places * self.eval_sequences // n]

    def counted_targets(self, ids):
        """How many targets the sequences of these numbers have."""
        return int(self.counted[np.searchsorted(self.firsts, self.sequence_starts(ids))].sum())

    def train_batch(self, step, micro):
        """(idx, targets, weight): its share of all targets of the step, times the processes"""
        ids = self.sequence_ids(step, micro)
        first = self.first_sequence(step)
        total = self.counted_targets(np.arange(first, first + self.step_size))
        weight = self.counted_targets(ids) * self.world_size / max(1, total)
        return *self._on_host(self.sequence_starts(ids)), weight

    def questions(self, n):
        """The ids of n conversations up to their first answer, a list for each; fewer where
        there are fewer."""
        whole = np.flatnonzero(~self.continued)
        found = []
        for i in whole[np.linspace(0, len(whole) - 1, min(n, len(whole))).astype(np.int64)]:
            ids = self.stream.sequences(self.begins[i:i + 1], int(self.sizes[i]))[0].tolist()
            if self.stream.assistant in ids:
                found.append(ids[:ids.index(self.stream.assistant) + 1])
        return found

    def layout(self, start):
        """The pieces of a sequence: [(the column where it begins, its first token in the split, how
        many)]. The columns between them open those that continue a conversation."""
        found, column = [], 0
        for i in self.pieces[np.searchsorted(self.firsts, start)]:
            column += int(self.continued[i])
            found.append((column, int(self.begins[i]), int(self.sizes[i])))
            column += int(self.sizes[i])
        return found

    def _on_host(self, starts):
        shape, stream = (len(starts), self.block_size + 1), self.stream
        tokens, learned = np.full(shape, stream.conversation), np.zeros(shape, bool)
        for row, is_learned, start in zip(tokens, learned, starts, strict=True):
            for column, first, n in self.layout(start):
                place = np.array([first])
                row[column:column + n] = stream.sequences(place, n)[0]
                is_learned[column + 1:column + n] = stream.learned.sequences(place, n)[0, 1:]
            row[column + n + 1:] = stream.end  # so that the padding is one conversation
        idx, targets = (torch.from_numpy(part.copy()) for part in (tokens[:, :-1], tokens[:, 1:]))
        targets[torch.from_numpy(~learned[:, 1:])] = -1
        if self.device.type == 'cuda':
            return idx.pin_memory(), targets.pin_memory()
        return idx, targets

    def _on_device(self, batch):
        idx, targets, *weight = batch
        return [*super()._on_device((idx, targets)), *weight]

    def describe(self):
        """What became of the conversations, in a line."""
        room = self.sequences_per_epoch * (self.block_size + 1)
        used = int((self.sizes + self.continued).sum())
        line = f'{self.conversations:,} conversations in {self.sequences_per_epoch:,} sequences, ' \
               f'{1 - used / room:.1%} padding, {int(self.counted.sum()):,} tokens learned'
        if self.cut_at_turns or self.cut_hard:
            line += f'; longer than block_size: cut before {self.cut_at_turns:,} turns' \
                    + f', and within {self.cut_hard:,} that alone are longer' * bool(self.cut_hard)
        if self.untaught:
            line += f'; left out, since nothing is learned there: {self.untaught:,} pieces'
        return line


def conversation_begins(stream):
    """The number of the first token of each conversation. Raises UserError."""
    found = np.concatenate([first + np.flatnonzero(tokens == stream.conversation)
                            for first, tokens, _ in stream.chunks()])
    if not len(found) or found[0]:
        raise UserError(f'{stream.files[0].path} does not begin with a conversation: prepare the '
                        'data again')
    return found


def cut(stream, begins, room):
    """Conversations → pieces of at most `room` tokens, with the one that opens it: (first token of
    each, how many, whether it continues a conversation, cuts before turns, cuts within)."""
    ends = np.append(begins[1:], len(stream))
    sizes, continued = ends - begins, np.zeros(len(begins), bool)
    at_turns = hard = 0
    found = [[], [], []]
    for i in np.flatnonzero(sizes > room):
        tokens = stream.sequences(begins[i:i + 1], int(sizes[i]))[0]
        users, begin = np.flatnonzero(tokens == stream.user)[1:], 0
        while len(tokens) - begin > (left := room - (begin > 0)):
            turn = users[(users > begin) & (users <= begin + left)][-1:]
            end = int(turn[0]) if len(turn) else begin + left
            at_turns, hard = at_turns + len(turn), hard + 1 - len(turn)
            if begin:
                for column, value in zip(found, (begins[i] + begin, end - begin, True),
                                         strict=True):
                    column.append(value)
            else:
                sizes[i] = end
            begin = end
        for column, value in zip(found, (begins[i] + begin, len(tokens) - begin, True),
                                 strict=True):
            column.append(value)
    begins, sizes, continued = (np.append(a, np.array(b, a.dtype)) for a, b in
                                zip((begins, sizes, continued), found, strict=True))
    order = np.argsort(begins)
    return begins[order], sizes[order], continued[order], at_turns, hard


def learned_before(stream, places):
    """How many tokens before each of `places`, in order, are learned."""
    found, total = np.empty_like(places), 0
    for first, _, learned in stream.chunks():
        sums = total + np.cumsum(np.append(0, learned))
        a, b = np.searchsorted(places, (first, first + len(learned) + 1))
        found[a:b] = sums[places[a:b] - first]
        total = sums[-1]
    return found


def best_fit(sizes, room, most):
    """Sizes of pieces, none above `room` → the sequence that each goes into, at most `most` into
    one: the longest first, each where the least room is left over."""
    rows = np.empty(len(sizes), np.int64)
    having = [[] for _ in range(room + 1)]  # sequences that have so much room left
    some = 0  # bit n is set where there is one that has n
    pieces = []  # of each sequence
    for i in np.argsort(-sizes, kind='stable').tolist():
        size = int(sizes[i])
        if fitting := some >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            row = having[left].pop()
            some ^= (not having[left]) << left
        else:
            left, row = room, len(pieces)
            pieces.append(0)
        rows[i] = row
        pieces[row] += 1
        left -= size
        if left and pieces[row] < most:
            having[left].append(row)
            some |= 1 << left
    return rows
