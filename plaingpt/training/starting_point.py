"""What a run starts from: its data, new weights, those of others or a checkpoint's, its batch."""

import gc
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import torch

from model import GPT, GPTConfig
from plaingpt.data.batches import fits_in_ram
from plaingpt.data.dataset import UNFINISHED, dataset_folder, open_named, read_names
from plaingpt.data.tokenizers import described_vocab_size
from plaingpt.inference import scoring
from plaingpt.inference.hf_export import describe_export
from plaingpt.inference.pretrained import (
    describe_training,
    grow_vocabulary,
    load_pretrained,
    pretrained_shape,
)
from plaingpt.parallel.sharding import (
    Replicated,
    Sharded,
    copy_on_meta,
    parameters_on_meta,
)
from plaingpt.system.devices import check_memory, device_memory
from plaingpt.system.distributed import (
    all_gather,
    all_reduce_min,
    barrier,
    launched_world,
    print0,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import gib, quote_epochs, quoted
from plaingpt.system.machine import free_memory
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.checkpoint_writer import clean_up
from plaingpt.training.memory_planner import (
    DEPTHS,
    advice,
    batch_that_divides,
    choose_parallel,
    explain_overflow,
    one_step,
    predict,
    rough_bytes,
    shares,
    step_settings,
)
from plaingpt.training.settings import TrainConfig

OPENING_TOKENS = 2**20  # of a corpus, in which a document begins where there are documents


def open_data(config, world):
    """Open data/<name>, of a mixture each. A small corpus that is not prepared yet is prepared now.
    What benchmarks during the run ask is looked for first: without it there is no run."""
    if world.local_rank == 0 and config.eval_tasks_interval:
        for name in config.eval_tasks.split(','):
            scoring.read_questions(name)
    names = read_names(config.dataset)
    if world.local_rank == 0:
        for name in names:
            prepare_small(name)
    barrier()
    dataset = open_named(config.dataset)
    for _, each, _ in dataset.parts:
        if not each.meta:
            print0(f'{each.folder} has no meta.json: its files are taken for GPT-2 tokens')
    if config.vocab_size not in (0, dataset.vocab_size):
        raise UserError(f'vocab_size={config.vocab_size}: {dataset.folder} has '
                        f'{dataset.vocab_size} tokens; leave it at 0')
    if config.document_start != 'auto' and config.document_start not in range(dataset.vocab_size):
        raise UserError(f'document_start={config.document_start}: {dataset.folder} has tokens 0 to '
                        f'{dataset.vocab_size - 1}')
    return dataset


def prepare_small(name):
    """Run prepare.py where it knows a small corpus of that name and there is nothing of it yet."""
    folder = dataset_folder(name)
    if folder.parts == ('data', name) \
            and not (folder / 'meta.json').exists() and not any(folder.glob('*.bin')) \
            and not (folder / UNFINISHED).exists():
        done = subprocess.run([sys.executable, ROOT / 'prepare.py', name, '--if_small'])
        if done.returncode < 0:
            raise UserError(f'preparing {name} was killed: run python prepare.py {quoted(name)}')
        if done.returncode:
            sys.exit(done.returncode)  # it has said why


def check_same_data(dataset, device):
    """Raises UserError where processes have other tokens, of other hosts' disks or of a dataset
    that was replaced while they started."""
    known = json.dumps([dataset.identity('train'), dataset.identity('val')])
    number = int(hashlib.sha256(known.encode()).hexdigest()[:15], 16)
    if all_reduce_min(number, device) != -all_reduce_min(-number, device):
        raise UserError(f'{dataset.folder}: the processes of this run find different tokens there: '
                        'give all hosts the same files, and start again')


def open_batches(config, dataset, world, device):
    """→ (loader of the training split, loader of the validation split)."""
    check_same_data(dataset, device)
    in_ram = config.data_in_ram
    if in_ram == 'auto':
        in_ram = fits_in_ram([part.dataset.folder for part in dataset.parts], world.local_size)
    shape = in_ram, config.block_size, config.batch_size
    share = {'rank': world.rank, 'world_size': world.size, 'device': device}
    loaders = [dataset.loader(split, *shape, **share, seed=config.seed,
                              micro_steps=config.accumulation() // world.size,
                              only_first=config.overfit_batches if split == 'train' else 0)
               for split in ('train', 'val')]
    if config.also_evaluate:
        if ',' in config.also_evaluate or config.also_evaluate == config.dataset:
            raise UserError(f'also_evaluate={config.also_evaluate}: name one other dataset')
        other = open_named(config.also_evaluate)
        if other.tokenizer_json() not in (dataset.tokenizer_json(), base_tokenizer(dataset)):
            raise UserError(f'also_evaluate={config.also_evaluate}: {other.folder} has another '
                            f'tokenizer than {dataset.folder}')
        loaders[1].beside = [other.loader('val', *shape, **share)]
    tokens, step_tokens = loaders[0].epoch_tokens(), config.step_tokens()
    epochs = dataset.epochs(config.max_iters * step_tokens)
    epochs = {part.name and f'{part.name} ({part.weight:.1%})': epochs[part.name]
              for part in dataset.parts}
    if config.overfit_batches:
        tokens = min(tokens, config.overfit_batches * step_tokens)
    if config.overfit_batches or dataset.has_mask():
        epochs = {'': config.max_iters * step_tokens / tokens}
    padded = ' with padding' * dataset.has_mask()
    print0(f'{dataset.folder}: {tokens:,} training tokens{padded}, vocabulary '
           f'{dataset.vocab_size:,}, {dataset.describe_reading(in_ram)} | {step_tokens:,} tokens '
           f'a step, {quote_epochs(epochs)}')
    if dataset.has_mask():
        for split, loader in zip(('train', 'val'), loaders, strict=True):
            print0(f'{split}: {loader.describe()}')
    return loaders


# -----------------------------------------------------------------------------
# weights


# What a run that --init_from starts from a model has of it.
ANEW = 'weights; the optimizer, the iteration count and the order of the data begin anew'


def find_resumed(config, group):
    """The checkpoint to resume, or None to start. Rank 0 looks and decides for all.

    A damaged one is named, and the one before it taken. Raises UserError where there is none, and
    also with 'auto' where there are some and none can be used: that is no reason to start anew.
    """
    if config.init_from not in ('resume', 'auto'):
        return None
    path = found = None
    if launched_world().is_main:
        if not config.only_looks:
            clean_up(config.out_dir)
        paths = checkpoints.checkpoint_paths(config.out_dir)
        if config.init_from == 'resume' and not paths:
            others = checkpoints.other_weights(config.out_dir, f'starts a run from its {ANEW}')
            raise UserError(f'{config.out_dir}: no checkpoint there to resume from; ' + (
                others or 'start with --init_from=scratch or auto, or name the right --out_dir'))
        # After a crash torchrun starts the same command, which must not go back once more.
        restarted = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0
        if config.checkpoint == 'latest' or restarted:
            found, damaged = checkpoints.newest_valid(config.out_dir)
            if damaged and not found:
                raise UserError('\n'.join([
                    *damaged, f'{config.out_dir}: no checkpoint there can be used; to start anew, '
                    'give --init_from=scratch, which keeps them in a folder beside']))
            for problem in damaged:
                print0(f'warning: skipped a checkpoint: {problem}')
        elif paths or config.checkpoint != 'best':
            found = checkpoints.find(config.out_dir, config.checkpoint)
        path = found.path if found else None
        if not found and Path(config.out_dir, 'metrics.jsonl').exists():
            print0(f'{config.out_dir} has a log and no checkpoint: a new run starts')
    path = all_gather(path, group)[0]
    return checkpoints.open_checkpoint(path) if path else None


def check_resumed(resumed, config, dataset):
    """See that the run is of the same model and data, and print which settings have changed. Raises
    UserError where something differs that a run cannot change."""
    # A setting that did not exist when the checkpoint was written had its default.
    before, now = {**asdict(TrainConfig()), **resumed.state['config']}, asdict(config)
    changed = {key: (before[key], now[key]) for key in now if before[key] != now[key]}
    shape = {field.name for field in fields(GPTConfig)} - {'dropout', 'vocab_size'}
    fixed = [f'{key}={value} (it has {saved})' for key, (saved, value) in changed.items()
             if key in shape | {'optimizer'}]
    if fixed:
        raise UserError(f'{resumed.path} was trained otherwise than with {", ".join(fixed)}: '
                        'give the config it was trained with, or another --out_dir')
    if resumed.state['tokenizer'] != dataset.tokenizer_json():
        raise UserError(f'{resumed.path} was trained with another tokenizer than that of '
                        f'{dataset.folder}: name the dataset it was trained on')
    if not dataset.is_identity('train', resumed.state['data']):
        other = f' (it has dataset={before["dataset"]})' if 'dataset' in changed else ''
        raise UserError(f'{resumed.path} was trained on other tokens than those of '
                        f'{dataset.folder}{other}: to continue with other data, start a run from '
                        f'its weights with --init_from={quoted(config.out_dir)} and another '
                        '--out_dir')
    samples = dataset.samples()
    for split, did in (('train', 'trained'), ('val', 'evaluated')):
        if resumed.state['samples'].get(split, samples[split]) != samples[split]:
            raise UserError(f'{resumed.path} was {did} on other tokens than those of the {split} '
                            f'split of {dataset.folder}: give it the data that it had, or start a '
                            f'run from its weights with --init_from={quoted(config.out_dir)} and '
                            'another --out_dir')
    print0(f'resumed from {resumed.path}')
    changed = {key: values for key, values in changed.items()
               if key not in ('init_from', 'checkpoint', 'check')
               and (key, values[1]) != ('parallel', 'auto')}  # a line of its own tells what it is
    for key, (saved, value) in changed.items():
        print0(f'  changed: {key} {saved} → {value}')


def with_parallel(config, dataset, resumed, dtype, device, world):
    """The TrainConfig, with 'ddp' or 'fsdp' where it says parallel=auto and there are several
    processes. Raises UserError."""
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp shares a model among processes: start them with torchrun')
    if world.size == 1 and config.parallel != 'fsdp':
        return config
    shape = config.parallel == 'auto' and (
        known_shape(config, dataset, resumed) or start_shape(config))
    available = all_reduce_min(available_memory(device), device)
    kind, why = choose_parallel(config, shape, dtype, device.type, available)
    print0(f'parallel {kind} ({why})')
    return replace(config, parallel=kind)


def known_shape(config, dataset, resumed):
    """The GPTConfig of a run that continues or is new, or None where it starts from a model."""
    if resumed:
        return GPTConfig(**{**resumed.state['model'], 'dropout': config.dropout})
    if config.init_from in ('scratch', 'auto'):
        return config.gpt_config(dataset.vocab_size, document_start(config, dataset))
    return None


def document_start(config, dataset):
    """The id of the token that opens the documents of a dataset, where document_attention asks for
    it. Raises UserError where there is none."""
    if not config.document_attention or config.document_start != 'auto':
        return config.document_start
    found = dataset.tokenizer().end_of_text
    if found is None:
        raise UserError(f'document_attention=True: the tokenizer of {dataset.folder} has no end of '
                        'text, so its documents cannot be told apart: prepare it with another '
                        'tokenizer, or leave document_attention out')
    for _, each, _ in dataset.parts:
        stream = each.split('train')
        if found not in stream.sequences(np.zeros(1, int), min(len(stream), OPENING_TOKENS)):
            raise UserError(f'document_attention=True: no document begins in the first '
                            f'{OPENING_TOKENS:,} tokens of {each.folder}, as in one running text: '
                            'prepare it with --documents=…, or leave document_attention out')
    return found


def build_model(config, dataset, resumed, device):
    """The model to train, on the CPU: new, pretrained, or as a checkpoint has it. Of one that is to
    be sharded, new weights are rank 0's alone, and a checkpoint's are loaded later."""
    shape = known_shape(config, dataset, resumed)
    if shape and not resumed:
        check_size(shape, config, device)
    if shape and config.parallel == 'fsdp' and (resumed or not launched_world().is_main):
        with parameters_on_meta():
            model = GPT(shape)
    elif resumed:
        model = resumed.load_model(dropout=config.dropout)
    else:
        model = GPT(shape) if shape else load_start(config, dataset)
    model.loss_chunk_tokens = config.loss_chunk_tokens
    model.activation_checkpointing = config.activation_checkpointing
    print0(f'GPT of {model.num_parameters():,} parameters: {model.config.n_layer} layers, '
           f'{model.config.n_head} heads, {model.config.n_embd} channels')
    print0(describe_export(model.config))
    return model


def spread(model, config, resumed, device, compile, dtype, world):
    """Put a model of build_model where it is trained → Replicated or Sharded."""
    if config.parallel != 'fsdp':
        return Replicated(model.to(device), device, compile, world)
    parallel = Sharded(copy_on_meta(model), device, compile, dtype, config.fsdp_group)
    if resumed:
        resumed.load_weights(parallel.model)
    else:
        parallel.load(model.state_dict())
    return parallel


def check_size(shape, config, device):
    """Raise UserError where a new run keeps more than the memory that is free: parameters and, to
    train, gradients and what the optimizer remembers. Nothing is made for that. Where processes may
    share the model, each keeps its part."""
    size = f'n_layer={shape.n_layer}, n_embd={shape.n_embd}: '
    try:
        step = step_settings(replace(config, batch_size=1), 'float32', device.type)
        with explain_overflow(shape):
            parameters, states = kept_bytes(shape, step)
    except RuntimeError:
        return  # a model or an optimizer of your own, which needs data to be made
    words = f'{size}its parameters'
    if config.parallel == 'fsdp':  # rank 0 makes it whole on the host
        check_memory(parameters, free_memory(), f'{words} take')
    elif device.type == 'cuda':  # where it moves when it is made
        check_memory(parameters, host_memory(), f'{words} take')
    if config.parallel != 'ddp':  # a plan of the step decides about auto
        parameters, states = parameters / step.shares, states / step.shares
    needed = parameters
    if not config.eval_only:
        words, needed = f'{words}, gradients and optimizer states', 2 * parameters + states
    check_memory(needed, available_memory(device), f'{words} take')


def kept_bytes(shape, step):
    """→ (bytes of the parameters, of what the optimizer remembers), from models of two small depths
    on tensors without data: no size is too large to be asked about."""
    kept = torch.zeros(2, dtype=torch.float64)
    for n_layer, share in shares(shape.n_layer, *DEPTHS).items():
        steps = one_step(replace(shape, n_layer=n_layer), step, torch.device('meta'))
        _, gpt, optimizer = next(steps)
        next(steps)  # the optimizer makes its states
        states = [t for state in optimizer.state.values() for t in state.values()
                  if isinstance(t, torch.Tensor)]
        kept += share * torch.tensor([sum(t.nbytes for t in tensors)
                                      for tensors in (gpt.parameters(), states)])
    return kept.tolist()


def load_start(config, dataset):
    """The weights that config.init_from names, of a run of ours or of others, for a new run."""
    if start := checkpoints.find_named(config.init_from, config.checkpoint):
        if start.state['tokenizer'] not in (dataset.tokenizer_json(), base_tokenizer(dataset)):
            raise UserError(f'{start.path} was trained with another tokenizer than that of '
                            f'{dataset.folder}: prepare the text with --tokenizer=THE_OLD_DATASET')
        model = start.load_model(dropout=config.dropout)
        source, trained = start.path, describe_training(start.iter_num, start.val_loss)
    else:
        model, trained = load_pretrained(config.init_from, config.dropout)
        source = config.init_from
    if new := chat_tokens(dataset, model.config.vocab_size):
        grow_vocabulary(model, new)
    check_start(config, model.config, dataset.folder, dataset.vocab_size)
    model.crop_block_size(config.block_size)
    if config.document_attention:  # no weight depends on it
        model.config = replace(model.config, document_attention=True,
                               document_start=document_start(config, dataset))
    print0(f'{source}{trained and f" ({trained})"}: the run starts from its {ANEW}')
    return model


def base_tokenizer(dataset):
    """The tokenizer that a chat tokenizer wraps, as JSON, or None."""
    return dataset.tokenizer_json().get('base')


def chat_tokens(dataset, vocab_size):
    """How many tokens a model with the vocabulary of the base of a chat tokenizer has to learn."""
    base = base_tokenizer(dataset)
    return dataset.vocab_size - vocab_size if base and described_vocab_size(base) == vocab_size \
        else 0


def check_start(config, shape, folder, vocab_size):
    """Raise UserError where a model of this GPTConfig cannot start a run on the dataset."""
    if config.block_size > shape.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{shape.block_size} tokens: use --block_size={shape.block_size} or less')
    if vocab_size != shape.vocab_size:
        raise UserError(f'{folder} has a vocabulary of {vocab_size} and {config.init_from} one of '
                        f'{shape.vocab_size}: prepare the text with the tokenizer of the model')


def start_shape(config):
    """The GPTConfig of the model that config.init_from names, or None where a run starts anew. Its
    weights are not read. Raises UserError where there is no such model."""
    run = config.out_dir if config.init_from in ('resume', 'auto') else config.init_from
    find = checkpoints.find if config.init_from == 'resume' else checkpoints.find_named
    if found := find(run, config.checkpoint):
        shape = found.state['model']
    elif config.init_from in ('scratch', 'auto'):
        return None
    else:
        shape = pretrained_shape(config.init_from)
    if config.document_attention:
        shape = {**shape, 'document_attention': True, 'document_start': 0}  # any: a plan needs none
    return GPTConfig(**{**shape, 'dropout': config.dropout})


# -----------------------------------------------------------------------------
# batch_size=auto


def host_memory():
    """This process's share of the bytes that are free on the machine."""
    return free_memory() // launched_world().local_size


def available_memory(device):
    """Bytes that this process may take now, on its GPU or else on the machine."""
    return device_memory(device)[1] if device.type == 'cuda' else host_memory()


def fits(shape, step, device, compile):
    """True where a whole step runs on this CUDA device, compiled as in training."""
    with torch.random.fork_rng([device]):
        try:
            for _ in one_step(shape, step, device, compile):
                pass
            fit = True
        except torch.OutOfMemoryError:
            fit = False
    torch.compiler.reset()  # or the next would be compiled for batches of any size, and slower
    gc.collect()  # a graph that an error cut short holds itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fit


def with_batch_size(config, shape, dtype, device, compile):
    """The TrainConfig, with a number where it says batch_size=auto. Raises UserError."""
    if config.batch_size != 'auto':
        return config
    batch_size, why = choose_batch_size(shape, config, dtype, device, compile)
    config = replace(config, batch_size=batch_size)
    print0(f'batch_size {batch_size} ({why}) | accumulation {config.accumulation()}')
    return config


def check_batch(config, shape, dtype, device):
    """Raise UserError where a step is planned to take more memory than is free. A GPU is not asked:
    it says so itself, and at once."""
    free = available_memory(device)
    if device.type == 'cuda' or config.eval_only:
        return
    step = step_settings(config, dtype, device.type)
    if rough_bytes(shape, step) < free / 4:
        return
    planned = predict(shape, step).total
    check_memory(planned, free, f'batch_size={config.batch_size}: a step takes',
                 f'choose a smaller one, or another change: {advice(shape, step)}')


def choose_batch_size(shape, config, dtype, device, compile):
    """→ (batch_size, why) that keeps the TrainConfig's total_batch_size: the plan's answer, tried
    on CUDA and stepped down until it fits, the same on all processes. Raises UserError."""
    sequences = config.total_batch_size // config.block_size // config.world_size()
    step = step_settings(replace(config, batch_size=1), dtype, device.type)
    available = available_memory(device)
    planned, _ = batch_that_divides(shape, step, available, sequences)
    batch_size = planned = all_reduce_min(planned, device)
    trying = device.type == 'cuda' and step.parallel == 'ddp'  # the trial holds the whole model
    while batch_size and trying:
        trial = replace(step, batch_size=batch_size, micro_steps=sequences // batch_size)
        if all_reduce_min(int(fits(shape, trial, device, compile)), device):
            break
        batch_size = next((b for b in range(batch_size - 1, 0, -1) if sequences % b == 0), 0)
    if not batch_size:
        need = predict(shape, step).total
        raise UserError(f'batch_size=auto: not even 1 fits: it takes {gib(need)}, {gib(available)} '
                        f'are free on {device}; {advice(shape, step)}')
    tried = ', tried for a step' if trying else ''
    stepped = f', {planned} did not fit' if batch_size < planned else ''
    return batch_size, f'of {gib(available)} free{tried}{stepped}'
