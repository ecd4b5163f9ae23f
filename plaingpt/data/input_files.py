"""Which files `--input` names, and what is left out of the folders among them."""

import glob
import os
import re
import sysconfig
from collections import Counter
from itertools import chain
from pathlib import Path

from plaingpt.data.readers import file_type, inner_suffix
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of, quoted, shown

SUFFIXES = {  # of the files that are read in a folder, in any case
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TABLES = {'.json', '.csv', '.tsv'}  # read in a folder without texts: beside code they are settings
NO_TEXTS = {'node_modules', '__pycache__', 'unfinished'}  # folders that are left out
PREPARED = re.compile(r'(train|val|test)(_\d{6})?(_mask)?\.bin')  # files that prepare.py writes
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']
# What the README.md of a dataset of the Hugging Face hub says in its front matter.
CARD = re.compile(r'---\r?\n(?:(?!---).*\n)*?(dataset_info|configs|task_categories|size_categories) *:')


def find_files(wanted, tell=None):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each file once. Where folders or globs are among
    them, `tell` gets the lines that say what is read and what is left out. Raises UserError."""
    paths, left_out, searched = set(), {}, False
    for one in [wanted] if os.path.exists(wanted) else wanted.split(','):
        one = os.path.expanduser(one if os.path.lexists(one) else one.strip())
        if not one:  # it would be the working directory
            continue
        matches = [one] if os.path.lexists(one) else sorted(expand(one))
        if not matches:
            raise UserError(f'{shown(one)}: ' + (
                'URLs are not read: download it, and name the file' if '://' in one else
                'no such file or folder' if not glob.has_magic(one) else 'no file of that form'))
        reasons = {}
        for path in map(Path, matches):
            if path.is_dir():
                reasons |= search(path)
            else:  # a file is read that is named, or that a glob matches unless it is ours
                reasons[path] = left_out_of_prepared(path) if path != Path(one) else ''
        found = {path for path, reason in reasons.items() if not reason}
        if not found:
            raise UserError(f'{shown(one)}: nothing is read: '
                            + ('; '.join(describe_left_out(reasons)) or 'it is an empty folder')
                            + ': name the files that hold the text, each or with a glob such as '
                            'notes/*.txt')
        searched |= matches != [one] or os.path.isdir(one)
        paths |= found
        left_out.update((path, reason) for path, reason in reasons.items() if reason)
    if not paths:
        raise UserError(f'input={shown(wanted)!r}: it names no file')
    found = sorted({os.path.realpath(path): path for path in sorted(paths)}.values())
    if tell and searched:
        left_out = {path: reason for path, reason in left_out.items() if path not in paths}
        tell(f'reading {count_of(len(found), "file")}: '
             f'{count_endings(map(inner_suffix, found))}' + '; left out:' * bool(left_out))
        for line in describe_left_out(left_out):
            tell(f'  {line}')
    return found


def expand(pattern):
    """The paths of a glob; its last '**' is the folder itself. Links, which may go round in circles,
    are not followed below '**'. Raises UserError."""
    head, *tail = re.split(r'(?:^|(?<=/))\*\*(?:/|$)', pattern, maxsplit=1)
    if not tail:
        return glob.glob(pattern)
    found = glob.glob(head) if head else ['.']
    if tail != ['']:
        walks = (os.walk(top, onerror=not_listed) for top in found)
        found = []
        for at, folders, _ in chain.from_iterable(walks):
            folders[:] = [n for n in folders if not n.startswith('.') and n not in NO_TEXTS]
            found += expand(os.path.join(glob.escape(at), tail[0]))
    return found


def not_listed(e):
    raise UserError(f'{shown(e.filename)}: {e.strerror}: allow it, or name the files in it that '
                    'you want')


def search(root):
    """What is in a folder and those below it → {path: why it is left out, or ''}. UserError."""
    reasons, seen = {}, {str(above) for above in Path(os.path.realpath(root)).parents}
    for at, folders, files in os.walk(root, followlinks=True, onerror=not_listed):
        folder = Path(at)
        seen.add(os.path.realpath(folder))
        folders.sort()  # links are followed in an order that is the same everywhere
        for name in [*folders]:
            hidden = name.startswith('.')
            if hidden or name in NO_TEXTS or os.path.realpath(folder / name) in seen:
                folders.remove(name)
                reasons[folder / name] = 'hidden' if hidden else name if name in NO_TEXTS else \
                    'link to a folder above or one that is read'
        check_no_hub_folder(folder)
        for path in (folder / name for name in files):
            suffix = inner_suffix(path)
            reasons[path] = 'hidden' if path.name.startswith('.') else \
                left_out_of_prepared(path) or (
                    '' if suffix in SUFFIXES | TABLES else suffix or 'without an ending')
    if any(not reason and file_type(path) == 'text' for path, reason in reasons.items()):
        for path, reason in reasons.items():
            if not reason and inner_suffix(path) in TABLES:
                reasons[path] = f'{inner_suffix(path)} beside texts'
    return reasons


def left_out_of_prepared(path):
    """Why a file is no text that a person has there, whatever its ending, or ''."""
    if not path.is_file():
        return 'pipe, socket, device or broken link'
    is_ours = PREPARED.fullmatch(path.name) or (
        path.name == 'meta.json' and any(path.parent.glob('train*.bin'))) or (
        path.parent.name == 'unfinished' and (path.parent / 'journal.json').exists())
    return 'of a prepared dataset' if is_ours else ''


def check_no_hub_folder(folder):
    """Raises UserError for a folder that is laid out like a dataset of the Hugging Face hub."""
    card = folder / 'README.md'
    if (folder / 'dataset_infos.json').exists() or (
            card.is_file() and CARD.match(card.read_text('utf-8', 'replace'))):
        raise UserError(f'{shown(folder)} is laid out like a dataset of the Hugging Face hub, '
                        'which has splits of its own: prepare it with python prepare.py hf '
                        f'--path={shown(quoted(folder))}')


def count_endings(endings):
    """['.md', '.txt', '.md'] → '2 .md, 1 .txt'"""
    counts = Counter(endings).most_common()
    shown_counts = [f'{n:,} {shown(suffix) or "without an ending"}' for suffix, n in counts[:6]]
    if rest := counts[6:]:
        shown_counts.append(f'{sum(n for _, n in rest):,} of {len(rest):,} other endings')
    return ', '.join(shown_counts)


def describe_left_out(reasons):
    """{path: why} → '2 .png: a.png, b.png' for each reason, those of many files first."""
    groups = {}
    for path, reason in sorted(reasons.items()):
        if reason:
            groups.setdefault(reason, []).append(path)
    lines, groups = [], sorted(groups.items(), key=lambda group: -len(group[1]))
    for reason, paths in groups[:8]:
        names = [shown(path) + '/' * path.is_dir() for path in paths[:2]] + ['…'] * (len(paths) > 2)
        lines.append(f'{len(paths):,} {shown(reason)}: {", ".join(names)}')
    if groups[8:]:
        lines.append(f'{sum(len(paths) for _, paths in groups[8:]):,} more: '
                     + ', '.join(shown(reason) for reason, _ in groups[8:20]))
    return lines


def find_standard_library(folder, tell=None):
    """The source of Python's own standard library: text on every machine."""
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    every = sorted(Path(folder).rglob('*.py'))
    found = [p for p in every if not skip & set(p.relative_to(folder).parts)
             and not p.name.startswith('_sysconfigdata')]
    if tell:
        tell(f'reading {len(found):,} .py files; left out: {len(every) - len(found):,} of tests, '
             'tables and packages that were installed later')
    return found
