"""Optimizers: AdamW, SGD, Muon and NorMuon, and an EMA of the weights.

To add one, write a function here and add it to OPTIMIZERS: --optimizer accepts it, checkpoints save
its state, and plan.py traces its step.
"""

import math
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from itertools import groupby

import torch
from torch.optim.adamw import adamw as adamw_step

from plaingpt.system.devices import cpu_has_bfloat16
from plaingpt.system.distributed import is_sharded, local_rows


def build_optimizer(model, config):
    """Build the optimizer that a TrainConfig names for a GPT's trainable parameters."""
    optimizer = OPTIMIZERS[config.optimizer](parameter_groups(model, config), config)
    optimizer.tracks_ema = bool(config.ema_decay)
    optimizer.averaged_steps = 0  # steps in the EMA of the weights
    if optimizer.tracks_ema:
        track_ema(optimizer, config.ema_decay)
    return optimizer


def parameter_groups(model, config):
    """Sort the trainable parameters into {kind: parameter group}. The kinds are 'matrices' (in
    blocks), 'embedding', 'ngram', 'head' (if untied) and 'vector' (biases, norms and short
    convolutions, which act on each channel separately).

    A group's learning rate is the schedule's times 'lr_scale'. A weight may stack several matrices,
    such as those of queries, keys and values, or SwiGLU's two. 'matrix_rows' has the number of rows
    of each matrix, for each weight."""
    groups = {}
    for kind, scale in {'matrices': 1.0, **config.scales()}.items():
        weight_decay = 0.0 if kind == 'vector' else config.weight_decay
        groups[kind] = {'params': [], 'lr': config.learning_rate * scale, 'lr_scale': scale,
                        'weight_decay': weight_decay}
    groups['matrices']['matrix_rows'] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        group = groups[parameter_kind(name, p)]
        group['params'].append(p)
        if 'matrix_rows' in group:
            group['matrix_rows'].append(stacked_rows(name, p, model.config))
    return {kind: group for kind, group in groups.items() if group['params']}


def stacked_rows(name, p, gpt_config):
    """The number of rows of each matrix that a weight stacks."""
    if name.endswith('.attn.c_attn.weight'):
        rows = gpt_config.qkv_sizes
    elif name.endswith('.mlp.c_fc.weight') and gpt_config.mlp == 'swiglu':
        rows = 2 * (gpt_config.mlp_width,)
    else:
        rows = (len(p),)
    return rows if sum(rows) == len(p) else (len(p),)  # a layer of this name in an edited model


def parameter_kind(name, p):
    if p.dim() < 2 or name.endswith('.conv.weight'):
        return 'vector'
    if name.endswith('.value_embedding.weight'):
        return 'embedding'
    if name == 'transformer.ngram.weight':
        return 'ngram'
    if name.startswith('transformer.h.'):
        return 'matrices'
    return 'head' if name == 'lm_head.weight' else 'embedding'


def without_dynamo(optimizer_class):
    """Return a subclass whose methods do not import torch._dynamo. torch's optimizers import it at
    their first call, only to exclude themselves from torch.compile. The import takes 0.8 s, and
    nothing here compiles an optimizer."""
    names = 'add_param_group', 'zero_grad', 'state_dict', 'load_state_dict'
    methods = {name: unwrap(getattr(optimizer_class, name)) for name in names}
    methods['step'] = torch.no_grad()(unwrap(optimizer_class.step))
    return type(optimizer_class.__name__, (optimizer_class,), methods)


# Each of these takes parameter_groups() and the TrainConfig and returns a torch.optim.Optimizer.
# Without support for `found_inf`, the host waits in each step to learn whether to skip it.


def adamw(groups, config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""
    AdamW = without_dynamo(torch.optim.AdamW)
    return AdamW(groups.values(), betas=(config.beta1, config.beta2), fused=True)


def sgd(groups, config):
    """SGD with Nesterov momentum. It needs about 100× AdamW's learning rate."""
    SGD = without_dynamo(torch.optim.SGD)
    return SGD(groups.values(), momentum=config.momentum, nesterov=config.momentum > 0)


# -----------------------------------------------------------------------------
# Muon


def orthogonalize(matrices):
    """Approximately orthogonalize matrices (…, R, C): keep the singular vectors, and bring the
    singular values to between 0.68 and 1.2, except those below about 1/600 of the matrix's norm,
    which stay smaller.

    Runs five Newton-Schulz iterations x ← a·x + b·(x xᵀ) x + c·(x xᵀ)² x (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon), in bfloat16 where that is fast."""
    a, b, c = 3.4445, -4.7750, 2.0315  # a is as large as possible, so that small values grow fast
    x = matrices.to(newton_schulz_dtype(matrices.device)).flatten(0, -3)  # (n, R, C)
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x  # makes x xᵀ smaller
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (n, R, R)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·gram + c·gram²
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a·x + polynomial·x
    x = x.mT if is_tall else x
    return x.unflatten(0, matrices.shape[:-2])


def newton_schulz_dtype(device):
    """bfloat16, except on a CPU without it, where float32 is 20 times as fast."""
    bfloat16_is_slow = device.type == 'cpu' and not cpu_has_bfloat16()
    return torch.float32 if bfloat16_is_slow else torch.bfloat16


def normalize_rows(updates, row_squares, weight):
    """Divide each row of the updates (…, R, C) by its RMS, then rescale each matrix to the norm of
    an orthogonal matrix (Li et al. 2025, "NorMuon"), in place.

    row_squares (…, R, 1): an EMA of each row's mean square, updated with this weight"""
    row_squares.lerp_(updates.square().mean(-1, keepdim=True), weight)
    updates /= row_squares.sqrt() + 1e-8
    norms = updates.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-8)
    updates *= math.sqrt(min(updates.shape[-2:])) / norms


@without_dynamo
class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices in blocks, torch's fused AdamW for all other parameters.

    A few directions dominate the update that AdamW makes to a matrix. Muon orthogonalizes the
    momentum, so all directions change by about the same amount, which may help those that are rare
    but important (Jordan et al. 2024).

    normuon: normalize the rows of updates
    found_inf: a tensor on the device; if it is 1, the step changes neither weights nor states. As
        in torch's fused optimizers, the host does not wait for it.
    """

    _step_supports_amp_scaling = True  # tells Step that this class reads `found_inf`
    found_inf = None

    def __init__(self, groups, config, normuon=False):
        super().__init__(groups.values(), {})
        self.momentum, self.normuon = config.momentum, normuon
        self.beta1, self.beta2 = config.beta1, config.beta2

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if 'matrix_rows' in group:
                self.step_muon(**group)
            else:
                self.step_adamw(**group)

    def step_muon(self, params, matrix_rows, lr, weight_decay, **_):
        batches = {}  # weights of the same shape are orthogonalized together
        for p, rows in zip(params, matrix_rows, strict=True):
            if p.grad is None:
                continue
            batches.setdefault((p.shape, rows), []).append(p)
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                if self.normuon:
                    self.state[p]['exp_avg_sq_rows'] = torch.zeros_like(p[:, :1])
        for (_, rows), weights in batches.items():
            self.step_batch(weights, rows, lr, weight_decay)

    def step_batch(self, params, matrix_rows, lr, weight_decay):
        """Update n weights (R, C) with their orthogonalized momenta. matrix_rows: the number of
        rows of each matrix in such a weight

        Updates are scaled to AdamW's usual RMS, 0.2, so that both can share a learning rate (Liu et
        al. 2025, "Muon is Scalable", section 2.2)."""
        weights, gradients = local_shards(params), local_shards(p.grad for p in params)
        momenta = local_shards(self.state[p]['momentum_buffer'] for p in params)
        applied = 1.0  # 0 if the step is skipped: a factor on all changes
        if self.found_inf is not None:
            skip_step = self.found_inf.view(()).bool()
            applied = 1 - skip_step.float()
            gradients = [torch.where(skip_step, m, g)  # leaves the momentum m unchanged
                         for g, m in zip(gradients, momenta, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        directions = torch._foreach_lerp(gradients, momenta, self.momentum)  # Nesterov momentum
        directions = torch.stack(directions).to(newton_schulz_dtype(momenta[0].device))
        directions = reshard(directions, params, 1, 0)  # (n, R, C)
        updates = [orthogonalize(matrices).float()
                   for matrices in split_matrices(directions, matrix_rows)]
        if self.normuon:
            self.normalize_updates(updates, params, matrix_rows, applied)
        max_dim = max(*matrix_rows, directions.size(2))
        for matrices in updates:
            matrices *= applied * math.sqrt(max(matrices.shape[-2:]) / max_dim)
        updates = torch.cat([matrices.flatten(1, 2) for matrices in updates], dim=1)  # (n, R, C)
        updates = reshard(updates, params, 0, 1)
        torch._foreach_mul_(weights, 1 - lr * weight_decay * applied)
        torch._foreach_add_(weights, list(updates), alpha=-lr * (0.2 * math.sqrt(max_dim)))

    def normalize_updates(self, updates, params, matrix_rows, applied):
        """Normalize the rows of the updates, split by split_matrices(), and update their EMAs."""
        states = local_shards(self.state[p]['exp_avg_sq_rows'] for p in params)
        row_squares = reshard(torch.stack(states), params, 1, 0)  # (n, R, 1)
        for matrices, squares in zip(updates, split_matrices(row_squares, matrix_rows),
                                     strict=True):
            normalize_rows(matrices, squares, (1 - self.beta2) * applied)
        torch._foreach_copy_(states, list(reshard(row_squares, params, 0, 1)))

    def step_adamw(self, params, lr, weight_decay, **_):
        params = [p for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {'step': torch.zeros((), device=p.device),
                                 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}
        states = [self.state[p] for p in params]
        adamw_step(
            params, [p.grad for p in params], [state['exp_avg'] for state in states],
            [state['exp_avg_sq'] for state in states], [], [state['step'] for state in states],
            fused=True, found_inf=self.found_inf, amsgrad=False, beta1=self.beta1,
            beta2=self.beta2, lr=lr, weight_decay=weight_decay, eps=1e-8, maximize=False)


def split_matrices(weights, matrix_rows):
    """Split weights (n, R, C) into their matrices: a list of views (n, k, rows, C), each with k
    neighboring matrices of the same shape."""
    runs = [(rows, len(list(run))) for rows, run in groupby(matrix_rows)]
    views = weights.split([rows * k for rows, k in runs], dim=1)
    return [view.unflatten(1, (k, rows)) for view, (rows, k) in zip(views, runs, strict=True)]


def local_shards(tensors):
    """This process's rows of each tensor: all of them, unless the tensors are sharded."""
    return [local_rows(tensor)[0] for tensor in tensors]


def reshard(stack, params, dim, new_dim):
    """Exchange the shards of a stack of matrices (n, R, C), one for each of the n params (R, …).
    If the params are sharded, a process holds rows of all matrices (dim 1) or, since Muon needs
    whole matrices, all rows of some matrices (dim 0). Otherwise the stack is returned unchanged."""
    if not is_sharded(params[0]):
        return stack
    from torch.distributed.tensor import DTensor, Shard
    shape = torch.Size((len(params), len(params[0]), stack.size(2)))
    sharded = DTensor.from_local(stack, params[0].device_mesh, [Shard(dim)], run_check=False,
                                 shape=shape, stride=(shape[1] * shape[2], shape[2], 1))
    return sharded.redistribute(placements=[Shard(new_dim)]).to_local()


OPTIMIZERS = {'adamw': adamw, 'sgd': sgd, 'muon': MuonAdamW,
              'normuon': partial(MuonAdamW, normuon=True)}


# -----------------------------------------------------------------------------
# an EMA of the weights


def track_ema(optimizer, decay):
    """Make each optimizer step update an exponential moving average (EMA) of the parameters,
    starting with the first step (Morales-Brotons et al. 2024, "Exponential Moving Average of
    Weights in Deep Learning"). At a constant high learning rate, the EMA is about as good as the
    weights would be after a decay of the rate. It is an optimizer state, so memory plans, sharding
    and checkpoints include it."""
    @torch.no_grad()
    def update_ema(optimizer, *_):
        has_started = any('average' in state for state in optimizer.state.values())
        n = optimizer.averaged_steps + 1 if has_started else 1
        optimizer.averaged_steps = n
        weight = 1 - min(decay, n / (9 + n))  # forgets early weights faster (Abadi et al. 2016)
        if getattr(optimizer, 'found_inf', None) is not None:
            weight = weight * (1 - optimizer.found_inf)  # 0 if the step is skipped
        for group in optimizer.param_groups:
            for p in group['params']:
                state = optimizer.state[p]
                if 'average' in state:
                    local_rows(state['average'])[0].lerp_(local_rows(p)[0], weight)
                elif p.grad is not None:  # without a gradient, p has no optimizer state either
                    state['average'] = p.detach().clone()
    optimizer.register_step_post_hook(update_ema)


@contextmanager
def ema_weights(optimizer):
    """A context in which the model has the EMA of its weights, if the optimizer tracks one."""
    swap_with_ema(optimizer)
    try:
        yield
    finally:
        swap_with_ema(optimizer)


@torch.no_grad()
def swap_with_ema(optimizer):
    """Swap the parameters and their EMA. Checkpoints are written and read in the swapped form: the
    model holds the EMA, and the optimizer state holds the weights to resume from."""
    for p, state in optimizer.state.items():
        if 'average' in state:
            weights = p.clone()
            p.copy_(state['average'])
            state['average'].copy_(weights)


def resume_ema(optimizer, averaged_steps):
    """Restore the EMA after a checkpoint's model and optimizer have been loaded; without
    ema_decay, drop it. averaged_steps: the number of steps that it includes"""
    swap_with_ema(optimizer)
    optimizer.averaged_steps = averaged_steps
    if not optimizer.tracks_ema:
        for state in optimizer.state.values():
            state.pop('average', None)
