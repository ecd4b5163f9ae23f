"""Pretrained models' tokenizers: a tokenizer.json, or vocab.json and merges.txt of a GPT-2, through
the package `tokenizers`.

All tokenizer files are stored unchanged in meta.json and in checkpoints, so that an export can
write them again. vocab.json and merges.txt are stored as a tokenizer.json.
"""

import json
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

import numpy as np

from plaingpt.data.documents import explain_hub_errors
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import read_json
from plaingpt.system.formatting import join_surrogates, one_line

OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder: to_json() of our tokenizer
TEMPLATE_FILE = 'chat_template.jinja'
FILES = ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json',
         'special_tokens_map.json', TEMPLATE_FILE)
# also of tokenizers that are not supported, to name them
TOKENIZER_PATTERNS = ('*tokenizer*', 'vocab.*', 'merges.txt', 'added_tokens.json',
                      'special_tokens_map.json', '*.model', '*.tiktoken')
TOKENIZER_FILES = ('config.json', 'generation_config.json', TEMPLATE_FILE, *TOKENIZER_PATTERNS)
SUPPORTED = 'a byte-level BPE in tokenizer.json, or vocab.json and merges.txt of a GPT-2'
# GPT-2's vocabulary files write each of the 256 bytes as a printable character.
UNCHANGED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes printed as themselves
PRINTABLE = {byte: chr(byte) for byte in UNCHANGED} \
    | {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*UNCHANGED}))}
BYTES = {char: byte for byte, char in PRINTABLE.items()}


def download(name, patterns):
    """Fetch files of OWNER/NAME from the Hugging Face Hub (or its cache) → folder. UserError"""
    with needs('huggingface_hub', f'downloading {name}'):
        from huggingface_hub import snapshot_download
    with explain_hub_errors(f'{name} is not a local folder, and on the Hub it',
                            'pass a local folder with these files'):
        return Path(snapshot_download(name, allow_patterns=list(patterns)))


def read_tokenizer(folder, vocab_size=None):
    """A folder in the Hugging Face layout → the JSON of its tokenizer, or None if it has none of a
    supported kind. vocab_size: the model's (default: from config.json). Raises UserError."""
    folder = Path(folder)
    try:
        if (folder / OUR_TOKENIZER).exists():
            return read_json(folder / OUR_TOKENIZER)
        files = {name: (folder / name).read_bytes().decode()
                 for name in ('config.json', *FILES) if (folder / name).exists()}
        model_config = parse_object(files, 'config.json')
        files.pop('config.json', None)
        tokenizer_config = {**parse_object(files, 'special_tokens_map.json'),
                            **parse_object(files, 'tokenizer_config.json')}
        if 'tokenizer.json' not in files:
            if not is_gpt2_tokenizer(folder, model_config, tokenizer_config):
                return None
            content = gpt2_tokenizer_json(folder, tokenizer_config)
            files['tokenizer.json'] = json.dumps(content, ensure_ascii=False)
        return describe(files, model_config, tokenizer_config, vocab_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f'{folder}: cannot read its tokenizer ({one_line(e)[:200]}); expected a '
                        'folder saved by transformers') from None


def find_tokenizer_files(folder):
    """Names of the files of a tokenizer in a folder, also of a kind that is not supported."""
    return sorted({path.name for pattern in TOKENIZER_PATTERNS
                   for path in Path(folder).glob(pattern)})


def is_gpt2_tokenizer(folder, model_config, tokenizer_config):
    """Whether a folder has vocab.json and merges.txt of a GPT-2 in any language. Other families,
    such as RoBERTa and Qwen2, have these files too, but split the text otherwise."""
    return (folder / 'vocab.json').exists() and (folder / 'merges.txt').exists() \
        and model_config.get('model_type') == 'gpt2' \
        and tokenizer_config.get('tokenizer_class') in (None, 'GPT2Tokenizer', 'GPT2TokenizerFast')


def gpt2_tokenizer_json(folder, tokenizer_config):
    """GPT-2's vocab.json and merges.txt, and the tokens that were added to them → the content of a
    tokenizer.json. Raises ValueError."""
    with needs('tokenizers', 'vocab.json and merges.txt'):
        from tokenizers.models import BPE
    try:
        vocab, merges = BPE.read_file(str(folder / 'vocab.json'), str(folder / 'merges.txt'))
    except Exception as e:  # the package raises no other kind
        raise ValueError(one_line(e)) from None
    added = {}  # content → its entry in added_tokens
    if (folder / 'added_tokens.json').exists():
        for name, i in read_json(folder / 'added_tokens.json').items():
            added[name] = added_token(i, name, special=False)
    for i, token in tokenizer_config.get('added_tokens_decoder', {}).items():
        added[token['content']] = added_token(int(i), **token)
    special_tokens = ['<|endoftext|>', *(tokenizer_config.get('additional_special_tokens') or ())]
    special_tokens += [value for key, value in tokenizer_config.items() if key.endswith('_token')]
    for token in special_tokens:
        token = token if isinstance(token, dict) else {'content': token}
        name = token['content']
        if name in added:
            added[name]['special'] = True
        elif name in vocab:
            added[name] = added_token(vocab[name], **token)
    ids = {name: token['id'] for name, token in added.items()}
    if not {*''.join(vocab.keys() - ids)} <= BYTES.keys():
        raise ValueError('vocab.json: not a byte-level BPE')
    all_ids = vocab | ids
    if any(all_ids[name] != i for name, i in vocab.items()) \
            or len({*all_ids.values()}) < len(all_ids):
        raise ValueError('added_tokens.json or tokenizer_config.json: the id of an added token is '
                         'that of another token')
    byte_level = {'type': 'ByteLevel', 'trim_offsets': True, 'use_regex': True,
                  'add_prefix_space': tokenizer_config.get('add_prefix_space', False)}
    return {
        'version': '1.0', 'pre_tokenizer': byte_level, 'decoder': byte_level,
        'added_tokens': sorted(added.values(), key=itemgetter('id')),
        'model': {'type': 'BPE', 'vocab': dict(sorted(all_ids.items(), key=itemgetter(1))),
                  'merges': [' '.join(pair) for pair in merges]}}


def added_token(i, content, special=True, lstrip=False, rstrip=False, single_word=False, **ignored):
    """An entry of added_tokens in a tokenizer.json."""
    return {'id': i, 'content': content, 'single_word': single_word, 'lstrip': lstrip,
            'rstrip': rstrip, 'normalized': False, 'special': special}


def describe(files, model_config, tokenizer_config, vocab_size):
    """{file name: text}, the content of config.json and of tokenizer_config.json → the tokenizer's
    JSON."""
    tokenizer = parse_tokenizer(files['tokenizer.json'])
    generation_config = parse_object(files, 'generation_config.json')

    def id_of(token):  # 'content' or {'content': 'content', …}
        token = token['content'] if isinstance(token, dict) else token
        return tokenizer.token_to_id(token) if isinstance(token, str) else None

    eos_id = id_of(tokenizer_config.get('eos_token'))
    stop_ids = {eos_id}
    for config in (model_config, generation_config):
        ids = config.get('eos_token_id')
        stop_ids |= {*ids} if isinstance(ids, list) else {ids}
    end_of_text = id_of('<|endoftext|>')
    if end_of_text is None:
        end_of_text = id_of(tokenizer_config.get('bos_token'))
    if end_of_text is None:
        end_of_text = eos_id
    num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    vocab_size = vocab_size or model_config.get('vocab_size') or num_tokens
    if vocab_size < num_tokens:
        raise ValueError(f'it has {num_tokens:,} tokens, but vocab_size is {vocab_size}')
    stop_ids = sorted(i for i in stop_ids if type(i) is int and 0 <= i < vocab_size)
    return {'kind': 'foreign', 'vocab_size': vocab_size, 'end_of_text': end_of_text,
            'ends': stop_ids, 'files': files}


def parse_object(files, name):
    """The JSON object in a file of {name: text}, {} if there is no such file. Raises ValueError."""
    value = json.loads(files.get(name, '{}'))
    if not isinstance(value, dict):
        raise ValueError(f'{name} is not a JSON object')
    return value


def find_template(files):
    """{file name: text} → the chat template, or None. Of several, it is the one named default."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE]
    template = parse_object(files, 'tokenizer_config.json').get('chat_template')
    if isinstance(template, list):
        for named in template:
            if isinstance(named, dict) and named.get('name') == 'default':
                template = named.get('template')
                break
    return template if isinstance(template, str) else None


@lru_cache(1)  # a command needs the same one several times, and parsing Qwen3's takes a second
def parse_tokenizer(text):
    """The text of a tokenizer.json → tokenizers.Tokenizer. Raises ValueError if it is not
    supported, and UserError if the package is missing."""
    with needs('tokenizers', 'a tokenizer.json'):
        import tokenizers
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as e:
        raise ValueError(f'tokenizer.json: {one_line(e)[:150]}') from None
    content = json.loads(text)
    types = {(content.get(key) or {}).get('type') for key in ('model', 'decoder')}
    if types != {'BPE', 'ByteLevel'}:  # others do not round-trip every text
        raise ValueError('tokenizer.json: not a byte-level BPE, as GPT-2, Llama 3 and Qwen have')
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text that spells a control token stays text
    return tokenizer


class ForeignTokenizer:
    """A tokenizer with the interface of tokenizers.py. `vocab_size` is the model's, which may be
    padded; `control_tokens` is {control token: id}."""

    def __init__(self, description):
        self.description = description
        self.vocab_size, self.end_of_text = description['vocab_size'], description['end_of_text']
        self.stop_ids = frozenset({*description['ends'], self.end_of_text} - {None})
        if not description['files'].keys() <= {*FILES}:  # an export writes to these names
            raise UserError('unknown tokenizer: unexpected file names: '
                            f'{", ".join(sorted(description["files"].keys() - {*FILES}))[:200]}')
        self._tokenizer = parse_tokenizer(description['files']['tokenizer.json'])
        self.unused_id = self._tokenizer.token_to_id(PRINTABLE[0xFF])  # no UTF-8 has this byte
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.control_tokens = {token.content: i for i, token in self._added.items()
                               if token.special}
        self.special_ids = frozenset(self.control_tokens.values())

    def encode(self, text):
        text, _ = join_surrogates(text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids):
        """Invalid UTF-8, such as an incomplete character, becomes U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def decode_bytes(self, ids):
        return b''.join(map(self._bytes_of, map(int, ids)))

    def _bytes_of(self, i):
        if i in self._added:
            return self._added[i].content.encode()
        token = self._tokenizer.id_to_token(i) or ''
        return bytes(BYTES[char] for char in token if char in BYTES)

    def to_json(self):
        return self.description
