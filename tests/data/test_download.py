"""The download of a text."""

import hashlib

import prepare
from plaingpt.data.corpora import CORPORA, Corpus
from plaingpt.data.dataset import open_dataset


def test_a_text_that_does_not_arrive_or_is_another_is_refused(tmp_path, refused, monkeypatch):
    text, source = b'To be, or not to be. ' * 100, tmp_path / 'plays.txt'
    monkeypatch.setitem(CORPORA, 'plays', Corpus(
        'plays', 'char', url=source.as_uri(), sha256=hashlib.sha256(text).hexdigest()))
    argv = ['plays', f'--data_dir={tmp_path}/d']
    message = refused(*argv)
    assert source.as_uri() in message and '--input=FILE' in message
    source.write_bytes(text[1:])
    assert 'checksum' in refused(*argv)
    assert not (tmp_path / 'd').exists()
    source.write_bytes(text)
    prepare.main(argv)
    assert len(open_dataset(tmp_path / 'd').split('train')) == 0.9 * len(text)
