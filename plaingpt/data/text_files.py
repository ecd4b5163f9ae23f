"""Text files → documents: files, lines or paragraphs, also separated by end-of-text tokens."""

import gzip
import io
import re
import zlib
from contextlib import contextmanager

from plaingpt.data.unusable import Unusable
from plaingpt.system.formatting import one_line, shown

BLOCK_CHARS = 2**20  # per read
PIECE_CHARS = 2**18  # longer documents are yielded in pieces
MARGIN = 160  # unread text may complete a separator at the end of what was read
END_OF_TEXT = '<|endoftext|>', '<|end_of_text|>', '</s>'  # common spellings
START_OF_TEXT = '<|startoftext|>'  # GPT-2 fine-tuning data has it in front of documents
UTF16_MARKS = b'\xff\xfe', b'\xfe\xff'  # byte order marks
BLANK_LINE = r'\n[^\S\n]*\n'
WHITE_SPACE = re.compile(r'\s*')
BLANK_LINES = re.compile(r'(?:[^\S\n]*\n)*')
ENCODING_ADVICE = 'save it as UTF-8, or if all files have another encoding, name it, such as ' \
    '--encoding=latin-1, cp1252 or utf-16'


@contextmanager
def open_text(file, encoding='utf-8', errors='strict', advice=ENCODING_ADVICE):
    r"""Context manager: an open binary file → its text, decompressed if it is a .gz. A byte order
    mark says that it is UTF-8 or UTF-16. Only \n ends a line, and line endings are not changed.
    Raises Unusable, also where reading fails later.
    advice: what to do about a file in another encoding"""
    try:
        data = gzip.open(file) if file.name.lower().endswith('.gz') else file
        with data:
            if encoding == 'utf-8' and data.peek(2)[:2] in UTF16_MARKS:
                encoding, errors = 'utf-16', 'strict'
            codec = 'utf-8-sig' if encoding == 'utf-8' else encoding  # skips a byte order mark
            yield io.TextIOWrapper(data, codec, errors, newline='\n')
    except UnicodeError as e:
        raise Unusable(shown(file.name), f'not {encoding.upper()}',
                       f' ({e}): {advice}') from None
    except (OSError, EOFError, zlib.error) as e:
        raise Unusable(shown(file.name), 'cannot be read', f' ({one_line(e)})') from None


def read_text(path):
    """The whole text of a UTF-8 file, as prepare.py reads it. Raises UserError, OSError."""
    with open(path, 'rb') as file, open_text(file, advice='save it as UTF-8') as text:
        return text.read()


# Up to the last word that is followed by a space or line break. Some tokenizers join punctuation
# with the line breaks after it.
WHOLE_WORDS = re.compile(r'(?s:.*)(?:\S(?= )|[^\W_](?=\n))')


def find_boundary(text, start, max_chars):
    """The end of a piece of text from `start`, at most max_chars long, between words if possible.
    """
    if len(text) - start <= max_chars:
        return len(text)
    match = WHOLE_WORDS.match(text, start, start + max_chars + 1)
    return match.end() if match else start + max_chars


def split_into_pieces(text, piece_chars, margin=0):
    """A text → (pieces, remainder of at most piece_chars + margin characters). Each piece ends
    where the pattern of a BPE ends a match too, so the tokens are the same as without splitting."""
    pieces, start = [], 0
    while len(text) - start > piece_chars + margin:
        end = find_boundary(text, start, piece_chars)
        pieces.append(text[start:end])
        start = end
    return pieces, text[start:]


def read_documents(text, separators, piece_chars=PIECE_CHARS):
    """Yield (text, whether it begins a document) from an open text file: one document, or several
    where there are separators. Blank documents are skipped, long ones yielded in pieces."""
    remainder, is_new, separator = '', True, ''
    while True:
        block = text.read(BLOCK_CHARS)
        documents, separator = separators.split(remainder + block, separator if is_new else '')
        *complete, remainder = documents
        if not block:
            complete.append(remainder.rstrip() if separators.paragraphs else remainder)
        for document in complete:
            if not (is_new and document.isspace()):
                pieces, last = split_into_pieces(document, piece_chars)
                for piece in filter(None, [*pieces, last]):
                    yield piece, is_new
                    is_new = False
            is_new = True
        if not block:
            return
        if is_new and remainder.isspace():  # the document may be blank
            remainder = remainder[-piece_chars:]
            continue
        pieces, remainder = split_into_pieces(remainder, piece_chars, MARGIN)
        for piece in pieces:
            yield piece, is_new
            is_new = False


def read_lines(text, separators):
    """The same with one document per line."""
    for line in text:
        for document in separators.split(line.rstrip('\r\n'))[0]:
            if document.strip():
                yield document, True


# -----------------------------------------------------------------------------
# separators of documents


class Separators:
    """Splits text at end-of-text tokens that are spelled out, and with `paragraphs` at blank lines.
    White space around a token, and blank lines, belong to no document.

    counts: {token: number since restart()}
    """

    def __init__(self, tokens=(*END_OF_TEXT[:1], START_OF_TEXT), paragraphs=False):
        self.tokens, self.paragraphs = tokens, paragraphs
        alternatives = [*map(re.escape, tokens), *([BLANK_LINE] if paragraphs else [])]
        self.pattern = re.compile('|'.join(alternatives) or '(?!)')  # '(?!)' never matches
        self.restart()

    def restart(self):
        self.counts = dict.fromkeys(self.tokens, 0)

    @property
    def count(self):
        return sum(self.counts.values())

    def split(self, text, separator=''):
        """A text → (its documents, of which the last may continue; the separator before the last).
        separator: the one in front of the text, '' if none"""
        documents, start = [], self.skip(separator, text, 0)
        if self.paragraphs or any(token in text for token in self.tokens):
            for match in self.pattern.finditer(text):
                if match.start() < start:  # a blank line after a token
                    continue
                documents.append(text[start:match.start()].rstrip())
                separator = match[0]
                if separator in self.counts:
                    self.counts[separator] += 1
                start = self.skip(separator, text, match.end())
        return [*documents, text[start:]], separator

    def skip(self, separator, text, start):
        """The index in `text` where a document begins after a separator."""
        if not separator:
            return start
        white_space = WHITE_SPACE if separator in self.counts else BLANK_LINES
        return white_space.match(text, start).end()

    def describe(self):
        """A line on the tokens in the text, if there are any."""
        counts = [f'{n:,} {token}' for token, n in self.counts.items() if n]
        if counts:
            yield f'split documents at {" and ".join(counts)} (--separators=False keeps them as ' \
                'text)'


def separators_for(tokenizer, paragraphs=False):
    """The Separators for a tokenizer, or for one to be trained (None)."""
    tokens = {END_OF_TEXT[0], START_OF_TEXT}
    if tokenizer is not None and tokenizer.end_of_text is not None:
        names = getattr(tokenizer, 'control_tokens', {})  # a pretrained model's
        tokens |= {name for name, i in names.items()
                   if name in END_OF_TEXT or i == tokenizer.end_of_text}
    return Separators(tuple(sorted(tokens)), paragraphs)
