"""plgpu.dim: one program for all sizes of an array, on the interpreter and the emulated machine."""

import copy
import pickle
import re

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp

M = plgpu.dim("M")
ROWS, K, N = 64, 64, 128
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
F32 = np.float32
BOTH = pytest.mark.parametrize("interpret", [True, "emulate"])


def plans(f):
    """How many programs a function traces."""
    before = _core.plan_memory()["plans"]
    f()
    return _core.plan_memory()["plans"] - before


def product(a, b, o, a_smem, b_smem, o_smem, full):
    rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(a.at[rows], a_smem, full)
    plgpu.copy_gmem_to_smem(b, b_smem, full)
    plgpu.barrier_wait(full)

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        plgpu.wgmma_wait(0)
        return acc[...]

    total = pl.run_scoped(multiply, plgpu.ACC((ROWS, N), jnp.float32))
    o_smem[...] = total.astype(o.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o.at[rows])
    plgpu.wait_smem_to_gmem(0)


def make_product(**options):
    return plgpu.kernel(
        product,
        out_type=plgpu.ShapeDtypeStruct((M, N), bfloat16),
        in_shapes=((M, None), None),
        grid=(pl.cdiv(M, ROWS),),
        grid_names=("i",),
        scratch_types=[
            plgpu.SMEM((ROWS, K), bfloat16, transforms=TILED),
            plgpu.SMEM((K, N), bfloat16, transforms=TILED),
            plgpu.SMEM((ROWS, N), bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2),
        ],
        **options,
    )


@BOTH
def test_tensor_maps_and_grids_follow_the_array(interpret):
    """Rows beyond the end read as zeros and are not written, whatever the last call had."""
    kernel, rng = make_product(interpret=interpret), np.random.default_rng(0)
    b = rng.standard_normal((K, N)).astype(bfloat16)

    def calls():
        for m in (300, 1, 64, 65, 127, 300):
            a = rng.standard_normal((m, K)).astype(bfloat16)
            room = np.full((m + 70, N), 7, bfloat16)
            kernel(a, b, out=room[:m])
            want = a.astype(F32) @ b.astype(F32)
            np.testing.assert_allclose(room[:m].astype(F32), want, rtol=2e-2, atol=2e-2)
            assert (room[m:] == 7).all()

    assert plans(calls) == 1


def test_checks_of_races_and_memory_that_was_never_written():
    checks = plgpu.InterpretParams(detect_races=True, detect_uninitialized=True)
    kernel = make_product(interpret=checks)
    a = np.ones((70, K), bfloat16)
    np.testing.assert_array_equal(kernel(a, np.ones((K, N), bfloat16)), K)


def scaled(x, o):
    """Loops, masks and arithmetic: each row times the number of rows below it and including it."""
    rows = x.shape[0]
    assert rows == M and isinstance(rows, plgpu.Dim) and x.at[:, 3:5].shape == (rows, 2)

    def step(i, carry):
        o[i] = x[i] * (rows - i)
        return carry + 1

    count = lax.fori_loop(0, rows, step, 0)

    @pl.when(count == rows)
    def _():
        @pl.when(rows > 5)
        def _():
            o[rows - 1] = x[rows - 1] * rows


@BOTH
def test_a_size_is_a_scalar_in_the_body(interpret):
    kernel = plgpu.kernel(
        scaled,
        out_type=plgpu.ShapeDtypeStruct((M, 40), F32),
        in_shapes=((M, None),),
        interpret=interpret,
    )
    for m in (1, 5, 6, 33):
        x = np.random.default_rng(m).standard_normal((m, 40)).astype(F32)
        want = x * np.arange(m, 0, -1, dtype=F32)[:, None]
        if m > 5:
            want[-1] = x[-1] * m
        np.testing.assert_allclose(kernel(x), want, rtol=1e-6)


@BOTH
def test_quotients_by_sizes_with_and_without_signs(interpret):
    """Of numbers that are known not to be negative, and of others."""

    def body(x, o):
        n = x.shape[0] + 0
        i = lax.axis_index("i")
        large = jnp.clip(i * 1000003 + 7, 0, 2**31 - 2)
        o[i, 0], o[i, 1] = lax.div(large, n), lax.rem(large, n)
        o[i, 2], o[i, 3] = lax.div(i - 5, n), lax.rem(i - 5, n)
        o[i, 4] = jnp.maximum(i, 1) // jnp.maximum(n - 100, 1)

    out = plgpu.ShapeDtypeStruct((12, 5), np.int32)
    how = {"in_shapes": ((M,),), "grid": (12,), "grid_names": ("i",), "interpret": interpret}
    kernel = plgpu.kernel(body, out_type=out, **how)
    assert "(u32)" in kernel.lower(np.zeros(7, F32)).as_text("cuda").split("body_kernel(")[1]
    for n in (1, 3, 97, 1000):
        i = np.arange(12)
        large, small = np.minimum(i * 1000003 + 7, 2**31 - 2), i - 5
        towards_0 = np.trunc(small / n).astype(int)
        columns = [large // n, large % n, towards_0, small - towards_0 * n]
        columns.append(np.maximum(i, 1) // max(n - 100, 1))
        got = kernel(np.zeros(n, F32))
        np.testing.assert_array_equal(got, np.stack(columns, 1))


@BOTH
def test_outputs_and_several_arguments(interpret):
    """Sizes computed from others; a second argument that has to agree; many axes of the grid."""
    L = plgpu.dim("L", multiple_of=4)

    def body(x, y, o, p):
        i, j, k, half = (lax.axis_index(n) for n in "ijkh")
        row = ((i * 2 + j) * (L // 4) + k) * 2 + half
        o[row] = x[row] + y[row]
        p[row // 2] = jnp.full((8,), row // 2, jnp.int32)

    kernel = plgpu.kernel(
        body,
        out_type=[
            plgpu.ShapeDtypeStruct((L, 8), F32),
            plgpu.ShapeDtypeStruct((L // 2, 8), np.int32),
        ],
        in_shapes=((L, 8), (L, None)),
        grid=(1, 2, L // 4, 2),
        grid_names=tuple("ijkh"),
        interpret=interpret,
    )
    for n in (4, 12, 36):
        x = np.random.default_rng(n).standard_normal((n, 8)).astype(F32)
        o, p = kernel(x, -2 * x)
        np.testing.assert_array_equal(o, -x)
        np.testing.assert_array_equal(p, np.repeat(np.arange(n // 2)[:, None], 8, 1))
    none = plgpu.kernel(
        lambda x, o: None,
        out_type=plgpu.ShapeDtypeStruct((L // 8, 8), F32),
        in_shapes=((L, 8),),
        interpret=interpret,
    )
    with pytest.raises(ValueError, match="dimension 0 of output 0 is 0 for these arguments"):
        none(np.ones((4, 8), F32))
    huge = plgpu.kernel(
        lambda x, o: None,
        out_type=plgpu.ShapeDtypeStruct((L * 2**28, 8), F32),
        in_shapes=((L, 8),),
        interpret=interpret,
    )
    with pytest.raises(ValueError, match="is 2147483648 for these; sizes are below"):
        huge(np.ones((8, 8), F32))
    with pytest.raises(ValueError, match="dimension 0 of argument 1 is 8, and L is 4"):
        kernel(np.ones((4, 8), F32), np.ones((8, 8), F32))
    with pytest.raises(ValueError, match=r"L is 6 \(dimension 0 of argument 0\); multiples of 4"):
        kernel(np.ones((6, 8), F32), np.ones((6, 8), F32))


def copied(x, o, x_smem, full):
    rows = pl.ds(lax.axis_index("i") * 16, 16)
    plgpu.copy_gmem_to_smem(x.at[rows], x_smem, full)
    plgpu.barrier_wait(full)
    plgpu.copy_smem_to_gmem(x_smem, o.at[rows])
    plgpu.wait_smem_to_gmem(0)


@BOTH
@pytest.mark.parametrize("width", [16, 17])
def test_copies_that_the_lanes_do_end_where_the_array_ends(interpret, width):
    """Rows of 17 elements allow no tensor map."""
    kernel = plgpu.kernel(
        copied,
        out_type=plgpu.ShapeDtypeStruct((M, width), bfloat16),
        in_shapes=((M, None),),
        grid=(pl.cdiv(M, 16),),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((16, width), bfloat16), plgpu.Barrier()],
        interpret=interpret,
    )
    for m in (1, 16, 23):
        x = np.random.default_rng(m).standard_normal((m, width)).astype(bfloat16)
        room = np.full((m + 16, width), 7, bfloat16)
        kernel(x, out=room[:m])
        np.testing.assert_array_equal(room[:m], x)
        assert (room[m:] == 7).all()


@BOTH
@pytest.mark.parametrize("clipped, engine", [(128, "bulk"), (120, "tma")])
def test_copies_that_are_clipped_to_the_end_lie_inside(interpret, clipped, engine):
    """The last block of an array of any size ends with it: known to the bulk engine if the clip
    leaves room for the whole copy."""
    size = plgpu.dim("size", min=128, multiple_of=8)

    def body(x, o, smem, full):
        i = lax.axis_index("i")
        start = pl.multiple_of(jnp.clip(i * 128, 0, size - clipped), 8)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(start, 128)], smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(smem, o.at[pl.ds(start, 128)])

    f = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((size,), F32),
        in_shapes=((size,),),
        grid=(pl.cdiv(size, 128),),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
        interpret=interpret,
    )
    for n in (128, 136, 640, 1000):
        x = np.arange(n, dtype=F32)
        assert np.array_equal(f(x), x)
    text = f.lower(x).as_text("graph")
    assert text.count(f"engine = {engine}") == 2


@BOTH
def test_accesses_out_of_bounds_are_found_at_the_size_of_the_call(interpret):
    def body(x, o):
        i = lax.axis_index("i") + 5
        o[...] = x[i]

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((8,), F32),
        in_shapes=((M, None),),
        grid=(1,),
        grid_names=("i",),
        interpret=interpret,
    )
    np.testing.assert_array_equal(kernel(np.ones((6, 8), F32)), 1)
    shape = re.escape("(M, 8)" if interpret == "emulate" else "(5, 8)")  # the program's, the call's
    with pytest.raises(IndexError, match=f"index 5 of dimension 0 .* 'x' of shape {shape}"):
        kernel(np.ones((5, 8), F32))


@BOTH
def test_rows_of_which_no_array_has_the_most(interpret):
    """2**31 rows of these would be more elements than arrays have: a size is at most what fits."""

    def doubled(x, o):
        o[lax.axis_index("i"), :128] = x[lax.axis_index("i"), -128:] * 2

    kernel = plgpu.kernel(
        doubled,
        out_type=plgpu.ShapeDtypeStruct((M, 1 << 17), F32),
        in_shapes=((M, None),),
        grid=(M,),
        grid_names=("i",),
        interpret=interpret,
    )

    for m in (1, 2, 5):
        x = np.arange(m * (1 << 16), dtype=F32).reshape(m, -1)
        np.testing.assert_array_equal(kernel(x)[:, :128], x[:, -128:] * 2)
    assert 'size "M" extent 0 0 1 536870911 1' in kernel.lower(x).as_text("graph")


def place(o):
    """Each block its row and column."""
    i, j = lax.axis_index("i"), lax.axis_index("j")
    o[i, j] = i * 100 + j


def placed(rows, columns):
    return np.arange(rows, dtype=np.int32)[:, None] * 100 + np.arange(columns, dtype=np.int32)


@BOTH
def test_axes_that_may_be_longer_than_those_of_cuda(interpret):
    """Blocks along the first axis are more than 65,535 of CUDA's y: all lie along x."""

    def body(x, o):
        place(o)

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((M, 3), np.int32),
        in_shapes=((M,),),
        grid=(M, 3),
        grid_names=("i", "j"),
        interpret=interpret,
    )
    assert "blockIdx.x / 3" in kernel.lower(np.zeros(2, F32)).as_text("cuda")
    for m in (1, 7, 130):
        np.testing.assert_array_equal(kernel(np.zeros(m, F32)), placed(m, 3))


def test_errors_name_points_of_a_grid_that_lies_along_x():
    def body(x, o):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        o[i, j + (i == 4)] = x[i]

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((M, 3), F32),
        in_shapes=((M,),),
        grid=(M, 3),
        grid_names=("i", "j"),
        interpret="emulate",
    )
    with pytest.raises((IndexError, RuntimeError), match=r"grid point \(4, 2\)"):
        kernel(np.zeros(6, F32))


@pytest.mark.gpu
def test_long_grids_on_a_gpu():
    for grid, cluster in (((70000, 3), ()), ((2, 70000, 5), ()), ((70000, 2), (2,))):
        axes = [f"g{k}" for k in range(len(grid))]

        def body(o, axes=axes, cluster=cluster):
            at = tuple(lax.axis_index(a) for a in axes)
            inside = lax.axis_index("c") if cluster else 0
            number = at[0]
            for k in range(1, len(at)):
                number = number * o.shape[k] + at[k]
            o[(*at, inside)] = number * 2 + inside

        shape = (*grid, *(cluster or (1,)))
        names = {"cluster": cluster, "cluster_names": ("c",)} if cluster else {}
        out = plgpu.ShapeDtypeStruct(shape, np.int32)
        kernel = plgpu.kernel(body, out_type=out, grid=grid, grid_names=tuple(axes), **names)
        want = np.arange(np.prod(grid), dtype=np.int32).reshape(*grid, 1) * 2
        np.testing.assert_array_equal(kernel(), want + np.arange(shape[-1]))


def test_errors_name_sizes():
    """Types have the most of a size and one in its place, which no user wrote."""

    def filled(x, o):
        o[...] = jnp.float32(0)

    def flat(x, o):
        x.reshape(2, -1)

    for body, dim, note in (
        (filled, M, "2147483647 stands for M, known"),
        (flat, plgpu.dim("M", max=1000), "1001 stands for M, known"),
        (filled, plgpu.dim("M", max=1000), "1001 stands for M, known"),
    ):
        out = plgpu.ShapeDtypeStruct((dim,), F32)
        kernel = plgpu.kernel(body, out_type=out, in_shapes=((dim,),), interpret=True)
        with pytest.raises(ValueError, match=note):
            kernel(np.ones(5, F32))


def test_text_form_round_trips():
    lowered = make_product().lower(np.zeros((9, K), bfloat16), np.zeros((K, N), bfloat16))
    for text in (lowered.as_text("traced"), lowered.as_text("graph")):
        assert "extents [1, 0]" in text and "grid_sizes [" in text
        assert _core.Graph.parse(text).text() == text
    assert "M - " not in lowered.as_text("cuda")  # tensor maps alone depend on it


def test_where_sizes_cannot_stay_open_calls_are_traced_for_their_shapes():
    """vmap, GMEM scratch: right results, a program for each shape."""

    def body(x, o, scratch):
        i = lax.axis_index("i")
        scratch[...] = x[i] * (x.shape[0] + M)
        o[i] = scratch[...]

    def make(*scratch):
        inner = body if scratch else lambda x, o: body(x, o, o.at[lax.axis_index("i")])
        return plgpu.kernel(
            inner,
            out_type=plgpu.ShapeDtypeStruct((M, 8), F32),
            in_shapes=((M, None),),
            grid=(M,),
            grid_names=("i",),
            scratch_types=scratch,
            interpret=True,
        )

    x = np.random.default_rng(1).standard_normal((3, 5, 8)).astype(F32)
    for n in (5, 2):
        np.testing.assert_allclose(make(plgpu.GMEM((8,), F32))(x[0, :n]), 2 * n * x[0, :n])
        y = np.ascontiguousarray(x[:, :n])
        np.testing.assert_allclose(plgpu.vmap(make())(y), 2 * n * y)


def test_every_target_compiles():
    def body(x, o):
        i = lax.axis_index("i")
        o[i] = x[i] * x.shape[0]

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((M, 8), F32),
        in_shapes=((M, None),),
        grid=(M,),
        grid_names=("i",),
    )
    lowered = kernel.lower(plgpu.ShapeDtypeStruct((3, 8), F32))
    assert "const i32 M" in lowered.as_text("cuda") and lowered.as_text("ptx")


def test_arithmetic_and_what_bounds_decide():
    S = plgpu.dim("S", min=2, max=100, multiple_of=2)
    assert repr(pl.cdiv(S, 8) * 3) == "((((S + 8) - 1) // 8) * 3)"
    assert (S // 2).least == 1 and (S * 3).multiple == 6 and S % 2 == 0 and S + 0 is S
    assert (100 // S).most == 50 and 100 // S + 1 <= 51
    assert S > 1 and not S > 100 and S != 101 and S == plgpu.dim("S", min=2, max=100, multiple_of=2)
    assert (pl.cdiv(S, 8) * 3).value({S: 10}) == 6
    with pytest.raises(TypeError, match="S < 50 is known when the kernel is called only"):
        bool(S < 50)
    with pytest.raises(TypeError, match="S is a size.*this needs an int"):
        range(S)
    with pytest.raises(ValueError, match="1 <= min <= max"):
        plgpu.dim("S", min=0)
    with pytest.raises(TypeError, match="name must be an identifier"):
        plgpu.dim("2")
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        size = (plgpu.dim("M", multiple_of=8) + 3) // 4
        assert again(size) == size and hash(again(size)) == hash(size)


def test_expressions_are_compared_by_their_values():
    def body(_, o):
        a, b = pl.cdiv(M, 8) * 3, pl.cdiv(M, 16) * 5
        o[0] = jnp.where(a <= b, 1, 0)
        o[1] = jnp.where(a == b, 1, 0)

    out_type = plgpu.ShapeDtypeStruct((2,), np.int32)
    f = plgpu.kernel(body, out_type=out_type, in_shapes=((M,),), interpret=True)
    for m in (1, 9, 17, 33, 47, 49, 73):
        a, b = -(-m // 8) * 3, -(-m // 16) * 5
        np.testing.assert_array_equal(f(np.zeros(m, F32)), [a <= b, a == b])


def test_what_is_missing_says_so():
    def nothing(x, o):
        o[0] = x[0]

    def make(shape, out=None, **options):
        spec = plgpu.ShapeDtypeStruct(out or (4, 8), F32)
        return plgpu.kernel(nothing, out_type=spec, in_shapes=(shape,), **options)

    x = np.ones((4, 8), F32)
    with pytest.raises(NotImplementedError, match="dimension 1 has a size.*Put it first"):
        make((None, M)).lower(x)
    with pytest.raises(ValueError, match=r"argument 0 has shape \(4, 8\), and in_shapes\[0\] is"):
        make((M, 9)).lower(x)
    with pytest.raises(ValueError, match="no argument has the size L; name it in in_shapes="):
        make((M, None), (plgpu.dim("L"), 8)).lower(x)
    with pytest.raises(TypeError, match="in_shapes has 1 shapes, and the call 2 arrays"):
        make((M, None)).lower(x, x)

    def reshaped(x, o):
        o[0] = x.reshape(-1)[:8] if x.ndim == 1 else x.reshape(M * 8)[:8]

    with pytest.raises((NotImplementedError, TypeError), match="plgpu.dim"):
        plgpu.kernel(
            reshaped, out_type=plgpu.ShapeDtypeStruct((4, 8), F32), in_shapes=((M, None),)
        ).lower(x)


def test_shapes_of_views_and_numbers_of_elements():
    """A reshape may name the size, which stays whole; `size` is a product."""
    ways = (lambda x: (M, 4, 32), lambda x: (x.shape[0], 4, 32), lambda x: (-1, 4, 32))
    for way in ways:

        def body(x, o, way=way):
            i = lax.axis_index("i")
            o[i] = x.reshape(way(x))[i].sum(axis=1) / x.size

        kernel = plgpu.kernel(
            body, out_type=plgpu.ShapeDtypeStruct((M, 4), F32), in_shapes=((M, 128),), grid=(M,),
            grid_names=("i",), interpret=True,
        )  # fmt: skip
        for m in (1, 5):
            x = np.random.default_rng(m).standard_normal((m, 128)).astype(F32)
            want = x.reshape(m, 4, 32).sum(2) / x.size
            np.testing.assert_allclose(kernel(x), want, rtol=1e-5, atol=1e-6)

    def other(x, o):
        o[0] = x.reshape((plgpu.dim("L"), 4, 32))[0].sum(axis=1)

    with pytest.raises(TypeError, match="L is a size that is known when the kernel is called"):
        plgpu.kernel(
            other, out_type=plgpu.ShapeDtypeStruct((M, 4), F32), in_shapes=((M, 128),)
        ).lower(x)


@pytest.mark.parametrize("interpret", [True, "emulate"])
def test_copies_of_reshaped_arrays(interpret):
    """TMA clips boxes at the end of the rows and of each half of the columns."""

    def body(x, o, smem, barrier):
        i, half = lax.axis_index("i"), lax.axis_index("half")
        at = pl.ds(i * 8, 8), half, pl.ds(0, 32)
        plgpu.copy_gmem_to_smem(x.reshape((M, 2, 24)).at[at], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, o.reshape((M, 2, 24)).at[at])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((M, 48), F32), in_shapes=((M, 48),),
        grid=((M + 7) // 8, 2), grid_names=("i", "half"), interpret=interpret,
        scratch_types=[plgpu.SMEM((8, 32), F32), plgpu.Barrier()],
    )  # fmt: skip
    assert "tma_load_3d" in kernel.lower(np.ones((3, 48), F32)).as_text("cuda")
    for m in (1, 13, 16):
        x, out = (
            np.random.default_rng(m).standard_normal((m, 48)).astype(F32),
            np.zeros((m, 48), F32),
        )
        np.testing.assert_array_equal(kernel(x, out=out), x)


SCALARS = {
    "minimum": (lambda m: jnp.minimum(m, 5), lambda m: min(m, 5)),
    "square root": (lambda m: jnp.sqrt(jnp.float32(m)), lambda m: m**0.5),
    "float": (lambda m: m * 0.5, lambda m: m * 0.5),
    "reflected": (lambda m: 1.5 - m, lambda m: 1.5 - m),
    "quotient": (lambda m: m / 4, lambda m: m / 4),
    "power": (lambda m: m**2, lambda m: m**2),
    "bits": (lambda m: (m >> 1) & 3, lambda m: (m >> 1) & 3),
    "clip": (lambda m: jnp.clip(m, 0, 7), lambda m: min(m, 7)),
    "exponential": (lambda m: jnp.exp(-m), lambda m: np.exp(-m)),
    "magnitude": (lambda m: abs(2 - m), lambda m: abs(2 - m)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_sizes_are_scalars_in_arithmetic(name):
    of_size, of_int = SCALARS[name]

    def body(x, o):
        o[...] = jnp.full((32,), of_size(x.shape[0])).astype(jnp.float32)

    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((32,), F32), in_shapes=((M, 32),), interpret=True
    )
    for m in (1, 9):
        np.testing.assert_allclose(kernel(np.ones((m, 32), F32)), of_int(m), rtol=1e-6)


@pytest.mark.parametrize(
    "way", [plgpu.InterpretParams(detect_races=True), "emulate"], ids=("interpret", "host")
)
def test_pipelines_over_sizes(way):
    """emit_pipeline, the one of specialised warps, and dynamic scheduling, over grids of sizes."""
    rows = plgpu.dim("R", max=1000)
    blocks = [plgpu.BlockSpec((16, 32), lambda i: (i, 0))]
    how = {"in_specs": blocks, "out_specs": blocks, "max_concurrent_steps": 2}

    def double(_, x_s, o_s):
        o_s[...] = 2 * x_s[...]

    def plain(x, o):
        plgpu.emit_pipeline(double, grid=(pl.cdiv(rows, 16),), **how)(x, o)

    def specialised(x, o):
        plgpu.emit_pipeline_warp_specialized(
            double, grid=(pl.cdiv(rows, 16),), num_compute_wgs=1, memory_registers=40, wg_axis="t",
            **how,
        )(x, o)  # fmt: skip

    def scheduled(x, o):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            o[info.index[0]] = 2 * x[info.index[0]]

    options = {plain: {}, specialised: {"num_threads": 2, "thread_name": "t"}}
    options[scheduled] = {"grid": (rows,), "grid_names": ("i",)}
    for body, given in options.items():
        kernel = plgpu.kernel(
            body, out_type=plgpu.ShapeDtypeStruct((rows, 32), F32), in_shapes=((rows, 32),),
            interpret=way, **given,
        )  # fmt: skip
        for m in (1, 16, 50):
            x = np.random.default_rng(m).standard_normal((m, 32)).astype(F32)
            np.testing.assert_array_equal(kernel(x), 2 * x)
    with pytest.raises(ValueError, match="handed out, got M, up to .*give plgpu.dim a max="):
        plgpu.kernel(
            scheduled, out_type=plgpu.ShapeDtypeStruct((M, 32), F32), in_shapes=((M, 32),),
            grid=(M,), grid_names=("i",),
        ).lower(np.ones((4, 32), F32))  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu():
    """One compilation, no synchronisation, a new map for each size."""
    torch = pytest.importorskip("torch")
    kernel = make_product()
    b = torch.randn(K, N, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = []
        for m in (300, 1, 64, 8191, 65, 300):
            a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
            results.append((a, kernel(a, b)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, o in results:
        torch.testing.assert_close(o, a @ b, rtol=2e-2, atol=2e-2)


@BOTH
def test_sums_of_sizes_are_a_grid(interpret):
    """Without bounds the sum of two could be above what a grid may have; a call checks it."""
    other = plgpu.dim("N")

    @plgpu.kernel(
        in_shapes=((M, 32), (other, 32)),
        out_type=plgpu.ShapeDtypeStruct((M + other, 32), F32),
        grid=(M + other,),
        grid_names=("i",),
        interpret=interpret,
    )
    def joined(a, b, o):
        i = lax.axis_index("i")

        @pl.when(i < M)
        def _():
            o[i] = a[i]

        @pl.when(i >= M)
        def _():
            o[i] = b[i - M]

    for m, n in ((1, 4), (7, 2)):
        a, b = np.random.default_rng(m).standard_normal((2, 8, 32)).astype(F32)
        np.testing.assert_array_equal(joined(a[:m], b[:n]), np.concatenate([a[:m], b[:n]]))


def test_a_grid_that_is_too_large():
    @plgpu.kernel(
        in_shapes=((M, 8),),
        out_type=plgpu.ShapeDtypeStruct((8,), F32),
        grid=(M * 100_000_000,),
        grid_names=("i",),
        interpret=True,
    )
    def many(x, o):
        o[...] = x[0]

    with pytest.raises(ValueError, match="is 3000000000 for these; sizes are below"):
        many(np.ones((30, 8), F32))
