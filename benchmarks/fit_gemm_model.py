"""Fits the rates of the estimate by which ops.matmul chooses (Rates in _matmul_choice.py).

    python benchmarks/fit_gemm_model.py FILE ... [--fit NAME ...] [--no-fit]

FILE: what bench_gemm_suite.py --configs --json wrote. Sums of squares of the logarithm of the
estimate divided by the time are made small (Levenberg-Marquardt, in the logarithms of the rates);
an error counts as 0.4 at most, and each rate is held near its old value. Printed are quantiles of
the error before and after, the rates, and for each product how much longer the configuration takes
that would be chosen of the timed ones than the fastest. Needs no GPU."""

import argparse
import ast
import json
import pathlib
from typing import NamedTuple

import numpy as np
from gemm_suite import parse

from pallas_mgpu.ops import FewRowsConfig
from pallas_mgpu.ops._matmul_choice import MatmulConfig, Rates, crooked_rows, cycles

GHZ = 1.755
FITTED = tuple(
    n for n, v in Rates()._asdict().items() if isinstance(v, float | int) and n != "near"
)
PRIOR = 0.7  # weight of a rate's old value
MOST = 0.4  # of an error


class Time(NamedTuple):
    gemm: object
    config: MatmulConfig
    us: float

    def log_error(self, rates):
        g, in_bytes = self.gemm, 1 if self.gemm.dtype.startswith("float8") else 2
        crooked = crooked_rows((g.k, g.k if g.nt else g.n), in_bytes)
        found = cycles(g.m, g.n, g.k, self.config, 132, in_bytes, rates, crooked)
        return np.log(found / (1000 * GHZ * self.us))


def times_of(path):
    for row in json.loads(pathlib.Path(path).read_text())["rows"]:
        if row["contestant"].startswith("("):
            values = ast.literal_eval(row["contestant"])
            if len(values) > len(FewRowsConfig()):  # no kernel for one or two rows
                yield Time(parse(row["case"]), MatmulConfig(*values), row["seconds"][0] * 1e6)


def fit(times, names):
    start = np.log([getattr(Rates(), n) for n in names])

    def rates(x):
        return Rates()._replace(**dict(zip(names, map(float, np.exp(x)))))

    def residuals(x):
        found = [t.log_error(rates(x)) for t in times]
        return np.array([*np.clip(found, -MOST, MOST), *PRIOR * (x - start)])

    x, damping = start.copy(), 1.0
    r = residuals(x)
    for _ in range(25):
        h = 1e-2
        jacobian = np.stack([(residuals(x + h * e) - r) / h for e in np.eye(len(x))], axis=1)
        while damping < 1e6:
            normal = jacobian.T @ jacobian + damping * np.eye(len(x))
            step = np.linalg.solve(normal, -jacobian.T @ r)
            new = residuals(x + step)
            if new @ new < r @ r - 1e-6:
                x, r, damping = x + step, new, damping / 3
                break
            damping *= 4
        else:
            break
    return rates(x)


def show_errors(title, times, rates):
    errors = np.abs([t.log_error(rates) for t in times])
    values = " ".join(f"{q:.0%}: {np.exp(np.quantile(errors, q)):.3f}" for q in (0.5, 0.75, 0.9, 1))
    print(f"{title}: estimate and time differ by a factor of, at most, in {values} of {len(times)}")


def show_choices(times, rates):
    by_product, longer = {}, []
    for t in times:
        by_product.setdefault(t.gemm.text, []).append(t)
    for text, found in by_product.items():
        best = min(found, key=lambda t: t.us)
        pick = min(found, key=lambda t: t.log_error(rates) + np.log(t.us))
        longer.append(pick.us / best.us)
        if longer[-1] > 1.03:
            print(f"{text}: {pick.us:.1f} us by {tuple(pick.config)}, {best.us:.1f} by"
                  f" {tuple(best.config)}")  # fmt: skip
    mean = np.exp(np.mean(np.log(longer)))
    print(
        f"of the timed ones, the one with the least estimate takes {mean:.3f} times as long as the"
        f" fastest (geometric mean of {len(longer)} products), at most {max(longer):.3f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--fit", nargs="*", default=FITTED, help="fields of Rates that are numbers")
    parser.add_argument("--no-fit", action="store_true", help="the rates as they are")
    args = parser.parse_args()
    times = [t for path in args.files for t in times_of(path)]
    rates = Rates()
    show_errors("now", times, rates)
    if not args.no_fit:
        rates = fit(times, args.fit)
        show_errors("fitted", times, rates)
        for name in args.fit:
            print(f"  {name}: {getattr(Rates(), name):.4g} -> {getattr(rates, name):.4g}")
    show_choices(times, rates)


if __name__ == "__main__":
    main()
