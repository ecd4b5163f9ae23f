"""Kill, stop, starve and damage runs at random, and see that nothing is lost.

    python tools/torture.py                          all groups
    python tools/torture.py kills files --seed=1     some of them
    python tools/torture.py --save=docs/results      counts in docs/results/torture.csv

kills    a run is killed with SIGKILL again and again, half of the time inside a save
signals  a run gets signals while it starts, trains, evaluates, saves or ends
lost     one of three processes that share a model is killed: the others must end by themselves
disks    a run on a small disk, which is full at a random place and grows
files    a file of a run or its dataset is damaged, and the run goes on

A run that was disturbed and started anew must end with the weights and losses of an undisturbed
one, bit for bit. No command may end in a traceback, with an undocumented exit code, or not at all.
"""

import os
import sys
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny models; and forking wants no threads
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

from processes import exit_code, fork, options, ranks
from runs import in_background

import prepare
import train
from configurator import load_config
from plaingpt.experiments.runs import save_csv
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system import distributed
from plaingpt.system.devices import cpu_name
from plaingpt.system.errors import run_script
from plaingpt.system.files import sha256_of
from plaingpt.training.checkpoint import checkpoint_paths, find, intact


@dataclass
class TortureConfig:
    kills: int = 50  # runs that are killed, about 12 times each
    signals: int = 50  # runs that get signals
    lost: int = 8  # jobs of three processes
    disks: int = 50  # runs on a small disk
    files: int = 500  # files that are damaged
    seed: int = 0  # of all that is random
    save: str = ''  # a folder for torture.csv


SETTINGS = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=24,
                   gradient_accumulation_steps=2, eval_interval=7, eval_iters=12, dropout=0.2,
                   warmup_iters=2, lr_decay_iters=24, device='cpu', dtype='float32',
                   checkpoint_interval=2, init_from='auto', report=False)
SHORT = ['--max_iters=10', '--lr_decay_iters=10', '--checkpoint_interval=5']


class Bench:
    """A folder with a text, its dataset, and a short run."""

    def __init__(self, root):
        self.root, self.whole, self.data = root, root / 'whole', root / 'whole/data'
        self.ends = {}  # of other runs that nobody disturbed
        self.whole.mkdir()
        (root / 'text.txt').write_text(inspect.getsource(argparse)[:40_000], encoding='utf-8')
        with redirect_stdout(io.StringIO()):  # in this process, so that the forks have all imports
            prepare.main(['text', f'--input={root}/text.txt', '--tokenizer=char',
                          f'--data_dir={self.data}'])
            train.main([*SETTINGS, *SHORT, f'--dataset={self.data}', f'--out_dir={self.whole}/out'])
        began = time.monotonic()
        assert exit_code(self.start(root / 'undisturbed')) == 0
        self.end, self.duration = end_of(root / 'undisturbed'), time.monotonic() - began

    def start(self, out_dir, *extra, before=None, rank='', **env):
        """Train in a fork, which saves importing torch each time → its process id. before: called
        there first"""
        return fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={self.data}', *extra,
                    log=f'{out_dir}.log{rank}', before=before, **env)


def save_in_background():
    """From now on checkpoints are written while training goes on, as on CUDA."""
    train.Saver = partial(in_background, train.Saver)


HOW = None, save_in_background  # to save


def hash_checkpoint(out_dir):
    """A digest of the final weights, and of what the optimizer remembers."""
    path = find(out_dir, 'latest').path
    return path.name, [sha256_of(file) for file in sorted(path.glob('*.safetensors'))]


def end_of(out_dir):
    """The final weights as a digest, and all losses and samples by iteration."""
    return hash_checkpoint(out_dir), [
        (row['iter'], key, row[key]) for row in read_rows(Path(out_dir, 'metrics.jsonl'))
        for key in ('loss', 'train_loss', 'val_loss', 'sample') if key in row]


# -----------------------------------------------------------------------------
# kills, signals, lost processes. Each round → (what was done, what is wrong or None, {what: how
# often})


def saving(out_dir):
    """The temporary directories of a save that is under way, or that a kill left."""
    return set(Path(out_dir, 'checkpoints').glob('*.tmp'))


def kill_round(bench, out_dir, chance):
    before, hits = chance.choice(HOW), Counter()
    for attempt in range(12):
        pid, left_over = bench.start(out_dir, before=before), saving(out_dir)
        at, in_save = time.monotonic() + chance.uniform(0, 0.5 * bench.duration), attempt % 2 == 0
        while time.monotonic() <= at or (in_save and saving(out_dir) <= left_over):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0 if in_save else 0.0005)
        else:
            time.sleep(chance.uniform(0, 0.002) if in_save else 0)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            hits['inside a save' if saving(out_dir) - left_over else 'elsewhere'] += 1
            continue
        break
    code = exit_code(bench.start(out_dir, before=before))
    good = code == 0 and end_of(out_dir) == bench.end and not saving(out_dir)
    return before, None if good else f'exit code {code}, or not the same bits', hits


def signal_round(bench, out_dir, chance):
    hits, log = Counter(), Path(f'{out_dir}.log')
    for _ in range(8):
        pid = bench.start(out_dir, before=save_in_background)
        time.sleep(chance.uniform(0, bench.duration))
        name = chance.choice(distributed.StopRequest.NAMES)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            name = None  # it had ended
        else:
            os.kill(pid, getattr(signal, name))
        code, told = exit_code(pid), log.read_text()
        training, ended = re.search('^iter ', told, re.M), re.search('^done|: stopped', told, re.M)
        good = code == 0 or (name and (ended or not training) and code in (
            130, -getattr(signal, name)))
        if not good or 'Traceback' in told:
            return name, f'exit code {code}\n{told}', hits
        if name is None:
            break
        hits['at the end' if 'done' in told else 'in training' if training else 'at the start'] += 1
    code = exit_code(bench.start(out_dir, before=save_in_background))
    good = code == 0 and end_of(out_dir) == bench.end
    return name, None if good else f'exit code {code}, or not the same bits', hits


def start_job(bench, out_dir, before=None):
    """Three processes, each with its share of the model → their process ids."""
    distributed.TIMEOUT = distributed.timedelta(seconds=10)
    return [bench.start(out_dir, '--gradient_accumulation_steps=3', '--parallel=fsdp',
                        before=before, rank=rank, **env)
            for rank, env in enumerate(ranks(3))]


def lost_round(bench, out_dir, chance):
    if 'job' not in bench.ends:
        began, whole = time.monotonic(), bench.root / 'undisturbed-job'
        assert [*map(exit_code, start_job(bench, whole))] == [0, 0, 0]
        bench.ends['job'] = hash_checkpoint(whole), time.monotonic() - began
    expected, duration = bench.ends['job']
    before, hits = chance.choice(HOW), Counter()
    for _ in range(4):
        pids = start_job(bench, out_dir, before)
        time.sleep(chance.uniform(0, 0.7 * duration))
        rank = chance.randrange(3)
        over = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not over:
            os.kill(pids[rank], signal.SIGKILL)
        codes = [exit_code(pid) for pid in pids]  # an alarm ends what hangs
        if over:
            break
        hits['processes killed'] += 1
        told = ''.join(Path(f'{out_dir}.log{other}').read_text() for other in range(3))
        explained = re.search(r'error: .*could not reach another process, or lost it', told)
        if (any(codes[:rank] + codes[rank + 1:]) and not explained) or 'Traceback' in told:
            return before, f'exit codes {codes}\n{told}', hits
    codes = [*map(exit_code, start_job(bench, out_dir, before))]
    good = not any(codes) and hash_checkpoint(out_dir) == expected and not saving(out_dir)
    return before, None if good else f'exit codes {codes}, or not the same bits', hits


# -----------------------------------------------------------------------------
# disks and files


def small_disk(size_kb, folder):
    """Mount a disk of this size that only this process and its children see. Raises OSError."""
    faulthandler.cancel_dump_traceback_later()  # its thread would be in the way
    users, groups = f'0 {os.getuid()} 1', f'0 {os.getgid()} 1'
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER | NEWNS
        raise OSError(ctypes.get_errno(), 'no namespaces')
    for name, text in (('uid_map', users), ('setgroups', 'deny'), ('gid_map', groups)):
        Path('/proc/self', name).write_text(text)
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size_kb}k', 'none', folder], check=True)


def fill_disk(bench, disk, size, chance):
    """Train on a disk that grows when it is full → what is wrong or None."""
    out_dir = disk / 'out'
    signal.alarm(600)
    while code := exit_code(bench.start(out_dir, *SHORT, before=chance.choice(HOW))):
        said, damaged = Path(f'{out_dir}.log').read_text(errors='replace'), []
        if code not in (1, 2) or 'Traceback' in said:
            return f'{size} kB: exit code {code}: {said[-2000:]}'
        list(intact(checkpoint_paths(out_dir), ('model', 'optimizer'), damaged.append))
        if damaged:
            return f'{size} kB: damaged: {damaged}'
        size += chance.randrange(20, 500)
        subprocess.run(['mount', '-o', f'remount,size={size}k', disk], check=True)
    same = hash_checkpoint(out_dir) == hash_checkpoint(bench.whole / 'out')
    return None if same else f'{size} kB: other weights'


def disk_round(bench, disk, chance):
    log, size = Path(f'{disk}.log'), chance.randrange(50, 900)
    code = exit_code(fork(lambda _: print(fill_disk(bench, disk, size, chance) or ''), log=log,
                          before=lambda: small_disk(size, disk)))  # which the fork alone sees
    if not disk.exists():
        return 'disk', None, {'not possible here': 1}
    return 'disk', log.read_text().strip() or (f'exit code {code}' if code else None), {'disks': 1}


def damage(path, chance):
    """Remove a file, cut it, or flip one of its bits → whether it differs."""
    data = path.read_bytes()
    at = chance.randrange(len(data))
    path.unlink()
    if chance.random() < 0.25:
        return True
    path.write_bytes(chance.choice((
        data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:], data[:at])))
    return path.read_bytes() != data


def file_round(bench, work, chance):
    again = [*SHORT, '--max_iters=12', '--init_from=resume',
             f'--dataset={work}/data']
    if 'resumed' not in bench.ends:
        shutil.copytree(bench.whole, whole := bench.root / 'resumed')
        assert exit_code(bench.start(whole / 'out', *again[:-1])) == 0
        bench.ends['resumed'] = hash_checkpoint(whole / 'out')
    shutil.copytree(bench.whole, work)
    latest = find(work / 'out', 'latest').path
    path = chance.choice([path for path in sorted(work.rglob('*')) if path.suffix in (
        '.json', '.jsonl', '.bin', '.safetensors')])
    changed, code = damage(path, chance), exit_code(bench.start(work / 'out', *again))
    said, problem = (work / 'out.log').read_text(errors='replace'), None
    told = re.search('^(error|warning): ', said, re.M)
    if 'Traceback' in said or code not in (0, 2) or (code == 2 and not told):
        problem = f'exit code {code}\n{said}'
    elif changed and not told and (path.suffix == '.bin' or path.parent == latest):
        problem = f'undetected\n{said}'
    elif code == 0 and path.suffix != '.json' \
            and hash_checkpoint(work / 'out') != bench.ends['resumed']:
        problem = f'it went on, to other weights\n{said}'
    shutil.rmtree(work)
    return str(path.relative_to(work)), problem, {'refused' if told else 'without effect': 1}


GROUPS = {'kills': kill_round, 'signals': signal_round, 'lost': lost_round, 'disks': disk_round,
          'files': file_round}


def main(argv):
    names = [arg for arg in argv if arg in GROUPS]
    config = load_config(TortureConfig, [arg for arg in argv if arg not in names], __doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name in names or GROUPS:
            rounds, counts, failures = getattr(config, name), Counter(), 0
            began = time.monotonic()
            for i in range(rounds):
                chance = random.Random(f'{config.seed} {name} {i}')
                what, problem, hits = GROUPS[name](bench, bench.root / f'{name}-{i}', chance)
                counts.update(hits)
                if problem:
                    failures += 1
                    print(f'WRONG: {name} {i}: {what}: {problem}', flush=True)
            events = ', '.join(f'{n} {event}' for event, n in sorted(counts.items()))
            print(f'{name}: {rounds} rounds ({events}): {failures} wrong', flush=True)
            rows.append({'group': name, 'rounds': rounds, 'events': events, 'wrong': failures,
                         'seed': config.seed, 'minutes': round((time.monotonic() - began) / 60, 1),
                         'machine': cpu_name()})
    if config.save:
        save_csv(Path(config.save, 'torture.csv'), rows)
    wrong = sum(row['wrong'] for row in rows)
    print(f'{wrong} went wrong' if wrong else 'nothing was lost')
    sys.exit(wrong > 0)


if __name__ == '__main__':
    run_script(main)
