"""Mutation testing: break the code in one place at a time, and list what the tests do not notice.

    python tools/mutants.py model.py train.py plaingpt/core > mutants.txt

Samples 20 mutants of each file or folder: an operator inverted, a constant changed, a statement
removed, two arguments swapped. For each it runs tests of `make test` that execute the lines, also
in forks: all tests of the same subject, and 30 quick ones of other subjects. A mutant survives if
all pass; some survivors do not change any result.
"""

import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, '-m', 'pytest']
COUNT, SEED, MAX_OTHER_TESTS, TIMEOUT_S = 20, 1, 30, 1800
COPIES = 2  # of the project; that many mutants are tested in parallel
INVERTED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
            ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
            ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
            ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}


def mutate(node):
    """A mutant of a syntax tree node, as code, or None."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in INVERTED:
            new.ops[0] = INVERTED[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in INVERTED:
            new.op = INVERTED[type(op)]()
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.Call(args=[first, second, *_]):
            new.args[:2] = second, first
        case ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Return() | ast.Expr(ast.Call()):
            return 'pass'
        case _:
            return None
    return f'({ast.unparse(new)})'


def mutants(folder, file):
    """Yield all mutants of a file: (file, range of lines, slice of bytes, old code, new code)."""
    source = (folder / file).read_bytes()
    line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node in ast.walk(ast.parse(source)):
        code = mutate(node)
        if code:
            yield (file, range(node.lineno, node.end_lineno + 1),
                   slice(line_starts[node.lineno - 1] + node.col_offset,
                         line_starts[node.end_lineno - 1] + node.end_col_offset),
                   ast.unparse(node), code)


def map_tests(folder):
    """Run the tests of a copy, which must pass → ({file: {line: tests that execute it}},
    {test: number of lines that it executes})"""
    (folder / '.coveragerc').write_text('[run]\npatch = _exit\nparallel = true\n')  # also in forks
    subprocess.run([*PYTEST, '-n', '2', f'--cov={folder}', '--cov-report=', '--cov-context=test'],
                   cwd=folder, stdout=sys.stderr, check=True)
    coverage, sizes = defaultdict(dict), Counter()
    data = CoverageData(folder / '.coverage')
    data.read()
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.rpartition('|')[0] for context in contexts} - {''}
            coverage[os.path.relpath(file, folder)][line] = tests
            sizes.update(tests)
    return coverage, sizes


def tests_of(mutant, coverage, sizes):
    """The tests to run for a mutant, in order."""
    file, lines, *_ = mutant
    tests_by_line = [coverage[file][n] for n in lines if n in coverage[file]]
    tests = set().union(*tests_by_line)
    if tests_by_line and not tests:  # executed only during import
        tests = set().union(*coverage[file].values())

    def is_related(test):
        path = Path(test.partition('::')[0])
        folder = 'core' if file == 'train.py' else Path(file).parent.name
        return (path.parent.name == folder
                or path.stem.removeprefix('test_').startswith(Path(file).stem))

    related, others = [], []
    for test in sorted(tests, key=sizes.get):
        (related if is_related(test) else others).append(test)
    return related + others[:MAX_OTHER_TESTS]


def is_noticed(folder, mutant, tests):
    """Whether a test fails or hangs in a copy of the project with this mutant."""
    file, _, place, _, code = mutant
    source = (folder / file).read_bytes()
    (folder / file).write_bytes(source[:place.start] + code.encode() + source[place.stop:])
    try:
        return bool(tests) and subprocess.run(
            [*PYTEST, '-x', '-n', '0', *tests], cwd=folder, capture_output=True,
            timeout=TIMEOUT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        (folder / file).write_bytes(source)


def main(names):
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(COPIES) as pool:
        folders = [Path(temporary, f'copy{n}') for n in range(COPIES)]
        for folder in folders:
            subprocess.run(['git', 'clone', '-q', ROOT, folder], check=True)
        coverage, sizes = map_tests(folders[0])
        idle = SimpleQueue()
        for folder in folders:
            idle.put(folder)

        def try_mutant(mutant):
            folder = idle.get()
            try:
                return is_noticed(folder, mutant, tests_of(mutant, coverage, sizes))
            finally:
                idle.put(folder)

        for name in names:
            files = [name] if name.endswith('.py') else sorted(
                str(path.relative_to(folders[0])) for path in (folders[0] / name).rglob('*.py'))
            candidates = [mutant for file in files for mutant in mutants(folders[0], file)]
            sampled = random.Random(SEED).sample(candidates, min(COUNT, len(candidates)))
            num_noticed = 0
            for mutant, noticed in zip(sampled, pool.map(try_mutant, sampled), strict=True):
                if noticed:
                    num_noticed += 1
                else:
                    file, lines, _, code, new = mutant
                    print(f'    {file}:{lines.start}: {code}  →  {new}', flush=True)
            print(f'{name}: {num_noticed} of {len(sampled)} noticed', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
