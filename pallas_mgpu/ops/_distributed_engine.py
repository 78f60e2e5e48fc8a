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
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl
from pallas_mgpu._symmetric import _torch, peer_tensor

from . import _distributed_products as products
from .distributed import Collective, Own
from .matmul import matmul

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


def gathered(plan, *args, **options):
    x = plan.x
    return Gather(plan, ((plan.parts - 1, x.m, x.k), x.dtypes[0]), *args, **options)


def scattered(plan, *args, **options):
    x = plan.x
    return Scatter(plan, ((plan.others, x.m, x.n), np.dtype(np.float32)), *args, **options)
