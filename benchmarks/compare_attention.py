"""Configurations of attention beside the ones that are chosen by default.

    python benchmarks/compare_attention.py [fp8] [prefill] [decode] [mla] [--rounds N] [--budget S]

Each is compared with float32 on a poisoned output (two heads; decoding: whole results), then all
take turns in CUDA graphs (plgpu.testing.do_bench, queued; decoding as in bench_decode, over caches
of 512 MiB). A table for each shape: us, the ratio of the default's time to it, the error."""

import argparse
import functools
import time

import bench_decode
import bench_prefill
import torch

import pallas_mgpu as plgpu
from pallas_mgpu import ops

C, D, M = ops.AttentionConfig, ops.AttentionDecodeConfig, ops.MlaConfig
FP8 = [
    C(2, 128, 3, q_registers=True), C(2, 128, 2), C(2, 128, 3), C(2, 192, 2),
    C(2, 128, 2, late=False, q_registers=True), C(2, 128, 2, hold=True, q_registers=True),
    C(2, 128, 2, late=False, hold=True, q_registers=True),
    C(2, 128, 2, lazy=False, q_registers=True),
]  # fmt: skip
NARROW_64 = [
    C(2, 128, 3, late=False, hold=True), C(2, 128, 2, late=False), C(2, 128, 2), C(2, 128, 3),
]  # fmt: skip
WIDENED = [C(2, 96, 2, q_registers=True), C(2, 64, 3, q_registers=True), C(2, 64, 3), C(2, 96, 2)]
DIM_64 = [
    C(2, 128, 4, late=False, lazy=False), C(2, 128, 4, late=False), C(2, 128, 4), C(2, 64, 8),
    C(2, 64, 8, late=False), C(2, 192, 2), C(2, 192, 2, late=False), C(2, 192, 3, q_registers=True),
    C(2, 128, 4, q_registers=True), C(3, 96, 4, late=False, lazy=False),
    C(3, 64, 8, late=False, lazy=False), C(3, 128, 2, late=False, lazy=False),
    C(3, 128, 4, late=False, lazy=False, hold=True),
]  # fmt: skip
# cases of bench_prefill's FORMS, and their configurations
FORMS = [
    (("MHA", 1, 16384, 16384, False, *[bench_prefill.E4M3] * 2, 0), FP8),
    (("MHA", 1, 16384, 16384, True, *[bench_prefill.E4M3] * 2, 0), FP8),
    (("DiT", 2, 8192, 8192, False, *[bench_prefill.E4M3] * 2, 0), NARROW_64),
    (
        ("Llama 3 8B", 4, 4096, 4096, True, bench_prefill.BF16, bench_prefill.E4M3, 0),
        WIDENED,
    ),
]
# shapes of bench_prefill, which loses there
PREFILL = [
    ("ViT-L", 16, 1024, 1024, True),
    ("GPT-2 XL", 4, 77, 4096, False),
    ("ViT-L", 3, 3001, 3001, True),
]
DECODE = [D(1), D(2), D(3), D(4)]
MLA = [M(32), M(64, 1)]


def show(name, us, errors, failed):
    print(f"\n### {name}\n\n| config | us | default / this | error |\n|---|---:|---:|---:|")
    for config, t in sorted(us.items(), key=lambda item: item[1]):
        ratio = us["default"] / t if "default" in us else float("nan")
        print(f"| {config} | {t:.1f} | {ratio:.3f} | {errors[config]:.1e} |")
    for config, why in failed.items():
        print(f"  {config}: {why}")
    print(flush=True)


def check(calls, error, bound, out=None):
    """Those that are right, errors, and what is wrong with the others. error: of a result."""
    right, errors, failed = {}, {}, {}
    for name, call in calls.items():
        try:
            if out is not None:
                out.fill_(float("nan"))
            errors[name] = error(call())
            if not errors[name] < bound:
                raise AssertionError(f"relative error {errors[name]:.2e}")
            right[name] = call
        except (RuntimeError, AssertionError, NotImplementedError, ValueError) as e:
            failed[name] = f"{type(e).__name__}: {str(e)[:160]}"
    return right, errors, failed


def with_configs(call, configs):
    named = {str(tuple(c)): functools.partial(call, config=c) for c in configs}
    return {"default": call} | named


def queued(name, calls, error, bound, rounds, out=None):
    right, errors, failed = check(calls, error, bound, out)
    times = plgpu.testing.do_bench(right, ways="queued", rounds=rounds, graphs=True)["queued"]
    show(name, {n: t.median * 1e6 for n, t in times.items()}, errors, failed)


def forms(args):
    for case, configs in FORMS:
        calls, want = bench_prefill.calls_of_form(case)
        call = calls["ops"]
        error = functools.partial(bench_prefill.error, want=want)
        bound, out = bench_prefill.BOUNDS[case[5]], call.keywords["out"]
        queued(str(case), with_configs(call, configs), error, bound, args.rounds, out)
        yield


def prefill(args):
    for layer, batch, queries, keys, causal in PREFILL:
        heads, kv_heads, dim = bench_prefill.LAYERS[layer]
        random = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
        q, k, v = (random(batch, n, h, dim) for n, h in shapes)
        want, out = bench_prefill.reference(q, k, v, causal), torch.empty_like(q)
        call = functools.partial(ops.attention, q, k, v, causal=causal, out=out)
        cudnn = bench_prefill.BACKENDS["cuDNN"]
        calls = with_configs(call, DIM_64)
        calls["cuDNN"] = functools.partial(bench_prefill.of_torch, cudnn, q, k, v, causal)
        error = functools.partial(bench_prefill.error, want=want)
        name = f"{layer}: {batch} x ({queries}, {keys}), causal={causal}"
        queued(name, calls, error, bench_prefill.BOUND, args.rounds, out)
        yield


def over_caches(name, calls, caches, want):
    def error(got):
        return ((got.float() - want).norm() / want.norm()).item()

    out = torch.empty_like(want, dtype=torch.bfloat16)
    first = {n: functools.partial(call, *caches[0], out=out) for n, call in calls.items()}
    right, errors, failed = check(first, error, bench_decode.BOUND, out)
    samples = bench_decode.seconds({n: calls[n] for n in right}, caches)
    us = {n: sorted(s)[len(s) // 2] * 1e6 for n, s in samples.items()}
    show(name, us, errors, failed)


def decode(args):
    for kind, batch, keys, heads, kv_heads, dim in bench_decode.SMALL:
        size = batch * keys * kv_heads * dim * 2
        random = functools.partial(torch.randn, device="cuda")
        q = random(batch, 1, heads, dim).to(torch.bfloat16)

        def cache(kind=kind, shape=(batch, keys, kv_heads, dim), random=random):
            return bench_prefill.narrow(random(*shape), kind)[0]

        caches = bench_decode.caches_of(cache, size)
        scales = torch.rand(2, kv_heads, device="cuda") + 0.5
        scales = scales / 30 if kind == torch.int8 else scales
        named = {"kv_lengths": torch.full((batch,), keys, device="cuda", dtype=torch.int32)}
        named |= dict(zip(("k_scale", "v_scale"), scales))

        def call(k, v, config=None, out=None, q=q, named=named):
            return ops.attention_decode(q, k, v, config=config, out=out, **named)

        wide = [x.float() * s[:, None] for x, s in zip(caches[0], scales)]
        want = bench_decode.of_torch(q.float(), *wide)
        name = f"{batch} x (1, {keys}), {kind}, {size / 1e6:.0f} MB"
        over_caches(name, with_configs(call, DECODE), caches, want)
        yield


def mla(args):
    for batch, keys in bench_decode.LATENT:
        pages, heads = batch * keys // 64, 128
        cache = torch.randn(pages, 64, 576, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, -1)
        q = torch.randn(batch, 1, heads, 576, device="cuda", dtype=torch.bfloat16)
        named = {"page_table": table, "scale": 192**-0.5}
        named["kv_lengths"] = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        want = []
        for b in range(batch):
            k = cache[table[b].long()].reshape(-1, 576).float()
            weights = (q[b, 0].float() @ k.T * 192**-0.5).softmax(-1)
            want.append((weights @ k[:, :512])[None])

        def call(config=None, out=None, q=q, cache=cache, named=named):
            return ops.mla_decode(q, cache, config=config, out=out, **named)

        flops = 2 * (576 + 512) * batch * heads * keys
        name = f"MLA {batch} x (1, {keys}): 600 TFLOP/s are {flops / 600e6:.1f} us"
        over_caches(name, with_configs(call, MLA), [()], torch.stack(want))
        yield


PARTS = {"fp8": forms, "prefill": prefill, "decode": decode, "mla": mla}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of each part")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for part in args.parts:
        start = time.perf_counter()
        for _ in PARTS[part](args):
            if time.perf_counter() - start > args.budget:
                print(f"{part}: the rest is left out after {args.budget:.0f} s")
                break


if __name__ == "__main__":
    main()
