"""What kernels print: arrays when they run, layouts when they are lowered."""

import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

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
    """Each element once, whatever the layout, with its index."""
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


def lines_of(run, capfd):
    """What was printed, each line of a way once (the interpreter prints for way "host" as well)."""
    plgpu.synchronize()
    lines = capfd.readouterr().out.splitlines()
    return sorted(lines)[:: 2 if run.way == "host" else 1], Counter(lines)


FLOATS = [10.0, 0.1, -2.5, 1e16, 123456790528.0, 1e-4, 1.5e-5, 0.0, -0.0, 2.0**-149, 3.4028235e38]
FLOATS += [float("inf"), float("-inf"), float("nan"), 1 / 3, 8388608.0, 0.046875, 99.95, 1e15]


def test_numbers_are_those_of_python(run, capfd):
    """The fewest digits that read back, by repr's rules; NumPy's digits are the judge."""
    x = np.array(FLOATS, np.float32)
    h = np.array([0.1, 65504, 6e-8, 1 / 3, 0.046875], np.float16)
    e = np.array([0.3125, 448, -0.001953125], ml_dtypes.float8_e4m3fn)
    i = np.array([-1, 2**31 - 1, -(2**31)], np.int32)

    def body(x_ref, h_ref, e_ref, i_ref, o_ref):
        for k in range(len(x)):
            pl.debug_print("x {} is {}", jnp.int32(k), x_ref[k])
        for k in range(len(h)):
            pl.debug_print("h {} is {}", jnp.int32(k), h_ref[k])
        for k in range(len(e)):
            pl.debug_print("e {} is {}", jnp.int32(k), e_ref[k])
        for k in range(len(i)):
            pl.debug_print("i {} is {} {}", jnp.int32(k), i_ref[k], i_ref[k].astype(jnp.uint32))
        pl.debug_print("b {} {}", x_ref[0] > 1, x_ref[0] < 1)
        o_ref[0] = x_ref[0]

    run(body, np.zeros(1, np.float32), x, h, e, i)
    want = [f"x {k} is {float(str(v))!r}" for k, v in enumerate(x)]
    want += [f"h {k} is {float(str(v))!r}" for k, v in enumerate(h)]
    want += [f"e {k} is {float(v)!r}" for k, v in enumerate(e)]
    want += [f"i {k} is {v} {v & 0xFFFFFFFF}" for k, v in enumerate(i.tolist())] + ["b True False"]
    assert lines_of(run, capfd)[0] == sorted(want)


def test_numbers_at_random(run, rng, capfd):
    """As arrays, every bit pattern alike."""
    x = rng.integers(0, 2**32, 256, dtype=np.uint32).view(np.float32)
    b = rng.integers(0, 2**16, 128, dtype=np.uint16).view(bf16)

    def body(x_ref, b_ref, o_ref):
        pl.debug_print("x {}", x_ref[...])
        pl.debug_print("b {:>24}", b_ref[...])
        o_ref[0] = x_ref[0]

    run(body, np.zeros(1, np.float32), x, b)
    lines = lines_of(run, capfd)[1]
    for k, v in enumerate(x):
        assert lines[f"x [{k}]: {float(str(v))!r}"]
    for k, v in enumerate(b):
        short = next(t for n in range(1, 10) if same(bf16.type(float(t := f"{float(v):.{n}g}")), v))
        assert lines[f"b [{k}]: {float(short)!r:>24}"]


def same(x, y):
    return x == y or (np.isnan(x) and np.isnan(y))


SPECS = {
    np.float32: [".3f", "8.2f", "<8.1f|", "^+12.4e", "*>14g", "%", ".1%", "012.3f", "=+10.1f", "E"]
    + [",.2f", "_", ",", ".3", "10", "#.0f", "#g", "_^9.0f", " .5G", "n", ".60f", "G", '">9.1f'],
    np.int32: [
        "d",
        "5d",
        "<6|",
        "^9",
        "+",
        "08d",
        "x",
        "#x",
        "#010X",
        "b",
        "#o",
        ",",
        "_b",
        "*^12,",
    ]
    + [".2f", "e", "%", "g", ">+12_d", "n"],
    bool: ["d", "5", ".1f"],
}


@pytest.mark.parametrize("dtype", SPECS, ids=lambda t: t.__name__)
def test_formats(run, capfd, dtype):
    """Python's formats of numbers, whatever precedes and follows the field."""
    values = {
        np.float32: [1234.5678, -0.5, 2.5, float("inf"), float("nan"), 0.0],
        np.int32: [0, -1, 1234567, -(2**31)],
        bool: [True, False],
    }[dtype]
    x = np.array(values, dtype)
    specs = [s.rstrip("|") for s in SPECS[dtype]]

    def body(x_ref, o_ref):
        for k in range(len(x)):
            for n, spec in enumerate(specs):
                pl.debug_print(
                    f"{{}} 100% <{{:{spec}}}> {{{{}}}}", jnp.int32(100 * k + n), x_ref[k]
                )
        o_ref[0] = 0

    run(body, np.zeros(1, np.int32), x)
    want = []
    for k, v in enumerate(x.tolist()):
        for n, spec in enumerate(specs):
            digits = "." in spec or spec[-1] in "eEfFgGn%"
            exact = v if digits or dtype != np.float32 else float(str(np.float32(v)))
            want.append(f"{100 * k + n} 100% <{exact:{spec}}> {{}}")
    assert lines_of(run, capfd)[0] == sorted(want)


def test_labels(run, capfd):
    """Who prints, on request: the point of the grid, the block of the cluster, thread and warp."""

    def body(o_ref):
        wg = lax.axis_index("t")
        pl.debug_print("all {}", wg, label=True)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 2)
            def _():
                pl.debug_print("one {:3d}", warp, label=True)

        pl.debug_print("each {:.1f}", jnp.full((2,), 1.5, np.float32), label=True)
        o_ref[lax.axis_index("c"), wg] = 0  # of each thread of a cluster

    axes = dict(grid=(2, 3), grid_names=("i", "j"), cluster=(2,), cluster_names=("c",))
    run(body, np.zeros((2, 2), np.int32), num_threads=2, thread_name="t", **axes)
    want = []
    for i, j, c, t in np.ndindex(2, 3, 2, 2):
        who = f"[grid point ({i}, {j}), block ({c},), thread {t}"
        want += [f"{who}] all {t}", f"{who}, warp 2] one   2"]
        want += [f"{who}] each [{k}]: 1.5" for k in range(2)]
    assert lines_of(run, capfd)[0] == sorted(want)


def test_label_of_a_kernel_without_axes(run, capfd):
    def body(o_ref):
        pl.debug_print("here {}", jnp.int32(3), label=True)
        o_ref[0] = 0

    run(body, np.zeros(1, np.int32))
    assert lines_of(run, capfd)[0] == ["[thread 0] here 3"]


@pytest.mark.parametrize(
    "fmt, x, error, text",
    [
        ("{:d}", 1.0, ValueError, "argument 0, float32, with the format 'd'.*Unknown format code"),
        ("{:q}", 1, ValueError, "int32, with the format 'q'"),
        ("{:.2}", 1, ValueError, "Precision not allowed"),
        ("{!r}", 1, ValueError, "no conversion"),
        ("{:{}}", 1, ValueError, "no field in it"),
        ("{", 1, ValueError, "Single '{'"),
        ("{:c}", 65, NotImplementedError, "accepted are"),
        ("{:012,}", 1, NotImplementedError, "no zeros in front of grouped"),
        ("{:\u00e9>9}", 1, NotImplementedError, "ASCII fill"),
        ("{:300}", 1, NotImplementedError, "at most 200 places"),
    ],
)
def test_formats_refused(fmt, x, error, text):
    def body(o_ref):
        pl.debug_print(fmt, jnp.asarray(x))
        o_ref[0] = 0

    with pytest.raises(error, match=text):
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((1,), np.int32), interpret=True)()


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


def test_print_layout_of_smem(capsys):
    """What was given, or inferred, in the user's elements; of views, unions, any dims."""
    tile, swizzle = plgpu.TilingTransform, plgpu.SwizzleTransform
    int4 = np.dtype(ml_dtypes.int4)

    def body(o_ref, a, nibbles, union, swizzled, gate, tiled, acc):
        plgpu.wgmma(acc, a, a.at[:, :].T)
        first, second = union
        for name, ref in dict(
            inferred=a.T,
            int4=nibbles.at[8:],
            first=first,
            second=second,
            swizzled=swizzled,
            gate=gate.reshape(8, 128),
            tiled=tiled,
        ).items():
            plgpu.print_layout(name + ": {}", ref)
        nibbles[...] = jnp.zeros(nibbles.shape, int4)
        for ref in (first, second, swizzled, gate, tiled):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        o_ref[...] = acc[...]

    f16, f32 = np.float16, np.float32
    wide = (tile((8, 64)), swizzle(128))
    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((64, 64), f32),
        scratch_types=[
            plgpu.SMEM((64, 64), f16),
            plgpu.SMEM((64, 256), int4, transforms=(tile((8, 256)), swizzle(128))),
            plgpu.RefUnion(plgpu.SMEM((8, 64), f16, transforms=wide), plgpu.SMEM((8, 8), f32)),
            plgpu.SMEM((8, 64), f16, transforms=swizzle(128)),
            plgpu.SMEM((8, 2, 64), f16, transforms=(tile((8, 1, 64)), swizzle(128))),
            plgpu.SMEM((8, 64), f16, transforms=tile((4,))),
            plgpu.ACC((64, 64)),
        ],
        interpret=True,
    )
    k()
    both = "(TilingTransform(tiling=({})), SwizzleTransform(swizzle=128))"
    assert capsys.readouterr().out.splitlines() == [
        "inferred: " + both.format("8, 64"),
        "int4: " + both.format("8, 256"),
        "first: " + both.format("8, 64"),
        "second: ()",
        "swizzled: (SwizzleTransform(swizzle=128),)",
        "gate: " + both.format("8, 1, 64"),
        "tiled: (TilingTransform(tiling=(4,)),)",
    ]
