import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from plaingpt.training import optimizers
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.training_step import StepGuard, update

SHAPE = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)


def trained(model, optimizer, steps=3, seed=0):
    torch.manual_seed(seed)
    for _ in range(steps):
        idx = torch.randint(0, 65, (4, 16))
        model(idx, idx)[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def made(name='muon', **options):
    torch.manual_seed(0)
    model = GPT(SHAPE)
    config = TrainConfig(optimizer=name, learning_rate=1e-2, **options)
    return model, build_optimizer(model, config, 'cpu')


def test_an_update_of_a_matrix_has_singular_values_alike():
    model, optimizer = made()
    matrix = model.transformer.h[0].mlp.c_fc.weight
    before = matrix.detach().clone()
    trained(model, optimizer, 1)
    # Scaled to an RMS like AdamW's, less the decay of 0.1 · lr (Liu et al. 2025)
    update = (before * (1 - 0.1 * 1e-2) - matrix.detach()) / (1e-2 * 0.2 * 128**0.5)
    values = torch.linalg.svdvals(update)
    assert (values > 0.6).float().mean() > 0.9 and values.max() < 1.4


def test_matrices_of_blocks_get_muon_and_the_rest_adamw():
    model, optimizer = made()
    trained(model, optimizer)
    for name, p in model.named_parameters():
        keys = {'momentum_buffer'} if '.h.' in name and p.dim() == 2 else \
            {'exp_avg', 'exp_avg_sq', 'step'}
        assert set(optimizer.state[p]) == keys, name


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_each_group_follows_its_own_learning_rate(name):
    scales = {'embedding': 0.5, 'head': 0.0, 'vectors': 2.0}
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, tied_head=False, conv=3))
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, learning_rate=1e-2, **{
        f'{kind.removesuffix("s")}_lr_scale': scale for kind, scale in scales.items()}), 'cpu')
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(model, optimizer, 1)
    rates = {id(p): group['lr'] for group in optimizer.param_groups for p in group['params']}
    for name, p in model.named_parameters():
        expected = 0.005 if name.endswith(('wte.weight', 'wpe.weight')) else \
            0.0 if name == 'lm_head.weight' else \
            0.02 if p.dim() == 1 or name.endswith('conv.weight') else 0.01
        assert rates[id(p)] == expected, name
        assert torch.equal(p, before[name]) == (name == 'lm_head.weight'), name


def test_normuon_moves_queries_keys_and_values_apart_and_all_rows_alike():
    model, optimizer = made('normuon', weight_decay=0.0)
    c_attn = model.transformer.h[0].attn.c_attn.weight  # (3 · 32, 32)
    before = c_attn.detach().clone()
    trained(model, optimizer, 1)
    update = (c_attn.detach() - before) / (1e-2 * 0.2)
    rows = update.square().mean(1)
    assert rows.std() < 0.02 * rows.mean()  # after one step the mean of squares is that of the step
    for part in update.chunk(3):
        assert math.isclose(part.square().mean(), 1, rel_tol=1e-3)  # an RMS of 0.2 · lr each


class Calls(TorchDispatchMode):

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize('name', ['muon', 'normuon'])
def test_matrices_of_one_shape_are_multiplied_together_however_many_there_are(name):
    def matmuls(n_layer):
        model = GPT(replace(SHAPE, n_layer=n_layer))
        optimizer = build_optimizer(model, TrainConfig(optimizer=name), 'cpu')
        with Calls() as calls:
            trained(model, optimizer, 1)
        return calls.names['bmm'] + calls.names['baddbmm']

    assert matmuls(1) == matmuls(3) > 0


def test_the_rest_moves_as_with_adamw_alone():
    (muon_model, muon), (model, adamw) = made(), made('adamw')
    for m, optimizer in ((muon_model, muon), (model, adamw)):
        trained(m, optimizer, 1)
    assert torch.equal(muon_model.lm_head.weight, model.lm_head.weight)


def test_a_bad_step_leaves_the_weights_alone():
    model, optimizer = made()
    trained(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float('nan'))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.found_inf = torch.zeros(())
    optimizer.zero_grad(set_to_none=True)
    trained(model, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


def stepped(name, scaled, factors, **options):
    """Weights after a step on each of the same batches whose factor, of the loss, is not None."""
    model, optimizer = made(name, **options)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0, enabled=scaled)
    guard = StepGuard(None, 10, None, torch.device('cpu'), scaling=scaled)
    torch.manual_seed(1)
    for it, factor in enumerate(factors):
        idx = torch.randint(0, 65, (4, 16))
        if factor is not None:
            loss = model(idx, idx)[1] * factor
            scaler.scale(loss).backward()
            update(model, optimizer, scaler, 1.0, guard, it, loss.detach())
    return list(model.parameters())


@pytest.mark.parametrize('scaled', [False, True], ids=['unscaled', 'scaled'])
@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_first_step_that_is_not_finite_leaves_no_trace(name, scaled):
    poisoned = stepped(name, scaled, [math.nan, 1.0, 1.0, 1.0])
    spared = stepped(name, scaled, [None, 1.0, 1.0, 1.0])
    assert all(torch.equal(p, q) for p, q in zip(poisoned, spared, strict=True))


@pytest.mark.parametrize('momentum', [0.0, 0.95])
def test_sgd_moves_as_torchs_plain_sgd_from_the_first_step_on(momentum):
    model, optimizer = made('sgd', momentum=momentum)
    ours = [(p, group['weight_decay']) for group in optimizer.param_groups for p in group['params']]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p, _ in ours]
    plain = torch.optim.SGD([dict(params=[q], weight_decay=decay) for q, (_, decay)
                             in zip(theirs, ours, strict=True)], lr=1e-2, momentum=momentum,
                            nesterov=momentum > 0, fused=True)
    for seed in range(3):
        torch.manual_seed(seed)
        idx = torch.randint(0, 65, (4, 16))
        model(idx, idx)[1].backward()
        for q, (p, _) in zip(theirs, ours, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(torch.equal(p, q) for q, (p, _) in zip(theirs, ours, strict=True))


def test_a_good_verdict_changes_nothing():
    (a, plain), (b, judged) = made(), made()
    judged.found_inf = torch.zeros(())
    for model, optimizer in ((a, plain), (b, judged)):
        trained(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_the_learning_rate_is_set_for_both():
    model, optimizer = made()
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    trained(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_with_float16_a_run_that_gave_up_moves_no_more(tmp_path):
    model, optimizer = made()
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0)
    guard = StepGuard(tmp_path / 'anomalies.jsonl', 2, None,
                      torch.device('cpu'))
    moved = []
    for it, factor in enumerate((1.0, math.nan, math.nan, 1.0, 1.0)):
        before = [p.detach().clone() for p in model.parameters()]
        idx = torch.randint(0, 65, (4, 16))
        loss = model(idx, idx)[1] * factor
        scaler.scale(loss).backward()
        update(model, optimizer, scaler, 1.0, guard, it, loss.detach())
        moved.append(not all(torch.equal(p, q) for p, q in
                             zip(model.parameters(), before, strict=True)))
    assert moved == [True, False, False, False, False]


@pytest.mark.parametrize('scale', optimizers.SCALES)
def test_a_matrix_moves_as_with_torchs_muon(monkeypatch, scale):
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: True)  # as torch: in bfloat16
    model, optimizer = made(muon_scale=scale)
    matrices = [(p, 3 if 'c_attn' in name else 1)  # queries, keys and values by themselves
                for name, p in model.named_parameters() if '.h.' in name and p.dim() == 2]
    theirs = [torch.nn.Parameter(part.clone()) for p, n in matrices for part in p.detach().chunk(n)]
    muon = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    for seed in range(3):
        torch.manual_seed(seed)
        idx = torch.randint(0, 65, (4, 16))
        model(idx, idx)[1].backward()
        for q, grad in zip(theirs, (part for p, n in matrices for part in p.grad.chunk(n)),
                           strict=True):
            q.grad = grad.clone()
        optimizer.step()
        muon.step()
        optimizer.zero_grad(set_to_none=True)
        ours = (part for p, n in matrices for part in p.detach().chunk(n))
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_exact_iterations_make_all_singular_values_1():
    matrix = torch.randn(3, 64, 32) + torch.outer(torch.randn(64), torch.randn(32))
    found = optimizers.orthogonalized(matrix, optimizers.ITERATIONS['exact'])
    torch.testing.assert_close(torch.linalg.svdvals(found.float()), torch.ones(3, 32),
                               atol=2e-2, rtol=0)  # bfloat16 has three digits


def test_a_cpu_without_bfloat16_orthogonalizes_in_float32(monkeypatch):
    matrix = torch.randn(64, 32)
    found = {}
    for has_bfloat16 in (True, False):
        monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda has=has_bfloat16: has)
        found[has_bfloat16] = optimizers.orthogonalized(
            matrix[None], optimizers.ITERATIONS['quintic'])
    assert found[True].dtype == torch.bfloat16 and found[False].dtype == torch.float32
    torch.testing.assert_close(found[True].float(), found[False], atol=0.03, rtol=0.1)


@pytest.mark.parametrize('shape', [(3, 32, 32), (3, 32, 128), (3, 128, 32)])
@pytest.mark.parametrize('rank', [2, 32])
@pytest.mark.parametrize('iterations', optimizers.ITERATIONS.values(), ids=optimizers.ITERATIONS)
def test_float32_orthogonalizes_as_plain_newton_schulz_in_float64(monkeypatch, shape, rank,
                                                                  iterations):
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)
    torch.manual_seed(0)
    n, rows, columns = shape
    matrices = torch.randn(n, rows, rank) @ torch.randn(n, rank, columns)
    x = matrices.double() / matrices.double().norm(dim=(1, 2), keepdim=True)
    for a, b, c in iterations:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found = optimizers.orthogonalized(matrices, iterations)
    assert (found - x).norm() / x.norm() < 1e-3


class Plain(torch.optim.SGD):
    """An optimizer that knows nothing of found_inf: torch's SGD, not fused, with momentum."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2, momentum=0.9, fused=False)


def test_an_optimizer_that_ignores_found_inf_never_steps_on_a_nan(tmp_path):
    torch.manual_seed(0)
    model = GPT(SHAPE)
    optimizer = Plain(model.parameters())
    guard = StepGuard(tmp_path / 'anomalies.jsonl', 10, None, torch.device('cpu'))
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    moved = []
    for it, factor in enumerate((1.0, math.nan, 1.0)):
        before = [p.detach().clone() for p in model.parameters()]
        idx = torch.randint(0, 65, (4, 16))
        loss = model(idx, idx)[1] * factor
        loss.backward()
        update(model, optimizer, scaler, 1.0, guard, it, loss.detach())
        moved.append(not all(torch.equal(p, q) for p, q in
                             zip(model.parameters(), before, strict=True)))
    assert moved == [True, False, True]
    assert all(p.isfinite().all() for p in model.parameters())
