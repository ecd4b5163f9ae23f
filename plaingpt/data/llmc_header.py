"""The header of token files that llm.c and modded-nanogpt write."""

import numpy as np

from plaingpt.system.errors import UserError

# https://github.com/karpathy/llm.c, dev/data/data_common.py: 256 int32, which begin with magic,
# version and number of tokens, then the tokens.
HEADER_BYTES = 1024
GPT2_MAGIC = 20240520
LLAMA3_MAGIC = 20240801


def header_bytes(path, head, size):
    """The first 12 bytes and the size of a file → HEADER_BYTES where it is llm.c's shard of GPT-2
    tokens, 0 where it has no header. Raises UserError for another header of llm.c."""
    magic, version, count = np.frombuffer(head, '<i4').tolist() if len(head) == 12 else (0, 0, 0)
    if magic not in (GPT2_MAGIC, LLAMA3_MAGIC):
        return 0
    if (magic, version, size) != (GPT2_MAGIC, 1, HEADER_BYTES + 2 * count):
        raise UserError(f'{path} has a header of llm.c, but is no whole shard of GPT-2 tokens: '
                        'copy it again, or prepare the text')
    return HEADER_BYTES
