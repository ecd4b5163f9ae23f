"""The speed of training's own step, on one device."""

import os
from contextlib import closing
from pathlib import Path

import torch

from model import GPT
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.timing import matmul_flops, spread, step_seconds, synchronize
from plaingpt.corpus.batches import BatchLoader, fits_in_ram
from plaingpt.corpus.dataset import dataset_folder, open_dataset
from plaingpt.system.devices import DTYPES, autocast, device_name, peak_memory_bytes
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable
from plaingpt.system.formatting import gib, short
from plaingpt.system.hardware import mfu
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.training_step import StepGuard, forward_backward, update


def make_step(config, shape, dtype, compile, device, source):
    """→ (GPT, a function that makes a whole step of training on batches from `source`)."""
    gpt = GPT(shape)
    gpt.loss_chunk_tokens = config.loss_chunk_tokens
    gpt.activation_checkpointing = config.activation_checkpointing
    gpt.to(device)
    model = torch.compile(gpt) if compile else gpt
    optimizer = build_optimizer(gpt, config, device.type)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    guard = StepGuard(None, config.max_bad_steps, None, device)
    context = autocast(device, dtype)

    def step():
        loss = forward_backward(model, source, config.accumulation(), scaler, context)
        update(model, optimizer, scaler, config.grad_clip, guard, 0, loss)

    return gpt, step


def random_batches(config, vocab_size, device):
    """The same random tokens again and again: (idx, targets) on the device."""
    idx, targets = torch.randint(0, vocab_size, (2, config.batch_size, config.block_size),
                                 device=device)
    while True:
        yield idx, targets


def dataset_batches(config, vocab_size, device):
    """Batches as training reads them. Raises UserError where the model knows fewer ids."""
    dataset = open_dataset(dataset_folder(config.dataset))
    if dataset.vocab_size > vocab_size:
        raise UserError(f'vocab_size={vocab_size}: {dataset.folder} has ids up to '
                        f'{dataset.vocab_size - 1}; leave it at 0 for those of the dataset')
    in_ram = fits_in_ram(dataset.folder, 1) if config.data_in_ram == 'auto' else config.data_in_ram
    return BatchLoader(dataset.split('train', in_ram), config.block_size, config.batch_size,
                       micro_steps=config.accumulation(), seed=config.seed,
                       device=device).train_batches(0)


def measure(config, shape, dtype, compile, device, *, steps, warmup, real_data=False,
            profile=False):
    """Time whole steps of training a GPTConfig under a TrainConfig → (a row of figures, its table).

    real_data: batches from the dataset, and not one of random tokens
    profile: write a trace of three more steps into out_dir, and add where their time goes
    """
    if real_data:
        source = dataset_batches(config, shape.vocab_size, device)
    else:
        source = random_batches(config, shape.vocab_size, device)
    bare = matmul_flops(DTYPES[dtype], device)
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    with closing(source):
        gpt, step = make_step(config, shape, dtype, compile, device, source)
        ms = {key: 1e3 * seconds for key, seconds in
              spread(step_seconds(step, steps, warmup, device)).items()}
        peak = peak_memory_bytes(device)
        where = profiled(step, device, config.out_dir) if profile else ''
    tokens_per_s = config.step_tokens() / ms['median'] * 1e3
    row = {'parameters': gpt.num_parameters(), 'dtype': dtype, 'compile': compile,
           'optimizer': config.optimizer, 'batch_size': config.batch_size,
           'block_size': config.block_size, 'micro_steps': config.accumulation(),
           'data': config.dataset if real_data else 'random',
           'step_ms': ms['median'], 'min_ms': ms['min'], 'max_ms': ms['max'],
           'tokens_per_s': tokens_per_s, 'flops_per_token': gpt.flops_per_token(),
           'mfu': mfu(gpt.flops_per_token() * tokens_per_s, device_name(device), dtype),
           'matmul_flops': bare,
           'matmul_share': gpt.flops_per_token() * tokens_per_s / bare, 'peak_memory_bytes': peak}
    return row, table(row) + where


def table(row):
    """The row as Markdown, under a line that says what was measured."""
    what = (f'{row["parameters"]:,} parameters, {row["dtype"]}, '
            f'{"compiled" if row["compile"] else "eager"}, {row["optimizer"]}, '
            f'{row["micro_steps"]} × {row["batch_size"]} × {row["block_size"]} tokens a step, '
            f'{row["data"]} data')
    mfu = 'n/a' if row['mfu'] is None else f'{row["mfu"]:.1%}'
    memory = gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else 'n/a'
    return what + '\n\n' + markdown(
        ['ms a step', 'fastest', 'slowest', 'tokens/s', 'MFU', 'matmul, TFLOP/s', 'share of it',
         'peak memory'],
        [[*(f'{row[key]:.1f}' for key in ('step_ms', 'min_ms', 'max_ms')),
          short(row['tokens_per_s']), mfu, f'{row["matmul_flops"] / 1e12:.3g}',
          f'{row["matmul_share"]:.1%}', memory]])


def profiled(step, device, out_dir, steps=3):
    """Trace a few steps into out_dir/trace.json → Markdown of the operators that take longest."""
    make_writable(out_dir)
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # or its own notes stand among ours
    cuda = device.type == 'cuda'
    kinds = torch.profiler.ProfilerActivity
    # The first step under the profiler is slow, and does not count.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])],
                                schedule=schedule, acc_events=True) as prof:
        step()
        prof.step()
        for _ in range(steps):
            step()
        synchronize(device)
    path = Path(out_dir, 'trace.json')
    prof.export_chrome_trace(str(path))
    spent = {event.key: (event.self_device_time_total if cuda else event.self_cpu_time_total,
                         event.count) for event in prof.key_averages()}
    whole = sum(us for us, _ in spent.values())
    top = sorted(spent.items(), key=lambda item: -item[1][0])[:12]
    return '\n\n' + markdown(
        ['operator', 'calls a step', 'ms a step', 'share'],
        [[name[:60], f'{count / steps:.0f}', f'{us / steps / 1e3:.2f}', f'{us / whole:.1%}']
         for name, (us, count) in top]) + f'\n\n{path}: open it in https://ui.perfetto.dev'
