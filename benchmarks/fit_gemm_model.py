"""Fits the rates of the estimate by which ops.matmul chooses (Rates in pallas_mgpu/ops/matmul.py).

    python benchmarks/fit_gemm_model.py FILE ... [--fit NAME ...]

FILE: what bench_gemm_suite.py --json wrote, with and without --configs. A time counts if the
product has up to 512 rows, so that its weights came from memory, and 32 with 8-bit operands; larger
ones run at the clock that the power limit leaves. Sums of squares of the logarithm of the estimate
divided by the time are made small (Levenberg-Marquardt, in the logarithms of the rates). Few
rates are fitted, and each is held near its old value as if by some measurements: the products are
few. Printed are quantiles of the error before and after, the rates, and what would be chosen anew
for the products of the files. Needs no GPU."""

import argparse
import ast
import json
import pathlib
from typing import NamedTuple

import numpy as np

from pallas_mgpu.ops._matmul_choice import MatmulConfig, Rates, candidates, cycles

GHZ = 1.755
ROWS = 512
FITTED = ("latency", "restart", "uneven", "split", "exchange", "memory")
PRIOR = 0.15  # weight of a rate's old value


class Time(NamedTuple):
    size: tuple[int, int, int]
    config: MatmulConfig
    in_bytes: int
    us: float
    rows_of: str  # the product's text
    chosen: bool

    def log_error(self, rates):
        found = cycles(*self.size, self.config, 132, self.in_bytes, rates)
        return np.log(found / (1000 * GHZ * self.us))

    def others(self):
        return candidates(*self.size, 132, self.in_bytes)


def times_of(path):
    for row in json.loads(pathlib.Path(path).read_text())["rows"]:
        in_bytes = 1 if row["dtype"].startswith("float8") else 2
        size = row["m"], row["n"], row["k"]
        for name, (us, *_) in row["us"].items():
            values = (
                ast.literal_eval(row["chosen"] if name == "ops" else name)
                if name != "torch"
                else ()
            )
            if len(values) < 8:
                continue  # torch, and kernels for one or two rows
            time = Time(size, MatmulConfig(*values), in_bytes, us, row["text"], name == "ops")
            if time.chosen or time.config in time.others():
                yield time


def counts(time):
    return time.size[0] <= ROWS and (time.in_bytes == 2 or time.size[0] >= 32)


def fit(times, names):
    start = np.log([getattr(Rates(), n) for n in names])

    def rates(x):
        return Rates()._replace(**dict(zip(names, map(float, np.exp(x)))))

    def residuals(x):
        found = [t.log_error(rates(x)) for t in times]
        return np.array([*found, *PRIOR * (x - start)])

    x, damping = start.copy(), 1.0
    r = residuals(x)
    for _ in range(40):
        h = 1e-2
        jacobian = np.stack([(residuals(x + h * e) - r) / h for e in np.eye(len(x))], axis=1)
        while damping < 1e6:
            normal = jacobian.T @ jacobian + damping * np.eye(len(x))
            step = np.linalg.solve(normal, -jacobian.T @ r)
            new = residuals(x + step)
            if new @ new < r @ r:
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
    known = {(t.rows_of, t.config): t.us for t in times}
    for t in times:
        if not t.chosen:
            continue
        best = min(t.others(), key=lambda c: cycles(*t.size, c, 132, t.in_bytes, rates))
        if best != t.config:
            us = cycles(*t.size, best, 132, t.in_bytes, rates) / (1000 * GHZ)
            measured = known.get((t.rows_of, best))
            told = f"{measured:.1f} us measured" if measured else "not measured"
            print(f"{t.rows_of}: {tuple(t.config)[:8]}, {t.us:.1f} us, to {tuple(best)[:8]},"
                  f" {us:.1f} us estimated, {told}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--fit", nargs="*", default=FITTED, help="fields of Rates that are numbers")
    args = parser.parse_args()
    times = [t for path in args.files for t in times_of(path)]
    used = [t for t in times if counts(t)]
    show_errors("now", used, Rates())
    rates = fit(used, args.fit) if args.fit else Rates()
    show_errors("fitted", used, rates)
    for name in args.fit:
        print(f"  {name}: {getattr(Rates(), name):.4g} -> {getattr(rates, name):.4g}")
    print("what the files' chooser took, and what is chosen by these rates:")
    show_choices(times, rates)


if __name__ == "__main__":
    main()
