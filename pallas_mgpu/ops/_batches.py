"""Products of arrays with batch dimensions, broadcast as NumPy does.

Without a batch of its own, B is multiplied with all rows of A at once. Otherwise batch dimensions
that follow each other and that the same operands have are merged, and the product of two matrices
is mapped (plgpu.vmap) over what is left: one launch, whose blocks have the batch as an outer axis.
Arrays are reshaped, never copied, but by the kernels that pad, transpose or split the operands of a
product of two matrices, which are mapped in the same way.

Bias and scales are those of all matrices. Scales may have the batch dimensions of their operand."""

import itertools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, lax, pl
from pallas_mgpu import numpy as jnp

from . import _float32
from ._attention_scores import scalar
from ._common import SeveralKernels, store_some
from ._open_rows import ANY_ROWS, ENTRIES, is_static, views
from ._padding import Padded, padding_of, with_padding
from ._scaled import transposing_of
from ._slices import Sliced

BUCKETS = {128: 3, 1 << 22: 6}  # programs for any sizes by the most rows of a matrix
_ELEMENTS = 1 << 44  # more than an array has


class Plan(NamedTuple):
    """How batch dimensions are worked on. ``groups``: merged ones, (extent, has a it, has b it);
    ``shape``: that of the batch. ``apart``: some dimensions could be merged but for strides."""

    groups: tuple[tuple[int, bool, bool], ...]
    shape: tuple[int, ...]
    apart: bool = False

    @property
    def extents(self):
        return tuple(extent for extent, *_ in self.groups)

    def axes(self, which):
        """Of operand 0 or 1, by group: 0, or None for what all elements share."""
        return [0 if group[1 + which] else None for group in self.groups]

    def operand(self, shape, which):
        """The shape of an operand without the dimensions that it does not have."""
        own = (group[0] for group in self.groups if group[1 + which])
        return (*own, *shape[-2:])

    def matrices(self, shape, which):
        """The same with one dimension for all matrices, if there are several and are not apart."""
        if self.apart:
            return self.operand(shape, which)
        *own, rows, cols = self.operand(shape, which)
        return (*([math.prod(own)] if own else []), rows, cols)


class Batch(NamedTuple):
    """How many products a kernel computes, maybe a size of the call, and which operands have one
    matrix for each."""

    size: int
    a: bool
    b: bool
    # Rows of all matrices, of the result and of A, where these have one dimension for all; None
    # where arrays of matrices have one more dimension.
    rows: plgpu.Dim | None = None
    rows_a: plgpu.Dim | None = None
    # As of a `Plan`, where the operands do not have the same dimensions.
    groups: tuple[tuple[int, bool, bool], ...] = ()
    scales: tuple[bool, bool] = (False, False)  # are there those of A, of B for each matrix?
    apart: bool = False  # arrays of matrices have the dimensions of `groups`, no sizes of the call

    def without_sizes(self):
        return self._replace(size=0, groups=tuple((0, *has) for _, *has in self.groups))

    def transposed(self):
        """That of the kernel whose A and B have changed places."""
        groups = tuple((extent, b, a) for extent, a, b in self.groups)
        return self._replace(a=self.b, b=self.a, groups=groups, scales=self.scales[::-1])

    def count(self, which):
        """The matrices of operand 0 or 1."""
        if not self.groups:
            return self.size
        found = math.prod(extent for extent, *has in self.groups if has[which])
        if isinstance(found, plgpu.Dim):  # no more than there are products
            found = _sizes.clamp(found, 1, self.size.most)
        return found

    def entries(self, entry):
        """Those of A and of B that are factors of a product, while a kernel is traced; of matrices
        that are apart an index for each dimension."""
        if not self.groups:
            return entry, entry
        digits, found = [], [jnp.int32(0), jnp.int32(0)]
        for extent, *_ in reversed(self.groups):
            digits.insert(0, lax.rem(entry, scalar(extent)))
            entry = lax.div(entry, scalar(extent))
        if self.apart:
            return [
                tuple(digit for (_, *has), digit in zip(self.groups, digits) if has[k])
                for k in range(2)
            ]
        for (extent, *has), digit in zip(self.groups, digits):
            found = [n * scalar(extent) + digit if h else n for n, h in zip(found, has)]
        return found

    @property
    def counted(self):
        """The sizes that only operands of their own tell, where there are sizes of the call."""
        return [extent for extent, *_ in self.groups if isinstance(extent, plgpu.Dim)]

    def operands(self, a, b, scales):
        """Shapes of A, of B and of the scales that there are, as kernels want them. a, b, scales:
        those of one matrix; of a scale (form, shape), or None."""
        found = [((self.count(k),) * self[1 + k] + shape) for k, shape in enumerate((a, b))]
        if self.apart:
            found = [
                (*(extent for extent, *has in self.groups if has[k]), *shape)
                for k, shape in enumerate((a, b))
            ]
        if self.rows is not None and self.a:
            found[0] = self.rows_a, *a[1:]
        for which, (form, shape) in enumerate(x or (None, None) for x in scales):
            if form is None:
                continue
            if self.scales[which] and form != "one" and which == 0 and self.rows is not None:
                found.append((self.rows_a, *shape[1:]))
            elif self.scales[which]:
                found.append((self.count(which), *shape))
            else:
                found.append(shape or (1,))
        return found


class Extra(NamedTuple):
    """What follows a and b. ``of``: the number of the operand whose batch dimensions it may have,
    None for the bias."""

    info: plgpu.ArrayInfo
    of: int | None

    def is_batched(self, operands):
        return self.of is not None and self.info.ndim == operands[self.of].ndim > 2

    def check(self, name, operands):
        """ValueError for batch dimensions that are not the operand's."""
        if self.is_batched(operands) and self.info.shape[:-2] != operands[self.of].shape[:-2]:
            raise ValueError(
                f"matmul: the batch dimensions of {name} must be those of {'ab'[self.of]},"
                f" {operands[self.of].shape[:-2]}, or none; got shape {self.info.shape}"
            )


def plan_of(a, b, by_strides=False):
    """a, b: with two dims or more, and elements. by_strides: dimensions that are not one in memory
    are not merged. ValueError for batches that do not match."""
    batches = a.shape[:-2], b.shape[:-2]
    count = max(map(len, batches))
    x, y = ((1,) * (count - len(batch)) + batch for batch in batches)
    if any(m != n and 1 not in (m, n) for m, n in zip(x, y)):
        raise ValueError(
            "matmul: the batch dimensions of a and b must be equal or 1, got"
            f" {a.shape} and {b.shape}"
        )
    shape = tuple(max(m, n) for m, n in zip(x, y))
    groups: list[tuple[int, bool, bool]] = []
    outer = 0
    for axis, m, n in zip(range(-count - 2, -2), x, y):
        has, extent = (m > 1, n > 1), max(m, n)
        if extent == 1:
            continue
        strides = [t.element_strides for t, own in zip((a, b), has) if own and by_strides]
        apart = any(s and s[outer] != s[axis] * extent for s in strides)
        if groups and groups[-1][1:] == has and not apart:
            groups[-1] = groups[-1][0] * extent, *has
        else:
            groups.append((extent, *has))
        outer = axis
    return Plan(tuple(groups), shape)


def with_open_sizes(x, batch, kind, rows=True):
    """The Product of a batch, perhaps with open sizes, and the Batch of this call. kind: what
    distinguishes programs but the sizes. rows: may those of A be one dimension?"""
    if batch.apart:
        return x._replace(batch=batch), batch
    m, extents = x.m, tuple(extent for extent, *_ in batch.groups) or (batch.size,)
    edges = 0, *BUCKETS
    most = min(_ELEMENTS // (max(m, x.n) * x.k if x.ta else x.n * x.k), edges[-1])
    if x.ta or not rows:  # which are no outer dimension
        static = is_static((*kind, m), extents)
        return x._replace(batch=batch if static else _open(batch, most)), batch
    if batch.size * m > ANY_ROWS[1] or m > edges[-1] or is_static(kind, (m, *extents)):
        return x._replace(batch=batch), batch
    of_call, batch = batch, _open(batch, most)
    most = next(edge for edge in edges if m <= edge)
    least = edges[edges.index(most) - 1] + 1
    if batch.a:
        every = plgpu.dim("R", min=least, max=ANY_ROWS[1])
        x = x._replace(m=_sizes.clamp(every // batch.count(0), least, most))
        batch = batch._replace(rows=x.m * batch.size if batch.groups else every, rows_a=every)
    else:
        x = x._replace(m=plgpu.dim("M", min=least, max=most))
        batch = batch._replace(rows=x.m * batch.size)
    of_call = of_call._replace(rows=m * of_call.size, rows_a=m * of_call.count(0))
    return x._replace(batch=batch), of_call


def _open(batch, most):
    """The Batch with sizes of the call."""
    if not batch.groups:
        return batch._replace(size=plgpu.dim("B", max=most))
    groups = tuple(
        (plgpu.dim(f"G{k}", max=min(most, ENTRIES)), *has)
        for k, (_, *has) in enumerate(batch.groups)
    )
    size = _sizes.clamp(math.prod(extent for extent, *_ in groups), 1, most)
    return batch._replace(size=size, groups=groups)


class OfBatch:
    """What a block of the kernel of two matrices does besides where it computes the products of a
    batch, whose tiles follow each other: a base before that block's class."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        batch = self.x.batch
        self.whole = {name: getattr(self, name) for name in ("a", "b", "o", "scale_a", "scale_b")}
        # of A and B of the call: which of those of the kernel are they?
        self.sides = (1, 0) if self.x.swapped else (0, 1)
        self.above = self.above_a = 0  # rows of the matrices before: of the result, of A
        self.of_entries = any(batch.scales)

    def prefetch(self):
        """Nothing: batches were not timed with it."""

    def enter(self, t):
        """The tile of unit t of the schedule, whose operands and result are the block's now."""
        x, t = self.x, jnp.maximum(t, 0)  # as it is: stores by TMA begin inside of the array
        entry, batch, below = t // self.plan.tiles, x.batch, x.batch.rows is not None
        entries, rows = batch.entries(entry), x.n if x.swapped else x.m
        for k, name in enumerate("ab"):
            is_a = self.sides[k] == 0  # of the call
            if batch[1 + k] and not (is_a and below):
                setattr(self, name, self.whole[name].at[entries[k]])
            scale = f"scale_{name}"
            if batch.scales[k] and not (is_a and below and x.forms[k] != "one"):
                setattr(self, scale, self.whole[scale].at[entries[k]])
            elif batch.scales[k]:
                self.scales_before = {**dict.fromkeys("ab", 0), name: entries[k] * rows}
        if below:
            self.above, self.above_a = entry * rows, entries[self.sides.index(0)] * rows
        else:
            self.o = self.whole["o"].at[entry]
        return t % self.plan.tiles

    def fetch_tile(self, t, it0):
        return super().fetch_tile(self.enter(t), it0)

    def multiply_tile(self, me, scales, t, it0):
        t = self.enter(t)
        return super().multiply_tile(me, self.scales() if self.of_entries else scales, t, it0)

    def below(self, rows, is_a):
        """Rows of the matrix, in all rows of A of the call."""
        moved = is_a and self.x.batch.rows is not None and self.x.batch[1 + self.sides.index(0)]
        return pl.ds(rows.start + self.above_a, rows.size) if moved else rows

    def tile_of_a(self, a, along_m, k):
        return super().tile_of_a(a, self.below(along_m, not self.x.swapped), k)

    def tiles_of_b(self, along_n, k):
        return super().tiles_of_b(self.below(along_n, self.x.swapped), k)

    def send_rows(self, buffer, value, where, targets):
        if self.x.batch.rows is None:
            return super().send_rows(buffer, value, where, targets)
        (rows, columns), (target,) = where, targets
        left = jnp.clip((self.x.n if self.x.swapped else self.x.m) - rows.start, 0, rows.size)
        first = rows.start + self.above

        def part(start, count):
            return target.at[pl.ds(first + start, count), columns]

        store_some(buffer, value, left, part, engine=None if self.plan.by_tma else "plain")


def copies(arrays, axes, moved, by_tma, interpret):
    """The kernels that copy operands of a product of all matrices, None for none. arrays: A, B and
    others; axes: along which A and B are split into three, or None; moved: which of these are
    transposed; by_tma: which of the others are read by TMA."""
    found = []
    for k, x in enumerate(arrays):
        if k < 2 and axes[k] is not None:
            found.append(_float32.splitting_of(k, x, axes[k], interpret))
        elif k < 2 and moved[k]:
            found.append(transposing_of(x, interpret))
        else:
            found.append(padding_of(x, interpret, True) if k < 2 or by_tma[k - 2] else None)
    return found


def _mapped(kernel, axes):
    """axes: for each group, from the outermost one, those of the operands."""
    definition = kernel.definition
    for of_group in reversed(axes):
        definition = definition.mapped(tuple(of_group), 0)
    return definition.make()


def _reshaped(x, shape):
    """shape: None for that of x."""
    if shape is None or x.shape == shape:
        return x
    if not hasattr(x, "reshape"):
        raise NotImplementedError(
            f"matmul: batch dimensions of a {type(x).__name__} of shape {tuple(x.shape)} that are"
            f" to be {shape}; pass an array with a method reshape"
        )
    return x.reshape(shape)


class _Reshaped(SeveralKernels):
    """The product of reshaped arrays. shapes: of the operands and of the result, as the kernel
    wants them; shape: of the result."""

    def __init__(self, product, shapes, inner, shape):
        self.product, self.shapes, self.inner, self.shape = product, shapes, inner, shape

    def __call__(self, *operands, out=None, stream=None):
        shapes = itertools.chain(self.shapes, itertools.repeat(None))
        given = [_reshaped(x, s) for x, s in zip(operands, shapes)]
        into = None if out is None else _reshaped(out, self.inner)
        found = self.product(*given, out=into, stream=stream)
        return _reshaped(found, self.shape) if out is None else out

    def lower(self, *operands, **options):
        shapes = itertools.chain(self.shapes, itertools.repeat(None))
        given = [plgpu.ShapeDtypeStruct(s or x.shape, x.dtype) for x, s in zip(operands, shapes)]
        return self.product.lower(*given, **options)


def _with_views(product, shapes, inner, shape, sizes=()):
    """`_Reshaped`, in the extension where the product is a single kernel. sizes: as of `views`."""
    by_hand = _Reshaped(with_sizes(product, len(shapes), sizes), shapes, inner, shape)
    if not isinstance(product, _core.Kernel):
        return by_hand
    views = tuple(map(tuple, shapes)), (tuple(shape),), tuple(sizes)
    return _core.Reshaped(product, lambda: by_hand, *views)


def with_sizes(product, operands, sizes):
    """The product that gets numbers from the extents of more operands, of one with so many."""
    if not sizes:
        return product
    if isinstance(product, Padded):
        inner = with_sizes(product.product, operands, sizes)
        return with_padding(inner, product.pads)
    return views(product, (None,) * operands, (None,), sizes=sizes)


def _matrix(info, shape):
    """One of the matrices of an array."""
    size = math.prod(shape) * info.dtype.itemsize
    return plgpu.ArrayInfo(shape, info.dtype, info.device, info.aligned and size % 16 == 0)


def _of_all_rows(plan, a, b, ta, extras):
    """Shapes of the operands as those of one product of all rows; None where it is not one."""
    if ta or any(has_b for *_, has_b in plan.groups):
        return None
    m, rows = a.shape[-2], math.prod(plan.shape) * a.shape[-2]
    shapes = [(rows, a.shape[-1]), b.shape[-2:]]
    for extra in extras:
        shape = extra.info.shape
        if extra.of == 0 and extra.is_batched((a, b)):
            if shape[-2] != m:  # a number for each matrix
                return None
            shape = (rows, shape[-1])
        elif extra.of == 0 and extra.info.size != 1:  # for the rows of each matrix
            return None
        elif extra.is_batched((a, b)):
            shape = shape[-2:]
        shapes.append(shape)
    return shapes


def _with_more_rows(plan, infos, extras):
    """The plan without the innermost dimensions that A alone has, whose matrices are below each
    other, and how many they are."""
    scale = next((x for x in extras if x.of == 0), None)
    *groups, (extent, *has) = plan.groups
    if has != [True, False] or not groups:
        return plan, 1
    if scale and scale.info.size != 1:
        if not scale.is_batched(infos) or scale.info.shape[-2] != infos[0].shape[-2]:
            return plan, 1
    return plan._replace(groups=tuple(groups)), extent


def _shape_of_scale(x, plan, operands, rows):
    """Of an Extra, as that of its operand: without the dimensions that this does not have, and
    with so many times the rows."""
    if not x.is_batched(operands):
        return x.info.shape
    *lead, height, width = plan.matrices(x.info.shape, x.of)
    return *lead, height * (rows if x.of == 0 else 1), width


def _with_shapes(infos, shapes):
    return [plgpu.ArrayInfo(s, x.dtype, x.device, x.aligned) for s, x in zip(shapes, infos)]


def _plan(a, b, ta, tb):
    """The first few views whose batch dimensions cannot be merged are read as they lie."""
    plan, apart = plan_of(a, b), plan_of(a, b, by_strides=True)
    if plan == apart:
        return plan
    apart = apart._replace(apart=True)
    kind = "matrices apart", a.ndim, b.ndim, a.shape[-1], b.shape[-2:], a.dtype, b.dtype, ta, tb
    return apart if is_static((*kind, a.device), (a.shape, b.shape)) else plan


def product(a, b, ta, tb, make, make_all, extras):
    """The function of arrays with batches. extras: a list of Extra. make(*infos of a, b and extras,
    batch=): what multiplies such matrices, one of so many; make_all(the same, plan=): what
    multiplies all matrices of arrays with the batch dimensions of the plan, the shapes in which it
    gets its operands, that of what it makes, and `sizes` as of `views`; or None."""
    plan = _plan(a, b, ta, tb)
    m, n = a.shape[-1 if ta else -2], b.shape[-2 if tb else -1]
    result = (*plan.shape, m, n)
    infos = [a, b, *(extra.info for extra in extras)]
    shapes = None if plan.apart else _of_all_rows(plan, a, b, ta, extras)
    one_batch, rows = plan, 1
    if not plan.groups and (b.ndim > 2 or not shapes):  # programs for any batch serve one of 1, too
        one_batch = plan._replace(groups=((1, a.ndim > 2, b.ndim > 2),))
    elif not (ta or shapes or plan.apart):
        one_batch, rows = _with_more_rows(plan, infos, extras)
    if one_batch is not plan or not shapes:
        all_shapes = [one_batch.matrices(x.shape, of) for of, x in enumerate((a, b))]
        all_shapes[0] = *all_shapes[0][:-2], all_shapes[0][-2] * rows, all_shapes[0][-1]
        all_shapes += [_shape_of_scale(x, one_batch, (a, b), rows) for x in extras]
        whole = _with_shapes(infos, all_shapes)
        found = make_all(*whole, plan=one_batch)
        if found:
            return _with_views(*found[:3], result, found[3])
    if shapes:
        whole = _with_shapes(infos, shapes)
        return _with_views(make(*whole, batch=1), shapes, (shapes[0][0], n), result)
    owners = [0, 1, *(x.of if x.is_batched((a, b)) else None for x in extras)]
    none = [None] * len(plan.groups)
    axes = [none if of is None else plan.axes(of) for of in owners]
    shapes = [x.shape if of is None else plan.operand(x.shape, of) for x, of in zip(infos, owners)]
    ones = [
        plgpu.ArrayInfo(x.shape, x.dtype, x.device, x.aligned)
        if of is None
        else _matrix(x, x.shape[-2:])
        for x, of in zip(infos, owners)
    ]
    one, pads = make(*ones, batch=math.prod(plan.extents)), [None] * len(infos)
    while isinstance(one, Padded):
        pads = [inner or pad for inner, pad in zip(one.pads, pads)]
        one = one.product
    pads = [
        _mapped(pad, [(0,) for axis in of if axis == 0]) if pad else None
        for pad, of in zip(pads, axes)
    ]
    inner = one.mapped(_mapped, [*zip(*axes)]) if isinstance(one, Sliced) else None
    inner = with_padding(inner or _mapped(one, [*zip(*axes)]), pads)
    return _with_views(inner, shapes, (*plan.extents, m, n), result)
