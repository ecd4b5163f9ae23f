"""Config files and --key=value options → a checked dataclass; and --help.

    python train.py config/a.py config/b.py --batch_size=32

Arguments apply left to right. A config file is plain Python that assigns to the dataclass's
fields. It starts with their current values in scope and can compute from them. An option after the
file already has its value there: `min_lr = learning_rate / 10` follows --learning_rate. Names that
start with `_`, imports, functions and classes are private to the file. Problems are collected and
reported together, each with the place it came from.
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
from collections import deque
from contextlib import suppress
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.files import RENAMED_SETTINGS, ROOT
from plaingpt.system.formatting import quoted, setting

# cached, because evaluating the annotations of 80 fields takes a while
get_type_hints = functools.cache(typing.get_type_hints)


def load_config(cls, argv, doc='', positional='', several=False, read_saved=lambda values: {}):
    """Build dataclass `cls` from its defaults and the command line `argv`.

    positional: the field that an argument without dashes sets, unless it is a config file. With
    `several`, it is set to the list of all such arguments, and none is a config file.

    read_saved: called with {name: value} of the command line; returns the values that replace the
    defaults, e.g. those of the run to resume

    A field with `init=False` is not a setting. `cls` may list fields under the names of LIMITS,
    and define `out_of_range(self) -> list[str]` for other invalid values and
    `conflicts(self) -> list[str]` for settings that contradict each other. Raises UserError with
    all problems, one per line. `--help` prints the help and exits.
    """
    if any(arg in ('--help', '-h') for arg in argv):
        print(help_text(cls, doc, positional, several))
        sys.exit(0)
    settings = Settings(cls)
    settings.read(argv, positional, several)
    try:
        saved = read_saved(settings.values)
    except UserError as error:
        # A mistake on the command line may be the reason, such as a run named without --out_dir.
        raise UserError('\n'.join(settings.problems or [str(error)])) from None
    if saved:
        settings = Settings(cls, saved, 'in the checkpoint')
        settings.read(argv, positional, several)
    return settings.build()


def checked(cls, values):
    """`cls` from {name: value} set by a program, with load_config's checks. Raises UserError."""
    return Settings(cls, values, 'in the call').build()


def options_of(cls, argv):
    """{key: value} of the valid options in `argv`."""
    settings = Settings(cls)
    settings.read([arg for arg in argv if arg.startswith('-')])
    return settings.assigned


def defaults(cls):
    """{name: default} of the settings of `cls`."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


# -----------------------------------------------------------------------------
# where values come from


class Settings:
    """The settings of a dataclass as they are read, and the problems found meanwhile."""

    def __init__(self, cls, saved=None, place=''):
        """saved: {name: value} that replace the defaults; place: where they come from"""
        self.cls = cls
        self.values = defaults(cls)
        self.assigned = {}
        self.problems = []
        for name, value in (saved or {}).items():
            self.set(name, value, place)

    def set(self, name, value, place):
        """Convert and store a value, or note the problem."""
        name = RENAMED_SETTINGS.get(name, name)
        if name not in self.values:
            hint = did_you_mean(name, self.values, 'see --help for all keys')
            self.problems.append(f'unknown key {name!r} {place}: {hint}')
            return
        types = accepted_types(self.cls, name)
        try:
            self.values[name] = self.assigned[name] = convert(value, types)
        except ValueError:
            names = {int: 'an integer', float: 'a number', bool: 'true or false', str: 'a string'}
            expected = ' or '.join(names.get(t, str(t)) for t in types)
            self.problems.append(f'{name}={value!r} {place}: expected {expected}')

    def read(self, argv, positional='', several=False):
        """Read arguments from left to right. Parameters as in load_config."""
        remaining, positionals = deque(argv), []
        while remaining:
            arg = remaining.popleft()
            lacks_dashes = arg.partition('=')[0] in self.values and not os.path.lexists(arg)
            if arg.startswith('-'):
                self.read_option(arg, remaining)
            elif arg.endswith('.py') and not several:
                self.read_file(arg, options_of(self.cls, remaining))
            elif positional and arg and not lacks_dashes:
                positionals.append(arg)
                self.set(positional, positionals if several else arg, 'on the command line')
            else:
                self.problems.append(f'{arg!r} is not a config file (*.py): write options as '
                                     '--key=value')
        options = [arg for arg in argv if arg.startswith(f'--{positional}=')]
        if positionals and (options or (len(positionals) > 1 and not several)):
            self.problems.append(f'{" and ".join(positionals + options)}: all of these set '
                                 f'{positional}; keep only one')

    def read_option(self, arg, remaining):
        """Set `--key=value`, or `--key` alone to True. remaining: the arguments after it"""
        name, equals, text = arg.removeprefix('--').partition('=')
        name = RENAMED_SETTINGS.get(name, name)
        types = accepted_types(self.cls, name) if name in self.values else [bool]
        if not arg.startswith('--') or not name:
            self.problems.append(f'{arg!r}: write options as --key=value')
        elif equals and str in types:
            # Text stays as typed: --start=1e3 means those three characters. The annotation may have
            # a function that decodes escapes; in a config file, Python does that.
            hint = get_type_hints(self.cls, include_extras=True)[name]
            decode, = getattr(hint, '__metadata__', [str])
            self.set(name, decode(text), 'on the command line')
        elif equals:
            self.set(name, parse_literal(text), 'on the command line')
        elif bool in types:
            self.set(name, True, 'on the command line')
        else:
            value = 'VALUE'
            if remaining and not remaining[0].startswith('--') and not remaining[0].endswith('.py'):
                value = quoted(remaining.popleft())  # as in --max_iters 10
            self.problems.append(f'{arg} needs a value: write {arg}={value}')

    def read_file(self, path, fixed):
        """Run a config file in its own namespace and set what it assigns, except for the settings
        in `fixed`, {name: value}, which options after the file set."""
        path = find_recipe(path)
        namespace = Namespace({**self.values, '__file__': path}, fixed)
        try:
            tree = run_file(path, namespace)
        except UserError as error:  # possibly raised by what the file imports or reads
            self.problems.append(str(error))
            return
        lines, imported = assigned_and_imported(tree)
        for name, value in sorted(namespace.items(), key=lambda item: lines.get(item[0], 0)):
            is_private = name.startswith('_') or name in imported or callable(value)
            if name in self.values:
                is_assigned = name in lines or value is not self.values[name]
            else:
                is_assigned = not is_private
            if name in fixed or not is_assigned:
                continue
            line = f', line {lines[name]}' if name in lines else ''
            self.set(name, value, f'in {path}{line}')

    def build(self):
        """→ the dataclass. Raises UserError with all problems."""
        config = self.cls(**self.values)
        problems = self.problems + outside_limits(config)
        if hasattr(config, 'out_of_range'):
            problems += config.out_of_range()
        if hasattr(config, 'conflicts'):
            with suppress(ArithmeticError):  # values out of range, reported above
                problems += config.conflicts()
        if problems:
            raise UserError('\n'.join(problems))
        return config


def parse_literal(text):
    """'32' → 32, '1e-3' → 0.001, 'true' → True; anything else stays text."""
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError):
        return text


class Namespace(dict):
    """The globals of a config file. Assignments to the names in `fixed` are ignored."""

    def __init__(self, values, fixed):
        super().__init__(values | fixed)
        self.fixed = fixed

    def __setitem__(self, name, value):
        if name not in self.fixed:
            super().__setitem__(name, value)


def run_file(path, namespace):
    """Run a config file → its syntax tree. Raises UserError."""
    try:
        source = Path(path).read_bytes()
    except OSError as e:
        name = Path(path).stem.removeprefix('train_')  # the prefix of nanoGPT's config files
        recipes = sorted(recipe.stem for recipe in (ROOT / 'config').glob('*.py'))
        hint = did_you_mean(name, recipes, f'see {ROOT / "config"}')
        raise UserError(f'config file {path}: {e.strerror}: {hint}') from None
    try:
        tree = ast.parse(source, path)
        exec(compile(tree, path, 'exec'), namespace)
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__)
                 if frame.filename == path]
        line = lines[-1] if lines else getattr(e, 'lineno', 0)  # of a SyntaxError
        message = ' '.join(f'{type(e).__name__}: {e}'.split())
        raise UserError(f'config file {path}, line {line}: {message}') from None
    return tree


def assigned_and_imported(tree):
    """Syntax tree of a file → ({name: line of its last assignment}, {imported names})"""
    lines, imported = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {(alias.asname or alias.name).split('.')[0] for alias in node.names}
    return lines, imported


def find_recipe(path):
    """Fall back to plainGPT's own `config/NAME.py` if the working directory has no such file."""
    recipe = ROOT / path
    if Path(path).parent == Path('config') and not os.path.lexists(path) and recipe.is_file():
        return str(recipe)
    return path


# -----------------------------------------------------------------------------
# what a field accepts


OTHER_NAMES = {  # our key: its names in other libraries, beside those that resemble ours
    'start': 'prompt', 'num_samples': 'n', 'max_new_tokens': 'max_length length',
    'temperature': 'temp',
    'init_from': 'model model_path model_name_or_path ckpt ckpt_path resume',
    'max_iters': 'epochs num_epochs num_train_epochs steps num_steps iterations',
    'block_size': 'seq_len seq_length max_seq_len max_length context_length context_size',
    'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
    'n_embd': 'hidden_size hidden_dim d_model dim embed_dim', 'dataset': 'data_dir data_path',
    'learning_rate': 'lr', 'weight_decay': 'wd', 'grad_clip': 'max_grad_norm',
    'batch_size': 'bs', 'gradient_accumulation_steps': 'grad_accum',
    'dtype': 'precision fp16 bf16'}


def did_you_mean(word, known, otherwise):
    """A hint that names the known word that other libraries call `word`, or the one that is most
    like it, else `otherwise`."""
    nearest = [key for key, others in OTHER_NAMES.items()
               if key in known and word.replace('-', '_') in others.split()]
    nearest += difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    return f'did you mean {nearest[0]}?' if nearest else otherwise


def convert(value, types):
    """`value` as one of a field's accepted_types. Raises ValueError if it fits none."""
    value = value.item() if hasattr(value, 'item') else value  # NumPy or torch scalars
    for accepted in types:
        limit = 3e38 if accepted is float else 2**63  # what torch can represent
        if type(value) in (int, float) and not abs(value) < limit:
            continue  # also rejects infinity and NaN
        if accepted is float and type(value) in (int, float):
            return float(value)
        if accepted is int and type(value) is float and value.is_integer():
            return int(value)  # 6e5 is a fine way to write 600000
        if accepted is type(value) or (not isinstance(accepted, type) and value == accepted):
            return value
    raise ValueError


LIMITS = (  # class attribute that lists fields, the limit in words, a function that tests a value
    ('above_0', 'above 0', lambda value: value > 0),
    ('at_least_0', 'at least 0', lambda value: value >= 0),
    ('below_1', 'below 1', lambda value: value < 1))


def outside_limits(config):
    """A problem for each number outside the LIMITS of its class."""
    problems = []
    for attribute, limit, is_within in LIMITS:
        for name in getattr(config, attribute, ()):
            value = getattr(config, name)
            if not isinstance(value, str) and not is_within(value):  # 'auto' has no limits
                problems.append(f'{name}={setting(value)}: must be {limit}')
    return problems


def accepted_types(cls, name):
    """A field's annotation as a flat list of types and, for a Literal, its values."""
    annotation = get_type_hints(cls)[name]
    if isinstance(annotation, type):
        return [annotation]
    accepted = []
    for option in typing.get_args(annotation):
        if typing.get_origin(option) is typing.Literal:
            accepted += typing.get_args(option)
        else:
            accepted.append(option)
    return accepted


# -----------------------------------------------------------------------------
# --help, read from the comments of a dataclass


def help_text(cls, doc, positional, several):
    """The docstring, then the fields by section, each with its default and trailing comment.
    Sections whose comment begins with 'not listed' are omitted."""
    choices = {name: accepted_types(cls, name) for name in defaults(cls)}
    lines = [inspect.cleandoc(doc), '']
    if positional:
        note = 'It may be repeated.' if several else 'Arguments that end in .py are config files.'
        lines += [f'An argument without dashes sets --{positional}. {note}', '']
    lines += ['Options, with their defaults:']
    shown = {name: f'--{name}={getattr(cls, name)}'.replace('\n', '\\n') for name in choices}
    width = max(map(len, shown.values())) + 2
    for section, fields in sections_of(cls).items():
        if section.startswith('not listed'):
            continue
        lines += ['', section] if section else []
        for name, comment in fields.items():
            values = [str(choice) for choice in choices[name] if not isinstance(choice, type)]
            listed = f' ({", ".join(values)})' if len(values) > 1 else ''
            lines.append(f'  {shown[name]:<{width}}{comment}{listed}')
    return '\n'.join(lines)


def sections_of(cls):
    """{section: {field: comment}} in source order. Fields inherited from another dataclass come
    last, except those that `cls` overrides."""
    sections = {}
    remaining = set(defaults(cls))
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        section = ''
        for line in inspect.getsource(owner).splitlines():
            heading = re.fullmatch(r'    # (.*)', line)
            field = re.fullmatch(r'    (\w+): .*?  # (.*)', line)
            if heading:
                section = heading[1]
            elif field and field[1] in remaining:
                sections.setdefault(section, {})[field[1]] = field[2]
                remaining.remove(field[1])
    return sections
