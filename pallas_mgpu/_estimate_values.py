"""Elements of small integer arrays, for `plgpu.estimate`: sizes of groups, tables and what a kernel
computes from them before its loops depend on them.

Only what comes from arguments whose arrays are given is followed, through registers and shared
memory. All else stays UNKNOWN, and so does what an op makes of it."""

from typing import Any

import numpy as np

MOST = 1 << 14  # elements of an array that is followed


class Unknown:
    """A scalar that follows from the elements of arrays. Everything computed from it is unknown."""

    def _same(self, *_):
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _same
    __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = _same
    __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __truediv__ = __rtruediv__ = _same
    __invert__ = __abs__ = _same
    __hash__ = object.__hash__

    def __bool__(self):
        return False

    def __index__(self):  # of a slot: any will do
        return 0


UNKNOWN = Unknown()

_RUNNING: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _truncated(x, y):
    safe = np.where(y == 0, 1, y)
    return np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe))


def _ints(text):
    inside = text.strip("[]")
    return [int(x) for x in inside.split(",")] if inside else []


_ELEMENTWISE = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift,
    "shr": np.right_shift, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "select": np.where, "neg": np.negative,
    "abs": np.abs, "not": np.invert, "div": _truncated, "rem": np.fmod,
    "convert": lambda x: x, "layout_cast": lambda x: x, "opt_barrier": lambda x: x,
}  # fmt: skip


def _broadcast(x, shape, attrs):
    dims = _ints(attrs.get("dims", "[]"))
    inner = [1] * len(shape)
    for d, n in zip(dims, np.shape(x)):
        inner[d] = n
    return np.broadcast_to(np.reshape(x, inner), shape)


_OTHERS = {  # of the operands, the shape of the result, and attributes
    "broadcast": _broadcast,
    "reshape": lambda x, shape, attrs: np.reshape(x, shape),
    "transpose": lambda x, shape, attrs: np.transpose(x, _ints(attrs["dims"])),
    "slice": lambda x, shape, attrs: x[
        tuple(slice(a, a + n) for a, n in zip(_ints(attrs["starts"]), shape))
    ],
    "scan": lambda x, shape, attrs: _RUNNING[attrs["op"]].accumulate(x, int(attrs["dim"])),
    "reduce": lambda x, shape, attrs: _RUNNING[attrs["op"]].reduce(x, tuple(_ints(attrs["dims"]))),
    "gather": lambda x, y, shape, attrs: np.take(x, y, mode="clip"),
}
FOLLOWED = {*_ELEMENTWISE, *_OTHERS, "iota"}


def made(name, shape, attrs, *operands):
    """The result of an op, an array or UNKNOWN; of a scalar, an int."""
    if any(x is UNKNOWN for x in operands):
        return UNKNOWN
    if name == "iota":
        return _broadcast(np.arange(shape[int(attrs["dim"])]), shape, {"dims": attrs["dim"]})
    try:
        if name in _ELEMENTWISE:
            found = _ELEMENTWISE[name](*operands)
        else:
            found = _OTHERS[name](*map(np.asarray, operands), shape, attrs)
    except KeyError:  # another way to combine
        return UNKNOWN
    found = np.asarray(found)
    return found if shape else found.item()


def share(mask):
    """The part of a mask that is true; all of it where nobody knows."""
    return 1.0 if mask is UNKNOWN else float(np.mean(mask))


def _numbers(starts, sizes, array_shape):
    """Of each dimension, the elements; None where a start is unknown."""
    if any(s is UNKNOWN for s in starts):
        return None
    return [np.clip(np.arange(s, s + n), 0, dim - 1)
            for s, n, dim in zip(starts, sizes, array_shape)]  # fmt: skip


def part(array, starts, sizes, left, mask=None, other=0):
    """Elements of a view of an argument's array. left: dimensions that the view has. Where `mask`
    is false, other."""
    if array is None or mask is UNKNOWN or other is UNKNOWN:
        return UNKNOWN
    numbers = _numbers(starts, sizes, array.shape)
    if numbers is None:
        return UNKNOWN
    gone = [d for d in range(array.ndim) if d not in left]
    found = array[np.ix_(*numbers)].transpose(*left, *gone)
    found = found.reshape(found.shape[: len(left)]).astype(np.int64)
    return found if mask is None else np.where(mask, found, other)


def _keys(root, starts, sizes, left):
    """Of a view in shared memory, those of its elements in its order."""
    ranges = [range(s, s + n) for s, n in zip(starts, sizes)]
    shape = [sizes[d] for d in left]
    for at in np.ndindex(*shape):
        index = [r[0] for r in ranges]
        for d, k in zip(left, at):
            index[d] = ranges[d][k]
        yield (root, *index)


def keep(scalars, root, starts, sizes, left, value, mask=True):
    """What a block's shared memory holds after a store of an array."""
    if any(s is UNKNOWN for s in starts):
        for key in [k for k in scalars if k[0] == root]:
            scalars[key] = UNKNOWN
        return
    shape = tuple(sizes[d] for d in left)
    known = mask is not UNKNOWN and value is not UNKNOWN
    value = np.broadcast_to(value, shape).ravel() if known else [UNKNOWN] * int(np.prod(shape))
    mask = np.broadcast_to(mask, shape).ravel() if known else [True] * len(value)
    for key, x, there in zip(_keys(root, starts, sizes, left), value, mask):
        if there:
            scalars[key] = x if x is UNKNOWN else int(x)


def kept(scalars, root, starts, sizes, left):
    """An array that is loaded from there."""
    if any(s is UNKNOWN for s in starts):
        return UNKNOWN
    found = [scalars.get(k, UNKNOWN) for k in _keys(root, starts, sizes, left)]
    if any(x is UNKNOWN for x in found):
        return UNKNOWN
    return np.array(found, np.int64).reshape([sizes[d] for d in left])
