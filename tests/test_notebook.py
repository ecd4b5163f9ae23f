"""docs/notebook.ipynb runs from top to bottom, and shows what its cells print and draw.

    python tests/test_notebook.py    run it, and keep what the cells print and draw in it
"""

import ast
import base64
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / 'docs/notebook.ipynb'


def execute(notebook):
    """Run the code cells in order → the outputs of each, as a notebook keeps them."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    names, outputs = {}, []
    for cell in notebook['cells']:
        if cell['cell_type'] != 'code':
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(''.join(cell['source']), NOTEBOOK.name, 'exec'), names)
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
    """How many pictures there are."""
    return sum(output['output_type'] == 'display_data' for cell in outputs for output in cell)


def read():
    """→ the notebook, its code cells"""
    notebook = json.loads(NOTEBOOK.read_text(encoding='utf-8'))
    return notebook, [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def test_the_notebook_is_saved_with_its_pictures():
    assert pictures_of(cell['outputs'] for cell in read()[1]) == 3


@pytest.mark.parametrize('cell', read()[1], ids=lambda cell: str(cell['execution_count']))
def test_what_a_cell_imports_exists(cell):
    tree = ast.parse(''.join(cell['source']))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and 'matplotlib' not in ast.dump(node):
            exec(ast.unparse(node), {})  # raises ImportError


@pytest.mark.slow
def test_the_notebook_shows_what_its_cells_print(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib')
    from test_docs import first_missing
    monkeypatch.chdir(tmp_path)  # and back from where the notebook goes
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    notebook, code = read()
    outputs = execute(notebook)
    # which evaluations were the best so far is a matter of the last digits
    expected, printed = (texts_of(each).replace(' | best', '')
                         for each in ([cell['outputs'] for cell in code], outputs))
    assert first_missing(expected.splitlines(), printed) is None, printed
    assert pictures_of(outputs) == 3


if __name__ == '__main__':
    sys.path.insert(0, str(ROOT))
    os.environ['OMP_NUM_THREADS'] = '1'
    notebook, code = read()
    for n, (cell, outputs) in enumerate(zip(code, execute(notebook), strict=True), 1):
        cell.update(outputs=outputs, execution_count=n)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
