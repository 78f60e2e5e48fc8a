"""Timing on a GPU: contestants take turns, medians of bursts, ratios to the first of them."""

import statistics
import time


def turns(contestants, synchronize, *, burst=0.02, rounds=20, warmup=3):
    """Median seconds per call of each ``{name: thunk}``.

    Every contestant gets a burst of calls of about ``burst`` seconds per round, in turn, so that
    clock and temperature are the same for all. Returns ``{name: (median, min, max)}``."""
    count = {}
    for name, f in contestants.items():
        for _ in range(warmup):
            f()
        synchronize()
        start = time.perf_counter()
        f()
        synchronize()
        count[name] = max(1, int(burst / max(time.perf_counter() - start, 1e-7)))
    samples = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, f in contestants.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count[name]):
                f()
            synchronize()
            samples[name].append((time.perf_counter() - start) / count[name])
    return {n: (statistics.median(s), min(s), max(s)) for n, s in samples.items()}
