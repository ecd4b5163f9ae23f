import math

import compare
import pytest

from model import GPTConfig


@pytest.mark.slow
def test_tokens_are_generated_beside_transformers(monkeypatch, capsys):
    pytest.importorskip('transformers')
    monkeypatch.setattr(compare, 'SHAPES', {'tiny': GPTConfig(128, 65, 2, 2, 32)})
    compare.main(['generation', '--rounds=1', '--device=cpu'])
    out = capsys.readouterr().out
    assert 'tiny, batch 8: 64 tokens after 64' in out
    assert all(math.isfinite(float(line.split()[2])) for line in out.splitlines()
               if line.startswith('  plainGPT'))
