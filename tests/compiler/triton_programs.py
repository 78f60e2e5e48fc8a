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
def fetch(a, b, a_smem, b_smem, full, empty, work: gl.constexpr, n: gl.constexpr, rows: gl.constexpr):
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
    for it in gl.static_range(work):
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
    full, s_ready, p_ready, out_ready = barriers(1, 1), barriers(1, 1), barriers(1, 1), barriers(1, 1)
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


# ---- compilation and what is kept ------------------------------------------------------------------


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
