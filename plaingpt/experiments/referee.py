"""Is a change really better? Base and change are trained in pairs, and judged after each.

    python bench.py --judge config/quickstart.py --patch=mine.diff

The base is this copy of the repository, and its code judges. Both sides of a pair have one seed,
which nobody chose: they see the same data in the same order. The loss is measured from outside: a
trained model answers with logits in a process of its own, and is shown no targets.
"""

import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from configurator import load_config, options_of
from plaingpt.data.dataset import Dataset
from plaingpt.data.inspection import MUCH_IN_TRAIN, find_overlap
from plaingpt.data.token_files import TokenStream, open_tokens
from plaingpt.data.tokenizers import words_of
from plaingpt.experiments.judgement import Judgement
from plaingpt.experiments.sides import Side, changed_files, copy_tree, git, open_text
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, write_json
from plaingpt.training.run_data import open_data
from plaingpt.training.settings import TrainConfig

SAME_WORK = 1.03  # times of a step, and weights, that are taken for the same
LOSS_ERROR = 5e-3  # of a loss: what the dtype of a run may change
chance = random.SystemRandom()  # that no code can foresee


def judge_from(commit, argv):
    """Judge this copy of the code by bench.py of a commit, the base → the exit status."""
    with tempfile.TemporaryDirectory(prefix='plaingpt-base-') as folder:
        base = Side('base', Path(folder), list(argv))
        git('worktree', 'add', '--detach', folder, commit)
        try:
            with subprocess.Popen([sys.executable, str(base.tree / 'bench.py'), *base.words,
                                   f'--change={ROOT}']) as process:
                # It ends with the pairs so far, and keeps them. A terminal's Ctrl-C reaches it too
                signal.signal(signal.SIGINT, lambda *_: None)
                signal.signal(signal.SIGTERM, lambda *_: process.terminate())
                return process.wait()
        finally:
            git('worktree', 'remove', '--force', folder)


def judge(config, words, device):
    """Train pairs until the verdict is clear, or the budget is spent → Judgement. words: what
    train.py is told on both sides"""
    began, given = time.perf_counter(), options_of(TrainConfig, words).get('seed')
    judgement = Judgement()
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        base = Side('base', copy_tree(ROOT, Path(folder, 'base')), list(words))
        added = [word if word.endswith('.py') else f'--{word}' for word in config.set.split()]
        change = Side('change', copy_tree(config.change or ROOT, Path(folder, 'change')),
                      [*words, *added])
        if config.patch:
            git('apply', os.path.abspath(config.patch), cwd=change.tree)
        elif not config.change:
            load_config(TrainConfig, change.words)  # a mistake in --set is found before training
        if files := changed_files(base.tree, change.tree):
            mark = hashlib.sha256(b''.join(files.values())).hexdigest()[:8]
            judgement.notes.append(f'it changes {", ".join(files)} ({mark})')
        if config.set:
            judgement.notes.append(f'it sets {config.set}')
        open_data(config, World())  # prepares what is small
        referee = Referee(judgement, base, change, config, open_text(config.dataset), device)
        print(f'{config.pairs} pairs of {config.max_iters:,} steps at most', flush=True)
        try:
            while len(judgement.pairs) < config.pairs and not judgement.is_over(config.least):
                n, spent = len(judgement.pairs), (time.perf_counter() - began) / 60
                if config.minutes and n and spent * (n + 1) / n > config.minutes:
                    break  # the next pair would be too long
                referee.train_pair(chance.randrange(2**31) if given is None else given + n)
                print(judgement.describe_pair(), flush=True)
        except Unsound as problem:
            judgement.unsound = str(problem)
        except KeyboardInterrupt:
            print('interrupted: the pairs so far count')
    return judgement


class Unsound(Exception):
    """What a change does that no loss makes up for."""


@dataclass
class Referee:
    """Trains pairs and puts them into a Judgement. Raises Unsound, and UserError where the base or
    what it is given is wrong."""

    judgement: Judgement
    base: Side
    change: Side
    config: TrainConfig  # of the base
    data: Dataset  # of the base
    device: torch.device  # that both compute on
    seeds: dict = field(default_factory=dict)  # weights of a run → its seed

    def train_pair(self, seed):
        """Train a pair, and put it into the judgement."""
        judgement, iters, is_first = self.judgement, self.config.max_iters, not self.judgement.pairs
        base = self.train(self.base, seed, iters)
        if is_first:  # else each run would measure anew which dtype is faster
            for side in (self.base, self.change):
                side.words.insert(0, f'--dtype={base["dtype"]}')  # later words may name another
        change = self.train(self.change, seed, iters)
        if is_first:
            self.compare_data(base, change)
            self.train_blind(change, seed)
            self.compare_work(base, change)
        # by the ratio of this pair alone: pairs that share a time's noise would not be independent
        ratio = change['step_s'] / base['step_s']
        lengths = {'steps': iters, 'tokens': iters * base['tokens'] / change['tokens'],
                   'time': iters / ratio if judgement.decided_by == 'time' else iters}
        pair = {'seed': seed, 'base': self.in_unit(base, base), 'ratio': ratio}
        runs = {iters: change}  # of the change, by their number of steps
        for level, length in lengths.items():
            steps = max(1, round(length))
            if steps not in runs:
                runs[steps] = self.train(self.change, seed, steps)
            pair[level] = self.in_unit(runs[steps], base)
        judgement.pairs.append(pair)

    def train(self, side, seed, iters, **settings):
        """Train a side → {what the run says, 'ids': the validation text of the base in its tokens,
        'loss': on these, in nats a token}"""
        tokens = self.config.eval_sequences() * self.config.block_size
        with tempfile.TemporaryDirectory(prefix='plaingpt-run-') as out_dir:
            try:
                run = side.train(out_dir, seed, iters, eval_tokens=tokens, **settings)
                ids, data = self.data.split('val').read(0, tokens + 1), run['data']
                if not same_tokens(data, self.data):
                    ids = data.tokenizer().encode(self.data.tokenizer().decode(ids.tolist()))
                loss = side.loss(out_dir, ids, self.device)
                if self.seeds.setdefault(run['weights'], seed) != seed:
                    raise UserError(f'the {side.name}: two seeds end with the same weights')
                if data.identity('val') == self.data.identity('val') \
                        and not abs(run['reported'] - loss) <= LOSS_ERROR * loss:
                    raise UserError(
                        f'the {side.name}: it reports a loss of {run["reported"]:.4f}, and '
                        f'{loss:.4f} is measured on the same tokens: it sees targets, leaves '
                        'tokens out, or its probabilities do not sum to one')
            except UserError as problem:
                if side is self.base:
                    raise
                raise Unsound(str(problem)) from None
        return {**run, 'ids': ids, 'loss': loss}

    def in_unit(self, run, base):
        """The loss of a run in the unit of the judgement. base: a run of the base"""
        if self.judgement.unit == 'nats a token':
            return run['loss']
        text = self.data.tokenizer().decode(base['ids'].tolist())
        return run['loss'] * len(run['ids']) / len(text.encode()) / math.log(2)

    def compare_data(self, base, change):
        """Another tokenizer, or validation text in the training text? Raises Unsound."""
        if not same_tokens(change['data'], self.data):
            self.judgement.unit = 'bits a byte'
            self.judgement.notes.append('it has another tokenizer: compared in bits a byte')
        if change['data'].identity('train') != self.data.identity('train'):
            share = overlap(change)
            if share > max(MUCH_IN_TRAIN, overlap(base)):
                raise Unsound(f'{share:.0%} of the validation text is in its training text')

    def train_blind(self, run, seed):
        """Do the weights of a run of the change depend on its validation text? Raises Unsound."""
        with tempfile.TemporaryDirectory(prefix='plaingpt-data-') as folder:
            blind = self.train(self.change, seed, self.config.max_iters,
                               dataset=with_other_validation(run['data'], folder))
        same = blind['weights'] == run['weights'] if self.device.type == 'cpu' \
            else abs(blind['loss'] - run['loss']) <= LOSS_ERROR * run['loss']  # sums vary there
        if not same:
            raise Unsound('with other validation text it ends with other weights: it learns, or '
                          'chooses, by what it is measured on')

    def compare_work(self, base, change):
        """Equal time decides where a run of the change is more work than one of the base."""
        tokens, weights, ratio = (change[key] / base[key] for key in ('tokens', 'bytes', 'step_s'))
        noise = max(SAME_WORK - 1, base['noise'], change['noise'])
        if larger := tokens != 1 or weights > SAME_WORK:
            self.judgement.notes.append(f'{tokens:.2f}x the tokens a step, {weights:.2f}x the '
                                        'weights: equal time decides')
        differs = abs(ratio - 1) > noise and self.config.equal != 'steps'
        if larger or differs or self.config.equal == 'time':
            self.judgement.decided_by = 'time'


def same_tokens(data, other):
    """Whether two datasets have the same tokenizer."""
    return words_of(data.tokenizer_json()) == words_of(other.tokenizer_json())


def overlap(run):
    """The share of the validation text that is in the training text of a run."""
    with tempfile.TemporaryDirectory(prefix='plaingpt-data-') as folder:
        path, data = Path(folder, 'text.bin'), run['data']
        run['ids'].astype('<u4').tofile(path)
        text = TokenStream([open_tokens(path, np.dtype('<u4'))], data.vocab_size)
        return find_overlap(data.split('train'), text)


def with_other_validation(data, folder):
    """A copy of a dataset, in a folder, whose validation text is the training text → folder"""
    for path in data.folder.iterdir():
        if path.name != 'meta.json':
            Path(folder, path.name).symlink_to(path.resolve())
    splits = {**data.meta['splits'], 'val': data.meta['splits']['train']}
    write_json(Path(folder, 'meta.json'), {**data.meta, 'splits': splits})
    return folder
