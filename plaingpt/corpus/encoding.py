"""Text of a source → token shards: split, encoded by threads, written in order."""

import hashlib
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from plaingpt.corpus.dataset import FORMAT_VERSION
from plaingpt.corpus.shards import Shards
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_json

BATCH = 2**20  # characters that one thread encodes at a time


class Batch(NamedTuple):
    pieces: list  # of (split, text, opens a document)
    count: int  # pieces of the source up to its end
    at: int  # how far the source is read there
    mark: dict | None  # where the source can go on there


def split_by_hash(pieces, val_fraction):
    """Yield (split, text, opens, at): a document's split follows from its text, so it stays when
    others come and go. That of a long one follows from its first piece."""
    for text, opens, at, split in pieces:
        if opens:
            digest = hashlib.blake2b(text.encode('utf-8', 'replace'), digest_size=8).digest()
            held_out = int.from_bytes(digest, 'big') < val_fraction * 2**64
            side = split or ('val' if held_out else 'train')
        yield side, text, opens, at


def split_by_place(pieces, train_characters):
    """Yield (split, text, opens, at): one running text, whose end is held out."""
    seen = 0
    for text, _, at, _ in pieces:
        cut = min(max(train_characters - seen, 0), len(text))
        if cut:
            yield 'train', text[:cut], seen == 0, at
        if cut < len(text):
            yield 'val', text[cut:], seen <= train_characters, at
        seen += len(text)


def batches(pieces, source, count=0):
    """Group what the two functions above yield, from piece `count` on."""
    held, characters = [], 0
    for split, text, opens, at in pieces:
        held.append((split, text, opens))
        count += 1
        characters += len(text)
        if characters >= BATCH:
            yield Batch(held, count, at, source.mark())
            held, characters = [], 0
    if held:
        yield Batch(held, count, at, source.mark())


class Encoded(NamedTuple):
    ids: np.ndarray
    documents: int
    bytes: int  # of the text, as UTF-8


def encode_batch(tokenizer, end_of_text, dtype, batch):
    """Batch → {split: Encoded}, each document after `end_of_text` unless that is None."""
    encoded = {}
    for split in ('train', 'val'):
        ids, documents, size = [], 0, 0
        for side, text, opens in batch.pieces:
            if side == split:
                if opens and end_of_text is not None:
                    ids.append([end_of_text])
                ids.append(tokenizer.encode(text))
                documents += opens
                size += len(text.encode('utf-8', 'replace'))
        if ids:
            # 'unsafe' allows a narrower type; each id fits in it, since the vocabulary does
            ids = np.concatenate(ids, dtype=dtype, casting='unsafe')
            encoded[split] = Encoded(ids, documents, size)
    return encoded


def in_order(function, items, num_proc):
    """Yield (item, function(item)), computed by threads, few of them ahead of what is taken.

    Threads and not processes: tiktoken works outside of Python's lock, so that they are as fast
    and share one vocabulary. gigatoken holds the lock, but takes less time than reading the text.
    """
    with ThreadPoolExecutor(num_proc, thread_name_prefix='encode') as pool:
        waiting = deque()
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > 2 * num_proc:
                item, future = waiting.popleft()
                yield item, future.result()
        for item, future in waiting:
            yield item, future.result()

JOURNAL_SECONDS = 30  # at most so much work is lost to a kill, where shards take longer


def write_shards(folder, source, command, tokenizer, journal, num_proc):
    """Encode `source` into shards in `folder`, from the journal on → what meta.json says.

    Raises UserError, also where a split stays empty.
    """
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    splits = {split: Shards(folder, split, dtype, command['shard_tokens'])
              for split in ('train', 'val')}
    count, at, mark = 0, 0, None
    if journal:
        count, at, mark = (journal[key] for key in ('count', 'at', 'mark'))
        for split, shards in splits.items():
            shards.resume_from(journal['splits'][split])
        print('going on after '
              f'{sum(shards.tokens for shards in splits.values()):,} tokens of an earlier run')
    end_of_text = None if source.running else tokenizer.end_of_text
    started, saved = splits['train'].tokens + splits['val'].tokens, time.monotonic()
    start = saved
    with closing(source.pieces(mark)) as pieces, \
            tqdm(total=source.total, initial=at, unit=source.unit, unit_scale=source.unit == 'B',
                 disable=None, desc='encoding') as bar:
        sides = split_by_place(pieces, command['train_characters']) if source.running \
            else split_by_hash(pieces, command['val_fraction'])
        for _ in range(0 if mark else count):  # the source knows no way to go on but from the start
            next(sides)
        for batch, encoded in in_order(
                lambda batch: encode_batch(tokenizer, end_of_text, dtype, batch),
                batches(sides, source, count), num_proc):
            full = [splits[split].write(part) for split, part in encoded.items()]
            if any(full) or time.monotonic() - saved > JOURNAL_SECONDS:
                for shards in splits.values():
                    shards.sync()
                write_json(folder / 'journal.json', {
                    'command': command, 'tokenizer': tokenizer.to_json(), 'count': batch.count,
                    'at': batch.at, 'mark': batch.mark, 'width': dtype.itemsize,
                    'splits': {split: shards.state() for split, shards in splits.items()}})
                saved = time.monotonic()
            bar.update(batch.at - bar.n)
    tokens = splits['train'].tokens + splits['val'].tokens
    if source.nulls:
        print(f'{source.nulls:,} row{"s" if source.nulls > 1 else ""} left out: the text is null')
    if not tokens:
        raise UserError(f'{source.name}: empty, no text to learn from')
    for split, shards in splits.items():
        if not shards.tokens:
            raise UserError(f'{source.name}: the {split} split would be empty: use more text or '
                            'another --val_fraction')
    seconds = time.monotonic() - start
    print(f'{tokens - started:,} tokens in {seconds:.1f} s, '
          f'{(tokens - started) / seconds / 1e6:.2f}M a second')
    return {'format_version': FORMAT_VERSION, 'dtype': dtype.name,
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'splits': {split: shards.entry() for split, shards in splits.items()},
            'source': command}


def check_disk(folder, corpus, source, kind, written):
    """Raises UserError where the tokens will not fit on the disk, as far as one can tell before."""
    per_token = 1 if kind in ('char', 'byte') else 3  # bytes of text, about
    if source.unit == 'B':
        tokens = source.total / per_token
    else:
        tokens = corpus.tokens * 3 / per_token if source.total == corpus.documents else 0
    need, free = 2 * tokens - written, shutil.disk_usage(folder).free
    if need > free:
        raise UserError(f'{folder}: about {need / 1e9:,.1f} GB needed, {free / 1e9:,.1f} GB free: '
                        'make room, or choose another disk with --data_dir')
