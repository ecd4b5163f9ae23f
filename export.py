"""Export a trained model to a folder that Hugging Face's transformers opens, and --init_from too.

    python export.py --out_dir=out --dest=my-gpt
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

from safetensors import SafetensorError

from configurator import load_config
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.errors import UserError, run_script
from plaingpt.training import checkpoint as checkpoints


@dataclass
class ExportConfig(checkpoints.ModelChoice):
    # where to
    dest: str = ''  # the folder to write, which must not exist yet

    def problems(self):
        return [] if self.dest else ['dest is empty: name a folder to write, as --dest=my-gpt']


def model_card(name, model, source, state):
    """README.md of the exported folder: the facts of the model and its training run."""
    c, config = model.config, state.get('config', {})
    facts = {
        'parameters': f'{model.num_parameters():,}',
        'shape': f'{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, '
                 f'{c.block_size} tokens of context, vocabulary {c.vocab_size:,}',
        'weights': source,
        'trained on': config.get('dataset') and Path(config['dataset']).name,
        'iterations': state.get('iter_num'),
        'sequences of text seen': f'{state["sequences"]:,}' if 'sequences' in state else None,
        'validation loss': state.get('val_loss') and f'{state["val_loss"]:.4f} nats a token',
        'learning rate, at most': config.get('learning_rate'),
        'started from': config.get('init_from'),
    }
    lines = ['---', 'library_name: transformers', 'pipeline_tag: text-generation',
             '---', '', f'# {name}', '', 'A language model trained with plainGPT.', '',
             '| | |', '|---|---|',
             *(f'| {fact} | {value} |' for fact, value in facts.items() if value is not None),
             '', '```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer',
             f"tokenizer = AutoTokenizer.from_pretrained('{name}')",
             f"model = AutoModelForCausalLM.from_pretrained('{name}')", '```', '']
    return '\n'.join(lines)


def main(argv):
    config = load_config(ExportConfig, argv, __doc__)
    dest = Path(config.dest)
    if dest.exists():
        raise UserError(f'dest={dest} exists already: name a folder that does not')
    model, tokenizer, source, state = checkpoints.load(
        config.init_from, config.out_dir, config.checkpoint, config.tokenizer)
    unfinished = dest.with_name(f'{dest.name}.{os.getpid()}.tmp')
    try:
        unfinished.mkdir(parents=True)
        write_hf(unfinished, model, tokenizer, model_card(dest.name, model, source, state))
        unfinished.rename(dest)
    except (OSError, SafetensorError) as e:
        why = getattr(e, 'strerror', None) or e
        raise UserError(f'dest={dest}: cannot be written: {why}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(path.stat().st_size for path in dest.iterdir())
    print(f'{source} → {dest}: {model.num_parameters():,} parameters, {size / 1e6:,.1f} MB')


if __name__ == '__main__':
    run_script(main)
