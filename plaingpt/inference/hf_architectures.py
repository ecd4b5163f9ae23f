"""The architectures of Hugging Face's transformers that compute the same as a GPT of ours.

The table at the end says which GPTConfigs each can express. A field that it does not list must have
its default, so a new flag is refused by name until it is listed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from model import ROTARY_BASE, GPTConfig
from plaingpt.weights import SIZES, check_fields

ANY = None  # every value
ACTIVATIONS = {'gelu': 'gelu_new', 'gelu_erf': 'gelu', 'relu2': 'relu2', 'swiglu': 'silu'}
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
DROPOUTS = ('resid_pdrop', 'embd_pdrop', 'attn_pdrop')  # of GPT-2
# Written for other readers; they do not change what a trained model computes.
NOT_READ = {'architectures', 'n_ctx', 'attention_dropout', *DROPOUTS}


@dataclass(frozen=True)
class Architecture:
    hf_class: str  # its class in transformers
    # GPTConfig field → its values here; the first is meant where config.json lacks the key
    expressible: dict
    keys: dict  # GPTConfig field → its key in config.json
    fixed: Callable  # GPTConfig → what else config.json must say
    write_weights: Callable  # {our name: tensor}, GPTConfig → {their name: tensor}
    read_weights: Callable  # {their name: tensor} → {our name: tensor}

    def refusals(self, config):
        """The fields that it cannot express, as {'field=allowed': value}."""
        found = {}
        for field in fields(config):
            value = getattr(config, field.name)
            allowed = self.expressible.get(field.name, (field.default,))
            if allowed is not ANY and value not in allowed:
                found[f'{field.name}={" or ".join(map(str, allowed))}'] = value
        return found

    def write_config(self, config):
        """GPTConfig → the content of config.json but model_type."""
        ours = {key: getattr(config, field) for field, key in self.keys.items()}
        return {'architectures': [self.hf_class], **self.fixed(config),
                **{key: ACTIVATIONS.get(value, value) for key, value in ours.items()}}

    def read_config(self, hf):
        """The content of config.json → the fields of GPTConfig but dropout.

        Raises ValueError, KeyError or TypeError where it says what our model does not compute."""
        hf = {key: 'gelu_new' if value == 'gelu_pytorch_tanh' else value  # two names for one
              for key, value in hf.items() if value is not None}
        shape = {field: values[0] for field, values in self.expressible.items() if values}
        for field, key in self.keys.items():
            value = hf[key] if field in SIZES else OUR_ACTIVATIONS.get(hf.get(key), hf.get(key))
            if field in SIZES or value in self.expressible[field]:
                shape[field] = value
        check_fields(shape)
        for key, value in self.write_config(GPTConfig(**shape)).items():
            if key not in NOT_READ and hf.get(key, value) != value:
                raise ValueError(f'config.json says {key}={hf[key]!r}, which is not supported, as '
                                 f'{value!r} is')
        return shape


# GPT-2's linear layers are Conv1Ds, whose weight is (in, out); a Linear's is (out, in).
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')


def gpt2_fixed(c):
    return {'layer_norm_epsilon': 1e-5, 'scale_attn_weights': True, 'add_cross_attention': False,
            'scale_attn_by_inverse_layer_idx': False, 'n_inner': 4 * c.n_embd,
            'n_ctx': c.block_size, **dict.fromkeys(DROPOUTS, c.dropout)}


def to_gpt2(weights, config):
    """A model without biases gets biases of zero, which GPT-2's class must have."""
    found = {}
    for name, w in weights.items():
        found[name] = w = w.t() if name.endswith(TRANSPOSED) else w
        if not config.bias and ('.h.' in name or '.ln_f.' in name):
            found[name.replace('.weight', '.bias')] = torch.zeros(w.shape[-1])
    return found


def from_gpt2(weights):
    """OpenAI's own upload leaves the prefix of the names out."""
    return {name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}':
            w.t() if name.endswith(TRANSPOSED) else w for name, w in weights.items()}


# Llama and Qwen3: our module → theirs, whose weights may be parts of one matrix of ours.
LLAMA_MODULES = {
    'transformer.wte': ['model.embed_tokens'],
    'transformer.h.#.ln_1': ['model.layers.#.input_layernorm'],
    'transformer.h.#.attn.c_attn': [f'model.layers.#.self_attn.{x}_proj' for x in 'qkv'],
    'transformer.h.#.attn.q_norm': ['model.layers.#.self_attn.q_norm'],
    'transformer.h.#.attn.k_norm': ['model.layers.#.self_attn.k_norm'],
    'transformer.h.#.attn.c_proj': ['model.layers.#.self_attn.o_proj'],
    'transformer.h.#.ln_2': ['model.layers.#.post_attention_layernorm'],
    'transformer.h.#.mlp.c_fc': [f'model.layers.#.mlp.{x}_proj' for x in ('gate', 'up')],
    'transformer.h.#.mlp.c_proj': ['model.layers.#.mlp.down_proj'],
    'transformer.ln_f': ['model.norm'],
}


def llama_fixed(c):
    # The last is how transformers 5 says the two before.
    return {'num_key_value_heads': c.n_head, 'head_dim': c.n_embd // c.n_head,
            'intermediate_size': c.mlp_width, 'mlp_bias': c.bias, 'attention_dropout': c.dropout,
            'rms_norm_eps': 1e-5, 'use_sliding_window': False, 'rope_theta': ROTARY_BASE,
            'rope_scaling': None,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': ROTARY_BASE}}


def to_llama(weights, config):
    found = {}
    for name, w in weights.items():
        module, layer, kind = split_name(name)
        parts = LLAMA_MODULES.get(module, [module])
        for part, rows in zip(parts, w.chunk(len(parts)), strict=True):
            found[f'{part.replace("#", layer)}.{kind}'] = rows
    return found


def from_llama(weights):
    ours = {part: module for module, parts in LLAMA_MODULES.items() for part in parts}
    found = {}  # our name → {their module: rows}
    for name, w in weights.items():
        part, layer, kind = split_name(name)
        module = ours.get(part, part).replace('#', layer)
        found.setdefault(f'{module}.{kind}', {})[part] = w
    return {name: torch.cat([parts[part] for part in ours if part in parts] or [*parts.values()])
            for name, parts in found.items()}


def split_name(name):
    """'model.layers.3.mlp.up_proj.bias' → ('model.layers.#.mlp.up_proj', '3', 'bias')."""
    layer = re.search(r'\.(\d+)\.', name)
    module, _, kind = re.sub(r'\.\d+\.', '.#.', name).rpartition('.')
    return module, layer[1] if layer else '', kind


# Dropout and initialisation do not change what a trained model computes. Attention that stays
# within a document is plain attention where there is one: a conversation, or a text up to its end.
COMMON = dict.fromkeys(
    (*SIZES, 'dropout', 'zero_init', 'document_attention', 'document_start'), ANY)
GPT2 = {**COMMON, 'mlp': ('gelu', 'gelu_erf', 'relu2'), 'bias': (True, False),
        'tied_head': (True, False)}
LLAMA = {**COMMON, 'rotary': (True,), 'rmsnorm': (True,), 'mlp': ('swiglu',),
         'bias': (False, True), 'tied_head': (False, True)}
QWEN3 = {**LLAMA, 'qk_norm': (True,), 'bias': (False,)}
GPT2_KEYS = dict(vocab_size='vocab_size', block_size='n_positions', n_layer='n_layer',
                 n_head='n_head', n_embd='n_embd', mlp='activation_function',
                 tied_head='tie_word_embeddings')
LLAMA_KEYS = dict(vocab_size='vocab_size', block_size='max_position_embeddings',
                  n_layer='num_hidden_layers', n_head='num_attention_heads', n_embd='hidden_size',
                  mlp='hidden_act', tied_head='tie_word_embeddings', bias='attention_bias')
ARCHITECTURES = {
    'gpt2': Architecture('GPT2LMHeadModel', GPT2, GPT2_KEYS, gpt2_fixed, to_gpt2, from_gpt2),
    'llama': Architecture('LlamaForCausalLM', LLAMA, LLAMA_KEYS, llama_fixed, to_llama, from_llama),
    'qwen3': Architecture('Qwen3ForCausalLM', QWEN3, LLAMA_KEYS, llama_fixed, to_llama, from_llama),
}
