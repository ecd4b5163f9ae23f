"""Weights from elsewhere → a GPT. Nothing that is read can run code."""

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model import GPT, GPTConfig
from plaingpt.corpus.sources import explain_hub_errors
from plaingpt.inference.hf_architectures import ARCHITECTURES, SIZES, check_sizes
from plaingpt.system.errors import UserError, needs

PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder, so that it comes back whole
# Older versions saved masks beside the weights.
MASKS = re.compile(r'transformer\.h\.\d+\.attn\.(masked_)?bias')


def load_pretrained(source, dropout=0.0):
    """'gpt2…' of the hub, a folder in the Hugging Face layout (GPT-2, Llama, Qwen3) or a ckpt.pt of
    nanoGPT or build-nanogpt → the GPT. Raises UserError."""
    path = Path(source)
    if path.suffix in ('.pt', '.pth'):
        shape, weights = read_nanogpt(path)
    else:
        shape, weights = read_hf(path if path.is_dir() else download(source))
    weights = {name: w for name, w in weights.items() if not MASKS.fullmatch(name)}
    if shape.get('tied_head', True):
        embedding, head = weights.get('transformer.wte.weight'), weights.pop('lm_head.weight', None)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise UserError(f'{source}: its lm_head.weight is not its wte.weight, though both are '
                            'one matrix in this architecture')
    model = GPT(GPTConfig(**shape, dropout=dropout))
    copy_weights(model, weights, source)
    return model


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


def without_padding(weights, vocab_size):
    """Cut the rows off {name: tensor} that pad the vocabulary."""
    return {name: w[:vocab_size] if name in ('transformer.wte.weight', 'lm_head.weight') else w
            for name, w in weights.items()}


def read_hf(folder):
    """A folder with config.json and model.safetensors (or several files) → (the fields of
    GPTConfig but dropout, {our name: tensor}). Raises UserError."""
    try:
        hf = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        architecture = ARCHITECTURES.get(hf.get('model_type'))
        if architecture is None:
            raise ValueError(f'config.json says model_type={hf.get("model_type")!r}, and only '
                             f'{", ".join(ARCHITECTURES)} are supported')
        shape = architecture.read_config(hf)
        weights = {}
        for path in sorted(folder.glob('model*.safetensors')) or [folder / 'model.safetensors']:
            weights |= load_file(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
        what = f'config.json has no {e}' if isinstance(e, KeyError) else e
        raise UserError(f'{folder}: cannot be read as a model in the Hugging Face layout '
                        f'({what})') from None
    return shape, architecture.read_weights(weights)


def download(name):
    """Fetch 'gpt2…' from the Hugging Face hub (or its cache) → folder. Raises UserError."""
    if name not in PRETRAINED:
        raise UserError(f'{name!r} is neither a folder, nor a .pt file, nor one of '
                        f'{", ".join(PRETRAINED)}')
    with needs('huggingface_hub', f'downloading {name}'):
        from huggingface_hub import snapshot_download
    with explain_hub_errors(name, 'connect to the internet once, or give a folder that holds it'):
        return Path(snapshot_download(f'openai-community/{name}',
                                      allow_patterns=['config.json', 'model.safetensors']))


def read_nanogpt(path):
    """As read_hf, for a ckpt.pt of nanoGPT or build-nanogpt. torch's loader runs no code."""
    try:  # of build-nanogpt's config only the values are read, into a SimpleNamespace
        with torch.serialization.safe_globals([(SimpleNamespace, '__main__.GPTConfig')]):
            # mapped: the optimizer's state beside the weights is never read
            found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        nanogpt = 'model_args' in found  # build-nanogpt has GPT-2's own approximation of GELU
        args = found['model_args'] if nanogpt else vars(found['config'])
        shape = {'bias': True, **{key: args[key] for key in (*SIZES, 'bias') if key in args},
                 'mlp': 'gelu_erf' if nanogpt else 'gelu'}
        check_sizes(shape)
        weights = {re.sub(r'^(_orig_mod\.|module\.)*', '', name): w
                   for name, w in found['model'].items()}
        if others := [name for name, w in weights.items() if not isinstance(w, torch.Tensor)]:
            raise TypeError(f'{others[0]} is no tensor')
    except pickle.UnpicklingError as e:
        what = re.search(r'GLOBAL (\S+)', str(e))
        raise UserError(f'{path}: refused: it holds {what[1] if what else "more than tensors"}, '
                        'which could run code when loaded; nothing in it was run') from None
    except (FileNotFoundError, PermissionError) as e:
        raise UserError(f'{path}: {e.strerror}') from None
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise UserError(f'{path}: damaged, or no checkpoint of nanoGPT ({type(e).__name__}: '
                        f'{str(e).splitlines()[0][:120]})') from None
    if shape['vocab_size'] == 50304:  # GPT-2's 50,257 and padding, which no text contains
        shape['vocab_size'] = 50257
        weights = without_padding(weights, 50257)
    return shape, weights


def tokenizer_json(source, vocab_size):
    """The description of the tokenizer that goes with `source`, or None where nothing says."""
    path = Path(source, OUR_TOKENIZER)
    if path.exists():
        try:
            return json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError) as e:
            raise UserError(f'{path} cannot be read ({e}): export the model again') from None
    return {'kind': 'gpt2'} if vocab_size == 50257 else None

