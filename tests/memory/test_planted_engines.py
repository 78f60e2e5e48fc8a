"""Planted mistakes between blocks and with the tensor cores: clusters, semaphores, points of the
grid, wgmma, tensor memory."""

import numpy as np
import planted
import pytest
from planted import pair

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32, I32 = np.float16, np.float32, np.int32
SMEM, Barrier, TMEM = plgpu.SMEM, plgpu.Barrier, plgpu.TMEM
X = np.arange(128, dtype=F32)
ROWS = np.arange(1024, dtype=F32).reshape(8, 128)
TILE, PAIR = SMEM((128,), F32), SMEM((2, 128), F32)
TWO = dict(num_threads=2, thread_name="t")
BLOCKS = dict(cluster=(2,), cluster_names=("c",))
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
wait, arrive, commit = plgpu.barrier_wait, plgpu.barrier_arrive, plgpu.commit_smem
stored = plgpu.wait_smem_to_gmem
PAIRS = {}


def each(*functions):
    for k, f in enumerate(functions):
        pl.when(lax.axis_index("t") == k)(f)


def meeting(**kw):
    return plgpu.ClusterBarrier(collective_axes=("c",), **kw)


def small(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F16)


# ---- clusters ------------------------------------------------------------------------------------


@pair(
    ROWS,
    out=(2, 8, 128),
    scratch_types=[PAIR, Barrier(num_barriers=2), Barrier(num_barriers=2), meeting(num_barriers=2)],
    race=[
        (r"read slots by block \(.,\), thread 0 at use", "write slots by TMA at load"),
        ("write slots by TMA at load",) * 2,
    ],
    errors=(ValueError,),
    remedy="full|before the first|empty",
    want=lambda x: np.stack([x, x]) * 2,
    **BLOCKS,
)
def multicast_over_a_slot_in_use(wrong, x, o, slots, full, own, empty):
    """A block asks only itself whether the slot is free, and fills that of the other, too."""
    me = lax.axis_index("c")

    @pl.loop(0, 8)
    def _(i):
        s = i % 2

        @pl.when(i >= 2)
        def _():
            wait(own.at[s] if wrong else empty.at[s])

        g2s(x.at[i], slots.at[s], full.at[s], collective_axes="c")  #: load
        wait(full.at[s])
        o[me, i] = slots[s] * 2  #: use
        arrive(own.at[s] if wrong else empty.at[s])

    if wrong:
        arrive(empty.at[0])
        wait(empty.at[0])


@pair(
    X,
    out=(2, 128),
    scratch_types=[TILE, meeting(num_barriers=2)],
    race=(
        r"read tile by block \(.,\), thread 0 at peer",
        r"write tile by block \(.,\), thread 0 at reuse",
    ),
    remedy="barrier",
    want=lambda x: np.stack([x + 1, x]),
    **BLOCKS,
)
def tile_used_again_while_a_peer_reads(wrong, x, o, tile, bars):
    me = lax.axis_index("c")
    tile[...] = x[...] + me.astype(F32)
    arrive(bars.at[0])
    wait(bars.at[0])
    o[me] = plgpu.cluster_ref(tile, {"c": 1 - me})[...]  #: peer
    if not wrong:
        arrive(bars.at[1])
        wait(bars.at[1])
    tile[...] = jnp.zeros(128, F32)  #: reuse
    if wrong:
        arrive(bars.at[1])
        wait(bars.at[1])


@pair(
    X,
    out=(2, 128),
    scratch_types=[TILE, Barrier(), meeting()],
    race=(
        "write inbox by st.async, for .* at send",
        r"read inbox by block \(1,\), thread 0 at read",
    ),
    remedy="sent",
    want=lambda x: np.stack([x, x]),
    **BLOCKS,
)
def message_read_after_the_cluster_met(wrong, x, o, inbox, sent, met):
    """That the sender has come says nothing of what it sent asynchronously."""
    me = lax.axis_index("c")

    @pl.when(me == 0)
    def _():
        plgpu.async_store_smem(x[...], inbox, sent, cluster_idx=1, cluster_dim="c")  #: send

    arrive(met)
    wait(met)

    @pl.when(me == 0)
    def _():
        o[0] = x[...]

    @pl.when(me == 1)
    def _():
        if not wrong:
            wait(sent)
        o[1] = inbox[...]  #: read
        if wrong:
            wait(sent)


@pair(
    X,
    out=(128,),
    scratch_types=[TILE, meeting(num_arrivals=2), meeting()],
    race=(
        r"write tile by block \(0,\), thread . at store",
        r"read tile by block \(1,\), thread 0 at read",
    ),
    errors=(ValueError,),
    remedy="barrier",
    want=lambda x: x + 1,
    **TWO,
    **BLOCKS,
)
def one_thread_arrives_for_both(wrong, x, o, tile, both, one):
    """Two threads of a block fill a tile; the other block hears of one of them."""
    me, t = lax.axis_index("c"), lax.axis_index("t")
    tile[pl.ds(t * 64, 64)] = x[pl.ds(t * 64, 64)] + 1  #: store
    if wrong:
        pl.when(t == 0)(lambda: arrive(one))
    else:
        arrive(both)

    @pl.when(t == 0)
    def _():
        wait(one if wrong else both)

        @pl.when(me == 1)
        def _():
            o[...] = plgpu.cluster_ref(tile, {"c": 0})[...]  #: read

    if wrong:
        arrive(both)
        wait(both)
    else:
        pl.when(t == 0)(lambda: arrive(one))
        wait(one)
        pl.when(t == 1)(lambda: wait(both))


# ---- points of the grid --------------------------------------------------------------------------


def of_points(first, line, second, other):
    """Between two points of the grid, whichever; the emulated machine may not know which thread."""
    point = r"by grid point \(.,\)(, thread 0)?"
    return f"{first} {point} at {line}", f"{second} {point} at {other}"


GRID = dict(grid=(4,), grid_names=("i",))
SEMAPHORE = "semaphore"


@pair(
    ROWS[:4],
    out=(4, 128),
    race=of_points("write o", "store", "read o", "load"),
    remedy=SEMAPHORE,
    want=lambda x: np.cumsum(x, 0),
    **GRID,
)
def signal_before_the_store(wrong, x, o):
    """A prefix sum from block to block."""
    i = lax.axis_index("i")
    ready = pl.get_global(plgpu.SemaphoreType.REGULAR((4,)))

    def signal():
        plgpu.semaphore_signal(ready.at[i], memory_scope="gpu")

    pl.when(i > 0)(lambda: plgpu.semaphore_wait(ready.at[i - 1], memory_scope="gpu"))
    before = lax.cond(i > 0, lambda: o[i - 1], lambda: jnp.zeros(128, F32))  #: load
    if wrong:
        signal()
    o[i] = x[i] + before  #: store
    if not wrong:
        signal()


@pair(
    ROWS[:4],
    out=(2, 4, 128),
    scratch_types=[TILE],
    race=("write o by .*TMA.* at send", r"read o by grid point \(.,\), thread 0 at load"),
    remedy=SEMAPHORE,
    want=lambda x: np.stack([np.roll(x, -1, 0) * 2] * 2),
    **GRID,
)
def signal_while_the_copy_is_in_flight(wrong, x, o, tile):
    i, rows = lax.axis_index("i"), pl.get_global(plgpu.SemaphoreType.REGULAR((4,)))
    tile[...] = x[i] * 2
    commit()
    s2g(tile, o.at[0, (i + 3) % 4])  #: send
    stored(0, wait_read_only=wrong)
    plgpu.semaphore_signal(rows.at[(i + 3) % 4], memory_scope="gpu")
    plgpu.semaphore_wait(rows.at[i], memory_scope="gpu")
    got = o[0, i]  #: load
    o[1, i] = got


@pair(
    ROWS[:4],
    out=(4, 128),
    race=of_points("write o", "part", "read o", "sum"),
    remedy=SEMAPHORE,
    **GRID,
)
def some_signals_awaited(wrong, x, o):
    """The first block adds up what all stored, and waits for two of them."""
    i, done = lax.axis_index("i"), pl.get_global(plgpu.SemaphoreType.REGULAR)
    o[i] = x[i] * 2  #: part
    plgpu.semaphore_signal(done, memory_scope="gpu")

    @pl.when(i == 0)
    def _():
        plgpu.semaphore_wait(done, 2 if wrong else 4, memory_scope="gpu")
        total = o[0] + o[1] + o[2] + o[3]  #: sum
        o[0] = total


@pair(
    ROWS[:4],
    out=(128,),
    race=of_points("write o", "add", "(read|write) o", "add"),
    remedy=SEMAPHORE,
    want=lambda x: x.sum(0),
    **GRID,
)
def sum_of_the_grid_without_atomics(wrong, x, o):
    i = lax.axis_index("i")
    if wrong:
        o[...] = o[...] + x[i]  #: add
        return
    turn = pl.get_global(plgpu.SemaphoreType.REGULAR)
    plgpu.semaphore_wait(turn, i, decrement=False, memory_scope="gpu")
    before = lax.cond(i > 0, lambda: o[...], lambda: jnp.zeros(128, F32))
    o[...] = before + x[i]
    plgpu.semaphore_signal(turn, memory_scope="gpu")


# ---- wgmma ---------------------------------------------------------------------------------------

A, B = small(64, 256), small(256, 64, seed=1)


def product(a, b):
    return a.astype(F32) @ b.astype(F32)


@pair(
    A,
    B,
    out=(64, 64),
    race=("read (.)_smem by the tensor core at mul", "write (.)_smem by TMA at pipeline"),
    errors=(ValueError,),
    remedy="wgmma_wait",
    want=product,
)
def product_in_flight_without_a_delay(wrong, a, b, o):
    delay = 0 if wrong else 1

    def compute(acc):
        def step(_, a_smem, b_smem):
            plgpu.wgmma(acc, a_smem, b_smem)  #: mul
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(  #: pipeline
            step,
            grid=(4,),
            max_concurrent_steps=2,
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (0, k), delay_release=delay),
                plgpu.BlockSpec((64, 64), lambda k: (k, 0), delay_release=delay),
            ],
        )(a, b)
        return acc[...]

    o[...] = pl.run_scoped(compute, plgpu.ACC((64, 64)))


OPERANDS = [SMEM((2, 64, 64), F16), SMEM((2, 64, 64), F16)]


@pair(
    A,
    B,
    out=(64, 64),
    scratch_types=[*OPERANDS, Barrier(num_arrivals=2, num_barriers=2), Barrier(num_barriers=2)],
    race=("read (as_|bs) by the tensor core at mul", "write (as_|bs) by TMA at load ."),
    errors=(ValueError,),
    remedy="wgmma_wait|before the first|full",
    want=product,
    **TWO,
)
def slot_released_under_a_product(wrong, a, b, o, as_, bs, full, empty):
    """Released right after the product was issued; right: that of the step before, once all but one
    are complete."""

    def produce():
        @pl.loop(0, 4)
        def _(k):
            pl.when(k >= 2)(lambda: wait(empty.at[k % 2]))
            g2s(a.at[:, pl.ds(k * 64, 64)], as_.at[k % 2], full.at[k % 2])  #: load a
            g2s(b.at[pl.ds(k * 64, 64)], bs.at[k % 2], full.at[k % 2])  #: load b

    def multiply(acc):
        @pl.loop(0, 4)
        def _(k):
            wait(full.at[k % 2])
            plgpu.wgmma(acc, as_.at[k % 2], bs.at[k % 2])  #: mul
            if wrong:
                arrive(empty.at[k % 2])
            else:
                plgpu.wgmma_wait(1)
                pl.when(k >= 1)(lambda: arrive(empty.at[(k + 1) % 2]))

        return acc[...]

    def consume():
        o[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64)))

    each(produce, consume)


@pair(
    A[:, :64],
    B[:64],
    out=(64, 64),
    scratch_types=[SMEM((64, 64), F16), plgpu.ACC((64, 64))],
    race=("read b_smem by the tensor core at mul", "write b_smem by thread 0 at again"),
    errors=(ValueError,),
    remedy="wgmma_wait",
    want=lambda a, b: product(a, b) + product(a, b) * 2,
)
def other_operand_of_a_product_from_registers(wrong, a, b, o, b_smem, acc):
    """A from registers: only b is in shared memory, and changes."""
    left = plgpu.layout_cast(a[...], plgpu.Layout.WGMMA)
    b_smem[...] = b[...]
    commit()
    plgpu.wgmma(acc, left, b_smem)  #: mul
    if not wrong:
        plgpu.wgmma_wait(0)
    b_smem[...] = b[...] * 2  #: again
    commit()
    plgpu.wgmma(acc, left, b_smem)
    o[...] = acc[...]


@pair(
    A[:, :64],
    B[:64],
    out=(64, 64),
    scratch_types=[SMEM((64, 64), F16), SMEM((64, 64), F16), Barrier(), Barrier()],
    race=("write a_smem by thread 0 at store", "read a_smem by the tensor core at mul"),
    remedy=r"commit_smem\(\)",
    want=lambda a, b: product(a * 2, b),
    **TWO,
)
def operand_stored_by_another_thread(wrong, a, b, o, a_smem, b_smem, full, ready):
    def store():
        a_smem[...] = a[...] * 2  #: store
        if not wrong:
            commit()
        arrive(ready)

    def multiply():
        g2s(b, b_smem, full)
        wait(full)
        wait(ready)

        def product(acc):
            plgpu.wgmma(acc, a_smem, b_smem)  #: mul
            return acc[...]

        o[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    each(store, multiply)


@pair(
    A[:, :64],
    B[:64],
    out=(64, 64),
    scratch_types=[
        *(SMEM((64, 64), F16),) * 2,
        Barrier(num_arrivals=2),
        plgpu.ACC((64, 64)),
        SMEM((64, 64), F32),
    ],
    race=("write (.)_smem by TMA at load", "read (.)_smem by the tensor core at mul"),
    errors=(ValueError,),
    remedy="full|before the first",
    want=product,
)
def product_of_what_is_loaded(wrong, a, b, o, a_smem, b_smem, full, acc, c_smem):
    for x, y in ((a, a_smem), (b, b_smem)):
        g2s(x, y, full)  #: load
    if not wrong:
        wait(full)
    plgpu.wgmma(acc, a_smem, b_smem)  #: mul
    if wrong:
        wait(full)
    c_smem[...] = acc[...]
    commit()
    s2g(c_smem, o)
    stored(0)


# ---- tensor memory -------------------------------------------------------------------------------

WIDE, HIGH = small(128, 64, seed=2), small(128, 64, seed=3)


def ordering(**kw):
    return Barrier(orders_tensor_core=True, **kw)


def transposed(a, b):
    return a.astype(F32) @ b.astype(F32).T


@pair(
    WIDE,
    HIGH,
    out=(128, 128),
    scratch_types=[
        *(SMEM((128, 64), F16),) * 2,
        TMEM((128, 128), F32),
        Barrier(num_arrivals=2),
        ordering(),
    ],
    errors=(ValueError, plgpu.UninitializedError),
    remedy="'acc'",
    want=transposed,
)
def accumulator_read_too_early(wrong, a, b, o, a_smem, b_smem, acc, full, done):
    g2s(a, a_smem, full)
    g2s(b, b_smem, full)
    wait(full)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
    if not wrong:
        wait(done)
    o[...] = plgpu.async_load_tmem(acc)
    if wrong:
        wait(done)


@pair(
    np.concatenate([small(128, 64, seed=k) for k in range(4)], 1),
    np.concatenate([small(128, 64, seed=9 - k) for k in range(4)], 1),
    out=(128, 128),
    scratch_types=[
        SMEM((2, 128, 64), F16),
        SMEM((2, 128, 64), F16),
        TMEM((128, 128), F32),
        Barrier(num_arrivals=2, num_barriers=2),
        ordering(num_barriers=2),
        ordering(),
    ],
    race=("read (.)_smem by the tensor core at mul", "write (.)_smem by TMA at load ."),
    errors=(ValueError,),
    remedy="a_smem|b_smem|full|empty|completes|before the first",
    want=transposed,
)
def slot_refilled_under_tcgen05(wrong, a, b, o, a_smem, b_smem, acc, full, empty, done):
    @plgpu.warp_map
    def _(w):
        @pl.when(w == 0)
        def _():
            @pl.loop(0, 4)
            def _(k):
                if not wrong:
                    pl.when(k >= 2)(lambda: wait(empty.at[k % 2]))
                else:
                    pl.when(k >= 2)(lambda: wait(full.at[k % 2]))
                g2s(a.at[:, pl.ds(k * 64, 64)], a_smem.at[k % 2], full.at[k % 2])  #: load a
                g2s(b.at[:, pl.ds(k * 64, 64)], b_smem.at[k % 2], full.at[k % 2])  #: load b

        @pl.when(w == 1)
        def _():
            @pl.loop(0, 4)
            def _(k):
                wait(full.at[k % 2])
                plgpu.tcgen05_mma(  #: mul
                    acc, a_smem.at[k % 2], b_smem.at[k % 2].T, empty.at[k % 2], accumulate=k > 0
                )

            plgpu.tcgen05_commit_arrive(done)

    wait(done)
    o[...] = plgpu.async_load_tmem(acc)


@pair(
    WIDE,
    HIGH,
    out=(2, 128, 128),
    scratch_types=[
        *(SMEM((128, 64), F16),) * 2,
        TMEM((128, 128), F32),
        Barrier(num_arrivals=2),
        ordering(num_barriers=2),
        ordering(),
    ],
    race=("read acc by thread 1 at load", "write acc by the tensor core at again"),
    errors=(ValueError,),
    remedy="'acc'|wait_load_tmem",
    want=lambda a, b: np.stack([transposed(a, b), transposed(a, b) * 2]),
    **TWO,
)
def accumulator_released_before_it_is_read(wrong, a, b, o, a_smem, b_smem, acc, full, done, free):
    def multiply():
        g2s(a, a_smem, full)
        g2s(b, b_smem, full)
        wait(full)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done.at[0], accumulate=False)
        wait(free)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done.at[1])  #: again

    def store():
        wait(done.at[0])
        if wrong:
            arrive(free)
        value = plgpu.async_load_tmem(acc)  #: load
        plgpu.wait_load_tmem()
        if not wrong:
            arrive(free)
        o[0] = value
        wait(done.at[1])
        o[1] = plgpu.async_load_tmem(acc)

    each(multiply, store)


@pair(
    WIDE,
    HIGH,
    out=(2, 128, 128),
    scratch_types=[
        *(SMEM((128, 64), F16),) * 2,
        TMEM((128, 128), F32),
        Barrier(num_arrivals=2),
        ordering(),
    ],
    race=("read acc by thread 0 at load", "write acc by the tensor core at again"),
    remedy="wait_load_tmem",
    want=lambda a, b: np.stack([transposed(a, b), transposed(a, b) * 3]),
)
def accumulator_changed_while_it_is_read(wrong, a, b, o, a_smem, b_smem, acc, full, done):
    """One thread: the lanes that load are others than the one that issues the products."""
    g2s(a, a_smem, full)
    g2s(b, b_smem, full)
    wait(full)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
    wait(done)
    first = plgpu.async_load_tmem(acc)  #: load
    if not wrong:
        plgpu.wait_load_tmem()
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T)  #: again
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
    if wrong:
        plgpu.wait_load_tmem()
    wait(done)
    o[0] = first
    o[1] = plgpu.async_load_tmem(acc)


@pair(
    WIDE,
    HIGH,
    out=(128, 128),
    scratch_types=[
        SMEM((128, 64), F16),
        TMEM((128, 64), F16, packed=True),
        TMEM((128, 128), F32),
        Barrier(),
        ordering(),
    ],
    race=("write left by thread 0 at store", "read left by the tensor core at mul"),
    errors=(ValueError,),
    remedy="commit_tmem",
    want=transposed,
)
def operand_in_tensor_memory(wrong, a, b, o, b_smem, left, acc, full, done):
    g2s(b, b_smem, full)
    plgpu.async_store_tmem(left, plgpu.layout_cast(a[...], plgpu.Layout.TCGEN05))  #: store
    if not wrong:
        plgpu.commit_tmem()
    wait(full)
    plgpu.tcgen05_mma(acc, left, b_smem.T, done, accumulate=False)  #: mul
    wait(done)
    o[...] = plgpu.async_load_tmem(acc)


@pair(
    small(256, 64, seed=4),
    small(128, 64, seed=5),
    out=(256, 128),
    scratch_types=[
        SMEM((128, 64), F16),
        SMEM((64, 64), F16),
        TMEM((128, 128), F32, collective=True),
        Barrier(num_arrivals=2),
        ordering(),
        meeting(),
    ],
    race=("write (.)_smem by TMA at load", "read (.)_smem by the tensor core at mul"),
    errors=(ValueError,),
    remedy="smem|full|leader|order|barrier",
    want=transposed,
    **BLOCKS,
)
def pair_whose_leader_hears_of_itself_alone(wrong, a, b, o, a_smem, b_smem, acc, full, done, met):
    """Each block waits for its own copies, but the first block multiplies those of both."""
    me = lax.axis_index("c")
    for x, y, n in ((a, a_smem, 128), (b, b_smem, 64)):
        g2s(x.at[pl.ds(me * n, n)], y, full)  #: load
    if not wrong:
        wait(full)
        arrive(met)
        wait(met)
    else:
        pl.when(me == 0)(lambda: wait(full))
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, collective_axis="c", accumulate=False)  #: mul
    if wrong:
        pl.when(me == 1)(lambda: wait(full))
        arrive(met)
        wait(met)
    wait(done)
    o[pl.ds(me * 128, 128)] = plgpu.async_load_tmem(acc)


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
