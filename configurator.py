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
import inspect
import io
import operator
import os
import sys
import tokenize
import types
import typing
from contextlib import suppress
from pathlib import Path

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import quoted, setting


def load_config(cls, argv, doc='', positional='', several=False, read_saved=lambda values: {}):
    """Build dataclass `cls` from its defaults and the command line `argv`.

    positional: the field that an argument without dashes sets, where it names no config file. With
    `several`, such arguments are its values, with commas between, and none is a config file.

    read_saved: {name: value} of these → {name: value} to begin with instead of the defaults, such
    as those of the run that the command line resumes

    A field may have a limit in words: `Annotated[int, 'at least 1 and below 9']`. `cls` may define
    `out_of_range(self) -> list[str]` for other values that are wrong by themselves, and
    `problems(self) -> list[str]` for those that contradict each other.
    Raises UserError with every problem found, one a line. `--help` prints and exits.
    """
    if any(arg in ('--help', '-h') for arg in argv):
        print(help_text(cls, doc, positional, several))
        sys.exit(0)
    mistakes = []
    if positional:
        argv = name_positionals(cls, argv, positional, several, mistakes)
    values, problems = read_arguments(cls, argv, {})
    try:
        saved = read_saved(values)
    except UserError as problem:
        # A mistake of the command line may be why: it named the run without --out_dir, perhaps.
        raise UserError('\n'.join(mistakes + problems or [str(problem)])) from None
    if saved:
        values, problems = read_arguments(cls, argv, saved)
    return build(cls, values, mistakes + problems)


def checked(cls, given):
    """`cls` with what a program gives, {name: value}, as load_config takes it. Raises UserError."""
    return build(cls, *read_arguments(cls, [], given, 'in the call'))


def build(cls, values, problems):
    """→ `cls` of these values. Raises UserError with `problems` and all that is wrong in them."""
    config = cls(**values)
    problems = problems + outside_limits(config)
    if hasattr(config, 'out_of_range'):
        problems += config.out_of_range()
    if hasattr(config, 'problems'):
        with suppress(ArithmeticError):  # of values out of range
            problems += config.problems()
    if problems:
        raise UserError('\n'.join(problems))
    return config


# -----------------------------------------------------------------------------
# where values come from: each reader yields (name, value, where)


def name_positionals(cls, argv, key, several, problems):
    """argv with --key=VALUE in the place of its arguments without dashes: `out` → `--out_dir=out`.
    Config files stay, and so do mistakes that are found later."""
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    found = [i for i, arg in enumerate(argv)
             if arg and not arg.startswith('-') and (several or not arg.endswith('.py'))
             and not (i and is_value_of(argv[i - 1], arg, defaults))
             and not (arg.partition('=')[0] in defaults and not os.path.lexists(arg))]
    given = [argv[i] for i in found]
    options = [arg for arg in argv if arg.startswith(f'--{key}=')]
    if (given and options) or (len(given) > 1 and not several):
        named = ' and '.join([*given, *options])
        problems.append(f'{named}: each of them names {key}: leave out all but one')
    named = {i: f'--{key}={",".join(given)}' for i in found[:1]}
    return [named.get(i, arg) for i, arg in enumerate(argv) if i not in found[1:]]


def read_arguments(cls, argv, saved, place='in the checkpoint'):
    """→ ({name: value} of all fields, [problem]): the defaults, what was saved at a `place`,
    then the command line from left to right."""
    values, problems = {f.name: f.default for f in dataclasses.fields(cls)}, []
    for name, value in saved.items():
        check_and_set(cls, values, name, value, place, problems)
    for i, arg in enumerate(argv):
        if i and is_value_of(argv[i - 1], arg, values):
            problems[-1] = f'{argv[i - 1]} {arg}: write {argv[i - 1]}={quoted(arg)}'
            continue
        if arg.startswith('-'):
            found = read_option(cls, arg, values, problems)
        elif not arg.endswith('.py') and os.path.exists(arg):
            problems.append(describe_no_config(arg, argv[i - 1] if i else ''))
            continue
        else:
            found = read_file(cls, arg, values, options_of(cls, argv[i + 1:]), problems)
        for name, value, where in found:
            check_and_set(cls, values, name, value, where, problems)
    return values, problems


def is_value_of(option, arg, values):
    """True where somebody wrote `--key value`."""
    return option.startswith('--') and option[2:] in values and not arg.startswith('--') \
        and not arg.endswith('.py') and type(values[option[2:]]) is not bool


def read_option(cls, arg, values, problems):
    """One `--key=value`; `--key` alone is true for a bool."""
    name, equals, text = arg.removeprefix('--').partition('=')
    if not arg.startswith('--') or not name:
        problems.append(f'{arg!r}: write options as --key=value')
    elif equals:
        # Text stays as typed: --start=1e3 means those three characters.
        is_text = name in values and str in accepted_types(cls, name)
        read = reader_of(cls, name) if is_text else parse_literal
        yield name, read(text), 'on the command line'
    elif name in values and bool in accepted_types(cls, name):
        yield name, True, 'on the command line'
    elif name in values:
        problems.append(f'--{name} needs a value: write --{name}=VALUE, without a space')
    else:
        yield name, None, 'on the command line'


def options_of(cls, argv):
    """{key: value} of the valid options in `argv`."""
    values, mistakes = {f.name: f.default for f in dataclasses.fields(cls)}, []
    names = set()
    for arg in argv:
        if arg.startswith('-'):
            for name, value, where in read_option(cls, arg, values, mistakes):
                names.add(name)
                check_and_set(cls, values, name, value, where, mistakes)
    return {name: values[name] for name in names & values.keys()}


def reader_of(cls, name):
    """What reads text of the command line: the function of a field `name: Annotated[str, function]`
    whose escapes a config file's Python has read already. Other text stays as typed."""
    return next(filter(callable, annotations_of(cls, name)), str)


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


def read_file(cls, path, values, fixed, problems):
    """Run a config file in its own namespace and yield what it assigned. fixed: {name: value} that
    options after the file set."""
    path = find_recipe(path)
    try:
        with open(path, encoding='utf-8-sig') as f:
            source = f.read()
    except OSError as e:
        problems.append(f'config file {path}: {e.strerror}{file_hint(path)}')
        return
    except UnicodeDecodeError:
        problems.append(f'config file {path}: not a text file')
        return
    namespace = Namespace({**values, '__file__': path}, fixed)
    try:
        exec(compile(source, path, 'exec'), namespace)
    except SyntaxError as e:
        problems.append(f'config file {path}, line {e.lineno}: syntax error: {e.msg}')
        return
    except UserError as e:  # of what it reads
        problems.append(str(e))
        return
    except (Exception, SystemExit) as e:
        what = ' '.join(f'{type(e).__name__}: {e}'.split())
        problems.append(f'config file {path}, line {error_line(e, path)}: {what}')
        return
    lines, imported = assigned_and_imported(source)
    for name, value in sorted(namespace.items(), key=lambda item: lines.get(item[0], 0)):
        untouched = name in fixed or (
            name in values and value is values[name] and name not in lines)
        own = name.startswith('_') or name in imported or callable(value)
        if not untouched and (name in values or not own):
            yield name, value, f'in {path}, line {lines[name]}' if name in lines else f'in {path}'


def describe_no_config(path, before):
    """What the user may have meant by a file or folder that is no config file. before: the
    argument before it."""
    if Path(path, 'run.json').exists() or Path(path, 'checkpoints').is_dir():
        return f'{path} is a run, no config file: continue it with --out_dir={quoted(path)} ' \
               '--init_from=resume'
    several = f', and several files as {quoted(f"{before},{path}")}' \
        if before.startswith('--') and '=' in before else ''
    data = f'; python prepare.py text {quoted(path)} makes data of it' \
        if os.path.isdir(path) or os.path.isfile(path) else ''
    return f'{path} is no config file, whose names end with .py: write options as ' \
           f'--key=value{several}{data}'


def find_recipe(path):
    """`config/NAME.py` is plainGPT's own where the working directory has no such file."""
    ours = ROOT / path
    is_ours = Path(path).parent == Path('config') and not os.path.lexists(path) and ours.is_file()
    return str(ours) if is_ours else path


def file_hint(path):
    """What the user may have meant by a config file that is not there."""
    if '=' in path:
        return f': write options as --{quoted(path)}'
    folder, name = Path(path).parent, Path(path).stem.removeprefix('train_')  # as nanoGPT's are
    for place in dict.fromkeys((folder, Path('config'), ROOT / 'config')):
        names = sorted(file.stem for file in place.glob('*.py'))
        if nearest := difflib.get_close_matches(name, names, n=3, cutoff=0.6):
            shown = Path('config') if place == ROOT / 'config' else place  # find_recipe knows it
            return ': did you mean ' + ', '.join(str(shown / f'{n}.py') for n in sorted(nearest))
    return ''


def assigned_and_imported(source):
    """({name: line of its last assignment}, {imported names}) of a file's statements."""
    lines, imported = {}, set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {(alias.asname or alias.name).split('.')[0] for alias in node.names}
    return lines, imported


def error_line(error, path):
    """The line of `path` that `error` came from."""
    line, tb = 0, error.__traceback__
    while tb:
        if tb.tb_frame.f_code.co_filename == path:
            line = tb.tb_lineno
        tb = tb.tb_next
    return line


# -----------------------------------------------------------------------------
# what a field accepts


HABITS = {  # what other programs, or earlier versions, call it → our key
    'lr': 'learning_rate', 'wd': 'weight_decay', 'epochs': 'max_iters', 'num_epochs': 'max_iters',
    'steps': 'max_iters', 'max_steps': 'max_iters', 'bs': 'batch_size', 'ctx': 'block_size',
    'context': 'block_size', 'seq_len': 'block_size', 'layers': 'n_layer', 'heads': 'n_head',
    'gpu': 'gpu_memory_gb', 'output': 'out_dir', 'resume': 'init_from', 'prompt': 'start',
    'tensorboard_log': 'log_to',
}
NO_LAW = 'python plan.py CONFIG says what a run of any config takes'
REMOVED = {  # settings and options of earlier versions → what to use now
    'law': NO_LAW, 'hours': NO_LAW, 'price': f'{NO_LAW}, its price with --gpu_hour_price',
    'ledger': 'keep what bench.py --judge prints, or give it --save=FOLDER',
    'equal': 'bench.py --judge says what a step takes; --set=max_iters=N trains the change for '
             'as long',
    'also_evaluate': 'python evaluate.py OUT_DIR --dataset=NAME scores a run on another dataset',
    'sources': 'python prepare.py inspect says how much of the validation text is in the training '
               'text',
    'api_key': 'put it into the environment as PLAINGPT_API_KEY',
    'model_name': 'serve.py answers whatever model a request names',
    'max_waiting': 'serve.py lets 16 requests wait',
    'checkpoint_chunk_mb': 'no file of a checkpoint is larger than 512 MB',
    'deterministic': 'write import torch; torch.use_deterministic_algorithms(True) into a config '
                     'file',
    'dist_timeout_s': 'it is TIMEOUT in plaingpt/system/distributed.py, ten minutes',
    'fsdp_group': 'with --parallel=fsdp all processes share one copy of the model',
    'max_bad_steps': 'a run ends after ten steps in a row that are not finite',
    'max_tokens': 'a request to serve.py says its own, and sample.py has max_new_tokens',
    'lm_eval': 'name its tasks with --tasks=TASK',
    'eval_tasks_interval': 'eval_tasks run at evaluations, every eval_interval iterations',
    'format': 'the fields of a row tell its form; --prompt and --completion name its columns',
    'html': 'make text of HTML pages with trafilatura or pandoc, and prepare that',
}


def check_and_set(cls, values, name, value, where, problems):
    """Put `value` into `values` if `name` exists and the value fits, else note the problem."""
    if name not in values and name in REMOVED:
        problems.append(f'unknown setting {name} {where}: it was removed; {REMOVED[name]}')
        return
    if name not in values:
        nearest = [HABITS[name]] if HABITS.get(name) in values \
            else difflib.get_close_matches(name, values, n=1, cutoff=0.6)
        hint = 'this version has no such setting: leave it out' \
            if name in getattr(cls, 'removed', ()) else \
            f'did you mean {nearest[0]}?' if nearest else 'see --help for all keys'
        problems.append(f'unknown key {name!r} {where}: {hint}')
        return
    try:
        values[name] = convert(value, cls, name)
    except ValueError:
        expected = ' or '.join(describe(t) for t in accepted_types(cls, name))
        problems.append(f'{name}={value!r} {where}: expected {expected}')


def convert(value, cls, name):
    """`value` as the field's type. Raises ValueError where it does not fit."""
    value = value.item() if isinstance(value, np.generic) else value
    for kind in accepted_types(cls, name):
        limit = 3e38 if kind is float else 2**63  # what torch can hold
        if type(value) in (int, float) and not abs(value) < limit:
            continue  # infinite or not a number, too
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind is int and type(value) is float and value.is_integer():
            return int(value)  # 6e5 is a fine way to write 600000
        if kind is type(value) or (not isinstance(kind, type) and value == kind):
            return value
    raise ValueError


COMPARISONS = {'at least': operator.ge, 'above': operator.gt,
               'at most': operator.le, 'below': operator.lt}


def outside_limits(config):
    """The values that are outside the limits that their fields have in words, a line each."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for limit in annotations_of(type(config), field.name):
            if isinstance(limit, str) and not isinstance(value, str) and not fits(value, limit):
                found.append(f'{field.name}={setting(value)}: must be {limit}')
    return found


def fits(value, limit):
    """Whether a number is within a limit such as 'at least 0 and below 1'."""
    bounds = [bound.rsplit(' ', 1) for bound in limit.split(' and ')]
    return all(COMPARISONS[words](value, float(number)) for words, number in bounds)


def annotations_of(cls, name):
    """What a field's type is annotated with, in a union too: limits and readers."""
    waiting, found = [typing.get_type_hints(cls, include_extras=True)[name]], []
    for annotation in waiting:
        found += getattr(annotation, '__metadata__', ())
        waiting += typing.get_args(annotation)
    return found


def accepted_types(cls, name):
    """A field's annotation as a flat list: types, and the values of a Literal."""
    annotation = typing.get_type_hints(cls)[name]
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) \
        or typing.get_origin(annotation) is typing.Union else [annotation]
    flat = []
    for part in parts:
        flat += typing.get_args(part) if typing.get_origin(part) is typing.Literal else [part]
    return flat


def describe(kind):
    names = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'text'}
    return names[kind] if isinstance(kind, type) else str(kind)


# -----------------------------------------------------------------------------
# --help, read from the comments of the dataclass itself


def help_text(cls, doc='', positional='', several=False):
    """The docstring, then every field by section: default and its trailing comment."""
    lines = [inspect.cleandoc(doc or ''), '', 'Options, with their defaults:']
    if positional:
        lines[-1:] = [f'NAME alone is --{positional}=NAME' + (
            ', and several names are a list.' if several else '; FILE.py is a config file.'),
            '', lines[-1]]
    shown = {f.name: f'--{f.name}={f.default}'.replace('\n', '\\n')
             for f in dataclasses.fields(cls)}
    width = max(map(len, shown.values())) + 2
    for kind, name, comment in commented_fields(cls):
        if kind == 'section':
            lines += ['', comment]
        else:
            choices = [str(t) for t in accepted_types(cls, name) if not isinstance(t, type)]
            listed = f' ({", ".join(choices)})' if len(choices) > 1 else ''
            lines.append(f'  {shown[name]:<{width}}{comment}{listed}')
    return '\n'.join(lines)


def commented_fields(cls):
    """Yield ('section', None, text) and ('field', name, comment) in source order, each field once;
    those of a dataclass that `cls` extends come last."""
    known = set()
    for owner in cls.__mro__:
        if dataclasses.is_dataclass(owner):
            for kind, name, text in comments_of(owner):
                if name not in known:
                    yield kind, name, text
                known |= {name} - {None}


def comments_of(cls):
    """The same of one class alone, fields that it shares with another included."""
    source = inspect.getsource(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    line_name = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in names and token.start[1] == 4:
            line_name = token.string
        elif token.type == tokenize.COMMENT:
            text = token.string.lstrip('# ')
            if line_name:
                yield 'field', line_name, text
            elif token.start[1] == 4:
                yield 'section', None, text
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            line_name = None
