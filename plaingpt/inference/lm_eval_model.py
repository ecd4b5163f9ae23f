"""Tasks of EleutherAI's lm-evaluation-harness (the package lm_eval) on a GPT."""

import functools
import io
import logging
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from tqdm import tqdm

from plaingpt.inference.generation import check_cache
from plaingpt.inference.hf_architectures import OWN_CODE, READABLE
from plaingpt.inference.hf_export import tokenizer_files, write_files
from plaingpt.system.distributed import all_gather, launched_world
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import count_of

SLICE = 4  # batches of each process between two calls of before_slice


def share(answer, requests, batch_size, group=None, before_slice=lambda: None):
    """Answer `requests` → a list of answers, on all processes of a group, which share the work.

    answer(requests): → answers
    group: a gloo_group(); lm_eval itself runs as a single process
    before_slice: called equally often in all processes; may raise to stop the evaluation
    """
    world = launched_world()
    n = SLICE * batch_size * world.size
    answers = []
    with tqdm(total=len(requests), desc='lm_eval', leave=False,
              disable=None if world.is_main else True) as bar:
        for first in range(0, len(requests), n):
            before_slice()
            part = requests[first:first + n]
            begin, end = (len(part) * rank // world.size for rank in (world.rank, world.rank + 1))
            for rank_answers in all_gather(answer(part[begin:end]), group):
                answers += rank_answers
            bar.update(len(part))
    return answers


class LmEvalModel:
    """What score_tasks() changes in HFLM, lm_eval's class for models of transformers: token ids
    come from our tokenizer, logits from GPT.forward(), and generated text from PlainGPT.

    sharing: group and before_slice of share()"""

    def __init__(self, model, tokenizer, batch_size, *sharing):
        from transformers import AutoTokenizer

        from plaingpt.inference.remote_code import PlainGPT, PlainGPTConfig
        self.encoder, self.sharing = tokenizer, sharing
        config = PlainGPTConfig(**READABLE[OWN_CODE].write_config(model.config),
                                eos_token_id=sorted(tokenizer.stop_ids) or None)
        files = tokenizer_files(tokenizer, model.config.block_size)
        if 'tokenizer.json' not in files:
            raise UserError('lm_eval: needs a tokenizer that tokenizer.json can describe')
        with TemporaryDirectory() as folder:
            write_files(Path(folder), files)
            in_transformers = AutoTokenizer.from_pretrained(folder)
        device = model.lm_head.weight.device.type
        dtype = None
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        # HFLM's logits_cache (in 0.4.13) mixes up requests with the same tokens whose contexts end
        # at different places, as windows of a repetitive text may.
        super().__init__(PlainGPT(config, model), tokenizer=in_transformers, backend='causal',
                         add_bos_token=False, batch_size=batch_size, mixed_precision_dtype=dtype,
                         logits_cache=False)

    def tok_encode(self, string, **kwargs):
        return self.encoder.encode(string).tolist()  # refuses characters that it does not know

    def _model_call(self, inps):
        """(B, T) → the logits (B, T, V) as in training, without a KV cache."""
        with torch.no_grad():
            return self.model.gpt(inps)[0].float()

    def _loglikelihood_tokens(self, requests, **kwargs):
        return self.share(super()._loglikelihood_tokens, requests)

    def generate_until(self, requests, **kwargs):
        check_cache(self.model.gpt)
        return self.share(super().generate_until, requests)

    def share(self, answer, requests):
        return share(partial(answer, disable_tqdm=True), requests, self.batch_size, *self.sharing)


@functools.cache  # indexing all tasks takes seconds, and training calls this twice
def load_tasks(names):
    """'hellaswag,lambada_openai' or .yaml files → lm_eval's tasks and their data, for score_tasks.
    Raises UserError."""
    # lm_eval imports Hugging Face's `evaluate`, which evaluate.py beside train.py would shadow.
    with mock.patch('sys.path', [path for path in sys.path if Path(path).resolve() != ROOT]), \
            needs("'lm_eval[hf]'", f'{names} (not val, train or text, so a task of lm_eval)'):
        from lm_eval.tasks import TaskManager

        import_module('evaluate')
        import_module('lm_eval.models.huggingface')
    try:
        loaded = TaskManager().load(names.split(','))
    except Exception as e:  # an unknown name, the hub, datasets, or a task's own code
        raise UserError(f'{names}: lm_eval cannot load them: {" ".join(str(e).split())}; to '
                        'list its tasks, run: lm_eval ls tasks') from None
    for task in loaded['tasks'].values():  # as in lm_eval's simple_evaluate
        task.set_config('num_fewshot', task.get_config('num_fewshot') or 0)
        task.set_fewshot_seed(1234)
    return loaded


def score_tasks(tasks, limit, model, tokenizer, batch_size, context, *sharing):
    """→ {task: {name of a score: value}}. Leaves the random state as it is.

    tasks: from load_tasks(); limit: maximum number of questions per task, 0 for all
    context: autocast or nullcontext; sharing: group and before_slice of share()
    Raises UserError."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    class PlainHFLM(LmEvalModel, HFLM):
        """A GPT for lm_eval."""

    # HFLM warns that the model was not loaded by it, and of each text that it truncates.
    logging.getLogger('lm_eval.models.huggingface').setLevel(logging.ERROR)

    device = model.lm_head.weight.device
    # evaluate() prints, and its process pool would fork this process with its open files.
    with context, torch.random.fork_rng([device] if device.type == 'cuda' else []), \
            redirect_stdout(io.StringIO()), mock.patch.dict(os.environ, DISABLE_MULTIPROC='1'):
        try:
            output = evaluate(PlainHFLM(model, tokenizer, batch_size, *sharing), tasks,
                              limit=limit or None, log_samples=False, bootstrap_iters=1000)
        except AssertionError as e:  # raised by HFLM, sometimes without a message
            reason = str(e) or 'an answer is longer, or empty'
            raise UserError(f'lm_eval: a task does not fit into block_size='
                            f'{model.config.block_size}: {reason}; leave it out') from None
    results = {}
    for task, scores in output['results'].items():
        results[task] = {key.removesuffix(',none'): value for key, value in scores.items()
                         if isinstance(value, (int, float)) and key != 'sample_len'}
        results[task]['questions'] = output['n-samples'].get(task, {}).get('effective', 0)
    return results


def format_scores(scores):
    """The scores of a task as one line."""
    texts = []
    for key, value in scores.items():
        metric, comma, filter_name = key.partition(',')  # 'acc' or 'acc,FILTER'
        if key == 'questions' or metric.endswith('_stderr'):
            continue
        text = f'{key} {value:.4g}'
        stderr = scores.get(f'{metric}_stderr{comma}{filter_name}')
        if stderr:
            text += f' ± {stderr:.2g}'
        texts.append(text)
    return ', '.join(texts) + f' ({count_of(scores["questions"], "question")})'
