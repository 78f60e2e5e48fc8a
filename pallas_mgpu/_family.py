"""`specialize`: turns a function that makes kernels into a function of arrays.

`_core.Family` looks up a call by its operands and options, and calls `_Maker` if it has no
entry. Of calls that come often it is asked for a better kernel, which a thread makes meanwhile."""

import functools
import inspect
import threading
import warnings

from . import _core
from ._caches import KEPT, add_family
from ._names import check_keywords
from ._strides import OfCopies, Programs, Views
from ._types import ShapeDtypeStruct


class ArrayInfo(ShapeDtypeStruct):
    """The description of an array that a function under :func:`specialize` gets.

    ``device``: the ordinal of its GPU, None for the host. ``aligned``: does it start at a multiple
    of 16 bytes? ``element_strides``: how many elements of memory lie between neighbours along each
    dimension; None for a contiguous array in row-major order.
    """

    __slots__ = ("device", "aligned", "element_strides")

    def __init__(self, shape, dtype, device=None, aligned=True, element_strides=None):
        super().__init__(shape, dtype)
        self._set(device=device, aligned=aligned, element_strides=element_strides)


class _Maker:
    """Binds calls to the signature. Equal calls share a kernel, however they are spelled.

    ``better``: None, or a function of what ``make`` gets. It returns None, or a function without
    arguments that makes a kernel for that call alone, and compiles it; this one takes the place of
    the first one. ``check``: None, or a function of the name and the bound arguments, which raises
    for those that ``make`` does not take. ``transposes``: by the name of an option that says
    whether operands are transposed, these; where they are in memory, the option says it."""

    def __init__(self, make, name):
        self.make, self.name = make, name
        self.signature = inspect.signature(make)
        given = self.signature.parameters.values()
        by_position = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.parameters = tuple(p.name for p in by_position)
        self.n_required = sum(p.default is p.empty for p in by_position)
        self.made = {}
        self.better, self.threads = getattr(make, "better", None), {}
        self.check, self.transposes = None, {}
        self.programs = Programs(name)

    def bind(self, args, arrays, options):
        """The arguments, what they are to the kernel (_strides.py), the number that each operand
        has in the call, and the key of `made`."""
        infos = [ArrayInfo(*x) for x in args]
        by_name = {name: ArrayInfo(*x) for name, x in arrays.items()}
        given = [*infos, *by_name.values()]  # in the order of the call
        try:
            bound = self.signature.bind(*infos, **by_name, **options)
        except TypeError as e:
            if not any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values()):
                check_keywords(self.name, [*self.signature.parameters], options | by_name)
            words = str(e).removeprefix("inspect.Signature.bind() ")
            raise TypeError(f"{self.name}: {words}") from None
        bound.apply_defaults()
        views = Views(bound.arguments, self.transposes)
        values = []
        for name, p in self.signature.parameters.items():
            x = bound.arguments[name]
            if p.kind is p.VAR_POSITIONAL:
                values += x
            elif p.kind is p.VAR_KEYWORD:
                values += [v for _, v in sorted(x.items())]
            else:
                values.append(x)
        position = {id(views.seen(x)): k for k, x in enumerate(given)}
        views.operands = [x for x in values if id(x) in position]
        order = tuple(position[id(x)] for x in views.operands)
        gpu = _core.target(given[0].device if given else None)["name"]
        key = (gpu, *views.numbers(), *((type(x), x) for x in (*sorted(bound.kwargs), *values)))
        return bound, views, order, key

    def __call__(self, args, arrays, options):
        bound, views, order, key = self.bind(args, arrays, options)
        target = self.made.pop(key, None)
        if target is not None:
            self.made[key] = target  # the last one used is the last one in order
        else:
            if self.check:
                self.check(self.name, bound)
            target = self.make(*bound.args, **bound.kwargs)
            if not callable(target):
                raise TypeError(
                    f"{self.name}: a function under specialize returns a kernel or a function of"
                    f" the arrays, got {target!r}"
                )
            target = self.made.setdefault(key, self.programs.for_views(target, views))
            for oldest in list(self.made)[: len(self.made) - KEPT] if len(self.made) > KEPT else ():
                self.made.pop(oldest, None)
        return target, order

    def improve(self, args, arrays, options):
        """Of a call that comes often: True if `made` has another kernel for it now, None if a
        thread is making one, False if there is none."""
        if self.better is None:
            return False
        bound, views, _, key = self.bind(args, arrays, options)
        thread = self.threads.get(key)
        if thread is None:
            make = self.better(*bound.args, **bound.kwargs)
            if make is None:
                return False
            thread = self.threads.setdefault(key, _Making(make, self.name))
            thread.begin()
        if not thread.done:
            return None
        self.threads.pop(key, None)
        if thread.found is None:
            return False
        self.made[key] = self.programs.for_views(thread.found, views)
        return True

    def forget(self):
        self.made.clear()
        self.programs.met.clear()
        self.threads.clear()


def chosen(family, args, kwargs, described):
    """(kernel, operands in their order) of a call with arrays that the extension cannot read.
    described: (shape, dtype, device, aligned) of such an array, None of an option."""
    found = [described(x) for x in (*args, *kwargs.values())]
    arrays = [x for x, info in zip((*args, *kwargs.values()), found) if info]
    by_name = dict(zip(kwargs, found[len(args) :]))
    for k, info in enumerate(found[: len(args)]):
        if not info:
            raise TypeError(f"{family.__name__}: argument {k} is no array: {args[k]!r}")
    target, order = family.maker(
        found[: len(args)],
        {name: info for name, info in by_name.items() if info},
        {name: kwargs[name] for name, info in by_name.items() if not info},
    )
    if isinstance(target, OfCopies):  # no arrays in memory: the kernel reads what they are part of
        target = target.target
    return target, [arrays[i] for i in order]


class _Making(threading.Thread):
    """Makes a kernel that is not needed: without one, ``found`` stays None. The process does not
    end before it is ``done``: compilers do not like to be left."""

    def __init__(self, make, name):
        super().__init__(name=f"{name}, compilation")
        self.make, self.found, self.done = make, None, False
        self.lock = threading.Lock()

    def begin(self):
        with self.lock:
            if self.ident is None:
                self.start()

    def run(self):
        try:
            self.found = self.make()
        except Exception as e:  # noqa: BLE001 - the first kernel goes on to serve
            warnings.warn(f"{self.name} failed, and is not tried again: {e}", stacklevel=1)
        finally:
            self.done = True


def specialize(make=None, *, in_place=True):
    """Decorator: a function of arrays that selects a kernel by their types.

    ``make(*operands, **options)`` gets an :class:`ArrayInfo` for each array and returns the kernel
    for such arrays, or another function of them. It runs once for each combination of shapes,
    dtypes, devices, alignments and options; later calls cost about as much as calling the kernel.

    The decorated function is called with arrays, and optionally with ``out=``. Arrays may be passed
    by position or by name and reach the kernel in the order of the signature. Options are passed by
    name and must be hashable. Define functions that are passed as options only once, because each
    new function object makes a new kernel. ``in_place=False``: the kernels read their operands
    while they write, so ``out=`` must not be one of the arrays (ValueError), of calls of the
    function and of its kernels.

    ``f.kernel(*args, **kwargs)`` returns the kernel that a call with such arguments runs; any
    objects with shape and dtype are accepted. TypeError for arguments that do not fit the
    signature.
    """
    if make is None:
        return functools.partial(specialize, in_place=in_place)
    maker = _Maker(make, make.__name__)
    named = maker.parameters, maker.n_required
    made = _core.Family(make.__name__, maker, *named, in_place, maker.improve)
    family = functools.update_wrapper(made, make)
    family.maker = maker
    add_family(family)
    return family


def sm_count(device=None):
    """The number of SMs of a CUDA device. None means the device on which kernels on host arrays
    run; without a GPU, the result is the number of SMs of a typical GPU of the target, 132 for an
    H100 or H200."""
    found = _core.sm_count(device)
    return _core.target()["sms"] if found is None else found
