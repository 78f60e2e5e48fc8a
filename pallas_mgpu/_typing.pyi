"""What the stubs of the public namespaces share. It exists for type checkers only."""

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from . import (
    Barrier,
    ClusterBarrier,
    InterpretParams,
    Kernel,
    Layout,
    MemorySpace,
    RefType,
    RefUnion,
    SemaphoreType,
    ShapeDtypeStruct,
    Transform,
    WGMMAAccumulatorRef,
    pl,
)
from ._core import Array, Ref
from .lax import DotAlgorithmPreset, Precision
from .pl import Slice

_P = ParamSpec("_P")
_R = TypeVar("_R")

class Dim:
    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def multiple(self) -> int: ...
    @property
    def name(self) -> str: ...
    def symbols(self) -> tuple[Dim, ...]: ...
    def value(self, known: Mapping[Dim, int]) -> int: ...
    def __add__(self, other: int | Dim) -> Dim: ...
    def __radd__(self, other: int | Dim) -> Dim: ...
    def __sub__(self, other: int | Dim) -> Dim: ...
    def __rsub__(self, other: int | Dim) -> Dim: ...
    def __mul__(self, other: int | Dim) -> Dim: ...
    def __rmul__(self, other: int | Dim) -> Dim: ...
    def __floordiv__(self, other: int | Dim) -> Dim: ...
    def __rfloordiv__(self, other: int) -> Dim: ...
    def __mod__(self, other: int | Dim) -> Dim: ...
    def __neg__(self) -> Dim: ...
    def __lt__(self, other: int | Dim) -> bool | Array: ...
    def __le__(self, other: int | Dim) -> bool | Array: ...
    def __gt__(self, other: int | Dim) -> bool | Array: ...
    def __ge__(self, other: int | Dim) -> bool | Array: ...

Shape: TypeAlias = int | Dim | Sequence[int | Dim]
Axes: TypeAlias = int | Sequence[int]
DType: TypeAlias = (
    np.dtype[np.generic]
    | type[np.generic]
    | type[bool]
    | type[int]
    | type[float]
    | str
    | ScalarType
)
HostArray: TypeAlias = NDArray[np.generic]

# a value that is the same in all lanes: a Python number or a traced array of rank 0
Number: TypeAlias = bool | int | float | np.generic
Scalar: TypeAlias = Number | Array
Operand: TypeAlias = Number | Array | Ref | HostArray
Condition: TypeAlias = bool | np.bool_ | Array

Index1: TypeAlias = int | np.integer | slice | Slice | Array | HostArray | EllipsisType | None
Index: TypeAlias = Index1 | tuple[Index1, ...]
AxisName: TypeAlias = str | tuple[str, ...]

# values that loops carry and branches return: pytrees of arrays and numbers
Tree: TypeAlias = (
    Number
    | Array
    | Ref
    | tuple["Tree | None", ...]
    | list["Tree | None"]
    | Mapping[str, "Tree | None"]
)

class HasShape(Protocol):
    """Anything with a shape and a dtype: arrays of every library, ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...

# the arrays that a kernel takes; results are of the same kind
A = TypeVar("A", bound=HasShape)
Nested: TypeAlias = (
    A | Number | None | tuple["Nested[A]", ...] | list["Nested[A]"] | dict[str, "Nested[A]"]
)
Body: TypeAlias = Callable[..., None]

# ---- descriptors

Transforms: TypeAlias = Transform | Sequence[Transform]

class MemoryRef:
    """What is allocated in a scope or as scratch: ``plgpu.SMEM((64, 64), jnp.float16)``."""

    @property
    def inner_aval(self) -> ShapeDtypeStruct: ...
    @property
    def memory_space(self) -> MemorySpace: ...
    @property
    def transforms(self) -> tuple[Transform, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...

class Semaphores:
    @property
    def shape(self) -> tuple[int, ...]: ...

Descriptor: TypeAlias = (
    MemoryRef
    | WGMMAAccumulatorRef
    | Barrier
    | ClusterBarrier
    | SemaphoreType
    | Semaphores
    | RefUnion
)
Descriptors: TypeAlias = Descriptor | None | Sequence["Descriptors"] | Mapping[str, "Descriptors"]
Scratch: TypeAlias = Sequence[Descriptor] | Mapping[str, Descriptor]
IndexMap: TypeAlias = Callable[..., Scalar | tuple[Scalar, ...]]
CollectiveAxes: TypeAlias = AxisName | tuple[AxisName, ...]
DimensionSemantics: TypeAlias = Literal["parallel", "arbitrary", "sequential"]

class LayoutValue:
    """A register layout with its arguments."""

    def reduce(self, axes: int | Sequence[int]) -> LayoutValue: ...

LayoutLike: TypeAlias = Layout | LayoutValue

class _CudaStream(Protocol):
    """cuda.core's streams and others of the protocol."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...

Stream: TypeAlias = int | _CudaStream | _TorchStream | _CupyStream

# Results are arrays of the caller's own kind: NumPy arrays for NumPy arrays (of the dtype that
# out_type says, which types do not express), tensors for tensors.
class KernelOfOne(Kernel[..., np.ndarray]):
    @overload
    def __call__(
        self,
        *args: Nested[np.ndarray],
        out: np.ndarray | None = None,
        stream: Stream | None = None,
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self, *args: A | Number | None, out: A | None = None, stream: Stream | None = None
    ) -> A: ...
    @overload
    def __call__(
        self, *args: Nested[A], out: A | None = None, stream: Stream | None = None
    ) -> A: ...

class KernelOfTuple(Kernel[..., tuple[np.ndarray, ...]]):
    @overload
    def __call__(
        self,
        *args: Nested[np.ndarray],
        out: Sequence[np.ndarray] | None = None,
        stream: Stream | None = None,
    ) -> tuple[np.ndarray, ...]: ...
    @overload
    def __call__(
        self,
        *args: A | Number | None,
        out: Sequence[A] | None = None,
        stream: Stream | None = None,
    ) -> tuple[A, ...]: ...
    @overload
    def __call__(
        self, *args: Nested[A], out: Sequence[A] | None = None, stream: Stream | None = None
    ) -> tuple[A, ...]: ...

class KernelOfList(Kernel[..., list[np.ndarray]]):
    @overload
    def __call__(
        self,
        *args: Nested[np.ndarray],
        out: Sequence[np.ndarray] | None = None,
        stream: Stream | None = None,
    ) -> list[np.ndarray]: ...
    @overload
    def __call__(
        self,
        *args: A | Number | None,
        out: Sequence[A] | None = None,
        stream: Stream | None = None,
    ) -> list[A]: ...
    @overload
    def __call__(
        self, *args: Nested[A], out: Sequence[A] | None = None, stream: Stream | None = None
    ) -> list[A]: ...

class KernelOfDict(Kernel[..., dict[str, np.ndarray]]):
    @overload
    def __call__(
        self,
        *args: Nested[np.ndarray],
        out: Mapping[str, np.ndarray] | None = None,
        stream: Stream | None = None,
    ) -> dict[str, np.ndarray]: ...
    @overload
    def __call__(
        self,
        *args: A | Number | None,
        out: Mapping[str, A] | None = None,
        stream: Stream | None = None,
    ) -> dict[str, A]: ...
    @overload
    def __call__(
        self, *args: Nested[A], out: Mapping[str, A] | None = None, stream: Stream | None = None
    ) -> dict[str, A]: ...

Interpret: TypeAlias = bool | Literal["emulate"] | InterpretParams | None

class TorchOperator(Generic[_P, _R]):
    """A function of tensors that is an operator of PyTorch, ``op``."""

    op: Callable[..., object]
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

class Family(Generic[_P]):
    """A function of arrays that finds its kernel by their types."""

    @overload
    def __call__(
        self,
        *args: np.ndarray | None,
        out: np.ndarray | None = None,
        stream: Stream | None = None,
        **kwargs: object,
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        *args: A | None,
        out: A | None = None,
        stream: Stream | None = None,
        **kwargs: object,
    ) -> A: ...
    def kernel(self, *args: HasShape, **kwargs: object) -> Callable[..., object]: ...

class MutableArray(Generic[A]):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def ndim(self) -> int: ...
    def __getitem__(self, index: Index) -> A: ...
    def __setitem__(self, index: Index, value: A | Scalar) -> None: ...

Engine: TypeAlias = Literal["tma", "bulk", "plain"]
ReductionOp: TypeAlias = Literal["add", "min", "max", "inc", "dec", "and", "or", "xor"]
InlineType: TypeAlias = LayoutLike | RefType
Specs: TypeAlias = pl.BlockSpec | None | Sequence["Specs"] | Mapping[str, "Specs"]

class WarpSpecializedPipeline(Protocol):
    def __call__(self, *gmem_refs: Ref, allocations: object | None = None) -> None: ...
    def get_allocations(self, *gmem_refs: Ref) -> Descriptors: ...

_OnePrecision: TypeAlias = Precision | DotAlgorithmPreset | str
PrecisionLike: TypeAlias = _OnePrecision | tuple[_OnePrecision, _OnePrecision]
_Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
DotDimensionNumbers: TypeAlias = tuple[_Pair, _Pair]

class ScalarType:
    """A dtype that converts when called: ``jnp.float32(3)``, ``jnp.bfloat16(array)``."""

    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def name(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    @overload
    def __call__(self, x: Array | Ref) -> Array: ...
    @overload
    def __call__(self, x: Number) -> np.generic: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

Activation: TypeAlias = str | Callable[[Array], Array]
PairMask: TypeAlias = Callable[..., Array]  # of (batch entry, head, query, key[, data])

class ArrayIndexer:
    def __getitem__(self, index: Index, /) -> ArrayUpdate: ...

class ArrayUpdate:
    def get(self) -> Array: ...
    def set(self, values: Operand) -> Array: ...
    def add(self, values: Operand) -> Array: ...
    def subtract(self, values: Operand) -> Array: ...
    def multiply(self, values: Operand) -> Array: ...
    def divide(self, values: Operand) -> Array: ...
    def min(self, values: Operand) -> Array: ...
    def max(self, values: Operand) -> Array: ...
