"""Warnings at lowering, "missing synchronisation": a fence or a wait that is missing on every path
of one thread (csrc/passes/ordering.c). Each case is also a race to the interpreter; what is right,
or wrong on some paths only, has no warning."""

import contextlib
import re
import warnings

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp

F32 = np.float32
N = 128
X = np.arange(N, dtype=F32)
TILE, BAR = plgpu.SMEM((N,), F32), plgpu.Barrier()
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
wait, commit, stored = plgpu.barrier_wait, plgpu.commit_smem, plgpu.wait_smem_to_gmem


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (N,), dtype)


def found(body, *args, outs=None, **options):
    """(text, line) of the warnings of lowering."""
    options.setdefault("scratch_types", [TILE, BAR])
    kernel = plgpu.kernel(body, out_type=out() if outs is None else outs, interpret=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel.lower(*args)
    return [
        (str(w.message), w.lineno) for w in caught if "missing synchronisation" in str(w.message)
    ]


def line_of(text):
    lines = open(__file__, encoding="utf-8").read().splitlines()
    return next(k for k, x in enumerate(lines, 1) if x.endswith(f"#: {text}"))


def no_commit(x, o, tile, bar):
    tile[...] = x[...]  #: no_commit first
    s2g(tile, o)  #: no_commit
    stored(0)


def no_wait_for_load(x, o, tile, bar):
    g2s(x, tile, bar)  #: no_wait_for_load first
    o[...] = tile[...]  #: no_wait_for_load
    wait(bar)


def two_loads(x, o, tile, bar):
    g2s(x, tile, bar)  #: two_loads first
    g2s(x, tile, bar)  #: two_loads
    wait(bar)
    o[...] = tile[...]


def source_overwritten(x, o, tile, bar):
    tile[...] = x[...]
    commit()
    s2g(tile, o)  #: source_overwritten first
    tile[3] = 1.0  #: source_overwritten
    stored(0)


def source_loaded(x, o, tile, bar):
    tile[...] = x[...]
    commit()
    s2g(tile, o)  #: source_loaded first
    g2s(x, tile, bar)  #: source_loaded
    wait(bar)
    stored(0)


def destination_read(x, o, tile, bar):
    tile[...] = x[...]
    commit()
    s2g(tile, o)  #: destination_read first
    stored(0, wait_read_only=True)
    tile[...] = o[...]  #: destination_read
    stored(0)


def in_a_loop(x, o, tile, bar):
    tile[...] = x[...]  #: in_a_loop first

    def step(i, _):
        s2g(tile, o)  #: in_a_loop
        stored(0)

    lax.fori_loop(0, 3, step, None)


def in_both_branches(x, o, tile, bar):
    def store(value):
        tile[...] = jnp.full((N,), value, F32)  #: in_both_branches first

    lax.cond(x[0] > 1, lambda: store(1.0), lambda: store(2.0))
    s2g(tile, o)  #: in_both_branches
    stored(0)


def by_index(x, o, tile, bar):
    tile[N - 1 - lax.broadcasted_iota(jnp.int32, (N,), 0)] = x[...]  #: by_index first
    s2g(tile, o)  #: by_index
    stored(0)


def added(x, o, tile, bar):
    tile[...] = x[...]
    commit()
    pl.atomic_add(tile, (3,), 1.0)  #: added first
    s2g(tile, o)  #: added
    stored(0)


def by_warps(x, o, tile, bar):
    @plgpu.warp_map
    def _(warp):
        tile[warp] = x[warp]  #: by_warps first

    s2g(tile, o)  #: by_warps
    stored(0)


def memory_of_a_scope(x, o, tile, bar):
    def first(a):
        a[...] = x[...]
        commit()
        s2g(a, o)  #: memory_of_a_scope first

    def second(b):
        b[...] = x[...]  #: memory_of_a_scope
        stored(0)
        o[...] = b[...]

    pl.run_scoped(first, TILE)
    pl.run_scoped(second, TILE)


def memory_of_a_union(x, o, tile, bar):
    def scope(union):
        a, b = union
        g2s(x, a, bar)  #: memory_of_a_union first
        b[...] = x[...]  #: memory_of_a_union
        wait(bar)
        o[...] = a[...] + b[...]

    pl.run_scoped(scope, plgpu.RefUnion(TILE, TILE))


def stored_twice(x, o, tile, bar):
    tile[...] = x[...]
    commit()
    s2g(tile, o)  #: stored_twice first
    s2g(tile, o)  #: stored_twice
    stored(0)


WRONG = {  # what the warning says
    by_index: r"plgpu.commit_smem\(\) between",
    added: r"plgpu.commit_smem\(\) between",
    by_warps: r"plgpu.commit_smem\(\) between",
    memory_of_a_scope: r"store writes 'b', which may still be read by the copy_smem_to_gmem",
    memory_of_a_union: r"may still be written by the copy_gmem_to_smem",
    stored_twice: r"copy_smem_to_gmem writes 'o', which may still be written by the copy_smem_to",
    no_commit: r"copy_smem_to_gmem reads 'tile', .* plgpu.commit_smem\(\) between",
    no_wait_for_load: r"load reads 'tile', which may still be written by .* plgpu.barrier_wait",
    two_loads: r"copy_gmem_to_smem writes 'tile', which may still be written by",
    source_overwritten: r"store writes 'tile', .*wait_smem_to_gmem\(0, wait_read_only=True\)",
    source_loaded: r"copy_gmem_to_smem writes 'tile', which may still be read by the copy_smem_to",
    destination_read: r"load reads 'o', which may still be written by .*wait_smem_to_gmem\(0\)",
    in_a_loop: r"plgpu.commit_smem\(\) between",
    in_both_branches: r"plgpu.commit_smem\(\) between",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_missing_is_told_with_both_lines(body):
    (text, line), *_ = found(body, X)
    assert re.search(WRONG[body], text), text
    assert line == line_of(body.__name__)
    assert f" in line {line_of(body.__name__ + ' first')};" in text
    params = plgpu.InterpretParams(detect_races=True)
    kernel = plgpu.kernel(body, out_type=out(), scratch_types=[TILE, BAR], interpret=params)
    with warnings.catch_warnings(), pytest.raises((plgpu.RaceError, ValueError)):
        warnings.simplefilter("ignore")
        kernel(X)


def test_operands_of_a_product():
    def body(a, b, o, sa, sb, ready, acc):
        g2s(a, sa, ready)
        g2s(b, sb, ready)
        wait(ready)
        plgpu.wgmma(acc, sa, sb)
        sa[...] = jnp.zeros((64, 64), np.float16)  #: product
        plgpu.wgmma_wait(0)
        o[...] = acc[...]

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((64, 64), np.float16, transforms=tiled)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=2), plgpu.ACC((64, 64))]
    a = np.ones((64, 64), np.float16)
    ((text, line),) = found(body, a, a, outs=out(64, 64), scratch_types=scratch)
    assert "may still be read by the product" in text and "plgpu.wgmma_wait(0)" in text
    assert line == line_of("product")


# ---- no warning ----------------------------------------------------------------------------------


def in_one_branch(x, o, tile, bar):
    tile[...] = x[...]
    pl.when(x[0] > 1)(lambda: commit() and None)
    s2g(tile, o)
    stored(0)


def other_parts(x, o, tile, bar):
    g2s(x.at[pl.ds(0, 64)], tile.at[pl.ds(0, 64)], bar)
    tile[pl.ds(64, 64)] = x[pl.ds(64, 64)]
    wait(bar)
    commit()
    s2g(tile.at[pl.ds(64, 64)], o.at[pl.ds(64, 64)])
    tile[3] = 2.0
    o[pl.ds(0, 64)] = tile[pl.ds(0, 64)]
    stored(0)


def traced_parts(x, o, tile, bar):
    i = x[0].astype(np.int32)
    tile[pl.ds(i, 1)] = jnp.ones((1,), F32)
    s2g(tile.at[pl.ds(64, 64)], o.at[pl.ds(64, 64)])
    stored(0)


def right(x, o, tile, bar):
    g2s(x, tile, bar)
    wait(bar)
    tile[...] = tile[...] + 1
    commit()
    s2g(tile, o)
    stored(0)
    tile[...] = o[...]


def by_another_thread(x, o, tile, there, back):
    """The other thread fences what it was told of, and tells this one."""

    def first():
        tile[...] = x[...]
        plgpu.barrier_arrive(there)
        wait(back)
        s2g(tile, o)
        stored(0)

    def second():
        wait(there)
        commit()
        plgpu.barrier_arrive(back)

    lax.cond(lax.axis_index("t") == 0, first, second)


def sums_and_warps(x, o, tile, bar):
    """Combining copies to one place, stores where a mask is true, warps that commit or wait."""
    pl.store(tile, (slice(None),), x[...], mask=x[...] > 5)
    commit()
    s2g(tile, o, reduction_op="add")
    s2g(tile, o, reduction_op="add")
    stored(0)
    pl.atomic_add(tile, (x[0].astype(jnp.int32),), 1.0)

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 1)(commit)
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        pl.when(warp == 0)(lambda: s2g(tile, o, reduction_op="add"))
        stored(0)


@pytest.mark.parametrize("body", [in_one_branch, other_parts, traced_parts, right, sums_and_warps])
def test_what_may_be_right_is_not_told(body):
    assert not found(body, X)


def test_parts_as_large_as_the_array():
    """64 rows of two columns of 32 x 2 x 64: as many elements as there are, but not all of them."""

    def body(x, o, tile):
        tile[...] = x[pl.ds(0, 64)]
        commit()
        i = lax.axis_index("i")
        for h in range(2):
            s2g(tile, o.at[pl.ds(i * 64, 64), h])
        stored(0)

    x = np.ones((64, 64), F32)
    options = {"scratch_types": [plgpu.SMEM((64, 64), F32)], "grid": (1,), "grid_names": ("i",)}
    assert not found(body, x, outs=out(32, 2, 64), **options)


def test_parts_beyond_the_end():
    """Tiles as large as the array, of which some are outside."""

    def body(x, o, tile):
        tile[...] = x[...]
        commit()
        i = lax.axis_index("i")
        for k in range(2):
            s2g(tile, o.at[pl.ds(i * 2 * N + k * N, N)])
        stored(0)

    options = {"scratch_types": [TILE], "grid": (2,), "grid_names": ("i",)}
    assert not found(body, X, **options)


@pytest.mark.parametrize("rows, parts", [(8, 2), (32, 1), (9, 2)])
def test_parts_of_rows_beyond_the_end(rows, parts):
    """Columns that follow each other, of more rows than there are: as many elements as the array
    has, or others."""

    def body(first, o, tile):
        tile[...] = jnp.zeros((64, 32), F32)
        commit()
        column = pl.multiple_of(first[0], 32)
        for k in range(4):
            s2g(tile, o.at[0, pl.ds(0, 64), pl.ds(column + 32 * k, 32)])
        stored(0)

    options = {"outs": out(parts, rows, 128), "scratch_types": [plgpu.SMEM((64, 32), F32)]}
    assert not found(body, np.zeros(1, np.int32), **options)


def test_another_thread_may_fence():
    options = dict(scratch_types=[TILE, BAR, BAR], num_threads=2, thread_name="t")
    assert not found(by_another_thread, X, **options)
    params = plgpu.InterpretParams(detect_races=True, mode="reference")
    kernel = plgpu.kernel(by_another_thread, out_type=out(), interpret=params, **options)
    np.testing.assert_array_equal(kernel(X), X)


def test_ops_have_no_warning():
    z = lambda *shape: np.zeros(shape, np.float16)  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="missing synchronisation")
        for op, *args in [
            (ops.matmul, z(512, 256), z(256, 512)),
            (ops.attention, *[z(1, 2, 256, 64)] * 3),
            (ops.softmax, z(64, 512)),
            (ops.layer_norm, z(64, 512)),
            (ops.ragged_dot, z(128, 64), z(2, 64, 128), np.array([50, 78], np.int32)),
        ]:
            op.kernel(*args).lower(*args)


# ---- plgpu.testing.check -------------------------------------------------------------------------


def test_check_makes_it_an_error(capsys):
    kernel = plgpu.kernel(no_commit, out_type=out(), scratch_types=[TILE, BAR])
    for backend in ("interpret", "emulate"):
        with pytest.raises(plgpu.RaceError, match="missing synchronisation.*commit_smem") as caught:
            plgpu.testing.check(kernel, X, seeds=1, backends=backend)
        assert f"{__file__}:{line_of('no_commit')}" in str(caught.value)
    assert "plgpu.testing.check(kernel, ..., seeds=(0,)" in capsys.readouterr().out
    with contextlib.suppress(plgpu.RaceError), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plgpu.kernel(no_commit, out_type=out(), scratch_types=[TILE, BAR], interpret="emulate")(X)
    assert any("missing synchronisation" in str(w.message) for w in caught)
