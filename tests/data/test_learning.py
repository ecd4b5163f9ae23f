"""What a tokenizer learns from, what it makes of odd texts, and whether its ids are right."""

import json
import random

import pytest

import prepare
from plaingpt.data import tokenizer_choice
from plaingpt.data.dataset import open_dataset
from plaingpt.data.documents import Files, HubDataset
from plaingpt.data.rows import TextReader
from plaingpt.data.text_files import PIECE_CHARS
from plaingpt.data.tokenizer_choice import learn_tokenizer, sample, train_bpe


def words(alphabet, seed, characters):
    """Text of 2,000 words, some of which are frequent."""
    chance = random.Random(seed)
    known = [''.join(chance.choices(alphabet, k=chance.randrange(2, 9))) for _ in range(2000)]
    weights = [1 / n for n in range(1, 2001)]
    return ' '.join(chance.choices(known, weights, k=characters // 5))[:characters]


def text_of(folder):
    """The decoded text of both splits."""
    dataset = open_dataset(folder)
    return [dataset.tokenizer().decode(dataset.split(split).read(0, 10**9).tolist())
            for split in ('train', 'val')]


def prepared(folder, source, *options):
    prepare.main(['text', f'--input={source}', f'--data_dir={folder}', *options])
    return text_of(folder)


# -----------------------------------------------------------------------------
# bpe


@pytest.fixture(scope='module')
def languages(tmp_path_factory):
    """Files of two languages, beside each other those of one."""
    folder, paths = tmp_path_factory.mktemp('languages'), []
    for name, alphabet in (('code', 'abcdefghij(){}_'), ('russian', 'абвгдежзиклмно')):
        for i in range(6):
            paths.append(folder / f'{name}{i}.txt')
            paths[-1].write_text(words(alphabet, i // 3, 75_000))
    return paths


def test_bpe_learns_the_same_whatever_the_order_of_the_files(languages, monkeypatch):
    monkeypatch.setattr(tokenizer_choice, 'BPE_SAMPLE_CHARS', 200_000)
    made = [learn_tokenizer('bpe:500', Files(paths, 'two', TextReader()))
            for paths in (languages, languages[::-1])]
    assert made[0].tokens == made[1].tokens
    assert 150_000 < sum(map(len, sample(Files(languages, 'two', TextReader()), 200_000))) < 250_000
    of_all = train_bpe([path.read_text() for path in languages], 500)
    for path in languages[1], languages[-1]:
        text = path.read_text()
        assert len(made[0].encode(text)) == pytest.approx(len(of_all.encode(text)), rel=0.1)


def test_of_a_dataset_of_the_hub_it_learns_from_the_first_texts_and_reads_no_more(tmp_path):
    # A row that is not text ends the reading where it is met.
    source = hub_copy(tmp_path / 'copy', [300] * 4, '{"text": {"no": "text"}}\n', strict=True)
    assert list(sample(source, 3_000)) == [f'00 row {n:06d}' for n in range(231)]
    whole = hub_copy(tmp_path / 'whole', [1, 30])
    assert list(sample(whole, 10_000)) == [piece.text for piece in whole.pieces()]


def hub_copy(folder, sizes, last='', **settings):
    """A folder like one of the hub: a file of each size in rows."""
    folder.mkdir()
    for i, size in enumerate(sizes):
        rows = ''.join(json.dumps({'text': f'{i:02d} row {n:06d}'}) + '\n' for n in range(size))
        (folder / f'train-{i:05d}-of-{len(sizes):05d}.jsonl').write_text(rows + last)
    return HubDataset(str(folder), '', {'train': 'train'}, TextReader(), **settings)


# -----------------------------------------------------------------------------
# char


def test_char_ends_each_document_with_a_line_break(tmp_path):
    names = [f'{a}{b}' for a in 'abcdefghij' for b in 'uvwxyz']
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/names.txt').write_text('\r\n'.join(names))
    (tmp_path / 'in/train.jsonl').write_text(
        ''.join(json.dumps({'text': name}) + '\n' for name in names))
    char = prepared(tmp_path / 'char', tmp_path / 'in/names.txt', '--documents=line',
                    '--tokenizer=char')
    assert sorted(''.join(char).splitlines()) == sorted(names)
    entries = open_dataset(tmp_path / 'char').meta['splits']
    assert [entries[split]['bytes'] for split in ('train', 'val')] == [*map(len, char)]
    prepare.main(['hf', f'--input={tmp_path}/in', f'--tokenizer={tmp_path}/char',
                  f'--data_dir={tmp_path}/hf', '--val_fraction=0.1'])
    assert text_of(tmp_path / 'hf') == char


def test_a_line_break_comes_after_the_last_piece_of_a_document_alone(tmp_path):
    (tmp_path / 'in').mkdir()
    long = 'ab ' * PIECE_CHARS + 'c'
    for i in range(100):
        (tmp_path / f'in/{i:02d}.txt').write_text(f'{i}{long}' if i == 7 else f'{i}\n')
    lines = ''.join(prepared(tmp_path / 'd', tmp_path / 'in', '--documents=file',
                             '--tokenizer=char', '--val_fraction=0.3')).splitlines()
    assert sorted(line for line in lines if 'ab' not in line) == \
        sorted(str(i) for i in range(100) if i != 7)
    # where it goes on in another split, each of its parts is a document
    parts = [line for line in lines if 'ab' in line]
    assert sorted(''.join(parts)) == sorted(f'7{long}') and len(parts) > 1


# -----------------------------------------------------------------------------
# halves of characters


@pytest.mark.parametrize('tokenizer', ['char', 'byte', 'bpe:270'])
def test_halves_of_characters_become_replacement_characters(tokenizer, tmp_path):
    rows = [f'{{"text": "row {i} \\ud800 and \\ude00\\ud83d, \\ud83d\\ude00"}}\n'
            for i in range(50)]
    (tmp_path / 'in.jsonl').write_text(''.join(rows))
    texts = prepared(tmp_path / 'd', tmp_path / 'in.jsonl', f'--tokenizer={tokenizer}')
    assert ''.join(texts).count('\ufffd and \ufffd\ufffd, \U0001f600') == 50
    entries = open_dataset(tmp_path / 'd').meta['splits']
    for split, text in zip(('train', 'val'), texts, strict=True):
        text = text.replace('<|endoftext|>', '')
        assert entries[split]['bytes'] == len(text.encode())
