"""Attention and positions that stay within a document.

A sequence is cut from a stream of tokens in which a token of its own, the end of text, opens each
document. Without this, a token also sees the end of the documents before its own.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn


def document_starts(idx, opener, columns):
    """idx (B, T), columns (T,) of its tokens → (B, T): the column where the document of each token
    begins, 0 for one that began earlier."""
    return torch.where(idx == opener, columns, 0).cummax(dim=1).values


class Documents:
    """The documents of whole sequences, in the place of a cache of earlier tokens (KVCache of
    plaingpt/inference/generation.py), of which there are none.

    positions  (B, T): of each token in its document; ages, by another name of KVCache
    mask       (B, 1, T, T): True where a token attends
    ends       (N + 1,) int32: where documents begin in the flattened batch, as varlen_attn takes
               them; those that there are not are empty ones at its end
    """

    def __init__(self, idx, opener, n_layer):
        self.layers = [self] * n_layer  # all see the same
        self.columns = torch.arange(idx.size(1), device=idx.device)  # (T,)
        starts = document_starts(idx, opener, self.columns)  # (B, T)
        self.positions = self.ages = self.columns - starts
        seen = (self.columns <= self.columns[:, None]) & (self.columns >= starts[..., None])
        self.mask = seen[:, None]  # (B, 1, T, T)
        self.ends = document_ends(self.positions) if has_varlen(idx.device) else None

    def extend(self, k, v):
        return k, v, self.mask

    def with_earlier(self, x, n):
        return x

    def attention(self, q, k, v, dropout):
        """q, k, v (B, H, T, D) → (B, H, T, D)."""
        if self.ends is None or dropout or q.dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=dropout)
        B, H, T, D = q.shape
        q, k, v = (t.transpose(1, 2).reshape(B * T, H, D) for t in (q, k, v))
        y = varlen_attn(q, k, v, self.ends, self.ends, T, T, window_size=(-1, 0))  # causal
        return y.view(B, T, H, D).transpose(1, 2)


def has_varlen(device):
    """True where torch has a kernel for documents of different lengths (for 2 bytes a number)."""
    return device.type == 'cuda' and torch.version.cuda is not None \
        and torch.cuda.get_device_properties(device).major >= 8


def document_ends(positions):
    """positions (B, T) of tokens in their documents → Documents.ends. Its size is fixed, so that
    the host waits for nothing. The kernel starts blocks of threads for empty documents too, so N
    is not all that could be; more of them end the run."""
    B, T = positions.shape
    N = B * max(32, T // 16)
    number = (positions == 0).flatten().cumsum(0)  # (B·T,): 1, …, 1, 2, …
    ends = torch.searchsorted(number, torch.arange(1, N + 2, device=positions.device),
                              out_int32=True)
    torch._assert_async(ends[-1] == B * T, f'document_attention: a batch of {B} sequences of {T} '
                                           f'tokens has more than {N} documents')
    return ends
