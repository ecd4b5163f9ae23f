"""Datasets of the Hugging Face hub, and folders laid out like one, as a source of documents. The
library `datasets` streams them: nothing of them is kept on disk or in memory."""

import os
from contextlib import contextmanager
from pathlib import Path

from plaingpt.data import readers
from plaingpt.data.readers import Piece
from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import one_line


class HubDataset:
    """Rows of a dataset as a source (sources.py)."""

    unit, is_one_text = ' documents', False

    def __init__(self, path, subset, splits, text_field='', form='file'):
        """splits: our name of a split → theirs"""
        self.name, self.splits, self.form, self.text_field = path, splits, form, text_field
        with needs('datasets', path):
            import datasets
            from huggingface_hub.utils import logging as hub_logging
        # Each attempt to connect would be a warning of its own before our one line.
        datasets.logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        with explain_hub_errors(self.name):
            if Path(path).is_dir():
                path = os.path.abspath(path)  # `datasets` does not take '.' for a folder
                if subset and subset not in datasets.get_dataset_config_names(path):
                    subset = ''  # a copy of the subset alone
            self.builder = load_builder(path, subset or None)
            self.rows = {split: self.builder.as_streaming_dataset(hub_split)
                         for split, hub_split in splits.items()}
            for split, rows in self.rows.items():
                for row in rows.take(1):
                    readers.text_of(row, text_field, f'{path}, split {splits[split]}')
                    self.rows[split] = rows.select_columns([readers.find_field(row, text_field)])
        known = self.builder.info.splits or {}
        counts = [known[split].num_examples for split in splits.values() if split in known]
        # Articles are made of many rows, so the number of rows does not give theirs.
        self.total = sum(counts) if form == 'file' and len(counts) == len(splits) else None

    def pieces(self):
        self._position = 0
        with explain_hub_errors(self.name):
            for split, rows in self.rows.items():
                own = '' if split == 'train' and 'val' not in self.splits else split
                for text in self._documents(map(self._text, rows)):
                    self._position += 1
                    if text.strip():
                        yield Piece(text, True, own)

    def _documents(self, texts):
        if self.form == 'file':
            return texts
        # a row is a line
        lines = (text if text.endswith('\n') else text + '\n' for text in texts)
        return (text for text, _ in readers.DOCUMENT_FORMS[self.form](lines))

    def _text(self, row):
        return readers.text_of(row, self.text_field, self.name) or ''

    def position(self):
        return self._position

    def identity(self):
        return self.builder.hash


def load_builder(path, subset):
    """A dataset's description. Where the dataset is a script, the hub's own Parquet copy of it."""
    import datasets
    try:
        return datasets.load_dataset_builder(path, subset)
    except RuntimeError as e:
        if 'scripts are no longer supported' not in str(e):
            raise
        return datasets.load_dataset_builder(path, subset, revision='refs/convert/parquet')


@contextmanager
def explain_hub_errors(name, advice='check the name and the connection, or name a local copy with '
                                    '--input=FOLDER'):
    """Turns what the hub's libraries raise, a wide family, into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'{name} cannot be read ({type(e).__name__}: {one_line(e)[:200]}): '
                        f'{advice}') from None
