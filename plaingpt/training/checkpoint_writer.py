"""The model and the run → a checkpoint directory, by all processes together."""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from plaingpt.monitoring.run_record import read_rows, trim_rows
from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import (
    all_gather,
    gloo_group,
    is_sharded,
    local_rows,
)
from plaingpt.system.errors import UserError, warn
from plaingpt.system.files import sha256_of, sync, write_atomically
from plaingpt.training.checkpoint import (
    FORMAT_VERSION,
    archives,
    best_of,
    checkpoint_paths,
    iteration_of,
    readable_checkpoints,
)
from plaingpt.weights import not_finite

CHUNK_BYTES = 512 * 10**6  # no file of a checkpoint is larger
KEPT = 2  # of the newest checkpoints, beside the best
LOGS = ('metrics.jsonl', 'anomalies.jsonl', 'run.json', 'report.md', 'loss.png',
        'loss-details.png', 'film.jsonl', 'film', 'film.html', 'tensorboard')


class Saver:
    """Writes a run's checkpoints; each process writes its share of the chunks.

    background: copy the tensors and write while training continues; the next save waits for it
    alone: this process saves for itself, to see whether it can, and warns of nothing
    """

    def __init__(self, out_dir, *, rank=0, world_size=1, keep=1, background=False, alone=False):
        self.out_dir = Path(out_dir)
        self.rank = rank
        self.world_size = world_size
        self.keep = keep
        self.background = background
        self.group = None if alone else gloo_group(own=background)
        self.alone = alone
        self.writer = ThreadPoolExecutor(1, thread_name_prefix='saver') if background else None
        self.pending = None  # the save in the background
        self.copies = {}  # what it writes: {key: tensor}
        self.failed = False  # the last save came to nothing
        self.check_folder = lambda: None  # raises UserError where out_dir is another run's by now

    def save(self, model, optimizer, state, rng):
        """Write a checkpoint; then remove all but the `keep` newest and the best.

        state: JSON, the same on all processes, with at least 'iter_num'; 'val_loss' decides on
        the best. rng: rng_state of this process.
        A disk that refuses is tried once more and then reported: training is worth more than a
        checkpoint, and the earlier ones stay. `failed` says how the last save ended.
        Raises UserError, and writes and removes nothing, where out_dir was removed or replaced or
        where a weight is not finite.
        """
        self.wait()
        for check in (self.check_folder, lambda: check_weights(model, state['iter_num'])):
            if problem := self._first_problem(check):
                raise UserError(problem)
        state = {'format_version': FORMAT_VERSION, **state, 'model': asdict(model.config)}
        mine = self._my_files('model', dict(model.named_parameters())) \
            + self._my_files('optimizer', optimizer_tensors(optimizer, model))
        if self.background:
            mine = self._copied(mine)
            self.pending = self.writer.submit(self._save, mine, state, rng)
        else:
            self._save(mine, state, rng)

    def _my_files(self, kind, tensors):
        """This process's files of the model or the optimizer → [(file name, {key: tensor})]. Files
        of an unsharded model are dealt out to the processes in turn. Of a sharded one each process
        writes its own rows, and rank 0 the tensors that are not sharded."""
        if not any(map(is_sharded, tensors.values())):
            files = pack(tensors, CHUNK_BYTES)
            return named(kind, files)[self.rank::self.world_size]
        mine = {name: tensor for name, tensor in tensors.items()
                if is_sharded(tensor) or self.rank == 0}
        files = pack(mine, CHUNK_BYTES) if mine else []
        counts = all_gather(len(files), self.group)
        return named(kind, files, before=sum(counts[:self.rank]), of=sum(counts))

    def _copied(self, files):
        """[(file name, {key: tensor})] → the same in host memory, which is kept from save to save.
        From a GPU, pages that stay in place (pinned) take several times as much a second."""
        tensors = {key: t.detach() for _, file in files for key, t in file.items()}
        for key, t in tensors.items():
            if key not in self.copies:
                self.copies[key] = torch.empty_like(t, device='cpu', pin_memory=t.is_cuda)
            self.copies[key].copy_(t, non_blocking=True)
        for device in {t.device for t in tensors.values()}:
            synchronize(device)
        return [(name, {key: self.copies[key] for key in file}) for name, file in files]

    def wait(self):
        """Wait for a save in the background. Raises what it raised."""
        if self.pending:
            pending, self.pending = self.pending, None
            pending.result()

    def update(self, state):
        """Change entries of the checkpoint of state['iter_num'], which is complete. Raises
        UserError where out_dir was removed or replaced."""
        if problem := self._first_problem(self.check_folder):
            raise UserError(problem)
        path = self._path(state['iter_num'])
        problem = self._first_problem(lambda: replace_entries(path, state), on_rank_0=True)
        if problem:
            self._warn(f'{path}/state.json could not be written ({problem}): it does not tell of '
                       'its evaluation')

    def _path(self, iter_num):
        return self.out_dir / 'checkpoints' / f'iter-{iter_num:08d}'

    def _save(self, mine, state, rng):
        self.failed = True
        for what_now in ('trying again', 'earlier ones stay as they are'):
            problem = self._write_once(mine, state, rng)
            if problem is None:
                self.failed = False
                problem = self._first_problem(
                    lambda: prune(self.out_dir, self.keep, state['iter_num']), on_rank_0=True)
                if problem:
                    self._warn(f'an earlier checkpoint could not be removed ({problem}): '
                               'remove it yourself, or the disk fills')
                return
            if self.rank == 0:
                clean_up(self.out_dir)  # or the remains would fill a full disk further
            self._warn(f'the checkpoint of iteration {state["iter_num"]} could not be written '
                       f'({problem}): {what_now}')

    def _warn(self, line):
        """Warn once for all processes."""
        if self.rank == 0 and not self.alone:
            warn(line)

    def _write_once(self, mine, state, rng):
        """One attempt to write it → None, or what went wrong; the same on all processes."""
        final = self._path(state['iter_num'])
        temporary = final.with_name(final.name + '.tmp')
        if problem := self._first_problem(lambda: start_directory(temporary), on_rank_0=True):
            return problem
        entries = []
        if problem := self._first_problem(lambda: entries.extend(write_chunks(temporary, mine))):
            return problem
        shares = all_gather((entries, rng), self.group)
        state = {**state, 'rng': [rng for _, rng in shares],
                 'chunks': sorted((entry for share, _ in shares for entry in share),
                                  key=lambda entry: entry['name'])}
        return self._first_problem(lambda: self._publish(temporary, final, state), on_rank_0=True)

    def _first_problem(self, action, on_rank_0=False):
        """Do it on all processes, or on rank 0 → None, or the first process's problem."""
        problem = None
        if self.rank == 0 or not on_rank_0:
            try:
                action()
            except (OSError, SafetensorError, UserError) as e:
                problem = str(e)
        return next((p for p in all_gather(problem, self.group) if p), None)

    def _publish(self, temporary, final, state):
        """The rename makes the checkpoint valid: all of it is on the disk by then."""
        text = json.dumps(state, indent=1).encode()
        write_atomically(temporary / 'state.json', text)
        write_atomically(temporary / 'state.json.sha256', hashlib.sha256(text).hexdigest().encode())
        sync(temporary)
        os.rename(temporary, final)
        sync(final.parent)


def check_weights(model, iter_num):
    """Raise UserError that names weights of this process which are NaN or infinite."""
    if broken := not_finite(model):
        raise UserError(f'{broken[0]}{f" and {len(broken) - 1} more" * (len(broken) > 1)}: not '
                        f'finite after iteration {iter_num}, which is not saved; the earlier '
                        'checkpoints stay: continue from one with --init_from=resume and a lower '
                        '--learning_rate')


def replace_entries(path, changes):
    """Change entries of a checkpoint's state.json. It is valid all the time: while it changes, its
    checksum file has two lines."""
    before = (path / 'state.json').read_bytes()
    after = json.dumps({**json.loads(before), **changes}, indent=1).encode()
    old, new = (hashlib.sha256(text).hexdigest() for text in (before, after))
    write_atomically(path / 'state.json.sha256', f'{old}\n{new}')
    write_atomically(path / 'state.json', after)
    write_atomically(path / 'state.json.sha256', new)


def start_directory(path):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def pack(tensors, limit):
    """Share tensors, of those that are sharded this process's rows, out among files of at most
    `limit` bytes → [{key: tensor}].

    One that is too large for a file goes into several, by rows, as 'name[first:last]'.
    """
    files, size = [{}], 0
    for name, tensor in tensors.items():
        for key, part in row_parts(name, tensor, limit - 1000):
            needed = part.nbytes + len(key) + 120  # with its place in the file's header
            if files[-1] and size + needed > limit:
                files.append({})
                size = 0
            files[-1][key] = part
            size += needed
    return files


def named(kind, files, before=0, of=None):
    """→ [(file name, {key: tensor})]. before: files of processes with a lower rank; of: all"""
    of = of or len(files)
    return [(f'{kind}-{i:05d}-of-{of:05d}.safetensors', tensors)
            for i, tensors in enumerate(files, start=before + 1)]


def row_parts(name, tensor, limit):
    """Yield (name, tensor), or its rows in parts of at most `limit` bytes."""
    if tensor.nbytes <= limit and not is_sharded(tensor):
        yield name, tensor
        return
    mine, first = local_rows(tensor)
    rows = max(1, limit * len(tensor) // tensor.nbytes)
    for a in range(0, len(mine), rows):
        part = mine[a:a + rows]
        yield f'{name}[{first + a}:{first + a + len(part)}]', part


def write_chunks(folder, chunks):
    """Write files, one at a time → their entries for state.json."""
    entries = []
    for name, tensors in chunks:
        path = folder / name
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, path)
        os.chmod(path, folder.stat().st_mode & 0o666)  # as readable as other files
        sync(path)
        entries.append({'name': name, 'kind': name.partition('-')[0],
                        'bytes': path.stat().st_size, 'sha256': sha256_of(path)})
    return entries


def optimizer_tensors(optimizer, model):
    """{'<parameter>/<state>': tensor} of all that the optimizer remembers."""
    return {f'{name}/{key}': torch.as_tensor(value) for name, p in model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items() if value is not None}


def prune(out_dir, keep, written):
    """Remove all checkpoints but the `keep` newest, the best, and that of iteration `written`."""
    found = readable_checkpoints(out_dir)
    spared = {checkpoint.path for checkpoint in (*found[-keep:], best_of(found))} if found else ()
    for checkpoint in found:
        if checkpoint.path not in spared and checkpoint.iter_num != written:
            # First the name, at once: a directory half removed must not look complete.
            gone = checkpoint.path.with_name(checkpoint.path.name + '.tmp')
            os.rename(checkpoint.path, gone)
            if gone.is_symlink():
                gone.unlink()
            else:
                shutil.rmtree(gone)


def clean_up(out_dir):
    """Remove what a crash left half written or half removed."""
    for path in Path(out_dir, 'checkpoints').glob('*.tmp'):
        shutil.rmtree(path, ignore_errors=True)


def archive_previous_run(out_dir, after=-1):
    """Keep what a run that starts, or goes back to iteration `after`, would write over: later
    checkpoints move to out_dir/old-001 (002, …) and the logs with them, or copies of these where
    the run goes on → that folder, None where there is nothing to keep. What a crash left half
    written goes. Raises UserError."""
    out_dir = Path(out_dir)
    clean_up(out_dir)
    later = [path for path in checkpoint_paths(out_dir) if iteration_of(path) > after]
    logs = [out_dir / name for name in LOGS if (out_dir / name).exists()]
    if not later and (after >= 0 or not logs):
        return None
    number = int(existing[-1].name[4:]) + 1 if (existing := archives(out_dir)) else 1
    archive = out_dir / f'old-{number:03d}'
    try:
        (archive / 'checkpoints').mkdir(parents=True)
        for path in logs:
            if after < 0:
                shutil.move(path, archive / path.name)
            elif path.is_file():  # event files are written anew
                shutil.copy2(path, archive / path.name)
        for path in later:
            shutil.move(path, archive / 'checkpoints' / path.name)
    except OSError as e:
        raise UserError(f'{archive}: what this run would overwrite cannot be kept there '
                        f'({e.strerror}): choose another --out_dir') from None
    return archive


def trim_logs(out_dir, iter_num, evaluated):
    """Let the logs end at the iteration of a checkpoint. evaluated: it has its evaluation;
    otherwise that is logged anew."""
    for name in LOGS:
        path = Path(out_dir, name)
        if path.suffix == '.jsonl' and path.exists():
            if name == 'metrics.jsonl' and path.stat().st_size \
                    and not read_rows(path):
                shutil.move(path, path.with_suffix('.damaged'))
                warn(f'{path} holds no row of a run: it is kept as {path.stem}.damaged, and a new '
                     'one begins')
                continue
            trim_rows(path, iter_num, evaluated)
