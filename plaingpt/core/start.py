"""The starting point of a run: scratch, pretrained weights, or a checkpoint to resume; and the
settings and the architecture that come with it."""

import os
import time
from dataclasses import fields, replace

from model import GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.settings import INIT_MODES, TrainConfig
from plaingpt.system.distributed import all_gather, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import quoted, setting

# Settings that come from the model that a run starts from.
ARCHITECTURE_FIELDS = [field.name for field in fields(GPTConfig) if field.name not in (
    'block_size', 'vocab_size', 'dropout', 'document_attention', 'document_start')]
# Settings that are not restored from the checkpoint of a resumed run: they belong to the command,
# or depend on the number of processes.
NOT_RESTORED = {'out_dir', 'init_from', 'checkpoint', 'check', 'eval_only', 'minutes', 'parallel'}


def is_resumed(out_dir, init_from):
    """Whether a command with these settings resumes a run."""
    return init_from == 'resume' \
        or (init_from == 'auto' and bool(checkpoints.checkpoint_paths(out_dir)))


class StartingPoint:
    """What a run starts from: scratch, pretrained weights, or a checkpoint that it resumes.

    weights: a Checkpoint or a Pretrained (see open_weights), or None
    resumed: whether `weights` is the checkpoint to resume from
    verifies: whether rank 0 verifies the checksums of that checkpoint
    """

    def __init__(self, verifies=True):
        self.weights = None
        self.resumed = False
        self.started_at = time.perf_counter()  # when the command was started
        self.verifies = verifies and launched_world().is_main

    @property
    def checkpoint(self):
        """The checkpoint to resume from, or None."""
        return self.weights if self.resumed else None

    @property
    def from_scratch(self):
        return self.weights is None

    def read(self, values):
        """Open the checkpoint or the pretrained weights that the command line names. Return
        {setting: value} to start from: the settings of the run to resume, or the architecture of
        the pretrained model, or {}. values: those of the command line. Raises UserError."""
        out_dir, init_from, which = values['out_dir'], values['init_from'], values['checkpoint']
        # After a crash, torchrun repeats the command: --checkpoint=ITER must not go back again.
        if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0:
            which = 'latest'
        if not out_dir:
            return {}
        if is_resumed(out_dir, init_from) or (init_from == 'auto' and which.isdecimal()):
            self.resumed = True
            kinds = ('model', 'optimizer') if self.verifies else ()
            self.weights = checkpoints.find(out_dir, which, kinds)
            return restored_settings(self.weights.settings())
        if init_from in INIT_MODES or not TrainConfig(init_from=init_from).is_valid_source():
            return {}
        from plaingpt.inference.open_weights import open_weights
        self.weights = open_weights(init_from, which)
        gpt_config = self.weights.config
        settings = {key: getattr(gpt_config, key) for key in ARCHITECTURE_FIELDS}
        # a long context is used only on request
        settings['block_size'] = min(gpt_config.block_size, TrainConfig.block_size)
        return settings

    def share_checkpoint(self, group):
        """Make all processes resume from rank 0's checkpoint, which rank 0 has verified."""
        path = all_gather(self.weights.path if self.resumed else None, group)[0]
        self.resumed = path is not None
        if self.resumed:
            if self.weights is None or self.weights.path != path:
                self.weights = checkpoints.open_checkpoint(path)
            self.weights.verified.update(('model', 'optimizer'))


def restored_settings(config):
    """{setting: value} for a resumed run. config: the settings in its checkpoint"""
    settings = {field.name: config[field.name] for field in fields(TrainConfig)
                if field.init and field.name in config.keys() - NOT_RESTORED}
    if config.get('check') == 'overfit':  # it determines the training data
        settings['check'] = 'overfit'
    # Version 1.0 saved numbers in place of 'auto', and had no setting `clock`. Restore 'auto', so
    # that both settings follow max_iters and learning_rate if the command changes these.
    if 'clock' not in config:
        auto = TrainConfig(**{**settings, 'min_lr': 'auto', 'lr_decay_iters': 'auto'}).resolved()
        for key in ('min_lr', 'lr_decay_iters'):
            if settings.get(key) == auto[key]:
                settings[key] = 'auto'
    return settings


def check_resumable(checkpoint, config, dataset):
    """Check that a Checkpoint can be resumed with these settings and data, and print the settings
    that have changed. Raises UserError for a change that is not possible."""
    # A setting that did not exist when the checkpoint was written had its default.
    saved = {key: value for key, value in checkpoint.settings().items() if key != 'document_start'}
    before = TrainConfig(**saved).resolved()
    changed = {key: (before[key], value) for key, value in config.resolved().items()
               if before[key] != value}
    fixed = {field.name for field in fields(GPTConfig)} - {'dropout', 'vocab_size'} \
        | {'optimizer', 'pack'}
    differences = [f'{key}={setting(old)}, not {setting(new)}'
                   for key, (old, new) in changed.items() if key in fixed]
    if differences:
        raise UserError(f'{checkpoint.path} has {"; ".join(differences)}: leave out these settings '
                        'and any config file that sets them, or choose another --out_dir')
    if 'max_iters' in changed and config.max_iters < checkpoint.iter_num \
            and not config.minutes and not config.is_read_only:
        raise UserError(f'max_iters={config.max_iters}: {checkpoint.path} is already at iteration '
                        f'{checkpoint.iter_num}; raise --max_iters, or leave out the '
                        'option or config file that sets it')
    difference = None
    if checkpoint.state['tokenizer'] != dataset.tokenizer_json():
        difference = 'with a different tokenizer than that'
    elif checkpoint.state['data'] != dataset.identity('train'):
        difference = 'on different tokens than those'
    if difference:
        raise UserError(f'{checkpoint.path} was trained {difference} of {dataset.folder} (its '
                        f'dataset={before["dataset"]}): use that dataset, or start a new run from '
                        f'its weights with --init_from={quoted(config.out_dir)} and another '
                        '--out_dir')
    print0(f'resumed from {checkpoint.path}')
    without_effect = {'max_iters', 'lr_decay_iters', 'eval_interval'} if config.minutes else set()
    for key, (old, new) in changed.items():
        if key not in NOT_RESTORED | without_effect:
            print0(f'  changed: {key} {setting(old)} → {setting(new)}')


def resolve_minutes(config, start, overrides):
    """Return the TrainConfig with the minutes of the whole run, those before a resume included.

    --minutes adds to the time already used with --init_from=resume, and includes it with auto,
    because torchrun repeats the command. Without --minutes and --max_iters, a resumed run keeps its
    minutes. overrides: the settings on the command line. Raises UserError if these set the
    iterations of a timed run."""
    minutes, remedy = config.minutes, 'leave one of them out'
    if start.resumed:
        state = start.weights.state
        saved_minutes = state['config']['minutes']
        was_timed = state['left_s'] is not None
        if minutes and config.init_from == 'resume':
            minutes += used_s(state) / 60
        elif not minutes and was_timed and 'max_iters' not in overrides:
            minutes, remedy = saved_minutes, 'leave it out, or set --max_iters as well'
    iteration_options = [f'--{key}' for key in ('max_iters', 'lr_decay_iters') if key in overrides]
    if minutes and iteration_options:
        raise UserError(f'minutes={setting(config.minutes or minutes)} cannot be combined with '
                        f'{" and ".join(iteration_options)}: both set the length of the run; '
                        f'{remedy}')
    return replace(config, minutes=minutes)


def used_s(state):
    """The seconds that a run had used when it saved this state of a checkpoint."""
    if state['left_s'] is None:  # the run counted iterations
        return state['elapsed_s']
    return 60 * state['config']['minutes'] - state['left_s']


def resolve_gpt_config(config, dataset, start):
    """→ (the TrainConfig with the architecture of the run, its GPTConfig): that of the checkpoint,
    of the pretrained model, or a new one. Raises UserError if model and dataset do not match."""
    gpt_config = choose_gpt_config(config, dataset, start)
    architecture = {key: getattr(gpt_config, key) for key in ARCHITECTURE_FIELDS}
    ignored = [f'{key}={setting(getattr(config, key))}' for key, value in architecture.items()
               if getattr(config, key) != value]
    if ignored:
        print0(f'ignored {", ".join(ignored)}: the architecture is that of '
               f'{start.weights.source}')
    return replace(config, **architecture), gpt_config


def choose_gpt_config(config, dataset, start):
    if start.resumed:
        return replace(start.weights.config, dropout=config.dropout)
    start_id = document_start(config, dataset)
    if start.from_scratch:
        return config.gpt_config(dataset.vocab_size, start_id)
    from plaingpt.inference.open_weights import check_tokenizer, gpt_config_from_weights
    gpt_config = gpt_config_from_weights(config, start.weights, dataset)
    check_tokenizer(config, start.weights, dataset)
    if config.document_attention:
        gpt_config = replace(gpt_config, document_attention=True, document_start=start_id)
    return replace(gpt_config, block_size=config.block_size)


def document_start(config, dataset):
    """The id of the token that starts each document, or -1 without document_attention. Raises
    UserError if the tokenizer has no such token."""
    if not config.document_attention:
        return -1
    start_id = dataset.tokenizer().end_of_text
    if start_id is None:
        raise UserError(f'document_attention=True: the tokenizer of {dataset.folder} has no '
                        'end-of-text token to separate documents: prepare the data with another '
                        '--tokenizer, or leave out document_attention')
    return start_id
