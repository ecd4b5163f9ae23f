"""The film of a run: at moments on a log scale, what the model expects, looks at and writes.

A moment is a line of film.jsonl: the loss of each token of a validation passage, with what was
likeliest there; the weights of attention, (L, H, T, T) bytes in base64, where 255 is 1; and a
sample. plot.py --film makes a page of it.
"""

import base64
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from plaingpt.monitoring.health import ActivationRecorder, attention_logits
from plaingpt.monitoring.run_record import finite, read_rows
from plaingpt.system.files import append_line
from plaingpt.system.formatting import one_line

MOMENTS = 24  # at most
TOKENS, LIKELIEST, SAMPLE_TOKENS = 96, 5, 30  # of the passage; guesses for each; of the sample
MAP_TOKENS = 40  # of the passage whose attention is shown


class Film:
    """Looks at the model of a train.Run, and writes down what it sees. sample: (model, tokens) →
    a text by it; print_line: says what went wrong. Raises UserError where the dataset has no
    tokenizer."""

    def __init__(self, run, sample, print_line):
        self.run, self.model, self.sample, self.print_line = run, run.model, sample, print_line
        self.path = Path(run.config.out_dir, 'film.jsonl')
        self.tokenizer = run.dataset.tokenizer()
        starts = run.val_data.eval_batches(run.val_data.world_size)[0]
        self.idx = run.val_data.eval_batch(starts)[0][:1, :TOKENS]  # (1, T)
        steps = np.geomspace(1, max(1, run.config.max_iters), MOMENTS - 1).round().astype(int)
        taken = {row['iter'] for row in read_rows(self.path)}  # of a resumed run
        self.moments = {0, *steps.tolist()} - taken
        self.shares = np.geomspace(1e-3, 0.95, MOMENTS - 1).tolist()  # of the time of --minutes

    def is_due(self, iter_num, fraction_done):
        """Whether to look after update `iter_num`. fraction_done: how far the run is"""
        if not self.run.config.minutes or iter_num == 0:
            return iter_num in self.moments
        passed = [share for share in self.shares if share <= fraction_done]
        del self.shares[:len(passed)]
        return bool(passed)

    def take(self, iter_num):
        """Look, and write it down. If that fails, say because the model was changed, the film ends
        and the run continues."""
        self.moments.discard(iter_num)
        self.model.eval()
        try:
            row = self.look()
        except Exception as e:
            self.print_line(f'warning: no more film of this run: {one_line(e)}')
            self.moments.clear()
            self.shares.clear()
        else:
            append_line(self.path, {'iter': iter_num, **row})
        self.model.train()

    @torch.no_grad()
    def look(self):
        """→ {key: value} of a row"""
        with ActivationRecorder(self.model) as seen, self.run.step.autocast:
            logits = self.model(self.idx)[0][0, :-1].float()  # (T - 1, V)
        ids = self.idx[0].tolist()
        losses = F.cross_entropy(logits, self.idx[0, 1:], reduction='none')
        passage = [(self.word(ids[0]), None, ()),  # the first token has no prediction
                   *zip(map(self.word, ids[1:]), map(number, losses.tolist()),
                        self.likeliest(logits), strict=True)]
        maps = [torch.stack([attention_logits(0, h, *args, **kwargs)[:MAP_TOKENS, :MAP_TOKENS]
                             .softmax(dim=-1) for h in range(self.model.config.n_head)])
                for _, args, kwargs in seen.attention]
        row = {'loss': number(losses.mean()), 'passages': [passage],
               'sample': self.sample(self.model, SAMPLE_TOKENS)}
        if maps:
            maps = (255 * torch.stack(maps)).round().byte().cpu().numpy()  # (L, H, n, n)
            row |= {'maps': base64.b64encode(maps.tobytes()).decode(), 'maps_shape': maps.shape}
        return row

    def likeliest(self, logits):
        """logits (T, V) → for each row the likeliest tokens, [(token, probability), …]"""
        chances, ids = logits.softmax(dim=-1).topk(min(LIKELIEST, logits.size(-1)))
        return [[(self.word(i), number(chance)) for i, chance in zip(*row, strict=True)]
                for row in zip(ids.tolist(), chances.tolist(), strict=True)]

    def word(self, i):
        r"""A token as text; bytes that are no characters by themselves as \xe2."""
        return self.tokenizer.decode_bytes([i]).decode('utf-8', 'backslashreplace') \
            or '<|endoftext|>'


def number(x):
    """Rounded for film.jsonl; None if it is not finite."""
    return finite(round(float(x), 3))
