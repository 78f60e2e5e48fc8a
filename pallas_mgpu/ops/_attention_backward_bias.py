"""The gradient of attention by its bias: that of the scores, summed along the dims of size 1.

A block has a tile of the bias, 64 queries (or all) by 64 keys (or all), and goes over everything
that the tile is added to: batch entries, heads, tiles of queries, tiles of keys. It computes the
scores and their gradients again and keeps the sum in registers, so that nothing is added to memory
and results repeat bit for bit. Blocks are small, so that several share an SM, and one multiplies
while others load."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import Ranges, Tile
from ._common import overlap_launches

_F32 = np.float32
_SIDE = 64  # of a tile


def _scratch(x):
    def smem():
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((_SIDE, x.dim), x.dtype, transforms=transforms)

    names = "q_smem", "k_smem", "grad_smem", "v_smem"
    return {name: smem() for name in names} | {"full": plgpu.Barrier(num_arrivals=4)}


class _Block:
    """One block, while it is traced."""

    def __init__(self, x, refs):
        self.x, self.refs = x, refs
        vars(self).update(refs)
        self.ranges = Ranges(x, False, refs.get("low"), refs.get("high"))
        dims = x.batch, x.heads, pl.cdiv(x.queries, _SIDE), pl.cdiv(x.keys, _SIDE)
        # along each dim: the number of passes of this block
        self.passes = [n if size == 1 else 1 for n, size in zip(dims, x.scores.bias)]
        self.place = [lax.axis_index(name) for name in ("batch", "head", "query", "key")]

    def run(self):
        overlap_launches()
        total, shape = 1, (_SIDE, _SIDE)
        for n in self.passes:
            total *= n
        start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        self.save(lax.fori_loop(0, total, self.step, start))

    def step(self, it, total):
        """Adds the gradients of one tile of pairs of one head."""
        rest, at = it, []
        for first, n in reversed(list(zip(self.place, self.passes))):
            at.insert(0, first + lax.rem(rest, n) if n > 1 else first)
            rest = lax.div(rest, n) if n > 1 else rest
        b, h, row, column = at[0], at[1], at[2] * _SIDE, at[3] * _SIDE
        low, high = self.ranges.of_tile(row, _SIDE)
        seen = (column < high) & (column + _SIDE > low)
        return lax.cond(seen, lambda t: t + self.gradient(b, h, row, column), lambda t: t, total)

    def gradient(self, b, h, row, column):
        x, kv = self.x, h // self.x.group
        queries, keys = pl.ds(row, _SIDE), pl.ds(column, _SIDE)
        for source, buffer, at in (
            (self.q, self.q_smem, (b, queries, h)),
            (self.k, self.k_smem, (b, keys, kv)),
            (self.grad, self.grad_smem, (b, queries, h)),
            (self.v, self.v_smem, (b, keys, kv)),
        ):
            plgpu.copy_gmem_to_smem(source.at[at], buffer, self.full)
        shape, layout = (_SIDE, _SIDE), plgpu.Layout.WGMMA.reduce(1)
        lse, delta = (
            lax.broadcast_in_dim(plgpu.load(ref.at[b, h, queries], layout=layout), shape, [0])
            for ref in (self.lse, self.delta)
        )
        plgpu.barrier_wait(self.full)

        def products(s_acc, p_acc):
            plgpu.wgmma(s_acc, self.q_smem, self.k_smem.T)
            plgpu.wgmma(p_acc, self.grad_smem, self.v_smem.T)
            tile = Tile(x, self.refs, b, h, row, column, shape, by_keys=False)
            s, _ = tile.adjust(plgpu.wgmma_accumulator_load(s_acc, wait_n=0))
            probabilities = jnp.exp2(s - lse)
            there = self.ranges.keep(row, column, shape)
            probabilities = jnp.where(there, probabilities, _F32(0))
            dp = tile.drop(plgpu.wgmma_accumulator_load(p_acc, wait_n=0))
            return probabilities * (dp - delta)

        return pl.run_scoped(products, *[plgpu.ACC(shape)] * 2)

    def save(self, total):
        dims, at, sizes = self.x.scores.bias, [], []
        for axis in (1, 0):
            if dims[2 + axis] == 1:
                total = jnp.sum(total, axis=axis)
        for place, size in zip(self.place[2:], dims[2:]):
            if size > 1:
                at.append(pl.ds(place * _SIDE, _SIDE))
                sizes.append((place, size))
            else:
                at.append(0)
        keep = None
        for axis, (place, size) in enumerate(sizes):
            if size % _SIDE:
                i = lax.broadcasted_iota(jnp.int32, total.shape, axis)
                inside = i < size - place * _SIDE
                keep = inside if keep is None else keep & inside
        where = *self.place[:2], *at
        total = total.astype(self.dbias.dtype)
        if keep is None:
            self.dbias[where] = total
        else:
            pl.store(self.dbias, where, total, mask=keep)


@cached
def bias_gradient(x, dtype, interpret):
    """The kernel of a Problem; operands as those of the kernel for dQ."""
    dims = x.scores.bias

    def body(grad, q, k, v, lse, delta, *others, **scratch):
        refs = dict(grad=grad, q=q, k=k, v=v, lse=lse, delta=delta) | scratch
        refs |= dict(zip((*x.scores.kernel_operands, "dbias"), others, strict=True))
        _Block(x, refs).run()

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(dims, dtype),
        scratch_types=_scratch(x),
        grid=(dims[0], dims[1], pl.cdiv(dims[2], _SIDE), pl.cdiv(dims[3], _SIDE)),
        grid_names=("batch", "head", "query", "key"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="attention_backward_bias",
    )
