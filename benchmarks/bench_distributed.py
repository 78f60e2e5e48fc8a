"""Kernels of several GPUs beside NCCL and cuBLAS: `python benchmarks/bench_distributed.py`.

Starts a process for each GPU (`--gpus`, all by default) and measures the collectives and products
of `ops` in CUDA graphs of 100 calls, beside the same by NCCL and cuBLAS, after it compared the
results on poisoned outputs. Then one process drives all GPUs. The section `components` measures
what the kernels consist of: a launch, a signal, copies by some SMs.

Each section has a share of `--seconds`, and what it leaves goes to those after it. Processes say
what they are doing. If one does the same for `--patience` seconds, the stacks of all threads are
printed and the processes are started again without that measurement, which is reported with what it
was: ours, or NCCL's. The run prints a table and writes `--json`. `--dry` runs all of it on the
interpreter with small arrays, to test the script. NVLink multicast is left as the environment has
it, and nothing here asks for it."""

import argparse
import contextlib
import faulthandler
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial

import numpy as np
import results

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu.ops import (
    _distributed_products,
    distributed,
    distributed_matmul,
    distributed_norms,
    distributed_ragged,
)
from pallas_mgpu.ops.matmul import MatmulConfig

CALLS = 100  # of a graph
FEW = 20  # of one with more than 32 MiB a call
LINK = 372e9  # bytes a second of the copy engine between two H200s, both directions at once
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
# bytes of a rank, in the order in which they are measured
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
PRODUCTS = [  # M of a device, K, N of a device
    (1024, 4096, 2048),
    (4096, 4096, 2048),
    (4096, 8192, 4096),
    (1023, 4096, 2047),
    (1024, 4096, 4096),
    (2048, 4096, 4096),
    (8192, 4096, 4096),
]
MORE_PRODUCTS = [  # of more than two GPUs
    (1024, 4096, 4096),
    (8192, 4096, 4096),
    (1024, 8192, 8192),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (1023, 4096, 4095),
    (2048, 8192, 8192),
    (4096, 8192, 8192),
]


# ---- where it runs ------------------------------------------------------------------------------


class Dry:
    """A mesh of the interpreter. Arrays are lists, and times are those of the interpreter."""

    rank, dry, row, shapes, ways = 0, True, "start", None, ()

    def __init__(self, n, said=None):
        self.n, self.mesh, self.said = n, plgpu.DeviceMesh((n,), "x"), said
        self.say, self.alone = partial(Ranks.say, self), {}

    def data(self, shape, dtype, seed, same=False):
        rngs = [np.random.default_rng([seed, 0 if same else r]) for r in range(self.n)]
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        return [g.integers(-4, 5, shape).astype(np.float32).astype(dtype) for g in rngs]

    def empty(self, shape, dtype):
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        return [np.full(shape, 77, dtype) for _ in range(self.n)]

    poison = staticmethod(lambda x: [a.fill(77) for a in x])

    def time(self, what, f, calls=CALLS):
        self.say(what)
        start = time.perf_counter()
        f()
        return (time.perf_counter() - start) * 1e6

    plain = staticmethod(lambda x: x)

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

    def reference(self, kind, x, out, seed=1):
        self.nccl(kind, x, out)

    scratch = empty

    def summed(self, a, b):
        """The sum of all devices' products, on each of them."""
        return [sum(x.astype(np.float32) @ y.astype(np.float32) for x, y in zip(a, b))] * self.n

    def part(self, x):
        return [np.split(y, self.n)[d] for d, y in enumerate(x)]

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

    def beside(self, row, measure):
        row["nccl"] = measure()

    def delay(self, rng):
        pass


class Ranks:
    """This process of several, each with its GPU. Arrays are tensors in symmetric memory."""

    dry, without_nccl, row, shapes, ways = False, False, "start", None, ()

    def __init__(self, n, said=None):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.n, self.said = torch, dist, n, said
        self.rank, self.alone = int(os.environ["RANK"]), {}  # times of products without transfers
        torch.cuda.set_device(self.rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", self.rank))
        self.control = dist.new_group(backend="gloo")
        self.renew()

    def renew(self):
        """The mesh, a new one after a failure."""
        self.mesh = plgpu.DeviceMesh((self.n,), "x", group=True, timeout=8)
        self.kept = {}

    def say(self, what):
        """What this process does now, for the one that waits for it."""
        if self.said:
            with open(f"{self.said}/{self.rank}.new", "w") as f:
                f.write(f"{self.row}: {what}")
            os.replace(f"{self.said}/{self.rank}.new", f"{self.said}/{self.rank}")

    def plain(self, x):
        """A copy in memory that is not symmetric, for NCCL, which registers the memory of
        captured calls."""
        return x.clone()

    def _symmetric(self, shape, dtype, key):
        dtype = plgpu.ShapeDtypeStruct((), dtype).dtype
        key = (key, tuple(shape), dtype.name)
        if key not in self.kept:  # symmetric memory is dear, so there is one array of a kind
            self.kept[key] = plgpu.symm_empty(shape, dtype, self.mesh)
        return self.kept[key]

    def data(self, shape, dtype, seed, same=False):
        x = self._symmetric(shape, dtype, seed)
        return x.copy_(self._values(x, seed, 0 if same else self.rank))

    def _values(self, like, seed, rank):
        g = self.torch.Generator("cuda").manual_seed(seed * 1000 + rank)
        values = self.torch.randint(-4, 5, like.shape, generator=g, device="cuda")
        return values.to(like.dtype)

    def of_all(self, x, seed):
        """The arrays of all ranks, which are made again."""
        return [self._values(x, seed, r) for r in range(self.n)]

    def reference(self, kind, x, out, seed=1):
        """What a collective should give, without NCCL."""
        all_x = self.of_all(x, seed)
        if kind == "all_gather":
            return self.torch.cat(all_x, out=out)
        if kind == "all_to_all":
            return self.torch.cat([a.chunk(self.n)[self.rank] for a in all_x], out=out)
        total = all_x[0].float()
        for a in all_x[1:]:
            total += a
        return out.copy_(self.part(total) if kind == "reduce_scatter" else total)

    def summed(self, a, b):
        return sum(x.float() @ y.float() for x, y in zip(self.of_all(a, 2), self.of_all(b, 3)))

    def part(self, x):
        return x.chunk(self.n)[self.rank]

    def empty(self, shape, dtype):
        return self.poison(self._symmetric(shape, dtype, "out"))

    poison = staticmethod(lambda x: x.fill_(77))

    def scratch(self, shape, dtype):
        """An array of this process alone."""
        kind = getattr(self.torch, plgpu.ShapeDtypeStruct((), dtype).dtype.name)
        return self.torch.empty(shape, dtype=kind, device="cuda")

    def time(self, what, f, calls=CALLS):
        """Microseconds of a call, in a graph; the slowest rank's, and the best of some replays."""
        torch = self.torch
        self.say(f"{what}: calls")
        for _ in range(3):
            f()
        torch.cuda.synchronize()
        self.dist.barrier(self.control)
        self.say(f"{what}: capture")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                f()
        self.say(f"{what}: replays")
        found = []
        for _ in range(4):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.dist.barrier(self.control)
            graph.replay()  # so that the ranks are together
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            found.append(a.elapsed_time(b) * 1e3 / calls)
        del graph
        self.say(f"{what}: done")
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
        if out.dtype != a.dtype:  # for a reference
            out.copy_(self.torch.matmul(a.float(), b.float()))
            return
        self.torch.matmul(a, b, out=out)

    def own_product(self, a, b):
        from pallas_mgpu import ops

        return lambda: ops.matmul(a, b)

    def wrong(self, got, want, tolerance=0.0):
        far = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1)
        found = max(self.agree(float(far)))
        return 0.0 if found <= tolerance else found

    def beside(self, row, measure):
        """What NCCL takes, unless that did not end when it was tried."""
        if self.without_nccl:
            row["note"] = "NCCL did not end"
            return
        try:
            row["nccl"] = measure()
        except RuntimeError as e:
            row["note"] = f"NCCL: {str(e)[:200]}"

    def agree(self, result):
        """What all ranks say, over the CPU."""
        everyone = [None] * self.n
        self.dist.all_gather_object(everyone, result, group=self.control)
        return everyone

    def delay(self, rng):
        if rng.random() < 0.3:
            self.torch.cuda._sleep(int(rng.integers(1, 200_000)))


# ---- sections -----------------------------------------------------------------------------------
# Each gives functions of rows: dictionaries with what, size, microseconds of ours and of others,
# and wrong.


def collective_shapes(kind, size, n, itemsize):
    """Of an operand and a result; size: bytes of the smaller one."""
    rows = max(size // (itemsize * 1024), 1)
    if kind == "all_gather":
        return (rows, 1024), (rows * n, 1024)
    if kind == "reduce_scatter":
        return (rows * n, 1024), (rows, 1024)
    return ((-(-rows // n) * n, 1024),) * 2


def goal(kind, size, n, one_shot):
    """Microseconds that the kernels should take at most; size: bytes that each GPU receives. That
    of all_reduce is set for two GPUs alone; for more it is a reference."""
    if kind == "all_gather":
        return 6 + size / 365e3
    if kind == "reduce_scatter":
        return 8 + size / 330e3
    if kind == "all_reduce":
        return 9 if one_shot and n == 2 else 10 + size / 330e3
    return None


def collectives(w, dtype="bfloat16", sizes=None, blocks=(None,), kinds=COLLECTIVES):
    for size in sizes or (SIZES[:2] if w.dry else SIZES):
        for kind in kinds:
            for count in blocks:
                for one_shot in [True, False] if kind == "all_reduce" else [None]:
                    if one_shot and size > 256 << 10:
                        continue
                    yield partial(collective, w, kind, size, dtype, count, one_shot)


def collective(w, kind, size, dtype, blocks, one_shot):
    itemsize = plgpu.ShapeDtypeStruct((), dtype).dtype.itemsize
    shape, out_shape = collective_shapes(kind, size, w.n, itemsize)
    w.say("arrays")
    x, out = w.data(shape, dtype, 1), w.empty(out_shape, dtype)
    want = w.plain(out)
    w.reference(kind, x, want)
    options = {"blocks": blocks, "out": out} | ({} if one_shot is None else {"one_shot": one_shot})
    calls = FEW if size > 32 << 20 else CALLS

    def ours():
        return getattr(distributed, kind)(x, w.mesh, **options)

    most = math.prod(out_shape if kind == "all_gather" else shape) * itemsize
    received = most * (w.n - 1) / w.n * {None: 1, True: w.n, False: 2}[one_shot]
    name = kind + {None: "", True: " one-shot", False: " two-shot"}[one_shot]
    row = {
        "what": f"{name} {dtype} {'default' if blocks is None else blocks} SMs",
        "size": f"{size >> 10} KiB",
        "goal": goal(kind, received, w.n, one_shot),
        "received": received,
    }
    w.say("ours: a call")
    row["wrong"] = w.wrong(ours(), want)
    row["ours"] = w.time("ours", ours, calls)
    own = w.plain(x)
    w.beside(row, lambda: w.time("nccl", lambda: w.nccl(kind, own, want), calls))
    return row


def components(w):
    """Launches, signals and copies by some SMs."""
    yield partial(component, w, empty, 1, 0)
    for blocks in [1] if w.dry else [1, 16]:
        for body in (signalled, met, met_twice):
            yield partial(component, w, body, blocks, 0)
    for size in [1 << 20] if w.dry else [1 << 20, 64 << 20]:
        for body, blocks in [
            (pushed, 16),
            (pulled, 16),
            (copied_here, 16),
            (pushed, 8),
            (pushed, 32),
        ]:
            yield partial(component, w, body, blocks, size)


def waits(w):
    """Meetings alone, for checkouts that wait in other ways."""
    for _ in range(3):
        for blocks in [1] if w.dry else [1, 16, 64]:
            for body in (met, met_twice):
                yield partial(component, w, body, blocks, 0)


def empty(w, x):
    """empty kernel"""


def signalled(w, x):
    """signal to the others, no wait"""
    w.signal(distributed.ENTRY)


def met(w, x):
    """one meeting"""
    w.meet(distributed.ENTRY)


def met_twice(w, x):
    """two meetings"""
    w.meet(distributed.ENTRY)
    w.meet(distributed.EXIT)


def moved(w, source, target):
    def store(value, *at):
        target[at] = value

    rows, columns = source.shape
    w.pieces(rows, columns, source.dtype.itemsize, lambda *at: source[at], store)


def copied_here(w, x, out):
    """two meetings, copy on the GPU"""
    met_twice(w, x)
    moved(w, x, out)


def pushed(w, x, out):
    """two meetings, copy by stores"""
    w.meet(distributed.ENTRY)
    moved(w, x, w.on(out, w.others()[0]))
    w.meet(distributed.EXIT)


def pulled(w, x, out):
    """two meetings, copy by loads"""
    w.meet(distributed.ENTRY)
    moved(w, w.on(x, w.others()[0]), out)
    w.meet(distributed.EXIT)


def component(w, body, blocks, size):
    shape = (1, max(size // 4, 1024))
    x, out = w.data(shape, "float32", 12, same=True), w.empty(shape, "float32")

    def kernel(refs, flags, epochs):
        worker = distributed.Workers(flags, epochs, "x", blocks * distributed._THREADS)
        body(worker, *refs)
        worker.end()

    copies = body in (copied_here, pushed, pulled)
    made = [(shape, np.dtype("float32"))] if copies else []
    f = distributed.Collective(w.mesh, kernel, body.__name__, made, [], blocks, None)
    w.say("ours: a call")
    given = {"out": out} if copies else {}
    got = f(x, **given)
    took = w.time("ours", lambda: f(x, **given), FEW if size > 32 << 20 else CALLS)
    row = {"what": f"{body.__doc__} {blocks} SMs", "size": f"{size >> 10} KiB", "ours": took}
    return row | {"wrong": w.wrong(got, x)} if copies else row


def settings(w):
    """How many SMs large sizes want, and other dtypes."""
    size = SIZES[0] if w.dry else 64 << 20
    for some in [] if w.dry else (1 << 20, 16 << 20):
        kinds = ["all_gather", "reduce_scatter"]
        yield from collectives(w, sizes=[some], blocks=[16, 64, 128], kinds=kinds)
    for rows in [3] if w.dry else [1, 16, 128]:
        for one_shot in (False, True):
            yield partial(normed, w, rows, 512 if w.dry else 8192, "bfloat16", one_shot)
    yield from collectives(w, sizes=[size], blocks=[2] if w.dry else [8, 32, 64])
    yield from collectives(w, "float32", sizes=[size])
    yield from collectives(w, "float16", sizes=[SIZES[0]])


def items(w):
    """Collectives with other sizes of items, and with more that is sent directly."""
    for kind, size, blocks, names in (
        *(("reduce_scatter", 16 << 20, 128, {"_ITEM": n << 10}) for n in (8, 16, 32)),
        *(("all_gather", 1 << 20, 64, {"_DIRECT": n << 20}) for n in (1, 2)),
        *(("all_gather", 1 << 20, n, {"_ITEM": 4096}) for n in (32, 64, 128)),
    ):
        yield partial(with_constants, w, kind, 64 << 10 if w.dry else size, blocks, names)


def with_constants(w, kind, size, blocks, names):
    distributed._collective.cache_clear()
    with changed(names, distributed):
        (row,) = collectives(w, sizes=[size], blocks=[2 if w.dry else blocks], kinds=[kind])
        found = row()
    distributed._collective.cache_clear()
    return found | {"what": f"{found['what']} {names}"}


KINDS = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def shapes_of_products(w):
    if w.shapes:
        return w.shapes
    return [(130, 72, 72)] if w.dry else PRODUCTS if w.n == 2 else MORE_PRODUCTS


def products(w, dtype="float16"):
    for shape in shapes_of_products(w):
        for kind in KINDS:
            yield partial(product, w, kind, *shape, dtype)


def transfers(w, dtype="float16"):
    """Who moves the data: the device that has it, or the one that needs it."""
    shapes = shapes_of_products(w)
    if w.n == 2 and not w.dry and not w.shapes:
        shapes = [shapes[1], shapes[0], shapes[4], shapes[2]]
    for shape in shapes if w.n == 2 and not w.shapes else shapes[:2]:
        for kind in KINDS:
            for transfer in distributed_matmul.TRANSFERS:
                whole = (
                    kind == KINDS[0] or kind == KINDS[1] and shape[0] % 256 == shape[2] % 256 == 0
                )
                if transfer != "engine" or whole and shape[1] % 8 == 0:
                    yield partial(product, w, kind, *shape, dtype, transfer)


def product(w, kind, m, k, cols, dtype, transfer=None):
    n, gathers, scatters = w.n, kind == "all_gather_matmul", kind == "matmul_reduce_scatter"
    rows = n * m if scatters else m
    w.say("arrays")
    a, b = w.data((rows, k), dtype, 2), w.data((k, cols), dtype, 3)
    whole = (n * m, k) if gathers else (rows, k)
    result = (m, cols) if scatters else (whole[0], cols)
    out = w.empty(result, dtype)
    all_a, summand, got = (w.scratch(s, dtype) for s in (whole, (whole[0], cols), result))
    if gathers:
        w.reference("all_gather", a, all_a, 2)
        want = w.scratch(result, "float32")
        w.product(all_a, b, want)
    else:
        want = w.summed(a, b)
        want = w.part(want) if scatters else want

    own_a = w.plain(a)

    def beside():
        """NCCL and cuBLAS."""
        if gathers:
            w.nccl("all_gather", own_a, all_a)
            w.product(all_a, b, got)
            return
        w.product(a, b, summand)
        w.nccl("reduce_scatter" if scatters else "all_reduce", summand, got)

    options = {"out": out, "transfer": transfer} | ({"blocks": 2} if w.dry else {})

    def ours():
        return getattr(distributed_matmul, kind)(a, b, w.mesh, **options)

    w.say("ours: a call")
    left, calls = all_a if gathers else a, FEW if 2 * whole[0] * k * cols < 1e12 else 5
    row = {
        "what": f"{kind} {dtype}" + (f", {transfer}" if transfer else ""),
        "size": f"{m} x {k} x {cols}",
        "wrong": w.wrong(ours(), want, 2e-2),
        "ours": w.time("ours", ours, calls),
    }
    key = tuple(left[0].shape if w.dry else left.shape), cols, dtype
    if key not in w.alone:
        w.alone[key] = {
            "cublas": w.time("cublas", lambda: w.product(left, b, summand), calls),
            "matmul": w.time("matmul", w.own_product(left, b), calls),
        }
    row |= w.alone[key]
    if transfer is None:
        w.beside(row, lambda: w.time("nccl", beside, calls))
    summands = m * cols * 4 if scatters else rows * cols * 4 / n
    received = (n - 1) * (m * k * 2 if gathers else summands)
    if kind == "matmul_all_reduce":
        received += (n - 1) / n * rows * cols * 2
    fast = row["cublas"] if w.dry else min(row["cublas"], row["matmul"])
    row["link"] = received / LINK * 1e6
    row["goal"] = 1.05 * max(fast, row["link"]) + 5
    return row


# Fields of distributed_matmul.Call that the section `configs` compares with what is chosen.
TILE = MatmulConfig(2, 128, cluster=2, buffers=1)
PUSH, PULL = {"transfer": "push"}, {"transfer": "pull"}
WIDE = TILE._replace(tile_n=256)


def runs(of):
    """Of pieces of rows; beside fields of Call, values of names of _distributed_products."""
    kind = _distributed_products.PullGatherPlan
    return {"changes": {kind.__name__: type(kind.__name__, (kind,), {"run": of})}}


WAYS = {
    "all_gather_matmul": {
        "push": PUSH,
        "pull": PULL,
        "pull, a flag for each piece": PULL | runs(1),
        "pull, a flag for four pieces": PULL | runs(4),
        "pull, tile 128": PULL | {"config": TILE},
        "pull, tile 256": PULL | {"config": WIDE},
    },
    "matmul_reduce_scatter": {
        "push": PUSH,
        "pull": PULL,
        "push, tile 128": PUSH | {"config": TILE},
        "pull, tile 128": PULL | {"config": TILE},
        "push, tile 256": PUSH | {"config": WIDE},
        "pull, tile 256": PULL | {"config": WIDE},
    },
    "matmul_all_reduce": {
        "push": PUSH,
        "pull": PULL,
        "push, tile 128": PUSH | {"config": TILE},
        "push, tile 256": PUSH | {"config": WIDE},
    },
}
MADE = {
    "all_gather_matmul": distributed_matmul._gathered,
    "matmul_reduce_scatter": distributed_matmul._scattered,
    "matmul_all_reduce": distributed_matmul._reduced,
}


def configs(w, dtype="float16"):
    """Products in other ways than they choose: who sends, and tiles."""
    for shape in shapes_of_products(w)[:4]:
        for kind in WAYS:
            for name, way in WAYS[kind].items():
                if w.ways and f"{kind}, {name}" not in w.ways:
                    continue
                yield partial(configured, w, kind, *shape, dtype, name, way)


@contextlib.contextmanager
def changed(names, module=_distributed_products):
    """Other values of names of a module, while kernels are traced."""
    module = vars(module)
    real = {name: module[name] for name in names}
    module.update(names)
    try:
        yield
    finally:
        module.update(real)


def configured(w, kind, m, k, cols, dtype, name, way):
    w.say("arrays")
    scatters, gathers = kind == "matmul_reduce_scatter", kind == "all_gather_matmul"
    a, b = w.data((w.n * m if scatters else m, k), dtype, 2), w.data((k, cols), dtype, 3)
    out = w.empty((w.n * m if gathers else m, cols), dtype)
    found = plgpu.ShapeDtypeStruct((), dtype).dtype
    blocks = 2 if w.dry else plgpu.sm_count()
    fields = {field: value for field, value in way.items() if field != "changes"}
    call = distributed_matmul.Call(w.mesh, "x", m, k, cols, found, found, blocks, **fields)
    if gathers:
        all_a, want = w.scratch((w.n * m, k), dtype), w.scratch((w.n * m, cols), "float32")
        w.reference("all_gather", a, all_a, 2)
        w.product(all_a, b, want)
    else:
        want = w.summed(a, b)
        want = w.part(want) if scatters else want
    w.say("ours: a call")
    with changed(way.get("changes", {})):
        f = MADE[kind].__wrapped__(call)
        wrong = w.wrong(f(a, b, out=out), want, 2e-2)
    flop = 2 * (w.n * m if gathers or scatters else m) * k * cols
    took = w.time("ours", lambda: f(a, b, out=out), FEW if flop < 1e12 else 5)
    what = {"what": f"{kind}, {name}", "size": f"{m} x {k} x {cols}"}
    return what | {"ours": took, "wrong": wrong}


# ---- what the time of a product over devices consists of


def only_tell(block, slots, first, n, source, targets, there=None, arrived=None):
    if there:
        lax.fori_loop(0, n, lambda j, _: there(j), None)


def only_own(block, t, w, me, value, k):
    chunks = _distributed_products.Chunks(block.plan.chunks, lambda c: block.columns(value, c))
    block.epilogue(me, chunks, [block.o], *block.corner(block.tile(t)))


WITHOUT_DATA = {"carry": only_tell}
WITHOUT_SUMS = {"listener": lambda block: None, "total": only_own}
PARTS = {
    "everything": {},
    "summands stay on their device": {"on": lambda block, ref, device: ref},
    "flags without summands": WITHOUT_DATA,
    "summands that nobody adds": WITHOUT_SUMS,
    "tiles alone": WITHOUT_DATA | WITHOUT_SUMS,
}
IN_FLIGHT = {  # everything, with constants of _distributed_products
    "16 KiB of a block in flight, in four": {"_PIECE": (16, 128), "_PIECES": 4, "_LEAVING": 2},
    "8 KiB of a block in flight": {"_LEAVING": 0},
    "4 KiB of a block in flight": {"_PIECE": (16, 128), "_LEAVING": 0},
}


def parts(w, dtype="float16"):
    """matmul_reduce_scatter without some of its work, which gives wrong results; and products
    while the copy engine sends."""
    for shape in shapes_of_products(w)[:3]:
        for what in [*PARTS, *IN_FLIGHT]:
            yield partial(part, w, what, *shape, dtype)
    if not w.dry:
        for beside in ("nothing", "copies to the other GPU", "copies on the GPU"):
            yield partial(product_beside, w, beside, *PRODUCTS[1], dtype)


def part(w, what, m, k, cols, dtype):
    w.say("arrays")
    a, b = w.data((w.n * m, k), dtype, 2), w.data((k, cols), dtype, 3)
    out, found = w.empty((m, cols), dtype), plgpu.ShapeDtypeStruct((), dtype).dtype
    block = type("Part", (_distributed_products.SumBlock,), PARTS.get(what, {}))
    blocks = 2 if w.dry else plgpu.sm_count()
    call = distributed_matmul.Call(w.mesh, "x", m, k, cols, found, found, blocks)
    with changed({"SumBlock": block, **IN_FLIGHT.get(what, {})}):
        f = distributed_matmul._scattered.__wrapped__(call)
        took = w.time("ours", lambda: f(a, b, out=out), FEW)
    return {"what": f"scatter: {what}", "size": f"{m} x {k} x {cols}", "ours": took}


def product_beside(w, beside, m, k, cols, dtype):
    torch, symmetric = w.torch, w.data((16 << 20,), "float32", 77)
    memory = torch.distributed._symmetric_memory.rendezvous(symmetric, w.dist.group.WORLD)
    source, stream = torch.ones_like(symmetric), torch.cuda.Stream()
    there = {
        "nothing": None,
        "copies to the other GPU": memory.get_buffer(
            (w.rank + 1) % w.n, symmetric.shape, symmetric.dtype
        ),
        "copies on the GPU": torch.empty_like(symmetric),
    }[beside]
    a, b = w.data((w.n * m, k), dtype, 2), w.data((k, cols), dtype, 3)
    multiply, found = w.own_product(a, b), []
    multiply()
    for _ in range(4):
        w.dist.barrier(w.control)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(0 if there is None else 60):  # longer than the products
                there.copy_(source)
        multiply()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(FEW):
            multiply()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / FEW)
    took = max(min(t) for t in w.agree(found))
    return {"what": f"matmul beside {beside}", "size": f"{w.n * m} x {k} x {cols}", "ours": took}


def fused(w, dtype="bfloat16"):
    for rows in [3] if w.dry else [1, 16, 128, 4096]:
        yield partial(normed, w, rows, 256 if w.dry else 8192, dtype)


def normed(w, rows, columns, dtype, one_shot=None):
    w.say("arrays")
    x, r = w.data((rows, columns), dtype, 4), w.data((rows, columns), dtype, 5, same=True)
    outs = w.data((rows, columns), dtype, 10), w.data((rows, columns), dtype, 11)
    g = w.data((columns,), dtype, 6, same=True)
    total = w.scratch((rows, columns), dtype)
    w.reference("all_reduce", x, total, 4)
    want = [a + b for a, b in zip(total, r)] if w.dry else total + r
    own = w.plain(x)

    def ours():
        how = {"one_shot": one_shot, "out": outs}
        return distributed_norms.all_reduce_rms_norm(x, r, g, w.mesh, **how)

    def beside():
        w.nccl("all_reduce", own, total)
        if not w.dry:
            w.torch.nn.functional.rms_norm(total + r, g.shape, g, 1e-6)

    w.say("ours: a call")
    row = {
        "what": f"all_reduce_rms_norm {dtype}"
        + ("" if one_shot is None else f", one_shot {one_shot}"),
        "size": f"{rows} x {columns}",
        "wrong": w.wrong(ours()[1], want),
        "ours": w.time("ours", ours),
    }
    if one_shot is None:
        w.beside(row, lambda: w.time("nccl", beside))
    return row


def ragged(w):
    """Dispatch of tokens, as many to each device, beside NCCL's all-to-all of equal parts."""
    for rows in [6] if w.dry else [256, 4096, 32768]:
        yield partial(dispatched, w, rows // w.n * w.n, 128 if w.dry else 7168)


def dispatched(w, rows, columns):
    w.say("arrays")
    x, sizes = w.data((rows, columns), "bfloat16", 7), w.data((w.n,), "int32", 8)
    for one in sizes if w.dry else [sizes]:
        one[...] = rows // w.n
    out = w.empty((rows, columns), "bfloat16"), w.empty((w.n,), "int32")
    want = w.scratch((rows, columns), "bfloat16")
    w.reference("all_to_all", x, want, 7)
    own = w.plain(x)

    def ours():
        return distributed_ragged.ragged_all_to_all(x, sizes, w.mesh, out=out)

    w.say("ours: a call")
    row = {
        "what": "ragged_all_to_all bfloat16",
        "size": f"{rows} x {columns}",
        "wrong": w.wrong(ours()[0], want),
        "ours": w.time("ours", ours, FEW),
    }
    w.beside(row, lambda: w.time("nccl", lambda: w.nccl("all_to_all", own, want), FEW))
    return row


def many_launches(w):
    """Launches in a row, each device late at random: right results."""
    yield partial(launched, w, 15, 10_000)


def launched(w, seconds, most):
    w.say("arrays")
    rng, x = np.random.default_rng(w.rank), w.data((3000,), "float32", 9)
    want = w.scratch((3000,), "float32")
    w.reference("all_reduce", x, want, 9)
    start, done, wrong, outs = time.time(), 0, 0.0, []
    most = 5 if w.dry else most
    while done < most:
        w.say(f"ours: launch {done}")
        for _ in range(5 if w.dry else 100):
            w.delay(rng)
            outs.append(distributed.all_reduce(x, w.mesh, one_shot=done % 2 == 0))
            done += 1
        for out in outs:
            wrong = max(wrong, w.wrong(out, want))
        outs.clear()
        if max(w.agree(time.time() - start)) > seconds:
            break
    return {"what": "all_reduce with random delays", "size": f"{done} launches", "wrong": wrong}


SECTIONS = {  # functions, and shares of the time
    "collectives": (collectives, 8),
    "components": (components, 3),
    "products": (products, 8),
    "transfers": (transfers, 3),
    "fused": (fused, 1),
    "ragged": (ragged, 1),
    "many_launches": (many_launches, 1.5),
    "settings": (settings, 1.5),
    "configs": (configs, 2),
    "items": (items, 1),
    "waits": (waits, 1),
    "parts": (parts, 1),
    "bfloat16 products": (lambda w: products(w, "bfloat16"), 1),
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
    for size in [4 << 10] if dry else [4 << 10, 1 << 20, (128 << 20) // n]:
        for kind in COLLECTIVES:
            host = Dry(n).data(collective_shapes(kind, size, n, 4)[0], "float32", 1)
            x = host if dry else [plgpu.device_put(a, d) for a, d in zip(host, devices)]
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
            del out
            yield {
                "what": f"{kind} float32, one process, eager",
                "size": f"{size >> 10} KiB",
                "ours": spent * 1e6,
                "wrong": Dry(n).wrong(got, want),
            }


# ---- the run ------------------------------------------------------------------------------------


def deadlines(names, start, until):
    """When each section is to end: {name: time}."""
    shares = [SECTIONS[n][1] for n in names]
    ends = np.cumsum(shares) / sum(shares)
    return {n: start + (until - start) * e for n, e in zip(names, ends)}


def run_sections(w, args, note):
    """All rows but those in the file of what was done, by processes that were here before."""
    with open(f"{args.worker}/plan") as f:
        plan = json.load(f)
    done, hung = set(map(tuple, plan["done"])), plan["hung"]
    ends = deadlines(args.sections, plan["start"], plan["until"])
    for name in args.sections:
        for number, row in enumerate(SECTIONS[name][0](w)):
            if (name, number) in done:
                continue
            if min(w.agree(ends[name] - time.time())) < 0:
                note({"section": name, "failed": f"the time is over, from row {number} on"})
                break
            w.without_nccl = [name, number] in hung
            found, failed = None, None
            w.row = f"{name} {number}"
            w.say("begins")
            try:
                found = row()
            except Exception as e:
                failed = f"rank {w.rank}: {type(e).__name__}: {e}"
                traceback.print_exc()
            errors = [e for e in w.agree(failed) if e]
            if errors:
                found = {"failed": "; ".join(errors)[:1500]}
            note({"section": name, "row": number, **found})
            if errors and not w.dry:
                w.renew()


def worker(args):
    # kernels without some of their work
    warnings.filterwarnings("ignore", ".*nothing writes output")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def note(row):
        if args.mode == "one process" or w.rank == 0:
            with open(f"{args.worker}/rows", "a") as f:
                f.write(json.dumps({"at": round(time.time() - args.start, 1), **row}) + "\n")

    if args.mode == "one process":
        try:
            for row in one_process(args.gpus, args.dry):
                note({"section": args.mode, **row})
        except Exception as e:
            traceback.print_exc()
            note({"section": args.mode, "failed": f"{e}"[:1500]})
        return
    w = Dry(args.gpus, args.worker) if args.dry else Ranks(args.gpus, args.worker)
    w.shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    w.ways = args.ways
    run_sections(w, args, note)
    sys.stdout.flush()
    os._exit(0)  # the ranks end together, with nothing left to wait for


def launch(args, mode, n, place, attempt):
    """The processes of a mode."""
    count = 1 if mode == "one process" or args.dry else n
    port = str(20000 + (os.getpid() * 7 + attempt * 2 + (mode == "one process")) % 20000)
    command = [sys.executable, __file__, "--worker", place, "--mode", mode, "--gpus", str(n)]
    command += ["--start", str(args.start), *(["--dry"] if args.dry else [])]
    command += ["--shapes", *args.shapes, "--ways", *args.ways]
    command += ["--sections", *[s for s in args.sections if s in SECTIONS]]
    running = []
    for rank in range(count):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running.append(subprocess.Popen(command, env=env))
    return running


def said(place, n):
    """What each process does, and since when."""
    found = []
    for rank in range(n):
        with contextlib.suppress(OSError), open(f"{place}/{rank}") as f:
            found.append((os.fstat(f.fileno()).st_mtime, rank, f.read()))
    return found


def stop(running):
    for p in running:
        with contextlib.suppress(ProcessLookupError):
            p.send_signal(signal.SIGUSR1)  # prints its stacks
    time.sleep(1)
    for p in running:
        p.kill()
        p.wait()


def finish(args, running, place, until):
    """Waits for processes. None: they ended; else why they did not."""
    start = time.time()
    while any(p.poll() is None for p in running):
        time.sleep(0.2)
        now = time.time()
        if now > until:
            stop(running)
            return "its time is over"
        ended = [p.returncode for p in running if p.poll() is not None]
        if any(ended):
            time.sleep(3)
            stop(running)
            return f"a process ended with {ended}"
        last = max([start + 30, *(t for t, _, _ in said(place, args.gpus))])
        if now - last > args.patience:
            stop(running)
            return f"nothing new for {args.patience:.0f} s"
    codes = [p.returncode for p in running]
    return f"processes ended with {codes}" if any(codes) else None


def run_ranks(args, n, place, until):
    """The ranks, again without what did not end. What failed."""
    plan = {"done": [], "hung": [], "start": time.time(), "until": until}
    for attempt in range(6):
        for rank in range(n):
            with contextlib.suppress(OSError):
                os.remove(f"{place}/{rank}")
        with open(f"{place}/plan", "w") as f:
            json.dump(plan, f)
        why = finish(args, launch(args, "ranks", n, place, attempt), place, until + 15)
        if why is None:
            return
        doing = [f"rank {r}: {what}" for _, r, what in said(place, n)]
        print(f"ranks: {why}; {doing}", file=sys.stderr, flush=True)
        with open(f"{place}/rows", "a") as f:
            failed = {"section": "ranks", "failed": f"{why}: {'; '.join(doing)}"}
            f.write(json.dumps({"at": round(time.time() - args.start, 1), **failed}) + "\n")
        if until - time.time() < 25:
            return
        with open(f"{place}/rows") as f:
            rows = [json.loads(line) for line in f]
        plan["done"] = [[r["section"], r["row"]] for r in rows if "row" in r]
        for at in {tuple(what.split(": ")[0].rsplit(" ", 1)) for _, _, what in said(place, n)}:
            if len(at) < 2:
                continue
            cell = [at[0], int(at[1])]
            by_nccl = all("nccl" in what for _, _, what in said(place, n))
            if by_nccl and cell not in plan["hung"]:
                plan["hung"].append(cell)
            elif cell not in plan["done"]:
                plan["done"].append(cell)


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
        bad += f"  {r['note']}" if r.get("note") else ""
        if r.get("matmul"):
            bad += f"  cuBLAS {r['cublas']:.1f}, matmul {r['matmul']:.1f}, link {r['link']:.1f}"
        lines.append(f"{r['what']:44} {r['size']:>18} {' '.join(cells)} {by}{bad}")
    return "\n".join(lines)


# Keys of a row that are times in us: the contestant in the file, is it a reference?
TIMES = {"ours": ("ops", False), "nccl": ("NCCL", False), "goal": ("goal", True),
         "matmul": ("ops.matmul alone", True), "cublas": ("cuBLAS alone", True),
         "link": ("transfer alone", True)}  # fmt: skip


def keep(args, rows):
    """A file of results.py."""
    kept = results.Results(__file__, args.json, spread="a single figure, so no spread")
    for r in rows:
        times = {name: [r[k] / 1e6] * 3 for k, (name, _) in TIMES.items() if r.get(k)}
        if times and "failed" not in r:
            kept.add(
                r["section"], f"{r['what']}, {r['size']}", {"call": times},
                references=tuple(name for name, other in TIMES.values() if other),
                errors={"ops": r["wrong"]} if "wrong" in r else None, gpus=args.gpus,
            )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpus", type=int, default=0, help="how many, 0: all")
    parser.add_argument("--seconds", type=float, default=240, help="of the whole run")
    parser.add_argument("--patience", type=float, default=20, help="seconds of a measurement")
    results.argument(parser)
    parser.add_argument("--dry", action="store_true", help="on the interpreter")
    parser.add_argument("--ways", nargs="*", default=[], help="of `configs`: what a row is called")
    parser.add_argument("--shapes", nargs="*", default=[], help="of products: MxKxN of a device")
    parser.add_argument("--sections", nargs="*", choices=[*SECTIONS, "one process"])
    for hidden in ("--worker", "--mode"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, default=time.time(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.sections = args.sections or [*SECTIONS, "one process"]
    devices = plgpu._core.system_info()["devices"]
    n = args.gpus or (2 if args.dry else len(devices))
    if not args.dry and (n < 2 or n > len(devices)):
        parser.error(f"{n} GPUs are needed, at least 2; there are {len(devices)}. --dry needs none")
    args.gpus, place = n, tempfile.mkdtemp()
    open(f"{place}/rows", "w").close()
    end = args.start + args.seconds
    if "one process" in args.sections:  # first: it is short
        until = min(end, time.time() + args.seconds / 6)
        why = finish(args, launch(args, "one process", n, place, 0), place, until)
        print("one process:", why or "done", file=sys.stderr, flush=True)
    if any(s in SECTIONS for s in args.sections):
        run_ranks(args, n, place, end - 15)
    with open(f"{place}/rows") as f:
        found = [json.loads(line) for line in f]
    shutil.rmtree(place)
    keep(args, found)
    print(f"\n{n} x {str(devices[0])[:70] if devices else 'the interpreter'}")
    print(table(found))
    return 1 if any("failed" in r or r.get("wrong") for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
