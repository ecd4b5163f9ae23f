import json
import os

import pytest

from plaingpt.system import files
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line, check_keys, is_count, is_text, parse_json, read_json


def test_json_that_is_broken_deep_or_huge_is_a_line_of_what_is_wrong(tmp_path):
    path = tmp_path / 'x.json'
    for text in ('[' * 10**6, '{"a":' * 10**5, '[' * 51 + ']' * 51, '[' + '[],' * 10**6 + '[]]',
                 '1' * 5000, '', '{', '\xff', '{"a": 1} 2'):
        path.write_bytes(text.encode('latin-1'))
        for read, source in ((read_json, path), (parse_json, text)):
            with pytest.raises(ValueError) as e:
                read(source)
            assert len(str(e.value).splitlines()) == 1, text[:9]


def test_json_of_a_sensible_depth_and_size_is_read(tmp_path):
    value = 'x'
    for _ in range(48):
        value = [{'a': value}] if isinstance(value, str) else [value]
    tokens = [f'token [{i}' for i in range(200_000)]  # a bracket in a text is no list
    (tmp_path / 'x.json').write_text(json.dumps({'deep': value, 'tokens': tokens, 'é': '\ud800'}))
    assert read_json(tmp_path / 'x.json') == {'deep': value, 'tokens': tokens, 'é': '\ud800'}


def test_a_file_larger_than_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'MAX_JSON_BYTES', 10)
    (tmp_path / 'x.json').write_text('[' + ' ' * 9 + ']')
    with pytest.raises(ValueError, match='it has 11 bytes, and 10 are the most'):
        read_json(tmp_path / 'x.json')


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / 'fifo')  # nobody writes there: a reader would wait without end
    for path in (tmp_path / 'fifo', '/dev/zero', tmp_path, tmp_path / 'nothing'):
        for read in (read_json, files.sha256_of):
            with pytest.raises(OSError):
                read(path)


def test_a_schema_names_the_key_that_is_wrong():
    schema = {'n': is_count, 'who': {'name': is_text}}
    check_keys({'n': 0, 'who': {'name': 'x', 'age': None}}, schema)
    for value, words in (({'n': True, 'who': {'name': ''}}, "n is 'True'"),
                         ({'n': 2**63, 'who': {'name': ''}}, 'n is '),
                         ({'n': 1, 'who': {'name': 5}}, "name is '5'"),
                         ({'n': 1, 'who': {}}, 'name is missing'), ([], 'no object')):
        with pytest.raises(ValueError, match=words):
            check_keys(value, schema)


def test_a_line_does_not_continue_half_of_another(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'{"a": 1}\n{"a": \xc3')  # killed in the middle of a character
    append_line(path, {'a': 2})
    append_line(path, {'a': 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \xc3\n{"a": 2}\n{"a": 3}\n'


def test_a_file_in_the_place_of_a_folder_is_named_so(tmp_path):
    (tmp_path / 'README.md').touch()
    with pytest.raises(UserError, match=r'out_dir=\S*README\.md is a file: name a folder'):
        files.make_writable(tmp_path / 'README.md')
