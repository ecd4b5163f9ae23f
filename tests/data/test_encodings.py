"""Text that is not UTF-8: all of its files are named at once, and --encoding reads them."""

import json
from functools import partial

import pytest
from corpus_files import texts_of, write_rows

import prepare
from plaingpt.data import readers
from plaingpt.data.readers import find_encoding, find_fault
from plaingpt.data.sources import Files, find_files
from plaingpt.system.errors import UserError

TEXT = 'café déjà, ein Käfer\nzweite Zeile\n' * 3000  # longer than what is decoded at a time
WIDE = '日本語、😀\n' * 3000


@pytest.mark.parametrize(('encoding', 'text'), [
    ('latin-1', TEXT), ('cp1252', TEXT), ('utf-16', WIDE), ('utf-16-le', WIDE), ('utf-32', WIDE),
    ('shift_jis', WIDE.replace('😀', '')), ('gb18030', WIDE), ('utf-7', WIDE), ('cp037', TEXT)])
def test_text_of_any_encoding_is_whole_wherever_its_characters_are_cut(
        encoding, text, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_bytes(text.encode(encoding))
    for block in (1001, 2**20):
        monkeypatch.setattr(readers, 'BLOCK_CHARS', block)
        assert ''.join(texts_of(tmp_path / 'a.txt', encoding=find_encoding(encoding))) == text


def test_rows_of_any_encoding_are_read(tmp_path):
    rows = {'a.csv': 'id,text\n1,café\n2,"é\nà"\n',
            'a.jsonl': '{"text": "café"}\n{"text": "é\\nà"}\n',
            'a.json': ' [{"text": "café"},\n{"text": "é\\nà"}]'}
    for name, text in rows.items():
        for encoding in ('latin-1', 'utf-16'):
            (tmp_path / name).write_bytes(text.encode(encoding))
            assert texts_of(tmp_path / name, encoding=encoding) == ['café', 'é\nà'], name


def read_folder(folder, encoding='utf-8'):
    """→ (its texts, the lines that say what is read)"""
    told = []
    fault = partial(find_fault, encoding=encoding)
    files = Files(find_files(str(folder), told.append, fault), 'x', encoding=encoding)
    return [piece.text for piece in files.pieces()], told


def test_files_of_a_folder_that_are_not_utf8_are_named_and_read_with_their_encoding(tmp_path):
    texts = [f'{n} one\ncafé\n' if n % 3 else f'{n} plain\n' for n in range(40)]
    for n, text in enumerate(texts):
        (tmp_path / f'{n:02}.txt').write_bytes(text.encode('latin-1' if n < 38 else 'utf-8'))
    write_rows(tmp_path / 'rows.jsonl', ['some text'])
    (tmp_path / 'broken.txt.gz').write_bytes(b'no gzip')
    with pytest.raises(UserError, match=r'broken\.txt\.gz: cannot be read'):
        read_folder(tmp_path)
    (tmp_path / 'broken.txt.gz').unlink()
    found, (_, line) = read_folder(tmp_path)
    assert found == [*(t for n, t in enumerate(texts) if n % 3 == 0 or n >= 38), 'some text']
    assert [f'{n:02}.txt, line 2' in line for n in range(15)] == [n % 3 > 0 for n in range(15)]
    assert '16.txt' not in line and '; and 15 more files: not UTF-8' in line
    assert '--encoding=latin-1' in line and '--errors=replace' in line
    assert read_folder(tmp_path, 'latin-1')[0] == [*texts, 'some text']
    for path in set(tmp_path.iterdir()) - {tmp_path / '01.txt', tmp_path / '02.txt'}:
        path.unlink()
    with pytest.raises(UserError, match=r'01\.txt, line 2; .*02\.txt, line 2: not UTF-8'):
        read_folder(tmp_path)


def test_an_encoding_is_checked_and_part_of_the_command(tmp_path, refused):
    (tmp_path / 'a.txt').write_bytes('café, '.encode('latin-1') * 50)
    for name in ('klingon', 'hex', 'rot13', 'punycode', 'undefined', '../os', 'x' * 10_000):
        assert 'no such text encoding' in refused('text', tmp_path / 'a.txt', f'--encoding={name}')
    command = 'text', f'{tmp_path}/a.txt', '--tokenizer=byte', f'--data_dir={tmp_path}/d'
    prepare.main([*command, '--encoding=latin-1'])
    source = json.loads((tmp_path / 'd/meta.json').read_text())['source']
    assert source['encoding'] == 'iso8859-1'
    assert 'holds another dataset (encoding' in refused(*command, '--encoding=cp1252')


def test_wide_text_without_its_encoding_is_told_which_one_to_name(tmp_path):
    (tmp_path / 'a.txt').write_bytes('text'.encode('utf-16'))
    with pytest.raises(UserError, match=r'it has NUL bytes: .*--encoding=utf-16'):
        texts_of(tmp_path / 'a.txt')
    (tmp_path / 'a.txt').write_bytes('text'.encode('utf-16-le'))  # no mark of the byte order
    with pytest.raises(UserError, match=r'a\.txt, line 1: not UTF-16'):
        list(Files([tmp_path / 'a.txt'], 'a', encoding='utf-16').pieces())
