"""Kernels of several GPUs beside NCCL and cuBLAS: `python benchmarks/bench_distributed.py`.

Starts a process for each GPU (`--gpus`, all by default) and measures the collectives and products
of `ops` in CUDA graphs of 100 calls, beside the same by NCCL and cuBLAS, after it compared the
results on poisoned outputs. Then one process drives all GPUs. Each section stands alone: what fails
or takes too long is reported, and the next one runs. The run ends after `--seconds`, prints a table
and writes `--json`. `--dry` runs all of it on the interpreter with small arrays, to test the
script. NVLink multicast is left as the environment has it, and nothing here asks for it."""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu.ops import (
    distributed,
    distributed_matmul,
    distributed_norms,
    distributed_ragged,
)

CALLS = 100  # of a graph
LINK = 372e9  # bytes a second of the copy engine between two H200s, both directions at once
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]  # bytes of a rank
PRODUCTS = [  # M of a device, K, N of a device
    (1024, 4096, 2048),
    (4096, 4096, 2048),
    (4096, 8192, 4096),
    (1023, 4096, 2047),
    (1024, 4096, 4096),
    (2048, 4096, 4096),
    (8192, 4096, 4096),
]


# ---- where it runs ------------------------------------------------------------------------------


class Dry:
    """A mesh of the interpreter. Arrays are lists, and times are those of the interpreter."""

    rank, dry = 0, True

    def __init__(self, n):
        self.n, self.mesh = n, plgpu.DeviceMesh((n,), "x")

    def data(self, shape, dtype, seed, same=False):
        rngs = [np.random.default_rng([seed, 0 if same else r]) for r in range(self.n)]
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        return [g.integers(-4, 5, shape).astype(np.float32).astype(dtype) for g in rngs]

    def empty(self, shape, dtype):
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        return [np.full(shape, 77, dtype) for _ in range(self.n)]

    poison = staticmethod(lambda x: [a.fill(77) for a in x])

    def time(self, f):
        start = time.perf_counter()
        f()
        return (time.perf_counter() - start) * 1e6

    def nccl(self, kind, x, out):
        """The reference."""
        total = sum(a.astype(np.float32) for a in x).astype(x[0].dtype)
        parts = [np.split(a, self.n) for a in x] if kind == "all_to_all" else None
        for d in range(self.n):
            out[d][...] = {
                "all_gather": lambda: np.concatenate(x),
                "reduce_scatter": lambda d=d: np.split(total, self.n)[d],
                "all_reduce": lambda: total,
                "all_to_all": lambda d=d: np.concatenate([p[d] for p in parts]),
            }[kind]()

    def product(self, a, b, out):
        for x, y, z in zip(a, b, out):
            z[...] = (x.astype(np.float32) @ y.astype(np.float32)).astype(z.dtype)

    def own_product(self, a, b):
        return lambda: None

    def wrong(self, got, want, tolerance=0.0):
        """How far the results are from what they should be, relative to it."""
        found = 0.0
        for x, y in zip(got, want):
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            found = max(found, float(abs(x - y).max() / max(abs(y).max(), 1)))
        return 0.0 if found <= tolerance else found

    def agree(self, result):
        return [result]

    def delay(self, rng):
        pass


class Ranks:
    """This process of several, each with its GPU. Arrays are tensors in symmetric memory."""

    dry = False

    def __init__(self, n):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.n = torch, dist, n
        self.rank = int(os.environ["RANK"])
        torch.cuda.set_device(self.rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", self.rank))
        self.control = dist.new_group(backend="gloo")
        self.renew()

    def renew(self):
        """The mesh, a new one after a failure."""
        self.mesh = plgpu.DeviceMesh((self.n,), "x", group=True, timeout=15)
        self.kept = {}

    def _symmetric(self, shape, dtype, key):
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        key = (key, tuple(shape), dtype.name)
        if key not in self.kept:  # symmetric memory is dear, so there is one array of a kind
            self.kept[key] = plgpu.symm_empty(shape, dtype, self.mesh)
        return self.kept[key]

    def data(self, shape, dtype, seed, same=False):
        x = self._symmetric(shape, dtype, seed)
        g = self.torch.Generator("cuda").manual_seed(seed * 1000 + (0 if same else self.rank))
        values = self.torch.randint(-4, 5, x.shape, generator=g, device="cuda")
        return x.copy_(values.float().to(x.dtype))

    def empty(self, shape, dtype):
        return self.poison(self._symmetric(shape, dtype, "out"))

    poison = staticmethod(lambda x: x.fill_(77))

    def time(self, f):
        """Microseconds of a call, in a graph; the slowest rank's, and the best of some replays."""
        torch = self.torch
        for _ in range(3):
            f()
        torch.cuda.synchronize()
        self.dist.barrier(self.control)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                f()
        found = []
        for _ in range(4):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.dist.barrier(self.control)
            graph.replay()  # so that the ranks are together
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            found.append(a.elapsed_time(b) * 1e3 / CALLS)
        del graph
        return max(min(t) for t in self.agree(found))

    def nccl(self, kind, x, out):
        d = self.dist
        if kind == "all_gather":
            d.all_gather_into_tensor(out, x)
        elif kind == "reduce_scatter":
            d.reduce_scatter_tensor(out, x)
        elif kind == "all_to_all":
            d.all_to_all_single(out, x)
        else:
            out.copy_(x)
            d.all_reduce(out)

    def product(self, a, b, out):
        self.torch.matmul(a, b, out=out)

    def own_product(self, a, b):
        from pallas_mgpu import ops

        return lambda: ops.matmul(a, b)

    def wrong(self, got, want, tolerance=0.0):
        far = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1)
        found = max(self.agree(float(far)))
        return 0.0 if found <= tolerance else found

    def agree(self, result):
        """What all ranks say, over the CPU."""
        everyone = [None] * self.n
        self.dist.all_gather_object(everyone, result, group=self.control)
        return everyone

    def delay(self, rng):
        if rng.random() < 0.3:
            self.torch.cuda._sleep(int(rng.integers(1, 200_000)))


# ---- sections -----------------------------------------------------------------------------------
# Each yields rows: dictionaries with what, size, microseconds of ours and of others, and wrong.


def collective_shapes(kind, size, n, itemsize):
    """Of an operand and a result; size: bytes of the smaller one."""
    rows = max(size // (itemsize * 1024), 1)
    if kind == "all_gather":
        return (rows, 1024), (rows * n, 1024)
    if kind == "reduce_scatter":
        return (rows * n, 1024), (rows, 1024)
    return ((-(-rows // n) * n, 1024),) * 2


def goal(kind, size, n, one_shot):
    """Microseconds that the kernels should take at most; size: bytes that each GPU receives."""
    if kind == "all_gather":
        return 6 + size / 365e3
    if kind == "reduce_scatter":
        return 8 + size / 330e3
    if kind == "all_reduce" and n == 2:
        return 9 if one_shot else 10 + size / 330e3
    return None


def collectives(w, dtype="bfloat16", sizes=None, blocks=(16,)):
    for size in sizes or (SIZES[:2] if w.dry else SIZES):
        for kind in COLLECTIVES:
            for count in blocks:
                for one_shot in [True, False] if kind == "all_reduce" else [None]:
                    if one_shot and size > 256 << 10:
                        continue
                    yield collective(w, kind, size, dtype, count, one_shot)


def collective(w, kind, size, dtype, blocks, one_shot):
    itemsize = plgpu.ShapeDtypeStruct((), dtype).dtype.itemsize
    shape, out_shape = collective_shapes(kind, size, w.n, itemsize)
    x, out = w.data(shape, dtype, 1), w.empty(out_shape, dtype)
    want = w.empty(out_shape, dtype) if w.dry else w.torch.empty_like(out)
    options = {"blocks": blocks, "out": out} | ({} if one_shot is None else {"one_shot": one_shot})

    def ours():
        return getattr(distributed, kind)(x, w.mesh, **options)

    w.nccl(kind, x, want)
    w.poison(out)
    wrong = w.wrong(ours(), want)
    most = math.prod(out_shape if kind == "all_gather" else shape) * itemsize
    received = most * (w.n - 1) / w.n * {None: 1, True: w.n, False: 2}[one_shot]
    name = kind + {None: "", True: " one-shot", False: " two-shot"}[one_shot]
    return {
        "what": f"{name} {dtype} {blocks} SMs",
        "size": f"{size >> 10} KiB",
        "ours": w.time(ours),
        "nccl": w.time(lambda: w.nccl(kind, x, want)),
        "goal": goal(kind, received, w.n, one_shot),
        "received": received,
        "wrong": wrong,
    }


def settings(w):
    """How many SMs large sizes want, and other dtypes."""
    size = SIZES[0] if w.dry else 64 << 20
    yield from collectives(w, sizes=[size], blocks=[2] if w.dry else [8, 32, 64])
    yield from collectives(w, "float32", sizes=[size])
    yield from collectives(w, "float16", sizes=[SIZES[0]])


def products(w, dtype="float16"):
    for shape in [(130, 72, 66)] if w.dry else PRODUCTS:
        for kind in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            yield product(w, kind, *shape, dtype)


def product(w, kind, m, k, cols, dtype):
    n, gathers = w.n, kind == "all_gather_matmul"
    rows = n * m if kind == "matmul_reduce_scatter" else m
    a, b = w.data((rows, k), dtype, 2), w.data((k, cols), dtype, 3)
    whole = (n * m, k) if gathers else (rows, k)
    result = (m, cols) if kind == "matmul_reduce_scatter" else (whole[0], cols)
    out, want = w.empty(result, dtype), None
    all_a = w.empty(whole, dtype) if w.dry else w.torch.empty(whole, dtype=a.dtype, device="cuda")
    part = (whole[0], cols)
    if w.dry:
        summand, want = w.empty(part, "float32"), w.empty(result, "float32")
    else:
        summand = w.torch.empty(part, dtype=a.dtype, device="cuda")
        want = w.torch.empty(result, dtype=a.dtype, device="cuda")

    def beside():
        """NCCL and cuBLAS."""
        if gathers:
            w.nccl("all_gather", a, all_a)
            w.product(all_a, b, want)
            return
        w.product(a, b, summand)
        w.nccl("reduce_scatter" if kind == "matmul_reduce_scatter" else "all_reduce", summand, want)

    def ours():
        options = {"blocks": 2} if w.dry else {}
        return getattr(distributed_matmul, kind)(a, b, w.mesh, out=out, **options)

    beside()
    wrong = w.wrong(ours(), want, 2e-2)
    left = all_a if gathers else a
    alone = {
        "cublas": w.time(lambda: w.product(left, b, summand)),
        "matmul": w.time(w.own_product(left, b)),
    }
    summands = m * cols * 4 if kind == "matmul_reduce_scatter" else rows * cols * 4 / n
    received = (n - 1) * (m * k * 2 if gathers else summands)
    if kind == "matmul_all_reduce":
        received += (n - 1) / n * rows * cols * 2
    fast = min(alone.values()) if not w.dry else alone["cublas"]
    return {
        "what": f"{kind} {dtype}",
        "size": f"{m} x {k} x {cols}",
        "ours": w.time(ours),
        "nccl": w.time(beside),
        **alone,
        "link": received / LINK * 1e6,
        "goal": 1.05 * max(fast, received / LINK * 1e6) + 5,
        "wrong": wrong,
    }


def fused(w, dtype="bfloat16"):
    for rows in [3] if w.dry else [1, 16, 128, 4096]:
        columns = 256 if w.dry else 8192
        x, r = w.data((rows, columns), dtype, 4), w.data((rows, columns), dtype, 5, same=True)
        outs = w.data((rows, columns), dtype, 10), w.data((rows, columns), dtype, 11)
        g = w.data((columns,), dtype, 6, same=True)
        total = w.empty((rows, columns), dtype) if w.dry else w.torch.empty_like(x)

        def ours(x=x, r=r, g=g, outs=outs):
            return distributed_norms.all_reduce_rms_norm(x, r, g, w.mesh, out=outs)

        w.nccl("all_reduce", x, total)
        if w.dry:
            want = [a + b for a, b in zip(total, r)]
            beside = lambda: None  # noqa: E731
        else:
            want, functional = total + r, w.torch.nn.functional

            def beside(x=x, r=r, g=g, total=total, functional=functional):
                w.nccl("all_reduce", x, total)
                return functional.rms_norm(total + r, g.shape, g, 1e-6)

        yield {
            "what": f"all_reduce_rms_norm {dtype}",
            "size": f"{rows} x {columns}",
            "ours": w.time(ours),
            "nccl": w.time(beside),
            "wrong": w.wrong(ours()[1], want),
        }


def ragged(w):
    """Dispatch of tokens, as many to each device, beside NCCL's all-to-all of equal parts."""
    for rows in [6] if w.dry else [256, 4096, 32768]:
        rows, columns = rows // w.n * w.n, 128 if w.dry else 7168
        x, want = w.data((rows, columns), "bfloat16", 7), w.empty((rows, columns), "bfloat16")
        sizes = w.data((w.n,), "int32", 8)
        for one in sizes if w.dry else [sizes]:
            one[...] = rows // w.n

        out = w.empty((rows, columns), "bfloat16"), w.empty((w.n,), "int32")

        def ours(x=x, sizes=sizes, out=out):
            return distributed_ragged.ragged_all_to_all(x, sizes, w.mesh, out=out)

        if not w.dry:
            want = w.torch.empty_like(x)
        w.nccl("all_to_all", x, want)
        wrong = w.wrong(ours()[0], want)
        yield {
            "what": "ragged_all_to_all bfloat16",
            "size": f"{rows} x {columns}",
            "ours": w.time(ours),
            "nccl": w.time(lambda x=x, want=want: w.nccl("all_to_all", x, want)),
            "wrong": wrong,
        }


def many_launches(w, seconds=60, most=10_000):
    """Launches in a row, each device late at random: right results."""
    rng, x = np.random.default_rng(w.rank), w.data((3000,), "float32", 9)
    if w.dry:
        most, want = 5, w.empty((3000,), "float32")
    else:
        want = w.torch.empty_like(x)
    w.nccl("all_reduce", x, want)
    start, done, wrong, outs = time.time(), 0, 0.0, []
    while done < most:
        for _ in range(5 if w.dry else 100):
            w.delay(rng)
            outs.append(distributed.all_reduce(x, w.mesh, one_shot=done % 2 == 0))
            done += 1
        for out in outs:
            wrong = max(wrong, w.wrong(out, want))
        outs.clear()
        if max(w.agree(time.time() - start)) > seconds:
            break
    yield {"what": "all_reduce with random delays", "size": f"{done} launches", "wrong": wrong}


SECTIONS = {
    "collectives": collectives,
    "products": products,
    "fused": fused,
    "ragged": ragged,
    "many_launches": many_launches,
    "settings": settings,
    "bfloat16 products": lambda w: products(w, "bfloat16"),
}


def wait(n, dry):
    """For all GPUs."""
    if not dry:
        import torch

        for d in range(n):
            torch.cuda.synchronize(d)


def one_process(n, dry):
    """Rows of one process that drives all GPUs: time from call to call, and right results."""
    devices = None if dry else tuple(range(n))
    mesh = plgpu.DeviceMesh((n,), "x", devices=devices)
    calls = 2 if dry else 200
    for size in [4 << 10] if dry else [4 << 10, 1 << 20, 64 << 20]:
        host = Dry(n).data((size // 4096 * n, 1024), "float32", 1)
        x = host if dry else [plgpu.device_put(a, d) for a, d in zip(host, devices)]
        for kind in COLLECTIVES:
            f = getattr(distributed, kind)
            out = f(x, mesh)
            wait(n, dry)
            start = time.perf_counter()
            for _ in range(calls):
                f(x, mesh, out=out)
            wait(n, dry)
            spent = (time.perf_counter() - start) / calls
            got = [np.asarray(a) for a in out]
            want = [np.empty_like(a) for a in got]
            Dry(n).nccl(kind, host, want)
            yield {
                "what": f"{kind} float32, one process, eager",
                "size": f"{size >> 10} KiB",
                "ours": spent * 1e6,
                "wrong": Dry(n).wrong(got, want),
            }


# ---- the run ------------------------------------------------------------------------------------


def run_sections(w, names, until, note):
    for name in names:
        failed, rows = None, SECTIONS[name](w) if name in SECTIONS else iter(())
        while True:
            if min(w.agree(until - time.time())) < 0:
                note({"section": name, "failed": "the time is over"})
                return
            row, failed = None, None
            try:
                row = next(rows, None)
            except Exception as e:
                failed = f"rank {w.rank}: {type(e).__name__}: {e}"
                traceback.print_exc()
            errors = [e for e in w.agree(failed) if e]
            if errors:
                note({"section": name, "failed": "; ".join(errors)[:1500]})
                if not w.dry:
                    w.renew()
                break
            if row is None:
                break
            note({"section": name, **row})


def worker(args):
    def note(row):
        if w.rank == 0:
            with open(args.worker, "a") as f:
                f.write(json.dumps(row) + "\n")

    if args.mode == "one process":
        try:
            for row in one_process(args.gpus, args.dry):
                with open(args.worker, "a") as f:
                    f.write(json.dumps({"section": args.mode, **row}) + "\n")
        except Exception as e:
            traceback.print_exc()
            with open(args.worker, "a") as f:
                f.write(json.dumps({"section": args.mode, "failed": f"{e}"[:1500]}) + "\n")
        return
    w = Dry(args.gpus) if args.dry else Ranks(args.gpus)
    run_sections(w, args.sections or list(SECTIONS), args.until, note)
    sys.stdout.flush()
    os._exit(0)  # the ranks end together, with nothing left to wait for


def start(args, mode, n, rows, until):
    """The processes of a mode; they end in time."""
    count = 1 if mode == "one process" or args.dry else n
    port = str(20000 + os.getpid() % 20000 + (mode == "one process"))
    command = [sys.executable, __file__, "--worker", rows, "--mode", mode, "--gpus", str(n)]
    command += ["--until", str(until), *(["--dry"] if args.dry else [])]
    command += ["--sections", *args.sections] if args.sections else []
    running = []
    for rank in range(count):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running.append(subprocess.Popen(command, env=env))
    try:
        for p in running:
            p.wait(max(until + 20 - time.time(), 1))
    except subprocess.TimeoutExpired:
        print(f"{mode}: its time is over", file=sys.stderr)
    finally:
        for p in running:
            p.kill()
            p.wait()
    return [p.returncode for p in running]


def table(rows):
    """Short lines: what, size, ours, NCCL, goal, ours by goal."""
    lines = [f"{'':44} {'size':>18} {'ours us':>9} {'nccl us':>9} {'goal us':>9} {'of goal':>7}"]
    for r in rows:
        if "failed" in r:
            lines.append(f"{r['section']}: FAILED: {r['failed'].splitlines()[0][:150]}")
            continue
        cells = [f"{r[k]:9.1f}" if r.get(k) else " " * 9 for k in ("ours", "nccl", "goal")]
        by = f"{r['ours'] / r['goal']:7.2f}" if r.get("goal") and r.get("ours") else " " * 7
        bad = f"  WRONG by {r['wrong']:.2g}" if r.get("wrong") else ""
        lines.append(f"{r['what']:44} {r['size']:>18} {' '.join(cells)} {by}{bad}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpus", type=int, default=0, help="how many, 0: all")
    parser.add_argument("--seconds", type=float, default=500, help="of the whole run")
    parser.add_argument("--json", default="distributed.json")
    parser.add_argument("--dry", action="store_true", help="on the interpreter")
    parser.add_argument("--sections", nargs="*", choices=[*SECTIONS, "one process"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    start_time = time.time()
    devices = plgpu._core.system_info()["devices"]
    n = args.gpus or (2 if args.dry else len(devices))
    if not args.dry and (n < 2 or n > len(devices)):
        parser.error(f"{n} GPUs are needed, at least 2; there are {len(devices)}. --dry needs none")
    rows = tempfile.mkstemp(suffix=".jsonl")[1]
    modes = ["ranks", "one process"]
    if args.sections:
        modes = [m for m in modes if (m == "one process") == (args.sections == ["one process"])]
    codes = {}
    for mode in modes:
        left = start_time + args.seconds - time.time()
        share = left - 60 if mode == "ranks" and len(modes) > 1 and left > 150 else left - 25
        codes[mode] = start(args, mode, n, rows, time.time() + max(share, 5))
    with open(rows) as f:
        found = [json.loads(line) for line in f]
    os.remove(rows)
    info = {
        "devices": [str(d) for d in devices],
        "gpus": n,
        "dry": args.dry,
        "exit codes": codes,
        "seconds": time.time() - start_time,
        "rows": found,
    }
    with open(args.json, "w") as f:
        json.dump(info, f, indent=1)
    print(f"\n{n} x {str(devices[0])[:70] if devices else 'the interpreter'}; {args.json}")
    print(table(found))
    return 1 if any("failed" in r or r.get("wrong") for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
