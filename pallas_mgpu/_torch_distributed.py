"""The functions of `ops.distributed` with gradients, for tensors of PyTorch.

Arrays are lists of tensors, one for each device of the mesh, or with a process group the tensor of
this process. The gradient of a collective is another collective along the same axis; every process
of a group must run backward. These are no operators: schemas have no meshes, so `torch.compile`
breaks its graph at them."""

from typing import Any

import torch

from ._torch_ops import matmul as product
from .ops import distributed as _distributed
from .ops import distributed_matmul as _matmul
from .ops import distributed_ragged as _ragged

distributed: Any = _distributed
distributed_matmul: Any = _matmul
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


class _RaggedAllToAll(torch.autograd.Function):
    """Of flat tensors: the rows of n devices, then their sizes. The gradient goes back."""

    @staticmethod
    def forward(ctx, mesh, options, n, *tensors):
        ctx.mesh, ctx.rows, ctx.n = mesh, tensors[0].shape[0], n
        ctx.options = {k: options.get(k) for k in ("axis_name", "interpret")}
        out, received = _call_of_two(_columns(tensors, n), mesh, options)
        ctx.save_for_backward(*received)
        ctx.mark_non_differentiable(*received)
        return *out, *received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        columns = [[g.contiguous() for g in grads[: ctx.n]], list(ctx.saved_tensors)]
        back, _ = _call_of_two(columns, ctx.mesh, {"capacity": ctx.rows, **ctx.options})
        return None, None, None, *back, *[None] * ctx.n


def _call_of_two(columns, mesh, options):
    if mesh.group is None:
        return distributed_ragged.ragged_all_to_all(*columns, mesh, **options)
    x, sizes = (c[0] for c in columns)
    return [[y] for y in distributed_ragged.ragged_all_to_all(x, sizes, mesh, **options)]


def ragged_all_to_all(x, sizes, mesh, axis_name=None, **options):
    """:func:`pallas_mgpu.ops.distributed_ragged.ragged_all_to_all` with the gradient by ``x``,
    which takes the same way back. NotImplementedError for ``scales`` and ``out``."""
    given = [k for k in ("scales", "out") if options.get(k) is not None]
    if given:
        raise NotImplementedError(
            f"ragged_all_to_all: {given[0]}= has no gradient; use the function of pallas_mgpu.ops"
        )
    many = mesh.group is None
    n = mesh.size if many else 1
    flat = [*x, *sizes] if many else [x, sizes]
    made = _RaggedAllToAll.apply(mesh, {"axis_name": axis_name, **options}, n, *flat)
    out, received = _columns(made, n)
    return (out, received) if many else (out[0], received[0])
