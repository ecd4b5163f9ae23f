"""Fault injection: kill, stop, starve and damage runs at random, and check that nothing is lost.

    python tools/torture.py                          all groups
    python tools/torture.py kills files --seed=1     some groups
    python tools/torture.py --save=docs/results      write counts to docs/results/torture.csv

kills    kill a run with SIGKILL repeatedly, half of the time inside a save
signals  send signals while a run starts, trains, evaluates, saves or ends
lost     kill one of three processes that share a model: the others must exit by themselves
disks    train on a small disk that is full at a random point and then grows
files    damage a file of a run or its dataset, and resume the run

A disturbed run that is started again must end with the weights and losses of an undisturbed run,
bit for bit. No command may print a traceback, exit with an undocumented code, or hang.
"""

import os
import sys
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # the models are tiny, and forks must not inherit threads
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import argparse
import ctypes
import faulthandler
import inspect
import io
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial

import torch
from processes import exit_code, fork, options, ranks
from runs import in_background

import prepare
import train
from configurator import load_config
from plaingpt.core.checkpoint import checkpoint_paths, find, intact
from plaingpt.experiments.comparison import save_csv
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system import distributed
from plaingpt.system.devices import machine_name
from plaingpt.system.errors import run_script
from plaingpt.system.files import make_writable, sha256_of


@dataclass
class TortureConfig:
    kills: int = 50  # number of runs to kill, about 12 times each
    signals: int = 50  # number of runs to send signals to
    lost: int = 8  # number of jobs of three processes
    disks: int = 50  # number of runs on a small disk
    files: int = 500  # number of files to damage
    seed: int = 0  # random seed
    save: str = ''  # folder for torture.csv


SETTINGS = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=24,
                   gradient_accumulation_steps=2, eval_interval=7, eval_iters=12, dropout=0.2,
                   warmup_iters=2, lr_decay_iters=24, device='cpu', dtype='float32',
                   checkpoint_interval=2, init_from='auto', report=False)
SHORT = ['--max_iters=10', '--lr_decay_iters=10', '--checkpoint_interval=5']


class Bench:
    """A folder with a text, its dataset, a short run, and the results of undisturbed runs."""

    def __init__(self, root):
        self.root = root
        self.whole = root / 'whole'
        self.data = root / 'whole/data'
        self.expected = {}  # results of undisturbed runs
        self.whole.mkdir()
        (root / 'text.txt').write_text(inspect.getsource(argparse)[:40_000], encoding='utf-8')
        with redirect_stdout(io.StringIO()):  # in this process: forks inherit all imports
            prepare.main(['text', f'--input={root}/text.txt', '--tokenizer=char',
                          f'--data_dir={self.data}'])
            train.main([*SETTINGS, *SHORT, f'--dataset={self.data}', f'--out_dir={self.whole}/out'])
        start_time = time.monotonic()
        assert exit_code(self.start(root / 'undisturbed')) == 0
        self.duration = time.monotonic() - start_time
        self.result = result_of(root / 'undisturbed')

    def start(self, out_dir, *extra, before=None, rank='', **env):
        """Train in a fork, which avoids importing torch again → its process id. before: called in
        the fork first"""
        return fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={self.data}', *extra,
                    log=f'{out_dir}.log{rank}', before=before, **env)


def save_in_background():
    """Make training write checkpoints in the background, as on CUDA."""
    train.Saver = partial(in_background, train.Saver)


SAVE_MODES = None, save_in_background


def hash_checkpoint(out_dir):
    """Digests of the final weights and optimizer state."""
    path = find(out_dir, 'latest').path
    return path.name, [sha256_of(file) for file in sorted(path.glob('*.safetensors'))]


def result_of(out_dir):
    """Digests of the final weights, and all losses and samples by iteration."""
    logged = []
    for row in read_rows(Path(out_dir, 'metrics.jsonl')):
        for key in ('loss', 'train_loss', 'val_loss', 'sample'):
            if key in row:
                logged.append((row['iter'], key, row[key]))
    return hash_checkpoint(out_dir), logged


# -----------------------------------------------------------------------------
# kills, signals, lost processes. Each round → (what was done, problem or None, {event: count})


def saving(out_dir):
    """The temporary directories of a save in progress or killed."""
    return set(Path(out_dir, 'checkpoints').glob('*.tmp'))


def kill_round(bench, out_dir, rng):
    before = rng.choice(SAVE_MODES)
    events = Counter()
    for attempt in range(12):
        pid = bench.start(out_dir, before=before)
        left_over = saving(out_dir)
        kill_time = time.monotonic() + rng.uniform(0, 0.5 * bench.duration)
        in_save = attempt % 2 == 0
        while time.monotonic() <= kill_time or (in_save and saving(out_dir) <= left_over):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0 if in_save else 0.0005)
        else:
            time.sleep(rng.uniform(0, 0.002) if in_save else 0)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            events['inside a save' if saving(out_dir) - left_over else 'elsewhere'] += 1
            continue
        break
    code = exit_code(bench.start(out_dir, before=before))
    is_same = code == 0 and result_of(out_dir) == bench.result and not saving(out_dir)
    return before, None if is_same else f'exit code {code}, or different bits', events


def signal_round(bench, out_dir, rng):
    events = Counter()
    log = Path(f'{out_dir}.log')
    for _ in range(8):
        pid = bench.start(out_dir, before=save_in_background)
        time.sleep(rng.uniform(0, bench.duration))
        name = rng.choice(distributed.StopRequest.NAMES)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            name = None  # the run has already ended
        else:
            os.kill(pid, getattr(signal, name))
        code = exit_code(pid)
        output = log.read_text()
        has_trained = re.search('^iter ', output, re.M)
        has_ended = re.search('^done|: stopped', output, re.M)
        is_expected = code == 0 or (name and (has_ended or not has_trained) and code in (
            130, -getattr(signal, name)))
        if not is_expected or 'Traceback' in output:
            return name, f'exit code {code}\n{output}', events
        if name is None:
            break
        if 'done' in output:
            events['at the end'] += 1
        else:
            events['in training' if has_trained else 'at the start'] += 1
    code = exit_code(bench.start(out_dir, before=save_in_background))
    is_same = code == 0 and result_of(out_dir) == bench.result
    return name, None if is_same else f'exit code {code}, or different bits', events


def start_job(bench, out_dir, before=None):
    """Start three processes that share a model → their process ids."""
    distributed.TIMEOUT = distributed.timedelta(seconds=10)
    return [bench.start(out_dir, '--gradient_accumulation_steps=3', '--parallel=fsdp',
                        before=before, rank=rank, **env)
            for rank, env in enumerate(ranks(3))]


def lost_round(bench, out_dir, rng):
    if 'job' not in bench.expected:
        start_time = time.monotonic()
        undisturbed = bench.root / 'undisturbed-job'
        assert [*map(exit_code, start_job(bench, undisturbed))] == [0, 0, 0]
        bench.expected['job'] = hash_checkpoint(undisturbed), time.monotonic() - start_time
    expected, duration = bench.expected['job']
    before = rng.choice(SAVE_MODES)
    events = Counter()
    for _ in range(4):
        pids = start_job(bench, out_dir, before)
        time.sleep(rng.uniform(0, 0.7 * duration))
        rank = rng.randrange(3)
        has_ended = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not has_ended:
            os.kill(pids[rank], signal.SIGKILL)
        codes = [exit_code(pid) for pid in pids]  # a process that hangs is ended by an alarm
        if has_ended:
            break
        events['processes killed'] += 1
        output = ''.join(Path(f'{out_dir}.log{other}').read_text() for other in range(3))
        explained = re.search(r'error: .*could not reach another process, or lost it', output)
        if (any(codes[:rank] + codes[rank + 1:]) and not explained) or 'Traceback' in output:
            return before, f'exit codes {codes}\n{output}', events
    codes = [*map(exit_code, start_job(bench, out_dir, before))]
    is_same = not any(codes) and hash_checkpoint(out_dir) == expected and not saving(out_dir)
    return before, None if is_same else f'exit codes {codes}, or different bits', events


# -----------------------------------------------------------------------------
# disks and files


def small_disk(size_kb, folder):
    """Mount a disk that only this process and its children see. Raises OSError."""
    faulthandler.cancel_dump_traceback_later()  # a process with threads cannot enter a namespace
    users = f'0 {os.getuid()} 1'
    groups = f'0 {os.getgid()} 1'
    libc = ctypes.CDLL(None, use_errno=True)
    deadline = time.monotonic() + 5  # the thread takes a moment to exit
    while libc.unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER | CLONE_NEWNS
        if time.monotonic() > deadline:
            raise OSError(ctypes.get_errno(), 'cannot create a user and mount namespace')
        time.sleep(0.01)
    for name, text in (('uid_map', users), ('setgroups', 'deny'), ('gid_map', groups)):
        Path('/proc/self', name).write_text(text)
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size_kb}k', 'none', folder], check=True)


def fill_disk(bench, disk, size, rng):
    """Train on a disk that grows when it is full → problem or None."""
    out_dir = disk / 'out'
    signal.alarm(600)
    while code := exit_code(bench.start(out_dir, *SHORT, before=rng.choice(SAVE_MODES))):
        output = Path(f'{out_dir}.log').read_text(errors='replace')
        damaged = []
        if code not in (1, 2) or 'Traceback' in output:
            return f'{size} kB: exit code {code}: {output[-2000:]}'
        list(intact(checkpoint_paths(out_dir), ('model', 'optimizer'), damaged.append))
        if damaged:
            return f'{size} kB: damaged: {damaged}'
        size += rng.randrange(20, 500)
        subprocess.run(['mount', '-o', f'remount,size={size}k', disk], check=True)
    is_same = hash_checkpoint(out_dir) == hash_checkpoint(bench.whole / 'out')
    return None if is_same else f'{size} kB: different weights'


def disk_round(bench, disk, rng):
    log = Path(f'{disk}.log')
    size = rng.randrange(50, 900)

    def mount():  # only the fork sees the disk
        small_disk(size, disk)

    def train_on_disk(_):
        print(fill_disk(bench, disk, size, rng) or '')

    code = exit_code(fork(train_on_disk, log=log, before=mount))
    if not disk.exists():
        return 'disk', None, {'not possible here': 1}
    problem = log.read_text().strip()
    if not problem and code:
        problem = f'exit code {code}'
    return 'disk', problem or None, {'disks': 1}


def damage(path, rng):
    """Remove a file, truncate it, or flip one of its bits → whether it differs."""
    data = path.read_bytes()
    at = rng.randrange(len(data))
    path.unlink()
    if rng.random() < 0.25:
        return True
    flipped = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1:]
    truncated = data[:at]
    path.write_bytes(rng.choice((flipped, truncated)))
    return path.read_bytes() != data


def file_round(bench, work, rng):
    argv = [*SHORT, '--max_iters=12', '--init_from=resume']
    if 'resumed' not in bench.expected:
        resumed = bench.root / 'resumed'
        shutil.copytree(bench.whole, resumed)
        assert exit_code(bench.start(resumed / 'out', *argv)) == 0
        bench.expected['resumed'] = hash_checkpoint(resumed / 'out')
    shutil.copytree(bench.whole, work)
    latest = find(work / 'out', 'latest').path
    path = rng.choice([path for path in sorted(work.rglob('*')) if path.suffix in (
        '.json', '.jsonl', '.bin', '.safetensors')])
    is_changed = damage(path, rng)
    code = exit_code(bench.start(work / 'out', *argv, f'--dataset={work}/data'))
    output = (work / 'out.log').read_text(errors='replace')
    problem = None
    reported = re.search('^(error|warning): ', output, re.M)
    if 'Traceback' in output or code not in (0, 2) or (code == 2 and not reported):
        problem = f'exit code {code}\n{output}'
    elif is_changed and not reported and (path.suffix == '.bin' or path.parent == latest):
        problem = f'undetected\n{output}'
    elif code == 0 and path.suffix != '.json' \
            and hash_checkpoint(work / 'out') != bench.expected['resumed']:
        problem = f'resumed, but ended with different weights\n{output}'
    shutil.rmtree(work)
    return str(path.relative_to(work)), problem, {'refused' if reported else 'without effect': 1}


GROUPS = {'kills': kill_round, 'signals': signal_round, 'lost': lost_round, 'disks': disk_round,
          'files': file_round}


def main(argv):
    names = [arg for arg in argv if arg in GROUPS]
    config = load_config(TortureConfig, [arg for arg in argv if arg not in names], __doc__)
    if config.save:
        make_writable(config.save, 'save')  # fail now, not after hours of torture
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name in names or GROUPS:
            rounds = getattr(config, name)
            counts = Counter()
            failures = 0
            start_time = time.monotonic()
            for i in range(rounds):
                rng = random.Random(f'{config.seed} {name} {i}')
                fault, problem, events = GROUPS[name](bench, bench.root / f'{name}-{i}', rng)
                counts.update(events)
                if problem:
                    failures += 1
                    print(f'FAILED: {name} {i}: {fault}: {problem}', flush=True)
            minutes = round((time.monotonic() - start_time) / 60, 1)
            summary = ', '.join(f'{n} {event}' for event, n in sorted(counts.items()))
            print(f'{name}: {rounds} rounds ({summary}): {failures} failed', flush=True)
            rows.append({'group': name, 'rounds': rounds, 'events': summary, 'failed': failures,
                         'seed': config.seed, 'minutes': minutes,
                         'machine': machine_name(torch.device('cpu'))})
    if config.save:
        save_csv(Path(config.save, 'torture.csv'), rows)
    total = sum(row['failed'] for row in rows)
    print(f'{total} rounds failed' if total else 'nothing was lost')
    sys.exit(1 if total else 0)


if __name__ == '__main__':
    run_script(main)
