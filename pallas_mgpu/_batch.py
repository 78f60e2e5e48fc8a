"""`vmap`: kernels over an additional axis of their arrays.

A mapped kernel is a single launch. Its batch axes precede those of the grid, outermost first, and
the body sees the view of every mapped array at its own index. The graph is an ordinary one. When a
Python function is mapped, its arguments are `Batched`; a kernel that is called with them is
mapped."""

import functools
import math
import threading

import numpy as np

from . import _core, tree
from ._family import chosen
from ._names import accepts, later, show
from ._types import itemsize_bits

_repeating = later("_repeat", "repeating")


class _PerLeaf(tuple):
    """in_axes with one entry for each leaf of the arguments."""

    __slots__ = ()


def _leaf_axes(axes, structure, what):
    """One int or None for each leaf. ``axes``: an int or None for all leaves, or a container like
    the arguments whose entries are such axes."""
    if isinstance(axes, _PerLeaf):
        return list(axes)
    out = []

    def walk(axis, s, where):
        if axis is None or (hasattr(axis, "__index__") and not isinstance(axis, bool)):
            out.extend([None if axis is None else axis.__index__()] * tree.count(s))
            return
        given = tree.children(axis) if s != tree.LEAF else None
        if given is None or len(given) != len(s[2]):
            raise ValueError(
                f"{what}: {where} must be an int or None, or have the structure of the arguments,"
                f" {tree.describe(s)}; got {show(axis)}"
            )
        for k, (a, child) in enumerate(zip(given, s[2])):
            walk(a, child, f"{where}[{k}]")

    if structure[0] is None:
        structure = ("tuple", None, structure[2])
    walk(axes, structure, "in_axes")
    return out


class Batch:
    """The batch axes of one trace of a kernel's definition.

    ``sizes``: of the axes. ``in_axes``, ``out_axes``: for each axis, its position in each leaf
    (None: not mapped). ``in_shapes``: (shape, dtype) of the operands as the body sees them.
    ``out_shapes``: of the whole outputs."""

    def __init__(self, definition, structure, specs):
        what = f"vmap of {definition.who} {definition.name}"
        shapes = [list(shape) for shape, _ in specs]
        self.sizes, self.in_axes, self.out_axes = [], [], []
        for in_axes, _ in definition.levels:
            axes = _leaf_axes(in_axes, structure, what)
            size = {}
            for k, (axis, shape) in enumerate(zip(axes, shapes)):
                if axis is None:
                    continue
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(
                        f"{what}: argument leaf {k} of shape {tuple(shape)} has no axis {axis} to"
                        " map over; in_axes names one for each argument, None for those that all"
                        " elements share"
                    )
                axes[k] = axis % len(shape)
                size[k] = shape.pop(axis)
            if len(set(size.values())) != 1:
                found = "no argument is mapped" if not size else f"the axes differ in size, {size}"
                raise ValueError(f"{what}: {found} (in_axes {show(in_axes)})")
            self.sizes.append(next(iter(size.values())))
            self.in_axes.append(axes)
        self.in_shapes = [(tuple(s), dtype) for s, (_, dtype) in zip(shapes, specs)]
        self.out_shapes = [o.shape for o in definition.outs]
        for (_, out_axes), size in zip(reversed(definition.levels), reversed(self.sizes)):
            self.out_axes.insert(0, self._add(out_axes, size, what))
        for i, o in definition.aliases.items():
            for axes, outs in zip(self.in_axes, self.out_axes):
                if axes[i] != outs[o]:
                    raise ValueError(
                        f"{what}: argument leaf {i} is output {o} and must be mapped over the same"
                        f" axis, got {axes[i]} and {outs[o]}"
                    )

    def _add(self, out_axes, size, what):
        n = len(self.out_shapes)
        axes = list(out_axes) if isinstance(out_axes, (tuple, list)) else [out_axes] * n
        if len(axes) != n or not all(hasattr(a, "__index__") for a in axes):
            raise ValueError(
                f"{what}: out_axes must be an int, or one for each of the {n} outputs; got"
                f" {show(out_axes)}"
            )
        for k, (axis, shape) in enumerate(zip(axes, self.out_shapes)):
            rank = len(shape) + 1
            if not -rank <= axis < rank:
                raise ValueError(f"{what}: output {k} of {rank} dims has no axis {axis}")
            axes[k] = a = axis % rank
            self.out_shapes[k] = (*shape[:a], size, *shape[a:])
        return axes

    def views(self, refs, axes):
        """The views of whole arrays that one program sees."""
        for level, of in enumerate(axes):
            index = _core.axis_index("grid", level)
            refs = [r if a is None else r.at[(*[slice(None)] * a, index)] for r, a in zip(refs, of)]
        return refs


# ---- functions that call kernels -----------------------------------------------------------------


class Batched:
    """An array as a function sees it under :func:`vmap`: without the mapped axis."""

    __slots__ = ("value", "axis", "level")
    __hash__ = None  # type: ignore[assignment]  # no option of a function under `specialize`

    def __init__(self, value, axis, level):
        if not -len(value.shape) <= axis < len(value.shape):
            raise ValueError(
                f"vmap: an argument of shape {tuple(value.shape)} has no axis {axis} to map over"
            )
        self.value, self.axis, self.level = value, axis % len(value.shape), level

    @property
    def shape(self):
        s = tuple(self.value.shape)
        return s[: self.axis] + s[self.axis + 1 :]

    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: len(self.shape))

    def __repr__(self):
        return f"<one of a batch, {self.dtype} of shape {self.shape}>"


def call_batched(definition, args, leaves, out, stream):
    """Call a kernel with arguments of which some are `Batched`."""
    level = max(x.level for x in leaves if isinstance(x, Batched))
    mine = [isinstance(x, Batched) and x.level == level for x in leaves]
    axes = _PerLeaf(x.axis if m else None for x, m in zip(leaves, mine))
    structure = tree.structure(args)
    into, out_axes = _outputs(definition, out, level)
    key = axes, structure, out_axes
    kernel = definition.batched.get(key)
    if kernel is None:
        kernel = definition.batched[key] = definition.mapped(axes, out_axes).make()
    inner = tree.unflatten(structure, [x.value if m else x for x, m in zip(leaves, mine)])
    if out is not None:
        kernel(*inner, out=into, stream=stream)
        return out
    return tree.map(lambda x: Batched(x, 0, level), kernel(*inner, stream=stream))


def call_batched_family(family, args, kwargs):
    """Call a function under `specialize` with arguments of which some are `Batched`."""
    options = dict(kwargs)
    stream = {"stream": s} if (s := options.pop("stream", None)) is not None else {}
    if options.pop("out", None) is not None:
        raise NotImplementedError(
            f"{family.__name__}: out= under vmap; use the result, or vmap of a kernel"
        )
    merged = getattr(family.maker, "merged", None)
    found = merged(family, args, options | stream) if merged else None
    if found is not None:
        return found
    kernel, arrays = chosen(family, args, options, _described)
    return kernel(*arrays, **stream)


def _described(x):
    """As `chosen` takes it: an element of a batch may begin anywhere among the others."""
    if isinstance(x, type) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return None
    dtype, shape = _core.as_dtype(x.dtype), tuple(x.shape)
    whole = math.prod(shape) * itemsize_bits(dtype) % 128 == 0
    return shape, dtype, None, whole or not isinstance(x, Batched)


def _outputs(definition, out, level):
    """``out=`` of a kernel as whole arrays, and the mapped axis of each."""
    if out is None:
        return None, 0
    leaves, structure = tree.flatten(out)
    if not all(isinstance(x, Batched) and x.level == level for x in leaves):
        raise TypeError(
            f"vmap of {definition.who} {definition.name}: what is given as out= must be mapped over"
            " too, as an argument of the function under vmap"
        )
    axes = tuple(x.axis for x in leaves)
    return tree.unflatten(structure, [x.value for x in leaves]), axes


class _Depth(threading.local):
    level = 0


_depth = _Depth()


def _map_function(f, in_axes, out_axes):
    if out_axes != 0:
        raise NotImplementedError(
            "vmap: out_axes other than 0 need a kernel; of a function the results are stacked along"
            " axis 0"
        )

    def unwrap(x, size):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"vmap: the function must return arrays, results of the kernels that it calls, got"
                f" {show(x)}"
            )
        if not (isinstance(x, Batched) and x.level == level_of_call()):
            return _repeated(x, size)
        if x.axis:
            raise NotImplementedError(
                f"vmap: the function returns an argument that is mapped along axis {x.axis};"
                " results are stacked along axis 0"
            )
        return x.value

    def level_of_call():
        return _depth.level

    @functools.wraps(f, updated=())
    def mapped(*args):
        leaves, structure = tree.flatten(args)
        axes = _leaf_axes(in_axes, structure, "vmap")
        _depth.level += 1
        try:
            given = [x if a is None else Batched(x, a, _depth.level) for x, a in zip(leaves, axes)]
            size = _size_of(given, in_axes)
            found = f(*tree.unflatten(structure, given))
            return tree.map(functools.partial(unwrap, size=size), found)
        finally:
            _depth.level -= 1

    return mapped


def _size_of(given, in_axes):
    """How many elements a batch has."""
    mapped = [x for x in given if isinstance(x, Batched) and x.level == _depth.level]
    sizes = {x.value.shape[x.axis] for x in mapped}
    if len(sizes) != 1:
        found = f"the axes differ in size, {sorted(sizes)}" if sizes else "no argument is mapped"
        raise ValueError(f"vmap: {found} (in_axes {show(in_axes)})")
    return sizes.pop()


def _repeated(x, size, at=0):
    """A result that all elements of a batch share, once for each of them, along a new axis."""
    whole = x
    while isinstance(whole, Batched):
        whole = whole.value
    if not isinstance(whole, np.ndarray):
        return _repeating((size, *x.shape), _core.as_dtype(x.dtype))(x)
    if not isinstance(x, Batched):
        return np.repeat(np.expand_dims(x, at), size, at)
    before = x.axis <= at
    return Batched(_repeated(x.value, size, at + before), x.axis + (not before), x.level)


@accepts()
def vmap(f, in_axes=0, out_axes=0):
    """Map ``f`` over an additional axis of its arguments, in one launch. The axis becomes the
    leading grid axis.

    ``f``: a kernel (of ``plgpu.kernel`` or ``pl.pallas_call``), possibly mapped already, a
    function under ``specialize``, such as those of ``ops``, or a Python function that passes its
    arguments to these and returns their results; one that depends on no mapped argument is repeated
    for each element. ``in_axes``: the mapped axis of each argument,
    None for arguments that all elements share; an int for all arguments, or a tuple. ``out_axes``:
    the position of the axis in the results. TypeError for other ``f``; ValueError, when called, for
    axes that do not exist or differ in size.
    """
    if isinstance(f, _core.Kernel):
        return f.definition.mapped(in_axes, out_axes).make()
    if isinstance(f, _core.Family):
        return _map_function(f, in_axes, out_axes)
    if hasattr(f, "_refuse_vmap"):  # on a mesh of devices
        f._refuse_vmap()
    maker = f.func if isinstance(f, functools.partial) else f
    if str(getattr(maker, "__module__", "")).startswith(f"{__package__}._"):
        raise TypeError(
            f"vmap: {maker.__name__} makes a kernel and is none; the right form is"
            f" vmap({maker.__name__}(body, ...))(*batched)"
        )
    if not callable(f):
        raise TypeError(f"vmap: f must be a kernel or a function, got {show(f)}")
    return _map_function(f, in_axes, out_axes)
