import pytest
import torch
from foreign_models import shaken

from plaingpt.data.tokenizers import BPETokenizer, ByteTokenizer, ListTokenizer
from plaingpt.inference.text_generator import StreamDecoder, TextGenerator


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
