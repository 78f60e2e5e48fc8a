"""Every form of index and view of a ref reads and writes what NumPy's does."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
F32 = plgpu.ShapeDtypeStruct((8,), np.float32)


class Chain:
    """A random chain of views of an array of this shape: `ref(x, zero)` takes it of a ref, where
    `zero` is a traced 0, `array(x)` of a NumPy array."""

    def __init__(self, rng, shape, length):
        self.rng, self.steps = rng, []
        x = np.zeros(shape, np.int8)
        for k in range(length):
            forms = [self.index, self.index, self.index, self.transpose]
            if k == 0:
                forms.append(self.reshape)
            ref, array = forms[rng.integers(len(forms))](x.shape)
            self.steps.append((ref, array))
            x = array(x)
        self.shape = x.shape

    def ref(self, x, zero):
        for step, _ in self.steps:
            x = step(x, zero)
        return x

    def array(self, x):
        for _, step in self.steps:
            x = step(x)
        return x

    def transpose(self, shape):
        perm = tuple(int(k) for k in self.rng.permutation(len(shape)))
        if self.rng.integers(2):
            return lambda x, zero: x.T, lambda x: x.T
        return lambda x, zero: x.transpose(perm), lambda x: x.transpose(perm)

    def reshape(self, shape):
        size, to = int(np.prod(shape)), []
        for d in (2, 3, 5, 7):
            while size % d == 0 and len(to) < 4:
                to.append(d)
                size //= d
        to = [*(int(d) for d in self.rng.permutation(to)), size]
        if self.rng.integers(2):
            return lambda x, zero: x.reshape(*to[:-1], -1), lambda x: x.reshape(to)
        return lambda x, zero: x.reshape(tuple(to)), lambda x: x.reshape(to)

    def index(self, shape):
        rng, refs, arrays = self.rng, [], []
        for d in shape:
            ref, array = self.one(int(d))
            refs.append(ref)
            arrays.append(array)
        cut = int(rng.integers(len(shape) + 1))  # what follows is left out, or stands for ...
        if rng.integers(3) == 0:
            refs, arrays = refs[:cut], arrays[:cut]
        elif len(shape) > 1 and rng.integers(3) == 0:
            stop = int(rng.integers(cut, len(shape) + 1))
            refs[cut:stop] = [lambda zero: ...]
            arrays[cut:stop] = [...]
        for _ in range(int(rng.integers(2)) if len(shape) < 4 else 0):
            at = int(rng.integers(len(refs) + 1))
            refs.insert(at, lambda zero: None)
            arrays.insert(at, None)
        return (
            lambda x, zero: x.at[tuple(f(zero) for f in refs)],
            lambda x: x[(*arrays, ...) if ... not in arrays else tuple(arrays)],  # never a number
        )

    def one(self, d):
        """One entry of an index: a function of a traced 0, and what it is for NumPy."""
        rng = self.rng
        i, stride = int(rng.integers(d)), int(rng.integers(1, 4))
        size = int(rng.integers(1, (d - i - 1) // stride + 2))
        stop = i + (size - 1) * stride + 1
        entries = [
            (lambda zero: i, i),
            (lambda zero: i - d, i - d),
            (lambda zero: zero + i, i),
            (lambda zero: np.int32(i), i),
            (lambda zero: slice(i, stop), slice(i, stop)),
            (lambda zero: slice(i - d, stop - d or None), slice(i - d, stop - d or None)),
            (lambda zero: slice(i, stop, stride), slice(i, stop, stride)),
            (lambda zero: slice(None, None, stride), slice(None, None, stride)),
            (lambda zero: pl.ds(i, size), slice(i, i + size)),
            (lambda zero: pl.ds(zero + i, size), slice(i, i + size)),
            (lambda zero: pl.ds(zero + i, size, stride), slice(i, stop, stride)),
            (lambda zero: pl.ds(i, size, stride), slice(i, stop, stride)),
            (lambda zero: slice(None), slice(None)),
        ]
        # whole dims keep chains long
        return entries[-1] if rng.integers(4) == 0 else entries[rng.integers(len(entries))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("space", ["gmem", "smem"])
@pytest.mark.parametrize("seed", range(6))
def test_random_views(run, rng, seed, space):
    """Loads and stores through chains of indices, transposes and reshapes."""
    rng = np.random.default_rng(seed)
    dtype = [np.float32, np.int8, bf16, np.uint16, np.float16, np.int32][seed]
    shape = [(7, 30), (4, 5, 6, 7), (130,), (12, 1, 35), (3, 3, 3, 3), (64, 9)][seed]
    x = rng.integers(0, 100, shape).astype(dtype)
    chains = [Chain(rng, shape, int(rng.integers(1, 4))) for _ in range(8)]
    loads = tuple(np.array(c.array(x)) for c in chains)
    want = np.zeros(shape, dtype)
    for c in chains:
        c.array(want)[...] = c.array(x)

    def body(x_ref, o_ref, *rest):
        outs, scratch = rest[: len(chains)], rest[len(chains) :]
        zero = lax.axis_index("g")
        source = target = scratch[0] if scratch else None
        if scratch:
            source[...] = x_ref[...]
        else:
            source, target = x_ref, o_ref
        for c, o in zip(chains, outs):
            o[...] = c.ref(source, zero)[...]
        target[...] = jnp.zeros(shape, dtype)
        for c, o in zip(chains, outs):
            c.ref(target, zero)[...] = o[...]
        if scratch:
            o_ref[...] = target[...]

    types = [plgpu.SMEM(shape, dtype)] if space == "smem" else []
    got = run(body, (want, *loads), x, grid=(1,), grid_names=("g",), scratch_types=types)
    for k, (a, b) in enumerate(zip(got, (want, *loads))):
        np.testing.assert_array_equal(a, b, err_msg=f"output {k}")


@pytest.mark.parametrize("engine", [None, "plain"])
def test_copies_of_strided_views(run, rng, engine):
    """Rows apart, columns apart, both; clipped at the end of the array."""
    x = rng.standard_normal((37, 64)).astype(np.float32)
    rows = np.zeros((16, 64), np.float32)
    rows[:12] = x[1::3]

    def body(x_ref, rows_ref, columns_ref, back_ref, a, b, bar):
        zero = lax.axis_index("g")
        far = x_ref.at[pl.ds(zero + 1, 16, 3)]
        plgpu.copy_gmem_to_smem(far, a, bar.at[0], engine=engine)
        plgpu.copy_gmem_to_smem(x_ref.at[3:19, 1::2], b, bar.at[1], engine="plain")
        plgpu.barrier_wait(bar.at[0])
        plgpu.barrier_wait(bar.at[1])
        rows_ref[...] = a[...]
        columns_ref[...] = b[...]
        back_ref[...] = jnp.zeros((37, 64))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(a, back_ref.at[pl.ds(zero + 1, 16, 3)], engine=engine)
        plgpu.wait_smem_to_gmem(0)

    back = np.zeros((37, 64), np.float32)
    back[1::3] = x[1::3]
    got = run(
        body,
        (rows, x[3:19, 1::2].copy(), back),
        x,
        grid=(1,),
        grid_names=("g",),
        scratch_types=[
            plgpu.SMEM((16, 64), np.float32),
            plgpu.SMEM((16, 32), np.float32),
            plgpu.Barrier(num_barriers=2),
        ],
    )
    for a, b in zip(got, (rows, x[3:19, 1::2], back)):
        np.testing.assert_array_equal(a, b)


def test_bitcast(run, rng):
    """The same bytes as another dtype, loaded, stored and copied."""
    x = rng.standard_normal((4, 128)).astype(np.float32)
    h = rng.standard_normal((128,)).astype(np.float32).astype(bf16)

    def body(x_ref, h_ref, bits_ref, back_ref, half_ref, smem, bar):
        bits_ref[...] = x_ref.bitcast(jnp.int32)[...]
        back_ref.bitcast(jnp.uint32).at[1:3][...] = x_ref.at[1:3].bitcast("uint32")[...]
        plgpu.copy_gmem_to_smem(x_ref.at[0].bitcast(jnp.int32), smem, bar)
        plgpu.barrier_wait(bar)
        back_ref[0] = smem.bitcast(jnp.float32)[...]
        back_ref.at[3].bitcast(jnp.int32)[...] = jnp.zeros((128,), jnp.int32)
        half_ref.bitcast(jnp.int16)[...] = h_ref.bitcast(jnp.int16)[...]

    back = x.copy()
    back[3] = 0
    got = run(
        body,
        (x.view(np.int32), back, h),
        x,
        h,
        scratch_types=[plgpu.SMEM((128,), np.int32), plgpu.Barrier()],
    )
    for a, b in zip(got, (x.view(np.int32), back, h)):
        np.testing.assert_array_equal(a, b)


def test_addupdate_and_at_set(run, rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref.addupdate(x_ref[1], 2)
        o_ref.at[3].addupdate(jnp.ones((32,)), slice(0, 64, 2))
        o_ref.at[0].set(x_ref[1])
        assert o_ref.at[0].get(pl.ds(0, 3)).shape == (3,)

    want = x.copy()
    want[2] += x[1]
    want[3, ::2] += 1
    want[0] = x[1]
    np.testing.assert_array_equal(run(body, x, x), want)


def test_new_dims(run, rng):
    """None in an index of a ref, also of what a copy moves."""
    x = rng.standard_normal((6, 32)).astype(np.float32)

    def body(x_ref, o_ref, smem, bar):
        assert x_ref.at[None].shape == (1, 6, 32) and x_ref.at[:, None, 3].shape == (6, 1)
        assert x_ref.at[..., None].shape == (6, 32, 1) and x_ref[jnp.newaxis, 2].shape == (1, 32)
        plgpu.copy_gmem_to_smem(x_ref.at[2:4, None, 8:24], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref.at[:, None][...] = smem[...]

    types = [plgpu.SMEM((2, 1, 16), np.float32), plgpu.Barrier()]
    got = run(body, x[2:4, 8:24], x, scratch_types=types)
    np.testing.assert_array_equal(got, x[2:4, 8:24])


def test_groups_of_a_union_are_one_memory(run, rng):
    """A store of one element to a group waits for the lanes that load another group."""
    x = rng.standard_normal((512,)).astype(np.float32)

    def body(x_ref, o_ref, union):
        first, second = union
        first[...] = x_ref[...]
        v = first[...]
        second[300] = 5.0
        o_ref[...] = v

    union = plgpu.RefUnion(plgpu.SMEM((512,), np.float32), plgpu.SMEM((512,), np.float32))
    np.testing.assert_array_equal(run(body, x, x, scratch_types=[union]), x)


def test_copies_of_slices_of_strided_views(run, rng):
    """A slice of every other row begins at twice its start, also where a tensor map says so."""
    x = rng.standard_normal((64, 32)).astype(np.float32)
    want = np.zeros((2, 32, 32), np.float32)
    for g in range(2):
        want[g, 1::2][3:11] = x[::2][4 + 8 * g : 12 + 8 * g]

    def body(x_ref, o_ref, smem, ready):
        g = lax.axis_index("g")
        o_ref[g] = jnp.zeros((32, 32))
        rows = pl.ds(4 + 8 * g, 8) if traced else slice(4, 12)
        plgpu.copy_gmem_to_smem(x_ref.at[::2].at[rows], smem, ready)
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(smem, o_ref.at[g, 1::2].at[3:11])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((8, 32), np.float32), plgpu.Barrier()]
    for traced in (True, False):
        options = {"grid": (1 + traced,), "grid_names": ("g",), "scratch_types": scratch}
        got = run(body, want[: 1 + traced], x, **options)
        np.testing.assert_array_equal(got, want[: 1 + traced])
    graph = run.kernel(body, want[:1], **options).lower(x).as_text("graph")
    assert graph.count("engine = tma") == 2, graph


def test_strided_slices_outside():
    """Static ones when they are traced, traced ones when the interpreter meets them."""

    def body(start, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(start(), 8, 4)]

    def kernel(start):
        def run(x_ref, o_ref):
            body(start, x_ref, o_ref)

        return plgpu.kernel(run, out_type=F32, interpret=True, grid=(1,), grid_names=("g",))

    x = np.arange(40, dtype=np.float32)
    np.testing.assert_array_equal(kernel(lambda: 11)(x), x[11::4])
    np.testing.assert_array_equal(kernel(lambda: lax.axis_index("g") + 11)(x), x[11::4])
    with pytest.raises(ValueError, match="29 elements from 12 are out of bounds"):
        kernel(lambda: 12)(x)
    with pytest.raises(IndexError, match=r"range 12:41 of dimension 0 lies outside 'x_ref'"):
        kernel(lambda: lax.axis_index("g") + 12)(x)


@pytest.mark.parametrize(
    "use, error, text",
    [
        (lambda r: r[::-1], ValueError, "step -1 of dimension 0, it must be at least 1"),
        (lambda r: r[pl.ds(0, 2, -1)], ValueError, "must not be negative"),
        (lambda r: r[pl.ds(0, 2, 0)], ValueError, "stride 0, it must be at least 1"),
        (lambda r: r[None, 0, 0], ValueError, "too many indices, 2"),
        (lambda r: r.bitcast(jnp.int16), NotImplementedError, "float32 as int16.*RefUnion"),
        (lambda r: r.bitcast(bool), NotImplementedError, "must have the same width"),
        (lambda r: r[np.array([1, 2])], ValueError, "pass the indices as an operand"),
        (lambda r: r[jnp.arange(2) * 1.0], ValueError, "must be integers, got float32"),
        (lambda r: r.reshape(4, 2)[jnp.arange(2), jnp.arange(3)], ValueError, "do not broadcast"),
        (lambda r: r[r], TypeError, "load it first"),
        (lambda r: r[r[...] > 0], IndexError, "known only at run time"),
        (lambda r: r[r[0:4] > 0], IndexError, "a mask stands alone"),
        (lambda r: r.at[jnp.arange(2)].T, NotImplementedError, "T: no views"),
        (lambda r: r.at[jnp.arange(2)][0], NotImplementedError, "index by arrays once"),
        (lambda r: pl.load(r, r[...] > 0), IndexError, "pass it as mask="),
        (lambda r: r[True], ValueError, "a bool is no index"),
        (lambda r: plgpu.transform_ref(3, plgpu.TilingTransform((4,))), TypeError, "must be a ref"),
        (lambda r: plgpu.transform_ref(r, plgpu.TilingTransform((3,))), ValueError, "not divide"),
        (lambda r: plgpu.transform_ref(r, None), NotImplementedError, "where the ref is alloc"),
        (lambda r: r.addupdate(jnp.ones(3)), ValueError, "Incompatible shapes"),
    ],
)
def test_errors(use, error, text):
    def body(o_ref):
        o_ref[...] = jnp.zeros(8)
        use(o_ref)

    with pytest.raises(error, match=text):
        plgpu.kernel(body, out_type=F32, interpret=True)()


def test_strided_slices_of_tiles():
    """Tiled SMEM has whole tiles only."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(o_ref, smem):
        smem[...] = jnp.zeros((16, 64), jnp.float16)
        o_ref[...] = smem[0, ::8].astype(jnp.float32)

    k = plgpu.kernel(
        body,
        out_type=F32,
        scratch_types=[plgpu.SMEM((16, 64), np.float16, transforms=transforms)],
        interpret=True,
    )
    with pytest.raises(NotImplementedError, match="Strided slices.*tiled by 64"):
        k()


def test_transform_ref(run, rng):
    """A tiled view of GMEM, of plain and of tiled SMEM, also of a slice."""
    x = rng.standard_normal((32, 128)).astype(np.float32).astype(np.float16)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles = x.reshape(4, 8, 2, 64).swapaxes(1, 2)
    small = x[8:24].reshape(4, 4, 8, 16).swapaxes(1, 2)

    def body(x_ref, a_ref, b_ref, c_ref, d_ref, e_ref, plain, tiled):
        tiling = plgpu.TilingTransform((8, 64))
        a_ref[...] = plgpu.transform_ref(x_ref, tiling)[...]
        plain[...] = x_ref[...]
        b_ref[...] = plgpu.transform_ref(plain, tiling)[...]
        plgpu.transform_ref(tiled, tiling)[...] = a_ref[...]
        c_ref[...] = tiled[...]
        d_ref[...] = plgpu.transform_ref(tiled.at[8:24], plgpu.TilingTransform((4, 16)))[...]
        e_ref[...] = tiled.at[:, 64:].reshape(32, 2, 32)[...]

    types = [plgpu.SMEM(x.shape, x.dtype), plgpu.SMEM(x.shape, x.dtype, transforms=swizzled)]
    outs = (tiles, tiles, x, small, x[:, 64:].reshape(32, 2, 32))
    for a, b in zip(run(body, outs, x, scratch_types=types), outs, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- unions ------------------------------------------------------------------------------------


def test_union(run, rng):
    """Groups one after the other in the same memory; what follows the union is not in it."""
    x = rng.standard_normal((4, 64)).astype(np.float32)
    h = rng.standard_normal((64, 64)).astype(np.float16)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, h_ref, o_ref, p_ref, union, after, bar):
        a, [b, c], d = union
        assert len(union) == 3 and union[0] is a
        after[...] = x_ref[0]
        a[...] = x_ref[...]
        o_ref[...] = a[...] + 1.0
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(h_ref, d["half"], bar)
        plgpu.barrier_wait(bar)
        p_ref[...] = d["half"][...] + d["half"].T[...]
        b[...] = x_ref[1]
        c[...] = x_ref[2]
        o_ref[1] = b[...]
        o_ref[2] = c[...]
        o_ref[3] = after[...]

    types = [
        plgpu.RefUnion(
            plgpu.SMEM((4, 64), np.float32),
            [plgpu.SMEM((64,), np.float32), plgpu.SMEM((64,), np.float32)],
            {"half": plgpu.SMEM((64, 64), np.float16, transforms=swizzled)},
        ),
        plgpu.SMEM((64,), np.float32),
        plgpu.Barrier(),
    ]
    got, both = run(body, (x, h), x, h, scratch_types=types)
    want = x + 1
    want[1], want[2], want[3] = x[1], x[2], x[0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(both, h + h.T)


def test_place_of_a_union():
    """As large as its largest group; members are aligned; scopes may have several."""

    def body(o_ref, u, tail):
        (a,), (b, c) = u
        a[...] = jnp.zeros((600,), jnp.float32)
        for ref in (b, c, tail):
            ref[...] = jnp.zeros((10,), jnp.float32)

        def inner(v):
            first, second = v
            first[...] = jnp.zeros((8,))
            o_ref[...] = first[...]
            second[...] = jnp.zeros((300,))

        pl.run_scoped(
            inner, plgpu.RefUnion(plgpu.SMEM((8,), np.float32), plgpu.SMEM((300,), np.float32))
        )

    small = plgpu.SMEM((10,), np.float32)
    types = [plgpu.RefUnion((plgpu.SMEM((600,), np.float32),), (small, small)), small]
    k = plgpu.kernel(body, out_type=F32, scratch_types=types, interpret=True)
    text = k.lower().as_text("graph")
    found = re.findall(r"alloc_smem .*?offset = (\d+)", text)
    assert found == ["0", "0", "1024", "3072", "4096", "4096"], text
    np.testing.assert_array_equal(k(), np.zeros(8))


def test_union_errors():
    with pytest.raises(NotImplementedError, match="must be plgpu.SMEM"):
        plgpu.RefUnion(plgpu.SMEM((4,), np.float32), plgpu.Barrier())
    with pytest.raises(ValueError, match="at least one group"):
        plgpu.RefUnion()

    def body(o_ref, u):
        u[0] = 3

    types = [plgpu.RefUnion(plgpu.SMEM((8,), np.float32))]
    with pytest.raises(ValueError, match="can't be assigned to"):
        plgpu.kernel(body, out_type=F32, scratch_types=types, interpret=True)()
