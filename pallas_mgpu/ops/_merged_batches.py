"""`plgpu.vmap` of functions of ops that have a batch: one call for the entries of all elements.

Programs of mapped kernels know all of their sizes. Those of functions whose operands have a batch,
or rows that are worked on one by one, take its size at run time. So the mapped axis becomes a part
of the batch, where it precedes that in memory and all operands that have one are mapped. What
depends on the number of an entry (dropout, masks), or is shared by the entries of one element only,
is mapped as other functions are."""

import math
import typing

from pallas_mgpu import tree
from pallas_mgpu._batch import Batched

from ._open_rows import view


class _Operands(typing.NamedTuple):
    """Names of those whose first dimension is the batch, and of those that all entries share."""

    entries: tuple[str, ...]
    shared: tuple[str, ...] = ()


_ATTENTION = ("q", "k", "v", "kv_lengths", "q_lengths")
_FUNCTIONS = {
    "attention": _Operands((*_ATTENTION, "bias"), ("cos", "sin")),
    "attention_backward": _Operands(("grad", *_ATTENTION, "o", "lse", "bias"), ("cos", "sin")),
    "attention_decode": _Operands((*_ATTENTION, "tree"), ("sinks",)),
    "mla_decode": _Operands(("q", "cache", "kv_lengths")),
    "rotary": _Operands(("x",), ("cos", "sin", "weight")),
    "softmax": _Operands(("x",)),
    "softmax_backward": _Operands(("grad", "y")),
    "rms_norm": _Operands(("x",), ("weight",)),
    "layer_norm": _Operands(("x",), ("weight", "bias")),
    "add_rms_norm": _Operands(("x", "residual"), ("weight",)),
    "add_layer_norm": _Operands(("x", "residual"), ("weight", "bias")),
    "gated_linear_unit": _Operands(("gate", "up")),
    "gated_linear_unit_backward": _Operands(("grad", "gate", "up")),
    "gated_linear_unit_quantize": _Operands(("gate", "up")),
    "rms_norm_quantize": _Operands(("x",), ("weight",)),
    "cross_entropy": _Operands(("logits", "targets")),
    "cross_entropy_backward": _Operands(("grad", "logits", "targets", "lse")),
}
# Options with these results only: they name no other dimension and no number of an entry.
_NEEDED = {"axis": -1, "mask": None, "dropout": 0.0}


def merged(family, args, options):
    """The results of a call of which some operands are `Batched`; None where it has to be mapped.
    options: arguments by name."""
    if family.__name__ == "matmul":
        return _product(family, args, options)
    of = _FUNCTIONS.get(family.__name__)
    if of is None or any(options.get(n, needed) != needed for n, needed in _NEEDED.items()):
        return None
    given, arrays, level, mapped = _read(family, args, options)
    entries = {n: x for n, x in arrays.items() if n in of.entries}
    others = {n: x for n, x in arrays.items() if n not in entries}
    if any(mapped(x) or n not in of.shared for n, x in others.items()) or not entries:
        return None
    along = [mapped(x) and x.axis == 0 and hasattr(x.value, "reshape") for x in entries.values()]
    sizes = {x.shape[:1] for x in entries.values()}
    several = max(x.ndim for x in entries.values()) > 1  # not a row alone
    if not all(along) or len(sizes) > 1 or not several or len(args) > len(arrays):
        return None
    ((first,),), size = sizes, next(iter(entries.values())).value.shape[0]
    given |= {n: view(x.value, (size * first, *x.shape[1:])) for n, x in entries.items()}
    found = _call(family, given, len(args))
    return tree.map(lambda y: Batched(view(y, (size, first, *y.shape[1:])), 0, level), found)


def _read(family, args, options):
    """All arguments by name, those that are arrays, the level of vmap, and whether it maps one."""
    given = dict(zip(family.maker.parameters, args)) | options
    arrays = {n: x for n, x in given.items() if hasattr(x, "shape") and hasattr(x, "dtype")}
    level = max(x.level for x in arrays.values() if isinstance(x, Batched))
    return given, arrays, level, lambda x: isinstance(x, Batched) and x.level == level


def _call(family, given, positional):
    named = dict(given)
    first = [named.pop(n) for n in family.maker.parameters[:positional]]
    return family(*first, **named)


def _product(family, args, options):
    """The same of matmul: the mapped axis becomes the first batch dimension."""
    given, arrays, level, mapped = _read(family, args, options)
    if any(given.get(n) for n in ("accumulate", "return_product", "config")):
        return None
    a, b = arrays.get("a"), arrays.get("b")
    if a is None or b is None or min(a.ndim, b.ndim) < 2 or len(args) > 2:
        return None
    dims = max(a.ndim, b.ndim)
    for name, x in arrays.items():
        if not mapped(x):
            of = {"scale_a": a, "scale_b": b}.get(name)
            if of is not None and mapped(of) and x.ndim > 2:
                return None
            continue
        of = {"a": a, "b": b, "scale_a": a, "scale_b": b}.get(name)
        if of is None or not mapped(of) or x.axis or not hasattr(x.value, "reshape"):
            return None
        shape = x.shape
        if x.ndim < 2:  # a scale of each row or column, or one
            size = math.prod(shape)
            shape = (size, 1) if name == "scale_a" else (1, size)
        if len(shape) not in (2, of.ndim):
            return None
        ones = (1,) * (dims - len(shape))
        given[name] = view(x.value, (x.value.shape[0], *ones, *shape))
    return Batched(_call(family, given, len(args)), 0, level)
