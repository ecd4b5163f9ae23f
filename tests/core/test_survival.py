"""Crash-safe runs: signals, lost processes, bad steps, errors, checkpoints that fail."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest
from processes import ROOT, exit_code, fails, fork, fork_job, launch, run
from runs import change_steps, lines, same, weights
from sample_data import one_benchmark

import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.batches import BatchLoader
from plaingpt.system import distributed as runtime
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import UserError


@pytest.mark.parametrize('number', StopRequest.SIGNALS)
@pytest.mark.parametrize('ignored', [False, True])  # as nohup does
def test_a_signal_requests_a_stop_unless_it_was_ignored(number, ignored):
    own = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
    signal.signal(number, own)
    assert stop.agreed_signal() == (None if ignored else number.name)


def test_a_second_ctrl_c_exits_at_once(tmp_path):
    def main(_):
        runtime.time = clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
            clock.now = 0.1
            os.kill(os.getpid(), signal.SIGINT)  # the terminal's and torchrun's are one
            print('still here')
            clock.now = 1.2
            os.kill(os.getpid(), signal.SIGINT)
            print('not here')

    assert exit_code(fork(main, log=tmp_path / 'log')) == 130
    assert (tmp_path / 'log').read_text().splitlines()[1:] == ['still here']


@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_an_evaluation_early(tiny, trained, tmp_path, processes):
    def signal_in_the_third_batch():  # of the last process
        original, count = BatchLoader.eval_batch, itertools.count(1)

        def eval_batch(loader, starts):
            if next(count) == 3 and train.launched_world().rank == processes - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(loader, starts)
        BatchLoader.eval_batch = eval_batch

    shutil.copytree(trained, tmp_path / 'out')
    log = launch(train.main, processes, tmp_path, *tiny, '--init_from=resume', '--max_iters=9',
                 '--eval_interval=7', '--eval_iters=99', before=signal_in_the_third_batch)
    assert 'SIGTERM' in log
    assert '--init_from=resume' in log
    saved = checkpoints.find(tmp_path / 'out')
    assert (saved.iter_num, saved.state['evaluated']) == (7, False)
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


def test_a_run_stopped_anywhere_resumes_to_the_same_bits(tiny, tmp_path, no_plots, monkeypatch):
    one_benchmark(monkeypatch, [' main'] * 5)
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


@pytest.mark.slow
@pytest.mark.parametrize('what', [
    'kills signals --kills=1 --signals=1', 'disks --disks=1 --seed=3',
    'files --files=12 --seed=1'])
def test_random_faults_lose_nothing(what):
    # In a process of its own: forks of this one would lack the threads of earlier tests.
    out = run(sys.executable, ROOT / 'tools/torture.py', *what.split())
    assert 'nothing was lost' in out


# -----------------------------------------------------------------------------
# processes


@pytest.mark.slow
def test_a_job_restarts_after_a_killed_worker(tiny, tmp_path):
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               '--max-restarts=3', ROOT / 'train.py', *tiny, '--init_from=auto', '--max_iters=60',
               '--lr_decay_iters=60', '--eval_interval=30', '--checkpoint_interval=5']
    process = subprocess.Popen([sys.executable, *command], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert any('iter 20' in line for line in process.stdout)
    psutil.Process(process.pid).children()[-1].kill()
    out = process.stdout.read()
    assert process.wait() == 0 and 'resumed from' in out, out
    assert checkpoints.find(tmp_path / 'out').iter_num == 60
    assert [line['iter'] for line in lines(tmp_path / 'out', 'loss')] == list(range(1, 61))


# -----------------------------------------------------------------------------
# bad steps: whose loss or gradient is not finite


def spoil_steps(monkeypatch, bad_losses, bad_gradients=()):
    """Steps, counted from 1, whose loss and gradients are NaN, or the gradients alone."""
    def spoil(n, model, loss):
        if n in (*bad_losses, *bad_gradients):
            next(model.parameters()).grad[0, 0] = math.nan
        return loss * math.nan if n in bad_losses else loss
    change_steps(monkeypatch, spoil)


@pytest.mark.usefixtures('all_checkpoints')
def test_a_bad_step_leaves_the_weights_alone_and_is_logged_with_its_sequences(
        tiny, tmp_path, monkeypatch, capsys):
    spoil_steps(monkeypatch, [2], [4])
    train.main([*tiny, '--checkpoint_interval=1'])
    saved = [weights(tmp_path / 'out', i) for i in range(1, 7)]
    assert [same(a, b) for a, b in pairwise(saved)] == [True, False, True, False, False]
    loss, gradient = map(json.loads, (tmp_path / 'out/anomalies.jsonl').read_text().splitlines())
    assert 'iteration 2' in capsys.readouterr().out
    assert (loss['iter'], loss['loss'], loss['grad_norm']) == (2, ['nan'], 'nan')
    assert loss['sequences'] == [8, 15]
    assert len(loss['sequence_starts']) == 8
    assert (gradient['iter'], gradient['grad_norm']) == (4, 'nan')
    assert gradient['loss'][0] < 5


@pytest.mark.usefixtures('all_checkpoints')
@pytest.mark.parametrize(('dtype', 'bad_losses', 'bad_gradients', 'end'), [
    ('float32', range(3, 13), [], 14),  # seen when it is saved
    ('float16', [], range(3, 99), 28)])  # GradScaler may halve its scale 16 times
def test_ten_bad_steps_in_a_row_end_the_run_with_the_weights_before_them(
        tiny, tmp_path, capsys, monkeypatch, dtype, bad_losses, bad_gradients, end):
    spoil_steps(monkeypatch, bad_losses, bad_gradients)
    message = fails(capsys, monkeypatch, train.main, *tiny, '--checkpoint_interval=7',
                    '--log_interval=100', '--eval_interval=100', '--max_iters=100',
                    f'--dtype={dtype}')
    assert '--learning_rate' in message
    assert checkpoints.find(tmp_path / 'out').iter_num == end
    assert same(weights(tmp_path / 'out', 7), weights(tmp_path / 'out', end))


# -----------------------------------------------------------------------------
# errors in the middle of a run


def test_data_that_is_truncated_during_a_run_loses_no_step(
        tiny, char_data, tmp_path, capsys, monkeypatch):
    data = shutil.copytree(char_data, tmp_path / 'data')
    tiny = [*tiny, f'--dataset={data}']
    train.main([*tiny, f'--out_dir={tmp_path}/whole'])

    def truncate(n, model, loss):
        if n == 4:
            os.truncate(data / 'train.bin', 0)
        return loss
    with monkeypatch.context() as patch:
        change_steps(patch, truncate)
        said = fails(capsys, patch, train.main, *tiny)
    for words in ('train.bin', f'--out_dir={tmp_path}/out --init_from=resume'):
        assert words in said
    assert checkpoints.find(tmp_path / 'out').iter_num >= 4
    shutil.copy(char_data / 'train.bin', data)
    train.main([*tiny, '--init_from=resume'])
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'whole'))


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


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(tiny, tmp_path):
    def before():
        def fail(n, model, loss):
            if n == 5 and train.launched_world().rank:
                raise UserError('of one process')
            return loss
        change_steps(pytest.MonkeyPatch(), fail)
    pids, logs = fork_job(train.main, 2, tmp_path, *tiny, before=before)
    assert [exit_code(pid) for pid in pids.values()] == [2, 2]
    assert 'of one process' in logs[1].read_text()
    assert checkpoints.find(tmp_path / 'out').iter_num == 3


# -----------------------------------------------------------------------------
# checkpoints that cannot be written


@pytest.fixture
def block_checkpoints(tmp_path, monkeypatch):
    """block_checkpoints(error=None): a file takes the place of the folder in the first step of a
    run, which then raises the error."""
    def block_checkpoints(error=None):
        def block(n, model, loss):
            (tmp_path / 'out/checkpoints').rename(tmp_path / 'before')
            (tmp_path / 'out/checkpoints').touch()
            if error:
                raise error
            return loss
        change_steps(monkeypatch, block)
    return block_checkpoints


def test_a_save_that_fails_does_not_hide_the_first_error(
        tiny, capsys, monkeypatch, block_checkpoints):
    block_checkpoints(UserError('the first error'))
    assert fails(capsys, monkeypatch, train.main, *tiny) == 'error: the first error'


def test_a_final_save_that_fails_is_exit_code_1(tiny, tmp_path, capsys, block_checkpoints):
    block_checkpoints()
    with pytest.raises(SystemExit) as exit_:
        train.main([*tiny, '--max_iters=1'])
    assert exit_.value.code == 1
    assert 'iteration 1' in capsys.readouterr().err
