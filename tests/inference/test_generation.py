import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from model import GPT, GPTConfig
from plaingpt.inference import generation
from plaingpt.inference.generation import (
    CompiledStep,
    check_cache,
    generate,
    next_tokens,
    prepare_for_generation,
    sample_next_token,
)

SMALL = dict(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)
KINDS = {
    'gpt2': {},
    'modern': dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='swiglu', tied_head=False,
                   bias=False, conv=4),
    'odd length and convolution': dict(conv=3, block_size=7),
    'n-grams': dict(ngram_rows=99, ngram=3, conv=2, block_size=7),
    'value embeddings': dict(rotary=True, value_embeddings=True, tied_head=False, block_size=7),
}
CPU = torch.device('cpu')
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
def uncached(model, prompt, n, temperature, generator, penalty=1.0):
    """The tokens that follow one prompt, by whole forward passes over the context: it grows to
    block_size and then loses its first half."""
    text, context = list(prompt), []
    for token in prompt:
        context = grown(context, token, model.config.block_size)
    new = []
    for _ in range(n):
        logits = model(torch.tensor([context]))[0][:, -1]
        if penalty != 1:
            for i in set(text):
                logits[0, i] *= 1 / penalty if logits[0, i] > 0 else penalty
        uniform = torch.rand(1, 1, dtype=torch.double, generator=generator)
        token = sample_next_token(logits, uniform, temperature, top_k=20).item()
        new.append(token)
        text.append(token)
        context = grown(context, token, model.config.block_size)
    return new


def compiled_with(model, backend):
    torch._dynamo.reset()
    step = CompiledStep(model)
    step.compiled = torch.compile(next_tokens, backend=backend, fullgraph=True, dynamic=False)
    return step


def grown(context, token, block_size):
    if len(context) == block_size:
        context = context[block_size // 2:]
    return [*context, token]


@pytest.mark.parametrize('kind', KINDS)
def test_cached_text_is_that_of_whole_forward_passes(kind):
    model = make(kind)
    prompts = prompts_of(1, 5, 16, 40)  # ragged, at the edge of block_size, and past it
    expected = [uncached(model, prompt, 30, 1.0, generator)
                for prompt, generator in zip(prompts, generators(1, 2, 3, 4), strict=True)]
    assert generate(model, prompts, 30, top_k=20, generators=generators(1, 2, 3, 4)) == expected
    check_cache(model)


def test_a_text_of_a_model_of_documents_is_one_document():
    model = make('modern', document_attention=True, document_start=7)
    check_cache(model)
    prompt = [7, 1, 2, 3]
    [ours] = generate(model, [prompt], 9, temperature=0)
    assert 7 not in ours
    assert prompt + ours == model.generate(torch.tensor([prompt]), 9, temperature=0)[0].tolist()


@pytest.mark.parametrize('kind', ['gpt2', 'modern'])
def test_packed_weights_write_the_same(kind, monkeypatch):
    monkeypatch.setattr(generation, 'MIN_PACKED_WIDTH', 32)
    model = make(kind)
    sampling = dict(top_k=20, max_new_tokens=20)
    plain = generate(model, prompts_of(3, 9), generators=generators(1, 2), **sampling)
    with prepare_for_generation(model, CPU, 'float32'):
        packed = generate(model, prompts_of(3, 9), generators=generators(1, 2), **sampling)
    assert packed == plain


@pytest.mark.parametrize('kind', [
    kind if kind == 'modern' else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS])
def test_a_compiled_step_writes_the_same_without_compiling_again(kind):
    def backend(graph, _):
        kernels.append(_cur_sdpa_kernel_backends(with_priority=True))  # as each graph is made
        return graph

    model, kernels = make(kind, n_layer=1), []
    compiled = compiled_with(model, backend)

    def check(prompts):
        compared = [generate(model, prompts, 20, generators=generators(1, 2)[:len(prompts)],
                             top_k=20, compiled=step) for step in (None, compiled)]
        assert compared[0] == compared[1]

    with torch._dynamo.config.patch(error_on_recompile=True):
        check(prompts_of(9))
        check(prompts_of(5))
    check(prompts_of(3, 9))  # padded
    assert kernels
    assert all(each == KERNELS for each in kernels)


def test_half_precision_weights_give_nearly_the_same_logits():
    idx = torch.tensor(prompts_of(7))
    for kind in KINDS:
        model = make(kind)
        with torch.no_grad():
            exact = model(idx)[0]  # before: without bfloat16 hardware the context is autocast
            with prepare_for_generation(model, CPU, 'bfloat16'):
                error = (model(idx)[0].float() - exact).norm() / exact.norm()
        assert 0 < error < 0.03, kind
        assert model.transformer.wte.weight.dtype == torch.float32


def test_a_token_costs_one_position_of_work(model):
    widths = []
    model.transformer.h[0].register_forward_pre_hook(
        lambda block, inputs: widths.append(inputs[0].size(1)))
    generate(model, prompts_of(10), 20)
    assert widths == [10, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1]


def test_generate_of_the_model_appends_what_a_cache_gives_within_block_size(model):
    idx = torch.tensor(prompts_of(5, 5))
    remainder = model.config.block_size - 5
    out = model.generate(idx, 30, temperature=0)
    assert out.shape == (2, 35)
    assert torch.equal(out[:, :5], idx)
    assert out[:, 5:5 + remainder].tolist() == generate(model, idx.tolist(), remainder,
                                                        temperature=0)


def test_a_caller_hears_each_token_until_it_ends_the_row(model):
    heard = [[], []]

    def on_token(row, token):
        heard[row].append(token)
        return row == 0 and len(heard[0]) == 3
    new = generate(model, prompts_of(4, 6), 10, on_token=on_token)
    assert new == [heard[0][:2], heard[1]]
    assert [len(row) for row in heard] == [3, 10]


def test_the_repetition_penalty_counts_the_whole_text_of_each_row(model):
    prompts = prompts_of(3, 12)
    new = generate(model, prompts, 30, top_k=20, repetition_penalty=1.7,
                   generators=generators(1, 2))
    for i in range(2):
        assert new[i] == uncached(model, prompts[i], 30, 1.0, generators(1, 2)[i], penalty=1.7)


# -----------------------------------------------------------------------------
# from logits to the next token


def frequencies(logits, **options):
    """How often sample_next_token chooses each token, of logits (1, V) → (V,)"""
    uniform = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.double)[:, None]
    chosen = sample_next_token(logits.expand(1000, -1), uniform, **options)
    return torch.bincount(chosen.flatten(), minlength=logits.size(-1)) / 1000


@pytest.mark.parametrize(('options', 'expected'), [
    (dict(temperature=0), [1]), (dict(temperature=1e-3), [1]),
    (dict(top_k=2), [1, 3]), (dict(top_k=100), [0, 1, 2, 3]), (dict(top_k=0), [0, 1, 2, 3]),
    (dict(top_p=0.01), [1]), (dict(top_p=0.6), [1, 3]), (dict(top_p=0.8), [1, 2, 3]),
    (dict(top_k=2, top_p=0.99), [1, 3])])
def test_only_likely_tokens_are_chosen(options, expected):
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert frequencies(logits, **options).nonzero().flatten().tolist() == expected


def test_samples_follow_the_probabilities():
    wanted = torch.tensor([[0.1, 0.2, 0.7]])
    for options in ({}, {'top_k': 3}, {'top_p': 0.95}):
        assert torch.allclose(frequencies(wanted.log(), **options), wanted, atol=2e-3), options
