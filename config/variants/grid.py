"""The grid: four models, each trained in six ways.

    python bench.py config/grid_cpu.py --variants=grid

Training is float32 and AdamW at a constant learning rate after the warmup, unless a variant says
otherwise. A reduced batch is a quarter; accumulation takes four of these a step.
"""

from plaingpt.system.errors import UserError

SGD_TIMES_LR = 100  # SGD's learning rate, in AdamW's; settings.py on learning_rate says so


def variants(config):
    """TrainConfig → {name: the settings that it changes}, the first of them the base."""
    if config.batch_size % 4:
        raise UserError(f'batch_size={config.batch_size}: the reduced batch is a quarter, so it '
                        'must divide by 4')
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
                         'min_lr': SGD_TIMES_LR * config.min_lr},
        'float16': {'dtype': 'float16'},
        'bfloat16': {'dtype': 'bfloat16'},
        'reduced batch': {'batch_size': config.batch_size // 4},
        'accumulation': {'batch_size': config.batch_size // 4,
                         'gradient_accumulation_steps': 4 * micro_steps}}
    return {' & '.join(filter(None, (model, training))) or 'default':
            {**base, **models[model], **trainings[training]}
            for model in models for training in trainings}
