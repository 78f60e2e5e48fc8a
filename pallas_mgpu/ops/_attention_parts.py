"""Attention to keys that are divided among blocks, where queries alone leave SMs without work: into
how many parts, and the kernel that merges their results.

Each number of parts is a program, so there are few of them. Programs with open lengths compute the
number from the lengths: as many parts as give each SM one, each of them at least `_LEAST_PART`
blocks. The results of the parts are one after the other then.

What parts cost is counted in blocks of keys of one SM. A part costs one block more than it has, the
sum one and a tenth of one for each MB of its operands; while an SM does a block, memory delivers
4 MB of keys and values. Fitted to 54 shapes on an H100, most of them random
(benchmarks/NOTEBOOK.md).

Where all tiles have the same blocks and equal parts leave the last wave half empty, all blocks of
all tiles are one row that is divided into equal shares, one for each SM: a tile has as many parts
as shares have blocks of it."""

import functools
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._batch import Batched
from pallas_mgpu._caches import cached

from ._attention_scores import PLAIN, scalar
from ._common import SeveralKernels, overlap_launches
from ._open_rows import in_shapes, views

_F32 = np.float32
_PARTS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32
_TOGETHER = 8  # parts whose results are loaded together, where their number is not known
_PART_COST, _MERGE_COST, _MERGED_MB_COST = 1, 1, 0.1
_MB_OF_A_BLOCK = 4.0  # that memory delivers in the time of a block
_LEAST_PART = 3  # blocks of a part
_ALIKE = 3  # blocks by which tiles may differ that are still done in waves
_SHARES_COST = 1.03  # what shares take of the time that is computed for them
_MOST = 2**31 - 2  # rows of an array
_SHARED_BLOCKS = 1 << 24  # of keys, whose numbers do not overflow
_GAIN = 0.95  # what divided keys take of the time of whole ones, at most


class Shares(NamedTuple):
    """Equal shares of the blocks of keys of all tiles, one for each block of the grid. ``tiles``:
    how many; ``blocks``: of keys of each; ``rows``: of queries of each; ``places``: shares."""

    tiles: int
    blocks: int
    rows: int
    places: int

    @property
    def _even(self):
        return divmod(self.tiles * self.blocks, self.places)

    @property
    def pieces(self):
        """Tiles of a share, at most."""
        each, rest = self._even
        return pl.cdiv(each + (rest > 0) - 1, self.blocks) + 1

    @property
    def parts(self):
        """Shares that a tile is divided among, at most."""
        return min(pl.cdiv(self.blocks - 1, self._even[0]) + 1, self.blocks)

    def start(self, place):
        """The first block of a share, counted over all tiles."""
        each, rest = self._even
        return place * each + jnp.minimum(place, rest)

    def owner(self, block):
        """The share that has a block."""
        each, rest = self._even
        wide = rest * (each + 1)
        return lax.select(block < wide, block // (each + 1), rest + (block - wide) // each)

    def shared_by(self, tile):
        """The first and the last share that have blocks of a tile."""
        return self.owner(tile * self.blocks), self.owner(tile * self.blocks + self.blocks - 1)


class SharedTiles:
    """The schedule of a block of the grid, as StaticTiles: number ``place * pieces + w`` is tile w
    of that share; the number of all is beyond."""

    def __init__(self, shares, place):
        self.total, self.first = shares.places * shares.pieces, place * shares.pieces
        begin, end = shares.start(place), shares.start(place + 1)
        self.count = (end - 1) // shares.blocks - begin // shares.blocks + 1

    def tile(self, w):
        return lax.select(w < self.count, self.first + w, self.total)

    def produce(self, work, carry, beyond=False):
        trips = self.count + int(beyond)
        return lax.fori_loop(0, trips, lambda w, carry: work(self.tile(w), carry), carry)


@cached
def merge(x, parts, interpret, shares=None):
    """Kernel: the result from those over parts of the keys, in the order of the parts. A lane has 8
    neighbouring columns of a row. shares: the parts that there are of a tile, if not all."""
    groups, layout = x.value_dim // 8, plgpu.Layout.TCGEN05_TMEM_NATIVE(8)
    units = x.batch * x.queries * x.heads * groups

    def body(o, lse, out, out_lse=None):
        overlap_launches()
        o, out = (ref.reshape((x.batch, -1, ref.shape[2], groups, 8)) for ref in (o, out))
        lane = plgpu.layout_cast(jnp.arange(128), layout.reduce(1))
        at = lax.axis_index("tile") * 128 + lane
        keep = at < units
        at = jnp.minimum(at, units - 1)
        at, group = at // groups, at % groups
        b, row, head = at // x.heads // x.queries, at // x.heads % x.queries, at % x.heads
        heads = [part * x.heads + head for part in range(parts)]
        logs = [lse[b, row, h] for h in heads]
        values = [o[b, row, h, group].astype(_F32) for h in heads]
        if shares:  # the others were not written
            tiles = pl.cdiv(x.queries, shares.rows)
            first, last = shares.shared_by((b * x.heads + head) * tiles + row // shares.rows)
            exist = [first + part <= last for part in range(parts)]
            logs = [jnp.where(e, log, _F32(-np.inf)) for e, log in zip(exist, logs)]
            values = [
                jnp.where(lax.broadcast_in_dim(e, (128, 8), [0]), v, _F32(0))
                for e, v in zip(exist, values)
            ]
        top = functools.reduce(jnp.maximum, logs)
        base = jnp.where(top == -np.inf, _F32(0), top)
        weights = [jnp.exp(log - base) for log in logs]
        total = functools.reduce(jnp.add, weights)
        factor = jnp.where(total == 0, _F32(0), 1 / total)
        weights = [lax.broadcast_in_dim(w * factor, (128, 8), [0]) for w in weights]
        value = functools.reduce(jnp.add, [w * v for w, v in zip(weights, values)])
        there = lax.broadcast_in_dim(keep, (128, 8), [0])
        value = value.astype(x.out_dtype)
        pl.store(out, (b, row, head, group, slice(None)), value, mask=there)
        if x.return_lse:
            at = b, head, row
            pl.store(out_lse, at, base + jnp.log(total), mask=keep & (group == 0))

    return plgpu.kernel(
        body,
        out_type=x.results,
        grid=(pl.cdiv(units, 128),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="attention_merge",
    )


def _blocks_of_tiles(x, cfg):
    """The number of blocks of keys of each tile of a head, as far as it is known here."""
    rows, f = cfg.consumers * 64, x.scores
    right = 0 if x.causal else f.right
    shift = x.keys - x.queries if f.bottom_right else 0
    first = np.arange(pl.cdiv(x.queries, rows)) * rows + shift
    low = np.clip(first - f.left, 0, x.keys) if f.left is not None else 0 * first
    high = np.clip(first + rows + right, 0, x.keys) if right is not None else 0 * first + x.keys
    return np.maximum(-(-high // cfg.block) - low // cfg.block, 1)


def _cost(x, blocks, cores, parts):
    """What attention to divided keys takes. blocks: of each tile of a head. Tiles that are alike
    are done in waves, others the longest first. A tile costs more than its blocks, because nothing
    overlaps its first scores and its result."""
    heads, each = x.batch * x.heads, -(-blocks // parts) + _PART_COST
    longest, count = each.max(), heads * len(blocks) * parts
    if longest - each.min() <= _ALIKE:
        waves = -(-count // cores)
        cost = waves * longest
    else:
        cost = max(longest, each.sum() * heads * parts / cores + longest / 2)
    cost = max(cost, _memory_cost(x))
    if parts == 1:
        return cost
    merged = parts * x.batch * x.queries * x.heads * x.value_dim * x.out_dtype.itemsize / 1e6
    return cost + _MERGE_COST + _MERGED_MB_COST * merged


def _memory_cost(x):
    width = x.cached.itemsize * (x.dim + x.value_dim)
    return x.batch * x.kv_heads * x.keys * width / 1e6 / _MB_OF_A_BLOCK


def tiles_of(x, cfg):
    return x.batch * x.heads * pl.cdiv(x.queries, cfg.consumers * 64)


def parts_of(x, cfg, cores):
    """Parts of the keys, where queries alone leave SMs without work."""
    tiles = tiles_of(x, cfg)
    if tiles >= 4 * cores:
        return 1
    blocks = _blocks_of_tiles(x, cfg)
    some = [n for n in _PARTS if n == 1 or n * _LEAST_PART <= blocks.max()]
    costs = {n: _cost(x, blocks, cores, n) for n in some}
    best = min(some, key=costs.get)
    return best if costs[best] < _GAIN * costs[1] else 1


def open_parts(x, cfg, cores):
    """How many parts programs with open lengths make; x: with such lengths, or those of a call."""
    f, blocks = x.scores, pl.cdiv(x.keys, cfg.block)
    right = 0 if x.causal else f.right
    if f.left is not None and right is not None:  # what the rows of a tile see
        blocks = _sizes.minimum(blocks, (cfg.consumers * 64 + f.left + right) // cfg.block + 2)
    fitting = _sizes.minimum(cores // tiles_of(x, cfg), blocks // _LEAST_PART)
    return _sizes.clamp(fitting, 2, _PARTS[-1])


def open_parts_pay(x, cfg, cores):
    """Are so many parts faster than whole keys? x: a problem with the lengths of a call."""
    parts, blocks = open_parts(x, cfg, cores), _blocks_of_tiles(x, cfg)
    return _cost(x, blocks, cores, parts) < _GAIN * _cost(x, blocks, cores, 1)


def shares_of(x, cfg, cores, parts):
    """Shares, if they are faster than so many equal parts of each tile, or None. Tiles have the
    same blocks, and memory is not the limit: blocks of the grid read other keys of a head at the
    same time then."""
    if x.causal or x.scores != PLAIN or any(x.lengths) or x.is_narrow:
        return None
    tiles, blocks = tiles_of(x, cfg), pl.cdiv(x.keys, cfg.block)
    if not cores <= tiles * blocks <= _SHARED_BLOCKS or tiles >= 4 * cores:
        return None
    segments, rows = tiles + cores, cfg.consumers * 64
    cost = pl.cdiv(tiles * blocks, cores) + segments / cores * _PART_COST
    merged = segments * rows * x.value_dim * x.out_dtype.itemsize / 1e6
    narrow = max(256 / (x.dim + x.value_dim), 1)  # whose blocks of keys take less time than merges
    cost = (cost + (_MERGE_COST + _MERGED_MB_COST * merged) * narrow) * _SHARES_COST
    fast = cost < _cost(x, _blocks_of_tiles(x, cfg), cores, parts)
    return Shares(tiles, blocks, rows, cores) if fast and _memory_cost(x) < 0.85 * cost else None


class _Divided(SeveralKernels):
    """Attention to parts of the keys, then the sum of the results."""

    def __init__(self, x, parts, kernel, interpret, shares=None):
        self.parts, self.shares = kernel, shares
        self.merge = merge(x, parts, interpret, shares)

    def __call__(self, *operands, out=None, stream=None):
        return self.merge(*self.parts(*operands, stream=stream), out=out, stream=stream)


@cached
def divided(*how):
    return _Divided(*how)


# ---- open lengths --------------------------------------------------------------------------------


@cached
def _merge_open(rows, batch, shape, out_dtype, return_lse, interpret):
    """Kernel: the sum of results that are one after the other, of `rows` rows each. Arguments: the
    results, their logarithms, the queries and an array of the size of the batch. shape: heads, the
    width of a query, that of a result."""
    heads, dim, value_dim = shape
    groups, layout = value_dim // 8, plgpu.Layout.TCGEN05_TMEM_NATIVE(8)
    units, whole = rows * heads * groups, plgpu.dim("R")
    parts = whole // rows

    def body(o, lse, *others):
        overlap_launches()
        out, out_lse = others[-2:] if return_lse else (others[-1], None)
        o, out = (ref.reshape((1, -1, heads, groups, 8)) for ref in (o, out))
        lane = plgpu.layout_cast(jnp.arange(128), layout.reduce(1))
        at = lax.axis_index("tile") * 128 + lane
        keep = at < units
        at = jnp.minimum(at, units - 1)
        at, group = at // groups, at % groups
        row, head = at // heads, at % heads

        def add(j, state):
            top, total, value = state
            numbers = [j * _TOGETHER + i for i in range(_TOGETHER)]
            places = [jnp.minimum(n, parts - 1) * scalar(rows) + row for n in numbers]
            logs = [lse[0, at, head] for at in places]
            values = [o[0, at, head, group].astype(_F32) for at in places]
            logs = [jnp.where(n < parts, log, _F32(-np.inf)) for n, log in zip(numbers, logs)]
            new = functools.reduce(jnp.maximum, logs, top)
            base = jnp.where(new == -np.inf, _F32(0), new)
            weights = [jnp.exp(log - base) for log in (top, *logs)]
            total = functools.reduce(jnp.add, weights[1:], total * weights[0])
            wide = [lax.broadcast_in_dim(w, (128, 8), [0]) for w in weights]
            products = [w * v for w, v in zip(wide, (value, *values))]
            return new, total, functools.reduce(jnp.add, products)

        none = plgpu.layout_cast(jnp.zeros((128,), _F32), layout.reduce(1))
        start = none - np.inf, none, plgpu.layout_cast(jnp.zeros((128, 8), _F32), layout)
        top, total, value = lax.fori_loop(0, pl.cdiv(parts, _TOGETHER), add, start)
        factor = jnp.where(total == 0, _F32(0), 1 / total)
        value = (value * lax.broadcast_in_dim(factor, (128, 8), [0])).astype(out_dtype)
        there = lax.broadcast_in_dim(keep, (128, 8), [0])
        pl.store(out, (0, row, head, group, slice(None)), value, mask=there)
        if return_lse:
            each = scalar(rows // batch)
            at = (row // each * heads + head) * each + row % each
            top = jnp.where(top == -np.inf, _F32(0), top) + jnp.log(total)
            pl.store(out_lse, (at,), top, mask=keep & (group == 0))

    out_type = plgpu.ShapeDtypeStruct((1, rows, heads, value_dim), out_dtype)
    if return_lse:
        out_type = out_type, plgpu.ShapeDtypeStruct((rows * heads,), _F32)
    like = (1, rows, heads, dim), (batch,)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(pl.cdiv(units, 128),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="attention_merge",
        **in_shapes((1, whole, heads, value_dim), (1, whole, heads), *like),
    )


class DividedOpen(SeveralKernels):
    """The same for lengths that are known when the kernels run. x: the problem of the call; whole:
    that of the kernel; operands: the shapes in which it gets its arguments; alone(): what does it
    for these lengths."""

    def __init__(self, x, whole, kernel, operands, interpret, alone):
        sizes = (x.batch,) * whole.counted
        self.parts, self.alone = views(kernel, operands, (None, None), sizes=sizes), alone
        shape, rows = (x.heads, x.dim, x.value_dim), plgpu.dim("N", max=_MOST)
        kernel = _merge_open(rows, whole.batch, shape, x.out_dtype, x.return_lse, interpret)
        results = [(x.batch, x.queries, x.heads, x.value_dim)]
        results += [(x.batch, x.heads, x.queries)] * x.return_lse
        self.merge = views(kernel, (None, None, operands[0]), results, sizes=(x.batch,))

    def __call__(self, *operands, out=None, stream=None):
        if any(isinstance(x, Batched) for x in operands):  # they have no views
            return self.alone()(*operands, out=out, stream=stream)
        found = self.parts(*operands, stream=stream)
        return self.merge(*found, operands[0], out=out, stream=stream)
