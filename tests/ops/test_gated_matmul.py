"""A product with both weights of a gated linear unit, in one kernel, against float64: shapes that
no tile divides, one array or two, transposed weights, the products for the gradient."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops
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
