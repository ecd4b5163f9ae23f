"""Text of a source → token shards: put into splits, encoded by threads, written in order."""

import json
import math
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from plaingpt.data.dataset import FORMAT_VERSION, MASK_ENDING
from plaingpt.data.shards import ShardWriter, empty
from plaingpt.data.splitting import SPLITS, Duplicates, split_by_hash, split_by_place
from plaingpt.data.tokenizers import UnknownCharacter, WrongIds
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_json
from plaingpt.system.formatting import count_of, short
from plaingpt.system.streams import ProgressBar

BATCH_CHARS = 2**20  # that a thread encodes at a time
CHECKED = 100  # of so many batches the ids of one are compared with tiktoken's
JOURNAL_SECONDS = 30  # a kill loses at most the work of so many seconds


class TextBatch(NamedTuple):
    pieces: list  # of (split, text, new_document, bytes of the text)
    characters: int  # of their texts
    count: int  # pieces up to the batch's end
    position: int  # how far the source is read there
    mark: dict | None  # where the source can start again there
    number: int = 0  # from the start of this run


class Encoded(NamedTuple):
    ids: np.ndarray
    documents: int
    bytes: int  # of the text, as UTF-8
    loss_mask: np.ndarray | None = None  # of conversations: 1 for each of ids that is a target


def end_with_line_breaks(pieces):
    """Let each document end with a line break, where no end of text comes before the next one."""
    held = None
    for piece in pieces:
        if held:
            yield end_line(held) if piece[2] else held
        held = piece
    if held:
        yield end_line(held)


def end_line(piece):
    split, text, new_document = piece
    return split, text + '\n' * (not text.endswith('\n')), new_document


def group_in_batches(pieces, source, count=0, marks=True):
    """Group what put_in_splits yields; `count` pieces came before."""
    group, characters, number = [], 0, 0

    def batch():
        mark = source.mark() if marks else None
        return TextBatch(group, characters, count, source.position(), mark, number)

    for split, text, new_document in pieces:
        group.append((split, text, new_document))
        count += 1
        characters += len(text)
        if characters >= BATCH_CHARS:
            yield batch()
            group, characters, number = [], 0, number + 1
    if group:
        yield batch()


def utf8_bytes(text):
    # Bytes that are no UTF-8 are halves of characters in the text.
    return len(text) if text.isascii() else len(text.encode('utf-8', 'replace'))


def encode_batch(tokenizer, end_of_text, dtype, batch, room=math.inf):
    """TextBatch → {split: Encoded}, with `end_of_text` before each document unless it is None.
    room: so many tokens to train on at most; the document that reaches it is cut"""
    ids = {split: [] for split in SPLITS}
    documents, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for split, text, new_document in batch.pieces:
        found = tokenizer.encode(text)
        if batch.number % CHECKED == 0:
            tokenizer.verify(text, found)
        before = [end_of_text] if new_document and end_of_text is not None else []
        size = utf8_bytes(text)
        if split == 'train':
            left = room - len(before)
            if len(found) > left:
                size -= len(tokenizer.decode_bytes(found[left:]))
                found = found[:left]
            room = left - len(found)
        ids[split] += [before, found]
        documents[split] += new_document
        sizes[split] += size
        if room == 0:
            break
    # 'unsafe' allows a narrower type; each id fits in it, since the vocabulary does
    return {split: Encoded(np.concatenate(found, dtype=dtype, casting='unsafe'), documents[split],
                           sizes[split]) for split, found in ids.items() if found}


def encode_conversations(tokenizer, dtype, batch):
    """TextBatch → {split: Encoded}, of conversations as JSON."""
    encoded = {}
    for split in SPLITS:
        found = [json.loads(text) for piece_split, text, *_ in batch.pieces
                 if piece_split == split]
        contents = [message['content'] for messages in found for message in messages]
        if batch.number % CHECKED == 0:
            for content in contents:
                tokenizer.verify(content, tokenizer.encode(content))
        if found:
            both = map(tokenizer.encode_conversation, found)
            ids, loss_mask = map(np.concatenate, zip(*both, strict=True))
            size = sum(map(utf8_bytes, contents))
            encoded[split] = Encoded(ids.astype(dtype), len(found), size, loss_mask.astype('u1'))
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
    """Encode `source` into shards in `folder`, from the journal on → the content of meta.json.
    Raises UserError."""
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    columns = {'.bin': dtype, **({MASK_ENDING: np.dtype('u1')} if 'format' in command else {})}
    writers = {split: ShardWriter(folder, split, command['shard_tokens'], columns)
               for split in wanted_splits(command)}
    if journal and all(writer.resume_at(journal['splits'][split])
                       for split, writer in writers.items()):
        print(f'resuming after {count_tokens(writers):,} tokens that are written already')
    elif journal:
        empty(folder)
        raise UserError(f'{folder}: files are missing or cut short: give the same command again, '
                        'which starts anew')
    before, started = count_tokens(writers), time.monotonic()
    duplicates = Duplicates() if 'dedup' in command else None
    try:
        ended_early = encode_into(writers, folder, source, command, tokenizer, dtype, journal,
                                  num_proc, duplicates)
    except UnknownCharacter as e:
        raise UserError(f'{source.name}: {e}: replace it, or choose another --tokenizer') from None
    except WrongIds:  # earlier ones may be wrong as well
        (folder / 'journal.json').unlink(missing_ok=True)
        raise
    inputs = [] if ended_early else source.inputs()
    if source.identity() != command['identity']:
        raise UserError(f'{source.name}: changed while it was read: give the same command again')
    tokens, seconds = count_tokens(writers), time.monotonic() - started
    print(f'{count_of(tokens - before, "token")} in {seconds:.1f} s, '
          f'{short((tokens - before) / seconds)} a second')
    limit, trained_on = command.get('max_tokens', 0), writers['train'].tokens
    if trained_on < limit:
        print(f'{source.name} has {trained_on:,} tokens to train on, fewer than --max_tokens='
              f'{limit}')
    # Where reading ended early, how much was read ahead is a matter of chance.
    counts = {} if ended_early else print_left_out(source, duplicates)
    return {'format_version': FORMAT_VERSION, 'dtype': dtype.name,
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'encoders': all_encoders(journal, tokenizer),
            'splits': {split: writer.finish() for split, writer in writers.items()},
            **counts, 'source': command, 'inputs': inputs}


def print_left_out(source, duplicates):
    """Say what of a source was not taken as it is → what meta.json has of that."""
    if source.nulls:
        print(f'{count_of(source.nulls, "row")} left out: the text is null')
    if duplicates is None:
        return {}
    print(f'{count_of(duplicates.dropped, "document")} left out: equal to an earlier one')
    return {'duplicates': duplicates.dropped}


def all_encoders(journal, tokenizer):
    """{library: version} of those that found the ids, in earlier runs too."""
    return {**(journal or {}).get('encoders', {}), **tokenizer.encoders}


def count_tokens(writers):
    return sum(writer.tokens for writer in writers.values())


def encode_into(writers, folder, source, command, tokenizer, dtype, journal, num_proc, duplicates):
    """Encode what the journal does not have yet; write the journal whenever a shard is full →
    whether max_tokens ended it before the end of the source."""
    # With --dedup all is read again, since the documents before are not remembered.
    mark = journal and not duplicates and journal['mark']
    count, position = (journal['count'], journal['at']) if mark else (0, 0)
    limit = command.get('max_tokens', 0)
    encode = partial(encode_conversations, tokenizer, dtype) if 'format' in command else partial(
        encode_batch, tokenizer, None if source.is_one_text else tokenizer.end_of_text, dtype)
    saved, before = time.monotonic(), count_tokens(writers)
    with closing(source.pieces(mark)) as pieces, \
            (ProgressBar('encoding', limit, 'tokens', writers['train'].tokens) if limit else
             ProgressBar('encoding', source.total, source.unit, position)) as progress:
        pieces = put_in_splits(pieces, source, command, duplicates, tokenizer)
        if journal and not mark:  # what a source without marks yielded is read again
            count = journal['count']
            pieces = islice(pieces, count, None)
        batches = group_in_batches(pieces, source, count, not duplicates)
        for batch, encoded in map_in_order(encode, batches, num_proc):
            room = limit - writers['train'].tokens
            if limit and 'train' in encoded and len(encoded['train'].ids) >= room:
                encoded = encode(batch, room=room)
            filled = [writers[split].write(part) for split, part in encoded.items()]
            if limit and writers['train'].tokens == limit:
                return True  # within the batch, so there is no journal here
            if any(filled) or time.monotonic() - saved > JOURNAL_SECONDS:
                for writer in writers.values():
                    writer.sync()
                write_json(folder / 'journal.json', {
                    'command': command, 'tokenizer': tokenizer.to_json(), 'count': batch.count,
                    'encoders': all_encoders(journal, tokenizer),
                    'at': batch.position, 'mark': batch.mark,
                    'splits': {split: writer.state() for split, writer in writers.items()}})
                saved = time.monotonic()
            if limit:
                progress.advance_to(writers['train'].tokens)
            else:
                progress.advance_to(batch.position, count_tokens(writers) - before)
    return False


def put_in_splits(pieces, source, command, duplicates, tokenizer):
    """Pieces of a source → (split, text, new_document)."""
    if source.is_one_text:
        ends = [(split, command[f'{split}_characters']) for split in ('train', 'val')
                if f'{split}_characters' in command]
        last = wanted_splits(command)[-1]
        return split_by_place(pieces, [*ends, (last, sys.maxsize)])
    if duplicates:
        pieces = duplicates.leave_out(pieces)
    pieces = split_by_hash(pieces, command['val_fraction'], command.get('test_fraction', 0))
    if tokenizer.end_of_text is not None:
        return pieces
    # A source with marks has whole documents, and nothing is read ahead of a mark.
    return end_with_line_breaks(pieces) if source.unit == 'B' else map(end_line, pieces)


def wanted_splits(command):
    """Those that `command` writes."""
    has_test = 'test_fraction' in command or 'test_split' in command
    return SPLITS if has_test else SPLITS[:2]
