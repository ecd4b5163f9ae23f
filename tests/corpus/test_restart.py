"""prepare.py killed with SIGKILL at any moment, and started again."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import SHARED, fails

import prepare
from plaingpt.corpus import encoding
from plaingpt.tokens.dataset import open_dataset

# Each start is a fresh process, copied from one that has imported everything already.
server = multiprocessing.get_context('forkserver')
server.set_forkserver_preload(['prepare', 'datasets'])

DOCUMENTS = 1000


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """The same documents as JSON lines, in a folder laid out like the hub's, as one text, and as
    conversations."""
    folder = tmp_path_factory.mktemp('inputs')
    chance = random.Random(0)
    words = ['to', 'be', 'or', 'not', 'that', 'is', 'the', 'question', 'whether', 'nobler']
    rows = [json.dumps({'id': i, 'text': ' '.join(chance.choices(words, k=chance.randrange(400)))})
            for i in range(DOCUMENTS)]
    for part in range(4):
        (folder / f'train-{part:05d}-of-00004.jsonl').write_text(
            '\n'.join(rows[part * DOCUMENTS // 4:(part + 1) * DOCUMENTS // 4]))
    first = server.Process(target=int)  # the server imports, once, outside of the tests' time
    first.start()
    first.join()
    running = folder.parent / 'running.txt'
    running.write_text('\n'.join(rows))
    chats = folder.parent / 'chats.jsonl'
    chats.write_text(''.join(json.dumps({'prompt': row, 'completion': row}) + '\n'
                             for row in rows[:DOCUMENTS // 2]))
    return {'text': folder, 'hf': folder, 'running': running, 'chat': chats}


def command(kind, inputs, folder, num_proc):
    return ['text' if kind == 'running' else kind, f'--input={inputs[kind]}', '--tokenizer=bpe:300',
            '--shard_tokens=12_500', '--val_fraction=0.1', f'--num_proc={num_proc}',
            f'--data_dir={folder}']


def start(*argv, calls=0):
    process = server.Process(target=quiet, args=(calls, *argv))
    process.start()
    return process


def quiet(calls, *argv):
    """Run prepare.py, which kills itself instead of the `calls`-th change of the disk, if not 0."""
    left = [calls]
    for name in ('replace', 'fsync', 'truncate', 'unlink'):
        setattr(os, name, dying(getattr(os, name), left))
    os.environ['TIKTOKEN_CACHE_DIR'] = str(SHARED / 'tiktoken_cache')
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    encoding.BATCH_CHARS = 2**13  # so that few documents are many batches
    prepare.main(list(argv))


def dying(function, left):
    def call(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_killed(argv, folder, moments):
    """Kill `argv` after each of `moments` seconds, then let it end → kills that met it running."""
    met = 0
    for moment in moments:
        process = start(*argv)
        time.sleep(moment)
        met += process.is_alive() and not (folder / 'meta.json').exists()
        process.kill()
        process.join()
    last = start(*argv)
    last.join()
    assert last.exitcode == 0
    return met


def uninterrupted(kind, inputs, tmp_path):
    argv = command(kind, inputs, tmp_path / kind, 2)
    begun = time.monotonic()
    process = start(*argv)
    process.join()
    assert process.exitcode == 0
    return contents(tmp_path / kind), time.monotonic() - begun


@pytest.mark.parametrize('kind', ['text', 'hf', 'running', 'chat'])
def test_killed_and_restarted_it_writes_what_it_would_have_written(kind, inputs, tmp_path):
    expected, _ = uninterrupted(kind, inputs, tmp_path)
    assert len(expected) > 8
    argv = command(kind, inputs, tmp_path / 'killed', 2)
    for calls in (20, 15, 0):
        process = start(*argv, calls=calls)
        process.join()
        assert process.exitcode == (-signal.SIGKILL if calls else 0)
    assert contents(tmp_path / 'killed') == expected


@pytest.mark.slow
@pytest.mark.parametrize('num_proc', [1, 2, 4])
@pytest.mark.parametrize('kind', ['text', 'hf', 'running', 'chat'])
def test_killed_at_thirty_random_moments_it_writes_the_same(kind, num_proc, inputs, tmp_path):
    expected, seconds = uninterrupted(kind, inputs, tmp_path)
    chance, met, kills = random.Random(num_proc), 0, 0
    while met < 30:
        folder = tmp_path / f'killed-{kills}'
        moments = [chance.uniform(0, seconds) for _ in range(3)]
        met += run_killed(command(kind, inputs, folder, num_proc), folder, moments)
        kills += 1
        assert contents(folder) == expected


@pytest.mark.parametrize('many_shards', [True, False])
def test_killed_between_any_two_changes_of_the_disk_it_writes_the_same(
        many_shards, inputs, tmp_path):
    shards = f'--shard_tokens={150_000 if many_shards else 10**6}'
    folder = tmp_path / 'whole'
    start(*command('text', inputs, folder, 2), shards).join()
    expected = contents(folder)
    assert ('train.bin' in expected) != many_shards
    for calls in itertools.count(1):
        folder = tmp_path / f'killed-{calls}'
        process = start(*command('text', inputs, folder, 2), shards, calls=calls)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        start(*command('text', inputs, folder, 2), shards).join()
        assert contents(folder) == expected, calls
    assert calls > (10 if many_shards else 5)


def tokens(folder):
    """The bytes of each split, and the counts in meta.json."""
    meta = json.loads((folder / 'meta.json').read_text())
    data = {split: b''.join((folder / file['name']).read_bytes() for file in entry.pop('files'))
            for split, entry in meta['splits'].items()}
    return data, meta


@pytest.mark.parametrize(('kind', 'kills'), [('text', [(3, 9), (3, 2), (1, 20), (2, 14)]),
                                             ('hf', [(2, 14)])])
def test_parts_that_are_killed_and_started_again_make_the_same_whole(
        kind, kills, inputs, tmp_path, capsys):
    argv = [*command(kind, inputs, tmp_path / 'd', 2), '--tokenizer=byte', '--shard_tokens=50_000']
    prepare.main([*argv, f'--data_dir={tmp_path}/whole'])
    for part, calls in kills:
        process = start(*argv, f'--part={part}/3', calls=calls)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for part in (2, 1, 3):
        capsys.readouterr()
        prepare.main([*argv, f'--part={part}/3'])
        assert 'resuming after' in capsys.readouterr().out or (part, 14) not in kills
    prepare.main(['merge', str(tmp_path / 'd')])
    assert tokens(tmp_path / 'd') == tokens(tmp_path / 'whole')


def test_parts_that_are_written_at_the_same_time_make_the_same_whole(inputs, tmp_path):
    argv = [*command('text', inputs, tmp_path / 'd', 1), '--tokenizer=byte']
    prepare.main([*argv, f'--data_dir={tmp_path}/whole'])
    processes = [start(*argv, f'--part={part}/4') for part in (1, 2, 3, 4)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    prepare.main(['merge', str(tmp_path / 'd')])
    assert tokens(tmp_path / 'd') == tokens(tmp_path / 'whole')


def test_a_merge_killed_between_any_two_changes_of_the_disk_and_given_again_is_whole(
        inputs, tmp_path):
    argv = [*command('text', inputs, tmp_path / 'd', 2), '--tokenizer=byte',
            '--shard_tokens=500_000']
    prepare.main([*argv, f'--data_dir={tmp_path}/whole'])
    expected = tokens(tmp_path / 'whole')
    for part in (1, 2):
        prepare.main([*argv, f'--part={part}/2'])
    for calls in itertools.count(1):
        folder = tmp_path / f'killed-{calls}'
        shutil.copytree(tmp_path / 'd', folder)
        process = start('merge', str(folder), calls=calls)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        prepare.main(['merge', str(folder)])
        assert tokens(folder) == expected, calls
        assert not [path for path in folder.iterdir() if path.is_dir()]
    assert calls > 12


@pytest.mark.parametrize('num_proc', [1, 3, 4])
def test_the_number_of_threads_does_not_change_the_files(num_proc, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**12)
    prepare.main(command('text', inputs, tmp_path / 'a', 2))
    prepare.main(command('text', inputs, tmp_path / 'b', num_proc))
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b')


def stop_early(monkeypatch, argv):
    """Run `argv` until its second journal, as if killed there."""
    class Killed(BaseException):
        pass

    real, written = encoding.write_journal, []

    def write_journal(path, value):
        real(path, value)
        written.append(path)
        if len(written) == 2:
            raise Killed

    monkeypatch.setattr(encoding, 'write_journal', write_journal)
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**13)
    with pytest.raises(Killed):
        prepare.main(argv)
    monkeypatch.setattr(encoding, 'write_journal', real)


def test_what_is_done_is_not_done_again(inputs, tmp_path, monkeypatch, capsys):
    argv = command('hf', inputs, tmp_path / 'd', 1)
    stop_early(monkeypatch, argv)
    journal = json.loads((tmp_path / 'd/unfinished/journal.json').read_text())
    done = sum(split['tokens'] for split in journal['splits'].values())
    encoded = []
    real = encoding.encode_batch
    monkeypatch.setattr(encoding, 'encode_batch',
                        lambda *a: encoded.append(real(*a)) or encoded[-1])
    capsys.readouterr()
    prepare.main(argv)
    assert f'resuming after {done:,} tokens' in capsys.readouterr().out and done > 12_500
    again = sum(len(part.ids) for parts in encoded for part in parts.values())
    splits = open_dataset(tmp_path / 'd').meta['splits']
    assert done + again == sum(split['tokens'] for split in splits.values())
    prepare.main(argv)
    assert 'already prepared' in capsys.readouterr().out


def test_what_another_command_left_is_not_mixed_in(inputs, tmp_path, monkeypatch, capsys):
    argv = command('text', inputs, tmp_path / 'd', 1)
    stop_early(monkeypatch, argv)
    other = [arg.replace('val_fraction=0.1', 'val_fraction=0.2') for arg in argv]
    capsys.readouterr()
    prepare.main(other)
    assert 'differs in val_fraction' in capsys.readouterr().out
    clean = [arg.replace(f'{tmp_path}/d', f'{tmp_path}/clean') for arg in other]
    prepare.main(clean)
    assert contents(tmp_path / 'd') == contents(tmp_path / 'clean')


def test_input_that_changed_meanwhile_is_read_anew(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'in.txt'
    path.write_text('one two three four five ' * 20_000)
    argv = ['text', f'--input={path}', '--tokenizer=byte', f'--data_dir={tmp_path}/d',
            '--shard_tokens=50_000']
    stop_early(monkeypatch, argv)
    path.write_text('six seven eight ' * 20_000)
    prepare.main(argv)
    assert 'it differs in identity' in capsys.readouterr().out
    assert open_dataset(tmp_path / 'd').meta['splits']['train']['tokens'] == 288_000


def test_a_text_that_changed_behind_its_size_and_time_is_not_mixed_with_the_old(
        tmp_path, monkeypatch, capsys):
    path, data_dir = tmp_path / 'in.txt', tmp_path / 'd'
    argv = ['text', f'--input={path}', '--tokenizer=byte', '--shard_tokens=50_000',
            '--documents=line']
    lines = [f'line {i:09d}\n' for i in range(30_000)]
    path.write_text(''.join(lines))
    stop_early(monkeypatch, [*argv, f'--data_dir={data_dir}'])
    times = path.stat()
    for text in (''.join(reversed(lines)), '\n' * 449_999 + 'a'):  # the second has one line
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.copytree(data_dir, tmp_path / 'copy')
        assert fails(capsys, monkeypatch, prepare.main, *argv, f'--data_dir={tmp_path}/copy') \
            .endswith('give the same command again, which starts anew')
        assert not (tmp_path / 'copy').exists()
    path.write_text(''.join(lines))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    prepare.main([*argv, f'--data_dir={data_dir}'])
    assert 'resuming after' in capsys.readouterr().out


def test_a_dataset_within_its_input_is_no_input_and_goes_on_after_a_kill(
        inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs['text'], 'in')
    argv = [*command('text', inputs, 'out', 2), '--input=in,in/**', '--tokenizer=byte',
            '--test_fraction=0.1']
    prepare.main(argv)
    for folder, part in (('in/out', []), ('in', []), ('in/parts', ['--part=2/2'])):
        within = [*argv, f'--data_dir={folder}', *part]
        process = start(*within, calls=8)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        capsys.readouterr()
        prepare.main(within)
        assert 'resuming after' in (printed := capsys.readouterr().out), printed
        assert 'of a prepared dataset: ' in printed
    prepare.main([*within, '--part=1/2'])
    prepare.main(['merge', 'in/parts'])
    for folder in ('in/out', 'in/parts'):
        assert tokens(Path(folder)) == tokens(Path('out'))
    capsys.readouterr()
    prepare.main([*argv, '--data_dir=in/out'])
    assert 'is already prepared by this command' in capsys.readouterr().out


def test_the_old_dataset_stays_until_the_new_one_is_whole(inputs, tmp_path, monkeypatch):
    argv = command('text', inputs, tmp_path / 'd', 1)
    prepare.main(argv)
    before = contents(tmp_path / 'd')
    other = [*argv, '--shard_tokens=5_000']
    stop_early(monkeypatch, other)
    assert {name: (tmp_path / 'd' / name).read_bytes() for name in before} == before
    prepare.main(other)
    names = {file['name'] for about in open_dataset(tmp_path / 'd').meta['splits'].values()
             for file in about['files']}
    assert set(contents(tmp_path / 'd')) == names | {'meta.json'}


def test_a_folder_that_was_left_half_way_is_not_trained_on(inputs, tmp_path, monkeypatch):
    stop_early(monkeypatch, command('text', inputs, tmp_path / 'd', 1))
    with pytest.raises(prepare.UserError, match='not finished'):
        open_dataset(tmp_path / 'd')


def test_two_at_once_in_one_folder_are_refused(inputs, tmp_path, capsys, monkeypatch):
    argv = command('text', inputs, tmp_path / 'd', 1)
    with prepare.lock_dataset_dir(tmp_path / 'd'):
        assert 'another prepare.py' in fails(capsys, monkeypatch, prepare.main, *argv)
    prepare.main(argv)
