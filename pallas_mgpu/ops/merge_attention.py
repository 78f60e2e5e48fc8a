"""Merges results of attention over parts of the keys, by their logarithms of sums.

With l the logarithm of a part, a result is the mean of the parts' results with weights exp(l). A
lane has a few neighbouring columns of a row (a query of one head) and goes through the parts once,
as attention goes through blocks of keys: the largest logarithm so far, the sum of weights, the
weighted results."""

import functools
import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import ANY_ROWS, ENTRIES, better, entries, in_shapes, is_static, views

_F32 = np.float32
_LANES, _COLUMNS = 128, 8  # of a block; neighbouring columns of a row that a lane has, at most
_TOGETHER = 4  # parts that are loaded together


@cached
def _kernel(shape, dtype, return_lse, interpret, count=None):
    """count: of (part, batch, query) where these are known later, and one dim of ``o`` and of the
    logarithms; the last two operands have the extents of parts and batch then. queries is 0."""
    parts, batch, queries, heads, dim = shape
    is_open, tokens = count is not None, batch * queries
    if is_open:
        tokens = count // parts
        queries = tokens // batch
    width = math.gcd(dim, _COLUMNS)
    rows, groups, layout = tokens * heads, dim // width, plgpu.Layout.TCGEN05_TMEM_NATIVE(width)
    units, together = rows * groups, min(_TOGETHER, _sizes.most(parts))
    steps = pl.cdiv(parts, together)

    def body(o, lse, *others):
        overlap_launches()
        out, out_lse = others[2 * is_open :] if return_lse else (others[-1], None)
        o, out = (ref.reshape((-1, heads, groups, width)) for ref in (o, out))
        lse, out_lse = (ref and ref.reshape((-1,)) for ref in (lse, out_lse))
        lane = plgpu.layout_cast(jnp.arange(_LANES), layout.reduce(1))
        unit = lax.axis_index("tile") * _LANES + lane
        keep, unit = unit < units, jnp.minimum(unit, units - 1)
        row, group = unit // groups, unit % groups
        token, head = row // heads, row % heads
        b = token // queries
        at = (b * heads + head) * queries + (token - b * queries)  # of the logarithms

        def along(x):
            return lax.broadcast_in_dim(x, (_LANES, width), [0])

        def add(j, state):
            """A few parts, all of which are loaded before any is used."""
            top, total, value = state
            logs, values = [], []
            for part in (j * together + i for i in range(together)):
                there = part < parts
                log = pl.load(lse, (part * rows + at,), mask=keep & there, other=-np.inf)
                logs.append(log)
                index = part * tokens + token, head, group, slice(None)
                values.append(pl.load(o, index, mask=along(keep & there), other=0))
            new = functools.reduce(jnp.maximum, logs, top)
            base = jnp.where(new == -np.inf, _F32(0), new)
            weights = [jnp.exp(log - base) for log in (top, *logs)]
            total, value = total * weights[0], value * along(weights[0])
            for log, weight, found in zip(logs, weights[1:], values):
                total = total + weight
                # a part without keys may hold anything
                found = jnp.where(along(log == -np.inf), _F32(0), found.astype(jnp.float32))
                value = value + found * along(weight)
            return new, total, value

        none = plgpu.layout_cast(jnp.zeros((_LANES,), _F32), layout.reduce(1))
        state = none - np.inf, none, plgpu.layout_cast(jnp.zeros((_LANES, width), _F32), layout)
        one_step = _sizes.most(parts) == together
        state = add(0, state) if one_step else lax.fori_loop(0, steps, add, state)
        top, total, value = state
        value = jnp.where(along(total == 0), _F32(0), value / along(total))
        place = token, head, group, slice(None)
        pl.store(out, place, value.astype(dtype), mask=along(keep))
        if return_lse:
            log = jnp.where(top == -np.inf, _F32(0), top) + jnp.log(total)
            pl.store(out_lse, (at,), log, mask=keep & (group == 0))

    result, logs, options = shape[1:], (batch, heads, queries), {}
    if is_open:
        result, logs = (tokens, heads, dim), (rows,)
        options = in_shapes((count, heads, dim), (count * heads,), (parts,), (batch,))
    outs = plgpu.ShapeDtypeStruct(result, dtype)
    if return_lse:
        outs = outs, plgpu.ShapeDtypeStruct(logs, _F32)
    return plgpu.kernel(
        body,
        out_type=outs,
        grid=(pl.cdiv(units, _LANES),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="merge_attention",
        **options,
    )


def _of_any_sizes(shape, dtype, device, *how):
    """The kernel of these shapes, or of any number of parts, up to two or more, any batch and any
    number of queries."""
    parts, batch, queries, heads, dim = shape
    kind, count = ("merge_attention", heads, dim, dtype, device, how), parts * batch * queries
    alone = functools.partial(_kernel, shape, dtype, *how)
    if count > ANY_ROWS[1] or max(parts, batch) > ENTRIES or is_static(kind, shape[:3]):
        return alone()
    rows = plgpu.dim("R", max=ANY_ROWS[1])
    any_parts = plgpu.dim("P", max=2) if parts <= 2 else plgpu.dim("P", min=3, max=ENTRIES)
    kernel = _kernel((any_parts, entries(), 0, heads, dim), dtype, *how, rows)
    results = (batch, queries, heads, dim), (batch, heads, queries)
    operands = (count, heads, dim), (count * heads,)
    return views(kernel, operands, results[: 1 + how[0]], alone, (parts, batch))


@plgpu.specialize(in_place=False)
@better
def merge_attention(o, lse, *, return_lse=False, interpret=None):
    """Combine the results of attention over parts of the keys into that over all keys (Hopper).

    o: [parts, batch, queries, heads, head_dim], float16, bfloat16 or float32; lse: float32 [parts,
    batch, heads, queries], the natural logarithms of the sums of exponentials that
    :func:`attention` and :func:`attention_decode` return; -inf: no keys, ``o`` may be anything
    there. return_lse: also return the logarithm for all keys, float32 [batch, heads, queries]. out:
    a preallocated result, or a pair of them. Sinks belong to one of the parts.

    Returns [batch, queries, heads, head_dim] of o's dtype, computed in float32, or (that, lse); 0
    and -inf where no part has keys. TypeError, ValueError for other dtypes and shapes.
    """
    if o.dtype.name not in FLOATS or lse.dtype != _F32:
        raise TypeError(
            "merge_attention: o must be float16, bfloat16 or float32, and lse float32; got"
            f" {o.dtype} and {lse.dtype}"
        )
    if o.ndim != 5 or 0 in o.shape:
        raise ValueError(
            "merge_attention: o must have the dims [parts, batch, queries, heads, head_dim], none"
            f" of them 0; got shape {o.shape}"
        )
    parts, batch, queries, heads, _ = o.shape
    if lse.shape != (parts, batch, heads, queries):
        raise ValueError(
            f"merge_attention: lse must have the shape {(parts, batch, heads, queries)} for o"
            f" {o.shape}, got {lse.shape}"
        )
    return _of_any_sizes(o.shape, np.dtype(o.dtype), o.device, bool(return_lse), interpret)
