"""Mutable arrays of the host, kernels over a mesh object, state that kernels change in place."""

import functools
import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

MESH = plgpu.Mesh(grid=(4,), grid_names=("g",))
F32 = plgpu.ShapeDtypeStruct((64,), np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:pl.core_map is deprecated")
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


def test_core_map_is_deprecated():
    """In favour of pl.kernel, at the user's line; in kernels too."""
    ref = plgpu.new_ref(np.zeros(4, np.float32))
    with pytest.warns(DeprecationWarning, match="use pl.kernel") as seen:
        pl.core_map(MESH, interpret=True)(lambda: ref.at[0].set(1.0))
    assert seen[0].filename == __file__

    def body(o_ref):
        pl.core_map(plgpu.WarpMesh(axis_name="w"))(lambda: o_ref.at[lax.axis_index("w")].set(1.0))

    with pytest.warns(DeprecationWarning, match="use pl.kernel"):
        plgpu.kernel(body, out_type=F32, interpret=True)()


def test_lowered_for_mutable_arrays():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] + 1

    x, y = np.ones(128, np.float32), plgpu.new_ref(np.zeros(128, np.float32))
    low = plgpu.kernel(body).lower(x, y, target="sm_100a")
    assert "target sm_100a" in low.as_text("graph") and not y[...].any()


def test_messages_name_the_parameters_of_the_body():
    """Also of kernels with mutable arrays, as arguments, in a closure, and nested."""
    inside = plgpu.new_ref(np.zeros(8, np.float32))
    x, state = np.ones(8, np.float32), plgpu.new_ref(np.zeros(8, np.float32))

    def body(first, pair, last, tile):
        tile[...] = first[...] + pair["b"][...]
        pair["a"][...] = tile[...]
        inside[...] = tile[...]
        last[...] = tile[...]

    out = plgpu.ShapeDtypeStruct((8,), np.float32)
    k = plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SMEM((8,), np.float32)])
    text = k.lower(x, {"a": state, "b": x}).as_text("graph")
    names = re.findall(r"%(\w+?)_\d+: gmem", text)
    assert names == ["first", "pair_1", "pair_0", "inside", "last", "pair_0", "inside"]
    assert re.search(r"%tile_\d+ = alloc_smem", text)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_kernel_over_a_mesh_closes_over_refs(rng):
    """What core_map did: mutable arrays in the closure, with and without outputs, operands, in the
    function of run_state."""
    x = rng.standard_normal((4, 64)).astype(np.float32)
    source, target = plgpu.new_ref(x), plgpu.new_ref(np.zeros_like(x))

    def scale():
        i = lax.axis_index("g")
        target[i] = source[i] * 3

    assert pl.kernel(scale, mesh=MESH, interpret=True)() == ()
    np.testing.assert_array_equal(target[...], x * 3)

    @pl.kernel(out_type=plgpu.ShapeDtypeStruct(x.shape, np.float32), mesh=MESH, interpret=True)
    def both(y_ref, o_ref):
        i = lax.axis_index("g")
        o_ref[i] = source[i] + y_ref[i]
        source[i] = jnp.zeros((64,))

    np.testing.assert_array_equal(both(x), 2 * x)
    assert not source[...].any()

    def step(ref):
        def twice():
            i = lax.axis_index("g")
            ref[i] = ref[i] * 2

        pl.kernel(twice, mesh=MESH, interpret=True)()

    np.testing.assert_array_equal(pl.run_state(step)(x), 2 * x)


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


# ---- mutable arrays and plgpu.kernel -------------------------------------------------------------


def test_arguments_are_changed(rng):
    """A mutable array is read and written where it stands in the arguments; without other outputs
    in its own memory."""
    x = rng.standard_normal((64,)).astype(np.float32)

    def body(state, scale, o_ref, s_ref):
        s_ref[...] = state["a"][...]
        state["b"][...] = s_ref[...] * scale[...]
        state["a"][3] = 7.0
        if o_ref is not None:
            o_ref[...] = state["b"][...] + 1

    for out in (F32, None):
        a, b = plgpu.new_ref(x), plgpu.new_ref(np.zeros_like(x))
        memory = plgpu.freeze(b)
        kernel = plgpu.kernel(
            body if out else functools.partial(lambda f, s, c, m: f(s, c, None, m), body),
            out_type=out or (),
            scratch_types=[plgpu.SMEM((64,), np.float32)],
            interpret=True,
        )
        for _ in range(2):  # the second call finds the kernel of the first
            got = kernel({"a": a, "b": b}, np.float32(2))
        want = np.where(np.arange(64) == 3, 7, x)
        np.testing.assert_array_equal(a[...], want)
        np.testing.assert_array_equal(b[...], want * 2)
        if out:
            np.testing.assert_array_equal(got, want * 2 + 1)
        else:
            assert got == () and plgpu.freeze(b) is memory


def test_closures_are_changed(rng):
    """As core_map, with arguments and results beside; also with one passed."""
    x, y = rng.standard_normal((2, 64)).astype(np.float32)
    total, last = plgpu.new_ref(x), plgpu.new_ref(np.zeros_like(x))

    @plgpu.kernel(out_type=F32, interpret=True)
    def f(y_ref, passed, o_ref):
        o_ref[...] = total[...]
        total[...] = total[...] + y_ref[...]
        passed[...] = y_ref[...]

    np.testing.assert_array_equal(f(y, last), x)
    np.testing.assert_array_equal(f(y, last), x + y)
    np.testing.assert_array_equal(total[...], x + y + y)
    np.testing.assert_array_equal(last[...], y)
    assert "out(" in f.lower(y, last).as_text("graph")  # operands that are outputs


def test_mutable_arguments_that_are_refused():
    a = plgpu.new_ref(np.zeros(64, np.float32))
    copy = plgpu.kernel(lambda x, o: o.set(x[...]), out_type=F32, interpret=True)
    both = plgpu.kernel(lambda x, y: y.set(x[...]), out_type=(), interpret=True)
    closed = plgpu.kernel(lambda x: a.set(x[...]), out_type=(), interpret=True)
    blocks = pl.pallas_call(lambda x, o: o.set(x[...]), out_shape=F32, interpret=True)
    for call, text in [
        (lambda: both(a, a), "the same mutable array twice"),
        (lambda: closed(a), "the same mutable array twice"),
        (lambda: blocks(a), "pallas_call anonymous.*input_output_aliases"),
        (lambda: plgpu.vmap(copy)(a), "under vmap"),
        (lambda: copy(a, out=np.zeros(64, np.float32)), "out= together"),
    ]:
        with pytest.raises(NotImplementedError, match=text):
            call()
