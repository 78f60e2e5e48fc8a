"""Kernels as users write them, of sizes that are known when they are called (plgpu.dim): stencils,
persistent loops, pipelines, several sizes and results of computed ones, 8 bits, clusters, tensor
memory. Each is one program, beside NumPy."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp

F32 = np.float32
M, N = plgpu.dim("M"), plgpu.dim("N")
FEW = plgpu.dim("F", max=4096)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WIDE = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
KERNELS = {}


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def kernel_of(sizes, in_shapes, out_type, **options):
    """Decorator: the body of a kernel, whose calls are made for these sizes. It returns the kernel
    and, of random numbers and a size, the operands and the result."""

    def found(make):
        def build(way):
            body, call = make()
            how = {"in_shapes": in_shapes, "out_type": out_type, "interpret": way}
            return plgpu.kernel(body, **how, **options), call, sizes

        KERNELS[make.__name__] = build
        return make

    return found


def normal(rng, *shape, dtype=F32):
    return rng.standard_normal(shape).astype(dtype)


def small(rng, *shape, dtype=np.float16):
    """Integers, whose products are exact."""
    return rng.integers(-3, 4, shape).astype(dtype)


def rows_below(start, count, width, rows=M):
    return start + lax.broadcasted_iota(jnp.int32, (count, width), 0) < rows


@kernel_of(
    (1, 15, 16, 17, 50), ((M, 64),), out(M, 64), grid=(pl.cdiv(M, 16),), grid_names=("i",),
    scratch_types=[plgpu.SMEM((18, 64), F32), plgpu.SMEM((16, 64), F32), plgpu.Barrier()],
)  # fmt: skip
def stencil_with_a_halo():
    """TMA reads zeros before the first row and after the last one."""

    def body(x, o, halo, sums, full):
        first = lax.axis_index("i") * 16
        plgpu.copy_gmem_to_smem(x.at[pl.ds(first - 1, 18)], halo, full)
        plgpu.barrier_wait(full)
        sums[...] = halo[pl.ds(0, 16)] + halo[pl.ds(1, 16)] + halo[pl.ds(2, 16)]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, o.at[pl.ds(first, 16)])
        plgpu.wait_smem_to_gmem(0)

    def call(rng, m):
        x = normal(rng, m, 64)
        wide = np.pad(x, ((1, 1), (0, 0)))
        return (x,), wide[:-2] + wide[1:-1] + wide[2:]

    return body, call


@kernel_of((1, 7, 8, 30), ((M, 40),), out(M, 40), grid=(pl.cdiv(M, 8),), grid_names=("i",))
def stencil_of_five_points():
    def body(x, o):
        first = lax.axis_index("i") * 8
        row = first + lax.broadcasted_iota(jnp.int32, (8, 40), 0)
        column = lax.broadcasted_iota(jnp.int32, (8, 40), 1)

        def at(down, right):
            r, c = row + down, column + right
            there = (r >= 0) & (r < M) & (c >= 0) & (c < 40)
            place = jnp.clip(r, 0, M - 1), jnp.clip(c, 0, 39)
            return pl.load(x, place, mask=there, other=0.0)

        value = 4 * at(0, 0) - at(-1, 0) - at(1, 0) - at(0, -1) - at(0, 1)
        pl.store(o, (pl.ds(first, 8), slice(None)), value, mask=row < M)

    def call(rng, m):
        x = normal(rng, m, 40)
        p = np.pad(x, 1)
        around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        return (x,), 4 * x - around

    return body, call


@kernel_of((1, 2, 17), ((M, 32),), out(M, 32), grid=(M,), grid_names=("i",))
def periodic_stencil():
    """Remainders of numbers that may be negative."""

    def body(x, o):
        i = lax.axis_index("i")
        o[i] = x[(i - 1) % M] + x[(i + 1) % M] - 2 * x[lax.axis_size("i") - 1 - (M - 1 - i)]

    def call(rng, m):
        x = normal(rng, m, 32)
        return (x,), np.roll(x, 1, 0) + np.roll(x, -1, 0) - 2 * x

    return body, call


@kernel_of(
    (1, 16, 100), ((M, 64),), out(M, 64), grid=(3,), grid_names=("b",),
    scratch_types=[plgpu.SMEM((16, 32), F32), plgpu.Barrier()],
)  # fmt: skip
def persistent_blocks():
    def body(x, o, tile, full):
        @plgpu.nd_loop((pl.cdiv(M, 16), 2), collective_axes="b")
        def _(info):
            i, j = info.index
            at = pl.ds(i * 16, 16), pl.ds(j * 32, 32)
            plgpu.copy_gmem_to_smem(x.at[at], tile, full)
            plgpu.barrier_wait(full)
            tile[...] = tile[...] * 2
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o.at[at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0)

    def call(rng, m):
        x = normal(rng, m, 64)
        return (x,), 2 * x

    return body, call


@kernel_of(
    (1, 64, 65, 200), ((M, 64), (M, 64)), out(64, 64, dtype=np.float16),
    scratch_types=[plgpu.SMEM((64, 64), np.float16, transforms=TILED)],
)  # fmt: skip
def pipeline_along_k():
    """The product of a transposed matrix and another: what is summed over is of any size."""

    def body(a, b, o, tile):
        def steps(acc):
            def one(_, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem.T, b_smem)
                plgpu.wgmma_wait(0)

            block = plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=TILED)
            how = {"in_specs": [block] * 2, "max_concurrent_steps": 2}
            plgpu.emit_pipeline(one, grid=(pl.cdiv(M, 64),), **how)(a, b)
            return acc[...]

        tile[...] = pl.run_scoped(steps, plgpu.ACC((64, 64), F32)).astype(jnp.float16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    def call(rng, m):
        a, b = small(rng, m, 64), small(rng, m, 64)
        return (a, b), a.astype(F32).T @ b.astype(F32)

    return body, call


@kernel_of((1, 16, 50), ((FEW, 64),), out(FEW, 64), num_threads=2, thread_name="t")
def specialised_pipeline_of_two_dims():
    def body(x, o):
        def one(_, x_smem, o_smem):
            o_smem[...] = x_smem[...] + 1

        block = [plgpu.BlockSpec((16, 32), lambda i, j: (i, j))]
        plgpu.emit_pipeline_warp_specialized(
            one, grid=(pl.cdiv(FEW, 16), 2), num_compute_wgs=1, memory_registers=40, wg_axis="t",
            in_specs=block, out_specs=block, max_concurrent_steps=3,
        )(x, o)  # fmt: skip

    def call(rng, m):
        x = normal(rng, m, 64)
        return (x,), x + 1

    return body, call


@kernel_of((1, 16, 50), ((FEW, 32),), out(1))
def pipeline_that_carries():
    def body(x, o):
        def one(_, x_smem, total):
            return total + jnp.sum(x_smem[...].reshape((16 * 32,)))

        block = [plgpu.BlockSpec((16, 32), lambda i: (i, 0))]
        how = {"in_specs": block, "max_concurrent_steps": 2, "init_carry": jnp.float32(0)}
        o[0] = plgpu.emit_pipeline(one, grid=(pl.cdiv(FEW, 16),), **how)(x)

    def call(rng, m):
        x = small(rng, m, 32, dtype=F32)
        return (x,), x.sum(keepdims=True).reshape(1)

    return body, call


@kernel_of(
    (1, 8, 100), ((M, 32),), out(32), num_threads=2, thread_name="w",
    scratch_types=[plgpu.SMEM((3, 8, 32), F32), *[plgpu.Barrier(num_barriers=3)] * 2],
)  # fmt: skip
def ring_by_hand():
    """Phases of barriers that follow a loop over a size."""

    def body(x, o, ring, full, empty):
        steps = pl.cdiv(M, 8)

        def fetch(s, _):
            slot = s % 3
            pl.when(s >= 3)(lambda: plgpu.barrier_wait(empty.at[slot], phase=s // 3 - 1))
            plgpu.copy_gmem_to_smem(x.at[pl.ds(s * 8, 8)], ring.at[slot], full.at[slot])

        def add(s, total):
            slot = s % 3
            plgpu.barrier_wait(full.at[slot], phase=s // 3)
            total = total + jnp.sum(ring[slot], axis=0)
            plgpu.barrier_arrive(empty.at[slot])
            return total

        def produce():
            lax.fori_loop(0, steps, fetch, None)
            for slot in range(3):  # the last release of each
                there = steps > slot
                last = (steps - slot - 1) // 3
                pl.when(there)(lambda k=slot, n=last: plgpu.barrier_wait(empty.at[k], phase=n))

        def consume():
            o[...] = lax.fori_loop(0, steps, add, jnp.zeros((32,), jnp.float32))

        lax.cond(lax.axis_index("w") == 1, produce, consume)

    def call(rng, m):
        x = small(rng, m, 32, dtype=F32)
        return (x,), x.sum(0)

    return body, call


@kernel_of(
    ((1, 1), (3, 5), (7, 2)), ((FEW, 32), (plgpu.dim("G", max=999), 32)),
    out(FEW * plgpu.dim("G", max=999), 32), grid=(FEW, plgpu.dim("G", max=999)),
    grid_names=("i", "j"),
)  # fmt: skip
def handed_out_points_of_two_sizes():
    def body(x, y, o):
        @plgpu.dynamic_scheduling_loop(("i", "j"))
        def _(info):
            i, j = info.index
            o[i * y.shape[0] + j] = x[i] + y[j]

    def call(rng, m, n):
        x, y = normal(rng, m, 32), normal(rng, n, 32)
        return (x, y), (x[:, None] + y).reshape(-1, 32)

    return body, call


@kernel_of(
    ((1, 1), (5, 33), (33, 5)), ((M, 16), (N, 16)), out(M * N), grid=(M, pl.cdiv(N, 32)),
    grid_names=("i", "j"),
)  # fmt: skip
def distances_of_two_sets():
    def body(x, y, o):
        i, first = lax.axis_index("i"), lax.axis_index("j") * 32
        there = first + jnp.arange(32) < N
        mask = lax.broadcast_in_dim(there, (32, 16), [0])
        points = pl.load(y, (pl.ds(first, 32), slice(None)), mask=mask, other=0.0)
        apart = points - lax.broadcast_in_dim(x[i], (32, 16), [1])
        pl.store(o, (pl.ds(i * N + first, 32),), jnp.sum(apart * apart, axis=1), mask=there)

    def call(rng, m, n):
        x, y = normal(rng, m, 16), normal(rng, n, 16)
        return (x, y), ((x[:, None] - y) ** 2).sum(-1).ravel()

    return body, call


@kernel_of(
    ((5, 3), (9, 3), (30, 5)), ((M, 32), (N,)), out(pl.cdiv(N - 1, 1), 32), grid=(N - 1,),
    grid_names=("s",),
)  # fmt: skip
def sums_of_segments():
    def body(x, ends, o):
        s = lax.axis_index("s")
        zeros = jnp.zeros((32,), jnp.float32)
        o[s] = lax.fori_loop(ends[s], ends[s + 1], lambda r, total: total + x[r], zeros)

    def call(rng, m, n):
        ends = np.sort(rng.integers(0, m + 1, n)).astype(np.int32)
        x = small(rng, m, 32, dtype=F32)
        return (x, ends), np.stack([x[a:b].sum(0) for a, b in zip(ends, ends[1:])])

    return body, call


@kernel_of(
    (1, 8, 9, 30), ((M, 128),), (out(M, 128, dtype=np.int8), out(M), out(M + 1)),
    grid=(pl.cdiv(M, 8),), grid_names=("i",),
)  # fmt: skip
def rows_in_8_bits():
    """Three results of different sizes."""

    def body(x, q, scales, tops):
        first = lax.axis_index("i") * 8
        there = first + jnp.arange(8) < M
        mask = rows_below(first, 8, 128)
        value = pl.load(x, (pl.ds(first, 8), slice(None)), mask=mask, other=0.0)
        top = jnp.maximum(jnp.max(jnp.abs(value), axis=1), 1e-6)
        pl.store(scales, (pl.ds(first, 8),), top / 127, mask=there)
        pl.store(tops, (pl.ds(first + 1, 8),), top, mask=there)
        value = jnp.round(value / (top / 127)[:, None]).astype(jnp.int8)
        pl.store(q, (pl.ds(first, 8), slice(None)), value, mask=mask)

        @pl.when(first == 0)
        def _():
            tops[0] = jnp.float32(M)

    def call(rng, m):
        x = normal(rng, m, 128)
        top = np.abs(x).max(1)
        scale = (top / 127).astype(F32)
        return (x,), (np.round(x / scale[:, None]), scale, np.append(m, top))

    return body, call


@kernel_of(
    (1, 64, 65, 130), ((M, 128), None), out(M, 64), grid=(pl.cdiv(M, 64),), grid_names=("i",),
    scratch_types=[
        *[plgpu.SMEM((64, 128), float8_e4m3fn, transforms=WIDE)] * 2,
        plgpu.Barrier(num_arrivals=2),
    ],
)  # fmt: skip
def product_of_8_bits():
    def body(a, b, o, a_smem, b_smem, full):
        first = lax.axis_index("i") * 64
        plgpu.copy_gmem_to_smem(a.at[pl.ds(first, 64)], a_smem, full)
        plgpu.copy_gmem_to_smem(b, b_smem, full)
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem.T)
            plgpu.wgmma_wait(0)
            return acc[...]

        value = pl.run_scoped(multiply, plgpu.ACC((64, 64), F32))
        pl.store(o, (pl.ds(first, 64), slice(None)), value, mask=rows_below(first, 64, 64))

    def call(rng, m):
        a, b = (small(rng, n, 128, dtype=float8_e4m3fn) for n in (m, 64))
        return (a, b), a.astype(F32) @ b.astype(F32).T

    return body, call


@kernel_of(
    (1, 64, 100, 200), ((M, 64), None), out(M, 64), grid=(pl.cdiv(M, 128),), grid_names=("i",),
    cluster=(2,), cluster_names=("c",),
    scratch_types=[
        *[plgpu.SMEM((64, 64), np.float16, transforms=TILED)] * 2, plgpu.Barrier(num_arrivals=2)
    ],
)  # fmt: skip
def product_of_a_cluster():
    """Blocks that share B, of which one may have no rows."""

    def body(a, b, o, a_smem, b_smem, full):
        first = (lax.axis_index("i") * 2 + lax.axis_index("c")) * 64
        plgpu.copy_gmem_to_smem(a.at[pl.ds(first, 64)], a_smem, full)
        plgpu.copy_gmem_to_smem(b, b_smem, full, collective_axes="c")
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            return acc[...]

        value = pl.run_scoped(multiply, plgpu.ACC((64, 64), F32))
        pl.store(o, (pl.ds(first, 64), slice(None)), value, mask=rows_below(first, 64, 64))

    def call(rng, m):
        a, b = small(rng, m, 64), small(rng, 64, 64)
        return (a, b), a.astype(F32) @ b.astype(F32)

    return body, call


@kernel_of(
    (1, 128, 130), ((M, 64), None), out(M, 64), grid=(pl.cdiv(M, 128),), grid_names=("i",),
    scratch_types=[
        plgpu.SMEM((128, 64), np.float16, transforms=TILED),
        plgpu.SMEM((64, 64), np.float16, transforms=TILED),
        plgpu.TMEM((128, 64), F32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(orders_tensor_core=True),
    ],
)  # fmt: skip
def product_in_tensor_memory():
    """For Blackwell."""

    def body(a, b, o, a_smem, b_smem, acc, full, done):
        first = lax.axis_index("i") * 128
        plgpu.copy_gmem_to_smem(a.at[pl.ds(first, 128)], a_smem, full)
        plgpu.copy_gmem_to_smem(b, b_smem, full)
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        value = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        pl.store(o, (pl.ds(first, 128), slice(None)), value, mask=rows_below(first, 128, 64))

    def call(rng, m):
        a, b = small(rng, m, 64), small(rng, 64, 64)
        return (a, b), a.astype(F32) @ b.astype(F32)

    return body, call


@kernel_of((1, 6, 40), ((M,),), (out(M), out(1, dtype=np.int32)))
def positive_elements():
    """A while loop that a size ends, and a loop from a traced number to a size."""

    def body(x, o, count):
        def one(state):
            i, kept = state
            value = x[i]

            @pl.when(value > 0)
            def _():
                o[kept] = value

            return i + 1, kept + (value > 0).astype(jnp.int32)

        _, kept = lax.while_loop(lambda state: state[0] < M, one, (jnp.int32(0), jnp.int32(0)))
        count[0] = kept

        @pl.loop(kept, M)
        def _(i):
            o[i] = jnp.float32(0)

    def call(rng, m):
        x = normal(rng, m)
        kept = x[x > 0]
        return (x,), (np.append(kept, np.zeros(m - len(kept))), [len(kept)])

    return body, call


@kernel_of((1, 8, 19), ((M, 33),), out(M, 33, dtype=bfloat16), grid=(pl.cdiv(M, 8),),
           grid_names=("i",),
           scratch_types=[plgpu.SMEM((8, 33), bfloat16), plgpu.Barrier()])  # fmt: skip
def rows_that_tma_cannot_address():
    def body(x, o, tile, full):
        rows = pl.ds(lax.axis_index("i") * 8, 8)
        plgpu.copy_gmem_to_smem(x.at[rows], tile, full)
        plgpu.barrier_wait(full)
        tile[...] = tile[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[rows])
        plgpu.wait_smem_to_gmem(0)

    def call(rng, m):
        x = small(rng, m, 33, dtype=bfloat16)
        return (x,), x.astype(F32) + 1

    return body, call


WAYS = [
    pytest.param(plgpu.InterpretParams(detect_races=True, detect_uninitialized=True), id="races"),
    pytest.param("emulate", id="host"),
    pytest.param(None, id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.filterwarnings("ignore:.*is done by loads and stores")
@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KERNELS)
def test_one_program_for_all_sizes(rng, name, way):
    if way is None and "tensor_memory" in name:
        pytest.skip("for Blackwell")
    plgpu.clear_caches()
    kernel, call, sizes = KERNELS[name](way)
    before = _core.plan_memory()["plans"]
    for size in sizes:
        operands, want = call(rng, *(size if isinstance(size, tuple) else (size,)))
        got = kernel(*operands)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for a, b in pairs:
            assert a.shape == np.shape(b)
            np.testing.assert_allclose(np.asarray(a, F32), b, rtol=1e-4, atol=1e-4)
    assert _core.plan_memory()["plans"] - before == 1


SIZE = plgpu.dim("S", max=10)  # few enough for an array in registers


def whole_load(x, o):
    o[0] = x[...][0]


def whole_sum(x, o):
    o[0] = jnp.sum(x[...], axis=0)


def whole_store(x, o):
    o[...] = jnp.zeros(11 * 64, jnp.float32).reshape((11, 64))


def load_to_the_end(x, o):
    o[0] = x[1:][0]


def store_beyond(x, o):
    o[pl.ds(8, 3)] = jnp.zeros((3, 64), jnp.float32)


BEYOND = [whole_load, whole_sum, whole_store, load_to_the_end, store_beyond]


@pytest.mark.parametrize("body", BEYOND)
def test_arrays_in_registers_have_fixed_shapes(body):
    kernel = plgpu.kernel(body, in_shapes=((SIZE, 64),), out_type=out(SIZE, 64), interpret=True)
    with pytest.raises(
        TypeError, match="a dimension whose size is known when .* part of a fixed size"
    ):
        kernel(np.ones((7, 64), F32))


def test_where_sizes_do_not_go():
    with pytest.raises(TypeError, match=r"M / 16 is no size .* \+ - \* // % .* pl.cdiv"):
        M / 16
    with pytest.raises(TypeError, match="pallas_call: out_shape has sizes .* plgpu.kernel"):
        pl.pallas_call(lambda x, o: None, out_shape=out(M, 64))

    def blocks_of_any_size(x, o):
        block = [plgpu.BlockSpec((M, 64), lambda i: (0, 0))]
        plgpu.emit_pipeline(lambda *_: None, grid=(1,), in_specs=block, out_specs=block)(x, o)

    kernel = plgpu.kernel(blocks_of_any_size, in_shapes=((M, 64),), out_type=out(M, 64))
    with pytest.raises(NotImplementedError, match="block size type M; blocks have fixed sizes"):
        kernel.lower(np.ones((7, 64), F32))
