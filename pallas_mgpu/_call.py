"""`pallas_call`: runs a body on blocks of arrays, over a grid.

A `pallas_call` is a kernel whose body is one pipeline. The parallel axes of the grid become the
grid of the launch. The sequential axes become, in order, the grid of the pipeline that every block
runs. Index maps receive the indices along both.

`pl.program_id` reads the indices from the environment (`Env.programs`). Each step, and each call of
an index map, sets them. So if an index map asks for the index along a sequential axis, it gets that
of the step whose block is being fetched, not of the step that is running."""

import contextlib
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from . import _core, _sizes, _types, tree
from ._control import scoped
from ._kernel import Definition, leaf_names
from ._names import NotSpecified, accepts, show
from ._pipeline import Operand, check_slots, run_steps
from ._schedule import unravel
from ._trace import Array, check_arity, env, first_line, parameter_names
from ._types import (
    GMEM,
    SMEM,
    GenericBlockSpec,
    GenericMemorySpace,
    MemoryRef,
    Mesh,
    _Frozen,
    ints,
)

_SHORT = 65535  # blocks along CUDA's y and z


class NoBlockSpec(NotSpecified):
    """Type of ``pl.no_block_spec``, which stands for whole arrays in the default memory space."""

    __slots__ = ()

    def __repr__(self):
        return "NoBlockSpec()"


no_block_spec = NoBlockSpec()


class GridSpec(_Frozen):
    """The grid, specs and scratch of a :func:`pallas_call` in one object."""

    __slots__ = ("grid", "in_specs", "out_specs", "scratch_shapes")

    @accepts(scratch_specs="scratch_shapes")
    def __init__(self, grid=(), in_specs=no_block_spec, out_specs=no_block_spec, scratch_shapes=()):
        self._set(grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes)


class CompilerParams(Protocol):
    """Protocol of compiler parameters of any backend. This backend has
    :class:`plgpu.CompilerParams`."""


class CostEstimate(_Frozen):
    """The cost of a kernel. Accepted for compatibility and ignored."""

    __slots__ = ("flops", "transcendentals", "bytes_accessed", "remote_bytes_transferred")

    def __init__(self, flops, transcendentals, bytes_accessed, remote_bytes_transferred=0):
        self._set(
            flops=flops,
            transcendentals=transcendentals,
            bytes_accessed=bytes_accessed,
            remote_bytes_transferred=remote_bytes_transferred,
        )

    def to_json(self):
        """The fields as JSON, in bytes."""
        body = ", ".join(f'"{k}": {getattr(self, k)}' for k in self.__slots__)
        return f"{{{body}}}".encode("ascii")


def _read_grid(grid):
    """``(sizes, names)`` of a grid; names is None if the axes have none."""
    what = "pallas_call: grid"
    axes = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    named = bool(axes) and all(isinstance(a, (tuple, list)) and len(a) == 2 for a in axes)
    names = tuple(a[0] for a in axes) if named else None
    sizes = tuple(a[1] for a in axes) if named else axes
    if any(isinstance(n, Array) for n in sizes):
        raise NotImplementedError(f"{what}: sizes must be known before the call, got a traced one")
    sizes = ints(sizes, what)
    if min(sizes, default=1) < 1:
        raise ValueError(f"{what} must be positive, got {sizes}")
    if names and len(set(names)) < len(names):
        raise ValueError(f"{what}: axis names must differ, got {names}")
    return sizes, names


def _is_spec(x):
    return isinstance(x, (GenericBlockSpec, NoBlockSpec))


class _Call(Definition):
    who = "pallas_call"

    def __init__(self, body, out_shape, grid, in_specs, out_specs, scratch, aliases, **options):
        self.grid, self.grid_names = _read_grid(grid)
        params = options["params"]
        semantics = getattr(params, "dimension_semantics", None)
        if semantics is None:
            semantics = ("parallel",) * len(self.grid)
        if not isinstance(semantics, (tuple, list)) or len(semantics) != len(self.grid):
            raise ValueError(
                f"pallas_call: dimension_semantics needs one entry for each of the"
                f" {len(self.grid)} grid axes, got {show(semantics)}"
            )
        self.parallel = [str(s) == "parallel" for s in semantics]
        # CUDA limits y and z, the axes before the last: larger grids are launched as one axis
        launch = tuple(n for n, p in zip(self.grid, self.parallel) if p)
        self.folded = math.prod(launch[-2:-1]) > _SHORT or math.prod(launch[:-2]) > _SHORT
        if self.folded and math.prod(launch) >= 2**31:
            raise ValueError(f"pallas_call: at most 2**31 - 1 programs are possible, got {launch}")
        mesh = Mesh(
            grid=(math.prod(launch),) if self.folded else launch, kernel_name=options.pop("name")
        )
        super().__init__(body, out_shape, scratch, mesh=mesh, **options)
        if any(_sizes.is_open(o.shape) for o in self.outs):
            raise TypeError(
                "pallas_call: out_shape has sizes that are known when the kernel is called"
                " (plgpu.dim), which are for plgpu.kernel(in_shapes=); its pipelines are"
                " plgpu.emit_pipeline"
            )
        self.out_container = tuple
        self.in_specs, self.out_specs = in_specs, out_specs
        self.aliases = self._check_aliases(aliases)

    def _check_params(self, params):
        n = params.max_concurrent_steps
        if not hasattr(n, "__index__") or isinstance(n, bool) or n < 1:
            raise ValueError(
                f"pallas_call: max_concurrent_steps must be a positive int, got {show(n)}"
            )

    def _check_aliases(self, aliases):
        if not isinstance(aliases, Mapping):
            raise TypeError(
                "pallas_call: input_output_aliases must be a dict of input index to output index,"
                f" got {show(aliases)}"
            )
        out = {}
        for i, o in aliases.items():
            i, o = ints((i, o), "pallas_call: input_output_aliases: indices")
            if not 0 <= o < len(self.outs):
                raise ValueError(
                    f"pallas_call: input_output_aliases names output {o}, and there are"
                    f" {len(self.outs)}"
                )
            if o in out.values():
                raise ValueError(
                    f"pallas_call: input_output_aliases gives output {o} to two inputs"
                )
            out[i] = o
        return out

    def check_operands(self, shapes):
        for i, o in self.aliases.items():
            if not 0 <= i < len(shapes):
                raise ValueError(
                    f"pallas_call: input_output_aliases names input {i}, and there are"
                    f" {len(shapes)}"
                )
            (shape, dtype), out = shapes[i], self.outs[o]
            if (tuple(shape), dtype) != (out.shape, out.dtype):
                raise ValueError(
                    f"pallas_call: input {i} and output {o} of input_output_aliases must agree,"
                    f" got {dtype} of shape {tuple(shape)} and {out.dtype} of shape {out.shape}"
                )

    def _specs(self, specs, structure, what, refs):
        """A flat list of specs, one for each ref."""
        if isinstance(specs, NoBlockSpec):
            return [GenericBlockSpec()] * len(refs)
        if isinstance(specs, GenericBlockSpec):
            specs = (specs,)
        if isinstance(specs, list):
            specs = tuple(specs)
        row = isinstance(specs, tuple) and not hasattr(specs, "_fields")
        if what == "out_specs" and self.wrapped and not row:  # as out_shape was
            specs = (specs,)
        leaves, given = tree.flatten(specs, is_leaf=_is_spec)
        for s in leaves:
            if not _is_spec(s):
                raise TypeError(f"pallas_call: {what} must hold BlockSpecs, got {show(s)}")
        if given != structure:
            of = "arguments" if what == "in_specs" else "results (out_shape)"
            raise ValueError(
                f"pallas_call: {what} must have the structure of the {of},"
                f" {tree.describe(structure)}; got {tree.describe(given)}"
            )
        return [GenericBlockSpec() if isinstance(s, NoBlockSpec) else s for s in leaves]

    def _operand(self, spec, ref, what, at, place):
        """The checked operand of the pipeline. ``at(steps)``: sets the indices along the whole
        grid.
        ``place``: the block stays in GMEM."""
        if spec.collective_axes:
            raise ValueError(
                f"pallas_call: {what}: collective_axes need clusters; use plgpu.kernel and"
                " emit_pipeline_warp_specialized"
            )
        index_map = spec.index_map
        if index_map is not None:
            check_arity(
                index_map,
                f"pallas_call: the index map of {what}",
                f"one index for each of the {len(self.grid)} grid axes",
                len(self.grid),
            )

            def mapped(*steps):
                with at(steps) as indices:
                    return index_map(*indices)

            mapped.of_grid = index_map
            spec = spec.replace(index_map=mapped)
        if place:
            spec = spec.replace(memory_space=GMEM)
        cut = spec.memory_space is GMEM
        if spec.memory_space is GenericMemorySpace.ANY:
            spec = spec.replace(block_shape=None, index_map=None)
        elif spec.block_shape is not None and len(spec.block_shape) != ref.ndim:
            raise ValueError(
                f"pallas_call: {what}: block_shape {spec.block_shape} has"
                f" {len(spec.block_shape)} dims, the array has {ref.ndim} (shape {ref.shape});"
                " None takes a dim away"
            )
        grid = tuple(self._sequential())
        return Operand(spec, ref, what, grid, self.who, cut=cut)

    def _warn_outside(self, operand):
        """On the interpreter, warn about the first grid point whose block is entirely outside the
        array, which is legal but rarely intended. Only for index maps that return plain ints."""
        if operand.spec.index_map is None or math.prod(self.grid) > _MOST_POINTS:
            return
        index_map = inspect.unwrap(operand.spec.index_map).of_grid
        code = getattr(inspect.unwrap(index_map), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        e = env(self.who)
        for point in np.ndindex(*self.grid):
            e.programs, before = point, e.programs
            try:
                index = index_map(*point)
            finally:
                e.programs = before
            if not all(isinstance(i, (int, np.integer)) for i in index):
                return  # only known on the device
            for start, n in zip(operand.starts(index), operand.ref.shape):
                if start[0] >= n or start[1] <= 0:
                    warnings.warn(
                        f"pallas_call {self.name}: the index map of {operand.what}{where} gives"
                        f" block {tuple(map(int, index))} at grid point {point}, which lies outside"
                        f" of the array of shape {operand.ref.shape}: zeros are read there, and"
                        " nothing is written",
                        stacklevel=2,
                    )
                    return

    def _sequential(self):
        return [n for n, p in zip(self.grid, self.parallel) if not p]

    def _run_body(self, args, names, scratch):
        e = env(self.who)
        here = [_core.axis_index("grid", e.leading + k) for k in range(len(self.mesh.grid))]
        if self.folded:
            here = unravel(here[0], [n for n, p in zip(self.grid, self.parallel) if p])
        ids = iter(here)
        ids = [next(ids) if p else None for p in self.parallel]
        e.grid = self.grid
        for k, (name, size) in enumerate(zip(self.grid_names or (), self.grid)):
            e.axes[name] = ("program", k, size)

        @contextlib.contextmanager
        def at(steps):
            it, before = iter(steps), e.programs
            e.programs = tuple(next(it) if i is None else i for i in ids)
            try:
                yield e.programs
            finally:
                e.programs = before

        try:
            self._trace_form(args, names, scratch, at, frozenset())
        except _InPlace as found:
            self._trace_form(args, names, scratch, at, found.which)

    def _trace_form(self, args, names, scratch, at, in_place):
        """Trace the body in a pipeline. ``in_place``: the operands, such as "in_specs[0]", whose
        blocks are not staged although their specs permit it."""
        n_in = len(args) - len(self.out_structure[2])
        ins, in_structure = tree.flatten(tuple(args[:n_in]))
        outs, _ = tree.flatten(tuple(args[n_in:]))
        operands = [
            [
                self._operand(s, r, f"{what}[{k}]", at, f"{what}[{k}]" in in_place)
                for k, (s, r) in enumerate(zip(self._specs(specs, structure, what, refs), refs))
            ]
            for what, specs, structure, refs in (
                ("in_specs", self.in_specs, in_structure, ins),
                ("out_specs", self.out_specs, self.out_structure, outs),
            )
        ]
        if self.interpret and self.interpret.out_of_bounds_reads == "raise" and not in_place:
            for o in (*operands[0], *operands[1]):
                self._warn_outside(o)
        mcs = self.params.max_concurrent_steps.__index__()
        check_slots([o.spec for o in operands[0]], mcs, "pallas_call: ")

        def steps(*scratch, **named_scratch):
            def step(indices, *refs):
                n = len(ins)
                with at(indices):
                    result = self.body(
                        *tree.unflatten(in_structure, refs[:n]),
                        *tree.unflatten(self.out_structure, refs[n:]),
                        *scratch,
                        **named_scratch,
                    )
                self._check_result(result)

            def traced():
                if not in_place:
                    self._choose_forms(*operands, at)

            grid = tuple(self._sequential())
            parts = [*in_structure[2], *self.out_structure[2]]
            given = iter(parameter_names(self.body, len(parts)))
            of_leaves = leaf_names(parts, [next(given, None) for _ in parts])
            run_steps(step, grid, *operands, mcs, None, of_leaves, last=True, traced=traced)

        positional, keyword = scratch, {}
        if isinstance(scratch, Mapping):
            positional, keyword = (), scratch
        self._check_arity(len(args), len(positional), keyword)
        if self.scratch:
            scoped(steps, positional, keyword, names, (), first_line(self.body))
        else:
            steps()

    # ---- blocks that are better left in GMEM ----

    def _choose_forms(self, ins, outs, at):
        """After a trace with staged blocks, raise `_InPlace` if some blocks should stay in GMEM.

        That is possible for operands whose elements the body only loads, stores and updates. It is
        done

        - for all of them, if the blocks do not fit in SMEM;
        - for outputs if several programs store parts of one block, because a staged block is
          written back whole;
        - if the body uses masks or index arrays, as kernels for Pallas' Triton backend do, which
          address memory themselves: for all except small inputs that are read more than once."""
        staged = [o for o in ins + outs if o.staged]
        uses = {o.what: _core.uses(o.given) for o in staged}
        free = [
            o
            for o in staged
            if _ELEMENTWISE.issuperset(uses[o.what])
            and not (o.variant or o.spec.transforms or o.spec.delay_release)
            and o.spec.memory_space is not SMEM
        ]
        shared = {o.what for o in staged if self._is_shared(o, at)}
        parts = [o for o in outs if o.what in shared and not _PARTS.isdisjoint(uses[o.what])]
        for o in parts:
            if o not in free:
                raise ValueError(
                    f"pallas_call: {o.what}: several programs of the grid store parts of one block,"
                    " and each would write all of its copy in SMEM; use"
                    " BlockSpec(memory_space=plgpu.GMEM), or blocks that differ between programs"
                )
        steps = math.prod(self._sequential())
        slots = min(self.params.max_concurrent_steps.__index__(), steps)
        size = {o.what: math.prod(o.block) * o.ref.dtype.itemsize * slots for o in staged}
        scratch = [x for x in tree.leaves(self.scratch) if isinstance(x, MemoryRef)]
        taken = sum(math.prod(x.shape) * x.dtype.itemsize for x in scratch if _in_smem(x))
        in_place = parts
        room = _core.target()["smem"] - _RESERVED
        if sum(size.values()) + taken > room:
            in_place = free
            names = ", ".join(f"{o.what} ({size[o.what]} bytes)" for o in free)
            if free:
                warnings.warn(
                    f"pallas_call {self.name}: blocks of {names} are accessed in GMEM: all blocks"
                    f" together do not fit the {room} bytes of SMEM. To say so, use"
                    " BlockSpec(memory_space=plgpu.GMEM)",
                    stacklevel=2,
                )
        elif any(not _MASKED.isdisjoint(uses[o.what]) for o in free):
            again = {o.what for o in ins if o.staged and len(uses[o.what]) > 1}
            again = {x for x in again - shared if size[x] <= _OFTEN_BYTES}
            in_place = [o for o in free if o.what not in again]
        if in_place:
            raise _InPlace(frozenset(o.what for o in in_place))

    def _is_shared(self, operand, at):
        """May several programs of the launch have the same block of the operand?"""
        axes = [_core.as_array(0, "int32") for _ in self._sequential()]
        index = [x for x in operand.index(axes) if isinstance(x, Array)]
        with at(axes) as programs:
            return any(
                n > 1 and p and not (index and _core.depends(index, [i]))
                for i, n, p in zip(programs, self.grid, self.parallel)
            )


class _InPlace(Exception):
    """Raised to trace the body again with the blocks of some operands left in GMEM."""

    def __init__(self, which):
        super().__init__(which)
        self.which = which


# what `_core.uses` reports about a ref
_PARTS = {"masked_store", "part_store", "atomic"}
_MASKED = {"masked_load", "masked_store", "atomic"}
_ELEMENTWISE = {"load", "store", "part_store"} | _MASKED
_RESERVED = 1024  # bytes of SMEM that blocks leave to barriers and reductions
_MOST_POINTS = 4096  # of a grid whose index maps are evaluated at every point
_OFTEN_BYTES = 32768  # of an input that is read repeatedly: several programs fit on an SM


def _in_smem(x):
    return x.memory_space is SMEM and isinstance(x.dtype, np.dtype)


_NO_ALIASES: dict[int, int] = {}


def _right_form(args, kwargs, value):
    """For `accepts`: dimension_semantics as a keyword, as in TPU examples."""
    raise TypeError(
        "pallas_call: no argument 'dimension_semantics'; the right form is"
        " compiler_params=plgpu.CompilerParams(dimension_semantics=...)"
    )


@accepts(backend=None, dimension_semantics=_right_form)
def pallas_call(
    kernel,
    out_shape,
    *,
    grid_spec=None,
    grid=(),
    in_specs=no_block_spec,
    out_specs=no_block_spec,
    scratch_shapes=(),
    input_output_aliases=_NO_ALIASES,
    debug=False,
    interpret=False,
    name=None,
    compiler_params=None,
    cost_estimate=None,
    metadata=None,
):
    """Make a kernel that runs a body on blocks of its arrays, once for every point of a grid.

    kernel: the body, ``kernel(*inputs, *outputs, *scratch)``; it gets refs and returns None.
    out_shape: pytree of objects with shape and dtype; a list is returned as a tuple.
    grid: an int, a tuple of ints, or a tuple of (name, size) pairs for ``lax.axis_index``.
    in_specs, out_specs: BlockSpecs in the structure of the arguments and of ``out_shape``, or one
        spec for one array; by default whole arrays. Blocks are staged in SMEM, or left in GMEM,
        where the body gets a view of its block (``memory_space=plgpu.GMEM``, and by default in the
        cases that docs/language.md lists). Blocks may overhang the array: there, zeros are read and
        nothing is written.
    scratch_shapes: descriptors of scratch memory of each block.
    grid_spec: a :class:`GridSpec`, instead of the four above.
    input_output_aliases: dict of flat input index to flat output index. The output starts as the
        input, and the body sees one memory.
    compiler_params: a :class:`plgpu.CompilerParams`. Grid axes whose ``dimension_semantics`` are
    not "parallel" become a loop inside every block, with ``max_concurrent_steps`` steps in flight
    (see Pipelines in docs/language.md). cost_estimate, metadata: no effect.

    The result is called with arrays, like that of :func:`plgpu.kernel`. Specs that do not fit the
    arrays raise ValueError or NotImplementedError when it is called.
    """
    if grid_spec is not None:
        given = (grid, in_specs, out_specs, scratch_shapes)
        if not (grid == () and scratch_shapes == () and in_specs is out_specs is no_block_spec):
            raise ValueError(
                "pallas_call: grid_spec holds grid, in_specs, out_specs and scratch_shapes; give"
                f" either it or those, got both (those: {show(given)})"
            )
        if not isinstance(grid_spec, GridSpec):
            raise TypeError(f"pallas_call: grid_spec must be a pl.GridSpec, got {show(grid_spec)}")
        grid, scratch_shapes = grid_spec.grid, grid_spec.scratch_shapes
        in_specs, out_specs = grid_spec.in_specs, grid_spec.out_specs
    if not (compiler_params is None or isinstance(compiler_params, _types.CompilerParams)):
        raise TypeError(
            f"pallas_call: compiler_params must be plgpu.CompilerParams, got"
            f" {show(compiler_params)}"
        )
    return _Call(
        kernel,
        out_shape,
        grid,
        in_specs,
        out_specs,
        scratch_shapes,
        input_output_aliases,
        params=compiler_params,
        interpret=interpret,
        debug=debug,
        name=name,
    ).make()
