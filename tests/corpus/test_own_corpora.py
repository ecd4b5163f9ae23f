"""The table of docs/data.md: what you have → the command → a dataset that trains."""

import json
import re
import shlex
import shutil

import pytest
from helpers import ROOT, TINY

import prepare
import train

TABLE = re.findall(r'^\| ([^|]+) \| (`python prepare.py [^`]+`|none).* \|$',
                   (ROOT / 'docs/data.md').read_text(encoding='utf-8'), re.M)
TEXT = 'It was a dark and stormy night; the rain fell in torrents, except at intervals. '


@pytest.fixture(scope='module')
def corpora(tmp_path_factory):
    """A folder with all that the table's commands name."""
    import pyarrow
    import pyarrow.parquet
    folder = tmp_path_factory.mktemp('corpora')
    texts = [f'{TEXT * 5}{n} {chr(97 + n % 26) * 3}\n' for n in range(60)]
    (folder / 'notes').mkdir()
    for n, text in enumerate(texts):
        (folder / f'notes/{n}.md').write_text(text)
    (folder / 'notes/picture.ipynb').write_text('{"image/png": "iVBORw0K"}')
    for name in ('book.txt', 'more.txt'):
        (folder / name).write_text(''.join(texts))
    (folder / 'posts.jsonl').write_text(''.join(json.dumps({'body': t}) + '\n' for t in texts))
    pyarrow.parquet.write_table(pyarrow.table({'body': texts}), folder / 'posts.parquet')
    (folder / 'chats.jsonl').write_text(''.join(
        json.dumps({'prompt': f'{n}?', 'completion': t}) + '\n' for n, t in enumerate(texts)))
    (folder / 'posts').mkdir()  # of the hub's, one document in 2,000 is for validation
    pyarrow.parquet.write_table(pyarrow.table({'body': [f'{TEXT}{n}' for n in range(6000)]}),
                                folder / 'posts/train.parquet')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare.main(['text', '--input=book.txt', '--tokenizer=byte', '--data_dir=data/notes'])
    return folder


def test_the_table_is_there():
    assert len(TABLE) == 11


@pytest.mark.parametrize('command', dict.fromkeys(command for _, command in TABLE))
def test_what_you_have_becomes_a_dataset_that_trains(command, corpora, tmp_path,
                                                     monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in corpora.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / 'data').unlink()
    shutil.copytree(corpora / 'data', 'data')
    if command == 'none':
        (tmp_path / 'data/mine').mkdir()
        for name in ('train.bin', 'val.bin'):
            shutil.copy(tmp_path / 'data/notes' / name, tmp_path / 'data/mine')
    else:
        words = shlex.split(command.strip('`'))[2:]
        # that row's dataset is somewhere else; a folder laid out like one stands for it
        prepare.main([word.replace('OWNER/NAME', 'posts') for word in words])
        assert '.ipynb' not in (tmp_path / 'data/mine/meta.json').read_text()
    train.main([*TINY, '--dataset=mine', '--out_dir=out', '--max_iters=1', '--eval_iters=1',
                '--health_interval=0', '--always_save_checkpoint=False'])
    assert (tmp_path / 'out/metrics.jsonl').exists()
