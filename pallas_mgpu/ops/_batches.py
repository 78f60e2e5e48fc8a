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
from pallas_mgpu import _core, _sizes

from ._common import SeveralKernels
from ._open_rows import ANY_ROWS, is_static
from ._padding import Padded, with_padding
from ._slices import Sliced

BUCKETS = {128: 3, 1 << 22: 6}  # programs for any sizes by the most rows of a matrix
_ELEMENTS = 1 << 44  # more than an array has


class Plan(NamedTuple):
    """How batch dimensions are worked on. ``groups``: merged ones, (extent, has a it, has b it);
    ``shape``: that of the batch."""

    groups: tuple[tuple[int, bool, bool], ...]
    shape: tuple[int, ...]

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


class Batch(NamedTuple):
    """How many products a kernel computes, maybe a size of the call, and which operands have one
    matrix for each. rows: those of all matrices, of A and of the result where these have one
    dimension for all; None where arrays of matrices have one more dimension."""

    size: int
    a: bool
    b: bool
    rows: plgpu.Dim | None = None


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


def with_open_sizes(x, a, batch, kind):
    """The Product of a batch, perhaps with open sizes, and A as its kernel gets it. kind:
    what distinguishes programs but the sizes."""
    m, count = x.m, batch.size
    edges = 0, *BUCKETS
    most = _ELEMENTS // (max(m, x.n) * x.k if x.ta else x.n * x.k)
    size = plgpu.dim("B", max=min(most, edges[-1]))
    if x.ta:  # rows are no outer dimension
        if not is_static((*kind, m), count):
            batch = batch._replace(size=size)
        return x._replace(batch=batch), a
    # parts of tiles are stored by TMA
    fits = x.n * x.out_dtype.itemsize % 16 == 0 and count * m <= ANY_ROWS[1]
    if not fits or m > edges[-1] or is_static(kind, (m, count)):
        return x._replace(batch=batch), a
    most = next(edge for edge in edges if m <= edge)
    least = edges[edges.index(most) - 1] + 1
    if batch.a:
        every = plgpu.dim("R", min=least, max=ANY_ROWS[1])
        x = x._replace(m=_sizes.clamp(every // size, least, most))
        a = plgpu.ArrayInfo((count * m, x.k), a.dtype, a.device, a.aligned)
    else:
        x = x._replace(m=plgpu.dim("M", min=least, max=most))
        every = x.m * size
    return x._replace(batch=batch._replace(size=size, rows=every)), a


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


def _with_views(product, shapes, inner, shape):
    """`_Reshaped`, in the extension where the product is a single kernel."""
    by_hand = _Reshaped(product, shapes, inner, shape)
    if not isinstance(product, _core.Kernel):
        return by_hand
    return _core.Reshaped(product, lambda: by_hand, tuple(map(tuple, shapes)), (tuple(shape),))


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


def _with_shapes(infos, shapes):
    return [plgpu.ArrayInfo(s, x.dtype, x.device, x.aligned) for s, x in zip(shapes, infos)]


def _plan(a, b, ta, tb):
    """The first few views whose batch dimensions cannot be merged are read as they lie."""
    plan, apart = plan_of(a, b), plan_of(a, b, by_strides=True)
    if plan == apart:
        return plan
    kind = "matrices apart", a.ndim, b.ndim, a.shape[-1], b.shape[-2:], a.dtype, b.dtype, ta, tb
    return apart if is_static((*kind, a.device), (a.shape, b.shape)) else plan


def product(a, b, ta, tb, make, make_all, extras):
    """The function of arrays with batches. extras: a list of Extra. make(*infos of a, b and extras,
    batch=): what multiplies such matrices, one of so many; make_all(the same): what multiplies all
    matrices of arrays with one batch dimension or none, the shape in which it gets A and that of
    what it makes; or None."""
    plan = _plan(a, b, ta, tb)
    m, n = a.shape[-1 if ta else -2], b.shape[-2 if tb else -1]
    result = (*plan.shape, m, n)
    infos = [a, b, *(extra.info for extra in extras)]
    shapes, one_batch = _of_all_rows(plan, a, b, ta, extras), plan
    if not plan.groups and min(a.ndim, b.ndim) > 2:  # programs for any batch serve one of 1, too
        one_batch = plan._replace(groups=((1, True, True),))
    if len(one_batch.groups) == 1 and (one_batch is not plan or not shapes):
        all_shapes = [one_batch.operand(x.shape, of) for of, x in enumerate((a, b))]
        all_shapes += [x.info.shape for x in extras]
        whole = _with_shapes(infos, all_shapes)
        found = make_all(*whole, batch=one_batch.extents[0])
        if found:
            kernel, all_shapes[0], inner = found
            return _with_views(kernel, all_shapes, inner, result)
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
