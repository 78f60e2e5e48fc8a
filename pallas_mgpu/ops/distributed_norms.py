"""A sum over the devices, plus a residual, and its RMS norm, in one kernel.

Rows are shared among the devices as the pieces of `all_reduce` are: each device sums its rows,
which it reads from all, and writes the sums and the normalised rows into the results of all. Small
arrays go through staging memory, and every device sums all of their rows. Meetings, staging memory
and flags are those of distributed.py."""

import math

import numpy as np

from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import distributed
from .distributed import _SMALL, _THREADS, ENTRY, EXIT, Collective, Workers, _piece, _runs


class _Rows:
    """Sums and norms of rows, by one worker."""

    def __init__(self, w, residual, weight, normed, total, eps):
        self.w, self.residual, self.weight, self.eps = w, residual, weight, eps
        self.own, self.columns, self.dtype = total, total.shape[1], total.dtype
        self.runs = list(_runs(self.columns, _piece(w.size, 4)))
        self.totals, self.norms = [total], [normed]

    def to_everyone(self, normed, total):
        self.totals = [self.w.on(total, d) for d in self.w.everyone()]
        self.norms = [self.w.on(normed, d) for d in self.w.everyone()]

    def sum(self, sources, row, at):
        """A piece of a row, rounded and stored."""
        value = sources[0][row, at].astype(jnp.float32)
        for source in sources[1:]:
            value = value + source[row, at].astype(jnp.float32)
        value = (value + self.residual[row, at].astype(jnp.float32)).astype(self.dtype)
        for target in self.totals:
            target[row, at] = value
        return value.astype(jnp.float32)

    def finish(self, value, scale, row, at):
        value = value * scale * self.weight[at].astype(jnp.float32)
        for target in self.norms:
            target[row, at] = value.astype(self.dtype)

    def one(self, sources, row):
        """A row, which is read again where it does not fit in registers."""
        fits = all(count == 1 for *_, count in self.runs)
        kept, squares = [], jnp.float32(0)
        for start, size, count in self.runs:

            def add(i, squares, start=start, size=size):
                value = self.sum(sources, row, pl.ds(start + i * size, size))
                kept.append(value)
                return squares + jnp.sum(value * value)

            squares = add(0, squares) if fits else lax.fori_loop(0, count, add, squares)
        scale = lax.rsqrt(squares / self.columns + self.eps)
        for k, (start, size, count) in enumerate(self.runs):

            def scaled(i, _, k=k, start=start, size=size):
                at = pl.ds(start + i * size, size)
                value = kept[k] if fits else self.own[row, at].astype(jnp.float32)
                self.finish(value, scale, row, at)

            if fits:
                scaled(0, None)
            else:
                lax.fori_loop(0, count, scaled, None)


def _in_two_steps(w, x, residual, weight, normed, total, eps):
    rows = x.shape[0]
    w.meet(ENTRY)
    row = _Rows(w, residual, weight, normed, total, eps)
    row.to_everyone(normed, total)
    sources = [w.on(x, d) for d in range(w.size)]
    mine = (rows - w.me + (w.size - 1)) // w.size
    w.share(mine, lambda i: row.one(sources, i * w.size + w.me))
    w.meet(EXIT)


def _through_staging(w, x, residual, weight, normed, total, staging, eps):
    rows, columns = x.shape
    half = staging.at[w.epoch % 2]
    targets = [w.on(half, d).at[w.me] for d in w.everyone()]

    def send(i):
        for start, size, count in _runs(columns, _piece(w.size, 4)):

            def move(k, _, start=start, size=size):
                at = pl.ds(start + k * size, size)
                value = x[i, at]
                for target in targets:
                    target[i, at] = value

            lax.fori_loop(0, count, move, None)

    w.share(rows, send)
    w.meet(ENTRY)
    row = _Rows(w, residual, weight, normed, total, eps)
    w.share(rows, lambda i: row.one([half.at[d] for d in range(w.size)], i))


@cached
def _normed(mesh, axis, shape, dtype, eps, one_shot, blocks, interpret):
    def body(refs, flags, epochs):
        w = Workers(flags, epochs, axis, blocks * _THREADS)
        x, residual, weight, *outs = refs
        x, residual, *outs[:2] = (r.reshape(view) for r in (x, residual, *outs[:2]))
        (_through_staging if one_shot else _in_two_steps)(w, x, residual, weight, *outs, eps)
        w.end()

    view = (math.prod(shape[:-1]), shape[-1])
    staging = [((2, distributed._size(mesh, axis), *view), dtype)] if one_shot else []
    return Collective(
        mesh, body, "all_reduce_rms_norm", [(shape, dtype)] * 2, staging, blocks, interpret
    )


def all_reduce_rms_norm(
    x,
    residual,
    weight,
    mesh,
    axis_name=None,
    *,
    eps=1e-6,
    blocks=None,
    one_shot=None,
    interpret=None,
    out=None,
):
    """``total = all_reduce(x) + residual`` and ``rms_norm(total) * weight``, on every device.

    x: (..., columns) on each device, a summand; residual: the same shape, and weight: (columns,),
    of which all devices have the same; float16, bfloat16 or float32, all of one dtype. Returns
    (normed, total), the same bits on all devices. Summands are added in float32 in the order of the
    devices, then the residual, and the sum is rounded once; the norm is that of the rounded sum.
    Lists of arrays, ``blocks``, ``one_shot`` and ``out``, a pair, as for
    :func:`distributed.all_reduce`."""
    what = "all_reduce_rms_norm"
    one, r, g = (distributed._operand(a, mesh, what) for a in (x, residual, weight))
    axis_name, _ = distributed._along(mesh, axis_name, what)
    dtype, shape = distributed._dtype(one, what), tuple(map(int, one.shape))
    if dtype.name not in ("float16", "bfloat16", "float32"):
        raise NotImplementedError(f"{what}: float16, bfloat16 or float32, got {one.dtype}")
    if not shape or not math.prod(shape):
        raise ValueError(f"{what}: x must have columns and rows, got shape {shape}")
    if tuple(r.shape) != shape or tuple(g.shape) != shape[-1:]:
        raise ValueError(
            f"{what}: for x of shape {shape}, residual must have the same and weight {shape[-1:]};"
            f" got {tuple(r.shape)} and {tuple(g.shape)}"
        )
    if {distributed._dtype(a, what) for a in (r, g)} != {dtype}:
        raise TypeError(f"{what}: x, residual and weight must have one dtype")
    if one_shot is None:
        one_shot = math.prod(shape) * dtype.itemsize <= _SMALL
    f = _normed(
        mesh, axis_name, shape, np.dtype(dtype), float(eps), bool(one_shot),
        distributed._blocks(blocks, what, shape, dtype), interpret,
    )  # fmt: skip
    return tuple(f(x, residual, weight, out=out))
