"""Architectures of Hugging Face's transformers that compute the same as a GPT of model.py.

ARCHITECTURES lists the GPTConfigs that each can express with the model.py of this release. Fields
that it does not list must have their defaults, so a model with a new flag is exported with its own
code. So is each model if model.py was edited.
"""

from dataclasses import asdict, dataclass, fields, replace

import torch

from model import VOCAB_WEIGHTS, GPTConfig
from plaingpt.core.weights import is_edited

SIZES = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd')
ANY = None  # any value is allowed
HF_ACTIVATIONS = {'gelu': 'gelu_new', 'gelu_erf': 'gelu', 'relu2': 'relu2', 'swiglu': 'silu'}
OUR_ACTIVATIONS = {hf_name: name for name, hf_name in HF_ACTIVATIONS.items()}
# GPTConfig field → key in config.json, inside rope_scaling or rope_parameters
ROPE_SCALING_KEYS = {'rotary_factor': 'factor', 'rotary_length': 'original_max_position_embeddings'}


@dataclass(frozen=True)
class Architecture:
    """The base of Gpt2 and Llama, which define

    extra_config  GPTConfig → entries of config.json that are the same for every such model
    write_weights {our name: tensor}, GPTConfig → {name in transformers: tensor}; both share memory,
                  so weights are loaded by copying them into the result
    """

    hf_class: str  # its class in transformers
    # GPTConfig field → its values here; the first is the default if config.json lacks the key
    expressible: dict
    keys: dict  # GPTConfig field → its key in config.json
    defaults: dict  # key → its value if config.json lacks it

    def flags_to_change(self, config):
        """→ {field: the value that it must have} of a GPTConfig that config.json cannot express."""
        flags = {}
        for field in fields(config):
            allowed = self.expressible.get(field.name, (field.default,))
            if allowed is not ANY and getattr(config, field.name) not in allowed:
                flags[field.name] = allowed[0]
        return flags

    def write_config(self, config):
        """GPTConfig → the content of config.json, without model_type."""
        config = replace(config, n_inner=config.mlp_width, head_dim=config.head_size,
                         n_kv_head=config.n_kv_head or config.n_head)
        hf_config = {'architectures': [self.hf_class], **self.extra_config(config)}
        for field, key in self.keys.items():
            value = getattr(config, field)
            hf_config[key] = HF_ACTIVATIONS.get(value, value)
        return hf_config

    def read_config(self, hf_config):
        """The content of config.json → GPTConfig. Raises ValueError, KeyError or TypeError if our
        model cannot compute what it describes, so that write_config() would not return it."""
        hf_config = {**self.defaults, **flatten(hf_config)}
        settings = {field: values[0] for field, values in self.expressible.items() if values}
        for field, key in {**self.keys, **ROPE_SCALING_KEYS}.items():
            value = hf_config[key] if field in SIZES else hf_config.get(key)
            value = OUR_ACTIVATIONS.get(value, value)
            if value is not None and value in (self.expressible[field] or [value]):
                settings[field] = value
        config = GPTConfig(**settings)
        supported = {**flatten(self.write_config(config)), 'partial_rotary_factor': 1.0,
                     'layer_types': ['full_attention'] * config.n_layer}
        for key, value in supported.items():
            if key != 'architectures' and hf_config.get(key, value) != value:
                raise ValueError(f'config.json: {key}={hf_config[key]!r} is not supported; '
                                 f'expected {value!r}')
        return config


def flatten(hf_config):
    """config.json without nulls, and with the rotary parameters at the top level: transformers 5
    keeps them in rope_parameters, version 4 in rope_scaling."""
    rope = {**(hf_config.get('rope_scaling') or {}), **(hf_config.get('rope_parameters') or {})}
    rope.setdefault('rope_type', rope.get('type'))  # an older name of the same key
    flat = {}
    for key, value in {**hf_config, **rope}.items():
        if value == 'gelu_pytorch_tanh':
            value = 'gelu_new'  # another name of the same activation
        if value is not None and key not in ('rope_scaling', 'rope_parameters'):
            flat[key] = value
    return flat


def without_padding(weights, config):
    """{our name: tensor} without the padding rows of the vocabulary."""
    return {name: w[:config.vocab_size] if name.endswith(VOCAB_WEIGHTS) else w
            for name, w in weights.items()}


# GPT-2's linear layers in transformers are Conv1Ds, with weights (in, out) instead of (out, in).
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')


class Gpt2(Architecture):
    def extra_config(self, c):
        return {'scale_attn_weights': True, 'add_cross_attention': False,
                'scale_attn_by_inverse_layer_idx': False}

    def write_weights(self, weights, config):
        """A model without biases gets zero biases, which the class in transformers requires."""
        hf_weights = {}
        for name, w in without_padding(weights, config).items():
            if name.endswith(TRANSPOSED):
                w = w.t()
            hf_weights[name] = w
            if not config.bias and ('.h.' in name or '.ln_f.' in name):
                hf_weights[name.replace('.weight', '.bias')] = torch.zeros(w.shape[-1])
        return hf_weights


# Substring of a parameter name → its replacements in Llama and Qwen. Where there are several, our
# matrix is theirs stacked.
LLAMA_NAMES = {
    'transformer.wte': ['model.embed_tokens'],
    'transformer.h.': ['model.layers.'],
    'transformer.ln_f': ['model.norm'],
    'ln_1.': ['input_layernorm.'],
    'ln_2.': ['post_attention_layernorm.'],
    '.attn.': ['.self_attn.'],
    'c_attn.': ['q_proj.', 'k_proj.', 'v_proj.'],
    'attn.c_proj.': ['attn.o_proj.'],
    'c_fc.': ['gate_proj.', 'up_proj.'],
    'mlp.c_proj.': ['mlp.down_proj.'],
}


class Llama(Architecture):
    """Llama, Qwen2 and Qwen3."""

    def extra_config(self, c):
        rope_scaling = None
        rope_parameters = {'rope_type': 'default'}
        if c.rotary_factor != 1:
            rope_parameters = rope_scaling = {
                'rope_type': 'llama3', 'factor': c.rotary_factor, 'low_freq_factor': 1.0,
                'high_freq_factor': 4.0, 'original_max_position_embeddings': c.rotary_length}
        return {
            'mlp_bias': c.bias, 'use_sliding_window': False,
            'rope_scaling': rope_scaling,  # transformers 4
            'rope_parameters': {**rope_parameters, 'rope_theta': c.rotary_base}}  # transformers 5

    def write_weights(self, weights, config):
        hf_weights = {}
        for name, w in without_padding(weights, config).items():
            hf_names = [name]
            for old, replacements in LLAMA_NAMES.items():
                if old in name:
                    hf_names = [hf_name.replace(old, new)
                                for hf_name in hf_names for new in replacements]
            matrices = w.split(config.qkv_sizes) if 'c_attn' in name else w.chunk(len(hf_names))
            hf_weights |= zip(hf_names, matrices, strict=True)
        return hf_weights


class OwnCode:
    """Any other model. Its folder holds model.py, and remote_code.py for transformers."""

    def write_config(self, config):
        """GPTConfig → the content of config.json, without model_type."""
        # transformers gets one document at a time, so plain attention is the same.
        single_document = replace(config, document_attention=False, document_start=-1)
        return {
            'architectures': ['PlainGPT'], 'gpt': asdict(single_document),
            'vocab_size': config.vocab_size,
            'max_position_embeddings': config.block_size, 'hidden_size': config.n_embd,
            'num_hidden_layers': config.n_layer, 'num_attention_heads': config.n_head,
            'tie_word_embeddings': config.tied_head,
            'auto_map': {'AutoConfig': 'remote_code.PlainGPTConfig',
                         'AutoModelForCausalLM': 'remote_code.PlainGPT'}}

    def read_config(self, hf_config):
        return GPTConfig(**{**hf_config['gpt'], 'dropout': 0.0})

    def write_weights(self, weights, config):
        return {f'gpt.{name}': w for name, w in weights.items()}


# Dropout and initialization do not change what a trained model computes. Nor does
# document_attention, because a sequence in transformers is one document.
COMMON = dict.fromkeys(
    (*SIZES, 'dropout', 'zero_init', 'document_attention', 'document_start', 'norm_eps', 'n_inner'),
    ANY)
GPT2 = {**COMMON, 'mlp': ('gelu', 'gelu_erf', 'relu2'), 'bias': (True, False),
        'tied_head': (True, False)}
LLAMA = {**COMMON, 'rotary': (True,), 'rmsnorm': (True,), 'mlp': ('swiglu',),
         'bias': (False, True), 'tied_head': (False, True),
         **dict.fromkeys(('n_kv_head', 'head_dim', 'rotary_base', 'rotary_factor', 'rotary_length'),
                         ANY)}
QWEN2 = {**LLAMA, 'qkv_bias': (True,), 'bias': (False,)}
QWEN3 = {**LLAMA, 'qk_norm': (True,), 'bias': (False,)}
GPT2_KEYS = dict(vocab_size='vocab_size', block_size='n_positions', n_layer='n_layer',
                 n_head='n_head', n_embd='n_embd', n_inner='n_inner', mlp='activation_function',
                 norm_eps='layer_norm_epsilon', tied_head='tie_word_embeddings')
QWEN2_KEYS = dict(vocab_size='vocab_size', block_size='max_position_embeddings',
                  n_layer='num_hidden_layers', n_head='num_attention_heads', n_embd='hidden_size',
                  n_kv_head='num_key_value_heads', head_dim='head_dim', mlp='hidden_act',
                  n_inner='intermediate_size', norm_eps='rms_norm_eps',
                  rotary_base='rope_theta', tied_head='tie_word_embeddings')
LLAMA_KEYS = {**QWEN2_KEYS, 'bias': 'attention_bias'}
ARCHITECTURES = {
    'gpt2': Gpt2('GPT2LMHeadModel', GPT2, GPT2_KEYS, {'layer_norm_epsilon': 1e-5}),
    'llama': Llama('LlamaForCausalLM', LLAMA, LLAMA_KEYS, {'rms_norm_eps': 1e-6}),
    'qwen2': Llama('Qwen2ForCausalLM', QWEN2, QWEN2_KEYS, {'rms_norm_eps': 1e-6}),
    'qwen3': Llama('Qwen3ForCausalLM', QWEN3, LLAMA_KEYS, {'rms_norm_eps': 1e-6, 'head_dim': 128})}
OWN_CODE = 'plaingpt'
READABLE = {**ARCHITECTURES, OWN_CODE: OwnCode()}


def choose_architecture(model):
    """→ the name of the first architecture that computes the same as `model`, else OWN_CODE."""
    return OWN_CODE if is_edited(model) else find_architecture(model.config)


def find_architecture(config):
    """→ the name of the first architecture that can express a GPTConfig, else OWN_CODE."""
    for name, architecture in ARCHITECTURES.items():
        if not architecture.flags_to_change(config):
            return name
    return OWN_CODE
