"""pallas_mgpu: the Pallas:MGPU kernel language for NVIDIA GPUs, without JAX.

import pallas_mgpu as plgpu
from pallas_mgpu import pl, lax, numpy as jnp

@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((128,), jnp.float32))
def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1

add_one(x)    # NumPy, PyTorch, CuPy, JAX arrays, DeviceArray
"""

from ._core import DeviceArray, device_put, synchronize  # noqa: I001 - the extension comes first
from ._core import (
    CompileError,
    ConcretizationTypeError,
    DeadlockError,
    DriverError,
    InternalError,
    LaunchError,
    NVRTCError,
    OutOfMemoryError,
    TMADescriptorError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
    TypePromotionError,
    UnexpectedTracerError,
)
from . import lax, nn, numpy, pl, tree
from ._kernel import kernel
from ._ops import (
    barrier_arrive,
    barrier_wait,
    broadcasted_iota,
    commit_smem,
    commit_smem_to_gmem_group,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    find_swizzle,
    layout_cast,
    load,
    planar_snake,
    set_max_registers,
    transpose_ref,
    wait_gmem_to_smem,
    wait_smem_to_gmem,
    wgmma,
    wgmma_accumulator_load,
    wgmma_wait,
)
from ._pipeline import emit_pipeline, emit_pipeline_warp_specialized
from ._types import (
    ACC,
    GMEM,
    REGS,
    SMEM,
    TMEM,
    Barrier,
    BlockSpec,
    CompilerParams,
    InterpretParams,
    Layout,
    LoweringSemantics,
    MemorySpace,
    Mesh,
    OOBFillMode,
    Replicated,
    ShapeDtypeStruct,
    SwizzleTransform,
    Tiling,
    TilingTransform,
    TraceScope,
    Transform,
    WGMMAAccumulatorRef,
)
from ._trace import Array, Ref

__version__ = "0.1.0"

# older spellings
GPUBlockSpec, GPUCompilerParams, GPUMemorySpace, GPUMesh = (
    BlockSpec,
    CompilerParams,
    MemorySpace,
    Mesh,
)
GPUShapeDtypeStruct, TileTransform, MemoryRefTransform = (
    ShapeDtypeStruct,
    TilingTransform,
    Transform,
)
ThreadSemantics = LoweringSemantics
wait_barrier = barrier_wait

# name: what to use instead
_MISSING = {
    "ClusterBarrier": "use a Barrier inside each block",
    "PipelinePipeline": "use emit_pipeline",
    "RefUnion": "allocate in sibling pl.run_scoped scopes, which share memory",
    "SemaphoreType": "use a Barrier inside a block",
    "WarpMesh": "branch on the thread axis",
    "as_torch_kernel": "not needed: kernels take torch tensors as they are",
    "async_prefetch": "leave it out",
    "async_store_smem": "exchange data through GMEM",
    "atomic_add": "give each block its own output",
    "barrier_test": "use barrier_wait",
    "cluster_ref": "exchange data through GMEM",
    "dynamic_scheduling_loop": "use lax.fori_loop over a static schedule",
    "griddepcontrol_launch_dependents": "leave it out",
    "griddepcontrol_wait": "leave it out",
    "inline_mgpu": "use the array functions",
    "mma": "use wgmma",
    "nd_loop": "use pl.loop with lax.axis_index",
    "print_layout": "read kernel.lower(...).as_text('graph')",
    "semaphore_signal": "use a Barrier inside a block",
    "semaphore_wait": "use a Barrier inside a block",
    "transform_ref": "give transforms where the ref is allocated",
    "warp_map": "branch on the thread axis",
}
_WRONG = {
    "triton_call": "triton_call is not part of Pallas:MGPU; the right form is plgpu.kernel(body,"
    " out_shape=...)",
}


def __getattr__(name):
    if name == "pipelines":
        import importlib

        return importlib.import_module(".pipelines", __name__)
    if name in _WRONG:
        raise AttributeError(_WRONG[name])
    hint = _MISSING.get(name)
    if hint is None:
        raise AttributeError(f"pallas_mgpu has no {name!r}")

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"plgpu.{name} is not supported yet; {hint} (docs/gaps.md lists what is missing)"
        )

    missing.__name__ = name
    return missing
