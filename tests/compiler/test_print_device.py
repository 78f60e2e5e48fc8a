"""The text of numbers as the device functions of csrc/cuda/device/print.cuh write it, compiled for
the CPU: Python's format() is the judge, of many numbers and formats."""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pallas_mgpu.machine import run as host

DEVICE = Path(__file__).parent.parent.parent / "csrc" / "cuda" / "device" / "print.cuh"
SHIM = r"""
#include <string.h>
typedef unsigned int u32; typedef unsigned long long u64; typedef int i32; typedef long long i64;
#define __device__
#define __noinline__ __attribute__((noinline))
#define FN static inline
static i64 __double_as_longlong(double x) { i64 r; memcpy(&r, &x, 8); return r; }
#include "%s"
extern "C" void of_float(char *out, double x, const char *style, i32 width, i32 precision,
                         i32 bits, i32 least) {
  char text[1200];
  memset(text, 0x55, sizeof text);
  strcpy(out, print_float(text, x, style, width, precision, bits, least, text + 600));
}
extern "C" void of_int(char *out, i64 x, const char *style, i32 width) {
  strcpy(out, print_int(out, x, style, width));
}
"""
SPEC = re.compile(
    r"(?:(.)?([<>=^]))?([-+ ])?(#)?(0)?(\d+)?([,_])?(?:\.(\d+))?([a-zA-Z%])?", re.DOTALL
)


@pytest.fixture(scope="module")
def printer(tmp_path_factory):
    source = tmp_path_factory.mktemp("print") / "print.cpp"
    source.write_text(SHIM % DEVICE)
    library = source.with_suffix(".so")
    flags = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command = [host.compiler(), *flags, "-fPIC", "-shared", source, "-o", library]
    subprocess.run([str(c) for c in command], check=True)
    lib, out = ctypes.CDLL(str(library)), ctypes.create_string_buffer(1200)

    def show(x, spec="", bits=24, least=-149):
        fill, align, sign, alt, zero, width, group, precision, kind = SPEC.fullmatch(spec).groups()
        style = (fill or "0" if zero else fill or " ") + (align or ("=" if zero else ">"))
        style += (sign or "-") + (alt or ".") + (group or ".") + (kind or ".")
        if isinstance(x, int):
            lib.of_int(out, ctypes.c_longlong(x), style.encode(), int(width or 0))
        else:
            places = -1 if precision is None else int(precision)
            lib.of_float(
                out, ctypes.c_double(x), style.encode(), int(width or 0), places, bits, least
            )
        return out.value.decode()

    return show


def test_shortest_digits(printer, rng):
    """Any bits of float32, its powers of two, all of float16: NumPy finds the same digits."""
    some = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    for x in np.concatenate([some, powers, -powers, np.float32([0, -0.0, 1e15, 1e16, 1e-4, 9e-5])]):
        assert printer(float(x)) == repr(float(str(x)))
    for x in np.arange(0, 2**16, 3, dtype=np.uint16).view(np.float16):
        assert printer(float(x), "", 11, -24) == repr(float(str(x)))


def random_spec(rng, kinds, precisions):
    parts = [
        ["", "", "*<", "^", "x>", "=", "0=", "_^"],
        ["", "", "+", " ", "-"],
        ["", "", "#"],
        ["", "", "0"],
        ["", "", "5", "12", "60"],
        ["", "", "", ",", "_"],
        precisions,
        kinds,
    ]
    return "".join(p[rng.integers(len(p))] for p in parts)


def test_formats_of_floats(printer, rng):
    bases = [0.5, 2.5, 0.25, 99.95, 999.5, 0.05, 1234567.0, 123.456, -7.0, 9.5, 0.0, np.inf, np.nan]
    precisions, kinds = ["", "", ".0", ".1", ".3", ".7", ".20", ".99"], list("feEFgG%") + [""]
    tried = 0
    while tried < 10000:
        spec = random_spec(rng, kinds, precisions)
        x = float(np.float32(bases[rng.integers(len(bases))] * 10.0 ** rng.integers(-3, 4)))
        if rng.random() < 0.5:
            x = float(rng.integers(0, 2**32, dtype=np.uint32).view(np.float32))
        exact = x if "." in spec or spec[-1:] in [*"feEFgG%"] else float(str(np.float32(x)))
        zeros = re.search(r"0=|(?<![\d.])0\d*[,_]|0[,_]", spec) and ("," in spec or "_" in spec)
        try:
            want = format(exact, spec)
        except ValueError:
            continue
        if zeros:  # zeros in front of grouped digits are refused before
            continue
        tried += 1
        assert printer(x, spec) == want, (x, spec)


def test_formats_of_integers(printer, rng):
    tried = 0
    while tried < 5000:
        spec = random_spec(rng, ["", "d", "x", "X", "o", "b"], [""])
        x = int(rng.integers(-(2**31), 2**32)) >> int(rng.integers(0, 32))
        zeros = re.search(r"0=|(?<!\d)0", spec) and ("," in spec or re.search(r"_(?!\^)", spec))
        try:
            want = format(x, spec)
        except ValueError:
            continue
        if zeros:
            continue
        tried += 1
        assert printer(x, spec) == want, (x, spec)
