"""Files of documents to prepare, and the datasets that prepare.py makes of them."""

import itertools
import json
import os
import signal

import pyarrow
import pyarrow.parquet
from helpers import exit_code, fork

import prepare
from plaingpt.corpus.text_files import Files
from plaingpt.tokens.dataset import open_dataset


def write_rows(path, texts, field='text'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps({field: text}) + '\n' for text in texts))


def write_parquet(path, texts, field='text', **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({field: texts}), path, **options)


def texts_of(path, form='file', field='text', errors='strict'):
    """The documents of a file as prepare.py reads it."""
    found = []
    for piece in Files([path], path.name, form, field, errors).pieces():
        if piece.new_document:
            found.append('')
        found[-1] += piece.text
    return found


def split_bytes(folder, split):
    """The bytes of a split that was prepared by bytes, with \\0 for the end of text."""
    return bytes((open_dataset(folder).split(split, in_ram=True).ram % 256).astype('u1'))


def documents_of(folder):
    """{split: its documents} of a dataset that was prepared by bytes."""
    return {split: split_bytes(folder, split).decode().split('\0')[1:]
            for split in open_dataset(folder).meta['splits']}


def prepared(folder, *argv):
    """Prepare by bytes → the documents of train, of val and, where there is one, of test."""
    prepare.main([*map(str, argv), '--tokenizer=byte', f'--data_dir={folder}'])
    return [*documents_of(folder).values()]


def contents(folder):
    """{name: bytes} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepare_killed(change, *argv, log):
    """Run prepare.py in a process that kills itself in the place of its change of the disk of that
    number → its exit code: -9, or 0 where it made fewer changes."""
    changes = itertools.count(1)

    def dying(do):
        def call(*arguments, **options):
            if next(changes) == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*arguments, **options)
        return call

    def patch():
        for name in ('replace', 'fsync', 'truncate', 'unlink'):
            setattr(os, name, dying(getattr(os, name)))

    return exit_code(fork(prepare.main, *argv, log=log, before=patch))
