"""Measure what is worth measuring on a GPU, in four parts of at most nine minutes each.

    python tools/first_contact.py --out=FOLDER --part=1 [--input=TEXT] [--nanogpt=FOLDER]
    python tools/first_contact.py --render=FOLDER

1 speed of a step, beside nanoGPT   2 memory, precision, checkpoints
3 ladder, resuming, generation      4 the grid on the baby GPT, gpt2_124m_fast

Each part stands alone and needs no network. FOLDER/part-1.jsonl gets a line for each step when it
ends, FOLDER/part-1.log what the steps print. A step that its time or the part's did not allow, that
failed, or whose text, tokens or nanoGPT is not there is noted with the reason. --render writes what
was measured into results/ and docs/benchmarks.md.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import load_config
from plaingpt.benchmarks.result_tables import describe_measurement, markdown, named_path, save
from plaingpt.system.devices import choose_device, device_name
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, append_line, make_writable, parse_json, write_atomically
from plaingpt.system.formatting import gib, short

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
    minutes: float = 9.0  # that a part takes at most
    render: str = ''  # a folder of earlier parts: write its tables
    to: str = ''  # render: write into this folder's results/ and docs/, not the project's
    machine: bool = False  # print what this machine is, as JSON

    def problems(self):
        if self.render or self.machine:
            return []
        found = [] if self.out else ['say where the results go: --out=FOLDER']
        if not 1 <= self.part <= 4:
            found.append(f'part={self.part}: it is 1, 2, 3 or 4')
        return found + [f'{key}={getattr(self, key)}: not there' for key in
                        ('input', 'nanogpt', 'tokens')
                        if getattr(self, key) and not Path(getattr(self, key)).exists()]


# -----------------------------------------------------------------------------
# what is measured


MISSING = {'text': 'no text was given (--input)', 'cuda': 'it needs CUDA',
           'nanogpt': 'nanoGPT was not given (--nanogpt)',
           'tokens': 'no tokens were given (--tokens)'}


class Step(NamedTuple):
    """One command, and how its result is read."""

    name: str
    kind: str  # the table that it belongs to
    seconds: int  # that it may take
    command: list  # paths of our .py files from the root of the project
    read: Callable = json.loads  # what it printed → result; ValueError: there is none
    needs: tuple = ()  # keys of MISSING
    even_if_stopped: bool = False  # the result counts when time is over


def read_nanogpt(printed, batch):
    found = re.search(r'time per iteration: ([\d.]+)ms', printed)
    if not found:
        raise ValueError('no time per iteration')
    ms = float(found[1])
    return {'rows': [{'batch_size': batch, 'step_ms': ms, 'tokens_per_s': batch * 1024 / ms * 1e3}]}


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
    """The steps of each part. scratch: a folder for what is not kept"""

    def __init__(self, config, scratch):
        self.config, self.scratch, tiny = config, scratch, config.tiny
        self.batches, self.chunks = ((2, 4), (32, 64)) if tiny else ((16, 64), (2048, 8192))
        self.shape = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32',
                      '--vocab_size=300', '--total_batch_size=512'] if tiny else []
        self.small = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=16',
                      '--batch_size=8', '--max_iters=4', '--eval_interval=2', '--eval_iters=2',
                      '--log_interval=2', '--warmup_iters=0', '--lr_decay_iters=4'] if tiny else []
        self.steps = ['--steps=2', '--warmup_steps=1'] if tiny else ['--steps=8']
        self.text = 'contact'  # in data/ of the folder that the steps run in

    def bench(self, *argv, before=()):
        """A command for bench.py. before: options of Python and its script, in place of the path"""
        return [sys.executable, *(before or ['bench.py']), *argv, f'--device={self.config.device}',
                f'--out_dir={self.scratch}/out', '--json']

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
        yield self.speed('profile', f'--batch_size={small}', '--profile', kind='profile')
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
                '--real_data=False'],
                partial(read_nanogpt, batch=batch), ('nanogpt', 'cuda'))

    def part_2(self):
        small, large = self.batches
        for batch in (large, small):
            for kind in ('none', 'selective', 'full'):
                yield Step(f'memory, batch {batch}, checkpointing {kind}', 'memory', 60, self.bench(
                    '--memory', 'config/gpt2_124m.py', *self.shape, f'--batch_size={batch}',
                    f'--activation_checkpointing={kind}', '--total_batch_size=0',
                    '--gradient_accumulation_steps=2'))
        for optimizer in ('muon', 'adamw'):
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
            f'--batch_size={self.batches[0]}', '--rounds=1', *text))
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
                                              if getattr(config, key)}}
        self.names = dict(sorted(names.items(), key=lambda pair: -len(pair[0])))
        self.has = {'text': False, 'nanogpt': bool(config.nanogpt), 'tokens': bool(config.tokens),
                    'cuda': choose_device(config.device)[0].type == 'cuda'}

    def note(self, step, ended, began=None, result=None):
        command = ' '.join(step.command)
        row = {'part': self.config.part, 'step': step.name, 'kind': step.kind,
               'tiny': self.config.tiny, 'command': command, 'ended': ended,
               'seconds': began and round(time.monotonic() - began, 1), 'result': result}
        text = json.dumps(row)
        for path, name in self.names.items():
            text = text.replace(json.dumps(path)[1:-1], name)
        append_line(self.record, json.loads(text))
        print(f'{step.name}: {ended}' + (f', {row["seconds"]} s' if began else ''), flush=True)

    def run(self, step):
        """Run a step and note what came of it → whether it has a result."""
        missing = [MISSING[need] for need in step.needs if not self.has[need]]
        left = self.deadline - time.monotonic() - GRACE_S
        if missing:
            self.note(step, f'not run: {missing[0]}')
            return False
        if left < LEAST_S:
            self.note(step, "not run: the part's time was over")
            return False
        # Where a CPU compiles it takes minutes.
        seconds = min(step.seconds * (4 if self.config.tiny else 1), left)
        began = time.monotonic()
        with tempfile.TemporaryFile() as printed, self.log.open('ab') as log:
            log.write(f'\n=== {step.name}: {" ".join(step.command)}\n'.encode())
            log.flush()
            code = self.wait(step, seconds, printed, log)
            printed.seek(0)
            text = printed.read().decode(errors='replace')
            log.write(text.encode())
        result, ended = None, 'out of time' if code is None else 'failed' if code else 'measured'
        if not code and (code == 0 or step.even_if_stopped):
            try:
                result, ended = step.read(text), 'measured'
            except (ValueError, OSError) as problem:
                ended = f'failed: {problem}'
        self.note(step, ended, began, result)
        return result is not None

    def wait(self, step, seconds, printed, log):
        """→ its exit code, or None where it was stopped because its time was over."""
        environment = {**os.environ, 'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_OFFLINE': '1'}
        command = [str(ROOT / word) if re.fullmatch(r'[^-].*\.py', word) else word
                   for word in step.command]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=log, env=environment,
            cwd=self.config.nanogpt if step.kind == 'nanogpt' else self.scratch,
            start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                process.terminate()  # it alone: a run of train.py saves and ends
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:  # the processes that it started too, and where this one is stopped itself
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(config):
    """Run a part. Every step is noted, whatever comes of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step ends too
    make_writable(config.out, 'out')
    with tempfile.TemporaryDirectory() as scratch:
        config.out, config.input, config.nanogpt, config.tokens = (
            path and str(Path(path).resolve())
            for path in (config.out, config.input, config.nanogpt, config.tokens))
        part, plan = Part(config, scratch), Plan(config, scratch)
        part.run(Step('machine', 'machine', 120, [
            sys.executable, 'tools/first_contact.py', '--machine', f'--device={config.device}']))
        if config.input:
            part.has['text'] = part.run(Step('text', 'text', 120, [
                sys.executable, 'prepare.py', 'text', f'--input={config.input}', '--tokenizer=char',
                f'--data_dir=data/{plan.text}'], read=lambda printed: {}))
        for step in getattr(plan, f'part_{config.part}')():
            part.run(step)
    print(f'{part.record}: what was measured; {part.log}: what the steps printed')


def describe_machine(device):
    """What figures mean nothing without, beside those of describe_measurement."""
    packages = {}
    for name in ('torch', 'triton', 'transformers', 'tiktoken', 'numpy'):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    facts = describe_measurement(device, [])
    return {'device': device_name(device), 'machine': facts['machine'], 'date': facts['date'],
            'torch': facts['torch'], 'cuda': torch.version.cuda,
            'cudnn': torch.backends.cudnn.version(), 'python': platform.python_version(),
            'cores': os.cpu_count(), 'packages': packages}


# -----------------------------------------------------------------------------
# tables of what was measured


def read_parts(folder):
    """→ (facts of the machine, {step: its row}); of steps made twice the last that was measured."""
    steps, machines = {}, {}
    for path in sorted(Path(folder).rglob('part-*.jsonl')):
        for line in path.read_text(encoding='utf-8').splitlines():
            row = parse_json(line)
            if row['kind'] == 'machine' and row['result']:
                machines[row['result']['device']] = row['result']
            key = row['part'], row['step']
            if row['result'] or not steps.get(key, row)['result']:
                steps[key] = row
    if len(machines) != 1:
        raise UserError(f'{folder}: ' + (
            f'measured on {" and ".join(machines)}: render a folder of each' if machines
            else 'no part-*.jsonl in there that says on which machine it was measured'))
    facts, = machines.values()
    return facts, [row for row in steps.values() if row['kind'] not in ('machine', 'text')]


def own_tables(steps):
    """What each step printed, with its name above."""
    rows = [{'step': step['step'], **row} for step in steps for row in step['result']['rows']]
    return rows, '\n\n'.join(f'**{step["step"]}**: {step["result"]["table"]}'
                             if 'table' in step['result'] else
                             f'**{step["step"]}**\n\n{plain_table(step["result"]["rows"])}'
                             for step in steps)


def plain_table(rows):
    return markdown([key.replace('_', ' ') for key in rows[0]],
                    [[f'{value:.4g}' if isinstance(value, float) else str(value)
                      for value in row.values()] for row in rows])


def speed_table(steps):
    """With each batch's ratio to nanoGPT's median at the same batch, where that was measured."""
    rows = [{'step': step['step'], **step['result']['rows'][0]}
            for step in sorted(steps, key=lambda step: step['kind'] == 'nanogpt')]
    theirs = {}
    for step in steps:
        if step['kind'] == 'nanogpt':
            row, = step['result']['rows']
            theirs.setdefault(row['batch_size'], []).append(row['tokens_per_s'])
    table = []
    for row in rows:
        base = theirs.get(row['batch_size'])
        row['times_nanogpt'] = row['tokens_per_s'] / median(base) if base else None
        table.append([row['step'], f'{row["step_ms"]:.1f}', short(row['tokens_per_s']),
                      *(as_text(form, row.get(key)) for key, form in (
                          ('times_nanogpt', '{:.2f}'), ('matmul_share', '{:.1%}'),
                          ('mfu', '{:.1%}'))),
                      gib(row['peak_memory_bytes']) if row.get('peak_memory_bytes') else '–'])
    return rows, markdown(['', 'ms a step', 'tokens/s', '× nanoGPT, same batch',
                           "share of a bare matmul's rate", 'MFU', 'peak memory'], table)


def as_text(form, value):
    return '–' if value is None else form.format(value)


def memory_table(steps):
    rows = [{'step': step['step'], **row} for step in steps for row in step['result']['rows']]
    return rows, markdown(
        ['peak of a step', 'allocated', 'reserved', 'planned', 'plan beside allocated'],
        [[row['step'].removeprefix('memory, '), gib(row['allocated']),
          gib(row['reserved']) if row['reserved'] else '–', gib(row['planned']),
          f'{row["planned"] / row["allocated"] - 1:+.1%}']
         for row in rows if row['stage'] == 'peak'])


def modes_table(steps):
    """With how far the seeds lie apart, to compare the modes with."""
    rows, text = own_tables(steps)
    losses = [row['final_loss'] for row in rows if row['variant'] == rows[0]['variant']]
    return rows, text + f'\n\nThe base\'s seeds end {max(losses) - min(losses):.4f} apart.'


def curve_table(steps):
    """Evaluations; the recipe's source reports 3.28 after all its steps."""
    step, = steps
    rows = [row for row in step['result']['rows'] if 'val_loss' in row]
    return rows, markdown(
        ['iteration', 'tokens', 'seconds', 'validation loss'],
        [[str(row['iter']), short(row['tokens']), f'{row["elapsed_s"]:.0f}',
          f'{row["val_loss"]:.4f}'] for row in rows]) + \
        '\n\nmodded-nanogpt reports 3.28 after 3,250 steps of this recipe.'


# What goes into results/KIND-GPU: its title, its table, whether docs/benchmarks.md shows it too.
TABLES = {
    'speed': ('Speed of a step', speed_table, True),
    'beside-nanogpt': ('Beside nanoGPT', own_tables, True),
    'profile': ('Where the time of a step goes', own_tables, False),
    'memory': ('Memory of a step', memory_table, True),
    'checkpoints': ('Checkpoints', own_tables, True),
    'ablate': ('The quickstart in each mode', modes_table, True),
    'ladder': ('Ladder', own_tables, True),
    'resuming': ('Resuming', own_tables, True),
    'generation': ('Generation', own_tables, True),
    'grid': ('Grid', own_tables, False),
    'training': ('GPT-2 124M, the fast recipe', curve_table, True)}


def render(folder, to):
    """Write results/ and the section of docs/benchmarks.md in `to` from what parts measured."""
    machine, steps = read_parts(folder)
    if not to and any(step['tiny'] for step in steps):
        raise UserError(f'{folder} is a rehearsal with tiny shapes: write its tables elsewhere, '
                        'with --to=FOLDER')
    to = Path(to or ROOT)
    for name in ('results', 'docs'):
        make_writable(to / name, 'to')
    facts = {key: machine[key] for key in ('date', 'machine', 'torch')}
    facts['command'] = 'python tools/first_contact.py'
    matmuls = [row['matmul_flops'] for step in steps if step['result'] and step['kind'] == 'speed'
               for row in step['result']['rows']]
    parts = [f'Measured by `tools/first_contact.sh` on {machine["date"]} with torch '
             f'{machine["torch"]}, CUDA {machine["cuda"]}, cuDNN {machine["cudnn"]}.' + (
                 f' A large matrix product reached {median(matmuls) / 1e12:.3g} TFLOP/s.'
                 if matmuls else '')]
    for kind, (title, table, shown) in TABLES.items():
        found = [step for step in steps if step['result'] and (
            step['kind'] == kind or (step['kind'], kind) == ('nanogpt', 'speed'))]
        if found:
            rows, text = table(found)
            path = named_path(to / 'results', kind, machine['device'])
            save(path, facts, rows, text)
            parts.append(f'**[{title}](../results/{path.name}.md)**'
                         + (f'\n\n{text}' if shown else ''))
    if missing := [f'{step["step"]} ({step["ended"].removeprefix("not run: ")})'
                   for step in steps if not step['result']]:
        parts.append(f'Not measured: {"; ".join(missing)}.')
    page = to / 'docs' / 'benchmarks.md'
    before = page.read_text(encoding='utf-8') if page.exists() else '# Benchmarks\n'
    write_atomically(page, with_section(before, f'On {machine["machine"]}', '\n\n'.join(parts)))
    print(f'{page}, {to / "results"}: written')


def with_section(page, heading, text):
    """A page with a section of that heading, in place of an earlier one or at its end."""
    found = re.search(rf'^## {re.escape(heading)}\n.*?(?=^## |\Z)', page, re.M | re.S)
    before, after = (page[:found.start()], page[found.end():]) if found else (page, '')
    return f'{before.rstrip()}\n\n## {heading}\n\n{text}\n' + (after and f'\n{after}')


def main(argv):
    config = load_config(ContactConfig, argv, __doc__)
    if config.machine:
        print(json.dumps(describe_machine(choose_device(config.device)[0])))
    elif config.render:
        render(config.render, config.to)
    else:
        measure(config)


if __name__ == '__main__':
    run_script(main)
