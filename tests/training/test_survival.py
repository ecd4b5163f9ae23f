"""A run survives: signals, lost processes, bad steps, hostile files."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import (
    ROOT,
    exit_code,
    fails,
    fork,
    lines,
    ranks,
    run,
    same,
    torchrun,
    wait_until,
    weights,
)

import prepare
import sample
import train
from plaingpt.inference import scoring
from plaingpt.system import distributed as runtime
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import UserError
from plaingpt.tokens.batches import BatchLoader
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import checkpoint_writer


def start(*command):
    """A script in the background, and its output up to now."""
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(process, words):
    """Read its output until `words` come → all that was read."""
    read = ''
    for line in process.stdout:
        read += line
        if words in line:
            return read
    raise AssertionError(read)


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGHUP', 'SIGINT', 'SIGUSR1'])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tiny, tmp_path, name):
    log = tmp_path / 'log'
    process = fork(train.main, *tiny, '--max_iters=100000', '--lr_decay_iters=100000', log=log)
    wait_until(lambda: log.exists() and 'iter      5' in log.read_text())
    os.kill(process, getattr(signal, name))
    assert exit_code(process) == 0
    out = log.read_text()
    assert f'{name}: stopped after iteration' in out and '--init_from=resume' in out
    found, damaged = checkpoints.newest_valid(tmp_path / 'out')
    assert not damaged and f'after iteration {found.iter_num},' in out
    assert lines(tmp_path / 'out', 'loss')[-1]['iter'] == found.iter_num


def test_a_signal_that_was_ignored_before_the_run_stays_ignored(tiny, tmp_path):
    log = tmp_path / 'log'
    process = fork(train.main, *tiny, '--max_iters=30', log=log,
                   before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # as nohup does
    wait_until(lambda: log.exists() and 'iter  5' in log.read_text())
    os.kill(process, signal.SIGHUP)
    assert exit_code(process) == 0 and 'done: ' in log.read_text()


# Evaluations of both splits over and over, too long to wait for.
LONG = ['--max_iters=9', '--eval_interval=4', '--eval_iters=1000000', '--health_interval=2']


def slow_evaluations():
    original = BatchLoader.eval_batches
    BatchLoader.eval_batches = lambda self, n, *tokens: \
        original(self, n, *tokens) * (1 if n == 1 else 1000)


@pytest.mark.parametrize('processes', [1, 2])
def test_a_signal_ends_an_evaluation_and_the_run_is_saved(tiny, tmp_path, processes):
    logs = [tmp_path / f'log{rank}' for rank in range(processes)]
    train.main([*tiny, '--max_iters=3'])
    tiny = [*tiny, *LONG, '--init_from=resume', '--sample_tokens=4']
    pids = [fork(train.main, *tiny, log=log, before=slow_evaluations,
                 **(env if processes > 1 else {}))
            for log, env in zip(logs, ranks(processes), strict=True)]
    wait_until(lambda: logs[0].exists() and 'iter 4 | loss' in logs[0].read_text())
    time.sleep(0.2)
    os.kill(pids[-1], signal.SIGTERM)
    assert [exit_code(pid) for pid in pids] == [0] * processes, logs[0].read_text()
    assert 'SIGTERM: stopped after iteration 4, which is saved' in logs[0].read_text()
    found, _ = checkpoints.newest_valid(tmp_path / 'out')
    assert found.iter_num == 4 and not found.state['evaluated']
    assert not [line for line in lines(tmp_path / 'out', 'val_loss') if line['iter'] == 4]


class StopAt:
    """Stops a run when it asks for the n-th time whether it is to stop."""

    def __init__(self, monkeypatch):
        original = StopRequest.wanted

        def wanted(stop):
            self.asked += 1
            if self.asked == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(stop)
        monkeypatch.setattr(StopRequest, 'wanted', wanted)

    def main(self, n, *argv):
        self.asked, self.at = 0, n
        train.main(argv)
        return self.asked


def test_a_run_stopped_anywhere_goes_on_bit_for_bit(tiny, tmp_path, monkeypatch):
    questions = tmp_path / 'lambada.jsonl'
    questions.write_text('{"text": "usage of the parser"}\n' * 9)
    monkeypatch.setattr(scoring, 'read_questions',
                        lambda name, *_: list(scoring.lambada(questions)))
    tiny = [*tiny, '--dropout=0.2', '--sample_tokens=3', '--sample_interval=2',
            '--eval_tasks=lambada', '--eval_tasks_interval=2', '--health_interval=2',
            '--keep_checkpoints=1', '--check=False']
    stop_at = StopAt(monkeypatch)
    asked = stop_at.main(0, *tiny, f'--out_dir={tmp_path}/whole')

    def numbers(out_dir):
        return [{key: value for key, value in row.items()
                 if key not in ('elapsed_s', 'tokens_per_s', 'data_wait', 'peak_memory_bytes')}
                for row in lines(out_dir, 'iter')]
    for n in range(7, asked, 6):  # those before are at iteration 0
        out_dir = tmp_path / f'cut{n}'
        stop_at.main(n, *tiny, f'--out_dir={out_dir}')
        stop_at.main(0, *tiny, f'--out_dir={out_dir}', '--init_from=resume')
        assert same(weights(tmp_path / 'whole'), weights(out_dir))
        assert numbers(tmp_path / 'whole') == numbers(out_dir)
        for key in ('val_loss', 'evaluated', 'best_val_loss', 'evals_since_best'):
            assert checkpoints.find(tmp_path / 'whole').state[key] \
                == checkpoints.find(out_dir).state[key]


def test_a_checkpoint_is_valid_at_each_moment_while_its_evaluation_is_added(
        trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / 'out')
    path = checkpoints.find(tmp_path / 'out').path
    original, seen = checkpoint_writer.write_atomically, []

    def write(*arguments):
        original(*arguments)
        seen.append(checkpoints.open_checkpoint(path).val_loss)
    monkeypatch.setattr(checkpoint_writer, 'write_atomically', write)
    before = checkpoints.open_checkpoint(path).val_loss
    checkpoint_writer.replace_entries(path, {'val_loss': 1.5})
    assert seen == [before, 1.5, 1.5]


@pytest.mark.slow
def test_signals_at_random_instants_lose_nothing():
    assert ': 0 went wrong' in run('tools/torture.py', '--kills=0', '--signals=2')


def test_a_second_ctrl_c_leaves_at_once_and_a_double_one_is_one():
    code = ('import os, signal, time\n'
            'from plaingpt.system.distributed import StopRequest\n'
            'with StopRequest() as stop:\n'
            '    os.kill(os.getpid(), signal.SIGINT)\n'
            '    os.kill(os.getpid(), signal.SIGINT)\n'  # the terminal's and torchrun's
            '    print(stop.wanted(), flush=True)\n'
            '    time.sleep(1.1)\n'
            '    os.kill(os.getpid(), signal.SIGINT)\n'
            '    print("still here")\n')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == 'SIGINT\n' and done.returncode == 130


def test_a_run_goes_on_with_another_number_of_processes(tiny, tmp_path):
    tiny = [*tiny, '--gradient_accumulation_steps=6', '--max_iters=9', '--lr_decay_iters=9',
            '--checkpoint_chunk_mb=1']
    train.main([*tiny, f'--out_dir={tmp_path}/one'])
    cut = [*tiny, f'--out_dir={tmp_path}/cut', '--init_from=auto']
    torchrun(2, 'train.py', *cut, '--max_iters=3')
    train.main([*cut, '--max_iters=5'])
    torchrun(3, 'train.py', *cut)
    for key in ('loss', 'grad_norm', 'val_loss'):
        one, cut = ({line['iter']: line[key] for line in lines(tmp_path / name, key)}
                    for name in ('one', 'cut'))
        for iter_num, value in one.items():
            assert cut[iter_num] == pytest.approx(value, abs=1e-5), (key, iter_num)


def test_a_killed_worker_brings_the_whole_job_back(tiny, tmp_path):
    process = start('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
                    '--max-restarts=3', 'train.py', *tiny, '--init_from=auto', '--max_iters=60',
                    '--lr_decay_iters=60', '--eval_interval=30', '--checkpoint_interval=5')
    wait_for(process, 'iter 20')
    workers = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True)
    os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
    out = process.stdout.read()
    assert process.wait() == 0 and 'resumed from' in out, out
    assert checkpoints.find(tmp_path / 'out').iter_num == 60
    iters = [line['iter'] for line in lines(tmp_path / 'out', 'loss')]
    assert iters == list(range(1, 61))


def test_a_batch_size_that_changes_repeats_and_skips_no_text(tiny, tmp_path, capsys):
    train.main([*tiny, '--max_iters=3'])
    train.main([*tiny, '--init_from=resume', '--batch_size=2'])
    assert 'changed: batch_size 4 → 2' in capsys.readouterr().out
    assert checkpoints.find(tmp_path / 'out').state['sequences'] == 3 * 8 + 3 * 4
    assert lines(tmp_path / 'out', 'loss')[-1]['tokens'] == (3 * 8 + 3 * 4) * 16


def test_a_run_can_go_back_to_an_earlier_checkpoint(tiny, tmp_path):
    train.main([*tiny, '--checkpoint_interval=1'])
    before = weights(tmp_path / 'out')
    train.main([*tiny, '--init_from=resume', '--checkpoint=2', '--max_iters=4'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 4
    assert same(weights(tmp_path / 'out/old-001'), before)


def test_other_data_is_refused_and_a_new_run_may_start_from_the_weights(
        tiny, trained, tmp_path, text_file, capsys, monkeypatch):
    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])
    prepare.main(['text', f'--input={other}', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    arguments = [*tiny, f'--dataset={tmp_path}/d']
    message = fails(capsys, monkeypatch, train.main, *arguments, '--init_from=resume',
                    f'--out_dir={trained}')
    assert 'other tokens' in message and '--init_from=' in message
    train.main([*arguments, f'--init_from={trained}', '--max_iters=0'])
    assert lines(tmp_path / 'out', 'val_loss')[0]['val_loss'] < 4.4  # it knows something


def test_weights_of_a_run_with_another_tokenizer_are_refused(
        tiny, trained, tmp_path, text_file, capsys, monkeypatch):
    swapped = tmp_path / 'swapped.txt'  # as many characters, but others
    swapped.write_text(text_file.read_text().replace('e', 'é'))
    prepare.main(['text', f'--input={swapped}', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    assert 'another tokenizer' in fails(capsys, monkeypatch, train.main, *tiny,
                                        f'--dataset={tmp_path}/d', f'--init_from={trained}')


def test_auto_starts_where_there_is_no_checkpoint_whichever_is_named(tiny, tmp_path):
    train.main([*tiny, '--init_from=auto', '--checkpoint=best', '--max_iters=1'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 1


# -----------------------------------------------------------------------------
# bad steps


@pytest.fixture
def poison(monkeypatch):
    """Make the gradients of some iterations NaN."""
    def these(bad, loss_too=True):
        original, count = train.forward_backward, iter(range(10**6))

        def step(model, *rest):
            loss = original(model, *rest)
            if next(count) in bad:
                next(model.parameters()).grad[0, 0] = float('nan')
                return loss * float('nan') if loss_too else loss
            return loss
        monkeypatch.setattr(train, 'forward_backward', step)
    return these


@pytest.mark.parametrize('loss_too', [True, False])
def test_a_bad_step_leaves_weights_and_optimizer_alone(tiny, tmp_path, poison, capsys, loss_too):
    poison({4}, loss_too)
    train.main([*tiny, '--checkpoint_interval=1', '--always_save_checkpoint=False'])
    assert 'iteration 5 left the weights alone' in capsys.readouterr().out
    before, after, end = (checkpoints.find(tmp_path / 'out', n) for n in (4, 5, 6))
    assert same(before.load_model().parameters(), after.load_model().parameters())
    assert not same(after.load_model().parameters(), end.load_model().parameters())
    (line,) = map(json.loads, (tmp_path / 'out/anomalies.jsonl').read_text().splitlines())
    assert line['iter'] == 5 and line['sequences'] == [32, 39] and len(line['sequence_starts']) == 8
    assert line['grad_norm'] == 'nan'
    assert (line['loss'] == ['nan']) == loss_too


def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_weights_before_them(
        tiny, tmp_path, poison, capsys, monkeypatch):
    poison({2, 3, 4, 5})
    message = fails(capsys, monkeypatch, train.main, *tiny, '--max_bad_steps=3',
                    '--checkpoint_interval=2', '--log_interval=100', '--eval_interval=100',
                    '--max_iters=100')
    assert 'the last 3 steps' in message and '--learning_rate' in message
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num == 6  # seen when it was saved
    assert same(weights(tmp_path / 'out', 2), found.load_model().parameters())


def test_a_bad_step_now_and_then_does_not_stop_the_run(tiny, tmp_path, poison):
    poison({0, 2, 4})
    train.main([*tiny, '--max_bad_steps=2'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 6


def test_processes_agree_on_a_bad_step(tiny, tmp_path):
    script = tmp_path / 'poisoned.py'
    script.write_text(
        'import sys, torch\n'
        f'sys.path.insert(0, {str(ROOT)!r})\n'
        'import train\n'
        'original, count = train.forward_backward, iter(range(100))\n'
        'def step(*arguments):\n'
        '    loss = original(*arguments)\n'
        '    bad = next(count) == 2 and train.launched_world().rank == 1\n'
        '    return loss * float("nan") if bad else loss\n'
        'train.forward_backward = step\n'
        'train.main(sys.argv[1:])\n')
    torchrun(2, script, *tiny, '--checkpoint_interval=1')
    assert same(weights(tmp_path / 'out', 2), weights(tmp_path / 'out', 3))
    (line,) = map(json.loads, (tmp_path / 'out/anomalies.jsonl').read_text().splitlines())
    assert line['iter'] == 3 and line['loss'][1] == 'nan' and line['loss'][0] < 5


# -----------------------------------------------------------------------------
# saves


def test_a_final_save_that_fails_is_exit_code_1(tiny, tmp_path, monkeypatch, capsys):
    def disk_full(*_):
        raise OSError(28, 'No space left on device')

    train.main([*tiny, '--max_iters=3'])
    monkeypatch.setattr(checkpoint_writer, 'write_chunks', disk_full)
    with pytest.raises(SystemExit) as exit_:
        train.main([*tiny, '--init_from=resume'])
    assert exit_.value.code == 1 and 'No space left' in capsys.readouterr().err
    assert checkpoints.find(tmp_path / 'out').iter_num == 3


def test_one_and_two_processes_write_checkpoints_that_both_read(tiny, tmp_path, monkeypatch):
    torchrun(2, 'train.py', *tiny, '--checkpoint_async')
    found, damaged = checkpoints.newest_valid(tmp_path / 'out')
    assert found.iter_num == 6 and not damaged and len(found.state['rng']) == 2
    torchrun(2, 'train.py', *tiny, '--init_from=resume', '--max_iters=7')
    train.main([*tiny, '--init_from=resume', '--max_iters=8'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 8


def test_hosts_that_do_not_share_the_folder_are_told_so(monkeypatch, tmp_path):
    world = train.launched_world().__class__(rank=1, size=2, launched=True)
    monkeypatch.setattr(runtime, 'all_gather', lambda value, group: [
        str(tmp_path / 'elsewhere') if isinstance(value, str) else ('host-a', True), value])
    monkeypatch.setattr(runtime.time, 'monotonic', iter(range(0, 1000, 20)).__next__)
    with pytest.raises(UserError, match='not the same folder'):
        runtime.check_shared(tmp_path, world, None)


def test_no_file_that_is_read_can_run_code(tiny, char_data, tmp_path, capsys):
    """A pickle that would make a file, in each place where a file is read."""
    mark = tmp_path / 'hacked'
    hostile = f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()
    pickle.loads(hostile)
    assert mark.exists()  # it does work, where something unpickles it
    mark.unlink()

    def attack(path, main, *arguments):
        content = path.read_bytes() if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hostile)
        with contextlib.suppress(UserError, SystemExit):
            main(list(arguments))
        assert not mark.exists(), path
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)

    data = shutil.copytree(char_data, tmp_path / 'data')
    arguments = [*tiny, f'--dataset={data}']
    train.main(arguments)
    out = tmp_path / 'out'
    for path in sorted(path for path in checkpoints.find(out).path.iterdir()):
        attack(path, sample.main, f'--out_dir={out}', '--checkpoint=latest', '--num_samples=1')
        attack(path, train.main, *arguments, '--init_from=resume', '--eval_only')
    for name in ('meta.json', 'meta.pkl', 'train.bin', 'val.bin'):
        attack(data / name, train.main, *arguments, '--eval_only')
        attack(data / name, prepare.main, 'inspect', str(data))
    attack(out / 'metrics.jsonl', train.main, *arguments, '--init_from=resume', '--max_iters=7')
    attack(tmp_path / 'prompt', sample.main, f'--out_dir={out}', f'--start=FILE:{tmp_path}/prompt')
    for name in ('config.json', 'model.safetensors', 'pytorch_model.bin'):
        attack(tmp_path / 'hf' / name, sample.main, f'--init_from={tmp_path}/hf')
    for name in ('in.txt', 'in.jsonl', 'in.parquet', 'in.txt.gz', 'in.txt.zst'):
        attack(tmp_path / name, prepare.main, 'text', f'--input={tmp_path / name}',
               '--tokenizer=byte', f'--data_dir={tmp_path}/new')
    attack(tmp_path / 'new/unfinished/journal.json', prepare.main, 'pystdlib',
           f'--data_dir={tmp_path}/new')


def test_a_short_torture_loses_nothing():
    out = run('tools/torture.py', '--kills=3', '--signals=0')
    assert 'nothing was lost' in out and 'LOST' not in out


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tiny, tmp_path, capsys):
    train.main([*tiny, '--checkpoint_interval=2'])
    newest = checkpoints.find(tmp_path / 'out').path
    (newest / 'model-00001-of-00001.safetensors').write_bytes(b'cut')
    train.main([*tiny, '--init_from=resume'])
    out = capsys.readouterr().out
    assert f'skipped a checkpoint: {newest}' in out and 'resumed from' in out
    assert 'old-001' in out and checkpoints.newest_valid(tmp_path / 'out')[0].iter_num == 6


@pytest.mark.slow
def test_gpt2_124m_is_saved_by_one_and_two_processes_in_chunks_within_the_limit(
        char_data, tmp_path):
    arguments = ['train.py', f'--dataset={char_data}', '--block_size=16', '--batch_size=1',
                 '--gradient_accumulation_steps=2', '--eval_iters=1', '--checkpoint_chunk_mb=100',
                 '--device=cpu', '--dtype=float32', '--init_from=auto', f'--out_dir={tmp_path}/out']
    for processes, iters in ((2, 1), (1, 2), (2, 3)):
        torchrun(processes, *arguments, f'--max_iters={iters}')
        found, damaged = checkpoints.newest_valid(tmp_path / 'out')
        assert found.iter_num == iters and not damaged
        assert all(chunk['bytes'] <= 100e6 for chunk in found.state['chunks'])
        assert len(found.state['chunks']) > 10
