"""Measure how good a model is.

    python evaluate.py out                                             # its validation split
    python evaluate.py out --split=test
    python evaluate.py out --tasks=text --data=book.txt
    python evaluate.py --init_from=gpt2 --tasks=hellaswag,lambada_openai
    torchrun --nproc_per_node=8 evaluate.py out --tasks=val,hellaswag --output=scores.json

Tasks: val, test and train are the splits of a dataset and text is a file, scored as a whole by
loss, perplexity and bits per byte; of conversations, what the assistant says is scored. All others
are those of lm-evaluation-harness, package lm_eval.
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.checks.model_checks import check_future
from plaingpt.data.batches import fits_in_ram
from plaingpt.data.dataset import open_named
from plaingpt.data.tokenizers import IdsTokenizer, token_bytes, words_of
from plaingpt.inference import lm_eval_model, scoring
from plaingpt.system.devices import autocast, choose_device, choose_dtype
from plaingpt.system.distributed import gloo_group, launched_world, print0, process_group
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import write_json
from plaingpt.system.streams import require_stdout, status
from plaingpt.training.open_weights import ModelChoice, load

SPLITS = ('val', 'test', 'train')
OURS = (*SPLITS, 'text')


@dataclass
class EvaluateConfig(ModelChoice):
    # tasks
    tasks: str = 'val'  # val, test, train, text, or those of lm_eval; several with commas
    split: Literal['', 'val', 'test', 'train'] = ''  # this task alone
    dataset: str = ''  # for val, test and train: as in training; empty: that of the run
    data: str = ''  # file of the task text
    # tasks of lm-evaluation-harness, by its package lm_eval
    limit: Annotated[int, 'at least 0'] = 0  # questions of each to ask; 0 for all
    include_path: str = ''  # folder with tasks of your own for it, as .yaml files
    num_fewshot: Annotated[int, 'at least -1'] = -1  # examples in a prompt; -1: what the task says
    # system
    batch_size: Annotated[int, 'at least 1'] = 8  # sequences at a time; changes the speed alone
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'  # precision of matmuls
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # between processes
    output: str = ''  # write the scores to this .json

    def problems(self):
        tasks = self.names()
        found = [] if all(tasks) else [f'tasks={self.tasks}: a name is empty']
        if self.split and self.tasks != 'val':
            found.append(f'split={self.split} and tasks={self.tasks} cannot go together: name the '
                         'split among the tasks')
        if 'text' in tasks and not self.data:
            found.append('tasks=text: name the file with --data=FILE')
        if self.output and not Path(self.output).parent.is_dir():
            found.append(f'output={self.output}: its folder is not there')
        if self.output and os.path.lexists(self.output):
            found.append(f'output={self.output} exists already: name a new file')
        if (self.include_path or self.num_fewshot >= 0) and set(tasks) <= set(OURS):
            found.append('include_path and num_fewshot go with tasks of lm_eval: name them among '
                         'the tasks')
        if self.data and 'text' not in tasks:
            found.append(f'data={self.data} goes with tasks=text')
        return found

    def names(self):
        """The tasks that are asked for."""
        return [self.split] if self.split else self.tasks.split(',')


def score(task, config, model, tokenizer, state, context, group):
    """→ ({name of a score: value}, lines that say the same)."""
    if task == 'text':
        stream = scoring.TextStream(config.data, tokenizer)
    else:
        name = config.dataset or state.get('config', {}).get('dataset')
        if not name:
            raise UserError(f'tasks={task}: name a prepared dataset with --dataset=NAME')
        own_ids = tokenizer.vocab_size if isinstance(tokenizer, IdsTokenizer) else 0
        dataset = open_named(name, own_ids)
        text_tokenizer = getattr(tokenizer, 'base', tokenizer)  # of a model tuned on conversations
        known = [words_of(each.to_json()) for each in (tokenizer, text_tokenizer)]
        if words_of(dataset.tokenizer_json()) not in known:
            raise UserError(f'{dataset.folder} was prepared with another tokenizer than the '
                            "model's: name another --dataset")
        return score_split(task, dataset, model, config.batch_size, context, group)
    scores = scoring.score_stream(model, stream, token_bytes(tokenizer), config.batch_size,
                                  context, config.data, group)
    return scores, f'{config.data}: {scoring.quote_text(scores)}'


def score_split(split, dataset, model, batch_size, context, group):
    """`score` of a split; of a mixture that of each corpus, and of them all by their shares."""
    scores, lines = {}, []
    for name, each, _ in dataset.parts:
        in_ram = fits_in_ram([each.folder], launched_world().local_size)  # which verifies it
        stream, label = each.split(split, in_ram), f'{split} of {each.folder}'
        scores[name] = scoring.score_stream(model, stream, each.token_bytes(split), batch_size,
                                            context, label, group)
        whose = ' of the assistant' * each.has_mask()
        lines.append(f'{label}: {scoring.quote_text(scores[name], whose)}')
    if len(scores) == 1:
        return scores[name], lines[0]
    mean = scoring.mean_scores(list(scores.values()), [part.weight for part in dataset.parts])
    lines.append(f'{split} of {dataset.folder}: {scoring.quote_text(mean)}')
    return {**mean, 'corpora': scores}, '\n'.join(lines)


def main(argv):
    config = load_config(EvaluateConfig, argv, __doc__, positional='out_dir')
    if not config.output:
        require_stdout()
    world = launched_world()
    device, _ = choose_device(config.device, world.local_rank)
    model, tokenizer, weights = load(config)
    source, state = weights.source, weights.state
    model.to(device)
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    print0(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype} | '
           f'processes {world.size}')
    check_future(model, autocast(device, dtype))
    if theirs := ','.join(task for task in config.names() if task not in OURS):
        tasks = lm_eval_model.load_tasks(theirs, config.include_path,
                                         None if config.num_fewshot < 0 else config.num_fewshot)
    results = {}
    with process_group(world, device, config.backend):
        group = gloo_group()
        for task in filter(OURS.__contains__, config.names()):
            with status.doing(f'scoring {task}'):
                results[task], line = score(task, config, model, tokenizer, state,
                                            autocast(device, dtype), group)
            print0(line)
        if theirs:
            lm = lm_eval_model.lm_eval_model(model, tokenizer, config.batch_size,
                                             autocast(device, dtype), group)
            found = lm_eval_model.run_tasks(lm, tasks, config.limit)
            results |= found
            for task, scores in found.items():
                print0(f'{task}: {lm_eval_model.quote_scores(scores)}')
    if config.output and world.is_main:
        try:
            write_json(config.output, {
                'model': source, 'parameters': model.num_parameters(), 'dtype': dtype,
                'iter_num': state.get('iter_num'), 'results': results})
        except OSError as e:
            raise UserError(f'output={config.output}: {e.strerror}') from None


if __name__ == '__main__':
    run_script(main)
