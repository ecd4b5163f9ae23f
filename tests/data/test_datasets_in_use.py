"""A dataset that one process reads from disk is not replaced by another that prepares it anew."""

import os
import signal
import sys

import pytest
from helpers import exit_code, fails, fork, wait_until

import bench
import evaluate
import prepare
import train
from plaingpt.data import encoding
from plaingpt.system.errors import UserError
from plaingpt.system.files import system_lock
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import not_read, open_dataset
from plaingpt.data.token_files import TokenFile


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*.*')}


@pytest.fixture
def again(text_file, own_data, tmp_path):
    """The command that replaces `own_data` by another text of the same characters and length."""
    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])
    return ['text', f'--input={other}', '--tokenizer=char', f'--data_dir={own_data}', '--overwrite']


def test_a_dataset_that_a_training_reads_is_not_replaced_until_it_has_ended(
        tiny, own_data, again, tmp_path, capsys, monkeypatch):
    before, log = contents(own_data), tmp_path / 'log'
    run = fork(train.main, *tiny, f'--dataset={own_data}', '--data_in_ram=False',
               '--max_iters=100000', '--check=False', log=log)
    wait_until(lambda: log.exists() and 'iter      2' in log.read_text())
    with monkeypatch.context() as patched:
        patched.delattr(encoding, 'encode_batch')  # it is refused before the work
        message = fails(capsys, monkeypatch, prepare.main, *again)
    assert f'{own_data} is read by process {run}' in message and contents(own_data) == before
    os.kill(run, signal.SIGKILL)
    exit_code(run)
    prepare.main(again)
    assert contents(own_data) != before and 'error' not in log.read_text()


def test_every_command_that_reads_from_disk_keeps_the_dataset(tiny, trained, own_data, monkeypatch):
    read, kept = TokenFile.read, []

    def read_and_try(self, *args):
        with pytest.raises(BlockingIOError):
            system_lock(own_data / 'meta.json')
        kept.append(self)
        return read(self, *args)

    monkeypatch.setattr(TokenFile, 'read', read_and_try)
    monkeypatch.setattr(evaluate, 'fits_in_ram', lambda *_: False)
    for main, *argv in (
            (train.main, *tiny, f'--dataset={own_data}', '--data_in_ram=False', '--check=False'),
            (evaluate.main, f'--out_dir={trained}', f'--dataset={own_data}', '--tasks=val'),
            (bench.main, '--data', *tiny, f'--dataset={own_data}', '--steps=1', '--warmup_steps=0'),
            (prepare.main, 'inspect', own_data)):
        kept.clear()
        monkeypatch.setattr(sys, 'argv', ['script', *map(str, argv)])
        main([str(word) for word in argv])
        assert kept, argv
        with not_read(own_data):  # and is free again
            pass


def test_a_run_whose_tokens_are_in_memory_keeps_nobody_from_replacing_them(
        tiny, own_data, again, monkeypatch):
    read, replaced = BatchLoader.train_batch, []

    def read_and_replace(self, step, micro):
        if step == 3 and not replaced:
            replaced.append(prepare.main(again))
        return read(self, step, micro)

    monkeypatch.setattr(BatchLoader, 'train_batch', read_and_replace)
    train.main([*tiny, f'--dataset={own_data}', '--data_in_ram=True'])
    assert replaced


def test_what_was_prepared_meanwhile_is_published_by_the_same_command_later(
        own_data, again, capsys, monkeypatch):
    before, write = open_dataset(own_data), prepare.write_shards
    readers = []

    def write_while_one_begins_to_read(*args):
        readers.append(open_dataset(own_data).split('train'))
        return write(*args)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, 'write_shards', write_while_one_begins_to_read)
        message = fails(capsys, monkeypatch, prepare.main, *again)
    assert f'what was prepared stays in {own_data}/unfinished' in message
    assert open_dataset(own_data).meta == before.meta
    monkeypatch.delattr(encoding, 'encode_batch')  # nothing is encoded again
    readers.clear()
    prepare.main(again)
    assert open_dataset(own_data).meta != before.meta
    with pytest.raises(UserError, match='has changed since'):
        before.split('train')  # whoever read the old meta.json does not read the new tokens by it
