"""prepare.py chat: conversations as a dataset, and what inspect shows of it."""

import hashlib
import json
import os
import random

import numpy as np
import pytest
from processes import ROOT, fails

import prepare
from plaingpt.data.dataset import open_dataset, open_named
from plaingpt.data.inspection import inspect
from plaingpt.system.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, rows):
    with open(name, 'w') as f:
        f.writelines(json.dumps(row) + '\n' for row in rows)


def pairs(n):
    chance = random.Random(0)
    return [{'prompt': f'What is {i}?' + ' Please.' * chance.randrange(9),
             'completion': f'It is {i} ü.'} for i in range(n)]


def prepare_chat(*options, rows=100, tokenizer='byte'):
    write('a.jsonl', pairs(rows) if isinstance(rows, int) else rows)
    prepare.main(['chat', '--input=a.jsonl', f'--tokenizer={tokenizer}', *options])
    return open_dataset('data/chat')


def read(dataset, split):
    """→ (ids, loss mask) of a split, as lists"""
    stream = dataset.split(split)
    return [each.sequences(np.array([0]), len(stream))[0].tolist()
            for each in (stream, stream.loss_mask)]


def conversations(dataset, split):
    """The conversations of a split as [(text, what of it is in the loss)]."""
    tokenizer, found = dataset.tokenizer(), []
    for i, in_loss in zip(*read(dataset, split), strict=True):
        if i == tokenizer.conversation:
            found.append([[], []])
        found[-1][0].append(i)
        found[-1][1] += [i] if in_loss else []
    return [tuple(map(tokenizer.decode, both)) for both in found]


@pytest.mark.parametrize('shard_tokens', [97, 10**6])
def test_the_files_are_the_conversations_and_beside_each_is_its_loss_mask(shard_tokens):
    dataset = prepare_chat(f'--shard_tokens={shard_tokens}')
    found = [each for split in ('train', 'val') for each in conversations(dataset, split)]
    assert sorted(found) == sorted(
        (f'<|conversation|><|user|>{row["prompt"]}<|end|><|assistant|>{row["completion"]}<|end|>',
         f'{row["completion"]}<|end|>') for row in pairs(100))
    names = set()
    for split, entry in dataset.meta['splits'].items():
        ids, loss_mask = read(dataset, split)
        assert entry['documents'] == ids.count(dataset.tokenizer().conversation)
        assert entry['learned'] == sum(loss_mask) and entry['tokens'] == len(loss_mask)
        assert entry['bytes'] == sum(i < 256 for i in ids)
        assert (len(entry['files']) > 1) == (shard_tokens == 97)
        for file in entry['files']:
            mask = file['name'].replace('.bin', '_mask.bin')
            names |= {file['name'], mask}
            with open(f'data/chat/{mask}', 'rb') as f:
                assert hashlib.sha256(f.read()).hexdigest() == file['mask_sha256']
    assert {*os.listdir('data/chat')} == names | {'meta.json'}


def test_a_tokenizer_learns_from_what_is_said_alone():
    assert set(prepare_chat(tokenizer='char').tokenizer().base.chars) == set(
        ''.join(row['prompt'] + row['completion'] for row in pairs(100))) | {'\n'}


def test_the_tokenizer_of_a_dataset_or_a_run_gets_the_special_tokens_once():
    of_run = str(ROOT / 'tests/data/format_1/run')
    of_data = str(ROOT / 'tests/data/format_1/dataset')
    base = open_dataset(of_data).tokenizer_json()
    of_checkpoint = f'{of_run}/checkpoints/{os.listdir(f"{of_run}/checkpoints")[0]}'
    rows = [{'prompt': 'the', 'completion': 'to' * i} for i in range(1, 60)]
    for source in (of_data, of_run, of_checkpoint):
        dataset = prepare_chat('--overwrite', rows=rows, tokenizer=source)
        assert dataset.tokenizer_json() == {'kind': 'chat', 'base': base}
    os.rename('data/chat', 'data/first')
    assert prepare_chat(rows=rows, tokenizer='first').tokenizer_json() == dataset.tokenizer_json()
    with pytest.raises(UserError, match='tokenizer=first: it is for conversations'):
        prepare.main(['text', f'--input={ROOT}/README.md', '--tokenizer=first'])


def test_another_command_replaces_it_only_with_overwrite_and_then_its_masks_too(
        capsys, monkeypatch):
    prepare_chat('--shard_tokens=97')
    write('b.jsonl', [{'text': row['prompt']} for row in pairs(100)])
    other = ['text', '--input=b.jsonl', '--tokenizer=byte', '--data_dir=data/chat']
    assert 'holds another dataset' in fails(capsys, monkeypatch, prepare.main, *other)
    assert open_dataset('data/chat').has_mask()
    prepare.main([*other, '--overwrite'])
    assert sorted(os.listdir('data/chat')) == ['meta.json', 'train.bin', 'val.bin']


ESCAPE = [{'prompt': 'a\x1b]0;b\x07', 'completion': '\x1b[31mc\nd'}] * 40


def test_inspect_puts_the_loss_in_brackets_and_shows_escape_codes(capsys):
    dataset = prepare_chat(rows=[*ESCAPE, *pairs(40)])
    capsys.readouterr()
    inspect('data/chat')
    text = capsys.readouterr().out
    assert '\n    <|user|>a\\x1b]0;b\\x07<|end|>\n    <|assistant|>[\\x1b[31mc\nd<|end|>]\n' \
        in text and '\x1b' not in text
    entry = dataset.split_entry('train')
    assert f'{entry["documents"]} documents; {entry["learned"]:,} tokens in the loss' in text


def test_conversations_are_in_no_mixture():
    prepare_chat()
    with pytest.raises(UserError, match='data/chat holds conversations, which no mixture can'):
        open_named('data/chat:0.5,./data/chat:0.5')


def test_what_the_system_says_in_all_conversations_is_no_copy_and_equal_answers_are():
    told = {'role': 'system', 'content': 'You are a helpful assistant. ' * 9}
    chance = random.Random(0)

    def share(answers):
        rows = [{'messages': [told, {'role': 'user', 'content': f'{i}?'},
                              {'role': 'assistant', 'content': answers(i)}]} for i in range(100)]
        dataset = prepare_chat('--overwrite', '--val_fraction=0.3', rows=rows)
        return dataset.split_entry('val').get('in_train')
    assert share(lambda i: 'Yes.') is None
    assert share(lambda i: ''.join(chance.choices('abcdefgh', k=200))) == 0
    assert share(lambda i: 'The same long answer. ' * 20) > 0.5
