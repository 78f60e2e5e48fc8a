"""plgpu.estimate and `python -m pallas_mgpu explain`: times and bounds from the graph alone."""

import statistics
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from fuzz import generate
from fuzz import kernels as fuzz_kernels

import pallas_mgpu as plgpu
from pallas_mgpu import _estimate, _estimate_machine, _estimate_program, lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.__main__ import main

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SPEC = plgpu.ShapeDtypeStruct


def copying(rows, columns=4096, repeat=1):
    """A kernel that reads each block `repeat` times and writes it once."""

    @plgpu.kernel(out_type=SPEC((rows, columns), jnp.float32), grid=(rows,), grid_names=("m",))
    def copy(x, o):
        m = lax.axis_index("m")
        value = x[m]
        for _ in range(repeat - 1):
            value = value + lax.optimization_barrier(x[m])
        o[m] = value

    return copy.lower(SPEC((rows, columns), jnp.float32))


def product(m, n, k, dtype=jnp.bfloat16):
    a, b = SPEC((m, k), dtype), SPEC((k, n), dtype)
    return ops.matmul.kernel(a, b).lower(a, b)


def test_a_copy_is_bound_by_memory():
    e = plgpu.estimate(copying(16384))
    nbytes = 2 * 16384 * 4096 * 4
    assert e.bound == "HBM" and e.blocks == 16384
    assert e.read == e.written == nbytes / 2 and e.memory == nbytes and e.flops == 0
    rate = nbytes / e.seconds
    assert 3.7e12 < rate < 4.2e12
    assert plgpu.estimate(copying(32768)).seconds == pytest.approx(2 * e.seconds, rel=0.05)
    slower = plgpu.estimate(copying(16384), gpu="H100")
    assert 1.2 < slower.seconds / e.seconds < 1.5


def test_what_is_read_again_comes_from_the_cache():
    e = plgpu.estimate(copying(16384, repeat=3))
    nbytes = 16384 * 4096 * 4
    assert e.read == 3 * nbytes and e.memory == pytest.approx(2 * nbytes)


def test_small_operands_stay_in_the_cache_unless_it_is_cold():
    lowered = copying(200)
    warm, cold = plgpu.estimate(lowered), plgpu.estimate(lowered, cold=True)
    assert warm.memory == 0 and cold.memory == 2 * 200 * 4096 * 4
    assert warm.seconds < cold.seconds


def test_products():
    large, small = plgpu.estimate(product(8192, 8192, 8192)), plgpu.estimate(product(256, 256, 256))
    assert large.bound in ("power", "tensor cores") and large.flops == pytest.approx(
        2**40, rel=0.04
    )
    assert 600e12 < large.flops / large.seconds < 800e12
    assert small.seconds < 4e-6 and small.bound in ("launch", "latency")
    assert plgpu.estimate(product(8192, 8192, 16384)).seconds > 1.9 * large.seconds


def test_exponentials():
    @plgpu.kernel(out_type=SPEC((4096, 1024), jnp.float32), grid=(4096,), grid_names=("m",))
    def many(x, o):
        m = lax.axis_index("m")
        o[m] = lax.fori_loop(0, 200, lambda _, y: jnp.exp2(y), x[m])

    e = plgpu.estimate(many.lower(SPEC((4096, 1024), jnp.float32)))
    assert e.bound == "exponentials"
    assert e.parts["exponentials"] > 4096 * 1024 * 200 / 132 / 16 / 1.98e9


def test_more_stages_hide_more_latency():
    def pipelined(stages):
        @plgpu.kernel(out_type=SPEC((128, 128), jnp.float32))
        def k(x, o, acc):
            def step(_, block):
                acc[...] += block[...]

            plgpu.emit_pipeline(
                step,
                grid=(64,),
                in_specs=[plgpu.BlockSpec((128, 32), lambda i: (0, i))],
                max_concurrent_steps=stages,
            )(x)
            o[:, :32] = acc[...]

        body = k.__wrapped__
        made = plgpu.kernel(
            body,
            out_type=SPEC((128, 128), jnp.float32),
            scratch_types=[plgpu.SMEM((128, 32), jnp.float32)],
        )
        return plgpu.estimate(made.lower(SPEC((128, 2048), jnp.float32)), cold=True).seconds

    one, two, four = map(pipelined, (1, 2, 4))
    assert one > 1.1 * two > 1.1 * four


def test_sizes_at_run_time():
    m = plgpu.dim("M", max=1 << 20)

    @plgpu.kernel(
        out_type=SPEC((m, 1024), jnp.float32),
        grid=(pl.cdiv(m, 16),),
        grid_names=("m",),
        in_shapes=((m, 1024),),
    )
    def k(x, o):
        rows = pl.ds(lax.axis_index("m") * 16, 16)
        o[rows] = x[rows] + 1

    lowered = k.lower(SPEC((64, 1024), jnp.float32))
    few, many = (plgpu.estimate(lowered, sizes={"M": n}) for n in (64, 131072))
    assert (few.blocks, many.blocks) == (4, 8192) and many.seconds > 20 * few.seconds
    with pytest.raises(ValueError, match="pass the size M"):
        plgpu.estimate(lowered)
    with pytest.raises(ValueError, match=r"no size \['N'\]; it has \['M'\]"):
        plgpu.estimate(lowered, sizes={"M": 64, "N": 3})


def test_loops_over_what_arrays_hold():
    @plgpu.kernel(out_type=SPEC((128,), jnp.float32))
    def k(count, x, o):
        def step(i, acc):
            return acc + x[i]

        o[...] = lax.fori_loop(0, count[0], step, jnp.zeros(128, jnp.float32))

    lowered = k.lower(SPEC((1,), jnp.int32), SPEC((5000, 128), jnp.float32))
    few, many = (plgpu.estimate(lowered, values={0: np.array([n], np.int32)}) for n in (50, 5000))
    assert many.seconds > 20 * few.seconds and many.read > 90 * few.read
    with pytest.raises(ValueError, match="depends on elements"):
        plgpu.estimate(lowered)


def test_loops_over_what_follows_from_arrays():
    """Sums of a vector, masked, in shared memory; an array's elements picked by a mask."""

    @plgpu.kernel(
        out_type=SPEC((128,), jnp.float32), scratch_types=[plgpu.SMEM((2, 33), jnp.int32)]
    )
    def k(counts, x, o, table):
        table[1, 0] = 0
        there = lax.broadcasted_iota(jnp.int32, (32,), 0) < 20
        sizes = pl.load(counts, pl.ds(0, 32), mask=there, other=0)
        table[1, pl.ds(1, 32)] = jnp.cumsum(jnp.clip(sizes, 0, 10) // 2)
        full = jnp.sum((sizes == 9).astype(jnp.int32))

        def step(i, acc):
            return acc + x[i]

        n = table[1, 32] * 8 + full
        o[...] = lax.fori_loop(0, n, step, jnp.zeros(128, jnp.float32))

    lowered = k.lower(SPEC((32,), jnp.int32), SPEC((5000, 128), jnp.float32))
    row = 128 * 4
    for counts in (np.arange(32), np.full(32, 9), np.full(32, 99), np.zeros(32)):
        e = plgpu.estimate(lowered, values={0: counts.astype(np.int32)})
        seen = counts[:20]
        rows = (np.clip(seen, 0, 10) // 2).sum() * 8 + (seen == 9).sum()
        assert e.read == pytest.approx(rows * row, abs=200)
    with pytest.raises(ValueError, match="depends on elements"):
        plgpu.estimate(lowered)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups(transposed):
    m, n, k, groups = 4000, 1024, 512, 8
    op = ops.transposed_ragged_dot if transposed else ops.ragged_dot
    operands = [SPEC((m, k), jnp.bfloat16), SPEC((groups, k, n), jnp.bfloat16)]
    if transposed:
        operands[1] = SPEC((m, n), jnp.bfloat16)
    operands.append(SPEC((groups,), jnp.int32))
    lowered = op.kernel(*operands).lower(*operands)

    def of(sizes):
        return plgpu.estimate(lowered, values={2: np.array(sizes, np.int32)})

    even, uneven, few = of([500] * 8), of([3000, 0, 0, 1000, 0, 0, 0, 0]), of([30] * 8)
    for e in (even, uneven):
        assert e.flops == pytest.approx(2 * m * n * k, rel=0.25)  # by a few SMs
    assert few.flops < 0.2 * even.flops and few.seconds < even.seconds


def many_steps(kind, n):
    """A kernel that does something n times."""
    x = SPEC((128, 64), jnp.float16)

    def products(a, b, o):
        def compute(acc):
            def step(_, x, y):
                plgpu.wgmma(acc, x, y)
                plgpu.wgmma_wait(1)

            specs = [
                plgpu.BlockSpec(shape, lambda k: (0, 0), delay_release=1)
                for shape in ((128, 64), (64, 64))
            ]
            plgpu.emit_pipeline(step, grid=(n,), in_specs=specs, max_concurrent_steps=3)(a, b)
            return acc[...]

        o[...] = pl.run_scoped(compute, plgpu.ACC((128, 64)))

    def nested(a, b, o):
        def one(i, y):
            return lax.fori_loop(0, 100, lambda _, z: z * 1.5 + a[...], y)

        o[...] = lax.fori_loop(0, n // 100, one, a[...]).astype(jnp.float32)

    def tiles(a, b, o):
        @plgpu.dynamic_scheduling_loop(("tile",))
        def _(info):
            o[...] = a[...] + info.index[0].astype(jnp.float32)

    def roles(a, b, o, smem, full, empty):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            def send(i, _):
                plgpu.barrier_wait(empty)
                plgpu.copy_gmem_to_smem(a, smem, full)

            lax.fori_loop(0, n, send, None)
            plgpu.barrier_wait(empty)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            def receive(state):
                i, total = state
                plgpu.barrier_wait(full)
                total += smem[...].astype(jnp.float32)
                plgpu.barrier_arrive(empty)
                return i + 1, total

            plgpu.barrier_arrive(empty)
            begin = 0, jnp.zeros((128, 64), jnp.float32)
            o[...] = lax.while_loop(lambda state: state[0] < n, receive, begin)[1]

    options = {}
    if kind == "tiles":
        options = {"grid": (132 * n,), "grid_names": ("tile",)}
    elif kind == "roles":
        options = {"num_threads": 2, "thread_name": "wg"}
        options["scratch_types"] = [
            plgpu.SMEM((128, 64), jnp.float16), plgpu.Barrier(), plgpu.Barrier(),
        ]  # fmt: skip
    body = {"products": products, "nested": nested, "tiles": tiles, "roles": roles}[kind]
    return plgpu.kernel(body, out_type=SPEC((128, 64), jnp.float32), **options).lower(x, x)


@pytest.mark.parametrize("kind", ["products", "nested", "tiles", "roles"])
def test_more_iterations_than_are_simulated(kind, monkeypatch):
    """Those that are left out are in proportion to the others, and a billion of them end."""
    exact = plgpu.estimate(many_steps(kind, 4000))
    assert not exact.assumed
    monkeypatch.setattr(_estimate_machine, "EVENTS", 3000)
    found = plgpu.estimate(many_steps(kind, 4000))
    assert any("as long as those before" in text for text in found.assumed)
    for name in ("seconds", "flops", "read", "written"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.08), name
    assert found.bound == exact.bound
    most = 10**9 if kind != "tiles" else 10**6  # of each SM
    many = plgpu.estimate(many_steps(kind, most))
    assert many.seconds == pytest.approx(exact.seconds * most / 4000, rel=0.1)


def test_a_loop_whose_end_nobody_knows(monkeypatch):
    @plgpu.kernel(out_type=SPEC((128,), jnp.float32))
    def k(x, o):
        def step(state):
            i, y = state
            return i + 1, y * 1.5 + x[...]

        o[...] = lax.while_loop(lambda state: state[0] < 10**9, step, (0, x[...]))[1]

    monkeypatch.setattr(_estimate_machine, "EVENTS", 3000)
    with pytest.raises(NotImplementedError, match=r"loop at .*test_estimate.py:\d+ has more iter"):
        plgpu.estimate(k.lower(SPEC((128,), jnp.float32)))


def test_a_copy_that_is_left_out_arrives():
    @plgpu.kernel(
        out_type=SPEC((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(num_arrivals=2)],
    )
    def k(x, o, smem, barrier):
        def step(i, _):
            plgpu.copy_gmem_to_smem(x, smem, barrier)
            plgpu.copy_gmem_to_smem(x, smem, barrier, predicate=i < 1)
            plgpu.barrier_wait(barrier)

        lax.fori_loop(0, 3, step, None)
        o[...] = smem[...]

    assert plgpu.estimate(k.lower(SPEC((128,), jnp.float32))).read == 4 * 512


def test_a_loop_over_the_grid_launches_what_fits():
    e = plgpu.estimate(many_steps("tiles", 400))
    assert e.blocks == 132 * e.occupancy and e.waves == 1
    assert e.written == pytest.approx(132 * 400 * 128 * 64 * 4, rel=0.02)


def test_branches_on_data_are_named():
    @plgpu.kernel(out_type=SPEC((128,), jnp.float32))
    def k(x, o):
        value = x[...]

        @pl.when(jnp.max(value) > 1)
        def _():
            o[...] = value

    e = plgpu.estimate(k.lower(SPEC((128,), jnp.float32)))
    assert any("test_estimate.py" in x for x in e.assumed)
    assert "assumed: " in str(e)


def test_sizes_at_run_time_are_those_of_the_call():
    """Also of outputs and of arguments that do not define the size: what fits stays in the L2."""

    def body(x, y, o):
        i = lax.axis_index("i")
        o[i] = x[i] + y[i]

    def lowered(m, of_a_call=300):
        spec = SPEC((m, 1024), jnp.float32)
        k = plgpu.kernel(
            body, in_shapes=(spec.shape, spec.shape), out_type=spec, grid=(m,), grid_names=("i",)
        )
        return k.lower(*[SPEC((of_a_call, 1024), jnp.float32)] * 2)

    open_, closed = lowered(plgpu.dim("M")), plgpu.estimate(lowered(300))
    found = plgpu.estimate(open_, sizes={"M": 300})
    assert found.memory == closed.memory == 0 and found.read == closed.read
    assert 0.8 < found.seconds / closed.seconds < 1.2
    for wrong in ({"M": 0}, {"M": 2**31}, {"M": "300"}):
        with pytest.raises(ValueError, match="size M must be an int from 1 to"):
            plgpu.estimate(open_, sizes=wrong)
    for wrong in ({5: np.zeros(3)}, {1: np.zeros(3)}):
        with pytest.raises(ValueError, match="values are of arguments|must have the shape"):
            plgpu.estimate(open_, sizes={"M": 300}, values=wrong)


def test_loops_that_depend_on_data_are_named():
    @plgpu.kernel(out_type=SPEC((1,), jnp.int32))
    def k(x, o):
        o[0] = lax.while_loop(lambda i: i < x[0], lambda i: i + 1, jnp.int32(0))

    lowered = k.lower(SPEC((1,), jnp.int32))
    assert any("a loop that depends on data" in text for text in plgpu.estimate(lowered).assumed)
    many = plgpu.estimate(lowered, values={0: np.array([10**5], np.int32)})
    assert many.seconds > 1e-4 and not many.assumed


def test_what_is_refused():
    lowered = copying(16)
    for wrong in (3, ops.matmul):
        with pytest.raises(TypeError, match="a lowered kernel is needed"):
            plgpu.estimate(wrong)
    with pytest.raises(ValueError, match="gpu must be one of"):
        plgpu.estimate(lowered, gpu="A100")
    x = SPEC((16, 4096), jnp.float32)
    portable = plgpu.kernel(lambda a, o: o.__setitem__(..., a[...]), out_type=x)
    with pytest.raises(NotImplementedError, match="lowered for sm_80"):
        plgpu.estimate(portable.lower(x, target="sm_80"))


def test_every_op_of_the_text_is_read():
    q = SPEC((2, 512, 4, 128), jnp.bfloat16)
    text = ops.attention.kernel(q, q, q, causal=True).lower(q, q, q).as_text("graph")
    graph = _estimate_program.read(text)

    def count(block):
        return sum(1 + sum(map(count, op.regions)) for op in block.ops)

    inside = [x.strip() for x in text.splitlines()[1:-1]]
    other = ("args ", "}", "warning ")
    assert count(graph.body) == sum(bool(x) and not x.startswith(other) for x in inside)
    assert graph.threads == 3 and graph.grid and graph.target == "sm_90a"


def test_occupancy():
    facts = _estimate_machine.GPUS["H200"]
    found = [
        _estimate_machine.occupancy(facts, *x)
        for x in ((128, 0, 32), (128, 100 << 10, 32), (384, 200 << 10, 168), (256, 1024, 128))
    ]
    assert found == [16, 2, 1, 2]


@pytest.mark.long
def test_measured_times(monkeypatch):
    """On times of estimate_cases.py that were not used to choose constants."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from pallas_mgpu.ops import _open_rows

    monkeypatch.setattr(_open_rows, "STATIC", _open_rows.STATIC)  # the module raises it
    import estimate_cases

    sys.modules.pop("estimate_cases")
    errors = []
    for case in estimate_cases.cases():
        if case.us is not None and not case.fitted:
            kernel, operands = case.make()
            e = plgpu.estimate(kernel.lower(*operands), cold=case.cold)
            errors.append(abs(e.seconds * 1e6 / case.us - 1))
    assert len(errors) >= 40
    assert statistics.median(errors) <= 0.10
    assert sum(x <= 0.20 for x in errors) >= 0.9 * len(errors)


def product_of(columns):
    """Lowered: one thread multiplies a tile of 128 rows and so many columns."""
    a, b = (plgpu.ShapeDtypeStruct(s, np.float16) for s in ((128, 256), (256, columns)))

    def body(a_ref, b_ref, o_ref):
        def compute(acc):
            def step(_, x, y):
                plgpu.wgmma(acc, x, y)
                plgpu.wgmma_wait(1)

            blocks = [
                plgpu.BlockSpec((128, 64), lambda k: (0, k), delay_release=1),
                plgpu.BlockSpec((64, columns), lambda k: (k, 0), delay_release=1),
            ]
            plgpu.emit_pipeline(step, grid=(4,), max_concurrent_steps=3, in_specs=blocks)(
                a_ref, b_ref
            )
            return acc[...]

        o_ref[...] = pl.run_scoped(compute, plgpu.ACC((128, columns)))

    out = plgpu.ShapeDtypeStruct((128, columns), np.float32)
    return plgpu.kernel(body, out_type=out).lower(a, b)


def test_spills_are_told():
    """Of more sums than one warpgroup has registers for."""
    kernel = product_of(256)
    assert any("bytes of registers spill" in text for text in plgpu.estimate(kernel).assumed)
    assert not plgpu.estimate(product_of(64)).assumed


KERNELS = """
import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops
from pallas_mgpu import numpy as jnp

@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((1000,), jnp.float32))
def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1

def lowered():
    return add_one.lower(plgpu.ShapeDtypeStruct((1000,), jnp.float32))

M = plgpu.dim("M", max=100000)

@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((M, 256), jnp.float32), in_shapes=((M, 256),),
              grid=(M,), grid_names=("i",))
def rows(x_ref, o_ref):
    i = lax.axis_index("i")
    o_ref[i] = x_ref[i] + 1

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some_kernels.py"
    path.write_text(KERNELS)
    return path


def test_explain(file, capsys):
    for rest in ([f"{file}:add_one", "float32[1000]"], [f"{file}:lowered"]):
        assert main(["explain", *rest]) == 0
        out = capsys.readouterr().out
        assert out.startswith("add_one on H200: about ") and "launch" in out


def test_explain_functions_of_ops(file, capsys):
    """One kernel, and a choice of two: the sum is told, too."""
    assert main(["explain", f"{file}:ops.softmax", "float16[1000,1000]"]) == 0
    assert capsys.readouterr().out.startswith("softmax on H200: about ")
    rows = ["float16[1000,512]"] * 2
    assert main(["explain", f"{file}:ops.rms_norm_backward", *rows, "float16[512]"]) == 0
    first, second, total = capsys.readouterr().out.split("\n\n")
    assert first.startswith("rms_norm_backward on H200") and second.startswith("last_sums on H200")
    assert total.startswith("2 kernels: about ")


def test_explain_runs_the_file_as_a_script(file, capsys, monkeypatch):
    """Imports find what is beside it; its own errors have a traceback."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    other = file.with_name("other.py")
    other.write_text("from some_kernels import add_one\nassert __name__ != '__main__'\n")
    assert main(["explain", f"{other}:add_one", "float32[1000]"]) == 0
    other.write_text("raise ValueError('of the file')\n")
    with pytest.raises(ValueError, match="of the file"):
        main(["explain", f"{other}:add_one"])


def test_explain_takes_sizes_from_operands(file, capsys):
    blocks = []
    for rest in (["float32[5000,256]"], ["float32[5000,256]", "--size", "M=70"]):
        assert main(["explain", f"{file}:rows", *rest]) == 0
        blocks.append(capsys.readouterr().out.splitlines()[1].split(" blocks")[0])
    assert blocks == ["5000", "70"]


@pytest.mark.parametrize(
    "rest, message",
    [
        (["{}:add_one"], "name its operands"),
        (["{}:add_one", "float32(1000)"], "an operand is written as"),
        (["{}:nothing"], "has no nothing"),
        (["{}:number"], "is neither a kernel"),
        (["{}"], "expected file.py:kernel"),
        (["{}:lowered", "--size", "M"], "a size is written as"),
        (["/nowhere/x.py:k"], "there is no file /nowhere/x.py"),
        (["{}:lowered", "float32[1000]"], "takes no operands"),
        (["{}:plgpu.dim"], "a function without arguments that returns a kernel"),
        (["{}:ops.softmax"], "a function of pallas_mgpu.ops with its operands"),
        (["{}:ops.matmul", "float16[64,64]"], "missing a required argument: 'b'"),
    ],
)
def test_explain_says_what_is_wrong(file, capsys, rest, message):
    assert main(["explain", *(x.format(file) for x in rest)]) == 2
    assert message in capsys.readouterr().out


def test_multicast_reads_memory_once():
    """Two blocks of a cluster get the same tile of weights that no cache holds."""
    a, b = SPEC((128, 3584), jnp.bfloat16), SPEC((8192, 3584), jnp.bfloat16)
    pair = ops.MatmulConfig(1, 128, 0, 2, step=64)
    kernels = (ops.matmul.kernel(a, b, transpose_b=True, config=c) for c in (pair, None))
    pair, one = (plgpu.estimate(k.lower(a, b), gpu="H100") for k in kernels)
    assert pair.bound == "HBM" and pair.seconds < 1.3 * one.seconds


@pytest.mark.long
def test_random_kernels(monkeypatch):
    """Every kernel has a time, or there is a reason that names what it lacks."""
    monkeypatch.setattr(_estimate, "_registers", lambda lowered: (64, 0))  # does not compile
    told = 0
    for seed in range(60):
        case = fuzz_kernels.Case(generate.generate(seed).source())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                lowered = case.kernel().lower(*case.operands)
            except (NotImplementedError, ValueError):
                continue
        try:
            assert 0 < plgpu.estimate(lowered, cold=True).seconds < 1
            told += 1
        except ValueError as e:
            assert "depends on elements" in str(e), seed
        except NotImplementedError as e:
            assert "as far as the model knows" in str(e), seed
    assert told >= 50
