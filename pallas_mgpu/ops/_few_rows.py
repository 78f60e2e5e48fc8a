"""Product of up to 16 rows with a matrix: what `matmul` does where memory is the limit and the
tensor cores would idle.

A block is one warpgroup, and several blocks share an SM, each with a ring of its own. B streams
through shared memory once. Lanes hold 8 neighbours of B and add up products in float32, the dtype
that the operands may have, too; at the end
the sums of the lanes are added, then those of the blocks of a cluster, which divide K, in their
order."""

import itertools
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import applied, overlap_launches

_MOST = {False: 16, True: 8}  # rows, by whether B is transposed
_SUMS = 64  # of a warp with B transposed, at most: lanes have no registers for more


class FewRowsConfig(NamedTuple):
    """The configuration of a product of up to 16 rows (with ``transpose_b`` 8, with ``transpose_a``
    one), which is bound by memory and uses no tensor cores.

    ``tile_n``: columns of a block: 64, 128 or 256, with ``transpose_b`` a multiple of 4. ``split``:
    blocks of a cluster that divide K. ``stages``: slots of the ring. ``step``: elements of K per
    slot, with ``transpose_b`` 256.
    """

    tile_n: int = 128
    split: int = 8
    stages: int = 4
    step: int = 64


class _Plan:
    """What follows from the product and the configuration."""

    def __init__(self, x, cfg):
        self.width, self.split, self.step = cfg.tile_n, cfg.split, cfg.step
        self.steps = pl.cdiv(pl.cdiv(x.k, cfg.step), cfg.split)
        self.stages = min(cfg.stages, self.steps)
        # what the lanes multiply at once, 8 elements each; with B transposed a warp has a row
        self.part = (4, self.step) if x.tb else (1024 // self.width, self.width)
        if self.part[0] == 4:
            tiles = plgpu.Tiling((self.part, (8,)))
            self.layout = plgpu.Layout.TILED(tiles, (-3,), (-2,), -1)
        else:
            tiles = plgpu.Tiling((self.part, (self.part[0] // 4, self.part[1]), (8,)))
            self.layout = plgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)
        self.b_tile = (self.width, self.step) if x.tb else (self.step, self.width)
        self.parts = self.b_tile[0] // self.part[0]  # of a slot
        self.groups = self.parts if x.tb else 1  # sums that a lane keeps for each row of A
        self.by_tma = x.m == 1 or x.n * x.out_dtype.itemsize % 16 == 0  # the result

    def scratch(self, x):
        found = {
            "a_smem": plgpu.SMEM((self.stages, x.m, self.step), x.dtypes[0]),
            "b_smem": plgpu.SMEM((self.stages, *self.b_tile), x.dtypes[1]),
            "o_smem": plgpu.SMEM((x.m, self.width), x.out_dtype),
        }
        if x.bias_dtype is not None:
            found["bias_smem"] = plgpu.SMEM((self.width,), x.bias_dtype)
        found["inbox"] = plgpu.SMEM((self.split, x.m, self.width), jnp.float32)
        found["full"] = plgpu.Barrier(num_arrivals=2, num_barriers=self.stages)
        if x.bias_dtype is not None:
            found["bias_full"] = plgpu.Barrier()
        if self.split > 1:
            found["arrived"] = plgpu.ClusterBarrier(collective_axes=("ck",))
        return found


class _Block:
    """One block of the kernel, while it is traced."""

    def __init__(self, x, plan, refs):
        self.x, self.plan = x, plan
        vars(self).update(refs)
        self.rank = lax.axis_index("ck") if plan.split > 1 else 0
        self.col = lax.axis_index("tile") * plan.width

    def run(self):
        x, p = self.x, self.plan
        along_n = pl.ds(self.col, p.width)
        if x.bias_dtype is not None:
            plgpu.copy_gmem_to_smem(self.bias.at[along_n], self.bias_smem, self.bias_full)
        lax.fori_loop(0, p.stages, lambda s, _: self.fetch(s), None)
        self.send(self.main_loop())
        if p.split > 1:
            plgpu.barrier_arrive(self.arrived)
            plgpu.barrier_wait(self.arrived)
        if x.bias_dtype is not None:
            plgpu.barrier_wait(self.bias_full)
        pl.when(self.rank == 0)(self.epilogue)

    def fetch(self, s):
        """Step s of this block's part of K."""
        p = self.plan
        along_k = pl.ds((self.rank * p.steps + s) * p.step, p.step)
        slot = s % p.stages
        plgpu.copy_gmem_to_smem(self.tile_of_b(s), self.b_smem.at[slot], self.full.at[slot])
        plgpu.copy_gmem_to_smem(self.a.at[:, along_k], self.a_smem.at[slot], self.full.at[slot])

    def prefetch(self):
        """Asks for the first part of B while the kernels before this one end. It goes to the L2
        cache, where their stores reach it. More would delay blocks that begin later."""
        plgpu.async_prefetch(self.tile_of_b(0))

    def tile_of_b(self, s):
        """Of step s of this block's part of K."""
        p = self.plan
        along_k = pl.ds((self.rank * p.steps + s) * p.step, p.step)
        along_n = pl.ds(self.col, p.width)
        return self.b.at[(along_n, along_k) if self.x.tb else (along_k, along_n)]

    def main_loop(self):
        """Sums of every lane: for each row of A a part, with B transposed several."""
        p = self.plan

        def one(s, acc):
            slot = s % p.stages
            plgpu.barrier_wait(self.full.at[slot])
            acc = self.add_products(slot, acc)
            pl.when(s + p.stages < p.steps)(lambda: self.fetch(s + p.stages))
            return acc

        zeros = plgpu.layout_cast(jnp.zeros(p.part, jnp.float32), p.layout)
        return lax.fori_loop(0, p.steps, one, (zeros,) * (self.x.m * p.groups))

    def add_products(self, slot, acc):
        x, p, acc = self.x, self.plan, list(acc)

        def row_of_a(i, axis, *at):
            """Row i of A as a factor of a part of B."""
            ref = self.a_smem.at[(slot, i, *at)]
            row = plgpu.load(ref, layout=p.layout.reduce(1 - axis)).astype(jnp.float32)
            return lax.broadcast_in_dim(row, p.part, [axis])

        if x.tb:
            rows = [row_of_a(i, 1) for i in range(x.m)]
        for k in range(p.parts):
            at = pl.ds(k * p.part[0], p.part[0])
            b = plgpu.load(self.b_smem.at[slot, at], layout=p.layout).astype(jnp.float32)
            for i in range(x.m):
                if x.tb:
                    acc[i * p.groups + k] += b * rows[i]
                else:
                    acc[i] += b * row_of_a(i, 0, at)
        return tuple(acc)

    def send(self, acc):
        """To the first block of the cluster."""
        x, p = self.x, self.plan
        inbox = plgpu.cluster_ref(self.inbox, {"ck": 0}) if p.split > 1 else self.inbox
        for i in range(x.m):
            if x.tb:
                for k in range(p.groups):
                    inbox[self.rank, i, pl.ds(k * 4, 4)] = acc[i * p.groups + k].sum(1)
            else:
                inbox[self.rank, i] = acc[i].sum(0)

    def epilogue(self):
        x, p = self.x, self.plan
        value = self.inbox[0]
        for j in range(1, p.split):
            value = value + self.inbox[j]
        if x.bias_dtype is not None:
            bias = self.bias_smem[...].astype(jnp.float32)
            value = value + lax.broadcast_in_dim(bias, value.shape, [1])
        if x.activation is not None:
            value = applied(x.activation, value)
        self.o_smem[...] = value.astype(x.out_dtype)
        plgpu.commit_smem()
        where = self.o.at[:, pl.ds(self.col, p.width)]
        plgpu.copy_smem_to_gmem(self.o_smem, where, engine=None if p.by_tma else "plain")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@cached
def kernel(x, cfg, interpret):
    """x: a Product of matmul.py, of few rows."""
    p = _Plan(x, cfg)

    def body(a, b, *refs, **scratch):
        if x.ta:
            a = a.reshape((1, x.k))  # m is 1
        block = _Block(x, p, x.named(a, b, *refs) | scratch)
        overlap_launches(block.prefetch)
        block.run()

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype),
        scratch_types=p.scratch(x),
        grid=(pl.cdiv(x.n, p.width),),
        grid_names=("tile",),
        cluster=(p.split,) if p.split > 1 else (),
        cluster_names=("ck",) if p.split > 1 else (),
        interpret=interpret,
        kernel_name="matmul_few_rows",
    )


def candidates(m, k, transpose_b):
    """Configurations for few rows."""
    widths, step = ((8, 16, 32), 256) if transpose_b else ((64, 128, 256), 64)
    if transpose_b:
        widths = [w for w in widths if w * m <= _SUMS]
    splits = [s for s in (1, 2, 4, 8) if s <= pl.cdiv(k, step)]
    return [
        FewRowsConfig(width, split, stages, step)
        for width, split, stages in itertools.product(widths, splits, (4, 8))
    ]


def choose(n, k, transpose_b, sms):
    """As wide as leaves about two blocks for every SM, with B transposed three of 16 columns or
    four of 8, or one of 32 whose rows are long. K undivided if there are enough so."""
    if transpose_b and k > 8192 and n >= 32 * sms:
        width, enough, step, stages, split = 32, 0.9 * sms, 256, 8, 1
    elif transpose_b:
        width, enough, step = (16, 2.5 * sms, 256) if n >= 40 * sms else (8, 4 * sms, 256)
        stages, split = width // 2, 1
    else:
        enough, step, stages = 1.75 * sms, 64, 4
        fitting = (w for w in (128, 64) if pl.cdiv(n, w) * 8 >= enough)
        width, split = next(fitting, 64), 1
    while split < 8 and pl.cdiv(n, width) * split < enough and 2 * split * step <= k:
        split *= 2
    return FewRowsConfig(width, split, stages, step)


def suit_float32(m, transpose_a, transpose_b):
    """Are so many rows of float32 multiplied here? Parts in 16 bits, for the tensor cores, would
    take several times the memory's time."""
    return m == 1 or m <= _MOST[transpose_b] and not transpose_a


def choose_float32(m, n, k, transpose_b, sms):
    """The same for so many rows of float32, of slots with as many bytes."""
    config = choose(n, k, transpose_b, sms)
    if not transpose_b:
        return config._replace(step=config.step // 2)
    width = min(config.tile_n, _SUMS // m // 4 * 4)
    return config._replace(tile_n=width, stages=max(config.stages // 2, 2))


def check_config(config, m, ta, tb):
    most = _MOST[tb]
    if m > most or (ta and m > 1):
        raise ValueError(
            f"matmul: a FewRowsConfig is for up to {most} rows, with transpose_a for 1;"
            f" got {m}{', transposed' if ta else ''}"
        )
    tile, step = config.tile_n, config.step
    fits = tile % 4 == 0 and step == 256 if tb else tile in (64, 128, 256) and step % 16 == 0
    if not fits or min(tile, step, config.stages) < 1 or config.split not in range(1, 9):
        raise ValueError(
            "matmul: tile_n of a FewRowsConfig must be 64, 128 or 256 and step a multiple of"
            " 16, with transpose_b a multiple of 4 and 256, stages at least 1 and split 1 to"
            f" 8; got {config}"
        )
