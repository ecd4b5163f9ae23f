"""A GPT for transformers 5. export.py copies this file, and from_pretrained() imports it;
lm_eval_model.py wraps a GPT that is in memory."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPT, GPTConfig  # an export imports its own copy: .model

# transformers 5.24 renamed past_key_values to cache.
CACHE = 'cache' if 'cache' in CausalLMOutputWithPast.__dataclass_fields__ else 'past_key_values'


class PlainGPTConfig(PreTrainedConfig):
    model_type = 'plaingpt'
    gpt: dict | None = None  # the fields of GPTConfig


class PlainGPT(PreTrainedModel, GenerationMixin):
    config_class = PlainGPTConfig
    _tied_weights_keys = {'gpt.lm_head.weight': 'gpt.transformer.wte.weight'}  # noqa: RUF012

    def __init__(self, config, gpt=None):
        super().__init__(config)
        self.gpt = gpt
        if gpt is None:
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)  # rotary angles need float32
            with torch.device('cpu'):
                self.gpt = GPT(GPTConfig(**config.gpt))
            torch.set_default_dtype(dtype)
            for p in self.gpt.parameters():
                p.data = p.data.to(dtype)
        self.buffers_copy = {name: buffer.clone() for name, buffer in self.gpt.named_buffers()}
        self.post_init()

    def _init_weights(self, module):
        for name, buffer in self.gpt.named_buffers():  # not saved, so loading leaves them empty
            buffer.data.copy_(self.buffers_copy[name])

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True,
                logits_to_keep=0, cache=None, **ignored):
        if cache is None:
            cache, past_key_values = past_key_values, None
        if cache is None:
            cache = DynamicCache()
        # An argument of a later version could be its cache, without which the text would be wrong.
        for name, value in {'past_key_values': past_key_values, **ignored}.items():
            if value is not None and not isinstance(value, (int, float, str, torch.Tensor)):
                raise TypeError(f'{name}: {type(value).__name__} is not supported; generate with '
                                'use_cache=False')
        adapter = CacheAdapter(cache, input_ids, attention_mask, self.gpt.config.n_layer)
        x = self.gpt.hidden(input_ids, adapter)  # (B, T, C)
        logits = self.gpt.logits(x[:, -logits_to_keep:])  # 0 keeps all
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache if use_cache else None})


class CacheAdapter:
    """Gives GPT.hidden() the interface of a KVCache on a DynamicCache of transformers, for the new
    tokens idx (B, T). attention_mask: (B, tokens so far), 0 for padding, or None"""

    def __init__(self, cache, idx, attention_mask, n_layer):
        if not isinstance(cache, DynamicCache):
            raise TypeError(f'expected a DynamicCache, got a {type(cache).__name__}')
        begin = cache.get_seq_length()
        end = begin + idx.size(1)
        if attention_mask is None:
            attention_mask = torch.ones(len(idx), end, device=idx.device)
        if attention_mask.shape != (len(idx), end):
            raise ValueError(f'attention_mask has the shape {tuple(attention_mask.shape)}, but '
                             f'there are {end} tokens, of which the cache has {begin}')
        not_padding = attention_mask.bool()  # (B, end)
        keys = torch.arange(end, device=idx.device)  # (end,)
        self.columns = keys[begin:]  # (T,)
        self.padding = ~not_padding[:, begin:, None]  # (B, T, 1)
        self.positions = (not_padding.cumsum(1) - 1).clamp(min=0)[:, begin:]  # (B, T)
        queries = self.columns[:, None]
        # (B, 1, T, end); padding attends to itself
        self.mask = (keys <= queries) & not_padding[:, None, None] | (keys == queries)
        # The cache gets layers for the inputs of short convolutions and of the n-gram embedding.
        cache.layers += [DynamicLayer() for _ in range(2 * n_layer + 1 - len(cache.layers))]
        self.layers = [LayerAdapter(self, cache.layers[i], cache.layers[n_layer + i])
                       for i in range(n_layer)]
        self.tokens = LayerAdapter(self, None, cache.layers[-1])


class LayerAdapter:
    def __init__(self, adapter, kv_layer, input_layer):
        self.adapter = adapter
        self.kv_layer = kv_layer
        self.input_layer = input_layer
        self.columns = adapter.columns

    def extend(self, k, v):
        return *self.kv_layer.update(k, v), self.adapter.mask

    def prepend_earlier(self, x, n):
        x, _ = self.input_layer.update(x.masked_fill(self.adapter.padding, 0), x[..., :0])
        return F.pad(x, (0, 0, n, 0))[:, -(n + len(self.columns)):]  # (B, n + T, C)
