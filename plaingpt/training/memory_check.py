"""Does a run fit into memory? Where that is in doubt, the plan of memory.py decides. It takes
seconds, so it is not loaded otherwise."""

from plaingpt.system.devices import device_memory
from plaingpt.system.distributed import all_gather, gloo_group, launched_world
from plaingpt.system.errors import UserError

LOGITS = 8192  # tokens that have logits at once, at most


def fit_to_memory(config, shape, dtype, device):
    """The TrainConfig of a run of a GPTConfig, with a value for parallel=auto and
    batch_size=auto. Raises UserError where the model or a step takes more memory than is free."""
    world = launched_world()
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp shares a model among processes: start them with torchrun')
    available = min(all_gather(device_memory(device, world.local_size), gloo_group()))
    if config.batch_size != 'auto' and config.parallel != 'fsdp' \
            and 4 * rough_bytes(shape, config.batch_size) < available:
        return config
    from plaingpt.training import memory
    return memory.fit(config, shape, dtype, device, available)


def rough_bytes(shape, batch_size):
    """A quick estimate of the bytes that a step takes in float32, right within a factor of 4."""
    tables = 2 + shape.value_embeddings * shape.n_layer
    rows = tables * shape.padded_vocab_size + shape.ngram_rows
    weights = shape.n_embd * (12 * shape.n_layer * shape.n_embd + rows)
    tokens = batch_size * shape.block_size
    # a block keeps some 16 numbers for each channel of a token
    numbers = tokens * shape.n_embd * (16 * shape.n_layer + 4) \
        + min(tokens, LOGITS) * shape.padded_vocab_size
    return 4 * numbers + 16 * weights  # with a gradient and two states
