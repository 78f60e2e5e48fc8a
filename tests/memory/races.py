"""Kernels under the race detector: what it finds, with lines named by comments.

A line of a body that ends with `#: name` is called `name`. An access reads "write tile[3] by thread
1 at name"; a race is a set of two of them. There are two judges, which share no code: the
interpreter, and the emulated machine, which runs the generated program. That one ends at the first
race that it meets, and names one element of it."""

import functools
import re
import warnings
from pathlib import Path

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

SEEDS = range(6)
judge = "interpret"  # or "emulate"


@functools.cache
def _names(file):
    found = (re.search(r"#: (.+)$", line) for line in Path(file).read_text().splitlines())
    return {k: m[1] for k, m in enumerate(found, 1) if m}


def place(file, line):
    return _names(file).get(line, f"{Path(file).name}:{line}")


def side(x):
    if x.file is None:
        return f"{x.touch} {x.ref}{x.index} by {x.agent}"
    return f"{x.touch} {x.ref}{x.index} by {x.agent} at {place(x.file, x.line)}"


def found():
    """The races of the latest run, which may have raised."""
    return [{side(r.first), side(r.second)} for r in plgpu.get_races().races]


def look(body, outs, *args, seed=0, on_race="record", **options):
    """The results, the races and the notes of one run."""
    if judge == "emulate":
        return _emulated(body, outs, args, seed, options)
    params = plgpu.InterpretParams(detect_races=True, on_race=on_race, seed=seed)
    kernel = plgpu.kernel(body, out_type=outs, interpret=params, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = kernel(*args)
    log = plgpu.get_races()
    assert log.races_found == bool(log.races)
    return result, found(), [(re.sub(r"\s+", " ", n[0]), place(n[1], n[2])) for n in log.notes]


def _emulated(body, outs, args, seed, options):
    """Ends at the first race; there are no notes."""
    params = plgpu.InterpretParams(backend="emulate", seed=seed)
    kernel = plgpu.kernel(body, out_type=outs, interpret=params, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kernel(*args), [], []
        except plgpu.RaceError as e:
            assert str(e).startswith(plgpu.get_races().races[0].text)
            return None, found(), []


def _loosely(text):
    """An access without its index; and TMA, without the thread that it works for."""
    return re.sub(r"\[[^\]]*\]", "", re.sub(r"(TMA|tensor core), for .* at ", r"\1 at ", text))


def _some(seeds):
    """The emulated machine is slow, and finds nearly everything under every schedule."""
    return list(seeds)[:2] if judge == "emulate" else seeds


def clean(body, outs, *args, seeds=SEEDS, notes=(), **options):
    """No race under any schedule; the notes are those given, each a pattern and the line. The last
    result."""
    for seed in _some(seeds):
        result, races, found = look(body, outs, *args, seed=seed, **options)
        assert not races, races
        if judge == "emulate":
            continue
        for text, where in notes:
            assert any(re.search(text, t) and where == w for t, w in found), (text, where, found)
        assert bool(notes) == bool(found), found
    return result


def racy(expected, body, outs, *args, seeds=SEEDS, **options):
    """Under every schedule these races, each a pair of accesses; no others on those lines."""
    for seed in _some(seeds):
        _, races, _ = look(body, outs, *args, seed=seed, **options)
        if judge == "emulate":
            assert len(races) == 1, (seed, races)
            got = {_loosely(x) for x in races[0]}
            assert got in [{_loosely(x) for x in pair} for pair in expected], (seed, expected, got)
            continue
        for pair in expected:
            assert set(pair) in races, (seed, pair, races)
        assert len(races) == len(expected), (seed, races)


class Agents:
    """Two or more agents: threads of a block, or warps of a thread."""

    def __init__(self, kind):
        self.warps = kind == "warps"

    def __call__(self, k):
        return f"thread 0, warp {k}" if self.warps else f"thread {k}"

    def options(self, n=2):
        return {} if self.warps else {"num_threads": n, "thread_name": "t"}

    def run(self, *functions):
        def each(k):
            for n, f in enumerate(functions):
                pl.when(k == n)(lambda f=f: f() and None)

        if self.warps:
            plgpu.warp_map(each)
        else:
            each(lax.axis_index("t"))

    def either(self, f, g):
        """As run(f, g), but as the two branches of one condition."""

        def each(k):
            lax.cond(k == 0, lambda: f() and None, lambda: pl.when(k == 1)(lambda: g() and None))

        if self.warps:
            plgpu.warp_map(each)
        else:
            each(lax.axis_index("t"))
