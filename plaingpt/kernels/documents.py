"""Attention and positions that stay within a document.

A sequence is cut from a stream of tokens in which a token of its own, the end of text, opens each
document. Without this, a token also sees the end of the documents before its own.
"""

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """The documents in a batch of whole sequences."""

    positions: torch.Tensor  # (B, T): of each token in its document
    mask: torch.Tensor  # (B, 1, T, T): True where a token attends


def find_documents(idx, opener):
    """idx (B, T), the id of the token that opens a document → Documents."""
    columns = torch.arange(idx.size(1), device=idx.device)  # (T,)
    starts = document_starts(idx, opener, columns)  # (B, T)
    seen = (columns <= columns[:, None]) & (columns >= starts[..., None])  # (B, T, T)
    return Documents(columns - starts, seen[:, None])


def document_starts(idx, opener, columns):
    """idx (B, T), columns (T,) of its tokens → (B, T): the column where the document of each token
    begins, 0 for one that began earlier."""
    return torch.where(idx == opener, columns, 0).cummax(dim=1).values
