"""A model → a folder that transformers opens, and that pretrained.py reads back; a tokenizer → the
tokenizer.json of Hugging Face's tokenizers library."""

import inspect
import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, TEMPLATE
from plaingpt.data.foreign_tokenizer import (
    OUR_TOKENIZER,
    PRINTABLE,
    TEMPLATE_FILE,
    ForeignTokenizer,
)
from plaingpt.data.tokenizers import IdsTokenizer, WordTokenizer, is_chat
from plaingpt.inference.generation import check_cache
from plaingpt.inference.hf_architectures import (
    MOST_TOKENS,
    OWN_CODE,
    READABLE,
    choose_architecture,
)

END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'


def write_hf(folder, model, tokenizer, dtype=torch.float32):
    """Write weights, configuration and tokenizer into `folder`, a Path, and of a model that
    transformers has no class for its code → the name of its architecture. Raises UserError."""
    name = choose_architecture(model)
    architecture = READABLE[name]
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    weights = {name: w.to(dtype).contiguous()
               for name, w in architecture.write_weights(weights, model.config).items()}
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    begin, end = first_and_last(tokenizer)
    files = {'config.json': {
        'model_type': name, **architecture.write_config(model.config),
        'dtype': str(dtype).removeprefix('torch.'), 'bos_token_id': begin, 'eos_token_id': end}}
    if name == OWN_CODE:
        check_cache(model, MOST_TOKENS)  # remote_code.py always has one
        code = {'model.py': inspect.getfile(type(model)),
                'remote_code.py': Path(__file__).with_name('remote_code.py')}
        files |= {name: Path(path).read_text(encoding='utf-8') for name, path in code.items()}
    files |= tokenizer_files(tokenizer, model.config.block_size)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value, indent=1) + '\n'
        (folder / name).write_text(text, encoding='utf-8', newline='')
    return files['config.json']['model_type']


def tokenizer_files(tokenizer, block_size):
    """→ {name of a file: its content}, of all that say how text becomes tokens. Files of others go
    out as they came; for conversations, with the template and the ends of answers as here."""
    base = getattr(tokenizer, 'base', tokenizer)
    if isinstance(base, IdsTokenizer | WordTokenizer):  # no tokenizer.json can tell what these are
        return {OUR_TOKENIZER: tokenizer.to_json()}
    begin, end = first_and_last(tokenizer)
    foreign = isinstance(base, ForeignTokenizer)
    if foreign:
        files = dict(base.to_json()['files'])
        if is_chat(tokenizer) and tokenizer.has_own_template():
            files['tokenizer.json'] = made = json.loads(files['tokenizer.json'])
            made['added_tokens'] += map(added_token, tokenizer.ids.values(), tokenizer.ids)
            made['model']['vocab'] |= tokenizer.ids
            files[OUR_TOKENIZER] = tokenizer.to_json()
    else:
        made = hf_tokenizer(tokenizer)
        special = {token['id']: token['content'] for token in made['added_tokens']}
        files = {'tokenizer.json': made, OUR_TOKENIZER: tokenizer.to_json(),
                 'tokenizer_config.json': {
                     'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': block_size,
                     'bos_token': special.get(begin), 'eos_token': special.get(end),
                     'clean_up_tokenization_spaces': False}}
    if is_chat(tokenizer):
        files[TEMPLATE_FILE] = tokenizer.template or TEMPLATE
    if is_chat(tokenizer) or not foreign:  # what ends our texts ends them there too
        generation = json.loads(files.get('generation_config.json', '{"do_sample": true}'))
        files['generation_config.json'] = {
            **generation, 'eos_token_id': sorted(tokenizer.stop_ids) or None}
    return files


def first_and_last(tokenizer):
    """→ (the id that a text begins with, the one that ends it), None where there is none."""
    begin = tokenizer.end_of_text
    return begin, tokenizer.end_of_turn if is_chat(tokenizer) else min(
        tokenizer.stop_ids - {begin}, default=begin)


# -----------------------------------------------------------------------------
# tokenizer.json


def hf_tokenizer(tokenizer):
    """The content of tokenizer.json (the format of Hugging Face's tokenizers library)."""
    whole, tokenizer = tokenizer, tokenizer.base if is_chat(tokenizer) else tokenizer
    kind, end = tokenizer.to_json()['kind'], tokenizer.end_of_text
    special = {} if end is None else {END_OF_TEXT: end}
    merges = []
    if kind == 'char':
        vocab = {char: i for i, char in enumerate(tokenizer.chars)}
        cut, join = None, {'type': 'Fuse'}
    else:
        tokens = [tokenizer.decode_bytes([i]) for i in range(end)]
        vocab = {as_printable(token): i for i, token in enumerate(tokens)}
        merges = [' '.join(map(as_printable, pair)) for pair in find_merges(tokens)]
        # Its pattern for cutting text is GPT-2's, and ours.
        cut = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
               'use_regex': kind != 'byte'}
        join = {**cut, 'add_prefix_space': True, 'use_regex': True}
        if kind == 'bpe':
            special[PADDING] = end + 1
    if is_chat(whole):
        special |= {name: tokenizer.vocab_size + i for i, name in enumerate(SPECIAL_TOKENS)}
    return {
        'version': '1.0', 'pre_tokenizer': cut, 'decoder': join,
        'added_tokens': [added_token(i, text) for text, i in special.items()],
        'model': {'type': 'BPE', 'vocab': vocab | special, 'merges': merges,
                  'ignore_merges': kind in ('gpt2', 'bpe')},  # as tiktoken: whole words first
    }


def added_token(i, text):
    return {'id': i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False,
            'normalized': False, 'special': True}


def find_merges(tokens):
    """The bytes of all tokens, in order of rank → the two parts that each was merged from."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        parts = [token[j:j + 1] for j in range(len(token))]
        while len(parts) > 2:
            pairs = [rank.get(a + b, i) for a, b in pairwise(parts)]
            if min(pairs) == i:
                break
            at = pairs.index(min(pairs))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges


def as_printable(token):
    """Bytes as the visible characters that GPT-2's vocabulary shows them as: a space is 'Ġ'."""
    return ''.join(PRINTABLE[byte] for byte in token)
