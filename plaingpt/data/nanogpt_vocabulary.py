"""nanoGPT's meta.pkl, read without running anything in it."""

import io
import pickle
import pickletools

from plaingpt.system.errors import UserError
from plaingpt.system.files import is_dict, open_regular

MAX_PICKLE_BYTES = 2**22  # of a vocabulary with 150,000 characters, about as many as there are
# What pickles of any protocol make dicts, lists, texts and numbers of. It lacks tuples, since to
# hash some takes forever, and all that names a class or calls one.
PLAIN = {'PROTO', 'FRAME', 'STOP', 'MARK', 'MEMOIZE', 'PUT', 'BINPUT', 'LONG_BINPUT', 'GET',
         'BINGET', 'LONG_BINGET', 'EMPTY_DICT', 'DICT', 'SETITEM', 'SETITEMS', 'EMPTY_LIST', 'LIST',
         'APPEND', 'APPENDS', 'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE', 'INT', 'BININT',
         'BININT1', 'BININT2'}


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):  # should it read an operation that pickletools does not
        raise pickle.UnpicklingError(f'it names {module}.{name}')


def read_nanogpt_chars(path):
    """meta.pkl of nanoGPT's data/shakespeare_char/prepare.py and of scripts like it → the
    characters, in the order of their ids. Nothing in it is run. Raises UserError."""
    try:
        meta = read_plain_pickle(path)
        itos = meta['itos']
        if not is_dict(itos) or not all(type(i) is int for i in itos):
            raise ValueError('itos is no dict from ids to characters')
        if sorted(itos) != list(range(len(itos))) or len(itos) != meta['vocab_size']:
            raise ValueError('the ids of itos are not 0, 1, 2, … up to vocab_size')
        chars = [itos[i] for i in range(len(itos))]
        if not all(isinstance(char, str) and len(char) == 1 for char in chars):
            raise ValueError('itos has tokens that are no single characters')
        if len(set(chars)) != len(chars) or not chars:
            raise ValueError('itos has a character twice, or none')
        if meta.get('stoi') not in (None, {char: i for i, char in enumerate(chars)}):
            raise ValueError('stoi is not the inverse of itos')
        return ''.join(chars)
    except Exception as e:  # a pickle can raise anything
        what = f'{e} is missing' if isinstance(e, KeyError) else str(e)
        raise UserError(f'{path} is no vocabulary of characters as nanoGPT writes it '
                        f'({" ".join(what[:160].split())}), and nothing in it was run: prepare the '
                        'text into a new folder with python prepare.py text --input=FILE '
                        '--data_dir=NEW_FOLDER') from None


def read_plain_pickle(path):
    """The dict in a pickle of dicts, lists, texts and numbers. Raises ValueError and others."""
    with open_regular(path) as f:
        data = f.read(MAX_PICKLE_BYTES + 1)
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f'it has more than {MAX_PICKLE_BYTES:,} bytes')
    for n, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if operation.name not in PLAIN:
            what = argument if isinstance(argument, str) else operation.name
            raise ValueError(f'it holds {what[:80]!r}, and only dicts, lists, texts and numbers '
                             'are read')
        # The memo takes memory up to its largest place; equal hashes of large numbers take time.
        if isinstance(argument, int) and operation.name != 'FRAME' \
                and not -2**31 <= argument <= (n if 'PUT' in operation.name else 2**31):
            raise ValueError('it has numbers that are too large')
    meta = PlainUnpickler(io.BytesIO(data)).load()
    if not is_dict(meta):
        raise ValueError('it is no dict')
    return meta
