"""Code, data and weights as they should be: the preflight is quiet, and changes nothing."""


import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import ROOT, options
from runs import CHECKED, after_init, change_batches

import model
import train
from configurator import load_config
from plaingpt.checks import preflight
from plaingpt.monitoring.run_record import read_run
from plaingpt.system import devices
from plaingpt.training.settings import TrainConfig

FLAGS = {
    'newer flags': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='swiglu', tied_head=False,
                        zero_init=True, conv=3, value_embeddings=True, ngram_rows=50),
    'rotary positions': dict(rotary=True, eval_iters=100000),
    'documents': dict(document_attention=True, dropout=0.2, conv=3),
    'bfloat16': dict(dtype='bfloat16', dropout=0.5, bias=True),
    'float16': dict(dtype='float16', activation_checkpointing='full'),
    'muon': dict(optimizer='muon', min_lr=0.0, lr_schedule='linear'),
    'sgd': dict(optimizer='sgd', learning_rate=0.1, decay_lr=False),
    'one channel a head': dict(n_layer=1, n_embd=8, n_head=8, check='overfit'),
    'one layer, one token': dict(n_layer=1, block_size=1),
}


def test_every_recipe_passes(failed):
    recipes = {}
    for path in sorted(ROOT.glob('config/*.py')):
        if path.stem not in ('quickstart_sample', 'finetune_shakespeare', 'finetune_chat',
                             'grid_cpu'):
            config = load_config(TrainConfig, [str(path), *options(**CHECKED)])
            recipes[str(config.gpt_config(88)), config.optimizer, config.lr_schedule] = path
    assert len(recipes) > 3  # the others are the same at this size
    for path in recipes.values():
        assert failed(path) == [], path


def test_every_flag_passes(failed):
    for name, flags in FLAGS.items():
        assert failed(**flags) == [], name


def test_what_starts_from_other_weights_passes_and_what_continues_is_not_checked(
        trained, tiny, tmp_path, capsys):
    train.main([*tiny, f'--init_from={trained}'])
    assert 'checks passed' in capsys.readouterr().out
    assert read_run(tmp_path / 'out')['from_scratch'] is False
    train.main([*tiny, '--init_from=resume', '--max_iters=8'])
    assert 'preflight' not in capsys.readouterr().out
    train.main([*tiny, '--init_from=resume', '--check'])
    assert 'checks passed' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# changes that are as they should be


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


def norm_after_each_branch(patch):
    def forward(self, x, *rest):
        x = self.ln_1(x + self.attn(x, *rest))
        return self.ln_2(x + self.mlp(x))
    patch(model.Block, 'forward', lambda _: forward)


def gates_that_begin_at_zero(patch):
    def with_gate(init):
        def __init__(self, config):
            init(self, config)
            self.mlp.gate = nn.Parameter(torch.empty(config.n_embd))
        return __init__
    after_init(patch, lambda gpt: [block.mlp.gate.zero_() for block in gpt.transformer.h])
    patch(model.Block, '__init__', with_gate)
    patch(model.MLP, 'forward', lambda forward: lambda self, x: forward(self, x) * self.gate)


def loss_of_forward(patch):
    patch(train, 'chunked_cross_entropy', lambda _: None)


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


def loss_beside_the_loss(patch):
    def change(original):
        def forward(self, idx, targets=None):
            logits, loss = original(self, idx, targets)
            if loss is not None and self.training:
                loss += 1e-4 * self.logits(self.hidden(idx)).logsumexp(dim=-1).square().mean()
            return logits, loss
        return forward
    patch(model.GPT, 'forward', change)


def other_loss(loss_of, when=lambda gpt: True):
    """Where when(model), the loss is loss_of(model, hidden states, targets)."""
    def change(original):
        def forward(self, idx, targets=None):
            if targets is None or not when(self):
                return original(self, idx, targets)
            return None, loss_of(self, self.hidden(idx), targets)
        return forward
    return lambda patch: patch(model.GPT, 'forward', change)


def in_training(gpt):
    return gpt.training


def token_losses(gpt, x, targets, **how):
    losses = F.cross_entropy(gpt.logits(x).mT, targets, ignore_index=-1, reduction='none', **how)
    return losses  # (B, T)


def mean_over_targets(losses, targets):
    return losses.sum() / (targets != -1).sum()


label_smoothing = other_loss(lambda gpt, x, targets: mean_over_targets(
    token_losses(gpt, x, targets, label_smoothing=0.1), targets))
z_loss = other_loss(lambda gpt, x, targets: mean_over_targets(
    token_losses(gpt, x, targets) + 1e-4 * gpt.logits(x).logsumexp(dim=-1).square(), targets),
    in_training)


def weighted_by_position(gpt, x, targets):
    weights = torch.linspace(0.1, 1.0, x.size(1)) * (targets != -1)
    return (token_losses(gpt, x, targets) * weights).sum() / weights.sum()


def without_a_token(gpt, x, targets):
    targets = targets.masked_fill(targets == 0, -1)
    return mean_over_targets(token_losses(gpt, x, targets), targets)


def of_two_next_tokens(gpt, x, targets):
    second = F.pad(targets[:, 1:], (0, 1), value=-1)
    return mean_over_targets(token_losses(gpt, x, targets), targets) \
        + 0.3 * mean_over_targets(token_losses(gpt, gpt.ahead(x), second), second)


def multi_token_prediction(patch):
    def with_layer(init):
        def __init__(self, config):
            init(self, config)
            self.ahead = nn.Linear(config.n_embd, config.n_embd)
        return __init__
    patch(model.GPT, '__init__', with_layer)
    other_loss(of_two_next_tokens, in_training)(patch)


GPT2, NEWER = {}, dict(rotary=True, rmsnorm=True, tied_head=False)


@pytest.mark.parametrize('change, flags', [
    (sliding_window, NEWER), (norm_after_each_branch, GPT2), (gates_that_begin_at_zero, NEWER),
    (mixture_of_experts, GPT2), (loss_of_forward, GPT2), (loss_beside_the_loss, NEWER),
    (label_smoothing, GPT2), (z_loss, NEWER), (other_loss(weighted_by_position), GPT2),
    (other_loss(without_a_token), GPT2), (multi_token_prediction, GPT2)])
def test_a_sound_change_of_the_model_raises_no_alarm(change, flags, patch, failed):
    change(patch)
    assert failed(block_size=32, batch_size=16, **flags) == []


def test_targets_that_do_not_count_are_left_alone(patch, failed):
    change_batches(patch, lambda idx, targets: (
        idx, targets.where(torch.arange(idx.size(1)) % 2 == 1, -1)))  # the last one counts
    assert failed() == []


def test_float32_is_compared_in_float32_where_training_rounds_more(patch, tiny):
    seen = []
    patch(preflight, 'make', lambda made: lambda *args: [
        seen.append(torch.get_float32_matmul_precision()), made(*args)][1])
    patch(devices, 'prepare_device', lambda _: lambda _: torch.set_float32_matmul_precision('high'))
    try:
        train.main([*tiny, '--check'])
        assert seen == ['highest'] * 2 and torch.get_float32_matmul_precision() == 'high'
    finally:
        torch.set_float32_matmul_precision('highest')
