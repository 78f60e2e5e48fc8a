"""`ops.gated_matmul` for Blackwell: the interpreter, with its races, and the emulated machine give
the products of float64; both targets' compilers take the programs, without local memory."""

import ml_dtypes
import numpy as np
import pytest
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryConfig as C
from pallas_mgpu.ops import gated_matmul

f16, bf16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CASES = {  # M, K, N; dtype, one array of weights, transposed, return_products, configuration
    "tiles": ((130, 136, 200), f16, False, False, False, C(128, False)),
    "one array, products": ((200, 72, 136), bf16, True, False, True, C(256, False, buffers=3)),
    "pair": ((300, 130, 264), f16, False, False, True, C(256, True)),
    "pair, one array, transposed": ((260, 128, 136), bf16, True, True, False, C(256, True, 2)),
    "dealt out": ((100, 64, 300), f16, False, True, True, C(128, False, 2, dynamic=False)),
    "up begins anywhere": ((70, 64, 132), f16, True, False, True, C(128, False)),  # nor TMA stores
}


@pytest.mark.parametrize(
    "name", only_long(CASES, "one array, products", "up begins anywhere", "pair", every=2)
)
def test_products(name, rng, monkeypatch, some):
    (m, k, n), dtype, packed, transposed, products, cfg = CASES[name]
    x = rng.standard_normal((m, k)).astype(dtype)
    gate, up = (rng.standard_normal((2, k, n)) * k**-0.5).astype(dtype)
    both = x.astype(np.float64) @ np.concatenate([gate, up], 1).astype(np.float64)
    wants = [both[:, :n] / (1 + np.exp(-both[:, :n])) * both[:, n:]] + [both] * products
    weights = [np.concatenate([gate, up], 1)] if packed else [gate, up]
    args = [x] + [np.ascontiguousarray(w.T) if transposed else w for w in weights]
    options = {"transpose_b": transposed, "return_products": products, "config": cfg}
    unit = 3e-3 if dtype == f16 else 2e-2

    def compare(got):
        for a, want in zip(got, wants, strict=True):
            np.testing.assert_allclose(a.astype(np.float64), want, rtol=unit, atol=unit)

    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 2)
    gated_matmul.maker.forget()
    f = gated_matmul.kernel(*args, **options)
    given = args
    if hasattr(f, "product"):  # rows that TMA cannot read
        given = [a if pad is None else pad(a) for a, pad in zip(args, f.pads)]
        f = f.product
    for seed in some(range(3)):
        got = [np.zeros(want.shape, dtype) for want in wants]
        run_on_machine(f.lower(*given, target="sm_100a"), given, got, seed=seed)
        compare(got)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*given, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    for seed in some(range(3)):
        races = plgpu.InterpretParams(detect_races=True, seed=seed)
        got = gated_matmul(*args, **options, interpret=races)
        compare(got if products else [got])
    gated_matmul.maker.forget()


@pytest.mark.parametrize(
    "m, n, packed",
    [
        (1, 24, True),
        (64, 14336, False),
        (4096, 14336, False),
        (4096, 14336, True),
        (512, 1028, True),
    ],
)
def test_chosen(m, n, packed, monkeypatch):
    """What a call on such a GPU runs: one kernel without local memory."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    spec = plgpu.ShapeDtypeStruct
    given = [spec((m, 4096), bf16)] + [spec((4096, n * (1 + packed)), bf16)] * (2 - packed)
    f = gated_matmul.kernel(*given)
    low = f.lower(*given)
    assert "tcgen05_mma" in low.as_text("cuda")
    used = low.resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.parametrize(
    "cfg, n, words",
    [
        (C(64, False), 64, "a tile_n of 128 or 256, with pair 256"),
        (C(128, True), 64, "a tile_n of 128 or 256, with pair 256"),
        (C(256, True), 132, "with 132 columns of the gate, up begins where TMA cannot read"),
        (C(100, False), 64, "a TensorMemoryConfig has a tile_n"),
    ],
    ids=repr,
)
def test_refusals(cfg, n, words):
    x, w = np.zeros((8, 64), f16), np.zeros((64, 2 * n), f16)
    with pytest.raises(ValueError, match=words):
        gated_matmul.kernel(x, w, config=cfg)
