"""The table of docs/data.md: what you have → the command → a dataset that trains."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from corpus_files import write_parquet, write_rows
from helpers import ROOT, TINY

import prepare
import train

TABLE = re.findall(r'^\| ([^|]+) \| (`python prepare.py [^`]+`|none).* \|$',
                   (ROOT / 'docs/data.md').read_text(encoding='utf-8'), re.M)
# and what the page says in other words
OTHERS = ['python prepare.py text book.txt notes/*.md --data_dir=data/mine',
          'python prepare.py text old.txt --encoding=latin-1 --data_dir=data/mine',
          'python prepare.py text posts.parquet --text_field=body --data_dir=data/mine']
# that row's dataset is somewhere else; a folder laid out like one stands for it
COMMANDS = [*(command.strip('`').replace('OWNER/NAME', 'posts/') for _, command in TABLE), *OTHERS]
TEXT = 'It was a dark and stormy night; the rain fell in torrents, except at intervals. '


@pytest.fixture(scope='module')
def corpora(tmp_path_factory):
    """A working directory with all that the table's commands name."""
    folder = tmp_path_factory.mktemp('corpora')
    texts = [f'{TEXT * 5}{n} {chr(97 + n % 26) * 3}\n' for n in range(60)]
    (folder / 'notes').mkdir()
    for n, text in enumerate(texts):
        (folder / f'notes/{n}.md').write_text(text)
    (folder / 'notes/picture.ipynb').write_text('{"image/png": "iVBORw0K"}')
    for name in ('book.txt', 'more.txt'):
        (folder / name).write_text(''.join(texts))
    write_rows(folder / 'posts.jsonl', texts, 'body')
    write_parquet(folder / 'posts.parquet', texts, 'body')
    write_parquet(folder / 'posts/train.parquet', [f'{TEXT[:30]}{n}' for n in range(600)], 'body')
    (folder / 'chats.jsonl').write_text(''.join(
        json.dumps({'prompt': f'{n}?', 'completion': t}) + '\n' for n, t in enumerate(texts)))
    (folder / 'old.txt').write_text('é'.join(texts), encoding='latin-1')
    with open(folder / 'questions.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('question', 'answer'), *((f'{n}?', t) for n, t in
                                                              enumerate(texts))])
    prepare.main(['text', f'--input={folder}/book.txt', '--tokenizer=byte',
                  f'--data_dir={folder}/data/notes'])
    return folder


def test_the_table_is_there():
    assert len(TABLE) == 9


@pytest.mark.parametrize('command', COMMANDS)
def test_what_you_have_becomes_a_dataset_that_trains(command, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(corpora)
    shutil.rmtree('data/mine', ignore_errors=True)
    if command == 'none':
        Path('data/mine').mkdir()
        for name in ('train.bin', 'val.bin'):
            shutil.copy(f'data/notes/{name}', 'data/mine')
    else:
        prepare.main(shlex.split(command)[2:])
        assert '.ipynb' not in Path('data/mine/meta.json').read_text()
    monkeypatch.setattr(train, 'preflight', lambda *_: None)  # which checks the code
    train.main([*TINY, '--dataset=mine', f'--out_dir={tmp_path}', '--n_layer=1', '--max_iters=1',
                '--eval_iters=1', '--always_save_checkpoint=False'])
    assert (tmp_path / 'metrics.jsonl').exists()
