"""What a call of a kernel makes of its arguments on the host: memory that arrays share, 64-bit
inputs, streams."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops, pl

N = 64


def shaped(*shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def add(x, y, o):
    o[...] = x[...] + y[...]


def kernel(body=add, out_type=None, **options):
    return plgpu.kernel(body, out_type=out_type or shaped(N), interpret=True, **options)


# ---- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-N + 1, -7, 1, N // 2, N - 1])
@pytest.mark.parametrize("which", [0, 1])
def test_out_that_overlaps_an_operand_partly(which, shift, rng):
    memory = rng.standard_normal(3 * N).astype(np.float32)
    at = memory[N : 2 * N]
    args = [memory[N + shift : 2 * N + shift], memory[:0]]
    args[1] = rng.standard_normal(N).astype(np.float32)
    if which:
        args.reverse()
    before = memory.copy()
    shared = 4 * (N - abs(shift))
    with pytest.raises(ValueError, match=rf"out\[0\] and argument {which} share {shared} bytes"):
        kernel()(*args, out=at)
    assert (memory == before).all()


def test_arrays_beside_each_other_and_in_place(rng):
    memory = rng.standard_normal(3 * N).astype(np.float32)
    x, y, o = memory[:N], memory[N : 2 * N], memory[2 * N :]
    want = x + y
    assert kernel()(x, y, out=o) is o and (o == want).all()
    assert kernel()(x, y, out=x) is x and (x == want).all()
    doubled = kernel()(y, y, out=y)  # both operands are the output
    assert doubled is y and (y == (want - o) + y).all()


def test_out_of_another_shape_of_the_same_memory(rng):
    x = rng.standard_normal((8, 8)).astype(np.float32)

    def scale(x, o):
        o[...] = x[...].reshape(64) * 2

    want = x.reshape(64) * 2
    assert (kernel(scale)(x, out=x.reshape(64)) == want).all()


def test_views_that_are_copied_share_nothing(rng):
    memory = rng.standard_normal(2 * N).astype(np.float32)
    want = memory[::2] + memory[::-2]
    got = memory[:N]
    assert kernel()(memory[::2], memory[::-2], out=got) is got and (got == want).all()


def test_outputs_that_share_memory(rng):
    x = rng.standard_normal(N).astype(np.float32)

    def both(x, a, b):
        a[...], b[...] = x[...] + 1, x[...] + 2

    k = kernel(both, [shaped(N), shaped(N)])
    memory = np.zeros(2 * N, np.float32)
    for a, b in [(0, 0), (0, N - 1), (N // 2, 0)]:
        with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] share"):
            k(x, out=[memory[a : a + N], memory[b : b + N]])
    assert not memory.any()
    a, b = k(x, out=[memory[N:], memory[:N]])
    assert (a == x + 1).all() and (b == x + 2).all()


def test_elements_of_four_bits_have_a_byte_each_in_numpy():
    memory = np.zeros(3 * N, np.int8).view("int4")

    def copy(x, o):
        o[...] = x[...]

    k = kernel(copy, shaped(N, dtype="int4"))
    with pytest.raises(ValueError, match="share 1 bytes"):
        k(memory[:N], out=memory[N - 1 : 2 * N - 1])
    k(memory[:N], out=memory[N : 2 * N])


def test_pallas_call_and_nested_arguments(rng):
    memory = rng.standard_normal(2 * N).astype(np.float32)
    call = pl.pallas_call(
        lambda x, o: o.__setitem__(..., x[...] + 1),
        out_shape=shaped(N),
        input_output_aliases={0: 0},
        interpret=True,
    )
    with pytest.raises(ValueError, match="share"):
        call(memory[:N], out=memory[1 : N + 1])
    want = memory[:N] + 1
    assert (call(memory[:N], out=memory[:N]) == want).all()
    nested = kernel(lambda xs, o: o.__setitem__(..., xs["a"][...] + 1))
    with pytest.raises(ValueError, match="argument 0 share"):
        nested({"a": memory[:N]}, out=memory[1 : N + 1])


def test_ops_that_cannot_work_in_place(rng):
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    with pytest.raises(ValueError, match=r"matmul: out\[0\] and argument 1 .*in place"):
        ops.matmul(a, b, out=b)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    want = ops.softmax(x)
    assert ops.softmax(x, out=x) is x and (x == want).all()
