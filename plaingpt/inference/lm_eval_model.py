"""Tasks of EleutherAI's lm-evaluation-harness (the package lm_eval) on a GPT.

The harness makes three kinds of requests (its docs/model_guide.md): the log-likelihood of a
continuation, the log-likelihood of a whole text, and generation up to a stop string.
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
from plaingpt.system.formatting import count_of

CHUNK = 1024  # positions whose logits are in memory at once


class Requests:
    """Answers the requests of lm_eval with a GPT and its tokenizer.

    context: autocast or nullcontext
    group: a gloo_group() of processes that share the work; lm_eval itself knows of one process only
    before_batch: called equally often in all processes; may raise to stop the evaluation
    """

    def __init__(self, model, tokenizer, batch_size, context, group=None,
                 before_batch=lambda: None):
        super().__init__()
        self.gpt, self.encoder, self.batch_size = model, tokenizer, batch_size
        self.context, self.group, self.before_batch = context, group, before_batch
        self.block_size = model.config.block_size

    @property
    def eot_token_id(self):
        """The end-of-text token, which starts each document."""
        if self.encoder.end_of_text is None:
            raise UserError('lm_eval: this task scores texts from their first token, which needs '
                            'a tokenizer with an end-of-text token')
        return self.encoder.end_of_text

    def tok_encode(self, string, **kwargs):
        return self.encoder.encode(string).tolist()

    def _loglikelihood_tokens(self, requests, **kwargs):
        """[(texts, context ids, continuation ids)] → [(log-likelihood of the continuation in nats,
        whether it is the greedy one)], on all processes, which share the work. A context that is
        too long is truncated on the left; a continuation longer than block_size is split into
        several rows, from its end backward."""
        world = launched_world()
        rows, request_of_row = [], []
        for i, (_, context_ids, continuation_ids) in enumerate(requests):
            ids = np.array([*context_ids, *continuation_ids], dtype=np.int64)
            for end in range(len(ids), len(context_ids), -self.block_size):
                n = min(self.block_size, end - len(context_ids))
                rows.append((ids[max(0, end - self.block_size - 1):end], n))
                request_of_row.append(i)
        order = np.argsort([-len(ids) for ids, _ in rows], kind='stable')  # for less padding
        local_order = order[world.rank::world.size]
        scores = np.zeros((len(local_order), 2))
        with tqdm(total=len(local_order), desc='lm_eval', leave=False,
                  disable=None if world.is_main else True) as bar:
            for first in range(0, math.ceil(len(rows) / world.size), self.batch_size):
                self.before_batch()
                batch = [rows[i] for i in local_order[first:first + self.batch_size]]
                if batch:  # empty if only other processes have one more row
                    scores[first:first + len(batch)] = score_batch(self.gpt, batch, self.context)
                    bar.update(len(batch))
        results = [(0.0, True)] * len(requests)  # of an empty continuation
        for rank, rank_scores in enumerate(all_gather(scores.tolist(), self.group)):
            for row, (logp, is_greedy) in zip(order[rank::world.size], rank_scores, strict=True):
                request = request_of_row[row]
                total, all_greedy = results[request]
                results[request] = (total + logp, all_greedy and bool(is_greedy))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """→ the log-likelihood of each whole text, from disjoint windows of block_size tokens."""
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
        """→ a continuation of each text, up to the first of its stop strings."""
        generator = TextGenerator(self.gpt, self.encoder, self.context)
        texts = []
        for i, request in enumerate(requests):
            self.before_batch()
            prompt, options = request.args
            sampling = Sampling(
                max_new_tokens=options.get('max_gen_toks', 256), temperature=0,
                top_k=options.get('top_k', 0), top_p=options.get('top_p', 1.0))
            if options.get('do_sample'):
                sampling.temperature = options.get('temperature', 0)
            max_prompt_tokens = max(
                1, self.block_size // 2, self.block_size - sampling.max_new_tokens)
            ids = generator.encode(prompt, 'lm_eval')[-max_prompt_tokens:]
            texts += generator.generate_texts([ids], [i], sampling, options.get('until') or [])
        return texts


@torch.no_grad()
def score_batch(model, rows, context):
    """Score the last n tokens of each row (ids, n) → float64 (len(rows), 2): the sum of their
    log-probabilities in nats, and 1 if greedy decoding would give all of them, else 0. Rows are
    right-padded, which causal attention never sees."""
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
        logps, is_greedy = [], []
        for x_i, t in zip(x.split(CHUNK), targets[scored].to(device).split(CHUNK), strict=True):
            logits = model.logits(x_i).float()  # (n, V)
            logps.append(-F.cross_entropy(logits, t, reduction='none'))
            is_greedy.append(logits.argmax(-1) == t)
    lengths = [n for _, n in rows]
    logps = torch.cat(logps).cpu().double().split(lengths)
    is_greedy = torch.cat(is_greedy).cpu().double().split(lengths)
    return np.array([[logp.sum(), greedy.min()]
                     for logp, greedy in zip(logps, is_greedy, strict=True)])


@functools.cache  # indexing all tasks takes seconds, and training calls this twice
def load_tasks(names):
    """'hellaswag,lambada_openai' or .yaml files → lm_eval's tasks and their data, for score_tasks.
    Raises UserError."""
    # lm_eval imports Hugging Face's `evaluate`, which evaluate.py beside train.py would shadow.
    with mock.patch('sys.path', [path for path in sys.path if Path(path).resolve() != ROOT]), \
            needs('lm_eval', f'{names} (not val, train or text, so a task of lm_eval)'):
        from lm_eval.tasks import TaskManager

        import_module('evaluate')
    try:
        loaded = TaskManager().load(names.split(','))
    except Exception as e:  # an unknown name, the hub, datasets, or a task's own code
        raise UserError(f'{names}: lm_eval cannot load them: {" ".join(str(e).split())}; to '
                        'list its tasks, run: lm_eval ls tasks') from None
    for task in loaded['tasks'].values():  # as in lm_eval's simple_evaluate
        task.set_config('num_fewshot', task.get_config('num_fewshot') or 0)
        task.set_fewshot_seed(1234)
    return loaded


def score_tasks(tasks, limit, *arguments):
    """→ {task: {name of a score: value}}. tasks: from load_tasks; limit: maximum number of
    questions per task, 0 for all; arguments: of Requests. Leaves the random state as it is."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate

    class LmEvalModel(Requests, TemplateLM):
        """Encodes pairs of texts with tok_encode and gives them to _loglikelihood_tokens."""

    lm = LmEvalModel(*arguments)
    # evaluate() prints, and its process pool would fork this process with its open files.
    with redirect_stdout(io.StringIO()), mock.patch.dict(os.environ, DISABLE_MULTIPROC='1'):
        output = evaluate(lm, tasks, limit=limit or None, log_samples=False, bootstrap_iters=1000)
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
