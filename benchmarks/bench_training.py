"""Gradients and training kernels of ops beside torch, eager and compiled.

    python benchmarks/bench_training.py [--only TEXT] [--compile] [--quick]

Each contestant is checked against float32 in the same process. Attention counts 10 products' halves
of head_dim per pair of query and key (half of the pairs if causal), as is usual for backward; other
lines show bytes that must move, over time. --compile adds torch.compile with max-autotune off and
on."""

import argparse

import torch
import torch.nn.functional as F
from timing import all_ways

import pallas_mgpu.torch as pt
from pallas_mgpu import ops

BF16 = torch.bfloat16
ATTENTION = [  # batch, length, heads, kv heads, head_dim, causal
    (4, 4096, 16, 16, 128, False),
    (4, 4096, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, True),
    (4, 4096, 32, 8, 128, True),
    (4, 4096, 16, 16, 64, True),
]
ROWS = [(16384, 2048), (8192, 4096), (8192, 8192), (2048, 16384)]


def error(got, want):
    got, want = got.float(), want.float()
    return float((got - want).abs().max() / want.abs().max())


def attention(shape):
    b, n, h, kv, d, causal = shape
    q, k, v = (torch.randn(b, n, x, d, device="cuda", dtype=BF16) for x in (h, kv, kv))
    grad = torch.randn_like(q)
    o, lse = ops.attention(q, k, v, causal=causal, return_lse=True)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        y = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=kv < h)
    g = grad.transpose(1, 2)
    ours = ops.attention_backward(grad, q, k, v, o, lse, causal=causal)
    theirs = torch.autograd.grad(y, leaves, g, retain_graph=True)
    differences = [error(a, t.transpose(1, 2)) for a, t in zip(ours, theirs)]
    print("  differences from cuDNN:", [f"{x:.1e}" for x in differences])
    flops = 10 * b * h * n * n * d / (2 if causal else 1)
    contestants = {
        "ours": lambda: ops.attention_backward(grad, q, k, v, o, lse, causal=causal),
        "cuDNN": lambda: torch.autograd.grad(y, leaves, g, retain_graph=True),
    }
    return contestants, flops / 1e12, "TFLOP/s"


def _norm(name, rows, n, compiled):
    x, grad = (torch.randn(rows, n, device="cuda", dtype=BF16) for _ in range(2))
    w, b = torch.randn(n, device="cuda", dtype=BF16), torch.randn(n, device="cuda", dtype=BF16)
    leaves = [t.requires_grad_() for t in ((x, w) if name == "rms_norm" else (x, w, b))]

    def reference(*t):
        if name == "rms_norm":
            return F.rms_norm(t[0], (n,), t[1], 1e-6)
        return F.layer_norm(t[0], (n,), t[1], t[2])

    ways = {"torch": reference} | {k: f(reference) for k, f in compiled.items()}
    made = {k: f(*leaves) for k, f in ways.items()}
    with torch.no_grad():
        run = getattr(ops, f"{name}_backward")
        options = {} if name == "rms_norm" else {"bias": True}
        ours = run(grad, x, w, **options)
    wide = [t.detach().float().requires_grad_() for t in leaves]
    want = torch.autograd.grad(reference(*wide), wide, grad.float())
    print("  errors:", [f"{error(a, t):.1e}" for a, t in zip(ours, want)])
    x, w = x.detach(), w.detach()
    contestants = {"ours": lambda: run(grad, x, w, **options)}
    for k, y in made.items():
        contestants[k] = lambda y=y: torch.autograd.grad(y, leaves, grad, retain_graph=True)
    return contestants, 3 * x.numel() * 2 / 1e12, "TB/s"


def rms_norm(rows, n, compiled):
    return _norm("rms_norm", rows, n, compiled)


def layer_norm(rows, n, compiled):
    return _norm("layer_norm", rows, n, compiled)


def softmax(rows, n, compiled):
    x, grad = (torch.randn(rows, n, device="cuda", dtype=BF16) for _ in range(2))
    leaf = x.requires_grad_()
    y = torch.softmax(leaf, -1)
    kept = y.detach()
    contestants = {
        "ours": lambda: ops.softmax_backward(grad, kept),
        "torch": lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True),
    }
    want = torch.softmax(x.detach().float(), -1)
    want = want * (grad.float() - (grad.float() * want).sum(-1, keepdim=True))
    print(f"  error: {error(ops.softmax_backward(grad, kept), want):.1e}")
    return contestants, 3 * x.numel() * 2 / 1e12, "TB/s"


def gated(rows, n, compiled):
    x = torch.randn(rows, 2 * n, device="cuda", dtype=BF16)
    grad = torch.randn(rows, n, device="cuda", dtype=BF16)

    def reference(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    leaf = x.detach().requires_grad_()
    ways = {"torch": reference} | {k: f(reference) for k, f in compiled.items()}
    made = {k: f(leaf) for k, f in ways.items()}
    print(f"  error: {error(ops.gated_linear_unit(x), reference(x.float())):.1e}")
    contestants = {"ours": lambda: ops.gated_linear_unit_backward(grad, x)}
    for k, y in made.items():
        contestants[k] = lambda y=y: torch.autograd.grad(y, leaf, grad, retain_graph=True)
    return contestants, 5 * grad.numel() * 2 / 1e12, "TB/s"


def cross_entropy(rows, n, compiled):
    x = torch.randn(rows, n, device="cuda", dtype=BF16)
    targets = torch.randint(0, n, (rows,), device="cuda", dtype=torch.int32)
    wide = targets.long()
    got = ops.cross_entropy(x, targets)[0]
    print(f"  error: {error(got, F.cross_entropy(x.float(), wide, reduction='none')):.1e}")
    contestants = {
        "ours": lambda: ops.cross_entropy(x, targets),
        "torch": lambda: F.cross_entropy(x, wide, reduction="none"),
    }
    return contestants, x.numel() * 2 / 1e12, "TB/s"


def linear_cross_entropy(rows, k, classes):
    x = torch.randn(rows, k, device="cuda", dtype=BF16).requires_grad_()
    w = (torch.randn(classes, k, device="cuda", dtype=BF16) * 0.02).requires_grad_()
    targets = torch.randint(0, classes, (rows,), device="cuda")

    def ours():
        pt.linear_cross_entropy(x, w, targets).backward()

    def theirs():
        F.cross_entropy(x @ w.T, targets).backward()

    for name, f in (("ours", ours), ("torch", theirs)):
        x.grad = w.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"  {name}: {gib:.2f} GiB at most")
    return {"ours": ours, "torch": theirs}, 6 * rows * k * classes / 1e12, "TFLOP/s"


def cases(compiled):
    for shape in ATTENTION:
        yield f"attention_backward {shape}", lambda s=shape: attention(s)
    for f in (rms_norm, layer_norm, softmax):
        for shape in ROWS:
            yield f"{f.__name__}_backward {shape}", lambda f=f, s=shape: f(*s, compiled)
    yield "gated_linear_unit_backward (8192, 14336)", lambda: gated(8192, 14336, compiled)
    for n in (32000, 128256):
        yield f"cross_entropy (4096, {n})", lambda n=n: cross_entropy(4096, n, compiled)
    shape = (8192, 4096, 128256)
    yield f"linear_cross_entropy {shape}", lambda: linear_cross_entropy(*shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    compiled = {}
    if a.compile:
        compiled["compile"] = torch.compile
        compiled["max-autotune"] = lambda f: torch.compile(f, mode="max-autotune-no-cudagraphs")
    for name, make in cases(compiled):
        if a.only not in name:
            continue
        print(name)
        torch.manual_seed(0)
        contestants, work, unit = make()
        found = all_ways(contestants, 0.3 if a.quick else 1.0, ("burst", "sustained"))
        for way, times in found.items():
            line = ", ".join(
                f"{k} {t[0] * 1e6:.0f} us {work / t[0]:.2f} {unit}" for k, t in times.items()
            )
            print(f"  {way}: {line}")
        del contestants
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
