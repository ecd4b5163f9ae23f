"""Who may import whom, and how large files may be, by reading all files."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

from processes import ROOT, needs_git, tracked_files

CODE = sorted({*ROOT.glob('*.py'), *ROOT.glob('plaingpt/**/*.py'), *ROOT.glob('tools/*.py')}
              - {ROOT / 'plaingpt/inference/remote_code.py'})  # it needs transformers
FILES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
         for path in CODE}  # name of a module → its file

# Each folder → the folders that it may import; besides, all may import from their own.
MAY_IMPORT = {
    'system': set(),
    'configurator': {'system'},
    'model': set(),
    'core': {'model', 'system'},
    'data': {'core', 'model', 'system'},
    'inference': {'core', 'model', 'configurator', 'data', 'system'},
    'monitoring': {'core', 'model', 'data', 'inference', 'system'},
    'checks': {'monitoring', 'core', 'model', 'data', 'system'}}
MAY_IMPORT['experiments'] = {'checks', 'configurator', 'inference', *MAY_IMPORT['checks']}
MAY_IMPORT['train'] = {*MAY_IMPORT}
MAY_IMPORT['plaingpt'] = {'core', 'inference', 'system'}  # load(), when it is called
MAY_IMPORT['__main__'] = {'plaingpt'}  # it runs the commands by their files
MAY_IMPORT['a command'] = {*MAY_IMPORT}
MAY_IMPORT['tools'] = {*MAY_IMPORT}  # commands too: torture trains in forks

# What a run names, such as a tokenizer, the core loads inside the function that needs it.
LOADED_BY_THE_CORE = {'plaingpt.data.tokenizers', 'plaingpt.data.chat_tokenizer',
                      'plaingpt.data.foreign_files', 'plaingpt.inference.open_weights',
                      'plaingpt.monitoring.backends'}

CORE = {'torch', 'numpy', 'safetensors', 'tqdm'}  # what importing a module may need


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding='utf-8'))


def folder_of(module):
    """'plaingpt.data.shards' → 'data', 'model' → 'model', 'train' → 'a command'."""
    first, *rest = module.split('.')
    if first == 'plaingpt':
        return rest[0] if rest else 'plaingpt'
    return first if first in MAY_IMPORT else 'a command'


def imports(path, local=True):
    """Names of the modules that a file imports; with local, inside functions too."""
    waiting = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if local or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f'{path}: a relative import'
            submodules = [f'{node.module}.{alias.name}' for alias in node.names]
            yield from {name if name in FILES else node.module for name in submodules}


def ours(path, local=True):
    """Those of `imports` that are in this tree."""
    return {name for name in imports(path, local) if name in FILES}


def test_folders_import_each_other_in_one_direction():
    wrong = [f'{module} → {name}: {folder_of(module)} must not import {folder_of(name)}'
             for module, path in FILES.items()
             for name in sorted(ours(path, local=module != 'model'))
             if not (folder_of(module) == 'core' and name in LOADED_BY_THE_CORE)
             and folder_of(name) not in
             MAY_IMPORT[folder_of(module)] | {folder_of(module)} - {'a command'}]
    assert not wrong, '\n'.join(wrong)


def test_the_core_can_be_imported_alone():
    for module, path in FILES.items():
        if folder_of(module) == 'core':
            assert {folder_of(name) for name in ours(path, local=False)} \
                <= {'core', 'model', 'system'}, module


def test_no_module_imports_itself_by_way_of_others():
    list(TopologicalSorter({module: ours(path, local=module != 'model')
                            for module, path in FILES.items()}).static_order())


def test_the_network_needs_torch_only():
    assert {name.split('.')[0] for name in imports(ROOT / 'model.py', local=False)} \
        <= sys.stdlib_module_names | {'torch'}


def test_importing_a_module_needs_only_the_core_packages():
    known = sys.stdlib_module_names | CORE | {name.split('.')[0] for name in FILES}
    wrong = [f'{path.relative_to(ROOT)} → {name}: import it where it is used'
             for path in CODE if 'tools' not in path.parts
             for name in imports(path, local=False) if name.split('.')[0] not in known]
    assert not wrong, '\n'.join(wrong)


def test_pickle_is_imported_where_the_contract_allows_it():
    # for nanoGPT's meta.pkl, which a tool writes for nanoGPT, and for the error that torch raises
    allowed = {'plaingpt.data.foreign_files', 'plaingpt.inference.pretrained', 'tools.peers',
               'tools.races'}
    assert {module for module, path in FILES.items() if 'pickle' in imports(path)} <= allowed


def test_nothing_loads_a_class_from_a_pickle():
    for path in CODE:
        for node in ast.walk(parsed(path)):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ''
            assert not call.startswith(('pickle.load(', 'pickle.loads(')), path
            assert not call.startswith('torch.load(') or 'weights_only=True' in call, path


def test_files_are_short():
    for path in [*CODE, *ROOT.glob('tests/**/*.py')]:
        assert len(path.read_text(encoding='utf-8').splitlines()) <= 500, path


def test_functions_are_short():
    for path in [*CODE, *ROOT.glob('tests/**/*.py')]:
        limit = 80 if path == ROOT / 'train.py' else 60  # its setup is one straight path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < limit, f'{path}: {node.name}'


def test_no_two_files_have_names_that_differ_by_a_letter():
    def shortened(name):
        return {name, *(name[:k] + name[k + 1:] for k in range(len(name)))}

    names = {path.stem for path in CODE} - {'__init__'}
    assert not [pair for pair in combinations(sorted(names), 2)
                if shortened(pair[0]) & shortened(pair[1])]


@needs_git
def test_the_root_is_seen_at_a_glance():
    entries = {Path(name).parts[0] for name in tracked_files() if not name.startswith('.')}
    assert len(entries) <= 28, sorted(entries)
