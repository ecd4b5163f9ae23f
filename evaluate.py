"""Measure how good a model is.

    python evaluate.py out                                             # its validation split
    python evaluate.py out --split=test
    python evaluate.py out --tasks=text --data=book.txt
    python evaluate.py --init_from=gpt2 --tasks=hellaswag,lambada
    python evaluate.py out --lm_eval=arc_easy,piqa
    torchrun --nproc_per_node=8 evaluate.py out --tasks=val,hellaswag --output=scores.json

Tasks: val, test and train are the splits of a dataset and text is a file, scored as a whole by
loss, perplexity and bits per byte; of conversations, what the assistant says is scored. hellaswag
and lambada are benchmarks, scored as by lm-evaluation-harness; lm_eval=… runs tasks of that itself.
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
from plaingpt.data.tokenizers import token_bytes, words_of
from plaingpt.inference import lm_eval_model, scoring
from plaingpt.system.devices import autocast, choose_device, choose_dtype
from plaingpt.system.distributed import gloo_group, launched_world, print0, process_group
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import write_json
from plaingpt.system.streams import require_stdout, status
from plaingpt.training import model_choice

SPLITS = ('val', 'test', 'train')
TASKS = (*SPLITS, 'text', *scoring.BENCHMARKS)


@dataclass
class EvaluateConfig(model_choice.ModelChoice):
    # tasks
    tasks: str = 'val'  # val, test, train, text, hellaswag, lambada; several with commas
    split: Literal['', 'val', 'test', 'train'] = ''  # this task alone
    dataset: str = ''  # for val, test and train: as in training; empty: that of the run
    data: str = ''  # file of a single task: a text, or a benchmark's .jsonl
    limit: Annotated[int, 'at least 0'] = 0  # questions of a benchmark or task to ask; 0 for all
    # tasks of lm-evaluation-harness, by its package lm_eval
    lm_eval: str = ''  # its tasks, several with commas, instead of val
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
        found = [f'tasks={self.tasks}: {task!r} is none of {", ".join(TASKS)}'
                 for task in tasks if task not in TASKS]
        if self.split and self.tasks != 'val':
            found.append(f'split={self.split} and tasks={self.tasks} cannot go together: name the '
                         'split among the tasks')
        if 'text' in tasks and not self.data:
            found.append('tasks=text: name the file with --data=FILE')
        if self.output and not Path(self.output).parent.is_dir():
            found.append(f'output={self.output}: its folder is not there')
        if self.output and os.path.lexists(self.output):
            found.append(f'output={self.output} exists already: name a new file')
        if (self.include_path or self.num_fewshot >= 0) and not self.lm_eval:
            found.append('include_path and num_fewshot go with lm_eval: name its tasks')
        if self.data and (len(tasks) != 1 or tasks[0] in SPLITS):
            found.append(f'data={self.data} goes with one task: text, '
                         f'{" or ".join(scoring.BENCHMARKS)}')
        return found

    def names(self):
        """The tasks that are asked for."""
        if self.split:
            return [self.split]
        return [] if self.lm_eval and self.tasks == 'val' else self.tasks.split(',')


def score(task, config, model, tokenizer, state, context, group):
    """→ ({name of a score: value}, lines that say the same)."""
    if task in scoring.BENCHMARKS:
        benchmark = scoring.Benchmark(task, tokenizer, model.config.block_size, config.data,
                                      config.limit)
        scores = benchmark.score(model, config.batch_size, context, group)
        return scores, f'{task}: {scoring.quote_scores(scores)}'
    if task == 'text':
        stream = scoring.TextStream(config.data, tokenizer)
    else:
        name = config.dataset or state.get('config', {}).get('dataset')
        if not name:
            raise UserError(f'tasks={task}: name a prepared dataset with --dataset=NAME')
        dataset = open_named(name)
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


def score_by_lm_eval(config, model, tokenizer, context, group):
    """→ ({task: {name of a score: value}}, lines that say the same), of the tasks of lm_eval."""
    if config.include_path and not Path(config.include_path).is_dir():
        raise UserError(f'include_path={config.include_path}: no such folder')
    lm = lm_eval_model.lm_eval_model(model, tokenizer, config.batch_size, context, group)
    results = lm_eval_model.run_tasks(
        lm, config.lm_eval.split(','), config.include_path, config.limit,
        None if config.num_fewshot < 0 else config.num_fewshot)
    return results, '\n'.join(f'{task}: {scoring.quote_scores(scores)}'
                              for task, scores in results.items())


def main(argv):
    config = load_config(EvaluateConfig, argv, __doc__, positional='out_dir')
    if not config.output:
        require_stdout()
    world = launched_world()
    device, _ = choose_device(config.device, world.local_rank)
    model, tokenizer, source, state = model_choice.load(
        config.init_from, config.out_dir, config.checkpoint, config.tokenizer)
    model.to(device)
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    print0(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype} | '
           f'processes {world.size}')
    check_future(model, autocast(device, dtype))
    results = {}
    with process_group(world, device, config.backend):
        group = gloo_group()
        for task in config.names():
            with status.doing(f'scoring {task}'):
                results[task], line = score(task, config, model, tokenizer, state,
                                            autocast(device, dtype), group)
            print0(line)
        if config.lm_eval:
            found, lines = score_by_lm_eval(config, model, tokenizer, autocast(device, dtype),
                                            group)
            results |= found
            print0(lines)
    if config.output and world.is_main:
        try:
            write_json(config.output, {
                'model': source, 'parameters': model.num_parameters(), 'dtype': dtype,
                'iter_num': state.get('iter_num'), 'results': results})
        except OSError as e:
            raise UserError(f'output={config.output}: {e.strerror}') from None


if __name__ == '__main__':
    run_script(main)
