"""Programs for any number of rows beside programs for one: speed, compilations, launches.

    python benchmarks/bench_sizes.py [--quick] [--json FILE]

For each shape, three alternating contestants (plgpu.testing.do_bench, queued and in CUDA graphs):
the program for that number of rows alone, the one that takes the rows at run time, and torch. Every
result is checked on a poisoned output first. Then 200 random numbers of rows from 1 to 8192: how
many programs they compile, and what they take in all, with synchronisation as an error. Then a
number of rows that comes often: how many calls pass until it has a program of its own, and how
long they take. Last, what a launch takes on the host with sizes that stay and with sizes that
change from call to call."""

import argparse
import functools
import random
import time

import results
import torch

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import _open_rows
from pallas_mgpu.testing import do_bench

ROWS = (4, 37, 64, 128, 333, 512, 1000, 2048, 2999, 4096, 8192)
WEIGHTS = ((4096, 4096), (14336, 4096))
WIDTHS = (1024, 4096, 8192)
LENGTHS = (100, 1024, 2999, 8192)  # of attention
OFTEN = 600  # rows that come often: far from what the shared program is tuned for


def of_form(static, call, others):
    """A kernel of one form; others: calls that use up the static forms of its kind."""
    plgpu.clear_caches()
    if not static:
        for other in others:
            other()
    return call()


def compare(name, make, args, others, reference):
    """Both forms of one call, and torch; checked."""
    contestants, out = {"torch": lambda: reference(*args)}, None
    want = reference(*args)
    for form, static in (("static", True), ("open", False)):
        kernel = of_form(static, lambda: make(*args), others)
        out = torch.full_like(want, float("nan"))
        kernel(*args, out=out)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
        contestants[form] = lambda k=kernel, o=out: k(*args, out=o)
    row = {}
    for how, graphs in (("queued", False), ("graphs", True)):
        found = do_bench(contestants, ways="queued", rounds=ARGS.rounds, graphs=graphs)["queued"]
        named = {"static": "ops, static", "open": "ops, sizes at run time", "torch": "torch"}
        shape = " x ".join(str(tuple(a.shape)) for a in args)
        FOUND.add(
            name, f"{name} {shape}",
            {how: {named[n]: results.of_timing(t) for n, t in found.items()}},
            rows=args[0].shape[0],
        )  # fmt: skip
        row[how] = {n: t.median * 1e6 for n, t in found.items()}
        row[f"{how}_static_over_open"] = found["open"].ratio(found["static"])
    print(name, [tuple(a.shape) for a in args], row, flush=True)


def random_rows(n, k):
    plgpu.clear_caches()
    rng, kernels = random.Random(0), {}
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    every = [torch.randn(rng.randint(1, 8192), k, device="cuda").bfloat16() for _ in range(200)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    for a in every:
        kernel = ops.matmul.kernel(a, b, transpose_b=True)
        kernels[id(kernel)] = kernel
        ops.matmul(a, b, transpose_b=True)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    print(f"200 numbers of rows: {len(kernels)} programs, {took:.2f} s", flush=True)
    FOUND.add_samples("random rows", f"{len(kernels)} programs", {"ops": [took]})


def often(n, k):
    """Calls with the same rows until these have a program of their own."""
    plgpu.clear_caches()
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(OFTEN, k, device="cuda", dtype=torch.bfloat16)
    for m in range(5, 5 + _open_rows.STATIC):
        ops.matmul.kernel(a[:m], b, transpose_b=True)
    shared, samples = ops.matmul.kernel(a, b, transpose_b=True), []
    start = time.perf_counter()
    while ops.matmul.kernel(a, b, transpose_b=True) is shared:
        before = time.perf_counter()
        ops.matmul(a, b, transpose_b=True)
        samples.append(time.perf_counter() - before)
        torch.cuda.synchronize()
        if before - start > 20:
            raise RuntimeError(f"{OFTEN} rows have no program of their own after 20 s")
    took, before = time.perf_counter() - start, time.perf_counter()
    found = ops.matmul(a, b, transpose_b=True)
    first = time.perf_counter() - before
    torch.testing.assert_close(found, a @ b.T, rtol=2e-2, atol=2e-2 * k**0.5)
    most = max(samples[1:]) * 1e6
    print(f"{OFTEN} rows: own program after {2 * len(samples)} calls, {took:.2f} s; host, us:")
    print(f"at most {most:.0f} before, {first * 1e6:.0f} its first call")
    case = f"matmul, {OFTEN} rows"
    FOUND.add_samples("often", case, {"ops, calls of the shared program": samples[1:]})
    FOUND.add_samples("often", case, {"ops, first call of its own program": [first]})


def launches(n, k):
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
    how = {"transpose_b": True, "batch_invariant": True}
    for m in (*range(40, 40 + _open_rows.STATIC), 50, 51):
        ops.matmul(a[:m], b, **how)
    for what, rows in (("same", (50,)), ("changing", (50, 51))):
        views = [a[:m] for m in rows]
        outs = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for m in rows]
        # batch_invariant: else they would get programs of their own meanwhile
        calls = [lambda x=x, o=o: ops.matmul(x, b, **how, out=o) for x, o in zip(views, outs)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(2000):
            calls[i % len(calls)]()
        took = (time.perf_counter() - start) / 2000
        print(f"launch, {what} sizes: {took * 1e6:.2f} us")
        FOUND.add_samples("launch", f"matmul, {what} sizes", {"ops": [took]})
        torch.cuda.synchronize()


def attentions(lengths):
    """Causal, one sequence; torch by what it chooses."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def reference(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous()

    for length in lengths:
        q = torch.randn(1, length, 32, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, length, 8, 128, device="cuda").bfloat16() for _ in range(2))
        others = [
            lambda i=i, q=q, k=k: ops.attention.kernel(q[:, :i], k[:, :i], k[:, :i], causal=True)
            for i in range(50, 50 + _open_rows.STATIC)
        ]
        compare(
            "attention",
            lambda q, k, v: ops.attention.kernel(q, k, v, causal=True),
            (q, k, v),
            others,
            reference,
        )


def products(rows, n, k):
    """Other products than those of 16-bit operands, a norm of arrays with three dimensions, and
    gradients."""
    random_of = functools.partial(torch.randn, device="cuda")
    gate, up = (random_of(k, n).bfloat16() for _ in range(2))
    both, weight = torch.cat([gate, up], 1), random_of(k).bfloat16()
    narrow = torch.randint(-100, 100, (n, k), device="cuda", dtype=torch.int8)
    b, y = random_of(n, k).to(torch.float8_e4m3fn), torch.rand(1, n, device="cuda") + 0.5
    wide = narrow.bfloat16()

    def of_8_bits(a, b, x, y):
        how = {"transpose_b": True, "scale_a": x, "scale_b": y, "out_dtype": "bfloat16"}
        return ops.matmul.kernel(a, b, **how)

    def of_rows(m):
        return random_of(m, k).to(torch.float8_e4m3fn), torch.rand(m, 1, device="cuda") + 0.5

    def scaled(a, b, x, y):
        return torch._scaled_mm(a, b.T, x, y, out_dtype=torch.bfloat16)

    def in_rows(*shape):
        return random_of(*shape, k).bfloat16()

    cases = {  # kernel, operands for a number of rows, torch
        "matmul, float8": (of_8_bits, lambda m: ((v := of_rows(m))[0], b, v[1], y), scaled),
        "mixed_matmul": (
            ops.mixed_matmul.kernel,
            lambda m: (in_rows(m), narrow),
            lambda h, _: torch.nn.functional.linear(h, wide),
        ),
        "gated_matmul": (
            ops.gated_matmul.kernel,
            lambda m: (in_rows(m), both),
            lambda h, _: torch.nn.functional.silu(h @ gate) * (h @ up),
        ),
        "rms_norm, three dims": (
            ops.rms_norm.kernel,
            lambda m: (in_rows(2, m), weight),
            lambda h, w: torch.nn.functional.rms_norm(h, h.shape[-1:], w, eps=1e-6),
        ),
        "matmul, gradient of weights": (
            functools.partial(ops.matmul.kernel, transpose_a=True),
            lambda m: (in_rows(m), in_rows(m)),
            lambda h, g: h.T @ g,
        ),
        "softmax_backward": (
            ops.softmax_backward.kernel,
            lambda m: (in_rows(m), torch.softmax(in_rows(m), 1)),
            lambda g, y: torch._softmax_backward_data(g, y, 1, y.dtype),
        ),
    }
    for m in rows:
        for name, (make, operands, reference) in cases.items():
            first = [
                lambda i=i, make=make, operands=operands: make(*operands(i))
                for i in range(5, 5 + _open_rows.STATIC)
            ]
            compare(name, make, operands(m), first, reference)


def main():
    rows = ROWS[::3] if ARGS.quick else ROWS
    for n, k in WEIGHTS[:1] if ARGS.quick else WEIGHTS:
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for m in rows:
            a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            others = [
                lambda i=i, b=b, k=k: ops.matmul.kernel(b[:i].reshape(i, k), b, transpose_b=True)
                for i in range(5, 5 + _open_rows.STATIC)
            ]
            compare(
                "matmul",
                lambda a, b: ops.matmul.kernel(a, b, transpose_b=True),
                (a, b),
                others,
                torch.nn.functional.linear,
            )
    for n in WIDTHS[:1] if ARGS.quick else WIDTHS:
        for m in rows:
            x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
            room = torch.randn(8, n, device="cuda", dtype=torch.bfloat16)
            others = [
                lambda i=i, r=room: ops.rms_norm.kernel(r[:i])
                for i in range(5, 5 + _open_rows.STATIC)
            ]
            compare(
                "rms_norm",
                lambda x: ops.rms_norm.kernel(x),
                (x,),
                others,
                lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6),
            )
            gate, up = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            others = [
                lambda i=i, r=room: ops.gated_linear_unit.kernel(r[:i], r[:i])
                for i in range(5, 5 + _open_rows.STATIC)
            ]
            compare(
                "gated_linear_unit",
                lambda x, y: ops.gated_linear_unit.kernel(x, y),
                (gate, up),
                others,
                lambda x, y: torch.nn.functional.silu(x) * y,
            )
    products(rows, 4096, 4096)
    attentions(LENGTHS[1::2] if ARGS.quick else LENGTHS)
    random_rows(4096, 4096)
    often(4096, 4096)
    launches(512, 512)  # for which the GPU takes less time than the host


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    results.argument(parser)
    ARGS = parser.parse_args()
    FOUND = results.Results(__file__, ARGS.json)
    main()
