from plaingpt.data.tokenizers import ByteTokenizer, ListTokenizer
from plaingpt.inference.text_generator import StreamDecoder


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
