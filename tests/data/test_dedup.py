"""prepare.py --dedup: documents that equal an earlier one but for white space are left out."""

import json
import random
import signal

import pyarrow
import pyarrow.parquet
import pytest
from helpers import fails
from hypothesis import given
from hypothesis import strategies as st
from interrupted import contents, exit_code, stop_early
from test_sources import prepared

import prepare
from plaingpt.data import splitting
from plaingpt.data.readers import PIECE_CHARS, Piece
from plaingpt.data.splitting import Duplicates, hash_words
from plaingpt.data.dataset import open_dataset

UNIQUE = 300


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """300 documents, and 200 copies of some of them in other white space, as rows and as a folder
    laid out like the hub's."""
    chance = random.Random(0)
    words = ['to', 'be', 'or', 'not', 'that', 'is', 'the', 'question']
    texts = [' '.join([f'{i}', *chance.choices(words, k=chance.randrange(200))])
             for i in range(UNIQUE)]
    for _ in range(200):
        copy = chance.choice(texts).replace(' ', chance.choice([' ', '  ', '\n', '\t ']))
        texts.insert(chance.randrange(len(texts)), copy + chance.choice(['', '\n', ' \n']))
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'rows.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n'
                                               for text in texts))
    (folder / 'hub').mkdir()
    for i in range(4):
        pyarrow.parquet.write_table(pyarrow.table({'text': texts[i * 125:(i + 1) * 125]}),
                                    folder / f'hub/train-{i:05d}-of-00004.parquet')
    return folder


def arguments(kind, inputs, folder):
    name, where = {'hub': ('hf', inputs / 'hub'), 'rows': ('text', inputs / 'rows.jsonl')}[kind]
    return [name, f'--input={where}', '--dedup', '--val_fraction=0.1', '--tokenizer=byte',
            '--shard_tokens=12_500', f'--data_dir={folder}']


# -----------------------------------------------------------------------------
# which documents are equal

TEXT = st.text(alphabet=st.sampled_from(['a', 'b', 'é', ' ', '\n', '\t', '\u2003', '\ud800']))


@given(st.lists(TEXT, max_size=5), TEXT, st.integers(1, 5))
def test_texts_have_one_hash_where_their_words_are_the_same(pieces, other, block):
    def words(text):
        return ' '.join(text.split())

    whole = ''.join(pieces)
    assert hash_words(pieces, block) == hash_words([words(whole)])
    assert (hash_words([whole]) == hash_words([other], block)) == (words(whole) == words(other))


@given(st.lists(st.integers(0, 40), max_size=80), st.integers(1, 9), st.integers(0, 80))
def test_each_document_is_met_once_however_the_hashes_are_kept(
        tmp_path_factory, numbers, recent, stop):
    path = tmp_path_factory.getbasetemp() / 'hashes'
    path.unlink(missing_ok=True)
    pieces = [Piece(f'document {number}', True, i) for i, number in enumerate(numbers)]
    found, state = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting.Duplicates, 'RECENT', recent)
        for part in (pieces[:stop], pieces[stop:]):  # the second as in a run that resumes
            duplicates = Duplicates(path, **state)
            found += [piece.text for piece in duplicates.leave_out(part, whole=True)]
            duplicates.sync()
            state = duplicates.state()
            duplicates.close()
    assert found == list(dict.fromkeys(piece.text for piece in pieces))
    assert state == {'hashes': len(found), 'dropped': len(pieces) - len(found)}
    assert path.stat().st_size == 8 * len(found)


# -----------------------------------------------------------------------------
# corpora


@pytest.mark.parametrize('kind', ['rows', 'hub'])
def test_the_first_of_equal_documents_stays_and_the_others_are_counted(
        kind, inputs, tmp_path, capsys):
    name, where, *more = arguments(kind, inputs, tmp_path / 'd')[:4]
    train, val = prepared(tmp_path / 'd', name, where, *more)
    rows = [json.loads(line)['text'] for line in (inputs / 'rows.jsonl').read_text().splitlines()]
    firsts = {' '.join(text.split()): text for text in reversed(rows)}
    assert sorted(train + val) == sorted(firsts.values()) and len(firsts) == UNIQUE
    assert '200 documents left out: equal to an earlier one\n' in capsys.readouterr().out
    assert open_dataset(tmp_path / 'd').meta['duplicates'] == 200
    prepare.main(['inspect', str(tmp_path / 'd')])
    assert 'duplicates left out: 200\n' in capsys.readouterr().out


def test_a_document_in_several_pieces_is_compared_to_its_end(tmp_path, capsys):
    long = 'word after word ' * (PIECE_CHARS // 5)
    texts = {'a': long + 'one end', 'b': long + 'another end', 'c': f'\n{long}  one end\n',
             'd': 'short', 'e': long, 'f': long + 'another\nend', 'g': 'short '}
    others = {f'z{i}': f'file {i}' for i in range(100)}  # fewer files are one text
    for name, text in {**texts, **others}.items():
        (tmp_path / f'{name}.txt').write_text(text)
    train, val = prepared(tmp_path / 'd', 'text', f'--input={tmp_path}', '--dedup')
    kept = [*others.values(), *(texts[name] for name in 'abde')]  # long ones are in both splits
    assert sorted(''.join(train + val)) == sorted(''.join(kept))
    assert '3 documents left out' in capsys.readouterr().out


def test_validation_text_that_is_trained_on_is_left_out(tmp_path):
    for split, texts in (('train', 'abc'), ('validation', 'cde')):
        pyarrow.parquet.write_table(pyarrow.table({'text': list(texts)}),
                                    tmp_path / f'{split}-0.parquet')
    assert prepared(tmp_path / 'd', 'hf', f'--path={tmp_path}', '--val_split=validation',
                    '--dedup') == [['a', 'b', 'c'], ['d', 'e']]


def test_without_the_hashes_of_what_came_before_it_starts_anew(
        inputs, tmp_path, monkeypatch, capsys):
    prepare.main(arguments('hub', inputs, tmp_path / 'whole'))
    stop_early(monkeypatch, arguments('hub', inputs, tmp_path / 'd'))
    path = tmp_path / 'd/unfinished/duplicates'
    path.write_bytes(path.read_bytes()[:80])
    prepare.main(arguments('hub', inputs, tmp_path / 'd'))
    assert 'cut short; starting anew' in capsys.readouterr().out
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


@pytest.mark.parametrize('kind', ['rows', 'hub'])
def test_killed_and_started_again_it_writes_the_same(kind, inputs, tmp_path):
    prepare.main([*arguments(kind, inputs, tmp_path / 'whole'), '--num_proc=1'])
    argv = [*arguments(kind, inputs, tmp_path / 'd'), '--num_proc=2']
    for calls in (14, 9):
        assert exit_code(*argv, calls=calls) == -signal.SIGKILL
    prepare.main(argv)
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


def test_what_has_no_documents_or_not_all_of_them_is_refused(
        inputs, tmp_path, capsys, monkeypatch):
    (tmp_path / 'a.txt').write_text('a running text')
    for name, *more, words in (
            ('text', f'--input={tmp_path}/a.txt', 'is one running text and has no documents'),
            ('text', f'--input={inputs}/rows.jsonl', '--part=1/2', 'part and dedup cannot go'),
            ('fineweb10B-gpt2', 'dedup=True: fineweb10B-gpt2 is tokens already')):
        assert words in fails(capsys, monkeypatch, prepare.main, name, *more, '--dedup',
                              '--tokenizer=byte', f'--data_dir={tmp_path}/d')
    assert not (tmp_path / 'd').exists()
