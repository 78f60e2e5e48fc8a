"""What the kernels of this folder share.

A block of a warp-specialised kernel has one *producer*, its last warpgroup, and *consumers*, all
others. The producer has TMA fill the slots of a *ring* in shared memory; consumers wait until a
slot is full, multiply what is in it, and release it. Each slot has two barriers: `full` completes
when its bytes have arrived, `empty` when every consumer has released it. The producer computes
little, so it gives most of its registers to the consumers.

A *tile scheduler* tells a block which tiles of the result are its own, the producer and the
consumers alike: `StaticTiles` deals them out before the launch. The *epilogue* of a tile takes the
result to global memory through buffers in shared memory, by TMA."""

import copy
import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp

_HOPPER = _core.target("sm_90a")  # these kernels use wgmma
SMEM_BYTES = _HOPPER["smem"] - 1024  # that buffers of a block may take
SMS = _HOPPER["sms"]
FLOATS = ("float16", "bfloat16", "float32")

# Registers of a lane of the producer and of a consumer, by the number of consumers, where an even
# share has no room for the accumulators.
REGISTERS = {2: (40, 232), 3: (32, 160)}


def swizzled(row, dtype):
    """Transforms of a buffer with rows of that many elements, as the tensor cores read it."""
    bytes_ = row * dtype.itemsize
    if bytes_ not in (32, 64, 128):
        return ()
    return (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(bytes_))


def buffer(*shape, dtype):
    """Scratch: a buffer of such rows, up to 128 bytes of each together."""
    width = math.gcd(shape[-1], 128 // dtype.itemsize)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(width, dtype))


def overlap_launches(prefetch=lambda: None):
    """Lets the next kernel be launched now, and waits until the kernels before this one are done:
    nothing is read or written earlier. prefetch(): asks for memory before that."""
    plgpu.griddepcontrol_launch_dependents()
    prefetch()
    plgpu.griddepcontrol_wait()


def dtype_of(op, given, default=None, accepted=FLOATS, what="out_dtype", note=""):
    """The dtype that an option names; TypeError unless it is one of ``accepted``."""
    try:
        found = default if given is None else jnp.dtype(given)
    except TypeError:
        found = None
    if found is None or found.name not in accepted:
        names = f"{', '.join(accepted[:-1])} or {accepted[-1]}"
        got = repr(given) if found is None else found
        raise TypeError(f"{op}: {what} must be {names}, got {got}{note}")
    return found


def applied(activation, value):
    """activation(value), of the same shape."""
    found = activation(value)
    if getattr(found, "shape", None) != value.shape:
        raise ValueError(
            "activation must return an array of the shape that it gets,"
            f" {value.shape}; got {getattr(found, 'shape', type(found).__name__)}"
        )
    return found


def check_fields(op, config):
    """TypeError unless a configuration has ints where its defaults are ints."""
    for name, default in config._field_defaults.items():
        value = getattr(config, name)
        if isinstance(default, int) and not hasattr(value, "__index__"):
            raise TypeError(
                f"{op}: {name} of {type(config).__name__} must be an int, got {value!r}"
            )


def padded(source, at, width):
    """Rows of global memory for a copy to rows of so many elements, the last of which become 0 (or,
    of a store, go nowhere): columns beyond the end, which TMA allows."""
    if source.shape[-1] == width:
        return source.at[at]
    start = pl.multiple_of(lax.optimization_barrier(jnp.int32(0)), 64)
    return source.at[(*at, pl.ds(start, width))]


def unaligned(start):
    """The same index, but the compiler knows no divisor of it: accesses there use no vectors."""
    return start + lax.optimization_barrier(jnp.int32(0))


class SeveralKernels:
    """What calls kernels one after the other: no program of it alone can be lowered."""

    takes_views = True  # _strides.py

    def lower(self, *args, **options):
        raise NotImplementedError(
            "lower: the choice for these operands consists of several kernels: lower_each(...)"
            " lowers all of them; or pass a config= that needs a single one, such as"
            " MatmulConfig(slices=1) or AttentionConfig()"
        )

    def lower_each(self, *operands):
        """The lowered kernels, in the order of the launches. operands: arrays, or what has a shape
        and a dtype. NotImplementedError where the kernels depend on the elements of the arrays."""
        found = []
        _dry(self, found.append)(*operands)
        return found

    def compile(self, *operands):
        """Runs a call with descriptions of the operands, in which kernels are compiled only.
        Returns those of the results. NotImplementedError where other functions are called."""
        return _dry(self, _compile)(*operands)


class PartOfSeveral:
    """What a `SeveralKernels` calls with other arguments than operands, and calls kernels."""


def _dry(value, visit):
    """A copy that calls visit(lowered) for each kernel in place of the kernel."""
    dry = copy.copy(value)
    vars(dry).update((name, _visiting(x, visit)) for name, x in vars(value).items())
    return dry


def _visiting(value, visit):
    """In the place of a kernel, or of a function of several."""
    if isinstance(value, PartOfSeveral):
        return _dry(value, visit)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_visiting(x, visit) for x in value)
    if isinstance(value, (functools.partial, _core.Family, _core.Reshaped)):
        raise NotImplementedError("lower_each: the kernels depend on the arrays of the call")
    if isinstance(value, SeveralKernels) or hasattr(value, "definition"):
        return lambda *operands, out=None, stream=None: _visit(value, operands, visit)
    return value


def _visit(kernel, operands, visit):
    """Returns descriptions of the results."""
    if isinstance(kernel, SeveralKernels):
        return _dry(kernel, visit)(*operands)
    lowered = kernel.lower(*operands)
    visit(lowered)
    outs = tuple(plgpu.ShapeDtypeStruct(*of) for of in lowered.outputs)
    return outs if len(outs) > 1 else outs[0]


def _compile(lowered):
    lowered.resources()


def compile_for(kernel, operands):
    """Compiles what a call with such operands runs, for the cache on disk, which calls read.
    operands: descriptions, without sizes of the call. Returns those of the results."""
    return _visit(kernel, operands, _compile)


class WarpSpecialized:
    """A block of a warp-specialised kernel, while its body is traced.

    Kernels derive a class from it: ``producer()`` is what the last warpgroup does, ``consumer(me)``
    what each of the others does. ``plan`` tells how many consumers there are and, in ``registers``,
    what a lane of the producer and of a consumer has (None: an even share). ``refs``, operands and
    scratch by name, become attributes. In the end a consumer waits until its stores have read
    shared memory, or, without ``reads_only``, until they are done."""

    reads_only = True

    def __init__(self, plan, refs):
        self.plan = plan
        vars(self).update(refs)

    def prefetch(self):
        """What the producer asks for before the kernels before this one are done."""

    def overlap_launches(self):
        """The function of that name, with `prefetch`."""
        producer = lax.axis_index("wg") == self.plan.consumers
        overlap_launches(lambda: pl.when(producer)(self.prefetch))

    def run(self):
        p = self.plan
        me = lax.axis_index("wg")

        @pl.when(me == p.consumers)
        def _():
            if p.registers:
                plgpu.set_max_registers(p.registers[0], action="decrease")
            self.producer()

        @pl.when(me < p.consumers)
        def _():
            if p.registers:
                plgpu.set_max_registers(p.registers[1], action="increase")
            self.consumer(me)
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.reads_only)


class IssuedByWarps(WarpSpecialized):
    """The same where the tensor cores take products from a single lane: of the last warpgroup one
    warp fetches, ``producer()``, and one issues the products, ``multiply()``. ``locate()`` finds
    the place of the block, in each role by itself."""

    def locate(self):
        pass

    def issue(self):
        """What the last warpgroup does."""

        def warps():
            warp = lax.axis_index("warp")
            self.locate()
            pl.when(warp == 0)(self.producer)
            pl.when(warp == 1)(self.multiply)

        pl.kernel(warps, mesh=plgpu.WarpMesh(axis_name="warp"))()


def warp_specialized(body, plan, out_type, threads=None, **options):
    """The kernel whose body runs a block of the plan: besides consumers and registers it has
    ``clusters``, how many are launched, ``axes``, names and sizes of a cluster's, and scratch().
    threads: of a block; by default consumers and a producer."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=plan.scratch(),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=tuple(plan.axes.values()),
        cluster_names=tuple(plan.axes),
        num_threads=threads or plan.consumers + 1,
        thread_name="wg",
        **options,
    )


class Ring:
    """Slots in shared memory that the producer fills and the consumers empty, in the same order.

    ``full``, ``empty``: their barriers; ``buffers``: refs whose first dim is the slot. Step number
    `it` of all tiles has slot `it % stages`, in phase `it // stages` of its barriers. Where stages
    is no power of two that takes a division, which makes short steps longer; loops of such kernels
    carry slot and phase instead. ``relaxed``: releases are, see plgpu.barrier_arrive."""

    def __init__(self, stages, full, empty, *buffers, relaxed=False):
        self.stages, self.full, self.empty, self.buffers = stages, full, empty, buffers
        self.relaxed = relaxed

    @staticmethod
    def barriers(stages, copies, consumers, axes=(), prefix=""):
        """Scratch: a slot is full after so many copies, and empty after so many releases, in each
        block along the axes of the cluster."""
        releases = {"num_arrivals": consumers, "num_barriers": stages}
        if axes:
            empty = plgpu.ClusterBarrier(collective_axes=axes, **releases)
        else:
            empty = plgpu.Barrier(**releases)
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        return {f"{prefix}full": full, f"{prefix}empty": empty}

    def slot(self, it):
        slot = it % self.stages  # named for the generated program
        return slot

    def acquire(self, it):
        """Producer: waits until the slot of step `it` is free."""

        @pl.when(it >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(it)], phase=it // self.stages - 1)

    def wait(self, it):
        """Consumer: waits until the slot of step `it` is full."""
        plgpu.barrier_wait(self.full.at[self.slot(it)], phase=it // self.stages)

    def fill(self, it):
        """Consumer that fills slots for others: that of step `it` is full, or a part of it."""
        plgpu.barrier_arrive(self.full.at[self.slot(it)])

    def release(self, it):
        """Consumer: the slot of step `it` may be filled again."""
        self.release_slot(self.slot(it))

    def await_release(self, it):
        """Producer: waits for the release of step `it`."""
        plgpu.barrier_wait(self.empty.at[self.slot(it)], phase=it // self.stages)

    def drain(self, steps):
        """Producer: waits for the last release of every slot, also those by other blocks, after so
        many steps."""
        for s in range(self.stages):
            last = (steps - s - 1) // self.stages
            pl.when(steps > s)(lambda s=s, n=last: plgpu.barrier_wait(self.empty.at[s], phase=n))

    # ---- by slot and phase

    def at(self, it):
        """Slot and phase of step `it`."""
        return it % self.stages, it // self.stages

    def next(self, slot, phase):
        """Those of the step after."""
        last = slot == self.stages - 1
        return lax.select(last, jnp.int32(0), slot + 1), phase + last.astype(jnp.int32)

    def fetch(self, first, steps, at, copy):
        """Producer: copy(s, *slots of the buffers, barrier) for the steps from the first on, from
        slot and phase `at` on. Returns those after the steps."""

        def one(s, at):
            slot, phase = at

            @pl.when(phase > 0)
            def _():
                plgpu.barrier_wait(self.empty.at[slot], phase=phase - 1)

            copy(s, *(buffer.at[slot] for buffer in self.buffers), self.full.at[slot])
            return self.next(slot, phase)

        return lax.fori_loop(first, steps, one, at)

    def release_slot(self, slot):
        plgpu.barrier_arrive(self.empty.at[slot], relaxed=self.relaxed)

    def multiply(
        self, acc, steps, at, factors, beside=lambda s, carry: carry, carry=None, before=None
    ):
        """Consumer: acc += the product of factors(*slots of the buffers) for each step, from slot
        and phase `at` on. One product is in flight while the next one is issued.

        carry = beside(s, carry) is what else is done while step s multiplies. before() is called
        once the products issued before the first step are done, if there are steps. Returns the
        carry, slot and phase after the steps, and the slot of the last one, which is yet to be
        released (-1 without steps)."""

        def one(s, state):
            carry, slot, phase, last = state
            plgpu.barrier_wait(self.full.at[slot], phase=phase)
            plgpu.wgmma(acc, *factors(*(buffer.at[slot] for buffer in self.buffers)))
            carry = beside(s, carry)
            plgpu.wgmma_wait(1)
            pl.when(last >= 0)(lambda: self.release_slot(last))
            if before:
                pl.when(last < 0)(before)
            return carry, *self.next(slot, phase), slot

        carry, slot, phase, last = lax.fori_loop(0, steps, one, (carry, *at, jnp.int32(-1)))
        return carry, (slot, phase), last


class StaticTiles:
    """Tiles of persistent clusters: cluster c has the tiles c, c + clusters, c + 2 * clusters, ...

    ``total``: tiles of all clusters; ``first``: the number of this cluster."""

    def __init__(self, total, clusters, first):
        self.total, self.clusters, self.first = total, clusters, first
        same = total is clusters  # sizes of the call (plgpu.dim) are compared as they are written
        known = not isinstance(clusters, plgpu.Dim) and not isinstance(total, plgpu.Dim)
        self.one_each = same or known and total == clusters

    def count(self):
        """How many tiles this cluster has."""
        count = (self.total - self.first + (self.clusters - 1)) // self.clusters
        return count

    def tile(self, w):
        """Tile w of this cluster."""
        tile = self.first + w * self.clusters
        return tile

    def produce(self, work, carry, beyond=False):
        """carry = work(tile, carry) for each tile of this cluster. beyond: for one more."""
        if self.one_each and not beyond:
            return work(self.first, carry)
        trips = self.count() + 1 if beyond else self.count()
        return lax.fori_loop(0, trips, lambda w, carry: work(self.tile(w), carry), carry)

    consume = produce


class CountedTiles:
    """Tiles from a counter of the launch, the next one for whichever cluster is free.

    The producer takes a tile and tells the consumers its number, through a ring of `ahead` numbers;
    the last one is beyond all tiles. The first tile of a cluster is its own number. All blocks of a
    cluster get what the first one takes. ``refs``: of scratch()."""

    def __init__(self, total, clusters, first, refs):
        self.total, self.clusters, self.first = total, clusters, first
        self.scheduler = plgpu.ext.TileScheduler(*refs)

    @staticmethod
    def scratch(consumers, ahead=2, axes=None):
        """axes: of the cluster, if it has more than one block."""
        found = plgpu.ext.TileScheduler.scratch(consumers, ahead, axes or ())
        return dict(zip(("tile_numbers", "tile_full", "tile_empty", "tile_free"), found.values()))

    def take(self, t):
        """The counter, counting from 0; t under vmap, whose elements would share it."""
        try:
            return self.scheduler.fetch()
        except NotImplementedError:
            return t

    def announce(self, w, t):
        self.scheduler.broadcast(t, w)
        return t if self.scheduler.free is None else self.scheduler.receive(w, release=False)

    def produce(self, work, carry, beyond=False, some=True, asks=False):
        """Producer: carry = work(tile, carry) for each tile of this cluster.

        beyond: also for the number that ends them. some: the first one is a tile for sure. asks:
        the next tile is not taken when the work begins, but when work(tile, carry, ask) calls
        ask(); it returns (carry, what ask() returned)."""

        def step(x):
            w, t, carry = x
            if asks:
                carry, taken = work(t, carry, lambda: self.take(t))
            else:
                taken = self.take(t)
                carry = work(t, carry)
            return w + 1, self.announce(w + 1, taken + self.clusters), carry

        start = jnp.int32(0), self.announce(jnp.int32(0), self.first), carry
        w, t, carry = lax.while_loop(lambda x: x[1] < self.total, step, start)
        if beyond:
            carry = work(t, carry)
        read, ahead = self.scheduler.read, self.scheduler.slots
        plgpu.barrier_wait(read.at[w % ahead])
        for k in range(1, ahead):

            def await_read(k=k):
                plgpu.barrier_wait(read.at[(w + (ahead - k)) % ahead])

            pl.when(some and k == 1 or w > k - 1)(await_read)
        return carry

    def tile(self, w):
        """Consumer: tile w of those that this cluster gets; their numbers come in order."""
        return self.scheduler.receive(w)

    def consume(self, work, carry):
        """Consumer: carry = work(tile, carry) for each tile of this cluster."""

        def step(x):
            w, t, carry = x
            carry = work(t, carry)
            return w + 1, self.tile(w + 1), carry

        start = (jnp.int32(0), self.tile(jnp.int32(0)), carry)
        return lax.while_loop(lambda x: x[1] < self.total, step, start)[2]


def clear_rows(ref, first):
    """Makes the rows of shared memory from the first one on 0. Needs few registers."""
    n = 16
    whole = (first + (n - 1)) // n
    rest = whole * n - first  # rows of a part of a group

    def clear(start, count):
        at = pl.ds(pl.multiple_of(start, count), count)
        ref[at] = jnp.zeros((count, *ref.shape[1:]), ref.dtype)

    for count in (8, 4, 2, 1):
        start = whole * n - rest // count * count
        pl.when(rest & count != 0)(lambda start=start, count=count: clear(start, count))
    lax.fori_loop(whole, ref.shape[0] // n, lambda i, _: clear(i * n, n), None)


def store(buffer, value, *targets, **how):
    """The value to global memory, through a buffer that no earlier store still reads."""
    buffer[...] = value
    plgpu.commit_smem()
    for target in targets:
        plgpu.copy_smem_to_gmem(buffer, target, **how)


def store_some(buffer, value, rows, target_of, engine=None):
    """The first rows of a value to global memory, which may have others after them: in boxes of as
    many rows as their number has bits. target_of(start, count): where so many rows go."""
    count = 1 << buffer.shape[0].bit_length() - 1
    buffer[...] = value
    plgpu.commit_smem()
    while count:
        there = rows & count != 0

        def box(n=count):
            start = rows // (2 * n) * (2 * n)
            part = buffer.at[pl.ds(start, n)]
            plgpu.copy_smem_to_gmem(part, target_of(start, n), commit_group=False, engine=engine)

        pl.when(there)(box)
        count //= 2
    plgpu.commit_smem_to_gmem_group()
