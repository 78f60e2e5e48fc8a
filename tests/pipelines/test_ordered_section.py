"""Threads that take turns, work that few warps need, arrivals of warps."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

f32, i32 = np.float32, np.int32


def text_of(run, body, out, *args, **options):
    text = run.kernel(body, out, **options).lower(*args).as_text("cuda")
    return text[text.index('extern "C"') :]


@pytest.mark.parametrize("threads,ring", [(2, 2), (3, 3), (4, 3)])
def test_sections_go_round(run, threads, ring):
    """What is counted in turns is counted in order, whatever the schedule."""

    def body(o, count):
        me = lax.axis_index("wg")

        @pl.when(me < ring)
        def _():
            def step(i, _):
                with plgpu.ext.ordered_section(ring):
                    # one lane's old value decides, so the others must not have gone before
                    o[i * ring + me] = count[0]
                    count[0] = count[0] + 1

            @pl.when(me == 0)
            def _():
                with plgpu.ext.ordered_section(ring):
                    count[0] = jnp.int32(0)

            @pl.when(me > 0)
            def _():
                with plgpu.ext.ordered_section(ring):
                    pass

            lax.fori_loop(0, 5, step, None)

    out = plgpu.ShapeDtypeStruct((5 * ring,), i32)
    options = dict(scratch_types=[plgpu.SMEM((1,), i32)], num_threads=threads, thread_name="wg")
    np.testing.assert_array_equal(run(body, out, **options), np.arange(5 * ring))
    if run.way != "cuda":
        assert "section_enter" in text_of(run, body, out, **options)


def test_one_thread_needs_no_turn(run):
    def body(o):
        with plgpu.ext.ordered_section(1):
            o[...] = jnp.full((8,), 3.0, f32)

    out = plgpu.ShapeDtypeStruct((8,), f32)
    np.testing.assert_array_equal(run(body, out), np.full(8, 3, f32))


def of(body, threads=2):
    out = plgpu.ShapeDtypeStruct((4,), f32)
    return plgpu.kernel(body, out_type=out, num_threads=threads, thread_name="wg", interpret=True)


@pytest.mark.parametrize(
    "n,error,words",
    [
        (3, ValueError, "3 threads take turns, the kernel has 2"),
        (0, ValueError, "must be positive"),
        ("a", TypeError, "num_threads"),
    ],
)
def test_rings_that_are_refused(n, error, words):
    def body(o):
        with plgpu.ext.ordered_section(n):
            pass

    with pytest.raises(error, match=words):
        of(body)()


def test_one_ring_in_a_kernel():
    def body(o):
        with plgpu.ext.ordered_section(2):
            pass
        with plgpu.ext.ordered_section(3):
            pass

    with pytest.raises(ValueError, match="3 threads take turns here, 2 elsewhere"):
        of(body, 3)()


def test_a_ring_needs_named_barriers():
    def body(o):
        with plgpu.ext.ordered_section(8):
            pass

    with pytest.raises(ValueError, match="together at most 15"):
        of(body, 8)()


def test_sections_that_nobody_leaves():
    """Found on the interpreter, with the line."""

    def unequal(o):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            with plgpu.ext.ordered_section(2):
                pass

    with pytest.raises(ValueError, match="it is thread 1's turn"):
        of(unequal)()

    def waiting(o):
        @pl.when(lax.axis_index("wg") == 1)
        def _():
            with plgpu.ext.ordered_section(2):
                pass

    with pytest.raises(
        plgpu.DeadlockError, match="ordered_section at .*waits; it is the turn of thread 0"
    ):
        of(waiting)()

    def stranger(o):
        with plgpu.ext.ordered_section(2):
            pass

    with pytest.raises(ValueError, match="thread 2 is not one of them"):
        of(stranger, 3)()

    def twice(o):
        with plgpu.ext.ordered_section(2):
            with plgpu.ext.ordered_section(2):
                pass

    with pytest.raises(ValueError, match="has its turn already"):
        of(twice)()


# ---- warp_where ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["none", "one", "some", "all"])
def test_lazy_where_is_where(run, rng, rows):
    """Whole rows, single elements, and a carried accumulator; a few warps or none go."""

    def body(x, m, o, p):
        v = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        mask = plgpu.load(m, layout=plgpu.Layout.WGMMA.reduce(1)) > 0

        def step(i, v):
            grown = lax.broadcast_in_dim(mask, (128, 32), [0])
            return plgpu.ext.warp_where(grown, lambda: v * 2 + 1, v)

        o[...] = lax.fori_loop(0, 3, step, v)
        a, b = plgpu.ext.warp_where(v > 1.5, lambda: (v - 1, jnp.exp2(v)), (v, -v))
        p[...] = a + b

    x = rng.standard_normal((128, 32)).astype(f32)
    m = np.zeros(128, i32)
    m[{"none": [], "one": [77], "some": slice(30, 90, 7), "all": slice(None)}[rows]] = 1
    shape = plgpu.ShapeDtypeStruct((128, 32), f32)
    got = run(body, (shape, shape), x, m)
    want = x.copy()
    for _ in range(3):
        want = np.where(m[:, None] > 0, want * 2 + 1, want)
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    np.testing.assert_allclose(
        got[1], np.where(x > 1.5, x - 1 + np.exp2(x), x - x), rtol=1e-5, atol=1e-6
    )
    if run.way != "cuda":
        assert "warp_any" in text_of(run, body, (shape, shape), x, m)


@pytest.mark.parametrize("rows", ["none", "one", "some", "all"])
def test_lazy_where_along_rows(run, rng, rows):
    """One true element counts for its row, of results of several widths; reductions of rows."""

    def body(x, m, o, p, q):
        v = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        mask = plgpu.load(m, layout=plgpu.Layout.WGMMA) > 0
        top = jnp.max(v, axis=1)

        def work():
            least = jnp.min(v, axis=1)
            return v - lax.broadcast_in_dim(least, v.shape, [0]), v[:, :8] * 2, least

        o[...], p[...], q[...] = plgpu.ext.warp_where(mask, work, (v, v[:, :8], top), along=1)

    x = rng.standard_normal((64, 32)).astype(f32)
    m = np.zeros((64, 8), i32)
    m[{"none": [], "one": [33], "some": slice(3, 60, 7), "all": slice(None)}[rows], 5] = 1
    shapes = [plgpu.ShapeDtypeStruct(s, f32) for s in ((64, 32), (64, 8), (64,))]
    got = run(body, tuple(shapes), x, m)
    there, least = m.any(1), x.min(1)
    np.testing.assert_allclose(
        got[0], np.where(there[:, None], x - least[:, None], x), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_array_equal(got[1], np.where(there[:, None], x[:, :8] * 2, x[:, :8]))
    np.testing.assert_array_equal(got[2], np.where(there, least, x.max(1)))


@pytest.mark.parametrize("rows", ["none", "one", "some", "all"])
def test_lazy_where_without_a_selection(run, rng, rows):
    """What is computed is equal where the mask is false; 16-bit words that a barrier holds."""

    def body(x, o, p, q):
        v = plgpu.load(x, layout=plgpu.Layout.WGMMA)

        def weights(top):
            y = v - lax.broadcast_in_dim(top, v.shape, [0])
            return y.astype(jnp.float16), jnp.sum(y, axis=1)

        def step(i, carry):
            _, total, top = carry
            found, sums = lax.optimization_barrier(weights(top))
            mask = v > lax.broadcast_in_dim(top, v.shape, [0]) + 50

            def again():
                wrong = jnp.any(mask, axis=1)
                new = jnp.where(wrong, jnp.max(v, axis=1), top)
                found, sums = weights(new)
                return found, total + sums, new

            same = found, total + sums, top
            return plgpu.ext.warp_where(mask, again, same, select=False)

        zeros = jnp.zeros((128,), f32)
        start = jnp.zeros((128, 32), jnp.float16), zeros, zeros
        o[...], p[...], q[...] = lax.fori_loop(0, 3, step, start)

    x = rng.random((128, 32)).astype(f32)
    there = {"none": [], "one": [77], "some": slice(30, 90, 7), "all": slice(None)}[rows]
    x[there, 5] += 100
    shapes = ((128, 32), jnp.float16), ((128,), f32), ((128,), f32)
    got = run(body, tuple(plgpu.ShapeDtypeStruct(*s) for s in shapes), x)
    top = np.where(x.max(1) > 50, x.max(1), 0)
    y = x - top[:, None]
    np.testing.assert_allclose(got[0].astype(f32), y, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(got[1], 3 * y.sum(1), rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(got[2], top)


def elsewhere(v):
    return plgpu.layout_cast(v, plgpu.Layout.WG_STRIDED(v.shape, vec_size=1)) + 1


@pytest.mark.parametrize(
    "work,words",
    [
        (lambda x, v: v * lax.broadcast_in_dim(jnp.sum(v, axis=0), v.shape, [1]), "reduce"),
        (lambda x, v: v + plgpu.load(x, layout=plgpu.Layout.WGMMA), "load"),
        (lambda x, v: plgpu.layout_cast(elsewhere(v), plgpu.Layout.WGMMA), "layout_cast"),
    ],
)
def test_lazy_where_refuses_what_lanes_do_together(work, words):
    def body(x, o):
        v = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        o[...] = plgpu.ext.warp_where(v > 0, lambda: work(x, v), v)

    x = np.zeros((64, 16), f32)
    with pytest.raises(ValueError, match=f"warp_where: {words} is not possible"):
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((64, 16), f32), interpret=True)(x)


def test_lazy_where_checks_its_arguments():
    def body(bad, o):
        bad(jnp.zeros((4,), f32))

    for bad, error, words in (
        (lambda v: plgpu.ext.warp_where(v, lambda: v, v), TypeError, "mask must be a bool array"),
        (
            lambda v: plgpu.ext.warp_where(True, lambda: v, v),
            TypeError,
            "mask must be a bool array",
        ),
        (
            lambda v: plgpu.ext.warp_where(v > 0, lambda: (v, v), v),
            TypeError,
            "differ in structure",
        ),
        (
            lambda v: plgpu.ext.warp_where(v > 0, lambda: v, v, along=0),
            ValueError,
            "along must be the last dim of a mask with two dims or more",
        ),
    ):
        with pytest.raises(error, match=words):
            of(lambda o, bad=bad: body(bad, o), 1)()


# ---- arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [False, True])
def test_warps_arrive_by_themselves(run, rng, lane):
    """A thread that read what another overwrites then: each warp says so for itself; a producer of
    one lane counts for four."""

    def body(x, o, s, full, empty, told):
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            def fetch(i, _):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(empty))
                plgpu.copy_gmem_to_smem(x.at[i], s, full)
                if lane:
                    plgpu.barrier_arrive(told)

            lax.fori_loop(0, 4, fetch, None)
            plgpu.barrier_wait(empty)

        @pl.when(me == 0)
        def _():
            def use(i, _):
                if lane:
                    plgpu.barrier_wait(told)
                plgpu.barrier_wait(full)
                v = s[...]
                plgpu.barrier_arrive(empty)
                o[i] = v + 1

            lax.fori_loop(0, 4, use, None)
            if lane:  # makes the barrier one that warps arrive at
                plgpu.barrier_arrive(told)
                plgpu.barrier_wait(told)

    x = rng.standard_normal((4, 256)).astype(f32)
    scratch = [plgpu.SMEM((256,), f32), *[plgpu.Barrier() for _ in range(3)]]
    options = dict(scratch_types=scratch, num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(run(body, x, x, **options), x + 1)
    if run.way != "cuda":
        text = text_of(run, body, x, x, **options)
        assert "if (lane == 0) mbarrier_arrive(" in text
        assert bool(re.search(r"mbarrier_arrive_n<4>\(", text)) == lane


def test_warps_do_not_arrive_beside_a_copy(run, rng):
    """A copy arrives once, so there one lane arrives for all."""

    def body(x, o, s, t, first, both):
        plgpu.copy_gmem_to_smem(x.at[0], s, first)
        plgpu.barrier_wait(first)
        plgpu.copy_gmem_to_smem(x.at[1], t, both)
        v = s[...]
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)
        o[...] = v + t[...]

    x = rng.standard_normal((2, 256)).astype(f32)
    scratch = [plgpu.SMEM((256,), f32)] * 2 + [plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)]
    np.testing.assert_array_equal(run(body, x[0], x, scratch_types=scratch), x[0] + x[1])


def test_few_rows_take_few_registers(run, rng):
    """8 rows that are reduced and broadcast: 16 registers of a lane, not those of 64 rows."""

    def body(x, o):
        v = x[...]
        o[...] = v - lax.broadcast_in_dim(jnp.max(v, axis=1), v.shape, [0])

    x = rng.standard_normal((8, 256)).astype(f32)
    np.testing.assert_array_equal(run(body, x, x), x - x.max(1, keepdims=True))
    if run.way != "cuda":
        text = text_of(run, body, x, x)
        assert max(int(n) for n in re.findall(r"\bf32 \w+\[(\d+)\];", text)) == 16
