"""A product with both weights of a gated linear unit, in one kernel, against float64: shapes that
no tile divides, one array or two, transposed weights, the products for the gradient."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops, pl
from pallas_mgpu.ops.gated_matmul import input_gradient, weight_gradient

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
SHAPES = [(1, 1, 1), (70, 72, 40), (300, 130, 200), (200, 64, 131), (9, 520, 264)]  # M, K, N
CHECKED = plgpu.InterpretParams(detect_races=True, on_race="raise")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gated_matmul(rng, shape, transposed, packed, dtype, interpret=CHECKED):
    m, k, n = shape
    x = rng.standard_normal((m, k)).astype(dtype)
    gate, up = (rng.standard_normal((2, k, n)) * k**-0.5).astype(dtype)
    activation = "silu" if packed else "gelu"
    products = x.astype(np.float64) @ np.concatenate([gate, up], 1).astype(np.float64)
    want = ACTIVATIONS[activation](products[:, :n]) * products[:, n:]
    weights = [np.concatenate([gate, up], 1)] if packed else [gate, up]
    if transposed:
        weights = [np.ascontiguousarray(w.T) for w in weights]
    options = {"transpose_b": transposed, "activation": activation, "interpret": interpret}
    got = ops.gated_matmul(x, *weights, **options)
    unit = 3e-3 if dtype == np.float16 else 2e-2
    assert got.dtype == dtype and got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=unit, atol=unit)
    got, both = ops.gated_matmul(x, *weights, return_products=True, **options)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=unit, atol=unit)
    np.testing.assert_allclose(both.astype(np.float64), products, rtol=unit, atol=unit)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 512, 776)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu(rng, shape, packed):
    for transposed in (False, True):
        test_gated_matmul(rng, shape, transposed, packed, ml_dtypes.bfloat16, interpret=None)


CONFIGS = {
    "default": None,
    "divided": ops.MatmulConfig(2, 128, cluster=1, split=2),
    "shared": ops.MatmulConfig(2, 128, cluster=2, shares=2),
    "wide steps": ops.MatmulConfig(1, 64, cluster=1, cluster_n=2, step=128),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(1, 8, 64), (70, 40, 72), (300, 200, 136)], ids=str)
def test_gradients_of_two_weights(rng, shape, config, interpret=CHECKED):
    """The sum over both weights, of whose columns the last step has few."""
    m, k, n = shape
    grad = rng.standard_normal((m, 2 * n)).astype(ml_dtypes.bfloat16)
    weights = [(rng.standard_normal((k, n)) * 0.1).astype(ml_dtypes.bfloat16) for _ in range(2)]
    want = grad.astype(np.float64) @ np.concatenate(weights, 1).astype(np.float64).T
    for transposed in (False, True):
        given = [np.ascontiguousarray(w.T) for w in weights] if transposed else weights
        options = {"transpose_b": transposed, "config": config, "interpret": interpret}
        got = input_gradient(grad, *given, **options)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-2, atol=2e-2)
        x = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
        of_weights = x.astype(np.float64).T @ grad.astype(np.float64)
        for up in (False, True):
            got = weight_gradient(*((grad, x) if transposed else (x, grad)), up=up, **options)
            got = got.T if transposed else got
            of_one = of_weights[:, n * up : n * (up + 1)]
            np.testing.assert_allclose(got.astype(np.float64), of_one, rtol=2e-2, atol=0.1)
    with pytest.raises(NotImplementedError, match="join them"):
        input_gradient(grad[:, : 2 * n - 2].copy(), *(w[:, :-1].copy() for w in weights))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradients_of_two_weights_on_a_gpu(rng, config):
    test_gradients_of_two_weights(rng, (1000, 520, 776), config, interpret=None)


@pytest.mark.parametrize("cluster, cluster_n", [(2, 1), (1, 2)])
@pytest.mark.parametrize("tile_n", [128, 256])
def test_clusters(rng, cluster, cluster_n, tile_n):
    """Blocks share tiles of x or of the weights; each does several tiles."""
    x, w = rng.standard_normal((600, 136)), rng.standard_normal((136, 2 * 320)) * 0.1
    x, w = x.astype(np.float16), w.astype(np.float16)
    config = ops.MatmulConfig(2, tile_n, cluster=cluster, cluster_n=cluster_n)
    got = ops.gated_matmul(x, w, config=config, interpret=CHECKED)
    products = x.astype(np.float64) @ w.astype(np.float64)
    want = ACTIVATIONS["silu"](products[:, :320]) * products[:, 320:]
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("products", [False, True])
def test_resources(products):
    S = plgpu.ShapeDtypeStruct
    x, w = S((8192, 4096), ml_dtypes.bfloat16), S((4096, 28672), ml_dtypes.bfloat16)
    kernel = ops.gated_matmul.kernel(x, w, return_products=products)
    used = kernel.lower(x, w, target="sm_90a").resources()
    assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda x: ops.gated_matmul(x, x, activation="tan"), ValueError),
        (lambda x: ops.gated_matmul(x, x[:4]), ValueError),
        (lambda x: ops.gated_matmul(x, x[:, :5].copy()), ValueError),
        (lambda x: ops.gated_matmul(x, x, x[:, :4].copy()), ValueError),
        (lambda x: ops.gated_matmul(x, x.astype(np.float32)), TypeError),
        (lambda x: ops.gated_matmul(x, x, config=ops.MatmulConfig(2, 64)), ValueError),
    ],
)
def test_errors(call, error):
    with pytest.raises(error, match="gated_matmul"):
        call(np.ones((8, 8), np.float16))


# ---- gradients -----------------------------------------------------------------------------------

SLOPES = {
    "silu": lambda s, x: s * (1 + x * (1 - s)),
    "sigmoid": lambda s, x: s * (1 - s),
}


@pytest.mark.parametrize("config", [None, ops.GatedBackwardConfig()], ids=["apart", "beside"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_backward(rng, config, transposed, dtype, interpret=CHECKED):
    m, n, k = (int(rng.integers(1, most)) for most in (400, 200, 200))
    if config is not None:
        n, k = pl.cdiv(n, 64) * 64, pl.cdiv(k, 8) * 8
    activation = rng.choice(list(SLOPES))
    grad, both = (rng.standard_normal((m, width)).astype(dtype) for width in (n, 2 * n))
    w = (rng.standard_normal((2 * n, k) if transposed else (k, 2 * n)) * n**-0.5).astype(dtype)
    how = {"activation": activation, "transpose_b": transposed, "config": config}
    dx, g = ops.gated_matmul_backward(grad, both, w, interpret=interpret, **how)
    d, gate, up = (v.astype(np.float64) for v in (grad, both[:, :n], both[:, n:]))
    s = 1 / (1 + np.exp(-gate))
    value = s if activation == "sigmoid" else gate * s
    want = np.concatenate([d * up * SLOPES[activation](s, gate), d * value], 1)
    unit = 3e-3 if dtype == np.float16 else 2e-2
    assert g.dtype == dx.dtype == dtype
    np.testing.assert_allclose(g.astype(np.float64), want, rtol=unit, atol=unit)
    want = g.astype(np.float64) @ (w if transposed else w.T).astype(np.float64)
    np.testing.assert_allclose(dx.astype(np.float64), want, rtol=unit, atol=unit)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 64, 72), (4097, 512, 1032), (8192, 2048, 4096)], ids=str)
def test_backward_on_a_gpu(rng, shape):
    """Both ways agree, call after call."""
    m, n, k = shape
    grad, both, w = (
        plgpu.device_put((rng.standard_normal(s) * 0.1).astype(ml_dtypes.bfloat16))
        for s in ((m, n), (m, 2 * n), (k, 2 * n))
    )
    g = ops.gated_linear_unit_backward(grad, both)
    dx = ops.matmul(g, w, transpose_b=True).numpy().astype(np.float32)
    for _ in range(5):
        config = ops.GatedBackwardConfig()
        found, of_products = ops.gated_matmul_backward(grad, both, w, config=config)
        np.testing.assert_array_equal(of_products.numpy(), g.numpy())
        np.testing.assert_allclose(found.numpy().astype(np.float32), dx, rtol=1e-2, atol=1e-2)


def test_backward_of_large_products():
    """One kernel, without spills; two where it would have too little to do."""
    S = plgpu.ShapeDtypeStruct
    shapes = (8192, 14336), (8192, 28672), (4096, 28672)
    arrays = [S(s, ml_dtypes.bfloat16) for s in shapes]
    used = ops.gated_matmul_backward.kernel(*arrays).lower(*arrays, target="sm_90a").resources()
    assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used
    for m, n in ((100, 14336), (8192, 14335)):
        arrays = [S(s, ml_dtypes.bfloat16) for s in ((m, n), (m, 2 * n), (4096, 2 * n))]
        with pytest.raises(NotImplementedError, match="several kernels"):
            ops.gated_matmul_backward.kernel(*arrays).lower(*arrays)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"grad": np.zeros((8, 65), np.float16)}, ValueError, "products must have the shape"),
        ({"w": np.zeros((40, 64), np.float16)}, ValueError, "w must have 128 columns"),
        ({"w": np.zeros((40, 128), np.float32)}, TypeError, "w is float32"),
        ({"activation": "tan"}, ValueError, "activation must be"),
        ({"config": ops.MatmulConfig()}, TypeError, "must be a GatedBackwardConfig"),
        (
            {"config": ops.GatedBackwardConfig(ops.MatmulConfig(1))},
            ValueError,
            "has 2 consumers",
        ),
        ({"config": ops.GatedBackwardConfig(height=48)}, ValueError, "a height of 32"),
    ],
)
def test_backward_errors(change, error, match):
    shapes = {"grad": (8, 64), "products": (8, 128), "w": (40, 128)}
    given = {name: np.zeros(s, np.float16) for name, s in shapes.items()} | change
    arrays = [given.pop(name) for name in shapes]
    with pytest.raises(error, match=match):
        ops.gated_matmul_backward(*arrays, **given)
