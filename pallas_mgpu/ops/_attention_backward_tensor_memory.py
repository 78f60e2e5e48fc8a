"""Gradients of attention on Blackwell's tensor cores, by five products: dK, dV and dQ in one kernel
(attention_backward.py has the formulas).

A block has 128 keys of a head and goes over blocks of 128 queries. Two *gradient* threads, one
*reduction* thread, and of a fourth thread one warp, the *multiplier*, which issues all products,
and one, the *producer*, which fetches K, V, and Q, dO and the statistics of the queries through a
ring.

For each block of queries the multiplier computes S = Q K^T and dP = dO V^T, in tensor memory, where
a lane has a query. A gradient thread has half of the keys: it loads both in parts, and stores P and
dS of a few parts at a time in shared memory. With these the multiplier computes dQ = dS K and adds
P^T dO to dV and dS^T Q to dK, which stay in tensor memory. dQ takes the place of S; the reduction
thread takes it to shared memory, from where TMA adds it to float32 sums in global memory. Meanwhile
the products for dV and dK run.

Gradient threads wait for the statistics themselves, and release their slot as the products do: a
commit tells of products, not of what its issuer has seen.

A commit covers all products before it. So whoever knows that S of a block is there may overwrite
what the products of the block before read: P and dS.

The blocks of all keys add to dQ in the order of their progress: it differs from call to call by
rounding. The blocks of a head begin at different queries, so that they do not all add to the same
rows at once."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_backward_fused import add_to_operand, sums_of
from ._attention_scores import Ranges, Tile
from ._common import IssuedByWarps, Ring, overlap_launches, store, swizzled, warp_specialized
from ._tensor_memory import SMEM_BYTES

_F32 = np.float32
ROWS = 128  # keys of a block, and queries that are worked on together
WORKERS = 2  # gradient threads
_HALF = ROWS // WORKERS  # keys of each
_STORED = 32  # of these, how many have their P and dS stored at once; more take more registers
MOST = 128  # the largest head_dim of this kernel


class TensorMemoryBackwardConfig(NamedTuple):
    """How the gradients of attention are computed on Blackwell. ``rotate``: blocks of a head begin
    at different queries, so that they do not all add to the same rows of dQ at once."""

    rotate: bool = True


class GradientPlan:
    """What the kernels of five and of seven products have in common."""

    axes: dict = {}
    needs = True, True  # P, dS

    def __init__(self, x, rows, heads):
        self.x = x
        self.tiles = pl.cdiv(rows, ROWS)
        self.clusters = self.tiles * heads * x.batch
        self.width = pl.cdiv(x.dim, 16) * 16  # elements of a row on the chip
        self.columns = slice(None) if self.width == x.dim else pl.ds(0, self.width)
        # columns of scores that are worked on at a time; ptxas has no registers for more
        self.part = 4 if x.scores.dropout else 8 if x.scores.adjusted else 16
        self.c = x.scores.factor(x.scale)

    def smem(self, *dims, tile=None):
        tile = tile or math.gcd(dims[-1], 64)
        return plgpu.SMEM(dims, self.x.dtype, transforms=swizzled(tile, self.x.dtype))


def orders(n=1, **more):
    return plgpu.Barrier(num_arrivals=n, orders_tensor_core=True, **more)


def _along(statistic, shape):
    """A vector with the axis of the scores along which it runs: as an array of their shape."""
    vector, axis = statistic
    return lax.broadcast_in_dim(vector, shape, [axis])


class GradientBlock(IssuedByWarps):
    """A block whose first threads compute gradients of scores, each of half of the columns. The
    last thread fetches and issues the products; one between them reduces.

    A lane has a row of the scores."""

    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE
    registers: tuple  # of a lane: of a gradient thread, of the others

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.refs = plan.x, refs
        self.ring = Ring(plan.stages, self.full, self.empty)

    def run(self):
        me, last = lax.axis_index("wg"), self.plan.consumers

        for worker in range(WORKERS):  # slices of tiled memory are known

            @pl.when(me == worker)
            def computes(worker=worker):
                plgpu.set_max_registers(self.registers[0], action="increase")
                self.locate()
                self.gradients(worker)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if last > WORKERS:

            @pl.when(me == WORKERS)
            def reduces():
                plgpu.set_max_registers(self.registers[1], action="decrease")
                self.locate()
                self.reduce()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me >= last)
        def _():
            plgpu.set_max_registers(self.registers[1], action="decrease")
            self.issue()

    def probabilities(self, s, dp, tile, lse, delta, hides, keep):
        """P and dS (those that are needed) of a part of S and dP, refs in tensor memory. hides: may
        it have hidden pairs? keep(): which are not."""
        dtype, (needs_p, needs_ds) = self.x.dtype, self.plan.needs
        s, slope = tile.adjust(plgpu.async_load_tmem(s, layout=self.layout))
        p = jnp.exp2(s * self.plan.c - _along(lse, s.shape))
        p = lax.cond(hides, lambda v: jnp.where(keep(), v, _F32(0)), lambda v: v, p)
        found = []
        if needs_ds:
            dp = tile.drop(plgpu.async_load_tmem(dp, layout=self.layout))
            ds = p * (dp - _along(delta, s.shape))
            found = [(ds if slope is None else ds * slope).astype(dtype)]
        if needs_p:  # after dP is loaded: what is dropped is computed once
            found.insert(0, tile.drop(p).astype(dtype))
        # one part after the other: there are no registers for the scores of several
        return lax.optimization_barrier(tuple(found))

    def store_sums(self, acc, buffer, target, scale):
        """The rows of the block are no longer needed: their buffers hold the results."""
        width = math.gcd(self.plan.width, 64)
        for c in range(0, self.plan.width, width):
            value = plgpu.async_load_tmem(acc.at[:, c : c + width], layout=self.layout)
            buffer[:, c : c + width] = (value * _F32(scale)).astype(self.x.dtype)
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        there = target.at[self.b, pl.ds(self.row, ROWS), self.head, self.plan.columns]
        plgpu.copy_smem_to_gmem(buffer, there)


class _Plan(GradientPlan):
    """What follows from a problem and a configuration."""

    consumers = WORKERS + 1  # threads besides the one that issues

    def __init__(self, x, cfg):
        super().__init__(x, x.keys, x.kv_heads)
        self.rotate = bool(cfg.rotate)
        self.chunk = math.gcd(self.width, 32)  # columns of dQ that are stored at a time
        used = 2 * (2 * ROWS * self.width + 2 * ROWS * ROWS) + 8 * ROWS * self.chunk
        slot = 4 * ROWS * self.width + 8 * ROWS
        self.stages = 1 + (used + 2 * slot + 1024 <= SMEM_BYTES)  # slots of the ring

    def scratch(self):
        shape, smem = (ROWS, self.width), self.smem
        scores = plgpu.TMEM((ROWS, ROWS), jnp.float32)
        return {
            "k_smem": smem(*shape),
            "v_smem": smem(*shape),
            "q_smem": smem(self.stages, *shape),
            "grad_smem": smem(self.stages, *shape),
            "p_smem": smem(ROWS, ROWS),
            "ds_smem": smem(ROWS, ROWS),
            "dq_smem": plgpu.SMEM(
                (2, ROWS, self.chunk), _F32, transforms=swizzled(self.chunk, np.dtype(_F32))
            ),
            "lse_smem": plgpu.SMEM((self.stages, ROWS), _F32),
            "delta_smem": plgpu.SMEM((self.stages, ROWS), _F32),
            "s_dq": plgpu.RefUnion([scores], [plgpu.TMEM(shape, jnp.float32)]),
            "dp_acc": plgpu.TMEM((ROWS, ROWS), jnp.float32),
            "dv_acc": plgpu.TMEM(shape, jnp.float32),
            "dk_acc": plgpu.TMEM(shape, jnp.float32),
            "own_full": plgpu.Barrier(num_arrivals=2),
            "full": plgpu.Barrier(num_arrivals=4, num_barriers=self.stages),
            "empty": orders(WORKERS + 1, num_barriers=self.stages),
            "s_ready": orders(),
            "p_ready": orders(WORKERS),  # P and dS are stored
            "dq_ready": orders(),
            "dq_read": orders(),
            "sums_ready": orders(),
        }


class _Block(GradientBlock):
    """One block of the kernel, while it is traced."""

    registers = 176, 80

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        (self.s_acc,), (self.dq_acc,) = self.s_dq
        of_queries = refs.get("low_q"), refs.get("high_q")
        self.ranges = Ranges(plan.x, False, *of_queries, layout=self.layout)

    def locate(self):
        x, plan, t = self.x, self.plan, lax.axis_index("cluster")
        tile, rest = lax.rem(t, plan.tiles), lax.div(t, plan.tiles)
        self.head, self.b = lax.rem(rest, x.kv_heads), lax.div(rest, x.kv_heads)
        self.row = tile * ROWS
        last = pl.cdiv(x.queries, ROWS) - 1
        of_keys = Ranges(x, True, self.refs.get("low_k"), self.refs.get("high_k"))
        first, count = of_keys.blocks(self.row, ROWS, ROWS)
        # keys that no query sees have one block, in which all pairs are hidden
        self.first, self.count = jnp.minimum(first, last), jnp.maximum(count, 1)
        self.start = tile * self.count // plan.tiles if plan.rotate else jnp.int32(0)

    @property
    def steps(self):
        return self.count * self.x.group

    def place(self, it):
        """Head and first query of step `it`."""
        block = self.first + lax.rem(lax.rem(it, self.count) + self.start, self.count)
        block = jnp.maximum(block, 0)  # for the compiler to know
        head = self.head * self.x.group + lax.div(it, self.count)
        return head, pl.multiple_of(block * ROWS, ROWS)

    # ---- producer and multiplier

    def producer(self):
        columns = self.plan.columns
        keys = self.b, pl.ds(self.row, ROWS), self.head, columns
        plgpu.copy_gmem_to_smem(self.k.at[keys], self.k_smem, self.own_full)
        plgpu.copy_gmem_to_smem(self.v.at[keys], self.v_smem, self.own_full)

        def fetch(it, _):
            head, query = self.place(it)
            self.ring.acquire(it)
            slot, rows = self.ring.slot(it), pl.ds(query, ROWS)
            full = self.full.at[slot]
            for ref, at, buffer in (
                (self.q, (self.b, rows, head, columns), self.q_smem),
                (self.grad, (self.b, rows, head, columns), self.grad_smem),
                (self.lse, (self.b, head, rows), self.lse_smem),
                (self.delta, (self.b, head, rows), self.delta_smem),
            ):
                plgpu.copy_gmem_to_smem(ref.at[at], buffer.at[slot], full)

        lax.fori_loop(0, self.steps, fetch, None)
        self.ring.drain(self.steps)

    def multiply(self):
        plgpu.barrier_wait(self.own_full)

        def step(it, _):
            slot = self.ring.slot(it)
            q, grad = self.q_smem.at[slot], self.grad_smem.at[slot]
            self.ring.wait(it)
            # dQ of the block before is where S will be
            pl.when(it > 0)(lambda: plgpu.barrier_wait(self.dq_read, phase=it - 1))
            plgpu.tcgen05_mma(self.s_acc, q, self.k_smem.T, accumulate=False)
            plgpu.tcgen05_mma(self.dp_acc, grad, self.v_smem.T, self.s_ready, accumulate=False)
            plgpu.barrier_wait(self.p_ready, phase=it)
            plgpu.tcgen05_mma(
                self.dq_acc, self.ds_smem, self.k_smem, self.dq_ready, accumulate=False
            )
            plgpu.tcgen05_mma(self.dv_acc, self.p_smem.T, grad, accumulate=it > 0)
            plgpu.tcgen05_mma(
                self.dk_acc, self.ds_smem.T, q, self.empty.at[slot], accumulate=it > 0
            )

        lax.fori_loop(0, self.steps, step, None)
        plgpu.tcgen05_commit_arrive(self.sums_ready)
        plgpu.barrier_wait(self.dq_read, phase=self.steps - 1)

    # ---- gradients of scores

    def gradients(self, me):
        row_layout = self.layout.reduce(1)
        column = me * _HALF

        def step(it, _):
            head, query = self.place(it)
            slot = self.ring.slot(it)
            self.ring.wait(it)
            lse = plgpu.load(self.lse_smem.at[slot], layout=row_layout)
            delta = plgpu.load(self.delta_smem.at[slot], layout=row_layout)
            self.ring.release(it)
            plgpu.barrier_wait(self.s_ready, phase=it)
            low, high = self.ranges.of_all(query, ROWS)
            key = self.row + column
            hides = (key < low) | (key + _HALF > high)
            for c in range(column, column + _HALF, _STORED):
                parts = [
                    self.part(at, head, query, self.row + at, lse, delta, hides)
                    for at in range(c, c + _STORED, self.plan.part)
                ]
                plgpu.wait_load_tmem()
                for buffer, values in zip((self.p_smem, self.ds_smem), zip(*parts)):
                    self.store_columns(buffer, c, jnp.concatenate(values, axis=1))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.p_ready)

        lax.fori_loop(0, self.steps, step, None)
        plgpu.barrier_wait(self.sums_ready)
        if me == 0:
            self.store_sums(self.dv_acc, self.v_smem, self.dv, 1)
        else:
            self.store_sums(self.dk_acc, self.k_smem, self.dk, self.x.scale)

    def store_columns(self, buffer, column, values):
        """Fewer columns than a tile of the buffer has, which slices would not allow."""
        tiles = buffer.reshape((ROWS, ROWS // _HALF, _HALF // _STORED, _STORED))
        tiles[:, column // _HALF, column % _HALF // _STORED] = plgpu.layout_cast(
            values, self.layout
        )

    def part(self, column, head, query, key, lse, delta, hides):
        """P and dS of some keys, from this column of tensor memory on."""
        shape = ROWS, self.plan.part
        place = self.b, head, query, key
        tile = Tile(self.x, self.refs, *place, shape, by_keys=False, layout=self.layout)
        s, dp = (ref.at[:, column : column + shape[1]] for ref in (self.s_acc, self.dp_acc))
        keep = functools.partial(self.ranges.keep, query, key, shape)
        return self.probabilities(s, dp, tile, (lse, 0), (delta, 0), hides, keep)

    # ---- dQ

    def reduce(self):
        chunk = self.plan.chunk
        chunks = self.plan.width // chunk

        def step(it, _):
            head, query = self.place(it)
            plgpu.barrier_wait(self.dq_ready, phase=it)
            for c in range(chunks):
                columns = pl.ds(c * chunk, chunk)
                value = plgpu.async_load_tmem(self.dq_acc.at[:, columns], layout=self.layout)
                if c == chunks - 1:
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(self.dq_read)
                # the buffer before this one may still be read, unless this is the same one
                same = chunks % 2 and not c
                plgpu.wait_smem_to_gmem(0 if same else 1, wait_read_only=True)
                there = self.dq.at[self.b, head, pl.ds(query, ROWS), columns]
                store(self.dq_smem.at[c % 2], value, there, reduction_op="add")

        lax.fori_loop(0, self.steps, step, None)


@cached
def kernel(x, cfg, interpret, functional=False):
    """Its results are dk, dv, and float32 sums for dq, which it adds to. x: a Problem. functional:
    the sums are the last operand, too."""
    plan = _Plan(x, cfg)
    names = ["bias"] * bool(x.scores.bias) + ["seed"] * bool(x.scores.dropout)
    names += ["low_k", "high_k", "low_q", "high_q"] * bool(x.scores.sequences)
    names += ["dq_sums"] * functional

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip((*names, "dk", "dv", "dq"), others, strict=True))
        overlap_launches()
        _Block(plan, refs).run()

    one = plgpu.ShapeDtypeStruct((x.batch, x.keys, x.kv_heads, x.dim), x.dtype)
    made = warp_specialized(
        body,
        plan,
        (one, one, sums_of(x)),
        kernel_name="attention_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return add_to_operand(made, names) if functional else made
