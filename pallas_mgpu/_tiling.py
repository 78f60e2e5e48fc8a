"""Tiles of register layouts, and what they do to shapes, strides and indices.

A tile of n sizes acts on the last n entries of what the tile before left: each entry e becomes an
outer part, which stays in its place, and an inner one, which goes to the end in the same order.
What the parts are depends on what the entries are (sizes, strides, indices); `_cut` and `_join`
walk the tiles for all of them."""

import math

from ._names import show


def _cut(tiles, entries, cut):
    """``cut(entry, size) -> (outer, inner)`` of the last entries, tile by tile."""
    entries = list(entries)
    for tile in tiles:
        n = len(entries) - len(tile)
        if n < 0:
            raise ValueError(f"Tiling: the tile {tile} has more dims than {tuple(entries)}")
        parts = [cut(e, size) for e, size in zip(entries[n:], tile)]
        entries[n:] = [outer for outer, _ in parts] + [inner for _, inner in parts]
    return tuple(entries)


def _join(tiles, entries, join):
    """The other way round: ``join(outer, inner, size)``."""
    entries = list(entries)
    for tile in reversed(tiles):
        n = len(entries) - 2 * len(tile)
        if n < 0:
            raise ValueError(f"Tiling: {tuple(entries)} has too few dims for the tile {tile}")
        outer, inner = entries[n : n + len(tile)], entries[n + len(tile) :]
        entries[n:] = [join(*x) for x in zip(outer, inner, tile)]
    return tuple(entries)


def _cut_size(entry, size):
    if entry % size:
        raise ValueError(f"Tiling: {entry} is not divisible by the tile's {size}")
    return entry // size, size


def _join_size(outer, inner, size):
    if inner != size:
        raise ValueError(f"Tiling: a dim of the tile has size {inner}, expected {size}")
    return outer * inner


def _cut_nested(entry, size):
    """A dim that is several, as [(size, stride), ...], the last the fastest."""
    outer, inner, left = list(entry), [], size
    while left > 1:
        if not outer:
            raise ValueError(f"Tiling: {entry} is not divisible by the tile's {size}")
        n, stride = outer.pop()
        here = math.gcd(n, left)
        if here != n and here != left:
            raise ValueError(f"Tiling: the tile's {size} begins inside of a dim of {n}")
        inner.insert(0, (here, stride))
        if n > here:
            outer.append((n // here, stride * here))
        left //= here
    return tuple(outer) or ((1, 1),), tuple(inner) or ((1, 1),)


class TilingMethods:
    """What :class:`plgpu.Tiling` does, with ``tiles`` a tuple of tuples."""

    __slots__ = ()

    def tile_shape(self, shape):
        """The shape of the tiled array. ValueError where a tile does not divide it."""
        return _cut(self.tiles, shape, _cut_size)

    def untile_shape(self, shape):
        """The shape that :meth:`tile_shape` makes ``shape`` of."""
        return _join(self.tiles, shape, _join_size)

    def tile_strides(self, strides):
        """The strides of the dims of the tiled array, in the memory of one with ``strides``."""
        return _cut(self.tiles, strides, lambda stride, size: (stride * size, stride))

    def tile_indices(self, indices):
        """Where the element at ``indices`` is in the tiled array."""
        return _cut(self.tiles, indices, divmod)

    def untile_indices(self, indices):
        """Where the element at ``indices`` of the tiled array was."""
        return _join(self.tiles, indices, lambda outer, inner, size: outer * size + inner)

    def tile_nested_shape_strides(self, shape, strides):
        """Shape and strides of the tiled array, whose dims may each be several: ``shape`` and
        ``strides`` are tuples of tuples, as are the two results."""
        if [len(s) for s in shape] != [len(s) for s in strides]:
            raise ValueError(f"Tiling: shape {shape} and strides {strides} differ in structure")
        dims = _cut(self.tiles, [tuple(zip(n, s)) for n, s in zip(shape, strides)], _cut_nested)
        return tuple(tuple(tuple(part[k] for part in dim) for dim in dims) for k in (0, 1))

    def _dim(self, dim, what):
        n = len(self.tiles[0])
        if not 0 <= dim < n:
            raise ValueError(f"Tiling.{what}: dim must be 0 to {n - 1}, got {show(dim)}")
        return [k == dim for k in range(n)]

    def tile_dimension(self, dim):
        """For each dim of the tiled array, of which only the last are: does it come from ``dim``
        of the first tile?"""
        return _cut(self.tiles, self._dim(dim, "tile_dimension"), lambda mark, _: (mark, mark))

    def remove_dimension(self, dim):
        """The tiling of arrays without the dim that is ``dim`` of the first tile."""
        marks, tiles = self._dim(dim, "remove_dimension"), []
        for tile in self.tiles:
            marks = marks[len(marks) - len(tile) :]
            tiles.append(tuple(size for size, mark in zip(tile, marks) if not mark))
        return type(self)(tiles)

    def canonicalize(self):
        """The same tiling without tiles that cut nothing, and without leading ones in tiles."""
        tiles = [self.tiles[0]]
        for tile in self.tiles[1:]:
            while len(tile) > 1 and tile[0] == 1:
                tile = tile[1:]
            if tile and tile != tiles[-1][len(tiles[-1]) - len(tile) :]:
                tiles.append(tile)
        return type(self)(tiles)
