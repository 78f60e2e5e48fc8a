"""What the benchmarks share: alternating contestants by plgpu.testing, as medians with spreads."""

import time

from pallas_mgpu import _bench
from pallas_mgpu.testing import do_bench


class _Synchronized(_bench.CudaTimer):
    """By the clock of the host alone, for contestants of any library."""

    def __init__(self, synchronize):
        self.synchronize = synchronize

    def wall(self, f, count):
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            f()
        self.synchronize()
        return (time.perf_counter() - start) / count


def turns(contestants, synchronize, *, rounds=20):
    """Seconds per call of each ``{name: thunk}`` by the clock of the host: (median, min, max)."""
    found = do_bench(contestants, ways="host", rounds=rounds, timer=_Synchronized(synchronize))
    return {n: (t.median, min(t.samples), max(t.samples)) for n, t in found["host"].items()}


def estimate(f):
    return _bench.estimate(_bench.CudaTimer(), f)


def host_seconds(f, count=20):
    """What the host takes for a call, while the GPU has others to do."""
    return _bench.CudaTimer().submission(f, count)


WAYS = {way: _bench.WAYS[way] for way in ("burst", "queued", "cool", "sustained")}


def all_ways(contestants, scale=1.0, ways=tuple(WAYS)):
    """``{way: {name: (median, 10th, 90th percentile)}}`` in seconds."""
    out = {}
    for way in ways:
        rounds = max(3, int(WAYS[way][1] * scale))
        found = do_bench(contestants, ways=way, rounds=rounds)[way]
        out[way] = {n: _spread(t) for n, t in found.items()}
    return out


def _spread(t):
    s = sorted(t.samples)
    return t.median, s[len(s) // 10], s[-1 - len(s) // 10]
