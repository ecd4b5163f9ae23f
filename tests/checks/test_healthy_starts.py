"""Runs that are sound begin: from many kinds of weights, on many kinds of text, no check refuses.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from chat_model import save
from processes import options
from sample_data import ask, write_chat

import prepare
import train
from model import GPT, GPTConfig
from plaingpt.checks.data_checks import tokens_match_the_tokenizer
from plaingpt.data.dataset import open_dataset
from plaingpt.data.tokenizers import ByteTokenizer

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
RUN = dict(batch_size=4, gradient_accumulation_steps=1, eval_iters=2, warmup_iters=2, device='cpu',
           dtype='float32', report=False)
RECIPES = [dict(), dict(optimizer='muon'), dict(dropout=0.2, block_size=16)]
EMOJI = '🙂🎉 日本語のテキスト、こんにちは。🚀🌍 مرحبا\n'
LINE = 'the same line again and again\n'


@pytest.fixture(scope='module')
def texts(text_file, tmp_path_factory):
    """{name: dataset folder}: one line repeated, emoji and Japanese, code, conversations."""
    folder, found = tmp_path_factory.mktemp('texts'), {}
    for name, text in (('line', LINE * 300), ('emoji', EMOJI * 150),
                       ('code', text_file.read_text()[:20_000])):
        (folder / f'{name}.txt').write_text(text, encoding='utf-8')
        found[name] = folder / name
        prepare.main(['text', f'--input={folder}/{name}.txt', '--tokenizer=byte',
                      f'--data_dir={found[name]}'])
    talks = [ask(f'{i} こんにちは 🙂?', f'🎉 {i} はい', 'and?', 'ok') for i in range(80)]
    return {**found, 'chat': write_chat(folder / 'chat', talks)}


@pytest.fixture(scope='module')
def bases(texts, chat_model, tmp_path_factory):
    """{name: out_dir of a run}: barely trained, trained fast, overfit, random in GPT-2's depth, and
    tuned on conversations."""
    folder = tmp_path_factory.mktemp('bases')
    for name, text, seed, max_iters, learning_rate in (
            ('tiny', 'code', 1, 6, 6e-4), ('fast', 'code', 2, 60, 3e-3),
            ('overfit', 'line', 3, 200, 1e-2)):
        train.main(options(**SHAPE, **RUN, dataset=texts[text], out_dir=folder / name, seed=seed,
                           max_iters=max_iters, learning_rate=learning_rate, eval_interval=1000,
                           check=False))
    torch.manual_seed(0)
    save(GPT(GPTConfig(32, ByteTokenizer.vocab_size, 12, 2, 32)), ByteTokenizer(),
         folder / 'random')
    return {**{name: folder / name for name in ('tiny', 'fast', 'overfit', 'random')},
            'tuned': chat_model}


def test_random_letters_of_any_script_match_the_tokenizer_that_made_them(tmp_path):
    letters = random.Random(0)
    scripts = {'thai': (0xe01, 0xe2e), 'chinese': (0x4e00, 0x9fa5), 'hebrew': (0x5d0, 0x5ea),
               'emoji': (0x1f300, 0x1f64f), 'latin-1': (0, 255), 'letters': (97, 122)}
    for script, (first, last) in scripts.items():
        for tokenizer in ('bpe:300', 'bpe:4096'):
            text = ''.join(chr(letters.randint(first, last)) for _ in range(20_000))
            (tmp_path / 'text.txt').write_text(text, encoding='utf-8')
            folder = tmp_path / script / tokenizer
            prepare.main(['text', f'--input={tmp_path}/text.txt', f'--tokenizer={tokenizer}',
                          f'--data_dir={folder}'])
            data = open_dataset(folder)
            run = SimpleNamespace(dataset=data, train_data=data.loader('train', 32, 4))
            assert tokens_match_the_tokenizer(run) is None, (script, tokenizer)


@pytest.mark.parametrize('every', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_healthy_start_is_refused(every, texts, bases, tmp_path, capsys):
    new = [('scratch', text) for text in texts]
    starts = [(*start, {}, 0) for start in (('overfit', 'emoji'), ('overfit', 'chat'), *new)]
    if every:
        pairs = [(base, text) for base, text in itertools.product(bases, texts)
                 if base != 'tuned' or text == 'chat']  # a tuned model keeps its special tokens
        starts = [(*start, recipe, seed) for start in (*pairs, *new) for recipe in RECIPES
                  for seed in range(4)]
        assert len(starts) >= 200
    for base, text, recipe, seed in starts:
        train.main([*options(**{
            **SHAPE, **RUN, 'max_iters': 300, 'dataset': texts[text], 'seed': seed,
            'out_dir': tmp_path / 'out', 'init_from': bases.get(base, base), **recipe}), '--check'])
        out = capsys.readouterr().out
        assert 'checks passed' in out and 'FAILED' not in out, (base, text, recipe, seed)
