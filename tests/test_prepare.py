import argparse
import csv
import hashlib
import inspect
import json
import re
import resource
import shutil
import sys
import sysconfig
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import ROOT, exit_code, fails, fork

import prepare
from configurator import load_config
from plaingpt.core.dataset import (
    Dataset,
    dataset_folder,
    open_dataset,
    open_dataset_spec,
    parse_dataset_spec,
)
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint
from plaingpt.data.corpora import CORPORA, Corpus, find_packages, find_standard_library
from plaingpt.inference import open_weights


def meta_of(folder):
    return json.loads((Path(folder) / 'meta.json').read_text())


def decoded(folder, split):
    dataset = open_dataset(folder)
    return dataset.tokenizer().decode(np.fromfile(folder / f'{split}.bin', '<u2'))


@pytest.mark.parametrize('name', ['shakespeare_char', 'shakespeare'])
def test_shakespeare_is_split_where_nanogpt_splits_it(name, text_file, tmp_path):
    text = text_file.read_text()[:9_994]
    (tmp_path / 'input.txt').write_text(text)
    prepare.main([name, '--input=input.txt', '--data_dir=d'])
    middle = int(len(text) * 0.9)
    assert [decoded(tmp_path / 'd', split) for split in ('train', 'val')] == [
        text[:middle], text[middle:]]


def test_the_standard_library_comes_without_tests_or_installed_packages():
    stdlib = sysconfig.get_paths()['stdlib']
    paths = [path.relative_to(stdlib) for path in find_standard_library()]
    assert {*map(Path, ('abc.py', 'json/decoder.py', 'heapq.py'))} < {*paths}
    assert not [path for path in paths if {'test', 'site-packages'} & {*path.parts}]


def test_only_code_of_installed_packages_is_read_once(tmp_path, monkeypatch):
    folder = tmp_path / 'site-packages'
    code = {name: inspect.getsource(module) for name, module in (
        ('a/csv.py', csv), ('b/shutil.py', shutil), ('c/argparse.py', argparse))}
    code['d/vendored_shutil.py'] = code['b/shutil.py'].replace('import', 'from x import', 9)
    rows = ''.join(f'    {i}: Kind.LETTER,\n' for i in range(999))
    code['e/table.py'] = f'TABLE = {{\n{rows}}}\n'
    code['f/__init__.py'] = 'from .g import *\n'
    for name, text in code.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(sys, 'path', [str(folder), str(tmp_path)])
    names = {str(path.relative_to(folder)) for path in find_packages()}
    assert names == {'a/csv.py', 'b/shutil.py', 'c/argparse.py'}


def test_meta_json_describes_the_files(char_data):
    meta = meta_of(char_data)
    for split, about in meta['splits'].items():
        data = (char_data / f'{split}.bin').read_bytes()
        assert len(data) == 2 * about['tokens']
        assert about['files'] == [{'name': f'{split}.bin', 'tokens': about['tokens'],
                                   'sha256': hashlib.sha256(data).hexdigest()}]
        assert about['bytes'] == len(decoded(char_data, split).encode())


def test_a_corpus_of_local_files_is_one_entry_of_the_table(tmp_path, monkeypatch, capsys):
    (tmp_path / 'notes.jsonl').write_text('\n'.join(
        json.dumps({'body': f'note {i}'}) for i in range(200)))
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setitem(CORPORA, 'notes', Corpus(
        'my notes', 'bpe:300', files='~/notes.jsonl', text_field='body', small=True))
    prepare.main(['notes', f'--data_dir={tmp_path}/d', '--if_small'])
    assert sum(split['documents'] for split in meta_of(tmp_path / 'd')['splits'].values()) == 200
    capsys.readouterr()
    prepare.main([])
    assert 'my notes' in capsys.readouterr().out


def test_the_recipe_of_each_corpus_is_there():
    for corpus in CORPORA.values():
        for recipe in filter(None, (corpus.recipe, corpus.gpu_recipe)):
            assert (ROOT / recipe.split()[0]).exists()


@pytest.mark.parametrize('content', [None, b'', b' \n\t ', b'x', b'good\n \xff bad'])
def test_unusable_text_overwrites_nothing(content, char_data, tmp_path, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in char_data.iterdir()}
    path = tmp_path / 'in.txt'
    if content is not None:
        path.write_bytes(content)
    message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={path}',
                    '--tokenizer=char', f'--data_dir={char_data}', '--overwrite')
    assert str(path) in message
    assert {path.name: path.read_bytes() for path in char_data.iterdir()} == before


# -----------------------------------------------------------------------------
# tokenizers


def test_a_borrowed_tokenizer_is_that_of_the_other_dataset_today(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_file.read_text()[:20_000]
    for lent in (text, text[::-1]):
        Path('lent.txt').write_text(lent)
        prepare.main(['text', '--input=lent.txt', '--tokenizer=bpe:400', '--data_dir=data/lender',
                      '--overwrite'])
        for named in ('lender', f'{tmp_path}/data/lender'):
            prepare.main(['text', f'--input={text_file}', f'--tokenizer={named}',
                          '--data_dir=borrower', '--overwrite'])
            assert meta_of('borrower')['tokenizer'] == meta_of('data/lender')['tokenizer']
            assert decoded(Path('borrower'), 'train').startswith('"""\nModule difflib')


def test_ids_that_do_not_fit_16_bits_get_32(tmp_path):
    text = ''.join(map(chr, range(0x10000, 0x10000 + 70_000))) * 2
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    prepare.main(['text', f'--input={tmp_path}/in.txt', '--tokenizer=char',
                  f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    assert dataset.meta['dtype'] == 'uint32'
    ids = np.concatenate([dataset.split(s).read(0, 10**9) for s in ('train', 'val')])
    assert dataset.tokenizer().decode(ids.tolist()) == text


def test_a_larger_text_gets_a_larger_vocabulary(text_file, tmp_path):
    for characters, vocab_size in ((20_000, 512), (100_000, 1024)):
        path = tmp_path / f'{characters}.txt'
        path.write_text(text_file.read_text()[:characters])
        prepare.main(['text', str(path), f'--data_dir={tmp_path}/{characters}'])
        assert meta_of(tmp_path / f'{characters}')['vocab_size'] == vocab_size


# -----------------------------------------------------------------------------
# the disk


def test_after_the_disk_was_full_the_same_command_works(tmp_path):
    (tmp_path / 'in.txt').write_text('some text\n' * 20_000)
    argv = ['text', f'--input={tmp_path}/in.txt', '--tokenizer=byte', f'--data_dir={tmp_path}/d']

    def fill_up():  # no file may grow beyond 100 kB: the kernel refuses, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    assert exit_code(fork(prepare.main, *argv, log=tmp_path / 'log', before=fill_up)) == 2
    assert (tmp_path / 'log').read_text().count('error: ') == 1
    assert not list((tmp_path / 'd').glob('*.bin'))
    prepare.main(argv)
    assert decoded(tmp_path / 'd', 'val').endswith('some text\n')


@pytest.mark.parametrize('tokenizer', ['byte', pytest.param('char', marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path):
    def peak(size):
        (tmp_path / 'in.txt').write_text('To be, or not to be.\n' * (size // 21))
        tracemalloc.start()
        # No sequence to validate on: to compare the splits takes 80 MB at any size.
        prepare.main(['text', f'{tmp_path}/in.txt', '--num_proc=1', f'--tokenizer={tokenizer}',
                      '--val_fraction=0.000001', f'--data_dir={tmp_path}/{size}'])
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16_000_000) < peak(8_000_000) + 4_000_000


def test_the_next_command_fine_tunes_the_model_whose_tokenizer_was_named(
        trained, char_data, text_file, tmp_path, capsys):
    prepare.main(['text', str(text_file), f'--tokenizer={trained}', '--data_dir=more'])
    following = re.search(r'^next: .*train.py (.*)', capsys.readouterr().out, re.M)[1].split()
    assert f'--init_from={trained}' in following
    config = load_config(TrainConfig, following, read_saved=StartingPoint().read)
    assert config.block_size == 16  # the model's
    # mixed with the text that the model was trained on, at a rate at which it keeps that
    assert parse_dataset_spec(config.dataset) == {'./more': 0.333, str(char_data): 0.667}
    assert config.learning_rate == 6e-4
    tokens = len(open_dataset('more').split('train'))
    assert config.max_iters == round(4 * tokens / 0.333 / (8 * 16))


def test_a_text_is_mixed_only_with_the_text_that_the_model_was_trained_on(
        trained, char_data, monkeypatch):
    assert prepare.with_old_text(str(char_data), str(trained)) == str(char_data)  # it is that text
    monkeypatch.setattr(Dataset, 'identity', lambda self, split: 'changed since')
    assert prepare.with_old_text('more', str(trained)) == 'more'


def test_a_text_is_mixed_with_all_texts_of_a_mixture(char_data, tmp_path, monkeypatch):
    other = shutil.copytree(char_data, tmp_path / 'other')
    old = f'{char_data}:0.4,{other}:0.6'
    state = {'config': {'dataset': old}, 'data': open_dataset_spec(old).identity('train')}
    monkeypatch.setattr(open_weights, 'open_weights', lambda source: SimpleNamespace(state=state))
    assert parse_dataset_spec(prepare.with_old_text('more', 'out')) \
        == {'more': 0.333, str(char_data): 0.267, str(other): 0.4}
    assert prepare.with_old_text(str(other), 'out') == old  # one of them


@pytest.mark.parametrize(('has_gpu', 'recipe'), [
    (False, 'config/shakespeare_char_cpu.py'), (True, 'config/shakespeare_char.py')])
def test_the_next_command_is_for_this_machine(has_gpu, recipe, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: has_gpu)
    prepare.print_next_command('shakespeare_char', CORPORA['shakespeare_char'], Path('d'), 'auto')
    assert f'train.py {recipe} ' in capsys.readouterr().out


def test_the_next_command_finds_what_was_prepared(text_file, capsys):
    for folder in ('mine', 'data/mine', 'a/b'):
        prepare.main(['text', str(text_file), '--tokenizer=byte', f'--data_dir={folder}'])
        out = capsys.readouterr().out
        name = re.search(r'^next: .* --dataset=(\S+)', out, re.M)[1]
        assert dataset_folder(name) == Path(folder)
