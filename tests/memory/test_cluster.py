"""Clusters: multicast copies, cluster barriers, refs to other blocks; counters of a launch; where
the lanes meet before an arrival."""

import functools
import itertools
import random
import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

f16, f32, bf16 = np.float16, np.float32, np.dtype(ml_dtypes.bfloat16)
NAMES = ("cx", "cy", "cz")
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def everyone(cluster):
    """A barrier at which all blocks of the cluster meet."""
    return plgpu.ClusterBarrier(collective_axes=(NAMES[: len(cluster)],))


def interpreted(body, out, *args, seed=0, cluster=(2,), **options):
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(*out),
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        interpret=plgpu.InterpretParams(seed=seed),
        **options,
    )
    return kernel(*args)


def lowered(body, *args, cluster=(2,), out=((128,), f32), **options):
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(*out),
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        **options,
    )
    return kernel.lower(*args).as_text("graph")


# ---- multicast copies ----------------------------------------------------------------------------


SHAPES = [
    ((2,), ("cx",)),
    ((4,), ("cx",)),
    ((8,), ("cx",)),
    ((2, 2), ("cx",)),
    ((2, 2), ("cy",)),
    ((2, 2), ("cx", "cy")),
    ((2, 4), ("cy", "cx")),
    ((1, 2), ("cx",)),
    ((2, 1, 2), ("cx", "cz")),
    ((2, 2, 2), ("cx", "cz")),
    ((3, 2), ("cy",)),
]
BLOCKS = [
    ((64, 128), f32, ()),
    ((64, 128), bf16, SWIZZLED),  # two chunks of columns
    ((64, 64), f16, SWIZZLED),  # one: rows are shared
    ((256,), np.int32, ()),
    ((2, 4, 8, 64), np.int8, ()),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("cluster,axes", SHAPES, ids=str)
@pytest.mark.parametrize("shape,dtype,transforms", BLOCKS, ids=str)
def test_multicast(run, rng, cluster, axes, shape, dtype, transforms):
    """Every block gets all of its block, whichever blocks load the parts of it; blocks that differ
    along another axis get another one."""
    private = [k for k in range(len(cluster)) if NAMES[k] not in axes]
    parts = tuple(cluster[k] for k in private)
    x = rng.integers(-100, 100, (*parts, *shape)).astype(dtype)

    def body(x_ref, o_ref, smem, bar, done):
        at = [lax.axis_index(n) for n in NAMES[: len(cluster)]]
        src = x_ref.at[tuple(at[k] for k in private)] if private else x_ref
        plgpu.copy_gmem_to_smem(src, smem, bar, collective_axes=axes)
        plgpu.barrier_wait(bar)
        o_ref[tuple(at)] = smem[...]
        meet(done)

    got = run(
        body,
        np.zeros((*cluster, *shape), dtype),
        x,
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        scratch_types=[
            plgpu.SMEM(shape, dtype, transforms=transforms),
            plgpu.Barrier(),
            everyone(cluster),
        ],
    )
    for at in itertools.product(*map(range, cluster)):
        np.testing.assert_array_equal(got[at], x[tuple(at[k] for k in private)])


@pytest.mark.parametrize("start", [(0, 0), (40, 64), (-8, 96), (96, 128)])
def test_multicast_overhanging(run, rng, start):
    """Parts of blocks that lie outside are zeros, in every block."""
    x = rng.standard_normal((100, 160)).astype(f32)

    def body(x_ref, where_ref, o_ref, smem, bar):
        i, j = where_ref[0], pl.multiple_of(where_ref[1], 32)
        src = x_ref.at[pl.ds(i, 64), pl.ds(j, 128)]
        plgpu.copy_gmem_to_smem(src, smem, bar, collective_axes="cx")
        plgpu.barrier_wait(bar)
        o_ref[lax.axis_index("cx")] = smem[...]

    padded = np.zeros((300, 400), f32)
    padded[100:200, 100:260] = x
    got = run(
        body,
        np.zeros((4, 64, 128), f32),
        x,
        np.array(start, np.int32),
        cluster=(4,),
        cluster_names=("cx",),
        scratch_types=[plgpu.SMEM((64, 128), f32), plgpu.Barrier()],
    )
    i, j = start[0] + 100, start[1] + 100
    for block in got:
        np.testing.assert_array_equal(block, padded[i : i + 64, j : j + 128])


def slots_body(cluster, steps, slots, wait=True):
    """Steps of multicast copies through slots; a slot is refilled when all blocks released it."""

    def body(x_ref, o_ref, smem, full, empty):
        me = [lax.axis_index(n) for n in NAMES[: len(cluster)]]
        for k in range(steps):
            if k >= slots and wait:
                plgpu.barrier_wait(empty.at[k % slots])
            plgpu.copy_gmem_to_smem(
                x_ref.at[k], smem.at[k % slots], full.at[k % slots], collective_axes="cx"
            )
            plgpu.barrier_wait(full.at[k % slots])
            o_ref[(*me, k)] = smem[k % slots] * 2
            plgpu.barrier_arrive(empty.at[k % slots])
        for k in range(max(steps - slots, 0) if wait else 0, steps):
            plgpu.barrier_wait(empty.at[k % slots])

    scratch = [
        plgpu.SMEM((slots, 128), f32),
        plgpu.Barrier(num_barriers=slots),
        plgpu.ClusterBarrier(collective_axes=("cx",), num_barriers=slots),
    ]
    return body, scratch


@pytest.mark.covering(1)
@pytest.mark.parametrize("cluster", [(2,), (2, 2), (4,)], ids=str)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slots(run, rng, cluster, slots):
    x = rng.standard_normal((7, 128)).astype(f32)
    body, scratch = slots_body(cluster, 7, slots)
    got = run(
        body,
        np.zeros((*cluster, 7, 128), f32),
        x,
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        scratch_types=scratch,
    )
    np.testing.assert_array_equal(got, np.broadcast_to(x * 2, got.shape))


def test_every_schedule_agrees(rng):
    x = rng.standard_normal((7, 128)).astype(f32)
    body, scratch = slots_body((2, 2), 7, 2)
    results = {
        interpreted(
            body, ((2, 2, 7, 128), f32), x, seed=s, cluster=(2, 2), scratch_types=scratch
        ).tobytes()
        for s in range(50)
    }
    assert results == {np.broadcast_to(x * 2, (2, 2, 7, 128)).tobytes()}


def test_refilled_too_early_shows(rng):
    """Without waiting for the other block's release its slot is overwritten under some schedule."""
    x = rng.standard_normal((7, 128)).astype(f32)

    def body(x_ref, o_ref, smem, full):
        me = lax.axis_index("cx")
        for k in range(7):
            plgpu.copy_gmem_to_smem(x_ref.at[k], smem, full, collective_axes="cx")
            plgpu.barrier_wait(full)
            o_ref[me, k] = smem[...]

    bad = 0
    for seed in range(30):
        try:
            got = interpreted(
                body,
                ((2, 7, 128), f32),
                x,
                seed=seed,
                scratch_types=[plgpu.SMEM((128,), f32), plgpu.Barrier()],
            )
            bad += not np.array_equal(got, np.stack([x, x]))
        except (ValueError, plgpu.DeadlockError):
            bad += 1
    assert bad > 0


def gemm(m, n, k, cluster, tile=(128, 128, 64), slots=3, **options):
    """Warp-specialised: A is shared along cy, B along cx."""
    bm, bn, bk = tile
    cm, cn = cluster

    def body(a_ref, b_ref, o_ref, o_smem):
        wg = lax.axis_index("wg")
        i = lax.axis_index("m") * cm + lax.axis_index("cx")
        j = lax.axis_index("n") * cn + lax.axis_index("cy")
        rows = pl.ds(wg * (bm // 2), bm // 2)

        def compute(pipeline):
            def scope(acc):
                pipeline(acc)
                o_smem[rows] = acc[...].astype(f16)
                plgpu.commit_smem()
                out = o_ref.at[pl.ds(i * bm + wg * (bm // 2), bm // 2), pl.ds(j * bn, bn)]
                plgpu.copy_smem_to_gmem(o_smem.at[rows], out)
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(scope, plgpu.ACC((bm // 2, bn)))

        def step(_, a, b, acc):
            plgpu.wgmma(acc, a.at[rows], b)
            plgpu.wgmma_wait(0)
            return acc

        specs = [
            plgpu.BlockSpec(
                (bm, bk), lambda s: (i, s), transforms=SWIZZLED, collective_axes=("cy",)
            ),
            plgpu.BlockSpec(
                (bk, bn), lambda s: (s, j), transforms=SWIZZLED, collective_axes=("cx",)
            ),
        ]
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // bk,),
            memory_registers=40,
            in_specs=specs,
            max_concurrent_steps=slots,
            wg_axis="wg",
            num_compute_wgs=2,
            compute_context=compute,
        )(a_ref, b_ref)

    return dict(
        body=body,
        out=((m, n), f16),
        grid=(m // bm // cm, n // bn // cn),
        grid_names=("m", "n"),
        cluster=cluster,
        num_threads=3,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((bm, bn), f16, transforms=SWIZZLED)],
        **options,
    )


def matrices(rng, m, n, k):
    return (rng.standard_normal(s).astype(f16) for s in ((m, k), (k, n)))


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (2, 2), (4, 1)], ids=str)
def test_gemm(run, rng, cluster):
    m, n, k = 128 * 2 * cluster[0], 128 * cluster[1], 320
    a, b = matrices(rng, m, n, k)
    options = gemm(m, n, k, cluster)
    body, out = options.pop("body"), np.zeros(*options.pop("out"))
    got = run(body, out, a, b, cluster_names=NAMES[:2], **options)
    np.testing.assert_allclose(got.astype(f32), a.astype(f32) @ b.astype(f32), atol=0.1)


def test_every_schedule_of_a_gemm_agrees(rng):
    a, b = matrices(rng, 128, 256, 320)
    options = gemm(128, 256, 320, (2, 2), tile=(64 * 2, 64, 64), slots=2)
    options.update(grid=(1, 2), cluster=(1, 2))
    results = {
        interpreted(
            options["body"],
            options["out"],
            a,
            b,
            seed=s,
            **{k: v for k, v in options.items() if k not in ("body", "out")},
        ).tobytes()
        for s in range(50)
    }
    assert len(results) == 1


# ---- cluster barriers ----------------------------------------------------------------------------


def neighbours(at, cluster, groups):
    """The blocks whose arrivals block `at` waits for."""
    for other in itertools.product(*map(range, cluster)):
        named = [g if isinstance(g, tuple) else (g,) for g in groups]
        axes = {n for g in named for n in g}
        differ = {NAMES[k] for k in range(len(cluster)) if at[k] != other[k]}
        if differ <= axes and sum(bool(differ & set(g)) for g in named) <= 1:
            yield other


@pytest.mark.parametrize(
    "cluster,groups",
    [
        ((2,), ("cx",)),
        ((5,), ("cx",)),
        ((2, 2), ("cx", "cy")),
        ((2, 2), (("cx", "cy"),)),
        ((2, 3), ("cy",)),
        ((2, 2, 2), ("cx", ("cy", "cz"))),
        ((2, 2, 2), ("cz", "cx", "cy")),
        ((2, 1, 3), (("cx", "cz"), "cy")),
    ],
    ids=str,
)
def test_who_waits_for_whom(run, cluster, groups):
    """After arrive and wait a block reads what blocks that differ in one group at most wrote."""

    def body(o_ref, sum_ref, bar, done):
        at = tuple(lax.axis_index(n) for n in NAMES[: len(cluster)])
        mine = functools.reduce(lambda x, c: x * 10 + c + 1, at, 0)
        o_ref[at] = mine
        meet(bar)
        total = jnp.int32(0)
        for other in itertools.product(*map(range, cluster)):
            near = jnp.bool_(False)
            for choice in itertools.product(*map(range, cluster)):
                if other not in set(neighbours(choice, cluster, groups)):
                    continue
                here = functools.reduce(lambda x, y: x & y, [a == c for a, c in zip(at, choice)])
                near = near | here
            total = total + lax.cond(near, lambda w=other: o_ref[w], lambda: jnp.int32(0))
        sum_ref[at] = total
        meet(done)

    def value(at):
        return functools.reduce(lambda x, c: x * 10 + c + 1, at, 0)

    out = np.zeros(cluster, np.int32)
    _, got = run(
        body,
        (out, out.copy()),
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        scratch_types=[plgpu.ClusterBarrier(collective_axes=groups), everyone(cluster)],
    )
    for at in itertools.product(*map(range, cluster)):
        assert got[at] == sum(map(value, neighbours(at, cluster, groups))), at


def test_arrays_of_cluster_barriers_and_several_threads(run):
    """num_arrivals counts the threads of each block; barriers are indexed dynamically, and phases
    follow each other."""

    def body(o_ref, smem, bars):
        c, t = lax.axis_index("cx"), lax.axis_index("t")
        for k in range(5):
            smem[t] = jnp.full(128, (k * 10 + c) * 10 + t, jnp.int32)
            meet(bars.at[k % 2, c - c])
            other = plgpu.cluster_ref(smem, {"cx": 1 - c})
            o_ref[c, t, k] = other[1 - t]
            meet(bars.at[k % 2, 1])

    got = run(
        body,
        np.zeros((2, 2, 5, 128), np.int32),
        cluster=(2,),
        cluster_names=("cx",),
        num_threads=2,
        thread_name="t",
        scratch_types=[
            plgpu.SMEM((2, 128), np.int32),
            plgpu.ClusterBarrier(collective_axes=("cx",), num_barriers=(2, 2), num_arrivals=2),
        ],
    )
    for c, t, k in itertools.product(range(2), range(2), range(5)):
        assert (got[c, t, k] == (k * 10 + 1 - c) * 10 + 1 - t).all()


def test_scopes_inside_of_a_loop(run):
    """Barriers and SMEM of a scope that is entered again and again, by blocks at their own pace."""

    def body(o_ref, end):
        c = lax.axis_index("cx")

        @pl.loop(0, 4)
        def _(k):
            def scope(smem, bar, done):
                smem[...] = jnp.full(128, k * 2 + c, jnp.int32)
                meet(bar)
                o_ref[c, k] = plgpu.cluster_ref(smem, {"cx": 1 - c})[...]
                meet(done)

            barrier = plgpu.ClusterBarrier(collective_axes=("cx",))
            pl.run_scoped(scope, plgpu.SMEM((128,), np.int32), barrier, barrier)

        meet(end)

    got = run(
        body,
        np.zeros((2, 4, 128), np.int32),
        cluster=(2,),
        cluster_names=("cx",),
        scratch_types=[plgpu.ClusterBarrier(collective_axes=("cx",))],
    )
    for c, k in itertools.product(range(2), range(4)):
        assert (got[c, k] == 2 * k + 1 - c).all()


# ---- refs to other blocks ------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("cluster,axis", [((3,), "cx"), ((2, 3), "cx"), ((2, 3), "cy")], ids=str)
@pytest.mark.parametrize("transforms", [(), SWIZZLED], ids=["plain", "swizzled"])
def test_cluster_ref(run, cluster, axis, transforms):
    """Each block reads its right neighbour and writes to its left one: arrays, slices, scalars."""
    dim = NAMES.index(axis)
    size = cluster[dim]

    def body(o_ref, s_ref, smem, inbox, bar):
        at = tuple(lax.axis_index(n) for n in NAMES[: len(cluster)])
        me = at[dim]
        mine = functools.reduce(lambda x, c: x * 4 + c, at, 0)
        smem[...] = lax.broadcasted_iota(f16, (64, 64), 1) + (mine * 64).astype(f16)
        inbox[2] = mine * 3
        meet(bar)
        right = plgpu.cluster_ref(smem, {axis: (me + 1) % size})
        left = plgpu.cluster_ref(inbox, {axis: (me + size - 1) % size})
        o_ref[(*at, pl.ds(0, 64))] = right[...]
        o_ref[(*at, pl.ds(64, 8))] = right.at[pl.ds(8 * me, 8)][...]
        s_ref[(*at, 0)] = plgpu.cluster_ref(inbox, {axis: (me + 1) % size})[2].astype(f32)
        left[pl.ds(1, 1)] = jnp.full(1, mine, jnp.int32)
        left[0] = mine + 100
        meet(bar)
        s_ref[(*at, 1)] = inbox[0].astype(f32)
        s_ref[(*at, 2)] = inbox[1].astype(f32)

    o, s = run(
        body,
        (np.zeros((*cluster, 72, 64), f16), np.zeros((*cluster, 3), f32)),
        cluster=cluster,
        cluster_names=NAMES[: len(cluster)],
        scratch_types=[
            plgpu.SMEM((64, 64), f16, transforms=transforms),
            plgpu.SMEM((3,), np.int32),
            plgpu.ClusterBarrier(collective_axes=(axis,)),
        ],
    )
    for at in itertools.product(*map(range, cluster)):
        right = list(at)
        right[dim] = (at[dim] + 1) % size
        v = functools.reduce(lambda x, c: x * 4 + c, right, 0)
        want = np.broadcast_to(np.arange(64) + v * 64, (64, 64))
        np.testing.assert_array_equal(o[at][:64], want)
        np.testing.assert_array_equal(o[at][64:], want[:8])
        np.testing.assert_array_equal(s[at], [v * 3, v + 100, v])


def exchanged(x, o, both, met):
    """The rows of x, which were loaded where the other block then writes."""
    own, inbox = both
    me = lax.axis_index("cx")
    own[...] = x[me]
    value = own[...] + 1
    meet(met)  # both are done with their own memory
    plgpu.cluster_ref(inbox, {"cx": 1 - me})[...] = value
    meet(met)
    o[me] = inbox[...]


def test_unions_that_other_blocks_reach(run, rng):
    """The groups overlay each other also if only one of them is reached by the other block."""
    x = rng.standard_normal((2, 64, 128)).astype(f32)
    smem = plgpu.SMEM((64, 128), f32)
    kernel = plgpu.kernel(
        exchanged,
        out_type=plgpu.ShapeDtypeStruct(x.shape, f32),
        scratch_types=[plgpu.RefUnion(smem, smem), everyone((2,))],
        cluster=(2,),
        cluster_names=("cx",),
    )
    assert kernel.lower(x).resources()["smem_bytes"] < 2 * x[0].nbytes
    np.testing.assert_array_equal(run.call(kernel, x), x[::-1] + 1)


def test_a_block_does_not_end_before_its_memory_is_read(run):
    """The block that has nothing more to do waits for the one that still reads."""

    def body(o_ref, s_ref, barrier):
        i = lax.axis_index("cx")
        s_ref[...] = jnp.full((128,), 3, jnp.int32) * (i + 1)
        meet(barrier)

        @pl.when(i == 1)
        def _():
            def step(k, total):
                return total + plgpu.cluster_ref(s_ref, {"cx": 0})[...]

            o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros((128,), jnp.int32))

    scratch = [plgpu.SMEM((128,), np.int32), everyone((2,))]
    out = np.zeros(128, np.int32)
    got = run(body, out, cluster=(2,), cluster_names=("cx",), scratch_types=scratch)
    assert (got == 9).all()


@pytest.mark.parametrize(
    "cluster, axis", [((2,), "cx"), ((3, 2), "cx"), ((2, 2, 2), "cy")], ids=str
)
def test_leader_waits(run, cluster, axis):
    """Arrivals of both threads of all blocks along an axis count in the first of them alone, which
    reads what they wrote to it; phases of two barriers go on."""
    names, k = NAMES[: len(cluster)], NAMES.index(axis)
    size, rounds, n = cluster[k], 5, int(np.prod(cluster))

    def body(o_ref, inbox, full, free):
        me, thread = lax.axis_index(axis), lax.axis_index("t")
        every = lax.axis_index(names)

        @pl.loop(0, rounds)
        def _(i):
            plgpu.cluster_ref(inbox, {axis: 0})[thread, me] = i * 1000 + every * 10 + thread
            plgpu.barrier_arrive(full.at[i % 2])

            @pl.when(me == 0)
            def _():
                plgpu.barrier_wait(full.at[i % 2])
                o_ref[every, i, thread] = inbox[thread]

            meet(free)

    got = run(
        body,
        np.zeros((n, rounds, 2, size), np.int32),
        cluster=cluster,
        cluster_names=names,
        num_threads=2,
        thread_name="t",
        scratch_types=[
            plgpu.SMEM((2, size), np.int32),
            plgpu.ClusterBarrier(
                collective_axes=(axis,), num_barriers=2, num_arrivals=2, leader_tracked=True
            ),
            plgpu.ClusterBarrier(collective_axes=(names,), num_arrivals=2),
        ],
    )
    rank = np.arange(n).reshape(cluster)
    for at in np.ndindex(*cluster):
        if at[k]:
            continue
        peers = np.take(
            rank[tuple(slice(None) if d == k else at[d] for d in range(rank.ndim))], range(size)
        )
        for i, thread in itertools.product(range(rounds), range(2)):
            np.testing.assert_array_equal(got[rank[at], i, thread], i * 1000 + peers * 10 + thread)


def test_axes_named_by_anything(run):
    """Names of axes are any hashable, 0 too, wherever one or several are taken."""
    grid, block, thread = 0, 1, 2

    def body(x_ref, o_ref, done):
        def scope(smem, bar):
            @pl.when(lax.axis_index(thread) == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref, smem, bar, collective_axes=block)

            plgpu.barrier_wait(bar)
            return smem[0]

        extra = pl.run_scoped(
            scope,
            plgpu.SMEM((64,), np.int32),
            plgpu.Barrier(),
            collective_axes=thread,
        )
        meet(done)

        @plgpu.nd_loop((3,), collective_axes=(grid, block))
        def _(info):
            at = lax.axis_index((grid, block, thread))
            o_ref[at, info.local_index] = info.index[0] + lax.axis_size(block) + extra

    got = run(
        body,
        np.zeros((8, 4), np.int32),
        np.arange(5, 69, dtype=np.int32),
        grid=(2,),
        grid_names=(grid,),
        cluster=(2,),
        cluster_names=(block,),
        num_threads=2,
        thread_name=thread,
        scratch_types=[plgpu.ClusterBarrier(collective_axes=block, num_arrivals=2)],
    )
    rank = np.arange(8) // 2
    np.testing.assert_array_equal(got[:6, 0], rank[:6] + 7)


def test_others_than_the_leader_wait_in_vain():
    def body(o_ref, bar):
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)

    bar = plgpu.ClusterBarrier(collective_axes="cx", leader_tracked=True)
    with pytest.raises(plgpu.DeadlockError, match=r"block \(1,\).*barrier_wait"):
        interpreted(body, ((128,), f32), scratch_types=[bar])
    for axes in (("cx", "cy"), (("cx", "cy"),)):
        with pytest.raises(NotImplementedError, match="one cluster axis, not grouped"):
            plgpu.ClusterBarrier(collective_axes=axes, leader_tracked=True)


def test_cluster_ref_out_of_bounds():
    def body(o_ref, smem, bar):
        smem[...] = jnp.zeros(128, jnp.float32)
        meet(bar)
        o_ref[...] = plgpu.cluster_ref(smem, {"cx": lax.axis_index("cx") + 1})[...]
        meet(bar)

    scratch = [plgpu.SMEM((128,), f32), everyone((2,))]
    for reads in ("raise", "uninitialized"):
        kernel = plgpu.kernel(
            body,
            out_type=np.zeros(128, f32),
            cluster=(2,),
            cluster_names=("cx",),
            scratch_types=scratch,
            interpret=plgpu.InterpretParams(out_of_bounds_reads=reads),
        )
        with pytest.raises(IndexError, match=r"cluster_ref of 'smem' to index 2 .*size 2"):
            kernel()


# ---- misuse --------------------------------------------------------------------------------------


def test_a_block_that_does_not_take_part_is_named():
    def body(x_ref, o_ref, smem, bar):
        @pl.when(lax.axis_index("cx") != 1)
        def _():
            plgpu.copy_gmem_to_smem(x_ref, smem, bar, collective_axes="cx")
            plgpu.barrier_wait(bar)

    x = np.zeros(384, f32)
    scratch = [plgpu.SMEM((384,), f32), plgpu.Barrier()]
    line = body.__code__.co_firstlineno + 4
    for seed in range(10):
        with pytest.raises(plgpu.DeadlockError) as caught:
            interpreted(body, ((384,), f32), x, seed=seed, cluster=(3,), scratch_types=scratch)
        text = str(caught.value)
        assert "block (0,), thread 0: barrier_wait" in text
        assert "block (2,), thread 0: barrier_wait" in text
        assert f"{__file__}:{line - 1} lacks the part of block (1,)" in text


def test_a_block_that_does_not_arrive_is_seen():
    def body(o_ref, bar):
        @pl.when(lax.axis_index("cx") == 0)
        def _():
            plgpu.barrier_arrive(bar)

        plgpu.barrier_wait(bar)

    with pytest.raises(plgpu.DeadlockError, match=r"block \(1,\).*arrivals 1/2"):
        interpreted(body, ((128,), f32), scratch_types=[everyone((2,))])


@pytest.mark.parametrize("what", ["source", "destination", "barrier", "predicate"])
def test_blocks_must_issue_the_same_copy(what):
    def body(x_ref, o_ref, smem, bars):
        c = lax.axis_index("cx")
        at = {what: c}.get
        plgpu.copy_gmem_to_smem(
            x_ref.at[at("source", 0)],
            smem.at[at("destination", 0)],
            bars.at[at("barrier", 0)],
            collective_axes="cx",
            predicate=c == 0 if what == "predicate" else None,
        )
        plgpu.barrier_wait(bars.at[at("barrier", 0)])

    scratch = [plgpu.SMEM((2, 128), f32), plgpu.Barrier(num_barriers=2)]
    for seed in range(5):
        with pytest.raises(ValueError, match=rf"{what}.* differs between this block and block \("):
            interpreted(
                body, ((128,), f32), np.zeros((2, 128), f32), seed=seed, scratch_types=scratch
            )


def test_phases_of_a_cluster_barrier_must_be_awaited():
    """A block that runs ahead of a waiter: the error names the barrier's block."""

    def body(o_ref, bar):
        for _ in range(3):
            plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)

    with pytest.raises(ValueError, match="for the first time, but [23] phases are complete"):
        interpreted(body, ((128,), f32), scratch_types=[everyone((2,))])

    def unbalanced(o_ref, bar):
        @pl.when(lax.axis_index("cx") == 0)
        def _():
            plgpu.barrier_arrive(bar)

    with pytest.raises(ValueError, match="1 of 2 arrivals"):
        interpreted(unbalanced, ((128,), f32), scratch_types=[everyone((2,))])


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*is done by loads and stores of all lanes of each block")
@pytest.mark.parametrize(
    "shape, size, dtype, transforms, start",
    [
        ((9, 37), (16, 24), f32, (), (1, 3)),
        ((70, 129), (64, 64), bf16, SWIZZLED, (6, 65)),
        ((5, 77), (3, 40), np.int8, (), (2, -3)),
        ((300,), (33,), f32, (), (7,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("who", ["thread", "warp"])
def test_multicast_of_any_pitch(run, rng, shape, size, dtype, transforms, start, who):
    """What no tensor map takes each block copies for itself, with one arrival on its barrier, and
    again into a slot that all released."""
    x = rng.integers(1, 100, shape).astype(dtype)
    rounds = 2

    def body(x_ref, where, o_ref, smem, bar, free):
        me = lax.axis_index("cx")
        src = x_ref.at[tuple(pl.ds(where[k], n) for k, n in enumerate(size))]

        def copy(i):
            plgpu.copy_gmem_to_smem(src, smem, bar, collective_axes="cx", predicate=i == 0)

        @pl.loop(0, rounds)
        def _(i):
            if who == "warp":
                plgpu.warp_map(lambda w: pl.when(w == 2)(lambda: copy(i)))
            else:
                copy(i)
            plgpu.barrier_wait(bar)
            o_ref[me, i] = smem[...]
            meet(free)

    got = run(
        body,
        np.zeros((2, rounds, *size), dtype),
        x,
        np.array(start, np.int32),
        cluster=(2,),
        cluster_names=("cx",),
        scratch_types=[
            plgpu.SMEM(size, dtype, transforms=transforms),
            plgpu.Barrier(),
            everyone((2,)),
        ],
    )
    padded = np.pad(x, 100)
    want = padded[tuple(slice(100 + s, 100 + s + n) for s, n in zip(start, size, strict=True))]
    for me, i in itertools.product(range(2), range(rounds)):
        np.testing.assert_array_equal(got[me, i], want)


@pytest.mark.parametrize(
    "shape,pitch,dtype,transforms,why",
    [
        ((33, 128), 256, f32, (), None),  # columns are cut instead
        ((3, 40), 256, f32, (), "multiples of 128 bytes"),
        ((8, 64), 256, f16, SWIZZLED, None),  # parts of half a swizzle pattern
    ],
)
def test_what_cannot_be_shared(shape, pitch, dtype, transforms, why):
    def body(x_ref, o_ref, smem, bar):
        src = x_ref.at[:, pl.ds(0, shape[1])]
        plgpu.copy_gmem_to_smem(src, smem, bar, collective_axes="cx")
        plgpu.barrier_wait(bar)

    scratch = [plgpu.SMEM(shape, dtype, transforms=transforms), plgpu.Barrier()]
    x = np.zeros((shape[0], pitch), dtype)
    lower = functools.partial(lowered, body, x, scratch_types=scratch)
    if why:
        with pytest.raises(ValueError, match=f"2 blocks of the cluster cannot share .*{why}"):
            lower()
    else:
        assert "engine = tma, cluster = [0]" in lower()


def bad_kernels():
    smem, bar = plgpu.SMEM((256,), f32), plgpu.Barrier()

    def cluster_barrier_as_completion(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, smem, bar)

    yield cluster_barrier_as_completion, [smem, everyone((2,))], ValueError, "is a ClusterBarrier"

    def copy_to_another_block(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, plgpu.cluster_ref(smem, {"cx": 0}), bar)

    yield copy_to_another_block, [smem, bar], ValueError, "dst is a cluster_ref"

    def store_from_another_block(x_ref, o_ref, smem, bar):
        plgpu.copy_smem_to_gmem(plgpu.cluster_ref(smem, {"cx": 0}).at[0:128], o_ref)

    yield store_from_another_block, [smem, bar], ValueError, "src is a cluster_ref"

    def multiply_in_another_block(x_ref, o_ref, a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, plgpu.cluster_ref(b, {"cx": 0}))

        pl.run_scoped(scope, plgpu.ACC((64, 64)))

    tile = plgpu.SMEM((64, 64), f16)
    yield multiply_in_another_block, [tile, tile], ValueError, "b is a cluster_ref"

    def a_block_of_a_block(x_ref, o_ref, smem, bar):
        plgpu.cluster_ref(plgpu.cluster_ref(smem, {"cx": 0}), {"cx": 1})

    yield a_block_of_a_block, [smem, bar], NotImplementedError, "in another block already"

    def no_such_block(x_ref, o_ref, smem, bar):
        plgpu.cluster_ref(smem, {"cx": 2})

    yield no_such_block, [smem, bar], ValueError, "index 2 is out of bounds"

    def axis_named_twice(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, smem, bar, collective_axes=("cx", "cx"))

    yield axis_named_twice, [smem, bar], ValueError, "named twice"

    def in_two_groups(x_ref, o_ref, smem, bar):
        pass

    groups = plgpu.ClusterBarrier(collective_axes=("cx", ("cx",)))
    yield in_two_groups, [smem, groups], ValueError, "named twice"


BAD = list(bad_kernels())


@pytest.mark.parametrize("body,scratch,error,why", BAD, ids=[b[0].__name__ for b in BAD])
def test_refused(body, scratch, error, why):
    with pytest.raises(error, match=why):
        lowered(body, np.zeros(256, f32), scratch_types=scratch)


def test_cluster_size():
    with pytest.raises(ValueError, match="at most 16 blocks"):
        lowered(lambda o_ref: None, cluster=(4, 8))


# ---- the text form: counters, logical reductions, meetings of the lanes --------------------------


def graph(text):
    return _core.Graph.parse(text)


NEXT_TILE = """\
kernel "count" grid [3] cluster [2] threads 1 stage traced {
  args out %seen_1: gmem int32[40]
  %2 = const {value = 0} : int32[]
  %3 = const {value = 1} : int32[]
  %4 = const {value = 40} : int32[]
  %5 = next_tile {n = 0} : int32[]
  %6 = while %5 : int32[] {
    args %7: int32[]
    %8 = lt %7, %4 : bool[]
    yield %8
  } {
    args %9: int32[]
    %10 = index %seen_1, %9 {starts = [?], sizes = [_]} : gmem int32[]
    %11 = load %10 : int32[]
    %12 = add %11, %3 : int32[]
    store %10, %12
    %13 = next_tile {n = 0} : int32[]
    yield %13
  }
  griddepcontrol_wait
  griddepcontrol_launch_dependents
}
"""


def test_next_tile_counts_from_zero_in_each_run():
    g = graph(NEXT_TILE)
    assert graph(g.text()).text() == g.text()
    g.lower()
    for seed in range(10):
        seen = np.zeros(40, np.int32)
        g.interpret([seen], seed=seed)
        np.testing.assert_array_equal(seen, 1)
    with pytest.raises(ValueError, match="counter 32"):
        graph(NEXT_TILE.replace("n = 0", "n = 32"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("op,fn", [("any", np.any), ("all", np.all)])
@pytest.mark.parametrize("shape", [(128,), (64, 64), (3, 5), (1, 1), (100, 48)], ids=str)
def test_any_and_all(rng, op, fn, shape):
    rank = len(shape)
    for dims in [list(range(rank))] + [[d] for d in range(rank) if rank > 1]:
        out = [n for d, n in enumerate(shape) if d not in dims]
        first, one = [0] * len(out or [1]), ", ".join("_" * len(out or [1]))

        def t(kind, s):
            return f"{kind}[{','.join(map(str, s))}]"

        text = f"""\
kernel "logical" grid [] cluster [] threads 1 stage traced {{
  args %x_1: {t("gmem float32", shape)}, out %o_2: {t("gmem bool", out or [1])}
  %3 = load %x_1 : {t("float32", shape)}
  %4 = const {{value = 0.0}} : float32[]
  %5 = gt %3, %4 : {t("bool", shape)}
  %6 = reduce %5 {{op = {op}, dims = {dims}}} : {t("bool", out)}
  %7 = index %o_2 {{starts = {first}, sizes = [{one}]}} : gmem bool[]
  store {"%o_2" if out else "%7"}, %6
}}
"""
        g = graph(text)
        g.lower()
        for low in (-1.0, 0.5, -1e9):
            x = rng.uniform(low, 1, shape).astype(f32)
            if low == -1e9:
                x = -np.abs(x)
            got = np.zeros(out or [1], bool)
            g.interpret([x, got])
            want = fn(x > 0, axis=tuple(dims))
            np.testing.assert_array_equal(got, want if out else [want])
            got[...] = ~got
            host.run(g, [x], [got])
            np.testing.assert_array_equal(got, want if out else [want])


def test_logical_reductions_take_bools_only():
    text = """\
kernel "logical" grid [] cluster [] threads 1 stage traced {
  args %x_1: gmem T[128], out %o_2: gmem T[]
  %3 = load %x_1 : T[128]
  %4 = reduce %3 {op = OP, dims = [0]} : T[]
  store %o_2, %4
}
"""
    for t, op, ok in [("bool", "any", True), ("int32", "any", False), ("bool", "max", False)]:
        source = text.replace("T[", t + "[").replace("OP", op)
        if ok:
            graph(source)
        else:
            with pytest.raises(TypeError, match="does not accept dtype"):
                graph(source)


CONSUMER = """\
kernel "k" grid [] cluster [2] threads 1 stage traced {
  args %x_1: gmem float16[64,64], out %o_2: gmem float32[64,64]
  scope {
    %a_3 = alloc_smem : smem float16[64,64]
    %s_4 = alloc_smem : smem float32[64]
    %full_5 = alloc_barrier {arrivals = 1} : barrier[]
    %empty_6 = alloc_barrier {arrivals = 1GROUPS} : barrier[]
    %acc_7 = alloc_acc : acc float32[64,64]
    %8 = const {value = 0} : int32[]
    %9 = const {value = 7} : int32[]
    BEFORE
    for %8, %9 {
      args %10: int32[]
      copy_gmem_to_smem %x_1, %a_3, %full_5 {oob = zeros, engine = auto, cluster = [0]}
      barrier_wait %full_5
      FIRST
      wgmma %acc_7, %a_3, %a_3
      SECOND
      barrier_arrive %empty_6
      barrier_wait %empty_6
      yield
    }
    yield
  }
}
"""
LOAD = "%20 = load %s_4 : float32[64]\n store %s_4, %20"
REMOTE = "%21 = cluster_ref %s_4, %8 {dim = 0} : smem float32[64]\n %22 = load %21 : float32[64]"
REMOTE += "\n store %s_4, %22"


@pytest.mark.parametrize(
    "first,second,before,meets,relaxed",
    [
        ("", "wgmma_wait {n = 0}", "", False, True),
        ("", "wgmma_wait {n = 0}", LOAD, False, True),  # they meet before the loop
        ("", "wgmma_wait {n = 1}", "", True, True),  # the wgmma may still be to come
        ("", "", "", True, True),
        ("", "%20 = acc_load %acc_7 {n = 0} : float32[64,64]\n store %o_2, %20", "", False, True),
        ("%19 = load %s_4 : float32[64]\n store %o_2, %19", "wgmma_wait {n = 0}", "", None, None),
        ("", "wgmma_wait {n = 0}\n" + LOAD, "", False, True),  # the store has a sync after it
        ("", "wgmma_wait {n = 0}", REMOTE, False, False),
        (
            "",
            "wgmma_wait {n = 0}\n%20 = load %a_3 : float16[64,64]\n store %a_3, %20",
            "",
            False,
            False,
        ),
        ("", "wgmma_wait {n = 0}", "%20 = load %o_2 : T\n store %o_2, %20", False, False),
    ],
)
@pytest.mark.parametrize("groups", ["", ", cluster = [0, -1]"], ids=["plain", "cluster"])
def test_meetings_before_arrivals(first, second, before, meets, relaxed, groups):
    """One lane arrives for all: the lanes meet before if they have anything to finish, but a wgmma
    that is complete is meeting enough. In one block each warp arrives instead. A release is left
    out where other blocks reach nothing that lanes access."""
    text = CONSUMER.replace("GROUPS", groups).replace("FIRST", first).replace("SECOND", second)
    if meets is None:
        text = text.replace("store %o_2, %19", "store %s_4, %19")
        meets, relaxed = False, True
    text = text.replace("BEFORE", before.replace(": T", ": float32[64,64]"))
    g = graph(text)
    g.lower()
    ops = re.findall(r"^ +(?:%\S+ = )?(\w+)(.*)$", g.text(), flags=re.M)
    at = next(k for k, (name, _) in enumerate(ops) if name == "barrier_arrive")
    by_warps = any("warps = 1" in rest for name, rest in ops if name == "alloc_barrier")
    if "load %a_3" in text:  # by lanes from what TMA fills: those loads must be complete
        assert by_warps == (not groups)
        assert ops[at - 1][0] == ("commit_smem" if groups else "proxy_fence")
    else:
        assert by_warps == (meets and not groups)
        assert (ops[at - 1][0] == "sync") == ((meets and bool(groups)) or ops[at - 2][0] == "store")
    assert ("memory_order = relaxed" in ops[at][1]) == bool(groups and relaxed)


IN_CLUSTER = ", cluster = [0, -1]"


def test_a_wait_is_after_all_lanes_before_an_arrival():
    text = CONSUMER.replace("GROUPS", IN_CLUSTER).replace("BEFORE", "")
    text = text.replace("FIRST", "barrier_arrive %empty_6\nbarrier_wait %empty_6")
    g = graph(text.replace("SECOND", "wgmma_wait {n = 0}"))
    g.lower()
    names = re.findall(r"^ +(?:%\S+ = )?(\w+)", g.text(), flags=re.M)
    first = names.index("barrier_arrive")
    assert names[first - 2 : first] == ["barrier_wait", "sync"]


@pytest.mark.parametrize(
    "ref,kind,meets",
    [
        ("%x_1", "gmem float16", False),
        ("%s_4", "smem float32", True),
        ("%o_2", "gmem float32", True),
    ],
)
def test_loads_of_what_nobody_writes_need_no_meeting(ref, kind, meets):
    before = "%18 = load %o_2 : float32[64,64]\n store %o_2, %18"
    text = CONSUMER.replace("GROUPS", IN_CLUSTER).replace("BEFORE", before).replace("FIRST", "")
    starts, sizes, at = ("?", "_", "%8") if ref == "%s_4" else ("?, ?", "_, _", "%8, %8")
    scalar = f"""%20 = index {ref}, {at} {{starts = [{starts}], sizes = [{sizes}]}} : {kind}[]
      %21 = load %20 : {kind.split()[1]}[]
      debug_print %21 {{format = "{{}}"}}"""
    g = graph(text.replace("SECOND", "wgmma_wait {n = 0}\n" + scalar))
    g.lower()
    names = re.findall(r"^ +(?:%\S+ = )?(\w+)", g.text(), flags=re.M)
    assert (names[names.index("barrier_arrive") - 1] == "sync") == meets


LOOP = """\
kernel "k" grid [] cluster [2] threads 1 stage traced {
  args %x_1: gmem float16[64,64], %o_2: gmem float32[64], out %p_3: gmem float32[64]
  scope {
    %a_4 = alloc_smem : smem float16[64,64]
    %s_5 = alloc_smem : smem float32[64]
    %full_6 = alloc_barrier {arrivals = 1} : barrier[]
    %empty_7 = alloc_barrier {arrivals = 1GROUPS} : barrier[]
    %acc_8 = alloc_acc : acc float32[64,64]
    %9 = const {value = 0} : int32[]
    %10 = const {value = 7} : int32[]
    %16 = index %o_2, %9 {starts = [?], sizes = [_]} : gmem float32[]
    %17 = load %16 : float32[]
    %18 = const {value = 0.0} : float32[]
    %11 = lt %17, %18 : bool[]
    BEFORE
    for %9, %10 {
      args %12: int32[]
      BODY
      yield
    }
    AFTER
    yield
  }
}
"""
SCALAR = """%20 = index %s_5, %9 {starts = [?], sizes = [_]} : smem float32[]
      %21 = load %20 : float32[]
      debug_print %21 {format = "{}"}"""
BRANCH = """if %11 {
        IT
        yield
      } {
        yield
      }"""


@pytest.mark.parametrize(
    "before,body,after,meets",
    [
        ("", "ARRIVE", "", False),
        ("", f"ARRIVE\n{SCALAR}", "", True),  # of the round before
        ("", "ARRIVE\nbarrier_wait %empty_7", "", True),
        (SCALAR, "ARRIVE", "", False),  # they meet before the loop
        ("", SCALAR, "ARRIVE", True),
        ("", BRANCH.replace("IT", SCALAR) + "\nARRIVE", "", True),
        ("", BRANCH.replace("IT", "barrier_wait %full_6") + "\nARRIVE", "", True),
        (BRANCH.replace("IT", SCALAR) + "\nARRIVE", "", "", True),
        (BRANCH.replace("IT", "barrier_wait %full_6") + "\nARRIVE", "", "", True),
        ("", "wgmma %acc_8, %a_4, %a_4\nwgmma_wait {n = 0}\nARRIVE", "", False),
        (
            "barrier_wait %full_6\nwgmma %acc_8, %a_4, %a_4",
            "wgmma_wait {n = 0}\nARRIVE\nbarrier_wait %empty_7",
            "",
            True,  # in the second round no product has begun since the wait
        ),
        (
            "barrier_wait %full_6\nwgmma %acc_8, %a_4, %a_4\nwgmma_wait {n = 1}\nARRIVE",
            "",
            "",
            True,
        ),
        (
            "barrier_wait %full_6\nwgmma %acc_8, %a_4, %a_4\nwgmma_wait {n = 0}\nARRIVE",
            "",
            "",
            False,
        ),
    ],
)
def test_meetings_before_arrivals_in_loops_and_branches(before, body, after, meets):
    text = (
        LOOP.replace("GROUPS", IN_CLUSTER)
        .replace("BEFORE", before)
        .replace("BODY", body)
        .replace("AFTER", after)
    )
    g = graph(text.replace("ARRIVE", "barrier_arrive %empty_7"))
    g.lower()
    names = re.findall(r"^ +(?:%\S+ = )?(\w+)", g.text(), flags=re.M)
    assert (names[names.index("barrier_arrive") - 1] == "sync") == meets


def test_a_scalar_store_is_finished_before_an_arrival():
    text = CONSUMER.replace("GROUPS", IN_CLUSTER).replace("BEFORE", "").replace("FIRST", "")
    scalar = """%20 = index %s_4, %8 {starts = [?], sizes = [_]} : smem float32[]
      %21 = load %20 : float32[]
      store %20, %21"""
    g = graph(text.replace("SECOND", "wgmma_wait {n = 0}\n" + scalar))
    g.lower()
    names = re.findall(r"^ +(?:%\S+ = )?(\w+)", g.text(), flags=re.M)
    first = names.index("barrier_arrive")
    assert names[first - 4 : first] == ["load", "sync", "store", "sync"]


@pytest.mark.parametrize("text", [NEXT_TILE, CONSUMER], ids=["counter", "cluster"])
def test_parser_survives_damage(text):
    """Cut and exchanged pieces of a text: accepted and lowered, or refused, never a crash."""
    for a, b in (("GROUPS", ", cluster = [0, -1]"), ("BEFORE", REMOTE), ("FIRST", "")):
        text = text.replace(a, b)
    text = graph(text.replace("SECOND", "wgmma_wait {n = 0}")).text()
    rnd = random.Random(text)
    refused = 0
    for _ in range(500):
        a = rnd.randrange(len(text))
        digit = rnd.choice([m.start() for m in re.finditer(r"\d", text)])
        if rnd.randrange(2):
            damaged = text[:digit] + rnd.choice(["-1", "0", "1", "2", "99"]) + text[digit + 1 :]
        else:
            damaged = text[:a] + rnd.choice("{}[]%,=:0123456789_x") + text[a + 1 :]
        try:
            graph(damaged).lower()
        except (ValueError, TypeError, NotImplementedError, IndexError, OverflowError) as e:
            refused += 1
            assert str(e)
        except plgpu.InternalError:
            refused += 1
    assert refused > 100


def test_relaxed_arrival(rng):
    """It orders what copies and products read of shared memory, not what the thread stores to
    global memory: with it another block must not read that."""
    x = rng.standard_normal((2, 128)).astype(np.float32)

    def kernel(relaxed):
        def body(x_ref, o_ref, rows, barrier):
            r = lax.axis_index("c")
            rows[r] = x_ref[r]
            plgpu.barrier_arrive(barrier, relaxed=relaxed)
            plgpu.barrier_wait(barrier)
            o_ref[r] = rows[1 - r]

        return plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct(x.shape, np.float32),
            scratch_types=[
                plgpu.ext.SharedScratch(x.shape, np.float32),
                plgpu.ClusterBarrier(collective_axes=("c",)),
            ],
            cluster=(2,),
            cluster_names=("c",),
            interpret=plgpu.InterpretParams(detect_races=True),
        )

    np.testing.assert_array_equal(kernel(False)(x), x[::-1])
    with pytest.raises(plgpu.RaceError, match="rows"):
        kernel(True)(x)
    with pytest.raises(TypeError, match="relaxed must be a bool, got 1"):
        kernel(1)(x)
