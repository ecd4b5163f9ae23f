"""Measure what is worth measuring on a GPU that is at hand for a short time. No network.

    python tools/first_contact.py PART --out=FOLDER [--nanogpt=FOLDER] [--input=TEXT]

PART is speed, options, memory, generation, precision, ladder, grid or fast; a call measures one
and takes at most --minutes. FOLDER/PART.md has what its commands print, while they run, and their
seconds. precision, ladder and grid train on the text --input, and fast on --dataset, a folder of
GPT-2 tokens. With --nanogpt, speed is measured beside nanoGPT's. --tiny rehearses a part.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import load_config
from plaingpt.system.errors import run_script
from plaingpt.system.files import ROOT, make_writable

GRACE_S = 15  # for a command to save and end, when the time of the call is over
ONE_MICRO_BATCH = ['--total_batch_size=0', '--gradient_accumulation_steps=1']
TINY_STEP = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--vocab_size=300',
             '--total_batch_size=512']
TINY_RUN = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=8',
            '--max_iters=4', '--eval_interval=2', '--eval_iters=2', '--log_interval=2',
            '--warmup_iters=0', '--lr_decay_iters=4', '--total_batch_size=0']


@dataclass
class ContactConfig:
    part: Literal['speed', 'options', 'memory', 'generation', 'precision', 'ladder', 'grid',
                  'fast'] = 'speed'  # what to measure
    out: str = ''  # folder for what is measured
    input: str = ''  # precision, ladder, grid: text to train on
    nanogpt: str = ''  # speed: nanoGPT's folder; without it there is no comparison
    dataset: str = ''  # fast: folder of prepared GPT-2 tokens
    device: str = 'auto'  # auto, cpu, cuda
    tiny: bool = False  # a rehearsal: the same commands with tiny shapes; figures mean nothing
    minutes: Annotated[float, 'above 0'] = 7.5  # that a call takes at most

    def problems(self):
        found = [] if self.out else ['say where the results go: --out=FOLDER']
        if self.nanogpt and not Path(self.nanogpt, 'bench.py').is_file():
            found.append(f"nanogpt={self.nanogpt}: no bench.py there: give nanoGPT's folder")
        if self.part in ('precision', 'ladder', 'grid') and not self.input:
            found.append(f'{self.part} trains: say on which text with --input=FILE')
        if self.part == 'fast' and not self.dataset:
            found.append('fast trains: say on which GPT-2 tokens with --dataset=FOLDER')
        found += [f'{key}={path}: not there' for key, path in (
            ('input', self.input), ('dataset', self.dataset)) if path and not Path(path).exists()]
        return found


def commands(config):
    """→ the command lines of a part, in turn: lists of words, the first one a script of ours"""
    device, out = f'--device={config.device}', config.out
    small, large = (2, 4) if config.tiny else (16, 64)
    tiny_run = TINY_RUN if config.tiny else []

    def step(*options, recipe='gpt2_124m'):
        shape = [*TINY_STEP, '--steps=2', '--warmup_steps=1'] if config.tiny else ['--steps=8']
        return ['bench.py', f'config/{recipe}.py', device, *shape, *options]

    def trainings(recipe, *options):
        text = [] if Path(out, 'text').exists() else [
            ['prepare.py', 'text', f'--input={config.input}', '--tokenizer=char',
             f'--data_dir={out}/text']]
        return [*text, ['bench.py', f'config/{recipe}.py', device, *options, *tiny_run,
                        f'--dataset={out}/text', f'--save={out}']]

    def nanogpt(batch):
        return [f'{config.nanogpt}/bench.py', f'--batch_size={batch}', '--real_data=False',
                '--dtype=bfloat16', '--compile=True']

    if config.part == 'speed':  # twice, in turn
        return 2 * [command for batch in (small, large) for command in (
            step(f'--batch_size={batch}', *ONE_MICRO_BATCH),
            *([nanogpt(batch)] if config.nanogpt else []))]
    if config.part == 'options':
        return [*(step(f'--batch_size={large}', f'--loss_chunk_tokens={chunk}')
                  for chunk in (2048, 8192)),
                step(f'--batch_size={small}', '--compile=False'),
                step(f'--batch_size={small}', '--profile', f'--out_dir={out}/trace'),
                *(step(f'--batch_size={large}', f'--optimizer={name}', recipe='gpt2_124m_fast')
                  for name in ('normuon', 'adamw'))]
    if config.part == 'memory':
        return [step('--memory', f'--batch_size={batch}', *ONE_MICRO_BATCH,
                     f'--activation_checkpointing={kind}')
                for batch in (large, small) for kind in ('none', 'selective', 'full')]
    if config.part == 'generation':
        few = ['--shapes=tiny', '--max_new_tokens=4', '--rounds=1'] if config.tiny else []
        return [['tools/compare.py', 'generation', '--rounds=2', *few, device]]
    if config.part == 'precision':
        return trainings('quickstart', '--seeds=2', '--sweep=dtype=float32,bfloat16,float16')
    if config.part == 'ladder':
        return trainings('gpt2_124m', '--variants=ladder', '--seeds=1', '--max_iters=30',
                         '--eval_iters=1', '--log_interval=5', '--warmup_iters=5', *ONE_MICRO_BATCH)
    if config.part == 'grid':
        return trainings('shakespeare_char', '--variants=grid', '--seeds=1', '--compile=False',
                         '--max_iters=100', '--eval_interval=50', '--eval_iters=20',
                         '--warmup_iters=10')
    return [['train.py', 'config/gpt2_124m_fast.py', device, '--eval_interval=25', *tiny_run,
             '--sample_tokens=0', f'--dataset={config.dataset}', f'--out_dir={out}/fast']]


def run(command, seconds, output):
    """What it prints goes into the file `output` → its exit code; None where its time was over."""
    script = ROOT / command[0]
    process = subprocess.Popen(
        [sys.executable, script, *command[1:]], cwd=script.parent, stdin=subprocess.DEVNULL,
        stdout=output, stderr=output, env={**os.environ, 'HF_HUB_OFFLINE': '1'},
        start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # it alone: a run of train.py saves and ends
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # the processes that it started too, and where this one is stopped itself
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv):
    config = load_config(ContactConfig, argv, __doc__, positional='part')
    make_writable(config.out, 'out')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the command ends too
    for key in ('out', 'input', 'nanogpt', 'dataset'):
        if getattr(config, key):
            setattr(config, key, str(Path(getattr(config, key)).resolve()))
    began, ended = time.monotonic(), []
    page = Path(config.out, f'{config.part}.md')
    with page.open('w', buffering=1, encoding='utf-8') as output:
        for command in commands(config):
            name, start = ' '.join(command), time.monotonic()
            print(name, flush=True)
            print(f'## {name}\n\n```', file=output)
            code = run(command, max(0, 60 * config.minutes - GRACE_S - (start - began)), output)
            ended.append({None: 'its time was over', 0: 'measured'}.get(code, f'exit code {code}'))
            line = f'{ended[-1]}, {time.monotonic() - start:.0f} s'
            print(f'```\n{line}\n', file=output)
            print(line, flush=True)
    print(f'{page}: what was measured, in {time.monotonic() - began:.0f} s')
    sys.exit(0 if {*ended} == {'measured'} else 1)


if __name__ == '__main__':
    run_script(main)
