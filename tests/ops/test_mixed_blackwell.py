"""`ops.mixed_matmul` for Blackwell: the interpreter, with its races, and the emulated machine give
NumPy's products; both targets' compilers take the programs, without local memory."""

import ml_dtypes
import numpy as np
import pytest
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryMixedConfig, mixed_matmul

f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
I8, I4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
C = TensorMemoryMixedConfig

CASES = {  # rows, columns, K, groups of scales, dtypes of weights, x, scales and result, config
    "groups": (130, 200, 384, 3, I8, bf16, f32, bf16, C(128, 2)),
    "steps of groups": (40, 256, 512, 2, I4, f16, f16, f16, C(32, 3, 64, 1)),
    "columns": (5, 300, 192, 1, I4, bf16, bf16, f32, C(16)),  # K ends within a step
    "no scales": (70, 77, 64, 0, I8, f16, None, f16, C(64, 0, 64)),  # stores not by TMA
    "bands": (300, 136, 128, 0, I8, bf16, None, bf16, C(96, group=2)),
    "e4m3": (40, 200, 256, 2, E4, bf16, f32, bf16, C(32, 2)),
    "e4m3 to float16": (20, 128, 192, 1, E4, f16, f16, f32, C(32, 2, 64)),
    "e5m2": (130, 136, 128, 0, E5, bf16, None, f32, C(128)),
    "e5m2 to float16": (16, 128, 128, 1, E5, f16, f32, f16, C(16, 0, 64)),
}


@pytest.mark.filterwarnings("ignore:not portable to JAX")
@pytest.mark.parametrize(
    "name", only_long(CASES, "groups", "steps of groups", "no scales", "bands", "e4m3", every=2)
)
def test_products(name, rng, monkeypatch, some):
    m, n, k, groups, weights, dtype, scales, out, cfg = CASES[name]
    x = rng.integers(-3, 4, (m, k)).astype(dtype)
    if weights in (E4, E5):
        w = rng.integers(-15, 16, (n, k)) * 2.0 ** rng.integers(-6, 3, (n, k))
        w = w.astype(weights)
    else:
        info = ml_dtypes.iinfo(weights)
        w = rng.integers(info.min, info.max + 1, (n, k)).astype(weights)  # also the least number
    args, full = [x, w], w.astype(np.float64)
    if groups:
        args.append(rng.choice([0.5, 1, 2], (groups, n)).astype(scales))
        full *= np.repeat(args[2].astype(np.float64), k // groups, 0).T
    # all sums are exact in float32, so that only the result is rounded
    want = (x.astype(np.float64) @ full.T).astype(f32).astype(out)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 2)
    mixed_matmul.maker.forget()
    f = mixed_matmul.kernel(*args, config=cfg, out_dtype=out)
    f = getattr(f, "product", f)
    for seed in some(range(3)):
        got = np.zeros((m, n), out)
        run_on_machine(f.lower(*args, target="sm_100a"), args, [got], seed=seed)
        np.testing.assert_array_equal(got, want)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*args, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    for seed in some(range(3)):
        races = plgpu.InterpretParams(detect_races=True, seed=seed)
        got = mixed_matmul(*args, config=cfg, out_dtype=out, interpret=races)
        np.testing.assert_array_equal(got, want)
    mixed_matmul.maker.forget()


@pytest.mark.covering(1)
@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("weights, groups", [(I4, 64), (I8, 0), (E4, 64), (E5, 0)], ids=str)
def test_chosen(m, weights, groups, monkeypatch):
    """What a call on such a GPU runs has no local memory."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    spec = plgpu.ShapeDtypeStruct
    given = [spec((m, 8192), bf16), spec((8192, 8192), weights)]
    given += [spec((groups, 8192), bf16)] if groups else []
    low = mixed_matmul.kernel(*given).lower(*given)
    assert "tcgen05_mma" in low.as_text("cuda")
    used = low.resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.parametrize("cfg", [C(48), C(256), C(step=32), C(stages=1), C(group=0)], ids=repr)
def test_refusals(cfg):
    x, w = np.zeros((8, 64), f16), np.zeros((64, 64), I8)
    with pytest.raises(ValueError, match="a TensorMemoryMixedConfig has a tile_m of 16, 32"):
        mixed_matmul.kernel(x, w, config=cfg)


def test_groups_of_parts_of_a_step():
    x, w, s = np.zeros((8, 192), f16), np.zeros((64, 192), I8), np.zeros((3, 64), f16)
    with pytest.raises(ValueError, match="3 groups of 64 elements must be a multiple of the step"):
        mixed_matmul.kernel(x, w, s, config=C())
