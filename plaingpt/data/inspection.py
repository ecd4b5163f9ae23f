"""What a dataset contains, whether its files are intact, and whether its validation loss can be
trusted."""

from itertools import groupby, permutations

from plaingpt.core.dataset import SPLITS, open_dataset
from plaingpt.data.overlap import compare_splits, print_overlap
from plaingpt.data.tokenizers import vocabulary_of
from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import count_of, printable, quoted

EXCERPT_TOKENS, CHAT_EXCERPT_TOKENS = 24, 300
MAX_BYTES_DIFFERENCE = 0.15  # between the bytes per token of splits with the same kind of text
MIN_BYTES = 10_000  # smaller splits say little about their kind of text


def find_damage(dataset):
    """Read all of a dataset and compare it with meta.json → a list of problems, one line each."""
    problems = []
    for split in SPLITS:
        try:
            dataset.split(split).verify()
        except UserError as problem:
            problems.append(str(problem))
    return problems


def inspect(folder):
    """Print what a prepared folder contains, and verify all of it. Raises UserError for damage."""
    dataset = open_dataset(folder)
    for key, value in dataset.meta.get('source', {}).items():
        if value:
            print(f'  {key}: {value}')
    if problems := find_damage(dataset):
        raise UserError('\n'.join(problems))
    print_report(dataset, compare_splits(dataset, dataset))
    if dataset.has_checksums():
        print('no damage found')
    else:
        print('no damage found (no checksums to compare with)')


def compare_datasets(folders):
    """Print how much of the validation split of each dataset is in the training split of each
    other one. Raises UserError for different tokenizers."""
    datasets = [open_dataset(folder) for folder in folders]
    for dataset in datasets[1:]:
        if vocabulary_of_text(dataset) != vocabulary_of_text(datasets[0]):
            raise UserError(f'{datasets[0].folder} and {dataset.folder} have different tokenizers, '
                            'so their tokens cannot be compared; prepare the second with '
                            f'--tokenizer={quoted(datasets[0].folder)}')
    for dataset, other in permutations(datasets, 2):
        print_overlap(compare_splits(dataset, other), dataset, other)


def vocabulary_of_text(dataset):
    """What determines the ids of text; conversations only add control tokens to it."""
    description = dataset.tokenizer_json()
    return vocabulary_of(description.get('base', description))


def print_report(dataset, overlap=None):
    """Print the size and the beginning of each split, and how much of the validation text is in the
    training split. overlap: from compare_splits, if it is not in meta.json"""
    print(f'{dataset.folder}: {dataset.tokenizer_json()["kind"]} tokenizer, '
          f'vocab_size {dataset.vocab_size:,}, {dataset.id_dtypes()}')
    for split in SPLITS:
        stream = dataset.split(split)
        print(describe_split(dataset, split))
        if dataset.has_own_ids() or not dataset.meta:
            print(f'    ids {", ".join(map(str, stream.read(0, EXCERPT_TOKENS).tolist()))}')
        if dataset.has_own_ids():
            continue
        try:
            print(f'    {excerpt(stream, dataset.tokenizer())}')
        except UserError as problem:
            if dataset.meta:
                raise
            print(f'    cannot be shown as GPT-2 tokens: {problem}')
    print_overlap(overlap or dataset.split_entry('val'), dataset, dataset)
    warn_of_different_text(dataset)


def describe_split(dataset, split):
    """One line on the files of a split and their size."""
    stream, entry = dataset.split(split), dataset.split_entry(split)
    line = str(stream.files[0].path)
    if len(stream.files) > 1:
        line += f' to {stream.files[-1].path.name}'
    line += f': {count_of(len(stream), "token")}'
    if entry.get('bytes'):
        line += f', {entry["bytes"] / len(stream):.2f} bytes per token'
    if 'documents' in entry:
        line += f', from {count_of(entry["documents"], "document")}'
    if 'learned' in entry:
        line += f'; {count_of(entry["learned"], "token")} in the loss'
    return line


def excerpt(stream, tokenizer):
    """The beginning of a split; for conversations the first one, with the tokens in the loss in
    brackets."""
    if not stream.loss_mask:
        return repr(tokenizer.decode(stream.read(0, EXCERPT_TOKENS).tolist()))
    ids = stream.read(0, CHAT_EXCERPT_TOKENS)
    ids = ids[:next(iter(stream.document_starts[1:].tolist()), None)]
    text, start = '', 0
    loss_mask = stream.loss_mask.read(0, len(ids)).tolist()
    for in_loss, run in groupby(loss_mask):
        end = start + len(list(run))
        piece = tokenizer.decode(ids[start:end].tolist())
        text += f'[{piece}]' if in_loss else piece
        start = end
    text = printable(text)
    for token in {tokenizer.decode([i]) for i in tokenizer.roles.values()}:
        text = text.replace(token, f'\n    {token}')  # one message per line
    return text


def warn_of_different_text(dataset):
    """Warn if the bytes per token suggest that the splits contain different kinds of text."""
    train, val = (dataset.bytes_per_token(split) for split in SPLITS)
    if None in (train, val):
        return
    if min(dataset.split_entry(split)['bytes'] for split in SPLITS) < MIN_BYTES:
        return
    if max(train, val) > (1 + MAX_BYTES_DIFFERENCE) * min(train, val):
        warn(f'bytes per token differ between the splits (train {train:.2f}, val {val:.2f}), so '
             'they contain different kinds of text and the validation loss says little about the '
             'training text; use --documents=file or --documents=line to hold out documents from '
             'all of the text, or prepare files of one kind')
