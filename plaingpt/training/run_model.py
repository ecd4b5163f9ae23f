"""The model of a run: its shape, its weights, and where it is trained."""

import math
from dataclasses import fields, replace

from model import GPT, GPTConfig
from plaingpt.data.tokenizers import described_vocab_size, words_of
from plaingpt.inference.hf_export import describe_export
from plaingpt.inference.pretrained import grow_vocabulary, open_pretrained, pretrained_shape
from plaingpt.parallel.sharding import Replicated, Sharded, copy_on_meta, parameters_on_meta
from plaingpt.system.distributed import launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.checkpoint import Checkpoint
from plaingpt.training.run_data import base_tokenizer, document_start

# Fields of a model that a run has from the model that it starts from, whatever its settings say.
KEPT_SHAPE = [field.name for field in fields(GPTConfig) if field.name not in (
    'block_size', 'vocab_size', 'dropout', 'document_attention', 'document_start')]


def with_shape(config, shape):
    """A TrainConfig whose settings of the model are those that a GPTConfig has."""
    return replace(config, **{key: getattr(shape, key) for key in KEPT_SHAPE})


def run_shape(config, dataset, resumed):
    """The GPTConfig of a run: of the checkpoint that it continues, of the model that it starts
    from, or a new one. Raises UserError where there is no such model, or it fits no such data."""
    if resumed:
        return GPTConfig(**{**resumed.state['model'], 'dropout': config.dropout})
    start = start_shape(config)
    if start is None:
        return config.gpt_config(dataset.vocab_size, document_start(config, dataset))
    asked = {key: getattr(config, key) for key in KEPT_SHAPE}
    if other := [f'{key}={getattr(start, key)} (not {value})' for key, value in asked.items()
                 if value != getattr(start, key)]:
        print0(f'the run has the shape of {config.init_from}: {", ".join(other)}')
    new_tokens = missing_chat_tokens(dataset, start.vocab_size)
    start = replace(start, vocab_size=start.vocab_size + new_tokens)
    check_start(config, start, dataset.folder, dataset.vocab_size)
    if config.document_attention:
        start = replace(start, document_start=document_start(config, dataset))
    return replace(start, block_size=config.block_size)


def start_shape(config):
    """The GPTConfig of the model that config.init_from names, or None where a run starts anew. Its
    weights are not read. Raises UserError where there is no such model."""
    if config.init_from == 'scratch':
        return None
    run = config.out_dir if config.init_from in ('resume', 'auto') else config.init_from
    find = checkpoints.find if config.init_from == 'resume' else checkpoints.find_named
    if found := find(run, config.checkpoint):
        shape = found.state['model']
    elif config.init_from == 'auto':
        return None
    else:
        shape = pretrained_shape(config.init_from)
    if config.document_attention:
        shape = {**shape, 'document_attention': True, 'document_start': 0}  # run_shape knows which
    return GPTConfig(**{**shape, 'dropout': config.dropout})


def missing_chat_tokens(dataset, vocab_size):
    """How many rows a model's embedding lacks: those of the special tokens of a dataset of
    conversations, where its vocabulary is that of the dataset's base tokenizer; else 0."""
    base = base_tokenizer(dataset)
    return dataset.vocab_size - vocab_size if base and described_vocab_size(base) == vocab_size \
        else 0


def check_start(config, shape, folder, vocab_size):
    """Raise UserError where a model of this GPTConfig cannot start a run on the dataset."""
    if config.block_size > shape.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{shape.block_size} tokens: use --block_size={shape.block_size} or less')
    if vocab_size != shape.vocab_size:
        raise UserError(f'{folder} has a vocabulary of {vocab_size} and {config.init_from} one of '
                        f'{shape.vocab_size}: prepare the text with the tokenizer of the model, or '
                        'name another model with --init_from')


def find_start(config, dataset):
    """The Checkpoint or the Pretrained that config.init_from names, of a tokenizer that is the
    dataset's or its base; None where a run starts anew. Raises UserError."""
    if config.init_from in ('scratch', 'auto'):
        return None
    start = checkpoints.find_named(config.init_from, config.checkpoint)
    if start:
        tokenizer, source, other = start.state['tokenizer'], start.path, 'THE_OLD_DATASET'
        loss = f', validation loss {start.val_loss:.4f}' * math.isfinite(start.val_loss)
        trained = f' (iteration {start.iter_num:,}{loss})'
    else:
        start = open_pretrained(config.init_from)
        tokenizer, source, other = start.tokenizer_json(), config.init_from, config.init_from
        trained = ''
    known = [words_of(each) for each in (dataset.tokenizer_json(), base_tokenizer(dataset)) if each]
    if tokenizer is not None and words_of(tokenizer) not in known:
        raise UserError(f'{source} was trained with another tokenizer than that of '
                        f'{dataset.folder}: prepare the text with --tokenizer={other}')
    print0(f'{source}{trained}: the run starts from its weights; the '
           'optimizer, the iteration count and the order of the data begin anew')
    return start


def build_model(config, shape, start):
    """The model of a run, of a GPTConfig, on the CPU. start: of find_start, or the checkpoint that
    is resumed. With fsdp, only rank 0 holds weights, and none where each process loads its rows."""
    if config.parallel == 'fsdp' and (loads_rows(start, shape) or not launched_world().is_main):
        with parameters_on_meta():
            model = GPT(shape)
    else:
        model = load_start(start, shape) if start else GPT(shape)
    model.loss_chunk_tokens = 'auto'
    model.activation_checkpointing = config.activation_checkpointing
    print0(f'GPT of {model.num_parameters():,} parameters: {model.config.n_layer} layers, '
           f'{model.config.n_head} heads, {model.config.n_embd} channels')
    print0(describe_export(model.config))
    return model


def loads_rows(start, shape):
    """Whether processes can load their rows of a model of this shape, each by itself."""
    if isinstance(start, Checkpoint):
        sizes = {key: start.state['model'][key] for key in ('vocab_size', 'block_size')}
        return sizes == {key: getattr(shape, key) for key in sizes}
    return start is not None


def load_start(start, shape):
    """The model of a Checkpoint or a Pretrained, cut and grown to the GPTConfig of a run."""
    if not isinstance(start, Checkpoint):
        model = GPT(shape)
        start.load_weights(model)
        return model
    model = start.load_model(dropout=shape.dropout)
    if new := shape.vocab_size - model.config.vocab_size:
        grow_vocabulary(model, new)
    model.crop_block_size(shape.block_size)
    model.config = shape  # of which document_attention may differ: no weight depends on it
    return model


def place_model(model, config, start, device, compile, dtype, world):
    """Put a model of build_model where it is trained → Replicated or Sharded."""
    if config.parallel != 'fsdp':
        return Replicated(model.to(device), device, compile, world)
    parallel = Sharded(copy_on_meta(model), device, compile, dtype)
    if loads_rows(start, model.config):
        start.load_weights(parallel.model)
    else:
        parallel.load(model.state_dict())
    return parallel
