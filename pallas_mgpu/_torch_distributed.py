"""The functions of `ops.distributed` with gradients, for tensors of PyTorch.

Arrays are lists of tensors, one for each device of the mesh, or with a process group the tensor of
this process. The gradient of a collective is another collective along the same axis; every process
of a group must run backward. These are no operators: schemas have no meshes, so `torch.compile`
breaks its graph at them."""

from typing import Any

import torch

from . import _core
from ._spmd import symm_empty
from ._torch_ops import matmul as product
from .ops import distributed as _distributed
from .ops import distributed_matmul as _matmul

distributed: Any = _distributed
distributed_matmul: Any = _matmul


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


def _reachable(tensors, mesh):
    """Gradients, in memory that the other devices of a group reach."""
    if mesh.group is None:
        return [x.contiguous() for x in tensors]
    found = []
    for x in tensors:
        dtype = _core.as_dtype(str(x.dtype).removeprefix("torch."))
        found.append(symm_empty(tuple(x.shape), dtype, mesh).copy_(x))
    return found


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
            return [_call(getattr(distributed, other), mesh, [_reachable(grads, mesh)], **back)]

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
            grads = _reachable([g.to(x.dtype) for g, x in zip(grads, a)], mesh)
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
