"""Foreign token files, read without conversion: ids written by numpy, shards of llm.c,
modded-nanogpt and build-nanogpt, and nanoGPT's meta.pkl, unpickled without running any code."""

import io
import pickle
import re
from typing import ClassVar

import numpy as np

from plaingpt.core.token_files import advise_dtype, open_tokens
from plaingpt.data.tokenizers import ListTokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for

# https://github.com/karpathy/llm.c, dev/data/data_common.py: a header of 256 int32, which begins
# with magic, version and number of tokens; then the tokens.
LLMC_HEADER_BYTES = 1024
LLMC_FORMATS = {20240520: (1, '<u2'), 20240801: (7, '<u4')}  # magic → (version, dtype of the ids)
TEXT_BYTES = re.compile(rb'[0-9\s,;.eE+-]+')  # numbers that were written as text


def find_token_files(folder, split):
    """The files of a split in a folder without meta.json: one named after the split, or shards with
    the split in their names."""
    for ending in '.bin', '.npy':
        single = folder / f'{split}{ending}'
        if single.exists():
            return [single]
    for ending in '.bin', '.npy':
        shards = [path for path in sorted(folder.glob(f'*{ending}'))
                  if split in path.stem.replace('-', '_').split('_')]
        if shards:
            return shards
    return []


def open_foreign(path, vocab_size, dtype=None):
    """A file of ids without meta.json → TokenFile. dtype: of a file without a header, or None for
    uint16, which must then be plausible. Raises UserError."""
    size = path.stat().st_size
    with open(path, 'rb') as file:
        head = file.read(2**14)
    if path.suffix == '.npy' or head.startswith(b'\x93NUMPY'):
        return open_npy(path)
    magic, version, count = np.frombuffer(head[:12], '<i4') if len(head) >= 12 else (0, 0, 0)
    if magic in LLMC_FORMATS:
        return open_llmc(path, magic, version, count, size)
    if dtype is None:
        dtype = np.dtype('<u2')
        check_uint16(path, head, vocab_size)
    return open_tokens(path, dtype, advice=f'set another --vocab_size, or {advise_dtype(path)}')


def check_uint16(path, head, vocab_size):
    """Raises UserError if the first bytes of a file without a header are not ids in uint16."""
    ids = np.frombuffer(head[:len(head) // 2 * 2], '<u2')
    problem = ''
    if vocab_size > 2**16:
        problem = f'uint16 does not hold all ids below vocab_size={vocab_size}'
    elif TEXT_BYTES.fullmatch(head):
        problem = 'it contains numbers as text: write the ids with numpy, '\
            'ids.astype(np.uint16).tofile(path)'
    elif len(ids) > 2 and ids.any() and not (ids[::2].any() and ids[1::2].any()):
        problem = 'read as uint16, every second id is 0'
    if problem:
        raise UserError(f'{path}: {problem}; {advise_dtype(path)}')


def open_llmc(path, magic, version, count, size):
    known_version, name = LLMC_FORMATS[magic]
    dtype = np.dtype(name)
    if (version, size) != (known_version, LLMC_HEADER_BYTES + dtype.itemsize * count):
        raise UserError(f'{path} has an llm.c header, but is not a complete shard; copy it again, '
                        'or prepare the text')
    return open_tokens(path, dtype, {'tokens': int(count), 'offset': LLMC_HEADER_BYTES})


def open_npy(path):
    try:
        array = np.load(path, mmap_mode='r', allow_pickle=False)
        content = f'{array.dtype} of shape {array.shape}'
    except (ValueError, EOFError, AttributeError, OSError) as e:  # AttributeError: it is an .npz
        raise UserError(f'{path}: numpy cannot map this array ({e}); write it again with '
                        'np.save') from None
    if array.dtype.kind not in 'iu' or array.ndim != 1:
        raise UserError(f'{path} holds {content}: expected a one-dimensional array of integers; '
                        'write it with np.save(path, ids.astype(np.uint16))')
    return open_tokens(path, array.dtype, {'tokens': len(array), 'offset': array.offset})


# -----------------------------------------------------------------------------
# nanoGPT's meta.pkl


class PickledDtype:
    """Stands in for numpy.dtype: numpy scalars become Python's."""

    def __init__(self, code, *_):
        if not re.fullmatch('[iufbU][0-9]+', code):
            raise pickle.UnpicklingError(f'it contains numpy values of dtype {code}')
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


def make_scalar(pickled_dtype, data):
    return np.frombuffer(data, pickled_dtype.dtype, 1)[0].item()


def encode_latin1(text, _encoding):  # protocols 0 to 2 store bytes as text
    return text.encode('latin-1')


class PlainUnpickler(pickle.Unpickler):
    """Unpickles only dicts, lists, strings and numbers. Classes and functions, which could run
    code, are looked up by name: only these names are allowed, and replaced by ours."""

    ALLOWED: ClassVar = {
        ('collections', 'OrderedDict'): dict, ('numpy', 'dtype'): PickledDtype,
        ('numpy.core.multiarray', 'scalar'): make_scalar,
        ('numpy._core.multiarray', 'scalar'): make_scalar,
        ('_codecs', 'encode'): encode_latin1}

    def find_class(self, module, name):
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f'it refers to {module}.{name}')
        return self.ALLOWED[module, name]


def read_nanogpt_meta(path):
    """A meta.pkl as nanoGPT's data/shakespeare_char/prepare.py writes it, with characters or longer
    tokens, or with vocab_size only → the tokenizer's JSON. Raises UserError for any other pickle.
    """
    try:
        meta = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        vocab_size, itos, stoi = meta.get('vocab_size'), meta.get('itos'), meta.get('stoi')
        if itos is None and stoi is None and isinstance(vocab_size, int) and vocab_size > 0:
            return {'kind': 'ids', 'vocab_size': vocab_size}
        tokens = [itos[i] for i in range(len(itos))]
        ids = {token: i for i, token in enumerate(tokens)}
        if not tokens or vocab_size not in (None, len(tokens)) or stoi not in (None, ids):
            raise ValueError('itos, stoi and vocab_size are inconsistent')
        tokens = [str(token) if isinstance(token, int) else token for token in tokens]
        if len(set(tokens)) < len(tokens) or not all(isinstance(token, str) for token in tokens):
            raise ValueError('the tokens in itos are not distinct strings')
        return ListTokenizer(tokens).to_json()
    except Exception as e:  # a pickle can raise anything
        raise UserError(f'{path} is not a meta.pkl in nanoGPT\'s format ({type(e).__name__}: '
                        f'{" ".join(str(e).split())[:200]}; no code in it was run): prepare the '
                        f'text with {command_for("prepare")} text --input=FILE '
                        '--data_dir=NEW_FOLDER') from None
