"""Which names of the language are implemented: writes docs/names.md.

    python tests/docs/names.py

The names stand in data/names.txt. A name is looked up; an expression is traced in a kernel and
lowered to CUDA, or evaluated on the host. NotImplementedError, AttributeError and the TypeError of
a dtype that is none mean that it is not there, any other exception that this list is wrong."""

import re
from pathlib import Path

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._names import Missing

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "docs" / "names.md"
HEAD = """# Names

This page lists the names of the language and whether they are implemented.
`python tests/docs/names.py` generates it from the code, and a test fails if it is out of date.
Names with arguments were traced in a kernel and lowered to CUDA with arrays of common dtypes.
[gaps.md](../pallas_mgpu/gaps.md) lists missing dtypes, layouts and options. For names of JAX's host
side (`jax.jit`, `jax.random`, transfers), use NumPy or the array library whose arrays you pass to
kernels.
"""
SPACE = {
    "plgpu": plgpu,
    "pl": pl,
    "lax": lax,
    "jnp": jnp,
    "nn": nn,
    "f32": np.dtype(np.float32),
}
OPERANDS = {
    "x": ((64, 128), "float32"),
    "y": ((64, 128), "float32"),
    "m": ((128, 64), "float32"),
    "h": ((64, 128), "bfloat16"),
    "v": ((64,), "float32"),
    "i": ((64, 128), "int32"),
    "j": ((64, 128), "int32"),
    "u": ((64, 128), "uint32"),
    "b": ((64, 128), "bool"),
    "k": ((64, 128), "int8"),
    "s": ((), "float32"),
    "t": ((), "float32"),
    "n": ((), "int32"),
    "o": ((), "int32"),
}


def read():
    """[(title, [(name, expression or None, on the host)])]"""
    tables = []
    for line in (HERE / "data" / "names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            tables.append((line[3:], []))
        elif line and not line.startswith("#"):
            host = line.startswith("host: ")
            name, given, expression = line.removeprefix("host: ").partition(" = ")
            tables[-1][1].append((name, expression if given else None, host))
    return tables


def in_kernel(expression):
    """Trace and lower a kernel that stores the value of an expression."""
    code = compile(expression, "<name>", "eval")
    results = []

    def body(*refs):
        operands = dict(zip(OPERANDS, refs))
        used = set(re.findall(r"\w+", expression))
        names = {k: r[...] for k, r in operands.items() if k in used}
        value = eval(code, {**SPACE, **names, "ref": operands["x"]})  # noqa: S307
        leaves = [z for z in plgpu.tree.leaves(value) if isinstance(z, plgpu.Array)]
        results[:] = [plgpu.ShapeDtypeStruct(z.shape, z.dtype) for z in leaves]
        for z, out in zip(leaves, refs[len(operands) :]):
            out[...] = z

    specs = [plgpu.ShapeDtypeStruct(*spec) for spec in OPERANDS.values()]
    for _ in range(2):  # the first time tells what the results are
        kernel = plgpu.kernel(body, out_type=tuple(results), grid=(2,), grid_names=("g",))
        low = kernel.lower(*specs)
    low.as_text("cuda")


def on_host(expression):
    a = np.arange(16, dtype=np.float32).reshape(4, 4)
    return eval(expression, {**SPACE, "a": a, "c": a + 1})  # noqa: S307


def gap(name, expression, host):
    """None for what is implemented, else why not and what to use."""
    try:
        if expression is None and not name[0].islower():
            expression = name
        if expression is None and name.split(".")[0] in SPACE:
            found = on_host(name)
            return str(found)[1:-1] if isinstance(found, Missing) else None
        if host:
            found = on_host(expression)
        else:
            in_kernel(expression or name)
    except (NotImplementedError, AttributeError) as e:
        return str(e).splitlines()[0]
    except TypeError as e:
        if not str(e).startswith("dtype: got"):
            raise
        return str(e).splitlines()[0]
    return None


def short(why):
    """What to use, where the message says so."""
    why = re.sub(r"^Unimplemented primitive in Pallas Mosaic GPU lowering: \w+;? ?", "", why)
    why = re.sub(r"^[\w.]+ is not supported yet; ", "", why)
    gaps = "`python -m pallas_mgpu gaps`"
    why = re.split(rf" ?\((?:{gaps}|jnp\.|a member of)|; {gaps}|; accepted are", why)[0]
    return why.replace("|", "\\|")


def page():
    out, total, missing = [], 0, 0
    for title, names in read():
        out += ["", f"## {title}", "", "| name | implemented | otherwise |", "|---|---|---|"]
        for name, expression, host in names:
            why = gap(name, expression, host)
            total += 1
            missing += why is not None
            code = name.replace("|", "\\|")
            out.append(f"| `{code}` | {'no' if why else 'yes'} | {short(why) if why else ''} |")
    count = f"\n{total - missing} of {total} names are implemented.\n"
    return HEAD + count + "\n".join(out) + "\n"


if __name__ == "__main__":
    TABLE.write_text(page(), encoding="utf-8")
    print(f"wrote {TABLE}")
