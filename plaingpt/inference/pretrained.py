"""Pretrained weights → a GPT. No file that is read can run code."""

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
from plaingpt.weights import PRETRAINED, check_finite, init_new_tokens

# Older versions of transformers saved attention masks and rotary frequencies as buffers.
BUFFERS = re.compile(r'(transformer\.)?h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq')

# A model in the Hugging Face layout: configuration, tokenizer and weights.
MODEL_FILES = '*.json', '*.jinja', 'model*.safetensors'


def open_pretrained(source):
    """'gpt2…' or OWNER/NAME on the hub, a folder in the Hugging Face layout (of an architecture in
    READABLE), or nanoGPT's ckpt.pt or its folder → Pretrained. Raises UserError."""
    path = Path(source)
    if (path / 'ckpt.pt').exists() and not (path / 'config.json').exists():
        path = path / 'ckpt.pt'
    if path.suffix in ('.pt', '.pth'):
        config, weights = read_nanogpt(path)
        return Pretrained(source, path, without_padding, config, weights)
    if source in PRETRAINED and not path.is_dir():
        return Pretrained(source, path, READABLE['gpt2'].write_weights, PRETRAINED[source])
    if path.is_dir() and not (path / 'config.json').exists():
        raise UserError(f'{source}: expected a folder with checkpoints/, config.json or ckpt.pt')
    folder = path if path.is_dir() else download_model(source, ['config.json'])
    with explain_bad_folder(folder):
        hf_config = read_json(folder / 'config.json')
        model_type = hf_config.get('model_type')
        architecture = READABLE.get(str(model_type))
        if architecture is None:
            raise ValueError(f'config.json: model_type={model_type!r} is not supported; supported '
                             f'are {", ".join(READABLE)}')
        config = architecture.read_config(hf_config)
        for conflict in config.conflicts():
            raise ValueError(conflict)
        return Pretrained(source, path, architecture.write_weights, config)


@dataclass
class Pretrained:
    """Pretrained weights, which are downloaded, read and checked on first use."""

    source: str
    path: Path  # the folder or the ckpt.pt; does not exist for weights on the hub
    # {our name: tensor}, GPTConfig → {name in the file: tensor}, which share memory
    write_weights: Callable
    config: GPTConfig
    nanogpt_weights: dict | None = None  # {name: tensor} of a ckpt.pt
    state: ClassVar = {}  # no training state, unlike a checkpoint's

    @cached_property
    def folder(self):
        """The folder with all files, downloaded if needed."""
        return self.path if self.path.is_dir() else download_model(self.source)

    @cached_property
    def weights(self):
        """{name in the file: tensor}, memory-mapped. Raises UserError that names a tensor that is
        missing, unexpected or has the wrong shape."""
        tensors = self.nanogpt_weights or read_weights(self.folder)
        with torch.device('meta'):
            parameters = dict(GPT(self.config).named_parameters())
            expected = self.write_weights(parameters, self.config)
        weights = {}
        for name, w in tensors.items():
            if f'transformer.{name}' in expected:
                name = f'transformer.{name}'  # OpenAI's upload omits this prefix
            if not BUFFERS.fullmatch(name):
                weights[name] = w
        if self.config.tied_head:
            weights.pop('lm_head.weight', None)  # some files hold the embedding twice
        for name in sorted(expected.keys() | weights.keys()):
            shape, expected_shape = shape_of(weights, name), shape_of(expected, name)
            if shape != expected_shape:
                raise UserError(f'{self.source}: the weights do not match the configuration: '
                                f'{name!r} is {shape}, expected {expected_shape}')
        return weights

    @torch.no_grad()
    def load_into(self, model):
        """Copy the weights into a GPT of the same architecture. Its block_size may be shorter and
        its vocabulary larger: a new token starts as the mean of the pretrained ones. Into a sharded
        model, each process copies its own rows. Raises UserError if a weight is not finite."""
        pretrained_vocab_size, config = self.config.vocab_size, model.config
        for name, p in model.named_parameters():
            local, first = local_rows(p)
            whole = local if len(local) == len(p) else torch.empty(p.shape)
            for file_name, target in self.write_weights({name: whole}, config).items():
                rows = self.weights[file_name][:len(target)]
                target[:len(rows)].copy_(rows)
            if whole is not local:
                local.copy_(whole[first:first + len(local)])
            if name.endswith(VOCAB_WEIGHTS):
                mean = torch.zeros(())  # not used unless there are new tokens
                if config.vocab_size > pretrained_vocab_size:
                    mean = rows[:pretrained_vocab_size].float().mean(0)
                init_new_tokens(p, mean, pretrained_vocab_size, config.vocab_size)
        check_finite(model, self.source)

    def tokenizer_json(self):
        """The description of the weights' tokenizer, or None if it is not known. Raises UserError.
        """
        vocab_size = self.config.vocab_size
        gpt2 = {'kind': 'gpt2'} if vocab_size == 50257 else None
        if self.nanogpt_weights:
            return gpt2
        if gpt2 and self.source in PRETRAINED and not self.path.is_dir():
            return gpt2  # from tiktoken, the same as the tokenizer.json of OpenAI's models
        return read_tokenizer(self.folder, vocab_size) or gpt2


def shape_of(tensors, name):
    return tuple(tensors[name].shape) if name in tensors else 'missing'


def read_weights(folder):
    """{name: tensor} from model.safetensors or its shards, memory-mapped. Raises UserError."""
    paths = sorted(folder.glob('model*.safetensors')) or [folder / 'model.safetensors']
    weights = {}
    with explain_bad_folder(folder):
        for path in paths:
            weights |= load_file(path)
    return weights


@contextmanager
def explain_bad_folder(folder):
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
            SafetensorError) as e:
        reason = str(e).splitlines()[0]
        if isinstance(e, KeyError):
            reason = f'config.json has no {e}'
        raise UserError(f'{folder}: cannot be read as a model in the Hugging Face layout '
                        f'({reason[:300]})') from None


def download_model(name, patterns=MODEL_FILES):
    """Download 'gpt2…' or OWNER/NAME from the Hugging Face Hub, or find it in the cache → folder.
    Raises UserError."""
    if name in PRETRAINED:
        return download(f'openai-community/{name}', patterns)
    if not is_hub_name(name):
        raise UserError(f'{name!r} is not a folder, a .pt file, one of {", ".join(PRETRAINED)}, or '
                        'OWNER/NAME on the Hugging Face Hub')
    return download(name, patterns)


def read_nanogpt(path):
    """nanoGPT's ckpt.pt → (GPTConfig, {name: tensor}). Runs no code from the file. Raises
    UserError."""
    try:
        # mmap: the optimizer state beside the weights is never read
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        args = checkpoint['model_args']
        config = GPTConfig(**{key: args[key] for key in SIZES}, bias=args.get('bias', True),
                           mlp='gelu_erf')
        if config.vocab_size == 50304:  # GPT-2's 50,257 tokens and padding
            config.vocab_size = 50257
        weights = {re.sub(r'^(_orig_mod\.|module\.)*', '', name): w
                   for name, w in checkpoint['model'].items()}
        weights = without_padding(weights, config)
    except Exception as e:  # torch.load raises many kinds of errors
        refused = re.search(r'GLOBAL (\S+)', str(e))
        if refused:
            raise UserError(f'{path}: refused to load: it contains {refused[1]}, which could '
                            'execute code') from None
        reason = (str(e).splitlines() or [''])[0][:120]
        raise UserError(f'{path}: is damaged or not a nanoGPT checkpoint ({type(e).__name__}: '
                        f'{reason})') from None
    return config, weights
