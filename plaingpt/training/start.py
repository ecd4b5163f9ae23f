"""What a run starts from: new weights, those of a model, or the checkpoint that it continues; and
the settings and the shape that follow from it."""

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from model import GPTConfig
from plaingpt.data.tokenizers import described_vocab_size, words_of
from plaingpt.monitoring.run_record import finite
from plaingpt.system.distributed import all_gather, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import quoted, setting
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.open_weights import open_weights
from plaingpt.training.settings import STARTS, TrainConfig

# Fields of a model that a run has from the model that it starts from, whatever its settings say.
KEPT_SHAPE = [field.name for field in fields(GPTConfig) if field.name not in (
    'block_size', 'vocab_size', 'dropout', 'document_attention', 'document_start')]
# What a resumed run takes from its command, and not from its checkpoint: where it is and how it
# starts this time, and what follows from the processes and the machine of this time.
OF_THIS_START = {'out_dir', 'init_from', 'checkpoint', 'check', 'eval_only', 'minutes', 'parallel'}
OPENING_TOKENS = 2**20  # of a corpus, in which a document begins where there are documents


def is_resumed(out_dir, init_from):
    """Whether a command with these settings goes on with a run."""
    return init_from == 'resume' or (
        init_from == 'auto' and bool(checkpoints.checkpoint_paths(out_dir)))


class Start:
    """What a run starts from: nothing, weights, or the checkpoint of a run that it continues.

    weights: of open_weights, or None; resumed: whether the run continues from them
    verifies: compare a checkpoint that is continued with its checksums, on rank 0
    """

    def __init__(self, verifies=True):
        self.weights, self.resumed = None, False
        self.verifies = verifies and launched_world().is_main

    @property
    def checkpoint(self):
        """That the run continues, or None."""
        return self.weights if self.resumed else None

    @property
    def from_scratch(self):
        return self.weights is None

    def read(self, values):
        """Open what a command names → {setting: value} of the run that it resumes; where it starts
        from other weights, the shape of their model; else {}. values: what the command line says
        by itself. Raises UserError where no checkpoint can be used."""
        out_dir, init_from, which = (values[key] for key in ('out_dir', 'init_from', 'checkpoint'))
        # After a crash torchrun repeats the command: --checkpoint=ITER must not go back once more.
        if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0:
            which = 'latest'
        if not out_dir:
            return {}
        if is_resumed(out_dir, init_from) or (init_from == 'auto' and which.isdecimal()):
            self.find(out_dir, which)
            return self.saved_settings()
        if init_from in STARTS or not TrainConfig(init_from=init_from).names_a_start():
            return {}
        self.weights = open_weights(init_from, which)
        shape = GPTConfig(**self.weights.shape)  # of a long context a run reads its usual part
        return {**{key: getattr(shape, key) for key in KEPT_SHAPE},
                'block_size': min(shape.block_size, TrainConfig.block_size)}

    def find(self, out_dir, which):
        """Find the checkpoint to continue, on rank 0 one that is as it was written."""
        self.resumed = True
        if not self.verifies:
            self.weights = checkpoints.find(out_dir, which, on_damaged=lambda problem: None)
            return
        self.weights = checkpoints.find(out_dir, which, ('model', 'optimizer'))
        self.weights.verify()

    def saved_settings(self):
        """{setting: value} of the run that is continued."""
        config = self.weights.state['config']
        saved = {field.name: config[field.name] for field in fields(TrainConfig)
                 if field.name in config.keys() - OF_THIS_START}
        if config.get('check') == 'overfit':  # it decides what the run reads
            saved['check'] = 'overfit'
        # What was 'auto' is written as a number, and follows from what the command changes.
        with suppress(TypeError):  # of values that load_config refuses
            auto = TrainConfig(**{**saved, 'min_lr': 'auto', 'lr_decay_iters': 'auto'})
            saved |= {key: 'auto' for key in ('min_lr', 'lr_decay_iters')
                      if saved.get(key) == getattr(auto, key)}
        return saved

    def agree(self, config, group):
        """Rank 0's checkpoint, which it has verified, is that of all processes."""
        if config.init_from == 'auto' and not self.resumed \
                and Path(config.out_dir, 'metrics.jsonl').exists():
            print0(f'{config.out_dir} has a log and no checkpoint: a new run starts')
        path = all_gather(self.weights.path if self.resumed else None, group)[0]
        self.resumed = path is not None
        if self.resumed:
            if self.weights is None or self.weights.path != path:
                self.weights = checkpoints.open_checkpoint(path)
            self.weights.verified.update(('model', 'optimizer'))

    def check(self, config, dataset):
        """See that a run which continues is of the same model and data, and print which settings
        have changed. Raises UserError where something differs that a run cannot change."""
        resumed = self.weights
        # A setting that did not exist when the checkpoint was written had its default.
        before = {**asdict(TrainConfig()), **resumed.state['config']}
        now = asdict(config)
        changed = {key: (before[key], now[key]) for key in now if before[key] != now[key]}
        shape = {field.name for field in fields(GPTConfig)} - {'dropout', 'vocab_size'}
        fixed = [f'{key}={setting(value)} (it has {setting(saved)})'
                 for key, (saved, value) in changed.items() if key in shape | {'optimizer'}]
        if fixed:
            raise UserError(f'{resumed.path} was trained otherwise than with {", ".join(fixed)}: '
                            'leave that out, or the config file that says it, or name another '
                            '--out_dir')
        if 'max_iters' in changed and config.max_iters < resumed.iter_num \
                and not config.is_read_only:
            raise UserError(f'max_iters={config.max_iters} is behind iteration {resumed.iter_num} '
                            f'of {resumed.path}: give a larger one, or leave it out')
        if resumed.state['tokenizer'] != dataset.tokenizer_json():
            name = resumed.state['config'].get('dataset', config.dataset)
            option = f', --dataset={quoted(name)}' if name != config.dataset else ''
            raise UserError(f'{resumed.path} was trained with another tokenizer than that of '
                            f'{dataset.folder}: name the dataset it was trained on{option}')
        if not dataset.is_identity('train', resumed.state['data']):
            other = f' (it has dataset={before["dataset"]})' if 'dataset' in changed else ''
            raise UserError(f'{resumed.path} was trained on other tokens than those of '
                            f'{dataset.folder}{other}: to continue with other data, start a run '
                            f'from its weights with --init_from={quoted(config.out_dir)} and '
                            'another --out_dir')
        print0(f'resumed from {resumed.path}')
        for key, (saved, value) in changed.items():
            # a line of its own tells what parallel=auto is
            if key not in ('init_from', 'checkpoint', 'check', 'minutes') \
                    and (key, value) != ('parallel', 'auto'):
                print0(f'  changed: {key} {setting(saved)} → {setting(value)}')


def with_shape(config, shape):
    """A TrainConfig whose settings of the model are those that a GPTConfig has."""
    return replace(config, **{key: getattr(shape, key) for key in KEPT_SHAPE})


def run_shape(config, dataset, start):
    """The GPTConfig of a run: of the checkpoint that it continues, of the model that it starts
    from, or a new one. Raises UserError where the model fits no such data."""
    if start.resumed:
        return GPTConfig(**{**start.weights.state['model'], 'dropout': config.dropout})
    opener = document_start(config, dataset)
    if start.from_scratch:
        return config.gpt_config(dataset.vocab_size, opener)
    shape = start_shape(config, start.weights, dataset)
    asked = {key: getattr(config, key) for key in KEPT_SHAPE}
    if other := [f'{key}={getattr(shape, key)} (not {value})' for key, value in asked.items()
                 if value != getattr(shape, key)]:
        print0(f'the run has the shape of {config.init_from}: {", ".join(other)}')
    check_start(config, shape, dataset.folder, dataset.vocab_size)
    check_tokenizer(config, start.weights, dataset)
    if config.document_attention:
        shape = replace(shape, document_attention=True, document_start=opener)
    return replace(shape, block_size=config.block_size)


def start_shape(config, weights, dataset=None):
    """The GPTConfig of the model whose weights a run starts from. A dataset of conversations may
    have special tokens that it has to learn."""
    shape = GPTConfig(**{**weights.shape, 'dropout': config.dropout})
    base = dataset and base_tokenizer(dataset)
    if base and described_vocab_size(base) == shape.vocab_size:
        shape = replace(shape, vocab_size=dataset.vocab_size)
    return shape


def check_start(config, shape, folder, vocab_size):
    """Raise UserError where a model of this GPTConfig cannot start a run on the dataset."""
    if config.block_size > shape.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{shape.block_size} tokens: use --block_size={shape.block_size} or less')
    if vocab_size != shape.vocab_size:
        raise UserError(f'{folder} has a vocabulary of {vocab_size} and {config.init_from} one of '
                        f'{shape.vocab_size}: prepare the text with the tokenizer of the model, or '
                        'name another model with --init_from')


def check_tokenizer(config, weights, dataset):
    """Raise UserError where the model knows other tokens than the dataset, and say what starts."""
    tokenizer, other, trained = weights.tokenizer_json(), config.init_from, ''
    if weights.state:
        other = 'THE_OLD_DATASET'
        loss = f', validation loss {weights.val_loss:.4f}' if math.isfinite(weights.val_loss) \
            else ''
        trained = f' (iteration {weights.iter_num:,}{loss})'
    known = [words_of(each) for each in (dataset.tokenizer_json(), base_tokenizer(dataset)) if each]
    if tokenizer is not None and words_of(tokenizer) not in known:
        raise UserError(f'{weights.source} was trained with another tokenizer than that of '
                        f'{dataset.folder}: prepare the text with --tokenizer={other}')
    print0(f'{weights.source}{trained}: the run starts from its weights; the '
           'optimizer, the iteration count and the order of the data begin anew')


def base_tokenizer(dataset):
    """The tokenizer that a chat tokenizer wraps, as JSON, or None."""
    return dataset.tokenizer_json().get('base')


def document_start(config, dataset):
    """The id of the token that opens the documents of a dataset, where document_attention asks for
    it, else -1. Raises UserError where there is none."""
    if not config.document_attention:
        return -1
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


@dataclass
class Progress:
    """Where a run stands: what a checkpoint keeps of the loop."""

    iter_num: int = 0  # updates made
    best_val_loss: float = math.inf
    evals_since_best: int = 0
    evaluated_at: int | None = None  # the iteration of the last evaluation
    val_loss: float | None = None  # that it measured
    saved_at: int | None = None  # the iteration of the last checkpoint
    saved_evaluated: bool = False  # that checkpoint has its evaluation
    eval_sequences: int = 0  # that each evaluation reads of a split

    @property
    def evaluated(self):
        """Whether this iteration was evaluated."""
        return self.evaluated_at == self.iter_num

    def record_evaluation(self, val_loss):
        """val_loss: None where it was not due. → whether it is the best so far."""
        self.evaluated_at, self.val_loss = self.iter_num, val_loss
        if val_loss is None:
            return False
        best = val_loss < self.best_val_loss
        if best:
            self.best_val_loss = val_loss
        self.evals_since_best = 0 if best else self.evals_since_best + 1
        return best

    def state(self):
        """What a checkpoint of this iteration keeps, as JSON."""
        return {'iter_num': self.iter_num, 'evaluated': self.evaluated,
                'val_loss': finite(self.val_loss) if self.evaluated else None,
                'best_val_loss': finite(self.best_val_loss),
                'evals_since_best': self.evals_since_best, 'eval_sequences': self.eval_sequences}


def eval_sequences_of(state, config):
    """How many sequences an evaluation of a resumed run reads: as many as before, also with another
    batch size, so that its losses compare; unless the settings ask for another number."""
    before = replace(config, **{key: state['config'].get(key, getattr(config, key))
                                for key in ('eval_iters', 'batch_size')})
    if before.eval_iters != config.eval_iters:
        return config.eval_sequences()
    return state['eval_sequences'] or before.eval_sequences()
