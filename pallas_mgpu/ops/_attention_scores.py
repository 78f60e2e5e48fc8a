"""What attention may do to its scores, for the forward and the gradients alike.

The scores ``scale * Q K^T`` are first capped (``cap * tanh(s / cap)``), then a bias is added; only
then are pairs hidden. Each row of a tile (a query, or a key in kernels whose rows are keys) sees
one range of columns, from `low` up to but not including `high`, and neither decreases with the row:
causal masks, windows and packed sequences differ only in the formula of that range. So a tile needs
the columns from `low` of its first row to `high` of its last one, and a block of columns needs no
mask if it lies between `low` of the last row and `high` of the first.

Ranges of packed sequences come from a small kernel, which looks each row up in ``cu_seqlens``.
Dropout hashes the seed, the head and the position of a pair, so that every kernel finds the same
decisions in any order."""

import copy
import functools
import math
import operator
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._open_rows import in_shapes
from ._random import mixed

_F32 = np.float32
_LOG2E = _F32(math.log2(math.e))
_MULTIPLE = 384  # rows of padded ranges: of whole tiles of 64, 128 and 192 rows
_PART = 256  # rows of a block that looks up ranges
_LARGEST = 2.0**127  # number, whose product with log2(e) is a float32, too
LEAST = 2.0**-120  # any finite score times this is as good as 0
_ENDLESS = 1 << 30  # keys that no side of a window has
PART_OF_KEYS = 64  # whose values are transposed together


class Scores(NamedTuple):
    """Options of the scores, without arrays. The default is plain attention."""

    left: int | None = None  # keys before the diagonal that a query sees; None: all
    right: int | None = None
    bottom_right: bool = False  # the diagonal ends at the last query and the last key
    softcap: float = 0.0
    bias: tuple | None = None  # its shape; with open lengths it comes as one row
    dropout: float = 0.0
    sequences: int = 0  # packed ones; 0: every batch entry is one
    mask: object = None  # a Mask of block_mask.py
    scaled: bool = False  # scores are scaled before pairs are hidden: by a negative scale

    @property
    def adjusted(self):
        """Are scores changed before the softmax, other than by hiding pairs?"""
        return self.softcap != 0 or self.bias is not None or self.scaled

    @property
    def bias_pair(self):
        """Neighbours that are read together of a bias with open lengths: 2 if rows are even."""
        if not self.bias or not all(isinstance(n, plgpu.Dim) for n in self.bias[2:]):
            return 1
        return 1 + (self.bias[3].multiple % 2 == 0)

    @property
    def open_shape(self):
        """Of a bias with open lengths."""
        return (plgpu.dim("A"), 2)[: self.bias_pair]

    @property
    def open_elements(self):
        return math.prod(self.open_shape)

    @property
    def operands(self):
        """Names of the arrays that follow q, k and v."""
        names = ["bias"] if self.bias else []
        names += ["cu_seqlens_q", "cu_seqlens_k"] if self.sequences else []
        return names + (["seed"] if self.dropout else [])

    @property
    def has_data(self):
        """Is there an array that a mask reads?"""
        return bool(self.mask) and self.mask.data

    @property
    def kernel_operands(self):
        """The same of the kernels, which get ranges of packed sequences."""
        names = ["bias"] * bool(self.bias) + ["seed"] * bool(self.dropout)
        names += ["low", "high"] * bool(self.sequences)
        return names + ["block_mask"] * bool(self.mask) + ["mask_data"] * self.has_data

    def factor(self, scale):
        """What raw (or adjusted) scores are multiplied with to be exponents of 2."""
        return _F32(1) if self.adjusted else _F32(scale * math.log2(math.e))


PLAIN = Scores()


class Problem(NamedTuple):
    """What a kernel of attention or of its gradients computes."""

    batch: int
    queries: int
    heads: int
    dim: int
    keys: int
    kv_heads: int
    dtype: np.dtype
    causal: bool
    scale: float
    scores: Scores = PLAIN
    return_lse: bool = False
    own_value_dim: int = 0  # where values have another width than keys
    angles: int = 0  # rows of the tables of angles by which blocks rotate their own rows; 0: none
    first: int = 0  # the position of the first query
    kv_dtype: np.dtype | None = None  # of keys and values, where queries have another one
    page: int = 0  # keys of a page of theirs; 0: no pages
    lengths: tuple[bool, bool] = (False, False)  # of keys, of queries: read when the kernel runs
    scales: tuple[int, int, int] = (0, 0, 0)  # dims of the arrays of q, k and v; 0: none
    # Where batch entries of open lengths are one after the other in one entry of the arrays: rows
    # of q and of k, or pages of k.
    whole: tuple = ()
    table: plgpu.Dim | None = None  # entries of the page table, which has one dim then
    transposed: tuple = ()  # the shape of values that _attention_transposed.py has transposed

    @property
    def value_dim(self):
        return self.own_value_dim or self.dim

    @property
    def kernel_operands(self):
        """Names of the arrays that follow q, k and v of a kernel."""
        return [*self.scores.kernel_operands, *["cos", "sin"] * bool(self.angles)]

    @property
    def cached(self):
        """The dtype of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def is_narrow(self):
        """Have keys and values 8 bits?"""
        return self.cached.itemsize == 1

    @property
    def out_dtype(self):
        return np.dtype(jnp.bfloat16) if self.dtype.itemsize == 1 else self.dtype

    @property
    def others(self):
        """Names of the operands of a cache, which come after those of the scores, and of the one
        whose extent is the batch."""
        names = "kv_lengths", "q_lengths", "page_table", "q_scale", "k_scale", "v_scale", "entries"
        given = *self.lengths, self.page, *self.scales, self.counted
        return [name for name, there in zip(names, given) if there]

    @property
    def counted(self):
        """Is there an operand that only says how many entries the batch has?"""
        return isinstance(self.batch, plgpu.Dim) and not any(self.lengths)

    @property
    def is_open(self):
        """Are the lengths known only when the kernel runs?"""
        return isinstance(self.queries, plgpu.Dim)

    @property
    def shapes(self):
        """Of q, k and v."""
        batch = 1 if self.whole else self.batch
        queries, keys = self.whole or (self.queries, self.keys)
        q = batch, queries, self.heads, self.dim
        k = (keys, self.page) if self.table is not None else (batch, keys)
        k = *k, self.kv_heads
        return q, (*k, self.dim), self.transposed or (*k, self.value_dim)

    def shapes_of_options(self, by_keys=False):
        """Of `kernel_operands`; None: as they come. by_keys: are rows of a tile keys?"""
        named = {"bias": self.scores.open_shape} if self.is_open else {}
        if self.is_open and self.scores.mask:
            named |= {"block_mask": (plgpu.dim("T"),), "mask_data": self.scores.mask.shape}
        named |= {n: (self.padded_rows(by_keys=by_keys),) for n in ("low", "high")}
        named |= {n: (self.angles, self.dim // 2) for n in ("cos", "sin")}
        return [named.get(n) for n in self.kernel_operands]

    @property
    def shapes_of_others(self):
        """Of `others`; None: as they come."""
        if not self.whole:
            return [None for _ in self.others]
        named = {n: (self.batch,) for n in ("kv_lengths", "q_lengths", "entries")}
        named["page_table"] = (self.table,)
        heads = self.heads, self.kv_heads, self.kv_heads
        for n, count, dims in zip(("q_scale", "k_scale", "v_scale"), heads, self.scales):
            named[n] = (self.batch, count)[-dims:]
        return [named[n] for n in self.others]

    def padded_rows(self, multiple=_MULTIPLE, by_keys=False):
        """Rows of the ranges of packed sequences."""
        return pl.cdiv(self.keys if by_keys else self.queries, multiple) * multiple

    @property
    def group(self):
        """Heads of queries that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def results(self):
        """Types of what attention returns."""
        out = plgpu.ShapeDtypeStruct((*self.shapes[0][:3], self.value_dim), self.out_dtype)
        shape = self.batch, self.heads, self.queries
        if self.is_open:  # the kernel computes where the rows of a head begin
            shape = (self.heads * self.shapes[0][0] * self.shapes[0][1],)
        lse = plgpu.ShapeDtypeStruct(shape, _F32)
        return (out, lse) if self.return_lse else out

    def body(self, plain, scored):
        """The body of a kernel of attention. plain, scored: of its refs by name, the block that
        runs without and with options of the scores."""

        def without_options(q, k, v, o, lse=None, **scratch):
            plain(dict(q=q, k=k, v=v, o=o, lse=lse) | scratch).run()

        def with_options(q, k, v, *others, **scratch):
            names = *self.kernel_operands, *self.others, "o", "lse"
            refs = dict(q=q, k=k, v=v, lse=None) | dict(zip(names, others))
            (plain if self.scores == PLAIN else scored)(refs | scratch).run()

        plain_alone = self.scores == PLAIN and not self.angles and not self.others
        return without_options if plain_alone else with_options


def options(
    name,
    q,
    k,
    arrays,
    causal,
    window,
    bottom_right,
    softcap,
    dropout,
    keys=0,
    open_=False,
    scale=1.0,
):
    """Checks the options of `name`; the Scores. arrays: bias, cu_seqlens_q, cu_seqlens_k, seed.
    keys: how many there are; 0: as k has. open_: are lengths known only when the kernel runs?"""
    keys = keys or k.shape[1]
    bias, cu_q, cu_k, seed = arrays
    left, right = _window(name, window)
    softcap = 0.0 if softcap is None else _finite(name, "softcap", softcap)
    if softcap < 0:
        raise ValueError(f"{name}: softcap must not be negative, got {softcap}")
    if not 0 <= dropout < 1:
        raise ValueError(f"{name}: dropout must be from 0 and less than 1, got {dropout}")
    if (seed is None) != (dropout == 0):
        raise ValueError(f"{name}: dropout and seed must be given together")
    if seed is not None and (seed.shape != (1,) or seed.dtype.name not in ("int32", "uint32")):
        raise ValueError(
            f"{name}: seed must be int32 or uint32 of shape (1,), got {seed.dtype} of shape"
            f" {seed.shape}"
        )
    if bias is not None:
        _check_bias(name, bias, (q.shape[0], q.shape[2], q.shape[1], keys), q.dtype)
    sequences = _sequences(name, q, cu_q, cu_k)
    right = 0 if causal else right
    if left is right is None or (q.shape[1] == keys and not sequences and not open_):
        bottom_right = False  # it is the same
    shape = None if bias is None else bias.shape
    found = Scores(left, right, bool(bottom_right), softcap, shape, float(dropout), sequences)
    found = found._replace(scaled=scale < 0)
    return PLAIN if causal and found == Scores(right=0) else found


def _finite(name, what, x):
    try:
        found = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {what} must be a number or None, got {x!r}") from None
    if not abs(found) <= _LARGEST:
        raise ValueError(f"{name}: {what} must be finite in float32, got {found}")
    return found


def scale_of(name, scale, dim):
    """What scores are multiplied with: not 0, since hidden ones must stay far below all others."""
    found = float(dim**-0.5) if scale is None else _finite(name, "scale", scale)
    return found if abs(found) >= LEAST else LEAST


def _window(name, window):
    """Its sides, as ints or None."""
    sides = (None, None) if window is None else window
    fits = isinstance(sides, (tuple, list)) and len(sides) == 2
    for side in sides if fits else ():
        fits &= (
            side is None or not isinstance(side, bool) and hasattr(side, "__index__") and side >= 0
        )
    if not fits:
        raise ValueError(
            f"{name}: window must be (left, right), each None or an int from 0; got {window!r}"
        )
    sides = [None if side is None else operator.index(side) for side in sides]
    return tuple(None if side is None or side >= _ENDLESS else side for side in sides)


def _check_bias(name, bias, whole, dtype):
    fits = len(bias.shape) == 4 and all(n in (1, w) for n, w in zip(bias.shape, whole))
    if not fits:
        raise ValueError(
            f"{name}: bias must have the dims [batch, heads, queries, keys], each 1 or that of"
            f" {whole}; got shape {bias.shape}"
        )
    if bias.dtype not in (dtype, np.dtype(_F32)):
        raise TypeError(f"{name}: bias must be {dtype} or float32, got {bias.dtype}")


def _sequences(name, q, cu_q, cu_k):
    if (cu_q is None) != (cu_k is None):
        raise ValueError(f"{name}: cu_seqlens_q and cu_seqlens_k must be given together")
    if cu_q is None:
        return 0
    for what, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if len(x.shape) != 1 or x.shape != cu_q.shape or x.shape[0] < 2 or x.dtype != np.int32:
            raise ValueError(
                f"{name}: {what} must be int32 of shape (sequences + 1,), got {x.dtype} of shape"
                f" {x.shape}"
            )
    if q.shape[0] != 1:
        raise ValueError(
            f"{name}: packed sequences lie in one batch entry; got {q.shape[0]} with cu_seqlens"
        )
    return cu_q.shape[0] - 1


# ---- ranges of packed sequences ------------------------------------------------------------------


@cached
def lookup(
    sequences, rows, columns, before, after, bottom_right, interpret, multiple=_MULTIPLE, like=()
):
    """Kernel: (low, high) of rows padded to whole tiles, from cu_seqlens of rows and of columns.
    Rows beyond the last sequence see nothing. like: where lengths are open the shapes of the
    operands, to which q and k are added, whose lengths they are."""
    padded = pl.cdiv(rows, multiple) * multiple

    def body(cu_rows, cu_columns, *others):
        low, high = others[-2:]
        start = lax.axis_index("part") * _PART
        i = jnp.minimum(start + jnp.arange(_PART), rows - 1)

        def count(t, s):
            return s + (cu_rows[t] <= i).astype(jnp.int32)

        s = lax.fori_loop(1, sequences + 1, count, jnp.zeros_like(i))
        following = jnp.minimum(s + 1, sequences)
        first, begin, end = cu_rows[s], cu_columns[s], cu_columns[following]
        shift = begin - first
        if bottom_right:
            shift += (end - begin) - (cu_rows[following] - first)

        def inside(column):
            column = jnp.minimum(jnp.maximum(column, begin), end)
            return jnp.minimum(jnp.maximum(column, 0), columns)

        at, none = pl.ds(start, _PART), jnp.zeros_like(i)
        keep = start + jnp.arange(_PART) < padded
        found = inside(begin if before is None else i + shift - before)
        pl.store(low, (at,), found + none, mask=keep)
        found = inside(end if after is None else i + shift + (after + 1))
        pl.store(high, (at,), found + none, mask=keep)

    out = plgpu.ShapeDtypeStruct((padded,), np.int32)
    return plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(pl.cdiv(padded, _PART),),
        grid_names=("part",),
        interpret=interpret,
        kernel_name="attention_ranges",
        **in_shapes(*like),
    )


def lookup_of(x, by_keys, interpret, multiple=_MULTIPLE):
    """The kernel above for a problem, whose arguments are (cu_seqlens_q, cu_seqlens_k)."""
    f = x.scores
    sizes = (
        (x.keys, x.queries, f.right, f.left) if by_keys else (x.queries, x.keys, f.left, f.right)
    )
    like = ()
    if x.is_open:
        given = f.sequences.symbols()  # of cu_seqlens
        like = given, given, *x.shapes[:2]
    return lookup(f.sequences, *sizes, f.bottom_right, interpret, multiple, like)


def scalar(n):
    """An int or a size as int32, while a kernel is traced."""
    return jnp.int32(n) if isinstance(n, int) else jnp.asarray(n)


def rows_in(x, b, start, count, length):
    """The index of rows of a batch entry, which has `length` of them."""
    if not x.whole:
        return b, pl.ds(start, count)
    return 0, pl.ds(b * scalar(length) + start, count)


class Ranges:
    """Columns that rows see, while a kernel is traced. low, high: the arrays of lookup(), or None.
    exact: rows beyond the last one see nothing; otherwise their results mean nothing. layout: of a
    tile of pairs."""

    def __init__(self, x, by_keys, low=None, high=None, exact=False, layout=plgpu.Layout.WGMMA):
        self.layout = layout
        f = x.scores._replace(right=0) if x.causal else x.scores
        self.columns, rows = (x.queries, x.keys) if by_keys else (x.keys, x.queries)
        self.rows = rows if exact and (x.is_open or rows % _MULTIPLE) else None
        self.before, self.after = (f.right, f.left) if by_keys else (f.left, f.right)
        self.ends, self.shift = f.bottom_right, self.columns - rows if f.bottom_right else 0
        self.arrays = (low, high) if f.sequences else None

    def of_lengths(self, columns, rows):
        """The same for numbers of columns and rows that are known when the kernel runs."""
        found = copy.copy(self)
        found.columns = columns
        found.rows = self.rows if isinstance(rows, (int, plgpu.Dim)) else rows
        found.shift = columns - rows if self.ends else 0
        return found

    def low(self, i):
        """The first column that row i sees; i: a number or an array of numbers."""
        if self.before is None:
            return jnp.int32(0)
        return jnp.clip(i + (self.shift - self.before), 0, self.columns)

    def high(self, i):
        """The column after the last one that row i sees."""
        if self.after is None:
            return scalar(self.columns)
        return jnp.clip(i + (self.shift + self.after + 1), 0, self.columns)

    def of_tile(self, first, rows):
        """(from, to) of the columns that some of the rows sees."""
        if self.arrays:
            return self.arrays[0][first], self.arrays[1][first + (rows - 1)]
        return self.low(first), self.high(first + (rows - 1))

    def of_all(self, first, rows):
        """(from, to) of the columns that each of the rows sees."""
        if self.arrays:
            low, high = self.arrays[0][first + (rows - 1)], self.arrays[1][first]
        else:
            low, high = self.low(first + (rows - 1)), self.high(first)
        if self.rows is not None:
            high = lax.select(first + rows > self.rows, jnp.int32(0), high)
        return low, high

    def blocks(self, first, rows, block):
        """(first block, number of blocks) that a tile of rows needs."""
        start, stop = self.of_tile(first, rows)
        start = start // block
        return start, jnp.maximum((stop + (block - 1)) // block - start, 0)

    def keep(self, row, column, shape):
        """Which pairs of a tile are there, from its first row and column."""
        here = column + lax.broadcasted_iota(jnp.int32, shape, 1)
        i = row + lax.broadcasted_iota(jnp.int32, shape, 0)
        if self.arrays:
            layout, at = self.layout.reduce(1), pl.ds(row, shape[0])
            low, high = (
                lax.broadcast_in_dim(plgpu.load(a.at[at], layout=layout), shape, [0])
                for a in self.arrays
            )
            keep = (here >= low) & (here < high)
        else:
            keep = here < self.high(i)
            keep = keep if self.before is None else keep & (here >= self.low(i))
        return keep if self.rows is None else keep & (i < self.rows)


# ---- scores of a tile ----------------------------------------------------------------------------


def _is_long(n):
    """Is a dim of a bias that of the scores, not 1?"""
    return isinstance(n, plgpu.Dim) or n > 1


class Tile:
    """The scores of one head and a tile of pairs, while a kernel is traced.

    batch, head: of the queries; row, column: the first ones; by_keys: rows are keys; layout: of
    the tile."""

    def __init__(
        self, x, refs, batch, head, row, column, shape, by_keys, layout=plgpu.Layout.WGMMA
    ):
        self.layout = layout
        self.x, self.f, self.refs = x, x.scores, refs
        self.batch, self.head, self.shape, self.by_keys = batch, head, shape, by_keys
        self.row, self.column, self.fetched = row, column, None

    def begin(self):
        """Loads a bias of each pair now, while products are in flight or their operands on the
        way."""
        if self.f.bias and all(map(_is_long, self.f.bias[2:])):
            self.fetched = self.fetch()

    def adjust(self, s, bias=None):
        """The exponents of 2 of raw scores, and the slope of the cap (None without one). bias: what
        `fetch` returned, if it was called before."""
        if not self.f.adjusted:
            return s, None
        s, slope = s * _F32(self.x.scale), None
        if self.f.softcap:
            t = jnp.tanh(s * _F32(1 / self.f.softcap))
            s, slope = t * _F32(self.f.softcap), 1 - t * t
        if self.f.bias:
            bias = self.fetched if bias is None else bias
            s = s + (self.bias() if bias is None else self.along(bias))
        return s * _LOG2E, slope

    def bias(self):
        """float32, of the shape of the tile or broadcast to it."""
        ref, dims = self.refs["bias"], self.f.bias
        if self.x.is_open:
            return self.along(self.bias_in_row(ref, self.f.bias_pair))
        ref = ref.at[0 if dims[0] == 1 else self.batch, 0 if dims[1] == 1 else self.head]
        sizes, starts = list(dims[2:]), [self.row, self.column]
        if self.by_keys:
            ref = plgpu.transpose_ref(ref, (1, 0))
            sizes.reverse()
        layout, whole = self.layout, self.shape
        there = [k for k in (0, 1) if sizes[k] > 1]
        if not there:
            return ref[0, 0].astype(jnp.float32)
        if len(there) == 1:
            layout, whole = layout.reduce(1 - there[0]), (self.shape[there[0]],)
        at, keep = [0, 0], None
        for axis, k in enumerate(there):
            at[k] = pl.ds(starts[k], self.shape[k])
            inside = lax.broadcasted_iota(jnp.int32, whole, axis) < sizes[k] - starts[k]
            keep = inside if keep is None else keep & inside
        value = plgpu.load(ref.at[tuple(at)], layout=layout, mask=keep, other=0.0)
        return lax.broadcast_in_dim(value.astype(jnp.float32), self.shape, there)

    def fetch(self):
        """The bias as it is stored, for kernels that load it while a product is in flight. Tiles
        that do not overhang it are loaded without predicates: with them, ptxas uses elements before
        it has asked for the others."""
        ref, dims, pair = self.refs["bias"], self.f.bias, self.f.bias_pair
        if not self.x.is_open:
            count = math.prod(dims)
            if count >= 2**31:
                return self.bias()
            pair = 2 if dims[2] > 1 and dims[3] % 2 == 0 and not self.by_keys else 1
            ref = ref.reshape((count // pair, pair)[:pair])
        sizes = dims[:1:-1] if self.by_keys else dims[2:]  # along rows and columns
        ends = [
            start + n > scalar(size)
            for start, n, size in zip((self.row, self.column), self.shape, sizes)
            if _is_long(size)
        ]
        load = functools.partial(self.bias_in_row, ref, pair)
        if not ends:
            return load()
        overhangs = functools.reduce(operator.or_, ends)
        return lax.cond(overhangs, load, lambda: load(masked=False))

    def along(self, bias):
        """Elements of the bias as float32, of the shape of the tile or broadcast to it."""
        bias = bias.astype(jnp.float32)
        if bias.ndim == 1:
            of_keys = _is_long(self.f.bias[3])
            return lax.broadcast_in_dim(bias, self.shape, [int(of_keys != self.by_keys)])
        return bias.reshape(self.shape) if bias.ndim else bias

    def bias_in_row(self, ref, pair, masked=True):
        """The bias as it is stored, where all of it is one row of so many neighbours each."""
        dims, start = self.f.bias, jnp.int32(0)
        sizes = [scalar(n) for n in dims]
        if isinstance(dims[0], plgpu.Dim):  # 1 where the batch shares it
            start = jnp.minimum(self.batch, sizes[0] - 1)
        elif dims[0] > 1:
            start = start + self.batch
        start = start * dims[1] + self.head if dims[1] > 1 else start
        there = [k for k in (0, 1) if _is_long(dims[2 + k])]
        for k in there:
            start = start * sizes[2 + k]
        axes = (1, 0) if self.by_keys else (0, 1)  # of queries and keys
        first = [(self.row, self.column)[axis] for axis in axes]
        if not there:
            return ref[start]
        if len(there) == 1:
            (k,) = there
            layout, n = self.layout.reduce(1 - axes[k]), self.shape[axes[k]]
            at = plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
            keep, at = first[k] + at < sizes[2 + k], (pl.ds(start + first[k], n),)
            how = {"mask": keep, "other": 0.0} if masked else {}
            return plgpu.load(ref.at[at], layout=layout, **how)
        shape = self.shape[0], self.shape[1] // pair
        i, j = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in axes)
        i, j = i + first[0], j + first[1] // pair
        keep, at = (i < sizes[2]) & (j < sizes[3] // pair), (start + i * sizes[3]) // pair + j
        if pair > 1:
            keep = lax.broadcast_in_dim(keep, (*shape, pair), [0, 1])
        how = {"mask": keep, "other": 0.0} if masked else {}
        return pl.load(ref, (at, slice(None))[:pair], **how)

    def drop(self, value):
        """The array with some elements 0 and the others multiplied by 1 / (1 - dropout)."""
        if not self.f.dropout:
            return value
        u32 = jnp.uint32
        head = (self.batch * self.x.heads + self.head).astype(u32)
        seed = self.refs["seed"][0].astype(u32)
        key = mixed(mixed(seed) ^ (head * u32(0x9E3779B9)))
        row, column = (
            (start + lax.broadcasted_iota(jnp.int32, self.shape, k)).astype(u32)
            for k, start in enumerate((self.row, self.column))
        )
        query, at = (column, row) if self.by_keys else (row, column)
        keys = self.x.keys
        keys = u32(keys) if isinstance(keys, int) else scalar(keys).astype(u32)
        bits = mixed((query * keys + at) ^ key)
        least = u32(min(round(self.f.dropout * 2**32), 2**32 - 1))
        return jnp.where(bits >= least, value * _F32(1 / (1 - self.f.dropout)), _F32(0))
