"""Shares of K of a product: `shares` and `stream` of a MatmulConfig.

Persistent clusters work on whole tiles as long as there is one for each of them. K of the tiles
that are left is divided into equal shares, of whole steps, and the clusters work on the shares of
as many tiles at once as there are clusters for. Neighbours have neighbouring tiles and the same
share of K, so that they read the same operands at the same time.

The sum over a share without the last steps of K, a *part*, goes to global memory. The cluster with
the last share adds up all parts in their order, then its own sum: results repeat bit for bit. It
waits for clusters with lower numbers alone, which have started before it, and whose parts wait for
nobody.

`stream`: the steps of all tiles, one tile after the other, are cut into equal shares, one for each
cluster. So only the first tile of a cluster may lack its first steps: its sum is the cluster's
part, and goes to global memory before the other tiles are begun. The cluster with the first steps
of a tile adds the parts to its own sum, when these are there for long. Clusters are numbered from
the last share to the first one, so that it waits for lower numbers here, too."""

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


class Streams(NamedTuple):
    """How the steps of all tiles are shared. ``steps``: of a share, the last one may be shorter;
    ``clusters``: that have one."""

    steps: int
    clusters: int


def streams_of(total, clusters, steps):
    """The Streams of tiles with so many steps on so many clusters; None where each of these has as
    many whole tiles."""
    if total % clusters == 0:
        return None
    of_share = pl.cdiv(total * steps, clusters)
    return Streams(of_share, pl.cdiv(total * steps, of_share))


class Work(NamedTuple):
    """A piece of work: int32 scalars."""

    number: object  # of the cluster's pieces
    tile: object
    first: object  # step of K
    steps: object
    whole: object  # has it all steps?
    finishes: object  # does it add up the parts of others?


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


class StreamedTiles:
    """The same where the steps of all tiles are shared: a Streams."""

    def __init__(self, total, steps, shares, cluster):
        self.steps, self.cluster = steps, cluster
        self.first = (shares.clusters - 1 - cluster) * shares.steps  # of all steps
        self.stop = jnp.minimum(self.first + shares.steps, total * steps)
        self.share = shares.steps

    def work(self, w):
        tile = self.first // self.steps + w
        before = tile * self.steps
        first = jnp.maximum(self.first - before, 0)
        steps = jnp.minimum(self.stop - before, self.steps) - first
        return Work(w, tile, first, steps, steps == self.steps, first == 0)

    def produce(self, work, carry):
        trips = (self.stop - 1) // self.steps - self.first // self.steps + 1
        return lax.fori_loop(0, trips, lambda w, carry: work(self.work(w), carry), carry)

    consume = produce

    def others(self, work):
        """How many clusters have parts of a tile that this one finishes."""
        missing = jnp.maximum((work.tile + 1) * self.steps - self.stop, 0)
        return (missing + (self.share - 1)) // self.share


def schedule_of(shares, total, clusters, steps, cluster):
    """SharedTiles or StreamedTiles, as `shares` is."""
    if isinstance(shares, Streams):
        return StreamedTiles(total, steps, shares, cluster)
    return SharedTiles(total, clusters, steps, shares, cluster)


class Parts:
    """Where clusters leave parts of tiles. ``memory``: sums [rounds, clusters, blocks of a
    cluster, consumers, 64, columns]; ``done``: semaphores [rounds, tiles abreast, blocks of a
    cluster, consumers]; ``rank``: of this block in its cluster. Of Streams there is one round, and
    a semaphore for each cluster's part."""

    def __init__(self, memory, done, rank):
        self.memory, self.done, self.rank = memory, done, rank

    @staticmethod
    def scratch(shares, size, consumers, columns, dtype):
        """size: blocks of a cluster."""
        if isinstance(shares, Streams):
            rounds, parts = 1, shares.clusters
        else:
            rounds, parts = shares.rounds, shares.abreast * (shares.each - 1)
        return plgpu.ext.SharedScratch((rounds, parts, size, consumers, 64, columns), dtype)

    @staticmethod
    def semaphores(shares, size, consumers):
        streams = isinstance(shares, Streams)
        rounds, tiles = (1, shares.clusters) if streams else (shares.rounds, shares.abreast)
        return pl.get_global(plgpu.SemaphoreType.REGULAR((rounds, tiles, size, consumers)))

    def hand_over(self, me, values, tiles, work):
        """A consumer's part, a list of arrays side by side."""
        streams, first = isinstance(tiles, StreamedTiles), 0
        at = 0 if streams else tiles.round_of(work)
        for value in values:
            columns = slice(first, first + value.shape[1])
            self.memory[at, tiles.cluster, self.rank, me, :, columns] = value
            first += value.shape[1]
        done = self.done.at[at, tiles.cluster if streams else tiles.column, self.rank, me]
        plgpu.semaphore_signal(done, memory_scope="gpu")

    def with_part(self, me, values, at, cluster):
        """The values and a cluster's part."""
        first, found = 0, []
        for value in values:
            columns = slice(first, first + value.shape[1])
            source = self.memory.at[at, cluster, self.rank, me, :, columns]
            found.append(value + plgpu.load(source, layout=plgpu.Layout.WGMMA))
            first += value.shape[1]
        return tuple(found)

    def added(self, me, values, tiles, work):
        """The values and all parts of others of that tile. Of a whole tile: the values."""
        if isinstance(tiles, StreamedTiles):
            return self.added_in_turn(me, values, tiles, work)
        at, others = tiles.round_of(work), tiles.shares.each - 1

        @pl.when(~work.whole)
        def _():
            done = self.done.at[at, tiles.column, self.rank, me]
            plgpu.semaphore_wait(done, others, memory_scope="gpu")

        def add(j, values):
            cluster = j * tiles.shares.abreast + tiles.column
            return self.with_part(me, values, at, cluster)

        others = lax.select(work.whole, 0, others)
        return list(lax.fori_loop(0, others, add, tuple(values)))

    def added_in_turn(self, me, values, tiles, work):
        def add(j, values):
            cluster = tiles.cluster - 1 - j
            done = self.done.at[0, cluster, self.rank, me]
            plgpu.semaphore_wait(done, 1, memory_scope="gpu")
            return self.with_part(me, values, 0, cluster)

        return list(lax.fori_loop(0, tiles.others(work), add, tuple(values)))
