"""Files → text → documents: UTF-8, also as .gz and .zst, read a block at a time.

`position` is always the number of bytes of the file that have been read so far. The functions
that find documents yield (text, new_document, position). The text is None where a row's field is
null; a file longer than PIECE_CHARS comes in pieces, with new_document=True for the first.

A few bytes can stand for a text of any length. So time is linear in the text, and three limits
bound what is in memory at once and what a file may become.
"""

import codecs
import itertools
import math
import os
import re
import zlib
from typing import NamedTuple

from plaingpt.system.errors import UserError, needs
from plaingpt.system.file_signatures import SIGNATURE_BYTES, identify
from plaingpt.system.formatting import count_of, quoted, shown

PIECE_CHARS = 2**18
BLOCK_BYTES = 2**20
# No 16 KB of deflate (1:1,032) and no 512 bytes of Zstandard (4 bytes are 128 KB) exceed 17 MB.
COMPRESSED_BLOCK_BYTES = {'.gz': 2**14, '.zst': 2**9}

MAX_DOCUMENT_CHARS = 100_000_000  # of a line, a row or a paragraph: what is held in memory whole
# A file may expand to the larger of these; text expands 2 to 20-fold, repetitive logs 100-fold.
EXPANDED_BYTES, EXPANSION = 100_000_000, 200

UTF_16_OR_32 = (  # the first bytes → the name that iconv knows; UTF-32's mark begins with UTF-16's
    (rb'\xff\xfe\0\0|\0\0\xfe\xff', 'UTF-32'), (rb'\xff\xfe|\xfe\xff', 'UTF-16'),
    (rb'([\t-~]\0\0\0){2}', 'UTF-32LE'), (rb'(\0\0\0[\t-~]){2}', 'UTF-32BE'),
    (rb'([\t-~]\0){4}', 'UTF-16LE'), (rb'(\0[\t-~]){4}', 'UTF-16BE'))

NO_TEXT = re.compile('[\0-\x08\x0e-\x1f\x7f-\x9f\ufffd-\uffff]')  # controls, what is no character


class Piece(NamedTuple):
    text: str
    new_document: bool  # False where the document of the piece before continues
    position: int  # how far the input is read, in source.unit
    split: str = ''  # 'train' or 'val' where the corpus itself says so


# Halves of characters, which JSON can hold and UTF-8 cannot. Of files that are read with
# errors='surrogateescape', U+DC80 to U+DCFF are bytes that are no UTF-8.
LONE_SURROGATES = {'strict': re.compile('[\ud800-\udfff]'),
                   'surrogateescape': re.compile('[\ud800-\udc7f\udd00-\udfff]')}


def replace_surrogates(text, errors):
    """→ (text with U+FFFD for each half of a character, how many there were)"""
    errors = errors if errors in LONE_SURROGATES else 'strict'
    try:
        text.encode('utf-8', errors)  # faster than to look for them
        return text, 0
    except UnicodeEncodeError:
        return LONE_SURROGATES[errors].subn('\ufffd', text)


class TooLong(Exception):
    """Text between two places where it can be cut exceeds MAX_DOCUMENT_CHARS."""


def check_length(characters, where):
    """Raises TooLong; `where`: what is so long, after the name of the file."""
    if characters > MAX_DOCUMENT_CHARS:
        raise TooLong(f'{where} exceeds {MAX_DOCUMENT_CHARS:,} characters: cut it into shorter '
                      'documents')


def check_expansion(path, size, expanded):
    """Raises UserError where a file of `size` bytes holds `expanded` bytes of text."""
    if expanded > max(EXPANDED_BYTES, EXPANSION * size):
        raise UserError(f'{shown(path)}: {size:,} bytes that expand to {expanded:,} or more: if '
                        'that is wanted, unpack it and name the result with --input')


def read_bytes(path, digest=None, span=None):
    """Yield (bytes, position) of a file, .gz and .zst decompressed. Raises UserError.
    digest: of hashlib, updated with the file as it lies on the disk
    span: (start, end) in bytes: only the lines that begin there, of a file that is not compressed
    """
    suffix = path.suffix.lower()
    new = {'.gz': lambda: zlib.decompressobj(31), '.zst': zstd_decompressor}.get(suffix)
    position, expanded, stream = 0, 0, None
    try:
        with open(path, 'rb') as f:
            size = os.fstat(f.fileno()).st_size
            end = line_start(f, span[1], size) if span else math.inf
            position = f.seek(line_start(f, span[0], size) if span else 0)
            most = COMPRESSED_BLOCK_BYTES.get(suffix, BLOCK_BYTES)
            while block := f.read(min(most, end - position)):
                position += len(block)
                if digest:
                    digest.update(block)
                while new and block:  # a file may be several compressed streams in a row
                    if suffix == '.gz' and stream and stream.eof:
                        block = block.lstrip(b'\0')  # tapes and block devices pad with zeros
                        if not block:
                            break
                    stream = new() if stream is None or stream.eof else stream
                    data = stream.decompress(block)
                    block = stream.unused_data
                    expanded += len(data)
                    check_expansion(path, size, expanded)
                    yield data, position
                if not new:
                    yield block, position
    except OSError as e:
        raise UserError(f'{shown(path)}: {e.strerror}') from None
    except Exception as e:
        if isinstance(e, zlib.error) or type(e).__name__ == 'ZstdError':
            check_compression(path, suffix)
            advice = 'unpack it yourself' if 'too much memory' in str(e) else 'get it again'
            raise UserError(f'{shown(path)}: damaged after {count_of(position, "byte")} ({e}): '
                            f'{advice}') from None
        raise
    if stream is not None and not stream.eof:
        raise UserError(f'{shown(path)}: cut short after {count_of(position, "byte")}: get it '
                        'again')


def check_compression(path, suffix):
    """Raises UserError where the first bytes of a file are not those of .gz or .zst."""
    with open(path, 'rb') as f:
        start = f.read(SIGNATURE_BYTES)
    what, advice = identify(start)
    if advice == f'name it {suffix}':
        return
    if what:
        raise UserError(f'{shown(path)}: this is {what} and not {suffix}: {advice}')
    if not re.search(rb'[\0-\x08\x0e-\x1f]', start):
        raise UserError(f'{shown(path)}: this is plain text and not {suffix}: name it without '
                        f'{suffix}')


def line_start(f, position, size):
    """Where the first line begins that begins at `position` of a file or after it; `size` where
    none does."""
    if not 0 < position < size:
        return min(position, size)
    f.seek(position - 1)
    while block := f.read(BLOCK_BYTES):
        if end := block.find(b'\n') + 1:
            return f.tell() - len(block) + end
    return size


def zstd_decompressor():
    with needs('zstandard', 'a .zst file'):
        import zstandard
    return zstandard.ZstdDecompressor().decompressobj()


def read_text(path, errors, digest=None, span=None, of_rows=False):
    """Yield (text, position) of a UTF-8 file; `errors` as in bytes.decode: with 'surrogateescape'
    it may be any bytes, unless they are to be rows. Raises UserError."""
    decoder = codecs.getincrementaldecoder('utf-8')(errors)
    decoded = position = 0
    try:
        for data, position in from_the_start(read_bytes(path, digest, span)):
            if span and not decoded:
                decoded = position - len(data)  # where the first line begins
            if of_rows or errors != 'surrogateescape':
                check_text(path, data, decoded, of_rows)
            if not decoded and data.startswith(codecs.BOM_UTF8):  # no part of the text
                data, decoded = data[3:], 3
            yield decoder.decode(data), position
            decoded += len(data)
        yield decoder.decode(b'', final=True), position
    except UnicodeDecodeError as e:
        # The decoder holds back the bytes of a character that is not complete yet.
        byte = decoded - len(decoder.getstate()[0]) + e.start
        raise UserError(f'{shown(path)}: not UTF-8 at byte {byte}: convert it, for example with '
                        'iconv -f latin1 -t utf-8, or give prepare.py --errors=replace') from None


def from_the_start(blocks):
    """The blocks of read_bytes, of which the first is not shorter than a signature. A compressed
    stream may begin with a few bytes."""
    start = b''
    for data, position in blocks:
        start += data
        if len(start) >= SIGNATURE_BYTES:
            yield start, position
            yield from blocks
            return
    if start:
        yield start, position


def check_text(path, data, before, of_rows):
    """Raises UserError where `data`, a block of a file that `before` bytes precede, shows that the
    file is no UTF-8 text but binary."""
    what, advice = ('', '') if before else identify(data)
    if what in ('gzip', 'Zstandard') and path.suffix.lower() in COMPRESSED_BLOCK_BYTES:
        raise UserError(f'{shown(path)}: compressed twice: unpack it once')
    if what:
        raise UserError(f'{shown(path)}: this is {what} and no text: {advice}')
    if encoding := '' if before else find_encoding(data):
        raise UserError(f'{shown(path)}: {encoding.rstrip("LBE")} text: convert it: iconv -f '
                        f'{encoding} -t UTF-8 {shown(quoted(path))} > NEW.txt')
    if (place := data.find(b'\0')) >= 0:
        advice = '' if of_rows else ', or use --tokenizer=byte, which takes any bytes'
        raise UserError(f'{shown(path)}: no text, byte {before + place} is NUL: leave it out'
                        + advice)


def find_encoding(data):
    """'UTF-16', 'UTF-32LE' or the like of a file that begins with `data`, or ''."""
    for pattern, encoding in UTF_16_OR_32:
        if re.match(pattern, data):
            return encoding
    # In other scripts than Latin, few characters have a byte 0: spaces, line ends and digits.
    for at, encoding in enumerate(('UTF-16BE', 'UTF-16LE')):
        if data[at::2].count(0) > 3 + len(data) // 100 and 0 not in data[1 - at::2] and \
                not NO_TEXT.search(data[:len(data) // 2 * 2].decode(encoding, 'replace')[:-1]):
            return encoding
    return ''


def split_lines(blocks):
    """(text, position) of blocks → (line with its line end, position). Raises TooLong."""
    parts, characters, number, position = [], 0, 1, 0
    for text, position in blocks:
        *complete, rest = text.split('\n')
        if complete:
            complete[0] = ''.join([*parts, complete[0]])
            parts, characters, number = [], 0, number + len(complete)
        for line in complete:
            yield line + '\n', position
        parts.append(rest)
        characters += len(rest)
        check_length(characters, f', line {number}')
    if characters:
        yield ''.join(parts), position


# The beginning of a text up to the last white space that follows something else.
CUT = re.compile(r'(?s:.*\S)(?=[ \n])')


def place_to_cut(text, start, characters):
    """Where to cut a text at most so many characters after `start`, at white space if possible."""
    if len(text) - start <= characters:
        return len(text)
    cut = CUT.match(text, start, start + characters + 1)
    return cut.end() if cut else start + characters


def whole_files(blocks, piece_chars=None):
    """A file is one document. Long files are cut where GPT-2's pattern also cuts (at white space
    that follows something else), so that the tokens are those of the uncut file."""
    most = piece_chars or PIECE_CHARS
    rest, new_document, position = '', True, 0
    opening, characters = [], 0  # white space, which may be all that there is
    for text, position in blocks:
        if opening is not None and not text.strip():
            opening.append(text)
            characters += len(text)
            check_length(characters, ': the white space at its beginning')
            continue
        if opening is not None:
            text, opening = ''.join(opening) + text, None
        rest += text
        start = 0
        while len(rest) - start > most:
            end = place_to_cut(rest, start, most)
            yield rest[start:end], new_document, position
            start, new_document = end, False
        rest = rest[start:]
    if rest.strip() or (rest and not new_document):
        yield rest, new_document, position


def each_line(lines):
    """Each line that is not blank is a document."""
    for line, position in lines:
        if line.strip():
            yield line.rstrip('\r\n'), True, position


def paragraphs(lines):
    """The lines between two blank lines are a document."""
    for blank, group in itertools.groupby(lines, lambda line: not line[0].strip()):
        if not blank:
            found, characters = [], 0
            for line in group:
                found.append(line)
                characters += len(line[0])
                check_length(characters, ': a paragraph')
            texts, positions = zip(*found, strict=True)
            yield ''.join(texts).rstrip('\r\n'), True, positions[-1]


TITLE = re.compile(r' = (?!= )[^\n]+(?<! =) = \r?\n?')  # ' = Title = ', not ' = = Section = = '


def articles(lines):
    """WikiText's articles: each line ' = Title = ' begins a document."""
    group, characters, position = [], 0, 0
    for line, position in lines:
        if TITLE.fullmatch(line) and any(map(str.strip, group)):
            yield ''.join(group), True, position
            group, characters = [], 0
        group.append(line)
        characters += len(line)
        check_length(characters, ': an article')
    if any(map(str.strip, group)):
        yield ''.join(group), True, position


# What a document can be. whole_files takes blocks of text, the others take lines.
DOCUMENT_FORMS = {'file': whole_files, 'line': each_line, 'paragraph': paragraphs,
                  'title': articles}
