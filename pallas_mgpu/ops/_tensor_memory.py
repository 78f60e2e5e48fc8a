"""Matrix product on Blackwell's tensor cores, which accumulate in tensor memory (TMEM).

A block has three threads. The *producer* has TMA fill a ring of slots, each a tile of A and a tile
of B. The *multiplier* issues the products of a tile, one for each slot, into one of two
accumulators in TMEM; the tensor cores release a slot when they have read it. The *epilogue* takes
a finished accumulator to the result, through buffers in shared memory, while the multiplier fills
the other one. Blocks are persistent: each works on several tiles. Usually the launch has a block
(or pair) for each tile, and one that runs takes over the tiles of others that have not begun
(cluster launch control), until there are none; else tiles are dealt out before the launch.

Pairs of blocks compute tiles of twice as many rows: each has its rows of A and of the accumulator
and half of the columns of B, so that shared memory holds B once for both. Copies of both blocks
count on the barrier of the first one, whose multiplier issues for both. The tensor cores release a
slot in both blocks; both epilogues release the accumulator, to the first block.

Operands may be transposed, 8-bit floats too.

Operands with scales of blocks (_block_scaled.py) need columns of tensor memory for the scales.
Where two accumulators of 256 columns then have no room they overlap, the last columns of the first
and the first ones of the second: the epilogue reads what is shared first, and releases it before
the rest. So the next tile waits for the first part of an epilogue only.

With float32 scales of blocks of 128 elements, each step of K is a product of its own, into one of
four accumulators. Two epilogue threads, each with half of the columns, add the products, multiplied
with their scales, to sums in registers."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._types import itemsize_bits

from ._block_scaled import ROWS
from ._common import (
    Ring,
    StaticTiles,
    WarpSpecialized,
    applied,
    overlap_launches,
    store,
    warp_specialized,
)
from ._scaled import BLOCK, UNSCALED, Scales

_BLACKWELL = _core.target("sm_100a")
SMEM_BYTES = _BLACKWELL["smem"] - 1024
_ROWS = 128  # of a block
_PART = 32  # columns that a thread loads at a time, where it sums them
_COLUMNS = _BLACKWELL["tmem"]
_ACCUMULATORS = 2
_STEP_ACCUMULATORS = 4  # where each step is a product of its own


class TensorMemoryConfig(NamedTuple):
    """How a product on Blackwell is tiled.

    ``tile_n``: columns of a tile, a multiple of 64 up to 256; its rows are 128, or 256 with
    ``pair``: two blocks of a cluster work on a tile. ``stages``: slots of the ring; 0: as many as
    fit. ``buffers``: store buffers. ``group``: rows of tiles worked on together, for the L2.
    ``step``: bytes of a row of A along K in a slot, 128 or 256. ``dynamic``: assign tiles to free
    blocks by cluster launch control."""

    tile_n: int = 256
    pair: bool = True
    stages: int = 0
    buffers: int = 2
    group: int = 8
    step: int = 128
    dynamic: bool = True


class _Plan:
    """Numbers that follow from a product and a configuration."""

    registers = None

    def __init__(self, x, cfg, sms):
        """x: a Product."""
        self.x, self.cfg = x, cfg
        self.epilogues = 2 if x.forms.blocks else 1
        self.consumers = self.epilogues + 1  # threads besides the producer
        self.accumulators = _STEP_ACCUMULATORS if x.forms.blocks else _ACCUMULATORS
        self.blocks = 1 + cfg.pair
        self.rows, self.cols = _ROWS * self.blocks, cfg.tile_n
        self.b_cols = self.cols // self.blocks  # of B in a block
        out_bytes = x.out_dtype.itemsize
        self.step = 8 * cfg.step // itemsize_bits(x.dtypes[0])
        self.tiles_m, self.tiles_n = pl.cdiv(x.m, self.rows), pl.cdiv(x.n, self.cols)
        self.total = self.tiles_m * self.tiles_n
        fit = max(sms // self.blocks, 1)
        self.dynamic = cfg.dynamic and self.total > fit
        self.clusters = self.total if self.dynamic else min(self.total, fit)
        self.steps = pl.cdiv(x.k, self.step)
        self.group = min(cfg.group, self.tiles_m)
        self.chunk = 128 // out_bytes  # columns of a store buffer
        self.width = self.cols // self.epilogues  # columns of an epilogue thread
        self.chunk = min(self.chunk, self.width)
        self.chunks = self.width // self.chunk
        # a divisor: the next tile begins with the first buffer again
        self.buffers = max(n for n in range(1, cfg.buffers + 1) if self.chunks % n == 0)
        used = self.epilogues * self.buffers * _ROWS * self.chunk * out_bytes
        used += self.cols * 4 * ((x.bias_dtype is not None) + (x.forms.b == "each"))
        slot = (_ROWS + self.b_cols) * cfg.step
        spare = _COLUMNS - self.accumulators * self.cols  # columns of tensor memory for scales
        if x.scaling:
            slot += sum(x.scaling.bytes(n, self.step) for n in (_ROWS, self.cols))
            spare -= sum(x.scaling.columns(n, self.step) for n in (_ROWS, self.cols))
        self.shared = max(-spare, 0)  # columns of both accumulators
        most = min((SMEM_BYTES - used) // slot, 12)
        self.stages = min(cfg.stages or most, most)
        if self.stages < 2:
            raise ValueError(f"matmul: {self.stages} slots fit, {cfg} needs 2 of them")
        self.axes = {"pair": 2} if cfg.pair else {}
        self.by_tma = x.m == 1 or x.n * out_bytes % 16 == 0  # the result

    def scratch(self):
        x = self.x
        a_tile = (self.step, _ROWS) if x.ta else (_ROWS, self.step)
        b_tile = (self.b_cols, self.step) if x.tb else (self.step, self.b_cols)
        each = (self.epilogues,) if self.epilogues > 1 else ()
        found = {
            "a_smem": plgpu.SMEM((self.stages, *a_tile), x.dtypes[0]),
            "b_smem": plgpu.SMEM((self.stages, *b_tile), x.dtypes[1]),
            "o_smem": plgpu.SMEM((*each, self.buffers, _ROWS, self.chunk), x.out_dtype),
            "acc": plgpu.TMEM(self.accumulator_shape(), jnp.float32, collective=self.cfg.pair),
            "full": plgpu.Barrier(num_arrivals=4 if x.scaling else 2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_barriers=self.stages, orders_tensor_core=True),
            "ready": plgpu.Barrier(num_barriers=self.accumulators, orders_tensor_core=True),
        }
        taken = {"num_barriers": self.accumulators, "num_arrivals": self.epilogues}
        taken["orders_tensor_core"] = True
        if self.cfg.pair:
            found["taken"] = plgpu.ClusterBarrier(
                collective_axes=("pair",), leader_tracked=True, **taken
            )
        else:
            found["taken"] = plgpu.Barrier(**taken)
        if x.scaling:
            for name, rows in (("of_a", _ROWS), ("of_b", self.cols)):
                found |= x.scaling.refs(name, self.stages, rows, self.step, self.cfg.pair)
        vectors = 0
        if x.bias_dtype is not None:
            vectors += 1
            found["bias_smem"] = plgpu.SMEM((*each, self.width), x.bias_dtype)
        if x.forms.b == "each":
            vectors += 1
            found["scale_smem"] = plgpu.SMEM((self.cols,), jnp.float32)
        if vectors:
            found["row_full"] = plgpu.Barrier(num_arrivals=vectors, num_barriers=self.epilogues)
        return found

    def accumulator_shape(self):
        if self.shared:
            return _ROWS, 2 * self.cols - self.shared
        return self.accumulators, _ROWS, self.cols


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x = plan.x
        self.ring = Ring(plan.stages, self.full, self.empty)
        self.rank = lax.axis_index("pair") if plan.axes else 0
        self.axis = "pair" if plan.axes else None

    def run(self):
        if self.plan.dynamic:
            self.run_launched()
        else:
            super().run()

    def run_launched(self):
        """All threads go through the tiles together, as all of them ask for the next one."""
        me, start, last = lax.axis_index("wg"), jnp.int32(0), self.plan.consumers
        scales = self.scales()

        def work(t, carry):
            it0, w = carry

            @pl.when(me == last)
            def _():
                self.fetch_tile(t, it0)

            @pl.when(me == last - 1)
            def _():
                self.multiply_tile(t, carry)

            @pl.when(self.is_epilogue(me))
            def _():
                self.take_tile(me, scales, t, w)

            return it0 + self.plan.steps, w + 1

        steps, _ = self.launched(work, (start, start))
        pl.when(me == last)(lambda: self.ring.drain(steps))
        pl.when(self.is_epilogue(me))(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    def is_epilogue(self, me):
        return me == 0 if self.plan.epilogues == 1 else me < self.plan.epilogues

    def launched(self, work, carry):
        """carry = work(tile, carry) for the tile of this cluster, and for those that it takes over.
        Not under vmap, whose elements are launched together."""
        axes = (self.axis,) if self.axis else ()
        try:
            loop = plgpu.dynamic_scheduling_loop(("cluster",), "wg", axes, init_carry=carry)
        except NotImplementedError:
            return work(lax.axis_index("cluster"), carry)
        return loop(lambda info, carry: work(info.index[0], carry))

    def accumulator(self, which):
        p = self.plan
        if p.shared:
            return self.acc.at[:, pl.ds(which * (p.cols - p.shared), p.cols)]
        return self.acc.at[which]

    def tiles(self):
        return StaticTiles(self.plan.total, self.plan.clusters, lax.axis_index("cluster"))

    def origin(self, t):
        """First row and column of tile t."""
        p = self.plan
        if p.tiles_m == 1:
            return 0, t * p.cols
        band, inside = t // (p.group * p.tiles_n), t % (p.group * p.tiles_n)
        height = p.group
        if p.tiles_m % p.group:
            height = jnp.minimum(p.tiles_m - band * p.group, p.group)
        return (band * p.group + inside % height) * p.rows, inside // height * p.cols

    def if_first(self, f):
        """What the first block of a pair does for both."""
        f() if self.axis is None else pl.when(self.rank == 0)(f)

    # ---- producer

    def producer(self):
        self.ring.drain(self.tiles().produce(self.fetch_tile, jnp.int32(0)))

    def partitioned(self, axis):
        """Options of copies: each block of a pair fetches its part along an axis."""
        if not self.axis:
            return {}
        part = plgpu.CopyPartition.PARTITIONED(axis)
        return {"collective_axes": self.axis, "leader_tracked": part}

    def fetch_tile(self, t, it0):
        p, x, ring = self.plan, self.x, self.ring
        row, col = self.origin(t)

        def copy(ref, along, along_k, transposed, buffer, barrier):
            axis = 1 if transposed else 0
            index = (along_k, along) if transposed else (along, along_k)
            plgpu.copy_gmem_to_smem(ref.at[index], buffer, barrier, **self.partitioned(axis))

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            along_k = pl.ds(s * p.step, p.step)
            ring.acquire(it)
            full = self.full.at[slot]
            copy(self.a, pl.ds(row, p.rows), along_k, x.ta, self.a_smem.at[slot], full)
            copy(self.b, pl.ds(col, p.cols), along_k, not x.tb, self.b_smem.at[slot], full)
            if x.scaling:
                self.fetch_scales(row, col, s, slot)

        lax.fori_loop(0, p.steps, fetch, None)
        return it0 + p.steps

    def fetch_scales(self, row, col, s, slot):
        """A block of a pair has its own scales of A, and all of B's."""
        part, rows = plgpu.CopyPartition, self.plan.rows
        for ref, at, n, buffer, how in (
            (self.scale_a, row, rows, self.of_a_smem, part.PARTITIONED(0)),
            (self.scale_b, col, self.plan.cols, self.of_b_smem, part.REPLICATED),
        ):
            tiles, along_k, *_ = self.x.scaling.memory(n, self.plan.step)
            place = pl.ds(at // ROWS, tiles), pl.ds(s * along_k, along_k)
            how = {"collective_axes": self.axis, "leader_tracked": how} if self.axis else {}
            plgpu.copy_gmem_to_smem(ref.at[place], buffer.at[slot], self.full.at[slot], **how)

    # ---- multiplier and epilogue

    def consumer(self, me):
        start, multiplier = jnp.int32(0), self.plan.consumers - 1
        pl.when(me == multiplier)(
            lambda: self.tiles().consume(self.multiply_tile, (start, start)) and None
        )
        pl.when(self.is_epilogue(me))(lambda: self.take_tiles(me))

    def multiply_tile(self, t, carry):
        """carry: how many steps and tiles there were."""
        del t
        p, x, ring = self.plan, self.x, self.ring
        it0, w = carry
        which = w % _ACCUMULATORS
        acc = self.accumulator(which)
        # what is shared with the tile before, else the accumulator two tiles ago
        ago = 1 if p.shared else _ACCUMULATORS

        @pl.when(w >= ago)
        def _():
            if p.shared:
                taken, phase = self.taken.at[1 - which], (w - 1) // _ACCUMULATORS
            else:
                taken, phase = self.taken.at[which], w // _ACCUMULATORS - 1
            self.if_first(lambda: plgpu.barrier_wait(taken, phase=phase))

        def step(s, _):
            it = it0 + s
            slot = ring.slot(it)
            self.if_first(lambda: ring.wait(it))
            a, b = self.a_smem.at[slot], self.b_smem.at[slot]
            scales = {}
            if x.scaling:
                scales = {"a_scale": self.of_a_tmem, "b_scale": self.of_b_tmem}
                for smem, tmem in zip((self.of_a_smem, self.of_b_smem), scales.values()):
                    plgpu.async_copy_scales_to_tmem(smem.at[slot], tmem, self.axis)
            plgpu.tcgen05_mma(
                acc,
                a.T if x.ta else a,
                b.T if x.tb else b,
                self.empty.at[slot],
                accumulate=s > 0,
                collective_axis=self.axis,
                **scales,
            )

        lax.fori_loop(0, p.steps, step, None)
        plgpu.tcgen05_commit_arrive(self.ready.at[which], self.axis)
        return it0 + p.steps, w + 1

    def scales(self):
        if self.x.forms == UNSCALED:
            return None
        return Scales(self.x.forms, self.scale_a, self.scale_b, self.x.m, self.plan.rows)

    def take_tiles(self, me):
        scales = self.scales()
        self.tiles().consume(lambda t, w: self.take_tile(me, scales, t, w), jnp.int32(0))

    def take_tile(self, me, scales, t, w):
        del me  # the only one
        p, x = self.plan, self.x
        row, col = self.origin(t)
        row = row + self.rank * _ROWS
        which = w % _ACCUMULATORS
        self.fetch_vectors(col)
        loaded = None
        if scales is not None:
            of_rows = scales.load_rows(pl.ds(row, _ROWS))
        plgpu.barrier_wait(self.ready.at[which], phase=w // _ACCUMULATORS)
        if self.bias is not None or x.forms.b == "each":
            plgpu.barrier_wait(self.row_full, phase=w)
        if scales is not None:
            columns = self.scale_smem if x.forms.b == "each" else None
            loaded = of_rows, scales.load_columns(columns, p.chunk * p.chunks, p.chunk)
        last = (pl.cdiv(p.shared, p.chunk) if p.shared else p.chunks) - 1
        for c in range(p.chunks):
            # what is shared first: the end of one accumulator, the start of the other
            at = lax.select(which == 0, p.chunks - 1 - c, c) if p.shared else c
            along = pl.ds(at * p.chunk, p.chunk)
            part = plgpu.async_load_tmem(self.accumulator(which).at[:, along])
            if c == last:  # the other tile's products may overwrite it
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(self.taken.at[which])
            self.finish(c, at, part, scales, loaded, row, col)
        return w + 1

    def fetch_vectors(self, col):
        """Bias and scales of the columns. The buffers are read by all lanes before they meet."""
        along = pl.ds(col, self.plan.cols)
        if self.bias is not None:
            plgpu.copy_gmem_to_smem(self.bias.at[along], self.bias_smem, self.row_full)
        if self.x.forms.b == "each":
            scales = self.scale_b.reshape((self.scale_b.size,)).at[along]
            plgpu.copy_gmem_to_smem(scales, self.scale_smem, self.row_full)

    def finish(self, c, at, part, scales, loaded, row, col):
        """Scales, bias and activation of part `at` of the columns; its store, the c-th."""
        p, x = self.plan, self.x
        if scales is not None:
            part = scales(loaded, at, part)
        if self.bias is not None:
            bias = self.bias_smem[pl.ds(at * p.chunk, p.chunk)].astype(jnp.float32)
            part = part + lax.broadcast_in_dim(bias, part.shape, [1])
        if x.activation is not None:
            part = applied(x.activation, part)
        plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
        where = (pl.ds(row, _ROWS), pl.ds(col + at * p.chunk, p.chunk))
        engine = None if p.by_tma else "plain"
        buffer = self.o_smem.at[c % p.buffers]
        store(buffer, part.astype(x.out_dtype), self.o.at[where], engine=engine)


@cached
def kernel(x, cfg, sms, interpret):
    """x: a Product."""
    plan = _Plan(x, cfg, sms)

    def body(a, b, *refs, **scratch):
        overlap_launches()
        make = _StepBlock if x.forms.blocks else _Block
        make(plan, x.named(a, b, *refs) | scratch).run()

    out_type = plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype)
    return warp_specialized(body, plan, out_type, interpret=interpret, kernel_name="matmul")


class _StepBlock(_Block):
    """A block where each step is a product of its own, with float32 scales of blocks."""

    def multiply_tile(self, t, carry):
        del t
        ring, count, (it0, w) = self.ring, self.plan.accumulators, carry

        def step(s, _):
            it = it0 + s
            slot, which = ring.slot(it), it % count

            @pl.when(it >= count)
            def _():
                taken = self.taken.at[which]
                self.if_first(lambda: plgpu.barrier_wait(taken, phase=it // count - 1))

            self.if_first(lambda: ring.wait(it))
            a, b = self.a_smem.at[slot], self.b_smem.at[slot]
            plgpu.tcgen05_mma(
                self.acc.at[which],
                a.T if self.x.ta else a,
                b.T if self.x.tb else b,
                self.empty.at[slot],
                accumulate=False,
                collective_axis=self.axis,
            )
            plgpu.tcgen05_commit_arrive(self.ready.at[which], self.axis)

        lax.fori_loop(0, self.plan.steps, step, None)
        return it0 + self.plan.steps, w + 1

    def scales(self):
        return None

    def take_tile(self, me, scales, t, w):
        p, x = self.plan, self.x
        row, col = self.origin(t)
        row, mine = row + self.rank * _ROWS, pl.multiple_of(me * p.width, p.width)
        native = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a row a lane, so its scale is one number
        inside = jnp.minimum(col // BLOCK, self.scale_b.shape[0] - 1)
        if self.bias is not None:
            along = pl.ds(col + mine, p.width)
            plgpu.copy_gmem_to_smem(
                self.bias.at[along], self.bias_smem.at[me], self.row_full.at[me]
            )

        def step(s, sums):
            it = w * p.steps + s
            which, phase = it % p.accumulators, it // p.accumulators
            scale = self.row_scales(row, s) * self.scale_b[inside, s]
            scale = plgpu.layout_cast(scale, native.reduce(1))
            plgpu.barrier_wait(self.ready.at[which], phase=phase)
            loaded = [
                plgpu.async_load_tmem(self.acc.at[which, :, pl.ds(mine + c, _PART)], layout=native)
                for c in range(0, p.width, _PART)
            ]
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(self.taken.at[which])
            by = lax.broadcast_in_dim(scale, (_ROWS, _PART), [0])
            return [total + value * by for total, value in zip(sums, loaded)]

        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, _PART), jnp.float32), native)
        sums = lax.fori_loop(0, p.steps, step, [zeros] * (p.width // _PART))
        if self.bias is not None:
            plgpu.barrier_wait(self.row_full.at[me], phase=w)
        for c in range(0, p.width, p.chunk):
            buffer = self.o_smem.at[me, c // p.chunk % p.buffers]
            plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
            for at in range(c, c + p.chunk, _PART):
                part = sums[at // _PART]
                if self.bias is not None:
                    bias = self.bias_smem[me, pl.ds(at, _PART)].astype(jnp.float32)
                    part = part + lax.broadcast_in_dim(bias, part.shape, [1])
                if x.activation is not None:
                    part = applied(x.activation, part)
                buffer[:, pl.ds(at - c, _PART)] = part.astype(x.out_dtype)
            plgpu.commit_smem()
            where = (pl.ds(row, _ROWS), pl.ds(col + mine + c, p.chunk))
            engine = None if p.by_tma else "plain"
            plgpu.copy_smem_to_gmem(buffer, self.o.at[where], engine=engine)
        return w + 1

    def row_scales(self, row, s):
        """Of block s along K."""
        rows = pl.ds(row, _ROWS)
        if self.x.m % self.plan.rows == 0:
            return self.scale_a[rows, s]
        keep = jnp.arange(_ROWS) < self.x.m - row
        return pl.load(self.scale_a, (rows, s), mask=keep, other=0.0)


def choose(m, n, scaling=None, by_step=False):
    """The configuration for a shape. Not measured: no such GPU was at hand. Large tiles read the
    least, pairs of blocks half of B."""
    tile_n = 256 if n > 128 and not by_step else 128 if n > 64 or scaling else 64
    pair = m > _ROWS and tile_n >= (256 if scaling else 128)
    return TensorMemoryConfig(tile_n, pair)


def check(config, x):
    """ValueError, NotImplementedError for what there is no kernel for."""
    c = config
    narrowest = 128 if c.pair else 64
    if (
        c.tile_n not in (64, 128, 192, 256)
        or c.tile_n < narrowest
        or c.pair
        and c.tile_n == 192
        or c.stages < 0
        or min(c.buffers, c.group) < 1
        or c.step not in (128, 256)
    ):
        raise ValueError(
            "matmul: a TensorMemoryConfig has a tile_n of 64, 128, 192 or 256 (with pair 128 or"
            " 256), stages from 0, buffers and a group from 1 and a step of 128 or 256 bytes;"
            f" got {config}"
        )
    if x.scaling and (c.tile_n % ROWS or c.pair and c.tile_n != 256):
        raise ValueError(
            "matmul: with scales of blocks of 16 or 32 tile_n is 128 or 256, with pair 256; got"
            f" {config}"
        )
    if x.forms.blocks and (c.tile_n > BLOCK or BLOCK % c.tile_n or c.step != BLOCK):
        raise ValueError(
            f"matmul: with float32 scales of blocks tile_n is 64 or 128 and step {BLOCK}, got"
            f" {config}"
        )


def runs_here(device):
    """Does the device of an ArrayInfo have tensor memory?"""
    return "TCGEN05" in _core.target(device)["features"]
