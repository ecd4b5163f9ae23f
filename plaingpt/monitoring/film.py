"""The film of a run: snapshots of its predictions, attention maps and samples, on a log scale.

A snapshot is a line of film.jsonl: the loss of each token of a validation passage, with the most
likely tokens at its position; the attention weights, (L, H, T, T) bytes in base64, where 255 is 1;
and a sample. plot.py --film makes a page of them.
"""

import base64
from pathlib import Path

import numpy as np
import torch

from plaingpt.core.loss import token_losses
from plaingpt.monitoring.health import ActivationRecorder, attention_logits
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.files import append_line
from plaingpt.system.formatting import finite, one_line

MAX_SNAPSHOTS = 24
PASSAGE_TOKENS = 96  # length of the validation passage
MAP_TOKENS = 40  # tokens of the passage in the attention maps
TOP_K = 5  # most likely tokens to record per position
SAMPLE_TOKENS = 30  # length of a sample


class Film:
    """Records snapshots of a train.Run's model.

    sampler: a Sampler, which writes the samples"""

    def __init__(self, run, sampler):
        self.run, self.model = run, run.model
        self.sampler = sampler
        self.path = Path(run.config.out_dir, 'film.jsonl')
        self.tokenizer = sampler.tokenizer
        starts = run.val_data.eval_batches(run.val_data.world_size)[0]
        self.idx = run.val_data.eval_batch(starts)[0][:1, :PASSAGE_TOKENS]  # (1, T)
        steps = np.geomspace(1, max(1, run.config.max_iters), MAX_SNAPSHOTS - 1).round().astype(int)
        recorded = {row['iter'] for row in read_rows(self.path)}  # before a resume
        self.due_iters = {0, *steps.tolist()} - recorded
        # in a timed run: fractions of its time
        self.due_fractions = np.geomspace(1e-3, 0.95, MAX_SNAPSHOTS - 1).tolist()

    def is_due(self, iter_num, fraction_done):
        """Whether to record a snapshot after update `iter_num`. fraction_done: of the run"""
        if not self.run.config.minutes or iter_num == 0:
            return iter_num in self.due_iters
        passed = [fraction for fraction in self.due_fractions if fraction <= fraction_done]
        del self.due_fractions[:len(passed)]
        return bool(passed)

    def record(self, iter_num):
        """Write a snapshot to film.jsonl. If that fails, e.g. because of a change in model.py, the
        film ends and training continues."""
        self.due_iters.discard(iter_num)
        self.model.eval()
        try:
            row = self.snapshot()
        except Exception as e:
            self.run.log.print(f'warning: stopped recording the film: {one_line(e)}')
            self.due_iters.clear()
            self.due_fractions.clear()
        else:
            append_line(self.path, {'iter': iter_num, **row})
        self.model.train()

    @torch.no_grad()
    def snapshot(self):
        """The {key: value} of a row of film.jsonl."""
        with ActivationRecorder(self.model) as recorder, self.run.step.autocast:
            logits = self.model(self.idx)[0][0, :-1].float()  # (T - 1, V)
        ids = self.idx[0].tolist()
        losses = token_losses(self.model, logits, self.idx[0, 1:])
        passage = [(self.token_text(ids[0]), None, ())]  # nothing predicts the first token
        for i, loss, top_k in zip(ids[1:], losses.tolist(), self.top_k(logits), strict=True):
            passage.append((self.token_text(i), rounded(loss), top_k))
        row = {'loss': rounded(losses.mean()), 'passages': [passage],
               'sample': self.sampler.sample(self.model, SAMPLE_TOKENS)}
        maps = []  # of each layer
        for _, args, kwargs in recorder.attention:
            heads = []
            for h in range(self.model.config.n_head):
                scores = attention_logits(0, h, *args, **kwargs)[:MAP_TOKENS, :MAP_TOKENS]
                heads.append(scores.softmax(dim=-1))
            maps.append(torch.stack(heads))
        if maps:
            maps = (255 * torch.stack(maps)).round().byte().cpu().numpy()  # (L, H, n, n)
            row['maps'] = base64.b64encode(maps.tobytes()).decode()
            row['maps_shape'] = maps.shape
        return row

    def top_k(self, logits):
        """The most likely tokens for each row of logits (T, V): [(token, probability), …]."""
        probs, ids = logits.softmax(dim=-1).topk(min(TOP_K, logits.size(-1)))  # (T, k)
        rows = []
        for row_ids, row_probs in zip(ids.tolist(), probs.tolist(), strict=True):
            rows.append([(self.token_text(i), rounded(prob))
                         for i, prob in zip(row_ids, row_probs, strict=True)])
        return rows

    def token_text(self, i):
        r"""A token as text; bytes that are not UTF-8 on their own are shown as \xe2."""
        return self.tokenizer.decode_bytes([i]).decode('utf-8', 'backslashreplace') \
            or '<|endoftext|>'


def rounded(x):
    """Round x for film.jsonl; None if it is not finite."""
    return finite(round(float(x), 3))
