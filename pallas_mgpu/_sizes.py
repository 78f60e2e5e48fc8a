"""`dim`: sizes of arrays that a kernel learns when it is called.

A `Dim` is an expression: a symbol, or arithmetic on symbols and ints. It stands in the shapes of
arguments and outputs and in the grid. Nothing is evaluated in Python when the kernel is called: a
trace hands the expressions that it uses to the graph (`Table`), and the extension evaluates them,
once for each call. In a kernel's body a `Dim` becomes an int32 scalar where an array is needed.

`least`, `most` and `multiple` hold for every value: bounds by interval arithmetic, and the divisor
that promises and factors give."""

import math
import numbers
import operator
import re

from . import _core
from ._names import accepts, show
from ._trace import Array, env, tracing

MOST = 2**31 - 2
ELEMENTS = 2**46  # of an array, at most


def _bounds_of_products(a, b):
    corners = [x * y for x in (a.least, a.most) for y in (b.least, b.most)]
    return min(corners), max(corners)


def _floordiv(a, b):
    corners = [x // y for x in (a.least, a.most) for y in (b.least, b.most)]
    multiple = a.multiple // b.most if b.how == "number" and a.multiple % b.most == 0 else 1
    return min(corners), max(corners), multiple


_RULES = {
    "add": lambda a, b: (a.least + b.least, a.most + b.most, math.gcd(a.multiple, b.multiple)),
    "sub": lambda a, b: (a.least - b.most, a.most - b.least, math.gcd(a.multiple, b.multiple)),
    "mul": lambda a, b: (*_bounds_of_products(a, b), a.multiple * b.multiple),
    "floordiv": _floordiv,
    "mod": lambda a, b: (0, b.most - 1, math.gcd(a.multiple, b.multiple)),
    "min": lambda a, b: (
        min(a.least, b.least),
        min(a.most, b.most),
        math.gcd(a.multiple, b.multiple),
    ),
    "max": lambda a, b: (
        max(a.least, b.least),
        max(a.most, b.most),
        math.gcd(a.multiple, b.multiple),
    ),
}
_VALUES = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/"}


class Dim:
    """A size that is known when a kernel is called: what :func:`dim` makes, and arithmetic on it.

    ``+ - * // %`` with ints and other sizes give sizes. Together with arrays and other numbers, for
    functions of arrays, in index expressions and as bounds of loops, it is an int32 scalar.
    Comparisons give a bool where the bounds decide them, else a traced bool; outside of a
    kernel they raise TypeError then.
    """

    __slots__ = ("how", "a", "b", "name", "least", "most", "multiple")
    __array_ufunc__ = None

    def __init__(self, how, a, b, name, least, most, multiple):
        for k, v in zip(self.__slots__, (how, a, b, name, least, most, multiple)):
            object.__setattr__(self, k, v)

    def __setattr__(self, name, value):
        raise AttributeError("a size cannot be changed")

    def __reduce__(self):
        return Dim, tuple(getattr(self, name) for name in self.__slots__)

    @property
    def _key(self):
        return self.how, self.a, self.b, self.name, self.least, self.most, self.multiple

    @property
    def _written(self):
        """The same with the expressions inside as such tuples: these are compared as they are
        written, not by what they are when the kernel is called."""
        a, b = (x._written if isinstance(x, Dim) else x for x in (self.a, self.b))
        return self.how, a, b, self.name, self.least, self.most, self.multiple

    def __hash__(self):
        return hash((Dim, self._key))

    def __repr__(self):
        if self.how == "symbol":
            return self.name
        if self.how == "number":
            return str(self.a)
        if self.how in _SIGNS:
            return f"({self.a!r} {_SIGNS[self.how]} {self.b!r})"
        return f"{self.how}({self.a!r}, {self.b!r})"

    def symbols(self):
        """The symbols in it, in order."""
        if self.how == "symbol":
            return (self,)
        if self.how == "number":
            return ()
        return tuple(dict.fromkeys((*self.a.symbols(), *self.b.symbols())))

    def value(self, known):
        """An int, for the values of symbols."""
        if self.how == "symbol":
            if self not in known:
                raise ValueError(_unknown(self))
            return known[self]
        if self.how == "number":
            return self.a
        return _VALUES[self.how](self.a.value(known), self.b.value(known))

    def _plgpu_traced(self):
        return env("plgpu.dim").sizes.traced(self)

    def __bool__(self):
        return True if self.least > 0 else self != 0

    def __index__(self):
        raise TypeError(
            f"{self!r} is a size that is known when the kernel is called (plgpu.dim), and this"
            " needs an int: use it in shapes, grids, starts, bounds of loops and arithmetic"
        )

    def _compare(self, other, sign):
        other = _size(other)
        if other is None:
            return NotImplemented
        if self is other or self._written == other._written:
            return sign in ("==", "<=", ">=")
        disjoint = self.most < other.least or self.least > other.most
        same = self.least == self.most == other.least == other.most
        if sign in ("==", "!=") and (disjoint or same):
            return same if sign == "==" else disjoint
        if sign in ("<", ">=") and (self.most < other.least or self.least >= other.most):
            return (self.most < other.least) == (sign == "<")
        if sign in (">", "<=") and (self.least > other.most or self.most <= other.least):
            return (self.least > other.most) == (sign == ">")
        if not tracing():
            raise TypeError(
                f"{self!r} {sign} {other!r} is known when the kernel is called only; give"
                " plgpu.dim bounds (min=, max=) that decide it, or compare in the kernel"
            )
        a, b = self._plgpu_traced(), other._plgpu_traced() if other.how != "number" else other.a
        return {
            "==": lambda: a == b,
            "!=": lambda: a != b,
            "<": lambda: a < b,
            "<=": lambda: a <= b,
            ">": lambda: a > b,
            ">=": lambda: a >= b,
        }[sign]()

    def __eq__(self, other):
        return self._compare(other, "==")

    def __ne__(self, other):
        return self._compare(other, "!=")

    def __lt__(self, other):
        return self._compare(other, "<")

    def __le__(self, other):
        return self._compare(other, "<=")

    def __gt__(self, other):
        return self._compare(other, ">")

    def __ge__(self, other):
        return self._compare(other, ">=")

    def __neg__(self):
        return combine("sub", 0, self)

    def __abs__(self):
        return combine("max", self, -self)


def _operator(name, how=None):
    """Methods for an operator of `operator` and its reflection. how: the arithmetic that gives a
    size; of other numbers, and without one, an int32 scalar in a kernel takes the size's place."""
    apply = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def of(x, y):
        found = combine(how, x, y) if how else NotImplemented
        numbers_alone = all(isinstance(v, (Dim, numbers.Number)) for v in (x, y))
        if found is not NotImplemented or not numbers_alone:
            return found
        if not tracing():
            raise TypeError(
                f"{x!r} {_SIGNS.get(name) or name} {y!r} is no size (plgpu.dim); outside of a"
                " kernel sizes have + - * // % with ints and sizes, and pl.cdiv"
            )
        return apply(*(v._plgpu_traced() if isinstance(v, Dim) else v for v in (x, y)))

    return lambda self, other: of(self, other), lambda self, other: of(other, self)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "lshift", "rshift", "and",
              "or", "xor"):  # fmt: skip
    _given = _operator(_name, _name if _name in _VALUES else None)
    for _method, _function in zip((f"__{_name}__", f"__r{_name}__"), _given):
        setattr(Dim, _method, _function)


def _size(x):
    """A Dim for a Dim or an int; None for all else."""
    if isinstance(x, Dim):
        return x
    if isinstance(x, (bool, Array)) or not hasattr(x, "__index__"):
        return None
    n = x.__index__()
    return Dim("number", n, 0, "", n, n, abs(n))


def combine(how, x, y):
    """A Dim, or an int where that is all it can be; NotImplemented for what is no size."""
    a, b = _size(x), _size(y)
    if a is None or b is None:
        return NotImplemented
    if how in ("floordiv", "mod") and b.least < 1:
        raise ValueError(f"{a!r} {_SIGNS[how]} {b!r}: sizes are divided by positive ones")
    if (how in ("add", "sub") and b.most == b.least == 0) or (
        how in ("mul", "floordiv") and b.most == b.least == 1
    ):
        return x
    if how == "mul" and a.most == a.least == 1 or how == "add" and a.most == a.least == 0:
        return y  # sum() and math.prod() begin so
    if how == "mod" and b.how == "number" and a.multiple % b.a == 0:
        return 0
    if how == "min" and (a.most <= b.least or b.most <= a.least):
        return x if a.most <= b.least else y
    if how == "max" and (a.least >= b.most or b.least >= a.most):
        return x if a.least >= b.most else y
    least, most, multiple = _RULES[how](a, b)
    return least if least == most else Dim(how, a, b, "", least, most, multiple)


def minimum(x, y):
    """The lesser of two ints or sizes."""
    return combine("min", x, y) if isinstance(x, Dim) or isinstance(y, Dim) else min(x, y)


def clamp(x, least, most):
    """A size that is known to be from `least` to `most`, which ints say, with these bounds."""
    return combine("min", combine("max", x, least), most)


@accepts()
def dim(name, *, min=1, max=MOST, multiple_of=1):
    """A size that a kernel learns when it is called, so that one program serves all of them.

    It stands in ``in_shapes`` and ``out_type`` of :func:`kernel` and in its grid; sizes of one name
    are equal. ``min``, ``max`` and ``multiple_of`` are promises about it, which calls check
    (ValueError) and programs make use of. In the kernel ``ref.shape`` has it, and it can be used as
    an int32 scalar. TypeError, ValueError for other names and bounds.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise TypeError(f"dim: name must be an identifier, got {show(name)}")
    for what, x in (("min", min), ("max", max), ("multiple_of", multiple_of)):
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"dim: {what} must be an int, got {show(x)}")
    if not (1 <= min <= max <= MOST and 1 <= multiple_of <= max):
        raise ValueError(
            f"dim: 1 <= min <= max < 2**31 - 1 and 1 <= multiple_of <= max are needed, got"
            f" min={min}, max={max}, multiple_of={multiple_of}"
        )
    least, most = -(-min // multiple_of) * multiple_of, max // multiple_of * multiple_of
    return Dim("symbol", 0, 0, name, least, most, multiple_of)


def _unknown(x):
    return f"plgpu.dim: no argument has the size {x.name}; name it in in_shapes= of the kernel"


def least(x):
    """The least that an int or a size can be."""
    return x.least if isinstance(x, Dim) else x


def most(x):
    """The most that an int or a size can be."""
    return x.most if isinstance(x, Dim) else x


def is_open(shape):
    return any(isinstance(d, Dim) for d in shape)


def most_of(grid):
    """Ints: the most that sizes can be, of which a call checks that they are below 2**31 - 1."""
    return tuple(min(d.most, MOST) if isinstance(d, Dim) else d for d in grid)


def limits(shapes):
    """The sizes that are extents of arrays of these shapes, by their keys, and the most that they
    can be: what they promise, or what arrays of `ELEMENTS` have."""
    found = {}
    for shape in shapes:
        of_row = math.prod(d for d in shape if not isinstance(d, Dim))
        for x in (d for d in shape if isinstance(d, Dim)):
            most = min(x.most, MOST)
            fitting = min(most, ELEMENTS // of_row - 1)
            most = fitting if fitting >= x.least else most  # else no array fits, as its type says
            found[x._key] = x, min(most, found.get(x._key, (x, most))[1])
    return found


def explain(e, limits):
    """Append to an error what the numbers in its text are that types have in place of sizes."""
    text = e.args[0] if len(e.args) == 1 else None
    if not isinstance(text, str):
        return
    notes = {}
    for n in map(int, re.findall(r"\b\d{1,19}\b", text.split("\n  at ")[0])):
        for x, most in limits.values():
            times, rest = divmod(n, most + 1)
            if not rest and (times == 1 or times and most >= 1 << 16):
                notes[n] = f"{n} stands for {x!r}" + (times > 1) * f" * {times}"
    if notes:
        e.args = (f"{text}\n  {', '.join(notes.values())}, known when the kernel is called only",)


def type_of(shape, limits):
    """The shape that types have for sizes: one more than the most, as csrc/ir/sizes.h says."""
    return tuple(limits[d._key][1] + 1 if isinstance(d, Dim) else d for d in shape)


class Table:
    """The sizes of one graph: a number for each expression, in the order of its parts."""

    def __init__(self, trace, limits):
        self.trace, self.limits, self.numbers, self.dims = trace, limits, {}, {}

    def _add(self, x, how, a, b):
        most = self.limits.get(x._key, (x, min(x.most, MOST)))[1]
        if x.least > most:
            raise ValueError(f"plgpu.dim: {x!r} is at least {x.least}; sizes are below 2**31 - 1")
        number = self.trace.size(how, a, b, max(x.least, -MOST), most, x.multiple, x.name)
        self.numbers[x._key] = number
        self.dims.setdefault(number, x)
        return number

    def bind(self, argument, shape):
        """Symbols among the extents of an argument are read there, unless they are known."""
        for d, x in enumerate(shape):
            if isinstance(x, Dim) and x.how == "symbol" and x._key not in self.numbers:
                self._add(x, "extent", argument, d)

    def number(self, x):
        if x._key in self.numbers:
            return self.numbers[x._key]
        if x.how == "symbol":
            raise ValueError(_unknown(x))
        if x.how == "number":
            return self._add(x, "number", x.a, 0)
        return self._add(x, x.how, self.number(x.a), self.number(x.b))

    def traced(self, x):
        return _core.size_value(self.number(x))

    def numbers_of(self, shape):
        return tuple(self.number(d) if isinstance(d, Dim) else 0 for d in shape)


class Known:
    """Sizes that are the ints of one call, where a trace is for its shapes alone."""

    def __init__(self, shapes, given):
        self.symbols = {}
        for shape, ints in zip(shapes, given):
            for x, n in zip(shape or (), ints):
                if isinstance(x, Dim) and x.how == "symbol":
                    self.symbols.setdefault(x, n)

    def of(self, shape):
        return tuple(d.value(self.symbols) if isinstance(d, Dim) else d for d in shape)

    def traced(self, x):
        return _core.as_array(x.value(self.symbols), "int32")


def of_number(number):
    """Called by the extension: the size with a number in the current trace."""
    return env("plgpu.dim").sizes.dims[number]
