"""The preflight passes sound code, and leaves the run as it was."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import ROOT, options
from runs import CHECKED, change_batches

import model
import train
from configurator import load_config
from model import GPTConfig
from plaingpt.checks.model_checks import small_model
from plaingpt.core.settings import TrainConfig

FLAGS = {
    'newer flags': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='swiglu', tied_head=False,
                        zero_init=True, conv=3, value_embeddings=True, ngram_rows=50),
    'rotary positions': dict(rotary=True, eval_iters=100000),
    'bfloat16': dict(dtype='bfloat16', dropout=0.5, bias=True),
    'float16': dict(dtype='float16', activation_checkpointing='full'),
    'muon': dict(optimizer='muon', min_lr=0.0, lr_schedule='linear'),
    'sgd': dict(optimizer='sgd', learning_rate=0.1, decay_lr=False),
    'one channel a head': dict(n_layer=1, n_embd=8, n_head=8, check='overfit'),
    'one layer, one token': dict(n_layer=1, block_size=1),
}


RECIPES = [path for path in sorted(ROOT.glob('config/*.py')) if path.stem not in (
    'quickstart_sample', 'finetune_shakespeare', 'finetune_chat', 'grid_cpu')]


def test_every_recipe_passes(failed):
    different = {}  # most are the same at this size
    for path in RECIPES:
        config = load_config(TrainConfig, [str(path), *options(**CHECKED)])
        different[str(config.gpt_config(88)), config.optimizer, config.lr_schedule] = path
    assert {path.stem: failed(path) for path in different.values() if failed(path)} == {}


@pytest.mark.parametrize('flags', FLAGS.values(), ids=FLAGS)
def test_every_flag_passes(flags, failed):
    assert failed(**flags) == []


def test_the_checks_use_a_small_model_of_a_run_with_large_tables():
    config = GPTConfig(n_layer=12, n_head=2, n_embd=64, vocab_size=50304, ngram_rows=10**6,
                       value_embeddings=True, tied_head=False)
    assert small_model(config).num_parameters() < 200_000


def test_document_attention_passes(documents, failed):
    assert failed(dataset=documents, document_attention=True, dropout=0.2, conv=3) == []


def test_a_run_from_other_weights_is_checked(trained, tiny, capsys):
    train.main([*tiny, f'--init_from={trained}'])
    assert 'preflight' in capsys.readouterr().out


def test_a_resumed_run_is_checked_where_asked(tiny, capsys):
    train.main([*tiny, '--max_iters=1'])
    for words, is_checked in ((['--max_iters=2'], False), (['--check'], True)):
        capsys.readouterr()
        train.main([*tiny, '--init_from=resume', *words])
        assert ('preflight' in capsys.readouterr().out) == is_checked


# -----------------------------------------------------------------------------
# sound changes of the model


def sliding_window(patch):
    def change(original):
        def near(q, k, v, is_causal=False, attn_mask=None, **rest):
            T, S = q.size(2), k.size(2)
            mask = torch.ones(T, S, dtype=torch.bool).tril(S - T).triu(S - T - 3)
            if attn_mask is not None:  # rows of other lengths are padded in front
                mask = mask & attn_mask | torch.eye(S, dtype=torch.bool)[S - T:]
            return original(q, k, v, attn_mask=mask, **rest)
        return near
    patch(F, 'scaled_dot_product_attention', change)


def loss_of_forward(patch):
    patch(train, 'use_chunked_loss', lambda _: lambda model, compile: None)


PLAIN_MLP = model.MLP


class Mixture(nn.Module):
    """Each token goes to the best of four."""

    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.n_embd, 4, bias=False)
        self.experts = nn.ModuleList(PLAIN_MLP(config) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).max(dim=-1, keepdim=True)
        return sum((chosen == i) * weights * expert(x) for i, expert in enumerate(self.experts))


def mixture_of_experts(patch):
    patch(model, 'MLP', lambda _: Mixture)


def label_smoothing(patch):
    def change(original):
        def forward(self, idx, targets=None):
            if targets is None:
                return original(self, idx)
            logits = self.logits(self.hidden(idx))
            return None, F.cross_entropy(logits.mT, targets, ignore_index=-1, label_smoothing=0.1)
        return forward
    patch(model.GPT, 'forward', change)


def z_loss(patch):
    def change(original):
        def forward(self, idx, targets=None):
            logits, loss = original(self, idx, targets)
            if loss is not None and self.training:
                loss += 1e-4 * self.logits(self.hidden(idx)).logsumexp(dim=-1).square().mean()
            return logits, loss
        return forward
    patch(model.GPT, 'forward', change)


NEWER = dict(rotary=True, rmsnorm=True, tied_head=False)


@pytest.mark.parametrize('change, flags', [
    (sliding_window, NEWER), (mixture_of_experts, {}), (loss_of_forward, {}),
    (label_smoothing, {}), (z_loss, NEWER)])
def test_a_sound_change_of_the_model_raises_no_alarm(change, flags, patch, failed):
    change(patch)
    assert failed(block_size=32, batch_size=16, **flags) == []


def test_masked_targets_pass(patch, failed):
    change_batches(patch, lambda idx, targets: (
        idx, targets.where(torch.arange(idx.size(1)) % 2 == 1, -1)))  # the last one counts
    assert failed() == []
