"""The model and the run, on disk and back.

    out_dir/checkpoints/iter-00002000/
        state.json                              counters, config, tokenizer, RNG, list of chunks
        model-00001-of-00002.safetensors        weights, under nanoGPT's names
        optimizer-00001-of-00004.safetensors    '<parameter>/<state>', as 'lm_head.weight/exp_avg'

A directory is written under a temporary name, synced, then renamed: one with its final name is
complete. No file here can run code when it is read: tensors are safetensors, the rest is JSON.
"""

import base64
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dataloader import sha256_of
from model import GPT, GPTConfig
from runtime import UserError

FORMAT_VERSION = 1
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
        """Copy the weights into `model`, chunk by chunk. Raises UserError on a misfit."""
        wanted = dict(model.named_parameters())
        for name, tensor in self._tensors('model'):
            if name not in wanted or wanted[name].shape != tensor.shape:
                have = tuple(wanted[name].shape) if name in wanted else 'absent'
                raise UserError(f'{self.path}: {name} is {tuple(tensor.shape)} there and {have} in '
                                'this model: it holds another architecture')
            wanted.pop(name).copy_(tensor)
        if wanted:
            raise UserError(f'{self.path}: lacks {", ".join(list(wanted)[:3])}: it holds another '
                            'architecture')

    def load_optimizer(self, optimizer, model):
        """Put the saved state into `optimizer`, which was made for `model`."""
        names = {name: i for i, name in enumerate(optimizer_names(optimizer, model))}
        state = {i: {} for i in names.values()}
        for name, tensor in self._tensors('optimizer'):
            parameter, _, key = name.partition('/')
            state[names[parameter]][key] = tensor
        # Learning rate, betas and decay are the config's to say: only the moments come back.
        groups = optimizer.state_dict()['param_groups']
        optimizer.load_state_dict({'state': {i: s for i, s in state.items() if s},
                                   'param_groups': groups})

    def _tensors(self, kind):
        """Yield (name, tensor) of all chunks of a kind, each chunk's checksum verified first."""
        for chunk in self.state['chunks']:
            if chunk['kind'] != kind:
                continue
            path = self.path / chunk['name']
            try:
                if sha256_of(path) != chunk['sha256']:
                    raise UserError(f'{path} is damaged (its checksum differs): use another '
                                    'checkpoint with --checkpoint=ITER')
                with safe_open(path, framework='pt') as f:
                    for name in f.keys():  # noqa: SIM118  (it is no dict)
                        yield name, f.get_tensor(name)
            except (OSError, SafetensorError) as e:
                raise UserError(f'{path} cannot be read: {e}') from None


# -----------------------------------------------------------------------------
# writing


def save(out_dir, model, optimizer, state, chunk_mb=512, keep=1):
    """Write a checkpoint of `model` and `optimizer`; then remove all but the `keep` newest and
    the best.

    state: what else the run needs, as JSON: at least 'iter_num'; 'val_loss' decides on the best
    → the Checkpoint. Raises OSError where the disk refuses; earlier checkpoints stay then.
    """
    final = Path(out_dir, 'checkpoints', f'iter-{state["iter_num"]:08d}')
    temporary = final.with_name(final.name + '.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    chunks = []
    for kind, tensors in (('model', dict(model.named_parameters())),
                          ('optimizer', optimizer_tensors(optimizer, model))):
        chunks += write_chunks(temporary, kind, tensors, chunk_mb * MEGABYTE)
    state = {'format_version': FORMAT_VERSION, **state, 'model': asdict(model.config),
             'chunks': chunks}
    with open(temporary / 'state.json', 'w', encoding='utf-8') as f:
        json.dump(state, f, indent=1)
    for path in temporary.iterdir():
        sync(path)
    sync(temporary)
    if final.exists():
        replaced = final.with_name(final.name + '.old.tmp')
        os.rename(final, replaced)
        os.rename(temporary, final)
        shutil.rmtree(replaced)
    else:
        os.rename(temporary, final)
    sync(final.parent)
    prune(out_dir, keep)
    return Checkpoint(final, state)


def write_chunks(folder, kind, tensors, chunk_bytes):
    """Write `tensors` to files no larger than `chunk_bytes` → their entries for state.json.

    A single tensor that is larger gets a file of its own.
    """
    groups, size = [{}], 0
    for name, tensor in tensors.items():
        needed = tensor.nbytes + len(name) + 120  # with its place in the file's header
        if groups[-1] and size + needed > chunk_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += needed
    entries = []
    for i, group in enumerate(groups, start=1):
        path = folder / f'{kind}-{i:05d}-of-{len(groups):05d}.safetensors'
        save_file({name: t.detach().cpu().contiguous() for name, t in group.items()}, path)
        entries.append({'name': path.name, 'kind': kind, 'bytes': path.stat().st_size,
                        'sha256': sha256_of(path)})
    return entries


def optimizer_names(optimizer, model):
    """Parameter names in the order in which the optimizer numbers them."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group['params']]


def optimizer_tensors(optimizer, model):
    """{'<parameter>/<state>': tensor} of all that the optimizer remembers."""
    names = optimizer_names(optimizer, model)
    return {f'{names[i]}/{key}': value
            for i, state in optimizer.state_dict()['state'].items() for key, value in state.items()}


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
    found = list_checkpoints(out_dir)
    spared = {checkpoint.path for checkpoint in [*found[-keep:], best_of(found)]}
    for checkpoint in found:
        if checkpoint.path not in spared:
            shutil.rmtree(checkpoint.path)


# -----------------------------------------------------------------------------
# finding


def list_checkpoints(out_dir):
    """The complete checkpoints of a run, oldest first."""
    found = []
    for path in sorted(Path(out_dir, 'checkpoints').glob('iter-*')):
        if path.suffix != '.tmp':
            found.append(open_checkpoint(path))
    return found


def open_checkpoint(path):
    """Read one directory's state.json. Raises UserError."""
    try:
        state = json.loads((path / 'state.json').read_text(encoding='utf-8'))
        version = state['format_version']
        if version != FORMAT_VERSION:
            raise UserError(f'{path}: format version {version}, but this plainGPT reads version '
                            f'{FORMAT_VERSION}')
        known = {f.name for f in fields(GPTConfig)}
        if set(state['model']) != known or not isinstance(state['iter_num'], int):
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

    Raises UserError where there is none.
    """
    found = list_checkpoints(out_dir)
    if not found:
        raise UserError(f'{out_dir}: no checkpoint there; train one first, or name the right '
                        'folder with --out_dir')
    if which == 'latest':
        return found[-1]
    if which == 'best':
        return best_of(found)
    for checkpoint in found:
        if str(checkpoint.iter_num) == str(which):
            return checkpoint
    there = ', '.join(str(checkpoint.iter_num) for checkpoint in found)
    raise UserError(f'--checkpoint={which}: {out_dir} has latest, best and {there}')


def set_aside(out_dir):
    """Move an earlier run's checkpoints and metrics to out_dir/old-001 (002, …) → that folder, or
    None where there is no earlier run. A run from scratch loses nothing of the one before."""
    remains = [path for name in ('checkpoints', 'metrics.jsonl')
               if (path := Path(out_dir, name)).exists()]
    if not remains:
        return None
    n = 1
    while (aside := Path(out_dir, f'old-{n:03d}')).exists():
        n += 1
    aside.mkdir()
    for path in remains:
        path.rename(aside / path.name)
    return aside


# -----------------------------------------------------------------------------
# random numbers


def rng_state(device):
    """The state of torch's generators, as JSON."""
    state = {'cpu': torch.get_rng_state()}
    if device.type == 'cuda':
        state['cuda'] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(t.numpy().tobytes()).decode() for name, t in state.items()}


def set_rng_state(state, device):
    """Continue the random numbers from where `rng_state` was taken."""
    tensors = {name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
               for name, text in state.items()}
    torch.set_rng_state(tensors['cpu'])
    if device.type == 'cuda' and 'cuda' in tensors:
        torch.cuda.set_rng_state(tensors['cuda'], device)
