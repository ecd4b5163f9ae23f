"""Export a trained model: a folder for transformers, or a file for llama.cpp.

    python export.py out --dest=my-gpt
    python export.py out --format=gguf --dest=my-gpt.gguf
    python export.py --init_from=nanoGPT/out/ckpt.pt --tokenizer=data/shakespeare_char --dest=old

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (Auto.from_pretrained('my-gpt')
                        for Auto in (AutoModelForCausalLM, AutoTokenizer))
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from configurator import load_config
from plaingpt.data.corpora import CORPORA
from plaingpt.data.dataset import read_names
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.gguf_export import DTYPES, build_gguf, write_gguf
from plaingpt.inference.hf_architectures import OWN_CODE, choose_architecture
from plaingpt.inference.hf_export import write_hf
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.errors import UserError, run_script
from plaingpt.training.open_weights import ModelChoice, load


@dataclass
class ExportConfig(ModelChoice):
    # where to
    dest: str = ''  # the folder to write, or the file of gguf, which must not exist yet
    format: Literal['transformers', 'gguf'] = 'transformers'  # gguf: a file for llama.cpp
    dtype: Literal[*DTYPES] = 'float32'  # of the weights; in a gguf file, of the matrices

    def problems(self):
        return [] if self.dest else ['dest is empty: name a folder to write, as --dest=my-gpt, or '
                                     'a file, as --format=gguf --dest=my-gpt.gguf']


CHAT_USAGE = [
    "messages = [{'role': 'user', 'content': 'Hi!'}]",
    "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True,",
    "                                       return_dict=True, return_tensors='pt')",
    'output = model.generate(**inputs, max_length=tokenizer.model_max_length)',
    "print(tokenizer.decode(output[0, inputs['input_ids'].size(1):], skip_special_tokens=True))"]


def model_card(name, model, tokenizer, source, state):
    """README.md of the exported folder: what the hub reads, and the facts of the model and its run
    without paths of this machine. state: state.json of a run's checkpoint, or {}"""
    c, trained_with = model.config, state.get('config', {})
    trained_on = [Path(each).name for each in read_names(trained_with['dataset'])] if state else []
    known = [CORPORA[each].hub.partition('@')[0] for each in trained_on
             if each in CORPORA and CORPORA[each].hub]
    code = '' if choose_architecture(model) != OWN_CODE else ', trust_remote_code=True'
    facts = {
        'parameters': f'{model.num_parameters():,}',
        'shape': f'{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, '
                 f'{c.block_size} tokens of context, vocabulary {c.vocab_size:,}',
        'weights of': None if state else Path(source).name,
        'trained on': ', '.join(trained_on),
        'iterations': state.get('iter_num'),
        'tokens seen': f'{state["sequences"] * c.block_size:,}' if 'sequences' in state else None,
        'validation loss': state.get('val_loss') and f'{state["val_loss"]:.4f} nats a token',
        'bits per byte of validation text': state and bits_per_byte(source, state['iter_num'])}
    return '\n'.join([
        '---', 'library_name: transformers', 'pipeline_tag: text-generation', 'tags: [plaingpt]',
        *([f'datasets: [{", ".join(known)}]'] if known else []), '---', '', f'# {name}', '',
        'A language model trained with plainGPT.', '', '| | |', '|---|---|',
        *(f'| {fact} | {value} |' for fact, value in facts.items() if value),
        '', '```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer',
        f"tokenizer = AutoTokenizer.from_pretrained('{name}'{code})",
        f"model = AutoModelForCausalLM.from_pretrained('{name}'{code})",
        *(CHAT_USAGE if is_chat(tokenizer) else []), '```', ''])


def bits_per_byte(checkpoint, iter_num):
    """The row of metrics.jsonl for the evaluation that a checkpoint was saved at, or None.
    checkpoint: its folder, out_dir/checkpoints/iter-…"""
    rows = read_rows(Path(checkpoint).parents[1] / 'metrics.jsonl')
    found = [row['val_bpb'] for row in rows if row['iter'] == iter_num and row.get('val_bpb')]
    return f'{found[-1]:.4f}' if found else None


def main(argv):
    config = load_config(ExportConfig, argv, __doc__, positional='out_dir')
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} exists already: name one that does not')
    model, tokenizer, weights = load(config)
    writer = None if config.format != 'gguf' else build_gguf(model, tokenizer, config.dtype)
    folder = dest.with_name(f'{dest.name}.{os.getpid()}.tmp')
    try:
        folder.mkdir(parents=True)
        if writer is None:
            card = model_card(dest.name, model, tokenizer, weights.source, weights.state)
            write_hf(folder, model, tokenizer, card, getattr(torch, config.dtype))
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
    print(f'{weights.source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB')
    if writer is None:
        name = choose_architecture(model)
        print('transformers opens it with its own code: from_pretrained(…, trust_remote_code=True)'
              if name == OWN_CODE else f'transformers opens it as {name}')


if __name__ == '__main__':
    run_script(main)
