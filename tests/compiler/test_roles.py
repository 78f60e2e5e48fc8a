"""Loops around branches on the thread's index: each role gets a loop of its own, and the result is
what it was."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

f32, i32 = np.float32, np.int32
TILES, N = 5, 256


def structure(run, body, out, *args, **options):
    """The nesting of branches and loops, as text: "if(for)(for)"."""
    graph = run.kernel(body, out, **options).lower(*args).as_text("graph")
    words = []
    for line in graph.splitlines():
        line = line.split("  //")[0].strip()
        control = re.match(r"(?:%.* = )?(if|for) ", line)
        if line == "} {":
            words.append(")(")
        elif line.endswith("{"):
            words.append(f"{control[1]}(" if control else "(")
        elif line == "}":
            words.append(")")
    return "".join(words)


def options(**more):
    scratch = [
        plgpu.SMEM((2, N), f32),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2),
    ]
    return dict(num_threads=2, thread_name="wg", scratch_types=scratch, **more)


def fetch(x_ref, i, s_ref, full, empty):
    slot = i % 2
    pl.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[slot]))
    plgpu.copy_gmem_to_smem(x_ref.at[i], s_ref.at[slot], full.at[slot])


def consume(o_ref, i, s_ref, full, empty):
    slot = i % 2
    plgpu.barrier_wait(full.at[slot])
    o_ref[i] = s_ref[slot] * 2 + i.astype(f32)
    plgpu.barrier_arrive(empty.at[slot])


def drain(empty):
    for slot in range(2):
        plgpu.barrier_wait(empty.at[slot])


def data(rng):
    x = rng.standard_normal((TILES, N)).astype(f32)
    return x, x * 2 + np.arange(TILES, dtype=f32)[:, None]


@pytest.mark.parametrize("form", ["cond", "two whens", "inside", "negated"])
def test_roles_part_before_the_loop(run, rng, form):
    """A branch with two sides; two branches; the index computed in the loop; an inverted one."""
    x, want = data(rng)

    def body(x_ref, o_ref, s_ref, full, empty):
        wg = lax.axis_index("wg")

        def step(i, _):
            producer = (wg if form != "inside" else lax.axis_index("wg") + 0 * i) == 0
            if form == "two whens":
                pl.when(producer)(lambda: fetch(x_ref, i, s_ref, full, empty))
                pl.when(wg == 1)(lambda: consume(o_ref, i, s_ref, full, empty))
            elif form == "negated":
                lax.cond(
                    ~producer,
                    lambda: consume(o_ref, i, s_ref, full, empty),
                    lambda: fetch(x_ref, i, s_ref, full, empty),
                )
            else:
                lax.cond(
                    producer,
                    lambda: fetch(x_ref, i, s_ref, full, empty),
                    lambda: consume(o_ref, i, s_ref, full, empty),
                )

        lax.fori_loop(0, TILES, step, None)
        pl.when(wg == 0)(lambda: drain(empty))

    text = structure(run, body, x, x, **options())
    assert text.index("if(") < text.index("for("), text
    assert text.count("for(") == 2, text
    np.testing.assert_array_equal(run(body, x, x, **options()), want)


def test_carries(run, rng):
    """Values that the loop carries, changed by one role or by both, are right after it."""
    x = rng.standard_normal((TILES, N)).astype(f32)

    def body(x_ref, o_ref, n_ref):
        wg = lax.axis_index("wg")

        def step(i, carry):
            n, total = carry
            total = lax.cond(wg == 0, lambda: total + x_ref[i], lambda: total - 2 * x_ref[i])
            return n + i * 3, total

        n, total = lax.fori_loop(1, TILES, step, (i32(7), x_ref[0]))
        o_ref[wg] = total
        n_ref[wg] = n

    outs = [np.zeros((2, N), f32), np.zeros(2, i32)]
    kinds = dict(num_threads=2, thread_name="wg")
    text = structure(run, body, outs, x, **kinds)
    assert text.index("if(") < text.index("for("), text
    got = run(body, outs, x, **kinds)
    want = [x[0].copy(), x[0].copy()]
    for i in range(1, TILES):
        want = [want[0] + x[i], want[1] - 2 * x[i]]
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], 7 + 3 * sum(range(1, TILES)))


def test_loops_in_loops(run, rng):
    """The branch moves out of all of them, with three threads of two roles."""
    x = rng.standard_normal((3, 4, 128)).astype(f32)

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        def outer(i, _):
            def inner(j, _):
                @pl.when(wg < 2)
                def _():
                    o_ref[wg, i, j] = x_ref[i, j] + wg.astype(f32)

                @pl.when(wg == 2)
                def _():
                    o_ref[wg, i, j] = x_ref[i, j] * 2

            lax.fori_loop(0, 4, inner, None)

        lax.fori_loop(0, 3, outer, None)

    out = np.zeros((3, 3, 4, 128), f32)
    kinds = dict(num_threads=3, thread_name="wg")
    text = structure(run, body, out, x, **kinds)
    assert text.count("for(for(") == 2 and text.index("if(") < text.index("for("), text
    np.testing.assert_array_equal(run(body, out, x, **kinds), np.stack([x, x + 1, x * 2]))


@pytest.mark.parametrize("form", ["index", "effect", "three"])
def test_what_is_not_split(run, rng, form):
    """A branch on the index too; something that both roles do; three roles."""
    x = rng.standard_normal((6, 128)).astype(f32)

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        def step(i, _):
            if form == "effect":
                o_ref[wg, i] = x_ref[i]
            which = i % 3 if form == "index" else wg
            for k in range(3 if form != "effect" else 1):

                @pl.when(which == k)
                def _(k=k):
                    o_ref[wg, i] = x_ref[i] * (k + 2)

        lax.fori_loop(0, 6, step, None)

    out = np.zeros((3, 6, 128), f32)
    kinds = dict(num_threads=3, thread_name="wg")
    assert structure(run, body, out, x, **kinds).count("for(") == 1
    got = run(body, out, x, **kinds)
    if form == "index":
        want = np.stack([x * (2 + np.arange(6, dtype=f32)[:, None] % 3)] * 3)
    else:
        want = np.stack(
            [x * 2, x * (3 if form == "three" else 1), x * (4 if form == "three" else 1)]
        )
    np.testing.assert_array_equal(got, want)
