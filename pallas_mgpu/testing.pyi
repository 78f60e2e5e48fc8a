from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
