"""Gradients of attention on Blackwell's tensor cores by seven products: results repeat bit for bit,
and rows may have up to 256 elements (attention_backward.py has the formulas).

Two kernels after that of the statistics, as on Hopper: one gives each block 128 keys of a head and
goes over the queries, the other 128 queries and goes over the keys. In both, a lane of tensor
memory has an *own* row, and blocks of 64 rows of the other side *pass*, through a ring.

Two *gradient* threads, each with half of the columns; of a third thread one warp, the *multiplier*,
issues all products, and one, the *producer*, fetches. For each block the multiplier computes S and
dP, in tensor memory. The gradient threads load both in parts and store P and dS in shared memory,
which are the left operands of the products for dV and dK, or dQ; these stay in tensor memory. S and
dP have two buffers where tensor memory has the columns and the ring two slots: the multiplier
issues those of the next block before it waits for P and dS of this one, so that the tensor core
does not wait for the exponentials. A commit after the last products of a block says that P and dS
are free, and with them the slot.

dK and dV of more than 192 columns do not fit beside S and dP: the first kernel runs once for each.
In the end the results leave through the shared memory of the own rows."""

import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import Ranges, Tile
from ._common import Ring, WarpSpecialized, overlap_launches, swizzled, warp_specialized
from ._tensor_memory import SMEM_BYTES

_F32 = np.float32
_ROWS = 128  # own rows of a block
_BLOCK = 64  # passing rows
_WORKERS = 2  # gradient threads
_HALF = _BLOCK // _WORKERS  # columns of each
_REGISTERS = 208, 80  # of a lane: of a gradient thread, of the others
_COLUMNS = 512  # of tensor memory
MOST = 256  # the largest head_dim


def splits(x):
    """Do dK and dV need a kernel each?"""
    return 2 * (pl.cdiv(x.dim, 16) * 16 + _BLOCK) > _COLUMNS


class _Plan:
    """Of a kernel; sums: what it computes, ("dk", "dv"), one of them, or ("dq",)."""

    consumers = _WORKERS  # threads besides the one that issues
    axes: dict = {}

    def __init__(self, x, sums):
        self.x, self.sums, self.by_keys = x, sums, "dq" not in sums
        rows, self.heads = (x.keys, x.kv_heads) if self.by_keys else (x.queries, x.heads)
        self.tiles = pl.cdiv(rows, _ROWS)
        self.clusters = self.tiles * self.heads * x.batch
        self.width = pl.cdiv(x.dim, 16) * 16  # elements of a row on the chip
        self.columns = slice(None) if self.width == x.dim else pl.ds(0, self.width)
        self.needs = "dv" in sums, sums != ("dv",)  # P, dS
        used = 4 * _ROWS * self.width + 2 * _ROWS * _BLOCK * sum(self.needs)
        slot = 4 * _BLOCK * self.width + 8 * _BLOCK
        self.stages = min((SMEM_BYTES - 1024 - used) // slot, 3)
        fits = len(sums) * self.width + 4 * _BLOCK <= _COLUMNS
        self.buffers = 1 + (fits and self.stages > 1)  # of S and dP
        # columns that are worked on at a time; ptxas has no registers for more
        self.part = 4 if x.scores.dropout else 8 if x.scores.adjusted else 16
        self.c = x.scores.factor(x.scale)

    def scratch(self):
        def smem(*dims, tile=None):
            tile = tile or math.gcd(self.width, 64)
            return plgpu.SMEM(dims, self.x.dtype, transforms=swizzled(tile, self.x.dtype))

        def orders(n=1, **more):
            return plgpu.Barrier(num_arrivals=n, orders_tensor_core=True, **more)

        scores = plgpu.TMEM((self.buffers, _ROWS, _BLOCK), jnp.float32)
        found = {
            "own_smem": smem(2, _ROWS, self.width),  # K and V, or Q and dO
            "first_smem": smem(self.stages, _BLOCK, self.width),  # Q, or K
            "second_smem": smem(self.stages, _BLOCK, self.width),  # dO, or V
            "s_acc": scores,
            "dp_acc": scores,
            "own_full": plgpu.Barrier(num_arrivals=2),
            "s_ready": orders(num_barriers=self.buffers),
            "p_ready": orders(_WORKERS),  # P and dS are stored, S and dP loaded
            "p_free": orders(),
        }
        for name in self.sums:
            found[f"{name}_acc"] = plgpu.TMEM((_ROWS, self.width), jnp.float32)
        for name, needed in zip(("p_smem", "ds_smem"), self.needs):
            found |= {name: smem(_ROWS, _BLOCK, tile=_HALF)} if needed else {}
        copies, releases = 2, 1
        if self.by_keys:  # statistics pass, too
            found["lse_smem"] = plgpu.SMEM((self.stages, _BLOCK), _F32)
            found["delta_smem"] = plgpu.SMEM((self.stages, _BLOCK), _F32)
            copies, releases = 4, 1 + _WORKERS
        found["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        return found | {"empty": orders(releases, num_barriers=self.stages)}


class _Block(WarpSpecialized):
    """One block of a kernel, while it is traced."""

    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.refs = plan.x, refs
        self.ring = Ring(plan.stages, self.full, self.empty)
        arrays = refs.get("low"), refs.get("high")
        self.ranges = Ranges(plan.x, plan.by_keys, *arrays, layout=self.layout)

    def locate(self):
        """Finds the place of this block, in each role by itself."""
        x, plan, t = self.x, self.plan, lax.axis_index("cluster")
        tile, rest = lax.rem(t, plan.tiles), lax.div(t, plan.tiles)
        self.head, self.b = lax.rem(rest, plan.heads), lax.div(rest, plan.heads)
        if x.causal and not plan.by_keys:  # the longest tiles first: early keys, late queries
            tile = plan.tiles - 1 - tile
        self.row = tile * _ROWS
        last = pl.cdiv(x.queries if plan.by_keys else x.keys, _BLOCK) - 1
        first, count = self.ranges.blocks(self.row, _ROWS, _BLOCK)
        # rows that see nothing have one block, in which all pairs are hidden
        self.first, self.count = jnp.minimum(first, last), jnp.maximum(count, 1)
        self.steps = self.count * x.group if plan.by_keys else self.count

    def place(self, it):
        """Of step `it`: heads of the queries and of the passing rows, the first one of these."""
        head = passing = self.head
        block = self.first + it
        if self.plan.by_keys:
            head = passing = self.head * self.x.group + lax.div(it, self.count)
            block = self.first + lax.rem(it, self.count)
        else:
            passing = lax.div(self.head, self.x.group)
        block = jnp.maximum(block, 0)  # for the compiler to know
        return head, passing, pl.multiple_of(block * _BLOCK, _BLOCK)

    def run(self):
        me = lax.axis_index("wg")

        for worker in range(_WORKERS):  # slices of tiled memory are known

            @pl.when(me == worker)
            def _(worker=worker):
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
                self.locate()
                self.gradients(worker)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me == _WORKERS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            pl.kernel(self.issue, mesh=plgpu.WarpMesh(axis_name="warp"))()

    def issue(self):
        warp = lax.axis_index("warp")
        self.locate()
        pl.when(warp == 0)(self.producer)
        pl.when(warp == 1)(self.multiply)

    # ---- producer and multiplier

    def producer(self):
        by_keys, columns = self.plan.by_keys, self.plan.columns
        own = (self.k, self.v) if by_keys else (self.q, self.grad)
        passing = (self.q, self.grad) if by_keys else (self.k, self.v)
        for k, source in enumerate(own):
            at = self.b, pl.ds(self.row, _ROWS), self.head, columns
            plgpu.copy_gmem_to_smem(source.at[at], self.own_smem.at[k], self.own_full)

        def fetch(it, _):
            _, head, row = self.place(it)
            self.ring.acquire(it)
            slot, rows = self.ring.slot(it), pl.ds(row, _BLOCK)
            full = self.full.at[slot]
            for source, buffer in zip(passing, (self.first_smem, self.second_smem)):
                at = self.b, rows, head, columns
                plgpu.copy_gmem_to_smem(source.at[at], buffer.at[slot], full)
            if by_keys:
                for source, buffer in ((self.lse, self.lse_smem), (self.delta, self.delta_smem)):
                    plgpu.copy_gmem_to_smem(source.at[self.b, head, rows], buffer.at[slot], full)

        lax.fori_loop(0, self.steps, fetch, None)
        self.ring.drain(self.steps)

    def multiply(self):
        plgpu.barrier_wait(self.own_full)
        ahead = self.plan.buffers - 1
        if ahead:
            self.scores(jnp.int32(0))

        def step(it, _):
            if ahead:
                pl.when(it + 1 < self.steps)(lambda: self.scores(it + 1))
            else:
                self.scores(it)
            slot = self.ring.slot(it)
            first, second = self.first_smem.at[slot], self.second_smem.at[slot]
            plgpu.barrier_wait(self.p_ready, phase=it)
            for name in self.plan.sums:
                left, right = (self.p_smem, second) if name == "dv" else (self.ds_smem, first)
                acc = getattr(self, f"{name}_acc")
                plgpu.tcgen05_mma(acc, left, right, accumulate=it > 0)
            plgpu.tcgen05_commit_arrive(self.p_free)
            plgpu.tcgen05_commit_arrive(self.empty.at[slot])

        lax.fori_loop(0, self.steps, step, None)

    def scores(self, it):
        """S and dP of a block. Their buffers are free: P and dS of an earlier block that had them
        are stored."""
        slot, buffer = self.ring.slot(it), lax.rem(it, self.plan.buffers)
        self.ring.wait(it)
        s, dp = self.s_acc.at[buffer], self.dp_acc.at[buffer]
        first, second = self.first_smem.at[slot], self.second_smem.at[slot]
        if not self.plan.needs[1]:
            plgpu.tcgen05_mma(
                s, self.own_smem.at[0], first.T, self.s_ready.at[buffer], accumulate=False
            )
            return
        plgpu.tcgen05_mma(s, self.own_smem.at[0], first.T, accumulate=False)
        plgpu.tcgen05_mma(
            dp, self.own_smem.at[1], second.T, self.s_ready.at[buffer], accumulate=False
        )

    # ---- gradients of scores

    def gradients(self, me):
        by_keys, buffers = self.plan.by_keys, self.plan.buffers
        column = me * _HALF
        rows = pl.ds(pl.multiple_of(self.row, _ROWS), _ROWS)
        own = (
            ()
            if by_keys
            else [self.statistic(x.at[self.b, self.head, rows], 1) for x in self.stats]
        )

        def step(it, _):
            head, _, passing = self.place(it)
            slot, buffer = self.ring.slot(it), lax.rem(it, buffers)
            if by_keys:
                self.ring.wait(it)
            plgpu.barrier_wait(self.s_ready.at[buffer], phase=lax.div(it, buffers))
            low, high = self.ranges.of_all(self.row, _ROWS)
            hides = (passing + column < low) | (passing + (column + _HALF) > high)
            parts = []
            for c in range(column, column + _HALF, self.plan.part):
                of_part = own or [
                    self.statistic(x.at[slot, c : c + self.plan.part], 0)
                    for x in (self.lse_smem, self.delta_smem)
                ]
                parts.append(self.probabilities(buffer, c, head, passing + c, of_part, hides))
            plgpu.wait_load_tmem()
            if by_keys:
                self.ring.release(it)
            pl.when(it > 0)(lambda: plgpu.barrier_wait(self.p_free, phase=it - 1))
            at, found = slice(column, column + _HALF), list(zip(*parts))
            for name, needed in zip(("p_smem", "ds_smem"), self.plan.needs):
                if needed:
                    values = jnp.concatenate(found.pop(0), axis=1)
                    getattr(self, name)[:, at] = plgpu.layout_cast(values, self.layout)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.p_ready)

        lax.fori_loop(0, self.steps, step, None)
        if me < len(self.plan.sums):
            plgpu.barrier_wait(self.p_free, phase=self.steps - 1)
            self.store_sum(self.plan.sums[me])

    @property
    def stats(self):
        return self.lse, self.delta

    def statistic(self, ref, axis):
        """lse or delta, with the axis along which it is the same."""
        return plgpu.load(ref, layout=self.layout.reduce(axis)), 1 - axis

    def probabilities(self, buffer, column, head, passing, statistics, hides):
        """P and dS (those that are needed) of some columns."""
        x, n, by_keys = self.x, self.plan.part, self.plan.by_keys
        shape, at = (_ROWS, n), slice(column, column + n)
        lse, delta = (lax.broadcast_in_dim(v, shape, [axis]) for v, axis in statistics)
        place = self.b, head, self.row, passing
        tile = Tile(x, self.refs, *place, shape, by_keys=by_keys, layout=self.layout)
        s = plgpu.async_load_tmem(self.s_acc.at[buffer, :, at], layout=self.layout)
        s, slope = tile.adjust(s)
        p = jnp.exp2(s * self.plan.c - lse)
        p = lax.cond(
            hides,
            lambda v: jnp.where(self.ranges.keep(self.row, passing, shape), v, _F32(0)),
            lambda v: v,
            p,
        )
        found = [tile.drop(p).astype(x.dtype)] if self.plan.needs[0] else []
        if self.plan.needs[1]:
            dp = tile.drop(plgpu.async_load_tmem(self.dp_acc.at[buffer, :, at], layout=self.layout))
            ds = p * (dp - delta)
            ds = ds if slope is None else ds * slope
            found.append(ds.astype(x.dtype))
        # one part after the other: there are no registers for the scores of several
        return lax.optimization_barrier(tuple(found))

    def store_sum(self, name):
        """The own rows are no longer needed: their buffers hold the results."""
        buffer = self.own_smem.at[int(name == "dv")]
        scale = 1 if name == "dv" else self.x.scale
        acc, width = getattr(self, f"{name}_acc"), math.gcd(self.plan.width, 64)
        for c in range(0, self.plan.width, width):
            value = plgpu.async_load_tmem(acc.at[:, c : c + width], layout=self.layout)
            buffer[:, c : c + width] = (value * _F32(scale)).astype(self.x.dtype)
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        at = self.b, pl.ds(self.row, _ROWS), self.head, self.plan.columns
        plgpu.copy_smem_to_gmem(buffer, getattr(self, name).at[at])


@cached
def kernel(x, sums, interpret):
    """Its results are the sums, in their order. x: a Problem."""
    plan = _Plan(x, sums)

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip((*x.scores.kernel_operands, *sums), others, strict=True))
        overlap_launches()
        _Block(plan, refs).run()

    rows, heads = (x.keys, x.kv_heads) if plan.by_keys else (x.queries, x.heads)
    one = plgpu.ShapeDtypeStruct((x.batch, rows, heads, x.dim), x.dtype)
    return warp_specialized(
        body,
        plan,
        (one, one) if len(sums) == 2 else one,
        kernel_name="attention_backward_keys" if plan.by_keys else "attention_backward_queries",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
