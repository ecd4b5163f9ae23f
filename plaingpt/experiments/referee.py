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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from configurator import options_of
from plaingpt.checks.subject import largest_change
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import open_named
from plaingpt.data.inspection import MUCH_IN_TRAIN, find_overlap
from plaingpt.data.token_files import TokenStream, open_tokens
from plaingpt.data.tokenizers import words_of
from plaingpt.experiments.judgement import LEVELS, Judgement
from plaingpt.experiments.sides import Side, Unsound, changed_files, copy_tree, git
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, read_json, sha256_of, write_json
from plaingpt.system.formatting import setting
from plaingpt.training.run_data import open_data
from plaingpt.training.settings import TrainConfig

MEASURING = re.compile(r'plaingpt/(data|checks|inference|monitoring|experiments)/|bench\.py')
SAME_WORK = 1.03  # times of a step, and weights, that are taken for the same
SAME = 1e-4  # of the logits' RMS: what rounding may change
LOSS_ERROR = 5e-3  # of a loss: what the dtype of a run may change
CHECKED = 4  # batches that are asked for again
chance = random.SystemRandom()  # that no code can foresee


class Referee:
    """Trains pairs and puts them into a Judgement. Raises UserError where the base or what it is
    given is wrong, and Unsound.

    base, change: the Sides; config: settings of the base; device: that both compute on; folder: of
    runs, until they are scored
    """

    def __init__(self, judgement, base, change, config, device, folder):
        self.judgement, self.base, self.change, self.folder = judgement, base, change, folder
        self.config, self.device, self.asked = config, device, change.settings()
        self.dtype, self.seeds = config.dtype, {}  # weights of a run → its seed
        self.data = open_data(config, World())
        self.changed_data = open_named(self.asked['dataset'])
        if not all(data.is_ours() and not data.has_mask()
                   for data in (self.data, self.changed_data)):
            raise UserError(f'dataset={config.dataset}: the referee judges what is trained on one '
                            'dataset of text that prepare.py wrote')
        if words_of(self.data.tokenizer_json()) != words_of(self.changed_data.tokenizer_json()):
            judgement.unit = 'bits a byte'
        self.note_changes(base.settings(), self.asked)

    def note_changes(self, before, after):
        """Note what there is to know before the change is trained. before, after: all settings"""
        differ = [f'{key} {setting(before[key])} → {setting(after.get(key))}' for key in before
                  if after.get(key) != before[key] and key not in ('lr_decay_iters', 'min_lr')]
        files = changed_files(self.base.tree, self.change.tree)
        paths = [path for name in files if (path := self.change.tree / name).exists()]
        mark = hashlib.sha256(b''.join(path.read_bytes() for path in paths)).hexdigest()[:8]
        measuring = ', which feeds or measures runs' * any(map(MEASURING.match, files))
        self.judgement.notes += [
            *[f'it changes {", ".join(files)} ({mark}){measuring}'] * bool(files),
            *[f'it sets {", ".join(differ)}'] * bool(differ),
            *['it has another tokenizer: compared in bits a byte']
            * (self.judgement.unit == 'bits a byte')]

    def pair(self, seed):
        """Train a pair, and put it into the judgement."""
        judgement, iters = self.judgement, self.config.max_iters
        base = self.train(self.base, seed, iters)
        self.dtype = base['dtype']
        change = self.train(self.change, seed, iters)
        ratio = change['step_s'] / base['step_s']
        if not judgement.pairs:
            self.look_for_leaks(change, seed)
            tokens, weights = (change[key] / base[key] for key in ('tokens', 'bytes'))
            noise = max(SAME_WORK - 1, base['noise'], change['noise'])
            if larger := tokens != 1 or weights > SAME_WORK:
                judgement.notes.append(f'{tokens:.2f}x the tokens a step, {weights:.2f}x the '
                                       'weights: equal time decides')
            differs = abs(ratio - 1) > noise and self.config.equal != 'steps'
            if larger or differs or self.config.equal == 'time':
                judgement.decided_by = 'time'
        # by the ratio of this pair alone: pairs that share a time's noise would not be independent
        lengths = {'steps': iters, 'tokens': iters * base['tokens'] / change['tokens'],
                   'time': iters / ratio if judgement.decided_by == 'time' else iters}
        losses = {iters: change['loss']}  # of runs of so many steps
        for level in LEVELS:
            lengths[level] = length = max(1, round(lengths[level]))
            if length not in losses:
                losses[length] = self.train(self.change, seed, length)['loss']
        judgement.pairs.append({'seed': seed, 'base': base['loss'], 'ratio': ratio,
                                **{level: losses[lengths[level]] for level in LEVELS}})

    def train(self, side, seed, iters, **settings):
        """Train a side → {what the run says, 'loss': what is measured here}."""
        out_dir, changed = self.folder / 'run', side is self.change
        if not changed or self.asked['dtype'] == 'auto':
            settings['dtype'] = self.dtype  # else each run would measure anew which is faster
        loader, tokens, unit = self.validation(changed)
        try:
            run = side.train(out_dir, iters, seed=seed, eval_tokens=tokens, **settings)
            if run['told'] != (iters, seed):
                raise Unsound('it trained {:,} steps with seed {}'.format(*run['told'])
                              + f', and was told {iters:,} with seed {seed}')
            with side.answers(out_dir, self.device) as ask:
                loss, kept = measure(ask, loader, tokens)
            if changed:
                with side.answers(out_dir, self.device) as ask:  # which knows nothing of the other
                    examine(ask, kept)
        except UserError as problem:
            raise Unsound(str(problem)) if changed else problem from None
        finally:
            shutil.rmtree(out_dir, ignore_errors=True)
        if self.seeds.setdefault(run['weights'], seed) != seed:
            raise Unsound('two seeds end with the same weights: it chooses its own')
        same_text = 'dataset' not in settings \
            and self.data.identity('val') == self.changed_data.identity('val')
        if same_text and not abs(run['reported'] - loss) <= LOSS_ERROR * loss:
            raise Unsound(f'it reports a loss of {run["reported"]:.4f}, and {loss:.4f} is measured '
                          'on the same tokens: it evaluates something else')
        return {**run, 'loss': unit * loss}

    def validation(self, changed):
        """The validation text of the base, in the tokens of a side → (loader, tokens to score,
        factor from nats a token to the unit)."""
        shape = self.asked['block_size'] if changed else self.config.block_size, \
            self.config.batch_size
        tokens = self.config.eval_sequences() * self.config.block_size
        if self.judgement.unit == 'nats a token':
            return self.data.loader('val', False, *shape), tokens, 1.0
        text = self.data.tokenizer().decode(self.data.split('val').read(0, tokens).tolist())
        tokenizer = (self.changed_data if changed else self.data).tokenizer()
        ids, path = tokenizer.encode(text), self.folder / f'{changed}.bin'
        ids.astype('<u4').tofile(path)
        stream = TokenStream([open_tokens(path, np.dtype('<u4'))], tokenizer.vocab_size)
        return BatchLoader(stream, *shape), len(ids), len(ids) / len(text.encode()) / math.log(2)

    def look_for_leaks(self, run, seed):
        """Do the weights of a run of the change depend on validation text?"""
        data, before = self.changed_data, self.data
        if data.identity('train') != before.identity('train'):
            share = find_overlap(data.split('train'), self.validation(True)[0].stream)
            if share > max(MUCH_IN_TRAIN, find_overlap(before.split('train'), before.split('val'))):
                raise Unsound(f'{share:.0%} of the validation text is in its training text')
        other = with_other_validation(data, self.folder / 'blind')
        blind = self.train(self.change, seed, self.config.max_iters, dataset=other)
        same = blind['weights'] == run['weights'] if self.device.type == 'cpu' \
            else abs(blind['loss'] - run['loss']) <= LOSS_ERROR * run['loss']  # sums vary there
        if not same:
            raise Unsound('with other validation text it ends with other weights: it learns, or '
                          'chooses, by what it is measured on')


def with_other_validation(data, folder):
    """A copy of a dataset whose validation tokens stand in reverse order → its folder."""
    shutil.copytree(data.folder, folder, copy_function=lambda source, to: os.symlink(
        os.path.abspath(source), to))
    meta = read_json(folder / 'meta.json')
    for entry in meta['splits']['val']['files']:
        path = folder / entry['name']
        ids = np.fromfile(path, meta['dtype'])
        path.unlink()
        ids[::-1].tofile(path)
        entry['sha256'] = sha256_of(path)
    write_json(folder / 'meta.json', meta)
    return folder


def loss_of(logits, targets, reduction='mean'):
    """The softmax is taken here, so that probabilities sum to one."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                         reduction=reduction).item()


def measure(ask, loader, tokens):
    """→ (mean loss in nats of the first tokens of a split, [(idx, targets, logits)] of a few
    batches). Raises Unsound."""
    total, count, kept = 0.0, 0, []
    batches = loader.eval_batches(tokens // loader.block_size, at_beginning=True)
    chosen = chance.sample(range(len(batches)), min(CHECKED, len(batches)))
    for i, starts in enumerate(batches):
        idx, targets = loader.eval_batch(starts)
        logits = ask(idx)
        if logits.shape != (wanted := (*idx.shape, loader.stream.vocab_size)):
            raise Unsound(f'its logits have the shape {tuple(logits.shape)}, and not {wanted}')
        total += loss_of(logits, targets, 'sum')
        count += int((targets != -1).sum())
        if i in chosen:
            kept.append((idx, targets, logits))
    return total / count, kept


def examine(ask, kept):
    """Ask another process for the batches that were kept, first with other tokens: an answer may
    depend on the tokens before it in its sequence, and on nothing else. Raises Unsound."""
    for idx, targets, logits in chance.sample(kept, len(kept)):
        B, T = idx.shape
        cut, row = chance.randrange(max(1, T - 1)), chance.randrange(B)
        others = torch.tensor(chance.choices(range(logits.size(2)), k=B * T)).view(B, T)
        later = ask(torch.where(torch.arange(T) <= cut, idx, others))[:, :cut + 1]
        alone = ask(torch.where(torch.arange(B)[:, None] == row, idx, others))[row]
        again, loss, expected = ask(idx), ask(idx, targets).item(), loss_of(logits, targets)
        for what, found, before in (('what it was asked before', again, logits),
                                    ('other sequences of the batch', alone, logits[row]),
                                    ('later tokens', later, logits[:, :cut + 1])):
            if not largest_change(found, before) <= SAME:
                raise Unsound(f'what it says of a token depends on {what}')
        if not abs(loss - expected) <= LOSS_ERROR * expected:
            raise Unsound(f'its own loss is {loss:.4f}, and the cross-entropy of its logits '
                          f'{expected:.4f}: probabilities that do not sum to one, tokens left out?')


def judge(config, words, device):
    """Train pairs until the verdict is clear, or the budget is spent → Judgement. words: what
    train.py is told on both sides"""
    began, given = time.perf_counter(), options_of(TrainConfig, words).get('seed')
    judgement = Judgement()
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        folder = Path(folder)
        base = Side('base', copy_tree(ROOT, folder / 'base'), list(words))
        added = [word if word.endswith('.py') else f'--{word}' for word in config.set.split()]
        change = Side('change', copy_tree(config.change or ROOT, folder / 'change'),
                      [*words, *added])
        if config.patch:
            try:
                git('apply', os.path.abspath(config.patch), cwd=change.tree)
            except UserError as problem:
                said = str(problem).partition('git apply: ')[2]
                raise UserError(f'patch={config.patch} does not apply to the code as it is here: '
                                f'{said}: write it with git diff') from None
        print(f'{config.pairs} pairs of {config.max_iters:,} steps at most', flush=True)
        try:
            referee = Referee(judgement, base, change, config, device, folder)
            while len(judgement.pairs) < config.pairs and not judgement.is_over(config.least):
                n, spent = len(judgement.pairs), (time.perf_counter() - began) / 60
                if config.minutes and n and spent * (n + 1) / n > config.minutes:
                    break  # the next pair would be too long
                referee.pair(chance.randrange(2**31) if given is None else given + n)
                print(judgement.describe_pair(), flush=True)
        except Unsound as problem:
            judgement.unsound = str(problem)
        except KeyboardInterrupt:
            print('interrupted: the pairs so far count')
    return judgement


def judge_from(commit, argv):
    """Judge this copy of the code by bench.py of a commit, the base → the exit status."""
    try:
        commit = git('rev-parse', '--verify', f'{commit}^{{commit}}').strip()
    except UserError as problem:
        raise UserError(f'against={commit}: no such commit: {problem}') from None
    with tempfile.TemporaryDirectory(prefix='plaingpt-base-') as folder:
        base = Side('base', Path(folder, 'base'), list(argv))
        git('worktree', 'add', '--detach', base.tree, commit)
        try:
            with subprocess.Popen([
                    sys.executable, base.tree / 'plaingpt' / '__main__.py', 'bench', *base.words,
                    f'--against={commit}', f'--change={ROOT}']) as process:
                # It ends with the pairs so far, and keeps them. A terminal's Ctrl-C reaches it too
                signal.signal(signal.SIGINT, lambda *_: None)
                signal.signal(signal.SIGTERM, lambda *_: process.terminate())
                return process.wait()
        finally:
            git('worktree', 'remove', '--force', base.tree)
