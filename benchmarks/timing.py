"""Timing on a GPU: contestants take turns, medians of bursts, ratios to the first of them."""

import random
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


# ---- on torch's current stream -------------------------------------------------------------------
# Large products are limited by power: what is measured depends on how hot the GPU is, and below
# 10 us on what the host takes for a launch. So there are several ways. A contestant with an
# attribute `wall` works on a stream of its own: it is timed by the clock of the host, and left out
# where calls have to wait in torch's stream.


def _between(f, count, lead=0):
    """Seconds per call, by events around `count` calls, `lead` calls before them untimed."""
    import torch

    for _ in range(lead):
        f()
    if getattr(f, "wall", False):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            f()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        f()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count / 1e3


def estimate(f):
    for _ in range(3):
        f()
    return _between(f, 5)


def host_seconds(f, count=20):
    """What the host takes for a call, while the GPU has others to do."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        f()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / count


def _in_stream(contestants):
    return {n: f for n, f in contestants.items() if not getattr(f, "wall", False)}


def _behind_sleep(f, count, host):
    """The GPU sleeps until the host has submitted all: no host time inside."""
    import torch

    torch.cuda.synchronize()
    torch.cuda._sleep(int((count + 3) * host * 2.2e9) + 100000)
    return _between(f, count, lead=1)


def burst(contestants, rounds, seconds=4e-3):
    """In turns of 4 ms without a pause: all at one warm clock."""
    count = {n: max(1, round(seconds / estimate(f))) for n, f in contestants.items()}
    out = {n: [] for n in contestants}
    for names in _orders(list(contestants), rounds):
        for n in names:
            out[n].append(_between(contestants[n], count[n], lead=1))
    return out


def _orders(names, rounds):
    """Every one at every place, behind both neighbours: what ran before leaves its heat."""
    for r in range(rounds):
        k = r // 2 % len(names)
        yield (names[k:] + names[:k])[:: -1 if r % 2 else 1]


def queued(contestants, rounds, seconds=4e-4):
    """Up to 50 calls that wait in the stream: what the GPU alone takes."""
    contestants = _in_stream(contestants)
    out = {n: [] for n in contestants}
    host = {n: min(host_seconds(f), 1e-3) for n, f in contestants.items()}
    count = {n: min(50, max(3, round(seconds / estimate(f)))) for n, f in contestants.items()}
    for _ in range(rounds):
        for n, f in contestants.items():
            out[n].append(_behind_sleep(f, count[n], host[n]))
    return out


def cool(contestants, rounds):
    """One to three calls after a gap: at nearly the highest clock."""
    import torch

    contestants = _in_stream(contestants)
    rng, names = random.Random(1), list(contestants)
    out = {n: [] for n in names}
    count = {n: max(1, min(3, round(1.2e-4 / estimate(f)))) for n, f in contestants.items()}
    for _ in range(rounds):
        rng.shuffle(names)
        for n in names:
            torch.cuda.synchronize()
            time.sleep(0.003)
            out[n].append(_behind_sleep(contestants[n], count[n], 1e-4))
    return out


def sustained(contestants, rounds, seconds=0.15):
    """0.15 s of one, a third of it untimed: each at its own steady clock."""
    names = list(contestants)
    out = {n: [] for n in names}
    count = {n: max(6, int(seconds / estimate(f))) for n, f in contestants.items()}
    for order in _orders(names, rounds):
        for n in order:
            lead = count[n] // 3
            out[n].append(_between(contestants[n], count[n] - lead, lead=lead))
    return out


WAYS = {
    "burst": (burst, 20),
    "queued": (queued, 10),
    "cool": (cool, 25),
    "sustained": (sustained, 12),
}


def all_ways(contestants, scale=1.0, ways=tuple(WAYS)):
    """``{way: {name: (median, 10th, 90th percentile)}}`` in seconds."""
    out = {}
    for way in ways:
        f, rounds = WAYS[way]
        samples = f(contestants, max(3, int(rounds * scale)))
        out[way] = {n: _spread(s) for n, s in samples.items()}
    return out


def _spread(s):
    s = sorted(s)
    return statistics.median(s), s[len(s) // 10], s[-1 - len(s) // 10]
