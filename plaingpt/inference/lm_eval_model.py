"""Tasks of EleutherAI's lm-evaluation-harness, package lm_eval, on a model of ours.

The harness makes three kinds of requests of a language model (docs/model_guide.md there): the
log-likelihood of an answer, that of a whole text, and a text that is generated.
"""

import functools
import io
import math
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plaingpt.inference.text_generator import Sampling, TextGenerator
from plaingpt.system.distributed import all_gather, launched_world
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import ROOT

CHUNK = 1024  # positions whose logits exist at once


class Requests:
    """Answers the requests of lm_eval with a GPT and its tokenizer.

    context: autocast or none
    group: of distributed.gloo_group, for processes that share the requests; lm_eval takes each
    process for the only one
    before_batch: called by all processes equally often; what it raises ends this
    """

    def __init__(self, model, tokenizer, batch_size, context, group=None,
                 before_batch=lambda: None):
        super().__init__()
        self.gpt, self.encoder, self.batch_size = model, tokenizer, batch_size
        self.context, self.group, self.before_batch = context, group, before_batch
        self.block_size = model.config.block_size

    @property
    def eot_token_id(self):
        """The end-of-text token, which stands before each document."""
        if self.encoder.end_of_text is None:
            raise UserError('lm_eval: this task scores texts from their first token on, and takes '
                            'a tokenizer with an end-of-text token')
        return self.encoder.end_of_text

    def tok_encode(self, string, **kwargs):
        return self.encoder.encode(string).tolist()

    def _loglikelihood_tokens(self, requests, **kwargs):
        """[(texts, ids of the context, ids of the continuation)] → [(log-likelihood of the
        continuation in nats, whether it is the likeliest)], the same on all processes, which share
        the work. A long context loses its beginning; a continuation longer than block_size is
        scored in several rows, from its end on."""
        rows, request_of_row, world = [], [], launched_world()
        for i, (_, before, after) in enumerate(requests):
            ids = np.array([*before, *after], dtype=np.int64)
            for end in range(len(ids), len(before), -self.block_size):
                n = min(self.block_size, end - len(before))
                rows.append((ids[max(0, end - self.block_size - 1):end], n))
                request_of_row.append(i)
        order = np.argsort([-len(ids) for ids, _ in rows], kind='stable')  # less padding
        mine = order[world.rank::world.size]
        scores = np.zeros((len(mine), 2))
        with tqdm(total=len(mine), desc='lm_eval', leave=False,
                  disable=None if world.is_main else True) as bar:
            for first in range(0, math.ceil(len(rows) / world.size), self.batch_size):
                self.before_batch()
                batch = [rows[i] for i in mine[first:first + self.batch_size]]
                if batch:  # another process may have one more
                    scores[first:first + len(batch)] = score_batch(self.gpt, batch, self.context)
                    bar.update(len(batch))
        found = [(0.0, True)] * len(requests)  # as of an empty continuation
        for rank, part in enumerate(all_gather(scores.tolist(), self.group)):
            for row, (logp, likeliest) in zip(order[rank::world.size], part, strict=True):
                total, all_likeliest = found[request_of_row[row]]
                found[request_of_row[row]] = total + logp, all_likeliest and bool(likeliest)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """→ the log-likelihood of each text as a whole, block_size tokens at a time."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        windows, text_of_window = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.eot_token_id, self.block_size, 1):
                windows.append((None, *make_disjoint_window(pair)))
                text_of_window.append(i)
        sums = [0.0] * len(requests)
        for i, (logp, _) in zip(text_of_window, self._loglikelihood_tokens(windows), strict=True):
            sums[i] += logp
        return sums

    def generate_until(self, requests, disable_tqdm=False):
        """→ a continuation of each text, which ends before the first of its stop strings."""
        generator, texts = TextGenerator(self.gpt, self.encoder, self.context), []
        for i, request in enumerate(requests):
            self.before_batch()
            prompt, options = request.args
            sampling = Sampling(
                max_new_tokens=options.get('max_gen_toks', 256), top_k=options.get('top_k', 0),
                temperature=options.get('temperature', 0) if options.get('do_sample') else 0,
                top_p=options.get('top_p', 1.0))
            room = max(1, self.block_size // 2, self.block_size - sampling.max_new_tokens)
            ids = generator.encode(prompt, 'lm_eval')[-room:]
            texts += generator.generate_texts([ids], [i], sampling, options.get('until') or [])
        return texts


@torch.no_grad()
def score_batch(model, rows, context):
    """Token sequences, a list of (ids, n), of which the last n are scored, each given all before it
    → float64 (len(rows), 2): the sum of their log-probabilities in nats, and 1 if each is the
    likeliest in its place, else 0. Short rows are padded at the end; causal attention keeps the
    padding invisible."""
    device = model.lm_head.weight.device
    width = max(len(ids) for ids, _ in rows) - 1
    idx = torch.zeros(len(rows), width, dtype=torch.long)  # (B, T)
    targets = torch.full_like(idx, -1)
    for i, (ids, n) in enumerate(rows):
        ids = torch.as_tensor(ids)
        idx[i, :len(ids) - 1] = ids[:-1]
        targets[i, len(ids) - 1 - n:len(ids) - 1] = ids[-n:]
    scored = targets != -1
    with context:
        x = model.hidden(idx.to(device))[scored.to(device)]  # (N, C): scored positions only
        logp, likeliest = [], []
        for x_i, t in zip(x.split(CHUNK), targets[scored].to(device).split(CHUNK), strict=True):
            logits = model.logits(x_i).float()  # (n, V)
            logp.append(-F.cross_entropy(logits, t, reduction='none'))
            likeliest.append(logits.argmax(-1) == t)
    parts = (torch.cat(each).cpu().double().split([n for _, n in rows])
             for each in (logp, likeliest))
    return np.array([[logps.sum(), firsts.min()] for logps, firsts in zip(*parts, strict=True)])


@functools.cache  # its index of all tasks takes seconds, and training asks twice
def load_tasks(names):
    """'hellaswag,lambada_openai', or .yaml files of tasks → these tasks of lm_eval with their data,
    for score_tasks. Raises UserError."""
    # lm_eval imports Hugging Face's `evaluate`, and our command of that name stands before it.
    with mock.patch('sys.path', [path for path in sys.path if Path(path).resolve() != ROOT]), \
            needs('lm_eval', f'{names}: a task other than val, test, train and text'):
        from lm_eval.tasks import TaskManager

        import_module('evaluate')
    try:
        loaded = TaskManager().load(names.split(','))
    except Exception as e:  # an unknown name, the hub, datasets, or a task's own code
        raise UserError(f'{names}: lm_eval cannot load them: {" ".join(str(e).split())}; its tasks '
                        'are listed by lm_eval ls tasks') from None
    for task in loaded['tasks'].values():  # as its simple_evaluate does
        task.set_config('num_fewshot', task.get_config('num_fewshot') or 0)
        task.set_fewshot_seed(1234)
    return loaded


def score_tasks(tasks, limit, *arguments):
    """→ {task: {name of a score: value}} of a model. tasks: of load_tasks; limit: questions of
    each, 0 for all; arguments: of Requests. Random numbers of the process stay as they are."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate

    class LmEvalModel(Requests, TemplateLM):
        """Encodes pairs of texts with tok_encode and gives them to _loglikelihood_tokens."""

    lm = LmEvalModel(*arguments)
    # evaluate() prints, and its pool of processes would copy this process with its open files.
    with redirect_stdout(io.StringIO()), mock.patch.dict(os.environ, DISABLE_MULTIPROC='1'):
        found = evaluate(lm, tasks, limit=limit or None, log_samples=False, bootstrap_iters=1000)
    results = {}
    for task, scores in found['results'].items():
        results[task] = {key.removesuffix(',none'): value for key, value in scores.items()
                         if isinstance(value, (int, float)) and key != 'sample_len'}
        results[task]['questions'] = found['n-samples'].get(task, {}).get('effective', 0)
    return results


def quote_scores(scores):
    """→ the scores of a task, as one line."""
    parts = []
    for key, value in scores.items():
        name, *kind = key.split(',')
        stderr = scores.get(','.join([f'{name}_stderr', *kind]))
        if key != 'questions' and not name.endswith('_stderr'):
            parts.append(f'{key} {value:.4g}' + (f' ± {stderr:.2g}' if stderr else ''))
    return ', '.join(parts) + f' ({scores["questions"]:,} questions)'
