"""The environment of a trace: which axes are bound, and helpers on traced values.

One `Env` per kernel being traced, on a stack of the thread. The op graph itself is built by
`_core.Trace`; this module only knows names.
"""

import functools
import threading

from . import _core, tree

Array, Ref = _core.Array, _core.Ref


class Env:
    """Axes of the kernel being traced: name -> (family, index in the family, size)."""

    __slots__ = ("axes", "grid", "n_threads", "thread_name", "cluster_names")

    def __init__(self, mesh):
        self.axes = {}
        for k, (name, size) in enumerate(zip(mesh.grid_names, mesh.grid)):
            self.axes[name] = ("grid", k, size)
        for k, (name, size) in enumerate(zip(mesh.cluster_names, mesh.cluster)):
            self.axes[name] = ("cluster", k, size)
        if mesh.thread_name is not None:
            self.axes[mesh.thread_name] = ("thread", 0, mesh.num_threads)
        self.grid = mesh.grid
        self.n_threads = mesh.num_threads or 1
        self.thread_name = mesh.thread_name
        self.cluster_names = mesh.cluster_names


class _Stack(threading.local):
    def __init__(self):
        self.envs = []


_stack = _Stack()


def push(env):
    _stack.envs.append(env)


def pop():
    _stack.envs.pop()


def env(what):
    """The innermost environment; RuntimeError outside a kernel."""
    if not _stack.envs:
        raise RuntimeError(f"{what} can only be used inside the body of a kernel")
    return _stack.envs[-1]


def tracing():
    """Is a kernel being traced by this thread?"""
    return bool(_stack.envs)


def as_values(leaves, what):
    """Carry leaves as traced values; refs stay as they are."""
    out = []
    for x in leaves:
        if isinstance(x, (Array, Ref)):
            out.append(x)
            continue
        try:
            out.append(_core.as_array(x))
        except TypeError:
            raise TypeError(f"{what}: {x!r} is not an array, a number or a ref") from None
    return out


def parameter_names(f):
    """Names of the positional parameters of a function; empty where they are not known."""
    skip = 0
    while isinstance(f, functools.partial):
        skip += len(f.args)
        f = f.func
    code = getattr(f, "__code__", None)
    if code is None:
        return ()
    if hasattr(f, "__self__"):
        skip += 1
    return code.co_varnames[skip : code.co_argcount]


class Leaves:
    """A pytree split into arrays (which a region carries) and constants (refs, which it must not
    change)."""

    __slots__ = ("structure", "values")

    def __init__(self, x, what):
        leaves, self.structure = tree.flatten(x)
        self.values = as_values(leaves, what)

    def arrays(self):
        return [v for v in self.values if not isinstance(v, Ref)]

    def rebuild(self, arrays):
        """The pytree with its arrays replaced."""
        it = iter(arrays)
        return tree.unflatten(
            self.structure, [v if isinstance(v, Ref) else next(it) for v in self.values]
        )


def type_text(x):
    if isinstance(x, Ref):
        return f"Ref({x.memory_space}, {x.dtype}{list(x.shape)})"
    weak = " (weak)" if x.weak_type else ""
    return f"{x.dtype}{list(x.shape)}{weak}"


def same_type(a, b):
    if isinstance(a, Ref) or isinstance(b, Ref):
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape
