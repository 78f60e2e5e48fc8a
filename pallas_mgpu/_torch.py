"""Kernels as operators of PyTorch.

An operator is defined with ``torch.library``: its schema comes from the signature of the function,
its implementation is the function, its fake implementation runs the function on fake tensors, where
a kernel returns empty tensors of its output types. Calls of the function that need nothing of the
dispatcher do not go there (`_is_direct`).

Sizes that are symbols: a function under `specialize` sees ints that remember their expression
(`_Size`), so that the shapes of its outputs are expressions, too, and nothing is guarded. Where an
output of such a function has no symbol at all, the sizes become constants, as the function may
have kept a kernel of these very sizes.

_torch_ops.py makes operators of the functions of `ops`."""

import contextlib
import functools
import inspect
import threading
import warnings

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _core, tree
from ._batch import vmap
from ._family import ArrayInfo
from ._frameworks import Placeholder, is_kernel
from ._names import show

_LIBRARIES: dict = {}  # by namespace; they live for good


def library_of(namespace):
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _LIBRARIES[namespace]


class _State(threading.local):
    deriving = False  # does a fake implementation of ours run?
    dispatching = False  # must calls of operators go through the dispatcher?


_state = _State()


# ---- the direct path -----------------------------------------------------------------------------

# What is private in torch is looked up once. Where one of these is missing, every call goes through
# the dispatcher, which is right and slower.
_PLAIN = (Tensor, torch.nn.Parameter)


def _find_probes():
    c = torch._C
    try:
        probes = (
            c._len_torch_dispatch_stack,
            c._len_torch_function_stack,
            c._is_any_autocast_enabled,
            c._get_tracing_state,
            c._functorch.maybe_current_level,
        )
        for probe in probes:
            probe()
        return probes
    except (AttributeError, RuntimeError, TypeError):
        return None


_PROBES = _find_probes()


def in_torch_func():
    """Is there a level of torch.func (grad, vmap and others)?"""
    return torch._C._functorch.maybe_current_level() is not None


def _in_dual_level():
    """May there be tangents of forward-mode differentiation?"""
    return getattr(forward_ad, "_current_level", 0) >= 0


def _refuse_tangents(qualname, args):
    """Forward mode would lose them silently."""
    for x in args if _in_dual_level() else ():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{qualname} has no derivative for forward mode (jvp); use reverse mode"
            )


def _is_direct(args):
    """May the function be called without the dispatcher?"""
    if _PROBES is None or _in_dual_level() or _state.dispatching:
        return False
    dispatch, function, autocast, tracing, level = _PROBES
    if dispatch() or function() or autocast() or tracing() or level() is not None:
        return False
    recording = None
    try:
        for x in args:
            if not isinstance(x, Tensor):
                if isinstance(x, (list, tuple)) and not _is_direct(x):
                    return False
                continue
            if type(x) not in _PLAIN or x.is_meta or not x.is_contiguous():
                return False
            if x.requires_grad:
                if recording is None:
                    recording = torch.is_grad_enabled()
                if recording:
                    return False
    except RuntimeError:  # of a layout without is_contiguous
        return False
    return True


# ---- sizes that are symbols ----------------------------------------------------------------------


def _value(x):
    return x.symbol if isinstance(x, _Size) else x


class _Size(int):
    """A size with the expression that it comes from. Arithmetic keeps both; comparisons use the
    int, and guard nothing. others: what the size would be for other sizes of the arguments, None
    where that cannot be computed; shapes of results are compared for these (`_follow`)."""

    def __new__(cls, symbol):
        hint = symbol.node.hint
        return cls._of(hint, symbol, (1, max(hint // 2, 1), hint + 1, 2 * hint))

    @classmethod
    def _of(cls, number, symbol, others):
        self = int.__new__(cls, number)
        self.symbol, self.others = symbol, others
        return self

    def __index__(self):
        return self

    def __hash__(self):
        return int.__hash__(self)


_OTHERS = 4  # other sizes


def _other(x, k):
    return x.others[k] if isinstance(x, _Size) else x


def _add_arithmetic():
    def method(name):
        of_int = getattr(int, name)

        def other(self, given, k):
            numbers = [_other(x, k) for x in (self, *given)]
            try:
                return None if None in numbers else of_int(*numbers)
            except (ArithmeticError, ValueError):
                return None

        def compute(self, *given):
            number = of_int(self, *given)
            if number is NotImplemented:
                return number
            others = tuple(other(self, given, k) for k in range(_OTHERS))
            return _Size._of(number, getattr(self.symbol, name)(*map(_value, given)), others)

        return compute

    for op in ("add", "sub", "mul", "floordiv", "mod"):
        for name in (f"__{op}__", f"__r{op}__"):
            setattr(_Size, name, method(name))
    _Size.__neg__ = method("__neg__")


_add_arithmetic()


def _size(d):
    """An int for a dim of a tensor; with its expression, if that is a symbol with a hint."""
    if not isinstance(d, torch.SymInt):
        return d
    if not d.node.has_hint():
        raise ValueError(
            "torch_op: a size of a tensor depends on data, so the shapes of results cannot be"
            " derived; the right form is torch_op(..., fake=)"
        )
    return _Size(d) if d.node.maybe_as_int() is None else int(d)


# ---- kernels on fake tensors ---------------------------------------------------------------------


def _dtype_of(x):
    """NumPy's dtype of a tensor."""
    return _core.as_dtype(str(x.dtype).removeprefix("torch."))


def _torch_dtype(dtype):
    found = getattr(torch, np.dtype(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise NotImplementedError(f"torch has no dtype {np.dtype(dtype)}")
    return found


def _empty(specs, like):
    """New tensors for (shape, dtype) of outputs, on the device of the first tensor."""
    device = like[0].device if like else None
    return [
        torch.empty([_value(d) for d in shape], dtype=_torch_dtype(dtype), device=device)
        for shape, dtype in specs
    ]


def _fake_kernel(kernel, args, out):
    """What a call of a kernel returns, as empty tensors."""
    definition = kernel.definition
    leaves, structure = tree.flatten(args)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if out is not None:
        return out
    specs = [
        (tuple(map(_size, x.shape)), _dtype_of(x)) if isinstance(x, Tensor) else ((), np.int32)
        for x in leaves
    ]
    return definition.unflatten(_empty(definition.output_specs(structure, specs), tensors))


def _info(x):
    return ArrayInfo(tuple(map(_size, x.shape)), _dtype_of(x), _device_of(x), True)


def _device_of(x):
    return (x.device.index or 0) if x.device.type == "cuda" else None


def _has_symbol(shape):
    return any(isinstance(d, _Size) for d in shape)


def _follow(shapes, make, infos, named):
    """Do expressions say what the shapes of results are for other sizes of the arguments, too? Not
    where they come from comparisons, or arithmetic that expressions do not follow."""
    for k in range(_OTHERS):

        def other(x, k=k):
            if not isinstance(x, ArrayInfo):
                return x
            shape = tuple(_other(d, k) for d in x.shape)
            return ArrayInfo(shape, x.dtype, x.device, x.aligned)

        try:
            target = make(*map(other, infos), **{name: other(x) for name, x in named.items()})
        except Exception:  # noqa: BLE001 - what the function does not take cannot be compared
            continue
        want = [tuple(_other(d, k) for d in shape) for shape in shapes]
        if is_kernel(target) and want != [tuple(o.shape) for o in target.definition.outs]:
            return False
    return True


def _fake_family(family, args, kwargs):
    """What a call of a function under `specialize` returns, as empty tensors."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    kwargs.pop("stream", None)
    if out is not None:
        return out
    infos = [_info(x) if isinstance(x, Tensor) else x for x in args]
    named = {k: _info(x) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    symbolic = any(
        isinstance(x, ArrayInfo) and _has_symbol(x.shape) for x in [*infos, *named.values()]
    )
    target = family.maker.make(*infos, **named)
    tensors = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
    if not is_kernel(target):
        return target(*tensors)
    shapes = [o.shape for o in target.definition.outs]
    known = all(_has_symbol(s) for s in shapes)
    if symbolic and not (known and _follow(shapes, family.maker.make, infos, named)):
        for x in tensors:  # the kernel may be of these very sizes
            for d in x.shape:
                int(d)
    return _fake_kernel(target, tuple(tensors), None)


def _what(target):
    return f"kernel {target.__name__}"


def _lies_elsewhere(x):
    return x.device.type not in ("cpu", "cuda") or x.layout != torch.strided


def has_no_memory(x):
    """Is this tensor something that a kernel cannot read?"""
    if type(x) not in _PLAIN or _lies_elsewhere(x):
        return True
    try:
        x.data_ptr()  # not of those that torch.func wraps
    except RuntimeError:
        return True
    return False


def _only_has_methods(x):
    """Is this a subclass of Tensor with memory like any other?"""
    return type(x) not in _PLAIN and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _as_tensor(x):
    return x.as_subclass(Tensor) if isinstance(x, Tensor) and _only_has_methods(x) else x


def _refuse_elsewhere(what, x):
    if x.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"{what}: an argument is a tensor on device {x.device}; tensors of the CPU and of CUDA"
            " devices are accepted"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{what}: an argument is a {x.layout} tensor; pass x.to_dense()")


def call_special(target, args, kwargs):
    """Call a kernel or a family with tensors of which some have no memory of their own."""
    tensors = [x for x in tree.leaves((args, list(kwargs.values()))) if isinstance(x, Tensor)]
    x = next(filter(has_no_memory, tensors))
    if _state.deriving:
        if isinstance(target, _core.Family):
            return _fake_family(target, args, kwargs)
        return _fake_kernel(target, args, kwargs.get("out"))
    operator = _operator_of(target)
    if operator is not None and not _state.dispatching:
        _state.dispatching = True
        try:
            with _without_autocast():
                return operator(*args, **kwargs)
        finally:
            _state.dispatching = False
    if _only_has_methods(x):
        unwrapped = tree.map(_as_tensor, (args, kwargs))
        return target(*unwrapped[0], **unwrapped[1])
    _refuse_elsewhere(_what(target), x)
    raise TypeError(
        f"{_what(target)}: an argument is a {type(x).__name__} that has no memory of its own. Under"
        " torch.compile, torch.export, torch.func and modes, only operators can be called: the"
        " right form is plgpu.torch_op(kernel)"
    )


_warned: set = set()


def call_recorded(target, args, kwargs):
    """A kernel or family is called with tensors that require grad, while autograd records."""
    operator = _operator_of(target)
    if operator is not None:
        with _without_autocast():  # as without gradients
            return operator(*args, **kwargs)
    out = kwargs.get("out")
    for x in tree.leaves(out) if out is not None else ():
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{_what(target)}: out= is a tensor that requires grad, and cannot be written while"
                " autograd records; call the kernel under torch.no_grad()"
            )
    key = getattr(target, "definition", target)
    if id(key) not in _warned:
        _warned.add(id(key))
        warnings.warn(
            f"{_what(target)}: an argument requires grad, and the kernel has no gradient: its"
            " results are constants for autograd. The right form is plgpu.torch_op(kernel,"
            " backward=), or torch.no_grad(), which says that this is meant. Later calls of this"
            " kernel do not say so again",
            stacklevel=3,
        )
    return NotImplemented


# ---- operators -----------------------------------------------------------------------------------

# what a call of a function of `ops` does where a tensor needs the dispatcher; filled by _torch_ops
OPERATORS: dict = {}


def _operator_of(target):
    return OPERATORS.get(target) if isinstance(target, _core.Family) else None


def _parameters(fn, mutates):
    """The signature that the schema of an operator is inferred from."""
    kinds = inspect.Parameter
    if isinstance(fn, _core.Kernel):
        found = [p for p in inspect.signature(fn).parameters.values() if p.kind != p.KEYWORD_ONLY]
        if any(p.kind is p.VAR_POSITIONAL for p in found):
            raise ValueError(
                f"torch_op: the number of operands of {_what(fn)} is not known; wrap it in a"
                " function with named parameters"
            )
        n = len(fn.definition.outs)
        result = Tensor if fn.definition.wrapped else tuple[(Tensor,) * n] if n else None
        if not fn.definition.simple_outputs:
            raise ValueError(f"torch_op: {_what(fn)} has nested outputs; wrap it in a function")
        parameters = [kinds(p.name, kinds.POSITIONAL_OR_KEYWORD, annotation=Tensor) for p in found]
        return inspect.Signature(parameters, return_annotation=result)
    plain = fn.maker.make if isinstance(fn, _core.Family) else fn
    found = inspect.signature(plain, eval_str=True)
    parameters = []
    for p in found.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ValueError(
                f"torch_op: {fn.__name__} has the parameter {p}; a schema has no such parameters:"
                " name each argument, or annotate one of them as a list of tensors"
            )
        annotation = Tensor if p.annotation is p.empty else p.annotation
        if p.annotation is p.empty and p.default is not p.empty:
            if type(p.default) not in (bool, int, float, str):
                raise ValueError(
                    f"torch_op: parameter {p.name} of {fn.__name__} needs an annotation"
                )
            annotation = type(p.default)
        parameters.append(p.replace(annotation=annotation, kind=p.POSITIONAL_OR_KEYWORD))
    result = found.return_annotation
    result = Tensor if result is inspect.Signature.empty or is_kernel(fn) else result
    return inspect.Signature(parameters, return_annotation=result)


def _schema(signature, mutates):
    def prototype():
        pass

    prototype.__signature__ = signature
    try:
        return torch.library.infer_schema(prototype, mutates_args=mutates)
    except ValueError as e:
        raise ValueError(f"torch_op: {e}") from None


def derive(fn, *args, **kwargs):
    """What fn returns for tensors without memory: kernels are not called."""
    before, _state.deriving = _state.deriving, True
    try:
        return fn(*args, **kwargs)
    finally:
        _state.deriving = before


def _with_state(fn, qualname, signature):
    """fn, with kernels that return empty tensors."""

    @functools.wraps(fn, updated=())
    def derived(*args, **kwargs):
        result = derive(fn, *args, **kwargs)
        _check_count(qualname, signature, result)
        return result

    return derived


class _Context:
    """What a plain ``backward=`` sees as ``ctx``, besides what autograd puts there."""

    @staticmethod
    def setup(ctx, inputs, output, written=()):
        inputs = [None if i in written else x for i, x in enumerate(inputs)]
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        saved = [x for x in (*inputs, *outputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*saved)
        ctx.rest = [None if isinstance(x, Tensor) else (x,) for x in (*inputs, *outputs)]
        ctx.n_inputs = len(inputs)

    @staticmethod
    def wrap(backward, qualname, n):
        def call(ctx, *grads):
            saved = iter(ctx.saved_tensors)
            values = [next(saved) if x is None else x[0] for x in ctx.rest]
            ctx.inputs, ctx.outputs = tuple(values[: ctx.n_inputs]), tuple(values[ctx.n_inputs :])
            result = backward(ctx, *grads)
            result = result if isinstance(result, (tuple, list)) else (result,)
            if len(result) != n:
                raise ValueError(
                    f"{qualname}: backward must return a gradient or None for each of the {n}"
                    f" parameters, got {len(result)}"
                )
            return tuple(result)

        return call


def _refusing_backward(qualname):
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{qualname} has no gradient: torch_op(..., backward=) gives it one"
        )

    return backward


def _loop(op):
    """The rule of vmap that calls the operator for each element."""

    def rule(info, in_dims, *args):
        def item(x, dim, i):
            if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
                return [item(y, d, i) for y, d in zip(x, dim, strict=True)]
            return x if dim is None else x.select(dim, i)

        results = []
        for i in range(info.batch_size):
            results.append(op(*(item(x, d, i) for x, d in zip(args, in_dims))))
        if not isinstance(results[0], (tuple, list)):
            return torch.stack(results), 0
        stacked = tuple(map(torch.stack, zip(*results)))
        return stacked, (0,) * len(stacked)

    return rule


def _mapped_kernel(fn, qualname, backward):
    """The rule of vmap of a kernel: one launch with one more axis, as an operator of its own for
    each combination of axes."""
    made = {}

    def rule(info, in_dims, *args):
        args, in_dims = list(args), list(in_dims)
        for i in fn.definition.aliases:  # mapped over the axis of its output
            x, axis, in_dims[i] = args[i], in_dims[i], 0
            whole = (info.batch_size, *x.shape)
            args[i] = x.expand(whole) if axis is None else x.movedim(axis, 0)
        axes = tuple(in_dims)
        if axes not in made:
            text = "_".join("n" if a is None else str(a) for a in axes)
            kernel = vmap(fn, in_axes=axes)
            derived = backward and _mapped_backward(backward, axes)
            made[axes] = make_operator(kernel, f"{qualname}__vmap_{text}", (), derived, None)
        args = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
        result = made[axes](*args)
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    return rule


class _OneContext:
    """The context of one element under `_mapped_backward`."""

    def __init__(self, inputs, outputs, needs_input_grad):
        self.inputs, self.outputs, self.needs_input_grad = inputs, outputs, needs_input_grad


def _mapped_backward(backward, axes):
    def mapped(ctx, *grads):
        needs = ctx.needs_input_grad

        def one(inputs, outputs, grads):
            found = backward(_OneContext(inputs, outputs, needs), *grads)
            found = found if isinstance(found, (tuple, list)) else (found,)
            there.extend(g is not None for g in found)
            return tuple(g for g in found if g is not None)

        there = []
        values = torch.func.vmap(one, in_dims=(axes, 0, 0))(ctx.inputs, ctx.outputs, grads)
        values = iter(values)
        found = [next(values) if t else None for t in there]
        return tuple(
            g if g is None else g.sum(0) if a is None else g.movedim(0, a)
            for g, a in zip(found, axes)
        )

    return mapped


def _without_autocast():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _cast_rule(op, names, positions):
    """The implementation for autocast: the tensors at these positions, if they are floats of 32 or
    fewer bits, become autocast's dtype."""

    def rule(*args, **kwargs):
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cuda")
        dtype = torch.get_autocast_dtype(device)

        def cast(x):
            if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
                return x.to(dtype)
            return x

        with _without_autocast():
            args = [cast(x) if i in positions else x for i, x in enumerate(args)]
            kwargs = {k: cast(x) if k in names else x for k, x in kwargs.items()}
            return op(*args, **kwargs)

    return rule


# Of one level: torch.func has taken its level off before autograd's turn comes. Where torch has no
# such class, gradients work everywhere but under torch.func.
try:
    from torch._functorch.utils import enable_single_level_autograd_function as _one_level
    from torch.autograd.function import _SingleLevelFunction as _Function
except ImportError:
    from contextlib import nullcontext as _one_level

    from torch.autograd import Function as _Function


@contextlib.contextmanager
def _outer_levels_record():
    """A Function switches gradients off while its forward runs, which is meant for its own level of
    torch.func only: those outside have still to record the operator, and see its tangents."""
    forward_mode = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._set_fwd_grad_enabled(forward_mode)


def _below_autograd(op, keyset, args):
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _in_forward(op, keyset, args):
    """Below autograd, from the forward of a Function."""
    if not in_torch_func():
        return _below_autograd(op, keyset, args)
    with _outer_levels_record():
        return _below_autograd(op, keyset, args)


def _records(qualname, args):
    """Does autograd record a call? Not by tensors of lists, which a Function would not see."""
    if not torch.is_grad_enabled():
        return False
    for x in args:
        if isinstance(x, (list, tuple)) and any(getattr(t, "requires_grad", False) for t in x):
            raise NotImplementedError(
                f"{qualname}: an argument is a list with tensors that require grad, and operators"
                " have no gradients by lists; pass the tensors one by one, or detached"
            )
    return torch._C._any_requires_grad(*args)


def _autograd(op, qualname, signature, backward, written, complete):
    """The implementation for autograd. backward: as `torch_op` takes it; written: positions of
    arguments that a caller will write to, which therefore are not saved; complete: backward has
    gradients for all tensors that may have one, so None for a tensor that requires grad is an
    error."""
    names = [*signature.parameters]
    defaults = [p.default for p in signature.parameters.values()]
    if backward is None:
        setup, backward = lambda ctx, inputs, output: None, _refusing_backward(qualname)
    elif isinstance(backward, tuple):
        setup, backward = backward
    else:
        setup = functools.partial(_Context.setup, written=written)
        backward = _Context.wrap(backward, qualname, len(defaults))

    def forward(ctx, *given):
        *args, keyset = given
        result = _in_forward(op, keyset, args)
        setup(ctx, (*args, *defaults[len(args) :]), result)
        ctx.given = len(args)
        return result

    def backward_of_node(ctx, *grads):
        result = backward(ctx, *grads)
        result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        result = result[: ctx.given]
        for name, g, needed in zip(names, result, ctx.needs_input_grad) if complete else ():
            if needed and g is None:
                raise NotImplementedError(
                    f"{qualname} has no gradient by {name}, which requires grad; pass"
                    f" {name}.detach()"
                )
        return *result, None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_node)}
    node = type(f"{qualname.replace('::', '_')}_backward", (_Function,), methods)

    def rule(keyset, *args):
        _refuse_tangents(qualname, args)
        if _records(qualname, args):
            with _one_level():
                return node.apply(*args, keyset)
        return _below_autograd(op, keyset, args)

    return rule


def _autograd_of_mutation(op, qualname, positions):
    """The implementation for autograd of an operator that writes its arguments."""

    def rule(keyset, *args):
        _refuse_tangents(qualname, args)
        if _records(qualname, args):
            raise RuntimeError(
                f"{qualname} writes to its arguments and has no gradient, and an argument requires"
                " grad; call it under torch.no_grad(), or give backward="
            )
        result = _below_autograd(op, keyset, args)
        torch.autograd.graph.increment_version([args[i] for i in positions if i < len(args)])
        return result

    return rule


def _by_position(fn):
    """fn with all parameters by position, as the schema has them: autograd wants no others."""
    if isinstance(fn, _core.Kernel):
        return fn
    plain = fn.maker.make if isinstance(fn, _core.Family) else fn
    parameters = inspect.signature(plain).parameters.values()
    names = [p.name for p in parameters]
    n = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    if n == len(names):
        return fn

    @functools.wraps(fn, updated=())
    def call(*args, **kwargs):
        return fn(*args[:n], **dict(zip(names[n:], args[n:])), **kwargs)

    return call


def _mutated(signature, mutates, fn):
    names = [*signature.parameters]
    if not isinstance(mutates, (str, tuple, list)):
        raise TypeError(f"torch_op: mutates must name parameters, got {show(mutates)}")
    mutates = (mutates,) if isinstance(mutates, str) else tuple(mutates)
    if mutates and isinstance(fn, _core.Kernel):
        raise ValueError(
            f"torch_op: mutates={show(mutates)}, and {_what(fn)} cannot write to its operands; pass"
            " a function that calls the kernel with out="
        )
    for m in mutates:
        if m not in names:
            raise ValueError(
                f"torch_op: mutates names {show(m)}, and the parameters of {fn.__name__} are"
                f" {', '.join(names)}"
            )
    return mutates, [names.index(m) for m in mutates]


def _check_functions(backward, fake):
    pair = isinstance(backward, tuple) and len(backward) == 2 and all(map(callable, backward))
    if not (backward is None or callable(backward) or pair):
        raise TypeError(
            "torch_op: backward must be a function, or a pair (setup_context, backward), got"
            f" {show(backward)}"
        )
    if not (fake is None or callable(fake)):
        raise TypeError(f"torch_op: fake must be a function, got {show(fake)}")


def make_operator(fn, name, mutates, backward, fake, autocast=(), complete=False, views=False):
    """See `torch_op`; autocast: names of parameters that autocast converts; complete: see
    `_autograd`; views: fn takes tensors of a GPU that are not contiguous."""
    _check_functions(backward, fake)
    signature = _parameters(fn, mutates)
    name = fn.__name__ if name is None else name
    if not isinstance(name, str) or name.count("::") > 1:
        raise ValueError(f"torch_op: name must be 'name' or 'namespace::name', got {show(name)}")
    qualname = name if "::" in name else f"pallas_mgpu::{name}"
    namespace, opname = qualname.split("::")
    mutates, positions = _mutated(signature, mutates, fn)
    library = library_of(namespace)
    functional = bool(mutates and backward)
    flat, returned = _by_position(fn), {}
    if mutates:
        flat = _without_arguments(flat, signature, mutates, returned)
    inner, returns = _functional(flat, signature, mutates) if functional else (flat, signature)
    schema = _schema(returns, () if functional else mutates)
    try:
        library.define(opname + schema, tags=(torch.Tag.needs_fixed_stride_order,))
    except RuntimeError as e:
        raise ValueError(f"torch_op: {qualname} cannot be defined: {e}") from None
    op = getattr(getattr(torch.ops, namespace), opname).default
    views = views or isinstance(inner, _core.Kernel)
    rule = _implementation(inner, qualname, returns, () if functional else positions, views)
    library.impl(opname, rule, "CompositeExplicitAutograd")
    if fake is not None:
        fake = _by_position(fake)
        if mutates:
            fake = _without_arguments(fake, signature, mutates, returned)
        fake = _functional(fake, signature, mutates)[0] if functional else fake
    torch.library.register_fake(
        qualname, fake or _with_state(inner, qualname, returns), lib=library
    )
    if mutates and not functional:
        rule = _autograd_of_mutation(op, qualname, positions)
        library.impl(opname, rule, "Autograd", with_keyset=True)
    else:
        rule = _autograd(op, qualname, signature, backward, positions, complete)
        library.impl(opname, rule, "Autograd", with_keyset=True)
        by_launch = isinstance(fn, _core.Kernel) and not isinstance(backward, tuple)
        rule = _mapped_kernel(fn, qualname, backward) if by_launch else _loop(op)
        torch.library.register_vmap(qualname, rule, lib=library)
    if autocast:
        at = {i for i, p in enumerate(signature.parameters) if p in autocast}
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(opname, _cast_rule(op, set(autocast), at), key)
    if functional:
        call = _in_place(fn, op, signature, positions, returned)
    else:
        call = _wrapper(fn, op, signature, returned)
    call.op = op
    call.__signature__ = signature
    return call


def _check_count(qualname, signature, result):
    if signature.return_annotation is Tensor and isinstance(result, (tuple, list)):
        raise TypeError(
            f"{qualname}: the function returned {len(result)} results, and its annotation says one"
            " tensor; annotate it with -> tuple[Tensor, Tensor] or the like"
        )


def _check_results(qualname, signature, args, result):
    """Of a function, which may return anything."""
    _check_count(qualname, signature, result)
    results = result if isinstance(result, (tuple, list)) else (result,)
    of_args = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    for x in results:
        at = x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0
        if at and at in of_args:
            raise RuntimeError(
                f"{qualname}: the function returns one of its arguments, or a view of one; an"
                " operator returns new tensors and arguments that mutates= names"
            )


def _dense(x):
    return x.contiguous() if isinstance(x, Tensor) else x


def _implementation(fn, qualname, signature, positions, views):
    """fn on contiguous tensors, but for those at the positions, which it writes to, and, with
    views, those of a GPU; checked for results that are arguments, which operators must not
    return."""

    def implementation(*args):
        args = [_as_tensor(x) for x in args]
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                _refuse_elsewhere(qualname, x)
                if i not in positions and not (views and x.is_cuda):
                    args[i] = x.contiguous()
            elif isinstance(x, (list, tuple)):
                args[i] = [_dense(_as_tensor(t)) for t in x]
        result = fn(*args)
        if not isinstance(fn, _core.Kernel):  # whose results are new
            _check_results(qualname, signature, args, result)
        return result

    return implementation


def _wrapper(fn, op, signature, returned):
    names = [*signature.parameters]

    @functools.wraps(fn, updated=())
    def call(*args, **kwargs):
        compiling = torch.compiler.is_compiling()
        if not compiling and _is_direct(args) and (not kwargs or _is_direct(kwargs.values())):
            return fn(*args, **kwargs)
        found = op(*args, **kwargs)
        return _with_arguments(found, returned, dict(zip(names, args)) | kwargs)

    return call


def _with_arguments(found, returned, given):
    """Results with the arguments that the function returned in their places."""
    if not returned:
        return found
    if not isinstance(found, (tuple, list)):
        return given[returned[0]]
    return tuple(given[returned[i]] if i in returned else x for i, x in enumerate(found))


def _without_arguments(fn, signature, mutates, returned):
    """fn, which may return arguments that it writes to: an operator cannot, so it gets empty
    tensors instead. returned: which, by the number of the result; filled by calls, which all must
    return the same ones (TypeError)."""
    names = [*signature.parameters]
    first = []  # what the first call returned

    @functools.wraps(fn, updated=())
    def call(*args, **kwargs):
        result = fn(*args, **kwargs)
        given = dict(zip(names, args)) | kwargs
        written = {id(given[m]): m for m in mutates if given.get(m) is not None}
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        found = {i: written[id(x)] for i, x in enumerate(results) if id(x) in written}
        if not first:
            first.append(found)
        if found.keys() != first[0].keys() or any(
            given.get(m) is not results[i] for i, m in first[0].items()
        ):
            raise TypeError(
                f"{fn.__name__}: the arguments that it returned, {[*found.values()]}, are not those"
                f" of an earlier call, {[*first[0].values()]}; return the same ones in all calls"
            )
        returned.update(first[0])
        for i in found:
            results[i] = results[i].new_empty((0,))
        return results[0] if not isinstance(result, (tuple, list)) else tuple(results)

    return call


def _functional(fn, signature, mutates):
    """fn on copies of what it writes to, which become its last results (an empty tensor for None);
    and its signature."""
    result = signature.return_annotation
    results = () if result is None else (result,) if result is Tensor else result.__args__
    returns = (Tensor,) * (len(results) + len(mutates))
    annotation = Tensor if len(returns) == 1 else tuple[returns]

    def functional(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, new = bound.arguments, []
        none = next((x for x in given.values() if isinstance(x, Tensor)), None)
        for m in mutates:
            if given[m] is not None:
                given[m] = given[m].clone(memory_format=torch.contiguous_format)
            new.append(given[m])
        found = fn(*bound.args, **bound.kwargs)
        found = found if isinstance(found, (tuple, list)) else () if found is None else (found,)
        found = (*found, *(none.new_empty((0,)) if x is None else x for x in new))
        return found[0] if len(found) == 1 else found

    functional.__name__ = fn.__name__
    return functional, signature.replace(return_annotation=annotation)


def _in_place(fn, op, signature, positions, returned):
    """The function that writes to its arguments, by way of the functional operator."""
    names = [*signature.parameters]
    written = [names[i] for i in positions]
    result = signature.return_annotation
    single, none = result is Tensor, result is None

    @functools.wraps(fn, updated=())
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling() and _is_direct((*args, *kwargs.values())):
            return fn(*args, **kwargs)
        found = op(*args, **kwargs)
        found = found if isinstance(found, (tuple, list)) else (found,)
        given = dict(zip(names, args)) | kwargs
        for name, new in zip(written, found[len(found) - len(written) :]):
            if given.get(name) is not None:
                given[name].copy_(new)
        if none:
            return None
        fresh = tuple(found[: len(found) - len(written)])
        return _with_arguments(fresh[0] if single else fresh, returned, given)

    return call


# ---- as_torch_kernel -----------------------------------------------------------------------------


class _Recorded:
    """One kernel call of a function that is only looked at."""

    def __init__(self):
        self.target = None

    def __call__(self, target, args, kwargs):
        if self.target is not None:
            raise ValueError(
                f"as_torch_kernel: the function calls several kernels ({self.target.__name__} and"
                f" {target.__name__}); it must call exactly one"
            )
        if kwargs.get("out") is not None or kwargs.get("stream") is not None:
            raise ValueError("as_torch_kernel: the function gives out= or stream= to the kernel")
        kernel = target
        options = {k: v for k, v in kwargs.items() if k not in ("out", "stream")}
        if isinstance(target, _core.Family):
            infos = [ArrayInfo(x.shape, x.dtype) for x in args]
            named = {
                k: ArrayInfo(x.shape, x.dtype) if type(x) is Placeholder else x
                for k, x in options.items()
            }
            kernel = target.kernel(*infos, **named)
        if not isinstance(kernel, _core.Kernel):
            raise ValueError(f"as_torch_kernel: {target.__name__} calls several kernels")
        self.target, self.args, self.options = target, args, options
        self.definition = kernel.definition
        leaves, structure = tree.flatten(args)
        if not all(type(x) is Placeholder for x in leaves):
            raise ValueError("as_torch_kernel: an operand of the kernel is no argument")
        specs = [(x.shape, x.dtype) for x in leaves]
        self.definition.check_operands(specs)
        self.outs = [Placeholder(o.shape, o.dtype, self) for o in self.definition.outs]
        return self.definition.unflatten(list(self.outs))


class _Plan:
    """How a call with arguments of one structure, shapes and dtypes is done."""

    def __init__(self, fn, args, kwargs):
        leaves, self.structure = tree.flatten((args, kwargs))
        recorded = _Recorded()
        inputs = [Placeholder(tuple(x.shape), _dtype_of(x), recorded) for x in leaves]
        given, named = tree.unflatten(self.structure, inputs)
        result = fn(*given, **named)
        if recorded.target is None:
            raise ValueError("as_torch_kernel: the function calls no kernel; it must call one")
        place = {id(x): i for i, x in enumerate(inputs)}
        operands, self.operands_structure = tree.flatten((recorded.args, recorded.options))
        self.operands = [place[id(x)] if type(x) is Placeholder else None for x in operands]
        self.fixed = [None if type(x) is Placeholder else x for x in operands]
        results, self.result_structure = tree.flatten(result)
        outs = {id(x): i for i, x in enumerate(recorded.outs)}
        for x in results:
            if id(x) not in outs:
                what = "an argument" if id(x) in place else show(x)
                raise ValueError(
                    f"as_torch_kernel: the function returns {what}, which is no result of the"
                    " kernel"
                )
        self.results = [outs[id(x)] for x in results]
        self.target, definition = recorded.target, recorded.definition
        self.definition = definition
        self.outs = [(o.shape, o.dtype) for o in definition.outs]
        flat = tree.leaves(recorded.args)
        self.aliases = {o: place[id(flat[i])] for i, o in definition.aliases.items()}

    def __call__(self, leaves):
        operands = [
            x if i is None else leaves[i] for i, x in zip(self.operands, self.fixed, strict=True)
        ]
        args, options = tree.unflatten(self.operands_structure, operands)
        if not self.aliases:
            outs = tree.leaves(self.target(*args, **options))
        else:
            outs = _empty(self.outs, leaves)
            for o, i in self.aliases.items():
                outs[o] = leaves[i]
            self.target(*args, out=tuple(outs), **options)
        return tree.unflatten(self.result_structure, [outs[i] for i in self.results])


class AsTorchKernel:
    """See :func:`as_torch_kernel`."""

    def __init__(self, fn):
        self.fn, self.plans = fn, {}
        functools.update_wrapper(self, fn)

    def __call__(self, *args, **kwargs):
        leaves, structure = tree.flatten((args, kwargs))
        for x in leaves:
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"as_torch_kernel: the arguments of {self.fn.__name__} must be tensors, or"
                    f" containers of them, got {show(x)}"
                )
        key = structure, tuple((tuple(x.shape), x.dtype) for x in leaves)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = _Plan(self.fn, args, kwargs)
        return plan(leaves)
