"""Pairs of kernels as users write them: one is right, in the other a mistake is planted.

`pair` declares both by one body, whose first argument says which. Lines that end with `#: name` are
named. A race is patterns of two accesses of such lines, as races.side gives them without the index
and without the thread that an engine works for: "write tile by TMA at load". Any of the given ones
may come first, since the emulated machine ends at the first one."""

import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable

import numpy as np
import races

import pallas_mgpu as plgpu


@dataclasses.dataclass
class Pair:
    body: Callable
    out: tuple  # of the output, float32
    args: tuple
    races: tuple  # pairs of accesses
    remedy: str  # pattern of what a report says is missing
    errors: tuple  # exceptions that come instead of a race
    options: dict
    results: object = None  # a function of the arguments

    def kernel(self, wrong, seed, backend):
        made = functools.partial(self.body, wrong)
        params = plgpu.InterpretParams(
            detect_races=True, mode="reference", seed=seed, backend=backend
        )
        return plgpu.kernel(made, out_type=self.out, interpret=params, **self.options)

    def run(self, wrong, seed, backend):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not wrong:
                warnings.filterwarnings("error", message="missing synchronisation")
            return self.kernel(wrong, seed, backend)(*self.args)


def pair(*args, out=(128,), race=(), remedy="", errors=(), want=None, dtype=np.float32, **options):
    """A decorator. race: two accesses, or several such. want: what comes out, a function of the
    arguments."""
    several = (race,) if race and isinstance(race[0], str) else tuple(race)

    def declare(body):
        shape = plgpu.ShapeDtypeStruct(out, dtype)
        made = Pair(body, shape, args, several, remedy, errors, options, want)
        inspect.getmodule(body).PAIRS[body.__name__] = made
        return made

    return declare


def _are(sides, patterns):
    return all(re.fullmatch(p, x) for x, p in zip(sides, patterns, strict=True))


def check_right(made, backend, seeds):
    """No report, and the result that is expected."""
    want = made.results(*made.args) if made.results else None
    first = None
    for seed in seeds:
        got = made.run(False, seed, backend)
        first = got if first is None else first
        np.testing.assert_array_equal(got, first if want is None else want)


def check_wrong(made, backend, seeds):
    """Under every schedule the mistake is reported, by both lines and with the remedy."""
    file = inspect.getsourcefile(made.body)
    for seed in seeds:
        try:
            made.run(True, seed, backend)
        except (plgpu.RaceError, *made.errors) as e:
            text, kind = str(e), type(e)
        else:
            raise AssertionError(f"{backend}, seed {seed}: nothing is reported")
        if kind is not plgpu.RaceError:
            assert re.search(made.remedy, text), text
            assert file.rpartition("/")[2] in text, text
            continue
        race = plgpu.get_races().races[0]
        got = [races._loosely(races.side(x)) for x in (race.first, race.second)]
        assert any(_are(got, two) or _are(got[::-1], two) for two in made.races), (seed, text)
        for x in (race.first, race.second):
            assert re.match(r"\[.*\]|$", x.index) and x.file == file and x.line, (seed, text)
        assert re.search(made.remedy, race.hint), (seed, text)
