"""Gradients of attention.

With the scores S = scale Q K^T, the probabilities P = exp(S - lse) and delta = sum(dO * O) of each
query,

    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = scale dS K    dK = scale dS^T Q

Two or three kernels. The first one computes delta. With five products the second one computes dK
and dV for a tile of keys, and adds its part to dQ, which its last blocks convert
(`_attention_backward_fused.py`). With seven products (`_attention_backward_seven.py`) the third one
computes dQ for a tile of queries, and S and dP again: dQ needs no atomics, and results repeat bit
for bit. Registers do not hold dK and dV of rows of 256 elements, so that the second kernel then
runs once for each of them. On Blackwell five products are the default up to a head_dim of 128
(`_attention_backward_tensor_memory.py`), seven are for longer rows and deterministic results
(`_attention_backward_tensor_memory_seven.py`). The gradient of a bias is that of the scores, summed
along the dims that the bias lacks: a kernel of its own (`_attention_backward_bias.py`).

There are kernels for some head_dims. For others, and for values of another width, q, k, v, o and dO
get columns of zeros, from which nothing but zeros comes (`_Padded`)."""

import functools
import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import pl
from pallas_mgpu._batch import Batched

from . import (
    _attention_backward_bias,
    _attention_backward_fused,
    _attention_backward_tensor_memory,
    _attention_backward_tensor_memory_seven,
    _attention_open,
    _attention_rotary,
    _attention_scores,
    _tensor_memory,
    _warp_mma,
)
from ._attention_backward_fused import FusedKernels
from ._attention_backward_seven import (
    MOST_LENGTH,
    ROWS,
    beside,
    kernel,
    of_any_batch,
    statistics,
    with_views,
)
from ._attention_backward_tensor_memory import TensorMemoryBackwardConfig
from ._common import SeveralKernels
from ._open_rows import better, sizes_of, together
from ._padding import cropping, of_any_rows, padding
from .attention import _check

_F32 = np.float32
# Of sizes that have programs of their own, three or four each. With a bias some of the shared ones
# are for even numbers of keys, others for odd ones; packed sequences and
# angles have two more.
_WEIGHT, _OF_MANY = 1.5, 3
_MOST = _attention_backward_tensor_memory_seven.MOST  # the largest head_dim


class AttentionBackwardConfig(typing.NamedTuple):
    """How the gradients of attention are computed.

    ``products``: 7, results repeat bit for bit; or 5, dQ is added up in float32 by atomic copies
    (head_dim 64, or 128 without softcap, bias and dropout). ``stages``, for five products: slots of
    the ring, up to 3; 0: 3, and 2 of a head_dim of 128 where each query sees each key."""

    products: int = 7
    stages: int = 0


class _Keys(SeveralKernels):
    """dK and dV by two kernels, where registers or tensor memory do not hold both."""

    def __init__(self, dk, dv):
        self.dk, self.dv = dk, dv

    def __call__(self, *operands, out=None, stream=None):
        dk, dv = out or (None, None)
        dk = self.dk(*operands, out=dk, stream=stream)
        return dk, self.dv(*operands, out=dv, stream=stream)


class Gradients(SeveralKernels):
    """All kernels. The result is (dq, dk, dv), and the gradient of the bias if it is wanted."""

    def __init__(self, x, config, bias_dtype, interpret, deterministic, sms, given=None):
        """sms, given: as of `FusedKernels`."""
        self.is_open = x.is_open
        if x.is_open:
            how = config, bias_dtype, interpret, deterministic, sms
            self.alone = functools.cache(lambda: Gradients(given, *how))
        self.fused, self.on_blackwell = None, isinstance(config, TensorMemoryBackwardConfig)
        self.rotations = _attention_rotary.Gradients(given or x, self.on_blackwell, interpret)
        x = x._replace(angles=0) if self.on_blackwell else x
        repeats = deterministic or x.dim > _attention_backward_tensor_memory.MOST
        if self.on_blackwell and repeats:
            of = _attention_backward_tensor_memory_seven

            def kernel_of(*sums):
                return of.kernel(x, sums, interpret)

            self.statistics = statistics(x, interpret)
            if of.splits(x):
                self.by_keys = _Keys(kernel_of("dk"), kernel_of("dv"))
            else:
                self.by_keys = kernel_of("dk", "dv")
            self.by_queries = kernel_of("dq")
        elif self.on_blackwell:
            of = _attention_backward_tensor_memory
            make = functools.partial(of.kernel, x, config, interpret)
            self.fused = FusedKernels(x, make, interpret)
        elif config.products == 5:
            of = _attention_backward_fused
            make = functools.partial(of.kernel, x, config, interpret)
            apart = x.is_open or pl.cdiv(x.keys, ROWS) * x.kv_heads * x.batch <= sms
            self.fused = FusedKernels(x, make, interpret, 0 if apart else sms, given)
        else:
            seen, y = functools.partial(with_views, given, x), beside(x)
            of_stats = ("q", "q", "lse", "k"), (None, None)
            self.statistics = with_views(given, y, statistics(y, interpret), *of_stats)
            operands = "q", "q", "k", "k", None, None, *x.kernel_operands
            if x.dim == 256:
                pair = (kernel(x, True, interpret, (n,)) for n in ("dk", "dv"))
                self.by_keys = _Keys(*(seen(one, operands, ("k",)) for one in pair))
            else:
                self.by_keys = seen(kernel(x, True, interpret), operands, ("k", "k"))
            y = _attention_open.with_pairs(x, given)
            self.by_queries = with_views(given, y, kernel(y, False, interpret), operands, ("q",))
        self.names, self.bias, self.ranges = x.scores.operands, None, None
        if x.scores.sequences:
            self.ranges = [
                _attention_scores.lookup_of(x, by_keys, interpret) for by_keys in (True, False)
            ]
        if bias_dtype is not None:
            how = bias_dtype, interpret, self.on_blackwell
            y = _attention_open.with_pairs(x._replace(angles=0), given)
            found = _attention_backward_bias.bias_gradient(y, *how)
            operands = "q", "q", "k", "k", None, None, *x.scores.kernel_operands
            self.bias = with_views(given, y, found, operands, ("bias",))

    def __call__(self, grad, q, k, v, o, lse, *others, out=None, stream=None):
        arrays = grad, q, k, v, o, lse, *others
        if self.is_open and any(isinstance(x, Batched) for x in arrays):  # they have no views
            return self.alone()(*arrays, out=out, stream=stream)
        dq, dk, dv, *dbias = (None,) * 4 if out is None else out
        named = dict(zip(self.names, others))
        rest = [named[n] for n in ("bias", "seed") if n in named]
        q, k, angles, finish = self.rotations(q, k, others, stream)
        of_keys = of_queries = ()
        if self.ranges:
            cu_q, cu_k = named["cu_seqlens_q"], named["cu_seqlens_k"]
            like = (q, k) if self.is_open else ()
            of_keys = self.ranges[0](cu_k, cu_q, *like, stream=stream)
            of_queries = self.ranges[1](cu_q, cu_k, *like, stream=stream)
        if self.fused:
            three = None if dq is None else (dq, dk, dv)
            ranges = (*of_keys, *of_queries) if self.on_blackwell else of_keys
            *found, lse, delta = self.fused(
                grad, q, k, v, o, lse, (*rest, *ranges), angles, out=three, stream=stream
            )
            operands = grad, q, k, v, lse, delta
        else:
            like = [k] * self.is_open
            lse, delta = self.statistics(grad, o, lse, *like, stream=stream)
            operands = grad, q, k, v, lse, delta
            pair = None if dk is None else (dk, dv)
            more = *rest, *of_keys, *angles
            dk, dv = self.by_keys(*operands, *more, out=pair, stream=stream)
            more = *rest, *of_queries, *angles
            found = self.by_queries(*operands, *more, out=dq, stream=stream), dk, dv
        found = finish(*found)
        if self.bias is None:
            return found
        dbias = dbias[0] if dbias else None
        return *found, self.bias(*operands, *rest, *of_queries, out=dbias, stream=stream)


class _Padded(SeveralKernels):
    """The gradients of operands of other widths, by wider copies. pads: the kernels that copy grad,
    q, k, v and o (None: it is wide enough); crops: those that take the columns of dq, dk and dv."""

    def __init__(self, gradients, pads, crops):
        self.gradients, self.pads, self.crops = gradients, pads, crops

    def __call__(self, *operands, out=None, stream=None):
        into = out or (None,) * 4
        of_bias = (None, None, None, into[3]) if len(into) == 4 and into[3] is not None else None
        wide = [x if pad is None else pad(x, stream=stream) for x, pad in zip(operands, self.pads)]
        found = self.gradients(*wide, *operands[5:], out=of_bias, stream=stream)
        three = [crop(x, out=to, stream=stream) for crop, x, to in zip(self.crops, found, into)]
        return *three, *found[3:]


def _width(dim, value_dim, on_blackwell):
    """The head_dim of the kernels for rows of q and k, and of v; 0: there are none."""
    most = max(dim, value_dim)
    if on_blackwell:
        return most if most % 8 == 0 and most <= _MOST else 0
    return next((width for width in (64, 128, 256) if most <= width), 0)


def _copying(make, shape, cols, device, *how):
    """Copies to rows of other widths."""
    with together(False):  # which takes no longer
        return of_any_rows(lambda s: make(s, *how), shape, cols, make.__name__, device, *how)


def _padded(width, operands, gradients_of, interpret):
    """`_Padded` for head_dims of `width`. operands: grad, q, k, v, o; gradients_of(operands): the
    gradients of such arrays."""
    pads, wide = [], []
    for x in operands:
        shape = (*x.shape[:3], width)
        is_wide = x.shape[3] == width
        how = x.dtype, x.aligned, interpret, width
        pads.append(None if is_wide else _copying(padding, x.shape, width, x.device, *how))
        wide.append(x if is_wide else plgpu.ArrayInfo(shape, x.dtype, x.device))
    crops = [
        _copying(cropping, wide[i].shape, x.shape[3], x.device, x.shape[3], x.dtype, interpret)
        for i, x in enumerate(operands[1:4], 1)
    ]
    return _Padded(gradients_of(wide), pads, crops)


def _chosen(dim, scores):
    """The config where results need not repeat."""
    return AttentionBackwardConfig(5 if _holds_five(dim, scores) else 7)


def _holds_five(dim, scores):
    """Do registers hold five products?"""
    return dim == 64 or dim == 128 and not scores.adjusted and not scores.dropout


def _check_config(config, dim, scores, deterministic):
    name = "attention_backward"
    if not isinstance(config, AttentionBackwardConfig):
        raise TypeError(f"{name}: config must be an AttentionBackwardConfig, got {config!r}")
    if config.products not in (5, 7) or config.stages not in range(4):
        raise ValueError(
            f"{name}: an AttentionBackwardConfig has 5 or 7 products and up to 3 stages; got"
            f" {config}"
        )
    if config.products == 5 and (deterministic or not _holds_five(dim, scores)):
        raise NotImplementedError(
            f"{name}: five products with head_dim 256, with softcap, bias or dropout and head_dim"
            " 128, or deterministic; use AttentionBackwardConfig(products=7)"
        )
    return config


def _check_results(name, grad, q, v, o, lse):
    """Are grad, o and lse such as attention to q and v returns?"""
    batch, queries, heads, _ = q.shape
    shape = (*q.shape[:3], v.shape[3])
    for what, x in (("grad", grad), ("o", o)):
        if x.shape != shape or x.dtype != q.dtype:
            raise ValueError(
                f"{name}: {what} must be {q.dtype} of shape {shape}, as the result of attention"
                f" is; got {x.dtype} of shape {x.shape}"
            )
    if lse.shape != (batch, heads, queries) or lse.dtype != _F32:
        raise ValueError(
            f"{name}: lse must be float32 of shape {(batch, heads, queries)}, got"
            f" {lse.dtype} of shape {lse.shape}"
        )


def _open(x, *how):
    """The problem, maybe with a batch and lengths that are known when the kernels run. how: what
    else distinguishes kernels."""
    f, given = x.scores, x
    if _attention_open.is_large(x):
        return x
    kind = "attention_backward", _attention_open.without_lengths(x), how
    sizes = {"N": x.queries, "M": x.keys, "B": x.batch} | _attention_open.sequences_of(f)
    weight = _OF_MANY if f.bias or f.sequences or x.angles else _WEIGHT
    found = sizes_of(kind, sizes, (0, MOST_LENGTH), _attention_open.LEAST, weight)
    if found is None:
        return x
    several = x.batch > 1 or x.dim == 256 or f.bias is not None  # whose programs are many
    if several and not f.sequences:
        return _attention_open.with_options(of_any_batch(x), given)
    x = _attention_open.with_options(x._replace(queries=found["N"], keys=found["M"]), given)
    f = x.scores
    return x._replace(scores=f._replace(sequences=found["S"] - 1)) if f.sequences else x


@plgpu.specialize(in_place=False)
@better
def attention_backward(
    grad,
    q,
    k,
    v,
    o,
    lse,
    *,
    bias=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seed=None,
    cos=None,
    sin=None,
    causal=False,
    window=None,
    bottom_right=False,
    softcap=None,
    dropout=0.0,
    scale=None,
    bias_gradient=False,
    config=None,
    deterministic=False,
    interpret=None,
):
    """The gradients of :func:`attention` with respect to ``q``, ``k`` and ``v``, accumulated in
    float32 (Hopper, Blackwell).

    grad: the gradient of the result, like ``o``; o, lse: the results of attention, with
    ``return_lse``; q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seed, cos, sin, causal, window,
    bottom_right, softcap, dropout, scale: its arguments. float16 or bfloat16; head_dims that are
    multiples of 8 up to 256, also another one of v: on Hopper those other than 64, 128 and 256 are
    copied to wider rows; any lengths and numbers of heads. bias_gradient:
    also return the gradient of ``bias``, summed along the dims in which it has size 1. config: an
    :class:`AttentionBackwardConfig`, on Blackwell a :class:`TensorMemoryBackwardConfig`.
    deterministic: results repeat bit for bit; otherwise dq may differ from call to call by its
    rounding, with a head_dim up to 128. out: a tuple of results. What ``o`` lost by rounding
    is an error of dq and dk, largest where a query sees one key and dropout scales it.

    Returns (dq, dk, dv), or (dq, dk, dv, dbias). TypeError, ValueError for other dtypes and shapes,
    NotImplementedError for other head_dims.
    """
    name = "attention_backward"
    if config is None and _tensor_memory.runs_here(q.device):
        config = TensorMemoryBackwardConfig()
    on_blackwell = isinstance(config, TensorMemoryBackwardConfig)
    _check(q, k, v, name, most=_MOST, own_value_dim=True)
    _check_results(name, grad, q, v, o, lse)
    dim = q.shape[3]
    _warp_mma.refuse(
        name, q.device, "differentiate products and softmax (ops.matmul, ops.softmax_backward)"
    )
    if bias_gradient and bias is None:
        raise ValueError(f"{name}: bias_gradient needs the bias")
    scale = _attention_scores.scale_of("attention_backward", scale, dim)
    width = _width(dim, v.shape[3], on_blackwell)
    if width != dim or width != v.shape[3]:
        if cos is not None or sin is not None:
            raise NotImplementedError(
                f"{name}: cos and sin with head_dims other than 64, 128 and 256, or of v; rotate q"
                " and k before, by ops.rotary"
            )
        how = dict(
            bias=bias, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seed=seed,
            causal=causal, window=window, bottom_right=bottom_right, softcap=softcap,
            dropout=dropout, scale=scale, bias_gradient=bias_gradient, config=config,
            deterministic=deterministic, interpret=interpret,
        )  # fmt: skip
        make = attention_backward.maker.make
        return _padded(width, (grad, q, k, v, o), lambda wide: make(*wide, lse, **how), interpret)
    arrays = bias, cu_seqlens_q, cu_seqlens_k, seed
    how = causal, window, bottom_right, softcap, dropout
    scores = _attention_scores.options(name, q, k, arrays, *how, scale=scale)
    shape = (*q.shape, k.shape[1], k.shape[2])
    angles = _attention_rotary.check(name, q, k, cos, sin, bottom_right, scores.sequences)
    x = _attention_scores.Problem(*shape, q.dtype, bool(causal), scale, scores)
    x = x._replace(first=angles[0], angles=angles[1])
    given = x
    if not on_blackwell:
        if config is None:
            config = AttentionBackwardConfig(7) if deterministic else _chosen(dim, scores)
        config = _check_config(config, dim, scores, deterministic)
        x = _open(x, q.device, interpret, bool(deterministic), config)
    bias_dtype = bias.dtype if bias_gradient else None
    sms = plgpu.sm_count(q.device)
    return Gradients(x, config, bias_dtype, interpret, bool(deterministic), sms, given)
