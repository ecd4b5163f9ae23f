"""Weights from elsewhere → a GPT. Nothing that is read can run code."""

import math
import pickle
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open

from model import GPT, ROW_PER_TOKEN, GPTConfig
from plaingpt.data.foreign_tokenizer import download, read_tokenizer
from plaingpt.inference.hf_architectures import READABLE, SIZES, check_fields
from plaingpt.system.errors import UserError
from plaingpt.system.files import is_hub_name, read_json
from plaingpt.weights import PRETRAINED, begin_new_tokens, check_finite, copy_rows

# Older versions saved masks and the speeds of rotary positions beside the weights.
NO_WEIGHTS = re.compile(r'transformer\.h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq')


def open_pretrained(source):
    """'gpt2…' or OWNER/NAME of the hub, a folder in the Hugging Face layout (one of READABLE)
    or a ckpt.pt of nanoGPT or build-nanogpt, or its folder → Pretrained. Raises UserError."""
    path = Path(source)
    if (path / 'ckpt.pt').exists() and not (path / 'config.json').exists():
        path = path / 'ckpt.pt'
    if path.suffix in ('.pt', '.pth'):
        return Pretrained(source, path, *read_nanogpt(path))
    if source in PRETRAINED and not path.is_dir():
        return Pretrained(source, path, dict(PRETRAINED[source]))
    if path.is_dir() and not (path / 'config.json').exists():
        raise UserError(f'{source} has no checkpoint of a run, no config.json and no ckpt.pt: name '
                        'a folder that has one of them')
    folder = path if path.is_dir() else download_model(source, ['config.json'])
    with explain_bad_folder(folder):
        return Pretrained(source, path, read_hf_config(folder)[1])


@dataclass
class Pretrained:
    """Weights of others. They are downloaded, read and checked when they are used."""

    source: str
    path: Path  # of the folder, or of the ckpt.pt; of weights on the hub none is there
    shape: dict  # the fields of its GPTConfig but dropout
    nanogpt: dict | None = None  # {our name: tensor} of a ckpt.pt
    state: ClassVar = {}  # of no run of ours

    @cached_property
    def folder(self):
        """With all its files."""
        return self.path if self.path.is_dir() else download_model(self.source)

    @cached_property
    def parts(self):
        """{our name: the tensors that make it, one below another: Tensors or FileTensors}"""
        if self.nanogpt:
            return self.checked({name: [w] for name, w in self.nanogpt.items()})
        with explain_bad_folder(self.folder):
            return self.checked(read_hf(self.folder))

    def checked(self, found):
        """{name: parts} → those of the model. Raises UserError that names what is missing, unknown,
        or of another shape than in the model."""
        found = {name: parts for name, parts in found.items() if not NO_WEIGHTS.fullmatch(name)}
        config = GPTConfig(**self.shape)
        if config.tied_head and 'lm_head.weight' in found:
            (head,), (embedding,) = found.pop('lm_head.weight'), found['transformer.wte.weight']
            if not torch.equal(head[:], embedding[:]):
                raise UserError(f'{self.source}: its lm_head.weight is not its wte.weight, though '
                                'both are one matrix in this architecture')

        def shape_of(name, parts):  # what pads the vocabulary may be there, or not
            most = config.vocab_size if name.endswith(ROW_PER_TOKEN) else math.inf
            rows = min(most, sum(part.shape[:1].numel() for part in parts))
            return ' and '.join(sorted({str((rows, *part.shape[1:])) for part in parts})) or 'none'

        with torch.device('meta'):
            wanted = {name: [p] for name, p in GPT(config).named_parameters()}
        for name in sorted(wanted.keys() | found.keys()):
            there, right = (shape_of(name, each.get(name, ())) for each in (found, wanted))
            if there != right:
                raise UserError(f'{self.source}: its weights do not fit its configuration: '
                                f'{name!r} is {there}, expected {right}')
        return found

    @torch.no_grad()
    def load_into(self, model):
        """Copy them into a GPT of this shape. It may have a shorter block_size and more tokens: a
        new token begins as the mean of the old ones. If it is sharded, each process reads its own
        rows. Raises UserError where a weight is not finite."""
        parts_of_model, known = self.parts, self.shape['vocab_size']
        with explain_bad_folder(self.source):
            for name, p in model.named_parameters():
                start = 0
                for part in parts_of_model[name]:
                    copy_rows(p, start, part)
                    start += part.shape[0]
                if name.endswith(ROW_PER_TOKEN):
                    (part,) = parts_of_model[name]
                    mean = part[0:known].float().mean(0) if model.config.vocab_size > known \
                        else torch.zeros(())
                    begin_new_tokens(p, mean, known, model.config.vocab_size)
        check_finite(model, self.source)

    def tokenizer_json(self):
        """The description of the tokenizer that goes with the weights, or None where nothing says.
        Raises UserError."""
        vocab_size, found = self.shape['vocab_size'], None
        if not self.nanogpt:
            found = read_tokenizer(self.folder, vocab_size)
        return found or ({'kind': 'gpt2'} if vocab_size == 50257 else None)


class FileTensor:
    """A tensor in a file of safetensors: shape, type, and rows of it, which are read when asked."""

    def __init__(self, path, key, header, transposed):
        self.path, self.key, self.transposed = path, key, transposed
        self.dtype = header.get_dtype()
        shape = header.get_shape()
        self.shape = torch.Size(reversed(shape) if transposed else shape)

    def __getitem__(self, rows):
        with safe_open(self.path, framework='pt') as f:
            tensor = f.get_slice(self.key)
            return tensor[:, rows].t() if self.transposed else tensor[rows]


def read_hf(folder):
    """A folder with config.json and model.safetensors, or several files → {our name: [FileTensor]},
    inside `explain_bad_folder`."""
    architecture, _ = read_hf_config(folder)
    whole, found = folder / 'model.safetensors', {}  # our name → {number of the part: FileTensor}
    several = sorted(folder.glob('model-*.safetensors'))
    for path in several if several and not whole.exists() else [whole]:
        with safe_open(path, framework='pt') as f:
            for key in f.keys():  # noqa: SIM118  (it is no dict)
                ours, i, transposed = architecture.our_place(key)
                found.setdefault(ours, {})[i] = FileTensor(path, key, f.get_slice(key), transposed)
    return {name: [parts[i] for i in sorted(parts)] for name, parts in found.items()}


def read_hf_config(folder):
    """→ (the Architecture, the fields of GPTConfig but dropout), inside `explain_bad_folder`."""
    hf = read_json(folder / 'config.json')
    architecture = READABLE.get(str(hf.get('model_type')))
    if architecture is None:
        raise ValueError(f'config.json says model_type={hf.get("model_type")!r}, and only '
                         f'{", ".join(READABLE)} are supported')
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


def download_model(name, patterns=('*.json', '*.jinja', 'model*.safetensors')):
    """Fetch 'gpt2…' or OWNER/NAME from the Hugging Face hub (or its cache) → folder. Raises
    UserError."""
    if name not in PRETRAINED and not is_hub_name(name):
        raise UserError(f'{name!r} is neither a folder, nor a .pt file, nor one of '
                        f'{", ".join(PRETRAINED)}, nor OWNER/NAME on the Hugging Face hub')
    return download(f'openai-community/{name}' if name in PRETRAINED else name, patterns)


def read_nanogpt(path):
    """As read_hf, for a ckpt.pt of nanoGPT or build-nanogpt → (fields of GPTConfig, {our name:
    tensor}). torch's loader runs no code."""
    try:
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
        if shape['vocab_size'] == 50304:  # GPT-2's 50,257 and padding, which no text contains
            shape['vocab_size'] = 50257
    except pickle.UnpicklingError as e:
        what = re.search(r'GLOBAL (\S+)', str(e))
        raise UserError(f'{path}: refused: it holds {what[1] if what else "more than tensors"}, '
                        'which could run code when loaded; nothing in it was run') from None
    # torch's loader raises many kinds of errors on a file that is not what it expects.
    except Exception as e:
        raise UserError(f'{path}: damaged, or no checkpoint of nanoGPT ({type(e).__name__}: '
                        f'{(str(e).splitlines() or [""])[0][:120]})') from None
    return shape, weights
