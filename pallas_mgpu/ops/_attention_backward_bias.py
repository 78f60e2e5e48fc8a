"""The gradient of attention by its bias: that of the scores, summed along the dims of size 1.

A block has a tile of the bias, 64 queries (on Blackwell 128, or all) by 64 keys (or all), and goes
over everything that the tile is added to: batch entries, heads, tiles of queries, tiles of keys. It
computes the scores and their gradients again and keeps the sum in registers, so that nothing is
added to memory and results repeat bit for bit. Blocks are small, so that several share an SM, and
one multiplies while others load."""

import functools
import math
import operator

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_backward_seven import rows_at, shapes_of_operands
from ._attention_scores import Ranges, Tile, rows_in, scalar
from ._common import overlap_launches, swizzled

_F32 = np.float32
_KEYS = 64  # of a tile


def _is_one(size):
    """Is it 1 for sure?"""
    return isinstance(size, int) and size == 1


class _Block:
    """One block, while it is traced."""

    rows = 64  # queries of a tile
    layout = plgpu.Layout.WGMMA

    def __init__(self, x, refs):
        self.x, self.refs = x, refs
        vars(self).update(refs)
        ranges = refs.get("low"), refs.get("high")
        self.ranges = Ranges(x, False, *ranges, exact=x.is_open, layout=self.layout)
        dims = x.batch, x.heads, pl.cdiv(x.queries, self.rows), pl.cdiv(x.keys, _KEYS)
        # along each dim: the number of passes of this block
        self.passes = [n if _is_one(size) else 1 for n, size in zip(dims, x.scores.bias)]
        if isinstance(x.scores.bias[0], plgpu.Dim):  # 1 or all
            self.passes[0] = x.batch // x.scores.bias[0]
        self.place = [lax.axis_index(name) for name in ("batch", "head", "query", "key")]

    @classmethod
    def scratch(cls, x):
        width = pl.cdiv(x.dim, 16) * 16  # elements of a row on the chip

        def smem(rows):
            transforms = swizzled(math.gcd(width, 64), x.dtype)
            return plgpu.SMEM((rows, width), x.dtype, transforms=transforms)

        rows = {"q_smem": cls.rows, "k_smem": _KEYS, "grad_smem": cls.rows, "v_smem": _KEYS}
        found = {name: smem(n) for name, n in rows.items()}
        return found | {"full": plgpu.Barrier(num_arrivals=4)}

    def run(self):
        overlap_launches()
        total, shape = 1, (self.rows, _KEYS)
        for n in self.passes:
            total *= n
        start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.layout)
        self.save(lax.fori_loop(0, total, self.step, start))

    def step(self, it, total):
        """Adds the gradients of one tile of pairs of one head."""
        rest, at = it, []
        for first, n in reversed(list(zip(self.place, self.passes))):
            at.insert(0, first if _is_one(n) else first + lax.rem(rest, scalar(n)))
            rest = rest if _is_one(n) else lax.div(rest, scalar(n))
        b, h, row, column = at[0], at[1], at[2] * self.rows, at[3] * _KEYS
        low, high = self.ranges.of_tile(row, self.rows)
        seen = (column < high) & (column + _KEYS > low)
        return lax.cond(seen, lambda t: t + self.gradient(b, h, row, column), lambda t: t, total)

    def gradient(self, b, h, row, column):
        x, kv = self.x, h // self.x.group
        queries = rows_in(x, b, row, self.rows, x.queries)
        keys = rows_in(x, b, column, _KEYS, x.keys)
        columns = pl.ds(0, self.q_smem.shape[1]) if x.dim % 16 else slice(None)
        place = b, h, row, column
        for source, buffer, at in (
            (self.q, self.q_smem, (*queries, h)),
            (self.k, self.k_smem, (*keys, kv)),
            (self.grad, self.grad_smem, (*queries, h)),
            (self.v, self.v_smem, (*keys, kv)),
        ):
            plgpu.copy_gmem_to_smem(source.at[*at, columns], buffer, self.full)
        layout = self.layout.reduce(1)
        bias = self.fetch(place)
        at = rows_at(x, b, h, row, self.rows, self.rows)
        lse, delta = (plgpu.load(ref.at[at], layout=layout) for ref in self.statistics)
        plgpu.barrier_wait(self.full)
        return self.of_products(place, lse, delta, bias)

    @property
    def statistics(self):
        return self.lse, self.delta

    def tile(self, place, shape):
        """The scores of pairs from (batch, head, query, key) on."""
        return Tile(self.x, self.refs, *place, shape, by_keys=False, layout=self.layout)

    def fetch(self, place):
        """The bias of the pairs, which arrives together with the operands of the products."""
        return self.tile(place, (self.rows, _KEYS)).fetch()

    def of_products(self, place, lse, delta, bias):
        shape = self.rows, _KEYS

        def products(s_acc, p_acc):
            plgpu.wgmma(s_acc, self.q_smem, self.k_smem.T)
            plgpu.wgmma(p_acc, self.grad_smem, self.v_smem.T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            later = functools.partial(plgpu.wgmma_accumulator_load, p_acc, wait_n=0)
            return self.of_scores(place, s, later, lse, delta, bias)

        return pl.run_scoped(products, *[plgpu.ACC(shape)] * 2)

    def of_scores(self, place, s, dp, lse, delta, bias):
        """The gradients of scores, from S and what loads dP of the pairs at (batch, head, query,
        key)."""
        lse, delta = (lax.broadcast_in_dim(x, s.shape, [0]) for x in (lse, delta))
        tile = self.tile(place, s.shape)
        s, _ = tile.adjust(s, bias)
        found = jnp.exp2(s - lse) * (tile.drop(dp()) - delta)
        (row, column), (rows, columns) = place[2:], s.shape
        low, high = self.ranges.of_all(row, rows)
        # rows of the next batch entry may hold anything
        return lax.cond(
            (column < low) | (column + columns > high),
            lambda v: jnp.where(self.ranges.keep(row, column, v.shape), v, _F32(0)),
            lambda v: v,
            found,
        )

    def save(self, total):
        dims, at, sizes = self.x.scores.bias, [], []
        for axis in (1, 0):
            if _is_one(dims[2 + axis]):
                total = jnp.sum(total, axis=axis)
        if self.x.is_open:
            return self.save_in_row(total)
        for place, size, side in zip(self.place[2:], dims[2:], (self.rows, _KEYS)):
            if size > 1:
                at.append(pl.ds(place * side, side))
                sizes.append((place * side, size, side))
            else:
                at.append(0)
        keep = None
        for axis, (start, size, side) in enumerate(sizes):
            if size % side:
                i = lax.broadcasted_iota(jnp.int32, total.shape, axis)
                inside = i < size - start
                keep = inside if keep is None else keep & inside
        where = *self.place[:2], *at
        total = total.astype(self.dbias.dtype)
        if keep is None:
            self.dbias[where] = total
        else:
            pl.store(self.dbias, where, total, mask=keep)

    def save_in_row(self, total):
        """The same where all of the bias is one row, since its lengths are not known, of so many
        neighbours each."""
        dims, at, keep, overhangs = self.x.scores.bias, jnp.int32(0), None, []
        pair = self.x.scores.bias_pair
        for place, size in zip(self.place[:2], dims[:2]):
            at = at if _is_one(size) else at * scalar(size) + place
        there = [axis for axis in (0, 1) if not _is_one(dims[2 + axis])]
        total = total.astype(self.dbias.dtype)
        if pair > 1:
            total = total.reshape((self.rows, _KEYS // pair, pair))
        shape = total.shape[: len(there)]
        for k, axis in enumerate(there):
            side, part = (self.rows, _KEYS)[axis], pair if axis else 1
            first, size = self.place[2 + axis] * side, scalar(dims[2 + axis])
            i = first // part + lax.broadcasted_iota(jnp.int32, shape, k)
            inside = i < size // part
            keep = inside if keep is None else keep & inside
            at = at * (size // part) + i
            overhangs.append(first + side > size)
        if not there:
            self.dbias[at] = total
            return
        if pair > 1:
            keep = lax.broadcast_in_dim(keep, total.shape, [0, 1])
        save = functools.partial(pl.store, self.dbias, (at, slice(None))[:pair], total)
        lax.cond(functools.reduce(operator.or_, overhangs), lambda: save(mask=keep), lambda: save())


class _TensorMemoryBlock(_Block):
    """One block on Blackwell: S and dP in tensor memory, a query a lane."""

    rows = 128
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE

    @classmethod
    def scratch(cls, x):
        found = super().scratch(x)
        found |= dict.fromkeys(("s_acc", "p_acc"), plgpu.TMEM((cls.rows, _KEYS), jnp.float32))
        return found | {"done": plgpu.Barrier(orders_tensor_core=True)}

    def fetch(self, place):
        """Nothing: a few columns at a time are read later."""

    def of_products(self, place, lse, delta, bias):
        plgpu.tcgen05_mma(self.s_acc, self.q_smem, self.k_smem.T, accumulate=False)
        plgpu.tcgen05_mma(self.p_acc, self.grad_smem, self.v_smem.T, self.done, accumulate=False)
        plgpu.barrier_wait(self.done)
        parts, n = [], 16  # a few registers at a time
        for c in range(0, _KEYS, n):
            s, later = (
                functools.partial(plgpu.async_load_tmem, acc.at[:, c : c + n], layout=self.layout)
                for acc in (self.s_acc, self.p_acc)
            )
            here = *place[:3], place[3] + c
            parts.append(
                lax.optimization_barrier(self.of_scores(here, s(), later, lse, delta, bias))
            )
        plgpu.wait_load_tmem()
        return jnp.concatenate(parts, axis=1)


@cached
def bias_gradient(x, dtype, interpret, on_blackwell=False):
    """The kernel of a Problem; operands as those of the kernel for dQ."""
    dims, block = x.scores.bias, _TensorMemoryBlock if on_blackwell else _Block

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip((*x.scores.kernel_operands, *x.others, "dbias"), others, strict=True))
        block(x, refs).run()

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.scores.open_shape if x.is_open else dims, dtype),
        scratch_types=block.scratch(x),
        grid=(dims[0], dims[1], pl.cdiv(dims[2], block.rows), pl.cdiv(dims[3], _KEYS)),
        grid_names=("batch", "head", "query", "key"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="attention_backward_bias",
        **shapes_of_operands(x, False),
    )
