"""How much of a validation split is also in a training split, of the same dataset or of another:
exactly, in passages of 64 or more tokens, and by lines where documents are shorter."""

import re
from itertools import permutations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plaingpt.core.dataset import VERIFIED_TOKENS
from plaingpt.system.errors import print_line, progress_bar, warn
from plaingpt.system.formatting import command_for, quoted

WINDOW = 64  # tokens; coincidences and common phrases are shorter
HALF = WINDOW // 2
MIN_LOSS_TOKENS = WINDOW // 4  # in a window of conversations
VAL_TOKENS = 2**22  # of a longer validation split the first are compared
BLOCK_TOKENS = 2**16  # of the training split per read
FILTER_BITS = 23  # upper bits of a hash, looked up before a binary search
MIN_LINE_CHARS = 20  # shorter lines are common everywhere
LINE_TOKENS = 2**21  # of each split, to compare lines
MIN_OVERLAP = 0.01  # less is not reported at the start of a run on a mixture
MAX_OVERLAP = 0.1  # beyond it the validation loss is not trustworthy
# The 64-bit hash of a window is its dot product with these.
FACTORS = np.random.default_rng(0).integers(-2**63, 2**63, size=WINDOW)


def compare_splits(dataset, other):
    """How much of the validation split of a dataset is in the training split of `other`, which may
    be the same → {'in_train': fraction of its tokens}, or if documents are shorter than a window on
    average also 'lines_in_train', the fraction of its lines. A fraction is left out if the text is
    too short to measure it; without lines to compare, a fraction of 0 windows is left out, too."""
    train, val = other.split('train'), dataset.split('val')
    overlap = find_overlap(train, val)
    shares = {} if overlap is None else {'in_train': overlap}
    documents = dataset.split_entry('val').get('documents', 0)
    if dataset.has_mask() or dataset.has_own_ids() or len(val) >= WINDOW * documents:
        return shares
    val_lines = read_lines(val, dataset.tokenizer())
    if not val_lines:
        return shares if overlap else {}
    train_lines = {*read_lines(train, dataset.tokenizer())}
    copies = sum(line in train_lines for line in val_lines)
    return {**shares, 'lines_in_train': copies / len(val_lines)}


def read_lines(stream, tokenizer):
    """The first lines of a stream, also divided at documents → [text]. Numbers, case and white
    space are normalized, to match near-duplicates."""
    ids = stream.read(0, LINE_TOKENS)
    if tokenizer.end_of_text is not None:
        ids[ids == tokenizer.end_of_text] = tokenizer.encode('\n')[0]
    text = re.sub(r'\d+', '0', tokenizer.decode(ids.tolist()).lower())
    return [' '.join(line.split()) for line in text.splitlines() if len(line) >= MIN_LINE_CHARS]


def find_overlap(train, val, block_tokens=BLOCK_TOKENS):
    """The fraction of the tokens of the stream `val` that are in a window of 64 tokens that occurs
    anywhere in `train`, which is read in blocks. None if one of them is shorter than a window. In
    conversations, tokens in the loss count, in windows of which they are a quarter.

    Each window in `train` contains an aligned block of 32 tokens (one that starts at a multiple
    of 32), so only aligned blocks are looked up, among all blocks of 32 tokens in `val`. Around
    each match, whole windows are looked up. All comparisons are by hash.
    """
    ids = val.read(0, VAL_TOKENS)
    if len(ids) < WINDOW or len(train) < WINDOW:
        return None
    counted = np.ones(len(ids), dtype=bool)
    is_compared = counted[WINDOW - 1:]
    if val.loss_mask is not None:  # a system prompt that all conversations share is not a copy
        counted = val.loss_mask.read(0, VAL_TOKENS)
        is_compared = sliding_window_view(counted, WINDOW).sum(axis=1) >= MIN_LOSS_TOKENS
    counted = counted & cover(is_compared)
    if not counted.any():
        return None
    windows = np.correlate(ids, FACTORS)
    order = np.argsort(windows)
    windows.sort()
    halves = np.correlate(ids, FACTORS[:HALF])
    halves.sort()
    del ids
    # Most blocks of `train` have upper bits that no half has, so they need no binary search.
    upper_bits = np.zeros(2**FILTER_BITS, dtype=bool)
    upper_bits[halves >> (64 - FILTER_BITS)] = True  # negative ones index from the end
    is_in_train = np.zeros(len(windows), dtype=bool)
    with progress_bar('comparing the splits', len(train), 'tokens') as bar:
        for start in range(0, len(train) - WINDOW + 1, block_tokens):
            # Windows that start in this block may end in the next one.
            length = min(block_tokens + WINDOW - 1, len(train) - start)
            block = train.read(start, length)
            aligned = block[:length // HALF * HALF].reshape(-1, HALF) @ FACTORS[:HALF]
            candidates = np.flatnonzero(upper_bits[aligned >> (64 - FILTER_BITS)])
            matches = candidates[find_hashes(halves, aligned[candidates])[0]]
            span = min(HALF - 1 + WINDOW, length)  # the windows that contain a match
            span_starts = (HALF * matches - (HALF - 1)).clip(0, length - span)
            spans = sliding_window_view(block, span)[span_starts]
            hashes = (sliding_window_view(spans, WINDOW, axis=1) @ FACTORS).ravel()
            is_in_train[find_hashes(windows, np.sort(hashes))[1]] = True  # sorted: faster
            bar.update(min(block_tokens, len(train) - start))
    is_copy = np.empty_like(is_in_train)  # equal windows have the result of the first
    is_copy[order] = is_in_train[np.searchsorted(windows, windows)]
    is_copy = cover(is_compared & is_copy)
    return np.count_nonzero(counted & is_copy) / np.count_nonzero(counted)


def cover(is_selected):
    """Whether each window is selected → whether each token is in a selected window."""
    return sliding_window_view(np.pad(is_selected, WINDOW - 1), WINDOW).any(axis=1)


def find_hashes(known, hashes):
    """Find the hashes that are in `known`, which is sorted → (indices in `hashes`, in `known`)"""
    candidates = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    matches = np.flatnonzero(known[candidates] == hashes)
    return matches, candidates[matches]


# -----------------------------------------------------------------------------
# reports


def print_overlap(shares, dataset, other):
    """Print what compare_splits found, as a warning if the validation loss is not trustworthy.
    shares: its result, or the entry of the validation split in meta.json"""
    val_name, train_name = 'the validation text', 'the training split'
    advice = 'remove the copies from the input, or hold out other text ' \
        f'({command_for("prepare")} hf … --val_split=…)'
    if dataset.has_mask():
        val_name = "the assistant's validation text"
    if other is not dataset:
        val_name += f' of {dataset.folder}'
        train_name += f' of {other.folder}'
        advice = f'remove the copies from {other.folder}, or train without it'
    train, val = other.split('train'), dataset.split('val')
    text = first_tokens(VAL_TOKENS, val, val_name)
    share, share_of_lines = shares.get('in_train'), shares.get('lines_in_train')
    if share is None and share_of_lines is None:
        print_line(f'{text} was not compared with {train_name}: too short')
    if share is not None:
        print_share(share, f'{text} is also in {train_name}, in passages of {WINDOW} or more '
                    'tokens', advice)
    if share_of_lines is not None:
        print_share(share_of_lines, f'the lines of {MIN_LINE_CHARS} or more characters in '
                    f'{first_tokens(LINE_TOKENS, val, val_name)} are also in '
                    f'{first_tokens(LINE_TOKENS, train, train_name)} (ignoring numbers)', advice)


def first_tokens(limit, stream, name):
    """The name of a stream of which at most `limit` tokens were compared."""
    return name if len(stream) <= limit else f'the first {limit:,} tokens of {name}'


def print_share(share, text, advice):
    line = f'{100 * share:.3g}% of {text}'
    if share > MAX_OVERLAP:
        warn(f'{line}, so the validation loss says little about new text: {advice}')
    else:
        print_line(line)


def compare_corpora(datasets):
    """Print how much of the validation split of each dataset is in the training split of another
    one, if that is more than MIN_OVERLAP. If reading all training splits would take long, print the
    command that does it."""
    tokens = sum(len(dataset.split('train')) for dataset in datasets)
    if tokens > VERIFIED_TOKENS:
        folders = ' '.join(quoted(dataset.folder) for dataset in datasets)
        print_line('the corpora were not compared, as they are large; to see how much validation '
                   'text of one is in the training split of another, run: '
                   f'{command_for("prepare")} inspect {folders}')
        return
    for dataset, other in permutations(datasets, 2):
        shares = compare_splits(dataset, other)
        if max(shares.values(), default=0) > MIN_OVERLAP:
            print_overlap(shares, dataset, other)
