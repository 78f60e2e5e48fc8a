"""The collectives of `ops` as operators of PyTorch, with gradients.

Arrays are lists of tensors, one for each device of the mesh, or with a process group the tensor of
this process. Schemas have no meshes: operators take lists of tensors and the name of a mesh
(``DeviceMesh.name``), under which the mesh was made in this process. The gradient of a collective
is another collective along the same axis; every process of a group must run backward.

`all_reduce_rms_norm` and `ragged_all_to_all`, whose results are of several kinds, are no operators:
`torch.compile` breaks its graph at them."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ._spmd import MESHES
from ._torch import _below_autograd, _refuse_tangents, in_torch_func, library_of
from ._torch_ops import _dtype, rms_norm_backward
from ._torch_ops import matmul as product
from .ops import distributed as _distributed
from .ops import distributed_matmul as _matmul
from .ops import distributed_norms as _norms
from .ops import distributed_ragged as _ragged

_ops: Any = torch.ops.pallas_mgpu
distributed: Any = _distributed
distributed_matmul: Any = _matmul
distributed_norms: Any = _norms
distributed_ragged: Any = _ragged


def _mesh(name):
    if name not in MESHES:
        raise RuntimeError(
            f"this process has no mesh {name}; make the DeviceMesh before its collectives are"
            " called, also those of a program that was exported"
        )
    return MESHES[name]


def _along(name, axis_name):
    """The number of devices along an axis."""
    return distributed._along(_mesh(name), axis_name, "collective")[1]


def _call(f, name, columns, **options):
    """A function of `ops` on lists of tensors; the list of its results."""
    mesh = _mesh(name)
    options["interpret"] = options.get("interpret") or None
    columns = [[x.contiguous() for x in c] for c in columns]
    if mesh.group is None:
        return f(*columns, mesh, **options)
    return [f(*(c[0] for c in columns), mesh, **options)]


def _columns(tensors, n):
    """Flat tensors as n lists."""
    size = len(tensors) // n
    return [list(tensors[i * size : (i + 1) * size]) for i in range(n)]


class _Collective(torch.autograd.Function):
    """An operator on n lists of tensors, which are flat here: autograd looks into no lists."""

    @staticmethod
    def forward(ctx, op, keyset, gradient, n, options, *tensors):
        ctx.gradient, ctx.n, ctx.options = gradient, n, options
        ctx.save_for_backward(*tensors)
        return tuple(_below_autograd(op, keyset, (*_columns(tensors, n), *options)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        saved = _columns(ctx.saved_tensors, ctx.n)
        found = ctx.gradient(saved, [g.contiguous() for g in grads], *ctx.options)
        return *(None,) * 5, *(x for column in found for x in column)


def _operator(fake, gradient):
    """Makes an operator of a function of lists of tensors, the name of a mesh and options.
    gradient(lists, gradients of the results, name of the mesh, *options): those of the lists."""

    def make(f):
        name = f.__name__.removeprefix("_")
        qualname = f"pallas_mgpu::{name}"
        parameters = inspect.signature(f).parameters.values()
        n = sum(p.annotation == list[Tensor] for p in parameters)
        defaults = [p.default for p in parameters]
        library = library_of("pallas_mgpu")
        library.define(name + torch.library.infer_schema(f, mutates_args=()))
        op = getattr(_ops, name).default
        library.impl(name, f, "CompositeExplicitAutograd")
        torch.library.register_fake(qualname, fake, lib=library)

        def rule(keyset, *args):
            args = (*args, *defaults[len(args) :])
            tensors = [x for column in args[:n] for x in column]
            _refuse_tangents(qualname, tensors)
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
                return _below_autograd(op, keyset, args)
            if in_torch_func():
                raise NotImplementedError(
                    f"{qualname} has no gradient under torch.func; use autograd"
                )
            return list(_Collective.apply(op, keyset, gradient, n, args[n:], *tensors))

        library.impl(name, rule, "Autograd", with_keyset=True)
        return op

    return make


def _given(x, mesh):
    """The arrays of a call as a list."""
    return list(x) if mesh.group is None else [x]


def _result(found, mesh):
    return list(found) if mesh.group is None else found[0]


def _plain(name, columns, interpret, out):
    """Is the call one of the function of `ops`, with options that operators do not have?"""
    if out is None and interpret in (None, False, True):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for c in columns for x in c):
        raise NotImplementedError(
            f"{name}: out= and options of the interpreter where autograd records; call it under"
            " torch.no_grad()"
        )
    return True


# ---- exchanges and sums --------------------------------------------------------------------------


def _resized(x, axis, multiply=1, divide=1):
    shape = list(x.shape)
    shape[axis] = shape[axis] * multiply // divide
    return x.new_empty(shape)


def _gathered_fake(x, mesh, axis_name=None, axis=0, *options):
    return [_resized(t, axis, multiply=_along(mesh, axis_name)) for t in x]


def _scattered_fake(x, mesh, axis_name=None, axis=0, *options):
    return [_resized(t, axis, divide=_along(mesh, axis_name)) for t in x]


def _same_fake(x, *options):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x]


@_operator(_gathered_fake, lambda saved, grads, *options: [_ops.reduce_scatter(grads, *options)])
def _all_gather(
    x: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    axis: int = 0,
    blocks: int | None = None,
    multicast: bool = False,
    interpret: bool = False,
) -> list[Tensor]:
    options = {"axis": axis, "blocks": blocks, "multicast": multicast, "interpret": interpret}
    return _call(distributed.all_gather, mesh, [x], axis_name=axis_name, **options)


@_operator(_scattered_fake, lambda saved, grads, *options: [_ops.all_gather(grads, *options)])
def _reduce_scatter(
    x: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    axis: int = 0,
    blocks: int | None = None,
    multicast: bool = False,
    interpret: bool = False,
) -> list[Tensor]:
    options = {"axis": axis, "blocks": blocks, "multicast": multicast, "interpret": interpret}
    return _call(distributed.reduce_scatter, mesh, [x], axis_name=axis_name, **options)


@_operator(_same_fake, lambda saved, grads, *options: [_ops.all_reduce(grads, *options)])
def _all_reduce(
    x: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    blocks: int | None = None,
    one_shot: bool | None = None,
    multicast: bool = False,
    interpret: bool = False,
) -> list[Tensor]:
    options = {"blocks": blocks, "one_shot": one_shot, "multicast": multicast}
    options["interpret"] = interpret
    return _call(distributed.all_reduce, mesh, [x], axis_name=axis_name, **options)


@_operator(_same_fake, lambda saved, grads, *options: [_ops.all_to_all(grads, *options)])
def _all_to_all(
    x: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    blocks: int | None = None,
    interpret: bool = False,
) -> list[Tensor]:
    options = {"blocks": blocks, "interpret": interpret}
    return _call(distributed.all_to_all, mesh, [x], axis_name=axis_name, **options)


def all_gather(
    x, mesh, axis_name=None, *, axis=0, blocks=None, multicast=False, interpret=None, out=None
):
    """:func:`pallas_mgpu.ops.distributed.all_gather` with its gradient, reduce_scatter."""
    given = _given(x, mesh)
    if _plain("all_gather", [given], interpret, out):
        options = {"axis": axis, "blocks": blocks, "multicast": multicast}
        return distributed.all_gather(x, mesh, axis_name, **options, interpret=interpret, out=out)
    options = axis, blocks, multicast, bool(interpret)
    return _result(_ops.all_gather(given, mesh.name, axis_name, *options), mesh)


def reduce_scatter(
    x, mesh, axis_name=None, *, axis=0, blocks=None, multicast=False, interpret=None, out=None
):
    """:func:`pallas_mgpu.ops.distributed.reduce_scatter` with its gradient, all_gather."""
    given = _given(x, mesh)
    if _plain("reduce_scatter", [given], interpret, out):
        options = {"axis": axis, "blocks": blocks, "multicast": multicast}
        options |= {"interpret": interpret, "out": out}
        return distributed.reduce_scatter(x, mesh, axis_name, **options)
    options = axis, blocks, multicast, bool(interpret)
    return _result(_ops.reduce_scatter(given, mesh.name, axis_name, *options), mesh)


def all_reduce(
    x,
    mesh,
    axis_name=None,
    *,
    blocks=None,
    one_shot=None,
    multicast=False,
    interpret=None,
    out=None,
):
    """:func:`pallas_mgpu.ops.distributed.all_reduce` with its gradient, all_reduce."""
    given = _given(x, mesh)
    if _plain("all_reduce", [given], interpret, out):
        options = {"blocks": blocks, "one_shot": one_shot, "multicast": multicast}
        return distributed.all_reduce(x, mesh, axis_name, **options, interpret=interpret, out=out)
    options = blocks, one_shot, multicast, bool(interpret)
    return _result(_ops.all_reduce(given, mesh.name, axis_name, *options), mesh)


def all_to_all(x, mesh, axis_name=None, *, blocks=None, interpret=None, out=None):
    """:func:`pallas_mgpu.ops.distributed.all_to_all` with its gradient, all_to_all."""
    given = _given(x, mesh)
    if _plain("all_to_all", [given], interpret, out):
        options = {"blocks": blocks, "interpret": interpret, "out": out}
        return distributed.all_to_all(x, mesh, axis_name, **options)
    return _result(_ops.all_to_all(given, mesh.name, axis_name, blocks, bool(interpret)), mesh)


# ---- products ------------------------------------------------------------------------------------


def _product_fake(multiply, divide):
    """Of a @ b with more or fewer rows: by the devices along the axis, or not."""

    def fake(a, b, mesh, axis_name=None, out_dtype=None, *options):
        n = _along(mesh, axis_name)
        found = []
        for x, y in zip(a, b):
            rows = x.shape[0] * (n if multiply else 1) // (n if divide else 1)
            found.append(x.new_empty((rows, y.shape[1]), dtype=out_dtype or x.dtype))
        return found

    return fake


def _product_gradient(other, of_b):
    """By a, the product `other` of the gradient and b transposed; of_b(a, gradient, gather) by b,
    where gather(lists) gathers along the axis."""

    def gradient(saved, grads, name, axis_name, out_dtype, blocks, interpret):
        a, b = saved
        grads = [g.to(x.dtype).contiguous() for g, x in zip(grads, a)]
        transposed = [x.t().contiguous() for x in b]
        along = name, axis_name
        da = other(grads, transposed, *along, a[0].dtype, blocks, interpret)
        gathered = of_b(a, grads, lambda x: _ops.all_gather(x, *along, 0, 16, False, interpret))
        return da, [product(x, g, transpose_a=True) for x, g in zip(*gathered)]

    return gradient


def _options_of_product(axis_name, out_dtype, blocks, interpret):
    options = {"axis_name": axis_name, "blocks": blocks, "interpret": interpret}
    return options | {"out_dtype": _dtype(out_dtype)}


@_operator(
    _product_fake(True, False),
    _product_gradient(
        lambda *args: _ops.matmul_reduce_scatter(*args),
        lambda a, grads, gather: (gather(a), grads),
    ),
)
def _all_gather_matmul(
    a: list[Tensor],
    b: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: int | None = None,
    interpret: bool = False,
) -> list[Tensor]:
    options = _options_of_product(axis_name, out_dtype, blocks, interpret)
    return _call(distributed_matmul.all_gather_matmul, mesh, [a, b], **options)


@_operator(
    _product_fake(False, True),
    _product_gradient(
        lambda *args: _ops.all_gather_matmul(*args),
        lambda a, grads, gather: (a, gather(grads)),
    ),
)
def _matmul_reduce_scatter(
    a: list[Tensor],
    b: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: int | None = None,
    interpret: bool = False,
) -> list[Tensor]:
    options = _options_of_product(axis_name, out_dtype, blocks, interpret)
    return _call(distributed_matmul.matmul_reduce_scatter, mesh, [a, b], **options)


def _all_reduce_gradient(saved, grads, name, axis_name, out_dtype, blocks, interpret):
    """Both operands take the sum of the gradients of all devices."""
    a, b = saved
    grads = [g.to(x.dtype).contiguous() for g, x in zip(grads, a)]
    total = _ops.all_reduce(grads, name, axis_name, 16, None, False, interpret)
    da = [product(g, y, transpose_b=True) for g, y in zip(total, b)]
    return da, [product(x, g, transpose_a=True) for x, g in zip(a, total)]


@_operator(_product_fake(False, False), _all_reduce_gradient)
def _matmul_all_reduce(
    a: list[Tensor],
    b: list[Tensor],
    mesh: str,
    axis_name: str | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: int | None = None,
    interpret: bool = False,
) -> list[Tensor]:
    options = _options_of_product(axis_name, out_dtype, blocks, interpret)
    return _call(distributed_matmul.matmul_all_reduce, mesh, [a, b], **options)


def _multiply(name, a, b, mesh, axis_name, out_dtype, blocks, interpret, out):
    given = [_given(a, mesh), _given(b, mesh)]
    if _plain(name, given, interpret, out):
        options = {"out_dtype": _dtype(out_dtype), "blocks": blocks, "interpret": interpret}
        return getattr(distributed_matmul, name)(a, b, mesh, axis_name, **options, out=out)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        out_dtype = getattr(torch, str(out_dtype))
    options = out_dtype, blocks, bool(interpret)
    return _result(getattr(_ops, name)(*given, mesh.name, axis_name, *options), mesh)


def all_gather_matmul(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=None, interpret=None, out=None
):
    """:func:`pallas_mgpu.ops.distributed_matmul.all_gather_matmul` with gradients: by ``a``,
    matmul_reduce_scatter; by ``b``, a product for which ``a`` is gathered."""
    options = out_dtype, blocks, interpret, out
    return _multiply("all_gather_matmul", a, b, mesh, axis_name, *options)


def matmul_reduce_scatter(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=None, interpret=None, out=None
):
    """:func:`pallas_mgpu.ops.distributed_matmul.matmul_reduce_scatter` with gradients: by ``a``,
    all_gather_matmul; by ``b``, a product for which the gradient is gathered."""
    options = out_dtype, blocks, interpret, out
    return _multiply("matmul_reduce_scatter", a, b, mesh, axis_name, *options)


def matmul_all_reduce(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=None, interpret=None, out=None
):
    """:func:`pallas_mgpu.ops.distributed_matmul.matmul_all_reduce` with gradients by ``a`` and
    ``b``, which take the sum of the gradients of all devices."""
    options = out_dtype, blocks, interpret, out
    return _multiply("matmul_all_reduce", a, b, mesh, axis_name, *options)


# ---- results of several kinds --------------------------------------------------------------------


def _lists_of(tensors, n):
    """Flat tensors as lists of n."""
    return [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]


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
        columns = _lists_of(tensors, n)
        f = distributed_norms.all_reduce_rms_norm
        normed, total = _call_of_several(f, columns, mesh, options)
        ctx.save_for_backward(*total, *columns[2])
        return *normed, *total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        total, weight = _lists_of(ctx.saved_tensors, ctx.n)
        of_normed, of_total = _lists_of([g.contiguous() for g in grads], ctx.n)
        found = [
            rms_norm_backward(g, x, w, add, ctx.eps)
            for g, x, w, add in zip(of_normed, total, weight, of_total)
        ]
        by_total, by_weight = ([f[k] for f in found] for k in range(2))
        by_x = _call(distributed.all_reduce, ctx.mesh.name, [by_total], **ctx.options)
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
    normed, total = _lists_of(made, n)
    return (normed, total) if many else (normed[0], total[0])


class _RaggedAllToAll(torch.autograd.Function):
    """Of flat tensors: the rows of n devices, their sizes, and scales where there are some. The
    gradients go back."""

    @staticmethod
    def forward(ctx, mesh, options, n, *tensors):
        ctx.mesh, ctx.rows, ctx.n = mesh, tensors[0].shape[0], n
        ctx.options = {k: options.get(k) for k in ("axis_name", "interpret")}
        out, received, *scales = _ragged_call(_lists_of(tensors, n), mesh, options)
        ctx.save_for_backward(*received)
        ctx.mark_non_differentiable(*received)
        return *out, *received, *(y for c in scales for y in c)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        of_rows, _, *of_scales = _lists_of(grads, ctx.n)
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
    columns = _lists_of(made, n)
    return tuple(columns) if many else tuple(c[0] for c in columns)
