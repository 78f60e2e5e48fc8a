"""The functions of :mod:`pallas_mgpu.ops` with derivatives, for JAX.

Kernels and the functions of `ops` can be called inside ``jax.jit`` as they are. Those of this
module have derivatives for reverse mode, too (``jax.grad``, ``jax.vjp``); they take the same
arguments, except ``out``, ``config``, ``stream`` and ``interpret``. docs/frameworks.md has more."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import ops
from ._jax import TARGET, call_eager, call_special, varying  # noqa: F401
from .ops.gated_matmul import input_gradient, sums_two_weights, weight_gradient

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "column_sums",
    "cross_entropy",
    "gated_linear_unit",
    "gated_matmul",
    "layer_norm",
    "matmul",
    "mixed_matmul",
    "ragged_dot",
    "rms_norm",
    "rotary",
    "softmax",
    "transposed_ragged_dot",
]


def __dir__():
    return sorted(__all__)


def _differentiable(forward, backward, alone=None):
    """f(options, *arrays) with forward(options, *arrays) -> (result, saved) and
    backward(options, saved, grad) -> a gradient or None for each array. alone: the result where
    nothing is saved."""
    alone = alone or (lambda options, *arrays: forward(options, *arrays)[0])

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(options, *arrays):
        return alone(dict(options), *arrays)

    f.defvjp(
        lambda options, *arrays: forward(dict(options), *arrays),
        lambda options, saved, grad: backward(dict(options), saved, grad),
    )
    return lambda options, *arrays: f(options, *_vary_alike(arrays))


def _vary_alike(arrays):
    """Under shard_map: arrays that all differ between devices along the axes along which one does,
    as their gradients do. JAX then adds up the gradients of what was the same on all devices."""
    of_each = [None if x is None else varying(jax.typeof(x)) for x in arrays]
    axes = frozenset().union(*(v for v in of_each if v is not None))
    return [
        x if v is None or v == axes else jax.lax.pcast(x, tuple(axes - v), to="varying")
        for x, v in zip(arrays, of_each)
    ]


@jax.tree_util.register_static
class _Type(NamedTuple):
    """Shape and dtype of an array that is not saved."""

    shape: tuple
    dtype: object

    @classmethod
    def of(cls, x):
        return cls(x.shape, x.dtype)


def _options(**options):
    return tuple(options.items())


def _given(**arrays):
    return {k: v for k, v in arrays.items() if v is not None}


# ---- matmul --------------------------------------------------------------------------------------

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
}


def _matmul_forward(options, a, b, bias, scale_a, scale_b):
    arrays = _given(bias=bias, scale_a=scale_a, scale_b=scale_b)
    return ops.matmul(a, b, **arrays, **options), (a, b, bias)


def _matmul_backward(options, saved, grad):
    a, b, bias = saved
    dbias = []
    ta, tb, activation = (options[k] for k in ("transpose_a", "transpose_b", "activation"))
    if a.dtype.itemsize == 1:
        raise NotImplementedError("pallas_mgpu.jax.matmul has no gradient for 8-bit floats")
    if activation is not None:  # the product is computed again
        if activation not in _ACTIVATIONS:
            raise NotImplementedError(
                "pallas_mgpu.jax.matmul: a function as activation has no gradient; apply it after"
                " the product"
            )
        again = {"transpose_a": ta, "transpose_b": tb, "out_dtype": "float32"}
        z = ops.matmul(a, b, **_given(bias=bias), **again)
        options = {"activation": activation, "bias": bias is not None}
        grad = ops.activation_backward(grad, z, **options, **_dtype_of(bias))
        grad, *dbias = grad if bias is not None else (grad,)
    elif bias is not None:
        dbias = [ops.column_sums(grad, **_dtype_of(bias))]
    g = grad.astype(a.dtype)
    if ta:
        da = ops.matmul(b, g, transpose_a=tb, transpose_b=True)
    else:
        da = ops.matmul(g, b, transpose_b=not tb)
    if tb:
        db = ops.matmul(g, a, transpose_a=True, transpose_b=ta)
    else:
        db = ops.matmul(a, g, transpose_a=not ta)
    return _over_batches(da, a), _over_batches(db, b), dbias[0] if dbias else None, None, None


def _dtype_of(bias):
    return {} if bias is None else {"out_dtype": bias.dtype.name}


def _over_batches(grad, x):
    """The gradient of x, which a batch may share."""
    more = grad.ndim - x.ndim
    axes = [i for i, n in enumerate(grad.shape) if i < more or n != x.shape[i - more]]
    return grad.sum(axes, dtype=jnp.float32).astype(x.dtype).reshape(x.shape) if axes else grad


_matmul = _differentiable(_matmul_forward, _matmul_backward)


def matmul(a, b, *, bias=None, activation=None, out_dtype=None, transpose_a=False,
           transpose_b=False, scale_a=None, scale_b=None, batch_invariant=False):  # fmt: skip
    """:func:`pallas_mgpu.ops.matmul` with gradients by ``a``, ``b`` and ``bias``."""
    options = _options(
        activation=activation,
        out_dtype=out_dtype,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        batch_invariant=batch_invariant,
    )
    return _matmul(options, a, b, bias, scale_a, scale_b)


_column_sums = _differentiable(
    lambda options, x: (ops.column_sums(x, **options), _Type.of(x)),
    lambda options, x, grad: (jnp.broadcast_to(grad.astype(x.dtype), x.shape),),
)


def column_sums(x, *, out_dtype=None):
    """:func:`pallas_mgpu.ops.column_sums` with its gradient."""
    return _column_sums(_options(out_dtype=out_dtype), x)


# ---- norms ---------------------------------------------------------------------------------------


def _softmax_forward(options, x):
    y = ops.softmax(x, **options)
    return y, (y, _Type.of(x))


def _softmax_backward(options, saved, grad):
    y, x = saved
    return (ops.softmax_backward(grad, y, axis=options["axis"]).astype(x.dtype),)


_softmax = _differentiable(_softmax_forward, _softmax_backward)


def softmax(x, *, axis=-1, out_dtype=None, batch_invariant=False):
    """:func:`pallas_mgpu.ops.softmax` with its gradient."""
    options = _options(axis=axis, out_dtype=out_dtype, batch_invariant=batch_invariant)
    return _softmax(options, x)


def _rms_backward(options, saved, grad):
    x, weight = saved
    found = ops.rms_norm_backward(grad, x, eps=options["eps"], **_given(weight=weight))
    return (found, None) if weight is None else found


_rms_norm = _differentiable(
    lambda options, x, weight: (ops.rms_norm(x, **_given(weight=weight), **options), (x, weight)),
    _rms_backward,
)


def rms_norm(x, weight=None, *, eps=1e-6, out_dtype=None, batch_invariant=False):
    """:func:`pallas_mgpu.ops.rms_norm` with gradients by ``x`` and ``weight``."""
    options = _options(eps=eps, out_dtype=out_dtype, batch_invariant=batch_invariant)
    return _rms_norm(options, x, weight)


def _layer_forward(options, x, weight, bias):
    given = _given(weight=weight, bias=bias)
    return ops.layer_norm(x, **given, **options), (x, weight, bias)


def _layer_backward(options, saved, grad):
    x, weight, bias = saved
    found = ops.layer_norm_backward(
        grad, x, bias=bias is not None, eps=options["eps"], **_given(weight=weight)
    )
    found = list(found) if isinstance(found, tuple) else [found]
    if weight is None:
        found.insert(1, None)
    return *found[:2], None if bias is None else found[2].astype(bias.dtype)


_layer_norm = _differentiable(_layer_forward, _layer_backward)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, out_dtype=None, batch_invariant=False):
    """:func:`pallas_mgpu.ops.layer_norm` with gradients by ``x``, ``weight`` and ``bias``."""
    options = _options(eps=eps, out_dtype=out_dtype, batch_invariant=batch_invariant)
    return _layer_norm(options, x, weight, bias)


def _add_rms_forward(options, x, residual, weight):
    y, total = ops.add_rms_norm(x, residual, **_given(weight=weight), **options)
    return (y, total), (total, weight)


def _add_rms_backward(options, saved, grads):
    total, weight = saved
    given = _given(weight=weight)
    found = ops.rms_norm_backward(grads[0], total, **given, add=grads[1], **options)
    dx, dw = (found, None) if weight is None else found
    return dx, dx, dw


_add_rms_norm = _differentiable(_add_rms_forward, _add_rms_backward)


def add_rms_norm(x, residual, weight=None, *, eps=1e-6):
    """:func:`pallas_mgpu.ops.add_rms_norm` with gradients by ``x``, ``residual`` and ``weight``."""
    return _add_rms_norm(_options(eps=eps), x, residual, weight)


def _add_layer_forward(options, x, residual, weight, bias):
    given = _given(weight=weight, bias=bias)
    y, total = ops.add_layer_norm(x, residual, **given, **options)
    return (y, total), (total, weight, bias)


def _add_layer_backward(options, saved, grads):
    total, weight, bias = saved
    given = _given(weight=weight)
    wanted = {"add": grads[1], "bias": bias is not None}
    found = ops.layer_norm_backward(grads[0], total, **given, **wanted, **options)
    dx, *rest = found if isinstance(found, tuple) else (found,)
    dw = None if weight is None else rest.pop(0)
    return dx, dx, dw, rest[0].astype(bias.dtype) if rest else None


_add_layer_norm = _differentiable(_add_layer_forward, _add_layer_backward)


def add_layer_norm(x, residual, weight=None, bias=None, *, eps=1e-5):
    """:func:`pallas_mgpu.ops.add_layer_norm` with gradients by all arrays."""
    return _add_layer_norm(_options(eps=eps), x, residual, weight, bias)


# ---- attention -----------------------------------------------------------------------------------


def _attention_arrays(bias, starts_q, starts_k, seed, cos, sin):
    arrays = {"bias": bias, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "seed": seed}
    return _given(**arrays, cos=cos, sin=sin)


def _attention_forward(options, q, k, v, *arrays):
    given = _attention_arrays(*arrays)
    o, lse = ops.attention(q, k, v, return_lse=True, **given, **options)
    return (o, lse), (q, k, v, o, lse, arrays)


def _attention_backward(options, saved, grads):
    *saved, arrays = saved
    given = _attention_arrays(*arrays)
    options = options | {"bias_gradient": "bias" in given}
    dq, dk, dv, *dbias = ops.attention_backward(grads[0], *saved, **given, **options)
    return dq, dk, dv, dbias[0] if dbias else None, *(None,) * 5


_attention = _differentiable(_attention_forward, _attention_backward)


def attention(q, k, v, *, bias=None, cu_seqlens_q=None, cu_seqlens_k=None, seed=None, cos=None,
              sin=None, causal=False, window=None, bottom_right=False, softcap=None, dropout=0.0,
              scale=None, return_lse=False, deterministic=False):  # fmt: skip
    """:func:`pallas_mgpu.ops.attention` with gradients by ``q``, ``k``, ``v`` and ``bias``, which
    repeat bit for bit with ``deterministic``. The logarithm of the sums, with ``return_lse``, is a
    constant for derivatives."""
    options = _options(
        deterministic=deterministic,
        causal=causal,
        window=window,
        bottom_right=bottom_right,
        softcap=softcap,
        dropout=dropout,
        scale=scale,
    )
    o, lse = _attention(options, q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seed, cos, sin)
    return (o, jax.lax.stop_gradient(lse)) if return_lse else o


# ---- grouped and mixed products ------------------------------------------------------------------


def _ragged_forward(options, lhs, rhs, sizes):
    return ops.ragged_dot(lhs, rhs, sizes, **options), (lhs, rhs, sizes)


def _ragged_backward(options, saved, grad):
    lhs, rhs, sizes = saved
    grad, transposed = grad.astype(lhs.dtype), options["transpose_rhs"]
    dl = ops.ragged_dot(grad, rhs, sizes, transpose_rhs=not transposed)
    pair = (grad, lhs) if transposed else (lhs, grad)
    return dl, ops.transposed_ragged_dot(*pair, sizes), None


_ragged_dot = _differentiable(_ragged_forward, _ragged_backward)


def ragged_dot(lhs, rhs, group_sizes, *, transpose_rhs=False, out_dtype=None):
    """:func:`pallas_mgpu.ops.ragged_dot` with gradients by ``lhs`` and ``rhs``."""
    options = _options(transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return _ragged_dot(options, lhs, rhs, group_sizes)


def _transposed_forward(options, lhs, rhs, sizes):
    return ops.transposed_ragged_dot(lhs, rhs, sizes, **options), (lhs, rhs, sizes)


def _transposed_backward(options, saved, grad):
    lhs, rhs, sizes = saved
    grad = grad.astype(lhs.dtype)
    dl = ops.ragged_dot(rhs, grad, sizes, transpose_rhs=True)
    return dl, ops.ragged_dot(lhs, grad, sizes), None


_transposed_ragged_dot = _differentiable(_transposed_forward, _transposed_backward)


def transposed_ragged_dot(lhs, rhs, group_sizes, *, out_dtype=None):
    """:func:`pallas_mgpu.ops.transposed_ragged_dot` with gradients by ``lhs`` and ``rhs``."""
    return _transposed_ragged_dot(_options(out_dtype=out_dtype), lhs, rhs, group_sizes)


def _mixed_forward(options, x, weights, scales):
    return ops.mixed_matmul(x, weights, **_given(scales=scales), **options), (x, weights, scales)


def _mixed_backward(options, saved, grad):
    x, weights, scales = saved
    grad = grad.astype(x.dtype)
    n, k = weights.shape
    groups = 1 if scales is None else scales.shape[0]
    w = weights.astype(jnp.float32).reshape(n, groups, k // groups)
    ds = None
    if scales is not None:
        dw = ops.matmul(grad, x, out_dtype="float32", transpose_a=True)
        ds = (dw.reshape(w.shape) * w).sum(2).T.astype(scales.dtype)
        w = w * scales.astype(jnp.float32).T[:, :, None]
    return ops.matmul(grad, w.reshape(n, k).astype(x.dtype)), None, ds


_mixed_matmul = _differentiable(_mixed_forward, _mixed_backward)


def mixed_matmul(x, weights, scales=None, *, out_dtype=None):
    """:func:`pallas_mgpu.ops.mixed_matmul` with gradients by ``x`` and ``scales``."""
    return _mixed_matmul(_options(out_dtype=out_dtype), x, weights, scales)


# ---- what models need besides --------------------------------------------------------------------


def _gated_forward(options, gate, up):
    return ops.gated_linear_unit(gate, **_given(up=up), **options), (gate, up)


def _gated_backward(options, saved, grad):
    gate, up = saved
    activation = options["activation"]
    found = ops.gated_linear_unit_backward(grad, gate, **_given(up=up), activation=activation)
    return (found, None) if up is None else found


_gated_linear_unit = _differentiable(_gated_forward, _gated_backward)


def gated_linear_unit(gate, up=None, *, activation="silu", out_dtype=None):
    """:func:`pallas_mgpu.ops.gated_linear_unit` with gradients by ``gate`` and ``up``."""
    return _gated_linear_unit(_options(activation=activation, out_dtype=out_dtype), gate, up)


def _gated_matmul_forward(options, x, w, up):
    y, both = ops.gated_matmul(x, w, **_given(up=up), return_products=True, **options)
    return y, (x, w, up, both)


def _gated_matmul_backward(options, saved, grad):
    x, w, up, both = saved
    transposed = options["transpose_b"]
    along = 0 if transposed else 1
    if up is not None and sums_two_weights(w.shape[along], x.shape[1], w.dtype, None):
        g = ops.gated_linear_unit_backward(grad, both, activation=options["activation"])
        dx = input_gradient(g, w, up, transpose_b=transposed)
        pair = (g, x) if transposed else (x, g)
        of = functools.partial(weight_gradient, *pair, transpose_b=transposed)
        return dx, of(), of(up=True)
    w = w if up is None else jnp.concatenate([w, up], along)
    dx, g = ops.gated_matmul_backward(grad, both, w, **options)
    dw = ops.matmul(*((g, x) if transposed else (x, g)), transpose_a=True)
    return (dx, dw, None) if up is None else (dx, *jnp.split(dw, 2, along))


_gated_matmul = _differentiable(
    _gated_matmul_forward,
    _gated_matmul_backward,
    lambda options, x, w, up: ops.gated_matmul(x, w, **_given(up=up), **options),
)


def gated_matmul(x, w, up=None, *, activation="silu", transpose_b=False):
    """:func:`pallas_mgpu.ops.gated_matmul` with gradients by ``x``, ``w`` and ``up``."""
    return _gated_matmul(_options(activation=activation, transpose_b=transpose_b), x, w, up)


def _rotary_forward(options, x, cos, sin, weight):
    kept = x if weight is not None else None
    return ops.rotary(x, cos, sin, **_given(weight=weight), **options), (kept, cos, sin, weight)


def _rotary_backward(options, saved, grad):
    x, *angles, weight = saved
    if weight is None:
        return ops.rotary(grad, *angles, inverse=not options["inverse"]), None, None, None
    dx, dw = ops.rotary_backward(grad, x, *angles, weight, eps=options["eps"])
    return dx, None, None, dw


_rotary = _differentiable(_rotary_forward, _rotary_backward)


def rotary(x, cos, sin, weight=None, *, inverse=False, eps=1e-6):
    """:func:`pallas_mgpu.ops.rotary` with gradients by ``x`` and ``weight``; the angles are
    constants."""
    return _rotary(_options(inverse=inverse, eps=eps), x, cos, sin, weight)


def _entropy_forward(options, logits, targets):
    losses, lse = ops.cross_entropy(logits, targets, **options)
    return losses, (logits, targets, lse)


def _entropy_backward(options, saved, grad):
    return ops.cross_entropy_backward(grad, *saved, **options), None


_cross_entropy = _differentiable(_entropy_forward, _entropy_backward)


def cross_entropy(logits, targets, *, ignore_index=-100):
    """The losses of :func:`pallas_mgpu.ops.cross_entropy`, with the gradient by ``logits``."""
    return _cross_entropy(_options(ignore_index=ignore_index), logits, targets)
