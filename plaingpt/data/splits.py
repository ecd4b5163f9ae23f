"""The pieces of a source → training and validation text.

Validation text is whole documents where there are two or more, selected by a hash of their text.
Where a few files form one text, these are whole files. The end of one long text is held out.
"""

import math
from contextlib import closing

from plaingpt.data.documents import Piece, hash_of

VAL_CHARS = 4_000_000  # about a million tokens: enough for a precise loss on any corpus
MAX_SHARE = 0.5  # of the text of few documents that may be held out


def assign_splits(source, options, document_end=''):
    """Yield the pieces of a source with their splits. document_end: the text that ends each
    document, for tokenizers without an end-of-text token."""
    if source.has_val_split:
        pieces = source.pieces()
    elif source.reader.is_divisible and source.survey.is_complete \
            and len(source.survey.documents) == 1:
        pieces = split_tail(source, options)
    else:
        pieces = split_by_hash(source, options)
    if source.is_continuous:
        return as_one_document(pieces)
    return append_document_ends(pieces, document_end) if document_end else pieces


def split_by_hash(source, options):
    """Hold out the documents that select_documents() selects, up to max_val_chars characters."""
    is_selected = select_documents(source, options.val_fraction)
    held_out, split, val_chars = set(), 'train', 0  # held_out: hashes, as copies may come later
    for text, new_document, _ in source.pieces():
        if new_document:
            text_hash, split = hash_of(text), 'train'
            if is_selected(text_hash) and val_chars < options.max_val_chars:
                held_out.add(text_hash)
            if text_hash in held_out:
                split = 'val'
        if split == 'val':
            val_chars += len(text)
        yield Piece(text, new_document, split)


def select_documents(source, fraction):
    """→ a function: the hash of a document → whether it is for validation. The hashes are uniform,
    so those below a threshold are `fraction` of the documents. A document is selected by its own
    text: adding or removing others leaves its split.

    Of few documents, a threshold may select none, less than half of `fraction`, or more than half
    of the text. Then they are selected in the order of their hashes until they reach `fraction`,
    skipping those that would exceed half of the text."""
    threshold = math.ceil(fraction * 2**64)
    sizes, is_complete = source.survey
    if not is_complete:
        if min(sizes) >= threshold:
            threshold = max(threshold, smallest_hash(source, threshold) + 1)
        return threshold.__gt__
    total, limit = sum(sizes.values()), max(MAX_SHARE, fraction) * sum(sizes.values())
    selected = {text_hash for text_hash in sizes if text_hash < threshold}
    if not fraction / 2 * total <= sum(map(sizes.get, selected)) <= limit:
        selected, chars = set(), 0
        for text_hash, size in sorted(sizes.items()):
            if chars < fraction * total and chars + size <= limit:
                selected.add(text_hash)
                chars += size
    return selected.__contains__


def smallest_hash(source, threshold):
    """The smallest hash of a document, or the first that is below the threshold."""
    smallest = 2**64
    with closing(source.pieces()) as pieces:
        for piece in pieces:
            if piece.new_document:
                smallest = min(smallest, hash_of(piece.text))
                if smallest < threshold:
                    break
    return smallest


def split_tail(source, options):
    """Hold out the end of one long text, from the beginning of a line on, or the last of documents
    that are all the same."""
    [chars] = source.survey.documents.values()
    fraction = min(options.val_fraction, options.max_val_chars / chars)
    val_start, position, split = int(chars * (1 - fraction)), 0, 'train'
    for text, new_document, _ in source.pieces():
        cut = val_start - position
        if split == 'train' and cut < len(text):
            if new_document and position:
                cut = 0
            elif options.cut_at_line:
                cut = find_line(text, cut)
            if cut:
                yield Piece(text[:cut], new_document, 'train')
            split, text, new_document = 'val', text[cut:], True
        yield Piece(text, new_document, split)
        position += len(text)


def find_line(text, index):
    """The beginning of the line at `index` of a text or, if it is the first line, of the next one.
    In a single line, of the word at `index`; `index` if there is a single word."""
    return text.rfind('\n', 0, index) + 1 or text.find('\n', index, len(text) - 1) + 1 \
        or text.rfind(' ', 0, index) + 1 or index


def as_one_document(pieces):
    """Only the first piece of each split begins a document."""
    started = set()
    for text, _, split in pieces:
        yield Piece(text, split not in started, split)
        started.add(split)


def append_document_ends(pieces, end):
    """End each document with `end`."""
    previous = None  # its document may continue
    for piece in pieces:
        if previous:
            yield with_end(previous, end) if piece.new_document else previous
        previous = piece
    if previous:
        yield with_end(previous, end)


def with_end(piece, end):
    return piece if piece.text.endswith(end) else piece._replace(text=piece.text + end)
