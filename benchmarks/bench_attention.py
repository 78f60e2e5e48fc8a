"""ops.attention beside torch's SDPA (cuDNN and flash), JAX's Pallas and the hand-written target.

    python benchmarks/bench_attention.py [--only TEXT] [--configs] [--jax] [--target DIR] [--quick]

Random normal float16, every contestant checked against a float32 softmax in the same process, the
output poisoned. Causal FLOPs count half. --configs adds other configurations, --target DIR a
directory with the hand-written attention.cu and its bench.py."""

import argparse
import sys

import results
import torch
from timing import all_ways, estimate
from torch.nn.attention import SDPBackend, sdpa_kernel

from pallas_mgpu.ops import AttentionConfig, attention

# batch, length, heads, kv heads, head_dim, causal
SHAPES = [
    (4, 4096, 16, 16, 128, False),
    (1, 16384, 16, 16, 128, False),
    (4, 4096, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, True),
    (16, 1024, 16, 16, 128, True),
    (8, 2048, 16, 16, 128, True),
    (2, 8192, 16, 16, 128, True),
    (4, 4096, 16, 16, 64, False),
    (1, 16384, 16, 16, 64, False),
    (4, 4096, 16, 16, 64, True),
    (1, 16384, 16, 16, 64, True),
    (4, 4096, 16, 16, 256, False),
    (4, 4096, 16, 16, 256, True),
    (4, 4096, 16, 2, 128, True),
    (2, 1000, 16, 16, 128, True),
]


def candidates(dim, causal):
    consumers, block, stages = (3, 128, 4) if dim == 64 else (2, 64 if dim == 256 else 128, 2)
    for lazy in (False, True):
        for late in (False, True):
            for hold in (False, True):
                yield AttentionConfig(consumers, block, stages, lazy, late, hold, dim == 128)
    if dim == 128:
        yield AttentionConfig(2, 128, 2)
    else:
        yield AttentionConfig(consumers, 112 if dim == 64 else 48, stages)


def expected(q, k, v, causal):
    batch, length, heads, dim = q.shape
    share = heads // k.shape[2]
    out = torch.empty(q.shape, device="cuda")
    for b in range(batch):
        for h in range(heads):
            for r in range(0, length, 4096):
                e = min(length, r + 4096)
                n = e if causal else length
                s = (q[b, r:e, h].float() @ k[b, :n, h // share].float().T) * dim**-0.5
                if causal:
                    at = torch.arange(n, device="cuda")[None]
                    s.masked_fill_(at > torch.arange(r, e, device="cuda")[:, None], float("-inf"))
                out[b, r:e, h] = torch.softmax(s, -1) @ v[b, :n, h // share].float()
    return out


def error(got, want):
    got = got.float()
    return float((got - want).norm() / want.norm()) if got.isfinite().all() else float("nan")


def sdpa(q, k, v, causal, backend):
    t = [x.transpose(1, 2) for x in (q, k, v)]
    gqa = q.shape[2] != k.shape[2]

    def f():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                *t, is_causal=causal, enable_gqa=gqa
            ).transpose(1, 2)

    return f


def of_jax(q, k, v, causal):
    import jax
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    scaled = (q * q.shape[3] ** -0.5).to(q.dtype)  # theirs knows no scale
    args = [jax.dlpack.from_dlpack(x) for x in (scaled, k, v)]
    tilings = {64: [(256, 2), (128, 4), (128, 2)], 128: [(128, 2), (64, 4)], 256: [(64, 2)]}
    best = None
    for block, steps in tilings[q.shape[3]]:
        config = theirs.TuningConfig(
            block_q=64, block_kv=block, max_concurrent_steps=steps, causal=causal
        )
        jitted = jax.jit(lambda *a, c=config: theirs.attention(*a, c))
        last = []

        def f(jitted=jitted, last=last):
            last[:] = [jitted(*args)]
            return last[0]

        f.wall = True  # on a stream of its own
        f.result = lambda last=last: torch.from_dlpack(last[0])
        try:
            f()
            took = estimate(f)
        except Exception as e:
            print(f"JAX's Pallas {block} x {steps}: {type(e).__name__}: {str(e)[:100]}")
            continue
        if best is None or took < best[0]:
            best = took, f
    if best is None:
        raise RuntimeError("no tiling runs")
    return best[1]


def of_target(directory, q, k, v, causal):
    sys.path.insert(0, directory)
    import bench

    cu = of_target.cuda = getattr(of_target, "cuda", None) or bench.Cuda()
    shape = (q.shape[0], q.shape[1], q.shape[2], q.shape[3], int(causal))
    o, counter = torch.empty_like(q), torch.zeros(2, device="cuda", dtype=torch.int32)
    out = {}
    for name, d in bench.ATT[shape].items():
        go = bench.att_make(cu, dict(d, CAUSAL=int(causal)), q, k, v, o, counter)

        def f(go=go, counter=counter):  # the counter must live as long as the function
            go()
            return o

        f.poison = lambda: o.fill_(float("nan"))

        out[f"target, {name}"] = f
    return out


def run(shape, args):
    batch, length, heads, kv_heads, dim, causal = shape
    torch.manual_seed(length + dim)
    q = torch.randn(batch, length, heads, dim, device="cuda").half()
    k, v = (torch.randn(batch, length, kv_heads, dim, device="cuda").half() for _ in range(2))
    out = torch.empty_like(q)
    want = expected(q, k, v, causal)
    todo = {
        "SDPA cuDNN": sdpa(q, k, v, causal, SDPBackend.CUDNN_ATTENTION),
        "SDPA flash": sdpa(q, k, v, causal, SDPBackend.FLASH_ATTENTION),
        "pallas_mgpu": lambda: attention(q, k, v, causal=causal, out=out),
    }
    if args.configs:
        del todo["SDPA flash"]
        for c in candidates(dim, causal):
            todo[repr(c)] = lambda c=c: attention(q, k, v, causal=causal, config=c, out=out)
    if args.target and kv_heads == heads and dim <= 128 and length in (4096, 16384):
        todo.update(of_target(args.target, q, k, v, causal))
    if args.jax:
        try:
            todo["JAX's Pallas"] = of_jax(q, k, v, causal)
        except Exception as e:
            print(f"JAX's Pallas does not run: {type(e).__name__}: {str(e)[:200]}")
    good, errors = {}, {}
    for name, f in todo.items():
        try:
            worst = 0.0
            for _ in range(2):
                out.fill_(float("nan"))
                getattr(f, "poison", int)()
                got = f()
                got = f.result() if hasattr(f, "result") else got
                torch.cuda.synchronize()
                worst = max(worst, error(got, want))
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:200]}")
            continue
        errors[name] = f"{worst:.1e}"
        if not worst < 2e-3:
            print(f"{name} is WRONG: relative error {worst}")
            continue
        good[name] = f
    assert "pallas_mgpu" in good
    ways = ("burst",) if args.quick and args.configs else ("burst", "cool", "sustained")
    times = all_ways(good, 0.5 if args.quick else 1, ways)
    flops = 4 * batch * heads * length * length * dim // (2 if causal else 1)
    args.found.add(
        "attention", title_of(shape), times, ours="pallas_mgpu", work=flops, errors=errors,
        length=length, head_dim=dim, causal=int(causal), group=heads // kv_heads,
    )  # fmt: skip
    print(f"### {title_of(shape)}\n")
    print("| kernel | " + " | ".join(f"{w}, TFLOP/s | ratio" for w in ways) + " | error |")
    print("|---|" + "---:|---:|" * len(ways) + "---:|")
    base = next(iter(good))
    for name in good:
        cells = []
        for w in ways:
            if name not in times[w]:
                cells.append("- | -")
                continue
            median, low, high = times[w][name]
            r = [flops / t / 1e12 for t in (median, high, low)]
            ratio = times[w][base][0] / median
            cells.append(f"{r[0]:.0f} ({r[1]:.0f} to {r[2]:.0f}) | {ratio:.3f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {errors[name]} |")
    print(flush=True)
    targets = [n for n in good if n.startswith("target")]
    row = {}
    for w in ways:
        t = {n: times[w][n][0] / times[w]["pallas_mgpu"][0] for n in times[w]}
        best = min((t[n] for n in targets), default=float("nan"))
        row[w] = t[base], best, t.get("JAX's Pallas", float("nan"))
    return title_of(shape), row


def title_of(shape):
    return "B={} S={} H={}/{} D={}".format(*shape[:5]) + (" causal" if shape[5] else " full")


def summary(rows):
    print("### Summary: time of the other / time of pallas_mgpu (above 1: pallas_mgpu is faster)\n")
    print("SDPA cuDNN, best hand-written, JAX's Pallas\n")
    ways = list(rows[0][1])
    print("| shape | " + " | ".join(ways) + " |")
    print("|---|" + "---:|" * len(ways))
    for title, row in rows:
        cells = [", ".join("-" if r != r else f"{r:.3f}" for r in row[w]) for w in ways]
        print(f"| {title} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="part of a title, as 'S=4096 H=16/16 D=128 full'"
    )
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--jax", action="store_true")
    parser.add_argument("--target")
    parser.add_argument("--quick", action="store_true")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    shapes = [shape for shape in SHAPES if args.only in title_of(shape)]
    rows = [run(shape, args) for shape in shapes]
    if not args.configs:
        summary(rows)


if __name__ == "__main__":
    main()
