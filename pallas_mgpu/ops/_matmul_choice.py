"""Configurations of matrix products on Hopper, and an estimate of their time that chooses one.

The estimate counts waves of clusters. A step along K takes what limits it: the tensor cores, the
L2, the way from barrier to barrier, or the latency of memory. benchmarks/fit_gemm_model.py fits its
rates to measurements (docs/performance.md)."""

import functools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, pl
from pallas_mgpu._caches import cached

from . import _few_rows
from ._common import SMEM_BYTES, SMS
from ._scaled import BLOCK
from ._shares import shares_of


class MatmulConfig(NamedTuple):
    """How a product is tiled.

    ``consumers``: warpgroups that multiply, 64 rows each, 1 to 3. ``tile_n``: columns of a tile,
    16, 32 or a multiple of 32 from 64 to 256, of 16 where B is stored as (N, K); with 3 consumers
    up to 200. ``stages``: slots of the ring; 0: as many as fit, up to 8. ``cluster``: blocks of a
    column of tiles that share B. ``buffers``: most store buffers per consumer. ``group``: rows of
    cluster tiles worked on together, for the L2. ``cluster_n``: blocks of a row that share A.
    ``split``: the number of blocks that divide K, each with a multiple of 8 columns; every tile
    then has its own cluster of up to 8 blocks. ``step``: elements of K per slot, 64 or 128, for
    8-bit floats also 256. ``lag``: products in flight while the next one is issued, 0 or 1; with
    block scales and up to 128 columns, products in flight while sums are scaled. ``serpentine``:
    every second tile of a block walks K backwards, so that it starts with data that is still in L2.
    ``slices``: parts of K that are multiplied as separate tiles and added up by a second kernel.
    ``shares``: parts of K of the last tiles, which are too few for all SMs; one block of each of
    them adds them up. Above 1 with a split and slices of 1 and without scales of blocks; no effect
    under ``vmap`` and for rows at run time. ``swapped``: the transpose of the result is computed
    from the swapped operands: tiles have 64 columns of the result for each consumer and ``tile_n``
    rows, any multiple of 8 up to 256; the first block of a split adds up all of the tile. Without
    ``transpose_a`` and scales of blocks. ``consumer_rows``: 64, or 128 with up to 2 consumers, a
    ``tile_n`` up to 200, a split of 1 and without scales of blocks; tiles then have twice the rows
    (if swapped, columns of the result)."""

    consumers: int = 2
    tile_n: int = 256
    stages: int = 0
    cluster: int = 2
    buffers: int = 2
    group: int = 8
    cluster_n: int = 1
    split: int = 1
    step: int = 64
    lag: int = 1
    serpentine: bool = True
    slices: int = 1
    shares: int = 1
    swapped: bool = False
    consumer_rows: int = 64


def _cdiv(a, b):
    """pl.cdiv without arrays, in a third of the time."""
    return (a + b - 1) // b


def _swizzled_width(width, out_bytes):
    """Columns of a store buffer with rows that TMA swizzles; a whole number makes the width."""
    return math.gcd(128 // out_bytes, width)


def _store_width(width, out_bytes):
    """The same, with longer rows that are not swizzled where these would be short."""
    swizzled = _swizzled_width(width, out_bytes)
    if swizzled * out_bytes > 32:
        return swizzled
    widths = range(8, 128 // out_bytes + 1, 8)
    return max((w for w in widths if width % w == 0), default=swizzled)


class Plan:
    """Numbers that follow from a shape and a configuration."""

    def __init__(self, m, n, k, out_bytes, cfg, sms, in_bytes=2, along=2, apart=False, batch=None):
        """along: bytes of what goes along the columns, bias and scales. apart: sums of a split have
        memory of their own beside the ring, as those of few bytes always have. batch: how many
        products, None for a single one."""
        self.cfg, self.consumers = cfg, cfg.consumers
        self.height = cfg.consumer_rows
        self.rows, self.cols = self.height * cfg.consumers, cfg.tile_n
        self.tiles_m = _cdiv(m, self.rows * cfg.cluster)
        self.tiles_n = _cdiv(n, self.cols * cfg.cluster_n)
        self.tiles = self.tiles_m * self.tiles_n  # of clusters
        self.total = self.tiles * cfg.slices if cfg.slices > 1 else self.tiles
        self.total = self.total if batch is None else self.total * batch
        self.cluster = cfg.cluster * cfg.cluster_n * cfg.split
        self.fit = fit = max(int(clusters_at_once(sms, self.cluster)), 1)
        self.steps = _cdiv(_cdiv(k, cfg.step), cfg.split * cfg.slices)
        self.shares = None  # of the last tiles
        open_ = isinstance(self.total, plgpu.Dim) or isinstance(self.steps, plgpu.Dim)
        if cfg.shares > 1 and not open_:
            self.shares = shares_of(self.total, fit, self.steps, cfg.shares)
        # one tile for each cluster, whatever m turns out to be
        self.single = cfg.split > 1 or _sizes.most(self.total) <= fit
        self.clusters = self.total if self.single else _sizes.minimum(self.total, fit)
        if self.shares:
            self.clusters = fit if self.total > fit else self.shares.clusters
            self.single = False
        # the result of a block: all columns of the tile, or its part of them
        self.width = self.cols if cfg.swapped else self.cols // cfg.split
        # rows of sums that are sent, if there are no more
        few = cfg.consumers == 1 and not cfg.swapped
        self.sent = min(64, _cdiv(_sizes.most(m), 8) * 8) if few else 64
        sums = 0  # that travel, otherwise where the ring was
        if cfg.split > 1 and cfg.swapped:
            sums = cfg.consumers * 64 * self.cols * cfg.split * 4
        elif cfg.split > 1:
            sums = cfg.consumers * self.sent * (self.cols + self.width) * 4
        self.apart = apart or 0 < sums <= _FEW_SUMS
        vectors = cfg.consumers * max(self.cols, self.height) * along
        slot = (self.rows + self.cols) * cfg.step * in_bytes

        def slots(chunk, buffers=cfg.buffers):
            """That fit beside at most so many store buffers of so many columns."""
            self._set_buffers(chunk, buffers)
            used = cfg.consumers * self.buffers * 64 * chunk * out_bytes + vectors
            used += sums if self.apart else 0
            if sums > SMEM_BYTES - used and not self.apart:
                return 0
            return min((SMEM_BYTES - used) // slot, 12)

        if not cfg.swapped:
            whole = cfg.split == 1
            chunk = (_store_width if whole else _swizzled_width)(self.width, out_bytes)
            most = slots(chunk)
        elif self.width <= 64:
            most = slots(self.width)
        else:  # as wide as takes no slot, or none that hides latency where there are more tiles
            step = self.rows * self.cols * cfg.step * in_bytes / _RATES.tensor
            hides = 12 if self.single else max(math.ceil(_RATES.latency / step) + 1, 4)
            enough = min(slots(8), cfg.stages or 12, hides)
            parts = range(_cdiv(self.width, 64), self.width // 8 + 1)
            widths = (_cdiv(self.width, 8 * count) * 8 for count in parts)
            most = slots(next(w for w in widths if slots(w) >= enough))
        # for so many slots: to these the rates of the estimate were fitted
        self.room = min(cfg.stages or most, most)
        self.stages = self.room if cfg.stages else min(most, _SLOTS)
        # of a single tile rather one more slot than another buffer
        if self.single and not (cfg.swapped or cfg.stages) and most < _SLOTS:
            chunk, buffers = self.chunk, self.buffers
            if slots(chunk, 1) > most:
                self.stages = most + 1
            else:
                self._set_buffers(chunk, buffers)
        if self.single:
            most = max(_sizes.most(self.steps), 2)
            self.room, self.stages = min(self.room, most), min(self.stages, most)

    def _set_buffers(self, chunk, most):
        """At most so many of so many columns; the last part of a row may be narrower."""
        self.chunk, self.chunks = chunk, _cdiv(self.width, chunk)
        stores = self.chunks * self.height // 64
        if self.cfg.swapped:
            self.buffers = min(stores, most)
        else:
            self.buffers = max(b for b in range(1, most + 1) if stores % b == 0)
        self.uneven = stores % self.buffers > 0  # a tile does not end with the last buffer


# consumers, tile_n
_TILES = (
    *((2, 256), (3, 192), (2, 224), (2, 192), (2, 160), (3, 128), (2, 128), (1, 256), (2, 96)),
    *((1, 192), (1, 160), (1, 128), (1, 96), (2, 64), (1, 64), (1, 32)),
)

_TALL_TILES = (128,)  # columns, with two consumers of 128 rows; wider ones took 2 to 19 % longer

# blocks: below each other (B is shared), side by side (A is shared), along K. Clusters of four that
# share, or that share and divide K, took up to twice the time of two blocks on every shape.
_CLUSTERS = ((2, 1, 1), (1, 2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))

_FEW_SHARERS = 4  # tiles with the same weights up to which these cost most
_EVEN_WAVES = 2  # most waves that tiles of any width are to fill
_SLICES = 64  # most parts of K that are added up by a second kernel
_WAVE_SLICES = 4  # most where they make waves even
_SLICE_STEPS = 4  # fewest steps of one
_SHARED_WAVES = 6
_SHARES = 8  # most parts of K of the last tiles
_COLD = 64 << 20  # bytes of weights
_LONG = 1.5e11  # multiplications that take so long that the clock falls
_FEW_SUMS = 32 << 10  # bytes of sums of a split that blocks need not wait for the ring to send
_SLOTS = 8  # of a ring; more of them hide nothing, and are counted by divisions
_SWAPPED = 128  # most rows of A that become columns of one tile
_PADDING = 1.12  # rows of several such tiles, as a multiple of A's
_FEW = 32  # rows of A up to which tiles of 64 are mostly empty
_NARROWEST = 72  # fewest rows of one
_MEDIUM = 1024  # rows of A up to which there are more such tiles than the fewest and two

# What the choice does not take yet, for bench_gemm_suite.py --wide to measure
_WIDE_TILES = ((3, 160), (3, 96), (3, 64))
_LONG_TILES = ((2, 128), (1, 256), (1, 128), (2, 64))  # with slots of 256 bytes of a row


def candidates(m, n, k, sms=SMS, in_bytes=2, blocks=False, tb=False, swaps=0, grain=8):
    """Configurations that make sense for a shape, roughly from large tiles to small ones.

    in_bytes: of an element of a or b. blocks: with scales of blocks. tb: is B stored as (N, K)?
    swaps: for up to so many rows of A also those that swap the operands. grain: of the columns of
    a tile that these are in then."""
    families = _families(m, n, k, sms, in_bytes, blocks, tb, swaps, grain)
    return [cfg for _, members in families for cfg in members()]


def _families(m, n, k, sms, in_bytes, blocks, tb, swaps, grain):
    """Pairs of a tile with a cluster, as a configuration, and a function that gives all
    configurations with these."""
    step = 128 // in_bytes
    if m <= min(swaps, _SWAPPED) and not blocks:
        yield from _swapped(m, n, k, sms, in_bytes)
    more = _even_tiles(m, n, sms) if tb and in_bytes <= 2 and m > _FEW and not blocks else ()
    for consumers, tile_n in (*_TILES, *more):
        if m <= 64 * (consumers - 1) or tile_n >= max(2 * n, 64):
            continue
        if tile_n % 64 and tile_n > 32 and not tb:  # rows of 64 bytes in shared memory
            continue
        for cluster, cluster_n, split in _CLUSTERS:
            if tile_n % (8 * split) or pl.cdiv(k, step) < split:
                continue
            if blocks and not blocks_take(consumers, tile_n, split):
                continue
            if cluster > 1 and m <= 64 * consumers or cluster_n > 1 and n <= tile_n:
                continue
            cfg = MatmulConfig(consumers, tile_n, 0, cluster, 2, 8, cluster_n, split, step)
            yield cfg, functools.partial(_members, m, n, k, cfg, sms, in_bytes, blocks)
    if blocks or in_bytes > 2:  # tf32 in these was not timed
        return
    tiles = [
        MatmulConfig(2, cols, step=step, consumer_rows=128)
        for cols in _TALL_TILES
        if tb or cols % 64 == 0
    ]
    if _SWAPPED < m <= swaps:
        tiles += _swapped_tiles(m, in_bytes, grain)
    yield from _in_pairs(tiles, m, n, k, sms, in_bytes)


def _even_tiles(m, n, sms):
    """Consumers and widths of tiles that fill one or two waves, beside those of _TILES."""
    found = {}
    for consumers in (2, 3, 1):
        rows = pl.cdiv(m, 64 * consumers)
        for waves in range(1, _EVEN_WAVES + 1):
            tile_n = pl.cdiv(pl.cdiv(n, max(waves * sms // rows, 1)), 16) * 16
            most = 200 if consumers == 3 else 256
            if 64 <= tile_n <= most and _store_width(tile_n, 2) > 16:
                found[consumers, tile_n] = None
    return [tile for tile in found if tile not in _TILES]


def _members(m, n, k, cfg, sms, in_bytes, blocks):
    """Configurations with that tile and cluster."""
    p = Plan(m, n, k, 4, cfg, sms, in_bytes)
    if p.stages < 2:
        return
    if blocks or in_bytes == 1 and m <= _SWAPPED:  # slots are counted by masks and shifts
        cfg = cfg._replace(stages=1 << p.stages.bit_length() - 1)
    yield cfg
    if cfg.split == 1 == cfg.consumers and in_bytes == 2 and m <= 128 >= cfg.tile_n and k >= 256:
        yield cfg._replace(step=128)  # memory gives 256 bytes of a row faster
    if cfg.split == 1:
        yield from _divisions(cfg, p, sms, blocks)


def _divisions(cfg, p, sms, blocks=False):
    """The same that divide K among more blocks. p: the Plan of the configuration."""
    for s in _slices_of(p, sms):
        yield cfg._replace(slices=s)
    for s in () if blocks else _shares_of(p, sms):
        yield cfg._replace(shares=s)


def wide_candidates(m, n, k, sms=SMS, in_bytes=2, tb=False):
    """Configurations that `candidates` leaves out: more widths of tiles and slots of 256 bytes of a
    row."""
    found, step = [], 128 // in_bytes
    tiles = [MatmulConfig(*tile, step=step) for tile in _WIDE_TILES if tile[1] % 64 == 0 or tb]
    if 16 * step <= k:
        tiles += [MatmulConfig(*tile, step=2 * step) for tile in _LONG_TILES]
    for _, members in _in_pairs(tiles, m, n, k, sms, in_bytes):
        found += list(members())
    known = set(candidates(m, n, k, sms, in_bytes, tb=tb, swaps=m))
    return [cfg for cfg in found if cfg not in known]


def _in_pairs(tiles, m, n, k, sms, in_bytes):
    """Those with these tiles: pairs that share B, pairs that share A, single blocks."""
    for tile in tiles:
        rows, cols = (n, m) if tile.swapped else (m, n)
        height = tile.consumer_rows * tile.consumers
        if rows <= height - tile.consumer_rows or tile.tile_n >= max(2 * cols, 64):
            continue
        pairs = ((1, 2), (2, 1)) if tile.swapped else ((2, 1), (1, 2))  # first that share weights
        if tile.consumer_rows > 64:  # pairs took up to 8 % longer
            pairs = ()
        for cluster, cluster_n in (*pairs, (1, 1)):
            if cluster > 1 and rows <= height:
                continue
            if cluster_n > 1 and cols <= tile.tile_n:
                continue
            cfg = tile._replace(cluster=cluster, cluster_n=cluster_n)
            yield cfg, functools.partial(_members_in_pairs, rows, cols, k, cfg, sms, in_bytes)


def _members_in_pairs(rows, cols, k, cfg, sms, in_bytes):
    p = Plan(rows, cols, k, 4, cfg, sms, in_bytes)
    if cfg.consumer_rows > 64:  # slots are few and large: rather one more of them
        one = cfg._replace(buffers=1)
        more = Plan(rows, cols, k, 4, one, sms, in_bytes)
        cfg, p = (one, more) if more.stages > p.stages else (cfg, p)
    if cfg.swapped:
        # neighbours work on the same weights at the same time; in several waves bands are square
        cfg = cfg._replace(group=1 if p.single else min(p.tiles_n, cfg.group))
    if p.stages >= 2:
        yield cfg
        yield from _divisions(cfg, p, sms)


def _swapped_tiles(m, in_bytes, grain):
    """Tiles whose columns are rows of A, in equal parts."""
    widths = {}
    fewest = pl.cdiv(m, 256)
    for count in range(fewest, max(min(m, _MEDIUM) // _NARROWEST, fewest + 2) + 1):
        cols = pl.cdiv(pl.cdiv(m, count), grain) * grain
        if count * cols <= _PADDING * m and cols >= 8:
            widths.setdefault(cols)
    for cols in widths:
        tile = MatmulConfig(2, cols, step=128 // in_bytes, swapped=True)
        if cols <= 200:
            yield tile._replace(consumer_rows=128)
            yield tile._replace(consumers=3)
        yield tile
        yield tile._replace(consumers=1)


def _swapped(m, n, k, sms, in_bytes):
    """Those that swap the operands: few rows of A become the columns of one tile."""
    grain = 8 if in_bytes > 1 or m <= 24 else 16  # as int8 wants it
    for consumers in (1, 2, 3):
        if n > 64 * (consumers - 1):
            step = 256 // in_bytes
            cfg = MatmulConfig(consumers, pl.cdiv(m, grain) * grain, 0, 1, step=step, swapped=True)
            for split in (1, 2, 4, 8):
                members = functools.partial(_members_swapped, m, n, k, cfg, split, sms, in_bytes)
                yield cfg._replace(split=split), members


def _are_gathered(n, k, sms):
    """Do few rows go to clusters of four? Where these take three of four SMs, rows are not short
    and weights of 16 bits come from memory, that took 0 to 6 % less time on an H100 than the
    fastest of all others."""
    return 2 * n * k >= _COLD and pl.cdiv(n, 128) >= 0.75 * sms and k > 2048


def _gathered(m, n, k, sms):
    """Blocks with two consumers each, four of which fetch the rows together."""
    cfg = MatmulConfig(2, pl.cdiv(m, 8) * 8, 0, 1, step=128, swapped=True)
    return next(_members_swapped(m, n, k, cfg, 1, sms, 2))._replace(cluster=4)


def in_fours(cfg, m, n, k, sms, in_bytes):
    """The same in clusters of four that fetch the rows of A together: where blocks that share
    nothing have all of these each, take three of four SMs and weights that come from memory, and
    all such clusters run at the same time. On an H200 that took 0.89 to 1.03 of the time."""
    alone = cfg.cluster == cfg.cluster_n == cfg.split == cfg.slices == cfg.shares == 1
    if not (cfg.swapped and alone and 64 < m <= cfg.tile_n and n * k * in_bytes >= _COLD):
        return cfg
    tiles = _cdiv(n, cfg.consumer_rows * cfg.consumers)
    fits = 0.75 * sms <= tiles and _cdiv(tiles, 4) <= clusters_at_once(sms, 4)
    return cfg._replace(cluster=4) if fits else cfg


def _members_swapped(m, n, k, cfg, split, sms, in_bytes):
    """Slots have 256 bytes of a row if four of them fit: memory gives these faster than 128."""
    p = Plan(n, m, k, 4, cfg, sms, in_bytes)
    if p.stages < 4 or cfg.step >= 2 * k:
        cfg = cfg._replace(step=cfg.step // 2)
        p = Plan(n, m, k, 4, cfg, sms, in_bytes)
    # a power of two: slots are then counted by masks and shifts
    cfg = cfg._replace(stages=1 << max(p.stages, 2).bit_length() - 1)
    if split == 1 and p.stages >= 2:
        yield cfg
        yield from _divisions(cfg, p, sms)
    elif p.stages >= 2:
        cfg = cfg._replace(split=split)
        p = Plan(n, m, k, 4, cfg, sms, in_bytes)
        if p.stages >= 2 and p.total * split <= sms and p.steps >= _SLICE_STEPS:
            yield cfg._replace(stages=1 << p.stages.bit_length() - 1)


def _slices_of(p, sms):
    """Numbers of slices that fill the SMs once, or half; or by which the waves of tiles come out
    more even. p: the Plan without slices."""
    clusters = max(int(clusters_at_once(sms, p.cluster)), 1)
    most = min(clusters // p.total, p.steps // _SLICE_STEPS, _SLICES)
    # none is empty
    found = [pl.cdiv(p.steps, pl.cdiv(p.steps, s)) for s in (most, most // 2) if s > 1]
    waves = pl.cdiv(p.total, clusters)
    for s in range(2, min(p.steps // _SLICE_STEPS, _WAVE_SLICES) + 1):
        if p.total > clusters / 2 and pl.cdiv(p.total * s, clusters) < 0.9 * waves * s:
            found.append(s)
    return list(dict.fromkeys(found))


def _shares_of(p, sms):
    """Numbers of shares by which the last tiles take the fewest steps. p: the Plan without."""
    clusters = max(int(clusters_at_once(sms, p.cluster)), 1)
    found = []
    if p.total > _SHARED_WAVES * clusters:
        return found  # the last wave is a small part of all
    for each in range(2, min(_SHARES, p.steps // _SLICE_STEPS) + 1):
        s = shares_of(p.total, clusters, p.steps, each)
        if s and s.each == each and s.rounds * s.steps < p.steps:
            found.append((s.rounds * s.steps, each))
    return [each for _, each in sorted(found)[:2]]


class Rates(NamedTuple):
    """What the estimate of a product's time consists of: cycles of an SM, bytes and operations.

    From times of configurations on an H200 (bench_gemm_suite.py --configs), by
    benchmarks/fit_gemm_model.py; some were then changed by hand, where what is chosen became
    faster."""

    # cycles of a step
    tensor: float = 3870  # rows * columns * bytes along K that an SM multiplies in a cycle
    smem: float = 157  # bytes that are read from and written to shared memory in a cycle
    l2: float = 9880  # bytes of slots that the L2 gives to all SMs in a cycle, of small operands
    far: float = 9200  # the same of large ones, of which a half is in the other half of the L2
    wide: float = 7500  # and of those in slots of 32 KB or more
    near: float = 20e6  # bytes: from there on operands are large, below the rate grows
    fetch: float = math.inf  # bytes that all SMs request from the L2 in a cycle
    lines: float = 67.6  # bytes of lines of the L2 that an SM asks for in a cycle
    intake: float = 46.3  # bytes that an SM takes in in a cycle: 8-bit and swapped operands
    way: tuple[float, float] = (281, 355)  # from barrier to barrier, with one consumer or more
    few_way: float = 475  # the same where A has less than 64 rows
    few_intake: float = 35  # bytes of slots that an SM takes in in a cycle there
    latency: float = 2120  # from the request for a slot to its arrival
    together: float = 0  # the same, where blocks share what is in it, and wait for each other
    step: float = 27
    loop: float = 1  # of the time of tensor cores and shared memory, with 128 rows of a consumer
    # bytes that all SMs fetch, per cycle that they cost: by the power they take, and by requests
    # for what is on its way already
    weights: float = 250e3  # of B
    rows: float = 250e3  # of A
    lone: float = (
        1  # those of B are as many times as dear where tiles of other blocks need the same
    )
    apart: float = 1  # the same where blocks share those of A instead
    beside: float = 1  # the same of single blocks next to those that need the same
    echo: float = 0  # of half of what these request, the part that does not count
    tied: float = 0  # cycles of a step of pairs that share few bytes, as far as they do not
    heat: float = 2500  # bytes that are read from and written to shared memory, the same
    # cycles of a tile
    epilogue: float = 57
    column: float = 4.16
    tall: float = 2  # times as long with 128 rows of a consumer
    alone: float = 170  # until a store buffer has been read, where there is no other one
    split: float = 1700  # until the sums of a cluster travel
    exchange: float = 9.5  # bytes of sums that a block sends in a cycle
    parts: float = 3680  # until the sums of shares are there
    part: float = 19.6  # bytes of them that an SM writes or reads in a cycle
    # cycles of the whole
    memory: float = 2280  # bytes a cycle
    cold: float = 26  # bytes that an SM takes in in a cycle, from memory
    turned: float = 0.02  # more time, if more than `_SWAPPED` rows of A become columns
    left: float = 39  # the same in the end, where a part of the SMs have tiles left
    uneven: float = 1.14  # more time for tiles of 192 columns
    zeros: float = 0.12  # more time, as far as rows of A are missing
    cluster: float = 840  # for every doubling of the cluster
    fill: float = 28800
    start: float = 1330
    second: float = 2500  # the kernel that adds up slices begins
    sums: float = 3400  # bytes of slices a cycle, written and read again


def clusters_at_once(sms, cluster):
    """How many clusters of that many blocks run at the same time, one block on an SM.

    A cluster does not leave its group of SMs (GPC), and the groups differ in size. An H200 with 132
    SMs runs 66 pairs, 30 clusters of 4 and 15 of 8 (cuOccupancyMaxActiveClusters). The share of
    other devices is taken to be the same. Less than 1 where there are not that many SMs."""
    usable = sms if cluster <= 2 else sms * 10 / 11
    return usable // cluster if usable >= cluster else usable / cluster


_RATES = Rates()
# The same for more than 128 rows, from times of 148 products on three H100s
_MANY_ROWS = Rates(
    smem=152.3, wide=7526, fetch=8000, intake=69.5, way=(250, 346), latency=2300, together=266,
    weights=74.9e3, rows=379e3, lone=2.71, apart=2.49, beside=1.3, echo=0.6, tied=15, heat=2245,
    loop=0.921, tall=8.48, split=3000, exchange=7, part=11.3, uneven=1.28, cluster=1129, start=1275,
    second=1918, sums=1500,
)  # fmt: skip


def rates_of(m, in_bytes=2, blocks=False):
    """The rates for the estimate of a product with m rows. Those of many rows were fitted to 8- and
    16-bit operands without scales of blocks only."""
    return _MANY_ROWS if m > _SWAPPED and in_bytes <= 2 and not blocks else _RATES


def cycles(m, n, k, cfg, sms, in_bytes=2, rates=_RATES, misaligned=(False, False), batch=None):
    """An estimate of the time of a product, in cycles of an SM. misaligned: of a and of b, whether
    the row pitch is no multiple of 128 bytes. batch: as for `Plan`."""
    if cfg.swapped:
        m, n, misaligned = n, m, misaligned[::-1]
    p = Plan(m, n, k, 2, cfg, sms, in_bytes, batch=batch)
    read = (m * k + k * n) * in_bytes * (batch or 1)
    waves = math.ceil(p.total / clusters_at_once(sms, p.cluster))
    active = p.total * p.cluster / waves
    if p.shares:
        active = p.clusters * p.cluster
        waves = (p.total - p.shares.tiles) // p.clusters
    line = cfg.step * in_bytes
    slot = (p.rows + p.cols) * line
    fetched = (p.rows / cfg.cluster_n + p.cols / cfg.cluster) * line
    # a step takes what limits it: the tensor cores, the L2, the way from barrier to barrier, or the
    # wait for memory, during which only the slots that are not being multiplied are under way;
    # sharing hardly helps there (equal requests of neighbours are answered at once), but in power
    far = rates.far if slot < 32768 else rates.wide
    l2 = min(rates.l2, far * max(1, rates.near / read))
    tensor, l2 = p.rows * p.cols * line / rates.tensor, slot * active / l2
    # single blocks next to others with the same weights, which are launched together
    beside = cfg.swapped and p.cluster == cfg.group == cfg.slices == 1 < p.tiles_n
    requested = fetched - (beside and rates.echo * p.rows / 2 * line)
    l2 = max(l2, requested * active / rates.fetch)
    # lines of the L2: a part of a row that begins anywhere has two; here sharing does help
    lines = fetched + misaligned[0] * p.rows / cfg.cluster_n * line
    lines += misaligned[1] * p.cols / cfg.cluster * line
    l2 = max(l2, lines / rates.lines)
    if in_bytes == 1 or cfg.swapped:
        l2 = max(l2, slot / rates.intake)
    way = rates.way[cfg.consumers > 1] * line / 128
    if m < 64 and in_bytes == 2:
        way = max(way, rates.few_way, slot / rates.few_intake)
    latency = rates.latency + rates.together * (cfg.cluster * cfg.cluster_n > 1)
    latency /= p.room - cfg.lag
    # what products read from shared memory and what arrives there
    smem = (p.rows // 64 * (64 + p.cols) + p.rows + p.cols) * line
    loop = rates.loop if p.height > 64 else 1
    # weights cost more where a few tiles need the same at a time, which wait for the memory then
    if cfg.swapped:
        weights, sharing, sharers = p.rows / cfg.cluster_n, cfg.cluster_n, p.tiles_n * cfg.cluster_n
    else:
        weights, sharing, sharers = p.cols / cfg.cluster, cfg.cluster, p.tiles_m * cfg.cluster
    weights, dear = weights * line, 1
    if cfg.cluster * cfg.cluster_n > sharing:
        dear = rates.apart
    elif sharing == 1 < sharers:
        dear = rates.beside if beside else rates.lone
    dear = 1 + (dear - 1) * min(1, _FEW_SHARERS / sharers)
    weak = cfg.swapped and cfg.cluster_n > 1 == cfg.group and p.rows < 0.8 * p.cols
    tied = rates.tied if weak else 0
    step = (
        max(max(tensor, smem / rates.smem) * loop, l2, way, latency)
        + rates.step
        + tied
        + smem / rates.heat
        + weights * dear * active / rates.weights
        + (fetched - weights) * active / rates.rows
    )
    stores = p.chunks * p.height // 64
    epilogue = rates.epilogue + rates.column * p.width * (rates.tall if p.height > 64 else 1)
    if p.buffers == 1:  # a part is written when the one before has left
        epilogue += rates.alone * (stores - 1)
    if cfg.split > 1:  # the sums travel
        sent = p.sent * cfg.consumers * p.cols * 4 * (cfg.split if cfg.swapped else 1)
        epilogue += rates.split + sent / rates.exchange
    time = waves * (p.steps * step + epilogue) + rates.cluster * math.log2(p.cluster)
    if p.shares:
        exchange = rates.parts + p.shares.each * p.rows * p.cols * 4 / rates.part
        epilogue += exchange
        time += p.shares.rounds * (p.shares.steps * step + epilogue)
    time -= epilogue  # the last one, when nothing else is done any more
    fill = min(p.room, p.steps) * slot * active / rates.fill
    # few blocks ask for less than memory gives
    written = m * n * 2 * (batch or 1)
    memory = (read + written) / min(rates.memory, active * rates.cold)
    if waves > 1 and not p.shares:  # a few tiles are left in the end
        rest = p.total - (waves - 1) * math.floor(clusters_at_once(sms, p.cluster))
        slower = max(rates.memory / (rest * p.cluster * rates.left) - 1, 0)
        memory *= 1 + rest / p.total * slower
    if p.cols == 192:
        memory *= rates.uneven
    if m < 64:
        memory *= 1 + rates.zeros * (1 - m / 64)
    # the larger, or somewhat more where they are alike
    total = (time**6 + memory**6) ** (1 / 6) + epilogue + fill + rates.start
    if cfg.swapped and n > _SWAPPED:
        total *= 1 + rates.turned
    if cfg.slices > 1:
        total += rates.second + 2 * cfg.slices * m * n * 4 / rates.sums
    return total


def misaligned_rows(rows, in_bytes):
    """Whether the pitch of rows of so many elements, padded to 16 bytes, is no multiple of 128."""
    return [pl.cdiv(row * in_bytes, 16) % 8 != 0 for row in rows]


def _least(m, n, k, cfg, sms, in_bytes, rates, misaligned):
    """Two numbers of cycles by the estimate: the configuration does not take less than the first,
    and those that divide K further not less than the second."""
    rows, cols, misaligned = (n, m, misaligned[::-1]) if cfg.swapped else (m, n, misaligned)
    height, width = cfg.consumer_rows * cfg.consumers, cfg.tile_n
    tiles = -(-rows // (height * cfg.cluster)) * -(-cols // (width * cfg.cluster_n))
    blocks, row = tiles * cfg.cluster * cfg.cluster_n, k * in_bytes
    waves = tiles / clusters_at_once(sms, cfg.cluster * cfg.cluster_n)
    smem = height // 64 * (64 + width) + height + width
    tall = cfg.consumer_rows > 64
    step = max(height * width / rates.tensor, smem / rates.smem) * (rates.loop if tall else 1)
    lines = height / cfg.cluster_n * (1 + misaligned[0]) + width / cfg.cluster * (1 + misaligned[1])
    step = max(step, rates.way[cfg.consumers > 1] / 128, lines / rates.lines)
    if in_bytes == 1 or cfg.swapped:
        step = max(step, (height + width) / rates.intake)
    more = smem / rates.heat + rates.step / 256
    weights, of_a = width / cfg.cluster / rates.weights, height / cfg.cluster_n / rates.rows
    if cfg.swapped:
        weights, of_a = height / cfg.cluster_n / rates.weights, width / cfg.cluster / rates.rows
    requests = blocks * row * (weights + of_a)
    l2 = min(rates.l2, rates.far * max(1, rates.near / ((m + n) * row)))
    l2 = blocks * row * (height + width) / l2
    memory = ((m + n) * row + m * n * 2) / rates.memory
    epilogue = rates.epilogue + rates.column * width / cfg.split * (rates.tall if tall else 1)

    def total(waves, sums):
        time = max(waves * row * step, l2) + waves * row * more + requests
        return (time**6 + memory**6) ** (1 / 6) + sums + epilogue + rates.start

    slices = rates.second + 2 * max(cfg.slices, 2) * m * n * 4 / rates.sums
    shares = rates.parts + 2 * height * width * 4 / rates.part
    if cfg.split > 1:
        return total(waves, rates.split), math.inf
    if cfg.slices > 1:
        return total(math.ceil(waves * cfg.slices) / cfg.slices, slices), math.inf
    if cfg.shares > 1:
        return total(waves, shares), math.inf
    return total(math.ceil(waves), 0), total(waves, min(slices, shares))


def _fastest(families, m, n, k, sms, in_bytes, rates, misaligned):
    """The configuration that takes the least time. If there is so much work that power is the
    limit, the first one that takes hardly more: in front are large tiles, which save power."""
    share = 1.015 if m * n * k > _LONG else 1.003
    order = []
    for i, (cfg, members) in enumerate(families):
        least = _least(m, n, k, cfg, sms, in_bytes, rates, misaligned)
        order.append((min(least), i, least, members))
    best, times = math.inf, []
    for family, i, least, members in sorted(order, key=lambda found: found[:2]):
        if family > best * share:
            break
        for j, cfg in enumerate(members()):
            if cfg.slices > 1 or cfg.shares > 1:
                if least[1] > best * share:
                    break
                if _least(m, n, k, cfg, sms, in_bytes, rates, misaligned)[0] > best * share:
                    continue
            time = cycles(m, n, k, cfg, sms, in_bytes, rates, misaligned)
            times.append((i, j, time, cfg))
            best = min(best, time)
    return min(found for found in times if found[2] <= best * share)[-1]


@cached
def choose(m, n, k, sms=SMS, transpose_a=False, transpose_b=False, is_open=False):
    """The configuration for a shape on a GPU with that many SMs, for 16-bit floats. is_open: m is
    the most of what the rows may be, which are then not divided into tiles of equal height."""
    if m == 1 and (transpose_a or transpose_b) or m == 2 and transpose_b and not transpose_a:
        return _few_rows.choose(n, k, transpose_b, sms)
    swaps = 0 if transpose_a else _SWAPPED if is_open else m
    if swaps and m <= 64 and _are_gathered(n, k, sms):
        return _gathered(m, n, k, sms)
    found = _families(m, n, k, sms, 2, False, transpose_b, swaps, 8)
    misaligned = misaligned_rows((m if transpose_a else k, k if transpose_b else n), 2)
    return _fastest(found, m, n, k, sms, 2, rates_of(m), misaligned)


@cached
def choose_k_major(m, n, k, sms=SMS, blocks=False, in_bytes=1, grain=8, is_open=False):
    """The same for operands with K contiguous: 8-bit ones, float32 as tf32. blocks: with scales of
    blocks; in_bytes: of an element; grain: as for `candidates`; is_open: as for `choose`."""
    misaligned = misaligned_rows((k, k), in_bytes)
    # tf32 in several tiles was not timed
    swaps = m if in_bytes == 1 and not is_open else _SWAPPED
    found = _families(m, n, k, sms, in_bytes, blocks, True, swaps, grain)
    return _fastest(found, m, n, k, sms, in_bytes, rates_of(m, in_bytes, blocks), misaligned)


def sums_in_order(cfg):
    """Does it add up along K in order, the same way in each of these?"""
    undivided = cfg.split == cfg.slices == cfg.shares == 1
    return undivided and cfg.consumer_rows == 64 and cfg[:2] in _TILES and not cfg.swapped


def choose_invariant(m, n, k, sms=SMS, in_bytes=2, blocks=False):
    """The fastest of those that sum over K in order. in_bytes, blocks: as for `candidates`."""
    found = filter(sums_in_order, candidates(m, n, k, sms, in_bytes, blocks, in_bytes != 2))
    found = min(found, key=lambda cfg: cycles(m, n, k, cfg, sms, in_bytes))
    return found._replace(serpentine=False)


def blocks_take(consumers, tile_n, split):
    """Is there a kernel for such tiles with scales of blocks? Two blocks wide take turns."""
    if consumers > 2 and tile_n >= BLOCK:  # no registers for two sums
        return False
    return BLOCK % tile_n == 0 or tile_n == 2 * BLOCK and consumers == 2 and split == 1
