"""The data of a run: its tokens, prepared where they are small, and the batches of both splits."""

import difflib
import hashlib
import json
import subprocess
import sys

import numpy as np

from plaingpt.data.batches import fits_in_ram
from plaingpt.data.corpora import CORPORA
from plaingpt.data.dataset import UNFINISHED, dataset_folder, open_named, read_names
from plaingpt.system.distributed import all_reduce_min, barrier, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import command
from plaingpt.system.formatting import quote_epochs, quoted

OPENING_TOKENS = 2**20  # of a corpus, in which a document begins where there are documents


def open_data(config, world):
    """Open data/<name>, of a mixture each. A small corpus that is not prepared yet is prepared now.
    What benchmarks during the run ask is looked for first: without it there is no run."""
    if world.local_rank == 0 and config.eval_tasks:
        from plaingpt.inference.lm_eval_model import load_tasks
        load_tasks(config.eval_tasks)
    names = read_names(config.dataset)
    if world.local_rank == 0:
        for name in names:
            prepare_small(name)
    barrier()
    dataset = open_named(config.dataset, config.vocab_size)
    for _, each, _ in dataset.parts:
        if not each.meta:
            print0(f'{each.folder} has no meta.json: its files are taken for GPT-2 tokens')
    if config.vocab_size not in (0, dataset.vocab_size):
        raise UserError(f'vocab_size={config.vocab_size}: {dataset.folder} has '
                        f'{dataset.vocab_size} tokens; leave it at 0')
    if config.document_start != 'auto' and config.document_start not in range(dataset.vocab_size):
        raise UserError(f'document_start={config.document_start}: {dataset.folder} has tokens 0 to '
                        f'{dataset.vocab_size - 1}')
    return dataset


def prepare_small(name):
    """Run prepare.py where it knows a small corpus of that name and there is nothing of it yet."""
    folder = dataset_folder(name)
    if folder.parts == ('data', name) \
            and not (folder / 'meta.json').exists() and not any(folder.glob('*.bin')) \
            and not (folder / UNFINISHED).exists():
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


def document_start(config, dataset):
    """The id of the token that opens the documents of a dataset, where document_attention asks for
    it. Raises UserError where there is none."""
    if not config.document_attention or config.document_start != 'auto':
        return config.document_start
    found = dataset.tokenizer().end_of_text
    if found is None:
        raise UserError(f'document_attention=True: the tokenizer of {dataset.folder} has no end of '
                        'text, so its documents cannot be told apart: prepare it with another '
                        'tokenizer, or leave document_attention out')
    for _, each, _ in dataset.parts:
        stream = each.split('train')
        if found not in stream.sequences(np.zeros(1, int), min(len(stream), OPENING_TOKENS)):
            raise UserError(f'document_attention=True: no document begins in the first '
                            f'{OPENING_TOKENS:,} tokens of {each.folder}, as in one running text: '
                            'prepare it with --documents=…, or leave document_attention out')
    return found


def check_same_data(dataset, device):
    """Raises UserError where processes have other tokens, of other hosts' disks or of a dataset
    that was replaced while they started."""
    known = json.dumps([dataset.identity('train'), dataset.identity('val')])
    number = int(hashlib.sha256(known.encode()).hexdigest()[:15], 16)
    if all_reduce_min(number, device) != -all_reduce_min(-number, device):
        raise UserError(f'{dataset.folder}: the processes of this run find different tokens there: '
                        'give all hosts the same files, and start again')


def open_batches(config, dataset, world, device):
    """→ (loader of the training split, loader of the validation split)."""
    check_same_data(dataset, device)
    in_ram = config.data_in_ram
    if in_ram == 'auto':
        in_ram = fits_in_ram([part.dataset.folder for part in dataset.parts], world.local_size)
    shape = in_ram, config.block_size, config.batch_size
    share = {'rank': world.rank, 'world_size': world.size, 'device': device}
    loaders = [dataset.loader(split, *shape, **share, seed=config.seed,
                              micro_steps=config.accumulation() // world.size,
                              only_first=config.overfit_batches if split == 'train' else 0)
               for split in ('train', 'val')]
    tokens, step_tokens = loaders[0].epoch_tokens(), config.step_tokens()
    epochs = dataset.epochs(config.max_iters * step_tokens)
    epochs = {part.name and f'{part.name} ({part.weight:.1%})': epochs[part.name]
              for part in dataset.parts}
    if config.overfit_batches:
        tokens = min(tokens, config.overfit_batches * step_tokens)
    if config.overfit_batches or dataset.has_mask():
        epochs = {'': config.max_iters * step_tokens / tokens}
    padded = ' with padding' * dataset.has_mask()
    print0(f'{dataset.folder}: {tokens:,} training tokens{padded}, vocabulary '
           f'{dataset.vocab_size:,}, {dataset.describe_reading(in_ram)} | {step_tokens:,} tokens '
           'a step' + (f', {quote_epochs(epochs)}' if not config.minutes else ''))
    if dataset.has_mask():
        for split, loader in zip(('train', 'val'), loaders, strict=True):
            print0(f'{split}: {loader.describe()}')
    return loaders


def evaluated_bytes(dataset, val_data, config, sequences):
    """UTF-8 bytes of text a token, of the tokens that each evaluation reads of the validation split
    (of a mixture by its weights), or None where that is not known. sequences: that it reads"""
    try:
        sizes = dataset.token_bytes('val')
    except UserError as problem:  # it takes a download
        print0(f'no bits per byte: {problem}')
        return None
    return None if sizes is None else dataset.mean(
        part.mean_target(sizes, sequences, config.eval_tokens > 0) for part in val_data.parts)


def base_tokenizer(dataset):
    """The tokenizer that a chat tokenizer wraps, as JSON, or None."""
    return dataset.tokenizer_json().get('base')
