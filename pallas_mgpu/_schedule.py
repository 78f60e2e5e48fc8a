"""Loops that hand work to programs."""

import dataclasses
import functools
from typing import Any

from . import _core
from ._control import fori_loop, scoped, when, while_loop
from ._names import show
from ._ops import axis_index, axis_size, barrier_arrive, barrier_wait
from ._trace import Ref, env, type_text
from ._types import SMEM, Barrier, ClusterBarrier, axis_names

_MOST_POINTS = 1 << 30  # of a grid that is handed out: counters do not overflow


def next_tile(counter=0):
    """0, 1, 2 ...: an int32 scalar that no other call of this launch gets (Hopper).

    An atomic counter of the launch (``counter`` is its number, 0 to 31) that starts at 0. One
    thread of a block asks and tells the others; whoever asks after the last tile was given away
    sees a number beyond it.
    """
    not_batched("next_tile")
    return _core.next_tile(counter)


def hand_tile(tile, k, tiles, ready, read, free=None):
    """Tell a number to all blocks of a cluster: ``tile`` of its first block (Hopper).

    For schedules of one's own beside :func:`next_tile`. The last thread of each block calls it, for
    step ``k`` = 0, 1, 2 ..., an int32 scalar. Slot ``k % n`` of ``tiles``, ``SMEM((n,), int32)``,
    of every block gets the number, and that of ``ready``, ``Barrier(num_barriers=n)``, completes
    there. Whoever needs it waits for that, reads the slot and arrives on the slot of ``read``,
    ``Barrier(num_arrivals=readers, num_barriers=n)``, which the call n steps later waits for.
    ``free``: ``ClusterBarrier(collective_axes=(axes,), num_barriers=n)`` of all axes of the
    cluster, where it has more than one block; the last thread may itself read the slot, without an
    arrival. ValueError for arguments of other shapes, or without ``free`` in a cluster.
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
    """A counter of the launch is one for all elements of a batch."""
    if env(what).leading:
        raise NotImplementedError(
            f"{what} is not supported under plgpu.vmap, whose elements share a launch and its"
            " counters; give the kernel a batch axis of its own, or call it once per element"
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NDLoopInfo:
    """What a scheduled body is told: ``index``, a tuple of int32 scalars; ``local_index``, which
    iteration of this program; ``num_local_steps``, how many it does (None where not known)."""

    index: tuple
    local_index: Any
    num_local_steps: Any


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


def _checked_axes(what, e, grid_names, thread_axis, cluster_axes):
    """(names, {grid axis: size}, the axes of the cluster that are wider than 1, number of points);
    ValueError where an axis is missing."""
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
    """Steps until no tile is left; work(body of one step, its number) gives the number of the next
    tile. (that number, the number of steps, the carry)."""

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
    # Numbers go on where the round before ended: who took one of a later round keeps it.
    base = rounds.base
    start = (rounds.ahead + first, zero, init_carry)
    tile, steps, value = while_loop(lambda c: c[0] - base < total, step, start)
    rounds.write(base + total, tile - first)
    return tile, steps, value


def dynamic_scheduling_loop(grid_names, thread_axis=None, cluster_axes=(), init_carry=None):
    """Decorator: run a body once for every point of the grid, whichever block comes first (Hopper).

    A launch has as many clusters as run at a time. Each does the grid point it began with, then
    takes the next one that nobody has, in row-major order of the grid, while there are any; the
    number of the next is fetched while the body works on this one. ``body(info)``, or
    ``body(info, carry=carry) -> carry`` with ``init_carry``; the decorated name is the last carry.
    ``info.index`` is the point along ``grid_names``, ``info.num_local_steps`` None.

    All threads of a block execute the loop and get the same points; ``thread_axis`` names their
    axis. ``cluster_axes`` names all axes of the cluster, whose blocks also get the same points.
    Warp-specialised code does best to fetch in its last thread, which takes the numbers. Where the
    kernel asks for ``lax.axis_index`` of a grid axis, the launch has all points, and each cluster
    does one. Inside another loop, which all clusters must go through equally often, each execution
    is a round over all points; a cluster that is done with a round goes on with the next one, so
    rounds overlap. ValueError for missing axes.
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
        """Inside the grid, which says so to those who look at ranges."""
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
            # The tile of step k + 1 is handed on in slot k % 2.
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
            def _():  # every arrival is waited for
                barrier_wait(read.at[(steps - 1) % 2])
                when(steps > 1)(lambda: barrier_wait(read.at[steps % 2]))
                if rounds is not None and wide:  # in other blocks, too, before the next round
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
