"""A product with two weights and a gated linear unit in one kernel:
activation(x @ gate) * (x @ up).

It is the kernel of `matmul` with other tiles of B: half of their columns are the gate's, the other
half the same columns of up. So a consumer has both factors of an element in the same lane, and the
epilogue multiplies them. The weights are two arrays, or the halves of the columns of one; neither
is copied. On request both products are stored, too, for the gradient.

The gradients are those of the unit (`gated_linear_unit_backward`), then two products. The gradient
of x sums over the columns of both weights (`input_gradient`): where these are two arrays, the steps
of K are first those of the gate, then those of up, and TMA fills the last step of each with zeros.
The gradient of one of two weights is a product with half of the columns (`weight_gradient`)."""

import functools

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _gated_tensor_memory, _tensor_memory, _warp_mma
from ._common import SeveralKernels, overlap_launches, store, swizzled, warp_specialized
from ._matmul_choice import MatmulConfig, candidates, cycles, rates_of
from ._mixed_sums import BITS
from ._open_rows import better, in_shapes, rows_of
from ._padding import needs_padding, padding_of, with_padding
from ._tensor_memory import TensorMemoryConfig
from .gated import SLOPES, gated_linear_unit
from .matmul import Product, _Block, _KernelPlan, _semaphores, matmul
from .mixed import kernel_of, product_of

_NAME = "gated_matmul"


class _GatedPlan(_KernelPlan):
    """Tiles have tile_n // 2 columns of the result."""

    parted = (1 << 22,)  # tiles of any number of rows

    def __init__(self, x, cfg, sms, activation, packed, products):
        """x: the product with both weights, of 2 N columns."""
        super().__init__(x, cfg, sms, clips=True)
        self.activation, self.packed, self.products = activation, packed, products
        self.n, self.half = x.n // 2, self.cols // 2
        # does up begin where TMA can begin to read rows?
        self.aligned = x.tb or not packed or self.n * x.dtypes[1].itemsize % 16 == 0
        self.by_tma = self.n * x.out_dtype.itemsize % 16 == 0
        # Each tile begins with the first buffer: their number divides that of its stores.
        stores = self.half // self.chunk * (3 if products else 1)
        self.buffers = max(n for n in range(1, self.buffers + 1) if stores % n == 0)

    def scratch(self):
        x, found = self.x, super().scratch()
        shape = (self.consumers, self.buffers, 64, self.chunk)
        transforms = swizzled(self.chunk, x.out_dtype)
        found["o_smem"] = plgpu.SMEM(shape, x.out_dtype, transforms=transforms)
        copies = len(self.parts_a) + 2
        found["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        return found


class _Gated(_Block):
    """One block of the kernel, while it is traced."""

    def weight(self, h, along_k, col):
        """A tile of the gate (h = 0) or of up. Columns beyond the gate's are not stored."""
        p, b = self.plan, self.b
        if p.packed:
            col = col + h * p.n
        elif h:
            b = self.up
        along_n = pl.ds(col, p.half)
        return b.at[(along_n, along_k) if self.x.tb else (along_k, along_n)]

    def fetch_tile(self, t, it0):
        p, x, ring, step = self.plan, self.x, self.ring, self.cfg.step
        row, col = self.origin(t)
        place, col = self.order(it0), col // 2

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            along_k = pl.ds(place(s) * step, step)
            ring.acquire(it)
            for part, along_m, exists in self.parts_at(p.parts_a, row, x.m, it):
                a = self.a.at[along_m, along_k]
                self.copy(True, a, self.a_smem.at[slot, part], slot, "cn", exists)
            for h in range(2):
                columns, by_tma = pl.ds(h * p.half, p.half), p.aligned or not h
                plgpu.copy_gmem_to_smem(
                    self.weight(h, along_k, col),
                    self.b_smem.at[(slot, columns) if x.tb else (slot, slice(None), columns)],
                    self.full.at[slot],
                    collective_axes="cm" if "cm" in p.axes and by_tma else None,
                    engine=None if by_tma else "plain",
                )

        lax.fori_loop(0, p.steps, fetch, None)
        return it0 + p.steps

    def multiply_tile(self, me, scales, t, it0):
        row, col = self.origin(t)
        (value,), _ = self.sum(me, it0)
        self.finish(me, value, pl.ds(row + me * 64, 64), self.column(col))
        return it0 + self.plan.steps

    def column(self, col):
        if isinstance(self.x.m, plgpu.Dim):  # TMA has to know that no store begins before the array
            return jnp.maximum(col // 2, 0)
        return col // 2

    def finish(self, me, value, rows, col):
        p, number = self.plan, 0
        for c in range(0, p.half, p.chunk):
            gate, up = (value[:, h + c : h + c + p.chunk] for h in (0, p.half))
            columns = pl.ds(col + c, p.chunk)
            found = [(p.activation(gate)[0] * up, self.o.at[rows, columns])]
            if p.products:
                both = self.both.reshape((self.both.shape[0], 2, p.n))
                found += [(v, both.at[rows, h, columns]) for h, v in enumerate((gate, up))]
            for part, there in found:
                plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
                how = {"engine": None if p.by_tma else "plain"}
                buffer = self.o_smem.at[me, number % p.buffers]
                store(buffer, part.astype(self.x.out_dtype), there, **how)
                number += 1


@cached
def _kernel(x, cfg, sms, activation, packed, products, interpret):
    plan = _GatedPlan(x, cfg, sms, SLOPES[activation], packed, products)
    return _gated_tensor_memory.kernel_of(plan, _Gated, interpret)


class _Apart(SeveralKernels):
    """The same by kernels of their own, for GPUs without wgmma and tcgen05."""

    def __init__(self, activation, transposed, products, interpret):
        self.products = products
        how = {"interpret": interpret}
        self.matmul = functools.partial(matmul, transpose_b=transposed, **how)
        self.unit = functools.partial(gated_linear_unit, activation=activation, **how)

    def __call__(self, x, w, out=None, stream=None):
        out, both = out if self.products and out is not None else (out, None)
        both = self.matmul(x, w, out=both, stream=stream)
        found = self.unit(both, out=out, stream=stream)
        return (found, both) if self.products else found


def _fits(config):
    """K is not divided, and tiles have two halves of 64 columns or more."""
    undivided = config.split == config.slices == config.shares == 1
    return (
        undivided
        and not config.swapped
        and config.consumer_rows == 64
        and config.tile_n in (128, 256)
    )


# Of rows that share a program. Those above 128 share one for each of these tilings, of which the
# fastest for the number of rows is taken. By the estimate others are at most 0.5 % faster.
_EDGES = 0, 64, 128, 1 << 22
_OPEN_TILINGS = (
    MatmulConfig(2, 256, cluster=2),
    MatmulConfig(2, 256, cluster=1, cluster_n=2),
    MatmulConfig(2, 256, cluster=1),
    MatmulConfig(2, 128, cluster=2),
    MatmulConfig(2, 128, cluster=1, cluster_n=2),
    MatmulConfig(1, 256, cluster=1),
    MatmulConfig(1, 128, cluster=2),
)


def _choose(m, n, k, sms, is_open=False):
    """A tiling of the product whose tiles have two halves of 64 columns at least. is_open: the
    program is one for many numbers of rows."""
    if is_open and m > _EDGES[-2]:
        found = _OPEN_TILINGS
    else:
        found = [c for c in candidates(m, 2 * n, k, sms) if _fits(c) and c.consumers < 3]
    if found:
        return min(found, key=lambda cfg: cycles(m, 2 * n, k, cfg, sms, rates=rates_of(m)))
    return MatmulConfig(1, 128, cluster=1) if m <= 64 or n <= 64 else MatmulConfig(2, 256)


def _padded(kernel, operands, interpret):
    return with_padding(kernel, [padding_of(a, interpret) for a in operands if a is not None])


def _checked(x, w, up, activation, transposed):
    """The product with both weights."""
    name = _NAME
    if activation not in SLOPES:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(SLOPES)}, got {activation!r}"
        )
    for what, a in (("x", x), ("w", w), ("up", up)):
        if a is not None and (a.dtype.name not in ("float16", "bfloat16") or a.dtype != x.dtype):
            raise TypeError(
                f"{name}: x and the weights must all be float16 or all bfloat16; {what} is"
                f" {a.dtype}"
            )
        if a is not None and (a.ndim != 2 or 0 in a.shape):
            raise ValueError(f"{name}: {what} must have two dims and elements, got {a.shape}")
    (m, k), (n, k2) = x.shape, w.shape if transposed else w.shape[::-1]
    if k != k2:
        shapes = f"x is {x.shape}, w {w.shape}"
        raise ValueError(f"{name}: the inner dims differ, {k} and {k2}: {shapes}")
    if up is not None and up.shape != w.shape:
        raise ValueError(f"{name}: up must have the shape of w, {w.shape}, got {up.shape}")
    if up is None and n % 2:
        raise ValueError(f"{name}: without up, w has two halves of columns; it has {n} columns")
    n = n if up is None else 2 * n
    return Product(m, n, k, (x.dtype, x.dtype), x.dtype, False, transposed)


def _of_weights(x, w, up, scales, activation, transposed, products):
    """The product with weights of 8 or 4 bits."""
    if activation not in SLOPES:
        raise ValueError(
            f"{_NAME}: activation must be one of {', '.join(SLOPES)}, got {activation!r}"
        )
    if up is not None or not transposed or products or w.shape[0] % 16:
        raise NotImplementedError(
            f"{_NAME}: weights of 8 or 4 bits other than one array (2 N, K), with transpose_b=True"
            " and N a multiple of 8, and their products; use mixed_matmul and gated_linear_unit"
        )
    return product_of(_NAME, x, w, scales, None, activation)


@plgpu.specialize(in_place=False)
@better
def gated_matmul(
    x,
    w,
    up=None,
    *,
    scale_b=None,
    activation="silu",
    transpose_b=False,
    return_products=False,
    config=None,
    interpret=None,
):
    """``activation(x @ w) * (x @ up)`` in one kernel, accumulated in float32: SwiGLU, GeGLU
    and others.

    x: (M, K); w, up: (K, N) each, or ``w`` alone, whose columns are both, gate first: (K, 2 N);
    with transpose_b (N, K) or (2 N, K). All float16 or all bfloat16; any M, N, K. On Hopper w may
    also be int8, int4, float8_e4m3fn or float8_e5m2: (2 N, K) with transpose_b, N a multiple of 8,
    K of 64, and scale_b (G, 2 N), as the scales of :func:`mixed_matmul`.

    activation: "silu", "gelu" (by tanh), "relu" or "sigmoid". return_products: also return both
    products, (M, 2 N), which :func:`gated_linear_unit_backward` takes. config: a
    :class:`MatmulConfig` of the product with both weights, with a tile_n of 128 or 256, a split of
    1 and 1 slice; a :class:`MixedConfig` for weights of 8 or 4 bits; on Blackwell a
    :class:`TensorMemoryConfig` with such a tile_n, with pair 256. On GPUs without wgmma and
    tcgen05, two kernels do the same, for ``w`` alone.

    Returns (M, N), or the pair of it and the products, of the caller's kind of array. TypeError,
    ValueError for other dtypes and shapes.
    """
    transposed = bool(transpose_b)
    if w.dtype.name in BITS:
        product = _of_weights(x, w, up, scale_b, activation, transposed, return_products)
        return kernel_of(_NAME, product, x, config, interpret)
    if scale_b is not None:
        raise ValueError(f"{_NAME}: scale_b is for weights of 8 or 4 bits, w is {w.dtype}")
    product = _checked(x, w, up, activation, transposed)
    if _warp_mma.runs_here(x.device) and not isinstance(config, TensorMemoryConfig):
        if up is not None or config is not None:
            raise NotImplementedError(
                f"{_NAME}: up= and config= on {_core.target(x.device)['name']}; pass both weights"
                " as one array"
            )
        return _Apart(activation, transposed, bool(return_products), interpret)
    sms, n, packed = plgpu.sm_count(x.device), product.n // 2, up is None
    if config is None and _tensor_memory.runs_here(x.device):
        config = _gated_tensor_memory.choose(product, packed)
    if isinstance(config, TensorMemoryConfig):
        _gated_tensor_memory.check(config, product, packed)
        how = SLOPES[activation], packed, bool(return_products), interpret
        kernel = _gated_tensor_memory.kernel(product, config, sms, *how)
        return _padded(kernel, (x, w, up), interpret)
    m, operands, products = (
        product.m,
        [a for a in (x, w, up) if a is not None],
        bool(return_products),
    )
    if config is None and not any(map(needs_padding, operands)):
        kind = _NAME, product._replace(m=0), x.device, activation, packed, products, interpret
        rows, typical = rows_of(kind, m, _EDGES)
        product, m = product._replace(m=rows), m if m > _EDGES[-2] else typical
    config = config or _choose(m, n, product.k, sms, isinstance(product.m, plgpu.Dim))
    fits = isinstance(config, MatmulConfig) and _fits(config) and config.step in (64, 128)
    if not fits or config.consumers * config.tile_n > 512:
        raise ValueError(
            f"{_NAME}: config must be a MatmulConfig with a tile_n of 128 or 256, a split of"
            f" 1 and 1 slice; got {config}"
        )
    kernel = _kernel(product, config, sms, activation, packed, products, interpret)
    return _padded(kernel, (x, w, up), interpret)


# ---- the gradient of x ---------------------------------------------------------------------------


class _BothWeights(_Block):
    """A product with (M, 2 N) that sums over the columns of two weights."""

    def half(self, k):
        """Which weight a step along K has, and where it begins there."""
        of_each = self.x.k // 2
        return k // of_each, k % of_each

    def tile_of_a(self, a, along_m, k):
        h, k = self.half(k)
        return a.reshape((a.shape[0], 2, a.shape[1] // 2)).at[along_m, h, pl.ds(k, self.cfg.step)]

    def tiles_of_b(self, along_n, k):
        h, k = self.half(k)
        along_k = pl.ds(k, self.cfg.step)
        at = (along_n, along_k) if self.x.tb else (along_k, along_n)
        return [(h == 0, self.b.at[at]), (h == 1, self.up.at[at])]


@cached
def _gradient_kernel(x, cfg, sms, interpret):
    plan = _KernelPlan(x, cfg, sms)

    def body(a, b, up, o, **scratch):
        overlap_launches()
        refs = x.named(a, b, o) | plan.refs(scratch) | {"up": up, "done": _semaphores(plan)}
        _BothWeights(plan, refs).run()

    out_type = plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype)
    options = {"interpret": interpret, "kernel_name": "gated_matmul_input_gradient"}
    options |= in_shapes((x.m, None), None, None)
    return warp_specialized(body, plan, out_type, **options)


def _check_elements(*arrays):
    for a in arrays:
        if 0 in a.shape:
            raise ValueError(f"{_NAME}: gradients of arrays without elements, got {a.shape}")


def sums_two_weights(n, k, dtype, device):
    """Is there a kernel of `input_gradient` for two weights of K by N?"""
    if _tensor_memory.runs_here(device) or _warp_mma.runs_here(device):
        return False
    return n * dtype.itemsize % 16 == k * dtype.itemsize % 16 == 0


@plgpu.specialize(in_place=False)
@better
def input_gradient(grad, w, up, *, transpose_b=False, config=None, interpret=None):
    """The gradient of the x of :func:`gated_matmul` with two weights, without a copy of them:
    ``grad[:, :N] @ w.T + grad[:, N:] @ up.T``. grad: that of both products, (M, 2 N); w, up:
    (K, N), with transpose_b (N, K). On Hopper, for multiples of 8 as N and K (`sums_two_weights`).
    Returns (M, K)."""
    (m, n), transposed = grad.shape, bool(transpose_b)
    n, k = n // 2, w.shape[1 if transposed else 0]
    _check_elements(grad, w, up)
    if not (sums_two_weights(n, k, w.dtype, w.device) and all(a.aligned for a in (grad, w, up))):
        raise NotImplementedError(f"{_NAME}: the gradient of x for two such weights; join them")
    sms, rows, dtypes = plgpu.sm_count(w.device), m, (grad.dtype, w.dtype)
    if config is None:
        kind = "input_gradient", n, k, dtypes, w.device, transposed, interpret
        rows, m = rows_of(kind, m)
    config = config or _chosen(m, k, 2 * n, sms, not transposed)
    of_each = pl.cdiv(n, config.step) * config.step
    product = Product(rows, k, 2 * of_each, dtypes, grad.dtype, False, not transposed)
    return _gradient_kernel(product, config, sms, interpret)


def _chosen(m, n, k, sms, tb):
    """Of one kernel, whose operands do not change places."""
    found = [c for c in candidates(m, n, k, sms, tb=tb) if c.slices == 1 and not c.swapped]
    return min(found, key=lambda cfg: cycles(m, n, k, cfg, sms))


# ---- the gradient of a weight --------------------------------------------------------------------


class _OneWeight(_Block):
    """A product over the rows of x and of half of the columns of (M, 2 N)."""

    def halves(self, grad):
        return grad.reshape((grad.shape[0], 2, grad.shape[1] // 2))

    def tile_of_a(self, a, along_m, k):
        if not self.of_transposed:
            return super().tile_of_a(a, along_m, k)
        return self.halves(a).at[pl.ds(k, self.cfg.step), self.which, along_m]

    def tiles_of_b(self, along_n, k):
        if self.of_transposed:
            return super().tiles_of_b(along_n, k)
        return [(True, self.halves(self.b).at[pl.ds(k, self.cfg.step), self.which, along_n])]


@cached
def _weight_kernel(x, cfg, sms, which, transposed, interpret):
    plan = _KernelPlan(x, cfg, sms)

    def body(a, b, o, **scratch):
        overlap_launches()
        refs = x.named(a, b, o) | plan.refs(scratch) | {"done": _semaphores(plan)}
        _OneWeight(plan, refs | {"which": which, "of_transposed": transposed}).run()

    out_type = plgpu.ShapeDtypeStruct((x.m, x.n), x.out_dtype)
    options = {"interpret": interpret, "kernel_name": "gated_matmul_weight_gradient"}
    options |= in_shapes((x.k, None), (x.k, None))
    return warp_specialized(body, plan, out_type, **options)


@plgpu.specialize(in_place=False)
@better
def weight_gradient(a, b, *, up=False, transpose_b=False, config=None, interpret=None):
    """The gradient of ``w``, or of ``up``, of :func:`gated_matmul` with two weights. a: x, (M, K);
    b: the gradient of both products, (M, 2 N); the result is ``a.T @ b[:, :N]`` or
    ``a.T @ b[:, N:]``. With transpose_b it is the transpose of that, of a = the gradient and b = x.
    On Hopper, for multiples of 8 as N and K (`sums_two_weights`)."""
    transposed = bool(transpose_b)
    grad, x = (a, b) if transposed else (b, a)
    (m, k), n = x.shape, grad.shape[1] // 2
    _check_elements(a, b)
    if not (sums_two_weights(n, k, x.dtype, x.device) and a.aligned and b.aligned):
        raise NotImplementedError(f"{_NAME}: the gradient of such a weight alone; use matmul")
    sms, shape = plgpu.sm_count(x.device), (n, k) if transposed else (k, n)
    rows, dtypes = m, (a.dtype, b.dtype)
    if config is None:
        kind = "weight_gradient", shape, dtypes, x.device, transposed, bool(up), interpret
        rows, m = rows_of(kind, m)
    config = config or _chosen(*shape, m, sms, False)
    product = Product(*shape, rows, dtypes, x.dtype, True, False)
    return _weight_kernel(product, config, sms, int(bool(up)), transposed, interpret)


for _family in (gated_matmul, input_gradient):
    _family.maker.transposes = {"transpose_b": ("w", "up")}  # type: ignore[attr-defined]
