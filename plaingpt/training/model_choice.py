"""Which model to sample from, evaluate or export: a run of ours, or weights of others."""

from dataclasses import dataclass
from typing import Literal

from model import GPT, GPTConfig
from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import as_chat
from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.inference.generation import CompiledStep
from plaingpt.inference.pretrained import open_pretrained
from plaingpt.inference.text_generator import TextGenerator
from plaingpt.inference.weight_layout import prepare_for_generation
from plaingpt.system.devices import choose_compile, choose_device, choose_dtype, use_fast_matmul
from plaingpt.system.errors import UserError
from plaingpt.system.streams import status
from plaingpt.training.checkpoint import find, find_named


@dataclass
class ModelChoice:
    """What sample.py, evaluate.py and export.py ask alike, and `load` takes."""

    # which model
    init_from: str = 'resume'  # resume (from out_dir), gpt2…, OWNER/NAME, a folder, or a ckpt.pt
    out_dir: str = 'out'  # the run to read
    checkpoint: str = 'best'  # best, latest, or an iteration
    tokenizer: str = 'auto'  # the model's own, or a prepared dataset whose to take


@dataclass
class GeneratorChoice(ModelChoice):
    """What sample.py and serve.py ask alike, and `open_generator` takes."""

    # device
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls


@status.doing('loading the model')
def load(init_from, out_dir='out', which='best', tokenizer='auto'):
    """What to sample from, evaluate or export → (model, tokenizer, where it is from, the run's
    state.json or {} for weights of others).

    init_from: 'resume' for the run in out_dir, what `find_named` finds, or what
    GPT.from_pretrained takes. tokenizer: 'auto' for the model's own, or a prepared dataset whose to
    take. Raises UserError.
    """
    found = find(out_dir, which) if init_from == 'resume' else find_named(init_from, which)
    if found:
        model, state, source = found.load_model(dropout=0.0), found.state, str(found.path)
        description = state['tokenizer']
    else:
        pretrained = open_pretrained(init_from)
        model, state, source = GPT(GPTConfig(**pretrained.shape)), {}, init_from
        pretrained.load_weights(model)
        description = pretrained.tokenizer_json()
        if description and description.get('kind') == 'foreign':
            description = as_chat(description, source)
    if tokenizer != 'auto':
        description = open_dataset(dataset_folder(tokenizer)).tokenizer_json()
    if description is None:
        raise UserError(f'{source}: nothing says which tokenizer its {model.config.vocab_size} '
                        'tokens are of: name a prepared dataset with --tokenizer=data/NAME')
    made = tokenizers.from_json(description)
    if made.vocab_size != model.config.vocab_size:
        raise UserError(f'{source} has {model.config.vocab_size} tokens and its tokenizer '
                        f'{made.vocab_size}: name the dataset it was trained on with '
                        '--tokenizer=data/NAME')
    return model, made, source, state


def open_generator(config, compile=False):
    """A GeneratorChoice → what writes with this model, a TextGenerator. Prints which it is.
    compile: as of choose_compile. Raises UserError."""
    device, _ = choose_device(config.device)
    use_fast_matmul()
    model, tokenizer, source, _ = load(config.init_from, config.out_dir, config.checkpoint,
                                       config.tokenizer)
    model = model.to(device).eval()
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    compile, _ = choose_compile(compile, device)
    print(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype}')
    context = prepare_for_generation(model, device, dtype, pack=not compile)
    return TextGenerator(model, tokenizer, context, CompiledStep(model) if compile else None)
