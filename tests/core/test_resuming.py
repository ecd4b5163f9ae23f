"""What a run that resumes takes over, what it keeps beside, and what it refuses."""

import itertools
import json
import shutil

import pytest
import torch
from processes import die_before_change, exit_code, fails, fork, launch
from runs import lines, same, weights

import prepare
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.monitoring.run_folder import archive_previous_run
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import lock_output_dir


@pytest.fixture
def out(trained, tmp_path):
    """The out_dir of a run that ended at iteration 6, with a checkpoint of iteration 3 too."""
    return shutil.copytree(trained, tmp_path / 'out')


def contents(folder):
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in folder.rglob('*') if path.is_file()}


def flip_a_bit(checkpoint):
    path = checkpoint / 'model-00001-of-00001.safetensors'
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def let_a_newer_version_write_it(checkpoint):
    state = checkpoints.open_checkpoint(checkpoint).state
    checkpoints.write_state(checkpoint, {**state, 'format_version': 99})


@pytest.mark.parametrize('spoil', [flip_a_bit, let_a_newer_version_write_it])
@pytest.mark.parametrize('init_from', ['auto', 'resume'])
def test_nothing_is_started_where_no_checkpoint_can_be_used(tiny, out, spoil, init_from, tmp_path):
    shutil.rmtree(out / 'checkpoints/iter-00000003')
    spoil(out / 'checkpoints/iter-00000006')
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r'iter-00000006.*--init_from=scratch'):
        train.main([*tiny, f'--init_from={init_from}'])
    assert contents(tmp_path) == before


def test_a_checkpoint_before_a_damaged_one_is_used(tiny, out, capsys):
    whole = weights(out)
    flip_a_bit(out / 'checkpoints/iter-00000006')
    with pytest.raises(UserError, match='--checkpoint'):
        train.main([*tiny, '--init_from=resume', '--checkpoint=6'])
    train.main([*tiny, '--init_from=auto'])
    assert f'{out}/checkpoints/iter-00000006' in capsys.readouterr().err
    assert same(weights(out), whole)


def test_all_processes_resume_from_the_checkpoint_that_rank_0_verified(tiny, out, tmp_path):
    whole = weights(out)
    flip_a_bit(out / 'checkpoints/iter-00000006')  # which the others do not see
    launch(train.main, 2, tmp_path, *tiny, '--init_from=resume')
    assert lines(out, 'loss')[-1]['iter'] == 6
    for p, q in zip(weights(out), whole, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_a_run_with_damaged_logs_can_be_resumed(tiny, out, capsys):
    whole, before = weights(out), lines(out, 'loss')
    (out / 'run.json').write_text('[]')
    for name in ('metrics.jsonl', 'film.jsonl', 'anomalies.jsonl'):
        path = out / name
        rows = path.read_text().splitlines() if path.exists() else []
        damage = ['[]', '{}', '{"iter": "3"}', '{"iter": 2, "val_', '\x00\x00']
        path.write_text('\n'.join([*damage, *rows, '{"iter": 6, ']))
    train.main([*tiny, '--film', '--report=True', '--init_from=resume', '--checkpoint=3'])
    warned = capsys.readouterr().err
    assert same(weights(out), whole)
    for name in ('run.json', 'metrics.jsonl', 'report.md', 'loss.png'):
        assert (out / name).exists()
    for name in ('run.json', 'metrics.jsonl'):
        assert f'{out}/{name}' in warned
    after = [row['loss'] for row in read_rows(out / 'metrics.jsonl') if 'loss' in row]
    assert after == [row['loss'] for row in before]


@pytest.mark.parametrize(('setting', 'words'), [
    ('--n_layer=3', 'n_layer=2'), ('--dataset=accents', 'tokenizer'),
    ('--dataset=reversed', 'dataset=')])
def test_another_model_or_dataset_is_refused(
        setting, words, tiny, out, text_file, tmp_path, capsys, monkeypatch):
    text = text_file.read_text()  # other tokens; as many characters, but others
    for name, other in (('reversed', text[::-1]), ('accents', text.replace('e', 'é'))):
        (tmp_path / 'text').write_text(other)
        prepare.main(['text', '--input=text', '--tokenizer=char', f'--data_dir=data/{name}'])
    before = contents(out)
    said = fails(capsys, monkeypatch, train.main, *tiny, '--init_from=resume', setting)
    assert words in said
    assert contents(out) == before


def test_a_smaller_batch_continues_where_the_text_was(tiny, out):
    train.main([*tiny, '--init_from=resume', '--checkpoint=3', '--batch_size=2'])
    assert checkpoints.find(out).state['sequences'] == 3 * 8 + 3 * 4
    assert lines(out, 'loss')[-1]['tokens'] == (3 * 8 + 3 * 4) * 16


def test_a_resumed_run_with_another_batch_size_evaluates_the_same_sequences(tiny, out, capsys):
    resume = [*tiny, '--init_from=resume', '--eval_iters=5']  # which were 2
    train.main([*resume, '--max_iters=7'])
    assert checkpoints.find(out).state['eval_sequences'] == 5 * 4
    capsys.readouterr()
    train.main([*resume, '--eval_only', '--batch_size=1'])
    expected = lines(out, 'val_loss')[-1]['val_loss']
    assert f'{expected:.4f}' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# the settings of a resumed run


def test_settings_of_the_command_change_those_that_follow_from_them(out, tmp_path, capsys):
    (tmp_path / 'more.py').write_text('max_iters = max_iters + 1\ngrad_clip = grad_clip / 2\n')
    train.main([f'{tmp_path}/more.py', '--init_from=resume', f'--out_dir={out}',
                '--learning_rate=3e-4'])
    printed = capsys.readouterr().out
    changes = [' '.join(line.split()[1:]) for line in printed.splitlines() if '→' in line]
    assert [change for change in changes if not change.startswith('out_dir')] == [
        'learning_rate 0.0006 → 0.0003', 'max_iters 6 → 7', 'grad_clip 1.0 → 0.5',
        'min_lr 6e-05 → 3e-05']
    config = checkpoints.find(out).settings()
    assert (config['lr_decay_iters'], config['min_lr']) == (6, 'auto')


def test_settings_of_the_command_leave_those_that_were_set(tiny, tmp_path, capsys):
    train.main([*tiny, '--max_iters=3', '--lr_decay_iters=auto', '--learning_rate=1e-3',
                '--min_lr=1e-4'])  # which auto would give
    capsys.readouterr()
    train.main(['--init_from=resume', f'--out_dir={tmp_path}/out', '--learning_rate=5e-4',
                '--max_iters=4'])
    printed = capsys.readouterr().out
    assert 'min_lr' not in printed
    assert 'changed: lr_decay_iters 3 → 4' in printed
    for saved in (checkpoints.find(tmp_path / 'out').settings(),
                  json.loads((tmp_path / 'out/run.json').read_text())['config']):
        assert (saved['lr_decay_iters'], saved['min_lr']) == ('auto', 1e-4)


def test_settings_of_a_command_stay_with_the_run(out):
    resume = ['--init_from=resume', f'--out_dir={out}']
    for words, expected in ((['--max_iters=8', '--min_lr=0'], (6, 0)),
                            (['--max_iters=9', '--lr_decay_iters=8'], (8, 0)),
                            (['--max_iters=10'], (8, 0))):
        train.main([*resume, *words])
        config = checkpoints.find(out).settings()
        assert (config['lr_decay_iters'], config['min_lr']) == expected, words


def test_fewer_iterations_than_the_run_has_are_refused(out, capsys, monkeypatch):
    before = contents(out)
    resume = ['--init_from=resume', f'--out_dir={out}']
    assert 'max_iters=5' in fails(capsys, monkeypatch, train.main, *resume, '--max_iters=5')
    train.main([*resume, '--max_iters=5', '--eval_only'])  # trains nothing
    assert contents(out) == before
    train.main([*resume, '--max_iters=5', '--checkpoint=3'])
    assert checkpoints.find(out).iter_num == 5


# -----------------------------------------------------------------------------
# going back


def test_going_back_archives_the_later_steps(tiny, out):
    bad_steps = [{'iter': i, 'loss': ['nan']} for i in (1, 5)]
    (out / 'anomalies.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in bad_steps))
    before, last = contents(out), weights(out)
    train.main([*tiny, '--init_from=resume', '--checkpoint=3', '--max_iters=4'])
    for name in ('metrics.jsonl', 'anomalies.jsonl', 'run.json'):
        assert (out / 'old-001' / name).read_bytes() == before[name][0]
    assert same(weights(out / 'old-001'), last)
    assert [row['iter'] for row in lines(out, 'loss')] == [1, 2, 3, 4]
    assert json.loads((out / 'anomalies.jsonl').read_text()) == bad_steps[0]


def test_a_restart_by_torchrun_does_not_go_back_once_more(tiny, out, monkeypatch):
    back = [*tiny, '--init_from=auto', '--checkpoint=3']
    train.main([*back, '--max_iters=4'])
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    train.main([*back, '--max_iters=5'])
    assert [row['iter'] for row in lines(out, 'loss')] == [1, 2, 3, 4, 5]
    assert not (out / 'old-002').exists()


# -----------------------------------------------------------------------------
# a new run where an earlier one is


def test_a_refused_run_leaves_the_earlier_one_as_it_was(tiny, out):
    before = contents(out)
    for wrong in ('--dataset=nowhere', '--n_head=7', '--total_batch_size=7'):
        with pytest.raises((UserError, SystemExit)):
            train.main([*tiny, wrong])
    train.main([*tiny, '--check=True'])
    assert contents(out) == before


def test_a_folder_in_use_is_refused(tiny, out, capsys, monkeypatch):
    resume, before = [*tiny, '--init_from=resume'], contents(out)
    with lock_output_dir(out):
        assert str(out) in fails(capsys, monkeypatch, train.main, *resume)
        train.main([*resume, '--eval_only'])  # which writes nothing
    assert contents(out) == before
    train.main(resume)  # and is free again


# -----------------------------------------------------------------------------
# killed while it writes


def test_a_run_killed_while_it_saves_resumes_to_the_same_bits(tiny, tmp_path):
    tiny = [*tiny, '--dropout=0.2', '--max_iters=4', '--eval_interval=2',
            '--init_from=auto']
    whole, out = tmp_path / 'whole', tmp_path / 'out'
    train.main([*tiny, f'--out_dir={whole}'])
    for n in itertools.count(2, 11):
        code = exit_code(fork(train.main, *tiny, log=tmp_path / 'log',
                              before=lambda n=n: die_before_change(n, '/checkpoints/')))
        if code == 0:
            break
        assert code == 9, (n, (tmp_path / 'log').read_text())
        train.main(tiny)
        assert same(weights(out), weights(whole)) and not list(out.rglob('*.tmp')), n
        assert [(row['iter'], row['loss']) for row in lines(out, 'loss')] \
            == [(row['iter'], row['loss']) for row in lines(whole, 'loss')], n
        shutil.rmtree(out)
    assert n > 10


def test_no_file_of_an_earlier_run_is_lost_to_a_kill(out, tmp_path):
    def files(folder):
        return sorted((path.name, path.read_bytes()) for path in folder.rglob('*')
                      if path.is_file())

    def archive_and_die(n, folder):
        die_before_change(n, str(folder))
        archive_previous_run(folder)

    for n in itertools.count(1):
        folder = shutil.copytree(out, tmp_path / str(n))
        code = exit_code(fork(lambda _, n=n, folder=folder: archive_and_die(n, folder),
                              log=tmp_path / 'log'))
        assert files(folder) == files(out), n
        archive_previous_run(folder)  # by the next run
        assert files(folder) == files(out), n
        assert not checkpoints.checkpoint_paths(folder), n
        if code == 0:
            break
    assert n > 5


def test_a_run_that_patience_ended_continues_only_with_more_patience(tiny, tmp_path):
    # without a learning rate no evaluation is better than the first
    tiny = [*tiny, '--init_from=auto', '--eval_interval=1', '--max_iters=4', '--learning_rate=0',
            '--min_lr=0', '--eval_iters=1']
    ends = []
    for patience in (2, 2, 0):
        train.main([*tiny, f'--patience={patience}'])
        ends.append(checkpoints.find(tmp_path / 'out').iter_num)
    assert ends == [2, 2, 4]
