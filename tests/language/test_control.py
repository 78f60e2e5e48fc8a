"""Loops and branches: carries, static and traced bounds, weak types, nesting."""

import itertools

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

I32 = np.zeros(8, np.int32)


def test_fori_loop_forms(run):
    """Static and traced bounds, zero trips, unrolling, pytrees and None in the carry."""

    def body(n_ref, o_ref):
        n = n_ref[0]
        o_ref[0] = lax.fori_loop(0, 10, lambda i, c: c + i, 0)
        o_ref[1] = lax.fori_loop(2, n, lambda i, c: c + i, jnp.int32(100))
        o_ref[2] = lax.fori_loop(n, 2, lambda i, c: c + 1, 5)
        a, (b, none) = lax.fori_loop(
            0, 6, lambda i, c: (c[0] + 1, (c[1][0] * 2, None)), (0, (1, None)), unroll=3
        )
        assert none is None
        o_ref[3], o_ref[4] = a, b
        swap = lax.fori_loop(0, 7, lambda i, c: (c[1], c[0]), (3, 4))
        o_ref[5], o_ref[6] = swap
        o_ref[7] = lax.fori_loop(
            0, 3, lambda i, c: lax.fori_loop(0, i + 1, lambda j, d: d + j * i, c), 0, unroll=True
        )

    got = run(body, I32, np.array([9], np.int32))
    np.testing.assert_array_equal(
        got,
        [
            45,
            100 + sum(range(2, 9)),
            5,
            6,
            64,
            4,
            3,
            sum(j * i for i in range(3) for j in range(i + 1)),
        ],
    )


def test_array_carries(run, rng):
    """Arrays swap places in the carry, a splat start takes the body's layout, weak starts take
    its dtype."""
    x = rng.standard_normal((5, 64, 16)).astype(np.float32)

    def body(x_ref, a_ref, b_ref, s_ref):
        def step(i, c):
            a, b, total = c
            v = x_ref[i]
            return b, a + v, total + jnp.sum(v, axis=1)

        a, b, s = lax.fori_loop(0, 5, step, (x_ref[0], x_ref[1], jnp.zeros(64, jnp.float32)))
        a_ref[...], b_ref[...], s_ref[...] = a, b, s

    a, b = x[0], x[1]
    for v in x:
        a, b = b, a + v
    got = run(body, (x[0], x[0], x[0, :, 0].copy()), x)
    np.testing.assert_allclose(got[0], a, rtol=1e-6)
    np.testing.assert_allclose(got[1], b, rtol=1e-6)
    np.testing.assert_allclose(got[2], x.sum((0, 2)), rtol=1e-4, atol=1e-4)


def test_state_gives_what_its_function_returns(run, rng):
    """A pytree with arrays and other things; the final state where it returns None."""
    x = rng.standard_normal((2, 64)).astype(np.float32)

    def body(x_ref, o_ref):
        def both(state):
            state["a"][...] = state["a"][...] * 2
            return {"sum": state["a"][...] + state["b"][...], "static": 3, "none": None}

        def one(ref):
            ref[...] += 1
            return ref[...] * 10

        out = pl.run_state(both)({"a": x_ref[0], "b": x_ref[1]})
        assert out["static"] == 3 and out["none"] is None
        o_ref[0] = out["sum"]
        o_ref[1] = pl.run_state(one)(x_ref[0])
        o_ref[2] = pl.run_state(lambda r: r.__setitem__(..., r[...] - 1))(x_ref[1])

    got = run(body, np.zeros((3, 64), np.float32), x)
    np.testing.assert_array_equal(got, [2 * x[0] + x[1], (x[0] + 1) * 10, x[1] - 1])


def test_state_of_an_accumulator(run, rng):
    """What is returned is read while products may be in flight; an array is held beside it."""
    x = rng.standard_normal((64, 64)).astype(np.float16)

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...]
        plgpu.commit_smem()

        def f(state):
            for _ in range(2):
                plgpu.wgmma(state["acc"], tile, tile)
                state["n"][...] += 1
            return state["acc"][...] * state["n"][...].astype(jnp.float32)

        zeros = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
        o_ref[...] = pl.run_state(f)({"acc": plgpu.ACC.init(zeros), "n": 1})

    out = np.zeros((64, 64), np.float32)
    got = run(body, out, x, scratch_types=[plgpu.SMEM((64, 64), jnp.float16)])
    y = x.astype(np.float32)
    np.testing.assert_allclose(got, 6 * (y @ y), rtol=1e-3, atol=1e-2)


def test_state_is_written_in_loops_and_branches(run, rng):
    """for, while, scan, cond and switch, nested, and scopes in them; a branch or a loop that writes
    nothing leaves what was there, a carry that is not used is no matter."""
    x = rng.standard_normal((64,)).astype(np.float32)

    def body(x_ref, k_ref, o_ref, n_ref):
        def f(state):
            a, n = state["a"], state["n"]

            def step(i, carry):
                a[...] = a[...] * 0.5 + carry
                pl.when(i == k_ref[0])(lambda: n.__setitem__(..., n[...] + 100))
                return carry + 1

            last = lax.fori_loop(0, 3, step, 0)  # a weak carry: the body is traced twice
            lax.while_loop(
                lambda c: (c < 20) & (n[...] < 150),
                lambda c: (n.__setitem__(..., n[...] + c), c + last)[1],
                0,
            )
            lax.cond(k_ref[0] > 1, lambda: None, lambda: a.__setitem__(..., -a[...]))
            lax.switch(
                k_ref[0],
                [
                    lambda: n.__setitem__(..., n[...] * 2),
                    lambda: a.__setitem__(3, 7.0),
                    lambda: (a.__setitem__(4, 8.0), n.__setitem__(..., -n[...]))[1],
                ],
            )

            def scanned(c, _):
                def scope(tile):
                    tile[...] = a[...]
                    pl.loop(0, 2)(lambda _: a.__setitem__(..., a[...] + tile[...]))

                pl.run_scoped(scope, plgpu.SMEM((64,), jnp.float32))
                return c, None

            lax.scan(scanned, None, None, length=2)

        out = pl.run_state(f)({"a": x_ref[...], "n": 0})
        o_ref[...], n_ref[0] = out["a"], out["n"]

    for k in range(3):
        outs = (np.zeros(64, np.float32), np.zeros(1, np.int32))
        got, count = run(body, outs, x, np.array([k], np.int32))
        a, n, c = x.copy(), 0, 0
        for i in range(3):
            a, n = a * np.float32(0.5) + i, n + 100 * (i == k)
        while c < 20 and n < 150:
            n, c = n + c, c + 3
        a = a if k > 1 else -a
        if k == 0:
            n = n * 2
        elif k == 1:
            a[3] = 7
        else:
            a[4], n = 8, -n
        np.testing.assert_allclose(got, a * 9, rtol=1e-5)
        assert count[0] == n


def test_state_in_registers(run, rng):
    """Refs of run_state to arrays: read and written by index, in branches and nested states; a
    branch that is not taken leaves what was there."""
    x = rng.standard_normal((3, 64, 32)).astype(np.float32)

    def body(x_ref, flag_ref, o_ref, n_ref):
        flags = [flag_ref[i] > 0 for i in range(3)]

        def f(state):
            a, (b, n) = state["a"], state["rest"]
            a[...] += x_ref[1]

            @pl.when(flags[0])
            def _():
                a[...] = a[...] * 2
                n[...] += 1

                @pl.when(flags[1])
                def _():
                    b[...] = a[...] - b[...]
                    n[...] += 10

            def inner(c):
                c[8:16] = jnp.zeros((8, 32), jnp.float32)
                c[::-1] = c[:, :]
                a[...] = a[...] + c[...]
                n[...] = n[()] * 2

            b[...] = pl.run_state(inner)(b[...])
            pl.when(flags[2])(lambda: a.__setitem__(..., jnp.sqrt(jnp.abs(a[...]))))
            assert a.shape == (64, 32) and n.dtype == jnp.int32

        out = pl.run_state(f)({"a": x_ref[0], "rest": (x_ref[2], 5)})
        o_ref[0], (o_ref[1], n_ref[0]) = out["a"], out["rest"]

    for flags in itertools.product((0, 1), repeat=3):
        got, count = run(
            body,
            (np.zeros((2, 64, 32), np.float32), np.zeros(1, np.int32)),
            x,
            np.array(flags, np.int32),
        )
        a, b, n = x[0] + x[1], x[2].copy(), 5
        if flags[0]:
            a, n = a * 2, n + 1
            if flags[1]:
                b, n = a - b, n + 10
        b[8:16] = 0
        b = b[::-1]
        a, n = a + b, n * 2
        if flags[2]:
            a = np.sqrt(np.abs(a))
        np.testing.assert_allclose(got[0], a, rtol=1e-6)
        np.testing.assert_allclose(got[1], b, rtol=1e-6)
        assert count[0] == n, flags


def test_weak_init_takes_the_bodys_type(run):
    def body(o_ref):
        total = lax.fori_loop(0, 4, lambda i, c: c + jnp.float32(0.5), 0)
        assert total.dtype == jnp.float32
        o_ref[0] = total

    assert run(body, np.zeros(1, np.float32))[0] == 2


def test_while_loop(run):
    """Collatz steps; the condition reads the carry."""
    n = np.array([7, 27, 1, 6], np.int32)

    def body(n_ref, o_ref):
        @pl.loop(0, 4)
        def _(i):
            def cond(c):
                return c[0] != 1

            def step(c):
                return jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1

            o_ref[i] = lax.while_loop(cond, step, (n_ref[i], 0))[1]

    np.testing.assert_array_equal(run(body, np.zeros(4, np.int32), n), [16, 111, 0, 8])


def test_cond_and_switch(run, rng):
    """Results of branches, arrays too; Python predicates; clamped switch."""
    x = rng.standard_normal((6, 128)).astype(np.float32)

    def body(x_ref, o_ref):
        i = lax.axis_index("g")
        v = x_ref[i]
        v = lax.cond(i % 2 == 0, lambda: v * 2, lambda: v - 1)
        v = lax.cond(i, lambda a: a + 10, lambda a: a, v)
        v = v + lax.switch(i - 2, [lambda: 0.0, lambda: 1.0, lambda: jnp.float32(2)])
        o_ref[i] = v

    want = np.stack(
        [
            (r * 2 if i % 2 == 0 else r - 1) + (10 if i else 0) + np.clip(i - 2, 0, 2)
            for i, r in enumerate(x)
        ]
    ).astype(np.float32)
    np.testing.assert_allclose(run(body, x, x, grid=(6,), grid_names=("g",)), want, rtol=1e-6)


@pytest.mark.parametrize("bounds", [(0, 10, 1), (1, 10, 3), (5, 5, 1), (7, 2, 2)])
@pytest.mark.parametrize("traced", [False, True])
def test_pl_loop(run, bounds, traced):
    def body(b_ref, o_ref):
        lo, hi, by = (b_ref[k] for k in range(3)) if traced else bounds

        @pl.loop(lo, hi, step=by, init_carry=0)
        def total(i, c):
            return c * 2 + i

        o_ref[0] = total

    want = 0
    for i in range(*bounds):
        want = want * 2 + i
    assert run(body, np.zeros(1, np.int32), np.array(bounds, np.int32))[0] == want


def test_when_nests_and_python_bools_trace_nothing(run):
    def body(o_ref):
        i = lax.axis_index("g")
        o_ref[i] = 0

        @pl.when(False)
        def _():
            raise AssertionError("traced")

        @pl.when(i > 0)
        def _():
            o_ref[i] = 1

            @pl.when(i == 2)
            def _():
                o_ref[i] = 2

    np.testing.assert_array_equal(
        run(body, np.zeros(4, np.int32), grid=(4,), grid_names=("g",)), [0, 1, 2, 1]
    )


def test_accumulator_as_carry(run, rng):
    """A ref may go round a loop if it comes back unchanged."""

    def body(o_ref, smem):
        def step(i, c):
            ref, n = c
            ref[...] = ref[...] + i
            return ref, n + 1

        smem[...] = jnp.zeros(128, jnp.int32)
        ref, n = lax.fori_loop(0, 5, step, (smem, 0))
        o_ref[...] = ref[...] + n

    got = run(body, np.zeros(128, np.int32), scratch_types=[plgpu.SMEM((128,), np.int32)])
    np.testing.assert_array_equal(got, np.full(128, 15))


def test_errors_of_control_flow():
    """Each misuse has its exception type and a text that names the trouble."""

    def case(f, error, text, **kw):
        kernel = plgpu.kernel(
            f, out_type=plgpu.ShapeDtypeStruct((8,), np.int32), interpret=True, **kw
        )
        with pytest.raises(error, match=text):
            kernel()

    def carry_structure(o):
        lax.fori_loop(0, 3, lambda i, c: (c, c), 0)

    def carry_dtype(o):
        lax.fori_loop(0, 3, lambda i, c: c + 1.5, jnp.int32(0))

    def branch_types(o):
        lax.cond(o[0] > 0, lambda: jnp.int32(1), lambda: jnp.float32(1))

    def branch_structure(o):
        lax.cond(o[0] > 0, lambda: (1, 2), lambda: 1)

    def predicate_shape(o):
        lax.cond(o[...] > 0, lambda: 1, lambda: 2)

    def while_condition(o):
        lax.while_loop(lambda c: c, lambda c: c, 1)

    def unroll(o):
        lax.fori_loop(0, 10, lambda i, c: c, 0, unroll=3)

    def unroll_traced(o):
        lax.fori_loop(0, o[0], lambda i, c: c, 0, unroll=2)

    def ref_from_branch(o):
        lax.cond(o[0] > 0, lambda: o, lambda: o)

    def python_if(o):
        if o[0] > 0:
            o[0] = 1

    case(carry_structure, TypeError, "carry input and carry output must have")
    case(carry_dtype, TypeError, "leaf 0 goes in as int32")
    case(branch_types, TypeError, "branches must have equal output types")
    case(branch_structure, TypeError, "same pytree structure")
    case(predicate_shape, TypeError, "scalar")
    case(while_condition, TypeError, "bool scalar")
    case(unroll, NotImplementedError, "does not divide")
    case(unroll_traced, ValueError, "statically known")
    case(ref_from_branch, ValueError, "cannot return a ref")
    case(python_if, plgpu.TracerBoolConversionError, "test_control.py")


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32"])
def test_loop_bounds_of_any_integer_dtype(run, dtype):
    """The index has the dtype of the bounds; a Python int goes with signed ones only."""
    low, high = (2**31 - 3, 2**31 + 4) if dtype == "uint32" else (3, 100)
    bounds = np.array([low, high], dtype)

    def body(b_ref, o_ref):
        lo, hi = b_ref[0], b_ref[1]
        zero = jnp.zeros((), dtype)
        o_ref[0] = lax.fori_loop(lo, hi, lambda i, c: c + i, zero)
        o_ref[1] = lax.fori_loop(hi, lo, lambda i, c: c + i, zero)
        if np.dtype(dtype).kind == "i":
            o_ref[2] = lax.fori_loop(90, hi, lambda i, c: c * 3 + i, zero)
        else:
            with pytest.raises(TypeError, match="equal types"):
                lax.fori_loop(0, hi, lambda i, c: c, 0)
            o_ref[2] = zero

    total, mixed = sum(range(low, high)), 0
    for i in range(90, 100) if np.dtype(dtype).kind == "i" else ():
        mixed = mixed * 3 + i
    want = np.array([total, 0, mixed]).astype(dtype)
    np.testing.assert_array_equal(run(body, np.zeros(3, dtype), bounds), want)


def test_narrow_arrays_are_carried(run, rng):
    """As words, between loops and branches; a value of one number for all elements among them."""

    def body(x_ref, n_ref, o_ref, p_ref, q_ref):
        x, n = x_ref[...], n_ref[0]
        one = jnp.full((256,), 1, x.dtype)

        def step(c):
            return c[0] + 1, c[2] + x, c[1] + one

        o_ref[...], p_ref[...] = lax.while_loop(lambda c: c[0] < n, step, (0, x, one))[1:]

        def of(k, y):
            return lax.cond(k % 2 == 0, lambda: one, lambda: y + x)

        q_ref[...] = lax.fori_loop(0, n, of, x)

    x = rng.integers(-20, 20, 256).astype(np.int16)
    for n in (4, 5):
        got = run(body, (x, x, x), x, np.array([n], np.int32))
        a, b, c = x, np.ones_like(x), x
        for k in range(n):
            a, b = b + x, a + 1
            c = c + x if k % 2 else np.ones_like(x)
        for have, want in zip(got, (a, b, c)):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("condition", ["of a number", "of elements"])
def test_words_of_a_while_loop(run, rng, condition):
    """Two 16-bit arrays that change places, and are carried as words: only stmatrix takes them,
    or the condition reads the elements of one."""
    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def body(x_ref, n_ref, o_ref, smem):
        x, n = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA), n_ref[0]

        def more(c):
            in_reach = c[0] < n
            return in_reach & (jnp.max(c[2]) < 99) if condition == "of elements" else in_reach

        def step(c):
            k, wide, p, q = c
            wide = wide + 1
            return k + 1, wide, q, wide.astype(jnp.float16)

        start = 0, x, x.astype(jnp.float16), (x * 2).astype(jnp.float16)
        for k, value in enumerate(lax.while_loop(more, step, start)[2:]):
            smem[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, o_ref.at[k])
            plgpu.wait_smem_to_gmem(0)

    x = rng.integers(-20, 20, (64, 64)).astype(np.float32)
    scratch = [plgpu.SMEM((64, 64), jnp.float16, transforms=tiled)]
    n = np.array([3], np.int32)
    got = run(body, np.zeros((2, 64, 64), np.float16), x, n, scratch_types=scratch)
    np.testing.assert_array_equal(got, np.stack([x + 2, x + 3]).astype(np.float16))


# Of x in [-10, 10], y in [0, 20] and d in [2, 4]: a value, and the ends of its range.
RANGES = [
    (lambda x, y, d: lax.rem(y, 7), 0, 6),
    (lambda x, y, d: lax.rem(x, 7), -6, 6),
    (lambda x, y, d: x % 7, 0, 6),
    (lambda x, y, d: x // 3, -4, 3),
    (lambda x, y, d: lax.div(x, d), -5, 5),
    (lambda x, y, d: lax.div(y + 5, d), 1, 12),
    (lambda x, y, d: lax.div(-5 - y, d), -12, -1),
    (lambda x, y, d: jnp.where(x < 0, x + 7, x), -3, 10),
    (lambda x, y, d: jnp.where(x < 0, x + 30, x), 0, 29),
]


@pytest.mark.parametrize("case", range(len(RANGES)))
def test_ends_of_ranges(run, case):
    """Quotients of what is known not to be negative truncate; those of -1 are -1."""
    of, lo, hi = RANGES[case]

    def body(o_ref):
        def outer(i, _):
            def inner(d, _):
                v = of(i - 10, i, d)
                k = 3 * i + d - 2
                o_ref[k, 0], o_ref[k, 1], o_ref[k, 2] = v, (v - lo - 1) // 2, (hi - 1 - v) // 2

            lax.fori_loop(2, 5, inner, None)

        lax.fori_loop(0, 21, outer, None)

    v, low, high = run(body, plgpu.ShapeDtypeStruct((63, 3), np.int32)).T
    assert (v.min(), v.max()) == (lo, hi)
    np.testing.assert_array_equal(low, (v - lo - 1) // 2)
    np.testing.assert_array_equal(high, (hi - 1 - v) // 2)


def test_bounds_of_numpy_integers():
    """Known ones make a static loop; beside a traced bound they keep their dtype."""

    def kernel(lower, upper, **options):
        def body(o_ref):
            o_ref[0] = lax.fori_loop(
                lower, upper(lax.axis_index("g")), lambda i, c: c + 1, jnp.int32(0), **options
            )

        out = plgpu.ShapeDtypeStruct((1,), np.int32)
        return plgpu.kernel(body, out_type=out, interpret=True, grid=(1,), grid_names=("g",))

    assert kernel(np.int16(2), lambda g: np.uint8(6), unroll=2)()[0] == 4
    assert kernel(np.uint32(2), lambda g: g.astype(jnp.uint32) + np.uint32(6))()[0] == 4
    with pytest.raises(TypeError, match="equal types, got int16.. and int32"):
        kernel(np.int16(2), lambda g: g)()
