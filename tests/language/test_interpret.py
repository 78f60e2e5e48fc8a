"""The fields of InterpretParams."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32 = np.float16, np.float32
LOG = plgpu.LoggingMode


def exchange(x_ref, n_ref, o_ref, m_ref, tile, ready, sem):
    """Floats in one thread, integers in another that waits for it."""
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(x_ref, tile, ready)
        plgpu.barrier_wait(ready)
        step = lambda i, a: a + jnp.exp(tile[0].astype(F32))  # noqa: E731
        total = lax.fori_loop(0, 3, step, jnp.zeros((64,), F32))
        product = jnp.dot(tile[...], tile[...], preferred_element_type=F32)
        o_ref[...] = product + total
        tile[...] = product.astype(F16)
        plgpu.semaphore_signal(sem)

    @pl.when(wg == 1)
    def _():
        plgpu.semaphore_wait(sem)
        m_ref[...] = n_ref[...] * 2 + jnp.where(x_ref[0, 0] > 1, 100, 0)


def call(rng, **fields):
    x = rng.standard_normal((64, 64)).astype(F16)
    n = np.arange(8, dtype=np.int32)
    kernel = plgpu.kernel(
        exchange,
        out_type=[plgpu.ShapeDtypeStruct(*t) for t in (((64, 64), F32), ((8,), np.int32))],
        scratch_types=[plgpu.SMEM((64, 64), F16), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(**fields),
    )
    return kernel(x * 0, n), x, n


@pytest.mark.filterwarnings("ignore:.*is converted from layout:UserWarning")
def test_without_floating_point_work(rng):
    """Floats read as +inf, in stores and where integers and branches depend on them; the rest is as
    ever."""
    (o, m), _, n = call(rng)
    assert (o == 3).all() and (m == 2 * n).all()
    (o, m), _, n = call(rng, skip_floating_point_ops=True)
    assert (o == np.inf).all(), "every float is +inf"
    np.testing.assert_array_equal(m, 2 * n + 100)  # inf > 1


@pytest.mark.filterwarnings("ignore:.*is converted from layout:UserWarning")
def test_logging(rng, capsys):
    """A line for each event of the kinds that were asked for, with agent and line."""
    call(rng)
    assert capsys.readouterr().out == ""
    seen = {}
    for kind in LOG:
        call(rng, logging_mode=kind)
        seen[kind] = capsys.readouterr().out.splitlines()
    first = {LOG.BARRIER: "[barrier] ", LOG.SEMAPHORE: "[semaphore] "}
    for kind, lines in seen.items():
        assert lines and all(
            x.startswith(first.get(kind, "[shared memory] ")) and "test_interpret.py:" in x
            for x in lines
        )
    barriers, semaphores, memory = ("\n".join(seen[k]) for k in LOG)
    assert "thread 0: arrival 1 of 1 of phase 1 on barrier 'ready'" in barriers
    assert "phase 1 of barrier 'ready'" in barriers and "is complete" in barriers
    assert "thread 0: adds 1 to semaphore 'sem', now 1" in semaphores
    assert "thread 1: passes semaphore 'sem' for 1 or more" in semaphores
    assert "begins a copy to 'tile' float16[64, 64]" in memory
    assert "loads 'tile' float16[64]" in memory and "stores 'tile' float16[64, 64]" in memory
    assert "4096 elements of float16 are allocated" in memory
    call(rng, logging_mode=LOG.BARRIER | LOG.SEMAPHORE)
    both = capsys.readouterr().out.splitlines()
    assert {x.split("]")[0] for x in both} == {"[barrier", "[semaphore"}


def test_other_fields():
    params = plgpu.InterpretParams(num_cores_or_threads=4, num_tma_threads_per_device=2, seed=3)
    assert params.num_cores_or_threads == 4 and params.num_tma_threads_per_device == 2
    default = plgpu.InterpretParams()
    assert default.num_tma_threads_per_device == 5 and default.vector_clock_size is None
    assert default.logging_mode is None and not default.skip_floating_point_ops
    assert params.replace(seed=0, num_cores_or_threads=1, num_tma_threads_per_device=5) == default

    def read(o_ref, tile):
        o_ref[...] = tile[...]

    kernel = lambda dtype, **fields: plgpu.kernel(  # noqa: E731
        read,
        out_type=plgpu.ShapeDtypeStruct((8,), dtype),
        scratch_types=[plgpu.SMEM((8,), dtype)],
        interpret=plgpu.InterpretParams(**fields),
    )()
    assert np.isnan(kernel(F32)).all() and (kernel(np.int32) == 2**31 - 1).all()
    assert kernel(bool).all() and not kernel(F32, uninitialized_memory="zero").any()


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"out_of_bounds_reads": "rais"}, ValueError),
        ({"uninitialized_memory": "one"}, NotImplementedError),
        ({"num_cores_or_threads": 0}, ValueError),
        ({"num_tma_threads_per_device": 0}, ValueError),
        ({"num_tma_threads_per_device": 1.5}, ValueError),
        ({"vector_clock_size": 3}, ValueError),
        ({"logging_mode": 3}, TypeError),
        ({"on_race": "ignore"}, ValueError),
        ({"mode": 1}, ValueError),
    ],
)
def test_refused(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        plgpu.InterpretParams(**fields)


def test_engines_are_late_with_seed_0_and_early_with_others(rng):
    """SMEM is overwritten before anybody waits for the store that reads it: the result tells when
    the engine read. A missing wait must show under many seeds."""
    x = rng.standard_normal((64, 64)).astype(F32)

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o_ref)
        tile[...] = x_ref[...] + 1
        plgpu.wait_smem_to_gmem(0)

    def is_early(seed):
        kernel = plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct(x.shape, F32),
            scratch_types=[plgpu.SMEM(x.shape, F32)],
            interpret=plgpu.InterpretParams(seed=seed),
        )
        got = kernel(x)
        assert (got == x).all() or (got == x + 1).all()
        return (got == x).all()

    early = [is_early(seed) for seed in range(33)]
    assert not early[0] and 4 <= sum(early) <= 28, early
