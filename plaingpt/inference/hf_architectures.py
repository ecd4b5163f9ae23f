"""The architectures of Hugging Face's transformers that compute the same as a GPT of ours.

The table at the end says which GPTConfigs each can express; the classes translate configuration and
weights in both directions. A field of GPTConfig that an architecture does not list must have its
default, so that a new flag is refused by name until it is listed.
"""

import re
from dataclasses import dataclass, fields, replace

import torch

from model import GPTConfig

SIZES = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd')
ACTIVATIONS = {'gelu': ('gelu_new', 'gelu_pytorch_tanh'), 'gelu_erf': ('gelu',),
               'relu2': ('relu2',), 'swiglu': ('silu',)}  # ours: theirs, the first is written
ANY = None  # every value


@dataclass(frozen=True)
class Architecture:
    """What the table at the end says of each; subclasses add the translation of weights."""

    hf_class: str  # its class in transformers
    expressible: dict  # GPTConfig field → the values it can have
    keys: dict  # GPTConfig field → its key in config.json
    activation_key: str  # key of the MLP's activation
    dropout_keys: tuple  # keys of dropout, only written
    defaults: dict  # what a config.json means that lacks a key

    def refusals(self, config):
        """The fields that it cannot express, as 'field=allowed instead of value'."""
        found = []
        for field in fields(config):
            value = getattr(config, field.name)
            allowed = self.expressible.get(field.name, (field.default,))
            if allowed is not ANY and value not in allowed:
                found.append(f'{field.name}={" or ".join(map(str, allowed))} instead of {value}')
        return found

    def write_config(self, config):
        """GPTConfig → the content of config.json, but for its model_type."""
        return {'architectures': [self.hf_class],
                **{key: getattr(config, field) for field, key in self.keys.items()},
                **{key: values[0] for key, values in self.supported(config).items()},
                self.activation_key: ACTIVATIONS[config.mlp][0],
                **dict.fromkeys(self.dropout_keys, config.dropout)}

    def read_config(self, hf):
        """The content of config.json → the fields of GPTConfig but dropout.

        Raises ValueError, KeyError or TypeError where it says what our model does not compute."""
        hf = {**self.defaults, **hf, **(hf.get('rope_parameters') or {})}
        shape = {field: values[0] for field, values in self.expressible.items() if values}
        shape |= {field: hf[key] for field, key in self.keys.items()}
        check_sizes(shape)
        activations = {theirs: ours for ours in self.expressible['mlp']
                       for theirs in ACTIVATIONS[ours]}
        supported = {self.activation_key: tuple(activations), **self.supported(GPTConfig(**shape)),
                     **{key: self.expressible[field] for field, key in self.keys.items()
                        if self.expressible[field]}}
        for key, values in supported.items():
            if hf.get(key, values[0]) not in values:
                raise ValueError(f'config.json says {key}={hf[key]!r}, and only '
                                 f'{" or ".join(map(repr, values))} is supported')
        return {**shape, 'mlp': activations[hf[self.activation_key]]}


def check_sizes(shape):
    """Raise ValueError where sizes that were read make no model."""
    for key in SIZES:
        if type(shape[key]) is not int or shape[key] < 1:
            raise ValueError(f'{key}={shape[key]!r} is not a positive integer')
    if shape['n_embd'] % shape['n_head']:
        raise ValueError(f'n_embd={shape["n_embd"]} is not a multiple of n_head={shape["n_head"]}')


class GPT2(Architecture):
    # Theirs are Conv1Ds, whose weight is (in, out); a Linear's is (out, in).
    transposed = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')

    def supported(self, config):
        """Key → the values that mean what our model computes; the first is written."""
        return {'layer_norm_epsilon': (1e-5,), 'scale_attn_weights': (True,),
                'scale_attn_by_inverse_layer_idx': (False,), 'add_cross_attention': (False,),
                'n_inner': (None, 4 * config.n_embd)}

    def write_config(self, config):
        return {**super().write_config(config), 'n_ctx': config.block_size}  # for older readers

    def write_weights(self, weights, config):
        """A model without biases gets biases of zero, which GPT-2's class must have."""
        found = {}
        for name, w in weights.items():
            found[name] = w = w.t() if name.endswith(self.transposed) else w
            if not config.bias and ('.h.' in name or '.ln_f.' in name):
                found[name.replace('.weight', '.bias')] = torch.zeros(w.shape[-1])
        return found

    def read_weights(self, weights):
        """OpenAI's own upload leaves the prefix of the names out."""
        return {name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}':
                w.t() if name.endswith(self.transposed) else w for name, w in weights.items()}


# Our module → theirs. The rows of one matrix of ours are those of several of theirs.
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


class Llama(Architecture):
    def supported(self, config):
        return {'num_key_value_heads': (config.n_head,), 'mlp_bias': (config.bias,),
                'head_dim': (config.n_embd // config.n_head,),
                'intermediate_size': (config.mlp_width,), 'rms_norm_eps': (1e-5,),
                'rope_theta': (10000.0,), 'rope_type': ('default',), 'rope_scaling': (None,),
                'use_sliding_window': (False,)}

    def write_config(self, config):
        hf = super().write_config(config)
        # Version 5 of transformers has these two in one.
        return {**hf, 'rope_parameters': {key: hf[key] for key in ('rope_type', 'rope_theta')}}

    def write_weights(self, weights, config):
        found = {}
        for name, w in weights.items():
            module, layer, kind = split_name(name)
            theirs = LLAMA_MODULES.get(module, [module])
            for part, rows in zip(theirs, w.chunk(len(theirs)), strict=True):
                found[f'{part.replace("#", layer)}.{kind}'] = rows
        return found

    def read_weights(self, weights):
        places = {part: (module, i) for module, parts in LLAMA_MODULES.items()
                  for i, part in enumerate(parts)}
        found = {}  # our name → {place: rows}
        for name, w in weights.items():
            part, layer, kind = split_name(name)
            module, i = places.get(part, (part, 0))
            found.setdefault(f'{module.replace("#", layer)}.{kind}', {})[i] = w
        return {name: torch.cat([parts[i] for i in sorted(parts)])
                for name, parts in found.items()}


def split_name(name):
    """'model.layers.3.mlp.up_proj.bias' → ('model.layers.#.mlp.up_proj', '3', 'bias')."""
    layer = re.search(r'\.(\d+)\.', name)
    module, _, kind = re.sub(r'\.\d+\.', '.#.', name).rpartition('.')
    return module, layer[1] if layer else '', kind


# Every architecture has these. Dropout and initialisation do not change a trained model.
COMMON = {**dict.fromkeys((*SIZES, 'dropout', 'zero_init'), ANY), 'tied_head': (True, False)}
LLAMA = Llama(
    hf_class='LlamaForCausalLM',
    expressible={**COMMON, 'rotary': (True,), 'rmsnorm': (True,), 'mlp': ('swiglu',),
                 'bias': (True, False)},
    keys={'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
          'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
          'n_embd': 'hidden_size', 'tied_head': 'tie_word_embeddings', 'bias': 'attention_bias'},
    activation_key='hidden_act', dropout_keys=('attention_dropout',),
    defaults={'tie_word_embeddings': False, 'attention_bias': False, 'rms_norm_eps': 1e-6})
ARCHITECTURES = {
    'gpt2': GPT2(
        hf_class='GPT2LMHeadModel',
        expressible={**COMMON, 'mlp': ('gelu', 'gelu_erf', 'relu2'), 'bias': (True, False)},
        keys={'vocab_size': 'vocab_size', 'block_size': 'n_positions', 'n_layer': 'n_layer',
              'n_head': 'n_head', 'n_embd': 'n_embd', 'tied_head': 'tie_word_embeddings'},
        activation_key='activation_function',
        dropout_keys=('resid_pdrop', 'embd_pdrop', 'attn_pdrop'),
        defaults={'tie_word_embeddings': True, 'activation_function': 'gelu_new'}),
    'llama': LLAMA,
    'qwen3': replace(LLAMA, hf_class='Qwen3ForCausalLM', expressible={
        **LLAMA.expressible, 'qk_norm': (True,), 'bias': (False,)}),
}
