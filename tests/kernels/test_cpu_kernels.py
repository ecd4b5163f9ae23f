import pytest
import torch
import torch.nn.functional as F

from plaingpt import kernels
from plaingpt.kernels import attention, relu2, short_conv
from plaingpt.kernels.cpu_kernels import LONGEST, cpu_attention, faster_attention


def heads(B=2, H=9, T=200, D=32, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(B, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3)]


def assert_same_gradients(y, expected, inputs, grad):
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad),
                               torch.autograd.grad(expected, inputs, grad))


def test_attention_is_torchs():
    q, k, v = heads(dtype=torch.float32)
    ours, theirs = cpu_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs)
    assert_same_gradients(ours, theirs, (q, k, v), torch.randn_like(ours))


def test_training_in_bfloat16_takes_attention_from_torch_and_nothing_else_does(monkeypatch):
    q, k, v = heads()
    assert faster_attention(q) and not faster_attention(heads(T=LONGEST + 1)[0])
    assert not faster_attention(q.detach()) and not faster_attention(q.float())
    monkeypatch.setattr(kernels, 'cpu_attention', lambda *_: None)
    assert attention(q, k, v) is None
    assert attention(q, k, v, dropout=0.1).shape == q.shape  # torch's


def test_a_squared_relu_and_its_gradient_are_torchs():
    for dtype in (torch.double, torch.float32, torch.bfloat16):
        x = torch.randn(2, 7, 5, dtype=dtype, requires_grad=True)
        y, expected = relu2(x), F.relu(x).square()
        torch.testing.assert_close(y, expected)
        assert_same_gradients(y, expected, x, torch.randn_like(y))


def test_a_squared_relu_keeps_no_more_for_the_backward_pass_than_torchs():
    x, kept = torch.randn(2, 7, 5, requires_grad=True), []
    for function in (relu2, lambda x: F.relu(x).square()):
        tensors = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, found=tensors: found.setdefault(t.data_ptr(), t), lambda t: t):
            function(x)
        kept.append(sum(t.numel() for t in tensors.values()))
    assert kept[0] <= kept[1]


def test_a_short_convolution_is_torchs_depthwise_one():
    for T in (1, 2, 7):  # shorter than the window, and longer
        torch.manual_seed(0)
        x = torch.randn(2, T, 5, dtype=torch.double, requires_grad=True)
        weight = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
        theirs = F.conv1d(x.mT, weight.flip(0).T[:, None], padding=3, groups=5)[..., :T].mT
        torch.testing.assert_close(short_conv(x, weight), x + theirs)
        assert torch.autograd.gradcheck(short_conv, (x, weight))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_torch_compile_computes_what_each_kernel_does(dtype):
    def all_kernels(q, k, v, x, conv_weight):
        return attention(q, k, v).float().sum() + short_conv(relu2(x), conv_weight).square().sum()

    inputs = [*heads(T=20, dtype=dtype), *(torch.randn(*shape, requires_grad=True)
                                           for shape in ((2, 7, 5), (4, 5)))]
    compiled = torch.compile(all_kernels, backend='aot_eager', fullgraph=True)
    found = []
    for function in (all_kernels, compiled):
        y = function(*inputs)
        found.append((y, *torch.autograd.grad(y, inputs)))
    torch.testing.assert_close(found[1], found[0])
