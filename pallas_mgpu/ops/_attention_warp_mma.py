"""Attention (forward) for GPUs whose tensor cores take operands from registers: sm_80, sm_86, sm_89
and sm_120a.

A block is one warpgroup and has one tile of queries of a head, which stays in registers or in
shared memory. It goes through the blocks of keys: S = Q K, the softmax of S as far as it is known,
O += P V. P is S's own registers, converted. Keys and values have a ring each. The next keys are
fetched under the products of these, the next values once these values have come; so every copy has
the time of a whole step, with two slots.

Scores are masked in the last blocks of keys only: in those on the diagonal, and in one that
overhangs. O leaves through the shared memory of Q, 16 bytes of a row at a time.

With options of the scores (_attention_scores.py) a tile goes only through the blocks of keys that
one of its rows sees, and masks those that one of its rows does not see whole. The maximum that
exponents are relative to has a lower bound, so that rows which see nothing have the sum 0."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import PLAIN, Ranges, Tile
from ._attention_softmax import MASKED
from ._common import swizzled
from ._warp_mma import await_fetch, fetch, room_of_block

_F32 = np.float32
_LEAST = _F32(-1.0e37)  # what exponents are relative to, if no score is larger
_PART = 64  # columns of Q and K that a product takes from shared memory at once


class MmaAttentionConfig(NamedTuple):
    """How attention by mma.sync is tiled (sm_80, sm_86, sm_89, sm_120a). ``rows``: queries of a
    tile, 64 or 128; ``block``: keys per step, a multiple of 16 up to 128; ``stages``: slots of the
    rings of K and V, from 2. The defaults spill no registers; 128 rows do with blocks of 128 keys
    and a head_dim of 64, and with blocks above 16 and a head_dim of 128."""

    rows: int = 64
    block: int = 64
    stages: int = 2


def _bytes(dim, cfg):
    return 2 * dim * (cfg.rows + 2 * cfg.stages * cfg.block) + 256


def choose(queries, dim, target, scores=PLAIN):
    """The configuration for a number of queries and a head size: two blocks share an SM, except
    with 256 columns, whose O has the registers of both."""
    if scores.adjusted or scores.dropout:  # registers for what is computed from scores
        return MmaAttentionConfig(64, 32)
    room = room_of_block(target, 1 if dim == 256 else 2)
    wide = MmaAttentionConfig(128 if dim == 64 and queries > 64 else 64, 32 if dim == 256 else 64)
    return wide if _bytes(dim, wide) <= room else wide._replace(block=32)


def check(config, dim, target):
    c = config
    if dim not in (64, 128, 256):
        raise NotImplementedError(
            f"attention: head_dim must be 64, 128 or 256 on {target['name']}, got {dim}; pad q, k"
            " and v with zeros and give scale"
        )
    if c.rows not in (64, 128) or c.block not in range(16, 129, 16) or c.stages < 2:
        raise ValueError(
            "attention: an MmaAttentionConfig has 64 or 128 rows, a block that is a multiple of 16"
            f" up to 128 and stages from 2; got {config}"
        )
    if _bytes(dim, c) > target["smem"]:
        raise ValueError(
            f"attention: {config} takes {_bytes(dim, c)} bytes of shared memory with head_dim"
            f" {dim}, and {target['name']} has {target['smem']}"
        )


class _Block:
    """One block of the kernel, while it is traced."""

    def __init__(self, x, cfg, by_tma, refs):
        self.x, self.cfg, self.by_tma = x, cfg, by_tma
        vars(self).update(refs)
        heads = x.batch * x.heads
        tiles = pl.cdiv(x.queries, cfg.rows)
        t = lax.axis_index("tile")
        head = t % heads
        # the tiles with most keys come first
        self.row = (tiles - 1 - t // heads if x.causal else t // heads) * cfg.rows
        self.b, self.head = head // x.heads, head % x.heads
        self.kv_head = self.head // (x.heads // x.kv_heads)
        self.sign = -1 if x.scale < 0 else 1
        self.c = _F32(abs(x.scale) * math.log2(math.e))  # exp(x) is exp2(x log2 e)

    def key(self, j):
        """The first key of the block of step j."""
        return j * self.cfg.block

    # ---- copies

    def full(self, which, slot):
        return getattr(self, f"{which}_full").at[slot] if self.by_tma else None

    def fetch_keys(self, which, j, more):
        """Keys or values of block j, "k" or "v"."""
        slot = j % self.cfg.stages
        rows = pl.ds(self.key(j), self.cfg.block)
        source = getattr(self, which).at[self.b, rows, self.kv_head]
        fetch(more, self.full(which, slot), (source, getattr(self, f"{which}_smem").at[slot]))

    def next_keys(self, which, j, blocks):
        """Waits for those of block j, and starts the copy of the next ones that have a slot."""
        stages = self.cfg.stages
        await_fetch(self.full(which, j % stages), j // stages, 2 * stages - 3)
        ahead = j + (stages - 1)
        self.fetch_keys(which, ahead, ahead < blocks)

    # ---- a step

    def scores(self, q, slot):
        """S = Q K; the sums run along all columns in order."""
        x, cfg = self.x, self.cfg
        s = jnp.zeros((cfg.rows, cfg.block), jnp.float32)
        for part in range(0, x.dim, x.dim if q is not None else _PART):
            columns = pl.ds(part, x.dim if q is not None else _PART)
            k = plgpu.transpose_ref(self.k_smem.at[slot, :, columns], (1, 0))
            s = plgpu.mma(s, self.q_smem[:, columns] if q is None else q, k[...])
        return s if self.sign > 0 else -s

    def mask(self, s, j):
        x, first = self.x, j * self.cfg.block
        column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
        overhangs = x.keys % self.cfg.block != 0
        if not x.causal:
            return jnp.where(column < x.keys - first, s, MASKED) if overhangs else s
        row = lax.broadcasted_iota(jnp.int32, s.shape, 0)
        if overhangs:  # one mask: two take registers that 256 columns need
            last = jnp.minimum(row + (self.row - first), x.keys - 1 - first)
            return jnp.where(column <= last, s, MASKED)
        return jnp.where(column - row <= self.row - first, s, MASKED)

    def adjust(self, s, j):
        """Scores before the mask; plain ones stay."""
        return s

    def bounded(self, m):
        """What exponents of the rows are relative to: in plain attention each row sees a key."""
        return m

    def drop(self, p, j):
        """Probabilities that values are multiplied with."""
        return p

    def reciprocal(self, sums):
        return pl.reciprocal(sums, approx=True)

    def step(self, q, blocks, masked, j, carry):
        x, cfg = self.x, self.cfg
        m, sums, out = carry
        slot = j % cfg.stages
        self.next_keys("k", j, blocks)
        s = self.adjust(self.scores(q, slot), j)
        if masked:
            s = self.mask(s, j)
        now = jnp.maximum(m, jnp.max(s, axis=1))
        alpha = jnp.exp2((m - now) * self.c)
        p = jnp.exp2(s * self.c - _along_rows(self.bounded(now) * self.c, cfg.block))
        sums = sums * alpha + jnp.sum(p, axis=1)
        out = out * _along_rows(alpha, x.dim)
        p = self.drop(p, j)
        self.next_keys("v", j, blocks)
        return now, sums, plgpu.mma(out, p.astype(x.dtype), self.v_smem[slot])

    # ---- all steps

    def spans(self):
        """The number of steps, and (first, last, masked) of those with and without a mask."""
        x, cfg = self.x, self.cfg
        blocks, whole = pl.cdiv(x.keys, cfg.block), x.keys // cfg.block
        if x.causal:
            seen = jnp.minimum(self.row + cfg.rows, x.keys)
            blocks = (seen + (cfg.block - 1)) // cfg.block
            whole = jnp.minimum(self.row // cfg.block, whole)
        elif whole < blocks:  # one iteration that the compiler knows of is inlined, and spills
            blocks = lax.optimization_barrier(jnp.int32(blocks))
        return blocks, ((0, whole, False), (whole, blocks, True))

    def run(self):
        x, cfg = self.x, self.cfg
        blocks, spans = self.spans()
        rows = self.q.at[self.b, pl.ds(self.row, cfg.rows), self.head]
        fetch(jnp.int32(0) == 0, self.full("q", 0), (rows, self.q_smem))

        def first(s, _):
            for which in "kv":
                self.fetch_keys(which, s, s < blocks)

        lax.fori_loop(0, cfg.stages - 1, first, None)
        q = None
        if x.dim < 256:  # there are registers for it
            await_fetch(self.full("q", 0), 0, 2 * (cfg.stages - 1))
            q = self.q_smem[...]
        elif self.by_tma:
            await_fetch(self.full("q", 0), 0, 0)
        zeros = jnp.zeros((cfg.rows,), jnp.float32)
        carry = zeros + MASKED, zeros, jnp.zeros((cfg.rows, x.dim), jnp.float32)
        for first, last, masked in spans:
            if isinstance(last, int) and first == last:
                continue

            def step(j, carry, masked=masked):
                return self.step(q, blocks, masked, j, carry)

            carry = lax.fori_loop(first, last, step, carry)
        self.store(*carry)

    def store(self, m, sums, out):
        x, cfg = self.x, self.cfg
        if not self.by_tma:
            plgpu.wait_gmem_to_smem(0)
        rows = pl.ds(self.row, cfg.rows)
        out = out * _along_rows(self.reciprocal(sums), x.dim)
        self.q_smem[...] = out.astype(x.dtype)
        layout = plgpu.Layout.WG_STRIDED((cfg.rows, x.dim), vec_size=8)
        value = plgpu.load(self.q_smem, layout=layout)
        inside = x.queries % cfg.rows == 0
        if inside:
            self.o[self.b, rows, self.head] = value
        else:
            mask = lax.broadcasted_iota(jnp.int32, value.shape, 0) < x.queries - self.row
            pl.store(self.o, (self.b, rows, self.head, pl.ds(0, x.dim)), value, mask=mask)
        if x.return_lse:
            lse = (m * self.c + jnp.log2(sums)) * _F32(math.log(2))
            mask = None if inside else jnp.arange(cfg.rows) < x.queries - self.row
            pl.store(self.lse, (self.b, self.head, rows), lse, mask=mask)


class _ScoredBlock(_Block):
    """One block of a kernel with options of the scores."""

    def __init__(self, x, cfg, by_tma, refs):
        super().__init__(x, cfg, by_tma, refs)
        self.refs = refs
        self.ranges = Ranges(x, False, refs.get("low"), refs.get("high"))
        self.first, self.count = self.ranges.blocks(self.row, cfg.rows, cfg.block)
        self.seen = self.ranges.of_all(self.row, cfg.rows)
        if x.scores.adjusted:  # the scale is in the scores
            self.sign, self.c = 1, x.scores.factor(x.scale)

    def key(self, j):
        return (self.first + j) * self.cfg.block

    def spans(self):
        return self.count, ((0, self.count, True),)

    def tile(self, j):
        """The part of the scores of step j."""
        shape = self.cfg.rows, self.cfg.block
        where = self.b, self.head, self.row, self.key(j)
        return Tile(self.x, self.refs, *where, shape, by_keys=False)

    def adjust(self, s, j):
        return self.tile(j).adjust(s)[0]

    def drop(self, p, j):
        return self.tile(j).drop(p)

    def mask(self, s, j):
        key, (low, high) = self.key(j), self.seen

        def hide(s):
            return jnp.where(self.ranges.keep(self.row, key, s.shape), s, MASKED)

        hidden = (key < low) | (key + self.cfg.block > high)
        return lax.cond(hidden, hide, lambda s: s, s)

    def bounded(self, m):
        return jnp.maximum(m, _LEAST)

    def reciprocal(self, sums):
        """0 for rows that see nothing."""
        return jnp.where(sums == 0, _F32(0), pl.reciprocal(sums, approx=True))


def _along_rows(x, width):
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def _scratch(x, cfg, by_tma):
    found = {"q_smem": plgpu.SMEM((cfg.rows, x.dim), x.dtype, transforms=swizzled(64, x.dtype))}
    for which in "kv":
        found[f"{which}_smem"] = plgpu.SMEM(
            (cfg.stages, cfg.block, x.dim), x.dtype, transforms=swizzled(64, x.dtype)
        )
        if by_tma:
            found[f"{which}_full"] = plgpu.Barrier(num_barriers=cfg.stages)
    if by_tma:
        found["q_full"] = plgpu.Barrier(num_barriers=1)
    return found


@cached
def kernel(x, cfg, target, interpret):
    """The kernel for a Problem. target: name of the GPU it is planned for."""
    gpu = _core.target(target)
    check(cfg, x.dim, gpu)
    cfg = cfg._replace(stages=min(cfg.stages, pl.cdiv(x.keys, cfg.block) + 1))
    by_tma = "CP_ASYNC" not in gpu["features"]

    how = x, cfg, by_tma
    body = x.body(functools.partial(_Block, *how), functools.partial(_ScoredBlock, *how))
    return plgpu.kernel(
        body,
        out_type=x.results,
        scratch_types=_scratch(x, cfg, by_tma),
        grid=(x.batch * x.heads * pl.cdiv(x.queries, cfg.rows),),
        grid_names=("tile",),
        kernel_name="attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
