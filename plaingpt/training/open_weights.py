"""The weights that a name stands for, of a run or pretrained, and a model of them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from model import GPT
from plaingpt.data import tokenizers
from plaingpt.system.devices import choose_compile, choose_device, choose_dtype, prepare_device
from plaingpt.system.distributed import print0
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints

# Channels. Narrower models generate on one thread: a second thread gains at most 6%, and beside a
# busy program two threads are a third as fast as one.
NARROW = 256


def open_weights(source, which='best'):
    """The weights that a name stands for: a Checkpoint (of the folder of one, or of the out_dir of
    a run, which has several: latest, best, or an iteration), else a Pretrained. Raises UserError.

    Both have a `source`, a `config` (GPTConfig), `tokenizer_json()`, the `state` of a run or {},
    and `load_into(model)`."""
    if Path(source, 'state.json').exists():
        return checkpoints.open_checkpoint(Path(source))
    if checkpoints.checkpoint_paths(source):
        return checkpoints.find(source, which, ('model',))
    from plaingpt.inference.pretrained import open_pretrained
    return open_pretrained(source)


def make_model(weights):
    """What open_weights returned → a GPT with these weights, in eval mode. Raises UserError."""
    model = GPT(weights.config)
    weights.load_into(model)
    return model.eval()


# -----------------------------------------------------------------------------
# a training run that starts from them


def gpt_config_from_weights(config, weights, dataset=None):
    """The GPTConfig of the model whose weights a run starts from. A dataset of conversations may
    add special tokens for it to learn. Raises UserError where it cannot read the dataset."""
    shape = replace(weights.config, dropout=config.dropout)
    if config.block_size > shape.block_size:
        raise UserError(f'block_size={config.block_size}: {config.init_from} reads at most '
                        f'{shape.block_size} tokens: use --block_size={shape.block_size} or less')
    base = dataset and dataset.tokenizer_json().get('base')  # the tokenizer inside a chat tokenizer
    if base and tokenizers.described_vocab_size(base) == shape.vocab_size:
        shape = replace(shape, vocab_size=dataset.vocab_size)
    if dataset and dataset.vocab_size != shape.vocab_size:
        raise UserError(f'{dataset.folder} has a vocabulary of {dataset.vocab_size} and '
                        f'{config.init_from} one of {shape.vocab_size}: prepare the text with the '
                        'tokenizer of the model, or name another model with --init_from')
    return shape


def check_tokenizer(config, weights, dataset):
    """Raise UserError where the model knows other tokens than the dataset, and say what starts."""
    tokenizer, described = weights.tokenizer_json(), dataset.tokenizer_json()
    known = [tokenizers.words_of(each) for each in (described, described.get('base')) if each]
    if tokenizer is not None and tokenizers.words_of(tokenizer) not in known:
        raise UserError(f'{weights.source} was trained with another tokenizer than that of '
                        f'{dataset.folder}: prepare the text with --tokenizer={config.init_from}')
    print0(f'{weights.source}: the run starts from its weights; the optimizer, the iteration count '
           'and the order of the data begin anew')


# -----------------------------------------------------------------------------
# commands that use a model


@dataclass
class ModelChoice:
    """Options that sample.py, serve.py, evaluate.py and export.py share; `load` takes them."""

    # which model
    init_from: str = 'resume'  # resume (from out_dir), gpt2…, OWNER/NAME, a folder, or a ckpt.pt
    out_dir: str = 'out'  # the run to read
    checkpoint: str = 'best'  # best, latest, or an iteration
    tokenizer: str = 'auto'  # auto: the model's own; or gpt2, byte, a dataset, run or model


def load(choice):
    """A ModelChoice → (model, tokenizer, its Checkpoint or Pretrained). Raises UserError."""
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
        raise UserError(f'{source} has no tokenizer: name the one of its '
                        f'{model.config.vocab_size} tokens: --tokenizer=data/NAME, or that of a '
                        'run or a model, gpt2 or byte')
    made = tokenizers.from_json(description)
    if made.vocab_size != model.config.vocab_size:
        raise UserError(f'{source} has {model.config.vocab_size} tokens and its tokenizer '
                        f'{made.vocab_size}: name the one that it was trained with, such as '
                        '--tokenizer=data/NAME')
    return model, made, weights


@dataclass
class GeneratorChoice(ModelChoice):
    """Options that sample.py and serve.py share; `open_generator` takes them."""

    # device
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls


def open_generator(choice, compile=False):
    """A GeneratorChoice → what writes with this model, a TextGenerator. Prints which it is.
    compile: see choose_compile(). Raises UserError."""
    from plaingpt.inference.generation import CompiledStep, check_cache, prepare_for_generation
    from plaingpt.inference.text_generator import TextGenerator
    device, _ = choose_device(choice.device)
    compiles, compile_why = choose_compile(compile, device)
    prepare_device(device)
    model, tokenizer, weights = load(choice)
    model = model.to(device)
    dtype, _ = choose_dtype(choice.dtype, device, model.config.n_embd)
    print(f'{weights.source} | {model.num_parameters():,} parameters | device {device} | '
          f'dtype {dtype}' + (f' | compile {compiles} ({compile_why})' if compile else ''))
    check_cache(model)
    if device.type == 'cpu' and model.config.n_embd < NARROW:
        torch.set_num_threads(1)
    context = prepare_for_generation(model, device, dtype, pack=not compiles)
    return TextGenerator(model, tokenizer, context, CompiledStep(model) if compiles else None)
