"""An export opens in TransformerLens, which computes the same from it."""

import pytest
import torch
from foreign_models import shaken, tokens
from test_exports import SHAPES, exported


@pytest.mark.parametrize('name', [name for name in SHAPES if not name.startswith('plaingpt')])
def test_transformer_lens_computes_the_same(name, tmp_path):
    bridge = pytest.importorskip('transformer_lens.model_bridge')
    ours = shaken(**{'block_size': 64, **SHAPES[name]})
    model = bridge.TransformerBridge.boot_transformers(str(exported(tmp_path, ours)))
    idx = tokens(256, 2, 64)
    with torch.no_grad():
        logits, cache = model.run_with_cache(idx)
    assert (logits - ours(idx)[0]).abs().max() < 1e-4
    assert cache['blocks.1.attn.hook_pattern'].shape == (2, ours.config.n_head, 64, 64)
