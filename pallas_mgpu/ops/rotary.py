"""Rotary position embedding: pairs of elements of a head are rotated by angles of the position.

Element i of the first half of a head and element i of the second half are a pair. A block takes a
few positions of a head, or with a weight of up to four heads, one after the other. The weight is
that of a norm before the rotation (QK-norm): each head is divided by the root of its mean square. A
row of a tile is a head, so its statistics need no other block.

The gradient is the rotation by the opposite angles, and then, with a weight, that of the norm.
Blocks of that kernel take several tiles, and add up the gradient of the weight over them in
registers; further kernels add up those sums, always in the same order."""

import functools
import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import ANY_ROWS, better, bucket_of, in_shapes, is_static, rows_of, views
from .norms_backward import WithSums, sums_of_rows
from .quantize import layout_of

_F32 = np.float32
_TILE = 2048  # elements of half a tile
_TILE_BACKWARD = 1024  # of the gradient with a weight, whose sums take registers, too
_HEADS = 4  # of a block with a norm
_VECTOR = 8  # elements of a lane side by side, where a norm sums over the lanes of a head
_EDGES = 0, 512, ANY_ROWS[1]  # of numbers of rows that share a program of that gradient
_RESIDENT = 5  # blocks of an SM, of the gradient with a weight


class _Tiles:
    """Tiles of a few positions of a head."""

    def __init__(self, shape, normed, size=_TILE, first=0, whole=False):
        """normed: are there sums over a head? Lanes of a warp then have it, if they can. first:
        the position of the first row. whole: are the batch entries one after the other in one?"""
        self.batch, self.length, self.heads, dim = shape
        self.first, self.whole = first, whole
        self.half, self.layout = dim // 2, None
        self.height = max(1, min(size // self.half, _sizes.most(self.length)))
        lanes, rest = divmod(self.half, _VECTOR)
        if normed and rest == 0 and lanes in (2, 4, 8, 16, 32):
            self.layout, at_once = layout_of(self.half, _VECTOR), 128 // lanes
            self.height = max(size // self.half // at_once, 1) * at_once
        self.of_head = pl.cdiv(self.length, self.height)
        self.count = self.batch * self.of_head * self.heads

    def at(self, number):
        """Tile of that number; those of one position follow each other."""
        head, rest = number % self.heads, number // self.heads
        return _Tile(self, rest // self.of_head, rest % self.of_head, head)


class _Tile:
    """One of them, while a kernel is traced. Arrays are pairs, of both halves of heads."""

    def __init__(self, tiles, batch, tile, head):
        self.tiles, self.batch, self.head = tiles, batch, head
        start, shape = tile * tiles.height, (tiles.height, tiles.half)
        self.place = batch, pl.ds(start, tiles.height)
        if tiles.whole:
            self.place = 0, pl.ds(batch * tiles.length + start, tiles.height)
        self.rows, self.shape, self.keep = pl.ds(start, tiles.height), shape, None
        self.positions = pl.ds(start + tiles.first, tiles.height) if tiles.first else self.rows
        if _sizes.is_open([tiles.length]) or tiles.length % tiles.height:
            index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tiles.layout)
            self.keep = index < tiles.length - start

    def _load(self, ref, at):
        value = ref[at] if self.keep is None else pl.load(ref, at, mask=self.keep, other=0.0)
        layout = self.tiles.layout
        value = value if layout is None else plgpu.layout_cast(value, layout)
        return value.astype(jnp.float32)

    def _places(self):
        half = self.tiles.half
        return [(*self.place, self.head, pl.ds(k, half)) for k in (0, half)]

    def load(self, ref):
        return [self._load(ref, at) for at in self._places()]

    def store(self, ref, values):
        for at, value in zip(self._places(), values):
            value = value.astype(ref.dtype)
            if self.keep is None:
                ref[at] = value
            else:
                pl.store(ref, at, value, mask=self.keep)

    def angles(self, cos, sin, inverse):
        """Cosines and sines, which all heads share."""
        c, s = (self._load(ref, (self.positions, pl.ds(0, self.tiles.half))) for ref in (cos, sin))
        return c, -s if inverse else s

    @staticmethod
    def rotate(values, angles):
        (left, right), (c, s) = values, angles
        return [left * c - right * s, right * c + left * s]

    def weight(self, ref):
        half = self.tiles.half
        parts = (ref[pl.ds(k, half)].astype(jnp.float32) for k in (0, half))
        return [lax.broadcast_in_dim(w, self.shape, [1]) for w in parts]

    def mean(self, pair):
        """Of both halves of each head, as columns."""
        left, right = pair
        return jnp.sum(left + right, axis=1, keepdims=True) * _F32(0.5 / self.tiles.half)

    def normal(self, values, eps):
        """The factor of each head, and the heads times it."""
        factor = lax.rsqrt(self.mean([v * v for v in values]) + _F32(eps))
        return factor, [v * factor for v in values]


@cached
def kernel_of(shape, dtype, inverse, eps, interpret, first=0, rows=None, length=None, entries=None):
    """eps: of the norm, which is there unless it is None. first: the position of the first row;
    the tables of angles may be longer. rows: of all batch entries, which are one after the other
    where their number and length are known later. length: of the tables, if it is another one and
    known later; entries: their number then, which is the extent of the last operand."""
    tiles = _Tiles(shape, eps is not None, first=first, whole=rows is not None)
    of_arrays = shape if rows is None else (1, rows, *shape[2:])
    heads = math.gcd(tiles.heads, _HEADS) if eps is not None else 1  # of a block

    def body(x, cos, sin, *refs):
        overlap_launches()
        batch, tile, first = (lax.axis_index(name) for name in ("batch", "tile", "head"))
        t = _Tile(tiles, batch, tile, first * heads)
        angles = t.angles(cos, sin, inverse)

        def one(k, _):
            t.head = first * heads + k
            values = t.load(x)
            if eps is not None:
                weight, normal = t.weight(refs[0]), t.normal(values, eps)[1]
                values = [v * w for v, w in zip(normal, weight)]
            t.store(refs[-1], t.rotate(values, angles))

        if heads == 1:
            one(0, None)
        else:
            lax.fori_loop(0, heads, one, None)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(of_arrays, dtype),
        grid=(tiles.batch, tiles.of_head, tiles.heads // heads),
        grid_names=("batch", "tile", "head"),
        interpret=interpret,
        kernel_name="rotary",
        **in_shapes(
            of_arrays,
            *((length or shape[1], None),) * 2,
            *(None,) * (eps is not None),
            *[(entries,)] * (entries is not None),
        ),
    )


@cached
def _backward(shape, dtype, eps, programs, interpret, rows=None):
    """rows: as of `kernel_of`."""
    tiles = _Tiles(shape, True, _TILE_BACKWARD, whole=rows is not None)
    of_arrays, half = shape if rows is None else (1, rows, *shape[2:]), tiles.half

    def body(grad, x, cos, sin, weight, out, sums):
        overlap_launches()
        me = lax.axis_index("program")

        def one(i, total):
            t = tiles.at(me + i * programs)
            g = t.rotate(t.load(grad), t.angles(cos, sin, True))
            factor, y = t.normal(t.load(x), eps)
            gw = [v * w for v, w in zip(g, t.weight(weight))]
            dot = t.mean([a * b for a, b in zip(gw, y)])
            t.store(out, [(a - b * dot) * factor for a, b in zip(gw, y)])
            return [s + a * b for s, a, b in zip(total, g, y)]

        zero = jnp.zeros((tiles.height, half), jnp.float32)
        zero = [zero if tiles.layout is None else plgpu.layout_cast(zero, tiles.layout)] * 2
        mine = (tiles.count - me + (programs - 1)) // programs
        for k, total in enumerate(lax.fori_loop(0, mine, one, zero)):
            sums[me, pl.ds(k * half, half)] = jnp.sum(total, axis=0)

    sums = plgpu.ShapeDtypeStruct((programs, 2 * half), _F32)
    return plgpu.kernel(
        body,
        out_type=(plgpu.ShapeDtypeStruct(of_arrays, dtype), sums),
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        kernel_name="rotary_backward",
        **in_shapes(of_arrays, of_arrays, *((shape[1], None),) * 2, None),
    )


def _backward_of(shape, dtype, kind, eps, sms, interpret):
    """The kernel of this shape, or of any batch and length, and its number of blocks. kind: what
    else distinguishes programs."""
    batch, length, *of_row = shape
    total, kind = batch * length, ("rotary_backward", (*of_row, dtype), kind, eps, interpret)

    def blocks(*sizes):
        return min(_RESIDENT * sms, _Tiles((*sizes, *of_row), True, _TILE_BACKWARD).count)

    if total > _EDGES[-1] or is_static(kind, shape[:2]):
        programs = blocks(batch, length)
        return _backward(shape, dtype, eps, programs, interpret), programs
    rows, typical = bucket_of("M", total, _EDGES)
    programs = blocks(1, typical)
    if batch == 1:
        return _backward((1, rows, *of_row), dtype, eps, programs, interpret), programs
    length = plgpu.dim("N", max=_EDGES[-1])
    kernel = _backward((rows // length, length, *of_row), dtype, eps, programs, interpret, rows)
    operands = (1, total, *of_row), (1, total, *of_row), None, None, None
    alone = functools.partial(_backward, shape, dtype, eps, programs, interpret)
    return views(kernel, operands, (shape, None), alone), programs


def _check(name, x, cos, sin, weight, grad=None):
    for what, a in (("x", x), ("cos", cos), ("sin", sin), ("weight", weight), ("grad", grad)):
        if a is not None and a.dtype.name not in FLOATS:
            raise TypeError(f"{name}: {what} must be float16, bfloat16 or float32, got {a.dtype}")
    if x.ndim != 4 or x.shape[3] % 2 or 0 in x.shape:
        raise ValueError(
            f"{name}: x must have the dims [batch, length, heads, head_dim] with an even head_dim,"
            f" got shape {x.shape}"
        )
    half = x.shape[3] // 2
    want = {"cos": (x.shape[1], half), "sin": (x.shape[1], half)}
    want |= {"weight": x.shape[3:], "grad": x.shape}
    for what, a in (("cos", cos), ("sin", sin), ("weight", weight), ("grad", grad)):
        if a is not None and a.shape != want[what]:
            raise ValueError(f"{name}: {what} must have the shape {want[what]}, got {a.shape}")


@plgpu.specialize
@better
def rotary(x, cos, sin, weight=None, *, inverse=False, eps=1e-6, interpret=None):
    """Rotary position embedding of queries or keys, computed in float32 (Hopper), with ``weight``
    of their RMS norm over each head (QK-norm): ``rotary(rms_norm(x, weight, eps=eps))`` in one
    kernel.

    x: [batch, length, heads, head_dim], float16, bfloat16 or float32; head_dim even. cos, sin:
    [length, head_dim / 2], any of these dtypes, of the angles. The pairs are (i, i + head_dim / 2).
    weight: [head_dim], any of these dtypes. inverse: rotate by the opposite angles, which is the
    gradient; without a weight. out: a preallocated result, which may be ``x``.

    Returns an array like ``x``. TypeError, ValueError for other dtypes and shapes.
    """
    _check("rotary", x, cos, sin, weight)
    if inverse and weight is not None:
        raise ValueError("rotary: inverse=True with weight; rotary_backward has both gradients")
    eps, shape = None if weight is None else float(eps), x.shape
    how = np.dtype(x.dtype), bool(inverse), eps, interpret
    dtypes = (a and a.dtype for a in (cos, sin, weight))
    kind = "rotary", shape[2:], *dtypes, x.device, how
    if shape[0] == 1:  # sizes are those of the first dimension that has several
        shape = 1, rows_of(kind, shape[1], ANY_ROWS)[0], *shape[2:]
    elif shape[0] * shape[1] <= ANY_ROWS[1] and not is_static(kind, shape[:2]):
        length, rows = (plgpu.dim(n, max=ANY_ROWS[1]) for n in ("N", "R"))
        kernel = kernel_of((rows // length, length, *shape[2:]), *how, rows=rows)
        operands = (1, shape[0] * shape[1], *shape[2:]), *(None,) * (2 + (weight is not None))
        return views(kernel, operands, (shape,), lambda: kernel_of(shape, *how))
    return kernel_of(shape, *how)


@plgpu.specialize
@better
def rotary_backward(grad, x, cos, sin, weight, *, eps=1e-6, interpret=None):
    """The gradients of :func:`rotary` with a weight, with respect to ``x`` and ``weight``, in
    float32 (Hopper).

    grad: the gradient of the result, of the shape of ``x``; the others: the arguments of rotary.
    The statistics are computed again from ``x``. Results repeat bit for bit, but for the one time
    that a number of rows gets a program of its own. Without a weight, the gradient is
    ``rotary(grad, cos, sin, inverse=True)``.

    Returns the gradient of ``x`` and that of ``weight``, like these. TypeError, ValueError for
    other dtypes and shapes.
    """
    _check("rotary_backward", x, cos, sin, weight, grad)
    sms = plgpu.sm_count(x.device)
    kind = *(a.dtype for a in (grad, cos, sin, weight)), x.device
    how = x.shape, np.dtype(x.dtype), kind, float(eps)
    kernel, programs = _backward_of(*how, sms, interpret)
    n = x.shape[3]
    return WithSums(
        kernel, sums_of_rows(programs, n, np.dtype(_F32), np.dtype(weight.dtype), sms, interpret)
    )
