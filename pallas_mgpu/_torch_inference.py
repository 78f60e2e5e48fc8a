"""Functions of `ops` for inference as operators of PyTorch: caches of keys and values, sampling,
results of 8 bits. None has a gradient. Functions that can return the logarithms of the sums, too,
are two operators, as `attention` and `attention_lse`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops as _ops
from ._torch import make_operator
from ._torch_ops import (
    _attention_options,
    _gated_fake,
    _operator,
    _optional,
    _quantize_fake,
    register,
    window_of_schema,
)

ops: Any = _ops  # its stubs know the arrays of libraries, not tensors alone


# ---- decoding ------------------------------------------------------------------------------------


def _lse_like(q):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _decode_fake(q, k, v, *rest):
    return q.new_empty((*q.shape[:3], v.shape[3])), _lse_like(q)


@_operator(_decode_fake)
def attention_decode_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    tree: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    arrays = _decode_arrays(kv_lengths, page_table, sinks, tree, k_scale, v_scale)
    options = _attention_options(scale, window, causal=causal, softcap=softcap)
    return ops.attention_decode(q, k, v, return_lse=True, **arrays, **options)


@_operator(lambda *args: _decode_fake(*args)[0], name="attention_decode")
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    tree: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    arrays = _decode_arrays(kv_lengths, page_table, sinks, tree, k_scale, v_scale)
    options = _attention_options(scale, window, causal=causal, softcap=softcap)
    return ops.attention_decode(q, k, v, **arrays, **options)


def _decode_arrays(kv_lengths, page_table, sinks, tree, k_scale, v_scale):
    return _optional(
        kv_lengths=kv_lengths,
        page_table=page_table,
        sinks=sinks,
        tree=tree,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def attention_decode(
    q,
    k,
    v,
    *,
    kv_lengths=None,
    page_table=None,
    sinks=None,
    tree=None,
    k_scale=None,
    v_scale=None,
    causal=False,
    window=None,
    softcap=None,
    scale=None,
    return_lse=False,
):
    """:func:`pallas_mgpu.ops.attention_decode`."""
    arrays = kv_lengths, page_table, sinks, tree, k_scale, v_scale
    f = attention_decode_lse if return_lse else _decode
    return f(q, k, v, *arrays, causal, window_of_schema(window), softcap, scale)


def _mla_fake(q, cache, kv_lengths=None, page_table=None, value_dim=512, *rest):
    return q.new_empty((*q.shape[:3], value_dim)), _lse_like(q)


@_operator(_mla_fake)
def mla_decode_lse(
    q: Tensor,
    cache: Tensor,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    arrays = _optional(kv_lengths=kv_lengths, page_table=page_table)
    options = {"value_dim": value_dim, "causal": causal, "scale": scale}
    return ops.mla_decode(q, cache, return_lse=True, **arrays, **options)


@_operator(lambda *args: _mla_fake(*args)[0], name="mla_decode")
def _mla(
    q: Tensor,
    cache: Tensor,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    arrays = _optional(kv_lengths=kv_lengths, page_table=page_table)
    return ops.mla_decode(q, cache, value_dim=value_dim, causal=causal, scale=scale, **arrays)


def mla_decode(
    q,
    cache,
    *,
    kv_lengths=None,
    page_table=None,
    value_dim=512,
    causal=False,
    scale=None,
    return_lse=False,
):
    """:func:`pallas_mgpu.ops.mla_decode`."""
    f = mla_decode_lse if return_lse else _mla
    return f(q, cache, kv_lengths, page_table, value_dim, causal, scale)


def _merge_fake(o, lse):
    return o.new_empty(o.shape[1:]), lse.new_empty(lse.shape[1:])


@_operator(_merge_fake)
def merge_attention_lse(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return ops.merge_attention(o, lse, return_lse=True)


@_operator(lambda o, lse: _merge_fake(o, lse)[0], name="merge_attention")
def _merge(o: Tensor, lse: Tensor) -> Tensor:
    return ops.merge_attention(o, lse)


def merge_attention(o, lse, *, return_lse=False):
    """:func:`pallas_mgpu.ops.merge_attention`."""
    return merge_attention_lse(o, lse) if return_lse else _merge(o, lse)


def _append(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    options = _optional(cos=cos, sin=sin, k_scale=k_scale, v_scale=v_scale)
    ops.append_pages(k_pages, v_pages, k, v, page_table, lengths, **options)


_append_operator = make_operator(
    _append, "pallas_mgpu::append_pages", ("k_pages", "v_pages"), None, lambda *args: None
)


def append_pages(
    k_pages,
    v_pages,
    k,
    v,
    page_table,
    lengths,
    *,
    cos=None,
    sin=None,
    k_scale=None,
    v_scale=None,
):
    """:func:`pallas_mgpu.ops.append_pages`: writes to ``k_pages`` and ``v_pages``, and returns
    them."""
    _append_operator(k_pages, v_pages, k, v, page_table, lengths, cos, sin, k_scale, v_scale)
    return k_pages, v_pages


# ---- sampling ------------------------------------------------------------------------------------


@_operator(
    lambda logits, *rest: logits.new_empty(logits.shape[:1], dtype=torch.int32), name="sample"
)
def _sample(
    logits: Tensor,
    seed: Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    top_k_of_rows: Tensor | None = None,
    top_p_of_rows: Tensor | None = None,
    temperature_of_rows: Tensor | None = None,
) -> Tensor:
    return ops.sample(
        logits,
        seed,
        top_k=top_k if top_k_of_rows is None else top_k_of_rows,
        top_p=top_p if top_p_of_rows is None else top_p_of_rows,
        temperature=temperature if temperature_of_rows is None else temperature_of_rows,
    )


def sample(logits, seed, *, top_k=None, top_p=None, temperature=1.0):
    """:func:`pallas_mgpu.ops.sample`. The operator has two parameters for each of the last three: a
    number, and a tensor for the rows."""
    options = {}
    given = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    for name, value in given.items():
        if isinstance(value, Tensor):
            options[f"{name}_of_rows"] = value
        else:
            options[name] = value
    return _sample(logits, seed, **options)


# ---- results of 8 bits, the optimizer ------------------------------------------------------------


def _rms_quantize_fake(x, weight=None, eps=1e-6, dtype="float8_e4m3fn", block=None, mx=False):
    return _quantize_fake(x, dtype, block, mx)


@_operator(_rms_quantize_fake)
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: str = "float8_e4m3fn",
    block: int | None = None,
    mx: bool = False,
) -> tuple[Tensor, Tensor]:
    options = {"dtype": dtype, "block": block, "mx": mx}
    return ops.rms_norm_quantize(x, eps=eps, **_optional(weight=weight), **options)


def _gated_quantize_fake(
    gate, up=None, activation="silu", dtype="float8_e4m3fn", block=None, mx=False
):
    return _quantize_fake(_gated_fake(gate, up), dtype, block, mx)


@_operator(_gated_quantize_fake)
def gated_linear_unit_quantize(
    gate: Tensor,
    up: Tensor | None = None,
    activation: str = "silu",
    dtype: str = "float8_e4m3fn",
    block: int | None = None,
    mx: bool = False,
) -> tuple[Tensor, Tensor]:
    options = {"activation": activation, "dtype": dtype, "block": block, "mx": mx}
    return ops.gated_linear_unit_quantize(gate, **_optional(up=up), **options)


def _adamw_fake(param, grad, first, second, settings):
    return tuple(torch.empty_like(x) for x in (param, first, second))


@_operator(_adamw_fake)
def adamw(
    param: Tensor, grad: Tensor, first: Tensor, second: Tensor, settings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.adamw(param, grad, first, second, settings)


for _call, _made in (
    (attention_decode, _decode),
    (mla_decode, _mla),
    (merge_attention, _merge),
    (append_pages, _append_operator),
    (sample, _sample),
):
    _call.op = _made.op  # type: ignore[union-attr]

register(
    {
        "adamw": adamw,
        "append_pages": append_pages,
        "attention_decode": attention_decode,
        "gated_linear_unit_quantize": gated_linear_unit_quantize,
        "merge_attention": merge_attention,
        "mla_decode": mla_decode,
        "rms_norm_quantize": rms_norm_quantize,
        "sample": sample,
    }
)
