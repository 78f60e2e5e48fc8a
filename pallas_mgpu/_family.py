"""`kernel_family`: a function that makes kernels becomes a function of arrays.

`_core.Family` looks a call up by its operands and options and asks `_Maker` where it has no
entry."""

import functools
import inspect

from . import _core
from ._caches import KEPT, add_family
from ._names import check_keywords
from ._types import ShapeDtypeStruct


class Operand(ShapeDtypeStruct):
    """What a :func:`kernel_family` sees of an array.

    ``device``: ordinal of the GPU it lies on, None for the host. ``aligned``: it begins at a
    multiple of 16 bytes.
    """

    __slots__ = ("device", "aligned")

    def __init__(self, shape, dtype, device=None, aligned=True):
        super().__init__(shape, dtype)
        self._set(device=device, aligned=aligned)


class _Maker:
    """Binds calls to the signature; equal ones, however spelled, share what was made."""

    def __init__(self, make, name):
        self.make, self.name = make, name
        self.signature = inspect.signature(make)
        self.made = {}

    def __call__(self, args, arrays, options):
        operands = [Operand(*x) for x in args]
        by_name = {name: Operand(*x) for name, x in arrays.items()}
        given = [*operands, *by_name.values()]  # in the order of the call
        try:
            bound = self.signature.bind(*operands, **by_name, **options)
        except TypeError as e:
            if not any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values()):
                check_keywords(self.name, [*self.signature.parameters], options | by_name)
            raise TypeError(f"{self.name}: {e}") from None
        bound.apply_defaults()
        values = []
        for name, p in self.signature.parameters.items():
            x = bound.arguments[name]
            if p.kind is p.VAR_POSITIONAL:
                values += x
            elif p.kind is p.VAR_KEYWORD:
                values += [v for _, v in sorted(x.items())]
            else:
                values.append(x)
        position = {id(x): k for k, x in enumerate(given)}
        order = tuple(position[id(x)] for x in values if id(x) in position)
        key = tuple((type(x), x) for x in (*sorted(bound.kwargs), *values))
        target = self.made.pop(key, None)
        if target is not None:
            self.made[key] = target  # the last one used is the last one in order
        else:
            target = self.make(*bound.args, **bound.kwargs)
            if not callable(target):
                raise TypeError(
                    f"{self.name}: a kernel_family returns a kernel or a function of the arrays,"
                    f" got {target!r}"
                )
            target = self.made.setdefault(key, target)
            for oldest in list(self.made)[: len(self.made) - KEPT] if len(self.made) > KEPT else ():
                self.made.pop(oldest, None)
        return target, order

    def forget(self):
        self.made.clear()


def kernel_family(make=None, *, in_place=True):
    """Decorator: a function of arrays that finds its kernel by their types.

    ``make(*operands, **options)`` gets an :class:`Operand` for each array and returns the kernel
    for such arrays, or another function of them. The result is called with the arrays themselves,
    and with ``out=`` if that is wanted; arrays are passed on in the order of the signature. By
    position only arrays are accepted; by name arrays, and options, which must be hashable. ``make``
    runs once for each combination of shapes, dtypes, devices, alignments and options; later calls
    cost about as much as calling the kernel. Use functions defined once as options, as each new one
    is a new value. ``in_place=False``: the kernels read their operands while they write, so that
    ``out=`` must not be one of the arrays (ValueError).

    ``f.kernel(*args, **kwargs)`` is what a call with such arguments runs; things with shape and
    dtype will do there. TypeError for arguments that do not fit the signature.
    """
    if make is None:
        return functools.partial(kernel_family, in_place=in_place)
    maker = _Maker(make, make.__name__)
    family = functools.update_wrapper(_core.Family(make.__name__, maker, in_place), make)
    family.maker = maker
    add_family(family)
    return family


def core_count(device=None):
    """SMs of a CUDA device; None: of the one that kernels on host arrays run on. Where there is
    none, those of a usual GPU: 132, as an H100 or H200 has."""
    found = _core.system_info()
    ordinal = found["device"] if device is None else device
    return found["devices"][ordinal]["sm_count"] if ordinal >= 0 else _core.target()["sms"]
