"""Spellings of other versions of the language: keywords that were renamed, names that are not there
yet, names that never were."""

import functools
import importlib
import inspect
import re
import sys
import types
import warnings
from types import ModuleType


def show(x):
    """A short text of a user's value, for messages."""
    try:
        text = repr(x)
    except Exception:
        text = "\n"
    if len(text) <= 200 and "\n" not in text:
        return text
    shape = getattr(x, "shape", None)
    return f"a {type(x).__name__}" + (f" of shape {shape}" if isinstance(shape, tuple) else "")


class NotSpecified:
    """Default value of parameters for which None has a meaning."""

    __slots__ = ()

    def __repr__(self):
        return "NotSpecified()"


NOT_SPECIFIED = NotSpecified()


def later(module, name):
    """A function of a module of the package that is imported when the function is first called,
    because few programs call it."""

    def call(*args, **kwargs):
        return getattr(importlib.import_module(f".{module}", __package__), name)(*args, **kwargs)

    return call


def deprecated(text, stacklevel):
    warnings.warn(text, DeprecationWarning, stacklevel + 1)


_NAMESPACES = ("plgpu", "plgpu.ext", "pl", "lax", "jnp", "nn", "ops", "tree")
# modules of the namespaces that are called otherwise
_MODULES = {"plgpu": "", "plgpu.ext": ".ext", "jnp": ".numpy"}


def _public(namespace):
    """The public names of a loaded namespace, with their values."""
    module = sys.modules.get(__package__ + _MODULES.get(namespace, f".{namespace}"))
    found = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {k: v for k, v in found.items() if not isinstance(v, ModuleType)}


def suggest(name, names):
    """ ", did you mean 'x'?" of a misspelt name, "" where none is close."""
    difflib = importlib.import_module("difflib")  # only errors need it
    other_case = [x for x in names if x.lower() == name.lower()]
    close = other_case or difflib.get_close_matches(name, names, 1, 0.7)
    return f", did you mean {close[0]!r}?" if close else ""


def _suggest_name(namespace, name):
    """The same for a name of a namespace: it may stand in another one."""
    for other in _NAMESPACES:
        if other != namespace and name in _public(other):
            return f", did you mean {other}.{name}?"
    return suggest(name, _public(namespace))


_KEYWORD_ERROR = r"(?:\w+\.)*(\w+)\(\) got an unexpected keyword argument '(\w+)'"


def explain_keyword(text):
    """Python's message of an unknown keyword of a public function, with what was probably meant;
    None for any other message."""
    found = re.match(_KEYWORD_ERROR, text)
    if not found:
        return None
    for namespace in _NAMESPACES:
        f = _public(namespace).get(found[1])
        try:
            names = [*inspect.signature(f).parameters] if callable(f) else []
        except ValueError:
            continue
        if names:
            accepted = "" if "Did you mean" in text else suggest(found[2], names)
            return f"{text}{accepted or '; accepted are ' + ', '.join(names)}"
    return None


def check_keywords(name, names, given):
    """TypeError for a keyword that is not in ``names``."""
    for keyword in given:
        if keyword not in names:
            raise TypeError(
                f"{name}: unknown argument {keyword!r}{suggest(keyword, names)}"
                f"{'' if suggest(keyword, names) else '; accepted are ' + ', '.join(names)}"
            )


def shown_as(like):
    """Decorator: the signature that help() shows is that of ``like``; for a function that takes
    more only to refuse it with a better error."""

    def wrap(f):
        f.__signature__ = inspect.signature(like)
        return f

    return wrap


def accepts(*positional, **older):
    """Decorator that lets a function take older spellings, each with a DeprecationWarning.

    ``positional``: keyword-only parameters that could once be given by position. ``older``: by
    old keyword its new name, None if it has no effect any more, an exception that says what to
    write, or a function of (positional arguments, keywords, value) that changes both in place and
    returns what to write instead (None: no warning).
    """

    def wrap(f):
        name = f.__qualname__.removesuffix(".__init__").removesuffix(".__call__")
        first = 1 if f.__name__ in ("__init__", "__call__") else 0  # self
        code = inspect.unwrap(f).__code__
        takes_all = code.co_flags & inspect.CO_VARKEYWORDS
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names, known = parameters[first:], frozenset(parameters)

        @functools.wraps(f)
        def call(*args, **kwargs):
            __tracebackhide__ = True  # by pytest and IPython
            if positional and len(args) > first:
                for key, value in zip(positional, args[first:]):
                    if key in kwargs:
                        raise TypeError(f"{name}: multiple values for argument {key!r}")
                    kwargs[key] = value
                args = args[:first] + args[first + len(positional) :]
            for old in [k for k in older if k in kwargs]:
                new, value = older[old], kwargs.pop(old)
                if isinstance(new, Exception):
                    raise type(new)(*new.args)
                if callable(new):
                    args = list(args)
                    text = new(args, kwargs, value)
                    if text is None:
                        continue
                elif new is None:
                    text = "it has no effect any more"
                elif new in kwargs:
                    raise ValueError(f"{name}: cannot specify both {new} and {old}; use {new}")
                else:
                    kwargs[new] = value
                    text = f"use {new}="
                deprecated(f"{name}: {old}= is an older spelling; {text}", 2)
            if not takes_all and not known >= kwargs.keys():
                check_keywords(name, names, kwargs)
            return f(*args, **kwargs)

        return call

    return wrap


def explain_keywords(cls):
    """A misspelt keyword of a class's own ``__init__`` raises an error that says what was meant."""
    init = cls.__dict__.get("__init__")
    if init and not hasattr(init, "__wrapped__"):
        cls.__init__ = accepts()(init)


_GAPS = "`python -m pallas_mgpu gaps` lists what is missing"


class Missing:
    """A name of the language that is not implemented: every use raises NotImplementedError."""

    __slots__ = ("_text", "__name__")

    def __init__(self, name, text):
        self._text, self.__name__ = f"{text} ({_GAPS})", name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(self._text)

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NotImplementedError(self._text)

    def __repr__(self):
        return f"<{self._text}>"


def finder(namespace, missing, wrong, text="{namespace}.{name} is not supported yet; {hint}"):
    """A module's ``__getattr__``. ``missing``: by hint a string of names. ``wrong``: by name what
    is the right form."""
    hints = {name: hint for hint, names in missing.items() for name in names.split()}

    @functools.cache
    def find(name):
        if name in hints:
            hint = hints[name]
            return Missing(name, text.format(namespace=namespace, name=name, hint=hint))
        if name in wrong:
            raise AttributeError(f"{namespace} has no {name!r}; {wrong[name]}")
        meant = "" if name.startswith("__") else _suggest_name(namespace, name)
        raise AttributeError(f"{namespace} has no {name!r}{meant or f'; {_GAPS}'}")

    return find


PLGPU_MISSING = {
    "use plgpu.inline_cuda, which takes CUDA C++": "inline_mgpu",
}

PLGPU_WRONG = {
    "Operand": "it is plgpu.ArrayInfo",
    "core_count": "it is plgpu.sm_count(device)",
    "broadcast_tile": "it is plgpu.ext.TileScheduler(...).broadcast(tile, step)",
    "hand_tile": "it is plgpu.ext.TileScheduler(...).broadcast(tile, step)",
    "in_turn": "it is plgpu.ext.ordered_section(num_threads)",
    "kernel_family": "it is plgpu.specialize",
    "lazy_where": "it is plgpu.ext.warp_where(mask, on_true, on_false)",
    "next_tile": "it is plgpu.ext.TileScheduler(...).fetch()",
    "jnp": "it is a module of its own: from pallas_mgpu import numpy as jnp",
    "ops": "it is a module of its own: from pallas_mgpu import ops",
    "torch": "it is a module of its own: import pallas_mgpu.torch",
    "jax": "it is a module of its own: import pallas_mgpu.jax",
    "Semaphore": "the right form is plgpu.SemaphoreType.REGULAR",
    "Registers": "the right form is plgpu.REGS; arrays in registers come from ref[...]",
    "TransposeTransform": "the right form is ref.transpose(permutation) or plgpu.transpose_ref",
    "async_copy_gmem_to_smem": "the right form is plgpu.copy_gmem_to_smem(src, dst, barrier)",
    "async_copy_smem_to_gmem": "the right form is plgpu.copy_smem_to_gmem(src, dst)",
    "optimization_barrier": "the right form is lax.optimization_barrier(x)",
    "pallas_call": "the right form is pl.pallas_call(body, out_shape=...)",
    "program_id": "the right form is lax.axis_index(name), or pl.program_id(axis)",
    "run_scoped": "the right form is pl.run_scoped(f, *types)",
    "triton_call": "it is not part of Pallas:MGPU; the right form is plgpu.kernel(body,"
    " out_type=...)",
    "unswizzle_ref": "the right form is to allocate a ref without transforms",
    "untile_ref": "the right form is to allocate a ref without transforms",
    "when": "the right form is pl.when(condition)",
}


def _no_pipeline_params(*args, **kwargs):
    raise TypeError(
        "pipelines.PipelineParams does not exist; for a pipeline inside a kernel use"
        " plgpu.emit_pipeline(..., max_concurrent_steps=n), for pl.pallas_call pass"
        " compiler_params=plgpu.CompilerParams(max_concurrent_steps=n)"
    )


OLD_PIPELINES = types.SimpleNamespace(PipelineParams=_no_pipeline_params)  # plgpu.pipelines

PL_MISSING = {
    "count the operations by hand: pl.CostEstimate": "estimate_cost",
    "use an int, pl.Element or None": "BoundedSlice Indirect",
    "use pl.when": "select_ref",
}

LAX_MISSING = {
    "write plain formulas": "betainc igamma igammac polygamma zeta",
    "use jnp.take, x[...] or x.at[...].set": "gather index_take scatter scatter_add",
    "use jnp.argsort and jnp.take_along_axis": "sort_key_val",
    "use plgpu.wgmma": "conv conv_general_dilated ragged_dot",
    "each block its own output": "all_gather all_to_all pmax pmean pmin ppermute psum_scatter",
    "pass the data as operands": "rng_bit_generator rng_uniform",
}

PL_WRONG = {
    "max_contiguous": "the right form is pl.multiple_of(x, n)",
    "optimization_barrier": "the right form is lax.optimization_barrier(x)",
    "axis_index": "the right form is lax.axis_index(name)",
    "PipelineParams": "the right form is plgpu.emit_pipeline(..., max_concurrent_steps=n)",
    "fori_loop": "the right form is lax.fori_loop, or pl.loop",
    "cond": "the right form is lax.cond, or pl.when",
}
