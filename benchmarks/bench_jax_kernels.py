"""JAX's own Pallas:MGPU kernels: the same text, compiled by pallas_mgpu and by JAX.

    python benchmarks/bench_jax_kernels.py [--only WORD ...] [--quick]

Matrix products, attention, grouped and mixed products of jax.experimental.pallas.ops.gpu, as the
installed JAX has them (jax_source.py), with the same tiling for both. Random normal input; results
are compared before anything is timed. Calls of both take turns, in bursts, timed by the host's
clock until the GPU is done; a call makes a new result. Medians. A short table comes last."""

import argparse
import functools
import os
import time

import results

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BOUND = 4e-3  # of the largest difference, by the largest number


def normal(rng, *shape):
    import numpy as np

    return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)


def cases(rng):
    """(title, module, call(module, *arrays), arrays)."""
    import ml_dtypes
    import numpy as np

    tiles = dict(tile_n=128, tile_k=64, max_concurrent_steps=4, epi_tile_m=64, epi_tile_n=64)
    a, b = normal(rng, 4096, 4096), normal(rng, 4096, 8192)
    variants = (
        ("", None, 4),
        (", clusters along N", "N", 4),
        (", clusters along M", "M", 4),
        (", 2 steps", None, 2),
        (", clusters along M, 2 steps", "M", 2),
    )
    for title, cluster, steps in variants:

        def matmul(m, a, b, cluster=cluster, steps=steps):
            dim = m.MatmulDimension
            config = m.TuningConfig(
                tile_m=128,
                **{**tiles, "max_concurrent_steps": steps},
                grid_minor_dim=dim.M,
                grid_tile_width=16,
                wg_dimension=dim.N,
                cluster_dimension=cluster and dim[cluster],
            )
            return m.matmul(a, b, None, config)

        yield f"matmul 4096x8192x4096{title}", "hopper_matmul_mgpu", matmul, (a, b)

    for d in (64, 128):
        qkv = [normal(rng, 2, 4096, heads, d) for heads in (16, 4, 4)]
        for f, causal in (
            ("attention", False),
            ("attention", True),
            ("attention_with_pipeline_emitter", False),
        ):

            def attention(m, q, k, v, f=f, causal=causal, d=d):
                config = m.TuningConfig(
                    block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal
                )
                return getattr(m, f)(q, k, v, config)

            yield f"{f}, D={d}{', causal' * causal}", "attention_mgpu", attention, qkv

    w = rng.integers(-128, 128, (4096, 4096)).astype(np.int8)

    def mixed(m, w, x):
        config = m.TuningConfig(
            tile_m=64,
            **tiles,
            wg_dimension=m.MatmulDimension.M,
        )
        return m.mixed_matmul_kernel(w, x, out_dtype=x.dtype, config=config)

    for x in (a, a.astype(ml_dtypes.bfloat16)):
        title = f"mixed int8 x {x.dtype} 4096x4096x4096"
        yield title, "hopper_mixed_type_matmul_mgpu", mixed, (w, x)

    rows, k, n, groups = 16384, 2048, 4096, 16
    ends = np.sort(rng.integers(0, rows, groups - 1))
    sizes = np.diff(ends, prepend=0, append=rows).astype(np.int32)
    lhs = normal(rng, rows, k)
    for transposed in (False, True):
        rhs = normal(rng, groups, *((n, k) if transposed else (k, n)))

        def ragged(m, lhs, rhs, sizes, transposed=transposed):
            return m.ragged_dot(
                lhs,
                rhs,
                group_sizes=sizes,
                block_m=128,
                block_n=128,
                block_k=64,
                max_concurrent_steps=4,
                grid_block_n=4,
                transpose_rhs=transposed,
            )

        yield (
            f"ragged_dot, {groups} groups{', rhs transposed' * transposed}",
            "ragged_dot_mgpu",
            ragged,
            (lhs, rhs, sizes),
        )


def both(module, call, arrays):
    """{name: function that calls so often, waits, and returns the result}."""
    import jax
    import jax_source
    from jax_search import kernels

    import pallas_mgpu as plgpu

    calls = []
    there, theirs = kernels(module), [jax.numpy.asarray(x) for x in arrays]
    jitted = jax.jit(functools.partial(call, there))
    call(jax_source.load(module, calls), *(plgpu.device_put(x) for x in arrays))
    ((kernel, mine, options),) = calls

    def ours(count):
        for _ in range(count):
            out = kernel(*mine, **options)
        plgpu.synchronize()
        return plgpu.tree.leaves(out)[0]

    def of_jax(count):
        for _ in range(count):
            out = jitted(*theirs)
        return jax.tree.leaves(jax.block_until_ready(out))[0]

    return {"pallas_mgpu": ours, "JAX": of_jax}


def seconds_each(runs, rounds, burst=0.01):
    """Seconds of a call, (median, 10th, 90th percentile), in alternating bursts of that many."""
    count, found = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run(2)
        start = time.perf_counter()
        run(3)
        count[name] = max(3, int(burst / (time.perf_counter() - start) * 3))
    for r in range(rounds):
        for name in sorted(runs, reverse=r % 2 == 1):
            start = time.perf_counter()
            runs[name](count[name])
            found[name].append((time.perf_counter() - start) / count[name])
    return {name: results.spread(x) for name, x in found.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="titles with one of these words")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    import jax
    import numpy as np

    start = time.perf_counter()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    table = []
    for title, module, call, arrays in cases(np.random.default_rng(0)):
        if args.only and not any(word in title for word in args.only):
            continue
        runs = both(module, call, arrays)
        got, want = (np.asarray(run(1), np.float32) for run in runs.values())
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < BOUND, f"{title}: {error:.2e}"
        spreads = seconds_each(runs, 9 if args.quick else 21)
        args.found.add(
            "kernels of JAX", title, {"host": spreads}, ours="pallas_mgpu",
            errors={"pallas_mgpu": error},
        )  # fmt: skip
        t = {name: x[0] for name, x in spreads.items()}
        table.append((title, t))
        print(f"{title}: {error:.1e}, {t['pallas_mgpu'] * 1e6:.0f} us", flush=True)
    print("\n| kernel of JAX | pallas_mgpu, us | JAX, us | JAX / pallas_mgpu |")
    print("|---|---:|---:|---:|")
    for title, t in table:
        us = [t[name] * 1e6 for name in ("pallas_mgpu", "JAX")]
        print(f"| {title} | {us[0]:.0f} | {us[1]:.0f} | {us[1] / us[0]:.3f} |")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
