"""Families of kernels: functions of arrays and options that find their kernel."""

import copy
import gc
import inspect
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import nn, pl

f16, f32 = np.float16, np.float32


def make_family():
    """A family that computes scale * x + y, and the list of what it was asked for."""
    made = []

    @plgpu.specialize
    def axpy(x, *, y=None, scale=1.0, activation=None):
        """Its documentation."""
        made.append((x, y, scale, activation))
        if x.ndim != 1:
            raise ValueError("axpy: x must have one dim")

        def body(x_ref, *refs):
            value = x_ref[...] * scale
            if y is not None:
                value = value + refs[0][...]
            refs[-1][...] = value if activation is None else activation(value)

        return plgpu.kernel(body, out_type=x, interpret=True)

    return axpy, made


x, y = np.arange(-4, 4, dtype=f32), np.arange(8, dtype=f32) * 100


def test_calls():
    f, made = make_family()
    for _ in range(2):
        np.testing.assert_array_equal(f(x), x)
        np.testing.assert_array_equal(f(x, scale=3.0, y=y), 3 * x + y)
        np.testing.assert_array_equal(f(x, y=y, scale=3.0, activation=None), 3 * x + y)
        np.testing.assert_array_equal(f(y=y, scale=3.0, x=x), 3 * x + y)
        np.testing.assert_array_equal(f(x, activation=nn.relu), np.maximum(x, 0))
    assert len(made) == 3  # whatever the spelling
    (a, _, scale, _) = made[0]
    assert isinstance(a, plgpu.ArrayInfo) and (a.shape, a.dtype, a.ndim) == ((8,), f32, 1)
    assert a.device is None and a.aligned is True and scale == 1.0
    f(x[:4])
    f(x.astype(f16))
    assert len(made) == 5
    assert f(x[:4]).shape == (4,) and f(x.astype(f16)).dtype == f16
    f(x, scale=1)  # equal to 1.0, of another type
    f(x, scale=True)
    assert len(made) == 7


def test_none_by_position():
    """An operand that is not there may be None by position, too, before others."""

    @plgpu.specialize
    def affine(x, weight=None, bias=None, *, scale=1.0):
        def body(x_ref, *refs):
            *given, o_ref = refs
            value = x_ref[...] * scale
            if weight is not None:
                value = value * given.pop(0)[...]
            o_ref[...] = value + given[0][...] if given else value

        return plgpu.kernel(body, out_type=x, interpret=True)

    np.testing.assert_array_equal(affine(x, None), x)
    np.testing.assert_array_equal(affine(x, None, None, scale=2.0), 2 * x)
    np.testing.assert_array_equal(affine(x, None, y), x + y)
    np.testing.assert_array_equal(affine(x, None, bias=y), x + y)
    np.testing.assert_array_equal(affine(x, y, None), x * y)
    out = np.empty_like(x)
    assert affine(x, None, y, out=out) is out
    assert affine.kernel(x, None, y) is affine.kernel(x, bias=y)
    for call, words in (
        (lambda: affine(None, y), "argument 0 is a NoneType"),
        (lambda: affine(x, None, None, None), "argument 1 is a NoneType"),
        (lambda: affine(x, None, weight=y), "affine: .*multiple values .*'weight'"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_equal_options_are_one(monkeypatch):
    f, made = make_family()

    class Scale(float):
        pass

    for _ in range(3):
        np.testing.assert_array_equal(f(x, scale=Scale(2)), 2 * x)
    assert len(made) == 1
    names = {"".join(["sc", "ale"]): 2.0}
    np.testing.assert_array_equal(f(x, **names), 2 * x)
    np.testing.assert_array_equal(f(x, **{"".join(["sca", "le"]): 2.0}), 2 * x)
    assert len(made) == 2


def test_out():
    f, _ = make_family()
    for out in (np.empty_like(x), (np.empty_like(x),)):
        got = f(x, scale=2.0, out=out)
        np.testing.assert_array_equal(out[0] if isinstance(out, tuple) else out, 2 * x)
        np.testing.assert_array_equal(got, 2 * x)
    np.testing.assert_array_equal(f(x, out=None), x)
    with pytest.raises(ValueError, match=r"out\[0\] must be float32 of shape \(8,\)"):
        f(x, out=np.empty(3, f32))


def test_functions_of_arrays():
    """A family may return any function; arrays come in the order of the signature."""
    calls = []

    @plgpu.specialize
    def pair(*xs, last=None, **more):
        def run(*arrays, out=None):
            calls.append((arrays, out))
            return out

        return run

    a, b, c = np.zeros(1, f32), np.zeros(2, f32), np.zeros(3, f32)
    for _ in range(2):
        assert pair(a, extra=c, last=b, n=3, out=c) is c
        assert pair(a, b) is None
    assert len(calls) == 4
    for given, want, out in zip(calls, [(a, b, c), (a, b)] * 2, [c, None] * 2):
        assert all(p is q for p, q in zip(given[0], want)) and len(given[0]) == len(want)
        assert given[1] is out


def test_kernel():
    f, made = make_family()
    k = f.kernel(plgpu.ShapeDtypeStruct((8,), f32), scale=2.0)
    assert f.kernel(x, scale=2.0) is k and len(made) == 1
    np.testing.assert_array_equal(k(x), 2 * x)
    spec = plgpu.ShapeDtypeStruct((8,), f32)
    assert f.kernel(spec, y=spec) is f.kernel(x, y=y) is f.kernel(y=y, x=x)
    assert "x_ref" in k.lower(x).as_text("cuda")


@pytest.mark.parametrize(
    "call, exception, match",
    [
        (lambda f: f(), TypeError, "axpy: missing a required argument: 'x'"),
        (lambda f: f(x, z=3), TypeError, "axpy: unknown argument 'z'; accepted are x"),
        (lambda f: f(x, y), TypeError, "axpy: too many positional"),
        (lambda f: f("x"), TypeError, "kernel axpy: argument 0 is a str, which is no array"),
        (lambda f: f([x]), TypeError, "kernel axpy: argument 0 is a list, which is no array"),
        (lambda f: f(x, scale=[]), TypeError, "axpy: scale must be an array or hashable, got a li"),
        (lambda f: f(x[None]), ValueError, "one dim"),
        (lambda f: f(x.astype(complex)), TypeError, "complex128"),
        (lambda f: f.kernel(), TypeError, "missing a required argument"),
        (lambda f: f(*[x] * 200), NotImplementedError, "axpy: at most 128"),
    ],
)
def test_errors(call, exception, match):
    f, _ = make_family()
    for _ in range(2):
        with pytest.raises(exception, match=match):
            call(f)
    np.testing.assert_array_equal(f(x), x)

    @plgpu.specialize
    def nothing(x):
        pass

    with pytest.raises(TypeError, match="nothing: a function under specialize returns a kernel"):
        nothing(x)


def test_errors_of_comparison():
    """An option's own comparison may fail, and does not harm the family."""
    f, made = make_family()

    class Odd(float):
        broken = False

        def __hash__(self):
            return 7

        def __eq__(self, other):
            if Odd.broken:
                raise KeyError("broken")
            return self is other

    one, other = Odd(1), Odd(2)
    f(x, scale=one)
    np.testing.assert_array_equal(f(x, scale=other), 2 * x)
    np.testing.assert_array_equal(f(x, scale=one), x)
    assert len(made) == 2
    Odd.broken = True
    with pytest.raises(KeyError, match="broken"):
        f(x, scale=Odd(3))
    np.testing.assert_array_equal(f(x, scale=one), x)


def test_inside_a_kernel():
    f, _ = make_family()

    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    with pytest.raises(TypeError, match="kernel cannot be called inside of another one"):
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((8,), f32), interpret=True)(x)


def test_it_is_a_function():
    f, _ = make_family()
    assert f.__name__ == "axpy" and f.__doc__ == "Its documentation."
    assert str(inspect.signature(f)) == "(x, *, y=None, scale=1.0, activation=None)"
    assert copy.copy(f) is f and copy.deepcopy([f])[0] is f and "axpy" in repr(f)
    f(x)
    f.self = f  # a cycle through the table and the dict
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def test_core_count():
    assert plgpu.sm_count() > 0


def test_checks_that_come_and_go():
    """A kernel that was found without checks does not serve a call with them, nor the other way."""

    @plgpu.specialize
    def half(x):
        def body(x_ref, o_ref):
            pl.debug_check(x_ref[0] < 100, "large")
            o_ref[...] = x_ref[...] / 2

        return plgpu.kernel(body, out_type=x, interpret=True)

    x = np.full(4, 200, f32)
    for _ in range(2):
        np.testing.assert_array_equal(half(x), x / 2)
        with pl.enable_debug_checks(True), pytest.raises(AssertionError, match="large"):
            half(x)


def test_entries_longest_unused_are_dropped():
    """A quarter of 1024 when one more comes; equal hashes of other types are other entries."""
    made = []

    def make(args, arrays, options):
        made.append(options["n"])
        return (lambda x, n=options["n"]: n), (0,)

    family = plgpu._core.Family("family", make, (), 0, True)
    x = np.zeros(4, np.float32)
    assert [family(x, n=n) for n in (1, True, 1.0)] == [1, True, 1.0]
    assert [type(family(x, n=n)) for n in (1.0, True, 1)] == [float, bool, int]
    assert [type(n) for n in made] == [int, bool, float]
    family.forget()
    made.clear()
    for n in [*range(1024), 0]:
        assert family(x, n=n) == n
    assert made == [*range(1024)] and "1024 ways" in repr(family)
    family(x, n=1024)  # 0 was used again: 1 to 256 go
    assert "769 ways" in repr(family)
    made.clear()
    for n in (0, 257, 1023, 1024):
        assert family(x, n=n) == n
    assert not made
    for n in (1, 256):
        assert family(x, n=n) == n
    assert made == [1, 256]


def test_calls_that_come_often_may_get_another_kernel(monkeypatch):
    made, asked, answers = [], [], [None, True, False]

    def make(args, arrays, options):
        made.append(options["n"])
        count = len(made)
        return (lambda x: count), (0,)

    def improve(args, arrays, options):
        asked.append(options["n"])
        return answers.pop(0) if options["n"] == 1 else 1 / 0

    family = plgpu._core.Family("family", make, (), 0, True, improve)
    x = np.zeros(4, np.float32)
    found = [family(x, n=1) for _ in range(1000)]
    assert found == [1] * 256 + [2] * 744 and made == [1, 1] and asked == [1] * 3
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    assert [family(x, n=2) for _ in range(300)] == [3] * 300
    assert asked == [1, 1, 1, 2] and reported == [ZeroDivisionError]


def test_a_better_kernel_is_made_in_the_background():
    begun, go = threading.Event(), threading.Event()

    @plgpu.specialize
    def f(x, *, fails=False):
        return lambda x: 1

    def better(x, *, fails):
        def make():
            begun.set()
            assert go.wait(60) and not fails
            return lambda x: 2

        return make if x.shape[0] > 4 else None

    f.maker.better = better
    x = np.zeros(8, np.float32)
    assert [f(x) for _ in range(400)] == [1] * 400 and begun.wait(60)
    go.set()
    deadline = time.monotonic() + 60
    while f(x) == 1:
        assert time.monotonic() < deadline
    assert [f(x[:4].copy()) for _ in range(400)] == [1] * 400
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [f(x, fails=True) for _ in range(400)] == [1] * 400
