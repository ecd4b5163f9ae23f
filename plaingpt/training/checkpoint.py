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
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model import GPT, ROW_PER_TOKEN, GPTConfig
from plaingpt.system.distributed import is_sharded
from plaingpt.system.errors import UserError, warn
from plaingpt.system.files import sha256_of
from plaingpt.system.formatting import quoted
from plaingpt.system.removed import REMOVED, says_now
from plaingpt.system.removed import as_today as settings_today
from plaingpt.weights import begin_new_tokens, check_finite, copy_rows

FORMAT_VERSION = 1
# Keys of state.json as an earlier version wrote them → as they are called now.
RENAMED = {'windows': 'sequences', 'stale': 'evals_since_best'}
# What a checkpoint of an earlier version may lack.
LATER = {'val_loss': None, 'elapsed_s': 0.0, 'ends_at_s': 0.0, 'wandb_id': None, 'samples': {},
         'eval_sequences': 0, 'dtype': None, 'averaged_steps': None}
PART = re.compile(r'(.*?)(?:\[(\d+):(\d+)\])?')  # of a tensor: its rows


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory and what its state.json says."""

    path: Path
    state: dict
    verified: set = field(default_factory=set, compare=False)  # kinds of chunks

    @property
    def source(self):
        return str(self.path)

    @property
    def shape(self):
        """The fields of its GPTConfig but dropout."""
        return {key: value for key, value in self.state['model'].items() if key != 'dropout'}

    def tokenizer_json(self):
        return self.state['tokenizer']

    @property
    def iter_num(self):
        return self.state['iter_num']

    @property
    def val_loss(self):
        """Validation loss at this iteration; inf where it was not measured or is not a number."""
        loss = self.state.get('val_loss')
        return loss if loss is not None and math.isfinite(loss) else math.inf

    def load_model(self, device='cpu'):
        """The model it holds, on `device`, without dropout."""
        model = GPT(GPTConfig(**self.shape))
        self.load_into(model)
        return model.to(device)

    @torch.no_grad()
    def load_into(self, model):
        """Copy the weights into a GPT of this shape, which may read fewer positions, and know more
        tokens: each new one begins as the mean of those that there are. Of a sharded model each
        process reads its rows. Raises UserError where weights are damaged or misfit."""
        wanted, shapes = dict(model.named_parameters()), self._verified_shapes('model')
        old = self.state['model']['vocab_size']
        grows = model.config.vocab_size > old
        for name in [*wanted, *shapes]:
            fits = name in wanted and name in shapes and (
                shapes[name] == wanted[name].shape
                or (grows and name.endswith(ROW_PER_TOKEN))
                or (name == 'transformer.wpe.weight' and len(wanted[name]) < shapes[name][0]))
            if not fits:
                raise UserError(f'{self.path}: {name!r} there does not fit this model: it holds '
                                'another architecture')
        blocks = {name.split('.')[2] for name in shapes if name.startswith('transformer.h.')}
        if len(blocks) < model.config.n_layer:
            raise UserError(f'{self.path}: its weights do not fit its configuration: there are '
                            f'{len(blocks)} blocks and n_layer={model.config.n_layer}')
        known = {}  # of a vocabulary that grows: the rows that there are
        for name, rows, file, key in self._parts('model'):
            copy_local_rows(wanted[name], rows, file, key)
            if grows and name.endswith(ROW_PER_TOKEN):
                known.setdefault(name, []).append(file.get_tensor(key))
        for name, parts in known.items():
            begin_new_tokens(wanted[name], torch.cat(parts)[:old].mean(0), old,
                             model.config.vocab_size)
        check_finite(model, self.path, 'use an earlier one with --checkpoint=ITER')

    @torch.no_grad()
    def load_optimizer(self, optimizer, model):
        """Put the saved state into `optimizer`, which was made for `model`.

        Learning rate, betas and decay stay as they are: only what the optimizer remembers of past
        steps comes back, tensor by tensor and straight to where it belongs. Raises UserError where
        that is damaged.
        """
        parameters = dict(model.named_parameters())
        shapes = self._verified_shapes('optimizer')
        for entry, rows, file, part in self._parts('optimizer'):
            name, _, key = entry.partition('/')
            p, state = parameters[name], optimizer.state[parameters[name]]
            if not shapes[entry]:
                state[key] = file.get_tensor(part).to(p.device, copy=True)
                continue
            if key not in state:
                dtype = file.get_slice(part)[0:0].dtype
                state[key] = empty_like_rows(p, shapes[entry], dtype)
            copy_local_rows(state[key], rows, file, part)

    def verify(self, kinds=('model', 'optimizer')):
        """Compare all chunks with their checksums, once. Raises UserError that names the damaged.
        """
        for chunk in self.state['chunks']:
            if chunk['kind'] not in set(kinds) - self.verified:
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
        self.verified.update(kinds)

    def _parts(self, kind):
        """Yield (name, rows, open file, key in that file) of all that the chunks of a kind hold."""
        for chunk in self.state['chunks']:
            if chunk['kind'] != kind:
                continue
            try:
                with safe_open(self.path / chunk['name'], framework='pt') as f:
                    for key in f.keys():  # noqa: SIM118  (it is no dict)
                        name, a, b = PART.fullmatch(key).groups()
                        yield name, slice(int(a), int(b)) if a else ..., f, key
            except (OSError, SafetensorError) as e:
                raise UserError(f'{self.path / chunk["name"]} cannot be read: {e}') from None

    def _verified_shapes(self, kind):
        """{name: shape} of all tensors of a kind, from the heads of the files. Raises UserError
        where a file is damaged."""
        self.verify([kind])
        shapes = {}
        for name, rows, file, key in self._parts(kind):
            shape = torch.Size(file.get_slice(key).get_shape())
            if rows is not ...:  # a tensor has as many rows as its last part ends with
                shape = torch.Size([max(rows.stop, *shapes.get(name, shape)[:1]), *shape[1:]])
            shapes[name] = shape
        return shapes


def copy_local_rows(tensor, rows, file, key):
    """Copy what this process has of a tensor from an open file, which has its `rows` (a slice, or
    ... for all). Nothing else is read."""
    source = file.get_slice(key)
    shape = source.get_shape()
    if rows is ... and torch.Size(shape) == tensor.shape and not is_sharded(tensor):
        tensor.copy_(file.get_tensor(key))
        return
    copy_rows(tensor, 0 if rows is ... else rows.start, source, shape[0])


def empty_like_rows(p, shape, dtype):
    """A tensor of an optimizer's state, sharded like its parameter where their rows are the same.
    """
    if not (is_sharded(p) and shape[0] == len(p)):
        return torch.empty(shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import empty
    return empty(shape, dtype=dtype, device_mesh=p.device_mesh, placements=p.placements)


# -----------------------------------------------------------------------------
# finding


class AnotherVersion(UserError):
    """A checkpoint that another version of plainGPT wrote: nothing is wrong with it."""


def checkpoint_paths(out_dir):
    """The complete checkpoint directories of a run, oldest first; [] if none. Raises UserError if
    the folder is unreadable."""
    folder = Path(out_dir, 'checkpoints')
    if not os.path.lexists(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            found = [folder / entry.name for entry in entries
                     if re.fullmatch(r'iter-[0-9]+', entry.name)
                     and (entry.is_dir() or entry.is_symlink())]
    except OSError as e:  # such as a link to a disk that is not mounted
        raise UserError(f'{folder} cannot be read: {e.strerror}') from None
    return sorted(found, key=iteration_of)


def iteration_of(path):
    return int(path.name.removeprefix('iter-'))


def without_advice(problem):
    """The message of a UserError up to what to use instead, where that is done already."""
    return re.split('[:;] use ', str(problem))[0]


def readable_checkpoints(out_dir, on_damaged=lambda problem: None):
    """The checkpoints of a run whose state.json is intact, oldest first. on_damaged: is called with
    the problem of each other one"""
    found = []
    for path in checkpoint_paths(out_dir):
        try:
            found.append(open_checkpoint(path))
        except UserError as problem:
            on_damaged(without_advice(problem))
    return found


def open_checkpoint(path):
    """A checkpoint directory, of which state.json alone is read. Raises UserError."""
    try:
        state = read_state(path)
        unknown = find_unknown(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        what = f'{Path(e.filename).name}: {e.strerror}' if isinstance(e, OSError) else e
        raise UserError(f'{path}/state.json is damaged ({what}): use another checkpoint with '
                        '--checkpoint=ITER, or remove the directory') from None
    if unknown:
        raise AnotherVersion(f'{path} is from another version of plainGPT: it has '
                             f'{", ".join(unknown)}, which this one does not know: use the version '
                             'that wrote it')
    return Checkpoint(path, as_today(state))


def read_state(path):
    """The content of state.json. Raises OSError, ValueError."""
    checksums = (path / 'state.json.sha256').read_text().split()
    text = (path / 'state.json').read_bytes()
    if hashlib.sha256(text).hexdigest() not in checksums:
        raise ValueError('its checksum is not what was written')
    return json.loads(text)


def find_unknown(state):
    """What state.json has that this version does not compute with, such as ['conv_bias=True']."""
    if state['format_version'] != FORMAT_VERSION:
        return [f'format version {state["format_version"]}']
    settings = {**state['config'], **state['model']}
    known = {field.name for field in fields(GPTConfig)}
    return [f'{key}={value}' for key, value in settings.items()
            if (key in REMOVED and says_now(key, value, settings) is None)
            or (key in state['model'] and key not in {*known, *REMOVED})]


def as_today(state):
    """state.json of an earlier version as this one would have written it."""
    state = LATER | {RENAMED.get(key, key): value for key, value in state.items()}
    known = {field.name for field in fields(GPTConfig)}
    state['model'] = {key: x for key, x in state['model'].items() if key in known}
    state['config'] = settings_today(state['config'])
    return state


def best_of(checkpoints):
    """The one with the lowest validation loss, the newest where none was measured; None of none."""
    return min(reversed(checkpoints), key=lambda checkpoint: checkpoint.val_loss, default=None)


def find(out_dir, which='latest', kinds=(), on_damaged=lambda problem: warn(
        f'skipped a checkpoint: {problem}')):
    """The checkpoint of a run that 'latest', 'best' or an iteration number names; of 'latest' the
    newest one whose state.json, and files of `kinds`, are as they were written. on_damaged: is
    called with the problem of each that was skipped. Raises UserError."""
    paths = checkpoint_paths(out_dir)
    if not paths:
        others = describe_other_weights(out_dir)
        raise UserError(f'{out_dir}: no checkpoint there; '
                        + (others or 'train one first, or name the right folder with --out_dir'))
    if which in ('latest', 'best'):
        if which == 'latest':
            found, damaged = newest_valid(out_dir, kinds)
        else:
            damaged = []
            found = best_of(readable_checkpoints(out_dir, damaged.append))
        if found is None:
            raise UserError('\n'.join([
                *damaged, f'{out_dir}: no checkpoint there can be used; to start anew, train with '
                '--init_from=scratch, which keeps them in a folder beside']))
        for problem in damaged:
            on_damaged(problem)
        return found
    numbers, moved = [iteration_of(path) for path in paths], []
    if str(which).isdecimal():
        if int(which) in numbers:
            return open_checkpoint(paths[numbers.index(int(which))])
        moved = [path for archive in archives(out_dir)
                 if (path := archive / 'checkpoints' / f'iter-{int(which):08d}').exists()]
    raise UserError(f'--checkpoint={which}: {out_dir} has latest, best and '
                    f'{", ".join(map(str, numbers))}'
                    + (f'; it was moved to {moved[-1]}' if moved else ''))


def archives(out_dir):
    """The folders old-001, old-002, … of earlier runs in an out_dir, by their numbers."""
    return sorted((path for path in Path(out_dir).glob('old-*') if path.name[4:].isdecimal()),
                  key=lambda path: int(path.name[4:]))


def describe_other_weights(out_dir):
    """How to go on in a folder without checkpoints of ours: with an earlier run that was moved
    aside, or with weights of others. None where it has neither."""
    if earlier := [path for path in archives(out_dir) if checkpoint_paths(path)]:
        return f'an earlier run is in {earlier[-1]}: --out_dir={quoted(earlier[-1])}'
    if str(out_dir).startswith('gpt2') or Path(out_dir, 'config.json').exists():
        return f'weights of others are read with --init_from={quoted(out_dir)}'
    path = Path(out_dir, 'ckpt.pt')
    if path.exists():
        return f"{path} is nanoGPT's: --init_from={quoted(path)} takes its weights (with " \
               "--tokenizer=FOLDER, a dataset, where its tokens are not GPT-2's)"
    return None


def newest_valid(out_dir, kinds=('model', 'optimizer')):
    """→ (the newest checkpoint whose state.json, and files of `kinds`, are as they were written, or
    None; what is wrong with those after it, a line each). Raises UserError at one of a newer
    version, which is not damaged."""
    problems = []
    for path in reversed(checkpoint_paths(out_dir)):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify(kinds)
            return checkpoint, problems
        except AnotherVersion:
            raise
        except UserError as problem:
            problems.append(without_advice(problem))
    return None, problems
