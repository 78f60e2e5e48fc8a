"""The implementation of pallas_mgpu.testing.do_bench: contestants take turns on one GPU.

Large products are limited by power, so what is measured depends on how hot the GPU is; below 10 us
it depends on how fast the host submits. Hence several ways of timing:

    burst      each contestant for about 4 ms without a pause: all run at one warm clock
    queued     up to 50 calls that wait behind a sleep of the GPU: no time of the host inside
    cool       one to three calls after a pause: at nearly the highest clock
    sustained  0.15 s of each contestant, a third of it untimed: each at its own steady clock
    host       calls until the GPU is idle again, by the clock of the host

In every round each contestant runs once, and over the rounds each one runs at every place and after
both neighbours, because what ran before leaves its heat. Sample k of all contestants comes from
round k, so ratios are taken round by round and drifts of the clock cancel.

All measuring goes through a timer. `CudaTimer` is the real one; tests bring their own."""

import dataclasses
import importlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping

from ._names import show


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call of one contestant, one sample a round."""

    samples: tuple

    @property
    def median(self):
        return statistics.median(self.samples)

    @property
    def quartiles(self):
        """(first, third)"""
        if len(self.samples) < 2:
            return (self.samples[0],) * 2
        q = statistics.quantiles(self.samples, n=4, method="inclusive")
        return q[0], q[2]

    def interval(self, confidence=0.95):
        """Bounds between which the true median lies with at least this confidence; the least and
        the greatest sample where there are too few for that."""
        return median_interval(self.samples, confidence)

    def ratio(self, other, confidence=0.95):
        """``(median, low, high)`` of other's time / this one's, taken round by round: above 1, this
        one is faster."""
        if not isinstance(other, Timing):
            raise TypeError(f"ratio: other must be a Timing, got {show(other)}")
        if len(self.samples) != len(other.samples):
            raise ValueError(
                f"ratio: the timings have {len(self.samples)} and {len(other.samples)} rounds; take"
                " both from one call of do_bench"
            )
        ratios = [b / a for a, b in zip(self.samples, other.samples)]
        return (statistics.median(ratios), *median_interval(ratios, confidence))


def median_interval(samples, confidence):
    """By order statistics: the number of samples below the median is binomial."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence!r}")
    s, n = sorted(samples), len(samples)
    below = 0.0
    for k in range(n // 2):
        below += math.comb(n, k) / 2**n
        if below > (1 - confidence) / 2:
            return (s[max(k - 1, 0)], s[n - max(k, 1)])
    k = max(n // 2 - 1, 0)
    return s[k], s[n - 1 - k]


class CudaTimer:
    """Measures on torch's current stream. A contestant with an attribute ``wall`` works on a stream
    of its own and is timed by the clock of the host."""

    def __init__(self):
        try:
            self.torch = importlib.import_module("torch")
        except ModuleNotFoundError as e:
            raise ModuleNotFoundError(
                "do_bench: PyTorch, by whose events it measures, is not installed; pip install"
                " torch, or pass timer=",
                name="torch",
            ) from e
        if not self.torch.cuda.is_available():
            raise RuntimeError("do_bench: PyTorch finds no GPU; pass timer= to measure without one")

    def calls(self, f, count, lead=0):
        """Seconds per call of ``count`` calls, after ``lead`` calls that are not timed."""
        cuda = self.torch.cuda
        for _ in range(lead):
            f()
        if getattr(f, "wall", False):
            return self.wall(f, count)
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count / 1e3

    def wall(self, f, count):
        """The same by the clock of the host, from an idle GPU to an idle GPU."""
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            f()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def submission(self, f, count):
        """Seconds per call until the host has submitted ``count`` calls."""
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            f()
        took = time.perf_counter() - start
        self.torch.cuda.synchronize()
        return took / count

    def sleep(self, seconds):
        """Keep an idle GPU busy: what is called next waits in the stream."""
        self.torch.cuda.synchronize()
        self.torch.cuda._sleep(int(seconds * 2.2e9) + 100_000)

    def pause(self, seconds):
        """Leave the GPU idle."""
        self.torch.cuda.synchronize()
        time.sleep(seconds)

    def captured(self, f, count):
        """``count`` calls in a CUDA graph, as one function that replays them."""
        torch = self.torch
        for _ in range(2):
            f()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                f()
        return graph.replay


def estimate(timer, f):
    """Seconds per call, roughly."""
    for _ in range(3):
        f()
    return timer.calls(f, 5)


def orders(names, rounds):
    """The order of the contestants in each round."""
    for r in range(rounds):
        k = r // 2 % len(names)
        yield (names[k:] + names[:k])[:: -1 if r % 2 else 1]


def _burst(timer, contestants, rounds, seconds=4e-3):
    count = {n: max(1, round(seconds / estimate(timer, f))) for n, f in contestants.items()}
    return _each(contestants, rounds, lambda n, f: timer.calls(f, count[n], lead=1))


def _queued(timer, contestants, rounds, seconds=4e-4):
    host = {n: min(timer.submission(f, 20), 1e-3) for n, f in contestants.items()}
    count = {
        n: min(50, max(3, round(seconds / estimate(timer, f)))) for n, f in contestants.items()
    }

    def sample(n, f):
        timer.sleep((count[n] + 3) * host[n])
        return timer.calls(f, count[n], lead=1)

    return _each(contestants, rounds, sample)


def _cool(timer, contestants, rounds):
    rng, names = random.Random(1), list(contestants)
    count = {n: max(1, min(3, round(1.2e-4 / estimate(timer, f)))) for n, f in contestants.items()}
    out = {n: [] for n in names}
    for _ in range(rounds):
        rng.shuffle(names)
        for n in names:
            timer.pause(0.003)
            timer.sleep((count[n] + 3) * 1e-4)
            out[n].append(timer.calls(contestants[n], count[n], lead=1))
    return out


def _sustained(timer, contestants, rounds, seconds=0.15):
    count = {n: max(6, int(seconds / estimate(timer, f))) for n, f in contestants.items()}

    def sample(n, f):
        lead = count[n] // 3
        return timer.calls(f, count[n] - lead, lead=lead)

    return _each(contestants, rounds, sample)


def _host(timer, contestants, rounds, seconds=0.02):
    for f in contestants.values():
        timer.wall(f, 3)
    count = {n: max(1, int(seconds / max(timer.wall(f, 1), 1e-7))) for n, f in contestants.items()}
    return _each(contestants, rounds, lambda n, f: timer.wall(f, count[n]))


def _each(contestants, rounds, sample):
    out = {n: [] for n in contestants}
    for names in orders(list(contestants), rounds):
        for n in names:
            out[n].append(sample(n, contestants[n]))
    return out


# the function, its rounds, can it time contestants with a stream of their own?
WAYS = {
    "burst": (_burst, 20, True),
    "queued": (_queued, 10, False),
    "cool": (_cool, 25, False),
    "sustained": (_sustained, 12, True),
    "host": (_host, 20, True),
}
_IN_A_GRAPH = 8  # calls


def _one_call(name, f):
    """A function without arguments; several of them are called in turn."""
    if callable(f):
        return f
    thunks = tuple(f) if isinstance(f, (tuple, list)) else ()
    if not thunks or not all(map(callable, thunks)):
        raise TypeError(
            f"do_bench: {name} must be a function without arguments, or a list of such functions"
            f" that are called in turn, got {show(f)}"
        )
    turn = itertools.cycle(thunks)
    call = lambda: next(turn)()  # noqa: E731
    call.wall = any(getattr(t, "wall", False) for t in thunks)
    call.turns = len(thunks)
    return call


def _replayed(timer, f):
    """Calls from a CUDA graph, and their number; whole turns of the buffers."""
    count = _IN_A_GRAPH * getattr(f, "turns", 1)
    return timer.captured(f, count), count


def do_bench(contestants, *, ways=("burst",), rounds=None, graphs=False, timer=None):
    """Time functions against each other on the current GPU.

    ``contestants``: a dict of names to functions without arguments that submit work to torch's
    current stream, or one such function. In place of a function, a list of them is called in turn:
    with the same work on other buffers (:func:`rotated`), the L2 cache is cold. ``ways``: some of
    "burst" (4 ms of each in turn), "queued" (the calls wait in the stream: the GPU alone), "cool"
    (after pauses), "sustained" (0.15 s of each), "host" (by the clock of the host). ``rounds``: how
    often each one runs; by default 10 to 25, by the way. ``graphs``: the calls are captured in CUDA
    graphs, 8 in each, which leaves the host out. ``timer``: measures in place of torch's events.

    Returns ``{way: {name: Timing}}``, or ``{way: Timing}`` for one function. A :class:`Timing` has
    ``median``, ``quartiles``, ``interval(confidence)`` and ``ratio(other)``, in seconds per call. A
    function with an attribute ``wall`` that is true works on a stream of its own; "queued" and
    "cool" leave it out. TypeError for contestants that are not functions, ValueError for other
    ways, ModuleNotFoundError without PyTorch, RuntimeError without a GPU.
    """
    single = not isinstance(contestants, Mapping)
    named = {"it": contestants} if single else dict(contestants)
    if not named:
        raise ValueError("do_bench: there are no contestants")
    ways = (ways,) if isinstance(ways, str) else tuple(ways)
    for way in ways or (None,):
        if way not in WAYS:
            raise ValueError(f"do_bench: ways are some of {tuple(WAYS)}, got {show(way)}")
    if not (rounds is None or (type(rounds) is int and rounds > 0)):
        raise ValueError(f"do_bench: rounds must be a positive int, got {show(rounds)}")
    calls = {n: _one_call(n, f) for n, f in named.items()}
    timer = CudaTimer() if timer is None else timer
    scale = dict.fromkeys(calls, 1)
    if graphs:
        for n, f in calls.items():
            calls[n], scale[n] = _replayed(timer, f)
    out = {}
    for way in ways:
        function, default, takes_wall = WAYS[way]
        run = {n: f for n, f in calls.items() if takes_wall or not getattr(f, "wall", False)}
        samples = function(timer, run, rounds or default)
        found = {n: Timing(tuple(x / scale[n] for x in s)) for n, s in samples.items()}
        out[way] = found["it"] if single and found else found
    return out


def rotated(f, *args, nbytes=256 << 20):
    """Functions that call ``f`` on copies of the tensors ``args``, as many as have ``nbytes`` bytes
    together (at least 2, at most 64): called in turn, they find nothing in the L2 cache."""
    size = sum(x.numel() * x.element_size() for x in args)
    copies = min(64, max(2, -(-nbytes // max(size, 1))))
    sets = [args, *(tuple(x.clone() for x in args) for _ in range(copies - 1))]
    return [lambda s=s: f(*s) for s in sets]
