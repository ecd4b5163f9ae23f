"""Export a trained model: a folder for transformers, or a file for llama.cpp.

    python export.py --out_dir=out --dest=my-gpt
    python export.py --out_dir=out --format=gguf --dest=my-gpt.gguf
    python export.py --init_from=nanoGPT/out/ckpt.pt --tokenizer=data/shakespeare_char --dest=old

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (Auto.from_pretrained('my-gpt')
                        for Auto in (AutoModelForCausalLM, AutoTokenizer))
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from configurator import load_config
from plaingpt.data.chat_tokenizer import is_chat
from plaingpt.inference.gguf_export import DTYPES, build_gguf, write_gguf
from plaingpt.inference.hf_export import one_document, write_hf
from plaingpt.system.errors import UserError, run_script
from plaingpt.training import model_choice


@dataclass
class ExportConfig(model_choice.ModelChoice):
    # where to
    dest: str = ''  # the folder to write, or the file of gguf, which must not exist yet
    format: Literal['transformers', 'gguf'] = 'transformers'  # gguf: a file for llama.cpp
    dtype: Literal[*DTYPES] = 'float32'  # of the matrices in a file of gguf

    def problems(self):
        wrong = {
            'dest is empty: name a folder to write, as --dest=my-gpt, or a file, as '
            '--format=gguf --dest=my-gpt.gguf': not self.dest,
            f'dtype={self.dtype} takes --format=gguf':
                self.dtype != 'float32' and self.format != 'gguf'}
        return [line for line, holds in wrong.items() if holds]


CHAT_USAGE = [
    "messages = [{'role': 'user', 'content': 'Hi!'}]",
    "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True,",
    "                                       return_dict=True, return_tensors='pt')",
    'output = model.generate(**inputs, max_length=tokenizer.model_max_length)',
    "print(tokenizer.decode(output[0, inputs['input_ids'].size(1):], skip_special_tokens=True))"]


def model_card(name, model, tokenizer, source, state):
    """README.md of the exported folder: the facts of the model and its training run."""
    c, config = model.config, state.get('config', {})
    facts = {
        'parameters': f'{model.num_parameters():,}',
        'shape': f'{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, '
                 f'{c.block_size} tokens of context, vocabulary {c.vocab_size:,}',
        'weights': public(source),
        'trained on': config.get('dataset') and Path(config['dataset']).name,
        'iterations': state.get('iter_num'),
        'sequences of text seen': f'{state["sequences"]:,}' if 'sequences' in state else None,
        'validation loss': state.get('val_loss') and f'{state["val_loss"]:.4f} nats a token',
        'learning rate, at most': config.get('learning_rate'),
        'started from': config.get('init_from') and public(config['init_from']),
    }
    lines = ['---', 'library_name: transformers', 'pipeline_tag: text-generation',
             '---', '', f'# {name}', '', 'A language model trained with plainGPT.', '',
             '| | |', '|---|---|',
             *(f'| {fact} | {value} |' for fact, value in facts.items() if value is not None),
             '', '```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer',
             f"tokenizer = AutoTokenizer.from_pretrained('{name}')",
             f"model = AutoModelForCausalLM.from_pretrained('{name}')",
             *(CHAT_USAGE if is_chat(tokenizer) else []), '```', '']
    return '\n'.join(lines)


def public(path):
    """A path without the folders that lead to it on this machine, for others to read."""
    return path if not Path(path).is_absolute() else '/'.join(Path(path).parts[-3:])


def main(argv):
    config = load_config(ExportConfig, argv, __doc__)
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} exists already: name one that does not')
    model, tokenizer, source, state = model_choice.load(
        config.init_from, config.out_dir, config.checkpoint, config.tokenizer)
    writer = None if config.format != 'gguf' else build_gguf(model, tokenizer, config.dtype)
    folder = dest.with_name(f'{dest.name}.{os.getpid()}.tmp')
    try:
        folder.mkdir(parents=True)
        if writer is None:
            write_hf(folder, model, tokenizer, model_card(dest.name, model, tokenizer, source,
                                                          state))
            folder.rename(dest)
        else:
            write_gguf(folder / dest.name, writer)
            (folder / dest.name).rename(dest)
    except (OSError, SafetensorError) as e:
        why = getattr(e, 'strerror', None) or e
        raise UserError(f'dest={dest}: cannot be written: {why}') from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = sum(path.stat().st_size for path in (dest.iterdir() if dest.is_dir() else [dest]))
    print(f'{source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB'
          f'{one_document(model.config)}')


if __name__ == '__main__':
    run_script(main)
