"""Send signals to training at random instants and see that it stops well and loses nothing.

    python tools/torture_signals.py --signals=300 --seed=1

Each round is one run to its end, stopped again and again on the way, while it starts, trains,
evaluates, saves or ends, and resumed with --init_from=auto. Now and then it is killed instead. It
must exit with 0, but where the signal came before training or after its last line, and never show a
traceback. The final weights and all losses must equal those of an uninterrupted run, bit for bit.
"""

import os
import sys
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny models; and forking wants no threads
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tools')]

import random
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

from helpers import exit_code, options
from torture import SETTINGS, hash_checkpoint, make_data, run, run_whole, start

import train
from configurator import load_config
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import run_script
from plaingpt.training.checkpoint import checkpoint_paths, find


@dataclass
class SignalsConfig:
    signals: int = 300  # how many to send
    seed: int = 0  # of the instants


EXTRA = options(max_iters=24, eval_interval=7, eval_iters=12, health_interval=6,
                sample_interval=5, sample_tokens=8, checkpoint_async=True)


def result(out_dir):
    """The final weights as a digest, and all losses by iteration."""
    rows = [(row['iter'], key, row[key]) for row in read_rows(Path(out_dir, 'metrics.jsonl'), print)
            for key in ('loss', 'train_loss', 'val_loss', 'sample') if key in row]
    return hash_checkpoint(out_dir), rows


def hit(pid, name, log):
    """Send the signal and wait → (where it hit, or None where the run had ended; what is wrong)."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(pid, getattr(signal, name))
    else:
        name = None
    code, told = exit_code(pid), log.read_text()
    training, ended = re.search('^iter ', told, re.M), re.search('^done|: stopped', told, re.M)
    where = 'the end' if ended else 'training' if training else 'the start'
    good = (0,) if name is None else (-signal.SIGKILL,) if name == 'SIGKILL' \
        else (0, 130, -getattr(signal, name)) if ended or not training else (0,)
    wrong = code not in good or 'Traceback' in told
    if name and code == 0 and f'{name}: stopped' in told:
        where = 'training'
    return name and where, f'{name} in {where}: exit code {code}\n{told}' if wrong else None


def rounds(root, data, signals, chance, expected, duration):
    """→ (how many signals hit where, problems)"""
    hits, problems, number = Counter(), [], 0
    while hits.total() - hits['evaluations cut short'] < signals:
        out_dir = root / f'round-{number}'
        log = Path(f'{out_dir}.log')
        number += 1
        for _ in range(8):
            pid = start(out_dir, data, *EXTRA)
            time.sleep(chance.uniform(0, duration))
            where, problem = hit(pid, chance.choice([*StopRequest.NAMES * 2, 'SIGKILL']), log)
            problems += [problem] if problem else []
            if where is None:
                break
            hits[where] += 1
            if where == 'training' and checkpoint_paths(out_dir):
                found = find(out_dir)
                hits['evaluations cut short'] += \
                    found.iter_num % 7 == 0 and not found.state['evaluated']
        code = run(out_dir, data, *EXTRA)
        if code or result(out_dir) != expected:
            problems.append(f'{out_dir}: exit code {code}, or not the same bits\n{log.read_text()}')
    return hits, number, problems


def main(argv):
    config = load_config(SignalsConfig, argv, __doc__)
    chance = random.Random(config.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = make_data(root)
        # What torch imports late is imported here, once, and not in each fork.
        train.main([*SETTINGS, *EXTRA, f'--out_dir={root}/warmup', f'--dataset={data}',
                    '--max_iters=1'])
        duration = run_whole(root, data, *EXTRA)
        hits, runs, problems = rounds(root, data, config.signals, chance, result(root / 'whole'),
                                      duration)
    for problem in problems:
        print(f'WRONG: {problem}')
    cut = hits.pop('evaluations cut short', 0)
    print(f'{hits.total()} signals in {runs} runs, {hits["training"]} of them in training ({cut} '
          f'evaluations cut short), {hits["the start"]} at its start, {hits["the end"]} at its '
          f'end: {len(problems)} went wrong')
    sys.exit(bool(problems))


if __name__ == '__main__':
    run_script(main)
