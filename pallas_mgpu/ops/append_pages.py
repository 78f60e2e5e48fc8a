"""Appends keys and values to caches in pages, in place. A block copies one position."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches


@cached
def _kernel(k_pages, v_pages, new, table, dtype, interpret):
    (pages, size), entries = k_pages[:2], table[1]

    def body(k, v, page_table, lengths, k_cache, v_cache):
        overlap_launches()
        b, i = lax.axis_index("batch"), lax.axis_index("row")
        at = lengths[b] + i
        inside = (at >= 0) & (at < entries * size)
        page = page_table[b, jnp.clip(at // size, 0, entries - 1)]

        @pl.when(inside & (page >= 0) & (page < pages))
        def _():
            k_cache[page, at % size] = k[b, i]
            v_cache[page, at % size] = v[b, i]

    outs = [plgpu.ShapeDtypeStruct(shape, dtype) for shape in (k_pages, v_pages)]
    return plgpu.kernel(
        body,
        out_type=tuple(outs),
        grid=new,
        grid_names=("batch", "row"),
        interpret=interpret,
        kernel_name="append_pages",
    )


class _Append:
    """The kernel, whose results are the caches that it is called with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, k_pages, v_pages, *operands, out=None, stream=None):
        if out is not None:
            raise ValueError("append_pages: k_pages and v_pages are changed in place; omit out=")
        return self.kernel(*operands, out=(k_pages, v_pages), stream=stream)


@plgpu.specialize
def append_pages(k_pages, v_pages, k, v, page_table, lengths, *, interpret=None):
    """Appends keys and values to caches in pages, in place (Hopper).

    k_pages, v_pages: [pages, page_size, kv_heads, dim], as :func:`attention_decode` takes them;
    they are changed. k, v: [batch, rows, kv_heads, dim], of the same dtype. page_table: int32
    [batch, pages of a sequence]; lengths: int32 [batch], the rows that each sequence has before the
    call: row i of sequence b goes to the position ``lengths[b] + i``. Rows beyond the page table,
    and those whose page does not exist, are dropped. No position may be written twice.

    Returns (k_pages, v_pages). TypeError, ValueError for other dtypes and shapes, and for ``out=``.
    """
    for what, pages, x in (("k", k_pages, k), ("v", v_pages, v)):
        if pages.ndim != 4 or x.ndim != 4 or x.shape[2:] != pages.shape[2:] or 0 in x.shape:
            raise ValueError(
                f"append_pages: {what}_pages must be [pages, page_size, kv_heads, dim] and {what}"
                f" [batch, rows, kv_heads, dim]; got {pages.shape} and {x.shape}"
            )
        if x.dtype != pages.dtype or x.dtype != k.dtype:
            raise TypeError(
                "append_pages: the caches, k and v must have one dtype, got"
                f" {k_pages.dtype}, {v_pages.dtype}, {k.dtype} and {v.dtype}"
            )
    if k_pages.shape[:2] != v_pages.shape[:2] or k.shape[:2] != v.shape[:2] or 0 in k_pages.shape:
        raise ValueError(
            "append_pages: k_pages and v_pages must agree in pages and page_size, k and v in batch"
            f" and rows; got {k_pages.shape}, {v_pages.shape}, {k.shape} and {v.shape}"
        )
    ints = page_table.dtype == lengths.dtype == np.int32
    fits = page_table.ndim == 2 and page_table.shape[0] == k.shape[0] and page_table.shape[1]
    if not ints or not fits or lengths.shape != k.shape[:1]:
        raise ValueError(
            "append_pages: page_table must be int32 [batch, pages of a sequence] and lengths int32"
            f" [batch], for k {k.shape}; got {page_table.dtype} of shape {page_table.shape} and"
            f" {lengths.dtype} of shape {lengths.shape}"
        )
    shapes = k_pages.shape, v_pages.shape, k.shape[:2], page_table.shape
    return _append(shapes, np.dtype(k.dtype), interpret)


@cached
def _append(shapes, dtype, interpret):
    return _Append(_kernel(*shapes, dtype, interpret))
