"""Attention of few queries with a long cache on Hopper: bound by the bytes of K and V.

The queries of all heads that share a key head are the columns of one product: S^T = K Q^T and
O^T = V^T P^T, so that keys fill the 64 rows that wgmma has and nothing is padded but the columns,
to 8. The work of all sequences and heads is one row of blocks of 64 keys; each block of the grid
has an equal share of it, whatever the lengths, which are read when the kernel runs.

A share is worked on from its end to its beginning, one *segment* for each (sequence, head). A
segment without the last keys of its sequence goes to global memory, at most one of a share and the
first that is done. The share with the last keys adds up the segments, in the order of the blocks;
it waits for blocks with lower numbers alone, which have started before it.

Where results are small, several consumers alternate between the blocks of a segment, and the first
one adds up their results at the end.

Pages of a cache are copied in pieces that lie in one page each. Head dims that are no multiple of
64 are filled up with zeros in shared memory, by TMA. Keys before the windows of all queries are
not read: the blocks of a sequence begin with the first one that its first query sees."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _decode_eight_bits
from ._attention_narrow import union
from ._attention_scores import PLAIN, Scores, Tile, options, scale_of
from ._attention_softmax import MASKED, scaled
from ._common import (
    SMEM_BYTES,
    Ring,
    buffer,
    check_fields,
    overlap_launches,
    padded,
    warp_specialized,
)
from ._decode_shares import (
    OpenBatch,
    Shares,
    WithParts,
    check_array,
    check_batch,
    check_pages,
    check_scale,
    memory_of,
    open_batch,
)
from ._open_rows import in_shapes, rows_of

_F32 = np.float32
_KEYS = 64  # of a block
_MERGE_REGISTERS = 64  # of a lane, for segments that are loaded together
_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
# where the accumulators are small
_CONSUMERS = 4, 3  # with values of up to 64 columns, of more
_EIGHT_BIT_CONSUMERS = 4, 3  # with 8 columns of queries, with more
# of a block: more or fewer bytes in flight were 1 to 2 % slower
_BYTES = SMEM_BYTES * 2 // 3
_CAPACITIES = (0, 512, 2048, 1 << 24)  # of caches of one sequence: edges of the programs


class _Problem(NamedTuple):
    batch: int
    queries: int
    heads: int
    dim: int
    keys: int
    kv_heads: int
    dtype: np.dtype
    scale: float
    return_lse: bool
    lengths: bool
    value_dim: int
    page: int = 0  # keys of a page; 0: no pages
    scores: Scores = PLAIN  # windows count from the end of the keys
    sinks: bool = False
    kv_dtype: np.dtype | None = None  # of 8-bit caches
    k_scale: int = 0  # dims of its array; 0: none
    v_scale: int = 0
    trees: int = 0  # of queries: 1 for all sequences, or one for each; 0: none
    open: OpenBatch | None = None

    @property
    def group(self):
        """Heads of queries that share a head of keys."""
        return self.heads // self.kv_heads

    def rows_of(self, width):
        """The shape of queries, or of results, as rows."""
        rows = self.open.rows if self.open else self.batch * self.queries
        return rows, self.kv_heads, self.group, width

    def in_shapes(self):
        """Options of plgpu.kernel: the shapes of its operands where some are known later."""
        x = self
        if not x.open:
            of = 1, x.keys, x.kv_heads
            return in_shapes(None, (*of, x.dim), (*of, x.value_dim), *(None for _ in x.options))
        of = (x.open.cache, x.page, x.kv_heads) if x.page else (1, x.open.cache, x.kv_heads)
        named = {"lengths": (x.batch,), "page_table": (x.open.table,)}
        if x.trees > 1:
            named["tree"] = x.batch, x.queries, x.queries
        named |= {n: (x.batch, x.kv_heads) for n in ("k_scale", "v_scale") if getattr(x, n) == 2}
        others = (named.get(n) for n in x.options)
        return in_shapes(x.rows_of(x.dim), (*of, x.dim), (*of, x.value_dim), *others)

    @property
    def cached(self):
        """The dtype of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def options(self):
        """Names of the operands after q, k and v."""
        found = ["lengths"] * self.lengths + ["page_table"] * bool(self.page)
        found += ["sinks"] * self.sinks + ["tree"] * bool(self.trees)
        return found + [n for n in ("k_scale", "v_scale") if getattr(self, n)]


class AttentionDecodeConfig(NamedTuple):
    """How attention_decode is tiled. ``consumers``: warpgroups that process blocks of keys
    alternately, up to 4 (fewer if shared memory has no room for them, 1 if a key head has many
    results); ``stages``: slots of the rings of keys and values; ``lanes``: key heads on which
    neighbouring blocks of the grid work at the same time, a divisor of their number. 0: chosen.
    ``prefetch``: while the kernels before this one end, ask for the first keys and values. Lengths
    and page tables are read for that before they are final, which checkers report as a race; None:
    with arrays on a GPU."""

    consumers: int = 0
    stages: int = 0
    lanes: int = 0
    prefetch: bool | None = None


def _lanes(kv_heads, sms):
    """As many heads side by side as leave almost no SM without work: their rows of keys are
    neighbours in memory."""
    fitting = (n for n in range(min(kv_heads, sms), 1, -1) if kv_heads % n == 0)
    return next((n for n in fitting if n * (sms // n) >= 0.96 * sms), 1)


class _Plan:
    axes: dict[str, int] = {}

    def __init__(self, x, cfg, programs):
        self.x, self.cfg, self.clusters = x, cfg, programs
        self.lanes, self.places, self.block = cfg.lanes, programs // cfg.lanes, _KEYS
        self.heads = x.kv_heads // self.lanes  # key heads of a lane
        self.rows = x.queries * (x.heads // x.kv_heads)  # of queries with one key head
        self.columns = pl.cdiv(self.rows, 8) * 8
        self.dim, self.value_dim = (pl.cdiv(n, 64) * 64 for n in (x.dim, x.value_dim))
        self.piece = math.gcd(x.page, _KEYS) if x.page else _KEYS  # keys of a copy
        self.operand = np.dtype(np.float16) if x.kv_dtype else x.dtype  # of products
        # are values transposed in registers?
        self.turned = bool(x.kv_dtype) and _decode_eight_bits.is_turned(self.value_dim)
        # segments that are loaded together, by the registers that a lane has
        result = self.value_dim * self.columns
        wanted = _CONSUMERS[self.value_dim > 64]
        wanted = _EIGHT_BIT_CONSUMERS[self.columns > 8] if x.kv_dtype else wanted
        wanted = cfg.consumers or wanted
        wanted = wanted if result <= 16 * 128 else 1
        plans = ((n, self.slots(n)) for n in range(wanted, 0, -1))
        self.consumers, self.stages = next((n, slots) for n, slots in plans if slots or n == 1)
        if not self.stages:
            raise ValueError(
                f"attention_decode: {cfg.stages} stages of {_KEYS} keys and values do not fit into"
                f" shared memory with head_dims {x.dim} and {x.value_dim}; got {cfg}"
            )
        self.registers = {3: (32, 160), 4: (32, 112)}.get(self.consumers)
        merging = _MERGE_REGISTERS // (2 if self.consumers > 2 else 1)
        self.together = max(1, merging * 128 // result)

    def slots(self, consumers):
        """Slots of the rings with so many consumers; 0 if there is no room for them."""
        x, width = self.x, self.dim + self.value_dim
        slot = _KEYS * width * x.cached.itemsize
        fixed = consumers * self.columns * (self.dim + _KEYS) * 2 + 4096
        fixed += 2 * (consumers - 1) * self.value_dim * self.columns * 4
        if x.kv_dtype and not self.turned:
            fixed += consumers * _KEYS * self.value_dim * 2
        stages = self.cfg.stages or min(max((_BYTES - fixed) // slot, 2), 8)
        # each slot has one consumer, which sees all phases of its barrier
        stages = pl.cdiv(stages, consumers) * consumers
        return stages if fixed + stages * slot <= SMEM_BYTES else 0

    def scratch(self):
        x = self.x
        found = {}
        for name, dim in (("k_smem", self.dim), ("v_smem", self.value_dim)):
            shape = self.stages, _KEYS, dim
            if x.kv_dtype:
                found[name] = union(shape, math.gcd(dim, 128), x.cached)
            else:
                found[name] = buffer(*shape, dtype=x.cached)
        if x.kv_dtype and not self.turned:
            shape = self.consumers, _KEYS, self.value_dim
            found["values16"] = buffer(*shape, dtype=self.operand)
        if x.kv_dtype:
            found["q_power"] = plgpu.SMEM((self.consumers, self.columns), _F32)
        found["q_smem"] = buffer(self.consumers, self.columns, self.dim, dtype=self.operand)
        found["p_smem"] = buffer(self.consumers, self.columns, _KEYS, dtype=self.operand)
        if self.consumers > 1:
            others = self.consumers - 1  # two segments, so that they can go on with the next one
            found["part"] = plgpu.SMEM((2, others, self.value_dim, self.columns), _F32)
            found["part_stats"] = plgpu.SMEM((2, others, 2, self.columns), _F32)
            found |= Ring.barriers(2, others, 1, prefix="part_")
        for prefix in ("k_", "v_"):
            found |= Ring.barriers(self.stages, _KEYS // self.piece, 1, prefix=prefix)
        return found


class _Block(Shares):
    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        if self.x.kv_dtype:
            (self.k_smem, self.k_pairs), (self.v_smem, self.v_pairs) = self.k_smem, self.v_smem
        self.keys = Ring(plan.stages, self.k_full, self.k_empty)
        self.values = Ring(plan.stages, self.v_full, self.v_empty)
        if plan.consumers > 1:
            self.others = Ring(2, self.part_full, self.part_empty)

    # ---- producer

    def prefetch(self):
        """Asks for the first keys and values while the kernels before this one end. Lengths and
        pages may not be final yet, which only makes this useless: both are clipped, and what is
        asked for goes to the L2 cache, where later stores of others reach it."""
        begin, end = self.share()
        b, head, _, _, length, low, high = self.segment(begin, end)
        before, _ = self.extent(length)

        def one(j, _):
            key = (before + high - 1 - j) * self.block
            for _, at in self.pieces(b, head, key, length):
                plgpu.async_prefetch(self.k.at[at])
                plgpu.async_prefetch(self.v.at[at])

        count = jnp.minimum(high - low, self.plan.stages)
        pl.when(end > begin)(lambda: lax.fori_loop(0, count, one, None))

    def producer(self):
        steps = self.segments(self.fetch, jnp.int32(0))
        self.keys.drain(steps)
        self.values.drain(steps)

    def fetch(self, found, it0):
        b, head, _, _, length, low, high = found
        before, _ = self.extent(length)

        def one(j, it):
            key = (before + high - 1 - j) * self.block
            pieces = self.pieces(b, head, key, length)
            rings = (self.keys, self.k, self.k_smem), (self.values, self.v, self.v_smem)
            for ring, source, slots in rings:
                ring.acquire(it)
                slot = ring.slot(it)
                for rows, at in pieces:
                    here = slots.at[slot] if rows is None else slots.at[slot, rows]
                    there = padded(source, at, here.shape[-1])
                    plgpu.copy_gmem_to_smem(there, here, ring.full.at[slot])
            return it + 1

        return lax.fori_loop(0, high - low, one, it0)

    # ---- consumer

    def consumer(self, me):
        def attend(acc):
            attend_segment = functools.partial(self.attend_segment, acc, me)
            n, _ = self.segments(attend_segment, (jnp.int32(0), jnp.int32(0)))
            if self.plan.consumers > 1:
                pl.when(me > 0)(lambda: self.others.drain(n))

        pl.run_scoped(attend, plgpu.ACC((self.plan.value_dim, self.plan.columns)))

    def load_queries(self, me, b, head):
        x, p = self.x, self.plan
        group = x.group
        q = self.q if x.open else self.q.reshape(x.rows_of(x.dim))
        if x.kv_dtype:
            (*at, c), keep = self.elements(b, head, p.dim, x.dim, _decode_eight_bits.column)
            value = pl.load(q, (*at, c), mask=keep, other=np.zeros((), x.dtype))
            self.q_smem[me], power = _decode_eight_bits.divided(value)
            if power is not None:
                self.q_power[me] = power
            plgpu.commit_smem()
            return
        # rows in the result's layout, which stmatrix stores; single elements where they are wider
        if group > 1 and x.dim == x.value_dim == p.dim:
            along = plgpu.Layout.WGMMA.reduce(0)
            row = plgpu.broadcasted_iota(jnp.int32, (p.columns,), 0, layout=along)
            value = q[self.place_of(b, head, row)]
        else:
            (at, keep), zero = self.elements(b, head, p.dim, x.dim), np.zeros((), x.dtype)
            value = pl.load(q, at, mask=keep, other=zero)
        self.q_smem[me] = value
        plgpu.commit_smem()

    def place_of(self, b, head, row):
        """Indices of rows of queries or of the result; of the last one for those beyond it."""
        x, row = self.x, jnp.minimum(row, self.plan.rows - 1)
        group = x.heads // x.kv_heads
        return b * x.queries + row // group, head, row % group

    def elements(self, b, head, width, dim, order=lambda c: c):
        """Indices of single elements of rows with so many of them, and which are there. order: of
        columns."""
        row, column = (
            lax.broadcasted_iota(jnp.int32, (self.plan.columns, width), i) for i in (0, 1)
        )
        column = order(column)
        return (*self.place_of(b, head, row), jnp.minimum(column, dim - 1)), column < dim

    def attend_segment(self, acc, me, found, carry):
        """The consumers alternate between blocks; each adds up a part of what others have. carry:
        segments and blocks so far."""
        (segment, it0), x = carry, self.x
        b, head, first, blocks, length, low, high = found
        n, consumers = self.plan.columns, self.plan.consumers
        before, _ = self.extent(length)
        self.load_queries(me, b, head)
        acc[...] = jnp.zeros((self.plan.value_dim, n), _F32)
        along = plgpu.Layout.WGMMA.reduce(0)
        m = plgpu.layout_cast(jnp.full((n,), MASKED), along)
        sums = plgpu.layout_cast(jnp.zeros((_KEYS, n), _F32), plgpu.Layout.WGMMA)
        k_scale = self.scale_of("k_scale", b, head)
        if x.kv_dtype and x.dtype != self.plan.operand:
            power = plgpu.load(self.q_power.at[me], layout=along)
            k_scale = power if k_scale is None else power * k_scale
        skip = (
            me + consumers - it0 % consumers
        ) % consumers  # step `it` is that of consumer it % consumers
        steps = (high - low + (consumers - 1) - skip) // consumers

        def one(j, state):
            s = j * consumers + skip
            key = (before + high - 1 - s) * _KEYS
            return self.step(acc, me, b, key, length, k_scale, it0 + s, *state)

        m, sums = lax.fori_loop(0, steps, one, (m, sums))
        value = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        mine = value, m, jnp.sum(sums, axis=0)
        ends = high == blocks
        gather = functools.partial(self.gather, me, first)
        mine = lax.cond(ends & (low > 0), gather, lambda *mine: mine, *mine)
        if consumers > 1:
            pl.when(me > 0)(lambda: self.hand_over(segment, me - 1, *mine))
        pl.when(me == 0)(lambda: self.finish(segment, found, ends, *mine))
        return segment + 1, it0 + (high - low)

    def hand_over(self, segment, i, value, m, sums):
        """The part of a segment of another consumer than the first."""
        slot = self.others.slot(segment)
        self.others.acquire(segment)
        self.part[slot, i] = value
        self.part_stats[slot, i, 0] = m
        self.part_stats[slot, i, 1] = sums
        self.others.fill(segment)

    def take_over(self, segment):
        along, others = plgpu.Layout.WGMMA.reduce(0), range(self.plan.consumers - 1)
        slot = self.others.slot(segment)
        self.others.wait(segment)
        rows = [self.part_stats.at[slot, i, k] for i in others for k in (0, 1)]
        stats = [plgpu.load(row, layout=along) for row in rows]
        values = [plgpu.load(self.part.at[slot, i], layout=plgpu.Layout.WGMMA) for i in others]
        self.others.release(segment)
        return list(zip(values, stats[::2], stats[1::2]))

    def finish(self, segment, found, ends, *mine):
        """Hands the segment to the block with the last keys, or stores the result."""
        b, head, first, blocks, *_ = found
        if self.plan.consumers > 1:
            mine = self.sum_of([*self.take_over(segment), mine])
        value, m, sums = mine

        @pl.when(~ends)
        def _():
            self.parts[self.me] = value
            self.stats[self.me, 0] = m
            self.stats[self.me, 1] = sums
            there = self.owner(first + blocks - 1) * self.plan.lanes + self.lane
            plgpu.semaphore_signal(self.done.at[there], memory_scope="gpu")

        @pl.when(ends)
        def _():
            self.store(b, head, value, m * self.x.scores.factor(self.x.scale), sums)

    def keys_of(self, slot):
        """Keys of a slot, as the tensor cores take them."""
        if self.x.kv_dtype:  # in registers
            return _decode_eight_bits.keys_of(self.k_pairs.at[slot], self.x.kv_dtype)
        return self.k_smem.at[slot]

    def scale_of(self, name, b, head):
        """The scale of the keys or values of a head; None without one."""
        dims = getattr(self.x, name)
        scales = getattr(self, name, None)
        return None if not dims else scales[head] if dims == 1 else scales[b, head]

    def step(self, acc, me, b, key, length, k_scale, it, m, sums):
        """Scores of a block and their product with the values. sums: of each row of the scores."""
        c = self.x.scores.factor(self.x.scale)
        slot, n = self.keys.slot(it), self.plan.columns
        self.keys.wait(it)

        q_smem, p_smem = (
            plgpu.transpose_ref(ref.at[me], (1, 0)) for ref in (self.q_smem, self.p_smem)
        )

        def scores(s_acc):
            plgpu.wgmma(s_acc, self.keys_of(slot), q_smem)
            return s_acc[...]

        s = pl.run_scoped(scores, plgpu.ACC((_KEYS, n)))
        self.keys.release(it)
        if k_scale is not None:
            s = s * (lax.broadcast_in_dim(k_scale, s.shape, [1]) if k_scale.ndim else k_scale)
        if self.x.scores.adjusted:
            tile = Tile(self.x, self.refs, 0, 0, key, 0, s.shape, by_keys=True)
            s, _ = tile.adjust(s)
        s = jnp.where(self.seen(b, key, length), s, MASKED)
        new = jnp.maximum(m, jnp.max(s, axis=0))
        base = scaled(new, c)
        alpha = jnp.exp2(m * c - base)
        e = jnp.exp2(s * c - lax.broadcast_in_dim(base, s.shape, [1]))
        sums = sums * lax.broadcast_in_dim(alpha, s.shape, [1]) + e
        p_smem[...] = e.astype(self.plan.operand)
        self.values.wait(it)
        v = self.values_of(me, key, length, it)
        plgpu.commit_smem()
        acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, [1])
        plgpu.wgmma(acc, v, p_smem)
        if not self.x.kv_dtype:  # at once, for the next values to come
            plgpu.wgmma_wait(0)
            self.values.release(it)
        return new, sums

    def values_of(self, me, key, length, it):
        """Values of a slot, transposed, as the tensor cores take them; 0 beyond the length, where
        they may be NaN."""
        slot, kind = self.values.slot(it), self.x.kv_dtype
        if self.plan.turned:
            pairs = _decode_eight_bits.pairs_of_values(self.v_pairs.at[slot])
            self.values.release(it)
            return _decode_eight_bits.values_of(
                _decode_eight_bits.without(pairs, length - key), kind
            )
        v = self.v_smem.at[slot]
        if kind:  # tensor cores transpose 16-bit elements alone
            raw, v = v, self.values16.at[me]
            v[...] = raw[...].astype(self.plan.operand)
            self.values.release(it)

        @pl.when(key + _KEYS > length)
        def _():
            there = key + lax.broadcasted_iota(jnp.int32, v.shape, 0) < length
            v[...] = jnp.where(there, v[...], np.zeros((), v.dtype))

        return v.T

    def seen(self, b, key, length):
        """Which keys of a block which queries see."""
        x, shape = self.x, (_KEYS, self.plan.columns)
        left, right = x.scores.left, x.scores.right
        row = key + lax.broadcasted_iota(jnp.int32, shape, 0)
        keep = row < length
        if left is right is None and not x.trees:
            return keep
        query = lax.broadcasted_iota(jnp.int32, shape, 1) // (x.heads // x.kv_heads)
        if x.trees:
            own = row - (length - x.queries)  # keys of the queries themselves
            at = jnp.minimum(query, x.queries - 1), jnp.clip(own, 0, x.queries - 1)
            keep = keep & ((own < 0) | self.tree[b if x.trees > 1 else 0, *at])
        diagonal = query + (length - x.queries)
        if right is not None:
            keep = keep & (row <= diagonal + right)
        return keep if left is None else keep & (row >= diagonal - left)

    def gather(self, me, first, *mine):
        """Adds this consumer's part of the segments of blocks with lower numbers."""
        others, lanes = self.place - self.owner(first), self.plan.lanes
        # a block merges once at most, and counts begin at 0 in each launch
        done = self.done.at[self.me]
        plgpu.semaphore_wait(done, others, decrement=False, memory_scope="gpu")
        along = plgpu.Layout.WGMMA.reduce(0)

        def load(i):
            part = (self.place - 1 - jnp.minimum(i, others - 1)) * lanes + self.lane
            m = plgpu.load(self.stats.at[part, 0], layout=along)
            sums = plgpu.load(self.stats.at[part, 1], layout=along)
            value = plgpu.load(self.parts.at[part], layout=plgpu.Layout.WGMMA)
            there = i < others
            value, sums = (jnp.where(there, x, _F32(0)) for x in (value, sums))  # of inf, too
            return value, jnp.where(there, m, MASKED), sums

        def add(j, state):
            first = (j * self.plan.consumers + me) * together
            # all loads before the arithmetic, so that the memory's latency comes once
            return self.sum_of([*(load(first + i) for i in range(together)), state])

        together = self.plan.together
        trips = pl.cdiv(jnp.maximum(others - me * together, 0), self.plan.consumers * together)
        return lax.fori_loop(0, trips, add, mine)

    def sum_of(self, parts):
        """One (result, maximum, sum) of several, whose results are not divided yet."""
        c = self.x.scores.factor(self.x.scale)
        new = functools.reduce(jnp.maximum, [m for _, m, _ in parts])
        base = scaled(new, c)
        value, sums = _F32(0), _F32(0)
        for theirs, m, s in parts:
            factor = jnp.exp2(m * c - base)
            value = value + theirs * lax.broadcast_in_dim(factor, theirs.shape, [1])
            sums = sums + s * factor
        return value, new, sums

    def store(self, b, head, value, m, sums):
        x, p = self.x, self.plan
        group = x.heads // x.kv_heads
        row = lax.broadcasted_iota(jnp.int32, (p.columns,), 0)
        if x.sinks:
            along = plgpu.Layout.WGMMA.reduce(0)
            sink = self.sinks[head * group + row % group] * _F32(math.log2(math.e))
            sink = plgpu.layout_cast(sink, along)
            top = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - top)
            m, sums = top, sums * alpha + jnp.exp2(sink - top)
            factor = jnp.where(sums == 0, _F32(0), alpha / sums)
        else:
            factor = jnp.where(sums == 0, _F32(0), 1 / sums)
        v_scale = self.scale_of("v_scale", b, head)
        factor = factor if v_scale is None else factor * v_scale
        value = (value * lax.broadcast_in_dim(factor, value.shape, [1])).astype(x.dtype)
        value = _decode_eight_bits.in_order(value) if p.turned else value
        keep = row < p.rows
        o = self.o if x.open else self.o.reshape(x.rows_of(x.value_dim))
        mask = lax.broadcast_in_dim(keep, (p.columns, p.value_dim), [0])
        if p.value_dim == x.value_dim:
            pl.store(o, self.place_of(b, head, row), value.T, mask=mask)
        else:
            there, inside = self.elements(b, head, p.value_dim, x.value_dim)
            pl.store(o, there, value.T, mask=mask & inside)
        if x.return_lse:
            lse = (jnp.where(m <= MASKED, _F32(0), m) + jnp.log2(sums)) * _F32(math.log(2))
            at = b, head * group + row % group, row // group
            if x.open:
                at = ((at[0] * x.heads + at[1]) * x.queries + at[2],)
            pl.store(self.lse, at, lse, mask=keep)


def _parts(plan):
    """Segments that another block finishes, and their maxima and sums."""
    programs = plan.clusters
    return (
        plgpu.ShapeDtypeStruct((programs, plan.value_dim, plan.columns), _F32),
        plgpu.ShapeDtypeStruct((programs, 2, plan.columns), _F32),
    )


@cached
def _kernel(x, cfg, programs, interpret):
    plan = _Plan(x, cfg, programs)

    def body(q, k, v, *others, **scratch):
        names = [*x.options, "o"] + ["lse"] * x.return_lse + ["parts", "stats"]
        refs = dict(q=q, k=k, v=v) | dict(zip(names, others, strict=True))
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((programs,)))
        block = _Block(plan, refs | scratch | {"done": done})
        if cfg.prefetch:
            overlap_launches(
                lambda: pl.when(lax.axis_index("wg") == plan.consumers)(block.prefetch)
            )
        else:
            overlap_launches()
        block.run()

    shape = x.batch, x.queries, x.heads, x.value_dim
    outs = [plgpu.ShapeDtypeStruct(x.rows_of(x.value_dim) if x.open else shape, x.dtype)]
    if x.return_lse:
        lse = (x.open.rows * x.heads,) if x.open else (x.batch, x.heads, x.queries)
        outs.append(plgpu.ShapeDtypeStruct(lse, _F32))
    return warp_specialized(
        body,
        plan,
        (*outs, *_parts(plan)),
        interpret=interpret,
        kernel_name="attention_decode",
        **x.in_shapes(),
    )


def _of_any_batch(x, q, k, page_table, cfg, programs, interpret):
    """The kernel of many numbers of sequences, or of these, and its number of blocks, which is
    `programs` in the second case."""
    kind = "attention_decode", x._replace(batch=0, keys=0), q.device, cfg, interpret
    found = open_batch(kind, q, k, page_table, x.queries)
    if found is None:
        return _kernel(x, cfg, programs, interpret), programs
    programs = plgpu.sm_count(q.device) // cfg.lanes * cfg.lanes
    alone = functools.partial(_kernel, x, cfg, programs, interpret)
    count = found.rows // x.queries
    keys = found.table // count * x.page if x.page else found.cache // count
    rows = 1, x.batch * x.keys, x.kv_heads
    views = [x.rows_of(x.dim), *[None if x.page else (*rows, n) for n in (x.dim, x.value_dim)]]
    views += [(page_table.size,) if n == "page_table" else None for n in x.options]
    results = (x.batch, x.queries, x.heads, x.value_dim), (x.batch, x.heads, x.queries)
    kernel = _kernel(x._replace(batch=count, keys=keys, open=found), cfg, programs, interpret)
    views = _core.Reshaped(kernel, alone, tuple(views), results[: 1 + x.return_lse])
    return views, programs


def _check(q, k, v):
    for what, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"attention_decode: {what} must have four dims, none of them 0, got {x.shape}"
            )
    kinds = {k.dtype, v.dtype}
    if (
        q.dtype.name not in ("float16", "bfloat16")
        or len(kinds) > 1
        or not (k.dtype == q.dtype or k.dtype.name in _EIGHT_BITS)
    ):
        raise TypeError(
            "attention_decode: q must be float16 or bfloat16, and k and v both of its dtype or both"
            f" one of {', '.join(_EIGHT_BITS)}; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            "attention_decode: q and k must have one head_dim, k and v the same dims before theirs,"
            f" and q a multiple of their heads; got {q.shape}, {k.shape} and {v.shape}"
        )
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    size = pl.cdiv(rows, 8) * 8 * pl.cdiv(v.shape[3], 64) * 64
    dims = k.shape[3], v.shape[3]
    unit = 8 if k.dtype == q.dtype else 16
    if any(d % unit or not 32 <= d <= 256 for d in dims) or rows > 64 or size > 64 * 128:
        raise NotImplementedError(
            f"attention_decode: the head_dims must be multiples of {unit}"
            f"{' for 8-bit caches' if unit > 8 else ''} from 32 to 256, and up to 64 queries share"
            " a key head (queries * heads / kv_heads), 40 with values of more than 128 and 32 of"
            " more than 192; got q"
            f" {q.shape}, k {k.shape}, v {v.shape}; use ops.attention"
        )
    if _core.target(q.device)["name"] != "sm_90a":
        raise NotImplementedError(
            f"attention_decode: needs wgmma, which {_core.target(q.device)['name']} lacks; use"
            " ops.attention"
        )


def _chosen(config, kv_heads, sms, on_gpu):
    if config is not None and not isinstance(config, AttentionDecodeConfig):
        raise TypeError(
            f"attention_decode: config must be an AttentionDecodeConfig, got {config!r}"
        )
    c = config or AttentionDecodeConfig()
    check_fields("attention_decode", c)
    c = c._replace(lanes=c.lanes or _lanes(kv_heads, sms))
    c = c._replace(prefetch=on_gpu if c.prefetch is None else bool(c.prefetch))
    if c.consumers not in range(5) or c.stages < 0 or c.lanes < 1 or kv_heads % c.lanes:
        raise ValueError(
            "attention_decode: an AttentionDecodeConfig has up to 4 consumers, stages from 0 and a"
            f" divisor of the {kv_heads} key heads as lanes; got {config}"
        )
    if c.lanes > sms:
        raise ValueError(f"attention_decode: lanes must be at most {sms}, the SMs; got {config}")
    return c


def _chosen_kernel(x, q, k, page_table, cfg, sms, interpret):
    """What calls the kernel of a problem."""
    lanes = cfg.lanes

    def programs_of(keys):
        units = x.batch * (x.kv_heads // lanes) * pl.cdiv(keys, _KEYS)
        return min(sms // lanes, units) * lanes

    if x.batch == 1 and not x.page:  # a cache that grows by being made anew
        kind = x._replace(keys=0), q.device, interpret
        keys, most = rows_of(kind, x.keys, _CAPACITIES)
        x, programs = x._replace(keys=keys), programs_of(most)
        kernel = _kernel(x, cfg, programs, interpret)
    else:
        programs = programs_of(x.keys)
        kernel, programs = _of_any_batch(x, q, k, page_table, cfg, programs, interpret)
    parts = _parts(_Plan(x, cfg, programs))
    memory = memory_of("attention_decode", q.shape[1:], parts, interpret)
    return WithParts("attention_decode", kernel, memory, x.return_lse)


@plgpu.specialize(in_place=False)
def attention_decode(
    q,
    k,
    v,
    *,
    kv_lengths=None,
    page_table=None,
    sinks=None,
    tree=None,
    k_scale=None,
    v_scale=None,
    causal=False,
    window=None,
    softcap=None,
    scale=None,
    return_lse=False,
    config=None,
    interpret=None,
):
    """``softmax(scale * q @ k.T) @ v`` of a few queries and a long cache, whose keys
    are divided among blocks.

    q: [batch, queries, heads, head_dim]; k: [batch, capacity, kv_heads, head_dim]; v: like k, with
    its own last dim; float16 or bfloat16, row-major; dims from 32 to 256 in steps of 8; up to 64
    queries for each key head (queries * heads / kv_heads), 40 where v's dim is above 128 and 32
    where it is above 192. kv_lengths: int32 [batch], the keys that each sequence has (clipped to
    the capacity). They are read when the kernel runs, so new lengths compile nothing, and a
    replayed CUDA graph uses the current lengths. The contents of the cache beyond them are ignored.

    k and v may also both be int8, float8_e4m3fn or float8_e5m2, with dims in steps of 16. Their
    elements are converted exactly to q's dtype. k_scale, v_scale: float32 [kv_heads] or [batch,
    kv_heads]; the keys of a head are ``k * k_scale``, its values ``v * v_scale``; None: 1.

    page_table: int32 [batch, pages of a sequence]; k and v are then [pages, page_size, kv_heads,
    dim], key j of sequence b is row ``j % page_size`` of page ``page_table[b, j // page_size]``,
    and page_size is a multiple of 8 from 16. Entries beyond a sequence's length are ignored;
    others are clipped to the existing pages.

    The queries are the last ones of a sequence: query i is at the position ``length - queries +
    i``. By default each sees all keys; causal: those up to its position. window: ``(left, right)``:
    those from its position - left to its position + right, None: all on that side; causal makes
    right 0. softcap: scores s become ``softcap * tanh(s / softcap)``. sinks: float32 [heads], a
    score of each head that takes part in the softmax and has no value; it is part of the logarithms
    too. tree: bool [batch or 1, queries, queries]; the last keys are those of the queries
    themselves, of which query i sees the ones with ``tree[b, i, j]``, and all before them: a tree
    of drafts, in which each sees its ancestors. scale: of the scores, ``head_dim ** -0.5`` by
    default. config: an :class:`AttentionDecodeConfig`; chosen by default. return_lse: also return
    the natural logarithm of the sum of exponentials of the scores, float32 [batch, heads, queries];
    :func:`merge_attention` takes it. out: a preallocated result, or a pair of them. A query that
    sees no key has the result 0 and, without sinks, the logarithm -inf.

    A call repeats bit for bit; the bits of a sequence depend on the lengths of all. Hopper
    (sm_90a). Returns [batch, queries, heads, dim of v] of the caller's kind of array, or (that,
    lse). TypeError, ValueError for other dtypes and shapes, NotImplementedError for other dims and
    more queries.
    """
    _check(q, k, v)
    check_batch("attention_decode", q)
    check_pages("attention_decode", q, k, page_table)
    batch, queries, heads, dim = q.shape
    if kv_lengths is not None:
        check_array("attention_decode", "kv_lengths", kv_lengths, (batch,), np.int32)
    if sinks is not None:
        check_array("attention_decode", "sinks", sinks, (heads,), _F32)
    if tree is not None:
        trees = 1 if tree.shape[:1] == (1,) else batch
        check_array("attention_decode", "tree", tree, (trees, queries, queries), np.bool_)
        if causal:
            raise ValueError("attention_decode: tree says which queries see which; omit causal")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale("attention_decode", name, x, k, (batch, k.shape[2]))
    none = None, None, None, None
    scale = scale_of("attention_decode", scale, dim)
    how = False, window, True, softcap, 0.0
    scores = options("attention_decode", q, k, none, *how, scale=scale)
    right = 0 if causal else scores.right
    right = None if queries == 1 else right  # the last query sees the last key in any case
    scores = scores._replace(right=right, bottom_right=False)
    page = 0 if page_table is None else k.shape[1]
    keys = page_table.shape[1] * page if page else k.shape[1]
    shape = batch, queries, heads, dim, keys, k.shape[2], q.dtype, scale
    given = bool(return_lse), kv_lengths is not None, v.shape[3], page, scores, sinks is not None
    x, sms = _Problem(*shape, *given), plgpu.sm_count(q.device)
    if tree is not None:
        x = x._replace(trees=trees)
    if k.dtype != q.dtype:
        dims = [0 if a is None else len(a.shape) for a in (k_scale, v_scale)]
        x = x._replace(kv_dtype=k.dtype, k_scale=dims[0], v_scale=dims[1])
    cfg = _chosen(config, x.kv_heads, sms, q.device is not None and not interpret)
    return _chosen_kernel(x, q, k, page_table, cfg, sms, interpret)
