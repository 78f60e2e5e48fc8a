"""Mutable arrays of the host, kernels over a mesh object, state that kernels change in place."""

import functools

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

MESH = plgpu.Mesh(grid=(4,), grid_names=("g",))
F32 = plgpu.ShapeDtypeStruct((64,), np.float32)
TABLE = plgpu.new_ref(np.zeros((4, 64), np.float32))


def test_core_map(rng):
    """Refs of a closure are read and written in place; each block has its row."""
    x = rng.standard_normal((4, 64)).astype(np.float32)
    source, target = plgpu.new_ref(x), plgpu.new_ref(np.zeros_like(x))
    scale = 3.0

    @pl.core_map(MESH, interpret=True)
    def f():
        i = lax.axis_index("g")
        target[i] = source[i] * scale
        source.at[i, pl.ds(0, 32)][...] = jnp.zeros((32,))

    assert f is None
    np.testing.assert_array_equal(target[...], x * 3)
    np.testing.assert_array_equal(source[:, :32], 0)
    np.testing.assert_array_equal(plgpu.freeze(source)[:, 32:], x[:, 32:])
    assert x[0, 0] != 0, "the array that new_ref was given stays as it is"


def test_core_map_finds_refs(rng):
    """In functions, bound arguments, containers, defaults and globals that the body reaches."""
    a, b, c, d, e = (
        plgpu.new_ref(rng.standard_normal((4, 64)).astype(np.float32)) for _ in "abcde"
    )
    want = a[...] + b[...] + c[...] + d[...] + e[...]

    def inner(i, more):
        return a[i] + more[i]

    add = functools.partial(inner, more=b)
    refs = {"c": [c], "d": (d,)}

    @pl.core_map(MESH, interpret=True)
    def _(last=e):
        def row(i):
            return add(i) + refs["c"][0][i]

        i = lax.axis_index("g")
        TABLE[i] = row(i) + refs["d"][0][i] + last[i]

    np.testing.assert_allclose(TABLE[...], want, rtol=1e-6)


def test_run_state_and_core_map(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)

    def step(refs):
        @pl.core_map(plgpu.Mesh(num_threads=2, thread_name="t"), interpret=True)
        def _():
            t = lax.axis_index("t")
            for k in range(2):
                refs["sum"][2 * t + k] = refs["x"][2 * t + k] + refs["sum"][2 * t + k]

    state = {"x": x, "sum": np.ones_like(x)}
    out = pl.run_state(step)(state)
    np.testing.assert_array_equal(out["sum"], x + 1)
    np.testing.assert_array_equal(out["x"], x)
    np.testing.assert_array_equal(state["sum"], 1)


def test_kernel_over_a_mesh(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)

    @pl.kernel(out_type={"a": F32, "b": [F32]}, mesh=MESH, interpret=True, name="both")
    def both(x_ref, o_ref):
        @pl.when(lax.axis_index("g") == 0)
        def _():
            o_ref["a"][...] = x_ref[0]
            o_ref["b"][0][...] = x_ref[1]

    out = both(x)
    np.testing.assert_array_equal(out["a"], x[0])
    np.testing.assert_array_equal(out["b"][0], x[1])
    assert "both" in both.lower(x).as_text("graph").splitlines()[0]
    copy = pl.kernel(lambda x, o: o.set(x[1]), F32, mesh=plgpu.Mesh(), interpret=True)
    np.testing.assert_array_equal(copy(x), x[1])


def mapped(f, mesh=MESH, **options):
    return lambda: pl.core_map(mesh, interpret=True, **options)(f)


@pytest.mark.parametrize(
    "use, error, text",
    [
        (mapped(lambda: None), ValueError, "closes over no mutable array"),
        (mapped(lambda: TABLE[0]), ValueError, "must return None"),
        (mapped(lambda: None, mesh=None), TypeError, "mesh must be plgpu.Mesh"),
        (mapped(lambda: None, mesh=[MESH]), ValueError, "one mesh for one body"),
        (mapped(lambda: None, scratch_shapes=[1]), NotImplementedError, "run_scoped"),
        (lambda: pl.kernel([1], mesh=MESH), NotImplementedError, "several bodies"),
        (lambda: pl.kernel(mesh=(MESH,)), ValueError, "one mesh"),
        (lambda: pl.kernel(mesh=MESH, scratch_types=[1]), NotImplementedError, "run_scoped"),
        (lambda: plgpu.new_ref(np.zeros(3), memory_space=plgpu.SMEM), ValueError, "GMEM"),
        (lambda: plgpu.freeze(np.zeros(3)), TypeError, "what new_ref makes"),
        (lambda: pl.run_state(lambda r: 3)(np.zeros(3)), ValueError, "must return None"),
    ],
)
def test_errors(use, error, text):
    with pytest.raises(error, match=text):
        use()


def test_refs_of_the_host_in_other_kernels():
    """What no closure holds cannot be rebuilt, and says so."""

    class Holder:
        ref = plgpu.new_ref(np.zeros(64, np.float32))

    def body(o_ref):
        o_ref[...] = Holder.ref[...]

    with pytest.raises(ValueError, match="close over it directly.*\n.*test_state"):
        plgpu.kernel(body, out_type=F32, interpret=True)()

    def nested(o_ref):
        pl.core_map(MESH)(lambda: None)

    with pytest.raises(ValueError, match="is for the host"):
        plgpu.kernel(nested, out_type=F32, interpret=True)()


def test_arrays_in_a_closure_are_refused():
    data = np.ones(64, np.float32)

    def body():
        TABLE[0] = TABLE[0] + data

    with pytest.raises((ValueError, NotImplementedError, TypeError), match="captures|array"):
        pl.core_map(plgpu.Mesh(), interpret=True)(body)


@pytest.mark.gpu
def test_core_map_on_the_gpu(rng):
    """Arrays on the device and of the host."""
    x = rng.standard_normal((4, 64)).astype(np.float32)
    for value in (x, plgpu.device_put(x)):
        ref = plgpu.new_ref(value)

        @pl.core_map(MESH)
        def _(ref=ref):
            i = lax.axis_index("g")
            ref[i] = ref[i] + 1.0

        got = plgpu.freeze(ref)
        got = got.numpy() if isinstance(got, plgpu.DeviceArray) else got
        np.testing.assert_array_equal(got, x + 1)
