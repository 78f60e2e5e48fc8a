"""Attention (forward) on Blackwell's tensor cores: scores, probabilities and O in tensor memory.

A block has two tiles of 128 queries of a head. Each has a *softmax* thread; one *correction* thread
changes the sums O of both. Their scores and sums share 512 columns of tensor memory, so head_dims
above 128 have blocks of 64 keys instead of 128, and those above 192 a single tile of queries. In
memory on the chip rows are padded with zeros to a multiple of 16 elements. Of a fourth
thread one warp, the *multiplier*, issues all products, and one, the *producer*, fetches Q, and K
and V in separate rings.

For each block of keys and each tile the multiplier computes S = Q K; the softmax thread loads it, a
row a lane, tells the correction what earlier sums are multiplied with, and stores the probabilities
P over S. When P is stored and O corrected, the multiplier adds P V to O and goes on with the next
S. So the softmax of one tile runs under the products of the other. A commit after S covers the P V
before it: whoever knows that S is there may also change O.

Row maxima are stale on purpose: O is rescaled only when a maximum grew by more than 2^8, which
float16 probabilities still hold.

An SM computes 16 exponentials in a clock cycle (sm_103a: 32), 128 x 128 in 1024 cycles, as long as
the products of a tile with a head_dim of 128 take. So a share of the exponentials are polynomials:
2^x = 2^i 2^f with an integer i, which is added to the exponent of a polynomial in f.

In the end O leaves through the shared memory of the queries."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import Ranges, Tile
from ._attention_softmax import MASKED, scaled
from ._common import IssuedByWarps, Ring, overlap_launches, warp_specialized
from ._tensor_memory import SMEM_BYTES

_F32 = np.float32
_LAZY = _F32(8.0)  # log2 of what a maximum may grow by before O is rescaled
_ROWS = 128  # of a tile
MOST = 256  # the largest head_dim; all are multiples of 8, the elements of 16 bytes
MULTIPLE = 2 * _ROWS  # rows of the most that a block has
_PART = 16  # columns that are worked on at a time
_REGISTERS = 184, 72  # of a lane: of a softmax thread, of the others. With others ptxas spills
_POLYNOMIALS = {"sm_103a": 0}  # of 32 exponentials, how many are polynomials; elsewhere:
_POLYNOMIAL = 8
_ROUND = _F32(1.5 * 2**23)  # added to a number, its last bits are the nearest integer
# 2^f for -1/2 <= f <= 1/2, from the constant on; the largest relative errors are 7.5e-5, 2.6e-6
_COEFFICIENTS = {
    "bfloat16": (0.999928073, 0.693260986, 0.242611133, 0.0551716688),
    "float16": (0.999999261, 0.693121815, 0.240247448, 0.0559178618, 0.00957010188),
}


class TensorMemoryAttentionConfig(NamedTuple):
    """How attention on Blackwell is tiled. ``stages``: slots of the rings of K and V, of 128 keys
    each (64 above head_dim 128); 0: as many as fit, at most 4. ``polynomials``: of 32
    exponentials, how many are computed by polynomials, a multiple of 8; None: 8, on sm_103a
    none."""

    stages: int = 0
    polynomials: int | None = None


class _Plan:
    """What follows from a problem and a configuration."""

    def __init__(self, x, cfg):
        self.x, self.axes = x, {}
        self.width = pl.cdiv(x.dim, 16) * 16  # elements of a row on the chip
        self.columns = slice(None) if self.width == x.dim else pl.ds(0, self.width)
        self.tiles, self.block = 1 + (x.dim <= 192), 128 if x.dim <= 128 else 64
        self.consumers = self.tiles + 1  # threads besides the producer
        self.rows = _ROWS * self.tiles
        self.q_tiles, self.key_blocks = pl.cdiv(x.queries, self.rows), pl.cdiv(x.keys, self.block)
        self.clusters = x.batch * x.heads * self.q_tiles
        fit = (SMEM_BYTES // (2 * self.width) - self.rows) // (2 * self.block)
        self.stages = min(cfg.stages or 4, fit, max(self.key_blocks, 1))
        self.polynomials = cfg.polynomials
        self.c = x.scores.factor(x.scale)  # exp(x) is exp2(x log2 e)

    def scratch(self):
        x, tiles = self.x, self.tiles

        def ring(prefix):
            return {
                f"{prefix}_smem": plgpu.SMEM((self.stages, self.block, self.width), x.dtype),
                f"{prefix}_full": plgpu.Barrier(num_barriers=self.stages),
                f"{prefix}_empty": plgpu.Barrier(num_barriers=self.stages, orders_tensor_core=True),
            }

        each = {"num_barriers": tiles, "orders_tensor_core": True}
        # P of a tile takes half of the columns of its S, and lies over them
        scores = plgpu.TMEM((tiles, _ROWS, self.block), jnp.float32)
        probabilities = plgpu.TMEM((tiles, _ROWS, 2 * self.block), x.dtype, packed=True)
        return {
            "q_smem": plgpu.SMEM((tiles, _ROWS, self.width), x.dtype),
            "q_full": plgpu.Barrier(num_arrivals=tiles),
            "sp": plgpu.RefUnion([scores], [probabilities]),
            "out": plgpu.TMEM((tiles, _ROWS, self.width), jnp.float32),
            "s_ready": plgpu.Barrier(**each),
            "p_ready": plgpu.Barrier(num_arrivals=2, **each),  # P is stored, O corrected
            "factors": plgpu.SMEM((tiles, _ROWS), _F32),  # what O is multiplied with
            "factors_ready": plgpu.Barrier(**each),  # and P V of the block before is added
            "factors_read": plgpu.Barrier(num_barriers=tiles),
            "out_ready": plgpu.Barrier(**each),
            **ring("k"),
            **ring("v"),
        }


class _Block(IssuedByWarps):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x = plan.x
        (self.scores,), (self.probabilities,) = self.sp
        self.k_ring = Ring(plan.stages, self.k_full, self.k_empty)
        self.v_ring = Ring(plan.stages, self.v_full, self.v_empty)

    def locate(self):
        """Otherwise it would be kept beside the scores."""
        x, plan, t = self.x, self.plan, lax.axis_index("cluster")
        tile, self.head = lax.div(t, x.batch * x.heads), lax.rem(t, x.heads)
        self.batch = lax.rem(lax.div(t, x.heads), x.batch)
        if x.causal:  # the longest first
            tile = plan.q_tiles - 1 - tile
        self.row = tile * plan.rows

    def run(self):
        me = lax.axis_index("wg")

        @pl.when(me < self.plan.tiles)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self.locate()
            self.attend(me)

        @pl.when(me == self.plan.tiles)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self.locate()
            self.correct()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me > self.plan.tiles)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self.issue()

    def blocks(self):
        """Key blocks that the queries of this block see."""
        p = self.plan
        if not self.x.causal:
            return jnp.int32(p.key_blocks)
        return jnp.minimum((self.row + (p.rows + p.block - 1)) // p.block, p.key_blocks)

    def column(self, j):
        """The first key of block j."""
        column = j * self.plan.block
        return column

    # ---- producer

    def producer(self):
        x, n = self.x, self.blocks()
        for i in range(self.plan.tiles):
            rows = pl.ds(self.row + i * _ROWS, _ROWS)
            at = self.batch, rows, self.head, self.plan.columns
            plgpu.copy_gmem_to_smem(self.q.at[at], self.q_smem.at[i], self.q_full)
        kv_head = self.head // (x.heads // x.kv_heads)

        def fetch(j, _):
            rows = pl.ds(self.column(j), self.plan.block)
            for ring, ref, smem in (
                (self.k_ring, self.k, self.k_smem),
                (self.v_ring, self.v, self.v_smem),
            ):
                ring.acquire(j)
                slot = ring.slot(j)
                at = self.batch, rows, kv_head, self.plan.columns
                plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], ring.full.at[slot])

        lax.fori_loop(0, n, fetch, None)
        self.k_ring.drain(n)
        self.v_ring.drain(n)

    # ---- multiplier

    def multiply(self):
        n = self.blocks()
        plgpu.barrier_wait(self.q_full)
        self.k_ring.wait(jnp.int32(0))
        for i in range(self.plan.tiles):
            self.score(i, jnp.int32(0))
        self.release(self.k_ring, jnp.int32(0))

        def step(j, _):
            more = j + 1 < n
            self.v_ring.wait(j)
            for i in range(self.plan.tiles):
                plgpu.barrier_wait(self.p_ready.at[i], phase=j)
                plgpu.tcgen05_mma(
                    self.out.at[i],
                    self.probabilities.at[i, :, : self.plan.block],
                    self.v_smem.at[self.v_ring.slot(j)],
                    accumulate=j > 0,
                )

                @pl.when(more)
                def _(i=i):
                    if i == 0:
                        self.k_ring.wait(j + 1)
                    self.score(i, j + 1)

                pl.when(j == n - 1)(lambda i=i: plgpu.tcgen05_commit_arrive(self.out_ready.at[i]))
            self.release(self.v_ring, j)
            pl.when(more)(lambda: self.release(self.k_ring, j + 1))

        lax.fori_loop(0, n, step, None)

    def score(self, i, j):
        k = self.k_smem.at[self.k_ring.slot(j)].T
        plgpu.tcgen05_mma(
            self.scores.at[i], self.q_smem.at[i], k, self.s_ready.at[i], accumulate=False
        )

    def release(self, ring, j):
        plgpu.tcgen05_commit_arrive(ring.empty.at[ring.slot(j)])

    # ---- softmax

    def attend(self, me):
        n = self.blocks()
        native = plgpu.Layout.TCGEN05_TMEM_NATIVE
        row = self.row + me * _ROWS

        def column(x):
            return plgpu.layout_cast(jnp.full((_ROWS,), x), native.reduce(1))

        def step(masks, j, carry):
            m, sums = carry
            plgpu.barrier_wait(self.s_ready.at[me], phase=j)
            s = plgpu.async_load_tmem(self.scores.at[me], layout=native)
            plgpu.wait_load_tmem()
            s = self.adjust(s, row, j)
            if masks:
                s = self.masked(s, row, j)
            new = jnp.maximum(m, jnp.max(s, axis=1))
            grown = (new - m) * self.plan.c > _LAZY
            new = jnp.where(grown, new, m)
            base = scaled(new, self.plan.c)
            alpha = jnp.exp2(m * self.plan.c - base)
            self.announce(me, j, alpha)
            sums = sums * alpha
            for c in range(0, self.plan.block, _PART):  # few registers at a time
                p = self.exponentials(s[:, c : c + _PART], base)
                sums = sums + jnp.sum(p, axis=1)
                part = self.probabilities.at[me, :, c : c + _PART]
                plgpu.async_store_tmem(part, self.drop(p, row, j, c).astype(self.x.dtype))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(self.p_ready.at[me])
            return new, sums

        # a loop of its own for blocks without a mask: a branch would copy all scores
        start, carry = 0, (column(MASKED), column(_F32(0)))
        for masks, end in self.runs(row, n):
            carry = lax.fori_loop(start, end, functools.partial(step, masks), carry)
            start = end
        m, sums = carry
        sums = self.total(m, sums)
        self.announce(me, n, self.reciprocal(sums))
        plgpu.barrier_wait(self.factors_read.at[me], phase=n)
        if self.x.return_lse:
            base = scaled(m, self.plan.c)
            lse = (base + jnp.log2(sums)) * _F32(math.log(2))
            at = jnp.arange(_ROWS) + row
            pl.store(self.lse.at[self.batch, self.head], (at,), lse, mask=at < self.x.queries)

    def announce(self, me, j, factors):
        """What the correction multiplies O with."""
        pl.when(j > 0)(lambda: plgpu.barrier_wait(self.factors_read.at[me], phase=j - 1))
        self.factors[me] = factors
        plgpu.barrier_arrive(self.factors_ready.at[me])

    def exponentials(self, s, base):
        """Powers of two of scaled scores, some by polynomials."""
        x = s * self.plan.c - _along_rows(base, _PART)
        n = self.plan.polynomials * _PART // 32
        if not n:
            return jnp.exp2(x)
        parts = [self.polynomial(x[:, :n])] + ([jnp.exp2(x[:, n:])] if n < _PART else [])
        return jnp.concatenate(parts, axis=1)

    def polynomial(self, x):
        x = jnp.maximum(x, _F32(-126))  # so that exponents do not become negative
        rounded = x + _ROUND
        f = x - (rounded - _ROUND)
        *rest, value = _COEFFICIENTS[self.x.dtype.name]
        value = _F32(value)
        for c in reversed(rest):
            value = value * f + _F32(c)
        i = lax.bitcast_convert_type(rounded, jnp.int32) << 23
        return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) + i, jnp.float32)

    def runs(self, row, n):
        """Do the next blocks of a tile need a mask, and where they end, in order."""
        x, p = self.x, self.plan
        whole = jnp.int32(x.keys // p.block)
        whole = jnp.minimum((row + 1) // p.block, whole) if x.causal else whole
        return (False, whole), (True, n)

    def adjust(self, s, row, j):
        """Scores before the mask; plain ones stay."""
        return s

    def drop(self, p, row, j, c):
        """Probabilities that values are multiplied with, of the columns of block j from c on."""
        return p

    def total(self, m, sums):
        return sums

    def reciprocal(self, sums):
        return pl.reciprocal(sums, approx=True)

    def masked(self, s, row, j):
        """The scores, MASKED for keys that there are not or that come later than the query."""
        col = lax.broadcasted_iota(np.int32, s.shape, 1) + j * self.plan.block
        keep = col < self.x.keys
        if self.x.causal:
            keep &= col <= lax.broadcasted_iota(np.int32, s.shape, 0) + row
        return jnp.where(keep, s, MASKED)

    # ---- correction

    def correct(self):
        n, native = self.blocks(), plgpu.Layout.TCGEN05_TMEM_NATIVE

        def factors(i, j):
            plgpu.barrier_wait(self.factors_ready.at[i], phase=j)
            found = plgpu.load(self.factors.at[i], layout=native.reduce(1))
            plgpu.barrier_arrive(self.factors_read.at[i])
            return found

        def step(j, _):
            for i in range(self.plan.tiles):
                alpha = factors(i, j)
                grown = (j > 0) & jnp.any(alpha != _F32(1))
                pl.when(grown)(lambda i=i, alpha=alpha: self.rescale(i, alpha, native))
                plgpu.barrier_arrive(self.p_ready.at[i])

        lax.fori_loop(0, n, step, None)
        for i in range(self.plan.tiles):
            by = factors(i, n)
            plgpu.barrier_wait(self.out_ready.at[i])
            self.finish(i, by, native)

    def rescale(self, i, alpha, layout):
        for c in range(0, self.plan.width, _PART):
            part = self.out.at[i, :, c : c + _PART]
            value = plgpu.async_load_tmem(part, layout=layout)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(part, value * _along_rows(alpha, _PART))
        plgpu.commit_tmem()

    def finish(self, i, factor, layout):
        for c in range(0, self.plan.width, _PART):
            value = plgpu.async_load_tmem(self.out.at[i, :, c : c + _PART], layout=layout)
            value = value * _along_rows(factor, _PART)
            self.q_smem[i, :, c : c + _PART] = value.astype(self.x.dtype)
        plgpu.commit_smem()
        rows = pl.ds(self.row + i * _ROWS, _ROWS)
        there = self.o.at[self.batch, rows, self.head, self.plan.columns]
        plgpu.copy_smem_to_gmem(self.q_smem.at[i], there)


def _along_rows(x, width):
    return lax.broadcast_in_dim(x, (_ROWS, width), [0])


def chosen(config, target):
    """The config with a number of polynomials, for a target by name."""
    if config.polynomials is not None:
        return config
    return config._replace(polynomials=_POLYNOMIALS.get(target, _POLYNOMIAL))


class _ScoredBlock(_Block):
    """One block of a kernel with options of the scores."""

    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.refs = refs
        arrays = refs.get("low"), refs.get("high")
        self.ranges = Ranges(plan.x, False, *arrays, layout=self.layout)

    def locate(self):
        super().locate()
        self.first, count = self.ranges.blocks(self.row, self.plan.rows, self.plan.block)
        self.count = jnp.maximum(count, 1)

    def blocks(self):
        return self.count

    def column(self, j):
        column = (self.first + j) * self.plan.block
        return column

    def runs(self, row, n):
        """Windows and sequences also begin within a block."""
        # with ends that it knows, NVRTC takes loops apart, for which there are no registers
        low, high, n = lax.optimization_barrier((*self.ranges.of_all(row, _ROWS), n))
        block, ranges = self.plan.block, self.ranges
        begin, masked = 0, ()
        if ranges.arrays or ranges.before is not None:
            begin = jnp.clip((low + (block - 1)) // block - self.first, 0, n)
            masked = ((True, begin),)
        if not ranges.arrays and ranges.after is None and self.x.keys % block == 0:
            return (*masked, (False, n))
        return *masked, (False, jnp.clip(high // block - self.first, begin, n)), (True, n)

    def tile(self, row, j, c):
        """A part of the scores, whose columns are few."""
        shape, column = (_ROWS, _PART), self.column(j) + c
        place = self.batch, self.head, row, column
        return Tile(self.x, self.refs, *place, shape, by_keys=False, layout=self.layout)

    def adjust(self, s, row, j):
        if not self.x.scores.adjusted:
            return s
        starts = range(0, self.plan.block, _PART)
        parts = [self.tile(row, j, c).adjust(s[:, c : c + _PART])[0] for c in starts]
        return jnp.concatenate(parts, axis=1)

    def drop(self, p, row, j, c):
        return self.tile(row, j, c).drop(p)

    def masked(self, s, row, j):
        if self.ranges.arrays:  # addresses from here on: there are no registers that keep them
            row = lax.optimization_barrier(row)
        return jnp.where(self.ranges.keep(row, self.column(j), s.shape), s, MASKED)

    def total(self, m, sums):
        """0 for rows that see nothing."""
        return jnp.where(m == MASKED, _F32(0), sums)

    def reciprocal(self, sums):
        return jnp.where(sums == 0, _F32(0), super().reciprocal(sums))


@cached
def kernel(x, cfg, interpret):
    """x: a Problem."""
    plan = _Plan(x, cfg)

    def plain(refs):
        overlap_launches()
        return _Block(plan, refs)

    def scored(refs):
        overlap_launches()
        return _ScoredBlock(plan, refs)

    body = x.body(plain, scored)
    options = {"compiler_params": plgpu.CompilerParams(approx_math=True), "interpret": interpret}
    return warp_specialized(body, plan, x.results, kernel_name="attention", **options)


def check(config):
    """ValueError for what there is no kernel for."""
    if config.stages < 0 or config.polynomials not in (None, *range(0, 33, 8)):
        raise ValueError(
            "attention: stages are 0 or more and polynomials None, 0, 8, 16, 24 or 32, got"
            f" {config}"
        )
