"""All-to-all of rows, of which each device sends different numbers: tokens to their experts.

A device's rows stand in the order of the devices that they are for. Each worker first writes how
many its device sends to whom into a table of its number on all others, in staging memory; the
meeting that makes the arrays ready tells that the table is complete. From the table follow the
places of all rows. Each worker then moves its share of the rows to each device, by TMA if the bytes
of a row are a multiple of 16. Flags, epochs and the two halves of the table are those of
distributed.py."""

import math

import numpy as np

from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._names import show

from . import _bulk, distributed
from .distributed import _PIECE, _THREADS, ENTRY, EXIT, Collective, Workers, _runs


def _moved_in_bulk(w, ring, x, first, out, there, count, width):
    """`count` rows of x from row `first` on, to row `there` of out on; both are flat arrays."""
    size = ring.size
    pieces, rest = count * width // size, count * width % size

    def at(row, k):
        return pl.ds(row * width + (w.number + k * w.count) * size, size)

    ring.copy(w.trips(pieces), lambda k: x.at[at(first, k)], lambda k: [out.at[at(there, k)]])

    @pl.when((rest > 0) & (w.number == pieces % w.count))
    def _():
        keep, begin = jnp.arange(size) < rest, pieces * size
        value = pl.load(x, (pl.ds(first * width + begin, size),), mask=keep)
        pl.store(out, (pl.ds(there * width + begin, size),), value, mask=keep)


def _moved(w, width, itemsize, count, move):
    """move(first row, rows, columns) for `count` rows of this width, shared among the workers."""
    piece = _PIECE // itemsize
    if width >= piece:
        for start, size, pieces in _runs(width, piece):

            def one(i, start=start, size=size, pieces=pieces):
                move(i // pieces, 1, pl.ds(start + i % pieces * size, size))

            w.share(count * pieces, one)
        return
    height = max(piece // width, 1)
    every, whole = pl.ds(0, width), count // height
    w.share(whole, lambda i: move(i * height, height, every))
    w.share(count - whole * height, lambda i: move(whole * height + i, 1, every))


def _fitting(sizes, rows):
    """The same, as far as there are rows."""
    sizes = jnp.clip(sizes, 0, rows)
    before = jnp.cumsum(sizes) - sizes
    return jnp.minimum(sizes, jnp.maximum(rows - before, 0))


class _Places:
    """Where rows are, by the table of how many each device sends to each other one."""

    def __init__(self, w, table, capacity):
        self.me, self.capacity = w.me, capacity
        self.sent = table[...]
        self.source = lax.broadcasted_iota(jnp.int32, self.sent.shape, 0)
        self.target = lax.broadcasted_iota(jnp.int32, self.sent.shape, 1)

    def sum(self, where):
        return jnp.sum(jnp.where(where, self.sent, 0))

    def to(self, device):
        """(first row here, first row there, rows) of what goes to `device`."""
        own, there = self.source == self.me, self.target == device
        first = self.sum(own & (self.target < device))
        before = self.sum(there & (self.source < self.me))
        room = jnp.maximum(self.capacity - before, 0)
        return first, before, jnp.minimum(self.sum(own & there), room)

    def received(self):
        """How many rows come from all devices together."""
        return self.sum(self.target == self.me)


@cached
def _ragged(mesh, axis, rows, capacity, kinds, blocks, interpret):
    """kinds: (shape of a row, dtype) of each array whose rows move."""
    many, workers = len(kinds), blocks * _THREADS
    widths = [math.prod(shape) for shape, _ in kinds]

    bulk = _bulk.fits(widths[0], kinds[0][1].itemsize)
    scratch = {"scratch_types": _bulk.scratch(_THREADS, kinds[0][1])} if bulk else {}

    def body(refs, flags, epochs, **scratch):
        sizes, arrays = refs[0], refs[1 : 1 + many]
        received, outs, table = refs[1 + many], refs[2 + many : 2 + 2 * many], refs[-1]
        arrays = [x.reshape((rows, width)) for x, width in zip(arrays, widths)]
        outs = [x.reshape((capacity, width)) for x, width in zip(outs, widths)]
        w = Workers(flags, epochs, axis, workers)
        table = table.at[w.epoch % 2, w.number]
        sent = _fitting(sizes[...], rows)
        for d in w.everyone():
            w.on(table, d)[w.me] = sent
        w.meet(ENTRY)
        places = _Places(w, table, capacity)
        ring = _bulk.Ring(**scratch) if scratch else None
        for j in range(w.size):  # half of the workers of two devices begin with the own rows
            d = (w.me + 1 + (w.number + j) % w.size) % w.size
            first, there, count = places.to(d)
            for k, (x, out, width, (_, dtype)) in enumerate(zip(arrays, outs, widths, kinds)):
                target = w.on(out, d)
                if ring and k == 0:
                    x, target = x.reshape((rows * width,)), target.reshape((capacity * width,))
                    _moved_in_bulk(w, ring, x, first, target, there, count, width)
                    continue

                def move(i, height, at, x=x, target=target, first=first, there=there):
                    target[pl.ds(there + i, height), at] = x[pl.ds(first + i, height), at]

                _moved(w, width, dtype.itemsize, count, move)
        total = jnp.minimum(places.received(), capacity)
        for out, width, (_, dtype) in zip(outs, widths, kinds):

            def clear(i, height, at, out=out, dtype=dtype):
                out[pl.ds(total + i, height), at] = jnp.zeros((height, at.size), dtype)

            _moved(w, width, dtype.itemsize, capacity - total, clear)

        @pl.when(w.number == 0)
        def _():
            for s in range(w.size):
                received[s] = table[s, w.me]

        if ring:
            ring.finish()
        w.meet(EXIT)
        w.end()

    n = distributed._size(mesh, axis)
    outs = [((n,), np.int32), *(((capacity, *shape), dtype) for shape, dtype in kinds)]
    staging = [((2, workers, n, n), np.dtype(np.int32))]
    return Collective(mesh, body, "ragged_all_to_all", outs, staging, blocks, interpret, **scratch)


def ragged_all_to_all(
    x,
    sizes,
    mesh,
    axis_name=None,
    *,
    capacity=None,
    scales=None,
    blocks=None,
    interpret=None,
    out=None,
):
    """Send rows to other devices, a different number to each.

    x: (rows, ...) on each device, of any dtype of at most 32 bits: first the rows for device 0,
    then those for device 1, and so on. sizes: int32 (devices,), how many for each device; rows that
    x does not have are not sent, and negative sizes are 0. capacity: the number of rows of the
    result, by default that of x; rows beyond it are dropped. scales: a second array whose rows are
    sent together with those of x, for 8-bit floats. Arrays and ``blocks`` as for
    :func:`distributed.all_gather`.

    Returns ``(out, received)``, or ``(out, received, scales)``, in the arrays of ``out``, or new
    ones: out (capacity, ...) has the rows from device 0, then those from device 1, and so on,
    followed by zeros; received, int32 (devices,), says how many each device sent. This dispatches
    tokens to experts; ``ragged_all_to_all(y, received, mesh, capacity=rows)`` sends the results
    back to the places of their tokens. ValueError for other shapes."""
    what = "ragged_all_to_all"
    arrays = [x] if scales is None else [x, scales]
    ones = [distributed._operand(a, mesh, what, n) for a, n in zip(arrays, ("x", "scales"))]
    number = distributed._operand(sizes, mesh, what, "sizes")
    axis_name, n = distributed._along(mesh, axis_name, what)
    if tuple(number.shape) != (n,) or distributed._dtype(number, what, "sizes") != np.int32:
        raise ValueError(
            f"{what}: sizes must be int32 ({n},), got {number.dtype}{tuple(number.shape)}"
        )
    shapes = [tuple(map(int, a.shape)) for a in ones]
    if any(len(s) < 2 for s in shapes):
        raise ValueError(f"{what}: x, and scales, must be (rows, ...), got {shapes}")
    rows = shapes[0][0]
    if shapes[-1][0] != rows:
        raise ValueError(f"{what}: x and scales must have the same rows, got {shapes}")
    capacity = rows if capacity is None else distributed.positive(capacity, what, "capacity")
    if max(rows, capacity) * n >= 1 << 31:
        raise NotImplementedError(f"{what}: {max(rows, capacity)} rows on each of {n} devices")
    kinds = tuple((s[1:], distributed._dtype(a, what)) for s, a in zip(shapes, ones))
    blocks = distributed._blocks(blocks, what, (capacity, *kinds[0][0]), kinds[0][1])
    f = _ragged(mesh, axis_name, rows, capacity, kinds, blocks, interpret)
    given = out
    if out is not None:
        if not isinstance(out, (list, tuple)) or len(out) != 1 + len(arrays):
            got = len(out) if isinstance(out, (list, tuple)) else show(out)
            raise ValueError(f"{what}: out must have {1 + len(arrays)} results, got {got}")
        given = out[1], out[0], *out[2:]
    received, moved, *others = f(sizes, *arrays, out=given)
    return (moved, received, *others)
