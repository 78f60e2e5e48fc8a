"""Kernels of random sizes, for `bench_estimate.py --random`: all kinds of ops, the examples, and
small kernels as a user writes them. The same seed gives the same kernels. None of their times is
kept: those of seed 101 were used to choose the constants of the model, those of 102 to 104 to judge
it (benchmarks/NOTEBOOK.md)."""

import contextlib
import functools
import io
import random
import runpy

import numpy as np
from estimate_cases import EXAMPLES, Case

import pallas_mgpu as plgpu
from pallas_mgpu import _matmul, lax, ops, pl
from pallas_mgpu import numpy as jnp

S = plgpu.ShapeDtypeStruct
BF, F16, F32, I32, F8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.float8_e4m3fn


@functools.cache
def example(name):
    with contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(EXAMPLES / name))


def op(f, operands, named=None, **kw):
    named = named or {}
    return f.kernel(*operands, **named, **kw), [*operands, *named.values()]


def logu(r, lo, hi, step=1):
    return max(step, int(round(lo * (hi / lo) ** r.random() / step)) * step)


K = (1024, 1536, 2048, 2304, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 11008, 14336)


def case(kind, name, make, values=None):
    return Case(kind, name, make, values=values or {})


def rc(r, lo=256, hi=32768, step=8, most=1 << 27):
    c = logu(r, lo, hi, step)
    rows = logu(r, 64, 1 << 17)
    while rows * c > most:
        rows = max(1, rows // 2)
    return rows, c


def _streams(r):
    """Kernels as a user writes them: elements and copies."""
    rows, cols = logu(r, 1000, 40000), logu(r, 256, 8192, 128)
    while rows * cols > 1 << 27:
        rows //= 2

    def bias_gelu():
        b = 4096 // cols or 1
        blk = pl.BlockSpec((b, cols), lambda i: (i, 0))

        def body(x, w, o):
            y = x[...].astype(F32) + w[...].astype(F32)
            o[...] = (y * 0.5 * (1 + jnp.tanh(0.79788456 * (y + 0.044715 * y * y * y)))).astype(
                o.dtype
            )

        k = pl.pallas_call(
            body,
            out_shape=S((rows, cols), BF),
            grid=(pl.cdiv(rows, b),),
            in_specs=[blk, pl.BlockSpec((cols,), lambda i: (0,))],
            out_specs=blk,
        )
        return k, [S((rows, cols), BF), S((cols,), BF)]

    yield case("user", f"bias_gelu {rows}x{cols}", bias_gelu)
    n = logu(r, 1 << 18, 1 << 26, 4096)
    tile = r.choice((1024, 2048, 4096, 8192))

    def axpy():
        @plgpu.kernel(out_type=S((n,), F32), grid=(pl.cdiv(n, tile),), grid_names=("i",))
        def k(x, y, o):
            at = pl.ds(lax.axis_index("i") * tile, tile)
            o[at] = x[at] * 2.5 + y[at]

        return k, [S((n,), F32)] * 2

    n = n // tile * tile
    yield case("user", f"axpy {n} tiles of {tile}", axpy)
    m2, n2 = (logu(r, 512, 12000, 64) for _ in range(2))

    def transpose():
        t = 64

        @plgpu.kernel(out_type=S((n2, m2), F16), grid=(m2 // t, n2 // t), grid_names=("i", "j"))
        def k(x, o):
            i, j = lax.axis_index("i"), lax.axis_index("j")
            o[pl.ds(j * t, t), pl.ds(i * t, t)] = x[pl.ds(i * t, t), pl.ds(j * t, t)].T

        return k, [S((m2, n2), F16)]

    yield case("user", f"transpose {m2}x{n2}", transpose)


def _tiles(r):
    """Kernels as a user writes them: tiles and reductions."""
    m, nn, kk = logu(r, 256, 6000, 128), logu(r, 256, 6000, 128), logu(r, 256, 8192, 64)
    stages, tn = r.choice((2, 3, 4)), r.choice((128, 64))

    def matmul():
        @plgpu.kernel(out_type=S((m, nn), F32), grid=(m // 128, nn // tn), grid_names=("m", "n"))
        def k(a, b, o):
            i, j = lax.axis_index("m"), lax.axis_index("n")

            def compute(acc):
                def step(_, x, y):
                    plgpu.wgmma(acc, x, y)
                    plgpu.wgmma_wait(1)

                plgpu.emit_pipeline(
                    step,
                    grid=(kk // 64,),
                    max_concurrent_steps=stages,
                    in_specs=[
                        plgpu.BlockSpec((128, 64), lambda k: (i, k), delay_release=1),
                        plgpu.BlockSpec((64, tn), lambda k: (k, j), delay_release=1),
                    ],
                )(a, b)
                return acc[...]

            o[pl.ds(i * 128, 128), pl.ds(j * tn, tn)] = pl.run_scoped(compute, plgpu.ACC((128, tn)))

        return k, [S((m, kk), F16), S((kk, nn), F16)]

    yield case("user", f"example matmul {m}x{nn}x{kk} tile 128x{tn} steps {stages}", matmul)
    rows3 = logu(r, 132, 30000)
    c3 = logu(r, 64, 2000, 8)

    def softmax():
        B = 64
        W = -(-c3 // 8) * 8

        @plgpu.kernel(out_type=S((rows3, c3), F32), grid=(pl.cdiv(rows3, B),), grid_names=("rows",))
        def k(x_ref, o_ref):
            def block(_, xs, os_):
                x = xs[...]
                x = jnp.where(plgpu.broadcasted_iota(I32, x.shape, 1) < c3, x, -jnp.inf)
                e = jnp.exp(x - lax.broadcast_in_dim(jnp.max(x, axis=1), x.shape, [0]))
                os_[...] = e / lax.broadcast_in_dim(jnp.sum(e, axis=1), x.shape, [0])

            rows = plgpu.BlockSpec((B, W), lambda: (lax.axis_index("rows"), 0))
            plgpu.emit_pipeline(block, grid=(), in_specs=[rows], out_specs=[rows])(x_ref, o_ref)

        return k, [S((rows3, c3), F32)]

    c3 = min(c3, 256)
    yield case("user", f"example softmax {rows3}x{c3}", softmax)
    w, h = logu(r, 512, 8192, 32), logu(r, 512, 8192, 32)

    def stencil():
        t = 32

        @plgpu.kernel(out_type=S((h, w), F32), grid=(h // t - 1, w // t - 1), grid_names=("i", "j"))
        def k(x, o):
            i, j = lax.axis_index("i") * t + 1, lax.axis_index("j") * t + 1

            def g(a, b):
                return x[pl.ds(i + a, t), pl.ds(j + b, t)]

            o[pl.ds(i, t), pl.ds(j, t)] = 0.25 * (g(-1, 0) + g(1, 0) + g(0, -1) + g(0, 1))

        return k, [S((h, w), F32)]

    yield case("user", f"stencil {h}x{w}", stencil)
    rr, cc = logu(r, 200, 20000), logu(r, 1024, 16384, 1024)
    while rr * cc > 1 << 27:
        rr //= 2

    def sums():
        @plgpu.kernel(out_type=S((rr,), F32), grid=(rr,), grid_names=("i",))
        def k(x, o):
            i = lax.axis_index("i")

            def step(j, acc):
                return acc + x[i, pl.ds(j * 1024, 1024)].astype(F32)

            o[i] = jnp.sum(lax.fori_loop(0, cc // 1024, step, jnp.zeros(1024, F32)))

        return k, [S((rr, cc), F16)]

    yield case("user", f"row sums {rr}x{cc}", sums)


def _products(r, seed):
    """Of all dtypes, gated, grouped."""
    for i in range(9):
        m = logu(r, 1, 9000) if i % 2 else logu(r, 64, 8192, 64)
        n, k = r.choice(K), r.choice(K)
        if i == 8:
            m, n, k = logu(r, 100, 4000), logu(r, 100, 4000), logu(r, 100, 4000)
        dt, tb = r.choice((BF, F16)), r.random() < 0.5
        while m * n * k > 6e11:
            m = m // 2
        yield case(
            "matmul",
            f"{m}x{n}x{k} {np.dtype(dt).name}{' T' if tb else ''}",
            lambda m=m, n=n, k=k, dt=dt, tb=tb: op(
                ops.matmul, [S((m, k), dt), S((n, k) if tb else (k, n), dt)], transpose_b=tb
            ),
        )
    m, n, k = logu(r, 500, 5000), r.choice(K), r.choice(K[:8])
    act = r.choice(("gelu", "silu", "relu"))
    yield case(
        "matmul",
        f"{m}x{n}x{k} bias {act}",
        lambda m=m, n=n, k=k, act=act: op(
            ops.matmul, [S((m, k), BF), S((k, n), BF)], {"bias": S((n,), BF)}, activation=act
        ),
    )
    for i in range(4):
        m, n, k = logu(r, 16, 6000, 16), r.choice(K), r.choice(K)
        kind = ("one", "rows", "blocks", "int8")[i]
        sh = {
            "one": ((1, 1), (1, 1)),
            "rows": ((m, 1), (1, n)),
            "blocks": ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))),
        }

        def make(m=m, n=n, k=k, kind=kind, sh=sh):
            if kind == "int8":
                return op(ops.matmul, [S((m, k), jnp.int8), S((n, k), jnp.int8)], transpose_b=True)
            x, y = (S(s, F32) for s in sh[kind])
            return op(
                ops.matmul,
                [S((m, k), F8), S((n, k), F8)],
                {"scale_a": x, "scale_b": y},
                transpose_b=True,
            )

        yield case("narrow", f"{m}x{n}x{k} {kind}", make)
    for _ in range(5):
        m, n, k = logu(r, 1, 4096), r.choice(K), r.choice(K)
        w = r.choice((jnp.int4, jnp.int8, F8))
        g = r.choice((0, k // 128, 1))
        yield case(
            "mixed",
            f"{m}x{n}x{k} {np.dtype(w).name} groups {g}",
            lambda m=m, n=n, k=k, w=w, g=g: op(
                ops.mixed_matmul, [S((m, k), BF), S((n, k), w)] + ([S((g, n), BF)] if g else [])
            ),
        )
    for _ in range(2):
        m, n, k = logu(r, 64, 6000), r.choice(K), r.choice(K[:8])
        yield case(
            "gated",
            f"gated_matmul {m}x2x{n}x{k}",
            lambda m=m, n=n, k=k: op(ops.gated_matmul, [S((m, k), BF), S((k, 2 * n), BF)]),
        )
    for i in range(2):
        g = r.choice((4, 8, 16, 32))
        m, n, k = logu(r, 256, 8192), r.choice(K[:8]), r.choice(K[:8])
        cut = np.sort(np.random.default_rng(seed * 10 + i).integers(0, m + 1, g - 1))
        sizes = np.diff(np.concatenate([[0], cut, [m]])).astype(np.int32)
        tr = i == 1

        def make(m=m, n=n, k=k, g=g, tr=tr):
            if tr:
                return op(ops.transposed_ragged_dot, [S((m, k), BF), S((m, n), BF), S((g,), I32)])
            return op(ops.ragged_dot, [S((m, k), BF), S((g, k, n), BF), S((g,), I32)])

        yield case(
            "ragged", f"{'transposed ' if tr else ''}{m}x{n}x{k}, {g} groups", make, {2: sizes}
        )


def _attentions(r, seed):
    """Also decoding."""
    for i in range(7):
        d = r.choice((64, 64, 80, 96, 128, 128, 192, 256))
        h = r.choice((8, 16, 24, 32))
        kv = h // r.choice((1, 1, 4, 8)) if h != 24 else 24 // r.choice((1, 3))
        s = logu(r, 200, 9000)
        b = max(1, min(16, logu(r, 1, 16), int(4e7 / s / h / d * 4)))
        sk = s if i < 5 else logu(r, 500, 9000)
        c = r.random() < 0.5 if sk == s else False
        while b * h * s * sk * d > 3e11 and b > 1:
            b //= 2
        while h * s * sk * d * b > 3e11:
            s //= 2
            sk //= 2
        yield case(
            "attention",
            f"{b}x{s}x{sk}, {h}/{kv} of {d}{' causal' if c else ''}",
            lambda b=b, s=s, sk=sk, h=h, kv=kv, d=d, c=c: op(
                ops.attention,
                [S((b, s, h, d), BF), S((b, sk, kv, d), BF), S((b, sk, kv, d), BF)],
                causal=c,
            ),
        )
    s = logu(r, 1500, 8000)
    win = r.choice((256, 512, 1024))
    yield case(
        "attention",
        f"2x{s}, 16/4 of 128 window {win}",
        lambda s=s: op(
            ops.attention,
            [S((2, s, 16, 128), BF)] + [S((2, s, 4, 128), BF)] * 2,
            causal=True,
            window=(win, 0),
        ),
    )
    s2 = logu(r, 1500, 5000)
    yield case(
        "attention",
        f"2x{s2}, 16/16 of 64 softcap",
        lambda s=s2: op(ops.attention, [S((2, s, 16, 64), F16)] * 3, softcap=30.0),
    )
    for i in range(3):
        b, s = logu(r, 1, 128), logu(r, 500, 16000)
        h, kv = r.choice(((32, 8), (64, 8), (16, 16), (28, 4)))
        while b * s * kv * 128 * 4 > 3e9:
            b = max(1, b // 2)
        if i < 2:
            yield case(
                "decode",
                f"{b}x{s}, {h}/{kv} of 128",
                lambda b=b, s=s, h=h, kv=kv: op(
                    ops.attention_decode, [S((b, 1, h, 128), BF)] + [S((b, s, kv, 128), BF)] * 2
                ),
            )
        else:
            lens = np.random.default_rng(seed).integers(s // 4, s + 1, b).astype(np.int32)
            yield case(
                "decode",
                f"{b}x{s}, {h}/{kv} of 128, lengths",
                lambda b=b, s=s, h=h, kv=kv: op(
                    ops.attention_decode,
                    [S((b, 1, h, 128), BF)] + [S((b, s, kv, 128), BF)] * 2,
                    {"kv_lengths": S((b,), I32)},
                ),
                {3: lens},
            )
    b, s = logu(r, 4, 128), logu(r, 1000, 8000)
    yield case(
        "decode",
        f"mla {b}x{s}, 128 heads",
        lambda b=b, s=s: op(ops.mla_decode, [S((b, 1, 128, 576), BF), S((b, s, 576), BF)]),
    )


def _rows(r, seed):
    """Norms and softmax, and their gradients."""
    for name, count in (("softmax", 1), ("rms_norm", 2), ("layer_norm", 3)) * 3:
        rows, c = rc(r, 128, 65536)
        dt = r.choice((BF, BF, F16, F32))
        if dt is F32:
            rows = max(1, rows // 2)
        yield case(
            "norm",
            f"{name} {rows}x{c} {np.dtype(dt).name}",
            lambda name=name, rows=rows, c=c, count=count, dt=dt: op(
                getattr(ops, name), [S((rows, c), dt), S((c,), dt), S((c,), dt)][:count]
            ),
        )
    rows, c = rc(r, 512, 8192)
    yield case(
        "norm",
        f"softmax axis 0 {rows}x{c}",
        lambda rows=rows, c=c: op(ops.softmax, [S((rows, c), BF)], axis=0),
    )
    for name, extra in (("add_rms_norm", 1), ("add_layer_norm", 2)):
        rows, c = rc(r, 512, 16384)
        yield case(
            "norm",
            f"{name} {rows}x{c}",
            lambda name=name, rows=rows, c=c, extra=extra: op(
                getattr(ops, name), [S((rows, c), BF)] * 2 + [S((c,), BF)] * extra
            ),
        )
    for name in ("rms_norm_backward", "layer_norm_backward"):
        rows, c = rc(r, 512, 8192, 64)
        yield case(
            "norm",
            f"{name} {rows}x{c}",
            lambda name=name, rows=rows, c=c: op(
                getattr(ops, name), [S((rows, c), BF)] * 2 + [S((c,), BF)]
            ),
        )
    rows, c = rc(r, 128, 16384)
    yield case(
        "norm",
        f"softmax_backward {rows}x{c}",
        lambda rows=rows, c=c: op(ops.softmax_backward, [S((rows, c), BF)] * 2),
    )


def _elements(r, seed):
    """What moves elements."""
    for name, count, w in (
        ("gated_linear_unit", 1, 2),
        ("gated_linear_unit", 2, 1),
        ("gated_linear_unit_backward", 3, 1),
    ):
        rows, c = rc(r, 512, 16384, 64, 1 << 26)
        yield case(
            "elements",
            f"{name} of {count} {rows}x{c}",
            lambda name=name, rows=rows, c=c, count=count, w=w: op(
                getattr(ops, name), [S((rows, c * w), BF)] * count
            ),
        )
    rows, c = rc(r, 512, 16384, 128, 1 << 26)
    blk = r.choice((None, 128, 64, 32))
    yield case(
        "elements",
        f"quantize {rows}x{c} block {blk}",
        lambda rows=rows, c=c, blk=blk: op(ops.quantize, [S((rows, c), BF)], block=blk),
    )
    rows, c = rc(r, 512, 16384, 128, 1 << 26)
    yield case(
        "elements",
        f"dequantize {rows}x{c} block 128",
        lambda rows=rows, c=c: op(
            ops.dequantize, [S((rows, c), F8), S((rows, c // 128), F32)], block=128
        ),
    )
    rows, c = rc(r, 512, 16384, 128, 1 << 26)
    yield case(
        "elements",
        f"rms_norm_quantize {rows}x{c}",
        lambda rows=rows, c=c: op(ops.rms_norm_quantize, [S((rows, c), BF), S((c,), BF)]),
    )
    b, s, h, d = logu(r, 1, 8), logu(r, 200, 8000), r.choice((8, 32)), r.choice((64, 128))
    yield case(
        "elements",
        f"rotary {b}x{s}x{h}x{d}",
        lambda b=b, s=s, h=h, d=d: op(
            ops.rotary, [S((b, s, h, d), BF)] + [S((s, d // 2), F32)] * 2
        ),
    )
    rows, c = logu(r, 64, 8192), r.choice((32000, 50304, 128256, 32768))
    while rows * c > 3e8:
        rows //= 2
    tg = np.random.default_rng(seed).integers(0, c, rows).astype(np.int32)
    yield case(
        "elements",
        f"cross_entropy {rows}x{c}",
        lambda rows=rows, c=c: op(ops.cross_entropy, [S((rows, c), BF), S((rows,), I32)]),
        {1: tg},
    )
    yield case(
        "elements",
        f"cross_entropy_backward {rows}x{c}",
        lambda rows=rows, c=c: op(
            ops.cross_entropy_backward,
            [S((rows,), F32), S((rows, c), BF), S((rows,), I32), S((rows,), F32)],
        ),
        {2: tg},
    )
    rs, cs = logu(r, 1, 64), r.choice((32000, 128256))
    yield case(
        "elements",
        f"sample {rs}x{cs} top_k 50",
        lambda: op(ops.sample, [S((rs, cs), BF), S((1,), I32)], top_k=50),
    )
    rows2, c2 = rc(r, 512, 16384, 64)
    yield case(
        "elements", f"column_sums {rows2}x{c2}", lambda: op(ops.column_sums, [S((rows2, c2), BF)])
    )
    n = logu(r, 1 << 18, 1 << 26, 4096)
    yield case(
        "elements", f"adamw {n}", lambda n=n: op(ops.adamw, [S((n,), F32)] * 4 + [S((6,), F32)])
    )
    parts, mb, ml = r.choice((2, 4, 8)), logu(r, 1, 32), logu(r, 1, 500)
    yield case(
        "elements",
        f"merge_attention {parts}x{mb}x{ml}x16x128",
        lambda: op(
            ops.merge_attention, [S((parts, mb, ml, 16, 128), BF), S((parts, mb, 16, ml), F32)]
        ),
    )


def _examples(r, seed):
    """Those of examples/, and `_streams` and `_tiles`."""
    t = example("triton_kernels.py")
    for name, count in (("softmax", 1), ("layer_norm", 3), ("rms_norm", 2)):
        rows, c = rc(r, 512, 8192, 64, 1 << 26)
        dt = r.choice((np.float16, np.float32))
        nw = r.choice((4, 8))
        yield case(
            "user",
            f"triton {name} {rows}x{c} {np.dtype(dt).name} warps {nw}",
            lambda name=name, rows=rows, c=c, count=count, dt=dt, nw=nw: (
                t[name](rows, c, np.dtype(dt), num_warps=nw),
                [S((rows, c), dt), S((c,), dt), S((c,), dt)][:count],
            ),
        )
    b, s, h, d, blk, c = (
        logu(r, 1, 4),
        r.choice((1024, 1536, 2560, 3072)),
        r.choice((4, 8, 12)),
        r.choice((64, 128)),
        r.choice((64, 128)),
        r.random() < 0.5,
    )
    yield case(
        "user",
        f"triton mha {b}x{s}x{h}x{d} {blk}{' causal' if c else ''}",
        lambda b=b, s=s, h=h, d=d, blk=blk, c=c: (
            t["mha"](b, s, h, d, np.dtype(F16), c, blk, blk, num_warps=8 if blk == 128 else 4),
            [S((b, s, h, d), F16)] * 3,
        ),
    )
    bb, ss, sp = logu(r, 2, 32), r.choice((2048, 4096, 8192)), r.choice((4, 8, 16))
    yield case(
        "user",
        f"triton decode {bb}x{ss} splits {sp}",
        lambda: (
            t["decode"](bb, ss, 32, 8, 128, sp),
            [S((bb, 32, 128), F16)] + [S((bb, ss, 8, 128), F16)] * 2 + [S((bb,), I32)],
        ),
        {3: np.full(bb, ss, np.int32)},
    )
    fs, rn = example("fused_softmax.py"), example("rms_norm.py")
    rows, c = rc(r, 256, 8192, 64)
    yield case(
        "user",
        f"fused_softmax {rows}x{c}",
        lambda rows=rows, c=c: (fs["make_softmax"]((rows, c), BF), [S((rows, c), BF)]),
    )
    rows, c = rc(r, 16384, 65536, 8192)
    yield case(
        "user",
        f"long_softmax {rows}x{c}",
        lambda rows=rows, c=c: (fs["make_long_softmax"]((rows, c), BF), [S((rows, c), BF)]),
    )
    rows, c = rc(r, 1024, 16384, 1024)
    yield case(
        "user",
        f"example rms_norm {rows}x{c}",
        lambda rows=rows, c=c: (
            rn["make_rms_norm"]((rows, c), BF),
            [S((rows, c), BF), S((c,), BF)],
        ),
    )
    m, n, k, st, gr = (
        logu(r, 512, 6000, 128),
        logu(r, 512, 6000, 256),
        logu(r, 512, 8192, 64),
        r.choice((3, 4)),
        r.choice((8, 16)),
    )
    yield case(
        "user",
        f"one thread {m}x{n}x{k} steps {st} group {gr}",
        lambda m=m, n=n, k=k, st=st, gr=gr: (
            _matmul.matmul_kernel(m, n, k, np.dtype(BF), steps=st, group=gr),
            [S((m, k), BF), S((k, n), BF)],
        ),
    )
    yield from _streams(r)
    yield from _tiles(r)


def cases(seed):
    """The same for the same seed."""
    r = random.Random(seed)
    return [
        c for part in (_products, _attentions, _rows, _elements, _examples) for c in part(r, seed)
    ]
