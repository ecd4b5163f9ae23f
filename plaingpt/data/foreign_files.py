"""Foreign token files, read without conversion: ids written by numpy, shards of llm.c,
modded-nanogpt and build-nanogpt, and nanoGPT's meta.pkl, unpickled without running any code."""

import io
import pickle
import re
from typing import ClassVar

import numpy as np

from plaingpt.core.token_files import as_unsigned, open_tokens, sampled_blocks
from plaingpt.data.tokenizers import GPT2Tokenizer, ListTokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for, count_of

# https://github.com/karpathy/llm.c, dev/data/data_common.py: a header of 256 int32, which begins
# with magic, version and number of tokens; then the tokens.
LLMC_HEADER_BYTES = 1024
LLMC_FORMATS = {20240520: (1, '<u2'), 20240801: (7, '<u4')}  # magic → (version, dtype of the ids)
EVIDENCE_BYTES = 64  # of nonzero ids, before a wide dtype is believed: a few could fit by chance
MIN_IDS, MIN_SHARE_BEYOND = 8, 0.02  # ids beyond the vocabulary, before they are taken as swapped
LARGEST_VOCAB = 2**20  # no tokenizer has more


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
    """A file of ids without meta.json → TokenFile. dtype: of a file without a header, instead of
    detecting it. Raises UserError."""
    try:
        size = path.stat().st_size
        with open(path, 'rb') as file:
            head = file.read(12)
            if path.suffix == '.npy' or head.startswith(b'\x93NUMPY'):
                return open_npy(path)
            magic, version, count = np.frombuffer(head, '<i4') if len(head) == 12 else (0, 0, 0)
            if magic in LLMC_FORMATS:
                return open_llmc(path, magic, version, count, size)
            offsets, length = sampled_blocks(size)
            sample = b''
            for offset in offsets:
                file.seek(offset // 8 * 8)  # aligned for every dtype
                sample += file.read(length)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    return open_tokens(path, dtype or find_dtype(path, sample, size, vocab_size))


def open_llmc(path, magic, version, count, size):
    known_version, name = LLMC_FORMATS[magic]
    dtype = np.dtype(name)
    if (version, size) != (known_version, LLMC_HEADER_BYTES + dtype.itemsize * count):
        raise UserError(f'{path} has an llm.c header, but is not a complete shard; copy it again, '
                        'or prepare the text')
    return open_tokens(path, dtype, int(count), offset=LLMC_HEADER_BYTES)


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
    return open_tokens(path, array.dtype, len(array), offset=array.offset)


# -----------------------------------------------------------------------------
# the dtype of headerless files


def find_dtype(path, sample, size, vocab_size):
    """A sample of the bytes of a file of `size` bytes → the dtype of its ids. Raises UserError if
    they are floats.

    It is the widest dtype whose ids are all in the vocabulary: int64 read as uint16 would fit too,
    with three zeros after each id. If none fits, it is the one that would fit another vocab_size,
    so that error messages show a real id.
    """
    if re.fullmatch(rb'[0-9\s,;.eE+-]+', sample):
        raise UserError(f'{path} contains numbers as text; write the ids with numpy: '
                        'ids.astype(np.uint16).tofile(path)')
    for name in '<f8', '<f4':
        refuse_floats(path, sample, size, name, whole_numbers=True)
    single_bytes = np.frombuffer(sample, 'u1')
    if vocab_size == GPT2Tokenizer.vocab_size and are_bytes(single_bytes, vocab_size):
        return single_bytes.dtype  # two ASCII bytes would be an id of GPT-2
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
        raise UserError(f'{path}: odd size of {count_of(size, "byte")}: the file is damaged; copy '
                        'it again, or if its ids are single bytes, run '
                        f'{command_for("prepare")} ids FOLDER --vocab_size=N --dtype=uint8')
    little, big = np.frombuffer(sample, '<u2'), np.frombuffer(sample, '>u2')
    return big.dtype if has_smaller_range(big, little) else little.dtype


def fits(ids, vocab_size):
    evidence = np.count_nonzero(ids) * ids.itemsize
    has_evidence = ids.itemsize == 2 or evidence >= EVIDENCE_BYTES
    return has_evidence and as_unsigned(ids).max(initial=0) < vocab_size


def are_swapped(little, big, vocab_size):
    """Whether ids that fit as big-endian are big-endian: read as little-endian, many are beyond the
    vocabulary (more than in a damaged file), or their range is twice as large."""
    beyond = np.count_nonzero(as_unsigned(little) >= vocab_size)
    return beyond >= max(MIN_IDS, MIN_SHARE_BEYOND * np.count_nonzero(little)) \
        or has_smaller_range(big, little)


def has_smaller_range(ids, alternative):
    return np.count_nonzero(ids) >= MIN_IDS \
        and 2 * int(ids.max(initial=0)) < int(alternative.max(initial=0))


def are_bytes(ids, vocab_size):
    """Whether uint8 is more likely than uint16: even and odd bytes are alike, and all are ASCII if
    the vocabulary is much larger."""
    even, odd = ids[::2].sum(), ids[1::2].sum()
    limit = min(vocab_size, 256) if vocab_size <= 257 else 128
    return ids.max(initial=0) < limit and 2 * min(even, odd) >= max(even, odd) \
        and np.count_nonzero(ids) >= EVIDENCE_BYTES / 4


def high_half_is_empty(ids):
    """Whether these are wide ids for a larger vocabulary, or with a few negative ones."""
    sizes = np.abs(ids.astype(np.int64))
    high, low = np.divmod(sizes, 2 ** (4 * ids.itemsize))
    return fits(sizes, LARGEST_VOCAB) and low.max() > 256 * high.max()


def refuse_floats(path, sample, size, name, whole_numbers):
    """Raises UserError if the bytes are floats of usual magnitudes."""
    if size % np.dtype(name).itemsize:
        return
    numbers = np.frombuffer(sample, name)
    numbers = np.abs(numbers[numbers != 0])
    with np.errstate(invalid='ignore'):
        is_usual = (numbers >= 1e-6) & (numbers < 2**23)
        if whole_numbers:
            is_usual &= numbers == np.rint(numbers)
    if is_usual.all() and is_usual.size * numbers.itemsize >= EVIDENCE_BYTES:
        raise UserError(f'{path} holds {numbers.dtype} numbers, but ids must be integers; convert '
                        'them with ids.astype(np.uint16)')


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
