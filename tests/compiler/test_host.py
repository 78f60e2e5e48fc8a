"""The emulated machine (pallas_mgpu/machine): what it must refuse, and numbers it must get right.
The kernels here are written by hand, in the functions of the catalogue."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

NAMES = {"u32": "uint32", "f32": "float32", "u16": "uint16", "i32": "int32"}
HEAD = """extern "C" void __global__ probe(%s) {
  const u32 smem = shared_base(), tid = threadIdx.x, warp = tid / 32, lane = tid %% 32;
"""


def program(body, parameters, arrays, maps=(), **options):
    """Text and facts of a kernel `probe`; parameters: C++ of each, maps: their tensor maps."""
    declared = [f"const TensorMap t{k}" for k in range(len(maps))] + list(parameters)
    text = HEAD % ", ".join(declared) + body + "\n}\n"
    info = {
        "entry": "probe",
        "grid": (1, 1, 1),
        "cluster": (1, 1, 1),
        "block": 128,
        "smem_bytes": 65536,
        "args": [("tensor_map", m["param"], k) for k, m in enumerate(maps)]
        + [("pointer", k, 0) for k in range(len(parameters))],
        "maps": list(maps),
        "params": [(x.dtype.name, x.shape, 256, -1) for x in arrays],
    }
    return text, {**info, **options}


def execute(body, ins=(), outs=(), parameters=None, maps=(), seeds=range(4), **options):
    arrays = [*ins, *outs]
    types = {np.dtype(v): k for k, v in NAMES.items()}
    if parameters is None:
        parameters = [
            f"{'const ' if k < len(ins) else ''}{types[x.dtype]}* {'abcdefg'[k]}"
            for k, x in enumerate(arrays)
        ]
    text, info = program(body, parameters, arrays, maps, **options)
    for seed in seeds:
        host.run_program(text, info, ins, outs, seed)
    return outs[0] if outs else None


def refused(why, body, ins=(), outs=(), **options):
    """Every schedule ends with an error that says why and shows the generated line."""
    for seed in range(4):
        with pytest.raises(host.HostError, match=why) as caught:
            execute(body, ins, outs, seeds=[seed], **options)
    return str(caught.value)


def zeros(n=128, dtype=np.uint32):
    return np.zeros(n, dtype)


EXCHANGE = """
  u32 x = tid * 3, y;
  st_shared<u32, 1>(smem + tid * 4, &x);
  %s
  ld_shared<u32, 1>(&y, smem + (127 - tid) * 4);
  st_global<u32, 1>(a + tid, &y);
"""


def test_threads_exchange_through_shared_memory():
    got = execute(EXCHANGE % "warpgroup_sync(0);", outs=[zeros()])
    np.testing.assert_array_equal(got, np.arange(128)[::-1] * 3)
    text = refused("not ordered after its write|was never written", EXCHANGE % "", outs=[zeros()])
    assert "ld_shared<u32, 1>(&y" in text and re.search(r"line \d+", text)


ACCESSES = {
    "no multiple of 8": "u32 x[2]; ld_shared<u32, 2>(x, smem + 4);",
    "no multiple of 16": "u32 x[4] = {}; st_global<u32, 4>(a + 1, x);",
    "the shared memory has 65536": "u32 x = 0; st_shared<u32, 1>(smem + 65536, &x);",
    "shared memory is read and was never written": "u32 x; ld_shared<u32, 1>(&x, smem);",
    "bytes 512 to 516 of argument 0, which has 512": "u32 x = 0; st_global<u32, 1>(a + 128, &x);",
    "bytes -4 to 0 of argument 0": "u32 x; ld_global<u32, 1>(&x, a - 1);",
    "global memory is read and was never written": "u32 x; ld_global<u32, 1>(&x, a);",
    "outside of all arguments": "u32 x; ld_global<u32, 1>(&x, (u32*)64);",
    "an index out of bounds": "int x[4]; x[tid % 5] = 1; host_pin(x, 16, 3);",
    "its write by thread": "u32 x = tid; st_shared<u32, 1>(smem, &x);",
    "its (read|write) by": "u32 x = 1; st_shared<u32, 1>(smem + tid * 4, &x); warpgroup_sync(0);"
    " u32 y; ld_shared<u32, 1>(&y, smem + (tid ^ 1) * 4); st_shared<u32, 1>(smem + tid * 4, &tid);",
}


@pytest.mark.parametrize("why", ACCESSES)
def test_accesses_that_are_refused(why):
    refused(why, ACCESSES[why], outs=[zeros()])


def test_one_value_may_be_stored_by_all():
    body = """u32 x = 7, y; st_shared<u32, 1>(smem, &x); ld_shared<u32, 1>(&y, smem);
    st_global<u32, 1>(a + tid, &y);"""
    assert (execute(body, outs=[zeros()]) == 7).all()


def test_operands_are_read_only():
    refused("st.global to an operand", "u32 x = 0; st_global<u32, 1>((u32*)a, &x);", ins=[zeros()])


MEETINGS = {
    "is at shfl.sync .* is at shfl.sync in line": "u32 x = lane < 16 ? warp_uniform(tid) :\n"
    "warp_uniform(0);",
    "lane .* is at elect.sync": "bool x;\nif (lane) x = elect_one();\nelse warp_uniform(1);",
    "deadlock: .* the other lanes of its warp at shfl.sync": "if (lane != 3) warp_uniform(tid);",
    "deadlock: .* bar.sync 1, where 128 threads meet": "if (tid < 96) warpgroup_sync(0);",
    "for 128 threads here|for 64 here|is for": "host_bar_sync(1, tid < 64 ? 64 : 128, 4);",
    "barriers are 0 to 15": "warpgroup_sync(15);",
    "passed by .* lanes of warp": "host_bar_sync(lane % 2, 64, 4);",
    "bar.sync of 160 threads in a block of 128": "host_bar_sync(1, 160, 4);",
    "another warp of its warpgroup|instructions that all warps": "if (warp) wgmma_fence();",
    "setmaxnreg 60": "setmaxnreg_dec<60>();",
    "setmaxnreg.inc to 64: the warp has 256": "setmaxnreg_inc<64>();",
}


@pytest.mark.parametrize("why", MEETINGS)
def test_meetings_that_are_refused(why):
    refused(why, MEETINGS[why])


def test_registers_of_a_block():
    """168 each for three warpgroups: one gives 128 of its own, two others get 64 each."""
    body = "if (warp < 4) setmaxnreg_dec<40>(); else setmaxnreg_inc<%d>();"
    execute(body % 232, block=384)
    refused("deadlock: .* registers: the block has", body % 240, block=384)


BARRIER = """
  if (tid == 0) { mbarrier_init(smem, %d); %s }
  block_sync();
"""


def barrier(count, fence="mbarrier_init_fence();"):
    return BARRIER % (count, fence)


def test_mbarriers():
    """Arrivals of all, three phases; each order of arrival and wait."""
    body = (
        barrier(128)
        + """
  u32 sum = 0;
  for (u32 k = 0; k < 3; k++) {
    u32 x = tid + k, y;
    st_shared<u32, 1>(smem + 1024 + tid * 4, &x);
    mbarrier_arrive(smem);
    mbarrier_wait(smem, k & 1);
    ld_shared<u32, 1>(&y, smem + 1024 + (tid + 5) % 128 * 4);
    sum += y;
    warpgroup_sync(0);
  }
  st_global<u32, 1>(a + tid, &sum);"""
    )
    got = execute(body, outs=[zeros()])
    np.testing.assert_array_equal(got, (np.arange(128) + 5) % 128 * 3 + 3)


MBARRIERS = {
    "2 more cannot be counted": barrier(1) + "host_mbarrier_arrive(smem, 2, 6);",
    "deadlock: .* parity 0 of the mbarrier at byte 0": barrier(129)
    + "mbarrier_arrive(smem); mbarrier_wait(smem, 0);",
    "no mbarrier is at byte 8": barrier(1) + "if (!tid) mbarrier_arrive(smem + 8);",
    "no mbarrier is at byte 0|not ordered after mbarrier.init": "if (tid == 0) "
    "mbarrier_init(smem, 128); mbarrier_arrive(smem);",
    "an mbarrier at byte 0 already": barrier(1) + "if (!tid) mbarrier_init(smem, 1);",
    "part of an mbarrier": barrier(1) + "u32 x = 0; st_shared<u32, 1>(smem + 4, &x);",
    "mbarrier.init with 0 arrivals": barrier(0),
    "no multiple of 8": "if (!tid) mbarrier_init(smem + 4, 1);",
    "overflow the tx-count": barrier(1) + "if (!tid) mbarrier_arrive_expect_tx(smem, 1 << 20);",
    "expects more bytes": barrier(2) + "if (!tid) mbarrier_arrive_expect_tx(smem, 16);",
}


@pytest.mark.parametrize("why", MBARRIERS)
def test_mbarriers_that_are_refused(why):
    refused(why, MBARRIERS[why])


# One bulk load of 512 bytes, changed and read, and stored again by a bulk store.
BULK = {
    "init": barrier(1),
    "issue": "if (warp == 0 && elect_one()) { mbarrier_arrive_expect_tx(smem, 512);"
    " bulk_load(smem + 1024, a, 512, smem); }",
    "wait": "mbarrier_wait(smem, 0);",
    "change": "u32 x; ld_shared<u32, 1>(&x, smem + 1024 + tid * 4); x += tid;"
    " st_shared<u32, 1>(smem + 1024 + tid * 4, &x);",
    "fence": "fence_proxy_async();",
    "meet": "warpgroup_sync(0);",
    "store": "if (warp == 0 && elect_one()) { bulk_store(b, smem + 1024, 512);"
    " bulk_group_commit(); }",
    "done": "if (warp == 0 && elect_one()) bulk_group_wait_read<0>();",
    "meet again": "warpgroup_sync(0);",
    "overwrite": "x = 0; st_shared<u32, 1>(smem + 1024 + tid * 4, &x);",
}
BULK_ERRORS = {
    "wait": "was never written|not ordered after its write by an engine",
    "fence": "no proxy fence",
    "meet": "not ordered after",
    "done": "nobody waited until this bulk store|not ordered after its",
    "meet again": "not ordered after its read by an engine|read of byte",
}


def test_bulk_copies():
    data = np.arange(128, dtype=np.uint32)
    got = execute("\n".join(BULK.values()), ins=[data], outs=[zeros()], seeds=range(20))
    np.testing.assert_array_equal(got, data * 2)


@pytest.mark.parametrize("missing", BULK_ERRORS)
def test_bulk_copies_that_lack_something(missing):
    body = "\n".join(text for name, text in BULK.items() if name != missing)
    refused(BULK_ERRORS[missing], body, ins=[zeros()], outs=[zeros()])


@pytest.mark.parametrize(
    "before,after,why",
    [
        (
            "mbarrier_arrive_expect_tx(smem, 512)",
            "mbarrier_arrive_expect_tx(smem, 496)",
            "more than expected",
        ),
        (
            "mbarrier_arrive_expect_tx(smem, 512)",
            "mbarrier_arrive_expect_tx(smem, 528)",
            "deadlock: .* 16 bytes to",
        ),
        ("bulk_load(smem + 1024, a, 512", "bulk_load(smem + 1032, a, 512", "multiples of 16"),
        (
            "bulk_store(b, smem + 1024, 512)",
            "bulk_store(b + 2, smem + 1024, 496)",
            "multiples of 16",
        ),
        ("mbarrier_init_fence();", "", "no fence.mbarrier_init"),
        (
            "bulk_group_commit();",
            "",
            "that no group holds|not ordered after its read by an engine",
        ),
        ("bulk_store(b", "bulk_store((u32*)a", "a bulk store to an operand"),
    ],
)
def test_bulk_copies_that_are_wrong(before, after, why):
    body = "\n".join(BULK.values())
    assert before in body
    refused(why, body.replace(before, after), ins=[zeros()], outs=[zeros()])


# A box of rows of 64 elements of 16 bits from a tensor map, read chunk by chunk.
def tensor_map(x, box, swizzle):
    return {
        "param": 0,
        "swizzle": swizzle,
        "dim": x.shape[::-1],
        "stride": x.strides[::-1],
        "box": box,
    }


LOAD_BOX = (
    barrier(1)
    + """
  if (warp == 0 && elect_one()) {
    mbarrier_arrive_expect_tx(smem, %d);
    tma_load_2d(smem + 1024, &t0, smem, %d, %d);
  }
  mbarrier_wait(smem, 0);
  for (u32 k = tid; k < %d / 2; k += 128) {
    u16 x;
    ld_shared<u16, 1>(&x, smem + 1024 + k * 2);
    st_global<u16, 1>(b + k, &x);
  }"""
)


def load_box(x, box, swizzle, start, how=execute):
    n = box[0] * box[1]
    body = LOAD_BOX % (n * 2, *start, n * 2)
    parameters, maps = ["const u16* a", "u16* b"], [tensor_map(x, box, swizzle)]
    return how(body, [x], [np.zeros(n, np.uint16)], parameters=parameters, maps=maps)


@pytest.mark.covering(1)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("start", [(0, 0), (8, 5), (-8, -3), (56, 90)])
def test_tma_boxes(rng, swizzle, start):
    """Against NumPy: zeros outside, 16-byte chunk c of 128-byte line r at c ^ r."""
    x = rng.integers(1, 60000, (100, 72)).astype(np.uint16)
    width = (swizzle or 64) // 2
    got = load_box(x, (width, 24), swizzle, start)
    wide = np.zeros((300, 300), np.uint16)
    wide[100:200, 100:172] = x
    box = wide[100 + start[1] :, 100 + start[0] :][:24, :width].reshape(-1, 8)
    want = np.zeros_like(box)
    for chunk in range(len(box)):
        line, place = divmod(chunk, 8)
        n = max(swizzle // 16, 1)
        want[line * 8 + (place // n * n + (place % n ^ line % n))] = box[chunk]
    np.testing.assert_array_equal(got, want.reshape(-1))


@pytest.mark.parametrize(
    "shape,box,swizzle,start,why",
    [
        ((64, 68), (64, 8), 128, (0, 0), "stride 136"),
        ((64, 64), (64, 8), 64, (0, 0), "rows of the box have 128 bytes, and the swizzle 64"),
        ((64, 64), (20, 8), 0, (0, 0), "40 bytes, no multiple of 16"),
        ((64, 64), (32, 8), 0, (4, 0), "begins at element 4 of a row"),
        ((512, 64), (8, 257), 0, (0, 0), "box of 257"),
    ],
)
def test_tma_boxes_that_are_refused(shape, box, swizzle, start, why):
    load_box(np.zeros(shape, np.uint16), box, swizzle, start, lambda *a, **k: refused(why, *a, **k))


# acc = A B for A, B of 64x16 and 16x8 in SMEM with a swizzle of 32 bytes, all ones
WGMMA = {
    "fill": "u32 ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};"
    " st_shared<u32, 4>(smem + tid * 16, ones);"
    " if (tid < 16) st_shared<u32, 4>(smem + 4096 + tid * 16, ones);",
    "commit": "fence_proxy_async(); warpgroup_sync(0);",
    "start": "f32 d[4] = {1, 2, 3, 4};",
    "fence": "wgmma_fence();",
    "product": "wgmma_m64n8k16_f32_f16_kk(d, wgmma_address(smem, 16), 0xc0000010,"
    " wgmma_address(smem + 4096, 16), 0xc0000010);",
    "group": "wgmma_commit();",
    "wait": "wgmma_wait<0>();",
    "pin": "pin_f32_4(d);",
    "meet": "warpgroup_sync(0);",
    "overwrite": "ones[0] = 0; st_shared<u32, 4>(smem + (127 - tid) * 16, ones);",
    "out": "st_global<f32, 4>(a + tid * 4, d);",
}
WGMMA_ERRORS = {
    "commit": "no proxy fence|not ordered|never written",
    "fence": "no wgmma.fence",
    "group": "in flight|is used while|not ordered after its read",
    "wait": "in flight|is used while|not ordered after its read",
}


def test_wgmma():
    got = execute("\n".join(WGMMA.values()), outs=[zeros(512, np.float32)], seeds=range(10))
    np.testing.assert_array_equal(got.reshape(128, 4), [[17, 18, 19, 20]] * 128)


def test_a_wait_for_wgmma_is_for_the_whole_warpgroup():
    """What the products of all four warps read may be overwritten then, by any lane."""
    body = "\n".join(text for name, text in WGMMA.items() if name != "meet")
    got = execute(body, outs=[zeros(512, np.float32)], seeds=range(20))
    np.testing.assert_array_equal(got.reshape(128, 4), [[17, 18, 19, 20]] * 128)


@pytest.mark.parametrize("missing", WGMMA_ERRORS)
def test_wgmma_that_lacks_something(missing):
    body = "\n".join(text for name, text in WGMMA.items() if name != missing)
    refused(WGMMA_ERRORS[missing], body, outs=[zeros(512, np.float32)])


@pytest.mark.parametrize(
    "before,after,why",
    [
        ("wgmma_address(smem, 16)", "wgmma_address(smem, 16) + warp", "another warp"),
        ("wgmma_address(smem, 16)", "wgmma_address(smem, 16) + lane", "different descriptors"),
        ("wgmma_address(smem, 16)", "wgmma_address(smem + 128, 16)", "a pattern of 256 bytes"),
        ("0xc0000010", "0xc0010010", "bits that must be 0"),
        ("0xc0000010", "0xc0001010", "wgmma of bytes|never written"),
        ("0xc0000010", "0xc0000018", "never written"),
        (
            "wgmma_commit();",
            "d[0] = 5; wgmma_commit();",
            "was written while a product was in flight",
        ),
        ("wgmma_wait<0>();\npin_f32_4(d);", "pin_f32_4(d); wgmma_wait<0>();", "is used while"),
        ("wgmma_wait<0>();\npin_f32_4(d);", "", "nobody waited for this product|not ordered"),
    ],
)
def test_wgmma_that_is_wrong(before, after, why):
    body = "\n".join(WGMMA.values())
    assert before in body
    refused(why, body.replace(before, after), outs=[zeros(512, np.float32)])


def test_an_accumulator_is_poison_until_a_wait():
    """Who reads it too early gets NaN, whenever the product was carried out."""
    body = "\n".join(WGMMA.values()).replace(
        WGMMA["wait"],
        "f32 e[4] = {d[0], d[1], d[2], d[3]};st_global<f32, 4>(a + tid * 4, e); wgmma_wait<0>();",
    )
    body = body.replace(WGMMA["out"], "")
    assert np.isnan(execute(body, outs=[zeros(512, np.float32)], seeds=range(10))).all()


@pytest.mark.parametrize("name,dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_conversions_to_halves(rng, name, dtype):
    """All halves to f32; to halves: those, their neighbours, ties between them, random bits."""
    halves = np.arange(65536, dtype=np.uint16)
    exact = halves.view(dtype).astype(np.float32)
    near = exact.view(np.uint32)[:, None] + np.array([0, 1, -1, 0x1000, 0x8000, 0xFFF, 0x8001])
    x = np.concatenate([near.reshape(-1), rng.integers(0, 2**32, 65536)]).astype(np.uint32)
    x = x.view(np.float32)
    body = f"""for (u32 k = tid; k < {len(x)}; k += 128) {{
      f32 x; ld_global<f32, 1>(&x, a + k);
      u16 y = cvt_{name}(x).bits; st_global<u16, 1>(b + k, &y);
      if (k < 65536) {{ f32 z = cvt_f32({name}{{(u16)k}}); st_global<f32, 1>(c + k, &z); }}
    }}"""
    got, back = np.zeros(len(x), np.uint16), np.zeros(65536, np.float32)
    execute(body, ins=[x], outs=[got, back], seeds=[0])
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    np.testing.assert_array_equal(got.view(dtype).astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(back, exact)


# ---- what the machine found in the generator ----------------------------------------------------

X = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


def test_sibling_scopes_share_memory(run):
    """A copy into memory that plain stores of an earlier scope wrote: a proxy fence between."""

    def body(x_ref, o_ref, p_ref):
        def first(smem):
            smem[...] = x_ref[...] * 2
            o_ref[...] = smem[...]

        def second(smem, bar):
            plgpu.copy_gmem_to_smem(x_ref, smem, bar)
            plgpu.barrier_wait(bar)
            p_ref[...] = smem[...]

        tile = plgpu.SMEM((64, 64), jnp.float32)
        for _ in range(2):
            pl.run_scoped(first, tile)
            pl.run_scoped(second, tile, plgpu.Barrier())

    got = run(body, (X, X), X)
    np.testing.assert_array_equal(got[0], X * 2)
    np.testing.assert_array_equal(got[1], X)


ALIAS = """\
kernel "alias" grid [] cluster [] threads 1 stage traced {
  args %x_1: gmem float32[64,64], out(0) %o_2: gmem float32[64,64], out %p_3: gmem float32[64,64], \
out %q_4: gmem float32[64,64]
  scope {
    %s_5 = alloc_smem : smem float32[64,64]
    %full_6 = alloc_barrier {arrivals = 1} : barrier[]
    %7 = load %x_1 : float32[64,64]
    %8 = add %7, %7 : float32[64,64]
    store %o_2, %8
    copy_gmem_to_smem %x_1, %s_5, %full_6 {oob = zeros, engine = auto}
    barrier_wait %full_6
    %9 = load %s_5 : float32[64,64]
    store %p_3, %9
    %10 = load %x_1 : float32[64,64]
    %11 = const {value = 0} : int32[]
    %12 = index %o_2, %11, %11 {starts = [?, ?], sizes = [_, _]} : gmem float32[]
    %13 = const {value = 5.0} : float32[]
    store %12, %13
    store %q_4, %10
    yield
  }
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_an_output_that_is_an_operand(seed):
    """What is stored to one is loaded from the other, by lanes and by engines."""
    graph = _core.Graph.parse(ALIAS)
    graph.lower()
    assert "const f32* x_1" not in graph.cuda(line=False, catalogue=False)[0]
    x, outs = X.copy(), [np.zeros_like(X) for _ in range(3)]
    host.run(graph, [x], outs, seed)
    changed = X * 2
    for got in outs[1:]:
        np.testing.assert_array_equal(got, changed)
    changed[0, 0] = 5
    np.testing.assert_array_equal(outs[0], changed)


@pytest.mark.parametrize("other", ["0x7fc00000", "0x7f800001"])
def test_lanes_that_write_one_word(other):
    """Equal words need no order, nor do float32 NaN of several bits: results of arithmetic have
    only one on the hardware. Other words do."""
    out = [np.zeros(1, np.uint32)]
    body = """
  u32 x = lane %% 2 ? 0xffc00000u : %su;
  st_shared<u32, 1>(smem, &x);
  block_sync();
  ld_shared<u32, 1>(a, smem);"""
    got = execute(body % other, outs=out)
    assert np.isnan(got.view(np.float32)).all()
    refused("not ordered after its write", body % "0x3f800000", outs=[np.zeros(1, np.uint32)])


def test_copies_of_what_was_stored_to_gmem(run):
    """Engines read and overwrite GMEM that lanes have stored."""

    def body(x_ref, o_ref, p_ref, smem, bar):
        p_ref[...] = x_ref[...] * 2
        plgpu.copy_gmem_to_smem(p_ref, smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = jnp.zeros((64, 64), jnp.float32)
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 64), np.float32), plgpu.Barrier()]
    got = run(body, (X, X), X, scratch_types=scratch)
    np.testing.assert_array_equal(got[0], X * 2)
    np.testing.assert_array_equal(got[1], X * 2)


# ---- what other judges cannot see ----------------------------------------------------------------


def test_swizzled_tiles_are_aligned():
    """A tile that begins inside of the pattern of its swizzle."""
    text = "const u32 tile = smem + %d; // smem float16[8,64], tiled (8, 64), swizzle 128\n"
    execute(text % 1024, outs=[zeros()])
    refused("'tile' begins at byte 1152 .* multiple of 1024", text % 1152, outs=[zeros()])


def test_descriptors_take_18_bits_of_an_address():
    """Addresses have more under some seeds; products are right under all (tests of products)."""
    body = "if (tid == 0) { u32 x = smem >> 18; st_global<u32, 1>(a, &x); }"
    seen = set()
    for seed in range(16):
        got = zeros(1)
        text, info = program(body, ["u32* a"], [got])
        host.run_program(text, info, [], [got], seed)
        seen.add(int(got[0]))
    assert len(seen) == 2


GRID = {"grid": (6, 1, 1)}


def test_clusters_are_in_no_order():
    """One after the other or at once: a byte that two of them change, or that one reads."""
    block = "u32 x = blockIdx.x, y; if (tid == 0) "
    refused("its write by", block + "st_global<u32, 1>(a, &x);", outs=[zeros()], **GRID)
    body = block + "{ st_global<u32, 1>(a + x, &x); ld_global<u32, 1>(&y, a + 5 - x); }"
    refused("its (write|read) by|never written", body, outs=[zeros()], **GRID)
    same = "u32 x = 7; if (tid == 0) st_global<u32, 1>(a, &x);"
    assert execute(same, outs=[zeros(1)], **GRID) == 7
    add = "if (tid == 0) red_add_u32_global(b, 1u);"
    total = zeros(1)
    text, info = program(add, ["u32* b"], [total], **GRID)
    info["params"] = [("uint32", (1,), 256, -1)]
    with pytest.raises(host.HostError, match="never written"):
        host.run_program(text, info, [], [total])


def test_clusters_overlap_in_time():
    """Blocks spin until others have begun: some seeds run enough of them at once."""
    body = "if (tid == 0) { atom_add_u32_global((u32*)a, 1u); %s }"
    spin = "u32 y; int n = 0; do { y = *(volatile u32*)a; host_yield_poll(); }"
    spin += " while (y < 2 && ++n < 200);"
    spin += ' if (blockIdx.x == 0 && y < 2) host_fail(1, "alone");'
    ends = []
    for seed in range(12):
        count = zeros(1)
        text, info = program(body % spin, ["u32* a"], [count], grid=(2, 1, 1))
        try:
            host.run_bytes(text, info, [count.view(np.uint8)], 0, seed, written=True)
            ends.append("together")
        except host.HostError as e:
            assert "alone" in str(e)
            ends.append("alone")
    assert set(ends) == {"together", "alone"}


@pytest.mark.parametrize("access", ["ld_global<u32, 1>(&x, a);", "st_global<u32, 1>(b, &x);"])
def test_launches_that_overlap(access):
    """Memory is touched after griddepcontrol.wait, or after a thread that waited."""
    x = np.ones(1, np.uint32)
    body = "u32 x = 3; %s if (tid == 0) { " + access + " }"
    options = dict(ins=[x], outs=[zeros(1)], pdl=True)
    refused("before griddepcontrol.wait", body % "", **options)
    execute(body % "griddepcontrol_wait();", **options)
    execute(body % "if (tid == 70) griddepcontrol_wait(); warpgroup_sync(0);", **options)
    refused("before griddepcontrol.wait", body % "if (tid == 70) griddepcontrol_wait();", **options)
