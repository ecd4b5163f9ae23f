"""The film of a run: at instants on a log scale, what the model predicts, looks at and writes.

An instant is a line of film.jsonl. It has the loss of each token of a few validation passages, with
what was likeliest there; the logit lens (nostalgebraist 2020): what ln_f and lm_head make of the
residual stream, before the first block and after each; norms; and a sample, with the same random
numbers each time, where there is time to write one. Beside it film/iter-00000012.safetensors has
the weights of attention in the first passage, (L, H, T, T) uint8, where 255 is 1. plot.py --film
makes a page of both.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save

from plaingpt.data.opening import sample_prompts
from plaingpt.inference.generation import generate
from plaingpt.monitoring.film_page import read_instants
from plaingpt.monitoring.health import ActivationRecorder, block_norms
from plaingpt.monitoring.metrics_file import finite
from plaingpt.parallel.sharding import sharded
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line, write_atomically
from plaingpt.system.formatting import one_line, quoted

INSTANTS = 40  # at most
SHARE, FREE_S = 0.019, 1.0  # of a run's time that the film may take; in a short run, seconds
PASSAGES, TOKENS, LIKELIEST = 3, 96, 5  # passages, tokens of each, guesses for each
MAP_TOKENS, MAP_BYTES = 64, 40_000  # of attention in an instant: fewer tokens for many heads
SAMPLE_TOKENS = 48


def open_film(run):
    """The Film of a train.Run; None where there can be none, which a line says."""
    try:
        if sharded(run.model):
            raise UserError('with parallel=fsdp no process has the whole model')
        return Film(run.config, run.dataset, run.model, run.val_data, run.metrics, run.context)
    except UserError as problem:
        run.metrics.print(f'warning: no film of this run: {problem}')
        return None


class Film:
    """Looks at `model` (neither compiled nor wrapped), and writes down what it sees.

    loader: of validation sequences; metrics: has the clock of the run. Raises UserError.
    """

    def __init__(self, config, dataset, model, loader, metrics, context):
        self.out_dir, self.seed = Path(config.out_dir), config.seed
        self.model, self.metrics, self.context = model, metrics, context
        self.tokenizer = dataset.tokenizer()
        self.prompts, self.shown, self.how = sample_prompts(config, dataset, loader)
        starts = loader.eval_batches(PASSAGES * loader.world_size)[0]
        self.idx = loader.eval_batch(starts)[0][:len(starts), :TOKENS]  # (P, T)
        heads = model.config.n_layer * model.config.n_head
        self.map_tokens = min(MAP_TOKENS, self.idx.size(1), math.isqrt(2 * MAP_BYTES // heads))
        steps = np.geomspace(1, max(1, config.max_iters), INSTANTS - 1).round().astype(int)
        self.instants = sorted({0, *steps.tolist()})
        rows = read_instants(self.out_dir)  # of a resumed run, up to its checkpoint
        self.taken = {row['iter'] for row in rows}
        self.spent = sum(row['seconds'] for row in rows)
        self.sample_s = 0.0  # what a sample takes
        self.step_s, self.called = math.inf, -math.inf  # the fastest step; when it was asked last

    def is_due(self, iter_num):
        """Whether to look now, at an instant where there is time. Call it before each step."""
        now = time.perf_counter()
        self.step_s, self.called = min(self.step_s, now - self.called), now
        return iter_num in self.instants and iter_num not in self.taken \
            and self.has_time(iter_num)

    def has_time(self, iter_num, seconds=0.0):
        """Whether the film can have so many seconds more now: each instant opens as much of its
        time as any other. The first and the last always have time."""
        if iter_num in (self.instants[0], self.instants[-1]):
            return True
        run_s = max(self.step_s * self.instants[-1], self.metrics.elapsed_s())
        opened = (self.instants.index(iter_num) + 1) / len(self.instants)
        return self.spent + seconds <= opened * max(FREE_S, SHARE * run_s)

    def take(self, iter_num):
        """Look, and write it down. Where that fails, as with a model that was changed, it costs
        the rest of the film and not the run."""
        began = time.perf_counter()
        self.model.eval()
        try:
            row, maps = self.look()
            (self.out_dir / 'film').mkdir(exist_ok=True)
            write_atomically(self.out_dir / f'film/iter-{iter_num:08d}.safetensors', save(maps))
            look_s = time.perf_counter() - began
            if self.has_time(iter_num, look_s + self.sample_s):
                [new] = generate(self.model, self.prompts[:1], SAMPLE_TOKENS, **self.how,
                                 generators=[torch.Generator().manual_seed(self.seed)])
                row['sample'] = self.shown[0] + self.tokenizer.decode(new)
                self.sample_s = time.perf_counter() - began - look_s
        except Exception as e:
            self.metrics.print(f'warning: no more film of this run: {one_line(e)}')
            self.instants = []
            return
        finally:
            self.model.train()
        seconds = number(time.perf_counter() - began)
        self.spent += seconds
        self.taken.add(iter_num)
        append_line(self.out_dir / 'film.jsonl', {'iter': iter_num, 'seconds': seconds, **row})

    @torch.no_grad()
    def look(self):
        """→ (what film.jsonl has of an instant, tensors)"""
        n = self.map_tokens
        with Recorder(self.model) as seen, self.context:
            logits = self.model(self.idx)[0][:, :-1].float()  # (P, T - 1, V)
            lens = [self.model.logits(self.model.transformer.ln_f(x[0, :n])).float()  # (n, V)
                    for x in seen.streams]
        losses = F.cross_entropy(logits.flatten(0, 1), self.idx[:, 1:].flatten(), reduction='none')
        passages = [
            [(self.word(ids[0]), None, ()), *zip(  # nothing says what comes first
                map(self.word, ids[1:]), map(number, row), self.likeliest(each, LIKELIEST),
                strict=True)]
            for ids, row, each in zip(self.idx.tolist(), losses.view(len(logits), -1).tolist(),
                                      logits, strict=True)]
        norms = {f'stream_rms/{i}': x.float().square().mean().sqrt()
                 for i, x in enumerate(seen.streams)}
        norms |= {f'weight_norm/{name}': norm
                  for name, norm in block_norms(self.model.named_parameters()).items()}
        maps = [(255 * weights[:, :n, :n]).round().byte() for weights in seen.attention]
        return {'loss': number(losses.mean()), 'passages': passages,
                'lens': [[guess for guess, in self.likeliest(each, 1)] for each in lens],
                'norms': {name: number(norm) for name, norm in norms.items()}}, \
            {'attention': torch.stack(maps).cpu()} if maps else {}

    def likeliest(self, logits, n):
        """logits (T, V) → for each row the n likeliest tokens, [(token, probability), …]"""
        chances, ids = logits.softmax(dim=-1).topk(min(n, logits.size(-1)))
        return [[(self.word(i), number(chance)) for i, chance in zip(*row, strict=True)]
                for row in zip(ids.tolist(), chances.tolist(), strict=True)]

    def word(self, i):
        r"""A token as text; bytes that are no characters by themselves as \xe2."""
        return self.tokenizer.decode_bytes([i]).decode('utf-8', 'backslashreplace') \
            or '<|endoftext|>'

    def describe(self):
        """What to say of it when the run has ended, in a line."""
        return f'film: {len(self.taken)} instants took {self.spent:.1f} s of ' \
               f'{self.metrics.elapsed_s():.1f} s; python plot.py --film {quoted(self.out_dir)} ' \
               'makes a page of them'


def number(x):
    """As film.jsonl has it; None for what is not finite."""
    return finite(round(float(x), 3))


class Recorder(ActivationRecorder):
    """Keeps what flows through a GPT while it is open."""

    def __init__(self, model):
        super().__init__(model)
        self.streams = []  # the residual stream before the first block and after each, (B, T, C)
        self.attention = []  # the weights of each attention in the first sequence, (H, T, T)

    def enter_block(self, i, x):
        if i == 0:
            self.streams.append(x)

    def leave_block(self, i, x):
        self.streams.append(x)

    def see_attention(self, query, key, value, *mask, **how):
        """The weights are what attention returns where the values are the rows of the identity."""
        rows = torch.eye(key.size(2), dtype=value.dtype, device=value.device)  # (T, T)
        self.attention.append(F.scaled_dot_product_attention(
            query, key, rows.expand(*key.shape[:2], -1, -1), *mask, **how)[0])
