"""pallas_mgpu: the Pallas:MGPU kernel language for NVIDIA GPUs, without JAX.

import pallas_mgpu as plgpu
from pallas_mgpu import pl, lax, numpy as jnp

@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((128,), jnp.float32))
def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1

add_one(x)    # NumPy, PyTorch, CuPy, JAX arrays, DeviceArray
"""

from ._core import DeviceArray, device_put, synchronize  # noqa: I001 - the extension comes first
from importlib import import_module as _import_module
from ._core import (
    CompileError,
    ConcretizationTypeError,
    DeadlockError,
    DriverError,
    InternalError,
    Kernel,
    LaunchError,
    Lowered,
    LoweringError,
    NVRTCError,
    OutOfMemoryError,
    RaceError,
    ScheduleError,
    TMADescriptorError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
    TypePromotionError,
    UnexpectedTracerError,
    UninitializedError,
)
from . import _hooks, ext, lax, nn, numpy, pl, tree
from ._batch import vmap
from ._caches import clear_caches
from ._control import warp_map
from ._devices import (
    PeerMemRef,
    multicast_ref,
    multimem_load_reduce,
    multimem_store,
    remote_ref,
)
from ._family import ArrayInfo, sm_count, specialize
from ._inline import inline_cuda
from ._frameworks import as_torch_kernel, torch_op  # noqa: I001
from ._kernel import kernel
from ._memory import OF_REF as _OF_REF
from ._memory import WITH_INDEX as _WITH_INDEX
from ._memory import atomic_cas, store
from ._mutable import freeze, new_ref
from ._names import OLD_PIPELINES as _OLD_PIPELINES
from ._names import PLGPU_MISSING as _MISSING
from ._names import PLGPU_WRONG as _WRONG
from ._names import finder as _finder
from ._ops import (
    async_prefetch,
    async_store_smem,
    barrier_arrive,
    barrier_test,
    barrier_wait,
    broadcasted_iota,
    cluster_ref,
    commit_smem,
    commit_smem_to_gmem_group,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    find_swizzle,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    layout_cast,
    load,
    mma,
    named_scope,
    planar_snake,
    print_layout,
    set_max_registers,
    transform_ref,
    transpose_ref,
    wait_gmem_to_smem,
    wait_smem_to_gmem,
    wgmma,
    wgmma_accumulator_load,
    wgmma_wait,
)
from ._pipeline import emit_pipeline
from ._sizes import Dim, dim
from ._schedule import NDLoopInfo, dynamic_scheduling_loop, nd_loop
from ._semaphores import (
    SemaphoreSignal,
    semaphore_signal,
    semaphore_signal_multicast,
    semaphore_signal_parallel,
    semaphore_wait,
)
from ._spmd import DeviceMesh, PartitionSpec, spmd, symm_empty
from ._tcgen05 import (
    async_copy_scales_to_tmem,
    async_copy_smem_to_tmem,
    async_copy_sparse_metadata_to_tmem,
    async_load_tmem,
    async_store_tmem,
    commit_tmem,
    query_cluster_cancel,
    tcgen05_commit_arrive,
    tcgen05_mma,
    try_cluster_cancel,
    wait_load_tmem,
)
from ._tmem import TMEMLayout, TryClusterCancelResult, format_tcgen05_sparse_metadata
from ._types import (
    ACC,
    GMEM,
    REGS,
    SMEM,
    TMEM,
    Barrier,
    BlockSpec,
    ClusterBarrier,
    CompilerParams,
    CopyPartition,
    InterpretParams,
    LoggingMode,
    Layout,
    LoweringSemantics,
    MemorySpace,
    Mesh,
    OOBFillMode,
    RefType,
    RefUnion,
    Replicated,
    SemaphoreType,
    ShapeDtypeStruct,
    SwizzleTransform,
    Tiling,
    TilingTransform,
    TraceScope,
    Transform,
    WarpMesh,
    WGMMAAccumulatorRef,
)
from ._trace import Array, Ref
from ._ws_pipeline import PipelinePipeline, emit_pipeline_warp_specialized

_hooks.register()

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
tcgen05_commit = tcgen05_commit_arrive
TryCancelResultRef = TryClusterCancelResult
TRY_CLUSTER_CANCEL_RESULT = TryClusterCancelResult()

atomic_add, atomic_max, atomic_min, atomic_and, atomic_or, atomic_xor = (
    _OF_REF[f"atomic_{kind}"] for kind in ("add", "max", "min", "and", "or", "xor")
)

# names of Pallas' Triton backend
atomic_xchg = _WITH_INDEX["atomic_xchg"]
dot = pl.dot_of_matrices


def approx_tanh(x):
    """``lax.tanh``, which is at least as exact as Triton's approximation."""
    return lax.tanh(x)


def max_contiguous(x, values):
    """A hint for Triton; ``x``."""
    return x


_find = _finder("plgpu", _MISSING, _WRONG)


# imported when they are first used
_LATER = {
    **dict.fromkeys(("Race", "RaceAccess", "RaceLog", "get_races"), "._races"),
    **dict.fromkeys(("Autotuned", "autotune"), "._autotune"),
    **dict.fromkeys(("ExportedKernel", "load_exported"), "._export"),
    **dict.fromkeys(("Estimate", "estimate"), "._estimate"),
    **dict.fromkeys(("Trace", "Wait", "read_trace"), "._timeline"),
}


def __getattr__(name):
    if name == "testing":
        return _import_module(".testing", __name__)
    if name in _LATER:
        value = globals()[name] = getattr(_import_module(_LATER[name], __name__), name)
        return value
    if name == "pipelines":
        return _OLD_PIPELINES
    return _find(name)


# pytest adds names such as @py_builtins to the modules of packages that bring a plugin
__all__ = [*(name for name in globals() if name[0].isalpha()), *_LATER, "testing"]


def __dir__():
    return sorted(__all__)
