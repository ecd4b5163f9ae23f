"""prepare.py killed at any moment, and started again."""

import itertools
import json
import random
import shutil
import signal

import pytest
from corpus_files import write_parquet
from helpers import fails
from interrupted import contents, exit_code, stop_early

import prepare
from plaingpt.data import encoding
from plaingpt.data.dataset import open_dataset
from plaingpt.data.inspection import find_damage

KINDS = ['text', 'parquet', 'hf', 'running', 'chat', 'tables', 'notes']
OPTIONS = {'tables': ['--encoding=latin-1'], 'notes': ['--tokenizer=auto', '--shard_tokens=3_000']}
DOCUMENTS = 200


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    """The same documents as JSON lines, Parquet, one text, conversations, a folder of tables with
    them, and a folder of texts."""
    folder = tmp_path_factory.mktemp('inputs')
    chance = random.Random(0)
    words = ['to', 'be', 'or', 'not', 'that', 'is', 'the', 'question', 'whether', 'nobler']
    texts = [' '.join(chance.choices(words, k=chance.randrange(400))) for _ in range(DOCUMENTS)]
    rows = [json.dumps({'id': i, 'text': text}) for i, text in enumerate(texts)]
    for part in range(4):
        (folder / f'train-{part:05d}-of-00004.jsonl').write_text(
            '\n'.join(rows[part * DOCUMENTS // 4:(part + 1) * DOCUMENTS // 4]))
    write_parquet(folder.parent / 'in.parquet', texts)
    running = folder.parent / 'running.txt'
    running.write_text('\n'.join(rows))
    chats = folder.parent / 'chats.jsonl'
    chats.write_text(''.join(json.dumps({'prompt': row, 'completion': row}) + '\n'
                             for row in rows[:DOCUMENTS // 2]))
    tables, notes = folder.parent / 'tables', folder.parent / 'notes'
    tables.mkdir()
    for n, name in enumerate(('a.csv', 'b.csv')):
        (tables / name).write_text('Question,Answer\n' + ''.join(
            f'é{text},{text} à\n' for text in texts[n::2] if text), encoding='latin-1')
    notes.mkdir()
    for n, text in enumerate(texts):
        (notes / f'{n}.md').write_text(f'{text} {n}')
    return {'text': folder, 'parquet': folder.parent / 'in.parquet', 'hf': folder,
            'running': running, 'chat': chats, 'tables': tables, 'notes': notes}


def command(kind, inputs, folder, *options, tokenizer='byte'):
    corpus = {'hf': 'hf', 'chat': 'chat', 'tables': 'chat'}.get(kind, 'text')
    return [corpus, f'--input={inputs[kind]}', f'--tokenizer={tokenizer}', '--shard_tokens=12_500',
            '--val_fraction=0.1', f'--data_dir={folder}', *OPTIONS.get(kind, ()), *options]


@pytest.mark.parametrize('kind', KINDS)
def test_killed_and_restarted_it_writes_what_it_would_have_written(kind, inputs, tmp_path):
    prepare.main(command(kind, inputs, tmp_path / 'whole'))
    argv = command(kind, inputs, tmp_path / 'killed', '--num_proc=2')
    for calls in (20, 15):
        assert exit_code(*argv, calls=calls) == -signal.SIGKILL
    prepare.main(argv)
    assert contents(tmp_path / 'killed') == contents(tmp_path / 'whole')
    assert len(contents(tmp_path / 'killed')) > 8


@pytest.mark.parametrize(('shard_tokens', 'step'), [
    (10**6, 1), (80_000, 4), pytest.param(80_000, 1, marks=pytest.mark.slow)])
def test_killed_between_any_two_changes_of_the_disk_it_writes_the_same(
        shard_tokens, step, inputs, tmp_path):
    """And what was in the folder before is whole or gone, at each of these moments."""
    options = [f'--shard_tokens={shard_tokens}', '--num_proc=1', '--overwrite']
    prepare.main(command('text', inputs, tmp_path / 'whole', *options))
    prepare.main(command('text', inputs, tmp_path / 'old', *options, '--val_fraction=0.2'))
    for calls in itertools.count(1, step):
        folder = tmp_path / f'killed-{calls}'
        shutil.copytree(tmp_path / 'old', folder)
        argv = command('text', inputs, folder, *options)
        if exit_code(*argv, calls=calls) == 0:
            break
        assert not (folder / 'meta.json').exists() or not find_damage(open_dataset(folder)), calls
        prepare.main(argv)
        assert contents(folder) == contents(tmp_path / 'whole'), calls
    assert calls > 5


def test_threads_and_batches_do_not_change_the_files(inputs, tmp_path, monkeypatch):
    for num_proc, batch in ((2, 2**20), (1, 2**12), (4, 2**12)):
        monkeypatch.setattr(encoding, 'BATCH_CHARS', batch)
        prepare.main(command('text', inputs, tmp_path / f'{num_proc}', f'--num_proc={num_proc}',
                             tokenizer='bpe:300'))
        assert contents(tmp_path / f'{num_proc}') == contents(tmp_path / '2')


def test_what_is_done_is_not_done_again(inputs, tmp_path, monkeypatch, capsys):
    argv = command('hf', inputs, tmp_path / 'd', tokenizer='bpe:300')
    stop_early(monkeypatch, argv)
    with pytest.raises(prepare.UserError, match='not finished'):  # nothing is trained on it
        open_dataset(tmp_path / 'd')
    journal = json.loads((tmp_path / 'd/unfinished/journal.json').read_text())
    done = sum(split['tokens'] for split in journal['splits'].values())
    encoded, real = [], encoding.encode_batch
    monkeypatch.setattr(encoding, 'encode_batch',
                        lambda *a: encoded.append(real(*a)) or encoded[-1])
    capsys.readouterr()
    prepare.main(argv)
    said = capsys.readouterr().out
    assert f'resuming after {done:,} tokens' in said and 'training the' not in said
    again = sum(len(part.ids) for parts in encoded for part in parts.values())
    splits = open_dataset(tmp_path / 'd').meta['splits']
    assert done > 12_500
    assert done + again == sum(split['tokens'] for split in splits.values())
    prepare.main(argv)
    assert 'already prepared' in capsys.readouterr().out


def test_what_another_command_or_another_input_left_is_not_mixed_in(
        inputs, tmp_path, monkeypatch, capsys):
    path = shutil.copytree(inputs['text'], tmp_path / 'in') / 'train-00000-of-00004.jsonl'
    argv = command('text', {'text': tmp_path / 'in'}, tmp_path / 'd')
    for more, change, key in ((['--val_fraction=0.2'], '', 'val_fraction'),
                              ([], '\n{"text": "new"}', 'identity')):
        stop_early(monkeypatch, argv)
        path.write_text(path.read_text() + change)
        prepare.main([*argv, *more, '--overwrite'])
        assert f'it differs in {key}' in capsys.readouterr().out
        prepare.main([*argv, *more, f'--data_dir={tmp_path}/clean', '--overwrite'])
        assert contents(tmp_path / 'd') == contents(tmp_path / 'clean')
        shutil.rmtree(tmp_path / 'd')


def test_a_dataset_that_was_being_moved_is_whole_again_before_another_command(
        inputs, tmp_path, capsys, monkeypatch):
    argv = command('text', inputs, tmp_path / 'd')
    prepare.main(argv)
    before = contents(tmp_path / 'd')
    (tmp_path / 'd/unfinished').mkdir()
    for path in (tmp_path / 'd/meta.json', *(tmp_path / 'd').glob('val*.bin')):
        path.rename(tmp_path / 'd/unfinished' / path.name)  # as a kill can leave it
    assert 'holds another dataset' in fails(
        capsys, monkeypatch, prepare.main, *argv, '--dedup')
    assert contents(tmp_path / 'd') == before


def test_a_dataset_within_its_input_is_no_input_and_goes_on_after_a_kill(
        inputs, tmp_path, capsys):
    shutil.copytree(inputs['text'], tmp_path / 'in')
    source = {'text': f'{tmp_path}/in,{tmp_path}/in/**'}
    prepare.main(command('text', source, tmp_path / 'out'))
    for folder in (tmp_path / 'in/out', tmp_path / 'in'):
        within = command('text', source, folder)
        assert exit_code(*within, calls=8) == -signal.SIGKILL
        capsys.readouterr()
        prepare.main(within)
        printed = capsys.readouterr().out
        assert 'resuming after' in printed and 'left out: ' in printed
        for name, data in contents(tmp_path / 'out').items():
            assert name == 'meta.json' or (folder / name).read_bytes() == data, name
        prepare.main(within)
        assert 'is already prepared by this command' in capsys.readouterr().out


def test_the_old_dataset_stays_until_the_new_one_is_whole(inputs, tmp_path, monkeypatch):
    argv = command('text', inputs, tmp_path / 'd')
    prepare.main(argv)
    before = contents(tmp_path / 'd')
    other = [*argv, '--shard_tokens=10_000']
    stop_early(monkeypatch, other)
    assert {name: (tmp_path / 'd' / name).read_bytes() for name in before} == before
    prepare.main(other)
    names = {file['name'] for about in open_dataset(tmp_path / 'd').meta['splits'].values()
             for file in about['files']}
    assert set(contents(tmp_path / 'd')) == names | {'meta.json'}


@pytest.mark.parametrize('journal', ['', '[1]', '{"a": 1}', '{"command": 3}', '{"comm'])
def test_a_damaged_journal_means_starting_anew(journal, inputs, tmp_path):
    (tmp_path / 'd/unfinished').mkdir(parents=True)
    for name in ('journal.json', 'meta.json'):
        (tmp_path / 'd/unfinished' / name).write_text(journal)
    prepare.main(command('text', inputs, tmp_path / 'd'))
    assert len(open_dataset(tmp_path / 'd').split('train')) > 100_000


def test_two_at_once_in_one_folder_are_refused(inputs, tmp_path, capsys, monkeypatch):
    argv = command('text', inputs, tmp_path / 'd')
    with prepare.lock_dataset_dir(tmp_path / 'd'):
        assert 'another prepare.py' in fails(capsys, monkeypatch, prepare.main, *argv)
    prepare.main(argv)
