"""Rotary embedding inside attention.

A block of attention reads its own rows once, so rotating them there is free: a lane of a wgmma
layout has both elements of a pair, and no data move. On Hopper the queries of the forward are
rotated in registers, at the first block of their tile, and so are dQ and dK before they are
rounded. The rows that pass through a ring are read again by each tile: rotating those in shared
memory would repeat the arithmetic for each tile of queries, and read as many bytes of angles as of
keys from the L2 cache, which the rings already keep busy. So a kernel rotates the keys once (for
the gradients: both sides), which moves their bytes twice.

On other GPUs kernels before attention rotate queries and keys, and kernels after the gradients."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._batch import Batched

from ._common import FLOATS, PartOfSeveral, SeveralKernels
from ._open_rows import ANY_ROWS, ENTRIES, entries, is_static, together, views
from .rotary import kernel_of

_PART = 8  # columns that are rotated at a time: more would need more registers
_MOST = 128  # head_dim: with longer rows, a block has no registers left for the rotation
_ROWS = 64  # of a warpgroup's array


def check(name, q, k, cos, sin, bottom_right, packed):
    """The position of the first query and the rows of the tables; (0, 0) without them."""
    if (cos is None) != (sin is None):
        raise ValueError(f"{name}: cos and sin must be given together")
    if cos is None:
        return 0, 0
    queries, keys, dim = q.shape[1], k.shape[1], q.shape[3]
    first = keys - queries if bottom_right and not packed else 0
    if first < 0:
        raise ValueError(
            f"{name}: cos and sin with bottom_right need as many keys as queries, got {queries}"
            f" queries and {keys} keys"
        )
    length = max(first + queries, keys)
    for what, x in (("cos", cos), ("sin", sin)):
        if x.dtype.name not in FLOATS:
            raise TypeError(f"{name}: {what} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.ndim != 2 or x.shape[0] < length or x.shape[1] * 2 != dim or x.shape != cos.shape:
            raise ValueError(
                f"{name}: {what} must have the shape (length, {dim // 2}) with a length of at"
                f" least {length}, the same for both; got {x.shape}"
            )
    return first, cos.shape[0]


def rotate(value, refs, x, row, inverse=False):
    """Rows of queries, keys or their gradients, in the dtype of the problem: an array (64, width)
    in the layout of wgmma whose first row has the position `row`."""
    half, left, right = x.dim // 2, [], []
    n = math.gcd(half, _PART)
    keep = row + lax.broadcasted_iota(jnp.int32, (_ROWS, n), 0) < x.angles
    for c in range(0, half, n):
        at = pl.ds(row, _ROWS), pl.ds(c, n)
        cos, sin = (
            plgpu.load(refs[name], at, layout=plgpu.Layout.WGMMA, mask=keep, other=0.0)
            for name in ("cos", "sin")
        )
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
        a, b = (value[:, k : k + n].astype(jnp.float32) for k in (c, half + c))
        sin = -sin if inverse else sin
        left.append((a * cos - b * sin).astype(x.dtype))
        right.append((b * cos + a * sin).astype(x.dtype))
    rest = [value[:, x.dim :].astype(x.dtype)] if value.shape[1] > x.dim else []
    return jnp.concatenate([*left, *right, *rest], axis=1)


def rotation(x, of_keys, interpret, inverse=False):
    """Kernel: rotates queries or keys of a problem."""
    rows, heads = (x.keys, x.kv_heads) if of_keys else (x.queries, x.heads)
    first = 0 if of_keys else x.first
    shape = x.batch, rows, heads, x.dim
    return kernel_of(shape, x.dtype, inverse, None, interpret, first)


def _of_any_length(x, of_keys, interpret):
    """The same, perhaps for any length of the arrays and of the tables."""
    rows, heads = (x.keys, x.kv_heads) if of_keys else (x.queries, x.heads)
    shape, first = (x.batch, rows, heads, x.dim), 0 if of_keys else x.first
    kind, total = ("rotation", heads, x.dim, x.dtype, interpret), x.batch * rows
    static = total > ANY_ROWS[1] or x.batch > ENTRIES
    if static or is_static(kind, (*shape[:2], first)):
        return rotation(x, of_keys, interpret)
    whole, batch, length = plgpu.dim("N", max=ANY_ROWS[1]), entries(), plgpu.dim("L")
    each, sizes = (batch, whole // batch, heads, x.dim), {"length": length, "entries": batch}
    kernel = kernel_of(each, x.dtype, False, None, interpret, rows=whole, **sizes)
    operands = (1, total, heads, x.dim), None, None

    def alone():
        return rotation(x, of_keys, interpret)

    kernel = views(kernel, operands, (shape,), alone, (x.batch,))
    return _FromPosition(kernel, first, alone) if first else kernel


class _FromPosition(PartOfSeveral):
    """A rotation of any length whose first row has another position than 0: that of the rest of
    the tables. alone: as of `views`."""

    def __init__(self, kernel, first, alone):
        self.kernel, self.first, self.alone = kernel, first, alone

    def __call__(self, x, cos, sin, stream=None):
        if any(isinstance(y, Batched) for y in (x, cos, sin)):
            return self.alone()(x, cos, sin, stream=stream)
        return self.kernel(x, *tables_from(self.first, (cos, sin)), stream=stream)


def tables_from(first, tables):
    """The rest of the tables of angles, whose first row is that of a position."""
    return [table[first:] for table in tables] if first else tables


class Rotated(SeveralKernels):
    """Attention to rotated keys. queries: does a kernel before it rotate these, too?"""

    def __init__(self, x, kernel, queries, interpret):
        self.attention, self.keys = kernel, _of_any_length(x, True, interpret)
        self.queries = _of_any_length(x, False, interpret) if queries else None

    def __call__(self, q, k, v, *others, out=None, stream=None):
        *others, cos, sin = others
        k = self.keys(k, cos, sin, stream=stream)
        if self.queries:
            q = self.queries(q, cos, sin, stream=stream)
        else:
            others += [cos, sin]
        return self.attention(q, k, v, *others, out=out, stream=stream)


def with_angles(x, kernel, angles, fused, interpret):
    """What attends with the angles of `check`. kernel: makes the kernel of a problem; fused: it may
    rotate its queries."""
    first, length = angles
    if not length:
        return kernel(x)
    x, fused = x._replace(first=first), fused and x.dim % 16 == 0 and x.dim <= _MOST
    kernel = kernel(x._replace(angles=length) if fused else x)
    return Rotated(x, kernel, not fused, interpret)


class Gradients(PartOfSeveral):
    """What the gradients of a problem do besides: q and k are rotated before. apart: kernels after
    them rotate dq and dk back, which are otherwise rotated before they are stored."""

    def __init__(self, x, apart, interpret):
        self.there, self.back = x.angles > 0, None
        if self.there:
            sides = False, True
            with together(False):  # which takes no longer
                self.rotate = [_of_any_length(x, of_keys, interpret) for of_keys in sides]
        if self.there and apart:
            self.back = [rotation(x, of_keys, interpret, inverse=True) for of_keys in sides]

    def __call__(self, q, k, others, stream):
        """The arrays after the rotation, the tables for kernels that rotate themselves, and what
        finishes (dq, dk, dv)."""
        if not self.there:
            return q, k, (), lambda *found: found
        angles = others[-2:]
        q, k = (f(x, *angles, stream=stream) for f, x in zip(self.rotate, (q, k)))

        def back(dq, dk, dv):
            dq, dk = (f(x, *angles, out=x, stream=stream) for f, x in zip(self.back, (dq, dk)))
            return dq, dk, dv

        return q, k, *(((), back) if self.back else (angles, lambda *found: found))
