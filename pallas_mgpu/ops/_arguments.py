"""What arguments by name may be, for all functions of ops alike: names mean the same everywhere."""

import numbers

import numpy as np

from .._family import ArrayInfo
from .._names import show

_ARRAYS = {
    "add", "bias", "block_mask", "cos", "cu_seqlens_k", "cu_seqlens_q", "k_scale", "kv_lengths",
    "mask_data", "page_table", "q_lengths", "q_scale", "scale_a", "scale_b", "scale_lhs",
    "scale_rhs", "seed", "sin", "sinks", "tree", "v_scale",
}  # fmt: skip
_NUMBERS_OR_ARRAYS = {"temperature", "top_k", "top_p"}


def _refuse(function, name, wanted, x):
    found = f"{x.dtype} of shape {x.shape}" if isinstance(x, ArrayInfo) else show(x)
    raise TypeError(f"{function}: {name} must be {wanted}, got {found}")


def check_arguments(function, bound):
    """TypeError for an array that is an option, a number in place of an array, and the like.
    bound: the arguments of a call, with their defaults."""
    for name, p in bound.signature.parameters.items():
        x, is_array = bound.arguments[name], isinstance(bound.arguments[name], ArrayInfo)
        if p.kind is not p.KEYWORD_ONLY or name in _NUMBERS_OR_ARRAYS:
            continue
        if name in _ARRAYS and p.default is None:
            if x is not None and not is_array:
                _refuse(function, name, "an array or None", x)
        elif is_array:
            _refuse(function, name, "no array", x)
        elif isinstance(p.default, bool):
            if not isinstance(x, bool | np.bool_ | numbers.Integral) or x not in (0, 1):
                _refuse(function, name, "True or False", x)
        elif isinstance(p.default, float) and not isinstance(x, numbers.Real):
            _refuse(function, name, "a number", x)
        elif type(p.default) is int and name != "axis":
            if not isinstance(x, numbers.Integral):
                _refuse(function, name, "an int", x)
            if not -(2**31) <= x < 2**31:
                raise ValueError(f"{function}: {name} must fit an int32, got {show(x)}")
