"""Exports in the newest transformers, and in the last one that has another name for the cache."""

import os
import subprocess
import sys

import pytest
from processes import ROOT

TESTS = [f'tests/inference/{name}.py' for name in ('test_exports', 'test_chat_export')]


@pytest.mark.slow
@pytest.mark.parametrize('requirement', ['transformers', 'transformers==5.23.0'])
def test_exports_work_in_another_version_of_transformers(requirement, tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', f'--target={tmp_path}',
         '--retries=1', '--timeout=15', requirement], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'pip install {requirement} failed: {done.stderr.strip()[-300:]}')
    [info] = tmp_path.glob('transformers-*.dist-info')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-x', '-n', '0', *TESTS], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, 'PYTHONPATH': str(tmp_path)}, timeout=900)
    assert done.returncode == 0, f'{info.stem}: {done.stdout[-5000:]}'
