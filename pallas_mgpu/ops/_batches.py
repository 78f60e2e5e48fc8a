"""Products of arrays with batch dimensions, broadcast as NumPy does.

Without a batch of its own, B is multiplied with all rows of A at once. Otherwise batch dimensions
that follow each other and that the same operands have are merged, and the product of two matrices
is mapped (plgpu.vmap) over what is left: one launch, whose blocks have the batch as an outer axis.
Arrays are reshaped, never copied, but to padded rows."""

import itertools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu

from ._padding import Padded, padding_of, with_padding
from ._slices import Sliced


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


def plan_of(a, b):
    """a, b: with two dims or more, and elements. ValueError for batches that do not match."""
    batches = a.shape[:-2], b.shape[:-2]
    count = max(map(len, batches))
    x, y = ((1,) * (count - len(batch)) + batch for batch in batches)
    if any(m != n and 1 not in (m, n) for m, n in zip(x, y)):
        raise ValueError(
            "matmul: the batch dimensions of a and b must be equal or 1, got"
            f" {a.shape} and {b.shape}"
        )
    dims = [(max(m, n), m > 1, n > 1) for m, n in zip(x, y) if max(m, n) > 1]
    groups = tuple(
        (math.prod(extent for extent, *_ in same), *has)
        for has, same in itertools.groupby(dims, lambda dim: dim[1:])
    )
    return Plan(groups, tuple(max(m, n) for m, n in zip(x, y)))


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


class _Reshaped:
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


def product(a, b, ta, tb, make, interpret, extra):
    """The function of arrays with batches. make(a, b, batch): what multiplies such matrices, one
    of so many. extra: how many operands follow a and b."""
    plan = plan_of(a, b)
    m, n = a.shape[-1 if ta else -2], b.shape[-2 if tb else -1]
    result = (*plan.shape, m, n)
    info = lambda x, shape: plgpu.ArrayInfo(shape, x.dtype, x.device, x.aligned)  # noqa: E731
    if not ta and not any(has_b for *_, has_b in plan.groups):  # one product of all rows
        rows = math.prod(plan.shape) * m
        shapes = (rows, a.shape[-1]), b.shape[-2:]
        inner = make(info(a, shapes[0]), info(b, shapes[1]), 1)
        return _Reshaped(inner, shapes, (rows, n), result)
    shapes = plan.operand(a.shape, 0), plan.operand(b.shape, 1)
    batch = math.prod(plan.extents)
    one = make(*(plgpu.ArrayInfo(s[-2:], x.dtype, x.device) for s, x in zip(shapes, (a, b))), batch)
    pads = [padding_of(info(x, s), interpret) for s, x in zip(shapes, (a, b))]
    axes = [(*of, *(None,) * extra) for of in zip(plan.axes(0), plan.axes(1))]
    one = one.product if isinstance(one, Padded) else one
    if isinstance(one, Sliced):
        inner = one.mapped(_mapped, axes)
    else:
        inner = _mapped(one, axes)
    inner = with_padding(inner, [*pads, *(None,) * extra])
    return _Reshaped(inner, shapes, (*plan.extents, m, n), result)
