"""Text of a source → token shards: assigned to splits, encoded by threads, written in order."""

import json
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from plaingpt.core.dataset import MASK_SUFFIX, SPLITS
from plaingpt.data.gigatoken import fast_encode
from plaingpt.data.shards import ShardWriter, write_meta, write_progress
from plaingpt.data.splits import as_one_document, assign_splits
from plaingpt.data.tokenizers import IdsTokenizer, is_chat
from plaingpt.system.errors import progress_bar, warn
from plaingpt.system.formatting import count_of, short

BATCH_CHARS = 2**20  # that a thread encodes at a time
# A validation split smaller than both of these says little about a model.
MIN_VAL_SHARE = 0.1  # of val_fraction
MIN_VAL_TOKENS = 10_000


class EncodingOptions(NamedTuple):
    val_fraction: float  # of the text, held out for validation
    max_val_chars: float  # limit on the validation text
    shard_tokens: int  # tokens per file
    threads: int
    max_tokens: int  # training tokens; 0: all
    cut_at_line: bool = True  # of one long text; False: at the character, as nanoGPT does


class Encoded(NamedTuple):
    ids: np.ndarray
    documents: int
    bytes: int  # of the text, as UTF-8
    marks: np.ndarray | None = None  # conversations: see ChatTokenizer.mark_conversation


def write_tokens(source, tokenizer, job, options):
    """Encode `source` into shards and a meta.json in job.folder. Raises UserError."""
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    columns = {'.bin': dtype}
    if is_chat(tokenizer):  # the texts are conversations in JSON
        columns[MASK_SUFFIX] = np.dtype('u1')
        encoder = ConversationEncoder(tokenizer, dtype)
    else:
        separator = None if source.is_continuous else tokenizer.end_of_text
        encoder = TextEncoder(tokenizer, fast_encode(tokenizer), separator, dtype)
    writers = {split: ShardWriter(job.folder, split, options.shard_tokens, columns)
               for split in SPLITS}
    if job.progress:
        for split, writer in writers.items():
            writer.rewind(job.progress['splits'][split])
    resumed_tokens = sum(writer.tokens for writer in writers.values())
    if resumed_tokens:
        print(f'resuming after {count_of(resumed_tokens, "token")}')
    started = time.monotonic()
    encode_source(source, encoder, job, options, writers)
    tokens = sum(writer.tokens for writer in writers.values()) - resumed_tokens
    seconds = time.monotonic() - started
    print(f'{count_of(tokens, "token")} in {seconds:.1f} s, {short(tokens / seconds)} tokens/s')
    source.report()
    warn_of_little_text(writers, options)
    train_tokens = writers['train'].tokens
    if train_tokens < options.max_tokens:
        print(f'{source.name} has only {count_of(train_tokens, "training token")} '
              f'(max_tokens={options.max_tokens})')
    splits = {split: writer.finish() for split, writer in writers.items()}
    write_meta(job.folder, dtype, tokenizer, splits, job.command)


def warn_of_little_text(writers, options):
    """Warn if much less was held out than asked for: documents may have very different sizes."""
    train, val = (writers[split].tokens for split in SPLITS)
    asked_for = options.val_fraction * (train + val)
    if 0 < val < min(MIN_VAL_SHARE * asked_for, MIN_VAL_TOKENS):
        warn(f'only {count_of(val, "token")} of {train + val:,} could be held out in whole '
             'documents, so the validation loss says little; change --documents, or raise '
             '--val_fraction')


def encode_source(source, encoder, job, options, writers):
    """Write all of a source, or max_tokens of it, and record the progress at each full shard."""
    tokenizer, train, max_tokens = encoder.tokenizer, writers['train'], options.max_tokens
    document_end = source.document_end if tokenizer.end_of_text is None else ''
    pieces = assign_splits(source, options, document_end)
    if isinstance(tokenizer, IdsTokenizer) and tokenizer.end_of_text is None:
        pieces = as_one_document(pieces)
    count = job.progress.get('count', 0)  # pieces that are written
    total, unit = source.total, source.unit
    if max_tokens:
        total, unit = max_tokens, 'tokens'
    with closing(pieces), progress_bar('encoding', total, unit) as bar:
        batches = group_in_batches(islice(pieces, count, None))
        for batch, encoded in map_in_order(encoder.encode, batches, options.threads):
            remaining = max_tokens - train.tokens
            train_tokens = len(encoded['train'].ids) if 'train' in encoded else 0
            if max_tokens and train_tokens >= remaining:
                encoded = encoder.encode(batch, remaining, has_val=writers['val'].tokens > 0)
            filled = [writers[split].write(tokens) for split, tokens in encoded.items()]
            count += len(batch)
            if max_tokens and train.tokens == max_tokens:
                if writers['val'].tokens:
                    break
            elif any(filled):  # progress.json cannot express that a batch was truncated
                for writer in writers.values():
                    writer.sync()
                counts = {split: writer.counts for split, writer in writers.items()}
                write_progress(job, tokenizer=tokenizer.to_json(), count=count, splits=counts)
            position = train.tokens if max_tokens else source.position()
            bar.update(position - bar.n)


def group_in_batches(pieces):
    """Group the pieces from assign_splits into lists of about BATCH_CHARS characters."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class TextEncoder:
    """Encodes batches of text, with `separator` (an id or None) before each document."""

    tokenizer: object
    encode_text: object  # tokenizer.encode, or a faster function
    separator: int | None
    dtype: np.dtype

    def encode(self, batch, max_train_tokens=math.inf, has_val=True):
        """[Piece] → {split: Encoded}. The document that exceeds max_train_tokens is truncated.
        After it, only validation text is encoded, until there is a piece of it. has_val: whether an
        earlier batch had one"""
        arrays = {split: [] for split in SPLITS}
        documents, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        remaining = max_train_tokens
        for text, new_document, split in batch:
            if remaining == 0 and has_val:
                break
            if remaining == 0 and split == 'train':
                continue
            has_val |= split == 'val'
            ids = self.encode_text(text)
            size = 0 if isinstance(self.tokenizer, IdsTokenizer) else utf8_bytes(text)
            prefix = [self.separator] if new_document and self.separator is not None else []
            if split == 'train':
                remaining -= len(prefix)
                if len(ids) > remaining:
                    size -= size and len(self.tokenizer.decode_bytes(ids[remaining:]))
                    ids = ids[:remaining]
                remaining -= len(ids)
            arrays[split] += [prefix, ids]
            documents[split] += new_document
            sizes[split] += size
        encoded = {}
        for split in SPLITS:
            if arrays[split]:
                # 'unsafe' allows the narrower dtype, which holds each id of the vocabulary
                ids = np.concatenate(arrays[split], dtype=self.dtype, casting='unsafe')
                encoded[split] = Encoded(ids, documents[split], sizes[split])
        return encoded


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes batches of conversations in JSON, with the marks of their tokens."""

    tokenizer: object
    dtype: np.dtype

    def encode(self, batch):
        """[Piece] → {split: Encoded}"""
        encoded = {}
        for split in SPLITS:
            conversations = [json.loads(piece.text) for piece in batch if piece.split == split]
            if not conversations:
                continue
            pairs = [self.tokenizer.mark_conversation(messages) for messages in conversations]
            ids = np.concatenate([ids for ids, _ in pairs])
            marks = np.concatenate([marks for _, marks in pairs])
            size = sum(utf8_bytes(message['content'])
                       for messages in conversations for message in messages)
            encoded[split] = Encoded(ids.astype(self.dtype), len(conversations), size,
                                     marks.astype('u1'))
        return encoded


def utf8_bytes(text):
    return len(text) if text.isascii() else len(text.encode('utf-8', 'replace'))


def map_in_order(function, batches, threads):
    """Yield (batch, function(batch)) in order, while threads work on a few batches ahead. How far
    ahead is counted in characters, since a batch may be one huge document."""
    # Threads rather than processes: tiktoken releases the GIL, so threads are as fast and share
    # one vocabulary. gigatoken holds the GIL, but is faster than reading the text.
    with ThreadPoolExecutor(threads, thread_name_prefix='encode') as pool:
        pending, ahead = deque(), 0
        for batch in batches:
            characters = sum(len(piece.text) for piece in batch)
            pending.append((batch, characters, pool.submit(function, batch)))
            ahead += characters
            while ahead > 2 * threads * BATCH_CHARS:
                batch, characters, future = pending.popleft()
                yield batch, future.result()
                ahead -= characters
        for batch, _, future in pending:
            yield batch, future.result()
