"""Products of register arrays and refs, and other linear algebra.

float16 and bfloat16 matrices go to the tensor cores: `b` is staged in shared memory unless it is a
ref there that wgmma can read, with one `wgmma` for each 256 columns, accumulated in float32. Shapes
are padded with zeros. float8 becomes float16, which holds it exactly. Other dtypes are computed by
the lanes, as outer products of a column and a row of operands in shared memory. Vectors are
multiplied and summed.
"""

import enum
import itertools
import math

import numpy as np

from .. import _core
from .._control import fori_loop, run_scoped
from .._names import show
from .._ops import commit_smem
from .._trace import Array, Ref
from .._types import REGS, SMEM, WGMMAAccumulatorRef
from .array import ones_like
from .base import axes_of, either
from .elementwise import multiply
from .index import diagonal
from .reduce import sum as sum_of
from .shape import broadcast_to, concatenate, expand_dims, pad_with, stack, transpose, unstack

__all__ = [
    "cross",
    "dot",
    "inner",
    "kron",
    "matmul",
    "matvec",
    "outer",
    "polyval",
    "tensordot",
    "trace",
    "vander",
    "vdot",
    "vecdot",
    "vecmat",
]

# ---- precision -----------------------------------------------------------------------------------

_MOST_COLUMNS = 256  # of a wgmma


class Precision(enum.Enum):
    """The minimum accuracy of products."""

    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


DotAlgorithmPreset = enum.Enum(
    "DotAlgorithmPreset",
    "DEFAULT ANY_F8_ANY_F8_F32 ANY_F8_ANY_F8_F32_FAST_ACCUM ANY_F8_ANY_F8_ANY"
    " ANY_F8_ANY_F8_ANY_FAST_ACCUM F16_F16_F16 F16_F16_F32 BF16_BF16_BF16 BF16_BF16_F32"
    " BF16_BF16_F32_X3 BF16_BF16_F32_X6 BF16_BF16_F32_X9 TF32_TF32_F32 TF32_TF32_F32_X3"
    " F32_F32_F32 F64_F64_F64",
    module=__name__,
    start=0,
)
DotAlgorithmPreset.__doc__ = "Dtypes of the operands and of the sum of products."
_ROUNDED = {
    DotAlgorithmPreset.F16_F16_F16: "float16",
    DotAlgorithmPreset.F16_F16_F32: "float16",
    DotAlgorithmPreset.BF16_BF16_BF16: "bfloat16",
    DotAlgorithmPreset.BF16_BF16_F32: "bfloat16",
}


def _rounded_to(precision, what):
    """The dtype to which ``precision`` rounds float32 operands; None: no rounding."""
    pair = isinstance(precision, tuple)
    given = precision if pair else (precision,)
    names = [*Precision.__members__, *DotAlgorithmPreset.__members__, "FASTEST", "FLOAT32"]
    names += ["BFLOAT16", "TENSORFLOAT32"]
    for p in given or (precision,):
        known = p is None or isinstance(p, (Precision, DotAlgorithmPreset))
        known = known or isinstance(p, str) and p.upper() in names
        if not known or pair and len(given) != 2:
            raise ValueError(
                f"{what}: precision must be None, a lax.Precision or two of them, a"
                f" lax.DotAlgorithmPreset or the name of one, got {show(precision)}"
            )
    p = given[0]
    if isinstance(p, str):
        p = DotAlgorithmPreset.__members__.get(p.upper())
    if p is DotAlgorithmPreset.F64_F64_F64:
        raise NotImplementedError(f"{what}: there is no float64; use F32_F32_F32")
    return _ROUNDED.get(p)


# ---- products of matrices ------------------------------------------------------------------------


def _load(x, what):
    if isinstance(x, Ref):
        return x[...]
    if not isinstance(x, Array):
        raise TypeError(f"{what}: operands must be arrays or refs, got {show(x)}")
    return x


def _dtypes(a, b, preferred, what):
    """(of the operands, of the sums, of the result)"""
    dtype = _core.promote_types([a.dtype, b.dtype])[0]
    if dtype.kind == "b":
        raise TypeError(f"{what}: bool arrays have no product; convert them first")
    out = dtype if preferred is None else _core.as_dtype(preferred)
    if dtype.kind not in "iu":
        return dtype, np.dtype("float32"), out
    return dtype, out if out.kind in "iu" else np.dtype("int32"), out


def _is_operand(x, rows, columns):
    """May wgmma read the ref itself?"""
    return (
        isinstance(x, Ref)
        and x.memory_space is SMEM
        and x.shape[0] % rows == 0
        and x.shape[1] % columns == 0
    )


def _padded(x, rows, columns, dtype):
    x = _core.convert(_load(x, "dot"), dtype)
    config = [(0, -x.shape[0] % rows, 0), (0, -x.shape[1] % columns, 0)]
    return pad_with(x, 0, config) if any(high for _, high, _ in config) else x


def _wgmma(acc, a, b):
    """A product for all targets: those without wgmma compute it by mma."""
    _core.effect("wgmma", (acc, a, b), portable=1)


def _on_tensor_cores(a, b, dtype):
    """(M, K) @ (K, N) of float16 or bfloat16 in float32."""
    m, n = a.shape[0], b.shape[1]
    if not _is_operand(a, 64, 16) or a.dtype != dtype:
        a = _padded(a, 64, 16, dtype)
    if _is_operand(b, 16, 16) and b.dtype == dtype and n <= _MOST_COLUMNS:

        def product(acc):
            commit_smem()
            _wgmma(acc, a, b)
            return acc[...]

        out = run_scoped(product, WGMMAAccumulatorRef((a.shape[0], n), np.float32))
        return out if out.shape[0] == m else out[:m]
    pieces = []
    b = _padded(b, 16, 16, dtype)
    for start in range(0, b.shape[1], _MOST_COLUMNS):
        part = b[:, start : start + _MOST_COLUMNS]

        def staged(acc, smem, part=part):
            smem[...] = part
            commit_smem()
            _wgmma(acc, a, smem)
            return acc[...]

        acc = WGMMAAccumulatorRef((a.shape[0], part.shape[1]), np.float32)
        pieces.append(run_scoped(staged, acc, SMEM(part.shape, dtype)))
    out = concatenate(pieces, 1)
    return out if out.shape == (m, n) else out[:m, :n]


def _by_lanes(a, b, work):
    """(M, K) @ (K, N), accumulated in `work`."""
    (m, k), n = a.shape, b.shape[1]
    a, b = (_core.convert(_load(x, "dot"), work) for x in (a, b))
    if k == 1:
        return a * b

    def product(a_smem, b_smem):
        a_smem[...] = a
        b_smem[...] = b

        def step(i, total):
            column = _core.broadcast_in_dim(a_smem[:, i], (m, n), (0,))
            return total + column * _core.broadcast_in_dim(b_smem[i], (m, n), (1,))

        return fori_loop(0, k, step, _core.full((m, n), 0, work))

    return run_scoped(product, SMEM((m, k), work), SMEM((k, n), work))


def _product(a, b, preferred, what):
    """(M, K) @ (K, N)"""
    dtype, work, out = _dtypes(a, b, preferred, what)
    if dtype.itemsize == 1 and dtype.kind not in "iu":
        dtype = np.dtype("float16")
    if min(a.shape[0], b.shape[1]) == 1 and a.shape[1] > 1:
        x, y = (_core.convert(_load(v, what), work) for v in (a, b))
        if a.shape[0] == 1:
            total = _core.reduce("add", x.reshape((-1, 1)) * y, (0,))
        else:
            total = _core.reduce("add", x * y.reshape((1, -1)), (1,))
        return _core.convert(total.reshape((a.shape[0], b.shape[1])), out)
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        return _core.convert(_on_tensor_cores(a, b, dtype), out)
    return _core.convert(_by_lanes(a, b, work), out)


def dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
):
    """Products summed over contracted dims: ((of lhs, of rhs), (batch of lhs, of rhs)). The result
    has the batch dims, then what is left of lhs and of rhs."""
    what = "dot_general"
    rounded = _rounded_to(precision, what)
    (ca, cb), (ba, bb) = dimension_numbers
    for x in (lhs, rhs):
        if not isinstance(x, (Array, Ref)):
            raise TypeError(f"{what}: operands must be arrays or refs, got {show(x)}")
    if isinstance(lhs, Ref) and lhs.memory_space is REGS:
        lhs = lhs[...]
    ca, ba = axes_of(tuple(ca), lhs.ndim, what), axes_of(tuple(ba), lhs.ndim, what)
    cb, bb = axes_of(tuple(cb), rhs.ndim, what), axes_of(tuple(bb), rhs.ndim, what)
    sizes = [[x.shape[d] for d in dims] for x, dims in ((lhs, ca), (rhs, cb), (lhs, ba), (rhs, bb))]
    if sizes[0] != sizes[1] or sizes[2] != sizes[3] or {*ca} & {*ba} or {*cb} & {*bb}:
        raise TypeError(
            f"{what}: shapes {lhs.shape} and {rhs.shape} do not fit dimension numbers"
            f" {dimension_numbers}"
        )
    fa = [d for d in range(lhs.ndim) if d not in ca and d not in ba]
    fb = [d for d in range(rhs.ndim) if d not in cb and d not in bb]
    shape = (*sizes[2], *(lhs.shape[d] for d in fa), *(rhs.shape[d] for d in fb))
    if not ca:
        raise NotImplementedError(f"{what}: no dimension is contracted; multiply broadcast arrays")
    b, m, k, n = (
        math.prod(s)
        for s in (sizes[2], [lhs.shape[d] for d in fa], sizes[0], [rhs.shape[d] for d in fb])
    )
    if rounded:
        dtype = _core.promote_types([lhs.dtype, rhs.dtype])[0]
        if dtype == "float32":
            if preferred_element_type is None:
                preferred_element_type = dtype
            lhs, rhs = (_core.convert(_load(x, what), rounded) for x in (lhs, rhs))
    if lhs.ndim == 2 and rhs.ndim == 2 and len(ca) == 1 and not ba:
        if isinstance(lhs, Ref):
            left = lhs if fa == [0] else lhs.T
        else:
            left = transpose(lhs, (*fa, *ca))
        if isinstance(rhs, Ref):
            right = rhs if cb == (0,) else rhs.T
        else:
            right = transpose(rhs, (*cb, *fb))
        return _product(left, right, preferred_element_type, what)
    left = transpose(_load(lhs, what), (*ba, *fa, *ca)).reshape((b, m, k))
    right = transpose(_load(rhs, what), (*bb, *cb, *fb)).reshape((b, k, n))
    if m == 1 and n == 1:
        _, work, out = _dtypes(left, right, preferred_element_type, what)
        x, y = (_core.convert(v, work).reshape((b, k)) for v in (left, right))
        return _core.convert(_core.reduce("add", x * y, (1,)), out).reshape(shape)
    if b > 16:
        raise NotImplementedError(f"{what}: {b} products in a batch; loop over them with refs")
    parts = [_product(left[i], right[i], preferred_element_type, what) for i in range(b)]
    return (parts[0] if b == 1 else stack(parts)).reshape(shape)


# ---- functions of jnp ----------------------------------------------------------------------------


@either
def dot(a, b, *, precision=None, preferred_element_type=None, out_sharding=None):
    """Of vectors the inner product, of matrices the product; else a sum over the last dim of ``a``
    and the last but one of ``b``."""
    if not a.ndim or not b.ndim:
        return multiply(_load(a, "dot"), _load(b, "dot"))
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    if a.shape[-1] != b.shape[dims[0][1][0]]:
        raise TypeError(f"dot: shapes {a.shape} and {b.shape} do not fit")
    return dot_general(a, b, dims, precision, preferred_element_type)


@either
def matmul(a, b, *, precision=None, preferred_element_type=None, out_sharding=None):
    """``a @ b``. Leading dimensions are batches, which must be equal."""
    for x in (a, b):
        if not isinstance(x, (Array, Ref)):
            raise TypeError(f"matmul: operands must be arrays or refs, got {show(x)}")
        if not x.ndim:
            raise ValueError("matmul: operands must have at least one dimension; use *")
    if a.ndim <= 2 and b.ndim <= 2:
        return dot(a, b, precision=precision, preferred_element_type=preferred_element_type)
    batch = max(a.ndim, b.ndim) - 2
    if a.ndim != b.ndim or a.shape[:batch] != b.shape[:batch]:
        raise NotImplementedError(
            f"matmul: batch dimensions of {a.shape} and {b.shape} differ; broadcast them first"
        )
    if a.shape[-1] != b.shape[-2]:
        raise TypeError(f"matmul: shapes {a.shape} and {b.shape} do not fit")
    lead = tuple(range(batch))
    dims = (((a.ndim - 1,), (b.ndim - 2,)), (lead, lead))
    return dot_general(a, b, dims, precision, preferred_element_type)


@either
def tensordot(a, b, axes=2, *, precision=None, preferred_element_type=None):
    """The product summed over the last ``axes`` dimensions of ``a`` and the first of ``b``, or over
    the given dimensions."""
    if isinstance(axes, int):
        pair = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        pair = tuple(x if isinstance(x, (tuple, list)) else (x,) for x in axes)
    return dot_general(a, b, (pair, ((), ())), precision, preferred_element_type)


@either
def vdot(a, b, *, precision=None, preferred_element_type=None):
    """The inner product of all elements."""
    a, b = _load(a, "vdot"), _load(b, "vdot")
    a, b = a.reshape((-1,)), b.reshape((-1,))
    return dot(a, b, precision=precision, preferred_element_type=preferred_element_type)


@either
def outer(a, b):
    """All products of two vectors."""
    a, b = _load(a, "outer"), _load(b, "outer")
    return a.reshape((-1, 1)) * b.reshape((1, -1))


@either
def inner(a, b):
    """The product summed over the last dimension of both."""
    if not a.ndim or not b.ndim:
        return a * b
    return tensordot(a, b, ((a.ndim - 1,), (b.ndim - 1,)))


@either
def vecdot(x1, x2, axis=-1):
    """The inner product along one dimension; the others broadcast."""
    return sum_of(x1 * x2, axis=axis)


@either
def matvec(x1, x2):
    """(..., m, n) and (..., n): sums over n."""
    return sum_of(x1 * expand_dims(x2, -2), axis=-1)


@either
def vecmat(x1, x2):
    """(..., m) and (..., m, n): sums over m."""
    return sum_of(expand_dims(x1, -1) * x2, axis=-2)


@either
def kron(a, b):
    """The Kronecker product."""
    n = max(a.ndim, b.ndim)
    shapes = [(1,) * (n - x.ndim) + x.shape for x in (a, b)]
    wide = tuple(itertools.chain(*zip(*shapes)))
    left = a.reshape(tuple(itertools.chain(*((m, 1) for m in shapes[0]))))
    right = b.reshape(tuple(itertools.chain(*((1, m) for m in shapes[1]))))
    out = broadcast_to(left, wide) * broadcast_to(right, wide)
    return out.reshape(tuple(p * q for p, q in zip(*shapes)))


@either
def cross(a, b, axis=-1):
    """The cross product along a dimension of size 3."""
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ValueError(f"jnp.cross: shapes {a.shape} and {b.shape}; the dim must have 3 elements")
    a, b = (unstack(x, axis) for x in (a, b))
    others = [(1, 2), (2, 0), (0, 1)]
    return stack([a[i] * b[j] - a[j] * b[i] for i, j in others], axis)


@either
def polyval(p, x):
    """p[0] * x**(n - 1) + ... + p[n - 1]."""
    total = 0 * x
    for k in range(len(p) if not hasattr(p, "shape") else p.shape[0]):
        total = total * x + p[k]
    return total


@either
def vander(x, N=None, increasing=False):  # noqa: N803 - NumPy's name
    """A matrix whose columns are descending powers of the elements."""
    n = x.shape[0] if N is None else N
    columns = [ones_like(x)]
    for _ in range(n - 1):
        columns.append(columns[-1] * x)
    return stack(columns if increasing else columns[::-1], 1)


@either
def trace(a, offset=0, axis1=0, axis2=1, dtype=None):
    """The sum of the diagonal."""
    return sum_of(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)
