"""End-of-text tokens that are spelled out in text, as between the stories of TinyStories: they
separate documents."""

import re

END_OF_TEXT = '<|endoftext|>', '<|end_of_text|>', '</s>'  # as tokenizers spell it
WINDOW = 80  # characters of a line that are looked at, on either side of a token
MARGIN = 2 * WINDOW  # what comes after a token must be known to judge it
# Text before or after a token in the same line that mentions the token: white space, quotes and
# brackets. Between two documents it touches the end of one and the beginning of the other.
MENTION_BEFORE = re.compile(r'''(\s|[(\[{<=,]|(^|[\s(\[{=,:+])["'`])$''')
MENTION_AFTER = re.compile(r'''\s|[)\]}>,;:=]|["'`]($|[\s)\]},;:.+])''')
LINE_BREAKS = re.compile(r'[ \t\r]*\n[\r\n]*')


class Separators:
    """Splits text at these tokens where one is alone in its line, or between two documents. In a
    sentence or in quotes it is text. count: how many separated documents since restart()"""

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
            is_alone = not before.strip() and not after.strip()
            if is_alone:
                start -= len(before)
            elif (before.strip() and MENTION_BEFORE.search(before)) \
                    or (after.strip() and MENTION_AFTER.match(after)):
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
            yield f'{" or ".join(self.tokens)} separated documents at {self.count:,} places'
        if self.mentions:
            yield f'{" or ".join(self.tokens)} within a line of text was kept as text'


def separators_of(tokenizer):
    """The Separators of text for a tokenizer, None where that is learned from the text."""
    tokens = set(END_OF_TEXT[:1])
    if tokenizer is not None and tokenizer.end_of_text is not None:
        names = getattr(tokenizer, 'control_ids', {})  # of a pretrained model's tokenizer
        tokens |= {name for name, i in names.items()
                   if name in END_OF_TEXT or i == tokenizer.end_of_text}
    return Separators(sorted(tokens))
