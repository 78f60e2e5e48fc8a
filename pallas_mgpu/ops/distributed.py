"""Collectives: exchanges and sums over the devices of a mesh, by stores over NVLink.

Devices meet inside the kernel. A *worker* is a warpgroup, with the same number on every device; it
exchanges flags only with the workers of its number, each of which has the same pieces of the
arrays. Flags count up: a worker has a count in device memory, which calls and replays of a CUDA
graph alike find where the last one left it. A flag that is as high as the count was raised for it.

Data goes through staging memory, which lasts: a worker writes an *item* into a slot of each other
device and raises its flag there, then takes what the others sent. It sends one item ahead of the
one that it takes. A slot is free for item k + 4: a device that sends it has seen the flag of the
other's item k + 2, which was sent after item k had been taken. So no worker waits before it sends,
and operands and results are accessed by their own device alone.

Copies of large arrays go directly into the results, by TMA where they are contiguous there, which
saves the way out of staging memory. These are ready for others only once the kernel has begun on
their device, since what made them comes before it in the stream. So workers first wait for a flag
of each other device (ENTRY), and a kernel ends only when no other device uses its arrays (EXIT).

Sums are taken in float32 in the order of the ranks, so that all devices get the same bits; two
summands need no order."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._names import show
from pallas_mgpu._spmd import is_symmetric
from pallas_mgpu._symmetric import own_tensor

from . import _bulk
from ._common import overlap_launches

_THREADS = 4  # warpgroups of a block
# SMs that take part by default: bytes of the larger array of a device from which on it is so many
_DEFAULT_SMS = (64 << 20, 128), (2 << 20, 64), (0, 16)
_PIECE = 8192  # bytes that a worker moves at a time
_ITEM = 32768  # bytes that one flag tells of, at most, on two devices
_SLOTS = 4  # of staging memory, for the items of a worker
_SMALL = 65536  # bytes of an array that all devices sum
_DIRECT = 1 << 21  # bytes of a part from which on copies go directly to where they belong
ENTRY, EXIT = range(2)  # kinds of flags
DATA = ENTRY  # of items, which are sent where nothing else is to be told first
_SUMMED = ("float32", "float16", "bfloat16", "int32", "uint32")  # by the switch


class Workers:
    """The meetings of one worker, while its kernel is traced.

    flags: int32 (workers, 2, devices), what each device has told this one. epochs: (workers,)."""

    def __init__(self, flags, epochs, axis, workers):
        self.flags, self.epochs, self.axis = plgpu.ext.as_semaphores(flags), epochs, axis
        self.count = workers
        self.number = lax.axis_index("block") * _THREADS + lax.axis_index("wg")
        self.size, self.me = lax.axis_size(axis), lax.axis_index(axis)
        self.epoch = epochs[self.number] + 1
        self.sent = 0  # items of this launch

    def others(self):
        """The other devices, from the next one on."""
        return [(self.me + k) % self.size for k in range(1, self.size)]

    def everyone(self):
        return [*self.others(), self.me]

    def on(self, ref, device):
        return plgpu.remote_ref(ref, {self.axis: device})

    def signal(self, kind, times=1):
        """All other devices: what this worker did before is done."""
        flag = self.flags.at[self.number, kind, self.me]
        signals = [
            plgpu.SemaphoreSignal(flag, device_id={self.axis: d}, inc=times) for d in self.others()
        ]
        plgpu.semaphore_signal_parallel(*signals)

    def await_all(self, kind, item=0):
        """Waits until all others have signalled in this launch, or for this item of it."""

        def wait(k):
            flag = self.flags.at[self.number, kind, (self.me + k) % self.size]
            plgpu.semaphore_wait(flag, self.epoch + item, decrement=False)

        each(1, self.size, wait)

    def meet(self, kind):
        self.signal(kind)
        self.await_all(kind)

    def end(self):
        """The count is that of the launches, or of the items where there are some."""
        last = self.epoch if isinstance(self.sent, int) else self.epoch + (self.sent - 1)
        self.epochs[self.number] = last

    def trips(self, items):
        """How many items are this worker's: number, number + count and so on."""
        return (items - self.number + (self.count - 1)) // self.count

    def share(self, items, work):
        """work(i) for the items of this worker."""
        trips = self.trips(items)
        lax.fori_loop(0, trips, lambda k, _: work(self.number + k * self.count), None)

    def pieces(self, rows, columns, itemsize, load, store=None, ready=None, arrays=1):
        """store(load(rows, columns), rows, columns) with slices of each piece of this worker, of an
        array of so many rows and columns. The next piece is loaded before one is stored. ready():
        is called once, before the first store. arrays: of which it holds a piece at a time."""
        piece = _piece(arrays, itemsize)
        if columns >= piece:
            for start, size, count in _runs(columns, piece):

                def at(i, start=start, size=size, count=count):
                    return pl.ds(i // count, 1), pl.ds(start + i % count * size, size)

                self._flow(rows * count, at, load, store, ready)
                ready = None
            return
        height = min(piece // columns, rows)
        whole, rest = divmod(rows, height)
        every = pl.ds(0, columns)
        self._flow(whole, lambda i: (pl.ds(i * height, height), every), load, store, ready)
        if rest:
            self._flow(1, lambda i: (pl.ds(whole * height, rest), every), load, store, None)

    def _flow(self, items, at, load, store, ready):
        """The items of this worker, of which the next one is loaded before one is stored."""
        if store is None:
            return self.share(items, lambda i: load(*at(i)))

        def get(i):
            return load(*at(jnp.minimum(i, items - 1)))

        trips = self.trips(items)
        value = get(self.number)
        if ready:
            ready()

        def step(k, value):
            i = self.number + k * self.count
            following = get(i + self.count)
            store(value, *at(i))
            return following

        lax.fori_loop(0, trips, step, value)

    def exchange(self, staging, n, send, take):
        """Parts of n elements through staging memory, (slots, workers, devices, elements).

        send(where, targets): write what the others are to get of the part's slice `where` to
        targets(d), for device d. take(where, sources): use what came, sources.at[d] from device d.
        """
        size = staging.shape[-1]
        whole, rest = divmod(n, size)

        def slot(item):
            return staging.at[(self.epoch + item) % _SLOTS, self.number]

        def give(item, where):
            here = slot(item).at[self.me]
            send(where, lambda d: self.on(here, d))
            self.signal(DATA)

        def get(item, where):
            self.await_all(DATA, item)
            take(where, slot(item))

        if rest:  # first, by a worker that has no more other items than the rest of them
            where, mine, first = (
                pl.ds(whole * size, rest),
                self.number == whole % self.count,
                self.sent,
            )

            @pl.when(mine)
            def _():
                give(first, where)
                get(first, where)

            self.sent = first + mine.astype(jnp.int32)
        if not whole:
            return
        first, trips = self.sent, self.trips(whole)

        def where(k):
            return pl.ds((self.number + k * self.count) * size, size)

        def step(k, _):
            pl.when(k < trips)(lambda: give(first + k, where(k)))
            pl.when(k > 0)(lambda: get(first + (k - 1), where(k - 1)))

        lax.fori_loop(0, trips + 1, step, None)
        self.sent = first + trips


def each(first, end, do):
    """do(k) for each k; one is no loop."""
    if end - first == 1:
        return do(first)
    lax.fori_loop(first, end, lambda k, _: do(k), None)


def _item(n, itemsize, workers, devices, least=1):
    """Elements of an item of a part of n elements: they are shared among the workers. With more
    devices items are smaller, so that as many bytes are on the way, and staging memory stays so
    large. least: items of a worker, if those of _PIECE bytes are so many."""
    size, most = 2048, max(2 * _ITEM // devices, 2048)
    if least > 1:
        most = min(most, max(n * itemsize // (workers * least), _PIECE))
    while size * 2 <= most and size * workers < n * itemsize:
        size *= 2
    return size // itemsize


def _batches(n, itemsize, arrays, load, store):
    """store(load(start, size), start, size) for slices of n elements, of which two fit in registers
    for each of some arrays: the next one is loaded before one is stored."""
    places, start = [], 0
    size = max(2 * _PIECE // max(arrays, 2 if itemsize == 1 else 1), 2048) // itemsize
    size = 1 << (size.bit_length() - 1)
    while start < n:
        while size > n - start:
            size //= 2
        places.append((start, size))
        start += size
    value = load(*places[0])
    for at, following in zip(places, [*places[1:], None]):
        coming = load(*following) if following else None
        store(value, *at)
        value = coming


def _copy(source, where, *targets):
    """A slice of a flat array into others, (target, where it begins there)."""

    def store(value, start, size):
        for target, first in targets:
            target[pl.ds(first + start, size)] = value

    def load(start, size):
        return source[pl.ds(where.start + start, size)]

    _batches(where.size, source.dtype.itemsize, 1, load, store)


def _piece(arrays, itemsize):
    """Elements that a worker takes at a time of each of some arrays: they fit in registers."""
    return max(min(_PIECE, 2 * _PIECE // arrays), 2048) // itemsize


def _runs(n, piece):
    """(start, size, count) of equal slices that are n elements together: pieces, then halves of
    them while all lanes have elements, then what is left."""
    start, size = 0, piece
    while start < n:
        count = (n - start) // size
        if size < 128:
            size, count = n - start, 1
        if count:
            yield start, size, count
        start += size * count
        size //= 2


def _total(parts, dtype):
    """The sum of arrays, in their order."""
    if dtype.kind not in "iub":
        parts = [x.astype(jnp.float32) for x in parts]
    elif dtype.itemsize == 1 and dtype.kind != "b":
        parts = [x.astype(jnp.int32) for x in parts]  # there are no sums of 8 bits
    return functools.reduce(lambda a, b: a + b, parts).astype(dtype)


# ---- kernels ------------------------------------------------------------------------------------


def _gather(w, x, out, staging, view):
    """Each device sends its array to all."""
    n = math.prod(view)
    x, out = x.reshape((n,)), out.reshape((w.size, n))

    def send(where, targets):
        to = [(targets(d), 0) for d in w.others()]
        _copy(x, where, *to, (out.at[w.me], where.start))

    def take(where, sources):
        for d in w.others():
            _copy(sources.at[d], pl.ds(0, where.size), (out.at[d], where.start))

    w.exchange(staging, n, send, take)


def _gather_directly(w, x, out, view):
    """Each device writes its array into the results of all."""
    major, inner = view
    x, out = x.reshape((major, inner)), out.reshape((major, w.size, inner))
    targets = [w.on(out, d).at[:, w.me] for d in w.others()] + [out.at[:, w.me]]

    def store(value, *at):
        for target in targets:
            target[at] = value

    w.signal(ENTRY)
    w.pieces(major, inner, x.dtype.itemsize, lambda *at: x[at], store, lambda: w.await_all(ENTRY))
    w.meet(EXIT)


def _gather_in_bulk(w, x, out, view, ring):
    """The same by TMA; the array is contiguous in the results."""
    n = math.prod(view)
    x, out = x.reshape((n,)), out.reshape((w.size, n))
    targets = [w.on(out, d).at[w.me] for d in w.others()] + [out.at[w.me]]
    pieces, rest = divmod(n, ring.size)

    def at(k):
        return pl.ds((w.number + k * w.count) * ring.size, ring.size)

    w.signal(ENTRY)
    ring.copy(
        w.trips(pieces),
        lambda k: x.at[at(k)],
        lambda k: [target.at[at(k)] for target in targets],
        lambda: w.await_all(ENTRY),
    )
    if rest:
        last = pl.ds(pieces * ring.size, rest)
        pl.when(w.number == pieces % w.count)(
            lambda: _copy(x, last, *((t, last.start) for t in targets))
        )
    ring.finish()
    w.meet(EXIT)


def _others_sum(w):
    """The devices that get a summand through staging memory."""
    return w.others() if w.size == 2 else w.everyone()


def _sum_into(w, where, own, sources, targets):
    """own: flat array with the own summand at `where`; targets have the sum there."""

    def load(start, size):
        here, at = pl.ds(start, size), pl.ds(where.start + start, size)
        if w.size == 2:
            return [own[at], sources.at[1 - w.me][here]]
        return [sources.at[d][here] for d in range(w.size)]

    def store(parts, start, size):
        value = _total(parts, own.dtype)
        for target in targets:
            target[pl.ds(where.start + start, size)] = value

    _batches(where.size, own.dtype.itemsize, w.size, load, store)


def _scatter_sums(w, x, out, staging, view):
    """Each device sends part d to device d, and sums what it got."""
    n = math.prod(view)
    x, out = x.reshape((w.size, n)), out.reshape((n,))

    def send(where, targets):
        for d in _others_sum(w):
            _copy(x.at[d], where, (targets(d), 0))

    def take(where, sources):
        _sum_into(w, where, x.at[w.me], sources, [out])

    w.exchange(staging, n, send, take)


def _scatter_sums_of_columns(w, x, out, view):
    """Each device reads its part, which is in many places, from all."""
    major, inner = view
    x, out = x.reshape((major, w.size, inner)), out.reshape((major, inner))
    w.meet(ENTRY)
    sources = [w.on(x, d).at[:, w.me] for d in range(w.size)]

    def move(*at):
        out[at] = _total([source[at] for source in sources], out.dtype)

    w.pieces(major, inner, x.dtype.itemsize, move, arrays=w.size)
    w.meet(EXIT)


def _sum_in_two_steps(w, x, out, staging, view):
    """Each device sums the items of its own, and writes them into the results of all. Items are
    dealt to the devices; the rest of them are summed by all."""
    (n,) = view
    size = staging.shape[-1]
    groups = n // (size * w.size)
    if groups:
        parts, sums = x.reshape((n,)), out.reshape((n,))
        everyone = [w.on(sums, d) for d in w.everyone()]

        def part(d, where):
            """The slice of device d, of items that are dealt to the devices."""
            return pl.ds(where.start * w.size + d * size, size)

        def send(where, targets):
            for d in _others_sum(w):
                _copy(parts, part(d, where), (targets(d), 0))

        def take(where, sources):
            _sum_into(w, part(w.me, where), parts, sources, everyone)

        w.exchange(staging, groups * size, send, take)
    done = groups * size * w.size
    if done < n:
        _sum_by_all(w, x, out, staging, n, done)
    if groups:  # this flag counts items too
        w.signal(EXIT, w.sent)
        w.await_all(EXIT, w.sent - 1)


def _sum_by_all(w, x, out, staging, n, done=0):
    """Each device sends its array, from an element on, to all, and sums what it got."""
    x, out = (r.reshape((n,)).at[pl.ds(done, n - done)] for r in (x, out))

    def send(where, targets):
        _copy(x, where, *((targets(d), 0) for d in _others_sum(w)))

    w.exchange(
        staging, n - done, send, lambda where, sources: _sum_into(w, where, x, sources, [out])
    )


def _sum_through_staging(w, x, out, staging, view):
    _sum_by_all(w, x, out, staging, *view)


def _exchange(w, x, out, staging, view):
    """Each device sends part d of its array to device d."""
    n = math.prod(view)
    x, out = x.reshape((w.size, n)), out.reshape((w.size, n))

    def send(where, targets):
        for d in w.others():
            _copy(x.at[d], where, (targets(d), 0))
        _copy(x.at[w.me], where, (out.at[w.me], where.start))

    def take(where, sources):
        for d in w.others():
            _copy(sources.at[d], pl.ds(0, where.size), (out.at[d], where.start))

    w.exchange(staging, n, send, take)


def _exchange_in_bulk(w, x, out, view, ring):
    """Each device writes part d of its array into the result of device d, by TMA."""
    n = math.prod(view)
    x, out = x.reshape((w.size, n)), out.reshape((w.size, n))
    pieces, rest = divmod(n, ring.size)

    def place(k):
        """The device, and the slice of its part: devices by turns, from the next one on."""
        i = w.number + k * w.count
        device = (w.me + 1 + i % w.size) % w.size
        return device, pl.ds(i // w.size * ring.size, ring.size)

    def source(k):
        device, at = place(k)
        return x.at[device, at]

    def target(k):
        device, at = place(k)
        return [w.on(out, device).at[w.me, at]]

    w.signal(ENTRY)
    ring.copy(w.trips(pieces * w.size), source, target, lambda: w.await_all(ENTRY))
    if rest:
        last = pl.ds(pieces * ring.size, rest)
        for k, d in enumerate(w.everyone()):
            target_of = w.on(out, d).at[w.me]
            pl.when(w.number == (pieces * w.size + k) % w.count)(
                lambda d=d, t=target_of: _copy(x.at[d], last, (t, last.start))
            )
    ring.finish()
    w.meet(EXIT)


# ---- kernels, by NVLink multicast ---------------------------------------------------------------
# The switch stores to all devices, and reads the sum of all, at one address. That is an address of
# a window of staging memory, where parts of arrays begin anew, and are padded to whole pieces: so
# each lane has words of 32 bits or more, and a worker the same pieces on all devices. Kernels end
# without a meeting, as windows have two halves.


class _Window:
    """Parts of arrays in the half of a window that is for this launch."""

    def __init__(self, w, window, part):
        self.w, self.half, self.part = w, window.at[w.epoch % 2], part
        self.size, self.count = _window(part, window.dtype.itemsize)

    def pieces(self, move):
        """move(where in the window, elements there) for each piece of this worker."""
        whole, rest = divmod(self.part, self.size)
        self.w.share(whole, lambda i: move(pl.ds(i * self.size, self.size), self.size))
        if rest:  # the piece after those, by the worker whose turn it is
            last = pl.ds(whole * self.size, self.size)
            pl.when(self.w.number == whole % self.w.count)(lambda: move(last, rest))

    def copy(self, source, target, at, n, to=None):
        """n elements from `at` on of a flat array to a flat array."""
        to = at.start if to is None else to
        if n == self.size:
            target[pl.ds(to, n)] = source[at]
            return
        for start, size, count in _runs(n, self.size):

            def move(i, _, start=start, size=size):
                k = start + i * size
                target[pl.ds(to + k, size)] = source[pl.ds(at.start + k, size)]

            lax.fori_loop(0, count, move, None)

    def sum(self, part, at):
        return plgpu.multimem_load_reduce(
            self.half.at[part, at], collective_axes=self.w.axis, reduction_op="add"
        )

    def store(self, value, part, at):
        plgpu.multimem_store(value, self.half.at[part, at], collective_axes=self.w.axis)


def _window(part, itemsize):
    """(elements of a piece, pieces) of a part."""
    unit = 2048 // itemsize  # 16 bytes a lane
    size = min(_PIECE // itemsize, pl.cdiv(part, unit) * unit)
    return size, pl.cdiv(part, size)


def _gather_by_multicast(w, x, out, window, *tail, view):
    part = math.prod(view)
    x, out = x.reshape((part,)), out.reshape((w.size, part))
    parts = _Window(w, window, part)

    def send(at, n):
        if n == parts.size:
            parts.store(x[at], w.me, at)
            return
        parts.copy(x, tail[0], at, n, 0)
        parts.store(tail[0][...], w.me, at)

    def take(at, n):
        for d in range(w.size):
            parts.copy(parts.half.at[d], out.at[d], at, n)

    parts.pieces(send)
    w.meet(ENTRY)
    parts.pieces(take)


def _scatter_sums_by_multicast(w, x, out, window, *tail, view):
    part = math.prod(view)
    x, out = x.reshape((w.size, part)), out.reshape((part,))
    parts = _Window(w, window, part)

    def put(at, n):
        for d in range(w.size):
            parts.copy(x.at[d], parts.half.at[d], at, n)

    def total(at, n):
        value = parts.sum(w.me, at)
        if n == parts.size:
            out[at] = value
            return
        tail[0][...] = value
        parts.copy(tail[0], out, pl.ds(0, parts.size), n, at.start)

    parts.pieces(put)
    w.meet(ENTRY)
    parts.pieces(total)


def _sum_by_multicast(w, x, out, window, view):
    """Each device takes the sums of its pieces from the switch, and stores them to all."""
    (n,) = view
    x, out = x.reshape((n,)), out.reshape((n,))
    parts = _Window(w, window, n)
    parts.pieces(lambda at, n: parts.copy(x, parts.half.at[0], at, n))
    w.meet(ENTRY)

    def total(at, _):
        piece = at.start // parts.size
        mine = (piece + piece // w.count) % w.size == w.me
        pl.when(mine)(lambda: parts.store(parts.sum(0, at), 0, at))

    parts.pieces(total)
    w.meet(EXIT)
    parts.pieces(lambda at, n: parts.copy(parts.half.at[0], out, at, n))


# ---- calls --------------------------------------------------------------------------------------


class Own(NamedTuple):
    """Lasting memory of a kernel that no other device accesses."""

    shape: tuple
    dtype: np.dtype


def _lasting(spec, mesh, multicast):
    if isinstance(spec, Own) and mesh.group is not None:
        return own_tensor(spec)
    return plgpu.symm_empty(*spec, mesh, multicast=multicast)


class Collective:
    """One kernel on one mesh, with the memory in which its devices meet."""

    def __init__(self, mesh, body, name, outs, staging, blocks, interpret, **options):
        """body(refs, flags, epochs): of the operands, the outs and the staging memory: shapes and
        dtypes, or Own."""
        threads = options.pop("num_threads", _THREADS)
        workers, kinds = options.pop("flags", (blocks * _THREADS, 2))
        windows = options.pop("windows", [])  # of staging memory that NVLink multicasts to
        shapes = [
            *windows,
            *staging,
            ((workers, kinds, mesh.size), np.int32),
            Own((options.pop("epochs", blocks * _THREADS),), np.dtype(np.int32)),
        ]
        self.fresh, self.mesh, self.name = outs, mesh, name
        if mesh.devices is None and mesh.group is None:
            interpret = interpret or True
        # one GPU in place of several devices needs room for all their blocks at the same time
        early = mesh.devices is None or len(set(mesh.devices)) == len(mesh.devices)

        def run(*refs, **scratch):
            if early:
                overlap_launches()
            body(refs[:-2], *refs[-2:], **scratch)

        kernel = plgpu.kernel(
            run,
            out_type=tuple(plgpu.ShapeDtypeStruct(*s) for s in [*outs, *shapes]),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=threads,
            thread_name="wg",
            interpret=interpret,
            kernel_name=name,
            **options,
        )
        self.call = plgpu.spmd(kernel, mesh, ordered=False)
        self.lasting = [_lasting(s, mesh, k < len(windows)) for k, s in enumerate(shapes)]
        self.remote, self.windows = None, {}

    def __call__(self, *args, out=None):
        """out: the results, or the only one; None: fresh ones."""
        n = len(self.fresh)
        outs = [None] * n if out is None else [out] if n == 1 else list(out)
        if len(outs) != n:
            raise ValueError(f"{self.name}: out must have {n} results, got {len(outs)}")
        if self.mesh.group is None:
            made = self.call(*args, out=(*outs, *self.lasting))[:n]
        else:
            made = self._on_rank(args, outs)
        return made[0] if n == 1 else made

    def _on_rank(self, args, outs):
        """With a process group: arrays that other devices access, and that are not in memory that
        they reach, have a copy there, which lasts."""
        if self.remote is None:
            program = self.lower(*args).graph.cuda(line=False, catalogue=False)[1]
            self.remote = [k for k in program["peers"] if k >= 0]  # -1: counters
        arrays = [*args, *outs]
        for k in self.remote:
            if k >= len(arrays) or (arrays[k] is not None and is_symmetric(arrays[k])):
                continue
            if k not in self.windows:
                x = args[k] if k < len(args) else None
                spec = (
                    self.fresh[k - len(args)] if x is None else (x.shape, _dtype(x, "collective"))
                )
                self.windows[k] = plgpu.symm_empty(*spec, self.mesh)
            if k < len(args):
                self.windows[k].copy_(args[k])
            arrays[k] = self.windows[k]
        first = len(args)
        made = self.call(*arrays[:first], out=(*arrays[first:], *self.lasting))[: len(outs)]
        return [self._own(x, given, k + first) for k, (x, given) in enumerate(zip(made, outs))]

    def _own(self, made, given, k):
        """A result that the next call leaves alone."""
        if made is not self.windows.get(k):
            return made
        return made.clone() if given is None else given.copy_(made)

    def lower(self, *args, **options):
        return self.call.lower(*args, **options)


_KERNELS = {
    "all_gather": _gather,
    "all_gather_directly": _gather_directly,
    "all_gather_in_bulk": _gather_in_bulk,
    "reduce_scatter": _scatter_sums,
    "reduce_scatter_of_columns": _scatter_sums_of_columns,
    "all_reduce": _sum_in_two_steps,
    "all_reduce_one_shot": _sum_through_staging,
    "all_to_all": _exchange,
    "all_to_all_in_bulk": _exchange_in_bulk,
    "all_gather_by_multicast": _gather_by_multicast,
    "reduce_scatter_by_multicast": _scatter_sums_by_multicast,
    "all_reduce_by_multicast": _sum_by_multicast,
}


@cached
def _collective(mesh, axis, kind, dtype, out_shape, view, blocks, interpret):
    n, size, staging, options = math.prod(view), _size(mesh, axis), [], {}
    if kind.endswith("_by_multicast"):
        item, count = _window(n, dtype.itemsize)
        sums_all = kind.startswith("all_reduce")
        options["windows"] = [((2, 1 if sums_all else size, item * count), dtype)]
        if n % item and not sums_all:
            staging = [((item,), dtype)]  # the tail
    elif kind.endswith("_in_bulk"):
        options["scratch_types"] = _bulk.scratch(_THREADS, dtype)
    elif not kind.endswith(("_directly", "_of_columns")):
        part = pl.cdiv(n, size) if kind == "all_reduce" else n
        # sums begin earlier; not measured on two devices
        least = 4 if kind == "reduce_scatter" and size > 2 else 1
        item = _item(part, dtype.itemsize, blocks * _THREADS, size, least)
        blocks = min(blocks, pl.cdiv(pl.cdiv(part, item), _THREADS))
        staging = [((_SLOTS, blocks * _THREADS, size, item), dtype)]

    def body(refs, flags, epochs, **scratch):
        w = Workers(flags, epochs, axis, blocks * _THREADS)
        ring = {"ring": _bulk.Ring(**scratch)} if scratch else {}
        _KERNELS[kind](w, *refs, view=view, **ring)
        w.end()

    return Collective(mesh, body, kind, [(out_shape, dtype)], staging, blocks, interpret, **options)


def _in_bulk(what, n, dtype):
    """The kind of a kernel that copies parts of n elements."""
    large = n * dtype.itemsize >= _DIRECT and _bulk.fits(n, dtype.itemsize)
    return f"{what}_in_bulk" if large else what


def _flag(x, what, name):
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{what}: {name} must be a bool, got {show(x)}")
    return bool(x)


def _one_shot(x, what):
    if not isinstance(x, (bool, np.bool_, type(None))):
        raise TypeError(f"{what}: one_shot must be a bool or None, got {show(x)}")
    return None if x is None else bool(x)


def _by_multicast(what, mesh, dtype, axis=0):
    """The kind of such a kernel, if it can be."""
    if len(mesh.shape) > 1:
        raise NotImplementedError(
            f"{what}: multicast=True on a mesh of {len(mesh.shape)} axes; use a mesh of one"
        )
    if axis:
        raise NotImplementedError(f"{what}: multicast=True along axis {axis}; use axis 0")
    if what != "all_gather" and dtype.name not in _SUMMED:
        raise NotImplementedError(
            f"{what}: multicast=True of {dtype}; NVLink sums {', '.join(_SUMMED)}"
        )
    return f"{what}_by_multicast"


def _operand(x, mesh, what, name="x"):
    """The array of one device, for its shape and dtype."""
    if not isinstance(mesh, plgpu.DeviceMesh):
        raise TypeError(f"{what}: mesh must be a plgpu.DeviceMesh, got {show(mesh)}")
    arrays = [x]
    if mesh.group is None:
        if not isinstance(x, (list, tuple)) or len(x) != mesh.size:
            got = f"{len(x)} of them" if isinstance(x, (list, tuple)) else show(x)
            raise TypeError(
                f"{what}: {name} must be a list of {mesh.size} arrays, one for each device, got"
                f" {got}"
            )
        arrays = x
    for a in arrays:
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise TypeError(f"{what}: {name} must consist of arrays, got {show(a)}")
    one = arrays[0]
    if 0 in one.shape:
        raise ValueError(f"{what}: {name} has no elements, its shape is {tuple(one.shape)}")
    return one


def _along(mesh, axis_name, what):
    """The axis of the mesh, and its size."""
    names = mesh.axis_names
    if axis_name is None and len(names) == 1:
        axis_name = names[0]
    if axis_name not in names:
        raise ValueError(f"{what}: axis_name must be one of {names}, got {axis_name!r}")
    return axis_name, _size(mesh, axis_name)


def _size(mesh, axis_name):
    return dict(mesh.axes)[axis_name]


@functools.cache
def _known(dtype):
    """That of an array, of whatever library."""
    return plgpu.ShapeDtypeStruct((), str(dtype).removeprefix("torch.")).dtype


def _dtype(x, what, name="x"):
    try:
        found = _known(x.dtype)
    except TypeError:
        raise TypeError(
            f"{what}: {name} has dtype {x.dtype}, which kernels do not take; cast it to a dtype of"
            " 32 bits or less"
        ) from None
    if found.kind in "iu" and found.itemsize == 8:
        raise NotImplementedError(f"{what}: {name} of {found.name}; use a dtype of at most 32 bits")
    return found


def _split(shape, axis, what):
    """(major, minor): the product of the dims before the axis, and from it on."""
    n = len(shape)
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"{what}: axis must be an int, got {show(axis)}")
    axis = axis.__index__()
    if not -n <= axis < n:
        raise ValueError(f"{what}: axis {axis} of an array of shape {tuple(shape)}")
    axis %= n
    return axis, math.prod(shape[:axis]), math.prod(shape[axis:])


def _blocks(blocks, what, shape=(), dtype=None):
    """How many SMs take part, with arrays of this shape: the larger one of a device."""
    if blocks is None:
        size = math.prod(shape) * dtype.itemsize
        found = next(sms for least, sms in _DEFAULT_SMS if size >= least)
        return min(found, plgpu.sm_count())
    return positive(blocks, what, "blocks")


def positive(x, what, name):
    if isinstance(x, bool) or not hasattr(x, "__index__") or x.__index__() < 1:
        raise ValueError(f"{what}: {name} must be a positive int, got {show(x)}")
    return x.__index__()


def all_gather(
    x, mesh, axis_name=None, *, axis=0, blocks=None, multicast=False, interpret=None, out=None
):
    """On each device, the arrays of all devices joined along ``axis``, in the order of the devices.

    x: a list of arrays, one for each device, of one shape and dtype; with a process group, the
    tensor of this process. Returns the same kind, or ``out``, which it writes. axis_name: on a mesh
    of several axes, the one along which devices exchange; each row of devices along it exchanges
    separately. ``blocks``: the maximum number of SMs of each device that take part; None: 16, 64
    where the larger of a device's arrays has 2 MiB or more, 128 from 64 MiB on. 16 SMs move large
    arrays at 0.85 times the rate. Calls on one mesh must follow each other on every device, in the
    same order. With a process group, arrays that other devices access (results of 2 MiB a device or
    more, and where ``axis`` is not the first dimension of more than one element) need no copies if
    they are tensors from ``plgpu.symm_empty``; others are copied to or from such a tensor, which
    the first call of each shape allocates.

    ``multicast``: use NVLink multicast, by which the switch stores to all devices and sums over
    them (Hopper, with a process group; never used by default). The switch then rounds the sums, in
    the same way for all devices. NotImplementedError for the GPUs of one process."""
    what = "all_gather"
    one = _operand(x, mesh, what)
    axis_name, n = _along(mesh, axis_name, what)
    axis, major, inner = _split(one.shape, axis, what)
    shape = (*one.shape[:axis], one.shape[axis] * n, *one.shape[axis + 1 :])
    dtype = _dtype(one, what)
    kind = f"{what}_directly" if major > 1 else _in_bulk(what, inner, dtype)
    if _flag(multicast, what, "multicast"):
        kind = _by_multicast(what, mesh, dtype, axis if major > 1 else 0)
    how = _blocks(blocks, what, shape, dtype), interpret
    return _collective(mesh, axis_name, kind, dtype, shape, (major, inner), *how)(x, out=out)


def reduce_scatter(
    x, mesh, axis_name=None, *, axis=0, blocks=None, multicast=False, interpret=None, out=None
):
    """The sum of the arrays of all devices, split along ``axis``: device d gets part d of it.

    Floats are summed in float32, in the order of the devices. ValueError if the axis cannot be
    divided evenly. Everything else is as for :func:`all_gather`."""
    what = "reduce_scatter"
    one = _operand(x, mesh, what)
    axis_name, n = _along(mesh, axis_name, what)
    axis, major, inner = _split(one.shape, axis, what)
    if one.shape[axis] % n:
        raise ValueError(f"{what}: axis {axis} of {tuple(one.shape)} has no {n} equal parts")
    shape = (*one.shape[:axis], one.shape[axis] // n, *one.shape[axis + 1 :])
    dtype = _dtype(one, what)
    kind = f"{what}_of_columns" if major > 1 else what
    if _flag(multicast, what, "multicast"):
        kind = _by_multicast(what, mesh, dtype, axis if major > 1 else 0)
    how = _blocks(blocks, what, one.shape, dtype), interpret
    return _collective(mesh, axis_name, kind, dtype, shape, (major, inner // n), *how)(x, out=out)


def all_reduce(
    x,
    mesh,
    axis_name=None,
    *,
    blocks=None,
    one_shot=None,
    multicast=False,
    interpret=None,
    out=None,
):
    """The sum of the arrays of all devices, the same bits on each of them.

    ``one_shot``: every device sends its whole array to all others and sums all of them, which takes
    one synchronisation; otherwise each sums a part and sends the sum to the others, which takes
    two. None: one-shot for arrays of up to 64 KiB. Everything else is as for
    :func:`reduce_scatter`."""
    what = "all_reduce"
    one = _operand(x, mesh, what)
    axis_name, _ = _along(mesh, axis_name, what)
    dtype, n = _dtype(one, what), math.prod(one.shape)
    one_shot = _one_shot(one_shot, what)
    if one_shot is None:
        one_shot = n * dtype.itemsize <= _SMALL
    kind = "all_reduce_one_shot" if one_shot else what
    if _flag(multicast, what, "multicast"):
        kind = _by_multicast(what, mesh, dtype)
    how = _blocks(blocks, what, one.shape, dtype), interpret
    return _collective(mesh, axis_name, kind, dtype, tuple(one.shape), (n,), *how)(x, out=out)


def all_to_all(x, mesh, axis_name=None, *, blocks=None, interpret=None, out=None):
    """Part d of each array, along its first dimension, goes to device d: part s of the result came
    from device s. ValueError if the dimension cannot be divided evenly. Everything else is as for
    :func:`all_gather`."""
    what = "all_to_all"
    one = _operand(x, mesh, what)
    axis_name, n = _along(mesh, axis_name, what)
    _split(one.shape, 0, what)
    if one.shape[0] % n:
        raise ValueError(
            f"{what}: the first dimension of {tuple(one.shape)} has no {n} equal parts"
        )
    part, dtype = math.prod(one.shape) // n, _dtype(one, what)
    kind, how = _in_bulk(what, part, dtype), (_blocks(blocks, what, one.shape, dtype), interpret)
    f = _collective(mesh, axis_name, kind, dtype, tuple(one.shape), (1, part), *how)
    return f(x, out=out)
