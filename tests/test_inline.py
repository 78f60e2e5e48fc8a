"""inline_cuda: CUDA source in kernels. It runs on the CPU-run machine and on the GPU, and the
interpreter refuses it."""

import numpy as np
import pytest
from host import run as host

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu import numpy as jnp

F32 = np.float32
WGMMA, STRIDED, SPLAT = plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED, plgpu.Layout.WG_SPLAT


def shape(dims, dtype=F32, layout=None):
    return plgpu.ShapeDtypeStruct(dims, dtype, layout)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request):
    return request.param


def run(way, body, out, *args, **options):
    """The results, as a list: on the CPU-run machine with several schedules."""
    outs = [out] if isinstance(out, plgpu.ShapeDtypeStruct) else list(out)
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
    stored before it, what it writes is loaded behind it; all lanes meet. Row-major SMEM without
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
      if (k == 0) barrier_arrive(a3);
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
      if (k == 0) barrier_arrive(a1);
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
    """It reads what other lanes have stored, and stores what other lanes read before it and behind
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
            behind = b[...]
            o_ref[i] = behind
            p_ref[i] = before

        lax.fori_loop(0, 6, step, None)

    scratch = [plgpu.SMEM((128,), np.uint32)] * 2
    got, before = run(way, body, [shape(x.shape, np.uint32)] * 2, x, scratch_types=scratch)
    want = x[:, ::-1][:, np.arange(128) ^ 32]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(before, np.stack([x[0], *want[:-1]]))


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

    (got,) = run(way, body, shape(x.shape), x, scratch_types=[plgpu.SMEM((8, 32), F32)])
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


def test_the_interpreter_refuses():
    def body(o_ref):
        plgpu.inline_cuda("")()
        o_ref[0] = 1.0

    kernel = plgpu.kernel(body, out_type=shape((1,)), interpret=True)
    with pytest.raises(NotImplementedError, match="cannot run on the interpreter"):
        kernel()
