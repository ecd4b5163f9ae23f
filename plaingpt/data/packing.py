"""Conversations → batches: packed into sequences, with a loss on what the assistant writes.

Each conversation goes into the sequence that it fills best, the longest first ("best fit
decreasing": Johnson 1973, "Near-optimal bin packing algorithms"). A conversation that is longer
than a sequence is cut before a turn of the user, or within a turn that is too long; each later
piece gets the BOS token in front. The rest of a sequence is padding, which the loss ignores.
"""

import numpy as np
import torch

from plaingpt.data.batches import BatchLoader
from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, ChatTokenizer
from plaingpt.data.token_files import READ_TOKENS, TokenStream
from plaingpt.data.tokenizers import IdsTokenizer
from plaingpt.system.errors import UserError


class ConversationTokens(TokenStream):
    """The tokens of conversations; `loss_mask` is a stream with 1 for each that counts in the loss,
    0 for the others. tokenizer: where the template is another model's, by whose ids the parts of
    conversations are found"""

    def __init__(self, files, masks, vocab_size, tokenizer=None):
        super().__init__(files, vocab_size)
        self.loss_mask = TokenStream(masks, 2)
        # Our control tokens come behind the ids of a text, which are found without their tokenizer:
        # it may take a download.
        self.tokenizer = tokenizer or ChatTokenizer(IdsTokenizer(vocab_size - len(SPECIAL_TOKENS)))

    def verify(self):
        super().verify()
        self.loss_mask.verify()

    def chunks(self):
        """Yield (number of the first token, tokens, their loss mask), all in order."""
        for first in range(0, len(self), READ_TOKENS):
            yield first, self.read(first, READ_TOKENS), self.loss_mask.read(first, READ_TOKENS)


class PackedLoader(BatchLoader):
    """A BatchLoader of ConversationTokens. The number of a sequence's first token names it, as in
    a BatchLoader. A training batch has a third part, its weight in the loss of the step:
    train.forward_backward.
    """

    def tile(self):
        stream = self.stream
        # tokens of a sequence; the first is not read where the template has no opening token
        self.length = length = self.block_size + 1 + (not stream.tokenizer.keeps_bos)
        starts = conversation_starts(stream)
        self.num_conversations = len(starts)
        pieces = starts, sizes, _ = cut(stream, starts, length)
        # A piece's first token is no target: no token before it predicts it.
        targets = mask_sums(stream, starts + sizes) - mask_sums(stream, starts + 1)
        kept = targets > 0  # the others are parts of long questions
        self.tokens_left_out = int(sizes[~kept].sum())
        self.starts, self.sizes, self.with_bos, targets = (
            column[kept] for column in (*pieces, targets))
        if not len(targets):
            raise UserError(f'{stream.files[0].path}: with block_size={self.block_size} no '
                            'sequence has a token of an answer: raise it')
        lengths = self.sizes + self.with_bos
        rows = best_fit(lengths, length)
        # The pieces of each sequence, the longest first; the sequences in the order of the text.
        order = np.lexsort((-lengths, rows))
        firsts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        self.pieces = sorted(np.split(order, firsts[1:]), key=lambda row: row[0])
        self.firsts = np.array([self.starts[row[0]] for row in self.pieces])
        self.num_targets = np.array([targets[row].sum() for row in self.pieces])
        self.sequences_per_epoch = self.num_eval_sequences = len(self.pieces)

    def epoch_tokens(self):
        """How many tokens the model reads in an epoch, with the padding."""
        return self.sequences_per_epoch * self.block_size

    def epoch_starts(self, epoch, sequences):
        return self.firsts[sequences]

    def eval_starts(self, places, n):
        return self.firsts[places * self.num_eval_sequences // n]

    def count_targets(self, ids):
        """How many targets the sequences of these numbers have."""
        rows = np.searchsorted(self.firsts, self.sequence_starts(ids))
        return int(self.num_targets[rows].sum())

    def train_batch(self, step, micro):
        """(idx, targets, weight): its share of all targets of the step, times the processes"""
        ids = self.sequence_ids(step, micro)
        first = self.first_sequence(step)
        total = self.count_targets(np.arange(first, first + self.step_size))
        weight = self.count_targets(ids) * self.world_size / max(1, total)
        return *self._on_host(self.sequence_starts(ids)), weight

    def questions(self, n):
        """The ids of n conversations up to their first answer, a list for each; fewer where
        there are fewer."""
        whole = np.flatnonzero(~self.with_bos)
        found = []
        for i in whole[np.linspace(0, len(whole) - 1, min(n, len(whole))).astype(np.int64)]:
            ids = self.stream.read(self.starts[i], int(self.sizes[i])).tolist()
            answers = places_of(self.stream.tokenizer.answer_ids, np.array(ids))
            if len(answers):
                begin = 0 if self.stream.tokenizer.keeps_bos else 1
                found.append(ids[begin:answers[0] + len(self.stream.tokenizer.answer_ids)])
        return found

    def layout(self, start):
        """The token where a sequence begins → [(column in the batch, first token in the split,
        number of tokens)] of its pieces; the columns between them hold BOS tokens."""
        found, column, keeps_bos = [], 0, self.stream.tokenizer.keeps_bos
        for i in self.pieces[np.searchsorted(self.firsts, start)]:
            first, n = int(self.starts[i]), int(self.sizes[i])
            if self.with_bos[i]:
                column += keeps_bos
            elif not keeps_bos:
                first, n = first + 1, n - 1
            found.append((column, first, n))
            column, keeps_bos = column + n, True
        return found

    def _on_host(self, starts):
        shape, stream = (len(starts), self.block_size + 1), self.stream  # (B, T+1)
        tokens, loss_mask = np.full(shape, stream.tokenizer.conversation), np.zeros(shape, bool)
        for row, in_loss, start in zip(tokens, loss_mask, starts, strict=True):
            for column, first, n in self.layout(start):
                row[column:column + n] = stream.read(first, n)
                in_loss[column + 1:column + n] = stream.loss_mask.read(first, n)[1:]
            # so that the padding is one document
            row[column + n + 1:] = stream.tokenizer.end_of_turn
        idx, targets = (torch.from_numpy(part.copy()) for part in (tokens[:, :-1], tokens[:, 1:]))
        targets[torch.from_numpy(~loss_mask[:, 1:])] = -1
        return self._pinned(idx, targets)

    def _on_device(self, batch):
        idx, targets, *weight = batch
        return [*super()._on_device((idx, targets)), *weight]

    def describe(self):
        """How the conversations were packed, in a line."""
        room, used = self.sequences_per_epoch * self.length, int((self.sizes + self.with_bos).sum())
        return f'{self.num_conversations:,} conversations in {self.sequences_per_epoch:,} ' \
               f'sequences, {1 - used / room:.1%} padding, {int(self.num_targets.sum()):,} ' \
               f'tokens in the loss; cut at {int(self.with_bos.sum()):,} places, as longer than ' \
               f'block_size; {self.tokens_left_out:,} tokens left out, with no answer near them'


def conversation_starts(stream):
    """The number of the first token of each conversation. Raises UserError."""
    found = np.concatenate([first + np.flatnonzero(tokens == stream.tokenizer.conversation)
                            for first, tokens, _ in stream.chunks()])
    if not len(found) or found[0]:
        raise UserError(f'{stream.files[0].path} does not begin with a conversation: prepare the '
                        'data again')
    return found


def places_of(wanted, ids):
    """Where some ids stand one after another among others."""
    found = np.flatnonzero(ids[:len(ids) - len(wanted) + 1] == wanted[0])
    for i, one in enumerate(wanted):
        found = found[ids[found + i] == one]
    return found


def cut(stream, starts, length):
    """Cut conversations that are longer than `length` tokens into pieces. Each piece after the
    first gets a BOS token in front, which counts in its length.

    starts: the first token of each conversation
    → (first token of each piece, number of tokens, whether a BOS token comes in front)
    """
    sizes = np.append(starts[1:], len(stream)) - starts
    pieces = []
    for i in np.flatnonzero(sizes > length):
        start, size, begin = int(starts[i]), int(sizes[i]), 0
        users = places_of(stream.tokenizer.user_ids, stream.read(start, size))[1:]
        while size - begin > (room := length - (begin > 0)):
            turns = users[(users > begin) & (users <= begin + room)]
            end = int(turns[-1]) if len(turns) else begin + room
            pieces.append((start + begin, end - begin, begin > 0))
            begin = end
        pieces.append((start + begin, size - begin, True))
    whole = np.stack([starts, sizes, np.zeros_like(starts)], 1)[sizes <= length]
    every = np.concatenate([whole, np.array(pieces, np.int64).reshape(-1, 3)])
    starts, sizes, with_bos = every[np.argsort(every[:, 0])].T
    return starts, sizes, with_bos.astype(bool)


def mask_sums(stream, places):
    """How many tokens before each of `places`, in order, count in the loss."""
    found, total = np.empty_like(places), 0
    for first, _, loss_mask in stream.chunks():
        sums = total + np.cumsum(np.append(0, loss_mask))
        a, b = np.searchsorted(places, (first, first + len(loss_mask) + 1))
        found[a:b] = sums[places[a:b] - first]
        total = sums[-1]
    return found


def best_fit(sizes, room):
    """Sizes of pieces, none above `room` → the sequence that each goes into. The longest is first,
    and each goes where it leaves the least room."""
    rows = np.empty(len(sizes), np.int64)
    by_room = [[] for _ in range(room + 1)]  # sequences by the room that is left
    some = 0  # bit n is set if a sequence has room n left
    count = 0  # of sequences
    for i in np.argsort(-sizes, kind='stable').tolist():
        size = int(sizes[i])
        if fitting := some >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            row = by_room[left].pop()
            some ^= (not by_room[left]) << left
        else:
            left, row = room, count
            count += 1
        rows[i] = row
        left -= size
        if left:
            by_room[left].append(row)
            some |= 1 << left
    return rows
