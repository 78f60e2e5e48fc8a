"""The smallest kernel: load, add, store. Any shape."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp


def kernel_body(input_ref, out_ref):
    out_ref[...] = input_ref[...] + 1


inputs = jnp.ones((128,), jnp.float32)
result = plgpu.kernel(kernel_body, out_type=plgpu.ShapeDtypeStruct((128,), jnp.float32))(inputs)
np.testing.assert_array_equal(result, np.full(128, 2, np.float32))
print("ok")
