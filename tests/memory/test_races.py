"""The race detector: its rules, each with a kernel that only this rule tells from a right one, and
what a user sees of it. tests/memory/test_race_scenarios.py has the catalogue."""

import re
import warnings

import numpy as np
import pytest
import races
from races import SEEDS, Agents, clean, found, look, racy

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, ops, pl
from pallas_mgpu import numpy as jnp

F16, F32, I32 = np.float16, np.float32, np.int32
N = 128
X = np.arange(N, dtype=F32)
TILE = plgpu.SMEM((N,), F32)
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
arrive, wait, commit = plgpu.barrier_arrive, plgpu.barrier_wait, plgpu.commit_smem
stored = plgpu.wait_smem_to_gmem
TWO = dict(num_threads=2, thread_name="t")
PAIR = dict(cluster=(2,), cluster_names=("c",))


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (N,), dtype)


def threads(*functions):
    Agents("threads").run(*functions)


def lowered(body, outs, *args, **options):
    """The text form of the lowered graph."""
    return plgpu.kernel(body, out_type=outs, **options).lower(*args).as_text("graph")


def look_at_graph(text, *arrays, seed=0):
    """Who races in a graph that was changed: (touch, ref, agent) of each access."""
    races = []
    _core.Graph.parse(text).interpret(list(arrays), seed=seed, races=races)
    sides = [(x[-2], x[-1]) for x in races if len(x) > 3]
    return [{(touch, ref, agent) for touch, ref, _, agent, _, _ in pair} for pair in sides]


# ---- what a user sees ----------------------------------------------------------------------------


def racing(x, o, tile, bar):
    g2s(x, tile, bar)  #: copy
    o[...] = tile[...]  #: load
    wait(bar)


def run_racing(**fields):
    params = plgpu.InterpretParams(detect_races=True, **fields)
    kernel = plgpu.kernel(
        racing, out_type=out(), scratch_types=[TILE, plgpu.Barrier()], interpret=params
    )
    return kernel(X)


@pytest.mark.parametrize("seed", range(4))
def test_raise(seed):
    with pytest.raises(plgpu.RaceError, match="RACE DETECTED on 'tile' in SMEM") as info:
        run_racing(seed=seed)
    text = str(info.value)
    assert isinstance(info.value, RuntimeError)
    first = racing.__code__.co_firstlineno
    for part in (
        "write of tile[0:128] by TMA, for thread 0",
        "read of tile[0:128] by thread 0",
        f"test_races.py:{first + 1}",
        f"test_races.py:{first + 2}",
        "wait on barrier 'bar'" if "wait on" in text else "wait for the first on barrier 'bar'",
    ):
        assert part in text, text
    assert plgpu.get_races().races_found


def test_record():
    run_racing(on_race="record")
    log = plgpu.get_races()
    assert log.races_found and len(log.races) == 1
    (race,) = log.races
    copy, load = sorted((race.first, race.second), key=lambda x: x.line)
    assert (copy.touch, copy.ref, copy.index, copy.agent) == (
        "write",
        "tile",
        "[0:128]",
        "TMA, for thread 0",
    )
    assert (load.touch, load.ref, load.index, load.agent) == ("read", "tile", "[0:128]", "thread 0")
    assert copy.file == load.file == __file__ and load.line == copy.line + 1
    assert race.space == "SMEM" and race.index == "[0:128]" and race.bytes == (0, 512)
    assert race.kind in ("read/write", "write/read") and str(race).startswith("RACE DETECTED on")
    assert race.hint in str(race)

    def right(x, o):
        o[...] = x[...]

    clean(right, out(), X)
    assert not plgpu.get_races().races_found, "of the latest run"


def test_warn():
    with pytest.warns(UserWarning, match="RACE DETECTED on 'tile'") as caught:
        run_racing(on_race="warn")
    first = racing.__code__.co_firstlineno
    assert caught[0].filename == __file__ and caught[0].lineno in (first + 1, first + 2)


def test_each_pair_of_lines_once():
    def body(o):
        def store(k):
            @pl.loop(0, 20)
            def _(i):
                o[i] = k + 1.0  #: store

        threads(lambda: store(0), lambda: store(1))

    _, races, _ = look(body, out(), **TWO)
    assert len(races) <= 2 and all(x.endswith("at store") for pair in races for x in pair)


@pytest.mark.parametrize("union", [False, True])
def test_elements_one_by_one(union):
    """Stores of one line share a record; reports name the elements that are meant, by the ref that
    they were stored through."""
    wide, half = plgpu.SMEM((512,), F32), plgpu.SMEM((256,), F32)

    def body(o, u):
        whole, (front, part) = u if union else (u, (u, u))
        at = 256 if union else 0  # where `part` begins

        def store():
            front[200] = 1.0

            @pl.loop(0, 128)
            def _(j):
                part[(j * 7) % 128] = 1.0  #: store

        def load():
            o[...] = whole[pl.ds(at + 40, 3)]  #: load

        threads(store, load)

    at = 256 if union else 0
    scratch = [plgpu.RefUnion(wide, (half, half)) if union else wide]
    for seed in SEEDS:
        _, races, _ = look(body, out(3), seed=seed, scratch_types=scratch, **TWO)
        (pair,) = races
        (stored,) = (x for x in pair if x.endswith("by thread 0 at store"))
        (loaded,) = pair - {stored}
        assert re.fullmatch(rf"read \w+\[{at + 40}:{at + 43}\] by thread 1 at load", loaded), pair
        assert re.match(r"write \w+\[(4[012]|4[01]:4[23])\] ", stored), pair


def test_modes():
    """Notes are given in mode "strict" alone."""

    def body(o, tile):
        tile[3] = 1.0
        commit()
        s2g(tile, o)

    for mode, notes in (("strict", 1), ("reference", 0)):
        params = plgpu.InterpretParams(detect_races=True, mode=mode)
        kernel = plgpu.kernel(body, out_type=out(), scratch_types=[TILE], interpret=params)
        if notes:
            with pytest.warns(UserWarning, match="^not portable to JAX: its thread ends"):
                kernel()
        else:
            kernel()
        assert len(plgpu.get_races().notes) == notes


def test_kernels_of_ops_give_no_notes(rng):
    """Blocks that copy odd rows overlap, and write the same bytes twice."""
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((100, 50), (50, 30)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ops.matmul(a, b, interpret=plgpu.InterpretParams(detect_races=True))
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
    assert not plgpu.get_races().races_found


def test_nothing_ran(tmp_path):
    import subprocess
    import sys

    code = "import pallas_mgpu as p\ntry: p.get_races()\nexcept RuntimeError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no kernel ran with" in done.stdout


def test_another_error_stays():
    """What ends the run is raised, and the races found before are kept."""

    def body(x, o, tile, bar):
        g2s(x, tile, bar)  #: copy
        o[...] = tile[...]  #: load
        wait(bar)
        wait(bar)

    for seed in range(4):
        with pytest.raises(plgpu.DeadlockError):
            look(body, out(), X, seed=seed, scratch_types=[TILE, plgpu.Barrier()])
        assert len(found()) == 1


def test_off():
    """Without it a race is a matter of luck, and the log is not touched."""
    before = plgpu.get_races() if plgpu._races._latest else None
    kernel = plgpu.kernel(
        racing, out_type=out(), scratch_types=[TILE, plgpu.Barrier()], interpret=True
    )
    kernel(X)
    assert plgpu._races._latest is before


# ---- the rules -----------------------------------------------------------------------------------


def test_a_phases_do_not_mix():
    """Thread 0 arrives for the second phase while thread 2 is still to wait for the first: who
    waits for a phase does not learn what came with the next one."""

    def body(o, tile, bar, go):
        def first():
            arrive(bar)
            wait(bar)
            tile[3] = 1.0  #: store
            arrive(bar)
            wait(bar)

        def second():
            arrive(bar)
            wait(bar)
            wait(go)
            arrive(bar)
            wait(bar)

        def third():
            for k in range(20):  # let the others run
                o[k] = 0.0
            wait(bar)
            o[0] = tile[3]  #: load
            arrive(go)
            wait(bar)
            o[1] = tile[3]

        threads(first, second, third)

    scratch = [TILE, plgpu.Barrier(num_arrivals=2), plgpu.Barrier()]
    pair = "write tile[3] by thread 0 at store", "read tile[3] by thread 2 at load"
    call = dict(scratch_types=scratch, num_threads=3, thread_name="t")
    racy([pair], body, out(), seeds=range(16), **call)


def test_b_bytes_order_their_waiters_alone():
    """The thread that issued a copy knows nothing of its end, nor does whom it tells."""

    def body(x, o, tile, loaded, told):
        def first():
            g2s(x, tile, loaded)  #: copy
            arrive(told)

        def second():
            wait(told)
            o[0] = tile[3]  #: load
            wait(loaded)
            o[1] = tile[3]

        threads(first, second)

    scratch = [TILE, plgpu.Barrier(), plgpu.Barrier()]
    pair = "write tile[0:128] by TMA, for thread 0 at copy", "read tile[3] by thread 1 at load"
    racy([pair], body, out(), X, scratch_types=scratch, **TWO)


def test_c_global_memory():
    """A plain store before a copy of the same thread needs no commit_smem. That of another thread
    needs order."""

    def body(o, p, tile, loaded, done):
        def first():
            o[3] = 1.0  #: store
            arrive(done)

        def second():
            if ordered:
                wait(done)
            g2s(o, tile, loaded)  #: copy
            wait(loaded)
            if not ordered:
                wait(done)
            p[0] = tile[3]

        if alone:
            o[3] = 1.0
            g2s(o, tile, loaded)
            wait(loaded)
            p[0] = tile[3]
            arrive(done)
        else:
            threads(first, second)

    call = dict(scratch_types=[TILE, plgpu.Barrier(), plgpu.Barrier()])
    alone = True
    assert clean(body, (out(), out()), **call)[1][0] == 1
    alone, ordered = False, True
    assert clean(body, (out(), out()), **call, **TWO)[1][0] == 1
    ordered = False
    pair = "write o[3] by thread 0 at store", "read o[0:128] by TMA, for thread 1 at copy"
    racy([pair], body, (out(), out()), **call, **TWO)


@pytest.mark.parametrize("source_alone", [False, True])
def test_d_wait_for_the_source(source_alone):
    def body(o, p, tile):
        tile[3] = 1.0
        commit()
        s2g(tile, o)  #: copy
        stored(0, wait_read_only=source_alone)
        tile[3] = 2.0
        p[0] = o[3]  #: load
        stored(0)

    if source_alone:
        pair = "write o[0:128] by TMA, for thread 0 at copy", "read o[3] by thread 0 at load"
        racy([pair], body, (out(), out()), scratch_types=[TILE])
    else:
        clean(body, (out(), out()), scratch_types=[TILE])


SQUARE = plgpu.SMEM(
    (64, 64), F16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
)
M = np.eye(64, dtype=F16)


def products(then, commits=True, registers=False):
    """Two products, a @ b and then c @ b, and what `then` does."""

    def body(x, o, a, b, c, acc):
        for s in (a, b, c):
            s[...] = x[...]  #: fill
        if commits:
            commit()
        left = plgpu.load(a, layout=plgpu.Layout.WGMMA) if registers else a
        plgpu.wgmma(acc, left, b)  #: first
        plgpu.wgmma(acc, c, b)  #: second
        then(a, b, c, acc)
        plgpu.wgmma_wait(0)
        o[...] = acc[...]

    return body, dict(scratch_types=[SQUARE, SQUARE, SQUARE, plgpu.ACC((64, 64))])


READ = "read {}[0:64, 0:64] by the tensor core, for thread 0 at {}"


def test_e_products_read_until_they_are_awaited():
    """They complete in order: wait(1) frees what the first one alone reads."""

    def freed(a, b, c, acc):
        plgpu.wgmma_wait(1)
        a[...] = jnp.zeros((64, 64), F16)

    def too_early(a, b, c, acc):
        plgpu.wgmma_wait(1)
        c[...] = jnp.zeros((64, 64), F16)  #: store

    def shared(a, b, c, acc):
        plgpu.wgmma_wait(1)
        b[...] = jnp.zeros((64, 64), F16)  #: store

    body, call = products(freed)
    np.testing.assert_array_equal(clean(body, out(64, 64), M, **call), 2 * M)
    store = "write {}[0:64, 0:64] by thread 0 at store"
    body, call = products(too_early)
    racy([(READ.format("c", "second"), store.format("c"))], body, out(64, 64), M, **call)
    body, call = products(shared)
    racy([(READ.format("b", "second"), store.format("b"))], body, out(64, 64), M, **call)


def test_e_products_need_a_commit():
    body, call = products(lambda *refs: None, commits=False)
    fill = "write {}[0:64, 0:64] by thread 0 at fill"
    pairs = [(READ.format(r, n), fill.format(r)) for r, n in (("a", "first"), ("c", "second"))]
    pairs += [(READ.format("b", n), fill.format("b")) for n in ("first", "second")]
    racy(pairs, body, out(64, 64), M, **call)


def test_e_registers_and_accumulators():
    """A in registers is what it was when the product was issued; an accumulator is not used before
    its products are awaited: always an error."""

    def changed(a, b, c, acc):
        a[...] = jnp.zeros((64, 64), F16)

    body, call = products(changed, registers=True)
    np.testing.assert_array_equal(clean(body, out(64, 64), M, **call), 2 * M)

    def read(a, b, c, acc):
        plgpu.wgmma_accumulator_load(acc, wait_n=1)

    body, call = products(read)
    with pytest.raises(ValueError, match="'acc' is read while the wgmma.*may still write"):
        look(body, out(64, 64), M, **call)


@pytest.mark.parametrize("judge", ["interpret", "emulate"])
@pytest.mark.parametrize("registers", [False, True])
def test_e_products_in_flight_at_the_end_of_an_iteration(registers, judge, monkeypatch):
    """The compiler waits for those with A in registers."""
    monkeypatch.setattr(races, "judge", judge)

    def body(x, o, a, b):
        def accumulate(acc):
            @pl.loop(0, 3)
            def _(k):
                b[...] = x[...]  #: store
                commit()
                plgpu.wgmma(acc, x[...] if registers else a, b)  #: product

            return acc[...]

        a[...] = x[...]
        o[...] = pl.run_scoped(accumulate, plgpu.ACC((64, 64)))

    call = dict(scratch_types=[plgpu.SMEM((64, 64), F16)] * 2)
    if registers:
        want = 3 * M.astype(np.float32) @ M.astype(np.float32)
        np.testing.assert_array_equal(clean(body, out(64, 64), M, **call), want)
    else:
        pair = "read b[0:64, 0:64] by the tensor core, for thread 0 at product"
        racy([("write b[0:64, 0:64] by thread 0 at store", pair)], body, out(64, 64), M, **call)


def exchange(x, o, tile, bar):
    """Block 0 stores to the tile of block 1, which waits for it."""
    c = lax.axis_index("c")
    tile[...] = x[...]
    arrive(bar)
    wait(bar)

    @pl.when(c == 0)
    def _():
        plgpu.cluster_ref(tile, {"c": 1})[3] = 7.0

    arrive(bar)
    wait(bar)
    o[c] = tile[...]


def test_f_relaxed_arrivals():
    """Made relaxed, they do not order plain stores of other blocks."""
    scratch = dict(scratch_types=[TILE, plgpu.ClusterBarrier(collective_axes=("c",))], **PAIR)
    assert clean(exchange, out(2, N), X, **scratch)[1, 3] == 7
    text = lowered(exchange, out(2, N), X, **scratch)
    assert text.count("memory_order = release") == 2
    for seed in range(4):
        assert not look_at_graph(text, X, np.empty((2, N), F32), seed=seed)
        weaker = re.sub(r"(memory_order) = release", r"\1 = relaxed", text)
        assert weaker.count("= relaxed") == 2
        races = look_at_graph(weaker, X, np.empty((2, N), F32), seed=seed)
        block_0, block_1 = "block (0,), thread 0", "block (1,), thread 0"
        assert {("write", "tile", block_0), ("read", "tile", block_1)} in races
        assert {("write", "tile", block_1), ("write", "tile", block_0)} in races


def test_f_relaxed_arrivals_order_engines():
    """Slots that multicast copies fill and products read are released so."""

    def body(x, o, a, b, acc, full, free):
        for k in range(3):
            if k:
                wait(free)
            g2s(x, a, full, collective_axes="c")
            g2s(x, b, full, collective_axes="c")
            wait(full)
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            arrive(free)
        wait(free)
        o[lax.axis_index("c")] = acc[...]

    scratch = [SQUARE, SQUARE, plgpu.ACC((64, 64)), plgpu.Barrier(num_arrivals=2)]
    scratch += [plgpu.ClusterBarrier(collective_axes=("c",))]
    call = dict(scratch_types=scratch, **PAIR)
    assert "memory_order = relaxed" in lowered(body, out(2, 64, 64), M, **call)
    np.testing.assert_array_equal(clean(body, out(2, 64, 64), M, **call)[1], 3 * M)


def sending(x, o, p, tile, bar, done, *, extra):
    """Block 0 sends its tile to block 1, and has stored to `p` before."""
    c = lax.axis_index("c")

    @pl.when(c == 0)
    def _():
        p[5] = 1.0  #: store
        plgpu.async_store_smem(x[...], tile, bar, cluster_idx=1, cluster_dim="c")

    @pl.when(c == 1)
    def _():
        wait(bar)
        o[0] = tile[3]
        if extra:
            o[1] = p[5]  #: load

    arrive(done)
    wait(done)


@pytest.mark.parametrize("extra", [False, True])
def test_g_a_narrow_signal_orders_nothing_outside(extra):
    """The arrival of an async_store_smem has the scope of its own block: the other block gets the
    data, and learns of nothing else."""
    scratch = [TILE, plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]

    def body(x, o, p, tile, bar, done):
        sending(x, o, p, tile, bar, done, extra=extra)

    call = dict(scratch_types=scratch, **PAIR)
    if not extra:
        clean(body, (out(), out()), X, **call)
        return
    pair = (
        "write p[5] by block (0,), thread 0 at store",
        "read p[5] by block (1,), thread 0 at load",
    )
    racy([pair], body, (out(), out()), X, **call)


def test_g_a_narrow_signal_orders_its_own_block():
    """One thread reads what TMA wrote and sends something to its own block; another one, which got
    that, may have it written again."""
    done = plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=2)
    scratch = [TILE, TILE, *[plgpu.Barrier()] * 3, done]

    def body(x, o, tile, inbox, full, again, sent, done):
        t, c = lax.axis_index("t"), lax.axis_index("c")

        @pl.when(t == 0)
        def _():
            wait(full)
            plgpu.async_store_smem(tile[...] + 1, inbox, sent, cluster_idx=c, cluster_dim="c")

        @pl.when(t == 1)
        def _():
            g2s(x, tile, full)
            wait(sent)
            g2s(x, tile, again)
            wait(again)
            o[c] = tile[...] + inbox[...]

        arrive(done)
        wait(done)

    call = dict(scratch_types=scratch, **TWO, **PAIR)
    np.testing.assert_array_equal(clean(body, out(2, N), X, **call), [2 * X + 1] * 2)


def test_h_each_operation_is_its_own():
    """Eleven copies of one thread: to wait for ten of them does not order the last one."""
    n = 11

    def body(x, o, tiles, bars):
        for k in range(n):
            g2s(x, tiles.at[k], bars.at[k])  #: copy
        for k in range(n - 1):
            wait(bars.at[k])
        o[0] = tiles[n - 2, 3]
        o[1] = tiles[n - 1, 3]  #: load
        wait(bars.at[n - 1])

    pair = "write tiles[10, 0:128] by TMA, for thread 0 at copy"
    pair = pair, "read tiles[10, 3] by thread 0 at load"
    scratch = [plgpu.SMEM((n, N), F32), plgpu.Barrier(num_barriers=n)]
    racy([pair], body, out(), X, scratch_types=scratch)


def refilled(x, o, tile, full, free):
    def producer():
        g2s(x.at[0], tile, full)
        wait(free)
        g2s(x.at[1], tile, full)

    def consumer():
        for k in range(2):
            wait(full)
            o[k] = tile[...]
            if k == 0:
                arrive(free)

    threads(producer, consumer)


def test_i_read_then_refill():
    """A load, an arrival, a wait, and a copy over what was loaded: the generator puts a fence
    after the load. Without it the load may be late."""
    x = np.stack([X, -X])
    call = dict(scratch_types=[TILE, plgpu.Barrier(), plgpu.Barrier()], **TWO)
    np.testing.assert_array_equal(clean(refilled, out(2, N), x, **call), x)
    text = lowered(refilled, out(2, N), x, **call)
    without = re.sub(r"(?m)^\s*proxy_fence.*\n", "", text)
    without = re.sub(r"commit_smem \{placed = 1\}", "sync", without)
    assert without != text
    for seed in range(4):
        assert not look_at_graph(text, x, np.empty((2, N), F32), seed=seed)
        races = look_at_graph(without, x, np.empty((2, N), F32), seed=seed)
        assert races == [{("read", "tile", "thread 1"), ("write", "tile", "TMA, for thread 0")}]


def test_i_warps_refill_what_their_thread_read():
    """All lanes loaded, one warp copies: the fence stands in front of the map."""

    def body(x, o, tile, bar):
        for k in range(2):
            plgpu.warp_map(lambda w, k=k: pl.when(w == 3)(lambda: g2s(x.at[k], tile, bar) and None))
            wait(bar)
            o[k] = tile[...]

    x = np.stack([X, -X])
    np.testing.assert_array_equal(
        clean(body, out(2, N), x, scratch_types=[TILE, plgpu.Barrier()]), x
    )


def test_i_threads_refill_what_their_warps_read():
    """After the map a fence of the thread is one of all its warps."""

    def body(x, o, tile, bar):
        for k in range(2):
            g2s(x.at[k], tile, bar)
            wait(bar)
            plgpu.warp_map(lambda w, k=k: o.set(tile[w], (k, w)))

    x = np.stack([X, -X])
    got = clean(body, out(2, N), x, scratch_types=[TILE, plgpu.Barrier()])
    np.testing.assert_array_equal(got[:, :4], x[:, :4])


# ---- other things that order ---------------------------------------------------------------------

REGULAR = plgpu.SemaphoreType.REGULAR


@pytest.mark.parametrize("signals", [True, False])
def test_semaphores_of_the_launch(signals):
    def body(o, p):
        sem = pl.get_global(REGULAR((4,)))
        i = lax.axis_index("i")
        o[i] = (i + 1).astype(F32)  #: store
        if signals:
            plgpu.semaphore_signal(sem.at[i])
            plgpu.semaphore_wait(sem.at[(i + 1) % 4])
        p[i] = o[(i + 1) % 4]  #: load

    call = dict(grid=(4,), grid_names=("i",))
    if signals:
        clean(body, (out(), out()), **call)
        return
    _, races, _ = look(body, (out(), out()), **call)
    assert races
    for pair in races:
        assert re.search(r"o\[(\d)\] by grid point \(\1,\), thread 0 at store", " ".join(pair))


def test_a_semaphore_orders_no_more_than_it_needs():
    """Two threads signal, the third waits for one of them: it cannot rely on the other."""

    def body(o, p, sem):
        def store(k):
            o[k] = 1.0  #: store
            pl.semaphore_signal(sem)

        def load():
            pl.semaphore_wait(sem, 1)
            p[0] = o[0] + o[1]  #: load
            pl.semaphore_wait(sem, 1)

        threads(lambda: store(0), lambda: store(1), load)

    for seed in range(8):
        _, races, _ = look(
            body, (out(), out()), seed=seed, scratch_types=[REGULAR], num_threads=3, thread_name="t"
        )
        assert len(races) == 1 and {x.split(" at ")[1] for x in races[0]} == {"store", "load"}


def test_a_reduction_in_order_of_the_grid():
    """Split K: each part waits for its turn to add."""

    def body(x, o):
        sem = pl.get_global(REGULAR)
        i = lax.axis_index("i")
        plgpu.semaphore_wait(sem, i, decrement=False)
        old = jnp.where(i == 0, jnp.zeros((N,)), o[...])
        o[...] = old + x[...]
        plgpu.semaphore_signal(sem)

    got = clean(body, out(), X, grid=(5,), grid_names=("i",))
    np.testing.assert_array_equal(got, 5 * X)


@pytest.mark.parametrize("how", ["sync", "arrive", "none"])
def test_named_barriers(how):
    meet, come = plgpu.ext.named_barrier_sync, plgpu.ext.named_barrier_arrive

    def body(o, tile):
        def first():
            tile[3] = 1.0  #: store
            if how != "none":
                (meet if how == "sync" else come)(0, num_threads=2)

        def second():
            if how != "none":
                meet(0, num_threads=2)
            o[0] = tile[3]  #: load

        threads(first, second)

    if how == "none":
        pair = "write tile[3] by thread 0 at store", "read tile[3] by thread 1 at load"
        racy([pair], body, out(), scratch_types=[TILE], **TWO)
    else:
        assert clean(body, out(), scratch_types=[TILE], **TWO)[0] == 1


def test_turns():
    def in_turns(o, count):
        me = lax.axis_index("t")
        for k in range(3):
            with plgpu.ext.ordered_section(2):
                if k == 0:
                    pl.when(me == 0)(lambda: count.set(jnp.int32(0), 0))
                else:
                    count[0] = count[0] + 1
                    o[2 * k + me] = count[0]

    def at_once(o, count):
        count[0] = count[0] + 1  #: add

    scratch = dict(scratch_types=[plgpu.SMEM((2,), I32)], **TWO)
    got = clean(in_turns, out(8, dtype=I32), **scratch)
    assert list(got[2:6]) == [1, 2, 3, 4]
    _, races, _ = look(at_once, out(8, dtype=I32), **scratch)
    assert races and all("count[0]" in x for pair in races for x in pair)


def test_scopes_that_all_threads_enter():
    """A scope that threads enter together orders what came before; memory that comes again under
    another name is the same memory."""

    def body(o, tile):
        t = lax.axis_index("t")
        tile[t] = 1.0

        def inner(s):
            s[t] = tile[1 - t] + 1.0

            def again(u):
                u[t] = s[1 - t]
                o[t] = u[t]

            pl.run_scoped(again, TILE, collective_axes="t")

        pl.run_scoped(inner, TILE, collective_axes="t")

    assert list(clean(body, out(), scratch_types=[TILE], **TWO)[:2]) == [2, 2]


def test_unions():
    """Members of a union share bytes, and are named each by its own."""

    def body(x, o, union, bar):
        first, second = union
        g2s(x, first, bar)  #: copy
        second[100] = 5.0  #: store
        wait(bar)
        o[0] = first[3]

    union = plgpu.RefUnion(TILE, plgpu.SMEM((2 * N,), F32))
    _, races, _ = look(body, out(), X, scratch_types=[union, plgpu.Barrier()])
    ((race,),) = (plgpu.get_races().races,)
    names = {race.first.index, race.second.index}
    assert names == {"[0:128]", "[100]"} and len(races) == 1


def test_warps_of_a_map():
    """A map begins after what its thread did, and ends before what it does next."""

    def body(o, tile):
        tile[0] = 1.0

        def each(w):
            tile[w + 1] = tile[0] + w.astype(F32)

        plgpu.warp_map(each)
        for k in range(4):
            o[k] = tile[k + 1]

    assert list(clean(body, out(), scratch_types=[TILE])[:4]) == [1, 2, 3, 4]


def test_tests_of_barriers_order():
    def body(x, o, tile, bar):
        g2s(x, tile, bar)
        lax.while_loop(
            lambda done: ~done, lambda done: plgpu.barrier_test(bar), plgpu.barrier_test(bar)
        )
        o[...] = tile[...]

    np.testing.assert_array_equal(clean(body, out(), X, scratch_types=[TILE, plgpu.Barrier()]), X)


# ---- kinds of accesses ---------------------------------------------------------------------------


def test_atomics():
    """They do not race among themselves; with a plain access they do."""

    def body(o, p):
        plgpu.atomic_add(o.at[3], 1.0)  #: add
        if reads:
            p[lax.axis_index("t")] = o[3]  #: load

    reads = False
    outs = out(), out()
    clean(body, outs, **TWO)
    reads = True
    _, races, _ = look(body, outs, **TWO)
    assert races
    for pair in races:
        assert {x.split(" by ")[0] for x in pair} == {"atomic o[3]", "read o[3]"}


def test_a_read_does_not_stand_for_an_atomic():
    """What is ordered after the read of thread 1 is not, for a third thread."""

    def body(o, p, bar):
        def first():
            plgpu.atomic_add(o.at[3], 1.0)  #: add
            commit()
            arrive(bar)

        def second():
            wait(bar)
            p[1] = o[3]

        def third():
            p[2] = o[3]  #: load

        threads(first, second, third)

    pair = "atomic o[3] by thread 0 at add", "read o[3] by thread 2 at load"
    call = dict(scratch_types=[plgpu.Barrier()], num_threads=3, thread_name="t")
    racy([pair], body, (out(), out()), seeds=range(16), **call)


def test_copies_that_combine():
    """Reductions by copies are atomic, too."""

    def body(x, o, tile):
        o_row = o.at[0]
        tile[...] = x[...]
        commit()
        s2g(tile, o_row, reduction_op="add")
        stored(0)

    clean(body, out(1, N), X, scratch_types=[TILE], **PAIR)


@pytest.mark.parametrize("apart", [True, False])
def test_masked_and_indexed(apart):
    """Elements that the mask leaves out are not touched; of those by index the ones that are."""

    def masked(x, o):
        t = lax.axis_index("t")
        i = plgpu.broadcasted_iota(I32, (N,), 0)
        mine = (i % 2 == t) if apart else (i % 2 == t) | (i == 6)
        plgpu.store(o, x[...], mask=mine)  #: store

    def indexed(x, o):
        t = lax.axis_index("t")
        i = plgpu.broadcasted_iota(I32, (64,), 0)
        o[i * 2 + (t if apart else 0)] = x[:64]  #: store

    for kernel, where in ((masked, "[6]"), (indexed, "[0]")):
        if apart:
            clean(kernel, out(), X, **TWO)
            continue
        _, races, _ = look(kernel, out(), X, **TWO)
        assert len(races) == 1 and all(x.endswith("at store") for x in races[0])
        assert plgpu.get_races().races[0].index == where


def test_slices_and_transposes():
    """Columns of one ref by two threads are apart, also where a view is transposed."""

    def body(x, o, tile):
        t = lax.axis_index("t")
        half = tile.T.at[pl.ds(t * 32, 32)]  # 32 columns
        half[...] = jnp.full((32, 64), t.astype(F32) + 1)
        o[t] = half[3, 5]

    scratch = dict(scratch_types=[plgpu.SMEM((64, 64), F32)], **TWO)
    assert list(clean(body, out(), X, **scratch)[:2]) == [1, 2]

    def overlapping(x, o, tile):
        t = lax.axis_index("t")
        tile[:, pl.ds(t * 31, 32)] = jnp.full((64, 32), t.astype(F32))  #: store

    racy(
        [[f"write tile[0:64, {k * 31}:{k * 31 + 32}] by thread {k} at store" for k in range(2)]],
        overlapping,
        out(),
        X,
        **scratch,
    )
    assert plgpu.get_races().races[0].index == "[0, 31]"


def test_overhanging_copies():
    """A copy touches what is inside alone."""

    def body(x, o, tile, bar):
        part = pl.ds(64 + lax.axis_index("i"), N)
        g2s(x.at[part], tile, bar)
        wait(bar)
        commit()
        s2g(tile, o.at[part])
        o[63] = 1.0
        o[0] = 1.0
        stored(0)

    x = np.arange(100, dtype=F32)
    call = dict(scratch_types=[TILE, plgpu.Barrier()], grid=(1,), grid_names=("i",))
    assert clean(body, out(100), x, **call)[70] == 70


def test_inline():
    """What the function changes is written, a ref that it leaves alone is read."""

    def stores(ref, k):
        ref[int(k)] = 5

    put = plgpu.inline_cuda(
        "", arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), interpret=stores
    )
    get = plgpu.inline_cuda(
        "",
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), F32, plgpu.Layout.WG_SPLAT),
        interpret=lambda ref: ref[3],
    )

    def body(o, tile, bar):
        t = lax.axis_index("t")
        put(tile, t)  #: put
        arrive(bar)
        wait(bar)
        o[t] = get(tile)
        if late:
            pl.when(t == 0)(lambda: put(tile, jnp.int32(3)) and None)  #: late

    call = dict(scratch_types=[TILE, plgpu.Barrier(num_arrivals=2)], **TWO)
    late = False
    clean(body, out(), **call)
    late = True
    _, races, _ = look(body, out(), **call)
    assert len(races) == 1 and any("write tile[3] by thread 0 at late" in x for x in races[0])


# ---- points of the grid --------------------------------------------------------------------------


def test_points_of_the_grid_are_not_ordered():
    """Though they run one after the other here. Equal bytes make no difference; JAX minds."""

    def body(o):
        i = lax.axis_index("i")
        o[i // 2] = jnp.where(same, 1, i).astype(F32)  #: store

    call = dict(grid=(2,), grid_names=("i",))
    same = False
    pair = [f"write o[0] by grid point ({k},), thread 0 at store" for k in range(2)]
    racy([pair], body, out(), **call)
    same = True
    clean(body, out(), notes=[("both write the same bytes", "store")], **call)


def test_points_far_apart():
    """A read of what a point wrote long before."""

    def body(x, o, p):
        i = lax.axis_index("i")
        o[i] = x[i]  #: store
        p[i] = o[0]  #: load

    _, races, _ = look(body, (out(), out()), X, grid=(N,), grid_names=("i",))
    assert len(races) == 1  # each pair of lines once
    assert "write o[0] by grid point (0,), thread 0 at store" in races[0]
    assert any("read o[0] by grid point (1,)" in x for x in races[0])


# ---- always --------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_copy_over_operands_of_a_product_in_flight(waits):
    """An error of its own, with or without the race detector."""

    def body(x, o, a, b, acc, bar):
        for s in (a, b):
            g2s(x, s, bar)
            wait(bar)
        plgpu.wgmma(acc, a, b)  #: product
        if waits:
            plgpu.wgmma_wait(0)
        g2s(x, a, bar)
        wait(bar)
        plgpu.wgmma_wait(0)
        o[...] = acc[...]

    scratch = [SQUARE, SQUARE, plgpu.ACC((64, 64)), plgpu.Barrier()]
    for params in (True, plgpu.InterpretParams(seed=3), plgpu.InterpretParams(detect_races=True)):
        kernel = plgpu.kernel(body, out_type=out(64, 64), scratch_types=scratch, interpret=params)
        if waits:
            np.testing.assert_array_equal(kernel(M), M)
            continue
        with pytest.raises(
            ValueError, match=r"overwrites 'a' while the wgmma at .*of thread 0 may"
        ):
            kernel(M)


def test_columns_beside_the_operands():
    """Another part of the same rows may be filled meanwhile."""

    def body(x, o, a, acc, bar):
        left, right = a.at[:, :64], a.at[:, 64:]
        g2s(x, left, bar)
        wait(bar)
        plgpu.wgmma(acc, left, left)
        g2s(x, right, bar)
        wait(bar)
        plgpu.wgmma(acc, right, right)
        o[...] = acc[...]

    scratch = [
        plgpu.SMEM((64, 128), F16, transforms=SQUARE.transforms),
        plgpu.ACC((64, 64)),
        plgpu.Barrier(),
    ]
    np.testing.assert_array_equal(clean(body, out(64, 64), M, scratch_types=scratch), 2 * M)


@pytest.mark.parametrize("columns", [64, N])
def test_a_broken_promise(columns):
    """TMA clips a tensor copy, which strict mode says; of whole rows it would read other memory."""

    def body(x, i, o, tile, bar):
        part = x.at[pl.ds(i[0], 16), pl.ds(0, columns)]
        g2s(part, tile, bar, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)  #: promised
        wait(bar)
        o[...] = tile[...]

    scratch = [plgpu.SMEM((16, columns), F32), plgpu.Barrier()]
    args = np.ones((64, N), F32), np.array([56], I32)
    call = dict(scratch_types=scratch, outs=out(16, columns))
    if columns == N:
        with pytest.raises(IndexError, match="promised in bounds"):
            clean(body, call.pop("outs"), *args, **call)
        return
    outs, note = call.pop("outs"), ("promised in bounds and is not", "promised")
    got = clean(body, outs, *args, notes=[note], **call)
    np.testing.assert_array_equal(got[:, 0], [1] * 8 + [0] * 8)


# ---- kernels that overlap ------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_kernels_that_were_launched_earlier(told):
    """Before griddepcontrol_wait() they may still write. Who is told by a thread that has waited
    needs no wait of its own."""

    def body(x, y, o, tile, bar, started):
        def first():
            tile[...] = x[...]  #: load
            commit()
            s2g(tile, o.at[0])  #: store
            stored(0)
            plgpu.griddepcontrol_wait()
            g2s(y, tile, bar)
            wait(bar)
            arrive(started)

        def second():
            if told:
                wait(started)
            o[1] = y[...]  #: other

        threads(first, second)

    scratch = [TILE, plgpu.Barrier(), plgpu.Barrier()]
    _, races, _ = look(body, out(2, N), X, X, scratch_types=scratch, **TWO)
    early = "write {} by kernels that were launched earlier"
    refs = ["x[0:128]", "o[0, 0:128]"] + ([] if told else ["y[0:128]", "o[1, 0:128]"])
    sides = {
        "x[0:128]": "read x[0:128] by thread 0 at load",
        "o[0, 0:128]": "write o[0, 0:128] by TMA, for thread 0 at store",
        "y[0:128]": "read y[0:128] by thread 1 at other",
        "o[1, 0:128]": "write o[1, 0:128] by thread 1 at other",
    }
    assert {frozenset(x) for x in races} == {frozenset((early.format(r), sides[r])) for r in refs}
    _, races, _ = look(lambda x, o: o.set(x[...]), out(), X)
    assert not races  # without the call the kernels before are done
