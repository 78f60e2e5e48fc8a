"""The profiler: CompilerParams(profile_space=, profile_dir=), named_scope and the traces of it."""

import collections

import numpy as np
import pytest
from test_timeline import DEPTH, ROWS, SLOTS, STEP, slices

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _profile, lax, pl
from pallas_mgpu.machine import run as host

F16, F32 = np.float16, np.float32
scope = plgpu.named_scope


def params(path, space=64, level=plgpu.TraceScope.WARPGROUP, check=False):
    return plgpu.CompilerParams(
        profile_space=space,
        profile_dir=path,
        profile_trace_scope=level,
        profile_bounds_check=check,
    )


def record(run, path, body, outs, *args, seed=0, **options):
    """(results, trace) of one call, by the way of `run`."""
    kernel = run.kernel(body, outs, **options)
    if run.way == "host":
        words = kernel.definition.params.profile_space * 4 + 4
        blocks = np.prod([*kernel.definition.mesh.grid, *kernel.definition.mesh.cluster], dtype=int)
        n = (options.get("num_threads") or 1) * blocks
        n *= 4 if options["compiler_params"].profile_trace_scope is plgpu.TraceScope.WARP else 1
        results = [np.empty(o.shape, o.dtype) for o in kernel.definition.outs]
        traces = np.empty((n, words), np.int32)
        host.run(kernel.lower(*args), args, [*results, traces], seed)
        result = kernel.definition.unflatten([*results, traces])
    else:
        result = run.call(kernel, *args)
    files = sorted(path.glob("*-trace.json"))
    assert len(files) == 1 and files[0].name.startswith(f"{kernel.name}-")
    trace = plgpu.read_trace(files[0])
    assert trace.kernel == kernel.name
    files[0].unlink()
    return result, trace


def nesting(trace):
    """{row: [names of a scope and of those around it]} in the order of their begins."""
    out, stacks = collections.defaultdict(list), collections.defaultdict(list)
    times = collections.defaultdict(float)
    rows = {e["tid"]: e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    for e in trace.events:
        if e["ph"] not in "BE":
            continue
        row = rows[e["tid"]]
        assert e["ts"] >= times[row], "time goes on"
        times[row] = e["ts"]
        if e["ph"] == "B":
            stacks[row].append(e["name"])
            out[row].append("/".join(stacks[row]))
        else:
            assert stacks[row].pop() == e["name"]
    assert not any(stacks.values())
    return out


def scoped(x, o):
    with scope("load"):
        v = x[...]
    with scope("loop"):

        @scope("step")
        def step(k, v):
            return v * 2

        v = lax.fori_loop(0, 3, step, v)

    @plgpu.warp_map
    def _(warp):
        with scope("warps"):

            @pl.when(warp == 2)
            def _():
                with scope("one"):
                    o[0, 0] = F32(3)

    with scope("store"):
        o[1] = v


SEEN = ["Init", "load", "loop", "loop/step", "loop/step", "loop/step", "warps", "store"]


def test_scopes_of_threads(run, tmp_path):
    """Scopes nest as in the body; of warps, warp 0 is seen."""
    x = np.arange(256, dtype=F32)
    out = plgpu.ShapeDtypeStruct((2, 256), F32)
    o, trace = record(run, tmp_path, scoped, out, x, compiler_params=params(tmp_path))
    np.testing.assert_array_equal(o[1], x * 8)
    assert o[0, 0] == 3
    assert nesting(trace) == {"block 0, thread 0": SEEN}


def test_scopes_of_warps(run, tmp_path):
    x = np.arange(256, dtype=F32)
    out = plgpu.ShapeDtypeStruct((2, 256), F32)
    options = params(tmp_path, level=plgpu.TraceScope.WARP)
    o, trace = record(run, tmp_path, scoped, out, x, compiler_params=options)
    np.testing.assert_array_equal(o[1], x * 8)
    found = nesting(trace)
    alone = [*SEEN[:-1], "warps/one", SEEN[-1]]
    assert found == {f"block 0, warp {w}": alone if w == 2 else SEEN for w in range(4)}


def product(a, b, o, a_s, b_s, o_s, full, empty):
    """As in test_timeline.py; copies, waits and products in scopes, some of which one lane runs."""

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        def load(k, _):
            slot = k % SLOTS

            @pl.when(k >= SLOTS)
            @scope("free")
            def _():
                plgpu.barrier_wait(empty.at[slot])

            with scope("copy"):
                at = pl.ds(k * STEP, STEP)
                plgpu.copy_gmem_to_smem(a.at[:, at], a_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[at], b_s.at[slot], full.at[slot])

        with scope("loads"):
            lax.fori_loop(0, DEPTH // STEP, load, None)

    @pl.when(lax.axis_index("wg") == 1)
    def _():
        def multiply(acc):
            def step(k, _):
                slot = k % SLOTS
                with scope("wait"):
                    plgpu.barrier_wait(full.at[slot])
                with scope("multiply"):
                    plgpu.wgmma(acc, a_s.at[slot], b_s.at[slot])
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, DEPTH // STEP, step, None)
            with scope("store"):
                o_s[...] = acc[...].astype(F16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s, o)
                plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), F32))


@pytest.mark.parametrize("level", plgpu.TraceScope)
def test_specialised_threads(run, rng, tmp_path, level):
    a, b = (rng.standard_normal(s).astype(F16) for s in ((ROWS, DEPTH), (DEPTH, ROWS)))
    o, trace = record(
        run,
        tmp_path,
        product,
        plgpu.ShapeDtypeStruct((ROWS, ROWS), F16),
        a,
        b,
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, STEP), F16),
            plgpu.SMEM((SLOTS, STEP, ROWS), F16),
            plgpu.SMEM((ROWS, ROWS), F16),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        ],
        num_threads=2,
        thread_name="wg",
        compiler_params=params(tmp_path, level=level),
    )
    np.testing.assert_allclose(o, a.astype(F32) @ b.astype(F32), rtol=0.01, atol=0.1)
    found, steps = nesting(trace), DEPTH // STEP
    loads = ["Init", "loads", *["loads/copy"] * SLOTS]
    loads += ["loads/free", "loads/copy"] * (steps - SLOTS)
    work = ["Init", *["wait", "multiply"] * steps, "store"]
    if level is plgpu.TraceScope.WARPGROUP:
        assert found == {"block 0, thread 0": loads, "block 0, thread 1": work}
    else:
        assert found == {f"block 0, warp {w}": loads if w < 4 else work for w in range(8)}


def test_blocks(run, tmp_path):
    """A row for each thread of each block; an SM for each process; batches are blocks, too."""

    def body(x, o):
        at = lax.axis_index("i"), lax.axis_index("j")
        with scope("all"):
            o[at] = x[at] + 1

    x = np.arange(6 * 128, dtype=F32).reshape(3, 2, 128)
    options = dict(grid=(3, 2), grid_names=("i", "j"), compiler_params=params(tmp_path, 8))
    o, trace = record(run, tmp_path, body, x, x, **options)
    np.testing.assert_array_equal(o, x + 1)
    assert nesting(trace) == {f"block {k}, thread 0": ["Init", "all"] for k in range(6)}
    processes = {e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
    assert processes and all(p.startswith("SM ") for p in processes)


def many(x, o):
    def step(k, v):
        with scope("outer"), scope("inner"):
            return v + 1

    o[...] = lax.fori_loop(0, 10, step, x[...])


def test_too_little_space(run, tmp_path):
    """An error that says how much is needed, or a trace of what there was space for."""
    x = np.zeros(128, F32)
    need = (4 * 10 + 2) * 2 + 3
    with pytest.raises(RuntimeError, match=rf"insufficient space.*profile_space={-(-need // 4)} "):
        record(run, tmp_path, many, x, x, compiler_params=params(tmp_path, 6))
    with pytest.warns(UserWarning, match="scopes are missing"):
        o, trace = record(
            run, tmp_path, many, x, x, compiler_params=params(tmp_path, 6, check=True)
        )
    np.testing.assert_array_equal(o, 10)
    assert trace.truncated
    # 21 words are 10 events: Init, two whole iterations, and those that were open are closed
    expected = ["Init", *["outer", "outer/inner"] * 2]
    assert nesting(trace) == {"block 0, thread 0": expected}
    _, trace = record(run, tmp_path, many, x, x, compiler_params=params(tmp_path, -(-need // 4)))
    assert len(slices(trace)) == 21 and not trace.truncated


def test_off_is_free(tmp_path):
    """Without the profiler the program is the same with scopes and without; with it, memory for the
    events is accounted for and the program compiles."""
    x = np.zeros(128, F32)

    def make(inner, **options):
        return plgpu.kernel(inner, out_type=plgpu.ShapeDtypeStruct((128,), F32), **options)

    def plain(x, o):
        o[...] = lax.fori_loop(0, 10, lambda k, v: v + 1, x[...])

    text = make(many).lower(x).as_text("cuda")
    assert "Profile" not in text and "profile_" not in text.replace("test_profile.py", "")
    strip = lambda s: [x for x in s.splitlines() if x[:5] != "#line" and " // " not in f" {x}"]  # noqa: E731
    assert strip(text.replace("many", "plain")) == strip(make(plain).lower(x).as_text("cuda"))
    on = make(many, compiler_params=params(tmp_path, 8)).lower(x)
    assert "profile_write<32>" in on.as_text("cuda")
    used = on.resources()
    assert used["smem_bytes"] == 128 and used["spill_bytes"] == used["stack_bytes"] == 0


def test_text_form(tmp_path):
    """A graph with scopes and profiler reads back as it was written."""
    kernel = plgpu.kernel(
        many, out_type=plgpu.ShapeDtypeStruct((128,), F32), compiler_params=params(tmp_path, 8)
    )
    for stage in ("traced", "graph"):
        text = kernel.lower(np.zeros(128, F32)).as_text(stage)
        assert " profile 32 0 " in text
        assert 'named_scope {format = "outer", n = 1, ends = 0}' in text
        assert _core.Graph.parse(text).text() == text
    with pytest.raises(ValueError, match="output of the profiler"):
        _core.Graph.parse(text.replace("int32[1,36]", "int32[1,35]"))


def test_shared_memory(tmp_path):
    with pytest.raises(ValueError, match=r"exceeds available shared memory(.|\n)*profile_space"):
        plgpu.kernel(
            many,
            out_type=plgpu.ShapeDtypeStruct((128,), F32),
            compiler_params=params(tmp_path, 16000),
        ).lower(np.zeros(128, F32))


def test_a_file_for_each_call(tmp_path):
    """In a directory that is made; the name has kernel and time."""
    kernel = plgpu.kernel(
        scoped,
        out_type=plgpu.ShapeDtypeStruct((2, 128), F32),
        compiler_params=params(tmp_path / "a" / "b"),
        interpret=True,
    )
    for _ in range(3):
        o = kernel(np.ones(128, F32))
        assert isinstance(o, np.ndarray)
    files = list((tmp_path / "a" / "b").iterdir())
    assert len(files) == 3 and all(f.name.startswith("scoped-") for f in files)


def test_results_keep_their_structure(tmp_path):
    def body(x, o):
        o["a"][0][...] = x[...]
        o["a"][1][...] = x[...] * 2

    leaf = plgpu.ShapeDtypeStruct((128,), F32)
    x = np.ones(128, F32)
    for out, get in (
        ({"a": (leaf, leaf)}, lambda o: o["a"][1]),
        ([{"a": (leaf, leaf)}], lambda o: o[0]["a"][1]),
    ):
        kernel = plgpu.kernel(body, out_type=out, compiler_params=params(tmp_path), interpret=True)
        np.testing.assert_array_equal(get(kernel(x)), 2)


def test_scopes_in_timelines(tmp_path):
    """Named scopes are slices around the work of a thread in a timeline, without a profiler."""
    plgpu.kernel(
        scoped,
        out_type=plgpu.ShapeDtypeStruct((2, 128), F32),
        interpret=plgpu.InterpretParams(timeline=tmp_path / "t.json"),
    )(np.ones(128, F32))
    trace = plgpu.read_trace(tmp_path / "t.json")
    names = [e["name"] for *_, e in slices(trace, cat="scope", tid=1)]
    assert sorted(names) == ["load", "loop", "step", "step", "step", "store"]
    (load,) = slices(trace, cat="scope", name="load")
    work = [s for s in slices(trace, cat="work", tid=1) if load[0] <= s[0] and s[1] <= load[1]]
    assert [e["args"]["source"] for *_, e in work] == ["v = x[...]"]


def test_clocks():
    """Cycles become nanoseconds by the global timer; both may begin anew."""

    def body(o):
        with scope("all"):
            o[...] = o[...]

    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((128,), F32), compiler_params=params("x", 4)
    )
    kernel.definition.scopes = {"Init": 0, "all": 1}
    end = 1 << 31
    clock, timer = 2**32 - 1000, 2**32 - 100
    events = [(0, 0), (0 | end, 200), (1, 400), (1 | end, 1600)]
    words = np.zeros((1, 20), np.uint32)
    words[0, :3] = timer, 7, 8
    words[0, 3:11] = [x for tag, at in events for x in (tag, (clock + at) % 2**32)]
    words[0, 16:] = clock, (timer + 1000) % 2**32, (clock + 2000) % 2**32, 1
    found, truncated = _profile.events(kernel.definition, words.view(np.int32))
    assert not truncated
    times = [(e["name"], e["ph"], e["ts"] * 1000) for e in found if e["ph"] in "BE"]
    assert times == [
        ("Init", "B", 0),
        ("Init", "E", 100),
        ("all", "B", 200),
        ("all", "E", 800),
    ]
    assert {e["pid"] for e in found} == {8}


@pytest.mark.parametrize(
    "fields, error, match",
    [
        ({"profile_space": 4}, ValueError, "go together"),
        ({"profile_dir": "x"}, ValueError, "go together"),
        ({"profile_space": -1, "profile_dir": "x"}, ValueError, "profile_space must be"),
        (
            {"profile_space": 4, "profile_dir": "x", "profile_trace_scope": "warp"},
            TypeError,
            "TraceScope",
        ),
    ],
)
def test_refused(fields, error, match):
    with pytest.raises(error, match=match):
        plgpu.CompilerParams(**fields)


def test_out(tmp_path):
    """There is no place for the traces in out=."""
    kernel = plgpu.kernel(
        many,
        out_type=plgpu.ShapeDtypeStruct((128,), F32),
        compiler_params=params(tmp_path),
        interpret=True,
    )
    with pytest.raises(TypeError, match="2 outputs"):
        kernel(np.ones(128, F32), out=np.empty(128, F32))
