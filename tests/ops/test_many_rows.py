"""More rows than a grid has blocks along any axis but its last one."""

import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops._common import compile_for

ROWS = 70_000
MANY_ROWS = {
    "gated_linear_unit": ((ROWS, 8192), (ROWS, 8192)),
    "gated_linear_unit_backward": ((ROWS, 8192), (ROWS, 8192), (ROWS, 8192)),
    "gated_linear_unit_quantize": ((ROWS, 8192), (ROWS, 8192)),
    "matmul": ((ROWS, 4097), (4097, 64)),  # a copy with padded rows
}


@pytest.mark.parametrize("name", MANY_ROWS)
def test_more_rows_than_a_grid_has_along_most_axes(name):
    operands = [plgpu.ShapeDtypeStruct(s, plgpu.numpy.bfloat16) for s in MANY_ROWS[name]]
    kernel = getattr(ops, name).kernel(*operands)
    compile_for(kernel, operands)


def test_more_rows_of_float32_and_of_sums():
    a, b = (plgpu.ShapeDtypeStruct(s, plgpu.numpy.float32) for s in ((ROWS, 2048), (2048, 64)))
    compile_for(ops.matmul.kernel(a, b), [a, b])
    config = ops.MatmulConfig(1, 64, slices=2, cluster=1)
    a, b = (plgpu.ShapeDtypeStruct(s, plgpu.numpy.float16) for s in ((ROWS, 512), (512, 600)))
    compile_for(ops.matmul.kernel(a, b, config=config), [a, b])
