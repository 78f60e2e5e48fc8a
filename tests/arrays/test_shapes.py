"""Moving, joining, indexing, scanning and multiplying register arrays, against NumPy: random data,
odd shapes, all layouts."""

import re

import ml_dtypes
import numpy as np
import pytest
import test_layouts

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp

f32, bf16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def data(rng, shape, dtype=np.float32):
    dtype = np.dtype(dtype)
    if dtype == bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -100, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def call(run, kernel, *xs):
    """Without NVRTC in way "interpret": one kernel of so many ops needs more registers than there
    are. test_one_at_a_time compiles them."""
    return kernel(*xs) if run.way == "interpret" else run.call(kernel, *xs)


def check_all(run, cases, *xs, rtol=0, layout=None):
    """Each case is f(jnp, *arrays): one kernel computes them all, NumPy says what they are."""
    wants = [np.asarray(f(np, *xs)) for f in cases]

    def body(*refs):
        values = [plgpu.load(r, layout=layout, optimized=False) for r in refs[: len(xs)]]
        for f, o in zip(cases, refs[len(xs) :]):
            o[...] = f(jnp, *values)

    wants = [w.astype(xs[0].dtype) if w.dtype == np.float64 else w for w in wants]
    wants = [w.astype(np.int32) if w.dtype == np.int64 else w for w in wants]
    got = call(run, run.kernel(body, tuple(wants)), *xs)
    for g, w in zip(got, wants):
        if rtol:
            np.testing.assert_allclose(g.astype(np.float32), w.astype(np.float32), rtol, rtol)
        else:
            np.testing.assert_array_equal(g, w)


def moves(lowered):
    """The ops of a lowered kernel that go through scratch."""
    text = lowered.as_text("cuda")
    return re.findall(r"// (\w+), through shared memory", text)


@pytest.mark.parametrize("dtype", [np.float32, bf16, np.int8, bool], ids=str)
def test_transposes(run, rng, dtype):
    """Through registers or scratch, of values that were computed."""
    xs = [data(rng, shape, dtype) for shape in ((64, 64), (7, 33), (128, 1), (1, 129), (100, 24))]
    cases = [lambda xp, *xs, k=k: xp.flip(xs[k]).T for k in range(5)]
    cases += [lambda xp, *xs: xp.concatenate([xs[1], xs[1]]).T, lambda xp, *xs: xs[4].T]
    check_all(run, cases, *xs)


def test_permutations_of_many_dims(run, rng):
    """transpose, swapaxes, moveaxis and matrix transposes of rank 3 to 5."""
    x, y = data(rng, (3, 5, 9)), data(rng, (2, 3, 1, 4, 5))
    cases = [
        lambda xp, x, y: xp.transpose(x, (1, 2, 0)),
        lambda xp, x, y: x.swapaxes(0, 2),
        lambda xp, x, y: xp.moveaxis(x, 0, -1),
        lambda xp, x, y: x.transpose(2, 0, 1),
        lambda xp, x, y: xp.transpose(y, (4, 2, 0, 1, 3)),
        lambda xp, x, y: xp.swapaxes(y, -1, -2),
        lambda xp, x, y: y.T,
    ]
    check_all(run, cases, x, y)


@pytest.mark.parametrize("shape", [(64, 64), (7, 33)], ids=str)
def test_joining_and_cutting(run, rng, shape):
    """concatenate, stack, split, repeat, tile of odd pieces."""
    x, y = data(rng, shape), data(rng, shape)
    n = shape[1]
    cases = [
        lambda xp, x, y: xp.concatenate([x, y * 2]),
        lambda xp, x, y: xp.concatenate([x + 1, y, x], axis=1),
        lambda xp, x, y: xp.concatenate([x, xp.ones((2, n), np.float32)], axis=0),
        lambda xp, x, y: xp.stack([x, y]),
        lambda xp, x, y: xp.stack([x + 1, y], -1),
        lambda xp, x, y: xp.vstack([x, y]),
        lambda xp, x, y: xp.hstack([x, y]),
        lambda xp, x, y: xp.split(x * 3, [1, 3])[1],
        lambda xp, x, y: xp.split(y + 2, [n - 1], axis=1)[0],
        lambda xp, x, y: xp.tile(x, (2, 3)),
        lambda xp, x, y: xp.repeat(x, 3, axis=1),
        lambda xp, x, y: xp.repeat(y, 2),
    ]
    check_all(run, cases, x, y)


LAYOUTS = ["WGMMA", "WGMMA_8BIT", "WGMMA_UPCAST_4X", "WGMMA_TRANSPOSED"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 5, 33), (2, 5, 3), (1, 9, 1), (1, 64, 17)], ids=str)
def test_joins_of_padded_parts(run, rng, layout, shape):
    """Registers of a part that no lane has an element in overwrite nothing of the others."""
    x, y, z = (data(rng, shape) for _ in range(3))
    given = getattr(plgpu.Layout, layout)

    def body(x_ref, y_ref, z_ref, o_ref):
        parts = [plgpu.load(r, layout=given, optimized=False) for r in (x_ref, y_ref, z_ref)]
        whole = jnp.concatenate([parts[0], parts[1] * 2, parts[2]])
        o_ref[...] = plgpu.layout_cast(whole, given) + 1

    want = np.concatenate([x, y * 2, z]) + 1
    kernel = run.kernel(body, want)
    found = moves(kernel.lower(x, y, z))
    assert "concat" not in found
    np.testing.assert_array_equal(run.call(kernel, x, y, z), want)


def test_pieces_of_wgmma_stay_in_registers(run, rng):
    """Tile-aligned slices and joins of WGMMA arrays move nothing between lanes."""
    x = data(rng, (64, 128))

    def body(x_ref, o_ref):
        x = plgpu.layout_cast(x_ref[...] * 2, plgpu.Layout.WGMMA)
        o_ref[...] = jnp.concatenate([x[:, 64:], x[:, :64]], 1)

    kernel = run.kernel(body, x)
    assert moves(kernel.lower(x)) == []
    want = np.concatenate([x[:, 64:], x[:, :64]], 1) * 2
    np.testing.assert_array_equal(run.call(kernel, x), want)


@pytest.mark.parametrize("layout", [None, plgpu.Layout.WGMMA], ids=["any", "wgmma"])
def test_static_indices(run, rng, layout):
    """Slices that begin anywhere, with any stride, and flips."""
    x = data(rng, (70, 41))
    cases = [
        lambda xp, x: (x * 2)[3:40, 5:11],
        lambda xp, x: (x * 2)[::2],
        lambda xp, x: (x + 1)[5:60:7, ::-3],
        lambda xp, x: x[::-1] * 2,
        lambda xp, x: (x + 3)[17],
        lambda xp, x: (x + 3)[:, 4],
        lambda xp, x: (x + 3)[-1, None, 2:5],
        lambda xp, x: xp.flip(x * 2),
        lambda xp, x: xp.flip(x * 2, 1),
        lambda xp, x: xp.roll(x + 1, 5),
        lambda xp, x: xp.roll(x + 1, (3, -50), (0, 1)),
        lambda xp, x: xp.pad(x * 2, ((1, 2), (0, 3))),
        lambda xp, x: xp.reshape(x * 2, (41, 70)),
        lambda xp, x: (x * 2).reshape(7, 41, 10),
        lambda xp, x: xp.ravel(x + 1),
    ]
    check_all(run, cases, x, layout=layout)


def test_traced_indices(run, rng):
    """Scalars and arrays of indices, traced; out of range ones are limited."""
    x, i = data(rng, (9, 20)), np.array([3, 0, -1, 8, 7], np.int32)
    s = np.array([2], np.int32)
    clip = np.clip
    cases = [
        lambda xp, x, i, s: (x * 2)[i],
        lambda xp, x, i, s: (x * 2)[:, i],
        lambda xp, x, i, s: (x * 2)[i, i + 1],
        lambda xp, x, i, s: (x * 2)[i[:, None], i + 5],
        lambda xp, x, i, s: (x * 2)[s[0]],
        lambda xp, x, i, s: (x * 2)[s[0], 3:7],
        lambda xp, x, i, s: (x * 2)[1:5, s[0]],
        lambda xp, x, i, s: xp.take(x * 2, i, axis=1),
        lambda xp, x, i, s: xp.take(x * 2, i * 3, mode="wrap"),
        lambda xp, x, i, s: xp.take_along_axis(x, xp.argsort(x, 1), 1),
        lambda xp, x, i, s: (x * 2)[clip(i + 4, -9, 8) if xp is np else i + 4],
    ]
    check_all(run, cases, x, i, s)


def test_dynamic_slices_and_updates(run, rng):
    """Starts are moved inside; updates change what they name only."""
    x, u, s = data(rng, (12, 10)), data(rng, (3, 4)), np.array([5, -3, 100], np.int32)
    a, b, c = (int(v) for v in s)

    def body(x_ref, u_ref, s_ref, o1, o2, o3, o4, o5, o6):
        x, u, s = x_ref[...] * 1, u_ref[...], [s_ref[k] for k in range(3)]
        o1[...] = lax.dynamic_slice(x, (s[0], s[1]), (4, 2))
        o2[...] = lax.dynamic_slice(x, (s[2], 1), (4, 2))
        o3[...] = lax.dynamic_update_slice(x, u, (s[0], s[2]))
        o4[...] = x.at[s[0], 2:6].set(u[0])
        o5[...] = x.at[1:4, ::3].add(u * 2)
        o6[...] = x.at[s[2]].set(0.0)

    outs = [x[:4, :2].copy(), x[:4, :2].copy(), x, x, x, x]
    got = run(body, tuple(outs), x, u, s)
    w3, w4, w5 = x.copy(), x.copy(), x.copy()
    w3[5:8, 6:10] = u
    w4[5, 2:6] = u[0]
    w5[1:4, ::3] += u * 2
    for g, w in zip(got, (x[5:9, 7:9], x[8:12, 1:3], w3, w4, w5, x)):
        np.testing.assert_array_equal(g, w)


REDUCED = [(64, 64), (3, 5, 9), (1, 129), (130, 2), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", REDUCED, ids=str)
def test_reductions_over_any_axes(run, rng, shape):
    """Every set of axes, with and without keepdims."""
    x = data(rng, shape)
    x = np.sign(x) * (0.9 + np.abs(x) / 10)
    sets = [None, 0, -1, (0, len(shape) - 1)]
    cases = []
    for a in sets:
        cases.append(lambda xp, x, a=a: xp.sum(x, axis=a, keepdims=True))
        cases.append(lambda xp, x, a=a: xp.max(x, axis=a))
        cases.append(lambda xp, x, a=a: xp.prod(x, axis=a))
        cases.append(lambda xp, x, a=a: xp.any(x > 1, axis=a).astype(np.int32))
    check_all(run, cases, x, rtol=2e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", [None, plgpu.Layout.WGMMA], ids=["any", "wgmma"])
@pytest.mark.parametrize("shape", [(7, 33), (1, 200)], ids=str)
def test_moments_and_places(run, rng, shape, layout):
    """var, std, mean, argmax, argmin, count_nonzero along each axis."""
    x = np.round(data(rng, shape) * 4) / 4  # with ties
    cases = [lambda xp, x: xp.argmax(x), lambda xp, x: xp.argmin(x)]
    for a in (0, 1, None):
        cases += [
            lambda xp, x, a=a: xp.var(x, axis=a, keepdims=True),
            lambda xp, x, a=a: xp.std(x, axis=a),
            lambda xp, x, a=a: xp.mean(x, axis=a),
            lambda xp, x, a=a: xp.argmax(x, axis=a),
            lambda xp, x, a=a: xp.argmin(x, axis=a, keepdims=True),
            lambda xp, x, a=a: xp.count_nonzero(x, axis=a),
        ]
    check_all(run, cases, x, rtol=1e-5, layout=layout)


def test_nan_wins_places(run):
    """The first NaN is both greatest and least."""
    x = np.array([[1, np.nan, 3, np.nan], [1, 2, 0, 2]], np.float32)
    cases = [lambda xp, x: xp.argmax(x, 1), lambda xp, x: xp.argmin(x, 1)]
    check_all(run, cases, x)


@pytest.mark.parametrize("shape", [(1,), (1000,), (5, 33), (3, 200, 2)], ids=str)
def test_scans(run, rng, shape):
    """cumsum, cumprod along each axis, flattened too; cummax, cummin."""
    x = data(rng, shape, np.int32)
    cases = [lambda xp, x: xp.cumsum(x)]
    for a in range(len(shape)):
        cases += [
            lambda xp, x, a=a: xp.cumsum(x * 3, axis=a),
            lambda xp, x, a=a: xp.cumprod(x % 2 * 2 + 1, axis=a),
            lambda xp, x, a=a: np.maximum.accumulate(x, a) if xp is np else lax.cummax(x, axis=a),
            lambda xp, x, a=a: (
                np.flip(np.minimum.accumulate(np.flip(x, a), a), a)
                if xp is np
                else lax.cummin(x, axis=a, reverse=True)
            ),
        ]
    wants = [np.asarray(f(np, x)).astype(np.int32) for f in cases]

    def body(x_ref, *outs):
        for f, o in zip(cases, outs):
            o[...] = f(jnp, x_ref[...])

    for g, w in zip(call(run, run.kernel(body, tuple(wants)), x), wants):
        np.testing.assert_array_equal(g, w)


def test_float_scans(run, rng):
    """f32 sums in another order, bf16 rounded once."""
    x, y = data(rng, (4, 300)), data(rng, (70, 6), bf16)

    def body(x_ref, y_ref, a_ref, b_ref):
        a_ref[...] = jnp.cumsum(x_ref[...], axis=1)
        b_ref[...] = jnp.cumsum(y_ref[...], axis=0)

    a, b = run(body, (x, y), x, y)
    np.testing.assert_allclose(a, np.cumsum(x, axis=1), rtol=1e-4, atol=1e-4)
    want = np.cumsum(y.astype(np.float32), axis=0)
    np.testing.assert_allclose(b.astype(np.float32), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(1,), (100,), (5, 16)], ids=str)
def test_sorts(run, rng, shape):
    """sort and stable argsort, with ties and NaN."""
    x = np.round(data(rng, shape) * 3)
    x.flat[0] = np.nan if x.size > 5 else 1
    cases = []
    for a in range(len(shape)):
        cases.append(lambda xp, x, a=a: xp.sort(x, axis=a))
        cases.append(
            lambda xp, x, a=a: (
                np.argsort(x, axis=a, kind="stable") if xp is np else jnp.argsort(x, axis=a)
            )
        )
    check_all(run, cases, x)


def test_transposes_beside_shared_memory(run, rng):
    """Stores of transposes and transposes of loads turn the ref: nothing goes through scratch."""
    x, y = data(rng, (48, 33)), data(rng, (3, 20, 8), np.int16)

    def body(x_ref, y_ref, o_ref, p_ref, x_smem, y_smem):
        x_smem[...] = x_ref[...].T
        y_smem[1:] = (y_ref[...] + 1).transpose(1, 2, 0)
        x_smem[2:4] = x_smem[2:4] * 2
        o_ref[...] = x_smem[...].T
        p_ref[...] = y_smem[1:].transpose(2, 0, 1) + y_smem[1:].transpose((2, 0, 1))

    scratch = [plgpu.SMEM((33, 48), jnp.float32), plgpu.SMEM((21, 8, 3), jnp.int16)]
    kernel = run.kernel(body, (x, y), scratch_types=scratch)
    assert moves(kernel.lower(x, y)) == []
    o, p = run.call(kernel, x, y)
    want = x.copy()
    want[:, 2:4] *= 2
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(p, (y + 1) * 2)


def test_a_transpose_of_what_was_loaded_before(run, rng):
    """What is transposed is what was there when it was loaded."""
    x = data(rng, (48, 33))

    def body(x_ref, o_ref, smem):
        smem[...] = x_ref[...]
        before = smem[...]
        smem[...] = before * 2
        o_ref[...] = before.T

    out = run(body, np.ascontiguousarray(x.T), x, scratch_types=[plgpu.SMEM(x.shape, jnp.float32)])
    np.testing.assert_array_equal(out, x.T)


# ---- in kernels ----------------------------------------------------------------------------------


def test_moves_in_loops_and_threads(run, rng):
    """Scratch is used again and again, and each thread has its own."""
    x = data(rng, (2, 24, 20))

    def body(x_ref, o_ref, p_ref):
        me = lax.axis_index("t")

        def step(k, v):
            v = jnp.roll(v, k, 1) + v[::-1] * 0.5
            return lax.dynamic_update_slice(v, v[3:5].T[:2, :2] + 1, (k, k)).at[k].multiply(2)

        v = lax.fori_loop(0, 5, step, x_ref[me])
        o_ref[me] = v
        p_ref[me] = jnp.cumsum(v.T, axis=0)

    want, sums = x.copy(), np.empty((2, 20, 24), np.float32)
    for t in range(2):
        for k in range(5):
            v = np.roll(want[t], k, 1) + want[t][::-1] * np.float32(0.5)
            v[k : k + 2, k : k + 2] = v[3:5].T[:2, :2] + 1
            v[k] *= 2
            want[t] = v
        sums[t] = np.cumsum(want[t].T, axis=0)
    got, p = run(body, (x, sums), x, num_threads=2, thread_name="t")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(p, sums, rtol=1e-4, atol=1e-4)


def random_step(rng, xp, v, two, layouts):
    """One op for both NumPy and kernels; `two` is a second array of the same shape."""
    axis = int(rng.integers(v.ndim))
    n = v.shape[axis]
    at, size = int(rng.integers(n)), int(rng.integers(1, 4))
    step = int(rng.choice([-2, -1, 1, 2, 3]))
    order = tuple(int(k) for k in rng.permutation(v.ndim))
    lead = (slice(None),) * axis
    kind = int(rng.integers(13))
    layout = layouts[int(rng.integers(len(layouts)))]
    if kind == 0:
        return xp.transpose(v, order)
    if kind == 1:
        return xp.concatenate([v, two, v], axis=axis) if v.size < 1500 else v
    if kind == 2:
        return v[(*lead, slice(None, None, step))]
    if kind == 3:
        return v[(*lead, slice(at, at + size))]
    if kind == 4:
        return xp.roll(v, at, axis)
    if kind == 5:
        return xp.flip(v, axis)
    if kind == 6:
        return xp.pad(v, [(size - 1, 0) if k == axis else (0, 1) for k in range(v.ndim)])
    if kind == 7:
        return xp.sum(v, axis=axis, keepdims=True) - v
    if kind == 8:
        return v.reshape((-1, v.shape[0])) if v.ndim == 2 else v.reshape((v.shape[-1], -1))
    if kind == 9:
        return xp.cumsum(v, axis=axis).astype(v.dtype)
    if kind == 10:
        return xp.max(v, axis=axis, keepdims=True) + v
    if kind == 11:
        return xp.take(v, xp.arange(size) % n, axis=axis)
    if layout is None or v.ndim != 2 or xp is np:
        return v + 1 - 1
    return plgpu.layout_cast(v, layout)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(k, marks=pytest.mark.long) for k in range(4, 10))]
)
def test_random_moves(run, seed):
    """Chains of six random ops on random shapes, ranks and layouts, in int32: exact."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 30, int(rng.integers(1, 4))))
    if np.prod(shape) > 3000:
        shape = shape[:2]
    x = data(rng, shape, np.int32)
    layouts = [None, *test_layouts.MATRICES.values()]
    seeds = rng.integers(1 << 30, size=6)

    def chain(xp, v):
        for s in seeds:
            v = random_step(np.random.default_rng(s), xp, v, v * 3, layouts)
        return v

    want = chain(np, x).astype(np.int32)

    def body(x_ref, o_ref):
        o_ref[...] = chain(jnp, x_ref[...])

    np.testing.assert_array_equal(call(run, run.kernel(body, want), x), want)


# ---- products ------------------------------------------------------------------------------------

SIZES = [(64, 64, 64), (128, 48, 24), (7, 33, 5), (1, 40, 64), (64, 64, 1), (70, 1, 9)]


@pytest.mark.parametrize("dtype", [np.float16, bf16, np.float32, np.int32, np.int8], ids=str)
def test_products(run, rng, dtype):
    """Matrices of register arrays: tensor cores at any shape, lanes for other dtypes."""
    xs, wants = [], []
    exact = np.dtype(dtype).kind == "i"
    to = np.int32 if exact else np.float32
    for m, k, n in SIZES:
        xs += [data(rng, (m, k), dtype), data(rng, (k, n), dtype)]
        wants.append(xs[-2].astype(np.float64) @ xs[-1].astype(np.float64))

    def body(*refs):
        for a, b, o in zip(refs[0 : len(xs) : 2], refs[1 : len(xs) : 2], refs[len(xs) :]):
            o[...] = jnp.dot(a[...], b[...], preferred_element_type=to)

    kernel = run.kernel(body, tuple(w.astype(to) for w in wants))
    for g, w in zip(call(run, kernel, *xs), wants):
        np.testing.assert_allclose(g, w, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4)
    text = kernel.lower(*xs).as_text("cuda")
    assert ("wgmma" in text) == (np.dtype(dtype).itemsize == 2)


def test_contractions(run, rng):
    """dot_general with batches and transposed operands, vectors, @, tensordot, outer; results are
    rounded to the dtype of the operands."""
    a, b = data(rng, (3, 16, 20), bf16), data(rng, (3, 20, 8), bf16)
    v, w = data(rng, (20,)), data(rng, (16, 20))
    over = lambda *d: (((d[0],), (d[1],)), ((), ()))  # noqa: E731

    def body(a_ref, b_ref, v_ref, w_ref, *outs):
        a, b, v, w = a_ref[...], b_ref[...], v_ref[...], w_ref[...]
        outs[0][...] = a @ b
        outs[1][...] = lax.dot_general(w, w, over(0, 0))
        outs[2][...] = w @ v
        outs[3][...] = v @ w.T
        outs[4][...] = jnp.outer(v, v)
        outs[5][...] = jnp.tensordot(a, w, ((2,), (1,))).astype(jnp.float32)
        outs[6][0] = jnp.vdot(v, v)

    f = np.float64
    wants = [a.astype(f) @ b.astype(f), w.T.astype(f) @ w, w @ v.astype(f), w @ v.astype(f)]
    wants += [np.outer(v, v), np.tensordot(a.astype(f), w, ((2,), (1,))), np.array([v @ v])]
    outs = [x.astype(np.float32) for x in wants]
    outs[0] = outs[0].astype(bf16)
    got = call(run, run.kernel(body, tuple(outs)), a, b, v, w)
    for g, w in zip(got, wants):
        np.testing.assert_allclose(
            g.astype(f), w, rtol=1e-2 if g.dtype == bf16 else 1e-5, atol=1e-3
        )


def test_products_of_refs(run, rng):
    """SMEM refs go to the tensor cores as they are, also transposed; others are loaded."""
    a, b = data(rng, (64, 32), np.float16), data(rng, (48, 32), np.float16)

    def body(a_ref, b_ref, o_ref, a_smem, b_smem):
        a_smem[...], b_smem[...] = a_ref[...], b_ref[...]
        first = lax.dot_general(
            a_smem, b_smem, (((1,), (1,)), ((), ())), preferred_element_type="float32"
        )
        o_ref[...] = first + jnp.dot(a_ref, b_smem.T, preferred_element_type=jnp.float32)

    want = a.astype(np.float32) @ b.T.astype(np.float32)
    scratch = [plgpu.SMEM(x.shape, jnp.float16) for x in (a, b)]
    got = run(body, want, a, b, scratch_types=scratch)
    np.testing.assert_allclose(got, 2 * want, rtol=1e-3, atol=1e-3)


def test_products_in_a_loop(run, rng):
    """Blocks of K in a loop, softmax between two products: attention written plainly."""
    q, k = data(rng, (64, 32), np.float16), data(rng, (96, 32), np.float16)
    v = data(rng, (96, 40), np.float16)

    def body(q_ref, k_ref, v_ref, o_ref):
        q = q_ref[...]

        def step(i, carry):
            top, total, out = carry
            rows = pl.ds(i * 32, 32)
            s = jnp.dot(q, k_ref[rows].T, preferred_element_type=jnp.float32)
            new = jnp.maximum(top, s.max(axis=1))
            p = jnp.exp(s - new[:, None])
            scale = jnp.exp(top - new)
            values = jnp.dot(p.astype(jnp.float16), v_ref[rows], preferred_element_type=jnp.float32)
            return new, total * scale + p.sum(axis=1), out * scale[:, None] + values

        start = jnp.full((64,), -1e30), jnp.zeros((64,)), jnp.zeros((64, 40))
        _, total, out = lax.fori_loop(0, 3, step, start)
        o_ref[...] = out / total[:, None]

    s = q.astype(np.float32) @ k.astype(np.float32).T
    p = np.exp(s - s.max(1, keepdims=True))
    want = p / p.sum(1, keepdims=True) @ v.astype(np.float32)
    got = run(body, want, q, k, v)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)


ONE_AT_A_TIME = {
    "transpose": lambda x: (x * 2).T,
    "slice": lambda x: (x * 2)[3:40, 5:11],
    "concatenate": lambda x: jnp.concatenate([x, x + 1], 1),
    "flip": lambda x: jnp.flip(x * 2),
    "roll": lambda x: jnp.roll(x, 3, 0),
    "index": lambda x: (x + 1)[jnp.arange(5) * 3],
    "set": lambda x: x.at[3, 1:6].set(0),
    "reshape": lambda x: (x + 1).reshape(-1, 7),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumsum 0": lambda x: jnp.cumsum(x, 0),
    "cumsum all": lambda x: jnp.cumsum(x),
    "argmax": lambda x: jnp.argmax(x, 1),
    "prod": lambda x: jnp.prod(x, 0),
    "var": lambda x: jnp.var(x, 1),
    "sort": lambda x: jnp.sort(x[0]),
    "dot": lambda x: jnp.dot(x, x.T),
    "dot half": lambda x: jnp.dot(x.astype(jnp.float16), x.astype(jnp.float16).T),
}


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_one_at_a_time(rng, name):
    """NVRTC takes the program of each op, without spills or arrays in local memory."""
    x = data(rng, (70, 42))

    def body(x_ref, o_ref):
        out = ONE_AT_A_TIME[name](x_ref[...])
        o_ref[...] = jnp.sum(out).reshape((1,)).astype(jnp.float32)

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((1,), f32), interpret=True)
    used = kernel.lower(x).resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used


def test_scatters_beyond_the_end(run, rng):
    """The number after the last element names none: a barrier lies there."""
    x = data(rng, (128,))
    want = x.copy()
    want[126:] = 7

    def body(x_ref, o_ref, smem, ready):
        x = x_ref[...]
        out = _core.scatter(x, jnp.arange(4) + 126, jnp.full((4,), 7, f32))
        plgpu.copy_gmem_to_smem(x_ref, smem, ready)
        plgpu.barrier_wait(ready)
        o_ref[...] = out + 0 * smem[...]

    got = run(body, want, x, scratch_types=[plgpu.SMEM((128,), f32), plgpu.Barrier()])
    np.testing.assert_array_equal(got, want)


def test_limits_of_moves():
    """What the registers or the kernel's threads do not allow says what to do."""
    x = np.zeros((1 << 17,), np.float32)
    kernel = plgpu.kernel(
        lambda x_ref, o_ref: o_ref.set(jnp.cumsum(x_ref[...])[:1], (slice(0, 1),)),
        out_type=plgpu.ShapeDtypeStruct((1,), f32),
        interpret=True,
    )
    with pytest.raises(NotImplementedError, match="more than 512 elements a lane"):
        kernel.lower(x)

    def threads(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    x = np.zeros((256, 256), np.float16)
    kernel = plgpu.kernel(
        threads, out_type=x_type(x), num_threads=2, thread_name="t", interpret=True
    )
    with pytest.raises(ValueError, match="262144  .what 2 threads have for themselves"):
        kernel.lower(x)


def x_type(x):
    return plgpu.ShapeDtypeStruct(x.shape, x.dtype)


def test_iteration_and_sequences(run, rng):
    """Python walks the rows of an array, unpacks them, and makes arrays of sequences of values."""
    x = data(rng, (4, 5))
    wants = (
        sum(k * r for k, r in enumerate(x)),
        x[0] + x[3],
        np.array([[x[0, 0], 2], [x[1, 1], x[2, 2]]], f32),
        np.array([1, 2.5, x[0, 1]], f32),
        x[[2, 0]].astype(bf16),
    )

    def body(x_ref, a_ref, b_ref, c_ref, d_ref, e_ref):
        x = x_ref[...]
        a_ref[...] = sum(k * r for k, r in enumerate(x))
        first, _, _, last = x
        b_ref[...] = first + last
        c_ref[...] = jnp.array([[x[0, 0], 2], [x_ref[1, 1], x[2, 2]]])
        d_ref[...] = jnp.asarray((1, 2.5, x[0, 1]))
        e_ref[...] = jnp.array([x[2], first], dtype=bf16)

    for got, want in zip(run(body, wants, x), wants):
        np.testing.assert_allclose(got.astype(f32), want.astype(f32), rtol=1e-6)


# ---- products in kernels with threads ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8], ids=str)
def test_products_of_threads(run, rng, dtype):
    """Each thread stages operands in shared memory of its own: none waits for the others."""
    a, b = data(rng, (3, 70, 48), dtype), data(rng, (3, 48, 40), dtype)
    to = np.int32 if dtype is np.int8 else np.float32
    want = (a.astype(np.float64) @ b.astype(np.float64)).astype(to)

    def body(a_ref, b_ref, o_ref):
        t = lax.axis_index("t")
        o_ref[t] = jnp.dot(a_ref[t], b_ref[t], preferred_element_type=to)

    got = run(body, want, a, b, num_threads=3, thread_name="t")
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_products_of_threads_that_go_apart(run, rng):
    """One thread multiplies in a loop, another once, two products of other shapes at that, a third
    not at all; memory that they share stands beside."""
    a, b = data(rng, (4, 64, 32), np.float16), data(rng, (4, 32, 24), np.float16)
    f = np.float32
    want = np.zeros((3, 64, 24), f)
    want[0] = sum(x.astype(f) @ y.astype(f) for x, y in zip(a, b))
    want[1] = (a[1].astype(f) @ b[1].astype(f)).astype(np.float16).astype(f) @ np.ones((24, 24))
    want[2] = 5

    def body(a_ref, b_ref, o_ref, shared):
        t = lax.axis_index("t")

        def add(k, total):
            return total + jnp.dot(a_ref[k], b_ref[k], preferred_element_type=f)

        @pl.when(t == 0)
        def _():
            o_ref[0] = lax.fori_loop(0, 4, add, jnp.zeros((64, 24)))

        @pl.when(t == 1)
        def _():
            once = jnp.dot(a_ref[1], b_ref[1])
            o_ref[1] = jnp.dot(once, jnp.ones((24, 24), "float16"), preferred_element_type=f)

        @pl.when(t == 2)
        def _():
            shared[...] = jnp.full((64, 24), 5.0)
            o_ref[2] = shared[...]

    options = {"num_threads": 3, "thread_name": "t", "scratch_types": [plgpu.SMEM((64, 24), f)]}
    np.testing.assert_allclose(run(body, want, a, b, **options), want, rtol=1e-2, atol=1e-2)


# ---- x.at[idx] with arrays of indices and masks --------------------------------------------------

UPDATES = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}
UPDATES |= {"min": np.minimum, "max": np.maximum}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_equal_elements(run, rng, name):
    """Every one of equal indices counts; those outside change nothing."""
    x, v = data(rng, (7, 33)), data(rng, (5,))
    n, w = rng.integers(-9, 9, (40,)).astype(np.int32), data(rng, (3, 33), bf16)
    i, j = (rng.integers(-d, d, (5,)).astype(np.int32) for d in x.shape)
    i[2], j[2] = i[0], j[0]
    rows = np.array([2, 2, 5], np.int32)
    wants = [x.copy(), x.astype(bf16), n.copy()]
    UPDATES[name].at(wants[0], (i, j), v)
    for k in range(3):
        wants[1][rows[k]] = UPDATES[name](wants[1][rows[k]], w[k])
    UPDATES[name].at(wants[2], n % 7, n)

    def body(x_ref, v_ref, n_ref, w_ref, i_ref, j_ref, rows_ref, a_ref, b_ref, c_ref):
        x, n = x_ref[...], n_ref[...]
        a = getattr(x.at[i_ref[...], j_ref[...]], name)(v_ref[...])
        a_ref[...] = getattr(a.at[i_ref[...] + 100, 3], name)(5.0)
        b_ref[...] = getattr(x.astype(bf16).at[rows_ref[...]], name)(w_ref[...])
        c_ref[...] = getattr(n.at[n % 7], name)(n)

    for got, want in zip(run(body, tuple(wants), x, v, n, w, i, j, rows), wants):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-5)


def test_updates_by_mask(run, rng):
    """Where the mask of all or of the first dims is true."""
    x, row = data(rng, (7, 33)), data(rng, (33,))
    mask = rng.random((7, 33)) < 0.5
    wants = [x.copy() for _ in range(3)]
    wants[0][mask] = 3
    wants[1][mask[:, 0]] += row
    wants[2][mask] *= 2

    def body(x_ref, row_ref, mask_ref, a_ref, b_ref, c_ref):
        x, mask = x_ref[...], mask_ref[...]
        a_ref[...] = x.at[mask].set(3)
        b_ref[...] = x.at[mask[:, 0]].add(row_ref[...])
        c_ref[...] = x.at[mask].multiply(2)

    for got, want in zip(run(body, tuple(wants), x, row, mask), wants):
        np.testing.assert_array_equal(got, want)


def test_pieces_are_joined_in_registers(run, rng):
    """Where the layouts allow it nothing goes through memory, and each piece has its place."""
    wgmma = plgpu.Layout.WGMMA

    def body(x, y, o):
        parts = [plgpu.load(r, layout=wgmma) for r in (x, y)]
        o[...] = plgpu.layout_cast(jnp.concatenate(parts, axis=1), wgmma)

    x, y = rng.standard_normal((2, 64, 32)).astype(np.float32)
    want = np.concatenate([x, y], axis=1)
    np.testing.assert_array_equal(run(body, want, x, y), want)
    text = run.kernel(body, want).lower(x, y).as_text("cuda")
    entry = text[text.index('extern "C"') :]
    assert "concat" in entry and "_shared<" not in entry
