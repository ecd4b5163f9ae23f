"""A million white-space characters in a row are text like any other."""

import numpy as np
import pytest

from plaingpt.data import tokenizers
from plaingpt.data.tokenizers import BPETokenizer

LEARNED = BPETokenizer.train(['def f(x):\n        return x  # why\n\n\n'] * 9, 270)


@pytest.mark.parametrize('space', [' ', '\n', ' \t', '\u3000', '\x1c'])
@pytest.mark.parametrize('encoder', ['tiktoken', 'auto'])
def test_cutting_long_white_space_out_leaves_the_ids_unchanged(space, encoder, monkeypatch):
    tokenizer = BPETokenizer(LEARNED.tokens)
    tokenizer.choose_encoder(encoder)
    texts = [before + 100 * space + last + after + 60 * space for before in ('', 'a', ' a\n')
             for last in (' ', '\n', '') for after in ('', 'b', "'s", '7')]
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(tokenizers, 'LONG', 50)
    pattern = tokenizers.LONG_SPACE.pattern.replace('500000', '50')
    monkeypatch.setattr(tokenizers, 'LONG_SPACE', tokenizers.re.compile(pattern))
    for text, ids in zip(texts, expected, strict=True):
        assert np.array_equal(tokenizer.encode(text), ids), text


def test_millions_of_them_are_encoded_and_learned_from():
    text = 'a' + 1_200_000 * ' ' + 'b' + 1_200_000 * '\n'
    LEARNED.choose_encoder('tiktoken')
    assert LEARNED.decode(LEARNED.encode(text)) == text
    assert BPETokenizer.train([text], 260).vocab_size >= 258
