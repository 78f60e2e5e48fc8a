"""CUDA source in kernels."""

from . import _core, tree
from ._names import show
from ._trace import Ref, as_array, env, type_text
from ._types import (
    GMEM,
    SMEM,
    Layout,
    RefType,
    ShapeDtypeStruct,
    _LayoutValue,
    layout_spec,
    split_transforms,
)


def _is_layout(x):
    return isinstance(x, (Layout, _LayoutValue))


def inline_cuda(source, *, arg_types=(), return_type=None):
    """A function of kernel bodies that runs statements of CUDA C++ (no interpreter).

    ``arg_types``: a pytree like the arguments, with ``plgpu.RefType(transforms)`` for a ref or a
    barrier and a ``plgpu.Layout`` for an array, which comes in it; ``Layout.WG_SPLAT`` for a
    scalar. ``return_type``: a pytree of ``plgpu.ShapeDtypeStruct(shape, dtype, layout)``, or None.

    The leaves of the arguments are ``a0``, ``a1`` ... in ``source``: of an array the registers of
    this lane, ``const T*``; a scalar's value; of a GMEM ref a pointer to its first element, of an
    SMEM ref and a barrier the 32-bit shared address. The result goes to ``r0[0]``, ``r0[1]`` ...,
    of several the second one to ``r1[0]`` and so on. All 128 lanes of the thread come there
    together, and meet before and behind. The text may use the device functions of generated
    programs. Never left out or moved.
    """
    what = "inline_cuda"
    if not isinstance(source, str) or "\0" in source:
        raise TypeError(f"{what}: source must be text without zero bytes, got {show(source)}")
    arg_types = (arg_types,) if _is_type(arg_types) else tuple(arg_types)
    types, structure = tree.flatten(arg_types, is_leaf=_is_type)
    for t in types:
        if not _is_type(t):
            raise ValueError(
                f"{what}: leaves of arg_types are plgpu.RefType or plgpu.Layout, got {show(t)}"
            )
    results, results_structure = tree.flatten(
        return_type, is_leaf=lambda x: isinstance(x, ShapeDtypeStruct)
    )
    for out in results:
        if not isinstance(out, ShapeDtypeStruct):
            raise ValueError(
                f"{what}: leaves of return_type are plgpu.ShapeDtypeStruct, got {show(out)}"
            )
        if out.shape and not _is_layout(out.layout):
            raise ValueError(f"{what}: return_type needs a layout, got {show(out.layout)}")

    def call(*args):
        env(what)
        leaves, given = tree.flatten(args)
        if given != structure:
            raise ValueError(
                f"{what}: the arguments have the structure {tree.describe(given)}, arg_types"
                f" {tree.describe(structure)}"
            )
        values = tuple(_argument(x, t, k) for k, (x, t) in enumerate(zip(leaves, types)))
        first, *others = [
            (out.shape, out.dtype, layout_spec(out.layout) if out.shape else None)
            for out in results or [ShapeDtypeStruct((), "int32")]
        ]
        given = [_core.inline_cuda(source, values, *first)]
        given += [_core.inline_result(*out) for out in others]
        return tree.unflatten(results_structure, given if results else [])

    return call


def _is_type(x):
    return isinstance(x, RefType) or _is_layout(x)


def _argument(x, t, k):
    what = f"inline_cuda: argument {k}"
    if isinstance(t, RefType):
        if not isinstance(x, Ref):
            raise ValueError(f"{what} must be a ref, as its RefType says, got {show(x)}")
        if x.dtype not in ("barrier", "semaphore"):
            tiling, swizzle = split_transforms(t.transforms, x.shape, x.dtype, what)
            if x.memory_space is SMEM:
                _core.fix_transforms(x, tiling, swizzle)
            elif x.memory_space is GMEM and t.transforms:
                raise ValueError(f"{what}: a GMEM ref has no transforms, got {t.transforms}")
        return x
    if isinstance(x, Ref):
        raise ValueError(f"{what} must be an array in the layout {t}, got {type_text(x)}")
    x = as_array(x, what)
    return _core.layout_cast(x, layout_spec(t)) if x.shape else x
