"""pallas_mgpu/gaps.md says what the code says: each row names things that raise, and no more.

CASES has at least one call for each row, found by words of its first column. A call that succeeds
means that the row is out of date."""

import functools
import pathlib
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import distributed, distributed_matmul

GAPS = pathlib.Path(plgpu.__file__).parent / "gaps.md"
F16, F32, BF16 = (np.dtype(t) for t in (np.float16, np.float32, ml_dtypes.bfloat16))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NIE = NotImplementedError
OLDER = ("sm_80", "sm_86", "sm_89", "sm_120a")
# rows that need packages or GPUs: where their tests are
ELSEWHERE = {
    "torch arrays of dtypes below 8 bits": "tests/frameworks/test_torch.py",
    "PyTorch: forward mode": "tests/frameworks/test_torch.py",
    "JAX: forward mode": "tests/frameworks/test_jax.py",
    "non-contiguous views on a GPU": "tests/ops/test_strided_operands.py",
    "on a mesh of GPUs, a timeout": "tests/distributed/test_watch.py",
    "a check on GPUs that": "nowhere: on a GPU such a store is not checked",
}


def zeros(*shape, dtype=F16):
    return np.zeros(shape, dtype)


def traced(body, *args, out=((128,), F32), target="sm_90a", **options):
    """Generate the program of a kernel with one output, for a target."""
    made = plgpu.ShapeDtypeStruct(*out)
    return plgpu.kernel(body, out_type=made, **options).lower(*args, target=target).as_text("cuda")


def keep(o, x):
    """Use what f made, so that it is not dead code."""
    if isinstance(x, plgpu.Array):
        o[0] = jnp.sum(x.astype(F32))


def value(f, *shape, dtype=F32, **options):
    """Lower a kernel that computes f of an array in registers."""

    def body(x, o):
        keep(o, f(x[...]))

    return traced(body, zeros(*shape, dtype=dtype), **options)


def view(f, *shape, dtype=F32, **options):
    """Lower a kernel that does something with the ref of an operand."""

    def body(x, o):
        keep(o, f(x))

    return traced(body, zeros(*shape, dtype=dtype), **options)


def scratch(f, *types, args=(), **options):
    """Lower a kernel that does something with its operands and scratch."""

    def body(*refs):
        keep(refs[len(args)], f(*refs[: len(args)], *refs[len(args) + 1 :]))

    return traced(body, *args, scratch_types=list(types), **options)


def block_view(f):
    def body(x, o):
        f(x)
        o[...] = jnp.zeros((64,), F32)

    spec = pl.BlockSpec((24, 24), lambda i: (i, 0), memory_space=plgpu.GMEM)
    whole = pl.BlockSpec((64,), lambda i: (i,))
    call = pl.pallas_call(
        body,
        plgpu.ShapeDtypeStruct((128,), F32),
        grid=(2,),
        in_specs=[spec],
        out_specs=whole,
    )
    return call.lower(zeros(40, 40, dtype=F32))


def emulated(**options):
    def body(x, o):
        o[...] = x[...]

    way = plgpu.InterpretParams(backend="emulate", **options)
    out = plgpu.ShapeDtypeStruct((128,), F32)
    return plgpu.kernel(body, out_type=out, interpret=way)(zeros(128, dtype=F32))


def on(target, f, *args, **options):
    """Call a function of ops as if for another GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALLAS_MGPU_TARGET", target)
        return f(*args, interpret=True, **options)


def lower_half(b, h, i, j):
    return j <= i


def on_older(f, *args, **options):
    return [(lambda t=t: on(t, f, *args, **options)) for t in OLDER]


def smem(*shape, dtype=F32, **options):
    return plgpu.SMEM(shape, dtype, **options)


TILED = dict(transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)))
heads, keys = zeros(1, 64, 2, 64), zeros(1, 64, 2, 96)
lse, latent = zeros(1, 2, 64, dtype=F32), zeros(1, 1, 16, 576)
square, sizes = zeros(64, 64), np.full(2, 32, np.int32)
pages, table, lengths = zeros(4, 16, 2, 64), np.zeros((1, 2), np.int32), np.zeros(1, np.int32)
two = plgpu.DeviceMesh((2,), ("d",))
two_axes = plgpu.DeviceMesh((2, 2), ("a", "b"))


def tmem_product(a, b, acc, **options):
    def body(o, *refs):
        plgpu.tcgen05_mma(refs[2], refs[0], refs[1], refs[3], **options)

    types = [a, b, acc, plgpu.Barrier(orders_tensor_core=True)]
    return traced(body, scratch_types=types, target="sm_100a")


def mesh_kernel(**options):
    def body(*refs):
        refs[1][...] = jnp.zeros((8,), F32)

    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((8,), F32), interpret=True, **options
    )
    return plgpu.spmd(kernel, two)


def on_mesh(*args, **options):
    return mesh_kernel(**options)(*args)


def counted():
    def body(x, o):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            o[info.index[0]] = x[info.index[0]]

    options = dict(grid=(4,), grid_names=("i",), interpret=True)
    out = plgpu.ShapeDtypeStruct((4, 128), F32)
    return plgpu.vmap(plgpu.kernel(body, out_type=out, **options))(zeros(2, 4, 128, dtype=F32))


def step(info):
    pass


def loop_in_loop():
    def body(x, o, tmem):
        plgpu.dynamic_scheduling_loop(("i",))(step)
        pl.loop(0, 2)(lambda _: plgpu.dynamic_scheduling_loop(("i",))(step))

    options = dict(grid=(4,), grid_names=("i",), scratch_types=[plgpu.TMEM((128, 8), F32)])
    traced(body, zeros(8), target="sm_100a", **options)


def counting_on_mesh():
    def body(x, o, tmem):
        for _ in range(2):
            plgpu.dynamic_scheduling_loop(("i",))(step)
        o[...] = x[...] + lax.axis_index("d")

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((8,), F32),
        grid=(4,),
        grid_names=("i",),
        scratch_types=[plgpu.TMEM((128, 8), F32)],
        interpret="emulate",
    )
    plgpu.spmd(kernel, two)([zeros(8, dtype=F32)] * 2)


def mutable_twice():
    def body(x, y):
        x[...] = y[...]

    r = plgpu.new_ref(zeros(8, dtype=F32))
    return plgpu.kernel(body, out_type=(), interpret=True)(r, r)


def with_dim(shape, in_shape):
    return lambda: plgpu.kernel(
        lambda x, o: None, in_shapes=(in_shape,), out_type=plgpu.ShapeDtypeStruct((8,), F32)
    ).lower(zeros(*shape, dtype=F32))


def private_scope(**options):
    def body(x, o):
        pl.run_scoped(lambda b: None, plgpu.Barrier(num_barriers=17))

    threads = dict(num_threads=2, thread_name="t")
    return traced(body, zeros(128, dtype=F32), **threads, **options)


def gmem_scope(x):
    pl.run_scoped(lambda g: None, plgpu.GMEM((128,), F32))


def one_thread(*types):
    def body(o):
        pl.run_scoped(lambda *refs: None, *types)

    return traced(body, target="sm_100a", num_threads=2, thread_name="t")


LEADER = dict(cluster=(4,), cluster_names=("c",))


def leader_tracked(x, tile, barrier):
    whole = plgpu.CopyPartition.REPLICATED
    plgpu.copy_gmem_to_smem(x, tile, barrier, collective_axes="c", leader_tracked=whole)


def narrow_store(tile, barrier):
    x = lax.iota(np.int32, 128).astype(np.int8)
    plgpu.async_store_smem(x, tile, barrier, cluster_idx=0, cluster_dim="c")
    plgpu.barrier_wait(barrier)
    return tile[...]


@functools.cache
def unnamed():
    return plgpu.kernel(lambda o: None, out_type=plgpu.ShapeDtypeStruct((8,), F32))


DIM = plgpu.dim("M")
CASES = {
    "a GMEM block that may overhang": [
        lambda: block_view(lambda x: x.reshape(12, 48)[...]),
        lambda: block_view(lambda x: x.T[...]),
        lambda: block_view(lambda x: x.bitcast(np.int32)[...]),
    ],
    "leader-tracked copies": [
        lambda: scratch(
            leader_tracked,
            smem(64, 64),
            plgpu.Barrier(),
            args=[zeros(64, 64, dtype=F32)],
            target="sm_100a",
            **LEADER,
        ),
        lambda: scratch(narrow_store, smem(128, dtype=np.int8), plgpu.Barrier(), **LEADER),
    ],
    "`plgpu.dim` as another dimension": [with_dim((4, 8), (4, DIM))],
    "`inline_mgpu`": [lambda: plgpu.inline_mgpu()],
    "`inline_cuda` on the interpreter": [
        lambda: plgpu.kernel(
            lambda o: plgpu.inline_cuda('asm("");')(),
            out_type=plgpu.ShapeDtypeStruct((128,), F32),
            interpret=True,
        )()
    ],
    '`interpret="emulate"`': [
        lambda: emulated(on_race="warn"),
        lambda: emulated(out_of_bounds_reads="uninitialized"),
        lambda: emulated(skip_floating_point_ops=True),
        lambda: emulated(logging_mode=plgpu.LoggingMode.BARRIER),
        lambda: emulated(timeline="x.json"),
    ],
    "int4 operands of `wgmma`": [
        lambda: scratch(
            lambda a, b: pl.run_scoped(lambda acc: plgpu.wgmma(acc, a, b), plgpu.ACC((64, 64))),
            smem(64, 64, dtype=ml_dtypes.int4),
            smem(64, 64, dtype=ml_dtypes.int4),
        )
    ],
    "poison_buffers` in kernels with TMEM": [
        lambda: with_poison(
            lambda: scratch(lambda t: None, plgpu.TMEM((128, 64), F32), target="sm_100a")
        )
    ],
    "TMEM in scopes of one thread": [
        lambda: one_thread(plgpu.TMEM((128, 64), F32)),
        lambda: scratch(lambda t: t.at[:64], plgpu.TMEM((128, 64), F32), target="sm_100a"),
        lambda: scratch(lambda t: t.at[:1], plgpu.TMEM((2, 128, 8), F32), target="sm_100a"),
    ],
    "in kernels that use cluster launch control": [loop_in_loop, counting_on_mesh],
    "on Blackwell: `attention` and `attention_backward`": [
        lambda: on("sm_100a", ops.attention, *[zeros(1, 64, 2, 60)] * 3),
        lambda: on("sm_100a", ops.attention, *[zeros(1, 64, 2, 264)] * 3),
        lambda: on("sm_103a", ops.attention_backward, *[zeros(1, 64, 2, 60)] * 5, lse),
    ],
    "`plgpu.estimate` of": [
        lambda: plgpu.estimate(
            plgpu.kernel(keep, out_type=plgpu.ShapeDtypeStruct((128,), F32)).lower(
                zeros(128, dtype=F32), target="sm_80"
            )
        ),
    ],
    "`transposed_ragged_dot`, `mixed_matmul` and": [
        *on_older(ops.ragged_dot, square, zeros(2, 64, 64), sizes),
        *on_older(ops.transposed_ragged_dot, square, square, sizes),
        *on_older(ops.mixed_matmul, square, zeros(64, 64, dtype=np.int8)),
        *on_older(ops.attention_backward, *[heads] * 5, lse),
    ],
    "`tcgen05_mma` of float32": [
        lambda: tmem_product(smem(128, 32), smem(32, 64), plgpu.TMEM((128, 64), F32)),
        lambda: tmem_product(
            plgpu.TMEM((64, 64), F16, packed=True),
            smem(64, 64, dtype=F16),
            plgpu.TMEM((64, 64), F32),
        ),
    ],
    "gathers and scatters": [
        lambda: scratch(
            lambda x, t, b: plgpu.copy_gmem_to_smem(x.at[:, jnp.arange(8, dtype=np.uint32)], t, b),
            smem(64, 8),
            plgpu.Barrier(),
            args=[zeros(64, 64, dtype=F32)],
            target="sm_100a",
        )
    ],
    "`lax.gather`": [
        lambda: value(lambda x: lax.gather(x, x, None, None), 128),
        lambda: value(lambda x: lax.scatter(x, x, x, None), 128),
    ],
    "scans of more than 512": [
        lambda: value(jnp.cumsum, 1 << 17),
        lambda: value(jnp.sort, 4100),
        lambda: value(lambda x: lax.sort((x, x), num_keys=2), 128),
    ],
    "`x[mask]` and `ref[mask]`": [
        (IndexError, lambda: value(lambda x: x[x > 0], 128)),
        (IndexError, lambda: view(lambda r: r[r[...] > 0], 128)),
        (ValueError, lambda: value(lambda x: x[np.arange(4)], 128)),
        lambda: value(lambda x: jnp.pad(x, 1, mode="edge"), 128),
        (
            plgpu.ConcretizationTypeError,
            lambda: value(lambda x: jnp.choose(x, [1, 2]), 128, dtype=np.int32),
        ),
    ],
    "products of more than 16": [
        lambda: value(lambda x: jnp.matmul(x, x), 17, 8, 8),
        lambda: value(lambda x: lax.scan(lambda c, y: (c, c), jnp.zeros(()), None, length=0), 128),
    ],
    "8-bit floats other than": [
        (TypeError, lambda: value(lambda x: x.astype(ml_dtypes.float8_e4m3b11fnuz), 128))
    ],
    "dtypes of 2 and 4 bits": [
        lambda: view(lambda r: r[1:3], 128, dtype=ml_dtypes.int4),
        lambda: view(lambda r: r[3], 128, dtype=ml_dtypes.int4),
    ],
    "copies that TMA cannot do": [
        lambda: scratch(
            lambda rows, x, t, b: plgpu.copy_gmem_to_smem(
                x.at[pl.ds(rows[0], 4)].reshape(8, 30), t, b
            ),
            smem(8, 30),
            plgpu.Barrier(),
            args=[zeros(4, dtype=np.int32), zeros(64, 60, dtype=F32)],
        )
    ],
    "strided slices of tiled SMEM": [
        lambda: scratch(lambda t: plgpu.load(t.at[0, ::8]), smem(64, 32, **TILED)),
        lambda: view(lambda r: r.bitcast(np.int16), 128),
        lambda: view(lambda r: r.at[jnp.arange(2)].T, 128, 8),
    ],
    "arrays without elements": [
        (ValueError, lambda: view(lambda r: None, 0)),
        (ValueError, lambda: view(lambda r: None, *[1] * 9)),
        lambda: traced(lambda *refs: None, *[zeros(8)] * 128),
    ],
    "`Buffered(use_lookahead=True)`": [lambda: pl.Buffered(2, use_lookahead=True)],
    "private scopes": [private_scope],
    "GMEM allocated by": [lambda: view(gmem_scope, 128)],
    "with other head_dims than 64, 128 and 256 on": [
        *on_older(ops.attention, keys, keys, keys),
        (ValueError, lambda: on("sm_100a", ops.attention, heads, heads, keys)),
        lambda: ops.attention_backward(*[keys] * 5, lse, cos=zeros(64, 48), sin=zeros(64, 48)),
        lambda: ops.attention_backward(
            *[heads] * 5,
            lse,
            deterministic=True,
            interpret=True,
            config=ops.AttentionBackwardConfig(products=5),
        ),
    ],
    "`ops.gated_matmul` with": on_older(ops.gated_matmul, square, square, up=square),
    "`ops.gated_matmul` of weights": [
        *on_older(ops.gated_matmul, square, zeros(64, 64, dtype=np.int8), transpose_b=True),
        lambda: ops.gated_matmul(square, zeros(64, 64, dtype=np.int8)),
        lambda: ops.gated_matmul(
            square, zeros(64, 64, dtype=np.int8), transpose_b=True, return_products=True
        ),
        lambda: on(
            "sm_100a", ops.gated_matmul, square, zeros(64, 64, dtype=np.int8), transpose_b=True
        ),
    ],
    "`ops.attention_decode` on": [
        *[
            (lambda t=t: on(t, ops.attention_decode, heads[:, :1], heads, heads))
            for t in ("sm_80", "sm_100a")
        ],
        lambda: ops.attention_decode(zeros(1, 1, 2, 264), *[zeros(1, 64, 2, 264)] * 2),
        lambda: ops.attention_decode(zeros(1, 65, 2, 64), heads, heads),
        lambda: ops.attention_decode(
            heads[:, :1], *[zeros(4, 20, 2, 64)] * 2, kv_lengths=lengths, page_table=table
        ),
    ],
    "`ops.attention_decode` and `ops.mla_decode` with": [
        lambda: ops.attention_decode(
            *[np.broadcast_to(heads[:1, :1], (70000, 1, *heads.shape[2:]))] * 3
        ),
        lambda: ops.mla_decode(
            *[np.broadcast_to(x[:1], (70000, *x.shape[1:])) for x in (latent, latent[0])]
        ),
    ],
    "`ops.attention` with pages": [
        lambda: ops.attention(heads, *[zeros(4, 8, 2, 64)] * 2, page_table=table),
        lambda: ops.attention(heads, *[zeros(4, 20, 2, 64)] * 2, page_table=table),
    ],
    "`ops.softmax` along": [
        lambda: ops.softmax(zeros(3, 4, 8), axis=(0, 2)),
        lambda: ops.rms_norm(zeros(4, 8), axis=0),
        lambda: ops.layer_norm(zeros(3, 4, 8), axis=(0, 1)),
    ],
    "`ops.mla_decode` on": [
        *[(lambda t=t: on(t, ops.mla_decode, latent, latent[0])) for t in ("sm_80", "sm_100a")],
        lambda: ops.mla_decode(latent[..., :80].copy(), latent[0, ..., :80].copy(), value_dim=64),
        lambda: ops.mla_decode(latent, latent[0], value_dim=64),
        lambda: ops.mla_decode(latent, zeros(4, 20, 576), kv_lengths=lengths, page_table=table),
        (TypeError, lambda: ops.mla_decode(latent, latent[0].astype(np.int8))),
    ],
    "`ops.attention` with `mask=`": [
        lambda: on("sm_80", ops.attention, heads, heads, heads, mask=lower_half),
        lambda: ops.attention(heads, heads, heads, mask=lower_half, config=ops.AttentionConfig()),
        lambda: ops.attention(*[zeros(1, 64, 2, 256)] * 3, mask=lower_half),
    ],
    "`ops.attention` with `sinks=`": [
        (TypeError, lambda: ops.attention(heads, heads, heads, sinks=np.zeros(2, F32))),
        (TypeError, lambda: ops.attention(heads, heads, heads, tree=np.ones((1, 64, 64), bool))),
    ],
    "`ops.attention` with k and v of 8 bits": [
        lambda: on("sm_80", ops.attention, heads, *[heads.astype(np.int8)] * 2),
        lambda: on("sm_80", ops.attention, heads, heads, heads, kv_lengths=lengths[:1]),
        lambda: on("sm_80", ops.attention, heads, heads, heads, q_lengths=lengths[:1]),
        lambda: on("sm_80", ops.attention, heads, heads, heads, page_table=table[:1]),
        lambda: ops.attention(zeros(1, 64, 2, 72), *[zeros(1, 64, 2, 72, dtype=np.int8)] * 2),
    ],
    "`ops.attention` with `cos=`": [
        lambda: ops.attention(heads, heads, heads, cos=square, sin=square, kv_lengths=lengths),
        lambda: ops.attention(
            heads, *[zeros(1, 64, 2, 64, dtype=np.int8)] * 2, cos=square, sin=square
        ),
    ],
    "`ops.append_pages(out=)`": [
        (
            ValueError,
            lambda: ops.append_pages(
                pages, pages, *[zeros(1, 1, 2, 64)] * 2, table, lengths, out=(pages, pages.copy())
            ),
        )
    ],
    "`ops.matmul` with batch": [
        lambda: ops.matmul(
            zeros(2, 8, 8), zeros(2, 8, 8), accumulate=True, out=zeros(2, 8, 8, dtype=F32)
        ),
        lambda: ops.matmul(
            zeros(2, 16, 128, dtype=E4M3),
            zeros(2, 16, 128, dtype=E4M3),
            transpose_b=True,
            scale_a=zeros(1, 1, 32, 16, dtype=ml_dtypes.float8_e8m0fnu),
            scale_b=zeros(1, 1, 32, 16, dtype=ml_dtypes.float8_e8m0fnu),
        ),
        lambda: ops.matmul(zeros(2, 8, 8), zeros(2, 8, 8), activation="relu", return_product=True),
    ],
    "`ops.matmul` with `accumulate=True`": [
        lambda: ops.matmul(
            *[zeros(8, 8, dtype=F32)] * 2, accumulate=True, out=zeros(8, 8, dtype=F32)
        ),
        lambda: ops.matmul(
            *[zeros(8, 8)] * 2,
            accumulate=True,
            out=zeros(8, 8),
            config=ops.MatmulConfig(cluster=2, cluster_n=2),
        ),
    ],
    "`ops.matmul` with `return_product=True`": [
        lambda: ops.matmul(*[zeros(8, 8, dtype=F32)] * 2, activation="relu", return_product=True),
        lambda: ops.matmul(zeros(2, 8, 8), zeros(8, 8), activation="relu", return_product=True),
        lambda: ops.matmul(*[zeros(8, 8)] * 2, return_product=True),
        lambda: ops.matmul(
            *[zeros(8, 8)] * 2,
            activation="relu",
            return_product=True,
            config=ops.MatmulConfig(1, 64, cluster=1, slices=2),
        ),
    ],
    "`.lower` of what an op chooses for given operands": [
        lambda: ops.matmul.kernel(
            *[zeros(8, 512)] * 2, transpose_b=True, config=ops.MatmulConfig(1, 64, 0, 1, slices=2)
        ).lower(*[zeros(8, 512)] * 2)
    ],
    "`ops.quantize_by_scale(out=)`": [
        lambda: ops.quantize_by_scale(
            zeros(8), zeros(1, dtype=F32), out=(zeros(8), zeros(1, dtype=F32))
        )
    ],
    "`ops.matmul` of int8 operands": [
        *on_older(ops.matmul, *[zeros(8, 8, dtype=np.int8)] * 2),
        lambda: on("sm_100a", ops.matmul, *[zeros(8, 8, dtype=np.int8)] * 2),
        lambda: on("sm_100a", ops.matmul, *[zeros(8, 8, dtype=F32)] * 2, precision="tf32"),
    ],
    "`ops.ragged_dot` of 8-bit floats": [
        lambda: ops.ragged_dot(zeros(8, 64, dtype=E4M3), zeros(1, 64, 64, dtype=E4M3), sizes[:1]),
        lambda: on(
            "sm_100a",
            ops.ragged_dot,
            zeros(8, 64, dtype=E4M3),
            zeros(1, 64, 64, dtype=E4M3),
            sizes[:1],
            transpose_rhs=True,
        ),
        lambda: ops.ragged_dot(zeros(8, 64), zeros(1, 64, 64, dtype=np.int8), sizes[:1]),
        lambda: on("sm_100a", ops.ragged_dot, zeros(1, 8, 64), zeros(1, 64, 64), sizes[:1]),
    ],
    "pickling a kernel": [(TypeError, lambda: pickle.dumps(unnamed()))],
    "mutable arrays (`new_ref`)": [mutable_twice],
    "`vmap` of kernels on a mesh": [lambda: plgpu.vmap(mesh_kernel()), counted],
    "on a mesh of devices: mutable": [
        lambda: on_mesh(plgpu.new_ref(zeros(16))),
        (TypeError, lambda: on_mesh([{"x": zeros(8)}] * 2)),
    ],
    'memory="nvshmem"': [
        (ValueError, lambda: plgpu.DeviceMesh((2,), ("d",), memory="nvshmem")),
    ],
    "products over devices": [
        lambda: distributed_matmul.all_gather_matmul(
            [zeros(8, 8)] * 4, [zeros(8, 8)] * 4, two_axes, axis_name="a", transfer="engine"
        ),
        lambda: distributed_matmul.all_gather_matmul(
            [zeros(8, 12)] * 2, [zeros(12, 8)] * 2, two, transfer="engine"
        ),
        lambda: distributed_matmul.matmul_all_reduce(
            [zeros(8, 8)] * 2, [zeros(8, 8)] * 2, two, transfer="engine"
        ),
        lambda: distributed_matmul.matmul_reduce_scatter(
            [zeros(8, 8)] * 2, [zeros(8, 8)] * 2, two, transfer="engine"
        ),
    ],
    "`ops.distributed`": [
        lambda: distributed.all_gather([zeros(8)] * 4, two_axes, axis_name="a", multicast=True),
        lambda: distributed.all_gather([zeros(8, 8)] * 2, two, axis=1, multicast=True),
    ],
}


def with_poison(f):
    with pl.enable_poison_buffers(True):
        return f()


def rows():
    found = re.findall(r"^\| (.*?) \| (.*) \|$", GAPS.read_text(encoding="utf-8"), re.M)
    return [first for first, _ in found if first not in ("missing", "---")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words, k", [(words, k) for words, cases in CASES.items() for k in range(len(cases))]
)
def test_raises(words, k):
    case = CASES[words][k]
    error, call = case if isinstance(case, tuple) else (NIE, case)
    with pytest.raises(error) as caught:
        call()
    assert error is NIE or error.__name__ in next(row for row in rows() if words in row)
    assert str(caught.value)


def test_each_row_has_a_case():
    for row in rows():
        assert sum(words in row for words in [*CASES, *ELSEWHERE]) == 1, row
