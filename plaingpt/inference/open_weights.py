"""Load a model by name: from a run, a checkpoint or pretrained weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from model import GPT
from plaingpt.core import checkpoint as checkpoints
from plaingpt.data import tokenizers
from plaingpt.system.devices import choose_compile, choose_device, choose_dtype, prepare_device
from plaingpt.system.distributed import print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

# Models with fewer channels generate on one thread: a second thread gains at most 6%, and on a busy
# machine two threads are a third as fast as one.
MIN_MULTITHREAD_CHANNELS = 256


def open_weights(source, which='best'):
    """Open the weights that a name stands for. Returns a Checkpoint if `source` is a checkpoint's
    folder or a run's out_dir (`which`: latest, best, or an iteration), else a Pretrained. Raises
    UserError.

    Both have a `source`, a `config` (GPTConfig), `tokenizer_json()`, the `state` of a run or {},
    and `load_into(model)`."""
    if Path(source, 'state.json').exists():
        return checkpoints.open_checkpoint(Path(source))
    if checkpoints.checkpoint_paths(source):
        return checkpoints.find(source, which, ('model',))
    from plaingpt.inference.pretrained import open_pretrained
    return open_pretrained(source)


def make_model(weights):
    """Build a GPT with weights from open_weights, in eval mode. Raises UserError."""
    model = GPT(weights.config)
    weights.load_into(model)
    return model.eval()


# -----------------------------------------------------------------------------
# fine-tuning


def gpt_config_from_weights(config, weights, dataset=None):
    """The GPTConfig of a run that starts from these weights. A chat dataset may add special tokens
    to the vocabulary. Raises UserError if the model and the dataset do not match."""
    gpt_config = replace(weights.config, dropout=config.dropout)
    if config.block_size > gpt_config.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} supports at most '
                        f'{count_of(gpt_config.block_size, "token")}; use '
                        f'--block_size={gpt_config.block_size} or less')
    base = dataset and dataset.tokenizer_json().get('base')  # the tokenizer inside a chat tokenizer
    if base and tokenizers.vocab_size_of(base) == gpt_config.vocab_size:
        gpt_config = replace(gpt_config, vocab_size=dataset.vocab_size)
    if dataset and dataset.vocab_size != gpt_config.vocab_size:
        raise UserError(f'{dataset.folder} has a vocabulary of {dataset.vocab_size} tokens, but '
                        f"{config.init_from}'s has {gpt_config.vocab_size}: prepare the data with "
                        "the model's tokenizer, or choose another model with --init_from")
    return gpt_config


def check_tokenizer(config, weights, dataset):
    """Check that the model and the dataset use the same tokenizer. Raises UserError."""
    model_tokenizer, data_tokenizer = weights.tokenizer_json(), dataset.tokenizer_json()
    matching = [tokenizers.vocabulary_of(data_tokenizer)]
    if base := data_tokenizer.get('base'):  # the tokenizer inside a chat tokenizer
        matching.append(tokenizers.vocabulary_of(base))
    if model_tokenizer is None:
        print0(f'{weights.source}: its tokenizer is not known, so it was not compared with that of '
               f'{dataset.folder}')
    elif tokenizers.vocabulary_of(model_tokenizer) not in matching:
        raise UserError(f'{weights.source} was trained with a different tokenizer than that of '
                        f'{dataset.folder}: prepare the data with --tokenizer={config.init_from}')
    print0(f'{weights.source}: starting from these weights with a fresh optimizer, step count and '
           'data order')


# -----------------------------------------------------------------------------
# commands that use a model


@dataclass
class ModelChoice:
    """Options to choose a model, shared by sample.py, serve.py, evaluate.py and export.py."""

    # which model
    init_from: str = 'resume'  # resume (from out_dir), gpt2…, OWNER/NAME, a folder, or a ckpt.pt
    out_dir: str = 'out'  # folder of the run to load
    checkpoint: str = 'best'  # best, latest, or an iteration
    tokenizer: str = 'auto'  # auto: the model's own; or gpt2, byte, a dataset, run or model


def load(choice):
    """Load a ModelChoice. Returns (model, tokenizer, Checkpoint or Pretrained). Raises UserError.
    """
    if choice.init_from == 'resume':
        weights = checkpoints.find(choice.out_dir, choice.checkpoint, ('model',))
    else:
        weights = open_weights(choice.init_from, choice.checkpoint)
    source = weights.source
    model = make_model(weights)
    if choice.tokenizer == 'auto':
        description = weights.tokenizer_json()
    else:
        from plaingpt.data.tokenizer_choice import describe_tokenizer
        description = describe_tokenizer(choice.tokenizer)
    if description and description['kind'] == 'foreign' and not weights.state:
        from plaingpt.data.chat_tokenizer import as_chat
        description = as_chat(description, source)
    if description is None:
        from plaingpt.data.foreign_tokenizer import SUPPORTED
        names = ', '.join(weights.tokenizer_files) or 'none'
        raise UserError(f'{source} has no supported tokenizer ({SUPPORTED}; found {names}): pass '
                        f'the one that it was trained with ({model.config.vocab_size} tokens) as '
                        '--tokenizer=data/NAME, a run, a model, gpt2 or byte')
    tokenizer = tokenizers.from_json(description)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(f'{source} has a vocabulary of {model.config.vocab_size} tokens, but its '
                        f"tokenizer's has {tokenizer.vocab_size}: set the tokenizer that it was "
                        'trained with, such as --tokenizer=data/NAME')
    return model, tokenizer, weights


@dataclass
class GeneratorChoice(ModelChoice):
    """Options to generate text, shared by sample.py and serve.py."""

    # device
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of matmuls


def open_generator(choice, compile=False):
    """Load a GeneratorChoice as a TextGenerator, and print what was loaded. compile: see
    choose_compile(). Raises UserError."""
    from plaingpt.inference.generation import CompiledStep, check_cache, prepare_for_generation
    from plaingpt.inference.text_generator import TextGenerator
    device, _ = choose_device(choice.device)
    use_compile, compile_reason = choose_compile(compile, device)
    prepare_device(device)
    model, tokenizer, weights = load(choice)
    model = model.to(device)
    dtype, _ = choose_dtype(choice.dtype, device, model.config.n_embd)
    summary = f'{weights.source} | {model.num_parameters():,} parameters | device {device} | ' \
              f'dtype {dtype}'
    if compile:
        summary += f' | compile {use_compile} ({compile_reason})'
    print(summary)
    check_cache(model)
    if device.type == 'cpu' and model.config.n_embd < MIN_MULTITHREAD_CHANNELS:
        torch.set_num_threads(1)
    context = prepare_for_generation(model, device, dtype, pack=not use_compile)
    compiled_step = CompiledStep(model) if use_compile else None
    return TextGenerator(model, tokenizer, context, compiled_step,
                         weights.state.get('document_start'))
