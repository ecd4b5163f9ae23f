"""Where text comes from: people's own files, a text behind a URL, datasets of the Hugging Face hub.

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces(mark)    yields Piece; starts at `mark` where one is given
    source.mark()          the place after the last piece, as JSON; None where a source cannot
                           start there and has to read everything again
    source.total           how much text there is, in source.unit, or None where that is unknown
    source.identity()      JSON that changes when the input changes
    source.summary()       what tells the input from an earlier one, for people
    source.is_one_text     True where few files are one text, which is not cut into documents
    source.nulls           how many rows were left out because their text is null
    source.replaced        how many halves of characters in them were replaced with U+FFFD
    source.place_of(char)  the file and the line of its first occurrence, for people
    source.inputs()        after the last piece, {name, bytes and sha256 of each file: a list}
    source.part(k, n)      the k-th of n parts, from 1 on, as a source: together they have its
                           pieces, in its order; not where it is one text
    source.cut             JSON that is the same in all parts of n where they fit together
"""

import hashlib
import http.client
import os
import urllib.request
from contextlib import closing
from functools import lru_cache
from itertools import islice
from pathlib import Path

from plaingpt.data import documents
from plaingpt.data.documents import Piece
from plaingpt.data.hub import HubDataset
from plaingpt.data.rows import file_type
from plaingpt.data.text_files import Files, is_hub_folder
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import shown
from plaingpt.system.streams import Progress

DOWNLOAD_TIMEOUT = 30  # seconds without a byte
BLOCK_CHARS = 4096  # of a sample
PLACES = 32  # in a dataset of the hub where a sample is taken


def open_source(name, corpus, config, errors='strict'):
    """The source of a corpus and a PrepareConfig; `errors` as in bytes.decode. UserError."""
    where = config.input or (corpus.files or corpus.url if corpus.hub is None
                             else config.path or corpus.hub)
    if not where:
        raise UserError(f'{name} needs {corpus.required_option()}')
    form = corpus.document_form if config.documents == 'auto' else config.documents
    text_field = config.text_field or corpus.text_field
    from_hub, folder = corpus.hub is not None, Path(os.path.expanduser(where))
    if not from_hub and is_hub_folder(folder):
        print(f'{shown(folder)} is laid out like a dataset of the Hugging Face hub: reading it as '
              'prepare.py hf --path=FOLDER does')
        from_hub, where = True, str(folder)
    if from_hub:
        splits = {'train': config.split} if config.split else corpus.splits
        if config.val_split:
            splits = {**splits, 'val': config.val_split}
        if config.test_split:
            splits = {**splits, 'test': config.test_split}
        if config.max_tokens:  # when there are so many to train on, nothing else is left to read
            splits = dict(sorted(splits.items(), key=lambda item: item[0] == 'train'))
        own = config.path or config.input or config.subset  # then the table's count is not its
        return HubDataset(where, config.subset or corpus.subset, splits, text_field, form,
                          0 if own else corpus.documents)
    if corpus.url and not config.input:
        data = download(corpus.url, corpus.sha256, 'name a local copy with --input=FILE')
        return TextInMemory(data.decode(), corpus.url)
    paths = corpus.find(where, print)
    rows = [path for path in paths if file_type(path) != 'text']
    if rows and config.documents != 'auto':
        raise UserError(f'{shown(rows[0])}: each row is a document, so '
                        f'--documents={config.documents} cannot be: leave it out, or name text '
                        'files alone with --input')
    if config.text_field and not rows:
        raise UserError(f'text_field={config.text_field}: {shown(paths[0])} is text and has no '
                        'fields: leave it out')
    files = Files(paths, config.input or name, form, text_field, errors)
    files.is_one_text &= config.documents == 'auto'  # few files are, unless each was said to be one
    return files


def read_texts(source, what):
    """Yield the texts of a source, and show how far it is read."""
    with closing(source.pieces()) as pieces, Progress(what, source.total, source.unit) as progress:
        for piece in pieces:
            yield piece.text
            progress.advance_to(piece.position)


@lru_cache(1)  # of a running text they are asked for twice
def count_characters(source):
    return sum(map(len, read_texts(source, 'counting characters')))


def sample(source, characters):
    """Yield texts of about so many characters, spread evenly over a source; all of it where it has
    no more. The order of files does not matter."""
    if source.unit != 'B':
        yield from sample_places(source, characters)
        return
    total = count_characters(source)
    if total <= characters:
        yield from read_texts(source, 'learning from it')
        return
    print(f'learning from {100 * characters / total:.3g}% of the text, which is spread evenly')
    for text in read_texts(source, 'learning from it'):
        start = 0
        while start < len(text):
            block = text[start:documents.place_to_cut(text, start, BLOCK_CHARS)]
            start += len(block)
            # not the hash that decides the split: a sample is no more of the one than of the other
            digest = hashlib.blake2b(block.encode('utf-8', 'replace'), digest_size=8,
                                     person=b'sample').digest()
            if int.from_bytes(digest, 'big') < characters / total * 2**64:
                yield block


def sample_places(source, characters):
    """The same of a dataset of the hub, which is too large to be read whole: as many characters
    from the beginning of each of PLACES parts, and more from some where others have fewer."""
    if source.form != 'file' and is_small(source, characters):
        yield from read_texts(source, 'learning from it')  # articles that are not cut
        return
    waiting = [(part, 0) for part in source.spread(PLACES)]
    with Progress('learning from it', characters, 'characters') as progress:
        left = characters
        while waiting and left > 0:
            unfinished = []
            for n, (part, taken) in enumerate(waiting):
                quota = left / (len(waiting) - n)
                with closing(part.pieces()) as pieces:
                    for piece in islice(pieces, taken, None):
                        if quota <= 0:
                            unfinished.append((part, taken))
                            break
                        yield piece.text
                        taken += 1
                        quota -= len(piece.text)
                        left -= len(piece.text)
                        progress.advance_to(characters - left)
            waiting = unfinished


def is_small(source, characters):
    """True where a source has at most so many characters; a larger one is not read to its end."""
    with closing(source.pieces()) as pieces:
        for piece in pieces:
            characters -= len(piece.text)
            if characters < 0:
                return False
    return True


class TextInMemory:
    """A text that was downloaded."""

    unit, is_one_text, nulls, replaced = 'B', True, 0, 0

    def __init__(self, text, name):
        self.text, self.name = text, name
        self.total = len(text.encode())

    def pieces(self, mark=None):
        for text, new_document, _ in documents.whole_files([(self.text, 0)]):
            yield Piece(text, new_document, self.total)

    def mark(self):
        return None

    def place_of(self, character):
        return self.name

    def identity(self):
        return hashlib.sha256(self.text.encode()).hexdigest()

    def inputs(self):
        return [{'name': self.name, 'bytes': self.total, 'sha256': self.identity()}]


def download(url, sha256, advice):
    """The bytes behind `url`. Raises UserError; `advice`: what to do with a copy instead."""
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
            data = response.read()
    # URLError, timeouts and resets are OSErrors; what ends too early is an HTTPException
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f'{url} could not be downloaded ({getattr(e, "reason", e)}): try again, or '
                        f'{advice}') from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f'{url}: what arrived has another checksum: try again, or {advice}')
    return data
