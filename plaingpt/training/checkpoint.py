"""Checkpoints: the model and the run on disk, found, verified, loaded and written.

    out_dir/checkpoints/iter-00002000/
        state.json                              counters, config, tokenizer, RNG, list of chunks;
                                                their checksums and its own
        model-00001-of-00002.safetensors        weights, under nanoGPT's names
        optimizer-00001-of-00004.safetensors    '<parameter>/<state>', as 'lm_head.weight/exp_avg'

Each process writes its rows of each tensor, as 'name[first:last]' where it has not all of them, and
reads its rows whoever wrote them. A directory is written under a temporary name, synced, then
renamed: one with its final name is complete. No file here can run code when it is read: tensors are
safetensors, the rest is JSON.
"""

import hashlib
import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import VOCAB_WEIGHTS, GPTConfig
from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import (
    all_gather,
    gloo_group,
    held_rows,
    is_sharded,
    launched_world,
    local_rows,
)
from plaingpt.system.errors import UserError, warn
from plaingpt.system.files import read_json, refuse_unknown, sha256_of, sync, write_json
from plaingpt.weights import check_finite, copy_rows, init_new_tokens

FORMAT_VERSION = 1
STATE_KEYS = {  # of state.json, beside its checksum
    'format_version', 'iter_num', 'sequences', 'evaluated', 'val_loss', 'val_loss_stderr',
    'best_val_loss', 'evals_since_best', 'eval_sequences', 'elapsed_s', 'left_s', 'wandb_id',
    'config', 'model', 'tokenizer', 'data', 'dtype', 'scaler', 'averaged_steps', 'rng', 'chunks'}
PART = re.compile(r'(.*?)(?:\[(\d+):(\d+)\])?')  # name, or name[first:end] for some rows
CHUNK_BYTES = 500 * 10**6  # of tensors in a file, which with its header stays below 512 MB
KEPT = 2  # of the newest checkpoints, beside the best


class Removed(OSError):
    """A checkpoint is gone: its run trains meanwhile, and keeps newer ones instead."""


def unreadable(checkpoint, problem):
    """The error for a checkpoint directory in which a file cannot be read."""
    if checkpoint.exists() or checkpoint in checkpoint.parent.glob('*'):  # a link to nowhere
        return UserError(problem)
    return Removed(f'{checkpoint} was removed while it was read: choose another checkpoint')


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory and what its state.json says."""

    path: Path
    state: dict
    verified: set = field(default_factory=set, compare=False)  # kinds of chunks
    # name: chunk that is open since it was verified. It can be read also once its run removed it.
    opened: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self):
        return str(self.path)

    @property
    def config(self):
        """The GPTConfig of its model, without the dropout of the run."""
        return GPTConfig(**{**self.state['model'], 'dropout': 0.0})

    def tokenizer_json(self):
        return self.state['tokenizer']

    def settings(self):
        """{setting: value} of its run. Raises UserError for one that this version does not know."""
        from plaingpt.training.settings import TrainConfig  # sampling needs no settings of training
        settings = self.state['config']
        refuse_unknown(self.path, settings.keys() - {field.name for field in fields(TrainConfig)})
        return settings

    @property
    def iter_num(self):
        return self.state['iter_num']

    @property
    def val_loss(self):
        """Validation loss at this iteration; inf where it was not measured."""
        loss = self.state.get('val_loss')
        return math.inf if loss is None else loss

    @torch.no_grad()
    def load_into(self, model):
        """Copy the weights into a GPT of this shape. It may read fewer positions and know more
        tokens: each new token begins as the mean of the old ones. If it is sharded, each process
        reads its own rows. Raises UserError where weights are damaged or misfit."""
        shapes, wanted = self._shapes('model'), dict(model.named_parameters())
        old, new = self.state['model']['vocab_size'], model.config.vocab_size
        grows = {name for name in wanted if new > old and name.endswith(VOCAB_WEIGHTS)}
        for name in [*wanted, *shapes]:
            start = 1 if name in grows or name == 'transformer.wpe.weight' else 0
            if name not in wanted or name not in shapes \
                    or wanted[name].shape[start:] != shapes[name][start:]:
                raise UserError(f'{self.path}: {name!r} there does not fit this model: it holds '
                                'another architecture')
        known = {name: [] for name in grows}  # the rows of old tokens
        for name, first, rows in self._parts('model'):
            copy_rows(wanted[name], first, rows)
            if name in grows:
                known[name].append(rows[:])
        for name, parts in known.items():
            init_new_tokens(wanted[name], torch.cat(parts)[:old].mean(0), old, new)
        self.opened.clear()

    @torch.no_grad()
    def load_optimizer(self, optimizer, model):
        """Load the optimizer's states into one that was made for `model`. Its settings stay as they
        are. Raises UserError where the states are damaged."""
        shapes, parameters = self._shapes('optimizer'), dict(model.named_parameters())
        for entry, first, rows in self._parts('optimizer'):
            name, _, key = entry.partition('/')
            p, state = parameters[name], optimizer.state[parameters[name]]
            if key not in state:
                state[key] = empty_state(p, shapes[entry], rows)
            copy_rows(state[key], first, rows)

    def verify(self, kinds):
        """Compare the chunks of these kinds with their checksums, once, and keep them open. Raises
        UserError, which names the damaged chunk, and Removed where the directory is gone."""
        for chunk in self.state['chunks']:
            if chunk['kind'] not in set(kinds) - self.verified:
                continue
            path, found = self.path / chunk['name'], None
            # What cannot be read is as good as damaged. torch opens it too: RuntimeError.
            with suppress(OSError, RuntimeError, SafetensorError):
                self.opened[chunk['name']] = safe_open(path, framework='pt')
                found = sha256_of(path)
            if found != chunk['sha256']:
                raise unreadable(self.path, f'{path} is damaged: it is not what was written')
        self.verified.update(kinds)

    def _parts(self, kind):
        """Yield (name, first row, rows on disk) of each tensor, or part of one, of a kind. Raises
        UserError where a chunk is damaged."""
        self.verify([kind])
        for chunk in self.state['chunks']:
            if chunk['kind'] == kind:
                file = self.opened.get(chunk['name']) \
                    or safe_open(self.path / chunk['name'], framework='pt')
                for key in file.keys():  # noqa: SIM118  (it is no dict)
                    name, first, _ = PART.fullmatch(key).groups()
                    yield name, int(first or 0), file.get_slice(key)

    def _shapes(self, kind):
        """{name: shape} of all tensors of a kind."""
        shapes = {}
        for name, first, rows in self._parts(kind):
            shape = rows.get_shape()
            if shape:  # a tensor has as many rows as its last part ends with
                shape[0] = max(first + shape[0], *shapes.get(name, shape)[:1])
            shapes[name] = torch.Size(shape)
        return shapes


def empty_state(p, shape, rows):
    """An empty tensor for an optimizer's state of the parameter p, sharded like it if both have the
    same number of rows."""
    dtype = (rows[0:0] if shape else rows[...]).dtype
    if not (is_sharded(p) and shape and shape[0] == len(p)):
        return torch.empty(shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import empty
    return empty(shape, dtype=dtype, device_mesh=p.device_mesh, placements=p.placements)


# -----------------------------------------------------------------------------
# finding


def find(out_dir, which='latest', kinds=()):
    """The checkpoint of a run that 'latest', 'best' or an iteration number names. Damaged ones are
    skipped with a warning. kinds: which chunks to verify beside state.json, and to keep open: a run
    that trains may remove them. Raises UserError."""
    paths, problems = checkpoint_paths(out_dir), []
    if not paths:
        raise UserError(f'{out_dir}: no checkpoint there; train one first, or name the right '
                        'folder with --out_dir, or weights of others with --init_from')
    if which not in ('latest', 'best'):
        there = ', '.join(str(iteration_of(path)) for path in paths)
        paths = [path for path in paths if str(iteration_of(path)) == str(which)]
        if not paths:
            raise UserError(f'--checkpoint={which}: {out_dir} has latest, best and {there}')
    try:
        if which == 'best':
            ranked = sorted(intact(paths, (), problems.append),
                            key=lambda c: (-c.val_loss, c.iter_num))
            paths = [found.path for found in ranked]
        found = next(intact(paths, kinds, problems.append), None)
    except Removed:  # look among those that are there now
        return find(out_dir, which, kinds)
    if found is None:
        raise UserError('\n'.join(problems) + '; or name another with --checkpoint, or train anew '
                        'with --init_from=scratch, which keeps them in a folder beside')
    if launched_world().is_main:
        for problem in problems:
            warn(f'skipped a checkpoint: {problem}')
    return found


def intact(paths, kinds=(), tell=lambda problem: None):
    """Yield the undamaged checkpoints of these, the last first, and call `tell` with the problem of
    each damaged one. Raises Removed."""
    for path in reversed(paths):
        try:
            found = open_checkpoint(path)
            found.verify(kinds)
            yield found
        except UserError as problem:
            tell(str(problem))


def checkpoint_paths(out_dir):
    """The complete checkpoint directories of a run, oldest first."""
    return sorted((path for path in Path(out_dir, 'checkpoints').glob('iter-*')
                   if path.name[5:].isdecimal()), key=iteration_of)


def iteration_of(path):
    return int(path.name.removeprefix('iter-'))


def open_checkpoint(path):
    """Open a checkpoint directory, of which this reads state.json alone. Raises UserError where
    that is damaged, or has something that this version does not know; Removed where the directory
    is gone."""
    try:
        state = read_json(path / 'state.json')
        if state.pop('sha256', None) != checksum(state):
            raise ValueError('its checksum is not what was written')
    except (OSError, ValueError, TypeError, AttributeError) as e:  # the last two: of no object
        raise unreadable(path, f'{path}/state.json is damaged: {e}') from None
    if state['format_version'] != FORMAT_VERSION:
        refuse_unknown(path, [f'format_version={state["format_version"]}'])
    refuse_unknown(path, state.keys() - STATE_KEYS)
    refuse_unknown(path, state['model'].keys() - {field.name for field in fields(GPTConfig)})
    return Checkpoint(path, state)


# -----------------------------------------------------------------------------
# writing


class Saver:
    """Writes a run's checkpoints, by all processes together. background: while training continues;
    the next save waits for it"""

    def __init__(self, out_dir, *, rank=0, world_size=1, keep=1, background=False):
        self.out_dir, self.keep = Path(out_dir), keep
        self.rank, self.world_size = rank, world_size
        self.group = gloo_group(own=background) if world_size > 1 else None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix='saver') if background else None
        self.pending = None  # the save in the background
        self.failed = False  # the last save came to nothing

    def save(self, model, optimizer, state, rng):
        """Write a checkpoint; then remove all but the `keep` newest and the best.

        state: JSON, the same on all processes, with 'iter_num' and 'val_loss', which decides on the
        best. rng: rng_state of this process. Where the disk refuses it warns, and `failed` is True.
        Raises UserError, and writes and removes nothing, where a weight is not finite.
        """
        self.wait()

        if problem := self._problem_of(lambda: check_finite(
                model, f'after iteration {state["iter_num"]}', 'it is not saved; continue from a '
                'checkpoint before with --init_from=resume and a lower --learning_rate')):
            raise UserError(problem)
        state = {'format_version': FORMAT_VERSION, **state, 'model': asdict(model.config)}
        assert state.keys() <= STATE_KEYS, f'add to STATE_KEYS: {state.keys() - STATE_KEYS}'
        tensors = {'model': dict(model.named_parameters()),
                   'optimizer': optimizer_tensors(optimizer, model)}
        files = {kind: my_files(found, self.rank, self.world_size)
                 for kind, found in tensors.items()}
        if not self.writer:
            self._write(files, state, rng)
            return
        for file in [*files['model'], *files['optimizer']]:
            for key, t in file.items():
                # From a GPU this copies into pages that stay in place: several times as fast.
                file[key] = t.detach().to('cpu', non_blocking=True, copy=True)
        synchronize(next(model.parameters()).device)
        self.pending = self.writer.submit(self._write, files, state, rng)

    def wait(self):
        """Wait for a save in the background. Raises what it raised."""
        if self.pending:
            self.pending.result()

    def _write(self, files, state, rng):
        final = self.out_dir / 'checkpoints' / f'iter-{state["iter_num"]:08d}'
        if all_gather(final.exists(), self.group)[0]:  # saved before it was evaluated
            problem = self._problem_of(lambda: write_state(
                final, {**open_checkpoint(final).state, **state}), on_rank_0=True)
        else:
            problem = self._write_all(final, files, state, rng)
        self.failed = bool(problem)
        if self.rank == 0 and problem:
            clean_up(self.out_dir)  # or its remains fill the disk further
            warn(f'the checkpoint of iteration {state["iter_num"]} could not be written '
                 f'({problem}): earlier ones stay as they are')

    def _write_all(self, final, files, state, rng):
        """→ what went wrong, or None; the same on all processes."""
        temporary, named, entries = final.with_name(final.name + '.tmp'), {}, []
        for kind, mine in files.items():
            counts = all_gather(len(mine), self.group)
            for i, file in enumerate(mine, start=1 + sum(counts[:self.rank])):
                named[f'{kind}-{i:05d}-of-{sum(counts):05d}.safetensors'] = file

        def begin():
            clean_up(self.out_dir)
            temporary.mkdir(parents=True)

        def publish():  # the rename makes it valid: all of it is on the disk by then
            chunks = sorted((chunk for mine, _ in shares for chunk in mine), key=itemgetter('name'))
            write_state(temporary, {**state, 'rng': [rng for _, rng in shares], 'chunks': chunks})
            sync(temporary)
            os.rename(temporary, final)
            sync(final.parent)
            prune(self.out_dir, self.keep)

        if problem := self._problem_of(begin, on_rank_0=True) \
                or self._problem_of(lambda: write_files(temporary, named, entries)):
            return problem
        shares = all_gather((entries, rng), self.group)
        return self._problem_of(publish, on_rank_0=True)

    def _problem_of(self, action, on_rank_0=False):
        """Do it on all processes, or on rank 0 → None, or the first process's problem, on all."""
        problem = None
        if self.rank == 0 or not on_rank_0:
            try:
                action()
            except (OSError, SafetensorError, UserError) as e:
                problem = str(e)
        return next((p for p in all_gather(problem, self.group) if p), None)


def optimizer_tensors(optimizer, model):
    """{'<parameter>/<state>': tensor} of all the optimizer's states."""
    return {f'{name}/{key}': torch.as_tensor(value) for name, p in model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items() if value is not None}


def my_files(tensors, rank, size):
    """→ [{key: rows}], the files that this process writes, each of at most CHUNK_BYTES. It writes
    its own rows of a sharded tensor, and its share of a tensor that all processes have."""
    files, room = [], 0
    for name, tensor in tensors.items():
        rows = tensor if tensor.dim() else tensor[None]
        if is_sharded(tensor):
            mine, first = local_rows(tensor)
        else:
            first, count = held_rows(len(rows), rank, size)
            mine = rows[first:first + count]
        step = max(1, CHUNK_BYTES // max(1, mine[:1].nbytes))  # rows that fit into a file
        for a in range(0, len(mine), step):
            part = mine[a:a + step]
            if not files or part.nbytes > room:
                files.append({})
                room = CHUNK_BYTES
            room -= part.nbytes
            if len(part) == len(rows):
                files[-1][name] = part.reshape(tensor.shape)
            else:
                files[-1][f'{name}[{first + a}:{first + a + len(part)}]'] = part
    return files


def write_files(folder, named, entries):
    """Write {name: {key: tensor}}, one file at a time; add what state.json says of each."""
    for name, tensors in named.items():
        path = folder / name
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, path)
        os.chmod(path, folder.stat().st_mode & 0o666)  # as readable as other files
        sync(path)
        entries.append({'name': name, 'kind': name.partition('-')[0],
                        'bytes': path.stat().st_size, 'sha256': sha256_of(path)})


def write_state(path, state):
    """Write state.json with its own checksum."""
    write_json(path / 'state.json', {**state, 'sha256': checksum(state)})


def checksum(state):
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def prune(out_dir, keep):
    """Remove all checkpoints but the `keep` newest and the best."""
    whole = list(intact(checkpoint_paths(out_dir)))  # damaged ones are not counted
    best = min(whole, key=lambda found: found.val_loss)
    for path in (found.path for found in whole[keep:] if found is not best):
        # Renamed first: a directory that is half removed must not look complete.
        os.rename(path, path.with_name(path.name + '.tmp'))
    clean_up(out_dir)


def clean_up(out_dir):
    """Remove what was left half written or half removed."""
    for path in Path(out_dir, 'checkpoints').glob('*.tmp'):
        shutil.rmtree(path, ignore_errors=True)
