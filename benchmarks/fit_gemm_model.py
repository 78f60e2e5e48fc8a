"""Fits the rates of the estimate by which ops.matmul chooses (Rates in _matmul_choice.py).

    python benchmarks/fit_gemm_model.py FILE ... [--many] [--fit NAME ...] [--tries N]

FILE: what bench_gemm_suite.py --configs --json wrote. Rates are changed at random, one at a time,
and a change stays if it makes the expected time of what is chosen shorter: the mean over products
of the logarithm of that time, divided by the fastest one. Configurations count as chosen with a
probability that falls by e with every 2 % of the estimate, and each rate is held near its old
value. Printed are quantiles of the error before and after, the rates, and for each product how
much longer the configuration takes that would be chosen of the timed ones than the fastest; for
half of the products, too, with rates that are fitted to the other half. Needs no GPU.

--many: products of more than 128 rows, whose rates are apart, in place of the others."""

import argparse
import ast
import json
import math
import pathlib
import random
from typing import NamedTuple

import numpy as np
from gemm_suite import parse

from pallas_mgpu.ops import FewRowsConfig
from pallas_mgpu.ops._matmul_choice import MatmulConfig, cycles, misaligned_rows, rates_of

GHZ = 1.755
MANY = 129  # rows
PRIOR = 3e-4  # weight of the square of a rate's change, in units of CHANGE
CHANGE = 0.3  # of the logarithm of a rate
SOFT = 0.02  # of the estimate
FEWEST = 2  # configurations of a product


class Time(NamedTuple):
    gemm: object
    config: MatmulConfig
    us: float
    file: str  # times of different files are not compared

    def log_error(self, rates):
        g, in_bytes = self.gemm, 1 if self.gemm.dtype.startswith("float8") else 2
        misaligned = misaligned_rows((g.k, g.k if g.nt else g.n), in_bytes)
        found = cycles(g.m, g.n, g.k, self.config, 132, in_bytes, rates, misaligned)
        return np.log(found / (1000 * GHZ * self.us))


def times_of(path):
    for row in json.loads(pathlib.Path(path).read_text())["rows"]:
        if row["contestant"].startswith("("):
            values = ast.literal_eval(row["contestant"])
            if len(values) > len(FewRowsConfig()):  # no kernel for one or two rows
                yield Time(parse(row["case"]), MatmulConfig(*values), row["seconds"][0] * 1e6, path)


def names_of(rates):
    found = rates._asdict().items()
    return [n for n, v in found if isinstance(v, float) and 0 < v < math.inf and n != "near"]


def by_products(times):
    found = {}
    for t in times:
        found.setdefault((t.gemm.text, t.file), []).append(t)
    return {key: of for key, of in found.items() if len(of) >= FEWEST}


def expected(products, rates):
    """The mean of the logarithm of the time of what is chosen, divided by the fastest one."""
    total = 0
    for times in products.values():
        us = np.array([t.us for t in times])
        estimate = np.array([t.log_error(rates) for t in times]) + np.log(us)
        chosen = np.exp((estimate.min() - estimate) / SOFT)
        total += np.log(chosen @ us / chosen.sum() / us.min())
    return total / len(products)


def fit(times, start, names, tries):
    products, rng = by_products(times), random.Random(0)

    def cost(rates):
        changes = (math.log(getattr(rates, n) / getattr(start, n)) / CHANGE for n in names)
        return expected(products, rates) + PRIOR * sum(x * x for x in changes)

    best, least, widths = start, cost(start), dict.fromkeys(names, CHANGE)
    for _ in range(tries):
        name = rng.choice(names)
        factor = math.exp(rng.gauss(0, widths[name]))
        new = best._replace(**{name: getattr(best, name) * factor})
        found = cost(new)
        if found < least - 1e-6:
            best, least = new, found
        widths[name] *= 1.5 if best is new else 0.85
        widths[name] = min(max(widths[name], 0.1 * CHANGE), 2 * CHANGE)
    return best


def show_errors(title, times, rates):
    errors = np.abs([t.log_error(rates) for t in times])
    values = " ".join(f"{q:.0%}: {np.exp(np.quantile(errors, q)):.3f}" for q in (0.5, 0.75, 0.9, 1))
    print(f"{title}: estimate and time differ by a factor of, at most, in {values} of {len(times)}")


def show_choices(title, times, rates, each=False):
    longer = []
    for (text, _), found in by_products(times).items():
        best = min(found, key=lambda t: t.us)
        pick = min(found, key=lambda t: t.log_error(rates) + np.log(t.us))
        longer.append(pick.us / best.us)
        if each and longer[-1] > 1.03:
            print(f"{text}: {pick.us:.1f} us by {tuple(pick.config)}, {best.us:.1f} by"
                  f" {tuple(best.config)}")  # fmt: skip
    mean = np.exp(np.mean(np.log(longer)))
    print(
        f"{title}: of the timed ones, the one with the least estimate takes {mean:.3f} times as"
        f" long as the fastest (geometric mean of {len(longer)} products), at most"
        f" {max(longer):.3f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--many", action="store_true", help="products of more than 128 rows")
    parser.add_argument("--fit", nargs="*", help="fields of Rates that are numbers; all of them")
    parser.add_argument("--tries", type=int, default=600, help="0: the rates as they are")
    args = parser.parse_args()
    times = [t for path in args.files for t in times_of(path)]
    times = [t for t in times if (t.gemm.m >= MANY) == args.many]
    start = rates_of(MANY if args.many else 1)
    names = args.fit or names_of(start)
    show_errors("now", times, start)
    show_choices("now", times, start, each=not args.tries)
    if not args.tries:
        return
    rates = fit(times, start, names, args.tries)
    show_errors("fitted", times, rates)
    for name in names:
        print(f"  {name}: {getattr(start, name):.4g} -> {getattr(rates, name):.4g}")
    show_choices("fitted", times, rates, each=True)
    texts = sorted({t.gemm.text for t in times})
    random.Random(0).shuffle(texts)
    for parity in (0, 1):
        half = set(texts[parity::2])
        other = fit([t for t in times if t.gemm.text not in half], start, names, args.tries)
        of_half = [t for t in times if t.gemm.text in half]
        show_choices("one half, now", of_half, start)
        show_choices("one half, fitted to the other one", of_half, other)


if __name__ == "__main__":
    main()
