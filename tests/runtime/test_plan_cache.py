"""What a process keeps of kernels between calls, and what makes it let go."""

import gc
import threading
import weakref

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _caches, _core, ops


@pytest.fixture(autouse=True)
def empty():
    plgpu.clear_caches()
    yield
    plgpu.clear_caches()


def first(traced=None):
    def body(x, o):
        if traced is not None:
            traced.append(x.shape[0])
        o[...] = x[0] + 1

    return plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((), np.float32), interpret=True)


def array(n):
    return np.full(n, n, np.float32)


def test_memory_is_bounded_and_the_least_recently_used_go(monkeypatch):
    traced = []
    k, other = first(traced), first()
    k(array(1))
    one = _core.plan_memory()["bytes"]
    assert _core.plan_memory()["plans"] == 1 and one > 1000
    limit = 20 * one
    monkeypatch.setenv("PALLAS_MGPU_PLAN_BYTES", str(limit))
    for n in range(2, 200):
        assert k(array(n)) == n + 1
        assert k(array(1)) == 2  # used all the time: stays
        if n % 10 == 0:
            other(array(n))
        assert _core.plan_memory()["bytes"] <= limit + one
    assert traced == list(range(1, 200))
    k(array(199))
    assert len(traced) == 199
    k(array(2))
    assert traced[-1] == 2 and k(array(2)) == 3


def test_a_limit_of_zero_keeps_the_newest(monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_PLAN_BYTES", "0")
    k = first()
    for n in (1, 2, 3, 1):
        assert k(array(n)) == n + 1
        assert _core.plan_memory()["plans"] == 1


def test_clear_caches():
    traced = []
    k = first(traced)
    for n in (3, 4, 3):
        k(array(n))
    assert traced == [3, 4] and _core.plan_memory()["plans"] == 2
    plgpu.clear_caches()
    assert _core.plan_memory() == {"plans": 0, "bytes": 0}
    assert k(array(3)) == 4 and traced == [3, 4, 3]


def test_plans_go_with_their_kernel():
    k, other = first(), first()
    for n in range(1, 30):
        k(array(n))
    other(array(1))
    gone = weakref.ref(k)
    del k
    gc.collect()
    assert gone() is None and _core.plan_memory()["plans"] == 1
    assert other(array(1)) == 2


def test_tables_stay_whole_while_plans_leave_them(monkeypatch, rng):
    """Every plan is found, or made anew, whatever left the table before."""
    traced = []
    k = first(traced)
    k(array(1))
    one = _core.plan_memory()["bytes"]
    monkeypatch.setenv("PALLAS_MGPU_PLAN_BYTES", str(24 * one))
    for n in rng.integers(1, 60, 1500).tolist():
        assert k(array(n)) == n + 1
        again = len(traced)
        assert k(array(n)) == n + 1 and len(traced) == again
    assert 60 < len(traced) < 1400


def test_ptx_keep_so_many_kernels(monkeypatch):
    made = []

    @plgpu.specialize
    def family(x, *, by=1):
        made.append(by)
        return lambda x: by

    x = array(1)
    n = _caches.KEPT
    for by in range(n + 300):
        assert family(x, by=by) == by
        assert family(x, by=0) == 0
    assert family(x, by=n) == n and len(made) == n + 300
    for by in range(300):
        assert family(x, by=by) == by
    assert n + 300 < len(made) <= n + 600
    gone = weakref.ref(family.kernel(x, by=5))
    plgpu.clear_caches()
    gc.collect()
    assert gone() is None and family(x, by=5) == 5


def test_comparing_an_option_may_clear_everything():
    class Odd:
        def __init__(self, clear):
            self.clear = clear

        def __hash__(self):
            return 7

        def __eq__(self, other):
            if self.clear or other.clear:
                plgpu.clear_caches()
                gc.collect()
            return True

    @plgpu.specialize
    def family(x, *, odd):
        return lambda x: 1

    for clear in (False, True, True, False, True):
        assert family(array(1), odd=Odd(clear)) == 1


def test_kernels_of_ops_go_too(rng):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    want = ops.softmax(x)
    gone = weakref.ref(ops.softmax.kernel(x))
    plgpu.clear_caches()
    gc.collect()
    assert gone() is None or not isinstance(gone(), _core.Kernel)
    assert (ops.softmax(x) == want).all()


def test_threads_that_call_while_others_clear(monkeypatch):
    k, errors = first(), []
    k(array(1))
    monkeypatch.setenv("PALLAS_MGPU_PLAN_BYTES", str(5 * _core.plan_memory()["bytes"]))

    def work(seed):
        try:
            for n in np.random.default_rng(seed).integers(1, 12, 150).tolist():
                if n == 11:
                    plgpu.clear_caches()
                assert k(array(n)) == n + 1
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
