"""What a run that resumes takes over, what it keeps beside, and what it refuses."""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_train import lines, same, weights

import train
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
    train.main([*tiny, '--checkpoint_interval=1', '--keep_checkpoints=1'])
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


def test_the_path_of_one_checkpoint_is_answered_by_how_to_name_it(trained):
    with pytest.raises(UserError, match='name the run and the iteration, with --checkpoint=6'):
        checkpoints.load(str(checkpoints.find(trained).path))
