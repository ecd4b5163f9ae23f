import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from plaingpt.training.loss import chunked_cross_entropy, fused_cross_entropy, summed_cross_entropy

V, PADDED = 250, 256  # little padding: it is computed along


def head_and_text():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, PADDED, bias=False)
    with torch.no_grad():
        head.weight[V:] = 100.0  # were the padding in play, it would win or lose it all
    x, targets = torch.randn(40, 16, requires_grad=True), torch.randint(V, (40,))
    targets[3:6] = -1
    return head, x, targets


def loss_and_gradients(compute, head, x, targets):
    nats = compute(x, head, targets)
    return nats, *torch.autograd.grad(nats, (x, *head.parameters()))


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def plain(x, head, targets):
    return F.cross_entropy(head(x)[:, :V], targets, ignore_index=-1)


def ours(x, head, targets):
    return chunked_cross_entropy(x, head.weight, V, targets, 16)


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_that_is_computed_along_counts_for_nothing(compiled):
    torch._dynamo.reset()
    compute = torch.compile(ours, backend='aot_eager', fullgraph=True) if compiled else ours
    head, x, targets = head_and_text()
    result = loss_and_gradients(compute, head, x, targets)
    torch.testing.assert_close(result, loss_and_gradients(plain, head, x, targets))
    assert (result[2][V:] == 0).all()


def test_the_loss_without_gradients_is_the_same():
    head, x, targets = head_and_text()
    with torch.no_grad():
        torch.testing.assert_close(ours(x, head, targets), plain(x, head, targets))


@pytest.mark.parametrize('training', [True, False])
def test_what_is_compiled_computes_the_same(training):
    logits, targets = torch.randn(40, PADDED), torch.randint(V, (40,))
    targets[3:6] = -1
    torch.testing.assert_close(
        fused_cross_entropy(logits.clone(), V, targets[:, None], training),
        summed_cross_entropy(logits.clone(), V, targets, training))


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is computed."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_more_logits_than_those_of_a_chunk_are_there_at_once():
    head, x, targets = head_and_text()
    with LargestResult() as largest:
        ours(x, head, targets)
    assert largest.numbers == 16 * PADDED


@pytest.mark.parametrize('loss_function', [None, chunked_cross_entropy])
def test_a_batch_without_targets_has_gradients_of_zero(loss_function):
    gpt = GPT(GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    gpt.loss_function = loss_function
    loss = gpt(torch.randint(V, (2, 8)), torch.full((2, 8), -1))[1]
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [*gpt.parameters()]))
