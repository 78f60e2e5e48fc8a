"""Mutable arrays on the host, and finding those that a function closes over.

A kernel's body may update arrays that it closes over. `closed_over` finds them: in the cells of its
closure and of functions in it, among the globals it names, in bound arguments, and in containers of
any of these. `rebound` makes a copy of the function with the kernel's refs in their places.
"""

import functools
import inspect
import types

import numpy as np

from . import _core, tree
from ._names import show
from ._trace import tracing
from ._types import GMEM


def _copied(x):
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "shape"):
        return np.array(x, copy=True, order="C")
    for name in ("clone", "copy"):  # PyTorch; CuPy, JAX
        if hasattr(x, name):
            return getattr(x, name)()
    if isinstance(x, _core.DeviceArray):
        return _core.device_put(x.numpy())
    raise TypeError(f"new_ref: expected an array, got {show(x)}")


class MutableArray:
    """An array on the host that kernels update in place. :func:`new_ref` makes it; it is passed to
    a kernel or closed over by its body. ``ref[...]`` is its value."""

    __slots__ = ("_value", "__weakref__")
    is_mutable_array = True
    made = False  # any, ever

    def __init__(self, value):
        self._value = value
        MutableArray.made = True

    shape = property(lambda self: tuple(self._value.shape))
    dtype = property(lambda self: self._value.dtype)
    ndim = property(lambda self: len(self.shape))
    memory_space = GMEM

    def _check(self):
        if tracing():
            raise ValueError(
                "a mutable array of the host cannot be used here: close over it directly in the"
                " body of the kernel, where the kernel's ref takes its place"
            )

    def __getitem__(self, index):
        self._check()
        part = self._value[index]
        return np.array(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value):
        self._check()
        self._value[index] = value

    def __repr__(self):
        return f"MutableArray({str(self.dtype).split('.')[-1]}{list(self.shape)})"


def kernel_dtype(r):
    """The NumPy dtype of a mutable array (PyTorch calls its own torch.float32). TypeError for 64
    bits, which kernels do not have."""
    name = str(r.dtype).split(".")[-1]
    dtype = _core.as_dtype(name)
    if name in ("int64", "uint64", "float64"):
        raise TypeError(
            f"a mutable array has dtype {name}, and kernels, which change it in place, have no"
            f" dtypes of 64 bits: cast it, for example new_ref(x.astype('{dtype}'))"
        )
    return dtype


def new_ref(x, *, memory_space=GMEM):
    """A mutable array that starts as a copy of ``x`` (NumPy, PyTorch, CuPy, JAX, DeviceArray), on
    the same device.

    Kernels update mutable arrays that are their arguments or that their bodies close over.
    ValueError for a memory space other than GMEM.
    """
    if memory_space not in (None, GMEM):
        raise ValueError(f"new_ref: the memory space must be plgpu.GMEM, got {show(memory_space)}")
    return MutableArray(_copied(x))


def freeze(ref):
    """The value of a mutable array, which must not be used afterwards. TypeError for other
    objects."""
    if not isinstance(ref, MutableArray):
        raise TypeError(f"freeze: expected what new_ref makes, got {show(ref)}")
    return ref._value


# ---- closures ------------------------------------------------------------------------------------


class _Rebuilder:
    """Finds the mutable arrays that a function can reach, and copies the function with replacements
    (``put``, by identity)."""

    def __init__(self, put=None):
        self.found, self.put = [], put
        self.done = {}  # by id of a function: what it became

    def value(self, x):
        if isinstance(x, MutableArray):
            if self.put is not None:
                return self.put[id(x)]
            if not any(x is y for y in self.found):
                self.found.append(x)
            return x
        if isinstance(x, types.FunctionType):
            return self.function(x)
        if isinstance(x, functools.partial):
            args = [self.value(a) for a in x.args]
            keywords = {k: self.value(v) for k, v in x.keywords.items()}
            return functools.partial(self.value(x.func), *args, **keywords)
        if type(x) in (tuple, list):
            return type(x)(self.value(y) for y in x)
        if type(x) is dict:
            return {k: self.value(v) for k, v in x.items()}
        return x

    def function(self, f):
        if id(f) in self.done or (f.__module__ or "").split(".")[0] == __package__:
            return self.done.get(id(f), f)
        cells = [types.CellType() for _ in f.__closure__ or ()]
        spaces = {k: v for k, v in f.__globals__.items() if isinstance(v, MutableArray)}
        names = spaces.keys() & _names_of(f.__code__)
        space = f.__globals__
        if names:
            space = {**space, **{k: self.value(spaces[k]) for k in sorted(names)}}
        out = types.FunctionType(f.__code__, space, f.__name__, f.__defaults__, tuple(cells))
        out.__kwdefaults__, out.__qualname__ = f.__kwdefaults__, f.__qualname__
        self.done[id(f)] = out
        for new, old in zip(cells, f.__closure__ or ()):
            try:
                new.cell_contents = self.value(old.cell_contents)
            except ValueError:  # an empty cell: a name that is not bound yet
                pass
        if out.__defaults__:
            out.__defaults__ = tuple(self.value(x) for x in out.__defaults__)
        return out


def _names_of(code):
    """Global names in a code object and in nested ones."""
    names = set(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            names |= _names_of(c)
    return names


def names_of(f, arrays):
    """The variables of a function that hold these arrays; "ref" for those in others or deeper."""
    while isinstance(f, functools.partial):
        f = f.func
    found = inspect.getclosurevars(f) if inspect.isfunction(f) else None
    values = {**found.globals, **found.nonlocals} if found else {}
    names = {id(value): name for name, value in values.items()}
    return [names.get(id(x), "ref") for x in arrays]


def closed_over(f):
    """The mutable arrays that a function can reach."""
    if not MutableArray.made:
        return []
    finder = _Rebuilder()
    finder.value(f)
    return finder.found


def rebound(f, arrays, refs):
    """``f`` with refs in place of the mutable arrays that it can reach."""
    put = {id(array): ref for array, ref in zip(arrays, refs)}
    return _Rebuilder(put).value(f) if put else f


def run_state_on_host(f):
    """The host side of :func:`pl.run_state`."""

    def inner(state):
        leaves, structure = tree.flatten(state)
        refs = [new_ref(x) for x in leaves]
        if f(tree.unflatten(structure, refs)) is not None:
            raise ValueError("run_state: the function must return None")
        return tree.unflatten(structure, [freeze(r) for r in refs])

    return inner
