"""Each tokenizer gives any text back; byte pairs are tiktoken's."""

import json
import socket
import sys
import time

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import CHAT, SHARED, ask

from plaingpt.data import gigatoken
from plaingpt.data.chat_tokenizer import MARK, SPECIAL_TOKENS
from plaingpt.data.gigatoken import NEW_CHARACTERS, Gigatoken, fast_encode
from plaingpt.data.tokenizer_choice import make_tokenizer, train_bpe
from plaingpt.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    described_vocab_size,
    from_json,
)
from plaingpt.system.errors import UserError

BPE = train_bpe(['the cat sat on the mat, the cat'] * 3, 270)
# Where pieces of words and control characters meet: the pattern of GPT-2 cuts between them.
CUTS = "abcstd 'lLrReEvV\n\r\t\x1f\x85\xa0\u200b\u3000ſé½٣中👍12.,-’\u0301\u088f\U00010940"


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / 'tiktoken_cache').exists():
        pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED names their folder)")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    return GPT2Tokenizer()


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


def test_char_ids_are_in_code_point_order_as_in_nanogpt_and_a_missing_one_is_named():
    tokenizer = make_tokenizer('char', ['hello', ' world'])
    assert tokenizer.encode('dehlorw ').tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(UserError, match=r"'é' in 'helé'"):
        tokenizer.encode('helé')


@settings(max_examples=200)
@given(st.text(), st.binary())
def test_any_text_comes_back_from_bytes_and_any_bytes_decode(text, data):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, *tokenizer.encode(text), 256]) == text
    assert tokenizer.decode(list(data)) == data.decode('utf-8', 'replace')


# -----------------------------------------------------------------------------
# byte pairs


def test_gpt2_gives_the_published_ids(gpt2):
    ids = gpt2.encode("Hello, I'm a language model,")
    assert ids.tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.decode(ids) == "Hello, I'm a language model,"
    assert gpt2.decode([gpt2.end_of_text]) == '<|endoftext|>'
    assert gpt2.encode('<|endoftext|>').max() < gpt2.end_of_text  # text is never a control token


def test_bpe_learns_the_frequent_pieces_of_its_text():
    assert BPE.vocab_size == 270 and b' the' in BPE.tokens and len(BPE.encode(' the')) == 1


@settings(max_examples=200)
@given(st.text(CUTS) | st.text())
def test_any_text_comes_back_from_bpe_and_is_never_a_control_token(text):
    ids = BPE.encode(text)
    assert (BPE.decode(ids) == text and not ids.size) or ids.max() < BPE.end_of_text


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(codec=None, categories=['Cs', 'Ll', 'Zs'])))
def test_half_a_character_becomes_a_replacement_character(text):
    whole = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    assert BPE.decode(BPE.encode(text)) == whole


# -----------------------------------------------------------------------------
# conversations


@settings(max_examples=50)
@given(st.text(st.characters(codec='utf-8', exclude_characters=[MARK]))
       | st.sampled_from(SPECIAL_TOKENS).map(lambda name: f'a {name} b'))
def test_no_text_becomes_a_special_token_and_the_template_writes_what_is_encoded(text):
    messages = ask(text, text)
    ids, loss_mask = CHAT.encode_conversation(messages)
    size = len(text.encode('utf-8', 'surrogatepass'))
    assert np.flatnonzero(ids >= 257).tolist() == [0, 1, 2 + size, 3 + size, 4 + 2 * size]
    assert CHAT.decode(ids) == f'<|conversation|><|user|>{text}<|end|><|assistant|>{text}<|end|>'
    assert CHAT.encode_prompt(messages[:1]).tolist() == ids[:4 + size].tolist()
    rendered = CHAT.rendered_parts(CHAT.guard(messages))
    assert np.concatenate([part for part, _ in rendered]).tolist() == ids.tolist()
    assert sum(len(part) for part, learned in rendered if learned) == size + 1 == loss_mask.sum()


@pytest.mark.parametrize('character', 'a 1.\n')
def test_a_long_run_of_one_character_is_encoded_in_seconds(character, gpt2):
    for tokenizer in gpt2, BPE:
        began = time.perf_counter()
        ids = tokenizer.encode(character * 1_000_000)
        assert time.perf_counter() - began < 20  # tiktoken before 0.13 took minutes
        assert tokenizer.decode(ids.tolist()) == character * 1_000_000


@given(st.text(alphabet=" \n\t\r\u3000a'sé中1_.", max_size=30))
def test_the_pattern_without_backtracking_splits_as_gpt_2s_does(text):
    ranks = BPE.encoding._mergeable_ranks
    plain = tiktoken.Encoding('plain', pat_str=BPETokenizer.PATTERN, mergeable_ranks=ranks,
                              special_tokens={})
    assert BPE.encode(text).tolist() == plain.encode_ordinary(text)


def test_gigatoken_gives_the_ids_of_tiktoken_for_each_character_that_it_gets(gpt2, monkeypatch):
    pytest.importorskip('gigatoken')
    monkeypatch.setattr(gigatoken, 'CACHE_BYTES', 10_000)
    encode = fast_encode(gpt2)
    assert encode != gpt2.encode
    characters = [chr(i) for i in range(0x110000)
                  if not 0xd800 <= i < 0xe000 and not NEW_CHARACTERS.match(chr(i))]
    assert len(characters) > 65_000
    for i in range(0, len(characters), 1024):
        # letters, digits and white space stay together differently from all others
        text = ''.join(f"\n{c}'s{c}1 " for c in characters[i:i + 1024])
        assert np.array_equal(encode(text), gpt2.encode(text)), characters[i]
    assert np.array_equal(encode('\U00020000 \ud800'), gpt2.encode('\U00020000 \ud800'))


class WrongIds:
    """As gigatoken's class, with ids that are not tiktoken's."""

    def from_tiktoken(path, pretokenizer):
        return WrongIds()

    def encode(self, data):
        return np.zeros(len(data))


def test_other_ids_of_gigatoken_are_noticed():
    with pytest.raises(UserError, match='uninstall gigatoken'):
        Gigatoken(BPE, WrongIds).encode('the cat')


def test_without_gigatoken_tiktoken_encodes(monkeypatch):
    monkeypatch.setitem(sys.modules, 'gigatoken.gigatoken_rs', None)
    assert fast_encode(BPE) == BPE.encode


# -----------------------------------------------------------------------------
# descriptions


def test_a_tokenizer_comes_back_from_its_json():
    for tokenizer in (CharTokenizer('abc'), ByteTokenizer(), BPE, CHAT):
        again = from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert described_vocab_size(tokenizer.to_json()) == tokenizer.vocab_size
        assert type(again) is type(tokenizer)
        assert np.array_equal(again.encode('abca'), tokenizer.encode('abca'))
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
