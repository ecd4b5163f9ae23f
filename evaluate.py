"""Measure how good a model is.

    python evaluate.py out                                             # its validation split
    python evaluate.py out --tasks=test
    python evaluate.py out --tasks=text --data=book.txt
    python evaluate.py --init_from=gpt2 --tasks=hellaswag,lambada_openai
    torchrun --nproc_per_node=8 evaluate.py out --tasks=val,hellaswag --output=scores.json

Tasks: val, test and train are the splits of a dataset and text is a file, scored as a whole by
loss, perplexity and bits per byte; of conversations, what the assistant says is scored. All others
are those of lm-evaluation-harness, package lm_eval, or .yaml files of tasks for it.
"""

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
from plaingpt.training.open_weights import ModelChoice, load

OURS = ('val', 'test', 'train', 'text')


@dataclass
class EvaluateConfig(ModelChoice):
    # tasks
    tasks: str = 'val'  # val, test, train, text, or those of lm_eval; several with commas
    dataset: str = ''  # of val, test and train, as in training; empty: the run's
    data: str = ''  # file of the task text
    limit: Annotated[int, 'at least 0'] = 0  # questions of each task of lm_eval; 0 for all
    # system
    batch_size: Annotated[int, 'at least 1'] = 8  # sequences at a time; changes the speed alone
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'  # precision of matmuls
    output: str = ''  # write the scores to this .json

    def problems(self):
        found = []
        if ('text' in self.tasks.split(',')) != bool(self.data):
            found.append('tasks=text goes with --data=FILE, the file to score')
        if self.output and not Path(self.output).parent.is_dir():
            found.append(f'output={self.output}: its folder is not there')
        if self.output and os.path.lexists(self.output):
            found.append(f'output={self.output} exists already: name a new file')
        return found


def score(task, config, model, tokenizer, state, how):
    """→ ({name of a score: value}, lines that say the same). how: batch_size, context and group, as
    of scoring.score_stream"""
    if task == 'text':
        stream = scoring.TextStream(config.data, tokenizer)
        scores = scoring.score_stream(model, stream, token_bytes(tokenizer), label=config.data,
                                      **how)
        return scores, f'{config.data}: {scoring.quote_text(scores)}'
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
    scores, lines = {}, []
    for name, each, _ in dataset.parts:  # each corpus of a mixture
        in_ram = fits_in_ram([each.folder], launched_world().local_size)  # reading it verifies it
        label, whose = f'{task} of {each.folder}', ' of the assistant' if each.has_mask() else ''
        scores[name] = scoring.score_stream(model, each.split(task, in_ram),
                                            each.token_bytes(task), label=label, **how)
        lines.append(f'{label}: {scoring.quote_text(scores[name], whose)}')
    return scores if len(scores) > 1 else scores[name], '\n'.join(lines)


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
    check_future(model, context)
    names = config.tasks.split(',')
    theirs = ','.join(name for name in names if name not in OURS)
    tasks = theirs and lm_eval_model.load_tasks(theirs)
    results = {}
    with process_group(world, device, 'auto'):
        how = {'batch_size': config.batch_size, 'context': context, 'group': gloo_group()}
        for task in filter(OURS.__contains__, names):
            results[task], line = score(task, config, model, tokenizer, weights.state, how)
            print0(line)
        if theirs:
            lm = lm_eval_model.lm_eval_model(model, tokenizer, **how)
            for task, scores in lm_eval_model.run_tasks(lm, tasks, config.limit).items():
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
