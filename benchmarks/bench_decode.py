"""ops.attention_decode beside torch's scaled_dot_product_attention: one query for each sequence.

    python benchmarks/bench_decode.py [--json FILE]

Both results are compared with float32 first. Calls go round over caches of at least 512 MiB, so
that keys and values come from memory, and run in CUDA graphs; the time is the median of nine
replays. TB/s counts the keys and values, read once."""

import argparse

import results
import torch

from pallas_mgpu import ops

ATTENTION = torch.nn.functional.scaled_dot_product_attention
BOUND = 1e-2  # error, relative in the norm
# batch, keys, query heads, key heads, head_dim
SHAPES = [
    (32, 8192, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (8, 4096, 32, 8, 128),
    (128, 2048, 32, 8, 128),
]


def of_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ATTENTION(q, k, v, enable_gqa=True).transpose(1, 2)


def seconds(call, caches):
    """Of one call, in a CUDA graph of calls that go round over the caches; nine times."""
    calls = max(10, 2 * len(caches))
    for cache in caches[:3]:
        call(*cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(calls):
            call(*caches[n % len(caches)])
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return times


def one(found, batch, keys, heads, kv_heads, head_dim):
    size = batch * keys * kv_heads * head_dim * 4  # bytes of keys and values in bfloat16

    def random(n, h):
        return torch.randn(batch, n, h, head_dim, device="cuda", dtype=torch.bfloat16)

    q = random(1, heads)
    caches = [(random(keys, kv_heads), random(keys, kv_heads)) for _ in range(-(-(2**29) // size))]
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

    def ours(k, v):
        return ops.attention_decode(q, k, v, kv_lengths=lengths)

    want = of_torch(q.float(), *(x.float() for x in caches[0]))
    error = ((ours(*caches[0]).float() - want).norm() / want.norm()).item()
    assert error < BOUND, error
    samples = {
        "ops": seconds(ours, caches),
        "torch": seconds(lambda k, v: of_torch(q, k, v), caches),
    }
    shape = f"{batch} x (1, {keys}), {heads}/{kv_heads} heads"
    found.add_samples(
        "decode", shape, samples, work=size, unit="B", errors={"ops": error}, batch=batch, keys=keys
    )
    a, b = (results.spread(s)[0] * 1e6 for s in samples.values())
    print(f"| {shape} | {a:.1f} | {size / a / 1e6:.2f} | {b:.1f} | {b / a:.2f} | {error:.1e} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json)
    print("| shape | ops, us | TB/s | torch, us | torch / ops | error |")
    print("|---|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        one(found, *shape)


if __name__ == "__main__":
    main()
