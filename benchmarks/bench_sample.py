"""ops.sample beside torch: sort, cumulative sum and multinomial, as PyTorch models sample.

    python benchmarks/bench_sample.py [--json FILE]

Also with each number of blocks for a row (SampleConfig). Before it is timed, each kernel's tokens
are checked against the sets that NumPy allows. GPU time in CUDA graphs, the median of nine replays
of 20 calls."""

import argparse
import functools

import results
import torch

from pallas_mgpu import ops

SHAPES = [(1, 128256), (32, 128256), (256, 128256), (256, 32000)]  # rows, vocabulary
BLOCKS = (0, 1, 2, 4, 8)  # of a row; 0: as chosen by default
OPTIONS = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}]


def of_torch(logits, top_k=None, top_p=None):
    x = logits.float()
    if top_k:
        x = x.masked_fill(x < x.topk(top_k, dim=-1).values[:, -1:], float("-inf"))
    p = x.softmax(-1)
    if top_p:
        order, at = p.sort(dim=-1, descending=True)
        drop = order.cumsum(-1) - order >= top_p
        p = p.masked_fill(drop.scatter(1, at, drop), 0)
    noise = torch.empty_like(p).exponential_()
    return (p / noise).argmax(-1)


def check(logits, tokens, top_k=None, top_p=None):
    x = logits.double()
    chosen = x.gather(1, tokens.long()[:, None])
    if top_k:
        least = x.topk(top_k, dim=-1).values[:, -1:]
        assert (chosen >= least).all()
        x = x.masked_fill(x < least, float("-inf"))
    if top_p:
        p = x.softmax(-1)
        before = torch.where(x > chosen, p, 0).sum(-1)
        assert (before < top_p + 1e-4).all()


def seconds(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / 20)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json)
    columns = " | ".join(f"{b} blocks, us" if b else "ops, us" for b in BLOCKS)
    print(f"| logits, bfloat16 | options | {columns} | torch, us | torch / ops |")
    print("|---|---|" + "---:|" * (len(BLOCKS) + 2))
    for shape in SHAPES:
        logits = 3 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        seed = torch.tensor([1], device="cuda", dtype=torch.int32)
        out = torch.full(shape[:1], -1, device="cuda", dtype=torch.int32)
        for options in OPTIONS:
            samples = {}
            for blocks in BLOCKS:
                config = ops.SampleConfig(blocks) if blocks else None
                call = functools.partial(
                    ops.sample, logits, seed, out=out, config=config, **options
                )
                out.fill_(-1)
                check(logits, call(), **options)
                samples[f"ops, {blocks} blocks a row" if config else "ops"] = seconds(call)
            samples["torch"] = seconds(functools.partial(of_torch, logits, **options))
            given = ", ".join(f"{k}={v}" for k, v in options.items()) or "no options"
            case = f"{shape[0]} x {shape[1]}, {given}"
            found.add_samples("sample", case, samples, work=2 * logits.numel(), unit="B")
            us = [results.spread(s)[0] * 1e6 for s in samples.values()]
            cells = " | ".join(f"{x:.1f}" for x in us)
            ratio = us[-1] / us[0]
            print(f"| {shape} | {options or '-'} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
