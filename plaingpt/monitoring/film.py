"""The film of a run: snapshots of its predictions, attention maps and samples, on a log scale.

A snapshot is a line of film.jsonl: the loss of each token of a validation passage, with the most
likely tokens at its position; the attention weights, (L, H, T, T) bytes in base64, where 255 is 1,
if attention calls F.scaled_dot_product_attention; and a sample. plot.py --film makes a page of
them.
"""

import base64
from pathlib import Path

import numpy as np
import torch

from plaingpt.core.loss import token_losses
from plaingpt.data.tokenizers import token_text
from plaingpt.monitoring.health import ActivationRecorder, attention_logits
from plaingpt.system.files import append_line
from plaingpt.system.formatting import finite, one_line

MAX_SNAPSHOTS = 24
PASSAGE_TOKENS = 96  # length of the validation passage
MAP_TOKENS = 40  # tokens of the passage in the attention maps
TOP_K = 5  # most likely tokens to record per position
SAMPLE_TOKENS = 30  # length of a sample


class Film:
    """Records snapshots of a Run's model.

    sampler: a Sampler, which writes the samples"""

    def __init__(self, run, sampler):
        self.run, self.model = run, run.model
        self.sampler = sampler
        self.path = Path(run.config.out_dir, 'film.jsonl')
        self.tokenizer = sampler.tokenizer
        starts = run.val_data.eval_batches(run.val_data.world_size)[0]
        self.idx = run.val_data.eval_batch(starts)[0][:1, :PASSAGE_TOKENS]  # (1, T)
        # When to record: iterations, or in a timed run fractions of its time.
        if run.config.minutes:
            times = np.geomspace(1e-3, 0.95, MAX_SNAPSHOTS - 1)
        else:
            times = np.geomspace(1, max(1, run.config.max_iters), MAX_SNAPSHOTS - 1).round()
        self.due = [0, *times.tolist()]
        if run.start.resumed:
            self.is_due(run.progress.iter_num, 0.0)  # drops those that were recorded before
        self.lacks_maps = False

    def is_due(self, iter_num, fraction_done):
        """Whether to record a snapshot after update `iter_num`. fraction_done: of the run"""
        now = fraction_done if self.run.config.minutes else iter_num
        passed = [time for time in self.due if time <= now]
        del self.due[:len(passed)]
        return bool(passed)

    def record(self, iter_num):
        """Write a snapshot to film.jsonl. If that fails, e.g. because of a change in model.py, the
        film ends and training continues."""
        self.model.eval()
        try:
            row = self.snapshot()
        except Exception as e:
            self.run.log.print(f'warning: stopped recording the film: {one_line(e)}')
            self.due.clear()
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
        maps = self.attention_maps(recorder.attention)
        if maps is not None:
            row['maps'] = base64.b64encode(maps.tobytes()).decode()
            row['maps_shape'] = maps.shape
        return row

    def attention_maps(self, calls):
        """ActivationRecorder.attention → the weights (L, H, n, n) as bytes. None, with a warning in
        the first snapshot, unless each block has one call with queries and keys of all tokens."""
        H, T, n = self.model.config.n_head, self.idx.size(1), MAP_TOKENS
        shapes = [(block, *call['query'].shape[1:3], call['key'].size(2)) for block, call in calls]
        if shapes != [(block, H, T, T) for block in range(self.model.config.n_layer)]:
            if not self.lacks_maps:
                self.run.log.print('warning: the film has no attention maps, since attention does '
                                   'not call F.scaled_dot_product_attention once per block')
            self.lacks_maps = True
            return None
        maps = []
        for _, call in calls:
            logits = torch.stack([attention_logits(0, h, **call)[:n, :n] for h in range(H)])
            maps.append(logits.softmax(dim=-1))
        return (255 * torch.stack(maps)).round().byte().cpu().numpy()

    def top_k(self, logits):
        """The most likely tokens for each row of logits (T, V): [(token, probability), …]."""
        probs, ids = logits.softmax(dim=-1).topk(min(TOP_K, logits.size(-1)))  # (T, k)
        rows = []
        for row_ids, row_probs in zip(ids.tolist(), probs.tolist(), strict=True):
            rows.append([(self.token_text(i), rounded(prob))
                         for i, prob in zip(row_ids, row_probs, strict=True)])
        return rows

    def token_text(self, i):
        return token_text(self.tokenizer, i) or '<|endoftext|>'


def rounded(x):
    """Round x for film.jsonl; None if it is not finite."""
    return finite(round(float(x), 3))
