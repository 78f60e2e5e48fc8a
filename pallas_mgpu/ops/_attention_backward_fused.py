"""Gradients of attention by five products: dK, dV and dQ in one kernel.

A block has 128 keys, 64 for each of two consumers, and goes over the queries. A consumer computes
its part of S^T and dP^T (keys are rows), and from them P^T and dS^T. These are the left operands of
the products for dV and dK, in registers. dS^T also goes to shared memory: dQ = dS K sums the keys
of both consumers. Where rows have 128 elements each consumer makes 64 columns of dQ's block; where
they have 64, they take turns.

The blocks of all keys add to dQ. A consumer stores its part in shared memory, and a TMA copy adds
it to float32 sums in global memory, while the next block is computed. The kernel of statistics
clears these sums, a last kernel converts them. The order of the additions is that of the blocks'
progress: dQ differs from call to call by rounding. The blocks of a head begin at different queries,
so that they do not all add to the same rows at once.

dS has two buffers. When a consumer multiplies, the other one has stored dS of this step, and has
finished its product of the step before, which read the other buffer; so one barrier a step is
enough, and a buffer is free when its turn comes again.

A config changes the order (AttentionBackwardConfig). With `lag`, dQ of a step is multiplied in the
next one, and four buffers take the place of two: a consumer that stores dS of step i knows, from
its wait for dS of step i - 2, that the other one has finished dQ of step i - 4. With `keys_last`,
too, two are enough: it has waited for dS of step i - 1, which the other one stored after dQ of step
i - 2.

Registers are what limits the tile: dK and dV take 128 of a lane's 240, S and dP 64. The statistics
of the queries are columns here, 16 values each; delta is loaded when lse is no longer needed."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._frameworks import is_jax

from ._attention_backward_seven import (
    CONSUMERS,
    ROWS,
    ByKeys,
    Plan,
    _Block,
    padded,
    statistics,
)
from ._attention_scores import PLAIN
from ._common import (
    SMEM_BYTES,
    CountedTiles,
    StaticTiles,
    overlap_launches,
    store,
    warp_specialized,
)

_F32 = np.float32


class FusedPlan(Plan):
    """How the kernel is tiled. cfg: an AttentionBackwardConfig. cores: of the GPU."""

    def __init__(self, x, cfg, cores=1):
        super().__init__(x, x.keys, x.kv_heads, True, ("dk", "dv"))
        self.persistent, self.total = bool(cfg.persistent), self.clusters
        if self.persistent:
            self.clusters = min(cores, self.total)
            uneven = x.causal or x.scores != PLAIN
            self.counted = bool(uneven) and self.total > self.clusters
        self.block, self.stages, self.rotate = 64, cfg.stages or 2, bool(cfg.rotate)
        self.early, self.lag = bool(cfg.early), bool(cfg.lag)
        self.keys_last, self.turns = bool(cfg.keys_last), x.dim == 64
        # a buffer is stored into once the other consumer has told that its product is done
        self.buffers = 4 if self.lag and not self.keys_last else 2

    @property
    def fits(self):
        """Does shared memory hold the buffers?"""
        n, item = self.x.dim, self.x.dtype.itemsize
        own, ring = 2 * ROWS * n * item, 2 * self.block * (n * item + 4)
        ds, dq = CONSUMERS * 64 * self.block * item, CONSUMERS * self.block * 64 * 4
        used = own + self.stages * ring + self.buffers * ds + dq
        rest = 1280 if self.persistent else 256  # barriers, and numbers of tiles
        return used + rest <= SMEM_BYTES

    def scratch(self):
        x = self.x

        def smem(shape, dtype):
            tile = plgpu.TilingTransform((8, 128 // dtype.itemsize))
            return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(128)))

        more = {
            "ds_smem": smem((self.buffers, CONSUMERS, 64, self.block), x.dtype),
            "dq_smem": smem((CONSUMERS, self.block, 64), np.dtype(_F32)),
        }
        if self.lag:
            more["ds_full"] = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.buffers)
        if self.persistent and self.counted:
            more |= CountedTiles.scratch(CONSUMERS)
        return super().scratch() | more


class _Fused(ByKeys):
    """dK, dV and dQ of a tile of keys."""

    exact = True

    def place(self, t):
        _Block.place(self, t)
        plan = self.plan
        self.first, self.count = self.ranges.blocks(self.row, ROWS, plan.block)
        self.steps = self.count * self.x.group
        self.start = jnp.int32(0)
        if plan.rotate:
            self.start = self.row // ROWS * self.count // plan.tiles

    def block_at(self, j):
        j = j + self.start
        return self.first + lax.select(j >= self.count, j - self.count, j)

    def sums(self, me, dk_acc, dv_acc):
        plgpu.barrier_wait(self.own_full)
        self.add(me, dk_acc, dv_acc, 0)
        plgpu.ext.named_barrier_sync(2, CONSUMERS)  # the results take the place of the keys
        self.store_sums(me, dk_acc, dv_acc)

    def add(self, me, dk_acc, dv_acc, base):
        """The products of a tile, whose first step is number `base` of all tiles."""
        p, x = self.plan, self.x

        def step(it, carry):
            j, g = carry
            slot = self.ring.slot(it)
            q, grad = self.first_smem.at[slot], self.second_smem.at[slot]
            head, queries = self.place_of(j, g)
            self.ring.wait(it)
            lse, delta = (
                self.statistic(self.lse_smem, slot),
                lambda: self.statistic(self.delta_smem, slot),
            )
            tile = self.tile(self.row + me * 64, queries, head)

            def scores(s_acc, p_acc):
                plgpu.wgmma(s_acc, self.own_smem.at[0, me], q.T)
                plgpu.wgmma(p_acc, self.own_smem.at[1, me], grad.T)
                if p.early:
                    return self.early(s_acc, p_acc, lse, delta, tile, (dv_acc, grad))
                found = self.gradients(s_acc, p_acc, lse, delta, tile)
                return [v.astype(x.dtype) for v in found]

            probabilities, ds = pl.run_scoped(scores, *[plgpu.ACC((64, p.block))] * 2)
            last = j + 1 == self.count
            there = lax.select(last, jnp.int32(0), j + 1), g + last.astype(jnp.int32)
            if p.keys_last:
                if not p.early:
                    plgpu.wgmma(dv_acc, probabilities, grad)
                place = self.place_before(j, g) if p.lag else (head, queries)
                self.queries_then_keys(me, it, base, ds, (dk_acc, ds, q), *place)
                plgpu.wgmma_wait(0)
                self.ring.release(it)
                return there
            if p.early:
                plgpu.wgmma(dk_acc, ds, q)
            self.ds_smem[it % p.buffers, me] = ds
            plgpu.commit_smem()
            if p.lag:
                plgpu.barrier_arrive(self.ds_full.at[it % p.buffers])
            if not p.early:
                plgpu.wgmma(dv_acc, probabilities, grad)
                plgpu.wgmma(dk_acc, ds, q)
            if p.lag:
                pl.when(it > base)(lambda: self.add_queries(me, it - 1, *self.place_before(j, g)))
            else:
                self.add_queries(me, it, head, queries)
            plgpu.wgmma_wait(0)
            self.ring.release(it)
            return there

        if p.lag and p.keys_last:
            self.ds_smem[(base + 1) % p.buffers, me] = jnp.zeros((64, p.block), x.dtype)
            plgpu.commit_smem()
            plgpu.ext.named_barrier_sync(0, CONSUMERS)
        zero, end = jnp.int32(0), base + self.steps
        last = lax.fori_loop(base, end, step, (zero, zero))
        if p.lag:
            pl.when(self.steps > 0)(
                lambda: self.add_queries(me, end - 1, *self.place_before(*last))
            )

    def place_of(self, j, g):
        """(head, first query) of block number j of head g of the group."""
        return self.head * self.x.group + g, self.block_at(j) * self.plan.block

    def place_before(self, j, g):
        """The same of the step before."""
        first = j == 0
        return self.place_of(lax.select(first, self.count, j) - 1, g - first.astype(jnp.int32))

    def early(self, s_acc, p_acc, lse, delta, tile, of_values):
        """P and dS; dV is multiplied before dS is computed. of_values: its accumulator, and dO."""
        acc, grad = of_values
        found, slope = self.probabilities(s_acc, 1, lse, tile)
        probabilities = tile.drop(found).astype(self.x.dtype)
        plgpu.wgmma(acc, probabilities, grad)
        dp = tile.drop(plgpu.wgmma_accumulator_load(p_acc, wait_n=1))
        return probabilities, self.of_scores(found, dp, delta, slope).astype(self.x.dtype)

    def add_queries(self, me, it, head, queries):
        """dQ of the block of step `it`, once both consumers have stored dS: a half each, or all in
        turns."""
        p, mine = self.plan, it % CONSUMERS == me
        if p.lag:
            plgpu.barrier_wait(self.ds_full.at[it % p.buffers], phase=it // p.buffers)
        if not p.turns:
            if not p.lag:
                plgpu.ext.named_barrier_sync(0, CONSUMERS)
            self.multiply(me, it, head, queries, pl.ds(pl.multiple_of(me * 64, 64), 64))
            return

        @pl.when(mine)
        def _():
            if not p.lag:
                plgpu.ext.named_barrier_sync(it % 2, CONSUMERS)
            self.multiply(me, it, head, queries, pl.ds(0, 64))

        if not p.lag:

            @pl.when(~mine)
            def _():
                plgpu.ext.named_barrier_arrive(it % 2, CONSUMERS)

    def queries_then_keys(self, me, it, base, ds, of_keys, head, queries):
        """Multiplies dQ, then dK while dQ is stored. With `lag` it is dQ of the step before, and
        dS of this step is stored with it. of_keys: the accumulator of dK, dS and Q. head, queries:
        of dQ's block."""
        p, acc = self.plan, of_keys[0]
        columns, follows = pl.ds(pl.multiple_of(me * 64, 64), 64), it > base
        which = it - 1 if p.lag else it

        def products(dq_acc):
            if p.lag:  # dQ before the first step is a product with zeros, which goes nowhere
                full = self.ds_full.at[which % p.buffers]
                pl.when(follows)(lambda: plgpu.barrier_wait(full, phase=which // p.buffers))
            else:
                self.ds_smem[it % p.buffers, me] = ds
                plgpu.commit_smem()
                plgpu.ext.named_barrier_sync(0, CONSUMERS)
            self.issue(dq_acc, which, columns)
            plgpu.wgmma(acc, *of_keys[1:])
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            if not p.lag:
                self.store_queries(me, dq, head, queries, columns)
                return
            self.ds_smem[it % p.buffers, me] = ds
            store_it = functools.partial(self.store_queries, me, dq, head, queries, columns)
            lax.cond(follows, store_it, plgpu.commit_smem)  # the store has a fence, too
            plgpu.barrier_arrive(self.ds_full.at[it % p.buffers])

        pl.run_scoped(products, plgpu.ACC((p.block, 64)))

    def issue(self, acc, it, columns):
        """Some columns of dS K, over the keys of both consumers."""
        for w in range(CONSUMERS):
            keys = self.own_smem.at[0, w, :, columns]
            plgpu.wgmma(acc, self.ds_smem.at[it % self.plan.buffers, w].T, keys)

    def multiply(self, me, it, head, queries, columns):
        """Adds some columns of dS K to dQ."""

        def product(acc):
            self.issue(acc, it, columns)
            return plgpu.wgmma_accumulator_load(acc)

        dq = pl.run_scoped(product, plgpu.ACC((self.plan.block, 64)))
        self.store_queries(me, dq, head, queries, columns)

    def store_queries(self, me, dq, head, queries, columns):
        """Adds dq to some columns of a block of dQ."""
        p = self.plan
        there = self.dq.at[self.b, head, pl.ds(queries, p.block), columns]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(self.dq_smem.at[me], dq, there, reduction_op="add")


class _Persistent(_Fused):
    """The same by a block for each SM, which gets one tile after the other. While a consumer stores
    the results of a tile, by way of its buffers for dS, its keys and values of the next one come,
    and the first blocks of queries."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        cluster = lax.axis_index("cluster")
        if plan.counted:
            counted = self.tile_numbers, self.tile_full, self.tile_empty, None
            self.tiles = CountedTiles(plan.total, plan.clusters, cluster, counted)
        else:
            self.tiles = StaticTiles(plan.total, plan.clusters, cluster)

    def place(self, t):
        super().place(jnp.clip(t, 0, self.plan.total - 1))  # so that copies know that it is inside

    def producer(self):
        def work(t, it):
            self.place(t)
            return self.fetch_passing(it)

        self.ring.drain(self.tiles.produce(work, jnp.int32(0)))

    def fetch_mine(self, me, t):
        """A consumer's keys and values of a tile, which is placed."""
        self.place(t)
        at = (self.b, pl.ds(self.row + me * 64, 64), self.head)
        for k, source in enumerate((self.k, self.v)):
            plgpu.copy_gmem_to_smem(source.at[at], self.own_smem.at[k, me], self.own_full)

    def consumer(self, me):
        shape, zero = (64, self.x.dim), jnp.int32(0)
        first = self.tiles.tile(zero)
        self.fetch_mine(me, first)

        def one(state):
            def tile(dk_acc, dv_acc):
                w, t, it = state
                self.place(t)
                plgpu.barrier_wait(self.own_full, phase=w)
                self.add(me, dk_acc, dv_acc, it)
                it = it + self.steps
                plgpu.ext.named_barrier_sync(2, CONSUMERS)  # nobody reads the keys any more
                following = self.tiles.tile(w + 1)
                pl.when(following < self.plan.total)(lambda: self.fetch_mine(me, following))
                self.place(t)
                self.finish(me, dk_acc, dv_acc)
                return w + 1, following, it

            return pl.run_scoped(tile, plgpu.ACC(shape), plgpu.ACC(shape))

        lax.while_loop(lambda state: state[1] < self.plan.total, one, (zero, first, zero))

    def finish(self, me, dk_acc, dv_acc):
        """The results, through the buffers for dS: dK waits for dV where these are few."""
        x, parts = self.x, self.x.dim // 64
        dv = plgpu.wgmma_accumulator_load(dv_acc).astype(x.dtype)
        self.store_parts(me, dv, self.dv, 0)
        apart = 2 * parts <= self.plan.buffers
        if not apart:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dk = plgpu.wgmma_accumulator_load(dk_acc) * _F32(x.scale)
        dk = self.rotated(dk, self.row + me * 64).astype(x.dtype)
        self.store_parts(me, dk, self.dk, parts if apart else 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dS of the next tile takes the buffers

    def store_parts(self, me, value, target, first):
        rows = pl.ds(self.row + me * 64, 64)
        for c in range(self.x.dim // 64):
            there = target.at[self.b, rows, self.head, pl.ds(c * 64, 64)]
            store(self.ds_smem.at[first + c, me], value[:, c * 64 : (c + 1) * 64], there)


@cached
def kernel(x, cfg, cores, interpret, functional=False):
    """Its results are dk, dv, and float32 sums for dq, which it adds to. functional: the sums are
    the last operand, too, as XLA wants it."""
    plan = FusedPlan(x, cfg, cores)
    names = *x.kernel_operands, *["dq_sums"] * functional

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip((*names, "dk", "dv", "dq"), others, strict=True))
        overlap_launches()
        (_Persistent if plan.persistent else _Fused)(plan, refs).run()

    made = warp_specialized(
        body,
        plan,
        (*_pair(x), sums_of(x)),
        kernel_name="attention_backward_fused",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return add_to_operand(made, names) if functional else made


def add_to_operand(made, names):
    """The kernel, whose last operand and last result are the same memory. names: of its operands
    after the first six."""
    made.definition.aliases = {6 + len(names) - 1: 2}
    return made


def _pair(x):
    one = plgpu.ShapeDtypeStruct((x.batch, x.keys, x.kv_heads, x.dim), x.dtype)
    return one, one


def sums_of(x):
    """Type of the sums for dQ: rows of whole blocks of queries and of 16 elements."""
    width = pl.cdiv(x.dim, 16) * 16
    return plgpu.ShapeDtypeStruct((x.batch, x.heads, padded(x), width), _F32)


@cached
def _converted(x, interpret):
    """Kernel: dQ from its float32 sums. With angles it is that of queries before the rotation."""
    height, half = 32, x.dim // 2
    columns = (pl.ds(0, half), pl.ds(half, half)) if x.angles else (slice(0, x.dim),)

    def rotated(found, cos, sin, start):
        keep = start + x.first + lax.broadcasted_iota(jnp.int32, (height, half), 0) < x.angles
        at = pl.ds(start + x.first, height), slice(None)
        cos, sin = (
            pl.load(ref, at, mask=keep, other=0.0).astype(jnp.float32) for ref in (cos, sin)
        )
        left, right = found
        return [left * cos + right * sin, right * cos - left * sin]

    def body(sums, *refs):
        overlap_launches()
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        *angles, dq = refs
        start = lax.axis_index("tile") * height
        rows = pl.ds(start, height)
        found = [sums[b, h, rows, at] * _F32(x.scale) for at in columns]
        found = rotated(found, *angles, start) if angles else found
        for value, at in zip(found, columns):
            value = value.astype(x.dtype)
            if x.queries % height:
                keep = lax.broadcasted_iota(jnp.int32, value.shape, 0) < x.queries - start
                pl.store(dq, (b, rows, h, at), value, mask=keep)
            else:
                dq[b, rows, h, at] = value

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((x.batch, x.queries, x.heads, x.dim), x.dtype),
        grid=(x.batch, x.heads, pl.cdiv(x.queries, height)),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="attention_backward_convert",
    )


class FusedKernels:
    """(dQ, dK, dV) from the arguments of the kernels, and from o and lse. make: makes the kernel
    that gives dK and dV and adds to dQ; functional=True is an option of it."""

    def __init__(self, x, make, interpret):
        self.statistics = statistics(x, interpret, sums_of(x))
        self.allocating = statistics(x, interpret, sums_of(x), *_pair(x))
        self.fused, self.make = make(), make
        self.convert = _converted(x, interpret)

    def __call__(self, grad, q, k, v, o, lse, others, angles=(), out=None, stream=None):
        """others: operands of the options of the scores. Returns (dq, dk, dv, lse, delta)."""
        if is_jax(q):  # its arrays are immutable
            lse, delta, sums = self.statistics(grad, o, lse)
            operands = grad, q, k, v, lse, delta, *others, *angles
            dk, dv, sums = self.make(functional=True)(*operands, sums)
            return self.convert(sums, *angles), dk, dv, lse, delta
        if out is None:
            lse, delta, sums, dk, dv = self.allocating(grad, o, lse, stream=stream)
            dq = None
        else:
            lse, delta, sums = self.statistics(grad, o, lse, stream=stream)
            dq, dk, dv = out
        operands = grad, q, k, v, lse, delta, *others, *angles
        self.fused(*operands, out=(dk, dv, sums), stream=stream)
        return self.convert(sums, *angles, out=dq, stream=stream), dk, dv, lse, delta
