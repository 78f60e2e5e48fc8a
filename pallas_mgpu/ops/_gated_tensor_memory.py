"""A product with two weights and a gated linear unit on Blackwell: activation(x @ gate) * (x @ up).

It is the kernel of `matmul` (_tensor_memory.py) with other tiles of B: a block has `piece` columns
of the gate and the same columns of up. So pieces of the two products alternate in an accumulator,
one of each for every block of a pair, and a lane of the epilogue has both factors of an element."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu._caches import cached

from . import _tensor_memory
from ._common import overlap_launches, store, warp_specialized
from ._open_rows import in_shapes

_CHUNK = 32  # columns of both factors that a lane holds at a time


def _unaligned(x, packed):
    """Does up begin within one array with the gate, where TMA cannot begin to read rows?"""
    return packed and not x.tb and x.n // 2 * x.dtypes[1].itemsize % 16 != 0


class _Plan(_tensor_memory._Plan):
    """Tiles have tile_n // 2 columns of the result."""

    def __init__(self, x, cfg, sms, activation, packed, products):
        """x: the product with both weights, of 2 N columns."""
        super().__init__(x, cfg, sms)
        self.activation, self.packed, self.products = activation, packed, products
        self.n, self.piece = x.n // 2, self.b_cols // 2
        self.unaligned = _unaligned(x, packed)
        self.by_tma = self.n * x.out_dtype.itemsize % 16 == 0
        stores = self.cols // 2 // _CHUNK * (3 if products else 1)
        # not more bytes than super() reckoned with; a divisor, as there
        most = min(cfg.buffers, self.buffers * self.chunk // _CHUNK)
        self.buffers = max(n for n in range(1, most + 1) if stores % n == 0)
        self.chunk = _CHUNK

    def scratch(self):
        full = plgpu.Barrier(num_arrivals=3, num_barriers=self.stages)
        return super().scratch() | {"full": full}


class _Block(_tensor_memory._Block):
    """One block of the kernel, while it is traced."""

    def fetch_tile(self, t, it0):
        p, x, ring = self.plan, self.x, self.ring
        row, col = self.origin(t)
        along_m, along_n = pl.ds(row, p.rows), pl.ds(col // 2, p.cols // 2)
        of_up = pl.ds(col // 2 + p.n, p.cols // 2) if p.packed else along_n
        weights = (self.b, along_n, None), (self.b if p.packed else self.up, of_up, p.unaligned)

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            along_k = pl.ds(s * p.step, p.step)
            ring.acquire(it)
            full = self.full.at[slot]
            plgpu.copy_gmem_to_smem(
                self.a.at[along_m, along_k], self.a_smem.at[slot], full, **self.partitioned(0)
            )
            for h, (ref, columns, plain) in enumerate(weights):
                mine = pl.ds(h * p.piece, p.piece)
                if x.tb:
                    source, buffer = ref.at[columns, along_k], self.b_smem.at[slot, mine]
                else:
                    source, buffer = ref.at[along_k, columns], self.b_smem.at[slot, :, mine]
                how = {"engine": "plain"} if plain else self.partitioned(0 if x.tb else 1)
                plgpu.copy_gmem_to_smem(source, buffer, full, **how)

        lax.fori_loop(0, p.steps, fetch, None)
        return it0 + p.steps

    def take_tile(self, me, scales, t, w):
        del me, scales  # the only one; none
        p, x = self.plan, self.x
        row, col = self.origin(t)
        rows, col = pl.ds(row + self.rank * _tensor_memory._ROWS, _tensor_memory._ROWS), col // 2
        which = w % _tensor_memory._ACCUMULATORS
        acc = self.accumulator(which)
        plgpu.barrier_wait(self.ready.at[which], phase=w // _tensor_memory._ACCUMULATORS)
        number, engine = 0, None if p.by_tma else "plain"
        for c in range(0, p.cols // 2, _CHUNK):
            at = c // p.piece * p.b_cols + c % p.piece  # of the gate
            gate, up = (
                plgpu.async_load_tmem(acc.at[:, pl.ds(at + h, _CHUNK)]) for h in (0, p.piece)
            )
            if c + _CHUNK == p.cols // 2:  # the products after the next ones may overwrite it
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(self.taken.at[which])
            columns = pl.ds(col + c, _CHUNK)
            found = [(p.activation(gate)[0] * up, self.o.at[rows, columns])]
            if p.products:
                both = self.both.reshape((x.m, 2, p.n))
                found += [(v, both.at[rows, h, columns]) for h, v in enumerate((gate, up))]
            for part, there in found:
                plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
                buffer = self.o_smem.at[number % p.buffers]
                store(buffer, part.astype(x.out_dtype), there, engine=engine)
                number += 1
        return w + 1


def kernel_of(plan, block, interpret):
    """The kernel of a plan with `packed` and `products`. block: the class of its blocks."""
    x, packed, products = plan.x, plan.packed, plan.products

    def body(a, b, *refs, **scratch):
        overlap_launches()
        names = ["up"] * (not packed) + ["o"] + ["both"] * products
        named = dict(a=a, b=b, bias=None) | dict(zip(names, refs, strict=True))
        block(plan, named | scratch).run()

    shapes = (x.m, None), *(None,) * (2 - packed)
    out = plgpu.ShapeDtypeStruct((x.m, plan.n), x.out_dtype)
    both = plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype)
    return warp_specialized(
        body,
        plan,
        (out, both) if products else out,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="gated_matmul",
        **in_shapes(*shapes),
    )


@cached
def kernel(x, cfg, sms, activation, packed, products, interpret):
    """x: the product with both weights; activation: a function that also returns the slope."""
    return kernel_of(_Plan(x, cfg, sms, activation, packed, products), _Block, interpret)


def choose(x, packed):
    """The configuration for the product with both weights. Not measured."""
    found = _tensor_memory.choose(x.m, x.n)
    tile_n = max(found.tile_n, 128)
    return found._replace(
        tile_n=tile_n, pair=found.pair and tile_n == 256 and not _unaligned(x, packed)
    )


def check(config, x, packed):
    """ValueError for a configuration that there is no kernel for."""
    _tensor_memory.check(config, x)
    if config.tile_n not in (128, 256) or config.pair and config.tile_n != 256:
        raise ValueError(
            "gated_matmul: a TensorMemoryConfig has a tile_n of 128 or 256, with pair 256; got"
            f" {config}"
        )
    if config.pair and _unaligned(x, packed):
        raise ValueError(
            f"gated_matmul: with {x.n // 2} columns of the gate, up begins where TMA cannot read;"
            f" pass up as an array of its own, or pair=False; got {config}"
        )
