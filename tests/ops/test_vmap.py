"""Functions of ops under plgpu.vmap, with options and with some arguments shared: as one call for
each element."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _batch, _core, ops
from pallas_mgpu.ops import _open_rows

BATCH = 3
INT, F32 = np.int32, np.float32
HEADS = {"q": (1, 17, 2, 64), "k": (1, 20, 1, 64), "v": (1, 20, 1, 64)}


def call(name, **options):
    return lambda *arrays: getattr(ops, name)(*arrays, interpret=True, **options)


def by_name(name, given, **options):
    """The last arrays by name."""

    def f(*arrays):
        first, last = arrays[: len(arrays) - len(given)], arrays[len(arrays) - len(given) :]
        return getattr(ops, name)(*first, **dict(zip(given, last)), interpret=True, **options)

    return f


# The function, and the shape of each array, or a function of the random numbers that makes it.
CASES = {
    "attention": (call("attention", causal=True, return_lse=True), *HEADS.values()),
    "attention, lengths": (
        by_name("attention", ["kv_lengths"]),
        *HEADS.values(),
        lambda rng: rng.integers(1, 20, 1).astype(INT),
    ),
    "attention_backward": (
        call("attention_backward"),
        HEADS["q"],
        *HEADS.values(),
        HEADS["q"],
        lambda rng: rng.standard_normal((1, 2, 17)).astype(F32),
    ),
    "matmul": (call("matmul", activation="silu"), (40, 64), (64, 48)),
    "matmul, odd": (call("matmul"), (5, 7), (7, 9)),
    "matmul, batches": (call("matmul", transpose_b=True), (3, 9, 64), (2, 1, 48, 64)),
    "matmul, 8 bits": (
        by_name("matmul", ["scale_a", "scale_b"], transpose_b=True),
        lambda rng: rng.integers(-9, 9, (40, 64)).astype(np.int8),
        lambda rng: rng.integers(-9, 9, (48, 64)).astype(np.int8),
        lambda rng: rng.uniform(0.5, 1, 40).astype(F32) / 64,
        lambda rng: rng.uniform(0.5, 1, (1, 48)).astype(F32) / 64,
    ),
    "matmul, bias": (by_name("matmul", ["bias"]), (40, 64), (64, 48), (48,)),
    "rms_norm": (by_name("rms_norm", ["weight"]), (9, 300), (300,)),
    "layer_norm_backward": (call("layer_norm_backward", bias=True), (9, 512), (9, 512), (512,)),
    "rms_norm_backward, odd": (call("rms_norm_backward"), (3, 513), (3, 513)),
    "softmax": (call("softmax"), (9, 300)),
    "gated_matmul": (call("gated_matmul", return_products=True), (40, 64), (64, 64)),
    "gated_matmul_backward": (  # one result does not depend on the last argument
        call("gated_matmul_backward", config=ops.GatedBackwardConfig()),
        *((40, 64), (40, 128), (24, 128)),
    ),
    "activation_backward": (call("activation_backward", bias=True), (40, 64), (40, 64)),
    "rotary": (call("rotary"), (1, 20, 2, 64), (20, 32), (20, 32)),
    "cross_entropy": (
        call("cross_entropy"),
        (9, 300),
        lambda rng: rng.integers(0, 300, 9).astype(INT),
    ),
    "quantize": (call("quantize", block=128), (9, 300)),
    "ragged_dot": (
        call("ragged_dot"),
        (40, 64),
        (3, 64, 48),
        lambda rng: np.asarray([10, 20, 10], INT),
    ),
}


def array(rng, of):
    return of(rng) if callable(of) else rng.standard_normal(of).astype(np.float16)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [False, True], ids=["all", "one shared"])
def test_elements(rng, name, shared):
    """shared: all but the last array, which some pass by name, or the last one if it is alone."""
    f, *shapes = CASES[name]
    mapped = [not shared or k == len(shapes) - 1 for k in range(len(shapes))]
    axes = tuple(0 if m else None for m in mapped)
    arrays = [
        np.stack([array(rng, s) for _ in range(BATCH)]) if m else array(rng, s)
        for s, m in zip(shapes, mapped)
    ]
    got = plgpu.vmap(f, in_axes=axes)(*arrays)
    for b in range(BATCH):
        want = f(*(x[b] if m else x for x, m in zip(arrays, mapped)))
        for g, w in zip(got, want) if isinstance(got, tuple) else [(got, want)]:
            assert g.dtype == w.dtype
            np.testing.assert_allclose(
                g[b].astype(F32), w.astype(F32), rtol=1e-2, atol=1e-2, equal_nan=True
            )


def test_options_and_levels(rng):
    a, b = rng.standard_normal((2, 3, 2, 16, 16)).astype(np.float16)
    found = plgpu.vmap(plgpu.vmap(call("matmul")))(a, b)
    np.testing.assert_allclose(found, a @ b, atol=2e-2)
    x = rng.standard_normal((4, 3, 40)).astype(F32)
    found = plgpu.vmap(ops.softmax, in_axes=1)(x)
    np.testing.assert_allclose(
        found, np.stack([ops.softmax(y) for y in x.swapaxes(0, 1)]), atol=1e-6
    )


def test_results_that_all_elements_share(rng):
    softmax = call("softmax")
    x, y = (rng.standard_normal(s).astype(F32) for s in ((3, 5, 64), (7, 9)))
    found = plgpu.vmap(lambda x, y: (softmax(x), softmax(y), y), in_axes=(1, None))(x, y)
    for a, b in zip(found[1:], (softmax(y), y)):
        np.testing.assert_array_equal(a, np.stack([b] * 5))
    one = plgpu.vmap(lambda x: plgpu.vmap(lambda y: softmax(x))(y))(x)
    np.testing.assert_array_equal(one, np.stack([softmax(x)] * 7, 1))
    other = plgpu.vmap(lambda x: plgpu.vmap(lambda y: softmax(y))(y))(x)
    np.testing.assert_array_equal(other, np.stack([softmax(y)] * 3))


@pytest.mark.parametrize("shape", [(4,), (3, 5, 7), (2, 9001)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.bool_])
def test_copies_of_device_arrays(rng, shape, dtype, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    x = rng.integers(0, 2, shape[1:]).astype(dtype)
    found = _batch._repeating(shape, np.dtype(dtype))(x)
    np.testing.assert_array_equal(found, np.broadcast_to(x, shape))


LATER = {  # the arrays of an element for some size
    "attention": lambda rng, n: [array(rng, (1, n, 2, 64)) for _ in "qkv"],
    "attention_backward": lambda rng, n: [
        *(array(rng, (1, n, 2, 64)) for _ in "gqkvo"),
        np.full((1, 2, n), 9, F32),
    ],
    "matmul": lambda rng, n: [array(rng, (n, 64)), array(rng, (64, 48))],
    "rms_norm": lambda rng, n: [array(rng, (n, 64))],
    "cross_entropy": lambda rng, n: [array(rng, (n, 64)), rng.integers(0, 64, n).astype(INT)],
    "rotary": lambda rng, n: [array(rng, (1, n, 2, 64)), *(array(rng, (n, 32)) for _ in "cs")],
}


@pytest.mark.parametrize("name", LATER)
def test_sizes_share_programs(rng, monkeypatch, name):
    """The mapped axis is part of the batch, whose size is known at run time."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    f, calls = call(name), []
    axes = tuple(None if name == "rotary" and k else 0 for k in range(len(LATER[name](rng, 1))))
    for size, n in ((3, 20), (2, 33), (5, 9), (4, 21), (2, 7), (3, 38)):
        elements = [LATER[name](rng, n) for _ in range(size)]
        calls.append([x[0] if a is None else np.stack(x) for a, x in zip(axes, zip(*elements))])
    before = _core.plan_memory()["plans"]
    found = [plgpu.tree.leaves(plgpu.vmap(f, in_axes=axes)(*arrays)) for arrays in calls]
    assert _core.plan_memory()["plans"] - before <= 4
    for arrays, got in zip(calls, found):
        second = [x if axis is None else x[1] for x, axis in zip(arrays, axes)]
        for a, b in zip(got, plgpu.tree.leaves(f(*second))):
            a, b = a[1].astype(F32), b.astype(F32)
            np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())


def test_refused(rng):
    x = rng.standard_normal((3, 4, 40)).astype(F32)
    with pytest.raises(NotImplementedError, match="rms_norm: out= under vmap"):
        plgpu.vmap(lambda x: ops.rms_norm(x, out=x))(x)
    with pytest.raises(TypeError, match="must return arrays, .* got 3"):
        plgpu.vmap(lambda x: 3)(x)
    with pytest.raises(ValueError, match=r"vmap: the axes differ in size, \[3, 4\] .in_axes"):
        plgpu.vmap(lambda x, y: ops.rms_norm(x, interpret=True), in_axes=(0, 1))(x, x)
    with pytest.raises(ValueError, match="vmap: no argument is mapped"):
        plgpu.vmap(lambda x: x, in_axes=None)(x)
    with pytest.raises(TypeError, match="argument 1 is no array: 3"):
        plgpu.vmap(lambda x: ops.rms_norm(x, 3))(x)
    with pytest.raises(TypeError, match="weight must be an array or hashable, got a list"):
        ops.rms_norm(x, weight=[1.0])
