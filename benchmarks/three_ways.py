"""Three ways of timing, because large products on a GPU are limited by power, not by cycles:

burst      contestants take turns, about 4 ms each, without a pause: all share one warm clock
cool       one to three launches after an idle gap, the clock near its maximum
sustained  0.15 s of one contestant, its first third not timed: each at its own steady clock

A contestant is a function that launches on torch's current stream; or one with an attribute `wait`,
which launches elsewhere: then wall time counts, up to the return of `wait()`."""

import random
import statistics
import time

import torch

WAYS = ("burst", "cool", "sustained")


def timed(f, count):
    """Seconds per call of `count` calls in a row."""
    if hasattr(f, "wait"):
        f.wait()
        start = time.perf_counter()
        for _ in range(count):
            f()
        f.wait()
        return (time.perf_counter() - start) / count
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        f()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count / 1e3


def _cool(f, count):
    torch.cuda.synchronize()
    time.sleep(0.003)
    if not hasattr(f, "wait"):
        torch.cuda._sleep(600000)  # the queue fills meanwhile: no host time between the events
    f()
    return timed(f, count)


def _sustained(f, count):
    for _ in range(count // 3):
        f()
    return timed(f, count - count // 3)


def measure(contestants, *, ways=WAYS, rounds=(20, 25, 6)):
    """{name: {way: sorted seconds per call}}."""
    once = {}
    for name, f in contestants.items():
        timed(f, 2)
        once[name] = timed(f, 4)
    out = {name: {way: [] for way in ways} for name in contestants}
    order, rng = list(contestants), random.Random(1)
    for way, n in zip(WAYS, rounds, strict=True):
        if way not in ways:
            continue
        for k in range(n):
            if way == "burst":
                order = order[1:] + order[:1] if k else order
            else:
                rng.shuffle(order)
            for name in order:
                f, t = contestants[name], once[name]
                if way == "burst":
                    f()
                    took = timed(f, max(1, round(4e-3 / t)))
                elif way == "cool":
                    took = _cool(f, max(1, min(3, round(1.2e-4 / t))))
                else:
                    took = _sustained(f, max(6, int(0.15 / t)))
                out[name][way].append(took)
    return {name: {w: sorted(x) for w, x in v.items()} for name, v in out.items()}


def table(title, flops, times, base, unit="TFLOP/s", scale=1e12, notes=None):
    """Markdown: rate (10th to 90th percentile) and ratio to `base`, per way."""
    ways = list(next(iter(times.values())))
    lines = [f"### {title}", ""]
    lines.append("| kernel | " + " | ".join(f"{w}, {unit} | ratio" for w in ways) + " | error |")
    lines.append("|---|" + "---:|---:|" * len(ways) + "---:|")
    for name, by_way in times.items():
        cells = []
        for w in ways:
            v = by_way[w]
            middle, low, high = statistics.median(v), v[len(v) // 10], v[-1 - len(v) // 10]
            r = [flops / t / scale for t in (middle, high, low)]
            ratio = statistics.median(times[base][w]) / middle
            cells.append(f"{r[0]:.0f} ({r[1]:.0f} to {r[2]:.0f}) | {ratio:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {(notes or {}).get(name, '')} |")
    return "\n".join(lines)
