"""The products of bench_gemm_suite.py: written down by a rule, before anything was tuned for them.

The weights are those of the linear layers in published configurations (config.json) of Llama 3 8B
and 70B, Qwen2.5 7B and DeepSeek-V3. Layer number i meets every third number of rows, beginning with
number i % 3, so that every layer meets decoding, batches and prefill. Dtypes and the orders of B
change from product to product; 8-bit floats have B as (N, K), the one order that cuBLAS takes. Odd,
flat and deep products follow, each in both orders."""

from typing import NamedTuple


class Gemm(NamedTuple):
    """``(M, K) @ (K, N)``; nt: B is stored as (N, K)."""

    kind: str  # "aligned", "odd", "flat" or "deep"
    m: int
    n: int
    k: int
    dtype: str
    nt: bool
    source: str

    @property
    def text(self):
        return f"{self.m}x{self.n}x{self.k}:{self.dtype}" + (":nt" if self.nt else "")


class Model(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "Llama 3 8B": Model(4096, 14336, 32, 8, 128),
    "Llama 3 70B": Model(8192, 28672, 64, 8, 128),
    "Qwen2.5 7B": Model(3584, 18944, 28, 4, 128),
}

# DeepSeek-V3: hidden 7168, 128 heads of 128 + 64 (V 128), latents of 1536 and 512, experts of 2048
DEEPSEEK = {
    "q_a and kv_a": (1536 + 512 + 64, 7168),
    "q_b": (128 * (128 + 64), 1536),
    "kv_b": (128 * (128 + 128), 512),
    "o": (7168, 128 * 128),
    "gate and up of an expert": (2 * 2048, 7168),
    "down of an expert": (7168, 2048),
}

ROWS = (1, 2, 4, 8, 16, 32, 37, 64, 128, 256, 333, 512, 1024, 2048, 2999, 4096, 8192, 16384)
DTYPES = ("bfloat16", "float8_e4m3fn", "bfloat16", "float16", "bfloat16")

ODD = (
    (1000, 1000, 1000),
    (3000, 5000, 7000),
    (4097, 8191, 4095),
    (100, 5000, 777),
    (777, 1111, 3333),
)
FLAT = ((64, 14336, 4096), (8192, 64, 8192), (16384, 128, 1024), (48, 28672, 8192))
DEEP = (
    (512, 512, 16384),
    (256, 256, 32768),
    (128, 128, 65536),
    (64, 512, 65536),
    (1024, 1024, 16384),
    (512, 4096, 14336),
)


def layers():
    """``(name, n, k)`` of every linear layer."""
    for name, x in MODELS.items():
        q = x.heads * x.head_dim
        yield f"{name}, qkv", q + 2 * x.kv_heads * x.head_dim, x.hidden
        yield f"{name}, o", x.hidden, q
        yield f"{name}, gate and up", 2 * x.intermediate, x.hidden
        yield f"{name}, down", x.hidden, x.intermediate
    for layer, (n, k) in DEEPSEEK.items():
        yield f"DeepSeek-V3, {layer}", n, k


def suite():
    """All products, those of the models first."""
    found = []
    for i, (name, n, k) in enumerate(layers()):
        for m in ROWS[i % 3 :: 3]:
            dtype = DTYPES[len(found) % len(DTYPES)]
            nt = dtype.startswith("float8") or len(found) // len(DTYPES) % 2 == 0
            found.append(Gemm("aligned", m, n, k, dtype, nt, name))
    for kind, shapes in (("odd", ODD), ("flat", FLAT), ("deep", DEEP)):
        found += [
            Gemm(kind, *shape, dtype, nt, kind)
            for shape in shapes
            for dtype, nt in (("bfloat16", True), ("float16", False))
        ]
    return found


def parse(text):
    """A Gemm from its text, for example 512x512x16384:bfloat16:nt."""
    shape, *options = text.split(":")
    nt = "nt" in options
    dtype = next((x for x in options if x != "nt"), "bfloat16")
    return Gemm("given", *map(int, shape.split("x")), dtype, nt, "given")
