"""Train a GPT: on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file this trains GPT-2 124M on OpenWebText.
"""

import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import checkpoint as checkpoints
from configurator import load_config
from dataloader import BatchLoader, fits_in_ram, open_dataset
from memory import choose_batch_size, out_of_memory_explained, run_of
from metrics import Metrics, start_wandb, trim
from model import GPT, GPTConfig
from runtime import (
    UserError,
    all_reduce_mean,
    autocast,
    barrier,
    choose_compile,
    choose_device,
    choose_dtype,
    device_name,
    launched_world,
    process_group,
    run_script,
    say,
    seed_everything,
    use_expandable_segments,
    use_fast_matmul,
)
from settings import TrainConfig

# -----------------------------------------------------------------------------
# data


def find_dataset(name, world):
    """Open data/<name>. A small corpus that is not prepared yet is prepared now."""
    folder = Path(name) if Path(name).parts != (name,) else Path('data', name)
    if world.local_rank == 0 and folder.parts == ('data', name) \
            and not (folder / 'meta.json').exists() and not any(folder.glob('*.bin')):
        script = Path(__file__).with_name('prepare.py')
        done = subprocess.run([sys.executable, script, name, '--if_small'])
        if done.returncode:
            sys.exit(done.returncode)  # it has said why
    barrier()
    return open_dataset(folder)


# -----------------------------------------------------------------------------
# model


def build_model(config, dataset, resumed):
    """The model to train, on the CPU: new, pretrained, or as the checkpoint has it."""
    if resumed:
        return resumed.load_model(dropout=config.dropout)
    if config.init_from in ('scratch', 'auto'):
        return GPT(GPTConfig(config.block_size, dataset.vocab_size, config.n_layer, config.n_head,
                             config.n_embd, config.dropout, config.bias))
    model = GPT.from_pretrained(config.init_from, config.dropout)
    if config.block_size > model.config.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{model.config.block_size} tokens')
    model.crop_block_size(config.block_size)
    if dataset.vocab_size != model.config.vocab_size:
        raise UserError(f'{dataset.folder} has a vocabulary of {dataset.vocab_size} and '
                        f'{config.init_from} one of {model.config.vocab_size}: prepare the text '
                        'with --tokenizer=gpt2')
    return model


def find_resumed(config, dataset):
    """The checkpoint to go on from, or None to start. Raises UserError, too where the checkpoint
    is of another model than the config's."""
    if config.init_from not in ('resume', 'auto'):
        return None
    if config.init_from == 'auto' and not checkpoints.list_checkpoints(config.out_dir):
        return None
    resumed = checkpoints.find(config.out_dir, 'latest')
    then, now = resumed.state['config'], asdict(config)
    fixed = ('n_layer', 'n_head', 'n_embd', 'bias', 'block_size')
    misfits = [f'{key}={now[key]} (it has {then[key]})' for key in fixed if now[key] != then[key]]
    if misfits:
        raise UserError(f'{resumed.path} is of another architecture than {", ".join(misfits)}: '
                        'give the config it was trained with, or another --out_dir')
    if resumed.state['tokenizer'] != dataset.tokenizer_json():
        raise UserError(f'{resumed.path} was trained with another tokenizer than that of '
                        f'{dataset.folder}: name the dataset it was trained on')
    return resumed


def wrap_model(model, device, compile, world):
    """→ (model to evaluate with, model to train with): compiled, then under DDP."""
    compiled = torch.compile(model) if compile else model
    if world.size == 1:
        return compiled, compiled
    return compiled, DDP(compiled, device_ids=[device.index] if device.type == 'cuda' else None)


# -----------------------------------------------------------------------------
# schedule


def get_lr(it, learning_rate, min_lr, warmup_iters, lr_decay_iters):
    """Linear warmup to learning_rate, cosine to min_lr at lr_decay_iters, min_lr from then on
    (Loshchilov and Hutter 2016; nanoGPT's exact formula)."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    progress = (it - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 → 0
    return min_lr + cosine * (learning_rate - min_lr)


# -----------------------------------------------------------------------------
# step


def train_step(model, batches, micro_steps, optimizer, scaler, context, grad_clip):
    """One update of the weights → (loss, gradient norm), tensors on the device.

    The loss is the mean over this process's micro-batches, before the update.
    """
    total_loss = 0.0
    for micro in range(micro_steps):
        idx, targets = next(batches)
        last = micro == micro_steps - 1
        # Gradients travel between processes once, with the last micro-batch's backward.
        with model.no_sync() if isinstance(model, DDP) and not last else nullcontext():
            with context:
                _, loss = model(idx, targets)
                loss = loss / micro_steps
            scaler.scale(loss).backward()
        total_loss += loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total_loss, grad_norm


@torch.no_grad()
def evaluate(model, loader, n_batches, context):
    """Mean loss over fixed windows of a split, which the processes share."""
    model.eval()
    sums = torch.zeros(2, device=loader.device)  # of loss × windows, of windows
    for starts in tqdm(loader.eval_batches(n_batches), 'evaluating', leave=False, disable=None):
        idx, targets = loader.eval_batch(starts)
        with context:
            _, loss = model(idx, targets)
        sums += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)]) * len(starts)
    model.train()
    loss_sum, windows = all_reduce_mean(sums).tolist()
    return loss_sum / windows


# -----------------------------------------------------------------------------
# loop


def main(argv):
    config = load_config(TrainConfig, argv, __doc__)
    world = launched_world()
    device, device_why = choose_device(config.device, world.local_rank)
    dtype, dtype_why = choose_dtype(config.dtype, device, config.n_embd)
    compile, compile_why = choose_compile(config.compile, device)
    say(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
        f'compile {compile} ({compile_why}) | processes {world.size}')
    if world.is_main:
        make_writable(config.out_dir)
    with process_group(world, device, config.backend):
        train(config, world, device, dtype, compile)


def train(config, world, device, dtype, compile):
    use_fast_matmul()
    use_expandable_segments(device)
    seed_everything(config.seed, world.rank)
    out_dir = Path(config.out_dir)

    # data
    dataset = find_dataset(config.dataset, world)
    resumed = find_resumed(config, dataset)
    raw_model = build_model(config, dataset, resumed)
    if config.batch_size == 'auto':
        batch_size, why = choose_batch_size(raw_model.config, config, dtype, device)
        config = replace(config, batch_size=batch_size)
        say(f'batch_size {batch_size} ({why}) | accumulation {config.accumulation()}')
    run = run_of(config, dtype, device.type)
    in_ram = fits_in_ram(dataset.folder, world.local_size) if config.data_in_ram == 'auto' \
        else config.data_in_ram
    micro_steps = config.accumulation() // world.size
    train_data, val_data = (
        BatchLoader(dataset.split(split, in_ram), config.block_size, config.batch_size,
                    micro_steps=micro_steps, rank=world.rank, world_size=world.size,
                    seed=config.seed, device=device)
        for split in ('train', 'val'))
    step_tokens = config.accumulation() * config.batch_size * config.block_size
    say(f'{dataset.folder}: {len(train_data.stream):,} training tokens, vocabulary '
        f'{dataset.vocab_size:,}, {"in memory" if in_ram else "on disk"} | {step_tokens:,} tokens '
        f'a step, {config.max_iters * step_tokens / len(train_data.stream):.3g} epochs')

    # model
    raw_model = raw_model.to(device)
    raw_model.loss_chunk_tokens = config.loss_chunk_tokens
    raw_model.activation_checkpointing = config.activation_checkpointing
    optimizer = raw_model.configure_optimizers(
        config.weight_decay, config.learning_rate, (config.beta1, config.beta2), device.type)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    context = autocast(device, dtype)
    eval_model, model = wrap_model(raw_model, device, compile, world)
    say(f'GPT of {raw_model.num_parameters():,} parameters: {raw_model.config.n_layer} layers, '
        f'{raw_model.config.n_head} heads, {raw_model.config.n_embd} channels')

    # where the run stands
    iter_num, best_val_loss, elapsed_s = 0, math.inf, 0.0
    if resumed:
        iter_num, elapsed_s = resumed.iter_num, resumed.state['elapsed_s']
        best_val_loss = checkpoints.find(out_dir, 'best').val_loss
        resumed.load_optimizer(optimizer, raw_model)
        scaler.load_state_dict(resumed.state['scaler'])
        checkpoints.set_rng_state(resumed.state['rng'], device)
        say(f'resumed from {resumed.path}')
    evaluated_at = iter_num if resumed and not config.eval_only else None
    metrics_path = None if config.eval_only else out_dir / 'metrics.jsonl'
    if world.is_main and metrics_path:
        if resumed:
            trim(metrics_path, iter_num)
        elif aside := checkpoints.set_aside(out_dir):
            say(f'{out_dir} held an earlier run, which is now in {aside}')
    metrics = Metrics(
        metrics_path, step_tokens=step_tokens, max_iters=config.max_iters, device=device,
        mfu_of=lambda tokens_per_s: raw_model.mfu(tokens_per_s / world.size,
                                                   device_name(device), dtype),
        bytes_per_token=dataset.bytes_per_token('val'), elapsed_s=elapsed_s,
        wandb_run=start_wandb(config.wandb_project, config.wandb_run_name, asdict(config))
        if config.wandb_log and world.is_main else None,
        quiet=not world.is_main)

    batches = train_data.train_batches(iter_num)
    metrics.start_steps(iter_num)
    while True:
        done = config.eval_only or iter_num >= config.max_iters
        if (done or iter_num % config.eval_interval == 0) and iter_num != evaluated_at:
            with metrics.paused():
                train_loss = evaluate(eval_model, train_data, config.eval_iters, context)
                val_loss = evaluate(eval_model, val_data, config.eval_iters, context)
                best = val_loss < best_val_loss
                best_val_loss = min(val_loss, best_val_loss)
                metrics.evaluation(iter_num, train_loss, val_loss, best)
                if iter_num == 0 and not config.init_from.startswith('gpt2'):
                    remark_on_first_loss(train_loss, dataset.vocab_size)
                worth_saving = iter_num > 0 and (best or config.always_save_checkpoint)
                if world.is_main and worth_saving and not config.eval_only:
                    checkpoints.save(
                        out_dir, raw_model, optimizer, keep=config.keep_checkpoints,
                        chunk_mb=config.checkpoint_chunk_mb, state={
                            'iter_num': iter_num, 'val_loss': val_loss,
                            'elapsed_s': metrics.elapsed_s(), 'config': asdict(config),
                            'tokenizer': dataset.tokenizer_json(), 'scaler': scaler.state_dict(),
                            'rng': checkpoints.rng_state(device)})
        if done:
            break

        lr = config.learning_rate if not config.decay_lr else get_lr(
            iter_num, config.learning_rate, config.min_lr, config.warmup_iters,
            config.lr_decay_iters)
        for group in optimizer.param_groups:
            group['lr'] = lr
        with out_of_memory_explained(raw_model.config, run, device):
            loss, grad_norm = train_step(model, batches, micro_steps, optimizer, scaler, context,
                                         config.grad_clip)
        iter_num += 1
        if iter_num % config.log_interval == 0:
            metrics.step(iter_num, all_reduce_mean(loss), lr, grad_norm)
    batches.close()


def remark_on_first_loss(loss, vocab_size):
    """Weights that know nothing give each token equal odds: a loss of ln(vocab_size)."""
    expected = math.log(vocab_size)
    if abs(loss - expected) > 1:
        say(f'warning: the first loss is {loss:.2f}, but a model that knows nothing has about '
            f'ln({vocab_size}) = {expected:.2f}: is the initialisation as you want it?')


def make_writable(folder):
    """Create `folder` and see that files can be made in it. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, '.writable')
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f'out_dir={folder}: cannot write there: {e.strerror}') from None


if __name__ == '__main__':
    run_script(main)
