"""Ablations of the quickstart's recipe: the recipe, and the recipe without each of its components.

    python bench.py config/quickstart.py --variants=ablation
"""

variants = {
    'the recipe': {},
    'ngram_rows=0': {'ngram_rows': 0},
    'value_embeddings=False': {'value_embeddings': False},
    'conv=0': {'conv': 0},
    'lr_scales without embedding': {'lr_scales': 'head:2,vector:4'},
    'lr_scales without head': {'lr_scales': 'embedding:8,vector:4'},
    'lr_scales without vector': {'lr_scales': 'embedding:8,head:2'},
    'optimizer=muon': {'optimizer': 'muon'},
}
