"""The functions of `ops.distributed` with gradients, for tensors of PyTorch.

Arrays are lists of tensors, one for each device of the mesh, or with a process group the tensor of
this process. The gradient of a collective is another collective along the same axis; every process
of a group must run backward. These are no operators: schemas have no meshes, so `torch.compile`
breaks its graph at them."""

from typing import Any

import torch

from ._torch_ops import matmul as product
from ._torch_ops import rms_norm_backward
from .ops import distributed as _distributed
from .ops import distributed_matmul as _matmul
from .ops import distributed_norms as _norms
from .ops import distributed_ragged as _ragged

distributed: Any = _distributed
distributed_matmul: Any = _matmul
distributed_norms: Any = _norms
distributed_ragged: Any = _ragged


class _Collective(torch.autograd.Function):
    """run(*lists) and gradient(lists that run got, gradients of results), on flat tensors."""

    @staticmethod
    def forward(ctx, run, gradient, n, *tensors):
        ctx.gradient, ctx.n = gradient, n
        ctx.save_for_backward(*tensors)
        return tuple(run(*_columns(tensors, n)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        found = ctx.gradient(_columns(ctx.saved_tensors, ctx.n), list(grads))
        return None, None, None, *(x for column in found for x in column)


def _columns(tensors, n):
    """The flat tensors of several arrays as one list for each array; n: devices here."""
    return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]


def _call(f, mesh, columns, **options):
    """f on lists of tensors; the list of its results."""
    if mesh.group is None:
        return f(*columns, mesh, **options)
    return [f(*(c[0] for c in columns), mesh, **options)]


def _differentiable(f, gradient, arrays, mesh, options):
    """f(*arrays, mesh, **options), recorded if autograd wants it."""
    many = mesh.group is None
    columns = [list(x) if many else [x] for x in arrays]
    flat = [x for c in columns for x in c]

    def run(*columns):
        return _call(f, mesh, columns, **options)

    found = _Collective.apply(run, gradient, len(columns[0]), *flat)
    return list(found) if many else found[0]


def _exchange(name, other):
    """A collective whose gradient is the collective `other`, with the same options."""
    f = getattr(distributed, name)

    def call(x, mesh, axis_name=None, **options):
        options["axis_name"] = axis_name

        def gradient(saved, grads):
            back = {k: v for k, v in options.items() if k not in ("one_shot", "out")}
            grads = [g.contiguous() for g in grads]
            return [_call(getattr(distributed, other), mesh, [grads], **back)]

        return _differentiable(f, gradient, [x], mesh, options)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f":func:`pallas_mgpu.ops.distributed.{name}` with its gradient, {other}."
    return call


all_gather = _exchange("all_gather", "reduce_scatter")
reduce_scatter = _exchange("reduce_scatter", "all_gather")
all_reduce = _exchange("all_reduce", "all_reduce")
all_to_all = _exchange("all_to_all", "all_to_all")


def _product(name, other, gathered):
    """``a @ b`` with a collective. Its gradient by ``a`` is the product `other` of the gradient and
    ``b`` transposed; that by ``b`` gathers `gathered` ("a", or "the gradient")."""
    f = getattr(distributed_matmul, name)

    def call(a, b, mesh, axis_name=None, **options):
        along = {"axis_name": axis_name, "interpret": options.get("interpret")}

        def gradient(saved, grads):
            a, b = saved
            grads = [g.to(x.dtype).contiguous() for g, x in zip(grads, a)]
            transposed = [x.t().contiguous() for x in b]
            da = _call(getattr(distributed_matmul, other), mesh, [grads, transposed], **along)
            whole = _call(distributed.all_gather, mesh, [a if gathered == "a" else grads], **along)
            pairs = zip(whole, grads) if gathered == "a" else zip(a, whole)
            return da, [product(x, g, transpose_a=True) for x, g in pairs]

        return _differentiable(f, gradient, [a, b], mesh, {"axis_name": axis_name, **options})

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f":func:`pallas_mgpu.ops.distributed_matmul.{name}` with gradients by ``a`` and ``b``: by "
        f"``a``, {other}; by ``b``, a product for which {gathered} is gathered."
    )
    return call


all_gather_matmul = _product("all_gather_matmul", "matmul_reduce_scatter", "a")
matmul_reduce_scatter = _product("matmul_reduce_scatter", "all_gather_matmul", "the gradient")


def matmul_all_reduce(a, b, mesh, axis_name=None, **options):
    """``all_reduce(a @ b)`` (:mod:`pallas_mgpu.ops.distributed_matmul`) with gradients by ``a`` and
    ``b``, which take the sum of the gradients of all devices."""
    along = {"axis_name": axis_name, "interpret": options.get("interpret")}

    def gradient(saved, grads):
        a, b = saved
        grads = [g.to(x.dtype).contiguous() for g, x in zip(grads, a)]
        total = _call(distributed.all_reduce, mesh, [grads], **along)
        da = [product(g, y, transpose_b=True) for g, y in zip(total, b)]
        return da, [product(x, g, transpose_a=True) for x, g in zip(a, total)]

    f, options = distributed_matmul.matmul_all_reduce, {"axis_name": axis_name, **options}
    return _differentiable(f, gradient, [a, b], mesh, options)


def _call_of_several(f, columns, mesh, options):
    """f on lists of tensors, which has several results: lists of them."""
    if mesh.group is None:
        return [list(y) for y in f(*columns, mesh, **options)]
    return [[y] for y in f(*(c[0] for c in columns), mesh, **options)]


class _AllReduceRmsNorm(torch.autograd.Function):
    """Of flat tensors: the summands of n devices, their residuals and their weights."""

    @staticmethod
    def forward(ctx, mesh, options, n, *tensors):
        ctx.mesh, ctx.n, ctx.eps = mesh, n, options.get("eps", 1e-6)
        ctx.options = {k: options.get(k) for k in ("axis_name", "interpret")}
        columns = _columns(tensors, n)
        f = distributed_norms.all_reduce_rms_norm
        normed, total = _call_of_several(f, columns, mesh, options)
        ctx.save_for_backward(*total, *columns[2])
        return *normed, *total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        total, weight = _columns(ctx.saved_tensors, ctx.n)
        of_normed, of_total = _columns([g.contiguous() for g in grads], ctx.n)
        found = [
            rms_norm_backward(g, x, w, add, ctx.eps)
            for g, x, w, add in zip(of_normed, total, weight, of_total)
        ]
        by_total, by_weight = ([f[k] for f in found] for k in range(2))
        by_x = _call(distributed.all_reduce, ctx.mesh, [by_total], **ctx.options)
        return None, None, None, *by_x, *by_total, *by_weight


def all_reduce_rms_norm(x, residual, weight, mesh, axis_name=None, **options):
    """:func:`pallas_mgpu.ops.distributed_norms.all_reduce_rms_norm` with gradients. That by ``x``
    is the sum over the devices; those by ``residual`` and ``weight`` are of this device's results
    alone, so where all devices share a parameter its gradients are still to be summed."""
    many = mesh.group is None
    columns = [list(a) if many else [a] for a in (x, residual, weight)]
    n = len(columns[0])
    flat = [a for c in columns for a in c]
    made = _AllReduceRmsNorm.apply(mesh, {"axis_name": axis_name, **options}, n, *flat)
    normed, total = _columns(made, n)
    return (normed, total) if many else (normed[0], total[0])


class _RaggedAllToAll(torch.autograd.Function):
    """Of flat tensors: the rows of n devices, their sizes, and scales where there are some. The
    gradients go back."""

    @staticmethod
    def forward(ctx, mesh, options, n, *tensors):
        ctx.mesh, ctx.rows, ctx.n = mesh, tensors[0].shape[0], n
        ctx.options = {k: options.get(k) for k in ("axis_name", "interpret")}
        out, received, *scales = _ragged_call(_columns(tensors, n), mesh, options)
        ctx.save_for_backward(*received)
        ctx.mark_non_differentiable(*received)
        return *out, *received, *(y for c in scales for y in c)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        of_rows, _, *of_scales = _columns(grads, ctx.n)
        columns = [of_rows, list(ctx.saved_tensors), *of_scales]
        columns = [[g.contiguous() for g in c] for c in columns]
        options = {"capacity": ctx.rows, **ctx.options}
        back, _, *scales = _ragged_call(columns, ctx.mesh, options)
        return None, None, None, *back, *[None] * ctx.n, *(y for c in scales for y in c)


def _ragged_call(columns, mesh, options):
    """columns: rows, sizes, and scales where there are some."""
    rows, sizes, *scales = columns
    if scales:
        own = scales[0] if mesh.group is None else scales[0][0]
        options = {**options, "scales": own}
    return _call_of_several(distributed_ragged.ragged_all_to_all, [rows, sizes], mesh, options)


def ragged_all_to_all(x, sizes, mesh, axis_name=None, *, scales=None, **options):
    """:func:`pallas_mgpu.ops.distributed_ragged.ragged_all_to_all` with gradients by ``x`` and
    ``scales``, which take the same way back. NotImplementedError for ``out``."""
    if options.pop("out", None) is not None:
        raise NotImplementedError(
            "ragged_all_to_all: out= has no gradient; use the function of pallas_mgpu.ops"
        )
    many = mesh.group is None
    n = mesh.size if many else 1
    given = [x, sizes] if scales is None else [x, sizes, scales]
    flat = [a for g in given for a in (g if many else [g])]
    made = _RaggedAllToAll.apply(mesh, {"axis_name": axis_name, **options}, n, *flat)
    columns = _columns(made, n)
    return tuple(columns) if many else tuple(c[0] for c in columns)
