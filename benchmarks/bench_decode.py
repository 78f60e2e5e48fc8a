"""ops.attention_decode beside torch's scaled_dot_product_attention, and ops.mla_decode.

    python benchmarks/bench_decode.py [--json FILE]

One query for each sequence. Results are compared with float32 first. Calls go round over caches of
at least 512 MiB, so that keys and values come from memory, and run in CUDA graphs, which take
turns; the time is the median of nine replays. The peer is the faster of torch's cuDNN and
FlashAttention backends. TB/s counts the keys and values, read once; *asked* is that of 0.9 of the
bandwidth of a copy, with 6 us more below 128 MiB. 8-bit caches have no peer, nor has MLA."""

import argparse
import functools
import math

import results
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pallas_mgpu import ops

ATTENTION = torch.nn.functional.scaled_dot_product_attention
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BOUND = 1e-2  # error, relative in the norm
# batch, keys, query heads, key heads, head_dim
SHAPES = [
    (32, 8192, 32, 8, 128), (1, 32768, 32, 8, 128), (1, 8192, 32, 8, 128), (8, 4096, 32, 8, 128),
    (128, 2048, 32, 8, 128), (4, 2000, 32, 32, 128), (16, 1000, 28, 4, 128), (64, 4096, 16, 16, 64),
]  # fmt: skip
SMALL = [(kind, *SHAPES[n]) for kind in (torch.float8_e4m3fn, torch.int8) for n in (0, 1)]
LATENT = [(128, 4096), (128, 8192), (16, 8192)]  # batch, keys; 128 heads, pages of 64


def of_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ATTENTION(q, k, v, enable_gqa=True).transpose(1, 2)


def of_backend(backend, q, k, v):
    with sdpa_kernel(backend):
        return of_torch(q, k, v)


def copy_bandwidth():
    """Bytes per second, read and written, of a copy of 1 GiB."""
    a, best = torch.empty(2**30, device="cuda", dtype=torch.int8), math.inf
    b = torch.empty_like(a)
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2 * 2**30 / best


def seconds(calls, caches):
    """Of one call of each of ``{name: f}``, in CUDA graphs of calls that go round over the caches;
    nine times by turns, after one more."""
    count, graphs = max(10, 2 * len(caches)), {}
    for name, call in calls.items():
        for cache in caches[:3]:
            call(*cache)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for n in range(count):
                call(*caches[n % len(caches)])
    times = {name: [] for name in calls}
    for _ in range(10):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / count)
    return {name: t[1:] for name, t in times.items()}


def error_of(got, want):
    found = ((got.float() - want).norm() / want.norm()).item()
    assert found < BOUND, found
    return found


def caches_of(make, size):
    return [(make(), make()) for _ in range(-(-(2**29) // size))]


def one(found, copy, batch, keys, heads, kv_heads, head_dim):
    size = batch * keys * kv_heads * head_dim * 4  # bytes of keys and values in bfloat16

    def random(n, h):
        return torch.randn(batch, n, h, head_dim, device="cuda", dtype=torch.bfloat16)

    q, caches = random(1, heads), caches_of(lambda: random(keys, kv_heads), size)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    want = of_torch(q.float(), *(x.float() for x in caches[0]))
    calls = {"ops": lambda k, v: ops.attention_decode(q, k, v, kv_lengths=lengths)}
    calls |= {name: functools.partial(of_backend, b, q) for name, b in BACKENDS.items()}
    error = error_of(calls["ops"](*caches[0]), want)
    samples = seconds(calls, caches)
    shape = f"{batch} x (1, {keys}), {heads}/{kv_heads} heads of {head_dim}"
    found.add_samples(
        "decode", shape, samples, work=size, unit="B", errors={"ops": error}, batch=batch, keys=keys
    )
    us = {name: results.spread(s)[0] * 1e6 for name, s in samples.items()}
    peer = min(BACKENDS, key=us.get)
    asked = size / (0.9 * copy) * 1e6 + (6 if size < 2**27 else 0)
    print(
        f"| {shape} | {us['ops']:.1f} | {size / us['ops'] / 1e6:.2f} | {asked:.1f} |"
        f" {us[peer]:.1f} ({peer}) | {us[peer] / us['ops']:.2f} | {error:.1e} |",
        flush=True,
    )


def small(found, copy, kind, batch, keys, heads, kv_heads, head_dim):
    """8-bit caches, with scales of heads."""
    size = batch * keys * kv_heads * head_dim * 2

    def random():
        x = torch.randn(batch, keys, kv_heads, head_dim, device="cuda")
        return (x * 30).round().clamp(-127, 127).to(kind) if kind == torch.int8 else x.to(kind)

    q = torch.randn(batch, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    caches, unit = caches_of(random, size), 1 / 30 if kind == torch.int8 else 1
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    scales = (torch.rand(2, kv_heads, device="cuda") + 0.5) * unit
    named = dict(zip(("k_scale", "v_scale"), scales))

    def call(k, v):
        return ops.attention_decode(q, k, v, kv_lengths=lengths, **named)

    wide = [x.float() * s[:, None] for x, s in zip(caches[0], scales)]
    error = error_of(call(*caches[0]), of_torch(q.float(), *wide))
    samples = seconds({"ops": call}, caches)
    shape = f"{batch} x (1, {keys}), {heads}/{kv_heads} heads, {str(kind).removeprefix('torch.')}"
    found.add_samples(
        "decode, 8 bits", shape, samples, work=size, unit="B", errors={"ops": error}, batch=batch
    )
    us = results.spread(samples["ops"])[0] * 1e6
    asked = size / (0.9 * copy) * 1e6 + (6 if size < 2**27 else 0)
    print(
        f"| {shape} | {us:.1f} | {size / us / 1e6:.2f} | {asked:.1f} | - | - | {error:.1e} |",
        flush=True,
    )


def latent(found, batch, keys, heads=128, page=64):
    pages = batch * keys // page
    cache = torch.randn(pages, page, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, -1)
    q = torch.randn(batch, 1, heads, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    how = {"kv_lengths": lengths, "page_table": table, "scale": 192**-0.5}

    def call():
        return ops.mla_decode(q, cache, **how)

    out, errors = call(), []
    for b in {0, batch - 1}:
        k = cache[table[b].long()].reshape(-1, 576).float()
        weights = (q[b, 0].float() @ k.T * 192**-0.5).softmax(-1)
        errors.append(error_of(out[b, 0], weights @ k[:, :512]))
    samples = seconds({"ops": call}, [()])
    flops, shape = 2 * (576 + 512) * batch * heads * keys, f"{batch} x (1, {keys}), {heads} heads"
    found.add_samples(
        "decode, MLA", shape, samples, work=flops, errors={"ops": max(errors)}, batch=batch
    )
    us = results.spread(samples["ops"])[0] * 1e6
    print(f"| {shape} | {us:.1f} | {flops / us / 1e6:.0f} | {max(errors):.1e} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json)
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s\n")
    print("| shape | ops, us | TB/s | asked, us | peer, us | peer / ops | error |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        one(found, copy, *shape)
    for shape in SMALL:
        small(found, copy, *shape)
    print("\n| MLA | us | TFLOP/s | error |\n|---|---:|---:|---:|")
    for shape in LATENT:
        latent(found, *shape)


if __name__ == "__main__":
    main()
