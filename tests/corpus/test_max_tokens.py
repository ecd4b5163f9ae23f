"""prepare.py --max_tokens: so many tokens to train on, of any corpus, and no more is read."""

import json
import re
import shutil
import signal

import pyarrow
import pyarrow.parquet
import pytest
from helpers import fails
from test_restart import contents, start

import prepare
from plaingpt.corpus import encoding
from plaingpt.system.formatting import parse_count
from plaingpt.tokens.dataset import open_dataset

TEXTS = [f'document {i} ' + 'of many words ' * (i % 40) for i in range(2000)]


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """The same documents as a folder of many Parquet files, as JSON lines and as one text."""
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'hub').mkdir()
    for i in range(20):
        table = pyarrow.table({'text': TEXTS[i * 100:(i + 1) * 100]})
        pyarrow.parquet.write_table(table, folder / f'hub/train-{i:05d}-of-00020.parquet')
    (folder / 'rows.jsonl').write_text(''.join(
        json.dumps({'text': text}) + '\n' for text in TEXTS))
    (folder / 'running.txt').write_text('\n'.join(TEXTS))
    return folder


def arguments(kind, inputs, folder, *more):
    name, where = {'hub': ('hf', inputs / 'hub'), 'rows': ('text', inputs / 'rows.jsonl'),
                   'running': ('text', inputs / 'running.txt')}[kind]
    return [name, f'--input={where}', '--tokenizer=byte', '--val_fraction=0.1',
            '--shard_tokens=9_000', f'--data_dir={folder}', *more]


def split_bytes(folder, split):
    return bytes((open_dataset(folder).split(split, in_ram=True).ram % 256).astype('u1'))


@pytest.mark.parametrize('kind', ['hub', 'rows', 'running'])
@pytest.mark.parametrize('limit', [4_321, 27_000])
def test_the_training_tokens_are_the_first_ones_and_exactly_so_many(kind, limit, inputs, tmp_path):
    prepare.main(arguments(kind, inputs, tmp_path / 'all'))
    prepare.main(arguments(kind, inputs, tmp_path / 'd', f'--max_tokens={limit}'))
    train, val = (split_bytes(tmp_path / 'd', split) for split in ('train', 'val'))
    all_train, all_val = (split_bytes(tmp_path / 'all', split) for split in ('train', 'val'))
    assert train == all_train[:limit] and len(train) == limit
    if kind == 'running':  # its end is for validation, whatever is trained on
        assert val == all_val
    else:
        last = train.split(b'\0')[-1].decode()
        index = next(i for i, text in enumerate(TEXTS) if text.startswith(last[:13]))
        read = [text.encode() for text in TEXTS[:index]]
        assert [text for text in all_val.split(b'\0')[1:] if text in read] == val.split(b'\0')[1:]
    entry = open_dataset(tmp_path / 'd').split_entry('train')
    assert entry['documents'] == max(1, train.count(0))
    assert entry['bytes'] == len(train) - train.count(0)
    prepare.main(['inspect', str(tmp_path / 'd')])


@pytest.mark.parametrize(('kind', 'num_proc'), [
    ('rows', 1), ('running', 3), pytest.param('hub', 3, marks=pytest.mark.slow)])
def test_threads_batches_and_kills_do_not_change_where_it_ends(kind, num_proc, inputs, tmp_path):
    limit = '--max_tokens=60_001'
    prepare.main(arguments(kind, inputs, tmp_path / 'd', limit, '--num_proc=2'))
    argv = arguments(kind, inputs, tmp_path / 'killed', limit, f'--num_proc={num_proc}')
    for calls in (20, 12, 0):
        process = start(*argv, calls=calls)  # with smaller batches
        process.join()
        assert process.exitcode == (-signal.SIGKILL if calls else 0)
    assert contents(tmp_path / 'killed') == contents(tmp_path / 'd')


def test_a_kill_after_the_last_token_costs_none_and_adds_none(inputs, tmp_path, monkeypatch):
    argv = arguments('rows', inputs, tmp_path / 'd', '--max_tokens=45_000')  # five full shards
    prepare.main([*argv[:-2], f'--data_dir={tmp_path}/whole', argv[-1]])

    class Killed(BaseException):
        pass

    def finish(writer):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(encoding.ShardWriter, 'finish', finish)
        prepare.main(argv)
    prepare.main(argv)
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


@pytest.mark.parametrize('kind', ['rows', 'hub'])
def test_what_is_left_out_is_counted_up_to_the_last_token_whatever_the_batches(
        kind, tmp_path, monkeypatch, capsys):
    rows = [text for i, own in enumerate(TEXTS) for text in (own, TEXTS[i // 2], None, own)]
    table = pyarrow.table({'text': rows})
    pyarrow.parquet.write_table(table, tmp_path / 'train-0.parquet', row_group_size=100)
    (tmp_path / 'rows.jsonl').write_text(''.join(
        json.dumps({'text': text}) + '\n' for text in rows))
    argv = arguments(kind, tmp_path, tmp_path / 'd', '--dedup', '--max_tokens=100k')
    argv[1] = f'--input={tmp_path}' if kind == 'hub' else argv[1]
    found = []
    for size, threads in ((2**20, 2), (2**12, 4), (5, 1)):
        monkeypatch.setattr(encoding, 'BATCH_CHARS', size)
        shutil.rmtree(tmp_path / 'd', ignore_errors=True)
        prepare.main([*argv, f'--num_proc={threads}'])
        nulls, = re.findall(r'(\d+) rows left out', capsys.readouterr().out)
        found.append((open_dataset(tmp_path / 'd').meta['duplicates'], int(nulls)))
    documents = sum(entry['documents']
                    for entry in open_dataset(tmp_path / 'd').meta['splits'].values())
    # Each document has two copies and a null after it, but for the last, where reading ends.
    assert set(found) == {(2 * documents - 2, documents - 1)}


def test_files_that_are_not_needed_are_not_opened(inputs, tmp_path, monkeypatch):
    folder = tmp_path / 'hub'
    folder.mkdir()
    for i, path in enumerate(sorted((inputs / 'hub').iterdir())):
        (folder / path.name).write_bytes(path.read_bytes() if i < 8 else b'this is not Parquet')
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**10)
    argv = ['hf', f'--path={folder}', '--tokenizer=byte', '--val_fraction=0.1', '--num_proc=1']
    prepare.main([*argv, f'--data_dir={tmp_path}/d', '--max_tokens=100_000'])
    assert len(open_dataset(tmp_path / 'd').split('train')) == 100_000
    with pytest.raises(prepare.UserError, match='cannot be read'):
        prepare.main([*argv, f'--data_dir={tmp_path}/all'])


def test_a_split_of_its_own_for_validation_is_read_whole(inputs, tmp_path):
    folder = tmp_path / 'hub'
    folder.mkdir()
    for split, texts in (('train', TEXTS), ('validation', TEXTS[:90]), ('test', TEXTS[:80])):
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / f'{split}.parquet')
    argv = ['hf', f'--path={folder}', '--tokenizer=byte', '--val_split=validation',
            '--test_split=test', '--max_tokens=1e4', f'--data_dir={tmp_path}/d']
    prepare.main(argv)
    meta = open_dataset(tmp_path / 'd').meta
    assert {split: entry['documents'] for split, entry in meta['splits'].items()
            if split != 'train'} == {'val': 90, 'test': 80}
    assert meta['splits']['train']['tokens'] == 10_000


def test_fewer_tokens_than_asked_for_are_all_of_them_and_told(inputs, tmp_path, capsys):
    prepare.main(arguments('rows', inputs, tmp_path / 'd', '--max_tokens=1.5B'))
    found = open_dataset(tmp_path / 'd')
    tokens = found.split_entry('train')['tokens']
    assert f'has {tokens:,} tokens to train on, fewer than --max_tokens' in capsys.readouterr().out
    assert found.meta['inputs']['count'] == 1  # it was read to its end


@pytest.mark.parametrize(('text', 'number'), [
    ('100M', 10**8), ('1.5B', 1_500_000_000), ('1.1b', 1_100_000_000), ('100_000_000', 10**8),
    (10**8, 10**8), ('1e8', 10**8), ('3k', 3000), ('2G', 2 * 10**9), ('0', 0), ('1.5', None),
    ('M', None), ('-1', None), ('1T', None), ('10 M M', None)])
def test_numbers_are_read_as_people_write_them(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize(('more', 'words'), [
    (['--max_tokens=many'], 'max_tokens=many: expected a number, such as 100M'),
    (['--max_tokens=1M', '--part=1/2'], 'part and max_tokens cannot go together')])
def test_what_cannot_be_is_one_line(more, words, inputs, tmp_path, capsys, monkeypatch):
    argv = arguments('rows', inputs, tmp_path / 'd', *more)
    assert words in fails(capsys, monkeypatch, prepare.main, *argv)
    assert not (tmp_path / 'd').exists()


def test_tokens_that_are_downloaded_are_limited_by_their_files(tmp_path, capsys, monkeypatch):
    argv = ['fineweb10B-gpt2', f'--data_dir={tmp_path}/d', '--max_tokens=450M']
    assert '--max_shards=5 takes whole files' in fails(capsys, monkeypatch, prepare.main, *argv)


def test_another_number_in_the_same_folder_says_what_to_do(inputs, tmp_path, capsys, monkeypatch):
    folder = tmp_path / 'd'
    prepare.main(arguments('rows', inputs, folder, '--max_tokens=20k'))
    before = contents(folder)
    for more, told in ([['--max_tokens=30k'], '20000, not 30000'], [[], '20000, not none']):
        line = fails(capsys, monkeypatch, prepare.main,
                     *arguments('rows', inputs, folder, *more))
        assert f'max_tokens {told}' in line and '--overwrite' in line
        assert contents(folder) == before
    capsys.readouterr()
    prepare.main(arguments('rows', inputs, folder, '--max_tokens=20_000'))
    assert 'is already prepared by this command' in capsys.readouterr().out
