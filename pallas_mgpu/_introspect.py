"""What kernels and families say about themselves: signature, names and documentation of the body,
repr, and how they are pickled."""

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping

from . import tree
from ._types import SMEM, MemoryRef, RefUnion, itemsize_bits

_COPIED = "__doc__", "__module__", "__qualname__"
_KEYWORDS = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    for name in ("out", "stream")
)
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def dress(kernel, body):
    """Give a kernel the names and the docstring of its body."""
    kernel.__wrapped__ = body
    while isinstance(body, functools.partial):
        body = body.func
    for name in _COPIED:
        value = getattr(body, name, None)
        if value is not None or name == "__doc__":
            setattr(kernel, name, value)
    return kernel


def signature(definition):
    """Of a call: the operands among the parameters of the body, then ``out=`` and ``stream=``."""
    found = inspect.signature(definition.body)
    scratch = definition.scratch
    named = set(scratch) if not isinstance(scratch, (tuple, list)) else set()
    parameters = [p for name, p in found.parameters.items() if name not in named]
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    if not rest:
        n = len(definition.out_structure[2]) + (0 if named else len(scratch))
        positional = positional[: max(len(positional) - n, 0)]
    operands = [p.replace(kind=p.POSITIONAL_ONLY) for p in positional]
    return inspect.Signature([*operands, *rest, *_KEYWORDS])


def scratch_names(definition):
    """Names of the scratch arguments of the body; None for those behind ``*refs``."""
    scratch = definition.scratch
    if isinstance(scratch, Mapping):
        return list(scratch)
    try:
        parameters = inspect.signature(definition.body).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    if len(names) < len(scratch) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return [None] * len(scratch)
    return names[len(names) - len(scratch) :]


# ---- repr ----------------------------------------------------------------------------------------


def _array(x):
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _axes(what, sizes, names):
    named = f" ({', '.join(map(str, names))})" if names else ""
    return f"{what} {' x '.join(map(str, sizes))}{named}"


def _smem_bytes(x):
    """Of a scratch descriptor; 0 for what is none of SMEM."""
    if isinstance(x, RefUnion):
        return max(_scratch_bytes(group) for group in x.groups)
    if not isinstance(x, MemoryRef) or x.memory_space is not SMEM:
        return 0
    return x.size * itemsize_bits(x.dtype) // 8


def _scratch_bytes(scratch):
    scratch = dict(scratch) if isinstance(scratch, Mapping) else scratch
    return sum(map(_smem_bytes, tree.leaves(scratch)))


def describe(definition):
    """The repr of a kernel."""
    mesh = definition.mesh
    try:
        operands = [
            str(p) for p in signature(definition).parameters.values() if p.default is p.empty
        ]
    except (TypeError, ValueError):
        operands = ["..."]
    outs = [_array(o) for o in definition.outs]
    result = outs[0] if definition.wrapped and len(outs) == 1 else f"({', '.join(outs)})"
    parts = [f"{definition.name}({', '.join(x for x in operands if x != '/')}) -> {result}"]
    grid = getattr(definition, "grid", mesh.grid)
    if grid:
        parts.append(_axes("grid", grid, getattr(definition, "grid_names", mesh.grid_names)))
    if mesh.cluster:
        parts.append(_axes("cluster", mesh.cluster, mesh.cluster_names))
    if mesh.num_threads:
        parts.append(f"{mesh.num_threads} threads ({mesh.thread_name})")
    smem = _scratch_bytes(definition.scratch)
    if smem:
        parts.append(f"{smem} bytes of SMEM as scratch")
    if definition.interpret:
        parts.append("interpreted")
    return f"<pallas_mgpu kernel {', '.join(parts)}>"


# ---- pickling ------------------------------------------------------------------------------------


def find(module, name):
    """The object with a dotted name in a module."""
    x = importlib.import_module(module)
    for part in name.split("."):
        x = getattr(x, part)
    return x


def _place(x):
    """(module, name) under which an object is found, or None."""
    module = sys.modules.get(str(getattr(x, "__module__", None)))
    name = getattr(x, "__qualname__", "")
    try:
        if module is not None and find(module.__name__, name) is x:
            return module.__name__, name
    except (AttributeError, ImportError, ValueError):
        pass
    for m in [module, *list(sys.modules.values())]:
        for name, value in list(getattr(m, "__dict__", {}).items()):
            if value is x:
                return m.__name__, name
    return None


def reduce(x):
    """For ``__reduce__``: pickle by name, as for functions."""
    place = _place(x)
    if place is None:
        raise TypeError(
            f"cannot pickle {x!r}: kernels are pickled by the name that they have in a module, and"
            " no module has this one; make it in each process"
        )
    return find, place
