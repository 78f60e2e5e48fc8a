"""What every benchmark writes with `--json FILE`, and `make_results.py` reads.

A file holds one run: the command, the machine (GPU, driver, NVRTC, torch, ...) and rows. A row is
what one contestant took in one way of timing:

    table       a part of the benchmark, as "attention"
    case        what was timed, as "B=4 S=4096 H=16/16 D=128 causal"
    contestant  who, as "ops" or "torch"; `ours` tells which of them is this package, `reference`
                which of them is no peer, as a copy or a bound
    way         how, as "burst": see plgpu.testing.do_bench
    seconds     of a call: [median, low, high]; `spread` says what low and high are
    work, unit  what a call does, in FLOP or B; None
    error       relative, of the result that was checked in the same run; None: nothing to check
    axes        numbers for plots, as {"length": 4096}

The file is written after every case, so that a run that is cut off keeps what it has."""

import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

FORMAT = 1


def argument(parser):
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def machine():
    """The GPU and the versions; what is not there is None."""
    import numpy

    import pallas_mgpu as plgpu
    from pallas_mgpu import _core

    info = _core.system_info()
    device = info["devices"][info["device"]] if info["device"] >= 0 else {}
    found = {
        "gpu": device.get("name"),
        "sms": device.get("sm_count"),
        "driver": _driver(),
        "nvrtc": (info["nvrtc"] or "").partition(",")[0] or None,
        "pallas_mgpu": plgpu.__version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "processors": os.cpu_count(),
    }
    for name in ("torch", "triton", "jax", "cupy"):  # those that are in use
        found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def _script():
    """Of this run, as seen from the root of the repository."""
    path, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


@functools.cache  # a file is written after every case
def _output(*command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def _driver():
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told and told.splitlines()[0]


class Results:
    """The figures of a run. Without a path nothing is kept."""

    def __init__(self, benchmark, path, spread="10th to 90th percentile"):
        self.path, self.rows = path and Path(path), []
        self.head = {"format": FORMAT, "benchmark": Path(benchmark).stem, "spread": spread}
        self.head["command"] = shlex.join(["python", _script(), *sys.argv[1:]])

    def add(self, table, case, times, *, ours="ops", references=(), work=None, unit="FLOP",
            errors=None, **axes):  # fmt: skip
        """times: {way: {contestant: (median, low, high)}}, seconds of a call. ours, references: the
        start of the names of this package's contestants, and of those that are no peers (a string
        or several). work: a number, or one for each contestant."""
        if not self.path:
            return
        for way, found in times.items():
            for name, seconds in found.items():
                of_it = work.get(name) if isinstance(work, dict) else work
                error = (errors or {}).get(name)
                self.rows.append({
                    "table": table, "case": case, "contestant": name.strip(), "way": way,
                    "ours": name.strip().startswith(ours),
                    "reference": name.strip().startswith(references),
                    "seconds": list(map(float, seconds)),
                    "work": of_it, "unit": unit if of_it is not None else None,
                    "error": None if error is None else float(error), "axes": axes,
                })  # fmt: skip
        self.write()

    def add_samples(self, table, case, samples, **options):
        """samples: {contestant: seconds of a call, several of them}, in the only way there is."""
        self.add(table, case, {"call": {n: spread(s) for n, s in samples.items()}}, **options)

    def write(self):
        data = {**self.head, "machine": machine(), "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(self.path)


def spread(samples):
    """(median, 10th, 90th percentile)"""
    s = sorted(samples)
    middle = (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2
    return middle, s[len(s) // 10], s[-1 - len(s) // 10]


def of_timing(t):
    """The same of a plgpu.testing.Timing."""
    return spread(t.samples)


def read(path):
    """The dict of a file. ValueError if it is none of these."""
    try:
        data = json.loads(Path(path).read_text())
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of benchmarks/results.py, format {FORMAT}")
    return data
