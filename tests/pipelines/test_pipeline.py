"""emit_pipeline and wgmma: step counts against slots, delays, revisits, overhang, products of
every form."""

import functools

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._matmul import matmul_kernel

pytestmark = pytest.mark.covering(1, share=True)

bf16 = np.dtype(ml_dtypes.bfloat16)
f16 = np.dtype(np.float16)


def swizzle(bytes_, dtype=f16):
    return (plgpu.TilingTransform((8, bytes_ // dtype.itemsize)), plgpu.SwizzleTransform(bytes_))


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_slots_and_steps(run, rng, steps, slots, dynamic):
    """In and out blocks, any number of slots against steps, static and traced grids."""
    x = rng.standard_normal((steps, 128)).astype(np.float32)

    def body(x_ref, n_ref, o_ref):
        def step(indices, a, o):
            o[...] = a[...] * 2 + indices[0].astype(jnp.float32)

        plgpu.emit_pipeline(
            step,
            grid=(n_ref[0] if dynamic else steps,),
            in_specs=[plgpu.BlockSpec((1, 128), lambda i: (i, 0))],
            out_specs=[plgpu.BlockSpec((1, 128), lambda i: (i, 0))],
            max_concurrent_steps=slots,
        )(x_ref, o_ref)

    got = run(body, x, x, np.array([steps], np.int32))
    np.testing.assert_array_equal(got, x * 2 + np.arange(steps, dtype=np.float32)[:, None])


def test_dynamic_grid_of_no_steps(run):
    """The body never runs; the carry is the initial one."""

    def body(n_ref, x_ref, o_ref):
        carry = plgpu.emit_pipeline(
            lambda i, a, c: c + 1,
            grid=(n_ref[0],),
            in_specs=[plgpu.BlockSpec((128,), lambda i: (i,))],
            max_concurrent_steps=2,
            init_carry=jnp.int32(40),
        )(x_ref)
        o_ref[0] = carry

    x = np.zeros(512, np.float32)
    assert run(body, np.zeros(1, np.int32), np.array([0], np.int32), x)[0] == 40
    assert run(body, np.zeros(1, np.int32), np.array([3], np.int32), x)[0] == 43


def test_two_dimensional_grid_with_carry(run, rng):
    """Index maps of both axes; squeezed and element dims; the carry is an array."""
    x = rng.standard_normal((3, 4, 64, 16)).astype(np.float32)

    def body(x_ref, o_ref):
        def step(indices, a, b, acc):
            i, j = indices
            return acc + a[...] * (i * 10 + j).astype(jnp.float32) + b[...]

        zero = plgpu.layout_cast(jnp.zeros((64, 16), jnp.float32), plgpu.Layout.WGMMA)
        o_ref[...] = plgpu.emit_pipeline(
            step,
            grid=(3, 4),
            in_specs=[
                plgpu.BlockSpec((None, pl.Squeezed(), 64, 16), lambda i, j: (i, j, 0, 0)),
                plgpu.BlockSpec(
                    (pl.squeezed, pl.squeezed, pl.Element(64), 16),
                    lambda i, j: (2 - i, 3 - j, 0, 0),
                ),
            ],
            max_concurrent_steps=3,
            init_carry=zero,
        )(x_ref, x_ref)

    want = sum(x[i, j] * (i * 10 + j) + x[2 - i, 3 - j] for i in range(3) for j in range(4))
    np.testing.assert_allclose(run(body, x[0, 0], x), want, rtol=1e-4, atol=1e-3)


def test_output_visits(run):
    """A revisited block is stored after its first visit and at the very end; an invariant one at
    the end."""

    def body(o_ref, last_ref):
        def step(indices, o, last):
            i, j = indices
            o[...] = jnp.full(o.shape, i * 10 + j, jnp.int32)
            last[...] = jnp.full(last.shape, i * 10 + j, jnp.int32)

        plgpu.emit_pipeline(
            step,
            grid=(2, 3),
            out_specs=[
                plgpu.BlockSpec((1, 128), lambda i, j: (i, 0)),
                plgpu.BlockSpec((128,), lambda i, j: (0,)),
            ],
            max_concurrent_steps=2,
        )(o_ref, last_ref)

    rows, last = run(body, (np.zeros((2, 128), np.int32), np.zeros(128, np.int32)))
    assert (rows[0] == 0).all() and (rows[1] == 12).all() and (last == 12).all()


def test_invariance_is_found_by_dataflow(run, rng):
    """A map that only uses a traced scalar of the kernel does not vary; one that adds zero times
    i does."""
    x = rng.standard_normal((4, 128)).astype(np.float32)

    def body(x_ref, o_ref):
        g = lax.axis_index("g")

        def step(indices, a, o):
            o[...] = a[...] + indices[0].astype(jnp.float32)

        plgpu.emit_pipeline(
            step,
            grid=(3,),
            in_specs=[plgpu.BlockSpec((1, 128), lambda i: (g, 0))],
            out_specs=[plgpu.BlockSpec((1, 128), lambda i: (g, 0))],
            max_concurrent_steps=2,
        )(x_ref, o_ref)

    np.testing.assert_array_equal(run(body, x, x, grid=(4,), grid_names=("g",)), x + 2)


@pytest.mark.parametrize("n", [100, 129, 250])
def test_overhanging_blocks(run, rng, n):
    """Blocks need not divide the array: zeros in, nothing written outside."""
    x = rng.standard_normal((n, 72)).astype(np.float32)

    def body(x_ref, o_ref):
        def step(indices, a, o):
            o[...] = a[...] + 1

        plgpu.emit_pipeline(
            step,
            grid=(-(-n // 64), 2),
            in_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, j))],
            out_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, j))],
            max_concurrent_steps=2,
        )(x_ref, o_ref)

    np.testing.assert_array_equal(run(body, x, x), x + 1)


def test_gmem_operands_nesting_and_reuse(run, rng):
    """GMEM specs pass the whole ref; pipelines nest, repeat, and run in loops with odd step
    counts."""
    x = rng.standard_normal((6, 3, 128)).astype(np.float32)

    def body(x_ref, o_ref):
        def outer(indices, whole):
            (i,) = indices

            def inner(_, a, o):
                o[...] = a[...] + whole[i, 0]

            one = plgpu.emit_pipeline(
                inner,
                grid=(3,),
                max_concurrent_steps=2,
                in_specs=[plgpu.BlockSpec((None, 1, 128), lambda j: (i, j, 0))],
                out_specs=[plgpu.BlockSpec((None, 1, 128), lambda j: (i, j, 0))],
            )
            one(x_ref, o_ref)
            one(x_ref, o_ref)

        plgpu.emit_pipeline(outer, grid=(6,), in_specs=[plgpu.BlockSpec(memory_space=plgpu.GMEM)])(
            x_ref
        )

    np.testing.assert_array_equal(run(body, x, x), x + x[:, :1])


def test_mixed_delays(run, rng):
    """Inputs released 0, 1 and 2 steps late in one pipeline."""
    x = rng.standard_normal((9, 128)).astype(np.float32)

    def body(x_ref, o_ref):
        def step(indices, a, b, c, carry):
            return carry + a[...] + 2 * b[...] + 3 * c[...]

        specs = [plgpu.BlockSpec((None, 128), lambda i: (i, 0), delay_release=d) for d in (0, 1, 2)]
        o_ref[...] = plgpu.emit_pipeline(
            step,
            grid=(9,),
            in_specs=specs,
            max_concurrent_steps=4,
            init_carry=jnp.zeros(128, jnp.float32),
        )(x_ref, x_ref, x_ref)

    np.testing.assert_allclose(run(body, x[0], x), 6 * x.sum(0), rtol=1e-4, atol=1e-4)


BUFFERED = [  # slots of a, of b, whose block never changes, of the output; of the others; delay
    (None, None, None, 2, 0),
    (3, 1, None, 2, 0),
    (4, 2, 1, 3, 0),
    (2, None, 3, 1, 0),
    (1, 1, 1, 4, 0),
    (9, 9, 9, 1, 0),
    (3, 1, 1, 1, 2),
]


@pytest.mark.parametrize(
    "counts,dynamic",
    [*((c, False) for c in BUFFERED), (BUFFERED[1], True), (BUFFERED[6], True)],
    ids=str,
)
def test_buffered(run, rng, counts, dynamic):
    """Each operand has the slots that pl.Buffered gives it, the others max_concurrent_steps."""
    of_a, of_b, of_o, others, delay = counts
    a = rng.standard_normal((7 * 16, 64)).astype(np.float32)
    b = rng.standard_normal((16, 64)).astype(np.float32)
    mode = lambda n: None if n is None else pl.Buffered(n)  # noqa: E731

    def body(a_ref, b_ref, n_ref, o_ref):
        def step(_, a, b, c, o):
            o[...] = a[...] * 2 + b[...] + c[...]

        rows = plgpu.BlockSpec((16, 64), lambda i: (i, 0), mode(of_a), delay_release=delay)
        plgpu.emit_pipeline(
            step,
            grid=(n_ref[0] if dynamic else 7,),
            max_concurrent_steps=others,
            in_specs=[
                rows,
                pl.BlockSpec((16, 64), lambda i: (0, 0), mode(of_b)),
                pl.BlockSpec((16, 64), lambda i: (6 - i, 0)),
            ],
            out_specs=[pl.BlockSpec((16, 64), lambda i: (i, 0), pipeline_mode=mode(of_o))],
        )(a_ref, b_ref, a_ref, o_ref)

    got = run(body, a, a, b, np.array([7], np.int32))
    backwards = a.reshape(7, 16, 64)[::-1].reshape(a.shape)
    np.testing.assert_allclose(got, a * 2 + np.tile(b, (7, 1)) + backwards, rtol=1e-5, atol=1e-5)


def test_buffered_input_is_fetched_once(rng):
    """Where its block is always the same; SMEM is as large as the slots say."""
    a, b = np.zeros((256, 64), np.float32), np.zeros((16, 64), np.float32)

    def lowered(mode, others=4):
        def body(a_ref, b_ref, o_ref):
            def step(_, a, b, o):
                o[...] = a[...] + b[...]

            plgpu.emit_pipeline(
                step,
                grid=(16,),
                max_concurrent_steps=others,
                in_specs=[
                    pl.BlockSpec((16, 64), lambda i: (i, 0)),
                    pl.BlockSpec((16, 64), lambda i: (0, 0), mode),
                ],
                out_specs=[pl.BlockSpec((16, 64), lambda i: (i, 0))],
            )(a_ref, b_ref, o_ref)

        out = plgpu.ShapeDtypeStruct(a.shape, a.dtype)
        return plgpu.kernel(body, out_type=out).lower(a, b)

    once, often = lowered(pl.Buffered(1)), lowered(None)
    loads = lambda low: low.as_text("graph").count("copy_gmem_to_smem")  # noqa: E731
    assert loads(once) == 4 + 1 + 1 and loads(often) == 2 * 4 + 2
    block = 16 * 64 * 4
    smem = [low.resources()["smem_bytes"] // block for low in (once, often)]
    assert smem == [4 + 1 + 4, 3 * 4]


def test_buffered_blocks_of_pallas_call(run, rng):
    """pipeline_mode by position and by name; the specs of inputs may say how blocks come again."""
    a = rng.standard_normal((6 * 16, 64)).astype(np.float32)
    b = rng.standard_normal((16, 64)).astype(np.float32)

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] + b_ref[...]

    def call(revisit=None):
        return pl.pallas_call(
            body,
            plgpu.ShapeDtypeStruct(a.shape, a.dtype),
            grid=(6,),
            in_specs=[
                pl.BlockSpec((16, 64), lambda i: (i, 0), pipeline_mode=pl.Buffered(3)),
                plgpu.BlockSpec(
                    (16, 64), lambda i: (0, 0), pl.Buffered(1, revisit=pl.RevisitMode.ANY)
                ),
            ],
            out_specs=pl.BlockSpec((16, 64), lambda i: (i, 0), pl.Buffered(2, revisit=revisit)),
            compiler_params=plgpu.CompilerParams(dimension_semantics=["sequential"]),
            interpret=run.way != "cuda",
        )

    got = run.call(call(pl.RevisitMode.IMMEDIATE), a, b)
    np.testing.assert_array_equal(got, a + np.tile(b, (6, 1)))
    with pytest.raises(NotImplementedError, match="out_specs.0.: RevisitMode.ANY"):
        call(pl.RevisitMode.ANY).lower(a, b)


def test_pipeline_errors():
    spec = plgpu.BlockSpec((128,), lambda i: (i,), delay_release=2)
    f = lambda *a: None  # noqa: E731
    for grid in ((0, 2), (2, -1)):
        with pytest.raises(ValueError, match="strictly positive"):
            plgpu.emit_pipeline(f, grid=grid)
    with pytest.raises(ValueError, match="greater than all delay_release"):
        plgpu.emit_pipeline(f, grid=(4,), in_specs=[spec], max_concurrent_steps=2)
    with pytest.raises(TypeError, match="pipeline_mode must be pl.Buffered"):
        plgpu.BlockSpec((128,), lambda i: (i,), pipeline_mode=1)
    few = plgpu.BlockSpec((128,), lambda i: (i,), pl.Buffered(2), delay_release=2)
    with pytest.raises(ValueError, match="buffer_count of pl.Buffered must be greater .* got 2"):
        plgpu.emit_pipeline(f, grid=(4,), in_specs=[few], max_concurrent_steps=4)
    for n, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="Buffered: buffer_count"):
            pl.Buffered(n)
    with pytest.raises(NotImplementedError, match="use_lookahead"):
        pl.Buffered(2, use_lookahead=True)
    with pytest.raises(TypeError, match="pl.RevisitMode"):
        pl.Buffered(2, revisit="any")
    assert pl.Buffered(2) == pl.Buffered(2, False, None) != pl.Buffered(3)

    def count(x_ref, o_ref):
        plgpu.emit_pipeline(
            lambda i, a: None, grid=(2,), in_specs=[plgpu.BlockSpec((64,), lambda i: (i,))]
        )()

    with pytest.raises(ValueError, match="1 in_specs"):
        plgpu.kernel(count, out_type=plgpu.ShapeDtypeStruct((1,), np.float32), interpret=True)(
            np.zeros(128, np.float32)
        )


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128, 64), (256, 128, 192), (384, 256, 320)])
def test_matmul(run, rng, shape, dtype):
    """The pipelined matmul of the README."""
    m, n, k = shape
    a, b = (rng.standard_normal(s).astype(np.float32).astype(dtype) for s in ((m, k), (k, n)))
    kernel = matmul_kernel(m, n, k, dtype, interpret=run.way != "cuda" or None)
    got = run.call(kernel, a, b).astype(np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert np.linalg.norm(got - want) <= (4e-3 if dtype == bf16 else 6e-4) * np.linalg.norm(want)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("sw", [32, 64, 128])
@pytest.mark.parametrize("form", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("mnk", [(64, 8, 64), (128, 72, 64), (64, 256, 128)])
def test_wgmma_forms(run, rng, form, sw, mnk):
    """One product of each major order, swizzle and a range of shapes; transforms given or
    inferred."""
    m, n, k = mnk
    elements = sw // 2
    if n % elements and form[1] == "N" or (form[0] == "T" and m % elements) or k % elements:
        pytest.skip("the swizzle does not divide the minor dim")
    a = rng.standard_normal((m, k)).astype(f16)
    b = rng.standard_normal((k, n)).astype(f16)
    a_store = a if form[0] == "N" else np.ascontiguousarray(a.T)
    b_store = b if form[1] == "N" else np.ascontiguousarray(b.T)

    def body(a_ref, b_ref, o_ref, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            plgpu.wgmma(
                acc, a_smem if form[0] == "N" else a_smem.T, b_smem if form[1] == "N" else b_smem.T
            )
            return acc[...]

        o_ref[...] = pl.run_scoped(product, plgpu.ACC((m, n)))

    given = dict(transforms=swizzle(sw)) if sw != 128 or form == "TT" else {}
    scratch = [
        plgpu.SMEM(a_store.shape, f16, **given),
        plgpu.SMEM(b_store.shape, f16, **given),
        plgpu.Barrier(num_arrivals=2),
    ]
    got = run(body, np.zeros((m, n), np.float32), a_store, b_store, scratch_types=scratch)
    np.testing.assert_allclose(
        got, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-3, atol=2e-2
    )


def test_accumulator_slices_and_state(run, rng):
    """acc.at[:, a:b], acc[...] = v, ACC.init under run_state, two accumulators in flight."""
    a = rng.standard_normal((64, 64)).astype(f16)
    b = rng.standard_normal((64, 128)).astype(f16)
    c = rng.standard_normal((64, 128)).astype(np.float32)

    def body(a_ref, b_ref, c_ref, o_ref, p_ref, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, bar)
        plgpu.barrier_wait(bar)

        def halves(acc, other):
            acc[...] = plgpu.layout_cast(c_ref[...], plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma(other, a_smem, b_smem)
            return plgpu.wgmma_accumulator_load(acc, wait_n=1) * 2 + other[...]

        o_ref[...] = pl.run_scoped(halves, plgpu.ACC((64, 128)), plgpu.ACC((64, 128)))
        start = plgpu.load(c_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        p_ref[...] = pl.run_state(lambda acc: plgpu.wgmma(acc, a_smem, b_smem))(
            plgpu.ACC.init(start)
        )

    scratch = [plgpu.SMEM(a.shape, f16), plgpu.SMEM(b.shape, f16), plgpu.Barrier(num_arrivals=2)]
    o, p = run(body, (c, c), a, b, c, scratch_types=scratch)
    ab = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(o, (c + ab) * 2 + ab, rtol=1e-3, atol=5e-2)
    np.testing.assert_allclose(p, c + ab, rtol=1e-3, atol=2e-2)


def test_operands_written_by_the_kernel(run, rng):
    """wgmma on tiles stored by the thread itself: commit_smem, then the product, and a register
    epilogue."""
    x = rng.standard_normal((64, 64)).astype(np.float32)

    def body(x_ref, o_ref, s_ref, a_smem):
        a_smem[...] = x_ref[...].astype(jnp.float16)
        plgpu.commit_smem()

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((64, 64)))
        def y(acc):
            plgpu.wgmma(acc, a_smem, a_smem.T)
            return acc[...]

        m = jnp.max(y, axis=1)
        o_ref[...] = jnp.exp(y - lax.broadcast_in_dim(m, y.shape, [0]))
        s_ref[...] = m

    o, s = run(body, (x, x[0].copy()), x, scratch_types=[plgpu.SMEM((64, 64), f16)])
    h = x.astype(f16).astype(np.float32)
    y = h @ h.T
    np.testing.assert_allclose(s, y.max(1), rtol=1e-3)
    np.testing.assert_allclose(o, np.exp(y - y.max(1, keepdims=True)), rtol=2e-2, atol=2e-2)


def test_index_maps_of_other_grids(rng):
    """An index map that takes another number of indices is named, with the user's line."""

    def body(x_ref, o_ref):
        spec = plgpu.BlockSpec((8, 64), lambda i, j: (i, j))
        plgpu.emit_pipeline(lambda _, s: None, grid=(2,), in_specs=[spec])(x_ref)

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((8,), np.float32))
    text = r"the index map of in_specs\[0\] is .*\(i, j\), and it gets one index for each of the 1"
    with pytest.raises(TypeError, match=text):
        kernel.lower(np.zeros((16, 64), np.float32))
    params = plgpu.CompilerParams(dimension_semantics=["parallel"])
    assert params.dimension_semantics == ("parallel",)


def test_every_schedule_agrees(rng):
    """Asynchronous completion at adversarial moments never changes a correct kernel's result."""
    a, b = (rng.standard_normal(s).astype(f16) for s in ((128, 256), (256, 128)))
    results = {
        matmul_kernel(128, 128, 256, f16, steps=3, interpret=plgpu.InterpretParams(seed=s))(
            a, b
        ).tobytes()
        for s in range(20)
    }
    assert len(results) == 1


@pytest.mark.parametrize("wrong", ["no wait", "slot reused"])
def test_missing_waits_show(rng, wrong):
    """A kernel that reads a copy or refills a slot too early gives wrong numbers under some
    schedule."""
    x = rng.standard_normal((8, 128)).astype(np.float32)

    def body(x_ref, o_ref, smem, bars):
        if wrong == "no wait":
            plgpu.copy_gmem_to_smem(x_ref.at[0], smem.at[0], bars.at[0])
            o_ref[0] = smem[0]
            plgpu.barrier_wait(bars.at[0])
        else:
            for i in range(4):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # one slot only: must be 0
                smem[0] = x_ref[i]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[0], o_ref.at[i])
            plgpu.wait_smem_to_gmem(0)

    bad = 0
    for seed in range(30):
        kernel = plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct((8, 128), np.float32),
            scratch_types=[plgpu.SMEM((1, 128), np.float32), plgpu.Barrier(num_barriers=1)],
            interpret=plgpu.InterpretParams(seed=seed),
        )
        rows = 1 if wrong == "no wait" else 4
        bad += not np.array_equal(kernel(x)[:rows], x[:rows])
    assert bad > 0


def test_accumulator_as_carry_of_a_pipeline(run, rng):
    """The ref of an accumulator goes through the pipeline and comes back."""
    a = rng.standard_normal((64, 192)).astype(f16)
    b = rng.standard_normal((192, 64)).astype(f16)

    def body(a_ref, b_ref, o_ref):
        def step(_, a_smem, b_smem, carry):
            acc, n = carry
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            return acc, n + 1

        def product(acc):
            acc, n = plgpu.emit_pipeline(
                step,
                grid=(3,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda k: (0, k)),
                    plgpu.BlockSpec((64, 64), lambda k: (k, 0)),
                ],
                max_concurrent_steps=2,
                init_carry=(acc, 0),
            )(a_ref, b_ref)
            return acc[...] + n

        o_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    got = run(body, np.zeros((64, 64), np.float32), a, b)
    want = a.astype(np.float32) @ b.astype(np.float32) + 3
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-2)


# ---- in kernels with threads ---------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_a_pipeline_of_each_thread(run, rng, slots):
    """Each thread has its own blocks, slots and barriers; the threads go at their own pace."""
    threads, steps, rows, w = 3, 5, 8, 64
    x = rng.standard_normal((threads, steps * rows, w)).astype(np.float32)
    y = rng.standard_normal((steps * rows, w)).astype(np.float32)

    def body(x_ref, y_ref, o_ref, s_ref):
        t = lax.axis_index("t")

        def step(indices, x_smem, y_smem, o_smem, carry):
            o_smem[...] = x_smem[...] * y_smem[...] + t.astype(jnp.float32)
            return carry + x_smem[...].sum()

        pipeline = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec((None, rows, w), lambda i: (t, i, 0)),
                plgpu.BlockSpec((rows, w), lambda i: (i, 0)),
            ],
            out_specs=[plgpu.BlockSpec((None, rows, w), lambda i: (t, i, 0))],
            max_concurrent_steps=slots,
            init_carry=jnp.float32(0),
        )
        s_ref[t] = pipeline(x_ref, y_ref, o_ref)

    out, sums = run(
        body, [x, np.zeros(threads, np.float32)], x, y, num_threads=threads, thread_name="t"
    )
    np.testing.assert_allclose(out, x * y + np.arange(threads)[:, None, None], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sums, x.sum((1, 2)), rtol=1e-3, atol=1e-3)


def test_a_pipeline_of_some_threads(run, rng):
    """One thread runs several in a loop, another one of other size; the third none."""
    x = rng.standard_normal((4, 64, 64)).astype(np.float32)

    def copy(rows, scale, which, x_ref, o_ref):
        def step(_, x_smem, o_smem):
            o_smem[...] = x_smem[...] * scale

        spec = plgpu.BlockSpec((None, rows, 64), lambda i: (which, i, 0))
        plgpu.emit_pipeline(
            step,
            grid=(64 // rows,),
            in_specs=[spec],
            out_specs=[spec],
            max_concurrent_steps=2,
        )(x_ref, o_ref)

    def body(x_ref, o_ref):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            pl.loop(0, 3)(lambda i: copy(16, 2.0, i, x_ref, o_ref))

        pl.when(t == 2)(lambda: copy(32, 3.0, 3, x_ref, o_ref))

    scale = np.array([2, 2, 2, 3], np.float32)[:, None, None]
    np.testing.assert_array_equal(run(body, x, x, num_threads=3, thread_name="t"), x * scale)


def test_products_in_pipelines_of_threads(run, rng):
    """Rows of a matrix product for each thread, whose operands are its own."""
    m, n, k = 64, 64, 192
    a = rng.integers(-3, 4, (2 * m, k)).astype(np.float16)
    b = rng.integers(-3, 4, (k, n)).astype(np.float16)

    def body(a_ref, b_ref, o_ref):
        t = lax.axis_index("t")

        def product(acc):
            def step(_, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(k // 64,),
                in_specs=[
                    plgpu.BlockSpec((m, 64), lambda i: (t, i), delay_release=1),
                    plgpu.BlockSpec((64, n), lambda i: (i, 0), delay_release=1),
                ],
                max_concurrent_steps=2,
            )(a_ref, b_ref)
            return acc[...]

        o_ref[pl.ds(t * m, m)] = pl.run_scoped(product, plgpu.ACC((m, n)))

    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_array_equal(run(body, want, a, b, num_threads=2, thread_name="t"), want)
