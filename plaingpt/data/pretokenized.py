"""Corpora that are tokens already, and stay where they are: ids of your own, and what datatrove's
DocumentTokenizer wrote, which is linked to.

https://github.com/huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py: NAME.ds has
ids without a header, and NAME.ds.index has the ends of its documents as uint64.
"""

import hashlib
from pathlib import Path

import numpy as np

from plaingpt.data.dataset import SPLITS, UNFINISHED, open_dataset
from plaingpt.data.foreign_files import find_token_files, open_foreign
from plaingpt.data.inspection import print_report
from plaingpt.data.shards import empty, write_meta
from plaingpt.data.token_files import check_ids, dtype_named, name_of, open_tokens
from plaingpt.data.tokenizers import IdsTokenizer
from plaingpt.system.errors import UserError, progress_bar
from plaingpt.system.files import locked


def find_datatrove(folder):
    """What DocumentTokenizer wrote to `folder`, in the order of names → [(path, ends of its
    documents, type of its ids)]. Raises UserError."""
    shards = []
    for path in sorted(Path(folder).glob('*.ds')):
        if not path.stat().st_size:  # of a task that got no documents
            continue
        ends = np.fromfile(f'{path}.index', '<u8').astype(np.int64)
        width = path.stat().st_size / max([1, *ends[-1:]])
        if width not in (2, 4) or (shards and shards[0][2].itemsize != width):
            raise UserError(f'{path}.index does not fit {path.name}: copy all files of datatrove, '
                            'or run it again; it writes them at its end, with save_index=True')
        shards.append((path, ends, np.dtype(f'<u{int(width)}')))
    if not shards:
        raise UserError(f'{folder}: no *.ds with tokens there: --input is the output_folder of '
                        "datatrove's DocumentTokenizer")
    return shards


def link_datatrove(shards, tokenizer, folder, command, val_fraction):
    """Link to `shards` from `folder` and write its meta.json. The last documents of each shard are
    for validation, as many as keep the share of all shards up to it. Raises UserError."""
    empty(folder)
    splits = {split: {'tokens': 0, 'documents': 0, 'files': []} for split in ('train', 'val')}
    documents = 0
    with progress_bar('reading', sum(int(ends[-1]) for _, ends, _ in shards), 'tokens') as bar:
        for shard, ends, dtype in shards:
            before, documents = documents, documents + len(ends)
            held_out = round(val_fraction * documents) - round(val_fraction * before)
            cut = int(ends[-held_out - 1]) if held_out < len(ends) else 0
            for split, start, end in ('train', 0, cut), ('val', cut, int(ends[-1])):
                if start == end:
                    continue
                entry, digest = splits[split], hashlib.sha256()
                path = folder / f'{split}_{len(entry["files"]):06d}.bin'
                path.symlink_to(shard.resolve())
                file = open_tokens(path, dtype, end - start, offset=start * dtype.itemsize)
                for at, ids in file.pieces():
                    check_ids(shard, ids, start + at, tokenizer.vocab_size)
                    digest.update(ids)
                    entry['documents'] += int(np.count_nonzero(ids == tokenizer.end_of_text))
                    bar.update(len(ids))
                entry['tokens'] += file.tokens
                entry['files'].append({'name': path.name, 'tokens': file.tokens,
                                       'offset': file.offset, 'sha256': digest.hexdigest()})
    write_meta(folder, dtype, tokenizer, splits, command)


def describe_ids(folder, vocab_size, dtype, command):
    """Write the meta.json of someone's own ids in `folder`, and print a report. dtype: of ids
    without a header, or None for what their bytes suggest. Raises UserError, with nothing written,
    for other data and for an id beyond the vocabulary."""
    paths = {split: find_token_files(folder, split) for split in SPLITS}
    for split in SPLITS:
        if not paths[split]:
            raise UserError(f'{folder}: no {split}.bin or {split}.npy there: write the ids of this '
                            'split with numpy')
    with locked(folder, f'{folder}: another prepare.py is writing there: wait until it is done'):
        earlier = open_dataset(folder, vocab_size)
        of_text = earlier.meta and not earlier.has_own_ids()
        if of_text or (folder / UNFINISHED).exists():
            raise UserError(f'{folder} has tokens of text, which it describes already: train on it '
                            'as it is, or copy ids of your own into another folder')
        splits = {}
        for split in SPLITS:
            files = [open_foreign(path, vocab_size, dtype) for path in paths[split]]
            splits[split] = {'tokens': sum(file.tokens for file in files),
                             'files': [describe_file(file, vocab_size) for file in files]}
        dtype = dtype_named(splits['train']['files'][0]['dtype'])
        write_meta(folder, dtype, IdsTokenizer(vocab_size), splits, command)
    if earlier.is_ours() and earlier.vocab_size != vocab_size:
        print(f'{folder}: the vocabulary was {earlier.vocab_size:,} ids, and is {vocab_size:,} now')
    print_report(open_dataset(folder))


def describe_file(file, vocab_size):
    """The entry of a TokenFile in meta.json. Raises UserError for an id beyond the vocabulary."""
    entry = {'name': file.path.name, 'tokens': file.tokens, 'dtype': name_of(file.dtype),
             'sha256': file.checksum(vocab_size)}
    if file.offset:  # without one, the size of the file is checked too
        entry['offset'] = file.offset
    return entry
