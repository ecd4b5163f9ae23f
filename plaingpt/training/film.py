"""The film of a run: at instants on a log scale, what the model predicts, looks at and writes.

film.jsonl in out_dir has one JSON object for each instant:
  iter, seconds         the updates done, and how long it took to look
  loss                  mean over the tokens below, in nats
  passages              a few fixed validation passages: of each token
                        [token, loss, [[token, probability], …]], the last what was likeliest there
  lens                  the logit lens (nostalgebraist 2020): for the first tokens of the first
                        passage, [token, probability] of what ln_f and lm_head make of the residual
                        stream, before the first block and after each
  stream_rms            RMS of that stream, as often
  weight_norm           {block: norm of its weights}
  sample                a text by the model, with the same prompt and random numbers each time;
                        not at each instant, as writing takes longer than reading
Beside it, film/iter-00000012.safetensors has `attention`, (L, H, T, T) uint8: the weights of each
head on those first tokens, where 255 is 1. plot.py --film makes a page of both.
"""

import math
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch.overrides import TorchFunctionMode

from plaingpt.inference.generation import generate
from plaingpt.monitoring.film_page import read_instants
from plaingpt.monitoring.health import block_norms
from plaingpt.monitoring.metrics_file import finite
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line, write_atomically
from plaingpt.system.formatting import one_line, quoted
from plaingpt.training.probes import sample_prompts

INSTANTS = 40  # at most
SHARE, FREE_S = 0.02, 0.5  # of a run's time that the film may take; in a short run, seconds
PASSAGES, TOKENS, LIKELIEST = 3, 128, 5  # passages, tokens of each, guesses for each
MAP_TOKENS, MAP_BYTES = 64, 40_000  # of attention in an instant: fewer tokens for many heads
SAMPLE_TOKENS = 64


def number(x):
    """As film.jsonl has it: three digits, None for what is not finite."""
    return finite(float(f'{x:.3g}'))


def choose_instants(max_iters):
    """Iterations to look at: 0, and from 1 to the last ever further apart."""
    steps = np.geomspace(1, max(1, max_iters), INSTANTS - 1).round().astype(int)
    return sorted({0, *steps.tolist()})


def open_film(config, dataset, parallel, loader, metrics, context, writing):
    """The Film of a run, or None: where none is wanted, on other processes than the first, and
    where there can be none, which a line says."""
    if not config.film or not writing:
        return None
    try:
        if parallel.sharded:
            raise UserError('the weights are sharded (parallel=fsdp)')
        return Film(config, dataset, parallel.model, loader, metrics, context)
    except UserError as problem:
        metrics.print(f'warning: no film of this run: {problem}')
        return None


class Film:
    """Looks at `model` (neither compiled nor wrapped) and writes down what it sees.

    loader: of validation sequences; metrics: of the run, which has its clock
    Raises UserError where the tokenizer cannot be had, or the prompt encoded.
    """

    def __init__(self, config, dataset, model, loader, metrics, context):
        self.config, self.model, self.metrics, self.context = config, model, metrics, context
        self.path, self.folder = Path(config.out_dir, 'film.jsonl'), Path(config.out_dir, 'film')
        self.instants = choose_instants(config.max_iters)
        self.tokenizer, self.words = dataset.tokenizer(), {}
        self.prompts, self.shown, self.how = sample_prompts(config, dataset, loader)
        starts = loader.eval_batches(PASSAGES * loader.world_size)[0]
        self.idx = loader.eval_batch(starts)[0][:len(starts), :TOKENS]  # (P, T)
        heads = model.config.n_layer * model.config.n_head
        self.map_tokens = min(MAP_TOKENS, self.idx.size(1), math.isqrt(2 * MAP_BYTES // heads))
        rows = read_instants(self.path)  # of a resumed run, up to its checkpoint
        self.taken = {row['iter'] for row in rows}
        self.spent = sum(row['seconds'] for row in rows)
        self.look_s = self.sample_s = 0.0  # what each takes

    def is_due(self, iter_num):
        """Whether to look now: at an instant, where there is time."""
        return iter_num in self.instants and iter_num not in self.taken \
            and self.has_time(iter_num, self.look_s)

    def has_time(self, iter_num, seconds):
        """Whether the film can have so many seconds now, and as many as the last instant takes
        later. The first and the last always can."""
        return iter_num in (self.instants[0], self.instants[-1]) \
            or self.spent + seconds + self.look_s + self.sample_s \
            <= max(FREE_S, SHARE * self.metrics.elapsed_s())

    def take(self, iter_num):
        """Look, and write it down. A model that has been changed so that this fails costs the rest
        of the film, and not the run."""
        try:
            began = time.perf_counter()
            self.model.eval()
            row, attention = self.look()
            if attention is not None:
                self.folder.mkdir(exist_ok=True)
                write_atomically(self.folder / f'iter-{iter_num:08d}.safetensors',
                                 save({'attention': attention}))
            looked = time.perf_counter()
            self.look_s = looked - began
            if self.has_time(iter_num, self.look_s + self.sample_s):
                row['sample'] = self.sample()
                self.sample_s = time.perf_counter() - looked
        except Exception as e:
            self.metrics.print(f'warning: no more film of this run: {one_line(e)}')
            self.instants = []
            return
        finally:
            self.model.train()
        seconds = time.perf_counter() - began
        self.spent += seconds
        self.taken.add(iter_num)
        append_line(self.path, {'iter': iter_num, 'seconds': number(seconds), **row})

    @torch.no_grad()
    def look(self):
        """→ (what film.jsonl has of an instant, attention or None)"""
        with Recorder(self.model) as seen, self.context:
            logits = self.model(self.idx)[0][:, :-1].float()  # (P, T - 1, V)
            lens = [self.model.logits(self.model.transformer.ln_f(x[0, :self.map_tokens])).float()
                    for x in seen.streams]  # L + 1 times (T, V)
        losses = F.cross_entropy(logits.flatten(0, 1), self.idx[:, 1:].flatten(), reduction='none')
        row = {'loss': number(losses.mean()),
               'passages': [self.describe_passage(*each) for each in zip(
                   self.idx.tolist(), losses.view(len(logits), -1), logits, strict=True)],
               'lens': [[guesses[0] for guesses in self.guess(each, 1)] for each in lens],
               'stream_rms': [number(x.float().square().mean().sqrt()) for x in seen.streams],
               'weight_norm': {name: number(norm) for name, norm in
                               block_norms(self.model.named_parameters()).items()}}
        n = self.map_tokens
        maps = [(255 * weights[:, :n, :n]).round().byte() for weights in seen.attention]
        return row, torch.stack(maps).cpu().contiguous() if maps else None

    def sample(self):
        """A text by the model. In float32: for single tokens a CPU gains nothing from less."""
        [new] = generate(self.model, self.prompts[:1], SAMPLE_TOKENS, **self.how,
                         generators=[torch.Generator().manual_seed(self.config.seed)])
        return self.shown[0] + self.tokenizer.decode(new)

    def describe_passage(self, ids, losses, logits):
        """T ids, losses (T - 1) of all but the first, and the logits (T - 1, V) that these are of →
        [[token, loss, guesses], …]"""
        found = zip(ids[1:], losses.tolist(), self.guess(logits, LIKELIEST), strict=True)
        return [[self.word(ids[0]), None, []],
                *([self.word(i), number(loss), guesses] for i, loss, guesses in found)]

    def guess(self, logits, n):
        """logits (T, V) → for each row the likeliest, [[token, probability], …]"""
        chances, ids = logits.softmax(dim=-1).topk(min(n, logits.size(-1)))
        return [[[self.word(i), number(chance)] for i, chance in zip(*row, strict=True)]
                for row in zip(ids.tolist(), chances.tolist(), strict=True)]

    def word(self, i):
        """A token as text; bytes that are no characters by themselves as \\xe2."""
        if i not in self.words:
            data = self.tokenizer.decode_bytes([i])
            self.words[i] = data.decode('utf-8', 'backslashreplace') or '<|endoftext|>'
        return self.words[i]

    def describe(self):
        """What to say of it when the run has ended, in a line."""
        share = f', {self.spent / self.metrics.elapsed_s():.1%} of the time' \
            if self.spent > FREE_S else ''
        return f'film: {len(self.taken)} instants took {self.spent:.1f} s{share}; ' \
               f'python plot.py --film {quoted(self.config.out_dir)} makes a page of them'


class Recorder(TorchFunctionMode):
    """Keeps what flows through a GPT while it is open, of its first sequence alone the attention.

    streams: the residual stream before the first block and after each, (B, T, C)
    attention: the weights of each attention that calls F.scaled_dot_product_attention, (H, T, T)
    """

    def __init__(self, model):
        super().__init__()
        self.blocks, self.streams, self.attention = model.transformer.h, [], []

    def __enter__(self):
        self.hooks = ExitStack()
        for hook in (
                self.blocks[0].register_forward_pre_hook(
                    lambda module, inputs: self.streams.append(inputs[0])),
                *(block.register_forward_hook(lambda module, inputs, x: self.streams.append(x))
                  for block in self.blocks)):
            self.hooks.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *problem):
        self.hooks.close()
        return super().__exit__(*problem)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.attention.append(attention_weights(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def attention_weights(query, key, value, attn_mask=None, **how):
    """Arguments of F.scaled_dot_product_attention → its weights in the first sequence, (H, T, T):
    what it returns where the values are the rows of the identity."""
    T = key.size(2)
    values = torch.eye(T, dtype=value.dtype, device=value.device).expand(1, key.size(1), T, T)
    mask = attn_mask[:1] if attn_mask is not None and attn_mask.dim() == 4 else attn_mask
    return F.scaled_dot_product_attention(query[:1], key[:1], values, attn_mask=mask, **how)[0]
