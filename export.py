"""Export a trained model: a folder for transformers, or a file for llama.cpp.

    python export.py out --dest=my-gpt
    python export.py out --format=gguf --dest=my-gpt.gguf
    python export.py --init_from=nanoGPT/out/ckpt.pt --tokenizer=data/shakespeare_char --dest=my-old

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained('my-gpt')
    model = AutoModelForCausalLM.from_pretrained('my-gpt')
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from configurator import load_config
from plaingpt.data.dataset import parse_dataset_spec
from plaingpt.inference.gguf_export import DTYPES, write_gguf
from plaingpt.inference.hf_architectures import OWN_CODE
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import printable
from plaingpt.training.open_weights import ModelChoice, load


@dataclass
class ExportConfig(ModelChoice):
    # where to
    dest: str = ''  # the folder to write, or the file of gguf, which must not exist yet
    format: Literal['transformers', 'gguf'] = 'transformers'  # gguf: a file for llama.cpp
    dtype: Literal[*DTYPES] = 'float32'  # of the weights; in a gguf file, of the matrices

    def conflicts(self):
        return [] if self.dest else ['dest is empty: name a folder to write, as --dest=my-gpt, or '
                                     'a file, as --format=gguf --dest=my-gpt.gguf']


def model_card(name, architecture, model, source, state):
    """README.md of the exported folder: what the hub reads, and the facts of the model and its run
    without paths of this machine. state: state.json of a run's checkpoint, or {}"""
    c = model.config
    code = ', trust_remote_code=True' if architecture == OWN_CODE else ''
    error = f' ± {state["val_loss_stderr"]:.4f}' if state.get('val_loss_stderr') else ''
    facts = {
        'shape': f'{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, '
                 f'{c.block_size} tokens of context, vocabulary {c.vocab_size:,}, '
                 f'{model.num_parameters():,} parameters',
        'weights of': None if state else Path(source).name,
        'trained on': state and ', '.join(
            Path(each).name for each in parse_dataset_spec(state['config']['dataset'])),
        'iterations': state.get('iter_num'),
        'validation loss': state.get('val_loss') and f'{state["val_loss"]:.4f}{error} nats a token'}
    table = ''.join(f'| {fact} | {value} |\n' for fact, value in facts.items() if value)
    return f'''---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model trained with plainGPT.

| | |
|---|---|
{table}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained('{name}'{code})
model = AutoModelForCausalLM.from_pretrained('{name}'{code})
```
'''


def main(argv):
    config = load_config(ExportConfig, argv, __doc__, positional='out_dir')
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} exists already: name one that does not')
    model, tokenizer, weights = load(config)
    architecture = None
    folder = dest.with_name(f'{dest.name}.tmp')
    shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
    try:
        folder.mkdir(parents=True)
        if config.format == 'gguf':
            write_gguf(folder / dest.name, model, tokenizer, config.dtype)
            (folder / dest.name).rename(dest)
        else:
            architecture = write_hf(folder, model, tokenizer, getattr(torch, config.dtype))
            card = model_card(dest.name, architecture, model, weights.source, weights.state)
            (folder / 'README.md').write_text(printable(card), encoding='utf-8')
            folder.rename(dest)
    except (OSError, SafetensorError) as e:
        why = getattr(e, 'strerror', None) or e
        raise UserError(f'dest={dest}: cannot be written: {why}') from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = sum(path.stat().st_size for path in (dest.iterdir() if dest.is_dir() else [dest]))
    print(f'{weights.source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB')
    if architecture and not (dest / 'tokenizer.json').exists():
        print('without a tokenizer.json, which cannot describe these tokens: use plainGPT for text')
    if architecture:
        print('transformers opens it with its own code: from_pretrained(…, trust_remote_code=True)'
              if architecture == OWN_CODE else f'transformers opens it as {architecture}')


if __name__ == '__main__':
    run_script(main)
