"""What `matmul` does for 8-bit floats alone: scales, and transposing operands.

A scale of a whole operand, of rows of A or of columns of B multiplies the sums in the epilogue;
those of rows and columns are loaded while the last product of a tile runs. Scales of blocks change
along K: the tensor cores then sum 128 elements of K at a time into an accumulator of its own, which
goes into float32 sums with one multiplication. Meanwhile they work on the next product, or for the
other consumer. There are two ways. With a tile of 256 columns registers have room for an
accumulator of 128: a step is two products, one after the other, the consumers issue theirs in turn,
and the lanes load scales a step ahead. A consumer of up to 128 columns has two accumulators and
multiplies one step while it adds the one before; the lanes load the scales of a step while its
product runs.

The tensor cores take 8-bit operands only with K contiguous; others are transposed by a kernel of
their own, tile by tile through shared memory."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import buffer, overlap_launches, store, unaligned
from ._open_rows import any_number, in_shapes, rows_of

FP8 = ("float8_e4m3fn", "float8_e5m2")
BLOCK = 128  # elements along K, and columns of B, that share a scale


class Forms(NamedTuple):
    """Of the scales of a and of b: None, "one", "each" (row of A, column of B) or "blocks"."""

    a: str | None
    b: str | None

    @property
    def blocks(self):
        return self.a == "blocks"


UNSCALED = Forms(None, None)


def _possible(name, x, forms):
    """The names in forms, a list of (name, shape, words), whose shape is that of x."""
    if x is None:
        return [None]
    is_array = isinstance(x, plgpu.ArrayInfo)
    if not is_array or x.dtype.name != "float32":
        got = x.dtype if is_array else repr(x)
        raise TypeError(f"matmul: {name} must be a float32 array or None, got {got}")
    found = [form for form, shape, _ in forms if x.shape == shape]
    if not found:
        words = ", ".join(f"{shape} ({what})" for _, shape, what in forms)
        raise ValueError(f"matmul: {name} must have one of the shapes {words}; got {x.shape}")
    return found


def forms_of(scale_a, scale_b, m, n, k):
    """Forms; TypeError, ValueError for scales that do not fit."""
    blocks_n, blocks_k = pl.cdiv(n, BLOCK), pl.cdiv(k, BLOCK)
    one = [("one", shape, "one") for shape in ((), (1,), (1, 1))]
    of_a = _possible(
        "scale_a",
        scale_a,
        [
            *one,
            ("each", (m,), "per row"),
            ("each", (m, 1), "per row"),
            ("blocks", (m, blocks_k), f"per row and {BLOCK} of K"),
        ],
    )
    of_b = _possible(
        "scale_b",
        scale_b,
        [
            *one,
            ("each", (n,), "per column"),
            ("each", (1, n), "per column"),
            ("blocks", (blocks_n, blocks_k), f"per {BLOCK} columns and {BLOCK} of K"),
        ],
    )
    if ["blocks"] in (of_a, of_b):  # a shape that means nothing else
        if "blocks" not in of_a or "blocks" not in of_b:
            shapes = [None if x is None else x.shape for x in (scale_a, scale_b)]
            raise ValueError(
                "matmul: scales of blocks go together, scale_a of shape"
                f" {(m, blocks_k)} and scale_b of {(blocks_n, blocks_k)}; got {shapes[0]} and"
                f" {shapes[1]}"
            )
        return Forms("blocks", "blocks")
    return Forms(of_a[0], of_b[0])


class Scales:
    """Scales that multiply the sums of a tile in its epilogue. Made by a consumer while tracing.

    ``a``, ``b``: refs of the scales in GMEM or None. ``tile_rows``: rows of all blocks of a
    cluster. ``above``: rows of other matrices before, which have scales in ``a``, too."""

    def __init__(self, forms, a, b, m, tile_rows, above=0):
        self.forms, self.a, self.m, self.above = forms, a, m, above
        over = m % tile_rows
        self.ragged = isinstance(over, plgpu.Dim) or over != 0
        self.one = None
        for form, ref in zip(forms, (a, b)):
            if form == "one":
                x = ref[...] if not ref.shape else ref.reshape((1,))[0]
                self.one = x if self.one is None else self.one * x

    def load_rows(self, rows):
        """rows: a pl.ds"""
        if self.forms.a != "each":
            return None
        scales, there = self.a.reshape((self.a.size,)), pl.ds(rows.start + self.above, rows.size)
        if not self.ragged:
            return scales[there]
        mask = jnp.arange(rows.size) < self.m - rows.start
        return pl.load(scales, (there,), mask=mask, other=0.0)

    def load_columns(self, columns, width, chunk):
        """A list, of each part of the tile, `chunk` of its `width` columns. columns: where they
        lie in SMEM."""
        starts = range(0, width, chunk)
        if self.forms.b != "each":
            return [None] * len(starts)
        return [columns[pl.ds(c, min(chunk, width - c))] for c in starts]

    def __call__(self, loaded, c, part):
        """Part c of the columns. loaded: load_rows(), load_columns()."""
        rows, columns = loaded[0], loaded[1][c]
        if rows is not None:
            by = rows if self.one is None else rows * self.one
            part = part * lax.broadcast_in_dim(by, part.shape, [0])
        elif self.one is not None:
            part = part * self.one
        if columns is not None:
            part = part * lax.broadcast_in_dim(columns, part.shape, [1])
        return part


def added(total, value, of_rows, of_columns):
    value = value.astype(jnp.float32)  # int32 of int8 operands
    return total + value * lax.broadcast_in_dim(of_rows * of_columns, value.shape, [0])


class BlockScales:
    """Sums of products with scales of blocks. Made by a consumer while tracing.

    ``a`` (M, K / 128), ``b`` (N / 128, K / 128): refs in GMEM. ``tile``: rows and columns that are
    worked on at a time, rows of all blocks of a cluster. ``reach``: columns of all tiles, elements
    of K of all steps. ``consumers``: of a block. ``dtype``: of the sums of a product. ``above``: as
    of `Scales`."""

    def __init__(self, a, b, m, tile, reach, consumers, dtype=jnp.float32, above=0):
        self.a, self.b, self.m, self.consumers, self.dtype = a, b, m, consumers, dtype
        self.above = above
        self.cols = min(tile[1], BLOCK)  # of a product
        self.products = tile[1] // self.cols
        over = m % tile[0]
        self.ragged = isinstance(over, plgpu.Dim) or over != 0
        self.beyond_n, self.beyond_k = (x > y * BLOCK for x, y in zip(reach, b.shape))

    def load(self, row, col, block):
        """For 64 rows from `row` on, and for the columns from `col` on a list, of each product."""
        inside, at = None, [col // BLOCK]
        at += [at[0] + i for i in range(1, self.products)]
        if self.beyond_n:  # the operands are zeros there
            at = [jnp.minimum(x, self.b.shape[0] - 1) for x in at]
        if self.beyond_k:
            inside = block < self.a.shape[1]
            block = jnp.minimum(block, self.a.shape[1] - 1)
        rows = pl.ds(row + self.above, 64)
        if self.ragged:
            keep = jnp.arange(64) < self.m - row
            of_rows = pl.load(self.a, (rows, block), mask=keep, other=0.0)
        else:
            of_rows = self.a[rows, block]
        of_columns = [self.b[x, block] for x in at]
        if inside is not None:
            of_columns = [lax.select(inside, x, 0.0) for x in of_columns]
        return of_rows, of_columns

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros((64, self.cols), jnp.float32), plgpu.Layout.WGMMA)

    def sums(self, steps, block_of, row, col, wait, release, late):
        """Of 64 rows from `row` on, for each product of a step: a list.

        wait(s): until the operands of step s are there, which it returns, a part of A and a list of
        parts of B. release(s): they are no longer needed. Late, where there is one product a step:
        steps go in pairs, the second product is under way while the first one is added."""

        def load(s):
            return self.load(row, col, block_of(s))

        if self.products > 1:
            return self.in_turns(steps, load, wait, release)
        return [self.in_pairs(steps, load, wait, release, late)]

    def in_turns(self, steps, load, wait, release):
        def with_accumulator(acc):
            def step(s, carry):
                totals, (of_rows, of_columns) = carry
                a, parts = wait(s)
                sums, following = [], None
                for total, b, of_part in zip(totals, parts, of_columns):
                    with plgpu.ext.ordered_section(self.consumers):
                        acc[...] = jnp.zeros(acc.shape, self.dtype)
                        plgpu.wgmma(acc, a, b)
                    if following is None:  # under the first product
                        following = load(jnp.minimum(s + 1, steps - 1))
                    value = acc[...]
                    if len(sums) == self.products - 1:
                        release(s)
                    total = added(total, value, of_rows, of_part)
                    # now: the next product needs the accumulator
                    sums.append(lax.optimization_barrier(total))
                return sums, following

            totals = [self.zeros() for _ in range(self.products)]
            return lax.fori_loop(0, steps, step, (totals, load(0)))[0]

        return pl.run_scoped(with_accumulator, plgpu.ACC((64, self.cols), self.dtype))

    def in_pairs(self, steps, load, wait, release, late):
        accumulators = plgpu.ACC((64, self.cols), self.dtype)

        def issue(acc, s):
            a, (b,) = wait(s)
            plgpu.wgmma(acc, a, b)
            # while the product runs, and not before: ptxas would wait for them first
            of_rows, (of_columns,) = load(s)
            return of_rows, of_columns

        def one(s, total):
            def product(acc):
                scales = issue(acc, s)
                return acc[...], scales

            value, scales = pl.run_scoped(product, accumulators)
            release(s)
            return added(total, value, *scales)

        def two(pair, total):
            s = 2 * pair

            def products(first, second):
                scales, following = issue(first, s), issue(second, s + 1)
                value = plgpu.wgmma_accumulator_load(first, wait_n=1)
                release(s)
                # now, before the second is there
                sums = lax.optimization_barrier(added(total, value, *scales))
                value = second[...]
                release(s + 1)
                return added(sums, value, *following)

            return pl.run_scoped(products, accumulators, accumulators)

        if not late:
            return lax.fori_loop(0, steps, one, self.zeros())
        total = lax.fori_loop(0, steps // 2, two, self.zeros())
        return one(steps - 1, total) if steps % 2 else total


# ---- K contiguous -------------------------------------------------------------------------------

_TILE = {1: 128, 4: 64}  # rows and columns of a tile, by the bytes of an element
_LANES_TILE = 64  # without TMA


@cached
def transposing(shape, dtype, aligned, interpret, by_lanes=False):
    """Kernel: the transpose of an array with so many rows and columns, or of each of several, with
    rows of a multiple of 16 elements, filled up with zeros. by_lanes: for GPUs without TMA."""
    if by_lanes:
        return _transposing_by_lanes(shape, dtype, aligned, interpret)
    *several, rows, cols = shape
    padded, tile = pl.cdiv(rows, 16) * 16, _TILE[dtype.itemsize]
    by_tma = aligned and (cols % 16 == 0 or rows == 1 and not several)

    def body(x, o, *, x_smem, o_smem, full):
        overlap_launches()
        if several:
            x, o = (ref.at[lax.axis_index("matrix")] for ref in (x, o))
        else:
            x = x.reshape(shape)
        row, col = lax.axis_index("row") * tile, lax.axis_index("col") * tile
        source = x.at[pl.ds(row, tile), pl.ds(col if aligned else unaligned(col), tile)]
        plgpu.copy_gmem_to_smem(source, x_smem, full, engine=None if by_tma else "plain")
        plgpu.barrier_wait(full)
        store(o_smem, x_smem[...].T, o.at[pl.ds(col, tile), pl.ds(row, tile)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    smem = buffer(tile, tile, dtype=dtype)
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((*several, cols, padded), dtype),
        scratch_types={"x_smem": smem, "o_smem": smem, "full": plgpu.Barrier()},
        grid=(pl.cdiv(rows, tile), pl.cdiv(cols, tile), *several),
        grid_names=("row", "col", *["matrix"] * len(several)),
        interpret=interpret,
        kernel_name="matmul_transposing",
        **in_shapes(shape),
    )


def transposing_of(x, interpret):
    """The transpose of a matrix, or of several, perhaps of any number of them."""
    shape, how = x.shape, (x.dtype, x.aligned, interpret)
    if len(shape) > 2:
        kind = "matmul_transposing", *shape[1:], *how, x.device
        shape = rows_of(kind, shape[0], any_number(*shape[1:]))[0], *shape[1:]
    return transposing(shape, *how)


def _transposing_by_lanes(shape, dtype, aligned, interpret):
    rows, cols = shape
    padded = pl.cdiv(rows, 16) * 16

    def body(x, o, x_smem):
        row, col = lax.axis_index("row") * _LANES_TILE, lax.axis_index("col") * _LANES_TILE
        along = [pl.ds(row, _LANES_TILE), pl.ds(col, _LANES_TILE)]
        down = lax.broadcasted_iota(jnp.int32, (_LANES_TILE, _LANES_TILE), 0)
        across = lax.broadcasted_iota(jnp.int32, (_LANES_TILE, _LANES_TILE), 1)
        source = along if aligned else [along[0], pl.ds(unaligned(col), _LANES_TILE)]
        inside = (down < rows - row) & (across < cols - col)
        x_smem[...] = pl.load(x, tuple(source), mask=inside, other=0)
        value = plgpu.transpose_ref(x_smem, (1, 0))[...]
        inside = (down < cols - col) & (across < pl.multiple_of(padded - row, 16))
        pl.store(o, (along[1], along[0]), value, mask=inside)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((cols, padded), dtype),
        scratch_types=[plgpu.SMEM((_LANES_TILE, _LANES_TILE), dtype)],
        grid=(pl.cdiv(rows, _LANES_TILE), pl.cdiv(cols, _LANES_TILE)),
        grid_names=("row", "col"),
        interpret=interpret,
        kernel_name="matmul_transposing",
    )
