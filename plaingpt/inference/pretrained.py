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
from plaingpt.core.weights import PRETRAINED, check_finite, init_new_tokens
from plaingpt.data.foreign_tokenizer import (
    TOKENIZER_PATTERNS,
    download,
    find_tokenizer_files,
    read_tokenizer,
)
from plaingpt.inference.hf_architectures import READABLE, without_padding
from plaingpt.inference.torch_files import find_state_dict, load_torch, read_checkpoint
from plaingpt.system.distributed import local_rows, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import is_hub_name, read_json

# Older versions of transformers saved attention masks and rotary frequencies as buffers.
BUFFERS = re.compile(r'(transformer\.)?h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq')

# A model in the Hugging Face layout: configuration, tokenizer and weights
MODEL_FILES = ('*.json', '*.jinja', *TOKENIZER_PATTERNS, 'model*.safetensors')


def open_pretrained(source):
    """'gpt2…' or OWNER/NAME on the hub, a folder in the Hugging Face layout (of an architecture in
    READABLE), a .pt file of nanoGPT or build-nanogpt, or the folder of a ckpt.pt → Pretrained.
    Raises UserError."""
    path = Path(source)
    if (path / 'ckpt.pt').exists() and not (path / 'config.json').exists():
        path = path / 'ckpt.pt'
    if path.suffix in ('.pt', '.pth'):
        config, weights = read_checkpoint(path)
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
    checkpoint_weights: dict | None = None  # {name: tensor} of a ckpt.pt
    state: ClassVar = {}  # no training state, unlike a checkpoint's

    @cached_property
    def folder(self):
        """The folder with all files, downloaded if needed."""
        if self.path.is_dir():
            return self.path
        folder = download_model(self.source)
        if not any(folder.glob('model*.safetensors')):
            download_model(self.source, ['pytorch_model*.bin'])
        return folder

    @cached_property
    def weights(self):
        """{name in the file: tensor}, memory-mapped. Raises UserError that names a tensor that is
        missing, unexpected or has the wrong shape."""
        tensors = self.checkpoint_weights
        if tensors is None:
            tensors = read_weights(self.folder)
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

    @property
    def tokenizer_files(self):
        """Names of the files of the tokenizer, also of a kind that is not supported."""
        return find_tokenizer_files(self.folder) if self.checkpoint_weights is None else []

    def tokenizer_json(self):
        """The description of the weights' tokenizer, or None if it is not known. Raises UserError.
        """
        gpt2, vocab_size = {'kind': 'gpt2'}, self.config.vocab_size
        if vocab_size == 50257 and self.source in PRETRAINED and not self.path.is_dir():
            return gpt2  # from tiktoken, the same as the tokenizer.json of OpenAI's models
        if self.tokenizer_files:
            return read_tokenizer(self.folder, vocab_size)
        if vocab_size != 50257:
            return None
        print0(f"{self.source} has no tokenizer: using GPT-2's, which has as many tokens as the "
               'model; choose another with --tokenizer')
        return gpt2


def shape_of(tensors, name):
    return tuple(tensors[name].shape) if name in tensors else 'missing'


def read_weights(folder):
    """{name: tensor} from model.safetensors, pytorch_model.bin or the shards of either, which are
    memory-mapped. Raises UserError."""
    weights = {}
    with explain_bad_folder(folder):
        for path in weight_files(folder):
            weights |= load_file(path) if path.suffix == '.safetensors' \
                else find_state_dict(load_torch(path), path)
    return weights


def weight_files(folder):
    """The files with the weights, as transformers chooses them. Raises ValueError."""
    for name in ('model.safetensors', 'pytorch_model.bin'):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f'{name}.index.json'
        if index.exists():
            return sorted({folder / shard for shard in read_json(index)['weight_map'].values()})
    raise ValueError('it has neither model.safetensors nor pytorch_model.bin')


@contextmanager
def explain_bad_folder(folder):
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
            SafetensorError) as e:
        reason = str(e).splitlines()[0]
        if isinstance(e, KeyError):
            reason = f'the key {e} is missing'
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
