"""The text form of graphs, the passes seen through it, and the generated CUDA text."""

import functools
import random
import re
import runpy
import typing

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._matmul import matmul_kernel

ADD_ONE = """\
kernel "add_one" grid [2] cluster [] threads 1 stage traced {
  args %x_ref_1: gmem float32[2,128], out %o_ref_2: gmem float32[2,128]
  %i_3 = axis {axis = grid, dim = 0} : int32[]
  %4 = index %x_ref_1, %i_3 {starts = [?, 0], sizes = [_, 128]} : gmem float32[128]
  %x_5 = load %4 {optimized = 1} : float32[128]
  %6 = const {value = 1.0} : float32[]
  %7 = add %x_5, %6 : float32[128]
  %8 = index %o_ref_2, %i_3 {starts = [?, 0], sizes = [_, 128]} : gmem float32[128]
  store %8, %7
}
"""


def add_one(x_ref, o_ref):
    i = lax.axis_index("g")
    x = x_ref[i]
    o_ref[i] = x + 1


def kernels():
    """Some kernels that use every kind of op, with arguments."""
    x = np.zeros((2, 128), np.float32)
    yield "add_one", plgpu.kernel(add_one, out_type=x, grid=(2,), grid_names=("g",)), (x,)
    half = np.zeros((256, 256), np.float16)
    yield "matmul", matmul_kernel(256, 256, 256, np.float16), (half, half)

    def mixed(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, smem, bar)
        plgpu.barrier_wait(bar)
        v = plgpu.layout_cast(smem[...], plgpu.Layout.WGMMA)
        r = jnp.sum(v, axis=1)
        v = v - lax.broadcast_in_dim(r, v.shape, [0])
        n = lax.while_loop(lambda c: c < 10, lambda c: c * 2 + 1, jnp.int32(1))
        v = lax.fori_loop(0, n, lambda i, c: jnp.where(c > 0, c * 0.5, -c), v)
        s = lax.switch(n, [lambda: 1.0, lambda: 2.0, lambda: 3.0])
        pl.debug_print('n {} "quoted" s {}', n, s)
        o_ref[...] = (v + s).astype(jnp.bfloat16)[0:64, 0:32].astype(jnp.float32)

    y = np.zeros((100, 64), np.float32)
    kernel = plgpu.kernel(
        mixed,
        out_type=np.zeros((64, 32), np.float32),
        scratch_types=[plgpu.SMEM(y.shape, y.dtype), plgpu.Barrier()],
    )
    yield "mixed", kernel, (y,)

    def tensor(x_ref, o_ref, m_ref, acc, weights, scale, pattern, f, x, s, p, done):
        mma = plgpu.tcgen05_mma
        plgpu.async_store_tmem(weights, x_ref[...])
        plgpu.commit_tmem()
        plgpu.async_copy_scales_to_tmem(s, scale)
        plgpu.async_copy_sparse_metadata_to_tmem(p, pattern)
        mma(acc.at[0], f, f.T, a_scale=scale, b_scale=scale, accumulate=False)
        mma(acc.at[1, :, :64], weights, x, accumulate=lax.axis_index("i") > 0)
        mma(acc.at[1, :, 64:], x, x, done, a_sparse_metadata=pattern, accumulate=False)
        plgpu.barrier_wait(done)
        value, most = plgpu.async_load_tmem(acc.at[0], reduce="absmax")
        plgpu.wait_load_tmem()
        m_ref[...] = most
        o_ref[...] = value + plgpu.async_load_tmem(acc.at[1])

    e4m3, layouts = ml_dtypes.float8_e4m3fn, plgpu.TMEMLayout
    scales, metadata = layouts.SCALES_LAYOUT, layouts.SPARSE_METADATA_LAYOUT
    kernel = plgpu.kernel(
        tensor,
        out_type=[np.zeros((128, 128), np.float32), np.zeros(128, np.float32)],
        grid=(2,),
        grid_names=("i",),
        scratch_types=[
            plgpu.TMEM((2, 128, 128), np.float32),
            plgpu.TMEM((128, 128), np.float16, packed=True),
            plgpu.TMEM((128, 4), ml_dtypes.float8_e8m0fnu, layout=scales),
            plgpu.TMEM((128, 64), ml_dtypes.uint2, layout=metadata),
            plgpu.SMEM((128, 128), e4m3),
            plgpu.SMEM((128, 64), np.float16),
            plgpu.SMEM((1, 1, 32, 16), ml_dtypes.float8_e8m0fnu),
            plgpu.SMEM((1, 1, 128, 64), ml_dtypes.uint2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    yield "tensor", kernel, (half[:128, :128],)


CASES = list(kernels())


def without_places(text):
    return re.sub(r"  // \".*$", "", text, flags=re.M)


def test_golden_of_a_small_kernel():
    """The text form itself; names come from the user's variables."""
    graph = CASES[0][1].lower(*CASES[0][2]).as_text("traced")
    assert without_places(graph) == ADD_ONE
    assert f'// "{__file__}":' in graph


@pytest.mark.parametrize("name,kernel,args", CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("stage", ["traced", "graph"])
def test_text_round_trips(name, kernel, args, stage):
    text = kernel.lower(*args).as_text(stage)
    assert _core.Graph.parse(text).text() == text


@pytest.mark.parametrize("name,kernel,args", CASES, ids=[c[0] for c in CASES])
def test_parser_survives_damage(name, kernel, args):
    """Cut, doubled and exchanged pieces of a text: accepted or refused, never a crash."""
    text = kernel.lower(*args).as_text("graph")
    rnd = random.Random(name)
    refused = 0
    for _ in range(300):
        a, b = sorted(rnd.randrange(len(text)) for _ in range(2))
        how = rnd.randrange(3)
        if how == 0:
            damaged = text[:a] + text[min(b, a + 20) :]
        elif how == 1:
            damaged = text[:a] + text[a : a + 15] + text[a:]
        else:
            damaged = text[:a] + rnd.choice("{}[]%,=:0123456789_x") + text[a + 1 :]
        try:
            _core.Graph.parse(damaged).text()
        except (
            ValueError,
            TypeError,
            NotImplementedError,
            IndexError,
            OverflowError,
            plgpu.InternalError,
        ):
            refused += 1
    assert refused > 50


def test_a_graph_runs_from_its_text(rng):
    """No Python body is needed: parse, lower, interpret."""
    x = rng.standard_normal((2, 128)).astype(np.float32)
    o = np.zeros_like(x)
    graph = _core.Graph.parse(ADD_ONE)
    graph.lower()
    graph.interpret([x, o])
    np.testing.assert_array_equal(o, x + 1)


@pytest.mark.parametrize(
    "line,why",
    [
        ("  %9 = add %x_5, %8 : float32[128]", "operand"),
        ("  store %8, %4", "store"),
        ("  %9 = add %99, %6 : float32[]", "99"),
        ("  %9 = frobnicate %6 : float32[]", "frobnicate"),
        ("  %9 = load %x_5 : float32[128]", "load"),
    ],
)
def test_verifier_refuses(line, why):
    text = ADD_ONE.replace("  store %8, %7\n", "  store %8, %7\n" + line + "\n")
    with pytest.raises((ValueError, TypeError, plgpu.InternalError), match=why):
        _core.Graph.parse(text)


def test_generated_cuda_can_be_followed():
    """Names of the user's variables, #line to the user's file, no asm outside the device
    functions."""
    text = CASES[0][1].lower(*CASES[0][2]).as_text("cuda", lines=True)
    assert f'#line {add_one.__code__.co_firstlineno + 1} "{__file__}"' in text
    assert f"#line {add_one.__code__.co_firstlineno + 3}\n" in text
    entry = text[text.index("__global__") :]
    assert "x_ref" in entry and "o_ref" in entry and "asm" not in entry and "#include" not in text
    matmul = CASES[1][1].lower(*CASES[1][2])
    entry = matmul.as_text("cuda")
    entry = entry[entry.index("__global__") :]
    assert "wgmma" in entry and "asm" not in entry and "#pragma unroll 1" in entry


def test_instructions_of_a_program_stand_in_one_section():
    """Each has a comment, lines end at 100 columns, and the only accumulator has no number."""
    text = CASES[1][1].lower(*CASES[1][2]).as_text("cuda")
    before, section = text.split("// ---- instructions of this program ----\n")
    section, entry = section.split('extern "C"')
    lines = section.splitlines()
    begun = [k for k, x in enumerate(lines) if re.match(r"FN |constexpr |#define (?!D )", x)]
    assert len(begun) > 5 and all(lines[k - 1].startswith("// ") for k in begun)
    assert max(map(len, lines)) <= 100 and "wgmma_m64" not in before
    assert "acc_declare();" in entry and "acc_zero();" in entry and "acc_list_0_" in entry
    assert not re.search(r"\bacc_\d+_", text)


def test_resources_of_the_matmul():
    """No spills, no stack, no remark of serialised wgmma; the PTX holds what was asked for."""
    lowered = CASES[1][1].lower(*CASES[1][2])
    used = lowered.resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0 and not used["remarks"], used
    assert 0 < used["registers"] <= 255 and used["smem_bytes"] >= 3 * 2 * 128 * 64 * 2
    ptx = lowered.as_text("ptx")
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16" in ptx
    assert "cp.async.bulk.tensor" in ptx and "stmatrix" in ptx


def test_simplify_leaves_what_is_needed():
    """Equal pure ops merge, unused ones and loads go, effects stay."""

    def body(x_ref, o_ref):
        i = lax.axis_index("g")
        unused = x_ref[i] * 3
        del unused
        o_ref[i] = x_ref[i] * (i + 0) + (i * 1)

    x = np.zeros((2, 128), np.int32)
    lowered = plgpu.kernel(body, out_type=x, grid=(2,), grid_names=("g",)).lower(x)
    traced, graph = lowered.as_text("traced"), lowered.as_text("graph")
    assert traced.count(" load ") == 2 and graph.count(" load ") == 1
    assert graph.count(" axis ") == 1 and graph.count(" mul ") == 1 and graph.count(" store ") == 1


def test_engines():
    """TMA where a tensor map can, plain copies where the pitch forbids it, with a warning that
    names the line."""

    def body(x_ref, o_ref, smem, bar):
        i = lax.axis_index("g")
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * 64, 64), 0:64], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]

    def engine(pitch):
        x = np.zeros((256, pitch), ml_dtypes.bfloat16)
        kernel = plgpu.kernel(
            body,
            out_type=np.zeros((64, 64), ml_dtypes.bfloat16),
            grid=(4,),
            grid_names=("g",),
            scratch_types=[plgpu.SMEM((64, 64), ml_dtypes.bfloat16), plgpu.Barrier()],
        )
        return re.search(r"engine = (\w+)", kernel.lower(x).as_text("graph"))[1]

    assert engine(512) == "tma"
    with pytest.warns(UserWarning, match="multiple of 16 bytes") as caught:
        assert engine(511) == "plain"
    line = body.__code__.co_firstlineno + 2
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_shared_memory_of_sibling_scopes_overlaps():
    def body(o_ref):
        for k in range(3):

            def scope(smem, k=k):
                smem[...] = jnp.full((128, 256), float(k), jnp.float32)
                o_ref[k] = smem[0]

            pl.run_scoped(scope, plgpu.SMEM((128, 256), jnp.float32))

    kernel = plgpu.kernel(body, out_type=np.zeros((3, 256), np.float32), interpret=True)
    assert kernel.lower().resources()["smem_bytes"] < 2 * 128 * 256 * 4
    np.testing.assert_array_equal(kernel(), np.repeat(np.arange(3.0), 256).reshape(3, 256))


def test_offsets_of_large_arrays_have_64_bits():
    """4 GiB, which no test allocates."""

    def body(x_ref, o_ref, r_ref):
        i = pl.program_id(0)
        block = x_ref.at[:, pl.ds(i * 64, 16)]
        o_ref[...] = plgpu.load(block, layout=plgpu.Layout.WGMMA).astype(np.float32)
        r_ref[...] = x_ref[i, :128]

    shape = plgpu.ShapeDtypeStruct
    outs = shape((64, 16), np.float32), shape((128,), np.int8)
    kernel = plgpu.kernel(body, out_type=outs, grid=(16,), grid_names=("g",))
    text = kernel.lower(shape((64, 1 << 26), np.int8)).as_text("cuda")
    loads = re.findall(r"const i8\* const p [^;]*;", text)
    assert len(loads) == 2 and all("+ (i64)" in x for x in loads), loads
    assert re.search(
        r"\(i64\)warp \* 1073741824\)\s+\+ \([^;]*\(i64\)lane / 4 \* 67108864", loads[0]
    )
    assert re.search(r"\(i64\)\w+ \* 67108864", loads[1])


def test_names_have_no_number_where_one_would_do():
    """Of two variables with one name each keeps the number it has in the graph's text; names that
    the program uses otherwise, keywords and what may be a macro keep theirs, too."""

    def body(x_ref, o_ref, unix, smem, NAN, K, static_cast):
        i = lax.axis_index("i")
        first = x_ref[i]
        static_cast[...] = first  # a word of the device functions, too
        acc = first * x_ref[i + 1]
        unix[...] = acc
        smem[...] = acc + 1
        NAN[...] = acc + 2
        K[...] = acc + 3
        plgpu.commit_smem()
        acc = unix[...] + smem[...] + NAN[...] + K[...]
        o_ref[i] = acc

    x = np.zeros((8, 128), np.float32)
    smem = plgpu.SMEM((128,), np.float32)
    low = plgpu.kernel(
        body, out_type=x, grid=(7,), grid_names=("i",), scratch_types=[smem] * 5
    ).lower(x)
    text, graph = low.as_text("cuda"), low.as_text("graph")
    assert re.search(r"const u32 K = smem \+", text)
    assert re.search(r"const u32 unix_\d+ = smem", text)
    assert re.search(r"const u32 smem_\d+ = smem", text)
    assert re.search(r"const u32 NAN_\d+ = smem", text)
    assert re.search(r"const u32 static_cast_\d+ = smem", text)
    assert re.search(r"f32 first\[1\];", text)
    numbers = set(re.findall(r"f32 acc_(\d+)\[1\];", text))
    assert len(numbers) == 2 and numbers == set(re.findall(r"%acc_(\d+) =", graph))
    assert low.resources()["registers"] > 0  # it compiles


def test_names_that_end_in_digits(tmp_path):
    """They keep no number of their own either, unless another name with its number is the same."""

    def body(*refs):
        x_ref, *_, o_ref = refs
        i = lax.axis_index("i")
        x1 = x_ref[i]
        o_ref[i] = x1 * x1

    x = np.zeros((4, 128), np.float32)
    options = dict(grid=(4,), grid_names=("i",))
    text = plgpu.kernel(body, out_type=x, **options).lower(x, x).as_text("cuda")
    assert re.search(r"f32 x1\[1\];", text) and re.search(r"\brefs_[02] /\*", text)

    names = [f"y_{k}" for k in range(1, 40)]
    lines = "\n".join(f"    {name} = y * y_ref[i + {k}]" for k, name in enumerate(names))
    source = (
        "from pallas_mgpu import lax\n\n\ndef many(y_ref, o_ref):\n    i = lax.axis_index('i')\n"
        f"    y = y_ref[i]\n{lines}\n    o_ref[i] = {' + '.join(names)}\n"
    )
    (tmp_path / "many.py").write_text(source)
    of = runpy.run_path(str(tmp_path / "many.py"))
    y = np.zeros((64, 128), np.float32)
    low = plgpu.kernel(of["many"], out_type=y, **options).lower(y)
    found = re.findall(r"f32 (y\w*)\[1\];", low.as_text("cuda"))
    assert len(set(found)) == len(found) > 30 and any(x.count("_") == 2 for x in found)
    assert low.resources()["registers"] > 0  # it compiles


def test_names_of_what_calls_return():
    """Values that functions of the kernel return have the names of the line that calls them, unless
    a line of the function named them; the values of a state have those of its fields, or share
    one."""

    def both(x):
        y = x * 3
        return y * 2, x + y

    def nested(x):
        return both(x - 1)

    def plus(x):
        total = x + 5
        return total

    def body(x_ref, o_ref):
        x = x_ref[...]
        doubled, shifted = both(x)
        (first, last), scaled = nested(shifted), plus(doubled) * 7
        parts = [k * x for k in (2, 3)]
        state = dict(low=first, high=last)
        state = lax.fori_loop(0, 4, lambda k, s: dict(low=s["low"] + x, high=s["high"] * 2), state)
        (one, two), _ = lax.scan(lambda c, _: ((c[1], c[0] + 1), None), (x, scaled), length=3)
        pair = lax.fori_loop(0, 4, lambda k, c: (c[1], c[0] * 2), (one, two))
        lax.while_loop(lambda c: c.at < 3, step, Walk(jnp.int32(0), x))
        o_ref[...] = state["low"] + state["high"] + parts[0] * parts[1] + pair[0] * pair[1]

    class Walk(typing.NamedTuple):
        at: object
        sums: object

    def step(c):
        return Walk(c.at + 1, c.sums * 2)

    x = np.zeros(128, np.float32)
    low = plgpu.kernel(body, out_type=x).lower(x)
    text = re.sub(r"(%[a-z]+)_\d+", r"\1", low.as_text("traced"))
    for line in (
        *("%doubled = mul %y,", "%shifted = add %x, %y", "%total = add %doubled,"),
        *("%first = mul %y,", "%high, %low = for ", "%one, %two = for ", "%pair, %pair = for "),
        *("%at, %sums = while ", "args %at: int32[], %sums: float32[128]\n"),
    ):
        assert text.count(line) == 1 + ("args %at" in line), line  # the test and the body
    assert text.count("%y = mul ") == 2 and text.count("%last = add ") == 1
    assert len(set(re.findall(r"f32 (pair_\d+)\[", low.as_text("cuda")))) == 2


def test_names_of_several_targets():
    """Results and what loops carry have the names of the targets, by position; values of lambdas
    in the same line, and lines where the numbers differ, get none."""

    def body(x_ref, o_ref):
        i = lax.axis_index("i")
        zero = jnp.zeros((128,), jnp.float32)

        def step(k, a, b):
            return a + x_ref[k], (jnp.maximum(b[0], x_ref[k]), b[1] * 2)

        def less(c):
            return c[0] < c[1]

        total, (most, _) = lax.fori_loop(0, 8, lambda k, c: step(k, *c), (zero, (zero, zero)))
        count, limit = lax.while_loop(less, lambda c: (c[0] * 3, c[1] + 1), (i + 1, i * 5))
        low, high = total - 1, most + limit.astype(jnp.float32)
        left, right = jnp.split(low * high, 2)
        odd, even = jnp.split(low, 4)[:2]
        o_ref[i] = jnp.concatenate([left + odd[0], right - even[0] + count.astype(jnp.float32)])

    x = np.zeros((8, 128), np.float32)
    kernel = plgpu.kernel(body, out_type=x, grid=(8,), grid_names=("i",))
    low = kernel.lower(x)
    text = re.sub(r"(%[a-z]+)_\d+", r"\1", low.as_text("traced"))
    assert re.search(r"%total, %most, %\d+ = for ", text)
    assert re.search(r"args %k: int32\[\], %total: \S+, %most: \S+, %\d+: ", text)
    assert re.search(r"%count, %limit = while ", text)
    assert len(re.findall(r"args %count: int32\[\], %limit: int32\[\]\n", text)) == 2
    assert not re.search(r"(?<!, )%(count|limit) = ", text)  # of the lambda
    for name, op in dict(low="sub", high="add", left="slice", right="slice").items():
        assert len(re.findall(rf"%{name} = {op} ", text)) == 1, name
    assert "%odd" not in text and "%even" not in text  # which of the four?
    cuda = low.as_text("cuda")
    assert all(re.search(rf"i32 {x} = ", cuda) for x in ("count", "limit"))
    assert re.search(r"f32 right\[\d+\];", cuda)
    assert low.resources()["registers"] > 0  # it compiles


def test_names_of_what_a_body_unpacks():
    """What a loop carries has the names of the targets to which the body assigns its parts; several
    parts that one target takes share its name. Those of the loop's results go first."""

    def body(x_ref, o_ref):
        x = x_ref[...]

        def first(k, carry):
            low, (high, place) = carry
            return low + x, (high * 2, (place[1], place[0] + 1))

        def second(scale, carry):
            _ = """A text
with a line that begins further left."""
            n, sums = carry
            return n + 1, sums * scale

        def third(scale, k, carry):
            big, (small, at) = scale, carry
            return small * big, at - 1

        used = lax.fori_loop(0, 4, first, (x, (x, (x, x))))[0]
        last, product = lax.fori_loop(0, 4, functools.partial(third, 3), (used, used))
        o_ref[...] = lax.while_loop(lambda c: c[0] < 3, functools.partial(second, 2),
                                    (jnp.int32(0), last + product))[1]  # fmt: skip

    low = plgpu.kernel(body, out_type=np.zeros(128, np.float32)).lower(np.zeros(128, np.float32))
    text = re.sub(r"(%[a-z]+)_\d+", r"\1", re.sub(r": \w+\[\w*\]", "", low.as_text("traced")))
    assert "args %k, %low, %high, %place, %place\n" in text
    assert "args %k, %small, %at\n" in text and "%last, %product = for " in text
    assert not re.search("%(n|sums)\\b", text)  # that source does not parse alone
    cuda = low.as_text("cuda")
    assert re.search(r"f32 low\[1\];", cuda) and re.search(r"f32 last(_\d+)?\[1\];", cuda)


def test_tuples_lend_no_name():
    """The name of several values is not that of the last one; one that is computed has its name."""

    def body(x_ref, o_ref):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        at = pl.ds(i * 64, 64), pl.ds(j * 32, 32)
        also = (i + 3, (j + 7))
        last = ((j + 9),)
        lists = [i - 1, j - 2]
        table = {"a": i - 5, "b": j - 6}
        total = (i + 1) * jnp.minimum(j, 9)
        more = i + jnp.maximum(j, 4)
        used = also[0] + also[1] + last[0] + sum(lists) + table["a"] + table["b"]
        o_ref[at] = x_ref[at] + (total + more + used).astype(jnp.float32)

    x = np.zeros((256, 96), np.float32)
    text = plgpu.kernel(body, out_type=x, grid=(4, 3), grid_names=("i", "j")).lower(x)
    text = text.as_text("traced")
    for name in ("at", "also", "last", "lists", "table"):
        assert f"%{name}" not in text, name
    assert "%total" in text and "%more" in text and "%used" in text


def test_numbers_of_names_are_of_their_scope():
    """Two branches each have their own `slot`; where one stands inside of another, both are
    numbered. Scratch in GMEM has the user's name."""

    def body(x_ref, o_ref, *, work):
        me = lax.axis_index("t")

        @pl.when(me == 0)
        def first():
            slot = lax.rem(x_ref[0], 5)
            o_ref[slot] = slot

        @pl.when(me == 1)
        def second():
            slot = lax.rem(x_ref[1], 7)
            o_ref[slot] = slot + work[0]

            @pl.when(slot > 2)
            def third():
                low = lax.rem(x_ref[2], 3)
                o_ref[low] = slot

            @pl.when(slot < 2)
            def fourth():
                row = lax.rem(x_ref[3], 3)
                o_ref[row] = row

            row = lax.rem(x_ref[4], 2)
            o_ref[row] = row

        @pl.when(me == 2)
        def fifth():
            row = lax.rem(x_ref[0], 11)

            @pl.when(row > 1)
            def sixth():
                row = lax.rem(x_ref[1], 11)
                o_ref[row] = row

            o_ref[row] = row

    x = np.ones(16, np.int32)
    kernel = plgpu.kernel(
        body, out_type=x, num_threads=3, thread_name="t",
        scratch_types={"work": plgpu.GMEM((4,), jnp.int32)},
    )  # fmt: skip
    low = kernel.lower(x)
    text = low.as_text("cuda")
    for declared, times in ((r"slot", 2), (r"low", 1), (r"row", 2), (r"row_\d+", 2)):
        assert len(re.findall(rf"const i32 {declared} = ", text)) == times, declared
    assert re.search(r"i32\* work /\* gmem", text)
    assert low.resources()["registers"] > 0  # it compiles


def test_expressions_have_the_parentheses_that_they_need(run, rng):
    """Whatever is printed inline, C++ groups it as the kernel does."""
    x = rng.integers(1, 99, 4).astype(np.int32)
    f = rng.standard_normal(4).astype(np.float32)

    def ints(a, b, c, d):
        yield a - (b - c), a - b - c
        yield (a - b) * (c + d), (a * b) % 7 * (c % 5)
        yield a * (b % c), a // (b * 2) * c
        yield (a + b) // 3 - (c - (d - a)), -(a - b) * 3 - (-(c + d))

    def floats(a, b, c, d):
        yield a - (b - c), a / (b / c)
        yield (a - b) * (c + d), a / b * c
        yield a - (-(b - c)), (a * b) - (c - d) * (a - (b - (c - d)))

    def body(x_ref, f_ref, o_ref, p_ref):
        for ref, values, out in ((x_ref, ints, o_ref), (f_ref, floats, p_ref)):
            for k, pair in enumerate(values(*(ref[i] for i in range(4)))):
                out[2 * k], out[2 * k + 1] = pair

    out = plgpu.ShapeDtypeStruct((8,), np.int32), plgpu.ShapeDtypeStruct((6,), np.float32)
    got = run(body, out, x, f)
    np.testing.assert_array_equal(got[0], np.ravel(list(ints(*x.astype(np.int64)))))
    np.testing.assert_allclose(
        got[1], np.ravel(list(floats(*f.astype(np.float64)))), rtol=1e-4, atol=1e-4
    )


def test_no_line_directive_stands_before_another():
    for name, kernel, args in kernels():
        text = kernel.lower(*args).as_text("cuda", lines=True)
        assert "#line" in text and not re.search(r"^#line.*\n#line", text, re.M), name
        named = re.findall(r'^#line \d+( ".*")?$', text, re.M)
        assert named[0]  # the first one says in which file


@pytest.mark.parametrize("space", ["acc", "tmem"])
def test_spaces_that_have_no_addresses(space):
    """Refs to accumulators and tensor memory are types of their own: no load reaches them."""
    head = 'kernel "k" grid [] cluster [] threads 1 stage traced {\n'
    text = f"{head}  args %x: {space} float32[128,64]\n  %y = load %x : float32[128,64]\n}}\n"
    with pytest.raises(ValueError, match=f"ref is {space} float32.128,64.; a ref in GMEM or SMEM"):
        _core.Graph.parse(text)


def test_lines_of_the_program_are_short():
    """Long ones go on in others: the same text but for strings in several pieces."""

    def body(x_ref, o_ref, a_smem):
        i = lax.axis_index("a_long_name_of_an_axis")
        a_value_that_is_stored = x_ref[i]
        text = 'some text, with a "quotation", a backslash \\, a name and the number {} of a block'
        pl.debug_print(text, i)
        a_smem[i] = a_value_that_is_stored * 3
        plgpu.commit_smem()
        b = plgpu.load(a_smem.at[i], layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[i] = jnp.dot(b.astype(jnp.bfloat16), b.T.astype(jnp.bfloat16)).astype(x.dtype)

    x = np.zeros((3, 64, 64), np.float32)
    tiled = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    kernel = plgpu.kernel(
        body,
        out_type=x,
        grid=(3,),
        grid_names=("a_long_name_of_an_axis",),
        scratch_types=[plgpu.SMEM(x.shape, np.float32, transforms=tiled)],
    )
    low = kernel.lower(x, target="sm_90a")
    text, lines = low.as_text("cuda"), low.as_text("cuda", lines=True).splitlines()
    assert max(map(len, text.splitlines())) <= 100 < max(map(len, lines))
    whole = "\n".join(line for line in lines if not line.startswith("#line"))
    assert text != whole
    pieces = r'"\s*"|\s|(?<= )\\\n'
    assert re.sub(pieces, "", text) == re.sub(pieces, "", whole)
