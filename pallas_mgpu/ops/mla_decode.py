"""Attention of few queries with a long cache of latent rows (MLA) on Hopper: the first columns of a
row of the cache are its value, all of them are its key, and all heads share it.

Rows of queries (all queries and heads of a sequence) are taken 64 at a time, a *tile*; blocks of
the grid that work on the tiles of one sequence are side by side and read the same rows of the cache
at about the same time (_decode_shares.py, where tiles are the heads).

A slot of shared memory holds a block of rows once, for both products. Two warpgroups, the
*adders*, have half of the columns of the result each, whose accumulators would not fit in one:
O = O alpha + P V. They compute scores and probabilities by turns: each has every second block,
S = Q K^T, and leaves its P and the maxima in shared memory for the other one. So the tensor cores
have products of one adder while the other one computes probabilities. A third warpgroup fetches.

Half of the values of a slot are freed by the adder that adds them up, and fetched again at once.
The rest of the columns are freed with the scores. An adder begins with the scores of these and of
its own half, which come first, then adds what the other one left, then completes its scores.

Maxima are stale, as in attention: O is multiplied only if a maximum grew by more than 2^8."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import PLAIN, Scores, scale_of
from ._attention_softmax import MASKED, scaled, trusting
from ._common import (
    SMEM_BYTES,
    Ring,
    check_fields,
    overlap_launches,
    swizzled,
    warp_specialized,
)
from ._decode_shares import (
    OpenBatch,
    Shares,
    WithParts,
    check_array,
    check_batch,
    check_pages,
    memory_of,
    open_batch,
)
from ._open_rows import in_shapes

_F32 = np.float32
_LAZY = _F32(8.0)  # log2 of what a maximum may grow by before O is multiplied
_MOST = _F32(2.0**15)  # what sums of 8 probabilities may be before a maximum is looked for
_ROWS = 64  # of a tile
_ADDERS = 2
_WIDTH = 128  # columns of values that arrive together, at most
_REGISTERS = (24, 240)  # of a lane of the producer and of an adder
_PART = 32  # columns of a result that are merged at a time


class MlaConfig(NamedTuple):
    """How mla_decode is tiled. ``block``: rows of the cache of a slot, 32 or 64; ``stages``: slots,
    an even number; 0: as many as fit."""

    block: int = 64
    stages: int = 0


class _Problem(NamedTuple):
    batch: int
    queries: int
    heads: int
    dim: int
    value_dim: int
    keys: int
    dtype: np.dtype
    scale: float
    return_lse: bool
    lengths: bool
    page: int
    causal: bool
    scores: Scores = PLAIN
    open: OpenBatch | None = None

    @property
    def rows(self):
        return self.queries * self.heads

    @property
    def options(self):
        """Names of the operands after q and the cache."""
        return ["lengths"] * self.lengths + ["page_table"] * bool(self.page)


class _Plan:
    consumers = _ADDERS
    registers = _REGISTERS
    axes: dict[str, int] = {}

    def __init__(self, x, cfg, sms):
        self.x, self.block = x, cfg.block
        self.tiles = pl.cdiv(x.rows, _ROWS)
        self.lanes = next(n for n in range(min(self.tiles, sms), 0, -1) if self.tiles % n == 0)
        self.heads = self.tiles // self.lanes
        self.places = sms // self.lanes
        if not x.open:
            units = x.batch * self.heads * pl.cdiv(x.keys, self.block)
            self.places = min(self.places, units)
        self.clusters = self.places * self.lanes
        self.piece = math.gcd(x.page, self.block) if x.page else self.block
        self.part = x.value_dim // _ADDERS  # columns of an adder
        self.rest = x.dim - x.value_dim  # columns that are no values
        self.width = math.gcd(self.part, _WIDTH)  # of columns that arrive together
        self.groups = self.part // self.width
        self.c = _F32(x.scale * math.log2(math.e))
        size = x.dtype.itemsize
        fixed = _ROWS * (x.dim + self.block) * size + 2048
        slot = self.block * x.dim * size
        # each slot has one adder that computes its scores, which sees all phases of its barriers
        self.stages = min(cfg.stages or 8, (SMEM_BYTES - fixed) // slot) // _ADDERS * _ADDERS

    def scratch(self):
        x, copies, halves = self.x, self.block // self.piece, _ADDERS * self.stages

        def smem(*shape):
            return plgpu.SMEM(shape, x.dtype, transforms=swizzled(math.gcd(shape[-1], 64), x.dtype))

        found = {
            "q_smem": smem(_ROWS, x.dim),
            "k_smem": smem(self.stages, self.block, x.dim),
            "p_smem": smem(_ROWS, self.block),
            "m_smem": plgpu.SMEM((_ROWS,), _F32),
            "sum_smem": plgpu.SMEM((2, _ADDERS, _ROWS), _F32),  # of two tiles
            "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=halves * self.groups),
            "v_empty": plgpu.Barrier(num_barriers=halves),
            "p_full": plgpu.Barrier(num_barriers=_ADDERS),
            "sum_full": plgpu.Barrier(num_arrivals=_ADDERS),
        }
        if self.rest:
            found |= Ring.barriers(self.stages, copies, 1, prefix="rest_")
        return found | Ring.barriers(1, 1, _ADDERS, prefix="q_")


class _Block(Shares):
    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.queries = Ring(1, self.q_full, self.q_empty)
        self.weights = Ring(_ADDERS, self.p_full, None)
        if plan.rest:
            self.rest = Ring(plan.stages, self.rest_full, self.rest_empty)

    # ---- columns of slots

    def half(self, me):
        """The first column of the values of an adder."""
        return pl.multiple_of(me * self.plan.part, self.plan.part)

    def full(self, me, group, slot):
        """The barrier of columns of the values of an adder that arrive together."""
        return self.v_full.at[(me * self.plan.groups + group) * self.plan.stages + slot]

    def empty(self, me, slot):
        """The barrier of the values of an adder."""
        return self.v_empty.at[me * self.plan.stages + slot]

    def release(self, me, it):
        plgpu.barrier_arrive(self.empty(me, it % self.plan.stages))

    # ---- producer

    def producer(self):
        tiles, steps = self.segments(self.fetch, (jnp.int32(0), jnp.int32(0)))
        stages = self.plan.stages
        self.queries.drain(tiles)
        if self.plan.rest:
            self.rest.drain(steps)
        for s in range(stages):

            @pl.when(steps > s)
            def _(s=s):
                for half in range(_ADDERS):
                    plgpu.barrier_wait(self.empty(half, s), phase=(steps - s - 1) // stages)

    def fetch(self, found, carry):
        (tile, it0), x, p = carry, self.x, self.plan
        b, t, _, _, length, low, high = found
        q = self.q if x.open else self.q.reshape((x.batch, x.rows, x.dim))
        self.queries.acquire(tile)
        plgpu.copy_gmem_to_smem(q.at[b, pl.ds(t * _ROWS, _ROWS)], self.q_smem, self.q_full.at[0])

        def one(j, it):
            key = (high - 1 - j) * self.block
            pieces, slot = self.pieces(b, 0, key, length), it % p.stages

            def copy(columns, barrier):
                for rows, at in pieces:
                    here = self.k_smem.at[slot] if rows is None else self.k_smem.at[slot, rows]
                    plgpu.copy_gmem_to_smem(self.k.at[(*at, columns)], here.at[:, columns], barrier)

            if p.rest:
                self.rest.acquire(it)
                copy(pl.ds(x.value_dim, p.rest), self.rest.full.at[slot])
            for half in (it % _ADDERS, 1 - it % _ADDERS):

                @pl.when(it >= p.stages)
                def _(half=half):
                    plgpu.barrier_wait(self.empty(half, slot), phase=it // p.stages - 1)

                for group in range(p.groups):
                    columns = pl.ds(self.half(half) + group * p.width, p.width)
                    copy(columns, self.full(half, group, slot))
            return it + 1

        return tile + 1, lax.fori_loop(0, high - low, one, it0)

    # ---- adders

    def consumer(self, me):
        def add(acc):
            add_segment = functools.partial(self.add_segment, acc, me)
            self.segments(add_segment, (jnp.int32(0), jnp.int32(0)))

        pl.run_scoped(add, plgpu.ACC((_ROWS, self.plan.part)))

    def add_segment(self, acc, me, found, carry):
        """carry: segments and blocks so far. Block number `it` has the scores of adder it % 2."""
        tile, it0 = carry
        _, t, _, _, length, low, high = found
        n, along = high - low, plgpu.Layout.WGMMA.reduce(1)
        acc[...] = jnp.zeros(acc.shape, _F32)
        m = plgpu.layout_cast(jnp.full((_ROWS,), MASKED), along)
        sums = plgpu.layout_cast(jnp.zeros((_ROWS, 8), _F32), plgpu.Layout.WGMMA)
        skip = (it0 + me) % _ADDERS  # the first block is that of the other one
        self.queries.wait(tile)
        pl.when(n == skip)(lambda: self.queries.release(tile))

        def own(j, first, m, sums):
            key, last = (high - 1 - j) * self.block, j + _ADDERS >= n
            return self.own(acc, me, tile, t, key, length, last, first, it0 + j, m, sums)

        def begin(m, sums):
            return own(jnp.int32(0), True, m, sums)

        def one(i, state):
            return own(_ADDERS - skip + i * _ADDERS, False, *state)

        def end(m, sums):
            m, sums = self.add_theirs(acc, me, it0 + n - 1, m, sums)
            plgpu.wgmma_wait(0)
            self.release(me, it0 + n - 1)
            return m, sums

        def nothing(m, sums):
            return m, sums

        m, sums = lax.cond(skip == 0, begin, nothing, m, sums)
        m, sums = lax.fori_loop(0, (n + skip - 1) // _ADDERS, one, (m, sums))
        m, sums = lax.cond((skip + n) % _ADDERS == 0, end, nothing, m, sums)
        sums = self.sum_of(me, tile, jnp.sum(sums, axis=1))
        value = acc[...]
        slices = [value[:, i : i + _PART] for i in range(0, self.plan.part, _PART)]
        self.finish(me, found, slices, m, sums)
        return tile + 1, it0 + n

    def own(self, acc, me, tile, t, key, length, last, first, it, m, sums):
        """Scores and probabilities of a block, and their product with half of its values. Adds
        what the other one left of the block before too, if it is not the first one. last: of this
        adder in the segment."""

        def scores(s_acc, m=m, sums=sums):
            if first:
                self.score(s_acc, me, it, own=True)
                self.score(s_acc, me, it, own=False)
                return s_acc[...], m, sums
            self.score(s_acc, me, it, own=True)
            m, sums = self.add_theirs(acc, me, it - 1, m, sums)
            count = self.score(s_acc, me, it, own=False)
            plgpu.wgmma_wait(count)
            self.release(me, it - 1)
            return s_acc[...], m, sums

        s, m, sums = pl.run_scoped(scores, plgpu.ACC((_ROWS, self.block)))
        pl.when(last)(lambda: self.queries.release(tile))
        if self.plan.rest:
            self.rest.release(it)
        hides = key + self.block > self.first_hidden(t, length)
        s = lax.cond(hides, lambda s: self.mask(s, t, key, length), lambda s: s, s)
        how = lambda e: e.astype(self.x.dtype), _MOST, _LAZY
        e, m, sums, alpha = trusting(s, m, sums, self.plan.c, *how)
        # the other one wrote to these last, and this one has read that
        self.p_smem[...] = e
        self.m_smem[...] = m
        self.clean(it % self.plan.stages, key, length)
        self.weights.fill(it)
        self.multiply(acc, alpha)
        plgpu.wgmma(acc, plgpu.layout_cast(e, plgpu.Layout.WGMMA), self.values(me, it))
        plgpu.wgmma_wait(0)
        self.release(me, it)
        return m, sums

    def score(self, acc, me, it, own):
        """Adds up the part of the scores of a block that comes from this adder's half of the
        values and from what is no value, or from the other half. Returns how many products."""
        p, slot, half = self.plan, it % self.plan.stages, me if own else 1 - me
        parts = [(pl.ds(self.half(half) + i * p.width, p.width), i) for i in range(p.groups)]
        if own and p.rest:
            parts.insert(0, (pl.ds(self.x.value_dim, p.rest), None))
        for columns, group in parts:
            full = self.rest.full.at[slot] if group is None else self.full(half, group, slot)
            plgpu.barrier_wait(full, phase=it // p.stages)
            k = self.k_smem.at[slot, :, columns]
            plgpu.wgmma(acc, self.q_smem.at[:, columns], k.T)
        return len(parts)

    def add_theirs(self, acc, me, it, m, sums):
        """Adds what the other one left of a block; the product is still in flight then."""
        c = self.plan.c
        self.weights.wait(it)
        new = plgpu.load(self.m_smem, layout=plgpu.Layout.WGMMA.reduce(1))
        alpha = jnp.where(new == m, _F32(1), jnp.exp2(m * c - scaled(new, c)))
        weights = plgpu.load(self.p_smem, layout=plgpu.Layout.WGMMA)
        self.multiply(acc, alpha)
        plgpu.wgmma(acc, weights, self.values(me, it))
        return new, sums * lax.broadcast_in_dim(alpha, sums.shape, [0])

    def values(self, me, it):
        return self.k_smem.at[it % self.plan.stages, :, pl.ds(self.half(me), self.plan.part)]

    def clean(self, slot, key, length):
        """Makes values beyond the length 0, which may be NaN."""

        @pl.when(key + self.block > length)
        def _():
            for w in range(0, self.x.value_dim, 64):
                v = self.k_smem.at[slot, :, pl.ds(w, 64)]
                there = key + lax.broadcasted_iota(jnp.int32, v.shape, 0) < length
                v[...] = jnp.where(there, v[...], np.zeros((), self.x.dtype))
            plgpu.commit_smem()

    def sum_of(self, me, tile, sums):
        """The sums of both adders."""
        self.sum_smem[tile % 2, me] = sums
        plgpu.barrier_arrive(self.sum_full)
        plgpu.barrier_wait(self.sum_full, phase=tile)
        there = self.sum_smem.at[tile % 2, 1 - me]
        return sums + plgpu.load(there, layout=plgpu.Layout.WGMMA.reduce(1))

    def first_hidden(self, t, length):
        """The first key that some query of a tile does not see."""
        if not self.x.causal:
            return length
        return jnp.minimum(length, length - self.x.queries + t * _ROWS // self.x.heads + 1)

    def mask(self, s, t, key, length):
        at = key + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        keep = at < length
        if self.x.causal:
            query = (t * _ROWS + lax.broadcasted_iota(jnp.int32, s.shape, 0)) // self.x.heads
            keep = keep & (at <= query + (length - self.x.queries))
        return jnp.where(keep, s, MASKED)

    def columns(self, me, i, width):
        """Slice number i of the columns of an adder, of so many."""
        return pl.ds(self.half(me) + i * width, width)

    def multiply(self, acc, alpha):
        value = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        grown = lax.broadcast_in_dim(alpha != 1, value.shape, [0])
        factor = lax.broadcast_in_dim(alpha, value.shape, [0])
        acc[...] = plgpu.ext.warp_where(grown, lambda: value * factor, value)

    def finish(self, me, found, slices, m, sums):
        """Hands the segment to the block with the last keys, or merges all that there are."""
        b, t, first, blocks, _, low, high = found
        ends = high == blocks

        @pl.when(~ends)
        def _():
            for i, x in enumerate(slices):
                self.parts[self.me, :, self.columns(me, i, _PART)] = x
            self.stats[self.me, me, 0] = m
            self.stats[self.me, me, 1] = sums
            there = self.owner(first + blocks - 1) * self.plan.lanes + self.lane
            plgpu.semaphore_signal(self.done.at[there, me], memory_scope="gpu")

        @pl.when(ends)
        def _():
            self.merge(me, b, t, first, low, slices, m, sums)

    def merge(self, me, b, t, first, low, slices, m, sums):
        """Adds the segments of blocks with lower numbers, then stores the result."""
        p, c, along = self.plan, self.plan.c, plgpu.Layout.WGMMA.reduce(1)
        others = lax.select(low > 0, self.place - self.owner(first), 0)
        plgpu.semaphore_wait(self.done.at[self.me, me], others, memory_scope="gpu")

        def add(j, state):
            m, sums, *slices = state
            part = (self.place - 1 - j) * p.lanes + self.lane
            theirs, more = (plgpu.load(self.stats.at[part, me, i], layout=along) for i in (0, 1))
            new = jnp.maximum(m, theirs)
            base = scaled(new, c)
            mine, other = jnp.exp2(m * c - base), jnp.exp2(theirs * c - base)
            found = []
            for i, x in enumerate(slices):
                there = self.parts.at[part, :, self.columns(me, i, _PART)]
                there = plgpu.load(there, layout=plgpu.Layout.WGMMA)
                x = x * lax.broadcast_in_dim(mine, x.shape, [0])
                found.append(x + there * lax.broadcast_in_dim(other, x.shape, [0]))
            return new, sums * mine + more * other, *found

        m, sums, *slices = lax.fori_loop(0, others, add, (m, sums, *slices))
        self.store(me, b, t, slices, m, sums)

    def store(self, me, b, t, slices, m, sums):
        x, p = self.x, self.plan
        out = self.o if x.open else self.o.reshape((x.batch, x.rows, x.value_dim))
        factor = jnp.where(sums == 0, _F32(0), 1 / sums)
        row = t * _ROWS + lax.broadcasted_iota(jnp.int32, (_ROWS, _PART), 0)
        for i, value in enumerate(slices):
            value = (value * lax.broadcast_in_dim(factor, value.shape, [0])).astype(x.dtype)
            at = b, pl.ds(t * _ROWS, _ROWS), self.columns(me, i, _PART)
            pl.store(out, at, value, mask=row < x.rows)
        if x.return_lse:

            @pl.when(me == 0)
            def _():
                log = scaled(m, p.c) + jnp.log2(sums)
                r = t * _ROWS + lax.broadcasted_iota(jnp.int32, (_ROWS,), 0)
                at = b, r % x.heads, jnp.minimum(r // x.heads, x.queries - 1)
                if x.open:
                    at = ((b * x.heads + at[1]) * x.queries + at[2],)
                pl.store(self.lse, at, log * _F32(math.log(2)), mask=r < x.rows)


def _parts(plan):
    """Segments that another block finishes, and their maxima and sums."""
    blocks = plan.places * plan.lanes
    return (
        plgpu.ShapeDtypeStruct((blocks, _ROWS, plan.x.value_dim), _F32),
        plgpu.ShapeDtypeStruct((blocks, _ADDERS, 2, _ROWS), _F32),
    )


@cached
def _kernel(x, cfg, sms, interpret):
    plan = _Plan(x, cfg, sms)

    def body(q, k, *others, **scratch):
        overlap_launches()
        names = [*x.options, "o"] + ["lse"] * x.return_lse + ["parts", "stats"]
        k = k if x.open else k.reshape((*k.shape[:2], 1, x.dim))
        refs = dict(q=q, k=k) | dict(zip(names, others, strict=True))
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.places * plan.lanes, _ADDERS)))
        _Block(plan, refs | scratch | {"done": done}).run()

    shape, of_lse, shapes = (x.queries, x.heads), (x.batch, x.heads, x.queries), ()
    if x.open:
        shape, of_lse = (x.rows,), (x.batch * x.heads * x.queries,)
        of = (x.open.cache, x.page) if x.page else (1, x.open.cache)
        named = {"lengths": (x.batch,), "page_table": (x.open.table,)}
        others = (named[n] for n in x.options)
        shapes = (x.batch, x.rows, x.dim), (*of, 1, x.dim), *others
    outs = [plgpu.ShapeDtypeStruct((x.batch, *shape, x.value_dim), x.dtype)]
    if x.return_lse:
        outs.append(plgpu.ShapeDtypeStruct(of_lse, _F32))
    return warp_specialized(
        body,
        plan,
        (*outs, *_parts(plan)),
        interpret=interpret,
        kernel_name="mla_decode",
        **in_shapes(*shapes),
    )


def _of_any_batch(x, q, cache, page_table, how):
    """The kernel of many numbers of sequences, or of these, and its problem."""
    found = open_batch(
        ("mla_decode", x._replace(batch=0, keys=0), q.device, how), q, cache, page_table
    )
    if found is None:
        return _kernel(x, *how), x
    keys = found.table // found.rows * x.page if x.page else found.cache // found.rows
    shared = x._replace(batch=found.rows, keys=keys, open=found)
    rows = (cache.shape[0], x.page) if x.page else (1, x.batch * x.keys)
    views = [(x.batch, x.rows, x.dim), (*rows, 1, x.dim)]
    views += [(page_table.size,) if n == "page_table" else None for n in x.options]
    results = (x.batch, x.queries, x.heads, x.value_dim), (x.batch, x.heads, x.queries)
    alone = functools.partial(_kernel, x, *how)
    views = _core.Reshaped(_kernel(shared, *how), alone, tuple(views), results[: 1 + x.return_lse])
    return views, shared


def _check(q, cache, value_dim):
    for what, x, rank in (("q", q, 4), ("cache", cache, 3)):
        if x.ndim != rank or 0 in x.shape:
            raise ValueError(
                f"mla_decode: {what} must have {rank} dims, none of them 0, got shape {x.shape}"
            )
    if q.dtype.name not in ("float16", "bfloat16") or cache.dtype != q.dtype:
        raise TypeError(
            "mla_decode: q and cache must both be float16 or both bfloat16, got"
            f" {q.dtype} and {cache.dtype}"
        )
    dim = q.shape[3]
    if cache.shape[2] != dim:
        raise ValueError(
            f"mla_decode: q and cache must have one last dim, got {q.shape} and {cache.shape}"
        )
    if isinstance(value_dim, bool) or not isinstance(value_dim, int) or not 0 < value_dim <= dim:
        raise ValueError(
            f"mla_decode: value_dim must be an int from 1 to {dim}, the dim of the cache; got"
            f" {value_dim!r}"
        )
    if dim % 64 or value_dim % 128 or dim > 576 or value_dim > 512:
        raise NotImplementedError(
            "mla_decode: the dim of the cache must be a multiple of 64 up to 576, and value_dim of"
            f" 128 up to 512; got {dim} and {value_dim}; pad with zeros and give scale="
        )
    if _core.target(q.device)["name"] != "sm_90a":
        raise NotImplementedError(
            f"mla_decode: needs wgmma, which {_core.target(q.device)['name']} lacks; use products"
            " and ops.softmax"
        )


@plgpu.specialize(in_place=False)
def mla_decode(
    q,
    cache,
    *,
    kv_lengths=None,
    page_table=None,
    value_dim=512,
    causal=False,
    scale=None,
    return_lse=False,
    config=None,
    interpret=None,
):
    """``softmax(scale * q @ cache.T) @ cache[:, :value_dim]``: multi-head latent attention (MLA)
    of a few queries and a long cache that all heads share, with the key absorbed into q.

    q: [batch, queries, heads, dim]; cache: [batch, capacity, dim], or [pages, page_size, dim] with
    a page_table; float16 or bfloat16, row-major; dim a multiple of 64 up to 576, value_dim of 128
    up to 512. kv_lengths, page_table, causal, return_lse and out: as of :func:`attention_decode`;
    page_size is a multiple of 8 from 16. scale: of the scores, ``dim ** -0.5`` by default (models
    mostly want that of the dim before absorption). config: an :class:`MlaConfig`.

    A call repeats bit for bit; the bits of a sequence depend on the lengths of all. Hopper
    (sm_90a). Returns [batch, queries, heads, value_dim] of the caller's kind of array, or (that,
    lse). TypeError, ValueError for other dtypes and shapes, NotImplementedError for other dims
    and negative scales.
    """
    _check(q, cache, value_dim)
    check_batch("mla_decode", q)
    check_pages("mla_decode", q, cache, page_table)
    batch, queries, heads, dim = q.shape
    if kv_lengths is not None:
        check_array("mla_decode", "kv_lengths", kv_lengths, (batch,), np.int32)
    config = MlaConfig() if config is None else config
    if not isinstance(config, MlaConfig):
        raise TypeError(f"mla_decode: config must be an MlaConfig, got {config!r}")
    check_fields("mla_decode", config)
    if config.block not in (32, 64) or config.stages < 0 or config.stages % _ADDERS:
        raise ValueError(
            "mla_decode: an MlaConfig has a block of 32 or 64 and an even number of stages, or 0;"
            f" got {config}"
        )
    scale = scale_of("mla_decode", scale, dim)
    if scale < 0:
        raise NotImplementedError(
            f"mla_decode: scale must not be negative, got {scale}; negate q and scale"
        )
    page = 0 if page_table is None else cache.shape[1]
    keys = page_table.shape[1] * page if page else cache.shape[1]
    given = kv_lengths is not None, page, bool(causal) and queries > 1
    shape = batch, queries, heads, dim, value_dim, keys
    x = _Problem(*shape, q.dtype, scale, bool(return_lse), *given)
    how = config, plgpu.sm_count(q.device), interpret
    kernel, x = _of_any_batch(x, q, cache, page_table, how)
    memory = memory_of("mla_decode", q.shape[1:], _parts(_Plan(x, *how[:2])), interpret)
    return WithParts("mla_decode", kernel, memory, x.return_lse)
