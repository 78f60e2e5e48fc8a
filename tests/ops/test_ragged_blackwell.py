"""Grouped products for Blackwell (`ops.ragged_dot`, `ops.transposed_ragged_dot`): the interpreter,
with its races, and the emulated machine give NumPy's products, and both targets' compilers take the
programs, without local memory."""

import ml_dtypes
import numpy as np
import pytest
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryConfig, ragged_dot, transposed_ragged_dot

f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def config(tile_n=256, **options):
    return TensorMemoryConfig(tile_n, pair=False, dynamic=False, **options)


CASES = {  # rows, columns, K, sizes of groups, dtype, configuration, options
    "uneven": (600, 264, 136, [3, 0, 300, 128, 129], f16, config(), {"out_dtype": f32}),
    "rest": (300, 72, 64, [100, -5, 77], bf16, config(64), {"transpose_rhs": True}),
    "too many": (200, 200, 200, [150, 500, 3], f16, config(128, stages=2), {}),
    "nothing": (140, 64, 64, [0, 0], f16, config(64), {}),
}


DEFAULT = ["rest", "nothing"]


@pytest.mark.parametrize("name", only_long(CASES, *DEFAULT, every=2))
def test_products(name, rng, monkeypatch, some):
    m, n, k, sizes, dtype, cfg, options = CASES[name]
    transposed, out = options.get("transpose_rhs"), options.get("out_dtype", dtype)
    lhs = rng.integers(-3, 4, (m, k)).astype(dtype)
    rhs = rng.integers(-3, 4, (len(sizes), n, k) if transposed else (len(sizes), k, n)).astype(
        dtype
    )
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), m)
    want = np.zeros((m, n), f32)
    for g, (a, b) in enumerate(zip((0, *ends), ends)):
        right = rhs[g].astype(f32)
        want[a:b] = lhs[a:b].astype(f32) @ (right.T if transposed else right)
    args = [lhs, rhs, np.array(sizes, np.int32)]
    check(ragged_dot, args, cfg, options, want.astype(out), monkeypatch, some)


def check(op, args, cfg, options, want, monkeypatch, some):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 3)
    op.maker.forget()
    f = op.kernel(*args, config=cfg, **options)
    f = getattr(f, "product", f)
    for seed in some(range(2)):
        got = np.zeros(want.shape, want.dtype)
        run_on_machine(f.lower(*args, target="sm_100a"), args, [got], seed=seed)
        np.testing.assert_array_equal(got, want)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*args, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    for seed in some(range(1, 3)):
        races = plgpu.InterpretParams(detect_races=True, seed=seed)
        got = op(*args, config=cfg, **options, interpret=races)
        np.testing.assert_array_equal(got, want)
    op.maker.forget()


SUMS = {  # rows, K, columns, sizes of groups, dtype, configuration, result
    "uneven": (600, 200, 264, [3, 0, 300, 128, 129], f16, config(), f32),
    "rest": (300, 72, 64, [100, -5, 77], bf16, config(64, stages=2), bf16),
    "too many": (200, 136, 200, [150, 500, 3], f16, config(128, step=256), f16),
    "odd": (70, 33, 30, [1, 69], f16, config(64), f16),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_groups(name, rng, monkeypatch, some):
    """Rows of no group are infinite: they are left out, not multiplied with zeros."""
    m, k, n, sizes, dtype, cfg, out = SUMS[name]
    lhs, rhs = (rng.integers(-3, 4, (m, c)).astype(dtype) for c in (k, n))
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), m)
    lhs[ends[-1] :] = rhs[ends[-1] :] = np.inf
    pairs = zip((0, *ends), ends)
    want = np.stack([lhs[a:b].astype(f32).T @ rhs[a:b].astype(f32) for a, b in pairs])
    args = [lhs, rhs, np.array(sizes, np.int32)]
    check(transposed_ragged_dot, args, cfg, {"out_dtype": out}, want.astype(out), monkeypatch, some)


@pytest.mark.parametrize("cfg", [TensorMemoryConfig(), config(192), config(stages=-1)], ids=str)
def test_refusals(cfg):
    lhs, rhs, sizes = np.zeros((8, 64), f16), np.zeros((1, 64, 64), f16), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="pair=False, dynamic=False"):
        ragged_dot.kernel(lhs, rhs, sizes, config=cfg)
