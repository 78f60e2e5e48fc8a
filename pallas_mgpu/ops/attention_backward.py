"""Gradients of attention on Hopper's tensor cores.

With the scores S = scale Q K^T, the probabilities P = exp(S - lse) and delta = sum(dO * O) of each
query,

    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = scale dS K    dK = scale dS^T Q

Three kernels. The first one computes delta, and writes it with lse (times log2 e) to rows padded to
whole blocks; there lse is so large that padded queries have the probability 0. The second one gives
each block a tile of keys and goes over the queries: scores are transposed, so that keys are rows,
and P and dS are the left operands of the products, in registers. The third one gives each block a
tile of queries and goes over the keys.

The products S and dP are computed twice in this way, which makes seven products instead of five,
but dQ needs no atomics, and results repeat bit for bit. In both kernels each consumer owns 64 rows,
and the producer fetches blocks of the other side through a ring. Keys beyond the last one have zero
rows: their gradients are not stored, and the third kernel masks their probabilities."""

import math
import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import Ring, WarpSpecialized, overlap_launches, store, warp_specialized
from .attention import _check

_F32 = np.float32
_NEVER = _F32(3.0e38)  # lse of a query that is not there
_CONSUMERS = 2
_ROWS = 64 * _CONSUMERS  # of a tile
_PAD = 128  # queries of padded rows of statistics


class Problem(typing.NamedTuple):
    """What the kernels compute."""

    batch: int
    queries: int
    heads: int
    dim: int
    keys: int
    kv_heads: int
    dtype: np.dtype
    causal: bool
    scale: float

    @property
    def group(self):
        """Heads of queries that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def padded(self):
        return pl.cdiv(self.queries, _PAD) * _PAD


class _Plan:
    """Of the second and the third kernel: `rows` are owned by the blocks, `columns` pass by."""

    consumers = _CONSUMERS
    axes: dict = {}

    def __init__(self, x, rows, heads, by_keys):
        self.x, self.by_keys = x, by_keys
        self.tiles, self.heads = pl.cdiv(rows, _ROWS), heads
        self.clusters = self.tiles * heads * x.batch
        self.block = 64 if by_keys or x.dim == 128 else 128
        self.stages = 2 if x.dim == 128 else 3
        self.registers = 24, 240  # of a lane of the producer, and of a consumer
        self.c = _F32(x.scale * math.log2(math.e))

    def scratch(self):
        x = self.x

        def smem(*shape):
            transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
            return plgpu.SMEM(shape, x.dtype, transforms=transforms)

        found = {
            "own_smem": smem(2, _CONSUMERS, 64, x.dim),  # K and V, or Q and dO
            "first_smem": smem(self.stages, self.block, x.dim),  # Q, or K
            "second_smem": smem(self.stages, self.block, x.dim),  # dO, or V
            "own_full": plgpu.Barrier(num_arrivals=2 * _CONSUMERS),
        }
        if self.by_keys:
            found["lse_smem"] = plgpu.SMEM((self.stages, self.block), _F32)
            found["delta_smem"] = plgpu.SMEM((self.stages, self.block), _F32)
        return found | Ring.barriers(self.stages, 4 if self.by_keys else 2, _CONSUMERS)


class _Block(WarpSpecialized):
    """What both kernels share. own: the two arrays whose rows a block owns; passing: those that go
    through the ring."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x = plan.x
        self.ring = Ring(plan.stages, self.full, self.empty, self.first_smem, self.second_smem)
        t = lax.axis_index("cluster")
        tile, self.head, self.b = (
            t % plan.tiles,
            t // plan.tiles % plan.heads,
            t // (plan.tiles * plan.heads),
        )
        if self.x.causal:  # the longest tiles first: early keys, late queries
            tile = tile if plan.by_keys else plan.tiles - 1 - tile
        self.row = tile * _ROWS

    def fetch_own(self, *arrays):
        for k, source in enumerate(arrays):
            for w in range(_CONSUMERS):
                at = (self.b, pl.ds(self.row + w * 64, 64), self.head)
                plgpu.copy_gmem_to_smem(source.at[at], self.own_smem.at[k, w], self.own_full)

    def fetch(self, source, slots, it, at):
        slot = self.ring.slot(it)
        plgpu.copy_gmem_to_smem(source.at[at], slots.at[slot], self.full.at[slot])

    def outside(self, keys, queries):
        """Which pairs are no pairs, from the first key and query of an array, and its dims: (key,
        query) or (query, key)."""
        key_axis = 0 if self.plan.by_keys else 1
        shape = (64, self.plan.block)
        key = keys + lax.broadcasted_iota(jnp.int32, shape, key_axis)
        query = queries + lax.broadcasted_iota(jnp.int32, shape, 1 - key_axis)
        return key > query if self.x.causal else key >= self.x.keys

    def store(self, me, k, value, target):
        at = (self.b, pl.ds(self.row + me * 64, 64), self.head)
        store(self.own_smem.at[k, me], value.astype(self.x.dtype), target.at[at])


class _ByKeys(_Block):
    """dK and dV of a tile of keys."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        x, n = self.x, plan.block
        self.blocks = pl.cdiv(x.queries, n)
        self.first = jnp.int32(0)
        if x.causal:
            self.first = jnp.minimum(self.row // n, self.blocks)
        self.count = self.blocks - self.first  # of each head
        self.steps = self.count * x.group

    def producer(self):
        x, n = self.x, self.plan.block
        self.fetch_own(self.k, self.v)

        def head(g, it):
            h = self.head * x.group + g

            def one(j, it):
                self.ring.acquire(it)
                rows = pl.ds(pl.multiple_of((self.first + j) * n, n), n)
                self.fetch(self.q, self.first_smem, it, (self.b, rows, h))
                self.fetch(self.grad, self.second_smem, it, (self.b, rows, h))
                self.fetch(self.lse, self.lse_smem, it, (self.b, h, rows))
                self.fetch(self.delta, self.delta_smem, it, (self.b, h, rows))
                return it + 1

            return lax.fori_loop(0, self.count, one, it)

        lax.fori_loop(0, x.group, head, jnp.int32(0))
        self.ring.drain(self.steps)

    def consumer(self, me):
        shape = (64, self.x.dim)
        pl.run_scoped(lambda k, v: self.sums(me, k, v), plgpu.ACC(shape), plgpu.ACC(shape))

    def sums(self, me, dk_acc, dv_acc):
        p, x = self.plan, self.x
        plgpu.barrier_wait(self.own_full)

        def step(it, j):
            slot = self.ring.slot(it)
            q, grad = self.first_smem.at[slot], self.second_smem.at[slot]
            self.ring.wait(it)
            lse, delta = self.statistics(slot)
            keys, queries = self.row + me * 64, (self.first + j) * p.block

            def products(s_acc, p_acc):
                plgpu.wgmma(s_acc, self.own_smem.at[0, me], q.T)
                plgpu.wgmma(p_acc, self.own_smem.at[1, me], grad.T)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                probabilities = jnp.exp2(s * p.c - lse)
                if x.causal:
                    hide = keys + 63 > queries
                    probabilities = lax.cond(
                        hide,
                        lambda v: jnp.where(self.outside(keys, queries), _F32(0), v),
                        lambda v: v,
                        probabilities,
                    )
                dp = plgpu.wgmma_accumulator_load(p_acc, wait_n=0)
                ds = (probabilities * (dp - delta)).astype(x.dtype)
                plgpu.wgmma(dv_acc, probabilities.astype(x.dtype), grad)
                plgpu.wgmma(dk_acc, ds, q)
                plgpu.wgmma_wait(0)

            pl.run_scoped(products, *[plgpu.ACC((64, p.block))] * 2)
            self.ring.release(it)
            return lax.select(j + 1 == self.count, jnp.int32(0), j + 1)

        lax.fori_loop(0, self.steps, step, jnp.int32(0))
        self.store(me, 1, plgpu.wgmma_accumulator_load(dv_acc), self.dv)
        dk = plgpu.wgmma_accumulator_load(dk_acc) * _F32(x.scale)
        self.store(me, 0, dk, self.dk)

    def statistics(self, slot):
        """lse and delta of the queries, which are columns."""
        shape, layout = (64, self.plan.block), plgpu.Layout.WGMMA.reduce(0)
        return [
            lax.broadcast_in_dim(plgpu.load(ref.at[slot], layout=layout), shape, [1])
            for ref in (self.lse_smem, self.delta_smem)
        ]


class _ByQueries(_Block):
    """dQ of a tile of queries."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        x, n = self.x, plan.block
        self.steps = jnp.int32(pl.cdiv(x.keys, n))
        if x.causal:
            self.steps = jnp.minimum((self.row + (_ROWS + n - 1)) // n, self.steps)

    def producer(self):
        n, kv = self.plan.block, self.head // self.x.group
        self.fetch_own(self.q, self.grad)

        def one(it, carry):
            self.ring.acquire(it)
            at = (self.b, pl.ds(pl.multiple_of(it * n, n), n), kv)
            self.fetch(self.k, self.first_smem, it, at)
            self.fetch(self.v, self.second_smem, it, at)
            return carry

        lax.fori_loop(0, self.steps, one, jnp.int32(0))
        self.ring.drain(self.steps)

    def consumer(self, me):
        pl.run_scoped(lambda acc: self.sums(me, acc), plgpu.ACC((64, self.x.dim)))

    def sums(self, me, dq_acc):
        p, x = self.plan, self.x
        queries = self.row + me * 64
        lse, delta = self.statistics(queries)
        plgpu.barrier_wait(self.own_full)

        def step(it, carry):
            slot, keys = self.ring.slot(it), it * p.block
            k, v = self.first_smem.at[slot], self.second_smem.at[slot]
            self.ring.wait(it)

            def products(s_acc, p_acc):
                plgpu.wgmma(s_acc, self.own_smem.at[0, me], k.T)
                plgpu.wgmma(p_acc, self.own_smem.at[1, me], v.T)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                probabilities = self.masked(jnp.exp2(s * p.c - lse), keys, queries)
                dp = plgpu.wgmma_accumulator_load(p_acc, wait_n=0)
                plgpu.wgmma(dq_acc, (probabilities * (dp - delta)).astype(x.dtype), k)
                plgpu.wgmma_wait(0)

            pl.run_scoped(products, *[plgpu.ACC((64, p.block))] * 2)
            self.ring.release(it)
            return carry

        lax.fori_loop(0, self.steps, step, jnp.int32(0))
        dq = plgpu.wgmma_accumulator_load(dq_acc) * _F32(x.scale)
        self.store(me, 0, dq, self.dq)

    def masked(self, probabilities, keys, queries):
        x, n = self.x, self.plan.block
        if x.causal:
            hide = keys + (n - 1) > queries
        elif x.keys % n:
            hide = keys + n > x.keys
        else:
            return probabilities
        return lax.cond(
            hide,
            lambda v: jnp.where(self.outside(keys, queries), _F32(0), v),
            lambda v: v,
            probabilities,
        )

    def statistics(self, queries):
        """lse and delta of the queries, which are rows."""
        shape, layout = (64, self.plan.block), plgpu.Layout.WGMMA.reduce(1)
        at = (self.b, self.head, pl.ds(pl.multiple_of(queries, 64), 64))
        return [
            lax.broadcast_in_dim(plgpu.load(ref.at[at], layout=layout), shape, [0])
            for ref in (self.lse, self.delta)
        ]


# ---- the kernels --------------------------------------------------------------------------------


@cached
def _statistics(x, interpret):
    """Kernel: lse times log2 e, and delta, for queries padded to whole blocks."""
    height, dim = 64, x.dim

    def body(grad, o, lse, lse_out, delta_out):
        overlap_launches()
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * height
        rows = pl.ds(start, height)
        there = start + jnp.arange(height) < x.queries
        mask = lax.broadcast_in_dim(there, (height, dim), [0])

        def load(ref):
            at = (b, rows, h, slice(None))
            return pl.load(ref, at, mask=mask, other=0.0).astype(jnp.float32)

        delta_out[b, h, rows] = jnp.sum(load(grad) * load(o), axis=1)
        value = pl.load(lse, (b, h, rows), mask=there, other=0.0) * _F32(math.log2(math.e))
        lse_out[b, h, rows] = jnp.where(there, value, _NEVER)

    shape = plgpu.ShapeDtypeStruct((x.batch, x.heads, x.padded), _F32)
    return plgpu.kernel(
        body,
        out_type=(shape, shape),
        grid=(x.batch, x.heads, x.padded // height),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="attention_backward_statistics",
    )


@cached
def _kernel(x, by_keys, interpret):
    heads, rows = (x.kv_heads, x.keys) if by_keys else (x.heads, x.queries)
    plan = _Plan(x, rows, heads, by_keys)

    def body(grad, q, k, v, lse, delta, *outs, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip(("dk", "dv") if by_keys else ("dq",), outs))
        overlap_launches()
        (_ByKeys if by_keys else _ByQueries)(plan, refs).run()

    out = plgpu.ShapeDtypeStruct((x.batch, rows, heads, x.dim), x.dtype)
    name = "attention_backward_keys" if by_keys else "attention_backward_queries"
    params = plgpu.CompilerParams(approx_math=True)
    outs = (out, out) if by_keys else out
    return warp_specialized(
        body, plan, outs, kernel_name=name, compiler_params=params, interpret=interpret
    )


class Gradients:
    """The three kernels. The result is (dq, dk, dv)."""

    def __init__(self, x, interpret):
        self.statistics = _statistics(x, interpret)
        self.by_keys, self.by_queries = _kernel(x, True, interpret), _kernel(x, False, interpret)

    def __call__(self, grad, q, k, v, o, lse, out=None, stream=None):
        dq, (dk, dv) = (None, (None, None)) if out is None else (out[0], out[1:])
        lse, delta = self.statistics(grad, o, lse, stream=stream)
        operands = grad, q, k, v, lse, delta
        pair = None if dk is None else (dk, dv)
        dk, dv = self.by_keys(*operands, out=pair, stream=stream)
        return self.by_queries(*operands, out=dq, stream=stream), dk, dv


@plgpu.specialize(in_place=False)
def attention_backward(grad, q, k, v, o, lse, *, causal=False, scale=None, interpret=None):
    """The gradients of :func:`attention` by ``q``, ``k`` and ``v``, accumulated in float32
    (Hopper).

    grad: the gradient of the result, like ``o``; q, k, v, causal, scale: the arguments of
    attention; o, lse: its results, with ``return_lse``. float16 or bfloat16; head_dim 64 or 128;
    any lengths and numbers of heads. Results repeat bit for bit. out: a tuple of results.

    Returns (dq, dk, dv). TypeError, ValueError for other dtypes and shapes, NotImplementedError for
    other head_dims.
    """
    _check(q, k, v)
    batch, queries, heads, dim = q.shape
    if dim not in (64, 128):
        raise NotImplementedError(
            f"attention_backward: head_dim must be 64 or 128, got {dim}: registers do not hold the"
            " sums of longer rows"
        )
    for name, x in (("grad", grad), ("o", o)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(
                f"attention_backward: {name} must be {q.dtype} of shape {q.shape}, as q is; got"
                f" {x.dtype} of shape {x.shape}"
            )
    if lse.shape != (batch, heads, queries) or lse.dtype != _F32:
        raise ValueError(
            f"attention_backward: lse must be float32 of shape {(batch, heads, queries)}, got"
            f" {lse.dtype} of shape {lse.shape}"
        )
    scale = float(dim**-0.5 if scale is None else scale)
    shape = (*q.shape, k.shape[1], k.shape[2])
    return Gradients(Problem(*shape, q.dtype, bool(causal), scale), interpret)
