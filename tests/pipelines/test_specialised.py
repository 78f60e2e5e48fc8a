"""Generated code of threads that specialise: what one lane does alone, what products begin with,
where lanes and blocks meet. Each case is looked at as text, compiled, and run."""

import functools
import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

f32, f16, i32 = np.float32, np.float16, np.int32
N, STEPS = 1024, 6
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def text_of(run, body, out, *args, **options):
    text = run.kernel(body, out, **options).lower(*args).as_text("cuda")
    return re.sub(r"^#line.*\n| *//.*$", "", text[text.index('extern "C"') :], flags=re.M)


def alone(text):
    """What one lane does alone: the texts of all elected blocks."""
    out, lines = [], text.split("\n")
    for k, line in enumerate(lines):
        if not line.endswith("if (warp == 0 && elect_one()) {"):
            continue
        end = line[: len(line) - len(line.lstrip())] + "}"
        out.append("\n".join(lines[k + 1 : lines.index(end, k)]))
    return out


def ring(slots=2, **options):
    return dict(
        scratch_types=[
            plgpu.SMEM((slots, N), f32),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        num_threads=2,
        thread_name="wg",
        **options,
    )


def fetch(x, s, full, empty, steps=STEPS, slots=2):
    def step(i, _):
        pl.when(i >= slots)(lambda: plgpu.barrier_wait(empty.at[i % slots]))
        plgpu.copy_gmem_to_smem(x.at[i], s.at[i % slots], full.at[i % slots])

    lax.fori_loop(0, steps, step, None)
    for k in range(slots):
        plgpu.barrier_wait(empty.at[k])


def double(o, s, full, empty, steps=STEPS, slots=2):
    def step(i, _):
        plgpu.barrier_wait(full.at[i % slots])
        o[i] = s[i % slots] * 2
        plgpu.barrier_arrive(empty.at[i % slots])

    lax.fori_loop(0, steps, step, None)


# ---- one lane ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cond", "two whens", "pairs", "tiles"])
def test_a_producer_is_one_lane(run, rng, how):
    """A loop of waits and copies is one region, however the branch is written, also in a loop that
    all threads run."""

    def body(x, o, s, full, empty):
        me = lax.axis_index("wg")
        producer = functools.partial(fetch, x, s, full, empty)
        consumer = functools.partial(double, o, s, full, empty)
        if how == "cond":
            lax.cond(me == 1, producer, consumer)
        elif how == "pairs":
            pl.when((me + 1) // 2 == 1)(producer)
            pl.when((me + 1) % 2 == 1)(consumer)
        elif how == "tiles":
            lax.fori_loop(0, 1, lambda i, _: lax.cond(me > 0, producer, consumer), None)
        else:
            pl.when(me == 1)(producer)
            pl.when(me == 0)(consumer)

    x = rng.standard_normal((STEPS, N)).astype(f32)
    (region,) = alone(text_of(run, body, x, x, **ring()))
    assert "barrier_wait" in region and "warpgroup_sync" not in region and "for (" in region
    np.testing.assert_array_equal(run(body, x, x, **ring()), 2 * x)


def test_lanes_that_go_on_wait_themselves(run, rng):
    """One lane starts the copy, but all of them wait for it: a meeting afterwards costs more."""

    def body(x, o, s, bar):
        plgpu.copy_gmem_to_smem(x, s, bar)
        plgpu.barrier_wait(bar)
        o[...] = s[...] * 2

    x = rng.standard_normal(N).astype(f32)
    options = dict(scratch_types=[plgpu.SMEM((N,), f32), plgpu.Barrier()])
    text = text_of(run, body, x, x, **options)
    assert "barrier_wait" in text and not any("barrier_wait" in r for r in alone(text))
    np.testing.assert_array_equal(run(body, x, x, **options), 2 * x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("known", ["all", "one side", "some"])
def test_waits_that_know_their_phase(run, rng, slots, known):
    """A wait that is told its phase needs no state, but keeps it where another wait needs it."""

    def body(x, o, s, full, empty):
        me = lax.axis_index("wg")

        def phase_of(bar, i):
            by_side = {"all": True, "one side": bar is full, "some": False}[known]
            return {"phase": i // slots} if by_side else {}

        @pl.when(me == 1)
        def _():
            def step(i, _):
                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(empty.at[i % slots], **phase_of(empty, i - slots))

                plgpu.copy_gmem_to_smem(x.at[i], s.at[i % slots], full.at[i % slots])

            lax.fori_loop(0, STEPS, step, None)
            for k in range(slots):
                n = (STEPS - 1 - k) // slots
                plgpu.barrier_wait(empty.at[k], phase=n)

        @pl.when(me == 0)
        def _():
            def step(i, _):
                plgpu.barrier_wait(full.at[i % slots], **phase_of(full, i))
                o[i] = s[i % slots] * 2
                plgpu.barrier_arrive(empty.at[i % slots])

            lax.fori_loop(0, STEPS, step, None)

    x = rng.standard_normal((STEPS, N)).astype(f32)
    words = {"all": 0, "one side": 1, "some": 2}[known]
    assert text_of(run, body, x, x, **ring(slots)).count("_phase = 0;") == words
    np.testing.assert_array_equal(run(body, x, x, **ring(slots)), 2 * x)


def test_phases_of_a_scope_that_comes_again(run, rng):
    """The kernel counts from the beginning of the scope, the barrier goes on."""

    def body(x, o):
        def step(i, _):
            def inside(s, bar):
                for k in range(3):
                    plgpu.copy_gmem_to_smem(x.at[i], s, bar)
                    plgpu.barrier_wait(bar, phase=k)
                o[i] = s[...]

            pl.run_scoped(inside, plgpu.SMEM((N,), f32), plgpu.Barrier())

        lax.fori_loop(0, STEPS, step, None)

    x = rng.standard_normal((STEPS, N)).astype(f32)
    np.testing.assert_array_equal(run(body, x, x), x)


def test_a_barrier_that_all_lanes_wait_for(run, rng):
    """The thread waits for `empty` once with all its lanes: then it always does."""

    def body(x, o, s, full, empty):
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            fetch(x, s, full, empty, steps=2)
            o[2] = s[0] + 1
            plgpu.barrier_arrive(full.at[0])
            plgpu.barrier_wait(empty.at[0])
            o[3] = s[1] + 1

        @pl.when(me == 0)
        def _():
            double(o, s, full, empty, steps=2)
            plgpu.barrier_wait(full.at[0])
            plgpu.barrier_arrive(empty.at[0])

    x = rng.standard_normal((4, N)).astype(f32)
    text = text_of(run, body, x, x, **ring())
    assert not any("barrier_wait" in region for region in alone(text))
    want = np.stack([x[0] * 2, x[1] * 2, x[0] + 1, x[1] + 1])
    np.testing.assert_array_equal(run(body, x, x, **ring()), want)


OVERLAPS = {
    "less": (lambda t: t < 2, lambda t: t > 0),
    "equal": (lambda t: t == 1, lambda t: (t > 0) & (t < 2)),
    "unequal": (lambda t: t != 2, lambda t: t != 0),
    "at most": (lambda t: t <= 1, lambda t: t >= 1),
    "both": (lambda t: (t > 0) & (t < 2), lambda t: (t == 0) | (t == 1)),
    "neither": (lambda t: ~(t == 0), lambda t: ~(t > 1)),
    "sums": (lambda t: t + 1 == 2, lambda t: t * 2 - 1 > 0),
    "select": (lambda t: jnp.where(t == 1, 5, 3) > 4, lambda t: jnp.minimum(t, 1) == 1),
}


@pytest.mark.parametrize("which", OVERLAPS)
def test_a_thread_that_waits_alone_and_together(run, rng, which):
    """Thread 1 takes both branches: its lanes must agree on the phase in the second one."""
    first, second = OVERLAPS[which]

    def body(x, o, s, bar):
        wg = lax.axis_index("wg")

        @pl.when(first(wg))
        def _():
            plgpu.copy_gmem_to_smem(x.at[wg], s.at[wg], bar.at[wg])
            plgpu.barrier_wait(bar.at[wg])

        @pl.when(second(wg))
        def _():
            plgpu.copy_gmem_to_smem(x.at[wg + 3], s.at[wg], bar.at[wg])
            plgpu.barrier_wait(bar.at[wg])
            o[wg] = s[wg]

        @pl.when((wg == 0) | (wg == 2))
        def _():
            o[wg] = jnp.zeros((N,), f32)

    x = rng.standard_normal((6, N)).astype(f32)
    scratch = [plgpu.SMEM((3, N), f32), plgpu.Barrier(num_barriers=3)]
    options = dict(scratch_types=scratch, num_threads=3, thread_name="wg")
    got = run(body, plgpu.ShapeDtypeStruct((3, N), f32), x, **options)
    np.testing.assert_array_equal(got[1], x[4])


def test_a_scope_of_all_threads_is_entered_by_all(run, rng):
    """Even where a lane of each could do all that is in it."""

    def body(x, o):
        wg = lax.axis_index("wg")

        def scope(s, bar):
            plgpu.copy_gmem_to_smem(x.at[wg], s.at[wg], bar.at[wg])
            plgpu.barrier_wait(bar.at[wg])
            plgpu.copy_smem_to_gmem(s.at[wg], o.at[wg])
            plgpu.wait_smem_to_gmem(0)

        types = plgpu.SMEM((2, N), f32), plgpu.Barrier(num_barriers=2)
        pl.run_scoped(scope, *types, collective_axes="wg")

    x = rng.standard_normal((2, N)).astype(f32)
    np.testing.assert_array_equal(run(body, x, x, num_threads=2, thread_name="wg"), x)


def test_what_one_lane_has_waited_for_is_there(run, rng):
    """For the lanes that come later, in another branch."""

    def body(x, o, s, bar):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            def step(k, _):
                plgpu.copy_gmem_to_smem(x.at[k], s.at[k], bar)
                plgpu.barrier_wait(bar)

            lax.fori_loop(0, 4, step, None)

        @pl.when(wg == 0)
        def _():
            o[...] = s[...]

    x = rng.standard_normal((4, N)).astype(f32)
    scratch = [plgpu.SMEM((4, N), f32), plgpu.Barrier()]
    options = dict(scratch_types=scratch, num_threads=2, thread_name="wg")
    text = text_of(run, body, x, x, **options)
    assert alone(text) and re.search(r"\n( +)warp_sync\(\);\n\1warpgroup_sync\(wg\);", text)
    np.testing.assert_array_equal(run(body, x, x, **options), x)


@pytest.mark.parametrize("branch", [False, True])
def test_the_end_of_a_step_is_not_the_end(run, rng, branch):
    """What the end of a loop's body waits for, the next step reads, also where nothing comes
    after the loop and where only one thread takes it."""
    n = 4

    def loop(x, o, s, bar):
        @pl.loop(0, n + 1)
        def _(i):
            @pl.when(i > 0)
            def _():
                o[i - 1] = s[...]

            plgpu.copy_gmem_to_smem(x.at[i % n], s, bar)
            plgpu.barrier_wait(bar)

    def body(*refs):
        pl.when(lax.axis_index("wg") == 0)(lambda: loop(*refs)) if branch else loop(*refs)

    x = rng.standard_normal((n, 8 * N)).astype(f32)
    options = dict(scratch_types=[plgpu.SMEM((8 * N,), f32), plgpu.Barrier()])
    if branch:
        options |= dict(num_threads=2, thread_name="wg")
    for region in alone(text_of(run, body, x, x, **options)):
        assert "barrier_wait" not in region
    np.testing.assert_array_equal(run(body, x, x, **options), x)


def test_lanes_that_need_what_one_waited_for(run, rng):
    """A wait that is not the last thing a thread does is done by all lanes; loops of copies alone
    need one election."""

    def body(x, o, s, bar):
        def copy(i, _):
            plgpu.copy_gmem_to_smem(x.at[i], s.at[i], bar.at[i])

        lax.fori_loop(0, 3, copy, None)
        for i in range(3):
            plgpu.barrier_wait(bar.at[i])
            o[i] = s[i] + i

    x = rng.standard_normal((3, N)).astype(f32)
    scratch = [plgpu.SMEM(x.shape, f32), plgpu.Barrier(num_barriers=3)]
    (region,) = alone(text_of(run, body, x, x, scratch_types=scratch))
    assert "for (" in region and "barrier_wait" not in region
    want = x + np.arange(3, dtype=f32)[:, None]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), want)


def test_values_from_inside_are_not_used_outside(run, rng):
    """A loop of copies whose carry is used after it is run by all lanes."""

    def body(x, o, s, bar):
        def copy(i, where):
            plgpu.copy_gmem_to_smem(x.at[where], s.at[i], bar)
            return (where * 3 + 1) % 4

        where = lax.fori_loop(0, 3, copy, jnp.int32(0))
        plgpu.barrier_wait(bar)
        for i in range(3):
            o[i] = s[i] + where.astype(f32)

    x = rng.standard_normal((4, N)).astype(f32)
    scratch = [plgpu.SMEM((3, N), f32), plgpu.Barrier(num_arrivals=3)]
    out = plgpu.ShapeDtypeStruct((3, N), f32)
    (region,) = alone(text_of(run, body, out, x, scratch_types=scratch))
    assert "for (" not in region
    np.testing.assert_array_equal(run(body, out, x, scratch_types=scratch), x[[0, 1, 0]] + 1)


def test_scalars_in_a_producer(run, rng):
    """Scalar loads and stores, branches and a loop without a known end, in one lane."""

    def body(x, order, o, s, full, empty, which):
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            def more(c):
                return c[1] >= 0

            def step(c):
                n, row = c
                pl.when(n >= 2)(lambda: plgpu.barrier_wait(empty.at[n % 2]))
                which[n % 2] = row
                plgpu.copy_gmem_to_smem(x.at[row], s.at[n % 2], full.at[n % 2])
                plgpu.barrier_arrive(full.at[n % 2])
                return n + 1, order[n + 1]

            n, _ = lax.while_loop(more, step, (jnp.int32(0), order[0]))
            for _ in range(2):  # an even number of rows: both slots are released once more
                pl.when(n > 1)(lambda k=_: plgpu.barrier_wait(empty.at[k]))

        @pl.when(me == 0)
        def _():
            def step(i, _):
                plgpu.barrier_wait(full.at[i % 2])
                o[which[i % 2]] = s[i % 2] + i.astype(f32)
                plgpu.barrier_arrive(empty.at[i % 2])

            lax.fori_loop(0, 4, step, None)

    x = rng.standard_normal((4, N)).astype(f32)
    order = np.array([2, 0, 3, 1, -1], i32)
    options = dict(
        scratch_types=[
            plgpu.SMEM((2, N), f32),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.SMEM((2,), i32),
        ],
        num_threads=2,
        thread_name="wg",
    )
    (region,) = alone(text_of(run, body, x, x, order, **options))
    assert "st_shared<i32, 1>" in region and "ld_global<i32, 1>" in region
    want = x + np.array([1, 3, 0, 2], f32)[:, None]
    np.testing.assert_array_equal(run(body, x, x, order, **options), want)


def test_copies_by_all_lanes_stay_so(run, rng):
    """A pitch that no engine can do, in a producer with few registers."""

    def body(x, o, s, full, empty):
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            fetch(x, s, full, empty)

        pl.when(me == 0)(lambda: double(o, s, full, empty))

    x = rng.standard_normal((STEPS, 333)).astype(f32)
    options = ring()
    options["scratch_types"][0] = plgpu.SMEM((2, 333), f32)
    with pytest.warns(UserWarning, match="loads and stores of all lanes"):
        text = text_of(run, body, x, x, **options)
    assert not alone(text) and "#pragma unroll 2" in text
    with pytest.warns(UserWarning, match="loads and stores of all lanes"):
        np.testing.assert_array_equal(run(body, x, x, **options), 2 * x)


# ---- products ------------------------------------------------------------------------------------


def gemm_options(m, n, k, dtype, stages):
    return dict(
        scratch_types=[
            plgpu.SMEM((stages, 128, 64), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, 64, n), dtype, transforms=SWIZZLED),
            plgpu.SMEM((2, 2, 64, 64), dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=2, num_barriers=stages),
        ],
        grid=(m // 256,),
        grid_names=("m",),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=3,
        thread_name="wg",
    )


def gemm_body(steps, stages, n):
    def body(a, b, o, a_s, b_s, o_s, full, empty):
        me = lax.axis_index("wg")
        row = (lax.axis_index("m") * 2 + lax.axis_index("c")) * 128

        @pl.when(me == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def step(i, _):
                slot = i % stages
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                at = (pl.ds(row, 128), pl.ds(i * 64, 64))
                plgpu.copy_gmem_to_smem(a.at[at], a_s.at[slot], full.at[slot])
                at = (pl.ds(i * 64, 64), pl.ds(0, n))
                plgpu.copy_gmem_to_smem(b.at[at], b_s.at[slot], full.at[slot], collective_axes="c")

            lax.fori_loop(0, steps, step, None)
            for s in range(min(stages, steps)):
                plgpu.barrier_wait(empty.at[s])

        @pl.when(me < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(me * 64, 64)

            def product(acc):
                def step(i, _):
                    plgpu.barrier_wait(full.at[i % stages])
                    plgpu.wgmma(acc, a_s.at[i % stages, mine], b_s.at[i % stages])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[i % stages])

                lax.fori_loop(0, steps, step, None)
                return acc[...]

            value = pl.run_scoped(product, plgpu.ACC((64, n)))
            for c in range(n // 64):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                buffer = o_s.at[me, c % 2]
                buffer[...] = value[:, c * 64 : (c + 1) * 64].astype(f16)
                plgpu.commit_smem()
                at = (pl.ds(row + me * 64, 64), pl.ds(c * 64, 64))
                plgpu.copy_smem_to_gmem(buffer, o.at[at])
            plgpu.wait_smem_to_gmem(0)

    return body


def test_gemm_of_a_cluster(run, rng):
    """64 x 256 accumulators in two consumers of 232 registers, one operand shared by two blocks."""
    m, n, k, stages = 512, 256, 384, 4
    a = (rng.standard_normal((m, k)) / 4).astype(f16)
    b = (rng.standard_normal((k, n)) / 4).astype(f16)
    options, body = gemm_options(m, n, k, f16, stages), gemm_body(k // 64, stages, n)
    out = plgpu.ShapeDtypeStruct((m, n), f16)
    kernel = run.kernel(body, out, **options)
    text = text_of(run, body, out, a, b, **options)
    assert sum("tma_multicast" in region for region in alone(text)) == 1
    loop = text[text.index("wgmma_commit") : text.index("acc_read")]
    assert "warpgroup_sync" not in loop and "mbarrier_arrive_remote" in loop
    used = kernel.lower(a, b).resources()
    assert used["registers"] == 168 and used["spill_bytes"] == 0 and used["remarks"] == ""
    np.testing.assert_allclose(
        run(body, out, a, b, **options).astype(f32), a.astype(f32) @ b.astype(f32), atol=2e-2
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rows,k", [(64, 16), (128, 64)])
def test_a_fresh_accumulator_is_overwritten(run, rng, a_in_registers, half, rows, k):
    """Its registers are not filled with zeros; the product that comes second adds."""

    def body(a, b, o, a_s, b_s, bar):
        plgpu.copy_gmem_to_smem(a, a_s, bar)
        plgpu.copy_gmem_to_smem(b, b_s, bar)
        plgpu.barrier_wait(bar)
        left = plgpu.load(a_s, layout=plgpu.Layout.WGMMA) if a_in_registers else a_s

        def product(acc):
            plgpu.wgmma(acc, left, b_s)
            plgpu.wgmma(acc, left, b_s)
            return acc[...]

        def step(i, total):
            new = pl.run_scoped(product, plgpu.ACC((rows, 64), f16 if half else f32))
            return jnp.maximum(total, new.astype(f32))

        zero = plgpu.layout_cast(jnp.zeros((rows, 64), f32), plgpu.Layout.WGMMA)
        o[...] = lax.fori_loop(0, 2, step, zero)

    a = (rng.standard_normal((rows, k)) / 4).astype(f16)
    b = (rng.standard_normal((k, 64)) / 4).astype(f16)
    out = plgpu.ShapeDtypeStruct((rows, 64), f32)
    scratch = [
        plgpu.SMEM((rows, k), f16),
        plgpu.SMEM((k, 64), f16),
        plgpu.Barrier(num_arrivals=2),
    ]
    text = text_of(run, body, out, a, b, scratch_types=scratch)
    assert len(re.findall(r"_fresh\w*\(", text)) == 1 and not re.search(r"acc\w*\[r\] = 0", text)
    # no reading of the registers moves up across the wait
    assert re.search(r"wgmma_wait<0>\(\);\s+pin_[fu]32_\d+\(&acc\w*\[0\]\);", text)
    np.testing.assert_allclose(
        run(body, out, a, b, scratch_types=scratch),
        np.maximum(2 * (a.astype(f32) @ b.astype(f32)), 0),
        atol=0.1 if half else 1e-2,
    )


def test_products_of_tiles_of_other_extents(run, rng):
    """One shape of instruction, but the second 64 columns along K lie further apart in the larger
    operand: each has its own steps."""

    def body(a, b, c, o, a_s, b_s, c_s, bar):
        for src, dst in ((a, a_s), (b, b_s), (c, c_s)):
            plgpu.copy_gmem_to_smem(src, dst, bar)
        plgpu.barrier_wait(bar)

        def products(acc):
            for _ in range(2):  # the first one is another function, which overwrites
                plgpu.wgmma(acc, a_s, b_s.at[pl.ds(0, 64)].T)
            plgpu.wgmma(acc, a_s, c_s.T)
            return acc[...]

        o[...] = pl.run_scoped(products, plgpu.ACC((64, 64)))

    a, b, c = ((rng.standard_normal((n, 128)) / 4).astype(f16) for n in (64, 128, 64))
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [plgpu.SMEM((n, 128), f16, transforms=swizzled) for n in (64, 128, 64)]
    out = plgpu.ShapeDtypeStruct((64, 64), f32)
    got = run(body, out, a, b, c, scratch_types=[*scratch, plgpu.Barrier(num_arrivals=3)])
    want = a.astype(f32) @ (2 * b[:64].astype(f32) + c.astype(f32)).T
    np.testing.assert_allclose(got, want, atol=1e-2)


def test_an_accumulator_that_is_read_first(run, rng):
    def body(a, b, o, a_s, b_s, bar):
        plgpu.copy_gmem_to_smem(a, a_s, bar)
        plgpu.copy_gmem_to_smem(b, b_s, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            def step(i, _):
                plgpu.wgmma(acc, a_s, b_s)

            lax.fori_loop(0, a.shape[1] // 64 - 1, step, None)  # not at all
            zero = acc[...]
            plgpu.wgmma(acc.at[:, 0:32], a_s, b_s.at[:, 0:32])
            return zero, acc[...]

        o[0], o[1] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = (rng.standard_normal((64, 64)).astype(f16) for _ in range(2))
    out = plgpu.ShapeDtypeStruct((2, 64, 64), f32)
    scratch = [plgpu.SMEM((64, 64), f16)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    got = run(body, out, a, b, scratch_types=scratch)
    want = np.zeros((2, 64, 64), f32)
    want[1, :, :32] = a.astype(f32) @ b.astype(f32)[:, :32]
    np.testing.assert_allclose(got, want, atol=1e-2)


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("where", ["loop", "branch", "slice"])
def test_an_accumulator_that_is_used_inside_first(run, rng, where, times):
    """The product after a loop, a branch or a product of some columns adds to what they left."""

    def body(a, b, times_ref, o, a_s, b_s, bar):
        plgpu.copy_gmem_to_smem(a, a_s, bar)
        plgpu.copy_gmem_to_smem(b, b_s, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            n = times_ref[0]
            if where == "loop":
                lax.fori_loop(0, n, lambda i, _: plgpu.wgmma(acc, a_s, b_s), None)
            elif where == "branch":
                pl.when(n == 2)(lambda: plgpu.wgmma(acc, a_s, b_s))
            else:
                plgpu.wgmma(acc.at[:, 0:32], a_s, b_s.at[:, 0:32])
                plgpu.wgmma_wait(0)
            plgpu.wgmma(acc, a_s, b_s)
            return acc[...]

        o[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = (rng.standard_normal((64, 64)).astype(f16) for _ in range(2))
    scratch = [plgpu.SMEM((64, 64), f16)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    out = plgpu.ShapeDtypeStruct((64, 64), f32)
    got = run(body, out, a, b, np.array([times], i32), scratch_types=scratch)
    one = a.astype(f32) @ b.astype(f32)
    before = {
        "loop": one * times,
        "branch": one * (times == 2),
        "slice": one * (np.arange(64) < 32),
    }
    np.testing.assert_allclose(got, one + before[where], atol=2e-2)


@pytest.mark.parametrize("how", ["init", "store"])
@pytest.mark.parametrize("dtype", [f16, f32], ids=["f16", "f32"])
def test_an_accumulator_begins_with_an_array(run, rng, dtype, how):
    """Each value where it belongs: halves share a register with their neighbour."""

    def body(a, b, c, o, a_s, b_s, bar):
        plgpu.copy_gmem_to_smem(a, a_s, bar)
        plgpu.copy_gmem_to_smem(b, b_s, bar)
        plgpu.barrier_wait(bar)
        start = plgpu.load(c, layout=plgpu.Layout.WGMMA, optimized=False)

        def product(acc):
            if how == "store":
                acc[...] = start
            plgpu.wgmma(acc, a_s, b_s)
            return acc[...] if how != "init" else None

        if how == "init":
            o[...] = pl.run_state(product)(plgpu.ACC.init(start))
        else:
            o[...] = pl.run_scoped(product, plgpu.ACC((64, 64), dtype))

    a, b = ((rng.standard_normal((64, 64)) / 4).astype(f16) for _ in range(2))
    c = rng.integers(-99, 99, (64, 64)).astype(dtype)
    scratch = [plgpu.SMEM((64, 64), f16)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    got = run(body, c, a, b, c, scratch_types=scratch)
    np.testing.assert_allclose(got, a.astype(f32) @ b.astype(f32) + c, atol=0.2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [f16, f32], ids=["f16", "f32"])
@pytest.mark.parametrize("how", ["zeros", "cast", "ones", "slice", "branch", "read", "read slice"])
def test_zeros_in_front_of_a_product(run, rng, how, dtype):
    """The product of all overwrites what earlier steps left, in the same registers. Ones are
    written, and so are zeros that are read, or that a product of a part or in a branch follows."""

    def body(a, b, o, a_s, b_s, bar):
        plgpu.copy_gmem_to_smem(a, a_s, bar)
        plgpu.copy_gmem_to_smem(b, b_s, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            def step(i, total):
                left = acc.at[:, 0:32]
                start = jnp.full((64, 64), how == "ones", dtype)
                if how == "cast":
                    start = plgpu.layout_cast(start, plgpu.Layout.WGMMA)
                acc[...] = start
                if how == "read":
                    total = total + acc[...].astype(f32)
                if how == "read slice":
                    total = total + jnp.sum(left[...].astype(f32))
                if how == "slice":
                    plgpu.wgmma(left, a_s, b_s.at[:, 0:32])
                    plgpu.wgmma_wait(0)
                if how == "branch":
                    pl.when(i != 1)(lambda: plgpu.wgmma(acc, a_s, b_s))
                else:
                    plgpu.wgmma(acc, a_s, b_s)
                return total + acc[...].astype(f32)

            plgpu.wgmma(acc, a_s, b_s)  # there is something
            return lax.fori_loop(0, 3, step, acc[...].astype(f32))

        o[...] = pl.run_scoped(product, plgpu.ACC((64, 64), dtype))

    a, b = ((rng.standard_normal((64, 64)) / 4).astype(f16) for _ in range(2))
    out = plgpu.ShapeDtypeStruct((64, 64), f32)
    scratch = [plgpu.SMEM((64, 64), f16)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    text = text_of(run, body, out, a, b, scratch_types=scratch)
    assert len(re.findall(r"_held\w*\(", text)) == (how in ("zeros", "cast"))
    one, left = a.astype(f32) @ b.astype(f32), np.arange(64) < 32
    want = one * {"slice": 4 + 3 * left, "branch": 3}.get(how, 4) + 3 * (how == "ones")
    got = run(body, out, a, b, scratch_types=scratch)
    np.testing.assert_allclose(got, want, atol=0.2 if dtype is f16 else 1e-2)


def test_optimization_barrier_holds_an_array_at_once(run, rng):
    def body(x, y, o):
        a = lax.optimization_barrier(plgpu.load(x, layout=plgpu.Layout.WGMMA) + 1.0)
        o[...] = a * lax.optimization_barrier(y[...]).astype(f32)

    x = rng.standard_normal((64, 128)).astype(f32)
    y = rng.standard_normal((64, 128)).astype(f16)
    text = text_of(run, body, x, x, y)
    assert text.count("pin_f32_64(") == 1
    assert text.count("pin_narrow<f16, 64>(") == 1  # two in a register
    np.testing.assert_allclose(run(body, x, x, y), (x + 1) * y.astype(f32), rtol=1e-6)


def test_optimization_barrier_holds_bytes_by_words(run, rng):
    def body(x, o):
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(jnp.float8_e4m3fn)
        o[...] = lax.optimization_barrier(a).astype(f32)

    x = rng.standard_normal((64, 128)).astype(f32)
    text = text_of(run, body, x, x)
    assert text.count("pin_narrow<e4m3, 64>(") == 1  # four in a register
    want = x.astype(np.dtype(jnp.float8_e4m3fn)).astype(f32)
    np.testing.assert_array_equal(run(body, x, x), want)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_bytes_for_products_stay_words(run, rng, dtype):
    """Conversion, barrier, selection by rows, branch, loop and slices: no byte is taken out."""
    f8 = np.dtype(getattr(jnp, dtype))

    def body(x, b_gmem, o, b_s, full):
        plgpu.copy_gmem_to_smem(b_gmem, b_s, full)
        plgpu.barrier_wait(full)
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA_8BIT)
        row = lax.broadcasted_iota(jnp.int32, (64, 4), 0)

        def product(acc):
            def step(i, p):
                plgpu.wgmma(acc, p[:, :32], b_s.at[:, 0:32].T)
                plgpu.wgmma(acc, p[:, 32:], b_s.at[:, 32:64].T)
                plgpu.wgmma_wait(0)
                one = lax.optimization_barrier((a * (i + 2)).astype(f8))
                at = functools.partial(lambda i: (a * -(i + 2)).astype(f8), i)
                return plgpu.ext.warp_where(row % 3 == i, at, one, along=1)

            p = lax.fori_loop(0, 3, step, a.astype(f8))
            plgpu.wgmma(acc, p, b_s.T)
            return acc[...]

        o[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    x, b = (rng.integers(-2, 3, (64, 64)) for _ in range(2))  # times 2, 3 and 4 they are exact
    x, b = x.astype(f32), b.astype(f8)
    swizzled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(32))
    scratch = [plgpu.SMEM((64, 64), f8, transforms=swizzled), plgpu.Barrier()]
    out = plgpu.ShapeDtypeStruct((64, 64), f32)
    text = text_of(run, body, out, x, b, scratch_types=scratch)
    assert "unpack<" not in text and f"cvt_rn_{f8.name[7:11]}x4(" in text
    factor, row = np.ones(64), np.arange(64)
    for i in range(3):
        factor += np.where(row % 3 == i, -(i + 2), i + 2)
    want = factor[:, None] * (x @ b.astype(f32).T)
    np.testing.assert_array_equal(run(body, out, x, b, scratch_types=scratch), want)


def test_optimization_barrier_keeps_a_product_from_the_sum(run, rng):
    """The product is rounded before anything is added to it."""

    def body(x, y, z, o, p):
        o[...] = lax.optimization_barrier(x[...] * y[...]) - z[...]
        p[0] = lax.optimization_barrier(x[0] * y[0]) - z[0]

    x, y, z = rng.standard_normal((3, 512)).astype(f32)
    z = (x * y + z * f32(1e-6)).astype(f32)
    got, one = run(body, (x, x[:1]), x, y, z)
    np.testing.assert_array_equal(got, x * y - z)
    np.testing.assert_array_equal(one, (x * y - z)[:1])
    assert text_of(run, body, (x, x[:1]), x, y, z).count("mul_rn(") == 2


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dependent", [False, True])
def test_tiles_from_a_counter(run, dependent):
    """Each tile once, whoever takes it; a launch leaves the counters as it found them."""

    def body(o):
        if dependent:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()

        def step(t):
            o[t] = jnp.full((128,), 1, jnp.float32) * t.astype(f32)
            return _core.next_tile(0)

        lax.while_loop(lambda t: t < 40, step, _core.next_tile(0))

    out = plgpu.ShapeDtypeStruct((40, 128), f32)
    options = dict(grid=(5,), grid_names=("g",), num_threads=2, thread_name="wg")
    text = text_of(run, body, out, **options)
    assert "counters_done(counters, 1, 10u)" in text
    assert text.count("griddepcontrol_wait();") == (3 if dependent else 0)
    kernel = run.kernel(body, out, **options)
    for _ in range(3):
        got = run.call(kernel)
        np.testing.assert_array_equal(got, np.broadcast_to(np.arange(40.0)[:, None], (40, 128)))


@pytest.mark.parametrize("seed", range(4))
def test_no_tile_is_taken_twice(seed):
    """The last thread of all clears the counters, no one before it; who takes what is chance."""

    def body(taken):
        def step(c):
            return _core.next_tile(0), c[1] + 1

        first = _core.next_tile(0), jnp.int32(0)
        _, n = lax.while_loop(lambda c: c[0] < 40, step, first)
        taken[lax.axis_index("g"), lax.axis_index("wg")] = n

    taken = np.zeros((5, 2), i32)
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(taken.shape, i32),
        grid=(5,),
        grid_names=("g",),
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(seed=seed),
    )
    assert kernel().sum() == 40
    host.run(kernel.lower(), [], [taken], seed)
    assert taken.sum() == 40


def test_tiles_of_two_counters(run):
    """One number after another: lanes that are late still get the first one."""

    def body(o, p):
        a, b = _core.next_tile(0), _core.next_tile(1)
        o[a] = jnp.full((128,), 1, jnp.int32) * a
        p[b] = jnp.full((128,), 1, jnp.int32) * (b + 100)

    out = [plgpu.ShapeDtypeStruct((6, 128), i32)] * 2
    options = dict(grid=(3,), grid_names=("g",), num_threads=2, thread_name="wg")
    rows = np.broadcast_to(np.arange(6, dtype=i32)[:, None], (6, 128))
    got = run.call(run.kernel(body, out, **options))
    np.testing.assert_array_equal(got[0], rows)
    np.testing.assert_array_equal(got[1], rows + 100)
