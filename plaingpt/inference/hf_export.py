"""A model → a folder that transformers opens, and that pretrained.py reads back."""

import json

from safetensors.torch import save_file

from plaingpt.data.chat_tokenizer import TEMPLATE, ends_of, is_chat
from plaingpt.data.hf_tokenizer import hf_tokenizer
from plaingpt.inference.hf_architectures import ARCHITECTURES
from plaingpt.inference.pretrained import OUR_TOKENIZER, without_padding
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import printable


def write_hf(folder, model, tokenizer, card):
    """Write weights, configuration, tokenizer and the model card, a Markdown text, into `folder`,
    a Path. Raises UserError where no architecture of transformers computes what `model` does."""
    name = choose_architecture(model.config)
    architecture = ARCHITECTURES[name]
    weights = without_padding({name: p.detach().cpu() for name, p in model.named_parameters()},
                              model.config.vocab_size)
    weights = architecture.write_weights(weights, model.config)
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / 'model.safetensors',
              metadata={'format': 'pt'})
    begin, end = first_and_last(tokenizer)
    ends = {'bos_token_id': begin, 'eos_token_id': end}
    # What our programs end an answer with ends it there too.
    all_ends = {'eos_token_id': sorted(ends_of(tokenizer), reverse=True)} \
        if is_chat(tokenizer) else {}
    made = hf_tokenizer(tokenizer)
    special = {token['id']: token['content'] for token in made['added_tokens']}
    files = {
        'config.json': {'model_type': name, **architecture.write_config(model.config), **ends},
        'generation_config.json': {**ends, **all_ends, 'do_sample': True},
        'tokenizer.json': made,
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False,
            'model_max_length': model.config.block_size,
            **({} if end is None else {'bos_token': special[begin], 'eos_token': special[end]}),
            **({'chat_template': TEMPLATE} if is_chat(tokenizer) else {})},
        OUR_TOKENIZER: tokenizer.to_json(),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + '\n', encoding='utf-8')
    (folder / 'README.md').write_text(printable(card), encoding='utf-8')


def first_and_last(tokenizer):
    """→ (the id that a text begins with, the one that ends it), None where there is none."""
    begin = tokenizer.end_of_text
    return begin, tokenizer.end_of_turn if is_chat(tokenizer) else begin


def nearest_architectures(config, known=ARCHITECTURES):
    """→ {name: what it cannot express, of Architecture.refusals}, of those with the least. One with
    nothing computes the same."""
    refusals = {name: architecture.refusals(config) for name, architecture in known.items()}
    fewest = min(map(len, refusals.values()))
    return {name: refused for name, refused in refusals.items() if len(refused) == fewest}


def choose_architecture(config, known=ARCHITECTURES, program='transformers'):
    """→ the name of the first architecture, of those `known` to a program, that computes the same.
    Raises UserError that says what keeps `config` from the nearest ones."""
    for name, refused in (nearest := nearest_architectures(config, known)).items():
        if not refused:
            return name
    raise UserError(f'no architecture of {program} is this model: ' + '; '.join(
        f'{name} needs ' + ' and '.join(f'{need} instead of {value}'
                                        for need, value in refused.items())
        for name, refused in nearest.items()))


def describe_export(config):
    """What export.py will do with such a model, in a line that is printed before training."""
    nearest = nearest_architectures(config)
    if not any(nearest.values()):
        return f'exports to transformers as {next(iter(nearest))}{one_document(config)}'
    return 'no export to transformers: ' + ', '.join(
        f'{name} needs {" and ".join(refused)}' for name, refused in nearest.items())


def one_document(config):
    """What an export leaves out, in words; '' where that is nothing."""
    return ' (without document_attention, which changes nothing for one document alone)' \
        if config.document_attention else ''
