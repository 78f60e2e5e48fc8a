"""Host memory that runs out: wherever an allocation fails, a call raises MemoryError, and the next
call works. The hook of csrc/base fails the n-th allocation, for every n that a call reaches."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, pl
from pallas_mgpu import numpy as jnp

ROWS = 100


def body(x_gmem, o_gmem):
    def scope(x_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        plgpu.barrier_wait(barrier)
        x = x_smem[...]
        o_gmem[...] = jnp.exp(x) + x.sum()

    pl.run_scoped(scope, plgpu.SMEM((ROWS,), jnp.float32), plgpu.Barrier())


def make(**params):
    out = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32)
    return plgpu.kernel(body, out_type=out, interpret=plgpu.InterpretParams(**params))


X = np.random.default_rng(0).standard_normal(ROWS).astype(np.float32)

CALLS = {
    "interpret": lambda: make()(X),
    "races": lambda: make(detect_races=True, mode="reference")(X),
    "uninitialized": lambda: make(detect_uninitialized=True)(X),
    "seeds": lambda: make(seeds=2)(X),
    "lower": lambda: make().lower(X).as_text("cuda"),
    "parse": lambda: _core.Graph.parse(TEXT).text(),
}
TEXT = make().lower(X).as_text("graph")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_failing_allocation_raises_and_the_next_call_works(call):
    right = call()
    failed = 0
    for n in range(1, 10_000):
        _core.fail_allocation(n)
        try:
            got = call()
        except MemoryError:
            failed += 1
        else:
            break
        finally:
            _core.fail_allocation(0)
        again = call()
        assert again == right if isinstance(right, str) else (again == right).all(), n
    assert failed == n - 1 and failed >= 3
    assert got == right if isinstance(right, str) else (got == right).all()
