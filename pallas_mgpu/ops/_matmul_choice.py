"""Configurations of matrix products on Hopper, and an estimate of their time that chooses one.

The estimate counts waves of clusters. A step along K takes what limits it: the tensor cores, the
L2, the way from barrier to barrier, or the latency of memory. benchmarks/fit_gemm_model.py fits its
rates to measurements (docs/performance.md)."""

import math
from typing import NamedTuple

from pallas_mgpu import _sizes, pl

from . import _few_rows
from ._common import SMEM_BYTES, SMS
from ._scaled import BLOCK


class MatmulConfig(NamedTuple):
    """How a product is tiled.

    ``consumers``: warpgroups that multiply, 64 rows each, 1 to 3. ``tile_n``: columns of a tile,
    16, 32 or a multiple of 64 up to 256, with 3 consumers 128. ``stages``: slots of the ring; 0: as
    many as fit. ``cluster``: blocks of a column of tiles that share B. ``buffers``: store buffers
    per consumer. ``group``: rows of cluster tiles worked on together, for the L2. ``cluster_n``:
    blocks of a row that share A. ``split``: the number of blocks that divide K, each with a
    multiple of 8 columns; every tile then has its own cluster of up to 8 blocks. ``step``: elements
    of K per slot, 64 or 128, for 8-bit floats also 256. ``lag``: products in flight while the next
    one is issued, 0 or 1; with block scales and up to 128 columns, products in flight while sums
    are scaled. ``serpentine``: every second tile of a block walks K backwards, so that it starts
    with data that is still in L2. ``slices``: parts of K that are multiplied as separate tiles
    and added up by a second kernel."""

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


class Plan:
    """Numbers that follow from a shape and a configuration."""

    def __init__(self, m, n, k, out_bytes, cfg, sms, in_bytes=2, along=2):
        """along: bytes of what goes along the columns, bias and scales."""
        self.cfg, self.consumers = cfg, cfg.consumers
        self.rows, self.cols = 64 * cfg.consumers, cfg.tile_n
        self.tiles_m = pl.cdiv(m, self.rows * cfg.cluster)
        self.tiles_n = pl.cdiv(n, self.cols * cfg.cluster_n)
        self.tiles = self.tiles_m * self.tiles_n  # of clusters
        self.total = self.tiles * cfg.slices if cfg.slices > 1 else self.tiles
        self.cluster = cfg.cluster * cfg.cluster_n * cfg.split
        fit = max(sms // self.cluster, 1)
        # one tile for each cluster, whatever m turns out to be
        self.single = cfg.split > 1 or _sizes.most(self.total) <= fit
        self.clusters = self.total if self.single else _sizes.minimum(self.total, fit)
        self.steps = pl.cdiv(pl.cdiv(k, cfg.step), cfg.split * cfg.slices)
        # the result of a block: all columns of the tile, or its part of them
        self.width = self.cols // cfg.split
        self.chunk = math.gcd(128 // out_bytes, self.width)  # columns of a store buffer
        self.chunks = self.width // self.chunk
        self.buffers = max(b for b in range(1, cfg.buffers + 1) if self.chunks % b == 0)
        # rows of sums that are sent, if there are no more
        self.sent = min(64, pl.cdiv(_sizes.most(m), 8) * 8) if cfg.consumers == 1 else 64
        used = cfg.consumers * self.buffers * 64 * self.chunk * out_bytes
        used += cfg.consumers * self.cols * along
        if cfg.split > 1:
            used += cfg.consumers * self.sent * (self.cols + self.width) * 4
        slot = (self.rows + self.cols) * cfg.step * in_bytes
        most = min((SMEM_BYTES - used) // slot, 12)
        self.stages = min(cfg.stages or most, most)
        if self.single:
            self.stages = min(self.stages, max(self.steps, 2))


# consumers, tile_n
_TILES = ((2, 256), (2, 192), (2, 128), (1, 256), (1, 192), (1, 128), (2, 64), (1, 64), (1, 32))

# blocks: below each other (B is shared), side by side (A is shared), along K. Clusters of four that
# share, or that share and divide K, took up to twice the time of two blocks on every shape.
_CLUSTERS = ((2, 1, 1), (1, 2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))

_SLICES = 64  # most parts of K that are added up by a second kernel
_SLICE_STEPS = 4  # fewest steps of one


def candidates(m, n, k, sms=SMS, in_bytes=2, blocks=False):
    """Configurations that make sense for a shape, roughly from large tiles to small ones.

    in_bytes: of an element of a or b. blocks: with scales of blocks."""
    found, step = [], 128 // in_bytes
    for consumers, tile_n in _TILES:
        if consumers == 2 and m <= 64 or tile_n >= max(2 * n, 64):
            continue
        for cluster, cluster_n, split in _CLUSTERS:
            if tile_n % (8 * split) or pl.cdiv(k, step) < split:
                continue
            if blocks and not blocks_take(consumers, tile_n, split):
                continue
            if cluster > 1 and m <= 64 * consumers or cluster_n > 1 and n <= tile_n:
                continue
            cfg = MatmulConfig(consumers, tile_n, 0, cluster, 2, 8, cluster_n, split, step)
            p = Plan(m, n, k, 4, cfg, sms, in_bytes)
            if tile_n == 192 and not (p.single and split == 1):
                continue  # only where it makes one wave of what were nearly two
            if p.stages < 2:
                continue
            if in_bytes == 1:  # a power of two: slots are then counted by masks and shifts
                cfg = cfg._replace(stages=1 << p.stages.bit_length() - 1)
            found.append(cfg)
            if split == 1:
                found += [cfg._replace(slices=s) for s in _slices_of(p, sms)]
    return found


def _slices_of(p, sms):
    """Numbers of slices that fill the SMs once, or half. p: the Plan without slices."""
    most = min(sms // (p.total * p.cluster), p.steps // _SLICE_STEPS, _SLICES)
    return [s for s in (most, most // 2) if s > 1]


class Rates(NamedTuple):
    """What the estimate of a product's time consists of: cycles of an SM, bytes and operations.

    From times on an H200: those that end in a comment by benchmarks/fit_gemm_model.py, the others
    before, by bench_ops_matmul.py."""

    tensor: float = 3656  # rows * columns * bytes along K that an SM multiplies in a cycle
    l2: float = 9670  # bytes of slots that the L2 gives to all SMs in a cycle, of small operands
    far: float = 8250  # the same of large ones, of which a half is in the other half of the L2
    wide: float = 6000  # and of those in slots of 32 KB or more: both from times on an H100
    near: float = 20e6  # bytes: from there on operands are large, below the rate grows
    intake: float = 55  # bytes that one SM takes in in a cycle, of 8-bit operands
    way: tuple[float, float] = (281, 355)  # from barrier to barrier, with one consumer or more
    latency: float = 1620  # from the request for a slot to its arrival: fitted
    step: float = 32
    power: float = 250e3
    epilogue: float = 57
    column: float = 3.6
    split: float = 660  # until sums travel: fitted
    exchange: float = 10.9  # bytes of sums that a block sends in a cycle: fitted
    restart: float = 2840  # a cluster ends and the next one begins: fitted
    cluster: float = 927  # for every doubling of the cluster
    memory: float = 2083  # bytes a cycle: fitted
    uneven: float = 1.17  # tiles of 192 columns, whose rows memory gives more slowly: fitted
    fill: float = 18400
    start: float = 1820
    # from times of slices, and of products beside them, on an H200:
    few_way: float = 510  # as way, where A has less than 64 rows
    few_intake: float = 33  # bytes of slots that one SM takes in in a cycle there
    second: float = 3000  # the kernel that adds up slices begins
    sums: float = 3500  # bytes of slices a cycle, written and read again


def clusters_at_once(sms, cluster):
    """How many clusters of that many blocks run at the same time, one block on an SM.

    A cluster does not leave its group of SMs (GPC), and the groups differ in size. An H200 with 132
    SMs runs 66 pairs, 30 clusters of 4 and 15 of 8 (cuOccupancyMaxActiveClusters). The share of
    other devices is taken to be the same. Less than 1 where there are not that many SMs."""
    usable = sms if cluster <= 2 else sms * 10 / 11
    return usable // cluster if usable >= cluster else usable / cluster


_RATES = Rates()


def cycles(m, n, k, cfg, sms, in_bytes=2, rates=_RATES):
    """An estimate of the time of a product, in cycles of an SM."""
    p = Plan(m, n, k, 2, cfg, sms, in_bytes)
    waves = math.ceil(p.total / clusters_at_once(sms, p.cluster))
    active = p.total * p.cluster / waves
    line = cfg.step * in_bytes
    slot = (p.rows + p.cols) * line
    fetched = (p.rows / cfg.cluster_n + p.cols / cfg.cluster) * line
    # a step takes what limits it: the tensor cores, the L2, the way from barrier to barrier, or the
    # wait for memory, during which only the slots that are not being multiplied are under way;
    # sharing hardly helps there (equal requests of neighbours are answered at once), but in power
    far = rates.far if slot < 32768 else rates.wide
    l2 = min(rates.l2, far * max(1, rates.near / ((m * k + k * n) * in_bytes)))
    tensor, l2 = p.rows * p.cols * line / rates.tensor, slot * active / l2
    if in_bytes == 1:
        l2 = max(l2, slot / rates.intake)
    way = rates.way[cfg.consumers > 1] * line / 128
    if m < 64 and in_bytes == 2:
        way = max(way, rates.few_way, slot / rates.few_intake)
    latency = rates.latency / (p.stages - cfg.lag)
    step = max(tensor, l2, way, latency) + rates.step + fetched * active / rates.power
    epilogue = rates.epilogue + rates.column * p.width
    if cfg.split > 1:  # the sums travel
        epilogue += rates.split + p.sent * cfg.consumers * p.cols * 4 / rates.exchange
    time = waves * (p.steps * step + epilogue) + rates.cluster * math.log2(p.cluster)
    if cfg.split > 1:  # blocks are not persistent
        time += rates.restart * (waves - 1)
    fill = min(p.stages, p.steps) * slot * active / rates.fill
    # few blocks ask for less than memory gives
    memory = (m * k + k * n) * in_bytes + m * n * 2
    memory /= min(rates.memory, active * rates.intake)
    if p.cols == 192:
        memory *= rates.uneven
    # the larger, or somewhat more where they are alike
    total = (time**6 + memory**6) ** (1 / 6) + fill + rates.start
    if cfg.slices > 1:
        total += rates.second + 2 * cfg.slices * m * n * 4 / rates.sums
    return total


def choose(m, n, k, sms=SMS, transpose_a=False, transpose_b=False):
    """The configuration for a shape on a GPU with that many SMs, for 16-bit floats."""
    if m == 1 or m == 2 and not transpose_a:
        return _few_rows.choose(n, k, transpose_b, sms)
    return min(candidates(m, n, k, sms), key=lambda cfg: cycles(m, n, k, cfg, sms))


def choose_fp8(m, n, k, sms=SMS, blocks=False):
    """The same for 8-bit floats. blocks: with scales of blocks."""
    found = candidates(m, n, k, sms, 1, blocks)
    return min(found, key=lambda cfg: cycles(m, n, k, cfg, sms, 1))


def choose_invariant(m, n, k, sms=SMS, in_bytes=2, blocks=False):
    """The fastest of those that sum over K in order. in_bytes, blocks: as for `candidates`."""
    found = candidates(m, n, k, sms, in_bytes, blocks)
    found = [cfg for cfg in found if cfg.split == cfg.slices == 1]
    found = min(found, key=lambda cfg: cycles(m, n, k, cfg, sms, in_bytes))
    return found._replace(serpentine=False)


def blocks_take(consumers, tile_n, split):
    """Is there a kernel for such tiles with scales of blocks? Two blocks wide take turns."""
    return BLOCK % tile_n == 0 or tile_n == 2 * BLOCK and consumers == 2 and split == 1
