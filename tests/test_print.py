"""What kernels print: arrays when they run, layouts when they are lowered."""

import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl

bf16 = np.dtype(ml_dtypes.bfloat16)


def printed(out, prefix):
    """index -> text of the value, and how often each index was printed"""
    found = re.findall(rf"^{prefix}\[([\d, ]*)\]: (\S+) end$", out, flags=re.M)
    return {tuple(map(int, i.split(", "))): v for i, v in found}, Counter(i for i, _ in found)


@pytest.mark.parametrize(
    "shape, dtype, layout",
    [
        ((5,), np.int32, None),
        ((3, 43), np.float32, None),
        ((2, 3, 4), bf16, None),
        ((64, 8), np.float16, "WGMMA"),
        ((70, 9), np.float32, "WGMMA"),
        ((64, 16), np.int32, "ROW"),
        ((4, 2), np.uint8, None),
        ((130,), bool, None),
        ((1, 1), np.float32, None),
    ],
)
def test_debug_print_of_arrays(run, rng, capfd, shape, dtype, layout):
    """Each element once, whatever the layout, behind its index."""
    x = rng.integers(0, 2 if dtype is bool else 100, shape).astype(dtype)

    def body(x_ref, o_ref):
        if layout is None:
            v = x_ref[...]
        else:
            v = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        if layout == "ROW":
            v = v.sum(1)
        o_ref[...] = v
        pl.debug_print("x{{%}} {} end", v)

    want = x.sum(1, dtype=dtype) if layout == "ROW" else x
    got = run(body, want, x)
    plgpu.synchronize()
    np.testing.assert_array_equal(got, want)
    values, times = printed(capfd.readouterr().out, "x{%} ")
    assert values.keys() == set(np.ndindex(want.shape))
    assert set(times.values()) == {2 if run.way == "host" else 1}  # the interpreter printed as well
    for index, text in values.items():
        number = {"True": 1, "False": 0}.get(text)
        assert float(text if number is None else number) == float(want[index])


def test_debug_print_of_a_splat(run, capfd):
    def body(o_ref):
        v = jnp.full((2, 3), 7)
        o_ref[...] = v
        pl.debug_print("s {} end", v)

    run(body, np.zeros((2, 3), np.int32))
    plgpu.synchronize()
    values, times = printed(capfd.readouterr().out, "s ")
    assert values == {i: "7" for i in np.ndindex(2, 3)}


def test_print_layout(capsys):
    """One line each, when the kernel is lowered; nothing when it runs again."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, o_ref, plain, tiled, acc):
        a = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.print_layout("{{a}}: {}", a)
        plgpu.print_layout("row: {}", a.astype(jnp.float32).sum(1))
        t = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.print_layout("t: {}", t)
        plain[...] = x_ref[...]
        b = plain[...]
        plgpu.print_layout("b: {}", b)
        plgpu.print_layout("plain: {}", plain)
        tiled[...] = a
        plgpu.print_layout("tiled: {}", tiled.at[:32])
        plgpu.wgmma(acc, tiled, tiled.T)
        plgpu.print_layout("acc: {}", acc[...])
        plgpu.print_layout("c: {}", jnp.zeros((3,)))
        o_ref[...] = t

    x = np.zeros((64, 64), np.float16)
    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM(x.shape, x.dtype),
            plgpu.SMEM(x.shape, x.dtype, transforms=swizzled),
            plgpu.ACC((64, 64)),
        ],
        interpret=True,
    )
    k(x)
    assert capsys.readouterr().out.splitlines() == [
        "{a}: WGMMA",
        "row: WGMMA_ROW",
        "t: WGMMA_TRANSPOSED",
        "b: WG_STRIDED((64, 64), 8)",
        "plain: ()",
        "tiled: (TilingTransform(tiling=(8, 64)), SwizzleTransform(swizzle=128))",
        "acc: WGMMA",
        "c: WG_SPLAT((3,))",
    ]
    k(x)
    assert capsys.readouterr().out == ""
