"""Each tokenizer gives any text back; byte pairs are tiktoken's."""

import json

import numpy as np
import pytest
import tiktoken.registry
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import CHAT, ask, openai_gpt2

from plaingpt.data.chat_tokenizer import MARK, SPECIAL_TOKENS
from plaingpt.data.gigatoken import NEW_CHARACTERS, Gigatoken
from plaingpt.data.tokenizer_choice import make_tokenizer, train_bpe
from plaingpt.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    from_json,
    vocab_size_of,
)
from plaingpt.system.errors import UserError

BPE = train_bpe(['the cat sat on the mat, the cat'] * 3, 270)
# Where pieces of words and control characters meet: the pattern of GPT-2 cuts between them.
CUTS = "abcstd 'lLrReEvV\n\r\t\x1f\x85\xa0\u200b\u3000ſé½٣中👍12.,-’\u0301\u088f\U00010940"


# -----------------------------------------------------------------------------
# characters and bytes


@settings(max_examples=100)
@given(st.text(min_size=1), st.randoms())
def test_characters_come_back_whatever_their_order_in_the_vocabulary(text, chance):
    chars = sorted(set(text))
    chance.shuffle(chars)
    tokenizer = CharTokenizer(''.join(chars))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(chars)


def test_char_ids_are_in_code_point_order_as_in_nanogpt():
    tokenizer = make_tokenizer('char', ['hello', ' world'])
    assert tokenizer.encode('dehlorw ').tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


@settings(max_examples=200)
@given(st.text())
def test_any_text_comes_back_from_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, *tokenizer.encode(text), 256]) == text


# -----------------------------------------------------------------------------
# byte pairs


def test_gpt2_gives_the_published_ids(real_gpt2):
    ids = GPT2Tokenizer().encode("Hello, I'm a language model,")
    assert ids.tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


def test_text_is_never_the_end_of_text_token_of_gpt2():
    gpt2 = GPT2Tokenizer()
    assert gpt2.decode([gpt2.end_of_text]) == '<|endoftext|>'
    assert gpt2.end_of_text not in gpt2.encode('<|endoftext|>')


@settings(max_examples=200)
@given(st.text(CUTS) | st.text() | st.just('<|endoftext|>'))
def test_any_text_comes_back_from_bpe(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.end_of_text not in ids


@given(st.text(alphabet=" \n\t\r\u3000a'sé中1_.", max_size=30))
def test_the_pattern_without_backtracking_splits_as_gpt_2s_does(text):
    ranks = BPE.encoding._mergeable_ranks
    plain = tiktoken.Encoding('plain', pat_str=BPETokenizer.PATTERN, mergeable_ranks=ranks,
                              special_tokens={})
    assert BPE.encode(text).tolist() == plain.encode_ordinary(text)


# -----------------------------------------------------------------------------
# conversations


@settings(max_examples=50)
@given(st.text(st.characters(codec='utf-8', exclude_characters=[MARK]))
       | st.sampled_from(SPECIAL_TOKENS).map(lambda name: f'a {name} b'))
def test_no_text_becomes_a_special_token(text):
    ids, _ = CHAT.encode_conversation(ask(text, text))
    size = len(text.encode('utf-8', 'surrogatepass'))
    assert np.flatnonzero(ids >= 257).tolist() == [0, 1, 2 + size, 3 + size, 4 + 2 * size]
    assert CHAT.decode(ids) == f'<|conversation|><|user|>{text}<|end|><|assistant|>{text}<|end|>'


@pytest.mark.parametrize('text', ['hi', 'a <|end|> b'])
def test_the_template_writes_the_tokens_that_are_trained_on(text):
    ids, loss_mask = CHAT.encode_conversation(messages := ask(text, text))
    rendered = CHAT._rendered_segments(CHAT.escape(messages))
    assert np.concatenate([part for part, _ in rendered]).tolist() == ids.tolist()
    assert sum(len(part) for part, learned in rendered if learned) == loss_mask.sum()
    assert CHAT.encode_prompt(messages[:1]).tolist() == ids[:4 + len(text)].tolist()


# -----------------------------------------------------------------------------
# gigatoken


def test_gigatoken_gives_the_ids_of_tiktoken_for_each_character_that_it_gets():
    gigatoken_rs = pytest.importorskip('gigatoken.gigatoken_rs')
    gpt2 = GPT2Tokenizer()
    fast = Gigatoken(gpt2, gigatoken_rs.BPETokenizer)
    characters = [chr(i) for i in range(0x110000)
                  if not 0xd800 <= i < 0xe000 and not NEW_CHARACTERS.match(chr(i))]
    for i in range(0, len(characters), 1024):
        # letters, digits and white space stay together differently from all others
        text = ''.join(f"\n{c}'s{c}1 " for c in characters[i:i + 1024])
        assert np.array_equal(fast.encode(text), gpt2.encode(text)), characters[i]
    fast.cached_bytes = 2**26  # bytes, after which there is another encoder
    for text in "a\u088f's b", 'a\U00010940 b', '\U00020000 \ud800':  # it does not get these
        assert np.array_equal(fast.encode(text), gpt2.encode(text))


class WrongIds:
    """As gigatoken's class, with ids that are not tiktoken's."""

    def from_tiktoken(path, pretokenizer):
        return WrongIds()

    def encode(self, data):
        return np.zeros(len(data))


def test_other_ids_of_gigatoken_are_an_error():
    with pytest.raises(UserError, match='pip uninstall gigatoken'):
        Gigatoken(BPE, WrongIds).encode('the cat')


# -----------------------------------------------------------------------------
# descriptions


@pytest.mark.parametrize('tokenizer', [CharTokenizer('abc'), ByteTokenizer(), BPE, CHAT])
def test_a_tokenizer_comes_back_from_its_json(tokenizer):
    again = from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert type(again) is type(tokenizer)
    assert np.array_equal(again.encode('abca'), tokenizer.encode('abca'))
    assert vocab_size_of(tokenizer.to_json()) == tokenizer.vocab_size


def test_a_tokenizer_that_cannot_be_downloaded_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    monkeypatch.setattr(tiktoken.registry, 'ENCODING_CONSTRUCTORS', {'gpt2': openai_gpt2})
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # where nothing listens
    with pytest.raises(UserError, match=r'TIKTOKEN_CACHE_DIR.*bpe:512'):
        make_tokenizer('gpt2', '')
