"""prepare.py chat: conversations as a dataset, and what inspect shows of it."""

import json
import os
import random

import numpy as np
import pytest
from processes import ROOT
from sample_data import ask

import prepare
from plaingpt.core.dataset import open_dataset, open_dataset_spec
from plaingpt.data.inspection import inspect
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of


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
    tokenizer, texts = dataset.tokenizer(), []
    for i, in_loss in zip(*read(dataset, split), strict=True):
        if i == tokenizer.bos_id:
            texts.append([[], []])
        texts[-1][0].append(i)
        texts[-1][1] += [i] if in_loss else []
    return [tuple(map(tokenizer.decode, both)) for both in texts]


@pytest.fixture(params=[97, 10**6])
def dataset(request):
    """In shards of so many tokens."""
    return prepare_chat(f'--shard_tokens={request.param}')


def test_the_loss_is_over_the_answers(dataset):
    texts = conversations(dataset, 'train') + conversations(dataset, 'val')
    assert sorted(texts) == sorted(
        (f'<|conversation|><|user|>{row["prompt"]}<|end|><|assistant|>{row["completion"]}<|end|>',
         f'{row["completion"]}<|end|>') for row in pairs(100))


def test_a_loss_mask_is_beside_each_shard(dataset):
    names = {'meta.json'}
    for entry in dataset.meta['splits'].values():
        for file in entry['files']:
            mask = file['name'].replace('.bin', '_mask.bin')
            names |= {file['name'], mask}
            assert sha256_of(f'data/chat/{mask}') == file['mask_sha256']
    assert {*os.listdir('data/chat')} == names


def test_a_tokenizer_is_trained_on_the_text_of_messages_only():
    assert set(prepare_chat(tokenizer='char').tokenizer().base.tokens) == set(
        ''.join(row['prompt'] + row['completion'] for row in pairs(100))) | {'\n'}


ROWS = [{'prompt': 'the', 'completion': 'to' * i} for i in range(1, 60)]


@pytest.mark.parametrize('source', ['dataset', 'run', 'run/checkpoints/iter-00000006'])
def test_a_borrowed_tokenizer_gets_the_special_tokens(source):
    folder = ROOT / 'tests/data/format_1'
    base = open_dataset(folder / 'dataset').tokenizer_json()
    dataset = prepare_chat(rows=ROWS, tokenizer=f'{folder}/{source}')
    assert dataset.tokenizer_json() == {'kind': 'chat', 'base': base}


def test_text_does_not_take_a_tokenizer_of_conversations():
    prepare_chat(rows=ROWS)
    with pytest.raises(UserError, match='tokenizer=chat'):
        prepare.main(['text', f'--input={ROOT}/README.md', '--tokenizer=chat'])


def test_overwrite_removes_the_loss_masks_too():
    prepare_chat('--shard_tokens=97')
    prepare.main(['text', '--input=a.jsonl', '--text_field=prompt', '--tokenizer=byte',
                  '--data_dir=data/chat', '--overwrite'])
    assert sorted(os.listdir('data/chat')) == ['meta.json', 'train.bin', 'val.bin']


def test_inspect_puts_the_loss_in_brackets(capsys):
    prepare_chat(rows=[{'prompt': 'a\x1b]0;b\x07', 'completion': '\x1b[31mc\nd'}] * 40
                 + pairs(40))
    capsys.readouterr()
    inspect('data/chat')
    text = capsys.readouterr().out
    assert '\n    <|user|>a\\x1b]0;b\\x07<|end|>\n    <|assistant|>[\\x1b[31mc\nd<|end|>]\n' in text
    assert '\x1b' not in text  # it would move the cursor


def test_one_conversation_is_not_cut():
    with pytest.raises(UserError, match='val split is empty'):
        prepare_chat(rows=pairs(1) * 3)


def test_conversations_are_refused_in_a_mixture():
    prepare_chat()
    with pytest.raises(UserError, match='data/chat'):
        open_dataset_spec('data/chat:0.5,./data/chat:0.5')


@pytest.mark.parametrize(('answer', 'share'), [('Yes.', None), ('The same long answer. ' * 20, 1)])
def test_only_what_the_assistant_says_is_a_copy_of_training_text(answer, share):
    system = {'role': 'system', 'content': 'You are a helpful assistant. ' * 9}
    rows = [{'messages': [system, *ask(f'{i}?', answer)]} for i in range(100)]
    in_train = prepare_chat('--val_fraction=0.3', rows=rows).split_entry('val').get('in_train')
    assert in_train == pytest.approx(share, abs=0.5)
