"""What a call of a kernel makes of its arguments on the host: memory that arrays share, 64-bit
inputs, streams."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops, pl

N = 64


def shaped(*shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def add(x, y, o):
    o[...] = x[...] + y[...]


def kernel(body=add, out_type=None, **options):
    return plgpu.kernel(body, out_type=out_type or shaped(N), interpret=True, **options)


# ---- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-N + 1, -7, 1, N // 2, N - 1])
@pytest.mark.parametrize("which", [0, 1])
def test_out_that_overlaps_an_operand_partly(which, shift, rng):
    memory = rng.standard_normal(3 * N).astype(np.float32)
    at = memory[N : 2 * N]
    args = [memory[N + shift : 2 * N + shift], memory[:0]]
    args[1] = rng.standard_normal(N).astype(np.float32)
    if which:
        args.reverse()
    before = memory.copy()
    shared = 4 * (N - abs(shift))
    with pytest.raises(ValueError, match=rf"out\[0\] and argument {which} share {shared} bytes"):
        kernel()(*args, out=at)
    assert (memory == before).all()


def test_arrays_beside_each_other_and_in_place(rng):
    memory = rng.standard_normal(3 * N).astype(np.float32)
    x, y, o = memory[:N], memory[N : 2 * N], memory[2 * N :]
    want = x + y
    assert kernel()(x, y, out=o) is o and (o == want).all()
    assert kernel()(x, y, out=x) is x and (x == want).all()
    doubled = kernel()(y, y, out=y)  # both operands are the output
    assert doubled is y and (y == (want - o) + y).all()


def test_out_of_another_shape_of_the_same_memory(rng):
    x = rng.standard_normal((8, 8)).astype(np.float32)

    def scale(x, o):
        o[...] = x[...].reshape(64) * 2

    want = x.reshape(64) * 2
    assert (kernel(scale)(x, out=x.reshape(64)) == want).all()


def test_views_that_are_copied_share_nothing(rng):
    memory = rng.standard_normal(2 * N).astype(np.float32)
    want = memory[::2] + memory[::-2]
    got = memory[:N]
    assert kernel()(memory[::2], memory[::-2], out=got) is got and (got == want).all()


def test_outputs_that_share_memory(rng):
    x = rng.standard_normal(N).astype(np.float32)

    def both(x, a, b):
        a[...], b[...] = x[...] + 1, x[...] + 2

    k = kernel(both, [shaped(N), shaped(N)])
    memory = np.zeros(2 * N, np.float32)
    for a, b in [(0, 0), (0, N - 1), (N // 2, 0)]:
        with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] share"):
            k(x, out=[memory[a : a + N], memory[b : b + N]])
    assert not memory.any()
    a, b = k(x, out=[memory[N:], memory[:N]])
    assert (a == x + 1).all() and (b == x + 2).all()


def test_elements_of_four_bits_have_a_byte_each_in_numpy():
    memory = np.zeros(3 * N, np.int8).view("int4")

    def copy(x, o):
        o[...] = x[...]

    k = kernel(copy, shaped(N, dtype="int4"))
    with pytest.raises(ValueError, match="share 1 bytes"):
        k(memory[:N], out=memory[N - 1 : 2 * N - 1])
    k(memory[:N], out=memory[N : 2 * N])


def test_pallas_call_and_nested_arguments(rng):
    memory = rng.standard_normal(2 * N).astype(np.float32)
    call = pl.pallas_call(
        lambda x, o: o.__setitem__(..., x[...] + 1),
        out_shape=shaped(N),
        input_output_aliases={0: 0},
        interpret=True,
    )
    with pytest.raises(ValueError, match="share"):
        call(memory[:N], out=memory[1 : N + 1])
    want = memory[:N] + 1
    assert (call(memory[:N], out=memory[:N]) == want).all()
    nested = kernel(lambda xs, o: o.__setitem__(..., xs["a"][...] + 1))
    with pytest.raises(ValueError, match="argument 0 share"):
        nested({"a": memory[:N]}, out=memory[1 : N + 1])


def test_ops_that_cannot_work_in_place(rng):
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    with pytest.raises(ValueError, match=r"matmul: out\[0\] and argument 1 .*in place"):
        ops.matmul(a, b, out=b)
    with pytest.raises(ValueError, match=r"matmul: out\[0\] and argument 0 .*in place"):
        ops.matmul.kernel(a, b)(a, b, out=a)
    q, k, v = (rng.standard_normal((1, 64, 2, 64)).astype(np.float16) for _ in range(3))
    bare, want = ops.attention.kernel(q, k, v), ops.attention(q, k, v)
    with pytest.raises(ValueError, match=r"attention: out\[0\] and argument 0 .*in place"):
        bare(q, k, v, out=q)
    assert (bare(q, k, v) == want).all()
    x = rng.standard_normal((4, 256)).astype(np.float32)
    want = ops.softmax(x)
    assert ops.softmax(x, out=x) is x and (x == want).all()


# ---- 64 bits -------------------------------------------------------------------------------------

WIDE = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}


def copy_of(dtype, shape=(N,)):
    def copy(x, o):
        assert x.dtype == dtype
        o[...] = x[...]

    return kernel(copy, shaped(*shape, dtype=dtype))


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("form", ["plain", "strided", "swapped", "2d", "scalar", "0d"])
@pytest.mark.filterwarnings("error")
def test_arrays_of_64_bits_are_converted_with_one_warning(wide, form, rng):
    dtype = WIDE[wide]
    x = rng.integers(0, 1000, (4, N)).astype(wide)
    x = {
        "plain": x[0],
        "strided": x[:, ::-2],
        "swapped": x[0].astype(np.dtype(wide).newbyteorder()),
        "2d": x.T,
        "scalar": x[0, 0],
        "0d": np.array(x[0, 0]),
    }[form]
    k = copy_of(dtype, x.shape)
    with pytest.warns(UserWarning, match=f"argument 0 of {wide} was converted to {dtype.__name__}"):
        got = k(x)
    assert got.dtype == dtype and (got == x).all()
    assert (k(x) == x).all()  # and no second warning, which would be an error here
    with pytest.warns(UserWarning):
        copy_of(dtype, x.shape)(x)


def test_the_commonest_array(rng):
    with pytest.warns(UserWarning, match="int64"):
        assert (copy_of(np.int32, (3,))(np.arange(3)) == [0, 1, 2]).all()


@pytest.mark.parametrize(
    "wide, value, fits",
    [
        ("int64", 2**31, False),
        ("int64", -(2**31) - 1, False),
        ("int64", 2**31 - 1, True),
        ("int64", -(2**31), True),
        ("int64", 2**62 + 5, False),
        ("uint64", 2**32, False),
        ("uint64", 2**32 - 1, True),
        ("float64", 1e39, False),
        ("float64", -1e300, False),
        ("float64", 3.4028235e38, True),
        ("float64", np.inf, True),
        ("float64", -np.inf, True),
        ("float64", np.nan, True),
        ("float64", 1e-300, True),
        ("float64", 0.1, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*converted")
def test_values_are_checked(wide, value, fits):
    dtype = WIDE[wide]
    x = np.zeros((4, N), wide)
    x[2, 5] = value
    k, one = copy_of(dtype, (4, N)), copy_of(dtype, ())
    if fits:
        with np.errstate(all="ignore"):
            want = x.astype(dtype)
        np.testing.assert_array_equal(k(x), want)
        np.testing.assert_array_equal(one(x[2, 5]), want[2, 5])
        return
    at = r"at index \(2, 5\) does not fit"
    with pytest.raises(OverflowError, match=rf"argument 0 \(numpy.ndarray of {wide}\).*{at}"):
        k(x)
    with pytest.raises(OverflowError, match=rf"argument 0 \(numpy.{wide}\)"):
        one(x[2, 5])
    x[2, 5] = 7
    assert (k(x) == x).all()  # and the next call works


@pytest.mark.filterwarnings("error")
def test_numbers_of_python_need_no_warning():
    def body(i, f, o):
        o[...] = i[...] + f[...]

    k = kernel(body, shaped())
    assert k(2, 0.5) == 2.5 and k(-(2**31), 0.0) == -(2.0**31)
    for args, which in [((2**31, 0.0), 0), ((-(2**31) - 1, 0.0), 0), ((0, 1e39), 1)]:
        with pytest.raises(OverflowError, match=f"argument {which} .*does not fit"):
            k(*args)
    assert k(0, float("inf")) == np.inf


@pytest.mark.filterwarnings("error")
def test_what_is_written_must_have_the_dtype():
    k = copy_of(np.float32)
    x = np.zeros(N, np.float32)
    for wide in WIDE:
        cast = rf"x.astype\('{WIDE[wide].__name__}'\)"
        with pytest.raises(TypeError, match=rf"out\[0\].*dtype {wide}.*{cast}"):
            k(x, out=np.zeros(N, wide))
        ref = plgpu.new_ref(np.zeros(N, wide))

        def change(r):
            r[...] = r[...] + 1

        with pytest.raises(TypeError, match=f"dtype {wide}.*astype"):
            kernel(change, ())(ref)
        with pytest.raises(TypeError, match=f"dtype {wide}.*astype"):
            pl.kernel(lambda: change(ref), mesh=plgpu.Mesh(), interpret=True)()  # noqa: B023
    with pytest.raises(TypeError, match="complex128"):
        k(np.zeros(N, complex))
    with pytest.raises(TypeError, match="float128|longdouble"):
        k(np.zeros(N, np.longdouble))


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_stays_one():
    k = copy_of(np.int32)
    for _ in range(2):
        with pytest.raises(UserWarning, match="int64"):
            k(np.arange(N))


@pytest.mark.filterwarnings("ignore:.*converted", "ignore:.*interpreter")
def test_nested_arguments_families_and_ops(rng):
    x = rng.standard_normal((4, N))
    nested = kernel(lambda xs, o: o.__setitem__(..., xs["a"][...]), shaped(4, N))
    assert (nested({"a": x}) == x.astype("f4")).all()
    want = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(ops.softmax(x), want, rtol=1e-5)
    call = pl.pallas_call(
        lambda x, o: o.__setitem__(..., x[...]), out_shape=shaped(4, N), interpret=True
    )
    assert (call(x) == x.astype("f4")).all()
    assert (plgpu.vmap(copy_of(np.float32))(x) == x.astype("f4")).all()
    low = copy_of(np.float32).lower(x[0])
    assert "float32" in low.as_text()
