"""A grid of four models, each trained in six ways.

    python bench.py config/grid_cpu.py --variants=grid

Unless a variant changes it, training uses float32 and AdamW with a constant learning rate after
warmup. A reduced batch is a quarter of the batch; accumulation uses four of them per step.
"""

from plaingpt.system.errors import UserError

SGD_TIMES_LR = 100  # SGD's learning rate / AdamW's; see learning_rate in settings.py


def variants(config):
    """Return {name: changed settings} for a TrainConfig. The first variant is the baseline."""
    if config.batch_size % 4:
        raise UserError(f'batch_size={config.batch_size}: must be a multiple of 4, '
                        'because the reduced batch is a quarter of it')
    micro_steps = config.accumulation()
    base = {'dtype': 'float32', 'optimizer': 'adamw', 'lr_schedule': 'constant',
            'total_batch_size': 0, 'gradient_accumulation_steps': micro_steps}
    models = {
        '': {},
        'context × 2': {'block_size': 2 * config.block_size},
        'layers × 2': {'n_layer': 2 * config.n_layer},
        'embeddings × 2': {'n_embd': 2 * config.n_embd}}
    trainings = {
        '': {},
        'SGD + cosine': {'optimizer': 'sgd', 'lr_schedule': 'cosine', 'decay_lr': True,
                         'learning_rate': SGD_TIMES_LR * config.learning_rate,
                         'min_lr': SGD_TIMES_LR * config.final_lr()},
        'float16': {'dtype': 'float16'},
        'bfloat16': {'dtype': 'bfloat16'},
        'reduced batch': {'batch_size': config.batch_size // 4},
        'accumulation': {'batch_size': config.batch_size // 4,
                         'gradient_accumulation_steps': 4 * micro_steps}}
    grid = {}
    for model, model_settings in models.items():
        for training, training_settings in trainings.items():
            name = ' & '.join(filter(None, (model, training))) or 'default'
            grid[name] = {**base, **model_settings, **training_settings}
    return grid
