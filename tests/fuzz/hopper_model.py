"""The model of what kernels of hopper.py, warps.py and sharing.py do beside copies and products:
warps that go their own ways, turns, points that are handed out, groups of SMEM at one place, and
CUDA source that says in its first line what it computes."""

import contextlib
import itertools
import threading
import types

import numpy as np

from .machine import Thread, _local, here, tick
from .values import A, as_array, i32, need, where

# ---- warps ---------------------------------------------------------------------------------------


def warp_map(f, axis=None):
    """Four agents in the place of the thread, which take turns with all others."""
    t, m = here(), here().machine
    need(t.warp is None, "a warp map in a warp map")
    warps = [Thread(m, t.block, t.index, (t.agent, w)) for w in range(4)]
    failed = []

    def work(w, warp):
        _local.thread = warp
        with m.lock:
            try:
                m.await_turn(warp.agent)
                need(f(A(np.asarray(w, i32))) is None, "a warp map returns a value")
            except BaseException as e:
                failed.append(e)
                m.fail(e)
            else:
                warp.done = True
                m.pass_on(warp.agent)
                m.alive.remove(warp.agent)

    for w, warp in enumerate(warps):
        warp.warp, warp.warp_axis, warp.done = w, axis, False
        warp.writer = t.writer + 4 * (w + 1)
    with m.lock:
        k = m.alive.index(t.agent)
        m.alive[k : k + 1] = [*(w.agent for w in warps), t.agent]
        workers = [
            threading.Thread(target=work, args=(w, warp), daemon=True)
            for w, warp in enumerate(warps)
        ]
        for worker in workers:
            worker.start()
        try:
            m.wait_until(lambda: all(w.done for w in warps), t.agent)
        except BaseException as e:
            m.fail(e)
            raise (failed or [e])[0] from None
    for b, idx in itertools.chain.from_iterable(w.claims for w in warps):
        b.writer[idx] = t.writer
    t.warps = [w for w in (*t.warps, *warps) if w.open or w.groups or w.unread]
    for bar in t.block.bars:
        seen = [bar.waits.pop(w.agent) for w in warps if w.agent in bar.waits]
        base = bar.before.pop(t.agent, None)
        need(len({n for n in seen if n != (base or 0)}) < 2, "warps wait unequally often")
        if seen:
            bar.waits[t.agent] = max(seen)
        elif base is not None:
            bar.waits[t.agent] = base


class WarpMesh:
    def __init__(self, *, axis_name):
        self.axis_name = axis_name


def core_map(mesh):
    def wrap(f):
        warp_map(lambda w: f(), mesh.axis_name)

    return wrap


def kernel(f, *, mesh):
    return lambda *refs: warp_map(lambda w: f(*refs), mesh.axis_name)


# ---- turns, points -------------------------------------------------------------------------------


@contextlib.contextmanager
def ordered_section(n):
    t = here()
    need(t.warp is None and t.index < n <= t.machine.n_threads, "a ring of threads")
    need(t.block.ring in (None, n), "another ring")
    t.block.ring = n
    t.machine.wait_until(lambda: t.block.turns % n == t.index, t.agent)
    yield
    t.block.turns += 1


def dynamic_scheduling_loop(grid_names, thread_axis=None, cluster_axes=()):
    """Each point once: the one that this block stands for."""
    m = here().machine
    need(here().warp is None and set(grid_names) == set(m.grid_names), "axes of a dynamic loop")

    def wrap(body):
        index = tuple(A(np.asarray(m.axis(n), i32)) for n in grid_names)
        info = types.SimpleNamespace(index=index, local_index=None, num_local_steps=None)
        need(body(info) is None, "a dynamic loop returns a value")

    return wrap


class TileScheduler:
    def __init__(self, counter):
        self.counter = counter

    def fetch(self):
        tick()
        m = here().machine
        m.counters[self.counter] = m.counters.get(self.counter, 0) + 1
        return A(np.asarray(m.counters[self.counter] - 1, i32))


# ---- memory at one place -------------------------------------------------------------------------


class RefUnion:
    def __init__(self, *groups):
        self.groups = groups


def overlay(groups):
    """groups: lists of buffers; what is written to one undoes the others."""
    for group, others in itertools.permutations(groups, 2):
        for b in group:
            b.others = (*b.others, *others)


# ---- CUDA source ---------------------------------------------------------------------------------


def described(source, select):
    """What the first line of CUDA source says: `// r0 = expression; a1 = expression` of a0, a1
    ..., where arrays are what they hold; refs are loaded, and stored to. `select` is `where`."""
    steps = [s.split(" = ") for s in source.splitlines()[0].removeprefix("// ").split("; ")]

    def call(*args):
        given, made = {"where": select}, {}
        for k, a in enumerate(args):
            given[f"a{k}"] = a[...] if hasattr(a, "memory_space") else a
        for to, expression in steps:
            made[to] = eval(expression, given)
        for k, a in enumerate(args):
            if f"a{k}" in made:
                a[...] = made[f"a{k}"]
        results = [x for to, x in made.items() if to[0] == "r"]
        return results[0] if len(results) == 1 else results or None

    return call


def inline_cuda(source, *, arg_types=(), return_type=None):
    run = described(source, where)

    def call(*args):
        got = run(*args)
        outs = return_type if isinstance(return_type, (list, tuple)) else [return_type]
        for x, want in zip(got if isinstance(got, list) else [got], outs, strict=True):
            if want is not None:
                x = as_array(x)
                need((x.shape, x.dtype) == (want.shape, want.dtype), "a result of CUDA source")
        return got

    return call
