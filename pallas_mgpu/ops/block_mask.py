"""Which blocks of keys a tile of queries needs, for a mask that is a function of the pair.

A block of the grid has one tile of queries. It goes through the blocks of keys and evaluates the
mask on all pairs of each: a block without a pair that is there is left out, one in which all are
there needs no mask later.

Where lengths are known when the kernel runs, the block mask is one row, and the operands that the
mask belongs to say what the lengths are, with one whose extent is the batch. Of the data of a mask
the first extent above 1 is known then, too, unless the function needs it as an int."""

import functools
import math
import operator
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from .._names import show
from ._common import SeveralKernels, overlap_launches
from ._open_rows import ENTRIES, any_rows, better, entries, in_shapes, sizes_of, views

ROWS, KEYS = 128, 128  # of a tile and of a block
_LENGTHS = 0, 1 << 24  # edges of the programs for any lengths


class Mask(NamedTuple):
    """A mask of pairs. batch, heads: those that it distinguishes."""

    function: object
    batch: int
    heads: int
    data: bool  # an array that the function reads
    shape: tuple = ()  # of the data

    def pairs(self, sizes, at, shape, data, layout):
        """What the function says of pairs, and a function of that: which of them are there. sizes:
        numbers of queries and keys; at: batch entry, head, first query and key; data: a ref."""
        b, h, *first = at
        i, j = (lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))
        i, j = (plgpu.layout_cast(x, layout) for x in (i, j))
        i, j = i + first[0], j + first[1]
        inside = [jnp.minimum(x, n - 1) for x, n in zip((i, j), sizes)]
        found = self.function(b, h, *inside, *([data] if self.data else []))
        if isinstance(found, bool):
            found = jnp.full(shape, found)
        got = getattr(found, "dtype", found)
        if got != np.bool_:
            raise TypeError(f"mask must return booleans, got {got}")
        found = jnp.broadcast_to(found, shape)
        return found, lambda found: found & (i < sizes[0]) & (j < sizes[1])

    def keep(self, sizes, at, shape, data, layout):
        """Which pairs are there."""
        found, cut = self.pairs(sizes, at, shape, data, layout)
        return cut(found)

    def count(self, sizes, at, shape, data, layout):
        """How many keys of eight sets each of the queries attends to."""
        found, cut = self.pairs(sizes, at, shape, data, layout)

        def number(found):
            return found.astype(jnp.int32).reshape(shape[0], shape[1] // 8, 8).sum(axis=1)

        ends = [
            first + n > size
            for first, n, size in zip(at[2:], shape, sizes)
            if isinstance(size, plgpu.Dim) or size % n
        ]
        if not ends:
            return number(found)
        overhangs = functools.reduce(operator.or_, ends)
        return lax.cond(overhangs, lambda: number(cut(found)), lambda: number(found))

    def with_open_data(self, size):
        """The mask whose data have the size as their first extent above 1."""
        k = next((k for k, n in enumerate(self.shape) if n > 1), None)
        if k is None:
            return self
        return self._replace(shape=(*self.shape[:k], size, *self.shape[k + 1 :]))

    def with_batch(self, size):
        """The mask for another number of batch entries, if it distinguishes them."""
        return self if self.is_shared else self._replace(batch=size)

    @property
    def is_shared(self):
        """Is it the same for all batch entries?"""
        return isinstance(self.batch, int) and self.batch == 1


def at_entry(mask, queries, keys, b, h, tile, i):
    """The index of entry i of a tile in the block mask, of one row where lengths are open."""
    if not isinstance(queries, plgpu.Dim):
        return b, h, tile, i
    *_, tiles, width = shape_of(mask, queries, keys)
    return (((b * mask.heads + h) * jnp.asarray(tiles) + tile) * jnp.asarray(width) + i,)


def shape_of(mask, queries, keys):
    """Of the array of a block mask: for each tile the number of its blocks, and for each of them
    twice its number, plus 1 if it needs the mask."""
    return mask.batch, mask.heads, pl.cdiv(queries, ROWS), 1 + pl.cdiv(keys, KEYS)


@cached
def kernel(mask, queries, keys, interpret, like=()):
    """Kernel: the block mask; its argument is the data of the mask, or any array. like: where
    lengths are open, the shapes of q and k, which are the first arguments then, and of an array
    whose extent is the batch, the last argument, if that is open."""
    *grid, width = shape_of(mask, queries, keys)

    def body(data, out):
        overlap_launches()
        b, h, tile = (lax.axis_index(n) for n in ("batch", "head", "tile"))

        def entry(i):
            return at_entry(mask, queries, keys, b, h, tile, i)

        there = jnp.clip(queries - tile * ROWS, 0, ROWS)  # queries of the tile
        layout = plgpu.Layout.WGMMA  # a lane has few queries and keys of many pairs

        def one(block, count):
            at = b, h, tile * ROWS, block * KEYS
            number = jnp.sum(mask.count((queries, keys), at, (ROWS, KEYS), data, layout))
            some, every = number > 0, number == there * KEYS

            @pl.when(some)
            def _():
                out[entry(count + 1)] = 2 * block + 1 - every.astype(jnp.int32)

            return count + some.astype(jnp.int32)

        count = lax.fori_loop(0, width - 1, one, jnp.int32(0))

        @pl.when(count == 0)
        def _():
            out[entry(1)] = jnp.int32(1)  # a block of which nothing is there

        out[entry(0)] = jnp.maximum(count, 1)

    def of_arrays(q, k, *others):
        body(others[0] if mask.data else q, others[-1])

    shape = (math.prod((*grid, width)),) if like else (*grid, width)
    return plgpu.kernel(
        of_arrays if like else body,
        out_type=plgpu.ShapeDtypeStruct(shape, np.int32),
        grid=tuple(grid),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="block_mask",
        **in_shapes(*like[:2], *[mask.shape] * (mask.data and bool(like)), *like[2:]),
    )


class OfArrays(SeveralKernels):
    """The kernel as a function of q, k and the data. like: as of `kernel`; shapes: of q and k in
    this call, as the kernel sees them; batch: of this call."""

    def __init__(
        self,
        mask,
        queries,
        keys,
        interpret,
        like=(),
        shapes=(),
        batch=1,
        result=None,
        alone=None,
    ):
        self.open = bool(like)
        self.kernel = kernel(mask, queries, keys, interpret, like)
        if like:
            operands = *shapes, *[None] * mask.data
            sizes = (batch,) if like[2:] else ()
            self.kernel = views(self.kernel, operands, (result,), alone, sizes)

    def __call__(self, q, k, data=None, *, out=None, stream=None):
        if self.open:
            operands = (q, k) if data is None else (q, k, data)
            return self.kernel(*operands, out=out, stream=stream)
        return self.kernel(q if data is None else data, out=out, stream=stream)


@cached
def _is_for_any_size(mask, queries, keys, like, dtypes):
    """Can its function be traced with data of a size that is not known?"""
    shapes = *like[:2], mask.shape, *like[2:]
    shapes = [tuple(getattr(n, "least", n) for n in shape) for shape in shapes]
    given = [plgpu.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (*dtypes, dtypes[0]))]
    try:
        kernel(mask, queries, keys, None, like).lower(*given)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def open_mask(mask, arrays, queries, keys, like):
    """The mask for data of any size; None if its function needs this one. arrays: descriptions of
    q, k and the data of a call; queries, keys: the open lengths; like: as above."""
    if not mask.data:
        return mask
    found = mask.with_open_data(plgpu.dim("D"))
    dtypes = tuple(x.dtype for x in arrays)
    if found is mask or _is_for_any_size(found, queries, keys, like, dtypes):
        return found
    return None


def _of_lengths(mask, q, k, data, by_batch, interpret):
    """What computes block masks of these lengths."""
    batch, sizes = q.shape[0], (q.shape[1], k.shape[1])
    alone = functools.partial(OfArrays, mask, *sizes, interpret)
    rest = [(x.shape[2:], x.dtype) for x in (q, k)], data and data.dtype
    kind = mask.with_open_data(0)._replace(batch=by_batch), str(rest), q.device, interpret
    found = sizes_of(("block_mask", kind), dict(zip("NMB", (*sizes, batch))), _LENGTHS)
    if found is None or batch > ENTRIES:
        return alone()
    rows, any_batch = [any_rows("N"), any_rows("M")], entries()
    lengths = [_sizes.clamp(n // any_batch, 1, _LENGTHS[-1]) for n in rows]
    like = *((1, n, *x.shape[2:]) for n, x in zip(rows, (q, k))), (any_batch,)
    found = mask._replace(batch=any_batch if by_batch else 1)
    found = open_mask(found, (q, k, data), *lengths, like)
    if found is None:
        return alone()
    shapes = tuple((1, batch * n, *x.shape[2:]) for n, x in zip(sizes, (q, k)))
    return OfArrays(found, *lengths, interpret, like, shapes, batch, shape_of(mask, *sizes), alone)


def check_function(name, mask):
    if not callable(mask):
        raise TypeError(
            f"{name}: mask must be a function of (batch entry, head, query, key) that returns"
            f" booleans, got {show(mask)}"
        )


@plgpu.specialize
@better
def block_mask(q, k, *, mask_data=None, mask=None, by_batch=False, by_head=False, interpret=None):
    """The blocks of keys that each tile of 128 queries needs, for :func:`attention` (Hopper).

    q: [batch, queries, heads, head_dim] and k: [batch, keys, kv_heads, head_dim], of which only the
    shapes count. mask, mask_data: as for :func:`attention`. by_batch, by_head: whether the mask
    depends on the batch entry and on the head; if not, it is called with 0. The mask is evaluated
    for all pairs, so reuse the result: it is valid for all calls with the same mask, data and
    lengths.

    Returns int32 [batch or 1, heads or 1, tiles of queries, 1 + blocks of keys]: for each tile the
    number of its blocks of 128 keys, and for each of these ``2 * block``, plus 1 where some pair of
    it is hidden. TypeError, ValueError for other masks and shapes.
    """
    check_function("block_mask", mask)
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"block_mask: {name} must have four dims, none of them 0, got shape {x.shape}"
            )
    found = Mask(
        mask,
        q.shape[0] if by_batch else 1,
        q.shape[2] if by_head else 1,
        mask_data is not None,
        () if mask_data is None else mask_data.shape,
    )
    return _of_lengths(found, q, k, mask_data, bool(by_batch), interpret)
