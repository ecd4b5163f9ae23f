"""--help, read from the comments of a command's dataclass itself."""

import dataclasses
import inspect
import re


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
