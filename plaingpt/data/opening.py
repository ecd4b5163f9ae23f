"""The setting `dataset` → the data of a run. A small corpus is prepared where it is missing, and
all processes must find the same tokens."""

import re
import subprocess
import sys

from plaingpt.data.dataset import (
    UNFINISHED,
    Part,
    dataset_folder,
    holds_tokens,
    open_dataset,
)
from plaingpt.system.distributed import all_gather, barrier, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import command
from plaingpt.system.formatting import quote_epochs, quoted

QUESTIONS = 3  # of the validation split, for samples of a tuned model
SAMPLE_START = '\n'  # what a sample of plain text continues


def read_names(text):
    """The setting `dataset`, a name or 'code:0.3,prose:0.7' → {name: weight}. Raises UserError."""
    if not re.search('[:,]', text) or dataset_folder(text).exists():
        return {text: 1.0}
    from plaingpt.data.mixtures import read_mixture
    return read_mixture(text)


def has_token_files(text):
    """Whether there are token files of all that `dataset` says."""
    return all(holds_tokens(dataset_folder(name)) for name in read_names(text))


def open_named(text, vocab_size=0):
    """What the setting `dataset` says → Dataset, a Mixture where it names several. vocab_size: as
    of open_dataset. Raises UserError."""
    weights = read_names(text)
    parts = [Part(name, open_dataset(dataset_folder(name), vocab_size), weight)
             for name, weight in weights.items()]
    if len(parts) == 1:
        return parts[0].dataset
    from plaingpt.data.mixtures import open_mixture
    return open_mixture(text, parts)


def find_dataset_size(text, vocab_size=0):
    """What `dataset` says → (vocabulary, training tokens or None, where they are known from).

    Where nothing is prepared, the table of corpora answers. vocab_size: used in place of the
    vocabulary that is found, unless it is 0. Raises UserError.
    """
    if has_token_files(text):
        dataset = open_named(text)
        tokens = sum(len(part.dataset.split('train')) for part in dataset.parts)
        folders = ', '.join(str(part.dataset.folder) for part in dataset.parts)
        return vocab_size or dataset.vocab_size, tokens, folders
    from plaingpt.data.corpora import CORPORA, Corpus
    name = next(name for name in read_names(text) if not has_token_files(name))
    corpus = CORPORA.get(name, Corpus(''))
    tokens = corpus.tokens or None if name == text else None
    return vocab_size or corpus.vocab_size, tokens, f'{dataset_folder(name)} is not prepared'


# -----------------------------------------------------------------------------
# the data of a run


def open_data(config, world, device):
    """Open data/<name>, or each corpus of a mixture, for a TrainConfig. A small corpus that is not
    prepared yet is prepared now. Raises UserError."""
    if world.local_rank == 0:
        for name in read_names(config.dataset):
            prepare_small(name)
    barrier()
    dataset = open_named(config.dataset, config.vocab_size)
    for _, each, _ in dataset.parts:
        if not each.meta:
            print0(f'{each.folder} has no meta.json: its files are taken for GPT-2 tokens')
    if config.vocab_size not in (0, dataset.vocab_size):
        raise UserError(f'vocab_size={config.vocab_size}: {dataset.folder} has '
                        f'{dataset.vocab_size} tokens; leave it at 0')
    check_same_data(dataset)
    return dataset


def prepare_small(name):
    """Run prepare.py where there is nothing of a name yet: it prepares small corpora alone."""
    folder = dataset_folder(name)
    if folder.parts != ('data', name) or holds_tokens(folder) or (folder / UNFINISHED).exists():
        return
    done = subprocess.run(command('prepare', name, '--if_small'))
    if done.returncode < 0:
        raise UserError(f'preparing {name} was killed: run python prepare.py {quoted(name)}')
    if done.returncode:
        sys.exit(done.returncode)  # it has said why


def check_same_data(dataset):
    """Raises UserError where processes have different tokens: hosts have other files on their
    disks, or the dataset was replaced while the processes started."""
    known = [dataset.identity('train'), dataset.identity('val')]
    if any(other != known for other in all_gather(known, gloo_group())):
        raise UserError(f'{dataset.folder}: the processes of this run find different tokens there: '
                        'give all hosts the same files, and start again')


def describe_batches(config, dataset, train_data, val_data):
    """What a run reads with these loaders, as one line; conversations have one more for each
    split."""
    tokens, step_tokens = train_data.epoch_tokens(), config.step_tokens()
    epochs = dataset.epochs(config.max_iters * step_tokens)
    epochs = {part.name and f'{part.name} ({part.weight:.1%})': epochs[part.name]
              for part in dataset.parts}
    overfit = config.check == 'overfit'
    if overfit:
        tokens = min(tokens, step_tokens)
    if overfit or dataset.has_mask():
        epochs = {'': config.max_iters * step_tokens / tokens}
    padded = ' with padding' if dataset.has_mask() else ''
    lines = [f'{dataset.folder}: {tokens:,} training tokens{padded}, vocabulary '
             f'{dataset.vocab_size:,}, '
             f'{"on disk" if train_data.stream.ram is None else "in memory"} | '
             f'{step_tokens:,} tokens a step, {quote_epochs(epochs)}']
    if dataset.has_mask():
        lines += [f'train: {train_data.describe()}', f'val: {val_data.describe()}']
    return '\n'.join(lines)


def sample_prompts(config, dataset, val_loader):
    """The prompts that samples of a run continue: SAMPLE_START, or questions of conversations →
    (prompts as ids, the same as text, options of generate). Raises UserError."""
    tokenizer = dataset.tokenizer()
    if not dataset.has_mask():
        prompt = tokenizer.encode(SAMPLE_START).tolist() or [tokenizer.end_of_text or 0]
        return [prompt], [SAMPLE_START], {'temperature': 0.8, 'top_k': 200}
    prompts = val_loader.questions(QUESTIONS)
    if not prompts:
        raise UserError('no question of the validation split has room for an answer in '
                        f'block_size={config.block_size}')
    return prompts, [tokenizer.decode(prompt) for prompt in prompts], \
        {'temperature': 0, 'end_of_text': tokenizer.end_of_turn}
