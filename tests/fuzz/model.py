"""The language in NumPy: what a kernel means, one Pallas thread after the other. Blocks come one
after the other too, unless they tell each other something: then their threads take turns as well.

`run(make, operands, outs)` executes a kernel written over the four namespaces that `make` is
given and returns an `Expected` per output. It shares no code with the package. Arrays are NumPy
arrays with a weak flag; a ref is an array of flat indices into a buffer (-1: outside), so that
slices, transposes and reshapes are NumPy's own.

It is also the judge of what a kernel may do: `Invalid` is raised where a result would not be
defined or would depend on the schedule - reads of memory that nobody wrote, indices out of range,
buffers touched while a copy or a product is in flight, generic writes that the async proxy has
not been shown, two blocks writing one element, float sums whose order matters, division by zero.
So the generator may be careless, and the shrinker cannot leave the language.

Values that are not exact by the language carry what may differ: `tol`, a relative and an
absolute bound (transcendental functions; float products of tensor cores), and FUSED, where a
GPU's compiler may have made one fma of a multiplication and an addition."""

import contextlib
import functools
import itertools
import math
import types
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import array_model, function_model, hopper_model
from .machine import (
    Acc,
    Bar,
    BarRef,
    Block,
    Buffer,
    Machine,
    Ref,
    Slice,
    claim,
    here,
    load,
    predicate,
    scalar,
    store,
    tick,
)
from .values import (
    BOOL,
    FUSED,
    A,
    Invalid,
    as_array,
    as_dtype,
    bf16,
    binary,
    bitcast,
    broadcast_in_dim,
    broadcast_to,
    f16,
    f32,
    full,
    i32,
    iota,
    is_float,
    is_int,
    need,
    reduction,
    to_dtype,
    unary,
    where,
)

# ---- copies, barriers, products ------------------------------------------------------------------


def copy_gmem_to_smem(src, dst, barrier, *, predicate=None, oob_mode=None):
    need(src.buf.space == "gmem" and dst.buf.space == "smem", "spaces of a copy")
    need(src.shape == dst.shape and src.dtype == dst.dtype, "types of a copy")
    bar = barrier.one()
    if predicate is not None and not _predicate(predicate):
        bar.arrive()
        return
    s, d = src.idx, dst.idx
    inside = s >= 0
    need((d >= 0).all(), "copy out of range of SMEM")
    need(src.buf.mask[s[inside]].all(), "copy of undefined memory")
    known = (src.buf.writer[s[inside]] < 0) | src.buf.shown[s[inside]]
    need(known.all(), "copy of an output")
    b = dst.buf
    need(not b.writing[d].any() and not b.reading[d].any(), "copy onto a copy in flight")
    dirty = b.dirty[d].any() or any(o.dirty.any() for o in b.others)
    need(not dirty, "copy onto generic writes that were not committed")
    b.overwrite()
    data = np.where(inside, src.buf.data[np.where(inside, s, 0)], 0)
    b.data[d] = data.astype(b.dtype)
    b.mask[d] = True
    b.writing[d] = True
    b.note(src.buf.tol, src.buf.flags)

    def landed():
        b.writing[d] = False

    bar.arrive(landed)


_predicate = predicate


def _unsigned(f, x, y):
    return f(x.view(np.uint32), y.view(np.uint32)).view(x.dtype)


def _signed(f, x, y):
    return f(x.view(np.int32), y.view(np.int32)).view(x.dtype)


COMBINE = {
    "add": lambda x, y: _unsigned(np.add, x, y),
    "umin": lambda x, y: _unsigned(np.minimum, x, y),
    "umax": lambda x, y: _unsigned(np.maximum, x, y),
    "smin": lambda x, y: _signed(np.minimum, x, y),
    "smax": lambda x, y: _signed(np.maximum, x, y),
    "inc": lambda x, y: _unsigned(lambda a, b: np.where(a >= b, np.uint32(0), a + 1), x, y),
    "dec": lambda x, y: _unsigned(
        lambda a, b: np.where((a == 0) | (a > b), b, a - np.uint32(1)), x, y
    ),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _combined(op, old, new):
    if is_float(old.dtype):
        need(op == "add" or old.dtype != f32 and op in ("min", "max"), "a copy that combines")
        need(np.isfinite(old).all() and np.isfinite(new).all(), "infinities that are combined")
        a, b = old.astype(np.float64), new.astype(np.float64)
        need(not any((np.signbit(v) & (v == 0)).any() for v in (a, b)), "signs of zeros")
        r = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](a, b)
        need((r.astype(old.dtype).astype(np.float64) == r).all(), "a rounded sum")
        return r.astype(old.dtype)
    need(old.dtype in (np.int32, np.uint32), "dtype of a copy that combines")
    return COMBINE[op](old, new)


def copy_smem_to_gmem(
    src, dst, predicate=None, *, commit_group=True, reduction_op=None, evict_first=False
):
    need(src.buf.space == "smem" and dst.buf.space == "gmem", "spaces of a copy")
    need(src.shape == dst.shape and src.dtype == dst.dtype, "types of a copy")
    t = here()
    if predicate is None or _predicate(predicate):
        s, d = src.idx, dst.idx
        inside = d >= 0
        a, b = src.buf, dst.buf
        need((s >= 0).all() and a.mask[s].all(), "copy of undefined memory")
        need(not a.writing[s].any(), "copy from a copy in flight")
        need(not a.dirty[s].any(), "copy of generic writes that were not committed")
        need(inside.all() or inside.flat[0], "a store that begins before the array")
        to = d[inside]
        need(not b.writing[to].any(), "two copies write one place at a time")
        claim(b, to)
        data = a.data[s][inside]
        if reduction_op:
            need(b.mask[to].all(), "copy combined with undefined memory")
            data = _combined(reduction_op, b.data[to], data)
        b.data[to] = data
        b.mask[to] = True
        b.writing[to] = True
        b.note(a.tol, a.flags)
        a.reading[s] += 1

        def read():
            a.reading[s] -= 1

        def written():
            b.writing[to] = False

        t.open.append((read, written))
    if commit_group:
        commit_smem_to_gmem_group()


def commit_smem_to_gmem_group():
    t = here()
    t.groups.append(t.open)
    t.open = []


def wait_smem_to_gmem(n, wait_read_only=False):
    here().wait_stores(n, wait_read_only)


def commit_smem():
    for b in here().block.shared.values():
        b.dirty[:] = False


def barrier_arrive(barrier):
    barrier.one().arrive()


def _phase(bar, t):
    """How many phases the thread has seen; the first warp of it that asks takes that over."""
    if t.warp is not None and t.agent not in bar.waits:
        thread = t.agent[0]
        base = bar.before.setdefault(thread, bar.waits.pop(thread, 0))
        bar.waits[t.agent] = base
    return bar.waits.setdefault(t.agent, 0)


def barrier_wait(barrier, phase=None):
    bar, given = barrier.one(), phase
    t = here()
    phase = _phase(bar, t)
    need(given is None or scalar(given) == phase, "another phase is waited for")
    t.machine.wait_until(lambda: bar.done > phase, t.agent)
    bar.waits[t.agent] = phase + 1
    for landed in bar.release.pop(phase, ()):
        landed()


F8 = [np.dtype(getattr(ml_dtypes, n)) for n in ("float8_e4m3fn", "float8_e5m2")]
I8, U8, I32 = (np.dtype(n) for n in ("int8", "uint8", "int32"))
PRODUCTS = {(a, b, acc) for a in F8 for b in F8 for acc in (f32, f16)}
PRODUCTS |= {(f16, f16, f32), (f16, f16, f16), (bf16, bf16, f32), (f32, f32, f32)}
PRODUCTS |= {(I8, I8, I32), (U8, U8, I32)}
NIBBLES = {np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)}  # of mma


def barrier_test(barrier):
    """Until it is true, the other threads go on."""
    bar, t = barrier.one(), here()
    phase = _phase(bar, t)
    tick()
    if bar.done <= phase:
        need(len(t.machine.alive) > 1, "a test that is never true")
        t.machine.pass_on(t.agent)
        t.machine.await_turn(t.agent)
        return A(np.asarray(False))
    barrier_wait(barrier)
    return A(np.asarray(True))


class Semaphore:
    def __init__(self, of_the_launch=False):
        self.count, self.of_the_launch = 0, of_the_launch


def semaphore_signal(sem, inc=1, *, memory_scope="sys"):
    one, t = sem.one(), here()
    one.count += scalar(inc)
    if one.of_the_launch:
        need(not any(t.groups) and not t.open, "a signal while copies are in flight")
        for b in t.machine.outputs:
            b.shown |= b.writer == t.writer


def semaphore_wait(sem, value=1, *, decrement=True, memory_scope="sys"):
    one, n, t = sem.one(), scalar(value), here()
    t.machine.wait_until(lambda: one.count >= n, t.agent)
    one.count -= n if decrement else 0


def semaphore_read(sem):
    """The generator asks where nobody signals."""
    return A(np.asarray(sem.one().count, i32))


def get_global(type_):
    t = here()
    k, t.block.semaphores = t.block.semaphores, t.block.semaphores + 1
    made = t.machine.semaphores
    need(k <= len(made), "semaphores of the launch")
    if k == len(made):
        made.append(_semaphores(type_.shape, True))
    return made[k]


# ---- blocks of a cluster -------------------------------------------------------------------------


def _peer(number, where):
    """What a block of this cluster made as allocation `number`, once it has."""
    m, t = here().machine, here()
    n = len(m.grid)
    key = (t.block.where[:n], number, where)
    m.wait_until(lambda: key in m.peers, t.agent)
    return m.peers[key]


def _place(ref, along):
    """(number of the allocation of a ref, place in the cluster of the block that is meant)"""
    m, t = here().machine, here()
    n, where = len(m.grid), list(t.block.where[len(m.grid) :])
    for name, at in along.items():
        k = m.axes[name][0] - n
        need(0 <= scalar(at) < m.cluster[k], "a block outside of the cluster")
        where[k] = scalar(at)
    return ref.number, tuple(where)


def cluster_ref(ref, along):
    buf = _peer(*_place(ref.buf, along))
    return Ref(buf, ref.idx, ref.cut)


def async_store_smem(x, ref, barrier, *, cluster_idx, cluster_dim, atomic=None):
    """It has arrived when it is sent; nobody looks before the barrier says so."""
    x, along = as_array(x), {cluster_dim: cluster_idx}
    need(x.dtype.itemsize == 4 and x.shape == ref.shape and x.dtype == ref.dtype, "async store")
    to = cluster_ref(ref, along)
    bars = _peer(*_place(barrier, along))
    if atomic:
        need(to.buf.mask[to.idx].all() and is_int(x.dtype), "async atomic")
        old = A(to.buf.data[to.idx])
        x = binary(atomic, old, x)
    to.buf.data[to.idx] = x.v
    to.buf.mask[to.idx] = True
    to.buf.dirty[to.idx] = True
    to.buf.note(x.tol, x.flags)
    bars.one().arrive()


def wgmma(acc, a, b):
    need(isinstance(acc, Acc) and isinstance(a, (Ref, A)) and isinstance(b, Ref), "wgmma operands")
    held = isinstance(a, A)  # in registers
    if held:
        need(a.tol is None and not a.flags and a.dtype != f32, "a of wgmma in registers")
    (m, n), (m2, k), (k2, n2) = acc.shape, a.shape, b.shape
    width = a.dtype.itemsize
    need((m, k, n) == (m2, k2, n2) and n <= 256 and k % (32 // width) == 0, "shapes of wgmma")
    need((a.dtype, b.dtype, acc.dtype) in PRODUCTS, "dtypes of wgmma")
    refs = (b,) if held else (a, b)
    for r in refs:
        need(r.buf.space == "smem" and (r.idx >= 0).all(), "wgmma operand")
        need(r.buf.mask[r.idx].all(), "product of undefined memory")
        need(not r.buf.writing[r.idx].any(), "product of a copy in flight")
        need(not r.buf.dirty[r.idx].any(), "product of generic writes that were not committed")
        need(r.buf.tol is None and not r.buf.flags, "product of inexact values")
    x, y = ((r.v if r is a and held else r.buf.data[r.idx]).astype(np.float64) for r in (a, b))
    need(np.isfinite(x).all() and np.isfinite(y).all(), "product of infinities")
    size = np.abs(x) @ np.abs(y) + np.abs(acc.v.astype(np.float64))
    total = x @ y + acc.v.astype(np.float64)
    precision = 11 if acc.dtype == f16 else 13 if width == 1 else 24
    if acc.dtype == np.int32:
        need(size.max() < 2.0**31, "a product that wraps")
    elif not (_integers(x) and _integers(y) and _integers(acc.v) and size.max() <= 2.0**precision):
        old = acc.tol[0] or (0.0, 0.0)
        acc.tol[0] = (2.0**-precision * 8, old[1] + float(size.max()) * 2.0 ** (5 - precision))
    acc.v[...] = total.astype(acc.dtype)
    for r in refs:
        r.buf.reading[r.idx] += 1
        r.buf.products[r.idx] += 1

    def done():
        for r in refs:
            r.buf.reading[r.idx] -= 1
            r.buf.products[r.idx] -= 1

    here().products.append(done)


def mma(acc, a, b):
    """Exact: the generator keeps numbers small."""
    acc, a, b = (as_array(x) for x in (acc, a, b))
    need(all(x.tol is None and not x.flags for x in (acc, a, b)), "mma of inexact values")
    small = a.dtype in NIBBLES and acc.dtype == I32
    known = small or (a.dtype, b.dtype, acc.dtype) in PRODUCTS
    need(a.dtype == b.dtype and known, "dtypes of mma")
    need(a.dtype != f32 and acc.dtype != f16, "dtypes of mma")
    (m, n), (m2, k), (k2, n2) = acc.shape, a.shape, b.shape
    step = 64 if small else 32 // a.dtype.itemsize
    need((m, k, n) == (m2, k2, n2) and not (m % 64 or n % 8 or k % step), "shapes of mma")
    x, y, c = (v.v.astype(np.float64) for v in (a, b, acc))
    need(all(np.isfinite(v).all() and _integers(v) for v in (x, y, c)), "numbers of mma")
    size = (np.abs(x) @ np.abs(y) + np.abs(c)).max()
    bits = 31 if acc.dtype == I32 else 13 if a.dtype.itemsize == 1 else 24
    need(size < 2.0**bits, "sums of mma")
    return A((x @ y + c).astype(acc.dtype))


def _integers(x):
    return (x == np.rint(x)).all()


def wgmma_wait(n):
    here().wgmma_wait(n)


def wgmma_accumulator_load(acc, *, wait_n=0):
    here().wgmma_wait(wait_n)
    need(not here().products, "an accumulator is read while products are in flight")
    return A(acc.v.copy(), tol=acc.tol[0])


# ---- trees, control flow, scopes -----------------------------------------------------------------


def flatten(x):
    if isinstance(x, (tuple, list)):
        return [leaf for item in x for leaf in flatten(item)]
    if isinstance(x, dict):
        return [leaf for k in sorted(x) for leaf in flatten(x[k])]
    return [] if x is None else [x]


def tree_map(f, x):
    if isinstance(x, (tuple, list)):
        return type(x)(tree_map(f, item) for item in x)
    if isinstance(x, dict):
        return {k: tree_map(f, x[k]) for k in x}
    return None if x is None else f(x)


def _carry(x):
    return tree_map(lambda v: v if isinstance(v, (Ref, Acc)) else as_array(v), x)


def _same_types(old, new):
    a, b = flatten(old), flatten(new)
    need(len(a) == len(b), "structure of a carry")
    for x, y in zip(a, b):
        if isinstance(x, A):
            need(isinstance(y, A) and (x.shape, x.dtype) == (y.shape, y.dtype), "type of a carry")


def fori_loop(lower, upper, body, init, *, unroll=None):
    static = not isinstance(lower, A) and not isinstance(upper, A)
    lo, hi = scalar(lower), scalar(upper)
    if unroll not in (None, False, True, 1):
        need(static and max(hi - lo, 0) % unroll == 0, "unroll")
    val = _carry(init)
    for i in range(lo, hi):
        tick()
        new = _carry(body(A(np.asarray(i, i32), weak=static), val))
        _same_types(val, new)
        val = new
    return val


def while_loop(cond, body, init):
    val = _carry(init)
    while True:
        tick()
        p = as_array(cond(val))
        need(p.dtype == BOOL, "while condition")
        if not predicate(p):
            return val
        new = _carry(body(val))
        _same_types(val, new)
        val = new


def cond(pred, true_fun, false_fun, *operands):
    out = true_fun(*operands) if predicate(pred) else false_fun(*operands)
    return _carry(out)


def switch(index, branches, *operands):
    k = min(max(scalar(index), 0), len(branches) - 1)
    return _carry(branches[k](*operands))


def when(condition):
    def wrap(f):
        if predicate(condition):
            need(f() is None, "pl.when returns a value")

    return wrap


def nd_loop(grid, *, collective_axes):
    """This program's share of the points."""
    sizes = tuple(scalar(n) for n in grid)

    def wrap(body):
        mine = range(
            scalar(axis_index(collective_axes)), math.prod(sizes), axis_size(collective_axes)
        )
        for k, number in enumerate(mine):
            tick()
            index = tuple(A(np.asarray(i, i32)) for i in np.unravel_index(number, sizes))
            info = types.SimpleNamespace(index=index, local_index=A(np.asarray(k, i32)))
            need(body(info) is None, "nd_loop returns a value")

    return wrap


def loop(lower, upper, *, init_carry=None, step=1, unroll=None):
    def wrap(body):
        lo, hi, by = scalar(lower), scalar(upper), scalar(step)
        need(by >= 1, "step")
        static = not any(isinstance(x, A) for x in (lower, upper, step))
        carry = _carry(init_carry)
        for i in range(lo, hi, by):
            tick()
            i = A(np.asarray(i, i32), weak=static)
            if init_carry is None:
                need(body(i) is None, "pl.loop returns a value")
            else:
                new = _carry(body(i, carry))
                _same_types(carry, new)
                carry = new
        return carry

    return wrap


@dataclass
class SmemType:
    shape: tuple
    dtype: np.dtype


@dataclass
class BarrierType:
    num_arrivals: int = 1
    num_barriers: object = 1


@dataclass
class ClusterBarrierType:
    collective_axes: tuple = ()
    num_arrivals: int = 1
    num_barriers: object = 1


@dataclass
class SemaphoresType:
    shape: tuple = ()


@dataclass
class AccType:
    shape: tuple
    dtype: object = f32
    initial: object = None


def make_acc_type():
    def acc(shape, dtype=f32):
        need(len(shape) == 2 and shape[0] % 64 == 0 and shape[1] % 8 == 0, "ACC shape")
        return AccType(tuple(shape), as_dtype(dtype))

    def init(x):
        x = as_array(x)
        need(x.tol is None and not x.flags & FUSED, "initial accumulator")
        return AccType(x.shape, x.dtype, x)

    acc.init = init
    return acc


def check_transforms(shape, dtype, transforms):
    tiling = next((t[1] for t in transforms if t[0] == "tile"), None)
    swizzle = next((t[1] for t in transforms if t[0] == "swizzle"), None)
    if tiling:
        need(len(tiling) <= len(shape), "tiling rank")
        need(all(d % t == 0 for d, t in zip(shape[-len(tiling) :], tiling)), "tiling divides")
    if swizzle:
        need((tiling or shape)[-1] * dtype.itemsize == swizzle, "swizzle fits")


def SMEM(shape, dtype, transforms=()):  # noqa: N802 - the name in the language
    dtype = as_dtype(dtype)
    check_transforms(shape, dtype, transforms)
    return SmemType(tuple(shape), dtype)


def _is_type(x):
    return isinstance(x, (SmemType, BarrierType, ClusterBarrierType, SemaphoresType, AccType))


def _allocate(t):
    if isinstance(t, AccType):
        acc = Acc(t.shape, t.dtype)
        if t.initial is not None:
            acc.v[...] = t.initial.v
        return acc
    if isinstance(t, hopper_model.RefUnion):
        made = [tree_map(_allocate, g) for g in t.groups]
        hopper_model.overlay([[r.buf for r in flatten(g)] for g in made])
        return made
    block, m = here().block, here().machine
    number, block.made = (block.scope, block.made), block.made + 1
    made = _make(t, number)
    made.number = number
    n = len(m.grid)
    kept = made.buf if isinstance(made, Ref) else made
    m.peers[block.where[:n], number, block.where[n:]] = kept
    return made


def _make(t, number):
    if isinstance(t, ClusterBarrierType):
        return _cluster_barrier(t, number)
    if isinstance(t, BarrierType):
        shape = (t.num_barriers,) if isinstance(t.num_barriers, int) else tuple(t.num_barriers)
        need(math.prod(shape) <= 32, "too many barriers")
        bars = np.empty(shape, object)
        for k in np.ndindex(*shape):
            bars[k] = Bar(t.num_arrivals)
            here().block.bars.append(bars[k])
        return BarRef(bars)
    if isinstance(t, SemaphoresType):
        return _semaphores(t.shape)
    need(not here().block.freed, "copies may still read memory that is used again")
    b = Buffer("smem", t.shape, t.dtype)
    b.number = number
    here().block.shared[id(b)] = b
    return Ref(b, np.arange(b.data.size, dtype=np.int32).reshape(t.shape))


def _semaphores(shape, of_the_launch=False):
    sems = np.empty(shape, object)
    for k in np.ndindex(*shape):
        sems[k] = Semaphore(of_the_launch)
    return BarRef(sems)


def _cluster_barrier(t, number):
    """One for all blocks along the axes: what arrives at one of them arrives at all."""
    m, block = here().machine, here().block
    axes = t.collective_axes if isinstance(t.collective_axes, tuple) else (t.collective_axes,)
    need(isinstance(t.num_barriers, int), "number of cluster barriers")
    along = {m.axes[name][0] for name in axes}
    key = number, tuple(-1 if k in along else i for k, i in enumerate(block.where))
    if key not in m.peers:
        arrivals = t.num_arrivals * math.prod(m.axes[name][1] for name in axes)
        bars = np.empty((t.num_barriers,), object)
        for k in range(t.num_barriers):
            bars[k] = Bar(arrivals)
            bars[k].of_a_cluster = True
        m.peers[key] = BarRef(bars)
    return m.peers[key]


def _close(refs):
    shared = here().block.shared
    for r in flatten(refs):
        if isinstance(r, Ref):
            # products may still read: pipelines of them end so, and the accumulator waits
            need(not r.buf.writing.any(), "memory freed while it is written")
            here().block.freed |= bool((r.buf.reading > r.buf.products).any())
            shared.pop(id(r.buf), None)
        elif isinstance(r, BarRef):
            for bar in r.bars.ravel():
                if getattr(bar, "of_a_cluster", False):
                    continue
                if isinstance(bar, Semaphore):
                    need(bar.count == 0, "a semaphore does not end at 0")
                    continue
                need(bar.count == 0, "a barrier ends in the middle of a phase")
                need(not any(bar.release.values()), "a barrier ends while a copy is in flight")
        elif isinstance(r, Acc):
            need(not here().products, "an accumulator ends while products are in flight")


def _enter(f):
    """What is made next belongs to that scope: blocks of a cluster know it by the same number."""
    block, code = here().block, getattr(f, "__code__", None)
    site = code and (code.co_name, code.co_firstlineno)
    block.visits[site] = block.visits.get(site, 0) + 1
    block.scope, block.made = (site, block.visits[site]), 0


def run_scoped(f, *types_, collective_axes=(), **kw):
    t = here()
    m = t.machine
    if collective_axes and m.n_threads > 1:
        t.scopes += 1
        key = t.scopes
        if key not in t.block.collective:
            _enter(f)
            made = [tree_map(_allocate, types_), tree_map(_allocate, kw), 0]
            t.block.collective[key] = made
        entry = t.block.collective[key]
        out = f(*entry[0], **entry[1])
        entry[2] += 1
        if entry[2] == m.n_threads:
            _close([list(entry[0]), entry[1]])
        return out
    own = all(isinstance(x, AccType) for x in flatten([types_, kw]))
    need(m.n_threads == 1 or own, "SMEM of one thread")
    _enter(f)
    refs, kw_refs = tree_map(_allocate, types_), tree_map(_allocate, kw)
    out = f(*refs, **kw_refs)
    _close([list(refs), kw_refs])
    return out


def run_state(f):
    def inner(init):
        accs = tree_map(_allocate, init)
        need(f(accs) is None, "run_state returns a value")
        return tree_map(lambda a: a[...], accs)

    return inner


# ---- pipelines -----------------------------------------------------------------------------------


class BlockSpec:
    def __init__(
        self,
        block_shape=None,
        index_map=None,
        transforms=(),
        delay_release=0,
        memory_space=None,
        collective_axes=None,
    ):
        self.block_shape, self.index_map = block_shape, index_map
        self.transforms, self.delay_release, self.memory_space = (
            transforms,
            delay_release,
            memory_space,
        )


class Element:
    def __init__(self, block_size):
        self.block_size = block_size


class _Staged:
    """One operand of a pipeline."""

    def __init__(self, spec, ref, slots, grid):
        self.spec, self.ref = spec, ref
        self.gmem = spec.memory_space == "gmem"
        dims = ref.shape if spec.block_shape is None else spec.block_shape
        need(self.gmem or len(dims) == ref.ndim, "rank of a block")
        self.dims = dims
        self.varies = False
        if spec.index_map is not None and grid and not self.gmem:
            probe = [A(np.asarray(0, i32), dep=True) for _ in grid]
            out = flatten(spec.index_map(*probe))
            self.varies = any(isinstance(x, A) and x.dep for x in out)
        if not self.gmem:
            block = tuple(
                d.block_size if isinstance(d, Element) else d for d in dims if d is not None
            )
            check_transforms(block, ref.dtype, spec.transforms)
            self.slots = [_allocate(SmemType(block, ref.dtype)) for _ in range(slots)]

    def index(self, indices):
        if self.spec.index_map is None:
            return (0,) * len(self.dims)
        out = self.spec.index_map(*[A(np.asarray(i, i32), weak=True) for i in indices])
        out = out if isinstance(out, tuple) else (out,)
        need(len(out) == len(self.dims), "rank of an index map")
        return tuple(scalar(x) for x in out)

    def view(self, index):
        where = []
        for d, i in zip(self.dims, index):
            if d is None:
                where.append(A(np.asarray(i, i32)))
            elif isinstance(d, Element):
                where.append(Slice(i, d.block_size))
            else:
                where.append(Slice(i * d, d))
        return self.ref.view(tuple(where))


def emit_pipeline(body, *, grid, in_specs=(), out_specs=(), max_concurrent_steps=1,
                  init_carry=None):  # fmt: skip
    def pipeline(*refs):
        need(here().machine.n_threads == 1, "a pipeline in a kernel with threads")
        sizes = [scalar(g) for g in grid]
        static = not any(isinstance(g, A) for g in grid)
        need(all(g > 0 for g in sizes) or not static, "grid of a pipeline")
        steps = math.prod(sizes)
        slots = min(max_concurrent_steps, steps) if static else max_concurrent_steps
        delays = [s.delay_release for s in in_specs]
        need(max_concurrent_steps > max(delays, default=0), "delay_release")
        ins = [_Staged(s, r, slots, grid) for s, r in zip(in_specs, refs)]
        outs = [_Staged(s, r, slots, grid) for s, r in zip(out_specs, refs[len(in_specs) :])]
        need(len(refs) == len(ins) + len(outs), "refs of a pipeline")
        carry = _carry(init_carry)
        everything = list(itertools.product(*map(range, sizes)))

        def fetch(o, s):
            bar = BarRef(np.array(Bar(1), dtype=object))
            copy_gmem_to_smem(o.view(o.index(everything[s])), o.slots[s % slots], bar)
            barrier_wait(bar)

        def changed(o, s):
            return s == 0 or o.index(everything[s]) != o.index(everything[s - 1])

        def put(o, s):
            copy_smem_to_gmem(
                o.slots[s % slots], o.view(o.index(everything[s])), commit_group=False
            )

        for o in ins:
            for s in range(min(slots, steps)):
                if not o.gmem:
                    fetch(o, s)
        varying = [o for o in outs if o.varies and not o.gmem]
        fixed = [o for o in outs if not o.varies and not o.gmem]
        for s in range(steps):
            tick()
            if varying:
                wait_smem_to_gmem(slots - 1, wait_read_only=True)
            blocks = [o.ref if o.gmem else o.slots[s % slots] for o in ins + outs]
            indices = tuple(A(np.asarray(i, i32), weak=static) for i in everything[s])
            if init_carry is None:
                need(body(indices, *blocks) is None, "a body without a carry returns a value")
            else:
                new = _carry(body(indices, *blocks, carry))
                _same_types(carry, new)
                carry = new
            if varying:
                commit_smem()
                for o in varying:
                    if changed(o, s):
                        put(o, s)
                commit_smem_to_gmem_group()
            for o in ins:
                d = o.spec.delay_release
                if not o.gmem and s >= d and s + slots - d < steps:
                    fetch(o, s + slots - d)
        if steps:
            for o in varying:
                if not changed(o, steps - 1):
                    wait_smem_to_gmem(0)
                    put(o, steps - 1)
                    commit_smem_to_gmem_group()
            if fixed:
                commit_smem()
                for o in fixed:
                    put(o, steps - 1)
                commit_smem_to_gmem_group()
        if varying or fixed:
            wait_smem_to_gmem(0)
        for o in ins + outs:
            if not o.gmem:
                _close(o.slots)
        return carry

    return pipeline


def emit_pipeline_warp_specialized(body, *, grid, memory_registers, in_specs=(), out_specs=(),
                                   max_concurrent_steps=2, wg_axis, num_compute_wgs,
                                   compute_context=None, manual_ready_barriers=False,
                                   manual_consumed_barriers=False):  # fmt: skip
    """The memory thread does nothing here; each of the others has slots of its own."""

    def barriers(n, full):
        made = [Bar(1) for _ in range(n)]
        for b in made:
            if full:
                b.arrive()
        return [BarRef(np.array(b, dtype=object)) for b in made]

    def pipeline(*refs, allocations=None):
        need(here().machine.n_threads == num_compute_wgs + 1, "threads of a pipeline")
        need(not out_specs or num_compute_wgs == 1, "outputs of several threads")
        if here().index == num_compute_wgs:
            return
        steps = math.prod(grid)
        slots = min(max_concurrent_steps, steps)
        need(max_concurrent_steps > max(s.delay_release for s in in_specs), "delay_release")
        need(len({s.delay_release for s in in_specs}) == 1, "several delays")
        ins = [_Staged(s, r, slots, grid) for s, r in zip(in_specs, refs)]
        outs = [_Staged(s, r, slots, grid) for s, r in zip(out_specs, refs[len(in_specs) :])]
        need(len(refs) == len(ins) + len(outs), "refs of a pipeline")
        need(all(o.varies for o in ins), "an input that does not vary")
        everything = list(itertools.product(*map(range, grid)))
        varying = [o for o in outs if o.varies]

        def fetch(o, s):
            bar = BarRef(np.array(Bar(1), dtype=object))
            copy_gmem_to_smem(o.view(o.index(everything[s])), o.slots[s % slots], bar)
            barrier_wait(bar)

        def put(o, s):
            copy_smem_to_gmem(
                o.slots[s % slots], o.view(o.index(everything[s])), commit_group=False
            )

        def compute(carry):
            carry = _carry(carry)
            for s in range(steps):
                tick()
                for o in ins:
                    fetch(o, s)
                if varying:
                    wait_smem_to_gmem(slots - 1, wait_read_only=True)
                blocks = [o.slots[s % slots if o.varies else 0] for o in ins + outs]
                indices = tuple(A(np.asarray(i, i32)) for i in everything[s])
                ready = barriers(len(ins) * manual_ready_barriers, True)
                consumed = barriers(len(ins) * manual_consumed_barriers, False)
                blocks += ready + consumed
                if compute_context is None:
                    need(body(indices, *blocks) is None, "a body without a carry returns a value")
                else:
                    new = _carry(body(indices, *blocks, carry))
                    _same_types(carry, new)
                    carry = new
                need(all(b.one().waits for b in ready), "a block that nobody waits for")
                late = s < max(o.spec.delay_release for o in ins)
                need(all(b.one().done == 1 - late for b in consumed), "releases of a step")
                if varying:
                    commit_smem()
                    for o in varying:
                        if s == 0 or o.index(everything[s]) != o.index(everything[s - 1]):
                            put(o, s)
                    commit_smem_to_gmem_group()
            return carry

        if compute_context is None:
            compute(None)
        else:
            compute_context(compute)
        if len(varying) < len(outs):
            if not varying:
                commit_smem()
            for o in outs:
                if not o.varies:
                    copy_smem_to_gmem(
                        o.slots[0], o.view(o.index(everything[-1])), commit_group=False
                    )
            commit_smem_to_gmem_group()
        if outs:
            wait_smem_to_gmem(0)
        for o in ins + outs:
            _close(o.slots)

    pipeline.get_allocations = lambda *refs: None
    return pipeline


# ---- the four namespaces -------------------------------------------------------------------------


class _Scalar:
    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, x):
        return to_dtype(x, self.dtype) if isinstance(x, A) else self.dtype.type(x)


class _AnyLayout:
    """Layouts do not change values."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kw):
        return self


def axis_index(name):
    m = here().machine
    if isinstance(name, tuple):
        total = 0
        for n in name:
            total = total * m.axes[n][1] + m.axis(n)
        return A(np.asarray(total, i32))
    return A(np.asarray(m.axis(name), i32))


def axis_size(name):
    m = here().machine
    if name == here().warp_axis:
        return 4
    names = name if isinstance(name, tuple) else (name,)
    return math.prod(m.axes[n][1] for n in names)


def _float(op):
    def f(x):
        x = as_array(x)
        return unary(op, x if is_float(x.dtype) else to_dtype(x, f32))

    return f


def _logical(op):
    def f(x, y):
        return binary(op, truth(x), truth(y))

    return f


def truth(x):
    x = as_array(x)
    return x if x.dtype == BOOL else binary("ne", x, 0)


def clip(x, lo=None, hi=None):
    if lo is not None:
        x = binary("max", x, lo)
    return x if hi is None else binary("min", x, hi)


def mean(x, axis=None, keepdims=False):
    x = as_array(x)
    to = x.dtype if is_float(x.dtype) else f32
    total = reduction("add", to_dtype(x, f32), axis, keepdims=keepdims)
    n = x.size // max(total.size, 1)
    return to_dtype(total / n, to)


def _binary(op):
    return lambda x, y: binary(op, x, y)


def _shift_right(signed):
    def f(x, y):
        x = as_array(x)
        other = np.dtype(("i" if signed else "u") + str(x.dtype.itemsize))
        return bitcast(binary("shr", bitcast(x, other), to_dtype(y, other)), x.dtype)

    return f


def _barrier_identity(x):
    return tree_map(lambda v: as_array(v).like(as_array(v).v, flags=as_array(v).flags & FUSED), x)


_MASKED = array_model.masked(load, store)

plgpu = types.SimpleNamespace(
    **array_model.whole_atomics(_MASKED),
    SMEM=SMEM,
    GMEM="gmem",
    ACC=make_acc_type(),
    Barrier=BarrierType,
    TilingTransform=lambda t: ("tile", tuple(t)),
    SwizzleTransform=lambda s: ("swizzle", s),
    Layout=_AnyLayout(),
    Tiling=_AnyLayout(),
    Replicated=_AnyLayout(),
    BlockSpec=BlockSpec,
    emit_pipeline=emit_pipeline,
    emit_pipeline_warp_specialized=emit_pipeline_warp_specialized,
    layout_cast=lambda x, layout: as_array(x),
    load=lambda ref, layout=None, optimized=True: load(ref),
    broadcasted_iota=lambda dtype, shape, dim, layout=None: iota(dtype, shape, dim),
    copy_gmem_to_smem=copy_gmem_to_smem,
    copy_smem_to_gmem=copy_smem_to_gmem,
    commit_smem=commit_smem,
    commit_smem_to_gmem_group=commit_smem_to_gmem_group,
    wait_smem_to_gmem=wait_smem_to_gmem,
    barrier_arrive=barrier_arrive,
    barrier_wait=barrier_wait,
    mma=mma,
    barrier_test=barrier_test,
    async_prefetch=lambda ref: None,
    semaphore_signal=semaphore_signal,
    semaphore_wait=semaphore_wait,
    semaphore_read=semaphore_read,
    cluster_ref=cluster_ref,
    async_store_smem=async_store_smem,
    ClusterBarrier=ClusterBarrierType,
    SemaphoreType=types.SimpleNamespace(REGULAR=SemaphoresType),
    wgmma=wgmma,
    wgmma_wait=wgmma_wait,
    wgmma_accumulator_load=wgmma_accumulator_load,
    set_max_registers=lambda n, action: None,
    nd_loop=nd_loop,
    transpose_ref=lambda ref, perm: ref.transpose(perm),
    CompilerParams=lambda **kw: kw,
    nn=types.SimpleNamespace(**function_model.NN),
    ShapeDtypeStruct=lambda shape, dtype, layout=None: types.SimpleNamespace(
        shape=tuple(shape), dtype=as_dtype(dtype)
    ),
    RefType=lambda transforms=(): None,
    RefUnion=hopper_model.RefUnion,
    ext=types.SimpleNamespace(
        TileScheduler=hopper_model.TileScheduler,
        ordered_section=hopper_model.ordered_section,
        warp_where=lambda mask, f, other: where(mask, f(), other),
    ),
    WarpMesh=hopper_model.WarpMesh,
    warp_map=hopper_model.warp_map,
    inline_cuda=hopper_model.inline_cuda,
    dynamic_scheduling_loop=hopper_model.dynamic_scheduling_loop,
    griddepcontrol_wait=lambda: None,
    named_scope=lambda name: contextlib.nullcontext(),
    griddepcontrol_launch_dependents=lambda: None,
)

pl = types.SimpleNamespace(
    **_MASKED,
    **function_model.of("pl"),
    ds=lambda start, size: Slice(start, size),
    when=when,
    loop=loop,
    run_scoped=run_scoped,
    run_state=run_state,
    multiple_of=lambda x, n: _multiple_of(x, n),
    program_id=lambda k: here().machine.program_id(k),
    num_programs=lambda k: here().machine.grid[k],
    cdiv=lambda a, b: -(-a // b),
    delay=lambda nanos: None,
    get_global=get_global,
    debug_check=lambda p, message: need(_predicate(p), "a check that fails"),
    core_map=hopper_model.core_map,
    kernel=hopper_model.kernel,
    semaphore_read=semaphore_read,
    Element=Element,
    squeezed=None,
)


def _multiple_of(x, n):
    if isinstance(x, A):
        need(scalar(x) % n == 0, "multiple_of is not true")
    return x


lax = types.SimpleNamespace(
    **array_model.LAX,
    **function_model.of("lax"),
    axis_index=axis_index,
    axis_size=axis_size,
    fori_loop=fori_loop,
    while_loop=while_loop,
    cond=cond,
    switch=switch,
    optimization_barrier=_barrier_identity,
    broadcast_in_dim=broadcast_in_dim,
    broadcast=lambda x, sizes: as_array(x).like(
        np.broadcast_to(as_array(x).v, (*sizes, *as_array(x).shape))
    ),
    reshape=lambda x, shape: as_array(x).reshape(tuple(shape)),
    squeeze=lambda x, dims: as_array(x).like(as_array(x).v.squeeze(dims)),
    slice=lambda x, lo, hi: x[tuple(slice(a, b) for a, b in zip(lo, hi))],
    full=full,
    select=lambda c, x, y: where(c, x, y),
    select_n=lambda c, x, y: where(c, y, x),
    clamp=lambda lo, x, hi: binary("min", binary("max", x, lo), hi),
    convert_element_type=lambda x, d: to_dtype(x, as_dtype(d)),
    bitcast_convert_type=bitcast,
    broadcasted_iota=iota,
    iota=lambda dtype, n: iota(dtype, (n,), 0),
    reduce_sum=lambda x, axes: reduction("add", x, tuple(axes)),
    reduce_max=lambda x, axes: reduction("max", x, tuple(axes)),
    reduce_min=lambda x, axes: reduction("min", x, tuple(axes)),
    round=lambda x: unary("round", x),
    shift_left=_binary("shl"),
    shift_right_logical=_shift_right(False),
    shift_right_arithmetic=_shift_right(True),
    square=lambda x: binary("mul", x, x),
    **{n: _binary(n) for n in ("add", "sub", "mul", "div", "rem", "max", "min")},
    **{n: _binary(n) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{n: functools.partial(unary, n)
       for n in ("abs", "neg", "sign", "floor", "ceil", "sqrt")},
)  # fmt: skip

jnp = types.SimpleNamespace(
    **array_model.JNP,
    **{
        n: _Scalar(as_dtype(n))
        for n in "int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32".split()
    },
    bool_=_Scalar(BOOL),
    inf=math.inf,
    where=where,
    clip=clip,
    sum=lambda x, axis=None, **kw: reduction("sum", x, axis, **kw),
    max=lambda x, axis=None, **kw: reduction("max", x, axis, **kw),
    min=lambda x, axis=None, **kw: reduction("min", x, axis, **kw),
    mean=mean,
    full=full,
    zeros=lambda shape, dtype=f32: full(shape, 0, dtype),
    ones=lambda shape, dtype=f32: full(shape, 1, dtype),
    full_like=lambda x, v, dtype=None: full(x.shape, v, x.dtype if dtype is None else dtype),
    zeros_like=lambda x: full(x.shape, 0, x.dtype),
    ones_like=lambda x: full(x.shape, 1, x.dtype),
    arange=lambda n, dtype=i32: iota(dtype, (n,), 0),
    broadcast_to=broadcast_to,
    reshape=lambda x, shape: as_array(x).reshape(shape),
    expand_dims=lambda x, axis: as_array(x).like(np.expand_dims(as_array(x).v, axis)),
    astype=lambda x, d: to_dtype(x, as_dtype(d)),
    isnan=lambda x: binary("ne", x, x),
    isfinite=lambda x: binary("lt", unary("abs", x), math.inf),
    isinf=lambda x: binary("eq", unary("abs", x), math.inf),
    abs=lambda x: unary("abs", x),
    negative=lambda x: unary("neg", x),
    sign=lambda x: unary("sign", x),
    invert=lambda x: unary("not", x),
    square=lambda x: binary("mul", x, x),
    add=_binary("add"),
    subtract=_binary("sub"),
    multiply=_binary("mul"),
    divide=_binary("truediv"),
    floor_divide=_binary("floordiv"),
    remainder=_binary("mod"),
    maximum=_binary("max"),
    minimum=_binary("min"),
    copysign=_binary("copysign"),
    fmax=_binary("fmax"),
    fmin=_binary("fmin"),
    signbit=lambda x: unary("signbit", x),
    bitwise_and=_binary("and"),
    bitwise_or=_binary("or"),
    bitwise_xor=_binary("xor"),
    left_shift=_binary("shl"),
    right_shift=_binary("shr"),
    logical_and=_logical("and"),
    logical_or=_logical("or"),
    logical_xor=_logical("xor"),
    logical_not=lambda x: unary("not", truth(x)),
    **{n: _float(n) for n in ("floor", "ceil", "sqrt", "rint")},
    round=_float("rint"),
    **function_model.of("jnp"),
)


# ---- running -------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What an output must hold: where `mask`, within `tol` if that is given."""

    value: np.ndarray
    mask: np.ndarray
    tol: tuple | None
    fused: bool  # exact only where no compiler makes fma of * and +


class _Run(Machine):
    def __init__(self, options):
        super().__init__()
        self.grid = tuple(options.get("grid", ()))
        self.grid_names = tuple(options.get("grid_names", ()))
        self.cluster = tuple(options.get("cluster", ()))
        self.outputs = []
        self.n_threads = options.get("num_threads") or 1
        for k, n in enumerate(self.grid_names):
            self.axes[n] = (k, self.grid[k])
        for k, n in enumerate(options.get("cluster_names", ())):
            self.axes[n] = (len(self.grid) + k, self.cluster[k])
        if options.get("thread_name"):
            self.axes[options["thread_name"]] = (None, self.n_threads)

    def axis(self, name):
        if name == here().warp_axis:
            return here().warp
        k, _ = self.axes[name]
        return here().index if k is None else here().block.where[k]

    def program_id(self, k):
        return A(np.asarray(here().block.where[k], i32))


def _names(code):
    """What a function and those in it use."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _approximate(tol):
    """Bounds with the hardware's functions; sums of composed ones may cancel."""
    composed = tol[1] > 1e-6
    return max(tol[0], 2.0**-9), max(tol[1], 2.0**-8 if composed else 2.0**-16)


def run(make, operands, outs):
    """What a kernel computes. operands: NumPy arrays; outs: (shape, dtype) each."""
    body, options = make(plgpu, pl, lax, jnp)
    machine = _Run(options)
    refs = []
    for x in operands:
        b = Buffer("gmem", x.shape, x.dtype)
        b.data[:] = x.ravel()
        b.mask[:] = True
        b.writer[:] = -2  # nobody may write
        b.writer.flags.writeable = False
        refs.append(Ref(b, np.arange(b.data.size, dtype=np.int32).reshape(x.shape)))
    results = []
    for shape, dtype in outs:
        b = Buffer("gmem", shape, as_dtype(dtype))
        results.append(b)
        machine.outputs.append(b)
        refs.append(Ref(b, np.arange(b.data.size, dtype=np.int32).reshape(shape)))
    scratch = options.get("scratch_types", ())

    def block():
        if isinstance(scratch, dict):
            out = run_scoped(functools.partial(body, *refs), collective_axes=True, **scratch)
        elif scratch:
            out = run_scoped(functools.partial(body, *refs), *scratch, collective_axes=True)
        else:
            out = body(*refs)
        need(out is None, "the body returns a value")
        here().wait_stores(0, False)

    with np.errstate(all="ignore"):
        axes = [*machine.grid, *machine.cluster]
        blocks = [Block(k, at) for k, at in enumerate(itertools.product(*map(range, axes)))]
        together = _names(make.__code__) & {"get_global", "ClusterBarrier"}
        for some in [blocks] if together else [[b] for b in blocks]:
            try:
                machine.run_blocks(block, some, machine.n_threads)
            except (ValueError, IndexError, TypeError, KeyError, NameError, AttributeError) as e:
                raise Invalid(f"{type(e).__name__}: {e}") from e
    approximate = options.get("compiler_params", {}).get("approx_math")
    return [
        Expected(
            b.data.reshape(s),
            b.mask.reshape(s),
            _approximate(b.tol) if b.tol and approximate else b.tol,
            bool(b.flags & FUSED),
        )
        for b, (s, _) in zip(results, outs)
    ]
