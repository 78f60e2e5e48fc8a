"""Compile a kernel now and call it later, from Python or C, where no compiler is.

    python export.py files            # writes files/add.cubin, .h, .c, .graph, .json
    cc -Ifiles -I/usr/local/cuda/include main.c files/add.c -lcuda -o main && ./main files/add.cubin

Needs no GPU; main.c and `plgpu.load_exported` on GPU arrays need one of the target's generation."""

import sys

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import pl

N = 1 << 20


def body(x, y, o):
    o[...] = x[...] + y[...]


array = plgpu.ShapeDtypeStruct((N,), np.float32)
blocks = pl.BlockSpec((1024,), lambda i: (i,))


def add(target="sm_90a"):
    """The lowered kernel."""
    kernel = pl.pallas_call(
        body, out_shape=array, grid=(N // 1024,), in_specs=[blocks] * 2, out_specs=blocks
    )
    return kernel.lower(array, array, target=target)


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "files"
    for path in add(*sys.argv[2:3]).export(directory, name="add"):
        print(path)
    add_later = plgpu.load_exported(directory)
    x = np.arange(N, dtype=np.float32)
    np.testing.assert_array_equal(add_later(x, x), 2 * x)
