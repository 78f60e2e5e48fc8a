"""Keys and values of 8 bits in attention of few queries: made elements of 16 bits in registers.

Both are left operands of products, which may lie in registers. They are loaded by `ldmatrix`, which
moves pairs of bytes as if they were elements of 16 bits: rows of keys as they are, values
transposed. So columns come out in an order of their own, which costs nothing: that of the keys'
columns is the order in which queries are stored, and that of the values' is undone where a result
leaves.

Products are of float16, which represents all elements of 8 bits, and probabilities more exactly
than bfloat16. Rows of bfloat16 queries are divided by a power of 2 that makes them small enough."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu import numpy as jnp

_F16 = np.dtype(np.float16)
_ROWS = 64  # of an operand: keys, or pairs of columns of values
_LEAST, _MOST = np.float32(2.0**-100), np.float32(2.0**100)  # that rows are divided by
# device functions that make two words of float16 of a word of bytes
_HALVES = {
    "float8_e4m3fn": "halves_of_e4m3",
    "float8_e5m2": "halves_of_e5m2",
    "int8": "halves_of_s8",
}


def column(c):
    """The column of queries and keys that comes as number c."""
    return c // 16 * 16 + c % 8 // 2 * 4 + c % 16 // 8 * 2 + c % 2


def _bytes(x, dtype):
    """Both bytes of pairs, as float16."""
    low, high = x & 0xFF, x >> 8
    return (y.astype(np.uint8).view(dtype).astype(_F16) for y in (low, high))


def _interpret_keys(dtype, x):
    pairs = np.stack(list(_bytes(x, dtype)), axis=2)
    return pairs.reshape(_ROWS, -1)[:, column(np.arange(2 * x.shape[1]))]


@functools.cache
def _keys(dim, dtype):
    """Pairs of bytes [64, dim / 2] -> float16 [64, dim], in the order of `column`."""
    source = f"""for (int i = 0; i < {dim // 16}; i++) {{
  for (int k = 0; k < 2; k++) {{
    u32 x[2], *const r = (u32 *)r0 + 4 * i + k;
    {_HALVES[dtype.name]}<false>(x, ((const u32 *)a0)[2 * i + k]);
    r[0] = x[0], r[2] = x[1];
  }}
}}"""
    return plgpu.inline_cuda(
        source,
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, dim), _F16, plgpu.Layout.WGMMA),
        interpret=functools.partial(_interpret_keys, dtype),
    )


def _interpret_values(dtype, *groups):
    return np.concatenate([y for x in groups for y in _bytes(x, dtype)])


@functools.cache
def _values(count, dtype):
    """`count` times pairs of bytes [64, 64] -> float16 [count * 128, 64]: of each, the low bytes,
    then the high ones."""
    source = "".join(
        f"""for (int i = 0; i < 16; i++) {{
  u32 x[2], *const r = (u32 *)r0 + {32 * n} + i;
  {_HALVES[dtype.name]}<true>(x, ((const u32 *)a{n})[i]);
  r[0] = x[0], r[16] = x[1];
}}
"""
        for n in range(count)
    )
    return plgpu.inline_cuda(
        source,
        arg_types=(plgpu.Layout.WGMMA,) * count,
        return_type=plgpu.ShapeDtypeStruct((count * 128, 64), _F16, plgpu.Layout.WGMMA),
        interpret=functools.partial(_interpret_values, dtype),
    )


def is_turned(value_dim):
    """Are there enough columns for values that are transposed in registers?"""
    return value_dim % 128 == 0


def keys_of(pairs, dtype):
    """Keys of a slot; pairs: its memory as elements of 16 bits."""
    x = plgpu.load(pairs, layout=plgpu.Layout.WGMMA)
    return _keys(2 * pairs.shape[1], dtype)(x)


def pairs_of_values(pairs):
    """Values of a slot, transposed, as arrays of pairs [64, 64]."""
    found = []
    for first in range(0, pairs.shape[1], _ROWS):
        source = plgpu.transpose_ref(pairs.at[:, first : first + _ROWS], (1, 0))
        found.append(plgpu.load(source, layout=plgpu.Layout.WGMMA))
    return found


def without(pairs, count):
    """The same, 0 from key number `count` on."""

    def zero(*pairs):
        key = lax.broadcasted_iota(jnp.int32, pairs[0].shape, 1)
        return tuple(jnp.where(key < count, x, np.uint16(0)) for x in pairs)

    return lax.cond(count < _ROWS, zero, lambda *pairs: pairs, *pairs)


def values_of(pairs, dtype):
    """Those as an operand."""
    return _values(len(pairs), dtype)(*pairs)


def in_order(value):
    """A result [columns, queries] in the order of its columns."""
    dim, n = value.shape
    return value.reshape(dim // 128, 2, _ROWS, n).transpose(0, 2, 1, 3).reshape(dim, n)


def divided(value):
    """Rows of queries as float16, and what each was divided by; None for those of float16."""
    if value.dtype == _F16:
        return value, None
    value = value.astype(jnp.float32)
    top = lax.bitcast_convert_type(jnp.max(jnp.abs(value), axis=1), jnp.int32)
    power = lax.bitcast_convert_type(top & 0x7F800000, jnp.float32)
    power = jnp.clip(power, _LEAST, _MOST)
    return (value * lax.broadcast_in_dim(1 / power, value.shape, [0])).astype(_F16), power
