"""Keys and values of 8 bits, or in small pages, as 16-bit arrays, for attention of many queries on
Hopper.

Blocks of attention that widen elements as they arrive (_attention_narrow.py) do so again for every
tile of queries, which takes them about as long as three quarters of the products. A kernel of its
own reads and writes 3 bytes an element once: with 1,024 queries to a head of keys that is less,
causal or not. Scales are multiplied in before elements are rounded to 16 bits. Pages are copied to
where their keys are, one after the other for each batch entry, if that needs little memory: there
is room for as many pages as the table has. So are small pages of 16 bits, whose copies to shared
memory cost a fifth of the time of attention."""

import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import scalar
from ._common import SeveralKernels, overlap_launches
from ._open_rows import (
    ANY_ROWS,
    ENTRIES,
    any_rows,
    entries,
    in_shapes,
    is_static,
    rows_of,
    views,
)

_LEAST, _LEAST_OF_PAGES = 1024, 4096  # queries to a head of keys; for small pages of 16 bits
_SMALL = 32  # keys of a small page, at most
_TILE = 8192  # elements of a block
_VECTOR = 8  # elements that a lane loads and stores together
_ROOM = 256 << 20  # bytes of keys and values that pages are copied to, at most


def pays(x):
    """Is it faster to widen keys and values first, or to copy their pages? x: a Problem."""
    if not x.kv_dtype and (x.is_narrow or not 0 < x.page <= _SMALL):
        return False
    if x.queries * x.group < (_LEAST if x.kv_dtype else _LEAST_OF_PAGES):
        return False
    size = x.batch * x.keys * x.kv_heads * (x.dim + x.value_dim) * x.dtype.itemsize
    return not x.page or size <= _ROOM and all(_rows(x.page, d) for d in (x.dim, x.value_dim))


def _rows(page, dim):
    """Rows of a page that a block copies together: each lane has whole vectors of them; 0: none."""
    fits = (n for n in range(page, 0, -1) if page % n == 0 and n * dim <= _TILE)
    return next((n for n in fits if n * dim % (128 * _VECTOR) == 0), 0)


@cached
def _widen(shape, dtype, to, scale_dims, interpret, rows=None):
    """Kernel: an array [batch, keys, heads, dim], times its scale if there is one. rows: of all
    entries, which are one after the other where their number is that of scales of each."""
    batch, keys, heads, dim = shape
    of_arrays = shape if rows is None else (1, rows, heads, dim)
    least = 128 * _VECTOR // math.gcd(dim, 128 * _VECTOR)
    height = least * max(1, _TILE // (least * dim))
    layout = plgpu.Layout.WG_STRIDED((height, dim), vec_size=_VECTOR)

    def body(x, *refs):
        overlap_launches()
        *scales, out = refs
        b, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        at = b, pl.ds(tile * height, height), head
        if rows is not None:
            at = 0, pl.ds(b * scalar(keys) + tile * height, height), head
        rest = keys - tile * height

        def widened(value):
            value = value.astype(jnp.float32)
            for scale in scales:
                value = value * (scale[head] if scale_dims == 1 else scale[b, head])
            return value.astype(to)

        def whole():
            out[at] = widened(plgpu.load(x.at[at], layout=layout))

        def last():
            keep = lax.broadcasted_iota(jnp.int32, (height, dim), 0) < rest
            pl.store(out, at, widened(pl.load(x, at, mask=keep, other=0)), mask=keep)

        if isinstance(keys, int) and keys % height == 0:
            whole()
        else:
            pl.when(rest >= height)(whole)
            pl.when(rest < height)(last)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(of_arrays, to),
        grid=(batch, pl.cdiv(keys, height), heads),
        grid_names=("batch", "tile", "head"),
        interpret=interpret,
        kernel_name="attention_widen",
        **in_shapes(of_arrays, *[(batch, heads) if rows is not None else None] * (scale_dims > 0)),
    )


def _widen_any(shape, *how):
    """The same, perhaps for any number of rows: the entries of the batch are one then, unless each
    has scales of its own."""
    batch, keys, heads, dim = shape
    *_, scale_dims, _ = how
    rows, _ = rows_of(("attention_widen", heads, dim, how), batch * keys, ANY_ROWS)
    if isinstance(rows, int) or scale_dims == 2 and batch > ENTRIES:
        return _widen(shape, *how)
    flat, none = (1, batch * keys, heads, dim), [None] * (scale_dims > 0)
    alone = functools.partial(_widen, shape, *how)
    if scale_dims == 2:
        any_batch = entries()
        kernel = _widen((any_batch, rows // any_batch, heads, dim), *how, rows)
    else:
        kernel = _widen((1, rows, heads, dim), *how)
    return views(kernel, (flat, *none), (shape,), alone)


@cached
def _widen_pages(shape, page, dtype, to, scale_dims, has_lengths, interpret, length=None):
    """Kernel: pages [pages, page, heads, dim] as an array [batch, keys, heads, dim], of which what
    comes after the last key is not written. Arguments: pages, table, lengths if there are, scales
    if there are. length: of the table of any size, which is one row then, and the entries of the
    result one after the other; the last argument has the extent of the batch."""
    batch, keys, heads, dim = shape
    is_open, of_arrays = length is not None, shape
    if is_open:
        of_arrays = 1, length * page, heads, dim
    rows = _rows(page, dim)
    count = max(1, _TILE // (rows * dim))
    layout = plgpu.Layout.WG_STRIDED((rows, dim), vec_size=_VECTOR)
    scales = [(batch, heads)[-scale_dims:]] * (scale_dims > 0)
    pages = any_rows("P"), page, heads, dim
    of_operands = pages, (length,), *[(batch,)] * has_lengths, *scales, (batch,)

    def body(x, table, *refs):
        overlap_launches()
        *given, out = refs[:-2] + refs[-1:] if is_open else refs
        b, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        end = scalar(keys)
        if has_lengths:
            end = jnp.clip(given.pop(0)[b], 0, keys)

        def write(at, value):
            for scale in given:
                factor = scale[head] if scale_dims == 1 else scale[b, head]
                value = value.astype(jnp.float32) * factor
            at = pl.multiple_of(at, rows)
            at = (0, pl.ds(b * scalar(keys) + at, rows)) if is_open else (b, pl.ds(at, rows))
            out[(*at, head)] = value.astype(to)

        @pl.when(tile * (count * rows) < end)
        def _():
            found = []
            for i in range(count):  # all loads before the stores
                at = (tile * count + i) * rows
                row = jnp.minimum(at, end - 1)  # entries beyond it may be anything
                place = (b * scalar(keys // page) + row // page,) if is_open else (b, row // page)
                number = jnp.clip(table[place], 0, x.shape[0] - 1)
                source = x.at[number, pl.ds(pl.multiple_of(at % page, rows), rows), head]
                found.append((at, plgpu.load(source, layout=layout)))
            for at, value in found:
                pl.when(at < end)(lambda at=at, value=value: write(at, value))

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(of_arrays, to),
        grid=(batch, pl.cdiv(keys, rows * count), heads),
        grid_names=("batch", "tile", "head"),
        interpret=interpret,
        kernel_name="attention_widen_pages",
        **(in_shapes(*of_operands) if is_open else {}),
    )


def _widen_any_pages(shape, page, *how):
    """The same, perhaps for a batch, a table and a number of pages of any size."""
    batch, keys, heads, dim = shape
    *_, scale_dims, has_lengths, _ = how
    kind = "attention_widen_pages", page, heads, dim, how
    alone = functools.partial(_widen_pages, shape, page, *how)
    if batch > min(ENTRIES, page * heads * dim) or is_static(kind, (batch, keys)):
        return alone()
    any_batch, length = entries(), any_rows("T")
    kernel = _widen_pages((any_batch, length // any_batch * page, heads, dim), page, *how, length)
    others = [None] * (has_lengths + (scale_dims > 0))
    table = (batch * keys // page,)
    return views(kernel, (None, table, *others), (shape,), alone, (batch,))


class Widened(SeveralKernels):
    """Attention to keys and values of 16 bits, after those of 8 bits have been widened."""

    def __init__(self, x, make, interpret):
        """make(problem): the kernel of a problem."""
        _, k, v = x.shapes
        self.order = *x.scores.operands, *x.others
        self.page, self.lengths = x.page, x.page and x.lengths[0]

        def widen(shape, scale_dims):
            how = x.cached, x.dtype, scale_dims
            if x.page:
                return _widen_any_pages(shape, x.page, *how, x.lengths[0], interpret)
            return _widen_any(shape, *how, interpret)

        self.widen_k, self.widen_v = widen(k, x.scales[1]), widen(v, x.scales[2])
        self.attention = make(x._replace(kv_dtype=None, page=0, scales=(x.scales[0], 0, 0)))

    def __call__(self, q, k, v, *others, out=None, stream=None):
        named = dict(zip(self.order, others, strict=True))
        places = [named.pop("page_table")] if self.page else []
        places += [named["kv_lengths"]] if self.lengths else []
        k, v = (
            widen(x, *places, *([named.pop(name)] if name in named else []), stream=stream)
            for widen, x, name in ((self.widen_k, k, "k_scale"), (self.widen_v, v, "v_scale"))
        )
        return self.attention(q, k, v, *named.values(), out=out, stream=stream)
