"""Views that may reach outside of their array.

A `ClippedRef` is a box of a ref: along each dim of the ref an index or a span (start, size), of
which not all need exist. There are two kinds, told apart by `error`:

- A block of an array left in GMEM, which may overhang it (`window`): what lies outside reads as
  zero and is not written, as in blocks that are staged. Accesses become masked ones.
- `ref.at[idx]` where idx overhangs the ref (`overhanging`): only accesses with `mask=` are
  possible, and the mask is trusted to leave out what lies outside. Everything else raises `error`.

A span that overhangs SMEM is not a view there: it is accessed by an array of indices, which the
generator finds to be a start plus a count."""

import functools
import operator

from . import _core
from ._jnp import refs
from ._jnp.index import entries as entries_of
from ._jnp.shape import broadcast_to
from ._names import show
from ._trace import Array, Ref, type_text
from ._types import GMEM


class Span:
    """start and size, as the core reads a `pl.Slice`."""

    __slots__ = ("start", "size", "stride")

    def __init__(self, start, size):
        self.start, self.size, self.stride = start, size, 1


def _bounds(x):
    """Bounds of the value of x; None: unknown."""
    return _core.bounds(x) if isinstance(x, Array) else (x, x)


def _is_inside(entry, dim):
    known = _bounds(entry.start if isinstance(entry, Span) else entry)
    size = entry.size if isinstance(entry, Span) else 1
    return known is not None and known[0] >= 0 and known[1] + size <= dim


def _unknown(entry):
    """As the core takes it: what may lie outside is taken as not known."""
    if isinstance(entry, Span):
        return Span(_core.as_array(entry.start, "int32"), entry.size)
    return _core.as_array(entry, "int32")


def window(ref, entries):
    """The view of ``ref`` at an index or a `Span` for each dim: a Ref where all of it is provably
    inside of the array."""
    clips = [not _is_inside(e, d) for e, d in zip(entries, ref.shape)]
    if any(clips):
        return ClippedRef(ref, entries, clips, None)
    return ref.at[tuple(entries)]


def overhanging(ref, idx, error):
    """For `ref.at`: the view that ``error`` says is none; None where more than an overhang is
    wrong."""
    entries = entries_of(ref, idx)
    spans = []
    for e, dim in zip(entries, ref.shape):
        if refs.is_slice(e):
            e = _read_slice(e, dim)
            if e is None:
                return None
        elif not isinstance(e, Array) and not hasattr(e, "__index__"):
            return None
        spans.append(e)
    if len(entries) != ref.ndim:
        return None
    clips = [isinstance(e, Span) and not _is_inside(e, d) for e, d in zip(spans, ref.shape)]
    if not any(clips):
        return None
    return ClippedRef(ref, spans, clips, error)


def _read_slice(s, dim):
    """A span of a slice without a stride; None: it has one, or a start before the array."""
    if isinstance(s, slice):
        if any(isinstance(x, Array) for x in (s.start, s.stop, s.step)):
            return None
        start, stop, step = s.indices(dim)
        return Span(start, stop - start) if step == 1 and stop > start else None
    known = isinstance(s.start, Array) or s.start >= 0
    return Span(s.start, s.size) if s.stride == 1 and s.size > 0 and known else None


class ClippedRef:
    """A box that may reach outside of its ref: for loads, stores and atomics, and for more boxes
    in it."""

    __slots__ = ("ref", "entries", "clips", "error")

    def __init__(self, ref, entries, clips, error):
        self.ref, self.entries, self.clips, self.error = ref, entries, clips, error

    shape = property(lambda self: tuple(e.size for e in self.entries if isinstance(e, Span)))
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: functools.reduce(operator.mul, self.shape, 1))
    dtype = property(lambda self: self.ref.dtype)
    memory_space = property(lambda self: self.ref.memory_space)
    at = property(lambda self: _At(self))

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"ClippedRef<{self.dtype}{list(self.shape)} of {self.ref}>"

    def __getattr__(self, name):
        if hasattr(Ref, name):
            raise NotImplementedError(
                f"ref.{name}: no such view of a block that may overhang its array"
                f" ({type_text(self.ref)}); index it, or use blocks that divide the array"
            )
        raise AttributeError(f"a block that may overhang its array has no attribute {name!r}")

    # ---- where it is ----

    def view(self):
        """The box as a view of GMEM, where it may overhang."""
        return self.ref.at[tuple(_unknown(e) for e in self.entries)]

    def place(self):
        """(ref, array indices, which elements exist; None: nothing to check)."""
        inside = None if self.error else self._inside([None] * self.ndim, self.shape)
        if self.ref.memory_space is GMEM:
            return self.view(), (), inside
        rows = self.ndim
        index = list(self.entries)
        for k, e in enumerate(index):
            if isinstance(e, Span):  # its elements stand along the next dim of the result
                rows -= 1
                x = _core.iota("int32", (e.size,), 0) + e.start
                index[k] = x.reshape((e.size, *[1] * rows))
        found = refs.at(self.ref, tuple(index))
        return (*found.place()[:2], inside)

    def _inside(self, given, shape):
        """Which elements of an access exist. ``given``: for each dim of the box its index, an
        array that broadcasts to ``shape``; None: all of it, along the same dim."""
        conditions, k = [], 0
        for entry, clip, dim in zip(self.entries, self.clips, self.ref.shape):
            is_span = isinstance(entry, Span)
            start = entry.start if is_span else entry
            if is_span:
                at, k = given[k], k + 1
                if at is None and clip:
                    at = _core.iota("int32", shape, k - 1)
            if not clip:
                continue
            x = at if is_span else 0
            known = _bounds(start)
            conditions.append(x < dim - start)
            if known is None or known[0] < 0:
                conditions.append(x >= -start)
        if not conditions:
            return None
        conditions = [_core.as_array(c) for c in conditions]
        return broadcast_to(functools.reduce(operator.and_, conditions), shape)

    # ---- boxes in it ----

    def index(self, idx):
        """``ref.at[idx]``"""
        if isinstance(idx, Array) and idx.dtype == bool:
            raise IndexError("index: a bool array is no index here; use pl.load with mask=")
        given = entries_of(self, idx)
        if any(isinstance(e, Array) and e.ndim for e in given):
            return self._indexed(idx, given)
        if any(e is None for e in given):
            raise NotImplementedError(
                "index: None in the index of a block that may overhang its array; reshape the"
                " loaded array"
            )
        given = iter(given)
        entries = [self._step(e, next(given)) if isinstance(e, Span) else e for e in self.entries]
        clips = [c and not _is_inside(e, d) for e, c, d in zip(entries, self.clips, self.ref.shape)]
        if not any(clips):
            return self.ref.at[tuple(entries)]
        return ClippedRef(self.ref, entries, clips, self.error)

    def _step(self, span, e):
        if not refs.is_slice(e):
            if not isinstance(e, Array):
                if not -span.size <= e.__index__() < span.size:
                    raise ValueError(
                        f"index: {e} is out of bounds for a dimension of size {span.size}"
                    )
                e = e.__index__() % span.size
            return span.start + e
        part = _read_slice(e, span.size)
        if part is None:
            raise NotImplementedError(
                f"index: {show(e)} of a block that may overhang its array; slices need a start"
                " that is not negative and step 1"
            )
        return Span(span.start + part.start, part.size)

    def _indexed(self, idx, given):
        if self.ref.memory_space is not GMEM:
            self.refuse()
        found = refs.at(self.view(), idx)
        arrays = iter(found.by[1:])
        at = []
        dims = iter(found.by[0])
        for e in given:
            if e is None:
                continue
            if refs.is_slice(e):
                start = e.start or 0
                at.append(_core.iota("int32", found.shape, next(dims)) + start)
            elif isinstance(e, Array) and e.ndim:
                next(dims)
                at.append(next(arrays))
            else:
                at.append(_core.as_array(e, "int32"))
        if not self.error:
            found.inside = self._inside(at, found.shape)
        return found

    # ---- accesses ----

    def refuse(self):
        """Raise ``error`` for accesses without a mask."""
        if self.error:
            raise type(self.error)(*self.error.args)

    def get(self, idx=...):
        """The elements, as an array; zeros outside of the array."""
        self.refuse()
        at = self if idx is Ellipsis or idx == () else self.index(idx)
        if at is not self:
            return at[...]
        ref, by, inside = self.place()
        return _core.masked_load(ref, inside, False if self.dtype == bool else 0, *by)

    def set(self, value, idx=...):
        """The elements become those of ``value``; what lies outside of the array is dropped."""
        self.refuse()
        at = self if idx is Ellipsis or idx == () else self.index(idx)
        if at is not self:
            at[...] = value
            return
        ref, by, inside = self.place()
        _core.masked_store(ref, value, inside, *by)

    def swap(self, value, idx=...):
        """``set``; what was there before."""
        old = self.get(idx)
        self.set(value, idx)
        return old

    __getitem__ = get

    def __setitem__(self, idx, value):
        self.set(value, idx)


class _At:
    __slots__ = ("_of",)

    def __init__(self, of):
        self._of = of

    def __getitem__(self, idx):
        return self._of.index(idx)
