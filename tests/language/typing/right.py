"""Right programs over every public namespace: type checkers accept each line, and it runs.

tests/language/test_typing.py runs pyright and mypy --strict on this file, and the file itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, ops, pl, tree
from pallas_mgpu import numpy as jnp

F32 = NDArray[np.float32]
N = 128


# ---- kernels and how they are called -------------------------------------------------------------


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((N,), jnp.float32), interpret=True)
def add_one(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    o_ref[...] = x_ref[...] + 1


@plgpu.kernel(
    out_type=(
        plgpu.ShapeDtypeStruct((N,), np.float32),
        plgpu.ShapeDtypeStruct((N,), "int32"),
    ),
    grid=(2,),
    grid_names=("i",),
    interpret=plgpu.InterpretParams(seed=3),
)
def two(x_ref: plgpu.Ref, y_ref: plgpu.Ref, z_ref: plgpu.Ref) -> None:
    i = lax.axis_index("i")
    at = pl.ds(i * 64, 64)
    x = x_ref[at]
    y_ref[at] = jnp.where(x > 0, x, -x)
    z_ref[at] = jnp.sign(x).astype(jnp.int32)


def call(x: F32) -> None:
    y: F32 = add_one(x)
    z = add_one(x, out=np.empty_like(x))
    print(y.shape, z.sum(), y + z)
    a, b = two(x)
    print(a.dtype, b.mean())
    text: str = add_one.lower(x).as_text("cuda")
    print(len(text), add_one.lower(x).resources()["registers"])
    ready: plgpu.Kernel[..., Any] = add_one
    print(ready.name)


def scaled(factor: float) -> Callable[..., object]:
    def body(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
        o_ref[...] = x_ref[...] * factor

    return plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((N,), jnp.float32), interpret=True)


def nested(x: F32) -> F32:
    def body(args: dict[str, plgpu.Ref], o_ref: plgpu.Ref) -> None:
        o_ref[...] = args["a"][...] - args["b"][...]

    out = plgpu.ShapeDtypeStruct((N,), jnp.float32)
    difference = plgpu.kernel(body, out_type=out, interpret=True)
    return difference({"a": x, "b": x})


def by_name(x: F32) -> F32:
    def body(x_ref: plgpu.Ref, o_ref: plgpu.Ref, *, buffer: plgpu.Ref, done: plgpu.Ref) -> None:
        plgpu.copy_gmem_to_smem(x_ref, buffer, done)
        plgpu.barrier_wait(done)
        o_ref[...] = buffer[...]

    copy = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((N,), jnp.float32),
        scratch_types={"buffer": plgpu.SMEM((N,), jnp.float32), "done": plgpu.Barrier()},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=True,
    )
    return copy(x)


# ---- the language --------------------------------------------------------------------------------


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((128, 128), jnp.float32), interpret=True)
def product(a_ref: plgpu.Ref, b_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    def compute(acc: plgpu.Ref) -> plgpu.Array:
        def step(indices: tuple[plgpu.Array, ...], a: plgpu.Ref, b: plgpu.Ref) -> None:
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(2,),
            max_concurrent_steps=2,
            in_specs=[
                plgpu.BlockSpec((128, 64), lambda k: (0, k), delay_release=1),
                plgpu.BlockSpec((64, 128), lambda k: (k, 0), delay_release=1),
            ],
        )(a_ref, b_ref)
        return acc[...]

    o_ref[...] = pl.run_scoped(compute, plgpu.ACC((128, 128)))


@plgpu.kernel(
    out_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float16),
    num_threads=2,
    thread_name="wg",
    interpret=True,
)
def threads(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    wg = lax.axis_index("wg")

    def scope(smem: plgpu.Ref, full: plgpu.Ref) -> None:
        @pl.when(wg == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(x_ref, smem.at[0], full.at[0])

        plgpu.barrier_wait(full.at[0])
        rows = pl.ds(wg * 32, 32)
        o_ref[rows] = smem[0, rows] * 2

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    pl.run_scoped(
        scope,
        plgpu.SMEM((2, 64, 64), jnp.float16, transforms=tiled),
        plgpu.Barrier(num_barriers=2),
        collective_axes="wg",
    )


def control(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    def step(i: plgpu.Array, acc: plgpu.Array) -> plgpu.Array:
        return acc + x_ref[i]

    total = lax.fori_loop(0, N, step, jnp.float32(0))
    count = lax.fori_loop(0, 3, lambda i, c: c + i, 0)
    small, large = lax.fori_loop(
        0,
        N,
        lambda i, c: (jnp.minimum(c[0], x_ref[i]), jnp.maximum(c[1], x_ref[i])),
        (total, total),
    )
    halved = lax.while_loop(lambda v: v > 1.0, lambda v: v / 2, jnp.abs(total))
    chosen = lax.cond(total > 0, lambda: large, lambda: small)
    picked = lax.switch(count % 2, [lambda v: v + 1, lambda v: v - 1], chosen)

    @pl.loop(0, 4, init_carry=picked)
    def last(i: plgpu.Array, carry: plgpu.Array) -> plgpu.Array:
        return carry + i.astype(jnp.float32)

    @pl.loop(0, 2)
    def _(i: plgpu.Array) -> None:
        plgpu.barrier_arrive  # noqa: B018 - a name

    o_ref[...] = jnp.full((N,), halved) + last


controlled = plgpu.kernel(
    control, out_type=plgpu.ShapeDtypeStruct((N,), jnp.float32), interpret=True
)


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float32), interpret=True)
def arrays(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    x = x_ref[...]
    y: plgpu.Array = x.T + x.mT
    y = y.reshape(64, 64).astype(jnp.float32).transpose(1, 0)
    rows, columns = x.shape
    y = y + x.sum(axis=1, keepdims=True) - x.max(0) * x.mean()
    y = jnp.concatenate([y[:32], y[32:]], axis=0)
    y = jnp.where(y > 0, y, 0.0) + jnp.zeros((rows, columns), jnp.float32)
    y = y.at[0, 0].set(1.0)
    y = jnp.exp(-jnp.abs(y)) + jnp.sqrt(jnp.square(y)) + jnp.clip(y, -1, 1)
    y = nn.softmax(y, axis=-1) + nn.gelu(y, approximate=True) + nn.relu(y)
    y = lax.exp2(y) * lax.rsqrt(lax.max(y, 1.0)) + lax.broadcasted_iota(jnp.float32, (64, 64), 1)
    y = y + jnp.einsum("ij,jk->ik", x.astype(jnp.float16), x.astype(jnp.float16))
    y = plgpu.layout_cast(y, plgpu.Layout.WGMMA)
    column = jnp.arange(64) + 1
    y = y + column[None, :] + jnp.ones_like(y) + jnp.eye(64, dtype=jnp.float32)
    best, where_best = lax.top_k(x, 1)
    y = y + best + where_best
    y = -y % 3.0 if rows else y // 2
    narrow = x.astype(jnp.bfloat16)
    y = y + jnp.dot(narrow, narrow, preferred_element_type=jnp.float32)
    pl.debug_print("x[0, 0] = {}", x_ref[0, 0])
    o_ref[...] = jnp.minimum(y, jnp.finfo(jnp.float32).max)


def masked(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    at = pl.ds(pl.program_id(0) * 64, 64)
    number = lax.iota(jnp.int32, 64) + pl.program_id(0) * 64
    x = pl.load(x_ref, (at,), mask=number < 100, other=0.0)
    pl.store(o_ref, (at,), x * 2, mask=number < 100)


overhanging = pl.pallas_call(
    masked,
    out_shape=plgpu.ShapeDtypeStruct((N,), jnp.float32),
    grid=(2,),
    in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM)],
    out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
    interpret=True,
)


def scale_block(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    o_ref[...] = x_ref[...] * 3


blocked = pl.pallas_call(
    scale_block,
    out_shape=plgpu.ShapeDtypeStruct((N, 64), jnp.float32),
    grid=(N // 32,),
    in_specs=[pl.BlockSpec((32, 64), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((32, 64), lambda i: (i, 0)),
    compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=True,
)


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((1,), jnp.int32), interpret=True)
def atomics(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
    o_ref[0] = 0
    old = pl.atomic_add(o_ref, (0,), x_ref[0])
    plgpu.atomic_max(o_ref.at[0], old)
    for k in range(4):
        o_ref.addupdate(k, 0)


def scheduled(o_ref: plgpu.Ref) -> None:
    @plgpu.nd_loop((4, 2), collective_axes="i")
    def _(info: plgpu.NDLoopInfo) -> None:
        row, column = info.index
        o_ref[row * 2 + column] = info.local_index


scheduler = plgpu.kernel(
    scheduled,
    out_type=plgpu.ShapeDtypeStruct((8,), jnp.int32),
    grid=(2,),
    grid_names=("i",),
    interpret=True,
)


# ---- the host ------------------------------------------------------------------------------------


def host(x: F32, w: F32) -> None:
    params = plgpu.CompilerParams(approx_math=True, max_concurrent_steps=2)
    barrier = plgpu.Barrier(num_arrivals=2, num_barriers=4)
    mesh = plgpu.Mesh(grid=(2,), grid_names=("i",), num_threads=1, thread_name="wg")
    print(params.approx_math, barrier.num_arrivals, mesh.grid, pl.cdiv(100, 8) + 1)
    spec = plgpu.SMEM((64, 64), jnp.float16)
    union = plgpu.RefUnion(spec, (plgpu.SMEM((32, 64), jnp.float32),))
    print(spec.shape, spec.dtype.itemsize, union.groups)
    print(plgpu.Layout.WG_STRIDED((1024,), 4), plgpu.Layout.WGMMA.reduce(1))
    print(jnp.dtype("bfloat16").itemsize, jnp.issubdtype(jnp.float16, np.floating))
    leaves, structure = tree.flatten({"a": 1, "b": (2, 3)})
    print(tree.unflatten(structure, leaves), tree.leaves([x]), tree.map(lambda v: v, {"x": x}))
    h, v = x.astype(np.float16), w.astype(np.float16)
    y = ops.matmul(h, v, transpose_b=True, activation="relu", interpret=True)
    s = ops.softmax(y, interpret=True)
    n = ops.rms_norm(y, eps=1e-5, interpret=True)
    print(y.shape, s.sum(), n.mean())
    config = ops.MatmulConfig(tile_n=128, stages=3)
    print(config._replace(stages=4).stages)
    struct = plgpu.ShapeDtypeStruct.like(x)
    print(struct.ndim, struct.size, struct.dtype.name)
    try:
        add_one(x[:3])
    except (plgpu.DeadlockError, plgpu.LoweringError, ValueError) as e:
        print(type(e).__name__)


def attend(q: NDArray[np.float16]) -> NDArray[np.float16]:
    out, lse = ops.attention(q, q, q, causal=True, return_lse=True, interpret=True)
    print(lse.shape)
    return out


def with_closure() -> F32:
    ref = plgpu.new_ref(np.zeros(N, np.float32))
    ref[...] = np.ones(N, np.float32)
    return plgpu.freeze(ref)


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(N).astype(np.float32)
    call(x)
    print(scaled(2.0)(x), nested(x), by_name(x), controlled(x), overhanging(x), with_closure())
    m = rng.standard_normal((64, 64)).astype(np.float32)
    print(arrays(m), threads(m.astype(np.float16)), scheduler())
    a = rng.standard_normal((128, 128)).astype(np.float16)
    print(product(a, a), blocked(rng.standard_normal((N, 64)).astype(np.float32)))
    print(atomics(np.ones(1, np.int32)))
    host(m, m)
    print(attend(rng.standard_normal((1, 64, 1, 64)).astype(np.float16)))


if __name__ == "__main__":
    main()
