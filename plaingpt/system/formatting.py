"""Numbers, errors and the text of others as people read them."""

import os
import re
import shlex
import sys
from pathlib import Path

from tqdm import tqdm

GIB = 2**30
short = tqdm.format_sizeof  # 1234567 → '1.23M'

CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]')  # lone surrogates, too


def setting(value):
    """A setting's value as people write it: 2.9999999999999997e-05 → '3e-05', 0.9995 as it is."""
    exact = str(value)
    return f'{value:.3g}' if isinstance(value, float) and len(exact) > 8 else exact


def duration(seconds):
    """3725 → '1h02m', 65 → '1m05s', 5 → '5s'."""
    s = round(seconds)
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02d}m'
    return f'{s // 60}m{s % 60:02d}s' if s >= 60 else f'{s}s'


def printable(text):
    r"""Text with control characters written out, '\x1b' for an escape: a terminal shows them and
    does not obey."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def shown(path):
    """A path, or another word of users, within a line."""
    return printable(str(path)).replace('\n', '\\n')


def count_of(number, noun):
    """(1, 'byte') → '1 byte', (2000, 'byte') → '2,000 bytes'."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def join_halves(text):
    """→ (text, its UTF-8) where two halves of a character are joined, one alone becomes U+FFFD."""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
        return text, text.encode()


def quoted(path):
    """A path, or another word, as a shell takes it: for commands that a message shows."""
    return shlex.quote(str(path))


def command_for(name):
    """Another command, called as a person called this one: 'python sample.py', 'plaingpt sample' or
    'python -m plaingpt sample'."""
    # The variable has the first process's sys.argv[0], for those that it starts.
    started = Path(os.environ.get('PLAINGPT_STARTED_AS', sys.argv[0]))
    if started.parts[-2:] == ('plaingpt', '__main__.py'):
        return f'python -m plaingpt {name}'
    if started.stem == 'plaingpt':
        return f'plaingpt {name}'
    script = started.parent / f'{name}.py'
    is_elsewhere = script.exists() and script.parent.resolve() != Path.cwd()
    return f'python {quoted(script) if is_elsewhere else script.name}'


def one_line(problem):
    """The first line of an exception's message."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def gib(size):
    """1717986918 → '1.60 GiB', less than a tenth of one as MiB, a thousand and more as TiB."""
    if size >= 1000 * GIB:
        return f'{size / GIB / 1024:,.2f} TiB'
    return f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.1f} MiB'
