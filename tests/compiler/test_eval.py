"""What is known before a kernel runs (csrc/ir/eval.c): constants, and what follows from the index
of the thread."""

import functools
import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

# ---- constants -----------------------------------------------------------------------------------

TWO = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lax.div,
    "rem": lax.rem,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "shl": jnp.left_shift,
    "shr": jnp.right_shift,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
ONE = {"neg": jnp.negative, "abs": jnp.abs, "sign": jnp.sign, "not": jnp.bitwise_not}
ON_BOOLS = ("and", "or", "xor", "eq", "ne", "not")
DTYPES = (np.int16, np.uint16, np.int32, np.uint32, np.bool_)


def samples(dtype):
    if dtype == np.bool_:
        return [False, True]
    info = np.iinfo(dtype)
    return [0, 1, 2, 7, int(info.max), int(info.max) // 3, int(info.min), int(info.min) // 5]


CASES = [(op, d) for op in (*TWO, *ONE) for d in DTYPES if d != np.bool_ or op in ON_BOOLS]


@pytest.mark.parametrize("op, dtype", CASES, ids=lambda x: x if type(x) is str else x.__name__)
def test_constants(op, dtype):
    """An op on constants gives the constant that it computes where it runs."""
    f, arity = (TWO[op], 2) if op in TWO else (ONE[op], 1)
    rows = [(a, b) for a in samples(dtype) for b in (samples(dtype) if arity == 2 else [0])]
    bits = np.dtype(dtype).itemsize * 8
    if op in ("div", "rem"):
        rows = [(a, b) for a, b in rows if b]
    if op in ("shl", "shr"):
        rows = [(a, b % bits) for a, b in rows]

    def known(x, o):
        for k, (a, b) in enumerate(rows):
            operands = [jnp.full((), v, dtype) for v in (a, b)[:arity]]
            o[k] = f(*operands).astype(jnp.int32)

    def computed(x, o):
        for k in range(len(rows)):
            o[k] = f(*(x[k, j] for j in range(arity))).astype(jnp.int32)

    x = np.array(rows).astype(dtype)
    out = plgpu.ShapeDtypeStruct((len(rows),), np.int32)
    kernel = plgpu.kernel(known, out_type=out, interpret=True)
    ops = set(re.findall(r"^ *%\S+ = (\w+)", kernel.lower(x).as_text("graph"), re.M))
    assert ops <= {"const", "index"}
    want = plgpu.kernel(computed, out_type=out, interpret=True)(x)
    np.testing.assert_array_equal(kernel(x), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("op", TWO)
def test_one_operand_is_constant(op, dtype):
    """Units, numbers that decide alone and equal operands: the result is what both operands give
    where nothing is known before."""
    if dtype == np.bool_ and op not in ON_BOOLS:
        pytest.skip("not on bools")
    f, bits = TWO[op], np.dtype(dtype).itemsize * 8
    numbers = [0, 1, 2] + ([] if op in ("shl", "shr") else [-1])
    numbers = [int(np.array(n).astype(dtype)) for n in numbers]
    values = [int(v) % bits if op in ("shl", "shr") else int(v) for v in samples(dtype)]
    values = [v for v in values if v or op not in ("div", "rem")]
    pairs = [(c, v) for c in numbers for v in values]

    def body(constant, x, o):
        for k, (c, _) in enumerate(pairs):
            v = x[k, 1]
            same = v if constant else x[k, 2]
            number = jnp.full((), c, dtype) if constant else x[k, 0]
            by_zero = op in ("div", "rem") and not c
            for j, two in enumerate([(number, v), (v, v if by_zero else number), (v, same)]):
                o[k, j] = f(*two).astype(jnp.int32)

    x = np.array([(c, v, v) for c, v in pairs]).astype(dtype)
    out = plgpu.ShapeDtypeStruct((len(pairs), 3), np.int32)
    known, computed = (
        plgpu.kernel(functools.partial(body, constant), out_type=out, interpret=True)
        for constant in (True, False)
    )
    np.testing.assert_array_equal(known(x), computed(x))


HALF_KNOWN = {
    "mul 0": (lambda x: x * 0, "const"),
    "0 mul": (lambda x: 0 * x, "const"),
    "and 0": (lambda x: x & 0, "const"),
    "or true": (lambda x: jnp.where((x > 0) | jnp.full((), True), 3, x), "const"),
    "and false": (lambda x: jnp.where(jnp.full((), False) & (x > 0), x, 3), "const"),
    "or 1": (lambda x: x | 1, "or"),
    "rem 1": (lambda x: x % 1, "const"),
    "select": (lambda x: jnp.where(jnp.full((), True), 3, x), "const"),
    "select unknown": (lambda x: jnp.where(x > 0, 3, 4), "select"),
}


@pytest.mark.parametrize("name", HALF_KNOWN)
def test_one_operand_decides(name):
    f, op = HALF_KNOWN[name]

    def body(x, o):
        o[0] = f(x[0])

    x = np.array([5], np.int32)
    kernel = plgpu.kernel(body, out_type=x, interpret=True)
    text = kernel.lower(x).as_text("graph")
    stored = re.search(r"store %\S+, (%\w+)", text)[1]
    assert re.search(rf"{stored} = (\w+)", text)[1] == op
    assert kernel(x)[0] == np.asarray(f(np.int32(5)))


# ---- threads -------------------------------------------------------------------------------------

THREADS = 4
BY_THREAD = {
    "eq": lambda i, x: (i == 1) | (i == 3),
    "lt": lambda i, x: i < 2,
    "not": lambda i, x: ~(i < 2),
    "add": lambda i, x: i + 7 > 8,
    "sub": lambda i, x: 5 - i <= 3,
    "mul": lambda i, x: i * -3 <= -6,
    "floor": lambda i, x: i // 2 == 1,
    "mod": lambda i, x: i % 2 == 0,
    "negative mod": lambda i, x: (i - 4) % 3 != 2,
    "div": lambda i, x: lax.div(i - 3, 2) == 0,
    "rem": lambda i, x: lax.rem(i - 3, 2) == -1,
    "shl": lambda i, x: (1 << i) & 0b0110 != 0,
    "shr": lambda i, x: i >> 1 == 0,
    "xor": lambda i, x: i ^ 3 >= 2,
    "neg": lambda i, x: -i > -2,
    "abs": lambda i, x: abs(i - 2) == 1,
    "sign": lambda i, x: jnp.sign(i - 2) == -1,
    "min": lambda i, x: jnp.minimum(i, 2) == 2,
    "max": lambda i, x: jnp.maximum(i, 1) == 1,
    "where": lambda i, x: jnp.where(i > 1, i - 2, i) == 1,
    "overflows": lambda i, x: i * 0x40000000 < 0,
    "wraps": lambda i, x: (i - 2).astype(jnp.uint16) > 60000,
    "narrows": lambda i, x: (i * 0x8000).astype(jnp.int16) == 0,
    "int of bool": lambda i, x: (i > 1).astype(jnp.int32) * 5 == 5,
    "hint": lambda i, x: pl.multiple_of(i * 8, 8) >= 16,
    "decided": lambda i, x: (i < 2) | ((i == 3) & (i == 2) & (x[0] > 5)),
    "chain": lambda i, x: sum([i] * 100) >= 200,
}


def truth(name):
    """Of each thread, by NumPy."""
    f = BY_THREAD[name]

    def body(x, o):
        i = lax.axis_index("t")
        o[i] = f(i, x).astype(jnp.int32)

    out = plgpu.ShapeDtypeStruct((THREADS,), np.int32)
    options = dict(num_threads=THREADS, thread_name="t", interpret=True)
    return plgpu.kernel(body, out_type=out, **options)(np.zeros(4, np.int32))


@pytest.mark.parametrize("name", BY_THREAD)
def test_branches_of_threads(name):
    """Which threads take a branch, as the message about registers tells."""
    taken = truth(name)
    assert 2 <= taken.sum() < THREADS

    def body(x, o):
        i = lax.axis_index("t")

        def rest():
            plgpu.set_max_registers(24, action="decrease")

        def more():
            plgpu.set_max_registers(256, action="increase")

        lax.cond(BY_THREAD[name](i, x), more, rest)
        o[i] = x[0]

    x = np.zeros(4, np.int32)
    options = dict(num_threads=THREADS, thread_name="t", interpret=True)
    asked = " + ".join("256" if t else "24" for t in taken)
    with pytest.raises(ValueError, match=re.escape(f"ask for {asked} registers a lane")):
        plgpu.kernel(body, out_type=x, **options)(x)


@pytest.mark.parametrize("known", ["grid", "memory", "float"])
def test_branches_of_other_things(known):
    """What the index of the thread does not say is let through."""

    def body(x, o):
        i, g = lax.axis_index("t"), lax.axis_index("g")
        floats = i.astype(jnp.float32) * 0.5
        p = {"grid": g == 2, "memory": x[i] == 2, "float": floats == 1}[known]
        pl.when(p)(lambda: plgpu.set_max_registers(256, action="increase"))
        o[i] = x[0]

    x = np.zeros(4, np.int32)
    options = dict(grid=(3,), grid_names=("g",), num_threads=THREADS, thread_name="t")
    plgpu.kernel(body, out_type=x, interpret=True, **options).lower(x)


@pytest.mark.parametrize("i", [-3, 0, 1, 2, 9])
def test_the_index_of_a_switch_is_clamped(i):
    """Where it is a constant, where the thread's index says it, and where it runs."""

    def body(x, o):
        t = lax.axis_index("t")
        ways = [lambda n=n: jnp.int32(n) for n in (10, 20, 30)]
        o[t, 0] = lax.switch(jnp.full((), i, jnp.int32), ways)
        o[t, 1] = lax.switch(x[0], ways)
        o[t, 2] = lax.switch(t * 0 + x[0], ways)

    out = plgpu.ShapeDtypeStruct((2, 3), np.int32)
    kernel = plgpu.kernel(body, out_type=out, num_threads=2, thread_name="t", interpret=True)
    x = np.array([i], np.int32)
    assert kernel.lower(x).as_text("graph").count("switch") == 2
    np.testing.assert_array_equal(kernel(x), np.full((2, 3), 10 * (min(max(i, 0), 2) + 1)))
