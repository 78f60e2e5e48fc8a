"""PALLAS_MGPU_SANITIZE=1: programs that check dynamic indices and end waits by themselves. On the
emulated machine, on a GPU (marked gpu), and as text."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu.machine import run as host

F32 = np.float32
N = 64


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape or (N,), dtype)


def place(text):
    """ "file:line" of the line of this file that ends with a comment."""
    lines = open(__file__, encoding="utf-8").read().splitlines()
    return f"{__file__}:{next(k for k, x in enumerate(lines, 1) if x.endswith(f'#: {text}'))}"


# ---- kernels: each accesses something at an index that it reads from memory ----------------------


def load(i, x, o):
    o[0] = x[i[0]]  #: load


def store(i, x, o):
    o[pl.ds(i[0], 16)] = x[pl.ds(0, 16)]  #: store


def atomic(i, x, o):
    o[...] = x[...]
    pl.atomic_add(o, (i[0],), 1.0)  #: atomic


def copy(i, x, o, tiles, bars):
    plgpu.copy_gmem_to_smem(x, tiles.at[i[0]], bars.at[0])  #: copy
    plgpu.barrier_wait(bars.at[0])
    o[...] = tiles[i[0]]


def barrier(i, x, o, tiles, bars):
    plgpu.barrier_arrive(bars.at[i[0]])  #: barrier
    o[...] = x[...]


def of_view(i, x, o, tiles, bars):
    half = tiles.at[1, pl.ds(32, 32)]
    half[...] = x[pl.ds(0, 32)]
    o[0] = half[i[0]]  #: of_view


SCRATCH = [plgpu.SMEM((2, N), F32), plgpu.Barrier(num_barriers=2)]
KERNELS = {  # indices that are right, that are wrong; of the message
    load: ((0, N - 1), (N, -1), "index {} of dimension 0 lies outside 'x' of shape (64,)"),
    store: (
        (0, N - 16),
        (N - 15, -1),
        "range {}:{} of dimension 0 lies outside 'o' of shape (64,)",
    ),
    atomic: ((0, N - 1), (N, -5), "index {} of dimension 0 lies outside 'o' of shape (64,)"),
    copy: ((0, 1), (2, -1), "index {} of dimension 0 lies outside 'tiles' of shape (2, 64)"),
    barrier: ((0, 1), (2, -1), "index {} of dimension 0 lies outside 'bars' of shape (2,)"),
    of_view: (
        (0, 31),
        (32, -33),
        "index {} of dimension 0 lies outside a view of 'tiles' of shape",
    ),
}


def kernel(body, **options):
    scratch = SCRATCH if body in (copy, barrier, of_view, matrix) else []
    return plgpu.kernel(body, out_type=out(), scratch_types=scratch, **options)


def arguments(i):
    return np.array([i], np.int32), np.arange(N, dtype=F32)


def emulated(lowered, args, seed=0):
    """The program with all its checks on the emulated machine."""
    text, info = lowered.graph.cuda(
        line=False, catalogue=False, check_indices=True, check_waits=True
    )
    assert "sanitizer" in text and info["sites"]
    outs = [np.zeros(shape, dtype) for dtype, shape, *_ in info["params"][len(args) :]]
    host.run_program(text, info, list(args), outs, seed)
    return outs, info


@pytest.mark.parametrize("body", KERNELS)
def test_indices_on_the_emulated_machine(body):
    right, wrong, _ = KERNELS[body]
    lowered = kernel(body, interpret=True).lower(*arguments(0))
    for i in right:
        emulated(lowered, arguments(i))
    for i in wrong:
        with pytest.raises(host.HostError, match=rf"index {i} is not in") as caught:
            emulated(lowered, arguments(i))
        facts = {f[0]: dict(zip(f[2::2], f[3::2])) for f in caught.value.facts if f[0] == "site"}
        assert facts["site"]["value"] == str(i)


def message(body, i):
    return KERNELS[body][2].format(i, i + 16)


@pytest.mark.parametrize("body", KERNELS)
def test_judges_name_the_index(body):
    """The interpreter and `interpret="emulate"`, whose programs check indices, too."""
    for i in KERNELS[body][1]:
        for way in (True, "emulate"):
            with pytest.raises(IndexError) as caught:
                kernel(body, interpret=way)(*arguments(i))
            assert message(body, i) in str(caught.value), way
            assert place(body.__name__) in str(caught.value)


def gather(i, x, o):
    o[...] = x[i[...]]  #: gather


def scatter(i, x, o):
    o[...] = x[...]
    o[i[...]] = x[...] * 2  #: scatter


def masked(i, x, o):
    o[...] = pl.load(x, (i[...],), mask=i[...] < N, other=0.0)  #: masked


def add(i, x, o):
    o[...] = x[...]
    pl.atomic_add(o, (i[...],), x[...])  #: add


ARRAYS = {gather: (N, -1), scatter: (N, -1), masked: (-1,), add: (N + 7, -1)}


def overhang(i, x, o):
    """A slice may overhang as far as the mask reaches."""
    keep = lax.broadcasted_iota(np.int32, (32,), 0) < 20
    o[...] = x[...]
    o[pl.ds(0, 32)] = pl.load(x, (pl.ds(i[0], 32),), mask=keep, other=0.0)  #: overhang


def matrix(i, x, o, tiles, bars):
    """Along both dimensions, in shared memory; the row under the mask, too."""
    tiles[...] = plgpu.numpy.zeros((2, N), F32)
    shape = 2, 16
    row, column = (lax.broadcasted_iota(np.int32, shape, d) for d in range(2))
    plgpu.store(
        tiles.at[pl.ds(i[0] // N, 2), pl.ds(i[0] % N, 16, 2)],
        plgpu.numpy.ones(shape, F32),
        mask=(row == 0) & (column < 10),
    )  #: matrix
    o[...] = tiles[1]


MASKED = {  # starts that are right, that are wrong; the element that is outside
    overhang: ((0, N - 20), dict.fromkeys((N - 19, -1), "dimension 0 lies outside 'x'")),
    matrix: (
        (0, N - 20, N + 5),
        {N - 18: "dimension 1 lies outside 'tiles'"}
        | dict.fromkeys((2 * N, -N), "dimension 0 lies outside 'tiles'"),
    ),
}


def indices(bad):
    i = np.arange(N, dtype=np.int32)
    i[5] = bad
    return i, np.arange(N, dtype=F32)


@pytest.mark.parametrize("body", ARRAYS)
def test_arrays_of_indices(body):
    """Also with one element twice; one outside is named, unless it is masked."""
    for way in (True, "emulate"):
        k = kernel(body, interpret=way)
        k(*indices(6))
        if body is masked:
            assert k(*indices(N))[5] == 0
        for i in ARRAYS[body]:
            with pytest.raises(IndexError, match=rf"out of bounds: index {i} of") as caught:
                k(*indices(i))
            assert place(body.__name__) in str(caught.value), way


def forever(o, bar, go):
    t = lax.axis_index("t")
    pl.when(t == 1)(lambda: plgpu.barrier_wait(bar))  #: forever
    o[...] = plgpu.numpy.zeros((N,), F32)


@pytest.mark.parametrize("body", MASKED)
def test_slices_under_masks(body):
    """Of a slice under a mask that is an array, what the mask leaves has to be inside."""
    right, wrong = MASKED[body]
    for way in (True, "emulate"):
        k = kernel(body, interpret=way)
        for i in right:
            k(*arguments(i))
        for i, what in wrong.items():
            with pytest.raises(IndexError, match=what) as caught:
                k(*arguments(i))
            assert os.path.basename(__file__) in str(caught.value), way


FOREVER = dict(
    num_threads=2,
    thread_name="t",
    scratch_types=[plgpu.Barrier(), plgpu.SemaphoreType.REGULAR],
)


def signalled(o, bar, go):
    pl.semaphore_wait(go, 1)  #: signalled
    o[...] = plgpu.numpy.zeros((N,), F32)


@pytest.mark.parametrize("body, what", [(forever, "barrier_wait"), (signalled, "semaphore_wait")])
def test_waits_have_sites(body, what):
    lowered = plgpu.kernel(body, out_type=out(), interpret=True, **FOREVER).lower()
    text, info = lowered.graph.cuda(line=False, catalogue=False, check_waits=True)
    number, site = next((k, s) for k, s in enumerate(info["sites"]) if s[2] == what)
    assert f"{site[0]}:{site[1]}" == place(body.__name__) and site[7]
    with pytest.raises(host.HostError, match="deadlock") as caught:
        host.run_program(text, info, [], [np.zeros(N, F32)])
    assert any(f[:3] == ["waits", "site", str(number)] for f in caught.value.facts)


def test_what_is_known_is_not_checked():
    """Loops that stay inside, constants; and without the switch nothing changes."""

    def body(x, o):
        def step(i, _):
            o[i] = x[N - 1 - i]

        lax.fori_loop(0, N, step, None)
        o[3] = x[4]

    lowered = plgpu.kernel(body, out_type=out(), interpret=True).lower(np.ones(N, F32))
    checked, info = lowered.graph.cuda(check_indices=True)
    plain, _ = lowered.graph.cuda()
    assert not info["sites"] and checked == plain
    lowered = kernel(load, interpret=True).lower(*arguments(0))
    assert "sanitizer" not in lowered.as_text("cuda")


def test_copies_are_clipped(rng):
    """What a copy reads beyond an argument is zero, which is no error."""

    def body(i, x, o, tile, bar):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(i[0], 32)], tile, bar)
        plgpu.barrier_wait(bar)
        o[...] = tile[...]

    scratch = [plgpu.SMEM((32,), F32), plgpu.Barrier()]
    results = []
    for way in (True, "emulate"):
        k = plgpu.kernel(body, out_type=out(32), scratch_types=scratch, interpret=way)
        results.append(k(np.array([48], np.int32), np.arange(N, dtype=F32)))
    np.testing.assert_array_equal(results[0], results[1])
    assert results[0][15] == 63 and not results[0][16:].any()


def lowered_ops():
    z = lambda *shape: np.zeros(shape, np.float16)  # noqa: E731
    for op, *args in [
        (ops.matmul, z(512, 256), z(256, 512)),
        (ops.attention, *[z(1, 2, 256, 64)] * 3),
        (ops.softmax, z(64, 512)),
        (ops.ragged_dot, z(128, 64), z(2, 64, 128), np.array([50, 78], np.int32)),
    ]:
        yield op.__name__, op.kernel(*args).lower(*args), args


@pytest.mark.long
def test_ops_compile_and_run_with_checks(monkeypatch):
    """No false alarm, and the compiler takes the checks."""
    monkeypatch.setenv("PALLAS_MGPU_SANITIZE", "1")
    for name, lowered, args in lowered_ops():
        used = lowered.resources()
        assert used["spill_bytes"] == 0, (name, used)
        assert "u32* sanitizer" in lowered.as_text("cuda"), name
        assert not re.search("C75(08|09|1[0-2]|20)", used["log"]), used["log"]
        emulated(lowered, args)


# ---- every wait ends after a failure -------------------------------------------------------------


def threads(body, n=2, scratch=(), **options):
    return plgpu.kernel(
        body,
        out_type=out(n, N),
        scratch_types=list(scratch),
        num_threads=n,
        thread_name="t",
        **options,
    )


def before_a_section(i, x, o):
    t = lax.axis_index("t")
    for _ in range(2):
        with plgpu.ext.ordered_section(2):  #: enter
            o[t] = x[pl.ds(i[t], N)]  #: before_a_section


def before_a_named_barrier(i, x, o):
    t = lax.axis_index("t")
    o[t] = x[pl.ds(i[t], N)]  #: before_a_named_barrier
    plgpu.ext.named_barrier_sync(1, 2)


def before_an_arrival(i, x, o):
    t = lax.axis_index("t")

    @pl.when(t == 0)
    def _():
        o[0] = x[pl.ds(i[0], N)]  #: before_an_arrival
        plgpu.ext.named_barrier_arrive(1, 2)

    @pl.when(t == 1)
    def _():
        plgpu.ext.named_barrier_sync(1, 2)
        o[1] = x[pl.ds(i[1], N)]


def before_a_scope(i, x, o):
    t = lax.axis_index("t")
    o[t] = x[pl.ds(i[t], N)]  #: before_a_scope

    def scope(tile):
        tile[t] = o[t]

    pl.run_scoped(scope, plgpu.SMEM((2, N), F32), collective_axes="t")


def before_an_mbarrier(i, x, o, tile, bars):
    t = lax.axis_index("t")

    @pl.when(t == 0)
    def _():
        plgpu.copy_gmem_to_smem(x.at[pl.ds(0, N)], tile.at[i[0]], bars.at[0])  #: before_an_mbarrier

    @pl.when(t == 1)
    def _():
        plgpu.barrier_wait(bars.at[0])
        o[1] = tile[0]


def before_a_semaphore(i, x, o, go):
    t = lax.axis_index("t")

    @pl.when(t == 0)
    def _():
        o[0] = x[pl.ds(i[0], N)]  #: before_a_semaphore
        pl.semaphore_signal(go, 1)

    @pl.when(t == 1)
    def _():
        pl.semaphore_wait(go, 1)
        o[1] = x[pl.ds(i[1], N)]


def section_never_left(i, x, o, bar):
    t = lax.axis_index("t")
    with plgpu.ext.ordered_section(2):  #: section_never_left
        pl.when(t == i[0])(lambda: plgpu.barrier_wait(bar))  #: nobody_arrives
        o[t] = x[pl.ds(0, N)]


def nobody_comes(i, x, o):
    t = lax.axis_index("t")
    pl.when(t == i[0])(lambda: plgpu.ext.named_barrier_sync(1, 2))  #: nobody_comes
    o[t] = x[pl.ds(0, N)]


TILES = (plgpu.SMEM((2, N), F32), plgpu.Barrier(num_barriers=2))
LEAVING = [  # kernel, scratch, indices, what is noted: places of which one is reported, its value
    (before_a_section, (), (0, N + 1), ("before_a_section",), N + 1),
    (before_a_section, (), (-3, 0), ("before_a_section",), -3),
    (before_a_named_barrier, (), (0, N + 1), ("before_a_named_barrier",), N + 1),
    (before_an_arrival, (), (N + 7, 0), ("before_an_arrival",), N + 7),
    (before_a_scope, (), (0, -1), ("before_a_scope",), -1),
    (before_an_mbarrier, TILES, (2, 0), ("before_an_mbarrier",), 2),
    (before_a_semaphore, (plgpu.SemaphoreType.REGULAR,), (-1, 0), ("before_a_semaphore",), -1),
    (section_never_left, (plgpu.Barrier(),), (0, 0), ("section_never_left", "nobody_arrives"), 0),
    (nobody_comes, (), (0, 0), ("nobody_comes",), 0),
]


def leaving(body, i, scratch, seed=0, n=4):
    """What the kernel notes on the emulated machine, as on a GPU; it must end."""
    k = threads(body, scratch=scratch, interpret=True, grid=(n,), grid_names=("g",))
    args = np.array(i, np.int32), np.arange(2 * N, dtype=F32)
    lowered = k.lower(*args)
    text, info = lowered.graph.cuda(
        line=False, catalogue=False, check_indices=True, check_waits=True
    )
    noted = []
    host.run_program(text, info, list(args), [np.zeros((2, N), F32)], seed, noted)
    return noted, info


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", range(len(LEAVING)))
def test_all_threads_leave(case, seed):
    """After a failed check, or a wait that gives up, no thread waits for one that has left: at
    ordered sections, named barriers, collective scopes, barriers and semaphores."""
    body, scratch, i, places, value = LEAVING[case]
    noted, info = leaving(body, i, scratch, seed)
    assert noted[0] == 1
    site = info["sites"][noted[1]]
    assert f"{site[0]}:{site[1]}" in [place(p) for p in places]
    assert np.uint32(noted[2]).view(np.int32) == value
    assert noted[3] < 4 and noted[6] < 256
    if value < 0 or value >= N:
        assert noted[6] // 128 == [k for k in (0, 1) if i[k] == value][0]


# ---- on a GPU ------------------------------------------------------------------------------------

CHILD, MOST = "PALLAS_MGPU_TEST_SANITIZE", 300  # seconds
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(CHILD not in os.environ, reason="test_on_a_gpu runs it"),
]


def marked(test):
    for mark in on_a_gpu:
        test = mark(test)
    return test


@pytest.mark.gpu
@pytest.mark.skipif(CHILD in os.environ, reason="this is the other process")
def test_on_a_gpu():
    """The tests below, in a process of their own: a kernel that does not end is ended with it."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, CHILD: "1", "PALLAS_MGPU_SANITIZE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    with subprocess.Popen(
        [*command, "-n", "0", __file__],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            text, _ = child.communicate(timeout=MOST)
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
            pytest.fail(f"a kernel did not end in {MOST} s:\n{text[-2000:]}", pytrace=False)
    assert child.returncode == 0, text[-4000:]
    assert re.search(r"\b[1-9]\d* passed", text), text[-2000:]


@marked
@pytest.mark.parametrize("body", KERNELS)
def test_indices_on_a_gpu(body):
    """An error with the line, and the context stays usable."""
    k = kernel(body)
    for i in KERNELS[body][0]:
        k(*map(plgpu.device_put, arguments(i)))
    for i in KERNELS[body][1]:
        with pytest.raises(IndexError) as caught:
            k(*map(plgpu.device_put, arguments(i)))
        text = str(caught.value)
        assert message(body, i) in text and place(body.__name__) in text
        assert "block (0, 0, 0), thread 0" in text
    right = KERNELS[body][0][0]
    got = [kernel(body, **o)(*arguments(right)) for o in ({}, {"interpret": True})]
    if body in (load, store, copy):
        n = {load: 1, store: 16, copy: N}[body]
        np.testing.assert_array_equal(got[0][:n], got[1][:n])


@marked
@pytest.mark.parametrize("body", ARRAYS)
def test_arrays_of_indices_on_a_gpu(body):
    k = kernel(body)
    for i in ARRAYS[body]:
        with pytest.raises(IndexError, match=rf"out of bounds: index {i} of") as caught:
            k(*map(plgpu.device_put, indices(i)))
        assert place(body.__name__) in str(caught.value)
    k(*map(plgpu.device_put, indices(6)))


@marked
@pytest.mark.parametrize("body, what", [(forever, "barrier_wait"), (signalled, "semaphore_wait")])
def test_waits_end_on_a_gpu(body, what):
    k = plgpu.kernel(body, out_type=out(), **FOREVER)
    with pytest.raises(plgpu.DeadlockError, match=f"{what} of '.*' did not end") as caught:
        k(out=plgpu.device_put(np.ones(N, F32)))
    assert place(body.__name__) in str(caught.value)
    x = plgpu.device_put(np.arange(N, dtype=F32))
    np.testing.assert_array_equal(kernel(load)(plgpu.device_put(arguments(5)[0]), x).numpy()[0], 5)


@marked
def test_ops_on_a_gpu_with_checks(rng):
    a, b = (rng.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    got = ops.matmul(plgpu.device_put(a), plgpu.device_put(b)).numpy()
    np.testing.assert_allclose(got, a.astype(F32) @ b.astype(F32), rtol=2e-2, atol=0.5)


@marked
@pytest.mark.parametrize("case", range(len(LEAVING)))
def test_all_threads_leave_on_a_gpu(case):
    """And a kernel that is right runs afterwards."""
    body, scratch, i, places, value = LEAVING[case]
    x = plgpu.device_put(np.arange(2 * N, dtype=F32))
    k = threads(body, scratch=scratch)
    o = plgpu.device_put(np.zeros((2, N), F32))
    with pytest.raises((IndexError, plgpu.DeadlockError)) as caught:
        k(plgpu.device_put(np.array(i, np.int32)), x, out=o)
    assert any(place(p) in str(caught.value) for p in places), str(caught.value)
    got = threads(before_a_section)(plgpu.device_put(np.array([3, 5], np.int32)), x).numpy()
    np.testing.assert_array_equal(got, np.arange(N) + np.array([[3], [5]]))


@marked
@pytest.mark.parametrize("body", MASKED)
def test_slices_under_masks_on_a_gpu(body):
    right, wrong = MASKED[body]
    k = kernel(body)
    for i in right:
        k(*map(plgpu.device_put, arguments(i)))
    for i, what in wrong.items():
        with pytest.raises(IndexError, match=what):
            k(*map(plgpu.device_put, arguments(i)))


def in_a_cluster(i, x, o, tile, met):
    """Both blocks store; i says which block's memory is read, and who arrives."""
    me = lax.axis_index("c")
    tile[...] = x[...]
    pl.when(i[1] == 0)(lambda: plgpu.barrier_arrive(met))
    plgpu.barrier_wait(met)  #: meets
    o[me] = plgpu.cluster_ref(tile, {"c": i[0]})[...]  #: peer
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def cluster_kernel(**options):
    return plgpu.kernel(
        in_a_cluster,
        out_type=out(2, N),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[plgpu.SMEM((N,), F32), plgpu.ClusterBarrier(collective_axes=("c",))],
        **options,
    )


CLUSTER = [  # which block, whether the barrier is forgotten; what is reported, and where
    ((2, 0), IndexError, "cluster_ref of 'tile' to index 2", "peer"),
    ((-1, 0), IndexError, "cluster_ref of 'tile' to index -1", "peer"),
    ((0, 1), plgpu.DeadlockError, "barrier_wait of 'met' did not end", "meets"),
]


@pytest.mark.parametrize("i, error, what, where", CLUSTER)
def test_clusters_on_the_emulated_machine(i, error, what, where):
    """Blocks of a cluster leave together."""
    x = np.arange(N, dtype=F32)
    lowered = cluster_kernel(interpret=True).lower(np.array(i, np.int32), x)
    text, info = lowered.graph.cuda(
        line=False, catalogue=False, check_indices=True, check_waits=True
    )
    for seed in range(4):
        noted = []
        outs = [np.zeros((2, N), F32)]
        host.run_program(text, info, [np.array(i, np.int32), x], outs, seed, noted)
        site = info["sites"][noted[1]]
        assert noted[0] == 1 and f"{site[0]}:{site[1]}" == place(where)


@marked
@pytest.mark.parametrize("i, error, what, where", CLUSTER)
def test_clusters_on_a_gpu(i, error, what, where):
    k, x = cluster_kernel(), plgpu.device_put(np.arange(N, dtype=F32))
    with pytest.raises(error, match=what) as caught:
        k(plgpu.device_put(np.array(i, np.int32)), x)
    assert place(where) in str(caught.value)
    got = k(plgpu.device_put(np.array([1, 0], np.int32)), x).numpy()
    np.testing.assert_array_equal(got, np.stack([np.arange(N)] * 2))
