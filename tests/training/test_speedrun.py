"""config/gpt2_124m_fast.py computes what the record computes that it follows: modded-nanogpt,
records/track_3_optimization/train_gpt_simple.py, whose formulas are written out here."""

import pytest
import torch
import torch.nn.functional as F

from configurator import load_config
from model import GPT
from plaingpt.system.files import ROOT
from plaingpt.training import optimizers
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig

STEPS, VOCAB, LAYERS, WIDTH, HEADS, T = 20, 97, 2, 32, 2, 24
SIZES = dict(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, block_size=T, vocab_size=VOCAB,
             max_iters=STEPS, batch_size=8, total_batch_size=8 * T)


def their_weights(gpt):
    """Our weights under their names: queries, keys and values are layers of their own. They turn
    pairs of channels the other way round, so the halves of queries and keys are exchanged."""
    def exchanged(w):
        return w.view(HEADS, 2, WIDTH // HEADS // 2, -1).flip(1).reshape(w.shape)

    weights = {}
    for name, p in gpt.named_parameters():
        name, kind = name.removeprefix('transformer.').rsplit('.', 1)
        p = p.detach().clone()[:VOCAB if name in ('wte', 'lm_head') else None]
        if name.endswith('c_attn'):
            q, k, v = p.chunk(3)
            for part, w in (('q', exchanged(q)), ('k', exchanged(k)), ('v', v)):
                weights[f'{name}.{part}.{kind}'] = w
        else:
            weights[f'{name}.{kind}'] = p
    return {name: w.requires_grad_() for name, w in weights.items()}


def their_loss(w, idx, targets):
    """Summed over tokens."""
    def rms(x, name=None):
        return F.rms_norm(x, (x.size(-1),), None if name is None else w[name + '.weight'])

    def linear(x, name):
        return F.linear(x, w[name + '.weight'], w[name + '.bias'])

    def rotary(x):  # (B, T, H, D)
        quarter = x.size(-1) // 4
        frequencies = (1 / 1024) ** torch.linspace(0, 1, steps=quarter)
        frequencies = torch.cat([frequencies, frequencies.new_zeros(quarter)])
        theta = torch.outer(torch.arange(T, dtype=torch.float32), frequencies)[None, :, None, :]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * theta.cos() + x2 * theta.sin(),
                          x1 * -theta.sin() + x2 * theta.cos()), 3)

    x = rms(F.embedding(idx, w['wte.weight']), 'wte_norm')
    for i in range(LAYERS):
        h = rms(x, f'h.{i}.ln_1')
        q, k, v = (linear(h, f'h.{i}.attn.c_attn.{part}').view(*idx.shape, HEADS, -1)
                   for part in 'qkv')
        q, k = rotary(rms(q)), rotary(rms(k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           scale=0.12, is_causal=True).transpose(1, 2)
        x = x + linear(y.reshape(x.shape), f'h.{i}.attn.c_proj')
        h = linear(rms(x, f'h.{i}.ln_2'), f'h.{i}.mlp.c_fc')
        x = x + linear(h.relu().square(), f'h.{i}.mlp.c_proj')
    logits = linear(rms(x, 'ln_f'), 'lm_head')
    logits = 15 * logits * (logits.square() + 15**2).rsqrt()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='sum')


def their_muon(p, state, lr, decay=0.05, mu=0.95):
    state['momentum'] = state.get('momentum', torch.zeros_like(p)).lerp(p.grad, 1 - mu)
    x = p.grad.lerp(state['momentum'], mu)
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(12):
        gram = x @ x.mT
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    x = x.mT if tall else x
    p.mul_(1 - lr * decay).add_(x, alpha=-lr * max(1, x.size(0) / x.size(1)) ** 0.5)


def train_theirs(weights, batches):
    """→ the mean loss of each step."""
    matrices = [p for name, p in weights.items() if '.weight' in name and name.startswith('h.')
                and p.dim() == 2]
    adamw = torch.optim.AdamW(
        [dict(params=[weights['wte.weight']], lr=0.7),
         dict(params=[weights['lm_head.weight']], lr=0.004),
         dict(params=[p for p in weights.values() if p.dim() < 2], lr=0.015)],
        betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001)
    first = [group['lr'] for group in adamw.param_groups]
    states, losses = [{} for _ in matrices], []
    for step, (idx, targets) in enumerate(batches):
        loss = their_loss(weights, idx, targets)
        loss.backward()
        losses.append(loss.item() / targets.numel())
        progress = step / STEPS
        eta = 1.0 if progress < 0.3 else (1 - progress) / 0.7
        for group, lr in zip(adamw.param_groups, first, strict=True):
            group['lr'] = lr * eta
        adamw.step()
        with torch.no_grad():
            for p, state in zip(matrices, states, strict=True):
                their_muon(p, state, 0.025 * eta)
        for p in weights.values():
            p.grad = None
    return losses


def train_ours(gpt, config, batches):
    """As train.py does → the mean loss of each step."""
    optimizer, losses = build_optimizer(gpt, config, 'cpu'), []
    gpt.loss_chunk_tokens = 32
    for step, (idx, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group['lr'] = get_lr(step, config) * group['lr_scale']
        loss = gpt(idx, targets)[1]
        loss.backward()
        losses.append(loss.item())
        assert not config.grad_clip
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def recipe(**settings):
    options = [f'--{key}={value}' for key, value in settings.items()]
    return load_config(TrainConfig, [str(ROOT / 'config/gpt2_124m_fast.py'), *options])


def our_base(channels):
    """Their n frequencies end at 1 / 1024; ours are as far apart and have the next one there."""
    n = channels // 4
    return 1024 ** (n / (n - 1))


def test_the_recipe_turns_pairs_of_channels_as_the_record_does():
    config = recipe()
    assert config.rotary_base == pytest.approx(our_base(config.n_embd // config.n_head), rel=1e-3)


def test_twenty_steps_have_the_losses_of_the_record_that_the_recipe_follows(monkeypatch):
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)  # float32 throughout
    config = recipe(**SIZES, rotary_base=our_base(WIDTH // HEADS))
    torch.manual_seed(0)
    gpt = GPT(config.gpt_config(VOCAB))
    with torch.no_grad():  # what begins at zero would hide mistakes in the first steps
        for p in gpt.parameters():
            p.add_(0.02 * torch.randn_like(p))
    following = torch.randperm(VOCAB)  # text to learn from: each token has one that follows it
    idx = torch.randint(VOCAB, (STEPS, 8, T))
    for t in range(1, T):
        idx[:, :, t] = torch.where(torch.rand(STEPS, 8) < 0.8, following[idx[:, :, t - 1]],
                                   idx[:, :, t])
    batches = [(batch, following[batch]) for batch in idx]
    theirs = train_theirs(their_weights(gpt), batches)
    ours = train_ours(gpt, config, batches)
    assert theirs[-1] < theirs[0] - 0.5
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_evaluations_take_less_than_a_hundredth_of_the_flops_of_a_run():
    for path in sorted(ROOT.glob('config/gpt*_*.py')):
        config = load_config(TrainConfig, [str(path)])
        tokens = config.eval_tokens or config.eval_iters * config.batch_size * config.block_size
        evaluations = 1 + config.max_iters // config.eval_interval  # each of both splits
        forward = evaluations * 2 * tokens  # of three times that a token takes in training
        assert forward / 3 < 0.01 * config.max_iters * config.step_tokens(), path
        assert config.step_tokens() == config.total_batch_size, path
