"""Cross entropy of long, aligned rows: parts of a row pass through shared memory.

A block takes a row. TMA brings several parts ahead, so that enough bytes are on their way however
few registers a lane has. A lane takes 16 bytes at a time and keeps one maximum and one sum of
exponentials for each of the pieces that it has of a part: the sums are scaled to a new maximum once
for a piece, not once for an element."""

import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches
from ._open_rows import in_shapes

_F32 = np.float32
_PART = 2048
_STAGES = 4
LOW = _F32(-2.0e38)  # times LOG2E it is finite
LOG2E = _F32(math.log2(math.e))


def fits(x):
    """Are rows long enough, and aligned as TMA wants them? x: a Problem."""
    return x.n > 2 * _PART and x.n * x.dtype.itemsize % 16 == 0


class _Parts:
    """The parts of a row of logits, while a kernel is traced."""

    def __init__(self, x, logits, row, slots, full):
        self.x, self.logits, self.row, self.slots, self.full = x, logits, row, slots, full
        self.whole, self.count = x.n // _PART, pl.cdiv(x.n, _PART)
        self.vec = 16 // x.dtype.itemsize
        self.shape = _PART // self.vec, self.vec  # of a part: pieces, elements
        tiling = plgpu.Tiling(((128, self.vec), (32, self.vec)))
        self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
        lax.fori_loop(0, min(_STAGES, self.count), self._fetch, None)

    def _fetch(self, k, _=None):
        at = pl.ds(self.row, 1), pl.ds(k * _PART, _PART)
        slot = k % _STAGES
        plgpu.copy_gmem_to_smem(self.logits.at[at], self.slots.at[slot], self.full.at[slot])

    def load(self, k, last=False):
        """Part k, float32; its slot gets a later one."""
        slot = k % _STAGES
        plgpu.barrier_wait(self.full.at[slot], phase=k // _STAGES)
        slots = self.slots.reshape((_STAGES, *self.shape))
        value = plgpu.load(slots.at[slot], layout=self.layout).astype(jnp.float32)
        if not last:
            pl.when(k + _STAGES < self.count)(lambda: self._fetch(k + _STAGES))
        return value

    def place(self, k):
        """The class of each element of part k."""
        of_piece = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        inside = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)
        return k * _PART + of_piece * self.vec + inside

    def each(self, whole, last, carry):
        """whole(k, carry) for the parts that fill a slot, then last(k, carry) for the rest."""
        carry = lax.fori_loop(0, self.whole, whole, carry)
        return last(jnp.int32(self.whole), carry) if self.whole < self.count else carry


@cached
def forward(x, interpret):
    def body(logits, targets, loss, lse_out, slots, full):
        overlap_launches()
        i = lax.axis_index("row")
        parts = _Parts(x, logits, i, slots, full)

        def add(value, carry):
            top, total = carry
            new = jnp.maximum(top, jnp.max(value, axis=1))
            terms = jnp.exp2(value * LOG2E - lax.broadcast_in_dim(new * LOG2E, value.shape, [0]))
            return new, total * jnp.exp2((top - new) * LOG2E) + jnp.sum(terms, axis=1)

        def whole(k, carry):
            return add(parts.load(k), carry)

        def last(k, carry):
            value = parts.load(k, last=True)
            return add(jnp.where(parts.place(k) < x.n, value, LOW), carry)

        of_pieces = parts.layout.reduce(1)
        start = (
            plgpu.layout_cast(jnp.full(parts.shape[:1], LOW), of_pieces),
            plgpu.layout_cast(jnp.zeros(parts.shape[:1], jnp.float32), of_pieces),
        )
        tops, totals = parts.each(whole, last, start)
        top = jnp.max(tops)
        lse = top + jnp.log(jnp.sum(totals * jnp.exp2((tops - top) * LOG2E)))
        loss[i], lse_out[i] = x.loss(logits, i, targets[i], lse), lse

    out, shapes = plgpu.ShapeDtypeStruct((x.rows,), _F32), ((x.rows, x.n), (x.rows,))
    return _kernel(x, body, (out, out), shapes, interpret, "cross_entropy")


@cached
def backward(x, interpret):
    def body(grad, logits, targets, lse, out, slots, full):
        overlap_launches()
        i = lax.axis_index("row")
        parts = _Parts(x, logits, i, slots, full)
        target, total = targets[i], lse[i] * LOG2E
        factor = jnp.where(target == x.ignore, _F32(0), grad[i].astype(jnp.float32))
        pieces = out.reshape((out.shape[0], x.n // parts.vec, parts.vec))

        def part(k, last):
            here = (parts.place(k) == target).astype(jnp.float32)
            value = jnp.exp2(parts.load(k, last) * LOG2E - total) - here
            value = (value * factor).astype(out.dtype)
            at = i, pl.ds(k * parts.shape[0], parts.shape[0]), slice(None)
            if last:
                pl.store(pieces, at, value, mask=parts.place(k) < x.n)
            else:
                pieces[at] = value

        parts.each(lambda k, _: part(k, False), lambda k, _: part(k, True), None)

    out = plgpu.ShapeDtypeStruct((x.rows, x.n), x.dtype)
    shapes = (x.rows,), (x.rows, x.n), (x.rows,), (x.rows,)
    return _kernel(x, body, out, shapes, interpret, "cross_entropy_backward")


def _kernel(x, body, out_type, shapes, interpret, name):
    """shapes: of the operands."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((_STAGES, 1, _PART), x.dtype),
            plgpu.Barrier(num_barriers=_STAGES),
        ],
        grid=(x.rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **in_shapes(*shapes),
    )
