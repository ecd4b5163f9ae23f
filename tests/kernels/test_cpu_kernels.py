import pytest
import torch
import torch.nn.functional as F

from plaingpt.kernels import cpu_kernels as cpu


def heads(B=2, H=9, T=300, D=32, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(B, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3)]


def assert_same_gradients(y, expected, inputs, grad):
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad),
                               torch.autograd.grad(expected, inputs, grad))


def test_attention_is_torchs():
    q, k, v = heads(dtype=torch.float32)
    ours, theirs = cpu.attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs)
    assert_same_gradients(ours, theirs, (q, k, v), torch.randn_like(ours))


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    """y is linear in v: its gradient must be the very weights that y was made with."""
    q, k, _ = heads(B=1, H=20, T=8)
    v = torch.eye(8, 32, dtype=torch.bfloat16).expand(1, 20, 8, 32).clone().requires_grad_()
    y = cpu.attention(q, k, v, dropout=0.5)  # in its first 8 channels the weights themselves
    for row in range(8):
        grad = torch.zeros_like(y)
        grad[..., row, :] = 1
        dv, = torch.autograd.grad(y, v, grad, retain_graph=True)
        torch.testing.assert_close(dv[..., 0], y[..., row, :8], rtol=0.02, atol=0.02)
    assert 0.4 < (y == 0).float()[..., 7, :8].mean() < 0.6


def test_attention_with_dropout_has_the_gradients_of_the_weights_it_kept():
    for T in (5, 300):  # in one block of rows, and in several
        q, k, v = heads(B=1, H=3, T=T, D=T, dtype=torch.float32)
        torch.manual_seed(1)
        y = cpu.attention(q, k, v, dropout=0.3)
        torch.manual_seed(1)  # y is linear in v: of the unit matrix the weights are left
        kept = cpu.attention(q, k, torch.eye(T).expand(1, 3, T, T), dropout=0.3) != 0
        future = torch.full((T, T), float('-inf')).triu(1)
        weights = torch.softmax(q @ k.mT * T ** -0.5 + future, dim=-1)
        plain = (weights * kept / 0.7) @ v
        torch.testing.assert_close(y, plain)
        assert_same_gradients(y, plain, (q, k, v), torch.randn_like(y))
    assert kept.sum() / (3 * T * (T + 1) / 2) == pytest.approx(0.7, abs=0.01)


def test_dropout_takes_attention_in_float32_from_torch_and_nothing_else_does():
    q, _, _ = heads(dtype=torch.float32)
    assert cpu.faster_than_torch(q, 0.1)
    assert not cpu.faster_than_torch(q, 0.0)  # torch's flash attention
    assert not cpu.faster_than_torch(q.detach(), 0.1)
    assert not cpu.faster_than_torch(q.double(), 0.1)


def test_attention_follows_the_runs_random_numbers():
    q, k, v = heads()
    torch.manual_seed(1)
    first = cpu.attention(q, k, v, 0.5), cpu.attention(q, k, v, 0.5)
    torch.manual_seed(1)
    assert torch.equal(cpu.attention(q, k, v, 0.5), first[0])
    assert not torch.equal(*first)


def test_dropout_drops_its_share_and_keeps_the_mean():
    for p in (0.01, 0.2, 0.9):
        x = torch.ones(1000, 1001, dtype=torch.bfloat16, requires_grad=True)
        y = cpu.Dropout(p)(x)
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.002)
        assert y.float().mean().item() == pytest.approx(1, rel=0.02)
        y.sum().backward()
        assert torch.equal(x.grad, y)  # the same numbers, the same scale


def test_dropout_rests_in_evaluation():
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    assert torch.equal(cpu.Dropout(0.5).eval()(x), x)


LAYERS = {'relu2': (cpu.relu2, lambda x: F.relu(x).square(), ()),
          'rms_norm': (lambda x, w: cpu.rms_norm(x, w, 1e-5),
                       lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), ((5,),))}


@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_and_its_gradients_are_torchs(name):
    ours, theirs, weights = LAYERS[name]
    for dtype in (torch.double, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True)
                  for shape in ((2, 7, 5), *weights)]
        y, expected = ours(*inputs), theirs(*inputs)
        torch.testing.assert_close(y, expected)
        assert_same_gradients(y, expected, inputs, torch.randn_like(y))


@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_keeps_no_more_for_the_backward_pass_than_torchs(name):
    ours, theirs, weights = LAYERS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2, 7, 5), *weights)]
    kept = []
    for function in (ours, theirs):
        tensors = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, found=tensors: found.setdefault(t.data_ptr(), t), lambda t: t):
            function(*inputs)
        kept.append(sum(t.numel() for t in tensors.values()))
    assert kept[0] <= kept[1]


def test_a_short_convolution_is_torchs_depthwise_one():
    for T in (1, 2, 7):  # shorter than the window, and longer
        torch.manual_seed(0)
        x = torch.randn(2, T, 5, dtype=torch.double, requires_grad=True)
        weight = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
        theirs = F.conv1d(x.mT, weight.flip(0).T[:, None], padding=3, groups=5)[..., :T].mT
        torch.testing.assert_close(cpu.short_conv(x, weight), x + theirs)
        assert torch.autograd.gradcheck(cpu.short_conv, (x, weight))


def test_torch_compile_computes_what_each_kernel_does():
    def all_kernels(q, k, v, x, conv_weight, weight):
        y = cpu.attention(q, k, v, 0.5).flatten()
        x = cpu.short_conv(cpu.relu2(x), conv_weight)
        return y.float().sum() + cpu.rms_norm(x, weight, 1e-5).square().sum()

    inputs = [*heads(T=20), *(torch.randn(*shape, requires_grad=True)
                              for shape in ((2, 7, 5), (4, 5), (5,)))]
    compiled = torch.compile(all_kernels, backend='aot_eager', fullgraph=True)
    found = []
    for function in (all_kernels, compiled):
        torch.manual_seed(0)  # of dropout
        y = function(*inputs)
        found.append((y, *torch.autograd.grad(y, inputs)))
    torch.testing.assert_close(found[1], found[0])
