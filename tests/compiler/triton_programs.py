"""What Triton emits for the kernels of whole_kernels.py and for single products: makes
data/triton.json, with which test_third_sources.py compares.

`python tests/compiler/triton_programs.py [--keep FOLDER]` needs Triton 3.9 (`pip install triton`)
and no GPU. Kernels are written in Gluon, with the roles, barriers and buffers of whole_kernels.py.
Only facts are kept: the order of what each role issues, and the operands of its products."""

import argparse
import json
import re
from pathlib import Path

import ptx_lanes
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import blackwell as bw
from triton.experimental.gluon.language.nvidia.blackwell import clc, mbarrier, tma

# ---- kernels -------------------------------------------------------------------------------------


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    found = mbarrier.allocate_mbarrier(batch=n)
    for k in gl.static_range(n):
        mbarrier.init(found.index(k), count)
    return found


@gluon.jit
def save(acc, o, row):
    x = acc.load()
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(o + rows[:, None] * acc.shape[1] + columns[None, :], x)


@gluon.jit
def fetch(
    a, b, a_smem, b_smem, full, empty, work: gl.constexpr, n: gl.constexpr, rows: gl.constexpr
):
    """rows: of A, a step moves; otherwise along K."""
    for it in gl.static_range(work):
        slot = it % n
        if it >= n:
            mbarrier.wait(empty.index(slot), (it // n - 1) & 1)
        mbarrier.expect(full.index(slot), a.nbytes_per_cta + b.nbytes_per_cta)
        if rows:
            tma.async_load(a, [it * 128, 0], full.index(slot), a_smem.index(slot))
            tma.async_load(b, [0, 0], full.index(slot), b_smem.index(slot))
        else:
            tma.async_load(a, [0, it * 64], full.index(slot), a_smem.index(slot))
            tma.async_load(b, [it * 64, 0], full.index(slot), b_smem.index(slot))


@gluon.jit
def ring_multiply(acc, a_smem, b_smem, full, empty, done, steps: gl.constexpr, n: gl.constexpr):
    for it in gl.static_range(steps):
        slot = it % n
        mbarrier.wait(full.index(slot), (it // n) & 1)
        a, b = a_smem.index(slot), b_smem.index(slot)
        bw.tcgen05_mma(a, b, acc, use_acc=it > 0, mbarriers=[empty.index(slot)])
    bw.tcgen05_commit(done.index(0))


@gluon.jit
def ring_take(acc, done, o):
    mbarrier.wait(done.index(0), 0)
    save(acc, o, 0)


@gluon.jit
def ring(a, b, o):
    steps: gl.constexpr = 8
    n: gl.constexpr = 4
    a_smem = gl.allocate_shared_memory(gl.float16, [n, 128, 64], a.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [n, 64, 128], b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [128, 128], layout)
    full, empty, done = barriers(n, 1), barriers(n, 1), barriers(1, 1)
    bw.fence_async_shared()
    gl.warp_specialize(
        [
            (ring_take, (acc, done, o)),
            (fetch, (a, b, a_smem, b_smem, full, empty, steps, n, False)),
            (ring_multiply, (acc, a_smem, b_smem, full, empty, done, steps, n)),
        ],
        [1, 1],
    )


@gluon.jit
def two_multiply(acc, a_smem, b_smem, full, empty, ready, taken, work: gl.constexpr):
    for it in gl.static_range(work):
        slot = it % 2
        if it >= 2:
            mbarrier.wait(taken.index(slot), (it // 2 - 1) & 1)
        mbarrier.wait(full.index(slot), (it // 2) & 1)
        which = [empty.index(slot), ready.index(slot)]
        bw.tcgen05_mma(
            a_smem.index(slot), b_smem.index(slot), acc.index(slot), use_acc=False, mbarriers=which
        )


@gluon.jit
def two_take(acc, ready, taken, o, work: gl.constexpr):
    for it in range(work):  # unrolled, loads of one accumulator would become one
        mbarrier.wait(ready.index(it % 2), (it // 2) & 1)
        save(acc.index(it % 2), o, it * 128)
        mbarrier.arrive(taken.index(it % 2), count=1)


@gluon.jit
def accumulators(a, b, o):
    work: gl.constexpr = 4
    a_smem = gl.allocate_shared_memory(gl.float16, [2, 128, 64], a.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [2, 64, 128], b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [2, 128, 128], layout)
    full, empty, ready, taken = barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1)
    bw.fence_async_shared()
    gl.warp_specialize(
        [
            (two_take, (acc, ready, taken, o, work)),
            (fetch, (a, b, a_smem, b_smem, full, empty, work, 2, True)),
            (two_multiply, (acc, a_smem, b_smem, full, empty, ready, taken, work)),
        ],
        [1, 1],
    )


@gluon.jit
def in_tensor_memory(a, b, o):
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [128, 64], a.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 128], b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [128, 128], layout)
    left: gl.constexpr = bw.TensorMemoryLayout([128, 64], col_stride=1)
    a_tmem = bw.allocate_tensor_memory(gl.bfloat16, [128, 64], left)
    full, done = barriers(1, 1), barriers(1, 1)
    bw.fence_async_shared()
    mbarrier.expect(full.index(0), a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [0, 0], full.index(0), a_smem)
    tma.async_load(b, [0, 0], full.index(0), b_smem)
    mbarrier.wait(full.index(0), 0)
    a_tmem.store(a_smem.load(a_tmem.get_reg_layout()))
    bw.tcgen05_mma(a_tmem, b_smem, acc, use_acc=False, mbarriers=[done.index(0)])
    mbarrier.wait(done.index(0), 0)
    save(acc, o, 0)


@gluon.jit
def scales(a, b, sa, sb, o):
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], a.layout)
    b_smem = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], b.layout)
    sa_smem = gl.allocate_shared_memory(gl.uint8, [1, 1, 32, 16], sa.layout)
    sb_smem = gl.allocate_shared_memory(gl.uint8, [1, 1, 32, 16], sb.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [128, 128], layout)
    of_scales: gl.constexpr = bw.TensorMemoryScalesLayout()
    sa_tmem = bw.allocate_tensor_memory(gl.uint8, [128, 4], of_scales)
    sb_tmem = bw.allocate_tensor_memory(gl.uint8, [128, 4], of_scales)
    full, done = barriers(1, 1), barriers(1, 1)
    bw.fence_async_shared()
    mbarrier.expect(
        full.index(0), a.nbytes_per_cta + b.nbytes_per_cta + sa.nbytes_per_cta + sb.nbytes_per_cta
    )
    tma.async_load(a, [0, 0], full.index(0), a_smem)
    tma.async_load(b, [0, 0], full.index(0), b_smem)
    tma.async_load(sa, [0, 0, 0, 0], full.index(0), sa_smem)
    tma.async_load(sb, [0, 0, 0, 0], full.index(0), sb_smem)
    mbarrier.wait(full.index(0), 0)
    order: gl.constexpr = (0, 3, 2, 1, 4)
    bw.tcgen05_copy(sa_smem.reshape((1, 1, 32, 4, 4)).permute(order).reshape((128, 4)), sa_tmem)
    bw.tcgen05_copy(sb_smem.reshape((1, 1, 32, 4, 4)).permute(order).reshape((128, 4)), sb_tmem)
    bw.tcgen05_mma_scaled(
        a_smem, b_smem.permute((1, 0)), acc, sa_tmem, sb_tmem, "e4m3", "e4m3", use_acc=False,
        mbarriers=[done.index(0)],
    )  # fmt: skip
    mbarrier.wait(done.index(0), 0)
    save(acc, o, 0)


@gluon.jit
def launched_tile(a, b, o, a_smem, b_smem, acc, full, done, at, phase):
    mbarrier.expect(full.index(0), a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [at * 128, 0], full.index(0), a_smem)
    tma.async_load(b, [0, 0], full.index(0), b_smem)
    mbarrier.wait(full.index(0), phase)
    bw.tcgen05_mma(a_smem, b_smem, acc, use_acc=False, mbarriers=[done.index(0)])
    mbarrier.wait(done.index(0), phase)
    save(acc, o, at * 128)


@gluon.jit
def launched(a, b, o):
    a_smem = gl.allocate_shared_memory(gl.float16, [128, 64], a.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [64, 128], b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [128, 128], layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    answer = gl.allocate_shared_memory(gl.int64, [2], plain)
    full, done, known = barriers(1, 1), barriers(1, 1), barriers(1, 1)
    bw.fence_async_shared()
    launched_tile(a, b, o, a_smem, b_smem, acc, full, done, gl.program_id(0), 0)
    for k in gl.static_range(2):
        mbarrier.expect(known.index(0), 16)
        clc.try_cancel(answer, known.index(0))
        mbarrier.wait(known.index(0), k)
        found = clc.load_result(answer)
        if found.is_canceled():
            at = found.program_id(0)
            launched_tile(a, b, o, a_smem, b_smem, acc, full, done, at, (k + 1) & 1)


@gluon.jit
def pair_fetch(a, b, a_smem, b_smem, full, empty, steps: gl.constexpr, n: gl.constexpr):
    for it in gl.static_range(steps):
        slot = it % n
        if it >= n:
            mbarrier.wait(empty.index(slot), (it // n - 1) & 1)
        mbarrier.expect(full.index(slot), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, it * 64], full.index(slot), a_smem.index(slot))
        tma.async_load(b, [it * 64, 0], full.index(slot), b_smem.index(slot))


@gluon.jit
def pair(a, b, o):
    steps: gl.constexpr = 4
    n: gl.constexpr = 2
    a_smem = gl.allocate_shared_memory(gl.float16, [n, 256, 64], a.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [n, 64, 256], b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout(
        [128, 256], col_stride=1, cga_layout=[[1, 0]], two_ctas=True
    )
    acc = bw.allocate_tensor_memory(gl.float32, [256, 256], layout)
    full = mbarrier.allocate_mbarrier(batch=n, two_ctas=True)
    empty = mbarrier.allocate_mbarrier(batch=n)
    done = mbarrier.allocate_mbarrier(batch=1)
    for k in gl.static_range(n):
        mbarrier.init(full.index(k), 1)
    for k in gl.static_range(n):
        mbarrier.init(empty.index(k), 1)
    mbarrier.init(done.index(0), 1)
    bw.fence_async_shared()
    gl.warp_specialize(
        [
            (ring_take, (acc, done, o)),
            (pair_fetch, (a, b, a_smem, b_smem, full, empty, steps, n)),
            (ring_multiply, (acc, a_smem, b_smem, full, empty, done, steps, n)),
        ],
        [1, 1],
    )


@gluon.jit
def products_multiply(s, p, out, q_smem, k_smem, v_smem, full, s_ready, p_ready, out_ready):
    mbarrier.wait(full.index(0), 0)
    bw.tcgen05_mma(q_smem, k_smem.permute((1, 0)), s, use_acc=False, mbarriers=[s_ready.index(0)])
    mbarrier.wait(p_ready.index(0), 0)
    bw.tcgen05_mma(p, v_smem, out, use_acc=False, mbarriers=[out_ready.index(0)])


@gluon.jit
def products_softmax(s, p, out, s_ready, p_ready, out_ready, o):
    mbarrier.wait(s_ready.index(0), 0)
    x = s.load()
    p.store(gl.exp2(x).to(gl.float16))
    mbarrier.arrive(p_ready.index(0), count=1)
    mbarrier.wait(out_ready.index(0), 0)
    save(out, o, 0)


@gluon.jit
def products_fetch(q, k, v, q_smem, k_smem, v_smem, full):
    mbarrier.expect(full.index(0), q.nbytes_per_cta + k.nbytes_per_cta + v.nbytes_per_cta)
    tma.async_load(q, [0, 0], full.index(0), q_smem)
    tma.async_load(k, [0, 0], full.index(0), k_smem)
    tma.async_load(v, [0, 0], full.index(0), v_smem)


@gluon.jit
def products(q, k, v, o):
    """Two products, P of the second over S of the first."""
    q_smem = gl.allocate_shared_memory(gl.float16, [128, 64], q.layout)
    k_smem = gl.allocate_shared_memory(gl.float16, [128, 64], k.layout)
    v_smem = gl.allocate_shared_memory(gl.float16, [128, 64], v.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, 128], col_stride=1)
    s = bw.allocate_tensor_memory(gl.float32, [128, 128], layout)
    p = s.slice(0, 64).reinterpret(gl.float16, [128, 128], layout)
    of_out: gl.constexpr = bw.TensorMemoryLayout([128, 64], col_stride=1)
    out = bw.allocate_tensor_memory(gl.float32, [128, 64], of_out)
    full, s_ready, p_ready, out_ready = (
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
    )
    bw.fence_async_shared()
    gl.warp_specialize(
        [
            (products_softmax, (s, p, out, s_ready, p_ready, out_ready, o)),
            (products_fetch, (q, k, v, q_smem, k_smem, v_smem, full)),
            (
                products_multiply,
                (s, p, out, q_smem, k_smem, v_smem, full, s_ready, p_ready, out_ready),
            ),
        ],
        [1, 1],
    )


@gluon.jit
def product(a, b, o, n: gl.constexpr, a_mn: gl.constexpr, b_k: gl.constexpr, tmem: gl.constexpr):
    """One product; a_mn, b_k: operands that are stored transposed, tmem: A in tensor memory."""
    a_smem = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    b_smem = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    left = a_smem.permute((1, 0)) if a_mn else a_smem
    right = b_smem.permute((1, 0)) if b_k else b_smem
    m: gl.constexpr = left.shape[0]
    layout: gl.constexpr = bw.TensorMemoryLayout([m, n], col_stride=1)
    acc = bw.allocate_tensor_memory(o.dtype.element_ty, [m, n], layout)
    full, done = barriers(1, 1), barriers(1, 1)
    bw.fence_async_shared()
    mbarrier.expect(full.index(0), a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [0, 0], full.index(0), a_smem)
    tma.async_load(b, [0, 0], full.index(0), b_smem)
    mbarrier.wait(full.index(0), 0)
    if tmem:
        of_a: gl.constexpr = bw.TensorMemoryLayout(left.shape, col_stride=1)
        a_tmem = bw.allocate_tensor_memory(a.dtype, left.shape, of_a)
        a_tmem.store(left.load(a_tmem.get_reg_layout()))
        bw.tcgen05_mma(a_tmem, right, acc, use_acc=False, mbarriers=[done.index(0)])
    else:
        bw.tcgen05_mma(left, right, acc, use_acc=False, mbarriers=[done.index(0)])
    mbarrier.wait(done.index(0), 0)
    save(acc, o, 0)


@gluon.jit
def scaled(
    a, b, o, n: gl.constexpr, k: gl.constexpr, a_type: gl.constexpr, b_type: gl.constexpr,
    block: gl.constexpr, scale: gl.constexpr,
):  # fmt: skip
    """One product with scales of blocks along K; both operands are stored along K."""
    a_smem = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    b_smem = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    layout: gl.constexpr = bw.TensorMemoryLayout([128, n], col_stride=1)
    acc = bw.allocate_tensor_memory(gl.float32, [128, n], layout)
    of_scales: gl.constexpr = bw.TensorMemoryScalesLayout()
    sa = bw.allocate_tensor_memory(scale, [128, k // block], of_scales)
    sb = bw.allocate_tensor_memory(scale, [n, k // block], of_scales)
    full, done = barriers(1, 1), barriers(1, 1)
    bw.fence_async_shared()
    mbarrier.expect(full.index(0), a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [0, 0], full.index(0), a_smem)
    tma.async_load(b, [0, 0], full.index(0), b_smem)
    mbarrier.wait(full.index(0), 0)
    bw.tcgen05_mma_scaled(
        a_smem, b_smem.permute((1, 0)), acc, sa, sb, a_type, b_type, use_acc=False,
        mbarriers=[done.index(0)],
    )  # fmt: skip
    mbarrier.wait(done.index(0), 0)
    save(acc, o, 0)


# ---- compilation and what is kept ----------------------------------------------------------------


def descriptor(dtype, shape, swizzle=128, **layout):
    bits = {"fp16": 16, "bf16": 16}.get(dtype, 8)
    layout = gl.NVMMASharedLayout(swizzle, bits, len(shape), **layout)
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def compiled(fn, ctas=1, constants=None, **signature):
    constants = constants or {}
    signature |= dict.fromkeys(constants, "constexpr")
    at = {(list(signature).index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn, signature, at)
    options = {"num_warps": 4, "num_ctas": ctas}
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options=options).asm["ptx"]


def walk(program, blocks, rank):
    """Events of the first lane of each role: the warps that go on, then the workers in order."""
    first = ptx_lanes.Lane(program, 0, rank, blocks)
    out = [first.run()]
    words = [x.to_bytes(4, "little") for at, x in first.stores if at and x]
    for word in words:  # roles of the warps 4 to 7; what fills them up occurs twice
        workers = sorted(x for x in word if word.count(x) == 1)
        for role in workers:
            tid = 32 * (4 + word.index(role))
            lane = ptx_lanes.Lane(program, tid, rank, blocks, entry=role)
            lane.memory[0] = 0  # where tensor memory begins
            out.append(lane.run())
    return out


def steps(events, labels):
    """What a role issues, in the words of data/sequences.json; loads and stores with the number of
    their registers."""
    out = []
    for e in events:
        word = ptx_lanes.word(e.name)
        if word is None:
            continue
        step, numbers = [word], [x for x in e.operands if isinstance(x, int)]
        if word in ("wait", "expect", "arrive"):
            step.append(labels[e.operands[1]])
        if word in ("commit", "request"):
            step.append(labels[e.operands[-1 if word == "request" else 0]])
        if word == "copy":
            step.append(labels[e.operands[2]])
            step += ["first block"] * (".cta_group::2" in e.name)
        if word == "expect" or word == "commit" and len(numbers) > 1:
            step.append(numbers[-1])
        if word == "products":
            step.append(1)
        if word in ("load", "store"):
            step.append(int(re.search(r"\.x(\d+)\.", e.name)[1]))
        out.append(step)
    return out


def sequences(ptx, names, blocks=1):
    """{"rank,role": steps}; names: of the barriers, in the order of their initialization."""
    program, found = ptx_lanes.parse(ptx), {}
    for rank in range(blocks):
        roles = walk(program, blocks, rank)
        if not rank:  # the second block of a pair begins those alone that it has
            starts = [e.operands[0] for e in roles[0] if e.name.startswith("mbarrier.init")]
            labels = dict(zip(starts, names, strict=True))
        for k, events in enumerate(roles):
            found[f"{rank},{k}"] = steps(events, labels)
    return found


def several(name, n):
    return [f"{name}[{k}]" for k in range(n)]


A, B = descriptor("fp16", (128, 64)), descriptor("fp16", (64, 128))
F8, SCALE = descriptor("fp8e4nv", (128, 128)), descriptor("u8", (1, 1, 32, 16), 0)
OF_BF16 = dict(a=descriptor("bf16", (128, 64)), b=descriptor("bf16", (64, 128)))
OF_PAIR = dict(
    a=descriptor("fp16", (256, 64), cga_layout=[[1, 0]]),
    b=descriptor("fp16", (64, 256), cga_layout=[[0, 1]]),
)
RING = several("full", 2) + several("empty", 2)
PROGRAMS = {
    "ring of four": (ring, dict(a=A, b=B), several("full", 4) + several("empty", 4) + ["done"], 1),
    "pair": (pair, OF_PAIR, [*RING, "done"], 2),
    "two accumulators": (
        accumulators, dict(a=A, b=B), RING + several("ready", 2) + several("taken", 2), 1,
    ),
    "A in tensor memory": (in_tensor_memory, OF_BF16, ["full", "done"], 1),
    "scales": (scales, dict(a=F8, b=F8, sa=SCALE, sb=SCALE), ["full", "done"], 1),
    "launched": (launched, dict(a=A, b=B), ["full", "done", "known"], 1),
    "two products": (
        products, dict(q=A, k=A, v=A), ["full", "s_ready", "p_ready", "out_ready"], 1,
    ),
}  # fmt: skip


# Single products: parameters as in data/encodings.json, and the names of Triton's dtypes.
DTYPES = {"f16": "fp16", "bf16": "bf16", "e4m3": "fp8e4nv", "e5m2": "fp8e5", "i8": "i8"}
BITS = {"fp16": 16, "bf16": 16}


def cases():
    for dtype in DTYPES:
        for a_mn in (False, True):
            for b_k in (False, True):
                yield dict(dtype=dtype, k=128, a_mn_major=a_mn, b_k_major=b_k)
    for sw_a, sw_b in ((32, 32), (64, 64), (64, 128), (128, 32), (32, 64)):
        yield dict(dtype="f16", k=64, sw_a=sw_a, sw_b=sw_b)
        yield dict(dtype="bf16", k=64, sw_a=sw_a, sw_b=sw_b, a_mn_major=True, b_k_major=True)
        yield dict(dtype="e4m3", k=128, sw_a=sw_a, sw_b=sw_b, b_k_major=True)
    for n in (8, 16, 32, 64, 256):
        yield dict(dtype="f16", k=64, n=n, b_k_major=True)
    for n in (64, 128, 256):
        yield dict(dtype="f16", k=64, m=64, n=n, b_k_major=True)
    yield dict(dtype="f16", k=64, acc="f16", b_k_major=True)
    yield dict(dtype="e4m3", k=128, acc="f16", b_k_major=True)
    yield dict(dtype="e4m3", dtype_b="e5m2", k=128, b_k_major=True)
    yield dict(dtype="e5m2", dtype_b="e4m3", k=128, b_k_major=True)
    for dtype in ("f16", "bf16"):
        yield dict(dtype=dtype, k=128, a_tmem=True)
        yield dict(dtype=dtype, k=128, a_tmem=True, b_k_major=True)
    for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
        for n in (64, 128, 256):
            yield dict(dtype=a, dtype_b=b, n=n, k=256, b_k_major=True, scale="e8m0")
    for scale, block in (("e8m0", 32), ("e4m3", 16)):
        for n in (64, 128, 256):
            yield dict(dtype="e2m1", n=n, k=256, b_k_major=True, scale=scale, block=block)


def product_of(case):
    c = {"m": 128, "n": 128, "acc": "f32", "sw_a": 128, "sw_b": 128, **case}
    a_mn, b_k = c.get("a_mn_major", False), c.get("b_k_major", False)
    types = c["dtype"], c.get("dtype_b", c["dtype"])
    a_type, b_type = (DTYPES.get(x, "u8") for x in types)
    k = c["k"] // 2 if c["dtype"] == "e2m1" else c["k"]
    a = descriptor(a_type, (k, c["m"]) if a_mn else (c["m"], k), c["sw_a"])
    b = descriptor(b_type, (c["n"], k) if b_k else (k, c["n"]), c["sw_b"])
    if "scale" in c:
        names = {"e4m3": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1"}
        more = dict(a_type=names[types[0]], b_type=names[types[1]], block=c.get("block", 32))
        more["scale"] = gl.uint8 if c["scale"] == "e8m0" else gl.float8e4nv
        return compiled(scaled, constants=dict(n=c["n"], k=c["k"], **more), a=a, b=b, o="*fp32")
    o = "*i32" if c["dtype"] == "i8" else {"f32": "*fp32", "f16": "*fp16"}[c["acc"]]
    more = dict(n=c["n"], a_mn=a_mn, b_k=b_k, tmem=c.get("a_tmem", False))
    return compiled(product, constants=more, a=a, b=b, o=o)


def products_of(ptx):
    """[name, operands of each instruction] and those of the loads of the result."""
    events = ptx_lanes.Lane(ptx_lanes.parse(ptx), 0).run()
    rows = [(e.name, e.operands) for e in events if e.name.startswith("tcgen05.mma")]
    loads = [[e.name, e.operands[-1]] for e in events if e.name.startswith("tcgen05.ld")]
    (name,) = {name for name, _ in rows}
    return {"ptx": name, "rows": [x for _, x in rows], "loads": loads}


def registers_of():
    """Of loads and stores of 128 x 64 elements by each shape of instruction: what a set bit of the
    number of a register, lane or warp adds to row and column."""
    for dtype in (gl.float32, gl.float16):
        layout = bw.TensorMemoryLayout([128, 64], col_stride=1)
        of = bw.tensor_memory_descriptor_type(dtype, [128, 64], layout, [128, 64])
        for shape in ("32x32b", "16x128b", "16x256b"):
            found = of.get_reg_layout(num_warps=4, instr_variant=shape)
            bases = [list(map(list, x)) for x in (found.reg_bases, found.lane_bases)]
            bits = dtype.primitive_bitwidth
            yield dict(shape=shape, bits=bits, registers=bases[0], lanes=bases[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, help="where the PTX goes")
    keep = parser.parse_args().keep
    data = {"triton": triton.__version__, "sequences": {}}
    for name, (fn, operands, names, blocks) in PROGRAMS.items():
        ptx = compiled(fn, blocks, **operands, o="*fp32")
        if keep:
            (keep / f"{name}.ptx").write_text(ptx)
        data["sequences"][name] = sequences(ptx, names, blocks)
    data["products"] = []
    for case in cases():
        try:
            ptx = product_of(case)
        except Exception as error:
            print("refused:", case, type(error).__name__)
            continue
        data["products"].append({"in": case, **products_of(ptx)})
    data["moves"] = list(registers_of())
    text = (
        json.dumps(data)
        .replace('{"in"', '\n{"in"')
        .replace('"sequences"', '\n"sequences"')
        .replace('"moves"', '\n"moves"')
    )
    (Path(__file__).parent / "data" / "triton.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
