"""Runs made to go wrong on purpose, and healthy ones: what is said of them."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import options

import prepare
import train
from model import GPT
from plaingpt.corpus.batches import BatchLoader
from plaingpt.monitoring import diagnosis
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.run_record import read_run
from plaingpt.system.files import sha256_of

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=16, max_iters=300,
             gradient_accumulation_steps=1, eval_interval=30, eval_iters=5, warmup_iters=30,
             lr_decay_iters=300, learning_rate=3e-3, min_lr=3e-4, health_interval=25,
             sample_tokens=0, report=False, device='cpu', dtype='float32')


def diagnosed(out_dir, dataset, **changes):
    """Train a small run with `changes` → the names of what is said of it when it has ended."""
    train.main(options(**{**SMALL, **changes, 'dataset': dataset, 'out_dir': out_dir}))
    return names(out_dir)


def names(out_dir):
    rows = read_rows(Path(out_dir, 'metrics.jsonl'), pytest.fail)
    return {found.name for found in diagnose(rows, read_run(out_dir), ended=True)}


# -----------------------------------------------------------------------------
# what goes wrong: each spoils something and returns the settings to train with


def rate_times_100(monkeypatch, tmp_path, data):
    return dict(learning_rate=0.3, min_lr=0.03)


def rate_by_1000(monkeypatch, tmp_path, data):
    return dict(learning_rate=3e-6, min_lr=3e-7)


def no_warmup(monkeypatch, tmp_path, data):
    return dict(learning_rate=0.3, min_lr=0.03, warmup_iters=0)


def labels_shuffled(monkeypatch, tmp_path, data):
    original = BatchLoader._on_host

    def shuffled(self, starts):
        idx, targets = original(self, starts)
        order = np.random.default_rng(0).permutation(targets.numel())
        return idx, targets.flatten()[order].view_as(targets)
    monkeypatch.setattr(BatchLoader, '_on_host', shuffled)
    return {}


def init_times_10(monkeypatch, tmp_path, data):
    original = GPT.init_weights

    def larger(self):
        original(self)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p *= 10
    monkeypatch.setattr(GPT, 'init_weights', larger)
    return dict(n_embd=64)


def layer_frozen(monkeypatch, tmp_path, data):
    original = train.starting_point.build_model

    def frozen(*arguments):
        model = original(*arguments)
        model.transformer.h[1].requires_grad_(False)
        return model
    monkeypatch.setattr(train.starting_point, 'build_model', frozen)
    return {}


def little_text(monkeypatch, tmp_path, data):
    source = tmp_path / 'little.txt'
    source.write_text(Path(diagnosis.__file__).read_text()[:3000])
    prepare.main(['text', f'--input={source}', '--tokenizer=char', '--val_fraction=0.3',
                  f'--data_dir={tmp_path}/little'])
    return dict(dataset=tmp_path / 'little', learning_rate=1e-2, min_lr=1e-3, n_embd=64,
                lr_schedule='constant')


def validation_shifted(monkeypatch, tmp_path, data):
    folder = tmp_path / 'shifted'
    folder.mkdir()
    vocab_size = int(np.fromfile(data / 'train.bin', dtype='<u2').max()) + 1
    for name in ('meta.json', 'train.bin'):
        (folder / name).write_bytes((data / name).read_bytes())
    ((np.fromfile(data / 'val.bin', dtype='<u2') + 1) % vocab_size).astype('<u2').tofile(
        folder / 'val.bin')
    return dict(dataset=folder)


def float16_overflows(monkeypatch, tmp_path, data):
    original = train.starting_point.build_model

    def steep(*arguments):
        model = original(*arguments)
        model.transformer.ln_f.register_full_backward_hook(lambda _, inputs, outputs: tuple(
            g if g is None else g * 1e9 for g in inputs))
        return model
    monkeypatch.setattr(train.starting_point, 'build_model', steep)
    return dict(dtype='float16', max_iters=60, lr_decay_iters=60)


def loader_slow(monkeypatch, tmp_path, data):
    original = BatchLoader.train_batch
    monkeypatch.setattr(BatchLoader, 'train_batch',
                        lambda *arguments: time.sleep(0.08) or original(*arguments))
    return dict(max_iters=40, lr_decay_iters=40)


def clip_tiny(monkeypatch, tmp_path, data):
    return dict(grad_clip=1e-6)


def decay_times_100(monkeypatch, tmp_path, data):
    return dict(weight_decay=10.0)


WRONG = {
    rate_times_100: 'rate_high',
    rate_by_1000: 'rate_low',
    no_warmup: 'first_rise',
    labels_shuffled: 'no_context',
    init_times_10: 'initial_loss',
    layer_frozen: 'dying',
    little_text: 'overfit',
    validation_shifted: 'foreign_validation',
    float16_overflows: 'loss_scale',
    loader_slow: 'data_wait',
    clip_tiny: 'clipped',
    decay_times_100: 'forgetting',
}

HEALTHY = {
    'gpt2': {},
    'dropout, bfloat16': dict(dropout=0.1, dtype='bfloat16', bias=True),
    'newer': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='relu2', tied_head=False,
                  zero_init=True, optimizer='muon'),
    'swiglu, wsd': dict(rotary=True, mlp='swiglu', logit_softcap=15.0, lr_schedule='wsd'),
    'constant rate, accumulation': dict(decay_lr=False, gradient_accumulation_steps=2,
                                        batch_size=8),
    'deep and narrow, float16': dict(n_layer=4, n_embd=16, dtype='float16', max_iters=240),
}

# The same in kind, or long: make test-slow runs them.
SLOW = {rate_by_1000, no_warmup, init_times_10, validation_shifted, clip_tiny, decay_times_100,
        'dropout, bfloat16', 'swiglu, wsd', 'constant rate, accumulation',
        'deep and narrow, float16'}


def cases(table):
    return [pytest.param(case, marks=pytest.mark.slow if case in SLOW else (),
                         id=getattr(case, '__name__', case)) for case in table]


@pytest.mark.parametrize('spoil', cases(WRONG))
def test_what_goes_wrong_is_named(spoil, monkeypatch, tmp_path, char_data, capsys):
    changes = spoil(monkeypatch, tmp_path, char_data)
    found = diagnosed(tmp_path / 'out', **{'dataset': char_data, **changes})
    assert WRONG[spoil] in found
    assert capsys.readouterr().out.count('diagnosis: ') == len(found)  # each told once


@pytest.mark.parametrize('name', cases(HEALTHY))
def test_a_healthy_run_gives_no_alarm(name, tmp_path, char_data):
    assert diagnosed(tmp_path / 'out', char_data, **HEALTHY[name]) == set()


def test_the_weights_of_another_tokenizer_are_suspected(trained, char_data, tmp_path):
    folder = tmp_path / 'data'
    folder.mkdir()
    meta = json.loads((char_data / 'meta.json').read_text())
    for split in ('train', 'val'):
        ids, path = np.fromfile(char_data / f'{split}.bin', dtype='<u2'), folder / f'{split}.bin'
        ((ids + 1) % (ids.max() + 1)).astype('<u2').tofile(path)
        meta['splits'][split]['files'][0]['sha256'] = sha256_of(path)
    (folder / 'meta.json').write_text(json.dumps(meta))
    learned = tmp_path / 'learned'
    train.main(options(**{**SMALL, 'max_iters': 60, 'lr_decay_iters': 60, 'dataset': char_data,
                          'out_dir': learned}))
    # on disk: in memory the checksums would tell
    few = dict(init_from=learned, max_iters=10, lr_decay_iters=30, data_in_ram=False)
    assert 'initial_loss' in diagnosed(tmp_path / 'other', folder, **few)
    assert diagnosed(tmp_path / 'same', char_data, **few) == set()


@pytest.mark.parametrize('iters, words',
                         [(100, 'near zero as it should'), (5, 'should come under')])
def test_a_few_batches_are_learned_by_heart(iters, words, tmp_path, char_data, capsys):
    train.main(options(**{**SMALL, 'overfit_batches': 2, 'n_embd': 64, 'learning_rate': 1e-2,
                          'min_lr': 1e-3, 'max_iters': iters, 'warmup_iters': min(iters, 30),
                          'lr_decay_iters': iters, 'report': True, 'dataset': char_data,
                          'out_dir': tmp_path / 'out'}))
    out = capsys.readouterr().out
    assert words in out and 'diagnosis: ' not in out
    assert words in (tmp_path / 'out/report.md').read_text()


def rows_of(**columns):
    """Rows as metrics.jsonl has them, one for each value of the columns."""
    return [{'iter': i, 'tokens': 100 * i, 'elapsed_s': 0.1 * i,
             **{key: column[i] for key, column in columns.items()}}
            for i in range(len(next(iter(columns.values()))))]


RUN = dict(vocab_size=65, parameters=10**4, train_tokens=10**6, unigram_loss=3.3, from_scratch=True,
           config=dict(warmup_iters=10, decay_lr=True, grad_clip=1.0, weight_decay=0.1,
                       overfit_batches=0, n_embd=64))


def test_a_gradient_that_climbs_or_spikes_is_named():
    norms = np.ones(200)
    assert diagnose(rows_of(grad_norm=norms), RUN) == []
    assert [d.name for d in diagnose(rows_of(grad_norm=norms * np.linspace(0.2, 8, 200)), RUN)] \
        == ['climb']
    norms[[80, 120, 160]] = 30.0
    assert [d.name for d in diagnose(rows_of(grad_norm=norms), RUN)] == ['spikes']


def test_attention_that_has_become_a_choice_of_one_token_is_named():
    logits = {'health/attention_logit/h.0': [5.0, 6.0], 'health/attention_logit/h.1': [9.0, 1500.0]}
    [found] = diagnose(rows_of(**logits), RUN)
    assert found.name == 'attention_logit' and 'h.1 reached 1,500 at iteration 1' in found.evidence


def test_losses_that_stand_still_are_named_while_the_rate_is_high_only():
    fell = np.concatenate([np.linspace(4, 2, 10), np.full(10, 2.0)])
    rows = rows_of(train_loss=fell, val_loss=fell + 0.1, lr=np.full(20, 1e-3))
    assert [d.name for d in diagnose(rows, RUN)] == ['flat']
    decayed = rows_of(train_loss=fell, val_loss=fell + 0.1, lr=np.linspace(1e-3, 1e-4, 20))
    assert diagnose(decayed, RUN) == []


def test_a_run_that_saw_little_text_is_told_at_its_end_only():
    rows = rows_of(lr=np.full(300, 1e-3))
    small, large = RUN, {**RUN, 'parameters': 10**6}
    assert diagnose(rows, large) == [] == diagnose(rows, small, ended=True)
    assert [d.name for d in diagnose(rows, large, ended=True)] == ['budget']


def test_no_rows_and_few_rows_give_no_alarm():
    assert diagnose([], RUN, ended=True) == []
    assert diagnose(rows_of(loss=[4.1, 4.2], grad_norm=[1.0, 1.0]), RUN, ended=True) == []
