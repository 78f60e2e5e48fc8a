"""What the kernels of this folder share.

A block of a warp-specialised kernel has one *producer*, its last warpgroup, and *consumers*, all
others. The producer has TMA fill the slots of a *ring* in shared memory; consumers wait until a
slot is full, multiply what is in it, and release it. Each slot has two barriers: `full` completes
when its bytes have arrived, `empty` when every consumer has released it. The producer computes
little, so it gives most of its registers to the consumers.

A *tile scheduler* tells a block which tiles of the result are its own, the producer and the
consumers alike: `StaticTiles` deals them out before the launch. The *epilogue* of a tile takes the
result to global memory through buffers in shared memory, by TMA."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

SMEM_BYTES = 232448 - 1024  # that buffers of a block may take

# Registers of a lane of the producer and of a consumer, by the number of consumers, where an even
# share has no room for the accumulators.
REGISTERS = {2: (40, 232), 3: (32, 160)}


def swizzled(row, dtype):
    """Transforms of a buffer with rows of that many elements, as the tensor cores read it."""
    bytes_ = row * dtype.itemsize
    if bytes_ not in (32, 64, 128):
        return ()
    return (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(bytes_))


def overlap_launches():
    """The next kernel may be launched now. Nothing is read or written before the kernels before
    this one are done."""
    plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()


class WarpSpecialized:
    """A block of a warp-specialised kernel, while its body is traced.

    Kernels derive a class from it: ``producer()`` is what the last warpgroup does, ``consumer(me)``
    what each of the others does. ``plan`` tells how many consumers there are and, in ``registers``,
    what a lane of the producer and of a consumer has (None: an even share). ``refs``, operands and
    scratch by name, become attributes; those that a kernel does without are None."""

    def __init__(self, plan, refs):
        self.plan = plan
        vars(self).update(refs)

    def run(self):
        p, me = self.plan, lax.axis_index("wg")

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
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def warp_specialized(body, plan, out_type, **options):
    """The kernel whose body runs a block of the plan: besides consumers and registers it has
    ``clusters``, how many are launched, ``axes``, names and sizes of a cluster's, and scratch()."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=plan.scratch(),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=tuple(plan.axes.values()),
        cluster_names=tuple(plan.axes),
        num_threads=plan.consumers + 1,
        thread_name="wg",
        **options,
    )


class Ring:
    """Slots in shared memory that the producer fills and the consumers empty, in the same order.

    ``full``, ``empty``: their barriers; ``buffers``: refs whose first dim is the slot. Step number
    `it` of all tiles has slot `it % stages`, in phase `it // stages` of its barriers. Where stages
    is no power of two that takes a division, which makes short steps longer; loops of such kernels
    carry slot and phase instead."""

    def __init__(self, stages, full, empty, *buffers):
        self.stages, self.full, self.empty, self.buffers = stages, full, empty, buffers

    @staticmethod
    def barriers(stages, copies, consumers, axes=()):
        """Scratch: a slot is full after so many copies, and empty after so many releases, in each
        block along the axes of the cluster."""
        releases = {"num_arrivals": consumers, "num_barriers": stages}
        if axes:
            empty = plgpu.ClusterBarrier(collective_axes=axes, **releases)
        else:
            empty = plgpu.Barrier(**releases)
        return {"full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages), "empty": empty}

    def slot(self, it):
        return it % self.stages

    def acquire(self, it):
        """Producer: waits until the slot of step `it` is free."""

        @pl.when(it >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(it)], phase=it // self.stages - 1)

    def wait(self, it):
        """Consumer: waits until the slot of step `it` is full."""
        plgpu.barrier_wait(self.full.at[self.slot(it)], phase=it // self.stages)

    def release(self, it):
        """Consumer: the slot of step `it` may be filled again."""
        plgpu.barrier_arrive(self.empty.at[self.slot(it)])

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


class StaticTiles:
    """Tiles of persistent clusters: cluster c has the tiles c, c + clusters, c + 2 * clusters, ...

    ``total``: tiles of all clusters."""

    def __init__(self, total, clusters):
        self.total, self.clusters, self.first = total, clusters, lax.axis_index("cluster")

    def for_each(self, work, carry):
        """carry = work(tile, carry) for each tile of this cluster."""
        if self.total == self.clusters:
            return work(self.first, carry)
        trips = (self.total - self.first + (self.clusters - 1)) // self.clusters

        def one(w, carry):
            return work(self.first + w * self.clusters, carry)

        return lax.fori_loop(0, trips, one, carry)
