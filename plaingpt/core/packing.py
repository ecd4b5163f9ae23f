"""Documents → batches: whole documents packed into sequences. A conversation is a document with a
loss on the assistant's replies only.

Documents are packed by best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"). A
document that is longer than a sequence is split, a conversation before a user turn if possible;
each later piece starts with the BOS token. The loss ignores the padding.
"""

from functools import cached_property

import numpy as np
import torch

from plaingpt.core.batches import BatchLoader
from plaingpt.core.token_files import CONVERSATION, IN_LOSS, READ_TOKENS, TURN, TokenStream
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of


class LossMask(TokenStream):
    """Whether each token counts in the loss, from the files with the marks of tokens."""

    def sequences(self, starts, length):
        return super().sequences(starts, length) == IN_LOSS


class DocumentTokens(TokenStream):
    """The tokens of documents of text. Each starts with bos_id: the tokenizer's end-of-text token,
    or the line break if it has none, so that each line is a document."""

    # Whether BOS tokens are ours, not the template's: one at the start of a sequence is not read.
    adds_bos = False
    may_repeat = False  # whether a piece of a document may repeat the last token of the one before
    next_tokens = 1  # tokens after a document that are its targets, too: the next BOS token
    noun = 'document'

    def __init__(self, files, vocab_size, bos_id):
        super().__init__(files, vocab_size)
        self.bos_id = self.pad_id = bos_id

    @cached_property
    def document_starts(self):
        """The index of the first token of each document. Raises UserError."""
        starts = find_tokens(self, self.bos_id)
        if not len(starts):
            raise UserError(f'{self.files[0].path}: pack=documents: no end-of-text token (for a '
                            'tokenizer without one: no line break) separates documents; prepare '
                            'the data with --documents=line, file or paragraph, or ids with '
                            '--end_of_text, or leave out pack')
        # A token at the end starts no document. Text before the first one is a document, too.
        return np.union1d(0, starts[starts < len(self) - 1])

    def turn_starts(self, start, length):
        """Where a long document can be split, besides where a sequence is full."""
        return np.empty(0, np.int64)

    def in_loss(self, start, length):
        """Whether each token counts in the loss."""
        return np.ones(length, bool)

    def targets_before(self, positions):
        """How many tokens before each of the sorted `positions` count in the loss."""
        return positions


class ConversationTokens(TokenStream):
    """The tokens of conversations, with their marks (ChatTokenizer.mark_conversation). tokenizer:
    for a pretrained model's template"""

    noun = 'conversation'
    next_tokens = 0

    def __init__(self, files, masks, vocab_size, tokenizer=None):
        super().__init__(files, vocab_size)
        self.marks, self.loss_mask = TokenStream(masks, TURN + 1), LossMask(masks, TURN + 1)
        # Version 1.0 marked only the tokens in the loss.
        self.has_starts = self.marks.read(0, 1)[0] == CONVERSATION
        # Our control tokens follow the ids of text, so finding them does not need the tokenizer of
        # text, which may need a download.
        if tokenizer is None:
            from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, ChatTokenizer
            from plaingpt.data.tokenizers import IdsTokenizer
            tokenizer = ChatTokenizer(IdsTokenizer(vocab_size - len(SPECIAL_TOKENS)))
        self.tokenizer, self.adds_bos = tokenizer, tokenizer.adds_bos
        self.bos_id, self.pad_id = tokenizer.bos_id, tokenizer.end_of_turn
        self.may_repeat = self.has_starts  # data of version 1.0 is split as in 1.0

    def verify(self):
        super().verify()
        self.marks.verify()
        len(self.document_starts)  # raises UserError

    @cached_property
    def document_starts(self):
        """The index of the first token of each conversation. Raises UserError."""
        if self.has_starts:
            starts = find_tokens(self.marks, CONVERSATION)
        else:
            starts = find_tokens(self, self.bos_id)
        if not len(starts) or starts[0]:
            raise UserError(f'{self.files[0].path} does not begin with a conversation: prepare the '
                            'data again')
        return starts

    def turn_starts(self, start, length):
        """The index of the first token of each later user turn of a conversation."""
        if self.has_starts:
            return start + np.flatnonzero(self.marks.read(start, length) == TURN)
        return start + find_subsequence(self.tokenizer.user_ids, self.read(start, length))[1:]

    def in_loss(self, start, length):
        return self.loss_mask.read(start, length)

    def targets_before(self, positions):
        result, total = np.empty_like(positions), 0
        for first in range(0, len(self), READ_TOKENS):
            in_loss = self.in_loss(first, READ_TOKENS)
            sums = total + np.cumsum(np.append(0, in_loss))
            a, b = np.searchsorted(positions, (first, first + len(in_loss) + 1))
            result[a:b] = sums[positions[a:b] - first]
            total = sums[-1]
        return result


class PackedLoader(BatchLoader):
    """A BatchLoader of DocumentTokens or ConversationTokens. A sequence is identified by the start
    token of its first piece. A training batch has a third element, its weight in the loss of the
    step (forward_backward in train.py).
    """

    def tile(self):
        stream = self.stream
        # A BOS token that the template lacks is not read at the start of a sequence.
        self.length = self.block_size + (2 if stream.adds_bos else 1) - stream.next_tokens
        starts, sizes, with_bos = split_documents(stream, self.length)
        # A piece's first token is not a target: no token before it predicts it.
        ends = np.minimum(starts + sizes + stream.next_tokens, len(stream))
        targets = stream.targets_before(ends) - stream.targets_before(starts + 1)
        has_targets = targets > 0  # pieces of long questions have none
        self.dropped_tokens = int(sizes[~has_targets].sum())
        self.starts, self.sizes = starts[has_targets], sizes[has_targets]
        self.with_bos, targets = with_bos[has_targets], targets[has_targets]
        if not len(targets):
            raise UserError(f'{stream.files[0].path}: no sequence contains a token to predict with '
                            f'block_size={self.block_size}; raise --block_size, or use more text')
        lengths = self.sizes + self.with_bos
        sequences = best_fit(lengths, self.length)
        # The pieces of each sequence, longest first; the sequences in the order of the data. Text
        # without a BOS token at its start comes first: it cannot end a document before it.
        has_bos = np.ones(len(lengths), bool)
        has_bos[0] = stream.read(0, 1)[0] == stream.bos_id
        order = np.lexsort((-lengths, has_bos, sequences))
        boundaries = np.flatnonzero(np.diff(sequences[order], prepend=-1))
        self.pieces = sorted(np.split(order, boundaries[1:]), key=lambda pieces: pieces[0])
        self.first_starts = np.array([self.starts[pieces[0]] for pieces in self.pieces])
        self.num_targets = np.array([targets[pieces].sum() for pieces in self.pieces])
        self.sequences_per_epoch = self.num_eval_sequences = len(self.pieces)

    def epoch_tokens(self):
        """How many tokens the model reads per epoch, including padding."""
        return self.sequences_per_epoch * self.block_size

    def epoch_starts(self, epoch, sequences):
        return self.first_starts[sequences]

    def eval_starts(self, indices, n):
        return self.first_starts[indices * self.num_eval_sequences // n]

    def count_targets(self, ids):
        """The number of targets in the sequences with these numbers."""
        sequences = np.searchsorted(self.first_starts, self.sequence_starts(ids))
        return int(self.num_targets[sequences].sum())

    def train_batch(self, step, micro):
        """(idx, targets, weight): weight is its share of all targets of the step, × world_size"""
        ids = self.sequence_ids(step, micro)
        first = self.first_sequence(step)
        total = self.count_targets(np.arange(first, first + self.step_size))
        weight = self.count_targets(ids) * self.world_size / max(1, total)
        return *self._on_host(self.sequence_starts(ids)), weight

    def question_prompts(self, n):
        """The ids of up to n conversations, each up to its first reply in the loss."""
        first_pieces, prompts = np.flatnonzero(~self.with_bos), []
        skipped = 1 if self.stream.adds_bos else 0
        n = min(n, len(first_pieces))
        for i in first_pieces[np.linspace(0, len(first_pieces) - 1, n).astype(np.int64)]:
            first_in_loss = np.argmax(self.stream.in_loss(self.starts[i], self.sizes[i]))
            prompts.append(self.stream.read(self.starts[i], first_in_loss)[skipped:].tolist())
        return prompts

    def layout(self, start):
        """The start token of a sequence → [(column in the batch, first token in the split, number
        of tokens)] for each piece; the columns between them hold BOS tokens. Where a document ends
        with the next one's BOS token, the next piece starts in the same column."""
        stream = self.stream
        pieces, column, skips_bos = [], 0, stream.adds_bos
        for i in self.pieces[np.searchsorted(self.first_starts, start)]:
            first, n = int(self.starts[i]), int(self.sizes[i])
            if self.with_bos[i]:
                if not skips_bos:
                    column += 1
            elif skips_bos:
                first, n = first + 1, n - 1
            pieces.append((column, first, min(n + stream.next_tokens, len(stream) - first)))
            column += n
            skips_bos = False  # only at the start of a sequence
        return pieces

    def _on_host(self, starts):
        shape, stream = (len(starts), self.block_size + 1), self.stream  # (B, T+1)
        tokens, loss_mask = np.full(shape, stream.bos_id), np.zeros(shape, bool)
        for row, in_loss, start in zip(tokens, loss_mask, starts, strict=True):
            for column, first, n in self.layout(start):
                row[column:column + n] = stream.read(first, n)
                in_loss[column + 1:column + n] = stream.in_loss(first, n)[1:]
            # After conversations, the padding starts with one BOS token: it is one document.
            row[column + n + 1:] = stream.pad_id
        idx = torch.from_numpy(tokens[:, :-1].copy())
        targets = torch.from_numpy(tokens[:, 1:].copy())
        targets[torch.from_numpy(~loss_mask[:, 1:])] = -1
        return self._pinned(idx, targets)

    def describe(self):
        """One line on how the documents were packed."""
        capacity = self.sequences_per_epoch * self.length
        used = int((self.sizes + self.with_bos).sum())
        line = f'{count_of(len(self.stream.document_starts), self.stream.noun)} in ' \
               f'{count_of(self.sequences_per_epoch, "sequence")}, {1 - used / capacity:.1%} ' \
               f'padding, {count_of(int(self.num_targets.sum()), "token")} in the loss; ' \
               f'{count_of(int(self.with_bos.sum()), "split")} to fit block_size'
        if self.stream.loss_mask is not None:
            line += f'; dropped {count_of(self.dropped_tokens, "token")} without a reply'
        return line


def find_tokens(stream, token):
    """The indices of a token in a TokenStream."""
    indices = [first + np.flatnonzero(stream.read(first, READ_TOKENS) == token)
               for first in range(0, len(stream), READ_TOKENS)]
    return np.concatenate(indices)


def find_subsequence(subsequence, ids):
    """The indices in `ids` where the subsequence begins."""
    indices = np.flatnonzero(ids[:len(ids) - len(subsequence) + 1] == subsequence[0])
    for i, token in enumerate(subsequence):
        indices = indices[ids[indices + i] == token]
    return indices


def split_documents(stream, length):
    """Split documents that are longer than `length` tokens into pieces. Each piece after the first
    is preceded by a BOS token, which counts in its length. A piece that starts within a reply
    repeats one token, which predicts the next.

    → (first token of each piece, number of tokens, whether a BOS token precedes it)
    """
    starts = stream.document_starts
    sizes = np.append(starts[1:], len(stream)) - starts
    may_repeat = stream.may_repeat and length > 2
    pieces = []
    for i in np.flatnonzero(sizes > length):
        start, end = int(starts[i]), int(starts[i] + sizes[i])
        user_turns = stream.turn_starts(start, end - start)
        with_bos, max_size = False, length
        while end - start > max_size:
            turns = user_turns[(user_turns > start) & (user_turns <= start + max_size)]
            piece_end = int(turns[-1]) if len(turns) else start + max_size
            pieces.append((start, piece_end - start, with_bos))
            start = piece_end
            if may_repeat and stream.in_loss(start, 1)[0]:
                start -= 1
            with_bos = length > 1  # with block_size=1, there is no room for it
            max_size = length - 1 if with_bos else length
        pieces.append((start, end - start, with_bos))
    unsplit = np.stack([starts, sizes, np.zeros_like(starts)], 1)[sizes <= length]
    table = np.concatenate([unsplit, np.array(pieces, np.int64).reshape(-1, 3)])
    starts, sizes, with_bos = table[np.argsort(table[:, 0])].T
    return starts, sizes, with_bos.astype(bool)


def best_fit(sizes, capacity):
    """Best-fit decreasing: sizes of pieces, none above `capacity` → the sequence of each piece. The
    largest piece comes first, and each goes where it leaves the least space."""
    assignment = np.empty(len(sizes), np.int64)
    by_space = [[] for _ in range(capacity + 1)]  # sequences by the space left in them
    spaces = 0  # bitmask: bit n is set if a sequence has space n left
    num_sequences = 0
    for i in np.argsort(-sizes, kind='stable').tolist():
        size = int(sizes[i])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1  # the lowest bit that is set
            sequence = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, sequence = capacity, num_sequences
            num_sequences += 1
        assignment[i] = sequence
        space -= size
        if space:
            by_space[space].append(sequence)
            spaces |= 1 << space
    return assignment
