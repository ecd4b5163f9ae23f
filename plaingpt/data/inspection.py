"""What a dataset holds, whether it is as it was written, and how much of the validation split is
in the training split."""

import re
from itertools import groupby

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plaingpt.data.dataset import SPLITS, open_dataset
from plaingpt.system.errors import UserError, progress_bar, warn
from plaingpt.system.formatting import command_for, count_of, printable

SHOWN_TOKENS, SHOWN_TOKENS_OF_CHAT = 24, 300


def find_damage(dataset):
    """Read all of a dataset, and compare it with meta.json → a list of problems, one line each."""
    problems = []
    for split in SPLITS:
        try:
            dataset.split(split).verify()
        except UserError as problem:
            problems.append(str(problem))
    return problems


def inspect(folder):
    """Print what a prepared folder holds and read all of it. Raises UserError for damage."""
    dataset = open_dataset(folder)
    for key, value in dataset.meta.get('source', {}).items():
        if value:
            print(f'  {key}: {value}')
    if problems := find_damage(dataset):
        raise UserError('\n'.join(problems))
    print_report(dataset)
    print('no damage found' + ('' if dataset.is_ours() else '; no checksums to compare with'))


def print_report(dataset):
    """Print how much each split holds and how it begins, and how much of the validation text is in
    the training split."""
    print(f'{dataset.folder}: {dataset.tokenizer_json()["kind"]} tokenizer, '
          f'{dataset.vocab_size:,} tokens, {dataset.id_types()}')
    for split in SPLITS:
        stream = dataset.split(split)
        print(describe_split(dataset, split))
        if dataset.has_own_ids() or not dataset.meta:
            print(f'    ids {", ".join(map(str, stream.read(0, SHOWN_TOKENS).tolist()))}')
        if dataset.has_own_ids():
            continue
        try:
            print(f'    {excerpt(stream, dataset.tokenizer())}')
        except UserError as problem:
            if dataset.meta:
                raise
            print(f'    not shown as GPT-2 tokens: {problem}')
    entry = dataset.split_entry('val')
    print_overlap(entry if 'in_train' in entry else compare_with_train(dataset))


def describe_split(dataset, split):
    """The files of a split, and how much is in them, as a line."""
    stream, entry = dataset.split(split), dataset.split_entry(split)
    line = str(stream.files[0].path)
    if len(stream.files) > 1:
        line += f' to {stream.files[-1].path.name}'
    line += f': {len(stream):,} tokens'
    if 'bytes' in entry:
        line += f', {entry["bytes"] / len(stream):.2f} bytes each'
    if 'documents' in entry:
        line += f', from {count_of(entry["documents"], "document")}'
    if 'learned' in entry:
        line += f'; {entry["learned"]:,} tokens in the loss'
    return line


def excerpt(stream, tokenizer):
    """How a split begins; of conversations the first one, with the tokens in the loss in
    brackets."""
    if not stream.loss_mask:
        return repr(tokenizer.decode(stream.read(0, SHOWN_TOKENS).tolist()))
    ids = stream.read(0, SHOWN_TOKENS_OF_CHAT)
    starts = np.flatnonzero(ids == tokenizer.conversation)[1:].tolist()
    ids = ids[:starts[0]] if starts else ids
    text, loss_mask = '', stream.loss_mask.read(0, len(ids))
    for in_loss, run in groupby(range(len(ids)), lambda i: bool(loss_mask[i])):
        part = tokenizer.decode(ids[list(run)].tolist())
        text += f'[{part}]' if in_loss else part
    text = printable(text)
    for name in {tokenizer.decode([i]) for i in tokenizer.roles.values()}:
        text = text.replace(name, f'\n    {name}')  # a message a line
    return text


def print_overlap(entry):
    """Print how much of the validation text is in the training split: a warning where the
    validation loss cannot be believed."""
    for key, what in (('in_train', 'validation text is'), ('lines_in_train', 'lines of validation '
                      'text, whatever their numbers, are')):
        if entry.get(key) is None:
            continue
        line = f'{100 * entry[key]:.3g}% of the {what} also in the training split'
        if entry[key] > MUCH_IN_TRAIN:
            warn(f'{line}, so the validation loss says little about new text: remove the copies '
                 'from the input, or hold out other text '
                 f'({command_for("prepare")} hf … --val_split=…)')
        else:
            print(line)


# -----------------------------------------------------------------------------
# validation text that is in the training split

SEQUENCE_TOKENS = 64  # a copy has as many in a row: phrases and chance repeat fewer
LEARNED = SEQUENCE_TOKENS // 4  # tokens of the assistant among them, in conversations
SEQUENCES = 4096  # of the validation split to look for
HALF = SEQUENCE_TOKENS // 2
BLOCK_TOKENS = 2**17  # of the training split at a time
MUCH_IN_TRAIN = 0.1
SHORT_TOKENS = 2 * SEQUENCE_TOKENS  # if documents are shorter on average, lines are compared too
LINE_CHARS = 20  # shorter lines are everywhere
LINE_TOKENS = 2**21  # of each split, to compare their lines


def compare_with_train(dataset):
    """How much of the validation split is in the training split → {'in_train': the share of its
    sequences}, and 'lines_in_train', the share of its lines, where documents are short. {} where
    it is too short to say."""
    train, val = map(dataset.split, SPLITS)
    share = find_overlap(train, val)
    if share is None:
        return {}
    if dataset.has_mask() or \
            len(val) >= SHORT_TOKENS * dataset.split_entry('val').get('documents', 0):
        return {'in_train': share}
    lines, known = (read_lines(stream, dataset.tokenizer()) for stream in (val, train))
    known = {*known}
    copies = sum(line in known for line in lines)
    return {'in_train': share, 'lines_in_train': copies / max(1, len(lines))}


def read_lines(stream, tokenizer):
    """The lines that a stream begins with, documents among them → [text], without what near copies
    differ in: numbers, case and white space."""
    ids = stream.read(0, LINE_TOKENS)
    if tokenizer.end_of_text is not None:
        ids[ids == tokenizer.end_of_text] = tokenizer.encode('\n')[0]
    text = re.sub(r'\d+', '0', tokenizer.decode(ids.tolist()).lower())
    return [' '.join(line.split()) for line in text.splitlines() if len(line) >= LINE_CHARS]


def find_overlap(train, val):
    """Two token streams → the share of sequences of `val` that occur anywhere in `train`. It looks
    for 4,096 sequences of 64 tokens, spread evenly, or fewer in a short split. None where the split
    is shorter than one. In conversations the assistant must say a quarter of a sequence.

    Each occurrence in `train` contains a block of 32 tokens that starts at a multiple of 32. So
    only these blocks are looked up among the halves of all sequences; around each that is found,
    64 tokens are compared. All by hashes of 64 bits: sums of the ids times random numbers.
    """
    count = min(SEQUENCES, len(val) // SEQUENCE_TOKENS)
    if not count:
        return None
    starts = np.arange(count) * (len(val) - SEQUENCE_TOKENS) // max(count - 1, 1)
    wanted = val.sequences(starts, SEQUENCE_TOKENS)
    if val.loss_mask is not None:  # what the system says in all conversations is no copy
        wanted = wanted[val.loss_mask.sequences(starts, SEQUENCE_TOKENS).sum(1) >= LEARNED]
        if not len(wanted):
            return None
    factors = np.random.default_rng(0).integers(-2**63, 2**63, size=SEQUENCE_TOKENS)
    hashes, counts = np.unique(wanted @ factors, return_counts=True)
    found = np.zeros(len(hashes), dtype=bool)
    half_hashes = np.unique(sliding_window_view(wanted, HALF, axis=1)[:, :HALF] @ factors[:HALF])
    with progress_bar('comparing the splits', len(train), 'tokens') as bar:
        for start in range(0, len(train) - SEQUENCE_TOKENS + 1, BLOCK_TOKENS):
            # Sequences that start in this block end in the next one.
            length = min(BLOCK_TOKENS + SEQUENCE_TOKENS - 1, len(train) - start)
            ids = train.read(start, length)
            halves = ids[:length // HALF * HALF].reshape(-1, HALF) @ factors[:HALF]
            places = HALF * find_hashes(half_hashes, halves)[0]
            near = (places[:, None] - np.arange(HALF)).clip(0, length - SEQUENCE_TOKENS)
            there = sliding_window_view(ids, SEQUENCE_TOKENS)[near.ravel()] @ factors
            found[find_hashes(hashes, there)[1]] = True
            bar.update(min(BLOCK_TOKENS, len(train) - start))
    return int(counts[found].sum()) / len(wanted)


def find_hashes(known, hashes):
    """The hashes that are among `known`, which is in order → (their places, places in `known`)"""
    which = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    there = np.flatnonzero(known[which] == hashes)
    return there, which[there]
