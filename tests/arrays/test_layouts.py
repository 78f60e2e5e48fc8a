"""Register layouts: each holds what the tables of the language say, every op works in it at any
shape, and conversions between any two keep the values and cost what docs/layouts.md says."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _layout_table, lax
from pallas_mgpu import numpy as jnp
from pallas_mgpu._types import layout_spec

L = plgpu.Layout
bf16, e4m3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
OWN = L.TILED(plgpu.Tiling(((64, 64), (16, 64), (4, 2))), (-6,), (-3,), -1)
MATRICES = {
    "wgmma": L.WGMMA,
    "transposed": L.WGMMA_TRANSPOSED,
    "8bit": L.WGMMA_8BIT,
    "2x": L.WGMMA_UPCAST_2X,
    "4x": L.WGMMA_UPCAST_4X,
    "lhs": L.MMA_LHS(jnp.int8),
    "rhs": L.MMA_RHS(jnp.float16),
    "copy": L.SMEM_GMEM_COPY((64, 64), jnp.float16, 128),
    "tiled": L.TILED(plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,))), (-7,), (-3, -2), -1),
    "tcgen05": L.TCGEN05,
    "tcgen05 transposed": L.TCGEN05_TRANSPOSED,
    "native": L.TCGEN05_TMEM_NATIVE,
    "native 4": L.TCGEN05_TMEM_NATIVE(4),
    "m64": L.TCGEN05_M64_COLLECTIVE(32),
    "m64 native": L.TCGEN05_M64_COLLECTIVE_NATIVE(32, 2),
}


def elements(shape, layout):
    return np.array(_core.layout_elements(shape, layout_spec(layout)))


def formula(rank, rows, columns, where):
    """[lane][register] of what `where(i, j)` says: (warps, lanes, register); None is every one."""
    found = {}
    for i, j in itertools.product(range(rows), range(columns)):
        warps, lanes, register = where(i, j)
        for w in range(4) if warps is None else [warps]:
            for lane in range(32) if lanes is None else [lanes]:
                found[w * 32 + lane, register] = i * columns + j if rank == 2 else i
    regs = max(r for _, r in found) + 1
    return np.array([[found.get((t, r), -1) for r in range(regs)] for t in range(128)])


def test_places_of_elements():
    """Warp, lane and register of each element, from the table of the language's layouts."""
    m, n = 128, 64
    warp = lambda i: i % 64 // 16  # noqa: E731
    sub = lambda i: i // 8 % 2  # noqa: E731

    def block(i, j, width, vec, v):
        return (((i // 64) * (n // width) + j // width) * 2 + sub(i)) * vec + v

    tables = {
        L.WGMMA: lambda i, j: (
            warp(i), i % 8 * 4 + j % 8 // 2, block(i, j, 8, 2, j % 2)
        ),
        L.WGMMA_8BIT: lambda i, j: (
            warp(i), i % 8 * 4 + j % 16 // 4, block(i, j, 16, 4, j % 4)
        ),
        L.WGMMA_UPCAST_2X: lambda i, j: (
            warp(i), i % 8 * 4 + j % 8 // 4 * 2 + j % 16 // 8, block(i, j, 16, 4, j % 4)
        ),
        L.WGMMA_UPCAST_4X: lambda i, j: (
            warp(i), i % 8 * 4 + j % 32 // 8, block(i, j, 32, 8, j % 8)
        ),
        L.WGMMA_TRANSPOSED: lambda i, j: (
            warp(i), i % 8 // 2 * 8 + j % 2 * 4 + j % 8 // 2, block(i, j, 8, 2, i % 2)
        ),
        L.TCGEN05: lambda i, j: (
            i % 128 // 32,
            i % 8 * 4 + j % 8 // 2,
            ((i // 128 * (n // 8) + j // 8) * 4 + i % 32 // 8) * 2 + j % 2,
        ),
        L.TCGEN05_TRANSPOSED: lambda i, j: (
            i % 128 // 32, i % 8 // 2 * 8 + j % 2 * 4 + j % 8 // 2,
            ((i // 128 * (n // 8) + j // 8) * 4 + i % 32 // 8) * 2 + i % 2
        ),
    }  # fmt: skip
    for v in (1, 2, 8):
        tables[L.TCGEN05_TMEM_NATIVE(v)] = lambda i, j: (i // 32, i % 32, j)
    for c in (16, 64):
        half = c // 2
        tables[L.TCGEN05_M64_COLLECTIVE(c)] = lambda i, j, c=c, half=half: (
            j % c // half * 2 + i % 64 // 32,
            i % 8 * 4 + j % 8 // 2,
            (((i // 64 * (n // c) + j // c) * 4 + i % 32 // 8) * (half // 8) + j % half // 8) * 2
            + j % 2,
        )
        for p in (1, 4):
            tables[L.TCGEN05_M64_COLLECTIVE_NATIVE(c, p)] = lambda i, j, c=c, half=half: (
                j % c // half * 2 + i % 64 // 32,
                i % 32,
                (i // 64 * (n // c) + j // c) * half + j % half,
            )
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        e = 4 // np.dtype(dtype).itemsize
        tables[L.MMA_LHS(dtype)] = lambda i, k, e=e: (
            warp(i),
            i % 8 * 4 + k % (4 * e) // e,
            (((i // 64 * (n // (8 * e)) + k // (8 * e)) * 2 + k % (8 * e) // (4 * e)) * 2 + sub(i))
            * e
            + k % e,
        )
        tables[L.MMA_RHS(dtype)] = lambda k, j, e=e: (
            None,
            j % 8 * 4 + k % (4 * e) // e,
            ((k // (8 * e) * (n // 8) + j // 8) * 2 + k % (8 * e) // (4 * e)) * e + k % e,
        )
    for layout, where in tables.items():
        got = elements((m, n), layout)
        np.testing.assert_array_equal(got, formula(2, m, n, where), err_msg=str(layout))
    vectors = {
        L.TMA_INDICES: lambda i, _: (i % 16 // 4, None, i // 16 * 4 + i % 4),
        L.TMA_INDICES_4: lambda i, _: (None, None, i // 4 * 4 + i % 4),
    }
    for layout, where in vectors.items():
        got = elements((64,), layout)
        np.testing.assert_array_equal(got, formula(1, 64, 1, where), err_msg=str(layout))


@pytest.mark.parametrize("swizzle, bits", [(128, 16), (64, 32), (32, 16), (32, 8)])
def test_places_of_copies(swizzle, bits):
    """SMEM_GMEM_COPY: each element once, 16 (or 8) bytes of a row in each lane's vector."""
    dtype = {32: jnp.float32, 16: jnp.float16, 8: jnp.int8}[bits]
    width = swizzle * 8 // bits
    for rows, columns in ((64, 2 * width), (16, 4 * width), (8, 4 * width)):
        got = elements((rows, columns), L.SMEM_GMEM_COPY((rows, columns), dtype, swizzle))
        assert sorted(got.ravel()) == list(range(rows * columns))
        vec = 8 * min(16, swizzle // 4) // bits
        runs = got.reshape(128, -1, vec)
        assert (np.diff(runs, axis=2) == 1).all() and (runs[:, :, 0] % vec == 0).all()


@pytest.mark.parametrize("layout", MATRICES)
def test_every_op_in_every_layout(run, rng, layout):
    """Loads, stores, iota, arithmetic, reductions over each axis and all, broadcasts back."""
    layout = MATRICES[layout]
    for shape in ((50, 41), (3, 100)):
        x = rng.integers(-50, 50, shape).astype(np.float32)

        def body(x_ref, o_ref, i_ref, rows_ref, cols_ref, total_ref, back_ref):
            x = plgpu.load(x_ref, layout=layout, optimized=False)
            o_ref[...] = x * 2
            j = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=layout)
            i = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
            i_ref[...] = i * 1000 + j
            rows, cols = jnp.sum(x, axis=1), jnp.max(x, axis=0)
            rows_ref[...], cols_ref[...] = rows, cols
            total_ref[0] = jnp.sum(x)
            back_ref[...] = plgpu.layout_cast(
                lax.broadcast_in_dim(rows, x.shape, (0,)) + cols * 3, layout
            )

        outs = (x, x.astype(np.int32), x[:, 0], x[0], x[0, :1], x)
        kernel = run.kernel(body, outs)
        o, i, rows, cols, total, back = kernel(x) if run.way == "interpret" else run.call(kernel, x)
        np.testing.assert_array_equal(o, x * 2)
        want = np.arange(shape[0])[:, None] * 1000 + np.arange(shape[1])
        np.testing.assert_array_equal(i, want)
        np.testing.assert_array_equal(rows, x.sum(1))
        np.testing.assert_array_equal(cols, x.max(0))
        assert total[0] == x.sum()
        np.testing.assert_array_equal(back, x.sum(1)[:, None] + x.max(0) * 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("a", MATRICES)
@pytest.mark.parametrize(
    "dtype, shape", [(np.float32, (50, 41)), (bf16, (64, 64)), (np.int8, (64, 70))], ids=str
)
def test_casts_between_any_two(run, rng, a, dtype, shape):
    """Values stay, by registers, shuffles or shared memory: whole tiles, parts of them, elements
    of each width."""
    others = [b for name, b in MATRICES.items() if name != a]
    x = rng.integers(-100, 100, shape).astype(dtype)

    def body(x_ref, *outs):
        x = plgpu.load(x_ref, layout=MATRICES[a], optimized=False)
        for o, b in zip(outs, others):
            o[...] = plgpu.layout_cast(lax.optimization_barrier(x), b)

    kernel = run.kernel(body, (x,) * len(others))
    got = kernel(x) if run.way == "interpret" else run.call(kernel, x)
    for g, b in zip(got, others):
        np.testing.assert_array_equal(g, x, err_msg=str(b))


def test_casts_of_vectors(run, rng):
    """Reduced and index layouts, which hold copies, convert to each other."""
    x = rng.standard_normal(100).astype(np.float32)
    layouts = list(_layout_table.VECTORS.values())

    def body(x_ref, *outs):
        for o, a, b in zip(outs, layouts, layouts[1:] + layouts[:1]):
            o[...] = plgpu.layout_cast(lax.optimization_barrier(plgpu.load(x_ref, layout=a)), b)

    kernel = run.kernel(body, (x,) * len(layouts))
    for g in kernel(x) if run.way == "interpret" else run.call(kernel, x):
        np.testing.assert_array_equal(g, x)


@pytest.mark.parametrize(
    "a, b, mask",
    [
        ("wgmma", "transposed", 4),
        ("transposed", "wgmma", 4),
        ("2x", "wgmma", 1),
        ("4x", "2x", 2),
        ("4x", "wgmma", None),
    ],
)
def test_cheap_casts_use_butterflies(a, b, mask):
    """The conversions that the language calls cheap: half of the registers are sent for each bit,
    and the program has no spills."""
    x = np.zeros((64, 64), bf16)

    def body(x_ref, o_ref):
        v = lax.optimization_barrier(plgpu.load(x_ref, layout=MATRICES[a], optimized=False))
        o_ref[...] = plgpu.layout_cast(v, MATRICES[b])

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    lowered = kernel.lower(x)
    text = lowered.as_text("cuda")
    assert "through shared memory" not in text and lowered.resources()["spill_bytes"] == 0
    assert mask is None or f"lane & {mask}, {mask});" in text
    shuffles, size, _ = _core.layout_conversion(
        bf16, x.shape, layout_spec(MATRICES[a]), layout_spec(MATRICES[b])
    )
    assert size == 0 and shuffles == (16 if mask is None else 8)


@pytest.mark.parametrize("a, b", [("tcgen05", "tcgen05 transposed"), ("native", "tcgen05")])
@pytest.mark.parametrize("dtype", [np.float32, bf16, e4m3])
def test_casts_inside_warps_shuffle(run, rng, a, b, dtype):
    """Between layouts whose warps hold the same rows; float8 elements move four at a time."""
    x = rng.integers(-8, 8, (128, 64)).astype(dtype)

    def body(x_ref, o_ref, back_ref):
        v = lax.optimization_barrier(plgpu.load(x_ref, layout=MATRICES[a], optimized=False))
        o_ref[...] = y = plgpu.layout_cast(v, MATRICES[b])
        back_ref[...] = plgpu.layout_cast(lax.optimization_barrier(y), MATRICES[a])

    kernel = run.kernel(body, (x, x))
    assert "through shared memory" not in kernel.lower(x).as_text("cuda")
    for got in run.call(kernel, x):
        np.testing.assert_array_equal(got, x)


def test_reduced_layouts_of_tcgen05():
    """Rows and columns, from the table of the language's layouts."""
    rows = {
        L.TCGEN05: lambda i, _: (
            [i % 128 // 32], [i % 8 * 4 + c for c in range(4)], i // 128 * 4 + i % 32 // 8
        ),
        L.TCGEN05_TRANSPOSED: lambda i, _: (
            [i % 128 // 32],
            [i % 8 // 2 * 8 + c for c in range(8)],
            (i // 128 * 4 + i % 32 // 8) * 2 + i % 2,
        ),
        L.TCGEN05_TMEM_NATIVE: lambda i, _: ([i % 128 // 32], [i % 32], i // 128),
        L.TCGEN05_M64_COLLECTIVE(64): lambda i, _: (
            [i % 64 // 32, i % 64 // 32 + 2],
            [i % 8 * 4 + c for c in range(4)],
            i // 64 * 4 + i % 32 // 8,
        ),
    }  # fmt: skip
    columns = {
        L.TCGEN05: lambda j, _: (
            range(4), [c * 4 + j % 8 // 2 for c in range(8)], j // 8 * 2 + j % 2
        ),
        L.TCGEN05_TMEM_NATIVE(4): lambda j, _: (range(4), range(32), j),
        L.TCGEN05_M64_COLLECTIVE(256): lambda j, _: (
            [j // 128 * 2, j // 128 * 2 + 1],
            [c * 4 + j % 8 // 2 for c in range(8)],
            j % 128 // 8 * 2 + j % 2,
        ),
    }  # fmt: skip
    for axis, tables in ((1, rows), (0, columns)):
        for layout, where in tables.items():
            got, n = elements((256,), layout.reduce(axis)), 0
            for k in range(256):
                warps, lanes, register = where(k, 0)
                at = [w * 32 + lane for w in warps for lane in lanes]
                assert (got[at, register] == k).all(), (layout, axis, k)
                n += len(at)
            assert n == (got >= 0).sum(), (layout, axis)


@pytest.mark.parametrize("layout", ["wgmma", "tcgen05", "m64"])
def test_matrices_of_swizzled_memory(run, rng, layout):
    """Tiled and swizzled SMEM is reached by ldmatrix and stmatrix, four matrices at a time."""
    x = rng.standard_normal((128, 128)).astype(np.float16)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, o_ref, t_ref, s):
        s[...] = plgpu.load(x_ref, layout=MATRICES[layout], optimized=False)
        o_ref[...] = plgpu.load(s, layout=MATRICES[layout])
        t_ref[...] = plgpu.load(s.T, layout=MATRICES[layout])

    scratch = [plgpu.SMEM(x.shape, x.dtype, transforms=tiled)]
    kernel = run.kernel(body, (x, x), scratch_types=scratch)
    text = kernel.lower(x).as_text("cuda")
    for name in ("stmatrix_x4(", "ldmatrix_x4(", "ldmatrix_x4_trans("):
        assert f"      {name}" in text
    got, transposed = run.call(kernel, x)
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(transposed, x.T)


def test_row_reduction_and_broadcast_need_no_shared_memory():
    """A softmax of WGMMA rows: its sums and maxima stay in the lanes that need them."""
    x = np.zeros((64, 128), np.float32)

    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        e = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=1, keepdims=True)

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    text = kernel.lower(x).as_text("cuda")
    assert "st_shared" not in text and "through shared memory" not in text
    assert text.count("shuffle_xor(") >= 4


@pytest.mark.filterwarnings("error:.*is converted from layout")
def test_equal_ranges_have_layouts_of_their_own(run, rng):
    """Of a scan, and of columns of a product, which are in another one."""
    n = 16

    def body(a_ref, count_ref, o_ref, sums_ref, a_smem, acc):
        a_smem[...] = a_ref[...]
        plgpu.commit_smem()
        plgpu.wgmma(acc, a_smem, a_smem.at[:n].T)
        there = jnp.arange(n) < count_ref[0]
        sums_ref[...] = jnp.cumsum(jnp.where(there, 2 * jnp.arange(n), 0))
        column = lax.broadcasted_iota(jnp.int32, (64, n), 1)
        value = acc[...] * lax.broadcast_in_dim(jnp.arange(n), (64, n), [1]).astype(jnp.float32)
        o_ref[...] = jnp.where(column < count_ref[0], value, 0.0)

    a, count = rng.standard_normal((64, 64)).astype(np.float16), np.array([11], np.int32)
    outs = [plgpu.ShapeDtypeStruct((64, n), np.float32), plgpu.ShapeDtypeStruct((n,), np.int32)]
    smem = plgpu.SMEM(
        (64, 64),
        np.float16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    )
    value, sums = run(body, outs, a, count, scratch_types=[smem, plgpu.ACC((64, n))])
    i, wide = np.arange(n), a.astype(np.float32)
    np.testing.assert_array_equal(sums, np.cumsum(np.where(i < 11, 2 * i, 0)))
    np.testing.assert_allclose(value, wide @ wide[:n].T * np.where(i < 11, i, 0), atol=1e-2)


def test_table_is_fresh():
    """docs/layouts.md is what `python -m pallas_mgpu layouts` prints."""
    path = Path(__file__).parent.parent.parent / "docs" / "layouts.md"
    assert path.read_text(encoding="utf-8") == _layout_table.text()


def test_names_in_text(rng):
    """Dumps of graphs name the layouts, and are read back."""
    x = np.zeros((64, 64), np.float32)

    def body(x_ref, o_ref):
        v = plgpu.load(x_ref, layout=L.WGMMA_UPCAST_4X, optimized=False)
        s = jnp.sum(v, axis=0) + plgpu.load(x_ref.at[0], layout=L.MMA_RHS(jnp.int8).reduce(0))
        o_ref[...] = lax.broadcast_in_dim(s, (64, 64), (1,))

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    text = kernel.lower(x).as_text("graph")
    assert "@wgmma_upcast_4x " in text and "@wgmma_upcast_4x.reduce(0)" in text
    again = _core.Graph.parse(text).text()
    assert again.count("wgmma_upcast_4x") == text.count("wgmma_upcast_4x")


def test_errors_of_layouts():
    """What cannot be is refused where it is written."""
    for make, error, text in (
        (lambda: L.MMA_LHS.value_spec, ValueError, "needs arguments"),
        (lambda: L.WGMMA_8BIT(3), ValueError, "takes no arguments"),
        (lambda: L.SMEM_GMEM_COPY((64, 64), jnp.float32, 16), ValueError, "swizzle must be"),
        (lambda: L.SMEM_GMEM_COPY((60, 64), jnp.float32, 64), ValueError, "not a multiple"),
        (lambda: L.SMEM_GMEM_COPY((8, 64), jnp.float16, 128), NotImplementedError, "four parts"),
        (lambda: L.TCGEN05_M64_COLLECTIVE.value_spec, ValueError, "needs arguments"),
        (lambda: L.TCGEN05_M64_COLLECTIVE(24), ValueError, "multiple of 16, got 24"),
        (lambda: L.TCGEN05_M64_COLLECTIVE_NATIVE(32, 3), ValueError, "divide 16, got 3"),
        (lambda: L.TCGEN05_TMEM_NATIVE(0), ValueError, "must be positive, got 0"),
        (lambda: L.TCGEN05_TMEM_NATIVE("2"), TypeError, "vector_length"),
    ):
        with pytest.raises(error, match=text):
            make()


def test_what_tilings_do(rng):
    """Shapes, strides and indices of tiled arrays, against reshapes and transposes of NumPy."""
    tiling = plgpu.Tiling(((4, 6), (2, 6), (3,)))
    x = np.arange(5 * 8 * 12, dtype=np.int32).reshape(5, 8, 12)
    tiled = x.reshape(5, 2, 4, 2, 6).transpose(0, 1, 3, 2, 4)  # 5, 2, 2, 4, 6
    tiled = tiled.reshape(5, 2, 2, 2, 2, 1, 6).transpose(0, 1, 2, 3, 5, 4, 6)
    tiled = tiled.reshape(5, 2, 2, 2, 1, 2, 2, 3)
    assert tiling.tile_shape(x.shape) == tiled.shape
    assert tiling.untile_shape(tiled.shape) == x.shape
    strides = tiling.tile_strides((96, 12, 1))
    again = np.lib.stride_tricks.as_strided(x, tiled.shape, [4 * s for s in strides])
    np.testing.assert_array_equal(again, tiled)
    shape, strides = tiling.tile_nested_shape_strides(
        ((5,), (2, 4), (2, 6)), ((96,), (48, 6), (24, 1))
    )  # of an array that lies in tiles of (4, 6)
    assert [int(np.prod(s)) for s in shape] == list(tiled.shape)
    assert shape[1] == (2,) and strides[1] == (48,) and shape[6:] == ((2,), (3,))
    assert strides[3] == (12,) and strides[5:] == ((6,), (3,), (1,))
    for at in rng.integers(0, x.shape, (20, 3)):
        at = tuple(int(k) for k in at)
        where = tiling.tile_indices(at)
        assert tiled[where] == x[at] and tiling.untile_indices(where) == at
    assert tiling.tile_dimension(0) == (True, False, True, False, True, False, False)
    assert tiling.tile_dimension(1) == (False, True, False, True, False, True, True)
    assert tiling.remove_dimension(0) == plgpu.Tiling(((6,), (6,), (3,)))
    assert tiling.remove_dimension(0).canonicalize() == plgpu.Tiling(((6,), (3,)))
    assert tiling.canonicalize() == tiling
    long = plgpu.Tiling(((1, 8), (1, 8), (1, 4), (1, 1)))
    assert long.canonicalize() == plgpu.Tiling(((1, 8), (4,), (1,)))


def test_errors_of_tilings():
    tiling = plgpu.Tiling(((4, 6), (3,)))
    for use, text in (
        (lambda: tiling.tile_shape((8, 13)), "13 is not divisible by the tile's 6"),
        (lambda: tiling.tile_shape((12,)), "more dims than"),
        (lambda: tiling.untile_shape((2, 2, 4, 2, 5)), "has size 5, expected 3"),
        (lambda: tiling.untile_indices((1,)), "too few dims"),
        (lambda: tiling.tile_dimension(2), "dim must be 0 to 1, got 2"),
        (lambda: tiling.tile_nested_shape_strides(((8,), (12,)), ((1,), (1, 2))), "structure"),
        (lambda: tiling.tile_nested_shape_strides(((8,), (9, 4)), ((9, 1), (9, 1))), "structure"),
        (lambda: tiling.tile_nested_shape_strides(((8,), (9, 4)), ((9,), (9, 1))), "begins inside"),
        (lambda: tiling.tile_nested_shape_strides(((8,), (3,)), ((9,), (9,))), "not divisible"),
    ):
        with pytest.raises(ValueError, match=text):
            use()


@pytest.mark.parametrize("allowed", [1024, 200, 64])
def test_scratch_of_reductions(run, rng, allowed):
    """CompilerParams(reduction_scratch_bytes=) bounds the SMEM that warps exchange parts through;
    with less of it a reduction takes more steps and gives the same bits."""
    x = rng.standard_normal((64, 104)).astype(np.float32)

    def body(x_ref, sum_ref, max_ref, all_ref):
        v = plgpu.layout_cast(x_ref[...], L.WGMMA)
        sum_ref[...], max_ref[...] = jnp.sum(v, 0), jnp.max(v, 0)
        all_ref[...] = jnp.full((1,), jnp.sum(jnp.max(v, 1)))

    outs = tuple(np.zeros(n, np.float32) for n in (104, 104, 1))
    params = lambda n: plgpu.CompilerParams(reduction_scratch_bytes=n)  # noqa: E731
    got = run(body, outs, x, compiler_params=params(allowed))
    want = run(body, outs, x, compiler_params=params(1 << 20))
    for g, w in zip(got, want, strict=True):
        assert g.tobytes() == w.tobytes()
    np.testing.assert_allclose(got[0], x.sum(0), rtol=1e-4, atol=1e-4)
    shapes = [plgpu.ShapeDtypeStruct(o.shape, o.dtype) for o in outs]
    low = plgpu.kernel(body, out_type=shapes, compiler_params=params(allowed)).lower(x)
    assert low.resources()["smem_bytes"] <= max(allowed, 64)


def test_scratch_of_reductions_that_is_too_small():
    def lower(n, f=jnp.sum, axis=0):
        def body(x_ref, o_ref):
            o_ref[...] = jnp.full((1,), f(x_ref[...], axis).max().astype(np.float32))

        params = plgpu.CompilerParams(reduction_scratch_bytes=n)
        out = plgpu.ShapeDtypeStruct((1,), np.float32)
        kernel = plgpu.kernel(body, out_type=out, compiler_params=params)
        return kernel.lower(plgpu.ShapeDtypeStruct((64, 64), np.float32))

    text = "Required reduction scratch size .* larger than the available scratch size .0 bytes"
    with pytest.raises(ValueError, match=text + "(.|\n)*test_layouts.py"):
        lower(0)
    lower(64)
    for n in (-1, 1.5, None, True):
        with pytest.raises(ValueError, match="reduction_scratch_bytes must be an int"):
            plgpu.CompilerParams(reduction_scratch_bytes=n)


@pytest.mark.parametrize("interpret", [True, "emulate"])
def test_scalars_from_registers_of_all_lanes(rng, interpret):
    """Elements that every lane holds become scalars without shared memory."""

    @plgpu.kernel(
        out_type=plgpu.ShapeDtypeStruct((100,), jnp.float32),
        scratch_types=[plgpu.SMEM((100,), jnp.float32)],
        interpret=interpret,
    )
    def kernel(x_ref, o_ref, s_ref):
        s_ref[...] = x_ref[...]
        a, b, c, d = plgpu.load(s_ref.at[96:100], layout=L.TMA_INDICES_4)
        o_ref[...] = x_ref[...] * (a - b) + c * d

    x = rng.integers(-9, 9, 100).astype(np.float32)
    np.testing.assert_array_equal(kernel(x), x * (x[96] - x[97]) + x[98] * x[99])
    text = kernel.lower(x, target="sm_90a").as_text("cuda")
    assert "through shared memory" not in text and text.count("ld_shared<f32") == 1
