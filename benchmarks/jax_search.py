"""JAX's Pallas kernels as contestants: the fastest of the tilings that a shape takes."""

import importlib
import sys
import time
import types

from timing import estimate


def kernels(name):
    """The module of JAX's kernels; None, and why, where there is no JAX."""
    try:
        import jax  # noqa: F401

        # it imports test helpers, which need absl, and does not use them
        sys.modules.setdefault("jax._src.test_util", types.ModuleType("jax._src.test_util"))
        return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")
    except Exception as e:  # noqa: BLE001 - any failure means: no JAX
        print(f"JAX: {type(e).__name__}: {str(e)[:200]}")
        return None


def fastest(title, tilings, make, seconds, samples):
    """(thunk, tiling) of the fastest make(tiling), or None, and why. Once there is one the search
    ends after some seconds."""
    start, best, why = time.perf_counter(), None, "no tiling was tried"
    for tiling in tilings:
        if best and time.perf_counter() - start > seconds:
            break
        try:
            run = make(tiling)
        except Exception as e:  # noqa: BLE001 - a tiling that this shape does not take
            why = f"{type(e).__name__}: {e}".splitlines()[0][:160]
            continue
        t = min(estimate(run) for _ in range(samples))
        if best is None or t < best[0]:
            best = (t, run, tiling)
    if best is None:
        print(f"JAX, {title}: {why}")
        return None
    return best[1:]
