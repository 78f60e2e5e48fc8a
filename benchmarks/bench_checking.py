"""What checking costs: kernels on the interpreter, without and with the race detector, and beside
another version of the package.

    python benchmarks/bench_checking.py                     # off, races, uninitialized
    python benchmarks/bench_checking.py --against TREE      # off here and in a tree that is built

Each figure is the least processor time of a call in all rounds: whatever else runs on the machine
only adds to it. In a round one process makes a call of each way after the other; two versions have
a process each, and alternate in who is first."""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import results


def array(*shape, dtype=np.float16):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def calls(plgpu):
    """name -> function of InterpretParams"""
    from pallas_mgpu import lax, ops, pl

    a, b, x = array(256, 512), array(512, 256), array(128, 2048)
    w = np.random.default_rng(0).integers(-8, 8, (256, 512)).astype(np.int8)
    sizes = np.array([100, 0, 120, 36], np.int32)
    q, k, v = array(1, 256, 4, 64), array(1, 256, 2, 64), array(1, 256, 2, 64)
    # products by configurations: two versions of the package may choose other ones
    tiles, few, mixed = ops.MatmulConfig(1, 32, cluster=1), ops.FewRowsConfig(64), ops.MixedConfig()
    found = {
        "matmul": lambda p: ops.matmul(a, b, config=tiles, interpret=p),
        "matmul, one row": lambda p: ops.matmul(a[:1], b, config=few, interpret=p),
        "mixed_matmul": lambda p: ops.mixed_matmul(a, w, config=mixed, interpret=p),
        "ragged_dot": lambda p: ops.ragged_dot(a, array(4, 512, 256), sizes, interpret=p),
        "attention": lambda p: ops.attention(q, k, v, causal=True, interpret=p),
        "softmax": lambda p: ops.softmax(x, interpret=p),
        "rms_norm": lambda p: ops.rms_norm(x, interpret=p),
        "layer_norm": lambda p: ops.layer_norm(x, interpret=p),
    }

    def ring(x, o, slots, full, empty):
        me = lax.axis_index("t")

        @pl.when(me == 0)
        def _():
            @pl.loop(0, 128)
            def _(i):
                pl.when(i >= 4)(lambda: plgpu.barrier_wait(empty.at[i % 4]))
                plgpu.copy_gmem_to_smem(x.at[i], slots.at[i % 4], full.at[i % 4])

        @pl.when(me == 1)
        def _():
            @pl.loop(0, 128)
            def _(i):
                plgpu.barrier_wait(full.at[i % 4])
                o[i] = slots[i % 4] * 2
                plgpu.barrier_arrive(empty.at[i % 4])

    def elements(x, o):
        @pl.loop(0, 512)
        def _(i):
            o[i] = x[i, 0] + x[i, 1]

    def columns(x, o):
        o[:, ::4] = x[...]

    def each_column(x, o):
        @pl.loop(0, 128)
        def _(i):
            o[:, i] = x[i]

    def masked(x, o):
        i = lax.broadcasted_iota(np.int32, (128, 128), 1)
        plgpu.store(o.at[...], x[...], mask=i % 2 == 0)

    def scattered(x, i, o):
        o[i[...]] = x[...]

    rows = array(128, 128, dtype=np.float32)
    order = np.random.default_rng(0).permutation(16384).astype(np.int32)
    kernels = {}
    bodies = {
        "ring of slots": (ring, (128, 128), (rows,)),
        "single elements": (elements, (512,), (array(512, 2, dtype=np.float32),)),
        "every fourth column": (columns, (128, 512), (rows,)),
        "column by column": (each_column, (512, 128), (array(128, 512, dtype=np.float32),)),
        "every other element by a mask": (masked, (128, 128), (rows,)),
        "elements by index": (scattered, (16384,), (rows.reshape(-1), order)),
    }
    for name, (body, shape, arrays) in bodies.items():
        options = {"num_threads": 2, "thread_name": "t"} if body is ring else {}
        if body is ring:
            bars = plgpu.Barrier(num_barriers=4)
            options["scratch_types"] = [plgpu.SMEM((4, 128), np.float32), bars, bars]
        out = plgpu.ShapeDtypeStruct(shape, np.float32)

        def call(p, kernels=kernels, body=body, out=out, options=options, arrays=arrays):
            if (body, p) not in kernels:
                kernels[body, p] = plgpu.kernel(body, out_type=out, interpret=p, **options)
            return kernels[body, p](*arrays)

        found[name] = call
    return found


PARAMS = {
    "off": {},
    "races": {"detect_races": True, "mode": "reference"},
    "uninitialized": {"detect_uninitialized": True},
}


def least(calls, repeats=12):
    """Milliseconds of processor time of each call, the least of several; they take turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for k in range(repeats):
        for n in sorted(range(len(calls)), reverse=k % 2 == 1):
            start = time.process_time()
            calls[n]()
            best[n] = min(best[n], time.process_time() - start)
    return [1e3 * x for x in best]


def worker(only, *ways):
    """Prints {call: [ms of each way]}."""
    import pallas_mgpu as plgpu

    warnings.simplefilter("ignore")
    params = [plgpu.InterpretParams(**PARAMS[way]) if PARAMS[way] else True for way in ways]
    found = {}
    for name, call in calls(plgpu).items():
        if only in name:
            found[name] = least([functools.partial(call, p) for p in params])
    print(json.dumps(found))


def measure(tree, only, ways):
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, "--worker", only, *ways]
    out = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{tree}: {', '.join(ways)}:\n{out.stderr[-2000:]}")
    return json.loads(out.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="TREE", help="another version, built in place")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="calls whose names hold this")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    results.argument(parser)
    o = parser.parse_args()
    if o.worker:
        return worker(*o.worker)
    import pallas_mgpu as plgpu

    here = Path(plgpu.__file__).parent.parent
    titles = ["off, there", "off, here"] if o.against else list(PARAMS)
    rounds = []  # [{call: [ms by title]}]
    for k in range(o.rounds):
        if not o.against:
            rounds.append(measure(here, o.only, titles))
            continue
        trees = [Path(o.against).resolve(), here]
        got = [measure(tree, o.only, ["off"]) for tree in (trees if k % 2 == 0 else trees[::-1])]
        there, own = got if k % 2 == 0 else got[::-1]
        rounds.append({name: there[name] + own[name] for name in own})
    kept = results.Results(__file__, o.json)
    print(f"| call | {titles[0]}, ms | " + " | ".join(titles[1:]) + " |")
    print("|---|---:|" + "---:|" * len(titles[1:]))
    for name in rounds[0]:
        rows = [r[name] for r in rounds]
        base, *others = map(min, zip(*rows))
        shares = [x / base for x in others]
        print(f"| {name} | {base:.2f} | " + " | ".join(f"{x:.2f} x" for x in shares) + " |")
        samples = {title: [x[n] / 1e3 for x in rows] for n, title in enumerate(titles)}
        kept.add_samples("checking", name, samples, ours="off", references=("races", "uninit"))


if __name__ == "__main__":
    main()
