from ._typing import Operand

def named_barrier_sync(
    barrier: Operand, num_threads: int | None = None, *, num_warps: int | None = None
) -> None: ...
def named_barrier_arrive(
    barrier: Operand, num_threads: int | None = None, *, num_warps: int | None = None
) -> None: ...
