"""The architectures of Hugging Face's transformers that compute what a GPT of ours computes.

The table at the end says which GPTConfigs each can express. A field that it does not list must have
its default: a model with a new flag goes out with its own code. So does one whose logits are not
those of published_logits(), because its model.py was changed.
"""

import math
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.nn.functional as F

from model import VOCAB_WEIGHTS, GPTConfig

SIZES = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd')
ANY = None  # every value
ACTIVATIONS = {'gelu': 'gelu_new', 'gelu_erf': 'gelu', 'relu2': 'relu2', 'swiglu': 'silu'}
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
# Of scaled rotary positions; the rest has a key of its own.
SCALING = {'rotary_factor': 'factor', 'rotary_length': 'original_max_position_embeddings'}


@dataclass(frozen=True)
class Architecture:
    """What Gpt2 and Llama have in common. Each of them has besides

    fixed         GPTConfig → what else config.json must say
    write_weights {our name: tensor}, GPTConfig → {their name: tensor}; they share memory, so that
                  weights are read by copying them into these
    """

    hf_class: str  # its class in transformers
    # GPTConfig field → its values here; the first is meant where config.json lacks the key
    expressible: dict
    keys: dict  # GPTConfig field → its key in config.json
    defaults: dict  # what a key means that config.json lacks

    def expresses(self, config):
        """Whether its config.json can say what a GPTConfig says."""
        return all(allowed is ANY or getattr(config, field.name) in allowed
                   for field in fields(config)
                   for allowed in [self.expressible.get(field.name, (field.default,))])

    def write_config(self, config):
        """GPTConfig → the content of config.json but model_type."""
        config = replace(config, n_inner=config.mlp_width, head_dim=config.head_size,
                         n_kv_head=config.n_kv_head or config.n_head)
        ours = {key: getattr(config, field) for field, key in self.keys.items()}
        return {'architectures': [self.hf_class], **self.fixed(config),
                **{key: ACTIVATIONS.get(value, value) for key, value in ours.items()}}

    def read_config(self, hf):
        """The content of config.json → GPTConfig.

        Raises ValueError, KeyError or TypeError where our model does not compute what it says, so
        that it is not what we would write of these fields."""
        hf = {**self.defaults, **flattened(hf)}
        shape = {field: values[0] for field, values in self.expressible.items() if values}
        for field, key in {**self.keys, **SCALING}.items():
            said = hf[key] if field in SIZES else hf.get(key)
            value = OUR_ACTIVATIONS.get(said, said)
            if value is not None and value in (self.expressible[field] or [value]):
                shape[field] = value
        config = GPTConfig(**shape)
        ours = {**flattened(self.write_config(config)), 'partial_rotary_factor': 1.0,
                'layer_types': ['full_attention'] * config.n_layer}
        for key, value in ours.items():
            if key != 'architectures' and hf.get(key, value) != value:
                raise ValueError(f'config.json says {key}={hf[key]!r}, which is not supported, as '
                                 f'{value!r} is')
        return config


def flattened(hf):
    """config.json without null, and with what it says of rotary positions beside the rest:
    transformers 5 has it in rope_parameters, 4 in rope_scaling."""
    rope = {**(hf.get('rope_scaling') or {}), **(hf.get('rope_parameters') or {})}
    rope.setdefault('rope_type', rope.get('type'))  # two names for one, as of GPT-2's GELU
    return {key: 'gelu_new' if value == 'gelu_pytorch_tanh' else value
            for key, value in {**hf, **rope}.items()
            if value is not None and key not in ('rope_scaling', 'rope_parameters')}


def without_padding(weights, config):
    """{our name: tensor} without the rows that pad the vocabulary."""
    return {name: w[:config.vocab_size] if name.endswith(VOCAB_WEIGHTS) else w
            for name, w in weights.items()}


# GPT-2's linear layers are Conv1Ds, whose weight is (in, out); a Linear's is (out, in).
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')


class Gpt2(Architecture):
    def fixed(self, c):
        return {'scale_attn_weights': True, 'add_cross_attention': False,
                'scale_attn_by_inverse_layer_idx': False}

    def write_weights(self, weights, config):
        """A model without biases gets biases of zero, which GPT-2's class must have."""
        found = {}
        for name, w in without_padding(weights, config).items():
            found[name] = w = w.t() if name.endswith(TRANSPOSED) else w
            if not config.bias and ('.h.' in name or '.ln_f.' in name):
                found[name.replace('.weight', '.bias')] = torch.zeros(w.shape[-1])
        return found


# In Llama and Qwen: part of our name → of theirs, whose weights may be parts of one matrix of ours.
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
    """Qwen2 and Qwen3 too."""

    def fixed(self, c):
        rotary = {'rope_type': 'default'} if c.rotary_factor == 1 else {
            'rope_type': 'llama3', 'factor': c.rotary_factor, 'low_freq_factor': 1.0,
            'high_freq_factor': 4.0, 'original_max_position_embeddings': c.rotary_length}
        return {
            'mlp_bias': c.bias, 'use_sliding_window': False,
            'rope_scaling': None if c.rotary_factor == 1 else rotary,
            'rope_parameters': {**rotary, 'rope_theta': c.rotary_base}}  # as transformers 5 has it

    def write_weights(self, weights, config):
        found = {}
        for name, w in without_padding(weights, config).items():
            theirs = [name]
            for ours, parts in LLAMA_NAMES.items():
                if ours in name:
                    theirs = [each.replace(ours, part) for each in theirs for part in parts]
            rows = w.split(config.qkv_sizes) if '.c_attn.' in name else w.chunk(len(theirs))
            found |= zip(theirs, rows, strict=True)
        return found


class OwnCode:
    """Any other model. The folder holds model.py, and remote_code.py for transformers."""

    def write_config(self, config):
        """GPTConfig → the content of config.json but model_type."""
        # Attention that stays within a document is plain attention where there is one.
        ours = replace(config, document_attention=False, document_start=-1)
        return {
            'architectures': ['PlainGPT'], 'gpt': asdict(ours), 'vocab_size': config.vocab_size,
            'max_position_embeddings': config.block_size, 'hidden_size': config.n_embd,
            'num_hidden_layers': config.n_layer, 'num_attention_heads': config.n_head,
            'tie_word_embeddings': config.tied_head,
            'auto_map': {'AutoConfig': 'remote_code.PlainGPTConfig',
                         'AutoModelForCausalLM': 'remote_code.PlainGPT'}}

    def read_config(self, hf):
        return GPTConfig(**{**hf['gpt'], 'dropout': 0.0})

    def write_weights(self, weights, config):
        return {f'gpt.{name}': w for name, w in weights.items()}


# Dropout and initialization do not change what a trained model computes. Attention that stays
# within a document is plain attention where there is one: a conversation, or a text up to its end.
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
    """→ the name of the first architecture that computes what a GPT computes, else OWN_CODE."""
    names = [name for name, architecture in ARCHITECTURES.items()
             if architecture.expresses(model.config)]
    return names[0] if names and computes_as_published(model) else OWN_CODE


# -----------------------------------------------------------------------------
# Does model.py, which its user may have changed, compute what these architectures compute?

MOST_TOKENS = 8192  # that are compared
ROUNDING = 3e-5  # of the size of a token's logits; published_logits() takes sums as model.py does


@torch.no_grad()
def computes_as_published(model):
    """Whether a GPT has the logits of GPT-2, Llama or Qwen with its weights, for each of as many
    tokens as it reads. None of them begins a document."""
    c = model.config
    idx = torch.randint(c.vocab_size, (1, min(c.block_size, MOST_TOKENS)),
                        generator=torch.Generator().manual_seed(0))  # (1, T)
    idx[idx == c.document_start] = (c.document_start + 1) % c.vocab_size
    try:
        expected = published_logits(dict(model.named_parameters()), c, idx)  # (1, T, V)
    except (KeyError, RuntimeError):  # it has other parameters, or of other shapes
        return False
    errors = (model.eval()(idx)[0] - expected).norm(dim=-1)  # (1, T)
    return bool((errors <= ROUNDING * expected.norm(dim=-1)).all())


def published_logits(weights, c, idx):
    """The logits (1, T, V) of GPT-2, Llama or Qwen for idx (1, T), without model.py.

    weights: {our name: tensor}; c: GPTConfig. Raises KeyError where a weight is missing, and
    where one has no part in this."""
    def linear(x, name, bias=c.bias):
        return F.linear(x, weights.pop(f'{name}.weight'),
                        weights.pop(f'{name}.bias') if bias else None)

    def norm(x, name):
        weight = weights.pop(f'{name}.weight')
        if c.rmsnorm:
            return F.rms_norm(x, weight.shape, weight, c.norm_eps)
        bias = weights.pop(f'{name}.bias') if c.bias else None
        return F.layer_norm(x, weight.shape, weight, bias, c.norm_eps)

    def activation(x):
        if c.mlp == 'swiglu':
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if c.mlp == 'relu2':
            return F.relu(x) ** 2
        return F.gelu(x, approximate='tanh' if c.mlp == 'gelu' else 'none')

    embedding, D = weights.pop('transformer.wte.weight'), c.head_size
    x, positions = embedding[idx], torch.arange(idx.size(1))  # (1, T, C), (T,)
    if c.rotary:
        speeds = c.rotary_base ** (-torch.arange(D // 2) / (D // 2))
        turns = c.rotary_length * speeds / (2 * math.pi)
        kept = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 1 and 4 are the factors in config.json
        speeds = speeds * (kept + (1 - kept) / c.rotary_factor)
        cos, sin = (f(torch.outer(positions, speeds)).repeat(1, 2) for f in (torch.cos, torch.sin))
        sin[:, :D // 2] *= -1
    else:
        x = x + weights.pop('transformer.wpe.weight')[positions]
    for i in range(c.n_layer):
        attn, mlp = f'transformer.h.{i}.attn', f'transformer.h.{i}.mlp'
        qkv = linear(norm(x, f'transformer.h.{i}.ln_1'), f'{attn}.c_attn', c.bias or c.qkv_bias)
        q, k, v = (each.unflatten(2, (-1, D)).transpose(1, 2)  # (1, H or KV, T, D)
                   for each in qkv.split(c.qkv_sizes, dim=2))
        if c.qk_norm:
            q, k = norm(q, f'{attn}.q_norm'), norm(k, f'{attn}.k_norm')
        if c.rotary:
            q, k = (torch.addcmul(each * cos, each.roll(D // 2, dims=-1), sin) for each in (q, k))
        k, v = (each.repeat_interleave(q.size(1) // k.size(1), dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f'{attn}.c_proj')
        hidden = linear(norm(x, f'transformer.h.{i}.ln_2'), f'{mlp}.c_fc')
        x = x + linear(activation(hidden), f'{mlp}.c_proj')
    x = norm(x, 'transformer.ln_f')
    head = embedding if c.tied_head else weights.pop('lm_head.weight')
    if weights:
        raise KeyError(*weights)
    return F.linear(x, head)[..., :c.vocab_size]
