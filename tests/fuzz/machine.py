"""The machine of model.py: memory that knows who wrote it, refs, barriers, accumulators, blocks and
threads that take turns."""

import math
import threading

import numpy as np

from .values import (
    FUSED,
    A,
    Invalid,
    as_array,
    as_dtype,
    is_float,
    is_int,
    need,
    to_dtype,
)

# ---- machine: blocks, threads, memory ------------------------------------------------------------


class Slice:
    def __init__(self, start, size):
        self.start, self.size = start, size


class Buffer:
    def __init__(self, space, shape, dtype):
        n = math.prod(shape)
        self.space, self.dtype = space, dtype
        self.data = np.zeros(n, dtype)
        self.mask = np.zeros(n, bool)  # was written
        self.writer = np.full(n, -1, np.int32)  # GMEM: which block and thread wrote
        self.writing = np.zeros(n, bool)  # by an asynchronous copy in flight
        self.reading = np.zeros(n, np.int16)  # by so many asynchronous operations
        self.products = np.zeros(n, np.int16)  # so many of them on tensor cores
        self.dirty = np.zeros(n, bool)  # generic writes the async proxy has not seen
        self.shown = np.zeros(n, bool)  # GMEM: whoever wrote it has signalled a semaphore since
        self.tol, self.flags = None, 0
        self.others = ()  # buffers at the same place

    def overwrite(self):
        """What is written here is no longer there in the others."""
        for o in self.others:
            need(not (o.writing.any() or o.reading.any()), "a place whose copies are in flight")
            o.mask[:] = False

    def note(self, tol, flags):
        if tol is not None:
            self.tol = tuple(map(max, self.tol, tol)) if self.tol else tol
        self.flags |= flags & FUSED


class Ref:
    """A view of a buffer."""

    def __init__(self, buf, idx, cut=(), seen=None):
        self.buf, self.idx, self.seen = buf, idx, seen  # seen: as another dtype
        self.cut = cut or (False,) * idx.ndim  # was the dim sliced already?
        self.scattered = False

    shape = property(lambda self: self.idx.shape)
    ndim = property(lambda self: self.idx.ndim)
    size = property(lambda self: self.idx.size)
    dtype = property(lambda self: self.seen or self.buf.dtype)
    memory_space = property(lambda self: self.buf.space)
    T = property(lambda self: self.transpose(tuple(range(self.ndim))[::-1]))
    at = property(lambda self: _At(self.view))

    def bitcast(self, dtype):
        return Ref(self.buf, self.idx, self.cut, as_dtype(dtype))

    def transpose(self, perm):
        need(self.seen is None, "a view of a bitcast")
        return Ref(self.buf, self.idx.transpose(perm), tuple(self.cut[p] for p in perm))

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        out = self.idx.reshape(shape)
        need(self.seen is None, "a view of a bitcast")
        need(self._folds(out.shape), "reshape of a view that does not fold")
        return Ref(self.buf, out, (True,) * len(out.shape))

    def _folds(self, shape):
        """Do the elements lie so that the reshape moves none?"""
        idx = self.idx
        steps = [
            int(idx.take(1, d).flat[0] - idx.flat[0]) if n > 1 else 0
            for d, n in enumerate(idx.shape)
        ]
        view = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), idx.shape, steps)
        try:
            view.shape = shape
        except AttributeError:
            return False
        return True

    def view(self, where):
        where = where if isinstance(where, tuple) else (where,)
        dots = [k for k, w in enumerate(where) if w is Ellipsis]
        n = len(where) - len(dots)
        need(n <= self.ndim and len(dots) < 2, "too many indices")
        at = dots[0] if dots else len(where)
        rest = [slice(None)] * (self.ndim - n)
        where = [*where[:at], *rest, *where[at + 1 :]]
        if any(isinstance(w, A) and w.shape for w in where):
            return self.by_arrays(where)
        idx, dim, cut = self.idx, 0, []
        for k, w in enumerate(where):
            size = idx.shape[dim]
            if isinstance(w, slice):
                need(w.step is None, "strided slice")
                part = range(*w.indices(size))
                need(len(part), "empty slice")
                idx = idx.take(part, axis=dim)
                cut.append(self.cut[k] or len(part) != size)
                dim += 1
                continue
            start, n = (w.start, w.size) if isinstance(w, Slice) else (w, None)
            dynamic = isinstance(start, A)
            start = scalar(start)
            if start < 0 and not dynamic and n is None:
                start += size
            count = 1 if n is None else n
            picks = np.arange(start, start + count)
            outside = (picks < 0) | (picks >= size)
            need(not outside.any() or not self.cut[k], "a slice of a slice is out of range")
            idx = idx.take(np.where(outside, 0, picks), axis=dim)
            if outside.any():
                shape = [-1 if d == dim else 1 for d in range(idx.ndim)]
                idx = np.where(outside.reshape(shape), -1, idx)
            if n is None:
                idx = idx.squeeze(dim)
            else:
                cut.append(True)
                dim += 1
        return Ref(self.buf, idx, tuple(cut), self.seen)

    def by_arrays(self, where):
        """Some indices are arrays: as in NumPy, but that they do not wrap."""
        picks = []
        for w, n in zip(where, self.shape, strict=True):
            if isinstance(w, A):
                need(is_int(w.dtype) and w.tol is None and not w.flags, "index array")
                w = w.v.astype(np.int64)
                need(((w >= 0) & (w < n)).all(), "an index array is out of range")
            picks.append(w)
        out = self.idx[tuple(picks)]
        ref = Ref(self.buf, out, (True,) * out.ndim, self.seen)
        ref.scattered = True
        return ref

    def __getitem__(self, where):
        return load(self.view(where))

    def __setitem__(self, where, value):
        store(self.view(where), value)

    def swap(self, value, idx=Ellipsis):
        old = load(self.view(idx))
        store(self.view(idx), value)
        return old


class _At:
    def __init__(self, view):
        self.view = view

    def __getitem__(self, where):
        return self.view(where)


def load(ref):
    if isinstance(ref, Acc):
        return ref[...]
    b, idx = ref.buf, ref.idx
    need((idx >= 0).all(), "load out of range")
    need(b.mask[idx].all(), "load of undefined memory")
    need(not b.writing[idx].any(), "load while a copy writes")
    if b.space == "gmem":
        w = b.writer[idx]
        known = (w < 0) | (w == here().writer) | b.shown[idx]
        need(known.all(), "load of what another block writes")
    if ref.seen is not None:
        need(b.space == "gmem" and (w == -2).all(), "a bitcast of what was computed")
        return A(b.data[idx].view(ref.seen))
    return A(b.data[idx], tol=b.tol, flags=b.flags)


def store(ref, value):
    b, idx = ref.buf, ref.idx
    x = as_array(value)
    need(x.shape == idx.shape, "store of {} into {}", x.shape, idx.shape)
    need((idx >= 0).all(), "store out of range")
    need(not ref.scattered or np.unique(idx).size == idx.size, "two values for one element")
    d = ref.dtype
    same = x.dtype == d or is_int(x.dtype) and is_int(d)
    same |= x.weak and is_float(x.dtype) and is_float(d)
    need(same, "store of {} into {}", x.dtype, d)
    need(not b.writing[idx].any() and not b.reading[idx].any(), "store while a copy is in flight")
    claim(b, idx)
    b.overwrite()
    weak_tol = x if x.dtype == d else to_dtype(x, d)
    if ref.seen is not None:
        need(x.tol is None and not x.flags & FUSED, "bits of an inexact value")
        need(not is_float(d) or not np.isnan(weak_tol.v.astype(np.float32)).any(), "bits of NaN")
    b.data[idx] = weak_tol.v if ref.seen is None else weak_tol.v.view(b.dtype)
    b.mask[idx] = True
    b.dirty[idx] = b.space == "smem"
    b.note(weak_tol.tol, x.flags)


def claim(b, idx):
    """GMEM elements belong to the thread that first writes them."""
    if b.space != "gmem":
        return
    need(b.writer[idx].max(initial=-1) >= -1, "store to an operand")
    me = here().writer
    w = b.writer[idx]
    need(((w == -1) | (w == me)).all(), "two blocks or threads write one element")
    b.writer[idx] = me
    if here().warp is not None:
        here().claims.append((b, idx))


class Bar:
    """One mbarrier."""

    def __init__(self, arrivals):
        self.arrivals, self.count, self.done = arrivals, 0, 0
        self.waits = {}  # agent -> phases it has seen
        self.before = {}  # thread whose warps wait -> phases it has seen
        self.pending, self.release = [], {}

    def arrive(self, undo=None):
        if undo:
            self.pending.append(undo)
        self.count += 1
        if self.count == self.arrivals:
            need(all(n >= self.done for n in self.waits.values()), "a phase completes unseen")
            self.release[self.done] = self.pending
            self.count, self.pending = 0, []
            self.done += 1


class BarRef:
    space = "barrier"

    def __init__(self, bars):
        self.bars = bars  # object array

    shape = property(lambda self: self.bars.shape)
    at = property(lambda self: _At(self.view))

    def view(self, where):
        where = where if isinstance(where, tuple) else (where,)
        where = tuple(scalar(w) for w in where)
        need(all(0 <= w < n for w, n in zip(where, self.bars.shape)), "barrier index")
        out = self.bars[where]
        return BarRef(out if isinstance(out, np.ndarray) else np.array(out, dtype=object))

    def one(self):
        need(self.bars.size == 1, "one barrier is needed")
        return self.bars.ravel()[0]


class Acc:
    """An accumulator, or a column slice of one."""

    def __init__(self, shape, dtype):
        self.v = np.zeros(shape, dtype)
        self.tol = [None]
        self.whole = self

    shape = property(lambda self: self.v.shape)
    dtype = property(lambda self: self.v.dtype)
    at = property(lambda self: _At(self._part))

    def _part(self, where):
        out = Acc.__new__(Acc)
        out.v, out.tol, out.whole = self.v[where], self.tol, self.whole
        need(out.v.ndim == 2 and out.v.size and np.shares_memory(out.v, self.v), "acc slice")
        need(out.shape[1] % 8 == 0 and out.shape[0] % 64 == 0, "acc slice")
        return out

    def __getitem__(self, where):
        here().wgmma_wait(0)
        return A(self.v.copy(), tol=self.tol[0])[where]

    def __setitem__(self, where, value):
        need(where is Ellipsis and self.whole is self, "store to a part of an accumulator")
        value = as_array(value)
        need(value.shape == self.shape and value.dtype == self.dtype, "store to an accumulator")
        here().wgmma_wait(0)
        self.v[...] = value.v
        self.tol[0] = value.tol
        need(not value.flags & FUSED, "a fused accumulator")


class Block:
    """One block: its number, its place along the axes of grid and cluster, its memory."""

    def __init__(self, number, where):
        self.number, self.where = number, where
        self.shared, self.collective = {}, {}
        self.semaphores = 0  # pl.get_global
        self.bars, self.ring, self.turns = [], None, 0
        self.visits, self.scope, self.made = {}, None, 0  # of scopes; the last one; what it made
        self.freed = False  # memory that copies to GMEM may still read


class Thread:
    """One Pallas thread of a block, or a warp of it; agent: who takes turns."""

    def __init__(self, machine, block, index, agent=0):
        self.machine, self.block, self.index, self.agent = machine, block, index, agent
        self.writer = block.number * 32 + index
        self.warp = self.warp_axis = None
        self.claims = []  # what a warp wrote is the thread's after the map
        self.open, self.groups, self.unread = [], [], []  # bulk groups
        self.warps = []  # that left some behind
        self.products = []
        self.scopes = 0

    def wgmma_wait(self, n):
        while len(self.products) > n:
            self.products.pop(0)()

    def wait_stores(self, n, read_only):
        need(not n or not self.warps, "groups of warps are counted")
        for warp in self.warps:
            need(not warp.open, "a copy of a warp that no group holds")
            warp.wait_stores(n, read_only)
        k = 0
        while len(self.groups) - k > n:
            for release_source, _ in self.groups[k]:
                release_source()
            k += 1
        done, self.groups = self.groups[:k], self.groups[k:]
        if read_only:
            self.unread += done
        else:
            for group in self.unread + done:
                for _, release_target in group:
                    release_target()
            self.unread = []


class Machine:
    """Runs one kernel: some blocks after others, their threads in turns."""

    def __init__(self):
        self.lock = threading.RLock()
        self.doors = {}  # agent -> where it waits for its turn
        self.turn = 0
        self.alive = []
        self.failure = None
        self.axes = {}
        self.steps = 0
        self.semaphores = []  # of the launch
        self.counters = {}
        self.peers = {}  # (cluster, number of the allocation, place in the cluster): what was made

    # threads take turns: one runs until it waits for a barrier or ends
    def pass_on(self, me):
        k = self.alive.index(me)
        self.turn = self.alive[(k + 1) % len(self.alive)]
        self.door(self.turn).notify()

    def door(self, agent):
        return self.doors.setdefault(agent, threading.Condition(self.lock))

    def fail(self, e):
        """The first failure ends all."""
        self.failure = self.failure or e
        for door in self.doors.values():
            door.notify()

    def wait_until(self, ready, me):
        """Blocks thread `me` until ready()."""
        spins = 0
        while not ready():
            need(len(self.alive) > 1, "deadlock")
            spins += 1
            need(spins < 10000, "deadlock")
            self.pass_on(me)
            self.await_turn(me)

    def await_turn(self, me):
        while self.turn != me and not self.failure:
            self.door(me).wait()
        if self.failure:
            raise Invalid("another thread failed")

    def run_blocks(self, body, blocks, n_threads):
        """Blocks at the same time."""
        agents = [(b, k) for b in blocks for k in range(n_threads)]
        self.alive = list(range(len(agents)))
        self.turn, self.failure = 0, None
        if len(agents) == 1:
            _local.thread = Thread(self, blocks[0], 0)
            self._one(body, _local.thread)
            return
        workers = [
            threading.Thread(target=self._worker, args=(body, b, k, agent), daemon=True)
            for agent, (b, k) in enumerate(agents)
        ]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if self.failure:
            raise self.failure

    def _one(self, body, thread):
        body()
        need(not thread.products, "products in flight at the end")

    def _worker(self, body, block, k, agent):
        _local.thread = Thread(self, block, k, agent)
        with self.lock:
            try:
                self.await_turn(agent)
                self._one(body, _local.thread)
                if len(self.alive) > 1:
                    self.pass_on(agent)
                self.alive.remove(agent)
            except BaseException as e:
                self.fail(e)


_local = threading.local()


def here():
    return _local.thread


def scalar(x):
    if isinstance(x, A):
        need(x.shape == () and is_int(x.dtype) and x.tol is None and not x.flags, "index scalar")
        return int(x.v)
    return x.__index__()


def predicate(p):
    p = as_array(p)
    need(p.shape == () and p.tol is None and not p.flags & FUSED, "predicate")
    return bool(p.v != 0)


def tick():
    m = here().machine
    m.steps += 1
    need(m.steps < 10_000, "runs too long")  # a few seconds in this model
