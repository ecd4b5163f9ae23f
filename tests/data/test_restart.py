"""prepare.py killed at any moment, and started again; what was in the folder before."""

import itertools
import json
import shutil
import sys

import pytest
from corpus_files import contents, killed, write_rows
from processes import fails

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.data.inspection import find_damage
from plaingpt.system.errors import UserError
from plaingpt.system.files import locked


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp('rows') / 'rows.jsonl'
    write_rows(path, [f'{n} ' + 'to be or not to be ' * (n % 40) for n in range(400)])
    return path


pytestmark = pytest.mark.usefixtures('small_batches')


def command(rows, folder, *options):
    return ['text', f'--input={rows}', '--tokenizer=byte', '--shard_tokens=12_500',
            '--val_fraction=0.1', f'--data_dir={folder}', *options]


@pytest.mark.parametrize(('shard_tokens', 'step'), [
    (10**6, 7), (40_000, 7), pytest.param(40_000, 1, marks=pytest.mark.slow)])
def test_killed_between_any_two_changes_of_the_disk_it_writes_the_same(
        shard_tokens, step, rows, tmp_path):
    """And what was in the folder before is whole or gone, at each of these moments."""
    options = [f'--shard_tokens={shard_tokens}', '--num_proc=1', '--overwrite']
    prepare.main(command(rows, tmp_path / 'whole', *options))
    prepare.main(command(rows, tmp_path / 'old', *options, '--val_fraction=0.2'))
    for n in itertools.count(1, step):
        folder = tmp_path / f'killed-{n}'
        shutil.copytree(tmp_path / 'old', folder)
        argv = command(rows, folder, *options)
        if killed(n, argv, folder) == 0:
            break
        assert not (folder / 'meta.json').exists() or not find_damage(open_dataset(folder)), n
        prepare.main(argv)
        assert contents(folder) == contents(tmp_path / 'whole'), n
    assert n > 5


def test_complete_shards_are_not_encoded_again(rows, tmp_path, capsys):
    argv = command(rows, tmp_path / 'd', '--tokenizer=char', '--shard_tokens=5_000')
    assert killed(20, argv, tmp_path / 'd') == 9
    progress = json.loads((tmp_path / 'd/unfinished/progress.json').read_text())
    done = sum(split['tokens'] for split in progress['splits'].values())
    assert done > 5_000
    capsys.readouterr()
    prepare.main(argv)
    splits = open_dataset(tmp_path / 'd').meta['splits']
    encoded = sum(split['tokens'] for split in splits.values()) - done
    assert f'{encoded:,} tokens' in capsys.readouterr().out


def test_resumed_without_gigatoken_the_bytes_are_the_same(rows, tmp_path, monkeypatch):
    pytest.importorskip('gigatoken')
    prepare.main(command(rows, tmp_path / 'bpe', '--tokenizer=bpe:270'))
    options = f'--tokenizer={tmp_path}/bpe', '--shard_tokens=5_000'
    assert killed(20, command(rows, tmp_path / 'd', *options), tmp_path / 'd') == 9
    progress = json.loads((tmp_path / 'd/unfinished/progress.json').read_text())
    assert progress['splits']['train']['tokens'] > 0
    monkeypatch.setitem(sys.modules, 'gigatoken.gigatoken_rs', None)
    for name in 'd', 'whole':
        prepare.main(command(rows, tmp_path / name, *options))
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


def test_an_unfinished_dataset_is_not_trained_on(rows, tmp_path):
    assert killed(20, command(rows, tmp_path / 'd'), tmp_path / 'd') == 9
    with pytest.raises(UserError, match=str(tmp_path / 'd')):
        open_dataset(tmp_path / 'd')


@pytest.mark.parametrize(('options', 'new_row'), [
    (['--val_fraction=0.2', '--overwrite'], ''), ([], '{"text": "new"}\n')])
def test_what_another_command_left_is_not_mixed_in(options, new_row, rows, tmp_path):
    path = shutil.copy(rows, tmp_path / 'in.jsonl')
    assert killed(20, command(path, tmp_path / 'd'), tmp_path / 'd') == 9
    path.write_text(path.read_text() + new_row)
    for name in 'd', 'clean':
        prepare.main(command(path, tmp_path / name, *options))
    assert contents(tmp_path / 'd') == contents(tmp_path / 'clean')


@pytest.mark.parametrize('is_complete', [False, True])
def test_the_unfinished_output_of_another_command_is_kept(
        is_complete, rows, tmp_path, capsys, monkeypatch):
    folder = tmp_path / 'd'
    if is_complete:
        prepare.main(command(rows, folder))
    assert killed(20, command(rows, folder, '--val_fraction=0.2', '--overwrite'), folder) == 9
    before = contents(folder / 'unfinished')
    if is_complete:  # and up to date
        prepare.main(command(rows, folder))
    else:
        line = fails(capsys, monkeypatch, prepare.main, *command(rows, folder))
        assert 'val_fraction' in line and '--overwrite' in line
    assert contents(folder / 'unfinished') == before


def test_what_version_1_0_left_is_not_continued(rows, tmp_path):
    argv = command(rows, tmp_path / 'd', '--shard_tokens=5_000')
    assert killed(30, argv, tmp_path / 'd') == 9
    path = tmp_path / 'd/unfinished/progress.json'
    progress = json.loads(path.read_text())
    del progress['version']
    progress['count'] -= 1
    path.write_text(json.dumps(progress))
    for folder in 'd', 'clean':
        prepare.main(command(rows, tmp_path / folder, '--shard_tokens=5_000'))
    assert contents(tmp_path / 'd') == contents(tmp_path / 'clean')


def test_the_same_command_again_does_nothing(rows, tmp_path):
    shutil.copy(rows, 'in.jsonl')
    prepare.main(command('in.jsonl', tmp_path / 'd'))
    before = (tmp_path / 'd/meta.json').stat().st_mtime_ns
    for same in 'in.jsonl', './in.jsonl', './/in.jsonl ':
        prepare.main(command(same, tmp_path / 'd'))
    assert (tmp_path / 'd/meta.json').stat().st_mtime_ns == before


def test_another_command_does_not_replace_a_dataset(rows, tmp_path, capsys, monkeypatch):
    prepare.main(command(rows, tmp_path / 'd'))
    before = contents(tmp_path / 'd')
    line = fails(capsys, monkeypatch, prepare.main, *command(rows, tmp_path / 'd',
                                                             '--val_fraction=0.3'))
    for word in ('val_fraction', '0.3', '--overwrite', '--data_dir'):
        assert word in line
    assert contents(tmp_path / 'd') == before


def test_two_at_once_in_one_folder_are_refused(rows, tmp_path, capsys, monkeypatch):
    (tmp_path / 'd').mkdir()
    with locked(tmp_path / 'd', ''):
        assert str(tmp_path / 'd') in fails(capsys, monkeypatch, prepare.main,
                                            *command(rows, tmp_path / 'd'))
