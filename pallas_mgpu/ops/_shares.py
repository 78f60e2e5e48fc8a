"""Shares of K for the last tiles of a product: `shares` of a MatmulConfig.

Persistent clusters work on whole tiles as long as there is one for each of them. K of the tiles
that are left is divided into equal shares, of whole steps, and the clusters work on the shares of
as many tiles at once as there are clusters for. Neighbours have neighbouring tiles and the same
share of K, so that they read the same operands at the same time.

The sum over a share without the last steps of K, a *part*, goes to global memory. The cluster with
the last share adds up all parts in their order, then its own sum: results repeat bit for bit. It
waits for clusters with lower numbers alone, which have started before it, and whose parts wait for
nobody."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp


class Shares(NamedTuple):
    """How the tiles that are left are shared. ``tiles``: how many are left; ``each``: shares of a
    tile; ``steps``: of a share, the last one may be shorter; ``abreast``: tiles that are worked on
    at once; ``rounds``: until all are done; ``clusters``: that have shares."""

    tiles: int
    each: int
    steps: int
    abreast: int
    rounds: int
    clusters: int


def shares_of(total, clusters, steps, each):
    """The Shares of tiles with so many steps on so many clusters; None where nothing is left."""
    left, of_share = total % clusters, pl.cdiv(steps, each)
    each = pl.cdiv(steps, of_share)  # none is empty
    if not left or each == 1 or each > clusters:
        return None
    rounds = pl.cdiv(left, clusters // each)
    abreast = pl.cdiv(left, rounds)
    return Shares(left, each, of_share, abreast, rounds, abreast * each)


class Work(NamedTuple):
    """A piece of work: int32 scalars."""

    number: object  # of the cluster's pieces
    tile: object
    first: object  # step of K
    steps: object
    whole: object  # has it all steps?
    ends: object  # has it the last one?


class SharedTiles:
    """The schedule of a cluster, as StaticTiles, with `Work` in place of tiles.

    ``total``: tiles; ``clusters``: of the grid; ``steps``: of a tile; ``shares``: of those that are
    left; ``cluster``: the number of this one."""

    def __init__(self, total, clusters, steps, shares, cluster):
        self.clusters, self.steps, self.shares, self.cluster = clusters, steps, shares, cluster
        self.rounds = (total - shares.tiles) // clusters  # of whole tiles
        self.place, self.column = cluster // shares.abreast, cluster % shares.abreast
        mine = (shares.tiles - self.column + (shares.abreast - 1)) // shares.abreast
        self.pieces = lax.select(self.place < shares.each, mine, 0)

    def round_of(self, work):
        """Of the shares: the one of a piece of work."""
        return work.number - self.rounds

    def work(self, w):
        s = self.shares
        whole = w < self.rounds
        left = jnp.maximum(w - self.rounds, 0) * s.abreast + self.column
        tile = lax.select(
            whole, self.cluster + w * self.clusters, self.rounds * self.clusters + left
        )
        first = lax.select(whole, 0, self.place * s.steps)
        stop = lax.select(whole, self.steps, jnp.minimum(first + s.steps, self.steps))
        return Work(w, tile, first, stop - first, whole, stop == self.steps)

    def produce(self, work, carry):
        """carry = work(piece, carry) for each piece of work of this cluster."""
        trips = self.rounds + self.pieces
        return lax.fori_loop(0, trips, lambda w, carry: work(self.work(w), carry), carry)

    consume = produce


def semaphores(shares, size, consumers):
    """Of the shares of tiles, for Parts; None where there are none, and under vmap, whose elements
    would share them: all tiles are then whole. size: blocks of a cluster."""
    if not shares:
        return None
    shape = shares.rounds, shares.abreast, size, consumers
    try:
        return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
    except NotImplementedError:
        return None


class Parts:
    """Where clusters leave parts of tiles. ``memory``: sums [rounds, clusters, blocks of a
    cluster, consumers, rows, columns]; ``done``: semaphores [rounds, tiles abreast, blocks of a
    cluster, consumers]; ``rank``: of this block in its cluster."""

    def __init__(self, memory, done, rank):
        self.memory, self.done, self.rank = memory, done, rank

    @staticmethod
    def scratch(shares, size, consumers, rows, columns, dtype):
        """size: blocks of a cluster; rows: of a consumer."""
        parts = shares.abreast * (shares.each - 1)
        shape = shares.rounds, parts, size, consumers, rows, columns
        return plgpu.ext.SharedScratch(shape, dtype)

    def hand_over(self, me, values, tiles, work):
        """A consumer's part, a list of arrays side by side."""
        at, first = tiles.round_of(work), 0
        for value in values:
            columns = slice(first, first + value.shape[1])
            self.memory[at, tiles.cluster, self.rank, me, :, columns] = value
            first += value.shape[1]
        done = self.done.at[at, tiles.column, self.rank, me]
        plgpu.semaphore_signal(done, memory_scope="gpu")

    def added(self, me, values, tiles, work):
        """The values and all parts of others of that tile. Of a whole tile: the values."""
        at, others = tiles.round_of(work), tiles.shares.each - 1

        @pl.when(~work.whole)
        def _():
            done = self.done.at[at, tiles.column, self.rank, me]
            plgpu.semaphore_wait(done, others, memory_scope="gpu")

        def add(j, values):
            cluster = j * tiles.shares.abreast + tiles.column
            first, found = 0, []
            for value in values:
                columns = slice(first, first + value.shape[1])
                source = self.memory.at[at, cluster, self.rank, me, :, columns]
                found.append(value + plgpu.load(source, layout=plgpu.Layout.WGMMA))
                first += value.shape[1]
            return tuple(found)

        others = lax.select(work.whole, 0, others)
        return list(lax.fori_loop(0, others, add, tuple(values)))
