"""What a prepared folder holds, and whether it is as it was written."""

import numpy as np

from plaingpt.corpus.dataset import open_dataset
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of
from plaingpt.system.streams import require_stdout

READ_TOKENS = 2**20  # at a time


def find_damage(dataset):
    """Compare sizes and checksums with meta.json → a list of problems, one line each."""
    problems = []
    for split, entry in dataset.meta.get('splits', {}).items():
        try:
            dataset.split(split)
        except UserError as problem:
            problems.append(str(problem))
            continue
        for file in entry['files']:
            path = dataset.folder / file['name']
            if sha256_of(path) != file['sha256']:
                problems.append(f'{path}: another checksum than when it was written: the file is '
                                'damaged; prepare the data again')
    return problems


def print_report(folder, meta):
    """Print the counts of a folder that was just prepared, and how each split begins."""
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    for split, entry in meta['splits'].items():
        names = [file['name'] for file in entry['files']]
        text = '' if 'documents' not in entry else (
            f', {entry["bytes"] / entry["tokens"]:.2f} bytes each, from {entry["documents"]:,} '
            f'document{"s" if entry["documents"] != 1 else ""}')
        print(f'{folder}/{names[0]}{f" to {names[-1]}" if len(names) > 1 else ""}: '
              f'{entry["tokens"]:,} tokens{text}')
        print(f'    {excerpt(dataset.split(split), 0, tokenizer)!r}')
        if entry['tokens'] < 1025:
            print(f'    note: that allows a block_size of {entry["tokens"] - 1} at most')
    print(f'{folder}/meta.json: {meta["tokenizer"]["kind"]} tokenizer, {meta["vocab_size"]:,} '
          f'tokens, {meta["dtype"]}')


def excerpt(stream, start, tokenizer):
    """The text of 24 tokens from `start` on."""
    ids = stream.sequences(np.array([start]), min(24, len(stream) - start))
    return tokenizer.decode(ids[0].tolist())


def inspect(folder):
    """Print what a prepared folder holds and read all of it. Raises UserError for damage."""
    require_stdout()
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    print(f'{folder}: {tokenizer.to_json()["kind"]} tokenizer, {dataset.vocab_size:,} tokens')
    for key, value in dataset.meta.get('source', {}).items():
        if value:
            print(f'  {key}: {value}')
    problems = find_damage(dataset)
    for split in ('train', 'val'):
        try:
            inspect_split(dataset, split, tokenizer)
        except UserError as problem:
            problems.append(str(problem))
    if problems:
        raise UserError('\n'.join(dict.fromkeys(problems)))
    print('no damage found'
          + ('' if dataset.is_ours() else '; no checksums to compare with'))


def inspect_split(dataset, split, tokenizer):
    """Read all of a split, print counts and three excerpts. Raises UserError for damage."""
    stream, documents = dataset.split(split), 0
    for start in range(0, len(stream), READ_TOKENS):
        ids = stream.sequences(np.array([start]), min(READ_TOKENS, len(stream) - start))
        if tokenizer.end_of_text is not None:
            documents += int(np.count_nonzero(ids == tokenizer.end_of_text))
    per_token = dataset.bytes_per_token(split)
    print(f'{split}: {len(stream):,} tokens in {len(stream.files)} '
          f'file{"s" if len(stream.files) > 1 else ""}'
          + (f', {per_token:.2f} bytes each' if per_token else '')
          + (f', {documents:,} ends of text' if documents else ', no end of text'))
    for start in range(0, len(stream), -(-len(stream) // 3)):
        print(f'  {start:>14,}  {excerpt(stream, start, tokenizer)!r}')
    expected = dataset.split_entry(split).get('documents', 0)
    if documents and expected and documents != expected:
        raise UserError(f'{dataset.folder}: {split} has {documents:,} ends of text where meta.json '
                        f'says {expected:,} documents: prepare the data again')
