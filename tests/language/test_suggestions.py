"""Messages for slips of newcomers: what was probably meant, and where."""

import warnings

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, ops, pl
from pallas_mgpu import numpy as jnp

OUT = plgpu.ShapeDtypeStruct((64,), np.float32)
X = np.ones(64, np.float32)


def run(body, *args, **options):
    return plgpu.kernel(body, out_type=OUT, interpret=True, **options)(*(args or (X,)))


@pytest.mark.parametrize(
    "namespace, name, meant",
    [
        (plgpu, "copy_gmem_to_smen", "'copy_gmem_to_smem'"),
        (plgpu, "axis_index", "lax.axis_index"),
        (plgpu, "autotuen", "'autotune'"),
        (plgpu, "smem", "'SMEM'"),
        (plgpu, "jnp", "from pallas_mgpu import numpy as jnp"),
        (jnp, "softmax", "nn.softmax"),
        (jnp, "maximun", "'maximum'"),
        (lax, "softmax", "nn.softmax"),
        (pl, "whem", "'when'"),
        (nn, "geluu", "'gelu'"),
    ],
)
def test_misspelt_names(namespace, name, meant):
    with pytest.raises(AttributeError, match=meant):
        getattr(namespace, name)


@pytest.mark.parametrize(
    "call, meant",
    [
        (lambda: plgpu.kernel(print, out_typ=OUT), "'out_type'"),
        (lambda: plgpu.Barrier(num_arrival=2), "'num_arrivals'"),
        (lambda: plgpu.BlockSpec((64,), delay_relese=1), "'delay_release'"),
        (lambda: plgpu.InterpretParams(detect_race=True), "'detect_races'"),
        (lambda: plgpu.ClusterBarrier(collective_axe=("c",)), "'collective_axes'"),
        (lambda: plgpu.DeviceMesh((2,), ("d",), device=(0,)), "'devices'"),
        (lambda: plgpu.SMEM((64,), np.float32, transform=()), "'transforms'"),
        (lambda: plgpu.vmap(print, in_axis=0), "'in_axes'"),
        (lambda: plgpu.dim("M", multiple=8), "'multiple_of'"),
        (lambda: plgpu.testing.check(print, seed=3), "'seeds'"),
        (lambda: plgpu.CompilerParams(aprox_math=True), "'approx_math'"),
        (lambda: pl.pallas_call(print, OUT, in_spec=[]), "'in_specs'"),
        (lambda: ops.softmax(X, axes=-1), "'axis'"),
    ],
)
def test_misspelt_keywords_on_the_host(call, meant):
    with pytest.raises(TypeError, match=meant):
        call()


def sum_of_axes(x, o):
    o[...] = jnp.sum(x[...], axes=0)  # line of sum


def with_barier(x, o):
    plgpu.copy_gmem_to_smem(x, o, barier=None)  # line of barier


def late_release(x, o):
    plgpu.emit_pipeline(print, grid=(2,), delay_release=1)(x)  # line of delay_release


def formatted(x, o):
    print(f"{x[0]:.3f}")  # line of format


def index_map(x, o):
    spec = plgpu.BlockSpec((32,), lambda i: i.number)  # line of number
    plgpu.emit_pipeline(lambda i, a: None, grid=(2,), in_specs=[spec])(x)


@pytest.mark.parametrize(
    "body, error, meant, line",
    [
        (sum_of_axes, TypeError, "'axis'", "sum"),
        (with_barier, TypeError, "'barrier'", "barier"),
        (late_release, TypeError, "BlockSpec", "delay_release"),
        (formatted, TypeError, "debug_print", "format"),
        (index_map, AttributeError, "number", "number"),
    ],
)
def test_errors_in_bodies_have_the_users_line(body, error, meant, line):
    with pytest.raises(error) as e:
        run(body)
    text = str(e.value)
    assert meant in text and text.count("\n  at ") == 1
    number = next(
        k
        for k, source in enumerate(open(__file__).read().splitlines(), 1)
        if source.endswith(f"# line of {line}")
    )
    assert f"{__file__}:{number}" in text


def test_arguments_that_are_lists_or_none():
    def body(x, o):
        o[...] = x[...]

    with pytest.raises(TypeError, match="argument 0 is a list of numbers.*np.asarray"):
        run(body, [1.0] * 64)
    with pytest.raises(TypeError, match=r"argument 0 \(x\) of kernel body is None"):
        run(body, None)


def test_masked_arrays_are_refused():
    """They would lose their mask; what they hold is taken without it."""

    def body(x, o):
        o[...] = x[...] + 1

    masked = np.ma.masked_array(X, X > 0)
    kernel = plgpu.kernel(body, out_type=OUT, interpret=True)
    for call in (lambda: kernel(masked), lambda: ops.softmax(masked)):
        with pytest.raises(TypeError, match=r"argument 0.*masked array.*filled"):
            call()
    with pytest.raises(TypeError, match=r"out\[0\].*masked array"):
        kernel(X, out=masked)
    assert (kernel(masked.data) == X + 1).all() and (kernel(masked.filled(2)) == 3).all()


def test_leaked_values_say_where_they_were_made():
    leaked = []

    def body(x, o):
        leaked.append(x[...])  # made here
        o[...] = x[...]

    run(body)
    with pytest.raises(TypeError, match=r"float32\[64\]\), made at .*test_suggestions.py:\d+,"):
        leaked[0] + 1


def test_scratch_that_nothing_writes():
    """It says so if something reads it."""
    scratch = {"scratch_types": {"parts": plgpu.ext.SharedScratch((64,), np.float32)}}

    def reads(x, out, parts):
        out[...] = x[...] + parts[...]

    def ignores(x, out, parts):
        out[...] = x[...]

    found = plgpu.kernel(reads, out_type=OUT, **scratch).lower(X).graph.warnings
    assert "nothing writes output 1 (parts)" in found[0]
    assert not plgpu.kernel(ignores, out_type=OUT, **scratch).lower(X).graph.warnings


def test_outputs_that_nothing_writes():
    def silent(x, out):
        pass

    def never(x, out):
        @pl.when(False)
        def _():
            out[...] = x[...]

    def sometimes(x, out):
        @pl.when(x[0] > 2)
        def _():
            out[...] = x[...]

    def by_source(x, out):
        plgpu.inline_cuda("", arg_types=(plgpu.RefType(),))(out)

    for body in (silent, never):
        with pytest.warns(
            UserWarning, match=rf"kernel {body.__name__}: nothing writes output 0 \(out"
        ) as seen:
            run(body)
        assert {w.filename for w in seen} == {__file__}  # where the kernel was called
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        plgpu.testing.check(plgpu.kernel(silent, out_type=OUT), X, seeds=3)
    assert len(seen) == 1 and seen[0].filename == __file__
    lowered = plgpu.kernel(silent, out_type=OUT, interpret=True).lower(X)
    assert "nothing writes output 0" in lowered.graph.warnings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(sometimes)
        plgpu.kernel(by_source, out_type=OUT).lower(X).as_text("cuda")
        pl.pallas_call(lambda x, o: None, OUT, input_output_aliases={0: 0}, interpret=True)(X)
