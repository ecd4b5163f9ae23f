"""Kill and stop training at random instants, hundreds of times, and see that nothing is lost.

    python tools/torture.py --kills=250 --signals=100 --lost=30 --seed=1

Each round is one run to its end, killed with SIGKILL again and again on the way and started anew
with --init_from=auto. Half the kills wait for a save to be under way. The final weights must equal
those of an uninterrupted run, bit for bit. Then files are cut, flipped and the disk filled.

Then rounds get signals instead, and now and then a kill, while they start, train, evaluate, save or
end. A run that got one must exit with 0, but where it came before training or after its last line,
and never show a traceback. The weights and all losses must be those of an uninterrupted run.

Then one of three processes that share a model is killed, again and again: the others must end by
themselves, and the job started anew must end with the weights of an uninterrupted one.
"""

import os
import sys
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny models; and forking wants no threads
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import argparse
import inspect
import random
import re
import resource
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

from helpers import exit_code, fork, options, ranks

import prepare
import train
from configurator import load_config
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import run_script
from plaingpt.system.files import sha256_of
from plaingpt.training.checkpoint import checkpoint_paths, find, newest_valid


@dataclass
class TortureConfig:
    kills: int = 250  # how many times to kill
    signals: int = 100  # how many to send
    lost: int = 0  # how many processes to kill in jobs of three
    seed: int = 0  # of the instants


SETTINGS = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=40,
                   gradient_accumulation_steps=2, eval_interval=10, eval_iters=2, dropout=0.2,
                   warmup_iters=2, lr_decay_iters=40, device='cpu', dtype='float32',
                   checkpoint_interval=2, init_from='auto', report=False,
                   sample_tokens=0, health_interval=0)


# of the rounds with signals
VARIED = options(max_iters=24, eval_interval=7, eval_iters=12, health_interval=6,
                 sample_interval=5, sample_tokens=8, checkpoint_async=True)


def make_data(root):
    """A prepared folder of real text that every machine has."""
    text, data = root / 'argparse.txt', root / 'data'
    text.write_text(inspect.getsource(argparse), encoding='utf-8')
    prepare.main(['text', f'--input={text}', '--tokenizer=char', f'--data_dir={data}'])
    return data


def start(out_dir, data, *extra):
    """Run train.py in a fork, which saves importing torch each time → its process id."""
    return fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={data}', *extra,
                log=f'{out_dir}.log')


def run(out_dir, data, *extra):
    """Train to the end → exit code."""
    return exit_code(start(out_dir, data, *extra))


def run_whole(root, data, *extra):
    """Train to the end in root/whole, uninterrupted → the seconds that it took."""
    began = time.monotonic()
    assert run(root / 'whole', data, *extra) == 0, Path(f'{root}/whole.log').read_text()
    return time.monotonic() - began


def saving(out_dir):
    """The temporary directories of a save that is under way, or that a kill left."""
    return set(Path(out_dir, 'checkpoints').glob('*.tmp'))


def kill_during(pid, out_dir, aim_at_save, chance, duration):
    """SIGKILL after a random time, or while a save is under way → what was hit, or None where the
    run came to its end before."""
    left_over = saving(out_dir)
    started, after = time.monotonic(), chance.uniform(0, duration)
    while time.monotonic() - started <= after or (aim_at_save and saving(out_dir) <= left_over):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return None
        time.sleep(0 if aim_at_save else 0.0005)
    time.sleep(chance.uniform(0, 0.002) if aim_at_save else 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 'a save' if saving(out_dir) - left_over else 'elsewhere'


def hash_checkpoint(out_dir):
    """A digest of the final weights, and of what the optimizer remembers."""
    path = find(out_dir, 'latest').path
    return path.name, [sha256_of(file) for file in sorted(path.glob('*.safetensors'))]


def kill_rounds(root, data, kills, chance, expected, duration):
    hit = {'a save': 0, 'elsewhere': 0}
    lost = rounds = 0
    while sum(hit.values()) < kills:
        out_dir = root / f'round-{rounds}'
        background = f'--checkpoint_async={rounds % 2 == 0}'
        rounds += 1
        for attempt in range(12):
            pid = start(out_dir, data, background)
            what = kill_during(pid, out_dir, attempt % 2 == 0, chance, duration * 0.7)
            if what is None:
                break
            hit[what] += 1
        code = run(out_dir, data, background)
        if code or hash_checkpoint(out_dir) != expected or saving(out_dir):
            lost += 1
            print(f'LOST: {out_dir}, exit code {code}, see {out_dir}.log')
    print(f'{sum(hit.values())} kills in {rounds} runs, {hit["a save"]} of them inside a save: '
          f'{lost} runs lost, {rounds - lost} ended with the same bits')
    return lost


def damage_rounds(root, data, chance, expected):
    """Damage the newest checkpoint in each way; the run must go on from the one before."""
    lost = 0
    for kind in ('chunk cut short', 'chunk with a bit flipped', 'chunk missing',
                 'state.json cut short', 'state.json empty', 'state.json missing'):
        out_dir = root / kind.replace(' ', '-')
        run(out_dir, data, '--max_iters=30', '--keep_checkpoints=3')
        newest = checkpoint_paths(out_dir)[-1]
        path = newest / 'state.json' if 'state' in kind else chance.choice(
            sorted(newest.glob('*.safetensors')))
        content = path.read_bytes()
        if 'missing' in kind:
            path.unlink()
        elif 'flipped' in kind:
            at = chance.randrange(len(content))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])
        else:
            path.write_bytes(b'' if 'empty' in kind else content[:chance.randrange(len(content))])
        named = str(newest) in ' '.join(newest_valid(out_dir)[1])
        code = run(out_dir, data)
        good = named and code == 0 and hash_checkpoint(out_dir) == expected
        lost += not good
        print(f'{kind}: {"named, skipped, same bits" if good else "LOST"}')
    return lost


def full_disk(root, data, expected):
    """No file may grow past 20 kB, as on a full disk; then there is room again."""
    out_dir = root / 'full'
    run(out_dir, data, '--max_iters=20')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    code_full = run(out_dir, data)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = Path(f'{out_dir}.log').read_bytes()  # cut at 20 kB by the limit too
    kept = find(out_dir, 'latest').iter_num == 20
    code = run(out_dir, data)
    good = code_full == 1 and kept and b'could not be written' in told and code == 0 \
        and hash_checkpoint(out_dir) == expected
    print(f'full disk: {"told, earlier checkpoint kept, same bits later" if good else "LOST"}')
    return not good


def weights_and_losses(out_dir):
    """The final weights as a digest, and all losses by iteration."""
    rows = [(row['iter'], key, row[key]) for row in read_rows(Path(out_dir, 'metrics.jsonl'), print)
            for key in ('loss', 'train_loss', 'val_loss', 'sample') if key in row]
    return hash_checkpoint(out_dir), rows


def send(pid, name, log):
    """Send the signal and wait → (where it hit, or None where the run had ended; what is wrong)."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(pid, getattr(signal, name))
    else:
        name = None
    code, told = exit_code(pid), log.read_text()
    training, ended = re.search('^iter ', told, re.M), re.search('^done|: stopped', told, re.M)
    where = 'the end' if ended else 'training' if training else 'the start'
    good = (0,) if name is None \
        else (-signal.SIGKILL, *[0] * bool(ended)) if name == 'SIGKILL' \
        else (0, 130, -getattr(signal, name)) if ended or not training else (0,)
    wrong = code not in good or 'Traceback' in told
    if name and code == 0 and f'{name}: stopped' in told:
        where = 'training'
    return name and where, f'{name} in {where}: exit code {code}\n{told}' if wrong else None


def signal_rounds(root, data, signals, chance, expected, duration):
    """→ (how many signals hit where, problems)"""
    hits, problems, number = Counter(), [], 0
    while hits.total() - hits['evaluations cut short'] < signals:
        out_dir = root / f'round-{number}'
        log = Path(f'{out_dir}.log')
        number += 1
        for _ in range(8):
            pid = start(out_dir, data, *VARIED)
            time.sleep(chance.uniform(0, duration))
            where, problem = send(pid, chance.choice([*StopRequest.NAMES * 2, 'SIGKILL']), log)
            problems += [problem] if problem else []
            if where is None:
                break
            hits[where] += 1
            if where == 'training' and checkpoint_paths(out_dir):
                found = find(out_dir)
                hits['evaluations cut short'] += \
                    found.iter_num % 7 == 0 and not found.state['evaluated']
        code = run(out_dir, data, *VARIED)
        if code or weights_and_losses(out_dir) != expected:
            problems.append(f'{out_dir}: exit code {code}, or not the same bits\n{log.read_text()}')
    return hits, number, problems


def kill_and_damage(root, data, kills, chance):
    """→ runs that were lost"""
    run(root / 'warmup', data)
    duration, expected = run_whole(root, data), hash_checkpoint(root / 'whole')
    lost = kill_rounds(root, data, kills, chance, expected, duration)
    lost += damage_rounds(root, data, chance, expected)
    return lost + full_disk(root, data, expected)


def interrupt(root, data, signals, chance):
    """→ runs that went wrong"""
    # What torch imports late is imported here, once, and not in each fork.
    train.main([*SETTINGS, *VARIED, f'--out_dir={root}/warmup', f'--dataset={data}',
                '--max_iters=1'])
    duration = run_whole(root, data, *VARIED)
    hits, runs, problems = signal_rounds(root, data, signals, chance,
                                         weights_and_losses(root / 'whole'), duration)
    for problem in problems:
        print(f'WRONG: {problem}')
    cut = hits.pop('evaluations cut short', 0)
    print(f'{hits.total()} signals in {runs} runs, {hits["training"]} of them in training ({cut} '
          f'evaluations cut short), {hits["the start"]} at its start, {hits["the end"]} at its '
          f'end: {len(problems)} went wrong')
    return len(problems)


def start_job(out_dir, data, *extra):
    """Three processes, each with its share of the model → their process ids."""
    return [fork(train.main, *SETTINGS, f'--out_dir={out_dir}', f'--dataset={data}',
                 '--gradient_accumulation_steps=3', '--parallel=fsdp', *extra,
                 '--dist_timeout_s=10', log=f'{out_dir}.log{rank}', **env)
            for rank, env in enumerate(ranks(3))]


def lose_processes(root, data, kills, chance):
    """→ runs that went wrong"""
    began = time.monotonic()
    assert [*map(exit_code, start_job(root / 'whole', data))] == [0, 0, 0]
    duration, expected = time.monotonic() - began, hash_checkpoint(root / 'whole')
    done = rounds = wrong = 0
    longest = 0.0
    while done < kills:
        out_dir = root / f'job-{rounds}'
        background = f'--checkpoint_async={rounds % 2 == 0}'
        rounds += 1
        for _ in range(6):
            pids = start_job(out_dir, data, background)
            time.sleep(chance.uniform(0, 0.7 * duration))
            victim = chance.choice(pids)
            over = os.waitid(os.P_PID, victim, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not over:
                os.kill(victim, signal.SIGKILL)
                done, killed_at = done + 1, time.monotonic()
            codes = [exit_code(pid) for pid in pids]
            if over:
                break
            longest = max(longest, time.monotonic() - killed_at)
            rank = pids.index(victim)
            told = ''.join(Path(f'{out_dir}.log{other}').read_text() for other in range(3))
            explained = re.search(r'error: (lost another process|.*did not meet the others)', told)
            if (any(codes[:rank] + codes[rank + 1:]) and not explained) or 'Traceback' in told:
                wrong += 1
                print(f'WRONG: exit codes {codes}\n{told}')
        codes = [*map(exit_code, start_job(out_dir, data, background))]
        if any(codes) or hash_checkpoint(out_dir) != expected or saving(out_dir):
            wrong += 1
            print(f'LOST: {out_dir}, exit codes {codes}, see {out_dir}.log0')
    print(f'{done} processes killed in {rounds} jobs of three: {wrong} went wrong, the others '
          f'ended within {longest:.0f} s')
    return wrong


def main(argv):
    config = load_config(TortureConfig, argv, __doc__)
    chance, lost = random.Random(config.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = make_data(root)
        for count, torture in ((config.kills, kill_and_damage), (config.signals, interrupt),
                               (config.lost, lose_processes)):
            if count:
                (root / torture.__name__).mkdir()
                lost += torture(root / torture.__name__, data, count, chance)
    print('nothing was lost' if not lost else f'{lost} runs lost')
    sys.exit(lost > 0)


if __name__ == '__main__':
    run_script(main)
