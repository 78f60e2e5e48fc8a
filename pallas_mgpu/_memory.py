"""Accesses to refs beyond ``ref[idx]``: masks and atomics.

Masks and values broadcast to the shape of the indexed part. Only elements whose mask is true are
accessed; the others may be outside the array.
"""

import numpy as np

from . import _core
from ._clipped import ClippedRef
from ._jnp.refs import IndexedRef, MaskedRef
from ._jnp.shape import broadcast_to
from ._names import show, shown_as
from ._trace import Array, Ref, as_array, as_bools

_OPTIONS = ("cache_modifier", "eviction_policy", "volatile")


def _view(what, ref, idx, options):
    if not isinstance(ref, (Ref, ClippedRef, IndexedRef)):
        raise TypeError(f"{what}: the first argument must be a ref, got {show(ref)}")
    for name in options:
        if name == "memory_space":
            raise TypeError(
                f"{what}: no argument 'memory_space': a load goes to registers, a store to the"
                " ref's memory; for copies use plgpu.copy_gmem_to_smem and copy_smem_to_gmem"
            )
        if name not in _OPTIONS:
            raise TypeError(f"{what}: unexpected argument {name!r}")
    if isinstance(ref, IndexedRef):
        if idx is not Ellipsis and idx != ():
            raise NotImplementedError(f"{what}: index by arrays once, with all indices together")
        return ref
    view = ref if idx is Ellipsis else ref.at[idx]
    if isinstance(view, MaskedRef):
        raise IndexError(f"{what}: a bool array is no index here; pass it as mask=")
    return view


def _place(view, mask):
    """The ref, the arrays that index it, and the mask, restricted to the part of an overhanging
    view that exists."""
    if isinstance(view, Ref):
        return view, (), mask
    ref, by, inside = view.place()
    if inside is None:
        return ref, by, mask
    return ref, by, inside if mask is True else _beside("mask", mask, view) & inside


def _load(view, mask, other):
    ref, by, exists = _place(view, mask)
    if exists is not mask and mask is not True:  # outside the array, elements read as zero
        zero = _core.full(view.shape, 0, view.dtype)
        other = _core.where(mask, zero, _core.convert(as_array(other, "other"), view.dtype))
    return _core.masked_load(ref, exists, other, *by)


def _store(view, value, mask):
    ref, by, mask = _place(view, mask)
    _core.masked_store(ref, value, mask, *by)


def _beside(what, x, view):
    """``x`` in the shape of the view, or a scalar."""
    if x.shape in ((), view.shape):
        return x
    try:
        return broadcast_to(x, view.shape)
    except ValueError:
        raise ValueError(
            f"{what} of shape {x.shape} does not broadcast to {view.shape}, the shape of the"
            " indexed part"
        ) from None


def _mask(what, mask, view):
    mask = as_bools(mask, f"{what}: mask", "bool array")
    return _beside(f"{what}: mask", mask, view)


def _value(what, x, view):
    """A number, or an array broadcast to the view."""
    if isinstance(x, (bool, int, float, np.generic)):
        return x
    return _beside(what, as_array(x, what), view)


def load(ref, idx=..., *, mask=None, other=None, **options):
    """Load ``ref[idx]`` where ``mask`` is true; elsewhere the result is ``other``, zero by default.
    ``load(ref.at[idx], mask=...)`` is equivalent.

    ``mask`` (bool) and ``other`` broadcast to the shape of ``ref[idx]``. Elements whose mask is
    false are not accessed, so ``ref.at[pl.ds(start, size)]`` may overhang the ref, in GMEM and in
    SMEM. ``cache_modifier``, ``eviction_policy`` and ``volatile`` have no effect. ValueError for
    shapes that do not broadcast, TypeError for other arguments.
    """
    what = "pl.load"
    view = _view(what, ref, idx, options)
    if mask is None:
        if other is not None:
            raise ValueError(f"{what}: other is only for a load with a mask")
        return view[...]
    zero = False if view.dtype == bool else 0
    filler = zero if other is None else _value(f"{what}: other", other, view)
    return _load(view, _mask(what, mask, view), filler)


@shown_as(lambda ref, idx, val, *, mask=None, eviction_policy=None: None)
def store(ref, *idx_and_val, mask=None, **options):
    """``store(ref, idx, val)`` executes ``ref[idx] = val`` where ``mask`` is true.
    ``store(ref.at[idx], val, mask=...)`` is equivalent.

    ``mask`` (bool) broadcasts to the indexed shape; other elements are not accessed. ``val`` must
    have exactly the indexed shape. ValueError for other shapes, TypeError for other arguments."""
    what = "pl.store"
    named = [options.pop(k) for k in ("idx", "val") if k in options]
    given = (*idx_and_val, *named)
    if not 1 <= len(given) <= 2:
        raise TypeError(f"{what}: expected (ref, idx, val) or (ref, val), got {1 + len(given)}")
    idx, val = given if len(given) == 2 else (..., given[0])
    view = _view(what, ref, idx, options)
    if mask is None:
        view[...] = val
    else:
        _store(view, val, _mask(what, mask, view))


def swap(ref, idx, val, *, mask=None, **options):
    """Store ``val`` to ``ref[idx]`` and return the previous value. With ``mask``, only elements
    whose mask is true are accessed, and the result is zero elsewhere. Not atomic."""
    what = "pl.swap"
    view = _view(what, ref, idx, options)
    if mask is None:
        return view.swap(val)
    mask = _mask(what, mask, view)
    old = _load(view, mask, False if view.dtype == bool else 0)
    _store(view, val, mask)
    return old


# ---- atomics -------------------------------------------------------------------------------------


def _atomic(kind, what, view, value, mask, compare=0):
    ref, by, mask = _place(view, True if mask is None else _mask(what, mask, view))
    compare = _value(f"{what}: the value to compare with", compare, view)
    return _core.atomic(kind, ref, _value(f"{what}: the value", value, view), mask, compare, *by)


def _with_index(kind, does):
    def atomic(ref, idx, val, *, mask=None):
        what = f"pl.atomic_{kind}"
        return _atomic(kind, what, _view(what, ref, idx, {}), val, mask)

    atomic.__name__ = atomic.__qualname__ = f"atomic_{kind}"
    atomic.__doc__ = f"""Atomically {does} each element of ``ref[idx]`` (GMEM or SMEM), and return
    an array of the previous values.

    ``val`` and ``mask`` (bool) broadcast. The ordering is relaxed, at the scope of everyone who can
    access the memory. Where the mask is false nothing is accessed and the result is undefined.
    NotImplementedError for dtypes for which the operation is not available.
    """
    return atomic


def _of_ref(kind, does):
    with_index = WITH_INDEX[f"atomic_{kind}"]

    @shown_as(lambda ref, val: None)
    def atomic(ref, val, *old, mask=None):
        what = f"atomic_{kind}"
        if len(old) == 1 or mask is not None:  # Triton's form: ref, idx, val
            return with_index(ref, *(val, *old) if old else (..., val), mask=mask)
        if old:
            raise TypeError(f"{what}: expected (ref, val) or (ref, idx, val, mask=)")
        if not isinstance(ref, (Ref, ClippedRef, IndexedRef)):
            raise TypeError(f"{what}: ref must be a ref, got {show(ref)}")
        value = val if isinstance(val, Array) else as_array(val, f"{what}: val")
        if value.shape != ref.shape:
            raise ValueError(
                f"{what}: val has shape {value.shape} and ref {ref.shape}; they must be equal"
            )
        _atomic(kind, what, ref, val, None)

    atomic.__name__ = atomic.__qualname__ = f"atomic_{kind}"
    atomic.__doc__ = f"""Atomically {does} each element of ``ref`` (GMEM or SMEM), without a result.

    ``val`` has the shape and dtype of ``ref`` (ValueError). The ordering is relaxed. The form
    ``(ref, idx, val, mask=)`` is that of ``pl.atomic_{kind}``, which returns the previous values.
    int32 and uint32 support all operations, float32 add, float16 and bfloat16 add, max and min;
    NotImplementedError for others.
    """
    return atomic


_DOES = {
    "add": "add to",
    "max": "take the maximum with",
    "min": "take the minimum with",
    "and": "and bits into",
    "or": "or bits into",
    "xor": "exclusive-or bits into",
    "xchg": "replace",
}
_KINDS = [kind for kind in _core.enum_names("ATOMIC") if kind != "cas"]  # which has two operands
WITH_INDEX = {f"atomic_{kind}": _with_index(kind, _DOES[kind]) for kind in _KINDS}
OF_REF = {f"atomic_{kind}": _of_ref(kind, _DOES[kind]) for kind in _KINDS if kind != "xchg"}


def atomic_cas(ref, idx, cmp, val, *, mask=None):
    """Atomically replace each element of ``ref[idx]`` whose bits equal those of ``cmp`` by ``val``,
    and return an array of the previous values. ``cmp``, ``val`` and ``mask`` broadcast. int32,
    uint32 and float32; NotImplementedError for others."""
    what = "pl.atomic_cas"
    return _atomic("cas", what, _view(what, ref, idx, {}), val, mask, cmp)
