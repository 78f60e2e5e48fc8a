"""The functions of `ops` as operators of PyTorch, ``torch.ops.pallas_mgpu.*``.

Each is a function of tensors and plain options whose annotations are the schema, with a function of
shapes (fake) and a gradient. Gradients are made of operators, too, so that compilers see through
them. `attention` is not an operator of its own kind but a composition: attention_lse has the
gradient, which needs the logarithms of the sums."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _core
from . import ops as _ops
from ._torch import OPERATORS, derive, in_torch_func, library_of, make_operator
from .ops._scale import scale_in_place
from .ops.adamw import MOST as _TENSORS_OF_A_LAUNCH
from .ops.adamw import Problem as _AdamWProblem
from .ops.adamw import kernel as _adamw_kernel
from .ops.gated_matmul import input_gradient, sums_two_weights, weight_gradient
from .ops.matmul import without_product

ops: Any = _ops  # its stubs know the arrays of libraries, not tensors alone

_MADE: dict = {}  # operators, by name


def _dtype(dtype):
    """NumPy's, for an option; None stays."""
    return None if dtype is None else _core.as_dtype(str(dtype).removeprefix("torch."))


def _operator(
    fake, backward=None, autocast=(), name=None, sums=lambda *args, **options: False, views=False
):
    """sums(*args): are results without operands to sum over zeros? views: it does no more with
    tensors of a GPU than functions of `ops` do, which read views as they lie if they can."""

    def make(fn):
        called = name or fn.__name__
        qualname = f"pallas_mgpu::{called}"
        fn = _of_any_size(fn, fake, sums)
        how = autocast, True, views
        made = _MADE[called] = make_operator(fn, qualname, (), backward, fake, *how)
        return made

    return make


def _yes(*args, **options):
    return True


def _of_any_size(fn, fake, sums):
    """fn, which calls kernels, for tensors without elements, too, which these refuse. fake(*args):
    results like its."""

    @functools.wraps(fn)
    def call(*args, **options):
        try:
            return fn(*args, **options)
        except ValueError:
            every = (*args, *options.values())
            if all(x.numel() for x in every if isinstance(x, Tensor)):
                raise
            _check_sizes(fn, args, options)
            found = fake(*args, **options)
            results = found if isinstance(found, tuple) else (found,)
            if any(y.numel() for y in results):
                if not sums(*args, **options):
                    raise
                for y in results:
                    y.zero_()
            return found

    return call


def _check_sizes(fn, args, options):
    """Raises what fn raises for tensors without elements for another reason than that. It is asked
    about tensors without memory that have another size in place of 0: with 1, blocks of 0 elements
    are as many as those of 1; other sizes have to be multiples of something. A size of 1 beside one
    of 0 differs from it: with 2 in place of 0, too, unless scales of blocks are among them."""
    given = inspect.signature(fn).bind(*args, **options).arguments
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    blocks = any("scale" in name for name in tensors)
    refused, sizes = {}, [1, 128]
    if not blocks and any(1 in x.shape for x in tensors.values()):
        sizes = [2, 128]
    for size in sizes:
        error = _refusal(fn, args, options, size)
        if error is None:
            return
        refused[size] = error
    size, first = next(iter(refused.items()))
    raise type(first)(f"{first} (with sizes of {size} in place of 0)") from None


def _refusal(fn, args, options, size):
    """What fn raises with another size in place of 0, or None."""

    def like(x):
        if not isinstance(x, Tensor):
            return x
        return torch.empty([d or size for d in x.shape], dtype=x.dtype, device="meta")

    try:
        derive(fn, *map(like, args), **{name: like(x) for name, x in options.items()})
    except NotImplementedError:
        return None
    except (TypeError, ValueError) as e:
        return e
    return None


def _no_gradients(ctx, *outputs):
    """Of outputs other than the only one that has a gradient. Else backward would get zeros for
    them, which take memory and time."""
    ctx.mark_non_differentiable(*outputs)
    ctx.set_materialize_grads(False)


def _may_need_gradient(x):
    """A tensor under torch.func does not know of levels outside."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or (not torch.compiler.is_compiling() and in_torch_func())


def _like(x, *rest, **options):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _product(x, shape, out_dtype):
    return x.new_empty(shape, dtype=out_dtype or x.dtype)


# ---- matmul --------------------------------------------------------------------------------------


def _matmul_fake(a, b, bias=None, scale_a=None, scale_b=None, activation=None, out_dtype=None,
                 transpose_a=False, transpose_b=False, batch_invariant=False):  # fmt: skip
    m = a.shape[-1] if transpose_a else a.shape[-2]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    k = a.shape[-2 if transpose_a else -1], b.shape[-1 if transpose_b else -2]
    if all(isinstance(x, int) for x in k) and k[0] != k[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"matmul: the inner dims differ, {k[0]} and {k[1]}: {shapes}")
    dtype = out_dtype or (torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)
    if a.dtype == torch.int8 and all(x is None for x in (bias, scale_a, scale_b, activation)):
        dtype = out_dtype or torch.int32
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, m, n), dtype=dtype)


def _matmul_setup(ctx, inputs, output):
    a, b, bias, _, _, activation, _, ctx.ta, ctx.tb, ctx.invariant = inputs
    if a.dtype.itemsize == 1:
        raise NotImplementedError("pallas_mgpu::matmul has no gradient for 8-bit operands")
    ctx.activation, ctx.bias = activation, None if bias is None else bias.dtype
    kept = output if activation in ("relu", "tanh") else None
    again = bias if activation in ("silu", "gelu") else None  # the product is computed again
    if isinstance(output, tuple):
        kept, again = output[1], None
        _no_gradients(ctx, kept)
    ctx.save_for_backward(a, b, again, kept)


def _before_activation(ctx, grad, a, b, bias, kept):
    """The gradients of the product and of the bias (or None), from that of the result."""
    wanted = ctx.bias is not None and ctx.needs_input_grad[2]
    if ctx.activation is None:
        return grad, column_sums(grad, ctx.bias) if wanted else None
    if kept is None:
        kept = matmul(a, b, bias, out_dtype=torch.float32, transpose_a=ctx.ta, transpose_b=ctx.tb)
    of_result = ctx.activation in ("relu", "tanh")
    found, sums = activation_backward(grad, kept, ctx.activation, of_result, wanted, ctx.bias)
    return found, sums if wanted else None


def _matmul_backward(ctx, grad, *_):
    a, b, bias, kept = ctx.saved_tensors
    ta, tb = ctx.ta, ctx.tb
    grad, dbias = _before_activation(ctx, grad, a, b, bias, kept)
    found, g = [None] * 10, grad.to(a.dtype)
    found[2] = dbias
    if ctx.needs_input_grad[0]:
        found[0] = matmul(b, g, transpose_a=tb, transpose_b=True) if ta else matmul(
            g, b, transpose_b=not tb)  # fmt: skip
        found[0] = _over_batches(found[0], a)
    if ctx.needs_input_grad[1]:
        found[1] = matmul(g, a, transpose_a=True, transpose_b=ta) if tb else matmul(
            a, g, transpose_a=not ta)  # fmt: skip
        found[1] = _over_batches(found[1], b)
    return tuple(found)


def _over_batches(grad, x):
    """The gradient of x, which a batch may share."""
    return grad if grad.shape == x.shape else grad.sum_to_size(x.shape)


def _has_no_bias(a, b, bias=None, *options, **named):
    """Then the activations of zeros are zeros."""
    return bias is None


@_operator(
    _matmul_fake,
    (_matmul_setup, _matmul_backward),
    ("a", "b", "bias"),
    "matmul",
    sums=_has_no_bias,
    views=True,
)
def _fused(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    options = out_dtype, transpose_a, transpose_b, batch_invariant
    return _plain_matmul(a, b, bias, scale_a, scale_b, activation, *options)


def _plain_matmul(a, b, bias, scale_a, scale_b, activation, out_dtype, ta, tb, invariant, **more):
    return ops.matmul(
        a,
        b,
        activation=activation,
        out_dtype=_dtype(out_dtype),
        transpose_a=ta,
        transpose_b=tb,
        batch_invariant=invariant,
        **_optional(bias=bias, scale_a=scale_a, scale_b=scale_b),
        **more,
    )


_APART = {
    "silu": torch.nn.functional.silu,
    "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def _products_fake(a, b, bias=None, *options):
    y = _matmul_fake(a, b, bias, *options)
    return y, torch.empty_like(y)


@_operator(
    _products_fake,
    (_matmul_setup, _matmul_backward),
    ("a", "b", "bias"),
    sums=_has_no_bias,
    views=True,
)
def matmul_products(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result with silu or gelu, and the product before it: of one kernel, if there is one."""
    options = out_dtype, transpose_a, transpose_b, batch_invariant
    arrays = a, b, bias, scale_a, scale_b
    if without_product(a.dtype, max(a.dim(), b.dim()), a.get_device() if a.is_cuda else None):
        z = _plain_matmul(*arrays, None, *options)
        return _APART[activation](z), z
    return _plain_matmul(*arrays, activation, *options, return_product=True)


def _activation_fake(grad, x, activation, of_result=False, bias=False, out_dtype=None):
    sums = grad.new_empty(x.shape[-1:] if bias else (0,), dtype=out_dtype or grad.dtype)
    return _like(grad), sums


@_operator(_activation_fake, sums=_yes)
def activation_backward(
    grad: Tensor,
    x: Tensor,
    activation: str,
    of_result: bool = False,
    bias: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"activation": activation, "of_result": of_result, "bias": bias}
    found = ops.activation_backward(grad, x, out_dtype=_dtype(out_dtype), **options)
    return found if bias else (found, grad.new_empty((0,), dtype=out_dtype or grad.dtype))


def matmul(
    a,
    b,
    bias=None,
    scale_a=None,
    scale_b=None,
    activation=None,
    out_dtype=None,
    transpose_a=False,
    transpose_b=False,
    batch_invariant=False,
):
    """:func:`pallas_mgpu.ops.matmul`. The derivatives of silu and gelu need what the epilogue does
    not store: where they are wanted, the activation is a kernel of its own, instead of a product
    that is computed again."""
    options = scale_a, scale_b, activation, out_dtype, transpose_a, transpose_b, batch_invariant
    if activation in _APART and any(_may_need_gradient(x) for x in (a, b, bias) if x is not None):
        return matmul_products(a, b, bias, *options)[0]
    return _fused(a, b, bias, *options)


matmul.op = _fused.op  # type: ignore[attr-defined]
_MADE["matmul"] = matmul


def _sums_fake(x, out_dtype=None):
    return x.new_empty(x.shape[-1:], dtype=out_dtype or x.dtype)


@_operator(
    _sums_fake,
    (
        lambda ctx, inputs, output: setattr(ctx, "like", (inputs[0].shape, inputs[0].dtype)),
        lambda ctx, grad: (grad.to(ctx.like[1]).expand(ctx.like[0]), None),
    ),
    sums=_yes,
)
def column_sums(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return ops.column_sums(x, out_dtype=_dtype(out_dtype))


# ---- norms ---------------------------------------------------------------------------------------


def _norm_fake(x, *rest, out_dtype=None, **options):
    return torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)


def _softmax_fake(x, axis=-1, out_dtype=None, batch_invariant=False):
    return _norm_fake(x, out_dtype=out_dtype)


def _softmax_setup(ctx, inputs, output):
    ctx.axis, ctx.dtype = inputs[1], inputs[0].dtype
    ctx.save_for_backward(output)


def _softmax_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return softmax_backward(grad, y, ctx.axis).to(ctx.dtype), None, None, None


@_operator(_softmax_fake, (_softmax_setup, _softmax_backward))
def softmax(
    x: Tensor,
    axis: int = -1,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    return ops.softmax(x, axis=axis, out_dtype=_dtype(out_dtype), batch_invariant=batch_invariant)


@_operator(lambda grad, y, axis=-1: _like(y))
def softmax_backward(grad: Tensor, y: Tensor, axis: int = -1) -> Tensor:
    return ops.softmax_backward(grad, y, axis=axis)


def _rms_fake(x, weight=None, eps=1e-6, out_dtype=None, batch_invariant=False):
    return _norm_fake(x, out_dtype=out_dtype)


def _rms_setup(ctx, inputs, output):
    x, weight, ctx.eps, *_ = inputs
    ctx.save_for_backward(x, weight)


def _rms_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, dw = rms_norm_backward(grad, x, weight, None, ctx.eps)
    return dx, None if weight is None else dw, None, None, None


def _optional(**arrays):
    return {name: x for name, x in arrays.items() if x is not None}


@_operator(_rms_fake, (_rms_setup, _rms_backward))
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    options = _optional(weight=weight)
    return ops.rms_norm(
        x, eps=eps, out_dtype=_dtype(out_dtype), batch_invariant=batch_invariant, **options
    )


def _rms_backward_fake(grad, x, weight=None, add=None, eps=1e-6):
    return _like(x), x.new_empty((0,)) if weight is None else _like(weight)


@_operator(_rms_backward_fake, sums=_yes)
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    add: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    found = ops.rms_norm_backward(grad, x, eps=eps, **_optional(weight=weight, add=add))
    return (found, x.new_empty((0,))) if weight is None else found


def _layer_fake(x, weight=None, bias=None, eps=1e-5, out_dtype=None, batch_invariant=False):
    return _norm_fake(x, out_dtype=out_dtype)


def _layer_setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, *_ = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _layer_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, dw, db = layer_norm_backward(grad, x, weight, None, ctx.bias is not None, ctx.eps)
    db = None if ctx.bias is None else db.to(ctx.bias)
    return dx, None if weight is None else dw, db, None, None, None


@_operator(_layer_fake, (_layer_setup, _layer_backward))
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    options = _optional(weight=weight, bias=bias)
    return ops.layer_norm(
        x, eps=eps, out_dtype=_dtype(out_dtype), batch_invariant=batch_invariant, **options
    )


def _layer_backward_fake(grad, x, weight=None, add=None, bias=False, eps=1e-5):
    none = x.new_empty((0,))
    like = x.new_empty(x.shape[-1:]) if weight is None else _like(weight)
    return _like(x), none if weight is None else _like(weight), like if bias else none


@_operator(_layer_backward_fake, sums=_yes)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    add: Tensor | None = None,
    bias: bool = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    found = ops.layer_norm_backward(
        grad, x, bias=bias, eps=eps, **_optional(weight=weight, add=add)
    )
    found = list(found) if isinstance(found, tuple) else [found]
    if weight is None:
        found.insert(1, x.new_empty((0,)))
    if not bias:
        found.append(x.new_empty((0,)))
    return tuple(found)


def _add_norm_fake(x, *rest):
    return _like(x), _like(x)


def _add_norm_setup(ctx, inputs, output):
    weight, *bias, ctx.eps = inputs[2:]
    ctx.bias = bias[0].dtype if bias and bias[0] is not None else None
    ctx.save_for_backward(output[1], weight)


def _add_rms_backward(ctx, grad, of_total):
    total, weight = ctx.saved_tensors
    dx, dw = rms_norm_backward(grad, total, weight, of_total, ctx.eps)
    return dx, dx, None if weight is None else dw, None


@_operator(_add_norm_fake, (_add_norm_setup, _add_rms_backward))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, eps=eps, **_optional(weight=weight))


def _add_layer_backward(ctx, grad, of_total):
    total, weight = ctx.saved_tensors
    found = layer_norm_backward(grad, total, weight, of_total, ctx.bias is not None, ctx.eps)
    dx, dw, db = found
    db = None if ctx.bias is None else db.to(ctx.bias)
    return dx, dx, None if weight is None else dw, db, None


@_operator(_add_norm_fake, (_add_norm_setup, _add_layer_backward))
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    options = _optional(weight=weight, bias=bias)
    return ops.add_layer_norm(x, residual, eps=eps, **options)


# ---- attention -----------------------------------------------------------------------------------


_OF_CACHES = "kv_lengths", "q_lengths", "page_table", "q_scale", "k_scale", "v_scale"


def _attention_fake(q, k, v, *rest):
    b, n, h, _ = q.shape
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    o = q.new_empty((b, n, h, v.shape[3]), dtype=dtype)
    return o, q.new_empty((b, h, n), dtype=torch.float32)


def _attention_setup(ctx, inputs, output):
    q, k, v, *ctx.plain = inputs[:5]
    given = [n for n, x in zip(_OF_CACHES, inputs[15:]) if x is not None]
    if given or k.dtype.itemsize == 1:
        given = " and ".join([*given, *["k and v of 8 bits"] * (k.dtype.itemsize == 1)])
        raise NotImplementedError(f"pallas_mgpu::attention has no gradient with {given}")
    ctx.options, ctx.repeats = inputs[9:13], any(inputs[21:])  # deterministic
    # bias, cu_seqlens_q, cu_seqlens_k, seed; cos, sin
    ctx.save_for_backward(q, k, v, *output, *inputs[5:9], *inputs[13:15])
    _no_gradients(ctx, output[1])


def _attention_gradient(ctx, grad, _):
    wanted = any(ctx.needs_input_grad[5:6])  # defaults of the schema are not there
    *saved, cos, sin = ctx.saved_tensors
    options = *ctx.plain, *ctx.options, wanted, cos, sin, ctx.repeats
    found = attention_backward(grad, *saved, *options)
    dq, dk, dv, dbias = found
    return dq, dk, dv, None, None, dbias if wanted else None, *(None,) * 16


def window_of_schema(window):
    """A window as schemas have it."""
    return None if window is None else [-1 if side is None else side for side in window]


def _attention_options(scale, window, **options):
    """Of `ops`. In schemas a window is two ints, and a negative one does not limit."""
    if window is not None:
        options["window"] = tuple(None if side < 0 else side for side in window)
    return {"scale": scale} | _optional(**options)


@_operator(_attention_fake, (_attention_setup, _attention_gradient), ("q", "k", "v"), views=True)
def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seed: Tensor | None = None,
    window: Sequence[int] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    options = _attention_options(
        scale,
        window,
        deterministic=deterministic,
        causal=causal,
        bias=bias,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=seed,
        cos=cos,
        sin=sin,
        kv_lengths=kv_lengths,
        q_lengths=q_lengths,
        page_table=page_table,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        bottom_right=bottom_right,
        softcap=softcap,
        dropout=dropout,
    )
    return ops.attention(q, k, v, return_lse=True, **options)


def _attention_backward_fake(grad, q, k, v, o, lse, bias=None, *rest):
    wanted = rest[9]  # bias_gradient
    dbias = q.new_empty((0,)) if bias is None or not wanted else _like(bias)
    return _like(q), _like(k), _like(v), dbias


@_operator(_attention_backward_fake, sums=_yes, views=True)
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    window: Sequence[int] | None,
    bottom_right: bool,
    softcap: float | None,
    dropout: float,
    bias_gradient: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = _attention_options(
        scale,
        window,
        causal=causal,
        bias=bias,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=seed,
        cos=cos,
        sin=sin,
        bottom_right=bottom_right,
        softcap=softcap,
        dropout=dropout,
        bias_gradient=bias_gradient,
    )
    options["deterministic"] = deterministic or torch.are_deterministic_algorithms_enabled()
    found = ops.attention_backward(grad, q, k, v, o, lse, **options)
    return tuple(found) if bias_gradient else (*found, q.new_empty((0,)))


def _attention(q, k, v, causal=False, scale=None, *options):
    return torch.ops.pallas_mgpu.attention_lse(q, k, v, causal, scale, *options)[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seed: Tensor | None = None,
    window=None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    deterministic: bool = False,
):
    """:func:`pallas_mgpu.ops.attention`, differentiable by ``q``, ``k``, ``v`` and ``bias``, but
    not with the options of caches (``kv_lengths`` to ``v_scale``). Gradients repeat bit for bit
    with ``deterministic``, and under ``torch.use_deterministic_algorithms(True)``."""
    arrays = bias, cu_seqlens_q, cu_seqlens_k, seed
    options = window_of_schema(window), bottom_right, softcap, float(dropout), cos, sin
    caches = kv_lengths, q_lengths, page_table, q_scale, k_scale, v_scale
    found = attention_lse(q, k, v, causal, scale, *arrays, *options, *caches, deterministic)
    return found if return_lse else found[0]


def _define_attention():
    schema = str(attention_lse.op._schema).partition("(")[2].partition(" -> ")[0]
    library = library_of("pallas_mgpu")
    library.define(f"attention({schema} -> Tensor")
    library.impl("attention", _attention, "CompositeImplicitAutograd")
    attention.op = torch.ops.pallas_mgpu.attention.default
    _MADE["attention"] = attention


_define_attention()


# ---- grouped and mixed products ------------------------------------------------------------------


def _ragged_fake(lhs, rhs, group_sizes, transpose_rhs=False, out_dtype=None):
    return _product(lhs, (lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), out_dtype)


def _ragged_setup(ctx, inputs, output):
    lhs, rhs, sizes, ctx.transposed, _ = inputs
    ctx.save_for_backward(lhs, rhs, sizes)


def _ragged_backward(ctx, grad):
    lhs, rhs, sizes = ctx.saved_tensors
    grad, dl, dr = grad.to(lhs.dtype), None, None
    if ctx.needs_input_grad[0]:
        dl = ragged_dot(grad, rhs, sizes, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (grad, lhs) if ctx.transposed else (lhs, grad)
        dr = transposed_ragged_dot(*pair, sizes)
    return dl, dr, None, None, None


@_operator(_ragged_fake, (_ragged_setup, _ragged_backward), ("lhs", "rhs"))
def ragged_dot(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    transpose_rhs: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return ops.ragged_dot(
        lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=_dtype(out_dtype)
    )


def _transposed_fake(lhs, rhs, group_sizes, out_dtype=None):
    shape = group_sizes.shape[0], lhs.shape[1], rhs.shape[1]
    return _product(lhs, shape, out_dtype)


def _transposed_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _transposed_backward(ctx, grad):
    lhs, rhs, sizes = ctx.saved_tensors
    grad, dl, dr = grad.to(lhs.dtype), None, None
    if ctx.needs_input_grad[0]:
        dl = ragged_dot(rhs, grad, sizes, True)
    if ctx.needs_input_grad[1]:
        dr = ragged_dot(lhs, grad, sizes)
    return dl, dr, None, None


@_operator(_transposed_fake, (_transposed_setup, _transposed_backward), ("lhs", "rhs"), sums=_yes)
def transposed_ragged_dot(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    return ops.transposed_ragged_dot(lhs, rhs, group_sizes, out_dtype=_dtype(out_dtype))


def _mixed_fake(x, weights, scales=None, out_dtype=None):
    return _product(x, (x.shape[0], weights.shape[0]), out_dtype)


def _mixed_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _mixed_backward(ctx, grad):
    x, weights, scales = ctx.saved_tensors
    grad, dx, ds = grad.to(x.dtype), None, None
    n, k = weights.shape
    groups = 1 if scales is None else scales.shape[0]
    if ctx.needs_input_grad[0]:
        w = weights.to(torch.float32)
        if scales is not None:
            factor = scales.to(torch.float32).t().unsqueeze(2)
            w = (w.view(n, groups, k // groups) * factor).view(n, k)
        dx = matmul(grad, w.to(x.dtype))
    if scales is not None and ctx.needs_input_grad[2]:
        dw = matmul(grad, x, out_dtype=torch.float32, transpose_a=True)
        ds = (dw * weights).view(n, groups, k // groups).sum(2).t().to(scales.dtype)
    return dx, None, ds, None


@_operator(_mixed_fake, (_mixed_setup, _mixed_backward), ("x",))
def mixed_matmul(
    x: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    options = _optional(scales=scales)
    return ops.mixed_matmul(x, weights, out_dtype=_dtype(out_dtype), **options)


# ---- what models need besides --------------------------------------------------------------------


def _gated_fake(gate, up=None, activation="silu", out_dtype=None):
    n = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    return gate.new_empty((*gate.shape[:-1], n), dtype=out_dtype or gate.dtype)


def _gated_setup(ctx, inputs, output):
    gate, up, ctx.activation, _ = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx, grad):
    gate, up = ctx.saved_tensors
    dgate, dup = gated_linear_unit_backward(grad, gate, up, ctx.activation)
    return dgate, None if up is None else dup, None, None


@_operator(_gated_fake, (_gated_setup, _gated_backward))
def gated_linear_unit(
    gate: Tensor,
    up: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    options = _optional(up=up)
    return ops.gated_linear_unit(
        gate, activation=activation, out_dtype=_dtype(out_dtype), **options
    )


def _gated_backward_fake(grad, gate, up=None, activation="silu"):
    return _like(gate), gate.new_empty((0,)) if up is None else _like(up)


@_operator(_gated_backward_fake)
def gated_linear_unit_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None = None, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    options = _optional(up=up)
    found = ops.gated_linear_unit_backward(grad, gate, activation=activation, **options)
    return (found, gate.new_empty((0,))) if up is None else found


def _gated_width(w, transpose_b, up):
    n = w.shape[0 if transpose_b else 1]
    return n // 2 if up is None else n


def _gated_matmul_fake(x, w, activation="silu", transpose_b=False, up=None):
    return x.new_empty((x.shape[0], _gated_width(w, transpose_b, up)))


def _gated_products_fake(x, w, activation="silu", transpose_b=False, up=None):
    m, n = x.shape[0], _gated_width(w, transpose_b, up)
    return x.new_empty((m, n)), x.new_empty((m, 2 * n))


def _gated_matmul_setup(ctx, inputs, output):
    x, w, ctx.activation, ctx.tb, up = inputs
    both = None
    if isinstance(output, tuple):
        both = output[1]
        _no_gradients(ctx, both)
    ctx.save_for_backward(x, w, up, both)


def _gated_matmul_backward(ctx, grad, *_):
    x, w, up, both = ctx.saved_tensors
    of_x, of_w = ctx.needs_input_grad[:2]
    of_up = up is not None and ctx.needs_input_grad[4]
    dx = dw = dup = None
    if both is None:  # the products are computed again
        both = _gated_both(x, w, up, ctx.tb)
    if of_x and up is None:
        dx, g = gated_matmul_backward(grad, both, w, ctx.activation, ctx.tb)
    else:
        g, _ = gated_linear_unit_backward(grad, both, None, ctx.activation)
    if of_x and up is not None:
        dx = gated_matmul_input_gradient(g, w, up, ctx.tb)
    if up is None and of_w:
        dw = matmul(*((g, x) if ctx.tb else (x, g)), transpose_a=True)
    elif of_w or of_up:
        dw, dup = gated_matmul_weight_gradients(x, g, ctx.tb, of_w, of_up)
    return dx, dw if of_w else None, None, None, dup if of_up else None


def _gated_both(x, w, up, transpose_b):
    if up is not None:
        return gated_matmul_products(x, w, "silu", transpose_b, up)[1]
    return matmul(x, w, transpose_b=transpose_b)


def _input_gradient_fake(grad, w, up, transpose_b=False):
    return grad.new_empty((grad.shape[0], w.shape[1 if transpose_b else 0]))


@_operator(_input_gradient_fake, sums=_yes)
def gated_matmul_input_gradient(
    grad: Tensor, w: Tensor, up: Tensor, transpose_b: bool = False
) -> Tensor:
    """The gradient of x for two weights, which are joined only where no kernel sums over both."""
    k, n = w.shape[::-1] if transpose_b else w.shape
    device = w.get_device() if w.is_cuda else None
    if _are_aligned(grad, w, up) and sums_two_weights(n, k, w.dtype, device):
        return input_gradient(grad, w, up, transpose_b=transpose_b)
    w = torch.cat([w, up], 0 if transpose_b else 1)
    return ops.matmul(grad, w, transpose_b=not transpose_b)


def _are_aligned(*tensors):
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _weight_gradients_fake(x, grad, transpose_b=False, of_w=True, of_up=True):
    k, n = x.shape[1], grad.shape[1] // 2
    shape = (n, k) if transpose_b else (k, n)
    return tuple(x.new_empty(shape if wanted else (0,)) for wanted in (of_w, of_up))


@_operator(_weight_gradients_fake, sums=_yes)
def gated_matmul_weight_gradients(
    x: Tensor, grad: Tensor, transpose_b: bool = False, of_w: bool = True, of_up: bool = True
) -> tuple[Tensor, Tensor]:
    """The gradients of two weights, as arrays of their own."""
    k, n, device = x.shape[1], grad.shape[1] // 2, x.get_device() if x.is_cuda else None
    at_once = _are_aligned(x, grad) and sums_two_weights(n, k, x.dtype, device)

    def one(up):
        if at_once:
            pair = (grad, x) if transpose_b else (x, grad)
            return weight_gradient(*pair, up=up, transpose_b=transpose_b)
        g = grad[:, n * up : n * (up + 1)].contiguous()
        return ops.matmul(*((g, x) if transpose_b else (x, g)), transpose_a=True)

    none = x.new_empty((0,))
    return one(False) if of_w else none, one(True) if of_up else none.clone()


def _gated_matmul_backward_fake(grad, products, w, activation="silu", transpose_b=False):
    k = w.shape[1 if transpose_b else 0]
    return grad.new_empty((grad.shape[0], k)), _like(products)


@_operator(_gated_matmul_backward_fake, sums=_yes)
def gated_matmul_backward(
    grad: Tensor,
    products: Tensor,
    w: Tensor,
    activation: str = "silu",
    transpose_b: bool = False,
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"activation": activation, "transpose_b": transpose_b}
    return ops.gated_matmul_backward(grad, products, w, **options)


@_operator(_gated_products_fake, (_gated_matmul_setup, _gated_matmul_backward), ("x", "w", "up"))
def gated_matmul_products(
    x: Tensor,
    w: Tensor,
    activation: str = "silu",
    transpose_b: bool = False,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"transpose_b": transpose_b, "return_products": True}
    return ops.gated_matmul(x, w, activation=activation, **options, **_optional(up=up))


@_operator(
    _gated_matmul_fake,
    (_gated_matmul_setup, _gated_matmul_backward),
    ("x", "w", "up"),
    "gated_matmul",
)
def _gated_alone(
    x: Tensor,
    w: Tensor,
    activation: str = "silu",
    transpose_b: bool = False,
    up: Tensor | None = None,
) -> Tensor:
    options: dict[str, Any] = {"transpose_b": transpose_b}
    return ops.gated_matmul(x, w, activation=activation, **options, **_optional(up=up))


def gated_matmul(x, w, activation="silu", transpose_b=False, up=None):
    """:func:`pallas_mgpu.ops.gated_matmul`. Where gradients are wanted the kernel also stores the
    products, instead of computing them again."""
    if any(_may_need_gradient(t) for t in (x, w, up) if t is not None):
        return gated_matmul_products(x, w, activation, transpose_b, up)[0]
    return _gated_alone(x, w, activation, transpose_b, up)


gated_matmul.op = _gated_alone.op  # type: ignore[attr-defined]
_MADE["gated_matmul"] = gated_matmul


def _gated_matmul_of_ops(x, w, up=None, *, activation="silu", transpose_b=False):
    return gated_matmul(x, w, activation, transpose_b, up)


def _rotary_fake(x, cos, sin, weight=None, inverse=False, eps=1e-6):
    return _like(x)


def _rotary_setup(ctx, inputs, output):
    x, cos, sin, weight, ctx.inverse, ctx.eps = inputs
    ctx.save_for_backward(cos, sin, weight, None if weight is None else x)


def _rotary_gradient(ctx, grad):
    cos, sin, weight, x = ctx.saved_tensors
    if weight is None:
        return rotary(grad, cos, sin, None, not ctx.inverse), *(None,) * 5
    dx, dw = rotary_backward(grad, x, cos, sin, weight, ctx.eps)
    return dx, None, None, dw, None, None


@_operator(_rotary_fake, (_rotary_setup, _rotary_gradient), views=True)
def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    inverse: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    return ops.rotary(x, cos, sin, inverse=inverse, eps=eps, **_optional(weight=weight))


@_operator(lambda grad, x, cos, sin, weight, eps=1e-6: (_like(x), _like(weight)))
def rotary_backward(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return ops.rotary_backward(grad, x, cos, sin, weight, eps=eps)


def _entropy_fake(logits, targets, ignore_index=-100):
    one = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    return one, torch.empty_like(one)


def _entropy_setup(ctx, inputs, output):
    logits, targets, ctx.ignore = inputs
    ctx.save_for_backward(logits, targets, output[1])
    _no_gradients(ctx, output[1])


def _entropy_backward(ctx, grad, _):
    logits, targets, lse = ctx.saved_tensors
    return cross_entropy_backward(grad, logits, targets, lse, ctx.ignore), None, None


@_operator(_entropy_fake, (_entropy_setup, _entropy_backward))
def cross_entropy_lse(
    logits: Tensor, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    return ops.cross_entropy(logits, targets.to(torch.int32), ignore_index=ignore_index)


@_operator(lambda grad, logits, targets, lse, ignore_index=-100: _like(logits))
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int = -100
) -> Tensor:
    targets = targets.to(torch.int32)
    return ops.cross_entropy_backward(grad, logits, targets, lse, ignore_index=ignore_index)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The losses of the rows of ``logits``: :func:`pallas_mgpu.ops.cross_entropy` without lse.
    ``targets`` may be int64."""
    return cross_entropy_lse(logits, targets, ignore_index)[0]


_LOGITS = 0.49 * 2**30  # bytes that exist at once
_ROUNDED = 5  # chunks whose gradients may be added up in 16 bits


def _linear_entropy_fake(x, weight, targets, ignore_index=-100, chunk=0, of_x=True, of_weight=True):
    none = x.new_empty((0,))
    dx, dw = _like(x) if of_x else none, _like(weight) if of_weight else none.clone()
    return x.new_empty((), dtype=torch.float32), dx, dw


def _linear_entropy_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1], output[2], inputs[0], inputs[1])
    _no_gradients(ctx, *output[1:])


def _linear_entropy_backward(ctx, grad, *_):
    dx, dw, x, weight = ctx.saved_tensors
    for name, found, needed in zip(("x", "weight"), (dx, dw), ctx.needs_input_grad):
        if needed and found.ndim < 2:
            raise NotImplementedError(
                f"pallas_mgpu::linear_cross_entropy_gradients computed no gradient by {name}: pass"
                f" of_{name}=True"
            )
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # it is recorded, too
        found = linear_cross_entropy_backward(grad, x, weight, dx, dw)
        found = (g if n else None for g, n in zip(found, ctx.needs_input_grad))
        return *found, *(None,) * 5
    dx = dx * grad.to(dx.dtype) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx, None, *(None,) * 5
    if type(dw) is not Tensor or torch.compiler.is_compiling():
        return dx, dw * grad.to(dw.dtype), *(None,) * 5
    # it is as large as the weight: not twice. A second backward of one loss is then an error.
    scale_in_place(dw, grad)
    return dx, dw, *(None,) * 5


@_operator(lambda grad, x, weight, dx, dw: (_like(dx), _like(dw)))
def linear_cross_entropy_backward(
    grad: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dw: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients for one of the loss. It has no gradient itself: x and weight are arguments so
    that second derivatives are refused."""
    return dx * grad.to(dx.dtype), dw * grad.to(dw.dtype)


@_operator(_linear_entropy_fake, (_linear_entropy_setup, _linear_entropy_backward), ("x", "weight"))
def linear_cross_entropy_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    chunk: int = 0,
    of_x: bool = True,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and its gradients by x and weight: all logits are never there at once."""
    _check_linear_entropy(x, weight, targets)
    targets = targets.to(torch.int32)
    counted = (targets != ignore_index).sum().clamp(min=1).to(torch.float32)
    n = x.shape[0]
    chunk = chunk or max(128, min(2048, int(_LOGITS / weight.shape[0] / 2) // 128 * 128))
    none = x.new_empty((0,))
    dx = torch.empty_like(x) if of_x else none
    dw = _WeightGradient(weight, -(-n // chunk)) if of_weight else None
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        rows, t = x[part], targets[part]
        logits = ops.matmul(rows, weight, transpose_b=True)
        losses, lse = ops.cross_entropy(logits, t, ignore_index=ignore_index)
        total += losses.sum()
        if not (of_x or of_weight):
            continue
        share = (1 / counted).expand(rows.shape[0]).contiguous()
        ops.cross_entropy_backward(share, logits, t, lse, ignore_index=ignore_index, out=logits)
        if of_x:
            ops.matmul(logits, weight, out=dx[part])
        if dw is not None:
            dw.add(logits, rows)
        del logits, losses, lse  # before the next ones are made
    return total / counted, dx, none.clone() if dw is None else dw.total.to(weight.dtype)


def _check_linear_entropy(x, weight, targets):
    """The rest is checked by what it is made of, but only if there are rows."""
    shapes = tuple(x.shape), tuple(weight.shape), tuple(targets.shape)
    if x.ndim != 2 or weight.ndim != 2 or targets.shape != x.shape[:1]:
        raise ValueError(
            "linear_cross_entropy: x, weight and targets must have the shapes (rows, K),"
            f" (classes, K) and (rows,), got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: the inner dims differ, {x.shape[1]} and {weight.shape[1]}: x"
            f" is {shapes[0]}, weight {shapes[1]}"
        )
    if x.dtype != weight.dtype:
        raise TypeError(
            f"linear_cross_entropy: x and weight must have one dtype, got {x.dtype} and"
            f" {weight.dtype}"
        )


class _WeightGradient:
    """The sum of products of chunks: of few in the weight's dtype, of many in float32."""

    def __init__(self, weight, chunks):
        self.chunks, dtype = chunks, weight.dtype if chunks <= _ROUNDED else torch.float32
        self.total = (torch.empty_like if chunks else torch.zeros_like)(weight, dtype=dtype)
        self.by_kernel = weight.shape[1] * self.total.element_size() % 16 == 0
        self.first = True

    def add(self, grads, rows):
        options = {"transpose_a": True, "out_dtype": _dtype(self.total.dtype)}
        if self.first:
            ops.matmul(grads, rows, out=self.total, **options)
        elif self.by_kernel:
            ops.matmul(grads, rows, out=self.total, accumulate=True, **options)
        else:
            self.total += ops.matmul(grads, rows, **options)
        self.first = False


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, chunk: int = 0
) -> Tensor:
    """The mean cross entropy of ``x @ weight.T`` (rows, classes), whose logits exist only for
    ``chunk`` rows at a time; by default up to 2048, whose logits take less than 0.5 GiB. x:
    (rows, K); weight: (classes, K); both float16 or bfloat16. The gradients are computed with the
    loss, so that backward only scales them, once for each loss. That of the weight is added up in
    its dtype over up to 5 chunks, and in float32 over more. Gradients of what requires none are
    not computed."""
    wanted = _may_need_gradient(x), _may_need_gradient(weight)
    return linear_cross_entropy_gradients(x, weight, targets, ignore_index, chunk, *wanted)[0]


# ---- 8-bit elements, the optimizer ---------------------------------------------------------------

_EIGHT_BITS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def _quantize_fake(x, dtype="float8_e4m3fn", block=None, mx=False):
    shape = x.shape[:-1]
    if block is not None:
        shape = *shape, -(-x.shape[-1] // block)
    kind = torch.float8_e8m0fnu if mx else torch.float32
    return torch.empty_like(x, dtype=_EIGHT_BITS[dtype]), x.new_empty(shape, dtype=kind)


@_operator(_quantize_fake)
def quantize(
    x: Tensor, dtype: str = "float8_e4m3fn", block: int | None = None, mx: bool = False
) -> tuple[Tensor, Tensor]:
    return ops.quantize(x, dtype=dtype, block=block, mx=mx)


@_operator(lambda q, s, block=None, out_dtype=torch.bfloat16: torch.empty_like(q, dtype=out_dtype))
def dequantize(
    q: Tensor, scales: Tensor, block: int | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return ops.dequantize(q, scales, block=block, out_dtype=_dtype(out_dtype))


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with a launch for up to 8 parameters of one shape. Moments are float32,
    parameters float16, bfloat16 or float32. Settings and numbers of steps lie on the device, so
    that steps can be captured in a CUDA graph."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        for what, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"AdamW: {what} must not be negative, got {value}")
        if not all(0 <= b < 1 for b in betas):
            raise ValueError(f"AdamW: betas must be from 0 and less than 1, got {betas}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def load_state_dict(self, state_dict):
        """As of ``torch.optim.Optimizer``, without its cast of what is kept to the dtypes of the
        parameters."""
        super().load_state_dict(state_dict)
        numbers = (k for group in state_dict["param_groups"] for k in group["params"])
        params = (p for group in self.param_groups for p in group["params"])
        for k, p in zip(numbers, params, strict=True):
            for name, x in state_dict["state"].get(k, {}).items():
                kept = x.to(p.device, torch.float32)
                self.state[p][name] = kept.clone() if kept is x else kept
        self.__dict__.pop("_launches", None)

    @torch.no_grad()
    def step(self, closure=None):
        """One step; ``closure`` computes the loss again, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        ids = [[id(p) for p in params] for params in groups]
        launches = self.__dict__.get("_launches")  # pickling drops it
        if launches is None or launches.ids != ids:
            launches = self._launches = _Launches(groups, ids, self.state)
        launches.step(self.param_groups)
        return loss


def _local(x):
    """The part of a DTensor that this process has; another tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def _check_parameter(p):
    if not _local(p).is_contiguous():
        raise ValueError("AdamW: a parameter is not contiguous")
    ways = [getattr(x, "placements", None) for x in (p, p.grad)]
    if ways[0] != ways[1]:
        raise ValueError(
            "AdamW: a parameter and its gradient are distributed in different ways,"
            f" {ways[0]} and {ways[1]}; redistribute the gradient"
        )


class _Launches:
    """Launches of AdamW for the parameters of groups that have gradients. The settings of all
    parameters on a device are rows of one table, so that one addition counts their steps."""

    def __init__(self, groups, ids, state):
        self.ids = ids
        self.given = [None] * len(groups)
        alike: dict = {}
        for number, params in enumerate(groups):
            for p in params:
                _check_parameter(p)
                key = p.device, number, _local(p).shape, p.dtype, p.grad.dtype
                alike.setdefault(key, []).append(p)
        devices = [key[0] for key, params in alike.items() for _ in params]
        self.tables = {d: torch.zeros(devices.count(d), 6, device=d) for d in {*devices}}
        rows = dict.fromkeys(self.tables, 0)
        # kernel (None: this process has no elements), (param, first, second) of each, settings,
        # number of the group
        self.launches = []
        for (device, number, shape, *dtypes), params in alike.items():
            kinds = tuple(map(_dtype, (*dtypes, torch.float32, torch.float32)))
            for start in range(0, len(params), _TENSORS_OF_A_LAUNCH):
                part = params[start : start + _TENSORS_OF_A_LAUNCH]
                settings = self.tables[device][rows[device] :][: len(part)]
                rows[device] += len(part)
                arrays = [(p, *self._moments(state[p], p, row)) for p, row in zip(part, settings)]
                problem = _AdamWProblem(tuple(shape), kinds, len(part))
                settings = settings if len(part) > 1 else settings[0]
                kernel = _adamw_kernel(problem, None) if shape.numel() else None
                self.launches.append((kernel, arrays, settings, number))

    @staticmethod
    def _moments(state, p, row):
        """Those of a parameter, whose settings become a row of the table."""
        if state:
            row.copy_(state["settings"])
        else:
            state["first"] = torch.zeros_like(p, dtype=torch.float32)
            state["second"] = torch.zeros_like(p, dtype=torch.float32)
        state["settings"] = row
        return _local(state["first"]), _local(state["second"])

    def step(self, groups):
        for number, g in enumerate(groups):
            given = [g["lr"], *g["betas"], g["eps"], g["weight_decay"]]
            if given == self.given[number]:
                continue
            self.given[number] = given
            new = {device: torch.tensor(given, device=device) for device in self.tables}
            for _, _, settings, of_group in self.launches:
                if of_group == number:
                    settings[..., :5] = new[settings.device]
        for table in self.tables.values():
            table[:, 5] += 1
        for kernel, arrays, settings, _ in self.launches:
            if kernel is None:
                continue
            grads = [_local(p.grad).contiguous() for p, _, _ in arrays]
            arrays = [(_local(p), m, v) for p, m, v in arrays]
            operands = [x for (p, m, v), g in zip(arrays, grads) for x in (p, g, m, v)]
            kernel(*operands, settings, out=tuple(x for of_one in arrays for x in of_one))


# ---- calls of `ops` ------------------------------------------------------------------------------

# options that change nothing of what a gradient is
_PROMISES = "deterministic", "batch_invariant"


def _of_family(name, family, operator):
    """What a call of a function of `ops` does instead, if a tensor needs the dispatcher."""
    known = inspect.signature(operator).parameters
    given = inspect.signature(family.maker.make).parameters.values()
    alone = {p.name: p.default for p in given if p.name not in known}
    alone |= {"out": None, "stream": None}

    def call(*args, **kwargs):
        for option in [k for k in kwargs if k in alone]:
            value, default = kwargs.pop(option), alone[option]
            plain = value is None or isinstance(value, (bool, int, float, str)) and value == default
            if option not in _PROMISES and not plain:
                raise NotImplementedError(
                    f"{name}: {option}= where autograd records, or with tensors without memory of"
                    " their own; call it under torch.no_grad()"
                )
        dtype = kwargs.get("out_dtype")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            kwargs["out_dtype"] = getattr(torch, np.dtype(dtype).name)
        if callable(kwargs.get("activation")):
            raise NotImplementedError(
                f"{name}: a function as activation has no gradient; use a name, or apply it after"
                " the product"
            )
        return operator(*args, **kwargs)

    return call


def _entropy_of_ops(logits, targets, ignore_index=-100):
    return cross_entropy_lse(logits, targets, ignore_index)


def register(made):
    """Calls of functions of `ops` that need the dispatcher become calls of these, by name."""
    for name, operator in made.items():
        _MADE[name] = operator
        if hasattr(ops, name):
            family = getattr(ops, name)
            OPERATORS[family] = _of_family(name, family, operator)


register(_MADE | {"cross_entropy": _entropy_of_ops, "gated_matmul": _gated_matmul_of_ops})
