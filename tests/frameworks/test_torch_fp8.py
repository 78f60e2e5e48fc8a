"""Training with products of 8-bit floats, beside products in float64."""

import pytest

torch = pytest.importorskip("torch")
pt = pytest.importorskip("pallas_mgpu.torch")
pytestmark = pytest.mark.usefixtures("on_interpreter")


def drawn(rows, k, n, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, w = torch.randn(rows, k), torch.randn(n, k)
    x[:, ::7] *= 20
    return x.to(dtype), w.to(dtype), (torch.randn(rows, n) * 1e-3).to(dtype)


def exact(x, w, g):
    x, w = (v.double().requires_grad_() for v in (x, w))
    y = x @ w.T
    return [y.detach(), *torch.autograd.grad(y, (x, w), g.double())]


def error(got, want):
    return float((got.detach().double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, k, n", [(70, 200, 90), (1, 128, 16), (130, 72, 300)])
def test_blocks(rows, k, n, dtype):
    """Results and the gradient of x are those of 8-bit floats, that of the weight of 16 bits."""
    x, w, g = drawn(rows, k, n, dtype)
    want = exact(x, w, g)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = pt.fp8_matmul(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert error(y, want[0]) < 0.06 and error(dx, want[1]) < 0.06 and error(dw, want[2]) < 0.01


def test_delayed():
    """The gradient of the scales are the largest magnitudes; with scales that fit, errors are those
    of 8-bit floats."""
    x, w, g = drawn(60, 140, 40)
    want = exact(x, w, g)
    most = [float(v.abs().max()) for v in (x, w, g)]
    limits = torch.tensor([448.0, 448.0, 57344.0])
    scales = (torch.tensor(most) / limits).requires_grad_()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = pt.fp8_matmul(x.view(3, 20, 140), w, scales)
    assert y.shape == (3, 20, 40)
    dx, dw, seen = torch.autograd.grad(y, (x, w, scales), g.view(3, 20, 40))
    assert seen.tolist() == pytest.approx(most)
    for got, exactly in zip((y.view(60, 40), dx, dw), want):
        assert error(got, exactly) < 0.1


def test_frozen_weights_and_second_derivatives():
    x, w, g = drawn(20, 64, 48)
    x = x.requires_grad_()
    for scales in (None, torch.full((3,), 0.1)):
        y = pt.fp8_matmul(x, w, scales)
        (dx,) = torch.autograd.grad(y, x, g)
        assert error(dx, g.double() @ w.double()) < 0.2
        y = pt.fp8_matmul(x, w.clone().requires_grad_(), scales)
        with pytest.raises(NotImplementedError, match="fp8_"):
            torch.autograd.grad(y, x, g, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("recipe", ["blocks", "delayed"])
def test_linear_learns(recipe):
    """A layer beside one of 16 bits: the losses stay near each other."""
    torch.manual_seed(0)
    ours = pt.Fp8Linear(64, 32, dtype=torch.bfloat16, recipe=recipe, history=4)
    theirs = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    theirs.load_state_dict({k: ours.state_dict()[k] for k in ("weight", "bias")})
    x, target = torch.randn(96, 64).bfloat16(), torch.randn(96, 32)
    losses = []
    for layer in (ours, theirs):
        optimizer, of_layer = torch.optim.SGD(layer.parameters(), lr=2.0), []
        for _ in range(12):
            optimizer.zero_grad()
            loss = ((layer(x).float() - target) ** 2).mean()
            loss.backward()
            optimizer.step()
            of_layer.append(float(loss))
        losses.append(of_layer)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_delayed_scales_follow_the_largest_magnitudes():
    layer = pt.Fp8Linear(32, 16, bias=False, recipe="delayed", history=2).bfloat16()
    assert layer.scales.dtype == layer.history.dtype == torch.float32

    def step(factor, batches=1):
        for k in range(batches):
            x = torch.full((4, 32), float(factor * (k + 1)), dtype=torch.bfloat16)
            layer(x).sum().backward()
        return float(layer.scales[0])

    first = step(1)  # of its own x
    assert first == pytest.approx(1 / 448)
    assert step(8) == pytest.approx(1 / 448)  # one step late: saturates
    assert step(2) == pytest.approx(8 / 448)
    assert step(2) == pytest.approx(8 / 448)
    assert step(2, batches=2) == pytest.approx(2 / 448)
    assert step(2) == pytest.approx(4 / 448)
    layer.eval()
    before = layer.scales.clone()
    layer(torch.ones(4, 32, dtype=torch.bfloat16))
    assert torch.equal(layer.scales, before)
    again = pt.Fp8Linear(32, 16, bias=False, recipe="delayed", history=2).bfloat16()
    again.load_state_dict(layer.state_dict())
    again.train()
    again(torch.ones(4, 32, dtype=torch.bfloat16) * 100)
    assert torch.equal(again.scales, before)


def test_compiled():
    x, w, g = drawn(20, 64, 48)
    x, w = x.requires_grad_(), w.requires_grad_()
    f = torch.compile(pt.fp8_matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    for scales in (None, torch.full((3,), 0.1)):
        got = torch.autograd.grad(f(x, w, scales), (x, w), g)
        for a, b in zip(got, torch.autograd.grad(pt.fp8_matmul(x, w, scales), (x, w), g)):
            assert torch.equal(a, b)


def test_errors():
    with pytest.raises(ValueError, match="Fp8Linear: recipe"):
        pt.Fp8Linear(8, 8, recipe="rows")
    with pytest.raises(ValueError, match="Fp8Linear: history"):
        pt.Fp8Linear(8, 8, recipe="delayed", history=0)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="quantize_by_scale: scale"):
        pt.fp8_matmul(x, x, torch.ones(3, dtype=torch.bfloat16))
