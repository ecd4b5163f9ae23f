"""Text of a source → token shards: put into splits, encoded by threads, written in order."""

import hashlib
import json
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from plaingpt.data.dataset import MASK_ENDING, SPLITS
from plaingpt.data.gigatoken import fast_encode
from plaingpt.data.shards import ShardWriter, write_meta, write_progress
from plaingpt.data.tokenizers import is_chat
from plaingpt.system.errors import progress_bar
from plaingpt.system.formatting import count_of, short

BATCH_CHARS = 2**20  # that a thread encodes at a time


class Encoded(NamedTuple):
    ids: np.ndarray
    documents: int
    bytes: int  # of the text, as UTF-8
    loss_mask: np.ndarray | None = None  # conversations: 1 for each id that counts in the loss


def write_tokens(source, tokenizer, folder, command, progress, held_out, *, shard_tokens, threads,
                 max_tokens=0):
    """Encode `source` into shards and meta.json in `folder`. Raises UserError.

    command: everything that decides the content, as meta.json has it
    progress: what shards.read_progress found: preparation goes on from there
    held_out: what put_in_splits takes
    max_tokens: to train on, 0 for all
    """
    chat = is_chat(tokenizer)  # then the texts are conversations as JSON
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    columns = {'.bin': dtype, **({MASK_ENDING: np.dtype('u1')} if chat else {})}
    writers = {split: ShardWriter(folder, split, shard_tokens, columns) for split in SPLITS}
    for split in writers if progress else ():
        writers[split].go_back(progress['splits'][split])
    train, started = writers['train'], time.monotonic()
    done = sum(writer.tokens for writer in writers.values())
    if done:
        print(f'resuming after {done:,} tokens that are written already')
    encode = partial(encode_conversations, tokenizer, dtype) if chat else partial(
        encode_batch, tokenizer, fast_encode(tokenizer),
        None if source.is_one_text else tokenizer.end_of_text, dtype)
    pieces = put_in_splits(source, held_out, tokenizer.end_of_text is None)
    count = progress.get('count', 0)  # pieces that are written
    with closing(pieces), progress_bar('encoding', max_tokens or source.total,
                                       'tokens' if max_tokens else source.unit) as bar:
        batches = group_in_batches(islice(pieces, count, None))
        for batch, encoded in map_in_order(encode, batches, threads):
            room = max_tokens - train.tokens
            if max_tokens and 'train' in encoded and len(encoded['train'].ids) >= room:
                encoded = encode(batch, room=room)
            filled = [writers[split].write(part) for split, part in encoded.items()]
            count += len(batch)
            if max_tokens and train.tokens == max_tokens:
                break  # the batch was cut, so progress.json cannot say how far it is written
            if any(filled):
                for writer in writers.values():
                    writer.sync()
                write_progress(folder, command, tokenizer=tokenizer.to_json(), count=count,
                               splits={split: writer.state()
                                       for split, writer in writers.items()})
            bar.update((train.tokens if max_tokens else source.position()) - bar.n)
    tokens = sum(writer.tokens for writer in writers.values()) - done
    seconds = time.monotonic() - started
    print(f'{count_of(tokens, "token")} in {seconds:.1f} s, {short(tokens / seconds)} a second')
    source.report()
    if train.tokens < max_tokens:
        print(f'{source.name} has {train.tokens:,} tokens to train on, fewer than {max_tokens=}')
    splits = {split: writer.finish() for split, writer in writers.items()}
    write_meta(folder, dtype, tokenizer, splits, command)


def group_in_batches(pieces):
    """Group what put_in_splits yields in lists of about BATCH_CHARS."""
    group, characters = [], 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[1])
        if characters >= BATCH_CHARS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def encode_batch(tokenizer, encode, end_of_text, dtype, batch, room=math.inf):
    """[(split, text, new_document)] → {split: Encoded}, with `end_of_text` before each document
    unless it is None.

    encode: the tokenizer's, or a faster function; room: the most tokens to train on, where the
    document that reaches it is cut
    """
    ids = {split: [] for split in SPLITS}
    documents, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for split, text, new_document in batch:
        found = encode(text)
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
    """The same of conversations as JSON."""
    encoded = {}
    for split in SPLITS:
        found = [json.loads(text) for piece_split, text, _ in batch if piece_split == split]
        if found:
            both = map(tokenizer.encode_conversation, found)
            ids, loss_mask = map(np.concatenate, zip(*both, strict=True))
            size = sum(utf8_bytes(message['content'])
                       for messages in found for message in messages)
            encoded[split] = Encoded(ids.astype(dtype), len(found), size, loss_mask.astype('u1'))
    return encoded


def utf8_bytes(text):
    return len(text) if text.isascii() else len(text.encode('utf-8', 'replace'))


def map_in_order(function, batches, threads):
    """Yield (batch, function(batch)) in order; threads compute a few batches ahead, counted in
    characters: a batch may be one huge document."""
    # Threads and not processes: tiktoken works outside of Python's lock, so that they are as fast
    # and share one vocabulary. gigatoken holds the lock, but is faster than reading the text.
    with ThreadPoolExecutor(threads, thread_name_prefix='encode') as pool:
        waiting, ahead = deque(), 0
        for batch in batches:
            characters = sum(len(text) for _, text, _ in batch)
            waiting.append((batch, characters, pool.submit(function, batch)))
            ahead += characters
            while ahead > 2 * threads * BATCH_CHARS:
                batch, characters, future = waiting.popleft()
                yield batch, future.result()
                ahead -= characters
        for batch, _, future in waiting:
            yield batch, future.result()


# -----------------------------------------------------------------------------
# which split a document belongs to


VAL_CHARS = 4_000_000  # about a million tokens: enough for a loss, however large the corpus is
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread evenly over the circle


def put_in_splits(source, held_out, ends_with_line):
    """The pieces of a source → (split, text, new_document).

    held_out: the share of the text for validation, and how many characters it is at most
    ends_with_line: end documents with a line break, where no end of text comes before the next
    """
    pieces, (share, most) = source.pieces(), held_out
    if source.is_one_text:
        share = min(share, most / max(1, sum(source.file_chars)))
        return split_by_place(pieces, [int(n * (1 - share)) for n in source.file_chars])
    pieces = split_by_hash(pieces, share, most)
    return end_with_line_breaks(pieces) if ends_with_line else pieces


def split_by_hash(pieces, share, most=math.inf):
    """Pieces → (split, text, new_document). A hash of a document's first piece decides its split,
    so a document keeps its split when others are added or removed. When `most` characters are for
    validation, later documents are for training. A long document comes in several pieces, and each
    split gets its share of them: their hashes follow that of the first in steps of the golden
    ratio."""
    end = math.ceil(share * 2**64)
    split, held_out = None, 0
    for text, new_document, own_split in pieces:
        if new_document:
            # Texts that differ only in white space at the end get the same split. Most files end
            # with one line break, and hash as they are.
            data = (text.rstrip() + '\n').encode('utf-8', 'replace')
            place = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big')
        else:
            place = (place + GOLDEN) % 2**64
        before = split
        if not own_split and place < end and held_out < most:
            split, held_out = 'val', held_out + len(text)
        else:
            split = own_split or 'train'
        yield split, text, new_document or split != before


def split_by_place(pieces, ends):
    """Pieces of the files of one text → (split, text, new_document). The end of each file is for
    validation, so that both splits have text of each kind.

    ends: of each file, the character where its validation text begins
    """
    ends, begun = iter(ends), set()
    train_end = '\n'  # of the training text
    for text, new_file, _ in pieces:
        if new_file:
            end, seen = next(ends), 0
        here = max(end - seen, 0)
        for split, part in ('train', text[:here]), ('val', text[here:]):
            if not part:
                continue
            if split == 'train':
                if new_file and not train_end.endswith('\n'):
                    part = '\n' + part
                train_end = part[-1]
            yield split, part, split not in begun
            begun.add(split)
        seen += len(text)


def end_with_line_breaks(pieces):
    """Let each document end with a line break."""
    held = None
    for piece in chain(pieces, [(None, '', True)]):
        if held:
            split, text, new_document = held
            ends = piece[2] and not text.endswith('\n')
            yield split, text + '\n' if ends else text, new_document
        held = piece
