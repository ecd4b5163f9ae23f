"""What a run starts from: new weights, those of a model, or the checkpoint that it continues; the
settings and the shape that follow from it; and what stays of an earlier run in its folder."""

import os
import shutil
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np

from model import GPTConfig
from plaingpt.data.overlap import (
    print_share,
    read_sketches,
    share_trained_on,
    sketch_of,
    windows_of,
)
from plaingpt.monitoring.run_record import trim_rows
from plaingpt.system.distributed import all_gather, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import quoted, setting
from plaingpt.training.checkpoint import (
    checkpoint_paths,
    clean_up,
    find,
    iteration_of,
    open_checkpoint,
)
from plaingpt.training.settings import STARTS, TrainConfig

# Fields that a run takes from the model that it starts from, and not from its settings.
KEPT_SHAPE = [field.name for field in fields(GPTConfig) if field.name not in (
    'block_size', 'vocab_size', 'dropout', 'document_attention', 'document_start')]
# A resumed run takes these settings from its command, and all others from its checkpoint: they say
# how it starts this time, or depend on how many processes there are.
OF_THIS_START = {'out_dir', 'init_from', 'checkpoint', 'check', 'eval_only', 'minutes', 'parallel'}
TRAINED_ON = 'trained_on.npz'  # sketches of the texts that the weights of a run were trained on
LOGS = ('metrics.jsonl', 'anomalies.jsonl', 'film.jsonl', 'run.json', 'report.md', 'loss.png',
        'film.html', 'tensorboard', TRAINED_ON)
LITTLE_SHARED = 0.01  # between the corpora of a mixture: it is not told


def is_resumed(out_dir, init_from):
    """Whether a command with these settings goes on with a run."""
    return init_from == 'resume' or (init_from == 'auto' and bool(checkpoint_paths(out_dir)))


class Start:
    """What a run starts from: nothing, weights, or the checkpoint of a run that it continues.

    weights: what open_weights returned, or None; resumed: whether the run continues from them
    verifies: whether rank 0 compares the checkpoint to continue with its checksums
    """

    def __init__(self, verifies=True):
        self.weights, self.resumed = None, False
        self.began = time.perf_counter()  # the command
        self.verifies = verifies and launched_world().is_main

    @property
    def checkpoint(self):
        """The checkpoint that the run continues, or None."""
        return self.weights if self.resumed else None

    @property
    def from_scratch(self):
        return self.weights is None

    def read(self, values):
        """Open the checkpoint or the weights that a command names → {setting: value}: those of the
        run that it resumes, or the shape of the model that it starts from, or {}.
        values: of the command line alone. Raises UserError where no checkpoint can be used."""
        out_dir, init_from, which = (values[key] for key in ('out_dir', 'init_from', 'checkpoint'))
        # After a crash torchrun repeats the command: --checkpoint=ITER must not go back once more.
        if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0:
            which = 'latest'
        if not out_dir:
            return {}
        if is_resumed(out_dir, init_from) or (init_from == 'auto' and which.isdecimal()):
            self.resumed = True
            self.weights = find(out_dir, which, ('model', 'optimizer') if self.verifies else ())
            return saved_settings(self.weights.settings())
        if init_from in STARTS or not TrainConfig(init_from=init_from).names_a_start():
            return {}
        from plaingpt.training.open_weights import open_weights
        self.weights = open_weights(init_from, which)
        shape = self.weights.config
        return {**{key: getattr(shape, key) for key in KEPT_SHAPE},
                'block_size': min(shape.block_size, TrainConfig.block_size)}  # of a long context

    def agree(self, group):
        """Let all processes take rank 0's checkpoint, which it has verified."""
        path = all_gather(self.weights.path if self.resumed else None, group)[0]
        self.resumed = path is not None
        if self.resumed:
            if self.weights is None or self.weights.path != path:
                self.weights = open_checkpoint(path)
            self.weights.verified.update(('model', 'optimizer'))


def saved_settings(config):
    """{setting: value} of the run that is continued. config: as its checkpoint has it"""
    saved = {field.name: config[field.name] for field in fields(TrainConfig)
             if field.init and field.name in config.keys() - OF_THIS_START}
    if config.get('check') == 'overfit':  # it decides what the run reads
        saved['check'] = 'overfit'
    # A checkpoint has numbers for 'auto'. They are 'auto' again, and follow the command's changes.
    auto = TrainConfig(**{**saved, 'min_lr': 'auto', 'lr_decay_iters': 'auto'})
    return saved | {key: 'auto' for key in ('min_lr', 'lr_decay_iters')
                    if saved.get(key) == getattr(auto, key)}


def check_resumed(resumed, config, dataset):
    """Check that a run continues a Checkpoint with the same model and data, and print the settings
    that have changed. Raises UserError where something differs that a run cannot change."""
    # A setting that did not exist when the checkpoint was written had its default.
    before = {**asdict(TrainConfig()), **resumed.settings()}
    changed = {key: (before[key], value) for key, value in asdict(config).items()
               if before[key] != value}
    fixed = {field.name for field in fields(GPTConfig)} - {'dropout', 'vocab_size'} | {'optimizer'}
    if other := [f'{key}={setting(saved)}, not {setting(value)}'
                 for key, (saved, value) in changed.items() if key in fixed]:
        raise UserError(f'{resumed.path} has {"; ".join(other)}: leave these settings out, and a '
                        'config file that has them, or name another --out_dir')
    if 'max_iters' in changed and config.max_iters < resumed.iter_num and not config.is_read_only:
        raise UserError(f'max_iters={config.max_iters} is behind iteration {resumed.iter_num} of '
                        f'{resumed.path}: give a larger one, or leave it out')
    if resumed.state['tokenizer'] != dataset.tokenizer_json():
        other = 'with another tokenizer than that'
    elif resumed.state['data'] != dataset.identity('train'):
        other = 'on other tokens than those'
    if other:
        raise UserError(f'{resumed.path} was trained {other} of {dataset.folder} (it has dataset='
                        f'{before["dataset"]}): name the data that it had, or start a run from its '
                        f'weights with --init_from={quoted(config.out_dir)} and another --out_dir')
    print0(f'resumed from {resumed.path}')
    for key, (saved, value) in changed.items():
        # another line tells what parallel=auto became
        if key not in ('init_from', 'checkpoint', 'check', 'minutes') \
                and (key, value) != ('parallel', 'auto'):
            print0(f'  changed: {key} {setting(saved)} → {setting(value)}')


def with_minutes(config, start, given):
    """The TrainConfig of a run, whose minutes are those of the whole run: the ones that the command
    line gives come after those used with --init_from=resume, and include them with auto, whose
    command torchrun repeats. Where it gives none, and no number of iterations, they stay.
    given: settings set on the command line. Raises UserError where these give two lengths."""
    two = [f'--{key}' for key in ('max_iters', 'lr_decay_iters') if key in given]
    if config.minutes and two:
        raise UserError(f'minutes={setting(config.minutes)} sets the length of the run, and '
                        f'{" and ".join(two)} too: leave one of them out')
    if not start.resumed:
        return config
    state, saved = start.weights.state, start.weights.settings()['minutes']
    if not config.minutes:
        stays = state['left_s'] is not None and 'max_iters' not in given
        return replace(config, minutes=saved) if stays else config
    if config.init_from == 'resume':
        return replace(config, minutes=used_s(state, saved) / 60 + config.minutes)
    return config


def used_s(state, minutes):
    """Seconds that a run of `minutes` had used at a checkpoint, or one of iterations trained."""
    return state['elapsed_s'] if state['left_s'] is None else 60 * minutes - state['left_s']


def with_shape(config, shape):
    """A TrainConfig whose settings of the model are those that a GPTConfig has."""
    return replace(config, **{key: getattr(shape, key) for key in KEPT_SHAPE})


def run_shape(config, dataset, start):
    """The GPTConfig of a run: of the checkpoint that it continues, of the model that it starts
    from, or a new one. Raises UserError where model and data do not fit together."""
    if start.resumed:
        return replace(start.weights.config, dropout=config.dropout)
    opener = document_start(config, dataset)
    if start.from_scratch:
        return config.gpt_config(dataset.vocab_size, opener)
    from plaingpt.training.open_weights import check_tokenizer, start_shape
    shape = start_shape(config, start.weights, dataset)
    check_tokenizer(config, start.weights, dataset)
    if config.document_attention:
        shape = replace(shape, document_attention=True, document_start=opener)
    return replace(shape, block_size=config.block_size)


def document_start(config, dataset):
    """The id of the token that opens the documents of a dataset, where document_attention asks for
    it, else -1. Raises UserError where there is none."""
    found = dataset.tokenizer().end_of_text if config.document_attention else -1
    if found is None:
        raise UserError(f'document_attention=True: the tokenizer of {dataset.folder} has no end of '
                        'text, so its documents cannot be told apart: prepare it with another '
                        'tokenizer, or leave document_attention out')
    return found


# -----------------------------------------------------------------------------
# what the weights were trained on


def trained_on(weights):
    """Sketches of the texts that the weights of open_weights were trained on; [] where their run
    did not write any, or they are of no run."""
    return read_sketches(weights.path.parent.parent / TRAINED_ON) if weights.state else []


def sketch_texts(start, dataset, train_data, val_data):
    """Sketch what a new run trains on → [Sketch], also of what the weights that it starts from were
    trained on. Prints how much of the validation text is in the latter, and how much of that of
    each corpus of a mixture is in the training text of another."""
    names = [part.name for part in dataset.components]
    own = [sketch_of(loader.stream) for loader in train_data.components]
    earlier = trained_on(start.weights) if start.weights else []
    for name, loader in zip(names, val_data.components, strict=True):
        if len(own) == 1 and not earlier:
            break  # prepare.py has compared the splits
        text = f'validation text of {name}' if name else 'validation text'
        windows = windows_of(loader.stream)
        if (share := share_trained_on(*windows, earlier)) is not None:
            print_share(share, f'{text} was in the training text of {start.weights.source}',
                        'validate on text that it was not trained on')
        for other, sketch in zip(names, own, strict=True):
            share = share_trained_on(*windows, [sketch]) if other != name else None
            if share and share > LITTLE_SHARED:
                print_share(share, f'{text} is in the training split of {other}',
                            'remove the copies there, or leave one of them out')
    return own + [sketch for sketch in earlier
                  if not any(np.array_equal(sketch.hashes, each.hashes) for each in own)]


# -----------------------------------------------------------------------------
# an earlier run in the folder


def archive_previous_run(out_dir, after=-1):
    """Move the checkpoints after an iteration, and the logs, to out_dir/old-001 (002, …) → that
    folder, or None where there is nothing to keep. If the run in out_dir goes on (after ≥ 0), its
    logs are copied. Files that a crash left half written are removed. Raises UserError."""
    out_dir = Path(out_dir)
    clean_up(out_dir)
    later = [path for path in checkpoint_paths(out_dir) if iteration_of(path) > after]
    logs = [out_dir / name for name in LOGS if (out_dir / name).exists()]
    if not later and (after >= 0 or not logs):
        return None
    numbers = [int(path.name[4:]) for path in out_dir.glob('old-*') if path.name[4:].isdecimal()]
    archive = out_dir / f'old-{max(numbers, default=0) + 1:03d}'
    try:
        (archive / 'checkpoints').mkdir(parents=True)
        for path in logs:
            if after < 0:
                shutil.move(path, archive / path.name)
            elif path.is_file():  # event files are written anew
                shutil.copy2(path, archive / path.name)
        for path in later:
            shutil.move(path, archive / 'checkpoints' / path.name)
    except OSError as e:
        raise UserError(f'{archive}: what this run would overwrite cannot be kept there '
                        f'({e.strerror}): choose another --out_dir') from None
    return archive


def trim_logs(out_dir, iter_num, evaluated):
    """Cut the logs off after the iteration of a checkpoint. evaluated: whether its evaluation was
    saved; if not, it is made and logged again"""
    for path in (Path(out_dir, name) for name in LOGS):
        if path.suffix == '.jsonl' and path.exists():
            trim_rows(path, iter_num, evaluated)


def eval_sequences_of(checkpoint, config):
    """How many sequences an evaluation of a resumed run reads: as many as before, also with another
    batch size, so that its losses compare; unless the settings ask for another number."""
    if checkpoint.settings()['eval_iters'] != config.eval_iters:
        return config.eval_sequences()
    return checkpoint.state['eval_sequences']
