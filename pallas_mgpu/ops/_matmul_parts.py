"""The parts in which a tile is copied: rows beyond the array are left out. TMA would fill them with
zeros, which takes it longer than to fetch rows."""

import dataclasses

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp

FEW = 128  # rows that are columns of one tile
SOME = 512  # most rows of small tiles, whose equal parts took less time than boxes


@dataclasses.dataclass(frozen=True)
class Boxes:
    """What a tile is copied in where its number of rows is known at run time only: all of it, or up
    to three boxes with as many rows as powers of two."""

    tile: int
    grain: int  # fewest rows of a box

    @property
    def sizes(self):
        most = (self.tile - 1).bit_length() - 1
        return [1 << bit for bit in range(most, self.grain.bit_length() - 2, -1)]

    def __len__(self):
        return 3

    def copies(self, start, extent, fills, copy):
        """Copies what exists of the tile that begins there; fills: all of it. copy(place in the
        tile, place in the array, whether it exists). Each way copies as often, as the barrier of
        the slot expects."""
        grain, tile, sizes = self.grain, self.tile, self.sizes
        there = (jnp.clip(extent - start, 0, tile) + (grain - 1)) // grain * grain
        places, end = [], jnp.int32(0)
        for _ in range(len(self)):
            rows = jnp.int32(0)
            for size in reversed(sizes):
                last = len(places) == len(self) - 1  # the last one has all rows that are left
                fits = end + size // 2 < there if last else end + size <= there
                rows = lax.select(fits, size, rows)
            places.append((end, rows))
            end = end + rows

        def box(at, rows, exists=None):
            begin = start + at
            begin = lax.select(begin < extent, begin, 0)
            copy(pl.ds(at, rows), pl.ds(begin, rows), exists)

        def nothing():
            box(0, grain, jnp.bool_(False))

        def whole():
            box(0, tile)
            for _ in range(1, len(self)):
                nothing()

        def cut():
            for at, rows in places:
                for size in sizes:
                    pl.when(rows == size)(lambda at=at, n=size: box(pl.multiple_of(at, grain), n))
                pl.when(rows == 0)(nothing)

        full = (there == tile) | (end > tile) | fills
        lax.cond(full, whole, cut)


def parts_of(extent, size, blocks, sharers, grain, parted=None):
    """What a tile is copied in: triples of the first row, or column, how many of them, and whether
    they may all be beyond the array; or `Boxes`. extent: of that; size: of the tile; blocks: of a
    cluster that have tiles side by side; sharers: that copy a part together; grain: of what a block
    copies; parted: the most of an extent known at run time for which there are several parts."""
    grain *= sharers
    least = FEW if parted is None else 0
    if isinstance(extent, plgpu.Dim) and least < _sizes.most(extent) <= (parted or SOME):
        height = next((size // n for n in (4, 3, 2) if size % (n * grain) == 0), size)
        return [(first, height, True) for first in range(0, size, height)]
    if isinstance(extent, plgpu.Dim):
        fits = size % grain == 0 and grain & (grain - 1) == 0
        return Boxes(size, grain) if fits else [(0, size, True)]
    outside = pl.cdiv(extent, size) % blocks > 0
    cut = pl.cdiv(extent % size, grain) * grain
    if cut in (0, size) or cut > size or size % grain:
        return [(0, size, outside)]
    return [(0, cut, outside), (cut, size - cut, True)]
