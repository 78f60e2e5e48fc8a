"""The catalogue of synchronisation scenarios (docs/checking.md), by its numbers: each is run under
several schedules, by both judges, and a race is named by both accesses."""

import numpy as np
import pytest
import races
from races import Agents, clean, found, look, racy
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu._matmul import matmul_kernel

pytestmark = pytest.mark.covering(2)
F32 = np.float32
N = 128
X = np.arange(N, dtype=F32)
TILE, ROWS = plgpu.SMEM((N,), F32), plgpu.SMEM((2, N), F32)
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
arrive, wait, commit = plgpu.barrier_arrive, plgpu.barrier_wait, plgpu.commit_smem
stored = plgpu.wait_smem_to_gmem


def out(*shape):
    return plgpu.ShapeDtypeStruct(shape or (N,), F32)


@pytest.fixture(params=["threads", "warps"])
def agents(request):
    return Agents(request.param)


@pytest.fixture(params=["interpret", "emulate"], autouse=True)
def judge(request, monkeypatch):
    monkeypatch.setattr(races, "judge", request.param)
    return request.param


INSERTED = "the fence between them was inserted"

# ---- one agent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", ["between", "none", "elsewhere"])
def test_1_store_then_load_over_it(commits):
    def body(x, o, tile, bar):
        if commits == "elsewhere":
            commit()
        tile[3] = 1.0
        if commits == "between":
            commit()
        g2s(x, tile, bar)  #: copy
        wait(bar)
        if commits == "elsewhere":
            commit()
        o[0] = tile[3]

    notes = [] if commits == "between" else [(INSERTED, "copy")]
    scratch = [TILE, plgpu.Barrier()]
    assert clean(body, out(), X, scratch_types=scratch, notes=notes)[0] == 3


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("touch", ["read", "write"])
def test_2_load_without_a_wait(touch, waits):
    def body(x, o, tile, bar):
        g2s(x, tile, bar)  #: copy
        if waits:
            wait(bar)
        if touch == "read":
            o[0] = tile[3]  #: use
        else:
            tile[3] = 1.0  #: use
        if not waits:
            wait(bar)

    call = body, out(), X
    scratch = dict(scratch_types=[TILE, plgpu.Barrier()])
    if waits:
        clean(*call, **scratch)
    else:
        write = "write tile[0:128] by TMA, for thread 0 at copy"
        racy([(write, f"{touch} tile[3] by thread 0 at use")], *call, **scratch)


@pytest.mark.parametrize("waits", [False, True])
def test_3_load_then_store_to_its_source(waits):
    def body(o, tile, bar):
        g2s(o, tile, bar)  #: copy
        if waits:
            wait(bar)
        commit()
        o[3] = 1.0  #: store
        if not waits:
            wait(bar)

    scratch = dict(scratch_types=[TILE, plgpu.Barrier()])
    if waits:
        clean(body, out(), **scratch)
    else:
        read = "read o[0:128] by TMA, for thread 0 at copy"
        racy([(read, "write o[3] by thread 0 at store")], body, out(), **scratch)


@pytest.mark.parametrize("waits", [False, True])
def test_4_two_loads_on_one_barrier(waits):
    def body(x, o, tile, bar):
        g2s(x, tile, bar)  #: first
        if waits:
            arrive(bar)
            wait(bar)
        g2s(x, tile, bar)  #: second
        if waits:
            arrive(bar)
        wait(bar)
        o[0] = tile[3]

    scratch = dict(scratch_types=[TILE, plgpu.Barrier(num_arrivals=2)])
    if waits:
        clean(body, out(), X, **scratch)
    else:
        write = "write tile[0:128] by TMA, for thread 0 at "
        racy([(write + "first", write + "second")], body, out(), X, **scratch)


def test_5_two_loads_on_two_barriers():
    def body(x, o, tile, a, b):
        g2s(x, tile, a)  #: first
        g2s(x, tile, b)  #: second
        wait(a)
        wait(b)
        o[0] = tile[3]

    write = "write tile[0:128] by TMA, for thread 0 at "
    scratch = [TILE, plgpu.Barrier(), plgpu.Barrier()]
    racy([(write + "first", write + "second")], body, out(), X, scratch_types=scratch)


@pytest.mark.parametrize("waits", [False, True])
def test_6_two_loads_to_two_buffers_on_one_barrier(waits):
    def body(x, o, a, b, bar):
        g2s(x, a, bar)  #: first
        g2s(x, b, bar)  #: second
        if waits:
            wait(bar)
        o[0] = a[3]  #: a
        o[1] = b[3]  #: b
        if not waits:
            wait(bar)

    scratch = dict(scratch_types=[TILE, TILE, plgpu.Barrier(num_arrivals=2)])
    if waits:
        clean(body, out(), X, **scratch)
        return
    pairs = [
        (
            f"write {name}[0:128] by TMA, for thread 0 at {copy}",
            f"read {name}[3] by thread 0 at {name}",
        )
        for name, copy in (("a", "first"), ("b", "second"))
    ]
    racy(pairs, body, out(), X, **scratch)


@pytest.mark.parametrize("commits", ["before", "none", "after"])
def test_7_store_then_copy_out(commits):
    def body(o, p, tile):
        tile[3] = 1.0  #: store
        if commits == "before":
            commit()
        s2g(tile, o)  #: copy
        if commits == "after":
            commit()
        stored(0)
        p[0] = o[3]

    outs = out(), out()
    if commits == "before":
        assert clean(body, outs, scratch_types=[TILE])[1][0] == 1
    else:
        read = "read tile[0:128] by TMA, for thread 0 at copy"
        racy([(read, "write tile[3] by thread 0 at store")], body, outs, scratch_types=[TILE])


def two_copies_out(then):
    """What `then` does after two copies from a and b to rows 0 and 1 of o."""

    def body(o, p, a, b):
        a[3] = 1.0
        b[3] = 2.0
        commit()
        s2g(a, o.at[0])  #: copy a
        s2g(b, o.at[1])  #: copy b
        then(o, p, a, b)

    return body, (out(2, N), out())


COPY_A = "write o[0, 0:128] by TMA, for thread 0 at copy a"
COPY_B = "write o[1, 0:128] by TMA, for thread 0 at copy b"


def test_8_wait_for_the_first_of_two_copies_out():
    def then(o, p, a, b):
        stored(1)
        p[0] = o[0, 3]  #: read a
        p[1] = o[1, 3]  #: read b
        stored(0)

    body, outs = two_copies_out(then)
    pair = COPY_B, "read o[1, 3] by thread 0 at read b"
    racy([pair], body, outs, scratch_types=[TILE, TILE])


def test_9_waits_that_leave_some_in_flight():
    def body(o, p, a, b, c):
        for k, s in enumerate((a, b, c)):
            s[3] = k + 1.0
        commit()
        for k, s in enumerate((a, b, c)):
            s2g(s, o.at[k])
        stored(1)
        stored(2)
        p[0] = o[0, 3] + o[1, 3]
        stored(0)
        p[1] = o[0, 3] + o[1, 3] + o[2, 3]

    _, p = clean(body, (out(3, N), out()), scratch_types=[TILE] * 3)
    assert list(p[:2]) == [3, 6]


READ_B = "read b[0:128] by TMA, for thread 0 at copy b"


@pytest.mark.parametrize(
    "touched, race",
    [
        ("a", None),
        ("b", (READ_B, "write b[3] by thread 0 at b")),
        ("o[1]", (COPY_B, "write o[1, 3] by thread 0 at o[1]")),
        ("o[0]", (COPY_A, "write o[0, 3] by thread 0 at o[0]")),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_10_11_wait_for_the_source_alone(touched, race, full):
    """11: a full wait after it also orders the first copy's destination."""

    def then(o, p, a, b):
        stored(1, wait_read_only=True)
        if full:
            stored(1)
        if touched == "a":
            a[3] = 5.0  #: a
        elif touched == "b":
            b[3] = 5.0  #: b
        elif touched == "o[0]":
            o[0, 3] = 5.0  #: o[0]
        else:
            o[1, 3] = 5.0  #: o[1]
        stored(0)

    body, outs = two_copies_out(then)
    if race and not (full and touched == "o[0]"):
        racy([race], body, outs, scratch_types=[TILE, TILE])
    else:
        clean(body, outs, scratch_types=[TILE, TILE])


def test_12_two_copies_out_to_one_place():
    def body(o, tile):
        tile[3] = 1.0
        commit()
        s2g(tile, o)  #: first
        s2g(tile, o)  #: second
        stored(0)

    write = "write o[0:128] by TMA, for thread 0 at "
    racy([(write + "first", write + "second")], body, out(), scratch_types=[TILE])


@pytest.mark.parametrize("waits", ["full", "source", "none"])
def test_13_copy_out_that_nobody_waits_for(waits):
    def body(o, tile):
        tile[3] = 1.0
        commit()
        s2g(tile, o)  #: copy
        if waits != "none":
            stored(0, wait_read_only=waits == "source")

    notes = [("ends without a wait for this copy", "copy")] if waits == "none" else []
    assert clean(body, out(), scratch_types=[TILE], notes=notes)[3] == 1


# ---- two agents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_14_store_and_load_by_the_first(agents, commits):
    def body(x, o, tile, loaded, handed):
        def first():
            tile[3] = 1.0
            if commits:
                commit()
            g2s(x, tile, loaded)  #: copy
            arrive(handed)

        def second():
            commit()
            wait(handed)
            wait(loaded)
            o[0] = tile[3]

        agents.run(first, second)

    scratch = dict(scratch_types=[TILE, plgpu.Barrier(), plgpu.Barrier()], **agents.options())
    notes = [] if commits else [(INSERTED, "copy")]
    assert clean(body, out(), X, notes=notes, **scratch)[0] == 3


@pytest.mark.parametrize("commits", ["second", "first", "none", "too early"])
def test_15_store_by_the_first_load_by_the_second(agents, commits):
    def body(x, o, tile, loaded, handed):
        def first():
            tile[3] = 1.0  #: store
            if commits == "first":
                commit()
            arrive(handed)

        def second():
            if commits == "too early":
                commit()
            wait(handed)
            if commits == "second":
                commit()
            g2s(x, tile, loaded)  #: copy
            wait(loaded)
            o[0] = tile[3]

        agents.either(first, second)

    call = dict(scratch_types=[TILE, plgpu.Barrier(), plgpu.Barrier()], **agents.options())
    if commits in ("first", "second"):
        assert clean(body, out(), X, **call)[0] == 3
        return
    pair = (
        f"write tile[3] by {agents(0)} at store",
        f"write tile[0:128] by TMA, for {agents(1)} at copy",
    )
    racy([pair], body, out(), X, **call)


@pytest.mark.parametrize("target", ["source", "destination"])
def test_16_wait_for_the_copy_of_another(agents, target):
    def body(o, tile, issued):
        def first():
            tile[3] = 1.0
            commit()
            s2g(tile, o)  #: copy
            arrive(issued)
            stored(0)

        def second():
            wait(issued)
            stored(0)
            if target == "source":
                tile[5] = 2.0  #: store
            else:
                o[5] = 2.0  #: store

        agents.run(first, second)

    ref, touch = ("tile", "read") if target == "source" else ("o", "write")
    issuer = agents(0) if agents.warps else "thread 0"
    if agents.warps:  # warp 0 issues for its thread
        issuer = "thread 0, warp 0"
    pair = (
        f"{touch} {ref}[0:128] by TMA, for {issuer} at copy",
        f"write {ref}[5] by {agents(1)} at store",
    )
    racy([pair], body, out(), scratch_types=[TILE, plgpu.Barrier()], **agents.options())


def test_17_copy_out_awaited_and_handed_over(agents):
    def body(o, p, tile, done):
        def first():
            tile[3] = 1.0
            commit()
            s2g(tile, o)
            stored(0)
            arrive(done)

        def second():
            wait(done)
            p[0] = o[3]

        agents.run(first, second)

    call = dict(scratch_types=[TILE, plgpu.Barrier()], **agents.options())
    assert clean(body, (out(), out()), **call)[1][0] == 1


@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (2, 1, 3)])
@pytest.mark.parametrize("waits", [True, False])
def test_18_producer_and_consumer(agents, shape, waits):
    at = tuple(d - 1 for d in shape)

    def body(o, tile, ready):
        bar = ready.at[at] if shape else ready

        def first():
            tile[3] = 1.0  #: store
            arrive(bar)

        def second():
            if waits:
                wait(bar)
            o[0] = tile[3]  #: load

        agents.run(first, second)

    call = dict(scratch_types=[TILE, plgpu.Barrier(num_barriers=shape or 1)], **agents.options())
    if waits:
        assert clean(body, out(), **call)[0] == 1
    else:
        pair = f"write tile[3] by {agents(0)} at store", f"read tile[3] by {agents(1)} at load"
        racy([pair], body, out(), **call)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("barriers", ["one", "each"])
def test_19_many_producers(agents, n, barriers):
    def body(o, tile, ready):
        def producer(k):
            tile[k] = k + 1.0
            arrive(ready.at[0 if barriers == "one" else k])

        def consumer():
            for k in range(1 if barriers == "one" else n - 1):
                wait(ready.at[k])
            for k in range(n - 1):
                o[k] = tile[k]

        agents.run(*(lambda k=k: producer(k) for k in range(n - 1)), consumer)

    ready = (
        plgpu.Barrier(num_arrivals=n - 1)
        if barriers == "one"
        else plgpu.Barrier(num_barriers=n - 1)
    )
    got = clean(body, out(), scratch_types=[TILE, ready], **agents.options(n))
    assert list(got[: n - 1]) == list(range(1, n))


@pytest.mark.parametrize("slots, steps", [(1, 3), (2, 5), (3, 7)])
@pytest.mark.parametrize("released", [True, False])
def test_20_ring(agents, slots, steps, released, judge):
    """The consumer's releases are all awaited. Without them, by `consumed` or otherwise, slots are
    filled while they are read."""

    def body(x, o, ring, produced, consumed):
        def producer():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                if released:
                    pl.when(i >= slots)(lambda: wait(consumed.at[slot]) and None)
                ring[slot, 3] = x[i]  #: fill
                arrive(produced.at[slot])

            for k in range(slots if released else 0):
                wait(consumed.at[(steps + k) % slots])

        def consumer():
            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, slots)
                wait(produced.at[slot])
                o[i] = ring[slot, 3]  #: drain
                if released:
                    arrive(consumed.at[slot])

        agents.run(producer, consumer)

    bars = [plgpu.Barrier(num_barriers=slots)] * 2
    call = dict(scratch_types=[plgpu.SMEM((slots, N), F32), *bars], **agents.options())
    if released:
        np.testing.assert_array_equal(clean(body, out(), X, **call)[:steps], X[:steps])
        return
    pair = f"write ring[0, 3] by {agents(0)} at fill", f"read ring[0, 3] by {agents(1)} at drain"
    hits, seeds = 0, range(32 if judge == "interpret" else 6)
    for seed in seeds:  # the emulated machine may meet the missed phase first
        try:
            look(body, out(), X, seed=seed, **call)
        except ValueError:  # a phase was missed as well
            pass
        hits += set(pair) in found()
    assert 2 * hits > len(seeds)


@pytest.mark.parametrize("n", [2, 4])
def test_21_all_write(agents, n):
    """One element: a race. Distinct ones: none."""

    def one(o):
        def store(k):
            o[3] = k + 1.0  #: store

        agents.run(*(lambda k=k: store(k) for k in range(n)))

    def own(o):
        agents.run(*(lambda k=k: o.set(k + 1.0, k) for k in range(n)))

    clean(own, out(), **agents.options(n))
    for seed in range(4):
        _, races, _ = look(one, out(), seed=seed, **agents.options(n))
        assert races
        for pair in races:
            assert all(
                x.startswith("write o[3] by thread") and x.endswith("at store") for x in pair
            )


@pytest.mark.parametrize("n", [1, 5, 8])
def test_21_distinct_elements_of_many_threads(n):
    def body(o):
        o[lax.axis_index("t")] = 1.0

    clean(body, out(), num_threads=n, thread_name="t")


def test_22_collective_scratch_without_a_barrier(agents):
    def body(o, tile):
        def first():
            tile[3] = 1.0  #: store

        def second():
            o[0] = tile[3]  #: load

        agents.run(first, second)

    pair = f"write tile[3] by {agents(0)} at store", f"read tile[3] by {agents(1)} at load"
    racy([pair], body, out(), scratch_types=[TILE], **agents.options())


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("chained", [True, False])
def test_23_sums_in_a_chain(agents, n, chained):
    def body(o, tile, begun, turn):
        def add(k):
            if k == 0:
                tile[3] = 0.0
                for b in range(n):
                    arrive(begun.at[b])
            wait(begun.at[k])
            if chained and k > 0:
                wait(turn.at[k - 1])
            tile[3] = tile[3] + (k + 1.0)  #: add
            arrive(turn.at[k])
            if k == n - 1:
                for b in range(n - 1 if chained else 0, n):
                    wait(turn.at[b])
                o[0] = tile[3]  #: sum

        agents.run(*(lambda k=k: add(k) for k in range(n)))

    bars = [plgpu.Barrier(num_barriers=n)] * 2
    call = dict(scratch_types=[TILE, *bars], **agents.options(n))
    if chained:
        assert clean(body, out(), **call)[0] == n * (n + 1) / 2
        return
    for seed in range(4):
        _, races, _ = look(body, out(), seed=seed, **call)
        assert any(all("tile[3]" in x and x.endswith("at add") for x in p) for p in races), races


def test_24_relay(agents):
    """Three agents, two barriers, each waited for twice."""

    def body(o, tile, there, back):
        def first():
            for k in range(2):
                tile[0] = k + 1.0
                arrive(there.at[0])
                wait(back.at[0])

        def second():
            for _ in range(2):
                wait(there.at[0])
                tile[1] = tile[0] * 10
                arrive(there.at[1])

        def third():
            for k in range(2):
                wait(there.at[1])
                o[k] = tile[1] + tile[0]
                arrive(back.at[0])

        agents.run(first, second, third)

    bars = [plgpu.Barrier(num_barriers=2)] * 2
    got = clean(body, out(), scratch_types=[TILE, *bars], **agents.options(3))
    assert list(got[:2]) == [11, 22]


def test_25_warps():
    def body(o, tile, ready):
        def first():
            tile[3] = 1.0
            arrive(ready)

        def second():
            wait(ready)
            o[0] = tile[3]

        Agents("warps").run(first, second)

    assert clean(body, out(), scratch_types=[TILE, plgpu.Barrier()])[0] == 1


# ---- clusters ------------------------------------------------------------------------------------

PAIR = dict(cluster=(2,), cluster_names=("c",))
BOTH = plgpu.ClusterBarrier(collective_axes=("c",))


def meet(bar):
    arrive(bar)
    wait(bar)


@pytest.mark.parametrize("how", ["plain", "copy"])
@pytest.mark.parametrize("touch", ["write", "read"])
def test_26_both_blocks_one_place_of_gmem(how, touch):
    def body(x, o, tile, bar):
        c = lax.axis_index("c")
        if touch == "write" and how == "plain":
            o[0, 3] = c.astype(F32)  #: touch
        elif touch == "write":
            tile[...] = x[...] + c.astype(F32)
            commit()
            s2g(tile, o.at[0])  #: touch
            stored(0)
        else:
            if how == "plain":
                tile[...] = x[...]
            else:
                g2s(x, tile, bar)
                wait(bar)
            o[c] = tile[...]

    call = dict(scratch_types=[TILE, plgpu.Barrier()], **PAIR)
    if touch == "read":
        np.testing.assert_array_equal(clean(body, out(2, N), X, **call), [X, X])
        return
    index, maker = ("[0, 3]", "") if how == "plain" else ("[0, 0:128]", "TMA, for ")
    pair = [f"write o{index} by {maker}block ({k},), thread 0 at touch" for k in range(2)]
    racy([pair], body, out(2, N), X, **call)


def test_27_own_scratch_of_each_block():
    def body(o, tile):
        c = lax.axis_index("c")
        tile[3] = c.astype(F32) + 1
        o[c] = tile[3]

    assert list(clean(body, out(), scratch_types=[TILE], **PAIR)[:2]) == [1, 2]


@pytest.mark.parametrize("shape", [(), (2,), (1, 2), (2, 1, 2)])
@pytest.mark.parametrize("waits", [True, False])
def test_28_exchange_by_gmem(shape, waits):
    at = tuple(d - 1 for d in shape)

    def body(o, p, bars):
        c = lax.axis_index("c")
        bar = bars.at[at] if shape else bars
        o[c] = c.astype(F32) + 1  #: store
        arrive(bar)
        if waits:
            wait(bar)
        p[c] = o[1 - c]  #: load
        if not waits:
            wait(bar)

    bars = plgpu.ClusterBarrier(collective_axes=("c",), num_barriers=shape or 1)
    call = dict(scratch_types=[bars], **PAIR)
    if waits:
        assert list(clean(body, (out(), out()), **call)[1][:2]) == [2, 1]
        return
    for seed in range(4):
        _, races, _ = look(body, (out(), out()), seed=seed, **call)
        pairs = [
            {f"write o[{k}] by block ({k},), thread 0 at store",
             f"read o[{k}] by block ({1 - k},), thread 0 at load"}
            for k in range(2)
        ]  # fmt: skip
        assert races and all(r in pairs for r in races)


@pytest.mark.parametrize("k, skipped", [(2, None), (4, None), (2, 1), (4, 2)])
def test_29_rounds_of_neighbours(k, skipped):
    """One barrier for each round; the wait of one round is left out."""

    def body(o, p, bars):
        c = lax.axis_index("c")
        for r in range(k):
            o[r, c] = c.astype(F32) + 10 * r  #: store
            arrive(bars.at[r])
            if r != skipped:
                wait(bars.at[r])
            p[r, c] = o[r, lax.rem(c + 1, k)]  #: load
            if r == skipped:
                wait(bars.at[r])

    call = dict(
        scratch_types=[plgpu.ClusterBarrier(collective_axes=("c",), num_barriers=k)],
        cluster=(k,),
        cluster_names=("c",),
    )
    outs = out(k, k), out(k, k)
    if skipped is None:
        clean(body, outs, **call)
        return
    _, races, _ = look(body, outs, **call)
    assert races
    for pair in races:
        assert all(f" o[{skipped}, " in x for x in pair), pair
        assert {x.split(" at ")[1] for x in pair} == {"store", "load"}


def square(composite):
    """Block (1, 1) reads what (0, 0) wrote after one arrival and wait."""

    def body(o, p, bar):
        a, b = lax.axis_index("a"), lax.axis_index("b")
        pl.when((a == 0) & (b == 0))(lambda: o.set(5.0, 3))  #: store
        meet(bar)
        pl.when((a == 1) & (b == 1))(lambda: p.set(o[3], 0))  #: load

    axes = (("a", "b"),) if composite else ("a", "b")
    scratch = [plgpu.ClusterBarrier(collective_axes=axes)]
    return body, dict(scratch_types=scratch, cluster=(2, 2), cluster_names=("a", "b"))


def test_30_two_axes_are_not_all_to_all():
    body, call = square(False)
    pair = (
        "write o[3] by block (0, 0), thread 0 at store",
        "read o[3] by block (1, 1), thread 0 at load",
    )
    racy([pair], body, (out(), out()), **call)
    body, call = square(True)
    assert clean(body, (out(), out()), **call)[1][0] == 5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("waits", [True, False])
def test_31_meshes(threads, axes, waits):
    """All threads of all blocks write and read each other's; diagonal blocks do not meet."""

    def body(o, p, bar):
        a, b, t = lax.axis_index("a"), lax.axis_index("b"), lax.axis_index("t")
        o[a, b, t] = (a * 100 + b * 10 + t).astype(F32)  #: store
        arrive(bar)
        if waits:
            wait(bar)
        for i in range(2) if "a" in axes else (a,):
            for j in range(2) if "b" in axes else (b,):
                for k in range(threads):
                    p[a, b, t] = o[i, j, k]  #: load
        if not waits:
            wait(bar)

    bar = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=threads)
    call = dict(scratch_types=[bar], cluster=(2, 2), cluster_names=("a", "b"))
    call |= dict(num_threads=threads, thread_name="t")
    outs = out(2, 2, threads), out(2, 2, threads)
    if waits and len(axes) == 1:
        clean(body, outs, **call)
        return
    _, races, _ = look(body, outs, **call)
    assert races
    for pair in races:
        assert {x.split(" at ")[1] for x in pair} == {"store", "load"}, pair


# ---- misuse of barriers --------------------------------------------------------------------------


def test_32_two_completions_that_nobody_waits_for(agents, judge):
    """Harmless by itself, so it is noted; to wait for the first time then is an error (34)."""

    def twice(o, bar):
        arrive(bar)
        arrive(bar)  #: again

    clean(twice, out(), scratch_types=[plgpu.Barrier()], notes=[("a second phase", "again")])

    def each(o, bar):
        def one():
            arrive(bar)  #: arrive

        agents.run(one, one)

    _, found, notes = look(each, out(), scratch_types=[plgpu.Barrier()], **agents.options())
    assert not found
    if judge == "interpret":
        assert "a second phase" in notes[0][0] and notes[0][1] == "arrive"


def test_33_a_last_completion_that_a_waiter_leaves(agents):
    def body(o, bar):
        def second():
            wait(bar)
            arrive(bar)  #: last

        agents.run(lambda: arrive(bar), second)

    notes = [("has observed fewer", "last")]
    clean(body, out(), scratch_types=[plgpu.Barrier()], notes=notes, **agents.options())


LATE = {  # one bit of the phase is all that a wait on hardware looks at: it hangs
    "interpret": (ValueError, "for the first time, but 2 phases are complete"),
    "emulate": (plgpu.DeadlockError, "waits for barrier 'bar', which lacks"),
}


def test_34_first_wait_too_late(agents, judge):
    def body(o, bar, other):
        def first():
            wait(bar)
            arrive(bar)
            arrive(other)

        def second():
            arrive(bar)
            wait(other)
            wait(bar)  #: late

        agents.run(first, second)

    scratch = [plgpu.Barrier(), plgpu.Barrier()]
    for seed in range(4):
        with pytest.raises(LATE[judge][0], match=LATE[judge][1]):
            look(body, out(), seed=seed, scratch_types=scratch, **agents.options())


def test_35_warps_that_wait_differently(judge):
    def three(o, bar):
        arrive(bar)
        plgpu.warp_map(lambda w: pl.when(w < 3)(lambda: wait(bar) and None))
        arrive(bar)
        wait(bar)  #: all

    clean(three, out(), scratch_types=[plgpu.Barrier()], notes=[("1, 1, 1 and 0 times", "all")])

    def unevenly(o, bar, seen):
        arrive(bar)

        def each(w):
            wait(bar)
            pl.when(w != 0)(lambda: arrive(seen) and None)

            @pl.when(w == 0)
            def _():
                wait(seen)
                arrive(bar)
                wait(bar)

        plgpu.warp_map(each)
        wait(bar)

    scratch = [plgpu.Barrier(), plgpu.Barrier(num_arrivals=3)]
    if judge == "interpret":  # on hardware, phases that differ by two look the same
        with pytest.raises(ValueError, match="2, 1, 1 and 1 times in the warp_map"):
            look(unevenly, out(), scratch_types=scratch)

    def skipping(o, bar, seen):
        """Warp 3 skips phase 0 and waits for phase 1, which is not its next one."""
        arrive(bar)

        def each(w):
            pl.when(w < 3)(lambda: (wait(bar), arrive(seen)) and None)

            @pl.when(w == 3)
            def _():
                wait(seen)
                arrive(bar)
                wait(bar)

        plgpu.warp_map(each)

    with pytest.raises(LATE[judge][0], match=LATE[judge][1]):
        look(skipping, out(), scratch_types=scratch)


@pytest.mark.parametrize("warps_first", [False, True])
def test_36_thread_and_warps_in_turn(warps_first):
    def body(o, bar):
        def by_thread(n):
            for _ in range(n):
                arrive(bar)
                wait(bar)

        def by_warps(n):
            for _ in range(n):
                arrive(bar)
                plgpu.warp_map(lambda w: wait(bar) and None)

        if warps_first:
            by_warps(2)
            by_thread(1)
        else:
            by_thread(2)
            by_warps(1)

    clean(body, out(), scratch_types=[plgpu.Barrier()])


def test_37_indices_and_one_completion():
    with pytest.raises(ValueError, match="needs one barrier, got 2"):
        look(lambda o, bars: wait(bars), out(), scratch_types=[plgpu.Barrier(num_barriers=2)])

    def indexed(o, bar):
        arrive(bar.at[0])
        wait(bar.at[0])

    clean(indexed, out(), scratch_types=[plgpu.Barrier()])
    clean(lambda o, bar: arrive(bar), out(), scratch_types=[plgpu.Barrier()])


@pytest.mark.covering(1)
@pytest.mark.parametrize("arrivers", only_long(range(1, 8), 1, 2, 7))
def test_38_arrivers_and_waiters(arrivers):
    """Warps 0 to 15 of four threads: the first ones arrive, the next 1 to 7 wait and read all."""
    for waiters in range(1, 8):

        def body(o, tile, bar, waiters=waiters):
            t = lax.axis_index("t")

            def each(w):
                k = t * 4 + w

                @pl.when(k < arrivers)
                def _():
                    tile[k] = 1.0
                    arrive(bar)

                @pl.when((k >= arrivers) & (k < arrivers + waiters))
                def _():
                    wait(bar)
                    total = tile[0]
                    for a in range(1, arrivers):
                        total = total + tile[a]
                    o[k] = total

            plgpu.warp_map(each)

        scratch = [TILE, plgpu.Barrier(num_arrivals=arrivers)]
        got = clean(
            body, out(), scratch_types=scratch, num_threads=4, thread_name="t", seeds=range(2)
        )
        assert (got[arrivers : arrivers + waiters] == arrivers).all()


# ---- whole kernels -------------------------------------------------------------------------------


def test_61_pipelined_matmul(judge):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, 256)).astype(np.float16) for _ in range(2))
    results = []
    for seed, detect in ((0, False), (0, True), (5, True)):
        params = plgpu.InterpretParams(
            seed=seed, detect_races=detect, mode="reference", backend=judge
        )
        results.append(matmul_kernel(256, 256, 256, np.float16, steps=3, interpret=params)(a, b))
        if detect:
            assert not plgpu.get_races().races_found
    want = a.astype(F32) @ b.astype(F32)
    np.testing.assert_allclose(results[0].astype(F32), want, rtol=2e-2, atol=0.5)
    assert all(r.tobytes() == results[0].tobytes() for r in results)


def test_62_without_floating_point_work(judge):
    if judge == "emulate":
        with pytest.raises(NotImplementedError, match="skip_floating_point_ops"):
            plgpu.InterpretParams(skip_floating_point_ops=True, backend="emulate")
        return
    params = plgpu.InterpretParams(
        skip_floating_point_ops=True, detect_races=True, mode="reference"
    )
    a = np.ones((256, 256), np.float16)
    got = matmul_kernel(256, 256, 256, np.float16, steps=3, interpret=params)(a, a)
    assert (got == np.inf).all() and not plgpu.get_races().races_found
