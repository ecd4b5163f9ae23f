"""What a tokenizer learns from, what it makes of odd texts, and whether its ids are right."""

import random

import pytest
from corpus_files import write_rows

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.data import tokenizer_choice
from plaingpt.data.documents import Files, HubDataset
from plaingpt.data.rows import TextReader
from plaingpt.data.tokenizer_choice import sample, train_bpe, train_tokenizer


def words(alphabet, seed, characters):
    """Text of 2,000 words, some of which are frequent."""
    chance = random.Random(seed)
    known = [''.join(chance.choices(alphabet, k=chance.randrange(2, 9))) for _ in range(2000)]
    weights = [1 / n for n in range(1, 2001)]
    return ' '.join(chance.choices(known, weights, k=characters // 5))[:characters]


def utf8_size(texts):
    return sum(len(text.encode()) for text in texts)


@pytest.fixture
def small_sample(monkeypatch):
    """A tokenizer learns from little text, as from a large corpus."""
    for name, value in (('BPE_SAMPLE_BYTES', 300_000), ('BPE_WORD_BYTES', 50_000),
                        ('PROBE_BYTES', 25_000), ('BLOCK_CHARS', 50)):
        monkeypatch.setattr(tokenizer_choice, name, value)


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


def test_bpe_learns_the_same_whatever_the_order_of_the_files(languages, small_sample):
    learned = [train_tokenizer('bpe:500', Files(paths, 'two', TextReader()))
               for paths in (languages, languages[::-1])]
    assert learned[0].tokens == learned[1].tokens


def test_bpe_learns_from_all_parts_of_a_large_text(languages, small_sample):
    learned = train_tokenizer('bpe:500', Files(languages, 'two', TextReader()))
    of_all = train_bpe([path.read_text() for path in languages], 500)
    for path in languages[1], languages[-1]:
        text = path.read_text()
        assert len(learned.encode(text)) == pytest.approx(len(of_all.encode(text)), rel=0.1)


@pytest.mark.parametrize('alphabet, line', [
    (range(0x4e00, 0x9fa5), 30), (b'ACGT', 10**6), (range(ord('a'), ord('z') + 1), 8)],
    ids=['Chinese', 'one run of DNA', 'random words'])
@pytest.mark.parametrize('kind', ['files', 'hub'])
def test_the_distinct_words_that_bpe_learns_from_are_bounded(
        kind, alphabet, line, tmp_path, small_sample):
    text = ''.join(map(chr, random.Random(0).choices(alphabet, k=400_000)))
    if kind == 'hub':
        line = min(line, 2000)
    lines = [text[i:i + line] for i in range(0, len(text), line)]
    if kind == 'hub':
        write_rows(tmp_path / 'train.jsonl', lines)
        source = HubDataset(str(tmp_path), '', {'train': 'train'}, TextReader())
    else:
        (tmp_path / 'a.txt').write_text('\n'.join(lines))
        source = Files([tmp_path / 'a.txt'], 'a', TextReader())
    size = utf8_size({word for text in sample(source) for word in text.split()})
    assert 0.6 * 50_000 < size < 1.4 * 50_000


def test_of_a_dataset_of_the_hub_only_the_beginning_is_read(tmp_path, small_sample):
    texts = [f'{i:03} ' + 'text ' * 200 for i in range(600)]
    write_rows(tmp_path / 'train-00000-of-00002.jsonl', texts)
    write_rows(tmp_path / 'train-00001-of-00002.jsonl', [{'no': 'text'}])  # an error, if it is read
    source = HubDataset(str(tmp_path), '', {'train': 'train'}, TextReader(), strict=True)
    first = list(sample(source))
    assert first == texts[:len(first)]
    assert 300_000 <= utf8_size(first) < 301_100


# -----------------------------------------------------------------------------
# char


def test_char_ends_each_document_with_a_line_break(tmp_path):
    names = [f'{a}{b}' for a in 'abcdefghij' for b in 'uvwxyz']
    (tmp_path / 'names.txt').write_text('\r\n'.join(names))
    texts = prepared(tmp_path / 'char', tmp_path / 'names.txt', '--documents=line',
                     '--tokenizer=char')
    assert sorted(''.join(texts).splitlines()) == sorted(names)


# -----------------------------------------------------------------------------
# halves of characters


@pytest.mark.parametrize('tokenizer', ['char', 'byte', 'bpe:270'])
def test_halves_of_characters_become_replacement_characters(tokenizer, tmp_path):
    (tmp_path / 'in.jsonl').write_text(''.join(
        f'{{"text": "row {i} \\ud800 and \\ude00\\ud83d, \\ud83d\\ude00"}}\n' for i in range(50)))
    texts = prepared(tmp_path / 'd', tmp_path / 'in.jsonl', f'--tokenizer={tokenizer}')
    assert ''.join(texts).count('\ufffd and \ufffd\ufffd, \U0001f600') == 50
