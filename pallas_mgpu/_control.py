"""Control flow and scopes of kernel bodies: loops, branches, allocation.

Each function builds one op with regions. A body is traced once, or again if a weakly typed carry
must be converted first, or if the body turns out to write refs of `run_state`."""

import contextlib
import itertools
import math

import ml_dtypes
import numpy as np

from . import _core, tree
from ._mutable import run_state_on_host
from ._names import show
from ._trace import (
    Array,
    Leaves,
    Ref,
    as_array,
    as_bools,
    block_number,
    carry_names,
    env,
    parameter_names,
    same_type,
    tracing,
    type_text,
)
from ._types import (
    Barrier,
    ClusterBarrier,
    MemoryRef,
    MemorySpace,
    RefUnion,
    Semaphores,
    SemaphoreType,
    TilingTransform,
    WGMMAAccumulatorRef,
    axis_names,
    ints,
    split_transforms,
)


def _index_scalar(x, what):
    """A Python int or a traced integer scalar; TypeError for anything else."""
    if isinstance(x, Array):
        if x.shape != () or x.dtype.kind not in "iu":
            raise TypeError(f"{what} must be an integer scalar, got {type_text(x)}")
        return x
    if hasattr(type(x), "_plgpu_traced"):  # a size of plgpu.dim
        return x._plgpu_traced()
    try:
        return x.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{what} must be an integer scalar, got {show(x)}") from None


def _int32(x, what):
    """The same as an int32 value; OverflowError for an int that does not fit."""
    try:
        return _core.as_array(x, "int32")
    except OverflowError as e:
        raise OverflowError(f"{what}: {e}") from None


def _loop_bounds(what, *bounds):
    """Bounds of one loop: Python ints if all are static, otherwise some are traced scalars. NumPy
    integers keep their dtype if the other bound is traced."""
    found = [
        x if isinstance(x, np.integer) else _index_scalar(x, f"{what}: {name}")
        for x, name in zip(bounds, ("lower", "upper"))
    ]
    if any(isinstance(x, Array) for x in found):
        return [_core.as_array(x) if isinstance(x, np.integer) else x for x in found]
    return [int(x) for x in found]


def _compare(init, out, what):
    """TypeError unless a body's result matches its carry. True if a weakly typed init must be
    converted."""
    if init.structure != out.structure:
        raise TypeError(
            f"{what} carry input and carry output must have the same pytree structure, got"
            f" {tree.describe(init.structure)} and {tree.describe(out.structure)}"
        )
    repair = False
    for k, (a, b) in enumerate(zip(init.values, out.values)):
        if same_type(a, b):
            continue
        if isinstance(a, Array) and isinstance(b, Array) and a.shape == b.shape and a.weak_type:
            repair = True
            continue
        if isinstance(a, Ref) and isinstance(b, Ref):
            raise TypeError(f"{what}: leaf {k} of the carry is a ref, which must not change")
        raise TypeError(
            f"{what} carry input and carry output must have identical types: leaf {k} goes in as"
            f" {type_text(a)} and comes out as {type_text(b)}"
        )
    return repair


def _repair(op, init, out):
    """Discard the open loop, and convert the weakly typed leaves of its carry to the promotion of
    both types."""
    dtypes = [
        None if same_type(a, b) else _core.promote_types([a, b])[0]
        for a, b in zip(init.values, out.values)
    ]
    op.abandon()
    init.values = [v if d is None else _core.convert(v, d) for v, d in zip(init.values, dtypes)]


def _weak(values):
    return [v.weak_type for v in values]


def _bounds(lower, upper):
    """Bounds of an int32 loop, and the function from its index to one of the user's dtype."""
    strong = {x.dtype for x in (lower, upper) if isinstance(x, Array) and not x.weak_type}
    weak = any(isinstance(x, int) or x.weak_type for x in (lower, upper))
    if len(strong) > 1 or weak and any(d.kind == "u" for d in strong):
        texts = [show(x) if isinstance(x, int) else type_text(x) for x in (lower, upper)]
        raise TypeError(
            "lower and upper arguments to fori_loop must have equal types, got"
            f" {' and '.join(texts)}"
        )
    dtype = strong.pop() if strong else None
    lo, hi = (_int32(x, f"fori_loop: {n}") for x, n in ((lower, "lower"), (upper, "upper")))
    if dtype == "uint32":  # bounds may exceed int32: count the iterations
        trips = _core.convert(_core.where(lower < upper, upper - lower, 0), "int32")
        return _core.as_array(0, "int32"), trips, lambda k: lower + _core.convert(k, dtype)
    if dtype in (None, "int32"):
        return lo, hi, lambda k: k
    return lo, hi, lambda k: _core.convert(k, dtype)


def fori_loop(lower, upper, body_fun, init_val, *, unroll=None, _named=None):
    """``val = init_val; for i in range(lower, upper): val = body_fun(i, val)``.

    The bounds are Python ints or integer scalars of one dtype. The body is traced once, and ``i``
    is always traced. ``unroll``: True unrolls the whole loop; an int n, which must divide the
    number of iterations, unrolls it n times. Both need static bounds (ValueError for an int
    otherwise). TypeError if the types of the carry change.
    """
    env("fori_loop")
    lower, upper = _loop_bounds("fori_loop", lower, upper)
    static = isinstance(lower, int) and isinstance(upper, int)
    copies = _unroll("fori_loop", unroll, max(upper - lower, 0) if static else None)
    lo, hi, index_of = _bounds(lower, upper)
    init = Leaves(init_val, "fori_loop: init_val")
    named = _named or body_fun
    names = [*(parameter_names(named) or (None,))[:1], *carry_names(named, 1, init)]
    state = State()
    while True:
        first = init.arrays()
        op = _core.open("for", (lo, hi, *first, *state.values()), 1, unroll=copies)
        try:
            weak = [static, *_weak(first)]
            args = op.enter(0, weak=[*weak, *_weak(state.values())], names=names[: len(weak)])
            n = len(weak)
            result = state.run(
                lambda a=args, n=n: body_fun(index_of(a[0]), init.rebuild(a[1:n])), args[n:]
            )
            out = Leaves(result, "fori_loop: body_fun")
            repair = _compare(init, out, "fori_loop body")
            if not repair and not state.grew:
                op.leave([*out.arrays(), *state.written()])
                return init.rebuild(state.take(op.close(names=init.names())))
        except BaseException:
            op.abandon()
            raise
        _repair(op, init, out)


def _unroll(what, unroll, trips):
    """The UNROLL attribute: 0 the whole loop, 1 not at all, n copies."""
    if unroll is None or unroll is False:
        return 1
    if unroll is True:
        return 0 if trips is not None else 1
    if not hasattr(unroll, "__index__"):
        raise TypeError(f"{what}: unroll must be a bool or an int, got {show(unroll)}")
    if trips is None:
        if unroll == 1:
            return 1
        raise ValueError(
            f"Can only use `unroll` in `{what}` if the loop bounds are statically known"
        )
    if unroll < 1:
        raise ValueError(f"{what}: unroll must be positive, got {unroll}")
    if trips % unroll:
        raise NotImplementedError(f"{what}: unroll={unroll} does not divide the {trips} iterations")
    return int(unroll)


def while_loop(cond_fun, body_fun, init_val):
    """``val = init_val; while cond_fun(val): val = body_fun(val)``.

    TypeError if the condition is not a bool scalar or the types of the carry change."""
    init = Leaves(init_val, "while_loop: init_val")
    state = State()
    while True:
        n = len(init.arrays())
        first = (*init.arrays(), *state.values())
        op = _core.open("while", first, 2)
        try:
            weak = _weak(first)
            args = op.enter(0, weak=weak, names=carry_names(cond_fun, 0, init))
            pred = state.read(lambda a=args, n=n: cond_fun(init.rebuild(a[:n])), args[n:])
            pred = as_bools(pred, "while_loop: the result of cond_fun")
            op.leave([pred])
            args = op.enter(1, weak=weak, names=carry_names(body_fun, 0, init))
            result = state.run(lambda a=args, n=n: body_fun(init.rebuild(a[:n])), args[n:])
            out = Leaves(result, "while_loop: body_fun")
            repair = _compare(init, out, "while_loop body")
            if not repair and not state.grew:
                op.leave([*out.arrays(), *state.written()])
                return init.rebuild(state.take(op.close(names=init.names())))
        except BaseException:
            op.abandon()
            raise
        _repair(op, init, out)


def _predicate(pred, what):
    if not isinstance(pred, Array):
        pred = as_array(pred, f"{what}: the predicate")
    if pred.shape != ():
        raise TypeError(f"{what}: the predicate must be a scalar, got {type_text(pred)}")
    return pred if pred.dtype == bool else _core.binary("ne", pred, 0)


def _branches(opname, selector, functions, what):
    """IF or SWITCH over ``functions`` without arguments. Their results must have the same types,
    except for weak typing."""
    dtypes, state = None, State()
    while True:
        op = _core.open(opname, (selector,), len(functions))
        try:
            outs, again = [], False
            for k, f in enumerate(functions):
                op.enter(k)
                out = Leaves(state.run(f), what)
                again |= k > 0 and state.grew
                if any(isinstance(v, Ref) for v in out.values):
                    raise ValueError(f"{what}: a branch cannot return a ref")
                if dtypes is not None:
                    out.values = [_core.convert(v, d) for v, d in zip(out.values, dtypes)]
                outs.append(out)
                op.leave([*out.values, *state.written()])
            first = outs[0]
            for out in outs[1:]:
                if out.structure != first.structure:
                    raise TypeError(
                        f"{what}: branches must return the same pytree structure, got"
                        f" {tree.describe(first.structure)} and {tree.describe(out.structure)}"
                    )
            columns = list(zip(*(o.values for o in outs)))
            if not again and all(same_type(col[0], v) for col in columns for v in col):
                return tree.unflatten(first.structure, state.take(op.close()))
            wanted = []
            for k, col in enumerate(columns):
                strong = {v.dtype for v in col if not v.weak_type}
                if len({v.shape for v in col}) > 1 or len(strong) > 1:
                    raise TypeError(
                        f"{what}: branches must have equal output types: leaf {k} is"
                        f" {' and '.join(type_text(v) for v in col)}"
                    )
                wanted.append(strong.pop() if strong else _core.promote_types(list(col))[0])
        except BaseException:
            op.abandon()
            raise
        op.abandon()
        dtypes = wanted


def _operands(operands, what):
    """Convert numbers to traced values, as JAX does."""
    return tree.map(lambda x: x if isinstance(x, Ref) else as_array(x, what), operands)


def cond(pred, true_fun, false_fun, *operands):
    """``true_fun(*operands) if pred else false_fun(*operands)``. Both functions are traced, and
    their results must have the same types (TypeError). ``pred`` is a scalar."""
    for x in operands:
        if isinstance(x, Ref) and x.is_view:
            raise TypeError("cond: a ref view cannot be an operand; close over it")
    operands = _operands(operands, "cond")
    return _branches(
        "if",
        _predicate(pred, "cond"),
        (lambda: true_fun(*operands), lambda: false_fun(*operands)),
        "cond",
    )


def warp_where(mask, on_true, on_false, *, along=None, select=True):
    """``jnp.where(mask, on_true(), on_false)``, in which a warp computes ``on_true`` only if it
    holds a true element of ``mask`` (Hopper).

    mask: a bool array that broadcasts to the shape of the values. on_false: an array or a pytree of
    arrays. on_true: a function that returns the same structure. It may compute element by element,
    and reduce along dims that a warp has all of, as the columns of a product's result, but must not
    access memory (ValueError when the kernel is lowered). along: the last dim of mask, along which
    any true element counts for all; values may then have any last dim, or none. select: with
    False, a warp that computes ``on_true`` takes all of it, without a selection; where the mask is
    false, it must be equal to ``on_false``. Use it for work that is seldom needed, such as
    rescaling an accumulator. TypeError for other masks, or if the structures differ.
    """
    mask = as_bools(mask, "warp_where: mask", "bool array")
    if not mask.shape:
        raise TypeError(f"warp_where: mask must be a bool array, got {type_text(mask)}")
    if along is not None and (len(mask.shape) < 2 or along not in (-1, len(mask.shape) - 1)):
        raise ValueError(
            "warp_where: along must be the last dim of a mask with two dims or more, got"
            f" {show(along)} for {type_text(mask)}"
        )
    on_false = tree.map(lambda x: as_array(x, "warp_where: on_false"), on_false)

    def compute():
        new = tree.map(lambda x: as_array(x, "warp_where: on_true"), on_true())
        if tree.structure(new) != tree.structure(on_false):
            raise TypeError("warp_where: on_true() and on_false differ in structure")
        if not select:
            return new
        if along is None:
            return tree.map(lambda x, y: _core.where(mask, x, y), new, on_false)
        rows = _core.reduce("any", mask, (len(mask.shape) - 1,), False)
        dims = list(range(len(rows.shape)))

        def where(x, y):
            here = rows if x.shape == rows.shape else _core.broadcast_in_dim(rows, x.shape, dims)
            return _core.where(here, x, y)

        return tree.map(where, new, on_false)

    some = _core.reduce("any_in_warp", mask, tuple(range(len(mask.shape))), False)
    with _read_only():
        return _branches("if", some, (compute, lambda: on_false), "warp_where")


class ordered_section:
    """``with plgpu.ext.ordered_section(n):`` Threads 0 to n - 1 of the block execute the section
    one after the other, in cyclic order starting with thread 0 (Hopper).

    Every participating thread must enter the section the same number of times. Asynchronous work
    continues after a thread has left the section: threads that issue their matrix products in turn
    keep the tensor cores busy with the products of one thread while the others compute. All
    sections of a kernel must have the same n. ValueError otherwise, or if the kernel has fewer
    threads; on the interpreter also for a thread that does not participate.
    """

    def __init__(self, num_threads):
        (self.num_threads,) = ints(num_threads, "ordered_section: num_threads")
        if self.num_threads < 1:
            raise ValueError(
                f"ordered_section: num_threads must be positive, got {self.num_threads}"
            )

    def __enter__(self):
        if self.num_threads > 1:
            _core.effect("enter_section", (), n=self.num_threads)

    def __exit__(self, kind, error, traceback):
        if kind is None and self.num_threads > 1:
            _core.effect("leave_section", (), n=self.num_threads)


def switch(index, branches, *operands):
    """``branches[index](*operands)``, with ``index``, an integer scalar, clamped to the valid
    range. The results of all branches must have the same types (TypeError)."""
    branches = tuple(branches)
    if not branches:
        raise ValueError("switch: at least one branch is needed")
    if (
        isinstance(index, (bool, float))
        or isinstance(index, Array)
        and index.dtype.kind not in "iu"
    ):
        raise TypeError(f"switch: the index must be an integer scalar, got {show(index)}")
    operands = _operands(operands, "switch")
    if len(branches) == 1:
        return branches[0](*operands)
    index = _int32(_index_scalar(index, "switch: index"), "switch: index")
    return _branches("switch", index, tuple(lambda f=f: f(*operands) for f in branches), "switch")


def when(condition):
    """``@pl.when(cond)`` executes the decorated function immediately if ``cond`` is true.

    A Python bool decides while tracing; a traced scalar creates a branch. The function must return
    None (TypeError)."""

    def wrap(f):
        def run():
            if f() is not None:
                raise TypeError("pl.when: the function must return None")

        if isinstance(condition, bool):
            if condition:
                run()
            return
        _branches("if", _predicate(condition, "pl.when"), (run, lambda: None), "pl.when")

    return wrap


def loop(lower, upper, *, init_carry=None, step=1, unroll=None):
    """``@pl.loop(lower, upper)`` executes the decorated function immediately, for each index.

    The body is ``body(i)``, or ``body(i, carry) -> carry`` with ``init_carry``. The decorated name
    becomes the final carry. Bounds and ``step`` may be traced. ``unroll`` is as for
    `lax.fori_loop`.
    """

    def wrap(body):
        bounds = [
            _index_scalar(x, f"pl.loop: {n}")
            for x, n in ((lower, "lower"), (upper, "upper"), (step, "step"))
        ]
        lo, hi, by = bounds
        if isinstance(by, int) and by < 1:
            raise ValueError(f"pl.loop: step must be positive, got {by}")
        if all(isinstance(x, int) for x in bounds):
            trips = max(-(-(hi - lo) // by), 0)
        else:
            if not (unroll is None or unroll is False or unroll == 1):
                raise ValueError(
                    "Can only use `unroll` in `loop` if the loop bounds are statically known"
                )
            span = hi - lo
            trips = (
                span
                if isinstance(by, int) and by == 1
                else _core.binary("div", span + (by - 1), by)
            )

        def run(k, carry):
            i = k if isinstance(by, int) and by == 1 else k * by
            if not (isinstance(lo, int) and lo == 0):
                i = i + lo
            if init_carry is None:
                if body(i) is not None:
                    raise TypeError(
                        "pl.loop: the body must return None when there is no init_carry"
                    )
                return None
            return body(i, carry)

        return fori_loop(
            0,
            trips,
            run,
            init_carry,
            unroll=unroll if isinstance(trips, int) else None,
            _named=body,
        )

    return wrap


# ---- scopes --------------------------------------------------------------------------------------


def _is_descriptor(x):
    kinds = (MemoryRef, Barrier, ClusterBarrier, WGMMAAccumulatorRef, RefUnion, SemaphoreType)
    return isinstance(x, kinds) or hasattr(x, "memory_space")


def cluster_axis(name, what):
    """The index of a cluster axis; ValueError for any other name."""
    axes = env(what).axes
    kind, k, _ = axes.get(name, (None, None, None))
    if kind != "cluster":
        known = [n for n, (f, _, _) in axes.items() if f == "cluster"]
        raise ValueError(f"{what}: {name!r} is not a cluster axis; those are {known}")
    return k


def cluster_groups(x, what):
    """Groups of axis indices, each terminated by -1."""
    out = []
    for group in x.collective_axes:
        out += [*(cluster_axis(n, what) for n in axis_names(group)), -1]
    return out


class UnionRefs(tuple):
    """A :class:`RefUnion` inside a kernel: the refs of its groups, in order."""

    __slots__ = ()

    def __setitem__(self, index, value):
        raise ValueError("a RefUnion can't be assigned to; unpack it, and assign to its refs")


tree.register_pytree_node(UnionRefs, lambda x: (tuple(x), None), lambda _, x: UnionRefs(x))


def _numbered(name):
    """x_0, x_1 ...; None where there is no name."""
    return (name and f"{name}_{k}" for k in itertools.count())


def _allocate_union(x, collective, name, what):
    e = env(what)
    e.unions += 1
    groups, part = [], _numbered(name)
    for k, group in enumerate(x.groups):
        place = (e.unions, k)
        groups.append(
            tree.map(
                lambda m, p=place: _allocate(m, collective, next(part), what, p),
                group,
                is_leaf=_is_descriptor,
            )
        )
    return UnionRefs(groups)


def _parts(shape, alone):
    """The shape of barriers and semaphores; private ones have a part for each thread."""
    return (env("run_scoped").n_threads, *shape) if alone else shape


def _part(ref, alone):
    return ref.at[_core.axis_index("thread", 0)] if alone else ref


def _of_block(e, shape, name):
    """Semaphores of the block that other devices reach, too: a part of those of the launch."""
    grid, cluster = e.blocks
    n, size = math.prod((*grid, *cluster)), math.prod(shape)
    first, e.semaphores = e.semaphores, e.semaphores + n * size
    return _core.alloc_semaphore((n, *shape), first, name=name).at[block_number(grid, cluster)]


def _allocate(x, collective, name, what, union=None):
    """The ref of one descriptor. ``union``: the indices of its union and group. Without
    ``collective`` axes, the allocation is private to each thread."""
    e = env(what)
    if isinstance(x, Ref):  # GMEM scratch of the kernel
        return x
    if isinstance(x, RefUnion):
        return _allocate_union(x, collective, name, what)
    if isinstance(x, WGMMAAccumulatorRef):
        if collective:
            raise ValueError(
                f"{what}: ACC is private to a thread and cannot be allocated with"
                f" collective_axes={collective!r}"
            )
        if x._init is not None:
            raise ValueError(f"{what}: a preinitialised ACC is only for pl.run_state")
        return _core.alloc_acc(x.shape, x.dtype, name=name)
    if isinstance(x, SemaphoreType):
        x = x()
    if not isinstance(x, (MemoryRef, Barrier, ClusterBarrier, Semaphores)):
        raise TypeError(
            f"{what}: cannot allocate {show(x)}; accepted are plgpu.SMEM(shape, dtype),"
            " plgpu.TMEM(shape, dtype), plgpu.ACC(shape), plgpu.Barrier(...),"
            " plgpu.SemaphoreType.REGULAR(shape), plgpu.RefUnion(...) and pytrees of them"
        )
    alone = e.n_threads > 1 and not collective
    if isinstance(x, Semaphores) and e.blocks is not None:
        return _part(_of_block(e, _parts(x.shape, alone), name), alone)
    if isinstance(x, Semaphores):
        return _part(_core.alloc_semaphore(_parts(x.shape, alone), -1, name=name), alone)
    if isinstance(x, (Barrier, ClusterBarrier)):
        shape = _parts(x.num_barriers, alone)
        n = math.prod(shape)
        if n > 32:
            whose = f", those of all {e.n_threads} threads" if alone else ""
            raise NotImplementedError(
                f"{what}: at most 32 barriers in one allocation, got {n}{whose}"
            )
        groups, leader = None, 0
        if isinstance(x, ClusterBarrier):
            groups, leader = cluster_groups(x, what), int(x.leader_tracked)
        barrier = _core.alloc_barrier(
            shape,
            x.num_arrivals,
            name=name,
            cluster=groups,
            leader=leader,
            tensor_core=int(x.orders_tensor_core),
        )
        return _part(barrier, alone)
    if x.memory_space is MemorySpace.TMEM:
        return _allocate_tmem(x, alone, name, what, union)
    if x.memory_space is not MemorySpace.SMEM:
        raise NotImplementedError(
            f"{what}: {x.memory_space} cannot be allocated in a kernel; give"
            f" plgpu.{x.memory_space.name} as scratch_types, an operand or an output"
        )
    tiling, swizzle = split_transforms(x.transforms, x.shape, x.dtype, what)
    tiled = any(isinstance(t, TilingTransform) for t in x.transforms)
    given = "transforms" if tiled else "swizzle" if x.transforms else "nothing"
    return _core.alloc_smem(
        x.shape,
        x.dtype,
        tiling=tiling,
        swizzle=swizzle,
        given=given,
        name=name,
        union=union,
    )


def _allocate_tmem(x, alone, name, what, union):
    if alone:
        raise NotImplementedError(
            f"{what}: TMEM of a single thread; allocate it for all threads of the block:"
            " collective_axes=thread_name, or scratch_types"
        )
    env(what).has_tmem = True
    layout, packing = x.place
    return _core.alloc_tmem(
        x.shape, x.dtype, layout, packing, int(x.collective), name=name, union=union
    )


def run_scoped(f, *types, collective_axes=(), **kw_types):
    """Allocate ``types``, call ``f(*refs, **kw_refs)`` and return its result.

    Types are pytrees of ``plgpu.SMEM``, ``plgpu.TMEM``, ``plgpu.ACC``, ``plgpu.Barrier``,
    semaphores and None. In a kernel with several threads, ``collective_axes=thread_name`` means
    that all threads enter the scope together and share its allocations. Without it, each thread
    enters separately and has private allocations. ACC is always private, TMEM never. SMEM and TMEM
    are uninitialised on entry. Refs must not leave the scope (ValueError). The end of the scope
    does not wait: no copy to its SMEM and no product in its ACC or TMEM may be in flight
    (ValueError on the interpreter). ValueError for other axes.
    """
    return scoped(f, types, kw_types, parameter_names(f, len(types)), collective_axes)


def _poison(e, refs, collective, what):
    """Fill what was allocated: NaN, the least integer, True. Accumulators begin as zeros."""
    how, e.poisons = e.poisons, "block"
    if any(r.memory_space is MemorySpace.TMEM for r in refs):
        raise NotImplementedError(
            f"{what}: pl.enable_poison_buffers does not fill TMEM; switch it off, or run the kernel"
            " with interpret=plgpu.InterpretParams(detect_uninitialized=True)"
        )
    kinds = MemorySpace.SMEM, MemorySpace.GMEM
    memory = [r for r in refs if r.memory_space in kinds and isinstance(r.dtype, np.dtype)]
    if not memory:
        return

    def fill():
        for r in memory:
            r[...] = _core.full(r.shape, _poison_of(r.dtype), r.dtype)
        _core.effect("commit_smem", ())

    groups = None
    if how == "cluster" and e.cluster_names:  # other blocks reach what was filled
        groups = [*range(len(e.cluster_names)), -1]
    elif not collective or e.n_threads == 1:
        return fill()
    filled = _core.alloc_barrier((1,), e.n_threads, name="poisoned", cluster=groups).at[0]
    when(_core.axis_index("thread", 0) == 0)(fill)
    _core.effect("barrier_arrive", (filled,))
    _core.effect("barrier_wait", (filled,))


def _poison_of(dtype):
    if dtype.kind == "b":
        return True
    if dtype.kind in "iu" or "int" in dtype.name:
        return int(ml_dtypes.iinfo(dtype).min)
    has_nan = np.isnan(np.array(np.nan, dtype).astype(np.float32))
    return math.nan if has_nan else float(ml_dtypes.finfo(dtype).max)


def scoped(f, types, kw_types, names, collective_axes, place=None):
    """:func:`run_scoped` with names for the positional allocations in the generated text. place:
    file and line of the allocations; by default the user's line."""
    what = "run_scoped"
    e = env(what)
    axes = axis_names(collective_axes)
    if axes and axes != (e.thread_name,):
        accepted = "empty: this kernel has no thread axis"
        if e.thread_name is not None:
            accepted = f"the thread axis {e.thread_name!r} or empty"
        raise ValueError(f"{what}: collective_axes must be {accepted}; got {show(collective_axes)}")

    def allocate(t, name):
        if _is_descriptor(t):
            return _allocate(t, axes, name, what)
        part = _numbered(name)
        return tree.map(lambda x: _allocate(x, axes, next(part), what), t, is_leaf=_is_descriptor)

    state, trace = State(), _core.current_trace()
    trace.put_place(*(place or (None, 0)))
    op = _core.open("scope", (), 1, collective=1 if axes else 0)
    try:
        op.enter(0)
        names = [*names, *[None] * len(types)]
        refs = [allocate(t, name) for t, name in zip(types, names)]
        kw_refs = {k: allocate(t, k) for k, t in kw_types.items()}
        own = tree.leaves([refs, kw_refs])
        if e.poisons:
            _poison(e, own, bool(axes), what)
        trace.put_place(None, 0)
        leaves, structure = tree.flatten(state.run(lambda: f(*refs, **kw_refs)))
        for x in leaves:  # an accumulator carried by a pipeline was allocated outside
            if isinstance(x, Ref) and (x.is_view or any(x is r for r in own)):
                raise ValueError(f"{what}: a ref cannot leave its scope; return its contents")
        op.leave([*(x for x in leaves if isinstance(x, Array)), *state.written()])
        results = iter(state.take(op.close()))
    except BaseException:
        op.abandon()
        raise
    return tree.unflatten(structure, [next(results) if isinstance(x, Array) else x for x in leaves])


def _each_warp(f, what, name, args):
    e = env(what)
    if "warp" in (kind for kind, _, _ in e.axes.values()):
        raise _core.LoweringError(f"{what}: warp_map and WarpMesh cannot be nested")
    if name in e.axes:
        raise ValueError(f"{what}: the axis name {name!r} is taken")
    op = _core.open("warp_map", (), 1)
    e.axes[name] = ("warp", 0, 4)
    try:
        op.enter(0)
        if f(*(a() for a in args)) is not None:
            raise ValueError(f"{what}: the function must return None")
        op.leave([])
        op.close()
    except BaseException:
        op.abandon()
        raise
    finally:
        del e.axes[name]


def warp_map(f):
    """Execute ``f(warp_id)`` in each of the 4 warps of this thread (Hopper); ``warp_id`` is a
    traced int32.

    Executes immediately; as a decorator it turns the name into None. All lanes of the thread
    synchronise before and after the map. Warps may diverge (``pl.when(warp_id == 0)``), so only
    scalars and refs exist, and no ops that need the whole thread. Warps that wait on the same
    barrier in one map must wait equally often; the thread has then seen those phases. When the
    kernel is lowered, arrays and nested maps raise LoweringError, other ops NotImplementedError.
    """
    _each_warp(f, "warp_map", object(), [lambda: _core.axis_index("warp", 0)])


def warp_mesh(f, name):
    """The body of a WarpMesh: without arguments; the warp's index is along the axis ``name``."""
    _each_warp(f, "core_map", name, [])


def with_scoped(*types, collective_axes=(), **kw_types):
    """Decorator form of :func:`run_scoped`: ``with_scoped(...)(f)(*args)`` calls
    ``f(*args, *refs)``."""

    def wrap(f):
        def inner(*args, **kwargs):
            return run_scoped(
                lambda *r, **kr: f(*args, *r, **kwargs, **kr),
                *types,
                collective_axes=collective_axes,
                **kw_types,
            )

        return inner

    return wrap


class _Held:
    """A ref of :func:`run_state` to an array in registers. A write replaces the array."""

    def __init__(self, value):
        self.value, self.region = value, _core.region()

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)

    def __getitem__(self, idx):
        return self.value[idx]

    def __setitem__(self, idx, value):
        if _core.region() != self.region:
            raise NotImplementedError(
                "run_state: a ref to an array in registers is written in plgpu.warp_map,"
                " plgpu.ext.warp_where or the condition of a loop; write it before or after that"
            )
        new = _core.stored(self.value[idx], value)
        whole = all(
            i is Ellipsis or isinstance(i, slice) and i == slice(None)
            for i in (idx if isinstance(idx, tuple) else (idx,))
        )
        self.value = new if whole else self.value.at[idx].set(new)


class Rounds:
    """State of dynamic loops inside loops, each execution of which is a round over the grid.

    ``base`` is the first tile number of the round. ``ahead`` is the number that this cluster holds,
    minus the one it started with. Both are carried in registers through the enclosing loops and
    branches."""

    def __init__(self, e):
        self._base, self._ahead = _Held(None), _Held(None)
        self.counter = None  # of the launch
        e.held = [self._base, self._ahead]

    base = property(lambda self: _begun(self._base))
    ahead = property(lambda self: _begun(self._ahead))

    def write(self, base, ahead):
        self._base.value, self._ahead.value = base, ahead


def _begun(held):
    return _core.as_array(0, "int32") if held.value is None else held.value


class State:
    """Refs of run_state that the regions of one op may write.

    An array belongs to one region. While a region is traced, such a ref holds the array of that
    region, and the op yields the arrays that were written: loops carry them, branches return them.
    Which refs are written is known only after tracing, so ``grew`` says that the op must be traced
    again."""

    def __init__(self):
        self._here = _core.region()
        self._refs, self._new, self.grew = [], [], False

    def values(self):
        """What the refs currently hold: outside the op, or at the end of a region."""
        return [_begun(x) for x in self._refs]

    def run(self, f, begin=()):
        """f() in the region that was just entered, where the refs start as ``begin``, if given."""
        held = [(x, x.value) for x in env("run_state").held if x.region == self._here]
        for x, _ in held:
            x.region = _core.region()
        for x, value in zip(self._refs, begin):
            x.value = value
        out = f()
        more = [x for x, old in held if x.value is not old and not any(x is y for y in self._refs)]
        self.grew = bool(more)
        self._refs += more
        self._new = self.values()
        for x, old in held:
            x.value, x.region = old, self._here
        return out

    def read(self, f, begin):
        """f() in a region that cannot write the refs."""
        old = [x.value for x in self._refs]
        for x, value in zip(self._refs, begin):
            x.value = value
        out = f()
        for x, value in zip(self._refs, old):
            x.value = value
        return out

    def written(self):
        """What the refs hold at the end of the region that :meth:`run` traced."""
        return self._new

    def take(self, results):
        """Store the final contents of the refs, and return the other results of the op."""
        n = len(results) - len(self._refs)
        for x, value in zip(self._refs, results[n:]):
            x.value = value
        return results[:n]


@contextlib.contextmanager
def _read_only():
    """Within it, no ref of run_state can be written."""
    e = env("run_state")
    held, e.held = e.held, []
    try:
        yield
    finally:
        e.held = held


def _state_ref(leaf):
    if isinstance(leaf, WGMMAAccumulatorRef) and leaf._init is not None:
        return _core.alloc_acc(leaf.shape, leaf.dtype, init=leaf._init)
    if isinstance(leaf, Ref) or _is_descriptor(leaf):
        raise NotImplementedError(
            f"run_state: in a kernel leaves are plgpu.ACC.init(array) and arrays, got {show(leaf)}"
        )
    return _Held(as_array(leaf, "run_state"))


def run_state(f):
    """``run_state(f)(state)`` calls ``f`` with refs that start as the leaves of the pytree
    ``state``. It returns their final contents or, in a kernel, what ``f`` returns if that is not
    None.

    In a kernel, the leaves are ``ACC.init(array)`` and arrays. ``ACC.init(array)`` is an
    accumulator; its final value is read after all outstanding wgmmas. Arrays stay in registers;
    their refs are read and written by index, also in loops, branches and scopes. A write in
    :func:`plgpu.warp_map`, :func:`plgpu.ext.warp_where` or the condition of a loop raises
    NotImplementedError. On the host, the leaves are arrays, the refs are mutable arrays for
    kernels, and ``f`` returns None. ValueError if a ref is returned.
    """

    def inner(args):
        if not tracing():
            return run_state_on_host(f)(args)
        leaves, structure = tree.flatten(args, is_leaf=_is_descriptor)
        e = env("run_state")
        outer, state = e.held, State()
        op = _core.open("scope", (), 1, collective=0)
        try:
            op.enter(0)
            refs = [_state_ref(x) for x in leaves]

            def call():
                e.held = outer + [r for r in refs if isinstance(r, _Held)]
                return f(tree.unflatten(structure, refs))

            out = state.run(call)
            values = [r.value if isinstance(r, _Held) else _core.acc_load(r, 0) for r in refs]
            if out is None:
                out = tree.unflatten(structure, values)
            values, structure = tree.flatten(out)
            if any(isinstance(x, Ref | _Held) for x in values):
                raise ValueError("run_state: a ref cannot leave its scope; return its contents")
            op.leave([*(x for x in values if isinstance(x, Array)), *state.written()])
            results = iter(state.take(op.close()))
        except BaseException:
            op.abandon()
            raise
        finally:
            e.held = outer
        return tree.unflatten(
            structure, [next(results) if isinstance(x, Array) else x for x in values]
        )

    return inner
