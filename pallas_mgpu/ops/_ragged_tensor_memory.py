"""Grouped matrix products on Blackwell's tensor cores, `ragged_dot` and `transposed_ragged_dot`.

Built as `matmul` for one block (_tensor_memory.py): a producer, a multiplier with two accumulators
in tensor memory, and an epilogue. Tiles have 128 rows and begin where a group does; what they read
of the next group is multiplied for nothing. What is stored ends where the group ends: in boxes of
TMA, whose rows are powers of two. Persistent blocks take every n-th tile.

In `transposed_ragged_dot` steps go along the rows of a group, both operands are transposed, and the
last step of a group may have rows of the next one. The multiplier, a whole warpgroup, overwrites
these with zeros in both operands (they may be infinite) before it issues the product. A group
without rows is one such step of zeros alone."""

import functools

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import StaticTiles, overlap_launches, warp_specialized
from ._groups import GroupedBlock, in_bands, open_shapes
from ._tensor_memory import SMEM_BYTES, TensorMemoryConfig

_ROWS = 128
_ACCUMULATORS = 2


class _Plan:
    """What follows from a product and a configuration."""

    consumers, registers = 2, None
    axes: dict = {}
    name = "ragged_dot"

    def __init__(self, x, cfg, sms):
        self.x, self.cfg, self.cols = x, cfg, cfg.tile_n
        self.step = cfg.step // x.dtype.itemsize
        self.steps, self.tiles_n = pl.cdiv(x.k, self.step), pl.cdiv(x.n, self.cols)
        self.clusters = _sizes.minimum(sms, (pl.cdiv(x.m, _ROWS) + x.groups) * self.tiles_n)
        self.groups = _sizes.most(x.groups)
        out_bytes = x.out_dtype.itemsize
        self.chunk = min(128 // out_bytes, self.cols)
        self.chunks = self.cols // self.chunk
        self.buffers = min(cfg.buffers, self.chunks)
        used = self.buffers * _ROWS * self.chunk * out_bytes + 8 * (self.groups + 1) + 2048
        most = min((SMEM_BYTES - used) // ((_ROWS + self.cols) * cfg.step), 12)
        self.stages = min(cfg.stages or most, most)
        if self.stages < 2:
            raise ValueError(
                f"{self.name}: {self.stages} slots fit with {self.groups} groups, {cfg} needs 2 of"
                " them"
            )
        self.engine = None if _sizes.most(x.m) == 1 or x.n * out_bytes % 16 == 0 else "plain"

    def slot_shapes(self):
        b_tile = (self.cols, self.step) if self.x.tb else (self.step, self.cols)
        return (_ROWS, self.step), b_tile

    def scratch(self):
        x, each = self.x, {"num_barriers": _ACCUMULATORS, "orders_tensor_core": True}
        a_tile, b_tile = self.slot_shapes()
        return {
            "a_smem": plgpu.SMEM((self.stages, *a_tile), x.dtype),
            "b_smem": plgpu.SMEM((self.stages, *b_tile), x.dtype),
            "o_smem": plgpu.SMEM((self.buffers, _ROWS, self.chunk), x.out_dtype),
            "acc": plgpu.TMEM((_ACCUMULATORS, _ROWS, self.cols), jnp.float32),
            "table": plgpu.SMEM((2, self.groups + 1), jnp.int32),
            "table_ready": plgpu.Barrier(),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_barriers=self.stages, orders_tensor_core=True),
            "ready": plgpu.Barrier(**each),
            "taken": plgpu.Barrier(**each),
        }


class _Block(GroupedBlock):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs, rows=_ROWS):
        super().__init__(plan, rows, refs)

    def for_tiles(self, work, carry):
        """carry = work(number, group, first row, rows, first column, carry) for each tile."""
        p, table = self.plan, self.table
        total = table[1, p.x.groups] * p.tiles_n
        trips = (jnp.maximum(total - self.cluster, 0) + (p.clusters - 1)) // p.clusters

        def one(w, state):
            g, carry = state
            t = self.cluster + w * p.clusters
            g = lax.while_loop(lambda g: table[1, g + 1] * p.tiles_n <= t, lambda g: g + 1, g)
            start, size = self.group_rows(g)
            inside = t - jnp.maximum(table[1, g], 0) * p.tiles_n
            count = (size + (_ROWS - 1)) // _ROWS
            i, j = in_bands(inside, count, p.tiles_n, p.cfg.group)
            rows = jnp.minimum(size - i * _ROWS, _ROWS)
            return g, work(w, g, start + i * _ROWS, rows, j * p.cols, carry)

        return lax.fori_loop(0, trips, one, (jnp.int32(0), carry))[1]

    def producer(self):
        self.ring.drain(self.for_tiles(self.fetch_tile, jnp.int32(0)))

    def fetch_tile(self, w, g, row, rows, col, it0):
        del w, rows
        p, ring = self.plan, self.ring

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            along_k, along_n = pl.ds(s * p.step, p.step), pl.ds(col, p.cols)
            ring.acquire(it)
            a = self.a.at[pl.ds(row, _ROWS), along_k]
            b = self.b.at[(g, along_n, along_k) if p.x.tb else (g, along_k, along_n)]
            plgpu.copy_gmem_to_smem(a, self.a_smem.at[slot], self.full.at[slot])
            plgpu.copy_gmem_to_smem(b, self.b_smem.at[slot], self.full.at[slot])

        lax.fori_loop(0, p.steps, fetch, None)
        return it0 + p.steps

    def consumer(self, me):
        @pl.when(me == 1)
        def _():
            self.for_tiles(self.multiply_tile, jnp.int32(0))

        @pl.when(me == 0)
        def _():
            self.for_tiles(self.take_tile, None)
            self.zero_rest()

    def multiply_tile(self, w, g, row, rows, col, it0):
        del g, row, rows, col
        p, ring, which = self.plan, self.ring, w % _ACCUMULATORS
        self.await_taken(w)

        def step(s, _):
            it = it0 + s
            slot = ring.slot(it)
            ring.wait(it)
            b = self.b_smem.at[slot]
            plgpu.tcgen05_mma(
                self.acc.at[which],
                self.a_smem.at[slot],
                b.T if p.x.tb else b,
                self.empty.at[slot],
                accumulate=s > 0,
            )

        lax.fori_loop(0, p.steps, step, None)
        plgpu.tcgen05_commit_arrive(self.ready.at[which])
        return it0 + p.steps

    def await_taken(self, w):
        """Multiplier: waits until the accumulator of tile w is free."""

        @pl.when(w >= _ACCUMULATORS)
        def _():
            taken = self.taken.at[w % _ACCUMULATORS]
            plgpu.barrier_wait(taken, phase=w // _ACCUMULATORS - 1)

    def take_tile(self, w, g, row, rows, col, _):
        p, which = self.plan, w % _ACCUMULATORS
        plgpu.barrier_wait(self.ready.at[which], phase=w // _ACCUMULATORS)
        for c in range(p.chunks):
            along = pl.ds(c * p.chunk, p.chunk)
            part = plgpu.async_load_tmem(self.acc.at[which, :, along])
            if c == p.chunks - 1:
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(self.taken.at[which])
            # a chunk is one group of copies or several: all are waited for where there are several
            buffer = self.o_smem.at[c % p.buffers]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = part.astype(p.x.out_dtype)
            plgpu.commit_smem()
            self.store_rows(buffer, g, row, rows, pl.ds(col + c * p.chunk, p.chunk))

    def store_rows(self, buffer, g, row, rows, along):
        """The first rows of a buffer, in boxes of as many as their number has bits."""
        del g

        def send(first, count):
            target = self.o.at[pl.ds(row + first, count), along]
            engine = self.plan.engine
            plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, count)], target, engine=engine)

        pl.when(rows == _ROWS)(lambda: send(0, _ROWS))
        count = _ROWS // 2
        while count:
            first = rows // (2 * count) * (2 * count)
            there = (rows < _ROWS) & (rows & count != 0)
            pl.when(there)(functools.partial(send, first, count))
            count //= 2

    def zero_rest(self):
        """Rows of no group."""
        p, x = self.plan, self.plan.x
        first = jnp.clip(self.table[0, x.groups], 0, x.m) + self.cluster
        width = min(x.n, 2048)  # of what is zeroed at a time

        def zero_row(i, _):
            def zero(c, _):
                at = jnp.minimum(c * width, x.n - width)
                zeros = jnp.zeros((width,), x.out_dtype)
                self.o[first + i * p.clusters, pl.ds(at, width)] = zeros

            lax.fori_loop(0, pl.cdiv(x.n, width), zero, None)

        lax.fori_loop(
            0, (jnp.maximum(x.m - first, 0) + (p.clusters - 1)) // p.clusters, zero_row, None
        )


class _SumPlan(_Plan):
    """The same of `transposed_ragged_dot`: a slot has `rows` rows of both operands."""

    name = "transposed_ragged_dot"

    def __init__(self, x, cfg, sms):
        super().__init__(x, cfg, sms)
        self.rows = self.step
        self.tiles_m = pl.cdiv(x.k, _ROWS)
        self.total = x.groups * self.tiles_m * self.tiles_n
        self.clusters = _sizes.minimum(sms, self.total)
        self.engine = None if x.n * x.out_dtype.itemsize % 16 == 0 else "plain"

    def slot_shapes(self):
        return (self.rows, _ROWS), (self.rows, self.cols)

    def scratch(self):
        # a slot is released by the product and by the lanes that may have stored zeros there
        released = {"num_arrivals": 2, "num_barriers": self.stages, "orders_tensor_core": True}
        return super().scratch() | {"empty": plgpu.Barrier(**released)}


class _SumBlock(_Block):
    """One block of `transposed_ragged_dot`. The "row" of a tile is one of the result."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs, plan.rows)

    def for_tiles(self, work, carry):
        """carry = work(number, group, first row, the group's rows, first column, carry) for each
        tile; the group's rows are (the first one, how many)."""
        p = self.plan
        tiles = StaticTiles(p.total, p.clusters, self.cluster)

        def one(w, carry):
            t = tiles.tile(w)
            each = p.tiles_m * p.tiles_n
            i, j = in_bands(t % each, p.tiles_m, p.tiles_n, p.cfg.group)
            rows = self.group_rows(t // each)
            return work(w, t // each, i * _ROWS, rows, j * p.cols, carry)

        return lax.fori_loop(0, tiles.count(), one, carry)

    def count(self, rows):
        """Steps of a group."""
        return jnp.maximum((rows[1] + (self.plan.rows - 1)) // self.plan.rows, 1)

    def fetch_tile(self, w, g, row, rows, col, it0):
        del w, g
        p, ring, count = self.plan, self.ring, self.count(rows)

        def fetch(s, _):
            it = it0 + s
            slot, full = ring.slot(it), self.full.at[ring.slot(it)]
            along = pl.ds(rows[0] + s * p.rows, p.rows)
            ring.acquire(it)
            a, b = self.a.at[along, pl.ds(row, _ROWS)], self.b.at[along, pl.ds(col, p.cols)]
            plgpu.copy_gmem_to_smem(a, self.a_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(b, self.b_smem.at[slot], full)

        lax.fori_loop(0, count, fetch, None)
        return it0 + count

    def multiply_tile(self, w, g, row, rows, col, it0):
        del g, row, col
        p, ring, which, count = self.plan, self.ring, w % _ACCUMULATORS, self.count(rows)
        self.await_taken(w)

        def step(s, _):
            it = it0 + s
            slot, left = ring.slot(it), rows[1] - s * p.rows
            ring.wait(it)
            a, b = self.a_smem.at[slot], self.b_smem.at[slot]
            pl.when(left < p.rows)(lambda: self.clear(left, a, b))
            how = {"accumulate": s > 0}
            plgpu.tcgen05_mma(self.acc.at[which], a.T, b, self.empty.at[slot], **how)
            ring.release(it)

        lax.fori_loop(0, count, step, None)
        plgpu.tcgen05_commit_arrive(self.ready.at[which])
        return it0 + count

    def clear(self, left, *refs):
        """Zeros in the rows from `left` on."""

        def zero(i, _):
            for ref in refs:
                zeros = jnp.zeros((8, ref.shape[1]), ref.dtype)
                at = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
                pl.store(ref.at[pl.ds(i * 8, 8)], zeros, mask=at >= left - i * 8)

        lax.fori_loop(left // 8, self.plan.rows // 8, zero, None)
        plgpu.commit_smem()

    def store_rows(self, buffer, g, row, rows, along):
        del rows
        target = self.o.at[g, pl.ds(row, _ROWS), along]
        plgpu.copy_smem_to_gmem(buffer, target, engine=self.plan.engine)

    def zero_rest(self):
        """Rows of no group count for nothing."""


@cached
def kernel(x, cfg, sms, interpret, transposed=False):
    """x: a Product."""
    plan = (_SumPlan if transposed else _Plan)(x, cfg, sms)

    def body(a, b, sizes, o, **scratch):
        overlap_launches()
        refs = dict(a=a, b=b, sizes=sizes, o=o) | scratch
        (_SumBlock if transposed else _Block)(plan, refs).run()

    shape = (x.groups, x.k, x.n) if transposed else (x.m, x.n)
    out_type = plgpu.ShapeDtypeStruct(shape, x.out_dtype)
    how = {"interpret": interpret, "kernel_name": plan.name}
    return warp_specialized(body, plan, out_type, **how, **open_shapes(x, transposed))


def choose(n):
    """The configuration for so many columns. Not measured."""
    tile_n = 256 if n > 128 else 128 if n > 64 else 64
    return TensorMemoryConfig(tile_n, pair=False, dynamic=False)


def check(name, config):
    """ValueError for a configuration that grouped products do not have."""
    c = config
    if (
        c.tile_n not in (64, 128, 256)
        or c.pair
        or c.dynamic
        or c.stages < 0
        or min(c.buffers, c.group) < 1
        or c.step not in (128, 256)
    ):
        raise ValueError(
            f"{name}: a TensorMemoryConfig has a tile_n of 64, 128 or 256, pair=False,"
            " dynamic=False, stages from 0, buffers and a group from 1 and a step of 128 or 256"
            f" bytes; got {config}"
        )
