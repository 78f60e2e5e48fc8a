"""Product of 16-bit floats with int8, int4 or 8-bit float weights on Blackwell's tensor cores.

As on Hopper (mixed.py) the transposed product is computed, out.T = weights @ x.T, so that the
weights are the left operand, which `tcgen05.mma` also takes from tensor memory. A block has three
threads. The third one only issues: of its warps one, the *producer*, has TMA fill a ring of slots,
each 128 rows of the weights and `tile_m` rows of x; another, the *multiplier*, issues the products.
The *converter* loads the weights of a slot, a row a lane, and stores them as floats to one of two
buffers in tensor memory, and releases the slot. Then the multiplier multiplies them with the x of
the slot; the commit of this product releases the slot, too, and with it the buffer.

The products of a group of K add up in one of two accumulators of their own. The *epilogue* loads
it, and adds it, multiplied with the scales of the group, to float32 sums in registers. A row of the
weights is a lane there, too, so a scale is one number of a lane. The sums leave through buffers in
shared memory, transposed, while the next tile is multiplied. Blocks are persistent."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._types import itemsize_bits

from ._common import IssuedByWarps, Ring, StaticTiles, warp_specialized
from ._groups import in_bands
from ._open_rows import in_shapes
from ._tensor_memory import SMEM_BYTES

_ROWS = 128  # of the weights in a tile
_BUFFERS = 2  # of weights as floats, of accumulators
_REGISTERS = 216, 144  # of a lane: of the epilogue, which has the sums, and of the others
_PART = 32  # weights of a row that a lane converts at a time
_OUT = 16  # rows of x whose results leave at a time


class TensorMemoryMixedConfig(NamedTuple):
    """How a mixed product on Blackwell is tiled. A tile has 128 rows of the weights.

    ``tile_m``: rows of x of a tile: 16, or a multiple of 32 up to 128. ``stages``: slots of the
    ring; 0: as many as fit. ``step``: elements of K per slot, 64 or 128. ``group``: tiles of x
    worked on together, for the L2."""

    tile_m: int = 128
    stages: int = 0
    step: int = 128
    group: int = 8


class _Plan:
    """What follows from a product and a configuration."""

    consumers, registers = 2, None
    axes: dict = {}

    def __init__(self, x, cfg, sms):
        self.x, self.cfg = x, cfg
        self.tiles_m, self.tiles_n = pl.cdiv(x.m, cfg.tile_m), pl.cdiv(x.n, _ROWS)
        self.total = self.tiles_m * self.tiles_n
        self.clusters = min(self.total, sms)
        self.groups = x.scale_groups
        self.group_steps = pl.cdiv(x.k // self.groups, cfg.step)
        self.steps = self.groups * self.group_steps
        self.stores = min(2, cfg.tile_m // _OUT)  # buffers of parts of the result
        used = self.stores * _OUT * _ROWS * x.out_dtype.itemsize
        slot = (_ROWS * itemsize_bits(x.weight_dtype) // 8 + cfg.tile_m * 2) * cfg.step
        most = min((SMEM_BYTES - used) // slot, 12)
        self.stages = min(cfg.stages or most, most)
        self.by_tma = x.m == 1 or x.n * x.out_dtype.itemsize % 16 == 0  # the result

    def scratch(self):
        x, cfg = self.x, self.cfg
        # a lane loads a row: without swizzling, lanes would meet in the same banks
        bytes_ = cfg.step * itemsize_bits(x.weight_dtype) // 8
        tiled = plgpu.TilingTransform((8, cfg.step)), plgpu.SwizzleTransform(bytes_)
        two = {"num_barriers": _BUFFERS, "orders_tensor_core": True}
        return {
            "w_smem": plgpu.SMEM((self.stages, _ROWS, cfg.step), x.weight_dtype, transforms=tiled),
            "x_smem": plgpu.SMEM((self.stages, cfg.tile_m, cfg.step), x.dtype),
            "o_smem": plgpu.SMEM((self.stores, _OUT, _ROWS), x.out_dtype),
            "floats": plgpu.TMEM((_BUFFERS, _ROWS, cfg.step), x.dtype, packed=True),
            "acc": plgpu.TMEM((_BUFFERS, _ROWS, cfg.tile_m), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "empty": plgpu.Barrier(
                num_arrivals=2, num_barriers=self.stages, orders_tensor_core=True
            ),
            "converted": plgpu.Barrier(**two),
            "ready": plgpu.Barrier(**two),
            "taken": plgpu.Barrier(**two),
        }


class _Block(IssuedByWarps):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.cfg = plan.cfg
        self.ring = Ring(plan.stages, self.full, self.empty)

    def run(self):
        me = lax.axis_index("wg")

        @pl.when(me == 0)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self.epilogue()

        @pl.when(me == 1)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self.convert()

        @pl.when(me == 2)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self.issue()

    def tiles(self):
        return StaticTiles(self.plan.total, self.plan.clusters, lax.axis_index("cluster"))

    def origin(self, t):
        """First row of x and of the weights of tile t."""
        i, j = in_bands(t, self.plan.tiles_m, self.plan.tiles_n, self.cfg.group)
        return i * self.cfg.tile_m, j * _ROWS

    # ---- producer

    def producer(self):
        self.ring.drain(self.tiles().produce(self.fetch_tile, jnp.int32(0)))

    def fetch_tile(self, t, it0):
        row, col = self.origin(t)

        def fetch(s, _):
            it = it0 + s
            slot = self.ring.slot(it)
            along_k = pl.ds(s * self.cfg.step, self.cfg.step)
            self.ring.acquire(it)
            full = self.full.at[slot]
            plgpu.copy_gmem_to_smem(
                self.w.at[pl.ds(col, _ROWS), along_k], self.w_smem.at[slot], full
            )
            x = self.x.at[pl.ds(row, self.cfg.tile_m), along_k]
            plgpu.copy_gmem_to_smem(x, self.x_smem.at[slot], full)

        lax.fori_loop(0, self.plan.steps, fetch, None)
        return it0 + self.plan.steps

    # ---- converter

    def convert(self):
        self.tiles().consume(self.convert_tile, jnp.int32(0))

    def convert_tile(self, t, it0):
        del t

        def step(s, _):
            it = it0 + s
            slot, buffer = self.ring.slot(it), it % _BUFFERS
            self.ring.wait(it)

            @pl.when(it >= _BUFFERS)
            def _():
                self.ring.await_release(it - _BUFFERS)

            weights = plgpu.load(
                self.w_smem.at[slot], layout=plgpu.Layout.TCGEN05_TMEM_NATIVE, optimized=False
            )
            for c in range(0, self.cfg.step, _PART):  # few registers at a time
                floats = weights[:, c : c + _PART].astype(self.plan.x.dtype)
                plgpu.async_store_tmem(self.floats.at[buffer, :, pl.ds(c, _PART)], floats)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(self.converted.at[buffer])
            self.ring.release(it)

        lax.fori_loop(0, self.plan.steps, step, None)
        return it0 + self.plan.steps

    # ---- multiplier

    def multiply(self):
        start = jnp.int32(0), jnp.int32(0)
        self.tiles().consume(self.multiply_tile, start)

    def multiply_tile(self, t, carry):
        """carry: how many steps and groups there were."""
        del t

        def group(_, carry):
            it0, number = carry
            which = number % _BUFFERS

            @pl.when(number >= _BUFFERS)
            def _():
                plgpu.barrier_wait(self.taken.at[which], phase=number // _BUFFERS - 1)

            def step(s, _):
                it = it0 + s
                slot, buffer = self.ring.slot(it), it % _BUFFERS
                self.ring.wait(it)
                plgpu.barrier_wait(self.converted.at[buffer], phase=it // _BUFFERS)
                plgpu.tcgen05_mma(
                    self.acc.at[which],
                    self.floats.at[buffer],
                    self.x_smem.at[slot].T,
                    self.empty.at[slot],
                    accumulate=s > 0,
                )

            lax.fori_loop(0, self.plan.group_steps, step, None)
            plgpu.tcgen05_commit_arrive(self.ready.at[which])
            return it0 + self.plan.group_steps, number + 1

        return lax.fori_loop(0, self.plan.groups, group, carry)

    # ---- epilogue

    def epilogue(self):
        self.tiles().consume(self.take_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def take_tile(self, t, number):
        p = self.plan
        row, col = self.origin(t)
        native = plgpu.Layout.TCGEN05_TMEM_NATIVE
        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, _OUT), jnp.float32), native)
        starts = range(0, self.cfg.tile_m, _OUT)

        def group(g, carry):
            number, sums = carry
            which, scales = number % _BUFFERS, self.load_scales(g, col)
            plgpu.barrier_wait(self.ready.at[which], phase=number // _BUFFERS)
            found = []
            for c, total in zip(starts, sums):
                part = self.acc.at[which, :, pl.ds(c, _OUT)]
                part = plgpu.async_load_tmem(part, layout=native)
                if scales is not None:
                    part = part * lax.broadcast_in_dim(scales, part.shape, [0])
                found.append(total + part)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(self.taken.at[which])
            return number + 1, found

        number, sums = lax.fori_loop(0, p.groups, group, (number, [zeros for _ in starts]))
        for c, total in zip(starts, sums):
            plgpu.wait_smem_to_gmem(p.stores - 1, wait_read_only=True)
            buffer = self.o_smem.at[c // _OUT % p.stores]
            buffer.T[...] = total.astype(p.x.out_dtype)
            plgpu.commit_smem()
            where = self.o.at[pl.ds(row + c, _OUT), pl.ds(col, _ROWS)]
            plgpu.copy_smem_to_gmem(buffer, where, engine=None if p.by_tma else "plain")
        return number

    def load_scales(self, group, col):
        """Of the rows of the weights, float32; None without scales."""
        n, rows = self.plan.x.n, pl.ds(col, _ROWS)
        if self.scales is None:
            return None
        how = {"layout": plgpu.Layout.TCGEN05_TMEM_NATIVE.reduce(1)}
        if n % _ROWS:
            how |= {"mask": jnp.arange(_ROWS) < n - col, "other": 0.0}
        found = plgpu.load(self.scales.at[group, rows], **how)
        return found.astype(jnp.float32)


def build(plan, block, interpret):
    """The kernel of a plan. block(plan, refs): what runs."""

    def body(x, w, *refs, **scratch):
        scales, o = refs if len(refs) > 1 else (None, *refs)
        of_plan = block(plan, dict(x=x, w=w, scales=scales, o=o) | scratch)
        of_plan.overlap_launches()
        of_plan.run()

    x = plan.x
    shapes = (x.m, None), *(None,) * (1 if x.scale_dtype is None else 2)
    return warp_specialized(
        body,
        plan,
        plgpu.ShapeDtypeStruct((x.m, x.columns), x.out_dtype),
        interpret=interpret,
        kernel_name="gated_matmul" if x.activation else "mixed_matmul",
        **in_shapes(*shapes),
    )


@cached
def kernel(x, cfg, sms, interpret):
    """x: a Product."""
    return build(_Plan(x, cfg, sms), _Block, interpret)


def choose(m, k, scale_groups=1):
    """The configuration for a shape. Not measured."""
    tile = next((t for t in (16, 32, 64) if m <= t), 128)
    return TensorMemoryMixedConfig(tile, step=128 if k // scale_groups % 128 == 0 else 64)


def check(config, x):
    """ValueError for a configuration that there is no kernel for."""
    c = config
    if (
        c.tile_m not in (16, 32, 64, 96, 128)
        or c.step not in (64, 128)
        or c.stages < 0
        or c.stages == 1
        or c.group < 1
    ):
        raise ValueError(
            "mixed_matmul: a TensorMemoryMixedConfig has a tile_m of 16, 32, 64, 96 or 128, stages"
            f" of 0 or from 2, a step of 64 or 128 and a group from 1; got {config}"
        )
    if x.scale_groups > 1 and x.k // x.scale_groups % c.step:
        raise ValueError(
            f"mixed_matmul: {x.scale_groups} groups of {x.k // x.scale_groups} elements must be a"
            f" multiple of the step each; got {config}"
        )
