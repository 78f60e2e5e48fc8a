"""emit_pipeline_warp_specialized: every parameter, against what NumPy says."""

import functools

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

f16, f32, i32 = np.float16, np.float32, np.int32
THREADS = dict(num_threads=2, thread_name="wg")
emit = functools.partial(
    plgpu.emit_pipeline_warp_specialized, memory_registers=40, wg_axis="wg", num_compute_wgs=1
)


def rows(delay=0, width=256):
    return plgpu.BlockSpec((1, width), lambda i: (i, 0), delay_release=delay)


def shaped(*shape, dtype=f32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


# ---- steps, slots, barriers ----------------------------------------------------------------------


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("ready", [False, True], ids=["", "ready"])
@pytest.mark.parametrize("consumed", [False, True], ids=["", "consumed"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps,slots", [(1, 2), (2, 3), (5, 2), (7, 4)])
def test_steps_slots_barriers(run, rng, steps, slots, delay, consumed, ready, dynamic):
    def body(x, y, o):
        def step(indices, x_s, y_s, *rest):
            (i,) = indices
            carry, rest = rest[-1], rest[:-1]
            if ready:
                for b in rest[:2]:
                    plgpu.barrier_wait(b)
            value = x_s[0] * 2 + y_s[0]
            if consumed:

                @pl.when(i >= delay)
                def _():
                    for b in rest[-2:]:
                        plgpu.barrier_arrive(b)

            return carry + value * (i + 1).astype(f32)

        def context(pipeline):
            o[...] = pipeline(jnp.zeros((256,), f32))

        grid = lax.axis_index("g") + steps if dynamic else steps
        emit(
            step,
            grid=(grid,),
            in_specs=[rows(delay), rows(delay)],
            max_concurrent_steps=slots,
            manual_ready_barriers=ready,
            manual_consumed_barriers=consumed,
            compute_context=context,
        )(x, y)

    x, y = (rng.standard_normal((steps, 256)).astype(f32) for _ in range(2))
    want = ((x * 2 + y) * np.arange(1, steps + 1)[:, None]).sum(0)
    got = run(body, shaped(256), x, y, grid=(1,), grid_names=("g",), **THREADS)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_nested_specs_with_holes(run, rng):
    """Refs come in the shape of the specs, None where there is none."""

    def body(x, y, z, o):
        def step(_, d, a, out):
            assert d["none"] is None and set(d) == {"x", "none", "pair"}
            out[0] = d["x"][0] + d["pair"][1][0] * a[0]
            assert d["pair"][0] is None

        emit(
            step,
            grid=(4,),
            in_specs=({"x": rows(), "none": None, "pair": (None, rows())}, rows()),
            out_specs=[rows()],
            max_concurrent_steps=3,
        )({"x": x, "none": None, "pair": (None, y)}, z, o)

    x, y, z = (rng.standard_normal((4, 256)).astype(f32) for _ in range(3))
    got = run(body, shaped(4, 256), x, y, z, **THREADS)
    np.testing.assert_allclose(got, x + y * z, rtol=1e-6, atol=1e-6)


def test_a_single_spec_and_a_two_dimensional_grid(run, rng):
    def body(x, o):
        def step(indices, x_s, o_s):
            i, j = indices
            o_s[...] = x_s[...] + (i * 10 + j).astype(f32)

        spec = plgpu.BlockSpec((2, 128), lambda i, j: (i, j))
        emit(step, grid=(2, 3), in_specs=spec, out_specs=spec)(x, o)

    x = rng.standard_normal((4, 384)).astype(f32)
    got = run(body, x, x, **THREADS)
    want = x + np.kron(np.array([[0, 1, 2], [10, 11, 12]]), np.ones((2, 128))).astype(f32)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_compute_threads(run, rng, threads):
    """All see every block; the registers are shared out."""

    def body(x, o):
        me = lax.axis_index("wg")

        def context(pipeline):
            o[me] = pipeline((jnp.zeros((256,), f32), jnp.int32(0)))[0] * (me + 1).astype(f32)

        def step(_, x_s, carry):
            total, n = carry
            return total + x_s[0], n + 1

        emit(
            step,
            grid=(6,),
            in_specs=[rows()],
            num_compute_wgs=threads,
            max_concurrent_steps=2,
            compute_context=context,
        )(x)

    x = rng.standard_normal((6, 256)).astype(f32)
    options = dict(num_threads=threads + 1, thread_name="wg")
    kernel = run.kernel(body, shaped(threads, 256), **options)
    want = x.sum(0)[None] * np.arange(1, threads + 1)[:, None]
    np.testing.assert_allclose(run.call(kernel, x), want, rtol=1e-4, atol=1e-4)
    text = kernel.lower(x).as_text("cuda")
    assert f"setmaxnreg_inc<{[256, 232, 152][threads - 1]}>" in text
    assert "setmaxnreg_dec<40>" in text


@pytest.mark.parametrize("counts,delay,ready,consumed,dynamic", [
    ((4, 3, 2), 0, False, False, False), ((3, 5, None), 1, False, False, False),
    ((9, 3, 1), 0, True, False, False), ((4, 3, 2), 0, False, True, False),
    ((3, 5, 2), 0, True, True, True), ((4, 3, None), 2, False, False, True)])  # fmt: skip
def test_buffered(run, rng, counts, delay, ready, consumed, dynamic):
    """Operands with slots of their own: those with more are fetched further ahead."""
    x = rng.standard_normal((7 * 8, 128)).astype(f32)
    mode = lambda n: None if n is None else pl.Buffered(n)  # noqa: E731

    def body(x_ref, n_ref, o_ref):
        def step(indices, a, b, o, *bars):
            if ready:
                for bar in bars[:2]:
                    plgpu.barrier_wait(bar)
            o[...] = a[...] * 2 + b[...]
            if consumed:
                for bar in bars[-2:]:
                    plgpu.barrier_arrive(bar)

        spec = functools.partial(plgpu.BlockSpec, (8, 128), delay_release=delay)
        emit(
            step,
            grid=(n_ref[0] if dynamic else 7,),
            max_concurrent_steps=3,
            manual_ready_barriers=ready,
            manual_consumed_barriers=consumed,
            in_specs=[
                spec(lambda i: (i, 0), mode(counts[0])),
                spec(lambda i: (6 - i, 0), mode(counts[1])),
            ],
            out_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), mode(counts[2]))],
        )(x_ref, x_ref, o_ref)

    got = run(body, x, x, np.array([7], i32), **THREADS)
    backwards = x.reshape(7, 8, 128)[::-1].reshape(x.shape)
    np.testing.assert_allclose(got, x * 2 + backwards, rtol=1e-6)


def test_buffered_and_a_state_are_refused():
    spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0), pl.Buffered(4))
    with pytest.raises(NotImplementedError, match="equally many slots for all blocks"):
        emit(
            print,
            grid=(8,),
            in_specs=[spec],
            max_concurrent_steps=2,
            pipeline_state=plgpu.PipelinePipeline.START,
        )


# ---- outputs -------------------------------------------------------------------------------------


def test_outputs(run, rng):
    """One that never moves accumulates in its only slot; one visited again is stored at its first
    visit alone."""

    def body(x, first, total):
        def step(indices, x_s, first_s, total_s):
            i, j = indices

            @pl.when((i == 0) & (j == 0))
            def _():
                total_s[...] = jnp.zeros((1, 128), f32)

            total_s[...] = total_s[...] + x_s[...]
            first_s[...] = x_s[...]

        emit(
            step,
            grid=(3, 4),
            in_specs=[plgpu.BlockSpec((1, 128), lambda i, j: (i * 4 + j, 0))],
            out_specs=[
                plgpu.BlockSpec((1, 128), lambda i, j: (i, 0)),
                plgpu.BlockSpec((1, 128), lambda i, j: (0, 0)),
            ],
            max_concurrent_steps=2,
        )(x, first, total)

    x = rng.standard_normal((12, 128)).astype(f32)
    first, total = run(body, (shaped(3, 128), shaped(1, 128)), x, **THREADS)
    np.testing.assert_array_equal(first, x[::4])
    np.testing.assert_allclose(total, x.sum(0, keepdims=True), rtol=1e-4, atol=1e-4)


def test_blocks_that_overhang_and_squeezed_dims(run, rng):
    def body(x, o):
        def step(_, x_s, o_s):
            assert x_s.shape == (48,)
            o_s[...] = x_s[...] * 2

        spec = plgpu.BlockSpec((None, 48), lambda i, j: (i, j))
        emit(step, grid=(2, 3), in_specs=[spec], out_specs=[spec])(x, o)

    x = rng.standard_normal((2, 100)).astype(f32)
    np.testing.assert_array_equal(run(body, x, x, **THREADS), x * 2)


# ---- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", ["closure", "ref", "array"])
@pytest.mark.parametrize("delay", [0, 1])
def test_products(run, rng, carry, delay):
    """The accumulator stays in the compute thread: closed over, a carry, or its value a carry."""
    m, n, k = 128, 64, 256

    def body(a, b, o):
        me = lax.axis_index("wg")

        def step(_, a_s, b_s, acc):
            mine = a_s.at[pl.ds(me * 64, 64)]
            if carry == "array":
                value = pl.run_state(lambda ref: plgpu.wgmma(ref, mine, b_s))(plgpu.ACC.init(acc))
                return value
            plgpu.wgmma(acc_ref[0] if carry == "closure" else acc, mine, b_s)
            plgpu.wgmma_wait(delay)
            return acc

        acc_ref = []

        def context(pipeline):
            if carry == "array":
                zero = plgpu.layout_cast(jnp.zeros((64, n), f32), plgpu.Layout.WGMMA)
                o[pl.ds(me * 64, 64)] = pipeline(zero)
                return

            def with_acc(acc):
                acc_ref.append(acc)
                pipeline(None if carry == "closure" else acc)
                return acc[...]

            o[pl.ds(me * 64, 64)] = pl.run_scoped(with_acc, plgpu.ACC((64, n)))
            return "is discarded"

        emit(
            step,
            grid=(k // 64,),
            in_specs=[
                plgpu.BlockSpec((m, 64), lambda s: (0, s), delay_release=delay),
                plgpu.BlockSpec((64, n), lambda s: (s, 0), delay_release=delay),
            ],
            max_concurrent_steps=3,
            num_compute_wgs=2,
            compute_context=context,
        )(a, b)

    a = rng.standard_normal((m, k)).astype(f16)
    b = rng.standard_normal((k, n)).astype(f16)
    got = run(body, shaped(m, n), a, b, num_threads=3, thread_name="wg")
    np.testing.assert_allclose(got, a.astype(f32) @ b.astype(f32), atol=2e-2)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("manual", [False, True])
def test_multicast(run, rng, delay, manual):
    """Blocks of a cluster share one input, for as many pipelines as there are."""
    n, k = 64, 192

    def body(a, b, o):
        c = lax.axis_index("c")

        def step(_, a_s, b_s, *rest):
            acc, rest = rest[-1], rest[:-1]
            plgpu.wgmma(acc, a_s, b_s)
            plgpu.wgmma_wait(delay)
            if manual:
                pl.when(_[0] >= delay)(lambda: [plgpu.barrier_arrive(x) for x in rest] and None)
            return acc

        def context(pipeline, t):
            def with_acc(acc):
                return pipeline(acc)[...]

            o[t, pl.ds(c * 64, 64)] = pl.run_scoped(with_acc, plgpu.ACC((64, n)))

        @pl.loop(0, 3)
        def _(t):
            emit(
                step,
                grid=(k // 64,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda s: (c, s), delay_release=delay),
                    plgpu.BlockSpec(
                        (64, n), lambda s: (s, t), delay_release=delay, collective_axes="c"
                    ),
                ],
                max_concurrent_steps=2,
                manual_consumed_barriers=manual,
                compute_context=functools.partial(context, t=t),
            )(a, b)

    a = rng.standard_normal((128, k)).astype(f16)
    b = rng.standard_normal((k, 3 * n)).astype(f16)
    options = dict(cluster=(2,), cluster_names=("c",), **THREADS)
    kernel = run.kernel(body, shaped(3, 128, n), **options)
    want = (a.astype(f32) @ b.astype(f32)).reshape(128, 3, n).transpose(1, 0, 2)
    np.testing.assert_allclose(run.call(kernel, a, b), want, atol=2e-2)
    assert "tma_multicast" in kernel.lower(a, b).as_text("cuda")


# ---- several pipelines ---------------------------------------------------------------------------


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("steps,delay", [(3, 0), (4, 0), (3, 1)])
def test_again_and_again(run, rng, steps, delay, manual):
    """In a row and in a loop, with allocations of each call or of all; phases flip between."""

    def body(x, o):
        def pipeline_of(t):
            def step(_, x_s, carry):
                return carry + x_s[0]

            def context(pipeline):
                o[t] = pipeline(jnp.zeros((256,), f32))

            return emit(
                step,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec((1, 256), lambda i: (t * steps + i, 0), delay_release=delay)
                ],
                max_concurrent_steps=2,
                compute_context=context,
            )

        def all_of_them(allocations):
            for t in range(2):
                pipeline_of(t)(x, allocations=allocations)

            @pl.loop(2, 5)
            def _(t):
                pipeline_of(t)(x, allocations=allocations)

        if manual:
            types = pipeline_of(0).get_allocations(x)
            pl.run_scoped(all_of_them, types, collective_axes="wg")
        else:
            all_of_them(None)

    x = rng.standard_normal((5 * steps, 256)).astype(f32)
    got = run(body, shaped(5, 256), x, **THREADS)
    want = x.reshape(5, steps, 256).sum(1)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("ready,consumed", [(False, False), (True, True)])
@pytest.mark.parametrize("count", [2, 4])
def test_a_pipeline_of_pipelines(run, rng, traced, ready, consumed, count):
    """START, STEADY ..., STOP fetch across their borders; an ordinary one may follow."""
    steps, state = 4, plgpu.PipelinePipeline

    def body(x, o):
        def pipeline_of(t, state):
            def step(_, x_s, *rest):
                if ready:
                    plgpu.barrier_wait(rest[0])
                carry = rest[-1] + x_s[0]
                if consumed:
                    plgpu.barrier_arrive(rest[-2])
                return carry

            def context(pipeline):
                o[t] = pipeline(jnp.zeros((256,), f32))

            return emit(
                step,
                grid=(steps,),
                in_specs=[plgpu.BlockSpec((1, 256), lambda i: (t * steps + i, 0))],
                max_concurrent_steps=2,
                pipeline_state=state,
                manual_ready_barriers=ready,
                manual_consumed_barriers=consumed,
                compute_context=context,
            )

        def all_of_them(allocations):
            if traced:

                @pl.loop(0, count)
                def _(t):
                    s = jnp.where(t > 0, state.STEADY, state.START)
                    s = jnp.where(t == count - 1, state.STOP, s)
                    pipeline_of(t, s)(x, allocations=allocations)
            else:
                for t in range(count):
                    s = state.START if t == 0 else state.STOP if t == count - 1 else state.STEADY
                    pipeline_of(t, s)(x, allocations=allocations)
            pipeline_of(count, None)(x, allocations=allocations)

        types = pipeline_of(0, None).get_allocations(x)
        pl.run_scoped(all_of_them, types, collective_axes="wg")

    x = rng.standard_normal(((count + 1) * steps, 256)).astype(f32)
    got = run(body, shaped(count + 1, 256), x, **THREADS)
    want = x.reshape(count + 1, steps, 256).sum(1)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_tiles_as_they_come(run, rng):
    """A pipeline for each point of a grid that is handed out."""
    m, n, k = 192, 128, 128

    def body(a, b, o):
        me = lax.axis_index("wg")

        @plgpu.dynamic_scheduling_loop(("i", "j"), thread_axis="wg")
        def _(info):
            i, j = info.index

            def step(_, a_s, b_s, acc):
                plgpu.wgmma(acc, a_s, b_s)
                plgpu.wgmma_wait(1)
                return acc

            def context(pipeline):
                def with_acc(acc):
                    return pipeline(acc)[...]

                at = (pl.ds(i * 64, 64), pl.ds(j * 64, 64))
                o[at] = pl.run_scoped(with_acc, plgpu.ACC((64, 64)))

            emit(
                step,
                grid=(k // 64,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda s: (i, s), delay_release=1),
                    plgpu.BlockSpec((64, 64), lambda s: (s, j), delay_release=1),
                ],
                max_concurrent_steps=2,
                compute_context=context,
            )(a, b)

        assert me is not None

    a = rng.standard_normal((m, k)).astype(f16)
    b = rng.standard_normal((k, n)).astype(f16)
    options = dict(grid=(m // 64, n // 64), grid_names=("i", "j"), **THREADS)
    got = run(body, shaped(m, n), a, b, **options)
    np.testing.assert_allclose(got, a.astype(f32) @ b.astype(f32), atol=2e-2)


# ---- kernels as people write them ----------------------------------------------------------------


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_persistent_matmul(run, rng, cluster, delay):
    """Tiles in a snake over the grid, one set of allocations, the epilogue in small stores."""
    tile_m, tile_n, tile_k, epilogue = 64, 64, 64, 32
    m, n, k = 256, 192, 128
    rows_of_cluster = 2 * tile_m * cluster
    m_tiles, n_tiles = m // rows_of_cluster, n // tile_n

    def kernel(a_gmem, b_gmem, o_gmem, o_smem):
        wg = lax.axis_index("wg")
        c = lax.axis_index("cluster") if cluster > 1 else 0

        def pipeline(body, context, row=0, col=0):
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(k // tile_k,),
                in_specs=[
                    plgpu.BlockSpec(
                        (2 * tile_m, tile_k), lambda s: (row * cluster + c, s), delay_release=delay
                    ),
                    plgpu.BlockSpec(
                        (tile_k, tile_n),
                        lambda s: (s, col),
                        delay_release=delay,
                        collective_axes="cluster" if cluster > 1 else None,
                    ),
                ],
                max_concurrent_steps=2,
                wg_axis="wg",
                num_compute_wgs=2,
                memory_registers=40,
                compute_context=context,
            )

        def ignore(*_, **__):
            return None

        @functools.partial(
            pl.run_scoped,
            allocations=pipeline(ignore, ignore).get_allocations(a_gmem, b_gmem),
            collective_axes="wg",
        )
        def _(allocations):
            @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="grid")
            def _(info):
                row, col = plgpu.planar_snake(info.index[0], (m_tiles, n_tiles), 0, 2)

                def step(_, a_smem, b_smem, acc):
                    plgpu.wgmma(acc, a_smem.at[pl.ds(wg * tile_m, tile_m)], b_smem)
                    plgpu.wgmma_wait(delay)
                    return acc

                def context(eval_pipeline):
                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((tile_m, tile_n)))
                    def _(acc):
                        value = eval_pipeline(acc)[...].astype(f16)
                        at = (row * cluster + c) * 2 * tile_m + wg * tile_m
                        for e in range(tile_n // epilogue):
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            part = o_smem.at[wg, e % 2]
                            part[...] = value[:, e * epilogue : (e + 1) * epilogue]
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(
                                part,
                                o_gmem.at[
                                    pl.ds(at, tile_m),
                                    pl.ds(col * tile_n + e * epilogue, epilogue),
                                ],
                                commit_group=False,
                            )
                            plgpu.commit_smem_to_gmem_group()

                pipeline(step, context, row, col)(a_gmem, b_gmem, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

    a = rng.standard_normal((m, k)).astype(f16)
    b = rng.standard_normal((k, n)).astype(f16)
    options = dict(grid=(2,), grid_names=("grid",), num_threads=3, thread_name="wg")
    if cluster > 1:
        options |= dict(cluster=(cluster,), cluster_names=("cluster",))
    scratch = [plgpu.SMEM((2, 2, tile_m, epilogue), f16)]
    got = run(kernel, shaped(m, n, dtype=f16), a, b, scratch_types=scratch, **options)
    np.testing.assert_allclose(got.astype(f32), a.astype(f32) @ b.astype(f32), atol=5e-2)


def test_attention(run, rng):
    """Two compute threads that take turns; K and V released one by one, the carry in registers."""
    heads, kv_heads, queries, keys, dim, block = 2, 1, 128, 192, 64, 64

    def kernel(q, k, v, o, lse, qo_smem, q_ready, turn):
        me, head = lax.axis_index("wg"), lax.axis_index("head")
        row = lax.axis_index("q") * 128 + me * 64

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def context(pipeline):
            mine = qo_smem.at[me]
            at = (head, pl.ds(row, 64))
            plgpu.copy_gmem_to_smem(q.at[at], mine, q_ready.at[me])
            plgpu.barrier_wait(q_ready.at[me])
            per_row = plgpu.Layout.WGMMA.reduce(1)
            m = plgpu.layout_cast(jnp.full((64,), -jnp.inf, f32), per_row)
            total = plgpu.layout_cast(jnp.zeros((64,), f32), per_row)
            acc = plgpu.layout_cast(jnp.zeros((64, dim), f32), plgpu.Layout.WGMMA)
            pl.when(me == 1)(take_turns)
            acc, m, total = pipeline((acc, m, total))
            pl.when(me == 0)(take_turns)
            acc /= lax.broadcast_in_dim(total, (64, dim), [0])
            mine[...] = acc.astype(f16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, o.at[at])
            lse[at] = m * jnp.log(2.0) + jnp.log(total)
            plgpu.wait_smem_to_gmem(0)

        def step(_, k_smem, v_smem, k_done, v_done, carry):
            acc, m, total = carry

            def scores(acc):
                plgpu.wgmma(acc, qo_smem.at[me], plgpu.transpose_ref(k_smem, (1, 0)))
                take_turns()
                return acc[...]

            s = pl.run_scoped(scores, plgpu.ACC((64, block)))
            plgpu.barrier_arrive(k_done)
            s *= dim**-0.5 * np.log2(np.e)
            new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2(m - new)
            p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
            take_turns()
            total = total * alpha + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

            def values(ref):
                plgpu.wgmma(ref, p.astype(f16), v_smem)

            acc = pl.run_state(values)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_done)
            return acc, new, total

        spec = plgpu.BlockSpec((block, dim), lambda i: (i, 0))
        pipeline = plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(keys // block,),
            in_specs=[spec, spec],
            max_concurrent_steps=2,
            wg_axis="wg",
            num_compute_wgs=2,
            memory_registers=40,
            manual_consumed_barriers=True,
            compute_context=context,
        )
        of = head // (heads // kv_heads)
        pipeline(k.at[of], v.at[of])

    q = rng.standard_normal((heads, queries, dim)).astype(f16)
    k, v = (rng.standard_normal((kv_heads, keys, dim)).astype(f16) for _ in range(2))
    outs = (shaped(heads, queries, dim, dtype=f16), shaped(heads, queries))
    o, lse = run(
        kernel,
        outs,
        q,
        k,
        v,
        grid=(heads, queries // 128),
        grid_names=("head", "q"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((2, 64, dim), f16),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    s = np.einsum("hqd,hkd->hqk", q.astype(f32), np.repeat(k, heads, 0).astype(f32)) * dim**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hqk,hkd->hqd", p, np.repeat(v, heads, 0).astype(f32))
    np.testing.assert_allclose(o.astype(f32), want / p.sum(-1, keepdims=True), atol=1e-2)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)), atol=1e-3)


# ---- errors --------------------------------------------------------------------------------------


def refused():
    state = plgpu.PipelinePipeline

    def nothing(*_):
        return None

    def make(body=nothing, call=lambda p, x, o: p(x), **options):
        def kernel(x, o):
            call(emit(body, **{"grid": (4,), "in_specs": [rows()], **options}), x, o)

        return kernel

    yield make(in_specs=[rows(2)], max_concurrent_steps=2), ValueError, "delay_release"
    yield (
        make(in_specs=[rows(0), rows(1)], call=lambda p, x, o: p(x, x)),
        NotImplementedError,
        "one delay_release",
    )
    yield make(memory_thread_idx=0), NotImplementedError, "memory_thread_idx"
    spec = plgpu.BlockSpec((1, 256), lambda i: (0, 0))
    yield make(in_specs=[spec]), NotImplementedError, "dependency on the grid"
    yield make(grid=()), NotImplementedError, "dependency on the grid"
    yield make(in_specs=[], call=lambda p, x, o: p()), ValueError, "at least one input"
    spec = plgpu.BlockSpec((1, 256), lambda i: (i, 0), collective_axes=("a", "b"))
    yield make(in_specs=[spec]), ValueError, "one collective axis"
    yield make(out_specs=[spec], call=lambda p, x, o: p(x, o)), ValueError, "output spec"
    spec = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    yield make(in_specs=[spec]), NotImplementedError, "SMEM"
    yield make(pipeline_state=state.START), ValueError, "allocations"
    for options in (
        dict(grid=(3,)),
        dict(in_specs=[rows(1)], max_concurrent_steps=2),
    ):
        yield make(pipeline_state=state.START, **options), NotImplementedError, "pipeline_state"
    yield make(call=lambda p, x, o: p({"x": x})), ValueError, "pytree structure"
    yield make(call=lambda p, x, o: p(x, o)), ValueError, "pytree structure"
    yield make(body=lambda i, x: 1), TypeError, "carry"
    yield make(compute_context=lambda p: None), ValueError, "exactly once"
    yield make(compute_context=lambda p: [p(None), p(None)]), ValueError, "exactly once"
    yield make(num_compute_wgs=2), ValueError, "num_threads=3"
    yield make(wg_axis="other"), ValueError, "not the thread axis"
    yield make(memory_registers=41), ValueError, "multiple of 8"


def test_large_arrays_after_pipelines(run, rng):
    """What a compute thread does after the memory thread has given its registers away, tile by
    tile, stays in registers (run.call asserts that)."""
    tiles, height, width = 2, 128, 96

    def body(x, y, o, last):
        wg = lax.axis_index("wg")

        def tile(t, _):
            def step(indices, x_s):
                last[...] = x_s[...]

            spec = plgpu.BlockSpec((height, width), lambda i: (t * 3 + i, 0))
            emit(step, grid=(3,), in_specs=[spec], max_concurrent_steps=2)(x)

            @pl.when(wg == 0)
            def _():
                at = pl.ds(t * height, height)
                rows = plgpu.load(y.at[at], layout=plgpu.Layout.WGMMA)
                o[at] = plgpu.load(last, layout=plgpu.Layout.WGMMA) * rows + rows

        lax.fori_loop(0, tiles, tile, None)

    x = rng.standard_normal((tiles * 3 * height, width)).astype(f32)
    y = rng.standard_normal((tiles * height, width)).astype(f32)
    scratch = [plgpu.SMEM((height, width), f32)]
    kernel = run.kernel(body, y, scratch_types=scratch, **THREADS)
    want = x.reshape(tiles, 3, height, width)[:, -1].reshape(y.shape) * y + y
    np.testing.assert_allclose(run.call(kernel, x, y), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "width,memory_registers", [(128, 40), pytest.param(136, 24, marks=pytest.mark.long)]
)
def test_rows_of_one_of_three_compute_threads(width, memory_registers):
    """A softmax over 128 of the 152 registers that each of them has, on Blackwell (160 where the
    memory thread keeps 24): what the block knows of its threads does not take up the rest."""
    compute = 3

    def body(x, w, o, acc, done):
        wg = lax.axis_index("wg")

        def step(indices, x_smem, w_smem):
            @pl.when(wg == 0)
            def _():
                plgpu.tcgen05_mma(acc, x_smem, w_smem.T, done, accumulate=indices[0] > 0)

            plgpu.barrier_wait(done)

        plgpu.emit_pipeline_warp_specialized(
            step, max_concurrent_steps=2, grid=(3,),
            in_specs=[plgpu.BlockSpec((rows, 64), lambda k: (0, k)) for rows in (128, width)],
            num_compute_wgs=compute, memory_registers=memory_registers, wg_axis="wg",
        )(x, w)  # fmt: skip

        @pl.when(wg == 0)
        def _():
            s = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            p = jnp.exp(s - lax.broadcast_in_dim(s.max(axis=1), s.shape, [0]))
            o[...] = p / lax.broadcast_in_dim(p.sum(axis=1), s.shape, [0])

    x, w = (plgpu.ShapeDtypeStruct((rows, 192), np.float16) for rows in (128, width))
    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((128, width), f32), num_threads=compute + 1,
        thread_name="wg", scratch_types=[
            plgpu.TMEM((128, width), f32), plgpu.Barrier(orders_tensor_core=True),
        ],
    )  # fmt: skip
    used = kernel.lower(x, w, target="sm_100a").resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0


@pytest.mark.parametrize("body,error,why", list(refused()))
def test_refused(body, error, why):
    kernel = plgpu.kernel(body, out_type=shaped(4, 256), **THREADS)
    with pytest.raises(error, match=why):
        kernel.lower(np.zeros((4, 256), f32))


def test_outputs_of_several_threads_are_refused():
    def body(x, o):
        emit(lambda *_: None, grid=(4,), in_specs=[rows()], out_specs=[rows()], num_compute_wgs=2)(
            x, o
        )

    kernel = plgpu.kernel(body, out_type=shaped(4, 256), num_threads=3, thread_name="wg")
    with pytest.raises(NotImplementedError, match="num_compute_wgs=1"):
        kernel.lower(np.zeros((4, 256), f32))


def test_names_of_slots(rng):
    """Messages and programs name slots as the body does."""

    def body(a, b, o):
        def step(_, left, pair, *rest):
            *_, acc = rest
            plgpu.wgmma(acc, left, pair[0])
            plgpu.wgmma_wait(0)
            return acc

        def context(pipeline):
            def run(acc):
                o[...] = pipeline(acc)[...]

            pl.run_scoped(run, plgpu.ACC((64, 64)))

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(4,),
            memory_registers=40,
            wg_axis="t",
            num_compute_wgs=1,
            max_concurrent_steps=2,
            compute_context=context,
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (0, k)),
                [plgpu.BlockSpec((64, 64), lambda k: (k, 0))],
            ],
        )(a, [b])

    a, b = (rng.integers(-2, 3, (s)).astype(np.float16) for s in ((64, 256), (256, 64)))
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((64, 64), np.float32),
        num_threads=2,
        thread_name="t",
        interpret=True,
    )
    np.testing.assert_array_equal(kernel(a, b), a.astype(np.float32) @ b.astype(np.float32))
    text = kernel.lower(a, b).as_text("cuda")
    for name in ("left", "pair", "ready", "consumed"):
        assert f"const u32 {name} = smem + " in text, name
