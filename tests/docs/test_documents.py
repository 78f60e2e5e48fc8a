"""What the documents show runs: the README's blocks, the examples, the program of the package, and
the examples of the documents that the language comes from."""

import contextlib
import functools
import math
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, ops, pl
from pallas_mgpu import numpy as jnp

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples(path, capsys):
    """Each example checks itself and prints ok."""
    runpy.run_path(str(path), run_name="__main__")
    assert "ok" in capsys.readouterr().out


def test_readme():
    """The Python blocks of the README, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    names = {"a": a, "b": b}
    for k, block in enumerate(blocks):
        path = f"<README block {k}>"
        exec(compile(block, path, "exec"), names)  # noqa: S102
    np.testing.assert_array_equal(names["add_one"](names["x"]), names["x"] + 1)
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert np.linalg.norm(names["matmul"](a, b) - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "name, least",
    [("language", 10), ("arrays", 3), ("ops", 6), ("profiling", 2), ("distributed", 3)],
)
def test_guides(name, least, tmp_path, monkeypatch):
    """The Python blocks of each page are one program that checks itself."""
    text = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= least
    names = {}
    monkeypatch.chdir(tmp_path)
    for k, block in enumerate(blocks):
        exec(compile(block, f"<{name} block {k}>", "exec"), names)  # noqa: S102


def _anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "path",
    [p for d in (".", "docs", "benchmarks", "pallas_mgpu") for p in (ROOT / d).glob("*.md")],
    ids=lambda p: p.name,
)
def test_links(path):
    """Links between the documents lead to files and headings that exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            assert anchor in map(_anchor, headings), target


PAGES = [
    p for d in (".", "docs", "benchmarks", "pallas_mgpu", "tests") for p in (ROOT / d).glob("*.md")
]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_nothing_twice(path):
    """No table has a row twice and no list an item, as merges make them: neither whole nor begun
    alike. Rows that continue the one above have an empty first cell or a number there."""
    sections = re.split(r"^#+ |^\*\*", path.read_text(encoding="utf-8"), flags=re.M)
    for section in sections:
        text = re.sub(r"```.*?```", "", section, flags=re.S)
        for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
            rows = [row for row in table.splitlines() if not re.match(r"\| *-*:? *\|", row)]
            assert len(rows) == len(set(rows)), [row for row in rows if rows.count(row) > 1]
            begun = [row[:90] for row in rows if len(row) > 120]
            assert len(begun) == len(set(begun)), [row for row in begun if begun.count(row) > 1]
        items = re.findall(r"^- (.*(?:\n  .*)*)", text, re.M)
        begun = [item[:60] for item in items]
        assert len(begun) == len(set(begun)), [item for item in begun if begun.count(item) > 1]


def test_map_of_the_source():
    """docs/design.md has each folder of the source, and each file that it names exists."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)` \|", text, re.M)
    kinds = ("*.c", "*.cuh", "*.cpp", "*.py", "*.sh")
    found = {
        str(file.parent.relative_to(ROOT))
        for top in listed
        for kind in kinds
        for file in (ROOT / top).rglob(kind)
    }
    inner = ("tests", "examples")  # their own pages list what is below
    assert sorted({d for d in found if d.split("/")[0] not in inner} | {*inner}) == sorted(listed)
    for name in re.findall(r"`([\w/.]+\.(?:[ch]|py|def|cuh))`", text):
        assert [*ROOT.glob(name), *ROOT.glob(f"*/**/{name}")], name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_names_exist(path):
    """What the documents call plgpu.x, pl.x, lax.x, jnp.x, nn.x or ops.x is there."""
    spaces = {"plgpu": plgpu, "pl": pl, "lax": lax, "jnp": jnp, "nn": nn, "ops": ops}
    text = re.sub(r"^  \| .*", "", path.read_text(encoding="utf-8"), flags=re.M)  # old names
    for first, rest in re.findall(r"(?<![\w./])(plgpu|pl|lax|jnp|nn|ops)\.([a-zA-Z]\w*)", text):
        if rest not in ("py", "md", "def"):
            there = hasattr(spaces[first], rest)
            module = first == "ops" and (ROOT / f"pallas_mgpu/ops/{rest}.py").exists()
            assert there or module, f"{first}.{rest}"


def test_calling():
    """The Python blocks about calls; those that need a GPU are marked py."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "calling.md").read_text(), re.S)
    assert len(blocks) >= 2
    for k, block in enumerate(blocks):
        exec(compile(block, f"<calling block {k}>", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_program(dtype):
    """`python -m pallas_mgpu` runs its matmul, checks it and says where it ran."""
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "--size", "256", "256", "128", "--dtype", dtype],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    for word in ("backend:", "device:", "TFLOP/s", "relative error", "(ok"):
        assert word in out.stdout
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "--size", "100", "256", "128"],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 2 and "divide" in out.stderr and "Traceback" not in out.stderr


def test_info():
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "info"], capture_output=True, text=True
    )
    assert out.returncode == 0 and "NVRTC:" in out.stdout and "cache:" in out.stdout


# ---- examples of the documents the project was made from ---------------------------------------
# Imports are those of this package; what needs a later version is refused with the right form.

F16, F32 = jnp.float16, jnp.float32


def shaped(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def halves(rng, *shapes):
    return [rng.standard_normal(s).astype(np.float16) for s in shapes]


def test_blog_first_kernel(run):
    """The blog's kernel, in its older spelling."""

    def kernel_body(input_ref, out_ref):
        out_ref[...] = input_ref[...] + 1

    inputs = np.asarray(jnp.ones((128,), jnp.float32))
    with pytest.warns(DeprecationWarning, match="out_type"):
        kernel = plgpu.kernel(
            kernel_body, out_shape=plgpu.ShapeDtypeStruct((128,), jnp.float32), interpret=True
        )
    np.testing.assert_array_equal(kernel(inputs), np.full(128, 2))
    np.testing.assert_array_equal(run(kernel_body, shaped(128), inputs), np.full(128, 2))


def test_blog_grid_threads_and_cluster(run):
    """Block indices by name, block-local SMEM, several threads in a block, clusters of blocks."""

    def body(o_ref, smem):
        m, c, t = (lax.axis_index(name) for name in ("m", "c", "wg"))
        assert lax.axis_size("wg") == 2 and lax.axis_size(("m", "c")) == 6
        smem[t] = m * 100 + c * 10 + t
        o_ref[m, c, t] = smem[t]

    got = run(
        body,
        shaped(3, 2, 2, dtype=jnp.int32),
        grid=(3,),
        grid_names=("m",),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2,), jnp.int32)],
    )
    m, c, t = np.indices((3, 2, 2))
    np.testing.assert_array_equal(got, m * 100 + c * 10 + t)


def test_blog_three_ways_to_use_a_ref(run):
    def body(x_ref, o_ref):
        view = x_ref.at[pl.ds(64, 64)]
        value = view[:]
        o_ref[:] = value

    x = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(run(body, shaped(64), x), x[64:])


@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_matmul_of_one_block(run, rng, swizzle):
    """Copies on a barrier, one product, the transforms as the documents write them."""
    a, b = halves(rng, (128, 128), (128, 128))
    transforms = (
        plgpu.TilingTransform((8, swizzle // 2)),
        plgpu.SwizzleTransform(swizzle),
    )

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((128, 128), jnp.float32))
        def result(acc_ref):
            plgpu.wgmma(acc_ref, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            return acc_ref[...]

        o_smem[...] = result.astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((128, 128), F16, transforms=transforms)
    got = run(
        body,
        shaped(128, 128, dtype=F16),
        a,
        b,
        scratch_types=[tile, tile, tile, plgpu.Barrier(num_arrivals=2)],
    )
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2e-3, atol=2e-2)


def test_matmul_pipelined_over_many_blocks(run, rng):
    """A lambda as the body of the pipeline, index maps over device scalars, delay_release."""
    m, n, k = 256, 256, 192
    a, b = halves(rng, (m, k), (k, n))

    def body(a_gmem, b_gmem, o_gmem):
        pid_m, pid_n = pl.program_id(0), pl.program_id(1)

        def compute(acc):
            plgpu.emit_pipeline(
                lambda _, a_smem, b_smem: (
                    plgpu.wgmma(acc, a_smem, b_smem),
                    plgpu.wgmma_wait(1),
                ),
                grid=(k // 64,),
                in_specs=[
                    plgpu.BlockSpec((128, 64), lambda ki: (pid_m, ki), delay_release=1),
                    plgpu.BlockSpec((64, 128), lambda ki: (ki, pid_n), delay_release=1),
                ],
                max_concurrent_steps=2,
            )(a_gmem, b_gmem)
            return acc[...]

        where = (pl.ds(pid_m * 128, 128), pl.ds(pid_n * 128, 128))
        o_gmem[where] = pl.run_scoped(compute, plgpu.ACC((128, 128)))

    got = run(body, shaped(m, n), a, b, grid=(m // 128, n // 128))
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


def test_glossary_snippets(run, capfd):
    """when on a program id, ds slices, Element blocks, scratch by name, printing."""

    def body(x_ref, o_ref, *, smem_buf, barrier):
        i = pl.program_id(0)
        assert pl.num_programs(0) == 4

        @pl.when(i == 0)
        def first_block():
            pl.debug_print("Value: {}", i)

        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * 128, 128)], smem_buf, barrier.at[0])
        plgpu.barrier_wait(barrier.at[0])
        value = lax.optimization_barrier(smem_buf[:])
        o_ref[pl.ds(i * 128, 128)] = value * 2 + i

    x = np.arange(512, dtype=np.float32)
    scratch = {
        "smem_buf": plgpu.SMEM((128,), jnp.float32),
        "barrier": plgpu.Barrier(num_barriers=2),
    }
    got = run(body, shaped(512), x, grid=(4,), scratch_types=scratch)
    np.testing.assert_array_equal(got, x * 2 + np.arange(512) // 128)
    if run.way != "cuda":
        assert "Value: 0" in capfd.readouterr().out

    def pipelined(x_ref, o_ref):
        plgpu.emit_pipeline(
            lambda _, x_smem, o_smem: o_smem.set(x_smem[...] + 1),
            grid=(3,),
            in_specs=[pl.BlockSpec((pl.Element(128),), lambda i: (i * 128 + 16,))],
            out_specs=[pl.BlockSpec((128,), lambda i: (i,))],
            max_concurrent_steps=2,
        )(x_ref, o_ref)

    np.testing.assert_array_equal(run(pipelined, shaped(384), x), x[16:400] + 1)


def test_mosaic_kernel_of_the_pallas_page(run):
    """functools.partial as a decorator, out_shape, an unnamed grid with program_id."""

    def mosaic_kernel(x_ref, y_ref):
        block_slice = pl.ds(pl.program_id(0) * 128, 128)
        y_ref[block_slice] = x_ref[block_slice] + 1

    x = np.arange(256, dtype=np.float32)
    with pytest.warns(DeprecationWarning):
        kernel = functools.partial(plgpu.kernel, out_shape=shaped(256), grid=(2,), interpret=True)(
            mosaic_kernel
        )
    np.testing.assert_array_equal(kernel(x), x + 1)
    np.testing.assert_array_equal(run(mosaic_kernel, shaped(256), x, grid=(2,)), x + 1)


@pytest.mark.parametrize(
    "use, error, right",
    [
        (lambda: pl.core_map(None), TypeError, "plgpu.Mesh"),
        (lambda: plgpu.try_cluster_cancel(None, None), TypeError, "must be a ref"),
        (lambda: plgpu.tcgen05_mma(1, 2, 3), TypeError, "acc must be a ref"),
        (lambda: plgpu.TMEM((96, 128), F32, collective=True), ValueError, "128 or 64"),
        (lambda: pl.atomic_add(None, 0, 1), TypeError, "must be a ref"),
        (lambda: plgpu.triton_call, AttributeError, "plgpu.kernel"),
        (lambda: plgpu.Registers, AttributeError, "plgpu.REGS"),
        (lambda: plgpu.Layout.WGMMA_ROW_MAJOR, AttributeError, "Layout.WGMMA"),
        (lambda: plgpu.async_copy_smem_to_gmem, AttributeError, "copy_smem_to_gmem"),
        (lambda: pl.optimization_barrier, AttributeError, "lax.optimization_barrier"),
        (lambda: plgpu.Barrier(num_threads=32), TypeError, "num_arrivals"),
        (
            lambda: plgpu.pipelines.PipelineParams(num_stages=3, prefetch=True),
            TypeError,
            "max_concurrent_steps",
        ),
    ],
)
def test_forms_of_other_documents(use, error, right):
    with pytest.raises(error, match=right):
        use()


def test_every_name_of_the_reference_index():
    """Present, or a later version's with what to use instead."""
    names = """Barrier BlockSpec CompilerParams MemorySpace Layout SemaphoreType SwizzleTransform
    TilingTransform WGMMAAccumulatorRef as_torch_kernel kernel layout_cast set_max_registers
    planar_snake emit_pipeline emit_pipeline_warp_specialized nd_loop dynamic_scheduling_loop
    barrier_arrive barrier_wait semaphore_signal_parallel SemaphoreSignal commit_smem
    copy_gmem_to_smem copy_smem_to_gmem wait_smem_to_gmem wgmma wgmma_wait tcgen05_mma
    tcgen05_commit_arrive async_load_tmem async_store_tmem wait_load_tmem commit_tmem
    try_cluster_cancel query_cluster_cancel multimem_store multimem_load_reduce ACC GMEM SMEM"""
    for name in names.split():
        assert getattr(plgpu, name) is not None
    with pytest.raises(AttributeError, match="ref.transpose"):
        _ = plgpu.TransposeTransform


# ---- idioms of the API reference ---------------------------------------------------------------


def test_named_scopes(run, rng):
    """Around parts of a body and of functions, nested: the generated code is the same without."""
    x = rng.standard_normal((4, 128)).astype(np.float32)

    def make(scope):
        @scope("twice")
        def twice(v):
            return v * 2

        def body(x_ref, o_ref):
            with scope("load"), scope("inner"):
                v = x_ref[...]

            @pl.when(v[0, 0] < 1e9)
            @scope("store")
            def _():
                o_ref[...] = twice(v)

        return run.kernel(body, x)

    kernel = make(plgpu.named_scope)
    np.testing.assert_array_equal(run.call(kernel, x), 2 * x)
    plain = make(
        lambda name: contextlib.nullcontext() if name in ("load", "inner") else lambda f: f
    )
    assert make(pl.named_scope).lower(x).as_text("cuda") == plain.lower(x).as_text("cuda")
    with pytest.raises(TypeError, match="name must be text, got 3"):
        plgpu.named_scope(3)


@pytest.mark.parametrize(
    "options, error, right",
    [
        (
            {"leader_tracked": plgpu.CopyPartition.PARTITIONED(0), "collective_axes": "c"},
            ValueError,
            "needs src of shape",
        ),
        ({"partitioned_axis": 0, "collective_axes": "c"}, ValueError, "needs src of shape"),
        (
            {"leader_tracked": plgpu.CopyPartition.REPLICATED, "collective_axes": ("c", "d")},
            ValueError,
            "exactly one collective axis",
        ),
        ({"leader_tracked": plgpu.CopyPartition.REPLICATED}, ValueError, "needs collective_axes"),
        ({"leader_tracked": 1, "collective_axes": "c"}, TypeError, "CopyPartition.PARTITIONED"),
    ],
)
def test_copies_of_pairs_of_blocks(options, error, right):
    """Mistakes in copies that the first block of a pair tracks."""

    def body(x_ref, s, b):
        plgpu.copy_gmem_to_smem(x_ref, s, b, **options)

    scratch = [plgpu.SMEM((8, 128), np.float32), plgpu.Barrier()]
    kernel = plgpu.kernel(body, scratch_types=scratch, cluster=(2,), cluster_names=("c",))
    with pytest.raises(error, match=right):
        kernel.lower(np.zeros((8, 128), np.float32))
    assert plgpu.CopyPartition.PARTITIONED(1) == plgpu.CopyPartition.PARTITIONED(axis=1)


def test_idiom_scopes_of_threads(run):
    """run_scoped as a decorator with collective_axes; its name becomes its result."""

    def body(x_ref, o_ref):
        t = lax.axis_index("wg")

        @functools.partial(
            pl.run_scoped,
            smem=plgpu.SMEM((2, 128), jnp.float32),
            ready=plgpu.Barrier(num_arrivals=2),
            collective_axes="wg",
        )
        def total(smem, ready):
            smem[t] = x_ref[t]
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
            return smem[0] + smem[1]

        o_ref[t] = total * (t + 1)

    x = np.arange(256, dtype=np.float32).reshape(2, 128)
    got = run(body, shaped(2, 128), x, num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(got, x.sum(0) * np.array([[1], [2]]))


def test_idiom_accumulators(run, rng):
    """run_state with ACC.init, a lambda body, column halves of an accumulator as targets."""
    a, b = halves(rng, (64, 64), (64, 128))

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, bar)
        plgpu.barrier_wait(bar)

        def halves_of(acc):
            for k in range(2):
                half = acc.at[:, k * 64 : (k + 1) * 64]
                plgpu.wgmma(half, a_smem, b_smem.at[:, k * 64 : (k + 1) * 64])
            return acc[...]

        acc = pl.run_scoped(halves_of, plgpu.ACC((64, 128)))
        acc = pl.run_state(lambda r: plgpu.wgmma(r, a_smem, b_smem))(plgpu.ACC.init(acc))
        o_gmem[...] = acc

    scratch = [plgpu.SMEM((64, 64), F16), plgpu.SMEM((64, 128), F16), plgpu.Barrier(2)]
    got = run(body, shaped(64, 128), a, b, scratch_types=scratch)
    want = 2 * (a.astype(np.float32) @ b.astype(np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


def test_idiom_masks_and_row_statistics(run, rng):
    """A column mask from an iota, softmax by exp2, rows broadcast with broadcast_in_dim."""
    x = rng.standard_normal((64, 96)).astype(np.float32)
    limit, log2e = 70, math.log2(math.e)

    def body(x_ref, o_ref):
        v = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        cols = plgpu.broadcasted_iota(jnp.int32, (64, 96), 1, layout=plgpu.Layout.WGMMA)
        v = jnp.where(cols + 0 < limit, v, -jnp.inf)
        m = v.max(axis=1)
        p = jnp.exp2((v - lax.broadcast_in_dim(m, v.shape, [0])) * log2e)
        o_ref[...] = p / lax.broadcast_in_dim(p.sum(axis=1), v.shape, [0])

    got = run(body, shaped(64, 96), x)
    e = np.exp(x - x[:, :limit].max(1, keepdims=True)) * (np.arange(96) < limit)
    np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)


def test_idiom_static_or_traced(run):
    """Helpers that ask isinstance(x, int), masks gathered with Python's | and &, ref arithmetic in
    place, shapes of refs where shapes are wanted."""

    def double(x):
        return 2 * x if isinstance(x, int) else x + x

    def body(n_ref, o_ref):
        n = n_ref[0]
        assert double(4) == 8 and isinstance(n, jnp.ndarray) and not isinstance(n_ref, jnp.ndarray)
        any_bit = False
        for bit in (1, 4):
            any_bit = any_bit | (n & bit != 0)
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[0] = double(n)

        @pl.when(any_bit)
        def _():
            o_ref[1] += 1

        @pl.loop(0, n, step=2)
        def _(i):
            o_ref[2] += i

        carry = pl.loop(0, 4, init_carry=(0, jnp.float32(0)))(lambda i, c: (c[0] + i, c[1] + 0.5))
        o_ref[3] = carry[0] + carry[1].astype(jnp.int32)
        o_ref[4] = pl.cdiv(n, 4) + pl.align_to(n, 4) + lax.rem(n, 4) + lax.div(n, 4)
        o_ref[5] = lax.switch(n, [lambda: 10, lambda: 20])
        o_ref[6] = lax.cond(n > 3, lambda: n, lambda: 0)
        o_ref[7] = len(o_ref) + o_ref.shape[0]

    got = run(body, shaped(8, dtype=jnp.int32), np.array([5], np.int32))
    np.testing.assert_array_equal(got, [10, 1, 0 + 2 + 4, 6 + 2, 2 + 8 + 1 + 1, 20, 5, 16])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_idiom_products_of_arrays_in_registers(run, rng, dtype):
    """wgmma with an array as a, computed by the thread just before."""
    dtype = np.dtype(jnp.dtype(dtype))
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((128, 64), (64, 96)))

    def body(a_gmem, b_gmem, o_gmem, b_smem, bar):
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            plgpu.wgmma(acc, a_gmem[...] * 2, b_smem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(product, plgpu.ACC((128, 96)))

    scratch = [plgpu.SMEM((64, 96), dtype), plgpu.Barrier()]
    got = run(body, shaped(128, 96), a, b, scratch_types=scratch)
    want = 2 * (a.astype(np.float32) @ b.astype(np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("module", [plgpu, pl, lax, jnp, plgpu.nn, plgpu.tree])
def test_public_names_have_docstrings(module):
    for name in dir(module):
        o = getattr(module, name)
        if callable(o) and not name.startswith("_") and name != "iinfo":
            assert o.__doc__, f"{module.__name__}.{name}"


def test_environment_table():
    """The table of environment variables is what the package reads."""
    known = re.findall(
        r'PM_ENV\(\w+, \w+, "(\w+)", "(.*?)", "(.*)"\)', (ROOT / "csrc/base/env.def").read_text()
    )
    text = (ROOT / "docs/language.md").read_text()
    assert len(known) >= 8
    for name, standard, meaning in known:
        value = f"`{standard}`" if standard else ""
        assert f"| `{name}` | {value} | {meaning} |" in text, name
