"""Gradients and training kernels of ops beside torch (cuDNN, cuBLAS), torch.compile and JAX.

    python benchmarks/bench_training.py [--only TEXT,TEXT] [--no-compile] [--no-autotune]
        [--seconds 500] [--ways burst,sustained] [--rounds 5] [--json FILE]
    python benchmarks/bench_training.py --device cpu        # tiny shapes, to try the script

Each case is checked against float32 in the same process: results of ours are written over NaN where
the op takes `out=`, and errors of ours and of torch are relative to the largest element. Attention
counts 10 * head_dim operations for each pair of query and key (half of the pairs if causal), as is
usual for the backward alone, 14 with the forward; other cases count the bytes that must move,
and time a copy of as many bytes beside, or the operations of their products. Cases run until the
time is over, the most important ones first; torch.compile with max-autotune runs while half of
the time is left. A case that fails is reported and the next one runs. A short table comes last."""

import argparse
import functools
import os
import time
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import results
import torch
import torch.nn.functional as F
from torch._functorch import config as torch_config

import pallas_mgpu.torch as pt
from pallas_mgpu import ops
from pallas_mgpu.testing import do_bench

BF16 = torch.bfloat16
ATTENTION = [  # batch, length, heads, kv heads, head_dim, causal
    (4, 4096, 16, 16, 128, False),
    (4, 4096, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, True),
    (4, 4096, 32, 8, 128, True),
    (4, 4096, 16, 16, 64, True),
]
ROWS = [(8192, 4096), (16384, 2048), (8192, 8192), (2048, 16384)]


class HostTimer:
    """Of one call, by the clock of the host: to try the script without a GPU."""

    def calls(self, f, count, lead=0):
        begin = time.perf_counter()
        f()
        return time.perf_counter() - begin


class Bench:
    """The device, the peers and what was found."""

    def __init__(self, arguments, file=__file__):
        self.a, self.begin, self.found = arguments, time.perf_counter(), []
        self.tiny = arguments.device == "cpu"
        self.timer = HostTimer() if self.tiny else None
        self.results = results.Results(file, arguments.json)
        torch_config.donated_buffer = False  # backward passes are repeated

    def left(self):
        return self.a.seconds - (time.perf_counter() - self.begin)

    def randn(self, *shape, dtype=BF16, scale=1.0):
        return torch.randn(*shape, device=self.a.device, dtype=dtype) * scale

    def nan(self, *shape, dtype=BF16):
        return torch.full(shape, float("nan"), device=self.a.device, dtype=dtype)

    def copy(self, terabytes):
        """A copy that moves as many bytes."""
        source = torch.zeros(int(terabytes * 1e12 / 4), device=self.a.device, dtype=BF16)
        return functools.partial(torch.empty_like(source).copy_, source)

    def compiled(self, f):
        """{name: f or a compiled form of it}"""
        found = {"torch": f}
        if self.tiny:
            return found | {"compile": torch.compile(f, backend="eager", dynamic=False)}
        if self.a.compile:
            found["compile"] = torch.compile(f, dynamic=False)
        if self.a.compile and self.a.autotune and self.left() > self.a.seconds / 2:
            found["autotune"] = torch.compile(f, dynamic=False, mode="max-autotune-no-cudagraphs")
        return found

    def run(self, name, make):
        """Checks and times one case: make() -> (contestants, {what: error}, work, unit)."""
        torch.manual_seed(0)
        print(name, flush=True)
        try:
            contestants, errors, work, unit = make()
            if unit == "TB/s":
                contestants["copy"] = self.copy(work)
            wrong = [k for k, e in errors.items() if e != e]
            if wrong:
                raise ArithmeticError(f"NaN in results of {', '.join(wrong)}")
            ways = ("burst",) if self.tiny else self.a.ways.split(",")
            rounds = 2 if self.tiny else self.a.rounds
            times = {
                way: do_bench(contestants, ways=way, rounds=rounds, timer=self.timer)[way]
                for way in ways
            }
        except Exception as e:  # report it, and go on with the next case
            traceback.print_exc()
            self.found.append({"case": name, "failed": f"{type(e).__name__}: {e}"[:300]})
            if self.tiny:
                raise
            return
        row = {"case": name, "unit": unit, "errors": errors, "us": {}, "rate": {}}
        of_way = {w: {n: results.of_timing(t) for n, t in x.items()} for w, x in times.items()}
        scale, what = {"TFLOP/s": (1e12, "FLOP"), "TB/s": (1e12, "B")}[unit]
        self.results.add(
            name.split()[0], name, of_way, ours="ours", references="copy", work=work * scale,
            unit=what, errors=errors
        )  # fmt: skip
        for way, of_way in times.items():
            for k, t in of_way.items():
                row["us"][f"{k}, {way}"] = t.median * 1e6
                row["rate"][f"{k}, {way}"] = work / t.median
                print(f"  {way:9} {k:16} {t.median * 1e6:9.0f} us {work / t.median:8.2f} {unit}")
        print("  errors:", {k: f"{e:.1e}" for k, e in errors.items()}, flush=True)
        self.found.append(row)

    def table(self):
        """One line a case: ours in the first column, others relative to it."""
        print("\ncase | ours (best) | others' time / ours")
        for row in self.found:
            if "failed" in row:
                print(f"{row['case']} | FAILED {row['failed'][:80]}")
                continue
            way = next(iter(row["us"])).rpartition(", ")[2]
            us = {k.rpartition(",")[0]: t for k, t in row["us"].items() if k.endswith(way)}
            ours = {k: t for k, t in us.items() if k.startswith("ours") and "alone" not in k}
            best = min(ours, key=ours.get)
            rate = row["rate"][f"{best}, {way}"]
            others = ", ".join(f"{k} {t / us[best]:.2f}" for k, t in us.items() if k != best)
            print(f"{row['case']} | {best} {us[best]:.0f} us {rate:.4g} {row['unit']} | {others}")


def error(got, want):
    got, want = got.float(), want.float()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def errors_of(found, want):
    """The greatest error of each contestant's results; NaN if one of them has a NaN."""
    of_each = {k: [error(a, b) for a, b in zip(r, want, strict=True)] for k, r in found.items()}
    return {k: float(torch.tensor(errors).max()) for k, errors in of_each.items()}


def grads(y, leaves, grad):
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


# ---- attention -----------------------------------------------------------------------------------


def plain_attention(q, k, v, causal, bias=None, cap=None, left=None):
    """In float32; [batch, heads, length, dim]."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if bias is None else s + bias
    n = s.shape[-1]
    if causal:
        keep = torch.ones(n, n, device=s.device, dtype=torch.bool).tril()
        keep = keep if left is None else keep.triu(-left)
        s = s.masked_fill(~keep, -torch.inf)
    return s.softmax(-1) @ v


def part(x, heads):
    """The first heads of the first batch entry in float32, [1, heads, length, dim]."""
    return x[:1, :, :heads].transpose(1, 2).float()


def of_first_heads(q, k, v, grad, causal, **options):
    """Gradients in float32 of the first head of keys: [1, length, heads, dim] each."""
    group = q.shape[2] // k.shape[2]
    leaves = [part(x, n).requires_grad_() for x, n in ((q, group), (k, 1), (v, 1))]
    y = plain_attention(leaves[0], leaves[1], leaves[2], causal, **options)
    found = torch.autograd.grad(y, leaves, part(grad, group))
    return [x.transpose(1, 2) for x in found]


def first_heads(found, want):
    return [x[:1, :, : w.shape[2]] for x, w in zip(found, want)]


def attention_inputs(b, shape):
    batch, n, h, kv, d, causal = shape
    q, k, v = (b.randn(batch, n, x, d) for x in (h, kv, kv))
    flops = 10 * batch * h * n * n * d / (2 if causal else 1)
    return q, k, v, torch.randn_like(q), causal, flops / 1e12


def sdpa(b, leaves, causal, mask=None):
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    call = functools.partial(
        F.scaled_dot_product_attention, *leaves, is_causal=causal, enable_gqa=gqa, attn_mask=mask
    )
    if b.tiny or mask is not None:
        return call()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return call()


def attention(b, shape):
    q, k, v, grad, causal, work = attention_inputs(b, shape)
    o, lse = ops.attention(q, k, v, causal=causal, return_lse=True)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    theirs = grads(sdpa(b, leaves, causal), leaves, grad.transpose(1, 2))
    contestants, found = {}, {}
    made = {
        "ours": None,
        "ours, deterministic": ops.AttentionBackwardConfig(7),
    }
    for name, config in made.items():
        options = {"causal": causal, "config": config}
        out = tuple(b.nan(*x.shape) for x in (q, k, v))
        run = functools.partial(ops.attention_backward, grad, q, k, v, o, lse, **options, out=out)
        run()
        contestants[name], found[name] = run, out
    contestants["cuDNN"] = theirs
    found["cuDNN"] = [x.transpose(1, 2) for x in theirs()]
    want = of_first_heads(q, k, v, grad, causal)
    errors = {n: errors_of({n: first_heads(x, want)}, want)[n] for n, x in found.items()}
    return contestants, errors, work, "TFLOP/s"


def attention_both(b, shape):
    """Forward and backward in one call: JAX has no other."""
    q, k, v, grad, causal, work = attention_inputs(b, shape)
    want = of_first_heads(q, k, v, grad, causal)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def ours():
        return torch.autograd.grad(pt.attention(*leaves, causal), leaves, grad)

    def theirs():
        y = sdpa(b, [x.transpose(1, 2) for x in leaves], causal)
        return torch.autograd.grad(y, leaves, grad.transpose(1, 2))

    contestants = {"ours": ours, "cuDNN": theirs} | jax_attention(q, k, v, grad, causal)
    found = {n: first_heads(contestants[n](), want) for n in ("ours", "cuDNN")}
    return contestants, errors_of(found, want), work * 1.4, "TFLOP/s"


def jax_attention(q, k, v, grad, causal):
    try:
        import jax
    except ImportError:
        return {}
    if q.device.type == "cuda" and jax.default_backend() != "gpu":
        return {}
    arrays = [jax.dlpack.from_dlpack(x.contiguous()) for x in (q, k, v, grad)]
    kind = "cudnn" if q.device.type == "cuda" else "xla"
    ways = {"JAX": functools.partial(jax.nn.dot_product_attention, implementation=kind)}
    try:
        import tokamax

        ways["tokamax"] = tokamax.dot_product_attention
    except ImportError:
        pass
    made = {}
    for name, f in ways.items():
        f = functools.partial(f, is_causal=causal)
        run = jax.jit(lambda q, k, v, g, f=f: jax.vjp(f, q, k, v)[1](g))
        try:
            jax.block_until_ready(run(*arrays))
        except Exception as e:  # it may not know this GPU
            print(f"  {name}: {type(e).__name__}: {e}"[:200])
            continue

        def call(run=run):
            jax.block_until_ready(run(*arrays))

        call.wall = True
        made[name] = call
    return made


def attention_options(b, shape, what):
    q, k, v, grad, causal, work = attention_inputs(b, shape)
    n, heads = q.shape[1], q.shape[2]
    bias = b.randn(1, heads, n, n) if what == "bias" else None
    options = {
        "bias": {"bias": bias, "bias_gradient": True},
        "softcap": {"softcap": 30.0},
        "window": {"window": (n // 4, 0)},
        "dropout": {"dropout": 0.1, "seed": torch.zeros(1, dtype=torch.int32, device=q.device)},
    }[what]
    forward = {name: x for name, x in options.items() if name != "bias_gradient"}
    o, lse = ops.attention(q, k, v, causal=causal, return_lse=True, **forward)
    run = functools.partial(ops.attention_backward, grad, q, k, v, o, lse, causal=causal, **options)
    contestants, errors = {"ours": run}, {}
    if what in ("softcap", "window"):
        cap = {"cap": 30.0} if what == "softcap" else {"left": n // 4}
        want = of_first_heads(q, k, v, grad, causal, **cap)
        errors = errors_of({"ours": first_heads(run(), want)}, want)
    elif what == "bias":
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        leaf = bias.detach().requires_grad_()
        y = sdpa(b, leaves, False, leaf)
        contestants["torch"] = grads(y, [*leaves, leaf], grad.transpose(1, 2))
        ones, theirs = run(), contestants["torch"]()
        pairs = [*zip(ones[:3], [x.transpose(1, 2) for x in theirs]), (ones[3], theirs[3])]
        errors = {"difference from torch": max(error(x, y) for x, y in pairs)}
    return contestants, errors, work, "TFLOP/s"


# ---- rows ----------------------------------------------------------------------------------------


def norm(b, name, rows, n, residual=False):
    """With residual: the gradient of x is added to another one, which is read, too."""
    x, grad, add = b.randn(rows, n), b.randn(rows, n), b.randn(rows, n)
    w, bias = b.randn(n), b.randn(n)
    leaves = [t.requires_grad_() for t in ((x, w) if name == "rms_norm" else (x, w, bias))]

    def reference(*t):
        if name == "rms_norm":
            return F.rms_norm(t[0], (n,), t[1], 1e-6)
        return F.layer_norm(t[0], (n,), t[1], t[2])

    made = {k: f(*leaves) for k, f in b.compiled(reference).items()}
    run, options = getattr(ops, f"{name}_backward"), {} if name == "rms_norm" else {"bias": True}
    x, w = x.detach(), w.detach()
    if residual:
        options["add"] = add
    call = functools.partial(run, grad, x, w, **options)
    wide = [t.detach().float().requires_grad_() for t in leaves]
    want = list(torch.autograd.grad(reference(*wide), wide, grad.float()))

    def theirs(y):
        of_x, *others = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        return (of_x + add if residual else of_x), *others

    want[0] = want[0] + add.float() if residual else want[0]
    contestants = {"ours": call}
    contestants |= {k: functools.partial(theirs, y) for k, y in made.items()}
    errors = errors_of({n: contestants[n]() for n in ("ours", "torch")}, want)
    return contestants, errors, (4 if residual else 3) * x.numel() * 2 / 1e12, "TB/s"


def softmax(b, rows, n):
    x, grad = b.randn(rows, n), b.randn(rows, n)
    leaf = x.requires_grad_()
    made = {k: f(leaf) for k, f in b.compiled(lambda x: torch.softmax(x, -1)).items()}
    kept, out = made["torch"].detach(), b.nan(rows, n)
    call = functools.partial(ops.softmax_backward, grad, kept, out=out)
    call()
    wide = x.detach().float().requires_grad_()
    want = torch.autograd.grad(torch.softmax(wide, -1), wide, grad.float())
    contestants = {"ours": call} | {k: grads(y, leaf, grad) for k, y in made.items()}
    errors = errors_of({"ours": [out], "torch": contestants["torch"]()}, want)
    return contestants, errors, 3 * x.numel() * 2 / 1e12, "TB/s"


def gated(b, rows, n):
    x, grad = b.randn(rows, 2 * n), b.randn(rows, n)

    def reference(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    leaf = x.detach().requires_grad_()
    made = {k: f(leaf) for k, f in b.compiled(reference).items()}
    out = b.nan(rows, 2 * n)
    call = functools.partial(ops.gated_linear_unit_backward, grad, x, out=out)
    call()
    wide = x.float().requires_grad_()
    want = torch.autograd.grad(reference(wide), wide, grad.float())
    contestants = {"ours": call} | {k: grads(y, leaf, grad) for k, y in made.items()}
    errors = errors_of({"ours": [out], "torch": contestants["torch"]()}, want)
    return contestants, errors, 5 * grad.numel() * 2 / 1e12, "TB/s"


def activation(b, rows, n):
    """The gradient of gelu and of the bias before it."""
    z, grad = b.randn(rows, n), b.randn(rows, n)

    def reference(grad, z):
        g = torch.ops.aten.gelu_backward(grad, z, approximate="tanh")
        return g, g.sum(0)

    call = functools.partial(ops.activation_backward, grad, z, activation="gelu", bias=True)
    contestants = {k: functools.partial(f, grad, z) for k, f in b.compiled(reference).items()}
    want = reference(grad.float(), z.float())
    errors = errors_of({"ours": call(), "torch": contestants["torch"]()}, want)
    return {"ours": call} | contestants, errors, 3 * z.numel() * 2 / 1e12, "TB/s"


def rotary(b, batch, n, heads, d):
    x, angles = b.randn(batch, n, heads, d), b.randn(n, d // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()

    def reference(x):
        left, right = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([left * c - right * s, right * c + left * s], -1).to(x.dtype)

    out = b.nan(*x.shape)
    call = functools.partial(ops.rotary, x, cos, sin, out=out)
    call()
    contestants = {k: functools.partial(f, x) for k, f in b.compiled(reference).items()}
    errors = errors_of({"ours": [out]}, [reference(x.float())])
    return {"ours": call} | contestants, errors, 2 * x.numel() * 2 / 1e12, "TB/s"


def qk_norm(b, batch, n, heads, d, backward):
    """Rotary embedding with the norm of heads before it."""
    x, grad, w = b.randn(batch, n, heads, d), b.randn(batch, n, heads, d), b.randn(d)
    angles = b.randn(n, d // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()

    def reference(x, w):
        left, right = F.rms_norm(x, (d,), w, 1e-6).float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([left * c - right * s, right * c + left * s], -1).to(x.dtype)

    leaves = [x.requires_grad_(), w.requires_grad_()]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    plain = [t.detach() for t in leaves]
    if backward:
        call = functools.partial(ops.rotary_backward, grad, plain[0], cos, sin, plain[1])
        made = {k: grads(f(*leaves), leaves, grad) for k, f in b.compiled(reference).items()}
        want = torch.autograd.grad(reference(*wide), wide, grad.float())
    else:
        out = b.nan(*x.shape)
        call = functools.partial(ops.rotary, plain[0], cos, sin, plain[1], out=out)
        made = {k: functools.partial(f, *plain) for k, f in b.compiled(reference).items()}
        want = [reference(*wide).detach()]
    found = call()
    errors = errors_of({"ours": found if backward else [out]}, want)
    return {"ours": call} | made, errors, (6 if backward else 4) * x.numel() / 1e12, "TB/s"


def add_norm(b, rows, n):
    x, r, w = b.randn(rows, n), b.randn(rows, n), b.randn(n)

    def reference(x, r, w):
        return F.rms_norm(x + r, (n,), w, 1e-6), x + r

    out = b.nan(rows, n), b.nan(rows, n)
    call = functools.partial(ops.add_rms_norm, x, r, w, out=out)
    call()
    made = {k: functools.partial(f, x, r, w) for k, f in b.compiled(reference).items()}
    want = reference((x + r).float(), torch.zeros_like(x), w.float())
    return {"ours": call} | made, errors_of({"ours": out}, want), 8 * x.numel() / 1e12, "TB/s"


def quantized(b, name, rows, n, block):
    """A norm or a gated linear unit whose result is quantised."""
    of_norm = name == "rms_norm"
    x, w = b.randn(rows, n if of_norm else 2 * n), b.randn(n)

    def exact(x, w):
        if of_norm:
            return F.rms_norm(x, (n,), w, 1e-6)
        return F.silu(x[:, :n]) * x[:, n:]

    def reference(x, w):
        groups = exact(x, w).float().view(rows, -1, block or n)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        return (groups / scale).view(rows, n).to(torch.float8_e4m3fn), scale

    if of_norm:
        call = functools.partial(ops.rms_norm_quantize, x, w, block=block)
    else:
        call = functools.partial(ops.gated_linear_unit_quantize, x, block=block)
    found = ops.dequantize(*call(), block=block)
    made = {k: functools.partial(f, x, w) for k, f in b.compiled(reference).items()}
    errors = {"ours": error(found, exact(x.float(), w.float()))}
    return {"ours": call} | made, errors, (3 if of_norm else 5) * rows * n / 1e12, "TB/s"


def quantize_by_scale(b, rows, n):
    x, scale = b.randn(rows, n), torch.full((1,), 6 / 448, device=b.a.device)

    def reference(x):
        largest = x.abs().amax()
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), largest

    call = functools.partial(ops.quantize_by_scale, x, scale)
    made = {k: functools.partial(f, x) for k, f in b.compiled(reference).items()}
    errors = {"ours": error(call()[0].float() * scale, x)}
    return {"ours": call} | made, errors, 3 * x.numel() / 1e12, "TB/s"


def quantize(b, rows, n, block, mx):
    x = b.randn(rows, n)
    size = block or n

    def reference(x):
        groups = x.float().view(rows, -1, size)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        if mx:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return (groups / scale).view(rows, n).to(torch.float8_e4m3fn), scale

    call = functools.partial(ops.quantize, x, block=block, mx=mx)
    q, scales = call()
    back = q.float().view(rows, -1, size) * scales.float().view(rows, -1, 1)
    contestants = {"ours": call}
    contestants |= {k: functools.partial(f, x) for k, f in b.compiled(reference).items()}
    errors = {"ours": error(back.view(rows, n), x)}
    return contestants, errors, x.numel() * 3 / 1e12, "TB/s"


def cross_entropy_backward(b, rows, n):
    x, grad = b.randn(rows, n), b.randn(rows, dtype=torch.float32)
    targets = torch.randint(0, n, (rows,), device=x.device, dtype=torch.int32)
    wide, out = targets.long(), b.nan(rows, n)
    _, lse = ops.cross_entropy(x, targets)
    call = functools.partial(ops.cross_entropy_backward, grad, x, targets, lse, out=out)
    call()
    leaf = x.detach().requires_grad_()
    theirs = grads(F.cross_entropy(leaf, wide, reduction="none"), leaf, grad.to(x.dtype))
    some = slice(0, 64)
    part = x[some].float().requires_grad_()
    losses = F.cross_entropy(part, wide[some], reduction="none")
    want = torch.autograd.grad(losses, part, grad[some])
    errors = errors_of({"ours": [out[some]], "torch": [theirs()[0][some]]}, want)
    return {"ours": call, "torch": theirs}, errors, x.numel() * 4 / 1e12, "TB/s"


def cross_entropy(b, rows, n):
    x = b.randn(rows, n)
    targets = torch.randint(0, n, (rows,), device=x.device, dtype=torch.int32)
    wide, out = targets.long(), tuple(b.nan(rows, dtype=torch.float32) for _ in range(2))
    call = functools.partial(ops.cross_entropy, x, targets, out=out)
    call()

    def reference(x):
        return F.cross_entropy(x.float(), wide, reduction="none")

    contestants = {k: functools.partial(f, x) for k, f in b.compiled(reference).items()}
    errors = errors_of({"ours": out[:1]}, [reference(x)])
    return {"ours": call} | contestants, errors, x.numel() * 2 / 1e12, "TB/s"


def adamw(b, count, shape):
    made = {}
    for name, kind, options in (
        ("ours", pt.AdamW, {}),
        ("torch", torch.optim.AdamW, {} if b.tiny else {"fused": True}),
    ):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(b.randn(*shape)) for _ in range(count)]
        for p in params:
            p.grad = b.randn(*shape)
        made[name] = kind(params, lr=1e-3, **options), params
    contestants = {name: made[name][0].step for name in made}
    for step in contestants.values():
        step()
    errors = {"difference from torch": error(*(made[name][1][0].detach() for name in made))}
    # parameters and gradients of 2 bytes; moments of 4 are ours, of 2 torch's
    return contestants, errors, count * params[0].numel() * (3 * 2 + 4 * 4) / 1e12, "TB/s"


# ---- products ------------------------------------------------------------------------------------


def swiglu(b, m, k, n):
    """The product with both weights and the unit: forward."""
    x, w = b.randn(m, k), b.randn(k, 2 * n, scale=k**-0.5)

    def reference(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    out = b.nan(m, n)
    ours = functools.partial(ops.gated_matmul, x, w, out=out)
    contestants = {
        "ours": ours,
        "ours, two kernels": lambda: ops.gated_linear_unit(ops.matmul(x, w)),
        "ours, product alone": lambda: ops.matmul(x, w),
        "ours, kept products": lambda: ops.gated_matmul(x, w, return_products=True),
    }
    contestants |= {k: functools.partial(f, x, w) for k, f in b.compiled(reference).items()}
    contestants["cuBLAS alone"] = lambda: x @ w
    some = slice(0, 256)
    want = [reference(x[some].float(), w.float())]
    found = {"ours": [ours()[some]], "torch": [reference(x, w)[some]]}
    return contestants, errors_of(found, want), 4 * m * k * n / 1e12, "TFLOP/s"


def trained(b, forward, reference, arrays, work):
    """Forward and backward of two functions of the arrays, which require gradients."""
    leaves = [x.requires_grad_() for x in arrays]
    with torch.no_grad():
        grad = torch.randn_like(reference(*leaves))

    def step(f):
        return lambda: torch.autograd.grad(f(*leaves), leaves, grad)

    contestants = {"ours": step(forward)}
    contestants |= {name: step(f) for name, f in b.compiled(reference).items()}
    wide = [x.detach().float().requires_grad_() for x in arrays]
    want = torch.autograd.grad(reference(*wide), wide, grad.float())
    errors = errors_of({n: contestants[n]() for n in ("ours", "torch")}, want)
    return contestants, errors, work, "TFLOP/s"


def gated_mlp(b, m, k, n):
    def ours(x, w):
        return pt.gated_matmul(x, w)

    def reference(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    arrays = b.randn(m, k), b.randn(k, 2 * n, scale=k**-0.5)
    return trained(b, ours, reference, arrays, 12 * m * k * n / 1e12)


def swiglu_backward(b, m, k, n):
    """The backward pass of gated_mlp alone: the gradient of the unit and two products."""

    def reference(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    grad = b.randn(m, n)
    arrays = b.randn(m, k), b.randn(k, 2 * n, scale=k**-0.5)
    leaves = [x.requires_grad_() for x in arrays]
    made = {"ours": pt.gated_matmul(*leaves)}
    made |= {name: f(*leaves) for name, f in b.compiled(reference).items()}
    contestants = {name: grads(y, leaves, grad) for name, y in made.items()}
    both = (arrays[0] @ arrays[1]).detach()
    contestants["ours, the unit alone"] = lambda: ops.gated_linear_unit_backward(grad, both)
    wide = [x.detach().float().requires_grad_() for x in arrays]
    want = torch.autograd.grad(reference(*wide), wide, grad.float())
    errors = errors_of({n: contestants[n]() for n in ("ours", "torch")}, want)
    return contestants, errors, 8 * m * k * n / 1e12, "TFLOP/s"


def dense(b, m, k, n):
    """A layer with bias and gelu."""

    def ours(x, w, bias):
        return pt.matmul(x, w, bias, activation="gelu")

    def reference(x, w, bias):
        return F.gelu(torch.addmm(bias, x, w), approximate="tanh")

    arrays = b.randn(m, k), b.randn(k, n, scale=k**-0.5), b.randn(n)
    return trained(b, ours, reference, arrays, 6 * m * k * n / 1e12)


def fp8(b, m, k, n):
    """A product and its gradients by 8-bit floats, and by 16 bits."""
    x, w, grad = b.randn(m, k), b.randn(n, k, scale=0.02), b.randn(m, n)
    most = [float(t.abs().max()) for t in (x, w, grad)]
    limits = torch.tensor([448.0, 448.0, 57344.0], device=x.device)
    scales = (torch.tensor(most, device=x.device) / limits).requires_grad_()
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step(f, *more):
        return lambda: torch.autograd.grad(f(*leaves, *more), leaves, grad)

    contestants = {
        "ours, blocks": step(pt.fp8_matmul),
        "ours, delayed": step(pt.fp8_matmul, scales),
        "ours alone, 16 bits": step(lambda x, w: pt.matmul(x, w, transpose_b=True)),
        "torch, 16 bits": step(lambda x, w: x @ w.t()),
    }
    want = contestants["torch, 16 bits"]()
    errors = errors_of({k: f() for k, f in contestants.items()}, want)
    return contestants, errors, 6 * m * k * n / 1e12, "TFLOP/s"


def main_gradients(b, m, k, n):
    """dW added to a float32 gradient."""
    x, grad = b.randn(m, k), b.randn(m, n)
    total = torch.ones(k, n, device=x.device, dtype=torch.float32)
    options = {"transpose_a": True, "out_dtype": "float32", "accumulate": True}

    def ours():
        return ops.matmul(x, grad, out=total, **options)

    def theirs():
        return total.add_(x.t() @ grad)

    ours()
    errors = {"ours": error(total, x.float().t() @ grad.float() + 1)}
    return {"ours": ours, "torch": theirs}, errors, 2 * m * k * n / 1e12, "TFLOP/s"


def linear_cross_entropy(b, rows, k, classes):
    x = b.randn(rows, k).requires_grad_()
    w = b.randn(classes, k, scale=0.02).requires_grad_()
    targets = torch.randint(0, classes, (rows,), device=x.device)

    def ours():
        x.grad = w.grad = None
        pt.linear_cross_entropy(x, w, targets).backward()

    def theirs():
        x.grad = w.grad = None
        F.cross_entropy(x @ w.T, targets).backward()

    def exact():
        """Rows of dX and of dW in float32, by parts."""
        total = torch.zeros(64, k, device=x.device)
        with torch.no_grad():
            for i in range(0, rows, 512):
                p = (x[i : i + 512].float() @ w.float().T).softmax(-1)
                at = torch.arange(len(p), device=x.device)
                p[at, targets[i : i + 512]] -= 1
                total += p[:, :64].T @ x[i : i + 512].float() / rows
        return [total]

    found, errors = {}, {}
    for name, f in (("ours", ours), ("torch", theirs)):
        if not b.tiny:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        f()
        if not b.tiny:
            gradients = sum(t.numel() * t.element_size() for t in (x, w))
            peak = torch.cuda.max_memory_allocated() - before - gradients
            errors[f"{name}, GiB of state"] = peak / 2**30
        found[name] = [w.grad[:64].clone()]
    return (
        {"ours": ours, "torch": theirs},
        errors | errors_of(found, exact()),
        (6 * rows * k * classes / 1e12),
        "TFLOP/s",
    )


def cases(b):
    """(name, function), the most important ones first."""

    def case(f, *args):
        text = ", ".join(str(x) for x in args)
        return f"{f.__name__} {text}", functools.partial(f, b, *args)

    shapes = [(1, 100, 2, 1, 64, True), (1, 70, 1, 1, 128, False)] if b.tiny else ATTENTION
    rows = [(40, 512)] if b.tiny else ROWS
    m, k, n = (33, 64, 48) if b.tiny else (8192, 4096, 14336)
    for shape in shapes:
        yield case(attention, shape)
    yield case(linear_cross_entropy, *((20, 64, 130) if b.tiny else (8192, 4096, 128256)))
    yield case(swiglu, m, k, n)
    yield case(gated_mlp, m, k, n)
    yield case(swiglu_backward, m, k, n)
    yield case(dense, m, k, n)
    yield case(main_gradients, m, k, 4 * k)
    for shape in rows:
        for name in ("rms_norm", "layer_norm"):
            yield case(norm, name, *shape)
            yield case(norm, name, *shape, True)
        yield case(softmax, *shape)
    yield case(activation, *((9, 130) if b.tiny else (8192, 14336)))
    yield case(gated, *((9, 130) if b.tiny else (8192, 14336)))
    yield case(attention_both, shapes[0])
    for what in ("window", "softcap", "dropout"):
        yield case(attention_options, shapes[0][:5] + (True,), what)
    yield case(attention_options, shapes[-1][:5] + (False,), "bias")
    yield case(fp8, m, k, n)
    yield case(rotary, *((1, 20, 2, 64) if b.tiny else (4, 4096, 32, 128)))
    for backward in (False, True):
        yield case(qk_norm, *((1, 20, 2, 64) if b.tiny else (4, 4096, 32, 128)), backward)
    yield case(add_norm, *((9, 130) if b.tiny else (8192, 8192)))
    for name in ("rms_norm", "gated"):
        for block in (None, 128):
            yield case(quantized, name, *((8, 256) if b.tiny else (16384, 4096)), block)
    yield case(quantize_by_scale, *((8, 256) if b.tiny else (16384, 4096)))
    for block, mx in ((None, False), (128, False), (32, True)):
        yield case(quantize, *((8, 256) if b.tiny else (16384, 4096)), block, mx)
    for size in (300,) if b.tiny else (32000, 128256):
        yield case(cross_entropy, 8 if b.tiny else 4096, size)
        yield case(cross_entropy_backward, 8 if b.tiny else 4096, size)
    yield case(adamw, *((3, (20, 30)) if b.tiny else (100, (4096, 1024))))


def main(argv=None, cases=cases, file=__file__, doc=__doc__, ways="burst,sustained"):
    """The cases of this file, or of another one."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--only", default="", help="texts of names, with commas")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-autotune", dest="autotune", action="store_false")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=500.0, help="no case begins later")
    parser.add_argument("--ways", default=ways, help="of plgpu.testing.do_bench, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    results.argument(parser)
    bench = Bench(parser.parse_args(argv), file)
    for name, make in cases(bench):
        if not any(text in name for text in bench.a.only.split(",")):
            continue
        if bench.left() < 0:
            print(f"no time left for {name}")
            continue
        bench.run(name, make)
        if not bench.tiny:
            torch.cuda.empty_cache()
    bench.table()
    return bench.found


if __name__ == "__main__":
    main()
