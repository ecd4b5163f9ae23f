"""What a run that resumes takes over, what it keeps beside, and what it refuses."""

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from helpers import exit_code, fails, fork, lines, ranks, same, weights

import sample
import train
from plaingpt.monitoring.metrics import Clock
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import checkpoint_writer


def flip_a_bit(checkpoint):
    path = checkpoint / 'model-00001-of-00001.safetensors'
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make_unreadable(checkpoint):
    path = checkpoint / 'state.json'
    path.unlink()
    path.mkdir()  # reading it is an OSError, for root too


def let_a_newer_version_write_it(checkpoint):
    state = json.loads((checkpoint / 'state.json').read_text())
    checkpoint_writer.Saver(checkpoint.parents[1])._publish(
        checkpoint, checkpoint, {**state, 'format_version': 99})


@pytest.mark.parametrize(('spoil', 'words'), [
    (flip_a_bit, 'is damaged'), (make_unreadable, 'state.json'),
    (let_a_newer_version_write_it, 'from another version')])
def test_auto_starts_nothing_anew_where_no_checkpoint_can_be_used(tiny, tmp_path, spoil, words):
    train.main([*tiny, '--keep_checkpoints=1', '--max_iters=3'])
    (checkpoint,) = checkpoints.checkpoint_paths(tmp_path / 'out')
    spoil(checkpoint)
    before = sorted(tmp_path.rglob('*'))
    for init_from in ('auto', 'resume'):
        with pytest.raises(UserError) as refused:
            train.main([*tiny, f'--init_from={init_from}'])
        message = str(refused.value)
        assert str(checkpoint) in message and words in message
        assert '--init_from=scratch' in message or words == 'from another version'
        assert 'remove' not in message
        assert sorted(tmp_path.rglob('*')) == before
    train.main([*tiny, '--init_from=scratch', '--max_iters=1'])
    assert (tmp_path / 'out/old-001/checkpoints' / checkpoint.name).exists()


@contextmanager
def another_user():
    """Root may read everything, so a test of permissions is somebody else for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_checkpoints_of_another_user_are_not_taken_for_none(trained):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        out = shutil.copytree(trained, Path(folder, 'out'))
        for mode in (0o000, 0o600):
            os.chmod(out / 'checkpoints', mode)
            with another_user(), pytest.raises(UserError, match='checkpoints'):
                checkpoints.find(out, 'latest')
        os.chmod(out / 'checkpoints', 0o700)


def test_the_one_before_a_damaged_checkpoint_is_kept_by_default(tiny, tmp_path):
    tiny = [option for option in tiny if 'keep_checkpoints' not in option]
    train.main([*tiny, '--checkpoint_interval=1'])
    whole = weights(tmp_path / 'out')
    flip_a_bit(checkpoints.checkpoint_paths(tmp_path / 'out')[-1])
    train.main([*tiny, '--checkpoint_interval=1', '--init_from=auto'])
    assert same(weights(tmp_path / 'out'), whole)


def test_a_run_goes_on_in_every_other_dtype(tiny, tmp_path):
    dtypes = ('float32', 'bfloat16', 'float16')
    for dtype in dtypes:
        train.main([*tiny, f'--out_dir={tmp_path}/{dtype}', f'--dtype={dtype}', '--max_iters=2'])
    for before in dtypes:
        for after in dtypes:
            out = shutil.copytree(tmp_path / before, tmp_path / f'{before}-{after}')
            train.main([*tiny, f'--out_dir={out}', f'--dtype={after}', '--init_from=resume'])
            found = checkpoints.find(out)
            assert found.iter_num == 6
            scale = found.state['scaler'].get('scale', 0)
            assert (scale > 0) == (after == 'float16')


def test_a_run_that_patience_ended_stays_ended_until_told_otherwise(tiny, tmp_path, capsys):
    # without a learning rate no evaluation is better than the first
    tiny = [*tiny, '--init_from=auto', '--eval_interval=1', '--max_iters=20', '--learning_rate=0',
            '--min_lr=0', '--weight_decay=0', '--lr_decay_iters=20']
    for _ in range(3):
        train.main([*tiny, '--patience=2'])
        assert checkpoints.find(tmp_path / 'out').iter_num == 2
        assert 'stopped after iteration 2, patience=2' in capsys.readouterr().out
    train.main([*tiny, '--patience=4'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 4
    train.main([*tiny, '--patience=0'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 20


# -----------------------------------------------------------------------------
# going back


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_going_back_keeps_the_rows_of_the_later_steps_in_the_archive(tiny, tmp_path):
    out = tmp_path / 'out'
    train.main([*tiny, '--checkpoint_interval=1'])
    bad_steps = [{'iter': i, 'loss': ['nan']} for i in (1, 5)]
    (out / 'anomalies.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in bad_steps))
    names = ('metrics.jsonl', 'anomalies.jsonl', 'run.json')
    before = {name: (out / name).read_text() for name in names}
    train.main([*tiny, '--init_from=resume', '--checkpoint=2', '--max_iters=3'])
    assert {name: (out / 'old-001' / name).read_text() for name in names} == before
    assert [row['iter'] for row in lines(out, 'loss')] == [1, 2, 3]
    assert rows(out / 'anomalies.jsonl') == bad_steps[:1]


def test_rows_of_steps_that_come_out_otherwise_are_kept_those_of_equal_steps_are_not(
        tiny, tmp_path):
    out, tiny = tmp_path / 'out', [*tiny, '--checkpoint_interval=2']
    train.main(tiny)
    shutil.rmtree(checkpoints.find(out).path)  # as after a crash at iteration 6
    crashed = shutil.copytree(out, tmp_path / 'crashed')
    train.main([*tiny, '--init_from=auto'])
    assert not (out / 'old-001').exists()
    before = (crashed / 'metrics.jsonl').read_text()
    train.main([*tiny, '--init_from=auto', f'--out_dir={crashed}', '--learning_rate=1e-4'])
    assert (crashed / 'old-001/metrics.jsonl').read_text() == before


def test_an_earlier_checkpoint_that_cannot_be_removed_is_told(tiny, tmp_path, monkeypatch, capsys):
    def refuse(path, **_):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(checkpoint_writer.shutil, 'rmtree',
                        lambda path, ignore_errors=False: ignore_errors or refuse(path))
    train.main([*tiny, '--checkpoint_interval=1', '--keep_checkpoints=1', '--check=False'])
    err = capsys.readouterr().err
    assert 'could not be removed' in err and 'iter-00000001' in err
    assert checkpoints.find(tmp_path / 'out').iter_num == 6


# -----------------------------------------------------------------------------
# float16


@pytest.fixture
def infinite_gradients(monkeypatch):
    """Every loss is finite, and no gradient."""
    original = train.forward_backward

    def step(model, *rest):
        loss = original(model, *rest)
        next(model.parameters()).grad[0, 0] = float('inf')
        return loss

    monkeypatch.setattr(train, 'forward_backward', step)


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_gradients_that_stay_infinite_stop_the_run(tiny, tmp_path, infinite_gradients, dtype):
    with pytest.raises(UserError, match='not finite'):
        train.main([*tiny, f'--dtype={dtype}', '--max_iters=200', '--eval_interval=100',
                    '--health_interval=10', '--checkpoint_interval=1', '--keep_checkpoints=99'])
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num < 50 and same(weights(tmp_path / 'out', 1), weights(tmp_path / 'out'))
    assert found.state['scaler'].get('scale', 1) > 0
    assert len(rows(tmp_path / 'out/anomalies.jsonl')) == 10  # max_bad_steps


def test_a_short_run_that_moved_no_weight_says_so(tiny, infinite_gradients, capsys):
    train.main([*tiny, '--dtype=float16'])
    assert 'the last 6 steps left the weights alone' in capsys.readouterr().out


def test_overflows_while_the_loss_scale_is_looked_for_are_no_bad_steps(tmp_path):
    from plaingpt.training.training_step import OVERFLOWS, StepGuard
    guard = StepGuard(tmp_path / 'anomalies.jsonl', 2, None, torch.device('cpu'), scaling=True)
    infinite, finite = torch.tensor(float('inf')), torch.tensor(1.0)
    for it in range(OVERFLOWS):
        assert guard.check_finite(it, finite, infinite) == 1
        assert not guard.report(print)
    assert guard.check_finite(OVERFLOWS, finite, finite) == 0


# -----------------------------------------------------------------------------
# what is there and cannot be seen


def test_checkpoints_behind_a_link_to_nothing_are_not_taken_for_none(tiny, tmp_path):
    train.main([*tiny, '--max_iters=2'])
    out = tmp_path / 'out'
    (out / 'checkpoints').rename(tmp_path / 'elsewhere')
    (out / 'checkpoints').symlink_to(tmp_path / 'not-mounted')
    before = (out / 'metrics.jsonl').read_text()
    for init_from in ('auto', 'resume', 'scratch'):
        with pytest.raises(UserError, match='checkpoints cannot be read'):
            train.main([*tiny, f'--init_from={init_from}'])
    assert (out / 'metrics.jsonl').read_text() == before and not (out / 'old-001').exists()
    (out / 'checkpoints').unlink()
    (out / 'checkpoints').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'elsewhere/iter-00000002').rename(tmp_path / 'gone')
    (tmp_path / 'elsewhere/iter-00000002').symlink_to(tmp_path / 'nowhere')
    with pytest.raises(UserError, match='iter-00000002'):
        train.main([*tiny, '--init_from=auto'])


def test_checkpoints_on_another_disk_are_archived_whole_or_not_at_all(tiny, tmp_path, monkeypatch):
    out = tmp_path / 'out'
    train.main([*tiny, '--checkpoint_interval=1'])
    with tempfile.TemporaryDirectory(dir='/dev/shm' if Path('/dev/shm').exists() else None) as disk:
        shutil.move(out / 'checkpoints', disk)
        (out / 'checkpoints').symlink_to(Path(disk, 'checkpoints'))
        train.main([*tiny, '--init_from=resume', '--checkpoint=4', '--max_iters=5'])
        archived = sorted(path.name for path in (out / 'old-001/checkpoints').iterdir())
        assert archived == ['iter-00000005', 'iter-00000006']

        def full_disk(*_):
            raise OSError(28, 'No space left on device')

        before = sorted(out.rglob('*')) + sorted(Path(disk).rglob('*'))
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_writer.shutil, 'copy2', full_disk)
            with pytest.raises(UserError, match='No space left'):
                train.main([*tiny, '--init_from=resume', '--checkpoint=2'])
        assert sorted(out.rglob('*')) + sorted(Path(disk).rglob('*')) == before


def test_a_restart_by_torchrun_does_not_go_back_once_more(tiny, tmp_path, monkeypatch):
    train.main([*tiny, '--checkpoint_interval=1'])
    back = [*tiny, '--init_from=auto', '--checkpoint=2', '--checkpoint_interval=1']
    train.main([*back, '--max_iters=4'])
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    train.main([*back, '--max_iters=5'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5]
    assert not (tmp_path / 'out/old-002').exists()


@pytest.mark.parametrize('options', [
    ['--checkpoint=2'], ['--checkpoint=newest', '--init_from=resume'],
    ['--checkpoint=99', '--init_from=auto', '--out_dir=empty']])
def test_a_checkpoint_that_is_named_is_used_or_refused(tiny, tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='checkpoint'):
        train.main([*tiny, *options])


def test_a_checkpoint_that_was_archived_is_found_again(tiny, tmp_path):
    train.main([*tiny, '--checkpoint_interval=1'])
    train.main([*tiny, '--init_from=resume', '--checkpoint=2', '--max_iters=3'])
    with pytest.raises(UserError, match=r'moved to .*old-001/checkpoints/iter-00000005'):
        checkpoints.find(tmp_path / 'out', '5')


@pytest.mark.parametrize('split', ['train', 'val'])
def test_tokens_replaced_behind_meta_json_are_refused_also_on_disk(
        tiny, char_data, tmp_path, split):
    data = shutil.copytree(char_data, tmp_path / 'data')
    tiny = [*tiny, f'--dataset={data}', '--data_in_ram=False']
    train.main([*tiny, '--max_iters=2'])
    content = (data / f'{split}.bin').read_bytes()
    (data / f'{split}.bin').write_bytes(content[2:] + content[:2])
    with pytest.raises(UserError, match=f'tokens than those of the {split} split'):
        train.main([*tiny, '--init_from=auto'])


@pytest.mark.parametrize('key', ['val_loss', 'elapsed_s', 'wandb_id', 'samples'])
def test_a_state_without_what_came_later_has_its_default(tiny, tmp_path, key):
    train.main([*tiny, '--max_iters=2'])
    checkpoint = checkpoints.find(tmp_path / 'out').path
    state = json.loads((checkpoint / 'state.json').read_text())
    del state[key]
    checkpoint_writer.Saver(tmp_path)._publish(checkpoint, checkpoint, state)
    train.main([*tiny, '--init_from=resume', '--max_iters=3'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 3


# -----------------------------------------------------------------------------
# a new run where an earlier one is


def contents(folder):
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in folder.rglob('*') if path.is_file()}


@pytest.fixture
def earlier(trained, tmp_path):
    """The out_dir of a run that is over."""
    out = shutil.copytree(trained, tmp_path / 'out')
    (out / 'tensorboard').mkdir()
    for name in ('report.md', 'tensorboard/events.out.tfevents.1'):
        (out / name).write_text('of the earlier run')
    return out


def at_step(n, action):
    """A forward_backward that calls `action` before step n."""
    original, count = train.forward_backward, itertools.count(1)

    def step(*arguments):
        if next(count) == n:
            action()
        return original(*arguments)
    return step


def out_of_memory():
    raise torch.OutOfMemoryError('tried to allocate too much')


def crash():
    raise RuntimeError('a bug')


@pytest.mark.parametrize(('n', 'action'), [
    (0, None), (1, out_of_memory), (3, out_of_memory), (3, crash),
    (1, lambda: os.kill(os.getpid(), signal.SIGINT)),
    (3, lambda: os.kill(os.getpid(), signal.SIGTERM))])
def test_a_run_that_comes_to_nothing_leaves_the_earlier_one_as_it_was(
        tiny, earlier, tmp_path, monkeypatch, capsys, n, action):
    tiny = [*tiny, '--eval_interval=5', '--report=True', '--tensorboard_log=True', '--seed=2']
    before = contents(earlier)
    monkeypatch.setattr(train, 'forward_backward', at_step(n, action))
    with suppress(UserError, RuntimeError):
        train.main([*tiny, *([] if n else ['--max_iters=0'])])
        assert 'has the earlier run as it was' in capsys.readouterr().out
    assert contents(earlier) == before


def test_a_new_run_that_is_saved_has_all_its_rows_and_the_earlier_one_all_its_files(
        tiny, earlier):
    accumulator = pytest.importorskip(
        'tensorboard.backend.event_processing.event_accumulator')
    out, before = earlier, contents(earlier)
    train.main([*tiny, '--seed=2', '--eval_interval=100', '--tensorboard_log=True'])
    assert contents(out / 'old-001') == before
    assert [row['iter'] for row in lines(out, 'val_loss')] == [0, 6]
    assert [row['iter'] for row in lines(out, 'lr')] == [1, 2, 3, 4, 5, 6]
    events = accumulator.EventAccumulator(str(out / 'tensorboard'))
    events.Reload()
    assert [event.step for event in events.Scalars('val_loss')] == [0, 6]
    assert json.loads((out / 'run.json').read_text())['config']['seed'] == 2


def test_a_bad_step_before_the_first_checkpoint_is_in_the_file_of_the_new_run(
        tiny, earlier, monkeypatch):
    original, count = train.forward_backward, itertools.count(1)
    monkeypatch.setattr(train, 'forward_backward', lambda *arguments: original(*arguments) * (
        float('nan') if next(count) == 2 else 1))
    train.main(tiny)
    (row,) = rows(earlier / 'anomalies.jsonl')
    assert row['iter'] == 2 and not (earlier / 'old-001/anomalies.jsonl').exists()


def test_after_a_minute_a_signal_saves_and_the_earlier_run_makes_way(tiny, earlier, monkeypatch):
    before = weights(earlier)
    monkeypatch.setattr(Clock, 'elapsed_s', lambda clock: 61.0)
    monkeypatch.setattr(train, 'forward_backward',
                        at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    train.main([*tiny, '--seed=2'])
    assert checkpoints.find(earlier).iter_num == 2
    assert same(weights(earlier / 'old-001'), before)


def test_an_earlier_run_that_cannot_be_moved_stays_and_the_run_ends_with_code_1(
        tiny, earlier, capsys):
    (earlier / 'old-001.tmp').write_text('in the way')
    before = contents(earlier)
    with pytest.raises(SystemExit) as exit_:
        train.main([*tiny, '--seed=2'])
    printed = capsys.readouterr()
    assert exit_.value.code == 1 and 'old-001' in printed.err
    assert '--init_from=resume' not in printed.out  # which would resume the earlier one
    assert contents(earlier) == before


def test_a_setting_that_is_left_to_the_machine_again_is_told(tiny, capsys):
    train.main([*tiny, '--max_iters=3'])
    capsys.readouterr()
    train.main([*tiny, '--init_from=resume', '--dtype=auto', '--parallel=auto'])
    out = capsys.readouterr().out
    assert 'changed: dtype float32 → auto' in out and 'changed: parallel' not in out


def test_two_processes_move_the_earlier_run_aside_together(tiny, earlier, tmp_path):
    before = weights(earlier)
    for seed in (2, 3):
        pids = [fork(train.main, *tiny, f'--seed={seed}', log=tmp_path / env['RANK'], **env)
                for env in ranks(2)]
        assert [exit_code(pid) for pid in pids] == [0, 0], (tmp_path / '0').read_text()
    assert same(weights(earlier / 'old-001'), before)
    assert len(lines(earlier / 'old-002', 'loss')) == len(lines(earlier, 'loss')) == 6


def die_before_change(n):
    """End this process before its n-th change of a file system."""
    count = itertools.count(1)

    def hook(event, arguments):
        changes = event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link') or (
            event == 'open' and type(arguments[2]) is int and arguments[2] & os.O_CREAT)
        if changes and next(count) == n:
            os._exit(9)
    sys.addaudithook(hook)


def test_killed_between_any_two_changes_the_earlier_run_is_whole_here_or_there(earlier, tmp_path):
    def whole(folder):
        return {key: content for key, (content, _) in contents(folder).items()
                if not key.startswith('old-')}
    for n in itertools.count(1):
        out = shutil.copytree(earlier, tmp_path / str(n))
        before = whole(out)
        pid = os.fork()
        if not pid:
            die_before_change(n)
            checkpoint_writer.archive_previous_run(out)
            os._exit(0)
        code = exit_code(pid)
        assert before in [whole(folder) for folder in (out, *out.glob('old-???'))], n
        checkpoint_writer.archive_previous_run(out)  # by the next run
        assert before in [whole(folder) for folder in out.glob('old-???')] and not whole(out)
        if code == 0:
            break
    assert n > 8


def test_where_checkpoints_are_missed_the_folder_they_were_moved_to_is_named(
        tiny, trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / 'out'
    for name in ('old-001', 'old-010', 'old-011/logs', 'old-999.tmp'):
        (out / name).mkdir(parents=True)
    for name in ('old-001', 'old-010'):
        shutil.copytree(trained / 'checkpoints', out / name / 'checkpoints')
    for main, argv in ((sample.main, []), (train.main, [*tiny, '--init_from=resume']),
                       (train.main, [*tiny, '--init_from=resume', '--checkpoint=best'])):
        line = fails(capsys, monkeypatch, main, *argv, f'--out_dir={out}')
        assert line.endswith(f'an earlier run is in {out}/old-010: --out_dir={out}/old-010')
