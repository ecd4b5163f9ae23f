import math

import torch

from plaingpt.inference.next_token import choose_next_token, penalize


def possible(logits, **options):
    """Which tokens choose_next_token can choose."""
    noise = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.double)[:, None]
    chosen = choose_next_token(logits.expand(1000, -1), noise=noise, **options)
    return set(chosen.flatten().tolist())


LOGITS = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()


def test_temperature_zero_takes_the_likeliest_and_near_zero_too():
    assert choose_next_token(LOGITS, 0).item() == 1
    for temperature in (1e-3, 1e-42, 1e-320):  # as float32 the last ones are tiny, and 0
        assert possible(LOGITS, temperature=temperature) == {1}


def test_top_k_keeps_the_k_likeliest():
    assert possible(LOGITS, top_k=2) == {1, 3}
    assert possible(LOGITS, top_k=100) == possible(LOGITS, top_k=0) == {0, 1, 2, 3}


def test_top_p_keeps_the_fewest_that_reach_p():
    for p, expected in [(0.4, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (0.01, {1})]:
        assert possible(LOGITS, top_p=p) == expected


def test_min_p_keeps_what_is_not_far_below_the_likeliest():
    assert possible(LOGITS, min_p=0.4) == {1, 3}
    assert possible(LOGITS, min_p=0.1) == {0, 1, 2, 3}


def test_the_limits_combine():
    assert possible(LOGITS, top_k=3, top_p=0.8, min_p=0.4) == {1, 3}


def test_samples_follow_the_probabilities():
    torch.manual_seed(0)
    wanted = torch.tensor([0.1, 0.2, 0.7])
    for options in ({}, {'top_k': 3}):
        chosen = choose_next_token(wanted.log().expand(20000, 3), **options)
        shares = torch.bincount(chosen.flatten(), minlength=3) / 20000
        assert torch.allclose(shares, wanted, atol=0.02), options


def test_what_has_no_probability_is_never_chosen():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert possible(logits) == {1}


def test_the_repetition_penalty_lowers_what_was_there():
    logits = torch.tensor([[2.0, -1.0, 3.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0]]
