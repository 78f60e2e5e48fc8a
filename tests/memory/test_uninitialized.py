"""Memory that was never written, `InterpretParams(detect_uninitialized=True)`: where it has an
effect is an error, what is masked, clipped or overwritten is none."""

import numpy as np
import pytest
from fuzz import generate, kernels, ops

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32, I32 = np.float16, np.float32, np.int32
N = 64
X = np.arange(N, dtype=F32)
TILE = plgpu.SMEM((N,), F32)
g2s, s2g, wait = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem, plgpu.barrier_wait
SEEDS = range(4)


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (N,), dtype)


def run(body, outs, *args, seed=0, given=None, **options):
    options.setdefault("scratch_types", [TILE])
    params = plgpu.InterpretParams(detect_uninitialized=True, seed=seed)
    kernel = plgpu.kernel(body, out_type=outs, interpret=params, **options)
    return kernel(*args) if given is None else kernel(*args, out=given)


def fine(body, outs, *args, **options):
    """The result, of several schedules."""
    return [run(body, outs, *args, seed=seed, **options) for seed in SEEDS][-1]


def refused(match, body, outs, *args, **options):
    for seed in SEEDS:
        with pytest.raises(plgpu.UninitializedError, match=match) as info:
            run(body, outs, *args, seed=seed, **options)
    assert isinstance(info.value, RuntimeError)
    return str(info.value)


# ---- where it must not go ------------------------------------------------------------------------


def test_output():
    """The element, how many there are, where they come from, and the line of the store."""

    def body(o, tile):
        tile[3] = 1.0
        tile[4] = 1.0
        o[...] = tile[...]  # here

    text = refused(r"o\[0\] \(62 of its elements\).*comes from 'tile', allocated at ", body, out())
    assert f"allocated at {__file__}:{body.__code__.co_firstlineno}\n" in text
    assert f"test_uninitialized.py:{body.__code__.co_firstlineno + 3}: o[...] = tile" in text


def test_rows_and_columns():
    def body(o, tile):
        tile[:, :3] = jnp.zeros((8, 3))
        o[...] = tile[...]

    refused(r"o\[0, 3\] \(40 of", body, out(8, 8), scratch_types=[plgpu.SMEM((8, 8), F32)])


@pytest.mark.parametrize("how", ["if", "while", "switch", "for", "check"])
def test_branch(how):
    def body(o, tile):
        x = tile[5]
        if how == "if":
            pl.when(x > 0)(lambda: o.set(1.0, 0))
        elif how == "while":
            o[1] = lax.while_loop(lambda k: k < x, lambda k: k + 1, jnp.float32(0))
            return
        elif how == "switch":
            lax.switch(x.astype(I32), [lambda k=k: o.set(k, 0) for k in (1.0, 2.0)])
        elif how == "for":
            lax.fori_loop(0, x.astype(I32), lambda k, c: o.set(1.0, k), None)
        else:
            pl.debug_check(x > 0, "positive")
        o[...] = jnp.zeros((N,))

    what = {"for": "the end of this loop", "switch": "the number of this branch"}
    with pl.enable_debug_checks(True):
        refused(what.get(how, "the condition of this"), body, out())


@pytest.mark.parametrize("how", ["index", "slice", "array", "mask", "copy", "barrier", "count"])
def test_address(how):
    def body(x, o, tile, sem, bars):
        k = tile[5].astype(I32)
        if how == "index":
            o[k] = 1.0
        elif how == "slice":
            o[pl.ds(k, 8)] = jnp.zeros((8,))
        elif how == "array":
            o[jnp.where(plgpu.broadcasted_iota(I32, (8,), 0) == 3, k, 0)] = jnp.zeros((8,))
        elif how == "mask":
            plgpu.store(o, x[...], mask=tile[...] > 0)
        elif how == "copy":
            g2s(x.at[pl.ds(k, N)], tile, bars.at[0])
        elif how == "barrier":
            plgpu.barrier_arrive(bars.at[k])
        else:
            plgpu.semaphore_signal(sem, k)

    scratch = [TILE, plgpu.SemaphoreType.REGULAR, plgpu.Barrier(num_barriers=2)]
    what = {
        "array": "an index of this",
        "mask": "the mask of an element",
        "count": "what this does",
    }
    refused(what.get(how, "decides where this"), body, out(), X, scratch_types=scratch)


def test_copies_carry_it():
    """To an output: an error. What is overwritten before the end is none, or stays in SMEM."""

    def body(o, tile, other, bar):
        plgpu.commit_smem()
        s2g(tile, o)
        plgpu.wait_smem_to_gmem(0)
        g2s(o, other, bar)
        wait(bar)
        if last:
            o[...] = jnp.zeros((N,))

    scratch = [TILE, TILE, plgpu.Barrier()]
    last = False
    refused("comes from 'tile'", body, out(), scratch_types=scratch)
    last = True
    fine(body, out(), scratch_types=scratch)


def test_copies_in_flight():
    """A copy that is not awaited has not written its destination yet, under some schedules."""

    def body(x, o, tile, bar):
        g2s(x, tile, bar)
        o[...] = tile[...]
        wait(bar)

    with pytest.raises(plgpu.UninitializedError, match="comes from 'tile'"):
        run(body, out(), X, scratch_types=[TILE, plgpu.Barrier()])


def test_another_output():
    """An output that nobody wrote is one more thing that was never written. To write none of it is
    no error by itself."""

    def body(o, p, tile):
        o[3] = 1.0
        p[0] = o[3]
        if reads:
            p[1] = o[4]

    reads = False
    fine(body, (out(), out()))
    reads = True
    refused(r"p\[1\] \(1 of its.*comes from 'o'", body, (out(), out()))


def test_outputs_that_are_given():
    """Their contents are the caller's."""

    def body(o, tile):
        o[...] = o[...] + 1

    refused("comes from 'o'", body, out())
    given = X.copy()
    run(body, out(), given=given)
    np.testing.assert_array_equal(given, X + 1)

    def add(o):
        o[...] = o[...] + 1

    ref = plgpu.new_ref(X)
    params = plgpu.InterpretParams(detect_uninitialized=True)
    plgpu.kernel(add, interpret=params)(ref)
    np.testing.assert_array_equal(ref[...], X + 1)


def test_scopes_that_come_again():
    """Their memory is as new every time."""

    def body(o, tile):
        @pl.loop(0, 2)
        def _(i):
            def scope(s):
                pl.when(i == 0)(lambda: s.set(jnp.zeros((N,)), slice(None)))
                o[...] = s[...]

            pl.run_scoped(scope, TILE)

    refused("comes from 's", body, out())


def test_unions():
    """What is written by one name is defined under the other, as far as it goes."""

    def body(o, union):
        first, second = union
        first[:32] = jnp.zeros((32,), I32)
        o[...] = second[...]

    union = plgpu.RefUnion(plgpu.SMEM((N,), I32), TILE)
    refused(r"o\[32\] \(32 of", body, out(), scratch_types=[union])


def test_out_of_bounds():
    def body(x, o, tile):
        o[...] = x[pl.ds(10 + lax.axis_index("i"), N)]

    params = plgpu.InterpretParams(detect_uninitialized=True, out_of_bounds_reads="uninitialized")
    kernel = plgpu.kernel(
        body, out_type=out(), grid=(1,), grid_names=("i",), interpret=params, scratch_types=[TILE]
    )
    with pytest.raises(plgpu.UninitializedError, match=r"o\[54\] \(10.*a read out of bounds"):
        kernel(X)


# ---- how it spreads ------------------------------------------------------------------------------


def spreading(f, shape=(8, 8), dtype=F32):
    """The elements of an output that come from element (2, 5) of a tile."""
    got = []

    def body(o, tile):
        i, j = (plgpu.broadcasted_iota(I32, (8, 8), d) for d in range(2))
        plgpu.store(tile, jnp.ones((8, 8)), mask=~((i == 2) & (j == 5)))
        o[...] = f(tile[...]).astype(dtype)

    try:
        run(body, out(*shape, dtype=dtype), scratch_types=[plgpu.SMEM((8, 8), F32)])
    except plgpu.UninitializedError as e:
        got = str(e).split("[", 1)[1].split("]")[0], int(str(e).split("(")[1].split()[0])
    return got


@pytest.mark.parametrize(
    "f, shape, expected",
    [
        (lambda x: x + 1, (8, 8), ("2, 5", 1)),
        (lambda x: x * x.T, (8, 8), ("2, 5", 2)),
        (lambda x: jnp.where(x.T > 5, 1.0, 2.0), (8, 8), ("5, 2", 1)),
        (lambda x: x.sum(axis=1), (8,), ("2", 1)),
        (lambda x: x.sum(axis=0), (8,), ("5", 1)),
        (lambda x: jnp.full((1,), x.max()), (1,), ("0", 1)),
        (lambda x: jnp.cumsum(x, axis=1), (8, 8), ("2, 5", 3)),
        (lambda x: x[2:4], (2, 8), ("0, 5", 1)),
        (lambda x: x.reshape(64), (64,), ("21", 1)),
        (lambda x: jnp.concatenate([x, x]), (16, 8), ("2, 5", 2)),
        (lambda x: jnp.flip(x, 0), (8, 8), ("5, 5", 1)),
        (lambda x: jnp.roll(x, 1, 1), (8, 8), ("2, 6", 1)),
        (lambda x: lax.broadcast_in_dim(x[2], (4, 8), [1]), (4, 8), ("0, 5", 4)),
        (lambda x: x.astype(F16).astype(F32), (8, 8), ("2, 5", 1)),
        (lambda x: x.at[2, 5].set(0.0), (8, 8), []),
        (lambda x: x[:2], (2, 8), []),
        (
            lambda x: jnp.where(plgpu.broadcasted_iota(I32, (8, 8), 0) == 2, 0.0, x),
            (8, 8),
            [],
        ),
    ],
    ids=lambda x: "",
)
def test_spreading(f, shape, expected):
    assert spreading(f, shape) == expected


def test_one_operand_may_decide():
    i, j = (lambda d=d: plgpu.broadcasted_iota(I32, (8, 8), d) for d in range(2))
    known = lambda: (i() == 2) & (j() == 5)  # noqa: E731
    select = lambda f: lambda x: jnp.where(f(x), 1.0, 2.0)  # noqa: E731
    assert spreading(select(lambda x: ~known() & (x > 0))) == []
    assert spreading(select(lambda x: known() & (x > 0))) == ("2, 5", 1)
    assert spreading(select(lambda x: known() | (x > 0))) == []
    assert spreading(select(lambda x: ~known() | (x > 0))) == ("2, 5", 1)
    assert spreading(lambda x: x * 0) == ("2, 5", 1), "NaN times zero"
    assert spreading(lambda x: (x.astype(I32) * 0).astype(F32)) == []


@pytest.mark.parametrize("where", ["a", "b", "registers"])
def test_products(where):
    """An element of a poisons its row, one of b its column."""
    square = plgpu.SMEM(
        (64, 64), F16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )

    def body(x, o, a, b, acc):
        for s in (a, b):
            rows = 56 if (s is a) == (where != "b") else 64
            s[:rows] = x[:rows]
        plgpu.commit_smem()
        left = plgpu.load(a, layout=plgpu.Layout.WGMMA) if where == "registers" else a
        plgpu.wgmma(acc, left, b)
        y = acc[...]
        o[...] = y[:56] if clipped else y[:64]

    x = np.eye(64, dtype=F16)
    scratch = dict(scratch_types=[square, square, plgpu.ACC((64, 64))])
    clipped = False
    if where == "b":
        refused(r"o\[0, 0\] \(4096 of", body, out(64, 64), x, **scratch)
        return
    refused(r"o\[56, 0\] \(512 of.*'a'", body, out(64, 64), x, **scratch)
    clipped = True
    np.testing.assert_array_equal(fine(body, out(56, 64), x, **scratch), x[:56])


@pytest.mark.parametrize("empty", ["a", "b"])
def test_an_operand_that_nobody_filled(empty):
    """It is found even if the result is not used."""
    square = plgpu.SMEM(
        (2, 64, 64), F16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )

    def body(x, o, a, b, acc):
        for s in (a, b):
            s[0] = x[...]
            if (s is a) == (empty == "b") or partly:
                s[1, :8] = x[:8]
        plgpu.commit_smem()
        for slot in range(2):
            plgpu.wgmma(acc, a.at[slot], b.at[slot])  # here
        plgpu.wgmma_wait(0)
        o[...] = x[:8]

    x = np.eye(64, dtype=F16)
    scratch = dict(scratch_types=[square, square, plgpu.ACC((64, 64))])
    partly = False
    text = refused(
        f"operand of the product .*'{empty}', allocated", body, out(8, 64, dtype=F16), x, **scratch
    )
    assert "# here" in text
    partly = True
    np.testing.assert_array_equal(fine(body, out(8, 64, dtype=F16), x, **scratch), x[:8])


def test_clusters():
    """Stores to another block carry it."""

    def body(x, o, tile, other, bar):
        c = lax.axis_index("c")
        pl.when(c == 0)(lambda: tile.set(x[:32], slice(0, 32)))
        plgpu.async_store_smem(tile[...], other, bar, cluster_idx=1 - c, cluster_dim="c")
        wait(bar)
        pl.when(c == 1)(lambda: o.set(other[...] if whole else other[:32], slice(0, n)))

    scratch = [TILE, TILE, plgpu.Barrier()]
    call = dict(cluster=(2,), cluster_names=("c",), scratch_types=scratch)
    whole, n = True, 64
    refused(r"o\[32\] \(32 of.*'tile'", body, out(), X, **call)
    whole, n = False, 32
    np.testing.assert_array_equal(fine(body, out(), X, **call)[:32], X[:32])


def test_overhanging_copies_bring_zeros():
    def body(x, o, tile, bar):
        g2s(x.at[pl.ds(32 + lax.axis_index("i"), N)], tile, bar)
        wait(bar)
        o[...] = tile[...]

    call = dict(scratch_types=[TILE, plgpu.Barrier()], grid=(1,), grid_names=("i",))
    got = fine(body, out(), X, **call)
    np.testing.assert_array_equal(got, np.r_[X[32:], np.zeros(32)])


def test_inline():
    """What a function writes is defined."""
    fill = plgpu.inline_cuda("", arg_types=(plgpu.RefType(),), interpret=lambda ref: ref.fill(2))

    def body(o, tile):
        fill(tile)
        o[...] = tile[...]

    assert (fine(body, out()) == 2).all()


# ---- no false alarm ------------------------------------------------------------------------------


def test_random_kernels():
    for seed in range(8):
        case = kernels.Case(generate.generate(seed).source())
        kernels.check(case, ways=("interpret",), seeds=(seed,), detect_uninitialized=True)


def test_ops():
    for seed in range(40):
        params = plgpu.InterpretParams(detect_uninitialized=True, seed=seed)
        try:
            ops.check(ops.Call(seed), ("interpret",), params)
        except ops.Unfit:
            pass


def test_both_at_once():
    """With the race detector, on one kernel."""

    def body(x, o, tile, bar):
        g2s(x, tile, bar)
        wait(bar)
        o[...] = tile[...]

    params = plgpu.InterpretParams(detect_uninitialized=True, detect_races=True)
    kernel = plgpu.kernel(
        body, out_type=out(), scratch_types=[TILE, plgpu.Barrier()], interpret=params
    )
    np.testing.assert_array_equal(kernel(X), X)
