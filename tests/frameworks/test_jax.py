"""Kernels inside jax.jit on the CPU, where XLA runs them on the interpreter: transforms, donation,
errors, and executables that another process runs."""

import functools
import os
import subprocess
import sys
import threading

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import pallas_mgpu as plgpu  # noqa: E402
from pallas_mgpu import _core, ops, pl  # noqa: E402
from pallas_mgpu.ops import _open_rows  # noqa: E402

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pj = pytest.importorskip("pallas_mgpu.jax")
_jax = pytest.importorskip("pallas_mgpu._jax")
F32 = np.float32


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def spec(*shape):
    return plgpu.ShapeDtypeStruct(shape, F32)


@plgpu.kernel(out_type=spec(8))
def add(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


@plgpu.kernel(out_type=())
def nothing(x_ref):
    plgpu.commit_smem()


@pytest.fixture
def x():
    return jnp.arange(8.0)


def same(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


def test_jit(x):
    same(jax.jit(lambda x, y: add(x * 2, y) + 1)(x, x), 3 * x + 1)
    same(add(x, x), 2 * x)  # without jit


def test_numbers_and_nested_arguments(x):
    @plgpu.kernel(out_type={"sum": spec(8), "scaled": spec(8)})
    def both(arrays, by, o):
        o["sum"][...] = arrays["a"][...] + arrays["b"][...]
        o["scaled"][...] = arrays["a"][...] * by[...]

    found = jax.jit(lambda x: both({"a": x, "b": x}, 3.0))(x)
    same(found["sum"], 2 * x)
    same(found["scaled"], 3 * x)


def test_vmap(x):
    rows = jnp.arange(24.0).reshape(3, 8)
    mapped = jax.vmap(add, in_axes=(0, None))
    same(mapped(rows, x), rows + x)
    same(jax.jit(mapped)(rows, x), rows + x)
    nested = jax.vmap(jax.vmap(add, in_axes=(1, None)), in_axes=(None, 0))
    same(jax.jit(nested)(rows.T, rows), rows[None] + rows[:, None])
    assert str(jax.make_jaxpr(mapped)(rows, x)).count("pallas_mgpu[") == 1  # one launch


def test_derivatives(x):
    with pytest.raises(NotImplementedError, match="kernel add has no derivative.*custom_vjp"):
        jax.grad(lambda x: add(x, x).sum())(x)

    @jax.custom_vjp
    def f(x, y):
        return add(x, y)

    f.defvjp(lambda x, y: (add(x, y), None), lambda _, g: (g, g))
    same(jax.jit(jax.grad(lambda x: f(x, x).sum()))(x), np.full(8, 2.0))


def test_aliases_and_donation(x):
    def increment(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    increment = pl.pallas_call(increment, spec(8), input_output_aliases={0: 0})
    same(jax.jit(increment)(x), x + 1)
    same(x, np.arange(8.0))  # JAX made a copy
    given = x + 0
    same(jax.jit(increment, donate_argnums=0)(given), x + 1)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (None, 0), (1, None)])
def test_vmap_of_aliases(axes, rng):
    """Results are values: the alias may be mapped over any axis, or shared."""

    def total(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    total = pl.pallas_call(total, spec(8), input_output_aliases={0: 0})
    shapes = {0: (3, 8), 1: (8, 3), None: (8,)}
    given = [jnp.asarray(rng.standard_normal(shapes[a]), F32) for a in axes]
    before = np.asarray(given[0]).copy()
    want = jax.vmap(lambda x, y: x + y, axes)(*given)
    same(jax.jit(jax.vmap(total, axes))(*given), want)
    same(given[0], before)


def test_dtypes_of_64_bits(x):
    """XLA's memory has 64 bits for each element, and no kernel reads them."""
    with jax.enable_x64(True):
        wide = jnp.arange(8, dtype=jnp.float64)
        with pytest.raises(TypeError, match=r"add: argument 1 has dtype float64.*astype"):
            jax.jit(lambda x, y: add(x, y))(wide.astype(F32), wide)
        with pytest.raises(TypeError, match="softmax: an argument has dtype float64"):
            jax.jit(ops.softmax)(wide)


@pytest.mark.parametrize(
    "f",
    [
        *(jnp.exp, jax.lax.exp, jax.nn.silu),
        lambda v: v * jnp.ones(8),
        lambda v: jnp.where(v, 1, 0),
        lambda v: v + jax.lax.axis_index("i"),
    ],
)
def test_functions_of_jax_in_a_body(f, x):
    """The names that a kernel was not moved from: told with the line of the body."""
    kernel = plgpu.kernel(lambda x, o: o.__setitem__(..., f(x[...])), out_type=spec(8))
    for call in (kernel, jax.jit(kernel)):
        error = TypeError, NameError  # of an axis that JAX does not know
        with pytest.raises(error, match=r"pallas_mgpu.numpy, lax and nn(.|\n)*test_jax.py:\d"):
            call(x)


def test_calls_outside_of_jit_that_xla_runs(x, monkeypatch):
    """As arrays on a GPU go, with arrays of the CPU."""
    from pallas_mgpu import _frameworks, _jax, _kernel

    def concrete(x):
        return _frameworks.is_jax(x) and not _frameworks.is_jax_traced(x)

    compiled, made = _jax._compiled, []
    for module in (_frameworks, _jax, _kernel):
        monkeypatch.setattr(module, "is_jax_on_gpu", concrete)

    def recorded(*key):
        found = compiled(*key)
        made.extend([key] if found else [])
        return found

    monkeypatch.setattr(_jax, "_compiled", recorded)

    @plgpu.kernel(out_type=[spec(8), spec(8)])
    def both(d, factor, o, p):
        o[...] = d["a"][...] + factor[()]
        p[...] = d["b"][0][...]

    o, p = both({"a": x, "b": [2 * x]}, 3.0)
    same(o, x + 3), same(p, 2 * x)
    args = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 24), jnp.bfloat16)
    bias = jnp.ones(24, jnp.bfloat16)
    got = _jax.call_eager(ops.matmul, args, {"activation": "relu", "bias": bias, "out": None})
    assert (np.asarray(got, F32) == 65).all()
    assert len(made) == 2
    with pytest.raises(TypeError, match="different libraries"):
        _jax.call_eager(add, (x, np.ones(8, F32)), {})
    with pytest.raises(TypeError, match="axis must be an array or hashable"):
        _jax.call_eager(ops.softmax, (x,), {"axis": [0]})
    with pytest.raises(TypeError, match="argument 1 .*complex64"):
        _jax.call_eager(add, (x, jnp.ones(8, jnp.complex64)), {})
    traced = plgpu.kernel(lambda x, o: o.__setitem__(..., x[...]), out_type=spec(8), interpret=True)
    same(_jax.call_eager(traced, (x,), {}), x)
    assert len(made) == 2


def test_mutable_arrays(x):
    """Made inside of jit they live there; the value of one from outside would be lost."""
    outside = plgpu.new_ref(np.zeros(8, F32))

    def add_to(ref):
        def body(x_ref, o_ref):
            ref[...] = ref[...] + x_ref[...]
            o_ref[...] = ref[...]

        return plgpu.kernel(body, out_type=spec(8))

    def inside(x):
        ref = plgpu.new_ref(jnp.ones(8))
        add_to(ref)(x)
        add_to(ref)(x)
        return ref[...]

    same(jax.jit(inside)(x), 2 * x + 1)
    with pytest.raises(NotImplementedError, match="body: under jax.jit, a mutable array"):
        jax.jit(add_to(outside))(x)
    assert not outside[...].any()


def test_memory_besides_the_outputs(x):
    def body(x_ref, o_ref, scratch):
        scratch[...] = x_ref[...] * 3
        o_ref[...] = scratch[...]

    kernel = plgpu.kernel(body, out_type=spec(8), scratch_types=[plgpu.GMEM((8,), F32)])
    same(jax.jit(kernel)(x), 3 * x)


def test_shard_map():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    half = plgpu.kernel(lambda x, y, o: o.__setitem__(..., x[...] + y[...]), out_type=spec(4))
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(auto,), devices=jax.devices("cpu")[:2])
    spec_d = jax.sharding.PartitionSpec("d")
    f = jax.shard_map(lambda x: half(x, x), mesh=mesh, in_specs=spec_d, out_specs=spec_d)
    x = jax.device_put(np.arange(8, dtype=F32), jax.sharding.NamedSharding(mesh, spec_d))
    same(jax.jit(f)(x), 2 * np.arange(8.0))


def test_gradients_under_shard_map(rng):
    """The gradient of a weight that all devices share is the sum of theirs; results vary between
    devices where arguments do."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    auto, spec_of = jax.sharding.AxisType.Auto, jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("d",), axis_types=(auto,), devices=jax.devices("cpu")[:2])
    specs = spec_of("d"), spec_of(), spec_of()

    def layer(a, b, bias):
        return pj.rms_norm(pj.matmul(a, b, bias=bias))

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=spec_of("d"))
    weights = jnp.asarray(rng.standard_normal((16, 40)), F32)

    def loss(f):
        return lambda *xs: (f(*xs).astype(F32) * weights).sum()

    arrays = half(rng, 16, 72), half(rng, 72, 40), half(rng, 40)
    got = jax.jit(jax.grad(loss(sharded), (0, 1, 2)))(*arrays)
    for a, b in zip(got, jax.grad(loss(layer), (0, 1, 2))(*arrays)):
        np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="out_specs"):  # it is not the same on all devices
        one = jax.shard_map(
            lambda x: ops.softmax(x), mesh=mesh, in_specs=specs[:1], out_specs=spec_of()
        )
        jax.jit(one)(arrays[0])


OTHER_PROCESS = """
import sys, numpy, jax
if sys.argv[2] == "with": import pallas_mgpu.jax
f = jax.export.deserialize(open(sys.argv[1], "rb").read())
print(numpy.asarray(f.call(numpy.arange(8, dtype=numpy.float32))).tolist())
"""


def test_export(x, tmp_path):
    """The executable contains the kernel: a process that never saw it runs it, or says whom it
    needs."""
    pytest.importorskip("flatbuffers")
    check = jax.export.DisabledSafetyCheck.custom_call("pallas_mgpu_call")
    exported = jax.export.export(jax.jit(lambda x: add(x, x)), disabled_checks=[check])(x)
    file = tmp_path / "exported"
    file.write_bytes(exported.serialize())
    same(jax.export.deserialize(file.read_bytes()).call(x), 2 * x)
    for way in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(file), way],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        if way == "with":
            assert done.stdout.strip() == str([2.0 * i for i in range(8)]), done.stderr
        else:
            assert "pallas_mgpu_call" in done.stderr


def test_attributes_refer_to_no_process(x):
    """Two lowerings of equal kernels are equal, though the kernels are different objects."""

    def make():
        kernel = plgpu.kernel(lambda x, o: o.__setitem__(..., x[...] + 1), out_type=spec(8))
        return jax.jit(kernel).lower(x).as_text()

    first, second = make(), make()
    assert "gmem float32[8]" in first and first == second


def test_buffers_of_another_type(x):
    """A call whose buffers are not of the kernel's types, as only a changed program has them."""
    attributes = _jax._attributes(add, add.lower(spec(8), spec(8)), "cpu")
    call = jax.ffi.ffi_call("pallas_mgpu_call", jax.ShapeDtypeStruct((8,), F32))
    same(jax.jit(lambda x: call(x, x, **attributes))(x), 2 * x)
    for wrong in (x.astype(np.int32), x.astype(jnp.bfloat16), x[:4], x[None]):
        with pytest.raises(RuntimeError, match="kernel add: argument 1 .*another shape or dtype"):
            jax.jit(lambda x, y: call(x, y, **attributes))(x, wrong).block_until_ready()
    with pytest.raises(RuntimeError, match="kernel add: a call has 1 operands"):
        jax.jit(lambda x: call(x, **attributes))(x).block_until_ready()


def test_a_deadlock_is_an_error_with_its_line(x):
    def wait(x_ref, o_ref, barrier):
        plgpu.barrier_wait(barrier)
        o_ref[...] = x_ref[...]

    barriers = [plgpu.Barrier(num_arrivals=1)]
    kernel = plgpu.kernel(wait, out_type=spec(8), scratch_types=barriers)
    with pytest.raises(RuntimeError, match=r"DeadlockError: (.|\n)*test_jax.py:\d+") as error:
        jax.jit(kernel)(x).block_until_ready()
    assert "site-packages" not in str(error.value)  # nor lines of JAX


def test_runs_without_the_gil(x):
    """Other threads of Python go on while the kernel runs."""

    def count(x_ref, o_ref):
        o_ref[...] = plgpu.lax.fori_loop(0, 1000000, lambda i, v: v + 1.0, x_ref[...])

    f = jax.jit(plgpu.kernel(count, out_type=spec(8))).lower(x).compile()
    result, ticks = [], 0
    thread = threading.Thread(target=lambda: result.append(f(x).block_until_ready()))
    thread.start()
    while thread.is_alive():
        ticks += 1
        thread.join(0.001)
    same(result[0], x + 1000000)
    assert ticks > 5


def test_several_threads_at_once(x):
    f = jax.jit(lambda x: add(x, x))
    results = {}

    def run(i):
        results[i] = np.asarray(f(x + i))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, got in results.items():
        same(got, 2 * (np.arange(8.0) + i))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: add(x, x, out=x), TypeError, "out= and stream="),
        (lambda x: nothing(x), NotImplementedError, "kernel without outputs"),
        (lambda x: add(x, "text"), TypeError, "argument 1 is a str"),
    ],
)
def test_errors(call, error, text, x):
    with pytest.raises(error, match=text):
        jax.jit(call)(x)


def test_symbolic_shapes():
    (n,) = jax.export.symbolic_shape("n")
    for f, shape in ((ops.softmax, (n, 64)), (add, (n,))):
        x = jax.ShapeDtypeStruct(shape, F32)
        with pytest.raises(NotImplementedError, match="symbolic shape .*for each shape"):
            jax.export.export(jax.jit(lambda x, f=f: f(x) if f is ops.softmax else f(x, x)))(x)


def test_options_of_the_interpreter(x):
    checked = plgpu.kernel(
        lambda x, o: o.__setitem__(..., x[...]),
        out_type=spec(8),
        interpret=plgpu.InterpretParams(detect_races=True),
    )
    with pytest.raises(NotImplementedError, match="options of the interpreter"):
        jax.jit(checked)(x)


def test_lowering_for_a_gpu(x):
    """Without a GPU: the call contains the cubin for Hopper, which its hash covers."""
    text = jax.jit(lambda x: add(x, x)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "pallas_mgpu_call" in text and 'cubin = "7f454c46' in text  # ELF
    assert "target sm_" in text
    assert isinstance(_core.xla_handlers(), tuple)


# ---- ops -----------------------------------------------------------------------------------------


def half(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float16)


def compare(ours, theirs, *xs, tolerance=4e-2):
    """Results and gradients, inside jit; `theirs` computes in float32."""
    w = jnp.asarray(np.random.default_rng(1).standard_normal(ours(*xs).shape), F32)
    argnums = tuple(range(len(xs)))

    def loss(f):
        return lambda *xs: (f(*xs).astype(F32) * w).sum()

    wide = [x.astype(F32) for x in xs]
    got = jax.jit(jax.grad(loss(ours), argnums))(*xs)
    want = jax.grad(loss(theirs), argnums)(*wide)
    pairs = [(jax.jit(ours)(*xs), theirs(*wide)), *zip(got, want)]
    for a, b in pairs:
        a, b = np.asarray(a, F32), np.asarray(b, F32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "tanh"])
def test_matmul(activation, rng):
    act = pj._ACTIVATIONS[activation]
    compare(
        lambda a, b, c: pj.matmul(a, b, bias=c, activation=activation),
        lambda a, b, c: act(a @ b + c),
        half(rng, 20, 72),
        half(rng, 72, 40),
        half(rng, 40),
    )


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_matmul_transposed(ta, tb, rng):
    compare(
        lambda a, b: pj.matmul(a, b, transpose_a=ta, transpose_b=tb),
        lambda a, b: (a.T if ta else a) @ (b.T if tb else b),
        half(rng, *((24, 20) if ta else (20, 24))),
        half(rng, *((40, 24) if tb else (24, 40))),
    )


def test_matmul_of_batches(rng):
    a, b, bias = half(rng, 2, 1, 20, 72), half(rng, 3, 72, 40), half(rng, 40)
    compare(lambda *x: pj.matmul(*x[:2], bias=x[2]), lambda a, b, c: a @ b + c, a, b, bias)


def norm(x, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)


def test_norms(rng):
    x, w, b = half(rng, 6, 130), half(rng, 130), half(rng, 130)
    compare(pj.rms_norm, lambda x, w: norm(x, 1e-6) * w, x, w)

    def layer_norm(x, w, b):
        return norm(x - x.mean(-1, keepdims=True), 1e-5) * w + b

    compare(pj.layer_norm, layer_norm, x, w, b)
    compare(lambda x: pj.softmax(x, axis=0), lambda x: jax.nn.softmax(x, 0), x)
    compare(pj.column_sums, lambda x: x.sum(0), x)


def test_norms_of_sums(rng):
    x, r, w, b = half(rng, 6, 130), half(rng, 6, 130), half(rng, 130), half(rng, 130)

    def both(f):
        def run(*arrays):
            y, total = f(*arrays)
            return y + 2 * total

        return run

    def rms(x, r, w):
        return norm(x + r, 1e-6) * w, x + r

    def layer(x, r, w, b):
        total = x + r
        return norm(total - total.mean(-1, keepdims=True), 1e-5) * w + b, total

    compare(both(pj.add_rms_norm), both(rms), x, r, w)
    compare(both(pj.add_layer_norm), both(layer), x, r, w, b)
    plain = both(lambda x, r: layer(x, r, 1, 0))
    compare(both(lambda x, r: pj.add_layer_norm(x, r)), plain, x, r)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal, rng):
    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    q, k, v = half(rng, 1, 50, 4, 64), half(rng, 1, 50, 2, 64), half(rng, 1, 50, 2, 64)
    compare(lambda q, k, v: pj.attention(q, k, v, causal=causal), theirs, q, k, v)


def test_attention_of_any_batch(rng, monkeypatch):
    """Kernels that are told the batch by one more operand: inside jit, and outside."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    for batch, n in ((2, 50), (3, 33)):
        q, k, v = half(rng, batch, n, 4, 64), half(rng, batch, n, 2, 64), half(rng, batch, n, 2, 64)
        compare(lambda q, k, v: pj.attention(q, k, v, causal=True), theirs, q, k, v)
        causal = functools.partial(ops.attention, causal=True)
        same(causal(q, k, v), jax.jit(causal)(q, k, v))
    plgpu.clear_caches()


def test_attention_with_options(rng):
    """A window and a bias, whose gradient is summed over the batch."""
    distance = np.arange(60)[None] - np.arange(50)[:, None]

    def theirs(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias, mask=jnp.asarray(abs(distance) <= 9))

    def ours(q, k, v, bias):
        return pj.attention(q, k, v, bias=bias, window=(9, 9))

    q, k, v = half(rng, 2, 50, 2, 64), half(rng, 2, 60, 2, 64), half(rng, 2, 60, 2, 64)
    compare(ours, theirs, q, k, v, half(rng, 1, 2, 50, 60))


def test_attention_with_rotary(rng):
    angles = rng.random((50, 32)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def theirs(q, k, v):
        def rotated(x):
            (a, b), c, s = jnp.split(x, 2, -1), cos[:, None], sin[:, None]
            return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

        return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)

    q, k, v = half(rng, 1, 50, 4, 64), half(rng, 1, 50, 2, 64), half(rng, 1, 50, 2, 64)
    compare(lambda q, k, v: pj.attention(q, k, v, cos=cos, sin=sin, causal=True), theirs, q, k, v)


def test_ragged_dot(rng):
    sizes = jnp.asarray([5, 0, 9], jnp.int32)

    def theirs(x, w):
        return jnp.concatenate([x[:5] @ w[0], x[5:14] @ w[2], jnp.zeros((6, 40))])

    compare(
        lambda x, w: pj.ragged_dot(x, w, sizes), theirs, half(rng, 20, 72), half(rng, 3, 72, 40)
    )


def test_mixed_matmul(rng):
    weights = jnp.asarray(rng.integers(-9, 9, (40, 128)), jnp.int8)

    def theirs(x, s):
        return x @ (weights.reshape(40, 2, 64) * s.T[:, :, None]).reshape(40, 128).T

    x, s = half(rng, 7, 128) * 0.1, half(rng, 2, 40)
    compare(lambda x, s: pj.mixed_matmul(x, weights, s), theirs, x, s)


def test_gated_linear_unit(rng):
    gate, up = half(rng, 5, 34), half(rng, 5, 34)
    compare(pj.gated_linear_unit, lambda g, u: jax.nn.silu(g) * u, gate, up)

    def geglu(x):
        g, u = jnp.split(x, 2, -1)
        return jax.nn.gelu(g) * u

    both = jnp.concatenate([gate, up], -1)
    compare(lambda x: pj.gated_linear_unit(x, activation="gelu"), geglu, both)


@pytest.mark.parametrize("transposed", [False, True])
def test_gated_matmul(transposed, rng):
    x, gate, up = half(rng, 20, 72), half(rng, 72, 40) * 0.1, half(rng, 72, 40) * 0.1

    def of_two(x, g, u):
        g, u = (g.T, u.T) if transposed else (g, u)
        return jax.nn.silu(x @ g) * (x @ u)

    gate, up = (gate.T, up.T) if transposed else (gate, up)
    along, options = int(not transposed), {"transpose_b": transposed}
    compare(lambda x, g, u: pj.gated_matmul(x, g, u, **options), of_two, x, gate, up)
    both = jnp.concatenate([gate, up], along)
    compare(
        lambda x, w: pj.gated_matmul(x, w, **options),
        lambda x, w: of_two(x, *jnp.split(w, 2, along)),
        x, both,
    )  # fmt: skip


def test_rotary_and_cross_entropy(rng):
    angles = jnp.asarray(rng.random((10, 16)), F32)

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    x = half(rng, 2, 10, 3, 32)
    tables = jnp.cos(angles), jnp.sin(angles)
    compare(lambda x: pj.rotary(x, *tables), rotated, x)
    compare(
        lambda x, w: pj.rotary(x, *tables, w), lambda x, w: rotated(norm(x, 1e-6) * w),
        x, half(rng, 32),
    )  # fmt: skip
    targets = jnp.asarray([3, 0, 40], jnp.int32)

    def losses(x):
        return -jax.nn.log_softmax(x)[jnp.arange(3), targets]

    compare(lambda x: pj.cross_entropy(x, targets), losses, half(rng, 3, 41), tolerance=1e-3)


def test_only_arrays_by_name_are_traced(rng):
    x, w = half(rng, 9, 40), half(rng, 40)
    got = jax.jit(lambda w: ops.rms_norm(x, weight=w))(w)
    np.testing.assert_array_equal(got, ops.rms_norm(x, weight=w))


def test_ops_without_derivatives(rng):
    """The functions of `ops` themselves, in jit."""
    a, b = half(rng, 20, 72), half(rng, 72, 40)
    got = jax.jit(lambda a, b: ops.matmul(a, b, out_dtype=F32))(a, b)
    want = np.asarray(a, F32) @ np.asarray(b, F32)
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-2)
