"""Arrays larger than the registers of a thread: element-wise chains become loops over strips, what
cannot warns with its line, and all of it compiles in seconds."""

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import here

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

f32, f16, i32 = np.float32, np.float16, np.int32


def shape(x, dtype=None):
    return plgpu.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def lowered(body, outs, *args):
    """The lowered kernel and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        low = plgpu.kernel(body, out_type=outs, interpret=True).lower(*args)
    return low, [str(w.message) for w in caught]


def loops(body, outs, *args):
    low, texts = lowered(body, outs, *args)
    assert not any("registers a lane" in t for t in texts), texts
    return low.as_text("graph").count("  for ")


@pytest.mark.parametrize(
    "dims", [(260, 132), (1, 70000), (3, 5, 9001), (40000,), (33000, 1), (2, 40001)]
)
@pytest.mark.parametrize("dtype", [f32, f16, np.int8])
def test_chain(run, rng, dims, dtype):
    """Two results of two operands, a scalar, a row and indices; strips that do not divide."""
    x = rng.integers(-30, 30, dims).astype(dtype)
    y = rng.integers(-30, 30, dims).astype(f32)
    row = rng.integers(-30, 30, dims[-1:]).astype(f32)

    def body(x_ref, y_ref, row_ref, o_ref, p_ref):
        s = x_ref[...].astype(f32) * 2 + jnp.broadcast_to(row_ref[...], dims)
        o_ref[...] = s - y_ref[...] * y_ref[(0,) * len(dims)]
        p_ref[...] = jnp.where(s > 0, lax.broadcasted_iota(i32, dims, 0), i32(-1))

    outs = [shape(y), shape(y, i32)]
    assert loops(body, outs, x, y, row) >= 1
    got = run(body, outs, x, y, row)
    s = x.astype(f32) * 2 + row
    np.testing.assert_array_equal(got[0], s - y * y.ravel()[0])
    index = np.broadcast_to(np.arange(dims[0]).reshape(-1, *[1] * (len(dims) - 1)), dims)
    np.testing.assert_array_equal(got[1], np.where(s > 0, index, -1))


def test_small_arrays_have_no_loop():
    x = np.zeros((128, 128), f32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    assert loops(body, shape(x), x) == 0


@pytest.mark.parametrize("n, layout, out, threads", [
    (184, None, ml_dtypes.bfloat16, 1), (400, None, f32, 1),
    (104, plgpu.Layout.TCGEN05_TMEM_NATIVE, f16, 3),
])  # fmt: skip
def test_columns_of_tensor_memory(rng, n, layout, out, threads):
    """Also with the wait for the load before the arithmetic, which moves to the end."""

    def body(x_ref, o_ref, tmem):
        def work():
            for at in range(0, n, 8):
                part = pl.ds(at, 8)
                plgpu.async_store_tmem(tmem.at[:, part], x_ref[:, part])
            plgpu.commit_tmem()
            x = plgpu.async_load_tmem(tmem, layout=layout)
            plgpu.wait_load_tmem()
            o_ref[...] = (jnp.tanh(x * 0.5) * x / (1.5 + jnp.exp(-x))).astype(out)

        pl.when(lax.axis_index("t") == 0)(work) if threads > 1 else work()

    x = rng.standard_normal((128, n)).astype(f32)
    how = dict(num_threads=threads, thread_name="t") if threads > 1 else {}
    want = (np.tanh(x * 0.5) * x / (1.5 + np.exp(-x))).astype(f32)
    for backend in ("interpret", "emulate"):
        params = plgpu.InterpretParams(backend=backend, detect_races=backend == "interpret")
        kernel = plgpu.kernel(
            body, out_type=shape(x, out), scratch_types=[plgpu.TMEM((128, n), f32)],
            interpret=params, **how,
        )  # fmt: skip
        np.testing.assert_allclose(kernel(x).astype(f32), want, rtol=1e-2, atol=1e-2)
    low = kernel.lower(x, target="sm_100a")
    graph = low.as_text("graph")
    assert graph.count("  for ") == 1 and graph.index("wait_load_tmem") > graph.index("tanh")
    assert low.resources()["spill_bytes"] == low.resources()["stack_bytes"] == 0


def test_columns_that_others_may_overwrite_have_no_loop():
    """An arrival after the wait tells that the columns have been read."""

    def body(o_ref, tmem, free):
        x = plgpu.async_load_tmem(tmem)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(free)
        o_ref[...] = x + 1

    scratch = [plgpu.TMEM((128, 200), f32), plgpu.Barrier(orders_tensor_core=True)]
    out = plgpu.ShapeDtypeStruct((128, 200), f32)
    low = plgpu.kernel(body, out_type=out, scratch_types=scratch).lower(target="sm_100a")
    assert "  for " not in low.as_text("graph")


def test_one_large_loop_is_short_and_without_spills():
    x = np.zeros((1024, 1024), f32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    low, _ = lowered(body, shape(x), x)
    used = low.resources()
    assert used["registers"] < 128 and not used["spill_bytes"] and not used["stack_bytes"]


def test_int4(run, rng):
    x = rng.integers(-8, 8, (512, 1024)).astype(ml_dtypes.int4)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(f16) * f16(2)

    assert loops(body, shape(x, f16), x) == 1
    np.testing.assert_array_equal(run(body, shape(x, f16), x), x.astype(f16) * 2)


def test_same_ref(run, rng):
    """A ref that is loaded and stored at the same place, twice; each store sees the one before."""
    x = rng.standard_normal((256, 260)).astype(f32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1
        o_ref[...] = o_ref[...] * 2
        o_ref[...] = o_ref[...] + x_ref[...]

    assert loops(body, shape(x), x) == 3
    np.testing.assert_array_equal(run(body, shape(x), x), (x + 1) * 2 + x)


def test_swap(run, rng):
    """All loads of a strip come before its stores."""
    x, y = rng.standard_normal((2, 256, 136)).astype(f32)

    def body(x_ref, y_ref, a_ref, b_ref):
        a_ref[...], b_ref[...] = x_ref[...], y_ref[...]
        a, b = a_ref[...], b_ref[...]
        a_ref[...] = b
        b_ref[...] = a

    outs = [shape(x), shape(y)]
    assert loops(body, outs, x, y) >= 2
    got = run(body, outs, x, y)
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], x)


@pytest.mark.filterwarnings("ignore:.*registers a lane")
@pytest.mark.parametrize("to, of", [(0, 3), (3, 0)])
def test_overlapping_refs_have_no_loop(run, rng, to, of):
    """Parts of one ref that overlap: everything is loaded before anything is stored."""
    x = rng.standard_normal((300, 136)).astype(f32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[pl.ds(to, 297)] = o_ref[pl.ds(of, 297)] + 1

    assert lowered(body, shape(x), x)[0].as_text("graph").count("  for ") == 1
    want = x.copy()
    want[to : to + 297] = x[of : of + 297] + 1
    np.testing.assert_array_equal(run(body, shape(x), x, spills=1 << 20), want)


def test_effects_end_a_chain(run, rng):
    """A value loaded before a store to the same ref stays what it was."""
    x = rng.standard_normal((256, 136)).astype(f32)

    def body(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]
        old = o_ref[...]
        o_ref[0] = old[0] * 0
        p_ref[...] = old + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(body, [shape(x)] * 2, x, spills=1 << 20)
    np.testing.assert_array_equal(got[1], x + 1)


def test_smem(run, rng):
    x = rng.standard_normal((256, 160)).astype(f32)

    def body(x_ref, o_ref):
        def scope(s_ref):
            s_ref[...] = x_ref[...] * 2
            o_ref[...] = s_ref[...] + 1

        pl.run_scoped(scope, plgpu.SMEM((256, 160), f32))

    assert loops(body, shape(x), x) == 2
    np.testing.assert_array_equal(run(body, shape(x), x), x * 2 + 1)


def test_in_a_branch_and_a_loop(run, rng):
    x = rng.standard_normal((2, 256, 136)).astype(f32)

    def body(x_ref, o_ref):
        @pl.loop(0, 2)
        def _(i):
            @pl.when(x_ref[0, 0, 0] > -100)
            def _():
                o_ref[i] = x_ref[i] + i.astype(f32)

    assert loops(body, shape(x), x) == 2
    np.testing.assert_array_equal(
        run(body, shape(x), x), x + np.arange(2, dtype=f32)[:, None, None]
    )


def test_warning_names_array_line_and_remedy():
    x = np.zeros((512, 512), f32)
    file, line = here(3)

    def body(x_ref, o_ref):
        v = x_ref[...]
        o_ref[...] = v - jnp.max(v, axis=1)[:, None]

    _, texts = lowered(body, shape(x), x)
    text = texts[0]
    assert "float32[512,512]" in text and "2048 registers a lane" in text and "255" in text
    assert "fori_loop" in text and "BlockSpec" in text
    with pytest.warns(UserWarning, match="registers a lane") as caught:
        plgpu.kernel(body, out_type=shape(x), interpret=True).lower(x)
    assert (caught[0].filename, caught[0].lineno) == (file, line)


@pytest.mark.timing
@pytest.mark.filterwarnings("ignore")
def test_large_arrays_compile_in_seconds():
    """Layouts that repeat an array in each lane, and rows that are reduced."""
    x, y = np.zeros((64, 128), i32), np.zeros((1024, 512), f32)

    def repeated(x_ref, o_ref):
        o_ref[...] = plgpu.load(x_ref, layout=plgpu.Layout.TMA_INDICES_4)

    def softmax(y_ref, o_ref):
        v = jnp.exp(y_ref[...])
        o_ref[...] = v / jnp.sum(v, axis=1)[:, None]

    for body, z in ((repeated, x), (softmax, y)):
        low = plgpu.kernel(body, out_type=shape(z), interpret=True).lower(z)
        start = time.perf_counter()
        low.resources()
        assert time.perf_counter() - start < 30


SLOW = """
import time, numpy as np, pallas_mgpu as plgpu
x = plgpu.ShapeDtypeStruct((128,), np.float32)
f = plgpu.inline_cuda('''
  f32 a[3000];
  #pragma unroll
  for (int k = 0; k < 3000; k++) a[k] = a0[0] * (f32)k;
  #pragma unroll
  for (int k = 1; k < 3000; k++) a[k] = a[k] * a[k - 1] + a[(k * 7) % 3000];
  r0[0] = a[2999];
''', arg_types=(plgpu.Layout.WG_STRIDED((128,), 1),),
    return_type=plgpu.ShapeDtypeStruct((128,), np.float32,
                                       layout=plgpu.Layout.WG_STRIDED((128,), 1)))
def body(x_ref, o_ref): o_ref[...] = f(x_ref[...])
def small(x_ref, o_ref): o_ref[...] = x_ref[...] + 1
start = time.perf_counter()
try: print(plgpu.kernel(body, out_type=x).lower(x).resources()["registers"])
except Exception as e: print(type(e).__name__, e)
print("next", plgpu.kernel(small, out_type=x).lower(x).resources()["registers"])
"""


def slowly(text, **env):
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(plgpu.__file__).parent.parent),
        "PALLAS_MGPU_COMPILE_SECONDS": "1",
        "PALLAS_MGPU_NO_CACHE": "1",
        **env,
    }
    return subprocess.run([sys.executable, "-c", text], env=env, text=True, capture_output=True)


@pytest.mark.long
@pytest.mark.timing
def test_time_limit():
    """A compilation that takes too long ends with a message; the next one works."""
    done = slowly(SLOW)
    assert "CompileError kernel body_kernel was not compiled" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "limit is 1 s" in done.stdout and "PALLAS_MGPU_COMPILE_SECONDS" in done.stdout
    assert "next " in done.stdout


STAND_IN = """
#include <stddef.h>
#include <unistd.h>
int nvrtcVersion(int *a, int *b) { *a = 12; *b = 0; return 0; }
const char *nvrtcGetErrorString(int e) { return "no"; }
int nvrtcCreateProgram(void **p, const char *t, const char *n, int h, const char *const *a,
                       const char *const *b) { *p = 0; return 0; }
int nvrtcDestroyProgram(void **p) { return 0; }
int nvrtcCompileProgram(void *p, int n, const char *const *o) { usleep(2500000); return 7; }
int nvrtcGetCUBINSize(void *p, size_t *n) { return 1; }
int nvrtcGetCUBIN(void *p, char *c) { return 1; }
int nvrtcGetPTXSize(void *p, size_t *n) { return 1; }
int nvrtcGetPTX(void *p, char *c) { return 1; }
int nvrtcGetProgramLogSize(void *p, size_t *n) { return 1; }
int nvrtcGetProgramLog(void *p, char *c) { return 1; }
"""


@pytest.mark.long
@pytest.mark.timing
def test_time_limit_of_a_compiler_that_cannot_be_stopped(tmp_path):
    """An old library, or one that is in ptxas: a line on stderr when the limit has passed."""
    cc = os.environ.get("CC", "gcc").split()
    if not shutil.which(cc[0]):
        pytest.skip("needs a C compiler")
    (tmp_path / "nvrtc.c").write_text(STAND_IN)
    library = tmp_path / "libnvrtc.so"
    subprocess.run([*cc, "-shared", "-fPIC", "-o", library, tmp_path / "nvrtc.c"], check=True)
    small = SLOW.replace("(body,", "(small,")
    done = slowly(small, PALLAS_MGPU_NVRTC=str(library))
    said = "NVRTC 12.0 still compiles kernel small_kernel after 1 s"
    assert said in done.stderr and "cannot be stopped" in done.stderr, done.stdout + done.stderr
    quiet = slowly(small, PALLAS_MGPU_NVRTC=str(library), PALLAS_MGPU_COMPILE_SECONDS="0")
    assert "still compiles" not in quiet.stderr
