"""A GPT for transformers 5: export.py puts it beside model.py, and from_pretrained() imports it."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig


class PlainGPTConfig(PreTrainedConfig):
    model_type = 'plaingpt'
    gpt: dict | None = None  # the fields of GPTConfig


class PlainGPT(PreTrainedModel, GenerationMixin):
    config_class = PlainGPTConfig
    _tied_weights_keys = {'gpt.lm_head.weight': 'gpt.transformer.wte.weight'}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # for the angles of positions
        with torch.device('cpu'):
            self.gpt = GPT(GPTConfig(**config.gpt))
        torch.set_default_dtype(dtype)
        for p in self.gpt.parameters():
            p.data = p.data.to(dtype)
        self.tables = {name: table.clone() for name, table in self.gpt.named_buffers()}
        self.post_init()

    def _init_weights(self, module):
        for name, table in self.gpt.named_buffers():  # no file has them: loading leaves them empty
            table.data.copy_(self.tables[name])

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True,
                logits_to_keep=0, **ignored):
        cache = DynamicCache() if past_key_values is None else past_key_values
        step = Step(cache, input_ids, attention_mask, self.gpt.config.n_layer)
        logits = self.gpt.logits(self.gpt.hidden(input_ids, step)[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache if use_cache else None)


class Step:
    """New tokens, idx (B, T), as GPT.hidden takes a cache: positions, mask, and a part for each
    layer. attention_mask: (B, tokens so far), 0 for padding, or None"""

    def __init__(self, cache, idx, attention_mask, n_layer):
        begin, end = cache.get_seq_length(), cache.get_seq_length() + idx.size(1)
        if attention_mask is None:
            attention_mask = torch.ones(len(idx), end, device=idx.device)
        keys, real = torch.arange(end, device=idx.device), attention_mask.bool()  # (end,), (B, end)
        self.columns, self.padding = keys[begin:], ~real[:, begin:, None]  # (T,), (B, T, 1)
        self.positions = (real.cumsum(1) - 1).clamp(min=0)[:, begin:]  # (B, T)
        queries = self.columns[:, None]
        self.mask = (keys <= queries) & real[:, None, None] | (keys == queries)  # (B, 1, T, end)
        # beside keys and values: what short convolutions read of each token
        cache.layers += [DynamicLayer() for _ in range(2 * n_layer + 1 - len(cache.layers))]
        self.layers = [Layer(self, cache.layers[i], cache.layers[n_layer + i])
                       for i in range(n_layer)]
        self.tokens = Layer(self, None, cache.layers[-1])  # for n-grams


class Layer:
    def __init__(self, step, attended, convolved):
        self.step, self.attended, self.convolved = step, attended, convolved
        self.columns = step.columns

    def extend(self, k, v):
        return *self.attended.update(k, v), self.step.mask

    def prepend_earlier(self, x, n):
        x, _ = self.convolved.update(x.masked_fill(self.step.padding, 0), x[..., :0])
        return F.pad(x, (0, 0, n, 0))[:, -(n + len(self.columns)):]  # (B, n + T, C)
