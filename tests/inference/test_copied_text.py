"""sample.py --sources: what of a text stands in the training text, and where."""

import json
import shutil
import sys

import numpy as np
import pytest
from helpers import fails

import prepare
import sample
import train
from plaingpt.data.dataset import open_dataset, open_named
from plaingpt.inference import copied_text
from plaingpt.inference.copied_text import Sources

pytest.importorskip('pydivsufsort')


def train_ids(dataset):
    return dataset.split('train', in_ram=True).ram


@pytest.fixture(scope='module')
def byte_data(text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'bytes'
    prepare.main(['text', f'--input={text_file}', '--tokenizer=bpe:300', f'--data_dir={folder}',
                  '--shard_tokens=20000', '--documents=paragraph'])
    return folder


def naive(text, ids):
    """How many of the first of `ids` stand together in a text of tokens."""
    places = np.arange(len(text))
    for n, i in enumerate(ids):
        places = places[places + n < len(text)]
        places = places[text[places + n] == i]
        if not len(places):
            return n
    return len(ids)


def test_the_longest_match_is_that_of_a_naive_search_in_a_thousand_samples(byte_data):
    dataset, rng = open_dataset(byte_data), np.random.default_rng(1)
    sources, text = Sources(dataset), train_ids(dataset)
    lengths = []
    for _ in range(1000):
        at, length = rng.integers(0, len(text) - 40), rng.integers(1, 40)
        ids = text[at:at + length].copy()
        changed = rng.random(length) < rng.choice([0, 0.1, 1])
        ids[changed] = rng.integers(0, dataset.vocab_size, changed.sum())
        n, token = sources.longest_match(ids)
        assert n == naive(text, ids)
        assert np.array_equal(text[token:token + n], ids[:n])
        lengths.append(n)
    assert min(lengths) <= 1 and max(lengths) >= 35


def test_stretches_are_the_longest_do_not_overlap_and_are_where_it_is_said(byte_data):
    dataset = open_dataset(byte_data)
    sources, text, tokenizer = Sources(dataset), train_ids(dataset), dataset.tokenizer()
    ids = np.concatenate((text[25000:25060], text[100:130], [7], text[19990:20020], text[:3]))
    written = tokenizer.decode_bytes(ids)
    found = sources.find(ids)
    assert [end - begin for begin, end, _ in found] == sorted(
        (end - begin for begin, end, _ in found), reverse=True) and len(found) >= 3
    seen = np.zeros(len(written), int)
    for begin, end, token in found:
        assert end - begin >= copied_text.SHORTEST
        assert tokenizer.decode_bytes(text[token:token + 200]).startswith(written[begin:end])
        seen[begin:end] += 1
    assert seen.max() == 1
    documents = sum(text[:25001] == tokenizer.end_of_text)
    assert documents > 5
    assert sources.place(25000).endswith(f'train_000001.bin, token 5,000, document {documents}')
    assert sources.copied([text[500:900]]) == 1 and sources.copied([np.array([7])]) == 0


def test_the_suffix_array_is_kept_until_the_text_changes(byte_data, tmp_path, monkeypatch):
    folder = tmp_path / 'data'
    shutil.copytree(byte_data, folder, ignore=shutil.ignore_patterns('*.npy'))
    built = []
    original = Sources.build
    monkeypatch.setattr(Sources, 'build', lambda self: built.append(1) or original(self))
    first, second = Sources(open_dataset(folder)), Sources(open_dataset(folder))
    assert len(built) == 1 and np.array_equal(first.suffixes, second.suffixes)
    [path] = folder.glob('*.suffixes.npy')
    path.write_bytes(path.read_bytes()[:1000])
    assert np.array_equal(Sources(open_dataset(folder)).suffixes, first.suffixes)
    meta = json.loads((folder / 'meta.json').read_text())
    meta['splits']['train']['files'][0]['sha256'] = '0' * 64
    (folder / 'meta.json').write_text(json.dumps(meta))
    Sources(open_dataset(folder))
    assert len(built) == 3


def test_a_mixture_is_searched_as_one_text(byte_data, tmp_path):
    shutil.copytree(byte_data, tmp_path / 'a')
    prepare.main(['text', f'--input={__file__}', f'--tokenizer={byte_data}',
                  f'--data_dir={tmp_path}/b'])
    dataset = open_named(f'{tmp_path}/a:0.5,{tmp_path}/b:0.5')
    sources, other = Sources(dataset), train_ids(open_dataset(tmp_path / 'b'))
    [(_, _, token)] = sources.find(other[:60])
    assert sources.place(token).startswith(f'{tmp_path}/b/train.bin, token 0')


COPIED = 'helpers for computing deltas betw'  # of the common text


@pytest.fixture
def learned(trained, tmp_path, monkeypatch):
    """An out_dir with a report whose model has `Sources` that hold what it writes."""
    out_dir = tmp_path / 'out'
    shutil.copytree(trained, out_dir)
    (out_dir / 'report.md').write_text('# out\n')
    monkeypatch.setattr('plaingpt.inference.text_generator.TextGenerator.write',
                        lambda self, prompts, *_: [f'{COPIED} words of its own'] * len(prompts))
    return out_dir


def test_copied_stretches_are_shown_and_counted(learned, capsys, monkeypatch):
    argv = [str(learned), '--device=cpu', '--num_samples=2', '--sources']
    sample.main(argv)
    out = capsys.readouterr().out
    assert f'  {len(COPIED)} characters, ' in out and 'train.bin, token ' in out
    assert COPIED in out
    *_, last = out.splitlines()
    assert '% of what it wrote stands word for word in the training text' in last
    sample.main([f'--init_from={learned}', '--out_dir=other', *argv[1:]])
    report = (learned / 'report.md').read_text()
    assert report.count('## What it copied') == 1 and last in report
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    sample.main(argv)
    assert f'\x1b[4m{COPIED}\x1b[24m' in capsys.readouterr().out


def test_mistakes_are_one_line(trained, tiny, tmp_path, capsys, monkeypatch):
    for argv, words in (((trained, '--stream'), 'sources=True goes with neither'),
                        ((trained, '--chat'), 'sources=True goes with neither')):
        assert words in fails(capsys, monkeypatch, sample.main, *argv, '--sources')
    monkeypatch.setattr(copied_text, 'MOST_TOKENS', 1000)
    assert '1,000 are the most' in fails(capsys, monkeypatch, sample.main, trained, '--sources')
    with monkeypatch.context() as patch:
        patch.setattr(copied_text, 'MOST_TOKENS', 10**6)
        patch.setattr(Sources, 'open_suffixes', Sources.build)
        patch.setitem(sys.modules, 'pydivsufsort', None)
        assert '--sources needs pydivsufsort: pip install pydivsufsort' in fails(
            capsys, monkeypatch, sample.main, trained, '--sources')
    data = next(arg.partition('=')[2] for arg in tiny if arg.startswith('--dataset'))
    shutil.copytree(data, tmp_path / 'data')
    train.main([*tiny, f'--dataset={tmp_path}/data', '--max_iters=1'])
    shutil.rmtree(tmp_path / 'data')
    assert 'is not prepared' in fails(
        capsys, monkeypatch, sample.main, tmp_path / 'out', '--sources')
    prepare.main(['text', f'--input={__file__}', '--tokenizer=char',
                  f'--data_dir={tmp_path}/data'])
    assert 'was trained on other tokens than those of' in fails(
        capsys, monkeypatch, sample.main, tmp_path / 'out', '--sources')
