"""prepare.py killed at any moment, and started again; what was in the folder before."""

import itertools
import json
import shutil
import sys

import pytest
from corpus_files import contents, killed, write_rows
from processes import fails

import prepare
from plaingpt.data import encoding, tokenizer_choice
from plaingpt.data.dataset import open_dataset
from plaingpt.data.inspection import find_damage
from plaingpt.system.files import locked


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp('rows') / 'rows.jsonl'
    write_rows(path, [f'{n} ' + 'to be or not to be ' * (n % 40) for n in range(400)])
    return path


@pytest.fixture(autouse=True)
def many_batches(monkeypatch):
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**13)


def command(rows, folder, *options):
    return ['text', f'--input={rows}', '--tokenizer=byte', '--shard_tokens=12_500',
            '--val_fraction=0.1', f'--data_dir={folder}', *options]


@pytest.mark.parametrize(('shard_tokens', 'step'), [
    (10**6, 1), (40_000, 3), pytest.param(40_000, 1, marks=pytest.mark.slow)])
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


def test_what_is_done_is_not_done_again_and_the_old_dataset_stays_meanwhile(
        rows, tmp_path, monkeypatch, capsys):
    prepare.main(command(rows, tmp_path / 'd', '--val_fraction=0.2'))
    before = contents(tmp_path / 'd')
    argv = command(rows, tmp_path / 'd', '--tokenizer=char', '--overwrite')
    assert killed(20, argv, tmp_path / 'd') == 9
    assert {name: (tmp_path / 'd' / name).read_bytes() for name in before} == before
    progress = json.loads((tmp_path / 'd/unfinished/progress.json').read_text())
    done = sum(split['tokens'] for split in progress['splits'].values())
    encoded, real = [], encoding.encode_batch
    monkeypatch.setattr(encoding, 'encode_batch',
                        lambda *a: encoded.append(real(*a)) or encoded[-1])
    monkeypatch.setattr(tokenizer_choice, 'make_tokenizer', None)  # it is learned already
    capsys.readouterr()
    prepare.main(argv)
    assert f'resuming after {done:,} tokens' in capsys.readouterr().out
    again = sum(len(part.ids) for parts in encoded for part in parts.values())
    splits = open_dataset(tmp_path / 'd').meta['splits']
    assert done > 12_500
    assert done + again == sum(split['tokens'] for split in splits.values())
    names = {file['name'] for split in splits.values() for file in split['files']}
    assert set(contents(tmp_path / 'd')) == names | {'meta.json'}


def test_begun_with_gigatoken_and_resumed_without_it_the_bytes_are_the_same(
        rows, tmp_path, monkeypatch):
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


def test_what_another_command_or_another_input_left_is_not_mixed_in(
        rows, tmp_path, capsys):
    path = shutil.copy(rows, tmp_path / 'in.jsonl')
    for more, change in (['--val_fraction=0.2'], ''), ([], '{"text": "new"}\n'):
        assert killed(20, command(path, tmp_path / 'd'), tmp_path / 'd') == 9
        with pytest.raises(prepare.UserError, match='not finished'):  # nothing is trained on it
            open_dataset(tmp_path / 'd')
        path.write_text(path.read_text() + change)
        prepare.main(command(path, tmp_path / 'd', *more))
        assert 'starting anew' in capsys.readouterr().out
        prepare.main(command(path, tmp_path / 'clean', *more, '--overwrite'))
        assert contents(tmp_path / 'd') == contents(tmp_path / 'clean')
        shutil.rmtree(tmp_path / 'd')


def test_two_at_once_in_one_folder_are_refused(rows, tmp_path, capsys, monkeypatch):
    argv = command(rows, tmp_path / 'd')
    (tmp_path / 'd').mkdir()
    with locked(tmp_path / 'd', ''):
        assert 'another prepare.py' in fails(capsys, monkeypatch, prepare.main, *argv)
    prepare.main(argv)
