"""Overlap of validation text with training text: exactly, within a dataset, or estimated from a
sketch of the training text that each run keeps."""

import io
import re
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plaingpt.core.dataset import SPLITS
from plaingpt.system.errors import print_line, progress_bar, warn
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import one_line

SEQUENCE_TOKENS = 64  # coincidences and common phrases are shorter
SHORT_TOKENS = 2 * SEQUENCE_TOKENS  # a shorter copy may not contain a whole compared sequence
MIN_LOSS_TOKENS = SEQUENCE_TOKENS // 4  # in a sequence from conversations
MAX_OVERLAP = 0.1  # beyond it the validation loss is not trustworthy
# The 64-bit hash of a sequence is its dot product with these. RandomState is the same in all
# versions of numpy.
FACTORS = np.frombuffer(np.random.RandomState(0).bytes(8 * SEQUENCE_TOKENS), '<i8')


def describe_share(share, text, where):
    """One line on the share of a text that is in another one; None: not compared."""
    if share is None:
        return f'{text} was not compared with {where}: too short'
    return (f'{100 * share:.3g}% of {text} is also in {where} '
            f'(copies below {SHORT_TOKENS} tokens may be missed)')


def print_share(share, line, advice):
    """Print a line on the share of the validation text that was trained on; as a warning if its
    loss is not trustworthy. advice: what to do then"""
    if share and share > MAX_OVERLAP:
        warn(f'{line}, so the validation loss says little about new text: {advice}')
    else:
        print_line(line)


def spread(count, tokens, length):
    """The start tokens of `count` sequences of `length`, spread evenly over `tokens`."""
    return np.arange(count) * (tokens - length) // max(count - 1, 1)


def find_hashes(known, hashes):
    """Find the hashes that are in `known`, which is sorted → (indices in `hashes`, in `known`)"""
    candidates = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    matches = np.flatnonzero(known[candidates] == hashes)
    return matches, candidates[matches]


# -----------------------------------------------------------------------------
# between the splits of a dataset

NUM_SEQUENCES = 4096  # of the validation split to search for
HALF = SEQUENCE_TOKENS // 2
BLOCK_TOKENS = 2**17  # of the training split per read
MIN_LINE_CHARS = 20  # shorter lines are common everywhere
LINE_TOKENS = 2**21  # of each split, to compare lines


def compare_with_train(dataset):
    """How much of the validation split is in the training split → {'in_train': fraction of its
    sequences}, and if documents are shorter than SHORT_TOKENS on average 'lines_in_train', the
    fraction of its lines. What is too short to compare is left out."""
    train, val = map(dataset.split, SPLITS)
    overlap = find_overlap(train, val)
    shares = {} if overlap is None else {'in_train': overlap}
    documents = dataset.split_entry('val').get('documents', 0)
    if dataset.has_mask() or len(val) >= SHORT_TOKENS * documents:
        return shares
    val_lines = read_lines(val, dataset.tokenizer())
    train_lines = {*read_lines(train, dataset.tokenizer())}
    if val_lines:
        copies = sum(line in train_lines for line in val_lines)
        shares['lines_in_train'] = copies / len(val_lines)
    return shares


def read_lines(stream, tokenizer):
    """The first lines of a stream, also divided at documents → [text]. Numbers, case and white
    space are normalized, to match near-duplicates."""
    ids = stream.read(0, LINE_TOKENS)
    if tokenizer.end_of_text is not None:
        ids[ids == tokenizer.end_of_text] = tokenizer.encode('\n')[0]
    text = re.sub(r'\d+', '0', tokenizer.decode(ids.tolist()).lower())
    return [' '.join(line.split()) for line in text.splitlines() if len(line) >= MIN_LINE_CHARS]


def find_overlap(train, val, max_sequences=NUM_SEQUENCES, block_tokens=BLOCK_TOKENS):
    """The fraction of 64-token sequences of the stream `val` that occur anywhere in `train`.

    It searches for up to max_sequences, spread evenly over `val`, and reads `train` in blocks of
    block_tokens. None if one of them is shorter than a sequence. In conversations, a quarter of a
    sequence must be in the loss.

    Each occurrence in `train` contains an aligned block of 32 tokens (one that starts at a multiple
    of 32), so only aligned blocks are looked up, among all 32-token windows of the sequences.
    Around each match, 64-token windows are compared. All comparisons are by hash.
    """
    count = min(max_sequences, len(val) // SEQUENCE_TOKENS)
    if not count or len(train) < SEQUENCE_TOKENS:
        return None
    starts = spread(count, len(val), SEQUENCE_TOKENS)
    sequences = val.sequences(starts, SEQUENCE_TOKENS)
    if val.loss_mask is not None:  # a system prompt that all conversations share is not a copy
        loss_tokens = val.loss_mask.sequences(starts, SEQUENCE_TOKENS).sum(1)
        sequences = sequences[loss_tokens >= MIN_LOSS_TOKENS]
        if not len(sequences):
            return None
    hashes, counts = np.unique(sequences @ FACTORS, return_counts=True)
    is_in_train = np.zeros(len(hashes), dtype=bool)
    halves = sliding_window_view(sequences, HALF, axis=1)[:, :HALF]
    half_hashes = np.unique(halves @ FACTORS[:HALF])
    with progress_bar('comparing the splits', len(train), 'tokens') as bar:
        for start in range(0, len(train) - SEQUENCE_TOKENS + 1, block_tokens):
            # Sequences that start in this block may end in the next one.
            length = min(block_tokens + SEQUENCE_TOKENS - 1, len(train) - start)
            ids = train.read(start, length)
            aligned = ids[:length // HALF * HALF].reshape(-1, HALF) @ FACTORS[:HALF]
            positions = HALF * find_hashes(half_hashes, aligned)[0]
            window_starts = positions[:, None] - np.arange(HALF)
            window_starts = window_starts.clip(0, length - SEQUENCE_TOKENS).ravel()
            window_hashes = sliding_window_view(ids, SEQUENCE_TOKENS)[window_starts] @ FACTORS
            is_in_train[find_hashes(hashes, window_hashes)[1]] = True
            bar.update(min(block_tokens, len(train) - start))
    return int(counts[is_in_train].sum()) / len(sequences)


# -----------------------------------------------------------------------------
# between datasets: a sketch of the training text, and windows of the validation text

SKETCH_BLOCKS = 2**16  # limit, of 64 tokens each
GROUP_BLOCKS = 8  # consecutive blocks in the sketch of a longer text: 1 KB of uint16
WINDOW_TOKENS = 2**20  # of a validation text
WINDOW_CHUNKS = 64  # evenly spaced, of a longer text
# If all of a text was trained on, it must share at least so many tokens with a sample. Then the
# tokens of a single group of blocks are less than MAX_OVERLAP.
MIN_SAMPLED_TOKENS = GROUP_BLOCKS * SEQUENCE_TOKENS / MAX_OVERLAP


class Sketch(NamedTuple):
    """The aligned 64-token blocks of a training text, or a sample of them."""

    hashes: np.ndarray  # of the blocks, sorted
    share: float  # fraction of the blocks that are in the sketch


def sketch_of(stream, max_blocks=SKETCH_BLOCKS):
    """The Sketch of a training text, with up to max_blocks."""
    blocks = len(stream) // SEQUENCE_TOKENS
    if blocks <= max_blocks:
        ids = stream.read(0, blocks * SEQUENCE_TOKENS)
    else:
        groups = spread(max_blocks // GROUP_BLOCKS, blocks, GROUP_BLOCKS)
        ids = stream.sequences(groups * SEQUENCE_TOKENS, GROUP_BLOCKS * SEQUENCE_TOKENS)
    hashes = np.sort(ids.reshape(-1, SEQUENCE_TOKENS) @ FACTORS)
    return Sketch(hashes, len(hashes) / max(1, blocks))


def windows_of(stream):
    """All 64-token windows of a validation text, or of evenly spaced chunks of a long one; in
    conversations those with a quarter in the loss → (hashes, start of each)"""
    num_chunks, length = 1, len(stream)
    if len(stream) > WINDOW_TOKENS:
        num_chunks, length = WINDOW_CHUNKS, WINDOW_TOKENS // WINDOW_CHUNKS
    if length < SEQUENCE_TOKENS:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    chunks = spread(num_chunks, len(stream), length)
    hashes = sliding_window_view(stream.sequences(chunks, length), SEQUENCE_TOKENS, 1) @ FACTORS
    starts = np.arange(num_chunks * length).reshape(num_chunks, length)[:, :hashes.shape[1]]
    if stream.loss_mask is None:
        return hashes.ravel(), starts.ravel()
    in_loss = sliding_window_view(stream.loss_mask.sequences(chunks, length), SEQUENCE_TOKENS, 1)
    selected = in_loss.sum(2) >= MIN_LOSS_TOKENS
    return hashes[selected], starts[selected]


def share_trained_on(hashes, starts, sketches):
    """The estimated fraction of the tokens in the windows of a text that are in a training text of
    any of the `sketches`; None if the text or the sketches are too small to tell.

    With a complete sketch, a token counts if it is in a block that occurs among the windows. With a
    sample, a token in one block represents 1 / share tokens. In several blocks, or in a window that
    occurs several times, it is boilerplate, which a sample likely contains: it counts once.
    """
    tokens = starts[-1] + SEQUENCE_TOKENS if len(starts) else 0
    if tokens < SHORT_TOKENS:
        return None
    covered = np.count_nonzero(count_covering(starts, tokens))
    sketches = [sketch for sketch in sketches
                if sketch.share == 1 or sketch.share * covered >= MIN_SAMPLED_TOKENS]
    if not sketches:
        return None
    estimates = 0
    for sketch in sketches:
        known, num_blocks = np.unique(sketch.hashes, return_counts=True)
        copies, matches = find_hashes(known, hashes)
        weights = (num_blocks * np.bincount(matches, minlength=len(known)))[matches]
        blocks = count_covering(starts[copies], tokens, weights)
        estimates = np.maximum(estimates, np.where(blocks == 1, 1 / sketch.share, blocks > 0))
    return min(1.0, float(estimates.sum()) / covered)


def count_covering(starts, tokens, weights=None):
    """The (weighted) number of windows that cover each token, (tokens + 1,)."""
    started = np.bincount(starts, weights, tokens + 1)
    ended = np.bincount(starts + SEQUENCE_TOKENS, weights, tokens + 1)
    return np.cumsum(started - ended)


def write_sketches(path, sketches):
    """Write Sketches to an .npz file. Raises OSError."""
    data = io.BytesIO()
    np.savez(data, *(sketch.hashes for sketch in sketches),
             shares=np.array([sketch.share for sketch in sketches]))
    write_atomically(path, data.getvalue())


def read_sketches(path):
    """The Sketches in a file → list; [] if it is missing, or damaged (with a warning)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [Sketch(file[f'arr_{i}'].astype(np.int64, casting='safe'), float(share))
                    for i, share in enumerate(file['shares'])]
    except FileNotFoundError:
        return []
    except Exception as e:  # a damaged file can raise anything
        warn(f'{path}: damaged ({type(e).__name__}: {one_line(e)}); skipping the comparison of the '
             'validation text with the training text')
        return []
