"""How scopes and kernels end: what nobody waits for is right where the hardware has it so, and an
error where something is still in flight to memory that ends."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

F16, F32, I32 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int32)
SEEDS = range(8)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def shape(*dims, dtype=F32):
    return plgpu.ShapeDtypeStruct(dims, dtype)


def every_way(run, body, outs, *args, **options):
    """The result; on the interpreter that of several schedules, which must be the same bits."""
    if run.way != "interpret":
        return run(body, outs, *args, **options)
    got = [
        run(body, outs, *args, interpret=plgpu.InterpretParams(seed=seed), **options)
        for seed in SEEDS
    ]
    for other in got[1:]:
        for x, y in zip(plgpu.tree.leaves(got[0]), plgpu.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)
    return got[0]


def interpreted(body, out, *args, seed=0, **options):
    return plgpu.kernel(body, out_type=out, interpret=plgpu.InterpretParams(seed=seed), **options)(
        *args
    )


def refused(match, body, out, *args, **options):
    """On every schedule of the interpreter."""
    for seed in SEEDS:
        with pytest.raises(ValueError, match=match) as info:
            interpreted(body, out, *args, seed=seed, **options)
    return str(info.value)


def refused_by_the_machine(match, body, out, *args, **options):
    """The generated program on the emulated machine, too."""
    lowered = plgpu.kernel(body, out_type=out, **options).lower(*args)
    for seed in range(3):
        with pytest.raises(host.HostError, match=match):
            host.run(lowered, list(args), [np.zeros(out.shape, out.dtype)], seed)


# ---- queues that wait only where they refill a slot ----------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots, steps", [(2, 1), (2, 2), (2, 7), (4, 3), (3, 9)])
@pytest.mark.parametrize("awaited", [True, False])
def test_producer_and_consumer(run, rng, slots, steps, awaited):
    """The producer waits for a slot that it fills again; nobody sees the last releases. The copies
    of results need not be awaited either."""
    x = rng.standard_normal((2, steps, 64, 64)).astype(F32)

    def body(x_ref, o_ref, smem, out_smem, produced, consumed):
        c = lax.axis_index("c")
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)

                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(x_ref.at[c, i], smem.at[slot], produced.at[slot])

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(produced.at[slot])
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                out_smem[slot] = smem[slot] * 2 + 1
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[slot], o_ref.at[c, i])

            if awaited:
                plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM((slots, 64, 64), F32)
    got = every_way(
        run,
        body,
        x,
        x,
        grid=(2,),
        grid_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            smem,
            smem,
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
    )
    np.testing.assert_array_equal(got, x * 2 + 1)


def attention_body(steps, slots, q_ref, k_ref, v_ref, o_ref, q_smem, k_smem, v_smem, o_smem, *bars):
    """Two threads compute, one loads; its waits for slots are those of its copies."""
    q_ready, k_ready, v_ready, k_free, v_free, turn = bars
    wg = lax.axis_index("wg")

    @pl.when(wg < 2)
    def compute():
        rows = pl.ds(wg * 64, 64)
        plgpu.barrier_wait(q_ready)

        def turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        pl.when(wg == 1)(turns)

        def step(i, carry):
            total, most, acc = carry
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(k_ready.at[slot])

            def scores(s):
                plgpu.wgmma(s, q_smem.at[rows], k_smem.at[slot].T)
                turns()
                return s[...]

            s = pl.run_scoped(scores, plgpu.ACC((64, 64)))
            plgpu.barrier_arrive(k_free.at[slot])
            new = jnp.maximum(most, s.max(axis=1))
            p = jnp.exp(s - lax.broadcast_in_dim(new, s.shape, [0]))
            scale = jnp.exp(most - new)
            total = total * scale + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
            turns()
            plgpu.barrier_wait(v_ready.at[slot])

            def product(o):
                plgpu.wgmma(o, p.astype(F16), v_smem.at[slot])

            acc = pl.run_state(product)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_free.at[slot])
            return total, new, acc

        row = plgpu.Layout.WGMMA.reduce(1)
        total, _, acc = lax.fori_loop(
            0,
            steps,
            step,
            (
                plgpu.layout_cast(jnp.zeros((64,), F32), row),
                plgpu.layout_cast(jnp.full((64,), -1e30, F32), row),
                plgpu.layout_cast(jnp.zeros((64, 64), F32), plgpu.Layout.WGMMA),
            ),
        )
        pl.when(wg == 0)(turns)
        o_smem[rows] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[rows], o_ref.at[rows])

    @pl.when(wg == 2)
    def load():
        plgpu.copy_gmem_to_smem(q_ref, q_smem, q_ready)

        def fetch(i, slot):
            at = pl.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

        for i in range(min(slots, steps)):
            fetch(i, i)

        @pl.loop(slots, steps)
        def _(i):
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])
            fetch(i, slot)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_attention(run, rng, steps):
    """The pattern of JAX's attention: no thread waits for the last releases of K and V."""
    slots, n = 2, steps * 64
    q, k, v = ((rng.standard_normal((m, 64)) / 2).astype(F16) for m in (128, n, n))

    def body(*refs):
        attention_body(steps, slots, *refs)

    tile = plgpu.SMEM((128, 64), F16, transforms=TILED)
    ring = plgpu.SMEM((slots, 64, 64), F16, transforms=TILED)
    got = run(
        body,
        np.zeros((128, 64), F16),
        q,
        k,
        v,
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            tile,
            ring,
            ring,
            tile,
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    s = q.astype(F32) @ k.astype(F32).T
    p = np.exp(s - s.max(1, keepdims=True))
    want = p @ v.astype(F32) / p.sum(1, keepdims=True)
    np.testing.assert_allclose(got.astype(F32), want, atol=2e-3)


def test_quantised_ragged_dot(run, rng):
    """Each block takes the rows of one group, as many tiles as there are, through one ring; the
    weights are int8. Slots are released twice a step and waited for where they are filled again;
    copies of results are waited for where their memory is written again, and never at the end."""
    slots, step, steps = 3, 64, 3
    sizes = np.array([128, 0, 192, 64], I32)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(I32)
    x = rng.integers(-3, 4, (sizes.sum(), step * steps)).astype(F16)
    w = rng.integers(-8, 9, (len(sizes), 128, step * steps)).astype(np.int8)

    def body(x_ref, w_ref, starts_ref, o_ref, x_smem, w_smem, o_smem, ready, free):
        group, wg = lax.axis_index("group"), lax.axis_index("wg")
        first = starts_ref[group]
        tiles = lax.div(starts_ref[group + 1] - first, 64)

        @pl.when(wg == 2)
        def load():
            @pl.loop(0, tiles * steps)
            def _(i):
                slot, k = lax.rem(i, slots), lax.rem(i, steps) * step
                row = pl.multiple_of(first + lax.div(i, steps) * 64, 64)

                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(row, 64), pl.ds(k, step)], x_smem.at[slot], ready.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    w_ref.at[group, :, pl.ds(k, step)], w_smem.at[slot], ready.at[slot]
                )

        @pl.when(wg < 2)
        def compute():
            columns = pl.ds(wg * 64, 64)

            @pl.loop(0, tiles)
            def _(t):
                def products(acc):
                    @pl.loop(0, steps)
                    def _(k):
                        slot = lax.rem(t * steps + k, slots)
                        plgpu.barrier_wait(ready.at[slot])
                        part = plgpu.load(w_smem.at[slot, columns], layout=plgpu.Layout.WGMMA)
                        plgpu.wgmma(acc, part.astype(F16), x_smem.at[slot].T)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot])

                    return acc[...]

                y = pl.run_scoped(products, plgpu.ACC((64, 64)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[wg] = y
                plgpu.commit_smem()
                row = pl.multiple_of(first + t * 64, 64)
                plgpu.copy_smem_to_gmem(o_smem.at[wg], o_ref.at[columns, pl.ds(row, 64)])

    got = run(
        body,
        np.zeros((128, len(x)), F32),
        x,
        w,
        starts,
        grid=(len(sizes),),
        grid_names=("group",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, 64, step), F16, transforms=TILED),
            plgpu.SMEM((slots, 128, step), np.int8),
            plgpu.SMEM((2, 64, 64), F32),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
    )
    want = np.zeros((128, len(x)), F32)
    for g in range(len(sizes)):
        rows = slice(starts[g], starts[g + 1])
        want[:, rows] = w[g].astype(F32) @ x[rows].astype(F32).T
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("collective", [False, True])
def test_last_releases_of_a_cluster(run, rng, collective):
    """Blocks of a cluster release slots of each other; the last releases are seen by nobody."""
    steps, slots = 5, 2
    x = rng.standard_normal((2, steps, 256)).astype(F32)

    def body(x_ref, o_ref, smem, full, empty):
        c = lax.axis_index("c")

        @pl.loop(0, steps)
        def _(i):
            slot = lax.rem(i, slots)

            @pl.when(i >= slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(
                x_ref.at[0 if collective else c, i],
                smem.at[slot],
                full.at[slot],
                collective_axes="c" if collective else None,
            )
            plgpu.barrier_wait(full.at[slot])
            o_ref[c, i] = smem[slot]
            plgpu.barrier_arrive(empty.at[slot])

    got = every_way(
        run,
        body,
        x,
        x,
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[
            plgpu.SMEM((slots, 256), F32),
            plgpu.Barrier(num_barriers=slots),
            plgpu.ClusterBarrier(collective_axes=("c",), num_barriers=slots),
        ],
    )
    np.testing.assert_array_equal(got, x[[0, 0]] if collective else x)


# ---- copies to GMEM that nobody awaits -----------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    ["grouped", "open", "loop", "branch", "one thread", "warps", "read only", "some", "but one"],
)
def test_copies_that_nobody_awaits(run, rng, form):
    """The block waits at its end until they have read its memory."""
    x = rng.standard_normal((2, 4, 4096)).astype(F32)

    def body(x_ref, o_ref, smem):
        t = lax.axis_index("t")

        def fill(k):
            smem[t, k] = x_ref[t, k]
            plgpu.commit_smem()

        def copy(k, **options):
            plgpu.copy_smem_to_gmem(smem.at[t, k], o_ref.at[t, k], **options)

        for k in range(4):
            fill(k)
        if form == "loop":
            pl.loop(0, 4)(copy)
        elif form == "branch":
            for k in range(4):
                pl.when(x_ref[t, k, 0] < 10)(lambda k=k: copy(k))
        elif form == "warps":
            plgpu.warp_map(lambda w: copy(w))
        elif form == "one thread":

            def copy_all():
                for k in range(4):
                    copy(k)

            @pl.when(t == 0)
            def _():
                copy_all()
                plgpu.wait_smem_to_gmem(0)

            pl.when(t == 1)(copy_all)
        else:
            for k in range(4):
                copy(k, commit_group=form != "open")
                if form == "some" and k == 2:
                    plgpu.wait_smem_to_gmem(0)
        if form == "but one":
            plgpu.wait_smem_to_gmem(1)
        if form == "read only":
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    options = dict(num_threads=2, thread_name="t", scratch_types=[plgpu.SMEM((2, 4, 4096), F32)])
    np.testing.assert_array_equal(every_way(run, body, x, x, **options), x)
    text = plgpu.kernel(body, out_type=x, **options).lower(x).as_text("cuda")
    waits = text.rpartition("nobody awaits")[2] if "nobody awaits" in text else ""
    assert bool(waits) == (form != "read only")
    assert ("bulk_group_commit" in waits) == (form == "open")
    assert ("if (wg == 1)" in waits) == (form == "one thread")
    assert waits.count("bulk_group_wait_read<0>") == bool(waits)


@pytest.mark.parametrize("awaited", [True, False])
def test_copies_of_rows_that_nobody_awaits(awaited):
    """As copies of tiles: what is asynchronous in a group holds the block."""

    def body(x_ref, rows_ref, o_ref, smem):
        smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref.at[rows_ref[...], 0:64])
        if awaited:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    x, rows = shape(32, 64), shape(32, dtype=np.dtype(np.uint32))
    kernel = plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM((32, 64), F32)])
    text = kernel.lower(x, rows, target="sm_100a").as_text("cuda")
    assert ("nobody awaits" in text) == (not awaited)
    assert text.count("bulk_group_wait_read<0>();") == 1


@pytest.mark.parametrize("trips", [0, 1, 3])
@pytest.mark.parametrize("static", [True, False])
def test_a_wait_in_a_loop(run, trips, static):
    """A loop that runs for sure with a wait at its end leaves nothing; one that may not run, and
    one that is not known to, leave what came before."""
    x = np.arange(1024, dtype=F32)

    def body(x_ref, n_ref, o_ref, smem):
        smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)

        @pl.loop(0, trips if static else n_ref[0])
        def _(i):
            plgpu.wait_smem_to_gmem(0)
            plgpu.copy_smem_to_gmem(smem, o_ref)
            plgpu.wait_smem_to_gmem(0)

    n = np.array([trips], I32)
    options = dict(scratch_types=[plgpu.SMEM((1024,), F32)])
    np.testing.assert_array_equal(every_way(run, body, x, x, n, **options), x)
    text = plgpu.kernel(body, out_type=x, **options).lower(x, n).as_text("cuda")
    assert ("nobody awaits" in text) == (not static or trips == 0)


def test_a_late_read_sees_what_its_thread_writes():
    """Not waiting is right at the end alone: before, another write is a race, which shows."""
    x = np.arange(1024, dtype=F32)

    def body(x_ref, o_ref, smem):
        smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)
        smem[...] = -x_ref[...]

    wrong = 0
    for seed in range(32):
        got = interpreted(body, shape(1024), x, seed=seed, scratch_types=[plgpu.SMEM((1024,), F32)])
        wrong += not np.array_equal(got, x)
    assert wrong > 8
    lowered = plgpu.kernel(
        body, out_type=shape(1024), scratch_types=[plgpu.SMEM((1024,), F32)]
    ).lower(x)
    with pytest.raises(host.HostError, match="nobody waited|not ordered after its"):
        for seed in range(8):
            host.run(lowered, [x], [np.zeros_like(x)], seed)


# ---- what is still in flight ---------------------------------------------------------------------


def test_load_in_flight():
    """A copy to SMEM that no thread has seen arrive, whether it has or not."""

    def body(x_ref, o_ref, smem, bar):
        o_ref[...] = jnp.zeros((128,))
        plgpu.copy_gmem_to_smem(x_ref, smem, bar)
        for _ in range(20):
            pl.delay(10)

    x, scratch = np.zeros(128, F32), [plgpu.SMEM((128,), F32), plgpu.Barrier()]
    line = body.__code__.co_firstlineno + 2
    text = refused("may be in flight|copies in flight", body, shape(128), x, scratch_types=scratch)
    assert f"test_ends.py:{line}" in text
    refused_by_the_machine(
        "nobody waited for the bytes|expects more bytes", body, shape(128), x, scratch_types=scratch
    )


@pytest.mark.parametrize("seen", [True, False])
def test_last_loads_of_a_queue(seen):
    """The consumer stops one step early: the last copy is in flight."""
    steps, slots = 5, 2

    def body(x_ref, o_ref, smem, full, empty):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                pl.when(i >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]) and None)
                plgpu.copy_gmem_to_smem(x_ref.at[i], smem.at[slot], full.at[slot])

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, steps if seen else steps - 1)
            def _(i):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(full.at[slot])
                o_ref[i] = smem[slot]
                plgpu.barrier_arrive(empty.at[slot])

    x = np.random.default_rng(0).standard_normal((steps, 64)).astype(F32)
    ring = plgpu.Barrier(num_barriers=slots)
    options = dict(
        num_threads=2, thread_name="wg", scratch_types=[plgpu.SMEM((slots, 64), F32), ring, ring]
    )
    if seen:
        for seed in SEEDS:
            got = interpreted(body, shape(steps, 64), x, seed=seed, **options)
            np.testing.assert_array_equal(got, x)
        return
    refused(r"'full\[0\]'.*(may be|copies) in flight", body, shape(steps, 64), x, **options)


def test_load_to_memory_of_an_inner_scope():
    """The barrier lives on, the memory does not."""

    def body(x_ref, o_ref, bar):
        def inner(smem):
            plgpu.copy_gmem_to_smem(x_ref, smem, bar)

        pl.run_scoped(inner, plgpu.SMEM((128,), F32))
        plgpu.barrier_wait(bar)
        o_ref[...] = jnp.zeros((128,))

    with pytest.raises(ValueError, match="scope of 'smem' ends while the copy .*may still write"):
        interpreted(body, shape(128), np.zeros(128, F32), scratch_types=[plgpu.Barrier()])


def test_store_to_a_peer_in_flight():
    def body(o_ref, smem, bar):
        c = lax.axis_index("c")
        plgpu.async_store_smem(
            jnp.zeros((128,), I32), smem, bar, cluster_idx=1 - c, cluster_dim="c"
        )
        o_ref[...] = jnp.zeros((128,), I32)

    refused(
        "may be in flight|copies in flight",
        body,
        shape(128, dtype=I32),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[plgpu.SMEM((128,), I32), plgpu.Barrier()],
    )


def test_phases_that_are_not_complete():
    """One arrival of two: that is not the end of a queue."""

    def body(o_ref, bar):
        plgpu.barrier_arrive(bar)
        o_ref[...] = jnp.zeros((128,))

    refused("1 of 2 arrivals", body, shape(128), scratch_types=[plgpu.Barrier(num_arrivals=2)])


# ---- scopes that come again ----------------------------------------------------------------------


def queue_in_a_scope(steps, drained):
    """A ring of two slots in a scope that a loop enters three times."""

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        @pl.loop(0, 3)
        def _(r):
            def scope(smem, full, empty):
                @pl.when(wg == 0)
                def _():
                    @pl.loop(0, steps)
                    def _(i):
                        slot = lax.rem(i, 2)
                        pl.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[slot]) and None)
                        plgpu.copy_gmem_to_smem(x_ref.at[r, i], smem.at[slot], full.at[slot])

                    for i in range(steps, steps + 2) if drained else ():
                        plgpu.barrier_wait(empty.at[i % 2])

                @pl.when(wg == 1)
                def _():
                    @pl.loop(0, steps)
                    def _(i):
                        slot = lax.rem(i, 2)
                        plgpu.barrier_wait(full.at[slot])
                        o_ref[r, i] = smem[slot]
                        plgpu.barrier_arrive(empty.at[slot])

            ring = plgpu.Barrier(num_barriers=2)
            pl.run_scoped(scope, plgpu.SMEM((2, 64), F32), ring, ring, collective_axes="wg")

    return body


@pytest.mark.parametrize("steps", [2, 5])
def test_scope_in_a_loop(run, rng, steps):
    """All phases are seen before it ends, so that it can be entered again."""
    x = rng.standard_normal((3, steps, 64)).astype(F32)
    options = dict(num_threads=2, thread_name="wg")
    got = every_way(run, queue_in_a_scope(steps, True), x, x, **options)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_unseen_phases_of_a_scope_in_a_loop(steps):
    text = refused(
        r"scope of barrier 'empty.*in a loop and can be entered again",
        queue_in_a_scope(steps, False),
        shape(3, steps, 64),
        np.zeros((3, steps, 64), F32),
        num_threads=2,
        thread_name="wg",
    )
    assert re.search(r"the last one at .*test_ends.py:\d+", text)


def test_unseen_phases_of_a_scope_that_comes_once(run):
    """The same outside of a loop, before other work of the kernel."""

    def body(o_ref):
        def scope(bars):
            plgpu.barrier_arrive(bars.at[0])
            plgpu.barrier_arrive(bars.at[1])
            plgpu.barrier_wait(bars.at[1])
            plgpu.barrier_arrive(bars.at[1])

        def other(bar):
            plgpu.barrier_arrive(bar)
            plgpu.barrier_wait(bar)

        pl.run_scoped(scope, bars=plgpu.Barrier(num_barriers=2))
        pl.run_scoped(other, bar=plgpu.Barrier())
        o_ref[...] = jnp.arange(128, dtype=I32)

    np.testing.assert_array_equal(every_way(run, body, np.zeros(128, I32)), np.arange(128))


def test_threads_that_wait_in_other_rounds():
    """Threads take turns to wait for one barrier of a scope in a loop: each misses a phase."""

    def body(o_ref):
        wg = lax.axis_index("wg")

        @pl.loop(0, 4)
        def _(r):
            def scope(bar):
                pl.when(wg == 0)(lambda: plgpu.barrier_arrive(bar) and None)
                pl.when(lax.rem(r, 2) == wg)(lambda: plgpu.barrier_wait(bar) and None)

            pl.run_scoped(scope, plgpu.Barrier(), collective_axes="wg")

        o_ref[...] = jnp.zeros((128,))

    refused(
        "this thread waits on barrier 'bar'.*when its scope was entered before, it did not",
        body,
        shape(128),
        num_threads=2,
        thread_name="wg",
    )


# ---- accumulators --------------------------------------------------------------------------------


def with_operands(body):
    """body(a, b, c, o_ref) with operands of a product in SMEM, (64, 64) each."""

    def kernel(x_ref, y_ref, o_ref, a, b, c, bar):
        for s in (a, c):
            plgpu.copy_gmem_to_smem(x_ref, s, bar)
        plgpu.copy_gmem_to_smem(y_ref, b, bar)
        plgpu.barrier_wait(bar)
        body(a, b, c, o_ref)

    tile = plgpu.SMEM((64, 64), F16, transforms=TILED)
    return kernel, dict(scratch_types=[tile, tile, tile, plgpu.Barrier(num_arrivals=3)])


ACC = plgpu.ACC((64, 64))


@pytest.fixture
def operands(rng):
    return tuple(rng.integers(-3, 4, (64, 64)).astype(F16) for _ in range(2))


def line_of(f, offset):
    return f"test_ends.py:{f.__code__.co_firstlineno + offset}"


def test_leaving_an_accumulator_in_flight(operands):
    def body(a, b, c, o_ref):
        def scope(acc):
            plgpu.wgmma(acc, a, b)

        pl.run_scoped(scope, ACC)
        o_ref[...] = jnp.zeros((64, 64))

    kernel, options = with_operands(body)
    text = refused(
        "scope of accumulator 'acc' ends while the wgmma",
        kernel,
        shape(64, 64),
        *operands,
        **options,
    )
    assert line_of(body, 2) in text and line_of(body, 4) in text


@pytest.mark.parametrize("form", ["none", "one", "slice", "write"])
def test_accumulator_in_flight_is_used(operands, form):
    """A read that does not wait for its own product, a write under it."""

    def body(a, b, c, o_ref):
        def scope(acc):
            plgpu.wgmma(acc.at[:, 64:] if form == "slice" else acc, a, b)
            if form == "none":
                out = plgpu.wgmma_accumulator_load(acc, wait_n=None)
            elif form == "write":
                acc[...] = jnp.ones((64, 64))
                out = acc[...]
            else:
                out = plgpu.wgmma_accumulator_load(acc, wait_n=1)
            plgpu.wgmma_wait(0)
            return out[:, :64]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 128)) if form == "slice" else ACC)

    kernel, options = with_operands(body)
    text = refused(
        rf"'acc' is {'written' if form == 'write' else 'read'} while the wgmma",
        kernel,
        shape(64, 64),
        *operands,
        **options,
    )
    assert line_of(body, 2) in text
    assert line_of(body, {"none": 4, "write": 6}.get(form, 9)) in text


def test_reads_that_do_not_wait(run, operands):
    """wait_n=None after a wait; wait_n=1 while another accumulator is written; another half."""

    def body(a, b, c, o_ref):
        def scope(acc, other):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            first = plgpu.wgmma_accumulator_load(acc, wait_n=None)
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(other, c, b)
            second = plgpu.wgmma_accumulator_load(acc, wait_n=1)
            return first + second + other[...]

        o_ref[...] = pl.run_scoped(scope, ACC, ACC)

    kernel, options = with_operands(body)
    x, y = operands
    got = every_way(run, kernel, np.zeros((64, 64), F32), x, y, **options)
    np.testing.assert_array_equal(got, 4 * (x.astype(F32) @ y.astype(F32)))


def test_halves_of_an_accumulator(run, operands):
    """One half is read while a product writes to the other."""

    def body(a, b, c, o_ref):
        def scope(acc):
            left, right = acc.at[:, :64], acc.at[:, 64:]
            plgpu.wgmma(left, a, b)
            plgpu.wgmma(right, c, b)
            x = plgpu.wgmma_accumulator_load(left, wait_n=1)
            return x * 2 + plgpu.wgmma_accumulator_load(right)

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 128)))

    kernel, options = with_operands(body)
    x, y = operands
    got = every_way(run, kernel, np.zeros((64, 64), F32), x, y, **options)
    np.testing.assert_array_equal(got, 3 * (x.astype(F32) @ y.astype(F32)))


def outer_product_in_flight(wait):
    """An inner scope ends while a product of the outer one is in flight; its operand is written."""

    def body(a, b, c, o_ref):
        def outer(acc):
            def inner(acc2):
                plgpu.wgmma(acc2, c, b)
                plgpu.wgmma(acc, a, b)
                return plgpu.wgmma_accumulator_load(acc2, wait_n=1)

            x = pl.run_scoped(inner, ACC)
            if wait:
                plgpu.wgmma_wait(0)
            a[...] = jnp.zeros((64, 64), F16)
            return x + acc[...]

        o_ref[...] = pl.run_scoped(outer, ACC)

    return with_operands(body)


def test_outer_product_and_its_operand(run, operands):
    kernel, options = outer_product_in_flight(True)
    x, y = operands
    got = every_way(run, kernel, np.zeros((64, 64), F32), x, y, **options)
    np.testing.assert_array_equal(got, 2 * (x.astype(F32) @ y.astype(F32)))


def test_outer_product_is_seen_in_flight(operands):
    """Leaving the inner scope waits for nothing: most schedules show the missing wait."""
    kernel, options = outer_product_in_flight(False)
    x, y = operands
    want = 2 * (x.astype(F32) @ y.astype(F32))
    wrong = 0
    for seed in range(32):
        got = interpreted(kernel, shape(64, 64), x, y, seed=seed, **options)
        wrong += not np.array_equal(got, want)
    assert wrong > 16, wrong
