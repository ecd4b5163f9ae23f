"""Code, data and weights as they should be: the preflight is quiet, and changes nothing."""

import ast

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import ROOT, options, same, weights
from test_spoiled_code import after_init, changed_on_the_way, targets_not_shifted

import model
import train
from plaingpt.system.errors import UserError

# -----------------------------------------------------------------------------
# what is sound

RECIPES = sorted(path for path in ROOT.glob('config/*.py')
                 if path.stem not in ('quickstart_sample', 'finetune_shakespeare', 'finetune_chat',
                                      'grid_cpu'))
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, total_batch_size=0,
            gradient_accumulation_steps=2, device='cpu', dtype='float32', vocab_size=0,
            compile=False, max_iters=20, eval_iters=2, eval_interval=10, eval_tokens=0,
            warmup_iters=2, lr_decay_iters=20, sample_tokens=0, report=False, log_interval=1)
FLAGS = {
    'newer flags': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='swiglu', tied_head=False,
                        zero_init=True, conv=3, value_embeddings=True, embedding_norm=True,
                        head_bias=True, logit_softcap=15.0),
    'no positions but rotary of a few channels': dict(rotary=True, rotary_share=0.25),
    'dropout': dict(dropout=0.5, bias=True),
    'documents': dict(document_attention=True, document_start=0, dropout=0.2, conv=3),
    'bfloat16': dict(dtype='bfloat16', dropout=0.2),
    'float16': dict(dtype='float16'),
    'muon': dict(optimizer='muon'),
    'sgd': dict(optimizer='sgd', learning_rate=0.1),
    'one channel a head': dict(n_layer=1, n_embd=8, n_head=8),
    'recomputed': dict(activation_checkpointing='full', loss_chunk_tokens=7),
    'one layer, one token': dict(n_layer=1, block_size=1),
    'a constant rate': dict(decay_lr=False),
    'to a rate of 0': dict(min_lr=0.0, lr_schedule='linear'),
    'overfit_batches': dict(overfit_batches=1),
    'whole split': dict(eval_iters=100000),
}


@pytest.mark.parametrize('recipe', RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes(recipe, tmp_path, char_data, capsys):
    train.main([str(recipe), *options(**TINY, dataset=char_data, out_dir=tmp_path / 'out'),
                '--check'])
    assert 'checks passed' in capsys.readouterr().out


@pytest.mark.parametrize('flags', FLAGS)
def test_every_flag_passes(flags, tmp_path, char_data, capsys):
    train.main([*options(**{**TINY, **FLAGS[flags], 'dataset': char_data,
                            'out_dir': tmp_path / 'out'}), '--check'])
    out = capsys.readouterr().out
    assert 'checks passed' in out and 'FAILED' not in out


def test_what_starts_from_other_weights_passes_and_what_continues_is_not_checked(
        trained, tiny, char_data, tmp_path, capsys):
    train.main([*tiny, f'--init_from={trained}'])
    assert 'checks passed' in capsys.readouterr().out
    train.main([*tiny, '--init_from=resume', '--max_iters=8'])
    assert 'preflight' not in capsys.readouterr().out
    train.main([*tiny, '--init_from=resume', '--check'])
    assert 'checks passed' in capsys.readouterr().out


@pytest.mark.parametrize('seed', [1, 2, 3])
def test_the_rough_weights_of_a_fast_training_pass(seed, tmp_path, char_data, capsys):
    hot = {**TINY, 'block_size': 32, 'batch_size': 8, 'gradient_accumulation_steps': 1,
           'warmup_iters': 0, 'max_iters': 40, 'eval_interval': 40, 'learning_rate': 3e-3,
           'dataset': char_data, 'health_interval': 0, 'seed': seed}
    train.main([*options(**hot, out_dir=tmp_path / 'hot'), '--check=False'])
    train.main([*options(**hot, out_dir=tmp_path / 'next', init_from=tmp_path / 'hot'), '--check'])
    assert 'checks passed' in capsys.readouterr().out


def test_a_check_leaves_the_run_as_it_was(tiny, tmp_path):
    tiny = [*tiny, '--dropout=0.2', '--zero_init=True', '--conv=2']
    train.main([*tiny, f'--out_dir={tmp_path}/checked'])
    train.main([*tiny, f'--out_dir={tmp_path}/unchecked', '--check=False'])
    assert same(weights(tmp_path / 'checked'), weights(tmp_path / 'unchecked'))


def test_a_warning_is_no_stop_and_no_check_says_nothing(monkeypatch, tiny, tmp_path, capsys):
    targets_not_shifted(monkeypatch, tmp_path)
    with pytest.raises(UserError, match='the inputs shifted by one'):
        train.main(tiny)
    assert not (tmp_path / 'out/run.json').exists()
    capsys.readouterr()
    train.main([*tiny, '--check=False'])
    assert 'preflight' not in ''.join(capsys.readouterr())
    train.main([*tiny, '--check=warn'])
    out, err = capsys.readouterr()
    assert 'done: ' in out and err.count('warning: preflight: batches are what the files') == 1


# -----------------------------------------------------------------------------
# changes that are as they should be


def sliding_window(monkeypatch):
    original = F.scaled_dot_product_attention

    def near(q, k, v, is_causal=False, attn_mask=None, **rest):
        T, S = q.size(2), k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool).tril(S - T).triu(S - T - 3)
        if attn_mask is not None:  # rows of other lengths are padded in front
            mask = mask & attn_mask | torch.eye(S, dtype=torch.bool)[S - T:]
        return original(q, k, v, attn_mask=mask, **rest)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', near)


def norm_after_each_branch(monkeypatch):
    def forward(self, x, rotary=None, cache=None, idx=None):
        x = self.ln_1(x + self.attn(x, rotary, cache, idx))
        return self.ln_2(x + self.mlp(x))
    monkeypatch.setattr(model.Block, 'forward', forward)


def gates_that_begin_small(size):
    def change(monkeypatch):
        original, forward = model.Block.__init__, model.MLP.forward
        after_init(monkeypatch, lambda gpt: [block.mlp.gate.fill_(size)
                                             for block in gpt.transformer.h])

        def init(self, config):
            original(self, config)
            self.mlp.gate = nn.Parameter(torch.empty(config.n_embd))
        monkeypatch.setattr(model.Block, '__init__', init)
        monkeypatch.setattr(model.MLP, 'forward', lambda self, x: forward(self, x) * self.gate)
    return change


def dropout_of_ones_own(monkeypatch):
    original = model.MLP.forward
    monkeypatch.setattr(model.MLP, 'forward', lambda self, x: F.dropout(
        original(self, x), 0.1, self.training))


def parallel_branches(monkeypatch):
    monkeypatch.setattr(model.Block, 'forward', lambda self, x, rotary=None, cache=None, idx=None:
                        x + self.attn(self.ln_1(x), rotary, cache, idx) + self.mlp(self.ln_2(x)))


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


def mixture_of_experts(monkeypatch):
    monkeypatch.setattr(model, 'MLP', Mixture)


def loss_beside_the_loss(monkeypatch):
    original = model.GPT.forward

    def forward(self, idx, targets=None):
        logits, loss = original(self, idx, targets)
        if loss is not None and self.training:
            loss = loss + 1e-4 * self.logits(self.hidden(idx)).logsumexp(dim=-1).square().mean()
        return logits, loss
    monkeypatch.setattr(model.GPT, 'forward', forward)


SOUND = {
    'sliding window': sliding_window,
    'norm after each branch': norm_after_each_branch,
    'gates of 0': gates_that_begin_small(0.0),
    'gates of 1e-5': gates_that_begin_small(1e-5),
    'dropout of ones own': dropout_of_ones_own,
    'parallel branches': parallel_branches,
    'mixture of experts': mixture_of_experts,
    'a loss beside the loss': loss_beside_the_loss,
}


@pytest.mark.parametrize('change', SOUND)
@pytest.mark.parametrize('flags', [{}, dict(rotary=True, rmsnorm=True, tied_head=False)],
                         ids=['gpt2', 'newer'])
def test_a_sound_change_raises_no_alarm(change, flags, monkeypatch, tmp_path, char_data, capsys):
    SOUND[change](monkeypatch)
    train.main([*options(**{**TINY, **flags, 'dataset': char_data, 'block_size': 32,
                            'batch_size': 16, 'out_dir': tmp_path / 'out'}), '--check'])
    out = capsys.readouterr().out
    assert 'FAILED' not in out


def test_targets_that_do_not_count_are_left_alone(monkeypatch, tiny, capsys):
    masked = changed_on_the_way(lambda idx, targets: (idx, targets.masked_fill(idx < 40, -1)))
    masked(monkeypatch, None)
    train.main([*tiny, '--check'])
    assert 'FAILED' not in capsys.readouterr().out


def test_where_nothing_can_be_written_no_check_of_it_is_made(monkeypatch, tiny, tmp_path, capsys):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path / 'nowhere'))
    train.main([*tiny, '--check'])
    out = capsys.readouterr().out
    assert 'not checked: a saved model comes back' in out and '20 checks passed' in out


def test_what_will_be_read_is_shown(tiny, capsys):
    train.main([*tiny, '--check', '--block_size=200'])
    shown = capsys.readouterr().out.partition('the model will read ')[2]
    assert len(ast.literal_eval(shown)) == 80
