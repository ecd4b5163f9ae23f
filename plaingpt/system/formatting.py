"""Formatting numbers, paths, commands, errors and untrusted text for the console."""

import math
import os
import re
import shlex
import sys
from pathlib import Path

from tqdm import tqdm

GIB = 2**30
short = tqdm.format_sizeof  # 1234567 → '1.23M'

# Control characters except tab and newline, and lone surrogates.
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]')


def setting(value):
    """A setting's value as a user would write it: 2.9999999999999997e-05 → '3e-05'."""
    if isinstance(value, float) and len(str(value)) > 8:
        return f'{value:.3g}'
    return str(value)


def duration(seconds):
    """3725 → '1h02m', 65 → '1m05s', 5 → '5s'."""
    s = round(seconds)
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02d}m'
    if s >= 60:
        return f'{s // 60}m{s % 60:02d}s'
    return f'{s}s'


def printable(text):
    r"""Text with control characters escaped, such as '\x1b', so that a terminal does not interpret
    them."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def shown(path):
    """A path or other user input, escaped to fit on one line."""
    return printable(str(path)).replace('\n', '\\n')


def count_of(number, noun):
    """(1, 'byte') → '1 byte', (2000, 'byte') → '2,000 bytes'; a formatted number: ('0.5', 'epoch')
    → '0.5 epochs'."""
    number = number if isinstance(number, str) else f'{number:,}'
    return f'{number} {noun}' if number == '1' else f'{number} {noun}s'


def join_surrogates(text):
    """→ (text, its UTF-8), with surrogate pairs joined and lone surrogates replaced by U+FFFD"""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
        return text, text.encode()


def quoted(path):
    """A path or other argument, quoted for the shell, for commands in messages."""
    return shlex.quote(str(path))


def command_for(name):
    """Another command, in the form in which the user started this one: 'python sample.py',
    'plaingpt sample' or 'python -m plaingpt sample'."""
    # The environment variable passes the user's sys.argv[0] on to subprocesses.
    started_as = Path(os.environ.get('PLAINGPT_STARTED_AS', sys.argv[0]))
    if started_as.parts[-2:] == ('plaingpt', '__main__.py'):
        return f'python -m plaingpt {name}'
    if started_as.stem == 'plaingpt':
        return f'plaingpt {name}'
    script = started_as.parent / f'{name}.py'
    is_elsewhere = script.exists() and script.parent.resolve() != Path.cwd()
    return f'python {quoted(script) if is_elsewhere else script.name}'


def one_line(error):
    """The first line of an exception's message, or its type if that is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def gib(size):
    """1717986918 → '1.60 GiB'; below 0.1 GiB in MiB, from 1,000 GiB in TiB."""
    if size >= 1000 * GIB:
        return f'{size / GIB / 1024:,.2f} TiB'
    if size >= GIB / 10:
        return f'{size / GIB:.2f} GiB'
    return f'{size / 2**20:.1f} MiB'


def finite(x):
    """x, or None if it is not finite: JSON has neither NaN nor infinity."""
    return x if x is not None and math.isfinite(x) else None
