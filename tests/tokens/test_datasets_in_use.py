"""Datasets that one process reads from disk while another replaces or changes them."""

import errno
import itertools
import os
import signal
import sys

import pytest
from helpers import exit_code, fails, fork, ranks, wait_until

import bench
import evaluate
import prepare
import train
from plaingpt.corpus import encoding
from plaingpt.preflight.data_checks import tokens_on_disk
from plaingpt.system import files
from plaingpt.system.errors import UserError
from plaingpt.system.files import lock_holders
from plaingpt.tokens.batches import BatchLoader
from plaingpt.tokens.dataset import not_read, open_dataset
from plaingpt.tokens.token_files import TokenFile

FOREVER = ['--data_in_ram=False', '--max_iters=100000', '--check=False']


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*.*')}


@pytest.fixture
def texts(text_file, tmp_path):
    """Two texts of the same characters and the same length."""
    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])
    return text_file, other


@pytest.fixture
def data(texts, tmp_path):
    prepare.main(command(texts[0], tmp_path / 'data'))
    return tmp_path / 'data'


def command(text, folder, *options):
    return ['text', f'--input={text}', '--tokenizer=char', f'--data_dir={folder}', *options]


def start(tiny, folder, log, *options):
    """A training that reads `folder` from disk, in a process of its own → its id."""
    pid = fork(train.main, *tiny, f'--dataset={folder}', *FOREVER, *options, log=log)
    wait_until(lambda: log.exists() and ('iter      2' in log.read_text()
                                         or 'error' in log.read_text()))
    return pid


# -----------------------------------------------------------------------------
# what is read is not replaced


def test_a_dataset_that_a_training_reads_is_not_replaced_until_it_has_ended(
        tiny, texts, data, tmp_path, capsys, monkeypatch):
    before = contents(data)
    run = start(tiny, data, tmp_path / 'log')
    with monkeypatch.context() as patched:
        patched.delattr(encoding, 'encode_batch')  # it is refused before the work
        message = fails(capsys, monkeypatch, prepare.main,
                        *command(texts[1], data, '--overwrite'))
    assert f'{data} is read by process {run} (' in message and 'not replaced' in message
    assert contents(data) == before
    prepare.main(command(texts[0], data))  # the same command has nothing to replace
    os.kill(run, signal.SIGKILL)
    exit_code(run)
    prepare.main(command(texts[1], data, '--overwrite'))
    assert contents(data) != before and 'error' not in (tmp_path / 'log').read_text()


@pytest.mark.slow
def test_each_process_of_a_job_keeps_it(tiny, texts, data, tmp_path, capsys, monkeypatch):
    job = [fork(train.main, *tiny, f'--dataset={data}', *FOREVER, log=tmp_path / f'log{rank}',
                **env) for rank, env in enumerate(ranks(2))]
    log = tmp_path / 'log0'
    wait_until(lambda: log.exists() and 'iter      2' in log.read_text())
    message = fails(capsys, monkeypatch, prepare.main, *command(texts[1], data, '--overwrite'))
    for pid in job:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    assert all(f'process {pid}' in message for pid in job)
    with not_read(data):
        pass


def test_every_read_from_disk_is_of_a_dataset_that_is_kept(tiny, trained, data, monkeypatch):
    read, kept = TokenFile.read, []

    def read_and_try(self, *args):
        with pytest.raises(BlockingIOError):
            files.system_lock(data / 'meta.json')
        kept.append(self)
        return read(self, *args)

    monkeypatch.setattr(TokenFile, 'read', read_and_try)
    monkeypatch.setattr(evaluate, 'fits_in_ram', lambda *_: False)
    for reader, *argv in (
            (train.main, *tiny, f'--dataset={data}', '--data_in_ram=False'),
            (evaluate.main, f'--out_dir={trained}', f'--dataset={data}', '--tasks=val'),
            (bench.main, '--data', *tiny, f'--dataset={data}', '--steps=1', '--warmup_steps=0'),
            (prepare.main, 'inspect', data)):
        kept.clear()
        monkeypatch.setattr(sys, 'argv', ['script', *map(str, argv)])
        reader([str(word) for word in argv])
        assert kept, argv
        with not_read(data):  # and is free again
            pass


def test_a_run_whose_tokens_are_in_memory_keeps_nobody_from_replacing_them(
        tiny, texts, data, monkeypatch):
    read, replaced = BatchLoader.train_batch, []

    def read_and_replace(self, step, micro):
        if step == 3 and not replaced:
            replaced.append(prepare.main(command(texts[1], data, '--overwrite')))
        return read(self, step, micro)

    monkeypatch.setattr(BatchLoader, 'train_batch', read_and_replace)
    train.main([*tiny, f'--dataset={data}', '--data_in_ram=True'])
    assert replaced


def test_what_was_prepared_meanwhile_is_published_by_the_same_command_later(
        texts, data, capsys, monkeypatch):
    before, readers, write = contents(data), [], prepare.write_shards

    def write_while_one_begins_to_read(*args):
        readers.append(open_dataset(data).split('train'))
        return write(*args)

    again = command(texts[1], data, '--overwrite')
    with monkeypatch.context() as patched:
        patched.setattr(prepare, 'write_shards', write_while_one_begins_to_read)
        message = fails(capsys, monkeypatch, prepare.main, *again)
    assert f'what was prepared stays in {data}/unfinished' in message
    assert {path: contents(data)[path] for path in before} == before
    monkeypatch.delattr(encoding, 'encode_batch')  # nothing is encoded again
    assert f'process {os.getpid()}' in fails(capsys, monkeypatch, prepare.main, *again)
    readers.clear()
    prepare.main(again)
    assert contents(data).keys() == before.keys() and contents(data) != before


def test_parts_are_not_merged_into_a_dataset_that_is_read(texts, tmp_path, capsys, monkeypatch):
    data = tmp_path / 'data'
    options = ['--documents=line', '--tokenizer=byte']
    prepare.main(command(texts[0], data, *options))
    before = contents(data)
    for part in ('1/2', '2/2'):
        prepare.main(command(texts[1], data, *options, f'--part={part}', '--overwrite'))
    parts = contents(data / 'parts')
    reader = open_dataset(data).split('val')
    assert 'not replaced' in fails(capsys, monkeypatch, prepare.main, 'merge', data)
    assert contents(data / 'parts') == parts
    del reader
    prepare.main(['merge', str(data)])
    assert contents(data).keys() - before.keys() and not (data / 'parts').exists()


def test_a_dataset_that_is_replaced_before_it_is_read_is_not_read_as_the_one_before(texts, data):
    for in_ram in (False, True):
        dataset = open_dataset(data)
        prepare.main(command(texts[1 - in_ram], data, '--overwrite'))
        with pytest.raises(UserError, match=r'has changed since|another checksum'):
            dataset.split('train', in_ram)
        assert len(open_dataset(data).split('train', in_ram))


def test_who_holds_a_lock_is_told_where_the_system_does(tmp_path):
    path = tmp_path / 'meta.json'
    path.touch()
    assert lock_holders(path) == lock_holders(tmp_path / 'no') == 'another process'
    handles = [files.system_lock(path, shared=True) for _ in range(2)]
    assert lock_holders(path).startswith(f'process {os.getpid()} (')
    assert lock_holders(path).count('process') == 1
    for handle in handles:
        os.close(handle)


# -----------------------------------------------------------------------------
# what changes under its reader


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def append(path):
    with open(path, 'ab') as f:
        f.write(b'\1\0')


def overwrite(path):
    path.write_bytes(path.read_bytes()[::-1])


def replace(path):
    new = path.with_suffix('.new')
    new.write_bytes(path.read_bytes()[2:] + b'\1\0')
    os.replace(new, path)


CHANGES = {'cut short': cut, 'emptied': lambda path: os.truncate(path, 0), 'longer': append,
           'overwritten': overwrite, 'renamed over': replace, 'removed': os.unlink}
# While which of these is most of what the process does.
WORK = {'training': ['--eval_interval=100000', '--health_interval=1'],
        'evaluating': ['--eval_interval=1', '--eval_iters=50', '--health_interval=1']}
SOON = [('training', 9, 'removed'), ('training', 1, 'cut short'), ('evaluating', 9, 'overwritten')]
CASES = [pytest.param(*case, marks=[] if case in SOON else pytest.mark.slow)
         for case in itertools.product(WORK, (1, 9), CHANGES)]


@pytest.mark.parametrize(('work', 'shards', 'change'), CASES)
def test_a_run_that_reads_what_changes_saves_and_ends_in_one_line(
        work, shards, change, tiny, text_file, tmp_path):
    data, log = tmp_path / 'data', tmp_path / 'log'
    prepare.main(command(text_file, data, f'--shard_tokens={120_000 // shards}'))
    run = start(tiny, data, log, *WORK[work])
    for path in sorted(data.glob('train*.bin')):
        CHANGES[change](path)
    ended_as_it_should(run, log, tmp_path / 'out')


def ended_as_it_should(run, log, out_dir):
    assert exit_code(run) == 2
    errors = [line for line in log.read_text().splitlines() if 'rror' in line]
    assert len(errors) == 1 and errors[0].startswith('error: '), log.read_text()
    assert '.bin ' in errors[0] and 'Traceback' not in log.read_text()
    assert list(out_dir.glob('checkpoints/iter-*/state.json'))


@pytest.mark.parametrize('change', CHANGES)
def test_preflight_compares_batches_with_no_file_that_changed(change, data):
    stream = open_dataset(data).split('train')
    assert len(tokens_on_disk(stream, 50, 9)) == 9
    CHANGES[change](data / 'train.bin')
    with pytest.raises(UserError, match=r'train\.bin (has changed|cannot be read)'):
        tokens_on_disk(stream, 50, 9)


def test_processes_that_find_different_tokens_do_not_train(tiny, texts, data, tmp_path):
    prepare.main(command(texts[1], tmp_path / 'other'))
    job = [fork(train.main, *tiny, f'--dataset={tmp_path}/{name}', log=tmp_path / f'{name}.log',
                **env) for name, env in zip(('data', 'other'), ranks(2), strict=True)]
    assert [exit_code(pid) for pid in job] == [2, 2]
    assert all('find different tokens' in (tmp_path / f'{name}.log').read_text()
               for name in ('data', 'other'))


def refuse(*_):
    raise OSError(errno.ENOLCK, 'No locks available')


@pytest.mark.parametrize('shards', [pytest.param(1, marks=pytest.mark.slow), 9])
def test_where_the_system_has_no_locks_a_run_ends_when_its_data_is_replaced(
        shards, tiny, texts, tmp_path, monkeypatch):
    data, log = tmp_path / 'data', tmp_path / 'log'
    prepare.main(command(texts[0], data, f'--shard_tokens={120_000 // shards}'))
    monkeypatch.setattr(files.fcntl, 'flock', refuse)
    run = start(tiny, data, log)
    prepare.main(command(texts[1], data, '--overwrite', f'--shard_tokens={120_000 // shards}'))
    ended_as_it_should(run, log, tmp_path / 'out')
