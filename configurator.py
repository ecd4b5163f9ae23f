"""What the user asked for: config files and --key=value → a checked dataclass; --help.

    python train.py config/a.py config/b.py --batch_size=32

Arguments apply left to right. A config file is plain Python that assigns to the dataclass's
fields; it starts with their current values in scope, so it can compute from them. What an option
after the file sets has that value in the file already: `min_lr = learning_rate / 10` follows
--learning_rate. Names that start with `_`, imports, functions and classes are the file's own.
Problems are collected and reported together, each with the place it came from.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import re
import sys
import traceback
import typing
from contextlib import suppress
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import quoted, setting

get_type_hints = functools.cache(typing.get_type_hints)  # of 80 fields, a few times each


def load_config(cls, argv, doc='', positional='', several=False, read_saved=lambda values: {}):
    """Build dataclass `cls` from its defaults and the command line `argv`.

    positional: the field that an argument without dashes sets, where it names no config file. With
    `several`, such arguments are its values, with commas between, and none is a config file.

    read_saved: {name: value} of these → {name: value} to begin with instead of the defaults, such
    as those of the run that the command line resumes

    A field that is `init=False` is not a setting. `cls` may name numbers that have LIMITS,
    and define `out_of_range(self) -> list[str]` for other invalid values and
    `conflicts(self) -> list[str]` for those that contradict each other. Raises UserError with every
    problem found, one a line. `--help` prints and exits.
    """
    if any(arg in ('--help', '-h') for arg in argv):
        choices = {name: accepted_types(cls, name) for name in defaults(cls)}
        print(help_text(cls, choices, doc, positional, several))
        sys.exit(0)
    mistakes = []
    if positional:
        argv = name_positionals(cls, argv, positional, several, mistakes)
    values, problems = read_arguments(cls, argv, {})
    try:
        saved = read_saved(values)
    except UserError as problem:
        # A mistake in the command line may be the reason, such as a run named without --out_dir.
        raise UserError('\n'.join(mistakes + problems or [str(problem)])) from None
    if saved:
        values, problems = read_arguments(cls, argv, saved)
    return build(cls, values, mistakes + problems)


def checked(cls, given):
    """`cls` of a program's values, {name: value}, checked like load_config's. Raises UserError."""
    return build(cls, *read_arguments(cls, [], given, 'in the call'))


def build(cls, values, problems):
    """→ `cls` of these values. Raises UserError with `problems` and all that is wrong in them."""
    config = cls(**values)
    problems = problems + outside_limits(config)
    if hasattr(config, 'out_of_range'):
        problems += config.out_of_range()
    if hasattr(config, 'conflicts'):
        with suppress(ArithmeticError):  # of values out of range
            problems += config.conflicts()
    if problems:
        raise UserError('\n'.join(problems))
    return config


def defaults(cls):
    """{name: default} of its settings."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


# -----------------------------------------------------------------------------
# where values come from


def read_arguments(cls, argv, saved, place='in the checkpoint'):
    """→ ({name: value} of all fields, [problem]): the defaults, what was saved at a `place`,
    then the command line from left to right."""
    values, problems = defaults(cls), []
    for name, value in saved.items():
        check_and_set(cls, values, name, value, place, problems)
    for i, arg in enumerate(argv):
        before = argv[i - 1] if i else ''
        if is_value_of(before, arg, values):
            problems[-1] = f'{before} {arg}: write {before}={quoted(arg)}'
        elif arg.startswith('-'):
            name, value, problem = read_option(cls, arg)
            if problem:
                problems.append(problem)
            else:
                check_and_set(cls, values, name, value, 'on the command line', problems)
        elif not arg.endswith('.py'):
            problems.append(f'{arg!r} is no config file, whose names end with .py: write options '
                            'as --key=value')
        else:
            for name, value, where in read_file(arg, values, options_of(cls, argv[i + 1:]),
                                                problems):
                check_and_set(cls, values, name, value, where, problems)
    return values, problems


def is_value_of(option, arg, values):
    """True where somebody wrote `--key value`."""
    return option.startswith('--') and option[2:] in values and not arg.startswith('--') \
        and not arg.endswith('.py') and type(values[option[2:]]) is not bool


def read_option(cls, arg):
    """`--key=value`, or `--key` alone, which is true for a bool → (name, value, problem or None)"""
    name, equals, text = arg.removeprefix('--').partition('=')
    known = name in defaults(cls)
    if not arg.startswith('--') or not name:
        return name, None, f'{arg!r}: write options as --key=value'
    if equals and known and str in accepted_types(cls, name):
        # Text stays as typed: --start=1e3 means those three characters. A function in its
        # annotation reads escapes, which a config file's Python has read already.
        hint = get_type_hints(cls, include_extras=True)[name]
        read, = getattr(hint, '__metadata__', [str])
        return name, read(text), None
    if equals:
        return name, parse_literal(text), None
    if known and bool not in accepted_types(cls, name):
        return name, None, f'--{name} needs a value: write --{name}=VALUE, without a space'
    return name, True, None


def options_of(cls, argv):
    """{key: value} of the valid options in `argv`."""
    values, found = defaults(cls), {}
    for arg in argv:
        if arg.startswith('-'):
            name, value, problem = read_option(cls, arg)
            if not problem and not check_and_set(cls, values, name, value, '', []):
                found[name] = values[name]
    return found


def parse_literal(text):
    """'32' → 32, '1e-3' → 0.001, 'true' → True, anything else stays text."""
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError):
        return text


class Namespace(dict):
    """What a config file runs in: the names of `fixed` keep their values."""

    def __init__(self, values, fixed):
        super().__init__(values | fixed)
        self.fixed = fixed

    def __setitem__(self, name, value):
        if name not in self.fixed:
            super().__setitem__(name, value)


def read_file(path, values, fixed, problems):
    """Run a config file in its own namespace → [(name, value, where)] that it assigned. fixed:
    {name: value} that options after the file set."""
    path = find_recipe(path)
    namespace = Namespace({**values, '__file__': path}, fixed)
    try:
        source = run_file(path, namespace)
    except UserError as problem:  # raised by what it imports or reads
        problems.append(str(problem))
        return []
    lines, imported = assigned_and_imported(source)
    found = []
    for name, value in sorted(namespace.items(), key=lambda item: lines.get(item[0], 0)):
        untouched = name in fixed or (
            name in values and value is values[name] and name not in lines)
        own = name.startswith('_') or name in imported or callable(value)
        if not untouched and (name in values or not own):
            where = f'in {path}, line {lines[name]}' if name in lines else f'in {path}'
            found.append((name, value, where))
    return found


def run_file(path, namespace):
    """→ the text of a config file, which has run. Raises UserError."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            source = f.read()
    except OSError as e:
        name = Path(path).stem.removeprefix('train_')  # which nanoGPT's names begin with
        hint = nearest_of(name, sorted(found.stem for found in Path('config').glob('*.py')),
                          'see the folder config')
        raise UserError(f'config file {path}: {e.strerror}: {hint}') from None
    except UnicodeDecodeError:
        raise UserError(f'config file {path}: not a text file') from None
    try:
        exec(compile(source, path, 'exec'), namespace)
    except UserError:
        raise
    except SyntaxError as e:
        raise UserError(f'config file {path}, line {e.lineno}: syntax error: {e.msg}') from None
    except (Exception, SystemExit) as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__)
                 if frame.filename == path]
        what = ' '.join(f'{type(e).__name__}: {e}'.split())
        raise UserError(f'config file {path}, line {lines[-1] if lines else 0}: {what}') from None
    return source


def assigned_and_imported(source):
    """({name: line of its last assignment}, {imported names}) of a file's statements."""
    lines, imported = {}, set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {(alias.asname or alias.name).split('.')[0] for alias in node.names}
    return lines, imported


def find_recipe(path):
    """`config/NAME.py` is plainGPT's own where the working directory has no such file."""
    ours = ROOT / path
    is_ours = Path(path).parent == Path('config') and not os.path.lexists(path) and ours.is_file()
    return str(ours) if is_ours else path


def name_positionals(cls, argv, key, several, problems):
    """argv with --key=VALUE in the place of its arguments without dashes: `out` → `--out_dir=out`.
    Config files stay, and so do mistakes that are found later."""
    known = defaults(cls)
    found = [i for i, arg in enumerate(argv)
             if arg and not arg.startswith('-') and (several or not arg.endswith('.py'))
             and not (i and is_value_of(argv[i - 1], arg, known))
             and not (arg.partition('=')[0] in known and not os.path.lexists(arg))]
    given = [argv[i] for i in found]
    options = [arg for arg in argv if arg.startswith(f'--{key}=')]
    if (given and options) or (len(given) > 1 and not several):
        named = ' and '.join([*given, *options])
        problems.append(f'{named}: each of them names {key}: leave out all but one')
    named = {i: f'--{key}={",".join(given)}' for i in found[:1]}
    return [named.get(i, arg) for i, arg in enumerate(argv) if i not in found[1:]]


# -----------------------------------------------------------------------------
# what a field accepts


def check_and_set(cls, values, name, value, where, problems):
    """Put `value` into `values` if `name` exists and the value fits, else note the problem →
    whether there is one."""
    if name not in values:
        nearest = nearest_of(name, values, 'see --help for all keys')
        problems.append(f'unknown key {name!r} {where}: {nearest}')
        return True
    try:
        values[name] = convert(value, accepted_types(cls, name))
    except ValueError:
        names = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'text'}
        expected = ' or '.join(names.get(t, str(t)) for t in accepted_types(cls, name))
        problems.append(f'{name}={value!r} {where}: expected {expected}')
        return True
    return False


def nearest_of(word, known, otherwise):
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    return f'did you mean {nearest[0]}?' if nearest else otherwise


def convert(value, kinds):
    """`value` as one of the accepted_types of a field. Raises ValueError where it fits none."""
    value = value.item() if hasattr(value, 'item') else value  # of numpy or torch
    for kind in kinds:
        limit = 3e38 if kind is float else 2**63  # what torch can hold
        if type(value) in (int, float) and not abs(value) < limit:
            continue  # also rejects infinity and NaN
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind is int and type(value) is float and value.is_integer():
            return int(value)  # 6e5 is a fine way to write 600000
        if kind is type(value) or (not isinstance(kind, type) and value == kind):
            return value
    raise ValueError


LIMITS = (  # attribute of a class, with names of its fields; what is said; whether a value fits
    ('above_0', 'above 0', lambda value: value > 0),
    ('at_least_0', 'at least 0', lambda value: value >= 0),
    ('below_1', 'below 1', lambda value: value < 1))


def outside_limits(config):
    """Numbers outside the LIMITS of their class, a line each."""
    found = []
    for attribute, limit, fits in LIMITS:
        for name in getattr(config, attribute, ()):
            value = getattr(config, name)
            if not isinstance(value, str) and not fits(value):  # text, such as auto, is no number
                found.append(f'{name}={setting(value)}: must be {limit}')
    return found


def accepted_types(cls, name):
    """A field's annotation as a flat list: types, and the values of a Literal."""
    annotation = get_type_hints(cls)[name]
    flat = []
    for part in [annotation] if isinstance(annotation, type) else typing.get_args(annotation):
        flat += typing.get_args(part) if typing.get_origin(part) is typing.Literal else [part]
    return flat


# -----------------------------------------------------------------------------
# --help, read from the comments of a dataclass


def help_text(cls, choices, doc='', positional='', several=False):
    """The docstring, then the fields by section: default and trailing comment. Those of a section
    whose comment begins with 'not listed' are left out.

    choices: {name: the types and values that a field accepts}; the rest as in load_config"""
    lines = [inspect.cleandoc(doc or ''), '']
    if positional:
        others = 'Several are a list.' if several else 'One that ends in .py is a config file.'
        lines += [f'A name without dashes is that of --{positional}. {others}', '']
    lines += ['Options, with their defaults:']
    shown = {name: f'--{name}={getattr(cls, name)}'.replace('\n', '\\n') for name in choices}
    width = max(map(len, shown.values())) + 2
    for section, fields in sections_of(cls).items():
        if section.startswith('not listed'):
            continue
        lines += ['', section] if section else []
        for name, comment in fields.items():
            words = [str(t) for t in choices[name] if not isinstance(t, type)]
            listed = f' ({", ".join(words)})' if len(words) > 1 else ''
            lines.append(f'  {shown[name]:<{width}}{comment}{listed}')
    return '\n'.join(lines)


def sections_of(cls):
    """{section: {field: comment}} in source order; the fields of a dataclass that `cls` extends
    come last, and one that `cls` has too is its own."""
    found, waiting = {}, {field.name for field in dataclasses.fields(cls) if field.init}
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        section = ''
        for line in inspect.getsource(owner).splitlines():
            if head := re.fullmatch(r'    # (.*)', line):
                section = head[1]
            elif (field := re.fullmatch(r'    (\w+): .*?  # (.*)', line)) \
                    and field[1] in waiting:
                found.setdefault(section, {})[field[1]] = field[2]
                waiting.remove(field[1])
    return found
