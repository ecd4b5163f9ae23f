"""prepare.py --part=K/N and prepare.py merge: what the parts make is what one command makes."""

import gzip
import json
import random
import shutil
from itertools import chain

import pyarrow
import pyarrow.parquet
import pytest
from helpers import SHARED, fails
from hypothesis import given
from hypothesis import strategies as st

import prepare
from plaingpt.corpus import documents
from plaingpt.corpus.hub import HubDataset
from plaingpt.corpus.text_files import Files, find_files
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError
from plaingpt.tokens.dataset import open_dataset
from plaingpt.training import starting_point
from plaingpt.training.settings import TrainConfig

chance = random.Random(0)
WORDS = ['to', 'be', 'or', 'nöt', 'that', 'is', '<|endoftext|>', 'the', 'question', '  \n']
TEXTS = [' '.join(chance.choices(WORDS, k=chance.randrange(1, 60))) for _ in range(400)]


def write_inputs(folder):
    """The same texts in each form that has documents → {form: options that read it}."""
    def jsonl(texts):
        return ''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in texts)

    for name in ('files', 'rows', 'hub', 'hub_parquet', 'parquet'):
        (folder / name).mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f'files/{i:03d}.txt').write_text(text * (1 + i % 7))
    for name in ('rows', 'hub'):
        for i in range(4):
            part = TEXTS[i * i * 20:(i + 1)**2 * 20 + 100 * (i == 3)]
            (folder / name / f'train-{i:05d}-of-00004.jsonl').write_text(jsonl(part))
    (folder / 'rows/train-00001-of-00004.jsonl.gz').write_bytes(gzip.compress(
        jsonl(TEXTS[50:70] + TEXTS[30:40]).encode()))
    (folder / 'rows/empty.jsonl').touch()
    (folder / 'rows/z_empty.jsonl').touch()
    (folder / 'lines.txt').write_text('\n'.join(TEXTS))
    for i in range(3):
        pyarrow.parquet.write_table(pyarrow.table({'text': [*TEXTS[i::3], None]}),
                                    folder / f'parquet/{i}.parquet', row_group_size=20 + i)
        for split in ('train', 'validation'):
            shutil.copy(folder / f'parquet/{i}.parquet',
                        folder / f'hub_parquet/{split}-{i:05d}-of-00003.parquet')
    return {'files': ['text', f'--input={folder}/files'],
            'rows': ['text', f'--input={folder}/rows'],
            'lines': ['text', f'--input={folder}/lines.txt', '--documents=line'],
            'parquet': ['text', f'--input={folder}/parquet'],
            'hub': ['hf', f'--path={folder}/hub'],
            'hub_parquet': ['hf', f'--path={folder}/hub_parquet', '--val_split=validation']}


OPTIONS = ['--tokenizer=byte', '--val_fraction=0.1', '--shard_tokens=9_000', '--num_proc=1']


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp('inputs'))


def prepare_parts(count, *argv, skip=()):
    for number in range(1, count + 1):
        if number not in skip:
            prepare.main([*argv, f'--part={number}/{count}'])


def state_of(folder):
    """→ (meta.json without the files of the splits, {split: all bytes of its files})"""
    meta = json.loads((folder / 'meta.json').read_text())
    files = {split: entry.pop('files') for split, entry in meta['splits'].items()}
    names = {'meta.json', *(file['name'] for entries in files.values() for file in entries)}
    assert {path.name for path in folder.iterdir()} == names
    return meta, {split: b''.join((folder / file['name']).read_bytes() for file in entries)
                  for split, entries in files.items()}


@pytest.mark.parametrize(('form', 'counts'), [
    ('files', (1, 2, 3, 7)), ('rows', (1, 2, 3, 7)), ('lines', (1, 2, 3, 7, 30)),
    ('parquet', (1, 2, 3, 7, 30)), ('hub', (1, 2, 3, 7)), ('hub_parquet', (2, 7))])
def test_any_number_of_parts_merged_equals_one_command(form, counts, inputs, tmp_path, capsys):
    prepare.main([*inputs[form], *OPTIONS, f'--data_dir={tmp_path}/whole'])
    whole = state_of(tmp_path / 'whole')
    for count in counts:
        folder = tmp_path / f'{count}'
        prepare_parts(count, *inputs[form], *OPTIONS, f'--data_dir={folder}')
        prepare.main(['merge', str(folder)])
        assert state_of(folder) == whole, count
        if count == 1:
            assert (folder / 'meta.json').read_bytes() \
                == (tmp_path / 'whole/meta.json').read_bytes()
        prepare.main(['inspect', str(folder)])  # raises where a count or checksum is wrong
        capsys.readouterr()
        for command in (inputs[form] + OPTIONS, [*inputs[form], *OPTIONS, f'--part=1/{count}']):
            prepare.main([*command, f'--data_dir={folder}'])
            assert 'is already prepared by this command' in capsys.readouterr().out


@pytest.mark.parametrize('tokenizer', ['gpt2', 'borrowed'])
def test_parts_with_a_tokenizer_that_is_fixed_equal_one_command(
        tokenizer, inputs, tmp_path, monkeypatch):
    if tokenizer == 'gpt2':
        if not (SHARED / 'tiktoken_cache').exists():
            pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED)")
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    else:
        tokenizer = f'{tmp_path}/lender'
        prepare.main([*inputs['lines'], '--tokenizer=bpe:300', f'--data_dir={tokenizer}'])
    argv = [*inputs['rows'], *OPTIONS[1:], f'--tokenizer={tokenizer}']
    prepare.main([*argv, f'--data_dir={tmp_path}/whole'])
    prepare_parts(3, *argv, f'--data_dir={tmp_path}/parts')
    prepare.main(['merge', f'{tmp_path}/parts'])
    assert state_of(tmp_path / 'parts') == state_of(tmp_path / 'whole')


LINES = st.lists(st.sampled_from(['', ' ', 'a', 'é', '\r', '日本', 'long ' * 9]), max_size=12)


@given(st.lists(LINES, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 40),
       st.sampled_from(['line', 'paragraph', 'file']))
def test_each_piece_is_in_one_part_wherever_the_cuts_fall(
        tmp_path_factory, contents, count, block, form):
    folder = tmp_path_factory.getbasetemp() / 'cuts'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for i, lines in enumerate(contents):
        (folder / f'{i}.txt').write_bytes('\n'.join(lines).encode())
    old, documents.BLOCK_BYTES = documents.BLOCK_BYTES, block
    try:
        source = Files(find_files(str(folder)), 'x', form)
        source.is_one_text = False  # else it has no parts
        parts = [source.part(number, count) for number in range(1, count + 1)]
        found = [[(piece.text, piece.new_document) for piece in part.pieces()] for part in parts]
        whole = [(piece.text, piece.new_document) for piece in source.pieces()]
    finally:
        documents.BLOCK_BYTES = old
    assert [*chain(*found)] == whole
    assert [*chain(*(part.inputs() for part in parts))] == source.inputs()
    assert sum(part.total for part in parts) == source.total


@pytest.mark.parametrize(('form', 'count'), [('hub', 2), ('hub_parquet', 2), ('hub_parquet', 5)])
def test_a_part_of_a_dataset_of_the_hub_goes_on_at_its_mark(form, count, inputs):
    path = inputs[form][1].partition('=')[2]

    def texts(mark=None):
        part = HubDataset(path, '', {'train': 'train'}).part(2, count)
        for piece in part.pieces(mark):
            yield piece.text, part.mark()

    whole = list(texts())
    assert len(whole) > 50
    for at in (0, 30, len(whole) - 2):
        assert [text for text, _ in texts(whole[at][1])] == [text for text, _ in whole[at + 1:]]


def test_a_part_reads_its_share_of_a_file_of_lines_and_not_the_rest(tmp_path, monkeypatch):
    (tmp_path / 'in.jsonl').write_text(''.join(
        json.dumps({'text': text}) + '\n' for text in TEXTS * 100))
    size, read = (tmp_path / 'in.jsonl').stat().st_size, [0]
    real = documents.read_bytes

    def counted(*arguments):
        for data, position in real(*arguments):
            read.append(len(data))
            yield data, position

    monkeypatch.setattr(documents, 'read_bytes', counted)
    source = Files([tmp_path / 'in.jsonl'], 'x')
    for number in (1, 2, 3, 4):
        read.clear()
        assert list(source.part(number, 4).pieces())
        assert 0.2 < sum(read) / size < 0.3


def test_a_mistake_in_a_part_of_a_file_is_named_where_it_is(tmp_path):
    rows = [json.dumps({'text': f'row {i}'}).encode() for i in range(100)]
    rows[80] = b'{"text": "\xff"}'
    (tmp_path / 'in.jsonl').write_bytes(b'\n'.join(rows))
    at = (tmp_path / 'in.jsonl').read_bytes().index(b'\xff')
    with pytest.raises(UserError, match=f'not UTF-8 at byte {at}:'):
        list(Files([tmp_path / 'in.jsonl'], 'x').part(2, 2).pieces())
    rows[80] = b'{"text": '
    (tmp_path / 'in.jsonl').write_bytes(b'\n'.join(rows))
    size = (tmp_path / 'in.jsonl').stat().st_size
    number = 80 - b'\n'.join(rows)[:size // 2 - 1].count(b'\n')
    with pytest.raises(UserError, match=f'from byte {size // 2} on, line {number}: not JSON'):
        list(Files([tmp_path / 'in.jsonl'], 'x').part(2, 2).pieces())


# -----------------------------------------------------------------------------
# what does not fit together


@pytest.fixture
def argv(inputs, tmp_path):
    return [*inputs['lines'], *OPTIONS, f'--data_dir={tmp_path}/d']


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function: give prepare.py these arguments → its one `error:` line."""
    return lambda *argv: fails(capsys, monkeypatch, prepare.main, *argv)


def leave_unfinished(folder):
    (folder / 'unfinished').mkdir()
    for path in folder.glob('*.*'):
        path.rename(folder / 'unfinished' / path.name)


def cut_short(folder):
    path = min(folder.glob('train*.bin'))
    path.write_bytes(path.read_bytes()[:-2])


def change_a_byte(folder):
    path = min(folder.glob('train*.bin'))
    path.write_bytes(b'!' + path.read_bytes()[1:])


@pytest.mark.parametrize(('harm', 'words'), [
    (shutil.rmtree, 'of 3 parts 2 is missing'),
    (leave_unfinished, 'of 3 parts 2 is not finished'),
    (lambda path: shutil.copytree(path, path.with_name('2-of-4')), 'parts of 3 and parts of 4'),
    (lambda path: (path / 'meta.json').write_text('{'), '2-of-3/meta.json is broken'),
    (change_a_byte, '2-of-3/train_000000.bin: another checksum than when it was written: the file '
                    'is damaged; give its command again, with --part=2/3'),
    (cut_short, '2-of-3/train_000000.bin: 17,998 bytes where 18,000 were written')])
def test_merge_refuses_parts_that_are_not_whole_and_merges_them_once_they_are(
        harm, words, argv, tmp_path, refused):
    prepare_parts(3, *argv)
    prepare.main([*argv[:-1], f'--data_dir={tmp_path}/whole'])
    part = tmp_path / 'd/parts/2-of-3'
    harm(part)
    before = sorted((tmp_path / 'd').rglob('*'))
    for _ in range(2):
        assert words in refused('merge', f'{tmp_path}/d')
    assert sorted((tmp_path / 'd').rglob('*')) == before
    shutil.rmtree(part.with_name('2-of-4'), ignore_errors=True)
    if 'broken' in words:
        shutil.rmtree(part)
    prepare_parts(3, *argv)
    prepare.main(['merge', f'{tmp_path}/d'])
    assert state_of(tmp_path / 'd') == state_of(tmp_path / 'whole')


@pytest.mark.parametrize(('other', 'words'), [
    ('--tokenizer=lender', 'tokenizer byte, not lender'),
    ('--val_fraction=0.2', 'val_fraction 0.1, not 0.2'),
    ('--shard_tokens=8_000', 'shard_tokens 9000, not 8000'),
    ('--input={path}.2', '(input {path}, not {path}.2):'),
    ('touched', 'the input was changed between them: {size} bytes, {path} last changed at 20')])
def test_parts_of_different_commands_and_inputs_are_refused_with_both_values(
        other, words, argv, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'in.txt').write_text('\n'.join(TEXTS))
    argv[1] = f'--input={tmp_path}/in.txt'
    prepare.main([*argv[:-1], '--tokenizer=bpe:300', '--data_dir=data/lender'])
    prepare_parts(2, *argv, skip=[1])
    path = tmp_path / 'in.txt'
    shutil.copy(path, f'{path}.2')
    words = words.format(size=f'{path.stat().st_size:,}', path=path)
    other = other.format(path=path)
    if other == 'touched':
        (tmp_path / 'in.txt').write_text('\n'.join(TEXTS[::-2]))
        other = argv[-1]
    message = refused(*argv, other, '--part=1/2')
    assert words in message and '2-of-2 is of another command or input' in message
    assert not (tmp_path / 'd/parts/1-of-2').exists()
    second = state_of(tmp_path / 'd/parts/2-of-2')
    prepare.main([*argv, other, '--part=1/2', '--overwrite'])
    message = refused('merge', f'{tmp_path}/d')
    assert words in message and '2-of-2 does not fit to 1-of-2' in message
    assert state_of(tmp_path / 'd/parts/2-of-2') == second
    assert 'merge' in refused(*argv)  # a whole beside the parts


def test_a_borrowed_tokenizer_that_was_prepared_anew_is_named_by_its_option(
        argv, inputs, tmp_path, refused):
    argv[3:4] = [f'--tokenizer={tmp_path}/lender']
    prepare.main([*inputs['lines'], '--tokenizer=bpe:300', f'--data_dir={tmp_path}/lender'])
    prepare.main([*argv, '--part=1/2'])
    prepare.main([*inputs['lines'], '--tokenizer=bpe:280', f'--data_dir={tmp_path}/lender',
                  '--overwrite'])
    prepare.main([*argv, '--part=2/2', '--overwrite'])
    assert '/lender was prepared anew between them: its checksum is ' \
        in refused('merge', f'{tmp_path}/d')


def test_a_part_of_another_number_of_parts_is_refused_before_it_is_written(
        argv, tmp_path, refused):
    prepare.main([*argv, '--part=2/3'])
    assert '2-of-3 is one of 3 parts, not of 5' in refused(*argv, '--part=1/5', '--overwrite')
    assert [path.name for path in (tmp_path / 'd/parts').iterdir()] == ['2-of-3']


@pytest.mark.parametrize('name', ['x.log', 'foo', '1-of-2/notes.txt'])
def test_merge_deletes_nothing_that_others_put_beside_the_parts(name, argv, tmp_path, refused):
    prepare_parts(2, *argv)
    other = tmp_path / 'd/parts' / name
    other.write_text('mine') if other.suffix else other.mkdir()
    before = sorted((tmp_path / 'd').rglob('*'))
    assert f'{name} was not written by prepare.py' in refused('merge', f'{tmp_path}/d')
    assert sorted((tmp_path / 'd').rglob('*')) == before
    other.rename(tmp_path / other.name)
    prepare.main(['merge', f'{tmp_path}/d'])


@pytest.mark.parametrize('state', ['finished', 'unfinished'])
def test_a_copy_of_another_part_is_not_taken_for_the_part(state, argv, tmp_path, monkeypatch):
    prepare.main([*argv[:-1], f'--data_dir={tmp_path}/whole'])
    first = tmp_path / 'd/parts/1-of-2'
    if state == 'unfinished':
        monkeypatch.setattr(prepare, 'publish', lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare.main([*argv, '--part=1/2'])
        monkeypatch.undo()
        assert (first / 'unfinished/meta.json').exists()
    else:
        prepare.main([*argv, '--part=1/2'])
    shutil.copytree(first, first.with_name('2-of-2'))
    prepare_parts(2, *argv)
    prepare.main(['merge', f'{tmp_path}/d'])
    assert state_of(tmp_path / 'd') == state_of(tmp_path / 'whole')


def test_overwrite_writes_a_finished_part_anew_also_after_the_merge(argv, tmp_path, capsys):
    prepare_parts(2, *argv)
    for _ in range(2):
        old = [(tmp_path / f'd/parts/{k}-of-2/meta.json') for k in (1, 2)]
        times = [path.stat().st_mtime_ns for path in old if path.exists()]
        capsys.readouterr()
        prepare_parts(2, *argv, '--overwrite')
        assert capsys.readouterr().out.count('tokens in ') == 2
        assert not {path.stat().st_mtime_ns for path in old} & {*times}
        prepare.main(['merge', f'{tmp_path}/d'])


def test_merge_waits_for_no_part_that_is_being_written(argv, tmp_path, refused):
    prepare_parts(2, *argv)
    with prepare.lock_dataset_dir(tmp_path / 'd', (2, 2)):
        assert refused('merge', f'{tmp_path}/d').endswith(
            'of 2 parts 2 is being written: wait for what is being written')
        assert refused(*argv, '--part=2/2').endswith(
            '2-of-2: another prepare.py is writing there: wait until it is done')
        prepare.main([*argv, '--part=1/2'])  # the others go on
    prepare.main(['merge', f'{tmp_path}/d'])


@pytest.mark.parametrize(('options', 'words'), [
    (['--part=0/3'], 'expected K/N'), (['--part=4/3'], 'expected K/N'), (['--part=3'], 'K/N'),
    (['--part='], 'expected K/N'), (['--part=1/1000000'], 'N up to 999999'),
    (['--part=1/3', '--if_small'], 'if_small'),
    (['--part=1/3', '--tokenizer=char'], 'the char tokenizer is learned'),
    (['--part=1/3', '--tokenizer=bpe:512'], '--tokenizer=bpe:512 --data_dir=data/sample'),
    (['--part=1/3', '--documents=auto'], 'one running text')])
def test_what_cannot_be_in_parts_is_refused_before_anything_is_written(
        options, words, argv, tmp_path, refused):
    assert words in refused(*argv, *options)
    assert not (tmp_path / 'd').exists()


def test_tokens_that_are_downloaded_have_no_parts(tmp_path, refused):
    assert 'tokens already' in refused('fineweb10B-gpt2', '--part=1/2', f'--data_dir={tmp_path}/d')


def test_another_dataset_is_replaced_by_parts_only_where_that_is_asked_for(
        argv, tmp_path, refused):
    prepare.main([*argv, '--val_fraction=0.3'])
    before = state_of(tmp_path / 'd')
    assert 'val_fraction 0.3, not 0.1' in refused(*argv, '--part=1/2')
    assert state_of(tmp_path / 'd') == before
    prepare_parts(2, *argv, '--overwrite')
    assert open_dataset(tmp_path / 'd').meta['source']['val_fraction'] == 0.3  # until the merge
    prepare.main(['merge', f'{tmp_path}/d'])
    assert state_of(tmp_path / 'd')[0]['source']['val_fraction'] == 0.1


def test_a_split_that_stays_empty_in_all_parts_is_refused_by_merge(tmp_path, refused):
    (tmp_path / 'in.txt').write_text('one\ntwo\n')
    prepare_parts(5, 'text', f'--input={tmp_path}/in.txt', '--documents=line', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d')
    assert 'the val split would be empty' in refused('merge', f'{tmp_path}/d')


@pytest.mark.parametrize('place', ['', 'data/'])
def test_merge_and_inspect_mean_the_same_folder_by_a_name(place, argv, tmp_path, monkeypatch,
                                                          capsys, refused):
    prepare_parts(2, *argv)
    monkeypatch.chdir(tmp_path)
    if place:
        (tmp_path / 'data').mkdir()
        (tmp_path / 'd').rename('data/d')
    assert f'{place}d holds parts' in refused('inspect', 'd')
    for words in (f'{place}d/meta.json', f'{place}d holds no parts that are not merged'):
        capsys.readouterr()
        prepare.main(['merge', 'd'])
        assert words in capsys.readouterr().out
    prepare.main(['inspect', 'd'])
    assert f'{place}d: byte tokenizer' in capsys.readouterr().out


def test_training_on_parts_says_how_to_merge_them(argv, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    argv[-1] = '--data_dir=data/pystdlib'  # which train.py would prepare where it is missing
    prepare_parts(2, *argv, skip=[2])
    config = TrainConfig(dataset='pystdlib')
    with pytest.raises(UserError, match=r'python prepare\.py merge data/pystdlib'):
        starting_point.open_data(config, World())
    prepare_parts(2, *argv)
    prepare.main(['merge', 'pystdlib'])
    assert starting_point.open_data(config, World()).vocab_size == 257
    prepare.main(['merge', 'pystdlib'])
    assert 'holds no parts' in refused('merge', 'data/nothing')
