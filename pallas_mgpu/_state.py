"""Mutable arrays on the host, and kernels that work on them by closure: ``new_ref``, ``core_map``,
``pl.kernel``, the host's side of ``pl.run_state``.

A kernel gets its memory as arguments. So a body that closes over mutable arrays is rebuilt with
the kernel's refs in their places: in the cells of its closure, in those of functions in it, among
the globals it names, in bound arguments and in containers of any of these.
"""

import functools
import types

import numpy as np

from . import _core, _introspect, tree
from ._control import warp_mesh
from ._kernel import Definition
from ._names import NOT_SPECIFIED, deprecated, show
from ._trace import tracing
from ._types import GMEM, Mesh, ShapeDtypeStruct, WarpMesh


def _copied(x):
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "shape"):
        return np.array(x, copy=True, order="C")
    for name in ("clone", "copy"):  # PyTorch; CuPy, JAX
        if hasattr(x, name):
            return getattr(x, name)()
    if isinstance(x, _core.DeviceArray):
        return _core.device_put(x.numpy())
    raise TypeError(f"new_ref: expected an array, got {show(x)}")


class MutableArray:
    """An array on the host that kernels change in place: made by :func:`new_ref`, passed to a
    kernel or closed over by its body. ``ref[...]`` is its value."""

    __slots__ = ("_value", "__weakref__")
    is_mutable_array = True
    made = False  # any, ever

    def __init__(self, value):
        self._value = value
        MutableArray.made = True

    shape = property(lambda self: tuple(self._value.shape))
    dtype = property(lambda self: self._value.dtype)
    ndim = property(lambda self: len(self.shape))
    memory_space = GMEM

    def _check(self):
        if tracing():
            raise ValueError(
                "a mutable array of the host cannot be used here: close over it directly in the"
                " body of the kernel, where the kernel's ref takes its place"
            )

    def __getitem__(self, index):
        self._check()
        part = self._value[index]
        return np.array(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value):
        self._check()
        self._value[index] = value

    def __repr__(self):
        return f"MutableArray({np.dtype(self.dtype).name}{list(self.shape)})"


def new_ref(x, *, memory_space=GMEM):
    """A mutable array that begins as a copy of ``x`` (NumPy, PyTorch, CuPy, JAX, DeviceArray).

    For kernels that change their arguments or what they close over. It stays where ``x`` is.
    ValueError for a memory space other than GMEM.
    """
    if memory_space not in (None, GMEM):
        raise ValueError(f"new_ref: the memory space must be plgpu.GMEM, got {show(memory_space)}")
    return MutableArray(_copied(x))


def freeze(ref):
    """The value of a mutable array, which must not be used afterwards."""
    if not isinstance(ref, MutableArray):
        raise TypeError(f"freeze: expected what new_ref makes, got {show(ref)}")
    return ref._value


# ---- closures ------------------------------------------------------------------------------------


class _Rebuilder:
    """Finds the mutable arrays that a function can reach, and makes the function again with
    others in their places (``put`` by identity)."""

    def __init__(self, put=None):
        self.found, self.put = [], put
        self.done = {}  # by id of a function: what it became

    def value(self, x):
        if isinstance(x, MutableArray):
            if self.put is not None:
                return self.put[id(x)]
            if not any(x is y for y in self.found):
                self.found.append(x)
            return x
        if isinstance(x, types.FunctionType):
            return self.function(x)
        if isinstance(x, functools.partial):
            args = [self.value(a) for a in x.args]
            keywords = {k: self.value(v) for k, v in x.keywords.items()}
            return functools.partial(self.value(x.func), *args, **keywords)
        if type(x) in (tuple, list):
            return type(x)(self.value(y) for y in x)
        if type(x) is dict:
            return {k: self.value(v) for k, v in x.items()}
        return x

    def function(self, f):
        if id(f) in self.done or (f.__module__ or "").split(".")[0] == __package__:
            return self.done.get(id(f), f)
        cells = [types.CellType() for _ in f.__closure__ or ()]
        spaces = {k: v for k, v in f.__globals__.items() if isinstance(v, MutableArray)}
        names = spaces.keys() & _names_of(f.__code__)
        space = f.__globals__
        if names:
            space = {**space, **{k: self.value(spaces[k]) for k in sorted(names)}}
        out = types.FunctionType(f.__code__, space, f.__name__, f.__defaults__, tuple(cells))
        out.__kwdefaults__, out.__qualname__ = f.__kwdefaults__, f.__qualname__
        self.done[id(f)] = out
        for new, old in zip(cells, f.__closure__ or ()):
            try:
                new.cell_contents = self.value(old.cell_contents)
            except ValueError:  # an empty cell: a name that is not bound yet
                pass
        if out.__defaults__:
            out.__defaults__ = tuple(self.value(x) for x in out.__defaults__)
        return out


def _names_of(code):
    """Global names in a code object and those inside it."""
    names = set(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            names |= _names_of(c)
    return names


def closed_over(f):
    """The mutable arrays that a function can reach."""
    if not MutableArray.made:
        return []
    finder = _Rebuilder()
    finder.value(f)
    return finder.found


# ---- kernels that change their arguments ---------------------------------------------------------


class RefKernel:
    """A kernel with mutable arrays among its arguments, or in the closure of its body.

    They are outputs of another kernel, into which the body is wrapped: written in place where it
    has no other outputs, else new arrays that begin as copies and take their place."""

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
        types = tuple((r.shape, _dtype_of(r)) for r in refs)
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
            put = {id(r): x for r, x in zip(self.closed, passed)}
            f = _Rebuilder(put).value(inner.body) if put else inner.body
            return f(*tree.unflatten(structure, args), *outs, *rest, **scratch)

        body.__name__ = inner.name
        outs = tuple(inner.outs) + tuple(ShapeDtypeStruct(*t) for t in types)
        interpret = inner.interpret
        outer = Definition(
            body, outs, inner.scratch, inner.params, inner.mesh, interpret, inner.debug
        )
        if not in_place:
            outer.aliases = {n_plain + k: n_outs + k for k in range(n_refs)}
        return outer.make()

    def __call__(self, *args, out=None, stream=None):
        if out is not None:
            raise NotImplementedError(
                f"kernel {self.definition.name}: out= together with mutable arrays; make the"
                " outputs mutable arrays as well"
            )
        kernel, operands, refs = self._prepare(args)
        values = [r._value for r in refs]
        n = len(self.definition.outs)
        if not n:
            kernel(*operands, out=tuple(values), stream=stream)
            return self.definition.unflatten([])
        results = kernel(*operands, *values, stream=stream)
        for r, x in zip(refs, results[n:]):
            r._value = x
        return self.definition.unflatten(results[:n])

    def lower(self, *args, **options):
        """As of other kernels."""
        kernel, operands, refs = self._prepare(args)
        in_place = not self.definition.outs
        return kernel.lower(*operands, *(() if in_place else [r._value for r in refs]), **options)


# ---- meshes --------------------------------------------------------------------------------------


def _only_mesh(what, mesh):
    if isinstance(mesh, tuple | list):
        raise ValueError(f"{what}: one mesh for one body, got a sequence: {show(mesh)}")
    if not isinstance(mesh, Mesh | WarpMesh):
        raise TypeError(f"{what}: mesh must be plgpu.Mesh or plgpu.WarpMesh, got {show(mesh)}")
    if isinstance(mesh, WarpMesh) and not tracing() and what == "core_map":
        raise ValueError(f"{what}: a plgpu.WarpMesh is for the body of a kernel")
    if isinstance(mesh, Mesh) and tracing():
        raise ValueError(f"{what}: a plgpu.Mesh is for the host, not for the body of a kernel")


def core_map(
    mesh,
    *,
    compiler_params=None,
    interpret=False,
    debug=False,
    cost_estimate=None,
    name=None,
    metadata=None,
    scratch_shapes=(),
):
    """An older form of :func:`pl.kernel`, with a DeprecationWarning: ``@pl.core_map(mesh)`` runs
    the function below it over a mesh, at once, as ``pl.kernel(f, mesh=mesh)()`` does.

    The function takes no arguments and returns None. On the host, with a :class:`plgpu.Mesh`, it
    works on the mutable arrays that it closes over (:func:`plgpu.new_ref`, or inside
    :func:`pl.run_state`): a ref in GMEM stands for each. In a kernel, with a
    :class:`plgpu.WarpMesh`, it is a :func:`plgpu.warp_map`.
    ``cost_estimate`` and ``metadata`` have no effect. ValueError if it returns something or closes
    over no mutable array, NotImplementedError for ``scratch_shapes`` (use ``pl.run_scoped``).
    """
    what = "core_map"
    _only_mesh(what, mesh)
    deprecated("pl.core_map is deprecated; use pl.kernel(f, mesh=mesh)() instead", 2)
    if scratch_shapes:
        raise NotImplementedError(f"{what}: scratch_shapes; allocate with pl.run_scoped")

    def wrap(f):
        if isinstance(mesh, WarpMesh):
            return warp_mesh(f, mesh.axis_name)
        finder = _Rebuilder()
        finder.value(f)
        refs = finder.found
        if not refs:
            raise ValueError(
                f"{what}: the function closes over no mutable array, so it has no effect; make one"
                " with plgpu.new_ref(x), or use plgpu.kernel"
            )

        def body(*args):
            return _Rebuilder({id(r): a for r, a in zip(refs, args)}).value(f)()

        body.__name__ = getattr(f, "__name__", "core_map")
        outs = tuple(ShapeDtypeStruct(r.shape, _dtype_of(r)) for r in refs)
        over = mesh if name is None else mesh.replace(kernel_name=name)
        definition = Definition(body, outs, (), compiler_params, over, interpret or None, debug)
        definition.make()(out=tuple(r._value for r in refs))

    return wrap


def _dtype_of(r):
    """As NumPy's; PyTorch's are called torch.float32."""
    name = str(r.dtype).split(".")[-1]
    dtype = _core.as_dtype(name)
    if name in ("int64", "uint64", "float64"):
        raise TypeError(
            f"a mutable array has dtype {name}, and kernels, which change it in place, have no"
            f" dtypes of 64 bits: cast it, for example new_ref(x.astype('{dtype}'))"
        )
    return dtype


def mesh_kernel(
    body=NOT_SPECIFIED,
    out_type=(),
    *,
    mesh,
    scratch_types=(),
    compiler_params=None,
    interpret=False,
    cost_estimate=None,
    debug=False,
    name=None,
    metadata=None,
):
    """:func:`plgpu.kernel` over a mesh object. The body may close over mutable arrays
    (:func:`plgpu.new_ref`), which it changes in place.

    With a :class:`plgpu.Mesh` a kernel of ``body(*operands, *outputs)``, whose result has the
    structure of ``out_type``; ``scratch_types`` must be empty (NotImplementedError; use
    ``pl.run_scoped``). With a :class:`plgpu.WarpMesh`, in a kernel: a function that runs once for
    each warp when it is called. Without ``body`` a decorator. ValueError for a sequence of meshes
    with one body, NotImplementedError for several bodies.
    """
    what = "pl.kernel"
    if isinstance(body, tuple | list):
        raise NotImplementedError(f"{what}: several bodies; make a kernel of each")
    _only_mesh(what, mesh)
    if scratch_types:
        raise NotImplementedError(f"{what}: scratch_types; allocate with pl.run_scoped")

    def wrap(f):
        if isinstance(mesh, WarpMesh):
            return lambda *args: warp_mesh(functools.partial(f, *args), mesh.axis_name)
        over = mesh if name is None else mesh.replace(kernel_name=name)
        definition = Definition(f, out_type, (), compiler_params, over, interpret or None, debug)
        return definition.with_closure() or definition.make()

    return wrap if body is NOT_SPECIFIED else wrap(body)


def run_state_on_host(f):
    """The host's side of :func:`pl.run_state`."""

    def inner(state):
        leaves, structure = tree.flatten(state)
        refs = [new_ref(x) for x in leaves]
        if f(tree.unflatten(structure, refs)) is not None:
            raise ValueError("run_state: the function must return None")
        return tree.unflatten(structure, [freeze(r) for r in refs])

    return inner
