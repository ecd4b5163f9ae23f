"""What a training step holds in memory, tensor by tensor, before it runs.

The terms follow model.py in eager mode and are tested against torch's own memory tracker.
torch.compile keeps the same for the backward pass and needs less beside it.

N = B·T tokens in a micro-batch, p bytes of a number in a matmul (float32 4, else 2).
"""

import gc
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from model import GPT
from plaingpt.system import cpu_kernels as cpu
from plaingpt.system.devices import autocast, free_memory, peak_memory_bytes
from plaingpt.system.distributed import all_reduce_min, launched_world
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB, gib
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CUDA_OVERHEAD = GIB  # for CUDA's context and fragmentation: an allowance, not a measurement


@dataclass(frozen=True)
class Run:
    """What of a run decides its memory, beside the model's shape."""

    batch_size: int  # sequences in a micro-batch
    micro_steps: int = 1  # micro-batches of one process in a step
    dtype: str = 'bfloat16'
    optimizer: str = 'adamw'
    activation_checkpointing: str = 'none'
    loss_chunk_tokens: int = 2048
    processes: int = 1
    device: str = 'cuda'

    @property
    def matmul_bytes(self):
        return 4 if self.dtype == 'float32' else 2


def run_of(config, dtype, device='cuda'):
    """What of a TrainConfig whose batch_size is a number decides its memory."""
    return Run(config.batch_size, max(1, config.accumulation() // config.world_size()), dtype,
               config.optimizer, config.activation_checkpointing, config.loss_chunk_tokens,
               config.world_size(), device)


@dataclass(frozen=True)
class Prediction:
    """Bytes by name at each stage of a step; the peak is the largest stage's sum."""

    stages: dict  # stage → {name: bytes}
    after: dict  # forward, backward, optimizer → bytes that stay when it has ended
    overhead: int

    @property
    def peak_stage(self):
        return max(self.stages, key=lambda stage: sum(self.stages[stage].values()))

    @property
    def items(self):
        return self.stages[self.peak_stage]

    @property
    def peak(self):
        """Most that tensors hold at once: what torch.cuda.max_memory_allocated tells."""
        return sum(self.items.values())

    @property
    def total(self):
        return self.peak + self.overhead


# -----------------------------------------------------------------------------
# parameters and what stands beside them


def parameter_counts(model):
    """GPTConfig → numbers in its Linears inside blocks, in its embedding, and in all."""
    C, L, bias = model.n_embd, model.n_layer, model.bias
    into, width = model.c_fc_width, model.mlp_width
    linears = L * (4 * C * C + (into + width) * C + (4 * C + into + C) * bias)
    embedding = model.padded_vocab_size * C
    channels = (2 * L + 1) * C + model.qk_norm * 2 * L * C // model.n_head
    norms = channels * (1 if model.rmsnorm else 1 + bias)
    positions = 0 if model.rotary else model.block_size * C
    return linears, embedding, linears + embedding * (2 - model.tied_head) + norms + positions


def optimizer_bytes(model, optimizer):
    """AdamW keeps two moments of each parameter, SGD its momentum, Muon a momentum of the matrices
    in blocks (Jordan et al. 2024) and AdamW's two of the rest."""
    _, _, parameters = parameter_counts(model)
    matrices = model.n_layer * model.n_embd * (4 * model.n_embd + model.c_fc_width
                                               + model.mlp_width)
    return {'adamw': 8 * parameters, 'sgd': 4 * parameters,
            'muon': 8 * parameters - 4 * matrices}[optimizer]


# -----------------------------------------------------------------------------
# activations


def block_tensors(model, run):
    """What the backward pass of one block needs: {name: bytes}."""
    B, T, C, H = run.batch_size, model.block_size, model.n_embd, model.n_head
    N, p, cuda = B * T, run.matmul_bytes, run.device == 'cuda'
    tensors = {
        'block input': 4 * N * C,
        'ln_1 statistics': 8 * N,
        'ln_1 output': p * N * C,
        'q, k, v': 3 * p * N * C,
        'attention log-sum-exp': 4 * N * H,
        'attention output': p * N * C,
        'ln_2 input': 4 * N * C,
        'ln_2 statistics': 8 * N,
        'ln_2 output': p * N * C,
        'c_fc output': p * N * model.c_fc_width,
        'activation output': p * N * model.mlp_width,
    }
    own_attention = not cuda and run.dtype == 'bfloat16' and T <= cpu.LONGEST  # copies q, k, v
    if model.qk_norm or (model.rotary and not own_attention):
        tensors['q, k as attention takes them'] = (3 if own_attention else 2) * p * N * C
    if model.mlp == 'swiglu':
        tensors['silu of the gate'] = p * N * model.mlp_width
    if model.rmsnorm and not cuda:  # a CPU's is made of small operations
        tensors['RMSNorms’ parts'] = 2 * 4 * N * C
        if model.qk_norm:
            tensors['RMSNorms’ parts'] += 2 * (4 if p == 4 else 5) * N * C
    if model.dropout:
        # A CPU keeps 2 bytes for each number (cpu.py), CUDA one.
        tensors['dropout masks'] = 2 * (1 if cuda else 2) * N * C
    if model.dropout and not cuda and not own_attention:
        # Its attention with dropout is unfused: weights, mask and their product are kept.
        tensors['q, k, v'] = 12 * N * C
        tensors['attention log-sum-exp'] = 0
        tensors['attention weights'] = 3 * 4 * N * H * T
    return tensors


def kept_tensors(model, run):
    """What one block keeps from the forward to the backward pass: {name: bytes}."""
    tensors = block_tensors(model, run)
    if run.activation_checkpointing == 'none':
        return tensors
    if run.activation_checkpointing == 'full':
        return {'block input': tensors['block input']}
    N, p = run.batch_size * model.block_size, run.matmul_bytes
    names = ('block input', 'attention log-sum-exp', 'attention output', 'c_fc output')
    return {**{name: tensors[name] for name in names}, 'q, k, v': 3 * p * N * model.n_embd,
            'projections’ outputs': 2 * p * N * model.n_embd}


# -----------------------------------------------------------------------------
# the stages of a step


def predict(model, run):
    """GPTConfig, Run → Prediction."""
    N, C, L, V = run.batch_size * model.block_size, model.n_embd, model.n_layer, model.vocab_size
    p, padded = run.matmul_bytes, model.padded_vocab_size
    half = p < 4
    linears, embedding, parameters = parameter_counts(model)
    accumulating = run.micro_steps > 1
    checkpointed = run.activation_checkpointing != 'none'

    fixed = {'parameters': 4 * parameters,
             'optimizer states': optimizer_bytes(model, run.optimizer)}
    if run.processes > 1:
        fixed['gradient buckets'] = 4 * parameters  # DDP's, which travel
    gradients = {'gradients': 4 * parameters}
    kept = {f'{L} × {name}': L * size for name, size in kept_tensors(model, run).items() if size}
    edges = {'token ids': 16 * N, 'ln_f input': 4 * N * C + 8 * N}
    if model.dropout:
        edges['embedding dropout mask'] = (1 if run.device == 'cuda' else 2) * N * C
    copies = {'autocast copies': p * linears} if half else {}

    # After the forward pass: the loss, where all activations stand.
    if run.loss_chunk_tokens:
        n = min(run.loss_chunk_tokens, N)
        softmax = 8 * V * n  # logits, and the logarithms of their softmax
        matmuls = (4 + p * half) * V * n + p * V * C  # its gradient, and that of the weight
        loss = {'loss: ln_f output': 4 * N * C, 'loss: gradient of ln_f': p * N * C,
                'loss: gradient of the embedding': 4 * V * C,
                'loss: copy of the embedding': p * V * C * half,
                'loss: logits of a chunk': max(softmax, matmuls) + p * n * C * half
                + 4 * V * n * bool(model.logit_softcap)}
        lingering = {}
    else:
        logits = {'loss: logits': p * padded * N}
        loss = {**logits, 'loss: log-softmax and its gradients': 3 * 4 * V * N,
                'loss: ln_f output': p * N * C, 'loss: copy of the embedding': p * embedding * half}
        lingering = logits  # the training step's own name for them holds them until the next
    before = gradients if accumulating else {}
    saved_copies = {} if checkpointed else copies
    # The plain loss is highest in its backward pass, when autocast has let go of its copies.
    stages = {'loss': {**fixed, **before, **(copies if run.loss_chunk_tokens else saved_copies),
                       **kept, **edges, **loss}}

    # The backward pass of a block: activations go, gradients come, so either end may be highest.
    flowing = {'gradients of activations': (4 + p * half + 4 * p) * N * C,
               'gradient of a weight': (p * half + 4) * C * model.c_fc_width}
    parts = {'relu2': 2, 'swiglu': 1}.get(model.mlp, 0)  # of the activation's backward pass
    flowing['gradients of activations'] += parts * p * N * model.mlp_width
    if checkpointed:
        every = sum(block_tensors(model, run).values())
        again = sum(size for name, size in kept_tensors(model, run).items()
                    if name != 'projections’ outputs')
        flowing['a block computed again'] = every - again + p * linears // L * half
    of_embedding = {'gradient of the embedding': 4 * embedding}
    stages['backward, last block'] = {**fixed, **before, **saved_copies, **kept, **of_embedding,
                                      **flowing, **lingering}
    one = {f'1 × {name}': size for name, size in kept_tensors(model, run).items() if size}
    stages['backward, first block'] = {**fixed, **gradients, **one, **flowing, **lingering,
                                       **(of_embedding if accumulating else {})}
    stages['backward, embedding'] = {
        **fixed, **gradients, 'gradients of activations': 4 * N * C, **lingering,
        # of the head, of the lookup, and their sum
        'gradients of the embedding': 4 * embedding * (3 if accumulating else 2)}
    stages['optimizer'] = {**fixed, **gradients, **lingering}
    staying = p * N * C + 4 * V * C if run.loss_chunk_tokens else \
        (p * padded + 4 * V) * N + p * N * C + p * embedding * half
    end = sum(stages['optimizer'].values())
    before_backward = {**fixed, **before, **saved_copies, **kept, **edges}
    after = {'forward': sum(before_backward.values()) + staying, 'backward': end, 'optimizer': end}
    if run.optimizer == 'muon':
        # one matrix at a time, three of its size in bfloat16
        stages['optimizer']['orthogonalising'] = 3 * 2 * C * model.c_fc_width
    return Prediction(stages, after, CUDA_OVERHEAD if run.device == 'cuda' else 0)


# -----------------------------------------------------------------------------
# what fits


def largest_batch(model, run, available):
    """The most sequences in a micro-batch whose prediction fits `available` bytes; 0 if none do."""
    low, high = 0, 1
    while predict(model, replace(run, batch_size=high)).total <= available:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = predict(model, replace(run, batch_size=middle)).total <= available
        low, high = (middle, high) if fits else (low, middle)
    return low


def batch_that_divides(model, run, available, sequences):
    """→ (batch_size, micro_steps) of one process that takes `sequences` in a step: the largest
    batch that fits `available` bytes and divides them, or (0, 0) where not even 1 fits."""
    for batch_size in range(sequences, 0, -1):
        if sequences % batch_size == 0:
            steps = sequences // batch_size
            now = replace(run, batch_size=batch_size, micro_steps=steps)
            if predict(model, now).total <= available:
                return batch_size, steps
    return 0, 0


def savings(model, run):
    """What would save memory, the best first: [(words, bytes)]."""
    changes = []
    if run.batch_size > 1:
        half = run.batch_size // 2
        changes.append((f'--batch_size={half}', model,
                        {'batch_size': half, 'micro_steps': 2 * run.micro_steps}))
    if run.activation_checkpointing != 'full':
        changes.append(('--activation_checkpointing=full', model,
                        {'activation_checkpointing': 'full'}))
    if not run.loss_chunk_tokens:
        changes.append(('--loss_chunk_tokens=2048', model, {'loss_chunk_tokens': 2048}))
    if run.dtype == 'float32':
        changes.append(('--dtype=bfloat16', model, {'dtype': 'bfloat16'}))
    for key in ('block_size', 'n_layer'):
        half = getattr(model, key) // 2
        if half:
            changes.append((f'--{key}={half}', replace(model, **{key: half}), {}))
    now = predict(model, run).peak
    saved = [(words, now - predict(shape, replace(run, **change)).peak)
             for words, shape, change in changes]
    # What leaves the model as it is comes first.
    return sorted((s for s in saved if s[1] > 0),
                  key=lambda s: (s[0].startswith(('--block_size', '--n_layer')), -s[1]))


def advice(model, run):
    """The three best changes, in words."""
    return ', '.join(f'{words} saves {gib(size)}' for words, size in savings(model, run)[:3])


def available_memory(device):
    """Bytes that this process may take now: what is free on its GPU, or its share of what is free
    on the machine."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    free = free_memory()
    if free is None:
        raise UserError('batch_size=auto: this system does not tell how much memory is free: say a '
                        'number')
    return free // launched_world().local_size


# -----------------------------------------------------------------------------
# on the device itself


def one_step(model, run, device):
    """A whole step of a new model on random tokens, as training makes it. Yields after forward,
    backward and optimizer, in the last micro-batch. Holds no memory once it has ended."""
    with device:
        gpt = GPT(model)
    gpt.loss_chunk_tokens = run.loss_chunk_tokens
    gpt.activation_checkpointing = run.activation_checkpointing
    optimizer = build_optimizer(gpt, TrainConfig(optimizer=run.optimizer), device.type)
    yield 'start', gpt, optimizer
    for step in range(2):  # the optimizer's states come with the first
        for micro in range(run.micro_steps):
            idx = torch.randint(0, model.vocab_size, (run.batch_size, model.block_size),
                                device=device)
            targets = idx.clone()
            with autocast(device, run.dtype):
                _, loss = gpt(idx, targets)
            last = step == 1 and micro == run.micro_steps - 1
            if last:
                yield 'forward', gpt, optimizer
            loss.backward()
            yield 'backward' if last else 'between', gpt, optimizer
        optimizer.step()
        yield 'optimizer' if step else 'between', gpt, optimizer
        optimizer.zero_grad(set_to_none=True)


def fits(model, run, device):
    """True where a whole step runs on this CUDA device."""
    with torch.random.fork_rng([device]):
        try:
            for _ in one_step(model, run, device):
                pass
            fit = True
        except torch.OutOfMemoryError:
            fit = False
    gc.collect()  # a graph that an error cut short holds itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fit


def choose_batch_size(model, config, dtype, device):
    """→ (batch_size, why) that keeps the TrainConfig's total_batch_size: the plan's answer, tried
    on CUDA and stepped down until it fits, the same on all processes. Raises UserError."""
    sequences = config.total_batch_size // config.block_size // config.world_size()
    run = run_of(replace(config, batch_size=1), dtype, device.type)
    available = available_memory(device)
    planned, micro_steps = batch_that_divides(model, run, available, sequences)
    planned = all_reduce_min(planned, device)
    batch_size = planned
    while batch_size and device.type == 'cuda':
        micro_steps = sequences // batch_size
        # Two micro-batches meet all that more of them would.
        trial = replace(run, batch_size=batch_size, micro_steps=min(2, micro_steps))
        if all_reduce_min(int(fits(model, trial, device)), device):
            break
        batch_size = next((b for b in range(batch_size - 1, 0, -1) if sequences % b == 0), 0)
    if not batch_size:
        one = replace(run, batch_size=1, micro_steps=sequences)
        need = predict(model, one).total
        raise UserError(f'batch_size=auto: not even 1 fits: it takes {gib(need)}, {gib(available)} '
                        f'are free on {device}; {advice(model, one)}')
    tried = ', tried for a step' if device.type == 'cuda' else ''
    stepped = f', {planned} did not fit' if batch_size < planned else ''
    return batch_size, f'of {gib(available)} free{tried}{stepped}'


@contextmanager
def out_of_memory_explained(model, run, device):
    """Turn the device's running out of memory in here into one UserError: what was planned, what
    was measured, what would save most."""
    try:
        yield
    except RuntimeError as e:
        if not (isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e)):
            raise
        plan = predict(model, run)
        raise UserError(
            f'out of memory on {device} with batch_size={run.batch_size}: planned '
            f'{gib(plan.total)}, highest in "{plan.peak_stage}"; held at most '
            f'{gib(peak_memory_bytes(device))}; {advice(model, run)}') from None


def explain_out_of_memory(model, config, dtype, device):
    return out_of_memory_explained(model, run_of(config, dtype, device.type), device)
