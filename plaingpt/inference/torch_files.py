"""Weights in files of torch.save: checkpoints of nanoGPT and build-nanogpt, and pytorch_model.bin.
No file that is read can run code, and checkpoints of other programs are refused by name."""

import re
import zipfile

import torch

from model import GPTConfig
from plaingpt.inference.hf_architectures import SIZES, without_padding
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line

LLAMA2C_ARGS = {'dim', 'n_layers', 'multiple_of', 'max_seq_len'}


class PickledConfig:
    """Stands in for the class GPTConfig that a checkpoint of build-nanogpt names."""


def load_torch(path):
    """The content of a file of torch.save. Raises UserError."""
    try:
        is_zip = zipfile.is_zipfile(path)  # files of torch < 1.6 are not, and cannot be mapped
        with torch.serialization.safe_globals([(PickledConfig, '__main__.GPTConfig')]):
            # mmap: the optimizer state beside the weights is never read
            return torch.load(path, map_location='cpu', weights_only=True, mmap=is_zip)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror or e}') from None
    except Exception as e:  # torch.load raises many kinds of errors
        refused = re.search(r'GLOBAL (\S+)', str(e))
        if refused:
            raise UserError(f'{path}: refused to load: it contains {refused[1]}, which could '
                            'execute code') from None
        raise UserError(f'{path}: damaged, or not a file of torch.save ({one_line(e)[:200]})') \
            from None


def find_state_dict(content, path):
    """The {name: tensor} that a file holds, itself or as 'model' or 'state_dict'. Raises UserError.
    """
    weights = content
    if isinstance(content, dict):
        weights = content.get('model', content.get('state_dict', content))
    if not isinstance(weights, dict) \
            or not all(isinstance(w, torch.Tensor) for w in weights.values()):
        keys = ', '.join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path}: expected the weights, or a dict with them as 'model' or "
                        f"'state_dict'; found {keys[:200]}")
    return {re.sub(r'^(_orig_mod\.|module\.)*', '', str(name)): w for name, w in weights.items()}


def read_checkpoint(path):
    """A checkpoint of nanoGPT or build-nanogpt → (GPTConfig, {name: tensor}). Raises UserError."""
    checkpoint = load_torch(path)
    weights = find_state_dict(checkpoint, path)
    config = read_config(checkpoint, weights, path)
    embedding = weights.get('transformer.wte.weight')
    head = weights.get('lm_head.weight', embedding)
    if embedding is not None and not torch.equal(embedding, head.to(embedding.dtype)):
        config.tied_head = False  # a fork's; the settings do not say so
    if config.vocab_size == 50304:  # GPT-2's 50,257 tokens and padding
        config.vocab_size = 50257
        weights = without_padding(weights, config)
    return config, weights


def read_config(checkpoint, weights, path):
    """The GPTConfig of a checkpoint. Raises UserError."""
    args, config = checkpoint.get('model_args'), checkpoint.get('config')
    if isinstance(args, dict) and not args.keys() >= LLAMA2C_ARGS:
        known, mlp = (*SIZES, 'bias', 'dropout'), 'gelu_erf'  # nanoGPT
    elif isinstance(config, PickledConfig):
        args, known, mlp = vars(config), SIZES, 'gelu'  # build-nanogpt
    else:
        raise UserError(f'{path}: {describe_other(checkpoint, weights)}')
    unknown = [f'{name}={value!r}'[:40] for name, value in args.items() if name not in known]
    if unknown:
        raise UserError(f'{path}: the configuration has {", ".join(unknown)}, which nanoGPT does '
                        'not have: a fork wrote it, and its network may differ; '
                        'convert it to the Hugging Face layout, or train it here')
    values = {'bias': True, **args}  # the first versions of nanoGPT always had biases
    try:
        sizes = {name: int(values[name]) for name in SIZES}
        gpt_config = GPTConfig(**sizes, bias=bool(values['bias']), mlp=mlp)
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f'{path}: the configuration {values} cannot be read '
                        f'({type(e).__name__}: {e})') from None
    for conflict in gpt_config.conflicts():
        raise UserError(f'{path}: {conflict}')
    return gpt_config


def describe_other(checkpoint, weights):
    """What a checkpoint of another program is, and what to do."""
    if isinstance(checkpoint.get('model_args'), dict):
        return 'a checkpoint of llama2.c; convert it to a folder with its export.py --version=-1'
    if any('.norm_1.' in name for name in weights):
        return 'a checkpoint of LitGPT; convert it with litgpt convert_from_litgpt, and put the ' \
               "result as pytorch_model.bin beside the model's config.json"
    if {'code', 'optimizers'} <= checkpoint.keys():
        return 'a checkpoint of modded-nanogpt, whose architecture is not supported'
    return 'it has no configuration (model_args, as nanoGPT writes); put the weights as ' \
           'pytorch_model.bin beside a config.json of the Hugging Face layout'
