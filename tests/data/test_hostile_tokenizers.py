"""Descriptions of tokenizers that someone made to do harm."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ends_within

from plaingpt.data import tokenizers
from plaingpt.data.dataset import open_dataset
from plaingpt.data.foreign_tokenizer import OUR_TOKENIZER, read_tokenizer
from plaingpt.data.tokenizers import BPETokenizer, UnknownCharacter, from_json
from plaingpt.system.errors import UserError

BYTES = [chr(i) for i in range(256)]
TEXTS = ('', 'The cat sat. <|endoftext|><|user|>', '👍🏽 中文 é ½', 'a' * 50_000, '\ud800 x',
         ' ' * 50_000 + 'x', 'ab' * 1000, '\0\n\r\t\x85\u3000')
VALUES = (None, True, 7, -1, 2**62, 10**400, 1.5, float('nan'), float('inf'), '', 'a', [], {}, [[]],
          ['a'], {'a': 1}, 'x' * 10**6, '\ud800', '\x1b[31m\n', ['a', 'a'], [['a']] * 9)


def shuffled_merges(seed):
    """Tokens of two others each, in any order: many come before their parts."""
    rng, tokens = random.Random(seed), list(BYTES)
    for _ in range(300):
        token = rng.choice(tokens) + rng.choice(tokens)
        if token not in tokens:
            tokens.insert(rng.randrange(len(tokens) + 1), token)
    return tokens


def vocabularies():
    """Lists of tokens that are odd."""
    yield from (BYTES[::-1], random.Random(0).sample(BYTES, 256), [], BYTES[1:], BYTES[:-1])
    for token in ('<|endoftext|>', '<|padding|>', '<|user|>', 'hello', '(a+)+$', '(?<=a)b', '[', '',
                  'a', '€', '\ud800', '👍', 'a' * 10**6, ' ' * 10**6, '\0\0', '\xf0\x9f', '\r\n',
                  None, 7, -1, 2**62, 1.5, True, [], ['a'], {}, {'id': -1, 'content': 'x'}):
        yield from ([*BYTES, token], [token, *BYTES], [*BYTES, token, token])
    for letter in 'a \n':
        for lengths in (range(2, 2000), range(2000, 1, -1), [2**i for i in range(1, 17)],
                        [2**i for i in range(16, 0, -1)], [3, 7, 1000]):
            yield BYTES + [letter * i for i in lengths]
    yield BYTES + [a + b for a in BYTES for b in BYTES]
    yield from map(shuffled_merges, range(12))
    yield dict.fromkeys(BYTES, 0)


def descriptions():
    """The tokenizer of a meta.json, as text of JSON, odd in all ways."""
    found = [{'kind': 'bpe', 'tokens': tokens} for tokens in vocabularies()]
    found += [*VALUES, *({'kind': value} for value in VALUES)]
    for kind, key in (('bpe', 'tokens'), ('char', 'chars'), ('chat', 'base')):
        found += [{'kind': kind}, *({'kind': kind, key: value} for value in VALUES)]
    found += [{'kind': 'char', 'chars': chars} for chars in (
        'cba', 'aa', '\0', '\ud800\udfff', 'a\U0010ffff', ''.join(map(chr, range(0x11000))))]
    bases = [{'kind': 'chat', 'base': base} for base in (
        {'kind': 'chat', 'base': {'kind': 'byte'}}, {'kind': 'byte', 'tokens': 7},
        {'kind': 'bpe', 'tokens': [*BYTES, '<|user|>', '<|end|>']}, {'kind': 'char', 'chars': 'a'})]
    yield from (json.dumps(description) for description in found + bases)
    yield from ('', '{', '[' * 10**5, '{"kind":' * 10**5, '9' * 10**5, '-', '"\\ud800', '\ufeff{}',
                '{"kind": "char", "kind": "byte"}', '{"kind": "bpe", "tokens": [' + '[],' * 10**6)


def met(read, folder):
    """What a tokenizer makes of TEXTS, or the line that says why it is refused."""
    try:
        with ends_within(10):
            tokenizer = read(folder)
    except UserError as e:
        assert len(str(e).splitlines()) == 1 and len(str(e)) < 1000
        return 'refused'
    for text in TEXTS:
        try:
            with ends_within(10):
                ids = tokenizer.encode(text)
                back = tokenizer.decode(ids)
        except UnknownCharacter:
            continue
        assert np.all((ids >= 0) & (ids < tokenizer.vocab_size))
        assert back in (text, text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace'),
                        text.replace('\ud800', '\ufffd' * 3))
    return 'read'


def exported_with(description, folder):
    (folder / OUR_TOKENIZER).write_text(description)
    return lambda folder: from_json(read_tokenizer(folder))


def prepared_with(description, folder):
    """A meta.json with that tokenizer, and its size where it has one."""
    try:
        size = tokenizers.described_vocab_size(json.loads(description))
    except (ValueError, RecursionError):
        size = 258
    files = '[{"name": "x.bin", "tokens": 1, "sha256": ""}]'
    split = f'{{"tokens": 1, "files": {files}}}'
    (folder / 'meta.json').write_text(
        f'{{"format_version": 1, "dtype": "uint32", "vocab_size": {json.dumps(size)}, '
        f'"splits": {{"train": {split}, "val": {split}}}, "tokenizer": {description}}}')
    return lambda folder: open_dataset(folder).tokenizer()


@pytest.mark.slow
@pytest.mark.parametrize('write', [exported_with, prepared_with])
def test_a_hostile_tokenizer_is_refused_in_one_line_or_its_text_comes_back(write, tmp_path):
    outcomes = []
    for description in descriptions():
        read = write(description, tmp_path)
        try:
            outcomes.append(met(read, tmp_path))
        except BaseException as e:
            raise AssertionError(f'{description[-200:]}: {e!r}') from e
    assert len(outcomes) > 200 and outcomes.count('read') > 40


def test_a_library_that_gave_up_is_not_asked_again(monkeypatch):
    class PanicException(BaseException):
        pass

    asked = []

    def give_up(data):
        asked.append(data)
        raise PanicException

    monkeypatch.setattr(tokenizers, 'build_gigatoken', lambda _: SimpleNamespace(encode=give_up))
    tokenizer = BPETokenizer([bytes([i]) for i in range(256)])
    for _ in range(3):
        assert tokenizer.encode('text').tolist() == list(b'text')
    assert asked == [b'text'] and set(tokenizer.encoders) == {'tiktoken'}
