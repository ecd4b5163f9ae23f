"""The model and the run, on disk and back.

    out_dir/checkpoints/iter-00002000/
        state.json                              counters, config, tokenizer, RNG, list of chunks
        state.json.sha256                       its checksum; it holds those of the chunks
        model-00001-of-00002.safetensors        weights, under nanoGPT's names
        optimizer-00001-of-00004.safetensors    '<parameter>/<state>', as 'lm_head.weight/exp_avg'

A directory is written under a temporary name, synced, then renamed: one with its final name is
complete. No file here can run code when it is read: tensors are safetensors, the rest is JSON.
"""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import tokenizer as tokenizers
from dataset import folder_of, open_dataset, sha256_of
from errors import UserError
from interchange import tokenizer_json
from model import GPT, GPTConfig
from runtime import all_gather, host_group

FORMAT_VERSION = 1
LOGS = ('metrics.jsonl', 'anomalies.jsonl', 'run.json', 'report.md', 'loss.png', 'tensorboard')
MEGABYTE = 10**6


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
            if tensor.dim() == 0:  # the number of steps, which fused optimizers keep on the device
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
        description = open_dataset(folder_of(tokenizer)).tokenizer_json()
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
# writing


class Saver:
    """Writes a run's checkpoints; each process writes its share of the chunks.

    background: copy the tensors and write while training goes on; the next save waits for it
    """

    def __init__(self, out_dir, *, rank=0, world_size=1, chunk_mb=512, keep=1, background=False):
        self.out_dir = Path(out_dir)
        self.rank = rank
        self.world_size = world_size
        self.chunk_bytes = chunk_mb * MEGABYTE
        self.keep = keep
        self.background = background
        self.group = host_group()  # its own: a save in the background must not meet other traffic
        self.thread = None
        self.failed = False  # the last save came to nothing

    def save(self, model, optimizer, state, rng):
        """Write a checkpoint; then remove all but the `keep` newest and the best.

        state: JSON, the same on all processes, with at least 'iter_num'; 'val_loss' decides on
        the best. rng: rng_state of this process.
        A disk that refuses is tried once more and then reported: training is worth more than a
        checkpoint, and the earlier ones stay. `failed` says how the last save ended.
        """
        self.wait()
        state = {'format_version': FORMAT_VERSION, **state, 'model': asdict(model.config)}
        chunks = plan_chunks('model', dict(model.named_parameters()), self.chunk_bytes) \
            + plan_chunks('optimizer', optimizer_tensors(optimizer, model), self.chunk_bytes)
        mine = chunks[self.rank::self.world_size]
        if self.background:
            mine = [(name, {key: t.detach().to('cpu', copy=True) for key, t in tensors.items()})
                    for name, tensors in mine]
            self.thread = threading.Thread(target=self._save, args=(mine, state, rng))
            self.thread.start()
        else:
            self._save(mine, state, rng)

    def wait(self):
        """Wait for a save in the background."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def _save(self, mine, state, rng):
        self.failed = True
        for what_now in ('trying again', 'training goes on, and the earlier checkpoints stay'):
            problem = self._try(mine, state, rng)
            if problem is None:
                self.failed = False
                self._together(lambda: prune(self.out_dir, self.keep), on_rank_0=True)
                return
            if self.rank == 0:
                clean_up(self.out_dir)  # or the remains would fill a full disk further
                print(f'warning: the checkpoint of iteration {state["iter_num"]} could not be '
                      f'written ({problem}): {what_now}', file=sys.stderr, flush=True)

    def _try(self, mine, state, rng):
        """One attempt to write it → None, or what went wrong; the same on all processes."""
        final = self.out_dir / 'checkpoints' / f'iter-{state["iter_num"]:08d}'
        temporary = final.with_name(final.name + '.tmp')
        if problem := self._together(lambda: start_directory(temporary), on_rank_0=True):
            return problem
        entries = []
        if problem := self._together(lambda: entries.extend(write_chunks(temporary, mine))):
            return problem
        shares = all_gather((entries, rng), self.group)
        state = {**state, 'rng': [rng for _, rng in shares],
                 'chunks': sorted((entry for share, _ in shares for entry in share),
                                  key=lambda entry: entry['name'])}
        return self._together(lambda: self._finish(temporary, final, state), on_rank_0=True)

    def _together(self, action, on_rank_0=False):
        """Do it on all processes, or on rank 0 → None, or the first process's problem."""
        problem = None
        if self.rank == 0 or not on_rank_0:
            try:
                action()
            except (OSError, SafetensorError) as e:
                problem = str(e)
        return next((p for p in all_gather(problem, self.group) if p), None)

    def _finish(self, temporary, final, state):
        text = json.dumps(state, indent=1).encode()
        write_synced(temporary / 'state.json', text)
        write_synced(temporary / 'state.json.sha256', hashlib.sha256(text).hexdigest().encode())
        sync(temporary)
        os.rename(temporary, final)
        sync(final.parent)


def start_directory(path):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def plan_chunks(kind, tensors, limit):
    """Share `tensors` out among files of at most `limit` bytes → [(file name, {key: tensor})].

    A tensor too large for a file goes into several, by rows, as 'name[first:last]'.
    """
    groups, size = [{}], 0
    for name, tensor in tensors.items():
        for key, part in row_parts(name, tensor, limit - 1000):
            needed = part.nbytes + len(key) + 120  # with its place in the file's header
            if groups[-1] and size + needed > limit:
                groups.append({})
                size = 0
            groups[-1][key] = part
            size += needed
    return [(f'{kind}-{i:05d}-of-{len(groups):05d}.safetensors', group)
            for i, group in enumerate(groups, start=1)]


def row_parts(name, tensor, limit):
    """Yield (name, tensor), or its rows in parts of at most `limit` bytes."""
    if tensor.nbytes <= limit:
        yield name, tensor
        return
    rows = max(1, limit * len(tensor) // tensor.nbytes)
    for a in range(0, len(tensor), rows):
        b = min(a + rows, len(tensor))
        yield f'{name}[{a}:{b}]', tensor[a:b]


def write_chunks(folder, chunks):
    """Write files as plan_chunks shared them out, one at a time → their entries for state.json."""
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
    return {f'{name}/{key}': value for name, p in model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items()}


def write_synced(path, data):
    path.write_bytes(data)
    sync(path)


def sync(path):
    """Make the disk have it, so that a rename never points at a file that a crash emptied."""
    if os.name == 'nt' and path.is_dir():
        return  # Windows cannot sync a directory
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prune(out_dir, keep):
    """Remove all checkpoints but the `keep` newest and the best."""
    found = readable(out_dir)
    spared = {checkpoint.path for checkpoint in [*found[-keep:], best_of(found)]}
    for checkpoint in found:
        if checkpoint.path not in spared:
            # First the name, at once: a directory half removed must not look complete.
            gone = checkpoint.path.with_name(checkpoint.path.name + '.tmp')
            os.rename(checkpoint.path, gone)
            shutil.rmtree(gone)


# -----------------------------------------------------------------------------
# finding


def checkpoint_paths(out_dir):
    """The complete checkpoint directories of a run, oldest first."""
    found = [path for path in Path(out_dir, 'checkpoints').glob('iter-*')
             if re.fullmatch(r'iter-\d+', path.name) and path.is_dir()]
    return sorted(found, key=iter_of)


def iter_of(path):
    return int(path.name.removeprefix('iter-'))


def readable(out_dir):
    """The checkpoints of a run whose state.json is intact, oldest first."""
    found = []
    for path in checkpoint_paths(out_dir):
        with suppress(UserError):
            found.append(open_checkpoint(path))
    return found


def open_checkpoint(path):
    """Read one directory's state.json. Raises UserError."""
    try:
        text = (path / 'state.json').read_bytes()
        if hashlib.sha256(text).hexdigest().encode() != (path / 'state.json.sha256').read_bytes():
            raise ValueError('its checksum is not what was written')
        state = json.loads(text)
        if state['format_version'] != FORMAT_VERSION:
            raise UserError(f'{path}: format version {state["format_version"]}, but this plainGPT '
                            f'reads version {FORMAT_VERSION}')
        if set(state['model']) != {field.name for field in fields(GPTConfig)}:
            raise ValueError('it describes no GPT of ours')
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{path}/state.json is damaged ({e}): use another checkpoint with '
                        '--checkpoint=ITER, or remove the directory') from None
    return Checkpoint(path, state)


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
        return best_of(readable(out_dir) or [open_checkpoint(paths[-1])])
    numbers = [iter_of(path) for path in paths]
    if str(which).isdecimal() and int(which) in numbers:
        return open_checkpoint(paths[numbers.index(int(which))])
    raise UserError(f'--checkpoint={which}: {out_dir} has latest, best and '
                    f'{", ".join(map(str, numbers))}')


def newest_valid(out_dir):
    """→ (the newest checkpoint whose every byte is as written, or None; what is wrong with those
    after it, a line each)."""
    problems = []
    for path in reversed(checkpoint_paths(out_dir)):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify()
            return checkpoint, problems
        except UserError as problem:
            problems.append(str(problem).partition(': use')[0])
    return None, problems


def clean_up(out_dir):
    """Remove what a crash left half written or half removed."""
    for path in Path(out_dir, 'checkpoints').glob('*.tmp'):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(out_dir, after=-1):
    """Move the checkpoints past iteration `after` to out_dir/old-001 (002, …), and the logs of a
    run that is begun anew → that folder, or None where there is nothing to move. So a run that
    starts, or goes back, loses nothing of the one before."""
    out_dir = Path(out_dir)
    remains = [path for path in checkpoint_paths(out_dir) if iter_of(path) > after]
    if after < 0:
        remains += [out_dir / name for name in LOGS if (out_dir / name).exists()]
    if not remains:
        return None
    n = 1
    while (aside := out_dir / f'old-{n:03d}').exists():
        n += 1
    for path in remains:
        target = aside / path.relative_to(out_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


# -----------------------------------------------------------------------------
# random numbers


def rng_state(device):
    """The state of torch's generators, as JSON."""
    state = {'cpu': torch.get_rng_state()}
    if device.type == 'cuda':
        state['cuda'] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(t.numpy().tobytes()).decode() for name, t in state.items()}


def set_rng_state(states, rank, device):
    """Continue the random numbers of `rank` from where `rng_state` was taken; a rank that the
    saved run did not have keeps those it was seeded with."""
    if rank >= len(states):
        return
    tensors = {name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
               for name, text in states[rank].items()}
    torch.set_rng_state(tensors['cpu'])
    if device.type == 'cuda' and 'cuda' in tensors:
        torch.cuda.set_rng_state(tensors['cuda'], device)
