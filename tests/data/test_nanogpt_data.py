"""nanoGPT's folders: their meta.pkl is read without running anything, and nothing is written."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest
from corpus_files import contents
from processes import fails
from runs import lines

import evaluate
import prepare
import sample
import train
from plaingpt.core.dataset import open_dataset
from plaingpt.data.tokenizers import ListTokenizer
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


@pytest.fixture
def nano(text_file, tmp_path):
    text = text_file.read_text()
    return nanogpt_folder(tmp_path / 'nano', text, sorted(set(text)))


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_folder_of_nanogpt_decodes_to_its_text(protocol, tmp_path):
    text = ''.join(map(chr, range(32, 600))) + '\U0001f600'
    nanogpt_folder(tmp_path, text, sorted(text, reverse=protocol % 2), protocol)
    dataset = open_dataset(tmp_path)
    assert dataset.vocab_size == len(text)
    assert dataset.tokenizer().decode(dataset.split('train').read(0, 300)) == text[:300]


def test_its_tokenizer_is_that_of_the_same_text_prepared_here(nano, text_file, char_data, tmp_path):
    assert open_dataset(nano).tokenizer_json() == open_dataset(char_data).tokenizer_json()
    prepare.main(['text', f'--input={text_file}', f'--tokenizer={nano}',
                  f'--data_dir={tmp_path}/more'])
    assert open_dataset(tmp_path / 'more').tokenizer_json() == open_dataset(nano).tokenizer_json()


def test_every_command_reads_a_folder_of_nanogpt_as_it_is(nano, tiny, tmp_path, capsys):
    before = contents(nano)
    train.main([*tiny, f'--dataset={nano}', '--max_iters=3'])
    train.main([*tiny, f'--dataset={nano}', '--init_from=resume'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    evaluate.main([f'--out_dir={tmp_path}/out'])
    assert str(nano) in capsys.readouterr().out
    sample.main([f'--out_dir={tmp_path}/out', '--start=def', '--num_samples=1',
                 '--max_new_tokens=5'])
    assert '\ndef' in capsys.readouterr().out
    prepare.main(['inspect', str(nano)])
    assert repr('"""\nModule difflib')[1:-1] in capsys.readouterr().out
    assert contents(nano) == before


@pytest.mark.parametrize('name', ['train.bin', 'fineweb_train_000001.bin'])
def test_nothing_is_written_into_a_folder_that_others_made(
        name, text_file, tmp_path, capsys, monkeypatch):
    (tmp_path / 'others').mkdir()
    (tmp_path / 'others' / name).write_bytes(b'\0\0')
    assert '--data_dir' in fails(capsys, monkeypatch, prepare.main, 'text', text_file,
                                 f'--data_dir={tmp_path}/others', '--overwrite')
    assert contents(tmp_path / 'others') == {name: b'\0\0'}


# -----------------------------------------------------------------------------
# tokens longer than a character

WORDS = ['e4', 'Nf3', 'd', '\n']


def write_meta_pkl(folder, meta):
    """A folder with token files, and this meta.pkl."""
    for split in 'train', 'val':
        np.arange(4, dtype='<u2').tofile(folder / f'{split}.bin')
    (folder / 'meta.pkl').write_bytes(pickle.dumps(meta))


@pytest.mark.parametrize('meta', [
    {'itos': WORDS, 'stoi': {token: i for i, token in enumerate(WORDS)}},
    {'itos': OrderedDict((np.int64(i), np.str_(token)) for i, token in enumerate(WORDS)),
     'vocab_size': np.int32(4)}], ids=['list', 'numpy'])
def test_words_in_a_meta_pkl_make_a_tokenizer(meta, tmp_path):
    write_meta_pkl(tmp_path, meta)
    assert open_dataset(tmp_path).tokenizer_json() == ListTokenizer(WORDS).to_json()


# -----------------------------------------------------------------------------
# pickles that nanoGPT did not write


def edited(**changes):
    meta = {'vocab_size': 2, 'itos': {0: 'a', 1: 'b'}, 'stoi': {'a': 0, 'b': 1}, **changes}
    return pickle.dumps({key: value for key, value in meta.items() if value is not None})


OTHERS = [
    b"cos\nsystem\n(S'touch hacked'\ntR.",
    b'\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch hacked\x85R.',
    pickle.dumps({'vocab_size': 2, 'itos': np.array(['a', 'bc'], object)}), pickle.dumps(np.load),
    pickle.dumps({}), edited(vocab_size=3), edited(itos=None), edited(itos={0: 'a', 2: 'b'}),
    edited(stoi={'a': 1, 'b': 0}), edited()[:-5]]


@pytest.mark.parametrize('data', OTHERS, ids=range(len(OTHERS)))
def test_no_code_in_a_pickle_is_run(data, tmp_path):
    folder = nanogpt_folder(tmp_path / 'nano', 'abab', 'ab')
    (folder / 'meta.pkl').write_bytes(data)
    with pytest.raises(UserError) as refused:
        open_dataset(folder)
    assert str(folder / 'meta.pkl') in str(refused.value)
    assert '\n' not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ['nano']
