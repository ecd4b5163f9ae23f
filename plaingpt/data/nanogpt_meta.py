"""nanoGPT's meta.pkl, read without running anything in it."""

import io
import pickle

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for


class PlainUnpickler(pickle.Unpickler):
    """Makes dicts, texts and numbers. A class or a function, which could run code, has a name."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'it names {module}.{name}')


def read_nanogpt_meta(path):
    """meta.pkl of nanoGPT's data/shakespeare_char/prepare.py, or one that only says vocab_size →
    the description of its tokenizer. Raises UserError for any other pickle."""
    try:
        meta = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        size, itos = meta['vocab_size'], meta.get('itos')
        if itos is None and 'stoi' not in meta and isinstance(size, int) and size > 0:
            return {'kind': 'ids', 'vocab_size': size}
        chars = ''.join(itos[i] for i in range(size))
        ids = {char: i for i, char in enumerate(chars)}
        if not chars or itos != dict(enumerate(chars)) or meta.get('stoi', ids) != ids:
            raise ValueError('itos and stoi are not one-to-one')
        return {'kind': 'char', 'chars': chars}
    except Exception as e:  # a pickle can raise anything
        raise UserError(f'{path} is no meta.pkl as nanoGPT writes it ({type(e).__name__}: '
                        f'{" ".join(str(e).split())}), and nothing in it was run: prepare the text '
                        f'into a new folder with {command_for("prepare")} text --input=FILE '
                        '--data_dir=NEW_FOLDER') from None
