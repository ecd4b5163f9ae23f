"""Run the commands with bad streams, full disks and odd names, and see that no work is lost.

    python tools/torture_streams.py --rounds=100 --disks=50

A round runs a command with standard streams that are closed, broken, full or of an encoding that
lacks what is printed. Its exit status must be as documented, without a traceback, and a run must
end with the weights of an untroubled one, bit for bit. A disk is a small one that holds data, run
and log: it fills at a random place of a run and grows, and the run resumes, to the same weights.
"""

import sys

from torture import SETTINGS, hash_checkpoint  # it makes tests/ importable

# ruff: isort: split

import argparse
import contextlib
import ctypes
import inspect
import io
import os
import pty
import random
import subprocess
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from helpers import exit_code

import evaluate
import export
import plan
import plot
import prepare
import sample
import train
from configurator import load_config
from plaingpt.system.errors import run_script
from plaingpt.training.checkpoint import newest_valid


@dataclass
class TortureConfig:
    rounds: int = 100  # commands with bad streams
    disks: int = 50  # runs on a small disk
    seed: int = 0  # of all that is random


KINDS = ('closed', 'broken', 'full', 'gone', 'log')  # gone: a terminal
ENCODINGS = ('utf-8', 'ascii', 'cp1252')
NAMES = ('cost$5_$6', 'no-utf8-\udcff', 'red\x1b[31m\x9b', 'two\nlines', ' ', '%s{0}', '[x]*',
         'Größe→')
RUN = [*SETTINGS, '--max_iters=10', '--lr_decay_iters=10', '--checkpoint_interval=5',
       '--sample_tokens=5', '--sample_interval=3']


def connect(number, kind, log):
    """Make a descriptor of this process what `kind` says."""
    if kind == 'closed':
        os.close(number)
        return
    if kind == 'broken':
        reader, fd = os.pipe()
        os.close(reader)
    elif kind == 'gone':
        master, fd = pty.openpty()
        os.close(master)
    else:
        fd = os.open('/dev/full' if kind == 'full' else log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, number)


def python_streams(encoding):
    """Make sys.stdin, stdout and stderr as Python does when it starts."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            raw = io.FileIO(number, 'w' if number else 'r', closefd=False)
        except OSError:
            setattr(sys, name, None)
        else:
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors='strict'))


def start(main, argv, log, kinds=('log', 'log', 'log'), encoding='utf-8'):
    """Run a command in a fork, as a script of its own → process id. kinds: of its streams."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            # those that are closed come last, or the next file that is opened is one of them
            for number in sorted(range(3), key=lambda number: kinds[number] == 'closed'):
                connect(number, kinds[number], log)
            python_streams(encoding)
            sys.argv = ['script', *argv]
            run_script(main)
            code = 0
        except SystemExit as e:
            code = e.code or 0
        except BaseException:
            traceback.print_exc()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            code = 120  # as Python exits then
        os._exit(code)
    return pid


def failure(code, expected, log, out_dir=None, weights=None):
    """What is wrong with a command that has ended, or None."""
    text = Path(log).read_text(errors='replace') if Path(log).exists() else ''
    if code not in expected:
        return f'exit code {code}, not {expected}: {text[-2000:]}'
    if 'Traceback' in text or 'Exception ignored' in text:
        return f'a traceback: {text[-2000:]}'
    if out_dir and newest_valid(out_dir)[1]:
        return f'damaged: {newest_valid(out_dir)[1]}'
    if out_dir and code == 0 and hash_checkpoint(out_dir) != weights:
        return 'other weights'
    return None


# -----------------------------------------------------------------------------
# rounds


def stream_round(number, root, data, whole, weights, chance):
    """A command with random streams → (what was done, what is wrong or None)."""
    kinds, encoding = [chance.choice(KINDS) for _ in range(3)], chance.choice(ENCODINGS)
    folder, log = root / f'round-{number}', root / f'round-{number}.log'
    folder.mkdir()
    model = [f'--out_dir={whole}']
    one_text = ['--num_samples=1', '--max_new_tokens=5', '--device=cpu', '--dtype=float32']
    commands = {
        'train': (train.main, [*RUN, f'--dataset={data}']),
        'prepare': (prepare.main, ['text', f'--input={root}/argparse.txt', '--tokenizer=byte',
                                   f'--data_dir={folder}/data']),
        'export': (export.main, [*model, f'--dest={folder}/hf']),
        'sample': (sample.main, [*model, *one_text]),
        'sample --output': (sample.main, [*model, *one_text, f'--prompts={root}/prompts.jsonl',
                                          f'--output={folder}/texts.jsonl']),
        'evaluate': (evaluate.main, [*model, '--device=cpu', '--tasks=text',
                                     f'--data={root}/short.txt']),
        'plan': (plan.main, [*RUN, '--dropout=0.0', f'--dataset={data}', '--gpu=T4']),
        'plot': (plot.main, [str(whole), f'--output={folder}/loss.png']),
        'inspect': (prepare.main, ['inspect', str(data)])}
    name = chance.choice([*commands, 'train', 'train'])
    main, argv = commands[name]
    files = name in ('train', 'prepare', 'export', 'sample --output')
    expected = (0,) if files or kinds[1] in ('closed', 'log') else (1,)
    out_dir = None
    if name == 'train':
        out_dir = folder / chance.choice(NAMES)
        argv = [*argv, f'--out_dir={out_dir}', f'--report={chance.random() < 0.3}']
    code = exit_code(start(main, argv, log, kinds, encoding))
    what = f'{name}, streams {" ".join(kinds)}, {encoding}, {out_dir and out_dir.name!r}'
    return what, failure(code, expected, log, out_dir, weights)


def small_disk(size_kb, folder):
    """Mount a disk of this size that only this process and its children see. Raises OSError."""
    users, groups = f'0 {os.getuid()} 1', f'0 {os.getgid()} 1'
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER | NEWNS
        raise OSError(ctypes.get_errno(), 'no namespaces')
    for name, text in (('uid_map', users), ('setgroups', 'deny'), ('gid_map', groups)):
        Path('/proc/self', name).write_text(text)
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size_kb}k', 'none', folder], check=True)


def resize(folder, size_kb):
    subprocess.run(['mount', '-o', f'remount,size={size_kb}k', folder], check=True)


def disk_round(root, disk, weights, chance):
    """Prepare, train and report on a disk that grows when it is full → what is wrong or None.
    It works in a fork, because of the mount."""
    size = chance.randrange(100, 1300)
    small_disk(size, disk)
    data, out_dir, log = disk / 'data', disk / chance.choice(NAMES[:1]), disk / 'log'
    steps = [(prepare.main, ['text', f'--input={root}/argparse.txt', '--tokenizer=char',
                             f'--data_dir={data}'], None),
             (train.main, [*RUN, f'--dataset={data}', f'--out_dir={out_dir}',
                           '--checkpoint_interval=2', f'--report={chance.random() < 0.2}',
                           f'--checkpoint_async={chance.random() < 0.5}'], out_dir)]
    for main, argv, made in steps:
        code = None
        while code != 0:
            pid = start(main, argv, log)
            if chance.random() < 0.3:  # there is room again while it runs
                time.sleep(chance.uniform(0, 0.5))
                size += chance.randrange(500)
                resize(disk, size)
            code = exit_code(pid)
            if wrong := failure(code, (0, 1, 2), log, made, weights):
                return f'{size} kB: {wrong}'
            if code:
                size += chance.randrange(20, 500)
                resize(disk, size)
            if size > 10_000:
                return 'it asks for ever more room'
    return None


def disk_rounds(root, count, weights, chance):
    failed = full = 0
    for number in range(count):
        seed = chance.random()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                wrong = disk_round(root, root / f'disk-{number}', weights, random.Random(seed))
                code = 1 if wrong else 0
                print(f'LOST: disk {number}: {wrong}' if wrong else '', end='', flush=True)
            except (OSError, subprocess.CalledProcessError) as e:
                print(f'no small disks here: {e}', flush=True)
                code = 3
            finally:
                os._exit(code)
        code = exit_code(pid)
        if code == 3:
            break
        full += 1
        failed += code != 0
    print(f'{full} runs on small disks, {failed} failed')
    return failed


def main(argv):
    config = load_config(TortureConfig, argv, __doc__)
    chance = random.Random(config.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        text = inspect.getsource(argparse)
        (root / 'argparse.txt').write_text(text, encoding='utf-8')
        (root / 'short.txt').write_text(text[:500], encoding='utf-8')
        (root / 'prompts.jsonl').write_text('{"prompt": "def"}\n', encoding='utf-8')
        data, whole = root / 'data $1_$2 \x1b', root / 'whole\udcff $1_$2'
        with contextlib.redirect_stdout(io.StringIO()):  # here, so that the forks have all imports
            prepare.main(['text', f'--input={root}/argparse.txt', '--tokenizer=char',
                          f'--data_dir={data}'])
            train.main([*RUN, f'--dataset={data}', f'--out_dir={whole}', '--report=True'])
        weights, failed = hash_checkpoint(whole), 0
        for number in range(config.rounds):
            what, wrong = stream_round(number, root, data, whole, weights, chance)
            failed += wrong is not None
            print(f'LOST: {what}: {wrong}\n' if wrong else '', end='', flush=True)
        print(f'{config.rounds} commands with bad streams, {failed} failed')
        failed += disk_rounds(root, config.disks, weights, chance)
    print('nothing was lost' if not failed else f'{failed} failed')
    sys.exit(failed > 0)


if __name__ == '__main__':
    run_script(main)
