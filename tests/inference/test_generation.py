import math
from itertools import pairwise

import pytest
import torch

from model import GPT, GPTConfig
from plaingpt.corpus.tokenizers import ByteTokenizer, CharTokenizer
from plaingpt.inference.generation import context_start, for_generation, generate, penalize, sample
from plaingpt.inference.text_generator import StreamDecoder

SMALL = dict(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)
KINDS = {
    'gpt2': {},
    'modern': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='swiglu', tied_head=False,
                   logit_softcap=15.0, bias=False),
    'rotary': dict(rotary=True, mlp='relu2'),
    'odd sequence': dict(block_size=7),
}
CPU = torch.device('cpu')


def make(kind, **more):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SMALL, **KINDS[kind], **more})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)  # so that the context matters to the choice
    return model


@pytest.fixture
def model():
    return make('gpt2')


def prompts_of(*lengths):
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(0, 65, (n,), generator=chance).tolist() for n in lengths]


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@torch.no_grad()
def plainly(model, prompt, n, temperature, generator, penalty=1.0):
    """The tokens that follow one prompt, by whole forward passes over the context: it grows to
    block_size and then loses its first half."""
    text, context = list(prompt), []
    for token in prompt:
        context = grown(context, token, model.config.block_size)
    new = []
    for _ in range(n):
        logits = model(torch.tensor([context]))[0][:, -1]
        if penalty != 1:
            seen = torch.tensor([[i in text for i in range(65)]])
            logits = penalize(logits, seen, penalty)
        noise = torch.rand(1, 1, dtype=torch.double, generator=generator)
        token = sample(logits, temperature, top_k=20, noise=noise).item()
        new.append(token)
        text.append(token)
        context = grown(context, token, model.config.block_size)
    return new


def grown(context, token, block_size):
    if len(context) == block_size:
        context = context[block_size // 2:]
    return [*context, token]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('temperature', [0, 1.0])
def test_cached_text_is_that_of_whole_forward_passes(kind, temperature):
    model = make(kind)
    prompts = prompts_of(1, 5, 16, 11, 40)  # ragged, at the edge of block_size, and past it
    expected = [plainly(model, prompt, 60, temperature, generator)
                for prompt, generator in zip(prompts, generators(1, 2, 3, 4, 5), strict=True)]
    for use_cache in (True, False):
        assert generate(model, prompts, 60, temperature=temperature, top_k=20,
                        generators=generators(1, 2, 3, 4, 5), use_cache=use_cache) == expected
    assert len({tuple(row) for row in expected}) == 5


@pytest.mark.parametrize('kind', KINDS)
def test_packed_weights_write_the_same(kind):
    model = make(kind)
    how = dict(temperature=1.0, top_k=20)
    plain = generate(model, prompts_of(3, 9), 40, generators=generators(1, 2), **how)
    with for_generation(model, CPU, 'float32'):
        assert generate(model, prompts_of(3, 9), 40, generators=generators(1, 2), **how) == plain


@pytest.mark.parametrize('kind', KINDS)
def test_a_compiled_step_writes_the_same_and_is_compiled_once(kind):
    model = make(kind)
    how = dict(temperature=1.0, top_k=20)
    torch._dynamo.reset()
    compiled = torch.compile(model.hidden, backend='eager', fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for prompts in (prompts_of(9), prompts_of(5)):
            plain = generate(model, prompts, 40, generators=generators(1), **how)
            assert generate(model, prompts, 40, generators=generators(1), compiled=compiled,
                            **how) == plain
    prompts = prompts_of(3, 9)
    assert generate(model, prompts, 40, generators=generators(1, 2), compiled=compiled, **how) \
        == generate(model, prompts, 40, generators=generators(1, 2), **how)


@pytest.mark.parametrize('kind', KINDS)
def test_half_precision_weights_give_nearly_the_same_logits(kind):
    exact, model = make(kind), make(kind)
    idx = torch.tensor(prompts_of(7))
    with torch.no_grad(), for_generation(model, CPU, 'bfloat16'):
        error = (model(idx)[0].float() - exact(idx)[0]).norm() / exact(idx)[0].norm()
    assert 0 < error < 0.03
    assert model.transformer.wte.weight.dtype == torch.float32


def test_a_window_moves_by_half_and_is_never_longer_than_block_size():
    for block_size in (1, 2, 7, 16):
        starts = [context_start(n, block_size) for n in range(1, 100)]
        lengths = [n - start for n, start in enumerate(starts, 1)]
        assert max(lengths) <= block_size and starts == sorted(starts)
        assert min(lengths[block_size:]) >= block_size // 2
        moves = sum(a != b for a, b in pairwise(starts))
        assert moves <= 99 / max(1, block_size // 2)


def test_a_token_costs_one_position_of_work(model, monkeypatch):
    widths = []
    hidden = model.hidden
    monkeypatch.setattr(model, 'hidden', lambda idx, cache=None: (
        widths.append(idx.size(1)), hidden(idx, cache))[1])
    generate(model, prompts_of(10), 20)
    assert widths == [10, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1]


def test_generate_of_the_model_appends(model):
    idx = torch.tensor(prompts_of(5, 5))
    out = model.generate(idx, 30, temperature=0)
    assert out.shape == (2, 35) and torch.equal(out[:, :5], idx)
    assert out[:, 5:].tolist() == generate(model, idx.tolist(), 30, temperature=0)


def test_the_end_of_text_ends_a_row_and_is_not_written(model):
    free = generate(model, prompts_of(4, 6), 30, temperature=0)
    end = free[0][9]
    stopped = generate(model, prompts_of(4, 6), 30, temperature=0, end_of_text=end)
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[:whole.index(end)] if end in whole else whole)
    out = model.generate(torch.tensor(prompts_of(4)), 30, temperature=0, end_of_text=end)
    assert out[0, 4:].tolist() == stopped[0]


def test_a_caller_hears_each_token_and_can_end_a_row(model):
    heard = [[], []]

    def on_token(row, token):
        heard[row].append(token)
        return row == 0 and len(heard[0]) == 3
    new = generate(model, prompts_of(4, 6), 10, on_token=on_token)
    assert new == heard and [len(row) for row in new] == [3, 10]


def test_the_same_seed_gives_the_same_text(model):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(generate(model, prompts_of(5), 40))
    assert texts[0] == texts[1] != texts[2]


# -----------------------------------------------------------------------------
# tokens → text


def written(tokenizer, ids, stop=()):
    """→ (pieces that were shown, how many tokens were taken, the whole text)."""
    pieces = []
    writer = StreamDecoder(tokenizer, stop, pieces.append)
    taken = next((n for n, token in enumerate(ids, 1) if writer.add(token)), len(ids))
    return pieces, taken, writer.finish()


def test_a_stream_never_breaks_a_character():
    text = 'naïve 日本 🎉!'
    pieces, _, whole = written(ByteTokenizer(), text.encode())
    assert ''.join(pieces) == whole == text and pieces == list(text)


@pytest.mark.parametrize('data', [b'a\xff\xe6b', b'\xe6\x97', b'\x80' * 9, 'é'.encode() * 3])
def test_a_stream_of_broken_characters_is_what_decoding_all_at_once_gives(data):
    pieces, _, whole = written(ByteTokenizer(), data)
    assert ''.join(pieces) == whole == ByteTokenizer().decode(data)


@pytest.mark.parametrize(('stop', 'expected', 'taken'), [
    (['END'], 'one ', 7), (['x', 'two'], 'one END ', 11), (['one'], '', 3), (['D t'], 'one EN', 9),
    (['zzz', 'two!'], 'one END two', 11), ([], 'one END two', 11)])
def test_a_stop_string_ends_the_text_before_it_and_never_shows(stop, expected, taken):
    tokenizer = CharTokenizer.train(['one END two'])
    pieces, n, whole = written(tokenizer, tokenizer.encode('one END two').tolist(), stop)
    assert ''.join(pieces) == whole == expected and n == taken


# -----------------------------------------------------------------------------
# the next token


def possible(logits, **how):
    """Which tokens `sample` can choose."""
    noise = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.double)[:, None]
    return set(sample(logits.expand(1000, -1), noise=noise, **how).flatten().tolist())


LOGITS = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()


def test_temperature_zero_takes_the_likeliest_and_near_zero_too():
    assert sample(LOGITS, 0).item() == 1
    for temperature in (1e-3, 1e-42):
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


@pytest.mark.parametrize('how', [{}, {'top_k': 3}])
def test_samples_follow_the_probabilities(how):
    torch.manual_seed(0)
    drawn = sample(torch.tensor([0.1, 0.2, 0.7]).log().expand(20000, 3), **how).flatten()
    shares = torch.bincount(drawn, minlength=3) / 20000
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.7]), atol=0.02)


def test_what_has_no_probability_is_never_chosen():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert possible(logits) == {1}


def test_the_repetition_penalty_lowers_what_was_there():
    logits = torch.tensor([[2.0, -1.0, 3.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0]]


def test_the_repetition_penalty_counts_prompt_and_new_text_of_each_row(model):
    prompts = prompts_of(3, 12)
    new = generate(model, prompts, 30, top_k=20, repetition_penalty=1.7,
                   generators=generators(1, 2))
    for i in range(2):
        assert new[i] == plainly(model, prompts[i], 30, 1.0, generators(1, 2)[i], penalty=1.7)
