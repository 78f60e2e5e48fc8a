"""`python -m pallas_mgpu explain`: what bounds a kernel of a file, by `plgpu.estimate`."""

import argparse
import inspect
import os
import re
import runpy
import sys

import pallas_mgpu as plgpu

from . import _core
from ._estimate import estimate
from ._estimate_machine import GPUS
from ._sizes import Known

_OPERAND = re.compile(r"(\w+)\[([\d,\s]*)\]")


def _operand(text):
    found = _OPERAND.fullmatch(text.strip())
    if not found:
        raise ValueError(f"an operand is written as float32[1024,512], got {text!r}")
    dims = tuple(int(x) for x in found[2].split(",") if x.strip())
    try:
        return plgpu.ShapeDtypeStruct(dims, found[1])
    except TypeError as e:
        raise ValueError(str(e).splitlines()[0]) from e


def _size(text):
    name, _, value = text.partition("=")
    if not value.isdigit():
        raise ValueError(f"a size is written as M=4096, got {text!r}")
    return name, int(value)


def _parted(text):
    """The file and the name in `file.py:name`."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ValueError(f"expected file.py:kernel, got {text!r}")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    return path, name


def _find(path, name, names):
    """What `file.py:name` names. names: all that the file defines."""
    first, *rest = name.split(".")
    if first not in names:
        own = [n for n, x in names.items() if hasattr(x, "lower") and not isinstance(x, str)]
        own += [n for n, x in names.items() if getattr(x, "__module__", None) == "explained"]
        raise ValueError(f"{path} has no {first}; it has {', '.join(dict.fromkeys(own)) or 'none'}")
    found = names[first]
    for part in rest:
        if not hasattr(found, part):
            raise ValueError(f"{path} has no {name}")
        found = getattr(found, part)
    return found


def _made(x, operands, what):
    """What has `lower`, or is lowered: x, or what it returns."""
    if hasattr(x, "lower") or isinstance(x, _core.Lowered) or not callable(x):
        return x
    try:
        if hasattr(x, "kernel") and operands:  # a function of ops
            return x.kernel(*operands)
        inspect.signature(x).bind()
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{what}: name a kernel, a function of pallas_mgpu.ops with its operands, or a function"
            f" without arguments that returns a kernel: {e}"
        ) from e
    return x()


def _lowered(x, operands, what):
    """A list of lowered kernels: of one, or of those that a choice of `ops` consists of."""
    made = _made(x, operands, what)
    if isinstance(made, _core.Lowered):
        if operands:
            raise ValueError(f"{what} is lowered already, and takes no operands")
        return [made]
    if not hasattr(made, "lower"):
        raise ValueError(
            f"{what} is neither a kernel, nor what its lower() returns, nor a function that makes"
            f" one of these: {made!r}"
        )
    try:
        if hasattr(made, "lower_each"):
            return made.lower_each(*operands)
        return [made.lower(*operands)]
    except (TypeError, ValueError) as e:
        hint = "" if operands else "; name its operands, as in: float32[1024,512] float32[512]"
        raise ValueError(f"{what}: {e}{hint}") from e


def run(argv):
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_mgpu explain",
        description="predicted time of a kernel, no GPU needed",
    )
    parser.add_argument(
        "kernel",
        help="file.py:name of a kernel, of a function of ops, or of one that makes a kernel",
    )
    parser.add_argument("operands", nargs="*", help="as float32[1024,512]")
    parser.add_argument("--gpu", default="H200", choices=tuple(GPUS))
    parser.add_argument(
        "--size", action="append", default=[], help="M=4096, of a plgpu.dim that no operand has"
    )
    parser.add_argument("--cold", action="store_true", help="nothing is in the L2")
    args = parser.parse_args(argv)
    try:
        operands = [_operand(x) for x in args.operands]
        path, name = _parted(args.kernel)
    except ValueError as e:
        print(f"error: {e}")
        return 2
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as of a script
    names = runpy.run_path(path, run_name="explained")  # errors of the file have their traceback
    try:
        found = _find(path, name, names)
        shapes = getattr(getattr(found, "definition", None), "in_shapes", None) or ()
        known = Known(shapes, [x.shape for x in operands]).symbols
        sizes = {dim.name: n for dim, n in known.items()} | dict(_size(x) for x in args.size)
        lowered = _lowered(found, operands, args.kernel)
        each = [estimate(x, gpu=args.gpu, sizes=sizes, cold=args.cold) for x in lowered]
        print(*each, sep="\n\n")
        if len(each) > 1:
            print(f"\n{len(each)} kernels: about {sum(e.seconds for e in each) * 1e6:.3g} us")
    except (ValueError, NotImplementedError) as e:
        # where the operands do not fit, the caller is not a line of the file but this command
        print("error: " + re.sub(r"\n *at <frozen runpy>:\d+", "", str(e)))
        return 2
    return 0
