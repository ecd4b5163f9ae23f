"""Weights and tokenizers in the formats of others, in and out. Nothing that is read can run code.

in   Hugging Face's GPT-2 (the hub's 'gpt2…' or a folder), nanoGPT's and build-nanogpt's ckpt.pt
out  a folder that transformers' AutoModelForCausalLM and AutoTokenizer open: GPT-2, or with newer
     flags Llama or a relative of it

Names inside are nanoGPT's, which are Hugging Face's but for the layout of some matrices.
"""

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from errors import UserError

PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder, so that it comes back whole
END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'

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


def write_hf(folder, model, tokenizer, card):
    """Write what transformers opens into `folder`: weights, configs, tokenizer, model card.

    Raises UserError where no architecture of transformers is that of `model`.
    """
    folder = Path(folder)
    config, weights = to_hf(model)
    end = tokenizer.end_of_text
    config |= {'bos_token_id': end, 'eos_token_id': end}
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / 'model.safetensors',
              metadata={'format': 'pt'})
    files = {
        'config.json': config,
        'generation_config.json': {'bos_token_id': end, 'eos_token_id': end, 'do_sample': True},
        'tokenizer.json': hf_tokenizer(tokenizer),
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False,
            'model_max_length': model.config.block_size,
            **({} if end is None else {'bos_token': END_OF_TEXT, 'eos_token': END_OF_TEXT})},
        OUR_TOKENIZER: tokenizer.to_json(),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + '\n', encoding='utf-8')
    (folder / 'README.md').write_text(card, encoding='utf-8')


def to_hf(model):
    """→ (config.json's content, {Hugging Face's name: tensor}).

    Without newer flags that is GPT-2. With rotary positions it is the relative of Llama whose
    norm and MLP are the model's. Raises UserError that names the flag which none of them has.
    """
    c = model.config
    name, norm = ('gpt2', 'LayerNorm')
    if c.rotary:
        name = {('swiglu', True): 'qwen3' if c.qk_norm else 'llama', ('gelu', True): 'arcee',
                ('gelu_erf', True): 'arcee', ('relu2', True): 'arcee',
                ('gelu', False): 'nemotron', ('gelu_erf', False): 'nemotron',
                ('relu2', False): 'nemotron'}.get((c.mlp, c.rmsnorm), 'llama')
        norm = 'LayerNorm' if name == 'nemotron' else 'RMSNorm'
    for prevents, flag in ((c.logit_softcap, f'logit_softcap={c.logit_softcap}'),
                           (c.rmsnorm and not c.rotary, 'rmsnorm=True without rotary=True'),
                           (c.mlp == 'swiglu' and not c.rotary, 'mlp=swiglu without rotary=True'),
                           (c.mlp == 'swiglu' and not c.rmsnorm, 'mlp=swiglu without rmsnorm=True'),
                           (c.qk_norm and name != 'qwen3', 'qk_norm=True without rotary=True, '
                            'rmsnorm=True and mlp=swiglu'),
                           (c.qk_norm and c.bias, 'qk_norm=True with bias=True')):
        if prevents:
            raise UserError(f'no architecture of transformers is this model: {flag} prevents it')
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for embedding in ('transformer.wte.weight', 'lm_head.weight'):
        if embedding in weights:
            weights[embedding] = weights[embedding][:c.vocab_size]  # without the padding
    common = {'model_type': name, 'architectures': [HF_CLASSES[name]], 'vocab_size': c.vocab_size,
              'tie_word_embeddings': c.tied_head}
    if c.rotary:
        return {**common, **llama_config(c, norm)}, llama_weights(weights, c, norm)
    return {**common, **gpt2_config(c)}, gpt2_weights(weights, c)


HF_CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
              'arcee': 'ArceeForCausalLM', 'nemotron': 'NemotronForCausalLM'}
HF_ACTIVATIONS = {'gelu': 'gelu_new', 'gelu_erf': 'gelu', 'relu2': 'relu2', 'swiglu': 'silu'}


def gpt2_config(c):
    return {**{key: supported[0] for key, supported in HF_SUPPORTED.items()},
            'activation_function': HF_ACTIVATIONS[c.mlp], 'tie_word_embeddings': c.tied_head,
            'n_positions': c.block_size, 'n_ctx': c.block_size,
            'n_embd': c.n_embd, 'n_layer': c.n_layer, 'n_head': c.n_head,
            'resid_pdrop': c.dropout, 'embd_pdrop': c.dropout, 'attn_pdrop': c.dropout}


def gpt2_weights(weights, c):
    """A model without biases gets biases of zero, which GPT-2's class must have."""
    found = {}
    for name, w in weights.items():
        found[name] = w = w.t() if name.endswith(TRANSPOSED) else w
        if not c.bias and ('.h.' in name or '.ln_f.' in name):
            found[name.replace('.weight', '.bias')] = torch.zeros(w.shape[-1])
    return found


def llama_config(c, norm):
    return {'max_position_embeddings': c.block_size, 'hidden_size': c.n_embd,
            'num_hidden_layers': c.n_layer, 'num_attention_heads': c.n_head,
            'num_key_value_heads': c.n_head, 'head_dim': c.n_embd // c.n_head,
            'intermediate_size': c.mlp_width, 'hidden_act': HF_ACTIVATIONS[c.mlp],
            'attention_bias': c.bias, 'mlp_bias': c.bias, 'rope_theta': 10000.0,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0,
                                'partial_rotary_factor': 1.0},
            'partial_rotary_factor': 1.0, 'attention_dropout': c.dropout,
            'rms_norm_eps' if norm == 'RMSNorm' else 'norm_eps': 1e-5}


LLAMA_NAMES = [(r'transformer\.wte', 'model.embed_tokens'), (r'transformer\.ln_f', 'model.norm'),
               (r'transformer\.h\.', 'model.layers.'), ('ln_1', 'input_layernorm'),
               ('ln_2', 'post_attention_layernorm'), (r'attn\.c_proj', 'self_attn.o_proj'),
               (r'mlp\.c_proj', 'mlp.down_proj'), (r'attn\.([qk]_norm)', r'self_attn.\1')]


def llama_weights(weights, c, norm):
    """Under Llama's names, with matrices of their own for q, k, v and for SwiGLU's two halves."""
    found = {}
    for name, w in weights.items():
        is_norm = 'ln_' in name
        for ours, theirs in LLAMA_NAMES:
            name = re.sub(ours, theirs, name)
        if 'attn.c_attn' in name:
            parts = zip(('q_proj', 'k_proj', 'v_proj'), w.chunk(3), strict=True)
            found |= {name.replace('attn.c_attn', f'self_attn.{part}'): x for part, x in parts}
        elif 'c_fc' in name and c.mlp == 'swiglu':
            parts = zip(('gate_proj', 'up_proj'), w.chunk(2), strict=True)
            found |= {name.replace('c_fc', part): x for part, x in parts}
        elif is_norm and norm == 'LayerNorm' and name.endswith('.weight'):
            found[name] = w - 1  # Nemotron adds it again
            if not c.bias:
                found[name.replace('.weight', '.bias')] = torch.zeros_like(w)
        else:
            found[name.replace('c_fc', 'up_proj')] = w
    return found


def hf_tokenizer(tokenizer):
    """The content of tokenizer.json (the format of Hugging Face's tokenizers library)."""
    kind, end = tokenizer.to_json()['kind'], tokenizer.end_of_text
    special = {} if end is None else {END_OF_TEXT: end}
    merges = []
    if kind == 'char':
        try:
            tokenizer.chars.encode()
        except UnicodeEncodeError:
            raise UserError('the tokenizer knows lone surrogates, halves of characters, which '
                            "Hugging Face's format cannot hold") from None
        vocab = {char: i for i, char in enumerate(tokenizer.chars)}
        cut, join = None, {'type': 'Fuse'}
    else:
        tokens = [tokenizer.decode_bytes([i]) for i in range(end)]
        vocab = {as_printable(token): i for i, token in enumerate(tokens)}
        merges = [' '.join(map(as_printable, pair)) for pair in merges_of(tokens)]
        # Its pattern for cutting text is GPT-2's, and ours.
        cut = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
               'use_regex': kind != 'byte'}
        join = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True,
                'use_regex': True}
        if kind == 'bpe':
            special[PADDING] = end + 1
    return {
        'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None,
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False,
                          'rstrip': False, 'normalized': False, 'special': True}
                         for text, i in special.items()],
        'pre_tokenizer': cut, 'post_processor': None, 'decoder': join,
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False,
                  'continuing_subword_prefix': None, 'end_of_word_suffix': None,
                  'byte_fallback': False, 'ignore_merges': True,  # as tiktoken: whole words first
                  'vocab': vocab | special, 'merges': merges},
    }


def merges_of(tokens):
    """The bytes of all tokens, in order of rank → the two parts that each was merged from."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        parts = [token[j:j + 1] for j in range(len(token))]
        while len(parts) > 2:
            pairs = [rank.get(a + b, i) for a, b in pairwise(parts)]
            if min(pairs) == i:
                break
            at = pairs.index(min(pairs))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges


def as_printable(token):
    """Bytes as the visible characters that GPT-2's vocabulary shows them as: a space is 'Ġ'."""
    return ''.join(PRINTABLE[byte] for byte in token)


VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these stand for themselves
PRINTABLE = {byte: chr(byte) for byte in VISIBLE} \
    | {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}
