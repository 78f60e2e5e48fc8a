"""Which tests a run of pytest has, and how many processes share them. conftest.py calls this.

Only a run with `--exhaustive` has everything; CI has time for one with `--long`, which takes fewer
cases of products of parameters, and one without either fewer still:

- Tests marked `exhaustive` run with `--exhaustive` alone, those marked `long` not without `--long`.
- Of the products of parameters marked `covering(t)` a run takes a covering array of strength t:
  cases among which each combination of values of any t parameters occurs. So strength 1 has each
  value of each parameter, strength 2 each pair of values of two. Each way of `run` has an array of
  its own, of other cases where it can; with `covering(t, share=True)` and without `--long` the ways
  without a GPU share one. `covering(t, long=u)` is of strength u with `--long`.
- Of other products of parameters with the fixture `run`, every third case runs on the emulated
  machine and the others on the interpreter, with `--long` all of them.
- Of the cases of a function that are then left, of each way for itself, a run without `--long` has
  every third, and one with it leaves out every fourth; on a GPU all.
- NVRTC compiles every fifth program of a test that the interpreter runs, with --long every third.

Tests named on the command line, file::test, run whole.

Marked `long`, and so left out of the default:

- Blackwell: attention with a head_dim of 192 and 256 and with packed sequences; its gradients by
  seven products with a head_dim of 128, of packed sequences that repeat bit for bit, with all
  options at once; machine code of causal attention, biases and sums of groups; the stand-in's
  attention and launch control; interleavings of scaled pairs, mixed operands and gated pairs.
- sm_80 to sm_120a: attention with softcap, dropout, a head_dim of 256 and fewer keys than queries;
  the shared memory of its blocks on sm_80 and sm_86.
- Planted mistakes by both judges (the default: each by one), collectives of two of three kinds on
  the emulated machine, a misuse of tcgen05 beside the first of its kind.
- Calls of an op beside its plain one in test_ops_targets.py (long and odd rows, quantised results);
  orders of products in attention_backward."""

import itertools
import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

MOST_WORKERS = 8
COMPILES = pytest.StashKey()
COMPILED = 3  # with --long, of the programs of each test NVRTC compiles every third
SELDOM = 5  # without


# ---- processes -----------------------------------------------------------------------------------


def workers(config):
    """How many processes of pytest-xdist run the tests, None: as the command line has it.

    Whole folders are shared by as many as there are processors; files and tests named on the
    command line, a debugger and uncaptured output have one process, as do runs without xdist."""
    option = config.option
    if hasattr(config, "workerinput"):  # this is one of them
        return None
    asked = getattr(option, "numprocesses", 0) is not None  # 0: there is no xdist
    whole = all(Path(arg).is_dir() for arg in config.args)
    alone = option.usepdb or option.trace or option.capture == "no"
    if asked or alone or not whole or option.collectonly or option.dist != "no":
        return None
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def keep_together(items, on_gpu):
    """Tests that use the GPU, and those that measure time, are left to one process."""
    for item in items:
        if item.get_closest_marker("timing") or (on_gpu and item.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.xdist_group("alone"))


# ---- what is long --------------------------------------------------------------------------------


def named(config):
    """Is a test named on the command line?"""
    split = [arg.partition("::") for arg in config.args]
    names = [(Path(file).resolve(), name) for file, _, name in split if name]

    def is_named(item):
        here = item.nodeid.partition("::")[2]
        return any(item.path == file and here.startswith(name) for file, name in names)

    return is_named


def covering_array(cases, strength, used):
    """Places of cases, dicts of parameter -> value, that have all combinations of values of
    `strength` parameters which `cases` have. Greedy: the one with most that are new; of equal ones
    that which no other array has (`used` counts them), then that whose values this one has least
    of."""
    strength = min([strength, *map(len, cases)])
    keys = [tuple(sorted(case.items())) for case in cases]
    parts = [set(itertools.combinations(key, strength)) for key in keys]
    left, taken, values = set().union(*parts), set(), Counter()

    def gain(k):
        return len(parts[k] & left), -used[keys[k]], -sum(values[v] for v in keys[k]), -k

    while left:
        best = max(range(len(cases)), key=gain)
        taken.add(best)
        left -= parts[best]
        values.update(keys[best])
        used[keys[best]] += 1
    return taken


def only_long(cases, *kept, long=(), rare=(), every=1):
    """Parameters of which a run without --long has those that are named, one with --long those of
    `long` and every nth of the others too, and only an exhaustive one the rest and those that are
    rare."""
    missing = {*kept, *long, *rare} - set(cases)
    assert not missing, missing
    others = [x for x in cases if x not in (*kept, *long, *rare)]
    long = [*long, *others[::every]]
    late = lambda x: pytest.mark.long if x in long else pytest.mark.exhaustive  # noqa: E731
    return [x if x in kept else pytest.param(x, marks=late(x)) for x in cases]


def other_ways(items, long):
    """What is left out where a product has each case in each way."""
    functions = {}  # -> way -> its cases, in the order of the parameters
    for item in items:
        marked = any(map(item.get_closest_marker, ("long", "exhaustive", "covering")))
        if not marked and hasattr(item, "callspec"):
            way = item.callspec.params.get("run")
            function = functions.setdefault(item.nodeid.partition("[")[0], {})
            function.setdefault(way, []).append(item)
    for ways in functions.values():
        host, interpreted = ways.get("host", ()), ways.get("interpret", ())
        if len(host) == len(interpreted) > 1:
            yield from (item for k, item in enumerate(host) if k % 3)
            yield from () if long else interpreted[::3]


def beyond_arrays(items, long):
    """What is left out of the products that have a covering array."""
    functions = {}  # and strength -> way -> [(item, case)]
    for item in items:
        mark = item.get_closest_marker("covering")
        strength = mark and (long and mark.kwargs.get("long") or mark.args[0])
        if mark and hasattr(item, "callspec"):
            way = item.callspec.params.get("run")
            case = {name: id(value) for name, value in item.callspec.params.items()}
            if way == "cuda" or long or not mark.kwargs.get("share"):
                case.pop("run", None)
            else:
                way = "shared"
            function = functions.setdefault((item.nodeid.partition("[")[0], strength), {})
            function.setdefault(way, []).append((item, case))
    for (_, strength), ways in functions.items():
        used = Counter()
        for pairs in ways.values():
            taken = covering_array([case for _, case in pairs], strength, used)
            yield from (item for k, (item, _) in enumerate(pairs) if k not in taken)


def thinned(items, long):
    """What is left out of the cases of each function and way: two of three, with --long one of
    four."""
    every = 4 if long else 3
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            way = item.callspec.params.get("run", "emulate" in item.nodeid)
            cases[item.nodeid.partition("[")[0], way].append(item)
    for (function, way), found in cases.items():
        at = zlib.crc32(f"{function} {way}".encode()) % every  # not the first one everywhere
        if len(found) >= every:
            yield from (item for k, item in enumerate(found) if (k % every == at) == long)


def left_out(items, long):
    """Those that a run without --exhaustive leaves out, and without --long if it is not long."""
    late = ("exhaustive",) if long else ("long", "exhaustive")
    rest = []
    for item in items:
        if any(map(item.get_closest_marker, late)):
            yield item
        else:
            rest.append(item)
    yield from other_ways(rest, long)
    yield from beyond_arrays(rest, long)


def compile_some(config, items):
    """The cases of which NVRTC compiles the program: with --exhaustive all of them."""
    every = 1 if config.option.exhaustive else COMPILED if config.option.long else SELDOM
    is_named, seen = named(config), Counter()
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("run") == "interpret":
            function = item.nodeid.partition("[")[0]
            if is_named(item) or seen[function] % every == 0:
                item.stash[COMPILES] = True
            seen[function] += 1


def leave_out(config, items):
    if config.option.exhaustive:
        return
    is_named, long = named(config), config.option.long
    out = {id(item) for item in left_out(items, long)}
    out |= {id(item) for item in thinned([item for item in items if id(item) not in out], long)}
    out -= {id(item) for item in items if is_named(item)}
    if out:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in out])
        items[:] = [item for item in items if id(item) not in out]
