"""nanoGPT's meta.pkl → the characters of its vocabulary, without running anything in it."""

import io
import pickle
import pickletools
import re

from plaingpt.system.errors import UserError
from plaingpt.system.files import open_regular

MAX_PICKLE_BYTES = 2**22  # of a vocabulary with 150,000 characters, about as many as there are
# The operations that make dicts of texts and integers. None names a class or calls one, and none
# makes a tuple, whose hash can take forever to compute.
PLAIN = re.compile('PROTO|FRAME|STOP|MARK|MEMOIZE|.*(PUT|GET|DICT|UNICODE)|SETITEMS?|(BIN)?INT[12]?')


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'it names {module}.{name}')


def read_nanogpt_chars(path):
    """meta.pkl of nanoGPT's data/shakespeare_char/prepare.py → the characters, in the order of
    their ids. Raises UserError for any other pickle."""
    try:
        with open_regular(path) as f:
            data = f.read(MAX_PICKLE_BYTES)
        for n, (operation, argument, _) in enumerate(pickletools.genops(data)):
            # The memo takes memory up to its largest place; equal hashes of large numbers take time
            most = n if 'PUT' in operation.name else 2**31
            if not PLAIN.fullmatch(operation.name) or (type(argument) is int
                                                       and abs(argument) > most):
                raise ValueError(f'it holds {operation.name} {str(argument)[:80]}')
        meta = PlainUnpickler(io.BytesIO(data)).load()
        itos, stoi = meta['itos'], meta.get('stoi', {})
        chars = ''.join(itos[i] for i in range(meta['vocab_size']))
        ids = {char: i for i, char in enumerate(chars)}
        if not chars or len(ids) < len(chars) or itos != dict(enumerate(chars)) \
                or bool in map(type, itos) or (stoi and stoi != ids):
            raise ValueError('itos and stoi are not one-to-one')
        return chars
    except Exception as e:  # a pickle can raise anything
        what = ' '.join(f'{type(e).__name__}: {e}'[:160].split())
        raise UserError(f'{path} is no vocabulary of characters as nanoGPT writes it ({what}), and '
                        'nothing in it was run: prepare the text into a new folder with python '
                        'prepare.py text --input=FILE --data_dir=NEW_FOLDER') from None
