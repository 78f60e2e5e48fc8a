"""Kernels of one tcgen05 product, by parameters, with what NumPy says of it."""

import dataclasses
import functools

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu._tmem import format_tcgen05_scales as _format_scales

F8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
LAYOUTS = plgpu.TMEMLayout
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
            full=plgpu.Barrier(num_arrivals=2 + 2 * (self.scale is not None) + self.sparse),
            done=plgpu.Barrier(orders_tensor_core=True),
        )
        if self.a_in_tmem:
            packed = None if bits(self.a) == 32 else True
            out["a_tmem"] = plgpu.TMEM(
                (self.m, self.k_of_a), self.a, packed=packed, collective=self.pair
            )
        if self.scale is not None:
            for x, shape, layout in zip("ab", self.scale_tiles, self.scale_layouts, strict=True):
                rows = 256 if shape[2] == 64 else 128 * shape[0]
                n = self.k // self.block
                out[f"{x}_scale_smem"] = plgpu.SMEM(shape, self.scale)
                out[f"{x}_scale"] = plgpu.TMEM(
                    (rows, n), self.scale, layout=layout, collective=self.pair
                )
        if self.sparse:
            n = self.k // (4 if bits(self.a) == 4 else 2)
            out["meta_smem"] = plgpu.SMEM((1, n // 64, 128, 64), ml_dtypes.uint2)
            out["meta"] = plgpu.TMEM(
                (128, n), ml_dtypes.uint2, layout=LAYOUTS.SPARSE_METADATA_LAYOUT,
                collective=self.pair,
            )  # fmt: skip
        if self.pair:
            out["meet"] = plgpu.ClusterBarrier(collective_axes=("pair",))
        return out

    @property
    def folds(self):
        """64 rows in each block of a pair: half of the lanes have half of the scales of B."""
        return self.pair and self.m == 64

    @property
    def scale_tiles(self):
        """Shapes of the scales of A and B in SMEM. Both blocks of a pair have all of B's."""
        k = self.k // self.block // 4
        b = (1, k, 64, 16) if self.folds else (-(-self.n // 128), k, 32, 16)
        return (1, k, 32, 16), b

    @property
    def scale_layouts(self):
        folded = LAYOUTS.SCALES_M64_COLLECTIVE_LAYOUT
        return LAYOUTS.SCALES_LAYOUT, folded if self.folds else LAYOUTS.SCALES_LAYOUT

    def body(self, a, b, *refs, a_smem, b_smem, acc, full, done, a_tmem=None, meet=None, **more):
        *refs, o = refs
        rank = lax.axis_index("pair") if self.pair else 0
        axis = "pair" if self.pair else None
        extra = [n for n in ("a_scale", "b_scale", "meta") if n in more]
        names = dict(a_scale="a_scale", b_scale="b_scale", meta="a_sparse_metadata")

        def step(s, _):
            plgpu.copy_gmem_to_smem(a.at[s, rank], a_smem, full)
            plgpu.copy_gmem_to_smem(b.at[s, rank], b_smem, full)
            for name, ref in zip(extra, refs, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[s, rank], more[f"{name}_smem"], full)
            plgpu.barrier_wait(full)
            if self.pair:
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)
            left = a_smem.T if self.a_mn_major else a_smem
            if self.a_in_tmem:
                plgpu.async_copy_smem_to_tmem(a_smem, a_tmem, axis)
                left = a_tmem
            for name in extra:
                copy = plgpu.async_copy_scales_to_tmem
                if name == "meta":
                    copy = plgpu.async_copy_sparse_metadata_to_tmem
                copy(more[f"{name}_smem"], more[name], axis)
            right = b_smem.T if self.b_k_major else b_smem
            kw = {names[name]: more[name] for name in extra}
            plgpu.tcgen05_mma(acc, left, right, done, accumulate=s > 0, collective_axis=axis, **kw)
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
        """What the kernel takes, [step][block] of what one block has in SMEM."""
        b = self.b or self.a
        lead = (self.steps, self.blocks)
        x = random(rng, (*lead, self.m, self.k_of_a), self.a)
        y = random(rng, (*lead, self.columns, self.k), b)
        if self.a_mn_major:
            x = np.ascontiguousarray(np.swapaxes(x, 2, 3))
        if not self.b_k_major:
            y = np.ascontiguousarray(np.swapaxes(y, 2, 3))
        return [x, y, *self.scales(rng), *self.metadata(rng)]

    def scales(self, rng):
        """Powers of two, in rows of A and columns of B."""
        if self.scale is None:
            return []
        n = self.k // self.block
        a = np.exp2(rng.integers(-2, 3, (self.steps, self.blocks, self.m, n)))
        b = np.exp2(rng.integers(-2, 3, (self.steps, 1, self.n, n)))
        return [a.astype(self.scale), np.repeat(b, self.blocks, 1).astype(self.scale)]

    def metadata(self, rng):
        """Which two of each four elements of A are there."""
        if not self.sparse:
            return []
        pairs = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])
        groups = self.k // (8 if bits(self.a) == 4 else 4)
        chosen = rng.integers(0, 6, (self.steps, self.blocks, self.m, groups))
        return [pairs[chosen].astype(ml_dtypes.uint2)]

    def arranged(self, operands):
        """As the tensor core reads them."""
        x, y, *more = operands
        out = [x, y]
        if self.scale is not None:
            for k, folds in enumerate((False, self.folds)):
                shape = self.scale_tiles[k]
                arrange = functools.partial(_format_scales, m64_collective=folds)
                out.append(self.each(arrange, more[k], shape))
            more = more[2:]
        if more:
            kind = np.float16 if bits(self.a) == 16 else np.int8
            n = self.k // (4 if bits(self.a) == 4 else 2)
            arrange = functools.partial(plgpu.format_tcgen05_sparse_metadata, operand_dtype=kind)
            out.append(self.each(arrange, more[0], (1, n // 64, 128, 64)))
        return out

    def each(self, fn, x, shape):
        out = np.zeros((self.steps, self.blocks, *shape), x.dtype)
        for s in range(self.steps):
            for b in range(self.blocks):
                out[s, b] = fn(x[s, b])
        return out

    def expected(self, operands):
        x, y, *more = operands
        x, y = x.astype(np.float64), y.astype(np.float64)
        if self.a_mn_major:
            x = np.swapaxes(x, 2, 3)
        if self.b_k_major:
            y = np.swapaxes(y, 2, 3)
        if self.sparse:
            x = self.dense(x, more[-1])
        right = np.concatenate([y[:, k] for k in range(self.blocks)], -1)
        if self.scale is not None:
            x = x * np.repeat(more[0].astype(np.float64), self.block, -1)
            right = right * np.repeat(more[1][:, 0].astype(np.float64), self.block, -1).swapaxes(
                1, 2
            )
        return np.einsum("sbmk,skn->bmn", x, right).astype(self.d, order="C")

    def dense(self, x, places):
        wide = 2 if bits(self.a) == 4 else 1
        out = np.zeros((*x.shape[:3], self.k // wide, wide))
        x = x.reshape(*x.shape[:3], -1, wide)
        at = places.astype(int).reshape(*places.shape[:3], -1)
        at += np.repeat(np.arange(places.shape[3]) * 4, 2)
        np.put_along_axis(out, at[..., None], x, 3)
        return out.reshape(*x.shape[:3], self.k)
