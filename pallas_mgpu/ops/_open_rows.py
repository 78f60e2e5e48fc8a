"""Which form of a kernel serves a number of rows: one for that number alone, or one for many.

Programs for one number of rows know more, and the first few numbers that a product meets have them:
models that run with few shapes never leave that form. From then on numbers of rows are served in
buckets of powers of two, by a program each that takes the rows at run time (plgpu.dim). So a stream
of arbitrary lengths compiles at most `STATIC` + len(_EDGES) - 1 programs, whatever comes, and the
decision of `rows_of` is the only place that knows. Where a bucket has programs with several tiles
(mixed.py, gated_matmul.py), these are so few that there are twelve in all.

A number of rows that comes again and again may get a program of its own later (specialize's
``better``): `settle` says so."""

import contextlib
import functools
import math
import threading

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, _strides
from pallas_mgpu._batch import Batched
from pallas_mgpu._caches import cached

from ._common import compile_for

STATIC = 3  # numbers of rows with a program of their own, for each kind of product
# A bucket ends at an edge: the rows of one or two tiles, then four times as many; the last one has
# several waves of tiles on any GPU.
_EDGES = (2, 64, 128, 256, 512, 1024, 2048, 1 << 22)
OWN = 16  # numbers of rows that may get a program of their own later
TYPICAL = 8192  # rows that the last bucket is tuned for
ANY_ROWS = (0, 1 << 26)  # edges of kernels that work on each row alone: one program


class _Seen:
    """The numbers of rows that one kind of product has met, the first `STATIC` of them."""

    def __init__(self):
        self.rows, self.lock = set(), threading.Lock()

    def is_static(self, m, weight):
        with self.lock:
            if m not in self.rows and len(self.rows) * weight < STATIC:
                self.rows.add(m)
            return m in self.rows

    def add(self, m):
        with self.lock:
            self.rows.add(m)

    def has_room(self):
        return len(self.rows) < STATIC + OWN


@cached
def _seen(kind):
    """kind: whatever distinguishes programs but the rows; hashable."""
    return _Seen()


class _Questions(threading.local):
    """What this thread asks `is_static`: `open` notes the kinds and numbers of rows that share a
    program; `exact`: none do; `shared`: all do, since their kind is part of another one that has
    met enough of them."""

    open: list | None = None
    exact = shared = False


_questions = _Questions()


def is_static(kind, m, weight=1):
    """Has this number of rows a program of its own? weight: how many others it counts for, where
    there are more programs."""
    if _questions.exact or not _questions.shared and _seen(kind).is_static(m, weight):
        return True
    if _questions.open is not None:
        _questions.open.append((kind, m))
    return False


@contextlib.contextmanager
def together(static):
    """What is made meanwhile has programs of its own, or shares all of them, because it is part of
    something that does."""
    name = "exact" if static else "shared"
    before = getattr(_questions, name)
    setattr(_questions, name, True)
    try:
        yield
    finally:
        setattr(_questions, name, before)


def rows_of(kind, m, edges=_EDGES, weight=1):
    """``(rows, m)``: the int m twice, or the size that stands for m's bucket and the int that its
    program is tuned for. kind: all else that distinguishes programs. edges: of the buckets. weight:
    as of `is_static`."""
    if m <= edges[0] or m > edges[-1] or is_static(kind, m, weight):
        return m, m
    return bucket_of("M", m, edges)


def bucket_of(name, m, edges, multiple=1):
    """The size that stands for m's bucket, of multiples of a number, and the int that its program
    is tuned for."""
    k = next(k for k, edge in enumerate(edges) if m <= edge)
    least, most = edges[k - 1] + multiple, edges[k]
    return plgpu.dim(name, min=least, max=most, multiple_of=multiple), min(most, TYPICAL)


def with_open_rows(problem, *kind):
    """The problem of a kernel that works on each row alone, perhaps with a size for the number of
    rows: of matrices alone. problem: a NamedTuple with `rows` and the `shape` of the arrays."""
    if len(problem.shape) != 2:
        return problem
    n = problem.shape[1]
    key = type(problem).__module__, problem._replace(rows=0, shape=(0, n)), kind
    rows, _ = rows_of(key, problem.rows, ANY_ROWS)
    return problem._replace(rows=rows, shape=(rows, n))


ELEMENTS = 0, 1 << 20, (1 << 31) - 4096  # edges of numbers of elements that share a program
_VECTORS = 16, 4, 1  # elements that are enough for any vector, for one of float32, for none


def elements_of(kind, shape, tile):
    """The size that stands for the number of elements of such arrays, which kernels see as one
    dim, in tiles; None: their shape has a program of its own. Numbers that tiles, or vectors,
    divide share others than the rest."""
    total = math.prod(shape)
    if total > ELEMENTS[-1] or is_static(kind, shape):
        return None
    multiple = next(n for n in (tile, *_VECTORS) if total % n == 0)
    return bucket_of("M", total, ELEMENTS, multiple)[0]


ENTRIES = 1 << 16  # of a batch of any size
MOST_ROWS = _sizes.MOST  # of an array


def entries():
    """The size that stands for those of a batch, of kernels that compute lengths by it."""
    return plgpu.dim("B", max=ENTRIES)


def any_rows(name, least=1):
    """The size that stands for the rows of an array."""
    return plgpu.dim(name, min=least)


def any_number(*of_each):
    """Edges of numbers of parts of such a shape in an array: one program."""
    return 0, min(ANY_ROWS[1], _sizes.ELEMENTS // math.prod(of_each) - 1)


def divides(step, rows):
    """Do steps of so many rows end with the last one, for certain?"""
    return (rows.multiple if isinstance(rows, plgpu.Dim) else rows) % step == 0


def may_settle(kind):
    return _seen(kind).has_room()


def settle(kind, m):
    """From now on the number of rows m has a program of its own."""
    _seen(kind).add(m)


def sizes_of(kind, sizes, edges, least=None, weight=1):
    """Sizes that stand for the ints ``{name: n}``, the first of them in a bucket between two edges;
    None: they have a program of their own. least: what others can be at least, by name, 1 if it is
    not there. weight: as of `is_static`."""
    (first, n), *_ = sizes.items()
    if n > edges[-1] or max(sizes.values()) > edges[-1]:
        return None
    if is_static(kind, tuple(sizes.values()), weight):
        return None
    found = {name: plgpu.dim(name, min=(least or {}).get(name, 1), max=edges[-1]) for name in sizes}
    return found | {first: bucket_of(first, n, edges)[0]}


def in_shapes(*shapes):
    """Options of plgpu.kernel for operands of such shapes, if one of them has open rows."""
    known = [shape for shape in shapes if shape is not None]
    return {"in_shapes": shapes} if any(map(_sizes.is_open, known)) else {}


# ---- programs of their own, later ----------------------------------------------------------------


def own_program(make):
    """specialize's ``better``: of calls that come often, the program of their number of rows. Its
    sums may be in another order: not where the caller relies on that."""

    def found(*operands, **options):
        if options.get("deterministic") or options.get("batch_invariant"):
            return None
        _questions.open = []
        try:
            make(*operands, **options)
        finally:
            asked, _questions.open = _questions.open, None
        if not asked or not may_settle(asked[0][0]):
            return None

        def make_own():
            with together(True):
                kernel = make(*operands, **options)
            given = [x for x in (*operands, *options.values()) if isinstance(x, plgpu.ArrayInfo)]
            if given[0].device is not None:
                try:
                    compile_for(kernel, given)
                except NotImplementedError:
                    return None  # a call would have to compile
            for kind, m in asked:
                settle(kind, m)
            return kernel

        return make_own

    return found


def better(make):
    """Decorator below specialize: calls that come often get a program of their own."""
    make.better = own_program(make)
    return make


# ---- arrays of more dimensions -------------------------------------------------------------------


def view(x, shape):
    """The array in another shape; None: as it is."""
    if shape is None:
        return x
    if isinstance(x, Batched):  # results are stacked along axis 0
        return Batched(view(x.value, (x.value.shape[0], *shape)), 0, x.level)
    return x.reshape(shape)


class Views:
    """What `views` returns, array by array in Python."""

    def __init__(self, kernel, operands, results, alone, sizes):
        self.kernel, self.operands, self.results = kernel, operands, results
        self.alone, self.sizes = alone, sizes

    def __call__(self, *arrays, **how):
        if self.alone and any(isinstance(x, Batched) for x in arrays):
            return self.alone()(*arrays, **how)
        found = self.kernel(*self.given(arrays), **how)
        several = isinstance(found, tuple)
        found = tuple(map(view, found if several else (found,), self.results))
        return found if several else found[0]

    def given(self, arrays):
        """What the kernel gets."""
        told = [arrays[0].reshape(-1)[:n] for n in self.sizes]
        return [*map(view, arrays, self.operands), *told]

    def lower(self, *arrays, **options):
        S = plgpu.ShapeDtypeStruct
        given = [S(s or x.shape, x.dtype) for x, s in zip(arrays, self.operands)]
        told = [S((n,), arrays[0].dtype) for n in self.sizes]
        return self.kernel.lower(*given, *told, **options)


def views(kernel, operands, results, alone=None, sizes=()):
    """The kernel as a function of arrays with other shapes: operands, which it gets, and results,
    which the caller gets; None: as they are. Arrays without memory are reshaped by a method.
    alone(): the kernel of these shapes, for elements of a batch, which may be anywhere in memory;
    None: only results have other shapes. sizes: those of operands that follow, which tell the
    kernel these numbers: they are beginnings of the first one."""
    operands, results = tuple(operands), tuple(results)
    if not any((*operands, *results, *sizes)):
        return kernel
    by_hand = Views(kernel, operands, results, alone, tuple(sizes))
    return _core.Reshaped(kernel, lambda: by_hand, operands, results, tuple(sizes))


def rowwise(make):
    """Decorator below specialize: for a function of arrays (..., N), each row of which is worked on
    alone. From the fourth number of rows on, arrays with more than two dimensions are given to the
    kernel of matrices, which serves many numbers of rows. A shape that comes often gets a program
    of its own."""

    @functools.wraps(make)
    def made(*operands, **options):
        x, lead = operands[0], operands[0].shape[:-1]
        if x.ndim < 3 or 0 in x.shape or options.get("axis", -1) not in (-1, x.ndim - 1):
            return make(*operands, **options)
        rows, by_rows = math.prod(lead), [y and y.shape[: len(lead)] == lead for y in operands]
        flat = [_matrix(y, len(lead)) if has else y for y, has in zip(operands, by_rows)]
        alike = tuple(
            y and (y.shape[bool(has) :], y.dtype, y.aligned) for y, has in zip(flat, by_rows)
        )
        kind = make.__name__, alike, x.device, tuple(sorted(options.items()))
        if is_static(kind, rows):
            return make(*operands, **options)
        with together(False):
            kernel = make(*flat, **options | ({"axis": -1} if "axis" in options else {}))
        outs = [o.shape for o in getattr(getattr(kernel, "definition", None), "outs", ())]
        if not any(map(_sizes.is_open, outs)):
            return make(*operands, **options)
        shapes = tuple(y.shape if has else None for y, has in zip(flat, by_rows) if y is not None)
        results = tuple((*lead, *shape[1:]) for shape in outs)
        return _core.Reshaped(kernel, lambda: make(*operands, **options), shapes, results)

    return better(made)


def _matrix(x, dims):
    """The description of an array whose first dimensions are one."""
    shape = math.prod(x.shape[:dims]), *x.shape[dims:]
    strides = None
    with contextlib.suppress(ValueError):  # there are none: it will be copied
        strides = _strides.reshaped(x, shape)
    return plgpu.ArrayInfo(shape, x.dtype, x.device, x.aligned, strides)
