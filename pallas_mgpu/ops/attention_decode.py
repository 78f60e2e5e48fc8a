"""Attention of few queries with a long cache on Hopper: bound by the bytes of K and V.

The queries of all heads that share a key head are the columns of one product: S^T = K Q^T and
O^T = V^T P^T, so that keys fill the 64 rows that wgmma has and nothing is padded but the columns,
to 8. The work of all sequences and heads is one row of blocks of 64 keys; each block of the grid
has an equal share of it, whatever the lengths, which are read when the kernel runs.

A share is worked on from its end to its beginning, one *segment* for each (sequence, head). A
segment without the last keys of its sequence goes to global memory, at most one of a share and the
first that is done. The share with the last keys adds up the segments, in the order of the blocks;
it waits for blocks with lower numbers alone, which have started before it."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, Ring, WarpSpecialized, swizzled, warp_specialized
from .attention import _check as _check_operands

_F32 = np.float32
_MASKED = _F32(-3.0e38)  # a score that is not there; stays finite in arithmetic
_KEYS = 64  # of a block
_MERGE_REGISTERS = 96  # of a lane, for segments that are loaded together


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


class _Plan:
    consumers, registers = 1, None
    axes: dict[str, int] = {}

    def __init__(self, x, programs):
        self.x, self.clusters = x, programs
        self.rows = x.queries * (x.heads // x.kv_heads)  # of queries with one key head
        self.columns = pl.cdiv(self.rows, 8) * 8
        # segments that are loaded together, by the registers that a lane has
        self.together = max(1, _MERGE_REGISTERS * 128 // (x.dim * self.columns))
        slot = 2 * _KEYS * x.dim * 2
        fixed = self.columns * (x.dim + _KEYS) * 2 + 4096
        # half of the memory: with more in flight, 1 x 32768 keys took 45.1 us instead of 40.5
        self.stages = min(max((SMEM_BYTES // 2 - fixed) // slot, 2), 8)

    def scratch(self):
        x = self.x
        tile = plgpu.SMEM((self.stages, _KEYS, x.dim), x.dtype, transforms=swizzled(64, x.dtype))
        found = {"k_smem": tile, "v_smem": tile}
        found["q_smem"] = plgpu.SMEM(
            (self.columns, x.dim), x.dtype, transforms=swizzled(64, x.dtype)
        )
        found["p_smem"] = plgpu.SMEM(
            (self.columns, _KEYS), x.dtype, transforms=swizzled(64, x.dtype)
        )
        for prefix in ("k_", "v_"):
            found |= Ring.barriers(self.stages, 1, 1, prefix=prefix)
        return found


class _Block(WarpSpecialized):
    reads_only = False

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x = plan.x
        self.me = lax.axis_index("cluster")
        self.keys = Ring(plan.stages, self.k_full, self.k_empty)
        self.values = Ring(plan.stages, self.v_full, self.v_empty)

    # ---- division of the work

    def share(self):
        """Blocks of keys before each sequence's end (all heads), and this block's first and last
        unit."""
        x = self.x
        if x.lengths:
            n = jnp.clip(self.lengths[...], 0, x.keys)
        else:
            n = jnp.full((x.batch,), x.keys, jnp.int32)
        # an empty sequence has one unit, all masked
        blocks = jnp.maximum((n + (_KEYS - 1)) // _KEYS, 1)
        self.ends = jnp.cumsum(blocks) * x.kv_heads
        self.total = jnp.sum(blocks) * x.kv_heads
        return self.start(self.me), self.start(self.me + 1)

    def start(self, block):
        """The first unit of a block, without products that overflow."""
        each, rest = self.total // self.plan.clusters, self.total % self.plan.clusters
        return block * each + jnp.minimum(block, rest)

    def owner(self, unit):
        """The block that has a unit."""
        each, rest = self.total // self.plan.clusters, self.total % self.plan.clusters
        wide = rest * (each + 1)
        later = rest + (unit - wide) // jnp.maximum(each, 1)
        return lax.select(unit < wide, unit // (each + 1), later)

    def segment(self, begin, end):
        """The last segment of the units from begin to end: sequence, head, first unit of that
        head, its blocks, the length, first and last block of the segment."""
        x = self.x
        b = jnp.sum((self.ends < end).astype(jnp.int32))
        length = jnp.clip(self.lengths[b], 0, x.keys) if x.lengths else jnp.int32(x.keys)
        blocks = jnp.maximum((length + (_KEYS - 1)) // _KEYS, 1)
        stop = jnp.max(jnp.where(self.ends < end, self.ends, 0))  # where the sequence begins
        head = (end - 1 - stop) // blocks
        first = stop + head * blocks
        return b, head, first, blocks, length, jnp.maximum(begin - first, 0), end - first

    def segments(self, work, carry):
        """carry = work(segment, carry) for each segment, from the last on."""
        begin, end = self.share()

        def step(state):
            end, carry = state
            found = self.segment(begin, end)
            return found[2] + found[5], work(found, carry)

        return lax.while_loop(lambda state: state[0] > begin, step, (end, carry))[1]

    # ---- producer

    def producer(self):
        steps = self.segments(self.fetch, jnp.int32(0))
        self.keys.drain(steps)
        self.values.drain(steps)

    def fetch(self, found, it0):
        b, head, _, _, _, low, high = found

        def one(j, it):
            at = (b, pl.ds((high - 1 - j) * _KEYS, _KEYS), head)
            rings = (self.keys, self.k, self.k_smem), (self.values, self.v, self.v_smem)
            for ring, source, slots in rings:
                ring.acquire(it)
                slot = ring.slot(it)
                plgpu.copy_gmem_to_smem(source.at[at], slots.at[slot], ring.full.at[slot])
            return it + 1

        return lax.fori_loop(0, high - low, one, it0)

    # ---- consumer

    def consumer(self, me):
        pl.run_scoped(self.attend, plgpu.ACC((self.x.dim, self.plan.columns)))

    def attend(self, acc):
        self.segments(lambda found, it: self.attend_segment(acc, found, it), jnp.int32(0))

    def load_queries(self, b, head):
        x, p = self.x, self.plan
        group = x.heads // x.kv_heads
        q = self.q.reshape((x.batch * x.queries, x.kv_heads, group, x.dim))
        row = jnp.minimum(lax.broadcasted_iota(jnp.int32, (p.columns,), 0), p.rows - 1)
        at = b * x.queries + row // group, head, row % group
        self.q_smem[...] = q[at]
        plgpu.commit_smem()

    def attend_segment(self, acc, found, it0):
        b, head, first, blocks, length, low, high = found
        n = self.plan.columns
        self.load_queries(b, head)
        acc[...] = jnp.zeros((self.x.dim, n), _F32)
        along = plgpu.Layout.WGMMA.reduce(0)
        m = plgpu.layout_cast(jnp.full((n,), _MASKED), along)
        sums = plgpu.layout_cast(jnp.zeros((n,), _F32), along)

        def one(j, state):
            return self.step(acc, (high - 1 - j) * _KEYS, length, *state)

        m, sums, it = lax.fori_loop(0, high - low, one, (m, sums, it0))
        value = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        ends = high == blocks

        @pl.when(~ends)
        def _():
            self.parts[self.me] = value
            self.stats[self.me, 0] = m
            self.stats[self.me, 1] = sums
            there = self.owner(first + blocks - 1)
            plgpu.semaphore_signal(self.done.at[there], memory_scope="gpu")

        @pl.when(ends)
        def _():
            self.merge(b, head, first, low, value, m, sums)

        return it

    def step(self, acc, key, length, m, sums, it):
        c = _F32(self.x.scale * math.log2(math.e))
        slot, n = self.keys.slot(it), self.plan.columns
        self.keys.wait(it)

        def scores(s_acc):
            plgpu.wgmma(s_acc, self.k_smem.at[slot], self.q_smem.T)
            return s_acc[...]

        s = pl.run_scoped(scores, plgpu.ACC((_KEYS, n)))
        self.keys.release(it)
        row = key + lax.broadcasted_iota(jnp.int32, (_KEYS, n), 0)
        s = jnp.where(row < length, s, _MASKED)
        new = jnp.maximum(m, jnp.max(s, axis=0))
        base = jnp.where(new == _MASKED, _F32(0), new * c)
        alpha = jnp.exp2(m * c - base)
        e = jnp.exp2(s * c - lax.broadcast_in_dim(base, s.shape, [1]))
        sums = sums * alpha + jnp.sum(e, axis=0)
        self.p_smem.T[...] = e.astype(self.x.dtype)
        self.values.wait(it)

        # what lies beyond the length may be NaN
        @pl.when(key + _KEYS > length)
        def _():
            v = self.v_smem.at[slot]
            there = key + lax.broadcasted_iota(jnp.int32, v.shape, 0) < length
            v[...] = jnp.where(there, v[...], np.zeros((), self.x.dtype))

        plgpu.commit_smem()
        acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, [1])
        plgpu.wgmma(acc, self.v_smem.at[slot].T, self.p_smem.T)
        plgpu.wgmma_wait(0)
        self.values.release(it)
        return new, sums, it + 1

    def merge(self, b, head, first, low, value, m, sums):
        """Adds the segments of blocks with lower numbers, then stores the result."""
        start = self.owner(first)
        others = lax.select(low > 0, self.me - start, 0)
        plgpu.semaphore_wait(self.done.at[self.me], others, memory_scope="gpu")
        c = _F32(self.x.scale * math.log2(math.e))
        along = plgpu.Layout.WGMMA.reduce(0)

        def load(part, there):
            part = jnp.maximum(part, self.me - others)
            m = plgpu.load(self.stats.at[part, 0], layout=along)
            sums = plgpu.load(self.stats.at[part, 1], layout=along)
            value = plgpu.load(self.parts.at[part], layout=plgpu.Layout.WGMMA)
            return value, jnp.where(there, m, _MASKED), jnp.where(there, sums, _F32(0))

        def add(j, state):
            first = j * together
            # all loads before the arithmetic, so that the memory's latency comes once
            parts = [load(self.me - 1 - (first + i), first + i < others) for i in range(together)]
            parts.append(state)
            new = functools.reduce(jnp.maximum, [m for _, m, _ in parts])
            base = jnp.where(new == _MASKED, _F32(0), new * c)
            value, sums = _F32(0), _F32(0)
            for theirs, m, s in parts:
                factor = jnp.exp2(m * c - base)
                value = value + theirs * lax.broadcast_in_dim(factor, theirs.shape, [1])
                sums = sums + s * factor
            return value, new, sums

        together = self.plan.together
        trips = (others + (together - 1)) // together
        value, m, sums = lax.fori_loop(0, trips, add, (value, m, sums))
        self.store(b, head, value, m * c, sums)

    def store(self, b, head, value, m, sums):
        x, p = self.x, self.plan
        group = x.heads // x.kv_heads
        factor = jnp.where(sums == 0, _F32(0), 1 / sums)
        value = (value * lax.broadcast_in_dim(factor, value.shape, [1])).astype(x.dtype)
        row = lax.broadcasted_iota(jnp.int32, (p.columns,), 0)
        keep = row < p.rows
        at = b * x.queries + row // group, head, row % group
        o = self.o.reshape((x.batch * x.queries, x.kv_heads, group, x.dim))
        mask = lax.broadcast_in_dim(keep, (p.columns, x.dim), [0])
        pl.store(o, at, value.T, mask=mask)
        if x.return_lse:
            lse = (jnp.where(m <= _MASKED, _F32(0), m) + jnp.log2(sums)) * _F32(math.log(2))
            at = b, head * group + row % group, row // group
            pl.store(self.lse, at, lse, mask=keep)


@cached
def _kernel(x, programs, interpret):
    plan = _Plan(x, programs)

    def body(q, k, v, *others, **scratch):
        names = ["lengths"] * x.lengths + ["o"] + ["lse"] * x.return_lse + ["parts", "stats"]
        refs = dict(q=q, k=k, v=v) | dict(zip(names, others, strict=True))
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((programs,)))
        _Block(plan, refs | scratch | {"done": done}).run()

    outs = [plgpu.ShapeDtypeStruct((x.batch, x.queries, x.heads, x.dim), x.dtype)]
    if x.return_lse:
        outs.append(plgpu.ShapeDtypeStruct((x.batch, x.heads, x.queries), _F32))
    outs.append(plgpu.ShapeDtypeStruct((programs, x.dim, plan.columns), _F32))
    outs.append(plgpu.ShapeDtypeStruct((programs, 2, plan.columns), _F32))
    return warp_specialized(
        body, plan, tuple(outs), interpret=interpret, kernel_name="attention_decode"
    )


class _Decode:
    """The kernel without what it keeps in global memory for itself."""

    def __init__(self, x, programs, interpret):
        self.kernel, self.return_lse = _kernel(x, programs, interpret), x.return_lse

    def __call__(self, *operands, out=None, stream=None):
        if out is not None:
            raise NotImplementedError(
                "attention_decode: out= is not taken yet; copy the result into it"
            )
        found = self.kernel(*operands, stream=stream)
        return (found[0], found[1]) if self.return_lse else found[0]


def _check(q, k, v, kv_lengths):
    _check_operands(q, k, v, "attention_decode")
    group = q.shape[2] // k.shape[2]
    if q.shape[3] not in (64, 128) or q.shape[1] * group > 64:
        raise NotImplementedError(
            "attention_decode: head_dim must be 64 or 128, and up to 64 queries share a key head"
            f" (queries * heads / kv_heads); got q {q.shape}, k {k.shape}; use ops.attention"
        )
    if kv_lengths is not None and (
        kv_lengths.shape != (q.shape[0],) or kv_lengths.dtype != np.int32
    ):
        raise ValueError(
            f"attention_decode: kv_lengths must be int32 of shape ({q.shape[0]},), got"
            f" {kv_lengths.dtype} of shape {kv_lengths.shape}"
        )
    if _core.target(q.device)["name"] != "sm_90a":
        raise NotImplementedError(
            f"attention_decode: needs wgmma, which {_core.target(q.device)['name']} lacks; use"
            " ops.attention"
        )


@plgpu.specialize(in_place=False)
def attention_decode(q, k, v, *, kv_lengths=None, scale=None, return_lse=False, interpret=None):
    """``softmax(scale * q @ k.T) @ v`` of few queries with a long cache, divided over the keys.

    q: [batch, queries, heads, head_dim]; k, v: [batch, capacity, kv_heads, head_dim]; float16 or
    bfloat16, row-major; head_dim 64 or 128; up to 64 queries for each key head (queries * heads /
    kv_heads). Every query sees all keys. kv_lengths: int32 [batch], the keys that each sequence has
    (clipped to the capacity), read when the kernel runs: no length compiles a program, and a CUDA
    graph that is replayed uses the lengths of that moment. What the cache holds beyond them may be
    anything. scale: of the scores, ``head_dim ** -0.5`` by default. return_lse: also return the
    natural logarithm of the sum of exponentials of the scores, float32 [batch, heads, queries]. A
    sequence without keys has the result 0 and the logarithm -inf.

    A call repeats bit for bit; the bits of a sequence depend on the lengths of all. Hopper
    (sm_90a). Returns [batch, queries, heads, head_dim] of the caller's kind of array, or (that,
    lse). TypeError, ValueError for other dtypes and shapes, NotImplementedError for other head_dims
    and more queries.
    """
    _check(q, k, v, kv_lengths)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    shape = (*q.shape, k.shape[1], k.shape[2])
    x = _Problem(*shape, q.dtype, scale, bool(return_lse), kv_lengths is not None)
    units = x.batch * x.kv_heads * pl.cdiv(x.keys, _KEYS)
    return _Decode(x, min(plgpu.sm_count(q.device), units), interpret)
