"""Merges results of attention over parts of the keys, by their logarithms of sums.

With l the logarithm of a part, a result is the mean of the parts' results with weights exp(l). A
block takes a few rows (queries of one head) and goes through the parts once, as attention goes
through blocks of keys: the largest logarithm so far, the sum of weights, the weighted results."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import ANY_ROWS, ENTRIES, better, entries, in_shapes, is_static, views

_F32 = np.float32
_TILE = 1024  # elements of a block


@cached
def _kernel(shape, dtype, return_lse, interpret, count=None):
    """count: of (part, batch, query) where these are known later, and one dim of ``o`` and of the
    logarithms; the last two operands have the extents of parts and batch then. queries is 0."""
    parts, batch, queries, heads, dim = shape
    is_open, tokens = count is not None, batch * queries
    if is_open:
        tokens = count // parts
        queries = tokens // batch
    rows, tile = tokens * heads, (max(1, _TILE // dim), dim)

    def body(o, lse, *others):
        overlap_launches()
        out, out_lse = others[2 * is_open :] if return_lse else (others[-1], None)
        row = lax.axis_index("tile") * tile[0] + lax.broadcasted_iota(jnp.int32, tile, 0)
        column = lax.broadcasted_iota(jnp.int32, tile, 1)
        keep = row < rows
        row = jnp.minimum(row, rows - 1)
        b, query, head = row // (queries * heads), row // heads % queries, row % heads
        token, log_at = (b, query), (b, head, query)
        if is_open:
            token, log_at = (row // heads,), ((b * heads + head) * queries + query,)

        def of_part(part, at, count):
            return (part * count + at[0],) if is_open else (part, *at)

        def add(part, state):
            value, m, total = state
            log = lse[of_part(part, log_at, rows)]
            new = jnp.maximum(m, log)
            base = jnp.where(new == -np.inf, _F32(0), new)
            mine, theirs = jnp.exp(m - base), jnp.exp(log - base)
            found = o[(*of_part(part, token, tokens), head, column)].astype(jnp.float32)
            # a part without keys may hold anything
            found = jnp.where(log == -np.inf, _F32(0), found)
            return value * mine + found * theirs, new, total * mine + theirs

        zero = jnp.zeros(tile, _F32)
        start = zero, jnp.full(tile, _F32(-np.inf)), zero
        value, m, total = lax.fori_loop(0, parts, add, start)
        value = jnp.where(total == 0, _F32(0), value / total)
        pl.store(out, (*token, head, column), value.astype(dtype), mask=keep)
        if return_lse:
            log = jnp.where(m == -np.inf, _F32(0), m) + jnp.log(total)
            pl.store(out_lse, log_at, log, mask=keep & (column == 0))

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
        grid=(pl.cdiv(rows, tile[0]),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="merge_attention",
        **options,
    )


def _of_any_sizes(shape, dtype, device, *how):
    """The kernel of these shapes, or of any number of parts, batch and number of queries."""
    parts, batch, queries, heads, dim = shape
    kind, count = ("merge_attention", heads, dim, dtype, device, how), parts * batch * queries
    alone = functools.partial(_kernel, shape, dtype, *how)
    if count > ANY_ROWS[1] or max(parts, batch) > ENTRIES or is_static(kind, shape[:3]):
        return alone()
    rows, any_parts = plgpu.dim("R", max=ANY_ROWS[1]), plgpu.dim("P", max=ENTRIES)
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
