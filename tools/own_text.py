"""Bits per byte of your own text after equal training time, for compare.py: plainGPT, the programs
in peers.py, and xz."""

import csv
import lzma
import math
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from peers import PEERS, Job
from races import score_whole_split

from plaingpt.core.dataset import open_dataset
from plaingpt.experiments.runs import train_once
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT


def split_texts(folder):
    """A dataset → {split: its text}"""
    dataset = open_dataset(folder)
    streams = {split: dataset.split(split) for split in ('train', 'val')}
    return {split: dataset.tokenizer().decode(stream.read(0, len(stream)).tolist())
            for split, stream in streams.items()}


class Trials:
    """Trains a peer for a time or a number of steps."""

    def __init__(self, peer, job):
        self.peer, self.job, self.count = peer, job, 0
        peer.prepare(job)
        few, more = peer.steps
        self.train(few, 1)  # torch.compile fills its cache
        few_s, more_s = self.train(few, 1)[0], self.train(more, 1)[0]
        self.step_s = (more_s - few_s) / (more - few)
        self.startup_s = max(0.0, few_s - few * self.step_s)

    def train(self, steps, factor):
        """→ seconds, folder of the model"""
        self.count += 1
        out = self.job.folder / f'out-{self.count}'
        start_time = time.perf_counter()
        self.peer.train(self.job, out, steps, factor)
        return time.perf_counter() - start_time, out

    def result(self, minutes, factor, with_startup=True):
        """→ columns of the table"""
        budget_s = 60 * minutes - self.startup_s * with_startup
        steps = max(1, math.floor(budget_s / self.step_s))
        seconds, out = self.train(steps, factor)
        return {'learning_rate': f'{self.peer.learning_rate * factor:.2g}', 'steps': steps,
                'seconds': round(seconds), 'bits_per_byte': self.peer.score(self.job, out)}


def own_text(config, _):
    """Bits per byte of the validation text after config.minutes, with the default learning rate and
    with the one of three that is best after a fifth of the time; for xz -9e, what the validation
    text adds to the compressed training text."""
    available = [name for name, peer in PEERS.items()
                 if (getattr(config, peer.setting) if peer.setting else find_spec(name))]
    names = config.peers.split(',') if config.peers else ['xz', 'plainGPT', *available]
    for name in names:
        if name not in ('xz', 'plainGPT', *available):
            raise UserError(f'peers={name}: choose from xz, plainGPT, {", ".join(PEERS)}, and name '
                            'the folder of its code, such as --nanochat=FOLDER')
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder).resolve(), config)
            job.prepare_text('ours')
            for split, text in split_texts(job.folder / 'ours').items():
                (job.folder / f'{split}.txt').write_bytes(text.encode())
            for setting, columns in results(name, job):
                add_row(config, {
                    'text': Path(config.text).name, 'bytes': Path(config.text).stat().st_size,
                    'minutes': config.minutes, 'program': name, 'setting': setting, **columns})


def results(name, job):
    """Yield (default or tuned, columns of the table)."""
    minutes = job.config.minutes
    if name == 'xz':
        train, val = (job.text(split).encode() for split in ('train', 'val'))
        added = xz_size(train + val) - xz_size(train)
        yield 'default', {'bits_per_byte': 8 * added / len(val)}
    elif name == 'plainGPT':
        out, start_time = job.folder / 'out', time.perf_counter()
        train_once(['config/own_text.py', f'--dataset={job.folder}/ours', '--device=cpu',
                    f'--minutes={minutes}'], str(out))
        seconds = round(time.perf_counter() - start_time)
        score = score_whole_split(f'--out_dir={out}', f'{out}.json', f'{job.folder}/ours', 'best')
        yield 'default', {'seconds': seconds, 'bits_per_byte': score['bits_per_byte']}
    else:
        peer = PEERS[name]
        trials = Trials(peer, job)
        default = trials.result(minutes, 1)
        yield 'default', default
        scores = {}
        for factor in peer.factors:
            trial = trials.result(minutes / 5, factor, with_startup=False)
            scores[factor] = trial['bits_per_byte']
            print(f'{name}, learning rate {trial["learning_rate"]}, {minutes / 5:g} minutes: '
                  f'{scores[factor]:.4f} bits per byte', flush=True)
        best = min(scores, key=scores.get)
        yield 'tuned', default if best == 1 else trials.result(minutes, best)


def xz_size(text):
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


COLUMNS = ('text', 'bytes', 'minutes', 'program', 'setting', 'learning_rate', 'steps', 'seconds',
           'bits_per_byte')


def add_row(config, row):
    """Print a row, and append it to own-text-peers.csv in config.save, if set."""
    row['bits_per_byte'] = f'{row["bits_per_byte"]:.4f}'
    print(', '.join(f'{row[key]}' for key in COLUMNS if key in row), flush=True)
    if config.save:
        path = Path(config.save, 'own-text-peers.csv')
        is_new = not path.exists()
        with open(path, 'a', newline='') as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def own_text_picture(config, _):
    """Draw docs/results/own-text-peers.csv: docs/own-text-peers.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    with open(ROOT / 'docs/results/own-text-peers.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    texts = list(dict.fromkeys(row['text'] for row in rows))
    figure, axes = plt.subplots(1, len(texts), figsize=(6 * len(texts), 3.6), squeeze=False)
    for ax, text in zip(axes[0], texts, strict=True):
        bits = {}  # {program: {setting: bits per byte}}
        for row in rows:
            if row['text'] == text:
                bits.setdefault(row['program'], {})[row['setting']] = float(row['bits_per_byte'])
        programs = sorted(bits, key=lambda name: -min(bits[name].values()))
        for i, name in enumerate(programs):
            default, best = bits[name]['default'], min(bits[name].values())
            color = {'plainGPT': '#0072b2', 'xz': '#999999'}.get(name, '#e69f00')
            ax.barh(i, default, color=color, alpha=0.35)
            ax.barh(i, best, color=color)
            label = f' {best:.2f}' if best == default else f' {best:.2f}; default {default:.2f}'
            ax.text(default, i, label, va='center')
        ax.margins(x=0.3)
        ax.set(yticks=range(len(programs)), yticklabels=programs, title=text,
               xlabel='bits per byte of the validation text')
        ax.spines[['top', 'right']].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / 'docs/own-text-peers.png', dpi=120)
