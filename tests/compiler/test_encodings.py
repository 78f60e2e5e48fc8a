"""Encodings of tcgen05 instructions against records of what a compiler proven on the GPU emits.

data/encodings.json has a record a line; the meaning of its fields: `in` are the parameters of the
case (defaults in PRODUCT below), `issued` the instructions, `rows` those of a product, one for each
step. Two differences are accepted: uint8 is unsigned here (type code 0 of the PTX ISA; the records
have the code of signed bytes), and bits 46 to 48 of matrix descriptors are 0b001, as the PTX ISA's
table of the shared memory descriptor has it (the records leave them 0)."""

import functools
import json
from pathlib import Path

import pytest

from pallas_mgpu import _core

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "s32": "int32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1fn",
    "i8": "int8",
    "u8": "uint8",
    "e8m0": "float8_e8m0fnu",
    "u2": "uint2",
}
BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "i8": 8, "u8": 8, "e2m1": 4, "f32": 32}
KINDS = {"f16": "f16", "bf16": "f16", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "i8": "i8", "u8": "i8"}
PRODUCT = {
    "m": 128,
    "n": 128,
    "k": 128,
    "dtype": "f16",
    "dtype_b": None,
    "acc": "f32",
    "sw_a": 128,
    "sw_b": 128,
    "a_mn_major": False,
    "b_k_major": False,
    "a_tmem": False,
    "accumulate": False,
    "collective": False,
    "scale": None,
    "block": 32,
    "sparse": False,
}
FIXED_BITS = 0b001 << 46
SIGNED = 1 << 7 | 1 << 10


@functools.cache
def records(*kinds):
    lines = (Path(__file__).parent / "data" / "encodings.json").read_text()
    return [r for r in json.loads(lines) if r["kind"] in kinds and "refused" not in r]


def operand(mn, k, swizzle, dtype, k_major):
    """Tiles of 8 rows of a swizzle, row-major among themselves, which is how the records have
    them."""
    columns = k if k_major else mn
    atom = 8 * swizzle
    return k_major, swizzle, atom, columns * BITS[dtype] // 8 // swizzle * atom


def product(case):
    c = PRODUCT | case
    a, b, scale, sparse = c["dtype"], c["dtype_b"] or c["dtype"], c["scale"], c["sparse"]
    kind = KINDS.get(a)
    if scale:
        steps = 32 if BITS[a] == 8 else 64
        of_step = steps * (1 + sparse) // c["block"]
        kind = "mxf8f6f4" if BITS[a] == 8 else "mxf4nvf4"
        kind += f".block_scale.scale_vec::{of_step}X"
    return _core.tcgen05_product(
        kind,
        DTYPES[a],
        DTYPES[b],
        "int32" if kind == "i8" else DTYPES[c["acc"]],
        c["m"],
        c["n"],
        c["k"],
        scale=DTYPES[scale] if scale else None,
        block=c["block"] if scale else 0,
        sparse=sparse,
        pair=c["collective"],
        a_in_tmem=c["a_tmem"],
        in_a=operand(c["m"], c["k"] // (1 + sparse), c["sw_a"], a, not c["a_mn_major"]),
        in_b=operand(c["n"], c["k"], c["sw_b"], b, c["b_k_major"]),
    )


def constant(address):
    """ "tmem+32" without the name, "tmem+0x100040": 0x100040."""
    return sum(int(x, 0) for x in address.split("+") if not x.startswith("tmem"))


def moves(column):
    """Addresses as distances from the first."""
    if not isinstance(column[0], str):
        return list(column)
    at = [constant(x) for x in column]
    return [x - at[0] for x in at]


@pytest.mark.parametrize("record", records("mma"), ids=lambda r: r["id"])
def test_products(record):
    (emitted,) = [x for x in record["issued"] if "rows" in x]
    name, a, b, steps = product(record["in"])
    assert emitted["ptx"].split()[0] == name
    if "a_static" in emitted:
        assert int(emitted["a_static"], 16) | FIXED_BITS == a
    assert int(emitted["b_static"], 16) | FIXED_BITS == b
    want = dict(zip(emitted["columns"], zip(*emitted["rows"], strict=True), strict=True))
    fields = ["d", "i_desc", "a", "b", "first", "scale_a", "scale_b", "sp_meta"]
    have = dict(zip(fields, zip(*steps, strict=True), strict=True))
    code = [int(x, 16) for x in want.pop("i_desc")]
    if record["in"].get("dtype") == "u8":
        code = [x & ~SIGNED for x in code]
    assert code == list(have["i_desc"])
    # the first step of each part of the columns does as the product says, all others add
    accumulates = record["in"].get("accumulate", False) is True
    adds = [x == "1" for x in want.pop("enable_d")]
    assert adds == [accumulates or not first for first in have["first"]]
    for field, column in want.items():
        assert moves(column) == list(have[field]), field


def widths(case):
    """Columns of the instructions of a product, with where each begins."""
    _, _, _, steps = product(case)
    return [((s[1] >> 17 & 63) * 8, s[0]) for s in steps if s[4]]


@pytest.mark.parametrize("n", range(8, 513, 8))
def test_any_number_of_columns_is_legal_instructions(n):
    parts = widths({"n": n, "b_k_major": True, "k": 64})
    assert sum(w for w, _ in parts) == n and all(w <= 256 for w, _ in parts)
    assert [at for _, at in parts] == [256 * k for k in range(len(parts))]


@pytest.mark.parametrize("n", range(64, 513, 64))
def test_halves_of_a_product_of_64_rows(n):
    """Each half of the columns lies in 16 of each 32 lanes. A part that begins inside a row of a
    swizzle ends with it, as the hardware finds the next row by the distance from the first."""
    parts = widths({"n": n, "m": 64, "k": 64})
    low = [(w, at) for w, at in parts if at < 16 << 16]
    high = [(w, at - (16 << 16)) for w, at in parts if at >= 16 << 16]
    for half in (low, high):
        assert sum(w for w, _ in half) == n // 2
        at = 0
        for width, start in half:
            assert start == at and width <= 256
            at += width
    _, _, _, steps = product({"n": n, "m": 64, "k": 64})
    for _d, code, _, b, first, *_ in steps:
        column, width = b // 1024 * 64 + b % 128 // 2, (code >> 17 & 63) * 8
        assert not first or column % 64 == 0 or column % 64 + width <= 64
