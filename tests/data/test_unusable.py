"""Files and rows that cannot be used: few are left out and counted, more are an error."""

import gzip
import json
import random
from itertools import chain

import pytest
from corpus_files import prepared, write_files


@pytest.fixture
def folder(tmp_path):
    """500 files, of which 7.txt and 8.txt are not UTF-8, 8.txt at its end."""
    folder = write_files(tmp_path / 'in', *(f'Größe {i}\n' for i in range(500)))
    (folder / '7.txt').write_bytes('Größe 7'.encode('latin-1'))
    (folder / '8.txt').write_bytes(b'long ' * 2**18 + b'\xff')
    return folder


def test_a_few_unreadable_files_of_a_folder_are_left_out(folder, tmp_path, capsys):
    texts = prepared(tmp_path / 'd', 'text', folder)
    assert sorted(chain(*texts)) == sorted(f'Größe {i}\n' for i in range(500) if i not in (7, 8))
    out = capsys.readouterr().out
    for word in ('2 of 500', f'{folder}/7.txt', f'{folder}/8.txt'):
        assert word in out


def test_no_text_of_a_damaged_gz_file_is_used(folder, tmp_path):
    data = gzip.compress(random.Random(0).randbytes(300_000).hex().encode())
    (folder / 'z.txt.gz').write_bytes(data[:-9])
    texts = prepared(tmp_path / 'd', 'text', folder)
    assert max(map(len, chain(*texts))) < 20


def test_strict_leaves_out_no_file(folder, refused):
    assert '7.txt' in refused('text', str(folder), '--strict')


def test_a_file_that_is_named_is_not_left_out(folder, refused):
    assert '8.txt' in refused('text', str(folder), f'{folder}/8.txt')


def test_more_than_one_unreadable_file_in_a_hundred_is_an_error(folder, refused):
    for i in range(10, 14):
        (folder / f'{i}.txt').write_bytes(b'\xff')
    assert '6 of 500' in refused('text', str(folder))


@pytest.mark.parametrize('encoding', ['latin-1', 'cp1252', 'utf-16-le', 'gb18030'])
def test_files_of_another_encoding_are_told_of_the_option(encoding, tmp_path, refused):
    (tmp_path / 'in').mkdir()
    for i in range(9):
        text = f'Größe {i}, É’t' if encoding != 'gb18030' else f'中文 {i}'
        (tmp_path / f'in/{i}.txt').write_bytes(text.encode(encoding, 'replace'))
    (tmp_path / 'in/8.txt.gz').write_bytes(gzip.compress(text.encode(encoding, 'replace')))
    for name in '', '/1.txt', '/8.txt.gz':
        assert '--encoding=latin-1' in refused('text', f'{tmp_path}/in{name}')


@pytest.mark.parametrize(('ending', 'text'), [
    ('jsonl', '{"prompt": "a", "completion": "b"}\n'), ('csv', 'prompt,completion\na,b\n')])
def test_rows_of_another_encoding_are_told_of_the_option(ending, text, tmp_path, refused):
    (tmp_path / f'in.{ending}').write_bytes((text * 9).encode('utf-16-le'))
    assert '--encoding=' in refused('chat', f'{tmp_path}/in.{ending}')


@pytest.mark.parametrize('name', ['a.txt.zst', 'a.XZ', 'a.tar.gz'])
def test_a_compressed_file_has_to_be_unpacked_first(name, tmp_path, refused):
    (tmp_path / name).write_bytes(b'\xff')
    assert 'unpack' in refused('text', f'{tmp_path}/{name}')


def odd_rows(n):
    """Rows in which the ones in a hundred cannot be used, as lines."""
    lines = [json.dumps({'text': f'row {i}'}).encode() for i in range(n)]
    odd = b'{"text": null}', b'{"body": "x"}', b'{"text": "x"', b'{"text": "\xff"}', b'{"text": 7}'
    lines[50::100] = [odd[i % 5] for i in range(len(lines[50::100]))]
    return lines


def test_a_few_unusable_rows_are_left_out(tmp_path, capsys):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(b'\n'.join(odd_rows(2000)))
    texts = prepared(tmp_path / 'd', 'text', path)
    assert sorted(chain(*texts)) == sorted(f'row {i}' for i in range(2000) if i % 100 != 50)
    out = capsys.readouterr().out
    assert out.count('4 of 2,000') == 5  # a line for each reason
    assert f'{path}, line 51' in out


def test_more_than_one_unusable_row_in_a_hundred_is_an_error(tmp_path, refused):
    (tmp_path / 'a.jsonl').write_bytes(b'\n'.join([b'{"body": "x"}', *odd_rows(2000)]))
    line = refused('text', f'{tmp_path}/a.jsonl')
    for word in ('line 1', "'body'", '21 of 2,001', '--text_field'):
        assert word in line


def test_rows_that_an_open_quote_swallows_are_all_counted(tmp_path, refused):
    rows = [f'{i},row {i}\n' for i in range(400)]
    rows[20], rows[150] = '20,"open\n', '150,"quoted"\n'
    (tmp_path / 'a.csv').write_text('id,text\n' + ''.join(rows))
    assert '131 of 400' in refused('text', f'{tmp_path}/a.csv')


@pytest.mark.parametrize('delimiter', ',;\t|')
def test_the_delimiter_of_a_table_is_detected(delimiter, tmp_path):
    rows = [f'{i}{delimiter}"a;b,c|d {i}"\n' for i in range(100)]
    (tmp_path / 'a.csv').write_text(f'id{delimiter}Text \n' + ''.join(rows))
    texts = prepared(tmp_path / 'd', 'text', tmp_path / 'a.csv', '--text_field=TEXT')
    assert sorted(chain(*texts)) == sorted(f'a;b,c|d {i}' for i in range(100))
