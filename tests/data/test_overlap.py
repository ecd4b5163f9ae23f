"""How much of a validation split is in a training split: of the same dataset, or of another."""

import json
import random
import re

import numpy as np
import pytest
from corpus_files import prepared, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import prepare_corpora, prepare_documents
from test_batches import stream

import prepare
import train
from plaingpt.core.dataset import open_dataset
from plaingpt.core.packing import LossMask
from plaingpt.data.overlap import compare_corpora, find_overlap, print_overlap
from plaingpt.system.errors import UserError


def random_texts(n, length=2000):
    chance = random.Random(0)
    return [''.join(chance.choices('abcdefgh \n', k=length)) for _ in range(n)]


# -----------------------------------------------------------------------------
# the count


def overlap(tmp_path, train, val, in_loss=None, **options):
    """find_overlap of token ids that lie in two files each. in_loss: for conversations"""
    folders = [tmp_path / name for name in ('train', 'val', 'mask')]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    train, val = (stream(folder, ids, files=2)
                  for folder, ids in zip(folders, (train, val), strict=False))
    if in_loss is not None:
        val.loss_mask = LossMask(stream(folders[2], in_loss, files=2).files, 2)
    return find_overlap(train, val, **options)


@given(st.integers(0, 2**32), st.integers(64, 1200), st.integers(64, 1200), st.integers(1, 9),
       st.integers(1, 300), st.sampled_from([None, 0.2, 0.3]))
@settings(max_examples=40)
def test_the_share_is_that_of_a_plain_search(
        tmp_path_factory, seed, train_tokens, val_tokens, vocab_size, block_tokens, in_loss):
    chance = np.random.default_rng(seed)
    train, val = (chance.integers(vocab_size, size=n) for n in (train_tokens, val_tokens))
    for _ in range(chance.integers(8)):  # passages that both have, and each has twice
        to, source = [(train, val), (val, train), (train, train)][chance.integers(3)]
        n = min(chance.integers(200), len(to), len(source))
        at, start = chance.integers(len(to) - n + 1), chance.integers(len(source) - n + 1)
        to[at:at + n] = source[start:start + n].copy()
    mask = None if in_loss is None else chance.random(val_tokens) < in_loss
    present = {train[i:i + 64].tobytes() for i in range(train_tokens - 63)}
    counted, copied = set(), set()
    for i in range(val_tokens - 63):
        tokens = set(range(i, i + 64))
        if mask is not None:
            tokens &= set(np.flatnonzero(mask).tolist())
        if len(tokens) >= 16:
            counted |= tokens
            if val[i:i + 64].tobytes() in present:
                copied |= tokens
    expected = len(copied) / len(counted) if counted else None
    # windows lie across blocks and files
    assert overlap(tmp_path_factory.mktemp('split'), train, val, mask,
                   block_tokens=block_tokens) == expected


def test_the_first_tokens_of_a_long_validation_split_are_compared_and_the_line_says_so(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('plaingpt.data.overlap.VAL_TOKENS', 4000)
    prepare_documents(tmp_path / 'd', random_texts(20))
    capsys.readouterr()
    dataset = open_dataset(tmp_path / 'd')
    val = dataset.split('val')
    assert find_overlap(val, val) == 1
    assert find_overlap(stream(tmp_path, val.read(0, 2000)), val) == 0.5
    for tokens, line in ((len(val), ''), (len(val) - 1, f'first {len(val) - 1:,} tokens')):
        monkeypatch.setattr('plaingpt.data.overlap.VAL_TOKENS', tokens)
        print_overlap({'in_train': 0}, dataset, dataset)
        assert line in capsys.readouterr().out


# -----------------------------------------------------------------------------
# prepare.py


@pytest.mark.parametrize('copies', [1, 9])
def test_the_share_of_a_validation_split_that_is_trained_on_is_printed(copies, tmp_path, capsys):
    documents = random_texts(60)
    write_rows(tmp_path / 'in/train.jsonl', documents[:40])
    write_rows(tmp_path / 'in/validation.jsonl', documents[40 - copies:60 - copies])
    prepared(tmp_path / 'd', 'hf', tmp_path / 'in', '--val_split=validation')
    share = open_dataset(tmp_path / 'd').split_entry('val')['in_train']
    assert share == pytest.approx(copies / 20, abs=1e-3)
    of_prepare = capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    for captured in (of_prepare, capsys.readouterr()):
        line = next(line for line in (captured.err if copies == 9 else captured.out).splitlines()
                    if f'{100 * share:.3g}%' in line)
        assert '64 or more tokens' in line  # from which length on copies are found


def test_inspect_compares_again_what_another_version_has_compared(tmp_path, capsys):
    prepare_documents(tmp_path / 'd', random_texts(20))
    path = tmp_path / 'd/meta.json'
    meta = json.loads(path.read_text())
    meta['splits']['val']['in_train'] = 0.123
    path.write_text(json.dumps(meta))
    capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    printed = ''.join(capsys.readouterr())
    assert '\n0% of' in printed
    assert '12.3%' not in printed


NAMES = [f'{a}nn{b}' for a in 'abcdefghij' for b in 'abcdefghij']


@pytest.mark.parametrize(('train', 'val', 'shares'), [
    ('word ' * 100, 'short', {}), ('short', 'word ' * 100, {}),
    ('word ' * 100, 'ends early\n' * 11, {'in_train': 0}),
    ('A line of 30 characters or so.', 'A line of 30 characters or so.', {'lines_in_train': 1}),
    (NAMES, NAMES[::-1], {}), (NAMES, NAMES, {'in_train': 1})])
def test_what_is_too_short_to_compare_has_no_share(train, val, shares, tmp_path):
    for name, texts in ('train', train), ('validation', val):
        write_rows(tmp_path / f'in/{name}.jsonl', [texts] if isinstance(texts, str) else texts)
    prepared(tmp_path / 'd', 'hf', tmp_path / 'in', '--val_split=validation')
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert {key: entry[key] for key in entry if key.endswith('in_train')} == shares


@pytest.mark.parametrize(('text_of', 'share'), [
    (lambda n: f'Order {n} was sent to customer {7 * n}.', 1),
    (lambda n: ' '.join(random.Random(n).choices(['to', 'be', 'or', 'not', 'that'], k=15)), 0)])
def test_short_documents_that_differ_only_in_numbers_are_copies(text_of, share, tmp_path, capsys):
    write_rows(tmp_path / 'a.jsonl', map(text_of, range(400)))
    prepared(tmp_path / 'd', 'text', tmp_path / 'a.jsonl')
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert entry['in_train'] == 0
    assert entry['lines_in_train'] == share
    assert bool(capsys.readouterr().err) == (share == 1)


@pytest.mark.parametrize(('characters', 'by_lines'), [(62, True), (63, False)])
def test_documents_below_64_tokens_are_compared_by_lines(characters, by_lines, tmp_path):
    prepare_documents(tmp_path / 'd', random_texts(40, characters))  # and a token between them
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert ('lines_in_train' in entry) == by_lines


@pytest.mark.parametrize(('characters', 'warned'), [(20_000, True), (4000, False)])
def test_a_validation_split_of_another_kind_of_text_is_reported(
        characters, warned, tmp_path, capsys):
    text = 'abc ' * (9 * characters // 4) + 'äöü ' * (characters // 4)  # the end is held out
    (tmp_path / 'mixed.txt').write_text(text, encoding='utf-8')
    prepare.main(['text', f'{tmp_path}/mixed.txt', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    assert ('--documents=' in capsys.readouterr().err) == warned


# -----------------------------------------------------------------------------
# between datasets


@pytest.fixture
def two(tmp_path):
    """data/one and data/two; 1000 of the 10,000 characters that two validates on are in one's
    training split, and 3000 the other way around."""
    one, two = (''.join(random.Random(seed).choices('abcdefgh ', k=100_000)) for seed in (0, 1))
    one, two = two[-1000:] + one[1000:], one[-3000:] + two[3000:]
    prepare_corpora(tmp_path, {'one': one, 'two': two})
    return tmp_path / 'data/one', tmp_path / 'data/two'


def shares_of(printed):
    """{(dataset with the validation text, the other): share} of the lines printed."""
    lines = re.findall(r'([\d.]+)% of .*data/(\w+) .*data/(\w+)[ ,]', ''.join(printed))
    return {(val, train): float(percent) / 100 for percent, val, train in lines}


def test_inspect_compares_two_datasets_both_ways(two, capsys):
    capsys.readouterr()
    prepare.main(['inspect', *map(str, two)])
    printed = capsys.readouterr()
    assert shares_of(printed) == {('two', 'one'): 0.1, ('one', 'two'): 0.3}
    assert 'data/two' in printed.err  # above a tenth
    assert printed.err.count('warning: ') == 1


def test_a_new_run_reports_validation_text_that_another_corpus_of_its_mixture_trains_on(
        two, tiny, capsys):
    shares = []
    for init_from in ('scratch', 'resume'):
        capsys.readouterr()
        train.main([*tiny, f'--dataset={two[0]}:0.5,{two[1]}:0.5', f'--init_from={init_from}',
                    '--max_iters=1', '--eval_iters=1'])
        shares.append(shares_of(capsys.readouterr()))
    assert shares == [{('two', 'one'): 0.1, ('one', 'two'): 0.3}, {}]


def test_less_than_a_hundredth_of_a_mixture_is_not_reported(tmp_path, capsys):
    one, two = (''.join(random.Random(seed).choices('abcdefgh ', k=100_000)) for seed in (0, 1))
    prepare_corpora(tmp_path, {'one': one, 'two': one[-90:] + two[90:]})
    capsys.readouterr()
    compare_corpora([open_dataset(tmp_path / 'data' / name) for name in ('one', 'two')])
    assert ''.join(capsys.readouterr()) == ''


def test_large_corpora_of_a_mixture_are_not_read_and_the_command_is_named(
        two, monkeypatch, capsys):
    datasets = [open_dataset(folder) for folder in two]
    monkeypatch.setattr('plaingpt.data.overlap.VERIFIED_TOKENS', 1000)
    monkeypatch.setattr('plaingpt.data.overlap.find_overlap', None)
    capsys.readouterr()
    compare_corpora(datasets)
    assert f'inspect {two[0]} {two[1]}' in capsys.readouterr().out


def test_conversations_are_compared_with_text_of_their_tokenizer(tmp_path, capsys):
    answers = random_texts(20, 200)
    prepare_documents(tmp_path / 'text', [*answers, *random_texts(40)[20:]])
    (tmp_path / 'chat.jsonl').write_text(''.join(
        json.dumps({'prompt': 'What?', 'completion': answer}) + '\n' for answer in answers))
    prepare.main(['chat', f'{tmp_path}/chat.jsonl', f'--tokenizer={tmp_path}/text',
                  f'--data_dir={tmp_path}/chat'])
    capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/chat', f'{tmp_path}/text'])
    replies = next(line for line in capsys.readouterr().err.splitlines() if 'assistant' in line)
    assert float(re.search(r'([\d.]+)%', replies)[1]) > 50  # the text holds some out


def test_datasets_of_different_tokenizers_are_not_compared(two, tmp_path):
    prepare.main(['text', f'{tmp_path}/one.txt', '--tokenizer=char',
                  f'--data_dir={tmp_path}/data/char'])
    with pytest.raises(UserError, match=r'data/one.*data/char.*--tokenizer=.*data/one'):
        prepare.main(['inspect', str(two[0]), f'{tmp_path}/data/char'])


def test_inspect_has_a_help(capsys):
    with pytest.raises(SystemExit) as end:
        prepare.main(['inspect', '--help'])
    assert not end.value.code
    assert 'inspect data/NAME' in capsys.readouterr().out


@pytest.mark.parametrize('options', [[], ['--input=data/x'], ['data/x', '--overwrite']])
def test_inspect_takes_folders_only(options):
    with pytest.raises(UserError, match='inspect data/NAME'):
        prepare.main(['inspect', *options])
