"""Checkpoints: find, verify, load and save them.

    out_dir/checkpoints/iter-00002000/
        state.json                              counters, config, tokenizer, RNG, list of chunks,
                                                and checksums of the chunks and of itself
        model-00001-of-00002.safetensors        weights, under nanoGPT's names
        optimizer-00001-of-00004.safetensors    '<parameter>/<state>', e.g. 'lm_head.weight/exp_avg'

Each process writes some rows of each tensor, as 'name[first:end]' if not all of them, and can read
any rows that other processes wrote. A directory is written under a temporary name, synced, then
renamed: one with its final name is complete. Loading a checkpoint cannot run code: tensors are
safetensors, everything else is JSON.
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
from plaingpt.core.weights import (
    check_finite,
    copy_rows,
    empty_state,
    init_new_tokens,
    model_code,
    warn_if_edited,
)
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
from plaingpt.system.files import (
    read_json,
    refuse_unknown,
    sha256_of,
    sync,
    with_current_names,
    write_json,
)
from plaingpt.system.formatting import quoted

FORMAT_VERSION = 1
ENTRY = re.compile(r'(.*?)(?:\[(\d+):(\d+)\])?')  # name, or name[first:end] for some of its rows
CHUNK_BYTES = 500 * 10**6  # tensor bytes per file, so that with its header it stays below 512 MB
KEEP_NEWEST = 2  # newest checkpoints to keep, besides the best


class CheckpointRemoved(OSError):
    """The checkpoint no longer exists: its run is still training and has replaced it."""


def unreadable(checkpoint, problem):
    """The error to raise if a file in a checkpoint directory cannot be read."""
    if checkpoint.exists() or checkpoint in checkpoint.parent.glob('*'):  # e.g. a broken link
        return UserError(problem)
    return CheckpointRemoved(f'{checkpoint} was removed while it was being read: choose another '
                             'checkpoint')


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory and the content of its state.json."""

    path: Path
    state: dict
    verified: set = field(default_factory=set, compare=False)  # kinds of chunks
    # {name: open chunk}, verified. An open chunk can be read even after its run has removed it.
    opened: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self):
        return str(self.path)

    @property
    def config(self):
        """The model's GPTConfig, with dropout turned off."""
        return GPTConfig(**{**self.state['model'], 'dropout': 0.0})

    def tokenizer_json(self):
        return self.state['tokenizer']

    def settings(self):
        """The run's {setting: value}. Raises UserError if this version does not know one."""
        from plaingpt.core.settings import TrainConfig  # sampling does not need it
        settings = with_current_names(self.state['config'])
        refuse_unknown(self.path, settings.keys() - {field.name for field in fields(TrainConfig)})
        return settings

    @property
    def iter_num(self):
        return self.state['iter_num']

    @property
    def val_loss(self):
        """Validation loss at this iteration; inf if it was not measured."""
        loss = self.state.get('val_loss')
        return math.inf if loss is None else loss

    @torch.no_grad()
    def load_into(self, model):
        """Copy the weights into a GPT of the same architecture. It may have fewer positions or more
        tokens: each new token is initialized to the mean of the old ones. If it is sharded, each
        process reads its own rows. Raises UserError if weights are damaged or do not fit."""
        warn_if_edited(self.path, self.state.get('model_code'))
        shapes, params = self._shapes('model'), dict(model.named_parameters())
        old_size, new_size = self.state['model']['vocab_size'], model.config.vocab_size
        grown = set()  # names of tensors that get rows for new tokens
        if new_size > old_size:
            grown = {name for name in params if name.endswith(VOCAB_WEIGHTS)}
        for name in [*params, *shapes]:
            first_dim = 1 if name in grown or name == 'transformer.wpe.weight' else 0
            if name not in params or name not in shapes \
                    or params[name].shape[first_dim:] != shapes[name][first_dim:]:
                raise UserError(f'{self.path}: its {name!r} does not fit this model, which has '
                                'another architecture')
        old_rows = {name: [] for name in grown}
        for name, first, rows in self._slices('model'):
            copy_rows(params[name], first, rows)
            if name in grown:
                old_rows[name].append(rows[:])
        for name, pieces in old_rows.items():
            mean = torch.cat(pieces)[:old_size].mean(0)
            init_new_tokens(params[name], mean, old_size, new_size)
        self.opened.clear()

    @torch.no_grad()
    def load_optimizer(self, optimizer, model):
        """Load the optimizer states into an optimizer built for `model`, whose hyperparameters do
        not change. Raises UserError if the states are damaged."""
        shapes, params = self._shapes('optimizer'), dict(model.named_parameters())
        for entry, first, rows in self._slices('optimizer'):
            name, _, key = entry.partition('/')
            p, state = params[name], optimizer.state[params[name]]
            if key not in state:
                state[key] = empty_state(p, shapes[entry], rows)
            copy_rows(state[key], first, rows)

    def verify(self, kinds):
        """Verify the checksums of the chunks of these kinds, once, and keep the chunks open. Raises
        UserError for a damaged chunk, and CheckpointRemoved if the directory is gone."""
        for chunk in self.state['chunks']:
            if chunk['kind'] not in set(kinds) - self.verified:
                continue
            path, sha256 = self.path / chunk['name'], None
            # An unreadable chunk counts as damaged. safe_open may raise torch's RuntimeError.
            with suppress(OSError, RuntimeError, SafetensorError):
                self.opened[chunk['name']] = safe_open(path, framework='pt')
                sha256 = sha256_of(path)
            if sha256 != chunk['sha256']:
                raise unreadable(self.path, f'{path} is damaged: its checksum does not match')
        self.verified.update(kinds)

    def _slices(self, kind):
        """Yield (name, first row, rows on disk) for the tensors of a kind, which may be stored in
        several slices. Raises UserError if a chunk is damaged."""
        self.verify([kind])
        for chunk in self.state['chunks']:
            if chunk['kind'] != kind:
                continue
            file = self.opened.get(chunk['name'])
            if file is None:
                file = safe_open(self.path / chunk['name'], framework='pt')
            for key in file.keys():  # noqa: SIM118  (it is not a dict)
                name, first, _ = ENTRY.fullmatch(key).groups()
                yield name, int(first or 0), file.get_slice(key)

    def _shapes(self, kind):
        """{name: shape} of all tensors of a kind."""
        shapes = {}
        for name, first, rows in self._slices(kind):
            shape = rows.get_shape()
            if shape:  # the number of rows is where the last slice ends
                shape[0] += first
                if name in shapes:
                    shape[0] = max(shape[0], shapes[name][0])
            shapes[name] = torch.Size(shape)
        return shapes


# -----------------------------------------------------------------------------
# finding


def find(out_dir, which='latest', kinds=()):
    """Open a run's checkpoint: 'latest', 'best' or an iteration number. Damaged checkpoints are
    skipped with a warning. kinds: chunks to verify besides state.json; they stay open, because the
    run may still be training and remove them. Raises UserError."""
    paths, problems = checkpoint_paths(out_dir), []
    if not paths:
        nanogpt = Path(out_dir) if Path(out_dir).suffix == '.pt' else Path(out_dir, 'ckpt.pt')
        if nanogpt.is_file():
            raise UserError(f"{nanogpt} is nanoGPT's: open it with --init_from={quoted(nanogpt)}")
        raise UserError(f'{out_dir}: no checkpoints found; train a model first, or name another '
                        'folder with --out_dir or a pretrained model with --init_from')
    if which not in ('latest', 'best'):
        iterations = ', '.join(str(iteration_of(path)) for path in paths)
        paths = [path for path in paths if str(iteration_of(path)) == str(which)]
        if not paths:
            raise UserError(f'--checkpoint={which}: not found; {out_dir} has latest, best and '
                            f'{iterations}')
    try:
        if which == 'best':
            ranked = sorted(intact(paths, (), problems.append),
                            key=lambda c: (-c.val_loss, c.iter_num))
            paths = [checkpoint.path for checkpoint in ranked]
        checkpoint = next(intact(paths, kinds, problems.append), None)
    except CheckpointRemoved:  # list the checkpoints again
        return find(out_dir, which, kinds)
    if checkpoint is None:
        raise UserError('\n'.join(problems) + '; choose another one with --checkpoint, or start '
                        'over with --init_from=scratch, which moves these to a subfolder')
    if launched_world().is_main:
        for problem in problems:
            warn(f'skipped a checkpoint: {problem}')
    return checkpoint


def intact(paths, kinds=(), on_problem=None):
    """Yield the undamaged checkpoints among `paths`, last path first. For each damaged one, call
    `on_problem` with a message. Raises CheckpointRemoved."""
    for path in reversed(paths):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify(kinds)
            yield checkpoint
        except UserError as problem:
            if on_problem:
                on_problem(str(problem))


def checkpoint_paths(out_dir):
    """A run's complete checkpoint directories, oldest first."""
    return sorted((path for path in Path(out_dir, 'checkpoints').glob('iter-*')
                   if path.name[5:].isdecimal()), key=iteration_of)


def iteration_of(path):
    return int(path.name.removeprefix('iter-'))


def open_checkpoint(path):
    """Open a checkpoint directory by reading its state.json. Raises UserError if state.json is
    damaged or written by a newer version, and CheckpointRemoved if the directory is gone."""
    try:
        state = read_json(path / 'state.json')
        if state.pop('sha256', None) != checksum(state):
            raise ValueError('its checksum does not match')
    except (OSError, ValueError, TypeError, AttributeError) as e:  # the last two: not an object
        raise unreadable(path, f'{path}/state.json is damaged: {e}') from None
    if state['format_version'] != FORMAT_VERSION:
        refuse_unknown(path, [f'format_version={state["format_version"]}'])
    refuse_unknown(path, state['model'].keys() - {field.name for field in fields(GPTConfig)})
    return Checkpoint(path, state)


# -----------------------------------------------------------------------------
# saving


class Saver:
    """Saves a run's checkpoints; all processes call it. background: write while training continues;
    the next save waits for it"""

    def __init__(self, out_dir, *, rank=0, world_size=1, keep=1, background=False):
        self.out_dir, self.keep = Path(out_dir), keep
        self.rank, self.world_size = rank, world_size
        self.group = gloo_group(own=background) if world_size > 1 else None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix='saver') if background else None
        self.pending = None  # the background save
        self.failed = False  # whether the last save failed
        model_code()  # remembers it now, because model.py may be edited while the run trains

    def save(self, model, optimizer, state):
        """Save a checkpoint, then remove all but the `keep` newest and the best.

        state: JSON, the same on all processes except for 'rng', the random state of this process.
        Its 'val_loss' decides what is best. If writing fails, this warns and sets `failed`.
        Raises UserError if a weight is not finite, without writing or removing anything.
        """
        self.wait()

        def check_weights():
            check_finite(model, f'after iteration {state["iter_num"]}',
                         'not saved; resume from an earlier checkpoint with --init_from=resume '
                         'and a lower --learning_rate')

        if problem := self._run_on_all(check_weights):
            raise UserError(problem)
        state = {'format_version': FORMAT_VERSION, **state, 'model': asdict(model.config),
                 'model_code': model_code()}
        rng = state.pop('rng')
        tensors = {'model': dict(model.named_parameters()),
                   'optimizer': optimizer_tensors(optimizer, model)}
        chunks = {kind: split_into_chunks(tensors[kind], self.rank, self.world_size)
                  for kind in tensors}
        if not self.writer:
            self._write(chunks, state, rng)
            return
        for chunk in [*chunks['model'], *chunks['optimizer']]:
            for key, t in chunk.items():
                # non_blocking copies from a GPU into pinned memory, which is several times as fast
                chunk[key] = t.detach().to('cpu', non_blocking=True, copy=True)
        synchronize(next(model.parameters()).device)
        self.pending = self.writer.submit(self._write, chunks, state, rng)

    def wait(self):
        """Wait for a background save. Raises the error that it raised."""
        if self.pending:
            self.pending.result()

    def _write(self, chunks, state, rng):
        final = self.out_dir / 'checkpoints' / f'iter-{state["iter_num"]:08d}'
        if all_gather(final.exists(), self.group)[0]:
            # it was saved before its evaluation: the weights exist, only the losses are new
            def update_state():
                write_state(final, {**open_checkpoint(final).state, **state})

            problem = self._run_on_rank_0(update_state)
        else:
            problem = self._write_new(final, chunks, state, rng)
        self.failed = bool(problem)
        if self.rank == 0 and problem:
            clean_up(self.out_dir)  # frees the disk space of the incomplete checkpoint
            warn(f'could not save the checkpoint of iteration {state["iter_num"]}: {problem}; '
                 'earlier checkpoints are unchanged')

    def _write_new(self, final, chunks, state, rng):
        """Write a new checkpoint. Return a problem or None, the same on all processes."""
        temporary = final.with_name(final.name + '.tmp')
        named_chunks = {}
        for kind, own_chunks in chunks.items():
            counts = all_gather(len(own_chunks), self.group)
            for i, chunk in enumerate(own_chunks, start=1 + sum(counts[:self.rank])):
                named_chunks[f'{kind}-{i:05d}-of-{sum(counts):05d}.safetensors'] = chunk

        def make_folder():
            clean_up(self.out_dir)
            temporary.mkdir(parents=True)

        own_entries = []

        def write():
            for name, chunk in named_chunks.items():
                own_entries.append(write_chunk(temporary / name, chunk))

        problem = self._run_on_rank_0(make_folder) or self._run_on_all(write)
        if problem:
            return problem
        gathered = all_gather((own_entries, rng), self.group)

        def publish():  # everything is on disk before the rename marks it as complete
            entries = []
            for rank_entries, _ in gathered:
                entries += rank_entries
            entries.sort(key=itemgetter('name'))
            write_state(temporary, {**state, 'rng': [rank_rng for _, rank_rng in gathered],
                                    'chunks': entries})
            sync(temporary)
            os.rename(temporary, final)
            sync(final.parent)
            prune(self.out_dir, self.keep)

        return self._run_on_rank_0(publish)

    def _run_on_rank_0(self, action):
        """Like _run_on_all, with the action on rank 0 only."""
        return self._run_on_all(action if self.rank == 0 else None)

    def _run_on_all(self, action):
        """Run the action on all processes. If it fails on some, return the first one's message on
        all of them, else None."""
        problem = None
        try:
            if action:
                action()
        except (OSError, SafetensorError, UserError) as e:
            problem = str(e)
        return next((each for each in all_gather(problem, self.group) if each), None)


def optimizer_tensors(optimizer, model):
    """All optimizer states as {'<parameter>/<state>': tensor}."""
    tensors = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                tensors[f'{name}/{key}'] = torch.as_tensor(value)
    return tensors


def split_into_chunks(tensors, rank, world_size):
    """Return the chunks that this process writes, each {key: rows} of at most CHUNK_BYTES. It
    writes its rows of a sharded tensor, and its share of a tensor that all processes hold."""
    chunks, bytes_left = [], 0
    for name, tensor in tensors.items():
        rows = tensor if tensor.dim() else tensor[None]
        if is_sharded(tensor):
            own_rows, first = local_rows(tensor)
        else:
            first, count = held_rows(len(rows), rank, world_size)
            own_rows = rows[first:first + count]
        rows_per_chunk = max(1, CHUNK_BYTES // max(1, own_rows[:1].nbytes))
        for a in range(0, len(own_rows), rows_per_chunk):
            piece = own_rows[a:a + rows_per_chunk]
            if not chunks or piece.nbytes > bytes_left:
                chunks.append({})
                bytes_left = CHUNK_BYTES
            bytes_left -= piece.nbytes
            if len(piece) == len(rows):
                chunks[-1][name] = piece.reshape(tensor.shape)
            else:
                chunks[-1][f'{name}[{first + a}:{first + a + len(piece)}]'] = piece
    return chunks


def write_chunk(path, tensors):
    """Write a chunk and return its entry for state.json."""
    save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, path)
    os.chmod(path, path.parent.stat().st_mode & 0o666)  # save_file makes it private
    sync(path)
    return {'name': path.name, 'kind': path.name.partition('-')[0],
            'bytes': path.stat().st_size, 'sha256': sha256_of(path)}


def write_state(path, state):
    """Write state.json, with its own checksum in it."""
    write_json(path / 'state.json', {**state, 'sha256': checksum(state)})


def checksum(state):
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def prune(out_dir, keep):
    """Remove all checkpoints but the `keep` newest and the best."""
    checkpoints = list(intact(checkpoint_paths(out_dir)))  # newest first; skips damaged ones
    best = min(checkpoints, key=lambda checkpoint: checkpoint.val_loss)
    for checkpoint in checkpoints[keep:]:
        if checkpoint is not best:
            # Rename it first: a partly removed directory must not look complete.
            os.rename(checkpoint.path, checkpoint.path.with_name(checkpoint.path.name + '.tmp'))
    clean_up(out_dir)


def clean_up(out_dir):
    """Remove checkpoint directories that are incomplete or partly removed."""
    for path in Path(out_dir, 'checkpoints').glob('*.tmp'):
        shutil.rmtree(path, ignore_errors=True)
