import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, overload

from . import CompilerParams as _CompilerParams
from . import MemorySpace as _GPUMemorySpace
from . import Mesh, ShapeDtypeStruct, WarpMesh
from . import SemaphoreType as _SemaphoreType
from . import named_scope as named_scope
from ._core import Array, Ref
from ._typing import (
    Body,
    CollectiveAxes,
    Condition,
    Descriptors,
    DType,
    HasShape,
    Index,
    IndexMap,
    Interpret,
    KernelOfDict,
    KernelOfList,
    KernelOfOne,
    KernelOfTuple,
    Operand,
    PrecisionLike,
    Scalar,
    Scratch,
    Semaphores,
    Shape,
    Tree,
)
from ._typing import (
    MemoryRef as MemoryRef,
)

_C = TypeVar("_C")
_R = TypeVar("_R")
_T = TypeVar("_T")
_N = TypeVar("_N", int, Array)

# ---- slices and numbers --------------------------------------------------------------------------

class Slice:
    """``size`` elements from ``start``, every ``stride``-th."""

    start: Scalar
    size: int
    stride: int
    def __init__(self, start: Scalar, size: int, stride: int = 1) -> None: ...
    @property
    def is_dynamic_start(self) -> bool: ...
    @property
    def is_dynamic_size(self) -> bool: ...
    @classmethod
    def from_slice(cls, slc: slice, size: int) -> Slice: ...

@overload
def ds(start: None) -> slice: ...
@overload
def ds(start: int) -> Slice: ...
@overload
def ds(start: Scalar | None, size: int, stride: int | None = None) -> Slice: ...

dslice = ds

@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: Array, b: Scalar) -> Array: ...
@overload
def cdiv(a: int, b: Array) -> Array: ...
@overload
def align_to(a: int, alignment: int) -> int: ...
@overload
def align_to(a: Array, alignment: int) -> Array: ...
def next_power_of_2(x: int) -> int: ...
def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]: ...
def multiple_of(x: Scalar, values: int | Sequence[int]) -> Array: ...

# ---- specs ---------------------------------------------------------------------------------------

@dataclass(frozen=True, init=False)
class Blocked:
    block_size: int
    def __init__(self, block_size: int) -> None: ...

@dataclass(frozen=True, init=False)
class Element:
    block_size: int
    padding: tuple[int, int]
    def __init__(self, block_size: int, padding: tuple[int, int] = (0, 0)) -> None: ...

@dataclass(frozen=True)
class Squeezed: ...

squeezed: Squeezed
BlockDim: TypeAlias = int | Blocked | Element | Squeezed

class RevisitMode(enum.Enum):
    IMMEDIATE = "immediate"
    ANY = "any"

@dataclass(frozen=True, init=False)
class Buffered:
    buffer_count: int
    use_lookahead: bool
    revisit: RevisitMode | None
    def __init__(
        self, buffer_count: int, use_lookahead: bool = False, revisit: RevisitMode | None = None
    ) -> None: ...

class MemorySpace(enum.Enum):
    ANY = "any"
    DEFAULT = "default"
    ERROR = "error"
    INDEX = "index"
    KEY = "key"
    def __call__(self, shape: Shape, dtype: DType) -> MemoryRef: ...

ANY = MemorySpace.ANY

class BlockSpec:
    block_shape: tuple[BlockDim | None, ...] | None
    index_map: Callable[..., tuple[Scalar, ...]] | None
    pipeline_mode: Buffered | None
    memory_space: _GPUMemorySpace | MemorySpace | None
    def __init__(
        self,
        block_shape: Sequence[BlockDim | None] | None = None,
        index_map: IndexMap | None = None,
        pipeline_mode: Buffered | None = None,
        *,
        memory_space: _GPUMemorySpace | MemorySpace | None = None,
    ) -> None: ...
    def replace(self, **changes: object) -> BlockSpec: ...

class _NoBlockSpec: ...

no_block_spec: _NoBlockSpec
_Specs: TypeAlias = BlockSpec | _NoBlockSpec | None | Sequence["_Specs"] | Mapping[str, "_Specs"]
_Grid: TypeAlias = int | Sequence[int | tuple[str, int]]

class GridSpec:
    grid: _Grid
    in_specs: _Specs
    out_specs: _Specs
    scratch_shapes: Scratch
    def __init__(
        self,
        grid: _Grid = (),
        in_specs: _Specs = ...,
        out_specs: _Specs = ...,
        scratch_shapes: Scratch = (),
    ) -> None: ...

class CompilerParams(Protocol): ...

@dataclass(frozen=True)
class CostEstimate:
    flops: int
    transcendentals: int
    bytes_accessed: int
    remote_bytes_transferred: int = 0
    def to_json(self) -> bytes: ...

# ---- kernels -------------------------------------------------------------------------------------

@overload
def pallas_call(
    kernel: Body,
    out_shape: HasShape,
    *,
    grid_spec: GridSpec | None = None,
    grid: _Grid = (),
    in_specs: _Specs = ...,
    out_specs: _Specs = ...,
    scratch_shapes: Scratch = (),
    input_output_aliases: Mapping[int, int] = ...,
    debug: bool = False,
    interpret: Interpret = False,
    name: str | None = None,
    compiler_params: _CompilerParams | CompilerParams | None = None,
    cost_estimate: CostEstimate | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfOne: ...
@overload
def pallas_call(
    kernel: Body,
    out_shape: tuple[HasShape, ...],
    *,
    grid_spec: GridSpec | None = None,
    grid: _Grid = (),
    in_specs: _Specs = ...,
    out_specs: _Specs = ...,
    scratch_shapes: Scratch = (),
    input_output_aliases: Mapping[int, int] = ...,
    debug: bool = False,
    interpret: Interpret = False,
    name: str | None = None,
    compiler_params: _CompilerParams | CompilerParams | None = None,
    cost_estimate: CostEstimate | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfTuple: ...
@overload
def pallas_call(
    kernel: Body,
    out_shape: list[HasShape] | list[ShapeDtypeStruct],
    *,
    grid_spec: GridSpec | None = None,
    grid: _Grid = (),
    in_specs: _Specs = ...,
    out_specs: _Specs = ...,
    scratch_shapes: Scratch = (),
    input_output_aliases: Mapping[int, int] = ...,
    debug: bool = False,
    interpret: Interpret = False,
    name: str | None = None,
    compiler_params: _CompilerParams | CompilerParams | None = None,
    cost_estimate: CostEstimate | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfTuple: ...
@overload
def pallas_call(
    kernel: Body,
    out_shape: Mapping[str, HasShape],
    *,
    grid_spec: GridSpec | None = None,
    grid: _Grid = (),
    in_specs: _Specs = ...,
    out_specs: _Specs = ...,
    scratch_shapes: Scratch = (),
    input_output_aliases: Mapping[int, int] = ...,
    debug: bool = False,
    interpret: Interpret = False,
    name: str | None = None,
    compiler_params: _CompilerParams | CompilerParams | None = None,
    cost_estimate: CostEstimate | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfDict: ...
@overload
def kernel(
    body: Body,
    out_type: HasShape,
    *,
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfOne: ...
@overload
def kernel(
    *,
    out_type: HasShape,
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Callable[[Body], KernelOfOne]: ...
@overload
def kernel(
    body: Body,
    out_type: tuple[HasShape, ...],
    *,
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfTuple: ...
@overload
def kernel(
    *,
    out_type: tuple[HasShape, ...],
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Callable[[Body], KernelOfTuple]: ...
@overload
def kernel(
    body: Body,
    out_type: list[HasShape] | list[ShapeDtypeStruct],
    *,
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfList: ...
@overload
def kernel(
    *,
    out_type: list[HasShape] | list[ShapeDtypeStruct],
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Callable[[Body], KernelOfList]: ...
@overload
def kernel(
    body: Body,
    out_type: Mapping[str, HasShape],
    *,
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> KernelOfDict: ...
@overload
def kernel(
    *,
    out_type: Mapping[str, HasShape],
    mesh: Mesh,
    scratch_types: Scratch = (),
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Callable[[Body], KernelOfDict]: ...
def core_map(
    mesh: Mesh | WarpMesh,
    *,
    compiler_params: _CompilerParams | None = None,
    interpret: Interpret = False,
    debug: bool = False,
    cost_estimate: CostEstimate | None = None,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    scratch_shapes: Scratch = (),
) -> Callable[[Body], None]: ...
def program_id(axis: int) -> Array: ...
def num_programs(axis: int) -> int: ...

# ---- scopes and control flow ---------------------------------------------------------------------

def run_scoped(
    f: Callable[..., _R],
    *types: Descriptors,
    collective_axes: CollectiveAxes = (),
    **kw_types: Descriptors,
) -> _R: ...
def with_scoped(
    *types: Descriptors, collective_axes: CollectiveAxes = (), **kw_types: Descriptors
) -> Callable[[Callable[..., _R]], _R]: ...
@overload
def run_state(f: Callable[..., None]) -> Callable[[_T], _T]: ...
@overload
def run_state(f: Callable[..., _R]) -> Callable[[object], _R]: ...
def when(condition: Condition) -> Callable[[Callable[[], None]], None]: ...

class _Loop(Protocol):
    @overload
    def __call__(self, body: Callable[[Array], None]) -> None: ...
    @overload
    def __call__(self, body: Callable[[Array, _C], _C]) -> _C: ...
    @overload
    def __call__(self, body: Callable[[Array, _C], Tree]) -> _C: ...

def loop(
    lower: Scalar,
    upper: Scalar,
    *,
    init_carry: Tree | None = None,
    step: Scalar = 1,
    unroll: int | bool | None = None,
) -> _Loop: ...

# ---- loads, stores, atomics ----------------------------------------------------------------------

def load(
    ref: Ref,
    idx: Index = ...,
    *,
    mask: Operand | None = None,
    other: Operand | None = None,
    cache_modifier: str | None = None,
    eviction_policy: str | None = None,
    volatile: bool = False,
) -> Array: ...
@overload
def store(
    ref: Ref,
    idx: Index,
    val: Operand,
    *,
    mask: Operand | None = None,
    eviction_policy: str | None = None,
) -> None: ...
@overload
def store(
    ref: Ref, val: Operand, *, mask: Operand | None = None, eviction_policy: str | None = None
) -> None: ...
def swap(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_add(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_and(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_max(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_min(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_or(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_xor(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_xchg(ref: Ref, idx: Index, val: Operand, *, mask: Operand | None = None) -> Array: ...
def atomic_cas(
    ref: Ref, idx: Index, cmp: Operand, val: Operand, *, mask: Operand | None = None
) -> Array: ...

# ---- arrays --------------------------------------------------------------------------------------

def broadcast_to(a: Operand, shape: Shape) -> Array: ...
def dot(
    a: Operand,
    b: Operand,
    trans_a: bool = False,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: PrecisionLike | None = None,
) -> Array: ...
def reciprocal(x: Operand, *, approx: bool = False, full_range: bool = False) -> Array: ...
def empty(shape: Shape, dtype: DType, *, out_sharding: None = None) -> Array: ...
def empty_like(x: HasShape) -> Array: ...
def empty_ref_like(x: HasShape) -> MemoryRef: ...

# ---- semaphores ----------------------------------------------------------------------------------

class semaphore: ...

class DeviceIdType(enum.Enum):
    MESH = "mesh"
    LOGICAL = "logical"

def get_global(what: _SemaphoreType | Semaphores) -> Ref: ...
def semaphore_read(sem_or_view: Ref) -> Array: ...
def semaphore_signal(
    sem_or_view: Ref,
    inc: Scalar = 1,
    *,
    device_id: object | None = None,
    device_id_type: DeviceIdType = ...,
    core_index: int | None = None,
) -> None: ...
def semaphore_wait(sem_or_view: Ref, value: Scalar = 1, *, decrement: bool = True) -> None: ...

# ---- debugging -----------------------------------------------------------------------------------

def debug_print(fmt: str, *args: Operand, label: bool = ...) -> None: ...
def debug_check(condition: Condition, message: str) -> None: ...
def delay(nanos: Scalar) -> None: ...

class _Flag:
    value: bool
    def __call__(self, on: bool) -> contextlib.AbstractContextManager[object]: ...

enable_debug_checks: _Flag
enable_poison_buffers: _Flag
