"""do_bench on a timer that simulates a GPU: whose time is what, in which order, how sure it is."""

import itertools
import random
import sys

import pytest

from pallas_mgpu import testing
from pallas_mgpu._bench import Timing, median_interval


class Timer:
    """A GPU whose clock falls with every call. A contestant's `seconds` are what a call takes."""

    def __init__(self, drift=0.0, noise=0.0, launch=0.0):
        self.drift, self.noise, self.launch = drift, noise, launch
        self.speed, self.log, self.rng, self.asleep = 1.0, [], random.Random(3), False

    def calls(self, f, count, lead=0):
        took = 0.0
        for k in range(lead + count):
            f()
            took += f.seconds * self.speed * self.rng.uniform(1, 1 + self.noise) * (k >= lead)
        self.speed *= 1 + self.drift
        self.log.append((f, count))
        waits, self.asleep = not self.asleep, False
        return took / count + waits * self.launch

    def wall(self, f, count):
        return self.calls(f, count) + 1e-6

    def submission(self, f, count):
        return self.launch

    def sleep(self, seconds):
        self.asleep = True

    def pause(self, seconds):
        self.log.append("pause")

    def captured(self, f, count):
        def replay():
            for _ in range(count):
                f()

        replay.seconds = f.seconds * count
        return replay


def contestant(seconds):
    def call():
        call.count += 1

    call.seconds, call.count = seconds, 0
    return call


@pytest.mark.parametrize("way", ["burst", "queued", "cool", "sustained", "host"])
def test_ratio_survives_a_clock_that_falls(way):
    timer = Timer(drift=0.02, noise=0.01)
    fast, slow = contestant(1e-4), contestant(1.1e-4)
    found = testing.do_bench({"fast": fast, "slow": slow}, ways=way, rounds=16, timer=timer)[way]
    ratio, low, high = found["fast"].ratio(found["slow"])
    assert len(found["fast"].samples) == 16
    assert low <= ratio <= high and 1.05 < ratio < 1.15
    drift = max(found["fast"].samples) / min(found["fast"].samples)
    assert drift > 1.3  # so the medians alone would not have said it


def test_every_contestant_runs_at_every_place():
    timer = Timer()
    three = {name: contestant(1e-4) for name in "abc"}
    testing.do_bench(three, rounds=6, timer=timer)
    names = [next(n for n in three if three[n] is f) for f, _ in timer.log]
    rounds = [tuple(names[k : k + 3]) for k in range(3, len(names), 3)]  # after the estimates
    assert sorted(rounds) == sorted(itertools.permutations("abc"))


def test_counts_follow_the_time_of_a_call():
    timer = Timer()
    short, long = contestant(1e-5), contestant(1.0)
    testing.do_bench({"short": short, "long": long}, rounds=1, timer=timer)
    assert dict(timer.log[-2:]) == {short: 400, long: 1}


def test_calls_that_wait_in_the_stream_leave_the_host_out():
    timer = Timer(launch=5e-6)
    found = testing.do_bench(contestant(1e-6), ways=("burst", "queued"), timer=timer)
    assert found["burst"].median == pytest.approx(6e-6)
    assert found["queued"].median == pytest.approx(1e-6)


def test_own_streams_are_left_out_where_calls_have_to_wait():
    own = contestant(1e-4)
    own.wall = True
    both = {"own": own, "other": contestant(1e-4)}
    found = testing.do_bench(both, ways=("burst", "queued"), rounds=3, timer=Timer())
    assert set(found["burst"]) == {"own", "other"} and set(found["queued"]) == {"other"}


class _TurnTimer(Timer):
    """A list of functions has no time of its own."""

    def calls(self, f, count, lead=0):
        f.seconds = getattr(f, "seconds", 1e-4)
        return super().calls(f, count, lead)

    def captured(self, f, count):
        f.seconds = 1e-4
        return super().captured(f, count)


def test_buffers_take_turns():
    sets = [contestant(1e-4) for _ in range(5)]
    testing.do_bench(sets, rounds=4, timer=_TurnTimer())
    counts = [f.count for f in sets]
    assert min(counts) > 10 and max(counts) - min(counts) <= 1


def test_graphs_hold_whole_turns_and_count_per_call():
    sets = [contestant(1e-4) for _ in range(3)]
    found = testing.do_bench(sets, rounds=4, graphs=True, timer=_TurnTimer())
    assert found["burst"].median == pytest.approx(1e-4)
    assert len({f.count for f in sets}) == 1


@pytest.mark.parametrize("n", [1, 2, 5, 6, 11, 20])
def test_interval_holds_the_true_median(n):
    rng, inside = random.Random(n), 0
    for _ in range(2000):
        low, high = median_interval([rng.gauss(0, 1) for _ in range(n)], 0.95)
        inside += low <= 0 <= high
    least = 0.95 if n >= 6 else 1 - 2 / 2**n  # fewer samples cannot be as sure
    assert inside / 2000 > least - 0.015
    if n == 20:
        assert median_interval(range(20), 0.95) == (5, 14)


def test_quartiles():
    t = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert t.quartiles == (2.0, 4.0) and t.median == 3.0


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="by whose events it measures, is not installed"):
        testing.do_bench(lambda: None)


def test_errors():
    with pytest.raises(TypeError, match="do_bench: a must be a function without arguments.*got 3"):
        testing.do_bench({"a": 3}, timer=Timer())
    with pytest.raises(ValueError, match="ways are some of .*'burst'.*got 'hot'"):
        testing.do_bench(contestant(1), ways="hot", timer=Timer())
    with pytest.raises(ValueError, match="rounds must be a positive int, got 0"):
        testing.do_bench(contestant(1), rounds=0, timer=Timer())
    with pytest.raises(ValueError, match="no contestants"):
        testing.do_bench({}, timer=Timer())
    with pytest.raises(ValueError, match="1 and 2 rounds"):
        Timing((1.0,)).ratio(Timing((1.0, 2.0)))
    with pytest.raises(TypeError, match="other must be a Timing, got 3"):
        Timing((1.0,)).ratio(3)
    with pytest.raises(ValueError, match="confidence must be above 0 and below 1, got 95"):
        Timing((1.0,)).interval(95)


@pytest.mark.gpu
def test_on_a_gpu():
    torch = pytest.importorskip("torch")
    x = [torch.zeros(n << 20, device="cuda") for n in (64, 128)]
    y = {str(len(t)): testing.rotated(torch.neg, t) for t in x}
    for graphs in (False, True):
        found = testing.do_bench(y, ways=("burst", "queued"), rounds=5, graphs=graphs)
        for times in found.values():
            once, twice = times.values()
            assert 1.5 < once.ratio(twice)[0] < 3  # other tests use the GPU at the same time
