"""A stand-in of GPT-2's vocabulary, which tiktoken would download: all bytes, then pairs of bytes,
as many tokens as GPT-2 has, and its pattern.

The tests, and the processes that they start, have tests/stand_in on their path before tiktoken's
own module of this name.
"""

from itertools import islice, product

from plaingpt.data.tokenizers import GPT2_PATTERN, TIKTOKEN_PATTERNS, GPT2Tokenizer


def gpt2():
    tokens = [*product(range(256)), *islice(product(range(256), repeat=2), 50_000)]
    return {'name': 'gpt2', 'pat_str': TIKTOKEN_PATTERNS[GPT2_PATTERN],
            'mergeable_ranks': {bytes(token): i for i, token in enumerate(tokens)},
            'special_tokens': {'<|endoftext|>': GPT2Tokenizer.end_of_text}}


ENCODING_CONSTRUCTORS = {'gpt2': gpt2}
