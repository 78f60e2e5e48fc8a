"""Loops that distribute work over programs."""

import dataclasses
import functools
from typing import Any

from . import _core
from ._control import fori_loop, scoped, when, while_loop
from ._names import show
from ._ops import axis_index, axis_size, barrier_arrive, barrier_wait
from ._trace import Ref, env, type_text
from ._types import SMEM, Barrier, ClusterBarrier, axis_names

_MOST_POINTS = 1 << 30  # of a dynamically scheduled grid, so that counters do not overflow


def next_tile(counter=0):
    """Read and increment a counter of the launch: 0, 1, 2 ..., an int32 scalar that no other call
    gets (Hopper).

    ``counter``: which atomic counter of the launch, 0 to 31. Counters start at 0. One thread of a
    block makes the call and broadcasts the result, for example with :func:`hand_tile`. A call after
    the last tile was assigned returns a larger number. Dynamic loops
    (:func:`dynamic_scheduling_loop`) use the first counters, one each. NotImplementedError under
    ``vmap``.
    """
    not_batched("next_tile")
    return _core.next_tile(counter)


def hand_tile(tile, k, tiles, ready, read, free=None):
    """Broadcast a tile index to all blocks of a cluster: the ``tile`` of its first block (Hopper).

    For custom schedules with :func:`next_tile`. The last thread of each block calls it for step
    ``k`` = 0, 1, 2 ..., an int32 scalar, with n slots:

    tiles: ``SMEM((n,), int32)``. Slot ``k % n`` of every block receives the index.
    ready: ``Barrier(num_barriers=n)``. The barrier of the slot completes when it is there.
    read: ``Barrier(num_arrivals=readers, num_barriers=n)``. Each reader waits on ``ready``, reads
        the slot and arrives here; the call n steps later waits for these arrivals. The last thread
        may read the slot itself, without an arrival.
    free: ``ClusterBarrier(collective_axes=(axes,), num_barriers=n)`` of all axes of the cluster, if
        it has more than one block.

    ValueError for arguments of other shapes, or without ``free`` in a cluster.
    """
    what = "hand_tile"

    def shown(x):
        return type_text(x) if isinstance(x, Ref) else show(x)

    if not isinstance(tiles, Ref) or tiles.ndim != 1:
        raise ValueError(f"{what}: tiles must be a ref of one dim in SMEM, got {shown(tiles)}")
    ahead = tiles.shape[0]
    given = {"ready": ready, "read": read, "free": free}
    in_cluster = any(f == "cluster" and size > 1 for f, _, size in env(what).axes.values())
    if not in_cluster:
        del given["free"]
    for name, x in given.items():
        if not isinstance(x, Ref) or x.dtype != "barrier" or x.shape != (ahead,):
            raise ValueError(
                f"{what}: {name} must be {ahead} barriers, one for each slot of tiles; got"
                f" {shown(x)}"
            )
    slot = k % ahead

    @when(k >= ahead)
    def _():
        barrier_wait(read.at[slot])
        if in_cluster:
            _core.effect("barrier_arrive", (free.at[slot],), relaxed=2)
            barrier_wait(free.at[slot])

    _core.effect("hand_tile", (tile, tiles.at[slot], ready.at[slot]))


def not_batched(what):
    """NotImplementedError under vmap: all elements of a batch share the counters of the launch."""
    if env(what).leading:
        raise NotImplementedError(
            f"{what} is not supported under plgpu.vmap, whose elements share a launch and its"
            " counters; give the kernel a batch axis of its own, or call it once per element"
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NDLoopInfo:
    """What a scheduled body receives. ``index``: the grid point, a tuple of int32 scalars.
    ``local_index``: the iteration of this program. ``num_local_steps``: the number of its
    iterations, None if unknown."""

    index: tuple
    local_index: Any
    num_local_steps: Any


def unravel(flat, grid):
    """The row-major indices of ``flat``; the last axis is the fastest."""
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
    """Decorator: run a body over ``grid``, distributed over the programs along ``collective_axes``.

    Program r of S executes the flat indices r, r + S, r + 2 S and so on. The body is
    ``body(info)``, or ``body(info, carry=carry) -> carry`` with ``init_carry``; the decorated name
    becomes the final carry. ``info`` is an :class:`NDLoopInfo`. ``grid``: ints or int32 scalars.
    ``tiling``: iterate tile by tile; ValueError if it does not divide the grid.
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


def _checked_axes(what, e, grid_names, thread_axis, cluster_axes):
    """(names, {grid axis: size}, cluster axes of more than one block, number of points). ValueError
    if an axis is missing."""
    names = axis_names(grid_names)
    sizes = {n: size for n, (family, _, size) in e.axes.items() if family == "grid"}
    for n in names:
        if n not in sizes:
            raise ValueError(f"{what}: {show(n)} is not a grid axis; those are {list(sizes)}")
    left = [n for n, size in sizes.items() if size > 1 and n not in names]
    if left or len(set(names)) < len(names):
        raise ValueError(
            f"{what}: grid_names must name all axes of the grid once, {list(sizes)}; got {names}"
        )
    if thread_axis != e.thread_name:
        raise ValueError(
            f"{what}: thread_axis must be {e.thread_name!r}, as in the kernel; got"
            f" {show(thread_axis)}"
        )
    clusters = {n: size for n, (family, _, size) in e.axes.items() if family == "cluster"}
    given = axis_names(cluster_axes)
    wide = [n for n, size in clusters.items() if size > 1]
    if any(n not in clusters for n in given) or any(n not in given for n in wide):
        raise ValueError(
            f"{what}: cluster_axes must name all axes of the cluster, {list(clusters)}; got {given}"
        )
    total = 1
    for size in sizes.values():
        total *= size
    if total >= _MOST_POINTS:
        raise ValueError(f"{what}: at most {_MOST_POINTS} points are handed out, got {total}")
    return names, sizes, wide, total


def _tile_loop(body, point, total, rounds, init_carry, work):
    """Iterate until no tile is left. ``work(body of one step, its index)`` returns the next tile.
    Returns (the next tile, the number of steps, the carry)."""

    def step(carry):
        tile, k, value = carry
        result = []

        def run():
            info = NDLoopInfo(point(tile), k, None)
            if init_carry is None:
                body(info)
            else:
                result.append(body(info, carry=value))

        following = work(run, k)
        return following, k + 1, *(result or [value])

    zero, first = _core.as_array(0, "int32"), _core.first_tile()
    if rounds is None:
        return while_loop(lambda c: c[0] < total, step, (first, zero, init_carry))
    # Numbers continue from the previous round: a cluster keeps a number of a later round.
    base = rounds.base
    start = (rounds.ahead + first, zero, init_carry)
    tile, steps, value = while_loop(lambda c: c[0] - base < total, step, start)
    rounds.write(base + total, tile - first)
    return tile, steps, value


def dynamic_scheduling_loop(grid_names, thread_axis=None, cluster_axes=(), init_carry=None):
    """Decorator: run a body once for every point of the kernel's grid, assigned to clusters
    dynamically (Hopper).

    The launch has as many clusters as are resident at once. Each executes the grid point it started
    with, then repeatedly takes the next unassigned point in row-major order. The next point is
    fetched while the body runs. The body is ``body(info)``, or ``body(info, carry=carry) -> carry``
    with ``init_carry``; the decorated name becomes the final carry. ``info.index`` is the point
    along ``grid_names``; ``info.num_local_steps`` is None.

    All threads of a block, and all blocks of a cluster, execute the loop and get the same points.
    ``thread_axis`` names the thread axis, ``cluster_axes`` all axes of the cluster. The last thread
    takes the points, so warp-specialised code should issue its copies there.

    If the kernel calls ``lax.axis_index`` for a grid axis, the launch has all points, and each
    cluster executes one. Inside another loop, each execution is a round over all points. All
    clusters must execute the same number of rounds; a cluster that has finished a round continues
    with the next, so rounds overlap. ValueError for missing axes, NotImplementedError under
    ``vmap``.
    """
    what = "dynamic_scheduling_loop"
    e = env(what)
    not_batched(what)
    names, sizes, wide, total = _checked_axes(what, e, grid_names, thread_axis, cluster_axes)
    rounds = e.rounds if _core.in_loop() else None
    counter = e.counters if rounds is None or rounds.counter is None else rounds.counter
    e.counters += counter == e.counters
    if rounds is not None:
        rounds.counter = counter

    def point(tile):
        """The grid point, clamped so that its range is known."""
        tile = tile if rounds is None else tile - rounds.base
        tile = _core.binary("min", _core.binary("max", tile, 0), total - 1)
        of = dict(zip(sizes, unravel(tile, tuple(sizes.values()))))
        return tuple(of[n] for n in names)

    def wrap(body):
        loop = functools.partial(_tile_loop, body, point, total, rounds, init_carry)

        def take():
            if rounds is None:
                return _core.take_tile(counter)
            return _core.take_tile(counter, rounds.base + total + _core.first_tile())

        if e.n_threads == 1 and not wide:

            def alone(run, _):
                taken = take()
                run()
                return _core.share_tile(taken)

            return loop(alone)[2]

        def together(tiles, ready, read, free):
            # The tile of step k + 1 is passed in slot k % 2.
            last = axis_index(thread_axis) == e.n_threads - 1 if thread_axis else True

            def work(run, k):
                taken = take()
                run()
                when(last)(lambda: hand_tile(taken, k, tiles, ready, read, free))
                slot = k % 2
                barrier_wait(ready.at[slot])
                following = tiles[slot]
                barrier_arrive(read.at[slot])
                return following

            _, steps, value = loop(work)

            @when(last if rounds is None else (steps > 0) & last)
            def _():  # wait for every arrival
                barrier_wait(read.at[(steps - 1) % 2])
                when(steps > 1)(lambda: barrier_wait(read.at[steps % 2]))
                if rounds is not None and wide:  # also in other blocks, before the next round
                    _core.effect("barrier_arrive", (free.at[0],), relaxed=2)
                    barrier_wait(free.at[0])

            return value

        types = [
            SMEM((2,), "int32"),
            Barrier(num_barriers=2),
            Barrier(num_arrivals=e.n_threads, num_barriers=2),
            ClusterBarrier(collective_axes=(tuple(wide),), num_barriers=2) if wide else None,
        ]
        names_of = ("next_tile", "next_tile_ready", "next_tile_read", "next_tile_free")
        return scoped(together, types, {}, names_of, thread_axis or ())

    return wrap
