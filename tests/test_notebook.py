"""The notebooks in docs/ run from top to bottom, and show what their cells print and draw.

how-it-trains.ipynb is made from the page how-it-trains.md, whose Python blocks are its cells. The
page shows the same outputs: a block of text after the cell, and the picture.

    python tests/test_notebook.py         run both, and save what their cells print and draw
    python tests/test_notebook.py page    only the page and its notebook
"""

import ast
import base64
import io
import json
import math
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [ROOT / 'docs/notebook.ipynb', ROOT / 'docs/how-it-trains.ipynb']
PAGE = ROOT / 'docs/how-it-trains.md'
# a Python block of the page, what it printed, and the picture that it drew
CELL = re.compile(r'```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?(?:\n(!\[[^\n]*\)\n))?', re.S)


def execute(notebook):
    """Run the code cells in order → the outputs of each, as a notebook keeps them."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    names, outputs = {}, []
    for cell in code_cells(notebook):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(''.join(cell['source']), 'cell', 'exec'), names)
        outputs.append([{'output_type': 'stream', 'name': 'stdout',
                         'text': printed.getvalue().splitlines(keepends=True)}]
                       if printed.getvalue() else [])
        for number in pyplot.get_fignums():
            png = io.BytesIO()
            pyplot.figure(number).savefig(png, dpi=80, bbox_inches='tight')
            outputs[-1].append({'output_type': 'display_data', 'metadata': {}, 'data': {
                'image/png': base64.b64encode(png.getvalue()).decode(),
                'text/plain': ['<a picture>']}})
        pyplot.close('all')
    return outputs


def texts_of(outputs):
    return ''.join(''.join(output['text']) for cell in outputs for output in cell
                   if output['output_type'] == 'stream')


def pictures_of(outputs):
    """The pictures (PNG) of a list of outputs."""
    return [base64.b64decode(output['data']['image/png']) for cell in outputs for output in cell
            if output['output_type'] == 'display_data']


def read(path):
    return json.loads(path.read_text(encoding='utf-8'))


def code_cells(notebook):
    return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def saved_outputs(notebook):
    return [cell['outputs'] for cell in code_cells(notebook)]


def parts_of_page():
    """How how-it-trains.md splits into cells: (kind, source, printed text, picture), …"""
    text = PAGE.read_text(encoding='utf-8')
    end = 0
    for match in CELL.finditer(text):
        yield 'markdown', text[end:match.start()].strip('\n'), '', ''
        yield 'code', match[1].strip('\n'), match[2] or '', match[3] or ''
        end = match.end()
    yield 'markdown', text[end:].strip('\n'), '', ''


def notebook_of_page():
    """The notebook of how-it-trains.md, without outputs: the page's title, the cell of the other
    notebook that installs plainGPT, then the remaining page."""
    notebook = read(NOTEBOOKS[0])
    install = code_cells(notebook)[0]['source']
    title, *cells = [new_cell(kind, source.splitlines(keepends=True))
                     for kind, source, *_ in parts_of_page()]
    return notebook | {'cells': [title, new_cell('code', install), *cells]}


def new_cell(kind, source):
    cell = {'cell_type': kind, 'metadata': {}, 'source': source}
    if kind == 'code':
        cell |= {'outputs': [], 'execution_count': None}
    return cell


@pytest.mark.parametrize('path, count', zip(NOTEBOOKS, (3, 1), strict=True))
def test_a_notebook_is_saved_with_its_pictures(path, count):
    assert len(pictures_of(saved_outputs(read(path)))) == count


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_what_the_cells_import_exists(path):
    for cell in code_cells(read(path)):
        for node in ast.walk(ast.parse(''.join(cell['source']))):
            if isinstance(node, ast.Import | ast.ImportFrom) and 'matplotlib' not in ast.dump(node):
                exec(ast.unparse(node), {})  # raises ImportError


def test_the_page_and_its_notebook_have_the_same_cells_and_outputs():
    saved, made = read(NOTEBOOKS[1]), notebook_of_page()
    assert [cell['source'] for cell in saved['cells']] == [cell['source'] for cell in made['cells']]
    shown = [printed for kind, _, printed, _ in parts_of_page() if kind == 'code']
    assert shown == [texts_of([outputs]) for outputs in saved_outputs(saved)[1:]]
    assert pictures_of(saved_outputs(saved)) == [PAGE.with_suffix('.png').read_bytes()]


def test_the_page_shows_that_hand_and_torch_agree():
    printed = texts_of(saved_outputs(read(NOTEBOOKS[1])))
    assert f'loss of model.py: {math.log(2048):.4f}' in printed
    updates = re.findall(r'by hand (\S+) torch (\S+)', printed)
    assert len(updates) == 3 and all(by_hand == by_torch for by_hand, by_torch in updates)


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_print(path, tmp_path, monkeypatch):
    pytest.importorskip('matplotlib')
    from test_docs import first_missing
    monkeypatch.chdir(tmp_path)  # and back from where the notebook goes
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    notebook = read(path)
    outputs = execute(notebook)
    comparable = without_text if path == NOTEBOOKS[1] else without_best
    expected, printed = (comparable(texts_of(each))
                         for each in (saved_outputs(notebook), outputs))
    assert first_missing(expected.splitlines(), printed) is None, printed
    assert len(pictures_of(outputs)) == len(pictures_of(saved_outputs(notebook)))


def without_best(printed):
    """Which evaluations were the best so far is a matter of the last digits."""
    return printed.replace(' | best', '')


def without_text(printed):
    """On the page, text follows a bar. It depends on Python's version, whose library is the data,
    and a sample on the last digits."""
    return re.sub(r'\|.*', '', printed)


def run_and_save(path, notebook):
    outputs = execute(notebook)
    for n, (cell, saved) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell.update(outputs=saved, execution_count=n)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    return outputs


def write_page(outputs):
    """Write how-it-trains.md with the outputs of its cells, and its picture."""
    remaining = iter(outputs)

    def with_output(match):
        code, _, picture = match.groups()
        printed = texts_of([next(remaining)])
        return ''.join((f'```python\n{code}```\n', f'\n```text\n{printed}```\n' if printed else '',
                        f'\n{picture}' if picture else ''))
    text = CELL.sub(with_output, PAGE.read_text(encoding='utf-8'))
    PAGE.write_text(text, encoding='utf-8')
    PAGE.with_suffix('.png').write_bytes(*pictures_of(outputs))


if __name__ == '__main__':
    sys.path.insert(0, str(ROOT))
    os.environ['OMP_NUM_THREADS'] = '1'
    os.chdir(tempfile.mkdtemp())
    if 'page' not in sys.argv:
        run_and_save(NOTEBOOKS[0], read(NOTEBOOKS[0]))
    write_page(run_and_save(NOTEBOOKS[1], notebook_of_page())[1:])
