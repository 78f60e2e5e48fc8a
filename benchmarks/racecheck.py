"""Kernels for compute-sanitizer's racecheck: those of ops that hand words over by mbarriers, and
the least one that does.

    compute-sanitizer --tool racecheck python benchmarks/racecheck.py [least | softmax | ragged_dot]

`least`: one lane writes a word of shared memory and arrives at a barrier, on which another thread
waits before its lanes read the word; they arrive at a second one, on which the writer waits before
it writes again. That is right by the PTX ISA: an arrival releases, a wait acquires. Where racecheck
reports it, its reports of such words elsewhere are its own."""

import sys

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops._ring import hear, told_scratch

ROUNDS = 16


def least():
    def body(o, *told_refs):
        words, written, heard, _ = told_refs
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            @pl.loop(0, ROUNDS)
            def _(k):
                plgpu.hand_tile(k, k, words, written, heard, None)

            plgpu.barrier_wait(heard.at[0])

        @pl.when(me == 0)
        def _():
            step = lambda k, total: total + hear(told_refs, k)  # noqa: E731
            o[0] = lax.fori_loop(0, ROUNDS, step, jnp.int32(0))

    scratch = told_scratch(1, ahead=1)
    out = plgpu.ShapeDtypeStruct((1,), jnp.int32)
    kernel = plgpu.kernel(
        body, out_type=out, scratch_types=scratch, num_threads=2, thread_name="wg"
    )
    return kernel(), np.array([ROUNDS * (ROUNDS - 1) // 2])


def softmax():
    x = np.random.default_rng(0).standard_normal((40, 40_000)).astype(np.float16)
    want = np.exp(x.astype(np.float32))
    return ops.softmax(plgpu.device_put(x)).numpy(), want / want.sum(1, keepdims=True)


def ragged_dot():
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal(s).astype(np.float16) / 8 for s in ((512, 256), (4, 256, 256)))
    sizes = np.array([100, 28, 284, 100], np.int32)
    got = ops.ragged_dot(*map(plgpu.device_put, (lhs, rhs, sizes))).numpy()
    ends = np.cumsum(sizes)
    parts = [lhs[e - n : e].astype(np.float32) @ w.astype(np.float32)
             for e, n, w in zip(ends, sizes, rhs)]  # fmt: skip
    return got, np.concatenate(parts)


CASES = {f.__name__: f for f in (least, softmax, ragged_dot)}


def main():
    for name in sys.argv[1:] or CASES:
        got, want = CASES[name]()
        error = np.abs(np.asarray(got) - want).max() / np.abs(want).max()
        print(f"{name}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
