"""Softmax and its gradient along another axis than the last, of columns that are read twice.

The arrays are seen as [outer, n, inner], whose axis n is reduced. A tile is a slice of the rows of
neighbouring columns. A first kernel makes the statistics of each slice of a column, a second one
puts those of all slices of a column together, in their order, and reads the arrays again. It begins
with the rows that were read last, most of which the L2 cache still has. So neither shared memory
nor the size of clusters limits how long columns are, and all extents may be known at run time only.
Lanes load what they need directly, as many columns at a time as the row pitch is aligned to.

Strides of arrays are static. If extents are known at run time only, arrays are flat, and lanes
compute the places of single elements.

With one slice there is one kernel, whose blocks read their columns twice."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SeveralKernels, overlap_launches, unaligned
from ._open_rows import is_static

_LOG2E = math.log2(math.e)
_LANES = 128
_ROW_BYTES = 128  # of a row in a tile
_AT_ONCE = 8  # rows of each lane that are on their way
_MASKED = 2  # the same, where some elements may not exist: masks take registers
_SLICES = 512  # of a column, at most
_BLOCKS = 4  # of an SM
_NARROW = 16  # columns that share programs of their own, whose tiles are narrow
_EDGE = 1 << 24  # of each extent that is taken at run time
_OPEN_ROWS = 512  # of a slice where they are


class Exponentials:
    """exp(x - base) of many x. fast: by one multiplication and addition, for bfloat16."""

    def __init__(self, base, fast):
        self.base, self.fast = base, fast
        if fast:
            # below 2^13 the rounding of a product changes less than that of the result; from there
            # on numbers are equal, or 32 and more apart: it is below 2^-32 with either base
            self.factor = jnp.where(jnp.abs(base) < 2.0**13, _LOG2E, 1.0)
            self.shift = base * self.factor

    def __call__(self, x):
        return jnp.exp2(x * self.factor - self.shift) if self.fast else jnp.exp(x - self.base)


class _Softmax:
    """Statistics: the maximum, and the sum of exponentials of differences from it."""

    fills = -math.inf, 0.0  # of no elements
    fill = -math.inf  # stands in the place of elements that do not exist

    def __init__(self, fast=False):
        self.fast = fast  # see Exponentials

    def gather(self, stats, parts):
        """With some more elements of each column, of their own dtype."""
        most, total = stats
        found = functools.reduce(jnp.maximum, [x for (x,) in parts])
        new = jnp.maximum(most, found.astype(jnp.float32))
        base = _finite(new)
        exp, total = Exponentials(base, self.fast), total * jnp.exp(most - base)
        return new, functools.reduce(lambda t, x: t + exp(x[0].astype(jnp.float32)), parts, total)

    def merge(self, a, b):
        new = jnp.maximum(a[0], b[0])
        base = _finite(new)
        return new, a[1] * jnp.exp(a[0] - base) + b[1] * jnp.exp(b[0] - base)

    def joined(self, stats):
        """Of all rows of a tile."""
        most = stats[0].max(axis=0, keepdims=True)
        total = stats[1] * jnp.exp(stats[0] - _finite(most))
        return most, total.sum(axis=0, keepdims=True)

    def result(self, stats):
        exp, scale = Exponentials(_finite(stats[0]), self.fast), 1 / stats[1]
        return lambda x: exp(x) * scale


def _finite(x):
    """A column of -inf alone adds nothing to others; if there are no others it gives NaN."""
    return jnp.where(x == -math.inf, 0.0, x)


class _Gradient:
    """Statistics: the sum of products of the gradient and the result of softmax."""

    fills = (0.0,)
    fill = 0.0

    def gather(self, stats, parts):
        def plus(total, part):
            x, y = (v.astype(jnp.float32) for v in part)
            return total + x * y

        return (functools.reduce(plus, parts, stats[0]),)

    def merge(self, a, b):
        return (a[0] + b[0],)

    def joined(self, stats):
        return (stats[0].sum(axis=0, keepdims=True),)

    def result(self, stats):
        return lambda grad, y: y * (grad - stats[0])


class Columns(NamedTuple):
    """What the kernels compute."""

    name: str
    shape: tuple  # of the arrays
    extents: tuple  # of the same: outer, n, inner; all sizes of the call, or none
    dtypes: tuple  # of the arrays
    out_dtype: np.dtype
    aligned: bool  # whether lanes may load vectors

    def op(self):
        if self.name == "softmax":
            return _Softmax(self.dtypes[0] == self.out_dtype == jnp.bfloat16)
        return _Gradient()

    @property
    def itemsize(self):
        return max(d.itemsize for d in (*self.dtypes, self.out_dtype))


class Tiling(NamedTuple):
    """height: columns of a tile; slices of each column; part: rows of each lane at a time."""

    height: int
    slices: object  # an int, or a size of the call
    part: int = _AT_ONCE


class Plan:
    """Numbers that follow from the shape and the tiling."""

    def __init__(self, x, tiling):
        self.problem, self.slices = x, tiling.slices
        self.outer, self.n, self.inner = x.extents
        self.is_open = _sizes.is_open(x.extents)
        # elements of a row that a lane has
        some = x.aligned and not self.is_open
        self.vector = math.gcd(self.inner, 16 // x.itemsize) if some else 1
        most = pl.next_power_of_2(min(_sizes.most(self.inner), tiling.height))
        self.lanes = min(pl.next_power_of_2(pl.cdiv(most, self.vector)), 32)
        self.width = self.lanes * self.vector
        self.rows = _LANES // self.lanes  # of one access of all lanes
        self.step = self.rows * tiling.part
        self.length = pl.cdiv(pl.cdiv(self.n, self.slices), self.step) * self.step  # of a slice
        self.stripes = pl.cdiv(self.inner, self.width)
        over = self.inner % self.width
        self.ragged = isinstance(over, plgpu.Dim) or over != 0
        self.shape, self.layout = (self.rows, self.width), self.layout_of()

    def layout_of(self):
        """Rows of which so many lanes have a vector each."""
        rows, width, vector = 32 // self.lanes, self.width, self.vector
        if rows == 1:
            tiles, warps, of_warp = ((4, width), (vector,)), -3, (-2,)
        elif self.lanes == 1:
            tiles, warps, of_warp = ((128, width), (32, width)), -4, (-2,)
        else:
            tiles, warps, of_warp = ((4 * rows, width), (rows, width), (vector,)), -5, (-3, -2)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (warps,), of_warp, -1)

    def statistics(self):
        """The array between the kernels."""
        count = len(self.problem.op().fills)
        shape = self.outer, self.slices, count, self.inner
        shape = (math.prod(shape),) if self.is_open else shape
        return plgpu.ShapeDtypeStruct(shape, jnp.float32)


class _Block:
    """One block of a kernel, while it is traced. arrays: the operands."""

    def __init__(self, plan, arrays, reverse=False):
        self.plan, self.arrays, self.op = plan, arrays, plan.problem.op()
        p, tile = plan, lax.axis_index("tile")
        self.column = tile % p.stripes * p.width
        tile = tile // p.stripes
        if reverse:
            tile = p.outer * p.slices - 1 - tile
        self.slice, self.batch = tile % p.slices, tile // p.slices
        self.first = self.slice * p.length
        self.count = jnp.clip(p.n - self.first, 0, p.length)
        if p.is_open:
            self.places = self.index(0) * p.inner + self.index(1)
        start = self.column if p.problem.aligned else unaligned(self.column)
        self.columns = pl.ds(start, p.width)

    # ---- parts

    def each(self, step, carry):
        """carry = step(row in the slice, how many rows of each lane, carry, are all elements there)
        over the slice."""
        p = self.plan
        whole = self.count // p.step
        if p.ragged:
            whole = jnp.where(self.column <= p.inner - p.width, whole, 0)
        part = p.step // p.rows
        carry = lax.fori_loop(0, whole, lambda k, c: step(k * p.step, part, c, True), carry)
        first, part = whole * p.step, min(_MASKED, part)
        size = part * p.rows
        steps = pl.cdiv(self.count - first, size)
        return lax.fori_loop(0, steps, lambda k, c: step(first + k * size, part, c, False), carry)

    def index(self, axis):
        return plgpu.broadcasted_iota(jnp.int32, self.plan.shape, axis, layout=self.plan.layout)

    def keep(self, rows, vector=1):
        """Which elements of an access exist: of so many rows, None: all, and of the columns, so
        many at a time. None: all."""
        p = self.plan
        found = None if rows is None else self.index(0) < rows
        if p.ragged:
            there = self.index(1) // vector < (p.inner - self.column) // vector
            found = there if found is None else found & there
        return found

    def parts(self, start, part, whole):
        """Of a step: the place of each access, and which elements exist."""
        p = self.plan
        for row in range(0, part * p.rows, p.rows):
            first = self.first + start + row
            at = self.batch, pl.ds(first, p.rows), self.columns
            if p.is_open:
                at = self.places + ((self.batch * p.n + first) * p.inner + self.column)
            yield at, None if whole else self.keep(self.count - (start + row), p.vector)

    def load(self, ref, at, keep, fill):
        value = ref[at] if keep is None else pl.load(ref, at, mask=keep, other=fill)
        return plgpu.layout_cast(value, self.plan.layout)

    def read(self, at, keep):
        return [self.load(ref, at, keep, self.op.fill) for ref in self.arrays]

    # ---- statistics

    def nothing(self):
        """The statistics of no elements."""
        found = (jnp.full(self.plan.shape, fill, jnp.float32) for fill in self.op.fills)
        return tuple(plgpu.layout_cast(x, self.plan.layout) for x in found)

    def gathered(self):
        """The statistics of the slice."""

        def gather(start, part, stats, whole):
            return self.op.gather(stats, [self.read(*w) for w in self.parts(start, part, whole)])

        return self.op.joined(self.each(gather, self.nothing()))

    def row_of_statistics(self, first, i):
        """The row of the statistics i of a slice, of flat arrays."""
        return ((self.batch * self.plan.slices + first) * len(self.op.fills) + i) * self.plan.inner

    def save(self, stats, mine):
        p = self.plan
        keep = jnp.arange(p.width) < p.inner - self.column if p.ragged else None
        for i, value in enumerate(mine):
            at, value = (self.batch, self.slice, i, self.columns), value.reshape((p.width,))
            if p.is_open:
                at = pl.ds(self.row_of_statistics(self.slice, i) + self.column, p.width)
            if keep is None:
                stats[at] = value
            else:
                pl.store(stats, at, value, mask=keep)

    def merged(self, stats):
        """The statistics of the columns from those of all slices."""
        p = self.plan
        if p.is_open:
            places = self.index(0) * (p.inner * len(self.op.fills)) + self.index(1)

        def merge(k, found, count=None):
            keep, more = self.keep(count), []
            for i, fill in enumerate(self.op.fills):
                at = self.batch, pl.ds(k * p.rows, p.rows), i, self.columns
                if p.is_open:
                    at = places + (self.row_of_statistics(k * p.rows, i) + self.column)
                more.append(self.load(stats, at, keep, fill))
            return self.op.merge(found, more)

        whole, over = p.slices // p.rows, p.slices % p.rows
        found = lax.fori_loop(0, whole, merge, self.nothing())
        if isinstance(over, plgpu.Dim) or over:
            found = merge(whole, found, p.slices - whole * p.rows)
        return self.op.joined(found)

    def write(self, o, stats):
        """The result, from the statistics of the columns."""
        result = self.op.result(stats)

        def some(start, part, _, whole):
            where = list(self.parts(start, part, whole))
            for (at, keep), values in zip(where, [self.read(*w) for w in where]):
                value = result(*(v.astype(jnp.float32) for v in values))
                value = value.astype(self.plan.problem.out_dtype)
                if keep is None:
                    o[at] = value
                else:
                    pl.store(o, at, value, mask=keep)

        self.each(some, None)


class TwoReads(SeveralKernels):
    """The function by both kernels."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __call__(self, *operands, out=None, stream=None):
        stats = self.first(*operands, stream=stream)
        return self.second(*operands, stats, out=out, stream=stream)


@cached
def _kernels(x, tiling, interpret):
    """The kernels, one or two. x, tiling: of Plan."""
    p, count = Plan(x, tiling), len(x.dtypes)

    def block(refs, reverse=False):
        overlap_launches()
        return _Block(p, [view(ref) for ref in refs[:count]], reverse)

    def view(ref):
        return ref if p.is_open else ref.reshape(x.extents)

    def whole(*refs):
        mine = block(refs)
        mine.write(view(refs[-1]), mine.gathered())

    def statistics(*refs):
        mine = block(refs)
        mine.save(refs[-1], mine.gathered())

    def results(*refs):
        mine = block(refs, reverse=True)
        mine.write(view(refs[-1]), mine.merged(refs[count]))

    def made(body, out_type, *more):
        shapes = {}
        if p.is_open:  # flat arrays, and operands that tell the extents
            sizes = ((size,) for size in x.extents)
            shapes["in_shapes"] = *(x.shape,) * count, *more, *sizes
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(p.outer * p.slices * p.stripes,),
            grid_names=("tile",),
            compiler_params=plgpu.CompilerParams(
                approx_math=x.out_dtype.itemsize == 2, unsafe_no_auto_barriers=True
            ),
            interpret=interpret,
            kernel_name=x.name,
            **shapes,
        )

    out, stats = plgpu.ShapeDtypeStruct(x.shape, x.out_dtype), p.statistics()
    if isinstance(p.slices, int) and p.slices == 1:
        return (made(whole, out),)
    size = plgpu.dim("S", max=_sizes.MOST)
    return made(statistics, stats), made(results, out, (size,))


def kernel(x, tiling, interpret):
    """The function of arrays of one shape."""
    kernels = _kernels(x, tiling, interpret)
    return TwoReads(*kernels) if len(kernels) > 1 else kernels[0]


def choose(extents, itemsize, sms):
    """The tiling for arrays of one shape: outer, n, inner."""
    outer, n, inner = extents
    height = _ROW_BYTES // itemsize
    stripes = outer * pl.cdiv(inner, height)
    rows = _LANES * 16 // _ROW_BYTES * _AT_ONCE  # of a step
    slices = max(1, min(round(_BLOCKS * sms / stripes), _SLICES, pl.cdiv(n, rows)))
    return Tiling(height, slices, _AT_ONCE)


def open_kernel(x, device, interpret):
    """The function of arrays of any shape; None: these have a program of their own."""
    outer, n, inner = x.extents
    narrow = inner <= _NARROW
    kind = x._replace(shape=(), extents=(), aligned=False), device, interpret
    too_large = max(x.extents) > _EDGE or math.prod(x.extents) > _sizes.MOST // 2
    if too_large or is_static(kind, x.extents):
        return None
    sizes = [plgpu.dim(name, max=_EDGE) for name in ("B", "N", "K")]
    flat = (plgpu.dim("E", max=_sizes.MOST // 2),)
    open_ = x._replace(shape=flat, extents=tuple(sizes), aligned=False)
    height = _NARROW if narrow else 32

    def tiling(n):
        return Tiling(height, _sizes.clamp(pl.cdiv(n, _OPEN_ROWS), 1, _SLICES))

    kernels = _kernels(open_, tiling(sizes[1]), interpret)

    def alone(i):
        return _kernels(x, tiling(max(n, _OPEN_ROWS + 1)), interpret)[i]  # of two

    views = ((math.prod(x.extents),),) * len(x.dtypes)
    first = functools.partial(alone, 0), views, (None,)
    second = functools.partial(alone, 1), (*views, None), (x.shape,)
    made = (_core.Reshaped(k, *how, sizes=x.extents) for k, how in zip(kernels, (first, second)))
    return TwoReads(*made)
