"""Train a GPT: on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file this trains GPT-2 124M on OpenWebText.
"""

import math
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.corpus.batches import BatchLoader, fits_in_ram
from plaingpt.corpus.dataset import UNFINISHED, dataset_folder, open_dataset
from plaingpt.monitoring import run_summary as run_report
from plaingpt.monitoring.backends import open_backends
from plaingpt.monitoring.health import Health
from plaingpt.monitoring.metrics import Metrics, finite, trim
from plaingpt.system.devices import (
    autocast,
    choose_compile,
    choose_device,
    choose_dtype,
    device_name,
    peak_memory_bytes,
    rng_state,
    seed_everything,
    set_rng_state,
    use_expandable_segments,
    use_fast_matmul,
)
from plaingpt.system.distributed import (
    StopRequest,
    all_gather,
    all_reduce_mean,
    barrier,
    check_shared,
    host_group,
    launched_world,
    print0,
    process_group,
)
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.folder_lock import lock_output_dir
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.bad_steps import StepGuard
from plaingpt.training.checkpoint_writer import Saver, archive_previous_run, clean_up
from plaingpt.training.memory_planner import choose_batch_size, out_of_memory_explained, run_of
from plaingpt.training.probes import Reports
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig
from plaingpt.training.training_step import forward_backward, update

# -----------------------------------------------------------------------------
# data


def find_dataset(name, world):
    """Open data/<name>. A small corpus that is not prepared yet is prepared now."""
    folder = dataset_folder(name)
    if world.local_rank == 0 and folder.parts == ('data', name) \
            and not (folder / 'meta.json').exists() and not any(folder.glob('*.bin')) \
            and not (folder / UNFINISHED).exists():
        script = Path(__file__).with_name('prepare.py')
        done = subprocess.run([sys.executable, script, name, '--if_small'])
        if done.returncode < 0:
            raise UserError(f'preparing {name} was killed: run python prepare.py {name}')
        if done.returncode:
            sys.exit(done.returncode)  # it has said why
    barrier()
    dataset = open_dataset(folder)
    if not dataset.meta:
        print0(f'{folder} has no meta.json: its files are taken for GPT-2 tokens')
    return dataset


def open_batches(config, dataset, world, device):
    """→ (loader of the training split, loader of the validation split)."""
    in_ram = fits_in_ram(dataset.folder, world.local_size) if config.data_in_ram == 'auto' \
        else config.data_in_ram
    loaders = [BatchLoader(dataset.split(split, in_ram), config.block_size, config.batch_size,
                           micro_steps=config.accumulation() // world.size, rank=world.rank,
                           world_size=world.size, seed=config.seed, device=device,
                           only_first=config.overfit_batches if split == 'train' else 0)
               for split in ('train', 'val')]
    tokens, step_tokens = len(loaders[0].stream), config.step_tokens()
    if config.overfit_batches:
        tokens = min(tokens, config.overfit_batches * step_tokens)
    print0(f'{dataset.folder}: {tokens:,} training tokens, vocabulary {dataset.vocab_size:,}, '
        f'{"in memory" if in_ram else "on disk"} | {step_tokens:,} tokens a step, '
        f'{config.max_iters * step_tokens / tokens:.3g} epochs')
    return loaders


# -----------------------------------------------------------------------------
# model


def find_resumed(config, group):
    """The checkpoint to go on from, or None to start. Rank 0 looks and decides for all.

    A damaged one is named, and the one before it taken. Raises UserError where there is none.
    """
    if config.init_from not in ('resume', 'auto'):
        return None
    path = found = None
    if launched_world().is_main:
        if not config.eval_only:
            clean_up(config.out_dir)
        if config.checkpoint == 'latest':
            found, damaged = checkpoints.newest_valid(config.out_dir)
            for problem in damaged:
                print0(f'warning: skipped a checkpoint: {problem}')
            if found is None and config.init_from == 'resume':
                raise UserError(f'{config.out_dir}: no checkpoint there to resume from; start with '
                                '--init_from=scratch or auto, or name the right --out_dir')
        elif checkpoints.checkpoint_paths(config.out_dir) or config.init_from == 'resume':
            found = checkpoints.find(config.out_dir, config.checkpoint)
        path = found.path if found else None
    path = all_gather(path, group)[0]
    return checkpoints.open_checkpoint(path) if path else None


def check_resumed(resumed, config, dataset, data_id):
    """See that the run is of the same model and data, and print0 which settings have changed.

    Raises UserError where something differs that a run cannot change.
    """
    then, now = resumed.state['config'], asdict(config)
    changed = {key: (then.get(key), now[key]) for key in now if then.get(key) != now[key]}
    fixed = [f'{key}={changed[key][1]} (it has {changed[key][0]})'
             for key in [*(f.name for f in fields(GPTConfig)), 'optimizer']
             if key in changed and key != 'dropout']
    if fixed:
        raise UserError(f'{resumed.path} was trained otherwise than with {", ".join(fixed)}: '
                        'give the config it was trained with, or another --out_dir')
    if resumed.state['tokenizer'] != dataset.tokenizer_json():
        raise UserError(f'{resumed.path} was trained with another tokenizer than that of '
                        f'{dataset.folder}: name the dataset it was trained on')
    if resumed.state['data'] != data_id:
        raise UserError(f'{resumed.path} was trained on other tokens than those of '
                        f'{dataset.folder}: to go on with other data, start a run from its weights '
                        f'with --init_from={config.out_dir} and another --out_dir')
    print0(f'resumed from {resumed.path}')
    for key, (before, after) in changed.items():
        if key not in ('init_from', 'checkpoint'):
            print0(f'  changed: {key} {before} → {after}')


def build_model(config, dataset, resumed):
    """The model to train, on the CPU: new, pretrained, or as a checkpoint has it."""
    if resumed:
        return resumed.load_model(dropout=config.dropout)
    if config.init_from in ('scratch', 'auto'):
        return GPT(config.gpt_config(dataset.vocab_size))
    if checkpoints.checkpoint_paths(config.init_from):  # a run of ours: its weights, a new run
        start = checkpoints.find(config.init_from, config.checkpoint)
        if start.state['tokenizer'] != dataset.tokenizer_json():
            raise UserError(f'{start.path} was trained with another tokenizer than that of '
                            f'{dataset.folder}: prepare the text with --tokenizer=THE_OLD_DATASET')
        model = start.load_model(dropout=config.dropout)
    else:
        model = GPT.from_pretrained(config.init_from, config.dropout)
    if config.block_size > model.config.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{model.config.block_size} tokens')
    model.crop_block_size(config.block_size)
    if dataset.vocab_size != model.config.vocab_size:
        raise UserError(f'{dataset.folder} has a vocabulary of {dataset.vocab_size} and '
                        f'{config.init_from} one of {model.config.vocab_size}: prepare the text '
                        'with the tokenizer of the model')
    return model


def wrap_model(model, device, compile, world):
    """→ (model to evaluate with, model to train with): compiled, then under DDP."""
    compiled = torch.compile(model) if compile else model
    if world.size == 1:
        return compiled, compiled
    return compiled, DDP(compiled, device_ids=[device.index] if device.type == 'cuda' else None)


# -----------------------------------------------------------------------------
# evaluation


@torch.no_grad()
def evaluate(model, loader, n_batches, context):
    """Mean loss over fixed sequences of a split, which the processes share."""
    model.eval()
    sums = torch.zeros(2, device=loader.device)  # of loss × sequences, of sequences
    for starts in tqdm(loader.eval_batches(n_batches), 'evaluating', leave=False, disable=None):
        idx, targets = loader.eval_batch(starts)
        with context:
            _, loss = model(idx, targets)
        sums += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)]) * len(starts)
    model.train()
    loss_sum, sequences = all_reduce_mean(sums).tolist()
    return loss_sum / sequences


# -----------------------------------------------------------------------------
# loop


def main(argv):
    config = load_config(TrainConfig, argv, __doc__)
    world = launched_world()
    device, device_why = choose_device(config.device, world.local_rank)
    dtype, dtype_why = choose_dtype(config.dtype, device, config.n_embd)
    compile, compile_why = choose_compile(config.compile, device)
    print0(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
        f'compile {compile} ({compile_why}) | processes {world.size}')
    with lock_output_dir(config.out_dir, world.is_main and not config.eval_only), \
            process_group(world, device, config.backend):
        train(config, world, device, dtype, compile)


def train(config, world, device, dtype, compile):
    use_fast_matmul()
    use_expandable_segments(device)
    seed_everything(config.seed, world.rank)
    out_dir = Path(config.out_dir)
    group = host_group()
    check_shared(out_dir, world, group)

    # data and model
    dataset = find_dataset(config.dataset, world)
    data_id = dataset.identity('train')
    resumed = find_resumed(config, group)
    if resumed:
        check_resumed(resumed, config, dataset, data_id)
    raw_model = build_model(config, dataset, resumed)
    raw_model.loss_chunk_tokens = config.loss_chunk_tokens
    raw_model.activation_checkpointing = config.activation_checkpointing
    print0(f'GPT of {raw_model.num_parameters():,} parameters: {raw_model.config.n_layer} layers, '
        f'{raw_model.config.n_head} heads, {raw_model.config.n_embd} channels')

    # batches
    if config.batch_size == 'auto':
        batch_size, why = choose_batch_size(raw_model.config, config, dtype, device)
        config = replace(config, batch_size=batch_size)
        print0(f'batch_size {batch_size} ({why}) | accumulation {config.accumulation()}')
    train_data, val_data = open_batches(config, dataset, world, device)
    micro_steps = config.accumulation() // world.size

    # optimizer
    raw_model.to(device)
    optimizer = raw_model.configure_optimizers(
        config.weight_decay, config.learning_rate, (config.beta1, config.beta2), device.type,
        config.optimizer, config.momentum)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    context = autocast(device, dtype)
    eval_model, model = wrap_model(raw_model, device, compile, world)
    planned = run_of(config, dtype, device.type)

    # where the run stands
    iter_num, best_val_loss, stale, elapsed_s, evaluated_at = 0, math.inf, 0, 0.0, None
    if resumed:
        iter_num, elapsed_s = resumed.iter_num, resumed.state['elapsed_s']
        stale = resumed.state['stale']
        if resumed.state['best_val_loss'] is not None:
            best_val_loss = resumed.state['best_val_loss']
        if resumed.state['evaluated'] and not config.eval_only:
            evaluated_at = iter_num
        resumed.load_optimizer(optimizer, raw_model)
        scaler.load_state_dict(resumed.state['scaler'])
        train_data.resume_at(iter_num, resumed.state['sequences'])
        set_rng_state(resumed.state['rng'], world.rank, device)
    saved_at = iter_num if resumed else None
    if resumed and iter_num >= config.max_iters and not config.eval_only:
        print0(f'iteration {iter_num} is the end already: --max_iters=… makes it longer')

    # where the numbers go
    writing = world.is_main and not config.eval_only
    if writing:
        if aside := archive_previous_run(out_dir, after=iter_num if resumed else -1):
            print0(f'{out_dir} held {"later checkpoints" if resumed else "an earlier run"}: '
                f'moved to {aside}')
        trim(out_dir / 'metrics.jsonl', iter_num)
    run = run_report.describe(config, dataset, train_data.stream, raw_model, device_name(device),
                              dtype, compile, world, resumed)
    if writing:
        run_report.write_run(out_dir, run)
    backends = open_backends(config, run, resumed and resumed.state['wandb_id']) if writing else []
    metrics = Metrics(
        None if config.eval_only else out_dir / 'metrics.jsonl', run=run,
        step_tokens=config.step_tokens(), max_iters=config.max_iters,
        eval_interval=config.eval_interval,
        tokens_at=lambda it: train_data.sequences_before(it) * config.block_size,
        mfu_of=lambda tokens_per_s: raw_model.mfu(tokens_per_s / world.size,
                                                  device_name(device), dtype),
        bytes_per_token=dataset.bytes_per_token('val'),
        peak_memory_bytes=lambda: peak_memory_bytes(device),
        data_wait_s=lambda: train_data.waited_s,
        loss_scale=scaler.get_scale if scaler.is_enabled() else None,
        elapsed_s=elapsed_s, backends=backends, quiet=not world.is_main)
    health = Health(raw_model, config.health_interval if writing else 0, val_data, context)
    reports = Reports(config, dataset, raw_model, metrics, context, group, writing)
    guard = StepGuard(out_dir / 'anomalies.jsonl', config.max_bad_steps,
                      train_data.step_sequences, device)
    saver = Saver(
        out_dir, rank=world.rank, world_size=world.size, chunk_mb=config.checkpoint_chunk_mb,
        keep=config.keep_checkpoints, background=config.checkpoint_async)

    def save(val_loss):
        saver.save(raw_model, optimizer, {
            'iter_num': iter_num, 'sequences': train_data.sequences_before(iter_num),
            'val_loss': finite(val_loss), 'best_val_loss': finite(best_val_loss),
            'evaluated': evaluated_at == iter_num, 'elapsed_s': metrics.elapsed_s(),
            'stale': stale, 'wandb_id': metrics.wandb_id(),
            'config': asdict(config), 'tokenizer': dataset.tokenizer_json(), 'data': data_id,
            'scaler': scaler.state_dict()}, rng_state(device))

    batches = train_data.train_batches(iter_num)
    metrics.begin(iter_num)
    with StopRequest() as stop, out_of_memory_explained(raw_model.config, planned, device):
        while True:
            # What is due now: all processes come to the same answers.
            stopping = stop.wanted()
            done = config.eval_only or iter_num >= config.max_iters
            evaluating = not stopping and iter_num != evaluated_at \
                and (done or iter_num % config.eval_interval == 0)
            saving = stopping or done or iter_num % config.checkpoint_interval == 0
            logging = iter_num % config.log_interval == 0
            giving_up = (evaluating or saving or logging) and guard.report(metrics.say)

            # evaluate, save
            val_loss = None
            with metrics.paused():
                if evaluating:
                    train_loss = evaluate(eval_model, train_data, config.eval_iters, context)
                    val_loss = evaluate(eval_model, val_data, config.eval_iters, context)
                    best = val_loss < best_val_loss
                    best_val_loss, stale = (val_loss, 0) if best else (best_val_loss, stale + 1)
                    evaluated_at = iter_num
                    done = done or 0 < config.patience <= stale
                    saving = saving or best or done or config.always_save_checkpoint
                    metrics.evaluation(iter_num, train_loss, val_loss, best, reports.write())
                if (saving or giving_up) and 0 < iter_num != saved_at and not config.eval_only:
                    save(val_loss)
                    saved_at = iter_num
            if done or stopping or giving_up:
                break

            # step
            lr = get_lr(iter_num, config)
            for param_group in optimizer.param_groups:
                param_group['lr'] = lr
            loss = forward_backward(model, batches, micro_steps, scaler, context)
            with health.around_update(iter_num + 1, scaler):
                grad_norm = update(model, optimizer, scaler, config.grad_clip, guard, iter_num,
                                   loss)
            iter_num += 1
            metrics.tick(iter_num)
            if iter_num % config.log_interval == 0:
                metrics.step(iter_num, all_reduce_mean(loss.clone()), lr, grad_norm)
            with metrics.paused():
                if health.due(iter_num):
                    metrics.health(iter_num, health.look())
                reports.after(iter_num)

        batches.close()
        saver.wait()
    if giving_up:
        ending = f'given up: {config.max_bad_steps} steps in a row were not finite'
    elif stopping:
        ending = str(stopping)
    elif iter_num < config.max_iters:
        ending = f'patience={config.patience}: {stale} evaluations brought no validation loss ' \
                 f'below {best_val_loss:.4f}'
        if writing:
            print0(f'stopped after iteration {iter_num}, {ending}')
    else:
        ending = 'all iterations are done'
    metrics.close(ended=not stopping)
    if writing:
        run_report.write_run(out_dir, {**run, 'ending': ending})
        if config.report:
            run_report.write(out_dir, print0, ended=not stopping)
    if giving_up:
        raise guard.give_up()
    if saver.failed:
        print0(f'the last checkpoint could not be written: make room in {out_dir} and start again '
            'with --init_from=resume')
        sys.exit(1)
    if not config.eval_only and not stopping and iter_num:
        print0(f'done: {out_dir}/checkpoints has the weights; python sample.py --out_dir={out_dir}')
    if stopping:
        print0(f'{stopping}: stopped after iteration {iter_num}, which is saved; the same command '
            'with --init_from=resume goes on from there')


if __name__ == '__main__':
    run_script(main)
