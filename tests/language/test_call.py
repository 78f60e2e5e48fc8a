"""`pl.pallas_call` and `plgpu.vmap` against a model in NumPy: for every point of the grid the
blocks are cut out of the arrays (zeros outside), the body runs, what lies inside is written
back."""

import functools
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

F32 = np.float32
PARALLEL, SEQUENTIAL = "parallel", "arbitrary"


def shaped(x):
    return plgpu.ShapeDtypeStruct(x.shape, x.dtype)


def call(run, body, outs, *args, spills=0, **options):
    return run.call(make(run, body, outs, **options), *args, spills=spills)


def make(run, body, outs, **options):
    outs = plgpu.tree.map(lambda x: shaped(x) if isinstance(x, np.ndarray) else x, outs)
    if run.way != "cuda":
        options.setdefault("interpret", True)
    return pl.pallas_call(body, out_shape=outs, **options)


def cut(x, block, where):
    """The block that begins at ``where``, zeros outside of the array."""
    out = np.zeros(block, x.dtype)
    inside = tuple(slice(0, max(0, min(n, d - s))) for n, d, s in zip(block, x.shape, where))
    out[inside] = x[tuple(slice(s, s + n) for s, n in zip(where, block))]
    return out


def paste(x, value, where):
    inside = tuple(slice(0, max(0, d - s)) for d, s in zip(x.shape, where))
    value = value[inside]
    x[tuple(slice(s, s + n) for s, n in zip(where, value.shape))] = value


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Arrays with odd pitches are copied by the lanes, with a warning that others test."""
    yield


# ---- shapes --------------------------------------------------------------------------------------

SHAPES = [(), (1,), (3,), (127,), (129,), (3, 7), (65, 127), (1, 3, 129), (2, 3, 1, 7)]
SHAPES += [(2, 1, 3, 2, 7)]


@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16, np.int8], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_arrays(run, rng, shape, dtype):
    """No grid and no specs: whole arrays of rank 0 to 5 go through SMEM, sizes that no engine and
    no vector width divides."""

    def add(a, b):
        return (a.astype(jnp.int32) + b.astype(jnp.int32)).astype(np.int8) if narrow else a + b

    narrow = dtype is np.int8

    def body(x_ref, y_ref, sum_ref, twice_ref):
        assert x_ref.memory_space is plgpu.SMEM and x_ref.shape == shape
        sum_ref[...] = add(x_ref[...], y_ref[...])
        twice_ref[...] = add(x_ref[...], x_ref[...])

    x, y = (rng.integers(-9, 9, shape).astype(dtype) for _ in range(2))
    got = call(run, body, [x, x], x, y)
    assert type(got) is tuple
    np.testing.assert_array_equal(got[0], x + y)
    np.testing.assert_array_equal(got[1], x + x)


BLOCKS = [  # shape, block, dtype
    ((1,), (1,), F32),
    ((7,), (3,), np.int8),
    ((1000,), (256,), ml_dtypes.bfloat16),
    ((129,), (128,), F32),
    ((3, 7), (2, 4), F32),
    ((127, 129), (64, 64), np.float16),
    ((129, 128), (64, 32), F32),
    ((5, 3, 33), (2, 3, 16), np.int32),
    ((3, 2, 5, 7), (2, 1, 2, 8), F32),
    ((2, 3, 2, 3, 9), (1, 2, 2, 2, 4), np.int16),
]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("shape, block, dtype", BLOCKS, ids=str)
def test_blocks_that_overhang(run, rng, shape, block, dtype, sequential):
    """Blocks that do not divide the array, one grid axis per dim: zeros are read outside, nothing
    is written there (rows would wrap into the next), on the launch grid and in a loop."""
    grid = tuple(pl.cdiv(d, n) for d, n in zip(shape, block))
    rank = len(shape)

    def body(x_ref, o_ref, n_ref):
        x = x_ref[...]
        here = [pl.program_id(k) for k in range(rank)]
        assert [pl.num_programs(k) for k in range(rank)] == list(grid)
        linear = functools.reduce(lambda a, b: a * 3 + b, here)
        o_ref[...] = (x.astype(jnp.float32) + linear).astype(x.dtype)
        n_ref[...] = jnp.full((1,) * rank, jnp.sum((x != 0).astype(jnp.int32)), jnp.int32)

    x = rng.integers(1, 9, shape).astype(dtype)
    maps = lambda *i: i  # noqa: E731
    o, n = call(
        run,
        body,
        (x, np.zeros(grid, np.int32)),
        x,
        grid=grid,
        in_specs=[pl.BlockSpec(block, maps)],
        out_specs=(pl.BlockSpec(block, maps), pl.BlockSpec((1,) * rank, maps)),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=[SEQUENTIAL if sequential else PARALLEL] * rank,
            max_concurrent_steps=2,
        ),
    )
    want, count = np.zeros_like(x), np.zeros(grid, np.int32)
    for i in itertools.product(*map(range, grid)):
        where = tuple(a * b for a, b in zip(i, block))
        b = cut(x, block, where)
        linear = functools.reduce(lambda a, b: a * 3 + b, i)
        paste(want, (b + np.asarray(linear).astype(dtype)).astype(dtype), where)
        count[i] = np.count_nonzero(b)
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(n, count)


def test_blocks_outside_of_the_array(run):
    """A block wholly outside reads zeros and writes nothing."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = np.arange(48, dtype=F32)
    got = call(
        run,
        body,
        plgpu.ShapeDtypeStruct((80,), F32),
        x,
        grid=(6,),
        in_specs=[pl.BlockSpec((16,), lambda i: (i,))],
        out_specs=pl.BlockSpec((16,), lambda i: (i,)),
    )
    np.testing.assert_array_equal(got, np.append(x, np.zeros(32, F32)) + 1)


# ---- specs ---------------------------------------------------------------------------------------


def test_block_dims(run, rng):
    """int, Blocked, None, Squeezed and Element side by side; index maps with arithmetic."""
    x = rng.standard_normal((4, 6, 40, 24)).astype(F32)

    def body(a_ref, b_ref, c_ref, o_ref):
        assert a_ref.shape == b_ref.shape == c_ref.shape == (8, 16)
        o_ref[...] = a_ref[...] + 2 * b_ref[...] + 4 * c_ref[...]

    got = call(
        run,
        body,
        plgpu.ShapeDtypeStruct((4, 3, 8, 16), F32),
        x,
        x,
        x,
        grid=(4, 3),
        in_specs=[
            pl.BlockSpec((None, pl.Squeezed(), 8, pl.Blocked(16)), lambda i, j: (i, 2 * j, j, 0)),
            plgpu.BlockSpec(
                (pl.squeezed, None, 8, 16), lambda i, j: (3 - i, j % 2, (i + j) // 2, 1)
            ),
            pl.BlockSpec(
                (None, None, pl.Element(8), pl.Element(16)), lambda i, j: (i, 5, 3 * j + 1, i + j)
            ),
        ],
        out_specs=pl.BlockSpec((None, None, 8, 16), lambda i, j: (i, j, 0, 0)),
    )
    for i, j in itertools.product(range(4), range(3)):
        a = x[i, 2 * j, 8 * j : 8 * j + 8, :16]
        b = cut(x[3 - i, j % 2], (8, 16), ((i + j) // 2 * 8, 16))
        c = x[i, 5, 3 * j + 1 : 3 * j + 9, i + j : i + j + 16]
        np.testing.assert_allclose(got[i, j], a + 2 * b + 4 * c, rtol=1e-6, atol=1e-6)


def test_program_id_in_index_maps(run):
    """An index map may ask for the index of an axis; along a sequential one it is that of the step
    whose block is fetched, not of the step that runs."""

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * 1000 + y_ref[...]

    x = np.arange(24 * 8, dtype=np.int32).reshape(24, 8)
    got = call(
        run,
        body,
        x,
        x,
        x,
        grid=(4, 6),
        in_specs=[
            pl.BlockSpec((1, 8), lambda i, j: (i * 6 + pl.program_id(1), 0)),
            pl.BlockSpec((1, 8), lambda i, j: (pl.program_id(0) + 4 * j, 0)),
        ],
        out_specs=pl.BlockSpec((1, 8), lambda i, j: (pl.program_id(0) * pl.num_programs(1) + j, 0)),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=(PARALLEL, SEQUENTIAL), max_concurrent_steps=3
        ),
    )
    i, j = np.divmod(np.arange(24), 6)
    np.testing.assert_array_equal(got, x * 1000 + x[i + 4 * j])


@pytest.mark.parametrize("space", [plgpu.GMEM, pl.ANY], ids=str)
def test_unstaged_operands(run, rng, space):
    """GMEM and ANY pass whole arrays; the body slices them."""
    x = rng.standard_normal((100, 37)).astype(F32)

    def body(x_ref, o_ref):
        assert x_ref.memory_space is plgpu.GMEM and x_ref.shape == o_ref.shape == (100, 37)
        rows = pl.ds(pl.program_id(0) * 10, 10)
        o_ref[rows] = x_ref[rows] * 2

    whole = pl.BlockSpec((100, 37), lambda i: (0, 0), memory_space=space)
    got = call(
        run, body, x, x, grid=(10,), in_specs=[whole], out_specs=pl.BlockSpec(memory_space=space)
    )
    np.testing.assert_array_equal(got, x * 2)


def test_trees_of_arrays_and_specs(run, rng):
    """Specs in the structure of the arguments and of out_shape; None holds no array."""
    x, y, z = (rng.standard_normal((8, 16)).astype(F32) for _ in range(3))
    top, left = pl.BlockSpec((4, 16), lambda i: (i, 0)), pl.BlockSpec((8, 8), lambda i: (0, i))

    def body(d, pair, o, last):
        assert set(d) == {"x", "none"} and d["none"] is None
        o["sum"][...] = d["x"][...] + pair[0][...]
        last[...] = pair[1][...] * 3

    o, last = call(
        run,
        body,
        ({"sum": shaped(x)}, shaped(z)),
        {"x": x, "none": None},
        (y, z),
        grid=2,
        in_specs=[{"x": top, "none": None}, (top, left)],
        out_specs=[{"sum": top}, left],
    )
    np.testing.assert_array_equal(o["sum"], x + y)
    np.testing.assert_array_equal(last, z * 3)


def test_grid_spec_and_names(run):
    """GridSpec, a grid of (name, size) pairs, scratch by name, name= and cost_estimate=."""

    def body(x_ref, o_ref, *, total):
        i, j = lax.axis_index("rows"), lax.axis_index("cols")
        assert lax.axis_size(("rows", "cols")) == 6
        total[...] = x_ref[...] * 10 + i
        o_ref[...] = total[...] * 10 + j + 100 * lax.axis_index(("cols", "rows"))

    spec = pl.BlockSpec((2, 4), lambda i, j: (i, j))
    grid_spec = pl.GridSpec(
        grid=(("rows", 2), ("cols", 3)),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes={"total": plgpu.SMEM((2, 4), jnp.int32)},
    )
    x = np.ones((4, 12), np.int32)
    for semantics in (None, (SEQUENTIAL, PARALLEL)):
        kernel = make(
            run,
            body,
            x,
            grid_spec=grid_spec,
            name="tens",
            cost_estimate=pl.CostEstimate(flops=3, transcendentals=0, bytes_accessed=2),
            metadata={"a": "b"},
            compiler_params=plgpu.CompilerParams(dimension_semantics=semantics),
        )
        assert kernel.name == "tens" and "tens" in kernel.lower(x).as_text("cuda")
        i, j = np.arange(4)[:, None] // 2, np.arange(12) // 4
        np.testing.assert_array_equal(run.call(kernel, x), (10 + i) * 10 + j + 100 * (j * 2 + i))


# ---- sequential axes -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("where", [0, 1])
def test_scratch_persists_over_sequential_steps(run, rng, where, steps):
    """Row sums by a loop over column blocks, which may come first or last in the grid; scratch
    lives over the loop, an output that does not depend on it is stored once, at the end."""
    x = rng.standard_normal((24, 40)).astype(F32)
    order = (lambda f: lambda k, i: f(i, k)) if where == 0 else (lambda f: f)

    def body(x_ref, o_ref, acc):
        k = pl.program_id(where)

        @pl.when(k == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.sum(x_ref[...], axis=1)
        o_ref[...] = acc[...]

    grid, semantics = [3, 3], [PARALLEL, PARALLEL]
    grid[where], semantics[where] = 5, SEQUENTIAL
    got = call(
        run,
        body,
        plgpu.ShapeDtypeStruct((24,), F32),
        x,
        grid=tuple(grid),
        in_specs=[pl.BlockSpec((8, 8), order(lambda i, k: (i, k)))],
        out_specs=pl.BlockSpec((8,), order(lambda i, k: (i,))),
        scratch_shapes=[plgpu.SMEM((8,), F32)],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=semantics, max_concurrent_steps=steps
        ),
    )
    np.testing.assert_allclose(got, x.sum(1), rtol=1e-5, atol=1e-5)


def test_matmul_with_a_sequential_axis(run, rng):
    """wgmma into scratch over a pipelined k axis, delay_release, ragged edges of every operand."""
    m, n, k = 200, 136, 152
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((m, k), (k, n)))

    def body(a_ref, b_ref, o_ref, acc):
        plgpu.wgmma(acc, a_ref, b_ref)
        plgpu.wgmma_wait(0)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...].astype(np.float16)

    got = call(
        run,
        body,
        plgpu.ShapeDtypeStruct((m, n), np.float16),
        a,
        b,
        grid=(2, 2, 3),
        in_specs=[
            plgpu.BlockSpec((128, 64), lambda i, j, k: (i, k), delay_release=1),
            plgpu.BlockSpec((64, 128), lambda i, j, k: (k, j), delay_release=1),
        ],
        out_specs=plgpu.BlockSpec((128, 128), lambda i, j, k: (i, j)),
        scratch_shapes=[plgpu.ACC((128, 128))],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=(PARALLEL, PARALLEL, SEQUENTIAL), max_concurrent_steps=3
        ),
    )
    want = a.astype(F32) @ b.astype(F32)
    np.testing.assert_allclose(got.astype(F32), want, rtol=2e-3, atol=3e-2)


@pytest.mark.parametrize("rank", range(6))
def test_grids_of_any_rank(run, rank):
    """Every program of a grid of rank 0 to 5 runs once, parallel and sequential axes mixed."""
    grid = (2, 3, 1, 2, 2)[:rank]
    semantics = (PARALLEL, SEQUENTIAL, PARALLEL, PARALLEL, SEQUENTIAL)[:rank]

    def body(o_ref):
        here = [pl.program_id(k) for k in range(rank)]
        o_ref[...] = functools.reduce(lambda a, b: a * 10 + b, here, jnp.int32(1))

    got = call(
        run,
        body,
        plgpu.ShapeDtypeStruct(grid, np.int32),
        grid=grid,
        out_specs=pl.BlockSpec((None,) * rank, lambda *i: i),
        compiler_params=plgpu.CompilerParams(dimension_semantics=semantics),
    )
    want = np.ones(grid, np.int32)
    for i in np.indices(grid):
        want = want * 10 + i
    np.testing.assert_array_equal(got, want)


def test_long_leading_axes():
    """Axes before the last that are longer than CUDA's y and z are folded into x."""

    def body(o_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(i % 1000 == 999)
        def _():
            o_ref[i // 1000, j] = i * 2 + j

    kernel = pl.pallas_call(
        body,
        plgpu.ShapeDtypeStruct((66, 2), np.int32),
        grid=(66000, 2),
        out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
        interpret=True,
    )
    assert kernel.lower().resources()["grid"] == (132000, 1, 1)
    want = np.arange(999, 66000, 1000)[:, None] * 2 + [0, 1]
    np.testing.assert_array_equal(kernel(), want)


# ---- aliases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [True, False])
def test_input_output_aliases(run, rng, staged):
    """The output begins as the input, and the body sees one memory; the caller's array stays as it
    is."""
    x, y = (rng.standard_normal(64).astype(F32) for _ in range(2))
    space = None if staged else plgpu.GMEM

    def body(x_ref, y_ref, first_ref, o_ref):
        if staged:  # blocks 0 and 2 of 4 are visited
            o_ref[...] = x_ref[...] * 2 + y_ref[...]
        else:
            y_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16)]  # an input that is an output can be written
            o_ref[pl.ds(16, 16)] = o_ref[pl.ds(0, 16)] + y_ref[pl.ds(32, 16)]
        first_ref[...] = x_ref[...] if staged else x_ref[pl.ds(0, 16)]

    spec = pl.BlockSpec((16,), lambda i: (2 * i,)) if staged else pl.BlockSpec(memory_space=space)
    before = y.copy()
    first, got = call(
        run,
        body,
        (plgpu.ShapeDtypeStruct((32,) if staged else (16,), F32), shaped(y)),
        x,
        y,
        grid=(2,) if staged else (),
        in_specs=[spec, spec],
        out_specs=(pl.BlockSpec((16,), lambda *i: i or (0,)), spec),
        input_output_aliases={1: 1},
    )
    want = y.copy()
    if staged:
        for k in (0, 32):
            want[k : k + 16] = 2 * x[k : k + 16] + y[k : k + 16]
        np.testing.assert_array_equal(first, np.append(x[:16], x[32:48]))
    else:
        want[:16] = x[:16]
        want[16:32] = x[:16] + y[32:48]
        np.testing.assert_array_equal(first, x[:16])
    np.testing.assert_array_equal(y, before)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_nested_results(run, rng):
    """Specs are nested as arguments and results are, also where the result is one dict."""
    t = {"p": rng.standard_normal((8, 9)).astype(F32), "q": rng.standard_normal((4,)).astype(F32)}
    rows, whole = pl.BlockSpec((3, 9), lambda i: (i, 0)), pl.BlockSpec((4,), lambda i: 0)

    def body(t_ref, o_ref):
        (twice,) = o_ref["m"]
        o_ref["s"][...] = t_ref["p"][...] + 1
        twice[...] = t_ref["q"][...] * 2

    kernel = make(
        run,
        body,
        {"s": shaped(t["p"]), "m": (shaped(t["q"]),)},
        grid=3,
        in_specs=[{"p": rows, "q": whole}],
        out_specs={"s": rows, "m": (whole,)},
    )
    got = run.call(kernel, t)
    np.testing.assert_array_equal(got["s"], t["p"] + 1)
    np.testing.assert_array_equal(got["m"][0], t["q"] * 2)


# ---- vmap ----------------------------------------------------------------------------------------


def scale(x_ref, s_ref, o_ref):
    i = pl.program_id(0)
    o_ref[...] = x_ref[...] * s_ref[0] + i.astype(F32)


def scaled(run, shape=(20, 24)):
    return make(
        run,
        scale,
        plgpu.ShapeDtypeStruct(shape, F32),
        grid=(3,),
        in_specs=[pl.BlockSpec((8, 24), lambda i: (i, 0)), pl.BlockSpec()],
        out_specs=pl.BlockSpec((8, 24), lambda i: (i, 0)),
    )


def scaled_by_numpy(x, s):
    return x * s + np.arange(20, dtype=F32)[:, None] // 8


def test_vmap_of_a_call(run, rng):
    """A leading grid axis; axes of arguments and results; arguments that all elements share; the
    body's program_id is that of its own grid. Blocks that overhang touch no neighbour."""
    x, s = rng.standard_normal((5, 20, 24)).astype(F32), rng.standard_normal((5, 1)).astype(F32)
    want = np.stack([scaled_by_numpy(a, b) for a, b in zip(x, s)])
    kernel = scaled(run)
    got = run.call(plgpu.vmap(kernel), x, s)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    moved = np.ascontiguousarray(np.moveaxis(x, 0, 2))
    got = run.call(plgpu.vmap(kernel, in_axes=(-1, None), out_axes=1), moved, s[0])
    want = np.stack([scaled_by_numpy(a, s[0]) for a in x], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_vmap_twice(run, rng):
    x = rng.standard_normal((2, 20, 3, 24)).astype(F32)
    s = rng.standard_normal((3, 1)).astype(F32)
    twice = plgpu.vmap(plgpu.vmap(scaled(run), in_axes=(1, 0)), in_axes=(0, None))
    got = run.call(twice, x, s)
    want = np.stack([[scaled_by_numpy(x[i, :, j], s[j]) for j in range(3)] for i in range(2)])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_vmap_of_a_kernel_with_threads(run, rng):
    """plgpu.kernel with threads, named axes, scratch and nested arguments."""

    def body(d, o_ref, smem):
        t = lax.axis_index("wg")
        smem[t] = d["x"][t] + lax.axis_index("g")
        o_ref[t] = smem[t] * d["y"][...]

    x, y = rng.standard_normal((2, 64, 3)).astype(F32), rng.standard_normal((3,)).astype(F32)
    kernel = run.kernel(
        body,
        plgpu.ShapeDtypeStruct((2, 64), F32),
        grid=(1,),
        grid_names=("g",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2, 64), F32)],
    )
    got = run.call(plgpu.vmap(kernel, in_axes=({"x": 2, "y": 0},)), {"x": x, "y": y})
    want = np.moveaxis(x, 2, 0) * y[:, None, None]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_vmap_of_a_function(rng):
    """A function that reads shapes, makes kernels and hands results on, mapped twice."""

    def f(x, s):
        assert x.shape == (20, 24) and x.ndim == 2 and x.dtype == F32
        kernel = functools.partial(
            pl.pallas_call,
            scale,
            out_shape=plgpu.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(3,),
            in_specs=[pl.BlockSpec((8, 24), lambda i: (i, 0)), pl.BlockSpec()],
            out_specs=pl.BlockSpec((8, 24), lambda i: (i, 0)),
            interpret=True,
        )
        return kernel()(kernel()(x, s), s)

    x, s = rng.standard_normal((2, 20, 24, 3)).astype(F32), rng.standard_normal((2, 1)).astype(F32)
    got = plgpu.vmap(plgpu.vmap(f, in_axes=(2, None)))(x, s)
    for i, j in itertools.product(range(2), range(3)):
        want = scaled_by_numpy(scaled_by_numpy(x[i, :, :, j], s[i]), s[i])
        np.testing.assert_allclose(got[i, j], want, rtol=1e-5, atol=1e-6)


def test_vmap_into_given_arrays(rng):
    """out= of a mapped kernel, and in a mapped function, where it is an argument mapped along an
    axis of its own, once and twice."""
    kernel = pl.pallas_call(
        lambda x_ref, o_ref: o_ref.set(x_ref[...] * 2),
        out_shape=plgpu.ShapeDtypeStruct((7, 5), F32),
        interpret=True,
    )
    x = rng.standard_normal((2, 3, 7, 5)).astype(F32)
    out = np.zeros((3, 7, 5), F32)
    assert plgpu.vmap(kernel)(x[0], out=out) is out
    np.testing.assert_array_equal(out, x[0] * 2)

    def f(x, o):
        assert kernel(x, out=o) is o
        return kernel(x)

    into = np.zeros((7, 3, 5), F32)
    got = plgpu.vmap(f, in_axes=(0, 1))(x[1], into)
    np.testing.assert_array_equal(got, x[1] * 2)
    np.testing.assert_array_equal(into.transpose(1, 0, 2), x[1] * 2)
    into = np.zeros((2, 7, 3, 5), F32)
    plgpu.vmap(plgpu.vmap(f, in_axes=(0, 1)))(x, into)
    np.testing.assert_array_equal(into.transpose(0, 2, 1, 3), x * 2)
    with pytest.raises(NotImplementedError, match="mapped along axis 1"):
        plgpu.vmap(lambda x, o: kernel(x, out=o), in_axes=(0, 1))(x[1], into[0])
    with pytest.raises(TypeError, match="given as out= must be mapped"):
        plgpu.vmap(lambda x: kernel(x, out=into[0, :, 0]))(x[1])


def test_vmap_of_a_family(rng, monkeypatch):
    """ops.matmul finds its kernel by the types that the map leaves."""
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((2, 64, 64), (64, 72)))
    got = plgpu.vmap(ops.matmul, in_axes=(0, None))(a, b)
    want = a.astype(F32) @ b.astype(F32)
    np.testing.assert_allclose(got.astype(F32), want, rtol=2e-3, atol=2e-2)


# ---- misuse --------------------------------------------------------------------------------------

X = np.zeros((16, 16), F32)
ROWS = pl.BlockSpec((8, 16), lambda i: (i, 0))


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def use(body=copy, args=(X,), out_shape=X, **options):
    options = {"grid": (2,), "in_specs": [ROWS], "out_specs": ROWS, **options}
    return pl.pallas_call(body, out_shape=shaped(out_shape), interpret=True, **options)(*args)


def params(**fields):
    return plgpu.CompilerParams(**fields)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"grid_spec": pl.GridSpec()}, ValueError, "grid_spec holds grid"),
        ({"body": lambda x, o: 3}, ValueError, "must return None"),
        ({"body": lambda x: None}, TypeError, "1 operand, 1 output"),
        ({"grid": (0,)}, ValueError, "must be positive"),
        ({"grid": (2.5,)}, TypeError, "ints known at trace time"),
        ({"grid": (("a", 1), ("a", 2))}, ValueError, "must differ"),
        ({"in_specs": [ROWS, ROWS]}, ValueError, r"in_specs must have the structure of the argu"),
        ({"in_specs": [None]}, ValueError, r"\(\*,\); got \(None,\)"),
        ({"in_specs": [(8, 16)]}, TypeError, "must hold BlockSpecs, got 8"),
        ({"out_specs": [ROWS, ROWS]}, ValueError, "out_specs must have the structure of the res"),
        ({"in_specs": [pl.BlockSpec((8,), lambda i: (i,))]}, ValueError, "1 dims, the array has 2"),
        ({"in_specs": [pl.BlockSpec((8, 8), lambda i: i)]}, ValueError, "1 indices for 2 block"),
        ({"in_specs": [pl.BlockSpec((8, 8), lambda i, j: (i, j))]}, TypeError, "1 grid axes"),
        ({"in_specs": [pl.BlockSpec((8, 8), lambda i: (i, 0.5))]}, ValueError, "integers, got 0.5"),
        (
            {"in_specs": [pl.BlockSpec((8, 8), lambda i: (i * 0.5, 0))]},
            ValueError,
            "integer scalars",
        ),
        (
            {"in_specs": [pl.BlockSpec((8, 8), lambda i: (i, np.arange(2)))]},
            ValueError,
            "must return integers",
        ),
        ({"compiler_params": params(dimension_semantics=3)}, ValueError, "one entry for each"),
        ({"in_specs": [pl.BlockSpec((8, 0), lambda i: (i, 0))]}, ValueError, "positive, got 0"),
        (
            {"in_specs": [pl.BlockSpec((8, pl.Element(8, (1, 0))), lambda i: (i, 0))]},
            NotImplementedError,
            "padding",
        ),
        (
            {"in_specs": [plgpu.BlockSpec((8, 16), lambda i: (i, 0), collective_axes="c")]},
            ValueError,
            "collective_axes",
        ),
        (
            {"compiler_params": params(dimension_semantics=("parallel", "parallel"))},
            ValueError,
            "one entry for each of the 1 grid axes",
        ),
        ({"compiler_params": params(max_concurrent_steps=0)}, ValueError, "positive int, got 0"),
        ({"compiler_params": {"num_stages": 3}}, TypeError, "plgpu.CompilerParams"),
        ({"input_output_aliases": {0: 1}}, ValueError, "output 1, and there are 1"),
        ({"input_output_aliases": {1: 0}}, ValueError, "input 1, and there are 1"),
        ({"input_output_aliases": {0: 0}, "out_shape": X[:8]}, ValueError, "must agree"),
        ({"input_output_aliases": [0]}, TypeError, "dict"),
        ({"dimension_semantics": ("parallel",)}, TypeError, "CompilerParams"),
        ({"scratch_shapes": plgpu.SMEM((1,), F32)}, TypeError, "tuple, list or dict"),
        ({"name": 3}, TypeError, "printable"),
        (
            {
                "in_specs": [plgpu.BlockSpec((8, 16), lambda i: (i, 0), delay_release=2)],
                "compiler_params": params(max_concurrent_steps=2),
            },
            ValueError,
            "greater than all delay_release",
        ),
    ],
)
def test_misuse(options, error, message):
    with pytest.raises(error, match=message):
        use(**options)


def test_too_large_for_smem():
    """Whole arrays are staged where a body needs them in SMEM: the error says what there is and
    what the way out is."""

    def body(x_ref, o_ref):
        plgpu.copy_smem_to_gmem(x_ref, o_ref)
        plgpu.wait_smem_to_gmem(0)

    with pytest.raises(ValueError, match="shared memory"):
        use(
            body,
            args=(np.zeros((512, 512), F32),),
            grid=(),
            in_specs=pl.no_block_spec,
            out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
            out_shape=np.zeros((512, 512), F32),
        )


def test_misuse_of_vmap():
    kernel = pl.pallas_call(copy, out_shape=shaped(X), interpret=True)
    with pytest.raises(TypeError, match=r"vmap\(pallas_call\(body, ...\)\)"):
        plgpu.vmap(functools.partial(pl.pallas_call, copy, out_shape=shaped(X)))
    with pytest.raises(TypeError, match="a kernel or a function"):
        plgpu.vmap(3)
    with pytest.raises(ValueError, match="no axis 0"):
        plgpu.vmap(kernel)(1.0)
    with pytest.raises(ValueError, match="no argument is mapped"):
        plgpu.vmap(kernel, in_axes=None)(X)
    with pytest.raises(ValueError, match="in_axes"):
        plgpu.vmap(kernel, in_axes=(0, 0))(X[None])
    with pytest.raises(ValueError, match="out_axes"):
        plgpu.vmap(kernel, out_axes=(0, 0))(X[None])
    with pytest.raises(ValueError, match="no axis 3"):
        plgpu.vmap(kernel, out_axes=3)(X[None])
    two = pl.pallas_call(
        lambda x, y, o: o.set(x[...] + y[...]), out_shape=shaped(X), interpret=True
    )
    with pytest.raises(ValueError, match="differ in size"):
        plgpu.vmap(two)(np.zeros((2, 16, 16), F32), np.zeros((3, 16, 16), F32))
    with pytest.raises(TypeError, match="results of the kernels"):
        plgpu.vmap(lambda x: 3)(X[None])

    def counts(o_ref):
        o_ref[...] = plgpu.ext.TileScheduler().fetch()

    counter = plgpu.kernel(
        lambda x, o: counts(o), out_type=plgpu.ShapeDtypeStruct((), np.int32), interpret=True
    )
    with pytest.raises(NotImplementedError, match="fetch is not supported under plgpu.vmap"):
        plgpu.vmap(counter)(X)


# ---- triangles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-2, 0, 1])
@pytest.mark.parametrize("shape", [(5, 9), (33, 33), (2, 7, 3)], ids=str)
def test_triangles(run, rng, shape, k):
    """tril, triu, tri and eye in kernels, diagonals beside the main one, NaN where zeros go; the
    spellings of pl."""
    x = rng.standard_normal(shape).astype(F32)
    x.flat[::5] = np.nan

    def body(x_ref, low_ref, high_ref, ones_ref, other_ref):
        x = jnp.copy(x_ref[...])
        low_ref[...] = jnp.tril(x, k)
        high_ref[...] = jnp.triu(x, k)
        ones_ref[...] = jnp.tri(*shape[-2:], k) + 4 * jnp.eye(*shape[-2:], k)
        other_ref[...] = pl.reciprocal(pl.broadcast_to(jnp.float32(3) + x * 0, shape))

    square = np.zeros(shape[-2:], F32)
    low, high, ones, other = call(run, body, [x, x, square, x], x)
    np.testing.assert_array_equal(low, np.tril(x, k))
    np.testing.assert_array_equal(high, np.triu(x, k))
    np.testing.assert_array_equal(ones, np.tri(*shape[-2:], k) + 4 * np.eye(*shape[-2:], k))
    np.testing.assert_array_equal(other, np.where(np.isnan(x), x, F32(1) / F32(3)))
    np.testing.assert_array_equal(jnp.tril(x, k), np.tril(x, k))
    assert jnp.eye(3).dtype == jnp.tri(3).dtype == F32


def test_errors_in_index_maps_name_their_spec():
    """Whatever is raised in one, with the spec that it belongs to."""
    out = plgpu.ShapeDtypeStruct((64, 32), np.float32)
    right = pl.BlockSpec((16, 32), lambda i: (i, 0))
    x = np.zeros((64, 32), np.float32)
    for k in range(2):
        for f, error in [(lambda i: 1 // 0, ZeroDivisionError), (lambda i: [][3], IndexError)]:
            specs = [right, right]
            specs[k] = pl.BlockSpec((16, 32), f)
            kernel = pl.pallas_call(
                lambda x, y, o: None, out, grid=(4,), in_specs=specs, out_specs=right
            )
            with pytest.raises(error) as info:
                kernel(x, x)
            assert info.value.__notes__ == [f"in the index map of in_specs[{k}] of pallas_call"]


def test_names_of_smem_after_none():
    """The table of what does not fit names the parameters, whatever stands between them."""

    def body(first, none, pair, last, out):
        out[...] = first[...] + pair["a"][...] + last[...]

    def spec():
        return pl.BlockSpec((128, 256), lambda i: (i, 0), memory_space=plgpu.SMEM)

    x = np.zeros((256, 256), F32)
    out = plgpu.ShapeDtypeStruct((256, 256), F32)
    specs = [spec(), None, {"a": spec()}, spec()]
    kernel = pl.pallas_call(body, out, grid=(2,), in_specs=specs, out_specs=spec())
    with pytest.raises(ValueError, match="exceeds available shared memory") as e:
        kernel.lower(x, None, {"a": x}, x)
    named = re.findall(r"^ +131072  (\S*) +smem float32\[1,128,256\]", str(e.value), re.M)
    assert [n for n in named if n in ("first", "none", "pair", "last", "out")] == [
        "first", "last", "out",
    ]  # fmt: skip
    assert len(named) == 4
