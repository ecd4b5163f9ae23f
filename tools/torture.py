"""Kill, stop, starve and damage runs at random, and see that nothing is lost.

    python tools/torture.py                          all groups
    python tools/torture.py kills files --seed=1     some of them
    python tools/torture.py files --seed=1 --only=7  one round again

kills    a run is killed with SIGKILL again and again, half of the time inside a save
signals  a run gets signals while it starts, trains, evaluates, saves or ends
lost     one of three processes that share a model is killed: the others must end by themselves
streams  a command's standard streams are closed, broken, full, or of another encoding
disks    a run on a small disk, which is full at a random place and grows
files    a file of a run or a dataset is damaged, or JSON has other values, and a command reads it
models   a model file says what is not so; reading it takes less than 5 s and 200 MB

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
import inspect
import io
import json
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
from typing import NamedTuple

import psutil
import torch
from bad_streams import small_disk, start
from helpers import exit_code, fork, options, ranks
from safetensors.torch import load_file, save_file

import export
import plot
import prepare
import sample
import train
from configurator import load_config
from plaingpt.inference.pretrained import without_padding
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system import distributed
from plaingpt.system.errors import run_script
from plaingpt.system.files import sha256_of
from plaingpt.training.checkpoint import checkpoint_paths, find, newest_valid


@dataclass
class TortureConfig:
    kills: int = 50  # runs that are killed, about 12 times each
    signals: int = 50  # runs that get signals
    lost: int = 8  # jobs of three processes
    streams: int = 100  # commands with bad streams
    disks: int = 50  # runs on a small disk
    files: int = 1000  # files that are damaged
    models: int = 100  # hostile model files
    seed: int = 0  # of all that is random
    only: int = -1  # repeat one round: its number, with the same seed


SETTINGS = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=24,
                   gradient_accumulation_steps=2, eval_interval=7, eval_iters=12, dropout=0.2,
                   warmup_iters=2, lr_decay_iters=24, device='cpu', dtype='float32',
                   checkpoint_interval=2, init_from='auto', report=False, sample_tokens=8,
                   sample_interval=5, health_interval=6)
SHORT = ['--max_iters=10', '--lr_decay_iters=10', '--checkpoint_interval=5']
ONE_TEXT = options(num_samples=1, max_new_tokens=8, device='cpu', dtype='float32')
SECONDS, MEMORY = 5, 200 * 10**6  # that a hostile model may take
NAMES = ('cost$5_$6', 'no-utf8-\udcff', 'red\x1b[31m\x9b', 'two\nlines', ' ', '[x]*', 'Größe→')


class Bench:
    """A folder with a text, its dataset, a run, its export and a ckpt.pt."""

    def __init__(self, root):
        self.root, self.log, self.data = root, root / 'log', root / 'whole/data $1_$2 \x1b'
        self.whole, self.work = root / 'whole', root / 'work'
        self.ends = {}
        self.whole.mkdir()
        (root / 'text.txt').write_text(inspect.getsource(argparse)[:40_000], encoding='utf-8')
        with redirect_stdout(io.StringIO()):  # in this process, so that the forks have all imports
            prepare.main(['text', f'--input={root}/text.txt', '--tokenizer=char',
                          f'--data_dir={self.data}'])
            train.main([*SETTINGS, *SHORT, f'--dataset={self.data}', '--report=True',
                        f'--out_dir={self.whole}/out'])
            export.main([f'--out_dir={self.whole}/out', f'--dest={self.whole}/hf'])
        gpt = find(self.whole / 'out').load_model()
        keys = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size')
        weights = without_padding(gpt.state_dict(), gpt.config.vocab_size)
        torch.save({'model': {name: w.clone() for name, w in weights.items()}, 'iter_num': 6,
                    'model_args': {key: getattr(gpt.config, key) for key in keys}},
                   self.whole / 'ckpt.pt')

    def reset(self):
        """A new copy of all in the folder `work`."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.whole, self.work)

    def start(self, out_dir, *extra):
        """Train in a fork, which saves importing torch each time → its process id."""
        return fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={self.data}', *extra,
                    log=f'{out_dir}.log')

    def run(self, main, argv):
        """Run a command to its end → its Outcome."""
        before = psutil.Process().memory_info().rss
        pid = fork(main, *argv, log=self.log)
        _, status, usage = os.wait4(pid, 0)
        return Outcome(os.waitstatus_to_exitcode(status), self.log.read_text(errors='replace'),
                       usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss - before)

    def end_of(self, *extra):
        """→ (what an undisturbed run with these settings ends with, the seconds that it takes)"""
        if extra not in self.ends:
            out_dir, began = self.root / f'undisturbed-{len(self.ends)}', time.monotonic()
            assert exit_code(self.start(out_dir, *extra)) == 0, Path(f'{out_dir}.log').read_text()
            self.ends[extra] = end_of(out_dir), time.monotonic() - began
        return self.ends[extra]


class Outcome(NamedTuple):
    code: int  # negative: the signal that ended it; SIGALRM where it would not end
    said: str
    seconds: float  # of its processor, for others may use the machine too
    memory: int  # bytes beyond what it began with

    def problem(self):
        """Why no command may end so, or None."""
        if 'Traceback' in self.said or self.code not in (0, 2):
            return f'exit code {self.code}'
        told = any(line.startswith('error: ') for line in self.said.splitlines())
        return 'no error line' if self.code == 2 and not told else None


def hash_checkpoint(out_dir):
    """A digest of the final weights, and of what the optimizer remembers."""
    path = find(out_dir, 'latest').path
    return path.name, [sha256_of(file) for file in sorted(path.glob('*.safetensors'))]


def end_of(out_dir):
    """The final weights as a digest, and all losses and samples by iteration."""
    return hash_checkpoint(out_dir), [
        (row['iter'], key, row[key]) for row in read_rows(Path(out_dir, 'metrics.jsonl'), print)
        for key in ('loss', 'train_loss', 'val_loss', 'sample') if key in row]


# -----------------------------------------------------------------------------
# kills, signals, lost processes. Each round → (what was done, what is wrong or None, {what: how
# often})


def saving(out_dir):
    """The temporary directories of a save that is under way, or that a kill left."""
    return set(Path(out_dir, 'checkpoints').glob('*.tmp'))


def kill_round(bench, out_dir, chance):
    extra = f'--checkpoint_async={chance.random() < 0.5}'
    expected, duration = bench.end_of()
    hits = Counter()
    for attempt in range(12):
        pid, left_over = bench.start(out_dir, extra), saving(out_dir)
        at, in_save = time.monotonic() + chance.uniform(0, 0.5 * duration), attempt % 2 == 0
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
    code = exit_code(bench.start(out_dir, extra))
    good = code == 0 and end_of(out_dir) == expected and not saving(out_dir)
    return extra, None if good else f'exit code {code}, or not the same bits', hits


def signal_round(bench, out_dir, chance):
    expected, duration = bench.end_of()
    hits, log = Counter(), Path(f'{out_dir}.log')
    for _ in range(8):
        pid = bench.start(out_dir, '--checkpoint_async')
        time.sleep(chance.uniform(0, duration))
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
    code = exit_code(bench.start(out_dir, '--checkpoint_async'))
    good = code == 0 and end_of(out_dir) == expected
    return name, None if good else f'exit code {code}, or not the same bits', hits


def start_job(bench, out_dir, *extra):
    """Three processes, each with its share of the model → their process ids."""
    distributed.TIMEOUT = distributed.timedelta(seconds=10)
    return [fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={bench.data}',
                 '--gradient_accumulation_steps=3', '--parallel=fsdp', '--health_interval=0',
                 '--sample_tokens=0', *extra, log=f'{out_dir}.log{rank}', **env)
            for rank, env in enumerate(ranks(3))]


def lost_round(bench, out_dir, chance):
    if 'job' not in bench.ends:
        began, whole = time.monotonic(), bench.root / 'undisturbed-job'
        assert [*map(exit_code, start_job(bench, whole))] == [0, 0, 0]
        bench.ends['job'] = hash_checkpoint(whole), time.monotonic() - began
    expected, duration = bench.ends['job']
    extra, hits = f'--checkpoint_async={chance.random() < 0.5}', Counter()
    for _ in range(4):
        pids = start_job(bench, out_dir, extra)
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
        explained = re.search(r'error: (lost another process|.*did not meet the others)', told)
        if (any(codes[:rank] + codes[rank + 1:]) and not explained) or 'Traceback' in told:
            return extra, f'exit codes {codes}\n{told}', hits
    codes = [*map(exit_code, start_job(bench, out_dir, extra))]
    good = not any(codes) and hash_checkpoint(out_dir) == expected and not saving(out_dir)
    return extra, None if good else f'exit codes {codes}, or not the same bits', hits


# -----------------------------------------------------------------------------
# streams and disks


def failure(code, expected, log, out_dir=None, end=None):
    """What is wrong with a command that has ended, or None. end: of an undisturbed run"""
    text = Path(log).read_text(errors='replace') if Path(log).exists() else ''
    if code not in expected or 'Traceback' in text or 'Exception ignored' in text:
        return f'exit code {code}: {text[-2000:]}'
    if out_dir and newest_valid(out_dir)[1]:
        return f'damaged: {newest_valid(out_dir)[1]}'
    return 'other weights' if out_dir and code == 0 and hash_checkpoint(out_dir) != end else None


def stream_round(bench, folder, chance):
    kinds = [chance.choice(('closed', 'broken', 'full', 'gone', 'log')) for _ in range(3)]
    encoding, log = chance.choice(('utf-8', 'ascii', 'cp1252')), Path(f'{folder}.log')
    folder.mkdir()
    out_dir = folder / chance.choice(NAMES)
    model = [f'--out_dir={bench.whole}/out', '--device=cpu']
    commands = {
        'train': (train.main, [*SETTINGS, *SHORT, f'--dataset={bench.data}',
                               f'--out_dir={out_dir}', f'--report={chance.random() < 0.3}']),
        'prepare': (prepare.main, ['text', f'--input={bench.root}/text.txt', '--tokenizer=byte',
                                   f'--data_dir={folder}/data']),
        'export': (export.main, [*model[:1], f'--dest={folder}/hf']),
        'sample': (sample.main, [*model, *ONE_TEXT]),
        'plot': (plot.main, [f'{bench.whole}/out', f'--output={folder}/loss.png']),
        'inspect': (prepare.main, ['inspect', str(bench.data)])}
    name = chance.choice([*commands, 'train', 'train'])
    writes = name in ('train', 'prepare', 'export') or kinds[1] in ('closed', 'log')
    code = exit_code(start(*commands[name], log, kinds, encoding))
    what = f'{name}, streams {" ".join(kinds)}, {encoding}, {out_dir.name!r}'
    return what, failure(code, (0,) if writes else (1,), log, out_dir if name == 'train' else None,
                         hash_checkpoint(bench.whole / 'out')), {name: 1}


def fill_disk(bench, disk, chance):
    """Prepare and train on a disk that grows when it is full → what is wrong or None."""
    size, log, out_dir = chance.randrange(100, 1300), disk / 'log', disk / NAMES[0]
    small_disk(size, disk)
    for main, argv, made in (
            (prepare.main, ['text', f'--input={bench.root}/text.txt', '--tokenizer=char',
                            f'--data_dir={disk}/data'], None),
            (train.main, [*SETTINGS, *SHORT, f'--dataset={disk}/data', f'--out_dir={out_dir}',
                          f'--checkpoint_async={chance.random() < 0.5}'], out_dir)):
        code = None
        while code != 0:
            code = exit_code(start(main, argv, log))
            if wrong := failure(code, (0, 1, 2), log, made, hash_checkpoint(bench.whole / 'out')):
                return f'{size} kB: {wrong}'
            if code:
                size += chance.randrange(20, 500)
                subprocess.run(['mount', '-o', f'remount,size={size}k', disk], check=True)
            if size > 10_000:
                return 'it asks for ever more room'
    return None


def disk_round(bench, disk, chance):
    """In a fork, because of the mount."""
    log = Path(f'{disk}.wrong')
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            log.write_text(fill_disk(bench, disk, chance) or '')
            code = 0
        except (OSError, subprocess.CalledProcessError) as e:
            log.write_text(f'{e}')
            code = 3
        finally:
            os._exit(code)
    code = exit_code(pid)
    if code == 3 and not disk.exists():
        return 'disk', None, {'not possible here': 1}
    return 'disk', log.read_text() or None, {'disks': 1}


# -----------------------------------------------------------------------------
# files and models

JUNK = (None, True, 0, -1, 2**63, 10**40, 1.5, float('nan'), '', 'x', '\ud800', '\x1b[2J', [], {},
        '../../etc/passwd', [1, 'x', None], {'a': {'b': []}}, '\0')
COMMANDS = {
    'resume': (train.main, lambda b: [
        *SETTINGS, *SHORT, '--max_iters=12', '--init_from=resume', f'--out_dir={b.work}/out',
        f'--dataset={b.work / b.data.name}', '--data_in_ram=True']),
    'sample': (sample.main, lambda b: [*ONE_TEXT, f'--out_dir={b.work}/out']),
    'inspect': (prepare.main, lambda b: ['inspect', str(b.work / b.data.name)]),
    'plot': (plot.main, lambda b: [f'{b.work}/out']),
    'sample hf': (sample.main, lambda b: [*ONE_TEXT, f'--init_from={b.work}/hf']),
    'sample pt': (sample.main, lambda b: [*ONE_TEXT, f'--init_from={b.work}/ckpt.pt',
                                          f'--tokenizer={b.work / b.data.name}'])}


def damaged(data, chance):
    """Bytes that differ: a bit flipped, zeros, the end cut off or grown, nothing left."""
    at, n = chance.randrange(len(data)), chance.randrange(1, 600)
    return chance.choice((
        data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:],
        data[:at] + bytes(min(n, len(data) - at)) + data[at + n:], data[:at],
        data + chance.randbytes(n), b''))


def mutated(value, chance):
    """A JSON value in which one place is replaced, removed, or nested beyond reason."""
    place = value
    while True:
        keys = list(place if isinstance(place, dict) else range(len(place)))
        deeper = [key for key in keys if isinstance(place[key], (dict, list)) and place[key]]
        if not deeper or chance.random() < 0.5:
            break
        place = place[chance.choice(deeper)]
    if keys and chance.random() < 0.2:
        del place[chance.choice(keys)]
    elif keys:
        place[chance.choice(keys)] = chance.choice(JUNK)
    return json.dumps(value) if chance.random() < 0.95 else '[' * 10**6


def file_round(bench, _, chance):
    if 'resumed' not in bench.ends:
        bench.reset()
        assert bench.run(train.main, COMMANDS['resume'][1](bench)).code == 0
        bench.ends['resumed'] = hash_checkpoint(bench.work / 'out')
    bench.reset()
    latest = find(bench.work / 'out', 'latest').path
    path = chance.choice([path for path in sorted(bench.work.rglob('*')) if path.suffix in (
        '.json', '.jsonl', '.bin', '.safetensors', '.sha256')])
    name = 'sample hf' if 'hf' in path.parts else chance.choice(
        ('resume', 'inspect') if path.suffix == '.bin' or path.name == 'meta.json' else
        ('resume', 'resume', 'sample') if 'checkpoints' in path.parts else
        ('resume', 'plot'))
    main, argv = COMMANDS[name]
    kind = chance.choice(('bytes', 'bytes', 'removed', 'a directory', 'a FIFO', 'JSON'))
    before = path.read_bytes()
    if kind == 'JSON' and path.suffix == '.json':
        path.write_text(mutated(json.loads(before), chance))
        if path.name == 'state.json':  # its checksum is made right
            path.with_name('state.json.sha256').write_text(sha256_of(path))
    else:
        path.unlink()
        {'a directory': path.mkdir, 'a FIFO': lambda: os.mkfifo(path), 'removed': lambda: None}.get(
            kind, lambda: path.write_bytes(damaged(before, chance)))()
    changed = not path.is_file() or path.read_bytes() != before
    outcome = bench.run(main, argv(bench))
    told = any(line.startswith(('error: ', 'warning: ')) for line in outcome.said.splitlines())
    problem = outcome.problem()
    read = path.suffix == '.bin' or (path.parent == latest and (
        name == 'resume' or 'optimizer' not in path.name))
    if not problem and changed and read and not told and kind != 'JSON':
        problem = 'undetected'
    elif not problem and name == 'resume' and outcome.code == 0 and path.suffix != '.json' \
            and hash_checkpoint(bench.work / 'out') != bench.ends['resumed']:
        problem = 'it went on, to other weights'
    return f'{path.relative_to(bench.work)}, {kind}: {name}', \
        problem and f'{problem}\n{outcome.said}', {'refused' if told else 'without effect': 1}


def spoil_weights(path, chance):
    """Change a safetensors file so that its tensors, or what its head says, are no weights."""
    weights, data = load_file(path), path.read_bytes()
    name = chance.choice(sorted(weights))
    w, n = weights[name], 8 + int.from_bytes(data[:8], 'little')
    if chance.random() < 0.4:
        head = json.loads(data[8:n])
        head[name] |= chance.choice(({'data_offsets': [0, 2**62]}, {'shape': [2**31, 2**31]}))
        text = json.dumps(head).encode()
        path.write_bytes(chance.choice((len(text), 2**63)).to_bytes(8, 'little') + text + data[n:])
        return
    weights |= chance.choice((
        {name: w.to(torch.int8)}, {name: w.to(torch.complex64)}, {name: w[..., :-1].contiguous()},
        {name: torch.full_like(w, float('nan'))}, {name: torch.zeros(0, 2**40)},
        {'transformer.h.9.attn.c_attn.weight': w.clone()},
        {f'transformer.h.{i}.ln_1.weight': torch.zeros(1) for i in range(20_000)}))
    save_file(weights, path, metadata={'format': 'pt'})


def model_round(bench, _, chance):
    bench.reset()
    way = chance.choice(('hf', 'hf weights', 'checkpoint', 'checkpoint weights', 'pt'))
    state_path = find(bench.work / 'out', 'latest').path / 'state.json'
    state, config_path = json.loads(state_path.read_text()), bench.work / 'hf/config.json'
    config = json.loads(config_path.read_text())
    size = chance.choice((10**9, 2**30, 2**20, *JUNK))
    key = chance.choice(('n_layer', 'n_embd', 'n_head', 'block_size', 'vocab_size'))
    if way == 'hf':
        config[{'block_size': 'n_positions'}.get(key, key)] = size
    elif way == 'hf weights':
        spoil_weights(bench.work / 'hf/model.safetensors', chance)
    elif way == 'checkpoint weights':
        chunk = next(chunk for chunk in state['chunks'] if chunk['kind'] == 'model')
        path = state_path.with_name(chunk['name'])
        spoil_weights(path, chance)
        chunk |= {'bytes': path.stat().st_size, 'sha256': sha256_of(path)}
    elif way == 'checkpoint':
        state['model'][key] = size
    else:
        ckpt = torch.load(bench.work / 'ckpt.pt', weights_only=True)
        ckpt['model_args'][key] = size
        torch.save(ckpt, bench.work / 'ckpt.pt')
    config_path.write_text(json.dumps(config))
    state_path.write_text(json.dumps(state))
    state_path.with_name('state.json.sha256').write_text(sha256_of(state_path))
    for other in checkpoint_paths(bench.work / 'out')[:-1]:  # 'best' would take another one
        shutil.rmtree(other)
    main, argv = COMMANDS['sample pt' if way == 'pt' else 'sample hf' if way[0] == 'h'
                          else chance.choice(('sample', 'resume'))]
    outcome = bench.run(main, argv(bench))
    problem = outcome.problem() or (None if outcome.code else 'it was taken for a model')
    if outcome.seconds > SECONDS or outcome.memory > MEMORY:
        problem = f'{outcome.seconds:.1f} s, {outcome.memory / 1e6:.0f} MB'
    return f'{way}, {key}={size!r}', problem and f'{problem}\n{outcome.said}', {'refused': 1}


GROUPS = {'kills': kill_round, 'signals': signal_round, 'lost': lost_round,
          'streams': stream_round, 'disks': disk_round, 'files': file_round, 'models': model_round}


def main(argv):
    names = [arg for arg in argv if arg in GROUPS]
    config = load_config(TortureConfig, [arg for arg in argv if arg not in names], __doc__)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name in names or GROUPS:
            count, found, failed = getattr(config, name), Counter(), 0
            for i in range(count) if config.only < 0 else [config.only]:
                chance = random.Random(f'{config.seed} {name} {i}')  # so that --only repeats it
                what, problem, hits = GROUPS[name](bench, bench.root / f'{name}-{i}', chance)
                found.update(hits)
                if problem:
                    failed += 1
                    print(f'WRONG: {name} {i}: {what}: {problem}', flush=True)
            counts = ', '.join(f'{n} {what}' for what, n in sorted(found.items()))
            print(f'{name}: {count} rounds ({counts}): {failed} wrong', flush=True)
            wrong += failed
    print('nothing was lost' if not wrong else f'{wrong} went wrong')
    sys.exit(wrong > 0)


if __name__ == '__main__':
    run_script(main)
