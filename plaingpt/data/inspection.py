"""What a dataset holds, whether it is as it was written, and whether its validation split can be
believed."""

from itertools import groupby

import numpy as np

from plaingpt.data.dataset import SPLITS, open_dataset
from plaingpt.data.overlap import compare_with_train, print_share
from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import command_for, count_of, printable

SHOWN_TOKENS, SHOWN_TOKENS_OF_CHAT = 24, 300
OTHER_TEXT = 0.15  # the splits differ by more in their bytes per token
FEW_BYTES = 10_000  # of a split say little about its kind of text


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
    warn_of_other_text(dataset)


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
    """Print how much of the validation text is in the training split."""
    for key, what in (('in_train', 'validation text is'), ('lines_in_train', 'lines of validation '
                      'text, whatever their numbers, are')):
        if entry.get(key) is not None:
            print_share(entry[key], f'{what} also in the training split',
                        'remove the copies from the input, or hold out other text '
                        f'({command_for("prepare")} hf … --val_split=…)')


def warn_of_other_text(dataset):
    """Warn where the bytes per token of the splits say that they hold different kinds of text."""
    sizes = [dataset.bytes_per_token(split) for split in SPLITS]
    if None in sizes or min(dataset.split_entry(split)['bytes'] for split in SPLITS) < FEW_BYTES:
        return
    if max(sizes) > (1 + OTHER_TEXT) * min(sizes):
        train, val = (f'{size:.2f}' for size in sizes)
        warn(f'a token of the validation split has {val} bytes and one of the training split '
             f'{train}: they hold different kinds of text, so the validation loss says little '
             'about what is trained on; give --documents=file or --documents=line to hold out '
             'documents from all of the text, or name files of one kind')
