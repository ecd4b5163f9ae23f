"""prepare.py --part=K/N and prepare.py merge: what the parts make is what one command makes."""

import itertools
import json
import random
import shutil
import signal

import pyarrow
import pyarrow.parquet
import pytest
from helpers import fails
from interrupted import exit_code

import prepare
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError
from plaingpt.data.dataset import open_dataset
from plaingpt.training import starting_point
from plaingpt.training.settings import TrainConfig

chance = random.Random(0)
WORDS = ['to', 'be', 'or', 'nöt', 'that', 'is', '<|endoftext|>', 'the', 'question', '  \n']
TEXTS = [' '.join(chance.choices(WORDS, k=chance.randrange(1, 60))) for _ in range(400)]
OPTIONS = ['--tokenizer=byte', '--val_fraction=0.1', '--shard_tokens=9_000', '--num_proc=1']


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """{form: options that read the same texts in that form}"""
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'rows').mkdir()
    (folder / 'hub').mkdir()
    for i in range(3):
        (folder / f'rows/{i}.jsonl').write_text(''.join(
            json.dumps({'text': text}) + '\n' for text in TEXTS[i * 150:(i + 1) * 150]))
        pyarrow.parquet.write_table(pyarrow.table({'text': [*TEXTS[i::3], None]}),
                                    folder / f'hub/train-{i}.parquet', row_group_size=20 + i)
    (folder / 'lines.txt').write_text('\n'.join(TEXTS))
    return {'rows': ['text', f'--input={folder}/rows', *OPTIONS],
            'lines': ['text', f'--input={folder}/lines.txt', '--documents=line', *OPTIONS],
            'hub': ['hf', f'--path={folder}/hub', *OPTIONS]}


@pytest.fixture
def argv(inputs, tmp_path):
    return [*inputs['lines'], f'--data_dir={tmp_path}/d']


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function: give prepare.py these arguments → its one `error:` line."""
    return lambda *argv: fails(capsys, monkeypatch, prepare.main, *argv)


def prepare_parts(count, *argv):
    for number in range(1, count + 1):
        prepare.main([*argv, f'--part={number}/{count}'])


def state_of(folder):
    """→ (meta.json without the files of the splits, {split: all bytes of its files})"""
    meta = json.loads((folder / 'meta.json').read_text())
    files = {split: entry.pop('files') for split, entry in meta['splits'].items()}
    names = {'meta.json', *(file['name'] for entries in files.values() for file in entries)}
    assert {path.name for path in folder.iterdir()} == names
    return meta, {split: b''.join((folder / file['name']).read_bytes() for file in entries)
                  for split, entries in files.items()}


@pytest.mark.parametrize(('form', 'counts'),
                         [('rows', (1, 3)), ('lines', (2, 30)), ('hub', (2, 7))])
def test_any_number_of_parts_merged_equals_one_command(form, counts, inputs, tmp_path):
    prepare.main([*inputs[form], f'--data_dir={tmp_path}/whole'])
    for count in counts:
        folder = tmp_path / f'{count}'
        prepare_parts(count, *inputs[form], f'--data_dir={folder}')
        prepare.main(['merge', str(folder)])
        assert state_of(folder) == state_of(tmp_path / 'whole'), count
        prepare.main(['inspect', str(folder)])  # raises where a count or checksum is wrong


def test_parts_and_a_merge_that_are_killed_and_started_again_make_the_same_whole(argv, tmp_path):
    prepare.main([*argv[:-1], f'--data_dir={tmp_path}/whole'])
    for calls in (3, 9):
        assert exit_code(*argv, '--part=2/2', calls=calls) == -signal.SIGKILL
    prepare_parts(2, *argv)
    for calls in itertools.count(1, 3):
        shutil.copytree(tmp_path / 'd', folder := tmp_path / f'killed-{calls}')
        if exit_code('merge', str(folder), calls=calls) == 0:
            break
        prepare.main(['merge', str(folder)])
        assert state_of(folder) == state_of(tmp_path / 'whole'), calls


def test_merge_refuses_parts_that_are_missing_damaged_or_being_written(argv, tmp_path, refused):
    prepare_parts(3, *argv)
    part = tmp_path / 'd/parts/2-of-3'
    with prepare.lock_dataset_dir(tmp_path / 'd', (2, 3)):
        assert 'of 3 parts 2 is being written' in refused('merge', f'{tmp_path}/d')
    part.rename(tmp_path / 'away')
    assert 'of 3 parts 2 is missing' in refused('merge', f'{tmp_path}/d')
    shutil.copytree(tmp_path / 'away', part)
    (part / 'notes.txt').write_text('mine')
    assert 'notes.txt was not written by prepare.py' in refused('merge', f'{tmp_path}/d')
    (part / 'notes.txt').unlink()
    (part / 'train_000000.bin').write_bytes(b'!' * 18_000)
    assert 'another checksum' in refused('merge', f'{tmp_path}/d')
    prepare_parts(3, *argv)
    prepare.main(['merge', f'{tmp_path}/d'])
    assert len(open_dataset(tmp_path / 'd').split('train')) > 50_000


def test_parts_of_different_commands_are_refused_with_both_values(argv, refused):
    prepare.main([*argv, '--part=2/2'])
    for other in ('--val_fraction=0.2', '--shard_tokens=8_000'):
        option, value = other[2:].replace('_000', '000').split('=')
        assert f'{option} ' in (line := refused(*argv, other, '--part=1/2')), other
        assert f'not {value}' in line, other
    assert '2-of-2 is one of 2 parts, not of 5' in refused(*argv, '--part=1/5')
    assert 'merge' in refused(*argv)  # a whole beside the parts


def test_what_cannot_be_in_parts_is_refused_before_anything_is_written(argv, tmp_path, refused):
    for options, words in ((['--part=4/3'], 'expected K/N'), (['--part=3'], 'expected K/N'),
                           (['--part=1/3', '--tokenizer=bpe:512'], 'is learned from all the text'),
                           (['--part=1/3', '--documents=auto'], 'one running text')):
        assert words in refused(*argv, *options), options
    assert not (tmp_path / 'd').exists()


def test_training_on_parts_says_how_to_merge_them(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv[-1] = '--data_dir=data/pystdlib'  # which train.py would prepare where it is missing
    prepare_parts(2, *argv)
    config = TrainConfig(dataset='pystdlib')
    with pytest.raises(UserError, match=r'python prepare\.py merge data/pystdlib'):
        starting_point.open_data(config, World())
    prepare.main(['merge', 'pystdlib'])
    assert starting_point.open_data(config, World()).vocab_size == 257
