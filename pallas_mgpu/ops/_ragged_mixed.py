"""Grouped products of 16-bit floats with weights of 8 or 4 bits, a matrix for each group.

The kernel is that of `ragged_dot`, whose left operand is the matrix. Here a consumer loads its 64
rows of a slot and converts them, and the tensor cores take them from registers (_mixed_sums.py).
Scales of groups of K come through the ring, with each slot those of its elements."""

import functools

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._common import swizzled
from ._mixed_sums import BITS, load_scales, load_weights, scaled, sum_of_groups


class Weights:
    """What a plan for such matrices has beside that for float ones. tile: its rows, at most."""

    def __init__(self, x, tile):
        length = x.k // max(x.scale_groups, 1)  # elements of K with one scale
        self.step = 64 if tile > 128 or length % 128 else 128  # of a slot
        self.together = 128 // self.step if length % 128 == 0 else 1  # slots of a sum
        self.steps_of_scale = length // self.step
        self.bits = BITS[x.weights.name]
        self.grouped = x.scale_groups > 1
        self.scale_bytes = x.scale_dtype.itemsize if self.grouped else 0

    def scratch(self, p):
        """p: the plan."""
        x, rows = p.x, self.step * self.bits // 8
        tiled = (plgpu.TilingTransform((8, self.step)), plgpu.SwizzleTransform(rows))
        shape = p.stages, p.rows, self.step
        found = {"a_smem": plgpu.SMEM(shape, x.dtype, transforms=swizzled(64, x.dtype))}
        shape = p.stages, p.wide, self.step
        found["b_smem"] = plgpu.SMEM(shape, x.weights, transforms=tiled)
        if self.grouped:
            found["scale_smem"] = plgpu.SMEM((p.stages, p.wide), x.scale_dtype)
        return found


def product(block, me, g, height, col, it):
    """A tile transposed, as wide as its rows ask for. g: its group; col: its first column."""
    p, ring, weights = block.plan, block.ring, block.plan.weights
    which = sum((height > w).astype(jnp.int32) for w in p.widths[:-1])
    mine = pl.ds(me * 64, 64)

    def of_width(count, acc):
        rows = pl.ds(0, count)

        def scales_of(i):
            if not weights.grouped:
                return None
            ring.wait(it + i * weights.together)
            slot = ring.slot(it + i * weights.together)
            return load_scales(block.scale_smem.at[slot, mine])

        def weights_of(s, first):
            if not (first and weights.grouped):
                ring.wait(it + s)
            return load_weights(block.b_smem.at[ring.slot(it + s), mine], p.x.dtype)

        def issue(s, found):
            plgpu.wgmma(acc, found, block.a_smem.at[ring.slot(it + s), rows].T)

        steps = p.steps // weights.together, weights.together
        how = scales_of, weights_of, issue, lambda s: ring.release(it + s)
        return sum_of_groups(acc, *steps, *how)

    def padded(count):
        multiply = functools.partial(of_width, count)
        sums = pl.run_scoped(multiply, plgpu.ACC((64, count)))
        if count == p.rows:
            return sums
        return jnp.concatenate([sums, jnp.zeros((64, p.rows - count), jnp.float32)], axis=1)

    value = lax.switch(which, [functools.partial(padded, w) for w in p.widths])
    if p.x.scale_groups != 1:
        return value
    keep = None if p.x.n % p.cluster_cols == 0 else jnp.arange(64) < p.x.n - col
    how = {} if keep is None else {"mask": keep, "other": 0.0}
    return scaled(value, pl.load(block.scale_rhs, (g, 0, pl.ds(col, 64)), **how))


def rows_of_tile(mean):
    """For groups of so many rows on average (H200)."""
    return 64 if mean <= 64 else 192 if mean < 1024 else 256


def check(lhs, rhs, scales, transposed):
    """Those of `ragged_dot`; returns the number of scales of a column, 0 without."""
    name, (groups, n, k) = "ragged_dot", rhs.shape
    if not transposed:
        raise NotImplementedError(
            f"{name}: weights of 8 or 4 bits need the matrices as (G, N, K) and transpose_rhs=True"
        )
    if k % 64:
        raise ValueError(
            f"{name}: with weights of 8 or 4 bits K must be a multiple of 64, got {k}; pad both"
            " with zeros"
        )
    if scales is None:
        return 0
    if scales.dtype.name not in ("float16", "bfloat16", "float32"):
        raise TypeError(f"{name}: scale_rhs must be of a float dtype, got {scales.dtype}")
    shape = scales.shape
    if len(shape) != 3 or (shape[0], shape[2]) != (groups, n) or not shape[1]:
        raise ValueError(f"{name}: scale_rhs must have the shape ({groups}, S, {n}), got {shape}")
    if shape[1] > 1 and (k % shape[1] or k // shape[1] % 64):
        raise ValueError(
            f"{name}: the K={k} elements of a row must be {shape[1]} groups of a multiple of 64"
        )
    return shape[1]
