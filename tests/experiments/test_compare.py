import math

import compare
import pytest
from helpers import fails

from model import GPTConfig


def test_what_is_compared_and_with_what_is_asked_for(capsys, monkeypatch):
    for words, said in (('', 'name one comparison: race, own-text, prepare, generation'),
                        ('race', '--nanogpt=FOLDER'),
                        ('own-text --nanogpt=x --minutes=1', 'say which text'),
                        ('race --nanogpt=x --batchsize=3', "unknown key 'batchsize'")):
        assert said in fails(capsys, monkeypatch, compare.main, *words.split()), words


@pytest.mark.slow
def test_tokens_are_generated_beside_transformers(monkeypatch, capsys):
    pytest.importorskip('transformers')
    monkeypatch.setattr(compare, 'SHAPES', {'tiny': GPTConfig(128, 65, 2, 2, 32)})
    compare.main(['generation', '--rounds=1', '--device=cpu'])
    out = capsys.readouterr().out
    assert 'tiny, batch 8: 64 tokens after 64' in out
    assert all(math.isfinite(float(line.split()[2])) for line in out.splitlines()
               if line.startswith('  plainGPT'))
