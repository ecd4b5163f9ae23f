import pytest

from plaingpt.system import files
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line


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
