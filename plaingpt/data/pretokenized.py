"""Pretokenized corpora, which are not copied: the user's own ids, and the output of datatrove's
DocumentTokenizer, which is linked to.

https://github.com/huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py: NAME.ds has
ids without a header, and NAME.ds.index the ends of its documents as uint64.
"""

import hashlib
from pathlib import Path

import numpy as np

from plaingpt.core.dataset import SPLITS, UNFINISHED, open_dataset
from plaingpt.core.token_files import dtype_name, open_tokens, parse_dtype
from plaingpt.data.foreign_files import find_token_files, open_foreign
from plaingpt.data.inspection import print_report
from plaingpt.data.shards import write_meta
from plaingpt.system.errors import UserError, progress_bar
from plaingpt.system.files import locked


def find_datatrove(folder):
    """DocumentTokenizer's shards in `folder`, sorted by name → [(path, ends of its documents, dtype
    of its ids)]. Raises UserError."""
    shards = []
    for path in sorted(Path(folder).glob('*.ds')):
        if not path.stat().st_size:  # from a task without documents
            continue
        ends = np.fromfile(f'{path}.index', '<u8').astype(np.int64)
        width = path.stat().st_size / max([1, *ends[-1:]])
        if width not in (2, 4) or (shards and shards[0][2].itemsize != width):
            raise UserError(f'{path}.index does not match {path.name}: copy all of datatrove\'s '
                            'output, or run it again with save_index=True')
        shards.append((path, ends, np.dtype(f'<u{int(width)}')))
    if not shards:
        raise UserError(f'{folder}: no *.ds files with tokens; set --input to the output_folder of '
                        "datatrove's DocumentTokenizer")
    return shards


def link_datatrove(shards, tokenizer, job, val_fraction):
    """Link to `shards` from job.folder and write its meta.json. The last documents of each shard
    are held out, so that val_fraction holds for the shards up to it. Raises UserError."""
    files = {split: [] for split in SPLITS}
    documents = 0
    for shard, ends, dtype in shards:
        earlier_val = round(val_fraction * documents)
        documents += len(ends)
        num_val = round(val_fraction * documents) - earlier_val
        val_start = int(ends[-num_val - 1]) if num_val < len(ends) else 0
        for split, start, end in ('train', 0, val_start), ('val', val_start, int(ends[-1])):
            if start == end:
                continue
            path = job.folder / f'{split}_{len(files[split]):06d}.bin'
            path.symlink_to(shard.resolve())
            part = {'tokens': end - start, 'offset': start * dtype.itemsize}
            files[split].append(open_tokens(path, dtype, part))
    splits = {split: describe_files(files[split], tokenizer) for split in SPLITS}
    write_meta(job.folder, dtype, tokenizer, splits, job.command)


def describe_files(files, tokenizer):
    """[TokenFile] → the entry of a split in meta.json. Raises UserError for an id beyond the
    vocabulary."""
    entry = {'tokens': sum(file.tokens for file in files), 'files': []}
    if tokenizer.end_of_text is not None:
        entry['documents'] = 0
    with progress_bar('reading', entry['tokens'], 'tokens') as bar:
        for file in files:
            digest = hashlib.sha256()
            for ids in file.chunks(tokenizer.vocab_size):
                digest.update(ids)
                if tokenizer.end_of_text is not None:
                    entry['documents'] += int(np.count_nonzero(ids == tokenizer.end_of_text))
                bar.update(len(ids))
            entry['files'].append({'name': file.path.name, 'tokens': file.tokens,
                                   'dtype': dtype_name(file.dtype), 'sha256': digest.hexdigest()})
            if file.path.stat().st_size > file.tokens * file.dtype.itemsize:  # the file has more
                entry['files'][-1]['offset'] = file.offset
    return entry


def describe_ids(folder, tokenizer, dtype, command):
    """Write the meta.json of the user's own ids in `folder`, and print a report. dtype: of files
    without a header, or None for uint16. Raises UserError, with nothing written, for other data and
    for an id beyond the vocabulary."""
    vocab_size = tokenizer.vocab_size
    paths = {split: find_token_files(folder, split) for split in SPLITS}
    for split in SPLITS:
        if not paths[split]:
            raise UserError(f'{folder}: {split}.bin or {split}.npy is missing; write the ids of '
                            'this split with numpy, or pass files of rows with input_ids')
    with locked(folder, f'{folder}: another prepare.py is writing there; wait until it has '
                        'finished'):
        existing = open_dataset(folder, vocab_size)
        has_text_tokens = existing.meta and not existing.has_own_ids()
        if has_text_tokens or (folder / UNFINISHED).exists():
            raise UserError(f'{folder} holds tokens of text and already describes them: train '
                            'on it as it is, or put your own ids in another folder')
        splits = {}
        for split in SPLITS:
            files = [open_foreign(path, vocab_size, dtype) for path in paths[split]]
            splits[split] = describe_files(files, tokenizer)
        dtype = parse_dtype(splits['train']['files'][0]['dtype'])
        write_meta(folder, dtype, tokenizer, splits, command)
    print_report(open_dataset(folder))
