"""Loops that hand work to programs."""

from . import _core
from ._control import fori_loop
from ._ops import axis_index, axis_size


def next_tile(counter=0):
    """0, 1, 2 ...: an int32 scalar that no other call of this launch gets (Hopper).

    An atomic counter of the launch (``counter`` is its number, 0 to 31) that starts at 0. One
    thread of a block asks and tells the others; whoever asks after the last tile was given away
    sees a number beyond it.
    """
    return _core.next_tile(counter)


class NDLoopInfo:
    """What a scheduled body is told: ``index``, a tuple of int32 scalars; ``local_index``, which
    iteration of this program; ``num_local_steps``, how many it does (None where not known)."""

    __slots__ = ("index", "local_index", "num_local_steps")

    def __init__(self, index, local_index, num_local_steps):
        self.index, self.local_index, self.num_local_steps = index, local_index, num_local_steps

    def __repr__(self):
        return f"NDLoopInfo(index={self.index}, local_index={self.local_index})"


def unravel(flat, grid):
    """Row-major indices of ``flat``; the last axis is fastest."""
    if not grid:
        return ()
    out = []
    for g in reversed(grid[1:]):
        out.append(flat % g)
        flat = flat // g
    return (flat, *reversed(out))


def _tiled(flat, grid, tiling):
    """Indices tile by tile: row-major over (grid / tiling, tiling)."""
    if tiling is None:
        return unravel(flat, grid)
    parts = unravel(flat, (*(g // t for g, t in zip(grid, tiling)), *tiling))
    n = len(grid)
    return tuple(a * t + b for a, b, t in zip(parts[:n], parts[n:], tiling))


def nd_loop(grid, *, collective_axes, tiling=None, init_carry=None):
    """Decorator: run a body over ``grid``, shared among the programs of ``collective_axes``.

    Program r of S does the flat indices r, r + S, r + 2 S ... ``body(info)``, or
    ``body(info, carry=carry) -> carry`` with ``init_carry``; the decorated name is the last carry.
    ``grid``: ints or int32 scalars. ``tiling``: iterate tile by tile. ValueError where it does not
    divide.
    """
    grid = tuple(grid)
    if tiling is not None:
        if len(tiling) != len(grid):
            raise ValueError(f"nd_loop: tiling {tiling} and grid {grid} differ in length")
        for g, t in zip(grid, tiling):
            if isinstance(g, int) and g % t:
                raise ValueError(f"nd_loop: tiling {tiling} does not divide the grid {grid}")

    def wrap(body):
        programs, rank = axis_size(collective_axes), axis_index(collective_axes)
        total = 1
        for g in grid:
            total = total * g
        rest = total % programs
        steps = total // programs
        if not (isinstance(rest, int) and rest == 0):
            steps = steps + _core.convert(_core.binary("lt", rank, rest), "int32")
        steps = _core.as_array(steps, "int32")

        def step(w, carry):
            info = NDLoopInfo(_tiled(w * programs + rank, grid, tiling), w, steps)
            if init_carry is None:
                body(info)
                return None
            return body(info, carry=carry)

        return fori_loop(0, steps, step, init_carry)

    return wrap
