"""How much of a text was trained on: exactly, within a dataset, or by a sketch of a training text,
which a run keeps."""

import io
import re
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plaingpt.data.dataset import SPLITS
from plaingpt.system.errors import print_line, progress_bar, warn
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import one_line

SEQUENCE_TOKENS = 64  # a copy has as many in a row: phrases and chance repeat fewer
LEARNED = SEQUENCE_TOKENS // 4  # tokens of the assistant among them, in conversations
MUCH_IN_TRAIN = 0.1
# A hash of 64 bits is the sum of the ids times these. RandomState gives the same in all versions.
FACTORS = np.frombuffer(np.random.RandomState(0).bytes(8 * SEQUENCE_TOKENS), '<i8')


def print_share(share, what, advice):
    """Print how much of the validation text was trained on: a warning where its loss cannot be
    believed. what: the end of the sentence; advice: what to do"""
    line = f'{100 * share:.3g}% of the {what}'
    if share > MUCH_IN_TRAIN:
        warn(f'{line}, so the validation loss says little about new text: {advice}')
    else:
        print_line(line)


def spread(count, tokens, length):
    """The token where each of `count` sequences of `length` begins, spread evenly over `tokens`."""
    return np.arange(count) * (tokens - length) // max(count - 1, 1)


def find_hashes(known, hashes):
    """The hashes that are among `known`, which is in order → (their places, places in `known`)"""
    which = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    there = np.flatnonzero(known[which] == hashes)
    return there, which[there]


# -----------------------------------------------------------------------------
# the splits of a dataset

SEQUENCES = 4096  # of the validation split to look for
HALF = SEQUENCE_TOKENS // 2
BLOCK_TOKENS = 2**17  # of the training split at a time
SHORT_TOKENS = 2 * SEQUENCE_TOKENS  # if documents are shorter on average, lines are compared too
LINE_CHARS = 20  # shorter lines are everywhere
LINE_TOKENS = 2**21  # of each split, to compare their lines


def compare_with_train(dataset):
    """How much of the validation split is in the training split → {'in_train': the share of its
    sequences}, and 'lines_in_train', the share of its lines, where documents are short. {} where
    it is too short to say."""
    train, val = map(dataset.split, SPLITS)
    share = find_overlap(train, val)
    if share is None:
        return {}
    if dataset.has_mask() or \
            len(val) >= SHORT_TOKENS * dataset.split_entry('val').get('documents', 0):
        return {'in_train': share}
    lines, known = (read_lines(stream, dataset.tokenizer()) for stream in (val, train))
    known = {*known}
    copies = sum(line in known for line in lines)
    return {'in_train': share, 'lines_in_train': copies / max(1, len(lines))}


def read_lines(stream, tokenizer):
    """The lines that a stream begins with, documents among them → [text], without what near copies
    differ in: numbers, case and white space."""
    ids = stream.read(0, LINE_TOKENS)
    if tokenizer.end_of_text is not None:
        ids[ids == tokenizer.end_of_text] = tokenizer.encode('\n')[0]
    text = re.sub(r'\d+', '0', tokenizer.decode(ids.tolist()).lower())
    return [' '.join(line.split()) for line in text.splitlines() if len(line) >= LINE_CHARS]


def find_overlap(train, val, sequences=SEQUENCES, block_tokens=BLOCK_TOKENS):
    """Two token streams → the share of sequences of `val` that occur anywhere in `train`. It looks
    for this many sequences of 64 tokens, spread evenly, or fewer in a short split, and reads
    `block_tokens` of `train` at a time. None where the split is shorter than one sequence. In
    conversations the assistant must say a quarter of a sequence.

    Each occurrence in `train` contains a block of 32 tokens that starts at a multiple of 32. So
    only these blocks are looked up among the halves of all sequences; around each that is found,
    64 tokens are compared, all by their hashes.
    """
    count = min(sequences, len(val) // SEQUENCE_TOKENS)
    if not count:
        return None
    starts = spread(count, len(val), SEQUENCE_TOKENS)
    wanted = val.sequences(starts, SEQUENCE_TOKENS)
    if val.loss_mask is not None:  # what the system says in all conversations is no copy
        wanted = wanted[val.loss_mask.sequences(starts, SEQUENCE_TOKENS).sum(1) >= LEARNED]
        if not len(wanted):
            return None
    hashes, counts = np.unique(wanted @ FACTORS, return_counts=True)
    found = np.zeros(len(hashes), dtype=bool)
    half_hashes = np.unique(sliding_window_view(wanted, HALF, axis=1)[:, :HALF] @ FACTORS[:HALF])
    with progress_bar('comparing the splits', len(train), 'tokens') as bar:
        for start in range(0, len(train) - SEQUENCE_TOKENS + 1, block_tokens):
            # Sequences that start in this block end in the next one.
            length = min(block_tokens + SEQUENCE_TOKENS - 1, len(train) - start)
            ids = train.read(start, length)
            halves = ids[:length // HALF * HALF].reshape(-1, HALF) @ FACTORS[:HALF]
            places = HALF * find_hashes(half_hashes, halves)[0]
            near = (places[:, None] - np.arange(HALF)).clip(0, length - SEQUENCE_TOKENS)
            there = sliding_window_view(ids, SEQUENCE_TOKENS)[near.ravel()] @ FACTORS
            found[find_hashes(hashes, there)[1]] = True
            bar.update(min(block_tokens, len(train) - start))
    return int(counts[found].sum()) / len(wanted)


# -----------------------------------------------------------------------------
# other texts: a sketch of one that was trained on, and the windows of one to validate on

SKETCH_BLOCKS = 2**16  # of 64 tokens each, at most
GROUP = 8  # blocks that the sketch of a longer text has in a row: 1 KB
LOOKED_AT, PLACES = 2**20, 64  # tokens of a validation text; a longer one is read in many places
# A text that was all trained on must share so many tokens with a sample: then what one group of
# blocks shares is not much.
ENOUGH_TOKENS = GROUP * SEQUENCE_TOKENS / MUCH_IN_TRAIN


class Sketch(NamedTuple):
    """The blocks of 64 tokens of a training text that start at multiples of 64, or a sample."""

    hashes: np.ndarray  # of the blocks, in order
    share: float  # of the text that they are


def sketch_of(stream, max_blocks=SKETCH_BLOCKS):
    """The tokens of a training text → Sketch, for which `max_blocks` of 64 tokens are read."""
    blocks = len(stream) // SEQUENCE_TOKENS
    if blocks <= max_blocks:
        ids = stream.read(0, blocks * SEQUENCE_TOKENS)
    else:
        groups = spread(max_blocks // GROUP, blocks, GROUP)
        ids = stream.sequences(groups * SEQUENCE_TOKENS, GROUP * SEQUENCE_TOKENS)
    hashes = np.sort(ids.reshape(-1, SEQUENCE_TOKENS) @ FACTORS)
    return Sketch(hashes, len(hashes) / max(1, blocks))


def windows_of(stream):
    """All sequences of 64 tokens of a validation text, or of places spread over a long one; of
    conversations those of which the assistant says a quarter → (hashes, where each starts)"""
    count, length = (1, len(stream)) if len(stream) <= LOOKED_AT else (PLACES, LOOKED_AT // PLACES)
    if length < SEQUENCE_TOKENS:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = spread(count, len(stream), length)
    hashes = sliding_window_view(stream.sequences(places, length), SEQUENCE_TOKENS, 1) @ FACTORS
    starts = np.arange(count * length).reshape(count, length)[:, :hashes.shape[1]]
    if stream.loss_mask is None:
        return hashes.ravel(), starts.ravel()
    in_loss = sliding_window_view(stream.loss_mask.sequences(places, length), SEQUENCE_TOKENS, 1)
    counted = in_loss.sum(2) >= LEARNED
    return hashes[counted], starts[counted]


def share_trained_on(hashes, starts, sketches):
    """The share of the tokens in the windows of a text that are in any training text of `sketches`;
    None where these hold too little to tell.

    Of a whole training text, each token of a block that occurs among the windows counts. A token in
    one block of a sample stands for 1 / share tokens. In several blocks, or in windows that occur
    several times, it is boilerplate, which a sample is likely to hold: it stands for itself.
    """
    if not len(starts):
        return None
    tokens = starts[-1] + SEQUENCE_TOKENS
    looked_at = np.count_nonzero(count_covering(starts, tokens))
    sketches = [sketch for sketch in sketches
                if sketch.share == 1 or sketch.share * looked_at >= ENOUGH_TOKENS]
    if not sketches:
        return None
    estimates = 0
    for sketch in sketches:
        known, in_sketch = np.unique(sketch.hashes, return_counts=True)
        copies, which = find_hashes(known, hashes)
        times = (in_sketch * np.bincount(which, minlength=len(known)))[which]
        blocks = count_covering(starts[copies], tokens, times)
        estimates = np.maximum(estimates, np.where(blocks == 1, 1 / sketch.share, blocks > 0))
    return min(1.0, float(estimates.sum()) / looked_at)


def count_covering(starts, tokens, times=None):
    """How many windows each token is in → (tokens + 1,); each window counts so many `times`."""
    begins, ends = (np.bincount(places, times, tokens + 1)
                    for places in (starts, starts + SEQUENCE_TOKENS))
    return np.cumsum(begins - ends)


def write_sketches(path, sketches):
    """Write Sketches as a file of numpy arrays. Raises OSError."""
    data = io.BytesIO()
    np.savez(data, *(sketch.hashes for sketch in sketches),
             shares=np.array([sketch.share for sketch in sketches]))
    write_atomically(path, data.getvalue())


def read_sketches(path):
    """The Sketches in a file → list; [] where there is none, or where it is damaged, with a
    warning."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [Sketch(file[f'arr_{i}'].astype(np.int64, casting='safe'), float(share))
                    for i, share in enumerate(file['shares'])]
    except FileNotFoundError:
        return []
    except Exception as e:  # whatever it holds
        warn(f'{path} is damaged ({type(e).__name__}: {one_line(e)}): what was trained on is not '
             'compared with the validation text')
        return []
