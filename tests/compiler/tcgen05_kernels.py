"""Kernels of one tcgen05 product, by parameters, with what NumPy says of it."""

import dataclasses

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

F8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
E2M1, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu


def bits(dtype):
    return 4 if np.dtype(dtype) == E2M1 else np.dtype(dtype).itemsize * 8


def random(rng, shape, dtype):
    """Small numbers, whose products and sums are exact."""
    if np.dtype(dtype) == E2M1:
        return rng.choice([-2, -1, -0.5, 0, 0.5, 1, 1.5, 3], shape).astype(dtype)
    low = 0 if np.dtype(dtype) == np.uint8 else -3
    return rng.integers(low, 250 if low == 0 else 4, shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Product:
    """D (m, n) = A (m, k) B (k, n); of a pair of blocks, m rows and n / 2 columns of B each."""

    m: int = 128
    n: int = 128
    k: int = 64
    a: object = np.float16
    b: object = None
    d: object = np.float32
    a_swizzle: int = 128
    b_swizzle: int = 128
    a_mn_major: bool = False
    b_k_major: bool = False
    a_in_tmem: bool = False
    steps: int = 1  # products that are added up
    pair: bool = False
    scale: object = None
    block: int = 32
    sparse: bool = False

    @property
    def blocks(self):
        return 1 + self.pair

    @property
    def columns(self):
        """Of B in one block."""
        return self.n // self.blocks

    @property
    def k_of_a(self):
        return self.k // (1 + self.sparse)

    def transforms(self, swizzle, dtype):
        return (
            plgpu.TilingTransform((8, 8 * swizzle // bits(dtype))),
            plgpu.SwizzleTransform(swizzle),
        )

    def smem(self, shape, swizzle, dtype, mn_major):
        shape = shape[::-1] if mn_major else shape
        return plgpu.SMEM(shape, dtype, transforms=self.transforms(swizzle, dtype))

    @property
    def scratch(self):
        b = self.b or self.a
        out = dict(
            a_smem=self.smem((self.m, self.k_of_a), self.a_swizzle, self.a, self.a_mn_major),
            b_smem=self.smem((self.columns, self.k), self.b_swizzle, b, not self.b_k_major),
            acc=plgpu.TMEM(
                (self.m, self.n),
                self.d,
                collective=self.pair,
                packed=None if bits(self.d) == 32 else False,
            ),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        )
        if self.a_in_tmem:
            packed = None if bits(self.a) == 32 else True
            out["a_tmem"] = plgpu.TMEM(
                (self.m, self.k_of_a), self.a, packed=packed, collective=self.pair
            )
        if self.pair:
            out["meet"] = plgpu.ClusterBarrier(collective_axes=("pair",))
            out["free"] = plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core=True)
        return out

    def body(self, a, b, o, *, a_smem, b_smem, acc, full, done, a_tmem=None, meet=None, free=None):
        rank = lax.axis_index("pair") if self.pair else 0
        axis = "pair" if self.pair else None

        def step(s, _):
            plgpu.copy_gmem_to_smem(a.at[s, rank], a_smem, full)
            plgpu.copy_gmem_to_smem(b.at[s, rank], b_smem, full)
            plgpu.barrier_wait(full)
            if self.pair:
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)
            left = a_smem.T if self.a_mn_major else a_smem
            if self.a_in_tmem:
                plgpu.async_copy_smem_to_tmem(a_smem, a_tmem, axis)
                left = a_tmem
            right = b_smem.T if self.b_k_major else b_smem
            plgpu.tcgen05_mma(acc, left, right, done, accumulate=s > 0, collective_axis=axis)
            plgpu.barrier_wait(done)

        lax.fori_loop(0, self.steps, step, None)
        if self.m == 64:  # cannot be sliced
            o[rank] = plgpu.async_load_tmem(acc)
            return
        for at in range(0, self.n, 64):
            part = pl.ds(at, min(64, self.n - at))
            o[rank, :, part] = plgpu.async_load_tmem(acc.at[:, part])

    def kernel(self, **options):
        cluster = dict(cluster=(2,), cluster_names=("pair",)) if self.pair else {}
        return plgpu.kernel(
            self.body,
            out_type=np.zeros((self.blocks, self.m, self.n), self.d),
            scratch_types=self.scratch,
            **cluster,
            **options,
        )

    def operands(self, rng):
        """A and B as they lie in GMEM: [step][block] of what one block has in SMEM."""
        b = self.b or self.a
        lead = (self.steps, self.blocks)
        x = random(rng, (*lead, self.m, self.k_of_a), self.a)
        y = random(rng, (*lead, self.columns, self.k), b)
        if self.a_mn_major:
            x = np.ascontiguousarray(np.swapaxes(x, 2, 3))
        if not self.b_k_major:
            y = np.ascontiguousarray(np.swapaxes(y, 2, 3))
        return x, y

    def expected(self, x, y):
        x, y = x.astype(np.float64), y.astype(np.float64)
        if self.a_mn_major:
            x = np.swapaxes(x, 2, 3)
        if self.b_k_major:
            y = np.swapaxes(y, 2, 3)
        right = np.concatenate([y[:, k] for k in range(self.blocks)], -1)
        return np.einsum("sbmk,skn->bmn", x, right).astype(self.d)


