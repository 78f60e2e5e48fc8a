"""Appends keys and values to caches in pages, in place. A block has one position: it rotates the
keys by the angles of the position and divides by the scales of 8-bit caches, in float32."""

import functools
import re
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._attention_scores import scalar
from ._common import FLOATS, overlap_launches
from ._open_rows import ANY_ROWS, in_shapes, is_static, views

_F32 = np.float32
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


class _Problem(NamedTuple):
    k_pages: tuple  # shapes
    v_pages: tuple
    batch: int  # these three may be sizes (plgpu.dim)
    rows: int
    entries: int
    to: np.dtype
    angles: tuple | None = None  # shape of cos
    k_scale: int = 0  # dims of its array; 0: none
    v_scale: int = 0
    # Where sizes are known only when the kernel runs: the new rows of all sequences, which are one
    # dim of k and v, and the elements of the page table, which has one dim.
    whole: tuple = ()

    @property
    def options(self):
        """Names of the operands after lengths, and their shapes."""
        heads = self.k_pages[2]
        found = {n: self.angles for n in ("cos", "sin") if self.angles}
        for name in ("k_scale", "v_scale"):
            if dims := getattr(self, name):
                found[name] = (heads,) if dims == 1 else (self.batch, heads)
        return found


def _rotated(k, cos, sin):
    """Parts of the keys of a position [heads, dim] with their first columns: pairs (i, i + half),
    then what stays. k: a ref."""
    dim, half = k.shape[1], cos.shape[0]
    left, right = (k[:, pl.ds(n, half)].astype(_F32) for n in (0, half))
    cos, sin = (lax.broadcast_in_dim(a, left.shape, [1]) for a in (cos, sin))
    parts = [(0, left * cos - right * sin), (half, right * cos + left * sin)]
    rest = dim - 2 * half
    return parts + ([(2 * half, k[:, pl.ds(2 * half, rest)].astype(_F32))] if rest else [])


def _to(value, dtype, scale):
    """Elements of a cache, from others [heads, dim]. scale: of heads, or None."""
    if value.dtype == dtype:
        return value
    value = value.astype(_F32)
    if scale is not None:
        value = value / scale(lax.broadcasted_iota(jnp.int32, value.shape, 0))
    largest = _LARGEST.get(dtype.name)
    if largest:
        kept = jnp.clip(value, _F32(-largest), _F32(largest))
        value = jnp.where(value == value, kept, value)
    return (jnp.round(value) if dtype.name == "int8" else value).astype(dtype)


@cached
def _kernel(x, interpret):
    pages, size = x.k_pages[:2]

    def body(k, v, page_table, lengths, *others):
        overlap_launches()
        *options, k_cache, v_cache = others
        named = dict(zip(x.options, options, strict=True))
        b, i = lax.axis_index("batch"), lax.axis_index("row")
        at = lengths[b] + i
        inside = (at >= 0) & (at < x.entries * size)
        entry, new = (b, jnp.clip(at // size, 0, x.entries - 1)), (b, i)
        if x.whole:
            entry, new = (b * scalar(x.entries) + entry[1],), (b * scalar(x.rows) + i,)
        page = page_table[entry]

        def scale(name):
            dims, ref = getattr(x, name), named.get(name)
            if not dims:
                return None
            return (lambda head: ref[head]) if dims == 1 else lambda head: ref[b, head]

        @pl.when(inside & (page >= 0) & (page < pages))
        def _():
            keys, values = [(0, k[new])], v[new]
            if x.angles:
                there = jnp.minimum(at, x.angles[0] - 1)
                angles = (named[n][there].astype(_F32) for n in ("cos", "sin"))
                keys = _rotated(k.at[new], *angles)
            for first, part in keys:
                here = k_cache.at[page, at % size, :, pl.ds(first, part.shape[1])]
                here[...] = _to(part, x.to, scale("k_scale"))
            v_cache[page, at % size] = _to(values, x.to, scale("v_scale"))

    shapes = ()
    if x.whole:
        rows, entries = x.whole
        shapes = [(rows, *pages[2:]) for pages in (x.k_pages, x.v_pages)]
        shapes += [(entries,), (x.batch,), *x.options.values()]
    return plgpu.kernel(
        body,
        out_type=tuple(plgpu.ShapeDtypeStruct(s, x.to) for s in (x.k_pages, x.v_pages)),
        grid=(x.batch, x.rows),
        grid_names=("batch", "row"),
        interpret=interpret,
        kernel_name="append_pages",
        **in_shapes(*shapes),
    )


class _Append:
    """The kernel, whose results are the caches that it is called with."""

    writes, takes_views = (0, 1), True  # _strides.py

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, k_pages, v_pages, *operands, out=None, stream=None):
        if out is not None:
            raise ValueError("append_pages: k_pages and v_pages are changed in place; omit out=")
        try:
            return self.kernel(*operands, out=(k_pages, v_pages), stream=stream)
        except (TypeError, ValueError) as e:  # the caches, as arguments have them
            names = {"out[0]": "k_pages", "out[1]": "v_pages"}
            text = re.sub(r"out\[[01]\]", lambda found: names[found[0]], str(e))
            e.args = (text.replace("kernel append_pages:", "append_pages:", 1),)
            raise

    def lower(self, k_pages, v_pages, *operands, **options):
        """The kernel, lowered: the caches are its results, whose contents it changes."""
        return self.kernel.lower(*operands, **options)


def _check(k_pages, v_pages, k, v):
    for what, pages, x in (("k", k_pages, k), ("v", v_pages, v)):
        if pages.ndim != 4 or x.ndim != 4 or x.shape[2:] != pages.shape[2:] or 0 in x.shape:
            raise ValueError(
                f"append_pages: {what}_pages must be [pages, page_size, kv_heads, dim] and {what}"
                f" [batch, rows, kv_heads, dim]; got {pages.shape} and {x.shape}"
            )
        small = k.dtype.name in FLOATS and pages.dtype.name in _LARGEST
        if (
            x.dtype != k.dtype
            or pages.dtype != k_pages.dtype
            or not (small or pages.dtype == k.dtype)
        ):
            raise TypeError(
                "append_pages: the caches must have one dtype, and k and v that too, or a float of"
                f" 16 or 32 bits where that of the caches is one of {', '.join(_LARGEST)}; got"
                f" {k_pages.dtype}, {v_pages.dtype}, {k.dtype} and {v.dtype}"
            )
    if k_pages.shape[:3] != v_pages.shape[:3] or k.shape[:2] != v.shape[:2] or 0 in k_pages.shape:
        raise ValueError(
            "append_pages: k_pages and v_pages must agree in pages, page_size and kv_heads, k and v"
            f" in batch and rows; got {k_pages.shape}, {v_pages.shape}, {k.shape} and {v.shape}"
        )


def _check_angles(k, cos, sin):
    if cos is sin is None:
        return None
    fits = cos is not None and sin is not None and cos.shape == sin.shape and len(cos.shape) == 2
    if not fits or 0 in cos.shape or 2 * cos.shape[1] > k.shape[3]:
        shapes = [None if a is None else a.shape for a in (cos, sin)]
        raise ValueError(
            "append_pages: cos and sin must be given together, [positions, n] with 2 * n up to"
            f" {k.shape[3]}, the dim of k; got {shapes[0]} and {shapes[1]}"
        )
    for name, a in (("cos", cos), ("sin", sin), ("k", k)):
        if a.dtype.name not in FLOATS:
            raise TypeError(
                f"append_pages: {name} must be float16, bfloat16 or float32 where keys are rotated,"
                f" got {a.dtype}"
            )
    return cos.shape


def _check_scales(pages, k, scales):
    batch, _, heads, _ = k.shape
    for name, scale in scales.items():
        if scale is None:
            continue
        if pages.dtype.name not in _LARGEST or k.dtype == pages.dtype:
            raise ValueError(
                f"append_pages: {name} is for floats that go to 8-bit caches, got {name[0]} of"
                f" {k.dtype} and caches of {pages.dtype}"
            )
        if scale.dtype != _F32 or scale.shape not in ((heads,), (batch, heads)):
            raise ValueError(
                f"append_pages: {name} must be float32 [kv_heads] or [batch, kv_heads], {(heads,)}"
                f" or {(batch, heads)}; got {scale.dtype} of shape {scale.shape}"
            )
    return [0 if scale is None else len(scale.shape) for scale in scales.values()]


@plgpu.specialize
def append_pages(
    k_pages,
    v_pages,
    k,
    v,
    page_table,
    lengths,
    *,
    cos=None,
    sin=None,
    k_scale=None,
    v_scale=None,
    interpret=None,
):
    """Appends keys and values to caches in pages, in place (Hopper).

    k_pages, v_pages: [pages, page_size, kv_heads, dim], as :func:`attention_decode` takes them;
    they are changed. k, v: [batch, rows, kv_heads, dim], of the same dtype, or float16, bfloat16 or
    float32 where the caches are int8, float8_e4m3fn or float8_e5m2. page_table: int32 [batch, pages
    of a sequence]; lengths: int32 [batch], the rows that each sequence has before the call: row i
    of sequence b goes to the position ``lengths[b] + i``. Rows beyond the page table, and those
    whose page does not exist, are dropped. No position may be written twice.

    cos, sin: [positions, n]; the keys are rotated by the angle of their position, as by
    :func:`rotary`: the pairs are (i, i + n), and elements from 2 * n on are unchanged. Positions
    beyond the last one have its angles. k_scale, v_scale: float32 [kv_heads] or [batch, kv_heads];
    8-bit caches get ``k / k_scale`` and ``v / v_scale``, rounded to nearest and saturated (127 for
    int8). Everything is computed in float32. One program serves all numbers of sequences, rows,
    pages of a sequence and positions, once it has met some.

    Returns (k_pages, v_pages). TypeError, ValueError for other dtypes and shapes, and for ``out=``.
    """
    _check(k_pages, v_pages, k, v)
    ints = page_table.dtype == lengths.dtype == np.int32
    fits = page_table.ndim == 2 and page_table.shape[0] == k.shape[0] and page_table.shape[1]
    if not ints or not fits or lengths.shape != k.shape[:1]:
        raise ValueError(
            "append_pages: page_table must be int32 [batch, pages of a sequence] and lengths int32"
            f" [batch], for k {k.shape}; got {page_table.dtype} of shape {page_table.shape} and"
            f" {lengths.dtype} of shape {lengths.shape}"
        )
    angles = _check_angles(k, cos, sin)
    batch, rows = k.shape[:2]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    scales = _check_scales(k_pages, k, scales)
    shapes = k_pages.shape, v_pages.shape
    x = _Problem(*shapes, batch, rows, page_table.shape[1], k_pages.dtype, angles, *scales)
    return _append(x, (k.dtype, k.device), interpret)


def _append(x, kind, interpret):
    """The kernel of these sizes, or of any number of sequences, rows, pages of a sequence and
    positions. kind: what else distinguishes programs."""
    alone = functools.partial(_kernel, x, interpret)
    angles = x.angles and (0, *x.angles[1:])
    kind = "append_pages", x._replace(batch=0, rows=0, entries=0, angles=angles), kind, interpret
    sizes = x.batch, x.rows, x.entries, *(x.angles or ())[:1]
    counts = x.batch * x.rows, x.batch * x.entries
    if max(*sizes, *counts) > ANY_ROWS[1] or is_static(kind, sizes):
        return _Append(alone())
    batch, rows, entries, positions = (plgpu.dim(n, max=ANY_ROWS[1]) for n in "BREP")
    shared = x._replace(
        batch=batch,
        rows=rows // batch,
        entries=entries // batch,
        angles=x.angles and (positions, *x.angles[1:]),
        whole=(rows, entries),
    )
    operands = [(counts[0], *pages[2:]) for pages in (x.k_pages, x.v_pages)]
    operands += [(counts[1],), None, *[None] * len(x.options)]
    kernel = views(_kernel(shared, interpret), operands, (None, None), alone)
    return _Append(kernel)
