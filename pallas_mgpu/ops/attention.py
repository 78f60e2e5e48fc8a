"""Attention (forward) on Hopper's tensor cores: softmax(scale Q K^T) V, scores in registers only.

Persistent blocks, one per SM. Each consumer owns 64 rows of queries; the producer loads. K and V
have separate rings, because K of the next block is needed before V of this one. For each block of
keys, a consumer issues S = Q K^T, then O += P V of the previous block, waits for S alone, and
computes its softmax while the product for O is in flight. Consumers issue in turn, so that the
softmax of one overlaps the products of the other, whatever the instruction order.

One loop runs the steps of all tiles: the first S of a tile is issued with the last P V of the
previous tile, whose result is then stored. Each product therefore occurs once in the kernel, which
compiles in four fifths of the time. The loop starts with a P V and ends with an S whose results are
discarded. What happens once per tile is in one branch, which most steps skip.

Row maxima are stale on purpose: O is rescaled only if a maximum grows by more than 2^8, a factor
that float16 probabilities can still represent. Most kernels do not even look for maxima after the
first block of a tile, unless sums of probabilities tell that one may have grown by more
(_attention_softmax.py). Row sums are kept per column modulo 8 and added up at the end.

Blocks of keys are processed from the last to the first, so that those with a causal mask come
first. Causal tiles have different lengths: a counter assigns them, longest first, in groups of
heads whose K and V fit in the L2 cache.
"""

import functools
import math
import types
import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import (
    _attention_open,
    _attention_parts,
    _attention_rotary,
    _attention_scores,
    _attention_softmax,
    _attention_tensor_memory,
    _attention_transposed,
    _attention_warp_mma,
    _tensor_memory,
    _warp_mma,
)
from ._attention_cache import DTYPES, Cache, is_narrow
from ._attention_choice import AttentionConfig, choose_for
from ._attention_narrow import Narrow, NarrowPlan
from ._attention_parts import SharedTiles
from ._attention_scores import PLAIN, Problem, Ranges, Tile, rows_in, scalar
from ._attention_softmax import MASKED, scaled
from ._attention_tensor_memory import TensorMemoryAttentionConfig
from ._attention_transposed import Transposed, TransposedFirst, TransposedPlan
from ._attention_warp_mma import MmaAttentionConfig
from ._attention_widened import Widened, pays
from ._common import (
    SMEM_BYTES,
    CountedTiles,
    Ring,
    SeveralKernels,
    StaticTiles,
    WarpSpecialized,
    buffer,
    check_fields,
    overlap_launches,
    padded,
    store,
    store_some,
    warp_specialized,
)
from ._open_rows import better, in_shapes, is_static, sizes_of, together
from .block_mask import (
    Mask,
    OfArrays,
    at_entry,
    check_function,
    shape_of,
)

_F32 = np.float32
_LAZY = _F32(8.0)  # log2 of what a maximum may grow by before O is rescaled
_L2_BYTES = 32 << 20
_WIDTHS = (64, 96, 128, 192, 256)
_PAGES = 2  # numbers of pages that are loaded together
_OUT = 128  # columns of O that leave at a time, at most


def _width(dim):
    """Elements of a row on the chip: the least width of the kernels."""
    return next(n for n in _WIDTHS if dim <= n)


class _Plan:
    """What follows from a problem and a configuration."""

    def __init__(self, x, cfg, cores, parts=1, shares=None):
        self.x, self.cfg, self.consumers, self.axes = x, cfg, cfg.consumers, {}
        # of the keys of a tile, whose results are merged later; shares: they are unequal
        self.parts, self.shares = parts, shares
        self.rows, self.block, self.stages = cfg.consumers * 64, cfg.block, cfg.stages
        self.q_tiles, self.key_blocks = pl.cdiv(x.queries, self.rows), pl.cdiv(x.keys, self.block)
        self.all_heads = x.batch * x.heads * parts
        self.total = self.all_heads * self.q_tiles
        self.clusters = cfg.programs or cores
        # tiles have different lengths, the last ones mostly the longest
        self.uneven = uneven = x.causal or bool(x.scores.mask)
        self.group = 1  # heads that are worked on together; 0: known when the kernel runs
        if x.is_open:
            self.group, self.ragged, self.counted = int(not uneven), True, uneven
        else:
            self.clusters = min(self.total, self.clusters)
            if uneven:
                self.group = min(max(_L2_BYTES // (x.keys * x.dim * 4), 1), self.all_heads)
            self.ragged = x.keys % self.block != 0
            self.counted = uneven and self.total > self.clusters
        if shares:
            self.all_heads = x.batch * x.heads
            self.total, self.clusters = shares.places * shares.pieces, shares.places
        self.c = x.scores.factor(x.scale)  # exp(x) is exp2(x log2 e)
        self.left = plgpu.Layout.WGMMA  # of a left operand
        self.most = _F32(2.0**15 if x.dtype == np.float16 else 2.0**32)
        self.lazy, self.raised = _LAZY, 0  # log2 of what all probabilities are multiplied with
        # Rows that are computed again need no selection, which takes time to compile. Those of 96,
        # and causal ones of 128, are 1 or 2 % slower without; 8 bits were not timed.
        width = _width(x.dim)
        kept = x.dtype.itemsize == 1 or width == 96 or width == 128 and uneven
        self.selects = kept or not cfg.trusting
        # The next queries are fetched while these are in use, where there is room.
        self.dim, self.value_dim = _width(x.dim), _width(x.value_dim)  # of rows on the chip
        self.out, self.width = math.gcd(self.value_dim, _OUT), self.value_dim  # of an accumulator
        used = self.stages * self.block * (self.dim + self.value_dim)
        used += 2 * self.rows * self.dim + self.rows * self.out
        self.q_slots = 2 if not cfg.q_registers and 2 * used + 2048 <= SMEM_BYTES else 1
        self.q_ahead = cfg.q_registers or self.q_slots > 1
        self.piece = math.gcd(x.page, self.block) if x.page else self.block  # keys of a copy
        self.copies, self.readers = self.block // self.piece, self.consumers  # of tile numbers
        # one consumer and the producer have 256 registers a lane as it is
        # three threads have 504 together; addresses of pages and of a bias need more
        two = (40, 232) if x.page or x.scores.bias else (24, 240)
        self.registers = {2: two, 3: (32, 160)}.get(self.consumers)
        self.fit()

    def fit(self):
        """Changes what other dtypes need."""

    @property
    def cleans(self):
        """Must values beyond the last key of a tile be made 0, which would not be 0 times a
        probability of 0?"""
        ends = self.x.lengths[0] or self.x.scores.sequences or self.x.whole
        return bool(ends) and not self.x.is_narrow

    def scratch(self):
        x, consumers = self.x, self.consumers
        found = {
            "q_smem": buffer(self.q_slots, consumers, 64, self.dim, dtype=x.dtype),
            "k_smem": buffer(self.stages, self.block, self.dim, dtype=x.dtype),
            "v_smem": buffer(self.stages, self.block, self.value_dim, dtype=x.dtype),
            "o_smem": buffer(consumers, 64, self.out, dtype=x.out_dtype),
        }
        if x.return_lse:
            found["lse_smem"] = plgpu.SMEM((consumers, 64), _F32)
        found |= Ring.barriers(self.q_slots, consumers, consumers, prefix="q_")
        found |= Ring.barriers(self.stages, self.copies, consumers, prefix="k_")
        found |= Ring.barriers(self.stages, self.copies, consumers, prefix="v_")
        return found | (CountedTiles.scratch(self.readers) if self.counted else {})


class _NarrowPlan(NarrowPlan, _Plan):
    pass


class _TransposedPlan(TransposedPlan, _Plan):
    pass


class _State(typing.NamedTuple):
    """What a consumer's loop over key blocks carries: traced values."""

    w: typing.Any  # tiles so far
    t: typing.Any  # number of this tile
    row: typing.Any  # its first row of queries
    end: typing.Any  # the key after its next block, or a _Place
    c: typing.Any  # what its scores are multiplied with, where a plan does not know it
    ended: typing.Any  # for the first block of a tile the tile before (`total`: none), else -1
    tail: typing.Any  # rows of the values of the block before that are there, if not known
    it: typing.Any  # key blocks so far
    m: typing.Any  # maxima of the rows
    sums: typing.Any  # sums of the rows, per column modulo 8
    p: typing.Any  # probabilities of the block before
    q: typing.Any  # queries, where registers have them
    fetched: typing.Any = None  # what the scores of the next block are adjusted with


class _Place(typing.NamedTuple):
    """Where a consumer is in a tile whose rows see ranges of keys."""

    end: typing.Any  # the key after the next block
    first: typing.Any  # the first key of the tile
    low: typing.Any  # all rows of the consumer see the keys from here
    high: typing.Any  # to here
    column: typing.Any  # the first key of the next block
    b: typing.Any = None  # with open lengths, which make it slow to compute: the batch entry
    head: typing.Any = None  # and the head, if its scores need it


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    reads_only = False

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.cfg, self.refs = plan.x, plan.cfg, refs
        self.q_ring = Ring(plan.q_slots, self.q_full, self.q_empty)
        self.k_ring = Ring(plan.stages, self.k_full, self.k_empty)
        self.v_ring = Ring(plan.stages, self.v_full, self.v_empty)
        cluster = lax.axis_index("cluster")
        self.group = plan.group
        if not self.group:
            fits = scalar(_L2_BYTES // (plan.x.dim * 4) // plan.x.keys)
            self.group = jnp.clip(fits, 1, plan.all_heads)
        if plan.counted:
            counted = self.tile_numbers, self.tile_full, self.tile_empty, None
            self.tiles = CountedTiles(plan.total, plan.clusters, cluster, counted)
        elif plan.shares:
            self.tiles = SharedTiles(plan.shares, cluster)
        else:
            self.tiles = StaticTiles(plan.total, plan.clusters, cluster)

    def tile_of(self, t):
        """Tile of queries, part of the keys, head and batch of tile number t."""
        p, x = self.plan, self.x
        t = jnp.clip(t, 0, p.total - 1)  # there is one beyond
        if p.shares:
            tile, part = self.shared_tile(t)[:2]
            head, tile = tile // p.q_tiles, tile % p.q_tiles
            return tile, part, head % x.heads, head // x.heads
        group = self.group
        if x.is_open:
            tile, head = self.open_tile_of(t)
        else:
            band, inside = t // (group * p.q_tiles), t % (group * p.q_tiles)
            width = jnp.int32(group)
            if p.all_heads % group:
                width = jnp.maximum(jnp.minimum(p.all_heads - band * group, group), 1)
            tile, head = lax.div(inside, width), band * group + lax.rem(inside, width)
        if p.uneven:
            tile = jnp.maximum(p.q_tiles - 1 - tile, 0)  # longest first
        part, head = (head % p.parts, head // p.parts) if p.parts > 1 else (0, head)
        return tile, part, head % x.heads, head // x.heads

    def open_tile_of(self, t):
        """The same with divisors that are known when the kernel runs, by few divisions."""
        p, group = self.plan, self.group
        if p.group:
            head = jnp.clip(t // p.q_tiles, 0, p.all_heads - 1)
            return jnp.maximum(t - head * p.q_tiles, 0), head
        each = jnp.maximum(group * p.q_tiles, 1)  # not negative: fewer instructions
        band = lax.div(t, each)
        inside = jnp.maximum(t - band * each, 0)
        width = jnp.maximum(jnp.minimum(p.all_heads - band * group, group), 1)
        tile = lax.div(inside, width)
        return tile, jnp.clip(band * group + (inside - tile * width), 0, p.all_heads - 1)

    def shared_tile(self, t):
        """Where keys are divided into shares: the tile of number t, counted over all heads, its
        part, the first block of that and how many it has."""
        s = self.plan.shares
        place = t // s.pieces
        begin, end = s.start(place), s.start(place + 1)
        tile = jnp.minimum(begin // s.blocks + t % s.pieces, s.tiles - 1)
        first = jnp.maximum(begin - tile * s.blocks, 0)
        count = jnp.minimum(end - tile * s.blocks, s.blocks) - first
        return tile, jnp.maximum(place - s.shared_by(tile)[0], 0), first, count

    def keys_of(self, b):
        """The number of keys of a batch entry."""
        if not self.x.lengths[0]:
            return self.x.keys
        return jnp.clip(self.kv_lengths[b], 0, self.x.keys)

    def queries_of(self, b):
        if not self.x.lengths[1]:
            return self.x.queries
        return jnp.clip(self.q_lengths[b], 0, self.x.queries)

    def blocks_of(self, t, tile, part):
        """The first key block of a tile (of its part) and their number; 1 for the tile beyond."""
        p = self.plan
        count = scalar(p.key_blocks)
        if self.x.causal:
            count = jnp.minimum(((tile + 1) * p.rows + p.block - 1) // p.block, count)
        return 0, lax.select(t < p.total, count, jnp.int32(1))

    # ---- producer

    def producer(self):
        p, x, none = self.plan, self.x, jnp.int32(0)
        _, _, head, b = self.tile_of(self.tiles.first)
        start = none, none, (b, none, head // (x.heads // x.kv_heads))
        some = {"some": False} if p.counted and x.is_open else {}
        tiles, it, place = self.tiles.produce(self.fetch_tile, start, beyond=True, **some)
        if self.cfg.late:  # the last step waits for it, too
            self.fetch_keys(it, place)
        for s in range(p.q_slots):  # every release is waited for
            there = not x.is_open or tiles > s
            pl.when(there)(lambda s=s: self.q_ring.await_release(tiles - 1 - s))
        self.drain(it)

    def drain(self, it):
        """Waits for the last releases of keys and values, after so many steps."""
        stages = self.plan.stages
        for s in range(stages):

            @pl.when(it > s)
            def _(s=s):
                if not self.cfg.late or s < stages - 1:
                    self.k_ring.await_release(it - 1 - s)
                self.v_ring.await_release(it - 1 - s)

    def fetch_tile(self, t, carry):
        """carry: tiles and key blocks so far, the place of the last block: V comes a step after
        K."""
        p, x, ring, (tiles, it, place) = self.plan, self.x, self.q_ring, carry
        tile, part, head, b = self.tile_of(t)
        first, count = self.blocks_of(t, tile, part)
        kv_head = head // (x.heads // x.kv_heads)
        pl.when(tiles >= p.q_slots)(lambda: ring.await_release(tiles - p.q_slots))
        slot = tiles % p.q_slots
        for w in range(p.consumers):
            at = rows_in(self.x, b, tile * p.rows + w * 64, 64, x.queries)
            q = padded(self.q, (*at, head), p.dim)
            plgpu.copy_gmem_to_smem(q, self.q_smem.at[slot, w], ring.full.at[slot])

        def step(j, carry):
            it, before = carry
            place = b, self.key_of(b, head, tile, count - 1 - j + first) * p.block, kv_head
            self.ask(tile, head, place)
            self.fetch_keys(it, place)
            self.fetch_values(it, before)
            return it + 1, place

        it, place = lax.fori_loop(0, count, step, (it, place))
        return tiles + 1, it, place

    def ask(self, tile, head, place):
        """Asks for what consumers load themselves for a block of keys."""

    def key_of(self, b, head, tile, i):
        """The number of the block of keys that is number i of a tile."""
        return i

    def fetch_keys(self, it, place):
        self.fetch_block(self.k, self.k_smem, self.k_ring, it, place)

    def fetch_values(self, it, place):
        self.fetch_block(self.v, self.v_smem, self.v_ring, it, place)

    def fetch_block(self, source, slots, ring, it, place):
        pl.when(it >= ring.stages)(lambda: ring.await_release(it - ring.stages))
        slot = it % ring.stages

        def copy(first, size, at):
            here = slots.at[slot]
            here = here if size == self.plan.block else here.at[pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(padded(source, at, slots.shape[-1]), here, ring.full.at[slot])

        self.pieces(place, self.plan.piece, copy)

    def pieces(self, place, size, copy):
        """copy(first row, rows, index) for each piece of a block of keys in global memory."""
        x, (b, row, head) = self.x, place
        block = self.plan.block
        row = pl.multiple_of(row, block)
        if not x.page:
            for i in range(0, block, size):
                copy(i, size, (*rows_in(self.x, b, row + i, size, x.keys), head))
            return
        last = jnp.maximum(self.keys_of(b) - 1, 0) // x.page  # entries beyond it may be anything

        def some(k, _):
            first, found = k * count * size, []
            for i in range(count):  # all loads before the copies
                at = row + first + i * size
                page = self.page_table[self.in_table(b, jnp.minimum(at // x.page, last))]
                page = jnp.clip(page, 0, self.k.shape[0] - 1)
                found.append((first + i * size, size, (page, pl.ds(at % x.page, size), head)))
            for i, there, at in found:
                copy(pl.multiple_of(i, size), there, at)

        count = math.gcd(block // size, _PAGES)
        lax.fori_loop(0, block // size // count, some, None)

    def in_table(self, b, entry):
        """The index of an entry of the page table."""
        x = self.x
        return (b, entry) if x.table is None else b * scalar(x.table // x.batch) + entry

    # ---- consumers

    def consumer(self, me):
        attend = functools.partial(self.attend, me)
        p = self.plan
        pl.run_scoped(attend, *[plgpu.ACC((64, p.width))] * (p.value_dim // p.width))

    def attend(self, me, o_acc, *more):
        """All tiles of a consumer. o_acc: the first of the accumulators."""
        p, none, o_acc = self.plan, jnp.int32(0), (o_acc, *more)

        def full(shape, x, layout=plgpu.Layout.WGMMA):
            return plgpu.layout_cast(jnp.full(shape, x), layout)

        q = self.load_queries(me, none) if p.q_ahead else none
        if self.cfg.late:
            self.k_ring.wait(none)
        m = full((64,), MASKED, plgpu.Layout.WGMMA.reduce(1))
        sums, none_yet = full((64, 8), _F32(0)), full((64, p.block), np.zeros((), self.x.dtype))
        begin = self.begin(me, none)
        tail = none + p.block if p.cleans else None
        none_yet = self.arranged(none_yet)
        start = _State(none, *begin, none + p.total, tail, none, m, sums, none_yet, q)
        start = start._replace(fetched=self.fetch(start))
        lax.while_loop(self.goes_on, functools.partial(self.step, me, o_acc), start)

    def begin(self, me, w):
        """Number, first row, keys and factor of tile w."""
        t = self.tiles.tile(w)
        tile, part, _, _ = self.tile_of(t)
        end = self.blocks_of(t, tile, part)[1] * self.plan.block
        return t, tile * self.plan.rows + me * 64, end, self.factor_of(t)

    def goes_on(self, now):
        return now.end > 0

    def before(self, end):
        """The `end` of the block before, in the order of the keys."""
        return end - self.plan.block

    def load_queries(self, me, w):
        self.q_ring.wait(w)
        if not self.cfg.q_registers:
            return jnp.int32(0)
        q = plgpu.load(self.q_smem.at[0, me], layout=self.plan.left)
        plgpu.barrier_arrive(self.q_empty.at[0])
        return q

    def rotated(self, first, now):
        """With the queries of a tile in registers rotated at its first block: earlier the scores of
        the block before take the registers."""
        if not self.x.angles or not self.cfg.q_registers:
            return now
        rotate = functools.partial(_attention_rotary.rotate, refs=self.refs, x=self.x)
        row = now.row + self.x.first
        return now._replace(q=lax.cond(first, lambda q: rotate(q, row=row), lambda q: q, now.q))

    def first_use(self, me, now):
        """The queries of a tile are in shared memory from here on; there they are rotated."""
        here = self.q_smem.at[now.w % self.plan.q_slots, me]
        if not self.plan.q_ahead:
            self.q_ring.wait(now.w)
        if self.x.angles:
            q = plgpu.load(here, layout=plgpu.Layout.WGMMA)
            here[...] = _attention_rotary.rotate(q, self.refs, self.x, now.row + self.x.first)
            plgpu.commit_smem()

    def step(self, me, o_acc, now):
        """One key block: that before key now.end."""
        cfg, slot = self.cfg, now.it % self.plan.stages
        first = now.ended != -1
        last = self.is_last(now)
        rare = self.is_rare(now, first | last)
        now = self.rotated(first, now)
        s = self.adjust(now, self.multiply(me, o_acc, now, slot, first), now.fetched)
        if not cfg.hold:
            plgpu.barrier_arrive(self.k_empty.at[slot])
        if cfg.apart:
            plgpu.barrier_arrive(self.v_empty.at[slot])
        change = functools.partial(self.change_tiles, me, o_acc, now, first, last)
        stay = functools.partial(self.stay, now)
        s, m, sums, ended, tail, (w, t, row, end, c, q) = lax.cond(
            rare, change, stay, s, now.m, now.sums, now.q
        )
        fetched = self.fetch(now._replace(w=w, t=t, row=row, end=end))
        if cfg.trusting:
            p, new, sums, alpha = self.trusting(s, m, sums, self.factor(now.c))
            grown = alpha != 1
        else:
            s, new, sums, alpha, grown = self.softmax(s, m, sums, self.factor(now.c))
            s = self.drop(now, s)
        if cfg.hold:
            plgpu.barrier_arrive(self.k_empty.at[slot])
        if cfg.late and cfg.trusting:
            p, alpha, sums = lax.optimization_barrier((p, alpha, sums))
        elif cfg.late:
            # The loop of this wait ends the basic block: without it ptxas moves the wait for the
            # products up, before the exponentials.
            s, alpha, sums = lax.optimization_barrier((s, alpha, sums))
        if not cfg.trusting:
            p = self.arranged(s).astype(self.x.dtype) if cfg.early else None
        if cfg.late:
            self.k_ring.wait(now.it + 1)
        if not cfg.apart:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.v_empty.at[slot])
        self.rescale(o_acc, alpha, grown)
        p = p if p is not None else self.arranged(s).astype(self.x.dtype)
        return _State(w, t, row, end, c, ended, tail, now.it + 1, new, sums, p, q, fetched)

    def is_last(self, now):
        """Is this the last block of a tile?"""
        return now.end == self.plan.block

    def is_rare(self, now, rare):
        """Does a block with a mask, or the first or the last one of a tile, come?"""
        if self.x.causal:
            rare |= now.end > now.row + 1
        if self.plan.ragged:
            rare |= now.end > self.x.keys
        return rare

    def fetch(self, now):
        """What the scores of a block are adjusted with, loaded during the softmax of the block
        before."""

    def adjust(self, now, s, fetched):
        """Scores before the mask; plain ones stay."""
        return s

    def drop(self, now, s):
        """Probabilities that values are multiplied with."""
        return s

    def arranged(self, p):
        """Probabilities as the tensor cores take them."""
        return p

    def add_values(self, o_acc, p, slot):
        """Issues P V of a slot; the number of products."""
        for i, acc in enumerate(o_acc):
            v = self.v_smem.at[slot]
            plgpu.wgmma(acc, p, v if len(o_acc) == 1 else v.at[:, self.columns_of(i)])
        return len(o_acc)

    def factor_of(self, t):
        """What the scores of tile t are multiplied with to be exponents of 2, if a plan does not
        know it."""
        return None

    def factor(self, c):
        return self.plan.c if c is None else c

    def multiply(self, me, o_acc, now, slot, first):
        """Issues Q K of this block and P V of the one before; the scores."""
        p, q = self.plan, now.q
        if not self.cfg.q_registers:
            q = self.q_smem.at[now.w % p.q_slots, me]
            if not p.q_ahead or self.x.angles:
                pl.when(first)(lambda: self.first_use(me, now))
        if not self.cfg.late:
            self.k_ring.wait(now.it)

        def scores(s_acc):
            with plgpu.ext.ordered_section(p.consumers):
                plgpu.wgmma(s_acc, q, self.k_smem.at[slot].T)
                self.v_ring.wait(now.it)
                if p.cleans:
                    pl.when(now.tail < p.block)(lambda: self.clean(me, self.v_smem.at[slot], now))
                count = self.add_values(o_acc, now.p, slot)
            count = 0 if self.cfg.apart else count
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=count)

        return pl.run_scoped(scores, plgpu.ACC((64, p.block)))

    def stay(self, now, s, m, sums, q):
        """Most steps: the next block is one of the same tile."""
        place = now.w, now.t, now.row, self.same_tile(now), now.c
        tail = jnp.int32(self.plan.block) if self.plan.cleans else None
        return s, m, sums, jnp.int32(-1), tail, (*place, q)

    def same_tile(self, now):
        """The place of the next block, of the same tile."""
        return self.before(now.end)

    def change_tiles(self, me, o_acc, now, first, last, s, m, sums, q):
        """A block with a mask, or the first or the last one of a tile."""
        p, s = self.plan, self.masked(now, s)

        def turn_over(m, sums):
            """The tile before ends, and there is nothing yet of this one."""
            plgpu.wgmma_wait(0)
            value = self.value_of(o_acc)
            pl.when(now.ended < p.total)(lambda: self.epilogue(me, now.ended, value, m, sums))
            self.set_value(o_acc, jnp.zeros_like(value))
            top = jnp.max(s, axis=1) if self.cfg.trusting else jnp.full_like(m, MASKED)
            return top, jnp.zeros_like(sums)

        def same(q):
            return now.w, now.t, now.row, self.same_tile(now), now.c, q

        def following(q):
            """The next tile; its queries, where they have a place of their own."""
            if p.q_ahead:
                q = self.load_queries(me, now.w + 1)
            return now.w + 1, *self.begin(me, now.w + 1), q

        m, sums = lax.cond(first, turn_over, lambda m, sums: (m, sums), m, sums)
        if not self.cfg.q_registers:
            pl.when(last)(lambda: plgpu.barrier_arrive(self.q_empty.at[now.w % p.q_slots]))
        tail = None
        if p.cleans:  # the first block is that of the last keys
            end = now.end.end if isinstance(now.end, _Place) else now.end
            listed = self.x.scores.mask  # blocks are those of a list
            rest = self.last_of(now) - (now.end.column if listed else end - p.block)
            tail = lax.select(first & (now.t < p.total), jnp.clip(rest, 0, p.block), p.block)
        ended = lax.select(last, now.t, -1)
        return s, m, sums, ended, tail, lax.cond(last & (now.t < p.total), following, same, q)

    def clean(self, me, values, now):
        """The first consumer makes values 0 that come after the last key, before the turn of the
        others."""
        n = 8  # with more, ptxas saves registers everywhere: it waits for P V before the softmax

        def part(i, _):
            rows = values.at[pl.ds(pl.multiple_of(i * n, n), n)]
            beyond = lax.broadcasted_iota(jnp.int32, rows.shape, 0) >= now.tail - i * n
            pl.store(rows, (slice(None),) * 2, jnp.zeros(rows.shape, rows.dtype), mask=beyond)

        @pl.when(me == 0)
        def _():
            lax.fori_loop(now.tail // n, self.plan.block // n, part, None)
            plgpu.commit_smem()

    def last_of(self, now):
        """A key after all that queries of a tile see: beyond it there may be anything."""
        return self.keys_of(self.tile_of(now.t)[3])

    def masked(self, now, s):
        """Scores, masked if this block needs it."""
        p, keys, causal = self.plan, self.x.keys, self.x.causal
        if causal or p.ragged:
            outside = now.end > (jnp.minimum(now.row + 1, keys) if causal else keys)
            s = lax.cond(outside, lambda s: self.mask(s, now.row, now.end), lambda s: s, s)
        return s

    def mask(self, s, row, end):
        """Scores of the keys before `end`, those outside are MASKED."""
        queries, keys = self.x.queries, self.x.keys
        col = lax.broadcasted_iota(np.int32, s.shape, 1) + (end - self.plan.block)
        keep = col < keys
        if self.x.causal:
            at = lax.broadcasted_iota(np.int32, s.shape, 0) + row
            sees = not self.x.is_open and keys >= queries  # all keys before the query are there
            keep = col <= at if sees else keep & (col <= at)
        return jnp.where(keep, s, MASKED)

    def softmax(self, s, m, sums, c):
        """Exponentials of the scores, maxima, sums, what earlier sums are multiplied with, and
        whether that is not 1."""
        p, grown = self.plan, None
        new = jnp.maximum(m, jnp.max(s, axis=1))
        if self.cfg.lazy:
            grown = (new - m) * c > p.lazy
            new = jnp.where(grown, new, m)
        base = scaled(new, c)
        alpha = jnp.exp2(m * c - base)
        s = jnp.exp2(s * c - _along_rows(base - p.raised if p.raised else base, p.block))
        partial = s.reshape(64, p.block // 8, 8).sum(axis=1)
        return s, new, sums * _along_rows(alpha, 8) + partial, alpha, grown

    def trusting(self, s, m, sums, c):
        """Probabilities by the maxima so far, if sums of them are not too large."""
        p = self.plan
        how = lambda e: self.arranged(e).astype(self.x.dtype), p.most, p.lazy, p.raised
        return _attention_softmax.trusting(s, m, sums, c, *how, select=p.selects)

    def rescale(self, o_acc, alpha, grown):
        dim = self.plan.value_dim
        value = self.value_of(o_acc)
        if self.cfg.lazy or self.cfg.trusting:
            value = plgpu.ext.warp_where(
                _along_rows(grown, dim),
                lambda: value * _along_rows(alpha, dim),
                value,
                select=self.plan.selects,
            )
        else:
            value = value * _along_rows(alpha, dim)
        self.set_value(o_acc, value)

    def value_of(self, o_acc):
        """What the accumulators hold, after their products."""
        parts = [plgpu.wgmma_accumulator_load(acc, wait_n=None) for acc in o_acc]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def set_value(self, o_acc, value):
        for i, acc in enumerate(o_acc):
            acc[...] = value if len(o_acc) == 1 else value[:, self.columns_of(i)]

    def columns_of(self, i):
        """Those of V that accumulator i has."""
        return slice(i * self.plan.width, (i + 1) * self.plan.width)

    # ---- epilogue

    def epilogue(self, me, t, value, m, sums):
        """Stores a consumer's rows of tile t."""
        p, x = self.plan, self.x
        tile, part, head, b = self.tile_of(t)
        at, row = tile * p.rows + me * 64, part * x.heads + head  # of the results of the parts
        if x.whole:
            row = head
        sums = jnp.sum(sums, axis=1)
        value = value * _along_rows(self.reciprocal(sums), p.value_dim)
        value = self.result(value, b, head).astype(x.out_dtype)
        first = 0
        if p.value_dim > x.value_dim:  # columns beyond the end go nowhere
            first = pl.multiple_of(lax.optimization_barrier(jnp.int32(0)), 64)
        for c in range(0, p.value_dim, p.out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            place = b, part, at
            self.send(me, value[:, c : c + p.out], place, (row, pl.ds(first + c, p.out)))
        if x.return_lse:
            top = scaled(m, self.factor(self.factor_of(t)))
            top = top - p.raised if p.raised else top
            lse = (top + jnp.log2(sums)) * _F32(math.log(2))
            if x.is_open and p.parts == 1 or x.whole:
                keep = lax.broadcasted_iota(jnp.int32, (64,), 0) < scalar(x.queries) - at
                where = pl.ds((b * x.heads + head) * scalar(x.queries) + at, 64)
                if p.parts != 1:
                    where = 0, pl.ds(self.row_of(b, part) + at, 64), row
                pl.store(self.lse, where, lse, mask=keep)
                return
            at = pl.ds(at, 64)
            there = (b, row, at) if p.parts == 1 else (b, at, row)
            store(self.lse_smem.at[me], lse, self.lse.at[there], engine="plain")

    def row_of(self, b, part):
        """The first row of a batch entry in the results of a part, which are one after the other
        where lengths are open."""
        x = self.x
        row = b * scalar(x.queries)
        return row if self.plan.parts == 1 else part * scalar(x.whole[0]) + row

    def send(self, me, value, place, columns):
        """Stores a consumer's rows; where the rows of the next batch entry follow, those that are
        left of this one."""
        x, buffer, (b, part, row) = self.x, self.o_smem.at[me], place
        if not x.whole:
            return store(buffer, value, self.o.at[(b, pl.ds(row, 64), *columns)])
        rows = jnp.clip(scalar(x.queries) - row, 0, 64)

        def target(start, count):
            return self.o.at[(0, pl.ds(self.row_of(b, part) + (row + start), count), *columns)]

        store_some(buffer, value, rows, target)

    def reciprocal(self, sums):
        return pl.reciprocal(sums, approx=True)

    def result(self, value, b, head):
        """The result of a head from the quotients."""
        return value


class _ScoredBlock(_Block):
    """One block of a kernel with options of the scores."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.ranges = Ranges(plan.x, False, refs.get("low"), refs.get("high"))

    def ranges_of(self, b):
        """The keys that queries of a batch entry see."""
        if not any(self.x.lengths):
            return self.ranges
        return self.ranges.of_lengths(self.keys_of(b), self.queries_of(b))

    def blocks_of(self, t, tile, part):
        p = self.plan
        inside = t < p.total
        if p.shares:
            first, count = self.shared_tile(jnp.minimum(t, p.total - 1))[2:]
            return lax.select(inside, first, 0), lax.select(inside, count, 1)
        tile = jnp.minimum(tile, p.q_tiles - 1)
        b = self.tile_of(t)[3] if any(self.x.lengths) else 0
        first, count = self.ranges_of(b).blocks(tile * p.rows, p.rows, p.block)
        if self.x.lengths[1]:
            count = lax.select(tile * p.rows < self.queries_of(b), count, 0)
        if p.parts > 1:  # a part without blocks gets the one after the last, which is masked
            each = pl.cdiv(count, p.parts)
            first, count = first + part * each, jnp.clip(count - part * each, 0, each)
        return lax.select(inside, first, 0), lax.select(inside, jnp.maximum(count, 1), 1)

    def begin(self, me, w):
        t = self.tiles.tile(w)
        tile, part, _, b = self.tile_of(t)
        first, count = self.blocks_of(t, tile, part)
        row, n = tile * self.plan.rows + me * 64, self.plan.block
        end = (first + count) * n
        place = _Place(end, first * n, *self.ranges_of(b).of_all(row, 64), end - n)
        return t, row, self.in_head(place, t), self.factor_of(t)

    def in_head(self, place, t):
        """The place with what is carried of the head and the batch entry of tile t."""
        f = self.x.scores
        if not self.x.is_open:
            return place
        _, _, head, b = self.tile_of(t)
        return place._replace(b=b, head=head if f.bias or f.dropout or f.mask else None)

    def entry_of(self, now):
        """The batch entry of a tile."""
        if now.end.b is not None:
            return now.end.b
        return self.tile_of(lax.select(now.t < self.plan.total, now.t, 0))[3]

    def last_of(self, now):
        if self.x.is_open and not self.x.scores.sequences:
            return self.keys_of(now.end.b)
        if not self.x.scores.sequences:
            return super().last_of(now)
        return self.ranges.arrays[1][scalar(self.x.queries) - 1]  # no row sees more keys

    def goes_on(self, now):
        return now.end.end > 0

    def before(self, end):
        n = self.plan.block
        return end._replace(end=end.end - n, column=end.column - n)

    def is_last(self, now):
        return now.end.end == now.end.first + self.plan.block

    def hidden(self, now):
        """Does a row of this consumer not see all keys of this block?"""
        place = now.end
        return (place.end > place.high) | (place.end - self.plan.block < place.low)

    def is_rare(self, now, rare):
        return rare | self.hidden(now)

    def tile(self, now):
        """This block's part of the scores."""
        b, head, shape = now.end.b, now.end.head, (64, self.plan.block)
        if not self.x.is_open:
            t = lax.select(now.t < self.plan.total, now.t, 0)
            _, _, head, b = self.tile_of(t)
        return Tile(self.x, self.refs, b, head, now.row, now.end.column, shape, by_keys=False)

    def fetch(self, now):
        bias = self.x.scores.bias
        rows = bias and all(isinstance(n, plgpu.Dim) or n > 1 for n in bias[2:])
        if not rows:
            return None
        tile = self.tile(now)
        tile.column = jnp.maximum(tile.column, 0)  # there is none before the first block
        return tile.fetch()

    def ask(self, tile, head, place):
        p, dims, (b, column, _) = self.plan, self.x.scores.bias, place
        if not dims or self.x.is_open or min(dims[2:]) == 1 or self.bias.dtype.itemsize > 2:
            return
        part = 0 if dims[0] == 1 else b, 0 if dims[1] == 1 else head
        rows, keys = pl.ds(tile * p.rows, p.rows), pl.ds(column, p.block)
        plgpu.async_prefetch(self.bias.at[(*part, rows, keys)])

    def adjust(self, now, s, fetched):
        return self.tile(now).adjust(s, fetched)[0]

    def drop(self, now, s):
        return self.tile(now).drop(s)

    def masked(self, now, s):
        def mask(s):
            return jnp.where(self.keep(now, s.shape), s, MASKED)

        return lax.cond(self.hidden(now), mask, lambda s: s, s)

    def keep(self, now, shape):
        b = self.entry_of(now) if any(self.x.lengths) else 0
        return self.ranges_of(b).keep(now.row, now.end.column, shape)

    def reciprocal(self, sums):
        """0 for rows that see nothing."""
        return jnp.where(sums == 0, _F32(0), pl.reciprocal(sums, approx=True))


class _MaskedBlock(_ScoredBlock):
    """One block of a kernel with a mask that is a function. Its tiles go through the blocks of keys
    that the block mask lists; the low and high of a place are not used, but whether its block needs
    the mask (low)."""

    def blocks_of(self, t, tile, part):
        _, _, head, b = self.tile_of(t)
        tile = jnp.minimum(tile, self.plan.q_tiles - 1)
        return 0, lax.select(t < self.plan.total, self.entry(b, head, tile, -1), 1)

    def entry(self, b, head, tile, i):
        """What the block mask says of block i of a tile; -1: how many there are."""
        x, of = self.x, self.of_mask(b, head)
        return self.block_mask[at_entry(x.scores.mask, x.queries, x.keys, *of, tile, i + 1)]

    def of_mask(self, b, head):
        """What the mask distinguishes of a batch entry and a head."""
        mask = self.x.scores.mask
        return 0 if mask.is_shared else b, head if mask.heads > 1 else 0

    def key_of(self, b, head, tile, i):
        return self.entry(b, head, tile, i) // 2

    def begin(self, me, w):
        t = self.tiles.tile(w)
        tile, _, _, _ = self.tile_of(t)
        _, count = self.blocks_of(t, tile, 0)
        row, n = tile * self.plan.rows + me * 64, self.plan.block
        place = self.in_head(_Place(count * n, 0 * count, *[count] * 3), t)
        return t, row, self.at(t, row, place), self.factor_of(t)

    def at(self, t, row, place):
        """The place with what is known of its block."""
        if self.x.is_open:
            tile, head, b = row // self.plan.rows, place.head, place.b
        else:
            tile, _, head, b = self.tile_of(t)
        i = jnp.maximum(place.end // self.plan.block - 1, 0)
        found = self.entry(b, head, tile, i)
        return place._replace(low=found % 2, column=found // 2 * self.plan.block)

    def same_tile(self, now):
        return self.at(now.t, now.row, now.end._replace(end=now.end.end - self.plan.block))

    def hidden(self, now):
        return now.end.low > 0

    def keep(self, now, shape):
        mask, sizes = self.x.scores.mask, (self.x.queries, self.x.keys)
        head, b = now.end.head, now.end.b
        if not self.x.is_open:
            t = lax.select(now.t < self.plan.total, now.t, 0)
            _, _, head, b = self.tile_of(t)
        at = *self.of_mask(b, head), now.row, now.end.column
        return mask.keep(sizes, at, shape, self.refs.get("mask_data"), plgpu.Layout.WGMMA)


class _NarrowBlock(Narrow, _Block):
    pass


class _ScoredNarrowBlock(Narrow, _ScoredBlock):
    pass


class _TransposedBlock(Transposed, _Block):
    pass


class _ScoredTransposedBlock(Transposed, _ScoredBlock):
    pass


def _along_rows(x, width):
    return lax.broadcast_in_dim(x, (64, width), [0])


def _block_of(x, parts):
    """The class of the blocks of a kernel."""
    if x.scores.mask:
        return _MaskedBlock
    scored = x.scores != PLAIN or any(x.lengths) or parts > 1
    if x.transposed:
        return _ScoredTransposedBlock if scored else _TransposedBlock
    if x.is_narrow:
        return _ScoredNarrowBlock if scored else _NarrowBlock
    return _ScoredBlock if scored else _Block


@cached
def _kernel(x, cfg, cores, parts, interpret, shares=None):
    """x: a Problem. parts: of the keys; the results of each are heads of their own. shares: these
    parts are Shares."""
    x = x._replace(return_lse=True) if parts > 1 else x
    plan = _TransposedPlan if x.transposed else _NarrowPlan if x.is_narrow else _Plan
    plan = plan(x, cfg, cores, parts, shares)
    make = _block_of(x, parts)

    def block(refs):
        overlap_launches()
        return make(plan, refs)

    body = x.body(block, block)
    out_type = x.results
    if parts > 1:
        rows = parts * x.whole[0] if x.whole else x.queries
        all_heads = x.shapes[0][0], rows, x.heads if x.whole else parts * x.heads
        out_type = plgpu.ShapeDtypeStruct((*all_heads, x.value_dim), x.out_dtype)
        out_type = out_type, plgpu.ShapeDtypeStruct(all_heads, _F32)
    options = {"compiler_params": plgpu.CompilerParams(approx_math=True), "interpret": interpret}
    options |= in_shapes(*x.shapes, *x.shapes_of_options(), *x.shapes_of_others)
    threads = plan.readers + 1
    return warp_specialized(
        body, plan, out_type, threads=threads, kernel_name="attention", **options
    )


_OTHERS = ("bias", "seed"), ("cos", "sin")  # operands before and after the ranges


class _Packed(SeveralKernels):
    """The kernels of packed sequences: ranges of the rows, then attention."""

    def __init__(self, x, kernel, interpret, **how):
        self.ranges = _attention_scores.lookup_of(x, False, interpret, **how)
        self.attention = kernel
        self.others = x.others
        self.order = *x.scores.operands, *["cos", "sin"] * bool(x.angles), *x.others
        # where lengths are open, the first kernel gets them from the arrays that have them
        self.like = (lambda q, k: (q, k)) if x.is_open else lambda q, k: ()

    def __call__(self, q, k, v, *others, out=None, stream=None):
        named = dict(zip(self.order, others, strict=True))
        ranges = named.pop("cu_seqlens_q"), named.pop("cu_seqlens_k")
        ranges = self.ranges(*ranges, *self.like(q, k), stream=stream)
        rest, angles = ([named[n] for n in names if n in named] for names in _OTHERS)
        more = *angles, *(named[n] for n in self.others)
        return self.attention(q, k, v, *rest, *ranges, *more, out=out, stream=stream)


class _Masked(SeveralKernels):
    """The kernels of masks without a block mask: it, then attention. x: the problem of the call;
    maybe_open: that of the kernel."""

    def __init__(self, x, maybe_open, kernel, interpret):
        mask, sizes = x.scores.mask, (x.queries, x.keys)
        self.attention, self.data = kernel, x.scores.has_data
        self.blocks = alone = OfArrays(mask, *sizes, interpret)
        if maybe_open.is_open:
            of, like = maybe_open, _attention_open.like_of(maybe_open)
            shapes = [(1, s[0] * s[1], *s[2:]) for s in x.shapes[:2]]
            how = like, shapes, x.batch, shape_of(mask, *sizes), lambda: alone
            self.blocks = OfArrays(of.scores.mask, of.queries, of.keys, interpret, *how)

    def __call__(self, q, k, v, *others, out=None, stream=None):
        others, data = (others[:-1], others[-1:]) if self.data else (others, ())
        blocks = self.blocks(q, k, *data, stream=stream)
        return self.attention(q, k, v, *others, blocks, *data, out=out, stream=stream)


def _masked(q, k, mask, block_mask, data, how):
    """The Mask of the options; None without one. how: options that exclude it."""
    if mask is None:
        if block_mask is not None or data is not None:
            raise ValueError("attention: block_mask and mask_data need mask=")
        return None
    check_function("attention", mask)
    if any(how):
        raise ValueError(
            "attention: mask replaces causal, window and cu_seqlens; write them in the function"
        )
    shape = () if data is None else data.shape
    found = Mask(mask, q.shape[0], q.shape[2], data is not None, shape)
    if block_mask is None:
        return found
    want = shape_of(found, q.shape[1], k.shape[1])
    got = block_mask.shape
    fits = len(got) == 4 and got[2:] == want[2:] and all(n in (1, w) for n, w in zip(got, want))
    if not fits or block_mask.dtype != np.int32:
        raise ValueError(
            f"attention: block_mask must be int32 of shape {want}, where the first two dims may be"
            f" 1, as ops.block_mask returns it; got {block_mask.dtype} of shape {got}"
        )
    return found._replace(batch=got[0], heads=got[1])


def _check(q, k, v, name="attention", dims=_WIDTHS, most=0, own_value_dim=False, cache=None):
    """dims: head_dims; most: the largest one, if they are multiples of 8. own_value_dim: may that
    of the values differ? cache: a Cache, for operands that may have 8 bits."""
    paged = cache is not None and cache.page_table is not None
    for what, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: {what} must have the dims [batch, length, heads, head_dim], got "
                f"shape {x.shape}"
            )
    same = q.dtype == k.dtype == v.dtype and q.dtype.name in ("float16", "bfloat16")
    if not same and (cache is None or not is_narrow(q, k, v)):
        accepted = "float16 or all bfloat16" if cache is None else DTYPES
        raise TypeError(
            f"{name}: q, k and v must all be {accepted}; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    batch, queries, heads, dim = q.shape
    _, keys, kv_heads, _ = k.shape
    if (dim % 8 or not 0 < dim <= most) if most else dim not in dims:
        accepted = (
            f"a multiple of 8 up to {most}" if most else f"one of {', '.join(map(str, dims))}"
        )
        raise NotImplementedError(
            f"{name}: head_dim must be {accepted}, got {dim}; pad q, k and v with zeros and give"
            " scale"
        )
    if own_value_dim and v.ndim == 4 and v.shape[3] % 8 == 0 and 0 < v.shape[3] <= most:
        same = k.shape[:3] == v.shape[:3]
    else:
        same = k.shape == v.shape
    if not same:
        raise ValueError(f"{name}: k and v must have one shape, got {k.shape} and {v.shape}")
    if k.shape[0] != batch and not paged or k.shape[3] != dim:
        raise ValueError(f"{name}: q {q.shape} and k {k.shape} differ in batch or head_dim")
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"{name}: the heads of q must be a multiple of those of k and v, got {heads} and "
            f"{kv_heads}"
        )
    if 0 in (batch, queries, heads, keys):
        raise ValueError(f"{name}: empty operands, {q.shape} and {k.shape}")


def _check_trusting(x, config):
    if config.trusting and x.scores.dropout:
        raise ValueError(f"attention: trusting excludes dropout={x.scores.dropout}; got {config}")


def _check_config(config):
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"attention: config must be an AttentionConfig, got {config!r}")
    check_fields("attention", config)
    c = config
    blocks = range(16, 257, 16)
    if c.consumers not in (1, 2, 3) or c.block not in blocks or c.stages < 1 or c.programs < 0:
        raise ValueError(
            "attention: an AttentionConfig has 1 to 3 consumers, a block that is a multiple of 16"
            f" up to 256, stages from 1 and programs from 0; got {config}"
        )


def _flattened(x, widths, divides, call, config=None):
    """The kernel of a batch whose size and lengths are known when it runs: the entries are one
    after the other in the arrays that it gets. divides: blocks may share the keys. config: the
    configuration, chosen by default. None where the kernel is that of the lengths."""
    edges = _attention_open.edges(x)
    several = x.batch > 1 or any(x.lengths) or x.page > 0 or x.is_narrow or divides
    several |= x.queries <= edges[-2] or x.scores.bias is not None  # which makes fewer programs
    if _attention_open.is_large(x) or x.scores.sequences or not several:
        return None
    interpret = call.interpret
    found = sizes_of(*_attention_open.kind_of(x, call), edges)
    whole = found and _attention_open.with_mask(_attention_open.open_batch(x, found), call)
    if whole is None:
        return None
    given, config = config, config or choose_for(whole, found["N"].most, max(widths))
    cores, parts = plgpu.sm_count(call.q.device), 1
    if divides and _attention_parts.open_parts_pay(x, config, cores):
        parts = _attention_parts.open_parts(whole, config, cores)
    kernel = _kernel(whole, config, cores, parts, interpret)

    def alone():
        return _of_wgmma(x, given, widths, divides, call, exact=True)

    q = x.batch, x.queries, x.heads
    shapes = [(1, x.batch * x.queries, x.heads, x.dim)]
    rows = 1, x.batch * x.keys, x.kv_heads
    shapes += [None if x.page else (*rows, n) for n in (x.dim, x.value_dim)]
    shapes += _attention_open.flat_options(x, whole)
    shapes += [(call.page_table.size,) if name == "page_table" else None for name in x.others]
    out = *q, x.value_dim
    if parts != 1:
        return _attention_parts.DividedOpen(x, whole, kernel, shapes, interpret, alone)
    results = out, *_attention_open.logarithms(x)
    kernel = _core.Reshaped(kernel, alone, tuple(shapes), results, (x.batch,) * whole.counted)
    if x.scores.mask and call.block_mask is None:
        return _Masked(x, whole, kernel, interpret)
    return kernel


def _of_wgmma(problem, config, widths, divides, call, exact=False, widens=True):
    """The kernel, or what calls it. widths: those of q and v that it is compiled for; divides: may
    blocks share the keys? call: the arguments, by name; exact: the kernel itself, of the lengths of
    a batch. widens: may a kernel before copy keys and values, whose sums are others then?"""
    interpret, cores = call.interpret, plgpu.sm_count(call.q.device)
    parts, width, mask, shares = 1, max(widths), problem.scores.mask, None
    given, queries, scores = problem, problem.queries, problem.scores
    if config is None and widens and pays(problem):
        kind, sizes = _attention_open.kind_of(problem, call)
        with together(is_static(kind, tuple(sizes.values()))):
            return Widened(problem, lambda x: _of_wgmma(x, None, widths, divides, call), interpret)
    if mask and width > 128:
        raise NotImplementedError(
            f"attention: mask= with a head_dim of up to 128, got {problem.dim} and, of v,"
            f" {problem.value_dim}; use bias="
        )
    if config is None:
        few = True
        if divides:
            chosen = choose_for(problem, queries, width)
            parts = _attention_parts.parts_of(problem, chosen, cores)
            few = 2 * _attention_parts.tiles_of(problem, chosen) <= cores
            shares = _attention_parts.shares_of(problem, chosen, cores, parts)
        if not exact and not (parts > 1 and call.deterministic):  # else others may have come before
            found = _flattened(problem, widths, parts > 1 and few, call)
            if found is not None:
                return found
            problem, queries = _attention_open.open_lengths(problem, call)
        if widens and _attention_transposed.pays(problem):
            again = functools.partial(_of_wgmma, config=None, widths=widths, divides=divides)
            return TransposedFirst(
                problem, functools.partial(again, call=call, exact=True), interpret
            )
        if problem.is_open:
            parts = 1
    else:
        _check_config(config)
        _check_trusting(problem, config)
        if not exact:
            found = _flattened(problem, widths, False, call, config)
            if found is not None:
                return found
            problem, _ = _attention_open.open_lengths(problem, call)
    config = config or choose_for(problem, queries, width)
    if shares and not problem.is_open:
        kernel = _kernel(problem, config, cores, shares.parts, interpret, shares)
        return _attention_parts.divided(problem, shares.parts, kernel, interpret, shares)
    kernel = _kernel(problem, config, cores, parts, interpret)
    flat = _attention_open.flat_options(given, problem) if problem.is_open else ()
    if problem.is_open and (any(flat) or problem.return_lse):
        alone = functools.partial(_kernel, given, config, cores, parts, interpret)
        shapes = None, None, None, *flat
        kernel = _core.Reshaped(kernel, alone, shapes, (None, *_attention_open.logarithms(given)))
    if mask and call.block_mask is None and not exact:
        return _Masked(given, problem, kernel, interpret)
    if parts > 1:
        return _attention_parts.divided(problem, parts, kernel, interpret)
    return _Packed(problem, kernel, interpret) if scores.sequences else kernel


def _of_tensor_memory(problem, config, target, interpret):
    """The kernel by tcgen05, or what calls it."""
    _attention_tensor_memory.check(config)
    config = _attention_tensor_memory.chosen(config, target)
    kernel = _attention_tensor_memory.kernel(problem, config, interpret)
    if problem.scores.sequences:
        return _Packed(problem, kernel, interpret, multiple=_attention_tensor_memory.MULTIPLE)
    return kernel


def _check_masked(mask, target, is_narrow, dtype, config):
    if mask and (target != "sm_90a" or config is not None or is_narrow):
        raise NotImplementedError(
            "attention: mask= needs sm_90a, k and v of 16 bits and no config=; got"
            f" {target}, {dtype}, config={config!r}; use bias="
        )


def _choose(x):
    """The kernel of a call, or what calls it. x: the arguments of attention, by name."""
    q, k, v, config, mask, scale = x.q, x.k, x.v, x.config, x.mask, x.scale
    if config is None and _tensor_memory.runs_here(q.device):
        config = TensorMemoryAttentionConfig()
    of_blackwell = isinstance(config, TensorMemoryAttentionConfig)
    target = _core.target(q.device)["name"]
    of_hopper = config is None and target == "sm_90a" or isinstance(config, AttentionConfig)
    most = _attention_tensor_memory.MOST if of_blackwell else _WIDTHS[-1] if of_hopper else 0
    cache = Cache(x.kv_lengths, x.q_lengths, x.page_table, x.q_scale, x.k_scale, x.v_scale)
    _check(q, k, v, most=most, own_value_dim=of_hopper, cache=cache)
    alone = {"cu_seqlens_q": x.cu_seqlens_q, "mask": mask}
    alone = [name for name, given in alone.items() if given is not None]
    cache.check(q, k, v, target if of_hopper else repr(config), alone)
    invariant = x.batch_invariant
    queries, dim = q.shape[1], q.shape[3]
    scale = _attention_scores.scale_of("attention", scale, dim)
    arrays = x.bias, x.cu_seqlens_q, x.cu_seqlens_k, x.seed
    how = x.causal, x.window, x.bottom_right, x.softcap, x.dropout
    kept = {"keys": cache.keys(k), "open_": cache.is_open, "scale": scale}
    scores = _attention_scores.options("attention", q, k, arrays, *how, **kept)
    others = x.causal, x.window is not None, x.cu_seqlens_q is not None
    mask = _masked(q, k, mask, x.block_mask, x.mask_data, others)
    scores = scores._replace(mask=mask)
    shape = (*q.shape, k.shape[1], k.shape[2])
    problem = Problem(*shape, q.dtype, bool(x.causal), scale, scores, bool(x.return_lse))
    problem = cache.of(problem, k)
    if x.cos is not None and (cache.given or problem.is_narrow):
        raise NotImplementedError(
            "attention: cos= and sin= need q, k and v of 16 bits without lengths and pages; rotate"
            " q by ops.rotary, and k by it or by ops.append_pages"
        )
    angles = _attention_rotary.check(
        "attention", q, k, x.cos, x.sin, x.bottom_right, scores.sequences
    )
    _warp_mma.check_config("attention", config, MmaAttentionConfig, q.device)
    if v.shape[3] != dim:
        problem = problem._replace(own_value_dim=v.shape[3])
    _check_masked(mask, target, problem.is_narrow, k.dtype, config)
    if config is None and _warp_mma.runs_here(q.device):
        config = _attention_warp_mma.choose(queries, dim, _core.target(q.device), scores)
    divides = not (invariant or scores.sequences or mask)

    def kernel(problem):
        if isinstance(config, MmaAttentionConfig):
            kernel = _attention_warp_mma.kernel(problem, config, target, x.interpret)
            return _Packed(problem, kernel, x.interpret) if scores.sequences else kernel
        if of_blackwell:
            return _of_tensor_memory(problem, config, target, x.interpret)
        widths = _width(dim) if of_hopper else dim, _width(v.shape[3]) if of_hopper else dim
        return _of_wgmma(problem, config, widths, divides, x, widens=not invariant)

    return _attention_rotary.with_angles(
        problem, kernel, angles, of_hopper and not mask, x.interpret
    )


@plgpu.specialize(in_place=False)
@better
def attention(
    q,
    k,
    v,
    *,
    bias=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seed=None,
    block_mask=None,
    mask_data=None,
    cos=None,
    sin=None,
    kv_lengths=None,
    q_lengths=None,
    page_table=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    mask=None,
    causal=False,
    window=None,
    bottom_right=False,
    softcap=None,
    dropout=0.0,
    scale=None,
    return_lse=False,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``softmax(scale * q @ k.T) @ v`` for each head, accumulated in float32.

    q: [batch, queries, heads, head_dim]; k, v: [batch, keys, kv_heads, head_dim]; float16 or
    bfloat16, row-major; any lengths. head_dim: a multiple of 8 up to 256, on sm_80, sm_86, sm_89
    and sm_120a 64, 128 or 256; on Hopper v may have a last dim of its own. Query head h uses key
    head ``h // (heads // kv_heads)``. causal: query i sees the keys 0 to i. scale: of the scores,
    ``head_dim ** -0.5`` by default. return_lse: also return the natural logarithm of the sum of
    exponentials of the scores, float32 [batch, heads, queries]. config: an
    :class:`AttentionConfig`, on Blackwell a :class:`TensorMemoryAttentionConfig`, on sm_80, sm_86,
    sm_89 and sm_120a a :class:`MmaAttentionConfig`; chosen from the shape by default. out: a
    preallocated result, or a pair of them. batch_invariant: the bits of a query's result depend on
    that query, its keys and values, the dtypes and options alone (for the same config, if one is
    given); the keys are then not divided among blocks where queries are few. deterministic: a call
    repeats bit for bit, in other processes, too, whatever they called before. Where blocks divide
    the keys, each combination of lengths then has a program of its own.

    window: ``(left, right)``; query i sees the keys from i - left to i + right, None: no limit
    on that side; causal makes right 0. bottom_right: the diagonal of causal and window is ``i +
    keys - queries``. softcap: scores s become ``softcap * tanh(s / softcap)``. bias: is added
    to scaled and capped scores; [batch, heads, queries, keys], where each dim may also be 1, of
    q's dtype or float32. cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], the first row of each
    of the sequences that are packed one after the other in the single batch entry, and the end of
    the last one; queries attend only to keys of their own sequence, and causal, window and
    bottom_right count from its start. dropout: the probability by which a weight is dropped,
    by seed, int32 [1] on q's device. A query that sees no key gives 0 and the logarithm -inf.

    mask (Hopper, head_dim up to 128): a function ``f(b, h, i, j)`` of int32 arrays (the batch
    entry, the head, the query and the key) that says which queries attend to which keys. It is
    traced in the kernel, replaces causal, window and cu_seqlens, and must be the same function
    object at each call. mask_data: an array whose ref is its fifth argument. block_mask: what
    :func:`block_mask` returns for them, computed at each call by default.

    cos, sin: rotary embedding of q and k as by :func:`rotary`; [length, head_dim / 2], float16,
    bfloat16 or float32. Query i and key i have row i, also where sequences are packed (i is then
    that of the packed arrays); with bottom_right, without cu_seqlens, query i has row
    ``i + keys - queries``. On Hopper queries are rotated as they are loaded, and keys by
    a kernel before; with mask, head_dims above 128 or no multiple of 16, and elsewhere, both are.

    8 bits (Hopper; head_dims that are multiples of 16): q, k and v may all be float8_e4m3fn, with a
    bfloat16 result, where probabilities are float8_e4m3fn too, and v may be transposed by a kernel
    before, which needs as much memory (2,048 queries to a head of keys or more; not with
    ``config`` and batch_invariant); or k and v int8 or float8_e4m3fn,
    whose elements are converted to q's dtype: exactly as they arrive or, for 1,024 queries to a
    head of keys or more, times their scales by a kernel before, which needs memory for both, of
    pages 256 MiB at most; ``config`` and batch_invariant keep them from that. q_scale, k_scale,
    v_scale: float32 [heads of the array] or [batch, heads], what elements are multiplied with,
    not negative; None: 1.

    kv_lengths, q_lengths (Hopper): int32 [batch], how many keys and queries of each batch entry
    there are; what comes after them is ignored, and rows of the result after the last query are 0.
    With bottom_right diagonals end at the last query and key of the entry. page_table: int32
    [batch, pages of an entry]; k and v are then [pages, page_size, kv_heads, dim], as of
    :func:`attention_decode`. All three are read when the kernel runs: new ones compile nothing, and
    a replayed CUDA graph uses the current ones.

    Returns [batch, queries, heads, dim of v] of the caller's kind of array, or (that, lse).
    TypeError, ValueError for other dtypes and shapes, NotImplementedError for other head_dims."""
    return _choose(types.SimpleNamespace(**locals()))
