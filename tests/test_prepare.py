import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, SHARED, fails, run, shared_file

import prepare
from plaingpt.corpus import encoding
from plaingpt.corpus.corpora import CORPORA, Corpus, find_dataset_size
from plaingpt.corpus.documents import Piece
from plaingpt.system.errors import UserError
from plaingpt.tokens.dataset import open_dataset


def meta_of(folder):
    return json.loads((Path(folder) / 'meta.json').read_text())


def decoded(folder, split):
    dataset = open_dataset(folder)
    return dataset.tokenizer().decode(np.fromfile(folder / f'{split}.bin', '<u2'))


def test_tiny_shakespeare_as_characters_is_nanogpts(tmp_path):
    source = shared_file('tinyshakespeare.txt')
    prepare.main(['shakespeare_char', f'--input={source}', f'--data_dir={tmp_path}/d'])
    meta = meta_of(tmp_path / 'd')
    assert meta['vocab_size'] == 65
    assert [meta['splits'][s]['tokens'] for s in ('train', 'val')] == [1_003_854, 111_540]
    assert decoded(tmp_path / 'd', 'train') + decoded(tmp_path / 'd', 'val') == source.read_text()


def test_tiny_shakespeare_as_gpt2_tokens_is_nanogpts(tmp_path, monkeypatch):
    source = shared_file('tinyshakespeare.txt')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    prepare.main(['shakespeare', f'--input={source}', f'--data_dir={tmp_path}/d'])
    splits = meta_of(tmp_path / 'd')['splits']
    assert [splits[s]['tokens'] for s in ('train', 'val')] == [301_966, 36_059]


def test_the_standard_library_is_split_by_file_without_its_tests(tmp_path):
    prepare.main(['pystdlib', f'--data_dir={tmp_path}/d'])
    meta = meta_of(tmp_path / 'd')
    train, val = meta['splits']['train'], meta['splits']['val']
    assert train['documents'] > 300 and val['documents'] > 20
    stdlib = Path(sysconfig.get_paths()['stdlib'])
    texts = {split: decoded(tmp_path / 'd', split) for split in ('train', 'val')}
    for name in ('argparse.py', 'json/decoder.py', 'heapq.py', 'dataclasses.py'):
        text = (stdlib / name).read_text()
        assert (text in texts['train']) != (text in texts['val']), name
    test = stdlib / 'test/test_heapq.py'
    assert not test.exists() or test.read_text() not in texts['train'] + texts['val']
    tokens = np.fromfile(tmp_path / 'd/train.bin', '<u2')
    end_of_text = open_dataset(tmp_path / 'd').tokenizer().end_of_text
    assert tokens[0] == end_of_text and (tokens == end_of_text).sum() == train['documents']


def test_own_files_of_a_folder_become_one_text(tmp_path):
    (tmp_path / 'in/sub').mkdir(parents=True)
    (tmp_path / 'in/a.txt').write_text('first ' * 20)
    (tmp_path / 'in/sub/b.md').write_text('zweite ä ' * 20)
    (tmp_path / 'in/c.bin').write_bytes(b'\xff\xfe')
    prepare.main(['text', f'--input={tmp_path}/in', '--tokenizer=byte', f'--data_dir={tmp_path}/d',
                  '--val_fraction=0.25'])
    text = decoded(tmp_path / 'd', 'train') + decoded(tmp_path / 'd', 'val')
    assert text == 'first ' * 20 + '\n' + 'zweite ä ' * 20
    assert meta_of(tmp_path / 'd')['splits']['val']['tokens'] == pytest.approx(75, abs=10)


def test_meta_json_describes_the_files(char_data):
    meta = meta_of(char_data)
    for split, about in meta['splits'].items():
        data = (char_data / f'{split}.bin').read_bytes()
        assert len(data) == 2 * about['tokens'] and meta['dtype'] == 'uint16'
        assert about['files'] == [{'name': f'{split}.bin', 'tokens': about['tokens'],
                                   'sha256': hashlib.sha256(data).hexdigest()}]
        assert about['bytes'] == len(decoded(char_data, split).encode())


def test_documents_keep_their_side_when_others_come_and_go():
    def sides_of(texts):
        pieces = [Piece(text, True, 0) for text in texts]
        return {text: split for split, text, *_ in encoding.split_by_hash(pieces, 0.1)}

    texts = [f'document {i}' for i in range(2000)]
    sides, fewer = sides_of(texts), sides_of(texts[::3])
    assert all(sides[text] == split for text, split in fewer.items())
    assert 150 < sum(split == 'val' for split in sides.values()) < 250


def test_a_corpus_of_the_hub_is_streamed_through_datasets(tmp_path, monkeypatch):
    (tmp_path / 'copy').mkdir()
    rows = [{'text': f'page {i} of the web', 'url': 'x'} for i in range(500)]
    (tmp_path / 'copy/train.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    prepare.main(['openwebtext', f'--input={tmp_path}/copy', '--tokenizer=byte',
                  '--val_fraction=0.1', f'--data_dir={tmp_path}/d'])
    splits = meta_of(tmp_path / 'd')['splits']
    assert splits['train']['documents'] + splits['val']['documents'] == 500
    assert decoded(tmp_path / 'd', 'train').startswith('page ')


@pytest.mark.parametrize(('corpus', 'has_documents'), [
    (Corpus('my notes', 'bpe:300', files='~/notes.jsonl', text_field='body', small=True), True),
    (Corpus('my notes', 'byte', files='~/one.txt,~/more/*.md', small=True), False)])
def test_a_corpus_of_local_files_is_one_entry_of_the_table(corpus, has_documents, tmp_path,
                                                           monkeypatch, capsys):
    rows = [{'id': i, 'body': f'note {i}'} for i in range(200)]
    (tmp_path / 'notes.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (tmp_path / 'one.txt').write_text('note 0 ' * 50)
    (tmp_path / 'more').mkdir()
    (tmp_path / 'more/two.md').write_text('note ' * 50)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setitem(CORPORA, 'notes', corpus)
    assert find_dataset_size('notes')[0] == (300 if has_documents else 257)
    prepare.main(['notes', f'--data_dir={tmp_path}/d', '--if_small'])
    splits = meta_of(tmp_path / 'd')['splits']
    assert sum(split['documents'] for split in splits.values()) == (200 if has_documents else 2)
    assert 'note ' in decoded(tmp_path / 'd', 'train')
    (tmp_path / 'other.txt').write_text('another text ' * 50)
    prepare.main(['notes', f'--input={tmp_path}/other.txt', f'--data_dir={tmp_path}/d',
                  '--overwrite'])
    assert 'another text ' in decoded(tmp_path / 'd', 'train')
    capsys.readouterr()
    prepare.main([])
    assert 'my notes' in capsys.readouterr().out


def test_without_a_name_the_corpora_are_listed(capsys):
    prepare.main([])
    out = capsys.readouterr().out
    assert all(name in out for name in CORPORA)


def test_a_download_is_verified(monkeypatch, tmp_path, capsys):
    answers = {'/good': b'To be, or not to be. ' * 100, '/bad': b'<html>sorry</html>'}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b''))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f'http://127.0.0.1:{server.server_port}'
    sha256 = hashlib.sha256(answers['/good']).hexdigest()
    arguments = ['plays', f'--data_dir={tmp_path}/d']

    def download_from(path):
        monkeypatch.setitem(CORPORA, 'plays', Corpus('plays', 'char', url=at + path, sha256=sha256))

    for path, words in (('/bad', 'checksum'), ('/none', 'could not be downloaded')):
        download_from(path)
        assert words in fails(capsys, monkeypatch, prepare.main, *arguments)
        assert not (tmp_path / 'd').exists()
    download_from('/good')
    prepare.main(arguments)
    assert decoded(tmp_path / 'd', 'train').startswith('To be')
    server.shutdown()
    download_from('/gone')
    server.server_close()
    assert '--input=FILE' in fails(capsys, monkeypatch, prepare.main, *arguments)


@pytest.mark.parametrize(('content', 'words'), [
    (b'', 'empty'), (b' \n\t ', 'empty'), (b'good \xff bad', 'not UTF-8 at byte 5'),
    (b'x', 'split'), (None, 'No such file')])
def test_text_that_cannot_be_used_is_one_line_and_nothing_is_overwritten(
        content, words, char_data, tmp_path, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in char_data.iterdir()}
    path = tmp_path / 'in.txt'
    if content is not None:
        path.write_bytes(content)
    message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={path}',
                    '--tokenizer=char', f'--data_dir={char_data}', '--overwrite')
    assert words in message and str(path) in message
    kept = {name: (char_data / name).read_bytes() for name in before}
    assert kept == before


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys, monkeypatch):
    assert 'shakespeare' in fails(capsys, monkeypatch, prepare.main, 'shakespear')
    assert '--input' in fails(capsys, monkeypatch, prepare.main, 'text')
    assert '.txt' in fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}')
    assert 'val_fraction' in fails(capsys, monkeypatch, prepare.main, 'text', '--val_fraction=2')
    assert 'tokenizer' in fails(capsys, monkeypatch, prepare.main, 'text', '--tokenizer=magic')
    assert 'too many' in fails(capsys, monkeypatch, prepare.main, 'pystdlib',
                               '--tokenizer=bpe:999999999999', f'--data_dir={tmp_path}/d')
    blocked = tmp_path / 'file'
    blocked.write_text('in the way')
    assert 'cannot write' in fails(capsys, monkeypatch, prepare.main, 'pystdlib',
                                   f'--data_dir={blocked}/d')


# -----------------------------------------------------------------------------
# tokenizers


def test_a_tokenizer_of_another_dataset_is_used_again(text_file, char_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.main(['text', f'--input={text_file}', '--tokenizer=bpe:400', '--data_dir=data/first'])
    other = tmp_path / 'other.txt'
    other.write_text('parser = argument\n' * 500)
    for n, named in enumerate(('first', f'{tmp_path}/data/first')):
        prepare.main(['text', f'--input={other}', f'--tokenizer={named}', f'--data_dir=other{n}'])
        assert meta_of(f'other{n}')['tokenizer'] == meta_of('data/first')['tokenizer']
        assert decoded(Path(f'other{n}'), 'train').startswith('parser = argument\n')


def test_a_vocabulary_that_the_text_is_too_short_for_is_told_in_a_line(text_file, tmp_path, capsys):
    def lines(size):
        prepare.main(['text', f'--input={text_file}', f'--tokenizer=bpe:{size}',
                      f'--data_dir={tmp_path}/{size}'])
        return [line for line in capsys.readouterr().out.splitlines() if 'asks for' in line]

    (line,) = lines(90000)
    got = meta_of(tmp_path / '90000')['vocab_size']
    assert 'bpe:90000 asks for 90,000' in line and f'got {got:,}' in line and got < 90000
    assert not lines(400)


def test_ids_that_do_not_fit_16_bits_get_32(tmp_path):
    text = ''.join(map(chr, range(0x10000, 0x10000 + 70_000))) * 2
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    prepare.main(['text', f'--input={tmp_path}/in.txt', '--tokenizer=char',
                  f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    assert dataset.meta['dtype'] == 'uint32' and dataset.vocab_size == 70_000
    ids = np.concatenate([dataset.split(s, in_ram=True).ram for s in ('train', 'val')])
    assert ids.max() == 69_999 and dataset.tokenizer().decode(ids.tolist()) == text


# -----------------------------------------------------------------------------
# inspect


def test_inspect_prints_what_is_there(tmp_path, capsys):
    prepare.main(['pystdlib', f'--data_dir={tmp_path}/d', '--shard_tokens=1_000_000'])
    about = meta_of(tmp_path / 'd')['splits']['train']
    capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    out = capsys.readouterr().out
    assert f'{about["tokens"]:,} tokens in {len(about["files"])} files' in out
    assert f'{about["documents"]:,} ends of text' in out and 'no damage found' in out
    assert 'corpus: pystdlib' in out and '<|endoftext|>' in out


def test_inspect_reads_the_bare_folder_of_nanogpt(tmp_path, capsys, monkeypatch):
    if not (SHARED / 'tiktoken_cache').exists():
        pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED)")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    for split in ('train', 'val'):
        np.array([15496, 11, 314, 1101, 257, 50256] * 50, dtype='<u2').tofile(
            tmp_path / f'{split}.bin')
    prepare.main(['inspect', str(tmp_path)])
    out = capsys.readouterr().out
    assert "Hello, I'm a<|endoftext|>" in out and '50 ends of text' in out


def spoil(path, at, value):
    tokens = np.fromfile(path, '<u2')
    tokens[at] = value
    tokens.tofile(path)


@pytest.mark.parametrize(('harm', 'words'), [
    (lambda d: spoil(d / 'val.bin', 3, 256), 'another checksum'),
    (lambda d: spoil(d / 'val.bin', 3, 300), 'val.bin: token 3 has id 300'),
    (lambda d: spoil(d / 'val.bin', 3, 256), 'ends of text where meta.json says'),
    (lambda d: (d / 'train.bin').write_bytes(b'\0\0' * 9), 'train.bin: 9 tokens where'),
    (lambda d: (d / 'train.bin').unlink(), 'train.bin: No such file')])
def test_inspect_finds_what_is_wrong(harm, words, tmp_path, capsys):
    (tmp_path / 'in.txt').write_text('\n'.join(f'line {i}' for i in range(2000)))
    prepare.main(['text', f'--input={tmp_path}/in.txt', '--documents=line', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d'])
    harm(tmp_path / 'd')
    with pytest.raises(UserError, match=words):
        prepare.main(['inspect', f'{tmp_path}/d'])


# -----------------------------------------------------------------------------
# the disk


def test_a_disk_that_is_too_small_is_found_before_the_start(tmp_path, capsys, monkeypatch):
    (tmp_path / 'in.txt').write_text('text ' * 100_000)
    free = shutil.disk_usage(tmp_path)._replace(free=900_000)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: free)
    argv = ['text', f'--input={tmp_path}/in.txt', '--tokenizer=byte', f'--data_dir={tmp_path}/d']
    assert 'about 1.00 MB needed, 900 kB free' in fails(capsys, monkeypatch, prepare.main, *argv)
    assert not (tmp_path / 'd').exists()


def test_a_disk_that_fills_up_is_one_line_and_the_same_command_goes_on(tmp_path):
    (tmp_path / 'in.txt').write_text('some text\n' * 300_000)
    argv = ['text', f'--input={tmp_path}/in.txt', '--tokenizer=byte', f'--data_dir={tmp_path}/d',
            '--shard_tokens=1_000_000']
    # No file may grow beyond 1.5 MB: the kernel refuses, as it does where the disk is full.
    limited = ('import resource, sys, prepare\nfrom plaingpt.system import errors\n'
               'resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))\n'
               'errors.run_script(prepare.main)')
    done = subprocess.run([sys.executable, '-c', limited, *argv], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith('command again')
    assert not list((tmp_path / 'd').glob('*.bin'))
    prepare.main(argv)
    assert decoded(tmp_path / 'd', 'val').endswith('some text\n')


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads /proc')
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def peak(megabytes):
        (tmp_path / 'in.txt').write_bytes(b'To be, or not to be, that is the question.\n'
                                          * (megabytes * 23_000))
        return int(run('-c', 'import prepare, resource, sys\n'
                       'prepare.main(sys.argv[1:])\n'
                       'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)',
                       'text', f'--input={tmp_path}/in.txt', '--tokenizer=byte',
                       f'--data_dir={tmp_path}/d').split()[-1]) * 1024

    assert peak(40) < peak(4) + 20e6


def test_a_tokenizer_borrowed_from_a_dataset_is_that_of_today(tmp_path, text_file, capsys):
    def get(name, source, tokenizer):
        prepare.main(['text', f'--input={source}', f'--tokenizer={tokenizer}',
                      f'--data_dir={tmp_path}/{name}', '--overwrite'])
        return meta_of(tmp_path / name)['tokenizer']

    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])
    lender = str(tmp_path / 'lender')
    assert get('borrower', text_file, get('lender', text_file, 'bpe:400') and lender) \
        == meta_of(lender)['tokenizer']
    get('lender', other, 'bpe:400')
    assert get('borrower', text_file, lender) == meta_of(lender)['tokenizer']


@pytest.mark.parametrize('journal', ['', '[1]', '{"a": 1}', '{"command": 3}', '[' * 10**5])
def test_a_damaged_journal_means_starting_anew(tmp_path, text_file, journal):
    (tmp_path / 'd/unfinished').mkdir(parents=True)
    for name in ('journal.json', 'meta.json'):
        (tmp_path / 'd/unfinished' / name).write_text(journal)
    prepare.main(['text', f'--input={text_file}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
    assert decoded(tmp_path / 'd', 'train').startswith('# Author')
