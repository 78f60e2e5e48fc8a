import contextlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ._core import Array, Ref
from ._typing import CollectiveAxes, Operand, Scalar

_C = TypeVar("_C")

class SharedScratch:
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    def __init__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> None: ...

class TileScheduler:
    tiles: Ref | None
    ready: Ref | None
    read: Ref | None
    free: Ref | None
    counter: int
    def __init__(
        self,
        tiles: Ref | None = None,
        ready: Ref | None = None,
        read: Ref | None = None,
        free: Ref | None = None,
        *,
        counter: int = 0,
    ) -> None: ...
    @staticmethod
    def scratch(
        readers: int, slots: int = 2, cluster_axes: CollectiveAxes = ()
    ) -> dict[str, object]: ...
    @property
    def slots(self) -> int: ...
    def fetch(self) -> Array: ...
    def broadcast(self, tile: Operand, step: Scalar) -> None: ...
    def receive(self, step: Scalar, *, release: bool = True) -> Array: ...
    def drain(self, steps: Scalar) -> None: ...

class ordered_section(contextlib.AbstractContextManager[None, None]):
    def __init__(self, num_threads: int) -> None: ...
    def __exit__(self, *exc: object) -> None: ...

def format_tcgen05_scales(
    scales: npt.ArrayLike, *, m64_collective: bool = False
) -> npt.NDArray[np.generic]: ...
def warp_where(
    mask: Array,
    on_true: Callable[[], _C],
    on_false: _C,
    *,
    along: int | None = None,
    select: bool = True,
) -> _C: ...
def named_barrier_sync(
    barrier: Operand, num_threads: int | None = None, *, num_warps: int | None = None
) -> None: ...
def named_barrier_arrive(
    barrier: Operand, num_threads: int | None = None, *, num_warps: int | None = None
) -> None: ...
def as_semaphores(ref: Ref) -> Ref: ...
def discard(ref: Ref) -> None: ...
