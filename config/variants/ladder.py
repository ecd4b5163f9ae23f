"""What each part of a recipe gives: a GPT-2 of the recipe's size, trained by AdamW in float32, then
with each part added, one after another, until it is the recipe.

    python bench.py config/quickstart.py --variants=ladder
    python bench.py config/gpt2_124m.py --variants=ladder --max_iters=50

A part that the recipe does not have, or not on this device, is left out.
"""

from dataclasses import asdict

from plaingpt.core.settings import TrainConfig
from plaingpt.system.devices import choose_compile, choose_device, choose_dtype

# Where the recipe has another optimizer, AdamW's learning rate is the best of 0.45, 0.9, 1.8 and
# 3.6e-3 for the quickstart's 128 channels in 230 steps, divided by the width as by muP (Yang et al.
# 2022, "Tensor Programs V").
ADAMW_LR_TIMES_WIDTH = 1.8e-3 * 128
PARTS = {
    '+ bfloat16': ['dtype'],
    '+ torch.compile': ['compile'],
    '+ Muon': ['optimizer', 'learning_rate', 'momentum', 'beta1', 'beta2'],
    '+ schedule, EMA': ['lr_schedule', 'min_lr', 'ema_decay'],
    '+ rotary, QK norm, activation': ['rotary', 'qk_norm', 'mlp', 'zero_init'],
    '+ untied head': ['tied_head', 'lr_scales'],
    '+ value embeddings': ['value_embeddings'],
    '+ convolution': ['conv'],
    '+ n-grams': ['ngram_rows'],
}


def variants(config):
    """Return {name: changed settings} for a TrainConfig. The first variant is the baseline."""
    device, _ = choose_device(config.device)
    recipe = asdict(config)
    recipe['dtype'], _ = choose_dtype(config.dtype, device, config.n_embd, training=True)
    recipe['compile'], _ = choose_compile(config.compile, device)
    settings = {key: getattr(TrainConfig, key) for keys in PARTS.values() for key in keys}
    settings |= {'dtype': 'float32', 'compile': False,
                 'learning_rate': ADAMW_LR_TIMES_WIDTH / config.n_embd}
    if config.optimizer == 'adamw':
        settings |= {key: recipe[key] for key in PARTS['+ Muon']}
    ladder = {'float32, eager': settings}
    for name, keys in PARTS.items():
        above = settings | {key: recipe[key] for key in keys}
        if above != settings:
            ladder[name] = settings = above
    return ladder
