"""Mistakes that type checkers must find: one on each line that ends with the word mistake.

tests/language/test_typing.py counts how many of them pyright and mypy --strict report at their
line."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, ops, pl, tree
from pallas_mgpu import numpy as jnp

F16 = jnp.float16
OUT = plgpu.ShapeDtypeStruct((64, 64), jnp.float32)
X = np.zeros((64, 64), np.float32)


def body(x: plgpu.Ref, o: plgpu.Ref) -> None:
    o[...] = x[...]


good = plgpu.kernel(body, out_type=OUT)
pair = plgpu.kernel(body, out_type=(OUT, OUT))

plgpu.kernel(body, out_tpye=OUT)  # mistake
plgpu.kernel(body)  # mistake
plgpu.kernel(body, out_type=OUT, grid="x")  # mistake
plgpu.kernel(body, out_type=OUT, num_threads="2")  # mistake
plgpu.kernel(body, out_type=OUT, compiler_params={"approx_math": True})  # mistake
plgpu.kernel(body, out_type=OUT, scratch_types=plgpu.Barrier())  # mistake
plgpu.kernel(3, out_type=OUT)  # mistake
plgpu.kernel(body, out_type=OUT, interpret="yes")  # mistake
good.lowered(X)  # mistake
good(X, output=X)  # mistake
good("text")  # mistake
good(X) + good  # mistake
pair(X).shape  # mistake
good.lower(X).as_text("mlir")  # mistake
good.lower(X).resources()["regs"]  # mistake
plgpu.ShapeDtypeStruct((64, 64))  # mistake
plgpu.ShapeDtypeStruct(("64",), jnp.float32)  # mistake
plgpu.SMEM((64, 64))  # mistake
plgpu.SMEM((64, 64), F16, swizzle=128)  # mistake
plgpu.SMEM((64, 64), F16, transforms=(128,))  # mistake
plgpu.SwizzleTransform("128")  # mistake
plgpu.TilingTransform(8)  # mistake
plgpu.Barrier(2)  # mistake
plgpu.Barrier(num_arrival=2)  # mistake
plgpu.ClusterBarrier()  # mistake
plgpu.BlockSpec(lambda i: (i, 0), (64, 64))  # mistake
plgpu.BlockSpec((64, 64), lambda i: "i")  # mistake
plgpu.Layout.WGMAM  # mistake
plgpu.Mesh(grid=(2,), axis_name="i")  # mistake
plgpu.CompilerParams(approximate=True)  # mistake
plgpu.InterpretParams(out_of_bounds_reads="rais")  # mistake
plgpu.InterpretParams(seed="3")  # mistake
plgpu.autotune  # mistake
plgpu.OOBFillMode.ZERO  # mistake
pl.cdiv("a", 2)  # mistake
pl.ds(0, 64, 1, 1)  # mistake
tree.map(X)  # mistake
ops.matmul(X)  # mistake
ops.softmax(X, dim=-1)  # mistake
ops.attention(X, X, X, causal="yes")  # mistake
ops.MatmulConfig(tiles=3)  # mistake


def kernel_body(x: plgpu.Ref, o: plgpu.Ref, acc: plgpu.Ref, barrier: plgpu.Ref) -> None:
    value = x[...]
    plgpu.copy_gmem_to_smem(value, o, barrier)  # mistake
    plgpu.copy_gmem_to_smem(x, o, barrier, engin="tma")  # mistake
    plgpu.copy_smem_to_gmem(x, o, reduction_op="mean")  # mistake
    plgpu.barrier_wait()  # mistake
    plgpu.barrier_arrive(barrier, 1)  # mistake
    plgpu.wgmma(acc, value, value)  # mistake
    plgpu.wgmma_wait()  # mistake
    plgpu.set_max_registers(40, action="lower")  # mistake
    plgpu.layout_cast(value, "WGMMA")  # mistake
    value[0] = 1  # mistake
    value.set(1)  # mistake
    value.sum(axes=0)  # mistake
    x.sum()  # mistake
    lax.fori_loop(0, 4, value, body)  # mistake
    lax.axis_index(0)  # mistake
    lax.select(value > 0, value)  # mistake
    lax.exp(value, 2)  # mistake
    jnp.softmax(value)  # mistake
    jnp.where(value > 0, value)  # mistake
    jnp.zeros("4")  # mistake
    nn.softmax(value, dim=-1)  # mistake
    nn.gelu(value, approx=True)  # mistake
    pl.run_scoped(body, (64, 64))  # mistake
    pl.when(value, 1)  # mistake
    pl.debug_print(value)  # mistake
    o[...] = "text"  # mistake
    o[...] = x  # a whole ref is a value, too
