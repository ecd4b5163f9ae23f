"""The settings of a training run, which train.py, plan.py and bench.py share.

The comment beside a field is its help text. The configurator checks types, and the limits at the
end of the class. TrainConfig inherits the fields of GPTConfig.
"""

import difflib
import os
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from model import GPTConfig
from plaingpt.parallel.blocks import CHECKPOINT_MODES
from plaingpt.system.distributed import launched_world
from plaingpt.system.files import is_hub_name
from plaingpt.system.formatting import setting
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.schedules import SCHEDULES
from plaingpt.weights import PRETRAINED

STARTS = 'scratch', 'resume', 'auto'  # values of init_from that name no model
# A comparison with a reference does not list these settings: they do not change the loss that is
# expected, or they are compared on their own (dataset, tokens a step).
WITHOUT_EFFECT = {
    'out_dir', 'eval_interval', 'eval_iters', 'eval_only', 'eval_tasks', 'eval_tasks_limit',
    'log_interval', 'checkpoint', 'checkpoint_interval',
    'always_save_checkpoint', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name', 'film',
    'report', 'patience', 'check', 'skip_checks', 'dataset', 'vocab_size', 'batch_size',
    'gradient_accumulation_steps', 'total_batch_size', 'minutes', 'seed', 'device', 'dtype',
    'compile', 'activation_checkpointing', 'backend', 'parallel'}


@dataclass
class TrainConfig(GPTConfig):
    # output
    out_dir: str = 'out'  # folder for checkpoints and metrics
    eval_interval: int = 2000  # iterations between evaluations
    eval_iters: int = 200  # batches in an evaluation
    log_interval: int = 1  # iterations between lines on the console
    eval_tasks: str = ''  # tasks of lm_eval at evaluations, such as hellaswag,lambada_openai
    eval_tasks_limit: int = 500  # questions of each task; 0 for all
    log_to: str = ''  # send metrics also to: wandb, trackio, tensorboard
    film: bool = False  # record the model at some 24 moments, for plot.py --film
    report: bool = True  # samples at evaluations; at the end, report.md and loss.png in out_dir
    # start, save, stop
    init_from: str = 'scratch'  # scratch, resume, auto, gpt2…, OWNER/NAME, folder, ckpt.pt
    checkpoint: str = 'latest'  # which to take from a run: latest, best, or an iteration
    always_save_checkpoint: bool = True  # after each evaluation, not only after the best
    checkpoint_interval: Literal['auto'] | int = 'auto'  # iterations; auto: at evaluations
    patience: int = 0  # stop after this many evaluations without a new best; 0: never
    check: Literal['auto', 'overfit'] | bool = 'auto'  # before a new run; True: then exit
    skip_checks: str = ''  # checks to leave out, such as attention_is_causal,sequences_are_shuffled
    # data
    dataset: str = 'openwebtext'  # in data/, or a path; several: code:0.3,prose:0.7
    batch_size: Literal['auto'] | int = 12  # sequences of a micro-batch; auto: as many as fit
    gradient_accumulation_steps: int = 5 * 8  # micro-batches of a step, of all processes
    total_batch_size: int = 0  # tokens a step; if not 0, it decides the accumulation
    # optimizer
    optimizer: Literal[*OPTIMIZERS] = 'adamw'  # muon: for matrices in blocks, AdamW for the rest
    learning_rate: float = 6e-4  # the highest; sgd needs some 100 times AdamW's
    lr_scales: str = ''  # factors on it: embedding:8,ngram:1,head:2,vector:4 (head: if untied)
    max_iters: int = 600000  # updates of the weights
    minutes: float = 0.0  # train this long, not max_iters; init_from=resume: this much longer
    weight_decay: float = 1e-1  # of matrices and embeddings; vectors have none
    beta1: float = 0.9  # of AdamW: decay of the mean of gradients
    beta2: float = 0.95  # of AdamW: decay of the mean of their squares
    momentum: float = 0.95  # of muon and sgd
    grad_clip: float = 1.0  # largest norm of the gradient; 0 for no limit
    average_decay: float = 0.0  # of an average of the weights, to evaluate and save; 0: none
    # learning rate
    lr_schedule: Literal[*SCHEDULES] | str = 'cosine'  # wsd:0.2, like wsd, falls in the last fifth
    warmup_iters: int = 2000  # iterations up to learning_rate
    lr_decay_iters: Literal['auto'] | int = 'auto'  # iterations down to min_lr; auto: max_iters
    min_lr: Literal['auto'] | float = 'auto'  # the lowest; auto: a tenth of learning_rate
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of the matmuls
    compile: Literal['auto', 'blocks'] | bool = 'auto'  # torch.compile; blocks: each by itself
    activation_checkpointing: Literal[*CHECKPOINT_MODES] = 'none'  # keep less for the backward pass
    parallel: Literal['auto', 'ddp', 'fsdp'] = 'auto'  # ddp copies the model, fsdp shards
    seed: int = 1337  # of the weights, of dropout and of the order of data
    # model, where it differs from GPT-2
    bias: bool = False  # biases in Linears and LayerNorms, as in GPT-2
    # not listed: settings of nanoGPT that follow from others
    decay_lr: bool = True  # False: a constant learning rate, without warmup
    eval_only: bool = False  # stop after the first evaluation
    wandb_log: bool = False  # log to Weights & Biases, as log_to=wandb
    wandb_project: str = 'owt'  # project there and on Trackio
    wandb_run_name: str = 'gpt2'  # name of the run there
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # between processes
    vocab_size: int = 0  # 0: the dataset's
    document_start: int = field(default=0, init=False)  # the dataset's, see gpt_config

    # limits of numbers, which the configurator checks
    above_0 = (
        'block_size', 'n_layer', 'n_head', 'n_embd', 'ngram', 'norm_eps', 'rotary_base',
        'rotary_factor', 'rotary_length', 'eval_interval', 'eval_iters', 'log_interval',
        'checkpoint_interval', 'batch_size', 'gradient_accumulation_steps')
    below_1 = ('dropout', 'beta1', 'beta2', 'momentum', 'average_decay')
    at_least_0 = (
        *below_1, 'vocab_size', 'conv', 'ngram_rows', 'n_kv_head', 'head_dim', 'n_inner',
        'eval_tasks_limit', 'patience', 'total_batch_size', 'learning_rate', 'max_iters', 'minutes',
        'weight_decay', 'grad_clip', 'warmup_iters', 'lr_decay_iters', 'min_lr', 'seed')

    def __post_init__(self):
        if self.lr_decay_iters == 'auto':
            self.lr_decay_iters = max(self.max_iters, self.warmup_iters)
        if self.min_lr == 'auto':
            self.min_lr = self.learning_rate / 10

    def out_of_range(self):
        """Invalid values that these limits do not catch, a line each."""
        found = [f'{key} is empty' for key in ('out_dir', 'dataset', 'init_from', 'checkpoint')
                 if not getattr(self, key)]
        if self.log_to:
            from plaingpt.monitoring.backends import BACKENDS
            found += [f'log_to={self.log_to}: {name!r} is none of {", ".join(BACKENDS)}'
                      for name in self.log_to.split(',') if name and name not in BACKENDS]
        if self.checkpoint not in ('', 'latest', 'best') and not self.checkpoint.isdecimal():
            found.append(f'checkpoint={self.checkpoint}: it is latest, best or an iteration')
        if not re.fullmatch('|'.join([*SCHEDULES, r'wsd:(0?\.\d*[1-9]\d*|1(\.0*)?)']),
                            self.lr_schedule):
            found.append(f'lr_schedule={self.lr_schedule}: it is {", ".join(SCHEDULES)}, or '
                         'wsd:SHARE, which falls in this last part of the run, above 0 and at most '
                         '1')
        if not re.fullmatch(r'((embedding|ngram|head|vector):\d*\.?\d+(e[-+]?\d\d?)?(,|$))*',
                            self.lr_scales):
            found.append(f'lr_scales={self.lr_scales}: it is kinds of weights and factors, as '
                         'embedding:8,ngram:1,head:2,vector:4')
        return found

    def conflicts(self):
        """Settings that contradict each other, a line each."""
        found = super().conflicts()
        if self.init_from and not self.names_a_start():
            nearest = difflib.get_close_matches(self.init_from, STARTS, n=1)
            found.append(f'init_from={self.init_from!r} is neither {", ".join(STARTS)}, nor a '
                         f'folder, a .pt file, {", ".join(PRETRAINED)} or OWNER/NAME on the '
                         f'Hugging Face hub{"".join(f": did you mean {n}?" for n in nearest)}')
        if self.checkpoint != 'latest' and self.init_from == 'scratch':
            found.append(f'checkpoint={self.checkpoint} with init_from=scratch, which starts anew: '
                         'going back takes --init_from=resume')
        if self.minutes and not self.takes_minutes():
            found.append(f'minutes={setting(self.minutes)} is for train.py and '
                         'bench.py --judge: give --max_iters here')
        if self.patience and self.check == 'overfit':
            found.append(f'patience={self.patience} watches the validation loss, which '
                         'check=overfit lets rise: take one of them')
        if self.decay_lr and self.lr_schedule != 'constant' and self.min_lr > self.learning_rate:
            found.append(f'min_lr={setting(self.min_lr)} is above '
                         f'learning_rate={setting(self.learning_rate)}')
        if self.decay_lr and self.warmup_iters > self.lr_decay_iters:
            found.append(f'warmup_iters={self.warmup_iters} is more than '
                         f'lr_decay_iters={self.lr_decay_iters}')
        return found + self.batch_problems()

    def takes_minutes(self):
        """Whether the script trains by the clock."""
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
        """The shape of the model. document_start: the dataset's; any other is as fast."""
        shape = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        shape['document_start'] = document_start if self.document_attention else -1
        return GPTConfig(**{**shape, 'vocab_size': vocab_size})

    def scales(self):
        """{kind of weights: factor on its learning rate}, as lr_scales says."""
        parts = [part.split(':') for part in self.lr_scales.split(',') if part]
        return {'embedding': 1.0, 'ngram': 1.0, 'head': 1.0, 'vector': 1.0,
                **{kind: float(factor) for kind, factor in parts}}

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
        """Sequences of a split that each evaluation of a new run reads."""
        return self.eval_iters * self.batch_size

    def step_tokens(self):
        """Tokens in a step, of all processes together; batch_size must be a number."""
        return self.step_sequences() * self.block_size

    def step_sequences(self):
        """Sequences in a step, of all processes."""
        return self.accumulation() * self.batch_size
