"""Kernels inside ``jax.jit``: a primitive of JAX that XLA runs by its foreign function interface.

A kernel that is called with values that JAX traces binds the primitive. Lowering it compiles the
kernel and puts all of it into the attributes of a custom call: the text of the lowered graph, and
the cubin (csrc/python/xla_ffi.c reads them). No attribute refers to this process, so executables
can be cached and exported. The targets are registered when this module is imported.

Global memory that a kernel needs besides its outputs is an additional result of the call, which the
lowering drops. Batching adds a grid axis, as `plgpu.vmap` does. A kernel has no derivative of its
own; `jax.custom_vjp` gives it one."""

import functools

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _core, _flags, tree
from ._batch import _PerLeaf
from ._caches import cached
from ._family import chosen
from ._frameworks import is_jax_on_gpu
from ._names import show
from ._types import InterpretParams, ShapeDtypeStruct, itemsize_bits

TARGET = "pallas_mgpu_call"
call_p = Primitive("pallas_mgpu")
call_p.multiple_results = True


def _register():
    cpu, gpu = _core.xla_handlers()
    jax.ffi.register_ffi_target(TARGET, {"instantiate": cpu, "execute": cpu}, platform="cpu")
    stages = dict.fromkeys(("instantiate", "initialize", "execute"), gpu)
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")


_register()


def is_traced(x):
    return isinstance(x, jax.core.Tracer)


# ---- calls ---------------------------------------------------------------------------------------


def _array(x, what, k):
    """An operand as JAX has it: numbers become arrays of the dtypes that kernels take."""
    if isinstance(x, (bool, np.bool_)):
        return jax.numpy.asarray(x, bool)
    if isinstance(x, (int, float)):
        return jax.numpy.asarray(x, np.float32 if isinstance(x, float) else np.int32)
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{what}: argument {k} is a {type(x).__name__}, which is no array")
    return x


def call_special(target, args, kwargs):
    """Call a kernel or a family with arguments of which some are traced by JAX."""
    if isinstance(target, _core.Family):
        return _call_family(target, args, kwargs)
    definition = target.definition
    what = f"{definition.who} {definition.name}"
    if kwargs.get("out") is not None or kwargs.get("stream") is not None:
        raise TypeError(
            f"{what}: out= and stream= are not for calls under jax.jit: arrays of JAX are"
            " immutable, and XLA chooses the stream"
        )
    if definition.params.profile_space:
        raise NotImplementedError(f"{what}: profile_space under jax.jit; call it without jit")
    if not definition.outs:
        raise NotImplementedError(
            f"{what}: a kernel without outputs under jax.jit, where it could have no effect; give"
            " it an output"
        )
    leaves, structure = tree.flatten(args)
    leaves = [_array(x, what, k) for k, x in enumerate(leaves)]
    return definition.unflatten(call_p.bind(*leaves, kernel=target, structure=structure))


def _call_family(family, args, kwargs):
    what = family.__name__
    if kwargs.pop("out", None) is not None or kwargs.pop("stream", None) is not None:
        raise TypeError(f"{what}: out= and stream= are not for calls under jax.jit")
    kernel, arrays = chosen(family, args, kwargs, lambda x: _described(x, what))
    return kernel(*arrays)


# ---- arrays on a GPU, outside of jit -------------------------------------------------------------

# XLA runs these calls, too: on its stream, with results in memory of its own. DLPack takes twice as
# long, and nobody can tell when XLA is done with memory that it was given.


def call_eager(target, args, kwargs):
    """Call a kernel or a family with arrays of which some are JAX's, on a GPU."""
    kwargs = {k: x for k, x in kwargs.items() if x is not None or k not in ("out", "stream")}
    leaves, structure = tree.flatten(args)
    options = {k: x for k, x in kwargs.items() if not _is_array(x)}
    names = [k for k in kwargs if k not in options]
    arrays = [*leaves, *(kwargs[k] for k in names)]
    call = None
    if all(map(_may_go_to_xla, arrays)):
        state = _flags.state()
        try:
            typed = tuple((k, type(x), x) for k, x in options.items())  # 1 is not 1.0
            call = _compiled(target, structure, tuple(names), typed, state)
        except TypeError:  # an option has no hash
            pass
    if call is None:
        return target(*args, **kwargs, stream=_LEGACY)  # through DLPack
    return call(*(_array(x, target.__name__, k) for k, x in enumerate(arrays)))


_LEGACY = 1  # handle of the legacy default stream


def _may_go_to_xla(x):
    if isinstance(x, (bool, int, float, np.bool_)):
        return True
    return is_jax_on_gpu(x) and len(x.devices()) == 1 and _has_whole_bytes(x.dtype)


@functools.lru_cache(64)
def _has_whole_bytes(dtype):
    try:
        return itemsize_bits(_core.as_dtype(np.dtype(dtype))) >= 8
    except TypeError:  # none of ours: the call through DLPack names the argument
        return False


def _has_form_for_xla(target, options):
    """Is there nothing in it that only calls outside of jit can do?"""
    if isinstance(target, _core.Family):
        return options.get("interpret") is None
    d = target.definition
    plain = not (d.interpret or d.params.profile_space or d.devices)
    return plain and bool(d.outs) and all(_has_whole_bytes(o.dtype) for o in d.outs)


@cached
def _compiled(target, structure, names, options, flags):
    """The call, compiled by JAX for each combination of shapes; None where XLA cannot run it.
    flags: the state of those that decide how kernels are traced."""
    n, options = tree.count(structure), {k: x for k, _, x in options}
    if not _has_form_for_xla(target, options):
        return None

    def call(*arrays):
        args = tree.unflatten(structure, arrays[:n])
        return target(*args, **dict(zip(names, arrays[n:])), **options)

    return jax.jit(call)


def _is_array(x):
    return is_traced(x) or isinstance(x, (jax.Array, np.ndarray))


def _described(x, what):
    return (*_spec(x, f"{what}: an argument"), None, True) if _is_array(x) else None


# ---- the primitive -------------------------------------------------------------------------------


def _spec(x, what):
    """The shape of an array, and its dtype, which cannot have 64 bits: XLA's memory has them."""
    shape, dtype = tuple(x.shape), np.dtype(x.dtype)
    if not all(isinstance(d, int) for d in shape):
        raise NotImplementedError(
            f"{what} has the symbolic shape {shape}; export the function for each shape"
        )
    narrow = _core.as_dtype(dtype)
    if narrow.itemsize < dtype.itemsize:
        raise TypeError(
            f"{what} has dtype {dtype}, which kernels do not take: cast it, by"
            f" x.astype({narrow.name!r})"
        )
    return shape, narrow


def _specs(definition, avals):
    what = f"{definition.who} {definition.name}: argument"
    return [_spec(a, f"{what} {k}") for k, a in enumerate(avals)]


def varying(aval):
    """Axes of a mesh along which arrays of a type differ between devices, under shard_map."""
    return aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", frozenset())


def _varies(like, axes, rank):
    """What a type of this rank needs besides to vary along axes, as the type `like` does."""
    none = jax.sharding.PartitionSpec(*[None] * rank)
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), none)
    if hasattr(like, "mat"):
        return {"sharding": sharding, "manual_axis_type": like.mat.update(varying=axes)}
    return {"sharding": sharding, "vma": axes}


@call_p.def_abstract_eval
def _abstract(*avals, kernel, structure):
    definition = kernel.definition
    outs = definition.output_specs(structure, _specs(definition, avals))
    axes = frozenset().union(*map(varying, avals))
    return [
        jax.core.ShapedArray(s, d, **_varies(avals[0], axes, len(s)) if axes else {})
        for s, d in outs
    ]


@call_p.def_impl
def _run(*arrays, kernel, structure):
    outs = kernel(*tree.unflatten(structure, arrays))
    return tree.leaves(outs)


def _batch(arrays, axes, *, kernel, structure):
    definition = kernel.definition
    if definition.aliases:  # an alias is mapped over the axis of its output
        size = next(x.shape[a] for x, a in zip(arrays, axes) if a is not None)
        arrays, axes = list(arrays), list(axes)
        for i in definition.aliases:
            x, axis, axes[i] = arrays[i], axes[i], 0
            arrays[i] = (
                jax.numpy.broadcast_to(x, (size, *x.shape))
                if axis is None
                else jax.numpy.moveaxis(x, axis, 0)
            )
    key = "jax", tuple(axes)
    mapped = definition.batched.get(key)
    if mapped is None:
        mapped = definition.batched[key] = definition.mapped(_PerLeaf(axes), 0).make()
    outs = call_p.bind(*arrays, kernel=mapped, structure=structure)
    return outs, [0] * len(outs)


batching.primitive_batchers[call_p] = _batch


def _derivative(primals, tangents, *, kernel, structure):
    raise NotImplementedError(
        f"kernel {kernel.__name__} has no derivative: jax.custom_vjp gives it one (the functions of"
        " pallas_mgpu.jax have theirs)"
    )


ad.primitive_jvps[call_p] = _derivative


# ---- lowering ------------------------------------------------------------------------------------


def _gpu_target():
    """The target of the GPU that JAX uses; without one, as for jax.export, that of Hopper."""
    found = _core.system_info()
    return None if found["device"] >= 0 else "sm_90a"


def _check(kernel, platform, specs, outs):
    definition = kernel.definition
    what = f"{definition.who} {definition.name}"
    for _, dtype in (*specs, *outs):
        if itemsize_bits(np.dtype(dtype)) < 8:
            raise NotImplementedError(
                f"{what}: {np.dtype(dtype)} under jax.jit: XLA has another layout for elements of"
                " less than a byte; bitcast them to int8"
            )
    if definition.interpret is None:
        return
    if platform != "cpu":
        raise NotImplementedError(
            f"{what}: interpret= under jax.jit on a GPU; use jax.jit(..., backend='cpu')"
        )
    if definition.interpret != InterpretParams():
        raise NotImplementedError(
            f"{what}: options of the interpreter under jax.jit, got {show(definition.interpret)};"
            " call the kernel without jit"
        )


def _digest(text):
    return _core.digest(text.encode())


def _attributes(kernel, lowered, platform):
    """All of a kernel, for csrc/python/xla_ffi.c."""
    graph = lowered.as_text("graph")
    cubin = lowered.cubin().hex() if platform == "cuda" else ""
    return {
        "name": kernel.__name__,
        "hash": _digest(_digest(graph) + _digest(cubin)),
        "graph": graph,
        "cubin": cubin,
        "program": _digest(lowered.program) if cubin else "",
    }


def _lower(ctx, *operands, kernel, structure, platform):
    specs = _specs(kernel.definition, ctx.avals_in)
    args = tree.unflatten(structure, [ShapeDtypeStruct(*s) for s in specs])
    if kernel.definition.in_shapes:
        kernel = kernel.definition.for_shapes()
    lowered = kernel.lower(*args, target=_gpu_target() if platform == "cuda" else None)
    outs = lowered.outputs
    _check(kernel, platform, specs, outs)
    n = len(ctx.avals_out)
    scratch = [jax.core.ShapedArray(shape, dtype) for shape, dtype in outs[n:]]
    ctx = ctx.replace(avals_out=[*ctx.avals_out, *scratch])
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(kernel.definition.aliases))
    return rule(ctx, *operands, **_attributes(kernel, lowered, platform))[:n]


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        call_p, functools.partial(_lower, platform=_platform), platform=_platform
    )
