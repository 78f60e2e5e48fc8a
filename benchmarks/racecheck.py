"""Kernels for compute-sanitizer's racecheck: those of ops that pass words on by mbarriers, and the
smallest ones that do.

    compute-sanitizer --tool racecheck python benchmarks/racecheck.py [least | lanes | peer | ...]

`least`: one lane writes a word of shared memory and arrives at an mbarrier itself; the lanes of
another thread wait on it and read the word. racecheck follows that.

`lanes`: all lanes of a thread write, meet at a named barrier (`bar.sync`), and one of them arrives
for all; the lanes of another thread wait and read. By the PTX memory model (causality order, which
is transitive) the write comes before `bar.sync`, that before the arrival, which releases, and that
before the wait, which acquires, and so before the read. racecheck does not follow the chain through
the lane that arrives, and reports each such word. The tables of `ragged_dot` are written so.

`peer`: the same with words of another block of the cluster, as in `softmax` of long rows."""

import sys

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp

ROUNDS, BLOCKS = 16, 8


def least():
    def body(o, tiles):
        scheduler = plgpu.ext.TileScheduler(**tiles)
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            @pl.loop(0, ROUNDS)
            def _(k):
                scheduler.broadcast(k, k)

            scheduler.drain(ROUNDS)

        @pl.when(me == 0)
        def _():
            step = lambda k, total: total + scheduler.receive(k)  # noqa: E731
            o[0] = lax.fori_loop(0, ROUNDS, step, jnp.int32(0))

    scratch = {"tiles": plgpu.ext.TileScheduler.scratch(readers=1, slots=1)}
    out = plgpu.ShapeDtypeStruct((1,), jnp.int32)
    kernel = plgpu.kernel(
        body, out_type=out, scratch_types=scratch, num_threads=2, thread_name="wg"
    )
    return kernel(), np.array([ROUNDS * (ROUNDS - 1) // 2])


def lanes():
    def body(o, words, written):
        me = lax.axis_index("wg")

        @pl.when(me == 0)
        def _():
            words[...] = lax.iota(jnp.int32, 128)
            plgpu.barrier_arrive(written)

        @pl.when(me == 1)
        def _():
            plgpu.barrier_wait(written)
            o[...] = words[...][::-1]

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=[plgpu.SMEM((128,), jnp.int32), plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
    )
    return kernel(), np.arange(128)[::-1]


def peer():
    def body(o, words, written):
        me = lax.axis_index("c")
        for k in range(BLOCKS):
            plgpu.cluster_ref(words, {"c": k})[me] = me + 1
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)
        total = jnp.int32(0)
        for k in range(BLOCKS):
            total = total + words[k]
        o[me] = total

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((BLOCKS,), jnp.int32),
        scratch_types=[
            plgpu.SMEM((BLOCKS,), jnp.int32),
            plgpu.ClusterBarrier(collective_axes=("c",)),
        ],
        cluster=(BLOCKS,),
        cluster_names=("c",),
    )
    return kernel(), np.full(BLOCKS, BLOCKS * (BLOCKS + 1) // 2)


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


CASES = {f.__name__: f for f in (least, lanes, peer, softmax, ragged_dot)}


def main():
    for name in sys.argv[1:] or CASES:
        got, want = CASES[name]()
        error = np.abs(np.asarray(got) - want).max() / np.abs(want).max()
        print(f"{name}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
