"""JAX's Pallas:MGPU kernels traced by pallas_mgpu: the text of the installed JAX, with other
modules behind its imports.

A kernel's module is run as it stands; `import jax...` in it finds `pallas_mgpu`, its numpy and lax,
and NumPy for what the host computes. Kernels get and return `DeviceArray`, or NumPy arrays."""

import builtins
import importlib.util
import types

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp


class Nothing:
    """Stands for what is imported and not used: test helpers, profilers."""

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *args, **kwargs):
        return Nothing()


class Names:
    """The names of a module, and others."""

    def __init__(self, module, **others):
        self.module = module
        self.__dict__.update(others)

    def __getattr__(self, name):
        return getattr(self.module, name)


class HostOr(Names):
    """Functions of `module` in kernels; on NumPy arrays those of NumPy."""

    def __getattr__(self, name):
        in_kernel = getattr(self.module, name, None)
        on_host = getattr(np, name, None)
        if in_kernel is None or isinstance(on_host, type) or not callable(on_host):
            return getattr(self.module, name)

        def call(*args, **kwargs):
            flat = plgpu.tree.leaves([args, kwargs])
            host = any(isinstance(x, (np.ndarray, np.generic)) for x in flat)
            traced = any(isinstance(x, plgpu._core.Array) for x in flat)
            out = (on_host if host and not traced else in_kernel)(*args, **kwargs)
            return out.astype(np.int32) if getattr(out, "dtype", None) == np.int64 else out

        return call


def _jit(f=None, **options):
    return f if f is not None else lambda f: f


def _custom_vjp(f, **options):
    f.defvjp = lambda forward, backward: None
    return f


def _noting(calls):
    """plgpu.kernel whose kernels note their calls, to be repeated without tracing them again."""

    def make(*args, **options):
        kernel = plgpu.kernel(*args, **options)

        def call(*arrays, **more):
            calls.append((kernel, arrays, more))
            return kernel(*arrays, **more)

        return call

    return make


def _modules(calls):
    """What `jax` is to a kernel's module."""
    device = types.SimpleNamespace(core_count=plgpu.sm_count(), platform="gpu")
    jax = types.SimpleNamespace(
        Array=np.ndarray,
        ShapeDtypeStruct=plgpu.ShapeDtypeStruct,
        custom_vjp=_custom_vjp,
        devices=lambda: [device],
        jit=_jit,
        lax=lax,
        named_scope=plgpu.named_scope,
        numpy=HostOr(jnp),
        random=Nothing(),
        sharding=types.SimpleNamespace(
            get_abstract_mesh=lambda: types.SimpleNamespace(abstract_device=None)
        ),
        typing=types.SimpleNamespace(DTypeLike=object, ArrayLike=object),
    )
    jax.extend = types.SimpleNamespace(
        backend=types.SimpleNamespace(get_default_device=lambda: device)
    )
    mosaic = types.SimpleNamespace(gpu=types.SimpleNamespace(profiler=Nothing()))
    here = Names(plgpu, kernel=_noting(calls))
    jax.experimental = types.SimpleNamespace(pallas=Names(pl, mosaic_gpu=here), mosaic=mosaic)
    cuda = types.SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    jax._src = Names(
        Nothing(),
        lib=types.SimpleNamespace(cuda_versions=cuda),
        dtypes=types.SimpleNamespace(itemsize_bits=jnp.itemsize_bits),
    )
    return jax


def load(name, calls):
    """The module `name` of jax.experimental.pallas.ops.gpu, over pallas_mgpu. calls: a list that
    gets (kernel, arrays, options) of each call of a kernel."""
    path = importlib.util.find_spec(f"jax.experimental.pallas.ops.gpu.{name}").origin
    jax = _modules(calls)

    def import_(module, names=None, local=None, wanted=(), level=0):
        if module.split(".")[0] != "jax":
            return builtins.__import__(module, names, local, wanted, level)
        found = jax
        for part in module.split(".")[1:] if wanted else ():
            found = getattr(found, part)
        return found

    module = types.ModuleType(name)
    module.__file__ = path
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
    with open(path) as f:
        exec(compile(f.read(), path, "exec"), module.__dict__)
    return module
