"""Text of files → documents: a file is one, or several that end-of-text tokens separate."""

import gzip
import io
import re
import zlib
from contextlib import contextmanager, suppress

from plaingpt.data.left_out import Unusable
from plaingpt.system.formatting import count_of, one_line, shown

BLOCK_CHARS = 2**20  # of a file to read at a time
PIECE_CHARS = 2**18  # a longer document comes in pieces

END_OF_TEXT = '<|endoftext|>', '<|end_of_text|>', '</s>'  # as tokenizers spell it
WINDOW = 80  # characters of a line that are looked at, on either side of a token
MARGIN = 2 * WINDOW  # what comes after a token must be known to judge it
# Text before or after a token in the same line that mentions the token: white space, quotes and
# brackets. Between two documents it touches the end of one and the beginning of the other.
MENTION_BEFORE = re.compile(r'''(\s|[(\[{<=,]|(^|[\s(\[{=,:+])["'`])$''')
MENTION_AFTER = re.compile(r'''\s|[)\]}>,;:=]|["'`]($|[\s)\]},;:.+])''')
LINE_BREAKS = re.compile(r'[ \t\r]*\n[\r\n]*')


@contextmanager
def open_text(file, encoding='utf-8', errors='strict'):
    r"""A context: an open file of bytes → its text, unpacked if it is a .gz. Only \n ends a line,
    and line endings are not changed. Raises Unusable, also where reading fails later."""
    with_mark = 'utf-8-sig' if encoding == 'utf-8' else encoding  # of the byte order
    try:
        with gzip.open(file) if file.name.lower().endswith('.gz') else file as data:
            yield io.TextIOWrapper(data, with_mark, errors, newline='\n')
    except UnicodeError as e:
        raise Unusable(shown(file.name), f'not {encoding.upper()}',
                       f' ({e}): save it as UTF-8') from None
    except (OSError, EOFError, zlib.error) as e:
        raise Unusable(shown(file.name), 'cannot be read', f' ({one_line(e)})') from None


def holds_utf8(path):
    """Whether a file begins with text that is UTF-8 and more than ASCII."""
    with suppress(OSError), open(path, 'rb') as file:
        text = file.read(BLOCK_CHARS).decode('utf-8', 'surrogateescape')
        return re.search('[^\0-\x7f\udc80-\udcff]', text) is not None
    return False


def read_text(path):
    """The whole text of a UTF-8 file, as prepare.py reads it. Raises UserError, OSError."""
    with open(path, 'rb') as file, open_text(file) as text:
        return text.read()


# The beginning of a text up to the last white space that follows something else.
CUT = re.compile(r'(?s:.*\S)(?=[ \n])')


def find_boundary(text, start, characters):
    """Where to cut a text, at most `characters` after `start`, at white space if possible."""
    if len(text) - start <= characters:
        return len(text)
    cut = CUT.match(text, start, start + characters + 1)
    return cut.end() if cut else start + characters


def cut_into_pieces(text, piece_chars, margin=0):
    """A text → (pieces of it, what remains: at most piece_chars + margin characters). Each piece
    ends at white space that follows something else, where GPT-2's pattern ends a word, too. So its
    tokens are those of the uncut text."""
    pieces, start = [], 0
    while len(text) - start > piece_chars + margin:
        end = find_boundary(text, start, piece_chars)
        pieces.append(text[start:end])
        start = end
    return pieces, text[start:]


def documents_of(text, separators, piece_chars=PIECE_CHARS):
    """Yield (text, whether it begins a document) of an open text: one document, or several that
    end-of-text tokens separate. A blank one is none, and a long one comes in pieces."""
    remainder, is_new = '', True
    while True:
        block = text.read(BLOCK_CHARS)
        *ended, remainder = separators.split(remainder + block, is_last=not block)
        for document in ended if block else [*ended, remainder]:
            if not (is_new and document.isspace()):
                pieces, last = cut_into_pieces(document, piece_chars)
                for piece in filter(None, [*pieces, last]):
                    yield piece, is_new
                    is_new = False
            is_new = True
        if not block:
            return
        if is_new and remainder.isspace():  # perhaps that is all there is
            continue
        pieces, remainder = cut_into_pieces(remainder, piece_chars, MARGIN)
        for piece in pieces:
            yield piece, is_new
            is_new = False


def lines_of(text, separators):
    """The same where each line is a document."""
    for line in text:
        if line.strip() and not separators.is_alone(line):
            yield line.rstrip('\r\n'), True


# -----------------------------------------------------------------------------
# end-of-text tokens in text


class Separators:
    """Splits text at end-of-text tokens that are spelled out in it, as between the stories of
    TinyStories: one that is alone in its line, or between two documents. In a sentence or in quotes
    it is text. count: how many separated documents since restart()"""

    def __init__(self, tokens=END_OF_TEXT[:1]):
        self.tokens = tokens
        self.pattern = re.compile('|'.join(map(re.escape, tokens)))
        self.restart()

    def restart(self):
        self.count, self.mentions = 0, False

    def split(self, text, is_last=True):
        """A text → the documents in it, one if nothing separates any. is_last: False if the last of
        them continues, so that a token at its end cannot be judged yet"""
        if not any(token in text for token in self.tokens):
            return [text]
        documents, begin = [], 0
        for token in self.pattern.finditer(text):
            start, end = token.span()
            if not is_last and end + WINDOW > len(text):
                break
            before = text[max(begin, start - WINDOW):start].rpartition('\n')[2]
            after = text[end:end + WINDOW].partition('\n')[0]
            if not before.strip() and not after.strip():  # alone in its line
                start -= len(before)
            elif is_mention(before, after):
                self.mentions = True
                continue
            self.count += 1
            documents.append(text[begin:start])
            line_breaks = LINE_BREAKS.match(text, end)
            begin = line_breaks.end() if line_breaks else end
        return [*documents, text[begin:]]

    def is_alone(self, line):
        """Whether a line is nothing but a token, which is counted."""
        is_alone = line.strip() in self.tokens
        self.count += is_alone
        return is_alone

    def describe(self):
        """A line that says what was done with the tokens, if there are any."""
        if self.count:
            yield f'{" or ".join(self.tokens)} separated documents at ' \
                f'{count_of(self.count, "place")}'
        if self.mentions:
            yield f'{" or ".join(self.tokens)} within a line of text was kept as text: alone in ' \
                'its line it separates documents'


def is_mention(before, after):
    """Whether text around a token in its line, at most WINDOW characters of each, mentions it."""
    # An odd number of quotes before it opens one around it. Of a long line they cannot be counted.
    quotes = '`"' if len(before) < WINDOW else '`'
    return any(before.count(quote) % 2 for quote in quotes) \
        or (before.strip() and MENTION_BEFORE.search(before) is not None) \
        or (after.strip() and MENTION_AFTER.match(after) is not None)


def separators_for(tokenizer):
    """The Separators of text for a tokenizer, None where that is learned from the text."""
    tokens = set(END_OF_TEXT[:1])
    if tokenizer is not None and tokenizer.end_of_text is not None:
        names = getattr(tokenizer, 'control_tokens', {})  # a pretrained model's
        tokens |= {name for name, i in names.items()
                   if name in END_OF_TEXT or i == tokenizer.end_of_text}
    return Separators(sorted(tokens))
