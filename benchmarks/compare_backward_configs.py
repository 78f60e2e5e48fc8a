"""Configurations of the gradients of attention and of norms beside each other, rotary embedding
inside attention, products that are kept.

    python benchmarks/compare_backward_configs.py [--only TEXT,TEXT] [--no-compile] [--seconds 500]
        [--ways burst,sustained] [--rounds 5] [--json FILE]
    python benchmarks/compare_backward_configs.py --device cpu    # tiny shapes, to try the script

As bench_training.py, whose checks these are: every contestant is checked against float32 in the
same process, its results written over NaN. Kernels are compiled side by side by the first calls.
Norms find nothing in the L2 cache: calls go round over 512 MiB of copies; a copy of as many bytes
runs beside them. The table at the end has the best configuration of each case first."""

import concurrent.futures
import functools

import bench_training as training
import torch
import torch.nn.functional as F

from pallas_mgpu import ops
from pallas_mgpu.testing import rotated

BYTES = 512 << 20
NORMS = [  # rows, columns
    (8192, 4096),
    (16384, 2048),
    (8192, 8192),
    (2048, 16384),
    (65536, 512),
    (32768, 1024),
    (1024, 32768),
    (512, 65536),
    (8192, 16384),
    (4096, 32768),
    (2048, 65536),
    (2048, 5120),
    (128, 8192),
    (128, 65536),
]


def side_by_side(contestants):
    """First calls, so that programs are compiled at once: {name: what it returned}, and what failed
    is dropped."""
    found = {}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for name, future in [(n, pool.submit(f)) for n, f in contestants.items()]:
            try:
                found[name] = future.result()
            except ValueError as e:  # a configuration for other shapes
                print(f"  {name}: {e}"[:160])
    return found


# ---- attention -----------------------------------------------------------------------------------


def attention_configs():
    C = ops.AttentionBackwardConfig
    return {"ours, 5": C(5), "ours, 7": C(7), "ours, 5, 3 stages": C(5, 3)}


def attention(b, shape):
    q, k, v, grad, causal, work = training.attention_inputs(b, shape)
    o, lse = ops.attention(q, k, v, causal=causal, return_lse=True)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    peer = training.grads(training.sdpa(b, leaves, causal), leaves, grad.transpose(1, 2))
    outs, calls = {}, {}
    for name, config in attention_configs().items():
        outs[name] = tuple(b.nan(*x.shape) for x in (q, k, v))
        how = {"causal": causal, "config": config, "out": outs[name]}
        calls[name] = functools.partial(ops.attention_backward, grad, q, k, v, o, lse, **how)
    found = {name: outs[name] for name in side_by_side(calls)}
    found["cuDNN"] = [x.transpose(1, 2) for x in peer()]
    want = training.of_first_heads(q, k, v, grad, causal)
    firsts = {n: training.first_heads(x, want) for n, x in found.items()}
    errors = {}
    for name in firsts:
        errors |= training.errors_of({name: firsts[name]}, want)
    return {n: calls.get(n, peer) for n in found}, errors, work, "TFLOP/s"


def rotary_attention(b, shape, backward):
    """With rotary embedding of q and k: in attention, by kernels of its own, and none."""
    q, k, v, grad, causal, work = training.attention_inputs(b, shape)
    n, d = q.shape[1], q.shape[3]
    angles = b.randn(n, d // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    inside = {"cos": cos, "sin": sin, "causal": causal}

    def apart(**options):
        rotated = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        return ops.attention(*rotated, v, causal=causal, **options)

    def apart_backward(o, lse):
        rotated = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        dq, dk, dv = ops.attention_backward(grad, *rotated, v, o, lse, causal=causal)
        ops.rotary(dq, cos, sin, inverse=True, out=dq)
        return dq, ops.rotary(dk, cos, sin, inverse=True, out=dk), dv

    o, lse = apart(return_lse=True)
    calls = {
        "ours": functools.partial(ops.attention, q, k, v, **inside),
        "ours, apart": apart,
        "ours alone, no rotary": functools.partial(ops.attention, q, k, v, causal=causal),
    }
    if backward:
        operands = grad, q, k, v, o, lse
        calls = {
            "ours": functools.partial(ops.attention_backward, *operands, **inside),
            "ours, apart": functools.partial(apart_backward, o, lse),
            "ours alone, no rotary": functools.partial(
                ops.attention_backward, *operands, causal=causal
            ),
        }
    found = side_by_side(calls)
    group = q.shape[2] // k.shape[2]
    leaves = [training.part(x, m).requires_grad_() for x, m in ((q, group), (k, 1), (v, 1))]

    def rotated(x):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    y = training.plain_attention(rotated(leaves[0]), rotated(leaves[1]), leaves[2], causal)
    want = [y.detach().transpose(1, 2)]
    if backward:
        want = torch.autograd.grad(y, leaves, training.part(grad, group))
        want = [x.transpose(1, 2) for x in want]
    errors = {}
    for name in ("ours", "ours, apart"):
        firsts = training.first_heads(found[name] if backward else [found[name]], want)
        errors |= training.errors_of({name: firsts}, want)
    return calls, errors, work if backward else work * 0.4, "TFLOP/s"


# ---- norms ---------------------------------------------------------------------------------------


def norm_configs(n):
    C = ops.NormBackwardConfig
    found = {"chosen": None}
    if n <= 8192:
        found |= {"alike": C(), "alike, 3 stages": C(stages=3)}
    if 2048 < n <= 8192:
        found |= {f"alike, {m} members": C(members=m) for m in (2, 4)}
    for cluster in (1, 2, 4, 8):
        if 1024 <= n // cluster <= 8192:
            made = {k: C(roles=True, cluster=cluster, stages=k) for k in (2, 3)}
            found |= {f"roles, clusters of {cluster}, {k} stages": c for k, c in made.items()}
    return {f"ours, {name}": config for name, config in found.items()}


def norm(b, name, rows, n):
    x, grad, w, bias = b.randn(rows, n), b.randn(rows, n), b.randn(n), b.randn(n)
    of_layer = name == "layer_norm"
    leaves = [t.float().requires_grad_() for t in ((x, w, bias) if of_layer else (x, w))]
    if of_layer:
        y = F.layer_norm(leaves[0], (n,), leaves[1], leaves[2])
    else:
        y = F.rms_norm(leaves[0], (n,), leaves[1], 1e-6)
    want = torch.autograd.grad(y, leaves, grad.float())
    backward = getattr(ops, f"{name}_backward")
    options = {"bias": True} if of_layer else {}
    calls = {}
    for name_, config in norm_configs(n).items():
        calls[name_] = lambda g, x, config=config: backward(g, x, w, config=config, **options)
    found, ready = {}, side_by_side({n: lambda f=f: f(grad, x) for n, f in calls.items()})
    calls = {name: calls[name] for name in ready}
    del ready
    for name_, f in calls.items():
        poison = [b.nan(*t.shape) for t in (x, w, w)]
        del poison  # the next results get this memory
        found[name_] = training.errors_of({name_: f(grad, x)}, want)[name_]
    work = 3 * x.numel() * 2
    to = torch.empty(work // 4, device=x.device, dtype=torch.bfloat16)
    if b.tiny:
        return {n: lambda f=f: f(grad, x) for n, f in calls.items()}, found, work / 1e12, "TB/s"
    made = {n: rotated(f, grad, x, nbytes=BYTES) for n, f in calls.items()}
    made["copy of as many bytes"] = rotated(to.copy_, torch.empty_like(to), nbytes=BYTES)
    return made, found, work / 1e12, "TB/s"


# ---- products that are kept ----------------------------------------------------------------------


def kept_product(b, m, k, n, activation):
    """The result of an activation and the product before it: by one kernel or two."""
    x, w, bias = b.randn(m, k), b.randn(k, n, scale=k**-0.5), b.randn(n)
    f = {"gelu": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu}[activation]

    def ours():
        return ops.matmul(x, w, bias=bias, activation=activation, return_product=True)

    def apart():
        z = ops.matmul(x, w, bias=bias)
        return f(z), z

    def theirs(x, w, bias):
        z = torch.addmm(bias, x, w)
        return f(z), z

    calls = {"ours": ours, "ours, apart": apart}
    calls["ours alone, not kept"] = lambda: ops.matmul(x, w, bias=bias, activation=activation)
    calls |= {n: functools.partial(g, x, w, bias) for n, g in b.compiled(theirs).items()}
    z = x[:256].float() @ w.float() + bias.float()
    found = {n: [t[:256] for t in calls[n]()] for n in ("ours", "ours, apart", "torch")}
    return calls, training.errors_of(found, [f(z), z]), 2 * m * k * n / 1e12, "TFLOP/s"


def cases(b):
    def case(f, *args):
        text = ", ".join(str(x) for x in args)
        return f"{f.__name__} {text}", functools.partial(f, b, *args)

    tiny = [(1, 100, 2, 1, 64, True), (1, 70, 1, 1, 128, False)]
    shapes = tiny if b.tiny else training.ATTENTION
    for shape in shapes:
        yield case(attention, shape)
    for shape in [(9, 512), (5, 8192)] if b.tiny else NORMS:
        for name in ("rms_norm", "layer_norm"):
            yield case(norm, name, *shape)
    for shape in (shapes[0], shapes[1], shapes[-1]) if b.tiny else (shapes[1], *shapes[3:]):
        for backward in (False, True):
            yield case(rotary_attention, shape, backward)
    for activation in ("gelu", "silu"):
        yield case(kept_product, *((33, 64, 48) if b.tiny else (8192, 4096, 14336)), activation)


if __name__ == "__main__":
    training.main(cases=cases, file=__file__, doc=__doc__, ways="burst")
