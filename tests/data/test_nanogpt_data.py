"""nanoGPT's character data, and someone's own ids: meta.pkl is read without running anything, and
nothing is written."""

import json
import pickle
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from corpus_files import contents
from processes import fails
from runs import lines

import evaluate
import prepare
import sample
import train
from plaingpt.data.dataset import open_data, open_dataset
from plaingpt.data.tokenizers import WordTokenizer, from_json
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError


def nanogpt_folder(folder, text, chars, protocol=None):
    """What nanoGPT's data/shakespeare_char/prepare.py writes."""
    folder.mkdir(parents=True, exist_ok=True)
    stoi = {char: i for i, char in enumerate(chars)}
    ids = np.array([stoi[char] for char in text], dtype=np.uint16)
    for split, part in (('train', ids[:-len(ids) // 10]), ('val', ids[-len(ids) // 10:])):
        part.tofile(folder / f'{split}.bin')
    meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}
    (folder / 'meta.pkl').write_bytes(pickle.dumps(meta, protocol))
    return folder


def test_the_characters_come_out_as_they_went_in(tmp_path):
    text = ''.join(map(chr, range(32, 600))) + '\U0001f600'
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        nanogpt_folder(tmp_path, text, sorted(text, reverse=protocol % 2), protocol)
        dataset = open_dataset(tmp_path)
        ids = dataset.split('train').sequences(np.array([0]), 300)[0]
        assert dataset.vocab_size == len(text) and dataset.tokenizer().decode(ids) == text[:300]


def used(folder, tiny, start, capsys):
    """Train on a folder, resume, and score, and see it unchanged → what sample.py writes."""
    before = contents(folder)
    tiny = [*tiny, f'--dataset={folder}']
    train.main([*tiny, '--max_iters=3'])
    train.main([*tiny, '--init_from=resume'])
    assert [row['iter'] for row in lines(folder.parent / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    evaluate.main([f'--out_dir={folder.parent}/out'])
    assert f'val of {folder}: loss' in capsys.readouterr().out
    sample.main([f'--out_dir={folder.parent}/out', f'--start={start}', '--num_samples=1',
                 '--max_new_tokens=5'])
    assert contents(folder) == before
    return capsys.readouterr().out


def inspected(folder, capsys):
    prepare.main(['inspect', str(folder)])
    out = capsys.readouterr().out
    assert 'no checksums to compare with' in out and 'also in the training split' in out
    return out


def test_a_folder_of_nanogpt_trains_resumes_samples_and_inspects_and_stays_as_it_is(
        tiny, text_file, tmp_path, capsys):
    text = text_file.read_text()
    folder = nanogpt_folder(tmp_path / 'nano', text, sorted(set(text)))
    assert '\ndef' in used(folder, tiny, 'def', capsys)
    assert repr(text[:24]) in inspected(folder, capsys)


MOVES = [f'{piece}{file}{rank}' for piece in ('', 'N') for file in 'abcd' for rank in '1234']
GAMES = '\n'.join(' '.join(MOVES[(i * i + k) % len(MOVES)] for k in range(9)) for i in range(400))


def words_folder(folder, itos, change=lambda meta: meta, protocol=None):
    """A folder of games, one token a move and a new line."""
    folder.mkdir(exist_ok=True)
    ids = np.array([itos.index(word) for word in GAMES.replace('\n', ' \n ').split(' ')], '<u2')
    ids[:-400].tofile(folder / 'train.bin')
    ids[-400:].tofile(folder / 'val.bin')
    meta = {'itos': itos, 'stoi': {token: i for i, token in enumerate(itos)}}
    (folder / 'meta.pkl').write_bytes(pickle.dumps(change(meta), protocol))
    return folder


def as_numpy(meta):
    itos = OrderedDict((np.int64(i), np.str_(token)) for i, token in enumerate(meta['itos']))
    return {'itos': itos, 'stoi': {token: i for i, token in itos.items()},
            'vocab_size': np.int32(len(itos))}


@pytest.mark.parametrize('unknown', [[], ['<unk>']])
def test_tokens_longer_than_a_character_train_resume_score_and_sample(
        unknown, tiny, tmp_path, capsys, monkeypatch):
    folder = words_folder(tmp_path / 'games', [*MOVES, '\n', *unknown])
    assert 'a1 Nb2' in used(folder, tiny, 'a1 Nb2', capsys)
    prepare.main(['inspect', str(folder)])
    assert repr(GAMES[:20])[1:-1] in capsys.readouterr().out
    sample.main([f'--out_dir={tmp_path}/out', '--num_samples=1', '--max_new_tokens=3'])
    start = [f'--out_dir={tmp_path}/out', '--start=a1 zz', '--num_samples=1', '--max_new_tokens=3']
    if unknown:
        sample.main(start)
    else:
        assert "'zz'" in fails(capsys, monkeypatch, sample.main, *start)


def test_lists_and_numbers_of_numpy_in_a_meta_pkl_make_the_same_tokenizer(tmp_path):
    itos = [*MOVES, '\n']
    plain = open_dataset(words_folder(tmp_path / 'games', itos)).tokenizer_json()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for change in (as_numpy, lambda meta: {'itos': tuple(itos)}):
            folder = words_folder(tmp_path / 'games', itos, change, protocol)
            assert open_dataset(folder).tokenizer_json() == plain
    (tmp_path / 'games/meta.pkl').write_bytes(pickle.dumps({'vocab_size': np.int64(40)}))
    assert open_dataset(folder).tokenizer_json() == {'kind': 'ids', 'vocab_size': 40}


def test_words_are_separated_by_spaces_and_other_tokens_match_the_longest():
    words = WordTokenizer(['e4', 'Nf3', 'd', '\n'])
    assert words.encode('e4 Nf3\nd  e4').tolist() == [0, 1, 3, 2, 0]
    assert words.decode([0, 1, 3, 2, 0]) == 'e4 Nf3\nd e4'
    assert words.decode_bytes([1]) == b' Nf3' and words.encode(' ').tolist() == [0]
    longest = WordTokenizer(['a', 'ab', ' ', 'b', '<unk>'])
    assert longest.encode('abb a?').tolist() == [1, 3, 2, 0, 4]
    assert longest.decode([1, 3, 2, 0, 4]) == 'abb a<unk>'
    assert WordTokenizer(['A', 'C', '<eos>']).encode('AC<eos>').tolist() == [0, 1, 2]
    for tokenizer in (words, longest):
        assert from_json(json.loads(json.dumps(tokenizer.to_json()))).tokens == tokenizer.tokens
    with pytest.raises(UserError, match="'x'"):
        words.encode('e4 x')


@pytest.fixture
def own_ids(tmp_path):
    """A time series of numbers."""
    ids = (np.sin(np.arange(4000) / 20) * 700 + 750).astype(np.uint16)
    (folder := tmp_path / 'ids').mkdir()
    ids[:3600].tofile(folder / 'train.bin')
    ids[3600:].tofile(folder / 'val.bin')
    return folder


@pytest.mark.parametrize('way', ['vocab_size', 'meta.pkl'])
def test_ids_from_numpy_train_resume_score_and_sample(
        way, own_ids, tiny, tmp_path, capsys, monkeypatch):
    if way == 'meta.pkl':
        (own_ids / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 1500}))
        out = inspected(own_ids, capsys)
        assert 'ids tokenizer, 1,500 tokens' in out and 'ids 750, 784, 819, ' in out
    else:
        tiny = [*tiny, '--vocab_size=1500']
    *_, written = used(own_ids, tiny, 'IDS:750,784,819', capsys).strip().splitlines()
    ids = [int(i) for i in written.removeprefix('IDS:').split(',')]
    assert ids[:3] == [750, 784, 819] and len(ids) == 8 and max(ids) < 1500
    for start in ('hello', 'IDS:1,1500', 'IDS:-1'):
        assert 'is not a list of ids from 0 to 1499' in fails(
            capsys, monkeypatch, sample.main, f'--out_dir={tmp_path}/out', f'--start={start}')


def test_ids_of_which_nothing_is_said_are_taken_for_gpt2s(own_ids, capsys):
    dataset = open_data(SimpleNamespace(dataset=str(own_ids), vocab_size=0), World())
    out = capsys.readouterr().out
    assert dataset.vocab_size == 50257 and '--vocab_size' in out and f'ids {own_ids}' in out


def test_an_id_beyond_the_vocabulary_ends_a_run_before_anything_is_written(
        own_ids, tiny, tmp_path, capsys, monkeypatch):
    assert f'{own_ids}/train.bin: token 31 has id 1449' in fails(
        capsys, monkeypatch, train.main, *tiny, f'--dataset={own_ids}', '--vocab_size=1449')
    assert not list(tmp_path.glob('out/*'))


def test_its_tokenizer_is_that_of_the_same_text_prepared_here(text_file, char_data, tmp_path):
    text = text_file.read_text()
    folder = nanogpt_folder(tmp_path / 'nano', text, sorted(set(text)))
    assert open_dataset(folder).tokenizer_json() == open_dataset(char_data).tokenizer_json()
    prepare.main(['text', f'--input={text_file}', f'--tokenizer={folder}',
                  f'--data_dir={tmp_path}/more'])
    assert open_dataset(tmp_path / 'more').tokenizer_json() == open_dataset(folder).tokenizer_json()


# -----------------------------------------------------------------------------
# pickles that nanoGPT did not write


def edited(**changes):
    meta = {'vocab_size': 2, 'itos': {0: 'a', 1: 'b'}, 'stoi': {'a': 0, 'b': 1}, **changes}
    return pickle.dumps({key: value for key, value in meta.items() if value is not None})


OTHERS = [
    b"cos\nsystem\n(S'touch hacked'\ntR.",
    pickle.dumps({'vocab_size': 2, 'itos': np.array(['a', 'bc'], object)}), pickle.dumps(np.load),
    b'\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch hacked\x85R.',
    pickle.dumps(np.int64(3)), pickle.dumps([1]), pickle.dumps({}), edited(vocab_size=3),
    edited(itos=None), edited(itos={0: 'a', 2: 'b'}), edited(itos={0: 'a', 1: 'a'}),
    edited(itos={0: 'a', 1: 'bc'}), edited(stoi={'a': 1, 'b': 0}), b'', edited()[:-5]]


def test_other_pickles_are_refused_in_one_line_and_nothing_in_them_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = nanogpt_folder(tmp_path / 'nano', 'abab', 'ab')
    for data in OTHERS:
        (folder / 'meta.pkl').write_bytes(data)
        with pytest.raises(UserError, match='NEW_FOLDER') as refused:
            open_dataset(folder)
        message = str(refused.value)
        assert str(folder / 'meta.pkl') in message and '\n' not in message and len(message) < 500
    assert [path.name for path in tmp_path.iterdir()] == ['nano']


# -----------------------------------------------------------------------------
# what prepare.py may write where


def test_nothing_is_written_into_a_folder_that_others_made(
        text_file, tmp_path, capsys, monkeypatch):
    for n, (name, *option) in enumerate((['train.bin'],
                                         ['fineweb_train_000001.bin', '--overwrite'])):
        (folder := tmp_path / str(n)).mkdir()
        (folder / name).write_bytes(b'\0\0')
        message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={text_file}',
                        f'--data_dir={folder}', *option)
        assert str(folder) in message and '--data_dir' in message
        assert contents(folder) == {name: b'\0\0'}


def test_other_token_files_beside_those_of_nanogpt_are_not_read(tmp_path):
    folder = nanogpt_folder(tmp_path / 'nano', 'some text ' * 50, sorted(set('some text ')))
    tokens = len(open_dataset(folder).split('train'))
    for name in ('train_backup.bin', 'old-val.bin'):
        (folder / name).write_bytes((folder / 'train.bin').read_bytes())
    assert len(open_dataset(folder).split('train')) == tokens
