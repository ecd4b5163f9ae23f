"""Runs that must be equal: however a step is split into micro-batches, on several processes, with
copies of the model or shards of it, after a resume, and watched or not; for each kind of model and
of data."""

import shutil

import pytest
import torch
import torch._dynamo  # imported once, not in each fork
import torch.distributed.fsdp
from processes import launch, options
from runs import TINY, lines, same, weights
from sample_data import one_benchmark

import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.monitoring import observers

STEP = options(batch_size=2, gradient_accumulation_steps=6, eval_iters=6, check=False,
               report=True, eval_tasks='own')
NEWER = options(optimizer='normuon', rotary=True, rmsnorm=True, qk_norm=True, mlp='relu2',
                tied_head=False, zero_init=True, lr_schedule='wsd', conv=4,
                value_embeddings=True, ngram_rows=50,
                document_attention=True, ema_decay=0.5)
RECIPES = {
    'gpt2': ['--dataset=data/char'],
    'newer': ['--dataset=data/documents', *NEWER],
    'swiglu': ['--dataset=data/char',
               *options(optimizer='sgd', learning_rate=0.1, lr_schedule='linear', mlp='swiglu')],
    'chat': ['--dataset=data/chat',
             *options(block_size=48, n_layer=1, optimizer='sgd', learning_rate=0.3)],
    'packed': ['--dataset=data/documents', '--pack=documents', '--document_attention=True'],
    'mixture': ['--dataset=data/code:0.3,data/prose:0.7', '--n_layer=1']}
WAYS = {  # processes, settings
    'one micro-batch': (1, options(batch_size=12, gradient_accumulation_steps=1, eval_iters=1)),
    'two processes': (2, []),
    'three processes': (3, []),
    'shards of the model': (2, ['--parallel=fsdp'])}


@pytest.fixture(autouse=True)
def here(data, no_plots, muon_in_float32, monkeypatch):
    one_benchmark(monkeypatch, [' main'])  # a question: fewer than processes
    # Planning a step takes longer than training on it. tests/experiments has plans.
    monkeypatch.setattr(train, 'fit_to_memory', lambda build, config, *_: config)


@pytest.fixture
def whole(corpora, recipe):
    """The out_dir of a run of the recipe in one process, which nothing interrupted."""
    out_dir = corpora / f'whole-{recipe}'
    if not out_dir.exists():
        train.main([*TINY, *STEP, *RECIPES[recipe], f'--out_dir={out_dir}'])
    return out_dir


FAST = {('newer', 'shards of the model'), ('chat', 'one micro-batch'),
        ('mixture', 'three processes')}


@pytest.mark.parametrize(('recipe', 'way'), [
    pytest.param(recipe, way, marks=[] if (recipe, way) in FAST else pytest.mark.slow)
    for recipe in RECIPES for way in WAYS])
def test_a_run_is_the_same_however_its_steps_are_shared_out(recipe, way, whole, tmp_path):
    processes, settings = WAYS[way]
    launch(train.main, processes, tmp_path, *TINY, *STEP, *RECIPES[recipe], *settings,
           f'--out_dir={tmp_path}/out')
    for key in ('loss', 'grad_norm', 'health/update_ratio/h.0', 'train_loss', 'val_loss',
                'own_loss', 'sample'):
        one, other = ([line[key] for line in lines(out, key)] for out in (whole, tmp_path / 'out'))
        assert other == pytest.approx(one, abs=2e-5), key
    for one, other in zip(weights(whole), weights(tmp_path / 'out'), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(('recipe', 'dtype', 'processes'), [
    ('gpt2', 'float32', 2), ('newer', 'bfloat16', 1), ('swiglu', 'float16', 1),
    *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (
        ('chat', 'float32', 1), ('mixture', 'float32', 1),
        ('packed', 'float32', 1)))])
def test_a_resumed_run_matches_the_uninterrupted_one(recipe, dtype, processes, tmp_path):
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    words = [*TINY, *STEP, *RECIPES[recipe], f'--dtype={dtype}', '--dropout=0.2',
             f'--parallel={"fsdp" if processes > 1 else "auto"}', '--report=False',
             '--eval_tasks=']  # test_survival.py has these
    launch(train.main, processes, tmp_path, *words, f'--out_dir={whole}')
    shutil.copytree(whole, cut)
    shutil.rmtree(checkpoints.find(cut).path)  # of iteration 6; that of 3 remains
    launch(train.main, processes, tmp_path, *words, f'--out_dir={cut}', '--init_from=resume')
    assert same(weights(whole), weights(cut))
    states = [checkpoints.find(out_dir).state for out_dir in (whole, cut)]
    for key in ('scaler', 'rng', 'sequences', 'best_val_loss', 'averaged_steps'):
        assert states[0][key] == states[1][key], key
    for key in ('loss', 'grad_norm', 'val_loss'):
        assert [(line['iter'], line[key]) for line in lines(whole, key)] \
            == [(line['iter'], line[key]) for line in lines(cut, key)]


def test_what_watches_a_run_changes_no_bit_of_it(tmp_path, monkeypatch):
    words = [*TINY, *RECIPES['newer'], '--dtype=float16', '--dropout=0.2']
    watching = options(film=True, report=True, eval_tasks='own', check='auto')
    train.main([*words, *watching, '--out_dir=watched'])
    monkeypatch.setattr(observers, 'HEALTH_INTERVAL', 0)
    train.main([*words, '--check=False', '--out_dir=blind'])
    watched, blind = tmp_path / 'watched', tmp_path / 'blind'
    for key in ('health/grad_norm/h.0', 'sample', 'own_loss'):
        assert lines(watched, key), key
        assert not lines(blind, key), key
    assert same(weights(watched), weights(blind))
    for key in ('loss', 'val_loss'):
        assert [line[key] for line in lines(watched, key)] \
            == [line[key] for line in lines(blind, key)], key
