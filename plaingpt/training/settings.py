"""The settings of a training run, which train.py, plan.py and bench.py share.

The comment beside a field is its help text. TrainConfig inherits the fields of GPTConfig.
"""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from model import GPTConfig
from plaingpt.inference.hf_architectures import rotary_problems
from plaingpt.inference.scoring import BENCHMARKS
from plaingpt.kernels.recompute import KINDS
from plaingpt.monitoring.backends import BACKENDS
from plaingpt.system.distributed import launched_world
from plaingpt.system.formatting import unescape
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.schedules import SCHEDULES

# Sizes far beyond what any machine holds; planning goes through the layers one by one.
MOST = {'n_layer': 10_000, **dict.fromkeys(
    ('n_head', 'n_embd', 'block_size', 'batch_size', 'vocab_size'), 2**40)}


@dataclass
class TrainConfig(GPTConfig):
    # output
    out_dir: str = 'out'  # folder for checkpoints and metrics
    eval_interval: int = 2000  # iterations between evaluations
    eval_iters: int = 200  # evaluate on so many batches of the first batch_size, or the whole split
    eval_tokens: int = 0  # if not 0, evaluate on so many at the beginning of a split instead
    eval_only: bool = False  # stop after the first evaluation
    log_interval: int = 1  # iterations between lines on the console
    eval_tasks: str = 'hellaswag'  # benchmarks: hellaswag, lambada, with a comma between
    eval_tasks_interval: int = 0  # iterations between runs of them; 0 for none
    sample_interval: int = 0  # iterations between samples on the console; 0 for none
    sample_start: Annotated[str, unescape] = '\n'  # the text that a sample continues
    sample_tokens: int = 100  # length of those, and of one each evaluation for the report; 0: none
    init_from: str = 'scratch'  # scratch, resume, auto (resume if it can), gpt2…, folder, ckpt.pt
    # checkpoints
    checkpoint_interval: int = 1000  # iterations between those for resuming
    always_save_checkpoint: bool = True  # one after each evaluation too, not only after the best
    keep_checkpoints: int = 2  # keep this many of the newest, and the best
    checkpoint_async: bool = False  # write while training continues; takes host memory for a copy
    checkpoint_chunk_mb: int = 512  # no file of a checkpoint is larger
    checkpoint: str = 'latest'  # which to take from a run: latest, best, or an iteration
    # logging elsewhere
    wandb_log: bool = False  # log to Weights & Biases
    wandb_project: str = 'owt'  # its project
    wandb_run_name: str = 'gpt2'  # its run
    log_to: str = ''  # send metrics also to these, with commas between: wandb, tensorboard
    # watching
    health_interval: int = 100  # iterations between health checks (five at least); 0 for none
    report: bool = True  # at the end, write report.md and loss.png into out_dir
    patience: int = 0  # stop after this many evaluations without a new best; 0 for never
    overfit_batches: int = 0  # a check: train on the first batches only, until the loss is near 0
    check: Literal['auto', 'warn'] | bool = 'auto'  # a new run first; warn: go on; True: only that
    # data
    dataset: str = 'openwebtext'  # in data/, or a path; several by weights: code:0.3,prose:0.7
    also_evaluate: str = ''  # another dataset, whose validation loss shows what tuning forgets
    data_in_ram: Literal['auto'] | bool = 'auto'  # read the tokens into memory first
    batch_size: Literal['auto'] | int = 12  # sequences the device holds at once; auto: all that fit
    gradient_accumulation_steps: int = 5 * 8  # micro-batches in a step, of all processes together
    total_batch_size: int = 0  # tokens in a step; if not 0, it decides the accumulation
    # optimizer
    optimizer: Literal[*OPTIMIZERS] = 'adamw'  # muon: in blocks, with AdamW for the rest
    learning_rate: float = 6e-4  # the highest; muon takes AdamW's, sgd wants some 100 times it
    embedding_lr_scale: float = 1.0  # times learning_rate: of embeddings (token, position, value)
    head_lr_scale: float = 1.0  # of an untied head
    vector_lr_scale: float = 1.0  # of biases, norms and short convolutions
    max_iters: int = 600000  # updates of the weights
    weight_decay: float = 1e-1  # of matrices, embeddings included; vectors do not decay
    beta1: float = 0.9  # of AdamW: decay of the mean of gradients
    beta2: float = 0.95  # of AdamW: decay of the mean of their squares
    momentum: float = 0.95  # of muon and sgd
    grad_clip: float = 1.0  # largest norm of the gradient; 0 for no limit
    max_bad_steps: int = 10  # stop when the loss or gradient is not finite this often in a row
    # learning rate
    decay_lr: bool = True  # False keeps it constant, without warmup
    lr_schedule: Literal[*SCHEDULES] = 'cosine'  # after the warmup
    wsd_decay: float = 0.2  # wsd: falls in this last part of lr_decay_iters, linearly
    warmup_iters: int = 2000  # iterations up to learning_rate
    lr_decay_iters: Literal['auto'] | int = 'auto'  # iterations down to min_lr; auto: max_iters
    min_lr: Literal['auto'] | float = 'auto'  # the lowest; auto: a tenth of learning_rate
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls
    compile: Literal['auto'] | bool = 'auto'  # torch.compile the model
    loss_chunk_tokens: int = 2048  # logits of so many tokens exist at once; 0 for all of a batch
    activation_checkpointing: Literal[*KINDS] = 'none'  # keep less for the backward pass
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # between processes
    deterministic: bool = False  # on a GPU too, the same bits each time; slower
    seed: int = 1337  # of the weights, of dropout and of the order of data
    parallel: Literal['auto', 'ddp', 'fsdp'] = 'auto'  # ddp copies the model, fsdp shards it
    fsdp_group: int = 0  # processes that share a copy, such as those of a machine; 0 for all
    # model, where it differs from GPT-2
    vocab_size: int = 0  # tokens that there are; 0 for those of the dataset
    bias: bool = False  # biases in Linears and LayerNorms, as in GPT-2
    document_start: Literal['auto'] | int = 'auto'  # opens a document; auto: as in the dataset

    def __post_init__(self):
        if self.lr_decay_iters == 'auto':
            self.lr_decay_iters = max(self.max_iters, self.warmup_iters)
        if self.min_lr == 'auto':
            self.min_lr = self.learning_rate / 10

    def out_of_range(self):
        """Values that are invalid by themselves, a line each."""
        found = [f'{key} is empty' for key in ('out_dir', 'dataset', 'init_from', 'checkpoint')
                 if not getattr(self, key)]
        positive = ('eval_interval', 'eval_iters', 'log_interval', 'checkpoint_interval',
                    'keep_checkpoints', 'checkpoint_chunk_mb', 'max_bad_steps', 'block_size',
                    'gradient_accumulation_steps', 'n_layer', 'n_head', 'n_embd',
                    *(['batch_size'] if self.batch_size != 'auto' else []))
        found += [f'{key}={getattr(self, key)}: must be at least 1'
                  for key in positive if getattr(self, key) < 1]
        found += [f'{key}={getattr(self, key)}: {most:,} is the most' for key, most in MOST.items()
                  if getattr(self, key) != 'auto' and getattr(self, key) > most]
        natural = ('max_iters', 'warmup_iters', 'lr_decay_iters', 'learning_rate', 'min_lr',
                   'weight_decay', 'grad_clip',
                   'embedding_lr_scale', 'head_lr_scale', 'vector_lr_scale', 'total_batch_size',
                   'loss_chunk_tokens', 'seed', 'eval_tokens',
                   'eval_tasks_interval', 'sample_interval', 'health_interval', 'sample_tokens',
                   'patience', 'overfit_batches', 'vocab_size', 'fsdp_group')
        found += [f'{key}={getattr(self, key)}: must not be negative'
                  for key in natural if getattr(self, key) < 0]
        found += [f'{key}={getattr(self, key)}: must be at least 0 and below 1'
                  for key in ('dropout', 'beta1', 'beta2', 'momentum')
                  if not 0 <= getattr(self, key) < 1]
        found += [f'eval_tasks={self.eval_tasks}: {task!r} is none of {", ".join(BENCHMARKS)}'
                  for task in self.eval_tasks.split(',') if task not in BENCHMARKS]
        found += [f'log_to={self.log_to}: {name!r} is none of {", ".join(BACKENDS)}'
                  for name in self.log_to.split(',') if name and name not in BACKENDS]
        if self.checkpoint not in ('', 'latest', 'best') and not self.checkpoint.isdecimal():
            found.append(f'checkpoint={self.checkpoint}: it is latest, best or an iteration')
        if not re.fullmatch(r'auto|cpu|mps|cuda(:\d+)?', self.device):
            found.append(f'device={self.device!r} is unknown: use auto, cpu, cuda, cuda:0 or mps')
        if 0 < self.eval_tokens < self.block_size:
            found.append(f'eval_tokens={self.eval_tokens} is less than a sequence of block_size='
                         f'{self.block_size} tokens')
        if not 0 < self.wsd_decay <= 1:
            found.append(f'wsd_decay={self.wsd_decay}: must be above 0 and at most 1')
        return found

    def problems(self):
        """What contradicts itself, a line each."""
        found = super().problems() + rotary_problems(self)
        if self.checkpoint != 'latest' and self.init_from == 'scratch':
            found.append(f'checkpoint={self.checkpoint} with init_from=scratch, which starts anew: '
                         'going back takes --init_from=resume')
        if self.eval_tasks != TrainConfig.eval_tasks and not self.eval_tasks_interval:
            found.append(f'eval_tasks={self.eval_tasks} never run: say every how many iterations '
                         'with eval_tasks_interval')
        if self.document_start not in ('auto', -1) and not self.document_attention:
            found.append(f'document_start={self.document_start} takes document_attention=True')
        if self.patience and self.overfit_batches:
            found.append(f'patience={self.patience} watches the validation loss, which '
                         f'overfit_batches={self.overfit_batches} lets rise: take one of them')
        if self.decay_lr and self.lr_schedule != 'constant' and self.min_lr > self.learning_rate:
            found.append(f'min_lr={self.min_lr} is above learning_rate={self.learning_rate}')
        if self.decay_lr and self.warmup_iters > self.lr_decay_iters:
            found.append(f'warmup_iters={self.warmup_iters} is more than '
                         f'lr_decay_iters={self.lr_decay_iters}')
        return found + self.batch_problems()

    def batch_problems(self):
        """Why the tokens of a step cannot be shared out among micro-batches and processes."""
        found = []
        auto = self.batch_size == 'auto'
        micro = self.block_size * (1 if auto else self.batch_size)
        world = self.world_size()
        if self.fsdp_group and world % self.fsdp_group:
            found.append(f'fsdp_group={self.fsdp_group} does not divide the number of processes, '
                         f'{world}, that torchrun started')
        if self.fsdp_group and self.parallel == 'ddp':
            found.append(f'fsdp_group={self.fsdp_group} takes parallel=fsdp')
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
    def only_looks(self):
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
