"""Measure how good a model is.

    python evaluate.py out                                             # its validation split
    python evaluate.py out --tasks=text --data=book.txt
    python evaluate.py --init_from=gpt2 --tasks=hellaswag,lambada_openai
    torchrun --nproc_per_node=8 evaluate.py out --tasks=val,hellaswag --output=scores.json

Tasks: val and train are the splits of a dataset and text is a file, scored as a whole by loss,
perplexity and bits per byte; of conversations, what the assistant says is scored. All others are
those of lm-evaluation-harness, package lm_eval, or .yaml files of tasks for it.
"""

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from configurator import load_config
from plaingpt.checks.model_checks import attention_is_causal, check_length, small_model
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import open_named
from plaingpt.data.overlap import share_trained_on, windows_of
from plaingpt.data.text_files import read_text
from plaingpt.data.tokenizers import IdsTokenizer, token_bytes, words_of
from plaingpt.inference import lm_eval_model
from plaingpt.system.devices import autocast, choose_device, choose_dtype
from plaingpt.system.distributed import gloo_group, launched_world, print0
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import write_json
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.loss import chunked_cross_entropy
from plaingpt.training.open_weights import ModelChoice, load
from plaingpt.training.start import trained_on

OURS = ('val', 'train', 'text')


@dataclass
class EvaluateConfig(ModelChoice):
    # tasks
    tasks: str = 'val'  # val, train, text, or those of lm_eval; several with commas
    dataset: str = ''  # of val and train, as in training; empty: the run's
    data: str = ''  # file of the task text
    limit: int = 0  # questions of each task of lm_eval; 0 for all
    # system
    batch_size: int = 8  # sequences at a time; changes the speed alone
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'  # precision of matmuls
    output: str = ''  # write the scores to this .json

    above_0 = ('batch_size',)
    at_least_0 = ('limit',)

    def conflicts(self):
        found = [] if self.tasks else ['tasks is empty: say what to score, such as val']
        if ('text' in self.tasks.split(',')) != bool(self.data):
            found.append('tasks=text goes with --data=FILE, the file to score')
        if self.output and not Path(self.output).parent.is_dir():
            found.append(f'output={self.output}: its folder is not there')
        if self.output and os.path.lexists(self.output):
            found.append(f'output={self.output} exists already: name a new file')
        return found


class TextStream:
    """A text file as a token stream. If the tokenizer has an end-of-text token, it stands in front,
    so that the first token of the text is scored too."""

    loss_mask = None  # all of it is scored

    def __init__(self, path, tokenizer):
        start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        try:
            self.ids = np.concatenate([start, tokenizer.encode(read_text(path))]).astype(np.int64)
        except UserError as e:
            raise UserError(f'{path}: {e}') from None
        if len(self.ids) < 2:
            raise UserError(f'{path}: too short to score anything')

    def __len__(self):
        return len(self.ids)

    def sequences(self, starts, length):
        return np.stack([self.ids[start:start + length] for start in starts])


class WholeLoader(BatchLoader):
    """Reads each token of a stream once as a target. Where the end is shorter than a sequence, the
    last one reads tokens before it too, which are no targets again."""

    def tile(self):
        super().tile()
        targets = len(self.stream) - 1
        self.num_eval_sequences = math.ceil(targets / self.block_size)
        self.last = targets - self.block_size  # where the last sequence begins
        self.repeated = self.num_eval_sequences * self.block_size - targets

    def eval_starts(self, places, n):
        return np.minimum(places * self.block_size, self.last)

    def _on_host(self, starts):
        idx, targets = super()._on_host(starts)
        targets = targets.clone()  # it may share memory with idx
        targets[starts == self.last, :self.repeated] = -1
        return idx, targets

    def mean_target(self, values, n):
        starts = range(1, len(self.stream), self.block_size)
        lengths = [min(self.block_size, len(self.stream) - start) for start in starts]
        total = sum(values[self.stream.sequences([start], length)].sum()
                    for start, length in zip(starts, lengths, strict=True))
        return float(total / sum(lengths))


def loaders(task, config, model, tokenizer, state, **settings):
    """Yield (name of a corpus, what is scored, its loader, UTF-8 bytes of each token or None) of
    val, train or text; a mixture has several. settings: of BatchLoader"""
    shape = model.config.block_size, config.batch_size
    if task == 'text':
        stream = TextStream(config.data, tokenizer)
        length = min(model.config.block_size, len(stream) - 1)
        yield '', config.data, WholeLoader(stream, length, config.batch_size, **settings), \
            token_bytes(tokenizer)
        return
    name = config.dataset or state.get('config', {}).get('dataset')
    if not name:
        raise UserError(f'tasks={task}: name a prepared dataset with --dataset=NAME')
    own_ids = tokenizer.vocab_size if isinstance(tokenizer, IdsTokenizer) else 0
    dataset = open_named(name, own_ids)
    text_tokenizer = getattr(tokenizer, 'base', tokenizer)  # a model of conversations has it inside
    known = [words_of(each.to_json()) for each in (tokenizer, text_tokenizer)]
    if words_of(dataset.tokenizer_json()) not in known:
        raise UserError(f"{dataset.folder} was prepared with another tokenizer than the model's: "
                        'name another --dataset')
    for name, each, _ in dataset.parts:
        whose = ', the answers' if each.has_mask() else ''
        loader = each.loader(task, *shape, **settings)
        if not each.has_mask():
            loader = WholeLoader(loader.stream, *shape, **settings)
        yield name, f'{task} of {each.folder}{whose}', loader, each.token_bytes(task)


def compare_with_training(task, stream, config, weights):
    """Print how much of a text the weights were trained on → {'in_train': the share}; {} where that
    is not known, and for the data of the run itself, whose splits prepare.py has compared."""
    if config.tokenizer != 'auto':
        return {}
    own = weights.state.get('config', {}).get('dataset')
    if task != 'text' and config.dataset in ('', own) \
            and open_named(own).identity('train') == weights.state['data']:
        return {}
    share = share_trained_on(*windows_of(stream), trained_on(weights))
    if share is None:
        return {}
    print0(f'  {100 * share:.3g}% of this text was in the training text of {weights.source}')
    return {'in_train': share}


class SequenceLosses(torch.nn.Module):
    """A GPT as mean_loss calls it, which returns the loss of each sequence."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, idx, targets):
        gpt, x = self.gpt, self.gpt.hidden(idx)  # (B, T, C)
        return None, torch.stack([
            chunked_cross_entropy(x_i, gpt.lm_head.weight, gpt.config.vocab_size, targets_i)
            for x_i, targets_i in zip(x, targets, strict=True)])


def score(model, label, loader, sizes, context):
    """Print the loss of all sequences → {name of a score: value}. loader, sizes: of loaders()"""
    share = math.ceil(loader.num_eval_sequences / loader.world_size)
    loader.batch_size = min(loader.batch_size, share)  # a batch is padded to its size
    loss, error = mean_loss(SequenceLosses(model), loader, loader.num_eval_sequences, context,
                            label=label)
    bits = None
    if sizes is not None:
        bits = loss / math.log(2) / loader.mean_target(sizes, loader.num_eval_sequences)
    perplexity = math.exp(min(loss, 700))
    stderr = '' if error is None else f' ± {error:.4f}'
    print0(f'{label}: loss {loss:.4f}{stderr} nats a token, perplexity {perplexity:.4g}'
           + (f', {bits:.4f} bits/byte' if bits else ''))
    return {'loss': loss, 'loss_stderr': error, 'perplexity': perplexity, 'bits_per_byte': bits}


def check_future(model, context):
    """Raise UserError where a network like the one to be scored sees later tokens."""
    device = model.lm_head.weight.device
    with torch.random.fork_rng([device] if device.type == 'cuda' else []):
        small = small_model(replace(model.config, block_size=check_length(model))).to(device)
        run = SimpleNamespace(model=small, step=SimpleNamespace(autocast=context))
        if problem := attention_is_causal(run):
            raise UserError(f'nothing was scored, because {problem}')


def main(argv):
    config = load_config(EvaluateConfig, argv, __doc__, positional='out_dir')
    world = launched_world()
    device, _ = choose_device(config.device, world.local_rank)
    model, tokenizer, weights = load(config)
    model.to(device)
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    context = autocast(device, dtype)
    print0(f'{weights.source} | {model.num_parameters():,} parameters | device {device} | dtype '
           f'{dtype} | processes {world.size}')
    if 'attention_is_causal' not in weights.state.get('config', {}).get('skip_checks', ''):
        check_future(model, context)
    names = config.tasks.split(',')
    theirs = ','.join(name for name in names if name not in OURS)
    tasks = theirs and lm_eval_model.load_tasks(theirs)
    results = {}
    job = nullcontext()
    if world.launched:
        from plaingpt.system.distributed import process_group
        job = process_group(world, device)
    with job:
        for task in filter(OURS.__contains__, names):
            scores = {}
            for name, label, loader, sizes in loaders(
                    task, config, model, tokenizer, weights.state, device=device,
                    rank=world.rank, world_size=world.size):
                scores[name] = score(model, label, loader, sizes, context)
                scores[name] |= compare_with_training(task, loader.stream, config, weights)
            results[task] = scores if len(scores) > 1 else scores['']
        if theirs:
            model.eval()
            found = lm_eval_model.score_tasks(tasks, config.limit, model, tokenizer,
                                              config.batch_size, context, gloo_group())
            for task, scores in found.items():
                results[task] = scores
                print0(f'{task}: {lm_eval_model.quote_scores(scores)}')
    if config.output and world.is_main:
        try:
            write_json(config.output, {
                'model': weights.source, 'parameters': model.num_parameters(), 'dtype': dtype,
                'iter_num': weights.state.get('iter_num'), 'results': results})
        except OSError as e:
            raise UserError(f'output={config.output}: {e.strerror}') from None


if __name__ == '__main__':
    run_script(main)
