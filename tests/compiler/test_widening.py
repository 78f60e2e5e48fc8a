"""The device functions that widen small integers and move bytes between lanes: their PTX, as NVRTC
makes it, is computed here for every input. Nothing else of them is seen without a GPU: the emulated
machine has functions of its own."""

import re

import ml_dtypes
import numpy as np
import pytest
from test_catalogue import ENTRY, catalogue, ptx_of

HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def pairs(kind, words):
    """Both halves of each word as float32: of 16-bit floats."""
    halves = np.asarray(words, np.uint32).view(np.uint16).reshape(-1, 2)
    return halves.view(HALVES[kind]).astype(np.float32)


def rounded(kind, x):
    return x.astype(HALVES[kind]).reshape(-1).view(np.uint32)


class Ptx:
    """Straight PTX of an entry with the parameters out, f, u, for as many lanes as `u` has."""

    def __init__(self, code, u, memory=(), target="sm_90a"):
        ptx = ptx_of(catalogue(target) + ENTRY % ("entry", code), target)
        body = ptx[ptx.index("{", ptx.index(".entry entry")) :]
        self.lanes, self.value, self.stored = len(u), {}, {}
        self.u, self.memory = np.asarray(u, np.uint32), memory
        for line in body.splitlines():
            for statement in line.split(";"):
                self.step(statement.strip(" \t{}"))

    def number(self, text):
        if text in self.value:
            return self.value[text]
        if text.startswith("0f"):
            text = int(text[2:], 16)
        return np.full(self.lanes, int(text, 0) & 0xFFFFFFFF if isinstance(text, str) else text,
                       np.uint32)  # fmt: skip

    def step(self, text):
        if not text or text.startswith(("//", ".", "ret", "ld.param.u64", "cvta")):
            return
        op, rest = re.match(r"(\S+)\s+(.*)", text).groups()
        where = [x.strip(" {") for x in rest.split(",")]
        if op == "ld.param.u32":
            self.value[where[0]] = self.u
        elif op.startswith(("ld.global", "st.global")):
            at = int((re.search(r"\+(\d+)\]", rest) or [0, 0])[1]) // 4
            if op.startswith("ld"):
                self.value[where[0]] = np.asarray(self.memory[at], np.uint32)
            else:
                self.stored[at] = self.number(where[1])
        else:
            self.value[where[0].partition("|")[0]] = self.compute(op, *map(self.number, where[1:]))

    def compute(self, op, *x):
        name, kind = op.split(".")[0], op.split(".")[-1].removesuffix("x2")
        if kind in HALVES:
            a, b, *c = (pairs(kind, v).astype(np.float64) for v in x)
            of_two = {"sub": a - b, "mul": a * b}.get(name, a + b)
            return rounded(kind, a * b + c[0] if c else of_two)
        if op == "add.f32":
            return (x[0].view(np.float32) + x[1].view(np.float32)).view(np.uint32)
        if name == "prmt":
            eight = np.stack([v >> np.uint32(8 * k) & 255 for v in x[:2] for k in range(4)])
            picked = [np.choose(x[2] >> np.uint32(4 * k) & 7, eight) for k in range(4)]
            return sum(v.astype(np.uint32) << np.uint32(8 * k) for k, v in enumerate(picked))
        if name == "lop3":
            out = np.zeros(self.lanes, np.uint32)
            for k in range(8):
                term = np.full(self.lanes, 0xFFFFFFFF, np.uint32)
                for bit, v in zip((4, 2, 1), x[:3], strict=True):
                    term &= v if k & bit else ~v
                out |= np.where(x[3] >> np.uint32(k) & 1, term, 0).astype(np.uint32)
            return out
        if name == "shfl":
            return x[0][np.arange(self.lanes) ^ x[1].astype(int)]
        return {
            "mov": lambda: x[0] if len(x) == 1 else x[0] & 0xFFFF | x[1] << np.uint32(16),
            "cvt": lambda: x[0] & (0xFFFF if ".u16" in op else 0xFFFFFFFF),
            "xor": lambda: x[0] ^ x[1],
            "and": lambda: x[0] & x[1],
            "or": lambda: x[0] | x[1],
            "shr": lambda: x[0] >> x[1],
            "shl": lambda: x[0] << x[1],
            "mul": lambda: x[0] * x[1],
            "setp": lambda: x[0] == x[1] if ".eq" in op else x[0] != x[1],
            "selp": lambda: np.where(x[2], x[0], x[1]),
        }[name]()


@pytest.mark.parametrize(
    "name, to, how",
    [(n, t, "") for n in ("s8", "u8") for t in ("f16", "bf16", "f32")]
    + [(n, t, how) for n in ("s4", "u4") for t in ("f16", "bf16") for how in ("", "_apart")]
    + [("s8", "bf16", "_apart")],
)
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_every_number(name, to, how, target):
    """All bytes in all four places, exactly."""
    element, n = ("u8", 8) if name.endswith("4") else (f"{name}".replace("s", "i"), 4)
    code = f"{element} x[4]; unpack<{element}, 4>(x, &u); {to} d[{n}];"
    code += f" cvt_from_{name}x{n}{how}(d, x); pack<{to}, {n}>(out, d);"
    byte = np.arange(256)
    words = np.stack([byte, byte ^ 0x5A, 255 - byte, byte * 7 % 256], 1).astype(np.uint8)
    stored = Ptx(code, words.view(np.uint32)[:, 0], target=target).stored
    got = np.stack([stored[k] for k in range(len(stored))], 1)
    got = got.view(HALVES.get(to, np.float32)).astype(np.float32)
    want = words
    if n == 8:
        want = np.stack([words & 15, words >> 4], 2).reshape(256, 8)
    limit = 1 << int(name[1:]) - 1
    want = want.astype(np.float32)
    if name[0] == "s":
        want -= 2 * limit * (want >= limit)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("step", [1, 2])
def test_bytes_change_lanes(step):
    """Bytes of two words whose number has the bit `step` trade places with those of the lane with
    the bit 4."""
    words = np.arange(256, dtype=np.uint8).reshape(32, 8).copy()
    x, y = words.view(np.uint32).T
    code = (
        f"u32 y = out[0]; swap_bytes<{step}>(&u, &y, threadIdx.x & 4, 4); out[0] = u; out[1] = y;"
    )
    code = code.replace("threadIdx.x & 4", "out[2] != 0")
    lane = np.arange(32)
    stored = Ptx(code, x, [y, None, lane & 4]).stored
    got = np.stack([stored[0], stored[1]], 1).view(np.uint8)
    own, other = words, words[lane ^ 4]
    number = np.arange(8)
    high = (lane[:, None] & 4) != 0
    odd = (number & step) != 0
    want = np.where(
        high,
        np.where(odd, own, other[:, number | step]),
        np.where(odd, other[:, number & ~step], own),
    )
    np.testing.assert_array_equal(got, want)


def test_words_change_lanes():
    """The lane with the bit set gives its first word for the second one of the other."""
    x, y = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)
    code = "u32 y = out[0]; swap_lanes<1, 1>(&u, &y, out[2] != 0, 8); out[0] = u; out[1] = y;"
    lane = np.arange(32)
    stored = Ptx(code, x, [y, None, lane & 8]).stored
    np.testing.assert_array_equal(stored[0], np.where(lane & 8, y[lane ^ 8], x))
    np.testing.assert_array_equal(stored[1], np.where(lane & 8, y, x[lane ^ 8]))


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name, f", [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)])
def test_two_at_a_time(rng, name, f, kind, target):
    """Each half of a word with its own of the other, rounded as alone."""
    x, y = rng.standard_normal((2, 512)).astype(HALVES[kind])
    code = f"{kind} a[2], b[2], d[2]; unpack<{kind}, 2>(a, &u); unpack<{kind}, 2>(b, out);"
    code += f" {name}_x2(d, a[0], a[1], b[0], b[1]); pack<{kind}, 2>(out, d);"
    stored = Ptx(code, x.view(np.uint32), [y.view(np.uint32)], target).stored[0]
    np.testing.assert_array_equal(stored.view(HALVES[kind]), f(x, y))


def test_nibbles_of_a_word():
    stored = Ptx("i8 x[8] = {1, 2, 3, 4, 5, 6, 7, -8}; pack_nibbles(out, x);", [0]).stored
    assert stored[0][0] == 0x87654321
