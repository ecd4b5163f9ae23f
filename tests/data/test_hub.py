"""Datasets of the hub, which the real clients fetch from the stand-in of tests/hub.py."""

import json
import re
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from corpus_files import contents, prepared, write_parquet, write_rows
from foreign_models import save_tokenizer
from processes import fails

import prepare
from plaingpt.core.dataset import open_dataset

TEXTS = [f'document {i} ' + 'of some length ' * (i % 9) for i in range(300)]
BYTES = '--tokenizer=byte'


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """The clients try for minutes to reach a hub that does not answer."""
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    monkeypatch.setattr(datasets.config, 'STREAMING_READ_MAX_RETRIES', 2)


def write_card(folder, **content):
    """The README.md of a dataset, whose head is YAML, of which JSON is a part."""
    (folder / 'README.md').write_text(f'---\n{json.dumps(content)}\n---\n# A dataset\n')


def tinystories(hub):
    """Parquet of two splits, in several files, with the texts beside it that it was made of."""
    folder = hub.dataset('roneneldan/TinyStories')
    for name, texts in (('train-00000-of-00002-2d5a1467fff1081b', TEXTS[:200]),
                        ('train-00001-of-00002-5852b56a2bd28fd9', TEXTS[200:]),
                        ('validation-00000-of-00001-869c898b519ad725', ['held', 'out'])):
        write_parquet(folder / f'data/{name}.parquet', texts)
    (folder / 'TinyStories-train.txt').write_text('not this\n')
    write_card(folder, dataset_info={
        'features': [{'name': 'text', 'dtype': 'string'}],
        'splits': [{'name': 'train', 'num_bytes': 20_000, 'num_examples': 300},
                   {'name': 'validation', 'num_bytes': 7, 'num_examples': 2}]})


def openwebtext(hub):
    """A script, and Parquet on a branch that the hub made of it."""
    (hub.dataset('Skylion007/openwebtext') / 'openwebtext.py').write_text('raise SystemExit')
    folder = hub.dataset('Skylion007/openwebtext@refs/convert/parquet')
    write_parquet(folder / 'plain_text/partial-train/0000.parquet', TEXTS[:150])
    write_parquet(folder / 'plain_text/partial-train/0001.parquet', TEXTS[150:])


CORPORA = {'tinystories': tinystories, 'openwebtext': openwebtext}


@pytest.mark.parametrize('name', CORPORA)
def test_a_corpus_is_read_from_its_place_on_the_hub(name, hub, tmp_path):
    CORPORA[name](hub)
    train, val = prepared(tmp_path / 'd', name)
    if name == 'tinystories':
        assert (train, val) == (TEXTS, ['held', 'out'])
    else:
        assert sorted(train + val) == sorted(TEXTS)


def test_what_max_tokens_does_not_need_is_not_downloaded(hub, small_batches):
    for n in range(9):
        write_parquet(hub.dataset('a/b') / f'train-{n}.parquet', TEXTS)
    prepare.main(['hf', 'a/b', BYTES, '--max_tokens=1_000', '--num_proc=1'])
    downloads = [line[-9] for line in hub.requests if re.match('GET.*parquet', line)]
    assert '0' in downloads and not {*downloads} & {*'345678'}  # a few are read ahead


def test_any_dataset_is_prepared_by_its_name(hub, tmp_path):
    folder = hub.dataset('some-one/words.en')
    splits = {'train': ['not this'], 'extra': TEXTS, 'dev': ['held', 'out']}
    for split, texts in splits.items():
        write_rows(folder / f'{split}.jsonl', texts, field='body')
    write_card(folder, configs=[{'config_name': 'all', 'data_files': '*.jsonl'}, {
        'config_name': 'some', 'data_files': [{'split': split, 'path': f'{split}.jsonl'}
                                              for split in splits]}])
    argv = ['hf', 'some-one/words.en', '--subset=some', '--split=extra', '--val_split=dev',
            '--text_field=body']
    assert prepared(tmp_path / 'd', *argv) == [TEXTS, ['held', 'out']]


def test_conversations_are_read_from_the_hub(hub):
    rows = [[{'role': 'user', 'content': f'{i}?'}, {'role': 'assistant', 'content': f'{i}.'}]
            for i in range(100)]
    for split, messages in ('train', rows), ('test', rows[:5]):
        write_parquet(hub.dataset('a/chats') / f'data/{split}-00000-of-00001.parquet', messages,
                      field='messages', columns={'prompt_id': ['x'] * len(messages)})
    prepare.main(['chat', 'a/chats', BYTES, '--val_split=test', '--data_dir=d'])
    dataset = open_dataset('d')
    assert dataset.has_mask()
    assert [dataset.split_entry(split)['documents'] for split in ('train', 'val')] == [100, 5]


def test_a_text_takes_the_tokenizer_of_a_model_of_the_hub(hub, tmp_path):
    folder = hub.model('a/qwen')
    made = save_tokenizer(folder, 'qwen', TEXTS)
    (folder / 'config.json').write_text('{"vocab_size": 512}')
    (folder / 'model.safetensors').write_bytes(b'large')
    Path('a.txt').write_text('\n'.join(TEXTS))
    prepare.main(['text', 'a.txt', '--tokenizer=a/qwen', '--data_dir=d'])
    ids = [open_dataset('d').split(split).read(0, 10**9) for split in ('train', 'val')]
    assert open_dataset('d').vocab_size == 512
    assert made.decode(np.concatenate(ids), skip_special_tokens=False) == '\n'.join(TEXTS)
    assert not any('safetensors' in line for line in hub.requests)


# -----------------------------------------------------------------------------
# what the hub refuses


COMMANDS = [['hf', 'a/b', BYTES], ['text', 'a.txt', '--tokenizer=a/b']]


def refused(argv, capsys, monkeypatch):
    """Prepare, which has to end in one line and to write nothing → that line."""
    Path('a.txt').write_text('a text')
    line = fails(capsys, monkeypatch, prepare.main, *argv)
    assert [path.name for path in Path().rglob('*')] == ['a.txt']
    return line


@pytest.mark.parametrize('argv', COMMANDS)
def test_a_name_that_is_not_on_the_hub_is_one_line(argv, hub, capsys, monkeypatch):
    assert 'a/b' in refused(argv, capsys, monkeypatch)


@pytest.mark.parametrize('argv', COMMANDS)
def test_gated_data_asks_to_log_in(argv, hub, capsys, monkeypatch):
    write_rows(hub.dataset('a/b') / 'train.jsonl', TEXTS)
    save_tokenizer(hub.model('a/b'), 'qwen', TEXTS)
    hub.gate('a/b', 'of a member')
    monkeypatch.setenv('HF_TOKEN', 'of someone without access')
    assert 'hf auth login' in refused(argv, capsys, monkeypatch)
    monkeypatch.setenv('HF_TOKEN', 'of a member')
    prepare.main(argv)


@pytest.mark.parametrize('argv', COMMANDS)
def test_a_hub_that_does_not_answer_is_one_line(argv, hub, capsys, monkeypatch):
    hub.fail_after(0)
    assert 'a/b' in refused(argv, capsys, monkeypatch)


@pytest.mark.parametrize('end', ['jsonl', pytest.param('parquet', marks=pytest.mark.slow)])
def test_a_download_that_broke_off_continues_with_the_same_command(
        end, hub, small_batches, capsys, monkeypatch):
    write = write_rows if end == 'jsonl' else write_parquet
    for n in range(3):
        write(hub.dataset('a/b') / f'train-{n}.{end}', [f'{n} {text}' for text in 5 * TEXTS])
    argv = ['hf', 'a/b', BYTES, '--shard_tokens=20_000', '--val_fraction=0.1', '--num_proc=1']
    prepare.main([*argv, '--data_dir=whole'])
    hub.forget()
    hub.fail_after(1_000, within='train-2')
    fails(capsys, monkeypatch, prepare.main, *argv, '--data_dir=d')
    assert not Path('d/meta.json').exists()
    hub.recover()
    prepare.main([*argv, '--data_dir=d'])
    assert 'resuming' in capsys.readouterr().out
    assert contents(Path('d')) == contents(Path('whole'))
