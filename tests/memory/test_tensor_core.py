"""tcgen05 products and copies on the interpreter: pipelines under many schedules, what the race
detector and the checks of misuse find, and the messages of mistakes. test_tcgen05.py has the
products of all shapes, dtypes and layouts."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32, F16, I8 = np.float32, np.float16, np.int8
E4M3, E8M0, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
U2 = ml_dtypes.uint2
SCALES = plgpu.TMEMLayout.SCALES_LAYOUT
MANY = plgpu.InterpretParams(seeds=6, detect_races=True)
SMEM, TMEM, Barrier = plgpu.SMEM, plgpu.TMEM, plgpu.Barrier
load, wait, arrive = plgpu.copy_gmem_to_smem, plgpu.barrier_wait, plgpu.barrier_arrive
mma, commit = plgpu.tcgen05_mma, plgpu.tcgen05_commit_arrive


def shaped(shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def ordering(**kw):
    return Barrier(orders_tensor_core=True, **kw)


def small(rng, shape, dtype=F16):
    return rng.integers(-3, 4, shape).astype(dtype)


def by_warps(*roles):
    """Each warp its role; further warps do nothing."""

    def body():
        warp = lax.axis_index("warp")
        for k, role in enumerate(roles):
            pl.when(warp == k)(role)

    pl.kernel(body, mesh=plgpu.WarpMesh(axis_name="warp"))()


# ---- whole pipelines -----------------------------------------------------------------------------


def persistent(tiles, k, slots=2, step=64, interpret=MANY):
    """A warp that loads, one that multiplies, a warpgroup that stores: with two accumulators the
    store of one tile runs beside the products of the next."""

    def body(a, b, o, *, a_smem, b_smem, acc, full, empty, done, free):
        thread = lax.axis_index("wg")

        def producer():
            @pl.loop(0, tiles * k // step)
            def _(s):
                slot, tile, at = lax.rem(s, slots), lax.div(s, k // step), lax.rem(s, k // step)

                @pl.when(s >= slots)
                def _():
                    wait(empty.at[slot])

                rows, depth = pl.ds(tile * 128, 128), pl.ds(at * step, step)
                load(a.at[rows, depth], a_smem.at[slot], full.at[slot])
                load(b.at[:, depth], b_smem.at[slot], full.at[slot])

        def products():
            @pl.loop(0, tiles)
            def _(tile):
                half = lax.rem(tile, 2)

                @pl.when(tile >= 2)
                def _():
                    wait(free.at[half])

                @pl.loop(0, k // step)
                def _(at):
                    slot = lax.rem(tile * (k // step) + at, slots)
                    wait(full.at[slot])
                    to = acc.at[half]
                    mma(to, a_smem.at[slot], b_smem.at[slot].T, empty.at[slot], accumulate=at > 0)

                commit(done.at[half])

        @pl.when(thread == 0)
        def _():
            by_warps(producer, products)

        @pl.when(thread == 1)
        def _():
            @pl.loop(0, tiles)
            def _(tile):
                half = lax.rem(tile, 2)
                wait(done.at[half])
                value = plgpu.async_load_tmem(acc.at[half])
                plgpu.wait_load_tmem()
                arrive(free.at[half])
                o[pl.ds(tile * 128, 128)] = value

    return plgpu.kernel(
        body,
        out_type=shaped((tiles * 128, 128)),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a_smem=SMEM((slots, 128, step), F16),
            b_smem=SMEM((slots, 128, step), F16),
            acc=TMEM((2, 128, 128), F32),
            full=Barrier(num_arrivals=2, num_barriers=slots),
            empty=ordering(num_barriers=slots),
            done=ordering(num_barriers=2),
            free=ordering(num_barriers=2),
        ),
        interpret=interpret,
    )


def test_two_accumulators(rng):
    a, b = small(rng, (640, 192)), small(rng, (128, 192))
    got = persistent(5, 192)(a, b)
    np.testing.assert_array_equal(got, a.astype(F32) @ b.astype(F32).T)


@pytest.mark.parametrize("specialized", [False, True])
def test_pipelines(specialized, rng):
    """Products in the pipelines of the language; the last slot's operands are free when `done` is
    waited for."""
    a, b = small(rng, (256, 320)), small(rng, (128, 320))

    def body(a_ref, b_ref, o_ref, acc, done):
        i = lax.axis_index("i")

        def step(indices, a_smem, b_smem):
            mma(acc, a_smem, b_smem.T, done, accumulate=indices[0] > 0)
            wait(done)

        specs = [
            plgpu.BlockSpec((128, 64), lambda s: (i, s)),
            plgpu.BlockSpec((128, 64), lambda s: (0, s)),
        ]
        how = dict(grid=(5,), in_specs=specs, max_concurrent_steps=2)
        if specialized:
            how.update(num_compute_wgs=1, memory_registers=40, wg_axis="wg")
            plgpu.emit_pipeline_warp_specialized(step, **how)(a_ref, b_ref)
        else:
            plgpu.emit_pipeline(step, **how)(a_ref, b_ref)

        @pl.when(lax.axis_index("wg") == 0 if specialized else True)
        def _():
            o_ref[pl.ds(i * 128, 128)] = plgpu.async_load_tmem(acc)

    threads = dict(num_threads=2, thread_name="wg") if specialized else {}
    for interpret in (MANY, plgpu.InterpretParams(seeds=3, backend="emulate")):
        kernel = plgpu.kernel(
            body,
            out_type=shaped((256, 128)),
            grid=(2,),
            grid_names=("i",),
            scratch_types=[TMEM((128, 128), F32), ordering()],
            interpret=interpret,
            **threads,
        )
        np.testing.assert_array_equal(kernel(a, b), a.astype(F32) @ b.astype(F32).T)
    # also if the memory thread has given most of its registers away
    assert kernel.lower(a, b, target="sm_100a").resources()["spill_bytes"] == 0


def test_operand_from_registers(rng):
    """Scores become the left operand of a second product, in the columns that they had."""
    x, y = small(rng, (128, 64)), small(rng, (64, 64))

    def body(x_ref, y_ref, o_ref, *, x_smem, y_smem, union, out, full, done):
        scores, weights = union
        load(x_ref, x_smem, full)
        load(y_ref, y_smem, full)
        wait(full)
        mma(scores, x_smem, y_smem, done, accumulate=False)
        wait(done)
        s = plgpu.async_load_tmem(scores)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(weights, (s * 0.25).astype(F16))
        plgpu.commit_tmem()
        mma(out, weights, y_smem, done, accumulate=False)
        wait(done)
        o_ref[...] = plgpu.async_load_tmem(out)

    kernel = plgpu.kernel(
        body,
        out_type=shaped((128, 64)),
        scratch_types=dict(
            x_smem=SMEM((128, 64), F16),
            y_smem=SMEM((64, 64), F16),
            union=plgpu.RefUnion(TMEM((128, 64), F32), TMEM((128, 64), F16, packed=True)),
            out=TMEM((128, 64), F32),
            full=Barrier(num_arrivals=2),
            done=ordering(),
        ),
        interpret=MANY,
    )
    y32 = y.astype(F32)
    want = (x.astype(F32) @ y32 * 0.25).astype(F16).astype(F32) @ y32
    np.testing.assert_allclose(kernel(x, y), want, rtol=1e-6)


def pair_kernel(partition, n=128, k=256, step=64, slots=2, late=False):
    """Both blocks load, the first one waits and multiplies for both."""

    def body(a, b, o, *, a_smem, b_smem, acc, full, empty, done):
        rank = lax.axis_index("pair")
        halves = plgpu.CopyPartition.PARTITIONED(0)

        def producer():
            @pl.loop(0, k // step)
            def _(s):
                slot, depth = lax.rem(s, slots), pl.ds(s * step, step)

                @pl.when(s >= slots)
                def _():
                    wait(empty.at[slot])

                to = dict(collective_axes="pair", leader_tracked=halves)
                load(a.at[:, depth], a_smem.at[slot], full.at[slot], **to)
                if partition:
                    load(b.at[:, depth], b_smem.at[slot], full.at[slot], **to)
                else:  # both blocks use the same columns of b
                    to["leader_tracked"] = plgpu.CopyPartition.REPLICATED
                    load(b.at[: n // 2, depth], b_smem.at[slot], full.at[slot], **to)

        def products():
            @pl.loop(0, k // step)
            def _(s):
                slot = lax.rem(s, slots)

                @pl.when(rank == 0)
                def _():
                    wait(full.at[slot])

                right = b_smem.at[slot].T
                mma(
                    acc,
                    a_smem.at[slot],
                    right,
                    empty.at[slot],
                    accumulate=s > 0,
                    collective_axis="pair",
                )

            commit(done, "pair")

        by_warps(producer, products)
        wait(done)
        o[pl.ds(rank * 128, 128)] = plgpu.async_load_tmem(acc)

    return plgpu.kernel(
        body,
        out_type=shaped((256, n)),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=dict(
            a_smem=SMEM((slots, 128, step), F16),
            b_smem=SMEM((slots, n // 2, step), F16),
            acc=TMEM((128, n), F32, collective=True),
            full=Barrier(num_arrivals=2, num_barriers=slots),
            empty=ordering(num_barriers=slots),
            done=ordering(),
        ),
        interpret=MANY,
    )


@pytest.mark.parametrize("partition", [True, False])
def test_pairs_of_blocks(partition, rng):
    a, b = small(rng, (256, 256)), small(rng, (128, 256))
    right = b if partition else np.concatenate([b[:64], b[:64]])
    want = a.astype(F32) @ right.astype(F32).T
    np.testing.assert_array_equal(pair_kernel(partition)(a, b), want)


def test_rows_by_an_array(rng):
    """Gathered and scattered, also of columns; rows that do not exist are zeros, or left out."""
    x = rng.standard_normal((257, 96)).astype(F32)
    rows = rng.permutation(256)[:32].astype(np.uint32)
    rows[5], rows[6] = 300, 256

    def body(x_ref, rows_ref, o_ref, p_ref, smem, barrier):
        load(x_ref.at[:256].at[rows_ref[...], 32:96], smem, barrier)
        wait(barrier)
        o_ref[...] = smem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, p_ref.at[rows_ref[...], :64])
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.new_ref(np.zeros((256, 96), F32))
    gathered = plgpu.new_ref(np.zeros((32, 64), F32))
    plgpu.kernel(
        body,
        scratch_types=[SMEM((32, 64), F32), Barrier()],
        interpret=plgpu.InterpretParams(detect_races=True),
    )(x, rows, gathered, out)
    there = rows < 256
    want = np.where(there[:, None], x[np.minimum(rows, 255), 32:], 0)
    np.testing.assert_array_equal(plgpu.freeze(gathered), want)
    scattered = np.zeros((256, 96), F32)
    scattered[rows[there], :64] = want[there]
    np.testing.assert_array_equal(plgpu.freeze(out), scattered)


def test_races_of_rows():
    """Scattered rows are written by an engine, which reads their source until it is waited for; of
    two blocks they are in no order."""
    rows = np.arange(32, dtype=np.uint32)

    def by(change, numbers):
        def body(rows_ref, o_ref, smem):
            i = lax.axis_index("i")
            smem[...] = jnp.full((16, 64), i.astype(F32))
            if change != "no commit":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, o_ref.at[rows_ref[pl.ds(i * 16, 16)]])
            if change == "early":
                smem[...] = jnp.zeros((16, 64), F32)
            plgpu.wait_smem_to_gmem(0)

        kernel = plgpu.kernel(
            body,
            out_type=shaped((32, 64)),
            grid=(2,),
            grid_names=("i",),
            scratch_types=[SMEM((16, 64), F32)],
            interpret=MANY,
        )
        return kernel(numbers)

    np.testing.assert_array_equal(by("", rows[::-1].copy())[:, 0], np.repeat([1, 0], 16))
    twice = np.where(rows == 20, 3, rows).astype(np.uint32)
    for change, numbers, name in [("", twice, "o_ref"), ("no commit", rows, "smem")]:
        with pytest.raises(plgpu.RaceError, match=f"RACE DETECTED on '{name}'"):
            by(change, numbers)
    with pytest.raises(plgpu.RaceError, match=r"wait_smem_to_gmem\(\) before"):
        by("early", rows)


def test_rows_never_written():
    def body(o_ref, smem):
        smem[:, :32] = jnp.ones((16, 32), F32)
        plgpu.commit_smem()
        rows = lax.broadcasted_iota(np.int32, (16,), 0).astype(np.uint32)
        plgpu.copy_smem_to_gmem(smem, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=shaped((16, 64)),
        scratch_types=[SMEM((16, 64), F32)],
        interpret=plgpu.InterpretParams(detect_uninitialized=True),
    )
    with pytest.raises(plgpu.UninitializedError, match="comes from 'smem'"):
        kernel()


# ---- misuse --------------------------------------------------------------------------------------

SIMPLE = dict(
    a=SMEM((128, 64), F16),
    b=SMEM((64, 64), F16),
    acc=TMEM((128, 64), F32),
    other=TMEM((128, 64), F16, packed=True),
    full=Barrier(num_arrivals=2),
    done=ordering(),
    told=ordering(),
    free=ordering(),
    plain=Barrier(),
)


def misused(use, threads=1, **options):
    """Operands are loaded, then `use` is called with the refs by their names, in each thread."""

    def body(x_ref, o_ref, **refs):
        class Names:
            pass

        r = Names()
        r.__dict__.update(refs, x=x_ref, o=o_ref)
        r.thread = lax.axis_index("t") if threads > 1 else 0

        @pl.when(r.thread == 0)
        def _():
            load(x_ref, r.a, r.full)
            load(x_ref.at[:64], r.b, r.full)
            wait(r.full)

        use(r)

    if threads > 1:
        options.update(num_threads=threads, thread_name="t")
    kernel = plgpu.kernel(body, out_type=shaped((128, 64)), scratch_types=SIMPLE, **options)
    return kernel, np.ones((128, 64), F16)


def multiply(r, **options):
    mma(r.acc, r.a, r.b, accumulate=False, **options)


def early_load(r):
    multiply(r, barrier=r.done)
    r.o[...] = plgpu.async_load_tmem(r.acc)
    wait(r.done)


def no_commit(r):
    multiply(r)


def unseen_commit(r):
    multiply(r, barrier=r.done)

    @pl.loop(0, 64)  # the commit arrives meanwhile
    def _(k):
        r.o[k] = r.o[k + 64]

    r.o[...] = plgpu.async_load_tmem(r.acc)


def no_wait_for_load(r):
    multiply(r, barrier=r.done)
    wait(r.done)
    r.o[...] = plgpu.async_load_tmem(r.acc)
    multiply(r, barrier=r.done)
    wait(r.done)


def no_commit_of_store(r):
    plgpu.async_store_tmem(r.other, jnp.ones((128, 64), F16))
    mma(r.acc, r.other, r.b, r.done, accumulate=False)
    wait(r.done)


def load_of_store(r):
    plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
    r.o[...] = plgpu.async_load_tmem(r.acc)


def store_into_product(r):
    multiply(r, barrier=r.done)
    plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
    plgpu.commit_tmem()
    wait(r.done)


def operand_stored(r):
    plgpu.async_store_tmem(r.other, jnp.ones((128, 64), F16))
    plgpu.commit_tmem()
    mma(r.acc, r.other, r.b, r.done, accumulate=False)
    plgpu.async_store_tmem(r.other, jnp.ones((128, 64), F16))
    wait(r.done)


def operand_overwritten(r):
    multiply(r, barrier=r.done)
    load(r.x, r.a, r.plain)
    wait(r.plain)
    wait(r.done)


def told_by_a_plain_barrier(r):
    @pl.when(r.thread == 1)
    def _():
        plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
        plgpu.commit_tmem()
        arrive(r.plain)

    @pl.when(r.thread == 0)
    def _():
        wait(r.plain)
        mma(r.acc, r.a, r.b, r.done)
        wait(r.done)


def told(r):
    """Right: the same with a barrier that orders tensor cores."""

    @pl.when(r.thread == 1)
    def _():
        plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
        plgpu.commit_tmem()
        arrive(r.told)

    @pl.when(r.thread == 0)
    def _():
        wait(r.told)
        mma(r.acc, r.a, r.b, r.done)
        wait(r.done)
        r.o[...] = plgpu.async_load_tmem(r.acc)


def told_too_early(r):
    @pl.when(r.thread == 1)
    def _():
        plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
        arrive(r.told)

    @pl.when(r.thread == 0)
    def _():
        wait(r.told)
        mma(r.acc, r.a, r.b, r.done)
        wait(r.done)


def load_told_by_a_plain_barrier(r):
    @pl.when(r.thread == 1)
    def _():
        plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
        plgpu.commit_tmem()
        arrive(r.plain)

    @pl.when(r.thread == 0)
    def _():
        wait(r.plain)
        r.o[...] = plgpu.async_load_tmem(r.acc)


def load_outlasts_its_scope(r):
    def first(tmem):
        plgpu.async_store_tmem(tmem, jnp.ones((128, 64), F32))
        plgpu.commit_tmem()
        r.o[...] = plgpu.async_load_tmem(tmem)

    def second(again):
        mma(again, r.a, r.b, r.done, accumulate=False)
        wait(r.done)

    pl.run_scoped(first, TMEM((128, 64), F32))
    pl.run_scoped(second, TMEM((128, 64), F32))


def other_commit(r):
    multiply(r, barrier=r.done)
    multiply(r, barrier=r.told)

    @pl.loop(0, 64)  # both commits arrive meanwhile
    def _(k):
        r.o[k] = r.o[k + 64]

    wait(r.done)
    r.o[...] = plgpu.async_load_tmem(r.acc)
    wait(r.told)


def store_at_the_end(r):
    plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))


@pytest.mark.parametrize(
    "use, threads, why",
    [
        (early_load, 1, "async_load_tmem of 'acc' while the tcgen05_mma.*may still write it"),
        (no_commit, 1, "the scope of 'acc' ends while the tcgen05_mma.*may still use it"),
        (unseen_commit, 1, "async_load_tmem of 'acc' while the tcgen05_mma"),
        (
            no_wait_for_load,
            1,
            "tcgen05_mma writes.*'acc' while the async_load.*wait_load_tmem must",
        ),
        (no_commit_of_store, 1, "reads.*'other' while the async_store_tmem.*commit_tmem must"),
        (load_of_store, 1, "async_load_tmem of 'acc' while the async_store_tmem.*commit_tmem must"),
        (store_into_product, 1, "async_store_tmem of 'acc' while the tcgen05_mma"),
        (operand_stored, 1, "async_store_tmem of 'other' while the tcgen05_mma.*may still read"),
        (operand_overwritten, 1, "copy_gmem_to_smem overwrites 'a' while the tcgen05_mma"),
        (told_by_a_plain_barrier, 2, "it did not signal that.*orders_tensor_core=True"),
        (told_too_early, 2, "tcgen05_mma writes.*while the async_store_tmem.*commit_tmem must"),
        (load_told_by_a_plain_barrier, 2, "it did not signal that.*orders_tensor_core=True"),
        (
            load_outlasts_its_scope,
            1,
            "tcgen05_mma writes.*'again' while the async_load.*wait_load_tmem must",
        ),
        (other_commit, 1, "async_load_tmem of 'acc' while the tcgen05_mma"),
        (store_at_the_end, 1, "the scope of 'acc' ends while the async_store_tmem"),
    ],
)
def test_misuse(use, threads, why):
    """Found under every schedule, at the line of the second access, with that of the first."""
    for seed in (0, 1, 5, 11):
        kernel, x = misused(use, threads, interpret=plgpu.InterpretParams(seed=seed))
        with pytest.raises(ValueError, match=why) as caught:
            kernel(x)
        assert len(re.findall(r"test_tensor_core\.py:\d+", str(caught.value))) >= 1


def passed_on(barrier, then):
    """Thread 0 awaits a product and arrives; what follows in thread 1 is `then`."""

    def use(r):
        @pl.when(r.thread == 0)
        def _():
            plgpu.async_store_tmem(r.other, jnp.ones((128, 64), F16))
            plgpu.commit_tmem()
            mma(r.acc, r.other, r.b, r.done, accumulate=False)
            wait(r.done)
            plgpu.commit_smem()
            arrive(getattr(r, barrier))

        @pl.when(r.thread == 1)
        def _():
            wait(getattr(r, barrier))
            then(r)

    return use


def store_the_operand(r):
    plgpu.async_store_tmem(r.other, jnp.ones((128, 64), F16))
    plgpu.commit_tmem()


AFTERWARDS = {
    "load": lambda r: r.o.__setitem__(..., plgpu.async_load_tmem(r.acc)),
    "product": lambda r: (mma(r.acc, r.a, r.b, r.free, accumulate=False), wait(r.free)),
    "operand": store_the_operand,
}


@pytest.mark.parametrize("then", AFTERWARDS)
@pytest.mark.parametrize("options", [dict(detect_races=True), dict(backend="emulate")], ids=repr)
def test_a_wait_is_passed_on_by_barriers_that_order_tensor_cores(then, options):
    """The PTX ISA orders accesses of two threads by a tcgen05.fence on both sides of what
    synchronises them, also when a commit was awaited before."""
    kernel, x = misused(passed_on("told", AFTERWARDS[then]), 2, interpret=params(**options))
    kernel(x)
    kernel, x = misused(passed_on("plain", AFTERWARDS[then]), 2, interpret=params(**options))
    with pytest.raises((plgpu.RaceError, ValueError)) as caught:
        kernel(x)
    text = str(caught.value)
    assert "orders_tensor_core=True" in text
    assert len(set(re.findall(r"test_tensor_core\.py:(\d+)", text))) >= 2


def params(**options):
    return plgpu.InterpretParams(seed=3, **options)


def in_warp(n, f):
    @plgpu.warp_map
    def _(warp):
        pl.when(warp == n)(f)


def product_of_a_warp(r):
    plgpu.async_store_tmem(r.acc, jnp.ones((128, 64), F32))
    plgpu.commit_tmem()
    in_warp(2, lambda: mma(r.acc, r.a, r.b, r.done))
    wait(r.done)


def wait_of_a_warp(r):
    def work():
        mma(r.acc, r.a, r.b, r.done, accumulate=False)
        wait(r.done)

    in_warp(1, work)


def commit_and_wait_of_two_warps(r):
    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 3)(lambda: mma(r.acc, r.a, r.b, r.done, accumulate=False))
        pl.when(warp == 0)(lambda: wait(r.done))


@pytest.mark.parametrize(
    "use, want",
    [(product_of_a_warp, 65), (wait_of_a_warp, 64), (commit_and_wait_of_two_warps, 64)],
)
def test_warps_know_what_their_thread_knows(use, want):
    """And after a warp_map the thread knows what its warps have waited for."""

    def twice(r):
        for _ in range(2):
            use(r)
            r.o[...] = plgpu.async_load_tmem(r.acc)
            plgpu.wait_load_tmem()

    for seed in range(3):
        for options in (dict(detect_races=True), dict(backend="emulate")):
            kernel, x = misused(twice, interpret=plgpu.InterpretParams(seed=seed, **options))
            np.testing.assert_array_equal(kernel(x), np.full((128, 64), want, F32))


def test_scopes_of_two_threads(rng):
    """The columns that one thread has loaded are another thread's in the next scope."""

    def use(r):
        def first(tmem):
            @pl.when(r.thread == 0)
            def _():
                mma(tmem, r.a, r.b, r.done, accumulate=False)

            wait(r.done)

            @pl.when(r.thread == 1)
            def _():
                r.o[...] = plgpu.async_load_tmem(tmem)
                plgpu.wait_load_tmem()

        def second(tmem):
            @pl.when(r.thread == 0)
            def _():
                mma(tmem, r.a, r.b, r.told, accumulate=False)
                wait(r.told)
                r.o[...] += plgpu.async_load_tmem(tmem)

        for f in (first, second):
            pl.run_scoped(f, TMEM((128, 64), F32), collective_axes="t")

    for seed in range(3):
        for options in (dict(detect_races=True), dict(backend="emulate")):
            kernel, x = misused(use, 2, interpret=plgpu.InterpretParams(seed=seed, **options))
            np.testing.assert_array_equal(kernel(x), np.full((128, 64), 128, F32))


def test_right_use(rng):
    kernel, x = misused(told, 2, interpret=MANY)
    np.testing.assert_array_equal(kernel(x), np.full((128, 64), 65, F32))


def test_races():
    """Without an order between a load and the product that overwrites what it reads."""

    def race(r):
        @pl.when(r.thread == 0)
        def _():
            multiply(r, barrier=r.done)
            wait(r.done)
            arrive(r.told)
            multiply(r, barrier=r.done)
            wait(r.done)

        @pl.when(r.thread == 1)
        def _():
            wait(r.told)
            r.o[...] = plgpu.async_load_tmem(r.acc)
            plgpu.wait_load_tmem()

    params = plgpu.InterpretParams(detect_races=True, seed=3)
    kernel, x = misused(race, 2, interpret=params)
    with pytest.raises((plgpu.RaceError, ValueError), match="'acc'.*") as caught:
        kernel(x)
    assert "TMEM" in str(caught.value) or "async_load_tmem" in str(caught.value)


@pytest.mark.parametrize(
    "accumulate, a_rows, rows, origin",
    [(False, 128, 64, None), (True, 128, 64, "acc"), (False, 128, 32, "b"), (False, 64, 64, "a")],
)
def test_what_was_never_written(accumulate, a_rows, rows, origin):
    """A product carries it from its operands, and with `accumulate` from its accumulator."""

    def body(o_ref, a, b, scratch, acc, done):
        a[:a_rows] = jnp.ones((a_rows, 64), F16)
        b[:rows] = jnp.ones((rows, 64), F16)
        plgpu.commit_smem()
        plgpu.async_copy_smem_to_tmem(a, scratch)
        mma(acc, scratch, b, done, accumulate=accumulate)
        wait(done)
        o_ref[...] = plgpu.async_load_tmem(acc)

    kernel = plgpu.kernel(
        body,
        out_type=shaped((128, 64)),
        scratch_types=dict(
            a=SMEM((128, 64), F16),
            b=SMEM((64, 64), F16),
            scratch=TMEM((128, 64), F16, packed=True),
            acc=TMEM((128, 64), F32),
            done=ordering(),
        ),
        interpret=plgpu.InterpretParams(detect_uninitialized=True),
    )
    if origin is None:
        np.testing.assert_array_equal(kernel(), np.full((128, 64), 64, F32))
        return
    with pytest.raises(plgpu.UninitializedError, match=f"comes from '{origin}', allocated"):
        kernel()


def test_timeline(tmp_path, rng):
    """A commit arrives when the products before it are complete, and products take time."""
    a, b = small(rng, (640, 192)), small(rng, (128, 192))
    path = tmp_path / "trace.json"
    kernel = persistent(5, 192, interpret=plgpu.InterpretParams(timeline=path))
    np.testing.assert_array_equal(kernel(a, b), a.astype(F32) @ b.astype(F32).T)
    trace = plgpu.read_trace(path)
    begins = [e for e in trace.events if e["name"] == "product: acc" and e["ph"] == "b"]
    assert len(begins) == 15
    assert {"full", "empty", "done"} <= {w.what for w in trace.waits}


@pytest.mark.parametrize("delay", [0, 64])
def test_products_of_the_leader(delay):
    """In flight, or complete, they are not to be relied on by the other block before one waits."""

    def body(x, o_ref, a, b, acc, done, issued):
        rank = lax.axis_index("pair")
        a[...] = x[...]
        b[...] = x[:64]
        plgpu.commit_smem()
        mma(acc, a, b, done, collective_axis="pair", accumulate=False)
        arrive(issued)
        wait(issued)

        @pl.when(rank == 1)
        def _():
            @pl.loop(0, delay)
            def _(k):
                o_ref[k] = o_ref[k + 64]

            o_ref[...] = plgpu.async_load_tmem(acc)

        arrive(issued)
        wait(issued)
        wait(done)

    kernel = plgpu.kernel(
        body,
        out_type=shaped((128, 128)),
        scratch_types=[
            SMEM((128, 64), F16),
            SMEM((64, 64), F16),
            TMEM((128, 128), F32, collective=True),
            ordering(),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        interpret=True,
    )
    with pytest.raises(ValueError, match="async_load_tmem of 'acc' while the tcgen05_mma"):
        kernel(np.ones((128, 64), F16))


@pytest.mark.parametrize("copy, commit_pair", [(True, False), (False, True)])
def test_instructions_are_for_pairs_or_none_is(copy, commit_pair):
    """Otherwise the program would have both cta_groups."""

    def body(o_ref, a, tmem, done):
        plgpu.async_copy_smem_to_tmem(a, tmem, "pair" if copy else None)
        commit(done, "pair" if commit_pair else None)
        wait(done)

    kernel = plgpu.kernel(
        body,
        out_type=shaped((128, 64)),
        scratch_types=[
            SMEM((128, 64), F16),
            TMEM((128, 64), F16, packed=True, collective=copy),
            ordering(),
        ],
        cluster=(2,),
        cluster_names=("pair",),
    )
    missing = "given" if commit_pair else "missing"
    with pytest.raises(ValueError, match=f"commit_arrive: collective_axis is {missing}"):
        kernel.lower(target="sm_100a")


def test_a_commit_that_the_other_block_ignores():
    def kernel(waiting):
        def body(o_ref, a, tmem, done, meet):
            plgpu.async_copy_smem_to_tmem(a, tmem, "pair")
            commit(done, "pair")
            pl.when(lax.axis_index("pair") < waiting)(lambda: wait(done))
            arrive(meet)
            wait(meet)

        return plgpu.kernel(
            body,
            out_type=shaped((128, 64)),
            scratch_types=[
                SMEM((128, 64), F16),
                TMEM((128, 64), F16, packed=True, collective=True),
                ordering(),
                plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core=True),
            ],
            cluster=(2,),
            cluster_names=("pair",),
            interpret=True,
        )

    kernel(2)()
    with pytest.raises(ValueError, match=r"block \(1,\) ends, and none of its threads has waited"):
        kernel(1)()


@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_product_in_a_branch_of_each_block(blocks, backend):
    """The blocks of a pair call an op equally often, wherever; in hardware the leader is enough."""

    def body(o_ref, a, b, acc, done, filled):
        rank = lax.axis_index("pair")
        a[...] = jnp.ones((128, 64), F16)
        b[...] = jnp.ones((64, 64), F16)
        plgpu.commit_smem()
        arrive(filled)
        wait(filled)
        for block in range(blocks):

            @pl.when(rank == block)
            def _():
                mma(acc, a, b, collective_axis="pair", accumulate=False)

        commit(done, "pair")
        wait(done)
        o_ref[rank] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    scratch = [
        SMEM((128, 64), F16),
        SMEM((64, 64), F16),
        TMEM((128, 128), F32, collective=True),
        ordering(),
        plgpu.ClusterBarrier(collective_axes=("pair",)),
    ]
    kernel = plgpu.kernel(
        body,
        out_type=shaped((2, 128, 128)),
        scratch_types=scratch,
        cluster=(2,),
        cluster_names=("pair",),
        interpret=plgpu.InterpretParams(backend=backend),
    )
    if blocks == 1 and backend == "interpret":
        match = "leader .* executed this op .* 1 times, the other block 0"
        with pytest.raises(ValueError, match=match):
            kernel()
        return
    np.testing.assert_array_equal(kernel(), np.full((2, 128, 128), 64, F32))


# ---- mistakes ------------------------------------------------------------------------------------


def product(acc, a, b, *, transpose=True, **options):
    """A kernel of one product of allocations like these; options by name, descriptors allocated."""
    given = {k: v for k, v in options.items() if not hasattr(v, "memory_space")}
    extra = {k: v for k, v in options.items() if hasattr(v, "memory_space")}

    def body(o_ref, **refs):
        more = {k: refs[k] for k in extra}
        right = refs["right"].T if transpose else refs["right"]
        mma(refs["acc"], refs["left"], right, **more, **given)

    scratch = dict(acc=acc, left=a, right=b, **extra)
    kernel = plgpu.kernel(
        body,
        out_type=shaped((8,)),
        scratch_types=scratch,
        cluster=(2,),
        cluster_names=("c",),
        interpret=True,
    )
    return kernel


def sm(m, k, dtype=F16, **options):
    return SMEM((m, k), dtype, **options)


def acc(m, n, dtype=F32, **options):
    return TMEM((m, n), dtype, **({"packed": False} if dtype != F32 else {}), **options)


def scales(rows, n, dtype=E8M0):
    return TMEM((rows, n), dtype, layout=SCALES)


NARROW = plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)


def sparse(acc, b):
    """A kernel of a product whose a is sparse, of depth 128."""
    metadata = TMEM((128, 64), U2, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT)
    return product(acc, sm(128, 64), b, a_sparse_metadata=metadata)


@pytest.mark.parametrize(
    "kernel, error, why",
    [
        (product(acc(128, 64), sm(64, 64), sm(64, 64)), ValueError, r"must be \(M, N\)"),
        (product(acc(128, 64), sm(128, 64), sm(64, 128)), ValueError, r"must be \(M, N\)"),
        (product(sm(128, 64), sm(128, 64), sm(64, 64)), ValueError, "acc must be a TMEM ref"),
        (product(acc(128, 64), sm(128, 64), acc(128, 64)), ValueError, "b must be|transpose"),
        (product(acc(128, 12), sm(128, 64), sm(12, 64)), ValueError, "N is 12.*multiple of 8"),
        (
            product(acc(64, 32, np.int32), sm(64, 128, I8), sm(24, 128, I8)),
            ValueError,
            r"must be \(M, N\)",
        ),
        (product(acc(128, 520), sm(128, 64), sm(520, 64)), ValueError, "N is 520.*at most 512"),
        (product(acc(128, 64), sm(128, 24), sm(64, 24)), ValueError, "K is 24.*multiple of 16"),
        (
            product(
                acc(128, 64, F16), sm(128, 64, ml_dtypes.bfloat16), sm(64, 64, ml_dtypes.bfloat16)
            ),
            ValueError,
            "acc is float32, for float16 and float8 also float16",
        ),
        (
            product(acc(128, 64), sm(128, 64), sm(64, 64, E4M3)),
            ValueError,
            "a and b have one dtype",
        ),
        (product(acc(128, 64), sm(128, 64, F32), sm(64, 64, F32)), NotImplementedError, "float32"),
        (product(acc(128, 64), sm(128, 256, E2M1), sm(64, 256, E2M1)), ValueError, "need a_scale"),
        (
            product(acc(128, 64), sm(128, 128, E4M3), sm(64, 128, E4M3), a_scale=scales(128, 4)),
            ValueError,
            "given together",
        ),
        (
            product(
                acc(128, 64),
                sm(128, 128, E4M3),
                sm(64, 128, E4M3),
                a_scale=scales(128, 8),
                b_scale=scales(128, 8),
            ),
            ValueError,
            "float8 takes float8_e8m0fnu scales, one for 32",
        ),
        (
            product(
                acc(128, 64),
                sm(128, 128, E4M3),
                sm(64, 128, E4M3),
                a_scale=scales(128, 4),
                b_scale=scales(256, 4),
            ),
            ValueError,
            r"b_scale has shape \(256, 4\).*\(128, 4\)",
        ),
        (
            product(
                acc(64, 64),
                sm(64, 128, E4M3),
                sm(64, 128, E4M3),
                a_scale=scales(128, 4),
                b_scale=scales(128, 4),
            ),
            NotImplementedError,
            "scales with 64 rows",
        ),
        (
            product(
                acc(128, 64),
                sm(128, 64),
                sm(64, 128),
                a_sparse_metadata=TMEM(
                    (128, 128), U2, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
                ),
            ),
            ValueError,
            r"a_sparse_metadata has shape \(128, 128\).*\(128, 64\)",
        ),
        (sparse(acc(128, 24), sm(24, 128)), NotImplementedError, "N is 24.*multiple of 16"),
        (sparse(acc(128, 512), sm(512, 128)), NotImplementedError, "N is 512.*at most 256"),
        (
            sparse(acc(128, 64), sm(64, 128, transforms=NARROW)),
            NotImplementedError,
            "swizzle of 32 bytes b must be contiguous along N",
        ),
        (
            product(acc(64, 64), TMEM((64, 64), F16, packed=True), sm(64, 64)),
            NotImplementedError,
            "a in TMEM with 64 rows",
        ),
        (
            product(acc(128, 64), TMEM((128, 64), F16, packed=False), sm(64, 64)),
            ValueError,
            "it must be packed",
        ),
        (
            product(acc(128, 64, collective=True), sm(128, 64), sm(64, 64), collective_axis="c"),
            ValueError,
            r"b being the block's half",
        ),
        (
            product(acc(128, 128), sm(128, 64), sm(64, 64), collective_axis="c"),
            ValueError,
            "acc was not allocated with collective=True",
        ),
        (
            product(acc(128, 64, collective=True), sm(128, 64), sm(64, 64)),
            ValueError,
            "collective_axis is needed",
        ),
        (
            product(acc(128, 64), sm(128, 64), sm(64, 64), collective_axis="x"),
            ValueError,
            "'x' is not a cluster axis",
        ),
        (
            product(acc(128, 64), sm(128, 64), sm(64, 64), barrier=Barrier()),
            ValueError,
            "without orders_tensor_core=True",
        ),
        (
            product(acc(128, 64), sm(128, 64), sm(64, 64), accumulate=1.5),
            TypeError,
            "accumulate must be a bool",
        ),
    ],
)
def test_products_that_are_refused(kernel, error, why):
    with pytest.raises(error, match=why) as caught:
        kernel()
    assert "test_tensor_core.py" in str(caught.value)


def using(use, *scratch, error, why):
    kernel = plgpu.kernel(
        lambda o_ref, *refs: use(*refs),
        out_type=shaped((8,)),
        scratch_types=scratch,
        grid=(2,),
        grid_names=("g",),
        interpret=True,
    )
    with pytest.raises(error, match=why):
        kernel()


def test_a_of_4_bits_must_be_contiguous_along_k():
    def body(o_ref, *, acc, a, b, a_scale, b_scale):
        mma(acc, a.T, b.T, a_scale=a_scale, b_scale=b_scale)

    scratch = dict(acc=acc(128, 64), a=sm(256, 128, E2M1), b=sm(64, 256, E2M1))
    scratch.update(a_scale=scales(128, 8), b_scale=scales(128, 8))
    kernel = plgpu.kernel(body, out_type=shaped((8,)), scratch_types=scratch, interpret=True)
    with pytest.raises(ValueError, match="a is contiguous along M") as caught:
        kernel()
    assert "test_tensor_core.py" in str(caught.value)


def test_copies_that_are_refused():
    copy, copy_scales = plgpu.async_copy_smem_to_tmem, plgpu.async_copy_scales_to_tmem
    plain = TMEM((128, 64), F16, packed=True)
    using(copy, sm(128, 32), plain, error=ValueError, why="must be equal")
    using(copy, sm(128, 64, E4M3), plain, error=ValueError, why="smem_ref has dtype")
    using(copy, sm(128, 64), acc(128, 64, F16), error=ValueError, why="packed=True")
    using(copy, plain, plain, error=ValueError, why="smem_ref must be an SMEM ref")
    tiled = SMEM((128, 64), F16, transforms=plgpu.TilingTransform((8, 64)))
    using(copy, tiled, plain, error=NotImplementedError, why=r"not tiled by \(8, 8\)")
    cancel = plgpu.try_cluster_cancel
    square = SMEM((4, 4), np.int8)
    using(lambda s, b: cancel(s.T, b), square, Barrier(), error=NotImplementedError, why="indices")
    using(
        copy_scales,
        SMEM((1, 1, 32, 16), E8M0),
        scales(128, 8),
        error=ValueError,
        why=r"must be \(1, 2, 32, 16\)",
    )
    using(copy_scales, sm(128, 64), plain, error=ValueError, why="a layout for scales")
    using(lambda s, b: load(s, s, b), sm(128, 64), ordering(), error=ValueError, why="GMEM")
    using(lambda b: commit(b), Barrier(), error=ValueError, why="without orders_tensor_core=True")

    def copy_in(o_ref, smem, barrier):
        load(o_ref, smem, barrier)

    kernel = plgpu.kernel(
        copy_in,
        out_type=shaped((128,)),
        scratch_types=[SMEM((128,), F32), ordering()],
        interpret=True,
    )
    with pytest.raises(ValueError, match="with orders_tensor_core=True; copies complete on"):
        kernel()


def test_scales_into_another_layout():
    using(
        plgpu.async_copy_scales_to_tmem,
        SMEM((1, 1, 32, 16), E8M0),
        TMEM((128, 4), E8M0, packed=True),
        error=ValueError,
        why="tmem_ref has the layout default",
    )


def test_cluster_control_that_is_refused():
    ask, answer = plgpu.try_cluster_cancel, plgpu.query_cluster_cancel
    using(ask, SMEM((2, 16), I8), Barrier(), error=TypeError, why="16 bytes are needed")
    using(
        ask, plgpu.TryClusterCancelResult(), ordering(), error=ValueError, why="orders_tensor_core"
    )
    using(
        lambda r: answer(r, ("h",)),
        plgpu.TryClusterCancelResult(),
        error=ValueError,
        why="'h' is not a grid axis",
    )

    def again(o_ref, result, barrier):
        for k in range(4):
            ask(result, barrier)
            wait(barrier)
            (point,), _ = answer(result, "g")
            o_ref[k] = point.astype(F32)
            plgpu.commit_smem()

    kernel = plgpu.kernel(
        again,
        out_type=shaped((8,)),
        grid=(2,),
        grid_names=("g",),
        scratch_types=[plgpu.TryClusterCancelResult(), Barrier()],
        interpret=True,
    )
    with pytest.raises(ValueError, match="after an answer that there was no grid point left"):
        kernel()


# ---- cluster launch control ----------------------------------------------------------------------


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("blocks, threads", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_point_once(blocks, threads, carries):
    """Whatever the schedule: each point of the grid is handed out to one cluster."""
    axes = dict(cluster=(blocks,), cluster_names=("c",)) if blocks > 1 else {}
    if threads > 1:
        axes.update(num_threads=threads, thread_name="t")

    def body(o_ref, n_ref, tmem):
        first = lax.axis_index("c") == 0 if blocks > 1 else True
        first = (lax.axis_index("t") == 0) & first if threads > 1 else first
        start = dict(init_carry=jnp.int32(0)) if carries else {}

        @plgpu.dynamic_scheduling_loop(
            ("i", "j"),
            thread_axis="t" if threads > 1 else None,
            cluster_axes=("c",) if blocks > 1 else (),
            **start,
        )
        def steps(info, carry=None):
            i, j = info.index

            @pl.when(first)
            def _():
                value = jnp.full((128,), 10 * i + j + 1, jnp.int32)
                plgpu.atomic_add(o_ref.at[i, j], value)

            return None if carry is None else carry + 1

        if carries:

            @pl.when(first)
            def _():
                plgpu.atomic_add(n_ref, jnp.full((128,), steps, jnp.int32))

    kernel = plgpu.kernel(
        body,
        grid=(5, 4),
        grid_names=("i", "j"),
        scratch_types=[TMEM((128, 8), F32)],
        interpret=plgpu.InterpretParams(seeds=6, detect_races=True),
        **axes,
    )
    out, count = (
        plgpu.new_ref(np.zeros((5, 4, 128), np.int32)),
        plgpu.new_ref(np.zeros(128, np.int32)),
    )
    kernel(out, count)
    want = 10 * np.arange(5)[:, None] + np.arange(4) + 1
    np.testing.assert_array_equal(np.asarray(plgpu.freeze(out))[:, :, 0], want)
    assert np.asarray(plgpu.freeze(count))[0] == (20 if carries else 0)


@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("blocks, threads", [(1, 1), (2, 2)])
def test_loops_after_another(blocks, threads, backend):
    """The first loop leaves fewer clusters than points; they share those of the next loops, in two
    launches."""
    axes = dict(cluster=(blocks,), cluster_names=("c",)) if blocks > 1 else {}
    if threads > 1:
        axes.update(num_threads=threads, thread_name="t")

    def body(o_ref, tmem):
        first = lax.axis_index("c") == 0 if blocks > 1 else True
        first = (lax.axis_index("t") == 0) & first if threads > 1 else first
        for scale in (1, 10, 100):

            @plgpu.dynamic_scheduling_loop(
                "g",
                thread_axis="t" if threads > 1 else None,
                cluster_axes=("c",) if blocks > 1 else (),
                init_carry=jnp.int32(0),
            )
            def total(info, carry, scale=scale):
                @pl.when(first)
                def _():
                    value = jnp.full((128,), scale * (info.index[0] + 1), jnp.int32)
                    plgpu.atomic_add(o_ref.at[info.index[0]], value)

                return carry + info.index[0]

            @pl.when(first)
            def _():
                plgpu.atomic_add(o_ref.at[7], jnp.full((128,), total, jnp.int32))

    kernel = plgpu.kernel(
        body,
        grid=(7,),
        grid_names=("g",),
        scratch_types=[TMEM((128, 8), F32)],
        interpret=plgpu.InterpretParams(seeds=4, backend=backend),
        **axes,
    )
    for _ in range(2):
        out = plgpu.new_ref(np.zeros((8, 128), np.int32))
        kernel(out)
        want = [*(111 * np.arange(1, 8)), 3 * 21]
        np.testing.assert_array_equal(np.asarray(plgpu.freeze(out))[:, 0], want)


def test_loop_in_a_loop_after_another():
    def body(o_ref, tmem):
        for k in range(2):

            def loop(_=0):
                @plgpu.dynamic_scheduling_loop("g")
                def _(info):
                    o_ref[info.index[0]] = jnp.full((128,), 1.0, F32)

            pl.loop(0, 2)(loop) if k else loop()

    kernel = plgpu.kernel(
        body,
        out_type=shaped((6, 128)),
        grid=(6,),
        grid_names=("g",),
        scratch_types=[TMEM((128, 8), F32)],
    )
    with pytest.raises(NotImplementedError, match="dynamic_scheduling_loop: .*TileScheduler"):
        kernel.lower()


@pytest.mark.parametrize("scratch, way", [([TMEM((128, 8), F32)], "cancel"), ([], "fetch_tile")])
def test_which_loop_is_made(scratch, way):
    """Cluster launch control where the kernel is for Blackwell anyway."""

    def body(o_ref, *refs):
        for tmem in refs:
            plgpu.async_store_tmem(tmem, jnp.zeros((128, 8), F32))
            plgpu.commit_tmem()

        @plgpu.dynamic_scheduling_loop("g")
        def _(info):
            o_ref[info.index[0]] = jnp.full((128,), 1.0, F32)

    kernel = plgpu.kernel(
        body, out_type=shaped((6, 128)), grid=(6,), grid_names=("g",), scratch_types=scratch
    )
    text = kernel.lower().as_text("graph")
    assert re.findall("try_cluster_cancel|fetch_tile", text)[0].endswith(way)
