"""What each part of the quickstart's recipe gains: the recipe, and the recipe without each of them.

    python bench.py config/quickstart.py --variants=ablation
"""

variants = {
    'the recipe': {},
    'value_embeddings=False': {'value_embeddings': False},
    'conv=0': {'conv': 0},
    'embedding_lr_scale=1': {'embedding_lr_scale': 1.0},
    'head_lr_scale=1': {'head_lr_scale': 1.0},
    'vector_lr_scale=1': {'vector_lr_scale': 1.0},
    'optimizer=muon': {'optimizer': 'muon'},
}
