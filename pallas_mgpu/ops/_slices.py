"""Products whose K is divided among blocks of the whole GPU: `slices` of a MatmulConfig.

A first kernel writes the sum over each part of K, a *slice*, to global memory, as float32 or int32:
(M, slices, N). A second one adds the slices up in their order and does what the epilogue of an
undivided product does: scales, bias, activation. So results repeat bit for bit. No block waits for
another one, and the sums belong to the call: calls on several streams, and the launches of a CUDA
graph, have nothing in common."""

import copy

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SeveralKernels, applied, overlap_launches
from ._scaled import UNSCALED

_WIDTH = 512  # elements of the result that a block adds up; half of them where there are few
_MANY = 1 << 19  # elements of the result


def partial(x):
    """The Product of the first kernel. x: the whole Product."""
    forms = x.forms if x.forms.blocks else UNSCALED  # these change along K
    return x._replace(out_dtype=x.sums, bias_dtype=None, activation=None, forms=forms)


def shape_of(x, slices):
    """Of the sums. Rows are first, where their number may be known at run time only, and are a
    multiple of 16 bytes, which TMA wants."""
    return x.m, slices, pl.cdiv(x.n, 4) * 4


class _Sum:
    """One block of the second kernel, while it is traced."""

    def __init__(self, x, slices, tile, refs):
        self.x, self.slices, self.tile, self.refs = x, slices, tile, refs

    def along(self, name, at, axis):
        """A vector of the product's rows or columns, as float32 of the shape of the tile."""
        vector = self.refs[name]
        vector = vector.reshape((vector.size,))[at].astype(jnp.float32)
        return lax.broadcast_in_dim(vector, self.tile, [axis])

    def run(self):
        x, (height, width) = self.x, self.tile
        row, col = lax.axis_index("row") * height, lax.axis_index("col") * width
        # the last ones begin earlier where it does not come out even
        row = row if height == 1 else jnp.minimum(row, x.m - height)
        col = jnp.minimum(col, x.n - width)
        rows, cols = pl.ds(row, height), pl.ds(col, width)
        value = self.refs["sums"][rows, 0, cols]
        for j in range(1, self.slices):
            value = value + self.refs["sums"][rows, j, cols]
        if x.out_dtype != x.sums:
            value = value.astype(jnp.float32)
        for axis, (name, at) in enumerate((("scale_a", rows), ("scale_b", cols))):
            if name in self.refs and x.forms[axis] == "each":
                value = value * self.along(name, at, axis)
            elif name in self.refs:
                value = value * self.refs[name].reshape((1,))[0]
        if x.bias_dtype is not None:
            value = value + self.along("bias", cols, 1)
        if x.activation is not None:
            value = applied(x.activation, value)
        self.refs["o"][rows, cols] = value.astype(x.out_dtype)


@cached
def _sum_kernel(x, slices, interpret, shapes=()):
    """shapes: of the scales that it gets, where rows are open."""
    open_rows = isinstance(x.m, plgpu.Dim)
    most = _WIDTH if _sizes.most(x.m) * x.n >= _MANY else _WIDTH // 2
    width = min(x.n, most)
    height = 1 if open_rows else min(x.m, max(most // width, 1))
    scales = () if x.forms.blocks else x.forms
    names = ["sums", *(n for n, f in zip(("scale_a", "scale_b"), scales) if f), "o"]
    if x.bias_dtype is not None:
        names.insert(1, "bias")

    def body(*refs):
        overlap_launches()
        _Sum(x, slices, (height, width), dict(zip(names, refs, strict=True))).run()

    options = {}
    if open_rows:
        biases = (None,) * (x.bias_dtype is not None)
        options["in_shapes"] = (x.m, None, None), *biases, *(shapes if scales else ())
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype),
        grid=(pl.cdiv(x.n, width), pl.cdiv(x.m, height)),  # any number in the last one
        grid_names=("col", "row"),
        interpret=interpret,
        kernel_name="matmul_sum",
        **options,
    )


class Sliced(SeveralKernels):
    """The product by both kernels. slicing: the first one, for partial(x)."""

    def __init__(self, slicing, x, slices, interpret, shapes=()):
        self.x, self.slicing = x, slicing
        self.adding = _sum_kernel(x, slices, interpret, shapes)
        self.shape = shape_of(x, slices)  # of the sums

    def operands(self, a, b, *others):
        """Those of the first kernel, and those of the second one beside the sums."""
        biases = self.x.bias_dtype is not None
        if self.x.forms.blocks:
            return (a, b, *others[biases:]), others[:biases]
        return (a, b), others

    def __call__(self, *operands, out=None, stream=None):
        first, second = self.operands(*operands)
        sums = self.slicing(*first, stream=stream)
        return self.adding(sums, *second, out=out, stream=stream)

    def mapped(self, mapped, axes):
        """The product over batches. mapped(kernel, axes); axes: for each batch dimension, those of
        the operands."""
        out = copy.copy(self)
        pairs = [self.operands(*of) for of in axes]
        out.slicing = mapped(self.slicing, [first for first, _ in pairs])
        out.adding = mapped(self.adding, [(0, *second) for _, second in pairs])
        return out
