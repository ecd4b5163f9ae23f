"""The data of a run: prepared where it is small and not there yet, opened, the same everywhere."""

import difflib
import subprocess
import sys

from plaingpt.data.dataset import UNFINISHED, dataset_folder, open_named, read_names
from plaingpt.system.distributed import all_gather, barrier, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import command
from plaingpt.system.formatting import quote_epochs, quoted

QUESTIONS = 3  # of the validation split, that samples of a tuned model answer
SAMPLE_START = '\n'  # what a sample of plain text continues


def open_data(config, world, device):
    """Open data/<name>, of a mixture each, for a TrainConfig. A small corpus that is not prepared
    yet is prepared now. Raises UserError."""
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
    """Run prepare.py where it knows a small corpus of that name and there is nothing of it yet."""
    folder = dataset_folder(name)
    if folder.parts == ('data', name) \
            and not (folder / 'meta.json').exists() and not any(folder.glob('*.bin')) \
            and not (folder / UNFINISHED).exists():
        from plaingpt.data.corpora import CORPORA
        if name not in CORPORA:
            nearest = difflib.get_close_matches(name, CORPORA, n=1)
            meant = f'; or did you mean --dataset={quoted(nearest[0])}?' if nearest else ''
            raise UserError(f'{folder} is not prepared: python prepare.py text FILES '
                            f'--data_dir={quoted(folder)}{meant}')
        done = subprocess.run(command('prepare', name, '--if_small'))
        if done.returncode < 0:
            raise UserError(f'preparing {name} was killed: run python prepare.py {quoted(name)}')
        if done.returncode:
            sys.exit(done.returncode)  # it has said why


def check_same_data(dataset):
    """Raises UserError where processes have other tokens, of other hosts' disks or of a dataset
    that was replaced while they started."""
    known = [dataset.identity('train'), dataset.identity('val')]
    if any(other != known for other in all_gather(known, gloo_group())):
        raise UserError(f'{dataset.folder}: the processes of this run find different tokens there: '
                        'give all hosts the same files, and start again')


def describe_batches(config, dataset, train_data, val_data):
    """What a run of a TrainConfig reads by these loaders, in a line; of conversations one more for
    each split."""
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
             f'{dataset.describe_reading(train_data.stream.ram is not None)} | '
             f'{step_tokens:,} tokens a step, {quote_epochs(epochs)}']
    if dataset.has_mask():
        lines += [f'train: {train_data.describe()}', f'val: {val_data.describe()}']
    return '\n'.join(lines)


def sample_prompts(config, dataset, val_loader):
    """What samples of a run continue, SAMPLE_START or questions of conversations → (prompts as ids,
    the same as text, options of generate). Raises UserError."""
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
