"""CUDA source in kernels, and Python functions that replace it on the interpreter."""

import numpy as np

from . import _core, tree
from ._names import later, show
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

_HostSource = later("_inline_host", "HostSource")


def _is_layout(x):
    return isinstance(x, (Layout, _LayoutValue))


class _Barrier:
    """A barrier argument of a Python function that replaces CUDA source."""

    def __init__(self):
        self.arrivals = 0

    def arrive(self):
        """One arrival."""
        self.arrivals += 1


class _Interpreted:
    """One use of a source in a kernel: calls its replacement with NumPy arrays."""

    def __init__(self, function, args, structure, results, results_structure):
        self.function, self.structure, self.results_structure = (
            function,
            structure,
            results_structure,
        )
        self.args = [None if _is_barrier(x) else (tuple(x.shape), x.dtype) for x in args]
        self.is_ref = [isinstance(x, Ref) for x in args]
        self.results = [(tuple(x.shape), np.dtype(x.dtype)) for x in results]

    def __call__(self, memory, where, places):
        given = [
            _Barrier() if of is None else np.frombuffer(m, of[1]).reshape(of[0])
            for m, of in zip(memory, self.args)
        ]
        scalars = [not r and x.ndim == 0 for r, x in zip(self.is_ref, given)]
        given = [x[()] if s else x for s, x in zip(scalars, given)]
        found = self.function(*tree.unflatten(self.structure, given))
        leaves, structure = tree.flatten(found)
        if structure != self.results_structure:
            raise ValueError(
                f"inline_cuda: interpret returned the structure {tree.describe(structure)},"
                f" return_type has {tree.describe(self.results_structure)}"
            )
        # without results there is one that nobody uses
        for k, (x, m, (shape, dtype)) in enumerate(zip(leaves, memory[len(given) :], self.results)):
            x = np.asarray(x)
            if x.shape != shape:
                raise ValueError(
                    f"inline_cuda: result {k} of interpret has the shape {x.shape}, return_type"
                    f" {shape}"
                )
            np.frombuffer(m, dtype).reshape(shape)[...] = x.astype(dtype, copy=False)
        return [x.arrivals if isinstance(x, _Barrier) else 0 for x in given]


def _is_barrier(x):
    return isinstance(x, Ref) and x.dtype in ("barrier", "semaphore")


def inline_cuda(source, *, arg_types=(), return_type=None, interpret=None):
    """Turn statements of CUDA C++ into a function for kernel bodies.

    ``arg_types``: a pytree like the arguments. A ref or a barrier is described by
    ``plgpu.RefType(transforms)``, an array by the ``plgpu.Layout`` in which it is passed, a scalar
    by ``Layout.WG_SPLAT``. ``return_type``: a pytree of ``plgpu.ShapeDtypeStruct(shape, dtype,
    layout)``, or None.

    The source names the flattened arguments ``a0``, ``a1`` and so on. An array is a pointer to the
    registers of this lane, ``const T*``; a scalar is its value; a GMEM ref is a pointer to its
    first element; an SMEM ref or a barrier is its 32-bit shared address. The source writes the
    first result to ``r0[0]``, ``r0[1]`` ..., the second to ``r1[0]`` and so on. All 128 lanes of
    the thread execute it; if a ref or a barrier is among the arguments, they synchronise before and
    after it. It may use the device functions of generated programs. The compiler neither removes
    nor moves it.

    ``interpret``: a Python function that replaces the source on the interpreter. It gets NumPy
    arrays of the full shapes, NumPy scalars, arrays that it modifies in place for refs (read-only
    for operands) and objects with ``arrive()`` for barriers, and returns NumPy arrays for
    ``return_type``. It is called once for each Pallas thread, or in a warp_map for each warp.
    Without it, a source of plain C++ and device functions of a single lane is compiled with a C++
    compiler, if one is found, and runs lane by lane. Everything else raises NotImplementedError on
    the interpreter: PTX, functions of several lanes, SMEM with transforms, no compiler.
    """
    what = "inline_cuda"
    if not isinstance(source, str) or "\0" in source:
        raise TypeError(f"{what}: source must be text without zero bytes, got {show(source)}")
    if interpret is not None and not callable(interpret):
        raise TypeError(f"{what}: interpret must be a function or None, got {show(interpret)}")
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
        if interpret:
            stands = _Interpreted(interpret, values, structure, results, results_structure)
        else:
            stands = _host_source(source, values, types, results)
        first, *others = [
            (out.shape, out.dtype, layout_spec(out.layout) if out.shape else None)
            for out in results or [ShapeDtypeStruct((), "int32")]
        ]
        given = [_core.inline_cuda(source, values, *first, stands)]
        given += [_core.inline_result(*out) for out in others]
        return tree.unflatten(results_structure, given if results else [])

    return call


def _host_source(source, values, types, results):
    """The object that runs the source as C++ on the interpreter, or explains why it cannot."""
    operands, why_not = [], None
    for k, (x, t) in enumerate(zip(values, types)):
        layout = None
        if _is_barrier(x):
            kind, why_not = "barrier", why_not or (x.shape and f"argument {k} is several barriers")
        elif isinstance(x, Ref):
            kind = "smem" if x.memory_space is SMEM else "gmem"
            if t.transforms:
                why_not = f"argument {k} is shared memory with transforms"
        else:
            kind = "array" if x.shape else "scalar"
            layout = layout_spec(t) if x.shape else None
        operands.append((kind, tuple(x.shape), str(x.dtype), layout))
    outs = [
        (tuple(x.shape), np.dtype(x.dtype).name, layout_spec(x.layout) if x.shape else None)
        for x in results
    ] or [((), "int32", None)]
    return _HostSource(source, operands, outs, why_not or None)


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
