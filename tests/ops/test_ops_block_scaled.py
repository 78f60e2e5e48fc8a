"""`ops.matmul` with a scale for each block of 16 or 32 elements, which Blackwell's tensor cores
apply: the interpreter and the emulated machine give NumPy's products, both targets' compilers take
the programs, and what does not fit is refused with words."""

import ml_dtypes
import numpy as np
import pytest
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryConfig, matmul, quantize

f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0, E2M1 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float4_e2m1fn)
C = TensorMemoryConfig
MXFP8, MXF4, NVFP4 = (E8M0, 32), (E8M0, 32), (E4M3, 16)

CASES = {  # shape, configuration, SMs, dtypes, scales: dtype and block, options
    "mxfp8": ((300, 520, 640), C(256, False, 3), 2, (E4M3, E5M2), MXFP8, {}),
    "mxfp8, pairs": ((700, 520, 144), C(256), 4, (E4M3, E4M3), MXFP8, {"out_dtype": bf16}),
    "mxfp8, transposed": ((304, 528, 200), C(256), 4, (E4M3, E5M2), MXFP8, {"transposed": True}),
    "narrow": ((200, 72, 64), C(128, False), 4, (E5M2, E5M2), MXFP8, {"bias": True}),
    "mxf4": ((300, 520, 704), C(256, False), 2, (E2M1, E2M1), MXF4, {"out_dtype": f16}),
    "mxf4, blocks of 16": ((300, 264, 704), C(128, False), 2, (E2M1, E2M1), (E8M0, 16), {}),
    "nvfp4": ((300, 520, 640), C(256), 4, (E2M1, E2M1), NVFP4, {"bias": True}),
    "dealt out": ((520, 520, 96), C(256, False, dynamic=False), 2, (E2M1, E2M1), NVFP4, {}),
    "long step": ((300, 300, 1088), C(256, step=256), 2, (E2M1, E2M1), NVFP4, {}),
}


def scaled(rng, shape, dtype, kind):
    """An operand with rows along K, its scales as the kernel takes them, and what both mean."""
    rows, k = shape
    scale_dtype, block = kind
    x = rng.integers(-3, 4, shape).astype(dtype)
    blocks = -(-k // (4 * block)) * 4
    scales = np.exp2(rng.integers(-2, 3, (rows, blocks))).astype(scale_dtype)
    meant = x.astype(f32) * np.repeat(scales.astype(f32), block, 1)[:, :k]
    return x, plgpu.ext.format_tcgen05_scales(scales), meant


DEFAULT = ["mxfp8, pairs", "narrow", "mxf4", "dealt out"]


@pytest.mark.parametrize("name", only_long(CASES, *DEFAULT, every=2))
def test_products(name, rng, monkeypatch, some):
    (m, n, k), config, sms, (of_a, of_b), kind, options = CASES[name]
    options = {"out_dtype": f32} | options
    a, scale_a, left = scaled(rng, (m, k), of_a, kind)
    b, scale_b, right = scaled(rng, (n, k), of_b, kind)
    want, operands = left @ right.T, {"scale_a": scale_a, "scale_b": scale_b}
    transposed = options.pop("transposed", False)
    if transposed:
        a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    if options.pop("bias", False):
        operands["bias"] = rng.integers(-3, 4, n).astype(bf16)
        want = want + operands["bias"].astype(f32)
    want = want.astype(options["out_dtype"])
    how = dict(config=config, transpose_a=transposed, transpose_b=not transposed, **options)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: sms)
    matmul.maker.forget()  # kernels for other numbers of SMs
    f = matmul.kernel(a, b, **operands, **how)
    args = [a, b, *(operands[n] for n in ("bias", "scale_a", "scale_b") if n in operands)]
    for seed in some(range(2)):
        got = np.zeros((m, n), options["out_dtype"])
        run_on_machine(f.lower(*args, target="sm_100a"), args, [got], seed=seed)
        np.testing.assert_array_equal(got, want)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*args, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    races = plgpu.InterpretParams(detect_races=True, seed=1)
    got = matmul(a, b, **operands, **how, interpret=races)
    matmul.maker.forget()
    np.testing.assert_array_equal(got, want)


def test_quantized(rng):
    """What `quantize` gives is a block-scaled operand after arrangement."""
    x, y = rng.standard_normal((2, 130, 256)).astype(f32)
    (a, of_a), (b, of_b) = (quantize(z, block=32, mx=True, interpret=True) for z in (x, y))
    scales = {
        "scale_a": plgpu.ext.format_tcgen05_scales(of_a),
        "scale_b": plgpu.ext.format_tcgen05_scales(of_b),
    }
    got = matmul(a, b, **scales, transpose_b=True, config=C(), out_dtype=f32, interpret=True)
    np.testing.assert_allclose(got, x @ y.T, atol=4)


def arrays(m=64, n=64, k=64, dtype=E2M1, scale=E4M3, tiles=1):
    scales = np.zeros((1, tiles, 32, 16), scale)
    operands = np.zeros((m, k), dtype), np.zeros((n, k), dtype)
    return operands, {"scale_a": scales, "scale_b": scales}


@pytest.mark.parametrize(
    "given, options, error, words",
    [
        ({}, {"config": None}, NotImplementedError, "on Hopper use 8-bit floats with float32"),
        ({}, {"transpose_b": False}, NotImplementedError, "contiguous along K"),
        ({"k": 48}, {}, NotImplementedError, "multiple of 32, got 48; pad"),
        ({"tiles": 2}, {}, ValueError, r"\(blocks of 16\), got \(1, 2, 32, 16\)"),
        ({"dtype": E4M3}, {}, TypeError, "float8_e8m0fnu, got float8_e4m3fn"),
        ({"dtype": f16}, {}, TypeError, "for operands of 8-bit floats"),
        ({"scale": f32}, {}, TypeError, "format_tcgen05_scales arranges them"),
        ({}, {"config": C(64, False)}, ValueError, "tile_n is 128 or 256, with pair 256"),
        ({}, {"config": C(128)}, ValueError, "tile_n is 128 or 256, with pair 256"),
    ],
    ids=str,
)
def test_refusals(given, options, error, words):
    (a, b), scales = arrays(**given)
    options = {"config": C(), "transpose_b": True} | options
    with pytest.raises(error, match=words):
        matmul.kernel(a, b, **scales, **options)
