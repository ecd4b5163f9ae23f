"""Which split a document belongs to."""

import hashlib


def split_by_hash(pieces, val_fraction):
    """Yield (split, text, new_document, position). A hash of a document's first piece decides its
    split, so a document keeps its split when others are added or removed."""
    for text, new_document, position, own_split in pieces:
        if new_document:
            digest = hashlib.blake2b(text.encode('utf-8', 'replace'), digest_size=8).digest()
            held_out = int.from_bytes(digest, 'big') < val_fraction * 2**64
            split = own_split or ('val' if held_out else 'train')
        yield split, text, new_document, position


def split_by_place(pieces, train_characters):
    """Yield (split, text, new_document, position) of one text, whose end is held out."""
    seen = 0
    for text, _, position, _ in pieces:
        cut = min(max(train_characters - seen, 0), len(text))
        if cut:
            yield 'train', text[:cut], seen == 0, position
        if cut < len(text):
            yield 'val', text[cut:], seen <= train_characters, position
        seen += len(text)
