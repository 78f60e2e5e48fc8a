"""Attention to keys and values of 8 bits on Hopper: what its blocks do besides those of attention.

A third kind of warpgroup, the *converter*, takes what arrives to the form that the tensor cores
want, from a ring of raw slots to the ring of the consumers. If queries have 16 bits, it widens the
elements of K and V. If they have 8 bits, K is multiplied as it is, but V must be transposed: the
tensor cores want operands of 8 bits with neighbours along the summed dimension, the keys.

The transposition moves words, never bytes one by one. `ldmatrix` transposes pairs of columns of V
as if they were elements of 16 bits. Of two such words, four keys of two columns, two byte
permutations make four keys of either column. So keys and columns come out in an order of their
own: keys as the accumulators of the scores lie in registers, which makes the probabilities left
operands without any exchange between lanes; columns in an order that the result is stored by.

Probabilities of 8 bits are 2^6 times as large as usual and maxima may grow by 2^2 before sums are
rescaled, so they stay below 2^8 (of 448) and their least steps are 2^-15 of the largest one. Where
maxima are not looked for (_attention_softmax.py) they are 2^4 times as large, with more than 192
keys of a block 2^3 times, so that sums of an eighth of a block's stay below 448 even where all are
the same."""

import functools
import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._attention_scores import LEAST, scalar
from ._common import SMEM_BYTES, Ring, buffer, padded, swizzled

_F32 = np.float32
_KEYS = 64  # of a part of V that is transposed at a time
_WIDENED = 2048  # elements that are widened at a time
_WIDTHS = (64, 128, 256)  # of rows on the chip
_RAISED, _LAZY = _F32(6), _F32(2)
_LARGEST = _F32(448)
_FEWER = {2: (24, 40, 224), 3: (24, 40, 136)}  # of the first two, for transpositions alone
_REGISTERS = {2: (40, 56, 208), 3: (40, 56, 128)}  # of the producer, the converter, a consumer
_PLACED = {2: (32, 48, 216)}  # for transpositions of 128 columns with lengths or pages


def width(dim):
    return next(n for n in _WIDTHS if dim <= n)


def grain(x):
    """What blocks of keys are multiples of. x: a Problem."""
    if x.dtype.itemsize == 1:
        return 128 if width(x.value_dim) == _KEYS else _KEYS
    return 2 * _WIDENED // min(width(x.dim), width(x.value_dim))


def _halves(x):
    """What the CUDA code below computes, for arrays."""
    n = x.shape[1]
    x = x.reshape(64, n // 16, 2, 4, 2).transpose(0, 1, 3, 2, 4)
    a, b = x[..., 0], x[..., 1]
    found = (a & 0xFF) | (b << 8), (a >> 8) | (b & 0xFF00)
    return tuple(y.reshape(64, n // 2) for y in found)


_HALF = plgpu.ShapeDtypeStruct((64, _KEYS // 2), np.uint16, plgpu.Layout.WGMMA)
# of pairs of bytes along columns: the bytes of even and of odd columns, each two keys of 16 bits
_split = plgpu.inline_cuda(
    f"""for (int i = 0; i < {_KEYS // 16}; i++) {{
  for (int k = 0; k < 2; k++) {{
    const u32 *w = (const u32 *)a0 + 4 * i + k;
    ((u32 *)r0)[2 * i + k] = pick_bytes(w[0], w[2], 0x6420);
    ((u32 *)r1)[2 * i + k] = pick_bytes(w[0], w[2], 0x7531);
  }}
}}""",
    arg_types=(plgpu.Layout.WGMMA,),
    return_type=(_HALF, _HALF),
    interpret=_halves,
)


class NarrowPlan:
    """What a plan of attention has besides, for keys and values of 8 bits."""

    def fit(self):
        """Sets what depends on dtypes."""
        x, cfg = self.x, self.cfg
        self.begin()
        placed = x.page or any(x.lengths) or x.whole
        self.registers = _REGISTERS.get(self.consumers)
        if self.transposes and not placed:
            self.registers = _FEWER.get(self.consumers)
        elif self.transposes and self.value_dim == 128:
            self.registers = _PLACED.get(self.consumers, self.registers)
        self.readers = self.consumers + 1
        self.value_piece = min(self.piece, _KEYS) if self.pairs else self.piece
        # the widest parts of O that leave at a time, and as many raw slots as there is room for
        self.raw = cfg.stages
        if self.used() > SMEM_BYTES:
            self.out = _KEYS
        while self.raw > 1 and self.used() > SMEM_BYTES:
            self.raw -= 1
        self.place_queries()

    def begin(self):
        """What blocks that get transposed values have, too."""
        x = self.x
        self.transposes = x.dtype.itemsize == 1
        self.dim, self.value_dim = width(x.dim), width(x.value_dim)
        self.check_block()
        if self.transposes:
            self.left = plgpu.Layout.WGMMA_8BIT
            self.lazy, self.raised = _LAZY, _RAISED
            if self.cfg.trusting:
                self.lazy, self.most = _F32(0), _LARGEST
                self.raised = _F32(min(4, math.floor(math.log2(8 * _LARGEST / self.block))))
        # with four warpgroups no product has more than 128 registers
        self.width, self.out = math.gcd(self.value_dim, 128), min(self.value_dim, 128)
        self.q_slots, self.raw = 1, 0

    def place_queries(self):
        self.q_ahead = self.cfg.q_registers
        if not self.cfg.q_registers:
            self.q_slots = 2
            self.q_slots = 2 if self.used() <= SMEM_BYTES else 1
            self.q_ahead = self.q_slots > 1

    def check_block(self):
        """ValueError for blocks that are not whole parts."""
        cfg, n = self.cfg, grain(self.x)
        most = 64 if cfg.block > 64 else 128  # of registers for scores and a result
        if cfg.block % n or cfg.consumers == 3 and self.dim > most:
            raise ValueError(
                "attention: with k and v of 8 bits an AttentionConfig has a block that is a"
                f" multiple of {n} here, and 3 consumers for head_dims up to 64, with a block of 64"
                f" up to 128; got {cfg}"
            )

    @property
    def pairs(self):
        """Do halves of 128 keys lie side by side, because 64 columns alone are too few?"""
        return self.transposes and self.value_dim == _KEYS

    def used(self):
        """Bytes of shared memory."""
        x, both = self.x, self.dim + self.value_dim
        raw = self.value_dim if self.transposes else both
        size = self.stages * both * x.dtype.itemsize + self.raw * raw
        rows = self.q_slots * self.dim * x.dtype.itemsize + self.out * x.out_dtype.itemsize
        return size * self.block + self.rows * rows + 4096

    def scratch(self):
        x, found = self.x, super().scratch()
        copies = self.block // self.value_piece
        if self.transposes:
            shape = (self.raw, self.block, self.value_dim)
            if self.pairs:
                shape = (self.raw, self.block // 128, 64, 128)
            found["v_raw"] = union(shape, math.gcd(self.value_dim, 128), x.cached)
            shape = (self.stages, self.block // _KEYS, self.value_dim, _KEYS)
            found["v_smem"] = union(shape, _KEYS, x.dtype)
        else:
            for name, dim in (("k_raw", self.dim), ("v_raw", self.value_dim)):
                found[name] = buffer(self.raw, self.block, dim, dtype=x.cached)
            found |= Ring.barriers(self.raw, self.copies, 1, prefix="k_raw_")
            found |= Ring.barriers(self.stages, 1, self.consumers, prefix="k_")
        found |= Ring.barriers(self.raw, copies, 1, prefix="v_raw_")
        return found | Ring.barriers(self.stages, 1, self.consumers, prefix="v_")


def union(shape, row, dtype):
    """The same memory as elements of 8 and of 16 bits, swizzled by rows of so many bytes."""
    pairs, u16 = (*shape[:-1], shape[-1] // 2), np.dtype(np.uint16)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=swizzled(row, dtype)),
        plgpu.SMEM(pairs, u16, transforms=swizzled(row // 2, u16)),
    )


def transpose_pairs(source, into, halves=False, cut=None):
    """Stores 64 pairs of columns of 64 keys transposed, as the tensor cores take them; halves: 32
    of each half of 128 keys. cut: of an array of them."""
    x = plgpu.load(plgpu.transpose_ref(source, (1, 0)), layout=plgpu.Layout.WGMMA)
    x = cut(x) if cut else x
    groups = (2, 4, 8) if halves else (8, 8)
    into = into.reshape((*groups[:-1], 2, 8, _KEYS // 2))
    for odd, y in enumerate(_split(x)):
        at = (slice(None),) * (len(groups) - 1)
        into[(*at, odd)] = y.reshape((*groups, _KEYS // 2))


class Narrow:
    """What a block of attention does besides, for keys and values of 8 bits."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.v_in = Ring(plan.raw, self.v_raw_full, self.v_raw_empty)
        if plan.transposes:
            self.k_in = None
            self.v_raw, self.v_pairs = self.v_raw
            self.v_smem, self.v_words = self.v_smem
        else:
            self.k_in = Ring(plan.raw, self.k_raw_full, self.k_raw_empty)

    def run(self):
        p, me = self.plan, lax.axis_index("wg")
        counts = p.registers or (None,) * 3

        def consumer():
            self.consumer(me)
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.reads_only)

        roles = (
            (me == p.consumers + 1, "decrease", self.producer),
            (me == p.consumers, "decrease", self.converter),
            (me < p.consumers, "increase", consumer),
        )
        for (here, action, work), count in zip(roles, counts):

            def role(action=action, work=work, count=count):
                if count:
                    plgpu.set_max_registers(count, action=action)
                work()

            pl.when(here)(role)

    # ---- producer

    def fetch_keys(self, it, place):
        if self.k_in:
            self.fetch_block(self.k, self.k_raw, self.k_in, it, place)
        else:
            super().fetch_keys(it, place)

    def fetch_values(self, it, place):
        if not self.plan.pairs:
            self.fetch_block(self.v, self.v_raw, self.v_in, it, place)
            return
        ring = self.v_in
        pl.when(it >= ring.stages)(lambda: ring.await_release(it - ring.stages))
        slot = it % ring.stages

        def copy(first, size, at):
            half = pl.ds(pl.multiple_of(first % 128 // _KEYS * _KEYS, _KEYS), _KEYS)
            rows = pl.ds(pl.multiple_of(first % _KEYS, size), size)
            here = self.v_raw.at[slot, first // 128, rows, half]
            plgpu.copy_gmem_to_smem(padded(self.v, at, _KEYS), here, ring.full.at[slot])

        self.pieces(place, self.plan.value_piece, copy)

    def drain(self, it):
        more = int(self.cfg.late)
        if self.k_in:
            self.k_in.drain(it + more)
        else:
            self.drain_one(self.k_ring, it)
        self.v_in.drain(it)

    def drain_one(self, ring, it):
        """Of the ring of K: with late there is one more slot, which nobody releases."""
        for s in range(ring.stages - self.cfg.late):
            pl.when(it > s)(lambda s=s: ring.await_release(it - 1 - s))

    # ---- converter

    def converter(self):
        none = jnp.int32(0)
        t = self.tiles.tile(none)
        place = self.place_of(t)

        def tile(state):
            w, t, it, before, _ = state
            it, before = self.convert_tile(t, it, before)
            more = t < self.plan.total
            t = lax.cond(more, lambda: self.tiles.tile(w + 1), lambda: t)
            return w + 1, t, it, before, more

        start = none, t, none, place, jnp.bool_(True)
        _, _, it, place, _ = lax.while_loop(lambda state: state[-1], tile, start)
        if self.k_in:
            if self.cfg.late:
                self.widen(self.k_in, self.k_raw, self.k_ring, self.k_smem, it)
            self.drain_one(self.k_ring, it)
        self.v_ring.drain(it)

    def place_of(self, t):
        """Batch entry and first key of the first block of a tile."""
        _, _, _, b = self.tile_of(t)
        return b, jnp.int32(0)

    def convert_tile(self, t, it, before):
        """Blocks of a tile; the values of a block come a step after its keys."""
        tile, part, head, b = self.tile_of(t)
        first, count = self.blocks_of(t, tile, part)

        def step(j, carry):
            it, before = carry
            place = b, (count - 1 - j + first) * self.plan.block
            if self.k_in:
                self.widen(self.k_in, self.k_raw, self.k_ring, self.k_smem, it)
            self.convert_values(it, *before)
            return it + 1, place

        return lax.fori_loop(0, count, step, (it, before))

    def rest(self, b, row):
        """The keys from a row to the end of a batch entry; None: what is beyond it is 0."""
        there = self.x.lengths[0] or self.x.whole
        return scalar(self.keys_of(b)) - row if there else None

    def convert_values(self, it, b, row):
        rest = self.rest(b, row)
        if not self.plan.transposes:
            self.widen(self.v_in, self.v_raw, self.v_ring, self.v_smem, it, rest)
            return
        self.v_in.wait(it)
        self.v_ring.acquire(it)
        raw, slot = self.v_pairs.at[self.v_in.slot(it)], self.v_words.at[self.v_ring.slot(it)]
        for part in range(self.plan.block // (128 if self.plan.pairs else _KEYS)):
            for columns in range(1 if self.plan.pairs else self.plan.value_dim // 128):
                self.transpose(raw, slot, part, columns, rest)
        self.v_in.release(it)
        plgpu.commit_smem()
        self.v_ring.fill(it)

    def transpose(self, raw, slot, part, columns, rest):
        """64 pairs of columns of 64 keys; with pairs, 32 of each half of 128 keys."""
        pairs = self.plan.pairs
        if pairs:
            source, into, first = raw.at[part], slot.at[pl.ds(2 * part, 2)], 2 * part * _KEYS
        else:
            rows, here = pl.ds(part * _KEYS, _KEYS), pl.ds(columns * 64, 64)
            source, into = raw.at[rows, here], slot.at[part, pl.ds(columns * 128, 128)]
            first = part * _KEYS
        cut = None
        if rest is not None:
            apart = 32 if pairs else 0
            cut = functools.partial(self.cut, rest=rest - first, keys=1, apart=apart)
        transpose_pairs(source, into, pairs, cut)

    def cut(self, x, rest, keys=0, apart=0):
        """The array, 0 from key number `rest` on. keys: their dim; apart: after so many of its
        other dim comes the next one of its halves."""

        def zero(x):
            key = lax.broadcasted_iota(jnp.int32, x.shape, keys)
            if apart:
                key = key + lax.broadcasted_iota(jnp.int32, x.shape, 0) // apart * _KEYS
            return jnp.where(key < rest, x, np.zeros((), x.dtype))

        count = x.shape[keys] * (2 if apart else 1)
        return lax.cond(rest < count, zero, lambda x: x, x)

    def widen(self, source, raw, ring, into, it, rest=None):
        """A block of keys or values, as 16-bit elements."""
        source.wait(it)
        ring.acquire(it)
        raw, into, dim = raw.at[source.slot(it)], into.at[ring.slot(it)], raw.shape[-1]
        n = _WIDENED // dim  # rows of a part
        layout = plgpu.Layout.WG_STRIDED((n, dim), vec_size=8)

        def part(i, _):
            for first in (2 * i * n, (2 * i + 1) * n):
                rows = pl.ds(pl.multiple_of(first, n), n)
                x = plgpu.load(raw.at[rows], layout=layout).astype(self.x.dtype)
                into[rows] = x if rest is None else self.cut(x, rest - first)

        lax.fori_loop(0, self.plan.block // (2 * n), part, None)
        source.release(it)
        plgpu.commit_smem()
        ring.fill(it)

    # ---- consumers

    def arranged(self, p):
        if not self.plan.transposes:
            return p
        n = p.shape[1]
        p = p.reshape(64, n // 16, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(64, n)
        return plgpu.layout_cast(p, plgpu.Layout.WGMMA_8BIT)

    def add_values(self, o_acc, p, slot):
        if not self.plan.transposes:
            return super().add_values(o_acc, p, slot)
        parts = self.plan.block // _KEYS
        for i in range(parts):
            keys = p[:, i * _KEYS : (i + 1) * _KEYS]
            for n, acc in enumerate(o_acc):
                plgpu.wgmma(acc, keys, self.v_smem.at[slot, i, self.columns_of(n)].T)
        return parts * len(o_acc)

    def scale_of(self, name, b, head):
        """The scale of a head; 1 without one."""
        dims = self.x.scales[("q_scale", "k_scale", "v_scale").index(name)]
        if not dims:
            return _F32(1)
        if name != "q_scale":
            head = head // (self.x.heads // self.x.kv_heads)
        scales = getattr(self, name)
        return scales[head] if dims == 1 else scales[b, head]

    def factor_of(self, t):
        if not any(self.x.scales[:2]):
            return None
        _, _, head, b = self.tile_of(t)
        scale = self.scale_of("q_scale", b, head) * self.scale_of("k_scale", b, head)
        # not 0: hidden scores must stay far below all others
        return scale if self.x.scores.adjusted else jnp.maximum(scale * self.plan.c, LEAST)

    def factor(self, c):
        return super().factor(None if self.x.scores.adjusted else c)

    def adjust(self, now, s, fetched):
        if self.x.scores.adjusted and now.c is not None:
            s = s * now.c
        return super().adjust(now, s, fetched)

    def result(self, value, b, head):
        value = value * self.scale_of("v_scale", b, head)
        if not self.plan.transposes:
            return value
        n = self.plan.value_dim
        value = value.reshape(64, n // 16, 2, 8).transpose(0, 1, 3, 2).reshape(64, n)
        return plgpu.layout_cast(value, self.plan.left)
