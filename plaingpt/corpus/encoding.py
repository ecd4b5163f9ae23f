"""Text of a source → token shards: put into splits, encoded by threads, written in order."""

import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from plaingpt.corpus.shards import ShardWriter, check_free_space, write_journal
from plaingpt.corpus.splitting import split_by_hash, split_by_place
from plaingpt.system.errors import UserError
from plaingpt.tokens.dataset import FORMAT_VERSION

BATCH_CHARS = 2**20  # that a thread encodes at a time
JOURNAL_SECONDS = 30  # a kill loses at most the work of so many seconds


class Batch(NamedTuple):
    pieces: list  # of (split, text, new_document)
    characters: int  # of their texts
    count: int  # pieces of the source up to the batch's end
    position: int  # how far the source is read there
    mark: dict | None  # where the source can start again there
    checksum: int = 0  # of the text from the beginning on


class Encoded(NamedTuple):
    ids: np.ndarray
    documents: int
    bytes: int  # of the text, as UTF-8


def group_in_batches(pieces, source, count=0, checksum=0):
    """Group what the functions of splitting.py yield; `count` pieces came before."""
    group, characters = [], 0
    for split, text, new_document, position in pieces:
        group.append((split, text, new_document))
        count += 1
        checksum = add_to_checksum(checksum, text)
        characters += len(text)
        if characters >= BATCH_CHARS:
            yield Batch(group, characters, count, position, source.mark(), checksum)
            group, characters = [], 0
    if group:
        yield Batch(group, characters, count, position, source.mark(), checksum)


def add_to_checksum(checksum, text):
    return zlib.crc32(text.encode('utf-8', 'surrogatepass'), checksum)


def encode_batch(tokenizer, end_of_text, dtype, batch):
    """Batch → {split: Encoded}, with `end_of_text` before each document unless it is None."""
    encoded = {}
    for split in ('train', 'val'):
        ids, documents, size = [], 0, 0
        for piece_split, text, new_document in batch.pieces:
            if piece_split == split:
                if new_document and end_of_text is not None:
                    ids.append([end_of_text])
                ids.append(tokenizer.encode(text))
                documents += new_document
                size += len(text.encode('utf-8', 'replace'))
        if ids:
            # 'unsafe' allows a narrower type; each id fits in it, since the vocabulary does
            ids = np.concatenate(ids, dtype=dtype, casting='unsafe')
            encoded[split] = Encoded(ids, documents, size)
    return encoded


def map_in_order(function, batches, num_proc):
    """Yield (batch, function(batch)) in order; threads compute a few batches ahead, counted in
    characters: a batch may be one huge document."""
    # Threads and not processes: tiktoken works outside of Python's lock, so that they are as fast
    # and share one vocabulary. gigatoken holds the lock, but is faster than reading the text.
    with ThreadPoolExecutor(num_proc, thread_name_prefix='encode') as pool:
        waiting, characters = deque(), 0
        for batch in batches:
            waiting.append((batch, pool.submit(function, batch)))
            characters += batch.characters
            while characters > 2 * num_proc * BATCH_CHARS:
                batch, future = waiting.popleft()
                yield batch, future.result()
                characters -= batch.characters
        for batch, future in waiting:
            yield batch, future.result()


def write_shards(folder, source, command, tokenizer, journal, num_proc):
    """Encode `source`, or a part of it, into shards in `folder`, from the journal on → the content
    of meta.json, for complete_meta. Raises UserError."""
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    writers = {split: ShardWriter(folder, split, dtype, command['shard_tokens'])
               for split in ('train', 'val')}
    if journal:
        for split, writer in writers.items():
            writer.resume_at(journal['splits'][split])
        print(f'resuming after {count_tokens(writers):,} tokens that are written already')
    before, started = count_tokens(writers), time.monotonic()
    encode_into(writers, folder, source, command, tokenizer, dtype, journal, num_proc)
    tokens, seconds = count_tokens(writers), time.monotonic() - started
    if source.nulls:
        print(f'{source.nulls:,} row{"s" if source.nulls > 1 else ""} left out: the text is null')
    if source.identity() != command['identity']:
        raise UserError(f'{source.name}: changed while it was read: give the same command again')
    print(f'{tokens - before:,} tokens in {seconds:.1f} s, '
          f'{(tokens - before) / seconds / 1e6:.2f}M a second')
    return {'format_version': FORMAT_VERSION, 'dtype': dtype.name,
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'splits': {split: writer.finish() for split, writer in writers.items()},
            'source': command, 'inputs': source.inputs()}


def count_tokens(writers):
    return sum(writer.tokens for writer in writers.values())


def encode_into(writers, folder, source, command, tokenizer, dtype, journal, num_proc):
    """Encode what the journal does not have yet; write the journal whenever a shard is full."""
    count, position, mark = (journal[key] for key in ('count', 'at', 'mark')) if journal \
        else (0, 0, None)
    end_of_text = None if source.is_one_text else tokenizer.end_of_text
    saved = time.monotonic()
    with closing(source.pieces(mark)) as pieces, \
            tqdm(total=source.total, initial=position, unit=source.unit,
                 unit_scale=source.unit == 'B', disable=None, desc='encoding') as bar:
        pieces = split_by_place(pieces, command['train_characters']) if source.is_one_text \
            else split_by_hash(pieces, command['val_fraction'])
        checksum = 0
        for _, text, *_ in islice(pieces, 0 if mark else count):  # a source without marks
            checksum = add_to_checksum(checksum, text)
        # Two texts can have one size and one time of change. Earlier versions had no checksum.
        if journal and not mark and checksum != journal.get('checksum', checksum):
            (folder / 'journal.json').unlink()
            raise UserError(f'{source.name}: the text is not that of the tokens that are written '
                            'already: give the same command again, which starts anew')
        for batch, encoded in map_in_order(
                lambda batch: encode_batch(tokenizer, end_of_text, dtype, batch),
                group_in_batches(pieces, source, count, checksum), num_proc):
            filled = [writers[split].write(part) for split, part in encoded.items()]
            if any(filled) or time.monotonic() - saved > JOURNAL_SECONDS:
                for writer in writers.values():
                    writer.sync()
                write_journal(folder, {
                    'command': command, 'tokenizer': tokenizer.to_json(), 'count': batch.count,
                    'at': batch.position, 'mark': batch.mark, 'width': dtype.itemsize,
                    'checksum': batch.checksum,
                    'splits': {split: writer.state() for split, writer in writers.items()}})
                saved = time.monotonic()
            bar.update(batch.position - bar.n)


def check_disk(folder, corpus, source, tokenizer_name, written, parts=1):
    """Raises UserError where the tokens will not fit on the disk, as far as can be known before.
    written: bytes of shards that are there already; parts: `source` is one of so many."""
    bytes_per_token = 1 if tokenizer_name in ('char', 'byte') else 3  # about
    if source.unit == 'B':
        tokens = source.total / bytes_per_token
    else:
        known = source.total == corpus.documents // parts
        tokens = corpus.tokens * 3 / bytes_per_token / parts if known else 0
    check_free_space(folder, 2 * tokens - written)
