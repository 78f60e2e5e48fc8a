import contextlib
import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import (
    ClassVar,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

import numpy as np
import numpy.typing as npt

from . import ext as ext
from . import lax as lax
from . import nn as nn
from . import numpy as numpy
from . import ops as ops
from . import pl as pl
from . import testing as testing
from . import tree as tree
from ._core import Array as Array
from ._core import CompileError as CompileError
from ._core import ConcretizationTypeError as ConcretizationTypeError
from ._core import DeadlockError as DeadlockError
from ._core import DeviceArray as DeviceArray
from ._core import DriverError as DriverError
from ._core import InternalError as InternalError
from ._core import LaunchError as LaunchError
from ._core import Lowered as Lowered
from ._core import LoweringError as LoweringError
from ._core import NVRTCError as NVRTCError
from ._core import OutOfMemoryError as OutOfMemoryError
from ._core import RaceError as RaceError
from ._core import Ref as Ref
from ._core import ScheduleError as ScheduleError
from ._core import TMADescriptorError as TMADescriptorError
from ._core import TracerArrayConversionError as TracerArrayConversionError
from ._core import TracerBoolConversionError as TracerBoolConversionError
from ._core import TracerIntegerConversionError as TracerIntegerConversionError
from ._core import TypePromotionError as TypePromotionError
from ._core import UnexpectedTracerError as UnexpectedTracerError
from ._core import UninitializedError as UninitializedError
from ._core import device_put as device_put
from ._core import synchronize as synchronize
from ._typing import (
    A,
    AxisName,
    Body,
    CollectiveAxes,
    Condition,
    Descriptor,
    DimensionSemantics,
    DType,
    Engine,
    Family,
    HasShape,
    Index,
    IndexMap,
    InlineType,
    Interpret,
    KernelOfDict,
    KernelOfList,
    KernelOfOne,
    KernelOfTuple,
    LayoutLike,
    LayoutValue,
    MemoryRef,
    MutableArray,
    PrecisionLike,
    ReductionOp,
    Scalar,
    Scratch,
    Semaphores,
    Shape,
    Specs,
    TorchOperator,
    Transforms,
    Tree,
    WarpSpecializedPipeline,
)
from ._typing import Dim as Dim
from ._typing import (
    Operand as _Operand,
)

__version__: str

_C = TypeVar("_C")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Callable[..., object])

# ---- descriptors ---------------------------------------------------------------------------------

@dataclass(frozen=True, init=False)
class ShapeDtypeStruct:
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    layout: LayoutLike | None
    def __init__(
        self,
        shape: Shape,
        dtype: DType,
        layout: LayoutLike | None = None,
        *,
        sharding: None = None,
        weak_type: bool = False,
    ) -> None: ...
    @classmethod
    def like(cls, x: HasShape) -> ShapeDtypeStruct: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...

@dataclass(frozen=True)
class Transform: ...

@dataclass(frozen=True, init=False)
class TilingTransform(Transform):
    tiling: tuple[int, ...]
    def __init__(self, tiling: Sequence[int]) -> None: ...

@dataclass(frozen=True, init=False)
class SwizzleTransform(Transform):
    swizzle: int
    def __init__(self, swizzle: int) -> None: ...

class MemorySpace(enum.Enum):
    GMEM = "gmem"
    SMEM = "smem"
    TMEM = "tmem"
    REGS = "regs"
    def __call__(
        self,
        shape: Shape,
        dtype: DType,
        *,
        transforms: Transforms = (),
        packed: bool | None = None,
        collective: bool | None = None,
        layout: object | None = None,
    ) -> MemoryRef: ...
    def like(self, shape_dtype_like: HasShape) -> MemoryRef: ...

GMEM: Final = MemorySpace.GMEM
SMEM: Final = MemorySpace.SMEM
TMEM: Final = MemorySpace.TMEM
REGS: Final = MemorySpace.REGS

@dataclass(frozen=True, init=False)
class WGMMAAccumulatorRef:
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    def __init__(self, shape: Shape, dtype: DType = ..., _init: Array | None = None) -> None: ...
    @classmethod
    def init(cls, array: Array) -> WGMMAAccumulatorRef: ...

ACC = WGMMAAccumulatorRef

@dataclass(frozen=True, init=False)
class Barrier:
    num_arrivals: int
    num_barriers: int
    orders_tensor_core: bool
    def __init__(
        self, *, num_arrivals: int = 1, num_barriers: int = 1, orders_tensor_core: bool = False
    ) -> None: ...

@dataclass(frozen=True, init=False)
class ClusterBarrier:
    collective_axes: tuple[AxisName, ...]
    num_barriers: int
    num_arrivals: int
    orders_tensor_core: bool
    leader_tracked: bool
    def __init__(
        self,
        *,
        collective_axes: AxisName | tuple[AxisName, ...],
        num_barriers: int = 1,
        num_arrivals: int = 1,
        orders_tensor_core: bool = False,
        leader_tracked: bool = False,
    ) -> None: ...

class SemaphoreType(enum.Enum):
    REGULAR = "regular"
    BARRIER = "barrier"
    def __call__(self, shape: Shape = ()) -> Semaphores: ...

@dataclass(frozen=True, init=False)
class RefUnion:
    groups: tuple[Descriptor | tuple[Descriptor, ...], ...]
    def __init__(self, *groups: Descriptor | Sequence[Descriptor]) -> None: ...

class OOBFillMode(enum.IntEnum):
    UNDEFINED = 0
    PROMISE_IN_BOUNDS = 1
    ZEROS = 2

class BlockSpec(pl.BlockSpec):
    transforms: tuple[Transform, ...]
    delay_release: int
    oob_fill_mode: OOBFillMode
    def __init__(
        self,
        block_shape: Sequence[pl.BlockDim | None] | None = None,
        index_map: IndexMap | None = None,
        pipeline_mode: pl.Buffered | None = None,
        transforms: Transforms = (),
        delay_release: int = 0,
        collective_axes: CollectiveAxes | None = None,
        oob_fill_mode: OOBFillMode = ...,
        *,
        memory_space: MemorySpace | None = None,
    ) -> None: ...

@dataclass(frozen=True, init=False)
class Mesh:
    grid: tuple[int, ...]
    grid_names: tuple[str, ...]
    cluster: tuple[int, ...]
    cluster_names: tuple[str, ...]
    num_threads: int | None
    thread_name: str | None
    kernel_name: str | None
    def __init__(
        self,
        *,
        grid: Shape = (),
        grid_names: str | Sequence[str] = (),
        cluster: Shape = (),
        cluster_names: str | Sequence[str] = (),
        num_threads: int | None = None,
        thread_name: str | None = None,
        kernel_name: str | None = None,
    ) -> None: ...
    @property
    def shape(self) -> Mapping[str, int]: ...

@dataclass(frozen=True, init=False)
class WarpMesh:
    axis_name: str
    def __init__(self, *, axis_name: str) -> None: ...

class LoweringSemantics(enum.Enum):
    Lane = 1
    Warpgroup = 2

class TraceScope(enum.Enum):
    WARP = "warp"
    WARPGROUP = "warpgroup"

@dataclass(frozen=True, init=False)
class CompilerParams:
    approx_math: bool
    dimension_semantics: tuple[DimensionSemantics, ...] | None
    max_concurrent_steps: int
    unsafe_no_auto_barriers: bool
    reduction_scratch_bytes: int
    profile_space: int
    profile_dir: str
    profile_trace_scope: TraceScope
    profile_bounds_check: bool
    lowering_semantics: LoweringSemantics
    exact_division: bool
    def __init__(
        self,
        *,
        approx_math: bool = False,
        dimension_semantics: Sequence[DimensionSemantics] | None = None,
        max_concurrent_steps: int = 1,
        unsafe_no_auto_barriers: bool = False,
        reduction_scratch_bytes: int = 2048,
        profile_space: int = 0,
        profile_dir: str = "",
        profile_trace_scope: TraceScope = ...,
        profile_bounds_check: bool = False,
        lowering_semantics: LoweringSemantics = ...,
        exact_division: bool = False,
        num_warps: int | None = ...,
        num_stages: int | None = ...,
    ) -> None: ...

class LoggingMode(enum.Flag):
    BARRIER = 1
    SEMAPHORE = 2
    SHARED_MEMORY = 4

@dataclass(frozen=True, init=False)
class InterpretParams:
    seed: int
    seeds: int
    out_of_bounds_reads: Literal["raise", "uninitialized"]
    uninitialized_memory: Literal["nan", "zero"]
    skip_floating_point_ops: bool
    num_cores_or_threads: int
    vector_clock_size: None
    num_tma_threads_per_device: int
    logging_mode: LoggingMode | None
    detect_races: bool
    on_race: Literal["raise", "warn", "record"]
    detect_uninitialized: bool
    mode: Literal["strict", "reference"]
    timeline: str | None
    backend: Literal["interpret", "emulate"]
    def __init__(
        self,
        *,
        seed: int = 0,
        seeds: int = 1,
        out_of_bounds_reads: Literal["raise", "uninitialized"] = "raise",
        uninitialized_memory: Literal["nan", "zero"] = "nan",
        skip_floating_point_ops: bool = False,
        num_cores_or_threads: int = 1,
        vector_clock_size: None = None,
        num_tma_threads_per_device: int = 5,
        logging_mode: LoggingMode | None = None,
        detect_races: bool = False,
        on_race: Literal["raise", "warn", "record"] = "raise",
        detect_uninitialized: bool = False,
        mode: Literal["strict", "reference"] = "strict",
        timeline: str | os.PathLike[str] | None = None,
    ) -> None: ...

@dataclass(frozen=True)
class RaceAccess:
    touch: Literal["read", "write", "atomic"]
    ref: str
    index: str
    agent: str
    file: str | None
    line: int

@dataclass(frozen=True)
class Race:
    first: RaceAccess
    second: RaceAccess
    space: Literal["SMEM", "GMEM"]
    index: str
    bytes: tuple[int, int]
    hint: str
    text: str
    @property
    def kind(self) -> str: ...

@dataclass(frozen=True)
class RaceLog:
    races: tuple[Race, ...] = ()
    notes: tuple[tuple[str, str | None, int], ...] = ()
    @property
    def races_found(self) -> bool: ...

def get_races() -> RaceLog: ...

@dataclass(frozen=True)
class Wait:
    at: str
    source: str
    what: str
    awaited: tuple[str, ...]
    ns: float
    critical_ns: float
    count: int

@dataclass(frozen=True)
class Trace:
    kernel: str
    events: list[dict[str, object]]
    waits: tuple[Wait, ...]
    truncated: bool
    def svg(self, process: int | None = None, width: int = 1000) -> str: ...

def read_trace(path: str | os.PathLike[str]) -> Trace: ...

# ---- register layouts ----------------------------------------------------------------------------

class Layout(enum.Enum):
    WGMMA = 1
    WGMMA_8BIT = 2
    WGMMA_UPCAST_2X = 3
    WGMMA_UPCAST_4X = 4
    WGMMA_TRANSPOSED = 5
    WG_SPLAT = 6
    WG_STRIDED = 7
    TILED = 8
    TCGEN05 = 9
    TCGEN05_TRANSPOSED = 10
    TCGEN05_M64_COLLECTIVE = 11
    TCGEN05_TMEM_NATIVE = 12
    TCGEN05_M64_COLLECTIVE_NATIVE = 13
    SMEM_GMEM_COPY = 14
    TMA_INDICES = 15
    TMA_INDICES_4 = 16
    MMA_LHS = 18
    MMA_RHS = 19
    MMA_ACC = 20
    @overload
    def __call__(self) -> LayoutValue: ...
    @overload
    def __call__(self, n: int, /) -> LayoutValue: ...
    @overload
    def __call__(self, dtype: DType) -> LayoutValue: ...
    @overload
    def __call__(self, shape: Shape, vec_size: int) -> LayoutValue: ...
    @overload
    def __call__(self, shape: Shape, dtype: DType, swizzle: int) -> LayoutValue: ...
    @overload
    def __call__(
        self,
        tiling: Tiling,
        warp_dims: Sequence[int | Replicated] | int | Replicated,
        lane_dims: Sequence[int | Replicated] | int | Replicated,
        vector_dim: int,
    ) -> LayoutValue: ...
    def reduce(self, axes: int | Sequence[int]) -> LayoutValue: ...

@dataclass(frozen=True, init=False)
class Replicated:
    times: int
    def __init__(self, times: int) -> None: ...

@dataclass(frozen=True, init=False)
class Tiling:
    tiles: tuple[tuple[int, ...], ...]
    def __init__(self, tiles: Sequence[Sequence[int]]) -> None: ...
    def tile_shape(self, shape: Sequence[int]) -> tuple[int, ...]: ...
    def untile_shape(self, shape: Sequence[int]) -> tuple[int, ...]: ...
    def tile_strides(self, strides: Sequence[int]) -> tuple[int, ...]: ...
    def tile_indices(self, indices: Sequence[int]) -> tuple[int, ...]: ...
    def untile_indices(self, indices: Sequence[int]) -> tuple[int, ...]: ...
    def tile_dimension(self, dim: int) -> tuple[bool, ...]: ...
    def remove_dimension(self, dim: int) -> Tiling: ...
    def canonicalize(self) -> Tiling: ...

class CopyPartition:
    class PARTITIONED:
        axis: int
        def __init__(self, axis: int) -> None: ...

    REPLICATED: ClassVar[object]

class TMEMLayout(enum.Enum):
    SCALES_LAYOUT = "scales"
    SPARSE_METADATA_LAYOUT = "sparse_metadata"
    M64_COLLECTIVE_LAYOUT = "m64_collective"
    SCALES_M64_COLLECTIVE_LAYOUT = "scales_m64_collective"
    def __call__(self, *args: int, **kwargs: int) -> object: ...

@dataclass(frozen=True, init=False)
class RefType:
    transforms: tuple[Transform, ...]
    def __init__(self, transforms: Transforms = ()) -> None: ...

# ---- kernels -------------------------------------------------------------------------------------

class Kernel(Generic[_P, _R_co]):
    """A kernel that can be called: parameters P, result R."""

    @property
    def name(self) -> str: ...
    @property
    def __name__(self) -> str: ...
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...
    def lower(self, *args: object, target: str | None = None) -> Lowered: ...

class Autotuned(Protocol[_R_co]):
    def __call__(self, *args: object, **kwargs: object) -> _R_co: ...
    def tune(self, *args: object, **kwargs: object) -> object: ...

def autotune(
    configs: Iterable[object],
    *,
    key: Callable[..., object] | None = None,
    prune: Callable[..., bool] | None = None,
    check: Callable[..., object] | None = None,
    listener: Callable[[dict[str, object]], object] | None = None,
    timer: Callable[[Callable[[], object]], float] = ...,
    timeout: float = 120.0,
    workers: int = 2,
    rounds: int = 30,
) -> Callable[[Callable[..., _R]], Autotuned[_R]]: ...

@dataclass(frozen=True)
class Estimate:
    kernel: str
    gpu: str
    seconds: float
    bound: str
    parts: dict[str, float]
    flops: float
    read: float
    written: float
    memory: float
    blocks: int
    occupancy: int
    waves: int
    assumed: tuple[str, ...]

def estimate(
    lowered: Lowered,
    *,
    gpu: str = "H200",
    sizes: Mapping[str, int] | None = None,
    values: Mapping[int, npt.ArrayLike] | None = None,
    cold: bool = False,
) -> Estimate: ...

class ExportedKernel:
    __name__: str
    target: str
    def __call__(self, *arrays: object, out: object = None, stream: object = None) -> object: ...

def load_exported(path: str | Path) -> ExportedKernel: ...
def dim(name: str, *, min: int = 1, max: int = 2147483646, multiple_of: int = 1) -> Dim: ...
@overload
def kernel(
    body: Body,
    *,
    out_type: HasShape,
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfOne: ...
@overload
def kernel(
    *,
    out_type: HasShape,
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> Callable[[Body], KernelOfOne]: ...
@overload
def kernel(
    body: Body,
    *,
    out_type: tuple[HasShape, ...],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfTuple: ...
@overload
def kernel(
    *,
    out_type: tuple[HasShape, ...],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> Callable[[Body], KernelOfTuple]: ...
@overload
def kernel(
    body: Body,
    *,
    out_type: list[HasShape] | list[ShapeDtypeStruct],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfList: ...
@overload
def kernel(
    *,
    out_type: list[HasShape] | list[ShapeDtypeStruct],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> Callable[[Body], KernelOfList]: ...
@overload
def kernel(
    body: Body,
    *,
    out_type: Mapping[str, HasShape],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfDict: ...
@overload
def kernel(
    *,
    out_type: Mapping[str, HasShape],
    scratch_types: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> Callable[[Body], KernelOfDict]: ...
@overload
def kernel(
    body: Body,
    out_shape: HasShape,
    *,
    scratch_types: Scratch = (),
    scratch_shapes: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfOne: ...
@overload
def kernel(
    body: Body,
    out_shape: tuple[HasShape, ...],
    *,
    scratch_types: Scratch = (),
    scratch_shapes: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfTuple: ...
@overload
def kernel(
    body: Body,
    out_shape: list[HasShape] | list[ShapeDtypeStruct],
    *,
    scratch_types: Scratch = (),
    scratch_shapes: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfList: ...
@overload
def kernel(
    body: Body,
    out_shape: Mapping[str, HasShape],
    *,
    scratch_types: Scratch = (),
    scratch_shapes: Scratch = (),
    compiler_params: CompilerParams | None = None,
    grid: Shape = (),
    grid_names: str | Sequence[str] = (),
    cluster: Shape = (),
    cluster_names: str | Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    in_shapes: Sequence[Sequence[int | Dim | None] | None] | None = None,
    interpret: Interpret = None,
    debug: bool = False,
    kernel_name: str | None = None,
) -> KernelOfDict: ...

class ArrayInfo(ShapeDtypeStruct):
    """What a function under ``specialize`` sees of an array."""

    device: int | None
    aligned: bool
    element_strides: tuple[int, ...] | None
    def __init__(
        self,
        shape: Shape,
        dtype: DType,
        device: int | None = None,
        aligned: bool = True,
        element_strides: tuple[int, ...] | None = None,
    ) -> None: ...

@overload
def specialize(
    make: Callable[_P, Callable[..., object]], *, in_place: bool = True
) -> Family[_P]: ...
@overload
def specialize(
    make: None = None, *, in_place: bool = True
) -> Callable[[Callable[_P, Callable[..., object]]], Family[_P]]: ...
def clear_caches() -> None: ...
def as_torch_kernel(fn: Callable[_P, _R]) -> Callable[_P, _R]: ...
@overload
def torch_op(
    fn: Callable[_P, _R],
    *,
    name: str | None = None,
    mutates: str | Sequence[str] = (),
    backward: Callable[..., object]
    | tuple[Callable[..., object], Callable[..., object]]
    | None = None,
    fake: Callable[..., object] | None = None,
) -> TorchOperator[_P, _R]: ...
@overload
def torch_op(
    fn: None = None,
    *,
    name: str | None = None,
    mutates: str | Sequence[str] = (),
    backward: Callable[..., object]
    | tuple[Callable[..., object], Callable[..., object]]
    | None = None,
    fake: Callable[..., object] | None = None,
) -> Callable[[Callable[_P, _R]], TorchOperator[_P, _R]]: ...
def vmap(
    f: Callable[_P, _R],
    in_axes: int | None | Sequence[int | None] = 0,
    out_axes: int | Sequence[int] = 0,
) -> Callable[_P, _R]: ...
def sm_count(device: int | None = None) -> int: ...
def new_ref(x: A, *, memory_space: MemorySpace | None = ...) -> MutableArray[A]: ...
def freeze(ref: MutableArray[A]) -> A: ...

# ---- loads, stores, copies -----------------------------------------------------------------------

@overload
def load(
    src: Ref, idx: Index = ..., *, layout: LayoutLike | None = None, optimized: bool = True
) -> Array: ...
@overload
def load(
    src: Ref,
    idx: Index = ...,
    *,
    layout: LayoutLike | None = None,
    mask: _Operand | None = None,
    other: _Operand | None = None,
    cache_modifier: str | None = None,
    eviction_policy: str | None = None,
    volatile: bool = False,
) -> Array: ...
@overload
def store(
    ref: Ref,
    idx: Index,
    val: _Operand,
    *,
    mask: _Operand | None = None,
    eviction_policy: str | None = None,
) -> None: ...
@overload
def store(
    ref: Ref, val: _Operand, *, mask: _Operand | None = None, eviction_policy: str | None = None
) -> None: ...
def dot(
    a: _Operand,
    b: _Operand,
    trans_a: bool = False,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: PrecisionLike | None = None,
) -> Array: ...
def approx_tanh(x: _Operand) -> Array: ...
def max_contiguous(x: Array, values: Sequence[int] | int) -> Array: ...
def atomic_xchg(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
def atomic_cas(
    ref: Ref, idx: Index, cmp: _Operand, val: _Operand, *, mask: _Operand | None = None
) -> Array: ...
def copy_gmem_to_smem(
    src: Ref,
    dst: Ref,
    barrier: Ref | None = None,
    *,
    collective_axes: CollectiveAxes | None = None,
    leader_tracked: object | None = None,
    oob_mode: OOBFillMode | None = None,
    predicate: Condition | None = None,
    engine: Engine | None = None,
) -> None: ...
def copy_smem_to_gmem(
    src: Ref,
    dst: Ref,
    predicate: Condition | None = None,
    *,
    commit_group: bool = True,
    reduction_op: ReductionOp | None = None,
    engine: Engine | None = None,
    evict_first: bool = False,
) -> None: ...
def async_prefetch(
    ref: Ref,
    *,
    collective_axes: CollectiveAxes | None = None,
    leader_tracked: object | None = None,
) -> None: ...
def async_store_smem(
    src: Array,
    ref: Ref,
    barrier: Ref,
    *,
    cluster_idx: Scalar,
    cluster_dim: AxisName,
    optimized: bool = True,
    atomic: str | None = None,
) -> None: ...
def commit_smem() -> None: ...
def commit_smem_to_gmem_group() -> None: ...
def wait_gmem_to_smem(n: int) -> None: ...
def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None: ...
@overload
def atomic_add(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_add(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
@overload
def atomic_and(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_and(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
@overload
def atomic_max(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_max(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
@overload
def atomic_min(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_min(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
@overload
def atomic_or(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_or(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...
@overload
def atomic_xor(ref: Ref, val: _Operand) -> None: ...
@overload
def atomic_xor(ref: Ref, idx: Index, val: _Operand, *, mask: _Operand | None = None) -> Array: ...

# ---- synchronisation -----------------------------------------------------------------------------

def barrier_arrive(barrier: Ref, *, relaxed: bool = False) -> None: ...
def barrier_wait(barrier: Ref, *, phase: Scalar | None = None) -> None: ...
def barrier_test(barrier: Ref) -> Array: ...
def semaphore_signal(
    semaphore: Ref,
    inc: Scalar = 1,
    *,
    device_id: object | None = None,
    memory_scope: Literal["gpu", "sys"] = "sys",
) -> None: ...
def semaphore_wait(
    semaphore: Ref,
    value: Scalar = 1,
    *,
    decrement: bool = True,
    memory_scope: Literal["gpu", "sys"] = "sys",
) -> None: ...

class SemaphoreSignal:
    def __init__(self, ref: Ref, *, device_id: object | None, inc: Scalar = 1) -> None: ...

def semaphore_signal_parallel(*signals: SemaphoreSignal) -> None: ...
def semaphore_signal_multicast(
    semaphore: Ref, value: Scalar = 1, *, collective_axes: CollectiveAxes
) -> None: ...
def griddepcontrol_wait() -> None: ...
def griddepcontrol_launch_dependents() -> None: ...
def set_max_registers(n: int, *, action: Literal["increase", "decrease"]) -> None: ...

# ---- tensor cores --------------------------------------------------------------------------------

def wgmma(acc: Ref, a: Ref | Array, b: Ref) -> None: ...
def wgmma_wait(n: int) -> None: ...
def wgmma_accumulator_load(acc: Ref, *, wait_n: int | None = 0) -> Array: ...
def mma(acc: Array, a: Array, b: Array, /) -> Array: ...

# ---- tensor memory (Blackwell) -------------------------------------------------------------------

def tcgen05_mma(
    acc: Ref,
    a: Ref,
    b: Ref,
    barrier: Ref | None = None,
    *,
    a_scale: Ref | None = None,
    b_scale: Ref | None = None,
    a_sparse_metadata: Ref | None = None,
    accumulate: Condition = True,
    collective_axis: AxisName | None = None,
) -> None: ...
def tcgen05_commit_arrive(barrier: Ref, collective_axis: AxisName | None = None) -> None: ...
def tcgen05_commit(barrier: Ref, collective_axis: AxisName | None = None) -> None: ...
def async_copy_smem_to_tmem(
    smem_ref: Ref, tmem_ref: Ref, collective_axis: AxisName | None = None
) -> None: ...
def async_copy_scales_to_tmem(
    smem_ref: Ref, tmem_ref: Ref, collective_axis: AxisName | None = None
) -> None: ...
def async_copy_sparse_metadata_to_tmem(
    smem_ref: Ref, tmem_ref: Ref, collective_axis: AxisName | None = None
) -> None: ...
@overload
def async_load_tmem(
    src: Ref, *, layout: LayoutLike | None = None, reduce: None = None
) -> Array: ...
@overload
def async_load_tmem(
    src: Ref, *, layout: LayoutLike | None = None, reduce: Literal["max", "min", "absmax", "absmin"]
) -> tuple[Array, Array]: ...
def async_store_tmem(ref: Ref, value: _Operand) -> None: ...
def commit_tmem() -> None: ...
def wait_load_tmem() -> None: ...
def format_tcgen05_sparse_metadata(
    meta: npt.ArrayLike, operand_dtype: DType = ...
) -> npt.NDArray[np.generic]: ...
def try_cluster_cancel(result_ref: Ref, barrier: Ref) -> None: ...
def query_cluster_cancel(
    result_ref: Ref, grid_names: AxisName | tuple[AxisName, ...]
) -> tuple[tuple[Array, ...], Array]: ...
def TryClusterCancelResult(num_buffers: int | None = None) -> MemoryRef: ...
def TryCancelResultRef(num_buffers: int | None = None) -> MemoryRef: ...

TRY_CLUSTER_CANCEL_RESULT: MemoryRef

# ---- arrays and refs -----------------------------------------------------------------------------

def broadcasted_iota(
    dtype: DType, shape: Shape, dimension: int, *, layout: LayoutLike | None = None
) -> Array: ...
def layout_cast(x: _Operand, new_layout: LayoutLike) -> Array: ...
def print_layout(fmt: str, x: Array | Ref) -> None: ...
def cluster_ref(ref: Ref, block_id: Mapping[str, Scalar]) -> Ref: ...
def remote_ref(ref: Ref, device_id: object, device_id_type: pl.DeviceIdType = ...) -> Ref: ...
def multicast_ref(ref: Ref, collective_axes: CollectiveAxes) -> Ref: ...
def multimem_store(source: _Operand, ref: Ref, collective_axes: CollectiveAxes) -> None: ...
def multimem_load_reduce(
    ref: Ref,
    *,
    collective_axes: CollectiveAxes,
    reduction_op: Literal["add", "min", "max", "and", "or", "xor"],
) -> Array: ...

class PeerMemRef(Transform):
    device_id: object
    device_id_type: pl.DeviceIdType
    def __init__(self, device_id: object, device_id_type: pl.DeviceIdType) -> None: ...

def transform_ref(ref: Ref, transform: Transform) -> Ref: ...
def transpose_ref(ref: Ref, permutation: Sequence[int]) -> Ref: ...
def find_swizzle(minor_dim_bits: int, what: str = "") -> int: ...
def warp_map(f: Callable[[Array], None]) -> None: ...

class named_scope(contextlib.AbstractContextManager[None, None]):
    def __init__(self, name: str) -> None: ...
    def __call__(self, f: Callable[_P, _R]) -> Callable[_P, _R]: ...
    def __exit__(self, *exc: object) -> None: ...

def inline_cuda(
    source: str,
    *,
    arg_types: InlineType | Sequence[InlineType | Sequence[InlineType]] = (),
    return_type: ShapeDtypeStruct | Sequence[ShapeDtypeStruct] | None = None,
    interpret: Callable[..., object] | None = None,
) -> Callable[..., Array]: ...

# ---- loops and pipelines -------------------------------------------------------------------------

@dataclass(frozen=True)
class NDLoopInfo:
    index: tuple[Array, ...]
    local_index: Array
    num_local_steps: Array | None

class _Loop(Protocol):
    """Runs the function below it at once; its name is then the last carry."""

    @overload
    def __call__(self, body: Callable[[NDLoopInfo], None]) -> None: ...
    @overload
    def __call__(self, body: Callable[..., _C]) -> _C: ...

def nd_loop(
    grid: Sequence[Scalar],
    *,
    collective_axes: CollectiveAxes,
    tiling: Sequence[int] | None = None,
    init_carry: Tree | None = None,
) -> _Loop: ...
def dynamic_scheduling_loop(
    grid_names: str | Sequence[str],
    thread_axis: str | None = None,
    cluster_axes: CollectiveAxes = (),
    init_carry: Tree | None = None,
) -> _Loop: ...
def planar_snake(
    lin_idx: Scalar, shape: tuple[int, int], minor_dim: int, tile_width: int
) -> tuple[Array, Array]: ...
def emit_pipeline(
    body: Callable[..., Tree | None],
    *,
    grid: Sequence[Scalar],
    in_specs: Specs = (),
    out_specs: Specs = (),
    max_concurrent_steps: int = 1,
    init_carry: _C = ...,
) -> Callable[..., _C]: ...

class PipelinePipeline(enum.IntEnum):
    START = 0
    STEADY = 1
    STOP = 2

def emit_pipeline_warp_specialized(
    body: Callable[..., Tree | None],
    *,
    grid: Sequence[Scalar],
    memory_registers: int,
    in_specs: Specs = (),
    out_specs: Specs = (),
    max_concurrent_steps: int = 2,
    wg_axis: str,
    num_compute_wgs: int,
    pipeline_state: PipelinePipeline | Array | None = None,
    manual_ready_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Callable[[Callable[[Tree], Tree]], None] | None = None,
    memory_thread_idx: int | None = None,
) -> WarpSpecializedPipeline: ...

# ---- older spellings -----------------------------------------------------------------------------

GPUBlockSpec = BlockSpec
GPUCompilerParams = CompilerParams
GPUMemorySpace = MemorySpace
GPUMesh = Mesh
GPUShapeDtypeStruct = ShapeDtypeStruct
TileTransform = TilingTransform
MemoryRefTransform = Transform
ThreadSemantics = LoweringSemantics
wait_barrier = barrier_wait

# ---- several devices -----------------------------------------------------------------------------

class PartitionSpec(tuple[str | tuple[str, ...] | None, ...]):
    def __new__(cls, *parts: str | tuple[str, ...] | None) -> PartitionSpec: ...

class DeviceMesh:
    axis_names: tuple[str, ...]
    devices: tuple[int, ...] | None
    group: object
    memory: str | None
    name: str
    shape: tuple[int, ...]
    def __init__(
        self,
        shape: Shape,
        axis_names: str | Sequence[str],
        *,
        devices: Sequence[int] | None = None,
        group: object = None,
        memory: str | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    def replace(self, **changes: object) -> DeviceMesh: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> DeviceMesh: ...
    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...
    def coordinates(self, number: int) -> dict[str, int]: ...

def symm_empty(
    shape: Shape, dtype: DType, mesh: DeviceMesh, *, multicast: bool = False
) -> object: ...
def spmd(
    kernel: Callable[..., object],
    mesh: DeviceMesh,
    in_specs: PartitionSpec | Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec | None] | None = None,
    *,
    ordered: bool = True,
) -> Callable[..., object]: ...
