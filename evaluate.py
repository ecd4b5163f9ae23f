"""Evaluate a model: loss on datasets and text files, and tasks of lm-evaluation-harness.

    python evaluate.py out                                             # on its validation split
    python evaluate.py out --tasks=text --data=book.txt
    python evaluate.py --init_from=gpt2 --tasks=hellaswag,lambada_openai
    torchrun --nproc_per_node=8 evaluate.py out --tasks=val,hellaswag --output=scores.json

The tasks val and train score a split of a dataset, and text scores a file: loss, perplexity and
bits per byte over every token (in conversations, over the assistant's messages). All other names
are tasks of lm-evaluation-harness (the package lm_eval) or .yaml files of its tasks.
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
from plaingpt.core.batches import BatchLoader
from plaingpt.core.dataset import open_dataset_spec
from plaingpt.core.evaluation import mean_loss
from plaingpt.core.loss import loss_in_chunks
from plaingpt.data.text_files import read_text
from plaingpt.data.tokenizers import IdsTokenizer, token_bytes, vocabulary_of
from plaingpt.inference import lm_eval_model
from plaingpt.inference.open_weights import ModelChoice, load
from plaingpt.system.devices import autocast, choose_device, choose_dtype
from plaingpt.system.distributed import gloo_group, launched_world, print0, process_group
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import write_json

BUILTIN_TASKS = ('val', 'train', 'text')


@dataclass
class EvaluateConfig(ModelChoice):
    # tasks
    tasks: str = 'val'  # val, train, text or tasks of lm_eval, separated by commas
    dataset: str = ''  # dataset for val and train, as in training; empty: that of the run
    data: str = ''  # text file to score, for tasks=text
    limit: int = 0  # maximum number of questions per lm_eval task; 0: all
    # system
    batch_size: int = 8  # sequences per batch; affects speed only
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'  # precision of matmuls
    output: str = ''  # write the scores to this JSON file

    above_0 = ('batch_size',)
    at_least_0 = ('limit',)

    def conflicts(self):
        conflicts = []
        if not self.tasks:
            conflicts.append('tasks is empty; choose what to score, such as --tasks=val')
        scores_text = 'text' in self.tasks.split(',')
        if scores_text and not self.data:
            conflicts.append('tasks=text: set the file to score with --data=FILE')
        if self.data and not scores_text:
            conflicts.append(f'--data={self.data}: has no effect without --tasks=text')
        if self.limit and not set(self.tasks.split(',')) - {*BUILTIN_TASKS}:
            conflicts.append(f'--limit={self.limit}: has no effect without a task of lm_eval')
        if self.output and not Path(self.output).parent.is_dir():
            conflicts.append(f'output={self.output}: its folder does not exist')
        if self.output and os.path.lexists(self.output):
            conflicts.append(f'output={self.output} already exists; choose another --output')
        return conflicts


class TextStream:
    """A text file as a token stream. It starts with the end-of-text token, if the tokenizer has
    one, so that the first token of the text is scored too."""

    def __init__(self, path, tokenizer):
        start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        text = read_text(path)
        try:
            self.ids = np.concatenate([start, tokenizer.encode(text)]).astype(np.int64)
        except UserError as e:
            raise UserError(f'{path}: {e}') from None
        if len(self.ids) < 2:
            raise UserError(f'{path}: too short to score (fewer than 2 tokens)')

    def __len__(self):
        return len(self.ids)

    def sequences(self, starts, length):
        return np.stack([self.ids[start:start + length] for start in starts])


class WholeLoader(BatchLoader):
    """Reads every token of a stream exactly once as a target. The last sequence is a full one that
    overlaps the one before it; targets that were scored already are masked."""

    def tile(self):
        super().tile()
        n_targets = len(self.stream) - 1
        self.num_eval_sequences = math.ceil(n_targets / self.block_size)
        self.last_start = n_targets - self.block_size
        self.overlap = self.num_eval_sequences * self.block_size - n_targets

    def eval_starts(self, places, n):
        return np.minimum(places * self.block_size, self.last_start)

    def _on_host(self, starts):
        idx, targets = super()._on_host(starts)
        targets = targets.clone()  # it may share memory with idx
        targets[starts == self.last_start, :self.overlap] = -1
        return idx, targets


def scored_texts(task, config, loaded, settings):
    """Yield what val, train or text scores, of a mixture for each corpus: (its name, else ''; a
    label; a BatchLoader; the UTF-8 bytes of each token or None).

    loaded: (model, tokenizer, weights); settings: of the BatchLoaders"""
    model, tokenizer, weights = loaded
    sizes = model.config.block_size, config.batch_size
    if task == 'text':
        stream = TextStream(config.data, tokenizer)
        length = min(model.config.block_size, len(stream) - 1)
        loader = WholeLoader(stream, length, config.batch_size, **settings)
        yield '', config.data, loader, token_bytes(tokenizer)
        return
    spec = config.dataset or weights.state.get('config', {}).get('dataset')
    if not spec:
        raise UserError(f'tasks={task}: choose a prepared dataset with --dataset=NAME')
    own_ids = tokenizer.vocab_size if isinstance(tokenizer, IdsTokenizer) else 0
    dataset = open_dataset_spec(spec, own_ids)
    base = getattr(tokenizer, 'base', tokenizer)  # the tokenizer inside a chat tokenizer
    if vocabulary_of(dataset.tokenizer_json()) not in (
            vocabulary_of(tokenizer.to_json()), vocabulary_of(base.to_json())):
        raise UserError(f'{dataset.folder} was prepared with a different tokenizer than the '
                        "model's; choose another --dataset")
    pack = weights.state.get('config', {}).get('pack', 'stream')
    for name, part, _ in dataset.components:
        label = f'{task} of {part.folder}'
        has_documents = part.is_by_line() or part.document_start is not None
        part_pack = pack if has_documents else 'stream'
        loader = part.loader(task, *sizes, pack=part_pack, **settings)
        if part.has_mask():
            label += ", the assistant's messages"
        elif part_pack == 'stream':
            loader = WholeLoader(loader.stream, *sizes, **settings)
        yield name, label, loader, part.token_bytes(task)


class SequenceLosses(torch.nn.Module):
    """Wraps a GPT for mean_loss: returns the loss of each sequence of a batch."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, idx, targets):
        x = self.gpt.hidden(idx)  # (B, T, C)
        totals = [loss_in_chunks(self.gpt, x_i, targets_i)
                  for x_i, targets_i in zip(x, targets, strict=True)]
        counts = (targets != -1).sum(dim=1).clamp(min=1)
        return None, torch.stack(totals) / counts


def score(model, label, loader, bytes_by_id, context):
    """Print the loss over the sequences of a loader → {name of a score: value}."""
    n = loader.num_eval_sequences
    # batches are padded to their size
    loader.batch_size = min(loader.batch_size, math.ceil(n / loader.world_size))
    loss, stderr = mean_loss(SequenceLosses(model), loader, n, context, label=label)
    perplexity = math.exp(min(loss, 700))
    line = f'{label}: loss {loss:.4f}'
    if stderr is not None:
        line += f' ± {stderr:.4f}'
    line += f' nats per token, perplexity {perplexity:.4g}'
    bits = None
    if bytes_by_id is not None:
        bits = loss / math.log(2) / loader.mean_target(bytes_by_id, n)
        line += f', {bits:.4f} bits/byte'
    print0(line)
    return {'loss': loss, 'loss_stderr': stderr, 'perplexity': perplexity, 'bits_per_byte': bits}


def check_attention_is_causal(model, context):
    """Raise UserError if a small model with the same flags attends to later tokens."""
    device = model.lm_head.weight.device
    with torch.random.fork_rng([device] if device.type == 'cuda' else []):
        small = small_model(replace(model.config, block_size=check_length(model))).to(device)
        run = SimpleNamespace(model=small, step=SimpleNamespace(autocast=context))
        problem = attention_is_causal(run)
    if problem:
        raise UserError(f'cannot evaluate: {problem}')


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
        check_attention_is_causal(model, context)
    names = config.tasks.split(',')
    lm_eval_names = [name for name in names if name and name not in BUILTIN_TASKS]
    if lm_eval_names:
        lm_eval_tasks = lm_eval_model.load_tasks(','.join(lm_eval_names))
    results = {}
    settings = dict(device=device, rank=world.rank, world_size=world.size)
    with process_group(world, device) if world.launched else nullcontext():
        for task in [name for name in names if name in BUILTIN_TASKS]:
            texts = scored_texts(task, config, (model, tokenizer, weights), settings)
            scores = {name: score(model, *text, context) for name, *text in texts}
            results[task] = scores if len(scores) > 1 else scores['']
        if lm_eval_names:
            model.eval()
            lm_eval_scores = lm_eval_model.score_tasks(
                lm_eval_tasks, config.limit, model, tokenizer, config.batch_size, context,
                gloo_group())
            for task, scores in lm_eval_scores.items():
                results[task] = scores
                print0(f'{task}: {lm_eval_model.format_scores(scores)}')
    if config.output and world.is_main:
        write_json(config.output, {
            'model': weights.source, 'parameters': model.num_parameters(), 'dtype': dtype,
            'iter_num': weights.state.get('iter_num'), 'results': results})


if __name__ == '__main__':
    run_script(main)
