"""The loss is GPT.loss, in chunks or not; what is edited there is what trains."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from plaingpt.core.loss import chunk_size, loss_in_chunks, use_chunked_loss

SMALL = GPTConfig(block_size=16, vocab_size=250, n_layer=1, n_head=2, n_embd=16)


def label_smoothing(self, logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1,
                           reduction='sum', label_smoothing=0.2)


def z_loss(self, logits, targets):
    squares = logits.logsumexp(dim=-1).square() * (targets != -1)
    return as_written(self, logits, targets) + 0.1 * squares.sum()


def soft_cap(self, x):
    return 2 * torch.tanh(logits_as_written(self, x) / 2)


def scaled(self, x):
    return logits_as_written(self, x) * 2 * self.transformer.ln_f.weight.mean()  # another parameter


as_written, logits_as_written = GPT.loss, GPT.logits
EDITS = {'none': {}, 'label smoothing': {'loss': label_smoothing}, 'z-loss': {'loss': z_loss},
         'a cap on the logits': {'logits': soft_cap}, 'a scale': {'logits': scaled}}


def make():
    torch.manual_seed(0)
    model = GPT(SMALL)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        model.lm_head.weight[250:] = 100.0  # padding; if it counted, it would win or lose it all
    return model


def batch():
    idx = torch.randint(250, (4, 16), generator=torch.Generator().manual_seed(0))
    targets = idx.roll(-1, 1)
    targets[0, 3:9] = -1
    return idx, targets


def loss_and_gradients(model, call):
    loss = call(*batch())[1]
    return loss, *torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_of_the_loss_trains_in_chunks_as_without(edit, compiled, monkeypatch):
    unedited = make()(*batch())[1]
    for name, method in EDITS[edit].items():
        monkeypatch.setattr(GPT, name, method)
    model = make()
    plain = loss_and_gradients(model, model)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='aot_eager'))
    use_chunked_loss(model, compiled)
    model.loss_in_chunks = partial(model.loss_in_chunks, chunk=24)
    call = torch.compile(model) if compiled else model
    torch.testing.assert_close(loss_and_gradients(model, call), plain)
    assert edit == 'none' or abs(plain[0] - unedited) > 0.01


def test_the_loss_is_the_mean_of_torchs_cross_entropy():
    model = make()
    idx, targets = batch()
    logits, loss = model(idx, targets)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1))


def test_the_loss_without_gradients_is_the_same():
    model = make()
    expected = model(*batch())[1]
    model.loss_in_chunks = partial(loss_in_chunks, chunk=24)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch())[1], expected.detach())


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is computed."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize('training', [True, False])
def test_no_more_logits_than_those_of_a_chunk_are_there_at_once(training):
    model = GPT(replace(SMALL, vocab_size=1024))
    model.loss_in_chunks = partial(loss_in_chunks, chunk=24)
    with LargestResult() as largest, torch.set_grad_enabled(training):
        model(*batch())
    assert largest.numbers == 24 * 1024


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_few_logits_are_computed_at_once_and_many_in_chunks(device):
    assert chunk_size(256, 65, device) == 256
    assert chunk_size(8192, 50257, device) < 8192


@pytest.mark.parametrize('chunked', [False, True])
def test_a_batch_without_targets_has_gradients_of_zero(chunked):
    model = make()
    if chunked:
        model.loss_in_chunks = partial(loss_in_chunks, chunk=24)
    loss = model(batch()[0], torch.full((4, 16), -1))[1]
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [*model.parameters()]))
