"""Kernels on several GPUs: a mesh of devices, memory that all of them reach, and calls on all.

One process may drive all devices of a mesh, or one process each device. In one process, `_core`
opens the devices' memory to each other and launches on all of them. With a process group of
`torch.distributed`, each process launches on its own device, and PyTorch's symmetric memory or
NVSHMEM (_symmetric.py) says where the others' arrays are. Kernels see no difference: they get one
table of addresses. On the interpreter, a mesh has as many devices as it says, and no GPU is needed.

Equal meshes share a watch (_watch.py), which is also what is closed. Closing refuses new calls,
waits for kernels in flight, and lets the processes meet before and after each gives up the memory
of the others, so that nobody frees memory that a peer has mapped."""

import copy
import functools
import math

import numpy as np

from . import _core, tree
from ._frameworks import check_recorded
from ._kernel import RefKernel
from ._mutable import MutableArray
from ._names import show
from ._symmetric import MEMORIES, _torch, bootstrap, new_tensor, peers_of, release
from ._types import ShapeDtypeStruct, _Frozen, _shape, ints
from ._watch import watch_of


class PartitionSpec(tuple):
    """How an array is split over a mesh: for each dimension the name of an axis, a tuple of names,
    or None. Dimensions that are left out are not split."""

    def __new__(cls, *parts):
        for part in parts:
            names = part if isinstance(part, tuple) else (part,)
            if not all(n is None or isinstance(n, str) for n in names):
                raise TypeError(f"PartitionSpec: axis names or None, got {show(part)}")
        return super().__new__(cls, parts)

    def __repr__(self):
        return f"PartitionSpec{tuple(self)!r}"


MESHES: dict = {}  # the last mesh of each name


def _name_of(shape, axis_names, devices, group, memory):
    """What graphs of PyTorch call a mesh by: the same in every process that makes it."""
    text = ",".join(f"{a}={n}" for a, n in zip(axis_names, shape))
    if devices is not None:
        text += f" of {','.join(map(str, devices))}"
    if group is None:
        return text
    text = f"{text} of group {getattr(group, 'group_name', group)}"
    return text if memory == MEMORIES[0] else f"{text} by {memory}"


class DeviceMesh(_Frozen):
    """Devices that run a kernel together, in a grid with named axes.

    shape, axis_names: sizes and names of the axes. A device's number is row-major in them.
    devices: ordinals of GPUs of this process, in that order. One GPU may stand for several devices
        of the mesh, to test kernels; all of their blocks must fit on it at once. Without devices
        and group, the mesh is for the interpreter.
    group: a process group of ``torch.distributed`` with a process for each device, in the order of
        their ranks; each process uses its current CUDA device. ``True`` is the default group.
    memory: with ``group``, what `symm_empty` allocates: ``"torch"``, PyTorch's symmetric memory, or
        ``"nvshmem"``, the symmetric heap of nvshmem4py. ``nvshmem.core`` is initialised over the
        group, which must have all processing elements, unless the program did so before. None:
        ``"torch"``.
    timeout: seconds after which a wait of a kernel for another device ends, 0: never; None:
        PALLAS_MGPU_MESH_SECONDS. When waits have ended, or a process of the group has, or a launch
        failed, every later call on the mesh is a DeadlockError that names the waits.

    ``name``: the name of the mesh in operators of PyTorch, made of its axes, devices and group.

    In a ``with`` statement, the mesh is closed at the end, see :meth:`close`. If an exception
    leaves the statement, the waits of this process' kernels for other devices end first.

    ValueError where the numbers do not fit, or devices cannot access each other's memory;
    ImportError without nvshmem4py.
    """

    __slots__ = ("axis_names", "devices", "group", "memory", "name", "shape", "_watch")

    def __init__(self, shape, axis_names, *, devices=None, group=None, memory=None, timeout=None):
        what = "DeviceMesh"
        names = (axis_names,) if isinstance(axis_names, str) else axis_names
        if not isinstance(names, (tuple, list)):
            raise TypeError(f"{what}: axis_names must be strings, got {show(axis_names)}")
        names = tuple(names)
        shape = ints(shape, f"{what}: shape")
        if len(shape) != len(names) or not shape:
            raise ValueError(f"{what}: one name for each axis, got {names} for shape {shape}")
        if min(shape) < 1 or len(shape) > 8:
            raise ValueError(f"{what}: 1 to 8 axes of at least one device, got {shape}")
        if len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{what}: axis names must be different strings, got {names}")
        if devices is not None and group is not None:
            raise ValueError(f"{what}: give devices, of one process, or group, of several")
        if memory is not None and (group is None or memory not in MEMORIES):
            raise ValueError(
                f"{what}: memory must be one of {MEMORIES}, with group, got {show(memory)}"
                + ("" if group is not None else " without group")
            )
        n = math.prod(shape)
        if n > _core.MAX_DEVICES:
            raise ValueError(f"{what}: at most {_core.MAX_DEVICES} devices, got {n} of {shape}")
        if group is not None:
            group, memory = _group(group, n), memory or MEMORIES[0]
        if devices is not None:
            devices = ints(devices, f"{what}: devices")
            if len(devices) != n:
                raise ValueError(f"{what}: {n} devices are needed, got {devices}")
            if min(devices) < 0:
                raise ValueError(f"{what}: devices are numbers from 0 on, got {devices}")
            if n > 1:
                _core.mesh_connect(devices)
        name = _name_of(shape, names, devices, group, memory)
        watch = watch_of((shape, names, devices, group, memory), name, timeout)
        if memory == "nvshmem":
            bootstrap(watch, n)
        self._set(shape=shape, axis_names=names, devices=devices, group=group, name=name)
        self._set(memory=memory, _watch=watch)
        MESHES[name] = self

    def __repr__(self):
        return (
            f"DeviceMesh(shape={self.shape}, axis_names={self.axis_names}, devices={self.devices},"
            f" group={self.group})"
        )

    @property
    def timeout(self):
        """Seconds after which waits end, as given; None: PALLAS_MGPU_MESH_SECONDS."""
        return self._watch.timeout

    def replace(self, **changes):
        """A mesh with the given parameters of the constructor changed. Without a group, ``memory``
        is left out, too."""
        if changes.get("group", self.group) is None:
            changes.setdefault("memory", None)
        return super().replace(**changes)

    __replace__ = replace  # of `copy`

    @property
    def closed(self):
        """Was this mesh, or one equal to it, closed?"""
        return self._watch.closed

    def close(self):
        """Gives up what the mesh holds; a second call has no effect.

        Later calls of kernels and of `symm_empty` on this mesh, and on meshes equal to it, are a
        RuntimeError; a new DeviceMesh of the same devices begins anew. It waits for kernels on the
        devices, as long as their waits may last (``timeout``). With a process group, all ranks must
        call it, as a collective; it returns when none accesses the memory of another any more.
        Memory of NVSHMEM from `symm_empty` is freed, and its tensors must not be used any more;
        other arrays stay. If another rank has ended or does not call it before the timeout, the
        memory stays until the process ends.

        A mesh that is not closed lasts as long as the process. When the interpreter exits, kernels
        that still run after 5 seconds no longer wait for other devices.
        """
        watch = self._watch
        if watch.closed:
            return
        watch.closed = True
        if MESHES.get(self.name) == self:
            del MESHES[self.name]
        try:
            if watch.number and self.devices is not None:
                _core.mesh_drain(self.devices)
            if (watch.number or watch.tensors) and self.group is not None:
                _torch().cuda.synchronize()
        finally:
            release(watch)
            watch.forget()

    def __enter__(self):
        self._watch.check()
        return self

    def __exit__(self, error, value, traceback):
        if error is not None:
            self._watch.end(f"{error.__name__} left the with statement of the mesh")
        self.close()

    @property
    def size(self):
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def axes(self):
        """``((name, size), ...)`` of the axes."""
        return tuple(zip(self.axis_names, self.shape))

    def coordinates(self, number):
        """Where device ``number`` is, as {name: index}."""
        return dict(zip(self.axis_names, map(int, np.unravel_index(number, self.shape))))

    def __reduce__(self):
        if self.group is not None:
            raise TypeError("DeviceMesh: a mesh with a process group cannot be pickled")
        make = functools.partial(DeviceMesh, devices=self.devices, timeout=self.timeout)
        return make, (self.shape, self.axis_names)

    def __eq__(self, other):
        return type(other) is DeviceMesh and self._watch is other._watch

    def __hash__(self):
        return hash(self._watch)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


def _group(group, n):
    try:
        dist = _torch(".distributed")
    except ImportError as e:
        raise ImportError(f"DeviceMesh: group= needs PyTorch (pip install torch): {e}") from None
    if not dist.is_initialized():
        raise RuntimeError("DeviceMesh: group= needs torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is True else group
    if dist.get_world_size(group) != n:
        raise ValueError(
            f"DeviceMesh: the group has {dist.get_world_size(group)} processes, and {n} are needed"
        )
    return group


# ---- memory -------------------------------------------------------------------------------------


def symm_empty(shape, dtype, mesh, *, multicast=False):
    """Memory with the same shape on every device of the mesh, which all devices can access.

    In one process, a list of arrays, one for each device: `DeviceArray`, or NumPy arrays where the
    mesh is for the interpreter. With a process group, the tensor of this process; all processes
    must call it in the same order. The contents are zero. ``multicast``: also give the
    arrays an address through which NVLink stores to all of them, for ``multimem_store`` and
    similar operations.
    NotImplementedError for multicast on GPUs in one process; ValueError where the system has none,
    or where NVSHMEM has no address for the memory of another rank; RuntimeError if the mesh is
    closed.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"symm_empty: mesh must be a plgpu.DeviceMesh, got {show(mesh)}")
    spec = ShapeDtypeStruct(_shape(shape, "symm_empty"), dtype)
    mesh._watch.check()
    if mesh.group is not None:
        return new_tensor(spec, mesh, multicast)[0]
    host = [np.zeros(spec.shape, spec.dtype) for _ in range(mesh.size)]
    if mesh.devices is None:
        return host
    if multicast:
        raise NotImplementedError(
            "symm_empty: multicast=True in one process; use a process group, DeviceMesh(group=...),"
            " or plgpu.remote_ref instead of multicast"
        )
    return [_core.device_put(x, d) for x, d in zip(host, mesh.devices)]


def is_symmetric(x):
    """Is a tensor in memory that the other processes of its group reach?"""
    return peers_of(x) is not None


# ---- splitting ----------------------------------------------------------------------------------


def _names_of(part):
    names = part if isinstance(part, tuple) else (part,)
    return tuple(n for n in names if n is not None)


def _check_spec(spec, mesh, what):
    spec = PartitionSpec() if spec is None else PartitionSpec(*spec)
    used = [n for part in spec for n in _names_of(part)]
    unknown = [n for n in used if n not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{what}: {unknown[0]!r} is no axis of the mesh {mesh.axis_names}")
    if len(set(used)) < len(used):
        raise ValueError(f"{what}: an axis splits two dimensions of {spec}")
    return spec


def _slices(shape, spec, mesh, number, what):
    """The part of a whole array that device ``number`` has."""
    if len(spec) > len(shape):
        raise ValueError(f"{what} has {len(shape)} dimensions, and {spec} is for {len(spec)}")
    at, out = mesh.coordinates(number), []
    sizes = dict(mesh.axes)
    for size, part in zip(shape, (*spec, *[None] * (len(shape) - len(spec)))):
        parts, index = 1, 0
        for n in _names_of(part):
            parts, index = parts * sizes[n], index * sizes[n] + at[n]
        if size % parts:
            raise ValueError(f"{what}: {parts} devices cannot share {size} elements equally")
        out.append(slice(index * (size // parts), (index + 1) * (size // parts)))
    return tuple(out)


def _joined(parts, spec, mesh, what):
    """The whole array of the devices' parts."""
    sizes = dict(mesh.axes)
    shape = [
        d * math.prod(sizes[n] for n in _names_of(part))
        for d, part in zip(parts[0].shape, (*spec, *[None] * parts[0].ndim))
    ]
    out = np.empty(shape, parts[0].dtype)
    for number, part in enumerate(parts):
        out[_slices(shape, spec, mesh, number, what)] = part
    return out


# ---- calls --------------------------------------------------------------------------------------


def _empty(spec, like, number, mesh):
    """An array of the same kind as another one, on device `number`."""
    if isinstance(like, _core.DeviceArray):
        return _core.device_empty(spec.shape, spec.dtype, mesh.devices[number])
    if hasattr(like, "new_empty"):  # torch
        dtype = getattr(_torch(), spec.dtype.name)
        return like.new_empty(spec.shape, dtype=dtype)
    if isinstance(like, np.ndarray):
        return np.empty(spec.shape, spec.dtype)
    raise TypeError(f"spmd: fresh outputs for {show(like)}; give arrays as out=")


def _is_mutable(x):
    return isinstance(x, MutableArray)


class SpmdKernel:
    """What :func:`spmd` returns."""

    def __init__(self, kernel, mesh, in_specs, out_specs, ordered):
        what = "spmd"
        if isinstance(kernel, RefKernel) or not isinstance(kernel, _core.Kernel):
            raise TypeError(
                f"{what}: kernel must be a plgpu.kernel that closes over no mutable arrays, got"
                f" {show(kernel)}"
            )
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"{what}: mesh must be a plgpu.DeviceMesh, got {show(mesh)}")
        definition = copy.copy(kernel.definition)
        taken = {*definition.mesh.grid_names, *definition.mesh.cluster_names}
        taken.add(definition.mesh.thread_name)
        both = [n for n in mesh.axis_names if n in taken]
        if both:
            raise ValueError(f"{what}: {both[0]!r} is an axis of the kernel and of the mesh")
        definition.devices, definition.batched = mesh.axes, {}
        if definition.levels:
            raise NotImplementedError(f"{what}: a kernel under vmap; give the kernel one more axis")
        mesh._watch.check()
        self.mesh, self.ordered, self.definition = mesh, ordered, definition
        self.n = mesh.size
        self.in_specs, self.out_specs = in_specs, out_specs
        self.kernel = definition.make()
        self.checked = set()
        self.specs = {}
        self.counters = {}
        functools.update_wrapper(self, kernel, assigned=("__name__", "__doc__"), updated=())

    def __repr__(self):
        return f"<spmd of {self.definition.name} over {dict(self.mesh.axes)}>"

    def _specs(self, given, n, what):
        """Those of n arrays, which are checked once."""
        if (what, n) not in self.specs:
            self.specs[what, n] = self._checked_specs(given, n, what)
        return self.specs[what, n]

    def _checked_specs(self, given, n, what):
        one = given is None or isinstance(given, PartitionSpec)
        if not one and not (
            isinstance(given, (tuple, list))
            and all(isinstance(s, (tuple, type(None))) for s in given)
        ):
            raise TypeError(
                f"spmd: {what} must be a plgpu.PartitionSpec, or one for each array, got"
                f" {show(given)}"
            )
        specs = (given,) * n if one else tuple(given)
        if len(specs) != n:
            raise ValueError(f"spmd: {what} has {len(specs)} specs for {n} arrays")
        return [_check_spec(s, self.mesh, f"spmd: {what}[{k}]") for k, s in enumerate(specs)]

    def _split(self, args):
        """A tuple of arguments for each device, and whether all were whole arrays."""
        n, whole, columns = self.n, bool(args), []
        specs = self._specs(self.in_specs, len(args), "in_specs")
        for k, (x, spec) in enumerate(zip(args, specs)):
            what = f"{self.definition.name}: argument {k}"
            if isinstance(x, (list, tuple)):
                if len(x) != n:
                    raise ValueError(f"{what} is a list of {len(x)} arrays, for {n} devices")
                if any(map(_is_mutable, x)):
                    raise NotImplementedError(f"{what}: mutable arrays on a mesh; use out=")
                whole = False
                columns.append(x)
                continue
            if isinstance(x, MutableArray):
                raise NotImplementedError(f"{what}: mutable arrays on a mesh; use out=")
            if not isinstance(x, (np.ndarray, np.generic, int, float)):
                raise TypeError(
                    f"{what} must be a list of {n} arrays, one for each device, or a NumPy array"
                    f" that is split by its spec, got {show(x)}"
                )
            if not isinstance(x, np.ndarray):
                columns.append([x] * n)
                continue
            parts = [
                np.ascontiguousarray(x[_slices(x.shape, spec, self.mesh, d, what)])
                for d in range(n)
            ]
            if self._on_gpus():
                parts = [_core.device_put(p, d) for p, d in zip(parts, self.mesh.devices)]
            columns.append(parts)
        return list(zip(*columns)) if columns else [()] * n, whole

    def _on_gpus(self):
        return self.mesh.devices is not None and not self.definition.interpret

    def __call__(self, *args, out=None):
        check_recorded(self, args, out)
        if self.mesh.group is not None:
            return self._call_rank(args, out)
        n, watch = self.n, self.mesh._watch
        number = watch.open(self.mesh.devices[0]) if n > 1 and self._on_gpus() else watch.check()
        rows, whole = self._split(args)
        outs = [None] * n
        if out is not None:
            columns = self._outs(out, rows)
            for k, x in enumerate(columns):
                if not isinstance(x, (list, tuple)) or len(x) != n:
                    got = f"{len(x)} of them" if isinstance(x, (list, tuple)) else show(x)
                    raise ValueError(
                        f"{self.definition.name}: out[{k}] must be a list of {n} arrays, one for"
                        f" each device, got {got}"
                    )
            outs = list(zip(*columns)) if columns else [()] * n
        results = _core.mesh_call(
            self.kernel, rows, outs, self.mesh.devices, self.ordered, number or 0
        )
        return self._collect(results, whole and out is None)

    def _outs(self, out, rows):
        """The outputs given, with fresh ones where there is None."""
        name = self.definition.name
        if not self.definition.wrapped and not isinstance(out, (list, tuple)):
            raise ValueError(f"{name}: out must be a tuple of its outputs, got {show(out)}")
        columns = [out] if self.definition.wrapped else list(out)
        if len(columns) != len(self.definition.outs):
            raise ValueError(
                f"{name}: out has {len(columns)} arrays, the kernel {len(self.definition.outs)}"
            )
        given = [x[0] for x in columns if isinstance(x, (list, tuple)) and x]
        for k, spec in enumerate(self.definition.outs):
            if columns[k] is not None:
                continue
            like = [row[0] for row in rows] if rows[0] else given[:1] * len(rows)
            columns[k] = [_empty(spec, x, d, self.mesh) for d, x in enumerate(like)]
        return columns

    def _collect(self, results, whole):
        if not self.definition.outs:
            return None if self.definition.wrapped else self.definition.out_container(())
        if not self.definition.simple_outputs:
            results = map(tree.leaves, results)
        elif self.definition.wrapped:
            results = zip(results)
        columns = [list(c) for c in zip(*results)]
        if whole:
            specs = self._specs(self.out_specs, len(columns), "out_specs")
            name = self.definition.name
            columns = [
                _joined([np.asarray(p) for p in c], s, self.mesh, f"{name}: result {k}")
                for k, (c, s) in enumerate(zip(columns, specs))
            ]
        return self._nested(columns)

    def _nested(self, flat):
        """Results as the out_type of the kernel has them."""
        found = flat
        if not self.definition.simple_outputs:
            found = tree.unflatten(self.definition.out_structure, flat)
        return found[0] if self.definition.wrapped else self.definition.out_container(found)

    # ---- one process for each device ----

    def _call_rank(self, args, out):
        torch, dist = _torch(), _torch(".distributed")
        self.mesh._watch.check()
        for k, x in enumerate(args):
            if not isinstance(x, torch.Tensor) or not x.is_cuda:
                raise TypeError(
                    f"{self.definition.name}: argument {k} must be a CUDA tensor of this process,"
                    f" got {show(x)}"
                )
        if out is None:
            device = torch.device("cuda")
            made = [
                torch.empty(o.shape, dtype=getattr(torch, o.dtype.name), device=device)
                for o in self.definition.outs
            ]
        else:
            made = [out] if self.definition.wrapped else list(out)
            made = [
                _empty(o, args[0], 0, self.mesh) if x is None else x
                for x, o in zip(made, self.definition.outs, strict=True)
            ]
        arrays = [*args, *made]
        signature = tuple((tuple(x.shape), str(x.dtype)) for x in arrays)
        if signature not in self.checked:
            self._agree(signature)
            self.checked.add(signature)
        tables = [peers_of(x) for x in arrays]
        stream = torch.cuda.current_stream().cuda_stream
        rank = dist.get_rank(self.mesh.group)
        _core.mesh_launch(
            self.kernel,
            rank,
            self.mesh.size,
            self.mesh._watch.open(torch.cuda.current_device()),
            tuple(args),
            tuple(made),
            tables,
            self._counters,
            stream,
        )
        return self._nested(made)

    def _agree(self, signature):
        """ValueError unless all ranks call with arrays of the same shapes and dtypes."""
        dist, control = _torch(".distributed"), self.mesh._watch.control
        everyone = [None] * self.mesh.size
        name = self.definition.name
        try:
            dist.all_gather_object(everyone, signature, group=control)
        except RuntimeError as e:
            why = f"rank {dist.get_rank(self.mesh.group)} calls {name} with arrays {signature}"
            why = f"{why}, which were new to it, and not all ranks did so in time ({e})"
            self.mesh._watch.end(why)
            raise ValueError(why) from None
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ValueError(
                    f"{name}: ranks 0 and {rank} call with other arrays: {everyone[0]} and {other}"
                )

    def _counters(self, words):
        """Called before a launch, with the words of the kernel's counters: where they are on all
        ranks, and for all at once. It orders the launch after what all ranks did before."""
        if words not in self.counters:
            spec = ShapeDtypeStruct((max(words, 1),), np.int32)
            x, handle = new_tensor(spec, self.mesh, False)
            self.counters[words] = x, peers_of(x), handle
        _, (addresses, everywhere), handle = self.counters[words]
        if self.ordered:
            handle.barrier()
        return addresses, everywhere

    def _refuse_vmap(self):
        raise NotImplementedError(
            f"vmap: {self.definition.name} runs on a mesh of devices; give the kernel one more axis"
        )

    def lower(self, *args, **options):
        """The lowered kernel, for arguments of one device: things with shape and dtype."""
        for k, x in enumerate(args):
            if isinstance(x, (list, tuple)):
                raise TypeError(
                    f"{self.definition.name}.lower: argument {k} must be the array of one device,"
                    f" got a {type(x).__name__} of {len(x)}"
                )
        return self.kernel.lower(*args, **options)


def spmd(kernel, mesh, in_specs=None, out_specs=None, *, ordered=True):
    """A kernel as a function of arrays on all devices of a mesh.

    kernel: a :func:`plgpu.kernel`. Its body gets the device's position from
        ``lax.axis_index(name)`` for an axis of the mesh, and accesses other devices by
        :func:`plgpu.remote_ref`, ``device_id=`` of semaphores and the like.
    mesh: a :class:`DeviceMesh`.
    in_specs, out_specs: a :class:`PartitionSpec` for each operand and output, or one for all; None:
        each device has the whole array. They define how NumPy arrays are split over the devices and
        joined again. Along axes that split no dimension of an output, devices should compute the
        same; whose array is returned is undefined.
    ordered: the kernel starts on each device only after all devices have finished their earlier
        work. Kernels with semaphores of their own need this; kernels that synchronise by flags in
        persistent memory (:func:`plgpu.ext.as_semaphores`) do not.

    The result is called with a list of arrays for each operand, one for each device, and returns
    such lists; if all operands are NumPy arrays, it splits them and returns whole arrays. ``out=``
    gives the outputs, as lists. With a process group, it takes and returns the tensors of this
    process, and every process must call it. Shapes and dtypes must be the same on all devices.
    ValueError, TypeError otherwise.
    """
    return SpmdKernel(kernel, mesh, in_specs, out_specs, bool(ordered))
