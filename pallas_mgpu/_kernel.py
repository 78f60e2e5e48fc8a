"""`kernel`: from a Python body to a callable on arrays.

`_core.Kernel` is the callable; it looks a call up by its argument signature and asks
`Definition.trace` for a graph where it has none. Nested arguments (pytrees) take a slower path,
with one `_core.Kernel` for each structure; mutable arrays, as arguments or in the closure of the
body, are handled by a `RefKernel`."""

import copy
import functools
import inspect
import math
import weakref
from collections.abc import Mapping

import numpy as np

from . import _core, _introspect, _mutable, _profile, _sizes, _trace, tree
from ._batch import Batch, Batched, call_batched
from ._control import Rounds, scoped
from ._flags import enable_poison_buffers
from ._frameworks import call_eager, is_jax_on_gpu, is_jax_traced, special
from ._mutable import MutableArray, closed_over, kernel_dtype, rebound
from ._names import NOT_SPECIFIED, check_keywords, deprecated, later, show
from ._semaphores import SharedScratch
from ._types import (
    GMEM,
    CompilerParams,
    InterpretParams,
    MemoryRef,
    Mesh,
    RefUnion,
    ShapeDtypeStruct,
)

_html = later("_notebook", "html")


def _either(new, old, new_name, old_name):
    """The value of a parameter of `kernel` that has two names."""
    if old is NOT_SPECIFIED:
        return () if new is NOT_SPECIFIED else new
    if new is not NOT_SPECIFIED:
        raise ValueError(f"Cannot specify both {new_name} and {old_name}; use {new_name}")
    deprecated(f"kernel: {old_name} is an older spelling; use {new_name}=", 3)
    return old


def is_shaped(x):
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def _checked(x, what):
    """A ShapeDtypeStruct that a kernel accepts; ValueError for others."""
    if len(x.shape) > 8:
        raise ValueError(f"{what} has {len(x.shape)} dimensions; at most 8 are supported")
    if not all(isinstance(d, _sizes.Dim) or 0 < d < 2**31 for d in x.shape):
        raise ValueError(
            f"{what} has shape {x.shape}; every extent must be at least 1 and less than 2**31"
        )
    if not _sizes.is_open(x.shape) and x.size > _sizes.ELEMENTS:
        raise ValueError(f"{what} has shape {x.shape}, {x.size} elements; at most 2**46")
    return x


def _open_bits(shape):
    """The dimensions of an operand that calls may differ in, a bit each."""
    return sum(1 << d for d, x in enumerate(shape or ()) if isinstance(x, _sizes.Dim))


def _read_in_shapes(in_shapes, who):
    """Tuples of ints, sizes and None (as the array has it), or None for whole shapes."""
    if not isinstance(in_shapes, (tuple, list)):
        raise TypeError(f"{who}: in_shapes must be a tuple of shapes, got {show(in_shapes)}")
    out = []
    for k, shape in enumerate(in_shapes):
        ok = shape is None or isinstance(shape, (tuple, list))
        for d in shape or () if ok else ():
            ok = ok and (d is None or isinstance(d, (int, _sizes.Dim)))
        if not ok:
            raise TypeError(
                f"{who}: in_shapes[{k}] must be None or a tuple of ints, plgpu.dim and None, got"
                f" {show(shape)}"
            )
        out.append(None if shape is None else tuple(shape))
    return tuple(out)


class Definition:
    """Everything that is known before a call: the body, its mesh, its outputs and scratch."""

    who = "kernel"
    aliases: dict[int, int] = {}  # operand leaf: the output leaf that starts as its copy
    levels: tuple = ()  # of vmap, outermost first: (in_axes, out_axes)
    closed = False  # each call's shapes have a program, although in_shapes has sizes
    in_shapes: tuple | None = None  # of operand leaves: shapes with sizes (plgpu.dim), or None
    devices: tuple = ()  # axes of the mesh of devices: (name, size)

    def __init__(self, body, out_type, scratch, params, mesh, interpret, debug):
        if not callable(body):
            raise TypeError(f"{self.who}: body must be callable, got {show(body)}")
        if params is None:
            params = CompilerParams()
        if not isinstance(params, CompilerParams):
            raise TypeError(
                f"{self.who}: compiler_params must be plgpu.CompilerParams, got {show(params)}"
            )
        self._check_params(params)
        if not isinstance(scratch, (tuple, list, Mapping)):
            raise TypeError(
                f"{self.who}: scratch_types must be a tuple, list or dict of descriptors, got"
                f" {show(scratch)}"
            )
        if isinstance(scratch, Mapping) and not all(isinstance(k, str) for k in scratch):
            raise TypeError(
                f"{self.who}: the keys of scratch_types are parameter names of the body, got"
                f" {tuple(scratch)}"
            )
        if isinstance(interpret, str) and interpret == "emulate":
            interpret = InterpretParams(backend="emulate")
        if not (interpret is None or isinstance(interpret, (bool, InterpretParams))):
            raise TypeError(
                f"{self.who}: interpret must be a bool, 'emulate' or plgpu.InterpretParams, got"
                f" {show(interpret)}"
            )
        self.body, self.scratch, self.params, self.mesh = body, scratch, params, mesh
        self.interpret = InterpretParams() if interpret is True else interpret or None
        self.debug = debug
        self.batched = {}  # mapped kernels, by the axes of their arguments
        self.scopes = {}  # names of the scopes that the profiler knows, and their numbers
        self.name = mesh.kernel_name or _body_name(body)
        # out_type: a tuple or list gives one body argument for each element, anything else one
        self.wrapped = not (
            isinstance(out_type, (tuple, list)) and not hasattr(out_type, "_fields")
        )
        items = (out_type,) if self.wrapped else tuple(out_type)
        leaves, self.out_structure = tree.flatten(items, is_leaf=is_shaped)
        self.outs = []
        for x in leaves:
            if not is_shaped(x):
                raise TypeError(
                    f"{self.who}: out_type must have shape and dtype: a"
                    f" plgpu.ShapeDtypeStruct(shape, dtype), or a pytree of them; got {show(x)}"
                )
            if getattr(x, "memory_space", GMEM) is not GMEM:
                raise ValueError(f"{self.who}: an output is in GMEM, got {show(x)}")
            self.outs.append(_checked(ShapeDtypeStruct(x.shape, x.dtype), f"{self.who}: out_type"))
        self.out_container = list if isinstance(out_type, list) else tuple
        flat = tuple(s == tree.LEAF for s in self.out_structure[2])
        self.simple_outputs = all(flat)

    def _check_params(self, params):
        if params.dimension_semantics is not None:
            raise NotImplementedError(
                "kernel: dimension_semantics is for pl.pallas_call; use lax.fori_loop or"
                " plgpu.emit_pipeline for sequential axes"
            )

    def check_operands(self, specs):
        """Check ``specs``, the (shape, dtype) of each operand as the body sees it."""

    def make(self, structure=None):
        """The callable for flat arguments, or for one structure of nested arguments."""
        kind = "single" if self.wrapped else self.out_container.__name__
        options = {"interpret": self.interpret, "outputs": kind, "debug": self.debug}
        if not self.simple_outputs or self.params.profile_space:
            options["outputs"] = "tuple"
            options["unflatten"] = self.unflatten
        if self._keeps_open():
            options["open"] = tuple(map(_open_bits, self.in_shapes))
        structured = _Structured(self)
        if structure is None:
            options["structured"] = structured
        kernel = _core.Kernel(self.name, functools.partial(self.trace, structure), options)
        kernel.definition = self
        structured.kernel = weakref.ref(kernel)
        return _introspect.dress(kernel, self.body)

    def signature(self):
        return _introspect.signature(self)

    def describe(self):
        return _introspect.describe(self)

    def with_closure(self):
        """The callable if the body closes over mutable arrays, otherwise None."""
        refs = closed_over(self.body)
        return RefKernel(self, refs) if refs else None

    def for_shapes(self):
        """The callable whose programs are for the shapes of a call alone."""
        out = copy.copy(self)
        out.closed, out.batched = True, {}
        return out.make()

    def mapped(self, in_axes, out_axes):
        """This definition, mapped over one more axis of its arrays."""
        out = copy.copy(self)
        out.levels = ((in_axes, out_axes), *self.levels)
        out.batched = {}
        return out

    def output_specs(self, structure, specs):
        """``[(shape, dtype), ...]`` of the outputs for such operands."""
        batch = Batch(self, structure, specs)
        self.check_operands(batch.in_shapes)
        known = _sizes.Known(self.in_shapes or (), [s for s, _ in batch.in_shapes])
        return [(known.of(s), o.dtype) for s, o in zip(batch.out_shapes, self.outs)]

    def _opened(self, specs):
        """Specs of operands with the sizes that `in_shapes` names."""
        if not self.in_shapes:
            return specs
        if len(self.in_shapes) != len(specs):
            raise TypeError(
                f"{self.who} {self.name}: in_shapes has {len(self.in_shapes)} shapes, and the call"
                f" {len(specs)} arrays"
            )
        out = []
        for k, (shape, (given, dtype)) in enumerate(zip(self.in_shapes, specs)):
            want = given if shape is None else shape
            fits = len(want) == len(given) and all(
                w == g for w, g in zip(want, given) if isinstance(w, int)
            )
            if not fits:
                raise ValueError(
                    f"{self.who} {self.name}: argument {k} has shape {tuple(given)}, and"
                    f" in_shapes[{k}] is {want}"
                )
            out.append((tuple(g if w is None else w for w, g in zip(want, given)), dtype))
        return out

    def _keeps_open(self):
        """Does one program serve all sizes (plgpu.dim)? Else each call's shapes have their own."""
        if (
            self.closed
            or not self.in_shapes
            or self.levels
            or self.devices
            or self.params.profile_space
        ):
            return False
        kinds = (MemoryRef, RefUnion)
        is_leaf = lambda x: isinstance(x, kinds) or hasattr(x, "memory_space")  # noqa: E731
        leaves = tree.leaves(self.scratch, is_leaf=is_leaf)
        return not any(isinstance(x, MemoryRef) and x.memory_space is GMEM for x in leaves)

    def unflatten(self, arrays):
        """Nested outputs from flat ones."""
        if self.params.profile_space:
            *arrays, words = arrays
            _profile.write(self, words)
        out = tree.unflatten(self.out_structure, arrays)
        return out[0] if self.wrapped else self.out_container(out)

    def trace(self, structure, specs):
        """``(graph, [(shape, dtype), ...] of the outputs, number of GMEM scratch refs)`` for
        arguments with the given ``(shape, dtype)``."""
        mesh = self.mesh
        n = len(specs) if structure is None else len(structure[2])
        for k, (shape, dtype) in enumerate(specs):
            _checked(ShapeDtypeStruct(shape, dtype), f"{self.who} {self.name}: argument {k}")
        batch = Batch(self, structure or (None, None, (tree.LEAF,) * n), specs)
        grid, known = mesh.grid, None
        opened = self._opened(batch.in_shapes)
        if self._keeps_open():
            specs = batch.in_shapes = opened
        elif self.in_shapes:
            known = _sizes.Known(self.in_shapes, [s for s, _ in batch.in_shapes])
            grid, batch.out_shapes = known.of(grid), [known.of(s) for s in batch.out_shapes]
        self.check_operands(batch.in_shapes)
        is_open = any(map(_sizes.is_open, (grid, *(s for s, _ in specs), *batch.out_shapes)))
        t = _core.Trace(
            self.name,
            (*batch.sizes, *_sizes.most_of(grid)),
            mesh.cluster,
            mesh.num_threads or 1,
            approx_math=self.params.approx_math,
            no_auto_barriers=self.params.unsafe_no_auto_barriers,
            exact_division=self.params.exact_division,
            reduction_scratch=self.params.reduction_scratch_bytes,
            mesh=tuple(size for _, size in self.devices),
            **_profile.trace_options(self),
        )
        positional = () if isinstance(self.scratch, Mapping) else self.scratch
        arguments = n if structure is None else len(structure[2])
        count = arguments + len(self.out_structure[2]) + len(positional)
        named = len(_trace.parameter_names(self.body))
        names = iter(_trace.parameter_names(self.body, count))
        limits = _sizes.limits([*(s for s, _ in specs), *batch.out_shapes])
        t.enter()
        e = _trace.Env(mesh, len(batch.sizes), self.devices)
        if self.devices:
            e.blocks = (*batch.sizes, *grid), tuple(mesh.cluster)
        e.scopes = _profile.scopes(self)
        tracked = getattr(self.interpret, "detect_uninitialized", False)
        e.poisons = "block" if enable_poison_buffers.value and not tracked else None
        _trace.push(e)
        done = False
        try:
            arg_names = [next(names, None) for _ in range(arguments)]
            if structure is not None:
                arg_names = leaf_names(structure[2], arg_names)
            typed = [(_sizes.type_of(s, limits), d) for s, d in specs]
            refs = [t.operand(*x, name) for x, name in zip(typed, arg_names)]
            outs_of = self.out_structure[2]
            out_names = [next(names, "out") for _ in outs_of]
            out_names = [x if arguments + k < named else "out" for k, x in enumerate(out_names)]
            out_names = leaf_names(outs_of, out_names)
            begins_as = {o: i for i, o in self.aliases.items()}
            outs = [
                t.output(_sizes.type_of(shape, limits), o.dtype, name, alias=begins_as.get(k, -1))
                for k, (shape, o, name) in enumerate(zip(batch.out_shapes, self.outs, out_names))
            ]
            e.grid, e.sizes = grid, known
            if is_open:
                e.sizes = _sizes.Table(t, limits)
                self._number_sizes(t, e.sizes, [s for s, _ in specs], batch.out_shapes)
            e.rounds = Rounds(e)
            if self.params.profile_space:
                t.output(_profile.shape(self, batch.sizes), np.int32, "traces")
            names = tuple(names)
            scratch, n_scratch = self._gmem_scratch(t, batch.sizes, grid, names)
            refs = batch.views(refs, batch.in_axes)
            outs = batch.views(outs, batch.out_axes)
            for i, o in self.aliases.items():
                refs[i] = outs[o]  # the same memory
            args = refs if structure is None else tree.unflatten(structure, refs)
            out_args = tree.unflatten(self.out_structure, outs)
            self._run_body([*args, *out_args], names, scratch)
            graph = t.finish()
            done = True
        except Exception as e:
            _trace.add_place(e)
            self._name_none(e, structure)
            _sizes.explain(e, limits)
            raise
        finally:
            _trace.pop()
            t.exit()
            if not done:
                t.abort()
        if self.debug:
            print(graph.text())
        specs = [(_sizes.type_of(s, limits), o.dtype) for s, o in zip(batch.out_shapes, self.outs)]
        if self.params.profile_space:
            specs.append((_profile.shape(self, batch.sizes), np.int32))
        return graph, specs, n_scratch

    def _number_sizes(self, t, table, operands, outputs):
        """The sizes of a trace: those of arguments and of the grid are in its graph then."""
        for k, shape in enumerate(operands):
            table.bind(k, shape)
        for k, shape in enumerate((*operands, *outputs)):
            if _sizes.is_open(shape):
                t.extents(k, table.numbers_of(shape))
        if _sizes.is_open(self.mesh.grid):
            t.grid_sizes(table.numbers_of(self.mesh.grid))

    def _gmem_scratch(self, t, batch, grid, names):
        """The scratch types, with refs in place of those in GMEM, and the number of these. Each is
        an additional output whose first dimension counts the blocks, or the elements of a batch if
        blocks share it; a block sees its own part. Positional ones have ``names``."""
        sizes, count, shared = (*batch, *grid, *self.mesh.cluster), 0, set()

        def replaced(name, x):
            nonlocal count
            if not (isinstance(x, MemoryRef) and x.memory_space is GMEM):
                return x
            if x.transforms:
                raise ValueError(f"{self.who} {self.name}: {x}: transforms are for SMEM")
            is_shared = isinstance(x, SharedScratch)
            shape = (math.prod(batch if is_shared else sizes), *x.shape)
            what = f"{self.who} {self.name}: {x} for each of {shape[0]} blocks"
            _checked(ShapeDtypeStruct(shape, x.dtype), what)
            count += 1
            ref = t.output(shape, x.dtype, name or f"scratch{count}", scratch=True)
            if is_shared:
                shared.add(id(ref))
            return ref

        kinds = (MemoryRef, RefUnion)
        is_leaf = lambda x: isinstance(x, kinds) or hasattr(x, "memory_space")  # noqa: E731
        is_named = isinstance(self.scratch, Mapping)
        keys = self.scratch if is_named else [*names, *[None] * len(self.scratch)]
        entries = self.scratch.values() if is_named else self.scratch
        scratch = [
            tree.map(functools.partial(replaced, name), x, is_leaf=is_leaf)
            for name, x in zip(keys, entries)
        ]
        scratch = dict(zip(keys, scratch)) if is_named else scratch
        if not count:
            return self.scratch, 0
        block = _trace.block_number((*batch, *grid), self.mesh.cluster)
        element = _trace.block_number(batch, ())

        def own(x):
            if not isinstance(x, _trace.Ref):
                return x
            return x.at[element if id(x) in shared else block]

        return tree.map(own, scratch, is_leaf=is_leaf), count

    def _name_none(self, e, structure):
        """If the error is about None, name the arguments that are None."""
        if structure is None or "NoneType" not in str(e) or len(e.args) != 1:
            return
        names = _trace.parameter_names(self.body)
        for k, child in enumerate(structure[2]):
            if child != tree.LEAF and child[0] == "none":
                name = f" ({names[k]})" if k < len(names) else ""
                e.args = (f"{e.args[0]}\n  argument {k}{name} of kernel {self.name} is None",)

    def _check_arity(self, n_args, n_scratch, keyword):
        """TypeError if the body cannot be called with that many refs."""
        n_out = len(self.out_structure[2])
        counts = (
            (n_args - n_out, "operand"),
            (n_out, "output"),
            (n_scratch + len(keyword), "scratch ref"),
        )
        operands, outputs, refs = (f"{n} {what}{'s' * (n != 1)}" for n, what in counts)
        outputs += "" if n_out else " (out_type= gives them)"
        gets = f"{operands}, {outputs} and {refs}"
        if keyword:
            gets += f" by name ({', '.join(keyword)})"
        what = f"{self.who} {self.name}: the body"
        _trace.check_arity(self.body, what, gets, n_args + n_scratch, keyword)

    def _run_body(self, args, names, scratch):
        """Call the body in the scope of its scratch, whose parameters have ``names``."""
        positional, keyword = scratch, {}
        if isinstance(scratch, Mapping):
            positional, keyword = (), scratch
        self._check_arity(len(args), len(positional), keyword)
        if not scratch:
            result = self.body(*args)
        else:
            e = _trace.env("kernel")
            e.poisons = e.poisons and "cluster"
            result = scoped(
                functools.partial(self.body, *args),
                positional,
                keyword,
                names,
                self.mesh.thread_name,
                _trace.first_line(self.body),
            )
        self._check_result(result)

    def _check_result(self, result):
        if result is not None:
            raise ValueError(
                f"The body of kernel {self.name!r} must return None (write results to its output"
                f" refs), got {show(result)}"
            )


def _count_numbers(x):
    """How many numbers a list, or a list of lists, consists of; 0 if it contains anything else."""
    if isinstance(x, (int, float)):
        return 1
    counts = [_count_numbers(v) for v in x] if isinstance(x, (list, tuple)) else [0]
    return sum(counts) if all(counts) else 0


class _Structured:
    """Calls with nested arguments: flatten, find the kernel of that structure, call it."""

    def __init__(self, definition):
        self.definition = definition
        self.kernels = {}
        self.refs = None  # for calls with mutable arrays
        self.kernel = None  # weak, of the kernel that this is part of

    def _find(self, args):
        leaves, structure = tree.flatten(args)
        for k, x in enumerate(args):
            if isinstance(x, (list, tuple)) and (n := _count_numbers(x)):
                raise TypeError(
                    f"{self.definition.who} {self.definition.name}: argument {k} is a"
                    f" {type(x).__name__} of numbers, which would be {n} arguments; pass an"
                    " array: np.asarray(..., np.float32)"
                )
        kernel = self.kernels.get(structure)
        if kernel is None:
            kernel = self.kernels[structure] = self.definition.make(structure)
        return kernel, leaves

    def _with_refs(self, args):
        """The kernel for mutable arrays; None if there are none."""
        if not any(isinstance(x, MutableArray) for x in tree.leaves(args)):
            return None
        if self.refs is None:
            self.refs = RefKernel(self.definition)
        return self.refs

    def call(self, args, out, stream):
        if refs := self._with_refs(args):
            return refs(*args, out=out, stream=stream)
        kernel, leaves = self._find(args)
        if any(isinstance(x, Batched) for x in leaves):
            return call_batched(self.definition, args, leaves, out, stream)
        call = special(leaves)
        if call is not None:
            return call(self.kernel(), args, {"out": out, "stream": stream})
        if out is None and stream is None and any(map(is_jax_on_gpu, leaves)):
            return call_eager(self.kernel(), args, {})
        return kernel(*leaves, out=out, stream=stream)

    def lower(self, args, target):
        if refs := self._with_refs(args):
            return refs.lower(*args, target=target)
        kernel, leaves = self._find(args)
        return kernel.lower(*leaves, target=target)


class RefKernel:
    """A kernel with mutable arrays among its arguments, or in the closure of its body.

    The body is wrapped into another kernel, whose outputs are the mutable arrays. They are updated
    in place if the body has no other outputs. Otherwise they are replaced by new arrays that start
    as copies."""

    def __init__(self, definition, closed=()):
        self.definition, self.closed, self.kernels = definition, list(closed), {}
        self.__name__ = definition.name
        _introspect.dress(self, definition.body)
        what = f"{definition.who} {definition.name}"
        if type(definition) is not Definition or definition.levels:
            raise NotImplementedError(
                f"{what}: mutable arrays as arguments of pl.pallas_call or under vmap; use"
                " plgpu.kernel, or input_output_aliases"
            )

    @property
    def __signature__(self):
        return _introspect.signature(self.definition)

    def __repr__(self):
        return _introspect.describe(self.definition)

    def _repr_html_(self):
        return _html(self)

    def __reduce__(self):
        return _introspect.reduce(self)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def _prepare(self, args):
        """The kernel, its operands, and the mutable arrays."""
        leaves, structure = tree.flatten(args)
        passed = [x for x in leaves if isinstance(x, MutableArray)]
        refs = [*passed, *self.closed]
        if len({id(r) for r in refs}) < len(refs):
            raise NotImplementedError(
                f"kernel {self.definition.name}: the same mutable array twice, as arguments or in"
                " the closure"
            )
        is_ref = tuple(isinstance(x, MutableArray) for x in leaves)
        types = tuple((r.shape, kernel_dtype(r)) for r in refs)
        key = structure, is_ref, types
        if key not in self.kernels:
            self.kernels[key] = self._make(structure, is_ref, types)
        operands = [x for x, r in zip(leaves, is_ref) if not r]
        return self.kernels[key], operands, refs

    def _make(self, structure, is_ref, types):
        inner = self.definition
        n_plain, n_refs, n_outs = is_ref.count(False), len(types), len(inner.outs)
        in_place = not n_outs

        def body(*given, **scratch):
            plain = iter(given[:n_plain])
            refs = given[n_plain : n_plain + n_refs]
            passed = iter(refs)
            args = [next(passed if r else plain) for r in is_ref]
            begin = n_plain + (0 if in_place else n_refs)
            outs = tree.unflatten(inner.out_structure, given[begin : begin + n_outs])
            rest = given[begin + n_outs + n_refs :]
            f = rebound(inner.body, self.closed, passed)
            return f(*tree.unflatten(structure, args), *outs, *rest, **scratch)

        body.__name__ = inner.name
        body.parameters, body.inner = self._parameters(structure, is_ref), inner.body
        outs = tuple(inner.outs) + tuple(ShapeDtypeStruct(*t) for t in types)
        interpret = inner.interpret
        outer = Definition(
            body, outs, inner.scratch, inner.params, inner.mesh, interpret, inner.debug
        )
        if not in_place:
            outer.aliases = {n_plain + k: n_outs + k for k in range(n_refs)}
        return outer.make()

    def _parameters(self, structure, is_ref):
        """Names of what the outer body is given: operands and mutable arrays, outputs, the mutable
        arrays again, scratch."""
        inner = self.definition
        n, outs_of = len(structure[2]), inner.out_structure[2]
        positional = () if isinstance(inner.scratch, Mapping) else inner.scratch
        named = len(_trace.parameter_names(inner.body))
        names = list(_trace.parameter_names(inner.body, n + len(outs_of) + len(positional)))
        names += [None] * (n + len(outs_of) - len(names))
        leaves = leaf_names(structure[2], names)
        outs = [names[k] if k < named else "out" for k in range(n, n + len(outs_of))]
        plain = [name for name, r in zip(leaves, is_ref) if not r]
        refs = [name for name, r in zip(leaves, is_ref) if r]
        refs += _mutable.names_of(inner.body, self.closed)
        before = refs if inner.outs else []
        return (*plain, *before, *leaf_names(outs_of, outs), *refs, *names[n + len(outs_of) :])

    def __call__(self, *args, out=None, stream=None):
        if out is not None:
            raise NotImplementedError(
                f"kernel {self.definition.name}: out= together with mutable arrays; make the"
                " outputs mutable arrays as well"
            )
        kernel, operands, refs = self._prepare(args)
        values = [r._value for r in refs]
        n = len(self.definition.outs)
        traced = [is_jax_traced(x) for x in values]
        if not all(traced) and any(map(is_jax_traced, tree.leaves(operands))):
            raise NotImplementedError(
                f"kernel {self.definition.name}: under jax.jit, a mutable array that was made of no"
                " traced array, whose new value would be lost; make it inside the function,"
                " new_ref(jax.numpy.zeros(...)), and return its value"
            )
        if not n:
            kernel(*operands, out=tuple(values), stream=stream)
            return self.definition.unflatten([])
        results = kernel(*operands, *values, stream=stream)
        for r, x in zip(refs, results[n:]):
            r._value = x
        return self.definition.unflatten(results[:n])

    def lower(self, *args, **options):
        """The lowered kernel, as for other kernels."""
        kernel, operands, refs = self._prepare(args)
        in_place = not self.definition.outs
        return kernel.lower(*operands, *(() if in_place else [r._value for r in refs]), **options)


def leaf_names(structures, names):
    """The parameter's name for an argument that is a leaf, and x_0, x_1 ... for the leaves of a
    nested one."""
    out = []
    for s, name in zip(structures, names):
        numbers = range(tree.count(s))
        out += [name] if s == tree.LEAF else [name and f"{name}_{k}" for k in numbers]
    return out


def _body_name(body):
    while isinstance(body, functools.partial):
        body = body.func
    name = getattr(body, "__name__", None)
    named = isinstance(name, str) and name and name.isprintable() and name != "<lambda>"
    return name if named else "anonymous"


def kernel(
    body=NOT_SPECIFIED,
    out_shape=NOT_SPECIFIED,
    *,
    out_type=NOT_SPECIFIED,
    scratch_types=NOT_SPECIFIED,
    scratch_shapes=NOT_SPECIFIED,
    compiler_params=None,
    grid=(),
    grid_names=(),
    cluster=(),
    cluster_names=(),
    num_threads=None,
    thread_name=None,
    interpret=None,
    debug=False,
    **mesh_kwargs,
):
    """Make a GPU kernel from a Python function of refs.

    ``body(*operands, *outputs, *scratch)`` is traced once for each signature and returns None.
    Operands and outputs are refs in GMEM; outputs are uninitialised at the start.

    out_type: pytree of objects with shape and dtype. A tuple or list gives one output argument for
        each element, anything else a single one. ``out_shape`` is the older name, and the only one
        that may be passed by position.
    scratch_types: tuple or list (passed by position) or dict (passed by keyword) of descriptors.
        They are allocated once for each block and shared by its threads. ``plgpu.GMEM(shape,
        dtype)`` allocates global memory that is private to the block and lives as long as the call.
        ``scratch_shapes`` is the older name.
    grid, grid_names: the number of clusters along each axis, and the names for ``lax.axis_index``.
        The names may be omitted.
    cluster, cluster_names: the number of blocks of a cluster along each axis, at most 3 axes.
    num_threads, thread_name: the number of Pallas threads (warpgroups of 128 lanes) of a block.
    in_shapes: for each array argument its shape, as a tuple of ints, :func:`dim` and None (as the
        array has it), or None for all of it. Calls whose arrays differ only in sizes of
        :func:`dim` share one program; ``out_type`` and ``grid`` may use those sizes, too.
    compiler_params: a :class:`CompilerParams`.
    interpret: True or an :class:`InterpretParams` to run on the CPU interpreter.
    debug: print the traced graph.

    Without ``body``, a decorator is returned. The result is called with arrays (NumPy, PyTorch,
    CuPy, JAX, ``DeviceArray``, anything that supports DLPack) and returns arrays of the same kind.
    ``out=`` passes preallocated outputs. ``.lower(*args)`` returns the generated code. TypeError,
    ValueError for invalid arguments.
    """
    in_shapes = mesh_kwargs.pop("in_shapes", None)
    if not mesh_kwargs.keys() <= {"kernel_name"}:
        names = [*inspect.signature(kernel).parameters][:-1]
        check_keywords("kernel", [*names, "in_shapes", "kernel_name"], mesh_kwargs)
    outs = _either(out_type, out_shape, "out_type", "out_shape")
    scratch = _either(scratch_types, scratch_shapes, "scratch_types", "scratch_shapes")
    try:
        mesh = Mesh(
            grid=grid,
            grid_names=grid_names,
            cluster=cluster,
            cluster_names=cluster_names,
            num_threads=num_threads,
            thread_name=thread_name,
            **mesh_kwargs,
        )
    except (TypeError, ValueError) as e:
        e.args = (str(e).replace("Mesh: ", "kernel: ", 1),)
        raise

    def wrap(f):
        definition = Definition(f, outs, scratch, compiler_params, mesh, interpret, debug)
        if in_shapes is not None:
            definition.in_shapes = _read_in_shapes(in_shapes, "kernel")
        return definition.with_closure() or definition.make()

    return wrap if body is NOT_SPECIFIED else wrap(body)
