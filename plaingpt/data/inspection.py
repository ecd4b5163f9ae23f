"""What a prepared folder holds, whether it is as it was written, and how much of the validation
split is in the training split."""

from contextlib import suppress
from itertools import groupby

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plaingpt.data.dataset import not_read, open_dataset
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of, write_json
from plaingpt.system.formatting import count_of
from plaingpt.system.streams import Progress, print_marked, require_stdout, warn

READ_TOKENS = 2**20  # at a time


def find_damage(dataset):
    """Compare sizes and checksums with meta.json → a list of problems, one line each."""
    problems = []
    for split, entry in dataset.meta.get('splits', {}).items():
        if not entry['files']:
            continue  # of a part
        try:
            stream = dataset.split(split)
        except UserError as problem:
            problems.append(str(problem))
            continue
        for file in [*stream.files, *(stream.learned.files if stream.learned else ())]:
            if sha256_of(file.path) != file.sha256:
                problems.append(f'{file.path}: another checksum than when it was written: the file '
                                'is damaged; prepare the data again')
    return problems


def print_report(folder, meta):
    """Print the counts of a folder that was just prepared, and how each split begins."""
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    for split, entry in meta['splits'].items():
        names = [file['name'] for file in entry['files']]
        if not names:
            print(f'{folder}: no {split} tokens in this part')
            continue
        text = '' if 'documents' not in entry else (
            f', {entry["bytes"] / entry["tokens"]:.2f} bytes each, from '
            f'{count_of(entry["documents"], "document")}'
            + (f'; {entry["learned"]:,} are learned' if 'learned' in entry else ''))
        print(f'{folder}/{names[0]}{f" to {names[-1]}" if len(names) > 1 else ""}: '
              f'{entry["tokens"]:,} tokens{text}')
        print(f'    {excerpt(dataset.split(split), 0, tokenizer)!r}')
        if entry['tokens'] < 1025 and not dataset.has_mask():
            print(f'    note: that allows a block_size of {entry["tokens"] - 1} at most')
    print(f'{folder}/meta.json: {meta["tokenizer"]["kind"]} tokenizer, {meta["vocab_size"]:,} '
          f'tokens, {meta["dtype"]}')
    warn_of_shares(meta)


def warn_of_shares(meta):
    """Warn where a split that was held out by hashes is less than half of what was asked for, or
    more than twice as much: few documents are large."""
    tokens = sum(entry['tokens'] for entry in meta['splits'].values())
    for split in ('val', 'test'):
        asked, own = (meta['source'].get(f'{split}_{what}') for what in ('fraction', 'split'))
        if asked and not own and split in meta['splits']:
            share = meta['splits'][split]['tokens'] / tokens
            if not asked / 2 <= share <= 2 * asked:
                warn(f'the {split} split has {share:.2%} of the tokens where --{split}_fraction '
                     f'asks for {asked:.2%}: the documents differ much in size, or are few; use '
                     f'more text, or another --{split}_fraction')


def excerpt(stream, start, tokenizer):
    """The text of 24 tokens from `start` on."""
    ids = stream.sequences(np.array([start]), min(24, len(stream) - start))
    return tokenizer.decode(ids[0].tolist())


# -----------------------------------------------------------------------------
# validation text that is in the training split

SEQUENCE_TOKENS = 64  # that both splits have in a row: chance and phrases repeat fewer
SEQUENCES = 4096  # of the validation split that are looked for
HALF = SEQUENCE_TOKENS // 2
BLOCK_TOKENS = 2**17  # of the training split at a time
TABLE_BITS = 23  # 8 MB; finds halves faster than a search among 131,072
MUCH_IN_TRAIN = 0.1
SHORT = 2 * SEQUENCE_TOKENS  # a document, on average: then few sequences are of one alone


def record_overlap(folder):
    """Write into meta.json which share of each split that is held out is in the training split,
    where it does not say so yet → {split: its entry there}. Raises UserError, OSError."""
    dataset = open_dataset(folder)
    entries = {split: dataset.split_entry(split) for split in dataset.held_out()}
    unknown = {split: entry for split, entry in entries.items() if 'in_train' not in entry}
    for split, entry in unknown.items():
        share = find_overlap(dataset.split('train'), dataset.split(split))
        if share is not None:
            entry['in_train'] = share
    if any('in_train' in entry for entry in unknown.values()):
        with suppress(UserError), not_read(folder):  # who reads it holds the lock of this meta.json
            write_json(folder / 'meta.json', dataset.meta)
    return entries


def print_overlaps(entries):
    """Print a line for each split whose entry tells how much of it is in the training split."""
    for split, entry in entries.items():
        if entry.get('in_train') is not None:
            short = bool(entry.get('documents')) and entry['tokens'] < SHORT * entry['documents']
            print_overlap(entry['in_train'], split, short)


def print_overlap(share, split, short):
    """A line, which is a warning where the loss on `split` cannot be believed. short: few of its
    documents have as many tokens as are compared, so copies of single ones are not found"""
    name, what, option = ('validation', 'validate', 'val') if split == 'val' else [split] * 3
    line = f'{100 * share:.3g}% of the {name} text is also in the training split'
    if share <= MUCH_IN_TRAIN:
        print(line + short * f', as far as it can be seen: most documents are shorter than the '
                             f'{SEQUENCE_TOKENS} tokens that a copy is known by')
    else:
        warn(f'{line}, so the {name} loss says little about new text: remove the copies from '
             f'the input, or {what} on other text (python prepare.py hf … --{option}_split=…)')


def find_overlap(train, val):
    """Which share of `val` occurs anywhere in `train`, of 4,096 sequences of 64 tokens that are
    spread evenly; of as many as there are side by side where those are fewer, None where none is.

    A sequence in `train` has a half in it that starts at a multiple of 32 tokens. So `train` is cut
    into halves, and only around one that some sequence has are the 64 tokens compared, by hashes of
    64 bits: sums of the ids times random numbers.
    """
    count = min(SEQUENCES, len(val) // SEQUENCE_TOKENS)
    if not count:
        return None
    starts = np.arange(count) * (len(val) - SEQUENCE_TOKENS) // max(count - 1, 1)
    wanted = read_sequences(val, starts)
    factors = np.random.default_rng(0).integers(-2**63, 2**63, size=SEQUENCE_TOKENS)
    hashes, counts = np.unique(wanted @ factors, return_counts=True)
    found = np.zeros(len(hashes), dtype=bool)
    halves = sliding_window_view(wanted, HALF, axis=1)[:, :HALF] @ factors[:HALF]
    is_half = np.zeros(2**TABLE_BITS, dtype=bool)  # chance adds 1.6% of what is no half of any
    is_half[place_in_table(halves)] = True
    with Progress('comparing the splits', len(train), 'tokens') as progress:
        for start in range(0, len(train) - SEQUENCE_TOKENS + 1, BLOCK_TOKENS):
            # Sequences that start in this block end in the next one.
            length = min(BLOCK_TOKENS + SEQUENCE_TOKENS - 1, len(train) - start)
            ids = train.sequences(np.array([start]), length)[0]
            halves = ids[:length // HALF * HALF].reshape(-1, HALF) @ factors[:HALF]
            places = HALF * np.flatnonzero(is_half[place_in_table(halves)])
            near = (places[:, None] - np.arange(HALF)).clip(0, length - SEQUENCE_TOKENS)
            there = sliding_window_view(ids, SEQUENCE_TOKENS)[near.ravel()] @ factors
            which = np.searchsorted(hashes, there).clip(max=len(hashes) - 1)
            found[which[hashes[which] == there]] = True
            progress.advance_to(min(start + BLOCK_TOKENS, len(train)))
    return int(counts[found].sum()) / count


def place_in_table(hashes):
    """Their first bits."""
    return hashes.view(np.uint64) >> (64 - TABLE_BITS)


def read_sequences(stream, starts):
    """The 64 tokens from each of ascending `starts` on, by few reads → (len(starts), 64) array."""
    sequences = []
    for near in np.array_split(starts, min(len(starts), len(stream) // READ_TOKENS + 1)):
        ids = stream.sequences(near[:1], int(near[-1] - near[0]) + SEQUENCE_TOKENS)[0]
        sequences.append(ids[(near - near[0])[:, None] + np.arange(SEQUENCE_TOKENS)])
    return np.concatenate(sequences)


# -----------------------------------------------------------------------------
# prepare.py inspect


def inspect(folder):
    """Print what a prepared folder holds and read all of it. Raises UserError for damage."""
    require_stdout()
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    print(f'{folder}: {tokenizer.to_json()["kind"]} tokenizer, {dataset.vocab_size:,} tokens')
    for key, value in dataset.meta.get('source', {}).items():
        if value:
            print(f'  {key}: {value}')
    if 'duplicates' in dataset.meta:
        print(f'  duplicates left out: {dataset.meta["duplicates"]:,}')
    problems = find_damage(dataset)
    for split in ('train', *dataset.held_out()):
        try:
            inspect_split(dataset, split, tokenizer)
        except UserError as problem:
            problems.append(str(problem))
    if problems:
        raise UserError('\n'.join(dict.fromkeys(problems)))
    print_overlaps({split: {**dataset.split_entry(split),
                            'in_train': find_overlap(dataset.split('train'), dataset.split(split))}
                    for split in dataset.held_out()})
    print('no damage found'
          + ('' if dataset.is_ours() else '; no checksums to compare with'))


def inspect_split(dataset, split, tokenizer):
    """Read all of a split, print counts and three excerpts. Raises UserError for damage."""
    stream, documents, learned = dataset.split(split), 0, 0
    for start in range(0, len(stream), READ_TOKENS):
        place, n = np.array([start]), min(READ_TOKENS, len(stream) - start)
        ids = stream.sequences(place, n)
        if stream.learned:
            learned += int(stream.learned.sequences(place, n).sum())
        if tokenizer.end_of_text is not None:
            documents += int(np.count_nonzero(ids == tokenizer.end_of_text))
    per_token = dataset.bytes_per_token(split)
    print(f'{split}: {len(stream):,} tokens in {count_of(len(stream.files), "file")}'
          + (f', {per_token:.2f} bytes each' if per_token else '')
          + (f', {count_of(documents, "conversation")}, {learned:,} tokens learned'
             if stream.learned else
             f', {documents:,} ends of text' if documents else ', no end of text'))
    for start in range(0, len(stream), -(-len(stream) // 3)):
        if stream.learned:
            show_conversation(stream, start, tokenizer)
        else:
            print(f'  {start:>14,}  {excerpt(stream, start, tokenizer)!r}')
    expected = dataset.split_entry(split).get('documents', 0)
    if documents and expected and documents != expected:
        raise UserError(f'{dataset.folder}: {split} has {documents:,} ends of text where meta.json '
                        f'says {expected:,} documents: prepare the data again')
    expected = dataset.split_entry(split).get('learned', 0)
    if learned != expected:
        raise UserError(f'{dataset.folder}: {split} has {learned:,} learned tokens where meta.json '
                        f'says {expected:,}: prepare the data again')


SHOWN_TOKENS = 300  # of a conversation


def show_conversation(stream, place, tokenizer):
    """Print the first conversation that begins at token `place` or after it, a message a line, with
    what is learned marked; where none begins soon, the one that goes on there."""
    start, length = np.array([place]), min(2**14, len(stream) - place)
    ids = stream.sequences(start, length)[0]
    begins = [*np.flatnonzero(ids == tokenizer.conversation).tolist(), length]
    if begins == [length] and place + length == len(stream):
        return  # the last one was shown
    first = begins[0] if begins[0] < length else 0
    end = next(begin for begin in begins if begin > first)
    shown = slice(first, min(end, first + SHOWN_TOKENS))
    learned = stream.learned.sequences(start, length)[0][shown]
    parts, roles = [], tokenizer.roles.values()
    for is_learned, run in groupby(zip(ids[shown].tolist(), learned, strict=True), lambda x: x[1]):
        text = ''
        for is_role, part in groupby((i for i, _ in run), lambda i: i in roles):
            text += '\n    ' * is_role + tokenizer.decode(part).replace('\n', '\n      ')
        parts.append((text, bool(is_learned)))
    print_marked([(f'  {place + first:>14,}  ', False), *parts,
                  ('…' * (end - first > SHOWN_TOKENS), False)])
