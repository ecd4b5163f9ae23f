"""The tokenizers of others: a tokenizer.json, through the package tokenizers.

All files that say how text and conversations become tokens are kept as they are, in meta.json and
in checkpoints, so that an export has them again.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from plaingpt.data.documents import explain_hub_errors
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import read_json
from plaingpt.system.formatting import join_halves, one_line

OUR_TOKENIZER = 'plaingpt_tokenizer.json'  # in an exported folder, so that it comes back whole
TEMPLATE_FILE = 'chat_template.jinja'
CONFIGS = 'tokenizer_config.json', 'generation_config.json'
FILES = ('tokenizer.json', *CONFIGS, 'special_tokens_map.json', TEMPLATE_FILE)
FILES_OF_TOKENIZER = ('config.json', *FILES)
# Of GPT-2's vocabulary: each of the 256 bytes as a visible character.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
PRINTABLE = {byte: chr(byte) for byte in VISIBLE} \
    | {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}
BYTES = {char: byte for byte, char in PRINTABLE.items()}


def download(name, patterns):
    """Fetch files of OWNER/NAME from the Hugging Face hub (or its cache) → folder. UserError"""
    with needs('huggingface_hub', f'downloading {name}'):
        from huggingface_hub import snapshot_download
    with explain_hub_errors(f'{name} is not a folder here, and on the hub it',
                            'give a folder that holds it'):
        return Path(snapshot_download(name, allow_patterns=list(patterns)))


def read_tokenizer(folder, vocab_size=None):
    """A folder in the Hugging Face layout → the description of its tokenizer, a JSON object; None
    where it has none. vocab_size: of the model; by default config.json has it. Raises UserError."""
    folder = Path(folder)
    try:
        if (folder / OUR_TOKENIZER).exists():
            return read_json(folder / OUR_TOKENIZER)
        files = {name: (folder / name).read_bytes().decode()
                 for name in FILES_OF_TOKENIZER if (folder / name).exists()}
        if 'tokenizer.json' not in files:
            return None
        model = parse_object(files, 'config.json')
        files.pop('config.json', None)
        return describe(files, model, vocab_size)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{folder}: its tokenizer cannot be read ({one_line(e)[:200]}): give a '
                        'folder as transformers saves it') from None


def describe(files, model, vocab_size):
    """{name: text of a file}, the content of config.json → the description."""
    tokenizer = load(files['tokenizer.json'])
    names, generation = (parse_object(files, name) for name in CONFIGS)

    def id_of(name):  # a name may be {'content': name, …}
        name = name['content'] if isinstance(name, dict) else name
        return tokenizer.token_to_id(name) if isinstance(name, str) else None

    ends = {id_of(names.get('eos_token'))}
    for config in (model, generation):
        found = config.get('eos_token_id')
        ends |= {*found} if isinstance(found, list) else {found}
    opener = next((i for i in map(id_of, ('<|endoftext|>', names.get('bos_token'),
                                          names.get('eos_token'))) if i is not None), None)
    found = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    size = vocab_size or model.get('vocab_size') or found
    if size < found:
        raise ValueError(f'it has {found:,} tokens and the model {size}')
    ends = sorted(i for i in ends if type(i) is int and 0 <= i < size)
    return {'kind': 'foreign', 'vocab_size': size, 'end_of_text': opener, 'ends': ends,
            'files': files}


def parse_object(files, name):
    """The JSON object in one of {name: text}, {} where there is none. Raises ValueError."""
    found = json.loads(files.get(name, '{}'))
    if not isinstance(found, dict):
        raise ValueError(f'{name} is no object')
    return found


def find_template(files):
    """{name: text of a file} → the chat template, or None. Of several it is the 'default' one."""
    found = parse_object(files, 'tokenizer_config.json').get('chat_template')
    if isinstance(found, list):
        found = next((each.get('template') for each in found
                      if isinstance(each, dict) and each.get('name') == 'default'), None)
    return files.get(TEMPLATE_FILE, found if isinstance(found, str) else None)


@lru_cache(1)  # a command asks for the same one several times, and Qwen3's takes a second
def load(text):
    """The text of a tokenizer.json → the package's Tokenizer. Raises ValueError where it cannot be
    used, and UserError where the package is missing."""
    with needs('tokenizers', 'a tokenizer.json'):
        import tokenizers
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as e:
        raise ValueError(f'tokenizer.json: {one_line(e)[:150]}') from None
    parts = json.loads(text)
    kinds = {(parts.get(part) or {}).get('type') for part in ('model', 'decoder')}
    if kinds != {'BPE', 'ByteLevel'}:  # others do not give every text back
        raise ValueError('tokenizer.json is no byte-level BPE, as that of GPT-2, Llama 3 and Qwen')
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True  # text that spells a control token stays text
    return made


class ForeignTokenizer:
    """A tokenizer of tokenizers.py. `vocab_size` is the model's, which may have rows for no token;
    `control_ids` is {name of a control token: its id}."""

    def __init__(self, description):
        self.description = description
        self.vocab_size, self.end_of_text = description['vocab_size'], description['end_of_text']
        self.ends = frozenset({*description['ends'], self.end_of_text} - {None})
        if not description['files'].keys() <= {*FILES}:  # an export writes them by their names
            raise UserError('unknown tokenizer: it names files that no tokenizer has')
        self._tokenizer = load(description['files']['tokenizer.json'])
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = {token.content: i for i, token in self._added.items() if token.special}
        self.controls = frozenset(self.control_ids.values())

    def encode(self, text):
        text, _ = join_halves(text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids):
        """Bytes that are not UTF-8, such as half a character, become U+FFFD."""
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
