"""Refs indexed by arrays of integers, in all memories and layouts, against NumPy: which elements
are loaded, stored and updated, where the dims of the arrays stand, and what stays untouched."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))


def random(rng, shape, dtype):
    if dtype is bool:
        return rng.random(shape) < 0.5
    return (rng.standard_normal(shape) * 20).astype(dtype)


def numbers(rng, n, shape, dtype=np.int32):
    return rng.integers(0, n, shape).astype(dtype)


LOADS = {  # what, of a ref (6, 50, 33), rows (3, 5), cols (5,)
    "rows": lambda x, i, j: x[2, i],
    "rows, part": lambda x, i, j: x[2, i, 5:30:3],
    "rows, 32 of 33": lambda x, i, j: x[2, i, :32],
    "cols": lambda x, i, j: x[1, :, j],
    "middle": lambda x, i, j: x[:4, i[:2] + 1, 20:],
    "both": lambda x, i, j: x[3, i, j],
    "outer": lambda x, i, j: x[4, i[0][:, None], j[None, :]],
    "apart": lambda x, i, j: x[j % 6, 3:41:2, j],
    "all": lambda x, i, j: x[j % 6, i, j],
    "new dims": lambda x, i, j: x[None, 1:4, i[1], None],
    "end": lambda x, i, j: x[..., j],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("names", [list(LOADS)[k::5] for k in range(5)], ids=str)
@pytest.mark.parametrize(
    "space, dtype", [("gmem", np.float32), ("gmem", np.int8), ("smem", bf16), ("smem", bool)]
)
def test_loads(run, rng, space, dtype, names):
    """All positions of arrays among ints, slices and new dims, as in NumPy."""
    loads = [LOADS[name] for name in names]
    x = random(rng, (6, 50, 33), dtype)
    i, j = numbers(rng, 49, (3, 5)), numbers(rng, 33, (5,))
    want = tuple(np.ascontiguousarray(f(x, i, j)) for f in loads)

    def body(x_ref, i_ref, j_ref, *rest):
        i, j = i_ref[...], j_ref[...]
        if space == "smem":
            rest[-1][...] = x_ref[...]
            x_ref = rest[-1]
        for f, o_ref in zip(loads, rest):
            o_ref[...] = f(x_ref, i, j)

    scratch = [plgpu.SMEM(x.shape, dtype)] if space == "smem" else []
    got = run(body, want, x, i, j, scratch_types=scratch)
    for name, a, b in zip(names, got, want):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*through shared memory")
@pytest.mark.parametrize("width", [33, 36])
def test_rows_in_vectors(run, rng, width):
    """Where the layout has neighbours in a lane: vectors only where all rows begin at multiples."""
    x, i = random(rng, (50, width), np.float32), numbers(rng, 50, (16,))

    def body(x_ref, i_ref, o_ref):
        layout = plgpu.Layout.WG_STRIDED((16, 32), 4)
        o_ref[...] = plgpu.layout_cast(x_ref[i_ref[...], :32], layout)

    want = np.ascontiguousarray(x[i, :32])
    np.testing.assert_array_equal(run(body, want, x, i), want)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32], ids=str)
def test_index_dtypes(run, rng, dtype):
    """Any integer dtype is an index, also a computed one of a loop."""
    x, i = random(rng, (200, 3), np.float32), numbers(rng, 199, (12,), dtype)

    def body(x_ref, i_ref, o_ref):
        @pl.loop(0, 3)
        def _(k):
            part = pl.ds(k * 4, 4)
            o_ref[part] = x_ref[i_ref[part]] + x_ref[i_ref[part].astype(jnp.int32) + 1]

    np.testing.assert_array_equal(run(body, x[i], x, i), x[i] + x[i.astype(int) + 1])


def test_rows_of_tables_are_vectors(run, rng):
    """Whole rows move 16 bytes at a time, an index for each."""
    x, i = random(rng, (100, 1024), bf16), numbers(rng, 100, (16,))

    def body(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    np.testing.assert_array_equal(run(body, x[i], x, i), x[i])
    if run.way == "interpret":
        text = run.kernel(body, x[i]).lower(x, i).as_text("cuda")
        assert "ld_global<bf16, 8>" in text and "ld_global<bf16, 1>" not in text


def test_tiled_smem(run, rng):
    """Rows, columns and elements of a swizzled buffer."""
    x = random(rng, (64, 96), np.float16)
    i, j = numbers(rng, 64, (33,)), numbers(rng, 96, (33,))
    want = (x[i], np.ascontiguousarray(x[:, j]), x[i, j], x.T[j])

    def body(x_ref, i_ref, j_ref, a_ref, b_ref, c_ref, d_ref, s_ref):
        s_ref[...] = x_ref[...]
        i, j = i_ref[...], j_ref[...]
        a_ref[...] = s_ref[i]
        b_ref[...] = s_ref[:, j]
        c_ref[...] = s_ref[i, j]
        d_ref[...] = s_ref.T[j]

    scratch = [plgpu.SMEM(x.shape, x.dtype, transforms=SWIZZLED)]
    for a, b in zip(run(body, want, x, i, j, scratch_types=scratch), want):
        np.testing.assert_array_equal(a, b)


@pytest.mark.covering(1)
@pytest.mark.parametrize("space", ["gmem", "smem"])
@pytest.mark.parametrize("dtype", [np.float32, bf16, np.int8], ids=str)
def test_stores(run, rng, space, dtype):
    """Stores reach the elements named and no others; += and swap read them first."""
    x, v = random(rng, (50, 33), dtype), random(rng, (20, 33), dtype)
    i, j = (rng.permutation(n)[:20].astype(np.int32) for n in (50, 33))
    want, mask = x.copy(), rng.random((50, 33)) < 0.5
    want[i] = v
    want[3:23, j] = v[:, :20]
    old = want[i, j]
    want[i, j] = 1
    want[mask] = 7

    def body(x_ref, v_ref, i_ref, j_ref, m_ref, o_ref, old_ref, *scratch):
        to = scratch[0] if scratch else o_ref
        to[...] = x_ref[...]
        i, j = i_ref[...], j_ref[...]
        to[i] = v_ref[...]
        to[3:23, j] = v_ref[:, 0:20]
        old_ref[...] = to.swap(jnp.full((20,), 1, dtype), (i, j))
        to[m_ref[...]] = jnp.array(7, dtype)
        if scratch:
            o_ref[...] = to[...]

    scratch = [plgpu.SMEM(x.shape, dtype)] if space == "smem" else []
    got, got_old = run(body, (x, old), x, v, i, j, mask, scratch_types=scratch)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_old, old)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(1000,), (7,), (3, 129)], ids=str)
@pytest.mark.parametrize("space", ["gmem", "smem"])
def test_histogram(run, rng, space, shape):
    """Equal indices all count: atomics by arrays of indices, with and without a mask."""
    at = numbers(rng, 37, shape)
    weights = rng.integers(0, 9, shape).astype(np.float32)

    def body(at_ref, w_ref, n_ref, sum_ref, *scratch):
        n, total = scratch or (n_ref, sum_ref)
        n[...] = jnp.zeros((37,), jnp.int32)
        total[...] = jnp.zeros((37,), jnp.float32)
        at = at_ref[...]
        pl.atomic_add(n, at, 1)
        pl.atomic_add(total, (at,), w_ref[...], mask=at < 20)
        plgpu.atomic_max(n.at[jnp.clip(at, 0, 0)], at * 0 + 5000)
        if scratch:
            n_ref[...] = n[...]
            sum_ref[...] = total[...]

    scratch = [plgpu.SMEM((37,), d) for d in (np.int32, np.float32)] if space == "smem" else []
    counts, sums = np.bincount(at.ravel(), minlength=37), np.zeros(37, np.float32)
    counts[0] = 5000
    np.add.at(sums, at[at < 20], weights[at < 20])
    outs = counts.astype(np.int32), sums
    got, got_sums = run(body, outs, at, weights, scratch_types=scratch)
    np.testing.assert_array_equal(got, counts)
    np.testing.assert_array_equal(got_sums, sums)


def test_atomics_return_what_was_there(run, rng):
    """Of equal indices each sees another count, and one alone finds the place free."""
    at = numbers(rng, 37, (500,))

    def body(at_ref, n_ref, rank_ref, lock_ref, first_ref):
        n_ref[...] = jnp.zeros((37,), jnp.int32)
        lock_ref[...] = jnp.zeros((37,), jnp.int32)
        at = at_ref[...]
        rank_ref[...] = pl.atomic_add(n_ref, at, 1)
        first_ref[...] = pl.atomic_cas(lock_ref, at, 0, at + 1)

    i = np.zeros(37, np.int32)
    if run.way == "host":  # which is first differs between schedules
        pytest.skip("lanes meet in other orders")
    n, rank, lock, first = run(body, (i, at, i, at), at)
    np.testing.assert_array_equal(n, np.bincount(at, minlength=37))
    for k in np.unique(at):
        assert sorted(rank[at == k]) == list(range(n[k]))
        assert lock[k] == k + 1 and sorted(first[at == k])[:2] == [0, k + 1][: n[k]]


def test_masked(run, rng):
    """Indices whose mask is false are not looked at: they may be anything."""
    x, v = random(rng, (50, 33), np.float32), random(rng, (5, 33), np.float32)
    i = np.array([3, 99, 5, -7, 0], np.int32)
    ok = (i >= 0) & (i < 50)

    def body(x_ref, v_ref, i_ref, a_ref, b_ref):
        i = i_ref[...]
        ok = ((i >= 0) & (i < 50))[:, None]
        a_ref[...] = pl.load(x_ref, (i, slice(None)), mask=ok, other=-1.0)
        b_ref[...] = x_ref[...]
        pl.store(b_ref, (i, ...), v_ref[...], mask=ok)

    a, b = run(body, (v, x), x, v, i)
    np.testing.assert_array_equal(a, np.where(ok[:, None], x[i % 50], -1))
    want = x.copy()
    want[i[ok]] = v[ok]
    np.testing.assert_array_equal(b, want)


@pytest.mark.parametrize("at", [5, -1])
@pytest.mark.parametrize("what", ["load", "store", "atomic"])
def test_outside(what, at):
    """The interpreter names the index, the ref and the line; nothing wraps."""

    def body(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[...]
        i = i_ref[...]
        if what == "load":
            o_ref[0:2] = x_ref[i]
        elif what == "store":
            o_ref[i] = x_ref[0:2]
        else:
            pl.atomic_add(o_ref, i, 1.0)

    x = np.zeros(5, np.float32)
    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((5,), x.dtype), interpret=True)
    ref = "x_ref" if what == "load" else "o_ref"
    with pytest.raises(IndexError, match=f"{what} out of bounds: index {at} .* of '{ref}'.*size 5"):
        kernel(x, np.array([1, at], np.int32))


def test_attention_over_pages(run, rng):
    """A use: keys of a cache in pages, whose numbers stand in a table."""
    pages, table = random(rng, (12, 8, 64), np.float32), rng.permutation(12)[:5].astype(np.int32)
    q = random(rng, (64,), np.float32)

    def body(q_ref, pages_ref, table_ref, o_ref):
        def page(k, best):
            keys = pages_ref[table_ref[k], (jnp.arange(8) * 3) % 8, :]
            s = jnp.sum(keys * lax.broadcast_in_dim(q_ref[...], (8, 64), (1,)), axis=1)
            return jnp.maximum(best, s.max())

        o_ref[...] = lax.fori_loop(0, 5, page, jnp.float32(-jnp.inf))

    want = (pages[table] @ q).max()
    np.testing.assert_allclose(
        run(body, np.float32(want).reshape(()), q, pages, table), want, rtol=1e-5
    )


def test_rows_for_the_tensor_cores(run, rng):
    """Rows that are gathered into swizzled memory, multiplied, and scattered under a mask."""
    x, w = random(rng, (200, 64), np.float16) / 16, random(rng, (64, 32), np.float16) / 16
    i, to = numbers(rng, 200, (64,)), rng.permutation(100)[:64].astype(np.int32)
    to[5:20] = -1
    want = np.zeros((100, 32), np.float32)
    want[to[to >= 0]] = (x[i].astype(np.float32) @ w.astype(np.float32))[to >= 0]

    def body(x_ref, w_ref, i_ref, to_ref, o_ref, a_smem, b_smem):
        a_smem[...], b_smem[...] = x_ref[i_ref[...]], w_ref[...]
        o_ref[...] = jnp.zeros((100, 32))
        plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out, to = pl.run_scoped(product, plgpu.ACC((64, 32))), to_ref[...]
        pl.store(o_ref, (to, slice(None)), out, mask=(to >= 0)[:, None])

    scratch = [plgpu.SMEM(a.shape, np.float16) for a in (x[:64], w)]
    got = run(body, want, x, w, i, to, scratch_types=scratch)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_memory_of_another_block(run, rng):
    """Indices into SMEM of the other block of a cluster."""
    x, i = random(rng, (64,), np.float32), numbers(rng, 32, (20,))

    def body(x_ref, i_ref, o_ref, smem, met):
        c = lax.axis_index("c")
        smem[...] = x_ref[pl.ds(c * 32, 32)]
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        o_ref[c] = plgpu.cluster_ref(smem, {"c": 1 - c})[i_ref[...]]
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    want = np.stack([x[32:][i], x[:32][i]])
    scratch = [plgpu.SMEM((32,), np.float32), plgpu.ClusterBarrier(collective_axes=("c",))]
    options = {"cluster": (2,), "cluster_names": ("c",), "scratch_types": scratch}
    np.testing.assert_array_equal(run(body, want, x, i, **options), want)


def test_bags_of_rows(run, rng):
    """Indices of a block that a pipeline fetches, into a table that stays in GMEM."""
    table, i = random(rng, (100, 64), np.float32), numbers(rng, 100, (30, 4))

    def body(table_ref, i_ref, o_ref):
        def step(_, i_smem, o_smem):
            o_smem[...] = sum(table_ref[i_smem[:, k]] for k in range(4))

        plgpu.emit_pipeline(
            step,
            grid=(4,),
            in_specs=[plgpu.BlockSpec((8, 4), lambda k: (k, 0))],
            out_specs=[plgpu.BlockSpec((8, 64), lambda k: (k, 0))],
            max_concurrent_steps=2,
        )(i_ref, o_ref)

    np.testing.assert_allclose(run(body, table[:30], table, i), table[i].sum(1), rtol=1e-4)
