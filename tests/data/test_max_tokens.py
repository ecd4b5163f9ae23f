"""prepare.py --max_tokens: so many tokens to train on, of any corpus, and no more is read."""

import pytest
from corpus_files import prepared, split_bytes, write_parquet, write_rows
from interrupted import contents, exit_code

import prepare
from plaingpt.data import encoding
from plaingpt.data.dataset import open_dataset
from plaingpt.system.formatting import parse_count

TEXTS = [f'document {i} ' + 'of many words ' * (i % 20) for i in range(600)]

KILL_AT_END = 'encoding.ShardWriter.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)'


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """The same documents as a folder of many Parquet files and as JSON lines."""
    folder = tmp_path_factory.mktemp('inputs')
    for i in range(6):
        write_parquet(folder / f'hub/train-{i:05d}-of-00006.parquet', TEXTS[100 * i:100 * (i + 1)])
    write_rows(folder / 'rows.jsonl', TEXTS)
    return folder


def command(kind, inputs, *more):
    name, where = {'hub': ('hf', 'hub'), 'rows': ('text', 'rows.jsonl')}[kind]
    return [name, f'--input={inputs / where}', '--val_fraction=0.1', '--shard_tokens=4_000', *more]


@pytest.mark.parametrize(('kind', 'limit'), [
    ('hub', 9_876), ('rows', 27_000)])
def test_the_training_tokens_are_the_first_ones_and_exactly_so_many(kind, limit, inputs, tmp_path):
    prepared(tmp_path / 'all', *command(kind, inputs))
    prepared(tmp_path / 'd', *command(kind, inputs, f'--max_tokens={limit}'))
    train, val = (split_bytes(tmp_path / 'd', split) for split in ('train', 'val'))
    all_train, all_val = (split_bytes(tmp_path / 'all', split) for split in ('train', 'val'))
    assert train == all_train[:limit] and len(train) == limit
    last = train.split(b'\0')[-1].decode()
    index = next(i for i, text in enumerate(TEXTS) if text.startswith(last[:13]))
    read = [text.encode() for text in TEXTS[:index]]
    assert [text for text in all_val.split(b'\0')[1:] if text in read] == val.split(b'\0')[1:]
    entry = open_dataset(tmp_path / 'd').split_entry('train')
    assert entry['documents'] == max(1, train.count(0))
    assert entry['bytes'] == len(train) - train.count(0)
    prepare.main(['inspect', str(tmp_path / 'd')])


def test_the_limit_may_be_at_the_end_of_a_document_and_around_it(tmp_path, monkeypatch):
    write_rows(tmp_path / 'rows.jsonl', TEXTS[:120])
    prepared(tmp_path / 'all', *command('rows', tmp_path))
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 1)  # a batch is a document
    whole = split_bytes(tmp_path / 'all', 'train')
    end = whole.index(b'\0', 9_000)
    for limit in range(end - 2, end + 3):
        prepared(tmp_path / 'd', *command('rows', tmp_path, f'--max_tokens={limit}', '--overwrite'))
        assert split_bytes(tmp_path / 'd', 'train') == whole[:limit], limit


@pytest.mark.parametrize(('kind', 'threads'), [
    ('rows', 1), ('hub', 3)])
def test_threads_batches_and_kills_do_not_change_where_it_ends(kind, threads, inputs, tmp_path):
    argv = command(kind, inputs, '--max_tokens=40_001')
    prepared(tmp_path / 'd', *argv, '--num_proc=2')
    argv += ['--tokenizer=byte', f'--data_dir={tmp_path}/killed', f'--num_proc={threads}']
    # in smaller batches
    assert [exit_code(*argv, calls=change) for change in (20, 12, 0)] == [-9, -9, 0]
    assert contents(tmp_path / 'killed') == contents(tmp_path / 'd')


def test_a_kill_after_the_last_token_costs_none_and_adds_none(inputs, tmp_path):
    argv = [*command('rows', inputs, '--max_tokens=20_000'), '--tokenizer=byte']  # 5 full shards
    prepare.main([*argv, f'--data_dir={tmp_path}/whole'])
    argv.append(f'--data_dir={tmp_path}/d')
    assert exit_code(*argv, before=KILL_AT_END) == -9 and exit_code(*argv) == 0
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


def test_files_that_are_not_needed_are_not_opened(inputs, tmp_path, monkeypatch):
    for i, (name, data) in enumerate(sorted(contents(inputs / 'hub').items())):
        (tmp_path / 'hub').mkdir(exist_ok=True)
        (tmp_path / 'hub' / name).write_bytes(data if i < 4 else b'this is not Parquet')
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**10)
    argv = command('hub', tmp_path, '--num_proc=1')
    prepared(tmp_path / 'd', *argv, '--max_tokens=30_000')
    assert len(open_dataset(tmp_path / 'd').split('train')) == 30_000
    with pytest.raises(prepare.UserError, match='cannot be read'):
        prepared(tmp_path / 'all', *argv)


def test_a_split_of_its_own_for_validation_is_read_whole(tmp_path):
    for split, count in (('train', 600), ('validation', 90), ('test', 80)):
        write_parquet(tmp_path / f'hub/{split}.parquet', TEXTS[:count])
    _, val, test = prepared(tmp_path / 'd', *command(
        'hub', tmp_path, '--val_split=validation', '--test_split=test', '--max_tokens=1e4'))
    assert (val, test) == (TEXTS[:90], TEXTS[:80])
    assert open_dataset(tmp_path / 'd').split_entry('train')['tokens'] == 10_000


def test_fewer_tokens_than_asked_for_are_all_of_them_and_told(inputs, tmp_path, capsys):
    prepared(tmp_path / 'd', *command('rows', inputs, '--max_tokens=1.5B'))
    found = open_dataset(tmp_path / 'd')
    tokens = found.split_entry('train')['tokens']
    assert f'has {tokens:,} tokens to train on, fewer than --max_tokens' in capsys.readouterr().out
    assert found.meta['inputs']['count'] == 1  # it was read to its end


def test_numbers_are_read_as_people_write_them():
    for text, number in (
            ('100M', 10**8), ('1.5B', 1_500_000_000), ('1.1b', 1_100_000_000), ('1e8', 10**8),
            ('100_000_000', 10**8), (10**8, 10**8), ('3k', 3000), ('2G', 2 * 10**9), ('0', 0),
            ('1.5', None), ('M', None), ('-1', None), ('1T', None)):
        assert parse_count(text) == number, text


def test_what_cannot_be_is_one_line(inputs, refused):
    assert 'max_tokens=many: expected a number' in refused(
        *command('rows', inputs, '--max_tokens=many'))
    (inputs / 'running.txt').write_text('\n'.join(TEXTS))
    assert 'running.txt is one running text' in refused(
        'text', f'--input={inputs}/running.txt', '--max_tokens=100')
    assert 'tokens already, of which --max_shards takes some' in refused(
        'fineweb10B-gpt2', '--tokenizer=auto', '--max_tokens=450M')
