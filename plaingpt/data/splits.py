"""The pieces of a source → training and validation text.

Validation text is whole documents where there are two or more, drawn by a hash of their text. Where
a few files form one text, these are whole files. The end of one long text is held out.
"""

import math
from contextlib import closing

from plaingpt.data.documents import hash_of

VAL_CHARS = 4_000_000  # about a million tokens: enough for a precise loss on any corpus
MAX_SHARE = 0.5  # of the text of a few documents that may be drawn for validation


def assign_splits(source, options, document_end=''):
    """Yield (split, text, new_document) for the pieces of a source. document_end: the text that
    ends each document, for tokenizers without an end-of-text token."""
    if source.has_val_split:
        pieces = ((piece.split, piece.text, piece.new_document) for piece in source.pieces())
    elif source.survey.is_complete and len(source.survey.documents) == 1:
        pieces = split_tail(source, options)
    else:
        pieces = split_by_hash(source, options)
    if source.is_continuous:
        return as_one_document(pieces)
    return end_documents(pieces, document_end) if document_end else pieces


def split_by_hash(source, options):
    """Draw documents for validation, until they have max_val_chars characters."""
    few, threshold = None, math.ceil(options.val_fraction * 2**64)
    if source.survey.is_complete:
        few = draw_few(source.survey.documents, options.val_fraction)
    elif min(source.survey.documents) >= threshold:
        threshold = raise_threshold(source, threshold)
    split, val_chars = 'train', 0
    for text, new_document, _ in source.pieces():
        if new_document:
            # A document is drawn by its own text: adding or removing others leaves its split.
            text_hash = hash_of(text)
            is_drawn = text_hash < threshold if few is None else text_hash in few
            split = 'val' if is_drawn and val_chars < options.max_val_chars else 'train'
        if split == 'val':
            val_chars += len(text)
        yield split, text, new_document


def draw_few(sizes, fraction):
    """{hash of a document: characters} of fewer than a hundred → the hashes of those for
    validation: in the order of the hashes, as many as reach `fraction` of the text, without those
    that would bring it above half."""
    chars = sum(sizes.values())
    limit = max(MAX_SHARE, fraction) * chars
    drawn, val_chars = set(), 0
    for text_hash, size in sorted(sizes.items()):
        if val_chars < fraction * chars and val_chars + size <= limit:
            drawn.add(text_hash)
            val_chars += size
    return drawn


def raise_threshold(source, threshold):
    """The threshold at which at least one document is drawn."""
    smallest = 2**64
    with closing(source.pieces()) as pieces:
        for piece in pieces:
            if piece.new_document:
                smallest = min(smallest, hash_of(piece.text))
                if smallest < threshold:
                    break
    return max(threshold, smallest + 1)


def split_tail(source, options):
    """Hold out the end of one long text, from the beginning of a line on."""
    [chars] = source.survey.documents.values()
    fraction = min(options.val_fraction, options.max_val_chars / chars)
    val_start, position, split = int(chars * (1 - fraction)), 0, 'train'
    for text, new_document, _ in source.pieces():
        cut = val_start - position
        if split == 'train' and cut < len(text):
            if options.cut_at_line:
                cut = find_line(text, cut)
            if cut:
                yield 'train', text[:cut], new_document
            split, text, new_document = 'val', text[cut:], True
        yield split, text, new_document
        position += len(text)


def find_line(text, index):
    """The beginning of the line at `index` of a text or, if it is the first line, of the next one;
    `index` if there is only one line."""
    return text.rfind('\n', 0, index) + 1 or text.find('\n', index, len(text) - 1) + 1 or index


def as_one_document(pieces):
    """Only the first piece of each split begins a document."""
    started = set()
    for split, text, _ in pieces:
        yield split, text, split not in started
        started.add(split)


def end_documents(pieces, end):
    """End each document with `end`."""
    previous = None  # its document may continue
    for piece in pieces:
        if previous:
            yield with_end(previous, end) if piece[2] else previous
        previous = piece
    if previous:
        yield with_end(previous, end)


def with_end(piece, end):
    split, text, new_document = piece
    return split, text if text.endswith(end) else text + end, new_document
