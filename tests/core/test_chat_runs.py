"""Runs on documents, and tuning on conversations, with the commands that a user gives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import options
from runs import TINY, lines, model_of
from sample_data import CHAT, ask, conversations, write_chat

import evaluate
import plan
import train
from model import GPT, GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.dataset import open_dataset
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.packing import PackedLoader
from plaingpt.core.settings import TrainConfig
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.system.errors import UserError

CHAT_RUN = [*TINY, '--check=False', *options(
    dataset='chat', block_size=48, n_layer=1, learning_rate=1e-2, batch_size=8,
    gradient_accumulation_steps=1)]


@pytest.fixture
def chat(data):
    """The options of a short run on the conversations in data/chat, which writes to out."""
    return [*CHAT_RUN, '--out_dir=out']


@pytest.fixture(scope='module')
def base(corpora):
    """The out_dir of such a run on plain text."""
    train.main([*CHAT_RUN, f'--dataset={corpora}/data/byte', f'--out_dir={corpora}/base'])
    return corpora / 'base'


def test_the_tokenizer_tells_what_opens_a_document(chat):
    train.main([*chat, '--document_attention', '--max_iters=1', '--dataset=byte'])
    assert model_of(checkpoints.find('out')).config.document_start == ByteTokenizer.end_of_text


def test_document_attention_is_refused_where_no_token_opens_a_document(chat):
    with pytest.raises(UserError, match=r'document_attention=True.*data/char'):
        train.main([*chat, '--document_attention', '--dataset=char'])


@pytest.mark.parametrize(('vocab_size', 'tied_head'), [(250, True), (255, False)])
def test_new_tokens_start_as_the_mean_of_the_others(vocab_size, tied_head, tmp_path):
    # 255 and five more are beyond the padding
    model = GPT(GPTConfig(block_size=8, vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=16,
                          tied_head=tied_head))
    idx = torch.randint(vocab_size, (2, 8))
    before = model(idx)[0]
    checkpoints.Saver(tmp_path).save(model, build_optimizer(model, TrainConfig()), {
        'iter_num': 1, 'config': {}, 'tokenizer': {'kind': 'byte'}, 'rng': {}})
    model = GPT(replace(model.config, vocab_size=vocab_size + 5))
    checkpoints.find(tmp_path).load_into(model)
    for p in (model.transformer.wte.weight, model.lm_head.weight):
        assert torch.allclose(p[vocab_size:vocab_size + 5], p[:vocab_size].mean(0))
        assert not p[vocab_size + 5:].any()
    assert torch.allclose(model(idx)[0][..., :vocab_size], before, atol=1e-6)


def test_tuning_on_conversations_starts_from_what_the_base_knows(chat, base, tmp_path):
    train.main([*chat, f'--init_from={base}', '--document_attention=True'])
    losses = [row['val_loss'] for row in lines(tmp_path / 'out', 'val_loss')]
    assert losses[-1] < losses[0]
    shape = model_of(checkpoints.find('out')).config
    assert shape.vocab_size == CHAT.vocab_size
    assert shape.document_start == CHAT.bos_id
    plan.main([*chat, f'--init_from={base}'])  # the plan of such a run
    before, after = (evaluated('--dataset=byte', f'--out_dir={of}')['bits_per_byte']
                     for of in (base, 'out'))
    assert after > before > 0


def test_conversations_with_another_tokenizer_than_the_base_are_refused(chat):
    train.main([*chat, '--dataset=char', '--max_iters=1', '--out_dir=base-char'])
    with pytest.raises(UserError, match='tokenizer'):
        train.main([*chat, '--init_from=base-char'])


def test_samples_are_replies_to_questions_of_the_validation_split(chat, tmp_path, no_plots):
    train.main([*chat, '--max_iters=45', '--lr_decay_iters=45', '--eval_interval=45',
                '--report=True'])
    asked = [CHAT.decode(CHAT.encode_prompt(messages[:1])) for messages in conversations(20, 1)]
    *_, sample = [row['sample'] for row in lines(tmp_path / 'out', 'sample')]
    for question in (asked[0], asked[9], asked[-1]):
        assert f'{question}a' in sample


def test_a_loader_that_ignores_the_mask_fails_the_preflight(chat, monkeypatch):
    def spoiled(self, starts):
        idx, targets = on_host(self, starts)
        targets[:, 1] = idx[:, 2]  # the first token of what a user says
        return idx, targets

    on_host = PackedLoader._on_host
    monkeypatch.setattr(PackedLoader, '_on_host', spoiled)
    with pytest.raises(UserError, match='--skip_checks=batches_match_the_files'):
        train.main([*chat, '--check=True'])


def test_evaluate_scores_all_that_a_run_validates_on(chat, tmp_path):
    # conversations too that are split, at a turn and within one
    long = [ask('a?' * 9, 'ab' * 9, 'c?' * 9, 'cd' * 9), ask('a?', 'abcde' * 20)]
    write_chat(tmp_path / 'long', conversations(150), conversations(20, seed=1) + long)
    train.main([*chat, f'--dataset={tmp_path}/long', '--document_attention=True',
                '--eval_iters=99'])
    loader = open_dataset(tmp_path / 'long').loader('val', 48, 8)
    assert loader.with_bos.sum() > 1
    [*_, validated] = lines(tmp_path / 'out', 'val_loss')
    assert evaluated('--checkpoint=latest')['loss'] == pytest.approx(
        validated['val_loss'], abs=1e-5)


def evaluated(*arguments):
    """What evaluate.py writes of a validation split."""
    Path('scores.json').unlink(missing_ok=True)
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json', *arguments])
    return json.loads(Path('scores.json').read_text())['results']['val']
