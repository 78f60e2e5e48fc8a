"""The environment of a trace: which axes are bound, and helpers on traced values.

One `Env` per kernel being traced, on a stack of the thread. The op graph itself is built by
`_core.Trace`; this module only knows names.
"""

import ast
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import textwrap
import threading

from . import _core, tree
from ._names import explain_keyword, show

Array, Ref = _core.Array, _core.Ref
_PACKAGE = os.path.dirname(__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = "/site-packages/jax/", "/site-packages/torch/"  # as in csrc/python/place.c


class Env:
    """Axes of the kernel being traced: name -> (kind, index among its kind, size).

    ``leading`` axes, of `vmap`, stand in front of the grid that the body sees. ``programs``: in a
    `pallas_call` the indices along its grid, some of which are those of a loop; else None.
    ``poisons``: if allocations are filled with poison, who meets after that, "block" or
    "cluster"."""

    __slots__ = (
        "axes",
        "grid",
        "leading",
        "programs",
        "n_threads",
        "thread_name",
        "cluster_names",
        "counters",
        "has_tmem",
        "cancels",
        "rounds",
        "semaphores",
        "unions",
        "held",
        "scopes",
        "blocks",
        "poisons",
        "sizes",
    )

    def __init__(self, mesh, leading=0, devices=()):
        self.axes = {}
        self.sizes = None  # those of a call: a _sizes.Table
        self.leading, self.programs, self.poisons = leading, None, None
        for k, (name, size) in enumerate(zip(mesh.grid_names, mesh.grid)):
            self.axes[name] = ("grid", leading + k, size)
        for k, (name, size) in enumerate(zip(mesh.cluster_names, mesh.cluster)):
            self.axes[name] = ("cluster", k, size)
        for k, (name, size) in enumerate(devices):
            self.axes[name] = ("device", k, size)
        self.blocks = None  # sizes of the launch, if semaphores of blocks have to be in GMEM
        if mesh.thread_name is not None:
            self.axes[mesh.thread_name] = ("thread", 0, mesh.num_threads)
        self.grid = mesh.grid
        self.n_threads = mesh.num_threads or 1
        self.unions = 0  # allocated so far
        self.has_tmem = False  # some was allocated: the kernel is for Blackwell
        self.scopes = None  # named ones, if somebody wants to know: {name: number}
        self.held = []  # refs of run_state to arrays in registers
        self.cancels = False  # uses cluster launch control
        self.counters = 0  # of the launch, given out to loops
        self.rounds = None  # of dynamic loops in loops; see _schedule.py
        self.semaphores = 0  # of the launch, given out by get_global
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


def scope_names():
    """{name: number} of the named scopes so far; None where they are not recorded."""
    return _stack.envs[-1].scopes if _stack.envs else None


def tracing():
    """Is a kernel being traced by this thread?"""
    return bool(_stack.envs)


def block_number(grid, cluster):
    """The number of this block in the launch, row-major."""
    block = 0
    for kind, sizes in (("grid", grid), ("cluster", cluster)):
        for k, size in enumerate(sizes):
            block = block * size + _core.axis_index(kind, k)
    return block


def _is_users(file):
    return not file.startswith(_PACKAGE) and not any(part in file for part in _LIBRARIES)


def _explained(e):
    """What Python or another library says of something of this package; None: of nothing of it."""
    text = e.args[0]
    found = explain_keyword(text) if isinstance(e, TypeError) else None
    unbound = "unbound axis name" in text  # jax.lax.axis_index of an axis of the kernel
    if found is not None or __package__ not in text and not unbound:
        return found
    if unbound or re.search(
        "jax|torch|Tensor|ndarray", text, re.I
    ):  # a function of theirs in a body
        text += (
            "\n  inside a kernel use the functions of pallas_mgpu.numpy, lax and nn, and pass"
            " arrays of JAX and PyTorch as operands"
        )
    return text


def add_place(e):
    """Append the user's line to the text of an exception that this package raised (or the
    standard library below it)."""
    user, inner = None, False
    tb = e.__traceback__
    while tb:
        file = tb.tb_frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            inner = True
        elif _is_users(file) and not (
            inner and file.startswith(_STDLIB) and "-packages" not in file
        ):
            user, inner = tb, False
        tb = tb.tb_next
    if len(e.args) != 1 or not isinstance(e.args[0], str):
        return
    if not inner:  # raised by Python itself: is it about something of this package?
        explained = _explained(e)
        if explained is None:
            return
        e.args = (explained,)
    frame, line = (user.tb_frame, user.tb_lineno) if user else (sys._getframe(), 0)
    while frame and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
        line = frame.f_lineno if frame else 0
    if frame and "\n  at " not in e.args[0]:
        file = frame.f_code.co_filename
        source = linecache.getline(file, line).strip()
        e.args = (f"{e.args[0]}\n  at {file}:{line}{': ' if source else ''}{source}",)


def as_array(x, what):
    """A traced value of an array or a number; TypeError for anything else, and OverflowError for an
    int that does not fit int32."""
    env(what)
    try:
        return _core.as_array(x)
    except TypeError:
        raise TypeError(f"{what}: expected an array or a number, got {show(x)}") from None
    except OverflowError as e:
        raise OverflowError(f"{what}: {e}") from None


def as_bools(x, what, kind="bool scalar", hint=""):
    """A traced bool scalar, or another kind of bool array; TypeError for anything else."""
    try:
        value = as_array(x, what)
    except OverflowError:
        raise TypeError(f"{what} must be a {kind}, got {show(x)}{hint}") from None
    if value.dtype != bool or kind == "bool scalar" and value.shape != ():
        raise TypeError(f"{what} must be a {kind}, got {type_text(value)}{hint}")
    return value


def check_arity(f, what, gets, n, keyword=()):
    """TypeError unless ``f`` can be called with ``n`` positional arguments and some by keyword.
    ``gets`` says what they are."""
    if not callable(f):
        raise TypeError(f"{what} must be callable, got {show(f)}")
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return  # not known: the call itself tells
    try:
        signature.bind(*[None] * n, **dict.fromkeys(keyword))
    except TypeError as e:
        code = getattr(inspect.unwrap(f), "__code__", None)
        at = f"\n  at {code.co_filename}:{code.co_firstlineno}" if code else ""
        name = getattr(f, "__name__", type(f).__name__)
        raise TypeError(f"{what} is {name}{signature}, and it gets {gets}: {e}{at}") from None


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
            raise TypeError(f"{what}: {show(x)} is not an array, a number or a ref") from None
        except OverflowError as e:
            raise OverflowError(f"{what}: {e}") from None
    return out


def first_line(f):
    """File and line where a function begins, with its decorators; None: it is not of Python. A
    function that calls another one says which: ``inner``."""
    f = getattr(f, "inner", f)
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    return code and (code.co_filename, code.co_firstlineno)


def parameter_names(f, count=0):
    """Names of the positional parameters of a function; empty where they are not known. Parameters
    ``*refs`` have the names refs_0, refs_1 and so on, ``count`` names in all. A function that calls
    another one says what it passes on: ``parameters``."""
    if hasattr(f, "parameters"):
        return f.parameters
    skip, g = 0, f
    while isinstance(g, functools.partial):
        skip += len(g.args)
        g = g.func
    code = getattr(g, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return _signature_names(f, count)
    if hasattr(g, "__self__"):
        skip += 1
    return code.co_varnames[skip : code.co_argcount]


def _signature_names(f, count):
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return ()
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    names += [f"{rest}_{k}" for k in range(count - len(names))] if rest else []
    return tuple(names)


@functools.lru_cache(maxsize=1024)
def _unpacked(code, parameter):
    """The targets, ``(a, (b, c))``, to which a function assigns its parameter; None if it does not,
    or its source is not known."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    while lines and lines[0].lstrip().startswith("@"):
        del lines[0]
    if not lines or not lines[0].lstrip().startswith("def "):
        return None
    depth = len(lines[0]) - len(lines[0].lstrip())
    head = sum(1 for _ in itertools.takewhile(lambda s: not s.rstrip().endswith(":"), lines)) + 1
    inside = (k for k, s in enumerate(lines) if k >= head and s.strip())
    end = next((k for k in inside if not lines[k][: depth + 1].isspace()), len(lines))
    try:
        (function,) = ast.parse(textwrap.dedent("".join(lines[:end]))).body
    except (SyntaxError, ValueError):  # texts over several lines that begin further left
        return None
    pairs = [(s.targets[0], s.value) for s in function.body if isinstance(s, ast.Assign)]
    while pairs:
        target, value = pairs.pop(0)
        if isinstance(value, ast.Name) and value.id == parameter:
            return target
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts), *pairs]
    return None


def _target_names(target, s):
    """Of the leaves of a structure that is assigned to a target of a statement."""
    if s != tree.LEAF and isinstance(target, ast.Tuple) and len(target.elts) == len(s[2]):
        names = [_target_names(x, part) for x, part in zip(target.elts, s[2])]
        return [name for some in names for name in some]
    name = target.id if isinstance(target, ast.Name) else None
    return [found or name for found in tree.leaf_names(s)]


def carry_names(f, k, leaves):
    """What a function calls the arrays of its k-th parameter, which are these leaves: the targets
    of a statement ``a, b = carry``, the fields of named tuples and keys of dicts, or the name of
    the parameter, if it is one array. None elsewhere."""
    parameters = parameter_names(f)
    if k >= len(parameters):
        return leaves.names()
    while isinstance(f, functools.partial):
        f = f.func
    if leaves.structure == tree.LEAF:
        names = parameters[k : k + 1]
    else:
        code = getattr(f, "__code__", None)
        names = _target_names(code and _unpacked(code, parameters[k]), leaves.structure)
    return [name for v, name in zip(leaves.values, names) if not isinstance(v, Ref)]


class Leaves:
    """A pytree split into arrays (which a region carries) and constants (refs, which it must not
    change)."""

    __slots__ = ("structure", "values")

    def __init__(self, x, what):
        leaves, self.structure = tree.flatten(x)
        self.values = as_values(leaves, what)

    def arrays(self):
        return [v for v in self.values if not isinstance(v, Ref)]

    def names(self):
        """Of the arrays, in containers with names; None elsewhere."""
        names = zip(self.values, tree.leaf_names(self.structure))
        return [name for v, name in names if not isinstance(v, Ref)]

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
