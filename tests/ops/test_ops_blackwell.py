"""`ops.matmul` for Blackwell: the interpreter and the emulated machine give NumPy's products, and
both targets' compilers take the programs, without local memory."""

import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from compiler import sass
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryConfig, matmul

f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
C = TensorMemoryConfig

CASES = {  # shape, configuration, SMs, dtypes, options
    "one block": ((128, 128, 64), C(128, False), 4, (f16, f16), {}),
    "pair": ((256, 256, 128), C(256), 4, (bf16, bf16), {}),
    "many tiles": ((300, 520, 200), C(128, False, 3), 2, (f16, f16), {"bias": True}),
    "many tiles, pairs": ((696, 520, 136), C(256, stages=3), 4, (bf16, bf16), {}),
    "dealt out": ((300, 520, 200), C(128, False, 3, dynamic=False), 2, (f16, f16), {}),
    "dealt out, pairs": ((696, 520, 136), C(256, dynamic=False), 4, (bf16, bf16), {"bias": True}),
    "group": ((520, 264, 72), C(64, False, 2, 1, 2), 2, (f16, f16), {"activation": "relu"}),
    "long step": ((264, 264, 320), C(256, step=256), 2, (f16, f16), {"out_dtype": "float32"}),
    "one column of tiles": ((1, 64, 8), C(64, False), 4, (f16, f16), {}),
    "transposed": ((296, 272, 88), C(128), 4, (f16, f16), {"ta": True, "tb": True, "bias": True}),
    "A transposed": ((136, 200, 72), C(192, False), 4, (bf16, bf16), {"ta": True}),
    "8 bits": ((304, 272, 320), C(256), 4, (E4M3, E5M2), {"out_dtype": "float32"}),
    "8 bits, transposed": ((272, 144, 160), C(128), 4, (E5M2, E5M2), {"ta": True, "tb": True}),
    "scales": ((272, 144, 160), C(128), 4, (E4M3, E4M3), {"scales": "each"}),
    "scales of blocks": ((272, 272, 304), C(128), 4, (E4M3, E5M2), {"scales": "blocks"}),
    "scales of blocks, one block": (
        (300, 208, 704),
        C(64, False),
        2,
        (E4M3, E4M3),
        {"scales": "blocks", "bias": True, "out_dtype": "float32", "activation": "relu"},
    ),
    "one scale": ((144, 80, 160), C(64, False), 2, (E4M3, E4M3), {"scales": "one", "bias": True}),
}


def values(rng, shape, dtype):
    return rng.integers(-3, 4, shape).astype(dtype)


DEFAULT = [
    "many tiles, pairs",
    "dealt out",
    "group",
    "A transposed",
    "8 bits, transposed",
    "one scale",
]


@pytest.mark.parametrize("name", only_long(CASES, *DEFAULT, every=2))
def test_products(name, rng, monkeypatch, some):
    (m, n, k), config, sms, (ta_, tb_), options = CASES[name]
    options = dict(options)
    ta, tb = options.pop("ta", False), options.pop("tb", False)
    a, b = values(rng, (k, m) if ta else (m, k), ta_), values(rng, (n, k) if tb else (k, n), tb_)
    operands, want = {}, (a.T if ta else a).astype(f32) @ (b.T if tb else b).astype(f32)
    scales = options.pop("scales", None)
    if options.pop("bias", False):
        operands["bias"] = values(rng, n, bf16 if ta_.itemsize == 1 else ta_)
    if scales:
        along = -(-k // 128)
        shapes = {"each": ((m,), (n,)), "one": ((1,), (1,))}
        shapes["blocks"] = (m, along), (-(-n // 128), along)
        for operand, shape in zip(("scale_a", "scale_b"), shapes[scales]):
            operands[operand] = np.exp2(values(rng, shape, f32))
        if scales == "blocks":
            left = np.repeat(operands["scale_a"], 128, 1)[:, :k]
            right = np.repeat(np.repeat(operands["scale_b"], 128, 0), 128, 1)[:n, :k]
            left = left * (a.T if ta else a).astype(f32)
            want = left @ (right.T * (b.T if tb else b).astype(f32))
        else:
            want = want * operands["scale_a"][:, None] * operands["scale_b"]
    if "bias" in operands:
        want = want + operands["bias"].astype(f32)
    if options.get("activation") == "relu":
        want = np.maximum(want, 0)
    out = np.dtype(options.get("out_dtype", bf16 if ta_.itemsize == 1 else ta_))
    want = want.astype(out)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: sms)
    how = dict(config=config, transpose_a=ta, transpose_b=tb, **options)
    f = matmul.kernel(a, b, **operands, **how)
    assert not hasattr(f, "pads")
    args = [a, b, *operands.values()]
    lowered = f.lower(*args, target="sm_100a")
    for seed in some(range(2)):
        got = np.zeros((m, n), out)
        run_on_machine(lowered, args, [got], seed=seed)
        np.testing.assert_array_equal(got, want)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*args, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    matmul.maker.forget()  # kernels for so few SMs
    races = plgpu.InterpretParams(detect_races=True)
    got = matmul(a, b, **operands, **how, interpret=races)
    matmul.maker.forget()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "config",
    [C(96), C(64, True), C(192, True), C(stages=-1), C(buffers=0), C(step=64), C(step=384)],
    ids=str,
)
def test_what_a_configuration_may_be(config):
    a = np.zeros((64, 64), f16)
    with pytest.raises(ValueError, match="TensorMemoryConfig"):
        matmul.kernel(a, a, config=config)


def test_batches(rng, monkeypatch):
    """Elements of a batch are launched together: no block takes over another one's tiles."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 2)
    a, b = values(rng, (2, 300, 72), f16), values(rng, (72, 136), f16)
    matmul.maker.forget()
    f = matmul.kernel(a[0], b, config=C(64, False), interpret=True)
    matmul.maker.forget()
    got = plgpu.vmap(f, (0, None))(a, b)
    np.testing.assert_array_equal(got, (a.astype(f32) @ b.astype(f32)).astype(f16))


def test_scales_of_blocks():
    """256 columns of sums have no room in registers."""
    a, s = np.zeros((256, 256), E4M3), np.zeros((256, 2), f32)
    with pytest.raises(ValueError, match="tile_n is 64 or 128"):
        matmul.kernel(a, a, scale_a=s, scale_b=np.zeros((2, 2), f32), config=C())


@pytest.mark.skipif(not sass.nvdisasm(), reason="needs nvdisasm")
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype, steps", [(bf16, 4), (E4M3, 4)], ids=str)
def test_machine_code(pair, dtype, steps):
    """A slot is four products and a commit, a tile eight loads of 32 registers; nothing of it lies
    in local memory."""
    a = np.zeros((2048, 2048), dtype)
    lowered = matmul.kernel(a, a, config=C(256, pair)).lower(a, a, target="sm_100a")
    found = Counter(re.findall(r"\b([A-Z]+)[\w.]*", lowered.as_text("sass")))
    assert found["UTCHMMA"] + found["UTCQMMA"] == steps
    assert found["UTCBAR"] == 2 and found["UTMALDG"] == 2
    assert found["LDTM"] == 8
    assert not found["LDL"] + found["STL"]


@pytest.mark.parametrize("cfg", [(192, False, 0, 2), (256, False, 0, 3)], ids=repr)
def test_store_buffers_of_many_tiles(cfg, rng, monkeypatch, some):
    """Chunks of a tile that are no multiple of the buffers: the next tile waits for the right
    store."""
    config = TensorMemoryConfig(*cfg, dynamic=False)
    a = rng.integers(-3, 4, (384, 64)).astype(np.float16)
    b = rng.integers(-3, 4, (64, config.tile_n)).astype(np.float16)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 1)
    matmul.maker.forget()
    lowered = matmul.kernel(a, b, config=config).lower(a, b, target="sm_100a")
    matmul.maker.forget()
    want = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    for seed in some(range(3)):
        got = np.zeros(want.shape, want.dtype)
        run_on_machine(lowered, [a, b], [got], seed=seed)
        np.testing.assert_array_equal(got, want)
