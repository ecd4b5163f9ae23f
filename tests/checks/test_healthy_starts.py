"""The preflight refuses no sound run: from new or overfitted weights, on many kinds of text."""

from itertools import product

import pytest
from processes import options
from sample_data import ask, prepare_corpora, write_chat

import train

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
RUN = dict(batch_size=4, gradient_accumulation_steps=1, eval_iters=2, warmup_iters=2, device='cpu',
           dtype='float32', report=False)
EMOJI = '🙂🎉 日本語のテキスト、こんにちは。🚀🌍 مرحبا\n'
LINE = 'the same line again and again\n'


@pytest.fixture(scope='module')
def texts(text_file, tmp_path_factory):
    """{name: dataset folder}: one line repeated, emoji and Japanese, code, conversations."""
    folder = tmp_path_factory.mktemp('texts')
    prepare_corpora(folder, {'line': LINE * 300, 'emoji': EMOJI * 150,
                             'code': text_file.read_text()[:20_000]})
    talks = [ask(f'{i} こんにちは 🙂?', f'🎉 {i} はい', 'and?', 'ok') for i in range(80)]
    write_chat(folder / 'data/chat', talks)
    return folder / 'data'


@pytest.fixture(scope='module')
def overfit(texts):
    """The out_dir of a run on one line."""
    train.main(options(**SHAPE, **RUN, dataset=texts / 'line', out_dir=texts / 'overfit',
                       max_iters=200, learning_rate=1e-2, eval_interval=1000, check=False))
    return texts / 'overfit'


RECIPES = {'plain': {}, 'muon': {'optimizer': 'muon'},
           'short': {'dropout': 0.2, 'block_size': 16}}
STARTS = list(product(RECIPES, ['line', 'emoji', 'code', 'chat'], ['scratch', 'overfit']))
FEW = [('plain', 'line', 'overfit'), ('plain', 'code', 'scratch'), ('plain', 'chat', 'scratch'),
       ('muon', 'emoji', 'scratch'), ('short', 'chat', 'overfit')]


@pytest.mark.parametrize(('recipe', 'text', 'base'), [
    *FEW, *(pytest.param(*start, marks=pytest.mark.slow) for start in STARTS if start not in FEW)])
def test_a_healthy_start_is_not_refused(recipe, text, base, texts, overfit, tmp_path, capsys):
    train.main([*options(**{**SHAPE, **RUN, 'max_iters': 300, 'dataset': texts / text,
                            'out_dir': tmp_path / 'out', **RECIPES[recipe],
                            'init_from': overfit if base == 'overfit' else base}), '--check'])
    assert 'FAILED' not in capsys.readouterr().out
