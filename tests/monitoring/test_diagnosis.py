"""Runs made to go wrong on purpose, and healthy ones: what is said of them."""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import options

import prepare
import train
from model import GPT, Block
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.run_record import read_run
from plaingpt.system.files import sha256_of
from plaingpt.tokens.batches import BatchLoader

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=16, max_iters=300,
             gradient_accumulation_steps=1, eval_interval=30, eval_iters=5, warmup_iters=30,
             lr_decay_iters=300, learning_rate=3e-3, min_lr=3e-4, health_interval=25,
             sample_tokens=0, report=False, device='cpu', dtype='float32', check='warn')


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
    return dict(max_iters=60, lr_decay_iters=60)


def little_text(monkeypatch, tmp_path, data):
    source = tmp_path / 'little.txt'
    source.write_text(Path(argparse.__file__).read_text()[:3000])
    prepare.main(['text', f'--input={source}', '--tokenizer=char', '--val_fraction=0.3',
                  f'--data_dir={tmp_path}/little'])
    return dict(dataset=tmp_path / 'little', learning_rate=1e-2, min_lr=1e-3, n_embd=64,
                lr_schedule='constant')


def with_validation(data, folder, change):
    """The settings of a run on `data`, with the tokens of validation changed."""
    folder.mkdir()
    for name in ('meta.json', 'train.bin'):
        (folder / name).write_bytes((data / name).read_bytes())
    change(np.fromfile(data / 'val.bin', dtype='<u2')).astype('<u2').tofile(folder / 'val.bin')
    return dict(dataset=folder, data_in_ram=False)  # in memory the checksums would tell


def validation_shifted(monkeypatch, tmp_path, data):
    vocab_size = int(np.fromfile(data / 'train.bin', dtype='<u2').max()) + 1
    return with_validation(data, tmp_path / 'shifted', lambda ids: (ids + 1) % vocab_size)


def validation_of_one_letter(monkeypatch, tmp_path, data):
    letters = with_validation(data, tmp_path / 'letter', lambda ids: np.where(
        np.arange(len(ids)) % 1000 < 300, ids, ids[0]))
    return dict(letters, max_iters=90, lr_decay_iters=90)


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


def targets_not_shifted(monkeypatch, tmp_path, data):
    """The model sees the token that it predicts, as with attention that is not causal."""
    original = BatchLoader._on_host

    def same(self, starts):
        idx, _ = original(self, starts)
        return idx, idx.clone()
    monkeypatch.setattr(BatchLoader, '_on_host', same)
    return dict(max_iters=60, learning_rate=3e-2, tied_head=False)


def same_sequences(monkeypatch, tmp_path, data):
    original = BatchLoader.train_batch
    monkeypatch.setattr(BatchLoader, 'train_batch', lambda self, *_: original(self, 0, 0))
    return dict(max_iters=90, lr_decay_iters=90)


def labels_noisy(monkeypatch, tmp_path, data):
    """30% of those trained on; evaluations have those of the text."""
    original, random = BatchLoader.train_batch, np.random.default_rng(0)

    def noisy(self, *arguments):
        idx, targets = original(self, *arguments)
        noise = torch.from_numpy(random.random(targets.shape) < 0.3)
        return idx, torch.where(noise, torch.randint_like(targets, 60), targets)
    monkeypatch.setattr(BatchLoader, 'train_batch', noisy)
    return {}


def rate_gone_at_once(monkeypatch, tmp_path, data):
    return dict(warmup_iters=5, lr_decay_iters=15, min_lr=0.0, max_iters=60)


def detached(monkeypatch, tmp_path, data):
    original = Block.forward

    def forward(self, x, *arguments, **others):
        return original(self, x.detach(), *arguments, **others)
    monkeypatch.setattr(Block, 'forward', forward)
    return dict(n_layer=3, max_iters=60, lr_decay_iters=60)


def batch_kept(monkeypatch, tmp_path, data):
    """The same batch, and an optimizer that moves nothing."""
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda self, *_: None)
    return {**same_sequences(monkeypatch, tmp_path, data), 'max_iters': 60, 'lr_decay_iters': 60}


def dropout_extreme(monkeypatch, tmp_path, data):
    return dict(dropout=0.9, batch_size=64, max_iters=150, learning_rate=1e-2)


# what is said of it, and at which evaluation at the latest
WRONG = {
    rate_times_100: ('rate_high', 60),
    rate_by_1000: ('rate_low', 60),
    rate_gone_at_once: ('rate_gone', 30),
    no_warmup: ('first_rise', 30),
    labels_shuffled: ('no_context', 270),
    labels_noisy: ('batches_too_hard', 240),
    same_sequences: ('batches_too_easy', 60),
    dropout_extreme: ('batches_too_easy', 90),
    targets_not_shifted: ('implausible', 30),
    init_times_10: ('initial_loss', 0),
    layer_frozen: ('no_gradient', 30),
    detached: ('no_gradient', 30),
    batch_kept: ('same_gradient', 30),
    little_text: ('overfit', 210),
    validation_shifted: ('foreign_validation', 60),
    validation_of_one_letter: ('easy_validation', 60),
    float16_overflows: ('loss_scale', 60),
    loader_slow: ('data_wait', 40),
    clip_tiny: ('clipped', 60),
    decay_times_100: ('short_memory', 30),
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
    'sgd': dict(optimizer='sgd', learning_rate=0.3, min_lr=0.03, weight_decay=1e-4),
    'six epochs, dropout 0.5': dict(dropout=0.5, batch_size=64, learning_rate=1e-2, log_interval=6),
}

# The same in kind, or long: make test-slow runs them.
SLOW = {rate_by_1000, no_warmup, init_times_10, validation_shifted, clip_tiny, decay_times_100,
        labels_noisy, dropout_extreme, layer_frozen, 'sgd', 'six epochs, dropout 0.5',
        'dropout, bfloat16', 'swiglu, wsd', 'constant rate, accumulation',
        'deep and narrow, float16'}


def cases(table):
    return [pytest.param(case, marks=pytest.mark.slow if case in SLOW else (),
                         id=getattr(case, '__name__', case)) for case in table]


@pytest.mark.parametrize('spoil', cases(WRONG))
def test_what_goes_wrong_is_named_in_time_and_once(spoil, monkeypatch, tmp_path, char_data, capsys):
    (name, latest), changes = WRONG[spoil], spoil(monkeypatch, tmp_path, char_data)
    found = diagnosed(tmp_path / 'out', **{'dataset': char_data, **changes})
    rows, run = read_rows(tmp_path / 'out/metrics.jsonl', pytest.fail), read_run(tmp_path / 'out')
    told = {each.name: row['iter'] for i, row in reversed([*enumerate(rows, 1)])
            if 'val_loss' in row for each in diagnose(rows[:i], run)}  # the first time
    assert name in found and told[name] <= latest, told
    assert capsys.readouterr().out.count('diagnosis: ') == len(found | told.keys())


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


def test_what_is_learned_by_heart_over_many_epochs_is_overfit_and_nothing_else(tmp_path,
                                                                               monkeypatch):
    little = little_text(monkeypatch, tmp_path, None)
    assert diagnosed(tmp_path / 'out', **little, dropout=0.5, max_iters=150) <= {'overfit'}


def test_a_resumed_run_is_told_that_its_data_has_changed(tmp_path, char_data, capsys):
    folder, out = tmp_path / 'data', tmp_path / 'out'
    folder.mkdir()
    meta = json.loads((char_data / 'meta.json').read_text())
    for split, times in (('train', 10), ('val', 1)):  # of more than the checksums of a resume read
        ids = np.tile(np.fromfile(char_data / f'{split}.bin', dtype='<u2'), times)
        ids.tofile(folder / f'{split}.bin')
        entry = meta['splits'][split]
        entry['tokens'] = entry['files'][0]['tokens'] = len(ids)
    (folder / 'meta.json').write_text(json.dumps(meta))

    def resumed(max_iters):
        capsys.readouterr()
        found = diagnosed(out, folder, max_iters=max_iters, lr_decay_iters=30, data_in_ram=False,
                          eval_interval=5, init_from='auto')
        assert ('diagnosis: the run began with other data' in capsys.readouterr().out) \
            == bool(found)
        return found
    assert resumed(5) == resumed(10) == set()
    tokens = np.memmap(folder / 'train.bin', dtype='<u2', mode='r+')
    tokens[8500:12000] = 0  # between the blocks that are read
    tokens.flush()
    assert resumed(15) == resumed(20) == {'changed_data'}


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
                       overfit_batches=0, n_embd=64, max_iters=300))


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


def test_a_block_with_a_thousandth_of_the_gradient_of_others_is_named():
    norms = {f'health/grad_norm/{name}': [norm, norm * 1.1]
             for name, norm in {'wte': 1e-5, 'h.0': 1.0, 'h.1': 1e-5, 'h.2': 2.0}.items()}
    [found] = diagnose(rows_of(**norms), RUN)
    assert found.name == 'no_gradient' and 'the gradient of h.1 is' in found.evidence


def test_blocks_whose_gradient_is_zero_in_the_first_step_only_give_no_alarm():
    norms = {'health/grad_norm/h.0': [0.0, 1.0, 0.5], 'health/grad_norm/h.1': [0.0, 0.8, 0.7]}
    assert [diagnose(rows_of(**norms)[:n], RUN) for n in (1, 2, 3)] == [[], [], []]


def test_bits_a_byte_below_those_of_english_are_named_on_validation_and_in_the_first_epoch():
    rows = rows_of(loss=[4.2] + [0.15] * 7, train_loss=[None] * 7 + [0.15])
    sized = {**RUN, 'train_bytes_per_token': 1.0}
    for run, names in ((RUN, []), (sized, ['implausible']), ({**sized, 'train_tokens': 600}, [])):
        assert [found.name for found in diagnose(rows, run)] == names
    for bits, names in ((0.2, ['implausible']), (0.6, [])):
        assert [found.name for found in diagnose(rows_of(val_bpb=[5.0, bits]), RUN)] == names


def test_validation_that_is_in_the_training_split_is_named():
    assert diagnose([], {**RUN, 'val_in_train': 0.05}) == []
    [found] = diagnose([], {**RUN, 'val_in_train': 0.3})
    assert found.name == 'overlap' and found.evidence.startswith('30% ')


def test_losses_that_stand_still_are_named_while_the_rate_is_high_only():
    fell = np.concatenate([np.linspace(4, 2, 10), np.full(10, 2.0)])
    rows = rows_of(train_loss=fell, val_loss=fell + 0.1, lr=np.full(20, 1e-3))
    assert [d.name for d in diagnose(rows, RUN)] == ['flat']
    decayed = rows_of(train_loss=fell, val_loss=fell + 0.1, lr=np.linspace(1e-3, 1e-4, 20))
    assert diagnose(decayed, RUN) == []


def test_a_tuned_run_that_loses_what_it_knew_of_other_text_is_named():
    tuned = {**RUN, 'from_scratch': False, 'data': {'tokenizer': 'gpt2'},
             'config': {**RUN['config'], 'also_evaluate': 'notes'}}
    chat = {**tuned, 'data': {'tokenizer': 'chat'}}
    for last, names in ((2.35, []), (2.74, ['forgetting'])):
        rows = rows_of(**{'val_loss/notes': [2.31, 2.2, last]})
        assert [found.name for found in diagnose(rows, tuned)] == names
    [[found], [of_chat]] = diagnose(rows, tuned), diagnose(rows, chat)
    assert 'notes rose from 2.31 to 2.74' in found.evidence
    assert '--dataset=' in found.remedy and '--dataset=' not in of_chat.remedy
    assert diagnose(rows, {**tuned, 'from_scratch': True}) == []


def test_a_run_that_saw_little_text_is_told_at_its_end_only():
    rows = rows_of(lr=np.full(300, 1e-3))
    small, large = RUN, {**RUN, 'parameters': 10**6}
    assert diagnose(rows, large) == [] == diagnose(rows, small, ended=True)
    assert [d.name for d in diagnose(rows, large, ended=True)] == ['budget']


def test_no_rows_and_few_rows_give_no_alarm():
    assert diagnose([], RUN, ended=True) == []
    assert diagnose(rows_of(loss=[4.1, 4.2], grad_norm=[1.0, 1.0]), RUN, ended=True) == []
