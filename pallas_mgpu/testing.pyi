from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

R = TypeVar("R")

def check(
    kernel: Callable[..., R],
    *args: Any,
    ref: Any = None,
    seeds: int | Sequence[int] = 20,
    backends: str | Sequence[str] = "interpret",
    rtol: float | None = None,
    atol: float | None = None,
) -> R: ...

class Timing:
    samples: tuple[float, ...]
    def __init__(self, samples: tuple[float, ...]) -> None: ...
    @property
    def median(self) -> float: ...
    @property
    def quartiles(self) -> tuple[float, float]: ...
    def interval(self, confidence: float = 0.95) -> tuple[float, float]: ...
    def ratio(self, other: Timing, confidence: float = 0.95) -> tuple[float, float, float]: ...

class _Timer(Protocol):
    def calls(self, f: Callable[[], Any], count: int, lead: int = 0) -> float: ...
    def wall(self, f: Callable[[], Any], count: int) -> float: ...
    def submission(self, f: Callable[[], Any], count: int) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def pause(self, seconds: float) -> None: ...
    def captured(self, f: Callable[[], Any], count: int) -> Callable[[], Any]: ...

_Contestant = Callable[[], Any] | Sequence[Callable[[], Any]]

@overload
def do_bench(
    contestants: Mapping[str, _Contestant],
    *,
    ways: str | Sequence[str] = ...,
    rounds: int | None = None,
    graphs: bool = False,
    timer: _Timer | None = None,
) -> dict[str, dict[str, Timing]]: ...
@overload
def do_bench(
    contestants: _Contestant,
    *,
    ways: str | Sequence[str] = ...,
    rounds: int | None = None,
    graphs: bool = False,
    timer: _Timer | None = None,
) -> dict[str, Timing]: ...
def rotated(
    f: Callable[..., Any], *args: Any, nbytes: int = 268435456
) -> list[Callable[[], Any]]: ...
