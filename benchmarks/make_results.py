"""Tables and plots of what the benchmarks wrote with --json.

    python benchmarks/make_results.py

Reads benchmarks/results/*.json (benchmarks/results.py has their format) and writes
benchmarks/RESULTS.md, benchmarks/plots/*.svg, and the pictures between two marks of README.md. No
figure in RESULTS.md is typed by hand: a file NAME.md beside NAME.json is what is said above its
tables. NAME is that of the benchmark, or it and a word after an underscore. Plots need matplotlib
(pip install -e '.[bench]').

A table has a row for each case and a column for each contestant: the median, in the unit of its
work a second, or in micro- or milliseconds, with how many times as long as the fastest of this
package's contestants it takes. Above it stand the spread, the errors, and the fastest peer's time
divided by ours over all cases. Long tables are folded."""

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import results

HERE = Path(__file__).parent
KEPT = HERE / "results"
RESULTS, README, PLOTS = HERE / "RESULTS.md", HERE.parent / "README.md", HERE / "plots"
LONG = 24  # cases of a table that is not folded
BEGIN, END = (
    "<!-- begin: benchmarks/make_results.py -->",
    "<!-- end: benchmarks/make_results.py -->",
)


HEAD = """# Measurements

Every file of `benchmarks/results` is one run of a benchmark; `python benchmarks/make_results.py`
makes this page of them. The input is random, new for each size, and each contestant's result is
checked in the same run, on a poisoned output. Figures are medians; contestants alternate. Ways of
timing: *burst*, 4 ms of each; *queued*, calls that wait in the stream, so the time of the GPU
alone; *cool*, one to three calls after an idle gap; *sustained*, 0.15 s of each; *call*, one call
on the host or in a graph. In parentheses stands how many times as long as the fastest of ours a
contestant takes. Absolute figures vary from GPU to GPU and from minute to minute, so compare the
ratios.
[NOTEBOOK.md](NOTEBOOK.md) records what was tried on the way."""

# The sections of RESULTS.md, in order: the benchmark, its title.
SECTIONS = {
    "bench_ops_matmul": "ops.matmul",
    "bench_gemm_suite": "ops.matmul on the shapes of models",
    "bench_fp8_matmul": "Products of 8-bit floats",
    "bench_mixed_matmul": "Mixed products",
    "bench_ragged_dot": "Grouped products",
    "bench_attention": "ops.attention",
    "bench_prefill": "Attention: prefill",
    "bench_decode": "Attention: decoding",
    "bench_norms": "Softmax and norms",
    "bench_norm_shapes": "Softmax and norms of many shapes",
    "bench_sample": "Sampling",
    "bench_training": "Training",
    "bench_distributed": "Several GPUs",
    "bench_sizes": "Sizes at run time",
    "bench_launch": "Launch",
    "bench_compile": "Compile, cache, import",
    "resources": "Resources",
    "bench_estimate": "plgpu.estimate",
    "bench_interpreter": "Interpreter",
    "bench_checking": "Checking",
    "bench_matmul": "One-thread pipelined matmul",
    "bench_jax_kernels": "JAX's kernels",
    "bench_triton_style": "Kernels in the style of Pallas' Triton backend",
}

# What stands beside the times of a case: keys of its axes.
NUMBERS = {"resources": ("registers", "spill_bytes", "smem_bytes")}


class Plot(NamedTuple):
    file: str  # without .svg
    title: str
    benchmark: str
    table: str
    way: str
    kind: str  # "lines" over an axis, "bars", "scatter"
    x: str  # what is along x
    axis: str = ""  # of lines: a key of axes
    fits: Callable = lambda axes: True  # is a case shown?


def _square(axes):
    return axes["m"] == axes["n"] == axes["k"]


def _causal(axes):
    return axes["causal"] and axes["head_dim"] == 128 and axes.get("group", 1) == 1


def _norm(name, title):
    return Plot(name, title, "bench_norms", name, "burst", "lines", "columns", "columns")


# README.md shows the first three that have data
PLOTTED = [
    Plot("matmul", "ops.matmul, square, bfloat16", "bench_ops_matmul", "matmul", "queued", "lines",
         "M = N = K", "n", _square),
    Plot("attention", "ops.attention, causal, head_dim 128", "bench_attention", "attention",
         "burst", "lines", "length", "length", _causal),
    _norm("softmax", "ops.softmax"),
    _norm("rms_norm", "ops.rms_norm"),
    _norm("layer_norm", "ops.layer_norm"),
    Plot("launch", "Host time of a launch", "bench_launch", "launch", "call", "bars", "us"),
    Plot("compile", "Time to compile", "resources", "compile", "process", "bars", "ms"),
    Plot("estimate", "plgpu.estimate", "bench_estimate", "estimate", "call", "scatter",
         "measured, us"),
]  # fmt: skip
SHOWN = 3


# ---- rows ----------------------------------------------------------------------------------------


def grouped(rows, *keys):
    """{values of the keys: rows}, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), []).append(row)
    return found


def short(x):
    return f"{x:.4g}" if x < 1000 else f"{x:.0f}"


def value(row):
    """What a cell shows."""
    seconds = row["seconds"][0]
    if not row["work"]:
        return f"{short(seconds * 1e6)} us" if seconds < 0.01 else f"{short(seconds * 1e3)} ms"
    rate = row["work"] / seconds
    return f"{short(rate / 1e12)} T{row['unit']}/s"


def wide(row):
    """The spread, by the median."""
    median, low, high = row["seconds"]
    return max(median - low, high - median) / median if median else 0.0


def table(rows, numbers=()):
    """The lines of a table of one benchmark's table and way. numbers: of each case, keys of axes,
    that have a column."""
    names = list(dict.fromkeys(r["contestant"] for r in rows))
    heads = [*names, *(x.replace("_", " ") for x in numbers)]
    lines = ["| case | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for (case,), of_case in grouped(rows, "case").items():
        by_name = {r["contestant"]: r for r in of_case}
        own = [r["seconds"][0] for r in of_case if r["ours"]]
        cells = []
        for name in names:
            row = by_name.get(name)
            if row is None:
                cells.append("-")
                continue
            ratio = f" ({row['seconds'][0] / min(own):.3f})" if own and len(of_case) > 1 else ""
            cells.append(value(row) + ratio)
        cells += [str(of_case[0]["axes"].get(x, "-")) for x in numbers]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def facts(data):
    m = data["machine"]
    names = {"gpu": "", "driver": "driver ", "nvrtc": "NVRTC ", "torch": "torch ", "jax": "JAX "}
    parts = [label + str(m[key]) for key, label in names.items() if m.get(key)]
    return ", ".join([*parts, f"Python {m['python']}", f"commit {m['commit']}"])


def beside_peers(rows):
    """The fastest peer's time by that of our fastest, over the cases; None without peers."""
    ratios = {}
    for (case,), of_case in grouped(rows, "case").items():
        own = [r["seconds"][0] for r in of_case if r["ours"]]
        peers = [r["seconds"][0] for r in of_case if not r["ours"] and not r["reference"]]
        if own and peers:
            ratios[case] = min(peers) / min(own)
    if not ratios:
        return None
    least = min(ratios, key=ratios.get)
    mean = statistics.geometric_mean(ratios.values())
    return (
        f"Fastest peer's time / ours: geometric mean {mean:.3f} over {len(ratios)} cases,"
        f" least {ratios[least]:.3f} ({least}), {sum(x < 0.97 for x in ratios.values())} below 0.97"
    )


def section(data, note="", part=""):
    """The text about one file. part: which one, where a benchmark has several."""
    title = SECTIONS.get(data["benchmark"], data["benchmark"]) + (part and f": {part}")
    lines = [f"## {title}", "", f"`{data['command']}`", "", f"{facts(data)}."]
    if note:
        lines += ["", note.strip()]
    for (name, way), rows in grouped(data["rows"], "table", "way").items():
        spreads = [wide(r) for r in rows]
        errors = [r["error"] for r in rows if r["error"] is not None]
        told = f"{data['spread']}: {statistics.median(spreads):.1%} of the median, at most"
        told = f"{told} {max(spreads):.1%}"
        if errors:
            told += f"; errors at most {max(errors):.1e}, {len(errors)} of {len(rows)} checked"
        lines += ["", f"### {name}, {way}", "", f"{told[0].upper()}{told[1:]}."]
        if beside := beside_peers(rows):
            lines += ["", f"{beside}."]
        made = table(rows, NUMBERS.get(data["benchmark"], ()))
        if len(made) - 2 > LONG:
            fold = f"<details><summary>{len(made) - 2} cases</summary>"
            lines += ["", fold, "", *made, "", "</details>"]
        else:
            lines += ["", *made]
    return "\n".join(lines)


# ---- plots ---------------------------------------------------------------------------------------


def pyplot():
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    # the same file for the same figures
    pyplot.rcParams.update({"svg.hashsalt": "pallas_mgpu", "svg.fonttype": "none", "font.size": 9})
    return pyplot


def lines_over(axes, rows, axis):
    """A line for each contestant over a number of its case, the spread as a band."""
    peers = iter(f"C{k}" for k in range(1, 10))
    for (name,), own in grouped(rows, "contestant").items():
        points = sorted(((r["axes"][axis], r) for r in own), key=lambda p: p[0])
        if len(points) < 2:
            continue
        xs = [x for x, _ in points]
        rate = [[r["work"] / s / 1e12 for s in r["seconds"]] for _, r in points]
        ours = points[0][1]["ours"]
        color = "C0" if ours else next(peers)
        axes.plot(
            xs, [y[0] for y in rate], "o-", ms=3, label=name, lw=2.2 if ours else 1.2, color=color
        )
        low, high = ([y[k] for y in rate] for k in (2, 1))
        axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"T{rows[0]['unit']}/s")


def bars(axes, rows, unit):
    """A bar for each row."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    cases = grouped(rows, "case")
    one = all(len(x) == 1 for x in cases.values())
    names = [r["case"] if one else r["contestant"] for r in rows]
    if not one:  # of several cases, the first
        rows = next(iter(cases.values()))
        names = [r["contestant"] for r in rows]
    colors = ["C0" if r["ours"] else "C7" for r in rows]
    axes.barh(range(len(rows)), [r["seconds"][0] * scale for r in rows], color=colors)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()


def scatter(axes, rows):
    """Predicted over measured times."""
    cases = grouped(rows, "case").values()
    found = [{r["contestant"]: r["seconds"][0] * 1e6 for r in case} for case in cases]
    pairs = [(c["ops"], c["predicted"]) for c in found if {"ops", "predicted"} <= set(c)]
    ends = min(map(min, pairs)), max(map(max, pairs))
    axes.plot(ends, ends, color="C7", lw=1)
    axes.plot(*zip(*pairs), "o", ms=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("predicted, us")


def plot(plt, p, rows, path):
    height = 0.6 + 0.24 * min(len(rows), 24) if p.kind == "bars" else 3.4
    figure, axes = plt.subplots(figsize=(6.4, height))
    if p.kind == "lines":
        lines_over(axes, rows, p.axis)
        axes.legend(fontsize=7)
    elif p.kind == "bars":
        bars(axes, rows, p.x)
    else:
        scatter(axes, rows)
    axes.set_xlabel(p.x)
    axes.set_title(p.title)
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def plots(files, folder):
    """[(title, path)] of the pictures that were made; without matplotlib, of those from before."""
    plt = pyplot()
    if plt is None:
        print("no new plots: matplotlib is not installed (pip install -e '.[bench]')")
        return [(p.title, path) for p in PLOTTED if (path := folder / f"{p.file}.svg").exists()]
    made = []
    for p in PLOTTED:
        of_p = [d["rows"] for d in files if d["benchmark"] == p.benchmark]
        rows = [r for rows in of_p for r in rows if (r["table"], r["way"]) == (p.table, p.way)]
        rows = [r for r in rows if p.fits(r["axes"])]
        if not rows or p.axis and len({r["axes"][p.axis] for r in rows}) < 2:
            continue
        folder.mkdir(exist_ok=True)
        plot(plt, p, rows, folder / f"{p.file}.svg")
        made.append((p.title, folder / f"{p.file}.svg"))
    return made


# ---- texts ---------------------------------------------------------------------------------------


def between_marks(path, text, after):
    """Put a text between the marks of a file; without marks, before the first match of `after`."""
    old = path.read_text()
    new = f"{BEGIN}\n{text}\n{END}"
    if BEGIN in old:
        begin, end = old.index(BEGIN), old.index(END) + len(END)
        path.write_text(old[:begin] + new + old[end:])
        return
    at = re.search(after, old, re.MULTILINE)
    path.write_text(f"{old[: at.start()]}{new}\n\n{old[at.start() :]}")


def page(files, pictures):
    """RESULTS.md. files: {path: what it holds}."""
    order = list(SECTIONS)
    known = sorted(files.items(), key=lambda f: (order.index(f[1]["benchmark"]), f[0].name))
    sections = []
    for path, data in known:
        note = path.with_suffix(".md")
        part = path.stem.removeprefix(data["benchmark"]).strip("_").replace("_", " ")
        sections.append(section(data, note.read_text() if note.exists() else "", part))
    return "\n\n".join([HEAD, *pictures, *sections]) + "\n"


def main():
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    files = {path: results.read(path) for path in sorted(KEPT.glob("*.json"))}
    if unknown := {d["benchmark"] for d in files.values()} - set(SECTIONS):
        raise SystemExit(f"no section for {', '.join(sorted(unknown))}: add it to SECTIONS")
    if not files:
        raise SystemExit(f"no files: run the benchmarks with --json {KEPT}/NAME.json first")
    made = plots(list(files.values()), PLOTS)
    pictures = [f"![{title}](plots/{path.name})" for title, path in made]
    RESULTS.write_text(page(files, pictures))
    if made:
        shown = [f"![{title}](benchmarks/plots/{path.name})" for title, path in made[:SHOWN]]
        between_marks(README, "\n".join(shown), r"^## Documentation$")
    print(f"{len(files)} files, {len(made)} plots")


if __name__ == "__main__":
    main()
