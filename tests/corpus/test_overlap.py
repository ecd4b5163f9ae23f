"""How much of the validation split is in the training split."""

import itertools
import json
import os
import random
import shutil
import signal
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, SHARED, exit_code, fork
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pretokenized import shard

import prepare
from plaingpt.corpus import encoding
from plaingpt.system.errors import UserError
from plaingpt.tokens import inspection
from plaingpt.tokens.dataset import open_dataset
from plaingpt.tokens.inspection import BLOCK_TOKENS, SEQUENCE_TOKENS, SEQUENCES, find_overlap
from plaingpt.tokens.token_files import TokenStream, open_tokens


def stream(path, ids, vocab_size=2**16):
    np.asarray(ids, '<u2').tofile(path)
    return TokenStream([open_tokens(path, np.dtype('<u2'))], vocab_size)


def shown_share(captured):
    """What the one line of that kind says, on stderr where it is a warning."""
    line, = [line for line in (captured.out + captured.err).splitlines()
             if 'is also in the training split' in line]
    return float(line.removeprefix('warning: ').split('%')[0]) / 100


# -----------------------------------------------------------------------------
# the count


@given(st.integers(0, 2**32), st.integers(1, 1200), st.integers(64, 1200), st.integers(1, 9),
       st.integers(1, 300))
@settings(max_examples=60)
def test_it_is_the_share_of_sequences_that_a_plain_search_finds(
        tmp_path_factory, seed, train_tokens, val_tokens, vocab_size, block_tokens):
    chance = np.random.default_rng(seed)
    train, val = (chance.integers(vocab_size, size=n) for n in (train_tokens, val_tokens))
    for _ in range(chance.integers(8)):  # passages that both have, and each has twice
        to, source = [(train, val), (val, train), (train, train)][chance.integers(3)]
        n = min(chance.integers(200), len(to), len(source))
        at, start = chance.integers(len(to) - n + 1), chance.integers(len(source) - n + 1)
        to[at:at + n] = source[start:start + n].copy()
    count = val_tokens // SEQUENCE_TOKENS
    starts = [i * (val_tokens - SEQUENCE_TOKENS) // max(count - 1, 1) for i in range(count)]
    present = {train[i:i + SEQUENCE_TOKENS].tobytes() for i in range(train_tokens - 63)}
    expected = sum(val[i:i + SEQUENCE_TOKENS].tobytes() in present for i in starts) / count
    folder = tmp_path_factory.mktemp('splits')
    with pytest.MonkeyPatch.context() as patch:  # sequences lie across the borders of blocks
        patch.setattr(inspection, 'BLOCK_TOKENS', block_tokens)
        patch.setattr(inspection, 'READ_TOKENS', block_tokens)
        assert find_overlap(stream(folder / 'train.bin', train),
                            stream(folder / 'val.bin', val)) == expected


def test_each_sequence_that_lies_across_two_blocks_or_two_files_is_found(tmp_path):
    chance = np.random.default_rng(0)
    train = chance.integers(2**16, size=3 * BLOCK_TOKENS)
    cut = 2 * BLOCK_TOKENS + 9
    files = [stream(tmp_path / f'{n}.bin', part).files[0]
             for n, part in enumerate((train[:cut], train[cut:]))]
    for border in (BLOCK_TOKENS, 2 * BLOCK_TOKENS, cut, len(train)):
        ends = range(border - SEQUENCE_TOKENS, min(border + SEQUENCE_TOKENS, len(train) + 1))
        val = np.concatenate([train[end - SEQUENCE_TOKENS:end] for end in ends])
        assert find_overlap(TokenStream(files, 2**16), stream(tmp_path / 'val.bin', val)) == 1


@pytest.mark.parametrize('share', [0, 0.02, 0.5, 1])
def test_the_sample_of_a_long_split_tells_the_share_of_copied_documents(share, tmp_path):
    chance = np.random.default_rng(1)
    train, val = chance.integers(2**16, size=(2, 800, 1000))
    copied = chance.random(800) < share
    val[copied] = chance.permuted(train, axis=0, out=train)[copied]
    found = find_overlap(stream(tmp_path / 'train.bin', train.ravel()),
                         stream(tmp_path / 'val.bin', val.ravel()))
    whole = 1 - SEQUENCE_TOKENS / 1000 if share < 1 else 1  # of sequences lie in one document
    error = 4 * np.sqrt(share * (1 - share) / 800 + 1 / SEQUENCES / 4 * (share > 0))
    assert copied.mean() * whole - error <= found <= copied.mean() + error


def test_memory_is_that_of_a_few_pieces_and_not_of_the_splits(tmp_path):
    def peak(tokens):
        ids = np.random.default_rng(2).integers(2**16, size=tokens).astype('<u2')
        splits = [stream(tmp_path / f'{name}.bin', ids) for name in ('train', 'val')]
        tracemalloc.start()
        assert find_overlap(*splits) == 1
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    piece = 8 * inspection.READ_TOKENS  # bytes
    assert max(peak(2**21), peak(2**23)) < 4 * piece < 8 * 2**23


# -----------------------------------------------------------------------------
# prepare.py


@pytest.fixture(scope='module')
def documents():
    chance = random.Random(0)
    return [''.join(chance.choices('abcdefgh \n', k=2000)) for _ in range(60)]


def write_split(path, texts):
    path.parent.mkdir(exist_ok=True)
    path.write_text('\n'.join(json.dumps({'text': text}) for text in texts))


@pytest.mark.parametrize('copies', [0, 1, 9])
def test_prepare_and_inspect_say_how_much_of_an_own_validation_split_is_trained_on(
        copies, documents, tmp_path, capsys):
    write_split(tmp_path / 'in/train.jsonl', documents[:40])
    write_split(tmp_path / 'in/validation.jsonl', documents[40 - copies:60 - copies])
    prepare.main(['hf', f'--path={tmp_path}/in', '--val_split=validation', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d'])
    share = open_dataset(tmp_path / 'd').split_entry('val').get('in_train')
    assert share == pytest.approx(copies / 20, abs=0.05 * (copies > 0))
    prepared = capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    for said in (prepared, capsys.readouterr()):
        assert shown_share(said) == pytest.approx(share, abs=5e-4)
        assert ('says little' in said.err) == (copies == 9)


def test_token_files_that_others_made_are_compared_too(tmp_path, monkeypatch, capsys):
    if not (SHARED / 'tiktoken_cache').exists():
        pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED)")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    (tmp_path / 'mine').mkdir()
    for name, data in {'x_train_0.bin': shard(5000), 'x_val_0.bin': shard(640, 4680)}.items():
        (tmp_path / 'mine' / name).write_bytes(data)
    prepare.main(['fineweb10B-gpt2', f'--input={tmp_path}/mine', f'--data_dir={tmp_path}/d'])
    assert open_dataset(tmp_path / 'd').split_entry('val')['in_train'] == 0.5
    capsys.readouterr()
    (tmp_path / 'd/meta.json').unlink()  # nor is a meta.json needed
    prepare.main(['inspect', f'{tmp_path}/d'])
    assert shown_share(capsys.readouterr()) == 0.5


def test_a_kill_while_splits_are_compared_costs_no_more_than_that(documents, tmp_path,
                                                                  monkeypatch):
    write_split(tmp_path / 'in.jsonl', documents)

    def argv(folder):
        return ['text', f'--input={tmp_path}/in.jsonl', '--tokenizer=byte', '--val_fraction=0.3',
                f'--data_dir={folder}']

    def die_when_comparing():
        inspection.read_sequences = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    prepare.main(argv(tmp_path / 'whole'))
    pid = fork(prepare.main, *argv(tmp_path / 'killed'), log=tmp_path / 'log',
               before=die_when_comparing)
    assert exit_code(pid) == -signal.SIGKILL
    half = open_dataset(tmp_path / 'killed/unfinished')
    assert len(half.split('train', in_ram=True)) and 'in_train' not in half.split_entry('val')
    monkeypatch.delattr(encoding, 'encode_batch')  # nothing is encoded again
    prepare.main(argv(tmp_path / 'killed'))
    assert {path.name: path.read_bytes() for path in (tmp_path / 'killed').iterdir()} \
        == {path.name: path.read_bytes() for path in (tmp_path / 'whole').iterdir()}


@pytest.mark.parametrize('kind', ['text', 'merge', 'shards'])
def test_a_kill_while_files_move_is_healed_where_a_split_is_too_short_to_compare(
        kind, tmp_path, monkeypatch):
    if kind == 'shards':
        if not (SHARED / 'tiktoken_cache').exists():
            pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED)")
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
        for name, data in {'x_train_0.bin': shard(5000), 'x_val_0.bin': shard(50)}.items():
            (tmp_path / name).write_bytes(data)
    (tmp_path / 'in.txt').write_text(''.join(f'line {i}\n' for i in range(40)))
    of_text = ['text', f'--input={tmp_path}/in.txt', '--tokenizer=byte', '--documents=line',
               '--val_fraction=0.1', '--test_fraction=0.1']

    def begin(folder):
        """→ the arguments that write a dataset there."""
        if kind == 'shards':
            return ['fineweb10B-gpt2', f'--input={tmp_path}', f'--data_dir={folder}']
        if kind == 'text':
            return [*of_text, f'--data_dir={folder}']
        for part in (1, 2):
            prepare.main([*of_text, f'--data_dir={folder}', f'--part={part}/2'])
        return ['merge', str(folder)]

    def die_before_a_move(folder, number):
        moves = itertools.count()

        def replace(source, target, real=os.replace):
            if Path(target).parent == folder and next(moves) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)
        os.replace = replace

    prepare.main(begin(tmp_path / 'whole'))
    expected = {path.name: path.read_bytes() for path in (tmp_path / 'whole').iterdir()}
    for number in range(len(expected)):
        argv = begin(folder := tmp_path / f'killed-{number}')
        pid = fork(prepare.main, *argv, log=tmp_path / 'log',
                   before=partial(die_before_a_move, folder, number))
        assert exit_code(pid) == -signal.SIGKILL, number
        prepare.main(argv)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_a_split_shorter_than_a_sequence_is_not_compared(tmp_path, capsys):
    (tmp_path / 'in.txt').write_text('short text ' * 50)
    prepare.main(['text', f'--input={tmp_path}/in.txt', '--tokenizer=byte', '--val_fraction=0.1',
                  f'--data_dir={tmp_path}/d'])
    prepare.main(['inspect', f'{tmp_path}/d'])
    assert 'in_train' not in open_dataset(tmp_path / 'd').split_entry('val')
    said = capsys.readouterr()
    assert 'no damage' in said.out and 'also in' not in said.out + said.err


@pytest.mark.parametrize('value', ['0.1', -0.1, 1.5, float('nan'), None, True, [0.1], 10**400])
def test_a_damaged_share_is_refused(value, tmp_path):
    folder = shutil.copytree(ROOT / 'tests/data/format_1/dataset', tmp_path / 'd')
    meta = json.loads((folder / 'meta.json').read_text())
    assert open_dataset(folder).split_entry('val').get('in_train') is None  # of an older version
    for share, is_fine in ((0, True), (1, True), (0.25, True), (value, False)):
        meta['splits']['val']['in_train'] = share
        (folder / 'meta.json').write_text(json.dumps(meta))
        if is_fine:
            assert open_dataset(folder).split_entry('val')['in_train'] == share
        else:
            with pytest.raises(UserError, match='in_train'):
                open_dataset(folder)
