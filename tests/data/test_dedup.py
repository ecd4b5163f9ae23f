"""prepare.py --dedup: documents that equal an earlier one but for white space are left out."""

import random
import signal

import pytest
from corpus_files import documents_of, prepared, split_bytes, write_parquet, write_rows
from hypothesis import given
from hypothesis import strategies as st
from interrupted import contents, exit_code

import prepare
from plaingpt.data.dataset import open_dataset
from plaingpt.data.readers import PIECE_CHARS, Piece
from plaingpt.data.splitting import Duplicates

UNIQUE = 300


@pytest.fixture(scope='module')
def texts():
    """300 documents, and 200 copies of some of them in other white space."""
    chance = random.Random(0)
    words = ['to', 'be', 'or', 'not', 'that', 'is', 'the', 'question']
    texts = [' '.join([f'{i}', *chance.choices(words, k=chance.randrange(200))])
             for i in range(UNIQUE)]
    for _ in range(200):
        copy = chance.choice(texts).replace(' ', chance.choice([' ', '  ', '\n', '\t ']))
        texts.insert(chance.randrange(len(texts)), copy + chance.choice(['', '\n', ' \n']))
    return texts


@pytest.fixture(scope='module')
def arguments(texts, tmp_path_factory):
    """{'rows' or 'hub': the options that prepare them}"""
    folder = tmp_path_factory.mktemp('inputs')
    write_rows(folder / 'rows.jsonl', texts)
    for i in range(4):
        write_parquet(folder / f'hub/train-{i:05d}-of-00004.parquet', texts[i * 125:][:125])
    more = ['--dedup', '--val_fraction=0.1', '--shard_tokens=12_500']
    return {'rows': ['text', f'--input={folder}/rows.jsonl', *more],
            'hub': ['hf', f'--input={folder}/hub', *more]}


TEXT = st.text(alphabet=st.sampled_from(['a', 'b', 'é', ' ', '\n', '\t', '\u2003', '\ud800']),
               max_size=4)


@given(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=40))
def test_of_documents_with_the_same_words_the_first_stays_whole(documents):
    pieces = [Piece(text, not i) for document in documents for i, text in enumerate(document)]
    wanted = {' '.join(''.join(document).split()): document for document in reversed(documents)}
    duplicates = Duplicates()
    found = [piece.text for piece in duplicates.leave_out(pieces)]
    assert sorted(found) == sorted(text for document in wanted.values() for text in document)
    assert duplicates.dropped == len(documents) - len(wanted)


@pytest.mark.parametrize('kind', ['rows', 'hub'])
def test_the_first_of_equal_documents_stays_and_the_others_are_counted(
        kind, arguments, texts, tmp_path, capsys):
    train, val = prepared(tmp_path / 'd', *arguments[kind])
    firsts = {' '.join(text.split()): text for text in reversed(texts)}
    assert sorted(train + val) == sorted(firsts.values()) and len(firsts) == UNIQUE
    assert '200 documents left out: equal to an earlier one\n' in capsys.readouterr().out
    assert open_dataset(tmp_path / 'd').meta['duplicates'] == 200
    prepare.main(['inspect', str(tmp_path / 'd')])
    assert 'duplicates left out: 200\n' in capsys.readouterr().out


def test_a_document_in_several_pieces_is_compared_to_its_end(tmp_path):
    long = 'word after word ' * (PIECE_CHARS // 5)
    texts = {'a': long + 'one end', 'b': long + 'another end', 'c': f'\n{long}  one end\n',
             'd': 'short', 'e': long, 'f': long + 'another\nend', 'g': 'short '}
    others = {f'z{i}': f'file {i}' for i in range(100)}  # fewer files are one text
    for name, text in {**texts, **others}.items():
        (tmp_path / f'{name}.txt').write_text(text)
    train, val = prepared(tmp_path / 'd', 'text', f'--input={tmp_path}', '--dedup')
    kept = [*others.values(), *(texts[name] for name in 'abde')]  # long ones are in both splits
    assert sorted(''.join(train + val)) == sorted(''.join(kept))


def test_validation_text_that_is_trained_on_is_left_out(tmp_path):
    for split, texts in (('train', 'abc'), ('validation', 'cde')):
        write_parquet(tmp_path / f'{split}-0.parquet', list(texts))
    assert prepared(tmp_path / 'd', 'hf', f'--path={tmp_path}', '--val_split=validation',
                    '--dedup') == [['a', 'b', 'c'], ['d', 'e']]


@pytest.mark.parametrize('kind', ['rows', 'hub'])
def test_killed_and_started_again_it_writes_the_same(kind, arguments, tmp_path):
    prepared(tmp_path / 'whole', *arguments[kind])
    argv = [*arguments[kind], '--tokenizer=byte', f'--data_dir={tmp_path}/d', '--num_proc=2']
    for calls in (14, 9):
        assert exit_code(*argv, calls=calls) == -signal.SIGKILL
    assert exit_code(*argv) == 0
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


def test_with_max_tokens_it_is_the_beginning_of_what_it_would_be_without(arguments, tmp_path):
    for kind in ('rows', 'hub'):
        prepared(tmp_path / f'all_{kind}', *arguments[kind])
        prepared(tmp_path / kind, *arguments[kind], '--max_tokens=30_000')
        assert split_bytes(tmp_path / kind, 'train') == \
            split_bytes(tmp_path / f'all_{kind}', 'train')[:30_000]
        all_val = documents_of(tmp_path / f'all_{kind}')['val']
        val = documents_of(tmp_path / kind)['val']
        assert val and val == all_val[:len(val)]


def test_what_has_no_documents_is_refused(tmp_path, refused):
    (tmp_path / 'a.txt').write_text('a running text')
    assert 'is one running text and has no documents' in refused(
        'text', f'--input={tmp_path}/a.txt', '--dedup')
    assert 'dedup=True: fineweb10B-gpt2 is tokens already' in refused(
        'fineweb10B-gpt2', '--dedup')


def test_documents_of_other_bytes_are_not_the_same(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b''.join(
        b'line %d caf%c\n' % (i // 2, 0xe8 + i % 2) for i in range(100)) * 2)
    prepare.main(['text', f'--input={tmp_path}/a.txt', '--documents=line', '--tokenizer=byte',
                  '--dedup', '--val_fraction=0.4', f'--data_dir={tmp_path}/d'])
    assert open_dataset(tmp_path / 'd').meta['duplicates'] == 100
