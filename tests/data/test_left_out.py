"""Files and rows that cannot be used: few are left out and counted, more are an error."""

import json
from itertools import chain

import pytest
from corpus_files import documents_of, prepared, write_files, write_rows
from processes import fails

import prepare
from plaingpt.data.documents import Files
from plaingpt.data.rows import TextReader
from plaingpt.system.errors import UserError


def test_files_of_a_folder_that_cannot_be_read_are_left_out_and_named(
        tmp_path, capsys, monkeypatch):
    folder = write_files(tmp_path / 'in', *(f'Größe {i}\n' for i in range(500)))
    (folder / '7.txt').write_bytes('Größe 7'.encode('latin-1'))
    (folder / '8.txt').write_bytes(b'long ' * 2**18 + b'\xff')
    argv = ['text', str(folder), '--tokenizer=byte', f'--data_dir={tmp_path}/d']
    line = fails(capsys, monkeypatch, prepare.main, *argv, '--strict')
    assert '7.txt: not UTF-8' in line and '--encoding' not in line
    line = fails(capsys, monkeypatch, prepare.main, *argv, f'{folder}/8.txt')
    assert '8.txt: not UTF-8' in line and '--encoding' not in line
    prepare.main(argv)
    out = capsys.readouterr().out
    assert f'left out 2 of 500 files: not UTF-8 ({folder}/7.txt; {folder}/8.txt)' in out
    assert sorted(chain(*documents_of(tmp_path / 'd').values())) \
        == sorted(f'Größe {i}\n' for i in range(500) if i not in (7, 8))
    for i in range(10, 14):
        (folder / f'{i}.txt').write_bytes(b'\xff')
    line = fails(capsys, monkeypatch, prepare.main, *argv, '--overwrite')
    assert '6 of 500 files' in line and '--encoding' not in line


def test_files_of_which_none_is_utf_8_are_told_of_the_option(tmp_path, refused):
    (tmp_path / 'in').mkdir()
    for i in range(9):
        (tmp_path / f'in/{i}.txt').write_bytes(f'Größe {i}'.encode('latin-1'))
    assert '--encoding=latin-1' in refused('text', f'{tmp_path}/in')
    assert '--encoding=latin-1' in refused('text', f'{tmp_path}/in/1.txt')


def test_what_is_compressed_has_to_be_unpacked_first(tmp_path, refused):
    for name in ('a.txt.zst', 'a.bz2', 'a.XZ', 'a.zip', 'a.tar.gz'):
        (tmp_path / name).write_bytes(b'\xff')
        assert 'unpack it first' in refused('text', f'{tmp_path}/{name}')


def odd_rows(n):
    """Rows in which the ones in a hundred cannot be used, as lines."""
    lines = [json.dumps({'text': f'row {i}'}).encode() for i in range(n)]
    odd = b'{"text": null}', b'{"body": "x"}', b'{"text": "x"', b'{"text": "\xff"}', b'{"text": 7}'
    lines[50::100] = [odd[i % 5] for i in range(len(lines[50::100]))]
    return lines


def test_rows_that_cannot_be_used_are_left_out_and_counted_by_reason(tmp_path, capsys, refused):
    path, lines = tmp_path / 'a.jsonl', odd_rows(2000)
    path.write_bytes(b'\n'.join(lines))
    texts = prepared(tmp_path / 'd', 'text', path)
    assert sorted(chain(*texts)) == sorted(f'row {i}' for i in range(2000) if i % 100 != 50)
    out = capsys.readouterr().out
    for reason in ("field 'text' is null", "no field 'text'", 'not JSON', 'not UTF-8',
                   "field 'text' is int and not text"):
        assert f'left out 4 of 2,000 rows: {reason} ({path}, line ' in out, reason
    assert f'null ({path}, line 51; {path}, line 551; {path}, line 1051; …)' in out
    assert 'line 51: ' in refused('text', str(path), '--strict')
    path.write_bytes(b'\n'.join([b'{"body": "x"}', *lines]))
    assert "line 1: no field 'text', it has 'body'" in (line := refused('text', str(path)))
    assert '21 of 2,001 rows' in line and '5 for this reason' in line and '--text_field' in line


def test_a_row_of_a_table_with_an_odd_quote_is_left_out(tmp_path, capsys):
    rows = [f'{i},row {i}\n' for i in range(400)]
    rows[200] = '200,"quoted" word\n'
    (tmp_path / 'a.csv').write_text('id,text\n' + ''.join(rows))
    texts = prepared(tmp_path / 'd', 'text', tmp_path / 'a.csv')
    assert sorted(chain(*texts)) == sorted(f'row {i}' for i in range(400) if i != 200)
    assert f'left out 1 of 400 rows: a quote within a field ({tmp_path}/a.csv, line 202)' \
        in capsys.readouterr().out


def test_rows_that_an_open_quote_swallows_are_all_counted(tmp_path, refused):
    rows = [f'{i},row {i}\n' for i in range(400)]
    rows[20], rows[150] = '20,"open\n', '150,"quoted"\n'
    (tmp_path / 'a.csv').write_text('id,text\n' + ''.join(rows))
    assert '131 of 400 rows' in refused('text', f'{tmp_path}/a.csv')


def test_a_pass_over_rows_stops_early_where_no_row_can_be_used(tmp_path, monkeypatch):
    write_rows(tmp_path / 'a.jsonl', ['x'] * 50_000, field='body')
    source = Files([tmp_path / 'a.jsonl'], 'a', TextReader())
    with pytest.raises(UserError, match="no field 'text'"):
        list(source.pieces())
    assert source.rows.seen < 5_000


@pytest.mark.parametrize('delimiter', ',;\t|')
def test_the_separator_of_a_table_is_found_and_its_columns_match_in_any_case(delimiter, tmp_path):
    rows = [f'{i}{delimiter}"a;b,c|d {i}"\n' for i in range(100)]
    (tmp_path / 'a.csv').write_text(f'id{delimiter}Text \n' + ''.join(rows))
    for options in ([], ['--text_field=TEXT']):
        texts = prepared(tmp_path / 'd', 'text', tmp_path / 'a.csv', '--overwrite', *options)
        assert sorted(chain(*texts)) == sorted(f'a;b,c|d {i}' for i in range(100))
