"""The gradients of the products and of x of `gated_matmul`, in one kernel.

The gradient of the unit, element by element, moves several times as many bytes as it takes for the
product that follows to read it, while that product leaves memory nearly idle. So a warpgroup of
each block of the product computes the gradient of the unit beside it: *items* of a few rows and a
*chunk* of the unit's columns, in the order in which the product needs them. Each item raises a flag
of its rows and chunk; the producer of a block waits for all items of its rows before it fetches
from a chunk. The product walks along K chunk by chunk, first the gate's columns of one, then the
same of up, so that the first tiles need not wait for all of their rows.

Items come from a counter: a block that has not started yet has none, and nobody waits for it."""

import functools
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._batch import Batched
from pallas_mgpu._caches import cached

from ._common import SeveralKernels, overlap_launches, warp_specialized
from ._matmul_choice import MatmulConfig, clusters_at_once
from ._open_rows import is_static
from ._padding import needs_padding
from .gated import SLOPES, gated_linear_unit_backward
from .matmul import Product, _Block, _KernelPlan, matmul

_NAME = "gated_matmul_backward"
_STEP = 64  # elements of K in a slot
_REGISTERS = 208, 32, 64  # of a lane of a consumer, of the producer and of the unit
_VECTOR = 8  # elements of each array that a lane has at a time


class GatedBackwardConfig(NamedTuple):
    """How the product is tiled, ``product``, and the ``height`` of items of the unit beside it: 32,
    64 or 128 rows."""

    product: MatmulConfig = MatmulConfig()
    height: int = 32


class _Plan(_KernelPlan):
    def __init__(self, x, cfg, sms, activation):
        super().__init__(x, cfg.product, sms)
        self.registers = _REGISTERS
        self.n, self.slope, self.item = x.k // 2, SLOPES[activation], cfg.height
        self.wide = next(w for w in (256, 128, 64) if self.n % w == 0)
        self.chunks = self.n // self.wide
        self.of_half = self.wide // _STEP  # steps of a chunk of one half
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
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.reads_only)

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
        items = pl.cdiv(jnp.minimum(p.x.m - row, p.rows), p.item)

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
        if p.cols <= 128:
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
        p, height = self.plan, self.plan.item
        across = p.band // height
        of_band, take = across * p.chunks, plgpu.ext.TileScheduler().fetch

        def item(i):
            band, inside = i // of_band, i % of_band
            row, chunk = band * p.band + inside % across * height, inside // across

            @pl.when(row < p.x.m)
            def _():
                self.gradients(row, chunk * p.wide)
                flag = self.flags.at[row // p.rows, chunk]
                plgpu.semaphore_signal(flag, memory_scope="gpu")

        def step(i):
            item(i)
            return take()

        lax.while_loop(lambda i: i < p.bands * of_band, step, take())

    def gradients(self, row, col):
        p = self.plan
        at_once = 128 * _VECTOR // p.wide
        layout = plgpu.Layout.WG_STRIDED((at_once, p.wide), _VECTOR)
        ragged = p.x.m % p.item

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
                return plgpu.load(ref.at[at(half)], **how).astype(jnp.float32)

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

        lax.fori_loop(0, p.item // at_once, step, None)


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


class _Apart(SeveralKernels):
    """The same by two kernels."""

    def __init__(self, activation, transposed, interpret):
        how = {"interpret": interpret}
        self.unit = functools.partial(gated_linear_unit_backward, activation=activation, **how)
        self.product = functools.partial(matmul, transpose_b=transposed, **how)

    def __call__(self, grad, products, w, out=None, stream=None):
        dx, g = (None, None) if out is None else out
        g = self.unit(grad, products, out=g, stream=stream)
        return self.product(g, w, out=dx, stream=stream), g


class _Together(SeveralKernels):
    """One kernel; under vmap, whose elements would share the flags, two."""

    def __init__(self, kernel, apart):
        self.kernel, self.apart, self.lower = kernel, apart, kernel.lower

    def __call__(self, *operands, out=None, stream=None):
        batched = any(isinstance(x, Batched) for x in operands)
        return (self.apart if batched else self.kernel)(*operands, out=out, stream=stream)


def _checked(grad, products, w, activation, transposed):
    """The product of the gradient of both products and the weights."""
    if activation not in SLOPES:
        raise ValueError(
            f"{_NAME}: activation must be one of {', '.join(SLOPES)}, got {activation!r}"
        )
    for what, a in (("grad", grad), ("products", products), ("w", w)):
        if a.dtype.name not in ("float16", "bfloat16") or a.dtype != grad.dtype:
            raise TypeError(
                f"{_NAME}: grad, products and w must all be float16 or all bfloat16; {what} is"
                f" {a.dtype}"
            )
        if a.ndim != 2 or 0 in a.shape:
            raise ValueError(f"{_NAME}: {what} must have two dims and elements, got {a.shape}")
    m, n = grad.shape
    if products.shape != (m, 2 * n):
        raise ValueError(
            f"{_NAME}: products must have the shape {(m, 2 * n)}, as grad has {grad.shape}; got"
            f" {products.shape}"
        )
    k, n2 = w.shape[::-1] if transposed else w.shape
    if n2 != 2 * n:
        raise ValueError(
            f"{_NAME}: w must have {2 * n} {'rows' if transposed else 'columns'}, as products has"
            f" columns; got {w.shape}"
        )
    return Product(m, k, 2 * n, (grad.dtype, grad.dtype), grad.dtype, False, not transposed)


def _why_apart(x, operands):
    """Why there is no kernel that does both; None: there is."""
    features = _core.target(operands[0].device)["features"]
    if "WGMMA" not in features:
        return f"on {_core.target(operands[0].device)['name']}"
    if x.k // 2 % _STEP:
        return f"with {x.k // 2} columns, which are no multiple of {_STEP}"
    if any(map(needs_padding, operands)) or x.n * x.out_dtype.itemsize % 16:
        return "of rows that TMA cannot address"
    return None


def _check_config(config):
    if not isinstance(config, GatedBackwardConfig):
        raise TypeError(f"{_NAME}: config must be a GatedBackwardConfig, got {config!r}")
    c = config.product
    plain = isinstance(c, MatmulConfig) and c.split == c.slices == c.shares == 1 and not c.swapped
    if not plain or c.consumers != 2 or c.step != _STEP or c.tile_n not in (64, 128, 256):
        raise ValueError(
            f"{_NAME}: the product of a GatedBackwardConfig has 2 consumers, a tile_n of 64, 128 or"
            f" 256, a step of {_STEP}, and no split, slices, shares and swapped; got {config}"
        )
    if config.height not in (32, 64, 128):
        raise ValueError(
            f"{_NAME}: a GatedBackwardConfig has a height of 32, 64 or 128; got {config}"
        )
    return config


def _is_large(x, sms):
    """Is there a tile for each block at least? Fewer leave no time for the unit beside them."""
    plan = _KernelPlan(x, GatedBackwardConfig().product, sms)
    return plan.tiles >= int(clusters_at_once(sms, plan.cluster))


@plgpu.specialize(in_place=False)
def gated_matmul_backward(
    grad, products, w, *, activation="silu", transpose_b=False, config=None, interpret=None
):
    """The gradients of :func:`gated_matmul` with respect to ``x`` and to the products.

    grad: the gradient of the result, (M, N); products: both products, (M, 2 N), of
    ``return_products=True``; w: both weights, (K, 2 N), with transpose_b (2 N, K); all float16 or
    all bfloat16, any M, N, K. activation: as of gated_matmul. On Hopper one kernel computes the
    gradient of the unit beside the product that follows, if N is a multiple of 64 and there is a
    tile for each SM, otherwise two kernels. config: a :class:`GatedBackwardConfig` of that kernel.

    Returns (gradient of ``x`` (M, K), gradient of the products (M, 2 N)). That of ``w`` is
    ``matmul(x, gradient of the products, transpose_a=True)``. TypeError, ValueError for other
    dtypes and shapes, NotImplementedError for a config where there is no such kernel.
    """
    transposed = bool(transpose_b)
    x = _checked(grad, products, w, activation, transposed)
    apart = _Apart(activation, not transposed, interpret)
    sms, why = plgpu.sm_count(grad.device), _why_apart(x, (grad, products, w))
    if config is None:
        kind = _NAME, x._replace(m=0), grad.device, activation, interpret
        if why or not _is_large(x, sms) or not is_static(kind, x.m):
            return apart
        config = GatedBackwardConfig()
    elif why:
        raise NotImplementedError(f"{_NAME}: no single kernel {why}; leave out config=")
    return _Together(_kernel(x, _check_config(config), sms, activation, interpret), apart)


gated_matmul_backward.maker.transposes = {"transpose_b": ("w",)}  # type: ignore[attr-defined]
