from types import SimpleNamespace

import pytest
import torch
from foreign_models import shaken

from plaingpt.data.tokenizers import BPETokenizer, ByteTokenizer, ListTokenizer
from plaingpt.inference.text_generator import Logprobs, StreamDecoder, TextGenerator
from plaingpt.system.errors import UserError


def decode(tokenizer, ids, stop=()):
    """→ (pieces that were shown, how many tokens were taken, the whole text)."""
    pieces = []
    decoder = StreamDecoder(tokenizer, stop, pieces.append)
    taken = next((n for n, token in enumerate(ids, 1) if decoder.add(token)), len(ids))
    return pieces, taken, decoder.finish()


def test_a_stream_gives_whole_characters_as_decoding_all_at_once_does():
    text = 'naïve 日本 🎉!'
    assert decode(ByteTokenizer(), text.encode())[0] == [*text]
    for data in (text.encode(), b'a\xff\xe6b', b'\xe6\x97', b'\x80' * 9):
        pieces, _, whole = decode(ByteTokenizer(), data)
        assert ''.join(pieces) == whole == ByteTokenizer().decode(data)


def test_a_text_is_shown_up_to_a_stop_string():
    tokenizer = ListTokenizer(' DENenotw')
    for stop, expected, taken in (
            (['END'], 'one ', 7), (['x', 'two'], 'one END ', 11), (['one'], '', 3),
            (['D t'], 'one EN', 9), (['zzz', 'two!'], 'one END two', 11)):
        pieces, n, whole = decode(tokenizer, tokenizer.encode('one END two').tolist(), stop)
        assert ''.join(pieces) == whole == expected, stop
        assert n == taken, stop


@pytest.mark.parametrize(('data', 'stop'), [
    ('naïve 日本 🎉!'.encode(), []), (b'a\xff\xe6b', []), ('é日'.encode()[:-1], []),
    (b'one END two', ['END']), (b'one END two', ['zzz', 'two!']), ('a日b'.encode(), ['日b']),
    (b'one', ['one'])])
def test_tokens_with_logprobs_are_the_text_of_their_piece(data, stop):
    logprobs, pieces = Logprobs(1), []

    def on_text(piece):
        tokens, logprobs.completed = logprobs.completed, []
        pieces.append((piece, ''.join(text for text, *_ in tokens)))

    decoder = StreamDecoder(ByteTokenizer(), stop, on_text, logprobs=logprobs)
    for token in data:
        logprobs.on_logits(torch.zeros(1, 257))
        logprobs.add(token, decoder.next_start)
        if decoder.add(token):
            break
    text = decoder.finish()
    assert ''.join(piece for piece, _ in pieces) == text
    assert all(piece == tokens for piece, tokens in pieces)
    assert not any(text for text, *_ in logprobs.completed)


def test_a_token_of_several_characters_ends_with_the_text_before_a_stop_string():
    tokens = [b'a', b'xEN', b'D']
    tokenizer = SimpleNamespace(decode_bytes=lambda ids: b''.join(tokens[i] for i in ids))
    logprobs = Logprobs(0)
    decoder = StreamDecoder(tokenizer, ['END'], logprobs=logprobs)
    for token in range(3):
        logprobs.on_logits(torch.zeros(1, 3))
        logprobs.add(token, decoder.next_start)
        decoder.add(token)
    assert decoder.finish() == 'ax'
    assert [text for text, *_ in logprobs.completed] == ['a', 'x']


@pytest.mark.parametrize(('tokenizer', 'ids'), [
    (ByteTokenizer(), [256, 97, 98, 98, 97]), (ListTokenizer('ab'), [0, 1, 1, 0]),
    (BPETokenizer([bytes([i]) for i in range(256)]), [256, 97, 98, 98, 97])])
def test_each_token_of_a_text_has_its_log_probability(tokenizer, ids):
    model = shaken(tokenizer.vocab_size)
    logits = model(torch.tensor([ids]))[0][0]
    expected = [logits[i].log_softmax(-1)[token].item() for i, token in enumerate(ids[1:])]
    tokens, logprobs = zip(*TextGenerator(model, tokenizer).logprobs('abba'), strict=True)
    assert tokens == ('a', 'b', 'b', 'a')
    assert logprobs[-len(expected):] == pytest.approx(expected, abs=1e-5)
    if len(expected) == 3:  # the tokenizer has no end-of-text token
        assert logprobs[0] is None


@pytest.mark.parametrize('text', ['', 'a' * 300, None, ['a']])
def test_what_has_no_log_probabilities_is_refused(text):
    with pytest.raises(UserError, match='logprobs'):
        TextGenerator(shaken(257), ByteTokenizer()).logprobs(text)
