"""A softmax that finds maxima only where it must.

Probabilities need no exact maximum of their row: any number that keeps them from overflowing will
do, and that of the blocks before nearly always does. So they are computed with it, and their sums,
which are needed anyway, tell whether one may be too large (or not be a number). Only then is the
maximum found, and the block computed again. What is saved are as many instructions as there are
scores, of about five for each, and the wait for the other lanes of the row before the first
exponential."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu import numpy as jnp

_F32 = np.float32
MASKED = _F32(-3.0e38)  # a score that is not there; stays finite in arithmetic


def scaled(m, c):
    """What is subtracted from scaled scores; a row may be masked entirely."""
    return jnp.where(m == MASKED, _F32(0), m * c)


def trusting(s, m, sums, c, convert, most, lazy, raised=0, select=True):
    """Scores [rows, columns], maxima of the rows so far (MASKED: none yet), sums [rows, 8] so far
    and the factor of the scores: (convert(probabilities), maxima, sums, what earlier results are
    multiplied with). most: what sums of an eighth of the columns may be; lazy: log2 of what a
    maximum may grow by; raised: log2 of what probabilities are multiplied with. select: that of
    `warp_where`; without, rows that are fine are computed with the maximum that they have."""
    rows, columns = s.shape

    def along(x, width):
        return lax.broadcast_in_dim(x, (rows, width), [0])

    def weights(top, c):
        base = scaled(top, c)
        e = jnp.exp2(s * c - along(base - raised if raised else base, columns))
        partial = e.reshape(rows, columns // 8, 8).sum(axis=1)
        return convert(e), partial, base

    found, partial, _ = weights(m, c)
    fine = (partial <= most) & along(m != MASKED, 8)
    found, partial = lax.optimization_barrier((found, partial))
    other = lax.optimization_barrier(jnp.float32(c))  # else s * c would be kept for it

    def again():
        new = jnp.maximum(m, jnp.max(s, axis=1))
        wrong = None if select else jnp.any(~fine, axis=1)
        grown = (new - m) * other > lazy
        new = jnp.where(grown if select else wrong & grown, new, m)
        found, partial, base = weights(new, other)
        alpha = jnp.exp2(m * other - base)
        alpha = alpha if select else jnp.where(wrong, alpha, 1)
        return found, new, sums * along(alpha, 8) + partial, alpha

    same = found, m, sums + partial, jnp.ones_like(m)
    return plgpu.ext.warp_where(~fine, again, same, along=1, select=select)
