"""Matrix product for GPUs whose tensor cores take operands from registers (mma.sync): sm_80, sm_86,
sm_89 and sm_120a.

A block is one warpgroup and computes one tile of the result. It fills a ring of slots in shared
memory, each a tile of A and a tile of B, by copies that run some steps ahead: by cp.async, or by
TMA where the GPU has it. Per step it waits for one slot, starts the copies for the slot that it
read the step before, brings both tiles to registers (ldmatrix, without bank conflicts, since the
tiles are swizzled) and multiplies. The ring leaves room for a second block on the SM, whose
products hide the waits of the first.

The result goes through the shared memory of the ring, so that lanes store 16 bytes of a row.

The tensor cores take 8-bit floats with K contiguous only; others are transposed first (_scaled.py).
Those of two dtypes, and all on GPUs without such products, become float16 in registers, exactly.
Scales of blocks change along K: a step is then one block, whose product starts from zero and is
added to the sums with its scales.

K is summed in the same order whatever the tile: results do not depend on M, N or the config."""

import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import applied, swizzled
from ._scaled import BLOCK, UNSCALED, BlockScales, Scales, added

BLOCKS_PER_SM = 2
_PART = 64  # elements of K that are converted at once
TILES = ((128, 128), (128, 64), (64, 128), (64, 64))


class MmaConfig(NamedTuple):
    """How a product by mma.sync is tiled (sm_80, sm_86, sm_89, sm_120a).

    ``tile_m``: rows of a tile, 64 or 128, with scales of blocks 64; ``tile_n``: columns, 64 or 128;
    ``step``: elements of K per slot, 32 or 64, of 8-bit floats 64 or 128, with scales of blocks
    128; ``stages``: slots of the ring, from 2; 0: as many as leave room for a second block on the
    SM. ``group``: rows of tiles worked on together, for the L2. The defaults spill no registers. Of
    8-bit floats, which sm_80 and sm_86 convert to float16, tiles of 128 x 128 do there, and of 64 x
    128 with a step of 128."""

    tile_m: int = 128
    tile_n: int = 128
    step: int = 32
    stages: int = 0
    group: int = 8


def runs_here(device):
    """Do the tensor cores of the device take operands from registers alone?"""
    return not {"WGMMA", "TCGEN05"} & set(_core.target(device)["features"])


def refuse(op, device, instead):
    """NotImplementedError of an op without a kernel for such GPUs."""
    if runs_here(device):
        name = _core.target(device)["name"]
        raise NotImplementedError(f"{op}: needs wgmma or tcgen05, which {name} lacks; {instead}")


def check_config(op, config, own, device):
    """NotImplementedError of a config whose kernel such GPUs lack; they have one for ``own``."""
    if isinstance(config, tuple) and not isinstance(config, own) and runs_here(device):
        raise NotImplementedError(
            f"{op}: config= has type {type(config).__name__}, for GPUs with wgmma or tcgen05, which"
            f" {_core.target(device)['name']} lacks; use {own.__name__}, or no config"
        )


def room_of_block(target, blocks=BLOCKS_PER_SM):
    """Bytes of shared memory that a block may use if so many share an SM. 1024 bytes of each are
    the system's."""
    return (target["smem"] + 1024) // blocks - 1024


def fetch(more, full, *copies):
    """Starts copies, pairs of a source and an SMEM ref, if there are more. full: their barrier;
    None: by cp.async. Those that do not exist are groups, too, so that waits can count them."""

    def start(*barrier, **how):
        for source, slot in copies:
            plgpu.copy_gmem_to_smem(source, slot, *barrier, **how)

    if full is None:
        start(predicate=more)
    else:
        pl.when(more)(lambda: start(full))


def await_fetch(full, phase, pending):
    """Waits for a phase of the barrier; without one until at most so many copies are in flight."""
    if full is None:
        plgpu.wait_gmem_to_smem(pending)
    else:
        plgpu.barrier_wait(full, phase=phase)


class _Plan:
    def __init__(self, x, cfg, target):
        self.x, self.cfg = x, cfg
        self.by_tma = "CP_ASYNC" not in target["features"]
        self.by_halves = by_halves(x, target)
        self.tiles_m, self.tiles_n = pl.cdiv(x.m, cfg.tile_m), pl.cdiv(x.n, cfg.tile_n)
        self.steps = pl.cdiv(x.k, cfg.step)
        self.group = min(cfg.group, self.tiles_m)
        self.chunk = 128 // x.out_dtype.itemsize  # columns that are stored at once
        plain_odd = x.n * x.out_dtype.itemsize % 16 and x.activation is None and not self.by_tma
        if cfg.tile_m == cfg.tile_n == 128 and not plain_odd:
            self.chunk //= 2  # else registers spill; odd rows take longer so where they do not
        slot = (cfg.tile_m + cfg.tile_n) * cfg.step * x.dtypes[0].itemsize
        most = (room_of_block(target) - 256) // slot
        self.stages = min(cfg.stages or max(2, min(most, 8)), self.steps + 1)
        if self.stages * slot + 256 > target["smem"]:
            raise ValueError(
                f"matmul: {self.stages} slots of {slot} bytes exceed the {target['smem']} bytes of"
                f" shared memory of {target['name']}, got {cfg}"
            )

    def scratch(self):
        x, cfg, stages = self.x, self.cfg, self.stages
        a_tile = (cfg.step, cfg.tile_m) if x.ta else (cfg.tile_m, cfg.step)
        b_tile = (cfg.tile_n, cfg.step) if x.tb else (cfg.step, cfg.tile_n)
        widest = _PART if self.by_halves else 128 // x.dtypes[0].itemsize
        ring = [
            plgpu.SMEM((stages, *tile), t, transforms=swizzled(min(tile[1], widest), t))
            for tile, t in zip((a_tile, b_tile), x.dtypes)
        ]
        o_tile = (cfg.tile_m, self.chunk)
        o_smem = plgpu.SMEM(o_tile, x.out_dtype, transforms=swizzled(self.chunk, x.out_dtype))
        found = {"smem": plgpu.RefUnion(tuple(ring), o_smem)}
        if self.by_tma:
            found["full"] = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
        return found


class _Block:
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        self.plan, self.x, self.cfg = plan, plan.x, plan.cfg
        vars(self).update(refs)
        (self.a_smem, self.b_smem), self.o_smem = self.smem
        self.row, self.col = self.origin(lax.axis_index("tile"))

    def origin(self, t):
        """First row and column of tile t."""
        p, cfg = self.plan, self.cfg
        band, inside = t // (p.group * p.tiles_n), t % (p.group * p.tiles_n)
        height = p.group
        if p.tiles_m % p.group:
            height = jnp.minimum(p.tiles_m - band * p.group, p.group)
        row, col = band * p.group + inside % height, inside // height
        return row * cfg.tile_m, col * cfg.tile_n

    def fetch(self, s, more):
        """Starts the copies of step s, if there are more."""
        x, cfg = self.x, self.cfg
        slot = s % self.plan.stages
        along_m, along_n = pl.ds(self.row, cfg.tile_m), pl.ds(self.col, cfg.tile_n)
        along_k = pl.ds(s * cfg.step, cfg.step)
        a = self.a.at[(along_k, along_m) if x.ta else (along_m, along_k)]
        b = self.b.at[(along_n, along_k) if x.tb else (along_k, along_n)]

        full = self.full.at[slot] if self.plan.by_tma else None
        fetch(more, full, (a, self.a_smem.at[slot]), (b, self.b_smem.at[slot]))

    def wait(self, s):
        """Until the slot of step s is full."""
        stages = self.plan.stages
        full = self.full.at[s % stages] if self.plan.by_tma else None
        await_fetch(full, s // stages, 2 * (stages - 2))

    def multiply(self):
        p, x, cfg = self.plan, self.x, self.cfg
        scales = None
        if x.forms.blocks:
            reach = p.tiles_n * cfg.tile_n, p.steps * cfg.step
            tile = cfg.tile_m, cfg.tile_n
            scales = BlockScales(self.scale_a, self.scale_b, x.m, tile, reach, 1)
        lax.fori_loop(0, p.stages - 1, lambda s, _: self.fetch(s, s < p.steps), None)

        def step(s, acc):
            self.wait(s)
            ahead = s + (p.stages - 1)
            self.fetch(ahead, ahead < p.steps)
            slot = s % p.stages
            a, b = self.a_smem.at[slot], self.b_smem.at[slot]
            a = plgpu.transpose_ref(a, (1, 0)) if x.ta else a
            b = plgpu.transpose_ref(b, (1, 0)) if x.tb else b
            if scales is None:
                return self.product(acc, a, b)
            of_rows, (of_columns,) = scales.load(self.row, self.col, s)
            return added(acc, self.product(jnp.zeros_like(acc), a, b), of_rows, of_columns)

        acc = jnp.zeros((cfg.tile_m, cfg.tile_n), jnp.float32)
        return lax.fori_loop(0, p.steps, step, acc)

    def product(self, acc, a, b):
        """acc + a @ b, of refs in shared memory."""
        if not self.plan.by_halves:
            return plgpu.mma(acc, a[...], b[...])
        for part in range(0, self.cfg.step, _PART):  # twice the registers
            along = pl.ds(part, _PART)
            factors = a[:, along].astype(jnp.float16), b[along, :].astype(jnp.float16)
            acc = plgpu.mma(acc, *factors)
        return acc

    def store(self, acc):
        """The result, a chunk of columns at a time."""
        p, x, cfg = self.plan, self.x, self.cfg
        if not p.by_tma:
            plgpu.wait_gmem_to_smem(0)  # the slots become the buffer
        vector = 16 // x.out_dtype.itemsize
        stored = plgpu.Layout.WG_STRIDED((cfg.tile_m, p.chunk), vec_size=vector)
        rows = pl.ds(self.row, cfg.tile_m)
        scales, of_rows = None, None
        if x.forms != UNSCALED and not x.forms.blocks:
            scales = Scales(x.forms, self.scale_a, self.scale_b, x.m, cfg.tile_m)
            of_rows = scales.load_rows(rows)
        for k in range(cfg.tile_n // p.chunk):
            col = self.col + k * p.chunk
            cols = pl.ds(col, p.chunk)
            value = acc[:, k * p.chunk : (k + 1) * p.chunk]
            if scales is not None:
                of_columns = None
                if x.forms.b == "each":
                    of_columns = self.load_columns(self.scale_b.reshape((x.n,)), cols)
                value = scales((of_rows, [of_columns]), 0, value)
            if self.bias is not None:
                value = value + self.load_columns(self.bias, cols)[None, :]
            if x.activation is not None:
                value = applied(x.activation, value)
            self.o_smem[...] = value.astype(x.out_dtype)
            value = plgpu.load(self.o_smem, layout=stored)
            self.put(rows, cols, value)

    def load_columns(self, of_columns, cols):
        """Numbers of the columns, zeros beyond the last one."""
        by_column = plgpu.Layout.WGMMA.reduce(0)
        number = plgpu.broadcasted_iota(jnp.int32, (cols.size,), 0, layout=by_column)
        inside = number < self.x.n - cols.start
        return pl.load(of_columns, (cols,), mask=inside, other=0).astype(jnp.float32)

    def put(self, rows, cols, value):
        """Stores the value, or adds it to what is there."""
        x, cfg, chunk = self.x, self.cfg, self.plan.chunk
        masks = []
        if x.m % cfg.tile_m:
            masks.append(lax.broadcasted_iota(jnp.int32, value.shape, 0) < x.m - self.row)
        if x.n % cfg.tile_n:
            left = x.n - cols.start
            left = pl.multiple_of(left, math.gcd(x.n, chunk)) if math.gcd(x.n, chunk) > 1 else left
            masks.append(lax.broadcasted_iota(jnp.int32, value.shape, 1) < left)
        mask = None
        if masks:
            mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        if x.accumulate:
            other = None if mask is None else 0
            there = pl.load(self.o, (rows, cols), mask=mask, other=other)
            value = (there.astype(jnp.float32) + value.astype(jnp.float32)).astype(x.out_dtype)
        pl.store(self.o, (rows, cols), value, mask=mask)


def by_halves(x, target):
    """Are the operands converted to float16? plgpu.mma takes 8-bit floats of one dtype, where the
    GPU has such products."""
    native = x.dtypes[0] == x.dtypes[1] and "FP8" in target["features"]
    return x.dtypes[0].itemsize == 1 and not native


def choose(x, sms, target):
    """The configuration for a Product: the largest tile that gives every SM its blocks; the one
    that takes the fewest waves if none does."""

    def time(tile):
        rows, cols = tile
        blocks = pl.cdiv(x.m, rows) * pl.cdiv(x.n, cols)
        waves = pl.cdiv(blocks, sms * BLOCKS_PER_SM) if blocks > sms else 0.5
        # a step takes the products of a tile, and what does not shrink with it
        return waves * (rows * cols + 24 * (rows + cols)), -rows * cols

    tiles, bytes_ = TILES, 128  # of K per slot
    if x.forms.blocks:  # a lane has the sums twice
        tiles = TILES[3:] if by_halves(x, target) else TILES[2:]
    elif by_halves(x, target):
        tiles, bytes_ = TILES[1:], 64
    rows, cols = min(tiles, key=time)
    bytes_ = 64 if rows == cols == 128 else bytes_
    return MmaConfig(rows, cols, bytes_ // x.dtypes[0].itemsize)


def check(config, x):
    """ValueError for configurations that do not fit the Product."""
    c, steps = config, (64 // x.dtypes[0].itemsize, 128 // x.dtypes[0].itemsize)
    sizes = (c.tile_m, c.tile_n) in TILES and c.step in steps
    if not sizes or c.stages < 0 or c.stages == 1 or c.group < 1:
        raise ValueError(
            "matmul: an MmaConfig has a tile_m and a tile_n of 64 or 128, a step of"
            f" {steps[0]} or {steps[1]} for {x.dtypes[0]}, stages from 2 (or 0) and a group from 1;"
            f" got {config}"
        )
    if x.forms.blocks and (c.tile_m != 64 or c.step != BLOCK):
        raise ValueError(
            f"matmul: with scales of blocks tile_m must be 64 and step {BLOCK}, got {config}"
        )


@cached
def kernel(x, config, target, interpret):
    """The kernel for a Product. target: name of the GPU it is planned for."""
    check(config, x)
    plan = _Plan(x, config, _core.target(target))

    def matmul(*refs, **scratch):
        block = _Block(plan, x.named(*refs) | scratch)
        block.store(block.multiply())

    return plgpu.kernel(
        matmul,
        out_type=plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.tiles_m * plan.tiles_n,),
        grid_names=("tile",),
        kernel_name="matmul",
        interpret=interpret,
    )
