"""The step time with each classic optimization, added one after another.

    python bench.py config/gpt2_124m.py --variants=ladder --max_iters=50
"""

variants = {
    'float32, eager': {'dtype': 'float32', 'compile': False},
    '+ bfloat16': {'dtype': 'bfloat16', 'compile': False},
    '+ torch.compile': {'dtype': 'bfloat16', 'compile': True},
}
