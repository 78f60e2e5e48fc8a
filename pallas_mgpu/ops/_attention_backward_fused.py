"""Gradients of attention by five products: dK, dV and dQ in one kernel.

A block has 128 keys, 64 for each of two consumers, and goes over the queries. A consumer computes
its part of S^T and dP^T (keys are rows), and from them P^T and dS^T. These are the left operands of
the products for dV and dK, in registers. dS^T also goes to shared memory: dQ = dS K sums the keys
of both consumers. Where rows have 128 elements each consumer makes 64 columns of dQ's block; where
they have 64, they take turns.

The blocks of all keys add to dQ. A consumer stores its part in shared memory, and a TMA copy adds
it to float32 sums in global memory, while the next block is computed. The kernel of statistics
clears these sums. The order of the additions is that of the blocks' progress: dQ differs from call
to call by rounding.

When no tiles of keys are left for an SM, it gets one of the blocks behind theirs. These convert dQ,
piece by piece from a counter, as the tiles of a head are done: what they wait for are blocks with
lower numbers, which have started. A last kernel converts dQ under vmap and in JAX, with lengths at
run time, and where each SM has one tile at most: all heads are done at the end then.

dQ of a step is multiplied in the next step, when both consumers have long stored dS, so that they
need not keep in step. Where rows have 128 elements dV is multiplied before dS is computed, and dK
after dQ, which is stored meanwhile with dS of this step. dS has two buffers: a consumer that stores
dS of step i has waited for dS of step i - 1, which the other one stored after dQ of step i - 2. The
first step multiplies zeros: a product in a branch would be waited for. Where rows have 64 elements
that branch is needed, and everything in flight ends with dQ. dS has four buffers there: a consumer
that stores dS of step i knows, from its wait for dS of step i - 2, that the other one has finished
dQ of step i - 4.

Registers are what limits the tile: dK and dV take 128 of a lane's 240, S and dP 64. The statistics
of the queries are columns here, 16 values each; delta is loaded when lse is no longer needed."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._batch import Batched
from pallas_mgpu._caches import cached
from pallas_mgpu._frameworks import is_jax

from ._attention_backward_seven import (
    CONSUMERS,
    ROWS,
    ByKeys,
    Plan,
    _Block,
    beside,
    rows_at,
    shape_of,
    shapes_of_operands,
    statistics,
    with_views,
)
from ._attention_rotary import tables_from
from ._attention_scores import PLAIN, rows_in
from ._common import CountedTiles, SeveralKernels, overlap_launches, store, warp_specialized
from ._open_rows import in_shapes

_F32 = np.float32
_CONVERTED = 32  # rows of dQ that a warpgroup converts at a time


class FusedPlan(Plan):
    """How the kernel is tiled. cfg: an AttentionBackwardConfig."""

    def __init__(self, x, cfg, sms=0):
        """sms: with as many blocks that convert dQ."""
        super().__init__(x, x.keys, x.kv_heads, True, ("dk", "dv"))
        full = not x.causal and x.scores == PLAIN  # all tiles take as long: two are faster
        self.block, self.stages = 64, cfg.stages or (2 if x.dim == 128 and full else 3)
        self.turns = x.dim == 64
        self.buffers = 4 if self.turns else 2
        self.products, self.chunks = self.clusters, pl.cdiv(x.queries, CONSUMERS * _CONVERTED)
        self.units = x.batch * x.heads * self.chunks
        self.converters = min(sms, self.units) if sms else 0
        self.clusters += self.converters

    def scratch(self):
        x = self.x

        def smem(shape, dtype):
            tile = plgpu.TilingTransform((8, 128 // dtype.itemsize))
            return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(128)))

        more = {
            "ds_smem": smem((self.buffers, CONSUMERS, 64, self.block), x.dtype),
            "dq_smem": smem((CONSUMERS, self.block, 64), np.dtype(_F32)),
            "ds_full": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.buffers),
        }
        found = super().scratch() | more
        if self.converters:
            found |= CountedTiles.scratch(CONSUMERS)
            either = [found.pop("tile_numbers")], [found["lse_smem"]]  # no block needs both
            found["lse_smem"] = plgpu.RefUnion(*either)
        return found


class _Fused(ByKeys):
    """dK, dV and dQ of a tile of keys."""

    exact = True

    def run(self):
        p = self.plan
        if not p.converters:
            return super().run()
        t = lax.axis_index("cluster")
        self.done = pl.get_global(plgpu.SemaphoreType.REGULAR((self.x.batch, self.x.kv_heads)))
        pl.when(t < p.products)(super().run)
        pl.when(t >= p.products)(lambda: self.convert(t - p.products))

    def consumer(self, me):
        super().consumer(me)
        if self.plan.converters:
            plgpu.wait_smem_to_gmem(2)  # those before dK and dV
            plgpu.semaphore_signal(self.done.at[self.b, self.head], memory_scope="gpu")

    def convert(self, number):
        """What a block behind the others does: pieces of dQ, as heads are done."""
        p, x, me = self.plan, self.x, lax.axis_index("wg")
        scratch = self.tile_numbers, self.tile_full, self.tile_empty
        tiles = CountedTiles(p.units, p.converters, number, scratch)

        def piece(u, carry):
            head, chunk = u // p.chunks, u % p.chunks
            b, head = head // x.heads, head % x.heads
            done, all_ = self.done.at[b, head // x.group], p.tiles * CONSUMERS
            plgpu.semaphore_wait(done, all_, decrement=False, memory_scope="gpu")
            start = (chunk * CONSUMERS + me) * _CONVERTED
            angles = [self.refs[name] for name in ("cos", "sin")] if x.angles else []

            @pl.when(start < x.queries)
            def _():
                _convert(x, self.dq, angles, self.dq_out, (b, head, start), _CONVERTED)

            return carry

        @pl.when(me == p.consumers)
        def _():
            plgpu.set_max_registers(p.registers[0], action="decrease")
            tiles.produce(lambda _, carry: carry, jnp.int32(0))

        @pl.when(me < p.consumers)
        def _():
            plgpu.set_max_registers(p.registers[1], action="increase")
            tiles.consume(piece, jnp.int32(0))

    def place(self, t):
        p = self.plan
        _Block.place(self, jnp.minimum(t, p.products - 1) if p.converters else t)
        self.first, self.count = self.ranges.blocks(self.row, ROWS, self.plan.block)
        # a number that is known makes ptxas spill
        self.steps = lax.optimization_barrier(self.count * self.x.group)

    def block(self, j, g):
        """(head, first query) of block number j of head g of the group."""
        return self.head * self.x.group + g, self.block_at(j) * self.plan.block

    def block_before(self, j, g):
        """The same of the step before; of a first step anything."""
        first = j == 0
        j = jnp.maximum(lax.select(first, self.count, j) - 1, 0)
        return self.block(j, g - first.astype(jnp.int32))

    def sums(self, me, dk_acc, dv_acc):
        p, x = self.plan, self.x
        if not p.turns:
            self.ds_smem[1, me] = jnp.zeros((64, p.block), x.dtype)  # dS of step -1
            plgpu.commit_smem()
            plgpu.ext.named_barrier_sync(0, CONSUMERS)
        plgpu.barrier_wait(self.own_full)
        step = self.step_of_turns if p.turns else self.step

        def one(it, at):
            j, g = at
            step(me, it, j, g, dk_acc, dv_acc)
            self.ring.release(it)
            last = j + 1 == self.count
            return lax.select(last, jnp.int32(0), j + 1), g + last.astype(jnp.int32)

        end = lax.fori_loop(0, self.steps, one, (jnp.int32(0), jnp.int32(0)))  # block, head
        pl.when(self.steps > 0)(lambda: self.add_queries(me, self.steps - 1, *end))
        plgpu.ext.named_barrier_sync(0, CONSUMERS)  # the results take the place of the keys
        self.store_sums(me, dk_acc, dv_acc)

    def scores(self, me, it, j, g, f):
        """f(S, dP, lse, delta, tile, Q, dO) of a step: S and dP are being multiplied."""
        slot = self.ring.slot(it)
        q, grad = self.first_smem.at[slot], self.second_smem.at[slot]
        head, queries = self.block(j, g)
        self.ring.wait(it)
        lse = self.statistic(self.lse_smem, slot)
        tile = self.tile(self.row + me * 64, queries, head)

        def products(s_acc, p_acc):
            plgpu.wgmma(s_acc, self.own_smem.at[0, me], q.T)
            plgpu.wgmma(p_acc, self.own_smem.at[1, me], grad.T)
            delta = lambda: self.statistic(self.delta_smem, slot)  # noqa: E731
            return f(s_acc, p_acc, lse, delta, tile, grad)

        return q, grad, pl.run_scoped(products, *[plgpu.ACC((64, self.plan.block))] * 2)

    # ---- rows of 128 elements

    def step(self, me, it, j, g, dk_acc, dv_acc):
        p, x = self.plan, self.x

        def gradients(s_acc, p_acc, lse, delta, tile, grad):
            found, slope = self.probabilities(s_acc, 1, lse, tile)
            plgpu.wgmma(dv_acc, found.astype(x.dtype), grad)
            dp = plgpu.wgmma_accumulator_load(p_acc, wait_n=1)
            return self.of_scores(found, dp, delta, slope).astype(x.dtype)

        q, _, ds = self.scores(me, it, j, g, gradients)
        columns = self.columns(me)
        head, queries = self.block_before(j, g)

        def products(dq_acc):
            pl.when(it > 0)(lambda: self.wait(it - 1))
            self.multiply(dq_acc, it + 1, columns)  # the buffer of step it - 1
            plgpu.wgmma(dk_acc, ds, q)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            self.ds_smem[it % p.buffers, me] = ds
            lax.cond(  # both have a fence
                it > 0, lambda: self.store_queries(me, dq, head, queries), plgpu.commit_smem
            )
            plgpu.barrier_arrive(self.ds_full.at[it % p.buffers])

        pl.run_scoped(products, plgpu.ACC((p.block, 64)))
        plgpu.wgmma_wait(0)

    # ---- rows of 64 elements

    def step_of_turns(self, me, it, j, g, dk_acc, dv_acc):
        p, x = self.plan, self.x

        def gradients(s_acc, p_acc, lse, delta, tile, grad):
            found = self.gradients(s_acc, p_acc, lse, delta, tile)
            return [v.astype(x.dtype) for v in found]

        q, grad, (probabilities, ds) = self.scores(me, it, j, g, gradients)
        self.ds_smem[it % p.buffers, me] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ds_full.at[it % p.buffers])
        plgpu.wgmma(dv_acc, probabilities, grad)
        plgpu.wgmma(dk_acc, ds, q)
        pl.when(it > 0)(lambda: self.add_queries(me, it - 1, j, g))
        plgpu.wgmma_wait(0)

    # ---- dQ

    def columns(self, me):
        """Of dQ, which a consumer multiplies."""
        return pl.ds(0, 64) if self.plan.turns else pl.ds(pl.multiple_of(me * 64, 64), 64)

    def add_queries(self, me, it, j, g):
        """dQ of the block of step `it`, before block j of head g: a half, or all in turns."""
        p = self.plan

        def add():
            self.wait(it)

            def product(acc):
                self.multiply(acc, it, self.columns(me))
                return plgpu.wgmma_accumulator_load(acc)

            dq = pl.run_scoped(product, plgpu.ACC((p.block, 64)))
            self.store_queries(me, dq, *self.block_before(j, g))

        if p.turns:
            pl.when(it % CONSUMERS == me)(add)
        else:
            add()

    def wait(self, it):
        """For dS of step `it` of both consumers."""
        buffers = self.plan.buffers
        plgpu.barrier_wait(self.ds_full.at[it % buffers], phase=it // buffers)

    def multiply(self, acc, it, columns):
        """Some columns of dS K, over the keys of both consumers."""
        for w in range(CONSUMERS):
            keys = self.own_smem.at[0, w, :, columns]
            plgpu.wgmma(acc, self.ds_smem.at[it % self.plan.buffers, w].T, keys)

    def store_queries(self, me, dq, head, queries):
        """Adds dq to a block of dQ."""
        n = self.plan.block
        there = self.dq.at[(*rows_at(self.x, self.b, head, queries, n, n), self.columns(me))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(self.dq_smem.at[me], dq, there, reduction_op="add")


@cached
def kernel(x, cfg, interpret, functional=False, sms=0):
    """Its results are dk, dv, and float32 sums for dq, which it adds to. functional: the sums are
    the last operand, too, as XLA wants it. sms: the last result is dq."""
    plan = FusedPlan(x, cfg, sms)
    names = *x.kernel_operands, *["dq_sums"] * functional

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        results = "dk", "dv", "dq", *["dq_out"] * (plan.converters > 0)
        refs |= dict(zip((*names, *x.others, *results), others, strict=True))
        if plan.converters:
            (refs["tile_numbers"],), (refs["lse_smem"],) = refs["lse_smem"]
        overlap_launches()
        _Fused(plan, refs).run()

    made = warp_specialized(
        body,
        plan,
        (*_pair(x), sums_of(x), *[_like_q(x)] * (plan.converters > 0)),
        kernel_name="attention_backward_fused",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **shapes_of_operands(x, True, *[sums_of(x).shape] * functional),
    )
    return add_to_operand(made, names) if functional else made


def add_to_operand(made, names):
    """The kernel, whose last operand and last result are the same memory. names: of its operands
    after the first six."""
    made.definition.aliases = {6 + len(names) - 1: 2}
    return made


def _pair(x):
    one = plgpu.ShapeDtypeStruct(x.shapes[1], x.dtype)
    return one, one


def _like_q(x):
    return plgpu.ShapeDtypeStruct(x.shapes[0], x.dtype)


def sums_of(x):
    """Type of the sums for dQ: rows of whole blocks of queries and of 16 elements."""
    width = pl.cdiv(x.dim, 16) * 16
    return plgpu.ShapeDtypeStruct(shape_of(x, width), _F32)


def _convert(x, sums, angles, dq, place, height):
    """Rows of dQ from their float32 sums. With angles it is that of queries before the rotation.
    place: (batch, head, first row)."""
    b, h, start = place
    there, of_q = rows_at(x, b, h, start, height, height), rows_in(x, b, start, height, x.queries)
    half = x.dim // 2
    columns = (pl.ds(0, half), pl.ds(half, half)) if x.angles else (slice(0, x.dim),)

    def rotated(found, cos, sin):
        keep = start + x.first + lax.broadcasted_iota(jnp.int32, (height, half), 0) < x.angles
        at = pl.ds(start + x.first, height), slice(None)
        cos, sin = (
            pl.load(ref, at, mask=keep, other=0.0).astype(jnp.float32) for ref in (cos, sin)
        )
        left, right = found
        return [left * cos + right * sin, right * cos - left * sin]

    found = [sums[(*there, at)] * _F32(x.scale) for at in columns]
    found = rotated(found, *angles) if angles else found
    for value, at in zip(found, columns):
        value = value.astype(x.dtype)
        if x.is_open or x.queries % height:
            keep = lax.broadcasted_iota(jnp.int32, value.shape, 0) < x.queries - start
            pl.store(dq, (*of_q, h, at), value, mask=keep)
        else:
            dq[(*of_q, h, at)] = value


@cached
def _converted(x, interpret):
    """Kernel: dQ from its float32 sums."""
    height, angles = _CONVERTED, [(x.angles, x.dim // 2)] * (2 * bool(x.angles))
    shapes = sums_of(x).shape, x.shapes[0], *angles, *x.shapes_of_others

    def body(sums, *refs):
        overlap_launches()
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        dq, angles = refs[-1], refs[x.is_open :][: 2 * bool(x.angles)]  # q is there for its length
        _convert(x, sums, angles, dq, (b, h, lax.axis_index("tile") * height), height)

    return plgpu.kernel(
        body,
        out_type=_like_q(x),
        grid=(x.batch, x.heads, pl.cdiv(x.queries, height)),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="attention_backward_convert",
        **(in_shapes(*shapes) if x.is_open else {}),
    )


class FusedKernels(SeveralKernels):
    """(dQ, dK, dV) from the arguments of the kernels, and from o and lse. make: makes the kernel
    that gives dK and dV and adds to dQ; functional=True is an option of it. sms: the number of its
    blocks that convert dQ (another option); 0: it has none. given: the problem of this call, where
    that of the kernels is one of many lengths."""

    def __init__(self, x, make, interpret, sms=0, given=None):
        self.is_open = x.is_open
        y, before = beside(x), ("q", "q", "lse", "k")
        seen, seen_beside = (functools.partial(with_views, given, p) for p in (x, y))
        self.statistics = seen_beside(statistics(y, interpret, sums_of(y)), before, (None,) * 3)
        allocating = statistics(y, interpret, sums_of(y), *_pair(y))
        self.allocating = seen_beside(allocating, before, (None, None, None, "k", "k"))
        operands = "q", "q", "k", "k", None, None, *x.kernel_operands
        converted = None, "q", *(None,) * (2 * bool(x.angles))
        results = "k", "k", None
        self.fused, self.converting = seen(make(), operands, results), None
        self.functional = functools.cache(
            lambda: seen(make(functional=True), (*operands, None), results)
        )
        if sms:
            self.converting = make(sms=sms)
            self.allocating_all = statistics(x, interpret, sums_of(x), *_pair(x), _like_q(x))
        self.first = given.first if self.is_open else 0  # which this kernel does not know
        y = y._replace(first=0) if self.is_open else y
        self.convert = seen_beside(_converted(y, interpret), converted, ("q",))

    def __call__(self, grad, q, k, v, o, lse, others, angles=(), out=None, stream=None):
        """others: operands of the options of the scores. Returns (dq, dk, dv, lse, delta)."""
        before, last = (grad, o, lse), angles
        if self.is_open:  # for lengths
            before, last = (*before, k), (q, *tables_from(self.first, angles))
        operands = *others, *angles
        if is_jax(q):  # its arrays are immutable
            lse, delta, sums = self.statistics(*before)
            dk, dv, sums = self.functional()(grad, q, k, v, lse, delta, *operands, sums)
            return self.convert(sums, *last), dk, dv, lse, delta
        converting = self.converting
        if any(isinstance(x, Batched) for x in (grad, q, k, v, o, lse, *operands)):
            converting = None  # elements would share the counter
        dq = None
        if out is not None:
            lse, delta, sums = self.statistics(*before, stream=stream)
            dq, dk, dv = out
        elif converting:
            lse, delta, sums, dk, dv, dq = self.allocating_all(*before, stream=stream)
        else:
            lse, delta, sums, dk, dv = self.allocating(*before, stream=stream)
        operands = grad, q, k, v, lse, delta, *operands
        if converting:
            converting(*operands, out=(dk, dv, sums, dq), stream=stream)
            return dq, dk, dv, lse, delta
        self.fused(*operands, out=(dk, dv, sums), stream=stream)
        return self.convert(sums, *last, out=dq, stream=stream), dk, dv, lse, delta
