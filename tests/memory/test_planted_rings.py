"""Planted mistakes in one block: buffers that are used again, copies out, producers and consumers,
atomics, warps, lanes that copy."""

import numpy as np
import planted
import pytest
from planted import pair

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32, I32, BF16 = np.float32, np.int32, jnp.bfloat16
SMEM, Barrier = plgpu.SMEM, plgpu.Barrier
X = np.arange(128, dtype=F32)
ROWS = np.arange(1024, dtype=F32).reshape(8, 128)
TILE, WIDE, PAIR = SMEM((128,), F32), SMEM((256,), F32), SMEM((2, 128), F32)
TWO = dict(num_threads=2, thread_name="t")
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
wait, arrive, commit = plgpu.barrier_wait, plgpu.barrier_arrive, plgpu.commit_smem
stored = plgpu.wait_smem_to_gmem
PAIRS = {}


def each(*functions):
    for k, f in enumerate(functions):
        pl.when(lax.axis_index("t") == k)(f)


# ---- one thread: slots that are used again -------------------------------------------------------


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[PAIR, Barrier(num_barriers=2)],
    race=("write slots by TMA at load", "read slots by thread 0 at use"),
    remedy="wait for the first.*full|full.* before the first",
    want=lambda x: x + 1,
)
def double_buffer_by_hand(wrong, x, o, slots, full):
    """The next row is fetched into the slot that is read."""
    g2s(x.at[0], slots.at[0], full.at[0])

    @pl.loop(0, 8)
    def _(i):
        s = i % 2
        wait(full.at[s])
        if wrong:

            @pl.when(i < 7)
            def _():
                g2s(x.at[i + 1], slots.at[s], full.at[1 - s])  #: load

        else:

            @pl.when(i < 7)
            def _():
                g2s(x.at[i + 1], slots.at[1 - s], full.at[1 - s])

        o[i] = slots[s] + 1  #: use


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[TILE],
    race=("read tile by TMA at copy", "write tile by thread 0 at store"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x * 2,
)
def tile_stored_to_while_it_is_copied_out(wrong, x, o, tile):
    @pl.loop(0, 8)
    def _(i):
        tile[...] = x[i] * 2  #: store
        commit()
        s2g(tile, o.at[i])  #: copy
        if not wrong:
            stored(0, wait_read_only=True)


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[SMEM((3, 128), F32)],
    race=("read tiles by TMA at copy", "write tiles by thread 0 at store"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x * 2,
)
def one_copy_too_many_in_flight(wrong, x, o, tiles):
    """Three slots allow two older copies, not three."""

    @pl.loop(0, 8)
    def _(i):
        stored(3 if wrong else 2, wait_read_only=True)
        tiles[i % 3] = x[i] * 2  #: store
        commit()
        s2g(tiles.at[i % 3], o.at[i])  #: copy


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[TILE, TILE, Barrier()],
    race=("write b by TMA at load", "read b by TMA at copy"),
    remedy="wait for .*bar",
    want=lambda x: x,
)
def copied_on_without_a_wait(wrong, x, o, a, b, bar):
    """TMA to TMA through shared memory: no fence is needed, but a wait is."""

    @pl.loop(0, 8)
    def _(i):
        g2s(x.at[i], b, bar)  #: load
        if not wrong:
            wait(bar)
        s2g(b, o.at[i])  #: copy
        if wrong:
            wait(bar)
        stored(0, wait_read_only=True)


@pair(
    X,
    scratch_types=[TILE],
    race=[
        ("write o by TMA at copy", "read o by thread 0 at read"),
        ("write o by TMA at copy", "write o by thread 0 at read"),
    ],
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x + 3,
)
def result_read_when_its_source_is_free(wrong, x, o, tile):
    tile[...] = x[...] + 2
    commit()
    s2g(tile, o)  #: copy
    stored(0, wait_read_only=wrong)
    o[...] = o[...] + 1  #: read


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[PAIR],
    race=("write o by TMA at copy", "atomic o by TMA at add"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x * 2,
)
def sum_over_a_copy_in_flight(wrong, x, o, tiles):
    """Copies that combine do not wait for copies that came before."""

    @pl.loop(0, 8)
    def _(i):
        tiles[0] = x[i]
        commit()
        s2g(tiles.at[0], o.at[i])  #: copy
        stored(0, wait_read_only=wrong)
        s2g(tiles.at[0], o.at[i], reduction_op="add")  #: add
        stored(0)


@pair(
    np.arange(256, dtype=F32),
    out=(2, 256),
    scratch_types=[plgpu.RefUnion([WIDE, WIDE], SMEM((512,), F32)), Barrier()],
    race=("write union_1 by TMA at load", "write union_2 by thread 0 at store"),
    remedy="wait for the first.*bar|order them by a barrier|before the first",
)
def union_used_again_too_early(wrong, x, o, union, bar):
    """Staging space for a row becomes space for the result."""
    (a, b), both = union
    a[...] = x[...]
    o[0] = a[...]
    g2s(x, b, bar)  #: load
    if not wrong:
        wait(bar)
    both[...] = jnp.full(512, 1.0, F32)  #: store
    if wrong:
        wait(bar)
    o[1] = both[pl.ds(256, 256)]


@pair(
    X,
    out=(2, 128),
    race=("read a by TMA at copy", "write b by thread 0 at store"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: np.stack([x, x + 1]),
)
def scope_that_takes_the_memory_of_one_before(wrong, x, o):
    """The first scope ends while its copy is in flight, the second one has the same memory."""

    def first(a):
        a[...] = x[...]
        commit()
        s2g(a, o.at[0])  #: copy
        if not wrong:
            stored(0, wait_read_only=True)

    def second(b):
        b[...] = x[...] + 1  #: store
        o[1] = b[...]

    pl.run_scoped(first, TILE)
    pl.run_scoped(second, TILE)


@pair(
    np.arange(64 * 64, dtype=F32).reshape(64, 64),
    out=(64, 64),
    scratch_types=[SMEM((64, 64), F32)],
    race=("read tile by TMA at copy", "write tile by thread 0 at store"),
    remedy=r"commit_smem\(\)",
    want=lambda x: x.T,
)
def transposed_without_a_commit(wrong, x, o, tile):
    tile.T[...] = x[...]  #: store
    if not wrong:
        commit()
    s2g(tile, o)  #: copy
    stored(0)


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[TILE],
    race=("read tile by TMA at copy", "write tile by thread 0 at store"),
    remedy=r"commit_smem\(\)",
    want=lambda x: x,
)
def commit_in_one_branch(wrong, x, o, tile):
    @pl.loop(0, 8)
    def _(i):
        tile[...] = x[i]  #: store
        pl.when(i % 2 == 0 if wrong else i >= 0)(commit)
        s2g(tile, o.at[i])  #: copy
        stored(0, wait_read_only=True)


# ---- producers and consumers ---------------------------------------------------------------------


def ring(x, o, slots, full, empty, refill, release=None):
    """Thread 0 fetches rows, the others use them."""
    me, n = lax.axis_index("t"), slots.shape[0]

    @pl.when(me == 0)
    def _():
        @pl.loop(0, 8)
        def _(i):
            pl.when(i >= n)(lambda: refill(i % n))
            g2s(x.at[i], slots.at[i % n], full.at[i % n])  #: load

    @pl.when(me > 0)
    def _():
        @pl.loop(0, 8)
        def _(i):
            wait(full.at[i % n])
            o[me - 1, i] = slots[i % n] * 2  #: use
            pl.when(release(i) if release else i >= 0)(lambda: arrive(empty.at[i % n]))


RACE = ("read slots by thread 1 at use", "write slots by TMA at load")
OTHER = ("read slots by thread 2 at use", "write slots by TMA at load")


@pair(
    ROWS,
    out=(1, 8, 128),
    scratch_types=[SMEM((3, 128), F32), Barrier(num_barriers=3), Barrier(num_barriers=3)],
    race=[("write slots by TMA at load",) * 2, RACE, RACE[::-1]],
    errors=(ValueError,),
    remedy="full|before the first",
    want=lambda x: x[None] * 2,
    **TWO,
)
def refilled_without_a_wait(wrong, x, o, slots, full, empty):
    ring(x, o, slots, full, empty, lambda s: None if wrong else wait(empty.at[s]))


@pair(
    ROWS,
    out=(2, 8, 128),
    race=[RACE, OTHER],
    remedy="full|before the first",
    want=lambda x: np.stack([x, x]) * 2,
    num_threads=3,
    thread_name="t",
)
def released_by_one_of_two_consumers(wrong, x, o):
    """The barrier of a slot counts one arrival, and two consumers use the slot."""

    def scope(slots, full, empty):
        me = lax.axis_index("t")
        ring(
            x, o, slots, full, empty, lambda s: wait(empty.at[s]),
            (lambda i: me == 1) if wrong else None,
        )  # fmt: skip

    pl.run_scoped(
        scope,
        PAIR,
        Barrier(num_barriers=2),
        Barrier(num_arrivals=1 if wrong else 2, num_barriers=2),
        collective_axes="t",
    )


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[PAIR, Barrier(num_barriers=2), Barrier(num_barriers=2)],
    race=[
        ("write slots by TMA at load", "read slots by TMA at copy"),
        ("read slots by TMA at copy", "write slots by TMA at load"),
        ("read slots by TMA at copy", "write slots by thread 1 at scale"),
    ],
    remedy=r"wait_smem_to_gmem\(|before the first",
    want=lambda x: x * 2,
    **TWO,
)
def slot_released_while_it_is_copied_out(wrong, x, o, slots, full, empty):
    """A consumer works in place and sends the slot on."""

    def produce():
        @pl.loop(0, 8)
        def _(i):
            pl.when(i >= 2)(lambda: wait(empty.at[i % 2]))
            g2s(x.at[i], slots.at[i % 2], full.at[i % 2])  #: load

    def consume():
        @pl.loop(0, 8)
        def _(i):
            s = i % 2
            wait(full.at[s])
            slots[s] = slots[s] * 2  #: scale
            commit()
            s2g(slots.at[s], o.at[i])  #: copy
            if not wrong:
                stored(0, wait_read_only=True)
            arrive(empty.at[s])

    each(produce, consume)


@pair(
    X,
    scratch_types=[TILE, Barrier()],
    race=("write tile by thread 0 at store", "read tile by TMA at copy"),
    remedy=r"commit_smem\(\)",
    want=lambda x: x + 1,
    **TWO,
)
def commit_after_the_arrival(wrong, x, o, tile, ready):
    def store():
        tile[...] = x[...] + 1  #: store
        if not wrong:
            commit()
        arrive(ready)
        if wrong:
            commit()

    def send():
        wait(ready)
        s2g(tile, o)  #: copy
        stored(0)

    each(store, send)


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[PAIR, Barrier(num_barriers=2), Barrier(num_barriers=2)],
    race=[("write slots by TMA at load",) * 2, RACE, RACE[::-1]],
    errors=(ValueError,),
    remedy="full|empty|before the first",
    want=lambda x: x,
    **TWO,
)
def phases_counted_wrongly(wrong, x, o, slots, full, empty):
    """An explicit phase that is that of another slot count."""

    def produce():
        @pl.loop(0, 8)
        def _(i):
            phase = i // 2 if wrong else i // 2 - 1
            pl.when(i >= 2)(lambda: wait(empty.at[i % 2], phase=phase))
            g2s(x.at[i], slots.at[i % 2], full.at[i % 2])  #: load

    def consume():
        @pl.loop(0, 8)
        def _(i):
            wait(full.at[i % 2], phase=i // 2)
            o[i] = slots[i % 2]  #: use
            arrive(empty.at[i % 2])

    each(produce, consume)


@pair(
    X,
    scratch_types=[TILE, Barrier(), Barrier()],
    race=[
        ("read tile by thread 1 at read", "write tile by TMA at load"),
        ("write tile by TMA at load", "read tile by thread 1 at read"),
    ],
    remedy="bar",
    want=lambda x: x,
    **TWO,
)
def read_although_the_test_failed(wrong, x, o, tile, bar, go):
    """A thread polls a barrier and gives up; it always does, since the copy begins after that."""

    def load():
        wait(go)
        g2s(x, tile, bar)  #: load

    def poll():
        done = plgpu.barrier_test(bar)
        o[0] = done.astype(F32)
        arrive(go)
        if not wrong:
            lax.while_loop(lambda d: ~d, lambda d: plgpu.barrier_test(bar), done)
        o[...] = tile[...]  #: read
        if wrong:
            wait(bar)

    each(load, poll)


@pair(
    np.arange(1024, dtype=F32).reshape(8, 128),
    out=(8, 128),
    scratch_types=[plgpu.SMEM((2, 128), F32), Barrier(num_barriers=2)],
    race=[
        ("read slots by thread 0 at read", "write slots by TMA at (first|next)"),
        ("write slots by TMA at (first|next)", "read slots by thread 0 at read"),
    ],
    errors=(ValueError,),
    remedy="full",
    want=lambda x: x,
)
def result_of_a_test_is_ignored(wrong, x, o, slots, full):
    """The copy is nearly always complete by then."""
    g2s(x.at[0], slots.at[0], full.at[0])  #: first

    @pl.loop(0, 8)
    def _(i):
        @pl.when(i < 7)
        def _():
            g2s(x.at[i + 1], slots.at[(i + 1) % 2], full.at[(i + 1) % 2])  #: next

        done = plgpu.barrier_test(full.at[i % 2])
        if not wrong:
            pl.when(~done)(lambda: wait(full.at[i % 2]))
        o[i] = slots[i % 2]  #: read


# ---- threads beside each other -------------------------------------------------------------------


@pair(
    np.arange(258, dtype=F32),
    out=(256,),
    scratch_types=[SMEM((258,), F32)],
    race=[
        ("write tile by thread 0 at fill", "read tile by thread 1 at use"),
        ("write tile by thread 1 at fill", "read tile by thread 0 at use"),
    ],
    remedy="barrier",
    want=lambda x: x[:-2] + x[2:],
    **TWO,
)
def halo(wrong, x, o, tile):
    """Each thread reads a column of its neighbour."""
    me = lax.axis_index("t")
    tile[pl.ds(me * 129, 129)] = x[pl.ds(me * 129, 129)]  #: fill
    if not wrong:
        plgpu.ext.named_barrier_sync(0, num_threads=2)
    at = me * 128
    o[pl.ds(at, 128)] = tile[pl.ds(at, 128)] + tile[pl.ds(at + 2, 128)]  #: use


@pair(
    (np.arange(256, dtype=I32) * 7 % 16),
    out=(16,),
    dtype=I32,
    scratch_types=[SMEM((16,), I32)],
    race=[
        ("write bins by thread 0 at clear", "atomic bins by thread 1 at count"),
        ("atomic bins by thread 1 at count", "write bins by thread 0 at clear"),
    ],
    remedy="barrier",
    want=lambda x: np.bincount(x, minlength=16).astype(I32),
    **TWO,
)
def histogram_cleared_by_one_thread(wrong, x, o, bins):
    me = lax.axis_index("t")

    @pl.when(me == 0)
    def _():
        bins[...] = jnp.zeros(16, I32)  #: clear

    if not wrong:
        plgpu.ext.named_barrier_sync(0, num_threads=2)
    pl.atomic_add(bins, (x[pl.ds(me * 128, 128)],), 1)  #: count
    plgpu.ext.named_barrier_sync(1, num_threads=2)
    pl.when(me == 0)(lambda: o.set(bins[...]) and None)


@pair(
    X,
    scratch_types=[TILE, SMEM((2,), I32)],
    race=[
        ("write tile by thread 0 at store", "read tile by thread 1 at read"),
        ("write tile by thread 1 at store", "read tile by thread 0 at read"),
    ],
    remedy="barrier",
    **TWO,
)
def flag_by_an_atomic(wrong, x, o, tile, count):
    """Whoever counts last reads what the other one stored: atomics order nothing."""
    me = lax.axis_index("t")
    pl.when(me == 0)(lambda: count.set(jnp.zeros(2, I32)) and None)
    plgpu.ext.named_barrier_sync(0, num_threads=2)
    tile[pl.ds(me * 64, 64)] = x[pl.ds(me * 64, 64)]  #: store
    if not wrong:
        plgpu.ext.named_barrier_sync(1, num_threads=2)
    last = pl.atomic_add(count, (0,), 1) == 1

    @pl.when(last)
    def _():
        o[...] = tile[...]  #: read


@pair(
    np.arange(256, dtype=I32)[::-1].copy(),
    out=(256,),
    race=[
        ("write o by thread 0 at scatter", "write o by thread 1 at scatter"),
        ("write o by thread 1 at scatter", "write o by thread 0 at scatter"),
    ],
    remedy="barrier",
    want=lambda x: np.arange(256)[::-1].astype(F32),
    **TWO,
)
def scatter_to_common_elements(wrong, x, o):
    """The rows of the threads overlap by one."""
    me = lax.axis_index("t")
    at = pl.ds(me * (127 if wrong else 128), 128)
    o[x[at]] = lax.broadcasted_iota(I32, (128,), 0).astype(F32) + (me * 128).astype(F32)  #: scatter


@pair(
    np.arange(256).astype(BF16),
    out=(256,),
    dtype=BF16,
    race=[
        ("write o by thread 0 at even", "write o by thread 1 at odd"),
        ("write o by thread 1 at odd", "write o by thread 0 at even"),
    ],
    remedy="barrier",
    **TWO,
)
def halves_of_words(wrong, x, o):
    """16-bit elements beside each other are no race."""

    def even():
        o[pl.ds(0, 128, 2)] = x[pl.ds(0, 128)]  #: even

    def odd():
        first, n = (2, 127) if wrong else (1, 128)
        o[pl.ds(first, n, 2)] = x[pl.ds(128, n)] + 1  #: odd

    each(even, odd)


# ---- warps ---------------------------------------------------------------------------------------


@pair(
    np.arange(4, dtype=I32),
    out=(4,),
    dtype=I32,
    scratch_types=[SMEM((4,), I32), Barrier(num_arrivals=4)],
    race=[
        ("write tile by thread 0, warp . at store", "read tile by thread 0, warp . at read"),
    ],
    remedy="barrier",
    want=lambda x: np.roll(x, -1),
)
def warps_that_exchange(wrong, x, o, tile, all_stored):
    @plgpu.warp_map
    def _(w):
        tile[w] = x[w]  #: store
        if not wrong:
            arrive(all_stored)
            wait(all_stored)
        o[w] = tile[(w + 1) % 4]  #: read

    if wrong:
        arrive(all_stored)
        pl.loop(0, 3)(lambda _: arrive(all_stored))
        wait(all_stored)


@pair(
    X,
    scratch_types=[TILE, TILE, Barrier(num_barriers=2)],
    race=("read a by TMA at copy", "write a by TMA at again"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x,
)
def groups_of_another_warp(wrong, x, o, a, b, bars):
    """A warp waits for its own copies alone."""
    a[...] = x[...]
    commit()

    @plgpu.warp_map
    def _(w):
        @pl.when(w == 0)
        def _():
            s2g(a, o)  #: copy
            if not wrong:
                stored(0)
            arrive(bars.at[0])

        @pl.when(w == 1)
        def _():
            wait(bars.at[0])
            if wrong:
                stored(0)
            g2s(x, a, bars.at[1])  #: again

    wait(bars.at[1])


# ---- pipelines -----------------------------------------------------------------------------------


@pair(
    ROWS,
    out=(8, 128),
    scratch_types=[TILE],
    race=("read kept by TMA at copy", "write kept by thread 0 at keep"),
    remedy=r"wait_smem_to_gmem\(",
    want=lambda x: x * 2,
)
def copy_of_a_steps_own(wrong, x, o, kept):
    """The body of a pipeline copies its result itself."""

    def step(indices, row):
        kept[...] = row[0] * 2  #: keep
        commit()
        s2g(kept, o.at[indices[0]])  #: copy
        if not wrong:
            stored(0, wait_read_only=True)

    plgpu.emit_pipeline(
        step,
        grid=(8,),
        in_specs=[plgpu.BlockSpec((1, 128), lambda k: (k, 0))],
        max_concurrent_steps=2,
    )(x)


@pair(
    (np.arange(128) * 7 % 18).astype(I32),
    dtype=I32,
    scratch_types=[SMEM((128,), I32), Barrier(num_arrivals=2), Barrier(num_arrivals=2)],
    race=("write bins by thread 0 at clear", "atomic bins by thread 1 at count"),
    remedy="barrier",
    want=lambda x: 2 * np.bincount(x, minlength=128),
    **TWO,
)
def counts_after_a_clear(wrong, x, o, bins, cleared, counted):
    """The thread that cleared the bins counts as well: its own atomics do not order the others
    after the clear."""
    me = lax.axis_index("t")

    @pl.when(me == 0)
    def _():
        bins[...] = jnp.zeros(128, I32)  #: clear

    if not wrong:
        arrive(cleared)
        wait(cleared)
    pl.atomic_add(bins, (x[...],), jnp.ones(128, I32))  #: count
    arrive(counted)
    wait(counted)

    @pl.when(me == 0)
    def _():
        o[...] = bins[...]


@pytest.mark.covering(1, long=2)  # by one of the judges, with --long by both
@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_right_one_is_clean(name, backend):
    planted.check_right(PAIRS[name], backend, range(32 if backend == "interpret" else 3))


@pytest.mark.covering(1, long=2)  # by one of the judges, with --long by both
@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_mistake_is_found(name, backend):
    planted.check_wrong(PAIRS[name], backend, range(5 if backend == "interpret" else 2))
