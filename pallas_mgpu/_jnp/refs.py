"""Refs indexed by arrays: ``ref[rows]``, ``ref[i, :, j]`` with integer arrays.

NumPy's rule: the arrays broadcast against each other, and their dims stand where the arrays stood,
or in front where a slice stood between them. The plain part of the index is a view, whose dims
then either run along a dim of the result or get their index, element by element, from an array.
Indices are not checked and do not wrap (the interpreter finds those that are out of bounds). Where
several elements of a store name one place, exactly one of them is stored.
"""

import numpy as np

from .. import _core
from .._names import show
from .._trace import Array, Ref, as_array, type_text
from .index import CAPTURED, entries
from .shape import broadcast_to


def is_slice(i):
    return isinstance(i, slice) or hasattr(i, "size") and hasattr(i, "start")


def _checked(i):
    """An index array as int32; scalars as they are."""
    if isinstance(i, Ref):
        raise TypeError("index: a Ref was given; load it first with ref[...]")
    if isinstance(i, Array):
        if i.ndim and i.dtype == bool:
            raise IndexError(
                "index: a mask stands alone and has the shape of the ref; load all of it and use"
                " jnp.where, or pl.load and pl.store with mask="
            )
        if i.dtype.kind not in "iu":
            error = ValueError if i.ndim else TypeError
            raise error(f"index: indices must be integers, got {type_text(i)}")
        return _core.convert(i, "int32") if i.ndim else i
    if isinstance(i, list) or np.ndim(i):
        raise ValueError(CAPTURED)
    return i


def at(ref, idx):
    """What ``ref.at[idx]`` is where ``idx`` has arrays."""
    if isinstance(idx, tuple) and len(idx) == 1:
        (idx,) = idx
    if isinstance(idx, Array) and idx.dtype == bool and idx.shape == ref.shape:
        return MaskedRef(ref, idx)
    plain, shape, along, arrays, raw, first, apart = [], [], [], [], [], None, False
    for i in entries(ref, idx):
        if i is None:
            shape.append(1)
            continue
        given = i
        i = i if is_slice(i) else _checked(i)
        if is_slice(i):
            plain.append(i)
            along.append(len(shape))
            shape.append(ref.at[(*(slice(None),) * (len(plain) - 1), i)].shape[len(plain) - 1])
            continue
        first = len(shape) if first is None else first
        apart |= len(shape) != first
        if isinstance(i, Array) and i.ndim:
            arrays.append(i)
            raw.append(given)
            along.append(-len(arrays))
            i = slice(None)
        plain.append(i)
    try:
        wide = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(str(a.shape) for a in arrays)
        raise ValueError(f"index: arrays of shapes {shapes} do not broadcast") from None
    place = 0 if apart else first
    full = (*shape[:place], *wide, *shape[place:])
    if len(full) > 8:
        raise ValueError("index: the result has more than 8 dimensions")
    dims = [k if k < 0 else k + len(wide) * (k >= place) for k in along]
    spread = [_spread(a, wide, full, place) for a in arrays]
    return IndexedRef(ref.at[tuple(plain)], dims, spread, raw)


def _spread(a, wide, full, place):
    a = broadcast_to(a, wide)
    if wide == full:
        return a
    return _core.broadcast_in_dim(a, full, tuple(range(place, place + len(wide))))


class IndexedRef:
    """Elements of a ref by arrays of indices: for loads, stores and atomics, not for more views."""

    # inside: which elements exist, if not all; arrays: as the user gave them
    __slots__ = ("arrays", "by", "inside", "ref")

    def __init__(self, ref, dims, indices, arrays=()):
        self.ref, self.by, self.inside = ref, (tuple(dims), *indices), None
        self.arrays = tuple(arrays)

    shape = property(lambda self: self.by[1].shape)
    dtype = property(lambda self: self.ref.dtype)
    ndim = property(lambda self: self.by[1].ndim)
    size = property(lambda self: self.by[1].size)
    memory_space = property(lambda self: self.ref.memory_space)

    def __repr__(self):
        return f"IndexedRef<{type_text(self.by[1])} of {self.ref}>"

    def __getattr__(self, name):
        if hasattr(Ref, name):
            raise NotImplementedError(
                f"ref.at[idx].{name}: no views of what arrays of indices name; take the view first"
                " and index last"
            )
        raise AttributeError(f"a ref indexed by arrays has no attribute {name!r}")

    def _whole(self, idx):
        if idx is not Ellipsis and idx != ():
            raise NotImplementedError(
                f"ref.at[idx][{show(idx)}]: index by arrays once, with all indices together"
            )

    def place(self):
        """(ref, array indices, which elements exist; None: all)."""
        return self.ref, self.by, self.inside

    def get(self, idx=...):
        """The elements, as an array."""
        self._whole(idx)
        zero = False if self.dtype == bool else 0
        inside = True if self.inside is None else self.inside
        return _core.masked_load(self.ref, inside, zero, *self.by)

    def set(self, value, idx=...):
        """The elements become those of ``value``, which has the same shape."""
        self._whole(idx)
        inside = True if self.inside is None else self.inside
        _core.masked_store(self.ref, value, inside, *self.by)

    def swap(self, value, idx=...):
        """``set``; what was there before."""
        old = self.get(idx)
        self.set(value)
        return old

    def addupdate(self, value, idx=...):
        """``value`` added, not atomically: of equal indices exactly one counts."""
        self.set(self.get(idx) + value)

    __getitem__ = get

    def __setitem__(self, idx, value):
        self.set(value, idx)


class MaskedRef:
    """``ref.at[mask]``: one number into the elements whose mask is true."""

    __slots__ = ("_ref", "_mask")

    def __init__(self, ref, mask):
        self._ref, self._mask = ref, mask

    def __getitem__(self, idx):
        raise IndexError(
            "index: how many elements a mask names is known only at run time; use pl.load with"
            " mask= and other="
        )

    def __setitem__(self, idx, value):
        value = as_array(value, "ref[mask]")
        if value.ndim:
            raise ValueError(
                f"ref[mask] = value: the value must be a scalar, got {type_text(value)}; use"
                " pl.store with mask="
            )
        _core.masked_store(self._ref, _core.full(self._ref.shape, value, value.dtype), self._mask)

    def set(self, value):
        """``ref[mask] = value``, a scalar."""
        self[...] = value
