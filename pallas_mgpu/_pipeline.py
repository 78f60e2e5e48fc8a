"""Software pipelines inside a kernel: `emit_pipeline`.

The pipeline is a loop over the steps of a grid. Step s works on slot s % max_concurrent_steps of
one SMEM buffer per operand; inputs of the first steps are fetched up front, later ones when a
slot is free again. The order of events is that of docs/reference.md, "Pipelines"; nothing here is
visible to the core, which sees copies, barriers and one loop."""

import functools

import numpy as np

from . import _core, _ops
from ._clipped import Span, window
from ._control import fori_loop, scoped, when
from ._names import accepts, show
from ._schedule import unravel
from ._trace import Array, Ref, check_arity, env, parameter_names, type_text
from ._types import (
    GMEM,
    SMEM,
    Barrier,
    Blocked,
    Element,
    GenericBlockSpec,
    GenericMemorySpace,
    MemoryRef,
    Squeezed,
    ints,
    split_transforms,
)


def _is_squeezed(d):
    return d is None or isinstance(d, Squeezed)


def _size(d):
    return d.block_size if isinstance(d, (Blocked, Element)) else int(d)


def _grid_entry(g):
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
    """One spec with the ref it stages. ``cut``: where it is not staged, the body gets the block,
    not the whole array. ``given``: what the body got at the step that was traced last."""

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
                raise NotImplementedError(f"{who}: {what}: unsupported block size type {show(d)}")
            if isinstance(d, (int, np.integer)) and d < 1:
                raise ValueError(f"{who}: {what}: block sizes are positive, got {d}")
        self.dims = dims
        self.block = tuple(_size(d) for d in dims if not _is_squeezed(d))
        self.variant = (
            bool(grid) and spec.index_map is not None and self._depends_on_grid(len(grid))
        )

    def _depends_on_grid(self, rank):
        """Does the index map use any of its arguments? By dataflow, on a trace that is thrown
        away."""
        zero, one = _core.as_array(0, "int32"), _core.as_array(1, "int32")
        op = _core.open("for", (zero, one, *(zero,) * (rank - 1)), 1)
        try:
            args = op.enter(0)
            out = [x for x in self.index(args) if isinstance(x, Array)]
            return _core.depends(out, args)
        finally:
            op.abandon()

    def index(self, indices):
        """Block indices at a step, one per block dim."""
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

    def _entries(self, index):
        """Of a block: an index or a span along each dim of the array."""
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
        """(first element, the one after the last) along each dim of the array."""
        spans = (x if isinstance(x, Span) else Span(x, 1) for x in self._entries(index))
        return [(x.start, x.start + x.size) for x in spans]

    def slice(self, index):
        """The GMEM view of a block. Starts are dynamic even where known: a block may overhang."""
        where = self._entries(index)
        for x in where:
            if isinstance(x, Span):
                x.start = _core.as_array(x.start, "int32")
        return self.ref.at[tuple(where)]

    def in_place(self, indices):
        """What the body gets of an array that is not staged."""
        if not self.cut:
            return self.ref
        return window(self.ref, self._entries(self.index(indices)))

    def buffer(self, slots):
        """The SMEM buffer: a slot dim in front of the block."""
        shape = (slots, *self.block)
        split_transforms(
            self.spec.transforms, self.block, self.ref.dtype, f"{self.who}: {self.what}"
        )
        return MemoryRef.make(shape, self.ref.dtype, SMEM, self.spec.transforms)


def _grid_size(grid):
    """The number of steps: an int if the whole grid is static, else an int32 scalar."""
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
    """A software pipeline: ``pipeline(*gmem_refs)`` runs ``body`` over ``grid`` with staged
    blocks (Hopper).

    ``body(indices, *in_refs, *out_refs)``, or ``body(..., carry) -> carry`` with ``init_carry``;
    the pipeline then returns the last carry. ``grid``: ints or int32 scalars, last axis fastest.
    ``in_specs``, ``out_specs``: flat sequences of BlockSpec, one per ref.
    ``max_concurrent_steps``: SMEM slots per operand. An input slot is refilled after the body of
    its step; with asynchronous reads (wgmma) await them in the body, or give
    ``BlockSpec(delay_release=1)`` and ``wgmma_wait(1)``.

    ValueError: a grid entry that is not positive; ``max_concurrent_steps`` not above every
    ``delay_release``; ``collective_axes`` on an output.
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
    gets = f"(indices, {len(in_specs)} input refs, {len(out_specs)} output refs{carries})"
    check_arity(body, "emit_pipeline: the body", gets, n_args)
    for s in out_specs:
        if isinstance(s, GenericBlockSpec) and s.collective_axes:
            raise ValueError("emit_pipeline: an output spec cannot have collective_axes")
    for s in in_specs:
        if isinstance(s, GenericBlockSpec) and s.collective_axes:
            raise NotImplementedError(
                "emit_pipeline: collective_axes need emit_pipeline_warp_specialized"
            )
    delays = [s.delay_release for s in in_specs if isinstance(s, GenericBlockSpec)]
    if delays and max_concurrent_steps <= max(delays):
        raise ValueError(
            "max_concurrent_steps must be greater than all delay_release values, got"
            f" {max_concurrent_steps} and delay_release {max(delays)}"
        )

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
    """The pipeline of checked operands. ``names``: of them, for the generated text. ``last``: the
    kernel ends with it, so its stores need not be complete for the block to go on. ``traced``:
    called in the scope of the buffers after the body was traced."""
    e = env("emit_pipeline")
    steps = _grid_size(grid)
    slots = min(max_concurrent_steps, steps) if isinstance(steps, int) else max_concurrent_steps
    fetched = [o for o in ins if o.staged]
    staged = [o for o in ins + outs if o.staged]
    if staged and e.thread_name is not None:
        raise NotImplementedError(
            "emit_pipeline: Only thread-collective allocations are supported in kernels with"
            f" threads (this one has the thread axis {e.thread_name!r}), and a pipeline"
            " allocates for one thread; use a kernel without threads, or write the producer and"
            " consumer branches with barriers"
        )
    if fetched and slots > 32:
        raise NotImplementedError(
            f"{fetched[0].who}: at most 32 steps can be in flight, got {slots}"
        )
    barrier = Barrier(num_arrivals=len(fetched), num_barriers=slots) if fetched else None

    def run(*refs):
        buffers = dict(zip(map(id, staged), refs))
        result = _run(body, grid, steps, slots, ins, outs, buffers, refs[-1], init_carry)
        if traced is not None:
            traced()
        if any(o.staged for o in outs):
            _ops.wait_smem_to_gmem(0, wait_read_only=last)
        return result

    named = dict(zip(map(id, ins + outs), names))
    names = [named.get(id(o)) for o in staged]
    types = [*(o.buffer(slots) for o in staged), barrier]
    return scoped(run, types, {}, [*names, "ready"], ())


def _run(body, grid, steps, slots, ins, outs, buffers, bars, init_carry):
    fetched = [o for o in ins if o.staged]
    stored = [o for o in outs if o.staged]
    variant = [o for o in stored if o.variant]
    invariant = [o for o in stored if not o.variant]
    static = isinstance(steps, int)

    def fetch(operands, step, slot):
        indices = unravel(step, grid)
        for o in operands:
            _ops.copy_gmem_to_smem(
                o.slice(o.index(indices)),
                buffers[id(o)].at[slot],
                bars.at[slot],
                oob_mode=o.spec.oob_fill_mode,
            )

    # The first blocks.
    if fetched:
        for s in range(slots):
            step = _core.as_array(s, "int32")
            if static:
                fetch(fetched, step, s)
            else:
                when(steps > s)(lambda step=step, s=s: fetch(fetched, step, s))

    def moved(o, now, s):
        """Did the block of an output change between steps s-1 and s?"""
        pairs = zip(now, o.index(unravel(s - 1, grid)))
        changed = [a != b for a, b in pairs if isinstance(a, Array) or isinstance(b, Array)]
        return functools.reduce(lambda x, y: x | y, changed)

    def one_step(s, carry):
        slot = s % slots if slots > 1 else 0
        indices = unravel(s, grid)
        if fetched:
            _ops.barrier_wait(bars.at[slot])
        if variant:
            _ops.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        for o in ins + outs:
            o.given = buffers[id(o)].at[slot] if o.staged else o.in_place(indices)
        refs = [o.given for o in ins + outs]
        if init_carry is None:
            body(indices, *refs)
        else:
            carry = body(indices, *refs, carry)
        if variant:
            _ops.commit_smem()
            for o in variant:
                now = o.index(indices)
                first = (s == 0) | moved(o, now, s)
                _ops.copy_smem_to_gmem(
                    buffers[id(o)].at[slot], o.slice(now), first, commit_group=False
                )
            _ops.commit_smem_to_gmem_group()
        for d in sorted({o.spec.delay_release for o in fetched}):
            if static and steps <= slots:
                continue  # everything was fetched up front
            ahead = slots - d
            level = [o for o in fetched if o.spec.delay_release == d]
            more = s < steps - ahead
            if d:
                more = more & (s >= d)

            @when(more)
            def _(level=level, ahead=ahead, d=d):
                fetch(level, s + ahead, (s - d) % slots if d else slot)

        return carry

    carry = fori_loop(0, steps, one_step, init_carry)

    def last_store(operands):
        slot = (steps - 1) % slots
        indices = unravel(steps - 1, grid)
        for o in operands:
            _ops.copy_smem_to_gmem(
                buffers[id(o)].at[slot], o.slice(o.index(indices)), commit_group=False
            )
        _ops.commit_smem_to_gmem_group()

    def finish():
        # An output that was revisited at the last step was stored before, by a copy that may still
        # be in flight: two copies to one place are not ordered.
        last = _core.as_array(steps - 1, "int32")
        for o in variant:
            again = (last > 0) & ~moved(o, o.index(unravel(last, grid)), last)

            @when(again)
            def _(o=o):
                _ops.wait_smem_to_gmem(0)
                last_store([o])

        # Outputs whose block never changes are stored once, from the slot of the last step.
        if invariant:
            if not variant:
                _ops.commit_smem()
            last_store(invariant)

    if stored and static:
        finish()
    elif stored:
        when(steps > 0)(finish)
    return carry
