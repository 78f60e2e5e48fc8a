"""Device functions that csrc/cuda prints for a program, as many as it uses: what each is in PTX, by
the PTX ISA. The emulated machine has its own, so it cannot tell. (Products of wgmma:
test_catalogue.py.)"""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
from test_catalogue import ENTRY, Body, catalogue, ptx_of

import pallas_mgpu as plgpu
from pallas_mgpu import pl
from pallas_mgpu.ops import matmul

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "f32", np.int32: "i32", np.uint32: "u32"}


def function(text, name):
    """The function of a program, with its comment."""
    return re.search(rf"(?:// [^\n]*\n)*FN \w+ {name}\(.*?\n}}\n", text, re.S)[0]


def shape(dims, dtype):
    return plgpu.ShapeDtypeStruct(dims, dtype)


def combining(dims, dtype, op, engine):
    """By TMA a part of an array, whose dims remain."""
    whole = [2 * n if engine == "tma" else n for n in dims]

    def body(o_ref, smem):
        part = o_ref.at[tuple(slice(n) for n in dims)]
        plgpu.copy_smem_to_gmem(smem, part, reduction_op=op, engine=engine)

    return plgpu.kernel(
        body, out_type=shape(whole, dtype), scratch_types=[plgpu.SMEM(dims, dtype)]
    ).lower()


def to_a_block(dtype, op):
    def body(x_ref, o_ref, smem, bar):
        plgpu.async_store_smem(x_ref[...], smem, bar, cluster_idx=0, cluster_dim="c", atomic=op)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]

    scratch = [plgpu.SMEM((128,), dtype), plgpu.Barrier(num_arrivals=2)]
    x = shape((128,), dtype)
    kernel = plgpu.kernel(
        body, out_type=x, scratch_types=scratch, cluster=(2,), cluster_names=("c",)
    )
    return kernel.lower(x)


def atomic(dtype, op, space, returns):
    def body(x_ref, o_ref, smem):
        far = {"global": o_ref, "shared": smem}.get(space)
        if space == "cluster":
            far = plgpu.cluster_ref(smem, {"c": 0})
        given = [x_ref[...]] * (2 if op == "cas" else 1)
        if returns:
            x = getattr(pl, f"atomic_{op}")(far, ..., *given)
            o_ref[...] = x
        else:
            getattr(plgpu, f"atomic_{op}")(far, *given)

    x = shape((128,), dtype)
    scratch = [plgpu.SMEM((128,), dtype)]
    return plgpu.kernel(
        body, out_type=x, scratch_types=scratch, cluster=(2,), cluster_names=("c",)
    ).lower(x)


def product(dtype, acc):
    k = 32 // np.dtype(dtype).itemsize

    def body(a, b, o):
        o[...] = plgpu.mma(o[...] * 0, a[...], b[...])

    given = shape((64, k), dtype), shape((k, 8), dtype)
    return plgpu.kernel(body, out_type=shape((64, 8), acc)).lower(*given)


def cases():
    """name of a function: (its program, a call of it, what the call is)"""
    made = {}
    numbers = {BF16: "bf16{1}", F16: "f16{1}", F32: "2.0f", np.int32: "5", np.uint32: "5u"}
    bits = {BF16: "1", F16: "1", F32: "0f40000000", np.int32: "5", np.uint32: "5"}
    integers = ("add", "umin", "umax", "smin", "smax", "inc", "dec", "and", "or", "xor")
    floats = ("add", "min", "max")

    def element(dtype, op):
        """The type of an element, as the operation sees it."""
        if op in ("and", "or", "xor"):
            return "b32", "u32"
        if dtype in (np.int32, np.uint32):
            return ("s32", "i32") if op[0] == "s" else ("u32", "u32")
        return NAMES[dtype], NAMES[dtype]

    tma = "cp.reduce.async.bulk.tensor.%dd.global.shared::cta.%s.tile.bulk_group [8192, {%s}], [64]"
    for rank in range(1, 6):
        at = ",".join(str(k + 1) for k in range(rank))
        made[f"tma_add_{rank}d"] = (
            combining((2, 2, 2, 2, 32)[-rank:], np.int32, "add", "tma"),
            f"((const TensorMap*)8192, 64, {at.replace(',', ', ')});",
            tma % (rank, "add", at),
        )
    for dtype, ops in ((np.int32, integers), (F16, floats), (BF16, floats), (F32, ("add",))):
        for op in ops:
            plain = op if op in floats else op.lstrip("us") if op[1:] in floats else op
            of, type_ = element(dtype, op)
            if dtype in (np.int32, F16):
                made[f"tma_{plain}_2d"] = (
                    combining((8, 32), dtype, op, "tma"),
                    "((const TensorMap*)8192, 64, 1, 2);",
                    tma % (2, plain, "1,2"),
                )
            half = ".noftz" if dtype in (F16, BF16) and op == "add" else ""
            made[f"bulk_{plain}_{type_}"] = (
                combining((8, 32), dtype, op, "bulk"),
                "((void*)8192, 64, 32);",
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{plain}{half}.{of}"
                " [8192], [64], 32",
            )
    for op in ("inc", "dec"):
        made[f"red_{op}_u32_global"] = (
            combining((8, 32), np.uint32, op, "plain"),
            "((u32*)8192, 5);",
            f"red.relaxed.gpu.global.{op}.u32 [8192], 5",
        )
    for dtype in (np.int32, np.uint32):
        for op in ("add", "min", "max", "and", "or", "xor"):
            of = "b32" if op in ("and", "or", "xor") else "s32" if dtype is np.int32 else "u32"
            made[f"red_async_{op}_{NAMES[dtype]}"] = (
                to_a_block(dtype, op),
                "(64, 5, 72);",
                "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
                f".{op}.{of} [64], 5, [72]",
            )
    spaces = {"global": "gpu.global", "shared": "cta.shared", "cluster": "cluster.shared::cluster"}
    for dtype, ops in (
        (np.int32, ("add", "max", "min", "and", "or", "xor", "xchg", "cas")),
        (np.uint32, ("add", "max", "min")),
        (F32, ("add", "xchg")),
        (F16, ("add",)),
        (BF16, ("add",)),
    ):
        for op in ops:
            for space, where in spaces.items():
                for returns in (True, False):
                    if op in ("xchg", "cas") and not returns or (op != "add" and space == "shared"):
                        continue
                    of = {"xchg": "b32", "cas": "b32", "and": "b32", "or": "b32", "xor": "b32"}
                    of = of.get(op, {np.int32: "s32"}.get(dtype, NAMES[dtype]))
                    of = f"noftz.{of}" if dtype in (F16, BF16) else of
                    verb, result = ("atom", "a, ") if returns else ("red", "")
                    name = {"xchg": "exch"}.get(op, op)
                    address = f"({NAMES[dtype]}*)8192" if space == "global" else "8192"
                    given = f"{numbers[dtype]}, {numbers[dtype]}" if op == "cas" else numbers[dtype]
                    inside = f"{bits[dtype]}, {bits[dtype]}" if op == "cas" else bits[dtype]
                    inside = str(0x40000000) if op == "xchg" and dtype is F32 else inside
                    made[f"{verb}_{op}_{NAMES[dtype]}_{space}"] = (
                        atomic(dtype, op, space, returns),
                        f"({address}, {given});",
                        f"{verb}.relaxed.{where}.{name}.{of} {result}[8192], {inside}",
                    )
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    for dtype, acc, step, of in (
        (F16, F32, 16, "f16"),
        (BF16, F32, 16, "bf16"),
        (e4m3, F32, 32, "e4m3"),
        (e5m2, F32, 32, "e5m2"),
        (np.int8, np.int32, 32, "s8"),
        (np.uint8, np.int32, 32, "u8"),
    ):
        to, c = ("f32", "f32") if acc is F32 else ("s32", "i32")
        made[f"mma_m16n8k{step}_{to}_{of}"] = (
            product(dtype, acc),
            f"(({c}*)out, a, b);",
            f"mma.sync.aligned.m16n8k{step}.row.col.{to}.{of}.{of}.{to}"
            " {a,b,c,d}, {1,2,3,4}, {5,6}, {e,f,g,h}",
        )
    return made


@functools.cache
def compiled():
    """{name: (what it is in PTX, what it must be)}; one compilation for all."""
    made, texts, entries, names = cases(), [], [], []
    for name, (lowered, call, _) in made.items():
        texts.append(function(lowered.as_text("cuda"), name))
        before = "u32 a[4] = {1, 2, 3, 4}, b[2] = {5, 6}; " if name.startswith("mma") else ""
        entries.append(ENTRY % (f"case_{len(names)}_", before + name + call))
        names.append(name)
    parts = re.split(r"\.entry case_(\d+)_", ptx_of(catalogue() + "".join(texts + entries)))[1:]
    found = {names[int(k)]: Body(body).asm for k, body in zip(parts[::2], parts[1::2])}
    return {name: (found[name], made[name][2]) for name in names}


def test_functions():
    """One instruction each, with its operands in their places."""
    assert len(compiled()) > 80
    for name, (got, want) in compiled().items():
        assert got == [want], name


def test_least_of_halves():
    """No instruction: compare-and-swap until nobody else was there."""
    name = "atom_min_f16_global"
    text = function(atomic(F16, "min", "global", True).as_text("cuda"), name)
    call = f"out[0] = {name}((f16*)8192, f16{{1}}).bits;"
    ptx = [x.strip() for x in ptx_of(catalogue() + text + ENTRY % ("least", call)).splitlines()]
    first = next(k for k, x in enumerate(ptx) if "ld.relaxed.gpu.global.b16" in x)
    swap = next(k for k, x in enumerate(ptx) if "atom.relaxed.gpu.global.cas.b16" in x)
    assert first < swap
    (seen,) = re.findall(r"cas\.b16 (%\w+), \[%?\w+\], %\w+, %\w+;", ptx[swap])
    after = [x for x in ptx[swap:] if re.match(r"setp\.(ne|eq)\.\w16", x)]
    assert after and seen in after[0]
    assert any(re.match(r"@!?%p\d+ bra", x) for x in ptx[swap:])


def test_registers_of_ptx():
    """Element k of what is read of an accumulator is its register first + k; all begin at zero
    where a product does not overwrite them."""

    def body(a, b, o, p, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(a, a_smem, bar)
        plgpu.copy_gmem_to_smem(b, b_smem, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            @pl.loop(0, 3)
            def _(_):
                plgpu.wgmma(acc, a_smem, b_smem.T)

            return acc[...], plgpu.wgmma_accumulator_load(acc.at[:, 64:128])

        o[...], p[...] = pl.run_scoped(product, plgpu.ACC((128, 136)))

    given = shape((128, 64), F16), shape((136, 64), F16)
    scratch = [plgpu.SMEM(x.shape, F16) for x in given] + [plgpu.Barrier(num_arrivals=2)]
    outs = [shape((128, 136), F32), shape((128, 64), F32)]
    text = plgpu.kernel(body, out_type=outs, scratch_types=scratch).lower(*given).as_text("cuda")
    reads = re.findall(r"FN void (\w+)_read_(\d+)_(\d+)\(f32\* d\) {(.*?)\n}", text, re.S)
    assert sorted((int(first), int(n)) for _, first, n, _ in reads) == [
        (0, 136),
        (32, 32),
        (100, 32),
    ]
    for acc, first, n, code in reads:
        seen = []
        for statement in code.split("asm volatile")[1:]:
            moves = re.findall(rf"mov\.f32 %(\d+), {acc}_(\d+);", statement)
            outputs = re.findall(r'"=f"\(d\[(\d+)\]\)', statement)
            assert [int(k) for k, _ in moves] == list(range(len(outputs)))
            seen += [(int(d), int(r)) for d, (_, r) in zip(outputs, moves, strict=True)]
        assert seen == [(k, int(first) + k) for k in range(int(n))]
    (zero,) = re.findall(r"FN void \w+_zero\(\) {(.*?)\n}", text, re.S)
    found = re.findall(rf"mov\.f32 {acc}_(\d+), 0f00000000;", zero)
    assert found == [str(k) for k in range(136)]


@pytest.mark.parametrize("dtype,name", [(F16, "f16"), (ml_dtypes.bfloat16, "bf16")])
def test_registers_of_ptx_as_words(dtype, name):
    """Word k of what is read in 16 bits has the registers 2 k and 2 k + 1, the lower one first."""
    a, b = shape((256, 128), dtype), shape((128, 256), dtype)
    text = matmul.kernel(a, b).lower(a, b).as_text("cuda")
    found = re.findall(rf"FN void (\w+)_read_{name}_0_(\d+)\(u32\* d\) {{(.*?)\n}}", text, re.S)
    ((acc, n, code),) = found
    seen = []
    for statement in code.split("asm volatile")[1:]:
        joined = re.sub(r'"\s*"', "", statement)
        pattern = rf"cvt\.rn\.{name}x2\.f32 %(\d+), {acc}_(\d+), {acc}_(\d+);"
        words = [tuple(map(int, x)) for x in re.findall(pattern, joined)]
        outputs = re.findall(r'"=r"\(d\[(\d+)\]\)', statement)
        assert [k for k, *_ in words] == list(range(len(outputs)))
        seen += [(int(d), low, high) for d, (_, high, low) in zip(outputs, words, strict=True)]
    assert seen == [(k, 2 * k, 2 * k + 1) for k in range(int(n) // 2)]
    assert f"{acc}_read_0" not in text and "cvt_rn_" not in text.split("__global__")[1]
