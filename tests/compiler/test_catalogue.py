"""The device functions of csrc/cuda/device, one by one, as NVRTC's PTX shows them: which
instruction, with which qualifiers, on which operands in which order; what the compiler can compute
is compared as a number. The emulated machine has a catalogue of its own, so this is what looks at
the shipped one without a GPU."""

import ctypes
import functools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core

DEVICE = Path(__file__).parent.parent.parent / "csrc" / "cuda" / "device"
ORDER = "types thread math memory barrier tma wgmma widen semaphore".split()
ENTRY = 'extern "C" __global__ void %s(u32* out, f32 f, u32 u) {\n  %s\n}\n'


def ptx_of(text, target="sm_90a"):
    """PTX by NVRTC, with the options that the library uses."""
    lib = ctypes.CDLL(_core.system_info()["nvrtc"].split(", ", 1)[1])
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture=compute_{target[3:]}".encode(), b"--std=c++17"]
    source = text.encode()
    assert not lib.nvrtcCreateProgram(ctypes.byref(program), source, b"c.cu", 0, None, None)
    failed = lib.nvrtcCompileProgram(program, 2, (ctypes.c_char_p * 2)(*options))
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


class Body:
    """The lines of one entry. Registers that hold constants are those constants; others are named
    a, b, c ... as they appear in asm statements."""

    def __init__(self, text):
        self.names, self.asm, self.stored = {}, [], []
        constants, inside = {}, False
        for line in text.splitlines():
            line = line.strip()
            if line.startswith("// begin inline asm") or line.startswith("// end inline asm"):
                inside = line.startswith("// begin")
                continue
            if inside:
                self.asm += self.statements(line, constants)
            elif m := re.match(r"mov\.\w+\s+(%\w+), (0?[fd]?-?[0-9A-Fa-f]+);$", line):
                constants[m[1]] = m[2]
            elif m := re.match(r"st\.global\.\w+\s+\[[^]]+\], (\S+);$", line):
                self.stored.append(constants.get(m[1], m[1]))

    def statements(self, line, constants):
        def name(m):
            if m[0] in constants:
                return constants[m[0]]
            return self.names.setdefault(m[0], "abcdefghijklmnopqrstuvwxyz"[len(self.names)])

        line = re.sub(r"%[rfpd]\w*\d", name, line)
        found = [re.sub(r"\s+", " ", x).strip(" {}") for x in re.split(r";", line)]
        return [x + ("}" if x.count("{") > x.count("}") else "") for x in found if x]


@functools.cache
def bodies(codes):
    """One compilation for all of them."""
    text = catalogue() + "".join(ENTRY % (f"case_{k}_", code) for k, code in enumerate(codes))
    parts = re.split(r"\.entry case_(\d+)_", ptx_of(text))[1:]
    return {codes[int(k)]: Body(body) for k, body in zip(parts[::2], parts[1::2], strict=True)}


def catalogue(target="sm_90a"):
    has = "".join(f"#define HAS_{name}\n" for name in sorted(_core.target(target)["features"]))
    return has + "\n".join((DEVICE / f"{name}.cuh").read_text() for name in ORDER)


def words(n, form="u32 w[{n}] = {{{list}}};"):
    return form.format(n=n, list=", ".join(map(str, range(1, n + 1))))


LOAD = "cp.async.bulk.tensor.%dd.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.%dd.global.shared::cta.bulk_group"
EVICT_FIRST = [
    ".reg .b64 first", "createpolicy.fractional.L2::evict_first.b64 first, 1.0",
]  # fmt: skip
MAP = "(const TensorMap*)8192"
SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"

# C++ -> the statements of asm that are left of it, by the PTX ISA.
INSTRUCTIONS = {
    "mbarrier_init(64, 3);": ["mbarrier.init.shared::cta.b64 [64], 3"],
    "mbarrier_init_fence();": ["fence.mbarrier_init.release.cluster"],
    "mbarrier_arrive(64);": ["mbarrier.arrive.shared::cta.b64 _, [64]"],
    "mbarrier_arrive_n<4>(64);": ["mbarrier.arrive.shared::cta.b64 _, [64], 4"],
    "mbarrier_arrive_expect_tx(64, 512);": [
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [64], 512"
    ],
    "mbarrier_arrive_remote(64, 3);": [
        ".reg .b32 r", "mapa.shared::cluster.u32 r, 64, 3",
        "mbarrier.arrive.shared::cluster.b64 _, [r]",
    ],
    "mbarrier_arrive_release(64, 3);": [
        ".reg .b32 r", "mapa.shared::cluster.u32 r, 64, 3",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]",
    ],
    "out[0] = mbarrier_test(64, 1);": [
        ".reg .pred p", "mbarrier.test_wait.parity.shared::cta.b64 p, [64], 1",
        "selp.u32 a, 1, 0, p",
    ],
    "mbarrier_arrive_expect_tx_cluster(64, 512);": [
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [64], 512"
    ],
    f"{words(1)} st_async<u32, 1>(64, w, 128);": [f"{SEND}.b32 [64], 1, [128]"],
    f"{words(2)} st_async<u32, 2>(64, w, 128);": [f"{SEND}.v2.b32 [64], {{1,2}}, [128]"],
    f"{words(4)} st_async<u32, 4>(64, w, 128);": [f"{SEND}.v4.b32 [64], {{1,2,3,4}}, [128]"],
    **{
        f"tma_prefetch_{n}d({MAP}, {', '.join(map(str, range(1, n + 1)))});": [
            f"cp.async.bulk.prefetch.tensor.{n}d.L2.global.tile"
            f" [8192, {{{','.join(map(str, range(1, n + 1)))}}}]"
        ]
        for n in range(1, 6)
    },
    "bulk_prefetch((void*)8192, 512);": ["cp.async.bulk.prefetch.L2.global [8192], 512"],
    "prefetch_global((void*)8192);": ["prefetch.global.L2 [8192]"],
    "discard_lines((void*)8200, 248, 0, 1);": ["discard.global.L2 [8320], 128"],
    "semaphore_signal<true>((u32*)8192, 3);": ["red.release.sys.global.add.u32 [8192], 3"],
    "semaphore_signal<false>((u32*)8192, 3);": ["red.release.gpu.global.add.u32 [8192], 3"],
    "out[0] = semaphore_read<true>((u32*)8192);": [
        "ld.relaxed.sys.global.u32 a, [8192]", "fence.acq_rel.sys",
    ],
    "out[0] = semaphore_read<false>((u32*)8192);": [
        "ld.relaxed.gpu.global.u32 a, [8192]", "fence.acq_rel.gpu",
    ],
    "block_semaphore_init(64, 2);": ["st.shared.u32 [64], 0", "st.shared.u32 [68], 0"],
    "block_semaphore_signal(64, 3);": ["red.release.cta.shared::cta.add.u32 [64], 3"],
    "out[0] = block_semaphore_read(64);": ["ld.acquire.cta.shared::cta.u32 a, [64]"],
    "delay(100);": ["nanosleep.u32 100"],
    "store_async(64, 7, 128, 3);": [
        ".reg .b32 p, q", "mapa.shared::cluster.u32 p, 64, 3", "mapa.shared::cluster.u32 q, 128, 3",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [p], 7, [q]",
    ],
    "fence_proxy_async();": ["fence.proxy.async.shared::cta"],
    "fence_proxy_async_cluster();": ["fence.proxy.async.shared::cluster"],
    "fence_proxy_async_global();": ["fence.proxy.async.global"],
    f"tensor_map_prefetch({MAP});": ["prefetch.tensormap [8192]"],
    "bulk_load(64, (void*)8192, 512, 16);": [
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [64], [8192], 512, [16]"
    ],
    "bulk_load_cluster(64, (void*)8192, 512, 16);": [
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [64], [8192], 512, [16]"
    ],
    "bulk_store((void*)8192, 64, 512);": [
        "cp.async.bulk.global.shared::cta.bulk_group [8192], [64], 512"
    ],
    "bulk_store_evict_first((void*)8192, 64, 512);": [
        *EVICT_FIRST,
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [8192], [64], 512, first",
    ],
    "bulk_group_commit();": ["cp.async.bulk.commit_group"],
    "bulk_group_wait<3>();": ["cp.async.bulk.wait_group 3"],
    "bulk_group_wait_read<3>();": ["cp.async.bulk.wait_group.read 3"],
    "wgmma_commit();": ["wgmma.commit_group.sync.aligned"],
    "f16 d[2]; unpack_pair(d, 64); out[0] = d[0].bits; out[1] = d[1].bits;": [
        "prmt.b32 a, 64, 0, 0x4410", "prmt.b32 b, 64, 0, 0x4432",
    ],
    "wgmma_wait<2>();": ["wgmma.wait_group.sync.aligned 2"],
    "setmaxnreg_inc<232>();": ["setmaxnreg.inc.sync.aligned.u32 232"],
    "setmaxnreg_dec<40>();": ["setmaxnreg.dec.sync.aligned.u32 40"],
    "out[0] = thread_again();": ["mov.u32 a, %tid.x"],
    "u32 w, t, p, l; read_again(w, t, p, l); out[0] = w + t + p + l;": [
        "mov.u32 a, %tid.x", "mov.u32 b, %laneid",
    ],
    "warpgroup_sync(2);": ["bar.sync 3, 128"],
    "section_enter(5);": ["bar.sync 5, 256"],
    "section_leave(5);": ["bar.arrive 5, 256"],
    "named_barrier_sync(5, 96);": ["bar.sync 5, 96"],
    "named_barrier_arrive(5, 96);": ["bar.arrive 5, 96"],
    "cluster_sync();": ["barrier.cluster.arrive.relaxed", "barrier.cluster.wait.acquire"],
    "out[0] = cluster_index_x();": ["mov.u32 a, %cluster_ctaid.x"],
    "out[0] = cluster_index_y();": ["mov.u32 a, %cluster_ctaid.y"],
    "out[0] = cluster_index_z();": ["mov.u32 a, %cluster_ctaid.z"],
    "out[0] = cluster_rank();": ["mov.u32 a, %cluster_ctarank"],
    **{
        f"out[0] = lanes_{name}(2, u == 9);": [
            ".reg .pred p, q", "setp.ne.u32 q, a, 0", f"bar.red.{op}.pred p, 3, 128, q",
            "selp.u32 b, 1, 0, p",
        ]
        for name, op in {"any": "or", "all": "and"}.items()
    },
    "griddepcontrol_wait();": ["griddepcontrol.wait"],
    "griddepcontrol_launch_dependents();": ["griddepcontrol.launch_dependents"],
    "out[0] = next_tile((u32*)8192);": ["atom.relaxed.gpu.global.add.u32 a, [8192], 1"],
    "out[0] = elect_one();": [
        ".reg .pred p", "elect.sync _|p, 0xffffffff", "selp.u32 a, 1, 0, p",
    ],
    f"{words(4)} st_shared<u32, 4>(64, w);": ["st.shared.v4.b32 [64], {1,2,3,4}"],
    f"{words(2)} st_shared<u32, 2>(64, w);": ["st.shared.v2.b32 [64], {1,2}"],
    f"{words(1)} st_shared<u32, 1>(64, w);": ["st.shared.b32 [64], 1"],
    f"{words(8, 'u16 w[{n}] = {{{list}}};')} st_shared<u16, 8>(64, w);": [
        "st.shared.v4.b32 [64], {131073,262147,393221,524295}"
    ],
    f"{words(1, 'u16 w[{n}] = {{{list}}};')} st_shared<u16, 1>(64, w);": ["st.shared.b16 [64], 1"],
    f"{words(4, 'u8 w[{n}] = {{{list}}};')} st_shared<u8, 4>(64, w);": [
        "st.shared.b32 [64], 67305985"
    ],
    f"{words(1, 'u8 w[{n}] = {{{list}}};')} st_shared<u8, 1>(64, w);": ["st.shared.b8 [64], 1"],
    f"{words(4)} st_global<u32, 4>((u32*)8192, w);": ["st.global.v4.b32 [8192], {1,2,3,4}"],
    f"{words(2)} st_global<u32, 2>((u32*)8192, w);": ["st.global.v2.b32 [8192], {1,2}"],
    f"{words(1)} st_global<u32, 1>((u32*)8192, w);": ["st.global.b32 [8192], 1"],
    f"{words(4)} st_cluster<u32, 4>(64, w);": ["st.shared::cluster.v4.b32 [64], {1,2,3,4}"],
    f"{words(2)} st_cluster<u32, 2>(64, w);": ["st.shared::cluster.v2.b32 [64], {1,2}"],
    f"{words(1)} st_cluster<u32, 1>(64, w);": ["st.shared::cluster.b32 [64], 1"],
    "u32 w[4]; ld_cluster<u32, 4>(w, 64); st_shared<u32, 4>(128, w);": [
        "ld.shared::cluster.v4.b32 {a,b,c,d}, [64]", "st.shared.v4.b32 [128], {a,b,c,d}",
    ],
    "u32 w[2]; ld_cluster<u32, 2>(w, 64); st_shared<u32, 2>(128, w);": [
        "ld.shared::cluster.v2.b32 {a,b}, [64]", "st.shared.v2.b32 [128], {a,b}",
    ],
    "u32 w[4]; ld_shared<u32, 4>(w, 64); st_shared<u32, 4>(128, w);": [
        "ld.shared.v4.b32 {a,b,c,d}, [64]", "st.shared.v4.b32 [128], {a,b,c,d}",
    ],
    "u32 w[2]; ld_shared<u32, 2>(w, 64); st_shared<u32, 2>(128, w);": [
        "ld.shared.v2.b32 {a,b}, [64]", "st.shared.v2.b32 [128], {a,b}",
    ],
    "u32 w[4]; ld_global<u32, 4>(w, (u32*)8192); st_shared<u32, 4>(128, w);": [
        "ld.global.v4.b32 {a,b,c,d}, [8192]", "st.shared.v4.b32 [128], {a,b,c,d}",
    ],
    "u32 w[2]; ld_global<u32, 2>(w, (u32*)8192); st_shared<u32, 2>(128, w);": [
        "ld.global.v2.b32 {a,b}, [8192]", "st.shared.v2.b32 [128], {a,b}",
    ],
    "u8 x; ld_shared<u8, 1>(&x, 64); out[0] = x;": ["ld.shared.u8 a, [64]"],
    "u16 x; ld_shared<u16, 1>(&x, 64); out[0] = x;": ["ld.shared.u16 a, [64]"],
    "f32 x; ld_global<f32, 1>(&x, (f32*)64); out[0] = bits_of(x);": ["ld.global.b32 a, [64]"],
    "u16 x; ld_global<u16, 1>(&x, (u16*)64); out[0] = x;": ["ld.global.u16 a, [64]"],
    "u8 x; ld_global<u8, 1>(&x, (u8*)64); out[0] = x;": ["ld.global.u8 a, [64]"],
    f"{words(8, 'u16 w[{n}] = {{{list}}};')} stmatrix_x4(64, w);": [
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [64], {131073,262147,393221,524295}"
    ],
    f"{words(8, 'u16 w[{n}] = {{{list}}};')} stmatrix_x4_trans(64, w);": [
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [64], {131073,262147,393221,524295}"
    ],
    "u32 w[4]; u16 h[8]; ldmatrix_x4(h, 64); pack<u16, 8>(w, h); st_shared<u32, 4>(128, w);": [
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a,b,c,d}, [64]",
        "st.shared.v4.b32 [128], {a,b,c,d}",
    ],
    "u32 w[4]; u16 h[8]; ldmatrix_x4_trans(h, 64); pack<u16, 8>(w, h);"
    " st_shared<u32, 4>(128, w);": [
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a,b,c,d}, [64]",
        "st.shared.v4.b32 [128], {a,b,c,d}",
    ],
    "out[0] = bits_of(cvt_f32(f16{(u16)5}));": ["cvt.f32.f16 a, 5"],
    "out[0] = bits_of(cvt_f16(f));": ["cvt.rn.f16.f32 a, b"],
    "out[0] = bits_of(cvt_bf16(f));": ["cvt.rn.bf16.f32 a, b"],
    "f16 d[2]; cvt_f16x2(d, 1.0f, 2.0f); out[0] = d[0].bits;": [
        "cvt.rn.f16x2.f32 a, 0f40000000, 0f3F800000"
    ],
    "bf16 d[2]; cvt_bf16x2(d, 1.0f, 2.0f); out[0] = d[0].bits;": [
        "cvt.rn.bf16x2.f32 a, 0f40000000, 0f3F800000"
    ],
    **{
        f"out[0] = bits_of(cvt_{t}(f));": [f"cvt.rn.satfinite.{t}x2.f32 a, 0f00000000, b"]
        for t in ("e4m3", "e5m2")
    },
    **{
        f"out[0] = bits_of(cvt_f32({t}{{(u8)5}}));": [
            f"cvt.rn.f16x2.{t}x2 a, 5",
            "cvt.f32.f16 b, c",
        ]
        for t in ("e4m3", "e5m2")
    },
    **{
        f"{t} d[2]; cvt_{t}x2(d, 1.0f, 2.0f); out[0] = d[0].bits;": [
            f"cvt.rn.satfinite.{t}x2.f32 a, 0f40000000, 0f3F800000"
        ]
        for t in ("e4m3", "e5m2")
    },
    **{
        f"f16 d[2]; cvt_from_{t}x2(d, {t}{{1}}, {t}{{2}}); out[0] = d[0].bits;"
        " out[1] = d[1].bits;": [
            f"cvt.rn.f16x2.{t}x2 a, 513"
        ]
        for t in ("e4m3", "e5m2")
    },
    "out[0] = bits_of(cvt_int_to_bf16((i32)u));": ["cvt.rn.bf16.s32 a, b"],
    "out[0] = bits_of(cvt_int_to_bf16(u));": ["cvt.rn.bf16.u32 a, b"],
    **{
        f"out[0] = bits_of({t}{{(u16)5}} {sign} {t}{{(u16)6}});": [f"{name}.rn.{t} a, 5, 6"]
        for t in ("f16", "bf16")
        for sign, name in {"+": "add", "-": "sub", "*": "mul"}.items()
    },
    "out[0] = div_int(9, 4);": ["div.s32 a, 9, 4"],
    "out[0] = div_int(9u, 4u);": ["div.u32 a, 9, 4"],
    "out[0] = rem_int(9, 4);": ["rem.s32 a, 9, 4"],
    "out[0] = rem_int(9u, 4u);": ["rem.u32 a, 9, 4"],
    "out[0] = abs_int(-5);": ["not.b32 a, -5", "add.s32 a, a, 1", "max.s32 b, -5, a"],
    "out[0] = abs_int((i32)0x80000000);": [
        "not.b32 a, -2147483648",
        "add.s32 a, a, 1",
        "max.s32 b, -2147483648, a",
    ],
    "out[0] = wrap_neg(5);": ["not.b32 a, 5", "add.s32 a, a, 1"],
    "out[0] = complement(5);": ["not.b32 a, 5"],
    "out[0] = bits_of(min_f32(f, f32_bits(u)));": ["min.NaN.f32 a, b, c"],
    "out[0] = bits_of(max_f32(f, f32_bits(u)));": ["max.NaN.f32 a, b, c"],
    "out[0] = bits_of(div_rn(f, f32_bits(u)));": ["div.rn.f32 a, b, c"],
    "out[0] = bits_of(exp2_approx(f));": ["ex2.approx.ftz.f32 a, b"],
    "out[0] = bits_of(log2_approx(f));": ["lg2.approx.ftz.f32 a, b"],
    "out[0] = bits_of(sin_approx(f));": ["sin.approx.f32 a, b"],
    "out[0] = bits_of(cos_approx(f));": ["cos.approx.f32 a, b"],
    "out[0] = bits_of(tanh_approx(f));": ["tanh.approx.f32 a, b"],
    "out[0] = bits_of(rsqrt_approx(f));": ["rsqrt.approx.f32 a, b"],
    **{
        f"tma_load_{n}d(64, {MAP}, 16{''.join(f', {k + 1}' for k in range(n))});": [
            f"{LOAD % n} [64], [8192, {{{','.join(str(k + 1) for k in range(n))}}}], [16]"
        ]
        for n in range(1, 6)
    },
    **{
        f"tma_multicast_{n}d(64, {MAP}, 16, 5{''.join(f', {k + 1}' for k in range(n))});": [
            f"{LOAD % n}.multicast::cluster [64],"
            f" [8192, {{{','.join(str(k + 1) for k in range(n))}}}], [16], 5"
        ]
        for n in range(1, 6)
    },
    **{
        f"tma_store_{n}d({MAP}, 64{''.join(f', {k + 1}' for k in range(n))});": [
            f"{STORE % n} [8192, {{{','.join(str(k + 1) for k in range(n))}}}], [64]"
        ]
        for n in range(1, 6)
    },
    **{
        f"tma_store_evict_first_{n}d({MAP}, 64{''.join(f', {k + 1}' for k in range(n))});": [
            *EVICT_FIRST,
            f"{STORE % n}.L2::cache_hint [8192, {{{','.join(str(k + 1) for k in range(n))}}}],"
            " [64], first",
        ]
        for n in range(1, 6)
    },
}  # fmt: skip


def swizzled(a, swizzle):
    """16-byte chunks of a 128-byte line are permuted by the line's number."""
    n = swizzle // 16
    chunk = a // 16 % n
    return a - chunk * 16 + (chunk ^ a // 128 % n) * 16


BYTES = [0, 16, 48, 128, 144, 272, 400, 512, 640, 896, 1008, 1024, 1152, 2040, 4242]

# C++ of a u32 -> its number
NUMBERS = {
    **{f"swizzle<{s}>({a})": swizzled(a, s) for s in (32, 64, 128) for a in BYTES},
    # bits 0-13: address / 16, bits 16-29: distance / 16
    "wgmma_address(0x12340, 16)": 0x1234 | 1 << 16,
    "wgmma_address(0x51230, 0x2000)": 0x1123 | 0x200 << 16,
    "wgmma_address(0x3fff0, 16)": 0x3FFF | 1 << 16,
    "wrap_add(0x7fffffff, 2)": 0x80000001,
    "wrap_sub(-0x7fffffff, 2)": 0x7FFFFFFF,
    "wrap_mul(0x10001, 0x10003)": 0x00040003,
    "(u32)wrap_add((i8)127, (i8)1)": 0xFFFFFF80,
    "shift_left(3, 4)": 48,
    "sign_int(-5)": 0xFFFFFFFF,
    "sign_int(0)": 0,
    "sign_int(7)": 1,
    "wrap_s4(0x17)": 7,
    "wrap_s4(0xf8)": 0xFFFFFFF8,
    "wrap_u4(0xf8)": 8,
    "pack_4(0xfffffff9, 3)": 0x39,
    "leading_zeros(0)": 32,
    "leading_zeros(255u)": 24,
    "leading_zeros((i8)3)": 6,
    "leading_zeros((i16)-1)": 0,
    "leading_zeros((u16)0)": 16,
    "bit_count(-1)": 32,
    "bit_count((i8)-2)": 7,
    "bit_count((u16)0x8001)": 2,
    **{
        f"bits_of(cvt_e8m0(f32_bits(0x{bits:08x}u)))": want
        for bits, want in {
            0: 0,
            0x00400000: 0,
            0x00400001: 1,
            0x00800000: 1,
            0x00800001: 2,
            0x3F800000: 127,
            0x3F800001: 128,
            0x7F000000: 254,
            0x7F7FFFFF: 254,
            0x7F800000: 254,
            0x7FC00000: 255,
            0xBF800000: 255,
            0x80000000: 0,
        }.items()
    },
    "bits_of(cvt_f32(e8m0{0}))": 0x00400000,
    "bits_of(cvt_f32(e8m0{1}))": 0x00800000,
    "bits_of(cvt_f32(e8m0{127}))": 0x3F800000,
    "min_int(-5, 3)": 0xFFFFFFFB,
    "min_int(3u, 5u)": 3,
    "max_int(-5, 3)": 3,
    "max_int(3u, 5u)": 5,
    "bits_of(sign_f32(-0.0f))": 0,
    "bits_of(sign_f32(-3.0f))": 0xBF800000,
    "bits_of(-f16{0x3c00})": 0xBC00,
    "bits_of(-bf16{0x3f80})": 0xBF80,
    "bits_of(cvt_f32(bf16{0x3f80}))": 0x3F800000,
    "bitcast<u32>(1.5f)": 0x3FC00000,
    "bits_of(bitcast<f32>(0x3fc00000u))": 0x3FC00000,
    "bits_of((i8)-1)": 0xFF,
    "bits_of((i16)-1)": 0xFFFF,
}


def unpacked(type_name, n):
    """unpack of the words 0x04030201, 0x08070605: element k, as stored."""
    return (
        f"u32 w[2] = {{0x04030201, 0x08070605}}; {type_name} d[{n}];"
        f" unpack<{type_name}, {n}>(d, w);"
        f" for (int k = 0; k < {n}; k++) out[k] = (u32)d[k];"
    )


UNPACKED = {
    unpacked("u8", 8): [1, 2, 3, 4, 5, 6, 7, 8],
    unpacked("u16", 4): [0x0201, 0x0403, 0x0605, 0x0807],
    unpacked("u32", 2): [0x04030201, 0x08070605],
    "u32 d[4] = {1, 2, 3, 4}; zero<u32, 4>(d); for (int k = 0; k < 4; k++) out[k] = d[k];": [0] * 4,
}

ALL = (*INSTRUCTIONS, *(f"out[0] = (u32)({x});" for x in NUMBERS), *UNPACKED)


@pytest.mark.parametrize("code", INSTRUCTIONS)
def test_instructions(code):
    assert bodies(ALL)[code].asm == INSTRUCTIONS[code]


def test_approximate_bases():
    """The exponential and the logarithm are those of base e: log2(e) before one, log(2) after the
    other."""
    for name, factor, order in (
        ("exp", np.log2(np.e), ["mul.f32", "ex2.approx.ftz.f32"]),
        ("log", np.log(2), ["lg2.approx.ftz.f32", "mul.f32"]),
    ):
        text = ptx_of(catalogue() + ENTRY % ("entry", f"out[0] = bits_of({name}_approx(f));"))
        found = re.findall(r"\b(mul[.\w]*f32|\w+\.approx\.ftz\.f32)\b(.*)", text)
        assert [x for x, _ in found] == order
        assert f"0f{np.float32(factor).view(np.uint32):08X};" in dict(found)["mul.f32"]


def test_the_last_caller_clears_the_counters():
    """Both tiles and the count of those who are done, which stands after them."""
    text = ptx_of(catalogue() + ENTRY % ("clear", "counters_done((u32*)8192, 1, 10);"))
    lines = [re.sub(r"\s+", " ", x).strip() for x in text.splitlines()]
    constant = dict(m.groups() for x in lines if (m := re.match(r"mov\.\w+ (%\w+), (\d+);", x)))
    asm = [re.sub(r"%\w+", lambda m: constant.get(m[0], "r"), x) for x in lines]
    assert "atom.acq_rel.gpu.global.add.u32 r, [8196], 1;" in asm
    stored = [x for x in asm if x.startswith("st.global.u32")]
    assert stored == [f"st.global.u32 [{8192 + 4 * k}], 0;" for k in range(2)]
    (test,) = (k for k, x in enumerate(asm) if x.startswith("setp"))
    assert re.fullmatch(r"setp\.ne\.[su]32 r, r, 9;", asm[test])
    assert asm[test + 1].startswith("@r bra") and test < asm.index(stored[0])


def test_semaphores_wait():
    """Again and again until the counter is at least n, modulo 2^32; then the fence. With _take it
    goes down by n in the same step, from no less than what was seen."""
    sync = "fence.acq_rel.gpu;"
    for code, access in (
        ("semaphore_wait<false>((u32*)8192, u);", "ld.relaxed.gpu.global.u32"),
        ("semaphore_take<false>((u32*)8192, u);", "atom.relaxed.gpu.global.cas.b32"),
        ("block_semaphore_wait(64, u);", "ld.acquire.cta.shared::cta.u32"),
        ("block_semaphore_take(64, u);", "atom.acquire.cta.shared::cta.cas.b32"),
    ):
        text = ptx_of(catalogue() + ENTRY % ("wait", code))
        text = text[text.index(".entry wait") :]
        lines = [re.sub(r"\s+", " ", x).strip() for x in text.splitlines()]
        (at,) = (k for k, x in enumerate(lines) if x.startswith(access))
        label = [x[:-1] for x in lines[:at] if re.fullmatch(r"\$L\w+:", x)][-1]
        back = [k for k, x in enumerate(lines) if x.startswith("@") and f"bra {label}" in x]
        assert label and back and back[0] > at, code
        compare = next(x for x in lines[at + 1 : back[0]] if x.startswith("setp"))
        if "cas" in access:
            assert re.match(r"setp\.(ne|eq)\.[sub]32", compare), compare
            assert any(x.startswith("sub.s32") for x in lines[:at]), code
            assert any(x.startswith("max.u32") for x in lines[:at]), code
        else:
            assert re.match(r"setp\.(lt|gt|ge)\.s32 %\w+, %\w+, (0|-1);", compare), compare
        if "gpu" in access:
            assert lines.index(sync) > back[0]


def test_the_last_warp_clears_the_counters():
    """All of them and the count of those who are done, when it is the last."""
    text = ptx_of(catalogue() + ENTRY % ("clear", "counters_done_by_warp((u32*)8192, 70, 10);"))
    text = text[text.index(".entry clear") :]
    asm = [re.sub(r"\s+", " ", x).strip() for x in text.splitlines()]
    atom = next(k for k, x in enumerate(asm) if x.startswith("atom.acq_rel.gpu.global.add.u32"))
    shuffle = next(k for k, x in enumerate(asm) if x.startswith("shfl.sync.idx"))
    stores = [k for k, x in enumerate(asm) if x.startswith("st.global.u32")]
    assert atom < shuffle < stores[0]
    assert any(re.match(r"setp\.ne\.[su]32 %\w+, %\w+, 9;", x) for x in asm[shuffle : stores[0]])
    assert any(re.match(r"setp\.(gt|lt)\.u32 %\w+, %\w+, 71;", x) for x in asm[shuffle:])


@pytest.mark.parametrize("name,how", [("", ""), ("_cluster", ".acquire.cluster")])
def test_waiting_is_a_loop(name, how):
    """Out when the phase has ended, else once more."""
    text = (DEVICE / "barrier.cuh").read_text()
    body = text[text.index(f"FN void mbarrier_wait{name}(") :]
    code, inputs = re.search(r"asm volatile\((.*?) :: (.*?)\);", body, re.S).groups()
    code = re.sub(r'"\s*"', "", code).strip('"').replace("\\n", " ")
    assert code == (
        f"{{ .reg .pred p; W: mbarrier.try_wait.parity{how}.shared::cta.b64 p, [%0], %1;"
        " @p bra D; bra W; D: }"
    )
    assert inputs == '"r"(b), "r"(parity) : "memory"'


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers(code):
    stored = bodies(ALL)[f"out[0] = (u32)({code});"].stored
    assert [int(x) & 0xFFFFFFFF for x in stored] == [NUMBERS[code]]


@pytest.mark.parametrize("code", UNPACKED)
def test_words_to_elements(code):
    assert [int(x) for x in bodies(ALL)[code].stored] == UNPACKED[code]


@pytest.mark.parametrize(
    "name,steps",
    [
        ("i8", {"cvt.rzi.s32.f32", "min.s32 127", "max.s32 -128"}),
        ("u8", {"cvt.rzi.u32.f32", "min.u32 255"}),
        ("i16", {"cvt.rzi.s32.f32", "min.s32 32767", "max.s32 -32768"}),
        ("u16", {"cvt.rzi.u32.f32", "min.u32 65535"}),
        ("i32", {"cvt.rzi.s32.f32"}),
        ("u32", {"cvt.rzi.u32.f32"}),
    ],
)
def test_to_int(name, steps):
    """Toward zero, then clamped."""
    ptx = ptx_of(catalogue() + ENTRY % ("convert", f"out[0] = (u32)cvt_int<{name}>(f);"))
    found = re.findall(r"(cvt\.rzi\S*|(?:min|max)\.[su]32)\s+%r\d+, %\w+(?:, (-?\d+))?;", ptx)
    bounds = {"max.s32 -2147483648", "min.s32 2147483647", "min.u32 4294967295", "min.u32 -1"}
    assert {" ".join(x).strip() for x in found} - bounds == steps


def test_meetings():
    """All lanes take part: xor with the mask, a broadcast from lane 0, lanes before; barrier 0."""
    code = "out[0] = shuffle_xor(u, 4); out[1] = warp_uniform(u); block_sync();"
    code += " out[2] = warp_any(u == 9); out[3] = shuffle_up(u, 2); u32 a = u, b = out[4];"
    code += " swap_lanes<1, 1>(&a, &b, threadIdx.x & 8, 8); out[5] = a; out[6] = b;"
    ptx = ptx_of(catalogue() + ENTRY % ("meet", code))
    constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (-?\d+);", ptx))
    shuffle = r"shfl\.sync\.(\w+)\.b32\s+\S+ %r\d+, (\S+), (\S+), (\S+);"
    found = [(x, *(constants.get(y, y) for y in rest)) for x, *rest in re.findall(shuffle, ptx)]
    want = [("bfly", "4", "31", "-1"), ("idx", "0", "31", "-1"), ("up", "2", "0", "-1")]
    assert found == [*want, ("bfly", "8", "31", "-1")]
    assert re.search(r"bar(rier)?\.sync\s+0;", ptx)
    vote = re.search(r"vote\.sync\.any\.pred\s+%p\d+, %p\d+, (\S+);", ptx)
    assert vote and constants.get(vote[1], vote[1]) == "-1"


def test_words_of_shuffles():
    """Four bytes travel in one word, and come out where they were."""
    code = "u8 x[4] = {1, 2, 3, (u8)u}; shuffle_from<4>(x, 7); for (int k = 0; k < 4; k++)"
    ptx = ptx_of(catalogue() + ENTRY % ("words", code + " out[k] = x[k];"))
    assert len(re.findall(r"shfl\.sync", ptx)) == 1
    assert re.search(r"shfl\.sync\.idx\.b32\s+\S+ %r\d+, (7|%r\d+), ", ptx)
    assert "0x30201" in ptx.lower() or "197121" in ptx


def test_shared_memory_begins_at_1024():
    ptx = ptx_of(catalogue() + ENTRY % ("base", "out[0] = shared_base();"))
    assert re.search(r"\.extern \.shared \.align 1024 \.b8 shared_memory\[\]", ptx)
    assert "cvta.to.shared.u64" in ptx


# ---- products, which csrc/cuda/ptx.c prints ---------------------------------------------------


def product(a_transposed, b_transposed, registers, acc, dtype, written=True, begun=None):
    """The program of a product of 64x64 and 64x16. written: by plain code too, so that the
    accumulator is an array; else several products add up. begun: what is stored before, if any."""

    def body(a_gmem, b_gmem, o_ref, a_smem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def scoped(acc_ref):
            a = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA) if registers else a_smem
            if begun is not None:
                acc_ref[...] = plgpu.numpy.full((64, 16), begun, acc)

            @plgpu.pl.loop(0, 1 if written else 2)
            def _(_):
                b = b_smem.T if b_transposed else b_smem
                plgpu.wgmma(acc_ref, a_smem.T if a_transposed else a, b)

            value = acc_ref[...]
            if written:
                acc_ref[...] = value
            return value

        o_ref[...] = plgpu.pl.run_scoped(scoped, plgpu.ACC((64, 16), acc))

    def swizzled(shape):
        s = 128 if b_transposed else 32
        tiling = plgpu.TilingTransform((8, s // 2)), plgpu.SwizzleTransform(s)
        return plgpu.SMEM(shape, dtype, transforms=tiling)

    b_shape = (16, 64) if b_transposed else (64, 16)
    shapes = [plgpu.ShapeDtypeStruct(x, dtype) for x in ((64, 64), b_shape)]
    scratch = [swizzled((64, 64)), swizzled(b_shape), plgpu.Barrier(num_arrivals=2)]
    out = plgpu.ShapeDtypeStruct((64, 16), acc)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch).lower(*shapes)


F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32


@pytest.mark.parametrize(
    "a_transposed,b_transposed,registers,acc,dtype",
    [
        (False, False, False, F32, F16),
        (False, True, False, F32, BF16),
        (True, False, False, F32, F16),
        (True, True, False, F16, F16),
        (False, False, True, F32, BF16),
        (False, True, True, F16, F16),
    ],
)
@pytest.mark.parametrize("contents", ["fresh", "held", "ptx"])
def test_products(a_transposed, b_transposed, registers, acc, dtype, contents):
    """The fence stands first. Each register of a statement is assigned once. A before B, low words
    before high ones; scale-d is true but in the first product of a fresh accumulator, or into
    zeros, both scales of the inputs are 1, and then come the bits that say which operands are not
    contiguous along K. Step k begins where its 16 columns of A and rows of B are. The accumulator
    is an array, all of whose elements are operands, which are read where there were zeros, or
    registers of PTX."""
    in_ptx = contents == "ptx"
    if in_ptx and acc is F16:
        pytest.skip("halves are not kept there")
    begun = 0 if contents == "held" else None
    text = product(a_transposed, b_transposed, registers, acc, dtype, not in_ptx, begun).as_text(
        "cuda"
    )
    n = 8 if acc is F32 else 4
    if in_ptx:
        found = re.findall(r"#define (wgmma_m64n16k16_\w+)\((D, [^)]*)\) \\\n"
                           r"  asm volatile\((.*?: \"memory\")\)\n", text, re.S)  # fmt: skip
        ((name, _, statement),) = found
        statement = statement.replace("\\\n", "\n").replace("(a)[", "a[")
        unwrapped = re.sub(r'" \\\n *"', "", text)
        (listed,) = re.findall(r'#define \w+_list_0_8 "{(.*?)}"', unwrapped)
        whose = listed.split("_0,")[0]
        assert listed == ",".join(f"{whose}_{k}" for k in range(n))
        assert f'".reg .f32 {whose}_<{n}>;"' in text
    else:
        found = re.findall(r"FN void (wgmma_m64n16k16_\w+)\(([^)]*)\) {\n#define D \"(.*?)\"\n"
                           r"  asm volatile\((.*?)\);\n#undef D\n}", text, re.S)  # fmt: skip
        ((name, _, registers_of_d, statement),) = found
        assert registers_of_d == "{" + ",".join(f"%{k}" for k in range(n)) + "}"
    assert f"_x4_{contents}" in name
    types = {F16: "f16", BF16: "bf16", F32: "f32"}
    code, *operands = re.split(r"\s:(?:\s+|(?=:))", re.sub(r"\s+", " ", statement))
    if in_ptx:
        operands = ["", operands[0].lstrip(": "), *operands[1:]]
        n = 0  # of the operands
    code = re.sub(r"\s+", " ", re.sub(r'\\n|"', "", code))
    first = "setp.eq" if in_ptx else "setp.ne"
    opening, rest = code.split(f"; {first}", 1)
    opening = opening.strip().split("; ")
    assert opening[0] == "{ .reg .pred p<2>" and opening[-1] == "wgmma.fence.sync.aligned"
    declared = [] if registers else [".reg .b64 ma<4>", ".reg .b32 ta<4>"]
    assert opening[1:-1] == [*declared, ".reg .b64 mb<4>", ".reg .b32 tb<4>"]
    steps = (first + rest).rstrip(" }").split(" D , ")
    swizzle = 128 if b_transposed else 32

    def begins(k, transposed, rows):
        """In units of 16 bytes; tiles of all rows by the bytes of the swizzle follow each other."""
        if transposed:
            return k * 16 * swizzle // 16
        tile, inside = divmod(k, swizzle // 32)
        return tile * rows * swizzle // 16 + inside * 2

    a_at = [begins(k, a_transposed, 64) for k in range(4)]
    b_at = [begins(k, not b_transposed, 16) for k in range(4)]

    def descriptor(which, k, low, at):
        step = f"t{which}{k}"
        move = f"add.u32 {step}, %{low}, {at}; " if at else ""
        return f"{move}mov.b64 m{which}{k}, {{{step if at else f'%{low}'}, %{low + 1}}}; "

    want, b = [], n + (16 if registers else 2)
    for k in range(4):
        begin = {0: "setp.eq.b32 p1, 0, 0; "}
        if not in_ptx:
            begin = {0: "setp.ne.b32 p0, 0, 0; ", 1: "setp.eq.b32 p1, 0, 0; "}
        step, p = begin.get(k, ""), "p1" if in_ptx or k else "p0"
        if not registers:
            step += descriptor("a", k, n, a_at[k])
        step += descriptor("b", k, b, b_at[k])
        t = types[dtype]
        want.append(f"{step}wgmma.mma_async.sync.aligned.m64n16k16.{types[acc]}.{t}.{t}")
        a = "{" + ",".join(f"%{n + 4 * k + i}" for i in range(4)) + f"}}, mb{k}, {p}, 1, 1, "
        tail = a if registers else f"ma{k}, mb{k}, {p}, 1, 1, {int(a_transposed)}, "
        want.append(f"{tail}{int(not b_transposed)};")
    got = [
        x.strip()
        for step in steps
        for x in re.split(r"(?<=, p[01], 1, 1, [01];) |(?<=, p[01], 1, 1, [01], [01];) ", step)
    ]
    assert [x for x in got if x] == want
    letter = "f" if acc is F32 else "r"
    inputs = [f"a[{k}]" for k in range(16)] if registers else ["a", "a_high"]
    access = "+" if contents == "held" else "="
    assert operands[0] == ", ".join(f'"{access}{letter}"(d[{k}])' for k in range(n))
    assert operands[1] == ", ".join(f'"r"({x})' for x in [*inputs, "b", "b_high"])
    assert operands[2] == '"memory"'
    (call,) = re.findall(rf"  {name}\(([^;]*)\);", text)
    # 1 << 30: 128 bytes, 3 << 30: 32 bytes; groups of 8 rows lie 1024 or 256 bytes apart
    b_high = "stride_1024_swizzle_128" if b_transposed else "stride_256_swizzle_32"
    value = "0x40000040u" if b_transposed else "0xc0000010u"
    assert set(re.findall(r"stride_\w+", call)) == {b_high} and call.endswith(b_high)
    assert re.findall(rf"constexpr u32 {b_high} = (\w+);", text) == [value]


@pytest.mark.parametrize("acc, letter, n", [(F32, "f", 8), (F16, "r", 4)])
def test_accumulators_that_go_on_are_read(acc, letter, n):
    text = product(False, False, False, acc, F16, begun=3).as_text("cuda")
    (statement,) = re.findall(
        r"FN void wgmma_m64n16k16_.*?asm volatile\((.*?)\);\n#undef", text, re.S
    )
    assert re.findall(r'"(\S)\w"\(d\[(\d+)\]\)', statement) == [("+", str(k)) for k in range(n)]
    assert f'"+{letter}"(d[0])' in statement and "_fresh" not in text


def test_registers_of_ptx_are_written():
    """Where a loop of products follows."""
    text = product(False, False, False, F32, F16, written=False, begun=3).as_text("cuda")
    write = r'FN void (\w+)_write\(const f32\* d\) {\n  asm volatile\("([^"]*)"\s*:: ([^;]*)\);\n}'
    ((acc, moves, operands),) = re.findall(write, re.sub(r'" *\n *"', "", text))
    assert moves == " ".join(f"mov.f32 {acc}_{k}, %{k};" for k in range(8))
    assert re.sub(r"\s+", " ", operands) == ", ".join(f'"f"(d[{k}])' for k in range(8))
    body = text[text.index("__global__") :]
    assert body.index(f" {acc}_write(same") < body.index(" wgmma_m64n16k16_f32_f16_kn_x4_ptx")


def test_pins_name_every_register():
    text = product(False, False, False, F32, F16).as_text("cuda")
    body = re.search(r"FN void pin_f32_8\(f32\* d\) {\n  asm volatile\((.*?)\);\n}", text, re.S)[1]
    assert re.findall(r'"\+f"\(d\[(\d+)\]\)', body) == [str(k) for k in range(8)]
    assert '"memory"' in body
