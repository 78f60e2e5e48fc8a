"""Operands of functions of arrays that are not contiguous in row-major order, or do not begin at a
multiple of 16 bytes.

Kernels read such arrays of a GPU by their strides, which are a part of their programs. `Views` says
what a call's operands are to a kernel, and `Programs.for_views` which function serves the call: the
kernel itself where it can read the arrays as they lie, and otherwise one that makes contiguous
copies first. Copies are made, too, where the elements of a row are apart or rows begin anywhere,
because such reads cost more than a copy, and from the fifth combination of strides on that a kernel
meets, for views of a buffer that grows would compile each time."""

import contextlib
import sys

from . import _core
from ._types import ShapeDtypeStruct

_PROGRAMS = 4  # of one kernel, for different strides


def reshaped(info, shape):
    """The strides of the same memory seen with another shape, None for row-major order; ValueError
    if there are none."""
    if info.element_strides is None or shape is None or shape == info.shape:
        return info.element_strides
    return _core.restride(info.shape, info.element_strides, tuple(shape))


class Views:
    """What the operands of a call are to its kernel. arguments: by name; they are changed.
    transposes: by the name of an option that says whether operands are transposed, these: where
    they are in memory, the option says it. ``operands``: descriptions, in the order of the kernel,
    which the caller sets."""

    def __init__(self, arguments, transposes):
        self.new, self.exchanged, self.copied = {}, set(), set()
        self.operands = []
        if not any(getattr(x, "element_strides", None) for x in arguments.values()):
            return
        for option, names in transposes.items():
            given = [arguments[name] for name in names if arguments[name] is not None]
            if all(map(_is_transposed, given)):
                for name in names:
                    self._see(arguments, name, _exchanged, self.exchanged)
                arguments[option] = not arguments[option]
        all_copied = bool(arguments.get("interpret"))  # the interpreter has arrays of the host
        for name, x in arguments.items():
            if getattr(x, "element_strides", None) and (all_copied or not _is_regular(x)):
                self._see(arguments, name, _copied, self.copied)

    def _see(self, arguments, name, as_what, those):
        x = arguments[name]
        if x is not None:
            arguments[name] = new = as_what(x)
            self.new[id(x)] = new
            those.add(id(new))
            if id(x) in self.exchanged:
                self.exchanged.add(id(new))

    def seen(self, x):
        """What became of a description."""
        while id(x) in self.new:
            x = self.new[id(x)]
        return x

    def numbers(self):
        """Of the operands that are exchanged, and of those that are copied."""
        return tuple(
            tuple(i for i, x in enumerate(self.operands) if id(x) in those)
            for those in (self.exchanged, self.copied)
        )


def _is_transposed(x):
    """Is it, in memory, a matrix whose columns are contiguous?"""
    s = getattr(x, "element_strides", None)
    return s is not None and len(s) > 1 and min(x.shape[-2:]) > 1 and s[-2] == 1 != s[-1]


def _exchanged(x):
    """The description with the last two dimensions exchanged."""
    shape, strides = ((*t[:-2], t[-1], t[-2]) for t in (x.shape, x.element_strides))
    found = x.replace(shape=shape, element_strides=strides)
    return found.replace(element_strides=_core.restride(shape, strides, shape))


def _copied(x):
    return x.replace(aligned=True, element_strides=None)


def _is_regular(x):
    """Are the elements of a row neighbours, and rows at multiples of 16 bytes if those of a
    contiguous array would be? Kernels rely on that to copy them by TMA."""
    *pitches, last = (s for s, extent in zip(x.element_strides, x.shape) if extent > 1)
    size = x.dtype.itemsize
    if x.shape[-1] * size % 16 == 0 and any(s * size % 16 for s in pitches):
        return False
    return x.aligned and (x.shape[-1] == 1 or last == 1)


class Transposed:
    """A function that gets the operands of these numbers with their last two dimensions
    exchanged."""

    def __init__(self, target, numbers, name):
        self.target, self.numbers, self.name = target, numbers, name

    def __call__(self, *operands, out=None, stream=None):
        return self.target(*self._given(operands), out=out, stream=stream)

    def lower(self, *operands, **options):
        return self.target.lower(*self._given(operands), **options)

    def _given(self, operands):
        given = list(operands)
        for i in self.numbers:
            if isinstance(given[i], ShapeDtypeStruct):
                given[i] = _exchanged(given[i])
            elif hasattr(given[i], "swapaxes"):
                given[i] = given[i].swapaxes(-1, -2)
            else:
                raise _refused(f"{self.name}: argument {i}")
        return given


class OfCopies:
    """A function of contiguous copies of the operands of these numbers. spared: those of them that
    target may be able to read as they are, which is tried first; or None."""

    def __init__(self, target, numbers, name, spared):
        self.target, self.numbers, self.name, self.spared = target, numbers, name, spared

    def __call__(self, *operands, out=None, stream=None):
        if self.spared is not None:
            with contextlib.suppress(ValueError, NotImplementedError):
                given = self._given(operands, stream, self.spared)
                return self.target(*given, out=out, stream=stream)
        found = self.target(*self._given(operands, stream), out=out, stream=stream)
        self.spared = None
        return found

    def lower(self, *operands, **options):
        return self.target.lower(*self._given(operands, None), **options)

    def _given(self, operands, stream, spared=()):
        given = list(operands)
        for i in self.numbers:
            if i not in spared:
                given[i] = _contiguous(operands[i], stream, f"{self.name}: argument {i}")
        return given


def _contiguous(x, stream, what):
    """A copy in row-major order that begins at a multiple of 16 bytes, by the library of the array,
    on the stream of the call."""
    if isinstance(x, ShapeDtypeStruct):
        return _copied(x)
    library = type(x).__module__.partition(".")[0]
    if hasattr(x, "contiguous"):  # torch's tensors and parameters
        with contextlib.nullcontext() if stream is None else _torch_stream(stream, x.device):
            return x.clone(memory_format=sys.modules["torch"].contiguous_format)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        handle = None if stream is None else _core.stream_handle(stream)
        with contextlib.nullcontext() if stream is None else cupy.cuda.ExternalStream(handle):
            return cupy.array(x, copy=True, order="C")
    raise _refused(what)


def _refused(what):
    why = "is not contiguous in row-major order, or does not begin at a multiple of 16 bytes"
    return ValueError(f"{what} {why}: pass a contiguous copy")


def _torch_stream(stream, device):
    torch = sys.modules["torch"]
    return torch.cuda.stream(torch.cuda.ExternalStream(_core.stream_handle(stream), device))


class Programs:
    """What serves calls with strides, for one function of arrays."""

    def __init__(self, name):
        self.name = name
        self.met = {}  # by kernel: the strides that it has programs for

    def for_views(self, target, views):
        """The function that takes the place of target, which serves contiguous arrays like the
        operands."""
        operands, (exchanged, copied) = views.operands, views.numbers()
        apart = [i for i, x in enumerate(operands) if x.element_strides or not x.aligned]
        several = False
        if apart and not self._reads(target, operands):
            copied = sorted((*copied, *apart))
            strides = tuple(x.element_strides for x in operands)
            several = getattr(target, "takes_views", False)
            several = several and self._may_have(type(target), strides)
        if copied:
            if written := [i for i in copied if i in getattr(target, "writes", ())]:
                raise ValueError(
                    f"{self.name}: argument {written[0]}, which is written to, is not contiguous in"
                    " row-major order, or does not begin at a multiple of 16 bytes"
                )
            first = apart if several else None
            target = OfCopies(target, copied, self.name, first)
        return Transposed(target, exchanged, self.name) if exchanged else target

    def _may_have(self, kernel, strides):
        """May the kernel have a program for these strides? Those of contiguous arrays it has."""
        if not any(strides):
            return True
        met = self.met.setdefault(kernel, set())
        if len(met) < _PROGRAMS:
            met.add(strides)
        return strides in met

    def _reads(self, target, operands):
        """Is it a kernel that reads these arrays, and may it have another program?"""
        kernel, shapes, sizes = target, [None] * len(operands), ()
        if isinstance(target, _core.Reshaped):
            kernel, shapes, sizes = target.kernel, target.operands, target.sizes or ()
        if not isinstance(kernel, _core.Kernel):
            return False
        try:
            strides = tuple(reshaped(x, shape) for x, shape in zip(operands, shapes))
            given = [
                x.replace(shape=shape or x.shape, element_strides=s)
                for x, shape, s in zip(operands, shapes, strides)
            ]
            given += [operands[0].replace(shape=(n,), element_strides=None) for n in sizes]
            lowered = kernel.lower(*given)
        except (ValueError, NotImplementedError):  # there are no such strides, or no such copies
            return False
        if not all(x.aligned for x in operands):
            params = lowered.graph.cuda()[1]["params"]
            for x, (_, _, align, *_) in zip(operands, params):
                if not x.aligned and align > x.dtype.itemsize:
                    return False
        return self._may_have(kernel, strides)
