"""The implementation of pallas_mgpu.testing and of pytest_plugin.py."""

import contextlib
import copy
import functools
import importlib
import io
import operator
import os
import pickle
import re
import sys
import warnings
from pathlib import Path

import numpy as np

from . import tree
from ._core import RaceError, ScheduleError, cache_dir, device_put
from ._mutable import MutableArray, new_ref
from ._names import accepts, show
from ._types import InterpretParams

# by dtype: what rounding in a few places makes of a result
_RTOL = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


class _Schedules(InterpretParams):
    """Equal to itself alone: what is made for it is traced and lowered once, while the seed, which
    a run reads when it begins, changes."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def at(self, seed):
        self._set(seed=seed)


def _runner(kernel, params):
    """A function of arguments."""
    definition = getattr(kernel, "definition", None)
    if getattr(kernel, "closed", None):
        raise TypeError("check: the kernel closes over mutable arrays; pass them as arguments")
    if definition is None:
        return lambda *args: kernel(*args, interpret=params)
    other = copy.copy(definition)
    other.interpret, other.batched = params, {}
    return other.make()


def _host(x):
    return x.numpy() if hasattr(x, "numpy") and not isinstance(x, np.ndarray) else np.asarray(x)


def _attempt(run, args):
    """Leaves of the result, and of the mutable arrays among the arguments."""
    __tracebackhide__ = True
    args = tree.map(lambda x: new_ref(x._value) if isinstance(x, MutableArray) else x, args)
    result = run(*args)
    changed = [x[...] for x in tree.leaves(args) if isinstance(x, MutableArray)]
    return result, [_host(x) for x in [*tree.leaves(result), *changed]]


def _same(first, got, seed, other):
    __tracebackhide__ = True
    for k, (x, y) in enumerate(zip(first, got, strict=True)):
        if x.tobytes() == y.tobytes():
            continue
        bits = [np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, -1) for a in (x, y)]
        wrong = np.argwhere((bits[0] != bits[1]).any(-1))
        at = tuple(int(i) for i in wrong[0])
        raise ScheduleError(
            f"the result depends on the schedule: result {k} differs in {len(wrong)} of {x.size}"
            f" elements between seeds {seed} and {other}, the first at {list(at)}: {x[at]} and"
            f" {y[at]}"
        )


def _close(got, ref, args, rtol, atol):
    __tracebackhide__ = True
    want = ref(*args) if callable(ref) else ref
    leaves = [_host(x) for x in tree.leaves(want)]
    if len(leaves) != len(got):
        raise ValueError(f"check: ref has {len(leaves)} arrays, the kernel {len(got)} results")
    for k, (x, y) in enumerate(zip(got, leaves)):
        default = _RTOL.get(str(x.dtype), 0)
        limit = default if rtol is None else rtol
        wide = np.float64 if default or x.dtype.kind == "f" else x.dtype
        np.testing.assert_allclose(
            x.astype(wide),
            y.astype(wide),
            rtol=limit,
            atol=limit if atol is None else atol,
            err_msg=f"result {k}",
        )


def _name(kernel, frame):
    """What the caller calls it; None: it has no name there."""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in names.items():
            if value is kernel and name.isidentifier() and name[0] != "_":
                return name
    own = getattr(kernel, "__name__", "")
    ops = importlib.import_module(".ops", __package__)
    return f"plgpu.ops.{own}" if getattr(ops, own, None) is kernel else None


_failed = None  # (kernel, arguments, ref, tolerances) of the latest failure
_MOST_KEPT = 1 << 28  # bytes of arguments


def _kept_at(kernel):
    """The file of the latest failure of a kernel of this name; None: there is no cache."""
    body = getattr(getattr(kernel, "definition", None), "body", kernel)
    while isinstance(body, functools.partial):
        body = body.func
    file = getattr(getattr(body, "__code__", None), "co_filename", "")
    stem = Path(file).stem if os.path.isfile(file) else ""
    name = re.sub(r"[^\w.]+", "-", f"{stem}.{getattr(body, '__qualname__', 'kernel')}")
    found = cache_dir()
    return Path(found[0]) / "failures" / f"{name}.pickle" if found else None


def _keep(kernel, args, ref, tolerances):
    """For another process, if that is possible."""
    try:
        kept = tree.map(_plain, args)
        want = ref(*args) if callable(ref) else ref
        want = None if want is None else [_host(x) for x in tree.leaves(want)]
        size = sum(getattr(x, "nbytes", 0) for x in tree.leaves((kept, want)))
        path = _kept_at(kernel)
        if path is None or size > _MOST_KEPT:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps((kept, want, tolerances)))
        part.replace(path)
    except Exception:  # what the caller shall see is the failure of the kernel
        return


class _Mutable:
    """A mutable array in the file."""

    def __init__(self, x):
        self.value, self.nbytes = _host(x), _host(x).nbytes


def _plain(x):
    if isinstance(x, MutableArray):
        return _Mutable(x._value)
    return _host(x) if hasattr(x, "shape") else x


def _kept(kernel):
    """(kernel, arguments, ref, tolerances) of the latest failure."""
    if _failed is not None and (kernel is ... or _failed[0] is kernel):
        return _failed
    path = None if kernel is ... else _kept_at(kernel)
    if path is None or not path.exists():
        raise ValueError("check: ... repeats the latest failure, and this kernel has none")
    args, want, tolerances = pickle.loads(path.read_bytes())
    args = tree.map(lambda x: new_ref(x.value) if isinstance(x, _Mutable) else x, args)
    return kernel, args, want, tolerances


_BACKENDS = ("interpret", "emulate", "cuda")


@contextlib.contextmanager
def _missing_is_an_error():
    """RaceError for what lowering warns of: a fence or a wait that is missing on every path."""
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="missing synchronisation")

        def show_or_raise(message, category, filename, lineno, file=None, line=None):
            if str(message).startswith("missing synchronisation"):
                raise RaceError(f"{message}\n  at {filename}:{lineno}")
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show_or_raise
        yield


def _chosen(backends, who="check"):
    """Names of backends; ValueError for others, or none."""
    names = (backends,) if isinstance(backends, str) else backends
    if not isinstance(names, (tuple, list)):
        raise TypeError(f"{who}: backends are some of {_BACKENDS}, got {show(backends)}")
    for name in names or (None,):
        if name not in _BACKENDS:
            raise ValueError(f"{who}: backends are some of {_BACKENDS}, got {show(backends)}")
    return tuple(names)


def seeds_of(seeds, who="check"):
    """The seeds of that many schedules, or these seeds."""
    if isinstance(seeds, range):
        numbers = seeds
    elif hasattr(seeds, "__index__") and np.ndim(seeds) == 0:
        numbers = range(operator.index(seeds))
    else:
        try:
            numbers = tuple(map(operator.index, seeds))
        except TypeError:
            raise TypeError(f"{who}: seeds must be an int or ints, got {show(seeds)}") from None
    if not numbers:
        raise ValueError(f"{who}: seeds must be at least 1, got {show(seeds)}")
    return numbers


@accepts()
def check(kernel, *args, ref=None, seeds=20, backends="interpret", rtol=None, atol=None):
    """Run a kernel under many schedules, with ``detect_races`` and ``detect_uninitialized``;
    returns its result under the first.

    ``kernel``: what :func:`plgpu.kernel` or ``pl.pallas_call`` returns, or a function that takes
    ``interpret=``, such as those of ``plgpu.ops``. ``args``: its arguments; mutable arrays among
    them are copied. ``ref``: the expected result, or a function of the same arguments that returns
    it. ``rtol``, ``atol``: tolerances against ``ref``; by default 1e-5 for float32, 2e-3 for
    float16, 2e-2 for bfloat16 and 0 for others. ``seeds``: the number of schedules, or their seeds.
    ``backends``: "interpret", "emulate" (the generated program on the emulated machine, which needs
    g++ 12 or later), "cuda" (a GPU, twice, with no checks but those of the results), or some of
    them in a tuple.

    Raises :class:`RaceError` for a fence or a wait that is missing on every path of a thread, of
    which other calls only warn; whatever a run raises (:class:`RaceError`,
    :class:`UninitializedError`, :class:`DeadlockError`, ...); :class:`ScheduleError` if two
    schedules give other bits, and AssertionError if the result differs from ``ref``. In each case
    it prints one line: a call that repeats the failure, in the same process. There ``...`` stands
    for the arguments, ``ref`` and the tolerances of the latest failure, which must be of the same
    kernel (ValueError); for the kernel, too, if the caller has no variable of it.
    """
    global _failed
    __tracebackhide__ = True
    if kernel is ... or len(args) == 1 and args[0] is ...:
        if kernel is ... and args:
            raise TypeError("check: ... in place of the kernel stands for its arguments, too")
        kernel, args, ref, (rtol, atol) = _kept(kernel)
    numbers = seeds_of(seeds)
    caller = sys._getframe(2)  # 1 is that of accepts()

    def repeat(backend, again):
        global _failed
        _failed = kernel, args, ref, (rtol, atol)
        _keep(*_failed)
        where = "" if backend == "interpret" else f", backends={backend!r}"
        name = _name(kernel, caller)
        what = f"{name}, ..." if name else "..."
        return f"plgpu.testing.check({what}, seeds={again}{where})"

    result = None
    for number, backend in enumerate(_chosen(backends)):
        at = _Checked(kernel, args, backend, prints=number == 0)
        latest = at.run(numbers, ref, (rtol, atol), functools.partial(repeat, backend))
        result = latest if number == 0 else result
    return result


class _Checked:
    """A kernel with arguments, on one backend. ``prints``: shows what it prints, once."""

    def __init__(self, kernel, args, backend, prints=True):
        self.args, self.backend, self.prints = args, backend, prints
        self.params = None
        if backend != "cuda":
            self.params = _Schedules(
                detect_races=True, detect_uninitialized=True, mode="reference", backend=backend
            )
        self.call = _runner(kernel, self.params)

    def run(self, seeds, ref, tolerances, repeat):
        """The result under the first seed. repeat(seeds): what repeats a failure, one line."""
        __tracebackhide__ = True
        first, result, args = None, None, self.args
        if self.backend == "cuda":
            seeds = list(seeds)[:2]  # the same twice
            args = tree.map(lambda x: device_put(x) if isinstance(x, np.ndarray) else x, args)
        with _missing_is_an_error():  # around all of them: other warnings are shown once
            for seed in seeds:
                shown = self.prints and first is None
                quiet = (
                    contextlib.nullcontext() if shown else contextlib.redirect_stdout(io.StringIO())
                )
                again = (seed,)
                try:
                    if self.params is not None:
                        self.params.at(seed)
                    with quiet:
                        latest, got = _attempt(self.call, args)
                    if first is None:
                        first, result = got, latest
                        if ref is not None:
                            _close(got, ref, self.args, *tolerances)
                    again = tuple(dict.fromkeys((seeds[0], seed)))
                    _same(first, got, *again[:1], again[-1])
                except Exception as e:
                    line = f"{repeat(again)}  # {type(e).__name__}"
                    print(line)
                    e.add_note(f"repeat with {line}")
                    raise
        return result
