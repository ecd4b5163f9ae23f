import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

from plaingpt.data import tokenizers
from plaingpt.data.tokenizers import (
    BPETokenizer,
    BytePairTokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    described_vocab_size,
    from_json,
    make_tokenizer,
)
from plaingpt.system.errors import UserError

BPE = BPETokenizer.train(['the cat sat on the mat, the cat'] * 3, 270)
# Where pieces of words and control characters meet: the pattern of GPT-2 cuts between them.
CUTS = "abcstd 'lLrReEvV\n\r\t\x1f\x85\xa0\u200b\u3000ſé½٣中👍12.,-’\u0301\u088f\U00010940"


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / 'tiktoken_cache').exists():
        pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED names their folder)")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    return GPT2Tokenizer()


def as_tiktoken(tokenizer, text):
    return np.array_equal(tokenizer.encode(text),
                          tokenizer._encoding.encode_to_numpy(text, disallowed_special=()))


# -----------------------------------------------------------------------------
# characters and bytes


@settings(max_examples=100)
@given(st.text(min_size=1), st.randoms())
def test_characters_come_back_whatever_their_order_in_the_vocabulary(text, chance):
    chars = sorted(set(text))
    chance.shuffle(chars)
    tokenizer = CharTokenizer(''.join(chars))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.max() < tokenizer.vocab_size == len(set(text))


def test_char_ids_are_in_code_point_order_as_in_nanogpt():
    ids = CharTokenizer.train('hello world').encode('dehlorw ')
    assert ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


def test_a_character_outside_the_vocabulary_is_named_with_its_place():
    with pytest.raises(UserError, match=r"'é' in 'abcé'"):
        CharTokenizer.train('abc').encode('abcé')
    with pytest.raises(UserError, match=r"'A' in "):
        CharTokenizer.train('abc').encode('A')


@settings(max_examples=200)
@given(st.text())
def test_any_text_comes_back_from_bytes(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, *ids, 256]) == text


@given(st.binary())
def test_bytes_that_are_no_utf8_decode_without_an_error(data):
    assert ByteTokenizer().decode(list(data)) == data.decode('utf-8', 'replace')


# -----------------------------------------------------------------------------
# byte pairs


def test_gpt2_gives_the_published_ids(gpt2):
    ids = gpt2.encode("Hello, I'm a language model,")
    assert ids.tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.decode(ids) == "Hello, I'm a language model,"
    assert gpt2.decode([gpt2.end_of_text]) == '<|endoftext|>'
    assert gpt2.encode('<|endoftext|>').max() < gpt2.end_of_text  # text is never a control token


def test_gpt2_ids_are_those_of_tiktoken_for_each_character_that_gigatoken_gets(gpt2):
    pytest.importorskip('gigatoken')
    characters = [chr(i) for i in range(0x110000)
                  if not 0xd800 <= i < 0xe000
                  and not BytePairTokenizer.NEW_CHARACTERS.match(chr(i))]
    assert len(characters) > 65_000
    for i in range(0, len(characters), 1024):
        # letters, digits and white space keep together differently from all others
        same = as_tiktoken(gpt2, ''.join(f"\n{c}'s{c}1 " for c in characters[i:i + 1024]))
        assert same, characters[i]


@pytest.mark.parametrize('gigatoken', [True, False])
def test_gpt2_text_comes_back_and_its_ids_are_those_of_tiktoken(
        gigatoken, gpt2, text_file, monkeypatch):
    if not gigatoken:
        monkeypatch.setitem(sys.modules, 'gigatoken.gigatoken_rs', None)
    text = text_file.read_text()[:20_000] + ('ſ’S 中文 ½ ٣ 👍🏽 \u3000\x85 ' + 'ab' * 500) * 9
    monkeypatch.setattr(BytePairTokenizer, 'RENEWAL_BYTES', 1000)
    for length in (1, 10, 100, 100_000):
        for start in range(0, 25_000, 4973):
            assert as_tiktoken(gpt2, text[start:start + length])
    assert gpt2.decode(gpt2.encode(text)) == text


@settings(max_examples=200)
@given(st.text(CUTS) | st.text())
def test_any_text_comes_back_from_bpe_and_its_ids_are_those_of_tiktoken(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert not set(ids.tolist()) & {BPE.end_of_text, BPE.end_of_text + 1}
    assert as_tiktoken(BPE, text)


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(codec=None, categories=['Cs', 'Ll', 'Zs'])))
def test_half_a_character_becomes_a_replacement_character(text):
    whole = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    assert BPE.decode(BPE.encode(text)) == whole


def test_gigatoken_is_not_called_twice_at_once(monkeypatch):
    class Slow:
        inside = 0

        def encode(self, data):
            self.inside += 1
            time.sleep(0.001)  # the other threads run
            self.inside -= 1
            assert not self.inside  # gigatoken raises 'Already borrowed'
            return np.frombuffer(data, 'u1')

    monkeypatch.setattr(tokenizers, 'build_gigatoken', lambda encoding: Slow())
    encode = BytePairTokenizer(BPE._encoding).encode
    with ThreadPoolExecutor(8) as pool:
        assert [bytes(ids) for ids in pool.map(encode, ['text'] * 50)] == [b'text'] * 50


def test_after_a_panic_of_gigatoken_tiktoken_finds_the_ids(monkeypatch):
    class PanicException(BaseException):
        pass

    class Broken:
        calls = 0

        def encode(self, data):
            Broken.calls += 1
            raise PanicException

    monkeypatch.setattr(tokenizers, 'build_gigatoken', lambda encoding: Broken())
    tokenizer = BytePairTokenizer(BPE._encoding)
    for _ in range(3):
        assert as_tiktoken(tokenizer, 'the cat')
    assert Broken.calls == 1


def test_bpe_learns_the_frequent_pieces_of_its_text():
    assert BPE.vocab_size == 270 and b' the' in BPE.tokens
    assert len(BPE.encode(' the')) == 1
    assert BPE.encode('<|endoftext|>').max() < BPE.end_of_text  # text is never a control token
    with pytest.raises(UserError, match='bpe:258'):
        make_tokenizer('bpe:257', ['text'])


# -----------------------------------------------------------------------------
# descriptions


def test_a_tokenizer_comes_back_from_its_json():
    for tokenizer in (CharTokenizer('abc'), ByteTokenizer(), BPE):
        again = from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert described_vocab_size(tokenizer.to_json()) == tokenizer.vocab_size
        assert type(again) is type(tokenizer)
        assert np.array_equal(again.encode('abca'), tokenizer.encode('abca'))


def test_a_description_that_is_no_tokenizer_is_an_error():
    for description in (None, {}, {'kind': 'magic'}, {'kind': 'char'}, {'kind': 'bpe'}):
        with pytest.raises(UserError, match='unknown tokenizer'):
            from_json(description)


def test_a_tokenizer_that_cannot_be_downloaded_says_what_to_do(monkeypatch, tmp_path):
    import tiktoken.registry

    def no_network(*_, **__):
        raise OSError('no network here')

    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    monkeypatch.setattr(socket, 'getaddrinfo', no_network)
    with pytest.raises(UserError, match='TIKTOKEN_CACHE_DIR'):
        make_tokenizer('gpt2', '')
