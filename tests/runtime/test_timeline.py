"""Timelines of interpreted runs (InterpretParams(timeline=)): what they hold and what they cost."""

import json
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu.ops import matmul

F16, F32 = np.float16, np.float32
ROWS, DEPTH, STEP, SLOTS = 128, 512, 64, 2


def product(a, b, o, a_s, b_s, o_s, full, empty):
    """Thread 0 loads, thread 1 multiplies and waits for each product at once."""
    steps = DEPTH // STEP

    def load(k, _):
        slot = k % SLOTS

        @pl.when(k >= SLOTS)
        def _():
            plgpu.barrier_wait(empty.at[slot])  # a slot is free

        plgpu.copy_gmem_to_smem(a.at[:, pl.ds(k * STEP, STEP)], a_s.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b.at[pl.ds(k * STEP, STEP)], b_s.at[slot], full.at[slot])

    def multiply(acc):
        def step(k, _):
            slot = k % SLOTS
            plgpu.barrier_wait(full.at[slot])  # the tiles are there
            plgpu.wgmma(acc, a_s.at[slot], b_s.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[slot])

        lax.fori_loop(0, steps, step, None)
        o_s[...] = acc[...].astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, o)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        lax.fori_loop(0, steps, load, None)

    @pl.when(lax.axis_index("wg") == 1)
    def _():
        pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), F32))


def kernel(path, **fields):
    return plgpu.kernel(
        product,
        out_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), F16),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, STEP), F16),
            plgpu.SMEM((SLOTS, STEP, ROWS), F16),
            plgpu.SMEM((ROWS, ROWS), F16),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        ],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(timeline=path, **fields),
    )


@pytest.fixture
def operands(rng):
    return [rng.standard_normal(s).astype(F16) for s in ((ROWS, DEPTH), (DEPTH, ROWS))]


def slices(trace, **having):
    """(begin, end, event) of the pairs whose begin has these fields."""
    out, stacks = [], {}
    for e in trace.events:
        if e["ph"] in "Bb":
            stacks.setdefault((e["ph"].upper(), e["pid"], e["tid"], e.get("id")), []).append(e)
        elif e["ph"] in "Ee":
            key = ("B", e["pid"], e["tid"], e.get("id"))
            begin = stacks[key].pop()
            if all(begin.get(k) == v for k, v in having.items()):
                out.append((begin["ts"], e["ts"], begin))
    assert not any(stacks.values()), "every slice ends"
    return out


def test_what_it_holds(operands, tmp_path):
    """Copies, products and waits with their lines, threads by name, and the same result as ever."""
    path = tmp_path / "t.json"
    o = kernel(path)(*operands)
    np.testing.assert_array_equal(o, kernel(None)(*operands))
    trace = plgpu.read_trace(path)
    assert trace.kernel == "product" and not trace.truncated
    assert json.loads(path.read_text())["displayTimeUnit"] == "ns"
    rows = {e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    assert rows == {"thread 0", "thread 1"}
    steps = DEPTH // STEP
    assert len(slices(trace, cat="product")) == steps
    assert len(slices(trace, cat="copy in")) == 2 * steps
    assert len(slices(trace, cat="copy out")) == 1
    for begin, end, e in slices(trace):
        assert end >= begin and "test_timeline.py:" in e["args"]["at"]
    sources = {e["args"]["source"] for _, _, e in slices(trace, cat="work")}
    assert "o_s[...] = acc[...].astype(F16)" in sources


def test_time_follows_what_orders_the_agents(operands, tmp_path):
    """A product begins after its copies, a copy after the slot is free. Times do not follow
    the schedule, so the seed matters little."""
    ends = set()
    for seed in range(4):
        kernel(tmp_path / "t.json", seed=seed)(*operands)
        trace = plgpu.read_trace(tmp_path / "t.json")
        products = sorted(slices(trace, cat="product"), key=lambda x: x[0])
        loads = sorted(slices(trace, cat="copy in"), key=lambda x: x[0])
        for k, (begin, end, _) in enumerate(products):
            assert begin >= max(x[1] for x in loads[2 * k : 2 * k + 2])
            for x in loads[2 * (k + SLOTS) : 2 * (k + SLOTS) + 2]:
                assert x[0] >= end, "the slot was in use until then"
        ends.add(max(e["ts"] for e in trace.events if "ts" in e))
    assert max(ends) <= 1.02 * min(ends)


def test_costly_waits(operands, tmp_path):
    """The line that costs most comes first and names the line that it waits for."""
    kernel(tmp_path / "t.json")(*operands)
    trace = plgpu.read_trace(tmp_path / "t.json")
    costs = [(w.critical_ns, w.ns) for w in trace.waits]
    assert costs == sorted(costs, reverse=True) and costs[0][0] > 0
    assert all(w.critical_ns <= w.ns for w in trace.waits)
    by_source = {w.source.partition("  #")[0]: w for w in trace.waits}
    loaded = by_source["plgpu.barrier_wait(full.at[slot])"]
    assert loaded.what == "full" and loaded.count == DEPTH // STEP
    free = by_source["plgpu.barrier_wait(empty.at[slot])"]
    assert free.what == "empty"
    arrive = next(e for *_, e in slices(trace, cat="wait") if e["name"].endswith("empty[0]"))
    assert arrive["args"]["of"] == "thread 1" and arrive["args"]["for"] == free.awaited[0]
    first = [e for *_, e in slices(trace, cat="wait") if e["args"].get("rank") == 1]
    assert len(first) == trace.waits[0].count
    assert all(e["args"]["at"] == trace.waits[0].at for e in first)
    total = sum(e - b for b, e, x in slices(trace, cat="wait") if x["args"].get("rank") == 1)
    assert total * 1000 == pytest.approx(trace.waits[0].ns)


def test_waits_that_cost_nothing(tmp_path):
    """Thread 0 waits for thread 1 in the end; that thread 2 waits as long, for thread 0, delays
    nobody."""

    def body(x, o, slow, fast, ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            fast[...] = x[0]
            plgpu.barrier_arrive(ready.at[0])
            plgpu.barrier_wait(ready.at[1])  # critical
            o[0] = slow[...]

        @pl.when(wg == 1)
        def _():
            slow[...] = lax.fori_loop(0, 20, lambda k, v: v + x[k], x[0])
            plgpu.barrier_arrive(ready.at[1])

        @pl.when(wg == 2)
        def _():
            plgpu.barrier_wait(ready.at[0])  # not
            o[1] = fast[...]

    x = np.ones((20, 128), F32)
    plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((2, 128), F32),
        scratch_types=[plgpu.SMEM((128,), F32)] * 2 + [plgpu.Barrier(num_barriers=2)],
        num_threads=3,
        thread_name="wg",
        interpret=plgpu.InterpretParams(timeline=tmp_path / "t.json"),
    )(x)
    critical, other = plgpu.read_trace(tmp_path / "t.json").waits
    assert critical.source.endswith("# critical") and critical.critical_ns == critical.ns > 0
    assert other.source.endswith("# not") and other.critical_ns == 0 < other.ns


def test_blocks_share_the_gpu(tmp_path):
    """More blocks than multiprocessors: later ones begin where earlier ones ended."""

    def body(x, o):
        k = lax.axis_index("x")
        o[k] = x[k] * 2

    n = 200
    x = np.arange(n * 128, dtype=F32).reshape(n, 128)
    plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, F32),
        grid=(n,),
        grid_names=("x",),
        interpret=plgpu.InterpretParams(timeline=tmp_path / "t.json"),
    )(x)
    trace = plgpu.read_trace(tmp_path / "t.json")
    names = {e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
    assert len(names) == n and "grid point (199,)" in names
    begins = {}
    for begin, _, e in slices(trace):
        begins[e["pid"]] = min(begin, begins.get(e["pid"], begin))
    assert sum(t == 0 for t in begins.values()) == 132, "as many as an H100 has"
    assert sum(t > 0 for t in begins.values()) == n - 132


@pytest.mark.filterwarnings("ignore:.*is converted from layout:UserWarning")
def test_all_that_waits(tmp_path):
    """Warps, semaphores, named barriers, turns, barriers: every agent has its row, and who
    waits for a slow thread says so."""

    def body(o, sem, ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            o[1] = lax.fori_loop(0, 50, lambda k, x: x + o[0], np.float32(0))
            plgpu.semaphore_signal(sem)

        @pl.when(wg == 1)
        def _():
            plgpu.semaphore_wait(sem)

        plgpu.ext.named_barrier_sync(0, 2)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        @plgpu.warp_map
        def _(warp):
            @pl.when((warp == 0) & (wg == 0))
            def _():
                o[0] = np.float32(1)

        with plgpu.ext.ordered_section(2):
            pass

    plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((8,), F32),
        scratch_types=[plgpu.SemaphoreType.REGULAR, plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(timeline=tmp_path / "t.json", uninitialized_memory="zero"),
    )()
    trace = plgpu.read_trace(tmp_path / "t.json")
    rows = {e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    assert "thread 0, warp 0" in rows
    waits = {w.source: w for w in trace.waits}
    assert waits["plgpu.semaphore_wait(sem)"].what == "sem"
    assert waits["plgpu.semaphore_wait(sem)"].ns > 50 * 250, "the loads of thread 0"
    assert waits["plgpu.ext.named_barrier_sync(0, 2)"].ns < 50, "both come at about the same time"


def test_failed_runs(tmp_path):
    """A deadlock leaves the timeline up to it."""

    def body(o, b):
        o[...] = o[...] + 1
        plgpu.barrier_wait(b)

    stuck = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((128,), F32),
        scratch_types=[plgpu.Barrier()],
        interpret=plgpu.InterpretParams(timeline=tmp_path / "t.json"),
    )
    with pytest.raises(plgpu.DeadlockError):
        stuck()
    assert slices(plgpu.read_trace(tmp_path / "t.json"), cat="work")


def test_picture(operands, tmp_path):
    """Well-formed, one box for each slice of the block, with costly waits marked."""
    kernel(tmp_path / "t.json")(*operands)
    trace = plgpu.read_trace(tmp_path / "t.json")
    root = ET.fromstring(trace.svg(width=800))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}rect")
    assert len(boxes) == len(slices(trace))
    costly = [b for b in boxes if b.get("class") == "costly"]
    assert len(costly) == sum(w.count for w in trace.waits[:3] if w.critical_ns)
    assert all(0 <= float(b.get("x")) <= 800 for b in boxes)
    assert trace._repr_html_().startswith("<svg")
    with pytest.raises(ValueError, match="process must be one of"):
        trace.svg(process=99)


def test_ops(rng, tmp_path):
    """A ready kernel; its blocks are clusters of a grid."""
    a, b = (rng.standard_normal((256, 256)).astype(F16) for _ in range(2))
    params = plgpu.InterpretParams(timeline=tmp_path / "t.json")
    o = matmul(a, b, interpret=params)
    np.testing.assert_allclose(o, a.astype(F32) @ b.astype(F32), rtol=0.01, atol=0.1)
    trace = plgpu.read_trace(tmp_path / "t.json")
    assert slices(trace, cat="product") and slices(trace, cat="copy in") and trace.waits


@pytest.mark.parametrize("text", ["{}", "[]", '{"traceEvents": []}'])
def test_no_trace(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no trace"):
        plgpu.read_trace(tmp_path / "x.json")


def test_pictures_of_the_guide(tmp_path, monkeypatch, capsys):
    """docs/profiling.md shows what examples/timeline.py draws."""
    root = Path(__file__).parent.parent.parent
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path)])
    runpy.run_path(str(root / "examples" / "timeline.py"), run_name="__main__")
    assert "ok" in capsys.readouterr().out
    guide = (root / "docs" / "profiling.md").read_text(encoding="utf-8")
    for picture in tmp_path.iterdir():
        shown = root / "docs" / "pictures" / picture.name
        assert f"pictures/{picture.name})" in guide
        assert shown.read_text() == picture.read_text(), (
            "run python examples/timeline.py docs/pictures"
        )
