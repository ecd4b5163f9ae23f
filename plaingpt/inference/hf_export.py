"""A model → a folder that transformers' AutoModelForCausalLM and AutoTokenizer open."""

import json
import re
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from plaingpt.inference.pretrained import HF_SUPPORTED, OUR_TOKENIZER, TRANSPOSED
from plaingpt.system.errors import UserError

END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'


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
