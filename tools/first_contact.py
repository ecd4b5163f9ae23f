"""Measure what is worth measuring on a GPU, in four parts of at most nine minutes each.

    python tools/first_contact.py --out=FOLDER --part=1 [--input=TEXT] [--nanogpt=FOLDER]
    python tools/first_contact.py --render=FOLDER [--to=FOLDER]

1 speed of a step, beside nanoGPT   2 memory, precision, checkpoints
3 ladder, resuming, generation      4 the grid on the baby GPT, gpt2_124m_fast

Each part stands alone and needs no network. FOLDER/part-1.jsonl gets a line for each step when it
ends, FOLDER/part-1.log what the steps print while they run. A step that its time or the part's did
not allow, that failed, or whose text, tokens or nanoGPT is not there is noted with the reason. A
part in which nothing could be measured ends with exit code 1. --render writes what was measured
into results/ and docs/benchmarks.md.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import load_config
from plaingpt.benchmarks.contact_page import render
from plaingpt.benchmarks.result_tables import describe_measurement
from plaingpt.data.dataset import open_dataset
from plaingpt.data.sources import Files, find_files
from plaingpt.system.devices import choose_device, choose_dtype, device_name
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, append_line, make_writable, parse_json
from plaingpt.system.formatting import printable

GRACE_S = 15  # for a step to save and end, when its time is over
LEAST_S = 20  # a step is not begun with less


@dataclass
class ContactConfig:
    out: str = ''  # folder for what is measured
    part: int = 0  # 1 to 4
    input: str = ''  # text to train on; without it nothing is trained
    nanogpt: str = ''  # nanoGPT's folder; without it there is no comparison
    tokens: str = ''  # prepared GPT-2 tokens, for gpt2_124m_fast; without it there is no such run
    device: str = 'auto'  # auto, cpu, cuda
    tiny: bool = False  # a rehearsal: the same steps with tiny shapes
    minutes: float = 9.0  # that a part takes at most, 1 or more
    render: str = ''  # a folder of earlier parts: write its tables
    to: str = ''  # render: write into this folder's results/ and docs/, not the project's
    machine: bool = False  # print what this machine is, as JSON

    def problems(self):
        if self.machine:
            return []
        if self.render:
            return [] if Path(self.render).is_dir() else [f'render={self.render}: no such folder']
        found = [] if self.out else ['say where the results go: --out=FOLDER']
        if self.to:
            found.append(f'to={self.to}: it is for --render=FOLDER')
        if not 1 <= self.part <= 4:
            found.append(f'part={self.part}: it is 1, 2, 3 or 4')
        if self.minutes < 1:
            found.append(f'minutes={self.minutes}: a part takes 1 or more')
        for key, check in (('device', choose_device), ('input', read_all), ('tokens', open_dataset),
                           ('nanogpt', find_bench)):
            value = getattr(self, key)
            try:
                if value:
                    check(value)
            except UserError as problem:
                text = str(problem).removeprefix(f'{value}: ')
                found.append(text if text.startswith(f'{key}=') else f'{key}={value}: {text}')
        return found


def read_all(wanted):
    """See that prepare.py can read a text, before minutes are measured without it. UserError."""
    if not sum(len(piece.text) for piece in Files(find_files(wanted), wanted).pieces()):
        raise UserError('there is no text in it')


def find_bench(folder):
    if not Path(folder, 'bench.py').is_file():
        raise UserError("no bench.py there: give the folder of nanoGPT's code")


# -----------------------------------------------------------------------------
# what is measured


class Step(NamedTuple):
    """One command, and how its result is read."""

    name: str
    kind: str  # the table that it belongs to
    seconds: int  # that it may take
    command: list  # paths of our .py files from the root of the project
    read: Callable = json.loads  # what it printed → result; ValueError: there is none
    needs: tuple = ()  # of text, nanogpt, tokens and cuda
    even_if_stopped: bool = False  # the result counts when time is over


def read_nanogpt(printed, batch, dtype):
    found = re.search(r'time per iteration: ([\d.]+)ms', printed)
    if not found:
        raise ValueError('no time per iteration')
    ms = float(found[1])
    return {'rows': [{'batch_size': batch, 'dtype': dtype, 'compile': True, 'step_ms': ms,
                      'tokens_per_s': batch * 1024 / ms * 1e3}]}


def read_curve(_, folder):
    """Losses of a run, as far as it came."""
    lines = [parse_json(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]
    rows = [line for line in lines if 'val_loss' in line or 'tokens_per_s' in line]
    if not any('val_loss' in row for row in rows):
        raise ValueError('no evaluation')
    return {'rows': rows}


# bench.py where scaled_dot_product_attention leaves cuDNN out
NO_CUDNN = ['-c', f'import runpy, sys, torch; sys.path.insert(0, {str(ROOT)!r}); '
                  'torch.backends.cuda.enable_cudnn_sdp(False); '
                  f'runpy.run_path({str(ROOT / "bench.py")!r}, run_name="__main__")']


class Plan:
    """The steps of each part. scratch: a folder for what is not kept; dtype: of the device, which
    nanoGPT is told to take too"""

    def __init__(self, config, scratch='', dtype='bfloat16'):
        self.config, self.scratch, self.dtype, tiny = config, scratch, dtype, config.tiny
        self.batches, self.chunks = ((2, 4), (32, 64)) if tiny else ((16, 64), (2048, 8192))
        self.shape = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32',
                      '--vocab_size=300', '--total_batch_size=512'] if tiny else []
        self.small = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=16',
                      '--batch_size=8', '--max_iters=4', '--eval_interval=2', '--eval_iters=2',
                      '--log_interval=2', '--warmup_iters=0', '--lr_decay_iters=4'] if tiny else []
        self.steps = ['--steps=2', '--warmup_steps=1'] if tiny else ['--steps=8']
        self.text = 'contact'  # in data/ of the folder that the steps run in

    def steps_of(self, part):
        return getattr(self, f'part_{part}')()

    def bench(self, *argv, before=()):
        """A command for bench.py. before: options of Python and its script, in place of the path"""
        return [sys.executable, *(before or ['bench.py']), f'--out_dir={self.scratch}/out', *argv,
                f'--device={self.config.device}', '--json']

    def speed(self, name, *argv, config='gpt2_124m', seconds=100, kind='speed', before=()):
        return Step(name, kind, seconds, self.bench(
            f'config/{config}.py', *self.shape, *self.steps, *argv, before=before))

    def part_1(self):
        (small, large), (short_chunk, long_chunk) = self.batches, self.chunks
        yield from self.beside_nanogpt('')
        for batch, chunk in ((small, short_chunk), (large, long_chunk), (small, long_chunk)):
            yield self.speed(f'batch {batch}, chunk {chunk}', f'--batch_size={batch}',
                             f'--loss_chunk_tokens={chunk}')
        yield self.speed('eager', f'--batch_size={small}', '--compile=False')
        yield self.speed('without cuDNN attention', f'--batch_size={small}', before=NO_CUDNN)
        yield self.speed('profile', f'--batch_size={small}', '--profile',
                         f'--out_dir={self.config.out}', kind='profile')  # which keeps the trace
        yield from self.beside_nanogpt(', again')
        yield self.speed(f'batch {large}, chunk {short_chunk}', f'--batch_size={large}',
                         f'--loss_chunk_tokens={short_chunk}')
        yield Step('baby GPT, step by step in turn', 'beside-nanogpt', 150, [
            sys.executable, 'tools/compare_nanogpt.py', 'speed', self.config.nanogpt, '--json',
            '--rounds=2' if self.config.tiny else '--rounds=50', *self.small,
            f'--dataset={self.text}', f'--device={self.config.device}'], needs=('nanogpt', 'text'))

    def beside_nanogpt(self, turn):
        """Whole processes in turn, each with one micro-batch a step, as nanoGPT's bench.py has."""
        for batch in self.batches:
            yield self.speed(f'batch {batch}, one micro-batch{turn}', f'--batch_size={batch}',
                             f'--loss_chunk_tokens={self.chunks[1]}', '--total_batch_size=0',
                             '--gradient_accumulation_steps=1')
            yield Step(f'nanoGPT, batch {batch}{turn}', 'nanogpt', 100, [
                sys.executable, f'{self.config.nanogpt}/bench.py', f'--batch_size={batch}',
                '--real_data=False', f'--dtype={self.dtype}', '--compile=True'],
                partial(read_nanogpt, batch=batch, dtype=self.dtype), ('nanogpt', 'cuda'))

    def part_2(self):
        small, large = self.batches
        for batch in (large, small):
            for kind in ('none', 'selective', 'full'):
                yield Step(f'memory, batch {batch}, checkpointing {kind}', 'memory', 60, self.bench(
                    '--memory', 'config/gpt2_124m.py', *self.shape, f'--batch_size={batch}',
                    f'--activation_checkpointing={kind}', '--total_batch_size=0',
                    '--gradient_accumulation_steps=2'))
        for optimizer in ('normuon', 'adamw'):
            yield self.speed(f'fast recipe, {optimizer}', f'--optimizer={optimizer}',
                             f'--batch_size={large}', config='gpt2_124m_fast')
        yield Step('checkpoints', 'checkpoints', 60, self.bench(
            '--checkpoints', 'config/gpt2_124m.py', *self.shape, f'--batch_size={small}',
            '--compile=False'))
        yield Step('quickstart in each mode', 'ablate', 200, self.bench(
            '--ablate', 'config/quickstart.py', '--one_by_one', '--set=compile=False,True',
            '--set=dtype=float32,bfloat16,float16', '--seeds=2', *self.small,
            f'--dataset={self.text}'), needs=('text',))
        for dtype in ('float16', 'float32', 'bfloat16'):
            yield self.speed(dtype, f'--dtype={dtype}', f'--batch_size={small}')

    def part_3(self):
        text = [f'--dataset={self.text}'] if self.config.input else []
        yield Step('ladder', 'ladder', 270, self.bench(
            '--ladder', 'config/gpt2_124m.py', '--vocab_size=50257', *self.shape, *self.steps,
            f'--batch_size={self.batches[0]}', '--rounds=1', *text), needs=('text',) * len(text))
        for compile in (False, True):
            yield Step(f'resuming, {"compiled" if compile else "eager"}', 'resuming', 150,
                       self.bench('--resuming', 'config/shakespeare_char.py', '--max_iters=100',
                                  '--eval_iters=5', *self.small, f'--compile={compile}',
                                  f'--dataset={self.text}'), needs=('text',))
        few = ['--shapes=tiny', '--max_new_tokens=4', '--rounds=1'] if self.config.tiny else []
        yield Step('generation', 'generation', 200, [
            sys.executable, 'tools/compare_generation.py', '--json', *few,
            f'--device={self.config.device}'])

    def part_4(self):
        few = self.small or ['--max_iters=100', '--eval_interval=50', '--eval_iters=20',
                             '--warmup_iters=10']
        yield Step('grid', 'grid', 400, self.bench(
            '--grid', 'config/shakespeare_char.py', *few, '--seeds=1', '--compile=False',
            f'--dataset={self.text}', f'--save={self.config.out}'), needs=('text',))
        folder = f'{self.scratch}/fast'
        few = [*self.shape, '--vocab_size=0', '--batch_size=4', '--eval_tokens=512',
               '--max_iters=4', '--eval_interval=2', '--log_interval=2'] if self.config.tiny else [
                   '--eval_interval=25', '--checkpoint_interval=100000',
                   '--always_save_checkpoint=False']
        yield Step('gpt2_124m_fast', 'training', 3600, [
            sys.executable, 'train.py', 'config/gpt2_124m_fast.py', *few, '--sample_tokens=0',
            f'--dataset={self.config.tokens}', f'--out_dir={folder}', '--report=False',
            f'--device={self.config.device}'], partial(read_curve, folder=folder), ('tokens',),
            even_if_stopped=True)


# -----------------------------------------------------------------------------
# measuring


class Part:
    """Runs steps one after another within a time, and writes down what came of each."""

    def __init__(self, config, scratch):
        self.config, self.scratch = config, scratch
        self.deadline = time.monotonic() + 60 * config.minutes
        self.record, self.log = (Path(config.out, f'part-{config.part}.{end}')
                                 for end in ('jsonl', 'log'))
        # Paths of this machine stay out of what is kept.
        names = {str(scratch): 'SCRATCH', f'{ROOT}{os.sep}': '', str(ROOT): '.',
                 sys.executable: 'python', **{getattr(config, key): key.upper() for key in
                                              ('out', 'input', 'nanogpt', 'tokens')
                                              if os.path.isabs(getattr(config, key))}}
        self.names = dict(sorted(names.items(), key=lambda pair: -len(pair[0])))
        cuda = choose_device(config.device)[0].type == 'cuda'
        self.lacks = {need: why for need, is_there, why in (
            ('text', config.input, 'no text was given (--input)'),
            ('nanogpt', config.nanogpt, 'nanoGPT was not given (--nanogpt)'),
            ('tokens', config.tokens, 'no tokens were given (--tokens)'),
            ('cuda', cuda, 'it needs CUDA')) if not is_there}

    def note(self, step, ended, began=None, result=None):
        lacking = any(need in self.lacks for need in step.needs)  # then nobody can give the command
        seconds = began and round(time.monotonic() - began, 1)
        row = {'part': self.config.part, 'step': step.name, 'kind': step.kind,
               'tiny': self.config.tiny, 'command': None if lacking else ' '.join(step.command),
               'ended': ended, 'seconds': seconds, 'result': result}
        text = json.dumps(row)
        for path, name in self.names.items():
            text = text.replace(json.dumps(path)[1:-1], name)
        append_line(self.record, json.loads(text))
        print(f'{step.name}: {ended}' + (f', {seconds} s' if began else ''), flush=True)

    def run(self, step):
        """Run a step and note what came of it → its result, or None."""
        lacking = [self.lacks[need] for need in step.needs if need in self.lacks]
        left = self.deadline - time.monotonic() - GRACE_S
        if lacking:
            return self.note(step, f'not run: {lacking[0]}')
        if left < LEAST_S:
            return self.note(step, "not run: the part's time was over")
        # Where a CPU compiles it takes minutes.
        seconds = min(step.seconds * (4 if self.config.tiny else 1), left)
        print(f'{step.name}: at most {seconds:.0f} s …', flush=True)
        began = time.monotonic()
        with self.log.open('ab+', buffering=0) as log:
            log.write(f'\n=== {step.name}: {" ".join(step.command)}\n'.encode())
            start = log.tell()
            try:
                code, printed = self.wait(step, seconds, log)
            except (KeyboardInterrupt, SystemExit):
                self.note(step, 'interrupted', began)
                raise
            log.seek(start)
            said = log.read().decode(errors='replace')
        result, ended = None, f'failed: {why_failed(said, code)}' if code else 'out of time'
        if code == 0 or (code is None and step.even_if_stopped):
            try:
                result, ended = step.read(printed), 'measured'
            except (ValueError, OSError) as problem:
                if code == 0:
                    ended = f'failed: what it printed cannot be read: {problem}'
        self.note(step, ended, began, result)
        return result

    def wait(self, step, seconds, log):
        """→ (its exit code, or None where it was stopped because its time was over; its stdout).
        The log gets all that it prints, while it runs."""
        process = subprocess.Popen(
            [str(ROOT / word) if re.fullmatch(r'[^-].*\.py', word) else word
             for word in step.command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            cwd={'nanogpt': self.config.nanogpt, 'text': None}.get(step.kind, self.scratch),
            env={**os.environ, 'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_OFFLINE': '1',
                 'PYTHONUNBUFFERED': '1'})
        printed = []
        reader = threading.Thread(target=self.copy, args=(process.stdout, printed), daemon=True)
        reader.start()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(ProcessLookupError):
                process.terminate()  # it alone: a run of train.py saves and ends
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:  # the processes that it started too, and where this one is stopped itself
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)  # a process that left the group may hold the pipe open
        return code, b''.join(printed).decode(errors='replace')

    def copy(self, stdout, printed):
        """Copy what a step prints into the log and a list, as it comes."""
        with stdout, self.log.open('ab', buffering=0) as log:
            while data := stdout.read1():
                printed.append(data)
                with suppress(OSError):  # a full disk must not stop the step
                    log.write(data)


def why_failed(said, code):
    """In a line: the last `error: …` of what a step printed, what its last traceback ended with, or
    its exit code."""
    found = re.findall(r'^error: (.+)', said, re.M) or re.findall(
        r'^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)', said, re.M)
    if found:
        return printable(found[-1].strip())[:300]
    return f'exit code {code}' if code > 0 else f'signal {-code} ({signal.strsignal(-code)})'


def measure(config):
    """Run a part. Every step is noted, whatever comes of it."""
    for number in (signal.SIGTERM, getattr(signal, 'SIGHUP', signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # the step ends too
    make_writable(config.out, 'out')
    config.out, config.nanogpt, config.tokens = (
        path and str(Path(path).resolve()) for path in (config.out, config.nanogpt, config.tokens))
    with tempfile.TemporaryDirectory() as scratch:
        part = Part(config, scratch)
        places = f'{part.record}: what was measured; {part.log}: what the steps printed'
        try:
            measured = run_steps(part)
        except (KeyboardInterrupt, SystemExit):
            print(f'{places}. The same command begins part {config.part} again'
                  + ('; its grid goes on where it was.' if config.part == 4 else '.'), flush=True)
            raise
    print(places)
    if not any(measured):
        print('nothing was measured: the reasons are above', file=sys.stderr)
        sys.exit(1)


def run_steps(part):
    """→ the results of the part's steps, None where there is none"""
    config = part.config
    machine = part.run(Step('machine', 'machine', 120, [
        sys.executable, 'tools/first_contact.py', '--machine', f'--device={config.device}']))
    plan = Plan(config, part.scratch, *([machine['dtype']] if machine else []))
    if config.input and part.run(Step('text', 'text', 120, [
            sys.executable, 'prepare.py', 'text', f'--input={config.input}', '--tokenizer=char',
            f'--data_dir={part.scratch}/data/{plan.text}'], read=lambda printed: {})) is None:
        part.lacks['text'] = 'the text could not be prepared'
    return [part.run(step) for step in plan.steps_of(config.part)]


def describe_machine(device):
    """What figures mean nothing without, beside those of describe_measurement."""
    packages = {}
    for name in ('torch', 'triton', 'transformers', 'tiktoken', 'numpy'):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    facts = describe_measurement(device, [])
    return {'device': device_name(device), 'machine': facts['machine'], 'date': facts['date'],
            'torch': facts['torch'], 'cuda': torch.version.cuda,
            'dtype': choose_dtype('auto', device, 768)[0],
            'cudnn': torch.backends.cudnn.version(), 'python': platform.python_version(),
            'cores': os.cpu_count(), 'packages': packages}


def main(argv):
    config = load_config(ContactConfig, argv, __doc__)
    if config.machine:
        print(json.dumps(describe_machine(choose_device(config.device)[0])))
    elif config.render:
        render(config.render, config.to, lambda tiny: {
            part: [step.name for step in Plan(ContactConfig(tiny=tiny)).steps_of(part)]
            for part in range(1, 5)})
    else:
        measure(config)


if __name__ == '__main__':
    run_script(main)
