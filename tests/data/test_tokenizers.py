"""Each tokenizer gives any text back; byte pairs are tiktoken's."""

import json
from functools import cache
from itertools import product

import numpy as np
import pytest
import tiktoken.registry
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_data import CHAT, ask, openai_gpt2

from plaingpt.data.chat_tokenizer import MARK, SPECIAL_TOKENS
from plaingpt.data.gigatoken import NEW_CHARACTERS, Gigatoken, fast_encode
from plaingpt.data.text_files import split_into_pieces
from plaingpt.data.tokenizer_choice import train_bpe
from plaingpt.data.tokenizers import (
    GPT2_PATTERN,
    PATTERN,
    BPETokenizer,
    ByteTokenizer,
    GPT2Tokenizer,
    ListTokenizer,
    from_json,
    vocab_size_of,
)
from plaingpt.inference.hf_export import hf_tokenizer
from plaingpt.system.errors import UserError

WORDS = "हिन्दी में ที่นี่ தமிழ் كَتَبَ e\u0301le\u0300ve it's we'LL 1234 ½ 中文。日本語\n(the cat)\r\n\t"
BPE = train_bpe([f'the cat sat on the mat, the cat {WORDS}', 'a .\n.\r\n'] * 3, 400)
BPE_1_0 = BPETokenizer(BPE.tokens, GPT2_PATTERN)
# Where pieces of words and control characters meet: the pattern of GPT-2 cuts between them.
CUTS = "abcstd 'lLrReEvV\n\r\t\x1f\x85\xa0\u200b\u3000ſé½٣中👍12.,-’\u0301\u088f\U00010940"
PARTS = [*CUTS, *WORDS, *WORDS.split(), *'👩‍👧🏽\ufe0f\u0489']


def of_all_scripts(max_parts=20):
    return st.lists(st.sampled_from(PARTS), max_size=max_parts).map(''.join)


# -----------------------------------------------------------------------------
# characters and bytes


@settings(max_examples=30)
@given(st.text(min_size=1), st.randoms())
def test_characters_come_back_whatever_their_order_in_the_vocabulary(text, chance):
    chars = sorted(set(text))
    chance.shuffle(chars)
    tokenizer = ListTokenizer(''.join(chars))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(chars)


def test_text_is_encoded_by_longest_match():
    tokenizer = ListTokenizer(['a', 'ab', ' ', 'abc', '<eos>'])
    assert tokenizer.encode('abcab a<eos>').tolist() == [3, 1, 2, 0, 4]
    assert tokenizer.decode([3, 1, 2, 0, 4]) == 'abcab a<eos>'
    with pytest.raises(UserError, match="'c'"):
        tokenizer.encode('abcc')


@pytest.mark.parametrize('tokens', ['ACGT', [*'ACGT', '<eos>'], [*'ACGT', 'ACG', ' ']])
def test_no_spaces_come_between_characters_or_if_a_space_is_a_token(tokens):
    tokenizer = ListTokenizer(tokens)
    assert tokenizer.decode(tokenizer.encode('GATTACA')) == 'GATTACA'


def test_spaces_separate_words_and_other_words_are_unknown():
    tokenizer = ListTokenizer(['<unk>', 'the', 'there', 'e4', '\n'])
    assert tokenizer.encode('the  there\t\nwhat the\te4e4 ').tolist() == [1, 2, 4, 0, 1, 3, 3]
    assert tokenizer.decode([1, 2, 4, 0, 1]) == 'the there\n<unk> the'
    assert tokenizer.encode(' ').tolist() == [0]
    assert ListTokenizer(['a', 'b', '\n\n']).decode([0, 1, 2]) == 'ab\n\n'


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


@pytest.mark.parametrize('tokenizer', [BPE, BPE_1_0])
@given(of_all_scripts())
def test_the_pattern_without_backtracking_splits_as_the_plain_one_does(tokenizer, text):
    plain = tiktoken.Encoding('plain', pat_str=tokenizer.pattern, special_tokens={},
                              mergeable_ranks=tokenizer.encoding._mergeable_ranks)
    assert tokenizer.encode(text).tolist() == plain.encode_ordinary(text)


@pytest.mark.parametrize('tokenizer', [BPE, BPE_1_0])
@given(of_all_scripts())
def test_its_tokenizer_json_and_gigatoken_give_its_ids(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    assert in_tokenizers(tokenizer).encode(text).ids == ids
    assert fast(tokenizer)(text).tolist() == ids


@cache
def in_tokenizers(tokenizer):
    return tokenizers.Tokenizer.from_str(json.dumps(hf_tokenizer(tokenizer)))


fast = cache(fast_encode)


@settings(max_examples=50)
@given(st.lists(of_all_scripts(2)))
@example(['12345678'] * 3)
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole_text(lines):
    text = ''.join(f'{line}z .\n' for line in lines)
    pieces, remainder = split_into_pieces(text, 23)
    for tokenizer in BPE, BPE_1_0:
        ids = [i for piece in [*pieces, remainder] for i in tokenizer.encode(piece)]
        assert ids == tokenizer.encode(text).tolist()


@pytest.mark.parametrize('word', [
    'हिन्दी', 'தமிழ்', 'ที่นี่', 'كَتَبَ', 'e\u0301le\u0300ve'],
    ids=['Hindi', 'Tamil', 'Thai', 'vocalized Arabic', 'decomposed French'])
def test_a_word_is_one_token_with_its_marks(word):
    tokenizer = train_bpe([f'{word} {word} '] * 3, 300)
    assert len(tokenizer.encode(f' {word}')) == 1


def test_numbers_are_split_into_digits():
    tokenizer = train_bpe(['12345 12345 '] * 9, 300)
    assert tokenizer.encode('12345').tolist() == [*b'12345']


def test_a_bpe_of_1_0_has_the_pattern_of_gpt_2():
    description = {'kind': 'bpe', 'tokens': [*map(chr, range(256)), '12', ".'"]}
    tokenizer = from_json(description)
    assert tokenizer.encode("1212\n.'").tolist() == [256, 256, *b'\n', 257]
    assert tokenizer.to_json() == description
    assert train_bpe(['12'], 258).to_json()['pattern'] != GPT2_PATTERN


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


@pytest.mark.parametrize('pattern', [
    PATTERN, pytest.param(GPT2_PATTERN, marks=pytest.mark.slow)], ids=['ours', "GPT-2's"])
def test_gigatoken_gives_the_ids_of_tiktoken_for_each_character_that_it_gets(pattern):
    gigatoken_rs = pytest.importorskip('gigatoken.gigatoken_rs')
    tokens = [*product(range(256)), *product(range(256), repeat=2)]
    slow = BPETokenizer([*map(bytes, tokens)], pattern)
    fast = Gigatoken(slow, gigatoken_rs.BPETokenizer)
    characters = [chr(i) for i in range(0x110000)
                  if not 0xd800 <= i < 0xe000 and not NEW_CHARACTERS.match(chr(i))]
    for i in range(0, len(characters), 1024):
        # letters, digits and white space stay together differently from all others
        text = ''.join(f"\n{c}'s{c}1 ({c}\n " for c in characters[i:i + 1024])
        assert np.array_equal(fast.encode(text), slow.encode(text)), characters[i]
    fast.cached_bytes = 2**26  # bytes, after which there is another encoder
    for text in "a\u088f's b", 'a\U00010940 b', '\U00020000 \ud800':  # it does not get these
        assert np.array_equal(fast.encode(text), slow.encode(text))


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


@pytest.mark.parametrize('tokenizer', [
    ListTokenizer('abc'), ListTokenizer(['a', 'bc', ' ']), ByteTokenizer(), BPE, CHAT])
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
        GPT2Tokenizer()
