"""What each classic optimization gains in the time of a step, one on top of another.

    python bench.py config/gpt2_124m.py --variants=ladder --max_iters=50
"""

CHANGES = {
    'float32, eager': {'dtype': 'float32', 'compile': False},
    '+ bfloat16': {'dtype': 'bfloat16'},
    '+ torch.compile': {'compile': True},
}


def variants(config):
    """→ {name: settings}; each has those of the lines before it too."""
    found, settings = {}, {}
    for name, change in CHANGES.items():
        settings = found[name] = {**settings, **change}
    return found
