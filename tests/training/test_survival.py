"""A run survives: signals, lost processes, bad steps, full disks, damaged files."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from processes import ROOT, exit_code, fails, fork, fork_job, launch, run
from runs import change_steps, lines, same, weights
from sample_data import one_benchmark

import train
from plaingpt.data.batches import BatchLoader
from plaingpt.system import distributed as runtime
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import monitor, step

KINDS = 'model', 'optimizer'


@pytest.mark.parametrize('number', StopRequest.SIGNALS)
def test_each_signal_is_a_wish_to_stop_unless_it_was_ignored_before(number):
    own, found = signal.getsignal(number), []
    for before in (signal.SIG_DFL, signal.SIG_IGN):  # as nohup does
        signal.signal(number, before)
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
        found.append(stop.agreed_signal())
    signal.signal(number, own)
    assert found == [number.name, None]


def test_a_second_ctrl_c_leaves_at_once_and_a_double_one_is_one(tmp_path):
    def main(_):
        runtime.time = clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            clock.now = 0.1
            os.kill(os.getpid(), signal.SIGINT)  # the terminal's and torchrun's
            print(stop.agreed_signal())
            clock.now = 1.2
            os.kill(os.getpid(), signal.SIGINT)
            print('still here')

    assert exit_code(fork(main, log=tmp_path / 'log')) == 130
    assert (tmp_path / 'log').read_text().splitlines() == [
        'SIGINT: stopping after this step, again to leave at once', 'SIGINT']


@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_an_evaluation_and_the_run_is_saved(tiny, trained, tmp_path, processes):
    def signal_in_the_third_batch():  # of the last process
        original, count = BatchLoader.eval_batch, itertools.count(1)

        def eval_batch(loader, starts):
            if next(count) == 3 and train.launched_world().rank == processes - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(loader, starts)
        BatchLoader.eval_batch = eval_batch

    shutil.copytree(trained, tmp_path / 'out')
    launch(train.main, processes, tmp_path, *tiny, '--init_from=resume', '--max_iters=9',
                    '--eval_interval=7', '--eval_iters=99', before=signal_in_the_third_batch)
    log = (tmp_path / 'log0').read_text()
    assert 'SIGTERM: stopped after iteration 7; to resume: python train.py' in log
    assert '--init_from=resume' in log
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num == 7 and not found.state['evaluated']
    assert lines(tmp_path / 'out', 'val_loss')[-1]['iter'] == 6


def stopped_at(n, monkeypatch, *argv):
    """Stop a run when it asks for the n-th time whether it is to stop → how often it asked."""
    original, count = StopRequest.agreed_signal, itertools.count(1)

    def agreed_signal(stop):
        if next(count) == n:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(stop)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, 'agreed_signal', agreed_signal)
        train.main(argv)
    return next(count) - 1


def test_a_run_stopped_before_its_first_iteration_promises_no_resume(tiny, monkeypatch, capsys):
    stopped_at(1, monkeypatch, *tiny)
    out = capsys.readouterr().out
    assert 'nothing to resume' in out and '--init_from=resume' not in out


def test_a_run_stopped_anywhere_goes_on_bit_for_bit(tiny, tmp_path, monkeypatch):
    one_benchmark(monkeypatch, [' main'] * 5)
    monkeypatch.setattr(monitor, 'write_report', lambda *_: None)  # its plots take a second
    tiny = [*tiny, '--dropout=0.2', '--report=True', '--max_iters=4', '--eval_tasks=own',
            '--eval_interval=2']
    whole = tmp_path / 'whole'
    asked = stopped_at(None, monkeypatch, *tiny, f'--out_dir={whole}')

    def numbers(out_dir):
        return [{key: value for key, value in row.items()
                 if key not in ('elapsed_s', 'tokens_per_s', 'peak_memory_bytes')}
                for row in lines(out_dir, 'iter')]
    for n in range(9, asked, 16):  # those before are at iteration 0
        out_dir = tmp_path / f'cut{n}'
        stopped_at(n, monkeypatch, *tiny, f'--out_dir={out_dir}')
        train.main([*tiny, f'--out_dir={out_dir}', '--init_from=resume'])
        assert same(weights(whole), weights(out_dir)), n
        assert numbers(whole) == numbers(out_dir), n
        for key in ('val_loss', 'evaluated', 'best_val_loss', 'evals_since_best'):
            states = [checkpoints.find(path).state[key] for path in (whole, out_dir)]
            assert states[0] == states[1], (n, key)


@pytest.mark.slow
@pytest.mark.parametrize('asked', [
    'kills signals --kills=1 --signals=1', 'disks --disks=1 --seed=3', 'files --files=12 --seed=1'])
def test_what_comes_at_random_loses_nothing(asked):
    # In a process of its own: forks of this one would lack the threads of earlier tests.
    out = run(sys.executable, ROOT / 'tools/torture.py', *asked.split())
    assert 'nothing was lost' in out
    for group, rounds in re.findall(r'--(\w+)=(\d+)', asked.partition(' --seed')[0]):
        assert f'{group}: {rounds} rounds' in out
    assert ('files' not in asked) or ' refused' in out


# -----------------------------------------------------------------------------
# processes


@pytest.mark.slow
def test_a_killed_worker_brings_the_whole_job_back(tiny, tmp_path):
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               '--max-restarts=3', ROOT / 'train.py', *tiny, '--init_from=auto', '--max_iters=60',
               '--lr_decay_iters=60', '--eval_interval=30', '--checkpoint_interval=5']
    process = subprocess.Popen([sys.executable, *command], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert any('iter 20' in line for line in process.stdout)
    workers = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True)
    os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
    out = process.stdout.read()
    assert process.wait() == 0 and 'resumed from' in out, out
    assert checkpoints.find(tmp_path / 'out').iter_num == 60
    assert [line['iter'] for line in lines(tmp_path / 'out', 'loss')] == list(range(1, 61))


# -----------------------------------------------------------------------------
# bad steps: whose loss or gradient is not finite


def anomalies(out_dir):
    return [json.loads(line) for line in (out_dir / 'anomalies.jsonl').read_text().splitlines()]


def spoil_steps(monkeypatch, bad_losses, bad_gradients=()):
    """Steps, counted from 1, whose loss and gradients are NaN, or the gradients alone."""
    def spoil(n, model, loss):
        if n in (*bad_losses, *bad_gradients):
            next(model.parameters()).grad[0, 0] = math.nan
        return loss * math.nan if n in bad_losses else loss
    change_steps(monkeypatch, spoil)


@pytest.mark.usefixtures('all_checkpoints')
def test_a_bad_step_leaves_weights_and_optimizer_alone(tiny, tmp_path, monkeypatch, capsys):
    spoil_steps(monkeypatch, [2], [4])
    monkeypatch.setattr(step, 'MAX_BAD_STEPS', 2)
    train.main([*tiny, '--checkpoint_interval=1'])
    out = tmp_path / 'out'
    assert 'iteration 2 was skipped' in capsys.readouterr().out
    assert same(weights(out, 1), weights(out, 2)) and same(weights(out, 3), weights(out, 4))
    assert not same(weights(out, 2), weights(out, 3)) and not same(weights(out, 5), weights(out, 6))
    loss, gradient = anomalies(out)
    assert loss['iter'] == 2 and loss['loss'] == ['nan'] and loss['grad_norm'] == 'nan'
    assert loss['sequences'] == [8, 15] and len(loss['sequence_starts']) == 8
    assert gradient['iter'] == 4 and gradient['loss'][0] < 5 and gradient['grad_norm'] == 'nan'


@pytest.mark.usefixtures('all_checkpoints')
@pytest.mark.parametrize(('dtype', 'bad_losses', 'bad_gradients', 'end'), [
    ('float32', [3, 4, 5, 6], [], 6), ('float16', [], range(3, 99), 22)])  # 16 may overflow
def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_weights_before_them(
        tiny, tmp_path, capsys, monkeypatch, dtype, bad_losses, bad_gradients, end):
    spoil_steps(monkeypatch, bad_losses, bad_gradients)
    monkeypatch.setattr(step, 'MAX_BAD_STEPS', 3)
    message = fails(capsys, monkeypatch, train.main, *tiny, '--checkpoint_interval=2',
                    '--log_interval=100', '--eval_interval=100', '--max_iters=100',
                    f'--dtype={dtype}', '--report=True')
    assert 'the last 3 steps' in message and '--learning_rate' in message
    assert '; given up: 3 steps in a row' in (tmp_path / 'out/report.md').read_text()
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num == end  # seen when it was saved
    assert same(weights(tmp_path / 'out', end - 4), weights(tmp_path / 'out', end))
    assert found.state['scaler'].get('scale', 1) > 0 and anomalies(tmp_path / 'out')


# -----------------------------------------------------------------------------
# errors in the middle of a run


def test_data_that_is_cut_short_in_the_middle_loses_no_step(
        tiny, char_data, tmp_path, capsys, monkeypatch):
    data = shutil.copytree(char_data, tmp_path / 'data')
    tiny = [*tiny, f'--dataset={data}']
    train.main([*tiny, f'--out_dir={tmp_path}/whole'])

    def cut(n, model, loss):
        if n == 4:
            os.truncate(data / 'train.bin', 0)
        return loss
    with monkeypatch.context() as patch:
        change_steps(patch, cut)
        said = fails(capsys, patch, train.main, *tiny)
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num >= 4 and f'iteration {found.iter_num} is saved' in said
    assert 'train.bin' in said and f'--out_dir={tmp_path}/out --init_from=resume' in said
    shutil.copy(char_data / 'train.bin', data)
    train.main([*tiny, '--init_from=resume'])
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'whole'))


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device', 'log'), KeyError('bug')])
def test_any_error_of_an_evaluation_leaves_the_steps_before_it(
        tiny, tmp_path, monkeypatch, error):
    def fail(monitor, *_):
        if monitor.run.progress.iter_num:
            raise error
    monkeypatch.setattr(train.Monitor, 'log_scores', fail)
    with pytest.raises(type(error)) as raised:
        train.main(tiny)
    assert 'iteration 3 is saved' in raised.value.__notes__[0]
    assert checkpoints.find(tmp_path / 'out').iter_num == 3


def test_half_an_update_is_never_saved(tiny, tmp_path, capsys, monkeypatch):
    build = train.build_optimizer

    def failing(*arguments):
        def fail(*_):
            if {group['lr'] for group in optimizer.param_groups} != {0.0} and next(steps) == 5:
                raise OSError(5, 'in an update')
        optimizer, steps = build(*arguments), itertools.count(1)
        optimizer.register_step_post_hook(fail)
        return optimizer
    monkeypatch.setattr(train, 'build_optimizer', failing)
    assert 'in an update' in fails(capsys, monkeypatch, train.main, *tiny)
    assert checkpoints.find(tmp_path / 'out').iter_num == 3  # of the last evaluation


def test_a_save_that_fails_too_does_not_hide_the_first_error(tiny, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, 'No space left on device')

    def first(n, model, loss):
        raise UserError('the first error')
    change_steps(monkeypatch, first)
    monkeypatch.setattr(checkpoints.Saver, 'save', fail)
    said = fails(capsys, monkeypatch, train.main, *tiny)
    assert said == 'error: the first error'


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_and_waits_for_none(tiny, tmp_path):
    def before():
        def fail(n, model, loss):
            if n == 5 and train.launched_world().rank:
                raise UserError('of one process')
            return loss
        change_steps(pytest.MonkeyPatch(), fail)
    pids, logs = fork_job(train.main, 2, tmp_path, *tiny, before=before)
    assert [exit_code(pid) for pid in pids.values()] == [2, 2]
    assert 'error: of one process\n' in logs[1].read_text()
    assert checkpoints.find(tmp_path / 'out').iter_num == 3


# -----------------------------------------------------------------------------
# files


def test_a_file_where_checkpoints_belong_is_refused_before_the_first_step(
        tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/checkpoints').touch()
    assert 'out/checkpoints' in fails(capsys, monkeypatch, train.main, *tiny)


def test_a_final_save_that_fails_is_exit_code_1(tiny, trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / 'out')
    monkeypatch.setattr(checkpoints, 'write_files', Mock(
        side_effect=OSError(28, 'No space left on device')))
    with pytest.raises(SystemExit) as exit_:
        train.main([*tiny, '--init_from=resume', '--max_iters=7'])
    assert exit_.value.code == 1 and 'No space left' in capsys.readouterr().err
    assert checkpoints.find(tmp_path / 'out').iter_num == 6
