"""From logits to the next token: pure functions, a row of the batch each."""

import torch
import torch.nn.functional as F


def choose_next_token(logits, temperature=1.0, top_k=None, top_p=None, min_p=None, noise=None):
    """logits (B, V) → one token for each row, (B, 1).

    temperature: divides the logits; 0 takes the likeliest token
    top_k: choose among this many of the likeliest (Fan et al. 2018); None or 0 for all
    top_p: choose among the fewest whose probabilities reach this (Holtzman et al. 2019)
    min_p: choose among those at least this share as probable as the likeliest (Nguyen et al. 2024)
    noise: (B, 1) float64 from [0, 1), as of draw_noise
    """
    if temperature < torch.finfo(torch.float32).tiny:  # 0, or so low that float32 has it as 0
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    count = min(top_k or logits.size(-1), logits.size(-1))
    if count < logits.size(-1) or (top_p and top_p < 1):
        logits, ids = logits.topk(count)  # likeliest first
    # The largest becomes 0, so that no temperature, however low, makes it infinite.
    probs = F.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    if top_p and top_p < 1:
        reached_before = probs.cumsum(dim=-1) - probs >= top_p  # False for the first: one stays
        probs = probs.masked_fill(reached_before, 0)
    if min_p:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
    chosen = draw(probs, draw_noise(len(probs)) if noise is None else noise)
    return chosen if ids is None else ids.gather(1, chosen)


def draw(probs, noise):
    """probs (B, N), which need not sum to 1; noise (B, 1) → indices (B, 1): where the cumulative
    probability passes the noise's share of the whole."""
    dtype = torch.float32 if probs.device.type == 'mps' else torch.double  # mps has no float64
    cumulative = probs.cumsum(dim=-1, dtype=dtype)
    target = noise.to(probs.device, dtype) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp(max=probs.size(-1) - 1)


def draw_noise(n_rows, generators=None):
    """(n_rows, 1) float64 from [0, 1): each row's from its own generator, where they are given."""
    if generators is None:
        return torch.rand(n_rows, 1, dtype=torch.double)
    return torch.cat([torch.rand(1, 1, dtype=torch.double, generator=g) for g in generators])


def penalize(logits, seen, penalty):
    """Make tokens that are in the text already less likely (more, below 1): Keskar et al. 2019,
    section 4.1. logits (B, V), seen (B, V) bool."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
