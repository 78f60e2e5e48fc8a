"""Descriptors: memory spaces and allocations, transforms, barriers, block specs, layouts, compiler
parameters. Descriptors are plain values; tracing (`_kernel.py`, `_control.py`) creates refs from
them. docs/language.md defines their semantics."""

import dataclasses
import enum
import functools
import inspect
import math
import os
import typing
import warnings
from collections.abc import Callable

import numpy as np

from . import _core, tree
from ._names import accepts, deprecated, explain_keywords, show
from ._tiling import TilingMethods


def _restore(cls, fields):
    """Rebuild an object of a frozen class from its fields, for pickle and copy."""
    out = object.__new__(cls)
    out._set(**dict(zip(cls._names, fields)))
    return out


class _DataclassFields:
    """``__dataclass_fields__`` of a value class, created at first use, so that `dataclasses.fields`
    and `dataclasses.replace` work."""

    def __get__(self, obj, cls):
        parameters = inspect.signature(cls).parameters
        fields = []
        for name in cls._names:
            p = parameters.get(name)
            default = dataclasses.MISSING if p is None or p.default is p.empty else p.default
            kw_only = p is not None and p.kind is p.KEYWORD_ONLY
            field = dataclasses.field(default=default, init=p is not None, kw_only=kw_only)
            fields.append((name, typing.Any, field))
        like = dataclasses.make_dataclass(cls.__name__, fields, init=False, repr=False, eq=False)
        cls.__dataclass_fields__ = like.__dataclass_fields__
        return cls.__dataclass_fields__


class _Frozen:
    """Base of immutable value classes. Their fields are the names in ``__slots__``, starting with
    those of base classes. Each is a parameter of ``__init__``."""

    __slots__ = ()
    _names = ()
    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[typing.Any]]] = (
        _DataclassFields()  # type: ignore[assignment]
    )

    def __init_subclass__(cls):
        explain_keywords(cls)
        cls._names = (*cls._names, *cls.__dict__.get("__slots__", ()))
        cls.__dataclass_fields__ = _Frozen.__dict__["__dataclass_fields__"]

    def __setattr__(self, name, value):
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one")

    def _set(self, **fields):
        for k, v in fields.items():
            object.__setattr__(self, k, v)

    def __delattr__(self, name):
        self.__setattr__(name, None)

    def __reduce__(self):
        return _restore, (type(self), self._fields())

    def _fields(self):
        return tuple(getattr(self, k) for k in self._names)

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self):
        return hash((type(self).__name__, self._fields()))

    def __repr__(self):
        body = ", ".join(f"{k}={getattr(self, k)!r}" for k in self._names)
        return f"{type(self).__name__}({body})"

    def replace(self, **changes):
        """A copy with the given parameters of the constructor changed."""
        names = inspect.signature(type(self)).parameters
        return type(self)(**{k: getattr(self, k) for k in names} | changes)

    __replace__ = replace  # of `copy`


def _ignore(args, kwargs, value):
    """For `accepts`: a keyword of a related type, to be ignored."""


_DTYPES = _core.dtype_table()


def itemsize_bits(dtype):
    """Bits of an element in GMEM and SMEM, for example 4 for int4."""
    return _DTYPES[dtype.name][0]


def axis_names(names):
    """A tuple of axis names, from None, one name or an iterable of names. A name is a str or any
    hashable object that is not iterable."""
    if names is None:
        return ()
    return (names,) if isinstance(names, str) or not hasattr(names, "__iter__") else tuple(names)


def is_integer(dtype):
    """Is it an integer or bool dtype, of NumPy or ml_dtypes?"""
    return dtype.kind in "iub" or dtype.name.lstrip("u").startswith("int")


def ints(x, what):
    """A tuple of ints, from one int or several. TypeError for anything else."""
    try:
        return tuple(d.__index__() for d in ((x,) if hasattr(x, "__index__") else x))
    except (TypeError, AttributeError):
        raise TypeError(f"{what} must be ints known at trace time, got {show(x)}") from None


def _shape(shape, what):
    dims = ints(shape, f"{what}: shape")
    if min(dims, default=0) < 0:
        raise ValueError(f"{what}: shape has a negative extent, {dims}")
    if max(dims, default=0) >= 2**63:
        raise ValueError(f"{what}: shape has an extent that no array can have, {dims}")
    return dims


def _is_dim(x):
    """Is it a size that is known when a kernel is called, of plgpu.dim?"""
    return hasattr(type(x), "_plgpu_traced")


class ShapeDtypeStruct(_Frozen):
    """Shape and dtype of an array, for example of a kernel's result.

    ``layout`` (a :class:`Layout` value, optional) is only used for results of inline code.
    JAX's keywords ``sharding`` and ``weak_type`` are ignored. ValueError for ``dtype=None``."""

    __slots__ = ("shape", "dtype", "layout")

    @accepts(sharding=_ignore, weak_type=_ignore)
    def __init__(self, shape, dtype, layout=None):
        if dtype is None:
            raise ValueError("ShapeDtypeStruct: dtype must be given")
        if isinstance(shape, (tuple, list)):  # sizes of plgpu.dim may be among the extents
            fixed = iter(_shape([d for d in shape if not _is_dim(d)], "ShapeDtypeStruct"))
            shape = tuple(d if _is_dim(d) else next(fixed) for d in shape)
        else:
            shape = _shape(shape, "ShapeDtypeStruct")
        self._set(shape=shape, dtype=_core.as_dtype(dtype), layout=layout)

    def __setattr__(self, name, value):
        raise RuntimeError("ShapeDtypeStruct cannot be changed; make a new one")

    @classmethod
    def like(cls, x):
        """Shape and dtype of an array."""
        return cls(x.shape, x.dtype)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return math.prod(self.shape)


# ---- transforms ----------------------------------------------------------------------------------


class Transform(_Frozen):
    """Base class of transforms, which define the physical order of a ref's elements."""

    __slots__ = ()


class TilingTransform(Transform):
    """Divide the last ``len(tiling)`` dimensions into tiles, each of which is contiguous in memory.

    Each tiled dimension must be divisible by its tile. ValueError for tiles below 1.
    """

    __slots__ = ("tiling",)

    def __init__(self, tiling):
        tiling = ints(tiling, "TilingTransform: tiling")
        if not tiling or min(tiling) < 1:
            raise ValueError(f"TilingTransform: tiles must be positive, got {tiling}")
        self._set(tiling=tiling)


class SwizzleTransform(Transform):
    """Permute 16-byte chunks within rows of ``swizzle`` bytes (32, 64 or 128), as TMA and the
    tensor cores do. The last dimension of the tile must have exactly that many bytes."""

    __slots__ = ("swizzle",)

    def __init__(self, swizzle):
        if swizzle not in (32, 64, 128):
            raise ValueError(
                f"SwizzleTransform: swizzle must be 32, 64 or 128 bytes, got {show(swizzle)}"
                " (leave the transform out for no swizzle)"
            )
        self._set(swizzle=int(swizzle))


def ref_transforms(tiling, swizzle):
    """``ref.transforms``: the transforms from memory to the ref, so the swizzle comes first."""
    out = (SwizzleTransform(swizzle),) if swizzle else ()
    return (*out, TilingTransform(tiling)) if tiling else out


def split_transforms(transforms, shape, dtype, what):
    """``(tiling, swizzle)`` of a list of transforms, checked against a logical shape."""
    if isinstance(transforms, Transform):
        transforms = (transforms,)
    if not isinstance(transforms, (tuple, list)):
        raise TypeError(f"{what}: transforms must be a tuple, got {show(transforms)}")
    tiling, swizzle = (), 0
    for t in transforms:
        if isinstance(t, TilingTransform):
            if tiling or swizzle:
                raise NotImplementedError(
                    f"{what}: one TilingTransform, before the swizzle, is supported"
                )
            if len(t.tiling) > len(shape):
                raise ValueError(f"{what}: tiling {t.tiling} has more dims than the shape {shape}")
            for d, n in zip(shape[-len(t.tiling) :], t.tiling):
                if d % n:
                    raise ValueError(
                        f"{what}: shape {shape} is not divisible by the tiling {t.tiling}"
                    )
            tiling = t.tiling
        elif isinstance(t, SwizzleTransform):
            if swizzle:
                raise ValueError(f"{what}: two swizzles given")
            swizzle = t.swizzle
            minor = (tiling or shape or (0,))[-1]
            want = 8 * swizzle // itemsize_bits(_core.as_dtype(dtype))
            if minor != want:
                raise ValueError(
                    f"{what}: a swizzle of {swizzle} bytes needs a last dim of exactly {want}"
                    f" elements of"
                    f" {np.dtype(dtype).name}, got {minor}"
                )
            if not tiling:
                tiling = (8, minor) if len(shape) > 1 else (minor,)
        else:
            raise NotImplementedError(
                f"{what}: transform {show(t)} is not supported; accepted are"
                " TilingTransform and SwizzleTransform"
            )
    return tiling, swizzle


# ---- memory spaces -------------------------------------------------------------------------------


class MemoryRef(_Frozen):
    """An allocation without transforms (``pl.MemoryRef``)."""

    __slots__ = ("inner_aval", "memory_space")
    transforms = ()

    def __init__(self, inner_aval, memory_space):
        inner_aval = ShapeDtypeStruct(inner_aval.shape, inner_aval.dtype)
        self._set(inner_aval=inner_aval, memory_space=memory_space)

    shape = property(lambda self: self.inner_aval.shape)
    dtype = property(lambda self: self.inner_aval.dtype)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: self.inner_aval.size)

    def __repr__(self):
        given = f", transforms={self.transforms!r}" if self.transforms else ""
        return f"{str(self.memory_space).upper()}({self.shape}, {self.dtype.name}{given})"


class PlacedRef(MemoryRef):
    """An allocation made by calling a memory space, such as ``plgpu.SMEM(shape, dtype)``."""

    __slots__ = ("transforms",)

    def __init__(self, inner_aval, memory_space, transforms=()):
        super().__init__(inner_aval, memory_space)
        transforms = (transforms,) if isinstance(transforms, Transform) else transforms
        split_transforms(transforms, self.shape, self.dtype, f"plgpu.{memory_space.name}")
        self._set(transforms=tuple(transforms))


class WarpMesh(_Frozen):
    """The 4 warps of a thread, for :func:`pl.kernel` (and :func:`pl.core_map`) inside a kernel; see
    :func:`warp_map`. ``lax.axis_index(axis_name)`` is the index of the warp."""

    __slots__ = ("axis_name",)

    def __init__(self, *, axis_name):
        hash(axis_name)
        self._set(axis_name=axis_name)

    shape = property(lambda self: {self.axis_name: 4})
    default_memory_space = property(lambda self: MemorySpace.GMEM)
    core_type = property(lambda self: "gpu")
    supported_memory_spaces = property(lambda self: (MemorySpace.GMEM, MemorySpace.SMEM))


class RefUnion(_Frozen):
    """Groups of allocations that share memory: ``plgpu.RefUnion(group, group, ...)``.

    A group is a pytree of ``plgpu.SMEM(...)``, or of ``plgpu.TMEM(...)``. The allocations of a
    group follow each other in memory; all groups start at the same address, and the union is as
    large as the largest group. Unions are accepted by ``run_scoped`` and ``scratch_types``. In the
    kernel, a union is a sequence: ``a, [b, c] = union``. Do not read through one group what was
    written through another; place commits, waits and barriers between uses of different groups.
    NotImplementedError for other spaces or both, ValueError for TMEM with and without
    ``collective`` and for leaves that do not fill whole bytes.
    """

    __slots__ = ("groups",)

    def __init__(self, *groups):
        if not groups:
            raise ValueError("RefUnion: at least one group is needed")
        for x in (found := tree.leaves(groups, is_leaf=lambda x: isinstance(x, MemoryRef))):
            if not isinstance(x, MemoryRef) or x.memory_space not in (SMEM, TMEM):
                what = "all leaves must be plgpu.SMEM(shape, dtype), or all plgpu.TMEM"
                raise NotImplementedError(f"RefUnion: {what}, got {show(x)}")
            if math.prod(x.shape) * itemsize_bits(x.dtype) % 8:
                raise ValueError(f"RefUnion: {show(x)} does not fill its last byte; pad it")
        if len({x.memory_space for x in found}) > 1:
            raise NotImplementedError("RefUnion: SMEM and TMEM cannot share memory; use two unions")
        if len({getattr(x, "collective", None) for x in found}) > 1:
            raise ValueError("RefUnion: TMEM with and without collective=True; all must agree")
        self._set(groups=groups)


_makers: dict = {}  # of allocations in spaces that have a module of their own


class MemorySpace(enum.Enum):
    """A memory space. Calling a member makes the descriptor of an allocation.

    ``GMEM``: global memory. ``SMEM``: shared memory of a block. ``TMEM``: tensor memory
    (Blackwell). ``REGS``: registers, the space of ``ACC``.

    Of TMEM, ``shape`` is (rows, columns), or (batch.., rows, columns); rows are 128 or 64. A block
    has 512 columns of 32 bits, for 128 rows each. ``packed``: elements of fewer than 32 bits share
    a column (True), or have one each (False). ``collective``: for products of a pair of blocks.
    ``layout``: a :class:`TMEMLayout`, instead of ``packed``.
    """

    GMEM = "gmem"
    SMEM = "smem"
    TMEM = "tmem"
    REGS = "regs"

    def __str__(self):
        return self.value

    @accepts()
    def __call__(self, shape, dtype, *, transforms=(), packed=None, collective=None, layout=None):
        what = f"plgpu.{self.name}"
        if self is MemorySpace.TMEM:
            return _makers[self](shape, dtype, transforms, packed, collective, layout)
        if packed is not None or collective is not None or layout is not None:
            raise ValueError(f"{what}: only TMEM takes {packed=}, {collective=}, {layout=}")
        if self is MemorySpace.REGS:
            raise ValueError("plgpu.REGS cannot be allocated by calling it; use plgpu.ACC")
        aval = ShapeDtypeStruct(_shape(shape, what), _core.as_dtype(dtype))
        return PlacedRef(aval, self, transforms)

    def like(self, shape_dtype_like):
        """The descriptor of an allocation with the shape and dtype of another object."""
        return self(shape_dtype_like.shape, shape_dtype_like.dtype)


class GenericMemorySpace(enum.Enum):
    """`pl.MemorySpace`. In a BlockSpec, ``ANY`` means GMEM (the whole array, without a copy) and
    ``DEFAULT`` means SMEM. The others have no meaning on GPUs."""

    ANY = "any"
    DEFAULT = "default"
    ERROR = "error"
    INDEX = "index"
    KEY = "key"

    def __str__(self):
        return self.value

    def __call__(self, shape, dtype):
        shape = _shape(shape, f"pl.{self.name}")
        return MemoryRef(ShapeDtypeStruct(shape, _core.as_dtype(dtype)), self)


GMEM, SMEM, TMEM, REGS = MemorySpace.GMEM, MemorySpace.SMEM, MemorySpace.TMEM, MemorySpace.REGS


class WGMMAAccumulatorRef(_Frozen):
    """A wgmma accumulator in registers, filled with zeros at scope entry (Hopper).

    ``shape`` is (M, N) with M a multiple of 64 and N of 8; dtype float32, float16 or int32.
    Allocate it with ``pl.run_scoped(f, plgpu.ACC((m, n)))``, without ``collective_axes``.
    ValueError for other shapes and dtypes.
    """

    __slots__ = ("shape", "dtype", "_init")
    memory_space = REGS

    def __init__(self, shape, dtype=np.float32, _init=None):
        shape, dtype = _shape(shape, "plgpu.ACC"), _core.as_dtype(dtype)
        if len(shape) != 2 or shape[0] < 1 or shape[0] % 64 or shape[1] < 1 or shape[1] % 8:
            raise ValueError(
                f"plgpu.ACC: shape must be (M, N), M a multiple of 64, N of 8, got {shape}"
            )
        if dtype.name not in ("float32", "float16", "int32"):
            raise ValueError(
                f"plgpu.ACC: dtype must be float32, float16 or int32, got {dtype.name}"
            )
        self._set(shape=shape, dtype=dtype, _init=_init)

    @classmethod
    def init(cls, array):
        """An accumulator that starts as ``array``, for ``pl.run_state``."""
        return cls(array.shape, array.dtype, _init=array)


ACC = WGMMAAccumulatorRef


class Barrier(_Frozen):
    """One or more mbarriers in SMEM (Hopper).

    ``num_arrivals``: the number of arrivals that complete a phase, 1 to 8191. A ``barrier_arrive``
    of a thread and a ``copy_gmem_to_smem`` each count as one. ``num_barriers``: an int or a tuple,
    the shape of the ref. ``orders_tensor_core``: for products and accesses of tensor memory
    (Blackwell); no other copies complete on it. TypeError, ValueError for other values.
    """

    __slots__ = ("num_arrivals", "num_barriers", "orders_tensor_core")

    @accepts(
        "num_arrivals",
        "num_barriers",
        "orders_tensor_core",
        arrival_count="num_arrivals",
        for_tensor_core="orders_tensor_core",
        num_threads=TypeError(
            "Barrier: no argument 'num_threads' (a Pallas barrier counts arrivals, not CUDA"
            " threads); the right form is plgpu.Barrier(num_arrivals=..., num_barriers=...)"
        ),
    )
    def __init__(self, *, num_arrivals=1, num_barriers=1, orders_tensor_core=False):
        if not isinstance(num_arrivals, (int, np.integer)) or isinstance(num_arrivals, bool):
            raise TypeError(f"Barrier: num_arrivals must be an int, got {show(num_arrivals)}")
        if not 1 <= num_arrivals <= 8191:
            raise ValueError(
                f"Barrier: num_arrivals must be at least 1 and at most 8191, got {num_arrivals}"
            )
        shape = ints(num_barriers, "Barrier: num_barriers")
        if min(shape, default=1) < 1:
            raise ValueError(f"Barrier: num_barriers must be positive, got {num_barriers}")
        self._set(
            num_arrivals=int(num_arrivals),
            num_barriers=shape,
            orders_tensor_core=bool(orders_tensor_core),
        )

    shape = property(lambda self: self.num_barriers)
    dtype = "barrier"
    memory_space = SMEM


class ClusterBarrier(_Frozen):
    """One or more mbarriers in every block of a cluster (Hopper).

    ``collective_axes``: names of cluster axes; a tuple of names is treated as one axis.
    ``barrier_arrive`` arrives in every block whose position differs from the caller's along at most
    one of these axes, including its own block (without axes, only there). ``barrier_wait`` waits on
    the block's own instance. ``num_arrivals``: threads of each block that arrive.
    ``leader_tracked``: arrivals count only in the block with index 0 along the axis, and only that
    block may wait; needs exactly one axis. ValueError for ``num_arrivals < 1``.
    """

    __slots__ = (
        "collective_axes",
        "num_barriers",
        "num_arrivals",
        "orders_tensor_core",
        "leader_tracked",
    )

    def __init__(
        self,
        *,
        collective_axes,
        num_barriers=1,
        num_arrivals=1,
        orders_tensor_core=False,
        leader_tracked=False,
    ):
        if num_arrivals < 1:
            raise ValueError(f"ClusterBarrier: num_arrivals must be at least 1, got {num_arrivals}")
        axes = axis_names(collective_axes)
        if leader_tracked and (len(axes) != 1 or isinstance(axes[0], tuple)):
            raise NotImplementedError(
                f"ClusterBarrier: leader_tracked needs one cluster axis, not grouped, got {axes}"
            )
        self._set(
            collective_axes=axes,
            num_barriers=_shape(num_barriers, "ClusterBarrier: num_barriers"),
            num_arrivals=int(num_arrivals),
            orders_tensor_core=bool(orders_tensor_core),
            leader_tracked=bool(leader_tracked),
        )

    shape = property(lambda self: self.num_barriers)
    dtype = "barrier"
    memory_space = SMEM


# ---- block specs ---------------------------------------------------------------------------------


_OOB = _core.enum_names("OOB")


class OOBFillMode(enum.IntEnum):
    """What a copy writes for elements whose source is out of bounds."""

    UNDEFINED = _OOB.index("undefined")
    PROMISE_IN_BOUNDS = _OOB.index("promise_in_bounds")
    ZEROS = _OOB.index("zeros")


def check_oob_fill_mode(x, what):
    try:
        return OOBFillMode(x)
    except ValueError:
        raise ValueError(
            f"{what}: must be a member of plgpu.OOBFillMode (ZEROS, UNDEFINED,"
            f" PROMISE_IN_BOUNDS), got {show(x)}"
        ) from None


def _block_size(n, what):
    try:
        n = n.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{what}: block_size must be an int, got {show(n)}") from None
    if n < 1:
        raise ValueError(f"{what}: block_size must be positive, got {n}")
    return n


class Blocked(_Frozen):
    """A block dimension of ``block_size`` elements; the index map counts blocks. The same as an
    int."""

    __slots__ = ("block_size",)

    def __init__(self, block_size):
        self._set(block_size=_block_size(block_size, "pl.Blocked"))


class Element(_Frozen):
    """A block dimension of ``block_size`` elements; the index map counts elements."""

    __slots__ = ("block_size", "padding")

    def __init__(self, block_size, padding=(0, 0)):
        self._set(block_size=_block_size(block_size, "pl.Element"), padding=tuple(padding))


class Squeezed(_Frozen):
    """A block dimension of one element that the body does not see. The same as ``None``."""

    __slots__ = ()


squeezed = Squeezed()


def _as_tuple(index_map):
    """The index map, returning a tuple."""
    if getattr(index_map, "gives_tuple", False):  # of another spec
        return index_map

    def call(*indices):
        out = index_map(*indices)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    call.gives_tuple = True
    return functools.update_wrapper(call, index_map, updated=())


class RevisitMode(enum.Enum):
    """When an output block may be visited again: only in the following step (``IMMEDIATE``), or at
    any time, with its previous contents (``ANY``, not supported)."""

    IMMEDIATE = "immediate"
    ANY = "any"


class Buffered(_Frozen):
    """``pipeline_mode`` of a BlockSpec: ``buffer_count`` SMEM slots for this operand instead of the
    pipeline's ``max_concurrent_steps``.

    An input whose block is the same in all steps has one slot and is fetched once. ``revisit``: a
    :class:`RevisitMode` or None; ignored for inputs. ValueError for ``buffer_count < 1``,
    NotImplementedError for ``use_lookahead`` and for ``RevisitMode.ANY`` of an output.
    """

    __slots__ = ("buffer_count", "use_lookahead", "revisit")

    def __init__(self, buffer_count, use_lookahead=False, revisit=None):
        if not hasattr(buffer_count, "__index__") or isinstance(buffer_count, bool):
            raise TypeError(f"Buffered: buffer_count must be an int, got {show(buffer_count)}")
        if buffer_count.__index__() < 1:
            raise ValueError(f"Buffered: buffer_count must be at least 1, got {buffer_count}")
        if use_lookahead:
            raise NotImplementedError(
                "Buffered: use_lookahead is not supported; a larger buffer_count fetches further"
                " ahead"
            )
        if not (revisit is None or isinstance(revisit, RevisitMode)):
            raise TypeError(f"Buffered: revisit must be a pl.RevisitMode, got {show(revisit)}")
        self._set(buffer_count=buffer_count.__index__(), use_lookahead=False, revisit=revisit)


@dataclasses.dataclass(init=False)
class GenericBlockSpec:
    """`pl.BlockSpec`: how an array is divided into blocks.

    ``block_shape``: for each dimension an int, ``Blocked``, ``Element``, ``None`` or ``Squeezed``;
    None means the whole array. ``index_map``: maps grid indices to block indices; None means zeros.
    ``memory_space``: SMEM by default. GMEM passes a view of the block in ``pl.pallas_call`` and the
    whole array in pipelines. ``pipeline_mode``: :class:`pl.Buffered` or None.
    """

    block_shape: tuple | None = None
    index_map: Callable | None = None
    pipeline_mode: Buffered | None = None
    memory_space: MemorySpace | GenericMemorySpace | None = dataclasses.field(
        default=None, kw_only=True
    )

    transforms = ()
    delay_release = 0
    collective_axes = None
    oob_fill_mode = OOBFillMode.ZEROS

    def __init__(self, block_shape=None, index_map=None, pipeline_mode=None, *, memory_space=None):
        if not (pipeline_mode is None or isinstance(pipeline_mode, Buffered)):
            raise TypeError(
                f"BlockSpec: pipeline_mode must be pl.Buffered(n) or None, got"
                f" {show(pipeline_mode)}"
            )
        if callable(block_shape) and not isinstance(block_shape, type):
            raise TypeError("BlockSpec: block_shape comes first, then index_map")
        if not (block_shape is None or isinstance(block_shape, (tuple, list))):
            raise TypeError(
                f"BlockSpec: block_shape must be a tuple or None, got {show(block_shape)}"
            )
        if not (index_map is None or callable(index_map)):
            raise TypeError(
                f"BlockSpec: index_map must be a function or None, got {show(index_map)}"
            )
        if not isinstance(memory_space, (MemorySpace, GenericMemorySpace, type(None))):
            raise TypeError(
                f"BlockSpec: memory_space must be plgpu.GMEM, plgpu.SMEM, pl.ANY or None, got"
                f" {show(memory_space)}"
            )
        self.block_shape = None if block_shape is None else tuple(block_shape)
        self.index_map = None if index_map is None else _as_tuple(index_map)
        self.pipeline_mode = pipeline_mode
        self.memory_space = memory_space

    def replace(self, **changes):
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


GenericBlockSpec.__name__ = GenericBlockSpec.__qualname__ = "BlockSpec"


def _add_transform(make):
    """For `accepts`: an older keyword for one transform."""

    def add(args, kwargs, value):
        given = kwargs.get("transforms", ())
        given = (given,) if isinstance(given, Transform) else tuple(given)
        if any(isinstance(t, make) for t in given):
            raise ValueError("BlockSpec: give transforms=, not tiling= and swizzle= too")
        if value is not None:
            kwargs["transforms"] = (*given, make(value))
        return "use transforms=(TilingTransform(...), SwizzleTransform(...))"

    return add


@dataclasses.dataclass(init=False)
class BlockSpec(GenericBlockSpec):
    """How an array is divided into blocks, and how a block is staged in SMEM.

    Has the fields of `pl.BlockSpec` and these. ``transforms``: the transforms of each SMEM slot.
    ``delay_release``: the number of further steps after which a slot is refilled.
    ``collective_axes``: a cluster axis along which the block is multicast.
    ``oob_fill_mode``: what a copy writes for elements outside the array.
    """

    transforms: tuple = ()
    delay_release: int = 0
    collective_axes: tuple | None = None  # type: ignore[assignment]
    oob_fill_mode: OOBFillMode = OOBFillMode.ZEROS

    @accepts(tiling=_add_transform(TilingTransform), swizzle=_add_transform(SwizzleTransform))
    def __init__(
        self,
        block_shape=None,
        index_map=None,
        pipeline_mode=None,
        transforms=(),
        delay_release=0,
        collective_axes=None,
        oob_fill_mode=OOBFillMode.ZEROS,
        *,
        memory_space=None,
    ):
        super().__init__(block_shape, index_map, pipeline_mode, memory_space=memory_space)
        transforms = (transforms,) if isinstance(transforms, Transform) else tuple(transforms)
        for t in transforms:
            if not isinstance(t, Transform):
                raise TypeError(f"BlockSpec: transforms must be plgpu transforms, got {show(t)}")
        if not isinstance(delay_release, int) or delay_release < 0:
            raise ValueError(
                f"BlockSpec: delay_release must be an int of at least 0, got {show(delay_release)}"
            )
        self.transforms = transforms
        self.delay_release = delay_release
        self.collective_axes = axis_names(collective_axes) or None
        self.oob_fill_mode = check_oob_fill_mode(oob_fill_mode, "BlockSpec: oob_fill_mode")


# ---- layouts -------------------------------------------------------------------------------------


class Replicated(_Frozen):
    """In the warp or lane dims of ``Layout.TILED``: replicated ``times`` times."""

    __slots__ = ("times",)

    def __init__(self, times):
        self._set(times=int(times))


class Tiling(_Frozen, TilingMethods):
    """A sequence of tiles. Each tile divides the trailing dimensions that the previous one
    leaves."""

    __slots__ = ("tiles",)

    def __init__(self, tiles):
        tiles = tuple(tuple(int(d) for d in t) for t in tiles)
        if not tiles:
            raise ValueError("Tiling: at least one tile is needed")
        self._set(tiles=tiles)


class _LayoutValue(_Frozen):
    """A register layout: a member of :class:`Layout`, possibly with arguments and reduced axes."""

    __slots__ = ("spec", "text")

    def __init__(self, spec, text):
        self._set(spec=spec, text=text)

    def reduce(self, axes):
        """The layout of the array after reducing ``axes``, an int or ints, not negative."""
        axes = ints(axes, "Layout.reduce: axes")
        if min(axes, default=0) < 0:
            raise ValueError(f"Layout.reduce: axes must not be negative, got {axes}")
        return _LayoutValue(
            ("reduce", self.spec, axes), f"{self.text}.reduce({', '.join(map(str, axes))})"
        )

    def __eq__(self, other):
        other = getattr(other, "value_spec", other)
        return isinstance(other, _LayoutValue) and self.spec == other.spec

    def __hash__(self):
        return hash(self.spec)

    def __repr__(self):
        return f"Layout.{self.text}"


_OLDER_LAYOUTS = {  # name: the layout and the reduced axis
    "WGMMA_ROW": ("WGMMA", 1),
    "WGMMA_COL": ("WGMMA", 0),
    "TCGEN05_ROW": ("TCGEN05", 1),
    "TCGEN05_COL": ("TCGEN05", 0),
    "TCGEN05_TMEM_NATIVE_ROW": ("TCGEN05_TMEM_NATIVE", 1),
}


class _LayoutType(enum.EnumMeta):
    def __getattr__(cls, name):
        if name in _OLDER_LAYOUTS:
            full, axis = _OLDER_LAYOUTS[name]
            deprecated(f"Layout.{name} is an older spelling; use Layout.{full}.reduce({axis})", 2)
            return cls[full].reduce(axis)
        if name == "TMA_GATHER_INDICES":
            return cls.TMA_INDICES
        if name == "WGMMA_ROW_MAJOR":
            raise AttributeError("Layout has no 'WGMMA_ROW_MAJOR'; the right form is Layout.WGMMA")
        raise AttributeError(f"Layout has no {name!r}; it has {', '.join(cls.__members__)}")


class Layout(enum.Enum, metaclass=_LayoutType):
    """Register layouts of arrays. docs/arrays.md defines the position of each element.

    Members without parameters are layouts. The others are called to make one:
    ``Layout.WG_STRIDED(shape, vec_size)``. ``.reduce(axes)`` is the layout after a reduction.
    """

    WGMMA = 1
    WGMMA_8BIT = 2
    WGMMA_UPCAST_2X = 3
    WGMMA_UPCAST_4X = 4
    WGMMA_TRANSPOSED = 5
    WG_SPLAT = 6
    WG_STRIDED = 7
    TILED = 8
    TCGEN05 = 9
    TCGEN05_TRANSPOSED = 10
    TCGEN05_M64_COLLECTIVE = 11
    TCGEN05_TMEM_NATIVE = 12
    TCGEN05_M64_COLLECTIVE_NATIVE = 13
    SMEM_GMEM_COPY = 14
    TMA_INDICES = 15
    TMA_INDICES_4 = 16
    _WGMMA_ACC_32BIT = 17
    MMA_LHS = 18
    MMA_RHS = 19
    MMA_ACC = 20

    @property
    def value_spec(self):
        """The layout of a member used without arguments."""
        if self is Layout.WG_SPLAT:
            return _LayoutValue(("splat",), "WG_SPLAT")
        if self is Layout._WGMMA_ACC_32BIT:
            return Layout.WGMMA.value_spec
        if self is Layout.TCGEN05_TMEM_NATIVE:
            return _tmem_native()
        if self.name in _LAYOUT_ARGUMENTS:
            form = f"{self.name}({_LAYOUT_ARGUMENTS[self.name]})"
            raise ValueError(f"Layout.{self.name} needs arguments: {form}")
        return _named(self.name)

    def __call__(self, *args, **kwargs):
        if self is Layout.WG_SPLAT:
            return self.value_spec
        make = {
            Layout.WG_STRIDED: _strided,
            Layout.TILED: _tiled,
            Layout.SMEM_GMEM_COPY: _smem_gmem_copy,
            Layout.MMA_LHS: functools.partial(_mma_operand, self.name),
            Layout.MMA_RHS: functools.partial(_mma_operand, self.name),
            Layout.MMA_ACC: functools.partial(_mma_operand, self.name),
            Layout.TCGEN05_TMEM_NATIVE: _tmem_native,
            Layout.TCGEN05_M64_COLLECTIVE: _m64_collective,
            Layout.TCGEN05_M64_COLLECTIVE_NATIVE: _m64_collective_native,
        }.get(self)
        if make is not None:
            return make(*args, **kwargs)
        value = self.value_spec
        if args or kwargs:
            raise ValueError(f"Layout.{self.name} takes no arguments")
        return value

    def reduce(self, axes):
        """The layout of the array after reducing ``axes``."""
        return self.value_spec.reduce(axes)


def _strided(shape, vec_size):
    shape, (vec_size,) = _shape(shape, "WG_STRIDED"), ints(vec_size, "WG_STRIDED: vec_size")
    n = math.prod(shape)
    if vec_size < 1:
        raise ValueError(f"Layout.WG_STRIDED: vec_size must be positive, got {vec_size}")
    if n % (128 * vec_size):
        raise ValueError(f"Layout.WG_STRIDED: {n} elements are not a multiple of 128 * {vec_size}")
    return _LayoutValue(("strided", vec_size), f"WG_STRIDED({shape}, {vec_size})")


def _tiled(tiling, warp_dims, lane_dims, vector_dim):
    if not isinstance(tiling, Tiling):
        raise TypeError(f"Layout.TILED: tiling must be a plgpu.Tiling, got {show(tiling)}")

    def dims(ds):
        ds = ds if isinstance(ds, (tuple, list)) else (ds,)
        what = "Layout.TILED: warp_dims and lane_dims"
        return tuple(
            ("rep", d.times) if isinstance(d, Replicated) else ints(d, what)[0] for d in ds
        )

    spec = (tiling.tiles, dims(warp_dims), dims(lane_dims), int(vector_dim))
    return _LayoutValue(("tiled", *spec), f"TILED{spec}")


def _mma_operand(name, dtype):
    """MMA_LHS, MMA_RHS and MMA_ACC: operands of mma.sync."""
    bits = itemsize_bits(_core.as_dtype(dtype))
    if name == "MMA_ACC":
        return Layout.WGMMA.value_spec
    return _named(name, bits)


def _named(name, *arguments):
    """A layout of csrc/ir/layouts.def."""
    text = f"{name}({', '.join(map(str, arguments))})" if arguments else name
    return _LayoutValue(("named", name.lower(), arguments), text)


def _tmem_native(vector_length=2):
    what = "Layout.TCGEN05_TMEM_NATIVE: vector_length"
    (n,) = ints(vector_length, what)
    if n < 1:
        raise ValueError(f"{what} must be positive, got {n}")
    return _named("TCGEN05_TMEM_NATIVE", n)


def _columns(columns, what):
    (n,) = ints(columns, f"{what}: columns")
    if n < 16 or n % 16:
        raise ValueError(f"{what}: columns must be a positive multiple of 16, got {n}")
    return n


def _m64_collective(columns):
    name = "TCGEN05_M64_COLLECTIVE"
    return _named(name, _columns(columns, f"Layout.{name}"))


def _m64_collective_native(columns, packing=1):
    name = "TCGEN05_M64_COLLECTIVE_NATIVE"
    columns = _columns(columns, f"Layout.{name}")
    (packing,) = ints(packing, f"Layout.{name}: packing")
    if packing < 1 or columns // 2 % packing:
        raise ValueError(f"Layout.{name}: packing must divide {columns // 2}, got {packing}")
    return _named(name, columns, packing)


def _smem_gmem_copy(shape, dtype, swizzle):
    """A layout of 16-byte pieces of the rows of a swizzled buffer, without bank conflicts."""
    shape, what = _shape(shape, "SMEM_GMEM_COPY"), "Layout.SMEM_GMEM_COPY"
    if swizzle not in (32, 64, 128):
        raise ValueError(f"{what}: swizzle must be 32, 64 or 128, got {show(swizzle)}")
    size = _core.as_dtype(dtype).itemsize
    width = swizzle // size
    if len(shape) != 2 or shape[0] % 8 or shape[1] % width:
        raise ValueError(f"{what}: shape {shape} is not a multiple of (8, {width})")
    rows, columns = shape[0] // 8, shape[1] // width
    warps = (4, 1) if rows % 4 == 0 else (2, 2) if rows % 2 == 0 else (1, 4)
    if columns % warps[1]:
        raise NotImplementedError(f"{what}: {shape} does not divide into four parts of whole tiles")
    rows, columns = rows // warps[0], columns // warps[1]
    piece, tall, wide = min(16, swizzle // 4), 1, 1
    while piece < 16 and (columns % 2 == 0 or rows % 2 == 0):
        if columns % 2 == 0:
            wide, columns = wide * 2, columns // 2
        else:
            tall, rows = tall * 2, rows // 2
        piece *= 2
    vec = piece // size
    each = 8 // max(1, 8 * width // (32 * vec))  # rows of a tile that a warp takes at once
    names, kept = ["", ""], [(warps[0] * tall * 8, warps[1] * wide * width)]
    for tile, quotient in (
        ((tall * 8, wide * width), ("warp row", "warp column")),
        ((8, width), ("tile row", "tile column")),
        ((each, width), ("", "")),
    ):
        if tile != kept[-1]:
            kept.append(tile)
            names += quotient
    names += ["row", "column", "vector"]

    def dims(*wanted):
        return tuple(names.index(name) - len(names) for name in wanted if name in names)

    lanes = dims("tile row", "tile column", "row", "column")
    return _tiled(Tiling([*kept, (vec,)]), dims("warp row", "warp column"), lanes, -1)


_LAYOUT_ARGUMENTS = {
    "WG_STRIDED": "shape, vec_size",
    "TILED": "tiling, warp_dims, lane_dims, vector_dim",
    "SMEM_GMEM_COPY": "shape, dtype, swizzle",
    "MMA_LHS": "dtype",
    "MMA_RHS": "dtype",
    "MMA_ACC": "dtype",
    "TCGEN05_M64_COLLECTIVE": "columns",
    "TCGEN05_M64_COLLECTIVE_NATIVE": "columns, packing=1",
}


def layout_spec(layout):
    """The core's description of a layout. TypeError for anything but a layout."""
    if isinstance(layout, Layout):
        return layout.value_spec.spec
    if isinstance(layout, _LayoutValue):
        return layout.spec
    raise TypeError(f"layout must be a plgpu.Layout, got {show(layout)}")


# ---- compiler parameters and meshes --------------------------------------------------------------


class LoweringSemantics(enum.Enum):
    """Accepted and ignored: layouts are always inferred over the whole kernel."""

    Lane = 1
    Warpgroup = 2


class _Partitioned(_Frozen):
    """``CopyPartition.PARTITIONED(axis)``: each block receives its part along ``axis``."""

    __slots__ = ("axis",)

    def __init__(self, axis):
        (axis,) = ints(axis, "CopyPartition.PARTITIONED: axis")
        self._set(axis=axis)


class _Replicated(_Frozen):
    """``CopyPartition.REPLICATED``: both blocks receive everything."""

    __slots__ = ()

    def __init__(self):
        pass


class CopyPartition:
    """What the two blocks of a leader-tracked copy receive (Blackwell): ``PARTITIONED(axis)``, each
    its half; ``REPLICATED``, both everything."""

    PARTITIONED = _Partitioned
    REPLICATED = _Replicated()


class RefType(_Frozen):
    """The type of a ref argument of :func:`inline_cuda`, with the transforms of its SMEM
    allocation."""

    __slots__ = ("transforms",)

    def __init__(self, transforms=()):
        self._set(transforms=tuple(transforms))


class Semaphores(_Frozen):
    """An allocation of semaphores: ``SemaphoreType.REGULAR``, or ``REGULAR(shape)`` for several."""

    __slots__ = ("shape",)
    dtype, memory_space = "semaphore", GMEM

    def __init__(self, shape=()):
        shape = ints(shape, "SemaphoreType: shape")
        if min(shape, default=1) < 1:
            raise ValueError(f"SemaphoreType: dimensions must be positive, got {shape}")
        self._set(shape=shape)

    def __repr__(self):
        return f"SemaphoreType.REGULAR({self.shape})"


class SemaphoreType(enum.Enum):
    """Kinds of semaphores: int32 counters that start at 0, for :func:`semaphore_signal` and
    :func:`semaphore_wait`.

    In ``scratch_types`` and ``pl.run_scoped``, a semaphore belongs to the block and must be 0 again
    when the scope ends. ``pl.get_global`` makes semaphores that all blocks of a launch share.
    ``BARRIER`` cannot be allocated on GPUs."""

    REGULAR = "regular"
    BARRIER = "barrier"

    def __call__(self, shape=()):
        if self is SemaphoreType.BARRIER:
            raise NotImplementedError(
                "SemaphoreType.BARRIER cannot be allocated on a GPU; use SemaphoreType.REGULAR"
            )
        return Semaphores(shape)


class TraceScope(enum.Enum):
    """Whose trace the profiler records: that of each thread, or that of each warp."""

    WARP = "warp"
    WARPGROUP = "warpgroup"


def _num_stages(args, kwargs, value):
    """For `accepts`: an older keyword, or a parameter of Pallas' Triton backend."""
    if value is None or "num_warps" in kwargs:
        return None
    if "max_concurrent_steps" in kwargs:
        raise ValueError("CompilerParams: cannot specify both max_concurrent_steps and num_stages")
    kwargs["max_concurrent_steps"] = value
    return "use max_concurrent_steps="


def _of_triton(args, kwargs, value):
    """For `accepts`: a parameter of Pallas' Triton backend."""
    warnings.warn(
        "CompilerParams: num_warps and num_stages are for Pallas' Triton backend and have no"
        " effect here; a program is one warpgroup",
        stacklevel=3,
    )


class CompilerParams(_Frozen):
    """Parameters of the compiler. Keyword only.

    ``approx_math``: use fast approximations of exp, exp2, log, sin, cos, tanh and rsqrt on float32.
    ``exact_division``: round all quotients of floats correctly, as ``lax.div(x, y, exact=True)``.
    ``unsafe_no_auto_barriers``: insert no lane barriers around loads and stores of arrays.
    ``max_concurrent_steps``, ``dimension_semantics``: for ``pl.pallas_call`` only.
    ``reduction_scratch_bytes``: the maximum SMEM, in bytes, that each Pallas thread may use to
    combine the partial results of its warps in a reduction. A smaller limit needs more steps, each
    with two lane barriers, and gives the same bits. ValueError when the kernel is lowered if not
    even one step fits. Memory that is not needed is not allocated.
    ``profile_space``, ``profile_dir``: record when each `named_scope` of the body begins and ends,
    with space for that many scopes of each thread, and write a trace into that directory after
    every call; see docs/profiling.md. ``profile_space`` takes 16 bytes of SMEM each. ValueError if
    only one of them is given. ``profile_trace_scope``: a trace for each thread or for each warp.
    ``profile_bounds_check``: drop scopes for which there is no space; otherwise they are a
    RuntimeError after the call.
    ``lowering_semantics`` is ignored. ``num_warps`` and ``num_stages`` of Pallas' Triton backend
    are ignored with a warning.
    """

    __slots__ = (
        "approx_math",
        "dimension_semantics",
        "max_concurrent_steps",
        "unsafe_no_auto_barriers",
        "reduction_scratch_bytes",
        "profile_space",
        "profile_dir",
        "profile_trace_scope",
        "profile_bounds_check",
        "lowering_semantics",
        "exact_division",
    )

    @accepts(
        num_stages=_num_stages,
        num_warps=_of_triton,
        thread_semantics="lowering_semantics",
        delay_release=TypeError(
            "CompilerParams: delay_release belongs to plgpu.BlockSpec(delay_release=...)"
        ),
    )
    def __init__(
        self,
        *,
        approx_math=False,
        dimension_semantics=None,
        max_concurrent_steps=1,
        unsafe_no_auto_barriers=False,
        reduction_scratch_bytes=2048,
        profile_space=0,
        profile_dir="",
        profile_trace_scope=TraceScope.WARPGROUP,
        profile_bounds_check=False,
        lowering_semantics=LoweringSemantics.Warpgroup,
        exact_division=False,
    ):
        if not isinstance(profile_dir, str | os.PathLike):
            raise TypeError(f"CompilerParams: profile_dir must be a path, got {show(profile_dir)}")
        if bool(profile_space) != bool(profile_dir):
            raise ValueError("CompilerParams: profile_space and profile_dir go together")
        if not hasattr(profile_space, "__index__") or not 0 <= profile_space.__index__() < 2**14:
            raise ValueError(
                "CompilerParams: profile_space must be an int from 0 to 16,383, got"
                f" {show(profile_space)}"
            )
        if not isinstance(profile_trace_scope, TraceScope):
            raise TypeError(
                "CompilerParams: profile_trace_scope must be a plgpu.TraceScope, got"
                f" {show(profile_trace_scope)}"
            )
        n = reduction_scratch_bytes
        if not hasattr(n, "__index__") or isinstance(n, bool) or not 0 <= n.__index__() < 2**31:
            raise ValueError(
                "CompilerParams: reduction_scratch_bytes must be an int of at least 0, got"
                f" {show(n)}"
            )
        if isinstance(dimension_semantics, list):
            dimension_semantics = tuple(dimension_semantics)
        self._set(
            approx_math=bool(approx_math),
            dimension_semantics=dimension_semantics,
            max_concurrent_steps=max_concurrent_steps,
            unsafe_no_auto_barriers=bool(unsafe_no_auto_barriers),
            reduction_scratch_bytes=reduction_scratch_bytes.__index__(),
            profile_space=profile_space.__index__(),
            profile_dir=os.fspath(profile_dir),
            profile_trace_scope=profile_trace_scope,
            profile_bounds_check=bool(profile_bounds_check),
            lowering_semantics=lowering_semantics,
            exact_division=bool(exact_division),
        )


class LoggingMode(enum.Flag):
    """Events that ``InterpretParams(logging_mode=)`` prints; combine them with ``|``."""

    BARRIER = 1
    SEMAPHORE = 2
    SHARED_MEMORY = 4


class InterpretParams(_Frozen):
    """How ``interpret=`` runs a kernel on the CPU. Keyword only.

    ``seed``: the seed of the schedule; the same seed gives the same interleaving.
    ``seeds``: run that many schedules, from ``seed`` on. The result is that of the first;
    :class:`ScheduleError` if another one gives other bits.
    ``out_of_bounds_reads``: "raise" (IndexError) or "uninitialized".
    ``uninitialized_memory``: reads as "nan" (NaN, the largest integer, True) or "zero".
    ``skip_floating_point_ops``: skip float arithmetic. Every float that is loaded or would be
    computed reads as +inf (constants keep their value); integers, branches and synchronisation
    still run. Finds deadlocks quickly.
    ``logging_mode``: a :class:`LoggingMode`; prints a line for each of these events.
    ``num_cores_or_threads``, ``num_tma_threads_per_device``: no effect. The kernel's
    ``num_threads`` applies, and the number of copies in flight is not limited.
    ``detect_races``: report accesses to the same memory that nothing orders, whatever the schedule.
    ``on_race``: "raise" (:class:`RaceError` at the first race), "warn" (a UserWarning at the second
    access of each race) or "record"; :func:`get_races` returns all of them.
    ``detect_uninitialized``: :class:`UninitializedError` where a value of memory that was never
    written decides a branch, an address or a mask, or is in an output at the end.
    ``mode``: with "strict", ``detect_races`` also warns about code that is correct here but that
    JAX refuses ("not portable to JAX: ..."); with "reference" it does not. Deadlocks and
    out-of-bounds accesses are always reported.
    ``timeline``: a file, to which each run writes what every agent did and when, in the time of a
    simple model of the GPU; see :func:`read_trace`.
    ``backend``: "interpret", or "emulate": the generated CUDA program runs on an emulated GPU that
    checks the order of all accesses, whatever ``detect_races`` says. It needs g++ 12 or later
    (else NotImplementedError) and ends at the first error. Short: ``interpret="emulate"``.
    ValueError for other values, NotImplementedError for other kinds of ``uninitialized_memory``.
    """

    __slots__ = (
        "detect_races",
        "out_of_bounds_reads",
        "uninitialized_memory",
        "skip_floating_point_ops",
        "num_cores_or_threads",
        "vector_clock_size",
        "num_tma_threads_per_device",
        "logging_mode",
        "seed",
        "on_race",
        "seeds",
        "detect_uninitialized",
        "mode",
        "timeline",
        "backend",
    )

    def __init__(
        self,
        *,
        seed=0,
        seeds=1,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        skip_floating_point_ops=False,
        num_cores_or_threads=1,
        vector_clock_size=None,
        num_tma_threads_per_device=5,
        logging_mode=None,
        detect_races=False,
        on_race="raise",
        detect_uninitialized=False,
        mode="strict",
        timeline=None,
        backend="interpret",
    ):
        what = "InterpretParams"
        words = {
            "backend": (backend, "interpret", "emulate"),
            "out_of_bounds_reads": (out_of_bounds_reads, "raise", "uninitialized"),
            "on_race": (on_race, "raise", "warn", "record"),
            "mode": (mode, "strict", "reference"),
        }
        for name, (given, *accepted) in words.items():
            if given not in accepted:
                *some, last = map(repr, accepted)
                raise ValueError(
                    f"{what}: {name} must be {', '.join(some)} or {last}, got {show(given)}"
                )
        if uninitialized_memory not in ("nan", "zero"):
            raise NotImplementedError(
                f"{what}: uninitialized_memory must be 'nan' or 'zero',"
                f" got {show(uninitialized_memory)}"
            )
        counts = {
            "seeds": seeds,
            "num_cores_or_threads": num_cores_or_threads,
            "num_tma_threads_per_device": num_tma_threads_per_device,
        }
        for name, n in counts.items():
            if isinstance(n, bool) or not hasattr(n, "__index__") or n.__index__() < 1:
                raise ValueError(f"{what}: {name} must be an int of at least 1, got {show(n)}")
        if not hasattr(seed, "__index__"):
            raise TypeError(f"{what}: seed must be an int, got {show(seed)}")
        if not (timeline is None or isinstance(timeline, str | os.PathLike)):
            raise TypeError(f"{what}: timeline must be a path or None, got {show(timeline)}")
        if vector_clock_size is not None:
            raise ValueError(
                f"{what}: vector_clock_size must be None on a GPU, got {show(vector_clock_size)}"
            )
        if not (logging_mode is None or isinstance(logging_mode, LoggingMode)):
            raise TypeError(
                f"{what}: logging_mode must be a plgpu.LoggingMode or None, got"
                f" {show(logging_mode)}"
            )
        missing = {
            "skip_floating_point_ops": bool(skip_floating_point_ops),
            "logging_mode": logging_mode is not None,
            "timeline": timeline is not None,
            "out_of_bounds_reads='uninitialized'": out_of_bounds_reads != "raise",
            f"on_race={on_race!r}": on_race != "raise",
        }
        if backend == "emulate" and any(missing.values()):
            given = next(name for name, there in missing.items() if there)
            raise NotImplementedError(
                f"{what}: {given} is not available with backend='emulate', where the generated"
                " program runs and ends at the first error; use backend='interpret'"
            )
        self._set(
            backend=backend,
            seed=seed.__index__(),
            out_of_bounds_reads=out_of_bounds_reads,
            uninitialized_memory=uninitialized_memory,
            skip_floating_point_ops=bool(skip_floating_point_ops),
            vector_clock_size=None,
            logging_mode=logging_mode,
            detect_races=bool(detect_races),
            detect_uninitialized=bool(detect_uninitialized),
            on_race=on_race,
            mode=mode,
            timeline=None if timeline is None else os.fspath(timeline),
            **{name: n.__index__() for name, n in counts.items()},
        )

    log = property(lambda self: self.logging_mode.value if self.logging_mode else 0)


def _split_axis_names(args, kwargs, names):
    """For `accepts`: the names of all axes in one sequence, starting with those of the grid."""
    names = (names,) if isinstance(names, str) else tuple(names)
    n, m = (
        len(x) if isinstance(x, (tuple, list)) else 1
        for x in (kwargs.get("grid", ()), kwargs.get("cluster", ()))
    )
    kwargs.update(grid_names=names[:n], cluster_names=names[n : n + m])
    if len(names) > n + m:
        kwargs["thread_name"], *more = names[n + m :]
        if more:
            raise ValueError(f"Mesh: too many axis_names, {names}")
    return "use grid_names=, cluster_names=, thread_name="


class Mesh(_Frozen):
    """Names and sizes of the axes that a kernel runs over.

    ``grid``: the number of clusters along each axis; the names may be omitted. ``cluster``: the
    number of blocks of a cluster along each axis, at most 3 axes and 16 blocks. ``num_threads``:
    the number of Pallas threads (warpgroups) of a block, at most 8, which are 1,024 CUDA threads.
    TypeError, ValueError for other sizes and for names that are not distinct.
    """

    __slots__ = (
        "grid",
        "grid_names",
        "cluster",
        "cluster_names",
        "num_threads",
        "thread_name",
        "kernel_name",
    )

    @accepts(axis_names=_split_axis_names)
    def __init__(
        self,
        *,
        grid=(),
        grid_names=(),
        cluster=(),
        cluster_names=(),
        num_threads=None,
        thread_name=None,
        kernel_name=None,
    ):
        def axes(sizes, what):
            sizes = (sizes,) if isinstance(sizes, int) or _is_dim(sizes) else sizes
            try:
                out = tuple(
                    s if what == "grid" and _is_dim(s) else int(s.__index__()) for s in sizes
                )
            except (TypeError, AttributeError):
                raise TypeError(
                    f"Mesh: {what} must be a tuple of ints, got {show(sizes)}"
                ) from None
            if min((s for s in out if isinstance(s, int)), default=1) < 1:
                raise ValueError(f"Mesh: {what} must be positive, got {out}")
            return out

        def names(ns, what):
            try:
                ns = (ns,) if isinstance(ns, str) else tuple(ns)
                hash(ns)
            except TypeError:
                raise TypeError(
                    f"Mesh: {what} must be a tuple of hashable names, got {show(ns)}"
                ) from None
            return ns

        grid, cluster = axes(grid, "grid"), axes(cluster, "cluster")
        grid_names = names(grid_names, "grid_names")
        cluster_names = names(cluster_names, "cluster_names")
        if grid_names and len(grid_names) != len(grid):
            raise ValueError(f"Mesh: grid {grid} and grid_names {grid_names} differ in length")
        if len(cluster) > 3:
            raise ValueError(f"Mesh: a cluster has at most 3 axes, got {cluster}")
        if len(cluster_names) != len(cluster):
            raise ValueError(f"Mesh: cluster {cluster} and names {cluster_names} differ in length")
        if (num_threads is None) != (thread_name is None):
            raise ValueError(
                "Mesh: num_threads and thread_name go together, got"
                f" num_threads={num_threads!r}, thread_name={thread_name!r}"
            )
        if math.prod(cluster) > 16:
            raise ValueError(f"Mesh: a cluster has at most 16 blocks, got {cluster}")
        if num_threads is not None:
            (thread_name,) = names((thread_name,), "thread_name")
            if isinstance(num_threads, bool) or not hasattr(num_threads, "__index__"):
                raise TypeError(f"Mesh: num_threads must be an int, got {show(num_threads)}")
            num_threads = num_threads.__index__()
            if not 1 <= num_threads <= 8:
                raise ValueError(
                    f"Mesh: num_threads must be 1 to 8, as a block has at most 1024 CUDA threads,"
                    f" 128 for each; got {num_threads}"
                )
        if not (kernel_name is None or isinstance(kernel_name, str) and kernel_name.isprintable()):
            raise TypeError(f"Mesh: kernel_name must be printable text, got {show(kernel_name)}")
        every = [*grid_names, *cluster_names, *([thread_name] if thread_name is not None else [])]
        if len(set(every)) != len(every):
            raise ValueError(f"Mesh: axis names must differ, got {every}")
        self._set(
            grid=grid,
            grid_names=grid_names,
            cluster=cluster,
            cluster_names=cluster_names,
            num_threads=num_threads,
            thread_name=thread_name,
            kernel_name=kernel_name,
        )

    default_memory_space = GMEM
    core_type = "gpu"

    @property
    def shape(self):
        """Axis name to size: grid axes, cluster axes, the thread axis."""
        out = dict(zip(self.grid_names, self.grid))
        out.update(zip(self.cluster_names, self.cluster))
        if self.thread_name is not None:
            out[self.thread_name] = self.num_threads
        return out
