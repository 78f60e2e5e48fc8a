"""Masked loads and stores touch what the mask allows and nothing else; atomics lose no update."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
GRID = {"grid_names": ("g",)}


def random(rng, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype == bool:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, block, dtype",
    [
        (1, 128, np.float32),
        (3, 4, np.int32),
        (7, 128, bf16),
        (127, 128, np.int8),
        (129, 256, np.float16),
        (1000, 1024, bf16),
        (1001, 1024, np.float32),
        (513, 600, np.uint8),
        (130, 256, bool),
    ],
)
def test_row_that_overhangs(run, rng, n, block, dtype):
    """A block larger than the row: nothing is read or written beyond its end, not even where that
    is still inside of the array (the next row)."""
    x = random(rng, (3, n), dtype)
    other = np.array(True if dtype is bool else 7, dtype)

    def body(x_ref, o_ref, seen_ref):
        i = lax.axis_index("g")
        mask = lax.iota(jnp.int32, block) < n
        row = (i, pl.ds(0, block))
        v = pl.load(x_ref, row, mask=mask, other=other)
        seen_ref[i] = v
        pl.store(o_ref, row, v, mask=mask)

    seen = np.broadcast_to(other, (3, block)).copy()
    seen[:, :n] = x
    got, got_seen = run(body, (x, seen), x, grid=(3,), **GRID)
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(got_seen, seen)


@pytest.mark.parametrize("transforms", [False, True])
@pytest.mark.parametrize("space", ["gmem", "smem"])
def test_random_masks(run, rng, space, transforms):
    """Any mask and `other` on any memory: what is masked keeps its value."""
    shape = (16, 128)
    x, y, mask = (random(rng, shape, t) for t in (np.float16, np.float16, bool))
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    if space == "gmem" and transforms:
        pytest.skip("GMEM has no transforms")

    def body(x_ref, y_ref, m_ref, o_ref, *scratch):
        ref = scratch[0] if scratch else o_ref
        ref[...] = x_ref[...]
        pl.store(ref, ..., y_ref[...], mask=m_ref[...])
        v = pl.load(ref, ..., mask=~m_ref[...], other=y_ref[...] + y_ref[...])
        o_ref[...] = v

    types = [] if space == "gmem" else [plgpu.SMEM(shape, np.float16, transforms=swizzled)]
    if not transforms and types:
        types = [plgpu.SMEM(shape, np.float16)]
    got = run(body, x, x, y, mask, scratch_types=types)
    np.testing.assert_array_equal(got, np.where(mask, y + y, x))


def test_masks_of_a_matrix(run, rng):
    """Masks and `other` broadcast; a block at a traced start overhangs on both sides."""
    x = random(rng, (37, 75), np.float32)

    def body(x_ref, o_ref):
        i, j = lax.axis_index("i") * 16, lax.axis_index("j") * 32
        rows = lax.broadcasted_iota(jnp.int32, (16, 1), 0) + i
        cols = lax.broadcasted_iota(jnp.int32, (1, 32), 1) + j
        block = (pl.ds(i, 16), pl.ds(j, 32))
        v = pl.load(x_ref, block, mask=(rows < 37) & (cols < 75), other=cols.astype(jnp.float32))
        inside = jnp.broadcast_to((rows < 37) & (cols < 75), (16, 32))
        pl.store(o_ref, block, v + 1.0, mask=inside)

    got = run(body, x, x, grid=(3, 3), grid_names=("i", "j"))
    np.testing.assert_array_equal(got, x + 1)


def test_scalar_masks(run, rng):
    """One condition for all; single elements; a splat value under an array mask."""
    x = random(rng, (4, 8), np.float32)
    want = np.zeros((6, 8), np.float32)
    want[0], want[1] = x[1], 5.0
    want[2, 3], want[2, 4] = x[2, 3], -1.0
    want[3, ::2] = 9.0
    want[4] = 4.0

    def body(x_ref, o_ref):
        true = lax.axis_index("g") == 0
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[0] = pl.load(x_ref, 1, mask=true)
        o_ref[1] = pl.load(x_ref, 99 + lax.axis_index("g"), mask=~true, other=5.0)
        o_ref[2, 3] = pl.load(x_ref, (2, 3), mask=true)
        o_ref[2, 4] = pl.load(x_ref, (2, 3), mask=false_of(true), other=-1.0)
        pl.store(o_ref, 3, jnp.full((8,), 9.0), mask=jnp.arange(8) % 2 == 0)
        pl.store(o_ref, 4, jnp.full((8,), 4.0), mask=true)
        pl.store(o_ref, (5, 1), 3.0, mask=~true)
        pl.store(o_ref, 5, jnp.full((8,), 4.0), mask=jnp.full((8,), ~true))

    def false_of(true):
        return ~true

    got = run(body, want, x, grid=(1,), **GRID)
    np.testing.assert_array_equal(got, want)


def test_masked_swap(run, rng):
    x = random(rng, (200,), np.int32)
    mask = random(rng, (200,), bool)

    def body(x_ref, m_ref, o_ref, old_ref):
        o_ref[...] = x_ref[...]
        old_ref[...] = pl.swap(o_ref, ..., -x_ref[...], mask=m_ref[...])

    new, old = run(body, (x, x), x, mask)
    np.testing.assert_array_equal(new, np.where(mask, -x, x))
    np.testing.assert_array_equal(old, np.where(mask, x, 0))


def lowered(body, outs, *args, **options):
    outs = plgpu.tree.map(lambda x: plgpu.ShapeDtypeStruct(x.shape, x.dtype), outs)
    return plgpu.kernel(body, out_type=outs, interpret=True, **options).lower(*args)


@pytest.mark.parametrize(
    "mask, vectors",
    [
        (lambda i: lax.iota(jnp.int32, 2048) < 1000, True),
        (lambda i: lax.iota(jnp.int32, 2048) + i * 8 < 1000, True),
        (lambda i: 2048 - 8 > lax.iota(jnp.int32, 2048), True),
        (lambda i: lax.iota(jnp.int32, 2048) <= 1007, True),
        (lambda i: (lax.iota(jnp.int32, 2048) < 1000) & (i > 3), True),
        (lambda i: ~(lax.iota(jnp.int32, 2048) >= pl.multiple_of(i, 16)), True),
        (lambda i: lax.iota(jnp.int32, 2048) < i, False),
        (lambda i: lax.iota(jnp.int32, 2048) < 1001, False),
        (lambda i: lax.iota(jnp.int32, 2048) + 3 < 1000, False),
        (lambda i: lax.iota(jnp.int32, 2048) + i * 4 < 1000, False),
        (lambda i: lax.iota(jnp.int32, 2048) % 2 == 0, False),
    ],
)
def test_vectors_of_masked_accesses(mask, vectors):
    """Accesses are 16 bytes wide; where the mask provably changes only between vectors each of
    them asks once, else elements are asked one by one where a vector is cut."""

    def body(x_ref, o_ref):
        i = lax.axis_index("g")
        row = (i, pl.ds(0, 2048))
        pl.store(o_ref, row, pl.load(x_ref, row, mask=mask(i)), mask=mask(i))

    x = np.zeros((4, 2048), bf16)
    low = lowered(body, x, x, grid=(4,), **GRID)
    entry = low.as_text("cuda").split("__global__")[1]
    assert "ld_global<bf16, 8>" in entry and "st_global<bf16, 8>" in entry
    assert ("_global<bf16, 1>" not in entry) == vectors
    assert ("whole" not in entry) == vectors
    used = low.resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0


def test_a_true_mask_outside_raises():
    """The interpreter checks exactly those elements whose mask is true."""

    def body(n, x_ref, o_ref):
        o_ref[...] = pl.load(x_ref, pl.ds(0, 128), mask=lax.iota(jnp.int32, 128) < n)

    def writes(n, x_ref, o_ref):
        pl.store(o_ref, pl.ds(0, 256), jnp.zeros(256), mask=lax.iota(jnp.int32, 256) < n)

    x = np.zeros(100, np.float32)
    out = plgpu.ShapeDtypeStruct((128,), np.float32)
    for f, limit in ((body, 100), (writes, 128)):
        for n in (limit, limit + 1):
            k = plgpu.kernel(lambda x, o, f=f, n=n: f(n, x, o), out_type=out, interpret=True)
            if n == limit:
                k(x)
                continue
            with pytest.raises(IndexError, match=r"masked (load|store) out of bounds.*\n.*test_ma"):
                k(x)


@pytest.mark.parametrize(
    "use, error, text",
    [
        (lambda r: pl.load(r, ..., mask=jnp.zeros(8)), TypeError, "mask must be a bool array"),
        (lambda r: pl.load(r, ..., mask=jnp.zeros(5, bool)), ValueError, "does not broadcast"),
        (lambda r: pl.load(r, ..., other=1.0), ValueError, "only for a load with a mask"),
        (lambda r: pl.load(r, ..., mask=True, other=jnp.zeros(8, jnp.int32)), ValueError, "int32"),
        (lambda r: pl.store(r, ..., 1.0, mask=True), ValueError, "Invalid shape for `swap`"),
        (lambda r: pl.load(5, ...), TypeError, "must be a ref"),
        (lambda r: pl.load(r, ..., flag=3), TypeError, "unexpected argument 'flag'"),
        (lambda r: pl.load(r, ..., memory_space=1), TypeError, "goes to registers"),
        (lambda r: pl.atomic_min(r, ..., 1.0), NotImplementedError, "atomic_min on float32"),
        (lambda r: plgpu.atomic_add(r, 1.0), ValueError, r"val has shape \(\) and ref \(8,\)"),
        (lambda r: pl.atomic_add(r, ..., jnp.ones(8, jnp.int32)), ValueError, "dtype int32"),
        (lambda r: plgpu.atomic_add(3, 1.0), TypeError, "ref must be a ref"),
        (lambda r: pl.atomic_or(r, 0, 1.0), NotImplementedError, "atomic_or on float32"),
    ],
)
def test_errors(use, error, text):
    def body(o_ref):
        o_ref[...] = jnp.zeros(8)
        use(o_ref)

    k = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((8,), np.float32), interpret=True)
    with pytest.raises(error, match=text):
        k()


def test_operands_are_read_only():
    def body(x_ref, o_ref):
        pl.atomic_add(x_ref, 0, 1)
        o_ref[0] = 0

    x = np.zeros(4, np.int32)
    k = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((4,), np.int32), interpret=True)
    with pytest.raises(ValueError, match="read-only"):
        k(x)


# ---- atomics -------------------------------------------------------------------------------------

COMBINE = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda a, b: b,
}
KINDS = [(k, t) for k in COMBINE for t in (np.int32, np.uint32)] + [
    ("add", np.float32),
    ("xchg", np.float32),
    *((k, t) for k in ("add", "max", "min") for t in (np.float16, bf16)),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("space", ["gmem", "smem"])
@pytest.mark.parametrize("kind, dtype", KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_atomics(run, rng, kind, dtype, space):
    """Every operation on each dtype, with and without a result, under a mask; rows of 130."""
    shape = (3, 130)
    x, y = random(rng, shape, dtype), random(rng, shape, dtype)
    mask = random(rng, shape, bool)

    def body(x_ref, y_ref, m_ref, o_ref, old_ref, *scratch):
        ref = scratch[0] if scratch else o_ref
        ref[...] = x_ref[...]
        f = getattr(pl, f"atomic_{kind}")
        m = m_ref[...]
        old = f(ref, ..., y_ref[...], mask=m)
        if kind != "xchg":
            getattr(plgpu, f"atomic_{kind}")(ref.at[1], y_ref[1])
        f(ref, 2, y_ref[0, 0])
        old_ref[...] = jnp.where(m, old, x_ref[...])
        if scratch:
            o_ref[...] = ref[...]

    want = np.where(mask, COMBINE[kind](x, y), x)
    if kind != "xchg":
        want[1] = COMBINE[kind](want[1], y[1])
    want[2] = COMBINE[kind](want[2], y[0, 0])
    types = [plgpu.SMEM(shape, dtype)] if space == "smem" else []
    got, old = run(body, (x, x), x, y, mask, scratch_types=types)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(old, x)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32])
def test_compare_and_swap(run, rng, dtype):
    x, y = random(rng, (70,), dtype), random(rng, (70,), dtype)
    expected = np.where(random(rng, (70,), bool), x, y)

    def body(x_ref, y_ref, e_ref, o_ref, old_ref):
        o_ref[...] = x_ref[...]
        old_ref[...] = pl.atomic_cas(o_ref, ..., e_ref[...], y_ref[...])

    got, old = run(body, (x, x), x, y, expected)
    np.testing.assert_array_equal(got, np.where(x == expected, y, x))
    np.testing.assert_array_equal(old, x)


def test_counter_of_threads(run):
    """Two threads draw numbers from one counter: each number comes once, and all lanes of the
    thread that drew it have it."""

    def body(o_ref, smem, bar):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            smem[0] = jnp.int32(0)

        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        for _ in range(3):
            n = pl.atomic_add(smem, 0, 1)
            o_ref[n] = jnp.full((128,), n)
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        o_ref[6 + wg] = jnp.full((128,), smem[0])

    got = run(
        body,
        np.zeros((8, 128), np.int32),
        scratch_types=[plgpu.SMEM((1,), np.int32), plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="wg",
    )
    want = np.array([0, 1, 2, 3, 4, 5, 6, 6])[:, None]
    np.testing.assert_array_equal(got, np.broadcast_to(want, (8, 128)))


def test_histogram(run, rng):
    """Several lanes meet in one element."""
    x = rng.integers(0, 8, (4, 128)).astype(np.int32)

    def body(x_ref, o_ref, bins):
        bins[...] = jnp.zeros((8,), jnp.int32)
        for row in range(4):

            @pl.loop(0, 128)
            def _(k, row=row):
                plgpu.atomic_add(bins.at[x_ref[row, k]], 1)

        o_ref[...] = bins[...]

    got = run(body, np.zeros(8, np.int32), x, scratch_types=[plgpu.SMEM((8,), np.int32)])
    np.testing.assert_array_equal(got, np.bincount(x.ravel(), minlength=8))


@pytest.mark.filterwarnings("ignore:.*converted from layout")
def test_layouts_of_atomics(run, rng):
    """An update by an array with copies in several lanes happens once; a result that somebody
    wants has none."""
    x = random(rng, (64, 32), np.int32)

    def body(x_ref, o_ref, old_ref):
        o_ref[...] = jnp.zeros((2, 64), jnp.int32)
        rows = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA).sum(1)
        plgpu.atomic_add(o_ref.at[0], rows)
        old = pl.atomic_add(o_ref, 0, rows)
        old_ref[...] = old
        pl.atomic_max(o_ref, 1, rows)

    got, old = run(body, (np.zeros((2, 64), np.int32), np.zeros(64, np.int32)), x)
    rows = x.sum(1)
    np.testing.assert_array_equal(got, [2 * rows, np.maximum(rows, 0)])
    np.testing.assert_array_equal(old, rows)


@pytest.mark.parametrize("layout", ["WGMMA", "WGMMA_TRANSPOSED", "rows"])
def test_atomics_of_one_element(run, rng, layout):
    """Only one lane holds the element, or several do; with a mask, with a result that is used."""
    x = random(rng, (1, 1), np.int32) | 1

    def body(x_ref, m_ref, o_ref, old_ref):
        for k in range(5):
            o_ref[k] = jnp.full((1, 1), 5, jnp.int32)
        at = lax.broadcasted_iota(jnp.int32, (1, 1), 1) + x_ref[...]
        if layout == "rows":  # copies in four lanes
            rows = plgpu.load(x_ref.reshape(1), layout=plgpu.Layout.WGMMA.reduce(1))
            v = lax.broadcast_in_dim(rows, (1, 1), (0,))
        else:
            v = plgpu.layout_cast(at, getattr(plgpu.Layout, layout))
        plgpu.atomic_add(o_ref.at[0], v)
        pl.atomic_xor(o_ref, 1, v, mask=m_ref[0:1])
        pl.atomic_xor(o_ref, 2, v, mask=m_ref[1:2])
        old_ref[0] = pl.atomic_max(o_ref, 3, v)
        old_ref[1] = pl.atomic_cas(o_ref, 4, jnp.full((1, 1), 5, jnp.int32), v)

    outs = np.zeros((5, 1, 1), np.int32), np.zeros((2, 1, 1), np.int32)
    got, old = run(body, outs, x, np.array([[True], [False]]))
    v = x[0, 0]
    np.testing.assert_array_equal(got.ravel(), [5 + v, 5 ^ v, 5, max(5, v), v])
    np.testing.assert_array_equal(old.ravel(), [5, 5])


def test_unused_results_are_reductions():
    """No result is asked of the memory where nobody wants one."""

    def body(x_ref, o_ref):
        pl.atomic_add(o_ref, 0, x_ref[...])

    x = np.zeros(256, np.float32)
    text = lowered(body, np.zeros((2, 256), np.float32), x).as_text("cuda")
    assert "red_add_f32_global(" in text and not re.search(r"\batom_", text)
