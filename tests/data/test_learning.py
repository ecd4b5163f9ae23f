"""What a tokenizer learns from, what it makes of odd texts, and whether its ids are right."""

import json
import random
import subprocess
import sys

import pytest
from processes import ROOT

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


def utf8_size(texts):
    return sum(len(text.encode()) for text in texts)


def limit_sample(monkeypatch, sample_bytes, word_bytes):
    for name, value in (('SAMPLE', sample_bytes), ('WORD', word_bytes)):
        monkeypatch.setattr(tokenizer_choice, f'BPE_{name}_BYTES', value)
    monkeypatch.setattr(tokenizer_choice, 'PROBE_BYTES', word_bytes // 2)
    monkeypatch.setattr(tokenizer_choice, 'BLOCK_CHARS', 50)


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
    limit_sample(monkeypatch, 300_000, 50_000)
    made = [learn_tokenizer('bpe:500', Files(paths, 'two', TextReader()))
            for paths in (languages, languages[::-1])]
    assert made[0].tokens == made[1].tokens
    assert 225_000 < utf8_size(sample(Files(languages, 'two', TextReader()))) < 375_000
    of_all = train_bpe([path.read_text() for path in languages], 500)
    for path in languages[1], languages[-1]:
        text = path.read_text()
        assert len(made[0].encode(text)) == pytest.approx(len(of_all.encode(text)), rel=0.1)


@pytest.mark.parametrize('alphabet, line', [
    (range(0x4e00, 0x9fa5), 30), (range(0x3041, 0x3097), 30), (range(0xe01, 0xe2f), 20),
    (range(0xac00, 0xd7a4), 10**6), (b'ACGT', 10**6), (range(ord('a'), ord('z') + 1), 8)],
    ids=['Chinese', 'Japanese', 'Thai', 'one run of Korean', 'one run of DNA', 'random words'])
@pytest.mark.parametrize('source', ['files', 'hub'])
def test_the_distinct_words_that_bpe_learns_from_are_bounded(
        source, alphabet, line, tmp_path, monkeypatch):
    limit_sample(monkeypatch, 500_000, 80_000)
    text = ''.join(map(chr, random.Random(0).choices(alphabet, k=400_000)))
    lines = [text[i:i + line] for i in range(0, len(text), line)]
    (tmp_path / 'a.txt').write_text('\n'.join(lines))
    if source == 'hub':
        rows = [text[i:i + 2000] for i in range(0, len(text), 2000)] if line > 2000 else lines
        (tmp_path / 'train.jsonl').write_text(''.join(json.dumps({'text': row}) + '\n'
                                                      for row in rows))
    texts = list(sample(HubDataset(str(tmp_path), '', {'train': 'train'}, TextReader())
                        if source == 'hub' else Files([tmp_path / 'a.txt'], 'a', TextReader())))
    assert 50_000 < utf8_size({word for text in texts for word in text.split()}) < 110_000


def test_bpe_learns_from_all_of_a_text_with_few_distinct_words(languages, monkeypatch):
    limit_sample(monkeypatch, 300_000, 50_000)
    text = languages[0].read_text()
    learned = learn_tokenizer('bpe:500', Files(languages[:1], 'one', TextReader()))
    assert learned.tokens == train_bpe([text], 500).tokens


@pytest.mark.slow
def test_learning_bpe_from_much_chinese_takes_less_than_a_gigabyte(tmp_path):
    # A random text is worse than any real one: nearly all pairs of its characters differ.
    pytest.importorskip('resource')
    chance = random.Random(0)
    with open(tmp_path / 'han.txt', 'w', encoding='utf-8') as file:
        for _ in range(700_000):  # 64 MB
            file.write(''.join(map(chr, chance.choices(range(0x4e00, 0x9fa5), k=30))) + '\n')
    program = '''
import resource, sys
from pathlib import Path
from plaingpt.data.documents import Files
from plaingpt.data.rows import TextReader
from plaingpt.data.tokenizer_choice import learn_tokenizer
learn_tokenizer('bpe:32768', Files([Path(sys.argv[1])], 'han', TextReader()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
'''
    done = subprocess.run([sys.executable, '-c', program, tmp_path / 'han.txt'], check=True,
                          cwd=ROOT, capture_output=True, text=True)
    unit = 1 if sys.platform == 'darwin' else 1024  # of ru_maxrss
    assert int(done.stdout.split()[-1]) * unit < 10**9


def test_of_a_dataset_of_the_hub_it_learns_from_the_first_texts_and_reads_no_more(
        tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_choice, 'BPE_SAMPLE_BYTES', 3_000)
    # A row that is not text ends the reading where it is met.
    source = hub_copy(tmp_path / 'copy', [300] * 4, '{"text": {"no": "text"}}\n', strict=True)
    assert list(sample(source)) == [f'00 row {n:06d}' for n in range(231)]
    monkeypatch.setattr(tokenizer_choice, 'BPE_SAMPLE_BYTES', 10_000)
    whole = hub_copy(tmp_path / 'whole', [1, 30])
    assert list(sample(whole)) == [piece.text for piece in whole.pieces()]


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
