"""Software pipelines inside a kernel: `emit_pipeline`.

The pipeline is a loop over the steps of a grid. For an operand with n slots, step s uses slot s % n
of its SMEM buffer. The inputs of the first steps are fetched before the loop, later ones when a
slot has been released. Inputs with the same number of slots form a ring, with one barrier for each
slot. docs/language.md, "Pipelines", defines the order of events. The pipeline is composed of other
ops: the core only sees copies, barriers and one loop."""

import functools

import numpy as np

from . import _core, _lane_pipeline, _ops
from ._clipped import Span, window
from ._control import fori_loop, scoped, when
from ._names import accepts, show
from ._schedule import unravel
from ._sizes import Dim
from ._trace import Array, Ref, check_arity, env, parameter_names, type_text
from ._types import (
    GMEM,
    SMEM,
    Barrier,
    Blocked,
    Element,
    GenericBlockSpec,
    GenericMemorySpace,
    PlacedRef,
    RevisitMode,
    ShapeDtypeStruct,
    Squeezed,
    ints,
    split_transforms,
)


def slots_of(spec, max_concurrent_steps):
    """The maximum number of slots of an operand."""
    mode = spec.pipeline_mode
    return max_concurrent_steps if mode is None else mode.buffer_count


def check_slots(specs, max_concurrent_steps, who):
    """ValueError unless every input has more slots than its delay_release."""
    for s in specs:
        slots = slots_of(s, max_concurrent_steps)
        if slots > s.delay_release:
            continue
        what = "max_concurrent_steps" if s.pipeline_mode is None else "buffer_count of pl.Buffered"
        raise ValueError(
            f"{who}{what} must be greater than all delay_release values, got {slots} and"
            f" delay_release {s.delay_release}"
        )


def rings_of(operands):
    """Group inputs by their number of slots."""
    rings = {}
    for o in operands:
        rings.setdefault(o.slots, []).append(o)
    return rings


def _is_squeezed(d):
    return d is None or isinstance(d, Squeezed)


def _size(d):
    return d.block_size if isinstance(d, (Blocked, Element)) else int(d)


def _grid_entry(g):
    g = g._plgpu_traced() if isinstance(g, Dim) else g
    """A Python int, or a traced scalar."""
    if isinstance(g, Array):
        if g.shape != () or g.dtype.kind not in "iu":
            raise TypeError(
                f"emit_pipeline: a traced grid entry must be an int32 scalar, got {type_text(g)}"
            )
        return g
    (g,) = ints(g, "emit_pipeline: an entry of the grid")
    return g


class Operand:
    """One spec and the ref that it stages. ``cut``: if the operand is not staged, the body gets the
    block instead of the whole array. ``given``: what the body got at the step that was traced
    last."""

    def __init__(self, spec, ref, what, grid, who="emit_pipeline", cut=False):
        if not isinstance(spec, GenericBlockSpec):
            raise TypeError(f"{who}: {what} must be a BlockSpec, got {show(spec)}")
        if not isinstance(ref, Ref) or ref.memory_space is not GMEM:
            raise TypeError(f"{who}: the argument for {what} must be a GMEM ref, got {show(ref)}")
        self.spec, self.ref, self.what, self.who = spec, ref, what, who
        self.cut, self.given = cut, None
        self.staged = spec.memory_space in (None, SMEM, GenericMemorySpace.DEFAULT)
        if not self.staged and spec.memory_space not in (GMEM, GenericMemorySpace.ANY):
            raise NotImplementedError(
                f"{who}: {what}: blocks in {spec.memory_space} are not supported; use"
                " plgpu.SMEM, or plgpu.GMEM for the whole array"
            )
        dims = spec.block_shape
        if dims is None:
            dims = ref.shape
        if (self.staged or cut) and len(dims) != ref.ndim:
            raise ValueError(
                f"{who}: {what} has a block of rank {len(dims)} for a ref of rank {ref.ndim}"
            )
        for d in dims:
            if isinstance(d, Element) and any(d.padding):
                raise NotImplementedError(f"{who}: {what}: Element with padding is not supported")
            if not (
                _is_squeezed(d) or isinstance(d, (int, np.integer, Blocked, Element))
            ) or isinstance(d, bool):
                sizes = "; blocks have fixed sizes, grids any" if isinstance(d, Dim) else ""
                raise NotImplementedError(
                    f"{who}: {what}: unsupported block size type {show(d)}{sizes}"
                )
            if isinstance(d, (int, np.integer)) and d < 1:
                raise ValueError(f"{who}: {what}: block sizes are positive, got {d}")
        mode = spec.pipeline_mode
        if mode is not None and mode.revisit is RevisitMode.ANY and what.startswith("out_specs"):
            raise NotImplementedError(
                f"{who}: {what}: RevisitMode.ANY is not supported: blocks are not read back; keep"
                " the steps of one block together"
            )
        self.dims = dims
        self.block = tuple(_size(d) for d in dims if not _is_squeezed(d))
        self.variant = (
            bool(grid) and spec.index_map is not None and self._depends_on_grid(len(grid))
        )

    def set_slots(self, max_concurrent_steps, steps):
        """Set ``slots``, which is at most the number of steps."""
        n = slots_of(self.spec, max_concurrent_steps)
        self.slots = min(n, steps) if isinstance(steps, int) else n

    def _depends_on_grid(self, rank):
        """Does the index map use any of its arguments? Found by data flow in a trace that is
        discarded."""
        zero, one = _core.as_array(0, "int32"), _core.as_array(1, "int32")
        op = _core.open("for", (zero, one, *(zero,) * (rank - 1)), 1)
        try:
            args = op.enter(0)
            out = [x for x in self.index(args) if isinstance(x, Array)]
            return _core.depends(out, args)
        finally:
            op.abandon()

    def index(self, indices):
        """The block indices at a step, one for each block dimension."""
        if self.spec.index_map is None:
            return (0,) * len(self.dims)
        gets = f"one index for each of the {len(indices)} grid axes"
        check_arity(
            self.spec.index_map,
            f"{self.who}: the index map of {self.what}",
            gets,
            len(indices),
        )
        try:
            out = self.spec.index_map(*indices)
        except Exception as e:
            e.add_note(f"in the index map of {self.what} of {self.who}")
            raise
        out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if len(out) != len(self.dims):
            raise ValueError(
                f"{self.who}: the index map of {self.what} returned {len(out)} indices for"
                f" {len(self.dims)} block dims"
            )
        for x in out:
            if isinstance(x, Array):
                if x.shape != () or x.dtype.kind not in "iu":
                    raise ValueError(
                        f"{self.who}: the index map of {self.what} must return integer scalars"
                    )
            elif not hasattr(x, "__index__") or getattr(x, "shape", ()) != ():
                raise ValueError(
                    f"{self.who}: the index map of {self.what} must return integers, got {show(x)}"
                )
        return out

    def entries(self, index):
        """An index or a span of the block along each dimension of the array."""
        out = []
        for d, i in zip(self.dims, index):
            if not isinstance(i, Array):
                i = i.__index__()
            if _is_squeezed(d):
                out.append(i)
            elif isinstance(d, Element):
                out.append(Span(i, d.block_size))
            else:
                out.append(Span(i * _size(d), _size(d)))
        return out

    def starts(self, index):
        """(start, end) of the block along each dimension of the array."""
        spans = (x if isinstance(x, Span) else Span(x, 1) for x in self.entries(index))
        return [(x.start, x.start + x.size) for x in spans]

    def slice(self, index):
        """The GMEM view of a block. Starts are dynamic even if known, since a block may
        overhang."""
        where = self.entries(index)
        for x in where:
            if isinstance(x, Span):
                x.start = _core.as_array(x.start, "int32")
        return self.ref.at[tuple(where)]

    def in_place(self, indices):
        """What the body gets for an array that is not staged."""
        if not self.cut:
            return self.ref
        return window(self.ref, self.entries(self.index(indices)))

    def buffer(self):
        """The SMEM buffer: the slots are a leading dimension before those of the block."""
        shape = (self.slots, *self.block)
        split_transforms(
            self.spec.transforms, self.block, self.ref.dtype, f"{self.who}: {self.what}"
        )
        return PlacedRef(ShapeDtypeStruct(shape, self.ref.dtype), SMEM, self.spec.transforms)


def _grid_size(grid):
    """The number of steps: an int if the whole grid is static, otherwise an int32 scalar."""
    total = 1
    for g in grid:
        total = total * g
    if isinstance(total, int) and total >= 2**31:
        raise ValueError(f"emit_pipeline: the grid {grid} has {total} steps; at most 2**31 - 1")
    return total


@accepts(
    delay_release=TypeError(
        "emit_pipeline: delay_release belongs to plgpu.BlockSpec(delay_release=...)"
    )
)
def emit_pipeline(
    body, *, grid, in_specs=(), out_specs=(), max_concurrent_steps=1, init_carry=None
):
    """Make a software pipeline: ``pipeline(*gmem_refs)`` runs ``body`` over ``grid`` with staged
    blocks.

    The body is ``body(indices, *in_refs, *out_refs)``. With ``init_carry`` it is
    ``body(..., carry) -> carry``, and the pipeline returns the final carry.

    TMA copies on Hopper and newer; on sm_80, sm_86 and sm_89 cp.async brings the inputs, and the
    lanes store the outputs, after the body of their step.

    ``grid``: ints or int32 scalars; the last axis is the fastest.
    ``in_specs``, ``out_specs``: flat sequences of BlockSpec, one for each ref.
    ``max_concurrent_steps``: the number of SMEM slots of each operand;
    ``BlockSpec(pipeline_mode=pl.Buffered(n))`` gives one operand n slots.

    An input slot is refilled after the body of its step. If the body starts asynchronous reads
    (wgmma), either wait for them in the body, or use ``BlockSpec(delay_release=1)`` with
    ``wgmma_wait(1)``. In a kernel with several threads, each thread that reaches the pipeline runs
    its own, with its own slots and barriers; SMEM is allocated for all threads.

    ValueError for a grid entry that is not positive, for slots that do not exceed
    ``delay_release``, and for ``collective_axes`` on an output.
    """
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    grid = tuple(_grid_entry(g) for g in grid)
    if any(isinstance(g, int) and g <= 0 for g in grid):
        raise ValueError(
            f"emit_pipeline: All elements in the grid must be strictly positive, got {grid}"
        )
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        if not isinstance(specs, (tuple, list)):
            raise TypeError(
                f"emit_pipeline: {name} must be a tuple or list of BlockSpec, got {show(specs)}"
            )
    in_specs, out_specs = tuple(in_specs), tuple(out_specs)
    if (
        not hasattr(max_concurrent_steps, "__index__")
        or isinstance(max_concurrent_steps, (bool, Array))
        or max_concurrent_steps < 1
    ):
        raise ValueError(
            f"emit_pipeline: max_concurrent_steps must be a positive int, got"
            f" {show(max_concurrent_steps)}"
        )
    max_concurrent_steps = max_concurrent_steps.__index__()
    carries = "" if init_carry is None else ", carry"
    n_args = 1 + len(in_specs) + len(out_specs) + bool(carries)
    gets = f"indices, {len(in_specs)} input and {len(out_specs)} output refs{carries}"
    check_arity(body, "emit_pipeline: the body", gets, n_args)
    for s in out_specs:
        if isinstance(s, GenericBlockSpec) and s.collective_axes:
            raise ValueError("emit_pipeline: an output spec cannot have collective_axes")
    for s in in_specs:
        if isinstance(s, GenericBlockSpec) and s.collective_axes:
            raise NotImplementedError(
                "emit_pipeline: collective_axes need emit_pipeline_warp_specialized"
            )
    specs = [s for s in in_specs if isinstance(s, GenericBlockSpec)]
    check_slots(specs, max_concurrent_steps, "")

    def pipeline(*gmem_refs):
        if len(gmem_refs) != len(in_specs) + len(out_specs):
            raise ValueError(
                f"emit_pipeline: {len(in_specs)} in_specs and {len(out_specs)} out_specs, but"
                f" {len(gmem_refs)} refs given"
            )
        n = len(in_specs)
        ins = [
            Operand(s, r, f"in_specs[{k}]", grid)
            for k, (s, r) in enumerate(zip(in_specs, gmem_refs))
        ]
        outs = [
            Operand(s, r, f"out_specs[{k}]", grid)
            for k, (s, r) in enumerate(zip(out_specs, gmem_refs[n:]))
        ]
        return run_steps(
            body, grid, ins, outs, max_concurrent_steps, init_carry, parameter_names(body)[1:]
        )

    return pipeline


def run_steps(
    body, grid, ins, outs, max_concurrent_steps, init_carry, names, last=False, traced=None
):
    """Run the pipeline of checked operands. ``names``: their names in the generated text. ``last``:
    the kernel ends with the pipeline, so it only waits until the sources of its stores have been
    read. ``traced``: called in the scope of the buffers after the body has been traced."""
    env("emit_pipeline")
    steps = _grid_size(grid)
    fetched = [o for o in ins if o.staged]
    staged = [o for o in ins + outs if o.staged]
    for o in staged:
        o.set_slots(max_concurrent_steps, steps)
    named = dict(zip(map(id, ins + outs), names))
    if _lane_pipeline.runs_here():

        def moved(o, now, s):
            return _moved(o, grid, now, s)

        how = {"names": named, "moved": moved, "traced": traced}
        return _lane_pipeline.run_steps(body, grid, steps, ins, outs, init_carry, **how)
    once = [o for o in fetched if o.spec.pipeline_mode is not None and not o.variant]
    for o in once:
        o.slots = 1
    rings = rings_of([o for o in fetched if o not in once])
    for slots in rings:
        if slots > 32:
            raise NotImplementedError(
                f"{fetched[0].who}: at most 32 steps can be in flight, got {slots}"
            )
    barriers = [Barrier(num_arrivals=len(r), num_barriers=n) for n, r in rings.items()]
    barriers += [Barrier(num_arrivals=len(once))] if once else []

    def run(*refs):
        buffers = dict(zip(map(id, staged), refs))
        bars = dict(zip([*rings, None], refs[len(staged) :]))
        for o in once:
            block = o.slice(o.index(unravel(_core.as_array(0, "int32"), grid)))
            to = buffers[id(o)].at[0]
            _ops.copy_gmem_to_smem(block, to, bars[None], oob_mode=o.spec.oob_fill_mode)
        waits = [functools.partial(_ops.barrier_wait, bars[None])] if once else []
        result = _run(body, grid, steps, ins, outs, buffers, rings, bars, waits, init_carry)
        if traced is not None:
            traced()
        if any(o.staged for o in outs):
            _ops.wait_smem_to_gmem(0, wait_read_only=last)
        return result

    names = [named.get(id(o)) for o in staged]
    types = [*(o.buffer() for o in staged), *(barriers or [None])]
    return scoped(run, types, {}, [*names, *["ready"] * len(barriers)], ())


def _moved(o, grid, now, s):
    """Does the block of an output change between steps s-1 and s?"""
    pairs = zip(now, o.index(unravel(s - 1, grid)))
    changed = [a != b for a, b in pairs if isinstance(a, Array) or isinstance(b, Array)]
    return functools.reduce(lambda x, y: x | y, changed)


def _finish(grid, steps, stored, buffers):
    """The stores after the last step."""
    variant = [o for o in stored if o.variant]
    invariant = [o for o in stored if not o.variant]

    def last_store(operands):
        indices = unravel(steps - 1, grid)
        for o in operands:
            slot = (steps - 1) % o.slots
            _ops.copy_smem_to_gmem(
                buffers[id(o)].at[slot], o.slice(o.index(indices)), commit_group=False
            )
        _ops.commit_smem_to_gmem_group()

    # An output that is revisited at the last step was stored earlier, by a copy that may still be
    # in flight. Two copies to the same place are not ordered, so wait for it.
    last = _core.as_array(steps - 1, "int32")
    for o in variant:
        again = (last > 0) & ~_moved(o, grid, o.index(unravel(last, grid)), last)

        @when(again)
        def _(o=o):
            _ops.wait_smem_to_gmem(0)
            last_store([o])

    # Outputs whose block never changes are stored once, from the slot of the last step.
    if invariant:
        if not variant:
            _ops.commit_smem()
        last_store(invariant)


def _run(body, grid, steps, ins, outs, buffers, rings, bars, waits, init_carry):
    """``rings``: inputs by number of slots; ``waits``: called before the first step."""
    stored = [o for o in outs if o.staged]
    variant = [o for o in stored if o.variant]
    static = isinstance(steps, int)

    def fetch(operands, step, slot):
        indices = unravel(step, grid)
        for o in operands:
            _ops.copy_gmem_to_smem(
                o.slice(o.index(indices)),
                buffers[id(o)].at[slot],
                bars[o.slots].at[slot],
                oob_mode=o.spec.oob_fill_mode,
            )

    # The first blocks.
    for n, ring in rings.items():
        for s in range(n):
            step = _core.as_array(s, "int32")
            if static:
                fetch(ring, step, s)
            else:
                when(steps > s)(lambda step=step, s=s, ring=ring: fetch(ring, step, s))
    for wait in waits:
        wait()

    def one_step(s, carry):
        counts = dict.fromkeys(o.slots for o in ins + outs if o.staged)
        slot = {n: s % n if n > 1 else 0 for n in counts}
        indices = unravel(s, grid)
        for n in rings:
            _ops.barrier_wait(bars[n].at[slot[n]])
        if variant:
            _ops.wait_smem_to_gmem(min(o.slots for o in variant) - 1, wait_read_only=True)
        for o in ins + outs:
            o.given = buffers[id(o)].at[slot[o.slots]] if o.staged else o.in_place(indices)
        refs = [o.given for o in ins + outs]
        if init_carry is None:
            body(indices, *refs)
        else:
            carry = body(indices, *refs, carry)
        if variant:
            _ops.commit_smem()
            for o in variant:
                now = o.index(indices)
                first = (s == 0) | _moved(o, grid, now, s)
                _ops.copy_smem_to_gmem(
                    buffers[id(o)].at[slot[o.slots]], o.slice(now), first, commit_group=False
                )
            _ops.commit_smem_to_gmem_group()
        for n, ring in rings.items():
            for d in sorted({o.spec.delay_release for o in ring}):
                if static and steps <= n:
                    continue  # everything was fetched up front
                level = [o for o in ring if o.spec.delay_release == d]
                more = s < steps - (n - d)
                if d:
                    more = more & (s >= d)

                @when(more)
                def _(level=level, n=n, d=d):
                    fetch(level, s + (n - d), (s - d) % n if d else slot[n])

        return carry

    carry = fori_loop(0, steps, one_step, init_carry)

    finish = functools.partial(_finish, grid, steps, stored, buffers)
    if stored and static:
        finish()
    elif stored:
        when(steps > 0)(finish)
    return carry
