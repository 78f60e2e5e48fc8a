"""Products over devices whose data the copy engines move, while the SMs multiply.

The host enqueues the copies on a stream of its own: a piece of the data and then its flag, whose
value the last kernel left for this call. Copies of one stream follow each other, so a device that
sees the flag has the data. A kernel ends when no block of any device needs its staging memory any
more, so that the copies of the next call need not wait.

All-gather, then product: bands of rows are sent when the kernel begins. Product, then
reduce-scatter: what other devices are to get are products of their own, in chunks of about a wave
of tiles, each of which is sent while the next one is computed; the kernel then multiplies the own
rows and adds what came, in the order of the ranks. The own rows come last, so that only a part of
the transfer may be left when they are done.

Without GPUs, the copies are made before the kernel runs."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._symmetric import _torch, peer_tensor

from . import _distributed_products as products
from .distributed import Collective, Own
from .matmul import matmul

_STREAMS = 2  # of copies
_CHUNK = 1 << 22  # elements of a product that are sent together, about: 128 tiles of 128 x 256


class _Drained:
    """Of a block: no device needs the staging memory of this launch when its kernel has ended."""

    def courier(self):
        p = self.plan
        others = [(self.me + k) % self.size for k in range(1, self.size)]
        plgpu.barrier_wait(self.drained)
        for d in others:
            self.signal(d, p.done)

        @pl.when(self.block == 0)
        def _():
            for d in others:
                self.await_signal(d, p.done, p.blocks)
            self.next_epoch[0] = self.epoch + 1

    def consumer(self, me):
        super().consumer(me)
        plgpu.barrier_arrive(self.drained)


class _EnginePlan:
    """What plans have in common. flags: one for each piece of data, and `done`."""

    def scratch(self):
        return super().scratch() | {"drained": plgpu.Barrier(num_arrivals=self.consumers)}

    def named_by_engine(self, refs):
        """The operands, with what came, the result and the memory by name."""
        a, b, came, o, next_epoch, *others = refs
        return self.named((a, b, o, came, next_epoch, *others), "staging", "next_epoch")


class GatherPlan(_EnginePlan, products.GatherPlan):
    """The same with a cell for each band, and a flag of blocks that need no rows any more."""

    def __init__(self, *args):
        super().__init__(*args)
        self.slab, self.slabs, self.runs, self.last_runs = self.steps * self.split, 1, 1, 1
        self.done, self.flags = self.bands, self.bands + 1

    def staging(self):
        """The value of the flags of the next call."""
        _, *others = super().staging()
        return [Own((1,), np.dtype(np.int32)), *others]


class GatherBlock(_Drained, products.GatherBlock):
    def arrivals(self, number):
        return self.staging.at[number]


class OwnSumPlan(_EnginePlan, products.Plan):
    """The product of a device's own rows, to which the summands of the others are added."""

    def __init__(self, x, cfg, blocks, parts):
        super().__init__(x, cfg, blocks, 1, cfg.consumers + 1)
        self.others = parts - 1
        self.chunk_rows = max(_CHUNK // x.n // self.rows, 1) * self.rows
        self.done = pl.cdiv(x.m, self.chunk_rows)
        self.flags = self.done + 1

    @staticmethod
    def fits(x, cfg):
        """Summands have no rows and columns beyond the result."""
        rows, cols = 64 * cfg.consumers * cfg.cluster, cfg.tile_n * cfg.cluster_n
        return x.m % rows == 0 == x.n % cols

    def time(self):
        return self.product(1)[0]

    def staging(self):
        return [Own((1,), np.dtype(np.int32)), *super().staging()]


class _OwnSums(products.DeviceBlock):
    def fetch_tile(self, t, it0):
        first = self.first_step() * self.cfg.step
        return self.fetch_steps(it0, *self.origin(t), first, [(True, self.a.at[self.me])])

    def consumer(self, me):
        p = self.plan

        def multiply(t, it0):
            [value], _ = self.sum(me, it0)
            value = self.join(me, it0, value)
            row, col = self.corner(t)
            chunk = row // p.chunk_rows

            def await_signal(k):
                other = k + (self.me <= k).astype(jnp.int32)
                self.await_signal(other, chunk)

            products.each(0, self.size - 1, await_signal)

            def total(c):
                at = pl.ds(row + me * 64, 64), pl.ds(col + c * p.chunk, p.chunk)
                came = (self.staging[k, *at] for k in range(self.size - 1))
                own = value[:, c * p.chunk : (c + 1) * p.chunk]
                return products.in_order(self.me, own, came, self.size)

            self.epilogue(me, products.Chunks(p.chunks, total), [self.o], row, col)
            return it0 + p.steps

        self.tiles().consume(multiply, jnp.int32(0))


class OwnSumBlock(_Drained, _OwnSums):
    pass


class SumPlan(_EnginePlan, products.SumPlan):
    """All tiles in one kernel. Summands that leave lie by unit, so that those of a *batch* of tiles
    are one copy, which begins when a counter of this device says that all of them are there."""

    def __init__(self, x, cfg, blocks, parts):
        # a kernel of each stream that waits for summands takes an SM, and with it a pair
        super().__init__(x, cfg, max(blocks - 2 * _STREAMS, 2), parts)
        self.batches = pl.cdiv(self.each, self.clusters)
        self.batch = pl.cdiv(self.each, self.batches)  # tiles
        self.batches = pl.cdiv(self.each, self.batch)
        self.done, self.flags = self.batches, self.batches + 1

    def staging(self):
        share = self.parts - 1, self.units, self.chunks, self.consumers, *self.part
        int32 = np.dtype(np.int32)
        counters = Own((self.parts - 1, self.batches, 4), int32)  # of 16 bytes each
        f32 = np.dtype(np.float32)
        return [Own((1,), int32), (share, f32), Own(share, f32), counters]

    def named_by_engine(self, refs):
        return self.named(refs, "next_epoch", "staging", "leaving", "counters")

    def units_of(self, k):
        """The units of batch k."""
        first = k * self.batch * self.cluster
        return first, min(first + self.batch * self.cluster, self.units)


class SumBlock(_Drained, products.SumBlock):
    """Products for the other devices first, as in SumBlock of _distributed_products.py; copy
    engines take them away."""

    engines = True

    def outgoing(self, w, c, me):
        t = self.tiles().tile(w)
        return self.leaving.at[t // self.plan.each, self.unit(t), c, me]

    def arrivals(self, number):
        return _by_unit_last(self.staging.at[number])

    def batch_of(self, t):
        return t % self.plan.each // self.plan.batch

    def carry_summands(self, w):
        t = self.tiles().tile(w)
        counters = plgpu.ext.as_semaphores(self.counters)
        plgpu.semaphore_signal(counters.at[t // self.plan.each, self.batch_of(t), 0])

    def await_summands(self, t, c):
        if c == 0:
            batch = self.batch_of(t)
            products.each(0, self.size - 1, lambda k: self.await_signal(self.other(k), batch))

    def courier(self):
        products.SumBlock.courier(self)
        if not self.engines:
            pl.when(self.block == 0)(self.copy)
        super().courier()

    def copy(self):
        """Instead of engines."""
        counters = plgpu.ext.as_semaphores(self.counters)
        for step in range(self.size - 1):
            to, before = (self.me + 1 + step) % self.size, step * self.plan.units
            source = _by_unit_last(self.leaving.at[step])
            there = self.on(self.staging, to).at[self.among(self.me, to)]
            there = _by_unit_last(there)
            for k in range(self.plan.batches):
                first, last = self.plan.units_of(k)
                target = self.epoch * (last - first)
                plgpu.semaphore_wait(counters.at[step, k, 0], target, decrement=False)

                def move(u, _, before=before, source=source, there=there):
                    self.carry_share(before + u, (source, u), (there, u), lambda: None)

                lax.fori_loop(first, last, move, None)
                self.signal(to, k)


def _by_unit_last(summands):
    """By chunk, consumer and unit."""
    return summands.transpose((1, 2, 0, 3, 4, 5))


@cached
def _waiting(times):
    """A kernel that lasts until a counter has been raised so many times by each launch."""

    def body(counter, next_epoch):
        counter = plgpu.ext.as_semaphores(counter)
        plgpu.semaphore_wait(counter.at[0], next_epoch[0] * times, decrement=False)

    return plgpu.kernel(body, out_type=(), kernel_name="await_summands")


class _Engine(Collective):
    """A kernel, and the copies that feed it."""

    def __init__(self, plan, arrives, mesh, body, name, *args, **options):
        """arrives: shape and dtype of what comes from the others."""
        if mesh.devices is not None or mesh.memory == "nvshmem" or len(mesh.shape) > 1:
            raise NotImplementedError(
                f'{name}: transfer="engine" on GPUs of one process, with memory of NVSHMEM, and on'
                ' a mesh of several axes; use "push" or "pull"'
            )
        super().__init__(mesh, body, name, *args, **options)
        self.plan, self.stream, self.there = plan, None, {}
        if arrives is not None:
            self.came = plgpu.symm_empty(*arrives, mesh)
        self.next_epoch, self.flags = self.lasting[0], self.lasting[-2]
        for x in [self.next_epoch] if mesh.group is not None else self.next_epoch:
            x[...] = 1

    def __call__(self, a, b, out=None):
        if self.mesh.group is None:
            for d in range(self.mesh.size):
                self._feed(d, a[d], b[d], self.next_epoch[d], lambda x, to: x[to], _now)
            return super().__call__(a, b, self.came, out=out)
        torch, kept = _torch(), []
        rank = _torch(".distributed").get_rank(self.mesh.group)
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()

        def copy(target, source, after=None):
            kept.append(source)
            if after is not None:
                self.stream.wait_event(after)
            with torch.cuda.stream(self.stream):
                target.copy_(source)  # contiguous: by the copy engine

        self.stream.wait_stream(current)
        self._feed(rank, a, b, self.next_epoch, self._of_peer, copy)
        made = super().__call__(a, b, self.came, out=out)
        current.wait_stream(self.stream)
        return made

    def _of_peer(self, x, rank):
        key = x.data_ptr(), rank
        if key not in self.there:
            self.there[key] = peer_tensor(x, rank)
        return self.there[key]

    def _event(self):
        """That all enqueued so far is done; None without GPUs."""
        return None if self.mesh.group is None else _torch().cuda.current_stream().record_event()

    def _tell(self, me, to, flag, next_epoch, of, copy):
        copy(of(self.flags, to)[flag, 0, me : me + 1], next_epoch)


def _now(target, source, after=None):
    target[...] = source


class Gather(_Engine):
    def _feed(self, me, a, b, next_epoch, of, copy):
        """Enqueue the copies of device `me`. of(x, device): the lasting array of a device."""
        n, band = self.mesh.size, self.plan.band
        for step in range(1, n):
            to = (me - step) % n  # the device before this one needs its rows first
            for k, first in enumerate(range(0, self.plan.x.m, band)):
                at = slice(first, first + band)
                copy(of(self.came, to)[step - 1, at], a[at])
                self._tell(me, to, k, next_epoch, of, copy)


class Scatter(_Engine):
    def __init__(self, plan, arrives, mesh, *args, **options):
        super().__init__(plan, arrives, mesh, *args, **options)
        interpret = args[-1]
        if mesh.group is None:
            interpret = interpret or True
        self.how = {"out_dtype": np.float32, "interpret": interpret}

    def _feed(self, me, a, b, next_epoch, of, copy):
        """The products for the other devices, and the copies to them."""
        n, m, size = self.mesh.size, self.plan.x.m, self.plan.chunk_rows
        for step in range(1, n):
            to = (me + step) % n
            there = of(self.came, to)[me - (me > to)]
            for k, first in enumerate(range(0, m, size)):
                last = min(first + size, m)
                summand = matmul(a[to * m + first : to * m + last], b, **self.how)
                copy(there[first:last], summand, self._event())
                self._tell(me, to, k, next_epoch, of, copy)


class Sums(_Engine):
    """One kernel, and copies of what it has computed so far."""

    def __init__(self, plan, arrives, mesh, *args, **options):
        super().__init__(plan, arrives, mesh, *args, **options)
        self.came, self.leaving, self.counters = self.lasting[1:4]
        self.streams = [None] * _STREAMS

    def _load(self):
        """Kernels are loaded before one runs that needs another device."""
        for k in range(self.plan.batches):
            first, last = self.plan.units_of(k)
            reached = self.next_epoch * (last - first)
            _waiting(last - first)(reached.repeat(4), self.next_epoch)

    def __call__(self, a, b, out=None):
        if self.mesh.group is None:
            return Collective.__call__(self, a, b, out=out)
        torch = _torch()
        me = _torch(".distributed").get_rank(self.mesh.group)
        if self.streams[0] is None:
            self.streams = [torch.cuda.Stream() for _ in self.streams]
            self._load()
        current, n = torch.cuda.current_stream(), self.mesh.size
        for stream in self.streams:
            stream.wait_stream(current)
        made = Collective.__call__(self, a, b, out=out)
        for step in range(n - 1):
            to = (me + 1 + step) % n
            there = self._of_peer(self.came, to)[me - (me > to)]
            for k in range(self.plan.batches):
                first, last = self.plan.units_of(k)
                with torch.cuda.stream(
                    self.streams[(step * self.plan.batches + k) % len(self.streams)]
                ):
                    _waiting(last - first)(self.counters[step, k], self.next_epoch)
                    there[first:last].copy_(self.leaving[step, first:last])
                    self._of_peer(self.flags, to)[k, 0, me : me + 1].copy_(self.next_epoch)
        for stream in self.streams:
            current.wait_stream(stream)
        return made


def gathered(plan, *args, **options):
    x = plan.x
    return Gather(plan, ((plan.parts - 1, x.m, x.k), x.dtypes[0]), *args, **options)


def scattered(plan, *args, **options):
    x = plan.x
    return Scatter(plan, ((plan.others, x.m, x.n), np.dtype(np.float32)), *args, **options)


def summed(plan, *args, **options):
    return Sums(plan, None, *args, **options)
