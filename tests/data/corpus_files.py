"""Files of documents to prepare, and the datasets that prepare.py makes of them."""

import json

import pyarrow
import pyarrow.parquet
from processes import die_before_change, exit_code, fork

import prepare
from plaingpt.core.dataset import open_dataset


def write_rows(path, texts, field='text'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps({field: text}) + '\n' for text in texts))


def write_files(folder, *texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f'{i}.txt').write_bytes(text.encode())
    return folder


def write_parquet(path, texts, field='text', columns=None, **options):
    """columns: {name: values} of more beside the text"""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({field: texts, **(columns or {})})
    pyarrow.parquet.write_table(table, path, **options)


def split_bytes(folder, split):
    """The bytes of a split that was prepared by bytes, with \\0 for the end of text."""
    return bytes((open_dataset(folder).split(split).read(0, 10**9) % 256).astype('u1'))


def documents_of(folder):
    """{split: its documents} of a dataset that was prepared by bytes."""
    return {split: split_bytes(folder, split).decode().split('\0')[1:]
            for split in open_dataset(folder).meta['splits']}


def prepared(folder, *argv):
    """Prepare by bytes → the documents of each split."""
    prepare.main([*map(str, argv), '--tokenizer=byte', f'--data_dir={folder}'])
    return [*documents_of(folder).values()]


def killed(n, argv, folder):
    """Prepare `folder` in a process that ends before its n-th change there → its exit code, 9, or 0
    where it was done before."""
    return exit_code(fork(prepare.main, *argv, log=f'{folder}.log',
                          before=lambda: die_before_change(n, str(folder))))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
