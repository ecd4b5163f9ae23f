"""What a .bin file is that no meta.json describes: bare token ids, llm.c's shard, or no tokens."""

import codecs

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.file_signatures import identify

# https://github.com/karpathy/llm.c, dev/data/data_common.py: 256 int32, which begin with magic,
# version and number of tokens, then the tokens.
HEADER_BYTES = 1024
GPT2_MAGIC = 20240520
OTHER_MAGICS = {20240801: 'tokens of Llama 3, in 32 bits',
                20240522: 'questions of a benchmark'}
PREPARE = 'prepare the text with python prepare.py text --input=FILE'


def header_size(path, head, size):
    """The bytes before the tokens: HEADER_BYTES of llm.c's shard of GPT-2 tokens, 0 of other files.
    Raises UserError where llm.c's header is not of such a shard or not of this file.

    head: the first HEADER_BYTES of the file, or all of it; size: of the file, in bytes
    """
    magic, version, count = np.frombuffer(head[:12], '<i4') if len(head) >= 12 else (0, 0, 0)
    if magic in OTHER_MAGICS:
        raise UserError(f"{path}: llm.c's header {magic}, of {OTHER_MAGICS[magic]}; its files of "
                        f"GPT-2's tokens are read: make one of those, or {PREPARE}")
    if magic != GPT2_MAGIC:
        return 0
    if version != 1:
        raise UserError(f'{path}: llm.c shard of version {version}, only 1 is known: {PREPARE}')
    if size != HEADER_BYTES + 2 * int(count):
        raise UserError(f'{path}: {max(0, size - HEADER_BYTES) / 2:,.12g} tokens where {count:,} '
                        "are in llm.c's header: it is damaged or not all there; copy it again")
    return HEADER_BYTES


def check_format(path, head):
    """Raises UserError where a file with the first bytes `head` is of a known format, or a text."""
    if what := known_format(head):
        refuse(path, f'is {what}')


def check_ids_of_16_bits(path, head, size, offset, ids, vocab_size):
    """Raises UserError where what is taken for ids of 16 bits, from `offset` on, is something else.

    head: its first HEADER_BYTES; size: in bytes; ids: some of it, in pieces of an even number
    """
    if len(ids) >= 64 and not ids.any():
        refuse(path, 'has zeros where its ids would be')
    if not offset and (what := unknown_header(head, size, ids)):
        refuse(path, what)
    if are_wide(ids, vocab_size):
        raise UserError(f'{path} looks like ids of 32 or 64 bits; with no meta.json it would be '
                        'read as ids of 16: write them so (numpy: ids.astype("<u2").tofile(PATH)), '
                        f'or {PREPARE}')


def refuse(path, what):
    raise UserError(f'{path} {what}; with no meta.json it would be read as ids of 16 bits: copy it '
                    f'again, or {PREPARE}')


def are_wide(ids, vocab_size):
    """True for halves of ids of 32 or 64 bits."""
    low, high = ids[:len(ids) // 2 * 2:2], ids[1::2]
    if len(high) < 16:
        return False
    if high.any():
        return high.max() < 16 and low.max() >= vocab_size
    # Characters of which every other one is id 0: lines of one character each, which are no id 0.
    return low.max() >= 256 or (len(high) >= 64 and not low.all() and low.any())


def known_format(head):
    """What the file is by its first bytes, or ''."""
    what, _ = identify(head)
    if what:
        return what
    try:
        text = codecs.utf_8_decode(head, 'strict', False)[0]
    except UnicodeDecodeError:
        return ''
    # Ids of common tokens have bytes in them that no text has.
    is_text = len(text) >= 64 and all(c >= ' ' or c in '\t\n\r\f' for c in text)
    return 'a text' if is_text else ''


def unknown_header(head, size, ids):
    """What the file begins with, where that is like llm.c's header and is not that, or ''."""
    if size <= HEADER_BYTES:
        return ''
    words, rest = np.frombuffer(head, '<i4'), size - HEADER_BYTES
    magic, version, count = words[:3].tolist()
    counts = 0 <= version < 100 and count > 0 and rest in (2 * count, 4 * count)
    behind = ids[HEADER_BYTES // 2:]
    # Few words and zeros, of which some bytes may be lost. Ids of characters can be zeros at first,
    # and are small.
    is_padded = np.count_nonzero(ids[:32]) <= 8 and behind.max(initial=0) >= 256 \
        and np.count_nonzero(behind) > 0.95 * len(behind)
    return (f'begins with a header that is damaged or not known (magic {magic}, version {version}, '
            f'{count} tokens)') if counts or is_padded else ''
