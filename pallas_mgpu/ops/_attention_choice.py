"""How attention is tiled on Hopper: the fields of a configuration, and which one a problem gets."""

import typing

from pallas_mgpu import pl

from . import _attention_transposed
from ._attention_narrow import grain
from ._attention_scores import PLAIN
from .block_mask import KEYS, ROWS

_MANY = 2560  # causal queries of whose tiles the last ones cost little
_FEW = 512  # queries whose kernels are bound by memory rather than by instructions


class AttentionConfig(typing.NamedTuple):
    """How attention is tiled.

    ``consumers``: warpgroups of 64 query rows each. ``block``: keys per step, a multiple of 16.
    ``stages``: slots of the rings of K and V. ``lazy``: rescale only when needed. ``late``: wait
    for P V and the next K after the softmax. ``hold``: also release K only then. ``q_registers``:
    keep Q in registers. ``programs``: the number of blocks; 0: one for each SM. ``apart``: wait for
    P V before the softmax, which has the registers of P then. ``early``: probabilities are
    converted before O is rescaled, beside the exponentials. ``trusting``: the maxima of earlier
    blocks serve as those of a block, unless sums of its probabilities are large; only then are its
    own found (no dropout; ``lazy`` and ``early`` do not count)."""

    consumers: int = 2
    block: int = 128
    stages: int = 2
    lazy: bool = True
    late: bool = True
    hold: bool = False
    q_registers: bool = False
    programs: int = 0
    apart: bool = False
    early: bool = False
    trusting: bool = False


def choose(queries, head_dim, causal, scores=PLAIN, kind=""):
    """The configuration for a number of queries and a head size. kind: "narrow" or "widened", where
    all operands or keys and values have 8 bits, "placed" if these are all that do and there are
    lengths or pages; "lengths" or "paged" with lengths or pages of 16 bits; "rotated" where blocks
    rotate queries; "masked" by a function."""
    most = pl.cdiv(queries, 64)
    if kind in ("narrow", "placed", "widened"):
        return _choose_narrow(queries, head_dim, causal, scores, kind)
    if scores.bias and not scores.dropout and head_dim <= 128:
        wide = head_dim > 64
        return AttentionConfig(
            min(2, most), 96 if wide else 64, 2, late=False, hold=True, trusting=wide
        )
    if scores.adjusted or scores.dropout:  # registers for what is computed from scores
        return AttentionConfig(min(2, most), 64, 2)
    if head_dim == 64:
        return _choose_64(queries, causal, kind)
    if head_dim in (96, 128):
        consumers = min(2, most)
        if kind == "paged":  # the producer needs registers for the addresses of pages
            return AttentionConfig(consumers, 128, 2)
        late = head_dim == 96
        if kind in ("lengths", "masked"):
            how = {"late": late, "hold": not late, "q_registers": True, "early": True}
            return AttentionConfig(consumers, 128, 2, **how)
        late |= kind == "rotated" or queries <= _FEW
        return AttentionConfig(consumers, 128, 2, late=late, hold=not late, trusting=True)
    return AttentionConfig(min(2, most), 64, 2)


def _choose_64(queries, causal, kind):
    """Three consumers make a row 1.16 times as fast as two."""
    if kind == "masked":
        return AttentionConfig(2, 128, 4, late=False, hold=True)
    consumers = 3 if _of_three(queries, causal, 1.16) else min(2, pl.cdiv(queries, 64))
    return AttentionConfig(consumers, 128, 4, late=False, hold=True, apart=True, trusting=True)


def _of_three(queries, causal, gain):
    """Do three consumers, which make a row so many times as fast, pay? Their tiles pad more rows,
    and causal ones more keys and their ends more waiting."""
    if causal and queries < _MANY:
        return False

    def work(consumers, each):
        rows = consumers * 64
        keys = (queries + rows + 128) / 2 if causal else 1
        return pl.cdiv(queries, rows) * rows * keys * each

    return work(3, 1) < work(2, gain)


def _choose_narrow(queries, head_dim, causal, scores, kind):
    """Where 16-bit elements are made of 8-bit ones there is room for fewer keys."""
    consumers, narrow = min(2, pl.cdiv(queries, 64)), kind != "widened"
    if head_dim <= 64:
        if kind == "narrow" and scores == PLAIN and _of_three(queries, causal, 1.07):
            return AttentionConfig(3, 128, 2, apart=not causal)
        lazy = narrow or not causal
        return AttentionConfig(consumers, 128, 2, lazy=lazy, late=False, hold=lazy and not narrow)
    block = {128: (96, 128), 256: (32, 64)}[128 if head_dim <= 128 else 256][narrow]
    if scores.adjusted or scores.dropout:
        return AttentionConfig(consumers, min(block, 64), 2)
    if narrow and head_dim in (96, 128) and consumers == 2:
        return AttentionConfig(consumers, 192, 2, late=causal, hold=not causal)
    return AttentionConfig(consumers, block, 2, q_registers=head_dim <= 128)


def choose_for(x, queries, width):
    """The configuration of a problem, tuned for a number of queries."""
    kind = "paged" if x.page else "lengths" if any(x.lengths) else "rotated" if x.angles else ""
    if x.scores.mask:
        config = choose(queries, width, False, kind="masked")
        return config._replace(consumers=ROWS // 64, block=KEYS)
    if x.is_narrow:
        placed = x.page or any(x.lengths) or x.whole
        kind = "widened" if x.kv_dtype else "placed" if placed else "narrow"
    config = choose(queries, width, x.causal, x.scores, kind)
    if x.transposed:
        return config._replace(**_attention_transposed.tiling(x, config.consumers))
    if x.is_narrow:
        n = grain(x)
        config = config._replace(block=max(config.block // n, 1) * n)
    return config
