"""ops.attention beside torch's scaled_dot_product_attention on 40 shapes of prefill.

    python benchmarks/bench_prefill.py [--budget SECONDS] [--forms-only] [--json FILE]

The shapes follow a rule, which was written down before any figure: every attention layer below
meets the batches of lengths below it by turns, causal and in full by turns. Every result is
compared with float32 by one head, on a poisoned output. Then all are captured in CUDA graphs and
take turns (plgpu.testing.do_bench, queued). The peer is the faster of torch's cuDNN and
FlashAttention backends; the ratio is its time divided by ours, the median of the rounds.

A second table has the forms that torch lacks: operands of 8 bits with scales of heads, keys and
values of 8 bits, and pages with lengths in device memory. Beside them stands the same attention of
bfloat16 without pages, by ops and by the faster of the two backends; errors are those of two heads,
relative in the norm, to float32 with the same 8-bit operands. They are timed in two ways, because
they take long enough to reach the limit of power: behind each other (queued), where the clock is
what the neighbours leave, and each after a pause (cool)."""

import argparse
import functools
import math
import time

import results
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pallas_mgpu as plgpu
from pallas_mgpu import ops

# heads, key heads, head_dim
LAYERS = {
    "Llama 3 8B": (32, 8, 128),
    "Llama 3 70B, a quarter": (16, 2, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "GPT-2 XL": (25, 25, 64),
    "ViT-L": (16, 16, 64),
    "Gemma 2 9B": (16, 8, 256),
    "MHA": (16, 16, 128),
    "DiT": (16, 16, 64),
}
# batch, queries, keys
LENGTHS = [
    (1, 16384, 16384), (2, 8192, 8192), (4, 4096, 4096), (8, 2048, 2048), (16, 1024, 1024),
    (16, 512, 512), (1, 8192, 8192), (1, 4096, 4096), (1, 2048, 2048), (2, 1000, 1000),
    (3, 3001, 3001), (32, 257, 257), (4, 77, 4096), (1, 128, 16384), (1, 1024, 8192),
]  # fmt: skip
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BOUND = 4e-3  # error of one head, relative in the norm, bfloat16
E4M3, I8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
# layer; batch, queries, keys; causal, which ends at the last key; dtypes of q and of k and v; page
FORMS = [
    ("MHA", 1, 16384, 16384, False, E4M3, E4M3, 0),
    ("MHA", 1, 16384, 16384, True, E4M3, E4M3, 0),
    ("Llama 3 8B", 4, 4096, 4096, True, E4M3, E4M3, 0),
    ("DiT", 2, 8192, 8192, False, E4M3, E4M3, 0),
    ("Gemma 2 9B", 4, 4096, 4096, False, E4M3, E4M3, 0),
    ("Llama 3 8B", 4, 4096, 4096, True, BF16, E4M3, 0),
    ("DiT", 4, 4096, 4096, True, BF16, I8, 0),
    ("Llama 3 8B", 1, 1024, 8192, True, BF16, I8, 64),
    ("Llama 3 8B", 4, 4096, 4096, True, BF16, BF16, 64),
    ("DiT", 4, 4096, 4096, True, BF16, BF16, 64),
    ("Llama 3 8B", 1, 1024, 8192, True, BF16, BF16, 16),
    ("Llama 3 8B", 2, 2048, 16384, True, E4M3, E4M3, 64),
]
BOUNDS = {E4M3: 4e-2, BF16: BOUND}  # by the dtype of q


def suite():
    """(layer, batch, queries, keys, causal): 40 of them, five for each layer."""
    found = []
    for i, layer in enumerate(LAYERS):
        for j in range(5):
            batch, queries, keys = LENGTHS[(i + 3 * j) % len(LENGTHS)]
            causal = queries == keys and (i + j) % 2 == 0
            found.append((layer, batch, queries, keys, causal))
    return found


def reference(q, k, v, causal):
    """The first and the last head of the last batch entry, in float32."""
    found = []
    for h in (0, q.shape[2] - 1):
        key = h // (q.shape[2] // k.shape[2])
        one = [x[-1:, None, :, n].float() for x, n in ((q, h), (k, key), (v, key))]
        with sdpa_kernel(SDPBackend.MATH):
            found.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal))
    return torch.cat(found)


def error(out, want):
    got = torch.stack([out[-1, :, h] for h in (0, out.shape[2] - 1)]).float()
    return float((got - want[:, 0]).norm() / want.norm())


def of_torch(backend, q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)


def time_one(case, rounds, kept):
    layer, batch, queries, keys, causal = case
    heads, kv_heads, dim = LAYERS[layer]
    random = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (random(batch, n, h, dim) for n, h in
               ((queries, heads), (keys, kv_heads), (keys, kv_heads)))  # fmt: skip
    want, out = reference(q, k, v, causal), torch.full_like(q, float("nan"))
    calls = {"ops": functools.partial(ops.attention, q, k, v, causal=causal, out=out)}
    calls |= {n: functools.partial(of_torch, b, q, k, v, causal) for n, b in BACKENDS.items()}
    found, failed, errors = {}, [], {}
    for name, call in calls.items():
        try:
            errors[name] = error(call(), want)
            if not errors[name] < BOUND:
                raise AssertionError(f"relative error {errors[name]:.2e}")
            found[name] = call
        except (RuntimeError, AssertionError, NotImplementedError, ValueError) as e:
            failed.append(f"{name}: {type(e).__name__}: {str(e)[:120]}")
    times = plgpu.testing.do_bench(found, ways="queued", rounds=rounds, graphs=True)["queued"]
    row = {"layer": layer, "batch": batch, "queries": queries, "keys": keys, "causal": causal}
    row |= {"errors": errors, "failed": failed}
    row["us"] = {n: [t.median * 1e6, *(x * 1e6 for x in t.quartiles)] for n, t in times.items()}
    peers = [n for n in times if n != "ops"]
    if "ops" in times and peers:
        row["peer"] = min(peers, key=lambda n: times[n].median)
        row["ratio"] = times["ops"].ratio(times[row["peer"]])
    flops = 4 * batch * heads * queries * keys * dim * (0.5 if causal else 1)
    kept.add(
        "prefill", f"{layer}: {batch} x ({queries}, {keys}){', causal' * causal}",
        {"queued": {n: results.of_timing(t) for n, t in times.items()}}, work=flops,
        errors=errors, queries=queries, keys=keys,
    )  # fmt: skip
    row["tflops"] = flops / row["us"]["ops"][0] / 1e6 if "ops" in times else None
    return row


def narrow(x, dtype):
    """The array in that dtype, scales of its heads, and what both mean in float32."""
    if dtype == BF16:
        x = x.to(dtype)
        return x, None, x.float()
    unit = 1 / 30 if dtype == I8 else 1.0
    scale = (torch.rand(x.shape[2], device="cuda") + 0.5) * unit
    x = (x * 30).round().clamp(-127, 127).to(dtype) if dtype == I8 else x.to(dtype)
    return x, scale, x.float() * scale[:, None]


def in_pages(x, page, order):
    rows = x.reshape(-1, page, *x.shape[2:])
    found = torch.empty_like(rows)
    found.view(torch.uint8)[order.long()] = rows.view(torch.uint8)
    return found


def reference_of_form(q, k, v, causal):
    """The first and the last head of the last batch entry, in float32."""
    found, (n, m) = [], (q.shape[1], k.shape[1])
    mask = torch.ones(n, m, device="cuda", dtype=torch.bool).tril(m - n) if causal else None
    for h in (0, q.shape[2] - 1):
        key = h // (q.shape[2] // k.shape[2])
        one = [x[-1:, None, :, i] for x, i in ((q, h), (k, key), (v, key))]
        with sdpa_kernel(SDPBackend.MATH):
            found.append(torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask))
    return torch.cat(found)


def calls_of_form(case):
    """``{name: (call, whether it computes the same)}`` and what results must be close to."""
    layer, batch, queries, keys, causal, q_dtype, dtype, page = case
    heads, kv_heads, dim = LAYERS[layer]
    random = functools.partial(torch.randn, device="cuda")
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    (q, q_scale, q32), (k, k_scale, k32), (v, v_scale, v32) = (
        narrow(random(batch, n, h, dim), t) for (n, h), t in zip(shapes, (q_dtype, dtype, dtype))
    )
    how = {"causal": causal, "bottom_right": causal}
    named = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    named = {n: x for n, x in named.items() if x is not None}
    wide = [x.to(BF16) for x in (q32, k32, v32)]
    if page:
        order = torch.randperm(batch * keys // page, device="cuda").to(torch.int32)
        k, v = in_pages(k, page, order), in_pages(v, page, order)
        named["page_table"] = order.reshape(batch, -1)
        named["kv_lengths"] = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    out = torch.full((batch, queries, heads, dim), float("nan"), device="cuda", dtype=BF16)
    calls = {"ops": functools.partial(ops.attention, q, k, v, **named, **how, out=out)}
    calls["bfloat16 ops"] = functools.partial(ops.attention, *wide, **how)
    if queries == keys or not causal:
        calls |= {n: functools.partial(of_torch, b, *wide, causal) for n, b in BACKENDS.items()}
    return calls, reference_of_form(q32, k32, v32, causal)


def time_form(case, rounds, kept):
    layer, batch, queries, keys, causal, q_dtype, dtype, page = case
    heads, _, dim = LAYERS[layer]
    calls, want = calls_of_form(case)
    found, errors, failed = {}, {}, []
    for name, call in calls.items():
        try:
            errors[name] = error(call(), want)
            alike = name == "ops" and dtype == q_dtype  # others: scaled operands are rounded
            bound = BOUNDS[q_dtype] if alike else 1e-2
            if not errors[name] < bound:
                raise AssertionError(f"relative error {errors[name]:.2e}")
            found[name] = call
        except (RuntimeError, AssertionError, NotImplementedError, ValueError) as e:
            failed.append(f"{name}: {type(e).__name__}: {str(e)[:120]}")
    both = plgpu.testing.do_bench(found, ways=("queued", "cool"), rounds=rounds, graphs=True)
    times = both["queued"]
    pairs = queries * keys - (queries * (queries - 1) // 2 if causal else 0)
    flops = 4 * batch * heads * dim * pairs
    dtypes = " ".join(str(t).removeprefix("torch.") for t in (q_dtype, dtype))
    name = f"{layer}: {batch} x ({queries}, {keys}){', causal' * causal}, {dtypes}"
    name += f", pages of {page}" if page else ""
    kept.add(
        "other forms", name,
        {way: {n: results.of_timing(t) for n, t in ts.items()} for way, ts in both.items()},
        references=("bfloat16", *BACKENDS), work=flops, errors=errors, queries=queries, keys=keys,
    )  # fmt: skip
    us = {n: t.median * 1e6 for n, t in times.items()}
    cells = [f"{us[n]:.1f}" if n in us else "-" for n in ("ops", "bfloat16 ops", *BACKENDS)]
    rates = [f"{flops / t['ops'].median / 1e12:.0f}" for t in both.values() if "ops" in t]
    rate = ", ".join(rates) or "-"
    shown = f"{errors['ops']:.1e}" if "ops" in errors else "-"
    print(f"| {name} | {' | '.join(cells)} | {rate} | {shown} |", flush=True)
    for failure in failed:
        print(f"  {case}: {failure}")


def time_forms(args, kept, start):
    print("\n| form | us | bfloat16 ops | cuDNN | flash | TFLOP/s, cool | error |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for case in FORMS:
        if time.perf_counter() - start > args.budget:
            print(f"left out after {args.budget:.0f} s: {case}")
            continue
        time_form(case, args.rounds, kept)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--budget", type=float, default=120, help="seconds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forms-only", action="store_true", help="without the 40 shapes")
    results.argument(parser)
    args = parser.parse_args()
    kept = results.Results(__file__, args.json)
    start, rows = time.perf_counter(), []
    if args.forms_only:
        return time_forms(args, kept, start)
    print("| layer | batch, queries, keys | causal | ops, us | TFLOP/s | peer, us | ratio |")
    print("|---|---|---|---:|---:|---:|---:|")
    for case in suite():
        if time.perf_counter() - start > args.budget:
            print(f"left out after {args.budget:.0f} s: {case}")
            continue
        row = time_one(case, args.rounds, kept)
        rows.append(row)
        if "ratio" in row:
            us, peer = row["us"], row["peer"]
            print(
                f"| {row['layer']} | {case[1]} x ({case[2]}, {case[3]}) | {case[4]} |"
                f" {us['ops'][0]:.1f} | {row['tflops']:.0f} | {us[peer][0]:.1f} ({peer}) |"
                f" {row['ratio'][0]:.3f} |",
                flush=True,
            )
        for failure in row["failed"]:
            print(f"  {case}: {failure}")
    ratios = [r["ratio"][0] for r in rows if "ratio" in r]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\n{len(ratios)} shapes: geometric mean {mean:.3f}, minimum {min(ratios):.3f}")
    time_forms(args, kept, start)


if __name__ == "__main__":
    main()
