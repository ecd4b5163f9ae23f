"""Export a trained model: a folder for transformers, or a file for llama.cpp.

    python export.py out --dest=my-gpt
    python export.py out --format=gguf --dest=my-gpt.gguf
    python export.py --init_from=nanoGPT/out/ckpt.pt --tokenizer=data/shakespeare_char --dest=old

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (Auto.from_pretrained('my-gpt')
                        for Auto in (AutoModelForCausalLM, AutoTokenizer))
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import os
import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from configurator import accepted_types, load_config
from model import GPTConfig
from plaingpt.data.corpora import CORPORA
from plaingpt.data.dataset import read_names
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.gguf_export import DTYPES, build_gguf, write_gguf
from plaingpt.inference.hf_export import one_document, write_hf
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import quoted
from plaingpt.training.open_weights import ModelChoice, load
from plaingpt.training.settings import TrainConfig


@dataclass
class ExportConfig(ModelChoice):
    # where to
    dest: str = ''  # the folder to write, or the file of gguf, which must not exist yet
    format: Literal['transformers', 'gguf'] = 'transformers'  # gguf: a file for llama.cpp
    dtype: Literal[*DTYPES] = 'float32'  # of the weights; in a file of gguf of the matrices

    # what the model card of transformers says besides the facts of the run
    license: str = ''  # such as mit or apache-2.0
    datasets: str = ''  # names on the Hugging Face hub, with commas (default: as prepare.py knows)

    def problems(self):
        wrong = {
            'dest is empty: name a folder to write, as --dest=my-gpt, or a file, as '
            '--format=gguf --dest=my-gpt.gguf': not self.dest,
            f'license={self.license}: write the short name of one, such as mit':
                not re.fullmatch(r'[\w.-]*', self.license),
            f'datasets={self.datasets}: write names on the hub, such as OWNER/NAME,OWNER/OTHER':
                not re.fullmatch(r'([\w.-]+(/[\w.-]+)?(,|$))*', self.datasets)}
        return [line for line, holds in wrong.items() if holds]


CHAT_USAGE = [
    "messages = [{'role': 'user', 'content': 'Hi!'}]",
    "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True,",
    "                                       return_dict=True, return_tensors='pt')",
    'output = model.generate(**inputs, max_length=tokenizer.model_max_length)',
    "print(tokenizer.decode(output[0, inputs['input_ids'].size(1):], skip_special_tokens=True))"]


def model_card(name, model, tokenizer, source, state, license='', datasets=''):
    """README.md of the exported folder: what the hub reads, and the facts of the model and its run
    without paths of this machine. state: state.json of a run's checkpoint, or {}"""
    c, trained_with = model.config, state.get('config', {})
    trained_on = [Path(each).name for each in read_names(trained_with['dataset'])] if state else []
    known = [CORPORA[each].hub for each in trained_on if each in CORPORA and CORPORA[each].hub]
    begin = trained_with.get('init_from')
    facts = {
        'parameters': f'{model.num_parameters():,}',
        'shape': f'{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, '
                 f'{c.block_size} tokens of context, vocabulary {c.vocab_size:,}',
        'weights of': None if state else Path(source).name,
        'started from': None if begin in (None, 'resume', 'auto') else Path(begin).name,
        'trained on': ', '.join(trained_on) or None,
        'iterations': state.get('iter_num'),
        'tokens seen': f'{state["sequences"] * c.block_size:,}' if 'sequences' in state else None,
        'validation loss': state.get('val_loss') and f'{state["val_loss"]:.4f} nats a token',
        'bits per byte of validation text': state and bits_per_byte(source, state['iter_num']),
        'settings': '`' + ' '.join(f'{key}={value}' for key, value in
                                   told_settings(trained_with).items()) + '`' if state else None,
    }
    front = {'library_name': 'transformers', 'pipeline_tag': 'text-generation', 'license': license,
             'tags': '[plaingpt]', 'datasets': f'[{datasets or ", ".join(known)}]'}
    lines = ['---', *(f'{key}: {value}' for key, value in front.items() if value not in ('', '[]')),
             '---', '', f'# {name}', '', 'A language model trained with plainGPT.', '',
             '| | |', '|---|---|',
             *(f'| {fact} | {value} |' for fact, value in facts.items() if value),
             '', '```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer',
             f"tokenizer = AutoTokenizer.from_pretrained('{name}')",
             f"model = AutoModelForCausalLM.from_pretrained('{name}')",
             *(CHAT_USAGE if is_chat(tokenizer) else []), '```', '']
    return '\n'.join(lines)


def bits_per_byte(checkpoint, iter_num):
    """What metrics.jsonl of the run says of the evaluation that a checkpoint was saved at, or None.
    checkpoint: its folder, out_dir/checkpoints/iter-…"""
    rows = read_rows(Path(checkpoint).parents[1] / 'metrics.jsonl', print)
    found = [row['val_bpb'] for row in rows if row['iter'] == iter_num and row.get('val_bpb')]
    return f'{found[-1]:.4f}' if found else None


def told_settings(config):
    """The settings of a run, {key: value}, that are not the defaults: numbers and choices, for text
    may name places of this machine."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    return {key: f'{value:g}' if type(value) is float else value for key, value in config.items()
            if key in defaults and value != defaults[key] and key not in vars(GPTConfig)
            and (not isinstance(value, str) or key in ('lr_scales', 'lr_schedule')
                 or str not in accepted_types(TrainConfig, key))}


def main(argv):
    config = load_config(ExportConfig, argv, __doc__, positional='out_dir')
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} exists already: name one that does not')
    model, tokenizer, weights = load(config)
    source = weights.source
    writer = None if config.format != 'gguf' else build_gguf(model, tokenizer, config.dtype)
    folder = dest.with_name(f'{dest.name}.{os.getpid()}.tmp')
    try:
        folder.mkdir(parents=True)
        if writer is None:
            card = model_card(dest.name, model, tokenizer, source, weights.state, config.license,
                              config.datasets)
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
    print(f'{source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB'
          f'{one_document(model.config)}')
    if config.format == 'transformers':
        print(f'to publish it on Hugging Face: hf upload {quoted(dest.name)} {quoted(dest)}')


if __name__ == '__main__':
    run_script(main)
