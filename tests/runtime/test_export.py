"""`Lowered.export`: a process without the kernel's Python calls it; the C launcher tells the driver
what the package tells it, and runs on a GPU."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl

HERE = Path(__file__).parent
DRIVER = HERE / "recording_driver"
CC = shutil.which("cc") or shutil.which("gcc")
needs_cc = pytest.mark.skipif(not CC, reason="needs a C compiler")
f16, f32 = np.dtype(np.float16), np.dtype(np.float32)
M = plgpu.dim("rows", max=4096, multiple_of=8)
ELEMENTS = {"uint8": 0, "float16": 6, "float32": 7, "int32": 3, "bfloat16": 9}


def spec(*shape, dtype=np.float16):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def lowered(op, *args, **options):
    return op.kernel(*args, **options).lower(*args, target="sm_90a")


def open_rows():
    """Rows that are known at the call only, and a grid and a scalar that follow from them."""

    def body(x, o, total):
        i = lax.axis_index("i")
        rows = pl.ds(i * 8, 8)
        o[rows] = x[rows] * 2

        @pl.when(i == 0)
        def _():
            total[0] = x.shape[0] // 8

    outs = spec(M, 64, dtype=f32), spec(1, dtype=np.int32)
    return plgpu.kernel(
        body, out_type=outs, in_shapes=((M, 64),), grid=(M // 8,), grid_names=("i",)
    )


def along_x():
    """Of any number of rows, for which CUDA's y may have too few blocks."""

    def body(x, o):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        o[i, j] = x[i, j] * 2

    rows = plgpu.dim("rows")
    return plgpu.kernel(
        body,
        out_type=spec(rows, 3, dtype=f32),
        in_shapes=((rows, 3),),
        grid=(rows, 3),
        grid_names=("i", "j"),
    )


def clustered():
    def body(x, o, smem, ready):
        i, c = lax.axis_index("i"), lax.axis_index("c")
        plgpu.copy_gmem_to_smem(x.at[pl.ds(64 * i, 64)], smem, ready, collective_axes="c")
        plgpu.barrier_wait(ready)
        o[i * 2 + c] = smem[...] + 1

    return plgpu.kernel(
        body,
        out_type=spec(4, 64, 32, dtype=f32),
        grid=(2,),
        grid_names=("i",),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[plgpu.SMEM((64, 32), f32), plgpu.Barrier()],
    )


def counting():
    """Blocks that take tiles from a counter."""

    def body(x, o):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            (i,) = info.index
            o[i] = x[i] + 1

    return plgpu.kernel(body, out_type=spec(500, 128, dtype=f32), grid=(500,), grid_names=("i",))


def cancelling():
    """The clusters that cluster launch control leaves take tiles from a counter."""

    def body(x, o, tmem):
        for k in range(2):

            @plgpu.dynamic_scheduling_loop(("i",))
            def _(info, k=k):
                (i,) = info.index
                o[k, i] = x[i] + k

    return plgpu.kernel(
        body,
        out_type=spec(2, 30, 128, dtype=f32),
        grid=(30,),
        grid_names=("i",),
        scratch_types=[plgpu.TMEM((128, 8), f32)],
    )


# name: (the lowered kernel, sizes of a call)
CASES = {
    "product": (lambda: lowered(ops.matmul, spec(192, 128), spec(128, 256)), []),
    "softmax": (lambda: lowered(ops.softmax, spec(40, 1000)), []),
    "open_rows": (lambda: open_rows().lower(spec(64, 64, dtype=f32), target="sm_90a"), [64]),
    "along_x": (lambda: along_x().lower(spec(64, 3, dtype=f32), target="sm_90a"), [64]),
    "clustered": (lambda: clustered().lower(spec(128, 32, dtype=f32), target="sm_90a"), []),
    "cancelling": (lambda: cancelling().lower(spec(30, 128, dtype=f32), target="sm_100a"), []),
    "counting": (lambda: counting().lower(spec(500, 128, dtype=f32), target="sm_90a"), []),
}


# ---- from Python ---------------------------------------------------------------------------------


def test_another_process_calls_it_without_a_compiler(tmp_path, rng):
    kernel = lowered(ops.matmul, spec(96, 64), spec(64, 128), activation="silu")
    paths = kernel.export(tmp_path / "new" / "directory", name="mm")
    assert [p.name for p in paths] == ["mm.cubin", "mm.h", "mm.c", "mm.graph", "mm.json"]
    a, b = (rng.standard_normal(s).astype(f16) for s in ((96, 64), (64, 128)))
    np.savez(tmp_path / "in.npz", a=a, b=b)
    program = (
        "import sys, numpy as np, pallas_mgpu as plgpu\n"
        "x = np.load(sys.argv[2])\n"
        "np.save(sys.argv[3], plgpu.load_exported(sys.argv[1])(x['a'], x['b']))\n"
        "assert 'pallas_mgpu.ops' not in sys.modules\n"
    )
    env = {**os.environ, "PALLAS_MGPU_NVRTC": str(tmp_path / "none.so")}
    env["PALLAS_MGPU_BACKEND"] = "interpret"
    args = [paths[0].parent, tmp_path / "in.npz", tmp_path / "out.npy"]
    subprocess.run([sys.executable, "-c", program, *map(str, args)], env=env, check=True)
    want = a.astype(f32) @ b.astype(f32)
    want = want / (1 + np.exp(-want))
    np.testing.assert_allclose(np.load(args[2]), want, atol=3e-2, rtol=3e-2)


def test_sizes_of_the_call_and_several_results(tmp_path, rng):
    open_rows().lower(spec(64, 64, dtype=f32), target="sm_90a").export(str(tmp_path))
    kernel = plgpu.load_exported(tmp_path)
    for n in (8, 4096, 200):
        x = rng.standard_normal((n, 64)).astype(f32)
        got, total = kernel(x)
        assert (got == 2 * x).all() and total == [n // 8]
    with pytest.raises(ValueError, match="rows is 12 .*multiples of 8"):
        kernel(np.zeros((12, 64), f32))
    assert repr(kernel) == "<pallas_mgpu kernel body, exported for sm_90a: (float32[?,64])>"


def test_decoding_and_a_cache(tmp_path, rng):
    """The results of a call come first; a cache is a result, which is changed."""
    q = rng.standard_normal((2, 1, 8, 64)).astype(f16)
    pages = rng.standard_normal((2, 6, 16, 2, 64)).astype(f16)
    table, lengths = np.array([[4, 0, 2], [5, 1, 3]], np.int32), np.array([33, 7], np.int32)
    new = rng.standard_normal((2, 2, 5, 2, 64)).astype(f16)
    for size in ("this one", "any"):
        if size == "any":
            for rows in (1, 2, 3, 4):  # from the fourth size on programs are shared
                some = rng.standard_normal((2, 2, rows, 2, 64)).astype(f16)
                ops.append_pages(*pages.copy(), *some, table, lengths, interpret=True)
        kernel = ops.append_pages.kernel(*pages, *new, table, lengths)
        kernel.lower(*pages, *new, table, lengths, target="sm_90a").export(tmp_path / size)
        want, got = pages.copy(), pages.copy()
        ops.append_pages(*want, *new, table, lengths, interpret=True)
        plgpu.load_exported(tmp_path / size)(*new, table, lengths, out=tuple(got))
        np.testing.assert_array_equal(got, want)
    options = {"kv_lengths": lengths + 5, "page_table": table, "return_lse": True}
    kernel = ops.attention_decode.kernel(q, *want, **options)
    low = kernel.lower(q, *want, lengths + 5, table, target="sm_90a")
    low.export(tmp_path / "decode")
    o, log, *_ = plgpu.load_exported(tmp_path / "decode")(q, *want, lengths + 5, table)
    expected = ops.attention_decode(q, *want, **options, interpret=True)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(log, expected[1])


def test_calls_that_do_not_fit(tmp_path):
    lowered(ops.softmax, spec(4, 256)).export(tmp_path, name="s")
    kernel = plgpu.load_exported(tmp_path / "s.json")
    with pytest.raises(TypeError, match="exported for 1 arrays, and the call has 2"):
        kernel(np.zeros((4, 256), f16), np.zeros(3, f16))
    with pytest.raises(ValueError, match=r"float16\[5,256\], .*exported for float16\[4,256\]"):
        kernel(np.zeros((5, 256), f16))
    with pytest.raises(TypeError, match=r"float32\[4,256\], .*exported for float16\[4,256\]"):
        kernel(np.zeros((4, 256), f32))
    out = np.empty((4, 256), f16)
    assert kernel(np.zeros((4, 256), f16), out=out) is out and (out == f16.type(1 / 256)).all()


def test_files_that_do_not_belong_together(tmp_path):
    first, second = (lowered(ops.softmax, spec(4, n)).export(tmp_path / str(n)) for n in (64, 96))
    for k in (0, 3):  # the cubin, the graph
        kept = first[k].read_bytes()
        first[k].write_bytes(second[k].read_bytes())
        with pytest.raises(ValueError, match=f"{first[k].name} is not the file"):
            plgpu.load_exported(tmp_path / "64")
        first[k].write_bytes(kept)
    record = json.loads(first[4].read_text())
    for key, value, message in (
        ("format", 0, "reads format"),
        ("program", "0" * 32, "another version of pallas_mgpu"),
        ("results", "1", "no file that Lowered.export wrote"),
    ):
        first[4].write_text(json.dumps(record | {key: value}))
        with pytest.raises(ValueError, match=message):
            plgpu.load_exported(tmp_path / "64")
    first[4].write_text("{")
    with pytest.raises(ValueError, match="no file that Lowered.export wrote"):
        plgpu.load_exported(tmp_path / "64")
    with pytest.raises(FileNotFoundError):
        plgpu.load_exported(tmp_path / "nothing")
    with pytest.raises(ValueError, match="must have one exported kernel, and has none"):
        plgpu.load_exported(tmp_path)
    with pytest.raises(TypeError, match="path must be a str or a Path, got 3"):
        plgpu.load_exported(3)


def test_what_export_refuses(tmp_path):
    kernel = lowered(ops.softmax, spec(4, 64))
    with pytest.raises(ValueError, match="identifier of C, got 'a b'"):
        kernel.export(tmp_path, name="a b")
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        kernel.export(tmp_path, name=3)
    with pytest.raises(TypeError, match="directory must be a str or a Path, got None"):
        kernel.export(None)
    assert not list(tmp_path.iterdir())


def test_kernels_with_long_lines_are_exported(tmp_path):
    """The program that is shown has shorter ones than the one that is compiled."""
    args = spec(256, 128, dtype=f16), spec(128, 256, dtype=f16)
    kernel = plgpu.ops.matmul.kernel(*args).lower(*args, target="sm_90a")
    assert max(map(len, kernel.program.splitlines())) > 100
    assert "json" in {path.suffix[1:] for path in kernel.export(tmp_path)}


def test_a_kernel_with_checks_is_not_exported(tmp_path, monkeypatch):
    """Its program takes a record that the launcher has not."""
    monkeypatch.setenv("PALLAS_MGPU_SANITIZE", "1")
    with pytest.raises(NotImplementedError, match="PALLAS_MGPU_SANITIZE=1.*export it without"):
        open_rows().lower(spec(64, 64, dtype=f32), target="sm_90a").export(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- from C --------------------------------------------------------------------------------------


def compiled(tmp_path, name, header, body, n_params, *libraries):
    """A program that runs `body` with a loaded kernel `k`."""
    main = tmp_path / "main.c"
    main.write_text(
        f'#include "{name}.h"\n#include <stdio.h>\n#include <stdlib.h>\n'
        f"int main(void) {{ {name}_kernel k; {body} }}\n"
    )
    strict = "-std=c11 -Wall -Wextra -Wconversion -Werror".split()
    sources = [tmp_path / f"{name}.c", *libraries]
    subprocess.run(
        [CC, *strict, "-I", header, "-c", sources[0], "-o", tmp_path / "l.o"], check=True
    )
    rest = [main, tmp_path / "l.o", *sources[1:], "-o", tmp_path / "main"]
    subprocess.run([CC, "-std=c11", f"-DN_PARAMS={n_params}", "-I", header, *rest], check=True)
    return tmp_path / "main"


@needs_cc
@pytest.mark.parametrize("case", CASES)
def test_the_launcher_tells_the_driver_what_the_package_does(case, tmp_path):
    make, sizes = CASES[case]
    kernel = make()
    kernel.export(tmp_path, name=case)
    text, info = kernel.graph.cuda()
    n = len(info["params"])
    at = [0x10000 * (k + 1) for k in range(n)]
    args = ", ".join(map(str, ["&k", "(CUstream)7", *at, *sizes]))
    wrong = ", ".join(map(str, ["&k", "(CUstream)7", at[0] + 1, *at[1:], *sizes]))
    body = (
        f'if ({case}_load(&k, "image") || {case}_launch({args})) return 1;'
        f"if ({case}_launch({wrong}) != CUDA_ERROR_INVALID_VALUE) return 2;"
        f"return (int){case}_unload(&k);"
    )
    program = compiled(tmp_path, case, DRIVER, body, len(info["args"]), DRIVER / "driver.c")
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    calls = [json.loads(line) for line in said.splitlines()]
    assert calls[0] == ["load", "image"] and calls[1] == ["function", info["entry"]]
    assert (["attribute", 0, info["smem_bytes"]] in calls) == bool(info["smem_bytes"])
    assert (["alloc", 4 * (info["counters"] + 1)] in calls) == bool(info["counters"])
    cleared = ["clear", 0xC0000, 0, 4 * (info["counters"] + 1), 7]
    assert (cleared in calls) == (case == "cancelling")
    maps = [c[1] for c in calls if c[0] == "map"]
    values = {
        0: 1,
        **{k + 1: sizes[0] for k, r in enumerate(info["size_rules"]) if r[0] == "extent"},
    }
    for m, got in zip(info["maps"], maps, strict=True):
        dims = [values[e] if e else d for d, e in zip(m["dim"], m["extent"])]
        assert got["at"] == at[m["param"]] and got["type"] == ELEMENTS[m["dtype"]]
        assert got["dims"] == dims and got["strides"] == list(m["stride"][1:])
        assert got["box"] == list(m["box"]) and set(got["steps"]) == {1}
        assert got["swizzle"] == {0: 0, 32: 1, 64: 2, 128: 3}[m["swizzle"]]
        assert got["rest"] == [0, 2, 0]
    (launch,) = [c[1] for c in calls if c[0] == "launch"]
    grid = list(info["grid"])
    if info["shares_grid"]:
        grid[0] = min(grid[0], 132)
    if sizes:
        grid = [sizes[0] * 3 if case == "along_x" else sizes[0] // 8, 1, 1]
    cluster = list(info["cluster"]) if max(info["cluster"]) > 1 else []
    assert launch["grid"] == grid and launch["block"] == [info["block"], 1, 1]
    assert launch["smem"] == info["smem_bytes"] and launch["stream"] == 7
    assert launch["cluster"] == cluster and launch["pdl"] == info["pdl"]
    for (kind, param, which), got in zip(info["args"], launch["params"], strict=True):
        if kind == "size":  # of a call with 64 rows
            assert got in (64, 8)
        else:
            assert got == {"tensor_map": which, "pointer": at[param], "counters": 0xC0000}[kind]


@needs_cc
def test_sizes_that_do_not_fit_are_refused_in_c(tmp_path):
    kernel = CASES["open_rows"][0]()
    kernel.export(tmp_path, name="k")
    calls = " || ".join(
        f"k_launch(&k, NULL, 65536, 131072, 196608, {n}) != CUDA_ERROR_INVALID_VALUE"
        for n in (0, 12, -8, 4104)
    )
    program = compiled(
        tmp_path, "k", DRIVER, f'return k_load(&k, "") || {calls};', 9, DRIVER / "driver.c"
    )
    assert "launch" not in subprocess.run([program], check=True, stdout=-1, text=True).stdout


@needs_cc
def test_computed_sizes_are_checked_in_c(tmp_path):
    """The arrays and the size have names that the launcher uses itself."""
    size = plgpu.dim("int")

    def body(grid, params):
        params[0] = grid[0] + grid.shape[0] * 70000

    out = spec(size - 5, dtype=np.int32)
    kernel = plgpu.kernel(body, out_type=out, in_shapes=((size,),))
    kernel.lower(spec(9, dtype=np.int32), target="sm_90a").export(tmp_path, name="k")
    calls = "".join(
        f'if (k_launch(&k, NULL, 65536, 131072, {n}) == CUDA_SUCCESS) puts("launched {n}");'
        for n in (5, 6, 30000, 40000)
    )
    program = compiled(
        tmp_path, "k", DRIVER, f'k_load(&k, ""); {calls} return 0;', 3, DRIVER / "driver.c"
    )
    text = subprocess.run([program], check=True, stdout=-1, text=True).stdout
    launched = [line for line in text.splitlines() if line.startswith("launched")]
    assert launched == ["launched 6", "launched 30000"]


EXAMPLE = HERE.parents[1] / "examples" / "ahead_of_time"


def run_example(tmp_path):
    program = [sys.executable, EXAMPLE / "export.py", tmp_path]
    env = {**os.environ, "PALLAS_MGPU_BACKEND": "interpret"}
    return subprocess.run(program, env=env, check=True, capture_output=True, text=True).stdout


@needs_cc
def test_the_example_compiles(tmp_path):
    assert len(run_example(tmp_path).split()) == 5
    strict = "-std=c11 -Wall -Wextra -Werror -fsyntax-only".split()
    subprocess.run([CC, *strict, "-I", tmp_path, "-I", DRIVER, EXAMPLE / "main.c"], check=True)


# ---- on a GPU ------------------------------------------------------------------------------------


def _headers():
    """Where the CUDA toolkit's cuda.h is, or None."""
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *sys.path]
    for at in places:
        for inside in ("include", "nvidia/cu13/include", "nvidia/cuda_runtime/include"):
            if (Path(at) / inside / "cuda.h").exists():
                return Path(at) / inside


@pytest.mark.gpu
def test_exported_kernels_on_a_gpu(tmp_path, rng):
    a, b = (rng.standard_normal(s).astype(f16) for s in ((300, 512), (512, 256)))
    a, b = plgpu.device_put(a), plgpu.device_put(b)
    ops.matmul.kernel(a, b).lower(a, b).export(tmp_path / "mm")
    kernel = plgpu.load_exported(tmp_path / "mm")
    want = a.numpy().astype(f32) @ b.numpy().astype(f32)
    for _ in range(2):
        np.testing.assert_allclose(kernel(a, b).numpy(), want, atol=0.1, rtol=1e-2)
    counting().lower(spec(500, 128, dtype=f32)).export(tmp_path / "c")
    kernel = plgpu.load_exported(tmp_path / "c")
    x = rng.standard_normal((500, 128)).astype(f32)
    for _ in range(3):
        assert (kernel(plgpu.device_put(x)).numpy() == x + 1).all()


def _make_current():
    """The first device's context, for this thread."""
    cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0


@pytest.mark.gpu
@needs_cc
@pytest.mark.parametrize("case", sorted({*CASES} - {"cancelling"}))  # on Hopper
def test_the_launcher_on_a_gpu(case, tmp_path, rng):
    """As a shared library, on arrays of this process."""
    header = _headers()
    if header is None:
        pytest.skip("no cuda.h was found")
    make, sizes = CASES[case]
    kernel = make()
    kernel.export(tmp_path, name=case)
    info = kernel.graph.cuda()[1]
    library = tmp_path / "launcher.so"
    source = [str(tmp_path / f"{case}.c"), "-I", str(header), "-l:libcuda.so.1"]
    subprocess.run([CC, "-std=c11", "-shared", "-fPIC", "-o", str(library), *source], check=True)
    shapes = [
        tuple(sizes[0] if e else n for n, e in zip(shape, extents))
        for (_, shape, *_), extents in zip(info["params"], info["extents"])
    ]
    arrays = [
        rng.standard_normal(s).astype(p[0]) for s, p in zip(shapes, info["params"], strict=True)
    ]
    there = [plgpu.device_put(x) for x in arrays]
    plgpu.synchronize()
    _make_current()
    c = ctypes.CDLL(str(library))
    handle, image = ctypes.create_string_buffer(64), (tmp_path / f"{case}.cubin").read_bytes()
    assert getattr(c, f"{case}_load")(handle, image) == 0
    at = [ctypes.c_uint64(x.__cuda_array_interface__["data"][0]) for x in there]
    for _ in range(2):
        launch = getattr(c, f"{case}_launch")
        assert launch(handle, None, *at, *map(ctypes.c_int64, sizes)) == 0
    plgpu.synchronize()
    n = info["operands"]
    want = plgpu.load_exported(tmp_path)(*there[:n])
    for got, x in zip(there[n:], want if isinstance(want, tuple) else (want,), strict=True):
        np.testing.assert_array_equal(got.numpy(), x.numpy())
    assert getattr(c, f"{case}_unload")(handle) == 0


@pytest.mark.gpu
@needs_cc
def test_the_example_on_a_gpu(tmp_path):
    header = _headers()
    if header is None:
        pytest.skip("no cuda.h was found")
    run_example(tmp_path)
    sources = [EXAMPLE / "main.c", tmp_path / "add.c", "-l:libcuda.so.1"]
    main = tmp_path / "main"
    subprocess.run([CC, "-I", tmp_path, "-I", header, *sources, "-o", main], check=True)
    said = subprocess.run([main, tmp_path / "add.cubin"], capture_output=True, text=True)
    assert said.stdout == "right\n", said.stderr
