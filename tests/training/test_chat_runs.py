"""Tuning on conversations, with the commands that a user gives."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import CHAT, TINY, ask, lines, options, write_chat

import evaluate
import plan
import prepare
import train
from model import GPT, GPTConfig
from plaingpt.data.dataset import open_dataset
from plaingpt.data.packing import PackedLoader
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig


def conversations(n, seed=0):
    """Answers are of very different lengths, so that micro-batches have few targets or many."""
    rng = random.Random(seed)
    return [ask(f'{i}?' * rng.randint(1, 4), 'ab' * rng.choice((1, 1, 12))) for i in range(n)]


@pytest.fixture(scope='module')
def folder(text_file, tmp_path_factory):
    """A folder with the datasets data/chat, data/byte and data/char. There are questions that fill
    sequences of their own: with one in a micro-batch, nothing of it is learned."""
    folder = tmp_path_factory.mktemp('datasets')
    write_chat(folder / 'data/chat', conversations(150) + [ask('?' * 150, 'ab')] * 20,
               conversations(20, seed=1))
    for name in ('byte', 'char'):
        prepare.main(['text', f'--input={text_file}', f'--tokenizer={name}',
                      f'--data_dir={folder}/data/{name}'])
    return folder


CHAT_RUN = [*TINY, '--check=False', *options(
    dataset='chat', block_size=48, n_layer=1, learning_rate=1e-2, batch_size=8,
    gradient_accumulation_steps=1)]


@pytest.fixture
def chat(folder, tmp_path, monkeypatch):
    """The options of a short run on the conversations in data/chat, in a working directory."""
    (tmp_path / 'data').mkdir()
    for name in ('chat', 'byte', 'char'):
        (tmp_path / 'data' / name).symlink_to(folder / 'data' / name)
    monkeypatch.chdir(tmp_path)
    return CHAT_RUN


@pytest.fixture(scope='module')
def runs(folder):
    """A folder with the out_dirs of such a run and of one on plain text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.main([*CHAT_RUN, '--out_dir=chat'])
        train.main([*CHAT_RUN, '--dataset=byte', '--out_dir=base'])
    return folder


@pytest.mark.parametrize('tied_head', [True, False])
@pytest.mark.parametrize('vocab_size', [250, 255])  # 255 + 5 are beyond the padding
def test_new_tokens_get_the_mean_row_and_the_old_ones_stay(vocab_size, tied_head, tmp_path):
    model = GPT(GPTConfig(block_size=8, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16,
                          tied_head=tied_head))
    idx = torch.randint(vocab_size, (2, 8))
    before, wte = model(idx)[0], model.transformer.wte.weight.clone()
    checkpoints.Saver(tmp_path).save(model, build_optimizer(model, TrainConfig()), {
        'iter_num': 1, 'config': {}, 'tokenizer': {'kind': 'byte'}}, {})
    model = GPT(replace(model.config, vocab_size=vocab_size + 5))
    checkpoints.find(tmp_path).load_into(model)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied_head
    for p in (model.transformer.wte.weight, model.lm_head.weight):
        assert len(p) == GPT(model.config).lm_head.weight.size(0)
        assert torch.allclose(p[vocab_size:vocab_size + 5], p[:vocab_size].mean(0))
        assert not p[vocab_size + 5:].any()
    assert torch.equal(model.transformer.wte.weight[:vocab_size], wte[:vocab_size])
    assert torch.allclose(model(idx)[0][..., :vocab_size], before, atol=1e-6)


def test_a_model_is_tuned_with_the_tokenizer_that_wraps_its_own_alone(chat, runs, tmp_path):
    base = f'--init_from={runs}/base'
    train.main([*chat, base, '--out_dir=out', '--document_attention=True'])
    losses = [row['val_loss'] for row in lines(tmp_path / 'out', 'val_loss')]
    assert losses[-1] < losses[0]
    plan.main([*chat, base])
    shape = checkpoints.find('out', 'latest').load_model().config
    assert (shape.vocab_size, shape.document_start) == (CHAT.vocab_size, CHAT.conversation)
    train.main([*chat, '--dataset=char', '--max_iters=1', '--out_dir=base-char'])
    with pytest.raises(UserError, match='prepare the text with the tokenizer of the model'):
        train.main([*chat, '--init_from=base-char', '--out_dir=other'])


def test_samples_are_answers_to_questions_of_the_validation_split(chat, tmp_path):
    train.main([*chat, '--max_iters=45', '--lr_decay_iters=45', '--eval_interval=45',
                '--report=True', '--check=auto', '--out_dir=out'])
    asked = [CHAT.decode(CHAT.encode_prompt(messages[:1])) for messages in conversations(20, 1)]
    *_, sample = [row['sample'] for row in lines(tmp_path / 'out', 'sample')]
    for question in (asked[0], asked[9], asked[-1]):
        assert f'{question}a' in sample


def test_a_tuned_run_is_scored_on_the_text_that_it_knew(chat, runs):
    train.main([*chat, f'--init_from={runs}/base', '--out_dir=out'])
    before, after = (evaluated('--dataset=byte', *of)['bits_per_byte']
                     for of in ([f'--out_dir={runs}/base'], []))
    assert after > before > 0


def test_a_loader_that_ignores_the_mask_is_caught_before_it_trains(chat, monkeypatch):
    def spoiled(self, starts):
        idx, targets = on_host(self, starts)
        targets[:, 1] = idx[:, 2]  # the first token of what a user says
        return idx, targets

    on_host = PackedLoader._on_host
    monkeypatch.setattr(PackedLoader, '_on_host', spoiled)
    with pytest.raises(UserError, match='are not those that the mask marks'):
        train.main([*chat, '--check=True', '--out_dir=out'])


def test_evaluate_scores_all_that_a_run_validates_on(chat, tmp_path, capsys):
    """Conversations too that are cut, at a turn and within one."""
    long = [ask('a?' * 9, 'ab' * 9, 'c?' * 9, 'cd' * 9), ask('a?', 'abcde' * 20)]
    write_chat(tmp_path / 'data/long', conversations(150), conversations(20, seed=1) + long)
    train.main([*chat, '--dataset=long', '--document_attention=True', '--eval_iters=99',
                '--out_dir=out'])
    loader = open_dataset('data/long').loader('val', True, 48, 8)
    assert loader.with_bos.sum() > 1
    scores = evaluated('--checkpoint=latest')
    [*_, validated] = lines(tmp_path / 'out', 'val_loss')
    assert scores['loss'] == pytest.approx(validated['val_loss'], abs=1e-5)
    assert scores['bits_per_byte'] is None
    assert 'data/long, the answers: loss' in capsys.readouterr().out


def evaluated(*arguments):
    """What evaluate.py writes of a validation split."""
    Path('scores.json').unlink(missing_ok=True)
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json', *arguments])
    return json.loads(Path('scores.json').read_text())['results']['val']
