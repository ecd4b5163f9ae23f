"""Damage files at random, and write hostile ones: each is refused in a line, or changes nothing.

    python tools/torture_files.py --corruptions=500 --json=500 --models=100

Corruptions: a file of a run or of a dataset is damaged, and a command reads it. Where a checksum
exists, the command refuses, or ends with the bits of an undamaged one. JSON: values are replaced,
removed and added, and checksums made right. Models: shapes that no file holds, weights of other
types, archives that are none; each takes a process less than 2 s and 200 MB.
No command may end in a traceback, or not at all.
"""

import os
import sys
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny models; and forking wants no threads
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import argparse
import inspect
import json
import math
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot  # noqa: F401  (once, and not in each fork)
import torch
from helpers import exit_code, options
from hostile_models import WRITERS, deep, state_of, write_state
from torture import hash_checkpoint

import evaluate
import export
import plot
import prepare
import sample
import train
from configurator import load_config
from plaingpt.inference.pretrained import without_padding
from plaingpt.monitoring import references
from plaingpt.system.errors import run_script
from plaingpt.training.checkpoint import find


@dataclass
class TortureFilesConfig:
    corruptions: int = 500  # of files of a run and of its dataset
    json: int = 500  # hostile JSON files
    models: int = 100  # hostile model files
    seed: int = 0  # of what is done to which file
    only: int = -1  # repeat one round: its number, with the same seed


SECONDS, MEMORY = 2, 200 * 10**6  # that a hostile model may take
TINY = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=8,
               gradient_accumulation_steps=2, eval_interval=2, eval_iters=2, lr_decay_iters=8,
               warmup_iters=2, device='cpu', dtype='float32', keep_checkpoints=3, report=False,
               sample_tokens=0, data_in_ram=True, init_from='resume')
SAMPLE = options(num_samples=1, max_new_tokens=8, device='cpu', dtype='float32')


# -----------------------------------------------------------------------------
# a command in a fork, which saves importing torch each time


@dataclass
class Outcome:
    code: int  # negative: the signal that ended it; SIGALRM where it would not end
    said: str
    seconds: float  # of its processor, for others may use the machine too
    memory: int  # bytes beyond what it began with

    def problem(self):
        """Why it may not end so, whatever it read, or None."""
        if self.code == -signal.SIGALRM:
            return 'it hangs'
        errors = [line for line in self.said.splitlines() if line.startswith('error: ')]
        if 'Traceback' in self.said or self.code not in (0, 2):
            return f'exit code {self.code}'
        return 'no error line' if self.code == 2 and not errors else None


def memory_of(key):
    """A line of /proc/self/status, in bytes."""
    status = Path('/proc/self/status').read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if key in line))


def attempt(log, main, *argv):
    """Run a command → its Outcome."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            signal.alarm(30)
            before, cpu = memory_of('VmRSS:'), time.process_time()
            sys.argv = ['command', *map(str, argv)]
            code = run_as_script(main)
            figures = {'seconds': time.process_time() - cpu, 'memory': memory_of('VmHWM:') - before}
            Path(f'{log}.json').write_text(json.dumps(figures))
        finally:
            os._exit(code)
    code = exit_code(pid)
    figures = json.loads(Path(f'{log}.json').read_text()) if code >= 0 else \
        {'seconds': 0, 'memory': 0}
    return Outcome(code, log.read_text(errors='replace'), **figures)


def run_as_script(main):
    """→ the exit code, with what the interpreter prints."""
    try:
        run_script(main)
        return 0
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Bench:
    """A run, its dataset, its export and a ckpt.pt; and what commands make of them undamaged."""

    def __init__(self, root):
        self.root, self.log = root, root / 'log'
        self.whole, self.work = root / 'whole', root / 'work'
        text = root / 'argparse.txt'
        text.write_text(inspect.getsource(argparse)[:40_000], encoding='utf-8')
        self.prepare = partial(prepare.main, ['text', f'--input={text}', '--tokenizer=bpe:300',
                                              f'--data_dir={self.work}/data'])
        self.work.mkdir()
        self.do(lambda _: self.prepare())
        self.do(train.main, *self.training(), '--init_from=scratch', '--max_iters=6')
        self.do(export.main, f'--out_dir={self.work}/out', f'--dest={self.work}/hf')
        ckpt = find(self.work / 'out').load_model()
        fields = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size')
        torch.save({'model': unpadded(ckpt), 'iter_num': 6, 'model_args': {
            key: getattr(ckpt.config, key) for key in fields}}, self.work / 'ckpt.pt')
        self.work.rename(self.whole)
        self.known = {}

    def training(self):
        return [*TINY, f'--out_dir={self.work}/out', f'--dataset={self.work}/data']

    def do(self, main, *argv):
        outcome = attempt(self.log, main, *argv)
        assert outcome.code == 0, outcome.said
        return outcome

    def reset(self):
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.whole, self.work)

    def expected(self, name):
        """What comes of a command that reads undamaged files."""
        if name not in self.known:
            self.reset()
            self.known[name] = self.read(name)[1]
            assert self.known[name], self.log.read_text()
        return self.known[name]

    def read(self, name):
        """Run one of COMMANDS → (its Outcome, what came of it: None where it failed)."""
        main, argv = COMMANDS[name]
        outcome = attempt(self.log, main, *argv(self))
        if outcome.code:
            return outcome, None
        if name == 'resume':
            losses = [line for line in outcome.said.splitlines() if 'val loss' in line]
            return outcome, (hash_checkpoint(self.work / 'out'), losses[-1:])
        return outcome, re.sub(r'\S+ s\b.*tokens/s', '', outcome.said)  # but how long it took


def unpadded(model):
    """The weights as nanoGPT saves them."""
    weights = without_padding(model.state_dict(), model.config.vocab_size)
    return {name: w.clone() for name, w in weights.items()}


COMMANDS = {
    'resume': (train.main, lambda b: b.training()),
    'sample': (sample.main, lambda b: [*SAMPLE, f'--out_dir={b.work}/out']),
    'evaluate': (evaluate.main, lambda b: [f'--out_dir={b.work}/out', '--device=cpu']),
    'export': (export.main, lambda b: [f'--out_dir={b.work}/out', f'--dest={b.work}/hf2']),
    'inspect': (prepare.main, lambda b: ['inspect', b.work / 'data']),
    'plot': (plot.main, lambda b: [b.work / 'out']),
    'sample hf': (sample.main, lambda b: [*SAMPLE, f'--init_from={b.work}/hf']),
    'sample pt': (sample.main, lambda b: [*SAMPLE, f'--init_from={b.work}/ckpt.pt',
                                          f'--tokenizer={b.work}/data']),
}


# -----------------------------------------------------------------------------
# corruptions: every kind, of every file


def flip(chance, data, others):
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:]


def zero_run(chance, data, others):
    at = chance.randrange(len(data))
    n = min(chance.randrange(1, 600), len(data) - at)
    return data[:at] + bytes(n) + data[at + n:]


def cut(chance, data, others):
    return data[:chance.randrange(len(data))]


def grow(chance, data, others):
    return data + chance.randbytes(chance.randrange(1, 600))


def swap_blocks(chance, data, others):
    n = chance.randrange(1, max(2, len(data) // 3))
    a = chance.randrange(max(1, len(data) - 2 * n))
    return data[:a] + data[a + n:a + 2 * n] + data[a:a + n] + data[a + 2 * n:]


def another_file(chance, data, others):
    return chance.choice(others).read_bytes()


def empty(chance, data, others):
    return b''


CONTENTS = (flip, zero_run, cut, grow, swap_blocks, another_file, empty)
KINDS = (*CONTENTS, *CONTENTS, 'removed', 'a directory', 'a FIFO', 'a link', 'a link to nothing',
         'unreadable')


def damage(path, kind, chance, others):
    data = path.read_bytes()
    if kind == 'unreadable':  # not to root
        return path.chmod(0)
    path.unlink()
    if kind in CONTENTS:
        path.write_bytes(kind(chance, data, others))
    elif kind == 'a directory':
        path.mkdir()
    elif kind == 'a FIFO':
        os.mkfifo(path)
    elif kind != 'removed':
        path.symlink_to(chance.choice(others) if kind == 'a link' else path.with_name('nothing'))


def corrupt(bench, chance):
    """→ (what was done, what is wrong with what came of it or None, whether it was noticed)."""
    bench.reset()
    files = [path for folder in ('out', 'data') for path in sorted((bench.work / folder).rglob('*'))
             if path.is_file() and path.suffix in ('.json', '.jsonl', '.bin', '.safetensors',
                                                   '.sha256')]
    latest = state_of(bench.work).parent
    path = chance.choice([path for path in files if path.parent == latest]
                         if chance.random() < 0.4 else files)
    kind = chance.choice(KINDS)
    name = chance.choice(
        ('resume', 'inspect') if path.suffix == '.bin' else
        ('resume', 'inspect', 'evaluate') if path.name == 'meta.json' else
        ('resume', 'resume', 'resume', 'export') if 'optimizer' in path.name else
        ('resume', 'sample', 'evaluate', 'export') if 'checkpoints' in path.parts else
        ('resume', 'plot'))
    expected = bench.expected(name)
    bench.reset()
    before = path.read_bytes()
    damage(path, kind, chance, [other for other in files if other != path])
    outcome, result = bench.read(name)
    problem = outcome.problem()
    told = any(line.startswith(('error: ', 'warning: ')) and path.parent.name in line
               for line in outcome.said.splitlines())
    has_checksum = path.suffix == '.bin' or 'checkpoints' in path.parts
    is_read = path.suffix == '.bin' or (
        path.parent == latest and (name == 'resume' or 'optimizer' not in path.name))
    changed = not path.is_file() or path.read_bytes() != before
    if problem is None and has_checksum and changed and not told and (
            is_read or result != expected):
        problem = 'undetected'
    if problem is None and name == 'resume' and outcome.code == 0 and result != expected \
            and path.name != 'meta.json':
        problem = 'it went on, to other weights'
    return f'{path.relative_to(bench.work)}, {getattr(kind, "__name__", kind)}: {name}', problem, \
        'noticed' if told else 'without effect'


# -----------------------------------------------------------------------------
# hostile JSON


JUNK = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, -10**9, 1.5, -0.5, 1e300, math.nan,
        math.inf, '', 'x', '\ud800', '\x1b[2J', 'x' * 5000, '../../etc/passwd', [], {}, [[]],
        [1, 'x', None], {'a': {'b': []}}, '\0')


def mutate(value, chance):
    """A copy with one place changed: replaced, removed, added or nested."""
    value = json.loads(json.dumps(value))
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        deeper = [key for key in keys if isinstance(place[key], (dict, list)) and place[key]]
        if not deeper or chance.random() < 0.5:
            break
        place = place[chance.choice(deeper)]
    junk = chance.choice(JUNK) if chance.random() < 0.8 else deep(chance.choice((10, 60, 900)))
    if not len(keys):
        return junk
    key = chance.choice(keys)
    match chance.choice(('replace', 'replace', 'replace', 'remove', 'add', 'all')):
        case 'replace':
            place[key] = junk
        case 'remove':
            del place[key]
        case 'add' if isinstance(place, dict):
            place[chance.choice(('new', '', 'iter_num', '\ud800', 'x' * 300))] = junk
        case 'add':
            place.append(junk)
        case 'all':
            value = junk
    return value


def written(value, chance):
    """The text of a value; now and then it is nested, or numbered, beyond reason."""
    text = json.dumps(value)
    match chance.randrange(30):
        case 0:
            return '[' * 10**6
        case 1:
            return '{"a":' * 10**5 + '1' + '}' * 10**5
        case 2:
            return text.replace('1', '1' * 5000, 1)
        case 3:
            return text[:-1] + ', "iter_num": 7}'
        case 4:
            return '[' + '[],' * 1_500_000 + '[]]'
    return text


def journal_of(bench):
    """Leave what a killed prepare.py leaves → its journal."""
    (bench.work / 'data/meta.json').unlink()
    folder = bench.work / 'data/unfinished'
    folder.mkdir()
    path = folder / 'journal.json'
    path.write_text(json.dumps({'command': {}, 'tokenizer': {'kind': 'byte'}, 'count': 0, 'at': 0,
                                'mark': None, 'width': 2, 'splits': {}, 'sha256': ''}))
    return path


def plot_beside(folder, argv):
    """plot.py with the reference hostile.jsonl of that folder."""
    references.FOLDER = folder
    plot.main([*argv, '--reference=hostile'])


def hostile_json(bench, chance):
    """→ (what was written, what is wrong with what came of it, whether it was refused)."""
    bench.reset()
    kind = chance.choice(('state.json', 'config.json', 'plaingpt_tokenizer.json', 'meta.json',
                          'run.json', 'metrics.jsonl', 'anomalies.jsonl', 'journal', 'reference'))
    command = {'state.json': ('resume', 'sample', 'evaluate', 'export'), 'run.json': ('plot',),
               'config.json': ('sample hf',), 'plaingpt_tokenizer.json': ('sample hf',),
               'meta.json': ('resume', 'inspect'), 'metrics.jsonl': ('plot', 'resume'),
               'anomalies.jsonl': ('resume',)}.get(kind, (kind,))
    command = chance.choice(command)
    if kind in ('metrics.jsonl', 'anomalies.jsonl', 'reference'):
        path = bench.work / 'out' / kind
        if kind != 'metrics.jsonl':
            path = bench.work / ('hostile.jsonl' if kind == 'reference' else 'out/anomalies.jsonl')
        run = json.loads((bench.work / 'out/run.json').read_text())
        rows = [json.loads(line) for line in
                (bench.work / 'out/metrics.jsonl').read_text().splitlines()]
        if kind == 'reference':
            rows = [{'seed': 1, 'run': run}, *({'seed': 1, **row} for row in rows)]
        for at in {chance.randrange(len(rows)) for _ in range(3)}:
            rows[at] = mutate(rows[at], chance)
        path.write_text(''.join(written(row, chance) + '\n' for row in rows))
    else:
        path = state_of(bench.work) if kind == 'state.json' else journal_of(bench) \
            if kind == 'journal' else bench.work / {'run.json': 'out', 'meta.json': 'data'}.get(
                kind, 'hf') / kind
        value = json.loads(path.read_text(encoding='utf-8'))
        for _ in range(chance.randrange(1, 4)):
            value = mutate(value, chance) if isinstance(value, (dict, list)) else value
        text = written(value, chance)
        write_state(path, text) if kind == 'state.json' else path.write_text(text)
    if kind == 'journal':
        outcome = attempt(bench.log, lambda _: bench.prepare())
    elif kind == 'reference':
        outcome = attempt(bench.log, partial(plot_beside, bench.work), bench.work / 'out')
    else:
        outcome, _ = bench.read(command)
    return f'{kind}: {command}', outcome.problem(), 'refused' if outcome.code else 'read'


# -----------------------------------------------------------------------------
# hostile models


def hostile_model(bench, chance):
    """→ (what was written, what is wrong with how it was refused, 'refused')"""
    bench.reset()
    what, command = chance.choice(WRITERS)(bench.work, chance)
    outcome, _ = bench.read(command)
    problem = outcome.problem() or (None if outcome.code else 'it was taken for a model')
    if outcome.seconds > SECONDS or outcome.memory > MEMORY:
        problem = f'{outcome.seconds:.1f} s, {outcome.memory / 1e6:.0f} MB'
    return what, problem, 'refused'


# -----------------------------------------------------------------------------


def rounds(name, act, bench, count, config):
    """→ how many went wrong; each has a chance of its own, so that --only can repeat it."""
    wrong, results = 0, Counter()
    for i in range(count) if config.only < 0 else [config.only] * bool(count):
        what, problem, result = act(bench, random.Random(f'{config.seed} {name} {i}'))
        results[result] += 1
        if problem:
            wrong += 1
            print(f'WRONG: {name} {i}: {what}: {problem}\n{bench.log.read_text()[-1500:]}')
    counts = ', '.join(f'{n} {result}' for result, n in sorted(results.items()))
    print(f'{name}: {sum(results.values())} ({counts}): {wrong} wrong', flush=True)
    return wrong


def main(argv):
    config = load_config(TortureFilesConfig, argv, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        wrong = rounds('corruptions', corrupt, bench, config.corruptions, config)
        wrong += rounds('hostile JSON', hostile_json, bench, config.json, config)
        wrong += rounds('hostile models', hostile_model, bench, config.models, config)
    print('nothing went wrong' if not wrong else f'{wrong} went wrong')
    sys.exit(wrong > 0)


if __name__ == '__main__':
    run_script(main)
