"""Which checkpoint a run continues, and whether it may."""

import os
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from model import GPTConfig
from plaingpt.system.distributed import all_gather, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import quoted, setting
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.checkpoint_writer import clean_up
from plaingpt.training.run_model import KEPT_SHAPE, start_shape
from plaingpt.training.settings import STARTS, TrainConfig

# What a resumed run takes from its command, and not from its checkpoint: where it is and how it
# starts this time, and what follows from the processes and the machine of this time.
OF_THIS_START = {'out_dir', 'init_from', 'checkpoint', 'check', 'eval_only', 'minutes', 'parallel'}


def is_resumed(out_dir, init_from):
    """Whether a command with these settings goes on with a run."""
    return init_from == 'resume' or (
        init_from == 'auto' and bool(checkpoints.checkpoint_paths(out_dir)))


def saved_settings(values):
    """{name: value} of the run that a command resumes; where it starts from other weights, the
    shape of their model; else {}. values: what the command line says by itself. Raises UserError
    where no checkpoint can be used."""
    out_dir, init_from = values['out_dir'], values['init_from']
    if not out_dir:
        return {}
    if not is_resumed(out_dir, init_from):
        return settings_of_start(init_from, values['checkpoint'])
    found = checkpoints.find(out_dir, checkpoint_to_resume(values['checkpoint']),
                             on_damaged=lambda problem: None)  # find_resumed warns of it
    saved = {field.name: found.state['config'][field.name] for field in fields(TrainConfig)
             if field.name in found.state['config'].keys() - OF_THIS_START}
    if found.state['config'].get('check') == 'overfit':  # it decides what the run reads
        saved['check'] = 'overfit'
    # What was 'auto' is written as a number, and follows from what the command changes.
    with suppress(TypeError):  # of values that load_config refuses
        auto = TrainConfig(**{**saved, 'min_lr': 'auto', 'lr_decay_iters': 'auto'})
        saved |= {key: 'auto' for key in ('min_lr', 'lr_decay_iters')
                  if saved.get(key) == getattr(auto, key)}
    return saved


def settings_of_start(init_from, which):
    """{name: value} of the shape of the model that init_from names, {} where it names none. Of a
    long context a run reads as much as it would by itself. Raises UserError."""
    config = TrainConfig(init_from=init_from, checkpoint=which)
    if init_from in STARTS or not config.names_a_start():
        return {}
    shape = start_shape(config)
    return {**{key: getattr(shape, key) for key in KEPT_SHAPE},
            'block_size': min(shape.block_size, TrainConfig.block_size)}


def checkpoint_to_resume(which):
    """After a crash torchrun repeats the command: --checkpoint=ITER must not go back once more."""
    restarted = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0
    return 'latest' if restarted else which


def find_resumed(config, group):
    """The checkpoint to resume, or None to start. Rank 0 looks and decides for all. Raises
    UserError, also with 'auto' where there are some and none can be used."""
    if config.init_from not in ('resume', 'auto'):
        return None
    path = None
    if launched_world().is_main:
        if not config.is_read_only:
            clean_up(config.out_dir)
        which = checkpoint_to_resume(config.checkpoint)
        if config.init_from == 'resume' or which.isdecimal() \
                or checkpoints.checkpoint_paths(config.out_dir):
            path = checkpoints.find(config.out_dir, which, ('model', 'optimizer')).path
        elif Path(config.out_dir, 'metrics.jsonl').exists():
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
    fixed = [f'{key}={setting(value)} (it has {setting(saved)})'
             for key, (saved, value) in changed.items() if key in shape | {'optimizer'}]
    if fixed:
        raise UserError(f'{resumed.path} was trained otherwise than with {", ".join(fixed)}: '
                        'leave that out, or the config file that says it, or name another '
                        '--out_dir')
    if 'max_iters' in changed and config.max_iters < resumed.iter_num and not config.is_read_only:
        raise UserError(f'max_iters={config.max_iters} is behind iteration {resumed.iter_num} of '
                        f'{resumed.path}: give a larger one, or leave it out')
    if resumed.state['tokenizer'] != dataset.tokenizer_json():
        name = resumed.state['config'].get('dataset', config.dataset)
        option = f', --dataset={quoted(name)}' if name != config.dataset else ''
        raise UserError(f'{resumed.path} was trained with another tokenizer than that of '
                        f'{dataset.folder}: name the dataset it was trained on{option}')
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
               if key not in ('init_from', 'checkpoint', 'check', 'minutes')
               and (key, values[1]) != ('parallel', 'auto')}  # a line of its own tells what it is
    for key, (saved, value) in changed.items():
        print0(f'  changed: {key} {setting(saved)} → {setting(value)}')
