"""Misuse: the exception type of the language, a text with the argument and the user's line, and a
working process afterwards."""

import os
import subprocess
import sys

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = plgpu.ShapeDtypeStruct((128,), np.float32)
X = np.ones(128, np.float32)


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def still_works():
    np.testing.assert_array_equal(plgpu.kernel(add_one, out_type=F32, interpret=True)(X), X + 1)


def fails(error, text, body, *args, out=F32, line=True, **options):
    """The kernel raises ``error`` with ``text`` and names a line of this file; then another one
    runs."""
    kernel = plgpu.kernel(body, out_type=out, interpret=True, **options)
    with pytest.raises(error, match=text) as info:
        kernel(*(args or (X,)))
    trace = "".join(str(t.path) for t in info.traceback)
    assert not line or "test_errors.py" in str(info.value) or "test_errors.py" in trace
    still_works()
    return info.value


def test_store_shape_and_dtype():
    def shape(x, o):
        o[...] = x[0:64]

    def scalar(x, o):
        o[...] = 1.0

    def dtype(x, o):
        o[...] = x[...].astype(jnp.float16)

    def integer(x, o):
        o[...] = jnp.zeros((128,), jnp.int32)

    fails(ValueError, "Invalid shape for `swap`", shape)
    fails(ValueError, "Invalid shape for `swap`", scalar)
    fails(ValueError, "Invalid dtype for `swap`", dtype)
    fails(ValueError, "Invalid dtype for `swap`", integer)


def test_indices():
    def high(x, o):
        o[0] = x[128]

    def many(x, o):
        o[0] = x[0, 0]

    def ellipses(x, o):
        o[0] = x[..., ...]

    def bound(x, o):
        o[...] = x[lax.axis_index("g") :]

    def size(x, o):
        o[...] = x[pl.ds(0, lax.axis_index("g"))]

    fails(ValueError, "128", high)
    fails(ValueError, "indices|rank", many)
    fails(ValueError, r"one \.\.\.", ellipses)
    fails(TypeError, "", bound, grid=(2,), grid_names=("g",))
    fails(NotImplementedError, "Dynamic slice size", size, grid=(2,), grid_names=("g",))


def test_out_of_bounds_access_names_the_line():
    """A dynamic index outside the array, found when it happens."""

    def read(x, o):
        i = lax.axis_index("g") + 100
        o[pl.ds(0, 64)] = x[pl.ds(i, 64)]

    e = fails(IndexError, "x", read, grid=(1,), grid_names=("g",))
    assert "test_errors.py:" in str(e)

    def write(x, o):
        o[lax.axis_index("g") - 1] = 1.0

    e = fails(IndexError, "o", write, grid=(1,), grid_names=("g",))
    assert "test_errors.py:" in str(e)


def test_deadlock_says_who_waits_where():
    def body(x, o, bar):
        plgpu.barrier_wait(bar)

    e = fails(plgpu.DeadlockError, "barrier", body, scratch_types=[plgpu.Barrier(num_arrivals=2)])
    assert "test_errors.py:" in str(e) and "0" in str(e)

    def circle(x, o, a, b):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            plgpu.barrier_wait(a)
            plgpu.barrier_arrive(b)

        @pl.when(t == 1)
        def _():
            plgpu.barrier_wait(b)
            plgpu.barrier_arrive(a)

    e = fails(
        plgpu.DeadlockError,
        "barrier",
        circle,
        scratch_types=[plgpu.Barrier(), plgpu.Barrier()],
        num_threads=2,
        thread_name="t",
    )
    assert str(e).count("test_errors.py:") >= 2


def test_python_control_flow_on_traced_values():
    """Every row of the language's table of concretisation errors, as its own type and as
    TypeError."""
    cases = [
        (plgpu.TracerBoolConversionError, lambda x: 1 if x[0] > 0 else 0),
        (plgpu.TracerBoolConversionError, lambda x: x[0] > 0 and x[1] > 0),
        (plgpu.TracerBoolConversionError, lambda x: max(x[0], x[1])),
        (TypeError, lambda x: range(x[0].astype(jnp.int32))),
        (TypeError, lambda x: [1, 2][x[0].astype(jnp.int32)]),
        (plgpu.ConcretizationTypeError, lambda x: int(x[0])),
        (plgpu.ConcretizationTypeError, lambda x: float(x[0])),
        (TypeError, lambda x: {x[0]: 1}),
        (TypeError, lambda x: x[...].__setitem__(0, 1)),
        (TypeError, lambda x: list(x[0])),
        (plgpu.TracerArrayConversionError, lambda x: np.asarray(x[...])),
    ]
    for error, f in cases:

        def body(x, o, f=f):
            f(x)

        fails(error, "", body)
        assert issubclass(error, TypeError)


def test_leaked_values():
    kept = []

    def leak(x, o):
        kept.append(x[...])
        o[...] = kept[0]

    plgpu.kernel(leak, out_type=F32, interpret=True)(X)

    def use(x, o):
        o[...] = kept[0] + 1

    fails(plgpu.UnexpectedTracerError, "", use)


def test_kernel_arguments():
    with pytest.raises(ValueError, match="Cannot specify both"):
        plgpu.kernel(add_one, out_shape=F32, out_type=F32)
    with pytest.raises(ValueError, match="Cannot specify both"):
        plgpu.kernel(add_one, out_type=F32, scratch_types=(), scratch_shapes=())
    with pytest.raises(ValueError, match="go together"):
        plgpu.kernel(add_one, out_type=F32, num_threads=2)
    with pytest.raises(ValueError, match="differ in length"):
        plgpu.kernel(add_one, out_type=F32, grid=(2, 3), grid_names=("a",))
    with pytest.raises(ValueError, match="at most 3"):
        plgpu.kernel(add_one, out_type=F32, cluster=(1, 1, 1, 1), cluster_names="abcd")
    with pytest.raises(TypeError, match="thead_name"):
        plgpu.kernel(add_one, out_type=F32, thead_name="t")
    with pytest.raises(TypeError, match="CompilerParams"):
        plgpu.kernel(add_one, out_type=F32, compiler_params={})
    with pytest.raises(TypeError, match="scratch_types"):
        plgpu.kernel(add_one, out_type=F32, scratch_types=plgpu.SMEM((1,), np.float32))
    fails(ValueError, "must return None", lambda x, o: 5)
    fails(NameError, "unbound axis name", lambda x, o: lax.axis_index("nope"))
    fails(ValueError, "axis", lambda x, o: pl.program_id(1), grid=(2,))
    with pytest.raises(TypeError):
        plgpu.kernel(add_one, out_type=F32, interpret=True)()
    with pytest.raises(TypeError):
        plgpu.kernel(add_one, out_type=F32, interpret=True)("text")
    still_works()


def test_closures_over_arrays():
    table = np.arange(128, dtype=np.float32)

    def body(x, o):
        o[...] = x[...] + table

    fails((ValueError, TypeError, NotImplementedError), "captur|scalar", body)


def test_descriptors():
    with pytest.raises(ValueError, match="32, 64 or 128"):
        plgpu.SwizzleTransform(16)
    with pytest.raises(ValueError, match="exactly 64 elements"):
        plgpu.SMEM(
            (64, 64),
            np.float16,
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        )
    with pytest.raises(ValueError, match="not divisible"):
        plgpu.SMEM(
            (60, 64),
            np.float16,
            transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
        )
    with pytest.raises(ValueError, match="at least 1"):
        plgpu.Barrier(num_arrivals=0)
    with pytest.raises(TypeError, match=r"plgpu.Barrier\(num_arrivals"):
        plgpu.Barrier(num_threads=32)
    with pytest.raises(ValueError, match="multiple of 64"):
        plgpu.ACC((100, 64))
    with pytest.raises(ValueError, match="only TMEM takes"):
        plgpu.SMEM((64,), np.float32, packed=True)
    with pytest.raises(TypeError, match="max_concurrent_steps"):
        plgpu.pipelines.PipelineParams(num_stages=3)
    with pytest.raises(AttributeError, match="plgpu.kernel"):
        plgpu.triton_call  # noqa: B018
    with pytest.raises(ValueError, match="private"):
        plgpu.kernel(
            lambda x, o, acc: None,
            out_type=F32,
            num_threads=2,
            thread_name="t",
            interpret=True,
            scratch_types=[plgpu.ACC((64, 64))],
        )(X)


def test_wgmma_rules():
    def run(acc, a, b, transpose=False, error=ValueError, text="wgmma"):
        def body(x, o, a_smem, b_smem):
            pl.run_scoped(lambda c: plgpu.wgmma(c, a_smem, b_smem.T if transpose else b_smem), acc)

        fails(error, text, body, scratch_types=[a, b])

    half, single = np.float16, np.float32
    run(plgpu.ACC((64, 64)), plgpu.SMEM((64, 64), half), plgpu.SMEM((32, 64), half))
    run(plgpu.ACC((64, 64)), plgpu.SMEM((128, 64), half), plgpu.SMEM((64, 64), half))
    run(plgpu.ACC((64, 512)), plgpu.SMEM((64, 64), half), plgpu.SMEM((64, 512), half))
    run(plgpu.ACC((64, 64)), plgpu.SMEM((64, 64), half), plgpu.SMEM((64, 64), jnp.bfloat16))
    run(
        plgpu.ACC((64, 64)),
        plgpu.SMEM((64, 64), single),
        plgpu.SMEM((64, 64), single),
        error=(NotImplementedError, ValueError),
        text="",
    )
    fails(TypeError, "ACC", lambda x, o: plgpu.wgmma(o, o, o))


def test_contradictory_transforms():
    """Operands of one product with different swizzles given by the user."""

    def body(x, o, a, b):
        pl.run_scoped(lambda acc: plgpu.wgmma(acc, a, b), plgpu.ACC((64, 64)))

    def smem(w):
        return plgpu.SMEM(
            (64, 64),
            np.float16,
            transforms=(plgpu.TilingTransform((8, w // 2)), plgpu.SwizzleTransform(w)),
        )

    e = fails((ValueError, NotImplementedError), "", body, scratch_types=[smem(128), smem(64)])
    assert "swizzle" in str(e) or "Failed to infer" in str(e)


def test_smem_too_large_shows_a_table():
    def body(x, o, a, b):
        a[...] = jnp.zeros(a.shape, jnp.float32)
        b[...] = jnp.zeros(b.shape, jnp.float32)
        o[...] = a[0, :128] + b[0, :128]

    e = fails(
        ValueError,
        "exceeds available shared memory",
        body,
        scratch_types=[plgpu.SMEM((128, 256), np.float32), plgpu.SMEM((128, 256), np.float32)],
    )
    assert "131072" in str(e) and "232448" in str(e)


def test_copies():
    def spaces(x, o, s, bar):
        plgpu.copy_gmem_to_smem(s, x, bar)

    def dtype(x, o, s, bar):
        plgpu.copy_gmem_to_smem(x.at[0:64], s, bar)

    def several(x, o, s, bars):
        plgpu.barrier_wait(bars)

    def none(x, o, s, bar):
        plgpu.copy_gmem_to_smem(x.at[0:64], s)

    scratch = [plgpu.SMEM((64,), np.float16), plgpu.Barrier()]
    fails(ValueError, "GMEM", spaces, scratch_types=scratch)
    fails(ValueError, "float16", dtype, scratch_types=scratch)
    fails(
        ValueError, "index it", several, scratch_types=[scratch[0], plgpu.Barrier(num_barriers=3)]
    )
    scratch[0] = plgpu.SMEM((64,), np.float32)  # with barriers every copy needs one
    fails(ValueError, "pass a barrier to plgpu.copy_gmem_to_smem", none, scratch_types=scratch)
    fails(
        NotImplementedError,
        "32 barriers",
        lambda x, o, b: None,
        scratch_types=[plgpu.Barrier(num_barriers=33)],
    )


def test_error_in_the_body_is_the_users_own():
    class Mine(Exception):
        pass

    def body(x, o):
        def deep(_):
            raise Mine("from the body")

        lax.fori_loop(0, 3, lambda i, c: pl.run_scoped(deep, plgpu.SMEM((128,), np.float32)), 0)

    fails(Mine, "from the body", body)


def test_no_gpu_backend_cuda():
    """PALLAS_MGPU_BACKEND=cuda without a GPU is a clear error; interpret forces the interpreter."""
    code = (
        "import numpy as np, pallas_mgpu as plgpu\n"
        "def f(x, o): o[...] = x[...] + 1\n"
        "k = plgpu.kernel(f, out_type=plgpu.ShapeDtypeStruct((128,), np.float32))\n"
        "print(k(np.ones(128, np.float32))[0])\n"
    )
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", PALLAS_MGPU_BACKEND="cuda")
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (
        out.returncode and "PALLAS_MGPU_BACKEND" in out.stderr and "Segmentation" not in out.stderr
    )
    env["PALLAS_MGPU_BACKEND"] = "interpret"
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True
    )
    assert out.stdout.strip() == "2.0", out.stderr
    env["PALLAS_MGPU_BACKEND"] = "nonsense"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.returncode and "nonsense" in out.stderr
