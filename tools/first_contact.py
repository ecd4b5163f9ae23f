"""Measure what is worth measuring on a GPU that is at hand for a short time. No network.

    python tools/first_contact.py --out=FOLDER [--input=TEXT] [--nanogpt=FOLDER] [--tokens=FOLDER]

A call takes at most --minutes. The same command goes on with what is not measured yet. --input is
the text to train on, --nanogpt nanoGPT's folder, --tokens a prepared dataset of GPT-2 tokens; a
step whose folder is not given is left out. FOLDER/measured.jsonl gets a line for each step when it
ends, with its result or the reason why there is none; FOLDER/log has what the steps print, while
they run; FOLDER/page.md has the tables. --tiny rehearses all of it with tiny shapes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import load_config
from plaingpt.experiments.tables import describe_measurement, markdown, number
from plaingpt.system.devices import choose_device, choose_dtype
from plaingpt.system.errors import run_script
from plaingpt.system.files import ROOT, append_line, make_writable, parse_json, write_atomically
from plaingpt.system.formatting import printable, short

GRACE_S = 15  # for a step to save and end, when its time is over
LEAST_S = 20  # a step is not begun with less


@dataclass
class ContactConfig:
    out: str = ''  # folder for what is measured
    input: str = ''  # text to train on; without it nothing is trained
    nanogpt: str = ''  # nanoGPT's folder; without it there is no comparison
    tokens: str = ''  # prepared GPT-2 tokens, for gpt2_124m_fast; without it there is no such run
    device: str = 'auto'  # auto, cpu, cuda
    tiny: bool = False  # a rehearsal: the same steps with tiny shapes, whose figures mean nothing
    minutes: float = 9.0  # that a call takes at most

    def problems(self):
        found = [] if self.out else ['say where the results go: --out=FOLDER']
        if self.nanogpt and not Path(self.nanogpt, 'bench.py').is_file():
            found.append(f"nanogpt={self.nanogpt}: no bench.py there: give nanoGPT's folder")
        return found


class Step(NamedTuple):
    name: str
    seconds: int  # that it may take
    command: list  # paths of our .py files from the root of the project
    needs: tuple = ()  # of input, nanogpt, tokens: options that must be given; and cuda


ONE_MICRO_BATCH = ['--total_batch_size=0', '--gradient_accumulation_steps=1']
TINY_STEP = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--vocab_size=300',
             '--total_batch_size=512']
TINY_RUN = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=8',
            '--max_iters=4', '--eval_interval=2', '--eval_iters=2', '--log_interval=2',
            '--warmup_iters=0', '--lr_decay_iters=4', '--total_batch_size=0']


def bench(config, name, recipe, *argv, seconds=100, needs=()):
    trace = [f'--out_dir={config.out}/run'] if '--profile' in argv else []
    return Step(name, seconds, ['bench.py', f'config/{recipe}.py', f'--device={config.device}',
                                '--json', *trace, *argv], needs)


def speed_steps(config, dtype):
    """Speed and memory of a step. dtype: of the device; nanoGPT is told to take it."""
    small, large = (2, 4) if config.tiny else (16, 64)
    shape = TINY_STEP if config.tiny else []
    few = ['--steps=2', '--warmup_steps=1'] if config.tiny else ['--steps=8']

    def speed(name, *argv, recipe='gpt2_124m'):
        return bench(config, name, recipe, *shape, *few, *argv)

    for turn in ('', ', again'):  # whole processes in turn
        for batch in (small, large):
            yield speed(f'batch {batch}, one micro-batch{turn}', f'--batch_size={batch}',
                        *ONE_MICRO_BATCH)
            yield Step(f'nanoGPT, batch {batch}{turn}', 100, [
                f'{config.nanogpt}/bench.py', f'--batch_size={batch}', '--real_data=False',
                f'--dtype={dtype}', '--compile=True'], ('nanogpt', 'cuda'))
    for batch in (small, large):
        for chunk in (2048, 8192):
            yield speed(f'batch {batch}, chunk {chunk}', f'--batch_size={batch}',
                        f'--loss_chunk_tokens={chunk}')
    yield speed('eager', f'--batch_size={small}', '--compile=False')
    yield speed('profile', f'--batch_size={small}', '--profile')
    for optimizer in ('normuon', 'adamw'):
        yield speed(f'fast recipe, {optimizer}', f'--optimizer={optimizer}',
                    f'--batch_size={large}', recipe='gpt2_124m_fast')
    for batch in (large, small):
        for kind in ('none', 'selective', 'full'):
            yield bench(config, f'memory, batch {batch}, checkpointing {kind}', 'gpt2_124m',
                        '--memory', *shape, f'--batch_size={batch}',
                        f'--activation_checkpointing={kind}', *ONE_MICRO_BATCH, seconds=60)


def training_steps(config):
    """Generation, trainings that differ, and the fast recipe as far as it comes."""
    text = f'{config.out}/text'
    run = [*(TINY_RUN if config.tiny else []), f'--dataset={text}', f'--save={config.out}']
    yield Step('text', 120, ['prepare.py', 'text', f'--input={config.input}', '--tokenizer=char',
                             f'--data_dir={text}'], ('input',))
    few = ['--shapes=tiny', '--max_new_tokens=4', '--rounds=1'] if config.tiny else []
    yield Step('generation', 200, ['tools/compare.py', 'generation', '--json', *few,
                                   f'--device={config.device}'])
    yield bench(config, 'quickstart in each precision', 'quickstart', '--seeds=2', *run,
                '--sweep=dtype=float32,bfloat16,float16', seconds=400, needs=('input',))
    yield bench(config, 'ladder', 'gpt2_124m', '--variants=ladder', '--seeds=1', '--max_iters=30',
                '--eval_iters=1', '--log_interval=5', '--warmup_iters=5', *ONE_MICRO_BATCH, *run,
                seconds=500, needs=('input',))
    yield bench(config, 'grid', 'shakespeare_char', '--variants=grid', '--seeds=1',
                '--compile=False', '--max_iters=100', '--eval_interval=50', '--eval_iters=20',
                '--warmup_iters=10', *run, seconds=500, needs=('input',))
    yield Step('gpt2_124m_fast', 500, [
        'train.py', 'config/gpt2_124m_fast.py', '--eval_interval=25', *run[:-2], '--report=False',
        '--sample_tokens=0', f'--dataset={config.tokens}', f'--out_dir={config.out}/fast',
        f'--device={config.device}'], ('tokens',))


def read_result(step, printed):
    """What a step printed → {'rows', 'table'}. ValueError: there is no result in it."""
    if step.name.startswith('nanoGPT'):
        ms = float(re.search(r'time per iteration: ([\d.]+)ms', printed)[1])
        batch = int(re.search(r'\d+', step.name)[0])
        return {'rows': [{'step_ms': ms, 'batch_size': batch, 'tokens_per_s': batch * 1024e3 / ms}]}
    if step.command[0] == 'train.py':
        curve = re.findall(r'iter +([\d,]+) .*?val loss ([\d.]+)', printed)
        return {'rows': curve, 'table': markdown(['iteration', 'validation loss'], curve)}
    return json.loads(printed) if step.command[0] != 'prepare.py' else {'rows': []}


def run_step(step, seconds, log):
    """→ (exit code, None where its time was over; what it printed; why it failed, in a line)"""
    command = [sys.executable, *(str(ROOT / word) if re.fullmatch(r'[\w/]+\.py', word) else word
                                 for word in step.command)]
    with log.open('a+b', buffering=0) as errors:
        errors.write(f'\n{step.name}: {" ".join(command)}\n'.encode())
        start = errors.tell()
        code, printed = None, b''
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=errors, start_new_session=True,
                                   env={**os.environ, 'HF_HUB_OFFLINE': '1'})
        try:
            printed = process.communicate(timeout=seconds)[0]
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # it alone: a run of train.py saves and ends
            with suppress(subprocess.TimeoutExpired):
                printed = process.communicate(timeout=GRACE_S)[0]
        finally:  # the processes that it started too, and where this one is stopped itself
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(start)
        said = errors.read().decode(errors='replace').strip().splitlines() or ['']
    why = next((line for line in reversed(said) if line.startswith('error: ')), said[-1])
    return code, printed.decode(errors='replace'), printable(f'exit code {code}: {why}'[:300])


def measure(steps, config, known, record):
    """Run the steps that have no result yet, and append a line for each to the record."""
    deadline = time.monotonic() + 60 * config.minutes
    for step in steps:
        missing = [key for key in step.needs if not (
            choose_device(config.device)[0].type == 'cuda' if key == 'cuda'
            else getattr(config, key))]
        seconds = min(step.seconds, deadline - time.monotonic() - GRACE_S)
        if known.get(step.name, {}).get('result') is not None:
            continue
        result, began = None, time.monotonic()
        if missing:
            ended = f'not run: it needs {", ".join(missing)}'
        elif seconds < LEAST_S:
            ended = 'not run: no time was left'
        else:
            print(f'{step.name}: at most {seconds:.0f} s …', flush=True)
            code, printed, why = run_step(step, seconds, record.with_name('log'))
            ended = 'measured' if code == 0 else 'its time was over' if code is None else why
            if code == 0 or (code is None and step.command[0] == 'train.py'):
                try:
                    result = read_result(step, printed)
                except (ValueError, TypeError):
                    ended = 'what it printed cannot be read'
        known[step.name] = {'step': step.name, 'ended': ended, 'result': result,
                            'tiny': config.tiny, 'seconds': round(time.monotonic() - began, 1)}
        append_line(record, known[step.name])
        print(f'{step.name}: {ended}', flush=True)


def read_record(path, tiny):
    """→ {name: the last line of a step}; damaged lines and those of a rehearsal, or of none, are
    left out."""
    known = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = parse_json(line)
            known |= {row['step']: row} if row['tiny'] == tiny else {}
    return known


def format_measured(facts, steps, known, tiny):
    """→ Markdown: all speeds beside nanoGPT's, each step's own table, and what is missing."""
    measured = {name: row['result'] for name, row in known.items() if row['result']}
    speeds = {name: result['rows'][0] for name, result in measured.items()
              if 'tokens_per_s' in (result['rows'] or [''])[0] and name != 'generation'}
    theirs = {row['batch_size']: row['tokens_per_s'] for name, row in speeds.items()
              if name.startswith('nanoGPT')}
    table = [[name, f'{row["step_ms"]:.1f}', short(row['tokens_per_s']),
              number('.2f', theirs.get(row['batch_size'])
                     and row['tokens_per_s'] / theirs[row['batch_size']]),
              number('.1%', row.get('mfu'))] for name, row in speeds.items()]
    parts = [f'# {facts["machine"]}, torch {facts["torch"]}, {facts["date"]}',
             *['This is a rehearsal with tiny shapes: the figures mean nothing.'] * tiny,
             markdown(['', 'ms a step', 'tokens/s', '× nanoGPT, same batch', 'MFU'], table)]
    parts += [f'## {name}\n\n{result["table"]}' for name, result in measured.items()
              if 'table' in result]
    missing = [f'{step.name} ({known[step.name]["ended"]})' for step in steps
               if known[step.name]['result'] is None]
    return '\n\n'.join(parts + [f'Not measured: {"; ".join(missing)}.'] * bool(missing)) + '\n'


def main(argv):
    config = load_config(ContactConfig, argv, __doc__)
    make_writable(config.out, 'out')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the step ends too
    device, _ = choose_device(config.device)
    facts = describe_measurement(device, [])
    config.out = str(Path(config.out).resolve())
    steps = [*speed_steps(config, choose_dtype('auto', device, 768)[0]), *training_steps(config)]
    record = Path(config.out, 'measured.jsonl')
    known = read_record(record, config.tiny)
    measure(steps, config, known, record)
    page = record.with_name('page.md')
    write_atomically(page, format_measured(facts, steps, known, config.tiny))
    print(f'{page}: the tables; {record}: the figures')
    if not any(row['result'] for row in known.values()):
        sys.exit('nothing was measured: the reasons are above')


if __name__ == '__main__':
    run_script(main)
