"""A sum over the devices, plus a residual, and its RMS norm, in one kernel.

Rows are shared among the devices as the pieces of `all_reduce` are: each device sums its rows,
which it reads from all, and writes the sums and the normalised rows into the results of all. Small
arrays go through staging memory, and every device sums all of their rows. Where there are no more
rows than blocks, the warpgroups of a block share a row, so that all of it is on the way at once.
Meetings, staging memory and flags are those of distributed.py."""

import math
import numbers

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._names import show

from . import distributed
from .distributed import _SMALL, _THREADS, ENTRY, EXIT, Collective, Workers, _piece, _runs

_KEPT = 4096  # columns that a worker keeps in registers
# Bytes of an array that all devices sum where the warpgroups of a block share a row: otherwise both
# results are sent.
_ONE_SHOT = 1 << 18


class _Rows:
    """Sums and norms of rows, by one worker, or by those of a block together.

    shared: None, or the memory by which the latter add up their sums of squares."""

    def __init__(self, w, residual, weight, normed, total, eps, shared=None):
        self.w, self.residual, self.weight, self.eps = w, residual, weight, eps
        self.own, self.columns, self.dtype = total, total.shape[1], total.dtype
        self.shared, self.first, width = shared, 0, self.columns
        if shared:
            width //= _THREADS
            self.first = lax.axis_index("wg") * width
        self.runs = list(_runs(width, _piece(w.size, 4)))
        if shared and width <= _KEPT:
            each = [(start + i * size, size, 1) for start, size, n in self.runs for i in range(n)]
            self.runs = each
        self.totals, self.norms = [total], [normed]

    def to_everyone(self, normed, total):
        self.totals = [self.w.on(total, d) for d in self.w.everyone()]
        self.norms = [self.w.on(normed, d) for d in self.w.everyone()]

    def share(self, rows, work):
        """work(row) for the rows of this worker, or of its block."""
        if not self.shared:
            return self.w.share(rows, work)
        row = lax.axis_index("block")
        return pl.when(row < rows)(lambda: work(row))

    def at(self, start, size):
        return pl.ds(self.first + start, size)

    def sum(self, sources, row, at):
        """A piece of a row, rounded."""
        value = sources[0][row, at].astype(jnp.float32)
        for source in sources[1:]:
            value = value + source[row, at].astype(jnp.float32)
        return (value + self.residual[row, at].astype(jnp.float32)).astype(self.dtype)

    def keep(self, value, row, at):
        for target in self.totals:
            target[row, at] = value
        return value.astype(jnp.float32)

    def finish(self, value, scale, row, at):
        value = value * scale * self.weight[at].astype(jnp.float32)
        for target in self.norms:
            target[row, at] = value.astype(self.dtype)

    def added(self, squares):
        """The sum over the warpgroups that share a row."""
        if not self.shared:
            return squares
        parts, ready = self.shared["parts"], self.shared["ready"]
        parts[lax.axis_index("wg")] = squares
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        return sum(parts[k] for k in range(_THREADS))

    def one(self, sources, row):
        """A row, which is read again where it does not fit in registers."""
        if all(count == 1 for *_, count in self.runs):
            places = [self.at(start, size) for start, size, _ in self.runs]
            sums = [self.sum(sources, row, at) for at in places]  # all of it is on the way
            kept = [self.keep(x, row, at) for x, at in zip(sums, places, strict=True)]
            scale = self.scale(sum(jnp.sum(x * x) for x in kept))
            for value, at in zip(kept, places, strict=True):
                self.finish(value, scale, row, at)
            return
        squares = jnp.float32(0)
        for start, size, count in self.runs:

            def add(i, squares, start=start, size=size):
                at = self.at(start + i * size, size)
                value = self.keep(self.sum(sources, row, at), row, at)
                return squares + jnp.sum(value * value)

            squares = lax.fori_loop(0, count, add, squares)
        scale = self.scale(squares)
        for start, size, count in self.runs:

            def scaled(i, _, start=start, size=size):
                at = self.at(start + i * size, size)
                self.finish(self.own[row, at].astype(jnp.float32), scale, row, at)

            lax.fori_loop(0, count, scaled, None)

    def scale(self, squares):
        return lax.rsqrt(self.added(squares) / self.columns + self.eps)


def _in_two_steps(w, x, residual, weight, normed, total, eps, shared):
    rows = x.shape[0]
    w.meet(ENTRY)
    row = _Rows(w, residual, weight, normed, total, eps, shared)
    row.to_everyone(normed, total)
    sources = [w.on(x, d) for d in range(w.size)]
    mine = (rows - w.me + (w.size - 1)) // w.size
    row.share(mine, lambda i: row.one(sources, i * w.size + w.me))
    w.meet(EXIT)


def _through_staging(w, x, residual, weight, normed, total, staging, eps, shared):
    rows = x.shape[0]
    half = staging.at[w.epoch % 2]
    targets = [w.on(half, d).at[w.me] for d in w.everyone()]
    row = _Rows(w, residual, weight, normed, total, eps, shared)

    def send(i):
        for start, size, count in row.runs:

            def move(k, _, start=start, size=size):
                at = row.at(start + k * size, size)
                value = x[i, at]
                for target in targets:
                    target[i, at] = value

            lax.fori_loop(0, count, move, None)

    row.share(rows, send)
    w.meet(ENTRY)
    row.share(rows, lambda i: row.one([half.at[d] for d in range(w.size)], i))


@cached
def _normed(mesh, axis, shape, dtype, eps, one_shot, blocks, interpret):
    view, size = (math.prod(shape[:-1]), shape[-1]), distributed._size(mesh, axis)
    rows = view[0] if one_shot else pl.cdiv(view[0], size)  # of a device
    options = {}
    if rows <= blocks and view[1] % (128 * _THREADS) == 0:
        options["scratch_types"] = {
            "parts": plgpu.SMEM((_THREADS,), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=_THREADS),
        }

    def body(refs, flags, epochs, **shared):
        w = Workers(flags, epochs, axis, blocks * _THREADS)
        x, residual, weight, *outs = refs
        x, residual, *outs[:2] = (r.reshape(view) for r in (x, residual, *outs[:2]))
        f = _through_staging if one_shot else _in_two_steps
        f(w, x, residual, weight, *outs, eps, shared)
        w.end()

    staging = [((2, size, *view), dtype)] if one_shot else []
    outs = [(shape, dtype)] * 2
    name = "all_reduce_rms_norm"
    return Collective(mesh, body, name, outs, staging, blocks, interpret, **options)


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
    ``one_shot`` is the default for arrays of up to 64 KiB, or 256 KiB if they have no more rows
    than there are ``blocks``. Lists of arrays, ``blocks`` and ``out``, a pair, as for
    :func:`distributed.all_reduce`."""
    what = "all_reduce_rms_norm"
    named = (x, "x"), (residual, "residual"), (weight, "weight")
    one, r, g = (distributed._operand(a, mesh, what, name) for a, name in named)
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
    if {distributed._dtype(r, what, "residual"), distributed._dtype(g, what, "weight")} != {dtype}:
        raise TypeError(
            f"{what}: x, residual and weight must have one dtype, got {one.dtype}, {r.dtype} and"
            f" {g.dtype}"
        )
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"{what}: eps must be a number, got {show(eps)}")
    one_shot = distributed._one_shot(one_shot, what)
    blocks = distributed._blocks(blocks, what, shape, dtype)
    if one_shot is None:
        few = math.prod(shape[:-1]) <= blocks
        one_shot = math.prod(shape) * dtype.itemsize <= (_ONE_SHOT if few else _SMALL)
    how = np.dtype(dtype), float(eps), one_shot, blocks, interpret
    f = _normed(mesh, axis_name, shape, *how)
    return tuple(f(x, residual, weight, out=out))
