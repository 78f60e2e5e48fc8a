"""Tilings of any number of dims: what is stored, copied or multiplied through a folded ref is where
the unfolded one says, on every engine. NumPy's reshape is the judge."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl

F16, F32 = np.float16, np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


def swizzled(*tiling, of=F16):
    width = tiling[-1] * np.dtype(of).itemsize
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(width)


def random(rng, shape, dtype=F16):
    return rng.integers(-8, 9, shape).astype(dtype)


FOLDS = {  # shape, tiling, dtype, folded
    "gated": ((64, 2, 128), (8, 1, 64), F16, (64, 256)),
    "gated, one chunk": ((24, 2, 64), (8, 1, 64), BF16, (24, 128)),
    "seven": ((4, 2, 1, 3, 1, 2, 64), (2, 1, 1, 1, 1, 1, 32), BF16, (4, 768)),
    "some of seven": ((4, 2, 1, 3, 1, 2, 64), (2, 1, 1, 1, 1, 1, 32), F16, (4, 6, 128)),
    "rows": ((3, 16, 128), (1, 8, 64), F16, (48, 128)),
    "rows and columns": ((3, 8, 2, 64), (1, 8, 1, 32), F32, (24, 128)),
    "of a slot": ((2, 16, 2, 64), (8, 1, 64), F16, (2, 16, 128)),
    "whole tiles after one": ((16, 4, 4, 16), (8, 2, 4, 16), F16, (16, 4, 64)),
    "none above one": ((6, 4, 64), (1, 1, 64), F16, (24, 64)),
    "without a swizzle": ((8, 6, 12), (2, 3, 4), F32, (8, 6, 12)),
}


@pytest.mark.parametrize("shape, tiling, dtype, folded", FOLDS.values(), ids=FOLDS)
def test_folds(run, rng, shape, tiling, dtype, folded):
    """Stored unfolded and read folded, the other way round, and both by copies."""
    given = swizzled(*tiling, of=dtype) if tiling[-1] > 4 else plgpu.TilingTransform(tiling)
    x = random(rng, shape, dtype)
    y = x.reshape(folded)

    def body(x_ref, y_ref, *rest):
        *outs, smem, bar = rest
        smem[...] = x_ref[...]
        outs[0][...] = smem.reshape(*folded)[...]
        smem.reshape(*folded)[...] = y_ref[...] + jnp.ones((), dtype)
        outs[1][...] = smem[...]
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x_ref, smem, bar)
        plgpu.barrier_wait(bar)
        outs[2][...] = smem.reshape(*folded)[...]
        plgpu.copy_smem_to_gmem(smem.reshape(*folded), outs[3])
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_gmem_to_smem(y_ref, smem.reshape(*folded), bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(smem, outs[4])
        plgpu.wait_smem_to_gmem(0)

    one = np.ones((), dtype)
    want = (y, x + one, y, y, x)
    types = [plgpu.SMEM(shape, dtype, transforms=given), plgpu.Barrier()]
    for a, b in zip(run(body, want, x, y, scratch_types=types), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_random_tilings(run, rng):
    """Slices of the folded view, single indices of untiled dims, and what was unfolded again."""
    for _ in range(3):
        n = int(rng.integers(2, 6))
        tiling = [int(rng.choice([1, 1, 2, 4])) for _ in range(n - 1)] + [32]
        counts = rng.integers(1, 4, n)
        shape = tuple(int(t * c) for t, c in zip(tiling, counts))
        first = max([k for k in range(n - 1) if tiling[k] > 1], default=-1) + 1
        folded = (*shape[:first], int(np.prod(shape[first:])))
        x = random(rng, (2, *shape), BF16)

        def body(x_ref, a_ref, b_ref, c_ref, smem, first=first, shape=shape, folded=folded):
            smem[...] = x_ref[...]
            view = smem.at[1].reshape(*folded)
            a_ref[...] = view[..., 32:] if folded[-1] > 32 else view[...]
            b_ref[...] = view.reshape(*shape)[...]
            perm = (*range(1, len(folded)), 0)
            c_ref[...] = smem.at[0].reshape(*folded).transpose(perm)[...]

        y = x[1].reshape(folded)
        want = (
            np.ascontiguousarray(y[..., 32:] if folded[-1] > 32 else y),
            x[1],
            np.ascontiguousarray(x[0].reshape(folded).transpose((*range(1, len(folded)), 0))),
        )
        types = [plgpu.SMEM(x.shape, BF16, transforms=swizzled(*tiling, of=BF16))]
        for a, b in zip(run(body, want, x, scratch_types=types), want, strict=True):
            np.testing.assert_array_equal(a, b)


def multiply(a_ref, b_ref, out_ref):
    def product(acc):
        plgpu.wgmma(acc, a_ref, b_ref)
        return acc[...]

    out_ref[...] = pl.run_scoped(product, plgpu.ACC(out_ref.shape))


def part(x, *index):
    """Of a ref or of an array."""
    return getattr(x, "at", x)[index]


OPERANDS = {  # shape, tiling, and a view of the ref or the array: an operand with 64 rows
    "gate": ((2, 64, 2, 64), (8, 1, 64), lambda x: part(x, 1).reshape(64, 128)),
    "one of a gate": ((2, 64, 2, 64), (8, 1, 64), lambda x: part(x, 1, slice(None), 1)),
    "half of a gate": (
        (64, 2, 128),
        (8, 1, 64),
        lambda x: part(x.reshape(64, 256), slice(None), slice(64, 192)),
    ),
    "along K": (
        (64, 2, 64),
        (8, 1, 64),
        lambda x: part(x.reshape(64, 128), slice(None), slice(64, None)).T,
    ),
    "rows": ((2, 2, 32, 64), (1, 8, 64), lambda x: part(x, 1).reshape(64, 64)),
    "both": ((2, 32, 2, 64), (1, 8, 1, 64), lambda x: x.reshape(64, 128)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", [True, False], ids=["given", "inferred"])
@pytest.mark.parametrize("shape, tiling, view", OPERANDS.values(), ids=OPERANDS)
def test_products(run, rng, shape, tiling, view, given):
    """Two weights in one operand, (K, 2, N) folded to (K, 2 N), as a gated linear unit has them;
    the same along other dims, and as the left operand."""
    a, b = random(rng, (64, 64)), random(rng, shape)
    exact = view(b).astype(F32)
    want = a.astype(F32) @ exact, exact.T[:64] @ a.astype(F32)

    def body(a_ref, b_ref, o_ref, p_ref, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, bar)
        plgpu.barrier_wait(bar)
        multiply(a_smem, view(b_smem), o_ref)
        multiply(part(view(b_smem).T, slice(64)), a_smem, p_ref)

    types = [
        plgpu.SMEM(a.shape, F16, transforms=swizzled(8, 64) if given else ()),
        plgpu.SMEM(shape, F16, transforms=swizzled(*tiling) if given else ()),
        plgpu.Barrier(num_arrivals=2),
    ]
    for x, y in zip(run(body, want, a, b, scratch_types=types), want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_gated_linear_unit(run, rng):
    """Both products of a gate by one wgmma, in a pipeline whose blocks are tiled by (8, 1, 64)."""
    m, k, n = 64, 192, 64
    x, w = random(rng, (m, k), BF16), random(rng, (k, 2, n), BF16)
    both = np.einsum("mk,kgn->mgn", x.astype(F32), w.astype(F32))
    want = both[:, 0] * np.maximum(both[:, 1], 0)

    def body(x_ref, w_ref, o_ref):
        def scope(acc):
            def step(_, x_smem, w_smem):
                plgpu.wgmma(acc, x_smem, w_smem.reshape(64, 2 * n))
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(k // 64,),
                in_specs=[
                    plgpu.BlockSpec(
                        (m, 64), lambda i: (0, i), transforms=swizzled(8, 64), delay_release=1
                    ),
                    plgpu.BlockSpec(
                        (64, 2, n),
                        lambda i: (i, 0, 0),
                        transforms=swizzled(8, 1, 64),
                        delay_release=1,
                    ),
                ],
                max_concurrent_steps=2,
            )(x_ref, w_ref)
            y = acc[...]
            o_ref[...] = y[:, :n] * jnp.maximum(y[:, n:], 0)

        pl.run_scoped(scope, plgpu.ACC((m, 2 * n)))

    np.testing.assert_array_equal(run(body, want, x, w), want)


REFUSED = {
    "tiled rows and columns": (
        ValueError,
        r"the dimensions 0 of size 16 and 1 of size 128, tiled by 8 and 64",
        (16, 128),
        (8, 64),
        lambda r: r.reshape(-1),
    ),
    "a tile above one, not last": (
        ValueError,
        r"0 of size 16, 1 of size 2 and 2 of size 128, tiled by 8, 1 and 64",
        (16, 2, 128),
        (8, 1, 64),
        lambda r: r.reshape(-1),
    ),
    "first of three": (
        ValueError,
        r"0 of size 16 and 1 of size 2, tiled by 8 and 1",
        (16, 2, 128),
        (8, 1, 64),
        lambda r: r.reshape(32, 128),
    ),
    "an untiled one": (
        NotImplementedError,
        r"0 of size 3 and 1 of size 16 \(tiled by 0 and 8, 0: not tiled\)",
        (3, 16, 128),
        (8, 64),
        lambda r: r.reshape(48, 128),
    ),
    "a cut tile": (ValueError, r"dimension 2 has tiles of 64", (16, 2, 128), (8, 1, 64),
                   lambda r: r.at[:, :, 32:]),
    "an unfold across tiles": (ValueError, r"size 192 that is tiled by 64.*a part of 48",
                               (16, 2, 192), (8, 1, 64), lambda r: r.reshape(16, 2, 4, 48)),
}  # fmt: skip


@pytest.mark.parametrize("error, text, shape, tiling, view", REFUSED.values(), ids=REFUSED)
def test_refused(error, text, shape, tiling, view):
    def body(o_ref, smem):
        smem[...] = jnp.zeros(shape, F16)
        o_ref[...] = view(smem)[...].astype(F32).reshape(-1)[:8]

    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((8,), F32),
        scratch_types=[plgpu.SMEM(shape, F16, transforms=swizzled(*tiling))],
        interpret=True,
    )
    with pytest.raises(error, match=text):
        k()


def test_products_refused():
    """Rows in tiles of 2 are no operand; the message shows the tiling."""

    def body(o_ref, a, b):
        a[...] = jnp.zeros((64, 64), F16)
        b[...] = jnp.zeros((64, 2, 64), F16)
        plgpu.commit_smem()
        multiply(a, b.reshape(64, 128), o_ref)

    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((64, 128), F32),
        scratch_types=[
            plgpu.SMEM((64, 64), F16),
            plgpu.SMEM((64, 2, 64), F16, transforms=swizzled(2, 1, 64)),
        ],
        interpret=True,
    )
    with pytest.raises(ValueError, match=r"was given the tiling \(2, 1, 64\) and a swizzle of 128"):
        k()


def test_transforms_of_refs():
    """As kernels inspect them, the swizzle first, of any view of the allocation; and what they make
    of it."""
    seen = {}
    given = swizzled(8, 1, 64)

    def body(x_ref, o_ref, smem, plain, bar, union):
        seen.update(
            smem=smem.transforms,
            slot=smem.at[1].transforms,
            folded=smem.at[1].reshape(8, 128).T.transforms,
            union=union[0].transforms,
            plain=plain.transforms,
            bar=bar.transforms,
            gmem=x_ref.transforms,
        )
        assert smem.transforms[0].swizzle == 128 and smem.transforms[1].tiling == (8, 1, 64)

        def again(copy):
            copy[...] = x_ref[...]
            o_ref[...] = copy[...]

        pl.run_scoped(again, plgpu.SMEM((8, 2, 64), F16, transforms=smem.transforms[::-1]))

        def step(_, x_smem, o_smem):
            seen["block"] = x_smem.transforms
            o_smem[...] = x_smem[...]

        spec = plgpu.BlockSpec((8, 2, 64), lambda i: (0, 0, 0), transforms=given)
        plgpu.emit_pipeline(step, grid=(1,), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    x = np.arange(8 * 128, dtype=F16).reshape(8, 2, 64)
    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, F16),
        scratch_types=[
            plgpu.SMEM((2, 8, 2, 64), F16, transforms=given),
            plgpu.SMEM((8, 64), F16),
            plgpu.Barrier(),
            plgpu.RefUnion(plgpu.SMEM((8, 64), F32, transforms=plgpu.TilingTransform((8, 32)))),
        ],
        interpret=True,
    )
    np.testing.assert_array_equal(k(x), x)
    for name in ("smem", "slot", "folded", "block"):
        assert seen[name] == given[::-1]
    assert seen["union"] == (plgpu.TilingTransform((8, 32)),)
    assert seen["plain"] == seen["bar"] == seen["gmem"] == ()
