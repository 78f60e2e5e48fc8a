"""Tensor memory: what is stored is loaded, in every layout; views, unions, scopes, the plan of the
columns, and the messages of mistakes. Without a GPU, on the interpreter."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine.run import run as run_on_machine

F32, F16, U8 = np.float32, np.float16, np.uint8
E4M3, E8M0, U2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.uint2
LAYOUTS = plgpu.TMEMLayout
NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE


def shaped(shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def call(body, outs, *args, scratch=(), **options):
    kernel = plgpu.kernel(body, out_type=outs, scratch_types=scratch, interpret=True, **options)
    return kernel(*args)


def numbers(rng, shape, dtype):
    return rng.integers(1, 7, shape).astype(dtype)


@pytest.mark.parametrize(
    "shape, dtype, options, layout",
    [
        ((128, 64), F32, {}, None),
        ((128, 64), F32, {}, NATIVE(2)),
        ((128, 64), np.int32, {}, NATIVE(1)),
        ((128, 12), F32, {}, None),
        ((128, 64), F16, {"packed": True}, None),
        ((128, 64), F16, {"packed": True}, NATIVE(2)),
        ((128, 64), F16, {"packed": False}, None),
        ((128, 64), F16, {"packed": False}, NATIVE(2)),
        ((128, 64), E4M3, {"packed": True}, None),
        ((64, 64), F32, {}, None),
        ((64, 64), F16, {"packed": True}, plgpu.Layout.WGMMA),
        ((64, 96), F32, {"layout": LAYOUTS.M64_COLLECTIVE_LAYOUT(96)}, None),
        (
            (64, 64),
            F16,
            {"layout": LAYOUTS.M64_COLLECTIVE_LAYOUT(64, packing=2)},
            plgpu.Layout.TCGEN05_M64_COLLECTIVE_NATIVE(64, 2),
        ),
        ((128, 16), E8M0, {"layout": LAYOUTS.SCALES_LAYOUT}, None),
    ],
)
def test_what_is_stored_is_loaded(shape, dtype, options, layout, rng):
    """Whole, and then columns of it; a second ref beside it keeps its own."""
    x = numbers(rng, shape, dtype)

    def body(x_ref, o_ref, *, near, tmem, after):
        plgpu.async_store_tmem(near, jnp.full((128, 8), -1.0, F32))
        plgpu.async_store_tmem(tmem, plgpu.load(x_ref, optimized=False))
        plgpu.async_store_tmem(after, jnp.full((128, 8), -1.0, F32))
        plgpu.commit_tmem()
        o_ref[...] = plgpu.async_load_tmem(tmem, layout=layout)

    scratch = dict(
        near=plgpu.TMEM((128, 8), F32),
        tmem=plgpu.TMEM(shape, dtype, **options),
        after=plgpu.TMEM((128, 8), F32),
    )
    got = call(body, shaped(shape, dtype), x, scratch=scratch)
    np.testing.assert_array_equal(got, x)


def test_columns_and_batches(rng):
    """Static and traced slices of columns, matrices of a batch by static and traced numbers."""
    x = rng.standard_normal((2, 128, 64)).astype(F32)

    def body(x_ref, o_ref, tmem):
        plgpu.async_store_tmem(tmem, x_ref[...])
        plgpu.commit_tmem()
        for k in range(2):
            o_ref[k, :, :16] = plgpu.async_load_tmem(tmem.at[k, :, 48:])

        @pl.loop(0, 2)
        def _(k):
            @pl.loop(0, 3)
            def _(j):
                part = tmem.at[1 - k].at[:, pl.ds(j * 16, 16)]
                o_ref[1 - k, :, pl.ds((j + 1) * 16, 16)] = plgpu.async_load_tmem(part)

    scratch = [plgpu.TMEM((2, 128, 64), F32)]
    got = call(body, shaped((2, 128, 64)), x, scratch=scratch)
    np.testing.assert_array_equal(got, np.roll(x, 16, axis=2))


def test_unions(rng):
    """Groups begin at one column and end apart; what a group holds is what was stored by it."""
    x = rng.standard_normal((128, 128)).astype(F32)

    def body(x_ref, o_ref, union, other):
        a, (b, c) = union
        plgpu.async_store_tmem(other, x_ref[...] + 3)
        plgpu.async_store_tmem(a, x_ref[...])
        plgpu.commit_tmem()
        o_ref[0] = plgpu.async_load_tmem(a)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(b, (x_ref[...] + 1).astype(F16))
        plgpu.async_store_tmem(c, x_ref[:, :64] + 2)
        plgpu.commit_tmem()
        o_ref[1] = plgpu.async_load_tmem(b).astype(F32)
        o_ref[2, :, :64] = plgpu.async_load_tmem(c)
        o_ref[2, :, 64:] = plgpu.async_load_tmem(other.at[:, 64:])

    union = plgpu.RefUnion(
        plgpu.TMEM((128, 128), F32),
        [plgpu.TMEM((128, 128), F16, packed=True), plgpu.TMEM((128, 64), F32)],
    )
    kernel = plgpu.kernel(
        body,
        out_type=shaped((3, 128, 128)),
        scratch_types=[union, plgpu.TMEM((128, 128), F32)],
        interpret=True,
    )
    got = kernel(x)
    np.testing.assert_array_equal(got[0], x)
    np.testing.assert_array_equal(got[1], (x + 1).astype(F16))
    np.testing.assert_array_equal(got[2], np.concatenate([x[:, :64] + 2, x[:, 64:] + 3], 1))
    assert " tmem 256 " in kernel.lower(x, target="sm_100a").as_text("graph")


def test_rows_that_a_load_reduces(rng):
    x = rng.standard_normal((128, 32)).astype(F32)
    x[3, 5] = np.nan

    def body(x_ref, o_ref, r_ref, tmem):
        plgpu.async_store_tmem(tmem, x_ref[...])
        plgpu.commit_tmem()
        for k, reduce in enumerate(("max", "min", "absmax", "absmin")):
            value, reduced = plgpu.async_load_tmem(tmem, reduce=reduce)
            o_ref[...] = value
            r_ref[k] = reduced

    kernel = plgpu.kernel(
        body,
        out_type=(shaped((128, 32)), shaped((4, 128))),
        scratch_types=[plgpu.TMEM((128, 32), F32)],
        interpret=True,
    )
    o, r = kernel(x)
    np.testing.assert_array_equal(o, x)
    want = [x.max(1), x.min(1), np.abs(x).max(1), np.abs(x).min(1)]
    np.testing.assert_array_equal(r, want)
    with pytest.raises(NotImplementedError, match="sm_100a lacks .*sm_103a.*jnp.max"):
        kernel.lower(x, target="sm_100a")
    kernel.lower(x, target="sm_103a")


def test_scopes_share_columns(rng):
    """Scopes that follow each other use the same columns, nested ones others. The allocation is a
    power of two."""
    x = rng.standard_normal((128, 256)).astype(F32)

    def body(x_ref, o_ref, outer):
        plgpu.async_store_tmem(outer, x_ref[...])
        plgpu.commit_tmem()

        def inner(tmem):
            plgpu.async_store_tmem(tmem, x_ref[:, :192] * 2)
            plgpu.commit_tmem()
            o_ref[:, :192] = plgpu.async_load_tmem(tmem)
            plgpu.wait_load_tmem()

        for _ in range(3):
            pl.run_scoped(inner, plgpu.TMEM((128, 192), F32))
        o_ref[:, 192:] = plgpu.async_load_tmem(outer.at[:, 192:])

    kernel = plgpu.kernel(
        body,
        out_type=shaped((128, 256)),
        scratch_types=[plgpu.TMEM((128, 256), F32)],
        interpret=True,
    )
    np.testing.assert_array_equal(kernel(x), np.concatenate([x[:, :192] * 2, x[:, 192:]], 1))
    assert " tmem 512 " in kernel.lower(x, target="sm_100a").as_text("graph")


def test_too_many_columns():
    """The message is a table of what is live, with the lines that allocate it."""

    def body(o_ref, accumulator, scales, staged):
        def inner(probabilities):
            plgpu.async_store_tmem(accumulator, jnp.zeros((128, 384), F32))
            plgpu.async_store_tmem(probabilities, jnp.zeros((128, 256), F16))
            plgpu.async_copy_scales_to_tmem(staged, scales)
            o_ref[...] = plgpu.async_load_tmem(probabilities)

        pl.run_scoped(inner, plgpu.TMEM((128, 256), F16, packed=True))

    scratch = [
        plgpu.TMEM((128, 384), F32),
        plgpu.TMEM((256, 16), E8M0, layout=LAYOUTS.SCALES_LAYOUT),
        plgpu.SMEM((2, 4, 32, 16), E8M0),
    ]
    out = shaped((128, 256), F16)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=True)
    with pytest.raises(ValueError, match="needs 544 columns of TMEM, a block has 512") as caught:
        kernel()
    for row in (
        r"384 +0 +accumulator +tmem float32\[128,384\], default, 1 in 32 bits, at .*\.py:\d+",
        r"32 +384 +scales +tmem float8_e8m0fnu\[256,16\], scales, 4 in 32 bits",
        r"128 +416 +probabilities +tmem float16\[128,256\], default, 2 in 32 bits",
    ):
        assert re.search(row, str(caught.value)), row


def test_what_follows_a_union():
    """It begins after the largest group, not after the last one."""

    def body(o_ref, union, other):
        largest, last = union
        o_ref[...] = plgpu.async_load_tmem(other) + plgpu.async_load_tmem(largest.at[:, :64])
        o_ref[:, :32] = plgpu.async_load_tmem(last)

    union = plgpu.RefUnion(plgpu.TMEM((128, 128), F32), plgpu.TMEM((128, 32), F32))
    scratch = [union, plgpu.TMEM((128, 64), F32)]
    kernel = plgpu.kernel(body, out_type=shaped((128, 64)), scratch_types=scratch)
    text = kernel.lower().as_text("graph")
    assert re.findall(r"alloc_tmem .*offset = (\d+)", text) == ["0", "0", "128"]
    assert " tmem 256 " in text


def test_one_unit_too_many():
    def body(o_ref, a, b):
        o_ref[...] = plgpu.async_load_tmem(b) + plgpu.async_load_tmem(a.at[:, :4])

    scratch = [plgpu.TMEM((128, 512), F32), plgpu.TMEM((128, 4), F32)]
    with pytest.raises(ValueError, match="needs 516 columns of TMEM, a block has 512"):
        call(body, shaped((128, 4)), scratch=scratch)


def test_refs_that_nobody_accesses_take_no_columns():
    def body(o, used, *unused):
        plgpu.async_store_tmem(used, jnp.ones((128, 256), F32))
        plgpu.commit_tmem()
        o[...] = plgpu.async_load_tmem(used)

    out = plgpu.ShapeDtypeStruct((128, 256), F32)
    scratch = [plgpu.TMEM((128, 256), F32)] * 3
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=True)
    assert " tmem 256 " in kernel.lower(target="sm_100a").as_text("graph")
    np.testing.assert_array_equal(kernel(), np.ones((128, 256), F32))


def test_parts_of_tensor_memory(rng):
    """Numbers of a batch and slices of columns, static and not: on the interpreter and the emulated
    machine."""
    x = rng.standard_normal((2, 128, 64)).astype(F32)

    def body(x_ref, o_ref, batch, halves, packed):
        i = lax.axis_index("i")
        out = o_ref.at[i]
        for k in range(2):
            plgpu.async_store_tmem(batch.at[k], x_ref[k])
            plgpu.async_store_tmem(halves.at[k], x_ref[k, 64:])
            plgpu.async_store_tmem(packed.at[k], x_ref[k].astype(F16))
        plgpu.commit_tmem()
        at = pl.multiple_of(i * 32, 32)
        out[0, :, :32] = plgpu.async_load_tmem(batch.at[1 - i, :, pl.ds(at, 32)])
        out[0, :, 32:] = plgpu.async_load_tmem(batch.at[1, :, 16:48])
        out[1, :64] = plgpu.async_load_tmem(halves.at[1])
        out[1, 64:] = plgpu.async_load_tmem(halves.at[i])
        out[2, :, :32] = plgpu.async_load_tmem(packed.at[i, :, 32:]).astype(F32)
        out[2, :, 32:] = plgpu.async_load_tmem(packed.at[1, :, pl.ds(at, 32)]).astype(F32)

    options = dict(
        out_type=shaped((2, 3, 128, 64)),
        grid=(2,),
        grid_names=("i",),
        scratch_types=[
            plgpu.TMEM((2, 128, 64), F32),
            plgpu.TMEM((2, 64, 64), F32),
            plgpu.TMEM((2, 128, 64), F16, packed=True),
        ],
    )
    want = np.zeros((2, 3, 128, 64), F32)
    for i in range(2):
        at = slice(32 * i, 32 * i + 32)
        want[i, 0] = np.concatenate([x[1 - i, :, at], x[1, :, 16:48]], 1)
        want[i, 1] = np.concatenate([x[1, 64:], x[i, 64:]])
        want[i, 2] = np.concatenate([x[i, :, 32:], x[1, :, at]], 1).astype(F16)
    got = plgpu.kernel(body, interpret=True, **options)(x)
    np.testing.assert_array_equal(got, want)
    run_on_machine(plgpu.kernel(body, **options).lower(x, target="sm_100a"), [x], [got])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("columns, blocks, pair, apart", [
    (512, 2, False, True), (256, 4, False, True), (256, 2, False, False), (512, 2, True, False),
])  # fmt: skip
def test_clusters_that_share_a_multiprocessor(columns, blocks, pair, apart):
    """Blocks that wait for each other are never more on a multiprocessor than it has columns for:
    an allocation would wait for ever. The emulated machine puts as many there as fit."""

    def body(o_ref, tmem, met):
        rank = lax.axis_index("c")
        plgpu.async_store_tmem(tmem.at[:, :8], jnp.full((128, 8), rank, F32))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        o_ref[rank] = plgpu.async_load_tmem(tmem.at[:, :8])

    kernel = plgpu.kernel(
        body,
        out_type=shaped((blocks, 128, 8)),
        cluster=(blocks,),
        cluster_names=("c",),
        scratch_types=[
            plgpu.TMEM((128, columns), F32, collective=pair),
            plgpu.ClusterBarrier(collective_axes=("c",)),
        ],
    )
    lowered = kernel.lower(target="sm_100a")
    used = int(re.search(r"(\d+) bytes of dynamic", lowered.as_text("cuda"))[1])
    assert (used > (228 << 10) // (512 // columns + 1) - 1024) == apart
    for seed in range(6):
        got = np.zeros((blocks, 128, 8), F32)
        run_on_machine(lowered, [], [got], seed=seed)
        np.testing.assert_array_equal(got[:, 0, 0], np.arange(blocks))


def test_print_layout(capfd):
    def body(o_ref, a, b, c):
        plgpu.print_layout("a: {}", a)
        plgpu.print_layout("b: {}", b.at[:, :32])
        plgpu.print_layout("c: {}", c)
        plgpu.print_layout("x: {}", plgpu.async_load_tmem(a))

    scratch = [
        plgpu.TMEM((128, 64), F32),
        plgpu.TMEM((128, 64), F16, packed=True),
        plgpu.TMEM((128, 64), U2, layout=LAYOUTS.SPARSE_METADATA_LAYOUT),
    ]
    plgpu.kernel(body, out_type=shaped((8,)), scratch_types=scratch).lower(target="sm_100a")
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        "a: TMEM_DEFAULT(packing=1)",
        "b: TMEM_DEFAULT(packing=2)",
        "c: TMEMLayout.SPARSE_METADATA_LAYOUT",
        "x: TCGEN05",
    ]


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, why",
    [
        (lambda: plgpu.TMEM((96, 64), F32), ValueError, "128 or 64, got 96"),
        (lambda: plgpu.TMEM((128,), F32), ValueError, "rows, columns"),
        (lambda: plgpu.TMEM((128, 64), F16), ValueError, "packed or layout is needed for float16"),
        (
            lambda: plgpu.TMEM((128, 4), E8M0, packed=True, layout=LAYOUTS.SCALES_LAYOUT),
            ValueError,
            "cannot both",
        ),
        (
            lambda: plgpu.TMEM((128, 64), F32, transforms=plgpu.TilingTransform((8, 32))),
            ValueError,
            "transforms are for SMEM",
        ),
        (
            lambda: plgpu.TMEM((64, 64), F32, layout=LAYOUTS.M64_COLLECTIVE_LAYOUT),
            ValueError,
            "number of columns",
        ),
        (
            lambda: plgpu.TMEM((64, 64), F32, layout=LAYOUTS.M64_COLLECTIVE_LAYOUT(32)),
            ValueError,
            "for 64 columns",
        ),
        (lambda: plgpu.TMEM((128, 64), F32, layout="scales"), TypeError, "TMEMLayout"),
        (
            lambda: plgpu.TMEM((128, 63), F16, packed=True),
            ValueError,
            r"float16\[128,63\]: 63 columns in the layout default; a multiple of 2",
        ),
        (lambda: plgpu.TMEM((64, 24), F32), ValueError, "24 columns in the layout half_lane"),
        (
            lambda: plgpu.TMEM((128, 8), F16, layout=LAYOUTS.SCALES_LAYOUT),
            ValueError,
            "scales have 8 bits, not float16",
        ),
        (
            lambda: plgpu.TMEM((64, 64), U2, layout=LAYOUTS.SPARSE_METADATA_LAYOUT),
            ValueError,
            "64 rows in the layout sparse_metadata; it has 128",
        ),
        (
            lambda: plgpu.RefUnion(plgpu.SMEM((3,), ml_dtypes.int4), plgpu.SMEM((8,), F32)),
            ValueError,
            "does not fill its last byte",
        ),
        (lambda: plgpu.TryClusterCancelResult(0), ValueError, "at least 1, got 0"),
        (lambda: LAYOUTS.M64_COLLECTIVE_LAYOUT(40), ValueError, "multiple of 16"),
        (lambda: LAYOUTS.M64_COLLECTIVE_LAYOUT(64, 16), ValueError, "1, 2, 4 or 8"),
        (lambda: LAYOUTS.SCALES_LAYOUT(4), ValueError, "no arguments"),
        (
            lambda: plgpu.SMEM((64, 64), F32, collective=True),
            ValueError,
            "only TMEM takes .*collective=True",
        ),
        (
            lambda: plgpu.RefUnion(plgpu.SMEM((8,), F32), plgpu.TMEM((128, 8), F32)),
            NotImplementedError,
            "SMEM and TMEM",
        ),
        (
            lambda: plgpu.RefUnion(
                plgpu.TMEM((128, 8), F32), plgpu.TMEM((128, 8), F32, collective=True)
            ),
            ValueError,
            "must agree",
        ),
    ],
)
def test_descriptors(make, error, why):
    with pytest.raises(error, match=why):
        make()


A, H = plgpu.TMEM((128, 64), F32), plgpu.TMEM((64, 64), F32)
BATCH = plgpu.TMEM((2, 128, 64), F32)


@pytest.mark.parametrize(
    "use, of, error, why",
    [
        (lambda t: t[...], A, RuntimeError, "async_load_tmem"),
        (lambda t: t.set(jnp.zeros((128, 64), F32)), A, RuntimeError, "async_store_tmem"),
        (lambda t: t.at[:64], A, NotImplementedError, "the rows of TMEM"),
        (lambda t: t.at[0], A, ValueError, "the rows of TMEM, is indexed by an int"),
        (lambda t: t.at[:, 3], A, ValueError, "the columns of TMEM, is indexed by an int"),
        (lambda t: t.at[:, :32], H, ValueError, "divisible by 64, a tile of its layout half_lane"),
        (lambda t: t.at[:, 1:33], plgpu.TMEM((128, 64), F16, packed=True), ValueError, "by 2"),
        (lambda t: t.at[:1], BATCH, NotImplementedError, "a batch of TMEM"),
        (lambda t: t.T, A, ValueError, "a ref in GMEM or SMEM is needed"),
        (lambda t: t.reshape(64, 128), A, ValueError, "a ref in GMEM or SMEM is needed"),
        (lambda t: plgpu.async_load_tmem(t), BATCH, ValueError, "index its batch"),
        (
            lambda t: plgpu.async_load_tmem(t, reduce="sum"),
            A,
            ValueError,
            "one of max, min, absmax, absmin",
        ),
        (
            lambda t: plgpu.async_load_tmem(t, reduce="absmax"),
            plgpu.TMEM((128, 64), np.int32),
            ValueError,
            "float32 takes max, min, absmax and absmin",
        ),
        (
            lambda t: plgpu.async_load_tmem(t, reduce="max"),
            H,
            ValueError,
            r"float32\[64,64\] in the layout half_lane; a ref of 128 rows",
        ),
        (
            lambda t: plgpu.async_store_tmem(t, jnp.zeros((128, 32), F32)),
            A,
            ValueError,
            "must be equal",
        ),
        (
            lambda t: plgpu.async_load_tmem(t),
            plgpu.TMEM((128, 64), U2, layout=LAYOUTS.SPARSE_METADATA_LAYOUT),
            NotImplementedError,
            "sparse metadata",
        ),
        (
            lambda t: plgpu.async_store_tmem(t, jnp.zeros((64, 48), np.int8)),
            plgpu.TMEM((64, 48), np.int8, layout=LAYOUTS.M64_COLLECTIVE_LAYOUT(48, 2)),
            ValueError,
            r"async_store_tmem of int8\[64,48\] .*packed 2 to 32 bits.*use packing=4",
        ),
        (
            lambda t: plgpu.async_load_tmem(t),
            plgpu.TMEM((256, 8), E8M0, layout=LAYOUTS.SCALES_LAYOUT),
            NotImplementedError,
            "at most 128 rows",
        ),
        (
            lambda t: plgpu.async_load_tmem(t, layout=plgpu.Layout.WGMMA),
            A,
            ValueError,
            "Failed to infer.*is loaded and stored in tcgen05",
        ),
        (
            lambda t: plgpu.async_load_tmem(t),
            plgpu.TMEM((128, 64), E4M3, packed=False),
            ValueError,
            "Failed to infer.*packed=True",
        ),
        (lambda t: plgpu.async_load_tmem(plgpu.Barrier), A, TypeError, "must be a ref"),
        (
            lambda t: plgpu.inline_cuda("", arg_types=(plgpu.RefType(),))(t),
            A,
            NotImplementedError,
            "is in TMEM; load it first",
        ),
    ],
)
def test_uses(use, of, error, why):
    """At the user's line, when the kernel is traced or lowered."""

    def body(o_ref, tmem):
        found = use(tmem)
        if isinstance(found, plgpu.Array):
            pl.debug_print("{}", found)

    with pytest.raises(error, match=why) as caught:
        call(body, shaped((8,)), scratch=[of])
    assert "test_tmem.py" in str(caught.value)


def test_memory_of_one_thread():
    def body(o_ref):
        pl.run_scoped(lambda t: None, plgpu.TMEM((128, 8), F32))

    with pytest.raises(NotImplementedError, match="TMEM of a single thread"):
        call(body, shaped((8,)), num_threads=2, thread_name="t")


def test_mixed_with_pairs():
    def body(o_ref, a, b):
        o_ref[...] = plgpu.async_load_tmem(a) + plgpu.async_load_tmem(b)

    scratch = [plgpu.TMEM((128, 8), F32), plgpu.TMEM((128, 8), F32, collective=True)]
    with pytest.raises(ValueError, match="collective=True and some without"):
        call(body, shaped((128, 8)), scratch=scratch, cluster=(2,), cluster_names=("c",))
    with pytest.raises(ValueError, match="two along the last cluster axis, which has size 1"):
        call(body, shaped((128, 8)), scratch=scratch)


def test_targets():
    """A kernel is lowered for the GPU that has what it uses, and refused elsewhere with what to use
    there, at the user's line."""

    def tensor_memory(o_ref, tmem):
        o_ref[...] = plgpu.async_load_tmem(tmem)

    def accumulator(x_ref, o_ref, a):
        def inner(acc):
            @pl.loop(0, 2)
            def _(_):
                plgpu.wgmma(acc, a, a.T)

            o_ref[...] = acc[...]

        a[...] = x_ref[...]
        plgpu.commit_smem()
        pl.run_scoped(inner, plgpu.ACC((64, 64)))

    blackwell = plgpu.kernel(
        tensor_memory, out_type=shaped((128, 64)), scratch_types=[plgpu.TMEM((128, 64), F32)]
    )
    assert "target sm_100a" in blackwell.lower().as_text("graph")
    with pytest.raises(NotImplementedError, match="sm_90a lacks.*plgpu.wgmma") as caught:
        blackwell.lower(target="sm_90a")
    assert "async_load_tmem" in str(caught.value) and "test_tmem.py" in str(caught.value)
    x = np.zeros((64, 64), F16)
    hopper = plgpu.kernel(
        accumulator, out_type=shaped((64, 64)), scratch_types=[plgpu.SMEM((64, 64), F16)]
    )
    assert "target sm_90a" in hopper.lower(x).as_text("graph")
    with pytest.raises(NotImplementedError, match="sm_100a lacks.*plgpu.tcgen05_mma"):
        hopper.lower(x, target="sm_100a")


def test_leader_tracked_copies_of_other_targets():
    def body(x_ref, o_ref, smem, barrier):
        how = dict(collective_axes="c", leader_tracked=plgpu.CopyPartition.REPLICATED)
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier, **how)

    x = np.zeros((128, 64), F16)
    options = dict(cluster=(2,), cluster_names=("c",))
    scratch = [plgpu.SMEM((128, 64), F16), plgpu.Barrier()]
    kernel = plgpu.kernel(body, out_type=shaped((8,)), scratch_types=scratch, **options)
    assert "target sm_100a" in kernel.lower(x).as_text("graph")
    with pytest.raises(NotImplementedError, match="sm_90a lacks") as caught:
        kernel.lower(x, target="sm_90a")
    assert re.search(r"leader_tracked(.|\n)*test_tmem\.py:\d+", str(caught.value))


# ---- host functions ------------------------------------------------------------------------------


def test_scales_on_the_host(rng):
    """Row r of 32 q + r, scale 4 t + j lies in tile t, row r, byte 4 q + j."""
    scales = rng.integers(0, 255, (200, 8)).astype(U8)
    out = plgpu.ext.format_tcgen05_scales(scales)
    assert out.shape == (2, 2, 32, 16)
    for row, k in ((0, 0), (37, 5), (131, 7), (199, 2)):
        assert out[row // 128, k // 4, row % 32, row % 128 // 32 * 4 + k % 4] == scales[row, k]
    assert not out[1, :, 8:, 8:].any()
    pair = plgpu.ext.format_tcgen05_scales(scales[:128], m64_collective=True)
    assert pair.shape == (1, 2, 64, 16)
    for row, k in ((0, 0), (37, 5), (100, 7)):
        half, rest = row // 64, row % 64
        assert pair[0, k // 4, half * 32 + rest % 32, rest // 32 * 4 + k % 4] == scales[row, k]
    with pytest.raises(ValueError, match="multiple of 4"):
        plgpu.ext.format_tcgen05_scales(scales[:, :6])
    with pytest.raises(ValueError, match="64, 128, 192 or 256"):
        plgpu.ext.format_tcgen05_scales(scales, m64_collective=True)


def test_metadata_on_the_host(rng):
    meta = rng.integers(0, 4, (256, 64, 2)).astype(U2)
    flat = meta.reshape(256, 128)
    out = plgpu.format_tcgen05_sparse_metadata(meta, np.int8)
    assert out.shape == (2, 2, 128, 64) and out[1, 1, 5, 7] == flat[133, 71]
    out = plgpu.format_tcgen05_sparse_metadata(meta)
    assert out.shape == (2, 2, 128, 64)
    m, k = 128 + 3 * 16 + 8 + 5, 64 + 2 * 16 + 8 + 6
    assert out[1, 1, 3 * 16 + 8 + 5, 2 * 16 + 8 + 6] == flat[m, k]
    for bad, error, why in (
        (meta.astype(U8), ValueError, "must be uint2"),
        (flat, ValueError, "groups, 2"),
        (meta[:100], ValueError, "multiple of 128"),
    ):
        with pytest.raises(error, match=why):
            plgpu.format_tcgen05_sparse_metadata(bad)
    with pytest.raises(NotImplementedError, match="16 and 8"):
        plgpu.format_tcgen05_sparse_metadata(meta, F32)
