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

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_backward_tensor_memory import ROWS, WORKERS, GradientBlock, GradientPlan, orders
from ._attention_scores import Ranges, Tile
from ._common import overlap_launches, warp_specialized
from ._tensor_memory import SMEM_BYTES

_F32 = np.float32
_BLOCK = 64  # passing rows
_HALF = _BLOCK // WORKERS  # columns of each gradient thread
_COLUMNS = 512  # of tensor memory
MOST = 256  # the largest head_dim


def splits(x):
    """Do dK and dV need a kernel each?"""
    return 2 * (pl.cdiv(x.dim, 16) * 16 + _BLOCK) > _COLUMNS


class _Plan(GradientPlan):
    """Of a kernel; sums: what it computes, ("dk", "dv"), one of them, or ("dq",)."""

    consumers = WORKERS  # threads besides the one that issues

    def __init__(self, x, sums):
        self.sums, self.by_keys = sums, "dq" not in sums
        rows, self.heads = (x.keys, x.kv_heads) if self.by_keys else (x.queries, x.heads)
        super().__init__(x, rows, self.heads)
        self.needs = "dv" in sums, sums != ("dv",)
        used = 4 * ROWS * self.width + 2 * ROWS * _BLOCK * sum(self.needs)
        slot = 4 * _BLOCK * self.width + 8 * _BLOCK
        self.stages = min((SMEM_BYTES - 1024 - used) // slot, 3)
        fits = len(sums) * self.width + 4 * _BLOCK <= _COLUMNS
        self.buffers = 1 + (fits and self.stages > 1)  # of S and dP

    def scratch(self):
        smem = self.smem
        scores = plgpu.TMEM((self.buffers, ROWS, _BLOCK), jnp.float32)
        found = {
            "own_smem": smem(2, ROWS, self.width),  # K and V, or Q and dO
            "first_smem": smem(self.stages, _BLOCK, self.width),  # Q, or K
            "second_smem": smem(self.stages, _BLOCK, self.width),  # dO, or V
            "s_acc": scores,
            "dp_acc": scores,
            "own_full": plgpu.Barrier(num_arrivals=2),
            "s_ready": orders(num_barriers=self.buffers),
            "p_ready": orders(WORKERS),  # P and dS are stored, S and dP loaded
            "p_free": orders(),
        }
        for name in self.sums:
            found[f"{name}_acc"] = plgpu.TMEM((ROWS, self.width), jnp.float32)
        for name, needed in zip(("p_smem", "ds_smem"), self.needs):
            found |= {name: smem(ROWS, _BLOCK, tile=_HALF)} if needed else {}
        copies, releases = 2, 1
        if self.by_keys:  # statistics pass, too
            found["lse_smem"] = plgpu.SMEM((self.stages, _BLOCK), _F32)
            found["delta_smem"] = plgpu.SMEM((self.stages, _BLOCK), _F32)
            copies, releases = 4, 1 + WORKERS
        found["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        return found | {"empty": orders(releases, num_barriers=self.stages)}


class _Block(GradientBlock):
    """One block of a kernel, while it is traced."""

    registers = 208, 80

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        arrays = refs.get("low"), refs.get("high")
        self.ranges = Ranges(plan.x, plan.by_keys, *arrays, layout=self.layout)

    def locate(self):
        x, plan, t = self.x, self.plan, lax.axis_index("cluster")
        tile, rest = lax.rem(t, plan.tiles), lax.div(t, plan.tiles)
        self.head, self.b = lax.rem(rest, plan.heads), lax.div(rest, plan.heads)
        if x.causal and not plan.by_keys:  # the longest tiles first: early keys, late queries
            tile = plan.tiles - 1 - tile
        self.row = tile * ROWS
        last = pl.cdiv(x.queries if plan.by_keys else x.keys, _BLOCK) - 1
        first, count = self.ranges.blocks(self.row, ROWS, _BLOCK)
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

    # ---- producer and multiplier

    def producer(self):
        by_keys, columns = self.plan.by_keys, self.plan.columns
        own = (self.k, self.v) if by_keys else (self.q, self.grad)
        passing = (self.q, self.grad) if by_keys else (self.k, self.v)
        for k, source in enumerate(own):
            at = self.b, pl.ds(self.row, ROWS), self.head, columns
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
        rows = pl.ds(pl.multiple_of(self.row, ROWS), ROWS)
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
            low, high = self.ranges.of_all(self.row, ROWS)
            hides = (passing + column < low) | (passing + (column + _HALF) > high)
            parts = []
            for c in range(column, column + _HALF, self.plan.part):
                of_part = own or [
                    self.statistic(x.at[slot, c : c + self.plan.part], 0)
                    for x in (self.lse_smem, self.delta_smem)
                ]
                parts.append(self.part(buffer, c, head, passing + c, of_part, hides))
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

    def part(self, buffer, column, head, passing, statistics, hides):
        """P and dS of some columns."""
        shape, place = (ROWS, self.plan.part), (self.b, head, self.row, passing)
        by_keys, layout = self.plan.by_keys, self.layout
        tile = Tile(self.x, self.refs, *place, shape, by_keys=by_keys, layout=layout)
        at = slice(None), slice(column, column + shape[1])
        s, dp = (ref.at[buffer, *at] for ref in (self.s_acc, self.dp_acc))
        keep = functools.partial(self.ranges.keep, self.row, passing, shape)
        return self.probabilities(s, dp, tile, *statistics, hides, keep)

    def store_sum(self, name):
        buffer = self.own_smem.at[int(name == "dv")]
        scale = 1 if name == "dv" else self.x.scale
        self.store_sums(getattr(self, f"{name}_acc"), buffer, getattr(self, name), scale)


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
