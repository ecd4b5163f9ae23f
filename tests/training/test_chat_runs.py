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
from plaingpt.data.dataset import open_dataset
from plaingpt.data.packing import PackedLoader
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CHAT_RUN = [*TINY, '--check=False', *options(
    dataset='chat', block_size=48, n_layer=1, learning_rate=1e-2, batch_size=8,
    gradient_accumulation_steps=1)]


@pytest.fixture
def chat(data):
    """The options of a short run on the conversations in data/chat."""
    return CHAT_RUN


@pytest.fixture(scope='module')
def base(corpora):
    """The out_dir of such a run on plain text."""
    train.main([*CHAT_RUN, f'--dataset={corpora}/data/byte', f'--out_dir={corpora}/base'])
    return corpora / 'base'


def test_the_tokenizer_tells_what_opens_a_document(chat):
    documents = [*chat, '--document_attention', '--max_iters=1', '--out_dir=out']
    train.main([*documents, '--dataset=byte'])
    assert model_of(checkpoints.find('out')).config.document_start == ByteTokenizer.end_of_text
    with pytest.raises(UserError, match='data/char has no end of text'):
        train.main([*documents, '--dataset=char'])


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


def test_a_model_is_tuned_with_the_tokenizer_that_wraps_its_own_alone(chat, base, tmp_path):
    train.main([*chat, f'--init_from={base}', '--out_dir=out', '--document_attention=True'])
    losses = [row['val_loss'] for row in lines(tmp_path / 'out', 'val_loss')]
    assert losses[-1] < losses[0]
    before, after = (evaluated('--dataset=byte', f'--out_dir={of}')['bits_per_byte']
                     for of in (base, 'out'))
    assert after > before > 0
    plan.main([*chat, f'--init_from={base}'])
    shape = model_of(checkpoints.find('out', 'latest')).config
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
    write_chat(tmp_path / 'long', conversations(150), conversations(20, seed=1) + long)
    train.main([*chat, f'--dataset={tmp_path}/long', '--document_attention=True', '--eval_iters=99',
                '--out_dir=out'])
    loader = open_dataset(tmp_path / 'long').loader('val', 48, 8)
    assert loader.with_bos.sum() > 1
    scores = evaluated('--checkpoint=latest')
    [*_, validated] = lines(tmp_path / 'out', 'val_loss')
    assert scores['loss'] == pytest.approx(validated['val_loss'], abs=1e-5)
    assert scores['bits_per_byte'] is None
    assert 'long, the answers: loss' in capsys.readouterr().out


def evaluated(*arguments):
    """What evaluate.py writes of a validation split."""
    Path('scores.json').unlink(missing_ok=True)
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json', *arguments])
    return json.loads(Path('scores.json').read_text())['results']['val']
