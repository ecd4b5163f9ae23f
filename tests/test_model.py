import copy
import math
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from processes import PATIENCE_S, ROOT

from model import GPT, GPTConfig, NgramEmbedding, ShortConv
from plaingpt.core.blocks import apply_activation_checkpointing
from plaingpt.core.loss import loss_in_chunks

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


def tokens(*shape, vocab_size=65):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_a_token_sees_only_those_before_it(model):
    idx = tokens(1, 16)
    changed = idx.clone()
    changed[0, 10] = (idx[0, 10] + 1) % 65
    a, b = model(idx)[0], model(changed)[0]
    assert torch.equal(a[0, :10], b[0, :10])
    assert not torch.allclose(a[0, 10:], b[0, 10:])


def test_weights_start_as_in_gpt2():
    model = GPT(GPTConfig(block_size=64, vocab_size=512, n_layer=8, n_head=4, n_embd=256))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / math.sqrt(16) if name.endswith('c_proj.weight') else 0.02
            assert math.isclose(p.std().item(), expected, rel_tol=0.05), name
        else:
            assert (p == (1 if name.endswith('weight') else 0)).all(), name


def test_padding_of_the_vocabulary_does_not_count(model):
    idx = tokens(2, 16)
    logits, loss = model(idx, idx)
    assert model.lm_head.weight.shape[0] == 128
    assert logits.shape == (2, 16, 65)
    with torch.no_grad():
        model.lm_head.weight[65:] = 100.0  # were they in play, they would win or lose it all
    again, loss_again = model(idx, idx)
    assert torch.equal(again, logits)
    assert torch.equal(loss_again, loss)
    assert model.generate(idx, 50, temperature=5.0).max() < 65


def test_a_cropped_model_computes_what_it_did_on_shorter_text(model):
    idx = tokens(1, 8)
    before = model(idx)[0]
    model.crop_block_size(8)
    assert torch.equal(model(idx)[0], before)
    assert model.generate(idx, 4).shape == (1, 12)


def test_flops_per_token_are_palms_count():
    with torch.device('meta'):
        model = GPT(GPTConfig())
    weights = 124_439_808 - 1024 * 768
    assert model.flops_per_token() == 6 * weights + 12 * 12 * 768 * 1024


# -----------------------------------------------------------------------------
# the loss in chunks (test_loss.py has more), and activations computed again


def loss_and_gradient(model, call, dtype=torch.float32, idx=None):
    """One backward pass over text in which some targets are missing → (loss, one flat vector)."""
    torch.manual_seed(0)
    idx = tokens(6, 16) if idx is None else idx
    targets = idx.roll(-1, 1).clone()
    targets[0, :9] = -1
    model.zero_grad()
    with torch.autocast('cpu', dtype=dtype, enabled=dtype != torch.float32):
        _, loss = call(idx, targets)
    (loss / 3).backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_the_loss_in_chunks_is_as_exact_as_the_plain_one_in_half_precision(dtype):
    plain_error = chunked_error = 0
    for seed in range(8):  # rounding is luck: only the sum tells
        torch.manual_seed(seed)
        model = GPT(SMALL)
        _, exact = loss_and_gradient(model, model)
        plain_error += relative(loss_and_gradient(model, model, dtype)[1], exact)
        model.loss_in_chunks = partial(loss_in_chunks, chunk=32)
        chunked_error += relative(loss_and_gradient(model, model, dtype)[1], exact)
    assert 0 < chunked_error < 1.05 * plain_error


def test_float16_gradients_of_a_large_batch_do_not_vanish(model):
    idx = tokens(1024, 16)  # 1 / (B·T·V) is below what float16 can hold
    _, exact = loss_and_gradient(model, model, idx=idx)
    model.loss_in_chunks = partial(loss_in_chunks, chunk=4096)
    _, gradient = loss_and_gradient(model, lambda *batch: (None, model(*batch)[1] * 2**10),
                                    torch.float16, idx)
    assert relative(gradient / 2**10, exact) < 0.01


@pytest.mark.parametrize('mode', ['selective', 'full'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_activations_computed_again_change_nothing(mode, dtype):
    torch.manual_seed(0)
    model = GPT(replace(SMALL, dropout=0.2))
    checkpointed = copy.deepcopy(model)
    apply_activation_checkpointing(checkpointed, mode)
    loss, gradient = loss_and_gradient(model, model, dtype)
    again_loss, again = loss_and_gradient(checkpointed, checkpointed, dtype)
    assert torch.equal(loss, again_loss)
    assert torch.equal(gradient, again)


def saved_bytes(model, idx):
    """Bytes that autograd keeps for the backward pass, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = []

    def pack(tensor):
        saved.append(weakref.ref(tensor))  # a chunk's are freed with its graph
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(idx, idx)[1]
    kept = [tensor().untyped_storage() for tensor in saved if tensor() is not None]
    del loss
    sizes = {storage.data_ptr(): storage.nbytes() for storage in kept}
    return sum(size for start, size in sizes.items() if start not in parameters)


def test_the_loss_in_chunks_keeps_no_logits():
    model, idx = GPT(replace(SMALL, vocab_size=3000)), tokens(8, 16)
    plain = saved_bytes(model, idx)
    model.loss_in_chunks = partial(loss_in_chunks, chunk=32)
    # what goes: float32 (B·T, V); what comes: the gradients, (B·T, C) and (V, C)
    assert plain - saved_bytes(model, idx) == pytest.approx(
        4 * (128 * 3000 - 128 * 32 - 3000 * 32), rel=0.02)


# -----------------------------------------------------------------------------
# newer than GPT-2

FLAGS = [{'rotary': True}, {'rmsnorm': True}, {'qk_norm': True}, {'mlp': 'relu2'},
         {'mlp': 'swiglu'}, {'mlp': 'gelu_erf'}, {'tied_head': False}, {'conv': 3},
         {'value_embeddings': True}, {'ngram_rows': 64}, {'ngram_rows': 64, 'ngram': 3}]


@pytest.fixture(params=FLAGS, ids='-'.join)
def newer(request):
    """A model with a flag, far from where all models do nothing."""
    torch.manual_seed(0)
    return spread(GPT(replace(SMALL, **request.param)))


def spread(model):
    for name, p in model.named_parameters():
        torch.manual_seed(len(name))
        p.data.mul_(5).add_(torch.randn_like(p) * 0.1)
    return model.eval()


def test_a_flag_changes_the_model(newer):
    torch.manual_seed(0)
    plain, idx = spread(GPT(SMALL)), tokens(2, 16)
    assert not torch.allclose(newer(idx)[0], plain(idx)[0], atol=1e-3)


def test_a_flag_keeps_the_model_causal(newer):
    idx = tokens(2, 16)
    changed = idx.clone()
    changed[:, 10:] = idx[:, 10:].flip(0)
    torch.testing.assert_close(newer(changed)[0][:, :10], newer(idx)[0][:, :10])


def test_each_flag_trains_as_in_plain_float32():
    for flags in FLAGS:
        torch.manual_seed(0)
        model = GPT(replace(SMALL, **flags))
        for p in model.parameters():
            p.data.add_(torch.randn_like(p) * 0.02)
        exact_loss, exact = loss_and_gradient(model, model)
        _, rounded = loss_and_gradient(model, model, torch.bfloat16)
        assert relative(rounded, exact) < 0.05, flags
        model.loss_in_chunks = partial(loss_in_chunks, chunk=7)
        loss, chunked = loss_and_gradient(model, model)
        assert relative(loss, exact_loss) < 1e-6, flags
        assert relative(chunked, exact) < 1e-5, flags


@pytest.mark.parametrize(('zero_init', 'std'), [(True, 0), ('head', SMALL.n_embd**-0.5)])
def test_zero_init_begins_with_all_tokens_equally_likely(zero_init, std):
    model = GPT(replace(SMALL, zero_init=zero_init, tied_head=False))
    idx = torch.randint(0, 65, (2, 16))
    assert model(idx, idx)[1].item() == pytest.approx(math.log(65), abs=1e-5)
    for block in model.transformer.h:
        assert block.attn.c_proj.weight.std().item() == pytest.approx(std, rel=0.1)
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(std, rel=0.1)


def test_a_short_convolution_is_torchs_depthwise_one():
    for T in (1, 2, 7):  # shorter than the window, and longer
        conv = ShortConv(GPTConfig(n_embd=4, n_head=2, conv=4)).double()
        torch.nn.init.normal_(conv.weight)
        x = torch.randn(2, T, 4, dtype=torch.double)
        theirs = F.conv1d(x.mT, conv.weight.flip(0).T[:, None], padding=3, groups=4)[..., :T].mT
        torch.testing.assert_close(conv(x), x + theirs)


ALONE = '''
import torch
from model import GPT, GPTConfig
config = GPTConfig(block_size=16, vocab_size=10, n_layer=2, n_head=2, n_embd=32, rotary=True,
                   mlp='relu2', conv=3, rmsnorm=True, qk_norm=True)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
text = torch.arange(68).view(4, 17) % 10  # counts
for _ in range(60):
    _, loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.generate(text[:1, :4], 20, temperature=0)[0].tolist())
'''


@pytest.mark.slow
def test_the_file_works_without_any_other(tmp_path):
    shutil.copy(ROOT / 'model.py', tmp_path)
    (tmp_path / 'mine.py').write_text(ALONE)
    done = subprocess.run([sys.executable, 'mine.py'], cwd=tmp_path, text=True, capture_output=True,
                          env={**os.environ, 'PYTHONPATH': ''}, timeout=PATIENCE_S)
    assert done.stdout == f'{[i % 10 for i in range(24)]}\n', done.stderr


def test_hashes_spread_n_grams_evenly_over_the_rows():
    table = NgramEmbedding(replace(SMALL, vocab_size=2048, ngram_rows=1024, ngram=3))
    with torch.no_grad():
        table.weight[:, 0] = torch.arange(1024)
    counts = table(torch.randint(100, (64, 1024)))[..., 0].long().flatten().bincount(minlength=1024)
    assert counts.min() > 20 and counts.max() < 120  # of 65,536 n-grams, 64 for each row


@pytest.mark.parametrize('rows', [65**2, 1000, 500_001, 1_000_002])
def test_an_n_gram_depends_on_the_order_of_its_tokens(rows):
    table = NgramEmbedding(
        replace(SMALL, ngram_rows=rows, ngram=2 if rows == 65**2 else 4, n_embd=4))
    torch.manual_seed(0)
    torch.nn.init.normal_(table.weight)
    there, back, other = table(torch.tensor([[3, 5], [5, 3], [9, 5]]))[:, 1]
    assert not torch.allclose(there, back)
    assert not torch.allclose(there, other)
