"""`interpret="emulate"`: kernels on the emulated machine, as users run them. What it computes, its
options, its errors, and where it keeps what it compiles. (Races: tests/memory.)"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import explain
from pallas_mgpu.machine import run as host

F32 = np.float32
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (128,), dtype)


def emulated(body, outs, params="emulate", **options):
    return plgpu.kernel(body, out_type=outs, interpret=params, **options)


def add_one(x, o):
    o[...] = x[...] + 1


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int8, jnp.bfloat16, jnp.int4])
def test_results_are_those_of_the_interpreter(dtype, rng):
    def body(x, o):
        o[...] = (x[...].astype(jnp.float32) + 1).astype(dtype)

    x = rng.integers(-3, 4, (5, 48)).astype(dtype)
    results = [
        plgpu.kernel(body, out_type=out(5, 48, dtype=dtype), interpret=way)(x)
        for way in (True, "emulate")
    ]
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_array_equal(results[1].astype(F32), x.astype(F32) + 1)


def test_pallas_call_and_ops(rng):
    def body(x, o):
        o[...] = x[...] * 2

    x = rng.standard_normal((64, 128)).astype(F32)
    spec = pl.BlockSpec((16, 128), lambda i: (i, 0))
    double = pl.pallas_call(
        body,
        out_shape=out(64, 128),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        interpret="emulate",
    )
    np.testing.assert_array_equal(double(x), x * 2)
    a, b = (rng.standard_normal((96, 72)).astype(np.float16) for _ in range(2))
    got = ops.matmul(a, b.T, interpret="emulate")
    np.testing.assert_allclose(got, a.astype(F32) @ b.T.astype(F32), rtol=2e-2, atol=2e-2)


def test_outputs_given_aliases_scratch_and_mutable_arrays(rng):
    def twice(x, o, scratch):
        scratch[...] = x[...]
        o[...] = scratch[...] * 2

    x = rng.standard_normal(128).astype(F32)
    kernel = emulated(twice, out(), scratch_types=[plgpu.GMEM((128,), F32)])
    given = np.zeros(128, F32)
    assert kernel(x, out=given) is given
    np.testing.assert_array_equal(given, x * 2)

    add = pl.pallas_call(add_one, out_shape=out(), input_output_aliases={0: 0}, interpret="emulate")
    np.testing.assert_array_equal(add(x), x + 1)

    def count(c):
        c[...] = c[...] + 1

    ref = plgpu.new_ref(np.zeros(128, F32))
    emulated(count, ())(ref)
    assert (ref[...] == 1).all()


def test_operands_that_are_not_row_major(rng):
    x = rng.standard_normal((40, 96)).astype(F32)[::2, ::3]
    np.testing.assert_array_equal(emulated(add_one, out(20, 32))(x), x + 1)


def test_prints(capsys):
    def body(o):
        thread = lax.axis_index("t")
        pl.debug_print("thread {}", thread)

        @pl.when(thread == 0)
        def _():
            o[...] = jnp.zeros((128,), F32)

    emulated(body, out(), num_threads=2, thread_name="t")()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "thread 0", "thread 1"]


def test_seeds_are_compared():
    """Threads take a number each: which one depends on the schedule."""

    def order(c, o):
        t = lax.axis_index("t")
        o[t] = pl.atomic_add(c, (0,), 1)

    params = plgpu.InterpretParams(backend="emulate", seeds=8)
    kernel = emulated(order, out(4, dtype=np.int32), params, num_threads=4, thread_name="t")
    with pytest.raises(plgpu.ScheduleError, match="differs between seeds 0"):
        kernel(plgpu.new_ref(np.zeros(1, np.int32)))
    same = plgpu.InterpretParams(backend="emulate", seed=5, seeds=3)
    x = np.ones(128, F32)
    np.testing.assert_array_equal(emulated(add_one, out(), same)(x), x + 1)


# ---- errors --------------------------------------------------------------------------------------


def place(error, text):
    """Is the line of this file that contains the text named?"""
    lines = open(__file__, encoding="utf-8").read().splitlines()
    numbers = [k for k, line in enumerate(lines, 1) if f"#: {text}" in line]
    return any(f"{__file__}:{n}" in str(error) for n in numbers)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_missing_commit(tiled):
    def body(o, tile):
        tile[pl.ds(8, 8), pl.ds(64, 64)] = jnp.ones((8, 64), np.float16)  #: store
        plgpu.copy_smem_to_gmem(tile, o)  #: copy
        plgpu.wait_smem_to_gmem(0)

    scratch = plgpu.SMEM((16, 128), np.float16, transforms=TILED if tiled else ())
    kernel = emulated(body, out(16, 128, dtype=np.float16), scratch_types=[scratch])
    with pytest.raises(plgpu.RaceError) as caught:
        kernel()
    text = str(caught.value)
    assert "write of tile[8, 64] by thread 0" in text and "read of tile[8, 64] by TMA" in text
    assert "call plgpu.commit_smem() before the copy" in text
    assert place(text, "store") and place(text, "copy")
    assert "byte" not in text and "lane" not in text
    race = plgpu.get_races().races[0]
    assert (race.kind, race.space, race.first.ref) == ("write/read", "SMEM", "tile")
    assert "seed 0" in caught.value.__notes__[0]


def test_what_to_wait_for():
    def load(x, o, tile, ready):
        plgpu.copy_gmem_to_smem(x, tile, ready.at[1])
        o[...] = tile[...]
        plgpu.barrier_wait(ready.at[1])

    def store(x, o, tile, ready):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)
        tile[...] = x[...] * 2

    scratch = [plgpu.SMEM((128,), F32), plgpu.Barrier(num_barriers=2)]
    remedies = {
        load: r"plgpu\.barrier_wait\(ready\[1\]\)",
        store: r"wait_smem_to_gmem\(0, wait_read",
    }
    for body, remedy in remedies.items():
        for seed in range(3):
            params = plgpu.InterpretParams(backend="emulate", seed=seed)
            with pytest.raises(plgpu.RaceError, match=remedy):
                emulated(body, out(), params, scratch_types=scratch)(np.ones(128, F32))


def test_products_in_flight(rng):
    def body(a, b, o, sa, sb, ready, acc):
        plgpu.copy_gmem_to_smem(a, sa, ready)
        plgpu.copy_gmem_to_smem(b, sb, ready)
        plgpu.barrier_wait(ready)
        plgpu.wgmma(acc, sa, sb)  #: product
        sa[...] = jnp.zeros((64, 64), np.float16)  #: store
        plgpu.wgmma_wait(0)
        o[...] = acc[...]

    tile = plgpu.SMEM((64, 64), np.float16, transforms=TILED)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=2), plgpu.ACC((64, 64))]
    a = np.ones((64, 64), np.float16)
    with pytest.raises((plgpu.RaceError, ValueError)) as caught:
        emulated(body, out(64, 64), scratch_types=scratch)(a, a)
    text = str(caught.value)
    assert "sa[" in text and "tensor core" in text and "wgmma_wait" in text
    assert place(text, "product") and place(text, "store")


def test_a_deadlock_names_who_waits_for_what():
    def body(o, bars):
        t = lax.axis_index("t")
        pl.when(t == 1)(lambda: plgpu.barrier_wait(bars.at[2]))  #: wait
        o[t] = 1.0

    kernel = emulated(
        body, out(), num_threads=2, thread_name="t", scratch_types=[plgpu.Barrier(num_barriers=3)]
    )
    with pytest.raises(plgpu.DeadlockError, match=r"thread 1: waits for barrier 'bars\[2\]'") as e:
        kernel()
    assert place(e.value, "wait") and "lacks 1 of 1 arrivals" in str(e.value)


def test_accesses_out_of_bounds_and_never_written():
    def beyond(n, x, o):
        o[0] = x[n[0]]  #: load

    with pytest.raises(IndexError, match=r"'x'") as caught:
        emulated(beyond, out())(np.array([1000], np.int32), np.ones(128, F32))
    assert place(caught.value, "load")

    def unwritten(o, tile):
        o[...] = tile[...]  #: use

    kernel = lambda **o: emulated(  # noqa: E731
        unwritten,
        out(),
        plgpu.InterpretParams(backend="emulate", **o),
        scratch_types=[plgpu.SMEM((128,), F32)],
    )
    kernel()()
    with pytest.raises(
        plgpu.UninitializedError, match=r"'tile'\[\d+\] was never written"
    ) as caught:
        kernel(detect_uninitialized=True)()
    assert place(caught.value, "use")


def test_slices_that_overhang_under_a_mask(rng):
    """Each register of a vector has its own coordinates; those of selected elements are inside."""
    rows, cols = 65, 112

    def body(x, o):
        row, col = lax.axis_index("row") * 64, lax.axis_index("col") * 64
        down = lax.broadcasted_iota(jnp.int32, (64, 64), 0)
        across = lax.broadcasted_iota(jnp.int32, (64, 64), 1)
        inside = (down < rows - row) & (across < pl.multiple_of(cols - col, 16))
        part = (pl.ds(row, 64), pl.ds(col, 64))
        pl.store(o, part, pl.load(x, part, mask=inside, other=0), mask=inside)

    x = rng.standard_normal((rows, cols)).astype(np.float16)
    options = {"grid": (2, 2), "grid_names": ("row", "col"), "interpret": "emulate"}
    copy = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), **options)
    np.testing.assert_array_equal(copy(x), x)


def test_too_many_arrivals_and_failed_checks():
    def twice(o, bar):
        plgpu.barrier_arrive(bar)
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        plgpu.barrier_wait(bar)
        plgpu.barrier_arrive(bar)

    def checked(x, o):
        pl.debug_check(x[0] > 0, "x is {}")
        o[...] = x[...]

    emulated(twice, out(), scratch_types=[plgpu.Barrier()])
    with pytest.raises(AssertionError, match="x is"), pl.enable_debug_checks(True):
        emulated(checked, out())(np.zeros(128, F32))


def test_names_of_elements(rng):
    """The index of each byte of an allocation, of every transform, by a copy of its own."""
    for shape, tiling, swizzle in [
        ((3, 16, 128), (8, 64), 128),
        ((16, 64), (8, 32), 64),
        ((8, 48), (8, 16), 32),
        ((5, 7), (), 0),
    ]:
        text = f"const u32 t = smem + 1024; // smem float16{list(shape)}".replace(", ", ",")
        text += f", tiled {tiling}, swizzle {swizzle}" if tiling else ""
        a = explain.Allocation(explain._DECLARED.fullmatch(text), 1, "t")
        seen = {a.index(at) for at in range(0, a.bytes, 2)}
        assert seen == {str(list(i)) for i in np.ndindex(*shape)}
        if tiling:  # the second row of the first tile, whose chunks the swizzle exchanges
            row = tiling[1] * 2
            assert a.index(row ^ (row >> 7 & swizzle // 16 - 1) << 4).endswith("1, 0]")


# ---- where it runs -------------------------------------------------------------------------------

PROGRAM = """
import numpy as np, pallas_mgpu as plgpu
def add_one(x, o): o[...] = x[...] + 1
kernel = plgpu.kernel(add_one, out_type=plgpu.ShapeDtypeStruct((128,), np.float32))
print(kernel(np.ones(128, np.float32))[0], plgpu._core.system_info()["backend"])
"""


def python(**env):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PALLAS_MGPU_BACKEND": "emulate", **env}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)


def test_the_environment_chooses_it_and_programs_are_kept(tmp_path):
    machine = tmp_path / "emulate" / host.home().name  # building it takes long
    machine.mkdir(parents=True)
    for file in ("machine.so", "catalogue.h", "catalogue.h.gch"):
        shutil.copy2(host.home() / file, machine)
    made = []
    for _ in range(2):
        got = python(PALLAS_MGPU_CACHE_DIR=str(tmp_path))
        assert got.stdout.split() == ["2.0", "emulate"], got.stderr
        (program,) = set(machine.glob("*.so")) - {machine / "machine.so"}
        made.append(program.stat().st_ino)
    assert made[0] == made[1]


@pytest.mark.long
def test_clocks_that_are_shared(tmp_path):
    """They hold what plain vectors hold."""
    source = Path(__file__).parent / "clocks.cpp"
    program = tmp_path / "clocks"
    flags = [*host.COMMON, "-O1", f"-I{host.HERE}"]
    host.build(host.compiler(), *flags, source, host.HERE / "clocks.cpp", "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_missing_compiler_is_named(tmp_path):
    got = python(CXX="/nowhere/g++-99", PALLAS_MGPU_CACHE_DIR=str(tmp_path))
    assert "NotImplementedError" in got.stderr and "/nowhere/g++-99 was not found" in got.stderr
    assert "apt install g++" in got.stderr and "interpret=True" in got.stderr
    (tmp_path / "g++").symlink_to("/bin/true")
    got = python(CXX=str(tmp_path / "g++"), PALLAS_MGPU_CACHE_DIR=str(tmp_path))
    assert "is no C++ compiler" in got.stderr


def test_options_that_are_refused():
    for options in (
        {"skip_floating_point_ops": True},
        {"on_race": "warn"},
        {"out_of_bounds_reads": "uninitialized"},
        {"timeline": "x.json"},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            plgpu.InterpretParams(backend="emulate", **options)
    with pytest.raises(ValueError, match="backend must be 'interpret' or 'emulate', got 'gpu'"):
        plgpu.InterpretParams(backend="gpu")
    with pytest.raises(TypeError, match="interpret must be a bool, 'emulate' or"):
        plgpu.kernel(add_one, out_type=out(), interpret="gpu")


SPLAT = plgpu.Layout.WG_SPLAT


def inline(source):
    f = plgpu.inline_cuda(
        source, arg_types=SPLAT, return_type=plgpu.ShapeDtypeStruct((), F32, SPLAT)
    )

    def body(x, o):
        o[0] = f(x[0])

    return emulated(body, out())


def test_inline_sources():
    """Plain C++ runs, and so do the functions of programs; PTX is refused."""
    x = np.full(128, 2, F32)
    assert inline("r0[0] = a0 * 3 + (threadIdx.x < 1024);")(x)[0] == 7
    assert inline("r0[0] = shuffle_xor(a0, 1) + 1;")(x)[0] == 3
    for registers in ("f", "q2"):  # the assembler refuses it, or the compiler
        ptx = f'asm volatile("mov.f32 %0, %1;" : "={registers}"(r0[0]) : "f"(a0));'
        with pytest.raises(NotImplementedError, match="kernel body is no plain C.. .* PTX"):
            inline(ptx)(x)


def test_check_on_both_backends(capsys):
    x = np.ones(128, F32)
    kernel = plgpu.kernel(add_one, out_type=out())
    both = ("interpret", "emulate")
    got = plgpu.testing.check(kernel, x, ref=lambda x: x + 1, seeds=2, backends=both)
    assert (got == 2).all()

    def bad(o, tile):
        tile[...] = jnp.ones((128,), F32)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    bad = plgpu.kernel(bad, out_type=out(), scratch_types=[plgpu.SMEM((128,), F32)])
    for backend in both:
        with pytest.raises(plgpu.RaceError):
            plgpu.testing.check(bad, seeds=2, backends=backend)
        assert ("backends='emulate'" in capsys.readouterr().out) == (backend == "emulate")
    with pytest.raises(ValueError, match="backends are some of"):
        plgpu.testing.check(kernel, x, backends="gpu")


# ---- a fence of one block's memory ---------------------------------------------------------------


def handed_over(sender, x, o, box, met):
    """Each block stores to the memory of the other one, where TMA reads; `sender` fences."""
    c = lax.axis_index("c")
    plgpu.cluster_ref(box, {"c": 1 - c})[...] = x[c]
    if sender:
        plgpu.commit_smem()
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)
    if not sender:
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(box, o.at[c])
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("sender", [False, True])
def test_fences_for_memory_of_other_blocks(sender, rng):
    """A fence of a block's own memory does for what others stored there, not for what its threads
    stored elsewhere."""
    x = rng.standard_normal((2, 128)).astype(F32)
    kernel = plgpu.kernel(
        functools.partial(handed_over, sender),
        out_type=out(2, 128),
        scratch_types=[plgpu.SMEM((128,), F32), plgpu.ClusterBarrier(collective_axes=("c",))],
        cluster=(2,),
        cluster_names=("c",),
    )
    text, info = host.program(kernel.lower(x, target="sm_90a"))
    assert text.count("fence_proxy_async_cluster();") == 1
    for seed in range(3):
        got = np.zeros((2, 128), F32)
        host.run_program(text, info, [x], [got], seed)
        np.testing.assert_array_equal(got, x[::-1])
        weaker = text.replace("fence_proxy_async_cluster();", "fence_proxy_async();")
        with contextlib.ExitStack() as stack:
            if sender:
                stack.enter_context(pytest.raises(host.HostError, match="no proxy fence"))
            host.run_program(weaker, info, [x], [got], seed)
