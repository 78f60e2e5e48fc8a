"""The programs that numbers of rows of a product share, where these are known at run time only.

Up to 512 rows there is one for each bucket, tuned for all of its rows (up to 128) or the most of
them. For more that is not enough: tiles that fill whole waves with one number of rows leave most
SMs idle in the last wave with another one, and a program for all of them takes up to twice as long
as one for each. So these have several, a *family*, and each number of rows goes to the member that
takes the least time by the estimate. Members are configurations that are best for some numbers of
rows, chosen one after the other such that all numbers of rows come as near as possible to the
estimates of their own configurations. They depend on the product alone, not on the calls before."""

import dataclasses
import itertools

import numpy as np

from pallas_mgpu._caches import cached

from ._matmul_choice import (
    MatmulConfig,
    candidates,
    choose,
    choose_invariant,
    choose_k_major,
    cycles,
    in_fours,
    misaligned_rows,
    rates_of,
    sums_in_order,
)
from ._matmul_parts import FEW, SOME

_MOST = 8192  # rows that the members are chosen for; larger numbers have many waves
_SAMPLES = 16  # numbers of rows that they are chosen by, beside even ones, which are more usual
_BATCHES = 12, 2, 100, 4  # numbers of matrices with these
_WORST = 4  # the power of a ratio of times whose mean is to be small: large ones count more


@dataclasses.dataclass(frozen=True)
class Rows:
    """A product but for its rows. ta, tb: are A and B transposed? invariant: sums over K in order.
    in_bytes: of an element, of 8-bit operands and of float32 as tf32, all K-major; blocks: with
    scales of blocks; grain: as for `choose_k_major`."""

    n: int
    k: int
    sms: int
    ta: bool
    tb: bool
    invariant: bool = False
    in_bytes: int = 2
    blocks: bool = False
    grain: int = 8

    def own(self, m, batch=None, is_open=False):
        """The configuration for m rows, in each of so many matrices; None: a single one. is_open:
        as for `choose`."""
        n, k, sms, in_bytes = self.n, self.k, self.sms, self.in_bytes
        if batch is not None:
            return min(self._of_batches(m), key=lambda cfg: self.time(m, cfg, batch))
        if self.invariant:
            return choose_invariant(m, n, k, sms, in_bytes, self.blocks)
        if in_bytes != 2:
            return choose_k_major(m, n, k, sms, self.blocks, in_bytes, self.grain, is_open)
        return choose(m, n, k, sms, self.ta, self.tb, is_open)

    def of_one(self, m):
        """The configuration of a program for m rows alone."""
        cfg = self.own(m)
        if self.invariant or self.in_bytes > 2 or not isinstance(cfg, MatmulConfig):
            return cfg
        return in_fours(cfg, m, self.n, self.k, self.sms, self.in_bytes)

    def _of_batches(self, m):
        """Those that do not divide K among blocks of the whole GPU."""
        swaps = 0 if self.ta or self.invariant else m
        how = self.sms, self.in_bytes, self.blocks, self.tb or self.in_bytes != 2, swaps, self.grain
        for cfg in candidates(m, self.n, self.k, *how):
            if cfg.slices == cfg.shares == 1 and not self.invariant:
                yield cfg
            elif self.invariant and sums_in_order(cfg):
                yield cfg._replace(serpentine=False)

    def time(self, m, cfg, batch=None):
        """The estimate of a configuration; batch: as for own()."""
        pitches = m if self.ta else self.k, self.k if self.tb else self.n
        how = self.in_bytes, rates_of(m, self.in_bytes, self.blocks)
        misaligned = misaligned_rows(pitches, self.in_bytes)
        return cycles(m, self.n, self.k, cfg, self.sms, *how, misaligned, batch)

    def few(self, least, most, size, in_batches):
        """So many configurations for up to `most` rows. Few rows are all columns of one tile; for
        more there is one."""
        if most > FEW:
            return [self.own(most, is_open=True)]
        rows = [m for m in range(least, most + 1) if m % (16 if in_batches else 8) == 0]
        samples = _with_batches([max(least, 4), *rows], in_batches)
        own = [self.own(*of) for of in samples]
        whole = [cfg._replace(tile_n=most) for cfg in own if cfg.swapped]
        return _members(self, samples, own, own + whole, size)


def shared(product, m, buckets, batch=()):
    """The configuration of the program for m rows and others. product: a `Rows`, or what has its
    methods; buckets: the number of programs of each by its most rows; batch: the number of
    matrices, if there are several in a call."""
    most = min(edge for edge in buckets if m <= edge)
    least = max((edge for edge in buckets if edge < most), default=0) + 1
    members = _few if most <= SOME else _family
    found = members(product, least, most, buckets[most], bool(batch))
    return min(found, key=lambda cfg: product.time(m, cfg, *batch))


@cached
def _few(product, least, most, size, in_batches):
    return [_undivided(cfg) for cfg in product.few(least, most, size, in_batches)]


def _with_batches(rows, in_batches):
    """Samples with these numbers of rows, each with one of several numbers of matrices."""
    batches = itertools.cycle([(count,) for count in _BATCHES] if in_batches else [()])
    return [(m, *next(batches)) for m in dict.fromkeys(rows)]


def _undivided(cfg):
    """Tiles that are left are not divided where their number is known at run time only."""
    return cfg._replace(shares=1)


@cached
def _family(product, least, most, size, in_batches):
    """The members, for `least` rows or more. product: as for `shared`; in_batches: with several
    matrices in a call."""
    most = min(most, _MOST)
    ratio = (most / least) ** (1 / (_SAMPLES - 1))
    rows = [round(least * ratio**i) for i in range(_SAMPLES)]
    rows += [m << bits for m in (2, 3) for bits in range(13) if least <= m << bits <= most]
    samples = _with_batches(rows, in_batches)
    own = [product.own(*of) for of in samples]
    return _members(product, samples, own, own, size)


def _members(product, samples, own, found, size):
    """So many of the configurations `found`. samples: numbers of rows, and perhaps of matrices,
    that they are chosen by; own: their own configurations."""
    found = list(dict.fromkeys(map(_undivided, found)))
    of_own = [product.time(m, cfg, *batch) for (m, *batch), cfg in zip(samples, own)]
    slower = [[product.time(m, cfg, *batch) for m, *batch in samples] for cfg in found]
    slower = np.array(slower) / of_own
    members, reached = [], np.inf
    for _ in range(min(size, len(found))):
        with_one_more = np.minimum(slower, reached)
        best = (with_one_more**_WORST).mean(axis=1).argmin()
        members.append(found[best])
        reached = with_one_more[best]
    return members
