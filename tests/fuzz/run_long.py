"""Many random kernels:

    python tests/fuzz/run_long.py --count 10000 --way interpret,host --jobs 2
    python tests/fuzz/run_long.py --count 500 --way interpret,cuda --jobs 16     # on a GPU

Ways: interpret (three schedules), nvrtc (the generated program compiles, without spills and
remarks), host (the generated program on the CPU), cuda (on a GPU; each job compiles for itself).
All results are compared with the model. Prints a table; failures are saved as Python that can be
run with --replay FILE. A job is a process of its own for some seeds, so that a crash or a hang
only takes the kernel that caused it."""

import argparse
import collections
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

CHUNK, PATIENCE = 50, 180  # seeds of a job; seconds of a kernel


def one(seed, ways):
    """The record of a seed."""
    from fuzz import generate, kernels

    out = {"seed": seed, "ran": [], "features": []}
    start = time.time()
    try:
        program = generate.generate(seed)
        out["features"] = sorted(program.features)
        case = kernels.Case(program.source())
        expected = case.expected()
        out["model"] = time.time() - start
        out["elements"] = int(sum(e.mask.sum() for e in expected))
        out["ran"] = kernels.check(case, expected, ways)
    except kernels.Failure as e:
        out["kind"], out["text"], out["ran"] = e.kind, str(e)[:2000], e.ran
    except Exception as e:
        out["kind"], out["text"] = f"generator: {type(e).__name__}", str(e)[:500]
    out["seconds"] = time.time() - start
    return out


def worker(seeds, ways):
    warnings.simplefilter("ignore")
    for seed in seeds:
        print(json.dumps(one(seed, ways)), flush=True)


class Jobs:
    """Worker processes over a range of seeds."""

    def __init__(self, seeds, way, jobs):
        self.todo, self.done = queue.Queue(), queue.Queue()
        self.way = way
        for k in range(0, len(seeds), CHUNK):
            self.todo.put(list(seeds[k : k + CHUNK]))
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(jobs)]
        for t in self.threads:
            t.start()

    def work(self):
        while True:
            try:
                seeds = self.todo.get_nowait()
            except queue.Empty:
                return
            while seeds:
                seeds = self.run(seeds)

    def run(self, seeds):
        """Run some seeds in a process; those after one that broke it come back."""
        command = [sys.executable, __file__, "--way", self.way, "--worker", json.dumps(seeds)]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        errors = []
        drain = threading.Thread(target=lambda: errors.append(p.stderr.read()), daemon=True)
        drain.start()
        timer = None
        for seed in seeds:  # noqa: B007
            timer = threading.Timer(PATIENCE, p.kill)
            timer.start()
            line = p.stdout.readline()
            timer.cancel()
            if not line:
                break
            self.done.put(json.loads(line))
        else:
            p.wait()
            return []
        code = p.wait()
        drain.join()
        self.done.put(
            {"seed": seed, "ran": [], "features": [], "seconds": 0, "kind": f"process: exit {code}",
             "text": (errors or [""])[0][-1500:]}
        )  # fmt: skip
        return seeds[seeds.index(seed) + 1 :]


def save(record, ways, folder, smaller):
    """A failing kernel as Python."""
    from fuzz import generate, kernels

    try:
        program = generate.generate(record["seed"])
    except Exception:
        return None
    if smaller and not record["kind"].startswith("process"):
        program = kernels.shrink(program, ways)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed_{record['seed']}.py"
    text = record["text"].replace('"""', "'''").replace("\\", "/")
    path.write_text(f'"""{record["kind"]}\n\n{text}\n"""\n\n{program.source()}')
    return path


def table(records, ways, seconds):
    ran = collections.Counter(w for r in records for w in r["ran"])
    features = collections.Counter(f for r in records for f in r["features"])
    kinds = collections.defaultdict(list)
    for r in records:
        if "kind" in r:
            kinds[r["kind"]].append(r["seed"])
    gaps = sum(not r["ran"] and "kind" not in r for r in records)
    elements = sum(r.get("elements", 0) for r in records)
    print(f"\n| {'way':24} | {'kernels':>8} | {'failed':>8} |\n|{'-' * 26}|{'-' * 10}|{'-' * 10}|")
    for w in ways:
        failed = sum(len(s) for k, s in kinds.items() if k.split(":")[0] == w)
        print(f"| {w:24} | {ran[w]:8} | {failed:8} |")
    print(f"\n{len(records)} kernels, {gaps} met a documented gap, {elements:,} elements compared,")
    print(f"{seconds:.0f} s ({sum(r['seconds'] for r in records):.0f} s of jobs)\n")
    print("kernels with: " + ", ".join(f"{f} {n}" for f, n in features.most_common()))
    for kind, seeds in sorted(kinds.items(), key=lambda x: -len(x[1])):
        print(f"\n{len(seeds)} x {kind}\n    seeds {', '.join(map(str, seeds[:12]))}")
    return sum(map(len, kinds.values()))


def replay(path, ways):
    from fuzz import kernels

    case = kernels.Case(pathlib.Path(path).read_text(), pathlib.Path(path).name)
    print("ran", kernels.check(case, ways=ways))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--way", default="interpret,nvrtc,host")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--save", default="fuzz_failures", help="folder of failing kernels")
    parser.add_argument("--shrink", action="store_true", help="make them small first")
    parser.add_argument("--replay", metavar="FILE", help="run one saved kernel")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args()
    ways = tuple(o.way.split(","))
    if o.worker:
        return worker(json.loads(o.worker), ways)
    if o.replay:
        return replay(o.replay, ways)
    start, records = time.time(), []
    jobs = Jobs(range(o.start, o.start + o.count), o.way, o.jobs)
    while len(records) < o.count:
        records.append(jobs.done.get())
        r = records[-1]
        if "kind" in r:
            print(f"seed {r['seed']}: {r['text'][:200]}", flush=True)
        if len(records) % 500 == 0:
            print(f"{len(records)} kernels, {time.time() - start:.0f} s", flush=True)
    bad = table(records, ways, time.time() - start)
    for r in records:
        if "kind" in r:
            path = save(r, ways, pathlib.Path(o.save), o.shrink)
            print("saved", path)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
