"""Weights from elsewhere → a GPT. Nothing that is read can run code."""

import math
import pickle
import pickletools
import re
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model import GPT, ROW_PER_TOKEN, GPTConfig
from plaingpt.data.hub import explain_hub_errors
from plaingpt.inference.hf_architectures import ARCHITECTURES
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import is_count, is_number, open_regular, read_json
from plaingpt.weights import SIZES, check_fields, check_finite, check_held

PRETRAINED = {'gpt2': dict(n_layer=12, n_head=12, n_embd=768),  # Radford et al. 2019, table 2
              'gpt2-medium': dict(n_layer=24, n_head=16, n_embd=1024),
              'gpt2-large': dict(n_layer=36, n_head=20, n_embd=1280),
              'gpt2-xl': dict(n_layer=48, n_head=25, n_embd=1600)}
OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder, so that it comes back whole
# Older versions saved masks beside the weights.
MASKS = re.compile(r'transformer\.h\.\d+\.attn\.(masked_)?bias')
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What a pickle may name: torch allows more, and some of that takes as much memory as it is told to.
PICKLED = re.compile(r'torch\.(\w+Storage|Size|device|[a-z]+\d+)|torch\._utils\._rebuild_tensor_v2|'
                     r'torch\._utils\._rebuild_parameter|collections\.OrderedDict|'
                     r'__main__\.GPTConfig')
# GPT-2 XL with its optimizer's state has 150,000 operations in its pickle.
MAX_PICKLE_BYTES, MAX_PICKLE_OPERATIONS, MAX_PICKLE_DEPTH = 2**24, 500_000, 500
FILLING = ('APPEND', 'APPENDS', 'SETITEM', 'SETITEMS', 'ADDITEMS', 'BUILD')  # operations


def load_pretrained(source, dropout=0.0):
    """'gpt2…' of the hub, a folder in the Hugging Face layout (GPT-2, Llama, Qwen3) or a ckpt.pt of
    nanoGPT or build-nanogpt, or its folder → (the GPT, what a ckpt.pt says of its training, else
    ''). Raises UserError."""
    path, trained = find_pretrained(source), ''
    if is_nanogpt(path):
        shape, weights, trained = read_nanogpt(path)
    else:
        shape, weights = read_hf(path if path.is_dir() else download_model(source))
    if odd := [name for name in weights if not name.isprintable() or len(name) > 200]:
        raise UserError(f'{source}: it holds a tensor named {odd[0][:200]!r}')
    weights = {name: w for name, w in weights.items() if not MASKS.fullmatch(name)}
    for name, w in weights.items():
        if w.dtype not in FLOATS:
            raise UserError(f'{source}: {name} is {w.dtype}, and weights are floating point')
    if shape.get('tied_head', True):
        embedding, head = weights.get('transformer.wte.weight'), weights.pop('lm_head.weight', None)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise UserError(f'{source}: its lm_head.weight is not its wte.weight, though both are '
                            'one matrix in this architecture')
    config = GPTConfig(**shape, dropout=dropout)
    check_held(config, {name: w.shape for name, w in weights.items()}, source)
    model = GPT(config)
    copy_weights(model, weights, source)
    return model, trained


def pretrained_shape(source):
    """What `load_pretrained` takes → the fields of its GPTConfig but dropout. It downloads nothing
    and reads no weights. Raises UserError."""
    path = find_pretrained(source)
    if is_nanogpt(path):
        return read_nanogpt(path)[0]
    if not path.is_dir():
        check_name(source)
        return PRETRAINED[source]
    with explain_bad_folder(path):
        return read_hf_config(path)[1]


def find_pretrained(source):
    """→ the path of the folder or of the ckpt.pt; of weights on the hub none is there."""
    path = Path(source)
    if (path / 'ckpt.pt').exists() and not (path / 'config.json').exists():
        path = path / 'ckpt.pt'
    if (path / 'state.json').exists():
        raise UserError(f'{source} holds a checkpoint of a run, whose folder must be called iter- '
                        'and its iteration, such as iter-00002000')
    if path.is_dir() and not (path / 'config.json').exists():
        raise UserError(f'{source} has no checkpoint of a run, no config.json and no ckpt.pt: name '
                        'a folder that has one of them')
    return path


def is_nanogpt(path):
    return path.suffix in ('.pt', '.pth')


@torch.no_grad()
def copy_weights(model, weights, source):
    """Copy {name: tensor}, the vocabulary without padding, into `model`. Raises UserError that
    names what is missing, unknown or of another shape."""
    wanted = without_padding(dict(model.named_parameters()), model.config.vocab_size)
    problems = [f'it has no {name}' for name in sorted(wanted.keys() - weights.keys())]
    problems += [f'it has an unknown {name}' for name in sorted(weights.keys() - wanted.keys())]
    problems += [f'{name} is {tuple(weights[name].shape)}, expected {tuple(p.shape)}'
                 for name, p in wanted.items()
                 if name in weights and p.shape != weights[name].shape]
    if problems:
        more = f' and {len(problems) - 1} more' if len(problems) > 1 else ''
        raise UserError(f'{source}: its weights do not fit its configuration: {problems[0]}{more}')
    for name, p in wanted.items():
        p.copy_(weights[name])
    check_finite(model, source)


def without_padding(weights, vocab_size):
    """Cut the rows off {name: tensor} that pad the vocabulary."""
    return {name: w[:vocab_size] if name.endswith(ROW_PER_TOKEN) else w
            for name, w in weights.items()}


@torch.no_grad()
def grow_vocabulary(model, new):
    """Give a GPT `new` tokens more, each with the mean of the rows that there are."""
    old, model.config = model.config, replace(model.config,
                                              vocab_size=model.config.vocab_size + new)
    for name, p in model.named_parameters():  # a tied matrix once
        if name.endswith(ROW_PER_TOKEN):
            rows = p[:old.vocab_size]
            p.data = torch.cat([
                rows, rows.mean(0, keepdim=True).expand(new, *rows.shape[1:]),
                rows.new_zeros(model.config.padded_vocab_size - old.vocab_size - new,
                               *rows.shape[1:])])


def read_hf(folder):
    """A folder with config.json and model.safetensors (or several files) → (the fields of
    GPTConfig but dropout, {our name: tensor}). Raises UserError."""
    with explain_bad_folder(folder):
        architecture, shape = read_hf_config(folder)
        weights = {}
        for path in sorted(folder.glob('model*.safetensors')) or [folder / 'model.safetensors']:
            open_regular(path).close()  # safetensors would wait for a FIFO
            weights |= load_file(path)
        return shape, architecture.read_weights(weights)


def read_hf_config(folder):
    """→ (the Architecture, the fields of GPTConfig but dropout), inside `explain_bad_folder`."""
    hf = read_json(folder / 'config.json')
    architecture = ARCHITECTURES.get(str(hf.get('model_type')))
    if architecture is None:
        raise ValueError(f'config.json says model_type={hf.get("model_type")!r}, and only '
                         f'{", ".join(ARCHITECTURES)} are supported')
    return architecture, architecture.read_config(hf)


@contextmanager
def explain_bad_folder(folder):
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
            SafetensorError) as e:
        what = f'config.json has no {e}' if isinstance(e, KeyError) else str(e).splitlines()[0]
        raise UserError(f'{folder}: cannot be read as a model in the Hugging Face layout '
                        f'({what[:300]})') from None


def check_name(name):
    if name not in PRETRAINED:
        raise UserError(f'{name!r} is neither a folder, nor a .pt file, nor one of '
                        f'{", ".join(PRETRAINED)}')


def download_model(name):
    """Fetch 'gpt2…' from the Hugging Face hub (or its cache) → folder. Raises UserError."""
    check_name(name)
    with needs('huggingface_hub', f'downloading {name}'):
        from huggingface_hub import snapshot_download
    with explain_hub_errors(name, 'connect to the internet once, or give a folder that holds it'):
        return Path(snapshot_download(f'openai-community/{name}',
                                      allow_patterns=['config.json', 'model.safetensors']))


def read_nanogpt(path):
    """As read_hf, for a ckpt.pt of nanoGPT or build-nanogpt, and what it says of its training, as
    text. torch's loader runs no code."""
    try:
        check_archive(path)
        # of build-nanogpt's config only the values are read, into a SimpleNamespace
        with torch.serialization.safe_globals([(SimpleNamespace, '__main__.GPTConfig')]), \
                warnings.catch_warnings(action='ignore'):  # what torch refuses is an error as well
            # mapped: the optimizer's state beside the weights is never read
            found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        nanogpt = 'model_args' in found  # build-nanogpt has GPT-2's own approximation of GELU
        args = found['model_args'] if nanogpt else vars(found['config'])
        shape = {'bias': True, **{key: args[key] for key in (*SIZES, 'bias') if key in args},
                 'mlp': 'gelu_erf' if nanogpt else 'gelu'}
        check_fields(shape)
        weights = {re.sub(r'^(_orig_mod\.|module\.)*', '', name): w
                   for name, w in found['model'].items()}
        check_storages(weights, path.stat().st_size)
        if shape['vocab_size'] == 50304:  # GPT-2's 50,257 and padding, which no text contains
            shape['vocab_size'] = 50257
            weights = without_padding(weights, 50257)
        trained = describe_training(found.get('iter_num', found.get('step')),
                                    found.get('best_val_loss', found.get('val_loss')))
    except pickle.UnpicklingError as e:
        what = re.search(r'GLOBAL (\S+)', str(e))
        raise UserError(f'{path}: refused: it holds {what[1] if what else "more than tensors"}, '
                        'which could run code when loaded; nothing in it was run') from None
    except (FileNotFoundError, PermissionError) as e:
        raise UserError(f'{path}: {e.strerror}') from None
    # torch's loader raises many kinds of errors on a file that is not what it expects.
    except Exception as e:
        raise UserError(f'{path}: damaged, or no checkpoint of nanoGPT ({type(e).__name__}: '
                        f'{(str(e).splitlines() or [""])[0][:120]})') from None
    return shape, weights, trained


def describe_training(iter_num, val_loss):
    """→ 'iteration 5,000, validation loss 1.4697', or what of it is known."""
    if isinstance(val_loss, torch.Tensor) and val_loss.numel() == 1:
        val_loss = val_loss.item()
    parts = [f'iteration {iter_num:,}'] if is_count(iter_num) else []
    if is_number(val_loss) and math.isfinite(val_loss):
        parts.append(f'validation loss {val_loss:.4f}')
    return ', '.join(parts)


def check_archive(path):
    """See, before torch opens it, that a .pt is a ZIP archive without compression whose pickle is
    small and names what tensors are made of. Raises ValueError, UnpicklingError and others."""
    with open_regular(path) as f, zipfile.ZipFile(f) as archive:
        members = archive.infolist()
        size = f.seek(0, 2)
        if any(member.compress_type for member in members) \
                or sum(member.file_size for member in members) > size:
            raise ValueError('it is compressed, or says that it holds more than it does')
        (pickled,) = (member for member in members
                      if re.fullmatch(r'[^/]*/data\.pkl', member.filename))
        if pickled.file_size > MAX_PICKLE_BYTES:
            raise ValueError('its pickle is too large')
        # As torch reads it: of an archive that is odd on purpose, zipfile finds other members.
        check_pickle(torch._C.PyTorchFileReader(str(path)).get_record('data.pkl'))


def check_pickle(data):
    """See what a pickle would make, without making it. Its dicts have texts and numbers for keys,
    and no large ones, which have equal hashes. Its values stay small if each that is in several
    places is written out: to hash or print a tuple of tuples can take for ever. Raises ValueError
    and UnpicklingError."""
    length = 0  # in operations, with values written out
    stack, marks, memo = [], [], {}  # a Value for each value; where marks are
    for operation, argument, _ in pickletools.genops(data):
        name, before, after = operation.name, operation.stack_before, operation.stack_after
        length += memo[argument].size if 'GET' in name else 1
        if length > MAX_PICKLE_OPERATIONS:
            raise ValueError('its pickle is too long')
        if name == 'GLOBAL' and not PICKLED.fullmatch(argument.replace(' ', '.')):
            raise pickle.UnpicklingError(f'GLOBAL {argument.replace(" ", ".")}')
        if type(argument) is int and abs(argument) >= 2**64:
            raise ValueError('it has numbers that are too large')
        if 'PUT' in name or name == 'MEMOIZE':
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        begin = len(stack)
        if pickletools.markobject in before:
            begin, before = marks.pop(), before[:before.index(pickletools.markobject)]
        if name in ('SETITEM', 'SETITEMS', 'DICT') \
                and not all(v.is_key for v in stack[-2 if name == 'SETITEM' else begin::2]):
            raise ValueError('it has keys that are neither texts nor small numbers')
        begin -= len(before)
        held = stack[begin:]
        del stack[begin:]
        if name == 'MARK':
            marks.append(len(stack))
        elif 'GET' in name:
            memo[argument].is_shared = True
            stack.append(memo[argument])
        elif name in FILLING:
            held[0].take(held[1:])
            stack.append(held[0])
        else:
            is_key = 'UNICODE' in name or name in ('NONE', 'NEWTRUE', 'NEWFALSE', 'BINFLOAT') \
                or (type(argument) is int and abs(argument) < 2**31)
            stack += [Value(is_key).take(held)] * len(after)


@dataclass(slots=True)
class Value:
    """What `check_pickle` knows of a value."""
    is_key: bool  # whether it may be one
    is_shared: bool = False  # whether it is in several places
    size: int = 1  # of all that is in it
    depth: int = 0

    def take(self, values):
        """Put values into it → itself."""
        self.size += sum(value.size for value in values)
        self.depth = max([self.depth, *(value.depth + 1 for value in values)])
        if self.is_shared or self.depth > MAX_PICKLE_DEPTH:
            raise ValueError('it holds itself, or is nested too deep')
        return self


def check_storages(weights, size):
    """See that tensors are plain ones, and that each number of theirs has its own place in the file
    of `size` bytes. Raises ValueError."""
    needed, held = 0, {}
    for name, w in weights.items():
        if type(w) not in (torch.Tensor, torch.nn.Parameter) or w.layout is not torch.strided \
                or w.device.type != 'cpu':
            raise ValueError(f'{name} is no plain tensor')
        held[w.untyped_storage().data_ptr()] = w.untyped_storage().nbytes()
        # nanoGPT's head is the embedding, saved under both names
        needed += w.nbytes if name != 'lm_head.weight' else 0
    if needed > sum(held.values()) or sum(held.values()) > size:
        raise ValueError(f'its tensors have {needed:,} bytes, and the file has fewer')


def tokenizer_json(source, vocab_size):
    """The description of the tokenizer that goes with `source`, or None where nothing says."""
    path = Path(source, OUR_TOKENIZER)
    if path.exists():
        try:
            return read_json(path)
        except (OSError, ValueError) as e:
            raise UserError(f'{path} cannot be read ({e}): export the model again') from None
    return {'kind': 'gpt2'} if vocab_size == 50257 else None

