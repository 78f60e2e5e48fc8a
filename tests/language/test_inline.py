"""inline_cuda: CUDA source in kernels. It runs on the CPU-run machine, on the GPU, and on the
interpreter: there as plain C++ that a compiler makes, or by a Python function that stands for it.
PTX and what needs other lanes are refused there."""

import shutil

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

F32 = np.float32
WGMMA, STRIDED, SPLAT = plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED, plgpu.Layout.WG_SPLAT


def shape(dims, dtype=F32, layout=None):
    return plgpu.ShapeDtypeStruct(dims, dtype, layout)


COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


@pytest.fixture(
    params=[
        "host",
        pytest.param("interpret", marks=COMPILER),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def way(request):
    return request.param


def run(way, body, out, *args, **options):
    """The results, as a list: on the CPU-run machine with several schedules."""
    outs = [out] if isinstance(out, plgpu.ShapeDtypeStruct) else list(out)
    if way == "interpret":
        return list(plgpu.kernel(body, out_type=outs, interpret=True, **options)(*args))
    kernel = plgpu.kernel(body, out_type=outs, **options)
    if way == "cuda":
        found = kernel(*[plgpu.device_put(a) for a in args])
        return [x.numpy() if isinstance(x, plgpu.DeviceArray) else x for x in found]
    lowered = kernel.lower(*args)
    used = lowered.resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used
    for seed in range(3):
        results = [np.empty(o.shape, o.dtype) for o in outs]
        host.run(lowered, list(args), results, seed)
    return results


@pytest.mark.filterwarnings("ignore:.*is converted from layout")
def test_registers_and_scalars(way, rng):
    """Arrays come in the layout that was asked for, whatever they were in, and go out in that of
    the result; scalars by value."""
    x = rng.standard_normal((64, 32)).astype(F32)
    source = """
      // rows warp * 16 + lane / 4 and 8 below, columns 2 (lane % 4) and the next of each 8
      #pragma unroll
      for (int k = 0; k < 16; k++) {
        const int row = (int)(threadIdx.x & 127) / 32 * 16 + (int)(threadIdx.x & 31) / 4;
        const int column = k / 4 * 8 + (int)(threadIdx.x & 3) * 2 + k % 2;
        r0[k] = a0[k] * a1 + (f32)((row + k / 2 % 2 * 8) * 100 + column);
      }
    """
    f = plgpu.inline_cuda(source, arg_types=(WGMMA, SPLAT), return_type=shape((64, 32), F32, WGMMA))

    def body(x_ref, o_ref):
        a = plgpu.load(x_ref, layout=STRIDED((64, 32), 2))
        y = f(a * 2, x_ref[0, 0])
        o_ref[...] = y + a

    (got,) = run(way, body, shape(x.shape), x)
    index = np.arange(64)[:, None] * 100 + np.arange(32)
    np.testing.assert_allclose(got, x * 2 * x[0, 0] + index + x, rtol=1e-6)


def test_refs_and_barriers(way, rng):
    """Pointers of GMEM views, shared addresses of SMEM views and barriers. What the text reads was
    stored before it, what it writes is loaded after it; all lanes meet. Row-major SMEM without
    transforms, whatever the rest of the kernel would choose."""
    x = rng.standard_normal((4, 128)).astype(F32)
    source = """
      f32 x, y;
      const u32 k = threadIdx.x & 127;
      ld_global<f32, 1>(&x, a0 + k);
      ld_shared<f32, 1>(&y, a2 + (127 - k) * 4);
      x += y;
      st_global<f32, 1>(a1 + k, &x);
      st_shared<f32, 1>(a2 + 512 + k * 4, &y);
      if (k == 0) mbarrier_arrive(a3);
    """
    ref = plgpu.RefType()
    f = plgpu.inline_cuda(source, arg_types=(ref, {"out": ref, "smem": ref}, ref))

    def body(x_ref, o_ref, p_ref, smem, bars):
        def step(i, _):
            smem[0] = x_ref[i] * 3
            assert f(x_ref.at[i], {"smem": smem, "out": o_ref.at[i]}, bars.at[1]) is None
            plgpu.barrier_wait(bars.at[1])
            p_ref[i] = smem[1]

        lax.fori_loop(0, 4, step, None)

    scratch = [plgpu.SMEM((2, 128), F32), plgpu.Barrier(num_barriers=2)]
    got, rest = run(way, body, [shape((4, 128))] * 2, x, scratch_types=scratch)
    np.testing.assert_array_equal(got, x + (x * F32(3))[:, ::-1])
    np.testing.assert_array_equal(rest, (x * F32(3))[:, ::-1])


def test_one_of_several_barriers(way):
    """A barrier, and a part of SMEM, that only the running kernel knows."""
    source = """
      const u32 k = threadIdx.x & 127, x = k * 3 + 1;
      st_shared<u32, 1>(a0 + k * 4, &x);
      if (k == 0) mbarrier_arrive(a1);
    """
    f = plgpu.inline_cuda(source, arg_types=(plgpu.RefType(), plgpu.RefType()))

    def body(o_ref, smem, bars):
        def step(i, _):
            k = (i * 2 + 1) % 3
            f(smem.at[k], bars.at[k])
            plgpu.barrier_wait(bars.at[k])
            o_ref[i] = smem[k]

        lax.fori_loop(0, 6, step, None)

    scratch = [plgpu.SMEM((3, 128), np.uint32), plgpu.Barrier(num_barriers=3)]
    (got,) = run(way, body, shape((6, 128), np.uint32), scratch_types=scratch)
    np.testing.assert_array_equal(got, np.tile(np.arange(128) * 3 + 1, (6, 1)))


def test_lanes_meet_around_source(way, rng):
    """It reads what other lanes have stored, and stores what other lanes read before it and after
    it, time and again."""
    x = rng.integers(0, 1000, (6, 128)).astype(np.uint32)
    source = """
      const u32 k = threadIdx.x & 127;
      u32 x;
      ld_shared<u32, 1>(&x, a0 + (127 - k) * 4);
      st_shared<u32, 1>(a1 + (k ^ 32) * 4, &x);
    """
    f = plgpu.inline_cuda(source, arg_types=(plgpu.RefType(), plgpu.RefType()))

    def body(x_ref, o_ref, p_ref, a, b):
        b[...] = x_ref[0]

        def step(i, _):
            a[...] = x_ref[i]
            before = b[...]
            f(a, b)
            after = b[...]
            o_ref[i] = after
            p_ref[i] = before

        lax.fori_loop(0, 6, step, None)

    scratch = [plgpu.SMEM((128,), np.uint32)] * 2
    got, before = run(way, body, [shape(x.shape, np.uint32)] * 2, x, scratch_types=scratch)
    want = x[:, ::-1][:, np.arange(128) ^ 32]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(before, np.stack([x[0], *want[:-1]]))


def test_arrays_alone_need_no_barrier():
    layout = STRIDED((128,), 1)
    result = shape((128,), layout=layout)
    f = plgpu.inline_cuda("r0[0] = a0[0] + 1;", arg_types=layout, return_type=result)

    def barriers(g):
        def body(x_ref, o_ref, a):
            a[...] = x_ref[...]
            o_ref[...] = g(a[...]) + g(x_ref[...])

        scratch = [plgpu.SMEM((128,), F32)]
        kernel = plgpu.kernel(body, out_type=shape((128,)), scratch_types=scratch)
        return kernel.lower(np.zeros(128, F32)).as_text("cuda").count("warpgroup_sync(wg)")

    assert barriers(f) == barriers(lambda x: x + 1) > 0


def test_warps(way):
    """In a warp_map: scalars in and out."""
    source = "r0[0] = a0 * 10 + (i32)(threadIdx.x >> 5);"
    f = plgpu.inline_cuda(source, arg_types=SPLAT, return_type=shape((), np.int32))

    def body(o_ref):
        @plgpu.warp_map
        def _(warp):
            o_ref[warp] = f(warp)

    (got,) = run(way, body, shape((4,), np.int32))
    np.testing.assert_array_equal(got, [0, 11, 22, 33])


def test_constants_and_swizzles(way, rng):
    """One number for all elements comes as registers too; the address of swizzled SMEM is the one
    before the chunks are permuted."""
    x = rng.standard_normal((8, 32)).astype(F32)
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    source = """
      const u32 k = threadIdx.x & 127;
      for (u32 i = k; i < 256; i += 128) {
        f32 x;
        ld_shared<f32, 1>(&x, swizzle<128>(a1 + i * 4));
        x += a0[i >= 128];
        st_shared<f32, 1>(swizzle<128>(a1 + i * 4), &x);
      }
    """
    f = plgpu.inline_cuda(source, arg_types=(STRIDED((256,), 2), plgpu.RefType(transforms)))

    def body(x_ref, o_ref, smem):
        smem[...] = x_ref[...]
        f(jnp.full((256,), 7.0, jnp.float32), smem)
        o_ref[...] = smem[...]

    options = dict(scratch_types=[plgpu.SMEM((8, 32), F32)])
    if way == "interpret":
        with pytest.raises(NotImplementedError, match="argument 1 is shared memory with transf"):
            run(way, body, shape(x.shape), x, **options)
        return
    (got,) = run(way, body, shape(x.shape), x, **options)
    np.testing.assert_array_equal(got, x + 7)


@pytest.mark.filterwarnings("ignore:.*is converted from layout")
def test_several_results(way, rng):
    """A pytree of arrays of other shapes, types and layouts and of scalars, of which some are not
    used; three calls, one of them in a loop, keep theirs apart."""
    x = rng.standard_normal((64, 32)).astype(F32)
    source = """
      #pragma unroll
      for (int k = 0; k < 16; k++) r0[k] = a0[k] * a1, r2[k] = a0[k] < 0.f;
      *r1 = a1 + 1.f;
      r3[0] = (i32)(threadIdx.x & 127) * 2;
      r3[1] = r3[0] + 1;
    """
    of_x = STRIDED((64, 32), 4)
    f = plgpu.inline_cuda(
        source,
        arg_types=(of_x, SPLAT),
        return_type={
            "a": shape((64, 32), F32, of_x),
            "b": (shape((), F32), [shape((64, 32), np.bool_, of_x)]),
            "c": shape((256,), np.int32, STRIDED((256,), 2)),
        },
    )

    def body(x_ref, o_ref, n_ref, c_ref):
        v = x_ref[...]
        first = f(v, 3.0)
        second = f(first["a"], first["b"][0])

        def step(i, c):
            out = f(c, first["b"][0])
            return out["a"] + out["b"][0]

        o_ref[...] = plgpu.layout_cast(lax.fori_loop(0, 2, step, second["a"]), WGMMA)
        n_ref[0] = jnp.sum(first["b"][1][0].astype(jnp.int32))
        c_ref[...] = second["c"]

    got, n, c = run(way, body, [shape(x.shape), shape((1,), np.int32), shape((256,), np.int32)], x)
    want = x * 3 * 4
    for _ in range(2):
        want = want * 4 + 5
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert n[0] == np.sum(x < 0)
    np.testing.assert_array_equal(c, np.arange(256))


def test_what_is_refused():
    f = plgpu.inline_cuda("", arg_types=(SPLAT, plgpu.RefType()))

    def lower(use):
        def body(x_ref, o_ref, smem):
            use(x_ref, o_ref, smem)

        scratch = [plgpu.SMEM((8, 32), F32, transforms=[plgpu.TilingTransform((4, 32))])]
        kernel = plgpu.kernel(body, out_type=shape((8, 32)), scratch_types=scratch)
        return kernel.lower(np.zeros((8, 32), F32))

    def raises(error, match, use):
        with pytest.raises(error, match=match):
            lower(use)

    raises(ValueError, "structure", lambda x, o, s: f(x))
    raises(ValueError, "argument 1 must be a ref", lambda x, o, s: f(1.0, 2.0))
    raises(ValueError, "argument 0 must be an array", lambda x, o, s: f(x, x))
    raises(ValueError, "not those of its RefType", lambda x, o, s: f(1.0, s))
    tiled = plgpu.RefType([plgpu.TilingTransform((8, 32))])
    tiled = plgpu.inline_cuda("", arg_types=(tiled,))
    raises(ValueError, "not those of its RefType", lambda x, o, s: tiled(s))
    raises(ValueError, "GMEM ref has no transforms", lambda x, o, s: tiled(x))
    with pytest.raises(ValueError, match="leaves of arg_types"):
        plgpu.inline_cuda("", arg_types=(np.float32,))
    with pytest.raises(ValueError, match="needs a layout"):
        plgpu.inline_cuda("", return_type=shape((128,)))
    with pytest.raises(ValueError, match="leaves of return_type are"):
        plgpu.inline_cuda("", return_type=(shape(()), np.float32))
    with pytest.raises(TypeError, match="source must be text"):
        plgpu.inline_cuda(1)
    with pytest.raises(RuntimeError, match="inside the body of a kernel"):
        f(1.0, 2.0)
    with pytest.raises(plgpu.CompileError, match="no_such_function"):
        lower(lambda x, o, s: plgpu.inline_cuda("no_such_function();")()).resources()


def interpreted(body, *args, out=None, **options):
    out = out or shape((4, 128))
    return plgpu.kernel(body, out_type=out, interpret=True, **options)(*args)


def test_a_function_stands_for_it(rng):
    """It gets whole arrays, scalars, refs that it writes in place, barriers; returns a pytree. PTX
    is not looked at. Each thread calls it."""
    x = rng.standard_normal((4, 128)).astype(F32)
    ref, line = plgpu.RefType(), STRIDED((128,), 1)
    calls = []

    def stand_in(value, factor, refs, bar):
        calls.append(value.shape)
        assert not refs["x"].flags.writeable and refs["x"].shape == (64,)
        refs["o"][...] = value * factor
        refs["s"][1] = refs["s"][0] + 1
        refs["s"][0, ::2] = -1
        bar.arrive()
        return value[::-1].copy(), [value.sum(dtype=F32), value.astype(np.float16)]

    f = plgpu.inline_cuda(
        'asm volatile("nanosleep.u32 20;");',
        arg_types=(line, SPLAT, {"o": ref, "x": ref, "s": ref}, ref),
        return_type=(shape((128,), F32, line), [shape((), F32), shape((128,), np.float16, line)]),
        interpret=stand_in,
    )

    def body(x_ref, o_ref, p_ref, smem, bars):
        me = lax.axis_index("wg")

        def step(i, total):
            mine = smem.at[me]
            mine[0] = x_ref[i]
            refs = {"o": o_ref.at[me, i], "x": x_ref.at[i, ::2], "s": mine}
            back, [one, half] = f(x_ref[i], 3 + i, refs, bars.at[me])
            plgpu.barrier_wait(bars.at[me])
            p_ref[me, i] = back + mine[0] + mine[1] + half.astype(F32)
            return total + one

        total = lax.fori_loop(0, 4, step, jnp.float32(0))
        p_ref[me, 4] = jnp.full((128,), total)

    o, p = interpreted(
        body,
        x,
        out=[shape((2, 4, 128)), shape((2, 5, 128))],
        scratch_types=[plgpu.SMEM((2, 2, 128), F32), plgpu.Barrier(num_barriers=2)],
        num_threads=2,
        thread_name="wg",
    )
    assert calls == [(128,)] * 8
    assert np.array_equal(o, np.stack([x * (3 + np.arange(4, dtype=F32))[:, None]] * 2))
    first = x.copy()
    first[:, ::2] = -1
    want = x[:, ::-1] + first + (x + 1) + x.astype(np.float16)
    np.testing.assert_allclose(p[:, :4], np.stack([want] * 2), rtol=1e-6)
    np.testing.assert_allclose(p[:, 4], x.sum(), rtol=1e-4)


def test_functions_that_fail():
    """Their exceptions come out of the call, wrong results are named, and the next call works."""
    line = STRIDED((128,), 1)
    answer = [None]

    def stand_in(x):
        return answer[0](x)

    f = plgpu.inline_cuda(
        "", arg_types=line, return_type=shape((128,), F32, line), interpret=stand_in
    )

    def body(x_ref, o_ref):
        o_ref[0] = f(x_ref[...])

    x = np.arange(128, dtype=F32)
    kernel = plgpu.kernel(body, out_type=shape((1, 128)), interpret=True)
    for error, match, wrong in [
        (ZeroDivisionError, "division", lambda x: 1 // 0),
        (
            ValueError,
            r"result 0 of interpret has the shape \(64,\), return_type \(128,\)",
            lambda x: x[:64],
        ),
        (ValueError, "interpret returned the structure", lambda x: (x, x)),
    ]:
        answer[0] = wrong
        with pytest.raises(error, match=match):
            kernel(x)
        answer[0] = lambda x: x * 2
        np.testing.assert_array_equal(kernel(x)[0], x * 2)
    with pytest.raises(TypeError, match="interpret must be a function or None, got 'f'"):
        plgpu.inline_cuda("", interpret="f")


@COMPILER
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint16", "bool"])
def test_dtypes_as_plain_cpp(rng, dtype):
    """Registers of all kinds, arithmetic of floats of 16 bits rounded as on a GPU."""
    dtype = jnp.dtype(dtype)
    line, cpp = STRIDED((256,), 2), {"float16": "f16", "bfloat16": "bf16"}.get(dtype.name)
    e = f"cvt_{cpp}(cvt_f32(a0[k]) / 3.f) + a0[k] * a0[k]" if cpp else "!a0[k]"
    source = f"for (int k = 0; k < 2; k++) r0[k] = {e};"
    f = plgpu.inline_cuda(source, arg_types=line, return_type=shape((256,), dtype, line))

    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    x = (rng.standard_normal(256) * np.exp2(rng.uniform(-12, 5, 256))).astype(dtype)
    got = interpreted(body, x, out=shape((256,), dtype))
    if cpp:
        third = (x.astype(F32) / F32(3)).astype(dtype).astype(F32)
        square = (x.astype(F32) * x.astype(F32)).astype(dtype).astype(F32)
        want = (third + square).astype(dtype)
    else:
        want = np.logical_not(x).astype(dtype)
    assert got.tobytes() == want.tobytes()


@COMPILER
def test_blocks_and_threads_as_plain_cpp():
    """blockIdx, gridDim and threadIdx as the launch would have them."""
    line = STRIDED((128,), 1)
    source = (
        "r0[0] = (i32)(blockIdx.x * 1000 + blockIdx.y * 100 + gridDim.y * 10000 + threadIdx.x);"
    )
    f = plgpu.inline_cuda(source, return_type=shape((128,), np.int32, line))

    def body(o_ref):
        o_ref[lax.axis_index("y"), lax.axis_index("x"), lax.axis_index("wg")] = f()

    out = shape((2, 3, 2, 128), np.int32)
    options = dict(grid=(2, 3), grid_names=("y", "x"), num_threads=2, thread_name="wg")
    y, x, t, k = np.indices(out.shape)
    want = x * 1000 + y * 100 + 20000 + t * 128 + k
    np.testing.assert_array_equal(interpreted(body, out=out, **options), want)


def test_what_the_interpreter_refuses(monkeypatch):
    """Each says why, and what to do."""
    line = STRIDED((128,), 1)

    def raises(error, match, source, arg_types=(), *args):
        f = plgpu.inline_cuda(source, arg_types=arg_types)

        def body(x_ref, o_ref, smem):
            f(*(dict(x=x_ref, v=x_ref[...], s=smem)[a] for a in args))
            o_ref[0] = x_ref[...]

        with pytest.raises(error, match=match) as caught:
            interpreted(body, np.zeros(128, F32), scratch_types=[plgpu.SMEM((128,), F32)])
        assert __file__ in caught.value.__notes__[0]

    remedy = "give inline_cuda interpret=, or call the kernel with arrays of a GPU"
    raises(NotImplementedError, rf"PTX \(asm\), which only a GPU runs; {remedy}", 'asm("");')
    raises(NotImplementedError, remedy, '/* asm */ asm volatile ("mov.u32 x, y;");')
    if shutil.which("c++"):
        match = "does not compile as plain C.*warpgroup_sync"
        raises(NotImplementedError, match, "warpgroup_sync(0);")
        ref = plgpu.RefType()
        raises(IndexError, "an array: byte 512 of 512", "f32 x = a0[128]; (void)x;", ref, "x")
        raises(IndexError, "an array: byte -4 of 512", "f32 x = *(a0 - 1); (void)x;", ref, "x")
        raises(
            IndexError,
            "shared memory: byte",
            "f32 x = 0; st_shared<f32, 1>(a0 + (1 << 20), &x);",
            ref,
            "s",
        )
        raises(NotImplementedError, "does not compile", "a0[0] = 1.f;", ref, "x")  # an input
    monkeypatch.setenv("CXX", "no-such-compiler")
    raises(
        NotImplementedError,
        rf"no compiler was found \(CXX=no-such-compiler\); {remedy}",
        "f32 never_compiled_before = a0[0]; (void)never_compiled_before;",
        line,
        "v",
    )


def test_a_barrier_at_which_source_arrives(rng):
    """Where lanes arrive too: all count as one thread, as the source does."""
    x = rng.standard_normal(256).astype(F32)
    source = "if (threadIdx.x % 128 == 0) mbarrier_arrive(a0);"
    tell = plgpu.inline_cuda(
        source, arg_types=(plgpu.RefType(),), interpret=lambda barrier: barrier.arrive()
    )

    def body(x_ref, o_ref, smem, full):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            smem[...] = x_ref[...] * 2
            x = smem[...]  # the lanes may be apart after it
            plgpu.barrier_arrive(full)
            o_ref[1] = x

        @pl.when(lax.axis_index("t") == 1)
        def _():
            tell(full)
            plgpu.barrier_wait(full)
            o_ref[0] = smem[...]

    scratch = [plgpu.SMEM((256,), F32), plgpu.Barrier(num_arrivals=2)]
    options = dict(num_threads=2, thread_name="t", scratch_types=scratch)
    for way in ("interpret", "host"):
        (got,) = run(way, body, shape((2, 256)), x, **options)
        assert np.array_equal(got, [2 * x, 2 * x]), way
