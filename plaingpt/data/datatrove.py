"""Corpora that datatrove's DocumentTokenizer tokenized: its files stay where they are, and are
linked to.

https://github.com/huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py: NAME.ds has
ids without a header, and NAME.ds.index has the ends of its documents as uint64.
"""

import hashlib
from pathlib import Path

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.shards import empty, write_meta
from plaingpt.data.token_files import check_ids, open_tokens
from plaingpt.data.tokenizer_choice import borrow_tokenizer
from plaingpt.data.tokenizers import is_name
from plaingpt.system.errors import UserError, progress_bar


def find_datatrove(folder):
    """What DocumentTokenizer wrote to `folder`, in the order of names → [(path, ends of its
    documents, bytes of an id)]. Raises UserError."""
    # A task that gets no documents leaves an empty file.
    paths = [path for path in sorted(Path(folder).glob('*.ds')) if path.stat().st_size]
    if not paths:
        raise UserError(f'{folder}: no *.ds with tokens there: --input is the output_folder of '
                        "datatrove's DocumentTokenizer")
    shards = []
    for path in paths:
        ends = np.fromfile(f'{path}.index', '<u8').astype(np.int64)
        width = path.stat().st_size / max(1, ends[-1] if len(ends) else 0)
        if width not in (2, 4) or (shards and shards[0][2] != width):
            raise UserError(f'{path}.index does not fit {path.name}: copy all files of datatrove, '
                            'or run it again; it writes them at its end, with save_index=True')
        shards.append((path, ends, int(width)))
    return shards


def datatrove_tokenizer(name):
    """The tokenizer that --tokenizer names: the files do not contain it. Raises UserError."""
    if name in ('gpt2', 'byte'):
        return tokenizers.from_json({'kind': name})
    if is_name(name):
        raise UserError('datatrove needs --tokenizer: the dataset or run that has the tokenizer of '
                        'these tokens, or gpt2 or byte')
    return borrow_tokenizer(name)


def link_datatrove(shards, tokenizer, folder, command, val_fraction):
    """Link to `shards` from `folder` and write its meta.json. Raises UserError."""
    empty(folder)
    splits = {split: {'tokens': 0, 'documents': 0, 'files': []} for split in ('train', 'val')}
    with progress_bar('reading', sum(int(ends[-1]) for _, ends, _ in shards), 'tokens') as bar:
        for split, shard, width, start, end in cut_shards(shards, val_fraction):
            entry = splits[split]
            path = folder / f'{split}_{len(entry["files"]):06d}.bin'
            path.symlink_to(shard.resolve())
            file = open_tokens(path, np.dtype(f'<u{width}'), end - start, offset=start * width)
            digest = hashlib.sha256()
            for at, ids in file.pieces():
                check_ids(shard, ids, start + at, tokenizer.vocab_size)
                digest.update(ids)
                entry['documents'] += int(np.count_nonzero(ids == tokenizer.end_of_text))
                entry['tokens'] += len(ids)
                bar.update(len(ids))
            entry['files'].append({'name': path.name, 'tokens': file.tokens, 'offset': file.offset,
                                   'sha256': digest.hexdigest()})
    write_meta(folder, file.dtype, tokenizer, splits, command)


def cut_shards(shards, val_fraction):
    """Yield (split, path, bytes of an id, first token, end): the last documents of each shard are
    for validation, as many as keep the share of all shards up to it."""
    documents = 0
    for path, ends, width in shards:
        before, documents = documents, documents + len(ends)
        held_out = round(val_fraction * documents) - round(val_fraction * before)
        cut = int(ends[-held_out - 1]) if held_out < len(ends) else 0
        if cut:
            yield 'train', path, width, 0, cut
        if held_out:
            yield 'val', path, width, cut, int(ends[-1])
