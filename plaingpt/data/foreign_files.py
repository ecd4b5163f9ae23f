"""Others' token files, read as they are: ids that numpy wrote, shards of llm.c, modded-nanogpt and
build-nanogpt, and nanoGPT's meta.pkl, of which nothing is run."""

import io
import pickle
import re
from typing import ClassVar

import numpy as np

from plaingpt.data.token_files import as_unsigned, open_tokens, sampled_blocks
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for

# https://github.com/karpathy/llm.c, dev/data/data_common.py: 256 int32, which begin with magic,
# version and number of tokens, then the tokens.
LLMC_HEADER_BYTES = 1024
LLMC_FORMATS = {20240520: (1, '<u2'), 20240801: (7, '<u4')}  # magic: version, type of the ids
EVIDENCE_BYTES = 64  # of ids that are not 0, for a type that narrower ids fit by chance
MIN_IDS, MIN_SHARE_BEYOND = 8, 0.02  # ids beyond the vocabulary, if they are big-endian
LARGEST_VOCAB = 2**20  # of any tokenizer


def find_token_files(folder, split):
    """The files of a split in a folder whose meta.json does not list any: one by that name, or
    shards that have it in their names."""
    for ending in '.bin', '.npy':
        if (single := folder / f'{split}{ending}').exists():
            return [single]
    for ending in '.bin', '.npy':
        if shards := [path for path in sorted(folder.glob(f'*{ending}'))
                      if split in path.stem.replace('-', '_').split('_')]:
            return shards
    return []


def open_foreign(path, vocab_size, dtype=None):
    """A file of ids that no meta.json lists → TokenFile. dtype: of ids without a header, in place
    of the one that their bytes suggest. Raises UserError."""
    if path.suffix == '.npy':
        return open_npy(path)
    try:
        size = path.stat().st_size
        with open(path, 'rb') as file:
            head = file.read(12)
            magic, version, count = np.frombuffer(head, '<i4') if len(head) == 12 else (0, 0, 0)
            if magic in LLMC_FORMATS:
                return open_llmc(path, magic, version, count, size)
            places, length = sampled_blocks(size)
            sample = b''
            for place in places:
                file.seek(place // 8 * 8)
                sample += file.read(length)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    return open_tokens(path, dtype or find_dtype(path, sample, size, vocab_size))


def open_llmc(path, magic, version, count, size):
    known_version, name = LLMC_FORMATS[magic]
    dtype = np.dtype(name)
    if (version, size) != (known_version, LLMC_HEADER_BYTES + dtype.itemsize * count):
        raise UserError(f'{path} has a header of llm.c, but is not a whole shard: copy it again, '
                        'or prepare the text')
    return open_tokens(path, dtype, int(count), offset=LLMC_HEADER_BYTES)


def open_npy(path):
    try:
        array = np.load(path, mmap_mode='r', allow_pickle=False)
        content = f'{array.dtype} of shape {array.shape}'
    except (ValueError, EOFError, AttributeError, OSError) as e:  # AttributeError: it is an .npz
        raise UserError(f'{path} is not an array that numpy can map ({e}): write it again with '
                        'np.save') from None
    if array.dtype.kind not in 'iu' or array.ndim != 1:
        raise UserError(f'{path} holds {content}: expected a one-dimensional array of integers, '
                        'such as np.save writes of ids.astype(np.uint16)')
    return open_tokens(path, array.dtype, len(array), offset=array.offset)


# -----------------------------------------------------------------------------
# the type of ids without a header


def find_dtype(path, sample, size, vocab_size):
    """Bytes from all over a file of `size` bytes → the dtype of its ids. Raises UserError where
    they are floats.

    The widest type whose ids are all in the vocabulary is taken: int64 read as uint16 is in it too,
    with three zeros after each id. Where no type fits, it is the one that a vocabulary of another
    size would fit, so that the id that is named as wrong is an id.
    """
    for name in '<f8', '<f4':
        refuse_floats(path, sample, size, name, whole_numbers=True)
    single_bytes = np.frombuffer(sample, 'u1')
    if vocab_size == GPT2Tokenizer.vocab_size and are_bytes(single_bytes, vocab_size):
        return single_bytes.dtype  # two ASCII bytes are an id of GPT-2
    for width in 'i8', 'u4', 'u2':
        if size % int(width[1]):
            continue
        little, big = np.frombuffer(sample, f'<{width}'), np.frombuffer(sample, f'>{width}')
        if fits(big, vocab_size) and are_swapped(little, big, vocab_size):
            return big.dtype
        if fits(little, vocab_size):
            return little.dtype
    if are_bytes(single_bytes, vocab_size):
        return single_bytes.dtype
    for name in '<f8', '<f4':
        refuse_floats(path, sample, size, name, whole_numbers=False)
    for name in '<i8', '>i8', '<i4', '>i4':
        if size % int(name[2]) == 0 and high_half_is_empty(np.frombuffer(sample, name)):
            return np.dtype(name)
    if size % 2:
        raise UserError(f'{path}: {size:,} bytes, an odd number: the file is damaged, so copy it '
                        'again; or if its ids have one byte each, say so with '
                        f'{command_for("prepare")} ids FOLDER --vocab_size=N --dtype=uint8')
    little, big = np.frombuffer(sample, '<u2'), np.frombuffer(sample, '>u2')
    return big.dtype if has_smaller_range(big, little) else little.dtype


def fits(ids, vocab_size):
    evidence = np.count_nonzero(ids) * ids.itemsize
    return as_unsigned(ids).max(initial=0) < vocab_size and (
        ids.itemsize == 2 or evidence >= EVIDENCE_BYTES)


def are_swapped(little, big, vocab_size):
    """Whether ids that fit as big-endian are: as little-endian many are beyond the vocabulary, not
    just a damaged one, or their range is twice as large."""
    beyond = np.count_nonzero(as_unsigned(little) >= vocab_size)
    return beyond >= max(MIN_IDS, MIN_SHARE_BEYOND * np.count_nonzero(little)) \
        or has_smaller_range(big, little)


def has_smaller_range(ids, others):
    return np.count_nonzero(ids) >= MIN_IDS \
        and 2 * int(ids.max(initial=0)) < int(others.max(initial=0))


def are_bytes(ids, vocab_size):
    """Whether ids of a byte each are more likely than uint16: then bytes at even and odd places are
    alike, and in a vocabulary that is much larger they are ASCII."""
    even, odd = ids[::2].sum(), ids[1::2].sum()
    return ids.max(initial=0) < (min(vocab_size, 256) if vocab_size <= 257 else 128) \
        and 2 * min(even, odd) >= max(even, odd) and np.count_nonzero(ids) >= EVIDENCE_BYTES / 4


def high_half_is_empty(ids):
    """Whether these are wide ids of a larger vocabulary, or have a few below 0."""
    sizes = np.abs(ids.astype(np.int64))
    high, low = np.divmod(sizes, 2 ** (4 * ids.itemsize))
    return fits(sizes, LARGEST_VOCAB) and low.max() > 256 * high.max()


def refuse_floats(path, sample, size, name, whole_numbers):
    """Raises UserError where the bytes are floats of usual sizes."""
    if size % np.dtype(name).itemsize:
        return
    numbers = np.frombuffer(sample, name)
    numbers = np.abs(numbers[numbers != 0])
    with np.errstate(invalid='ignore'):
        usual = (numbers >= 1e-6) & (numbers < 2**23)
        if whole_numbers:
            usual &= numbers == np.rint(numbers)
    if usual.all() and usual.size * numbers.itemsize >= EVIDENCE_BYTES:
        raise UserError(f'{path} holds {numbers.dtype} numbers, and ids are integers: write them '
                        'with ids.astype(np.uint16)')


# -----------------------------------------------------------------------------
# nanoGPT's meta.pkl


class PickledDtype:
    """Stands in for numpy.dtype: a number or a text of numpy becomes Python's."""

    def __init__(self, code, *_):
        if not re.fullmatch('[iufbU][0-9]+', code):
            raise pickle.UnpicklingError(f'it has numpy values of type {code}')
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


def make_scalar(kind, data):
    return np.frombuffer(data, kind.dtype, 1)[0].item()


def encode_latin1(text, _encoding):  # how protocols 0 to 2 write bytes
    return text.encode('latin-1')


class PlainUnpickler(pickle.Unpickler):
    """Makes dicts, lists, texts and numbers. A class or a function, which could run code, has a
    name, and only these names are known, each for a function here."""

    KNOWN: ClassVar = {('collections', 'OrderedDict'): dict, ('numpy', 'dtype'): PickledDtype,
             ('numpy.core.multiarray', 'scalar'): make_scalar,
             ('numpy._core.multiarray', 'scalar'): make_scalar,
             ('_codecs', 'encode'): encode_latin1}

    def find_class(self, module, name):
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f'it names {module}.{name}')
        return self.KNOWN[module, name]


def read_nanogpt_meta(path):
    """meta.pkl as nanoGPT's data/shakespeare_char/prepare.py writes it, of characters or of longer
    tokens, or one that only says vocab_size → the description of its tokenizer. Raises UserError
    for any other pickle."""
    try:
        meta = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        size, itos, stoi = meta.get('vocab_size'), meta.get('itos'), meta.get('stoi')
        if itos is None and stoi is None and isinstance(size, int) and size > 0:
            return {'kind': 'ids', 'vocab_size': size}
        itos = dict(enumerate(itos)) if isinstance(itos, list | tuple) else itos
        tokens = [itos[i] for i in range(len(itos))]
        ids = {token: i for i, token in enumerate(tokens)}
        if not tokens or size not in (None, len(tokens)) or stoi not in (None, ids):
            raise ValueError('itos, stoi and vocab_size do not fit each other')
        tokens = [str(token) if isinstance(token, int) else token for token in tokens]
        if len(set(tokens)) < len(tokens) or not all(isinstance(token, str) for token in tokens):
            raise ValueError('the tokens of itos are not distinct texts')
        if all(len(token) == 1 for token in tokens):
            return {'kind': 'char', 'chars': ''.join(tokens)}
        return {'kind': 'words', 'tokens': tokens}
    except Exception as e:  # a pickle can raise anything
        raise UserError(f'{path} is not a meta.pkl as nanoGPT writes it ({type(e).__name__}: '
                        f'{" ".join(str(e).split())[:200]}), and nothing in it was run: prepare '
                        f'the text into a new folder with {command_for("prepare")} text '
                        '--input=FILE --data_dir=NEW_FOLDER') from None
