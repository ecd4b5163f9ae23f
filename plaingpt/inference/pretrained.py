"""Weights from elsewhere → a GPT. Nothing that is read can run code."""

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model import GPT, VOCAB_WEIGHTS, GPTConfig
from plaingpt.data.foreign_tokenizer import download, read_tokenizer
from plaingpt.inference.hf_architectures import READABLE, SIZES, without_padding
from plaingpt.system.distributed import local_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import is_hub_name, read_json
from plaingpt.weights import PRETRAINED, begin_new_tokens, check_finite

# Older versions of transformers saved masks and the speeds of rotary positions beside the weights.
NO_WEIGHTS = re.compile(r'(transformer\.)?h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq')


def open_pretrained(source):
    """'gpt2…' or OWNER/NAME of the hub, a folder in the Hugging Face layout (one of READABLE)
    or a ckpt.pt of nanoGPT, or its folder → Pretrained. Raises UserError."""
    path = Path(source)
    if (path / 'ckpt.pt').exists() and not (path / 'config.json').exists():
        path = path / 'ckpt.pt'
    if path.suffix in ('.pt', '.pth'):
        return Pretrained(source, path, *read_nanogpt(path))
    if source in PRETRAINED and not path.is_dir():
        return Pretrained(source, path, READABLE['gpt2'].write_weights, PRETRAINED[source])
    if path.is_dir() and not (path / 'config.json').exists():
        raise UserError(f'{source} has no checkpoint of a run, no config.json and no ckpt.pt: name '
                        'a folder that has one of them')
    folder = path if path.is_dir() else download_model(source, ['config.json'])
    with explain_bad_folder(folder):
        hf = read_json(folder / 'config.json')
        if (architecture := READABLE.get(str(hf.get('model_type')))) is None:
            raise ValueError(f'config.json says model_type={hf.get("model_type")!r}, and only '
                             f'{", ".join(READABLE)} are supported')
        config = architecture.read_config(hf)
        for problem in config.conflicts():
            raise ValueError(problem)
        return Pretrained(source, path, architecture.write_weights, config)


@dataclass
class Pretrained:
    """Pretrained weights. They are downloaded, read and checked when they are used."""

    source: str
    path: Path  # of the folder, or of the ckpt.pt; of weights on the hub none is there
    write_weights: Callable  # {our name: tensor}, GPTConfig → {their name: tensor}, in one memory
    config: GPTConfig
    nanogpt: dict | None = None  # {name: tensor} of a ckpt.pt
    state: ClassVar = {}  # of no run of ours

    @cached_property
    def folder(self):
        """With all its files."""
        return self.path if self.path.is_dir() else download_model(self.source)

    @cached_property
    def weights(self):
        """{their name: tensor}, which is read from its file where it is used. Raises UserError that
        names what is missing, unknown, or of another shape than in the model."""
        found, config = self.nanogpt or read_weights(self.folder), self.config
        with torch.device('meta'):
            wanted = self.write_weights(dict(GPT(config).named_parameters()), config)
        # OpenAI's own upload leaves the prefix of the names out.
        found = {f'transformer.{name}' if f'transformer.{name}' in wanted else name: w
                 for name, w in found.items() if not NO_WEIGHTS.fullmatch(name)}
        if config.tied_head:
            found.pop('lm_head.weight', None)  # some files have the embedding twice
        for name in sorted(wanted.keys() | found.keys()):
            there, right = (tuple(each[name].shape) if name in each else 'none'
                            for each in (found, wanted))
            if there != right:
                raise UserError(f'{self.source}: its weights do not fit its configuration: '
                                f'{name!r} is {there}, expected {right}')
        return found

    @torch.no_grad()
    def load_into(self, model):
        """Copy them into a GPT of this shape. It may have a shorter block_size and more tokens: a
        new token begins as the mean of the old ones. If it is sharded, each process keeps its own
        rows. Raises UserError where a weight is not finite."""
        weights, known, config = self.weights, self.config.vocab_size, model.config
        for name, p in model.named_parameters():
            mine, first = local_rows(p)
            whole = mine if len(mine) == len(p) else torch.empty(p.shape)
            for theirs, part in self.write_weights({name: whole}, config).items():
                read = weights[theirs][:len(part)]
                part[:len(read)].copy_(read)
            if whole is not mine:
                mine.copy_(whole[first:first + len(mine)])
            if name.endswith(VOCAB_WEIGHTS):
                mean = read[:known].float().mean(0) if config.vocab_size > known \
                    else torch.zeros(())  # which nothing reads
                begin_new_tokens(p, mean, known, config.vocab_size)
        check_finite(model, self.source)

    def tokenizer_json(self):
        """The description of the tokenizer that goes with the weights, or None where nothing says.
        Raises UserError."""
        vocab_size = self.config.vocab_size
        gpt2 = {'kind': 'gpt2'} if vocab_size == 50257 else None
        if self.nanogpt or (gpt2 and self.source in PRETRAINED and not self.path.is_dir()):
            return gpt2  # tiktoken has what the tokenizer.json of OpenAI's models says
        return read_tokenizer(self.folder, vocab_size) or gpt2


def read_weights(folder):
    """{name: tensor} of model.safetensors, or of several files. Raises UserError."""
    found = {}
    with explain_bad_folder(folder):
        for path in sorted(folder.glob('model*.safetensors')) or [folder / 'model.safetensors']:
            found |= load_file(path)  # maps it into memory
    return found


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
    """A ckpt.pt of nanoGPT → what Pretrained has of it: (write_weights, GPTConfig, {name:
    tensor}). torch's loader runs no code."""
    try:
        # mapped: the optimizer's state beside the weights is never read
        found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        args = found['model_args']
        config = GPTConfig(**{key: args[key] for key in SIZES}, bias=args.get('bias', True),
                           mlp='gelu_erf')
        if config.vocab_size == 50304:  # GPT-2's 50,257 and padding, which no text contains
            config.vocab_size = 50257
        weights = {re.sub(r'^(_orig_mod\.|module\.)*', '', name): w
                   for name, w in found['model'].items()}
        weights = without_padding(weights, config)
    except Exception as e:  # torch's loader raises many kinds of errors on such a file
        if code := re.search(r'GLOBAL (\S+)', str(e)):
            raise UserError(f'{path}: refused: it holds {code[1]}, which could run code when '
                            'loaded; nothing in it was run') from None
        raise UserError(f'{path}: damaged, or no checkpoint of nanoGPT ({type(e).__name__}: '
                        f'{(str(e).splitlines() or [""])[0][:120]})') from None
    return without_padding, config, weights
