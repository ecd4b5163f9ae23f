"""What is measured inside a model while it trains."""

import math

import pytest
import torch

from model import GPT, GPTConfig
from plaingpt.core.batches import BatchLoader
from plaingpt.core.dataset import open_dataset
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.settings import TrainConfig
from plaingpt.monitoring.health import Health, largest_logit
from plaingpt.system.devices import autocast

CPU = torch.device('cpu')


@pytest.fixture
def loader(char_data):
    return BatchLoader(open_dataset(char_data).split('val'), 16, 4)


def new(loader, **changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(block_size=16, vocab_size=loader.stream.vocab_size, n_layer=2,
                                    n_head=2, n_embd=32), **changes}))
    return model, Health(model, 1, loader, autocast(CPU, 'float32'))


def step(model, health, loader, lr=1e-2):
    """A step of AdamW around which health looks → what it saw, weights before, gradients."""
    optimizer = build_optimizer(model, TrainConfig(learning_rate=lr))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    idx, targets = loader.train_batch(0, 0)
    model(idx, targets)[1].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    with health.around_update(1, torch.amp.GradScaler('cpu', enabled=False)):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return health.measure(health.model), before, grads


def total(tensors, part):
    return math.sqrt(sum(float(t.square().sum()) for name, t in tensors.items() if part in name))


def test_norms_are_those_of_the_step(loader):
    model, health = new(loader)
    seen, before, grads = step(model, health, loader)
    matrices = {name: p for name, p in before.items() if p.dim() == 2}
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()
             if p.dim() == 2}
    for part in ('h.0', 'h.1', 'wte'):
        assert seen[f'health/grad_norm/{part}'] == pytest.approx(total(grads, part), rel=1e-4)
        assert seen[f'health/update_ratio/{part}'] == pytest.approx(
            total(moved, part) / total(matrices, part), rel=1e-3)


def test_weights_of_zero_have_no_update_ratio(loader):
    seen, *_ = step(*new(loader, value_embeddings=True), loader)  # which are initialized to 0
    assert not math.isfinite(seen['health/update_ratio/value_embedding.1'])


def test_the_largest_attention_logit_is_that_of_the_softmax():
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    logits = q @ k.repeat_interleave(2, dim=1).transpose(-2, -1) / 4
    assert largest_logit(q, k, k, is_causal=True) == pytest.approx(logits.tril().abs().max())
    seen = torch.ones(8, 8, dtype=torch.bool).tril(-2)
    assert largest_logit(q, k, k, attn_mask=seen, scale=1.0) \
        == pytest.approx((4 * logits * seen).abs().max())


def test_a_block_is_measured_in_the_forward_pass_of_its_model(loader):
    model, health = new(loader)
    outputs, projections = [], []
    block = model.transformer.h[1]
    block.register_forward_hook(lambda block, inputs, x: outputs.append(x))
    block.attn.c_attn.register_forward_hook(lambda linear, inputs, qkv: projections.append(qkv))
    measured, _, _ = step(model, health, loader)
    q, k, _ = (each.unflatten(2, (2, 16)).transpose(1, 2)  # (B, H, T, D)
               for each in projections[-1].split(32, dim=2))
    assert measured['health/attention_logit/h.1'] == pytest.approx(
        (q @ k.mT / 4).tril().abs().max().item(), rel=1e-4)
    assert measured['health/activation_rms/h.1'] == pytest.approx(
        outputs[-1].square().mean().sqrt().item(), rel=1e-4)
