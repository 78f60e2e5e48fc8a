"""Pipelines with a thread that only issues copies: `emit_pipeline_warp_specialized`.

All threads of the block call the pipeline. The last one, the memory thread, fetches blocks into
slots; the others, the compute threads, work on them. Each slot has two barriers. *ready* completes
when its blocks have arrived; *consumed* completes when every compute thread has released the slot
(in every block that shares the copy, if inputs are collective). docs/language.md, "Warp-specialised
pipelines", defines the order of events."""

import enum
import functools

from . import _core, _ops, tree
from ._control import cond, fori_loop, scoped, when
from ._pipeline import Operand, _grid_size, check_slots, rings_of, slots_of
from ._schedule import unravel
from ._sizes import Dim
from ._trace import Array, env, parameter_names
from ._types import Barrier, ClusterBarrier, GenericBlockSpec

_NAME = "emit_pipeline_warp_specialized"


class PipelinePipeline(enum.IntEnum):
    """The position of a call in a sequence of calls that form one pipeline: START, STEADY ...,
    STOP."""

    START = 0
    STEADY = 1
    STOP = 2


def _is_spec(x):
    return isinstance(x, GenericBlockSpec)


class _Specs:
    """A pytree of specs: its leaves, and how to rebuild refs in the same structure."""

    def __init__(self, specs, what):
        self.top = (specs,) if _is_spec(specs) else tuple(specs)
        self.leaves, self.structure = tree.flatten(self.top, is_leaf=_is_spec)
        for s in self.leaves:
            if not _is_spec(s):
                raise TypeError(f"{_NAME}: {what} must hold BlockSpecs, got {s!r}")

    def refs(self, given, what):
        leaves, structure = tree.flatten(tuple(given))
        if structure != self.structure:
            raise ValueError(
                f"{_NAME}: {what} and the refs given must have the same pytree structure, got"
                f" {tree.describe(self.structure)} and {tree.describe(structure)}"
            )
        return leaves

    def rebuild(self, leaves):
        return tree.unflatten(self.structure, leaves)


def _check(ins, outs, slots, num_compute_wgs, memory_thread_idx, state, grid):
    for s in ins.leaves:
        if s.collective_axes and len(s.collective_axes) > 1:
            raise ValueError(
                f"{_NAME}: an input can have one collective axis, got {s.collective_axes}"
            )
    for s in outs.leaves:
        if s.collective_axes:
            raise ValueError(f"{_NAME}: an output spec cannot have collective_axes")
    delays = {s.delay_release for s in ins.leaves}
    if len(delays) > 1:
        raise NotImplementedError(
            f"{_NAME}: inputs must have one delay_release, got {sorted(delays)}"
        )
    delay = delays.pop() if delays else 0
    check_slots(ins.leaves, slots, f"{_NAME}: ")
    if memory_thread_idx not in (None, num_compute_wgs):
        raise NotImplementedError(f"{_NAME}: memory_thread_idx must be the last thread")
    if state is not None:
        static = all(isinstance(g, int) for g in grid)
        equal = all(slots_of(s, slots) == slots for s in ins.leaves + outs.leaves)
        if not static or _grid_size(grid) % slots or delay or not equal:
            raise NotImplementedError(
                f"{_NAME}: pipeline_state needs a static grid, a number of steps divisible by"
                " max_concurrent_steps, delay_release=0, and equally many slots for all blocks"
            )
    return delay


def _not_below_zero(n):
    return max(n, 0) if isinstance(n, int) else _core.binary("max", n, 0)


class _Pipeline:
    """The result of the emitter: callable on GMEM refs."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def _operands(self, gmem_refs):
        n = len(self.ins.top)
        if len(gmem_refs) != n + len(self.outs.top):
            raise ValueError(
                f"{_NAME}: the specs and the refs given must have the same pytree structure, got"
                f" {n} in_specs, {len(self.outs.top)} out_specs and {len(gmem_refs)} refs"
            )
        ins = self.ins.refs(gmem_refs[:n], "in_specs")
        outs = self.outs.refs(gmem_refs[n:], "out_specs")
        make = functools.partial(Operand, grid=self.grid)
        operands = [
            [make(s, r, f"{what}[{k}]") for k, (s, r) in enumerate(zip(specs, refs))]
            for what, specs, refs in (
                ("in_specs", self.ins.leaves, ins),
                ("out_specs", self.outs.leaves, outs),
            )
        ]
        for o in operands[0] + operands[1]:
            if not o.staged:
                raise NotImplementedError(
                    f"{_NAME}: {o.what} must be staged in SMEM; close over GMEM refs instead"
                )
        for o in operands[0]:
            if not o.variant:
                raise NotImplementedError(
                    f"{_NAME}: Only inputs with a dependency on the grid are supported; {o.what}"
                    " does not use it"
                )
        if operands[1] and self.num_compute_wgs > 1:
            raise NotImplementedError(
                f"{_NAME}: SMEM outputs need num_compute_wgs=1; store from the body instead"
            )
        steps = _grid_size(self.grid)
        for o in operands[0] + operands[1]:
            o.set_slots(self.max_concurrent_steps, steps)
        for o in operands[1]:
            if not o.variant:
                o.slots = 1
        return operands

    def _rings(self, ins, barriers):
        """(number of slots, barrier) for each of the barriers from get_allocations."""
        if len(barriers) == len(ins):
            counts = [o.slots for o in ins]
        else:
            counts = list(rings_of(ins))
        return list(zip(counts, barriers))

    def _axes(self):
        return sorted({a for s in self.ins.leaves for a in s.collective_axes or ()})

    def get_allocations(self, *gmem_refs):
        """The types to allocate with ``run_scoped``; pass the result as ``allocations=``."""
        ins, outs = self._operands(gmem_refs)
        n, axes, rings = self.num_compute_wgs, self._axes(), rings_of(ins)

        def consumed(slots):
            if axes:
                return ClusterBarrier(
                    collective_axes=tuple(axes), num_arrivals=n, num_barriers=slots
                )
            return Barrier(num_arrivals=n, num_barriers=slots)

        if not ins and not self.manual_ready_barriers:
            raise ValueError(f"{_NAME}: at least one input is needed")
        if self.manual_ready_barriers:
            ready = [Barrier(num_barriers=o.slots) for o in ins]
        else:
            ready = [Barrier(num_arrivals=len(r), num_barriers=k) for k, r in rings.items()]
        counts = [o.slots for o in ins] if self.manual_consumed_barriers else rings
        return {
            "ins": [o.buffer() for o in ins],
            "outs": [o.buffer() for o in outs],
            "ready": ready,
            "consumed": [consumed(k) for k in counts],
        }

    def __call__(self, *gmem_refs, allocations=None):
        e = env(_NAME)
        if self.pipeline_state is not None and allocations is None:
            raise ValueError(f"{_NAME}: pipeline_state needs allocations= (see get_allocations)")
        if e.axes.get(self.wg_axis, (None,))[0] != "thread":
            raise ValueError(f"{_NAME}: wg_axis {self.wg_axis!r} is not the thread axis")
        if e.n_threads != self.num_compute_wgs + 1:
            raise ValueError(
                f"{_NAME}: num_compute_wgs={self.num_compute_wgs} needs num_threads="
                f"{self.num_compute_wgs + 1}, the kernel has {e.n_threads}"
            )
        operands = self._operands(gmem_refs)
        if allocations is not None:
            self._run(operands, allocations, self.delay)
            return
        types = self.get_allocations(*gmem_refs)
        late = self.delay if self._axes() else 0
        kinds = [k for k in sorted(types) for _ in types[k]]

        def run(*refs):
            a = {k: [r for kind, r in zip(kinds, refs) if kind == k] for k in types}
            self._run(operands, a, late)

        flat = [t for k in sorted(types) for t in types[k]]
        scoped(run, flat, {}, self._names(kinds), self.wg_axis)

    def _names(self, kinds):
        """Of allocations: buffers have those of the body's parameters."""
        tops = {"ins": self.ins.top, "outs": self.outs.top}
        params = iter([*parameter_names(self.body)[1:], *[None] * len(kinds)])
        own = {
            what: iter([name for t, name in zip(top, params) for _ in tree.leaves(t, _is_spec)])
            for what, top in tops.items()
        }
        return [next(own[kind]) if kind in own else kind for kind in kinds]

    def _run(self, operands, a, late):
        """``late``: how many of the last steps, whose release was delayed, are released at the end.
        Needed if no barrier of the block separates the pipeline from the next use of the slots, or
        if other blocks fill them."""
        me = _ops.axis_index(self.wg_axis)
        cond(
            _core.binary("ne", me, self.num_compute_wgs),
            lambda: self._compute(*operands, a, late),
            lambda: self._memory(operands[0], a, late),
        )

    # ---- compute threads

    def _compute(self, ins, outs, a, late):
        share = (512 - self.memory_registers) // self.num_compute_wgs
        _ops.set_max_registers(min(256, share) // 8 * 8, action="increase")
        loop = functools.partial(self._compute_loop, ins, outs, a)
        if self.compute_context is None:
            loop(None)
        else:
            calls = []

            def pipeline_fn(carry):
                if calls:
                    raise ValueError(
                        f"{_NAME}: compute_context must call the pipeline exactly once"
                    )
                calls.append(True)
                return loop(carry)

            self.compute_context(pipeline_fn)
            if not calls:
                raise ValueError(f"{_NAME}: compute_context must call the pipeline exactly once")
        variant = [o for o in outs if o.variant]
        steps = _grid_size(self.grid)
        if late:
            _ops.wgmma_wait(0)

            def release(s, _):
                for n, b in self._rings(ins, a["consumed"]):
                    _ops.barrier_arrive(b.at[s % n])

            fori_loop(_not_below_zero(steps - late), steps, release, None)
        last = unravel(steps - 1, self.grid)
        invariant = [(o, b) for o, b in zip(outs, a["outs"]) if not o.variant]
        if invariant:
            if not variant:
                _ops.commit_smem()
            for o, b in invariant:
                _ops.copy_smem_to_gmem(b.at[0], o.slice(o.index(last)), commit_group=False)
            _ops.commit_smem_to_gmem_group()
        if outs:
            _ops.wait_smem_to_gmem(0)

    def _compute_loop(self, ins, outs, a, carry):
        d = self.delay
        variant = [(o, b) for o, b in zip(outs, a["outs"]) if o.variant]
        consumed = self._rings(ins, a["consumed"])
        counts = dict.fromkeys(o.slots for o in [*ins, *(o for o, _ in variant)])

        def moved(o, now, s):
            past = o.index(unravel(s - 1, self.grid))
            changed = [
                x != y for x, y in zip(now, past) if isinstance(x, Array) or isinstance(y, Array)
            ]
            return functools.reduce(lambda x, y: x | y, changed, s == 0)

        def step(s, c):
            slot = {n: s % n for n in counts}
            released = {n: (s + (n - d)) % n if d else slot[n] for n in counts}
            indices = unravel(s, self.grid)
            if not self.manual_ready_barriers:
                for n, b in self._rings(ins, a["ready"]):
                    _ops.barrier_wait(b.at[slot[n]])
            if variant:
                fewest = min(o.slots for o, _ in variant)
                _ops.wait_smem_to_gmem(fewest - 1, wait_read_only=True)
            args = [*self.ins.rebuild([b.at[slot[o.slots]] for o, b in zip(ins, a["ins"])])]
            args += self.outs.rebuild(
                [b.at[slot[o.slots] if o.variant else 0] for o, b in zip(outs, a["outs"])]
            )
            if self.manual_ready_barriers:
                args += self.ins.rebuild([b.at[slot[o.slots]] for o, b in zip(ins, a["ready"])])
            if self.manual_consumed_barriers:
                args += self.ins.rebuild([b.at[released[n]] for n, b in consumed])
            if self.compute_context is not None:
                c = self.body(indices, *args, c)
            elif self.body(indices, *args) is not None:
                raise TypeError(
                    f"{_NAME}: the body must return None without compute_context (carry mismatch)"
                )
            if not self.manual_consumed_barriers:
                for n, b in consumed:
                    release = functools.partial(_ops.barrier_arrive, b.at[released[n]])
                    when(s >= d)(release) if d else release()
            if variant:
                _ops.commit_smem()
                for o, b in variant:
                    now = o.index(indices)
                    _ops.copy_smem_to_gmem(
                        b.at[slot[o.slots]], o.slice(now), moved(o, now, s), commit_group=False
                    )
                _ops.commit_smem_to_gmem_group()
            return c

        return fori_loop(0, _grid_size(self.grid), step, carry)

    # ---- the memory thread

    def _memory(self, ins, a, late):
        _ops.set_max_registers(self.memory_registers, action="decrease")
        steps, rings = _grid_size(self.grid), rings_of(ins)
        state, start = self.pipeline_state, PipelinePipeline.START
        ready = a["ready"]
        if not self.manual_ready_barriers:
            by_ring = dict(zip(rings, ready))
            ready = [by_ring[o.slots] for o in ins]
        consumed = self._rings(ins, a["consumed"])

        def fetch(n, step, slot):
            indices = unravel(step, self.grid)
            for k, o in enumerate(ins):
                if o.slots != n:
                    continue
                _ops.copy_gmem_to_smem(
                    o.slice(o.index(indices)),
                    a["ins"][k].at[slot],
                    ready[k].at[slot],
                    collective_axes=o.spec.collective_axes,
                    oob_mode=o.spec.oob_fill_mode,
                )

        def prologue():
            for n in rings:
                for k in range(n):
                    step = _core.as_array(k, "int32")
                    if isinstance(steps, int):
                        fetch(n, step, k)
                    else:
                        when(steps > k)(lambda n=n, step=step, k=k: fetch(n, step, k))

        def await_consumed(n, step):
            for count, b in consumed:
                if count == n:
                    _ops.barrier_wait(b.at[step % n])

        fewest = min(rings, default=1)
        first = fewest
        if state is None or not isinstance(state, Array) and state == start:
            prologue()
        elif isinstance(state, Array):
            when(state == int(start))(prologue)
            first = _core.where(state == int(start), fewest, 0)
        else:
            first = 0

        def refill_ring(n, k):
            await_consumed(n, k)
            fetch(n, k, k % n)

        def refill(k, _):
            # rings with more slots are that many steps ahead of this one
            for n in sorted(rings):
                step = k if n == fewest else k + (n - fewest)
                again = functools.partial(refill_ring, n, step)
                again() if n == fewest else when(step < steps)(again)

        fori_loop(first, steps, refill, None)

        def quiesce():
            # the last slots, except for steps that are never released
            hi = steps - self.delay + late
            for n in rings:
                fori_loop(
                    _not_below_zero(steps - n), hi, lambda k, _, n=n: await_consumed(n, k), None
                )

        if state is None or not isinstance(state, Array) and state == PipelinePipeline.STOP:
            quiesce()
        elif isinstance(state, Array):
            when(state == int(PipelinePipeline.STOP))(quiesce)


def emit_pipeline_warp_specialized(
    body,
    *,
    grid,
    memory_registers,
    in_specs=(),
    out_specs=(),
    max_concurrent_steps=2,
    wg_axis,
    num_compute_wgs,
    pipeline_state=None,
    manual_ready_barriers=False,
    manual_consumed_barriers=False,
    compute_context=None,
    memory_thread_idx=None,
):
    """Make a software pipeline with a memory thread (Hopper): ``pipeline(*gmem_refs,
    allocations=None)``.

    All threads of the block call the pipeline. Threads 0 to ``num_compute_wgs`` - 1 compute; the
    last one issues all copies, with ``memory_registers`` registers for each lane (typically 40).

    The body is ``body(indices, *ins, *outs, *ready, *consumed, carry)``. The refs have the
    structure of the specs (pytrees; None is allowed). ``ready`` barriers are passed only with
    ``manual_ready_barriers``, and the body must wait once on each. ``consumed`` barriers are passed
    only with ``manual_consumed_barriers``, and the body must arrive once on each. ``carry`` is
    passed only with ``compute_context``.

    ``compute_context(pipeline_fn)`` runs only in the compute threads and calls
    ``pipeline_fn(init_carry)`` exactly once; it is the place for a prologue and epilogue in
    registers. (All threads reach the code after the pipeline, so it has to do with
    ``memory_registers`` registers.) ``BlockSpec(delay_release=d)`` releases a slot d steps late.
    ``BlockSpec(collective_axes=axis)`` multicasts an input to the blocks along a cluster axis.
    ``pipeline_state`` joins several calls, see :class:`PipelinePipeline`; it needs
    ``pipeline.get_allocations(*refs)`` allocated around the calls.

    Specs, refs and threads that do not fit raise ValueError or NotImplementedError.
    """
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    grid = (g._plgpu_traced() if isinstance(g, Dim) else g for g in grid)
    grid = tuple(g if isinstance(g, Array) else g.__index__() for g in grid)
    ins, outs = _Specs(in_specs, "in_specs"), _Specs(out_specs, "out_specs")
    if ins.leaves and not grid:
        raise NotImplementedError(
            f"{_NAME}: Only inputs with a dependency on the grid are supported; the grid is empty"
        )
    delay = _check(
        ins, outs, max_concurrent_steps, num_compute_wgs, memory_thread_idx, pipeline_state, grid
    )
    return _Pipeline(
        body=body,
        grid=grid,
        ins=ins,
        outs=outs,
        delay=delay,
        max_concurrent_steps=max_concurrent_steps,
        memory_registers=memory_registers,
        wg_axis=wg_axis,
        num_compute_wgs=num_compute_wgs,
        pipeline_state=pipeline_state,
        manual_ready_barriers=manual_ready_barriers,
        manual_consumed_barriers=manual_consumed_barriers,
        compute_context=compute_context,
    )
