"""Loops that distribute work over programs."""

import dataclasses
import functools
from typing import Any

from . import _core, _sizes
from ._control import cond, fori_loop, scoped, when, while_loop
from ._names import show
from ._ops import axis_index, axis_size, barrier_arrive, barrier_wait, commit_smem
from ._tcgen05 import query_cluster_cancel, try_cluster_cancel
from ._tmem import TryClusterCancelResult
from ._trace import Ref, env, type_text
from ._types import SMEM, Barrier, ClusterBarrier, axis_names

_SLOT_NAMES = ("next_tile", "next_tile_ready", "next_tile_read", "next_tile_free")
_MOST_POINTS = 1 << 30  # of a dynamically scheduled grid, so that counters do not overflow


class TileScheduler:
    """Tile numbers that clusters fetch at run time, for schedules of your own (Hopper).

    A launch has atomic counters. The last Pallas thread of each block, the *scheduler thread*,
    fetches numbers from one of them and broadcasts each to all threads of the block, and to all
    blocks of the cluster, through a ring of slots in shared memory. The other threads receive them.

    Allocate ``scratch`` in ``scratch_types`` or ``pl.run_scoped``, and make the object from its
    refs::

        scratch_types={"tiles": plgpu.ext.TileScheduler.scratch(readers=1)}

        def body(o_gmem, tiles):
            scheduler = plgpu.ext.TileScheduler(**tiles)

    Steps are numbered 0, 1, 2 ... by int32 scalars or Python ints; step k uses slot ``k % slots``.

    tiles: SMEM ref of (slots,) int32. ready, read: refs of ``slots`` barriers. free: ``slots``
    cluster barriers over all axes of the cluster, if it has more than one block. Without any refs
    only :meth:`fetch` can be called.
    counter: which counter of the launch, 0 to 31. Dynamic loops (:func:`dynamic_scheduling_loop`)
    use the first ones, one each.

    ValueError for refs of other kinds or shapes, or without ``free`` in a cluster.
    """

    def __init__(self, tiles=None, ready=None, read=None, free=None, *, counter=0):
        what = "TileScheduler"
        wide = [n for n, (f, _, size) in env(what).axes.items() if f == "cluster" and size > 1]
        self.tiles, self.ready, self.read = tiles, ready, read
        self.free = free if wide else None
        self.counter, self.cluster_axes = counter, wide
        if tiles is ready is read is free is None:
            return
        if not isinstance(tiles, Ref) or tiles.ndim != 1:
            raise ValueError(f"{what}: tiles must be a ref of one dim in SMEM, got {_shown(tiles)}")
        barriers = {"ready": ready, "read": read, **({"free": free} if wide else {})}
        for name, x in barriers.items():
            if not isinstance(x, Ref) or x.dtype != "barrier" or x.shape != tiles.shape:
                raise ValueError(
                    f"{what}: {name} must be {self.slots} barriers, one for each slot of tiles; got"
                    f" {_shown(x)}"
                )

    @staticmethod
    def scratch(readers, slots=2, cluster_axes=()):
        """What to allocate: descriptors by the names of the refs.

        readers: threads of each block that call :meth:`receive` for every step. slots: how many
        numbers may be broadcast before the first one is read. cluster_axes: names of all axes of
        the cluster, if it has more than one block.
        """
        axes = axis_names(cluster_axes)
        found = {
            "tiles": SMEM((slots,), "int32"),
            "ready": Barrier(num_barriers=slots),
            "read": Barrier(num_arrivals=readers, num_barriers=slots),
        }
        if axes:
            found["free"] = ClusterBarrier(collective_axes=(axes,), num_barriers=slots)
        return found

    @property
    def slots(self):
        """The number of slots."""
        return self.tiles.shape[0]

    def fetch(self):
        """Scheduler thread: read and increment the counter, an int32 scalar that no other call of
        the launch gets.

        Counters start at 0, and go on after the last tile was fetched. In a cluster with ``free``
        the first block fetches, for all; in the other blocks the result is 0. NotImplementedError
        under ``vmap``, whose elements would share the counter.
        """
        not_batched("TileScheduler.fetch")
        if self.free is None:
            return _core.next_tile(self.counter)
        axes = self.cluster_axes
        rank = axis_index(axes[0] if len(axes) == 1 else tuple(axes))
        zero = functools.partial(_core.as_array, 0, "int32")
        return cond(rank == 0, lambda: _core.next_tile(self.counter), zero)

    def broadcast(self, tile, step):
        """Scheduler thread of each block: pass on the ``tile`` of the first block of the cluster.
        Waits until all readers have received what was in the slot before."""
        slot = step % self.slots

        @when(step >= self.slots)
        def _():
            barrier_wait(self.read.at[slot])
            if self.free is not None:
                _core.effect("barrier_arrive", (self.free.at[slot],), memory_order="release")
                barrier_wait(self.free.at[slot])

        _core.effect("broadcast_tile", (tile, self.tiles.at[slot], self.ready.at[slot]))

    def receive(self, step, *, release=True):
        """The number of a step, an int32 scalar. Every reader receives every step, in order. The
        scheduler thread may also receive, with ``release=False``."""
        slot = step % self.slots
        barrier_wait(self.ready.at[slot])
        tile = self.tiles[slot]
        if release:
            barrier_arrive(self.read.at[slot])
        return tile

    def drain(self, steps):
        """Scheduler thread: after ``steps`` steps, wait until the last numbers have been received,
        so that the block may end."""
        for k in range(self.slots):

            def wait(k=k):
                barrier_wait(self.read.at[(steps - 1 - k) % self.slots])

            when(steps > k)(wait)


def _shown(x):
    return type_text(x) if isinstance(x, Ref) else show(x)


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
        if isinstance(total, int) and abs(total) >= 2**31:
            raise ValueError(f"nd_loop: the grid {grid} has {total} indices; at most 2**31 - 1")
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
    sizes = {n: size for n, (kind, _, size) in e.axes.items() if kind == "grid"}
    for n in names:
        if n not in sizes:
            raise ValueError(f"{what}: {show(n)} is not a grid axis; those are {list(sizes)}")
    left = [n for n, size in sizes.items() if _sizes.most(size) > 1 and n not in names]
    if left or len(set(names)) < len(names):
        raise ValueError(
            f"{what}: grid_names must name all axes of the grid once, {list(sizes)}; got {names}"
        )
    if thread_axis != e.thread_name:
        raise ValueError(
            f"{what}: thread_axis must be {e.thread_name!r}, as in the kernel; got"
            f" {show(thread_axis)}"
        )
    clusters = {n: size for n, (kind, _, size) in e.axes.items() if kind == "cluster"}
    given = axis_names(cluster_axes)
    wide = [n for n, size in clusters.items() if size > 1]
    if any(n not in clusters for n in given) or any(n not in given for n in wide):
        raise ValueError(
            f"{what}: cluster_axes must name all axes of the cluster, {list(clusters)}; got {given}"
        )
    total = 1
    for size in sizes.values():
        total *= size
    most = _sizes.most(total)
    if most >= _MOST_POINTS:
        got = total if isinstance(total, int) else f"{total}, up to {most}; give plgpu.dim a max="
        raise ValueError(f"{what}: at most {_MOST_POINTS} points are handed out, got {got}")
    return names, sizes, wide, total


def _tile_loop(body, point, total, rounds, init_carry, work, first=None):
    """Iterate until no tile is left, from ``first`` on, by default that of the cluster.
    ``work(body of one step, its index)`` returns the next tile. Returns (the next tile, the number
    of steps, the carry)."""

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

    zero, first = _core.as_array(0, "int32"), _core.first_tile() if first is None else first
    if rounds is None:
        return while_loop(lambda c: c[0] < total, step, (first, zero, init_carry))
    # Numbers continue from the previous round: a cluster keeps a number of a later round.
    base = rounds.base
    start = (rounds.ahead + first, zero, init_carry)
    tile, steps, value = while_loop(lambda c: c[0] - base < total, step, start)
    rounds.write(base + total, tile - first)
    return tile, steps, value


def _cancelling_loop(body, names, wide, e, init_carry):
    """The loop by cluster launch control. The answer for step k + 1 is asked for in step k, in slot
    k % 2, and only after an answer that there was another point."""

    def loop(result, answered, free=None):
        def step(carry):
            index, k, value, _ = carry
            slot, out = k % 2, []
            if free is not None:  # everyone has read what the slot held

                @when(k >= 2)
                def _():
                    barrier_wait(free.at[slot])

            try_cluster_cancel(result.at[slot], answered.at[slot])
            info = NDLoopInfo(index, k, None)
            if init_carry is None:
                body(info)
            else:
                out.append(body(info, carry=value))
            barrier_wait(answered.at[slot])
            following, more = query_cluster_cancel(result.at[slot], names)
            commit_smem()
            if free is not None:
                barrier_arrive(free.at[slot])
            return following, k + 1, *(out or [value]), more

        first = tuple(axis_index(name) for name in names)
        start = (first, _core.as_array(0, "int32"), init_carry, _core.as_array(True, "bool"))
        _, steps, value, _ = while_loop(lambda c: c[3], step, start)
        if free is not None:  # also in other blocks, before this one ends
            barrier_wait(free.at[(steps - 1) % 2])
            when(steps > 1)(lambda: barrier_wait(free.at[steps % 2]))
        return value

    types = [TryClusterCancelResult(2), Barrier(num_arrivals=e.n_threads, num_barriers=2)]
    if wide:
        types.append(
            ClusterBarrier(collective_axes=(tuple(wide),), num_barriers=2, num_arrivals=e.n_threads)
        )
    return scoped(
        loop, types, {}, ("next_point", "next_point_ready", "next_point_free"), e.thread_name or ()
    )


def _meet_blocks(scheduler):
    """Scheduler threads: what the blocks of the cluster did comes before what they do next."""
    _core.effect("barrier_arrive", (scheduler.free.at[0],), memory_order="release")
    barrier_wait(scheduler.free.at[0])


def _after_other_loops(scheduler, e, last):
    """Other blocks may still read the slots of the loop before, where those of this one may be."""
    if scheduler.free is not None and e.counters > 1:
        when(last)(lambda: _meet_blocks(scheduler))


def _counting_loop(body, point, total, wide, e, thread_axis, init_carry):
    """The loop after one by cluster launch control, which has left fewer clusters than points: all
    of them fetch every point, the first one, too."""
    counter = e.counters
    e.counters += 1

    def loop(*refs):
        scheduler = TileScheduler(*refs, counter=counter)
        last = axis_index(thread_axis) == e.n_threads - 1 if thread_axis else True

        def take(k):
            if not refs:
                return scheduler.fetch()
            when(last)(lambda: scheduler.broadcast(scheduler.fetch(), k))
            return scheduler.receive(k)

        def work(run, k):
            run()
            return take(k + 1)

        zero = _core.as_array(0, "int32")
        _after_other_loops(scheduler, e, last)
        _, steps, value = _tile_loop(body, point, total, None, init_carry, work, take(zero))
        if refs:
            when(last)(lambda: scheduler.drain(steps + 1))
        return value

    if e.n_threads == 1 and not wide:
        return loop()
    types = [*TileScheduler.scratch(e.n_threads, 2, tuple(wide)).values()]
    return scoped(loop, types, {}, _SLOT_NAMES, thread_axis or ())


def _fetching_loop(loop, counter, rounds, total, wide, e, thread_axis):
    """The loop by a counter that clusters fetch points from, beginning with one each. loop: all of
    :func:`_tile_loop` but its work."""

    def take():
        if rounds is None:
            return _core.fetch_tile(counter)
        return _core.fetch_tile(counter, rounds.base + total + _core.first_tile())

    if e.n_threads == 1 and not wide:

        def alone(run, _):
            taken = take()
            run()
            return _core.shuffle_tile(taken)

        return loop(alone)[2]

    def together(*refs):
        # The tile of step k + 1 is passed in slot k % 2.
        scheduler = TileScheduler(*refs)
        read = scheduler.read
        last = axis_index(thread_axis) == e.n_threads - 1 if thread_axis else True

        def work(run, k):
            taken = take()
            run()
            when(last)(lambda: scheduler.broadcast(taken, k))
            return scheduler.receive(k)

        _after_other_loops(scheduler, e, last)
        _, steps, value = loop(work)

        @when(last if rounds is None else (steps > 0) & last)
        def _():  # wait for every arrival
            barrier_wait(read.at[(steps - 1) % 2])
            when(steps > 1)(lambda: barrier_wait(read.at[steps % 2]))
            if rounds is not None and wide:  # also in other blocks, before the next round
                _meet_blocks(scheduler)

        return value

    types = [*TileScheduler.scratch(e.n_threads, 2, tuple(wide)).values()]
    return scoped(together, types, {}, _SLOT_NAMES, thread_axis or ())


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
    with the next, so rounds overlap.

    In a kernel that has allocated TMEM, and so is for Blackwell, the first loop, if not inside
    another one, uses cluster launch control (:func:`try_cluster_cancel`): the launch has all
    points, and a cluster takes over those of clusters that have not started. In loops that follow
    it, the clusters that are left fetch all points. NotImplementedError if such a loop is inside
    another one.

    ValueError for missing axes, NotImplementedError under ``vmap``.
    """
    what = "dynamic_scheduling_loop"
    e = env(what)
    not_batched(what)
    names, sizes, wide, total = _checked_axes(what, e, grid_names, thread_axis, cluster_axes)
    in_loop = _core.in_loop()
    if e.cancels and in_loop:
        raise NotImplementedError(
            f"{what}: inside another loop, after cluster launch control, which left fewer clusters"
            " than grid points; use plgpu.ext.TileScheduler"
        )
    if e.has_tmem and not in_loop and not e.cancels and not e.counters:
        e.cancels = True
        return lambda body: _cancelling_loop(body, names, wide, e, init_carry)
    rounds = e.rounds if in_loop else None

    def point(tile):
        """The grid point, clamped so that its range is known."""
        tile = tile if rounds is None else tile - rounds.base
        tile = _core.binary("min", _core.binary("max", tile, 0), total - 1)
        of = dict(zip(sizes, unravel(tile, tuple(sizes.values()))))
        return tuple(of[n] for n in names)

    if e.cancels:
        return lambda body: _counting_loop(body, point, total, wide, e, thread_axis, init_carry)
    counter = e.counters if rounds is None or rounds.counter is None else rounds.counter
    e.counters += counter == e.counters
    if rounds is not None:
        rounds.counter = counter

    return lambda body: _fetching_loop(
        functools.partial(_tile_loop, body, point, total, rounds, init_carry),
        counter, rounds, total, wide, e, thread_axis,
    )  # fmt: skip
