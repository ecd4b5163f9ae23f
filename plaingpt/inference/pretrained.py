"""Weights and tokenizers in the formats of others, in and out. Nothing that is read can run code.

in   Hugging Face's GPT-2 (the hub's 'gpt2…' or a folder), nanoGPT's and build-nanogpt's ckpt.pt
out  a folder that transformers' AutoModelForCausalLM and AutoTokenizer open: GPT-2, or with newer
     flags Llama or a relative of it

Names inside are nanoGPT's, which are Hugging Face's but for the layout of some matrices.
"""

import json
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plaingpt.system.errors import UserError

PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder, so that it comes back whole

# Hugging Face keeps these as GPT-2's Conv1D, whose weight is (in, out); a Linear's is (out, in).
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
# Masks that older versions saved beside the weights.
MASKS = re.compile(r'transformer\.h\.\d+\.attn\.(masked_)?bias')


# -----------------------------------------------------------------------------
# in


def read_weights(source):
    """'gpt2', a folder or a ckpt.pt → (the fields of GPTConfig but dropout, {our name: tensor}).

    Raises UserError where it cannot be had or holds another kind of model.
    """
    path = Path(source)
    if path.suffix in ('.pt', '.pth'):
        shape, weights = read_nanogpt(path)
    else:
        shape, weights = read_hf(path if path.is_dir() else download(source))
    for key, value in shape.items():
        if key not in ('bias', 'mlp', 'tied_head') and (type(value) is not int or value < 1):
            raise UserError(f'{source}: {key}={value!r} there is no count')
    if shape['n_embd'] % shape['n_head']:
        raise UserError(f'{source}: n_embd={shape["n_embd"]} there is not a multiple of '
                        f'n_head={shape["n_head"]}')
    weights = {name: w for name, w in weights.items() if not MASKS.fullmatch(name)}
    if shape.get('tied_head', True):
        embedding, head = weights.get('transformer.wte.weight'), weights.pop('lm_head.weight', None)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise UserError(f'{source}: its lm_head.weight is not its wte.weight, though GPT-2 has '
                            'one matrix for both')
    return shape, weights


def read_hf(folder):
    """A folder with config.json and model.safetensors (or several files) of a GPT-2."""
    try:
        hf = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        if hf.get('model_type') != 'gpt2':
            raise ValueError(f'config.json says model_type={hf.get("model_type")!r}')
        for key, supported in HF_SUPPORTED.items():
            if hf.get(key, supported[0]) not in supported:
                raise ValueError(f'config.json says {key}={hf[key]!r}, and only '
                                 f'{" or ".join(map(repr, supported))} is supported')
        if hf.get('n_inner') not in (None, 4 * hf['n_embd']):
            raise ValueError(f'config.json says n_inner={hf["n_inner"]}, and only 4·n_embd is '
                             'supported')
        shape = {'block_size': hf['n_positions'], 'bias': True,
                 'mlp': {'gelu': 'gelu_erf', 'relu2': 'relu2'}.get(
                     hf.get('activation_function'), 'gelu'),
                 'tied_head': hf.get('tie_word_embeddings', True),
                 **{key: hf[key] for key in ('vocab_size', 'n_layer', 'n_head', 'n_embd')}}
        weights = {}
        for path in sorted(folder.glob('model*.safetensors')) or [folder / 'model.safetensors']:
            weights |= load_file(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
        what = f'config.json has no {e}' if isinstance(e, KeyError) else e
        raise UserError(f'{folder}: cannot be read as GPT-2 in the Hugging Face layout ({what})') \
            from None
    return shape, {our_name(name): w.t() if name.endswith(TRANSPOSED) else w
                   for name, w in weights.items()}


# What we compute, under the names of transformers' GPT2Config; what stands first is its default.
HF_SUPPORTED = {
    # the first two are one
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh', 'gelu', 'relu2'),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'add_cross_attention': (False,),
    'tie_word_embeddings': (True, False),
}


def our_name(name):
    """OpenAI's own upload of GPT-2 leaves the prefix out."""
    return name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}'


def download(name):
    """Fetch 'gpt2…' from the Hugging Face hub (or its cache) → folder. Raises UserError."""
    if name not in PRETRAINED:
        raise UserError(f'{name!r} is neither a folder, nor a .pt file, nor one of '
                        f'{", ".join(PRETRAINED)}')
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f'downloading {name} needs huggingface_hub: pip install huggingface_hub') \
            from None
    try:
        return Path(snapshot_download(f'openai-community/{name}',
                                      allow_patterns=['config.json', 'model.safetensors']))
    except Exception as e:  # the hub's own errors, requests', httpx': all mean "not had"
        raise UserError(f'{name} could not be downloaded ({type(e).__name__}): connect to the '
                        'internet once, or give a folder that holds it') from None


class ForeignConfig:
    """Stands in for the class of build-nanogpt's config, of which only the values are read."""


def read_nanogpt(path):
    """A ckpt.pt of nanoGPT or build-nanogpt, through torch's loader that runs no code."""
    allowed = [(ForeignConfig, '__main__.GPTConfig')]
    try:
        with torch.serialization.safe_globals(allowed):
            # mapped: the optimizer's state beside the weights is never read
            found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        nanogpt = 'model_args' in found  # build-nanogpt has GPT-2's own approximation of GELU
        args = found['model_args'] if nanogpt else vars(found['config'])
        shape = {'bias': True, **{key: args[key] for key in (
            'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'bias') if key in args},
            'mlp': 'gelu_erf' if nanogpt else 'gelu'}
        weights = {re.sub(r'^(_orig_mod\.|module\.)*', '', name): w
                   for name, w in found['model'].items()}
        vocab_size = shape['vocab_size']
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
    if vocab_size == 50304:  # GPT-2's 50,257 and what they pad with, which no text contains
        shape['vocab_size'] = 50257
        for name in ('transformer.wte.weight', 'lm_head.weight'):
            if name in weights:
                weights[name] = weights[name][:50257]
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


# -----------------------------------------------------------------------------
# out


def load_pretrained(source, dropout=0.0):
    from model import GPT, GPTConfig
    shape, weights = read_weights(source)
    model = GPT(GPTConfig(**shape, dropout=dropout))
    try:
        load_weights(model, weights)
    except ValueError as e:
        raise UserError(f'{source}: its weights do not fit its configuration: {e}') from None
    return model


@torch.no_grad()
def load_weights(model, weights):
    wanted = dict(model.named_parameters())
    for words, names in (('it has no', wanted.keys() - weights.keys()),
                         ('it has an unknown', weights.keys() - wanted.keys())):
        if names:
            more = f' and {len(names) - 1} more' if len(names) > 1 else ''
            raise ValueError(f'{words} {min(names)}{more}')
    for name, p in wanted.items():
        if name in ('transformer.wte.weight', 'lm_head.weight'):
            p = p[:model.config.vocab_size]
        if p.shape != weights[name].shape:
            raise ValueError(f'{name} is {tuple(weights[name].shape)}, expected '
                             f'{tuple(p.shape)}')
        p.copy_(weights[name])
