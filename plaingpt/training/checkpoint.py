"""Checkpoints: the model and the run on disk, found, verified and loaded.

    out_dir/checkpoints/iter-00002000/
        state.json                              counters, config, tokenizer, RNG, list of chunks
        state.json.sha256                       its checksum; it holds those of the chunks
        model-00001-of-00002.safetensors        weights, under nanoGPT's names
        optimizer-00001-of-00004.safetensors    '<parameter>/<state>', as 'lm_head.weight/exp_avg'

A directory is written under a temporary name, synced, then renamed: one with its final name is
complete. No file here can run code when it is read: tensors are safetensors, the rest is JSON.
"""

import hashlib
import json
import math
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model import GPT, GPTConfig
from plaingpt.corpus import tokenizers
from plaingpt.corpus.dataset import dataset_folder, open_dataset
from plaingpt.inference.pretrained import tokenizer_json
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of

FORMAT_VERSION = 1
# Keys of state.json as an earlier version wrote them → as they are called now.
RENAMED = {'windows': 'sequences', 'stale': 'evals_since_best'}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory and what its state.json says."""

    path: Path
    state: dict

    @property
    def iter_num(self):
        return self.state['iter_num']

    @property
    def val_loss(self):
        """Validation loss at this iteration; inf where it was not measured or is not a number."""
        loss = self.state.get('val_loss')
        return loss if loss is not None and math.isfinite(loss) else math.inf

    def load_model(self, device='cpu', **changes):
        """The model it holds, on `device`; `changes` to its GPTConfig, such as dropout=0.0."""
        model = GPT(GPTConfig(**{**self.state['model'], **changes}))
        self.load_weights(model)
        return model.to(device)

    @torch.no_grad()
    def load_weights(self, model):
        """Copy the weights into `model`. Raises UserError where they are damaged or misfit."""
        wanted = dict(model.named_parameters())
        missing = set(wanted)
        for name, rows, tensor in self._tensors('model'):
            if name not in wanted or wanted[name][rows].shape != tensor.shape:
                raise UserError(f'{self.path}: {name} there does not fit this model: it holds '
                                'another architecture')
            wanted[name][rows].copy_(tensor)
            missing.discard(name)
        if missing:
            raise UserError(f'{self.path}: {min(missing)} is not there: it holds another '
                            'architecture')

    @torch.no_grad()
    def load_optimizer(self, optimizer, model):
        """Put the saved state into `optimizer`, which was made for `model`.

        Learning rate, betas and decay stay as they are: only what the optimizer remembers of past
        steps comes back, tensor by tensor and straight to where it belongs.
        """
        parameters = dict(model.named_parameters())
        for name, rows, tensor in self._tensors('optimizer'):
            name, _, key = name.partition('/')
            p = parameters[name]
            if rows is ...:  # whole, of any shape
                optimizer.state[p][key] = tensor.to(p.device, copy=True)
            else:
                optimizer.state[p].setdefault(key, torch.empty_like(p))[rows].copy_(tensor)

    def verify(self, kinds=('model', 'optimizer')):
        """Compare all chunks with their checksums. Raises UserError that names a damaged one."""
        for chunk in self.state['chunks']:
            if chunk['kind'] not in kinds:
                continue
            path = self.path / chunk['name']
            try:
                intact = path.stat().st_size == chunk['bytes'] \
                    and sha256_of(path) == chunk['sha256']
            except OSError as e:
                raise UserError(f'{path} cannot be read: {e.strerror}') from None
            if not intact:
                raise UserError(f'{path} is damaged: its checksum is not what was written; use '
                                'another checkpoint with --checkpoint=ITER')

    def _tensors(self, kind):
        """Yield (name, rows, tensor) of all chunks of a kind, all of them verified first."""
        self.verify([kind])
        for chunk in self.state['chunks']:
            if chunk['kind'] != kind:
                continue
            try:
                with safe_open(self.path / chunk['name'], framework='pt') as f:
                    for key in f.keys():  # noqa: SIM118  (it is no dict)
                        name, a, b = re.fullmatch(r'(.*?)(?:\[(\d+):(\d+)\])?', key).groups()
                        yield name, slice(int(a), int(b)) if a else ..., f.get_tensor(key)
            except (OSError, SafetensorError) as e:
                raise UserError(f'{self.path / chunk["name"]} cannot be read: {e}') from None


@dataclass
class ModelChoice:
    """What sample.py, evaluate.py and export.py ask alike, and `load` takes."""

    # which model
    init_from: str = 'resume'  # resume (from out_dir), gpt2…, a folder, or nanoGPT's ckpt.pt
    out_dir: str = 'out'  # the run to read
    checkpoint: str = 'best'  # best, latest, or an iteration
    tokenizer: str = 'auto'  # the model's own, or a prepared dataset whose to take


def load(init_from, out_dir='out', which='best', tokenizer='auto'):
    """What to sample from, evaluate or export → (model, tokenizer, where it is from, the run's
    state.json or {} for weights of others).

    init_from: 'resume' for the run in out_dir, the folder of a run, or what GPT.from_pretrained
    takes. tokenizer: 'auto' for the model's own, or a prepared dataset whose to take.
    Raises UserError.
    """
    if init_from == 'resume' or checkpoint_paths(init_from):
        found = find(out_dir if init_from == 'resume' else init_from, which)
        model, state, source = found.load_model(dropout=0.0), found.state, str(found.path)
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f'{source}: its weights are not finite, so it cannot write; use an '
                            'earlier one with --checkpoint=ITER')
        description = state['tokenizer']
    else:
        model, state, source = GPT.from_pretrained(init_from), {}, init_from
        description = tokenizer_json(init_from, model.config.vocab_size)
    if tokenizer != 'auto':
        description = open_dataset(dataset_folder(tokenizer)).tokenizer_json()
    if description is None:
        raise UserError(f'{source}: nothing says which tokenizer its {model.config.vocab_size} '
                        'tokens are of: name a prepared dataset with --tokenizer=data/NAME')
    made = tokenizers.from_json(description)
    if made.vocab_size != model.config.vocab_size:
        raise UserError(f'{source} has {model.config.vocab_size} tokens and its tokenizer '
                        f'{made.vocab_size}: name the dataset it was trained on with '
                        '--tokenizer=data/NAME')
    return model, made, source, state


# -----------------------------------------------------------------------------
# finding


class AnotherVersion(UserError):
    """A checkpoint that another version of plainGPT wrote: nothing is wrong with it."""


def checkpoint_paths(out_dir):
    """The complete checkpoint directories of a run, oldest first. [] means that there are none:
    where that cannot be seen it raises UserError."""
    folder = Path(out_dir, 'checkpoints')
    try:
        with os.scandir(folder) as entries:
            found = [folder / entry.name for entry in entries
                     if re.fullmatch(r'iter-\d+', entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise UserError(f'{folder} cannot be read: {e.strerror}') from None
    return sorted(found, key=iteration_of)


def iteration_of(path):
    return int(path.name.removeprefix('iter-'))


def readable(out_dir, tell=lambda problem: None):
    """The checkpoints of a run whose state.json is intact, oldest first; `tell` hears of others."""
    found = []
    for path in checkpoint_paths(out_dir):
        try:
            found.append(open_checkpoint(path))
        except UserError as problem:
            tell(problem)
    return found


def open_checkpoint(path):
    """Read one directory's state.json. Raises UserError."""
    try:
        text = (path / 'state.json').read_bytes()
        if hashlib.sha256(text).hexdigest() not in (path / 'state.json.sha256').read_text().split():
            raise ValueError('its checksum is not what was written')
        state = json.loads(text)
        what = f'format version {state["format_version"]}'
        if state['format_version'] == FORMAT_VERSION:
            unknown = state['model'].keys() - {field.name for field in fields(GPTConfig)}
            what = f'a model with {", ".join(sorted(unknown))}' if unknown else ''
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f'{path}/state.json is damaged ({e}): use another checkpoint with '
                        '--checkpoint=ITER, or remove the directory') from None
    if what:
        raise AnotherVersion(f'{path} is from another version of plainGPT: it has {what}, which '
                             'this one does not know: use the version that wrote it, or a newer '
                             'one')
    return Checkpoint(path, {RENAMED.get(key, key): value for key, value in state.items()})


def best_of(checkpoints):
    """The one with the lowest validation loss; the newest where none was measured."""
    return min(reversed(checkpoints), key=lambda checkpoint: checkpoint.val_loss)


def find(out_dir, which='latest'):
    """The checkpoint of a run that 'latest', 'best' or an iteration number names.

    Raises UserError where there is none, or it is damaged.
    """
    paths = checkpoint_paths(out_dir)
    if not paths:
        raise UserError(f'{out_dir}: no checkpoint there; train one first, or name the right '
                        'folder with --out_dir')
    if which == 'latest':
        return open_checkpoint(paths[-1])
    if which == 'best':
        found = readable(out_dir, lambda problem: print(f'warning: {problem}', file=sys.stderr))
        return best_of(found or [open_checkpoint(paths[-1])])
    numbers = [iteration_of(path) for path in paths]
    if str(which).isdecimal() and int(which) in numbers:
        return open_checkpoint(paths[numbers.index(int(which))])
    raise UserError(f'--checkpoint={which}: {out_dir} has latest, best and '
                    f'{", ".join(map(str, numbers))}')


def newest_valid(out_dir):
    """→ (the newest checkpoint whose every byte is as written, or None; what is wrong with those
    after it, a line each). Raises UserError at one of a newer version, which is not damaged."""
    problems = []
    for path in reversed(checkpoint_paths(out_dir)):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify()
            return checkpoint, problems
        except AnotherVersion:
            raise
        except UserError as problem:
            problems.append(str(problem).partition(': use')[0])
    return None, problems
