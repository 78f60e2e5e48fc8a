"""Cross entropy of rows of logits with class numbers, and its gradient.

A block takes a row, in parts. Each lane keeps a running maximum and sum of exponentials of its own
elements; they are put together at the end of the row, so that a row is read once, whatever its
length. The gradient reads the row once more, with the logarithm of the sum that the forward
saved, and may take the place of the logits. Long, aligned rows pass through shared memory:
_cross_entropy_ring.py."""

from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _cross_entropy_ring
from ._common import FLOATS, overlap_launches
from ._cross_entropy_ring import LOW as _LOW
from ._open_rows import ANY_ROWS, in_shapes, rows_of, rowwise

_F32 = np.float32
_PART = 2048


class Problem(NamedTuple):
    """What a kernel computes."""

    rows: int
    n: int
    dtype: np.dtype
    ignore: int
    grad_dtype: np.dtype | None = None

    def loss(self, logits, row, target, lse):
        """Of a row, from the logarithm of its sum."""
        here = logits[row, jnp.clip(target, 0, self.n - 1)].astype(jnp.float32)
        counts = (target != self.ignore) & (target >= 0) & (target < self.n)
        value = jnp.where(counts, lse - here, _F32(np.nan))
        return jnp.where(target == self.ignore, _F32(0), value)


class _Row:
    """A row of logits in parts, while it is traced."""

    def __init__(self, x, logits, row):
        self.x, self.logits, self.row = x, logits, row
        self.width = min(x.n, _PART)
        self.parts = pl.cdiv(x.n, self.width)

    def inside(self, k):
        if self.x.n % self.width == 0:
            return None
        return jnp.arange(self.width) < self.x.n - k * self.width

    def at(self, k):
        return self.row, pl.ds(k * self.width, self.width)

    def load(self, k):
        keep = self.inside(k)
        if keep is None:
            return self.logits[self.at(k)].astype(jnp.float32)
        value = pl.load(self.logits, self.at(k), mask=keep, other=0.0)
        return jnp.where(keep, value.astype(jnp.float32), _LOW)

    def store(self, ref, k, value):
        keep = self.inside(k)
        if keep is None:
            ref[self.at(k)] = value.astype(ref.dtype)
        else:
            pl.store(ref, self.at(k), value.astype(ref.dtype), mask=keep)


@cached
def _forward(x, interpret):
    def body(logits, targets, loss, lse_out):
        overlap_launches()
        i = lax.axis_index("row")
        row = _Row(x, logits, i)

        def part(k, carry):
            top, total = carry
            value = row.load(k)
            new = jnp.maximum(top, value)
            return new, total * jnp.exp(top - new) + jnp.exp(value - new)

        shape = (row.width,)
        start = jnp.full(shape, _LOW), jnp.zeros(shape, jnp.float32)
        tops, totals = lax.fori_loop(0, row.parts, part, start)
        top = jnp.max(tops)
        lse = top + jnp.log(jnp.sum(totals * jnp.exp(tops - top)))
        loss[i], lse_out[i] = x.loss(logits, i, targets[i], lse), lse

    out = plgpu.ShapeDtypeStruct((x.rows,), _F32)
    return plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(x.rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="cross_entropy",
        **in_shapes((x.rows, x.n), (x.rows,)),
    )


@cached
def _backward(x, interpret):
    def body(grad, logits, targets, lse, out):
        overlap_launches()
        i = lax.axis_index("row")
        row = _Row(x, logits, i)
        target, total = targets[i], lse[i]
        factor = jnp.where(target == x.ignore, _F32(0), grad[i].astype(jnp.float32))

        def part(k, _):
            value = jnp.exp(row.load(k) - total)
            here = k * row.width + jnp.arange(row.width) == target
            row.store(out, k, (value - here.astype(jnp.float32)) * factor)

        lax.fori_loop(0, row.parts, part, None)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((x.rows, x.n), x.dtype),
        grid=(x.rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="cross_entropy_backward",
        **in_shapes((x.rows,), (x.rows, x.n), (x.rows,), (x.rows,)),
    )


def _by_ring(x, logits):
    features = _core.target(logits.device)["features"]
    return "TMA" in features and logits.aligned and _cross_entropy_ring.fits(x)


def _with_open_rows(x, logits, *kind):
    kind = x._replace(rows=0), logits.aligned, logits.device, kind
    rows, _ = rows_of(kind, x.rows, ANY_ROWS)
    return x._replace(rows=rows)


def _check(name, logits, targets):
    if logits.dtype.name not in FLOATS:
        raise TypeError(f"{name}: logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"{name}: logits must be (rows, classes), got shape {logits.shape}")
    if targets.dtype.name != "int32" or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"{name}: targets must be int32 of shape {logits.shape[:1]}, got {targets.dtype} of"
            f" shape {targets.shape}"
        )


@plgpu.specialize(in_place=False)
@rowwise
def cross_entropy(logits, targets, *, ignore_index=-100, interpret=None):
    """``logsumexp(logits) - logits[target]`` of each row, computed in float32 (Hopper).

    logits: (rows, classes), float16, bfloat16 or float32. targets: int32 (rows,), class numbers;
    rows whose target is ``ignore_index`` have the loss 0; a target that is not a class gives NaN.

    Returns (losses, lse), float32 (rows,) each; lse is the logarithm of the sum of exponentials,
    which :func:`cross_entropy_backward` takes. TypeError, ValueError for other dtypes and shapes.
    """
    _check("cross_entropy", logits, targets)
    rows, n = logits.shape
    x = _with_open_rows(Problem(rows, n, logits.dtype, int(ignore_index)), logits, interpret)
    by_ring = _by_ring(x, logits)
    return (_cross_entropy_ring.forward if by_ring else _forward)(x, interpret)


@plgpu.specialize
@rowwise
def cross_entropy_backward(grad, logits, targets, lse, *, ignore_index=-100, interpret=None):
    """The gradient of :func:`cross_entropy` with respect to the logits (Hopper):
    ``grad * (exp(logits - lse) - onehot(targets))``.

    grad: the gradient of the losses, float32 (rows,); lse: the second result of cross_entropy; the
    others: its arguments. out: a preallocated result, which may be ``logits``. Returns an array
    like ``logits``. TypeError, ValueError for other dtypes and shapes.
    """
    name = "cross_entropy_backward"
    _check(name, logits, targets)
    rows, n = logits.shape
    for what, v in (("grad", grad), ("lse", lse)):
        if v.shape != (rows,) or v.dtype != _F32:
            raise ValueError(
                f"{name}: {what} must be float32 of shape ({rows},), got {v.dtype} of shape"
                f" {v.shape}"
            )
    x = Problem(rows, n, logits.dtype, int(ignore_index), grad.dtype)
    x = _with_open_rows(x, logits, interpret, True)
    by_ring = _by_ring(x, logits)
    return (_cross_entropy_ring.backward if by_ring else _backward)(x, interpret)
