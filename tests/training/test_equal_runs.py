"""Runs that must be equal: however a step is split into micro-batches, on several processes, with
copies of the model or shares of it, after a resume, and watched or not; for each kind of model and
of data."""

import shutil
from functools import partial

import pytest
import torch
from processes import launch, options
from runs import TINY, in_background, lines, same, weights
from sample_data import one_benchmark

import train
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import monitor, optimizers, start

STEP = options(batch_size=2, gradient_accumulation_steps=6, eval_iters=6, check=False,
               report=True, eval_tasks='own')
NEWER = options(optimizer='normuon', rotary=True, rmsnorm=True, qk_norm=True, mlp='relu2',
                tied_head=False, zero_init=True, lr_schedule='wsd', conv=4,
                value_embeddings=True, ngram_rows=50,
                document_attention=True, average_decay=0.5)
RECIPES = {
    'gpt2': ['--dataset=data/char'],
    'newer': ['--dataset=data/char', *NEWER],
    'swiglu': ['--dataset=data/char',
               *options(optimizer='sgd', learning_rate=0.1, lr_schedule='linear', mlp='swiglu')],
    'chat': ['--dataset=data/chat',
             *options(block_size=48, n_layer=1, optimizer='sgd', learning_rate=0.3)],
    'mixture': ['--dataset=data/code:0.3,data/prose:0.7', '--n_layer=1']}
WAYS = {  # processes, settings
    'one micro-batch': (1, options(batch_size=12, gradient_accumulation_steps=1, eval_iters=1)),
    'two processes': (2, []),
    'three processes': (3, []),
    'shares of the model': (2, ['--parallel=fsdp'])}


@pytest.fixture(autouse=True)
def here(data, monkeypatch):
    one_benchmark(monkeypatch, [' main'])  # a question: fewer than processes
    monkeypatch.setattr(monitor, 'write_report', lambda *_: None)  # its plots take a second
    monkeypatch.setattr(start, 'document_start', lambda *_: 0)  # lines are documents
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)  # Muon rounds nothing


@pytest.fixture
def whole(corpora, recipe):
    """The out_dir of a run of the recipe in one process, which nothing interrupted."""
    out_dir = corpora / f'whole-{recipe}'
    if not out_dir.exists():
        train.main([*TINY, *STEP, *RECIPES[recipe], f'--out_dir={out_dir}'])
    return out_dir


FAST = {('newer', 'two processes'), ('newer', 'shares of the model'), ('chat', 'one micro-batch'),
        ('mixture', 'three processes')}


@pytest.mark.parametrize(('recipe', 'way'), [
    pytest.param(recipe, way, marks=[] if (recipe, way) in FAST else pytest.mark.slow)
    for recipe in RECIPES for way in WAYS])
def test_a_run_is_the_same_however_its_steps_are_shared_out(recipe, way, whole, tmp_path):
    processes, settings = WAYS[way]
    launch(train.main, processes, tmp_path, *TINY, *STEP, *RECIPES[recipe], *settings,
                    f'--out_dir={tmp_path}/out')
    assert not any('iter ' in log.read_text() for log in tmp_path.glob('log[12]'))  # rank 0 tells
    for key in ('loss', 'grad_norm', 'health/update_ratio/h.0', 'train_loss', 'val_loss',
                'own_logp', 'sample'):
        one, other = ([line[key] for line in lines(out, key)] for out in (whole, tmp_path / 'out'))
        assert other == pytest.approx(one, abs=1e-5), key
    for one, other in zip(weights(whole), weights(tmp_path / 'out'), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(('recipe', 'dtype', 'processes'), [
    ('gpt2', 'float32', 2), ('newer', 'bfloat16', 1), ('swiglu', 'float16', 1),
    ('chat', 'float32', 1), ('mixture', 'float32', 1)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
        recipe, dtype, processes, tmp_path, monkeypatch):
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    words = [*TINY, *STEP, *RECIPES[recipe], f'--dtype={dtype}', '--dropout=0.2',
             f'--parallel={"fsdp" if processes > 1 else "auto"}']
    with monkeypatch.context() as patch:
        patch.setattr(train, 'Saver', partial(in_background, train.Saver))
        launch(train.main, processes, tmp_path, *words, '--check=auto', f'--out_dir={whole}')
    shutil.copytree(whole, cut)
    shutil.rmtree(checkpoints.find(cut).path)  # of iteration 6; that of 3 remains
    launch(train.main, processes, tmp_path, *words, f'--out_dir={cut}', '--init_from=resume')
    assert same(weights(whole), weights(cut))
    states = [checkpoints.find(out_dir).state for out_dir in (whole, cut)]
    for key in ('scaler', 'rng', 'sequences', 'best_val_loss'):
        assert states[0][key] == states[1][key], key
    for key in ('loss', 'grad_norm', 'val_loss'):
        assert [(line['iter'], line[key]) for line in lines(whole, key)] \
            == [(line['iter'], line[key]) for line in lines(cut, key)]


WATCHING = {  # what looks at a run → its setting, the key of a row that it logs
    'health': ({}, 'health/grad_norm/h.0'), 'film': ({'film': True}, 'loss'),
    'samples': ({'report': True}, 'sample'), 'benchmarks': ({'eval_tasks': 'own'}, 'own_logp'),
    'checks': ({'check': 'auto'}, 'loss')}


def test_what_watches_a_run_changes_no_bit_of_it(tmp_path, monkeypatch):
    one_benchmark(monkeypatch, [' main'] * 5)
    monkeypatch.setattr(monitor, 'write_report', lambda *_: None)  # its plots take a second
    blind, words = tmp_path / 'blind', [*TINY, *RECIPES['newer'], '--dtype=float16',
                                        '--dropout=0.2', '--check=False']
    for name, (settings, key) in {'blind': ({}, 'loss'), **WATCHING}.items():
        with monkeypatch.context() as patch:
            if name != 'health':
                patch.setattr(monitor, 'HEALTH_INTERVAL', 0)
            train.main([*words, *options(**settings, out_dir=tmp_path / name)])
        assert lines(tmp_path / name, key) and (key == 'loss' or not lines(blind, key)), name
        assert same(weights(tmp_path / name), weights(blind)), name
        for key in ('loss', 'val_loss'):
            assert [line[key] for line in lines(tmp_path / name, key)] \
                == [line[key] for line in lines(blind, key)], name
