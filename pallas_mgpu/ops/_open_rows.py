"""Which form of a kernel serves a number of rows: one for that number alone, or one for many.

Programs for one number of rows know more, and the first few numbers that a product meets have them:
models that run with few shapes never leave that form. From then on numbers of rows are served in
buckets of powers of two, by a program each that takes the rows at run time (plgpu.dim). So a stream
of arbitrary lengths compiles at most `STATIC` + len(_EDGES) - 1 programs, whatever comes, and the
decision of `rows_of` is the only place that knows.

A number of rows that comes again and again may get a program of its own later (specialize's
``better``): `settle` says so."""

import threading

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes
from pallas_mgpu._caches import cached

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

    def is_static(self, m):
        with self.lock:
            if m not in self.rows and len(self.rows) < STATIC:
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


def rows_of(kind, m, edges=_EDGES):
    """``(rows, m)``: the int m twice, or the size that stands for m's bucket and the int that its
    program is tuned for. kind: all else that distinguishes programs. edges: of the buckets."""
    if m <= edges[0] or m > edges[-1] or _seen(kind).is_static(m):
        return m, m
    k = next(k for k, edge in enumerate(edges) if m <= edge)
    rows = plgpu.dim("M", min=edges[k - 1] + 1, max=edges[k])
    return rows, min(edges[k], TYPICAL)


def may_settle(kind):
    return _seen(kind).has_room()


def settle(kind, m):
    """From now on the number of rows m has a program of its own."""
    _seen(kind).add(m)


def sizes_of(kind, sizes, edges, least=1):
    """Sizes that stand for the ints ``{name: n}``, the first of them in a bucket between two edges
    and the others any from the least one on; None: they have a program of their own."""
    (first, n), *_ = sizes.items()
    if n > edges[-1] or max(sizes.values()) > edges[-1]:
        return None
    if _seen(kind).is_static(tuple(sizes.values())):
        return None
    k = next(k for k, edge in enumerate(edges) if n <= edge)
    found = {name: plgpu.dim(name, min=least, max=edges[-1]) for name in sizes}
    return found | {first: plgpu.dim(first, min=edges[k - 1] + 1, max=edges[k])}


def in_shapes(*shapes):
    """Options of plgpu.kernel for operands of such shapes, if one of them has open rows."""
    known = [shape for shape in shapes if shape is not None]
    return {"in_shapes": shapes} if any(map(_sizes.is_open, known)) else {}
