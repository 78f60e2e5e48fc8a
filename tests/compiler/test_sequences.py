"""What each role of whole kernels does, in order, against records of a compiler proven on the GPU
(data/sequences.json, for the kernels of whole_kernels.py): waits, fences, copies with the barrier
and the bytes that they count on, products, commits with their masks, arrivals, loads and stores.

`alike` makes the differences equal that the PTX ISA allows; each has its reason there."""

import functools
import json
import re
import types
from pathlib import Path

import lanes
import numpy as np
import pytest
from whole_kernels import GRIDS, KERNELS

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

L = types.SimpleNamespace(plgpu=plgpu, pl=pl, lax=lax, jnp=jnp)
RECORDS = json.loads((Path(__file__).parent / "data" / "sequences.json").read_text())


@functools.cache
def program(name):
    body, scratch, shapes, out, threads, blocks = KERNELS[name](L)
    args = []
    for shape in shapes:
        dtype = getattr(jnp, shape[-1]) if isinstance(shape[-1], str) else np.float16
        shape = tuple(x for x in shape if not isinstance(x, str))
        args.append(plgpu.ShapeDtypeStruct(shape, dtype))
    options = {}
    if threads > 1:
        options |= dict(num_threads=threads, thread_name="wg")
    if blocks > 1:
        options |= dict(cluster=(blocks,), cluster_names=("c",))
    if name in GRIDS:
        options |= dict(grid=(GRIDS[name],), grid_names=("g",))
    out = plgpu.ShapeDtypeStruct(out, np.float32)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)
    return lanes.statements(kernel.lower(*args, target="sm_100a")), threads, blocks


WORDS = [
    (r"mbarrier_wait", "wait"),
    (r"mbarrier_arrive_expect_tx", "expect"),
    (r"mbarrier_arrive", "arrive"),
    (r"tma_load|tma_multicast|bulk_load", "copy"),
    (r"tcgen05_mma", "products"),
    (r"tcgen05_commit", "commit"),
    (r"tcgen05_copy", "copy to tmem"),
    (r"tcgen05_fence_after", "fence after"),
    (r"tcgen05_fence_before", "fence before"),
    (r"tmem_load", "load"),
    (r"tmem_store", "store"),
    (r"tmem_wait_store", "wait store"),
    (r"tmem_wait_load", "wait load"),
    (r"try_cancel", "request"),
    (r"query_cancel", "answer"),
    (r"fence_proxy_async", "proxy fence"),
]


def emitted(name, rank, thread, registers=None):
    """The first lane of a thread, as the records have it. registers: of the name of a load or
    store, what stands beside it."""
    text, _, blocks = program(name)
    label = {}
    for m in re.finditer(r"const u32 (\w+) = smem \+ (\d+); // barrier\[(\d*)\]", text):
        n = int(m[3] or 1)
        for k in range(n):
            label[int(m[2]) + 8 * k] = f"{m[1]}[{k}]" if n > 1 else m[1]
    out = []
    for e in lanes.Lane(text, 128 * thread, rank, blocks, responses=[1, 2, None]).run():
        word = next((w for pattern, w in WORDS if re.match(pattern, e.name)), None)
        if word is None:
            continue
        step = [word]
        if word in ("wait", "expect", "arrive", "commit"):
            step.append(label[e.args[0] % lanes.PEER])
        if word in ("copy", "request"):
            at = e.args[3 if e.name == "bulk_load" else 2 if word == "copy" else 1]
            step.append(label[at % lanes.PEER])
            step += ["first block"] * (word == "copy" and "_pair" in e.name)
        if word == "expect" or word == "commit" and len(e.args) > 1:
            step.append(e.args[1])
        if word == "products":
            step.append(1)
        if registers and word in ("load", "store"):
            step.append(registers(e.name))
        out.append(step)
    return out


def alike(steps):
    """Differences that the ISA allows, made equal.

    Bytes are expected before each copy there, and here in one arrival for copies that follow
    each other: expect-tx adds to the count of the phase, before or after complete-tx of the same
    phase (PTX ISA, mbarrier, expect-tx operation). Each load waits for its registers here before
    they are used, and there where the kernel says so: tcgen05.wait::ld is needed before the first
    use of the registers (PTX ISA, tcgen05.wait), and one more changes nothing. A thread that has
    loaded from shared memory which an engine fills has a proxy fence here before it lets the
    engine write there again; there it has none (PTX ISA, async proxy: accesses of one location by
    several proxies need a fence between them). A thread that issues products itself, by its first
    warp, has both fences of tcgen05 around the synchronisation of its warps after loads and stores;
    there it has none (PTX ISA, tcgen05 memory consistency: accesses of different threads need
    fence::before_thread_sync, synchronisation and fence::after_thread_sync between them)."""
    out = []
    for step in steps:
        word, last = step[0], out[-1] if out else [None]
        if word in ("expect", "copy"):
            if last[:2] != ["fill", step[1]]:
                last = ["fill", step[1], 0, 0, False]
                out.append(last)
            last[3 if word == "expect" else 2] += step[2] if word == "expect" else 1
            last[4] |= "first block" in step
        elif word == "products" and last[0] == word:
            last[1] += step[1]
        elif word == "fence after" and last == ["fence before"]:
            out.pop()
        elif word != "proxy fence" and (word != "wait load" or last[0] == "load"):
            out.append(list(step))
    return out


ROLES = [
    (name, rank, wg)
    for name, roles in RECORDS.items()
    for rank, wg in (map(int, key.split(",")) for key in roles)
]


@pytest.mark.parametrize("name, rank, thread", ROLES)
def test_roles(name, rank, thread):
    want = RECORDS[name][f"{rank},{thread}"]
    assert alike(emitted(name, rank, thread)) == alike(want)
