"""Several schedules of one kernel: `InterpretParams(seeds=)` and `plgpu.testing.check`."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp

F32, I32 = np.float32, np.int32
N = 64
X = np.arange(N, dtype=F32)
TWO = dict(num_threads=2, thread_name="t")


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (N,), dtype)


def doubled(x, o):
    o[...] = x[...] * 2


def first_come(o, count):
    """What each thread finds depends on who comes first; nothing races."""
    t = lax.axis_index("t")
    bar = lambda: plgpu.ext.named_barrier_sync(0, num_threads=2)  # noqa: E731
    pl.when(t == 0)(lambda: count.set(jnp.int32(0), 0))
    bar()
    o[t] = plgpu.atomic_add(count, 0, 1)


def kernel(body, outs=None, **options):
    return plgpu.kernel(body, out_type=out() if outs is None else outs, **options)


def depends(**params):
    return kernel(
        first_come,
        out(2, dtype=I32),
        scratch_types=[plgpu.SMEM((1,), I32)],
        interpret=plgpu.InterpretParams(**params) if params else None,
        **TWO,
    )


# ---- InterpretParams(seeds=) ---------------------------------------------------------------------


def test_seeds_compare():
    with pytest.raises(plgpu.ScheduleError) as info:
        depends(seeds=16)()
    text = str(info.value)
    found = re.search(
        r"o differs in 2 of 2 elements between seeds 0 and (\d+), the first at \[0\]:"
        r" (\d) and (\d)",
        text,
    )
    assert found and isinstance(info.value, RuntimeError)
    seed, a, b = map(int, found.groups())
    assert depends(seed=0)()[0] == a and depends(seed=seed)()[0] == b


def test_seeds_give_the_result_of_the_first(capsys):
    def body(x, o):
        pl.debug_print("once")
        o[...] = o[...] + x[...]

    params = plgpu.InterpretParams(seeds=5, seed=3)
    given = X.copy()
    kernel(body, interpret=params)(X, out=given)
    np.testing.assert_array_equal(given, 2 * X)  # each run began with what was there
    assert capsys.readouterr().out == "once\n"
    aliased = pl.pallas_call(
        body, out_shape=out(), input_output_aliases={}, interpret=plgpu.InterpretParams(seeds=3)
    )
    assert aliased(X).shape == (N,)


def test_seeds_find_what_the_first_does_not():
    """A wait that is missing, which seed 0 happens to survive."""

    def body(x, o, tile, bar):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            tile[...] = x[...]

        @pl.when(lax.axis_index("t") == 1)
        def _():
            o[0] = jnp.float32(0)
            o[...] = tile[...]

    scratch = dict(scratch_types=[plgpu.SMEM((N,), F32), plgpu.Barrier()], **TWO)

    def run(**params):
        return kernel(body, interpret=plgpu.InterpretParams(**params), **scratch)(X)

    lucky = next(s for s in range(99) if np.array_equal(run(seed=s), X))
    with pytest.raises(plgpu.ScheduleError, match=f"seeds {lucky} and"):
        run(seed=lucky, seeds=32)


def test_an_error_names_its_seed():
    def body(o, count, bar):
        t = lax.axis_index("t")
        pl.when(t == 0)(lambda: count.set(jnp.int32(0), 0))
        plgpu.ext.named_barrier_sync(0, num_threads=2)
        first = plgpu.atomic_add(count, 0, 1) == 0
        pl.when((t == 1) & first)(lambda: plgpu.barrier_wait(bar) and None)
        o[t] = 1.0

    scratch = dict(scratch_types=[plgpu.SMEM((1,), I32), plgpu.Barrier()], **TWO)
    run = lambda **p: kernel(body, interpret=plgpu.InterpretParams(**p), **scratch)()  # noqa: E731

    def fails(seed):
        try:
            run(seed=seed)
        except plgpu.DeadlockError:
            return True

    first = next(s for s in range(99) if not fails(s))
    with pytest.raises(plgpu.DeadlockError) as info:
        run(seed=first, seeds=32)
    seed = int(re.search(r"under seed=(\d+)", str(info.value))[1])
    assert seed > first and fails(seed)


def test_races_of_several_seeds_are_told_once():
    params = plgpu.InterpretParams(seeds=6, detect_races=True, on_race="record")
    scratch = [plgpu.SMEM((N,), F32), plgpu.Barrier()]

    def racing(x, o, tile, bar):
        plgpu.copy_gmem_to_smem(x, tile, bar)
        tile[3] = 3.0
        plgpu.barrier_wait(bar)
        o[...] = tile[...]

    kernel(racing, scratch_types=scratch, interpret=params)(X)
    assert len(plgpu.get_races().races) == 1


# ---- plgpu.testing.check -------------------------------------------------------------------------


def test_check(capsys):
    """Of kernels, functions that take interpret=, and mutable arrays; the result of one run."""
    double = kernel(doubled)
    np.testing.assert_array_equal(plgpu.testing.check(double, X, ref=lambda x: 2 * x), 2 * X)
    np.testing.assert_array_equal(plgpu.testing.check(double, X, ref=2 * X, seeds=3), 2 * X)
    rows = X.reshape(1, N)
    e = np.exp(rows - rows.max())
    plgpu.testing.check(ops.softmax, rows, ref=e / e.sum(), seeds=2)

    def both(x, o, p):
        pl.debug_print("once")
        o[...] = x[...] * 2
        p[...] = x[...] * 3

    two = kernel(both, (out(), out()))
    a, b = plgpu.testing.check(two, X, ref=lambda x: (2 * x, 3 * x), seeds=4)
    np.testing.assert_array_equal(b - a, X)
    assert capsys.readouterr().out == "once\n"

    @plgpu.kernel
    def increment(x):
        x[...] = x[...] + 1

    ref = plgpu.new_ref(X)
    plgpu.testing.check(increment, ref, ref=lambda x: X + 1, seeds=2)
    np.testing.assert_array_equal(ref[...], X)


def repeats(capsys, error, f, *args, **options):
    """The call fails, prints one line, and the line, as it stands, fails with the same error."""
    with pytest.raises(error) as info:
        plgpu.testing.check(f, *args, **options)
    (line,) = capsys.readouterr().out.splitlines()
    assert line in info.value.__notes__[-1]
    assert line.endswith(f"  # {error.__name__}")
    with pytest.raises(error) as again:
        exec(line, {"plgpu": plgpu, "f": f})
    texts = [re.sub(r"allocated at \S+", "", str(e.value)) for e in (info, again)]
    assert texts[0] == texts[1]
    assert capsys.readouterr().out == line + "\n"
    return str(info.value)


def test_check_repeats(capsys):
    text = repeats(capsys, plgpu.ScheduleError, depends())
    assert "result 0 differs in 2 of 2 elements" in text
    repeats(capsys, AssertionError, kernel(doubled), X, ref=X)

    def racing(x, o, tile, bar):
        plgpu.copy_gmem_to_smem(x, tile, bar)
        tile[3] = 3.0
        plgpu.barrier_wait(bar)
        o[...] = tile[...]

    scratch = dict(scratch_types=[plgpu.SMEM((N,), F32), plgpu.Barrier()])
    repeats(capsys, plgpu.RaceError, kernel(racing, **scratch), X)

    def unwritten(x, o, tile, bar):
        o[...] = tile[...]

    repeats(capsys, plgpu.UninitializedError, kernel(unwritten, **scratch), X)
    hangs = kernel(lambda x, o, tile, bar: plgpu.barrier_wait(bar), **scratch)
    repeats(capsys, plgpu.DeadlockError, hangs, X)
    repeats(capsys, AssertionError, kernel(doubled), X, ref=X + 1, rtol=0.1, backends="emulate")


def test_the_line_names_what_the_caller_has(capsys):
    """By the caller's own name, and functions of ops by theirs."""
    twice, x = kernel(doubled), X.reshape(1, N)
    with pytest.raises(AssertionError):
        plgpu.testing.check(twice, X, ref=X)
    line = capsys.readouterr().out
    assert line.startswith("plgpu.testing.check(twice, ..., seeds=(0,))")
    with pytest.raises(AssertionError):
        exec(line, {"plgpu": plgpu, "twice": twice})
    capsys.readouterr()
    with pytest.raises(AssertionError):
        plgpu.testing.check(ops.softmax, x, ref=x)
    line = capsys.readouterr().out
    assert line.startswith("plgpu.testing.check(plgpu.ops.softmax, ..., seeds=(0,))")
    with pytest.raises(AssertionError):
        exec(line, {"plgpu": plgpu})
    with pytest.raises(AssertionError):  # that of this kernel, which is not the latest
        plgpu.testing.check(twice, ...)
    with pytest.raises(ValueError, match="repeats the latest failure"):
        plgpu.testing.check(kernel(lambda x, o: None), ...)
    capsys.readouterr()
    with pytest.raises(AssertionError):  # of no variable
        plgpu.testing.check(kernel(doubled), X, ref=X, seeds=np.int32(1))
    line = capsys.readouterr().out
    assert line.startswith("plgpu.testing.check(..., seeds=(0,))")
    with pytest.raises(AssertionError):
        exec(line, {"plgpu": plgpu})


IN_A_FILE = """
import numpy as np
import pallas_mgpu as plgpu

@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((64,), np.float32))
def kept(x, pair, state, o):
    o[...] = x[...] + pair["a"][...] + state[...]

def first():
    x = np.random.default_rng().standard_normal((3, 64)).astype(np.float32)  # of this process
    arguments = x[0], {"a": x[1]}, plgpu.new_ref(x[2])
    plgpu.testing.check(kept, *arguments, ref=lambda x, pair, state: (x, state[...]))
"""


def test_the_line_repeats_in_another_process(tmp_path):
    """With the same arguments, which nobody has any more."""
    (tmp_path / "kept_kernels.py").write_text(IN_A_FILE)
    outs, line = [], ""
    for code in ("from kept_kernels import *; first()", "from kept_kernels import *; "):
        done = subprocess.run(
            [sys.executable, "-c", code + line.partition("  #")[0]],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
        )
        line = done.stdout.strip()
        assert line == "plgpu.testing.check(kept, ..., seeds=(0,))  # AssertionError", done.stderr
        outs.append(done.stderr.partition("AssertionError")[2])
    assert outs[0] == outs[1] and "ACTUAL" in outs[0]


def test_schedules_share_a_program(monkeypatch):
    """A kernel is traced once, whatever the number of schedules, and each has its seed."""
    traced = []

    def body(x, o):
        traced.append(1)
        o[...] = x[...] * 2

    plgpu.testing.check(kernel(body), X, seeds=4)
    assert len(traced) == 1
    with pytest.raises(plgpu.ScheduleError, match="between seeds 0 and"):
        plgpu.testing.check(depends())


def test_check_is_called_wrongly():
    double = kernel(doubled)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        plgpu.testing.check(double, X, seeds=0)
    for seeds in (None, 2.5, (0, "1")):
        with pytest.raises(TypeError, match="seeds must be an int or ints"):
            plgpu.testing.check(double, X, seeds=seeds)
    for backends in (None, 3):
        with pytest.raises(TypeError, match="backends are some of"):
            plgpu.testing.check(double, X, backends=backends)
    with pytest.raises(TypeError, match="stands for its arguments, too"):
        plgpu.testing.check(..., X)
    with pytest.raises(ValueError, match="ref has 2 arrays, the kernel 1"):
        plgpu.testing.check(double, X, ref=(X, X), seeds=1)
    state = plgpu.new_ref(X)

    @plgpu.kernel
    def closing():
        state[...] = state[...] + 1

    with pytest.raises(TypeError, match="closes over mutable arrays"):
        plgpu.testing.check(closing)
