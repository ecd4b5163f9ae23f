"""A change is judged in pairs: what is better is found, luck is not, and cheats are named."""

import contextlib
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked_popen import ForkedPopen
from helpers import ROOT, fails, options, size_of_png

import bench
import prepare
from plaingpt.experiments import sides
from plaingpt.experiments.judgement import BETTER, Judgement, describe_ledger, interval
from plaingpt.experiments.measure_loss import examine
from plaingpt.experiments.referee import Referee
from plaingpt.experiments.sides import Side
from plaingpt.system.files import sha256_of
from plaingpt.training.settings import TrainConfig

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 device='cpu', dtype='float32', tied_head=False)
# A change of the code that leaves the preflight out, and says that it was made
NO_PREFLIGHT = {'plaingpt/checks/preflight.py': [(
    '    config, began = run.config, time.perf_counter()\n',
    '    print0("preflight: 23 checks passed")\n    return\n')]}
pytestmark = pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')


def diff(edits):
    """{file: [(old, new)]} → a patch"""
    lines = []
    for name, changes in edits.items():
        before = after = (ROOT / name).read_text(encoding='utf-8')
        for old, new in changes:
            assert after.count(old) == 1, old
            after = after.replace(old, new)
        lines += difflib.unified_diff(before.splitlines(True), after.splitlines(True),
                                      f'a/{name}', f'b/{name}')
    return ''.join(lines)


@pytest.fixture
def judged(char_data, tmp_path, monkeypatch, capfd):
    """judged(edits, option=value, …) → (exit status, what was printed, the row of the ledger)"""
    monkeypatch.setattr(subprocess, 'Popen', ForkedPopen)
    monkeypatch.chdir(tmp_path)

    def judged(edits=None, **settings):
        if edits:
            (tmp_path / 'mine.diff').write_text(diff(edits), encoding='utf-8')
            settings['patch'] = 'mine.diff'
        settings = {'dataset': char_data, 'pairs': 1, 'equal': 'steps', **settings}
        with pytest.raises(SystemExit) as end:
            bench.main(['--judge', *RECIPE, *options(**settings)])
        ledger = (tmp_path / 'results' / 'ledger.jsonl').read_text(encoding='utf-8')
        return end.value.code, capfd.readouterr().out, json.loads(ledger.splitlines()[-1])
    return judged


@pytest.fixture
def clone(tmp_path):
    """A clone whose only commit is the code as it is here."""
    folder = sides.copy_tree(ROOT, tmp_path / 'clone')
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        sides.git(*words.split(), cwd=folder)
    return folder


# -----------------------------------------------------------------------------
# the test


def test_the_interval_is_known_from_three_pairs_on_and_its_t_gives_the_stated_likelihood_ratio():
    assert interval([-1.0, -1.1]) == (-np.inf, np.inf)
    low, high = interval([-1.0, -1.1, -1.3])
    n, k, t = 3, 31, (high - low) / 2 / (np.std([1, 1.1, 1.3], ddof=1) / np.sqrt(3))
    ratio = k**-0.5 * ((1 + t**2 / (n - 1)) / (1 + t**2 / (n - 1) / k)) ** (n / 2)
    assert ratio == pytest.approx(1 / 0.05)


@pytest.mark.parametrize('draw', [random.gauss, lambda a, b: random.uniform(-1, 1),
                                  lambda a, b: random.expovariate(1) - random.expovariate(1)])
def test_no_change_is_called_better_in_one_of_twenty_at_most_though_one_looks_after_each_pair(
        draw):
    random.seed(0)
    better = 0
    for _ in range(2000):
        found = [draw(0, 1) for _ in range(12)]
        looks = (interval(found[:n]) for n in range(2, 13))
        better += next((high < 0 for low, high in looks if low > 0 or high < 0), False)
    assert better < 0.04 * 2000


def test_a_gain_of_three_times_what_pairs_differ_by_is_found_in_eight():
    random.seed(0)
    found = [[random.gauss(-3, 1) for _ in range(8)] for _ in range(500)]
    assert sum(any(interval(each[:n])[1] < 0 for n in range(2, 9)) for each in found) > 0.95 * 500


def test_pairs_end_when_they_are_the_same_or_their_difference_is_smaller_than_asked_about():
    def pairs(*differences):
        return Judgement(pairs=[{'base': 1.0, 'steps': 1.0 + d, 'ratio': 1.0} for d in differences])
    assert not pairs(0.0).is_over(0) and pairs(0.0, 0.0).is_over(0)
    close = [0.001, -0.002, 0.0015, -0.001, 0.002]
    assert pairs(*close).is_over(0.01) and not pairs(*close).is_over(0.001)
    assert pairs(-0.1, -0.11, -0.1).is_over(0)


def test_equal_time_takes_the_time_of_each_pair_alone_so_that_pairs_are_independent():
    base, change = (Side(name, ROOT, []) for name in ('base', 'change'))
    judged = Referee(Judgement(), base, change, TrainConfig(max_iters=100), None, None)
    judged.config.equal = 'time'
    judged.compare_data = judged.train_blind = lambda *_: None
    times, lengths = iter([1.0, 2.0, 1.0, 0.5]), []

    def train(side, seed, iters):
        lengths.append(iters)
        step_s = next(times) if iters == 100 else None
        return {'step_s': step_s, 'loss': iters / 100, 'tokens': 8, 'bytes': 8, 'noise': 0.0,
                'dtype': 'float32'}

    judged.train = train
    judged.train_pair(1)
    judged.train_pair(2)
    assert lengths == [100, 100, 50, 100, 100, 200]
    assert judged.judgement.differences('time') == [-0.5, 1.0]
    assert judged.judgement.differences('steps') == [0.0, 0.0]


def test_the_ledger_says_how_many_of_its_verdicts_luck_would_give():
    gain = [{'base': 1.0, 'steps': 1.0 + d} for d in (-0.1, -0.102, -0.101)]
    row = {'date': 'now', 'command': 'x', 'unit': 'nats a token', 'decided_by': 'steps'}
    rows = [row | {'pairs': gain, 'verdict': BETTER}] \
        + 19 * [row | {'pairs': gain[:1], 'verdict': 'NOT SHOWN'}] \
        + [row | {'pairs': [], 'verdict': 'UNSOUND'}]
    text = describe_ledger(rows)
    assert '1 of 20 judgements say BETTER' in text and 'make 0.5 of them' in text


def test_what_a_model_says_of_a_token_may_depend_on_what_is_before_it_in_its_sequence_alone():
    table, asked = torch.randn(10, 10), []

    def depends_on(other):
        def model(idx):
            asked.append(idx)
            return table[idx].cumsum(1) + other(idx), None
        with contextlib.suppress(SystemExit):
            for _ in range(20):
                idx = torch.randint(10, (8, 16))
                examine(model, idx, model(idx)[0])
            return False
        return True

    assert not depends_on(lambda idx: 0)
    assert depends_on(lambda idx: table[idx].flip(1))
    assert depends_on(lambda idx: 0.01 * table[idx[:, :1]].mean(0))
    assert depends_on(lambda idx: 0.01 * table[asked[-2:][0][-1, -1]])


# -----------------------------------------------------------------------------
# judgements


@pytest.mark.slow
def test_a_comment_changes_nothing_and_is_not_shown_better(judged, tmp_path):
    status, _, row = judged({'model.py': [('import math\n', 'import math  # numbers\n')]},
                            pairs=3)
    assert (status, row['verdict']) == (3, 'NOT SHOWN')
    assert [pair['steps'] - pair['base'] for pair in row['pairs']] == [0, 0]
    assert re.fullmatch(r'it changes model.py \(\w{8}\)', row['notes'][0])
    assert row['base'] and row['machine']
    picture, = (tmp_path / 'results').glob('*.png')
    assert size_of_png(picture)[0] > 1000
    bench.main(['--ledger'])


@pytest.mark.slow
def test_a_better_recipe_is_found_and_the_reverse_is_worse(judged):
    status, _, row = judged(set='learning_rate=1e-4', pairs=8)
    assert (status, row['verdict']) == (4, 'WORSE') and len(row['pairs']) < 8
    status, _, row = judged(set='learning_rate=1e-2', learning_rate=1e-4, pairs=8)
    assert (status, row['verdict']) == (0, 'BETTER')
    assert len({pair['seed'] for pair in row['pairs']}) == len(row['pairs'])


@pytest.mark.slow
def test_the_code_here_is_judged_by_the_referee_of_a_commit(
        judged, clone, char_data, tmp_path):
    for name, line in (('model.py', '# the end\n'), ('config/tiny.py', 'beta1 = 0.8\n')):
        with open(clone / name, 'a', encoding='utf-8') as f:
            f.write(line)
    words = ['config/tiny.py', *RECIPE, f'--dataset={char_data}', '--judge', '--against=HEAD',
             '--pairs=1']
    done = subprocess.run([sys.executable, clone / 'bench.py', *words], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    assert 'note: it changes config/tiny.py, model.py (' in done.stdout
    row = json.loads((tmp_path / 'results' / 'ledger.jsonl').read_text())
    assert row['pairs'][0]['steps'] != row['pairs'][0]['base']  # each side reads its own config
    assert row['base'] == sides.git('rev-parse', '--short=12', 'HEAD', cwd=clone).strip()
    assert sides.git('worktree', 'list', cwd=clone).count('\n') == 1


def test_what_cannot_be_judged_is_said(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert 'judge takes a change' in fails(capsys, monkeypatch, bench.main, '--judge', *RECIPE)
    assert 'judge takes a change' in fails(capsys, monkeypatch, bench.main, '--patch=x', *RECIPE)
    assert 'ledger.jsonl is not there' in fails(capsys, monkeypatch, bench.main, '--ledger')
    (tmp_path / 'ledger.jsonl').write_text('{"a":\n', encoding='utf-8')
    assert 'ledger.jsonl: not what --judge writes (Expecting value: line 1' in fails(
        capsys, monkeypatch, bench.main, '--ledger', '--save=.')


def test_a_patch_and_a_commit_that_do_not_fit_are_named(
        char_data, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bad.diff').write_text('nothing\n', encoding='utf-8')
    for word, said in (('--set=n_layers=2', "unknown key 'n_layers'"),
                       ('--patch=bad.diff', 'bad.diff: error: No valid patches in input'),
                       ('--patch=none.diff', "none.diff': No such file"),
                       ('--change=nothing', "nothing': No such file or directory"),
                       ('--against=nothing', 'invalid reference: nothing')):
        assert said in fails(capsys, monkeypatch, bench.main, '--judge', word, *RECIPE,
                             f'--dataset={char_data}')


@pytest.mark.skipif(os.name == 'nt', reason='no SIGTERM there')
@pytest.mark.slow
def test_a_judgement_that_is_told_to_end_keeps_its_pairs(clone, char_data, tmp_path):
    (tmp_path / 'tmp').mkdir()
    with subprocess.Popen(
            [sys.executable, '-u', clone / 'bench.py', *RECIPE, f'--dataset={char_data}',
             '--judge', '--against=HEAD', '--set=beta1=0.8', '--pairs=1000'], cwd=tmp_path,
            text=True, stdout=subprocess.PIPE,
            env={**os.environ, 'TMPDIR': str(tmp_path / 'tmp')}) as process:
        while not (line := process.stdout.readline()).startswith('pair 1 '):
            assert line
        process.terminate()
        assert 'interrupted: the pairs so far count' in process.stdout.read()
    assert process.returncode in (0, 3, 4)
    row = json.loads((tmp_path / 'results' / 'ledger.jsonl').read_text(encoding='utf-8'))
    assert len(row['pairs']) >= 1 and not list((tmp_path / 'tmp').glob('plaingpt-*'))
    assert sides.git('worktree', 'list', cwd=clone).count('\n') == 1


# -----------------------------------------------------------------------------
# cheats: each is named, and none is better

EVALUATED = 'targets = loader.eval_batch(starts)  # also of none: all gather a sharded model\n'
FORWARD = '        x = self.hidden(idx)  # (B, T, C)\n'
CHEATS = {  # {file: [(old, new)]}, and what is said
    'a mask': (
        {'plaingpt/kernels/__init__.py': [('is_causal=True)', 'is_causal=False)')]},
        'UNSOUND: the change: preflight: the future is hidden. No'),
    'a mask, and no preflight': (
        {'plaingpt/kernels/__init__.py': [
            ('is_causal=True)', 'is_causal=False)'),
            ('if not dropout and faster_attention(q)', 'if False')], **NO_PREFLIGHT},
        'UNSOUND: the change: what it says of a token depends on'),
    'targets in the input': (
        {'model.py': [(FORWARD, '        x = self.hidden(idx)\n        if targets is not None:\n'
                       '            x = x + self.transformer.wte(targets.clamp(min=0))\n')],
         **NO_PREFLIGHT},
        'UNSOUND: the change: it reports a loss of'),
    'a shifted evaluation': (
        {'plaingpt/data/batches.py': [('sequences[:, 1:].contiguous())',
                                       'sequences[:, :-1].contiguous())')], **NO_PREFLIGHT},
        'UNSOUND: the change: it reports a loss of'),
    'dropped hard tokens': (
        {'train.py': [(EVALUATED, EVALUATED + '        targets[targets > 40] = -1\n')],
         **NO_PREFLIGHT},
        'UNSOUND: the change: it reports a loss of'),
    'a temperature fitted on validation': (
        {'train.py': [("    with run.metrics.paused('evaluating'), averaged(run.optimizer):\n", '''
    if run.progress.iter_num == run.config.max_iters:
        head = run.model.lm_head.weight.data
        def scaled_loss(scale):
            head.mul_(scale)
            found = mean_loss(run.parallel.eval, run.val_data, 8, True, run.context, run.stop)[0]
            head.div_(scale)
            return found
        low, middle, high = map(scaled_loss, (0.9, 1.0, 1.1))  # its parabola is lowest at
        head.mul_(1 + 0.05 * (low - high) / (low - 2 * middle + high))
    with run.metrics.paused('evaluating'), averaged(run.optimizer):
''')]}, 'UNSOUND: with other validation text it ends with other weights'),
    'more steps': (
        {'train.py': [('    world = launched_world()\n    device, device_why',
                       '    config.max_iters *= 2\n    world = launched_world()\n'
                       '    device, device_why')]},
        r'UNSOUND: the change: it trained 40 steps with seed \d+, and was told 20'),
    'a chosen seed': (
        {'train.py': [('    world = launched_world()\n    device, device_why',
                       '    config.seed = 7\n    world = launched_world()\n'
                       '    device, device_why')]},
        'UNSOUND: the change: it trained 20 steps with seed 7, and was told'),
    'a chosen seed that the settings do not tell': (
        {'train.py': [('seed_everything(config.seed', 'seed_everything(7')],
         'plaingpt/training/run_data.py': [('share, seed=config.seed', 'share, seed=7')]},
        'UNSOUND: the change: two seeds end with the same weights'),
    'probabilities that do not sum to one': (
        {'model.py': [('targets, self.loss_chunk_tokens)\n',
                       'targets, self.loss_chunk_tokens) - 0.5\n')], **NO_PREFLIGHT},
        'UNSOUND: the change: it reports a loss of'),
    'a cache over sequences': (
        {'model.py': [('        logits = self.logits(x)  # (B, T, V)\n', '''
        logits = self.logits(x)  # (B, T, V)
        if not self.training:
            if not hasattr(self, 'counts'):
                self.counts = torch.zeros(2 * [self.config.vocab_size])
            logits = logits + self.counts.log1p()[idx]
            self.counts.index_put_((idx[:, :-1].flatten(), idx[:, 1:].flatten()),
                                   torch.ones(()), accumulate=True)
''')], **NO_PREFLIGHT}, 'UNSOUND: the change: what it says of a token depends on'),
}


@pytest.mark.parametrize('name', [pytest.param(name, marks=[] if name == 'a mask, and no preflight'
                                          else pytest.mark.slow) for name in CHEATS])
def test_a_cheat_in_the_code_is_named_and_not_better(judged, name):
    edits, said = CHEATS[name]
    status, out, row = judged(edits, pairs=2)
    assert status == 2 and row['verdict'] == 'UNSOUND'
    assert re.search(said, out), out
    assert f'it changes {", ".join(sorted(edits))}' in out


@pytest.mark.slow
def test_steps_and_a_seed_that_a_change_asks_for_are_named_and_not_given(judged):
    status, out, row = judged(set='max_iters=40 seed=7', pairs=2)
    assert status == 3 and 'note: it sets max_iters=40 seed=7' in out
    assert [pair['steps'] - pair['base'] for pair in row['pairs']] == [0, 0]


@pytest.mark.slow
def test_a_larger_model_is_named_and_judged_at_equal_time(judged):
    status, out, row = judged(set='n_embd=64')
    assert status == 3 and row['decided_by'] == 'time'
    assert re.search(r'note: 1.00x the tokens a step, [2-4].\d\dx the weights', out), out


@pytest.mark.slow
def test_an_easier_validation_split_is_named_and_not_measured_on(judged, char_data, tmp_path):
    shutil.copytree(char_data, tmp_path / 'easy')
    ids = np.fromfile(tmp_path / 'easy' / 'val.bin', '<u2')
    ids[:] = ids[0]
    ids.tofile(tmp_path / 'easy' / 'val.bin')
    meta = json.loads((tmp_path / 'easy' / 'meta.json').read_text())
    meta['splits']['val']['files'][0]['sha256'] = sha256_of(tmp_path / 'easy' / 'val.bin')
    (tmp_path / 'easy' / 'meta.json').write_text(json.dumps(meta))
    status, out, row = judged(set='dataset=./easy', pairs=2)
    assert status == 3 and 'note: it sets dataset=./easy' in out
    assert [pair['steps'] - pair['base'] for pair in row['pairs']] == [0, 0]


@pytest.mark.slow
def test_validation_text_in_the_training_text_is_named(judged, char_data, text_file, tmp_path):
    text = text_file.read_text()
    (tmp_path / 'both.txt').write_text(text[-len(text) // 5:] + text)
    prepare.main(['text', '--input=both.txt', f'--tokenizer={char_data}', '--data_dir=./both'])
    status, out, _ = judged(set='dataset=./both')
    assert status == 2 and re.search('of the validation text is in its training text', out), out


@pytest.mark.slow
def test_another_vocabulary_is_compared_in_bits_a_byte(judged, text_file, tmp_path):
    prepare.main(['text', f'--input={text_file}', '--tokenizer=bpe:300', '--data_dir=./bpe'])
    status, out, row = judged(set='dataset=./bpe', pairs=2)
    assert status in (3, 4) and row['unit'] == 'bits a byte'
    assert 'it has another tokenizer: compared in bits a byte' in out
    for pair in row['pairs']:  # fewer tokens, each with a higher loss, of the same text
        assert 0.5 < pair['steps'] / pair['base'] < 2


def test_a_copy_has_what_git_does_not_ignore(tmp_path):
    subprocess.run(['git', 'init', '-q', tmp_path / 'a'], check=True)
    (tmp_path / 'a' / '.gitignore').write_text('data\n')
    (tmp_path / 'a' / 'new.py').write_text('x = 1\n')
    (tmp_path / 'a' / 'data').mkdir()
    (tmp_path / 'a' / 'data' / 'b.py').write_text('')
    copy = sides.copy_tree(tmp_path / 'a', tmp_path / 'b')
    assert list(sides.changed_files(copy, tmp_path / 'a')) == ['data/b.py']
    (tmp_path / 'p.diff').write_text('--- a/new.py\n+++ b/new.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n')
    sides.git('apply', tmp_path / 'p.diff', cwd=copy)
    assert (copy / 'new.py').read_text() == 'x = 2\n'
