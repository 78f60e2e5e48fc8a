"""What kernels issue besides products, against records of what a compiler proven on the GPU emits:
loads and stores of tensor memory with the register of every element, copies from shared memory,
commits, allocation, barriers, cluster launch control, TMA copies of pairs and of rows by number.

The generated program is run lane by lane, without data (lanes.py); test_encodings.py compares the
products. Differences that are accepted stand where they are made equal, with the reason."""

import re

import lanes
import ml_dtypes
import numpy as np
import pytest
from test_encodings import FIXED_BITS, records

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

L, T = plgpu.Layout, plgpu.TMEMLayout
NP = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "i8": np.int8,
    "u2": ml_dtypes.uint2,
}
BITS = {"e2m1": 4, "u2": 2}
NO_OUT = plgpu.ShapeDtypeStruct((128,), np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:.*(registers a lane|nothing writes output)")


def bits(dtype):
    return BITS.get(dtype) or np.dtype(NP[dtype]).itemsize * 8


def struct(shape, dtype):
    return plgpu.ShapeDtypeStruct(tuple(shape), NP[dtype])


def swizzled(swizzle, dtype):
    tiling = plgpu.TilingTransform((8, 8 * (swizzle or 16) // bits(dtype)))
    return (tiling, plgpu.SwizzleTransform(swizzle)) if swizzle > 16 else (tiling,)


class Program:
    """A lowered kernel; `issued(tid, rank)`: (instruction, operands) of a lane."""

    def __init__(self, body, scratch, args=(), out=NO_OUT, cluster=1, target="sm_100a", **options):
        if cluster > 1:
            options |= dict(cluster=(cluster,), cluster_names=("c",))
        kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)
        self.lowered = kernel.lower(*args, target=target)
        self.text = lanes.statements(self.lowered)
        self.blocks = cluster
        self.of = lanes.instructions(self.text)

    def events(self, tid, rank=0, **how):
        return lanes.Lane(self.text, tid, rank, self.blocks, **how).run()

    def issued(self, tid, rank=0, **how):
        found = []
        for e in self.events(tid, rank, **how):
            name = self.of.get((e.name, e.template)) or self.of.get((e.name, ""))
            found.append((name and name.text or e.name, e.args))
        return found


def of_kind(issued, *starts):
    return [x for x in issued if x[0].startswith(starts)]


def number(text):
    """ "smem+0x20", "tmem+64", "enc(smem+32)": what is added to the name."""
    inside = re.sub(r"enc\((.*)\)", r"\1", text)
    return sum(int(x, 0) for x in inside.split("+") if not x.startswith(("smem", "tmem")))


def ptx_of(record, *starts):
    return [x for x in record["issued"] if x.get("ptx", "").startswith(starts)]


# ---- between registers and tensor memory ---------------------------------------------------------


def layout_of(case):
    p, columns = case.get("packing", 1), case.get("size") or case.get("cols", 128)
    name = case["regs"]
    if name == "SELF" and case.get("rows", 128) == 64:
        return L.TCGEN05_M64_COLLECTIVE_NATIVE(columns, p)
    if name == "SELF":
        return None if case.get("tmem") else L.TCGEN05_TMEM_NATIVE(p)
    if name.startswith("NATIVE"):
        return L.TCGEN05_TMEM_NATIVE(int(name[6:]))
    if name == "M64C":
        return L.TCGEN05_M64_COLLECTIVE(columns)
    return {"TCGEN05": L.TCGEN05, "WGMMA": L.WGMMA}[name]


def move(case, store):
    rows, columns, dtype = case.get("rows", 128), case.get("cols", 128), case.get("dtype", "f32")
    if dtype == "i32" and case.get("signed") is False:
        dtype = "u32"
    start, size = case.get("start", 0), case.get("size") or columns
    layout, reduce, how = layout_of(case), case.get("reduce"), {}
    if case.get("tmem"):
        how["layout"] = T.SCALES_LAYOUT
    elif bits(dtype) < 32:
        how["packed"] = case.get("packing", 1) > 1

    def load(x, o, t):
        part = t.at[:, pl.ds(start, size)]
        if reduce:
            _, o[...] = plgpu.async_load_tmem(part, layout=layout, reduce=reduce)
        else:
            value = plgpu.async_load_tmem(part, layout=layout)
            o[...] = lax.optimization_barrier(value)  # whole: no loop over columns

    def put(x, o, t):
        value = plgpu.load(x, layout=layout, optimized=False)
        plgpu.async_store_tmem(t.at[:, pl.ds(start, size)], value)

    pair = case.get("collective", False)
    x = struct((rows, size), dtype)
    out = struct((rows,), dtype) if reduce else x
    scratch = [plgpu.TMEM((rows, columns), NP[dtype], collective=pair, **how)]
    return Program(put if store else load, scratch, (x,), out, 1 + pair, "sm_103a")


# A ref of 64 rows of a block alone: the records have it in the layout of the ref itself, two
# columns of the product in a lane, which has no name in the language; WGMMA is its default here.
# 256 rows of scales of pairs: there a store writes other lanes than those that the copy to them
# fills (cp.64x128b.warpx2::01_23: rows 0 to 31 of each 64 to lanes 0 to 63); here they cannot be
# loaded or stored.
LEFT_OUT = {
    *("tmem_ld-069", "tmem_st-069"),
    *("tmem_ld-091", "tmem_st-091", "tmem_ld-093", "tmem_st-093", "tmem_ld-095", "tmem_st-095"),
}


def words_of(record):
    """[instruction, register] of each word, or of each register of each instruction the word."""
    moved = record.get("reg_map")
    if record["kind"] == "tmem_ld":
        return moved and [tuple(w) for register in moved for w in register]
    return moved


@pytest.mark.parametrize(
    "record",
    [r for r in records("tmem_ld", "tmem_st") if r["id"] not in LEFT_OUT],
    ids=lambda r: r["id"],
)
def test_moves(record):
    """The instructions, their columns and lanes, and which register holds which element. A warp's
    quarter of the lanes is part of its address here: the PTX ISA (9.7.16.8.1, access restrictions)
    gives warp w lanes 32 w to 32 w + 31; the records leave it out."""
    store = record["kind"] == "tmem_st"
    p = move(record["in"], store)
    names = ("tcgen05.st", "tcgen05.ld")[not store]
    want = [
        (x["ptx"].split()[0], x["regs"], number(x["addr"]))
        for x in ptx_of(record, names)
    ]  # fmt: skip
    calls = [e for e in p.events(0) if re.match("tmem_(load|store)", e.name)]
    registers = [p.of[e.name, ""].registers for e in calls]
    have = [
        (p.of[e.name, ""].text, len(r), e.args[-1]) for e, r in zip(calls, registers, strict=True)
    ]
    assert have == want
    of_warp = [e.args[-1] for e in p.events(96) if re.match("tmem_(load|store)", e.name)]
    assert of_warp == [at + (3 << 21) for _, _, at in want]
    words = {}
    for i, (e, r) in enumerate(zip(calls, registers, strict=True)):
        words |= {e.args[0].first + word: (i, k) for k, word in enumerate(r)}
    found = [words[k] for k in range(len(words))]
    # the words of 256 rows of scales are numbered rows first here, columns first there
    expected = None if record["in"].get("rows") == 256 else words_of(record)
    if expected and store:
        place = {}
        for i, instruction in enumerate(expected):
            for k, word in enumerate(instruction):
                place[tuple(word) if isinstance(word, list) else (word, 0)] = (i, k)
        expected = [place[k] for k in sorted(place)]
    assert not expected or found == expected


# 64 rows without a layout: there the form of the ref itself, here WGMMA or TCGEN05_M64_COLLECTIVE.
FORM_OF_THE_REF = {"tmem_pair-007", "tmem_pair-008", "tmem_pair-009", "tmem_pair-010"}


@pytest.mark.parametrize(
    "record",
    [r for r in records("tmem_pair") if r["id"] not in FORM_OF_THE_REF],
    ids=lambda r: r["id"],
)
def test_loads_that_are_stored_back(record):
    c = record["in"]
    rows, columns, dtype = c.get("rows", 128), c.get("cols", 128), c.get("dtype", "f32")
    pair, name, how = c.get("collective", False), c.get("layout"), {}
    layout = name and layout_of({"regs": name, "cols": columns})
    if c.get("tmem"):
        how["layout"] = T.SCALES_LAYOUT
    elif bits(dtype) < 32:
        how["packed"] = c.get("packed", False)

    def body(o, t):
        x = plgpu.async_load_tmem(t, layout=layout)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(t, x)
        plgpu.commit_tmem()

    tmem = plgpu.TMEM((rows, columns), NP[dtype], collective=pair, **how)
    p = Program(body, [tmem], cluster=1 + pair)
    kinds = ("tcgen05.ld", "tcgen05.st", "tcgen05.wait")
    want = [
        (x["ptx"].split()[0].rstrip(";"), number(x["addr"]) if "addr" in x else None)
        for x in ptx_of(record, *kinds)
    ]
    have = [(x, a[-1] if a else None) for x, a in of_kind(p.issued(0), *kinds)]
    assert without_own_waits(have) == want


def without_own_waits(issued):
    """Each load waits for its registers before they are used; there they are used without."""
    return [x for k, x in enumerate(issued) if x != issued[k - 1] or "wait" not in x[0]]


# ---- copies to tensor memory, commits, allocation ------------------------------------------------


def axis_of(pair):
    return "c" if pair else None


def scales_copy(case):
    pair, folded, kb = case.get("collective", False), case.get("m64", False), case.get("kb", 4)
    mn, dtype = case.get("mn", 128), NP[case.get("dtype", "e8m0")]
    shape = (1, kb // 4, 64, 16) if folded else (mn // 128, kb // 4, 32, 16)
    layout = T.SCALES_M64_COLLECTIVE_LAYOUT if folded else T.SCALES_LAYOUT

    def body(o, s, t, bar):
        plgpu.async_copy_scales_to_tmem(s, t, collective_axis=axis_of(pair))
        plgpu.tcgen05_commit_arrive(bar, collective_axis=axis_of(pair))

    tmem = plgpu.TMEM((256 if folded else mn, kb), dtype, layout=layout, collective=pair)
    scratch = [plgpu.SMEM(shape, dtype), tmem, plgpu.Barrier(orders_tensor_core=True)]
    return Program(body, scratch, cluster=1 + pair)


def metadata_copy(case):
    pair, columns = case.get("collective", False), case.get("cols", 64)

    def body(o, s, t, bar):
        plgpu.async_copy_sparse_metadata_to_tmem(s, t, collective_axis=axis_of(pair))
        plgpu.tcgen05_commit_arrive(bar, collective_axis=axis_of(pair))

    layout = T.SPARSE_METADATA_LAYOUT
    tmem = plgpu.TMEM((128, columns), NP["u2"], layout=layout, collective=pair)
    smem = plgpu.SMEM((1, columns // 64, 128, 64), NP["u2"])
    return Program(
        body, [smem, tmem, plgpu.Barrier(orders_tensor_core=True)], cluster=1 + pair
    )  # fmt: skip


def plain_copy(case):
    pair, columns = case.get("collective", False), case.get("cols", 128)
    name = case.get("dtype", "f16")

    def body(o, s, t, bar):
        plgpu.async_copy_smem_to_tmem(s, t, collective_axis=axis_of(pair))
        plgpu.tcgen05_commit_arrive(bar, collective_axis=axis_of(pair))

    how = {} if bits(name) == 32 else {"packed": True}
    smem = plgpu.SMEM(
        (128, columns), NP[name], transforms=swizzled(case.get("swizzle", 128), name)
    )  # fmt: skip
    tmem = plgpu.TMEM((128, columns), NP[name], collective=pair, **how)
    return Program(
        body, [smem, tmem, plgpu.Barrier(orders_tensor_core=True)], cluster=1 + pair
    )  # fmt: skip


COPIES = {"cp_scales": scales_copy, "cp_sparse": metadata_copy, "cp_plain": plain_copy}


def moved_atom(case, static, offset):
    """Chunks of 128 rows of a swizzle lie one after the other here; the records have tiles of 8
    rows row by row. So groups of 8 rows are 8 swizzles apart, and a chunk 128 of them."""
    atom = 8 * case.get("swizzle", 128)
    static = static & ~(0x3FFF << 32) | (atom >> 4) << 32
    return static, offset // atom * 16 * atom + offset % atom


@pytest.mark.parametrize("record", records(*COPIES), ids=lambda r: r["id"])
def test_copies_to_tensor_memory(record):
    case, want = record["in"], []
    for x in ptx_of(record, "tcgen05.cp"):
        m = re.match(r"\(enc\((.*)\) \| (0x\w+)\)$", x["smem_desc"])
        static, offset = int(m[2], 16), number(m[1])
        if record["kind"] == "cp_plain":
            static, offset = moved_atom(case, static, offset)
        name, at = re.match(r"(\S+) \[(.*?)\]", x["ptx"]).groups()
        want.append((name, number(at), static | FIXED_BITS, offset))
    p, have = COPIES[record["kind"]](case), []
    for name, (tmem, low, high) in of_kind(p.issued(0), "tcgen05.cp"):
        have.append((name, tmem, high << 32 | low & ~0x3FFF, (low & 0x3FFF) << 4))
    assert have == want
    assert_commit(p, record)
    for tid in (1, 32):
        assert not of_kind(p.issued(tid), "tcgen05.cp", "tcgen05.commit")
    if case.get("collective"):
        assert not of_kind(p.issued(0, rank=1), "tcgen05.cp", "tcgen05.commit")


def assert_commit(p, record, tid=0):
    (x,) = ptx_of(record, "tcgen05.commit")
    name, _, mask = re.match(r"(\S+) \[(.*?)\](?:, (\d+))?", x["ptx"]).groups()
    ((have, operands),) = of_kind(p.issued(tid), "tcgen05.commit")
    assert have == name and operands[1:] == ((int(mask),) if mask else ())
    return operands[0]


@pytest.mark.parametrize("record", records("commit"), ids=lambda r: r["id"])
def test_commits(record):
    c = record["in"]
    pair, n, index = c.get("collective", False), c.get("num_barriers", 1), c.get("index", 0)
    warp = 1 if c.get("warp") else 0

    def body(o, t, bar):
        b = bar.at[index] if n > 1 else bar

        def go():
            plgpu.tcgen05_commit_arrive(b, collective_axis=axis_of(pair))

        if c.get("warp"):

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                pl.when(lax.axis_index("warp") == 1)(go)
        else:
            go()
        plgpu.barrier_wait(b)

    tmem = plgpu.TMEM((128, 128), np.float32, collective=pair)
    bar = plgpu.Barrier(num_barriers=n, orders_tensor_core=True)
    p = Program(body, [tmem, bar], cluster=1 + pair)
    at = assert_commit(p, record, 32 * warp)
    waits = of_kind(p.issued(0), "mbarrier.try_wait", "mbarrier_wait")
    assert [w[1][0] for w in waits] == [at]
    inits = of_kind(p.issued(0), "mbarrier.init")
    want = ptx_of(record, "@[THREAD0_OF_BLOCK] mbarrier.init")
    assert [x[1][1] for x in inits] == [int(x["ptx"].split(",")[1].strip("; ")) for x in want]
    assert at == inits[index][1][0]
    names = [x[0] for x in p.issued(0)]
    assert names.index(waits[0][0]) + 1 == names.index("tcgen05.fence::after_thread_sync")


# alloc-018: pairs in a cluster of four along one axis, which the records refuse to commit for
@pytest.mark.parametrize(
    "record", [r for r in records("alloc") if r["id"] != "alloc-018"], ids=lambda r: r["id"]
)
def test_allocations(record):
    """The columns of all refs together, a power of two, by one warp of each block."""
    c = record["in"]
    pair = c.get("collective", False)
    refs = c.get("refs", [[128, 128, "f32", None]])

    def body(o, *tmem):
        for t in tmem:
            plgpu.async_store_tmem(t, plgpu.async_load_tmem(t))
            plgpu.commit_tmem()

    scratch = [
        plgpu.TMEM((r, n), NP[d], collective=pair, **({} if packed is None else {"packed": packed}))
        for r, n, d, packed in refs
    ]
    threads = {}
    if c.get("num_threads"):
        threads = dict(num_threads=c["num_threads"], thread_name="wg")
    p = Program(body, scratch, cluster=c.get("cluster") or 1 + pair, **threads)
    kinds = ("tcgen05.alloc", "tcgen05.relinquish", "tcgen05.dealloc")
    want = [
        (x["ptx"].split()[0].rstrip(";"), [int(n) for n in re.findall(r", (\d+);", x["ptx"])])
        for x in ptx_of(record, *kinds)
    ]
    have = [(name, list(operands[1:])) for name, operands in of_kind(p.issued(5), *kinds)]
    assert have == want
    assert not of_kind(p.issued(32), *kinds)
    if c.get("num_threads"):
        assert not of_kind(p.issued(128), *kinds)


# ---- barriers ------------------------------------------------------------------------------------


def arrivals_of(record):
    """Blocks that an arrival of one thread reaches; count of the barrier."""
    text = [x for x in record["issued"] if "mbarrier.arrive" in x["ptx"]][-1]
    mask = None
    if "mapa" in text["ptx"]:
        which = text["in"][0]
        mask = re.search(r"& (\w+)\) != 0", which) or re.search(r"\((\w+) & \(1 <<", which)
    (init,) = ptx_of(record, "@[THREAD0_OF_BLOCK] mbarrier.init")
    count = int(init["ptx"].split(",")[1].strip("; "))
    return int(mask[1], 0) if mask else None, count if count < 128 else count // 128


@pytest.mark.parametrize("record", records("barrier"), ids=lambda r: r["id"])
def test_barriers(record):
    """Counts; which blocks an arrival reaches, by how many lanes; fences of the tensor core before
    the lanes meet for the arrival and right after each wait. Where the tensor core is not ordered,
    each lane arrives there, and one for all here."""
    c = record["in"]
    blocks = c.get("cluster", 2) if c.get("kind") == "cluster" else 1
    n, tensor = c.get("num_arrivals", 1), c["orders_tensor_core"]
    if blocks == 1:
        bar = plgpu.Barrier(num_arrivals=n, orders_tensor_core=tensor)
    else:
        bar = plgpu.ClusterBarrier(
            collective_axes=("c",), num_arrivals=n, orders_tensor_core=tensor,
            **({"leader_tracked": True} if c.get("leader_tracked") else {}),
        )  # fmt: skip

    def body(o, b):
        if c.get("warp"):

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                pl.when(lax.axis_index("warp") == 0)(lambda: plgpu.barrier_arrive(b))
                pl.when(lax.axis_index("warp") == 1)(lambda: plgpu.barrier_wait(b))
        else:
            plgpu.barrier_arrive(b)
            plgpu.barrier_wait(b)

    p = Program(body, [bar], cluster=blocks)
    mask, count = arrivals_of(record)
    inits = [e for e in p.events(0) if e.name == "mbarrier_init"]
    assert [e.args[1] for e in inits] == [count]
    reached = []
    for tid in range(128):
        for e in p.events(tid):
            if e.name.startswith("mbarrier_arrive"):
                reached.append(None if blocks == 1 else e.args[1])
    assert reached == ([None] if mask is None else [k for k in range(blocks) if mask >> k & 1])
    names = [e.name for tid in (0, 32) for e in [*p.events(tid), lanes.END]]
    first = next(k for k, x in enumerate(names) if x.startswith("mbarrier_arrive"))
    assert tensor == ("tcgen05_fence_before" in names[:first])
    if tensor:
        meet = names.index("tcgen05_fence_before") + 1
        assert names[meet] in ("warpgroup_sync", "warp_sync") and meet < first
    after = [names[k + 1] for k, x in enumerate(names) if x.startswith("mbarrier_wait")]
    assert all((x == "tcgen05_fence_after") == tensor for x in after) and after


# ---- cluster launch control ----------------------------------------------------------------------


@pytest.mark.parametrize("record", records("cancel"), ids=lambda r: r["id"])
def test_cluster_launch_control(record):
    """One request by the first block of a cluster; each block expects 16 bytes of it, and one
    arrival of each of its threads (there: of each lane)."""
    c = record["in"]
    blocks, threads, slots = c.get("cluster", 1), c.get("num_threads", 1), c.get("slots", 1)
    grid = tuple(c.get("grid", (4, 8)))
    axes = tuple(f"g{k}" for k in range(len(grid)))

    def body(o, result, bar):
        r = result.at[slots - 1] if slots > 1 else result
        plgpu.try_cluster_cancel(r, bar)
        plgpu.barrier_wait(bar)
        index, ok = plgpu.query_cluster_cancel(r, axes)

        @pl.when(ok)
        def _():
            o[index[0]] = np.float32(1)

    result = plgpu.TryClusterCancelResult(slots if slots > 1 else None)
    of_threads = dict(num_threads=threads, thread_name="wg") if threads > 1 else {}
    p = Program(
        body, [result, plgpu.Barrier(num_arrivals=threads)], cluster=blocks, grid=grid,
        grid_names=axes, **of_threads,
    )  # fmt: skip
    requests = [x for x in record["issued"] if "try_cancel" in x["ptx"]]
    (want,) = {x["ptx"].split()[1] for x in requests}
    for rank in range(blocks):
        asked, bytes_, arrivals = [], 0, 0
        for tid in range(128 * threads):
            for e in p.events(tid, rank, responses=[None]):
                if e.name == "try_cancel":
                    asked.append(tid)
                    assert p.of[e.name, ""].text == want
                    # the first result is at a multiple of 16; slots are 16 bytes
                    assert e.args[0] % 16 == 0 and e.args[0] // 16 % slots == slots - 1
                if e.name.startswith("mbarrier_arrive"):
                    arrivals += 1
                    bytes_ += e.args[1] if e.name.endswith("expect_tx") else 0
                if e.name == "mbarrier_init":
                    count = e.args[1]
        assert asked == ([0] if rank == 0 else [])
        assert bytes_ == 16 and arrivals == count == threads
    (init,) = ptx_of(record, "@[THREAD0_OF_BLOCK] mbarrier.init")
    assert int(init["ptx"].split(",")[1].strip("; ")) == 128 * threads
    text = p.of["query_cancel", ""].whole
    (query,) = {x["ptx"] for x in record["issued"] if "query_cancel" in x["ptx"]}
    for word in re.findall(r"clusterlaunchcontrol[\w.:]+", query):
        assert word in text
    assert "ld.shared.b128" in text and "ld.shared.b128" in query


# ---- TMA -----------------------------------------------------------------------------------------


def expected_bytes(record):
    """What the barrier expects: there each of 128 lanes expects its share."""
    return sum(
        128 * int(x["ptx"].split(",")[-1].strip("; "))
        for x in record["issued"]
        if "mbarrier.arrive.expect_tx" in x.get("ptx", "")
    )


@pytest.mark.parametrize("record", [r for r in records("copy")], ids=lambda r: r["id"])
def test_copies_of_pairs(record):
    """Instruction, mask, which block's barrier counts, bytes expected and by which blocks."""
    c = record["in"]
    shape, dtype = list(c.get("shape", (64, 64))), c.get("dtype", "f16")
    part, axis = c.get("partition"), c.get("axis", 0)
    many = c.get("collective") or part
    blocks = c.get("cluster", 2) if many else 1
    source = list(shape)
    if part == "PARTITIONED":
        source[axis] *= 2
    how = {"collective_axes": "c"} if many else {}
    if part:
        partition = plgpu.CopyPartition
        how["leader_tracked"] = (
            partition.PARTITIONED(axis) if part == "PARTITIONED" else partition.REPLICATED
        )

    def body(x, o, s, bar):
        if c.get("prefetch"):
            plgpu.async_prefetch(x, **how)
        plgpu.copy_gmem_to_smem(x, s, bar, **how)
        if not part:
            plgpu.barrier_wait(bar)
        else:
            pl.when(lax.axis_index("c") == 0)(lambda: plgpu.barrier_wait(bar))

    swizzle = c.get("swizzle", 128)
    plain = not swizzle and not many  # 8 KiB that lie together: no tensor map is needed
    transforms = swizzled(swizzle, dtype) if swizzle else ()
    scratch = [plgpu.SMEM(tuple(shape), NP[dtype], transforms=transforms), plgpu.Barrier()]
    p = Program(body, scratch, [struct(source, dtype)], cluster=blocks)
    copies = [x for x in record["issued"] if "cp.async.bulk.tensor" in x["ptx"]]
    words = [set(re.findall(r"\.(multicast::cluster|cta_group::2)", x["ptx"])) for x in copies]
    total = expected_bytes(record)
    for rank in range(blocks):
        issued = p.issued(0, rank)
        have = of_kind(issued, "cp.async.bulk." if plain else "cp.async.bulk.tensor")
        assert not of_kind(p.issued(1, rank), "cp.async.bulk")
        got = [set(re.findall(r"\.(multicast::cluster|cta_group::2)", x)) for x, _ in have]
        assert got == words
        waits = rank == 0 or not part
        bytes_ = sum(a[1] for n, a in issued if "expect_tx" in n)
        assert bytes_ == (total if waits else 0)
        for (name, operands), x in zip(have, copies, strict=True):
            if "prefetch" in name:
                continue
            if part:  # the barrier of the first block
                assert "mapa.shared::cluster.u32 mapped_addr, $3, 0;" in x["ptx"]
                assert 0 <= operands[2] + rank * lanes.PEER < lanes.PEER
            if "multicast" in name:
                mask = int(x["in"][-1] if "in" in x else re.findall(r"\], (\d+);", x["ptx"])[-1])
                assert operands[3] == mask == (1 << blocks) - 1


@pytest.mark.parametrize("record", records("gather"), ids=lambda r: r["id"])
def test_rows_by_number(record):
    """Instruction, lanes that issue, where each four rows go, bytes."""
    c = record["in"]
    n, columns, dtype = c.get("n", 64), c.get("cols", 64), c.get("dtype", "f16")
    swizzle, scatter = c.get("swizzle", 128), c.get("scatter", False)
    layout = getattr(L, c.get("layout", "TMA_INDICES"))

    def body(x, i, o, s, bar):
        rows = plgpu.load(i, layout=layout, optimized=False)
        if scatter:
            plgpu.copy_smem_to_gmem(s, o.at[rows])
            plgpu.wait_smem_to_gmem(0)
        else:
            plgpu.copy_gmem_to_smem(x.at[rows], s, bar)
            plgpu.barrier_wait(bar)

    transforms = swizzled(swizzle, dtype) if swizzle else ()
    scratch = [plgpu.SMEM((n, columns), NP[dtype], transforms=transforms), plgpu.Barrier()]
    whole = struct((512, columns), dtype)
    p = Program(body, scratch, [whole, struct((n,), "u32")], whole)
    want = [x for x in record["issued"] if re.search("(gather|scatter)4", x.get("ptx", ""))]
    (name,) = {re.search(r"cp\.async\S+", x["ptx"])[0] for x in want}
    chunk = (swizzle or columns * bits(dtype) // 8) * 8 // bits(dtype)
    chunk_bytes, chunks = chunk * bits(dtype) // 8, -(-columns // chunk)
    issuers, places = [], []
    for tid in range(128):
        have = of_kind(p.issued(tid), "cp.async.bulk.tensor")
        assert all(x == name for x, _ in have)
        issuers += [tid] if have else []
        places += [(o[1], o[2]) if scatter else (o[0], o[3]) for _, o in have]
    # one lane where each lane has all numbers; else one of each warp, and four numbers of each 16
    of_warps = n >= 16
    assert issuers == [0, 32, 64, 96][: 4 if of_warps else 1]
    assert len(places) == len(want) * (4 if want[0]["in"][0] == "elect" else 1)
    assert sorted(places) == sorted(
        ((row + k * n) * chunk_bytes, k * chunk) for row in range(0, n, 4) for k in range(chunks)
    )
    if of_warps:
        rows = [(o[1] if scatter else o[0]) for x, o in of_kind(p.issued(64), "cp.async.bulk.t")]
        assert {at // chunk_bytes % n % 16 for at in rows} == {8}
    if not scatter:
        have = sum(a[1] for x, a in p.issued(0) if "expect_tx" in x)
        assert expected_bytes(record) == have == n * columns * bits(dtype) // 8


# ---- whole kernels -------------------------------------------------------------------------------


def whole(case):
    """A product of one tile: copies, tcgen05_mma, result."""
    m, n, k = (case.get(x, 128) for x in "mnk")
    dtype, pair = case.get("dtype", "f16"), case.get("collective", False)
    how = {"collective_axes": "c"} if pair else {}
    parts = plgpu.CopyPartition.PARTITIONED
    a_how, b_how = (how | ({"leader_tracked": parts(x)} if pair else {}) for x in (0, 1))

    def body(a, b, o, acc, a_smem, b_smem, o_smem, full, done):
        rank = lax.axis_index("c") if pair else 0
        plgpu.copy_gmem_to_smem(a, a_smem, full, **a_how)
        plgpu.copy_gmem_to_smem(b, b_smem, full, **b_how)
        if pair:
            pl.when(rank == 0)(lambda: plgpu.barrier_wait(full))
        else:
            plgpu.barrier_wait(full)
        axis = axis_of(pair)
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False, collective_axis=axis)
        plgpu.barrier_wait(done)
        o_smem[...] = plgpu.async_load_tmem(acc).astype(NP[dtype])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o.at[pl.ds(rank * m, m)] if pair else o)
        plgpu.wait_smem_to_gmem(0)

    blocks = 1 + pair
    form = swizzled(128, dtype)
    scratch = [
        plgpu.TMEM((m, n * blocks), np.float32, collective=pair),
        plgpu.SMEM((m, k), NP[dtype], transforms=form),
        plgpu.SMEM((k, n), NP[dtype], transforms=form),
        plgpu.SMEM((m, n * blocks), NP[dtype], transforms=form),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    args = [struct((m * blocks, k), dtype), struct((k, n * blocks), dtype)]
    return Program(body, scratch, args, struct((m * blocks, n * blocks), dtype), blocks)


STAGES = [  # what a lane does, in the words that both are reduced to
    (r"mbarrier.*wait", "wait"),
    (r"mbarrier.arrive.expect_tx", "expect"),
    (r"cp.async.bulk.tensor.\dd.shared", "copy"),
    (r"cp.async.bulk.tensor.\dd.global", "result"),
    (r"tcgen05.mma", "product"),
    (r"tcgen05.commit", "commit"),
    (r"tcgen05.fence::after", "fence"),
    (r"fence.*proxy.async", "proxy fence"),
    (r"tcgen05.ld", "load"),
]


def reduced(steps):
    """(name, mask) of the stages, neighbours of one kind as one. Bytes are expected once for all
    copies of a barrier here, and before each there: "expect" is left to test_copies_of_pairs."""
    out = []
    for name, mask in steps:
        stage = next((s for pattern, s in STAGES if re.search(pattern, name)), None)
        if stage not in (None, "expect") and (not out or out[-1] != (stage, mask)):
            out.append((stage, mask))
    return out


@pytest.mark.parametrize("record", records("full"), ids=lambda r: r["id"])
def test_whole_kernels(record):
    """The same stages in the same order in each block, with the same masks; products as many."""
    c = record["in"]
    p = whole(c)
    for rank in range(p.blocks):
        theirs = []
        for x in record["issued"]:
            conditions = " ".join(x.get("pred", []))
            if "ptx" not in x or rank and "(cluster_ctaid.x == 0)" in conditions:
                continue
            mask = re.search(r"multicast::cluster\S* \[.*\], (\d+);", x["ptx"])
            theirs.append((x["ptx"], mask and int(mask[1])))
        issued = p.issued(0, rank)
        ours = [
            (name, a[1] if "commit" in name and "multicast" in name else None) for name, a in issued
        ]
        assert reduced(ours) == reduced(theirs)
        (product,) = [x for x in record["issued"] if "rows" in x]
        n = len(of_kind(issued, "tcgen05.mma"))
        assert n == (0 if rank and p.blocks == 2 else len(product["rows"]))
