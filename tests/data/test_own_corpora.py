"""The table of docs/data.md: what you have → the command → a dataset."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from corpus_files import write_parquet, write_rows
from helpers import ROOT

import prepare
from plaingpt.data.dataset import open_dataset

TABLE = re.findall(r'^\| ([^|]+) \| (`python prepare.py [^`]+`|none).* \|$',
                   (ROOT / 'docs/data.md').read_text(encoding='utf-8'), re.M)
# that row's dataset is somewhere else; a folder laid out like one stands for it
COMMANDS = [command.strip('`').replace('OWNER/NAME', 'posts/') for _, command in TABLE]
TEXT = 'It was a dark and stormy night; the rain fell in torrents, except at intervals. '


@pytest.fixture(scope='module')
def corpora(tmp_path_factory):
    """A working directory with all that the table's commands name."""
    folder = tmp_path_factory.mktemp('corpora')
    texts = [f'{TEXT * 5}{n} {chr(97 + n % 26) * 3}\n' for n in range(60)]
    (folder / 'notes').mkdir()
    for n, text in enumerate(texts):
        (folder / f'notes/{n}.md').write_text(text)
    for name in ('book.txt', 'more.txt'):
        (folder / name).write_text(''.join(texts))
    write_rows(folder / 'posts.jsonl', texts, 'body')
    write_parquet(folder / 'posts/train.parquet', [f'{TEXT[:30]}{n}' for n in range(600)], 'body')
    (folder / 'chats.jsonl').write_text(''.join(
        json.dumps({'prompt': f'{n}?', 'completion': t}) + '\n' for n, t in enumerate(texts)))
    with open(folder / 'questions.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('question', 'answer'), *((f'{n}?', t) for n, t in
                                                              enumerate(texts))])
    prepare.main(['text', f'--input={folder}/book.txt', '--tokenizer=byte',
                  f'--data_dir={folder}/data/notes'])
    return folder


@pytest.mark.parametrize('command', COMMANDS)
def test_what_you_have_becomes_a_dataset(command, corpora, monkeypatch):
    assert len(COMMANDS) == 9
    monkeypatch.chdir(corpora)
    shutil.rmtree('data/mine', ignore_errors=True)
    if command == 'none':
        Path('data/mine').mkdir()
        for name in ('train.bin', 'val.bin'):
            shutil.copy(f'data/notes/{name}', 'data/mine')
    else:
        prepare.main(shlex.split(command)[2:])
    assert all(len(open_dataset('data/mine').split(split)) > 100 for split in ('train', 'val'))
