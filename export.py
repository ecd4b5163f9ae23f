"""Export a trained model to a folder for transformers or a GGUF file for llama.cpp.

    python export.py out --dest=my-gpt
    python export.py out --format=gguf --dest=my-gpt.gguf
    python export.py out --format=gpt2 --dest=my-gpt     # as GPT-2, although model.py was edited
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
from plaingpt.core.dataset import open_dataset_spec, parse_dataset_spec
from plaingpt.inference.gguf_export import DTYPES, LLAMA_CPP_TOLERANCE, check_gguf, write_gguf
from plaingpt.inference.hf_architectures import ARCHITECTURES, OWN_CODE, find_architecture
from plaingpt.inference.hf_export import CHECK_TOLERANCE, MAX_TOKENS, check_export, write_hf
from plaingpt.inference.open_weights import ModelChoice, load
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import printable


@dataclass
class ExportConfig(ModelChoice):
    # destination
    dest: str = ''  # output folder, or output file with format=gguf; must not exist
    format: Literal['transformers', 'gguf', *ARCHITECTURES] = 'transformers'  # gguf: for llama.cpp
    dtype: Literal[*DTYPES] = 'float32'  # precision of the weights (in GGUF: of the matrices)

    def conflicts(self):
        if self.dest:
            return []
        return ['dest is empty: set the output folder with --dest=my-gpt, or the output file with '
                '--format=gguf --dest=my-gpt.gguf']


def model_card(name, architecture, model, source, state):
    """README.md of the exported folder: metadata for the hub, and facts of the model and its run
    that config.json does not have. No local paths. state: state.json of a run's checkpoint, or {}
    """
    facts = [('parameters', f'{model.num_parameters():,}'),
             ('context length', f'{model.config.block_size:,} tokens')]
    if state:
        datasets = parse_dataset_spec(state['config']['dataset'])
        facts += [('training data', ', '.join(Path(name).name for name in datasets)),
                  ('iterations', state['iter_num'])]
    else:
        facts.append(('pretrained weights', Path(source).name))
    if state.get('val_loss'):
        stderr = f' ± {state["val_loss_stderr"]:.4f}' if state.get('val_loss_stderr') else ''
        facts.append(('validation loss', f'{state["val_loss"]:.4f}{stderr} nats per token'))
    table = ''.join(f'| {fact} | {value} |\n' for fact, value in facts)
    code = ', trust_remote_code=True' if architecture == OWN_CODE else ''
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


def validation_tokens(weights):
    """The start of the run's validation split; empty if that is not available."""
    if not weights.state:
        return []
    vocab_size = weights.config.vocab_size
    try:
        dataset = open_dataset_spec(weights.state['config']['dataset'], vocab_size)
        ids = dataset.components[0].dataset.split('val').read(0, MAX_TOKENS)
    except UserError:
        return []
    return ids[ids < vocab_size]


def print_summary(dest, model, source, architecture):
    """Print what was written, and how to open it. architecture: in transformers, or None"""
    files = dest.iterdir() if dest.is_dir() else [dest]
    size = sum(path.stat().st_size for path in files)
    print(f'{source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB')
    if architecture and not (dest / 'tokenizer.json').exists():
        print('no tokenizer.json, because that format cannot describe this tokenizer; encode and '
              'decode with plainGPT')
    if architecture == OWN_CODE:
        print('transformers loads it with model.py: from_pretrained(…, trust_remote_code=True)')
        expressible = find_architecture(model.config)
        if expressible != OWN_CODE:
            print('model.py was edited, so its code was exported too; if the model still computes '
                  f'the same as {expressible}, use --format={expressible}')
    elif architecture:
        print(f'transformers loads it as {architecture}')


def main(argv):
    config = load_config(ExportConfig, argv, __doc__, positional='out_dir')
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} already exists; choose another --dest')
    model, tokenizer, weights = load(config)
    insisted = config.format if config.format in ARCHITECTURES else None
    flags = ARCHITECTURES[insisted].flags_to_change(model.config) if insisted else {}
    if flags:
        needed = ' '.join(f'--{name}={value}' for name, value in flags.items())
        raise UserError(f'format={insisted}: needs a model that was trained with {needed}; export '
                        'this one with --format=transformers')
    architecture = None
    folder = dest.with_name(f'{dest.name}.tmp')
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted export
    try:
        folder.mkdir(parents=True)
        text = validation_tokens(weights)
        if config.format == 'gguf':
            program, tolerance = 'llama.cpp', LLAMA_CPP_TOLERANCE[config.dtype]
            package, written = 'llama-cpp-python', folder / dest.name
            write_gguf(written, model, tokenizer, config.dtype)
            error = check_gguf(written, model, tokenizer, text)
        else:
            program, tolerance = 'transformers 5', CHECK_TOLERANCE
            package, written = 'transformers', folder
            dtype = getattr(torch, config.dtype)
            architecture = write_hf(folder, model, tokenizer, dtype, insisted)
            error = check_export(folder, model, dtype, text, bool(insisted))
            card = model_card(dest.name, architecture, model, weights.source, weights.state)
            (folder / 'README.md').write_text(printable(card), encoding='utf-8')
        how = f'that needs {program} (pip install {package})'
        if insisted and error is None:
            raise UserError(f'format={insisted}: the export must be compared with this model, and '
                            f'{how}')
        if error is not None and error > tolerance:
            fix = f'update {package}, or look in an edited model.py for a layer that ignores the ' \
                  'KV cache'
            if insisted:
                fix = 'export with --format=transformers'
            raise UserError(f'the outputs of the exported model in {program} differ from those of '
                            f'this one (relative error {error:.2g}); nothing was written; {fix}')
        written.rename(dest)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, 'strerror', None) or e
        raise UserError(f'dest={dest}: cannot be written: {reason}') from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_summary(dest, model, weights.source, architecture)
    if error is None:
        print(f'the export was not compared with this model: {how}')


if __name__ == '__main__':
    run_script(main)
