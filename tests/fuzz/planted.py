"""Do the two judges agree about broken kernels? Random kernels, each with one synchronisation error
that mutants/kernel_mutants.py plants: the interpreter, with all that it checks, and the emulated
machine give their verdicts under a few seeds, and if they differ under some more.

    python tests/fuzz/planted.py --count 300 --jobs 2

Prints how often they agree, and every kernel about which they do not and DIFFER has no reason."""

import argparse
import collections
import functools
import linecache
import multiprocessing
import random
import re
import sys
import warnings
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "mutants")]
import kernel_mutants  # noqa: E402
from fuzz import generate, kernels  # noqa: E402

SEEDS, MORE = range(3), range(3, 30)

# what one judge says where the other finds nothing wrong: why
DIFFER = {
    r"the scope of barrier .* ends while the copy .* may be in flight": "nothing else uses the "
    "destination of the copy, so its bytes do no harm on the emulated machine",
    r"for the first time, but \d+ phases are complete|phase is \d+, but this thread waited": "the "
    "interpreter asks threads to count phases; here the wait orders nothing that matters",
    r"the scope of semaphore .* ends while": "the interpreter wants the counters of a scope to "
    "end as 0",
}


def planted(seed):
    """A random kernel and an error in it; None where it has nothing to break."""
    source = kernels.Case(generate.generate(seed).source(), f"kernel {seed}").source
    name = f"<kernel {seed}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    case = kernels.Case(source, f"kernel {seed}")
    arrays = [np.array(x, order="C") for x in case.operands]
    lowered = case.kernel(interpret=True).lower(*arrays)
    kernel = kernel_mutants.Kernel(f"kernel {seed}", lowered.as_text("traced"), arrays)
    found = kernel_mutants.mutants(kernel)
    return random.Random(seed).choice(found) if found else None


def judge(seed):
    """(name, verdicts by judge or None, why there are none)"""
    warnings.simplefilter("ignore")
    name = f"kernel {seed}"
    try:
        mutant = planted(seed)
        if mutant is None:
            return name, None, "nothing to break"
        name, expected = mutant.name, kernel_mutants.results(mutant.kernel)
    except AssertionError:
        return name, None, "its result depends on the schedule"
    except Exception as e:
        if not kernels.GAPS.search(str(e)):
            raise RuntimeError(f"{name}: {e}") from e
        return name, None, "a documented gap"
    graph = kernel_mutants.lowered(mutant.text)
    ask = functools.partial(kernel_mutants.verdict, mutant, graph=graph)
    found = {judge: ask(judge, expected[judge], seeds=SEEDS) for judge in kernel_mutants.JUDGES}
    if not agree(found) and not reason(found):  # a schedule that shows it may be rare
        judge = next(judge for judge, text in found.items() if not text)
        found[judge] = ask(judge, expected[judge], seeds=MORE)
    return name, found, None


def reason(verdicts):
    """Why the judges differ; None: unknown."""
    said = next(v for v in verdicts.values() if v)
    return next((why for pattern, why in DIFFER.items() if re.search(pattern, said)), None)


def agree(verdicts):
    return all(verdicts.values()) or not any(verdicts.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    o = parser.parse_args()
    counts, unknown = collections.Counter(), 0
    with multiprocessing.get_context("fork").Pool(o.jobs) as pool:
        for name, verdicts, why in pool.imap(judge, range(o.start, o.start + o.count)):
            if verdicts is None:
                counts[f"left out: {why}"] += 1
            elif agree(verdicts):
                both = any(verdicts.values())
                counts["both find the error" if both else "neither finds anything wrong"] += 1
            elif why := reason(verdicts):
                counts[f"they differ: {why}"] += 1
            else:
                unknown += 1
                by, text = next((j, v) for j, v in verdicts.items() if v)
                print(f"{name}\n    {by} alone: {text}", flush=True)
    counts["they differ, and nobody knows why"] = unknown
    for what, n in counts.most_common():
        print(f"{n:5} {what}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
