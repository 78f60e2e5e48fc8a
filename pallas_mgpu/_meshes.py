"""Kernels over mesh objects: `pl.core_map` and `pl.kernel`."""

import functools

from ._control import warp_mesh
from ._kernel import Definition
from ._mutable import closed_over, kernel_dtype, rebound
from ._names import NOT_SPECIFIED, deprecated, show
from ._trace import tracing
from ._types import Mesh, ShapeDtypeStruct, WarpMesh


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
    """Deprecated form of :func:`pl.kernel`. ``@pl.core_map(mesh)`` runs the decorated function over
    a mesh immediately, as ``pl.kernel(f, mesh=mesh)()`` does, with a DeprecationWarning.

    The function takes no arguments and returns None. On the host, with a :class:`plgpu.Mesh`, it
    updates the mutable arrays that it closes over (:func:`plgpu.new_ref`, or inside
    :func:`pl.run_state`), which appear as refs in GMEM. In a kernel, with a
    :class:`plgpu.WarpMesh`, it is a :func:`plgpu.warp_map`.
    ``cost_estimate`` and ``metadata`` have no effect. ValueError if it returns a value or closes
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
        refs = closed_over(f)
        if not refs:
            raise ValueError(
                f"{what}: the function closes over no mutable array, so it has no effect; make one"
                " with plgpu.new_ref(x), or use plgpu.kernel"
            )

        def body(*args):
            return rebound(f, refs, args)()

        body.__name__ = getattr(f, "__name__", "core_map")
        outs = tuple(ShapeDtypeStruct(r.shape, kernel_dtype(r)) for r in refs)
        over = mesh if name is None else mesh.replace(kernel_name=name)
        definition = Definition(body, outs, (), compiler_params, over, interpret or None, debug)
        definition.make()(out=tuple(r._value for r in refs))

    return wrap


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
    """:func:`plgpu.kernel` with the axes in a mesh object. The body may close over mutable arrays
    (:func:`plgpu.new_ref`), which it updates in place.

    With a :class:`plgpu.Mesh`, the result is a kernel of ``body(*operands, *outputs)`` that returns
    arrays in the structure of ``out_type``. ``scratch_types`` must be empty (NotImplementedError;
    use ``pl.run_scoped``). With a :class:`plgpu.WarpMesh`, inside a kernel, the result is a
    function that runs once for each warp when it is called. Without ``body``, a decorator is
    returned. ValueError for a sequence of meshes with one body, NotImplementedError for several
    bodies.
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
