"""Our tokenizers as tokenizer.json, the format of Hugging Face's tokenizers library."""

from itertools import pairwise
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.files import read_json, write_json
from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, is_chat
from plaingpt.data.dataset import open_dataset

END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
PRINTABLE = {byte: chr(byte) for byte in VISIBLE} \
    | {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}


def hf_tokenizer(tokenizer):
    """The content of tokenizer.json (the format of Hugging Face's tokenizers library)."""
    whole, tokenizer = tokenizer, tokenizer.base if is_chat(tokenizer) else tokenizer
    kind, end = tokenizer.to_json()['kind'], tokenizer.end_of_text
    special = {} if end is None else {END_OF_TEXT: end}
    merges = []
    if kind == 'char':
        try:
            tokenizer.chars.encode()
        except UnicodeEncodeError:
            raise UserError('the tokenizer knows lone surrogates, halves of characters, which '
                            "Hugging Face's format cannot hold") from None
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
        'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None,
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False,
                          'rstrip': False, 'normalized': False, 'special': True}
                         for text, i in special.items()],
        'pre_tokenizer': cut, 'post_processor': None, 'decoder': join,
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False,
                  'continuing_subword_prefix': None, 'end_of_word_suffix': None,
                  'byte_fallback': False,
                  'ignore_merges': kind in ('gpt2', 'bpe'),  # as tiktoken: whole words first
                  'vocab': vocab | special, 'merges': merges},
    }


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


# -----------------------------------------------------------------------------
# tokenizer.json of a dataset, for programs that encode documents


def document_tokenizer(tokenizer):
    """hf_tokenizer without the special tokens, but for their names in the vocabulary, by which a
    program finds their ids: text that spells such a name stays text, as it does here."""
    return {**hf_tokenizer(tokenizer), 'added_tokens': []}


def write_tokenizer(folder):
    """Write tokenizer.json into a prepared folder. Raises UserError."""
    tokenizer, path = open_dataset(folder).tokenizer(), folder / 'tokenizer.json'
    made = document_tokenizer(tokenizer)
    try:
        write_json(path, made)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    end = f', eos_token={END_OF_TEXT!r}' if END_OF_TEXT in made['model']['vocab'] else ''
    print(f'{path}: {tokenizer.vocab_size:,} tokens\nin datatrove: DocumentTokenizer(…, '
          f'tokenizer_name_or_path={str(path)!r}{end})')


def find_named(name):
    """The JSON of the tokenizer that a program was given by `name`: GPT-2's, or what
    write_tokenizer wrote; None for another one. Raises UserError."""
    if name in ('gpt2', 'openai-community/gpt2'):
        return {'kind': 'gpt2'}
    path = Path(name)
    if path.name != 'tokenizer.json' or not (path.parent / 'meta.json').exists():
        return None
    tokenizer = open_dataset(path.parent).tokenizer()
    try:
        written = read_json(path)['model']['vocab']
    except (OSError, ValueError, KeyError, TypeError):
        written = None
    if written != document_tokenizer(tokenizer)['model']['vocab']:
        raise UserError(f'{path} is not the tokenizer of {path.parent}, which was prepared anew '
                        'since: encode the documents again, with what python prepare.py '
                        'tokenizer writes')
    return tokenizer.to_json()
