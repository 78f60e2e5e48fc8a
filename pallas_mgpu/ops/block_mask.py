"""Which blocks of keys a tile of queries needs, for a mask that is a function of the pair.

A block of the grid has one tile of queries. It goes through the blocks of keys and evaluates the
mask on all pairs of each: a block without a pair that is there is left out, one in which all are
there needs no mask later."""

from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from .._names import show
from ._common import overlap_launches

ROWS, KEYS = 128, 128  # of a tile and of a block
_PART = 16  # keys that registers hold at a time


class Mask(NamedTuple):
    """A mask of pairs. batch, heads: those that it distinguishes."""

    function: object
    batch: int
    heads: int
    data: bool  # an array that the function reads

    def keep(self, sizes, at, shape, data, layout=None):
        """Which pairs are there. sizes: numbers of queries and keys; at: batch entry, head, first
        query and key; data: a ref."""
        b, h, *first = at
        i, j = (lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))
        if layout is not None:
            i, j = (plgpu.layout_cast(x, layout) for x in (i, j))
        i, j = i + first[0], j + first[1]
        inside = [jnp.minimum(x, n - 1) for x, n in zip((i, j), sizes)]
        found = self.function(b, h, *inside, *([data] if self.data else []))
        got = getattr(found, "dtype", found)
        if got != np.bool_:
            raise TypeError(f"mask must return booleans, got {got}")
        return jnp.broadcast_to(found, shape) & (i < sizes[0]) & (j < sizes[1])


def shape_of(mask, queries, keys):
    """Of the array of a block mask: for each tile the number of its blocks, and for each of them
    twice its number, plus 1 if it needs the mask."""
    return mask.batch, mask.heads, pl.cdiv(queries, ROWS), 1 + pl.cdiv(keys, KEYS)


@cached
def kernel(mask, queries, keys, interpret):
    """Kernel: the block mask; its argument is the data of the mask, or any array."""
    *grid, width = shape_of(mask, queries, keys)

    def body(data, out):
        overlap_launches()
        b, h, tile = (lax.axis_index(n) for n in ("batch", "head", "tile"))

        # what lies beyond the last query does not make a block one that needs the mask
        beyond = tile * ROWS + lax.broadcasted_iota(jnp.int32, (ROWS, _PART), 0) >= queries

        def one(block, count):
            def look(part, found):
                some, every = found
                at = b, h, tile * ROWS, block * KEYS + part * _PART
                keep = mask.keep((queries, keys), at, (ROWS, _PART), data)
                return some | keep, every & (keep | beyond)

            none = jnp.zeros((ROWS, _PART), bool)
            some, every = lax.fori_loop(0, KEYS // _PART, look, (none, ~none))
            some, every = jnp.any(some), jnp.all(every)

            @pl.when(some)
            def _():
                out[b, h, tile, count + 1] = 2 * block + 1 - every.astype(jnp.int32)

            return count + some.astype(jnp.int32)

        count = lax.fori_loop(0, width - 1, one, jnp.int32(0))

        @pl.when(count == 0)
        def _():
            out[b, h, tile, 1] = jnp.int32(1)  # a block of which nothing is there

        out[b, h, tile, 0] = jnp.maximum(count, 1)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((*grid, width), np.int32),
        grid=tuple(grid),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="block_mask",
    )


class OfArrays:
    """The kernel as a function of q, k and the data."""

    def __init__(self, mask, queries, keys, interpret):
        self.kernel = kernel(mask, queries, keys, interpret)

    def __call__(self, q, k, data=None, *, out=None, stream=None):
        return self.kernel(q if data is None else data, out=out, stream=stream)


def check_function(name, mask):
    if not callable(mask):
        raise TypeError(
            f"{name}: mask must be a function of (batch entry, head, query, key) that returns"
            f" booleans, got {show(mask)}"
        )


@plgpu.specialize
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
        mask, q.shape[0] if by_batch else 1, q.shape[2] if by_head else 1, mask_data is not None
    )
    return OfArrays(found, q.shape[1], k.shape[1], interpret)
