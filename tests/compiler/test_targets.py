"""Kernels for other GPUs: lowered and compiled without one, refused where the GPU lacks what an op
needs, and products that find other instructions there."""

import functools
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_catalogue import catalogue

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
NIE = NotImplementedError
E4M3, E5M2, BF16 = (
    np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16)
)
S = plgpu.ShapeDtypeStruct


def add_one(x, o):
    o[...] = x[...] + 1


def kernel(body, outs, **options):
    return plgpu.kernel(body, out_type=outs, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target(target):
    """Text, PTX and machine code of elementwise work on every dtype, atomics and conversions."""

    def body(x, h, o, bytes_of, count):
        y = x[...] * h[...].astype(jnp.float32) + (h[...] - h[...] * h[...]).astype(jnp.float32)
        o[...] = y.astype(BF16)
        bytes_of[...] = y.astype(E4M3).astype(E5M2)
        plgpu.atomic_add(count, 0, h[0])

    outs = S((256,), BF16), S((256,), E5M2), S((1,), BF16)
    low = kernel(body, outs).lower(S((256,), np.float32), S((256,), BF16), target=target)
    assert f"target {target}" in low.as_text("graph")
    assert f".target {target}" in low.as_text("ptx")
    used = low.resources()
    assert used["spill_bytes"] == 0
    assert not used["log"] or f"for '{target}'" in used["log"]  # NVRTC's own cache leaves none


def test_names():
    low = kernel(add_one, S((8,), np.float32)).lower
    with pytest.raises(ValueError, match="one of sm_90a, sm_100a.*'sm_75'"):
        low(S((8,), np.float32), target="sm_75")
    for target in TARGETS:
        assert _core.target(target)["name"] == target
    assert _core.target("sm_90a") == _core.target() or _core.system_info()["device"] >= 0


# ---- what a target lacks -------------------------------------------------------------------------


def alloc(*types):
    """The body of a kernel: f(refs..., x, o) with scratch of these types."""

    def decorate(f):
        return lambda x, o: pl.run_scoped(lambda *refs: f(*refs, x, o), *types)

    return decorate


HALF = plgpu.SMEM((64, 64), np.float16)


def in_a_loop(acc, s, x, o):
    def step(i, _):
        plgpu.wgmma(acc, s, s)

    lax.fori_loop(0, 2, step, None)
    o[...] = acc[...].astype(o.dtype)


def copies_in(s, barrier, x, o):
    plgpu.copy_gmem_to_smem(x, s, barrier)
    plgpu.barrier_wait(barrier)
    o[...] = s[...]


def copies_out(s, x, o):
    s[...] = x[...]
    plgpu.copy_smem_to_gmem(s, o)


def meets(barrier, x, o):
    plgpu.barrier_arrive(barrier)
    o[...] = x[...]


def hands_over(x, o):
    plgpu.set_max_registers(40, action="decrease")
    o[...] = x[...]


def overlaps(x, o):
    plgpu.griddepcontrol_wait()
    o[...] = x[...]


LACKING = {
    "wgmma": (in_a_loop, (plgpu.ACC((64, 64)), HALF), "sm_100a", "plgpu.wgmma(", "jnp.dot"),
    "wgmma 80": (in_a_loop, (plgpu.ACC((64, 64)), HALF), "sm_80", "plgpu.wgmma(", "plgpu.mma"),
    "copy": (copies_in, (HALF, plgpu.Barrier()), "sm_86", "copy_gmem_to_smem(", "loads and"),
    "store": (copies_out, (HALF,), "sm_89", "copy_smem_to_gmem(", "loads and stores"),
    "barrier": (meets, (plgpu.Barrier(),), "sm_80", "barrier_arrive(", "named_barrier"),
    "registers": (hands_over, (), "sm_89", "set_max_registers(", "leave it out"),
}


@pytest.mark.parametrize("case", LACKING)
def test_refused(case):
    """The line of the op, what it needs, who has it, and what to use instead."""
    f, types, target, line, instead = LACKING[case]
    k = kernel(alloc(*types)(f) if types else f, S((64, 64), np.float16))
    with pytest.raises(ValueError if case == "copy" else NIE) as error:
        k.lower(S((64, 64), np.float16), target=target)
    text = str(error.value)
    assert re.search(rf"{line[:-1].split('.')[-1]} needs .*, which {target} lacks", text), text
    assert "sm_90a" in text and instead in text
    source = Path(__file__).read_text().splitlines()
    number = int(re.search(r"test_targets\.py:(\d+)", text)[1])
    assert line in source[number - 1]


def test_launches_that_never_overlap():
    """Earlier kernels are finished when one starts: there is nothing to wait for."""

    def overlaps(x, o):
        plgpu.griddepcontrol_wait()
        o[...] = x[...]

    low = kernel(overlaps, S((64,), np.float16)).lower
    for target in TARGETS:
        text = low(S((64,), np.float16), target=target).as_text("cuda")
        assert ("griddepcontrol" in text) == ("PDL" in _core.target(target)["features"])


def test_copies_without_clusters():
    """ptxas turns .shared::cluster on sm_120a into a check with a call, which takes a stack."""
    k = kernel(alloc(HALF, plgpu.Barrier())(copies_in), S((64, 64), np.float16))
    low = k.lower(S((64, 64), np.float16), target="sm_120a")
    assert "shared::cluster" not in low.as_text("ptx")
    assert low.resources()["stack_bytes"] == 0


def test_cluster_of_a_target():
    for target in ("sm_89", "sm_120a"):
        k = kernel(add_one, S((64,), np.float32), cluster=(2,), cluster_names=("c",))
        with pytest.raises(NIE, match="cluster"):
            k.lower(S((64,), np.float32), target=target)
    assert "cluster" in kernel(
        add_one, S((64,), np.float32), cluster=(16,), cluster_names=("c",)
    ).lower(S((64,), np.float32), target="sm_100a").as_text("cuda")


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_of_a_target(target):
    most = _core.target(target)["smem"]
    x = S((most // 4 + 256,), np.float32)
    k = kernel(alloc(plgpu.SMEM(x.shape, x.dtype))(copy_through), x)
    with pytest.raises(ValueError, match=f"exceeds available shared memory of {most} bytes"):
        k.lower(x, target=target)


def copy_through(s, x, o):
    s[...] = x[...]
    o[...] = s[...]


# ---- products without wgmma ----------------------------------------------------------------------


def dots(x, y, o):
    dot = lambda b: jnp.dot(x[...], b, preferred_element_type=jnp.float32)  # noqa: E731
    o[...] = dot(y[...]) + dot(y[...].T)


def straight(x, y, o):
    def scope(acc, s):
        s[...] = y[...]
        plgpu.commit_smem()
        plgpu.wgmma(acc, x[...], s)
        plgpu.wgmma_wait(0)
        acc[...] = acc[...] + 1
        plgpu.wgmma(acc, x[...], plgpu.transpose_ref(s, (1, 0)))
        o[...] = acc[...] - 1

    pl.run_scoped(scope, plgpu.ACC((64, 64)), plgpu.SMEM((64, 64), y.dtype))


@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("body", [dots, straight])
def test_products_by_mma(rng, body, target):
    """On the interpreter and on the emulated machine, as sm_90a computes them. Where there is
    tensor memory, kernels that ask for wgmma are told to use it."""
    x, y = rng.standard_normal((2, 64, 64)).astype(np.float16)
    k = kernel(body, S((64, 64), np.float32), interpret=True)
    if body is straight and target == "sm_100a":
        with pytest.raises(NIE, match=r"sm_100a lacks.*tcgen05_mma\(acc, a, b\)(?s:.*)wgmma\(acc"):
            k.lower(x, y, target=target)
        return
    low = k.lower(x, y, target=target)
    text = low.as_text("cuda")
    assert "mma.sync" in text and "wgmma" not in text
    assert low.resources()["spill_bytes"] == 0
    want = (x.astype(np.float32) @ y + x.astype(np.float32) @ y.T).astype(np.float32)
    got, ours = np.empty_like(want), np.empty_like(want)
    host.run(low, [x, y], [got])
    low.graph.interpret([x, y, ours])
    for result in (got, ours, k(x, y)):
        np.testing.assert_allclose(result, want, rtol=1e-3, atol=1e-3)


def test_first_target_that_fits(rng):
    """Without a target the first one that has what the kernel needs."""
    if _core.system_info()["device"] >= 0:
        pytest.skip("the GPU is what kernels are lowered for")
    low = kernel(add_one, S((8,), np.float32)).lower(S((8,), np.float32))
    assert "target sm_90a" in low.as_text()


# ---- device functions without the instructions ---------------------------------------------------

SHIM = """
#include <math.h>
#include <string.h>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef int i32; typedef float f32;
#define FN static inline
static u32 __float_as_uint(f32 x) { u32 u; memcpy(&u, &x, 4); return u; }
static f32 __uint_as_float(u32 u) { f32 x; memcpy(&x, &u, 4); return x; }
static u32 __float2uint_rn(f32 x) { return (u32)nearbyintf(x); }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
struct f16 { u16 bits; };
static f32 cvt_f32(f16 x) { _Float16 h; memcpy(&h, &x, 2); return h; }
"""


def entry(name):
    """The lines of a device function for targets without FP8."""
    text = catalogue("sm_80").split(f"//! {name}\n")[1].split("\n//! ")[0]
    return re.sub(r"#ifdef HAS_FP8\n.*?#else\n(.*?)#endif\n", r"\1", text, flags=re.S)


@pytest.mark.parametrize("kind, dtype", [("e4m3", E4M3), ("e5m2", E5M2)])
def test_float8_by_hand(kind, dtype, tmp_path):
    """Rounding to 8 bits and back without the instructions: all float16 and what lies between."""
    code = SHIM + entry("round_to_8_bits") + entry(kind)
    code += f"""
extern "C" void narrow(const f32* x, u8* out, int n) {{
  for (int k = 0; k < n; k++) out[k] = cvt_{kind}(x[k]).bits;
}}
extern "C" void widen(const u8* x, f32* out, int n) {{
  for (int k = 0; k < n; k++) out[k] = cvt_f32({kind}{{x[k]}});
}}"""
    (tmp_path / "f.cpp").write_text(code)
    library = tmp_path / "f.so"
    build = ["g++", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "f.cpp"]
    subprocess.run(build, check=True)
    f = np.ctypeslib.load_library(library.name, str(tmp_path))
    half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = half[~np.isnan(half)]
    x = np.concatenate([half, np.nextafter(half, np.float32(0)), half * np.float32(1.0001)])
    got, back = np.empty(x.size, np.uint8), np.empty(256, np.float32)
    f.narrow(x.ctypes.data_as(np.ctypeslib.ctypes.c_void_p),
             got.ctypes.data_as(np.ctypeslib.ctypes.c_void_p), x.size)  # fmt: skip
    limit = float(ml_dtypes.finfo(dtype).max)
    want = np.clip(x, -limit, limit).astype(dtype)
    np.testing.assert_array_equal(got, want.view(np.uint8))
    every = np.arange(256, dtype=np.uint8)
    f.widen(every.ctypes.data_as(np.ctypeslib.ctypes.c_void_p),
            back.ctypes.data_as(np.ctypeslib.ctypes.c_void_p), 256)  # fmt: skip
    np.testing.assert_array_equal(back, every.view(dtype).astype(np.float32))


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_120a"])
def test_rows_by_index(target):
    """sm_120a gathers rows, and cannot scatter them."""

    def body(x_ref, i_ref, o_ref, tile, full, *, scatters):
        rows = plgpu.load(i_ref, layout=plgpu.Layout.TMA_INDICES, optimized=False)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, 0:64], tile, full)
        plgpu.barrier_wait(full)
        if scatters:
            plgpu.copy_smem_to_gmem(tile, o_ref.at[rows, 0:64])
            plgpu.wait_smem_to_gmem(0)
        else:
            o_ref[pl.ds(0, 16)] = tile[...]

    for scatters in (False, True):
        kernel = plgpu.kernel(
            functools.partial(body, scatters=scatters),
            out_type=S((48, 64), np.float16),
            scratch_types=[plgpu.SMEM((16, 64), np.float16), plgpu.Barrier()],
        )
        args = S((48, 64), np.float16), S((16,), np.uint32)
        if scatters and target == "sm_120a":
            with pytest.raises(NotImplementedError, match=r"sm_120a lacks.*ref\[idx\] = value"):
                kernel.lower(*args, target=target)
        else:
            assert not kernel.lower(*args, target=target).resources()["remarks"]


@pytest.mark.parametrize("target", ["sm_86", "sm_120a"])
def test_nothing_is_lowered_for_another_target_than_asked_for(target, monkeypatch):
    """Neither by a call nor by lower()."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)

    def body(x_ref, o_ref):
        def product(acc):
            def step(_, a, b):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(0)

            specs = [plgpu.BlockSpec((64, 64), lambda k: (0, k)) for _ in range(2)]
            plgpu.emit_pipeline(step, grid=(4,), in_specs=specs, max_concurrent_steps=2)(
                x_ref, x_ref
            )
            return acc[...]

        o_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    out = plgpu.ShapeDtypeStruct((64, 64), np.float32)
    kernel = plgpu.kernel(body, out_type=out, interpret=True)
    x = np.zeros((64, 256), np.float16)
    for f in (kernel, kernel.lower):
        with pytest.raises(NotImplementedError, match=rf"wgmma needs .*, which {target} lacks"):
            f(x)


def test_operators_follow_the_target_that_is_asked_for(monkeypatch):
    """What an operator has chosen for one target is not used for another."""
    x = np.zeros((128, 128), np.float16)
    for target in (*TARGETS, TARGETS[0]):
        monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
        text = ops.matmul.kernel(x, x).lower(x, x).as_text("ptx")
        assert f".target {target}" in text
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_81")
    with pytest.raises(ValueError, match="PALLAS_MGPU_TARGET must be one of .*sm_80"):
        ops.matmul.kernel(x, x)
