"""What grouped products share: the table of groups, which each block makes when it starts, as only
the GPU knows their sizes."""

from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._common import Ring, WarpSpecialized
from ._open_rows import in_shapes

# Edges of numbers of groups that share a program: of those that one warp adds up, of those whose
# table is 1 KiB, beside which the largest tiles of 16-bit products have four slots, and of others.
GROUPS = 0, 32, 127, 2047
SOME_GROUPS = 128  # that each step of the table adds where their number is a size of the call


class Product(NamedTuple):
    """What a kernel computes: [m, k] by [groups, k, n], or [groups, k, n] of [m, k] and [m, n]."""

    m: int
    n: int
    k: int
    groups: int
    dtype: np.dtype
    out_dtype: np.dtype
    tb: bool = False  # [groups, n, k]
    each: int = 0  # rows of a group's own array, of which the first ones count; 0: rows are packed
    scaled: bool = False  # scales of blocks of 8-bit operands
    weights: np.dtype | None = None  # of the matrices, if they have fewer bits than the rows
    scale_dtype: np.dtype | None = None  # of their scales
    scale_groups: int = 0  # scales of a column of such a matrix


def open_shapes(x, transposed=False, scales=None):
    """Options of plgpu.kernel for operands whose rows, perhaps also groups, are sizes of a call;
    copies may have longer rows. scales: the shape of those of rows, if there are any."""
    groups = None if isinstance(x.groups, int) else x.groups
    right = (x.m, None) if transposed else (groups, None, None)
    more = [] if scales is None else [scales, (groups, None, None)]
    if x.scale_groups:  # of weights
        more = [(groups, None, None)]
    return in_shapes((x.m, None), right, (groups,), *more)


class GroupedBlock(WarpSpecialized):
    """One block of a grouped product, while it is traced; it begins with the table of groups."""

    def __init__(self, plan, rows, refs):
        """rows: of a tile."""
        super().__init__(plan, refs)
        buffers = [self.a_smem, self.b_smem, *([self.scale_smem] if "scale_smem" in refs else [])]
        self.ring = Ring(plan.stages, self.full, self.empty, *buffers)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            self.make_table(rows)
            plgpu.barrier_arrive(self.table_ready)

        plgpu.barrier_wait(self.table_ready)
        self.cluster = lax.axis_index("cluster")
        self.rank = lax.axis_index("c") if plan.axes else 0

    def make_table(self, rows):
        """The first row of each group, and the number of row tiles before it; an entry more for the
        end. No group reaches beyond the array, whatever the sizes are."""
        m, groups, table = self.plan.x.m, self.plan.x.groups, self.table
        if self.plan.x.each:  # sizes in place of first rows
            counts = jnp.clip(self.sizes[...], 0, self.plan.x.each)
            table[0, pl.ds(0, groups)] = counts
            table[1, 0] = 0
            table[1, pl.ds(1, groups)] = jnp.cumsum((counts + (rows - 1)) // rows)
            return
        table[0, 0], table[1, 0] = 0, 0

        def add(first, sizes, mask=None):
            """The groups of these sizes, from the first one on."""
            after = pl.ds(first + 1, sizes.shape[0])
            counts = jnp.clip(sizes, 0, m)
            ends = jnp.cumsum(counts) + table[0, first]
            pl.store(table, (0, after), jnp.minimum(ends, m), mask=mask)
            counts = jnp.minimum(ends, m) - jnp.minimum(ends - counts, m)
            tiles = jnp.cumsum((counts + (rows - 1)) // rows) + table[1, first]
            pl.store(table, (1, after), tiles, mask=mask)

        some = min(SOME_GROUPS, self.plan.groups)

        def add_some(i, _):
            first = i * some
            there = lax.broadcasted_iota(jnp.int32, (some,), 0) + first < groups
            add(first, pl.load(self.sizes, pl.ds(first, some), mask=there, other=0), there)

        if isinstance(groups, int):
            add(0, self.sizes[...])
        else:
            lax.fori_loop(0, pl.cdiv(groups, some), add_some, None)

    def group_rows(self, g):
        """The first row of a group and how many there are."""
        each = self.plan.x.each
        if each:
            return g * each, jnp.clip(self.table[0, g], 0, each)
        start = jnp.clip(self.table[0, g], 0, self.plan.x.m)
        return start, jnp.maximum(self.table[0, g + 1] - start, 0)


def in_bands(t, tiles_m, tiles_n, band):
    """Tile number t as row and column of tiles: bands of rows, column by column."""
    if isinstance(tiles_m, int) and tiles_m <= band:
        return t % tiles_m, t // tiles_m
    number, inside = t // (band * tiles_n), t % (band * tiles_n)
    height = jnp.maximum(jnp.minimum(tiles_m - number * band, band), 1)
    return number * band + lax.rem(inside, height), lax.div(inside, height)
