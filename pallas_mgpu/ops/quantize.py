"""Arrays as 8-bit elements with scales, and back.

A group of elements of a row shares a scale: the whole row, or 128 elements, or with scales that are
powers of two (mx) 32 elements. The scale takes the largest magnitude of the group to the largest
number of the dtype.

Blocks that fill the rows lie one after the other in memory, whatever the rows are, and so do short
rows: a thread block takes as many of them as are 4096 elements. A lane loads 16 bytes at a time,
and the lanes of a group, which are neighbours, find its largest magnitude by shuffles. Otherwise a
thread block takes a row: rows that registers hold are read once; of longer ones, blocks are read
one after the other, and whole rows twice. Square blocks have a thread block each.

With a given scale, blocks take parts of the array as a sequence, and keep the largest magnitudes of
what they have seen; a second kernel finds the largest of all."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, SeveralKernels, dtype_of, overlap_launches
from ._open_rows import divides, elements_of, in_shapes, rowwise, views, with_open_rows

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_F32 = np.float32
_PART = 2048
HELD = 32768  # bytes of a whole row that the registers of a thread block hold
_TILE = 4096  # elements of the groups that a thread block takes
_WARP = 2048  # most elements of a row that a warp takes
_STEP = 2048  # elements at a time, of kernels with a given scale
_RESIDENT = 9  # blocks of an SM of those
SQUARE = 128, 128  # rows and columns of a square block
_TINY = _F32(2.0**-100)  # groups of zeros have this for their largest magnitude


class Problem(NamedTuple):
    """What a kernel computes."""

    rows: int
    n: int
    block: int  # 0: rows
    dtype: np.dtype
    to: np.dtype
    scales: np.dtype
    shape: tuple

    @classmethod
    def of(cls, shape, dtype, to, block, mx):
        scales = jnp.dtype("float8_e8m0fnu") if mx else np.dtype(_F32)
        return cls(math.prod(shape[:-1]), shape[-1], block or 0, dtype, to, scales, shape)

    @property
    def groups(self):
        return pl.cdiv(self.n, self.block) if self.block else 1

    @property
    def vec(self):
        """Elements of 16 bytes."""
        return 16 // max(self.dtype.itemsize, self.to.itemsize)

    @property
    def size(self):
        """Elements of a group."""
        return self.block or self.n

    @property
    def packed(self):
        """Is the array one sequence of groups that lanes of a warp share?"""
        if self.block:
            return self.n % self.block == 0
        lanes, rest = divmod(self.n, self.vec)
        alike = lanes % 32 == 0 if lanes > 32 else lanes & (lanes - 1) == 0
        return lanes > 1 and rest == 0 and alike and self.n <= _WARP

    @property
    def is_open(self):
        """Do the rows stand for any number of them?"""
        return _sizes.is_open(self.shape)

    @property
    def of_blocks(self):
        """The same of the array as a matrix with a block in each row."""
        rows = self.rows * self.groups
        return self._replace(rows=rows, n=self.block, block=0, shape=(rows, self.block))

    def matrix(self, ref):
        """An array like x with two dims."""
        return ref if self.is_open else ref.reshape((self.rows, self.n))

    @property
    def scales_shape(self):
        return (*self.shape[:-1], self.groups) if self.block else self.shape[:-1]


def layout_of(size, vec):
    """Lanes of consecutive `vec` elements; those of a group of that size are neighbours."""
    lanes = size // vec  # of a group
    if lanes > 32:
        tiling = plgpu.Tiling(((4, size), (32 * vec,), (vec,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
    rows = 32 // lanes  # groups of a warp
    if rows == 1:
        tiling = plgpu.Tiling(((4, size), (vec,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((4 * rows, size), (rows, size), (vec,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def flat_layout_of(size, vec):
    """The layout of a sequence of groups which becomes that of layout_of where they are rows."""
    warp, chunk = max(size, 32 * vec), 32 * vec
    tiles = (4 * warp,), *[(warp,)] * (warp > chunk), (chunk,), (vec,)
    tiling = plgpu.Tiling(tiles)
    return plgpu.Layout.TILED(tiling, warp_dims=(-len(tiles),), lane_dims=(-2,), vector_dim=-1)


def load_as(layout, ref, at, keep, other=0):
    """In a layout; keep: which elements there are, None for all."""
    value = ref[at] if keep is None else pl.load(ref, at, mask=keep, other=other)
    return plgpu.layout_cast(value, layout)


def _height(x):
    """Groups of a tile: at least one for each warp, and for each lane if they are that short."""
    least = 4 * max(32 // (x.size // x.vec), 1)
    return max(_TILE // x.size // least, 1) * least


class _Groups:
    """A tile of the groups of an array that is one sequence of them, while a kernel is traced."""

    def __init__(self, x, tile):
        self.x, self.count = x, x.rows * x.groups
        self.height = _height(x)
        self.start = tile * self.height
        self.at = pl.ds(self.start, self.height)
        self.shape = self.height, x.size
        self.layout = layout_of(x.size, x.vec)
        self.ragged = x.is_open or self.count % self.height != 0

    def _groups(self, ref):
        return ref if self.x.is_open else ref.reshape((self.count, self.x.size))

    def load(self, ref):
        ref, keep = self._groups(ref), None
        if self.ragged:
            at = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            keep = at < self.count - self.start
        return load_as(self.layout, ref, (self.at, slice(None)), keep).astype(jnp.float32)

    def store(self, ref, value):
        ref, value = self._groups(ref), value.astype(ref.dtype)
        if self.ragged:
            at = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            pl.store(ref, (self.at, slice(None)), value, mask=at < self.count - self.start)
        else:
            ref[self.at, :] = value

    def _there(self):
        at = plgpu.broadcasted_iota(jnp.int32, (self.height,), 0, layout=self.layout.reduce(1))
        return at < self.count - self.start

    def _scales(self, ref):
        return ref if self.x.is_open else ref.reshape((self.count,))

    def load_scales(self, ref):
        ref, layout = self._scales(ref), self.layout.reduce(1)
        there = self._there() if self.ragged else None
        found = load_as(layout, ref, (self.at,), there, 1.0)
        return lax.broadcast_in_dim(found.astype(jnp.float32), self.shape, [0])

    def store_scales(self, ref, scale):
        ref = self._scales(ref)
        if self.ragged:
            pl.store(ref, (self.at,), scale, mask=self._there())
        else:
            ref[self.at] = scale


class _Rows:
    """Rows of an array in parts, while a kernel is traced."""

    def __init__(self, x, row):
        self.x, self.row = x, row
        self.width = x.n if x.n * x.dtype.itemsize <= HELD else _PART
        self.parts = pl.cdiv(x.n, self.width)

    def at(self, k):
        return self.row, pl.ds(k * self.width, self.width)

    def inside(self, k):
        if self.x.n % self.width == 0:
            return None
        return jnp.arange(self.width) < self.x.n - k * self.width

    def load(self, ref, k):
        return self.load_exact(ref, k).astype(jnp.float32)

    def load_exact(self, ref, k):
        """In the dtype of the array."""
        keep = self.inside(k)
        return ref[self.at(k)] if keep is None else pl.load(ref, self.at(k), mask=keep, other=0)

    def store(self, ref, k, value):
        keep, value = self.inside(k), value.astype(ref.dtype)
        if keep is None:
            ref[self.at(k)] = value
        else:
            pl.store(ref, self.at(k), value, mask=keep)

    def each(self, part):
        if self.parts == 1:
            return part(0)
        return lax.fori_loop(0, self.parts, lambda k, c: part(k), None)


class _RowsOfBlocks(_Rows):
    """The same of rows that end within a block. A part is a number of blocks: a sequence in memory,
    in registers an array with a block in each row."""

    def __init__(self, x, row):
        self.x, self.row = x, row
        vec = math.gcd(x.n, x.vec)  # rows begin at multiples of it
        self.flat, self.layout = (f(x.block, vec) for f in (flat_layout_of, layout_of))
        grain = 4 * max(x.block, 32 * vec)
        self.width = pl.cdiv(min(x.n, max(_PART, grain)), grain) * grain
        self.parts = pl.cdiv(x.n, self.width)
        self.groups = self.width // x.block  # of a part

    def inside(self, k):
        at = plgpu.broadcasted_iota(jnp.int32, (self.width,), 0, layout=self.flat)
        return at < self.x.n - k * self.width

    def load(self, ref, k):
        value = plgpu.load(ref.at[self.at(k)], mask=self.inside(k), other=0, layout=self.flat)
        value = value.astype(jnp.float32).reshape(self.groups, self.x.block)
        return plgpu.layout_cast(value, self.layout)

    def store(self, ref, k, value):
        super().store(ref, k, value.reshape(self.width))

    def scales_at(self, k):
        """Place of the scales of a part, and which of them there are."""
        there = jnp.arange(self.groups) < self.x.groups - k * self.groups
        return (self.row, pl.ds(k * self.groups, self.groups)), there


def scale_of(x, largest):
    """Of groups with these largest magnitudes, float32."""
    scale = jnp.maximum(largest, _TINY) * _F32(1 / _LARGEST[x.to.name])
    if x.scales == _F32:
        return scale
    # of mx: the next power of two, by a carry from the mantissa
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)
    return jnp.where(jnp.isnan(scale), scale, up)


def to_integers(x, value):
    return jnp.round(value) if x.to.name == "int8" else value


def _kernel(x, body, out_type, interpret, name, *operands):
    """Of thread blocks that take rows, or tiles of blocks. operands: their shapes."""
    grid, axis = x.rows, "row"
    if x.packed:
        grid, axis = pl.cdiv(x.rows * x.groups, _height(x)), "tile"
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(grid,),
        grid_names=(axis,),
        interpret=interpret,
        kernel_name=name,
        **in_shapes(*operands),
    )


@cached
def _quantize(x, interpret):
    def of_groups(source, out, scales):
        overlap_launches()
        groups = _Groups(x, lax.axis_index("tile"))
        value = groups.load(source)
        scale = scale_of(x, jnp.max(jnp.abs(value), axis=1)).astype(x.scales)
        inverse = 1 / scale.astype(jnp.float32)
        groups.store(out, to_integers(x, value * lax.broadcast_in_dim(inverse, value.shape, [0])))
        groups.store_scales(scales, scale)

    def body(source, out, scales):
        overlap_launches()
        rows = (_RowsOfBlocks if x.block else _Rows)(x, lax.axis_index("row"))
        source, out = x.matrix(source), x.matrix(out)
        at_row = (rows.row,) if x.is_open and not x.block else (rows.row, 0)
        scales = scales if x.is_open else scales.reshape((x.rows, x.groups))

        def blocks(k):
            value = rows.load(source, k)
            scale = scale_of(x, jnp.max(jnp.abs(value), axis=1)).astype(x.scales)
            inverse = 1 / scale.astype(jnp.float32)
            value = value * lax.broadcast_in_dim(inverse, value.shape, [0])
            rows.store(out, k, to_integers(x, value))
            at, there = rows.scales_at(k)
            pl.store(scales, at, scale, mask=there)

        if x.block:
            rows.each(blocks)
            return
        largest = jnp.float32(0)
        if rows.parts == 1:
            held = rows.load_exact(source, 0)
            largest = jnp.max(jnp.abs(held.astype(jnp.float32)))
        else:

            def most(k, top):
                return jnp.maximum(top, jnp.max(jnp.abs(rows.load(source, k))))

            largest = lax.fori_loop(0, rows.parts, most, largest)
        scale = scale_of(x, largest)
        scales[at_row] = scale

        def part(k):
            if rows.parts == 1:  # after the barrier it is as it was loaded: fewer registers
                found = lax.optimization_barrier(held).astype(jnp.float32)
            else:
                found = rows.load(source, k)
            rows.store(out, k, to_integers(x, found * (1 / scale)))

        rows.each(part)

    out_type = (
        plgpu.ShapeDtypeStruct(x.shape, x.to),
        plgpu.ShapeDtypeStruct(x.scales_shape, x.scales),
    )
    body = of_groups if x.packed else body
    return _kernel(x, body, out_type, interpret, "quantize", x.shape)


@cached
def _dequantize(x, interpret):
    def of_groups(source, scales, out):
        overlap_launches()
        groups = _Groups(x, lax.axis_index("tile"))
        groups.store(out, groups.load(source) * groups.load_scales(scales))

    def body(source, scales, out):
        overlap_launches()
        rows = (_RowsOfBlocks if x.block else _Rows)(x, lax.axis_index("row"))
        source, out = x.matrix(source), x.matrix(out)
        at_row = (rows.row,) if x.is_open and not x.block else (rows.row, 0)
        scales = scales if x.is_open else scales.reshape((x.rows, x.groups))

        def part(k):
            if not x.block:
                value = rows.load(source, k)
                rows.store(out, k, value * scales[at_row].astype(jnp.float32))
                return
            value = rows.load(source, k)
            at, there = rows.scales_at(k)
            found = pl.load(scales, at, mask=there, other=1.0)
            value = value * lax.broadcast_in_dim(found.astype(jnp.float32), value.shape, [0])
            rows.store(out, k, value)

        rows.each(part)

    out_type = plgpu.ShapeDtypeStruct(x.shape, x.to)
    body, shapes = of_groups if x.packed else body, (x.shape, x.scales_shape)
    return _kernel(x, body, out_type, interpret, "dequantize", *shapes)


def _by_rows(make, x, device, interpret, operands, results):
    """The kernel make(x, interpret), perhaps for any number of rows. Of packed blocks these are the
    rows. operands, results: which they are, the elements (0) and the scales (1)."""
    if not (x.block and x.packed):
        return make(with_open_rows(x, device, make.__name__, interpret), interpret)
    flat = x.of_blocks
    found = with_open_rows(flat, device, make.__name__, interpret)
    if not found.is_open:
        return make(x, interpret)
    shapes = [(flat.shape, x.shape), (flat.scales_shape, x.scales_shape)]
    given = tuple(shapes[k][0] for k in operands)
    made = tuple(shapes[k][1] for k in results)
    alone = functools.partial(make, x, interpret)
    return _core.Reshaped(make(found, interpret), alone, given, made)


# ---- square blocks ------------------------------------------------------------------------------


@cached
def _square(shape, dtype, to, inverse, interpret):
    """Of blocks of 128 rows and columns, each with a scale; inverse: back."""
    (rows, n), blocks = shape, tuple(pl.cdiv(extent, SQUARE[0]) for extent in shape)
    x = Problem(rows, n, 0, dtype, to, np.dtype(_F32), shape)

    def body(source, *refs):
        overlap_launches()
        i, j = lax.axis_index("row"), lax.axis_index("column")
        start, keep = (i * SQUARE[0], j * SQUARE[1]), None
        at = tuple(pl.ds(s, e) for s, e in zip(start, SQUARE))
        if rows % SQUARE[0] or n % SQUARE[1]:
            index = [lax.broadcasted_iota(jnp.int32, SQUARE, d) for d in (0, 1)]
            keep = (index[0] < rows - start[0]) & (index[1] < n - start[1])
        held = source[at] if keep is None else pl.load(source, at, mask=keep, other=0)
        if inverse:
            scales, out = refs
            value = held.astype(jnp.float32) * scales[i, j]
        else:
            out, scales = refs
            scale = scale_of(x, jnp.max(jnp.abs(held.astype(jnp.float32))))
            scales[i, j] = scale
            # after the barrier it is as it was loaded: fewer registers
            value = lax.optimization_barrier(held).astype(jnp.float32) * (1 / scale)
            value = to_integers(x, value)
        if keep is None:
            out[at] = value.astype(to)
        else:
            pl.store(out, at, value.astype(to), mask=keep)

    out = plgpu.ShapeDtypeStruct(shape, to)
    return plgpu.kernel(
        body,
        out_type=out if inverse else (out, plgpu.ShapeDtypeStruct(blocks, _F32)),
        grid=blocks,
        grid_names=("row", "column"),
        interpret=interpret,
        kernel_name="dequantize" if inverse else "quantize",
    )


# ---- a given scale ------------------------------------------------------------------------------


@cached
def _by_scale(shape, dtype, to, programs, interpret):
    """Kernel: elements, and the largest magnitude that each block has seen."""
    is_open = _sizes.is_open(shape)  # it has one dim then
    total = shape[0] if is_open else math.prod(shape)
    tiles = pl.cdiv(total, _STEP)
    vec, most = 16 // max(dtype.itemsize, to.itemsize), _F32(_LARGEST[to.name])
    layout = plgpu.Layout.WG_STRIDED((_STEP,), vec)
    x = Problem(1, total, 0, dtype, to, np.dtype(_F32), shape)

    def body(source, scale, out, largest):
        overlap_launches()
        me, inverse = lax.axis_index("program"), 1 / scale.reshape((1,))[0]
        if not is_open:
            source, out = (r.reshape((total,)) for r in (source, out))

        def one(i, top):
            start = (me + i * programs) * _STEP
            at, keep = (pl.ds(start, _STEP),), None
            if not divides(_STEP, total):
                index = plgpu.broadcasted_iota(jnp.int32, (_STEP,), 0, layout=layout)
                keep = index < total - start
            value = load_as(layout, source, at, keep).astype(jnp.float32)
            found = jnp.clip(to_integers(x, value * inverse), -most, most).astype(to)
            if keep is None:
                out[at] = found
            else:
                pl.store(out, at, found, mask=keep)
            return jnp.maximum(top, jnp.abs(value))

        zero = plgpu.layout_cast(jnp.zeros((_STEP,), jnp.float32), layout)
        mine = (tiles - me + (programs - 1)) // programs
        largest[me] = jnp.max(lax.fori_loop(0, mine, one, zero))

    outs = plgpu.ShapeDtypeStruct(shape, to), plgpu.ShapeDtypeStruct((programs,), _F32)
    return plgpu.kernel(
        body,
        out_type=outs,
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        kernel_name="quantize_by_scale",
        **in_shapes(shape, None),
    )


def _by_scale_of(shape, kind, dtype, to, sms, interpret):
    """The kernel of this shape, or of any number of elements with the same alignment. kind: what
    else distinguishes programs."""
    total, most = math.prod(shape), _RESIDENT * sms
    size = elements_of(("quantize_by_scale", kind, dtype, to, interpret), shape, _STEP)
    if size is None:
        return _by_scale(shape, dtype, to, min(most, pl.cdiv(total, _STEP)), interpret)
    programs = min(most, pl.cdiv(size.most, _STEP))
    kernel = _by_scale((size,), dtype, to, programs, interpret)
    alone = functools.partial(_by_scale, shape, dtype, to, programs, interpret)
    return views(kernel, ((total,), None), (shape, None), alone)


@cached
def _largest(programs, interpret):
    """Kernel: the largest of the magnitudes that blocks have seen."""
    width = pl.cdiv(programs, 128) * 128

    def body(seen, out):
        overlap_launches()
        keep = jnp.arange(width) < programs
        out[0] = jnp.max(pl.load(seen, (pl.ds(0, width),), mask=keep, other=0.0))

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((1,), _F32),
        interpret=interpret,
        kernel_name="largest",
    )


class _WithLargest(SeveralKernels):
    """Both kernels."""

    takes_views = True  # _strides.py

    def __init__(self, kernel, largest):
        self.kernel, self.largest = kernel, largest

    def __call__(self, x, scale, out=None, stream=None):
        if out is not None:
            raise NotImplementedError("quantize_by_scale: out=; copy the results")
        q, seen = self.kernel(x, scale, stream=stream)
        return q, self.largest(seen, stream=stream)


# ---- the functions ------------------------------------------------------------------------------


def check_options(name, x, dtype, block, mx):
    """The dtype of the elements."""
    to = dtype_of(name, dtype, accepted=(*_LARGEST,), what="dtype")
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name}: x must be float16, bfloat16 or float32, got {x.dtype}")
    _check(name, x, block, mx)
    return to


def _check(name, x, block, mx):
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"{name}: x must have a dim and elements, got shape {x.shape}")
    known = block is None or isinstance(block, int | tuple) and not isinstance(block, bool)
    if not known or block not in (None, 32, 64, 128, SQUARE):
        raise ValueError(
            f"{name}: block must be None (rows), 32, 64, 128 or {SQUARE}, got {block!r}"
        )
    if block == SQUARE and x.ndim != 2:
        raise ValueError(f"{name}: blocks {SQUARE} are of arrays with two dims, got {x.shape}")
    if mx and block != 32:
        raise ValueError(f"{name}: scales of mx belong to blocks of 32, got block={block!r}")


@plgpu.specialize(in_place=False)
@rowwise
def quantize(x, *, dtype="float8_e4m3fn", block=None, mx=False, interpret=None):
    """``x`` as 8-bit elements and scales, so that ``x`` is about ``q * scale`` (Hopper).

    x: (..., N), float16, bfloat16 or float32. dtype: "float8_e4m3fn", "float8_e5m2" or "int8".
    block: elements of a row that share a scale, 32, 64 or 128; None for whole rows; or (128, 128),
    of an (M, N) array. mx: scales are powers of two, float8_e8m0fnu, of blocks of 32; otherwise
    they are float32.

    Returns (q, scales): q of the shape of ``x``; scales (...) for rows, (..., ceil(N / block)) for
    blocks, (ceil(M / 128), ceil(N / 128)) for square ones. TypeError, ValueError for other dtypes
    and shapes.
    """
    to = check_options("quantize", x, dtype, block, mx)
    if block == SQUARE:
        return _square(x.shape, x.dtype, to, False, interpret)
    problem = Problem.of(x.shape, x.dtype, to, block, mx)
    return _by_rows(_quantize, problem, x.device, interpret, (0,), (0, 1))


@plgpu.specialize(in_place=False)
@rowwise
def dequantize(q, scales, *, block=None, out_dtype="bfloat16", interpret=None):
    """``q * scales``: the inverse of :func:`quantize` (Hopper).

    q, scales, block: as quantize returns and takes them. out_dtype: float16, bfloat16 or float32.
    Returns an array of the shape of ``q``. TypeError, ValueError for other dtypes and shapes.
    """
    name = "dequantize"
    if q.dtype.name not in _LARGEST:
        raise TypeError(f"{name}: q must be one of {', '.join(_LARGEST)}, got {q.dtype}")
    to = dtype_of(name, out_dtype)
    if scales.dtype.name not in ("float32", "float8_e8m0fnu"):
        raise TypeError(f"{name}: scales must be float32 or float8_e8m0fnu, got {scales.dtype}")
    _check(name, q, block, False)
    want, square = tuple(pl.cdiv(extent, SQUARE[0]) for extent in q.shape), block == SQUARE
    if not square:
        x = Problem.of(q.shape, q.dtype, to, block, False)._replace(scales=scales.dtype)
        want = x.scales_shape
    if scales.shape != want or square and scales.dtype.name != "float32":
        raise ValueError(
            f"{name}: scales must have the shape {want}, of square blocks in float32, got"
            f" {scales.dtype} {scales.shape}"
        )
    if square:
        return _square(q.shape, q.dtype, to, True, interpret)
    return _by_rows(_dequantize, x, q.device, interpret, (0, 1), (0,))


@plgpu.specialize
def quantize_by_scale(x, scale, *, dtype="float8_e4m3fn", interpret=None):
    """``x / scale`` as 8-bit elements, and the largest magnitude of ``x``, from which the next
    scale can be computed (Hopper): delayed scaling.

    x: float16, bfloat16 or float32, any shape. scale: one float32 number, of shape (), (1,) or
    (1, 1), above 0. dtype: as for :func:`quantize`; elements beyond its largest number become that
    number.

    Returns (q, largest): q of the shape of ``x``; largest (1,), float32. TypeError, ValueError for
    other dtypes and shapes; NotImplementedError for ``out``.
    """
    name = "quantize_by_scale"
    to = check_options(name, x, dtype, None, False)
    if scale.shape not in ((), (1,), (1, 1)) or scale.dtype.name != "float32":
        raise ValueError(
            f"{name}: scale must be one float32 number, got {scale.dtype} {scale.shape}"
        )
    sms, kind = plgpu.sm_count(x.device), (x.device, scale.shape)
    kernel = _by_scale_of(x.shape, kind, x.dtype, to, sms, interpret)
    definition = getattr(kernel, "kernel", kernel).definition
    return _WithLargest(kernel, _largest(*definition.outs[1].shape, interpret))
