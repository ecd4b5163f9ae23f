"""The settings of a training run, which train.py, plan.py and bench.py share.

The comment beside a field is its help text, and its type may have a limit in words, which the
configurator checks. TrainConfig inherits the fields of GPTConfig.
"""

import difflib
import os
import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeVar, get_type_hints

from model import RECOMPUTED, GPTConfig, Size
from plaingpt.data.foreign_tokenizer import is_hub_name
from plaingpt.inference.pretrained import PRETRAINED
from plaingpt.monitoring.backends import BACKENDS
from plaingpt.system.distributed import launched_world
from plaingpt.system.formatting import setting, unescape
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.schedules import SCHEDULES

Positive = Annotated[int, 'at least 1']
Natural = Annotated[int, 'at least 0']
Chunk = Literal['auto'] | Natural
NotNegative = Annotated[float, 'at least 0']
Decay = Annotated[float, 'at least 0 and below 1']  # of a running mean, each step
T = TypeVar('T')
STARTS = 'scratch', 'resume', 'auto'  # values of init_from that name no model
WITHOUT_EFFECT = object()
# Does not change the loss that a run is expected to have, or is compared by itself (dataset, tokens
# a step): a comparison with a reference does not list it.
NoEffect = Annotated[T, WITHOUT_EFFECT]
Check = Literal['auto', 'warn'] | bool
# Settings of earlier versions, of the model and of its training, that are no more → the value, or
# the setting whose value, that this version computes with.
REMOVED = {'rotary_share': 1.0, 'embedding_norm': False, 'qk_scale': 0.0,
           'head_bias': False, 'logit_softcap': 0.0, 'softcap': 'tanh', 'adam_eps': 1e-8,
           'muon_scale': 'match_rms_adamw', 'muon_iterations': 'quintic',
           'embedding_decay': 'weight_decay', 'vector_decay': 0.0}

# And those that changed no loss: a run of an earlier version may have any value of them.
GONE_WITHOUT_EFFECT = {'also_evaluate', 'checkpoint_chunk_mb', 'deterministic', 'dist_timeout_s',
                       'fsdp_group', 'max_bad_steps'}


@dataclass
class TrainConfig(GPTConfig):
    removed = REMOVED
    # output
    out_dir: NoEffect[str] = 'out'  # folder for checkpoints and metrics
    eval_interval: NoEffect[Positive] = 2000  # iterations between evaluations
    eval_iters: NoEffect[Positive] = 200  # batches an evaluation, of the run's first batch_size
    eval_tokens: NoEffect[Natural] = 0  # if not 0, evaluate on a split's first N tokens instead
    eval_only: NoEffect[bool] = False  # stop after the first evaluation
    log_interval: NoEffect[Positive] = 1  # iterations between lines on the console
    eval_tasks: NoEffect[str] = ''  # of lm_eval, at evaluations, such as hellaswag,lambada_openai
    eval_tasks_limit: NoEffect[Natural] = 500  # questions of each to ask; 0 for all
    sample_interval: NoEffect[Natural] = 0  # iterations between samples on the console; 0 for none
    sample_start: NoEffect[Annotated[str, unescape]] = '\n'  # the text that a sample continues
    sample_tokens: NoEffect[Natural] = 100  # in a sample, on the console and in the report; 0: none
    init_from: str = 'scratch'  # scratch, resume, auto, gpt2…, OWNER/NAME, folder, ckpt.pt
    # checkpoints
    checkpoint_interval: NoEffect[Positive] = 1000  # iterations between those for resuming
    always_save_checkpoint: NoEffect[bool] = True  # after each evaluation, not only after the best
    keep_checkpoints: NoEffect[Positive] = 2  # keep this many of the newest, and the best
    checkpoint_async: NoEffect[bool] = False  # write while training goes on, from a copy in memory
    checkpoint: NoEffect[str] = 'latest'  # which to take from a run: latest, best, or an iteration
    # logging elsewhere
    wandb_log: NoEffect[bool] = False  # log to Weights & Biases
    wandb_project: NoEffect[str] = 'owt'  # project there and on Trackio
    wandb_run_name: NoEffect[str] = 'gpt2'  # name of the run there
    log_to: NoEffect[str] = ''  # send metrics also to: wandb, trackio, tensorboard
    # watching
    health_interval: NoEffect[Natural] = 100  # iterations between health checks; 0: none
    film: NoEffect[bool] = False  # look inside at some 40 instants, for plot.py --film
    report: NoEffect[bool] = True  # at the end, write report.md and loss.png into out_dir
    patience: NoEffect[Natural] = 0  # stop after so many evaluations without a new best; 0: never
    overfit_batches: Natural = 0  # a check: train on the first batches only, to a loss near 0
    check: NoEffect[Check] = 'auto'  # auto: before a new run; warn: report, train; True: then exit
    # data
    dataset: NoEffect[str] = 'openwebtext'  # in data/, or a path; several: code:0.3,prose:0.7
    data_in_ram: NoEffect[Literal['auto'] | bool] = 'auto'  # read the tokens into memory first
    batch_size: NoEffect[Literal['auto'] | Size] = 12  # sequences held at once; auto: all that fit
    gradient_accumulation_steps: NoEffect[Positive] = 5 * 8  # micro-batches of all processes
    total_batch_size: NoEffect[Natural] = 0  # tokens a step; if not 0, it decides the accumulation
    # optimizer
    optimizer: Literal[*OPTIMIZERS] = 'adamw'  # muon: for matrices in blocks, AdamW for the rest
    learning_rate: NotNegative = 6e-4  # the highest; of sgd some 100 times AdamW's
    embedding_lr_scale: NotNegative = 1.0  # factor on learning_rate for embeddings
    head_lr_scale: NotNegative = 1.0  # for an untied head
    vector_lr_scale: NotNegative = 1.0  # of biases, norms and short convolutions
    max_iters: Natural = 600000  # updates of the weights
    minutes: NoEffect[NotNegative] = 0.0  # how long to train (resume: on), instead of max_iters
    weight_decay: NotNegative = 1e-1  # of matrices, embeddings too; vectors have none
    beta1: Decay = 0.9  # of AdamW: decay of the mean of gradients
    beta2: Decay = 0.95  # of AdamW: decay of the mean of their squares
    momentum: Decay = 0.95  # of muon and sgd
    grad_clip: NotNegative = 1.0  # largest norm of the gradient; 0 for no limit
    average_decay: Decay = 0.0  # of the mean of the weights that is evaluated and saved; 0: none
    # learning rate
    decay_lr: bool = True  # False keeps it constant, without warmup
    lr_schedule: Literal[*SCHEDULES] = 'cosine'  # after the warmup
    wsd_decay: Annotated[float, 'above 0 and at most 1'] = 0.2  # wsd: falls in this last part
    warmup_iters: Natural = 2000  # iterations up to learning_rate
    lr_decay_iters: Literal['auto'] | Natural = 'auto'  # iterations down to min_lr; auto: max_iters
    min_lr: Literal['auto'] | NotNegative = 'auto'  # the lowest; auto: a tenth of learning_rate
    # system
    device: NoEffect[str] = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: NoEffect[Literal['auto', 'float32', 'bfloat16', 'float16']] = 'auto'  # of the matmuls
    compile: NoEffect[Literal['auto'] | bool] = 'auto'  # torch.compile the model
    loss_chunk_tokens: NoEffect[Chunk] = 'auto'  # tokens that have logits at once; 0: all
    activation_checkpointing: NoEffect[Literal[*RECOMPUTED]] = 'none'  # keep less for backward
    backend: NoEffect[Literal['auto', 'nccl', 'gloo']] = 'auto'  # between processes
    seed: NoEffect[Natural] = 1337  # of the weights, of dropout and of the order of data
    parallel: NoEffect[Literal['auto', 'ddp', 'fsdp']] = 'auto'  # ddp copies the model, fsdp shards
    # model, where it differs from GPT-2
    vocab_size: NoEffect[Annotated[int, f'at least 0 and at most {2**40}']] = 0  # 0: the dataset's
    bias: bool = False  # biases in Linears and LayerNorms, as in GPT-2
    document_start: Literal['auto'] | int = 'auto'  # token that opens a document; auto: dataset's

    def __post_init__(self):
        if self.lr_decay_iters == 'auto':
            self.lr_decay_iters = max(self.max_iters, self.warmup_iters)
        if self.min_lr == 'auto':
            self.min_lr = self.learning_rate / 10

    def out_of_range(self):
        """Values that are invalid by themselves, beside those outside of a limit, a line each."""
        found = [f'{key} is empty' for key in ('out_dir', 'dataset', 'init_from', 'checkpoint')
                 if not getattr(self, key)]
        found += [f'log_to={self.log_to}: {name!r} is none of {", ".join(BACKENDS)}'
                  for name in self.log_to.split(',') if name and name not in BACKENDS]
        if self.checkpoint not in ('', 'latest', 'best') and not self.checkpoint.isdecimal():
            found.append(f'checkpoint={self.checkpoint}: it is latest, best or an iteration')
        if not re.fullmatch(r'auto|cpu|mps|cuda(:\d+)?', self.device):
            found.append(f'device={self.device!r} is unknown: use auto, cpu, cuda, cuda:0 or mps')
        return found

    def problems(self):
        """What contradicts itself, a line each."""
        found = super().problems()
        if self.init_from and not self.names_a_start():
            nearest = difflib.get_close_matches(self.init_from, STARTS, n=1)
            found.append(f'init_from={self.init_from!r} is neither {", ".join(STARTS)}, nor a '
                         f'folder, a .pt file, {", ".join(PRETRAINED)} or OWNER/NAME on the '
                         f'Hugging Face hub{"".join(f": did you mean {n}?" for n in nearest)}')
        if 0 < self.eval_tokens < self.block_size:
            found.append(f'eval_tokens={self.eval_tokens} is less than a sequence of block_size='
                         f'{self.block_size} tokens')
        if self.checkpoint != 'latest' and self.init_from == 'scratch':
            found.append(f'checkpoint={self.checkpoint} with init_from=scratch, which starts anew: '
                         'going back takes --init_from=resume')
        if self.minutes and not self.takes_minutes():
            found.append(f'minutes={setting(self.minutes)} is for train.py, which measures how '
                         'many iterations fit: say --max_iters here')
        if self.document_start not in ('auto', -1) and not self.document_attention:
            found.append(f'document_start={self.document_start} takes document_attention=True')
        if self.patience and self.overfit_batches:
            found.append(f'patience={self.patience} watches the validation loss, which '
                         f'overfit_batches={self.overfit_batches} lets rise: take one of them')
        if self.decay_lr and self.lr_schedule != 'constant' and self.min_lr > self.learning_rate:
            found.append(f'min_lr={setting(self.min_lr)} is above '
                         f'learning_rate={setting(self.learning_rate)}')
        if self.decay_lr and self.warmup_iters > self.lr_decay_iters:
            found.append(f'warmup_iters={self.warmup_iters} is more than '
                         f'lr_decay_iters={self.lr_decay_iters}')
        return found + self.batch_problems()

    def takes_minutes(self):
        """Whether the script measures how much fits in `minutes`."""
        return type(self) is TrainConfig

    def names_a_start(self):
        """Whether init_from can be what a run starts from."""
        return self.init_from in (*STARTS, *PRETRAINED) or os.path.lexists(self.init_from) \
            or is_hub_name(self.init_from)

    def batch_problems(self):
        """Why the tokens of a step cannot be shared out among micro-batches and processes."""
        found = []
        auto = self.batch_size == 'auto'
        micro = self.block_size * (1 if auto else self.batch_size)
        world = self.world_size()
        if auto and not self.total_batch_size:
            found.append('batch_size=auto adapts the accumulation to the tokens in a step: say how '
                         'many with total_batch_size')
        if self.total_batch_size % (micro * world):
            found.append(f'total_batch_size={self.total_batch_size} is not a multiple of '
                         f'{"" if auto else "batch_size × "}block_size × processes = '
                         f'{micro * world}')
        elif not self.total_batch_size and self.gradient_accumulation_steps % world:
            found.append(f'gradient_accumulation_steps={self.gradient_accumulation_steps} is not a '
                         f'multiple of the number of processes, {world}')
        return found

    def gpt_config(self, vocab_size, document_start=0):
        """The shape of the model. document_start: of the dataset; another takes as long."""
        shape = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        if self.document_start == 'auto':
            shape['document_start'] = document_start if self.document_attention else -1
        return GPTConfig(**{**shape, 'vocab_size': vocab_size})

    @property
    def is_read_only(self):
        """Whether nothing is trained or written: eval_only, or --check alone."""
        return self.eval_only or self.check is True

    def world_size(self):
        """Processes that share a step."""
        return launched_world().size

    def accumulation(self):
        """Micro-batches in a step, of all processes together."""
        if self.total_batch_size:
            return self.total_batch_size // (self.batch_size * self.block_size)
        return self.gradient_accumulation_steps

    def eval_sequences(self):
        """Sequences that an evaluation of a run that begins now reads of a split."""
        return self.eval_tokens // self.block_size or self.eval_iters * self.batch_size

    def step_tokens(self):
        """Tokens in a step, of all processes together; batch_size must be a number."""
        return self.accumulation() * self.batch_size * self.block_size


def settings_without_effect():
    """Names of the settings that do not change the loss that a run can be expected to have."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    return GONE_WITHOUT_EFFECT | {name for name, hint in hints.items()
                                  if WITHOUT_EFFECT in getattr(hint, '__metadata__', ())}
