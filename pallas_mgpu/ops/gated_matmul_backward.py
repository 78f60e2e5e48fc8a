"""The gradients of the products and of x behind `gated_matmul`, in one kernel.

The gradient of the unit, element by element, moves several times as many bytes as it takes for the
product that follows to read it, while that product leaves memory nearly idle. So a warpgroup of
each block of the product computes the gradient of the unit beside it: *items* of a few rows and a
*chunk* of the unit's columns, in the order in which the product needs them. Each item raises a flag
of its rows and chunk; the producer of a block waits for all items of its rows before it fetches
from a chunk. The product walks along K chunk by chunk, first the gate's columns of one, then the
same of up, so that the first tiles need not wait for all of their rows.

All blocks run at once, since they wait for each other."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import StaticTiles, overlap_launches, warp_specialized
from ._matmul_choice import MatmulConfig
from .gated import SLOPES
from .matmul import Product, _Block, _KernelPlan

_STEP = 64


class GatedBackwardConfig(NamedTuple):
    """How the product is tiled, and the unit beside it. ``registers``: of a lane of a consumer, of
    the producer and of the unit, 512 together; ``height``: rows of an item; ``wide``: most columns
    of a chunk; ``vector``: elements that a lane has of each array at a time."""

    product: MatmulConfig = MatmulConfig()
    registers: tuple[int, int, int] = (208, 32, 64)
    height: int = 32
    wide: int = 256
    vector: int = 8
    rows: int = 1  # vectors of a lane at a time
    merged: bool = False  # the producer computes the unit, too
    every: int = 2


class _Plan(_KernelPlan):
    def __init__(self, x, cfg, sms, activation):
        super().__init__(x, cfg.product, sms)
        self.registers = cfg.registers
        self.n, self.slope, self.item = x.k // 2, SLOPES[activation], cfg
        self.merged = cfg.merged
        self.wide = next(w for w in (256, 128, 64) if w <= cfg.wide and self.n % w == 0)
        self.chunks = self.n // self.wide
        self.of_half = self.wide // _STEP  # steps of a chunk of one half
        self.blocks = self.clusters * self.cluster
        self.band = self.group * self.rows * cfg.product.cluster
        self.bands = pl.cdiv(x.m, self.band)
        self.row_blocks = pl.cdiv(x.m, self.rows)


class _Beside(_Block):
    """One block of the kernel, while it is traced."""

    def run(self):
        p = self.plan
        of_consumer, of_producer, of_unit = p.registers
        me = lax.axis_index("wg")
        self.flags = pl.get_global(plgpu.SemaphoreType.REGULAR((p.row_blocks, p.chunks)))

        @pl.when(me == p.consumers)
        def _():
            plgpu.set_max_registers(of_producer, action="decrease")
            self.producer()

        @pl.when(me == p.consumers + 1)
        def _():
            plgpu.set_max_registers(of_unit, action="decrease")
            self.unit()

        @pl.when(me < p.consumers)
        def _():
            plgpu.set_max_registers(of_consumer, action="increase")
            self.consumer(me)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def order(self, it0, backwards=True, t=None):
        p, forwards = self.plan, super().order(it0, backwards, t)

        def place(s):
            s = forwards(s)
            chunk, inside = s // (2 * p.of_half), s % (2 * p.of_half)
            half, inside = inside // p.of_half, inside % p.of_half
            return half * (p.n // _STEP) + chunk * p.of_half + inside

        return place

    def fetch_tile(self, t, it0):
        p = self.plan
        row, col = self.origin(t)
        forwards, each = super().order(it0), 2 * p.of_half
        items = pl.cdiv(jnp.minimum(p.x.m - row, p.rows), p.item.height)

        def await_chunk(s):
            @pl.when((s % each == 0) & (row < p.x.m))
            def _():
                flag = self.flags.at[row // p.rows, forwards(s) // each]
                plgpu.semaphore_wait(flag, items, decrement=False, memory_scope="gpu")

        return self.fetch_steps(it0, row, col, 0, [(True, self.a)], before=await_chunk)

    def sum(self, me, it0, meanwhile=None, steps=None):
        """As two products of half the columns: with four warpgroups, the registers of a launch are
        too few for an instruction with all of them."""
        p, x, ring = self.plan, self.x, self.ring
        if p.cols <= 128 or p.merged:
            return super().sum(me, it0, meanwhile, steps)

        def multiply(*accs):
            def step(s, _):
                it = it0 + s
                slot = ring.slot(it)
                ring.wait(it)
                a = self.a_smem.at[slot, pl.ds(me * p.height, p.height)]
                for i, acc in enumerate(accs):
                    half = pl.ds(i * 128, 128)
                    b = self.b_smem
                    b = b.at[slot, half].T if x.tb else b.at[slot, :, half]
                    plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(2)
                pl.when(s > 0)(lambda: ring.release(it - 1))

            lax.fori_loop(0, p.steps, step, None)
            values = [acc[...] for acc in accs]
            ring.release(it0 + (p.steps - 1))
            return values, None

        return pl.run_scoped(multiply, *[plgpu.ACC((p.height, 128), x.sums)] * 2)

    # ---- the gradient of the unit

    def unit(self):
        p, height = self.plan, self.plan.item.height
        size = p.cfg.cluster * p.cfg.cluster_n
        rank = self.rank("cm") * p.cfg.cluster_n + self.rank("cn")
        block = lax.axis_index("cluster") * size + rank
        across = p.band // height
        of_band = across * p.chunks

        def item(i, _):
            band, inside = i // of_band, i % of_band
            row, chunk = band * p.band + inside % across * height, inside // across

            @pl.when(row < p.x.m)
            def _():
                self.gradients(row, chunk * p.wide)
                flag = self.flags.at[row // p.rows, chunk]
                plgpu.semaphore_signal(flag, memory_scope="gpu")

        StaticTiles(p.bands * of_band, p.blocks, block).produce(item, None)

    def gradients(self, row, col):
        p = self.plan
        lanes = p.wide // p.item.vector
        at_once = max(128 // lanes, 1) * p.item.rows
        layout = plgpu.Layout.WG_STRIDED((at_once, p.wide), p.item.vector)
        ragged = p.x.m % p.item.height

        def step(i, _):
            first = row + i * at_once
            keep = None
            if ragged:
                shape = at_once, p.wide
                keep = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) < p.x.m - first

            def at(half):
                return pl.ds(first, at_once), pl.ds(half * p.n + col, p.wide)

            def load(ref, half=0):
                how = {"layout": layout} if keep is None else {"mask": keep, "other": 0}
                return plgpu.load(ref, at(half), **how).astype(jnp.float32)

            def save(half, value):
                value = value.astype(self.a.dtype)
                if keep is None:
                    self.a[at(half)] = value
                else:
                    pl.store(self.a, at(half), value, mask=keep)

            grad, gate, up = load(self.grad), load(self.both), load(self.both, 1)
            value, slope = p.slope(gate)
            save(0, grad * up * slope)
            save(1, grad * value)

        lax.fori_loop(0, p.item.height // at_once, step, None)


@cached
def _kernel(x, cfg, sms, activation, interpret):
    """x: the product of the gradient of both products, (M, 2 N), and the weights."""
    plan = _Plan(x, cfg, sms, activation)

    def body(grad, both, w, o, g, **scratch):
        overlap_launches()
        refs = {"grad": grad, "both": both} | x.named(g, w, o)
        _Beside(plan, refs | plan.refs(scratch)).run()

    outs = tuple(plgpu.ShapeDtypeStruct(s, x.out_dtype) for s in ((x.m, x.n), (x.m, x.k)))
    return warp_specialized(
        body,
        plan,
        outs,
        threads=plan.consumers + 2,
        interpret=interpret,
        kernel_name="gated_matmul_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
