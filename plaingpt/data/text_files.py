"""Text files → documents: one per file, or several separated by end-of-text tokens."""

import gzip
import io
import re
import zlib
from contextlib import contextmanager

from plaingpt.data.unusable import Unusable
from plaingpt.system.formatting import count_of, one_line, shown

BLOCK_CHARS = 2**20  # per read
PIECE_CHARS = 2**18  # longer documents are yielded in pieces

END_OF_TEXT = '<|endoftext|>', '<|end_of_text|>', '</s>'  # common spellings
WINDOW = 80  # characters of the line to examine on either side of a token
MARGIN = 2 * WINDOW  # unread text may decide whether a token near the end is a separator
# White space, quotes or brackets around a token suggest that the line mentions it. A separator
# touches the end of one document and the beginning of the next.
MENTION_BEFORE = re.compile(r'''(\s|[(\[{<=,]|(^|[\s(\[{=,:+])["'`])$''')
MENTION_AFTER = re.compile(r'''\s|[)\]}>,;:=]|["'`]($|[\s)\]},;:.+])''')
LINE_BREAKS = re.compile(r'[ \t\r]*\n[\r\n]*')


ENCODING_ADVICE = 'save it as UTF-8, or if all files have another encoding, name it, such as ' \
    '--encoding=latin-1, cp1252 or utf-16'


@contextmanager
def open_text(file, encoding='utf-8', errors='strict', advice=ENCODING_ADVICE):
    r"""Context manager: an open binary file → its text, decompressed if it is a .gz. Only \n ends
    a line, and line endings are not changed. Raises Unusable, also where reading fails later.
    advice: what to do about a file in another encoding"""
    codec = 'utf-8-sig' if encoding == 'utf-8' else encoding  # skips a byte order mark
    try:
        data = gzip.open(file) if file.name.lower().endswith('.gz') else file
        with data:
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
    separated by end-of-text tokens. Blank documents are skipped, long ones yielded in pieces."""
    remainder, is_new = '', True
    while True:
        block = text.read(BLOCK_CHARS)
        *complete, remainder = separators.split(remainder + block, is_last=not block)
        if not block:
            complete.append(remainder)
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
            continue
        pieces, remainder = split_into_pieces(remainder, piece_chars, MARGIN)
        for piece in pieces:
            yield piece, is_new
            is_new = False


def read_lines(text, separators):
    """The same with one document per line."""
    for line in text:
        if line.strip() and not separators.matches_line(line):
            yield line.rstrip('\r\n'), True


# -----------------------------------------------------------------------------
# end-of-text tokens in text


class Separators:
    """Splits text at end-of-text tokens that are spelled out, as between the stories of
    TinyStories: alone on a line, or between two documents. Within a sentence or in quotes they stay
    text. count: separators since restart()"""

    def __init__(self, tokens=END_OF_TEXT[:1]):
        self.tokens = tokens
        self.pattern = re.compile('|'.join(map(re.escape, tokens)))
        self.restart()

    def restart(self):
        self.count, self.mentions = 0, False

    def split(self, text, is_last=True):
        """A text → its documents, at least one. is_last: False if more text follows, so that a
        token near the end cannot be classified yet"""
        if not any(token in text for token in self.tokens):
            return [text]
        documents, document_start = [], 0
        for token in self.pattern.finditer(text):
            start, end = token.span()
            if not is_last and end + WINDOW > len(text):
                break
            before = text[max(document_start, start - WINDOW):start].rpartition('\n')[2]
            after = text[end:end + WINDOW].partition('\n')[0]
            if not before.strip() and not after.strip():  # alone on its line
                start -= len(before)
            elif is_mention(before, after):
                self.mentions = True
                continue
            self.count += 1
            documents.append(text[document_start:start])
            line_breaks = LINE_BREAKS.match(text, end)
            document_start = line_breaks.end() if line_breaks else end
        return [*documents, text[document_start:]]

    def matches_line(self, line):
        """Whether a line consists of a token only, which is counted."""
        if line.strip() not in self.tokens:
            return False
        self.count += 1
        return True

    def describe(self):
        """Lines on what was done with the tokens, if there are any."""
        tokens = ' or '.join(self.tokens)
        if self.count:
            yield f'split documents at {count_of(self.count, "occurrence")} of {tokens}'
        if self.mentions:
            yield f'kept {tokens} within a line as text; alone on a line it separates documents'


def is_mention(before, after):
    """Whether the text on either side of a token in its line, at most WINDOW characters each,
    mentions the token."""
    # After an odd number of quotes, the token is quoted. In a long line only backticks are counted.
    in_backticks = before.count('`') % 2 == 1
    in_quotes = len(before) < WINDOW and before.count('"') % 2 == 1
    if in_backticks or in_quotes:
        return True
    if before.strip() and MENTION_BEFORE.search(before):
        return True
    return bool(after.strip() and MENTION_AFTER.match(after))


def separators_for(tokenizer):
    """The Separators for a tokenizer, or for one to be trained (None)."""
    tokens = set(END_OF_TEXT[:1])
    if tokenizer is not None and tokenizer.end_of_text is not None:
        names = getattr(tokenizer, 'control_tokens', {})  # a pretrained model's
        tokens |= {name for name, i in names.items()
                   if name in END_OF_TEXT or i == tokenizer.end_of_text}
    return Separators(sorted(tokens))
