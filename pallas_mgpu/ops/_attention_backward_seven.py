"""The three kernels that compute the gradients of attention with seven products
(attention_backward.py has the formulas).

The first one computes delta, and writes it with lse (times log2 e) to rows padded to whole blocks;
there lse is so large that padded queries have the probability 0. The second one gives each block a
tile of keys and goes over the queries: scores are transposed, so that keys are rows, and P and dS
are the left operands of the products, in registers. The third one gives each block a tile of
queries and goes over the keys.

In both kernels each consumer owns 64 rows, and the producer fetches blocks of the other side
through a ring. Keys beyond the last one have zero rows: their gradients are not stored, and the
third kernel masks their probabilities."""

import functools
import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _attention_rotary
from ._attention_scores import PLAIN, Ranges, Tile, rows_in, scalar
from ._common import (
    Ring,
    WarpSpecialized,
    clear_rows,
    overlap_launches,
    store,
    store_some,
    warp_specialized,
)
from ._open_rows import any_rows, entries, in_shapes, views

_F32 = np.float32
_NEVER = _F32(3.0e38)  # lse of a query that is not there
CONSUMERS = 2
ROWS = 64 * CONSUMERS  # of a tile
_PAD = 128  # queries of padded rows of statistics
MOST_LENGTH = 1 << 24  # of those that share programs


def padded(x):
    """Rows of statistics for the queries of a problem."""
    return pl.cdiv(x.queries, _PAD) * _PAD


def rows_at(x, b, h, start, n, multiple=1):
    """The index of n rows of statistics, or of sums, of a head. Where lengths are known later these
    arrays have one dim for all heads. multiple: what divides start."""
    if not x.is_open:
        return b, h, pl.ds(start, n)
    first = (b * x.heads + h) * scalar(padded(x)) + start
    return (pl.ds(pl.multiple_of(first, multiple), n),)


def shape_of(x, *width):
    """Of arrays with rows of statistics, of all heads."""
    if x.is_open:
        return x.batch * x.heads * padded(x), *width
    return x.batch, x.heads, padded(x), *width


def shapes_of_operands(x, by_keys, *more):
    """Options of plgpu.kernel: shapes of the operands of kernels that get statistics. more: of the
    last ones."""
    q, k, _ = x.shapes
    shapes = q, q, k, k, shape_of(x), shape_of(x), *x.shapes_of_options(by_keys)
    return in_shapes(*shapes, *more, *x.shapes_of_others)


def of_any_batch(x):
    """The problem with any batch and any lengths: the entries are one after the other."""
    rows, batch = [any_rows("N"), any_rows("M")], entries()
    queries, keys = (_sizes.clamp(n // batch, 1, MOST_LENGTH) for n in rows)
    return x._replace(batch=batch, queries=queries, keys=keys, whole=tuple(rows))


def beside(x):
    """The problem of the kernels before and after those that multiply: one entry of open lengths
    has the programs of any batch there, which take no longer."""
    if x.is_open and not x.whole and not x.scores.sequences:
        return of_any_batch(x)
    return x


def with_views(given, x, kernel, operands, results):
    """The kernel as a function of arrays of the problem `given`, of these lengths. operands,
    results: "q" and "k", which have the shapes of these, "lse", "bias", and others, which stay."""
    if not x.is_open:
        return kernel
    rows, keys = given.batch * given.queries, given.batch * given.keys
    q, k = (given.queries, given.heads), (given.keys, given.kv_heads)
    ours, theirs = {"lse": (rows * given.heads,)}, {}
    if given.scores.bias:
        pair = x.scores.bias_pair
        ours["bias"] = (math.prod(given.scores.bias) // pair, pair)[:pair]
        theirs["bias"] = given.scores.bias
    if x.whole:
        ours |= {"q": (1, rows, *q[1:], x.dim), "k": (1, keys, *k[1:], x.dim)}
        theirs |= {"q": (given.batch, *q, x.dim), "k": (given.batch, *k, x.dim)}
    operands, results = map(ours.get, operands), map(theirs.get, results)
    return views(kernel, operands, results, sizes=(given.batch,) * x.counted)


class Plan:
    """Of the second and the third kernel: `rows` are owned by the blocks, `columns` pass by."""

    consumers = CONSUMERS
    axes: dict = {}

    def __init__(self, x, rows, heads, by_keys, sums):
        self.x, self.by_keys, self.sums, self.length = x, by_keys, sums, rows
        self.tiles, self.heads = pl.cdiv(rows, ROWS), heads
        self.clusters = self.tiles * heads * x.batch
        self.block = 64 if by_keys or x.dim == 128 else 128
        if x.dim == 256 or by_keys and x.dim == 128 and x.scores.adjusted:
            self.block = 32
        self.stages = 3 if x.dim == 64 else 2
        self.registers = 24, 240  # of a lane of the producer, and of a consumer
        self.c = x.scores.factor(x.scale)

    def scratch(self):
        x = self.x

        def smem(*shape):
            transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
            return plgpu.SMEM(shape, x.dtype, transforms=transforms)

        found = {
            "own_smem": smem(2, CONSUMERS, 64, x.dim),  # K and V, or Q and dO
            "first_smem": smem(self.stages, self.block, x.dim),  # Q, or K
            "second_smem": smem(self.stages, self.block, x.dim),  # dO, or V
            "own_full": plgpu.Barrier(num_arrivals=2 * CONSUMERS),
        }
        if x.whole:
            found["landed"] = plgpu.Barrier(num_arrivals=2)
        if self.by_keys:
            found["lse_smem"] = plgpu.SMEM((self.stages, self.block), _F32)
            found["delta_smem"] = plgpu.SMEM((self.stages, self.block), _F32)
        return found | Ring.barriers(self.stages, 4 if self.by_keys else 2, CONSUMERS)


class _Block(WarpSpecialized):
    """What both kernels share. own: the two arrays whose rows a block owns; passing: those that go
    through the ring."""

    exact = False  # do rows beyond the last one see nothing?

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.refs = plan.x, refs
        self.plain = self.x.scores == PLAIN and self.x.dim < 256
        ranges = refs.get("low"), refs.get("high")
        self.ranges = Ranges(plan.x, plan.by_keys, *ranges, exact=self.exact)
        self.ring = Ring(plan.stages, self.full, self.empty, self.first_smem, self.second_smem)
        self.place(lax.axis_index("cluster"))

    def place(self, t):
        """This block works on tile number t from here on."""
        plan = self.plan
        tile, self.head, self.b = (
            t % plan.tiles,
            t // plan.tiles % plan.heads,
            t // (plan.tiles * plan.heads),
        )
        if self.x.causal:  # the longest tiles first: early keys, late queries
            tile = tile if plan.by_keys else plan.tiles - 1 - tile
            tile = jnp.maximum(tile, 0) if self.x.is_open else tile  # which TMA has to know
        self.row = tile * ROWS

    def fetch_own(self, *arrays):
        # rows beyond the last query only change results that are not stored
        how = self.plan.length, self.head, self.own_full, self.plan.by_keys
        for k, source in enumerate(arrays):
            both = [(source, w * 64, self.own_smem.at[k, w]) for w in range(CONSUMERS)]
            self.fetch_rows(both, self.row, *how)

    def fetch_passing(self, arrays, start, length, head, it):
        """The blocks of both arrays that begin at row `start`, for step `it`."""
        slot = self.ring.slot(it)
        slots = [buffer.at[slot] for buffer in (self.first_smem, self.second_smem)]
        copies = [(source, 0, to) for source, to in zip(arrays, slots, strict=True)]
        self.fetch_rows(copies, start, length, head, self.full.at[slot])

    def fetch_rows(self, copies, start, length, head, barrier, clean=True):
        """Two copies, (source, first row from `start`, slot), of as many rows as a slot has. Where
        the next batch entry follows, TMA reads its rows beyond the end, and they are made 0 before
        the barrier learns of the copies. clean=False: they may have any values."""

        def copy(barrier):
            for source, row, slot in copies:
                place = start + row if row else start, slot.shape[0], length
                at = (*rows_in(self.x, self.b, *place), head)
                plgpu.copy_gmem_to_smem(source.at[at], slot, barrier)

        if not self.x.whole or not clean:
            return copy(barrier)
        left, (_, row, slot) = scalar(length) - start, copies[-1]
        pl.when(left >= row + slot.shape[0])(lambda: copy(barrier))

        @pl.when(left < row + slot.shape[0])
        def _():
            copy(self.landed)
            plgpu.barrier_wait(self.landed)
            for _, row, slot in copies:
                clear_rows(slot, jnp.clip(left - row, 0, slot.shape[0]))
            plgpu.commit_smem()
            for _ in copies:
                plgpu.barrier_arrive(barrier)

    def outside(self, keys, queries):
        """Which pairs are no pairs, from the first key and query of an array, and its dims: (key,
        query) or (query, key)."""
        key_axis = 0 if self.plan.by_keys else 1
        shape = (64, self.plan.block)
        key = keys + lax.broadcasted_iota(jnp.int32, shape, key_axis)
        query = queries + lax.broadcasted_iota(jnp.int32, shape, 1 - key_axis)
        return key > query if self.x.causal else key >= self.x.keys

    def tile(self, row, column, head):
        """The scores of a consumer's rows and a block of columns."""
        p = self.plan
        tile = Tile(self.x, self.refs, self.b, head, row, column, (64, p.block), p.by_keys)
        tile.begin()
        return tile

    def gradients(self, s_acc, p_acc, lse, delta, tile):
        """With options of the scores: probabilities for dV, and the gradients of raw scores
        (None without dP)."""
        probabilities, slope = self.probabilities(s_acc, 0 if p_acc is None else 1, lse, tile)
        if p_acc is None:
            return tile.drop(probabilities), None
        dp = tile.drop(plgpu.wgmma_accumulator_load(p_acc, wait_n=0))
        return tile.drop(probabilities), self.of_scores(probabilities, dp, delta, slope)

    def probabilities(self, s_acc, flying, lse, tile):
        """Probabilities before dropout, and the slope of the cap. flying: products that may then be
        in flight."""
        ranges, p = self.ranges, self.plan
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=flying)
        s, slope = tile.adjust(s)
        probabilities = jnp.exp2(s * p.c - lse)
        low, high = ranges.of_all(tile.row, 64)
        probabilities = lax.cond(
            (tile.column < low) | (tile.column + p.block > high),
            lambda v: jnp.where(ranges.keep(tile.row, tile.column, v.shape), v, _F32(0)),
            lambda v: v,
            probabilities,
        )
        return probabilities, slope

    @staticmethod
    def of_scores(probabilities, dp, delta, slope):
        """The gradients of raw scores."""
        ds = probabilities * (dp - (delta() if callable(delta) else delta))
        return ds if slope is None else ds * slope

    def rotated(self, value, position):
        """A gradient of rotated rows as that of the rows before, if there are angles."""
        if not self.x.angles:
            return value
        return _attention_rotary.rotate(value, self.refs, self.x, position, inverse=True)

    def store(self, me, k, value, target):
        x, length = self.x, self.plan.length
        if not x.whole:
            at = (self.b, pl.ds(self.row + me * 64, 64), self.head)
            return store(self.own_smem.at[k, me], value.astype(x.dtype), target.at[at])
        first = self.row + me * 64

        def there(start, count):
            return target.at[(*rows_in(x, self.b, first + start, count, length), self.head)]

        left = jnp.clip(scalar(length) - first, 0, 64)
        store_some(self.own_smem.at[k, me], value.astype(x.dtype), left, there)


class ByKeys(_Block):
    """dK and dV of a tile of keys."""

    def place(self, t):
        super().place(t)
        x, n = self.x, self.plan.block
        blocks = pl.cdiv(x.queries, n)
        self.first = jnp.int32(0)
        if x.causal:
            self.first = jnp.minimum(self.row // n, blocks)
        if x.scores != PLAIN:
            self.first, self.count = self.ranges.blocks(self.row, ROWS, n)
        else:
            self.count = blocks - self.first  # of each head
        self.steps = self.count * x.group

    def block_at(self, j):
        """The block of queries of step j of a head."""
        return self.first + j

    def producer(self):
        self.fetch_own(self.k, self.v)
        self.fetch_queries(jnp.int32(0))
        self.ring.drain(self.steps)

    def fetch_queries(self, it):
        """The blocks of queries of a tile, from step `it` of all tiles on; the step after them."""
        x, n = self.x, self.plan.block

        def head(g, it):
            h = self.head * x.group + g

            def one(j, it):
                self.ring.acquire(it)
                start = pl.multiple_of(self.block_at(j) * n, n)
                self.fetch_passing((self.q, self.grad), start, x.queries, h, it)
                slot, there = self.ring.slot(it), rows_at(x, self.b, h, start, n, n)
                for ref, smem in ((self.lse, self.lse_smem), (self.delta, self.delta_smem)):
                    plgpu.copy_gmem_to_smem(ref.at[there], smem.at[slot], self.full.at[slot])
                return it + 1

            return lax.fori_loop(0, self.count, one, it)

        return lax.fori_loop(0, x.group, head, it)

    def consumer(self, me):
        shape = (64, self.x.dim)
        if self.plan.sums == ("dk", "dv"):
            pl.run_scoped(lambda k, v: self.sums(me, k, v), plgpu.ACC(shape), plgpu.ACC(shape))
        elif self.plan.sums == ("dk",):
            pl.run_scoped(lambda k: self.sums(me, k, None), plgpu.ACC(shape))
        else:
            pl.run_scoped(lambda v: self.sums(me, None, v), plgpu.ACC(shape))

    def sums(self, me, dk_acc, dv_acc):
        """dK and dV, or one of them: the sum of the other is None."""
        p, x = self.plan, self.x
        plgpu.barrier_wait(self.own_full)

        def step(it, j):
            slot = self.ring.slot(it)
            q, grad = self.first_smem.at[slot], self.second_smem.at[slot]
            self.ring.wait(it)
            lse, delta = self.statistics(slot)
            keys, queries = self.row + me * 64, (self.first + j) * p.block

            def products(s_acc, p_acc=None):
                plgpu.wgmma(s_acc, self.own_smem.at[0, me], q.T)
                if p_acc is not None:
                    plgpu.wgmma(p_acc, self.own_smem.at[1, me], grad.T)
                if not self.plain:
                    head = self.head * x.group + lax.div(it, self.count)
                    tile = self.tile(keys, queries, head)
                    probabilities, ds = self.gradients(s_acc, p_acc, lse, delta, tile)
                    if dv_acc is not None:
                        plgpu.wgmma(dv_acc, probabilities.astype(x.dtype), grad)
                    if dk_acc is not None:
                        plgpu.wgmma(dk_acc, ds.astype(x.dtype), q)
                    plgpu.wgmma_wait(0)
                    return
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

            both = 2 if dk_acc is not None else 1
            pl.run_scoped(products, *[plgpu.ACC((64, p.block))] * both)
            self.ring.release(it)
            return lax.select(j + 1 == self.count, jnp.int32(0), j + 1)

        lax.fori_loop(0, self.steps, step, jnp.int32(0))
        self.store_sums(me, dk_acc, dv_acc)

    def store_sums(self, me, dk_acc, dv_acc):
        x = self.x
        if dv_acc is not None:
            self.store(me, 1, plgpu.wgmma_accumulator_load(dv_acc), self.dv)
        if dk_acc is not None:
            dk = plgpu.wgmma_accumulator_load(dk_acc) * _F32(x.scale)
            self.store(me, 0, self.rotated(dk, self.row + me * 64), self.dk)

    def statistics(self, slot):
        """lse and delta of the queries, which are columns."""
        return [self.statistic(ref, slot) for ref in (self.lse_smem, self.delta_smem)]

    def statistic(self, ref, slot):
        shape, layout = (64, self.plan.block), plgpu.Layout.WGMMA.reduce(0)
        return lax.broadcast_in_dim(plgpu.load(ref.at[slot], layout=layout), shape, [1])


class ByQueries(_Block):
    """dQ of a tile of queries."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        x, n = self.x, plan.block
        self.first, self.steps = 0, scalar(pl.cdiv(x.keys, n))
        if x.scores != PLAIN:
            self.first, self.steps = self.ranges.blocks(self.row, ROWS, n)
        elif x.causal:
            self.steps = jnp.minimum((self.row + (ROWS + n - 1)) // n, self.steps)

    def producer(self):
        n, kv = self.plan.block, self.head // self.x.group
        self.fetch_own(self.q, self.grad)

        def one(it, carry):
            self.ring.acquire(it)
            start = pl.multiple_of((it + self.first) * n, n)
            self.fetch_passing((self.k, self.v), start, self.x.keys, kv, it)
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
            slot, keys = self.ring.slot(it), (it + self.first) * p.block
            k, v = self.first_smem.at[slot], self.second_smem.at[slot]
            self.ring.wait(it)

            def products(s_acc, p_acc):
                plgpu.wgmma(s_acc, self.own_smem.at[0, me], k.T)
                plgpu.wgmma(p_acc, self.own_smem.at[1, me], v.T)
                if not self.plain:
                    tile = self.tile(queries, keys, self.head)
                    _, ds = self.gradients(s_acc, p_acc, lse, delta, tile)
                    plgpu.wgmma(dq_acc, ds.astype(x.dtype), k)
                    plgpu.wgmma_wait(0)
                    return
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
        self.store(me, 0, self.rotated(dq, queries + x.first), self.dq)

    def masked(self, probabilities, keys, queries):
        x, n = self.x, self.plan.block
        if x.causal:
            hide = keys + (n - 1) > queries
        elif x.is_open or x.keys % n:
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
        at = rows_at(self.x, self.b, self.head, pl.multiple_of(queries, 64), 64, 64)
        return [
            lax.broadcast_in_dim(plgpu.load(ref.at[at], layout=layout), shape, [0])
            for ref in (self.lse, self.delta)
        ]


# ---- the kernels --------------------------------------------------------------------------------


def _touch(ref):
    ref[(0,) * ref.ndim] = jnp.zeros((), ref.dtype)


@cached
def statistics(x, interpret, *more):
    """Kernel: lse times log2 e, and delta, for queries padded to whole blocks. more: other results
    for later kernels: sums (batch, heads, padded queries, padded dim), which are cleared; others
    are only allocated, and one element makes them results."""
    height, dim = 64, x.dim

    def body(grad, o, lse, lse_out, delta_out, sums=None, *allocated):
        overlap_launches()
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * height
        rows = pl.ds(start, height)
        there = start + jnp.arange(height) < x.queries
        mask = lax.broadcast_in_dim(there, (height, dim), [0])

        def load(ref):
            at = (*rows_in(x, b, start, height, x.queries), h, slice(None))
            return pl.load(ref, at, mask=mask, other=0.0).astype(jnp.float32)

        out = rows_at(x, b, h, start, height, height)
        delta_out[out] = jnp.sum(load(grad) * load(o), axis=1)
        of_head = (b, h, rows)
        if x.is_open:
            of_head = pl.ds((b * x.heads + h) * scalar(x.queries) + start, height)
        value = pl.load(lse, of_head, mask=there, other=0.0) * _F32(math.log2(math.e))
        if x.scores != PLAIN:
            there &= value > -_NEVER  # queries that see no key have no gradient
        lse_out[out] = jnp.where(there, value, _NEVER)
        for ref in allocated:
            pl.when((b == 0) & (h == 0) & (start == 0))(functools.partial(_touch, ref))
        if sums is not None:
            sums[out] = jnp.zeros((height, sums.shape[-1]), jnp.float32)

    def with_keys(grad, o, lse, k, *outs):  # for their length
        body(grad, o, lse, *outs[x.counted :])

    shape = plgpu.ShapeDtypeStruct(shape_of(x), _F32)
    options = {}
    if x.is_open:
        q, k, _ = x.shapes
        options = in_shapes(q, q, (x.heads * q[0] * q[1],), k, *x.shapes_of_others)
    return plgpu.kernel(
        with_keys if x.is_open else body,
        out_type=(shape, shape, *more),
        grid=(x.batch, x.heads, padded(x) // height),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="attention_backward_statistics",
        **options,
    )


@cached
def kernel(x, by_keys, interpret, sums=("dk", "dv")):
    heads, rows = (x.kv_heads, x.keys) if by_keys else (x.heads, x.queries)
    plan = Plan(x, rows, heads, by_keys, sums)

    def body(grad, q, k, v, lse, delta, *outs, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        names = *x.kernel_operands, *x.others, *(sums if by_keys else ("dq",))
        refs |= dict(zip(names, outs, strict=True))
        overlap_launches()
        (ByKeys if by_keys else ByQueries)(plan, refs).run()

    out = plgpu.ShapeDtypeStruct(x.shapes[by_keys], x.dtype)
    name = "attention_backward_keys" if by_keys else "attention_backward_queries"
    params = plgpu.CompilerParams(approx_math=True)
    outs = (out, out) if by_keys and len(sums) == 2 else out
    how = {"kernel_name": name, "compiler_params": params, "interpret": interpret}
    return warp_specialized(body, plan, outs, **how, **shapes_of_operands(x, by_keys))
