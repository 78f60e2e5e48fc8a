"""Entry points of the adapters to PyTorch and JAX, which are imported when they are first needed.

The extension calls `torch_call` where a call needs to know more of a tensor than its memory."""

import importlib
import sys

from . import _core, tree
from ._batch import Batched, call_batched_family
from ._names import show


def _adapter(library="torch"):
    """pallas_mgpu.torch, which imports torch, or pallas_mgpu.jax."""
    return importlib.import_module(f".{library}", __package__)


def torch_op(fn=None, *, name=None, mutates=(), backward=None, fake=None):
    """Make an operator of PyTorch from a kernel, or from a function that calls kernels.

    fn: a kernel, a function under :func:`specialize`, or a Python function of tensors, whose
        annotations give the schema as for ``torch.library.infer_schema``. Parameters without an
        annotation are tensors, and so is the result of a function without one.
    name: ``"namespace::name"``; the namespace is ``pallas_mgpu`` by default, the name that of
        ``fn``.
    mutates: names of the parameters that ``fn`` writes to. The operator does not return them.
    backward: ``backward(ctx, *grads)``, which returns a gradient, or None, for each parameter;
        ``ctx.inputs`` and ``ctx.outputs`` are those of the call. A parameter in ``mutates`` is None
        there, and its new value is one of the last outputs. Or a pair ``(setup_context,
        backward)`` as for ``torch.library.register_autograd``, which decides what is saved.
    fake: ``fake(*args)``, which returns empty tensors like the results; by default derived from the
        output types of the kernels.

    Returns a function with the parameters of ``fn``; its attribute ``op`` is the operator. Calls
    without gradients, modes, subclasses, autocast and ``torch.func`` go to ``fn`` directly. Without
    ``fn``, a decorator is returned. docs/frameworks.md has the details. TypeError, ValueError for
    invalid arguments; ImportError without PyTorch.
    """
    if fn is None:
        return lambda f: torch_op(f, name=name, mutates=mutates, backward=backward, fake=fake)
    if not callable(fn):
        raise TypeError(f"torch_op: fn must be a kernel or a function, got {show(fn)}")
    return _adapter().make_operator(fn, name, mutates, backward, fake)


def as_torch_kernel(fn):
    """A function of PyTorch tensors from a function that calls exactly one kernel.

    ``fn`` may reorder, drop and nest the arguments and the results of the kernel, and do nothing
    else. Its arguments are pytrees of tensors. An output that is an alias of an input
    (``input_output_aliases``) is computed in place, and that very tensor is returned; all others
    are new tensors. Runs on the current stream. TypeError unless ``fn`` is callable; ValueError,
    when called, for functions and arguments of other kinds; ImportError without PyTorch.
    """
    if not callable(fn):
        raise TypeError(f"as_torch_kernel: fn must be a function or a kernel, got {show(fn)}")
    return _adapter().AsTorchKernel(fn)


class Placeholder:
    """Stands for an array in a function that is only looked at (:func:`as_torch_kernel`)."""

    __slots__ = ("shape", "dtype", "record")

    def __init__(self, shape, dtype, record):
        self.shape, self.dtype, self.record = tuple(shape), dtype, record

    def _refuse(self, *args, **kwargs):
        raise ValueError(
            "as_torch_kernel: the function must contain one kernel call and nothing else, and it"
            " computes with its arguments or with the results of the kernel"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __getitem__ = __neg__ = __pow__ = __array__ = _refuse
    __len__ = __iter__ = __bool__ = __float__ = __int__ = __setitem__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __torch_function__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse()


def special(leaves):
    """How to call a kernel with such leaves: a function (kernel or family, args, kwargs), or None
    where nothing is special about them."""
    for x in leaves:
        if type(x) is Placeholder:
            return x.record
        if type(x) is Batched:
            return call_batched_family
    torch = sys.modules.get("torch")
    for x in leaves:
        if torch and isinstance(x, torch.Tensor):
            adapter = _adapter()
            if adapter.has_no_memory(x):
                return adapter.call_special
        if is_jax_traced(x):
            return _adapter("jax").call_special
    return None


def is_jax(x):
    """Is it an array of JAX, traced or not?"""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_jax_traced(x):
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def is_jax_on_gpu(x):
    return is_jax(x) and not is_jax_traced(x) and {d.platform for d in x.devices()} == {"gpu"}


def torch_call(target, args, kwargs, recorded):
    """The hook: ``target``, a kernel or a family, is called with a tensor that autograd records, or
    (not ``recorded``) that has no memory of its own. Returns the result, or NotImplemented."""
    if recorded:
        return _adapter().call_recorded(target, args, kwargs)
    every = [*args, *kwargs.values()]
    call = special(every)
    if call is None and kwargs.get("stream") is None and any(map(is_jax_on_gpu, every)):
        call = call_eager
    return NotImplemented if call is None else call(target, args, kwargs)


def call_eager(target, args, kwargs):
    """Call a kernel or a family with arrays of JAX on a GPU, outside of jax.jit."""
    return _adapter("jax").call_eager(target, args, kwargs)


def check_recorded(target, args, out):
    """Warn, once for a kernel, where autograd records operations on an argument of a call that it
    does not see."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree.leaves(args)):
        _adapter().call_recorded(target, args, {"out": out})


def is_kernel(x):
    return isinstance(x, (_core.Kernel, _core.Family))
