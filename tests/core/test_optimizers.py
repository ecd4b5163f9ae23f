import math
import shutil
from dataclasses import replace

import pytest
import torch
from runs import TINY, lines, same, weights

import train
from model import GPT, GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import optimizers
from plaingpt.core.bad_steps import BadSteps
from plaingpt.core.optimizers import build_optimizer, ema_weights, track_ema
from plaingpt.core.settings import TrainConfig
from train import Step

SHAPE = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)


def gradients(model):
    idx = torch.randint(0, 65, (4, 16))
    loss = model(idx, idx)[1]
    loss.backward()
    return loss


def take_steps(model, optimizer, steps=3, seed=0):
    torch.manual_seed(seed)
    for _ in range(steps):
        gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def copies(parameters):
    return [p.detach().clone() for p in parameters]


def made(name='muon', shape=SHAPE, **options):
    torch.manual_seed(0)
    model = GPT(shape)
    config = TrainConfig(optimizer=name, learning_rate=1e-2, **options)
    return model, build_optimizer(model, config)


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_each_group_follows_its_own_learning_rate(name):
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, tied_head=False, conv=3))
    optimizer = build_optimizer(model, TrainConfig(
        optimizer=name, learning_rate=1e-2, lr_scales='embedding:0.5,head:0,vector:2'))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, optimizer, 1)
    rates = {id(p): group['lr'] for group in optimizer.param_groups for p in group['params']}
    decays = {id(p): group['weight_decay'] for group in optimizer.param_groups
              for p in group['params']}
    for name, p in model.named_parameters():
        expected = 0.005 if name.endswith(('wte.weight', 'wpe.weight')) else \
            0.0 if name == 'lm_head.weight' else \
            0.02 if p.dim() == 1 or name.endswith('conv.weight') else 0.01
        assert rates[id(p)] == expected, name
        assert (decays[id(p)] > 0) == (p.dim() == 2 and 'conv' not in name), name
        assert torch.equal(p, before[name]) == (name == 'lm_head.weight'), name


def test_normuon_moves_all_rows_of_queries_keys_or_values_alike():
    model, optimizer = made('normuon', weight_decay=0.0)
    c_attn = model.transformer.h[0].attn.c_attn.weight  # (3 · 32, 32)
    before = c_attn.detach().clone()
    take_steps(model, optimizer, 1)
    update = (c_attn.detach() - before) / (1e-2 * 0.2)
    rows = update.square().mean(1)
    assert rows.std() < 0.02 * rows.mean()  # after one step the mean of squares is that of the step
    for part in update.chunk(3):
        assert part.square().mean().item() == pytest.approx(1, rel=1e-3)  # an RMS of 0.2 · lr each


def test_muon_moves_what_is_not_a_matrix_as_adamw():
    (muon_model, muon), (model, adamw) = made(), made('adamw')
    for m, optimizer in ((muon_model, muon), (model, adamw)):
        take_steps(m, optimizer, 1)
    assert torch.equal(muon_model.lm_head.weight, model.lm_head.weight)


def stepped(model, optimizer, factors, scaled=False):
    """Steps on batches whose losses are multiplied by these factors; None: no step → for each
    whether it moved a weight"""
    step = Step(model, optimizer, torch.device('cpu'), 'float32', False, 1.0, micro_steps=1)
    step.scaler = torch.amp.GradScaler('cpu', init_scale=4.0, enabled=scaled)
    step.bad_steps = BadSteps(step.scaler, step.device)
    moved = []
    lr = optimizer.param_groups[0]['lr'] / optimizer.param_groups[0]['lr_scale']
    torch.manual_seed(1)
    for factor in factors:
        idx, before = torch.randint(0, 65, (4, 16)), copies(model.parameters())
        if factor is not None:
            step.loss = (loss := model(idx, idx)[1] * factor).detach()
            step.scaler.scale(loss).backward()
            step.update(lr)
        moved.append(not same(model.parameters(), before))
    return moved


@pytest.mark.parametrize('scaled', [False, True], ids=['unscaled', 'scaled'])
@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_step_that_is_not_finite_leaves_no_trace(name, scaled):
    for before in ([], [1.0]):
        (poisoned, a), (spared, b) = made(name), made(name)
        moved = stepped(poisoned, a, [*before, math.nan, 1.0, 1.0], scaled)
        assert moved == [True] * len(before) + [False, True, True]
        stepped(spared, b, [*before, None, 1.0, 1.0], scaled)
        assert same(poisoned.parameters(), spared.parameters())


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_step_that_is_not_finite_leaves_the_average(name):
    model, optimizer = made(name)
    track_ema(optimizer, 0.5)
    stepped(model, optimizer, [1.0, 1.0])
    before = copies(optimizer.state[p]['average'] for p in model.parameters())
    stepped(model, optimizer, [math.nan])
    assert same([optimizer.state[p]['average'] for p in model.parameters()], before)
    stepped(model, optimizer, [1.0])
    assert not same([optimizer.state[p]['average'] for p in model.parameters()], before)


def test_a_matrix_moves_as_with_torchs_muon(muon_in_float32, monkeypatch):
    # Both in float32: in bfloat16 the order of sums, another on each CPU, is 6% of a move.
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.float)
    model, optimizer = made(shape=replace(SHAPE, n_kv_head=1, mlp='swiglu'))
    apart = {'c_attn': (32, 16, 16), 'c_fc': (96, 96)}  # rows of what is one weight
    matrices = [(p, apart.get(name.split('.')[-2], len(p)))
                for name, p in model.named_parameters() if '.h.' in name and p.dim() == 2]
    theirs = [torch.nn.Parameter(part.clone()) for p, n in matrices for part in p.detach().split(n)]
    muon = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, momentum=0.95,
                            adjust_lr_fn='match_rms_adamw')
    for _ in range(3):
        gradients(model)
        before = copies(theirs)
        for q, grad in zip(theirs, (part for p, n in matrices for part in p.grad.split(n)),
                           strict=True):
            q.grad = grad.clone()
        optimizer.step()
        muon.step()
        optimizer.zero_grad(set_to_none=True)
        ours = (part for p, n in matrices for part in p.detach().split(n))
        for p, q, old in zip(ours, theirs, before, strict=True):
            assert (p - q).norm() < 1e-3 * (q - old).norm()


@pytest.mark.parametrize(('bfloat16', 'tolerance'), [(True, 0.05), (False, 1e-4)])
def test_muon_turns_a_rounding_error_of_gradients_into_a_small_part_of_an_update(
        bfloat16, tolerance, monkeypatch):
    # which is why runs on other numbers of processes have slightly other weights
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: bfloat16)
    (model, optimizer), (other_model, other) = made(), made()
    before = copies(model.parameters())
    gradients(model)
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        q.grad = p.grad * (1 + 2**-23)
    optimizer.step()
    other.step()
    for p, q, old in zip(model.parameters(), other_model.parameters(), before, strict=True):
        assert (p - q).norm() <= tolerance * (p - old).norm()


@pytest.mark.parametrize(('name', 'theirs'), [
    ('adamw', lambda p: torch.optim.AdamW(p, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)),
    ('sgd', lambda p: torch.optim.SGD(p, lr=6e-4, momentum=0.95, nesterov=True, weight_decay=0.1))])
def test_torchs_optimizers_without_dynamo_are_torchs(name, theirs):
    model = GPT(replace(SHAPE, bias=False, rmsnorm=True))
    ours = build_optimizer(model, TrainConfig(optimizer=name))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    twins = [p.detach().clone().requires_grad_() for p in matrices]
    theirs = theirs(twins)
    for _ in range(3):
        for p, twin in zip(matrices, twins, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        ours.step()
        theirs.step()
        ours.load_state_dict(ours.state_dict())
    for p, twin in zip(matrices, twins, strict=True):
        torch.testing.assert_close(p, twin)


# -----------------------------------------------------------------------------
# an average of the weights, which is evaluated and saved in their place


@pytest.mark.parametrize('optimizer', [torch.optim.AdamW, torch.optim.SGD])
def test_the_average_is_exponential_after_a_warmup(optimizer):
    p = torch.nn.Parameter(torch.tensor([8.0]))
    unused = torch.nn.Parameter(torch.ones(1))
    optimizer = optimizer([p, unused], lr=1.0)
    track_ema(optimizer, 0.75)
    seen, expected = [], None
    for n in range(1, 41):
        p.grad = torch.ones(1)
        optimizer.step()
        seen.append(p.item())
        decay = min(0.75, n / (9 + n))
        expected = seen[0] if n == 1 else decay * expected + (1 - decay) * seen[-1]
    with ema_weights(optimizer):
        assert p.item() == pytest.approx(expected)
        assert unused.item() == 1
    assert p.item() == seen[-1]


@pytest.fixture(scope='module')
def half(char_data, tmp_path_factory):
    """The out_dir of a run with an average, which has stopped after 3 of 6 iterations."""
    out_dir = tmp_path_factory.mktemp('half') / 'out'
    train.main([*TINY, f'--dataset={char_data}', f'--out_dir={out_dir}', '--check=False',
                '--ema_decay=0.9', '--max_iters=3'])
    return out_dir


@pytest.fixture
def averaging(tiny, half, tmp_path):
    """The command line of that run, with its own copy of the folder."""
    shutil.copytree(half, tmp_path / 'out')
    return [*tiny, '--ema_decay=0.9']


def test_a_resumed_average_counts_the_steps_before(averaging, tmp_path):
    train.main([*averaging, '--init_from=resume'])
    train.main([*averaging, '--out_dir=whole'])
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'whole'))
    assert checkpoints.find(tmp_path / 'out').state['averaged_steps'] == 6


def test_a_run_can_end_its_average(averaging, tiny, trained, tmp_path):
    train.main([*tiny, '--init_from=resume', '--ema_decay=0'])
    assert same(weights(tmp_path / 'out'), weights(trained))


def test_the_average_is_what_is_evaluated(half, trained):
    losses = [lines(out_dir, 'val_loss')[1]['val_loss'] for out_dir in (half, trained)]
    assert losses[0] != losses[1]
