"""Settings of a training run, shared by train.py, plan.py and bench.py.

The comment beside a field is its help text. TrainConfig inherits the fields of GPTConfig. The
configurator checks types and the limits at the end of the class.
"""

import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from model import GPTConfig
from plaingpt.core.blocks import CHECKPOINT_MODES
from plaingpt.core.optimizers import OPTIMIZERS
from plaingpt.core.schedules import SCHEDULES, parse_schedule
from plaingpt.core.weights import PRETRAINED
from plaingpt.system.distributed import launched_world
from plaingpt.system.files import is_hub_name
from plaingpt.system.formatting import setting

CheckMode = Literal['auto', 'overfit'] | bool
INIT_MODES = 'scratch', 'resume', 'auto'  # values of init_from that are not a model
# Settings that a comparison with a reference run leaves out: they do not change the expected loss,
# or they are compared separately (dataset, tokens per step).
NOT_COMPARED = {
    'out_dir', 'eval_interval', 'eval_iters', 'eval_only', 'eval_tasks', 'eval_tasks_limit',
    'log_interval', 'checkpoint', 'checkpoint_interval',
    'always_save_checkpoint', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name', 'film',
    'report', 'patience', 'check', 'skip_checks', 'dataset', 'vocab_size', 'batch_size',
    'gradient_accumulation_steps', 'total_batch_size', 'minutes', 'clock', 'seed', 'device',
    'dtype', 'compile', 'activation_checkpointing', 'backend', 'parallel'}


@dataclass
class TrainConfig(GPTConfig):
    # output
    out_dir: str = 'out'  # folder for checkpoints and metrics
    eval_interval: int = 2000  # iterations between evaluations
    eval_iters: int = 200  # batches per evaluation
    log_interval: int = 1  # iterations between log lines, in the console and in metrics.jsonl
    eval_tasks: str = ''  # lm_eval tasks to run at evaluations, such as hellaswag,lambada_openai
    eval_tasks_limit: int = 500  # examples per task; 0: all
    log_to: str = ''  # also log metrics to: wandb, trackio, tensorboard
    film: bool = False  # record the model about 24 times during training, for plot.py --film
    report: bool = True  # sample at evaluations; write report.md and loss.png at the end
    # start, save, stop
    init_from: str = 'scratch'  # scratch, resume, auto (either), gpt2…, OWNER/NAME, folder, ckpt.pt
    checkpoint: str = 'latest'  # which checkpoint of a run to load: latest, best, or an iteration
    always_save_checkpoint: bool = True  # save after every evaluation, not only after a new best
    checkpoint_interval: Literal['auto'] | int = 'auto'  # steps between saves; auto: at evaluations
    patience: int = 0  # stop after this many evaluations without a new best; 0: never
    check: CheckMode = 'auto'  # True: preflight only; False: skip it; overfit: train on one batch
    skip_checks: str = ''  # checks to skip, such as attention_is_causal,sequences_are_shuffled
    # data
    dataset: str = 'openwebtext'  # a name in data/, a path, or a mixture: code:0.3,prose:0.7
    pack: Literal['stream', 'documents'] = 'stream'  # documents: whole documents in each sequence
    batch_size: Literal['auto'] | int = 12  # sequences per micro-batch; auto: as many as fit
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all processes
    total_batch_size: int = 0  # tokens per step; overrides gradient_accumulation_steps; 0: off
    # optimizer
    optimizer: Literal[*OPTIMIZERS] = 'adamw'  # muon, normuon: for matrices in blocks, else AdamW
    learning_rate: float = 6e-4  # peak learning rate (SGD needs about 100× AdamW's)
    lr_scales: str = ''  # LR multipliers: embedding:8,ngram:1,head:2,vector:4 (norms, biases, conv)
    max_iters: int = 600000  # number of training steps
    minutes: float = 0.0  # train this many minutes, not max_iters; init_from=resume: that many more
    weight_decay: float = 1e-1  # for matrices and embeddings, not for biases and norms
    beta1: float = 0.9  # decay of AdamW's first moment (mean of gradients)
    beta2: float = 0.95  # decay of AdamW's second moment (mean of their squares)
    momentum: float = 0.95  # momentum of Muon and SGD
    grad_clip: float = 1.0  # maximum gradient norm; 0: no clipping
    ema_decay: float = 0.0  # EMA decay of the weights; the EMA is evaluated and saved; 0: off
    # learning rate
    lr_schedule: Literal[*SCHEDULES] | str = 'cosine'  # wsd decays in the last 20%, wsd:0.1 in 10%
    warmup_iters: int = 2000  # iterations of linear warmup; at most a tenth of a timed run
    lr_decay_iters: Literal['auto'] | int = 'auto'  # iteration that reaches min_lr; auto: max_iters
    min_lr: Literal['auto'] | float = 'auto'  # final learning rate; auto: learning_rate / 10
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of matmuls
    compile: Literal['auto', 'blocks'] | bool = 'auto'  # torch.compile; blocks: one block at a time
    activation_checkpointing: Literal[*CHECKPOINT_MODES] = 'none'  # recompute activations
    parallel: Literal['auto', 'ddp', 'fsdp'] = 'auto'  # ddp replicates the model, fsdp shards it
    seed: int = 1337  # for initialization, dropout and data order
    # model, where it differs from GPT-2
    bias: bool = False  # biases in Linears and LayerNorms (GPT-2: True)
    # not listed: settings of nanoGPT that follow from others
    decay_lr: bool = True  # False: a constant learning rate without warmup
    eval_only: bool = False  # exit after the first evaluation
    wandb_log: bool = False  # log to Weights & Biases, like log_to=wandb
    wandb_project: str = 'owt'  # wandb or Trackio project
    wandb_run_name: str = 'gpt2'  # wandb or Trackio run name
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # torch.distributed's backend
    vocab_size: int = 0  # 0: the dataset's
    document_start: int = field(default=0, init=False)  # the dataset's; see gpt_config()
    # not listed: set by bench.py --judge
    clock: Literal['wall', 'training'] = 'wall'  # what minutes count: all time, or only steps

    # numeric limits, checked by the configurator
    above_0 = (
        'block_size', 'n_layer', 'n_head', 'n_embd', 'ngram', 'norm_eps', 'rotary_base',
        'rotary_factor', 'rotary_length', 'eval_interval', 'eval_iters', 'log_interval',
        'checkpoint_interval', 'batch_size', 'gradient_accumulation_steps')
    below_1 = ('dropout', 'beta1', 'beta2', 'momentum', 'ema_decay')
    at_least_0 = (
        *below_1, 'vocab_size', 'conv', 'ngram_rows', 'n_kv_head', 'head_dim', 'n_inner',
        'eval_tasks_limit', 'patience', 'total_batch_size', 'learning_rate', 'max_iters', 'minutes',
        'weight_decay', 'grad_clip', 'warmup_iters', 'lr_decay_iters', 'min_lr', 'seed')

    def out_of_range(self):
        """Messages about invalid values that the limits above do not catch."""
        problems = []
        for key in ('out_dir', 'dataset', 'init_from', 'checkpoint'):
            if not getattr(self, key):
                problems.append(f'{key} is empty')
        if self.log_to:
            from plaingpt.monitoring.backends import BACKENDS
            for name in self.log_to.split(','):
                if name and name not in BACKENDS:
                    problems.append(f'log_to={self.log_to}: {name!r} is not one of '
                                    f'{", ".join(BACKENDS)}')
        if self.checkpoint not in ('', 'latest', 'best') and not self.checkpoint.isdecimal():
            problems.append(f'checkpoint={self.checkpoint}: must be latest, best or an iteration')
        try:
            parse_schedule(self.lr_schedule)
        except ValueError as problem:
            problems.append(f'lr_schedule={self.lr_schedule}: {problem}')
        if not re.fullmatch(r'((embedding|ngram|head|vector):\d*\.?\d+(e[-+]?\d\d?)?(,|$))*',
                            self.lr_scales):
            problems.append(f'lr_scales={self.lr_scales}: must be kinds of weights with '
                            'multipliers, such as embedding:8,ngram:1,head:2,vector:4 (head: if '
                            'untied; vector: norms, biases and convolutions)')
        return problems

    def conflicts(self):
        """Messages about settings that contradict each other."""
        problems = super().conflicts()
        if self.init_from and not self.is_valid_source():
            problems.append(f'init_from={self.init_from!r} is not {", ".join(INIT_MODES)}, a '
                            f'folder, a .pt file, {", ".join(PRETRAINED)}, or OWNER/NAME on the '
                            'Hugging Face hub')
        if self.checkpoint != 'latest' and self.init_from == 'scratch':
            problems.append(f'checkpoint={self.checkpoint} has no effect with init_from=scratch; '
                            'to go back to that checkpoint, use --init_from=resume')
        if self.patience and self.check == 'overfit':
            problems.append(f'patience={self.patience} cannot be combined with check=overfit, '
                            'which lets the validation loss rise')
        if self.decay_lr and self.lr_schedule != 'constant' \
                and self.final_lr() > self.learning_rate:
            problems.append(f'min_lr={setting(self.final_lr())} is greater than '
                            f'learning_rate={setting(self.learning_rate)}')
        if self.decay_lr and self.warmup_iters > self.decay_iters():
            problems.append(f'warmup_iters={self.warmup_iters} is greater than '
                            f'lr_decay_iters={self.lr_decay_iters}')
        return problems + self.batch_problems()

    def is_valid_source(self):
        """Whether a run can start from init_from."""
        return self.init_from in (*INIT_MODES, *PRETRAINED) or os.path.lexists(self.init_from) \
            or is_hub_name(self.init_from)

    def batch_problems(self):
        """Messages about a step that does not divide into micro-batches and processes."""
        problems = []
        world_size = self.world_size()
        if self.batch_size == 'auto':
            unit, unit_tokens = 'block_size × processes', self.block_size * world_size
            if not self.total_batch_size:
                problems.append('batch_size=auto requires total_batch_size (tokens per step), '
                                'which determines the gradient accumulation')
        else:
            unit = 'batch_size × block_size × processes'
            unit_tokens = self.batch_size * self.block_size * world_size
        if self.total_batch_size % unit_tokens:
            problems.append(f'total_batch_size={self.total_batch_size} is not a multiple of '
                            f'{unit} = {unit_tokens}')
        elif not self.total_batch_size and self.gradient_accumulation_steps % world_size:
            problems.append(f'gradient_accumulation_steps={self.gradient_accumulation_steps} is '
                            f'not a multiple of the number of processes, {world_size}')
        return problems

    def gpt_config(self, vocab_size, document_start=0):
        """The GPTConfig of a new model. document_start: the token that starts a document; memory
        and speed do not depend on which one it is"""
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        values['vocab_size'] = vocab_size
        values['document_start'] = document_start if self.document_attention else -1
        return GPTConfig(**values)

    def scales(self):
        """{kind of weights: multiplier of the learning rate}, parsed from lr_scales."""
        scales = {'embedding': 1.0, 'ngram': 1.0, 'head': 1.0, 'vector': 1.0}
        for entry in self.lr_scales.split(','):
            if entry:
                kind, scale = entry.split(':')
                scales[kind] = float(scale)
        return scales

    def decay_iters(self):
        """The iteration at which the schedule reaches final_lr()."""
        if self.lr_decay_iters == 'auto':
            return max(self.max_iters, self.warmup_iters)
        return self.lr_decay_iters

    def final_lr(self):
        """The learning rate at the end of the schedule."""
        return self.learning_rate / 10 if self.min_lr == 'auto' else self.min_lr

    def resolved(self):
        """{setting: value}, with numbers in place of min_lr=auto and lr_decay_iters=auto."""
        return asdict(self) | {'lr_decay_iters': self.decay_iters(), 'min_lr': self.final_lr()}

    @property
    def is_read_only(self):
        """Whether the run only evaluates or checks, and writes no files."""
        return self.eval_only or self.check is True

    def world_size(self):
        """Number of processes."""
        return launched_world().size

    def micro_steps(self):
        """Micro-batches per step on each process."""
        return self.accumulation() // self.world_size()

    def accumulation(self):
        """Micro-batches per step, over all processes."""
        if self.total_batch_size:
            return self.total_batch_size // (self.batch_size * self.block_size)
        return self.gradient_accumulation_steps

    def eval_sequences(self):
        """Sequences per split that each evaluation of a new run reads."""
        return self.eval_iters * self.batch_size

    def step_tokens(self):
        """Tokens per step, over all processes; batch_size must be a number."""
        return self.step_sequences() * self.block_size

    def step_sequences(self):
        """Sequences per step, over all processes."""
        return self.accumulation() * self.batch_size
