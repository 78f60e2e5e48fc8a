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

Operands may be transposed, 8-bit floats too."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import Ring, StaticTiles, WarpSpecialized, overlap_launches, store, warp_specialized
from ._scaled import UNSCALED, Scales

_BLACKWELL = _core.target("sm_100a")
SMEM_BYTES = _BLACKWELL["smem"] - 1024
_ROWS = 128  # of a block
_ACCUMULATORS = 2


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

    consumers = 2  # threads besides the producer
    registers = None

    def __init__(self, x, cfg, sms):
        """x: a Product."""
        self.x, self.cfg = x, cfg
        self.blocks = 1 + cfg.pair
        self.rows, self.cols = _ROWS * self.blocks, cfg.tile_n
        self.b_cols = self.cols // self.blocks  # of B in a block
        in_bytes, out_bytes = x.dtypes[0].itemsize, x.out_dtype.itemsize
        self.step = cfg.step // in_bytes
        self.tiles_m, self.tiles_n = pl.cdiv(x.m, self.rows), pl.cdiv(x.n, self.cols)
        self.total = self.tiles_m * self.tiles_n
        fit = max(sms // self.blocks, 1)
        self.dynamic = cfg.dynamic and self.total > fit
        self.clusters = self.total if self.dynamic else min(self.total, fit)
        self.steps = pl.cdiv(x.k, self.step)
        self.group = min(cfg.group, self.tiles_m)
        self.chunk = 128 // out_bytes  # columns of a store buffer
        self.chunks = self.cols // self.chunk
        self.buffers = min(cfg.buffers, self.chunks)
        used = self.buffers * _ROWS * self.chunk * out_bytes
        used += self.cols * 4 * ((x.bias_dtype is not None) + (x.forms.b == "each"))
        slot = (_ROWS + self.b_cols) * cfg.step
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
        found = {
            "a_smem": plgpu.SMEM((self.stages, *a_tile), x.dtypes[0]),
            "b_smem": plgpu.SMEM((self.stages, *b_tile), x.dtypes[1]),
            "o_smem": plgpu.SMEM((self.buffers, _ROWS, self.chunk), x.out_dtype),
            "acc": plgpu.TMEM(
                (_ACCUMULATORS, _ROWS, self.cols), jnp.float32, collective=self.cfg.pair
            ),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_barriers=self.stages, orders_tensor_core=True),
            "ready": plgpu.Barrier(num_barriers=_ACCUMULATORS, orders_tensor_core=True),
        }
        each = {"num_barriers": _ACCUMULATORS, "orders_tensor_core": True}
        if self.cfg.pair:
            found["taken"] = plgpu.ClusterBarrier(
                collective_axes=("pair",), leader_tracked=True, **each
            )
        else:
            found["taken"] = plgpu.Barrier(**each)
        vectors = 0
        if x.bias_dtype is not None:
            vectors += 1
            found["bias_smem"] = plgpu.SMEM((self.cols,), x.bias_dtype)
        if x.forms.b == "each":
            vectors += 1
            found["scale_smem"] = plgpu.SMEM((self.cols,), jnp.float32)
        if vectors:
            found["row_full"] = plgpu.Barrier(num_arrivals=vectors)
        return found


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
        me, start = lax.axis_index("wg"), jnp.int32(0)
        scales = self.scales() if self.x.forms != UNSCALED else None

        def work(t, carry):
            it0, w = carry

            @pl.when(me == 2)
            def _():
                self.fetch_tile(t, it0)

            @pl.when(me == 1)
            def _():
                self.multiply_tile(t, carry)

            @pl.when(me == 0)
            def _():
                self.take_tile(scales, t, w)

            return it0 + self.plan.steps, w + 1

        steps, _ = self.launched(work, (start, start))
        pl.when(me == 2)(lambda: self.ring.drain(steps))
        pl.when(me == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    def launched(self, work, carry):
        """carry = work(tile, carry) for the tile of this cluster, and for those that it takes over.
        Not under vmap, whose elements are launched together."""
        axes = (self.axis,) if self.axis else ()
        try:
            loop = plgpu.dynamic_scheduling_loop(("cluster",), "wg", axes, init_carry=carry)
        except NotImplementedError:
            return work(lax.axis_index("cluster"), carry)
        return loop(lambda info, carry: work(info.index[0], carry))

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

    def fetch_tile(self, t, it0):
        p, x, ring = self.plan, self.x, self.ring
        row, col = self.origin(t)

        def copy(ref, along, along_k, transposed, buffer, barrier):
            axis = 1 if transposed else 0
            index = (along_k, along) if transposed else (along, along_k)
            how = {}
            if self.axis:
                part = plgpu.CopyPartition.PARTITIONED(axis)
                how = {"collective_axes": self.axis, "leader_tracked": part}
            plgpu.copy_gmem_to_smem(ref.at[index], buffer, barrier, **how)

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            along_k = pl.ds(s * p.step, p.step)
            ring.acquire(it)
            full = self.full.at[slot]
            copy(self.a, pl.ds(row, p.rows), along_k, x.ta, self.a_smem.at[slot], full)
            copy(self.b, pl.ds(col, p.cols), along_k, not x.tb, self.b_smem.at[slot], full)

        lax.fori_loop(0, p.steps, fetch, None)
        return it0 + p.steps

    # ---- multiplier and epilogue

    def consumer(self, me):
        start = jnp.int32(0)
        pl.when(me == 1)(lambda: self.tiles().consume(self.multiply_tile, (start, start)) and None)
        pl.when(me == 0)(self.take_tiles)

    def multiply_tile(self, t, carry):
        """carry: how many steps and tiles there were."""
        del t
        p, x, ring = self.plan, self.x, self.ring
        it0, w = carry
        which = w % _ACCUMULATORS
        acc = self.acc.at[which]

        @pl.when(w >= _ACCUMULATORS)
        def _():
            taken = self.taken.at[which]
            self.if_first(lambda: plgpu.barrier_wait(taken, phase=w // _ACCUMULATORS - 1))

        def step(s, _):
            it = it0 + s
            slot = ring.slot(it)
            self.if_first(lambda: ring.wait(it))
            a, b = self.a_smem.at[slot], self.b_smem.at[slot]
            plgpu.tcgen05_mma(
                acc,
                a.T if x.ta else a,
                b.T if x.tb else b,
                self.empty.at[slot],
                accumulate=s > 0,
                collective_axis=self.axis,
            )

        lax.fori_loop(0, p.steps, step, None)
        plgpu.tcgen05_commit_arrive(self.ready.at[which], self.axis)
        return it0 + p.steps, w + 1

    def scales(self):
        return Scales(self.x.forms, self.scale_a, self.scale_b, self.x.m, self.plan.rows)

    def take_tiles(self):
        scales = self.scales() if self.x.forms != UNSCALED else None
        self.tiles().consume(lambda t, w: self.take_tile(scales, t, w), jnp.int32(0))

    def take_tile(self, scales, t, w):
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
            loaded = of_rows, scales.load_columns(columns, p.chunk, p.chunks)
        for c in range(p.chunks):
            along = pl.ds(c * p.chunk, p.chunk)
            part = plgpu.async_load_tmem(self.acc.at[which, :, along])
            if c == p.chunks - 1:  # the other tile's products may overwrite it
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(self.taken.at[which])
            self.finish(c, part, scales, loaded, row, col)
        return w + 1

    def fetch_vectors(self, col):
        """Bias and scales of the columns. The buffers are read by all lanes before they meet."""
        along = pl.ds(col, self.plan.cols)
        if self.bias is not None:
            plgpu.copy_gmem_to_smem(self.bias.at[along], self.bias_smem, self.row_full)
        if self.x.forms.b == "each":
            scales = self.scale_b.reshape((self.scale_b.size,)).at[along]
            plgpu.copy_gmem_to_smem(scales, self.scale_smem, self.row_full)

    def finish(self, c, part, scales, loaded, row, col):
        """Scales, bias and activation of part c of the columns; its store."""
        p, x = self.plan, self.x
        if scales is not None:
            part = scales(loaded, c, part)
        if self.bias is not None:
            bias = self.bias_smem[pl.ds(c * p.chunk, p.chunk)].astype(jnp.float32)
            part = part + lax.broadcast_in_dim(bias, part.shape, [1])
        if x.activation is not None:
            part = x.activation(part)
        plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
        where = (pl.ds(row, _ROWS), pl.ds(col + c * p.chunk, p.chunk))
        engine = None if p.by_tma else "plain"
        buffer = self.o_smem.at[c % p.buffers]
        store(buffer, part.astype(x.out_dtype), self.o.at[where], engine=engine)


@cached
def kernel(x, cfg, sms, interpret):
    """x: a Product."""
    plan = _Plan(x, cfg, sms)

    def body(a, b, *refs, **scratch):
        overlap_launches()
        _Block(plan, x.named(a, b, *refs) | scratch).run()

    out_type = plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype)
    return warp_specialized(body, plan, out_type, interpret=interpret, kernel_name="matmul")


def choose(m, n):
    """The configuration for a shape. Not measured: no such GPU was at hand. Large tiles read the
    least, pairs of blocks half of B."""
    tile_n = 256 if n > 128 else 128 if n > 64 else 64
    pair = m > _ROWS and tile_n >= 128
    return TensorMemoryConfig(tile_n, pair)


def check(config, forms):
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
    if forms.blocks:
        raise NotImplementedError(
            "matmul: scales of blocks on Blackwell; use one scale for each row and column"
        )


def runs_here(device):
    """Does the device of an ArrayInfo have tensor memory?"""
    return "TCGEN05" in _core.target(device)["features"]
