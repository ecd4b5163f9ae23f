"""The step time with each classic optimization, added one after another.

    python bench.py config/gpt2_124m.py --variants=ladder --max_iters=50
"""

CHANGES = {
    'float32, eager': {'dtype': 'float32', 'compile': False},
    '+ bfloat16': {'dtype': 'bfloat16'},
    '+ torch.compile': {'compile': True},
}


def variants(config):
    """Return {name: settings}, where each variant includes the changes before it."""
    ladder = {}
    settings = {}
    for name, change in CHANGES.items():
        settings = {**settings, **change}
        ladder[name] = settings
    return ladder
